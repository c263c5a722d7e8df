"""How two answers of one program differ, and what the numbers say of the cause: the words of `verify`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.errors import fail
from fshard.spec import describe

# How far two right answers may be apart. A sum in another order is off by roundings of its largest terms: by some eps
# of an element (rtol), and of the largest value of its leaf (a floor). float32 and float64 are summed in themselves,
# over thousands of terms; half precision in float32, and rounded once: hence 1000 and 100 eps, or 4 and 2.
#
# That is not enough where a leaf is small because large terms cancel: the gradient of a key's bias in attention is 0,
# and comes out as 1e-9 of noise, another one on each mesh. How large such noise may be, the results cannot tell (the
# largest leaf says nothing: second moments of 1e-8 stand beside a loss of 5). The program can: flip the last bit of
# every floating argument, and see how far each leaf moves. A leaf that moves by d when its arguments move by one
# rounding is not known better than to about d; there are a few times as many roundings inside, so 16 d is allowed (4 d
# of half precision). A wrong leaf is missed only where one rounding moves it by 1/16 of its error: where it is noise.
_NO_RATIO = "no constant ratio"
_USUAL = (
    "usual causes: a nonlinearity or a statistic of one rank's part; a mean of unequal counts; positions, targets or\n"
    "masks counted from 0 on each rank; a pvary or psum that is missing"
)
FULL, NAMED = 4, 3  # leaves told in full for each axis, and then by their names

_Same = Callable[[Tensor, Tensor], bool]
_Order = tuple[float, float]


@dataclass(frozen=True)
class Allowed:
    rtol: float | None
    atol: float | None
    bitwise: bool

    def off(self, x: Tensor, y: Tensor, noise: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
        """Where `x` is too far from `y`, of a leaf of that dtype; NaN is from everything."""
        dtype = dtype or y.dtype
        if self.bitwise or not (dtype.is_floating_point or dtype.is_complex):
            return x != y
        x, y, (many, few, times) = wide(x), wide(y), _eps(dtype)
        floor = max(few * largest(y), times * noise) if self.atol is None else self.atol
        difference = (x - y).abs()
        near = difference <= (many if self.rtol is None else self.rtol) * y.abs() + floor
        return (x != y) & ~(near & torch.isfinite(difference))


@dataclass(frozen=True)
class Difference:
    """A leaf that differs where `axes` are collapsed: by its values, or for the reason `why`."""

    leaf: int
    axes: tuple[str, ...]
    why: str = ""
    x: Tensor | None = None
    y: Tensor | None = None

    def beyond(self, allowed: Allowed, noise: float) -> bool:
        return self.x is None or self.y is None or bool(allowed.off(self.x, self.y, noise).any())

    def unsteady(self, again: Any, allowed: Allowed) -> bool:
        """Whether another run gave another value; NaN again is no other."""
        return self.x is not None and bool((allowed.off(again, self.x) & ~(again.isnan() & self.x.isnan())).any())


def compare(got: Any, want: Any, axes: tuple[str, ...], allowed: Allowed) -> tuple[list[Difference], float]:
    """What differs, and the largest relative error of what does not."""
    if tree.structure(got) != tree.structure(want):
        return [Difference(-1, axes, f"{tree.structure(got)} is not {tree.structure(want)}")], 0.0
    found, worst = [], 0.0
    for i, (a, b) in enumerate(zip(tree.leaves(got), tree.leaves(want), strict=True)):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if type(a) is not type(b) or a != b:
                found.append(Difference(i, axes, f"{a!r} is not {b!r}"))
        elif a.shape != b.shape or a.dtype != b.dtype:
            found.append(Difference(i, axes, f"{describe(a.dtype, a.shape)} is not {describe(b.dtype, b.shape)}"))
        elif not torch.equal(a, b):
            error = _relative(a, b)
            default = allowed.atol is None and not allowed.bitwise
            if not (default and error <= _eps(a.dtype)[1]) and bool(allowed.off(a, b).any()):
                found.append(Difference(i, axes, x=a, y=b))
            elif math.isfinite(error):
                worst = max(worst, error)
    return found, worst


def wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _eps(dtype: torch.dtype) -> tuple[float, float, float]:
    """The default rtol, the default floor for a largest value of 1, and how often what a rounding moves."""
    eps = torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0
    return (1000 * eps, 100 * eps, 16.0) if eps < 1e-6 else (4 * eps, 2 * eps, 4.0)


def largest(x: Tensor) -> float:
    """The largest finite magnitude."""
    size = float(torch.linalg.vector_norm(wide(x), math.inf)) if x.numel() else 0.0
    return size if math.isfinite(size) else float(torch.where(torch.isfinite(x), x.abs(), 0).max())


def _relative(x: Tensor, y: Tensor) -> float:
    """The largest error by the largest value; infinite where an error is not finite."""
    both = (wide(x) - wide(y), wide(y))
    error, scale = (float(torch.linalg.vector_norm(v, math.inf)) if v.numel() else 0.0 for v in both)
    return error / scale if scale and math.isfinite(error / scale) else math.inf


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + ", ..." * (len(names) > NAMED)


def tell(
    name: str, mesh: dict[str, int], found: list[Difference], names: list[str], allowed: Allowed, moved: list[float]
) -> str:
    """A paragraph for each axis, or for axes that tell one story; for all axes at once only of other leaves."""
    single = {d.leaf for d in found if len(d.axes) == 1}
    blamed: dict[Any, list[str]] = {}
    for d in found:
        if len(d.axes) == 1 or d.leaf not in single:
            order, lines = _story(d, mesh, allowed, moved[d.leaf])
            blamed.setdefault((order, d.leaf, tuple(lines)), []).append(" and ".join(map(repr, d.axes)))
    paragraphs: dict[str, list[tuple[str, Sequence[str]]]] = {}
    for (_, leaf, lines), axes in sorted(blamed.items()):
        paragraphs.setdefault(" or ".join(axes), []).append((names[leaf], lines))
    texts = []
    for by, told in sorted(paragraphs.items()):
        what, notes = f"{told[0][0]} of {name} changes", told[0][1]
        if len(told) > 1:
            what = f"{len(told)} of {len(names) - 1} leaves of {name} change"
            notes = [line for name, lines in told[:FULL] for line in (name, *[f"  {text}" for text in lines])]
            notes += [f"and {len(told) - FULL} more: {listed([name for name, _ in told[FULL:]])}"] * (len(told) > FULL)
        if any(line.startswith(_NO_RATIO) for _, lines in told[:FULL] for line in lines):
            notes = [*notes, _USUAL]
        texts.append(str(fail(f"verify: {what} with the mesh: collapsing {by} gives another answer", *notes)))
    return "\n".join(texts)


def _story(d: Difference, sizes: dict[str, int], allowed: Allowed, noise: float) -> tuple[_Order, list[str]]:
    """A leaf's place among those to tell, by constant ratios, then by size; and what its numbers say."""
    if d.x is None or d.y is None:
        return (0, 0), [d.why]
    x, y, dtype = wide(d.x), wide(d.y), d.y.dtype
    same: _Same = lambda a, b: not bool(allowed.off(a, b, noise, dtype).any())  # noqa: E731
    off, error = allowed.off(d.x, d.y, noise), torch.where(x == y, 0, x - y)
    count, order = f"{int(off.sum())} of {x.numel()} elements", (2.0, -float(f"{_relative(x, y):.3g}"))
    lost = off & ~torch.isfinite(error)
    at = int((lost if bool(lost.any()) else error.abs()).to(torch.float64).argmax())
    mine, theirs = (f"{v.flatten()[at].item():.6g}" for v in (d.x.to(x.dtype), d.y.to(y.dtype)))
    place = f", at {[int(i) for i in torch.unravel_index(torch.tensor(at), x.shape)]}" if x.ndim else ""
    if bool(lost.any()):
        count = f"{int(lost.sum())} of {x.numel()} elements are not finite numbers"
        return (0, 2), [f"{count}: {mine} against {theirs}{place}"]
    if not (dtype.is_floating_point or dtype.is_complex):
        return (0, 3), [f"{count} differ: {mine} against {theirs}{place}"]
    lines = [f"{count} differ"] * allowed.bitwise
    lines.append(f"largest error {float(error.abs().max()):.2g}, of {mine} against {theirs}{place}")
    causes = _causes(d.axes, sizes)
    for where in (torch.ones_like(off), off):
        ratio = _ratio(x, y, where, causes, same)
        if ratio is not None:
            these = f"{count} are wrong{_box(off)}, each" if where is off else "every value is"
            lines.append(f"{these} {ratio:.4g} times what it should be")
            return (1.0, order[1]), lines + [text for factor, text in causes.items() if factor == ratio]
    for i in (i for i in range(x.ndim) if x.shape[i] > 1):
        if float((error - error.mean(i, keepdim=True)).abs().max()) < 1e-2 * float(error.abs().max()):
            return order, [*lines, f"the error is the same all along dim {i}, as of a bias that every rank adds"]
    return order, [*lines, f"{_NO_RATIO}{_box(off)}" if largest(y) else "every value should be 0"]


def _causes(axes: Sequence[str], sizes: dict[str, int]) -> dict[float, str]:
    """The factors that a mesh makes, each with what usually makes it."""
    found = {0.0: "the value, or its gradient, is lost on the way"}
    for group in (g for k in range(len(axes)) for g in itertools.combinations(axes, k + 1)):
        n, name = math.prod(sizes[a] for a in group), " x ".join(group)
        for factor, cause in (
            (n, f"{n} is the size of {name}: a psum of what is a total already, or where a mean was meant"),
            (1 / n, f"1/{n}, the size of {name}: a psum is missing, or a mean is taken of a total"),
            (n * n, f"{n * n} is the square of {n}, the size of {name}: a sum too many, twice or inside a square"),
            (1 / n**2, f"1/{n * n}, the square of {n}, the size of {name}: a mean too many, twice or inside a square"),
            (n**0.5, f"the square root of {n}, the size of {name}: a norm counts what every rank has"),
        ):
            found.setdefault(factor, cause)
    return found


def _ratio(x: Tensor, y: Tensor, where: Tensor, factors: Iterable[float], same: _Same) -> float | None:
    """The factor of `x` over `y` at every place in `where`, if there is one."""
    a, b = x[where], y[where]
    big = (b.abs() > 1e-3 * largest(b)) & torch.isfinite(a / b)  # the others are mostly rounding
    if not bool(big.any()):
        return None
    middle = float((a[big] / b[big]).real.median())
    likely = [r for r in factors if abs(middle - r) <= 1e-2 * r] + [middle] * (int(big.sum()) > 1)
    left = {r: torch.where(where, r * y, y) for r in likely}  # a factor explains nearly all of the error
    return next((r for r, z in left.items() if same(x, z) and largest(x - z) <= 0.1 * largest(x - y)), None)


def _box(off: Tensor) -> str:
    """The smallest box around those elements, unless it is the whole leaf."""
    if bool(off.all()) or not off.ndim:
        return ""
    at = off.nonzero()
    ends = list(zip(at.amin(0).tolist(), (at.amax(0) + 1).tolist(), off.shape, strict=True))
    box = ", ".join(":" if hi - lo == n else f"{lo}:{hi}" for lo, hi, n in ends)
    return f" in [{box}]" if set(box) - set(":, ") else ""


__all__ = ["Allowed", "Difference", "compare", "largest", "listed", "tell", "wide"]
