"""Differences between two answers of one program, and the likely causes that the numbers show: for `verify`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.errors import fail, join_limited
from fshard.spec import describe

# Tolerance between two right answers.
#
# A sum in another order differs by roundings of its largest terms: by some eps of an element (rtol), and by some eps of
# the largest value of its leaf (a floor). float32 and float64 are summed in that precision, over thousands of
# terms; half precision is summed in float32 and rounded once. Hence 1000 and 100 eps, or 4 and 2.
#
# That is not enough where a leaf is small because large terms cancel (the gradient of a key's bias in attention is 0,
# and is computed as 1e-9 of noise, different on each mesh), nor where a leaf of float32 is computed in bfloat16. The
# results cannot show how large such noise may be: neither the dtype of a leaf nor the other leaves show what it was
# computed from. The program can. It runs again with other last bits in its arguments and in the result of every
# operation, forward and backward (`rounding.py`), and the noise of a leaf is its largest change d between such runs:
#
#   Let y(r) be the leaf as a function of the roundings r_i of its operations, each of at most half a unit in the last
#   place of the dtype that it was rounded to. To first order y(r) = y + sum_i J_i r_i, and two meshes have different r.
#   Two runs with other bits have the same J, and their r_i differ by 1 to 3 units (of half precision by 1, in 7 of 8
#   values). So d is about twice the difference of two meshes, or more. J belongs to the program: a leaf of float32 that
#   was computed in bfloat16 changes by 2^-8, a parameter that such a gradient was added to by 2^-8 of the step, and a
#   value that stayed in float32 by 2^-23.
#
# d is the largest change between three runs, and 4 d is allowed. (In 120 steps with random arguments, in six forms of
# half precision, two meshes differed by up to 1.0 d, and by 0.17 d in the median.) A wrong leaf is missed only where
# its error is less than 4 times what rounding changes: where it is noise. A second psum or a missing one is an error of
# 50 % or more; 4 d of a gradient in bfloat16 is some 5 %.
#
# Integers have no tolerance, but a number that was rounded to an integer may differ by d.
#
# A leaf that updates an argument, w - lr g, hides an error of its change if lr g is small. So of such a leaf only 1 %
# of the largest change is allowed, and some eps of an element, by which the last sum rounds.
_NO_RATIO = "no constant ratio"
_USUAL = (
    "usual causes: a nonlinearity or a statistic of one rank's part; a mean of unequal counts; positions, targets or\n"
    "masks counted from 0 on each rank; a gradient that is not summed, for want of a pvary"
)
_NEAR_ZERO = [  # the noise is measured to first order, and a quotient g / |g| has none near 0
    "the first step of Adam has the sign of a gradient, whatever its size: near 0, the sign of its rounding.",
    "return the gradients too, and compare those; or verify in float32",
]
FULL, NAMED = 4, 3  # leaves of each axis described in full, and then by name only

_Equal = Callable[[Tensor, Tensor], bool]
_SortKey = tuple[float, float]


@dataclass(frozen=True)
class Tolerance:
    """Allowed error of a leaf; the defaults of `rtol` and `atol` depend on its dtype and on the noise in it."""

    rtol: float | None = None
    atol: float | None = None
    bitwise: bool = False
    change: float = math.inf  # the largest change of the leaf from the argument that it is a new value of

    @property
    def measures_noise(self) -> bool:
        return self.atol is None and not self.bitwise

    def mask(self, x: Tensor, y: Tensor, noise: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
        """Return where `x` differs from `y` by more than is allowed in a leaf of that dtype. NaN differs from NaN."""
        dtype = dtype or y.dtype
        if self.bitwise:
            return x != y
        if not (dtype.is_floating_point or dtype.is_complex):  # rounded to an integer: a step is all or nothing
            return (x != y) & ((widen(x) - widen(y)).abs() > noise)
        x, y, (rtol, floor, ulps) = widen(x), widen(y), _defaults(dtype)
        atol = floor * max_finite_magnitude(y) if self.atol is None else self.atol
        allowed = (rtol if self.rtol is None else self.rtol) * y.abs() + atol
        if self.rtol is None and self.atol is None:
            allowed = torch.minimum(allowed, ulps * y.abs() + 0.01 * self.change)
        difference = (x - y).abs()
        near = difference <= (allowed + 4 * noise if self.atol is None else allowed)
        return (x != y) & ~(near & torch.isfinite(difference))

    def differs(self, x: Tensor, y: Tensor) -> bool:
        """Return whether any element differs by more than is allowed. NaN equals NaN."""
        return bool((self.mask(x, y) & ~(x.isnan() & y.isnan())).any())


@dataclass(frozen=True)
class Difference:
    """A leaf that differs where the sizes of axes are changed: by its values, or for the reason `why`."""

    leaf: int
    sizes: dict[str, tuple[int, int]]  # of each axis that is changed: before, and on the mesh that it is compared with
    why: str = ""
    x: Tensor | None = None
    y: Tensor | None = None

    @property
    def collapses(self) -> bool:
        return all(size == 1 for _, size in self.sizes.values())

    @property
    def axes(self) -> str:
        """The axes, as errors name them."""
        changes = "" if self.collapses else " from {} to {}"
        return " and ".join(f"{axis!r}" + changes.format(*sizes) for axis, sizes in self.sizes.items())

    def exceeds(self, tolerance: Tolerance, noise: float) -> bool:
        return self.x is None or self.y is None or bool(tolerance.mask(self.x, self.y, noise).any())

    def is_certain(self, tolerance: Tolerance, noise: float) -> bool:
        """Return whether not even a noise 10000 times as large could explain the difference."""
        return self.x is None or (noise > 0 and self.exceeds(tolerance, 1e4 * noise))

    def changed_in(self, rerun: Any, tolerance: Tolerance) -> bool:
        """Return whether another run on the same mesh gave another value."""
        return self.x is not None and tolerance.differs(rerun, self.x)


def compare(
    got: Any, want: Any, sizes: dict[str, tuple[int, int]], tolerances: Sequence[Tolerance]
) -> tuple[list[Difference], float]:
    """Return the leaves that differ, and the largest relative error of the others."""
    if tree.structure(got) != tree.structure(want):
        return [Difference(-1, sizes, f"{tree.structure(got)} is not {tree.structure(want)}")], 0.0
    differences, worst = [], 0.0
    for i, (a, b) in enumerate(zip(tree.leaves(got), tree.leaves(want), strict=True)):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if type(a) is not type(b) or a != b:
                differences.append(Difference(i, sizes, f"{a!r} is not {b!r}"))
        elif a.shape != b.shape or a.dtype != b.dtype:
            differences.append(Difference(i, sizes, f"{describe(a)} is not {describe(b)}"))
        elif not torch.equal(a, b):
            error = _relative_error(a, b)
            near = tolerances[i].measures_noise and tolerances[i].change == math.inf and error <= _defaults(a.dtype)[1]
            if not near and bool(tolerances[i].mask(a, b).any()):
                differences.append(Difference(i, sizes, x=a, y=b))
            elif math.isfinite(error):
                worst = max(worst, error)
    return differences, worst


def widen(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _defaults(dtype: torch.dtype) -> tuple[float, float, float]:
    """Return the default rtol, the default atol for a largest value of 1, and the rtol of one sum."""
    eps = torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0
    return (1000 * eps, 100 * eps, 4 * eps) if eps < 1e-6 else (4 * eps, 2 * eps, 4 * eps)


def max_finite_magnitude(x: Tensor) -> float:
    size = float(torch.linalg.vector_norm(widen(x), math.inf)) if x.numel() else 0.0
    return size if math.isfinite(size) else float(torch.where(torch.isfinite(x), x.abs(), 0).max())


def _relative_error(x: Tensor, y: Tensor) -> float:
    """Return the largest error divided by the largest value; infinite where an error is not finite."""
    both = (widen(x) - widen(y), widen(y))
    error, scale = (float(torch.linalg.vector_norm(v, math.inf)) if v.numel() else 0.0 for v in both)
    return error / scale if scale and math.isfinite(error / scale) else math.inf


def describe_differences(
    name: str, differences: list[Difference], names: list[str], evidence: Sequence[Evidence]
) -> str:
    """Describe what differs, in a paragraph for each axis, or for axes with the same description.

    A leaf is described for all axes together only if no single axis changes it.
    """
    single = {d.leaf for d in differences if len(d.sizes) == 1}
    axes_of: dict[Any, list[Difference]] = {}
    for d in differences:
        if len(d.sizes) == 1 or d.leaf not in single:
            order, lines = _explain(d, evidence[d.leaf])
            axes_of.setdefault((order, d.leaf, tuple(lines), d.collapses), []).append(d)
    paragraphs: dict[str, list[tuple[str, Sequence[str]]]] = {}
    for (_, leaf, lines, collapses), same in sorted(axes_of.items(), key=lambda item: item[0]):
        verb = "collapsing" if collapses else "changing"
        paragraphs.setdefault(f"{verb} {' or '.join(d.axes for d in same)}", []).append((names[leaf], lines))
    texts = []
    for axes_text, leaves in sorted(paragraphs.items()):
        what, notes = f"{leaves[0][0]} of {name} changes", leaves[0][1]
        if len(leaves) > 1:
            what = f"{len(leaves)} of {len(names) - 1} leaves of {name} change"
            notes = [line for leaf, lines in leaves[:FULL] for line in (leaf, *(f"  {text}" for text in lines))]
            rest = [leaf_name for leaf_name, _ in leaves[FULL:]]
            notes += [f"and {len(rest)} more: {join_limited(rest, NAMED)}"] * bool(rest)
        if any(line.startswith(_NO_RATIO) for _, lines in leaves[:FULL] for line in lines):
            notes = [*notes, _USUAL]
        texts.append(str(fail(f"verify: {what} with the mesh: {axes_text} gives a different answer", *notes)))
    return "\n".join(texts)


@dataclass(frozen=True)
class Evidence:
    """Facts about a leaf that its errors are explained by."""

    tolerance: Tolerance
    noise: float = 0.0
    before: tuple[str, Tensor] | None = None  # the argument that the leaf is a new value of, by its name
    sums: Callable[[Iterable[str]], tuple[Tensor, int] | None] = lambda _: None  # of the replicas on the ranks of axes


def _explain(d: Difference, evidence: Evidence) -> tuple[_SortKey, list[str]]:
    """Return a sort key, constant ratios before others and large errors before small, and what the numbers show."""
    if d.x is None or d.y is None:
        return (0, 0), [d.why]
    x, y, dtype, tolerance, noise = widen(d.x), widen(d.y), d.y.dtype, evidence.tolerance, evidence.noise
    equal: _Equal = lambda a, b: not bool(tolerance.mask(a, b, noise, dtype).any())  # noqa: E731
    wrong, error = tolerance.mask(d.x, d.y, noise), torch.where(x == y, 0, x - y)
    count, order = f"{int(wrong.sum())} of {x.numel()} elements", (2.0, -float(f"{_relative_error(x, y):.3g}"))
    not_finite = wrong & ~torch.isfinite(error)
    at = int((not_finite if bool(not_finite.any()) else error.abs()).to(torch.float64).argmax())
    value, expected = (f"{v.flatten()[at].item():.6g}" for v in (d.x.to(x.dtype), d.y.to(y.dtype)))
    place = f", at {[int(i) for i in torch.unravel_index(torch.tensor(at), x.shape)]}" if x.ndim else ""
    if bool(not_finite.any()):
        count = f"{int(not_finite.sum())} of {x.numel()} elements are not finite numbers"
        return (0, 2), [f"{count}: {value} should be {expected}{place}"]
    if not (dtype.is_floating_point or dtype.is_complex):
        return (0, 3), [f"{count} differ: {value} should be {expected}{place}"]
    lines = [f"{count} differ"] * tolerance.bitwise
    lines.append(f"largest error {float(error.abs().max()):.2g}: {value} should be {expected}{place}")
    factors = _mesh_factors(d.sizes)
    if found := _constant_ratio(x, y, wrong, factors, equal):
        ratio, mask = found
        which = f"{count} are wrong{_format_box(wrong)}, each" if mask is wrong else "every value is"
        lines.append(f"{which} {ratio:.4g} times what it should be")
        return (1.0, order[1]), lines + [text for factor, text in factors.items() if factor == ratio]
    for i in (i for i in range(x.ndim) if x.shape[i] > 1):
        if float((error - error.mean(i, keepdim=True)).abs().max()) < 1e-2 * float(error.abs().max()):
            return order, [*lines, f"the error is the same all along dim {i}, as of a bias that every rank adds"]
    if not max_finite_magnitude(y):
        return order, [*lines, "every value should be 0"]
    if evidence.before is not None:
        name, old = evidence.before[0], widen(evidence.before[1])
        found = _constant_ratio(x - old, y - old, wrong, factors, lambda a, b: equal(a + old, b + old))
        if found and (ratio := found[0]) >= 0:
            lines.append(f"its change from {name} is {ratio:.4g} times what it should be")
            return (1.0, order[1]), lines + [text for factor, text in factors.items() if factor == ratio]
        step, expected_step = (x - old)[wrong], (y - old)[wrong]
        if max_finite_magnitude(step + expected_step) <= 1e-2 * max_finite_magnitude(expected_step):
            lines.append(f"the change of {count} from {name} has the other sign{_format_box(wrong)}")
            return order, lines + _NEAR_ZERO * bool(10 * int(wrong.sum()) <= x.numel())
    missing = _missing_sum(y, d.sizes, evidence, equal)
    return order, [*lines, missing or f"{_NO_RATIO}{_format_box(wrong)}"]


def _missing_sum(y: Tensor, axes: Iterable[str], evidence: Evidence, equal: _Equal) -> str:
    """Return the cause of an error that a sum, or a mean, of the values of the ranks would mend; `""` if none would."""
    found = evidence.sums(axes)
    if found is None:
        return ""
    (total, n), ranks = found, f"on the ranks of {' and '.join(map(repr, axes))} is right"
    missing = "a psum is missing, or for a gradient a pvary"
    if equal(total, y):
        return f"the sum of the values {ranks}: {missing}"
    if equal(total / n, y):
        return f"the mean of the values {ranks}: a pmean is missing"
    if evidence.before is not None and equal(total - (n - 1) * widen(evidence.before[1]), y):
        return f"the sum of the changes from {evidence.before[0]} {ranks}: {missing}"
    return ""


def _mesh_factors(sizes: dict[str, tuple[int, int]]) -> dict[float, str]:
    """Return the factors that a change of sizes can introduce, each with its usual cause."""
    ratios: dict[Fraction, list[str]] = {}
    for group in (g for k in range(len(sizes)) for g in itertools.combinations(sizes, k + 1)):
        n = Fraction(math.prod(sizes[a][0] for a in group), math.prod(sizes[a][1] for a in group))
        what = "size" if all(sizes[a][1] == 1 for a in group) else "ratio of the sizes"
        ratios.setdefault(n, []).append(f"the {what} of {' x '.join(group)}")
    factors = {0.0: "the value, or its gradient, is missing"}
    for n, of in ratios.items():
        if n == 1:
            continue
        size = " or ".join(of)
        square = f"the square of {n}, {size}"
        root = f"the square root of {n}, {size}: a norm counts replicated values on every rank"
        if n**0.5 in (2, 4, 0.5, 0.25):  # a loss scale is multiplied by powers of 2
            root += "; or each rank adjusts a scale, as of a loss, by its part"
        for factor, cause in (
            (n, f"{n} is {size}: a psum of a value that is already a total, or where a mean was meant"),
            (1 / n, f"{1 / n} is 1 / ({size}): a psum is missing, or a pmean is used in place of a psum"),
            (n * n, f"{n * n} is {square}: one sum too many, twice or inside a square"),
            (1 / n**2, f"{1 / n**2} is 1 / ({square}): one mean too many, twice or inside a square"),
            (n**0.5, root),
        ):
            factors.setdefault(float(factor), cause)
    return factors


def _constant_ratio(
    x: Tensor, y: Tensor, wrong: Tensor, factors: Iterable[float], equal: _Equal
) -> tuple[float, Tensor] | None:  # fmt: skip
    """Return the factor of `x` over `y` that is the same for all elements, or all `wrong` ones, and a mask of these."""
    for mask in (torch.ones_like(wrong), wrong):
        a, b = x[mask], y[mask]
        large = (b.abs() > 1e-3 * max_finite_magnitude(b)) & torch.isfinite(a / b)  # smaller values are mostly rounding
        ratios = (a[large] / b[large]).real
        median = float(ratios.median()) if len(ratios) else math.nan
        for r in [r for r in factors if abs(median - r) <= 1e-2 * r] + [median] * (len(ratios) > 1):
            scaled = torch.where(mask, r * y, y)
            explained = max_finite_magnitude(x - scaled) <= 0.1 * max_finite_magnitude(x - y)
            if explained and equal(x, scaled):
                return r, mask
    return None


def _format_box(mask: Tensor) -> str:
    """Format the smallest box around those elements, `""` if it is the full leaf."""
    if bool(mask.all()) or not mask.ndim:
        return ""
    at = mask.nonzero()
    bounds = list(zip(at.amin(0).tolist(), (at.amax(0) + 1).tolist(), mask.shape, strict=True))
    box = ", ".join(":" if hi - lo == n else f"{lo}:{hi}" for lo, hi, n in bounds)
    return f" in [{box}]" if set(box) - set(":, ") else ""
