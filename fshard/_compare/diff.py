"""Differences between two answers of one program, and the likely causes that the numbers show: for `verify`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.errors import fail, join_limited
from fshard.spec import describe

# Tolerance between two right answers.
#
# A sum in another order differs by roundings of its largest terms: by some eps of an element (rtol), and by some eps of
# the largest value of its leaf (a floor). float32 and float64 are summed in their own precision, over thousands of
# terms; half precision is summed in float32 and rounded once. Hence 1000 and 100 eps, or 4 and 2.
#
# That is not enough where a leaf is small because large terms cancel: the gradient of a key's bias in attention is 0,
# and is computed as 1e-9 of noise, different on each mesh. The results cannot show how large such noise may be (the
# largest leaf shows nothing: second moments of 1e-8 may be next to a loss of 5). The program can: flip the last bit of
# every floating argument, and measure the change d of each leaf. A leaf that changes by d when its arguments change by
# one rounding is not known better than to about d. The program rounds a few times as often, so 16 d is allowed (4 d of
# half precision). A wrong leaf is missed only where one rounding changes it by 1/16 of its error: where it is noise.
_NO_RATIO = "no constant ratio"
_USUAL = (
    "usual causes: a nonlinearity or a statistic of one rank's part; a mean of unequal counts; positions, targets or\n"
    "masks counted from 0 on each rank; a pvary or psum that is missing"
)
FULL, NAMED = 4, 3  # leaves of each axis described in full, and then by name only

_Equal = Callable[[Tensor, Tensor], bool]
_SortKey = tuple[float, float]


@dataclass(frozen=True)
class Tolerance:
    """Allowed error of a leaf; the defaults of `rtol` and `atol` depend on its dtype and on the noise in it."""

    rtol: float | None
    atol: float | None
    bitwise: bool

    def mask(self, x: Tensor, y: Tensor, noise: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
        """Return where `x` differs from `y` by more than is allowed in a leaf of that dtype. NaN differs from NaN."""
        dtype = dtype or y.dtype
        if self.bitwise or not (dtype.is_floating_point or dtype.is_complex):
            return x != y
        x, y, (rtol, floor, noise_factor) = widen(x), widen(y), _defaults(dtype)
        atol = max(floor * max_finite_magnitude(y), noise_factor * noise) if self.atol is None else self.atol
        difference = (x - y).abs()
        near = difference <= (rtol if self.rtol is None else self.rtol) * y.abs() + atol
        return (x != y) & ~(near & torch.isfinite(difference))

    def differs(self, x: Tensor, y: Tensor) -> bool:
        """Return whether any element differs by more than is allowed. NaN equals NaN."""
        return bool((self.mask(x, y) & ~(x.isnan() & y.isnan())).any())


@dataclass(frozen=True)
class Difference:
    """A leaf that differs where `axes` are collapsed: by its values, or for the reason `why`."""

    leaf: int
    axes: tuple[str, ...]
    why: str = ""
    x: Tensor | None = None
    y: Tensor | None = None

    def exceeds(self, tolerance: Tolerance, noise: float) -> bool:
        return self.x is None or self.y is None or bool(tolerance.mask(self.x, self.y, noise).any())

    def changed_in(self, rerun: Any, tolerance: Tolerance) -> bool:
        """Return whether another run on the same mesh gave another value."""
        return self.x is not None and tolerance.differs(rerun, self.x)


def compare(got: Any, want: Any, axes: tuple[str, ...], tolerance: Tolerance) -> tuple[list[Difference], float]:
    """Return the leaves that differ, and the largest relative error of the others."""
    if tree.structure(got) != tree.structure(want):
        return [Difference(-1, axes, f"{tree.structure(got)} is not {tree.structure(want)}")], 0.0
    differences, worst = [], 0.0
    for i, (a, b) in enumerate(zip(tree.leaves(got), tree.leaves(want), strict=True)):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if type(a) is not type(b) or a != b:
                differences.append(Difference(i, axes, f"{a!r} is not {b!r}"))
        elif a.shape != b.shape or a.dtype != b.dtype:
            differences.append(Difference(i, axes, f"{describe(a.dtype, a.shape)} is not {describe(b.dtype, b.shape)}"))
        elif not torch.equal(a, b):
            error = _relative_error(a, b)
            default = tolerance.atol is None and not tolerance.bitwise
            if not (default and error <= _defaults(a.dtype)[1]) and bool(tolerance.mask(a, b).any()):
                differences.append(Difference(i, axes, x=a, y=b))
            elif math.isfinite(error):
                worst = max(worst, error)
    return differences, worst


def widen(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _defaults(dtype: torch.dtype) -> tuple[float, float, float]:
    """Return the default rtol, the default atol for a largest value of 1, and the factor on measured noise."""
    eps = torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0
    return (1000 * eps, 100 * eps, 16.0) if eps < 1e-6 else (4 * eps, 2 * eps, 4.0)


def max_finite_magnitude(x: Tensor) -> float:
    size = float(torch.linalg.vector_norm(widen(x), math.inf)) if x.numel() else 0.0
    return size if math.isfinite(size) else float(torch.where(torch.isfinite(x), x.abs(), 0).max())


def _relative_error(x: Tensor, y: Tensor) -> float:
    """Return the largest error divided by the largest value; infinite where an error is not finite."""
    both = (widen(x) - widen(y), widen(y))
    error, scale = (float(torch.linalg.vector_norm(v, math.inf)) if v.numel() else 0.0 for v in both)
    return error / scale if scale and math.isfinite(error / scale) else math.inf


def describe_differences(
    name: str, mesh: dict[str, int], differences: list[Difference], names: list[str], tolerance: Tolerance,
    noise: list[float],
) -> str:  # fmt: skip
    """Describe what differs, in a paragraph for each axis, or for axes with the same description.

    A leaf is described for all axes together only if no single axis changes it.
    """
    single = {d.leaf for d in differences if len(d.axes) == 1}
    axes_of: dict[Any, list[str]] = {}
    for d in differences:
        if len(d.axes) == 1 or d.leaf not in single:
            order, lines = _explain(d, mesh, tolerance, noise[d.leaf])
            axes_of.setdefault((order, d.leaf, tuple(lines)), []).append(" and ".join(map(repr, d.axes)))
    paragraphs: dict[str, list[tuple[str, Sequence[str]]]] = {}
    for (_, leaf, lines), axes in sorted(axes_of.items()):
        paragraphs.setdefault(" or ".join(axes), []).append((names[leaf], lines))
    texts = []
    for axes_text, leaves in sorted(paragraphs.items()):
        what, notes = f"{leaves[0][0]} of {name} changes", leaves[0][1]
        if len(leaves) > 1:
            what = f"{len(leaves)} of {len(names) - 1} leaves of {name} change"
            notes = [
                line for leaf_name, lines in leaves[:FULL] for line in (leaf_name, *[f"  {text}" for text in lines])
            ]
            rest = [leaf_name for leaf_name, _ in leaves[FULL:]]
            notes += [f"and {len(rest)} more: {join_limited(rest, NAMED)}"] * bool(rest)
        if any(line.startswith(_NO_RATIO) for _, lines in leaves[:FULL] for line in lines):
            notes = [*notes, _USUAL]
        texts.append(str(fail(f"verify: {what} with the mesh: collapsing {axes_text} gives another answer", *notes)))
    return "\n".join(texts)


def _explain(d: Difference, sizes: dict[str, int], tolerance: Tolerance, noise: float) -> tuple[_SortKey, list[str]]:
    """Return a sort key, constant ratios before others and large errors before small, and what the numbers show."""
    if d.x is None or d.y is None:
        return (0, 0), [d.why]
    x, y, dtype = widen(d.x), widen(d.y), d.y.dtype
    equal: _Equal = lambda a, b: not bool(tolerance.mask(a, b, noise, dtype).any())  # noqa: E731
    wrong, error = tolerance.mask(d.x, d.y, noise), torch.where(x == y, 0, x - y)
    count, order = f"{int(wrong.sum())} of {x.numel()} elements", (2.0, -float(f"{_relative_error(x, y):.3g}"))
    not_finite = wrong & ~torch.isfinite(error)
    at = int((not_finite if bool(not_finite.any()) else error.abs()).to(torch.float64).argmax())
    value, expected = (f"{v.flatten()[at].item():.6g}" for v in (d.x.to(x.dtype), d.y.to(y.dtype)))
    place = f", at {[int(i) for i in torch.unravel_index(torch.tensor(at), x.shape)]}" if x.ndim else ""
    if bool(not_finite.any()):
        count = f"{int(not_finite.sum())} of {x.numel()} elements are not finite numbers"
        return (0, 2), [f"{count}: {value} against {expected}{place}"]
    if not (dtype.is_floating_point or dtype.is_complex):
        return (0, 3), [f"{count} differ: {value} against {expected}{place}"]
    lines = [f"{count} differ"] * tolerance.bitwise
    lines.append(f"largest error {float(error.abs().max()):.2g}, of {value} against {expected}{place}")
    factors = _mesh_factors(d.axes, sizes)
    for mask in (torch.ones_like(wrong), wrong):
        ratio = _constant_ratio(x, y, mask, factors, equal)
        if ratio is not None:
            which = f"{count} are wrong{_format_box(wrong)}, each" if mask is wrong else "every value is"
            lines.append(f"{which} {ratio:.4g} times what it should be")
            return (1.0, order[1]), lines + [text for factor, text in factors.items() if factor == ratio]
    for i in (i for i in range(x.ndim) if x.shape[i] > 1):
        if float((error - error.mean(i, keepdim=True)).abs().max()) < 1e-2 * float(error.abs().max()):
            return order, [*lines, f"the error is the same all along dim {i}, as of a bias that every rank adds"]
    no_ratio = f"{_NO_RATIO}{_format_box(wrong)}" if max_finite_magnitude(y) else "every value should be 0"
    return order, [*lines, no_ratio]


def _mesh_factors(axes: Sequence[str], sizes: dict[str, int]) -> dict[float, str]:
    """Return the factors that a mesh can introduce, each with its usual cause."""
    factors = {0.0: "the value, or its gradient, is missing"}
    for group in (g for k in range(len(axes)) for g in itertools.combinations(axes, k + 1)):
        n, name = math.prod(sizes[a] for a in group), " x ".join(group)
        square = f"the square of {n}, the size of {name}"
        for factor, cause in (
            (n, f"{n} is the size of {name}: a psum of a value that is already a total, or where a mean was meant"),
            (1 / n, f"1/{n}, the size of {name}: a psum is missing, or a mean is taken of a total"),
            (n * n, f"{n * n} is {square}: one sum too many, twice or inside a square"),
            (1 / n**2, f"1/{n * n}, {square}: one mean too many, twice or inside a square"),
            (n**0.5, f"the square root of {n}, the size of {name}: a norm counts replicated values on every rank"),
        ):
            factors.setdefault(factor, cause)
    return factors


def _constant_ratio(x: Tensor, y: Tensor, mask: Tensor, factors: Iterable[float], equal: _Equal) -> float | None:
    """Return the factor of `x` over `y` that is the same wherever `mask` is true; None if there is none."""
    a, b = x[mask], y[mask]
    large = (b.abs() > 1e-3 * max_finite_magnitude(b)) & torch.isfinite(a / b)  # smaller values are mostly rounding
    if not bool(large.any()):
        return None
    median = float((a[large] / b[large]).real.median())
    candidates = [r for r in factors if abs(median - r) <= 1e-2 * r] + [median] * (int(large.sum()) > 1)
    for r in candidates:
        scaled = torch.where(mask, r * y, y)
        explained = max_finite_magnitude(x - scaled) <= 0.1 * max_finite_magnitude(x - y)
        if explained and equal(x, scaled):
            return r
    return None


def _format_box(mask: Tensor) -> str:
    """Format the smallest box around those elements, `""` if it is the whole leaf."""
    if bool(mask.all()) or not mask.ndim:
        return ""
    at = mask.nonzero()
    bounds = list(zip(at.amin(0).tolist(), (at.amax(0) + 1).tolist(), mask.shape, strict=True))
    box = ", ".join(":" if hi - lo == n else f"{lo}:{hi}" for lo, hi, n in bounds)
    return f" in [{box}]" if set(box) - set(":, ") else ""
