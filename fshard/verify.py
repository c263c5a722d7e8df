"""The law, checked: the mesh never changes the answer. Run a program on smaller meshes and compare every leaf."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import tree
from .errors import ShardingError, fail
from .mesh import Mesh, make_mesh
from .reshard import device_get
from .shard_map import ShardMapped
from .sharded import Sharded, device_put
from .spec import describe

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
FULL, NAMED = 4, 3  # leaves told in full for each axis, and then by their names

_Same = Callable[[Tensor, Tensor], bool]
_Order = tuple[float, float]


@dataclass(frozen=True)
class Verified:
    """What `verify` compared: the meshes, and the largest error found."""

    meshes: tuple[str, ...]
    leaves: int
    error: float  # relative to the largest value of its leaf
    noise: tuple[str, ...] = ()  # leaves that differ by more, and no more than roundings of the arguments change them

    def __repr__(self) -> str:
        if len(self.meshes) == 1:
            return f"verified: nothing, as {self.meshes[0]} has no axis to collapse"
        count = f"{self.leaves} leaves" if self.leaves != 1 else "1 leaf"
        noise = f"; only noise: {_listed(self.noise)}" if self.noise else ""
        where = "; ".join(self.meshes)
        return f"verified: {count} the same on {where} (largest relative error {self.error:.0e}{noise})"


def verify(
    f: ShardMapped, *args: Any, rtol: float | None = None, atol: float | None = None, bitwise: bool = False
) -> Verified:
    """Run `f` on its mesh, on the same mesh with each axis in turn collapsed to size 1, and with all; compare.

    Arguments are placed anew on every mesh, so donated ones are not lost. The smaller meshes are simulated, by every
    process, and not compiled. Where something differs, three more runs tell it from noise.

    Args:
        rtol: allowed error relative to each value; by default 1000 eps of the leaf's dtype, 4 eps of half precision.
        atol: allowed absolute error; by default 100 (or 2) eps of the largest value of the leaf, or what roundings of
            the arguments change, where that is more.
        bitwise: allow no difference at all.

    >>> total = shard_map(lambda x: psum(x.sum(), "data"), mesh=mesh, in_specs=(P("data"),), out_specs=P())
    >>> verify(total, torch.ones(8))
    verified: 1 leaf the same on data=2, model=2; data=1, model=2; data=2, model=1; data=1, model=1 (...)

    Raises ShardingError with the leaves that differ, by the axis to blame: the largest error, the ratio where it is
    constant, the likely cause. NaN equals nothing; another shape, dtype or tree is a difference.
    """
    if not isinstance(f, ShardMapped):
        raise fail(f"verify: {f!r} is a {type(f).__name__}", fix="verify what fs.shard_map gives")
    axes, allowed = f.mesh.axes, _Allowed(rtol, atol, bitwise)
    collapsed = [{**axes, a: 1} for a, n in axes.items() if n > 1]
    if len(collapsed) > 1:
        collapsed.append(dict.fromkeys(axes, 1))
    whole = device_get(args)
    got = _run(f, args, whole)
    names = [*(tree.show("result", path) for path, _ in tree.leaves_with_path(got)), "the tree of results"]
    plain, one = copy.copy(f), f
    plain._compile = False  # simulated ranks cannot be compiled
    found: list[_Difference] = []
    worst = 0.0
    for sizes in collapsed:
        one = plain.on(make_mesh(kind="simulated", device=f.mesh.device, **sizes), check="never")  # f was checked
        try:
            want = _run(one, args, whole)
        except Exception as e:
            raise fail(f"verify: {f._name} runs on {_sizes(axes)}, and raises on {_sizes(sizes)}",
                       f"{type(e).__name__}: {e}") from e  # fmt: skip
        more, error = _compare(got, want, tuple(a for a in axes if sizes[a] != axes[a]), allowed)
        found, worst = found + more, max(worst, error)
    noise: list[str] = []
    if any(_everyone(f.mesh, bool(found))):
        again, moved = _measure(f, one, args, whole, atol is None and not bitwise)
        real = [d for d in found if d.beyond(allowed, moved[d.leaf])]
        unsteady = [names[i] for i in sorted({d.leaf for d in found if d.unsteady(again[d.leaf], allowed)})]
        noise = [names[i] for i in sorted({d.leaf for d in found} - {d.leaf for d in real})]
        text = _tell(f, real, names, allowed, moved)
        if unsteady:
            text = str(fail(f"verify: {_listed(unsteady)} of {f._name}: another run on the same mesh gives another "
                            "answer", fix="draw with fs.random and a key, not with torch's own generator"))  # fmt: skip
        if told := next(filter(None, _everyone(f.mesh, text)), ""):
            raise ShardingError(told)
    return Verified(tuple(map(_sizes, [axes, *collapsed])), len(names) - 1, worst, tuple(noise))


def _run(f: ShardMapped, args: tuple[Any, ...], whole: tuple[Any, ...]) -> Any:
    """The results of `f`, as full tensors."""
    return device_get(f(*_placed(args, whole, f.mesh)))


def _placed(args: tuple[Any, ...], whole: tuple[Any, ...], mesh: Mesh) -> Any:
    """Copies of the arguments on `mesh`. One object at several places, a tie, stays one."""
    made: dict[int, Any] = {}

    def place(x: Any, full: Any) -> Any:
        if isinstance(full, Tensor) and id(x) not in made:
            made[id(x)] = device_put(full, x.spec, mesh) if isinstance(x, Sharded) else full.clone()
        return made.get(id(x), x)

    return tree.map(place, args, whole)


def _everyone(mesh: Mesh, mine: Any) -> list[Any]:
    """What each process has, on every one of them: so that all go one way."""
    everyone = [mine] * (mesh.size if mesh.kind == "process" else 1)
    if len(everyone) > 1:
        dist.all_gather_object(everyone, mine)
    return everyone


def _measure(f: ShardMapped, one: ShardMapped, args: Any, whole: Any, nudge: bool) -> tuple[list[Any], list[float]]:
    """The results of another run of `f`, and how far a rounding of the arguments moves each leaf, on either mesh."""
    again = tree.leaves(_run(f, args, whole))
    moved = [0.0] * (len(again) + 1)
    for g in (f, one) if nudge else ():
        try:
            before = again if g is f else tree.leaves(_run(g, args, whole))
            after = tree.leaves(_run(g, args, tree.map(_nudged, whole)))
        except Exception:  # a program may refuse such arguments: then nothing is learned
            continue
        for i, (a, b) in enumerate(zip(before, after, strict=False)):
            if i < len(again) and isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape:
                moved[i] = max(moved[i], _largest(_wide(a) - _wide(b)))
    return again, moved


def _nudged(x: Any) -> Any:
    """The last bit of every float flipped: a rounding, the same for equal values, so that ties stay ties."""
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        return x
    if x.is_complex():
        return torch.view_as_complex(_nudged(torch.view_as_real(x.resolve_conj())))
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    flipped = (x.detach().contiguous().view(bits) ^ 1).view(x.dtype)
    return torch.where((x == 0) | ~torch.isfinite(x), x, flipped)


@dataclass(frozen=True)
class _Allowed:
    rtol: float | None
    atol: float | None
    bitwise: bool

    def off(self, x: Tensor, y: Tensor, noise: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
        """Where `x` is too far from `y`, of a leaf of that dtype; NaN is from everything."""
        dtype = dtype or y.dtype
        if self.bitwise or not (dtype.is_floating_point or dtype.is_complex):
            return x != y
        x, y, (many, few, times) = _wide(x), _wide(y), _eps(dtype)
        floor = max(few * _largest(y), times * noise) if self.atol is None else self.atol
        difference = (x - y).abs()
        near = difference <= (many if self.rtol is None else self.rtol) * y.abs() + floor
        return (x != y) & ~(near & torch.isfinite(difference))


@dataclass(frozen=True)
class _Difference:
    """A leaf that differs where `axes` are collapsed: by its values, or for the reason `why`."""

    leaf: int
    axes: tuple[str, ...]
    why: str = ""
    x: Tensor | None = None
    y: Tensor | None = None

    def beyond(self, allowed: _Allowed, noise: float) -> bool:
        return self.x is None or self.y is None or bool(allowed.off(self.x, self.y, noise).any())

    def unsteady(self, again: Any, allowed: _Allowed) -> bool:
        """Whether another run gave another value; NaN again is no other."""
        return self.x is not None and bool((allowed.off(again, self.x) & ~(again.isnan() & self.x.isnan())).any())


def _compare(got: Any, want: Any, axes: tuple[str, ...], allowed: _Allowed) -> tuple[list[_Difference], float]:
    """What differs, and the largest relative error of what does not."""
    if tree.structure(got) != tree.structure(want):
        return [_Difference(-1, axes, f"{tree.structure(got)} is not {tree.structure(want)}")], 0.0
    found, worst = [], 0.0
    for i, (a, b) in enumerate(zip(tree.leaves(got), tree.leaves(want), strict=True)):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if type(a) is not type(b) or a != b:
                found.append(_Difference(i, axes, f"{a!r} is not {b!r}"))
        elif a.shape != b.shape or a.dtype != b.dtype:
            found.append(_Difference(i, axes, f"{describe(a.dtype, a.shape)} is not {describe(b.dtype, b.shape)}"))
        elif not torch.equal(a, b):
            error = _relative(a, b)
            default = allowed.atol is None and not allowed.bitwise
            if not (default and error <= _eps(a.dtype)[1]) and bool(allowed.off(a, b).any()):
                found.append(_Difference(i, axes, x=a, y=b))
            elif math.isfinite(error):
                worst = max(worst, error)
    return found, worst


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _eps(dtype: torch.dtype) -> tuple[float, float, float]:
    """The default rtol, the default floor for a largest value of 1, and how often what a rounding moves."""
    eps = torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0
    return (1000 * eps, 100 * eps, 16.0) if eps < 1e-6 else (4 * eps, 2 * eps, 4.0)


def _largest(x: Tensor) -> float:
    """The largest finite magnitude."""
    size = float(torch.linalg.vector_norm(_wide(x), math.inf)) if x.numel() else 0.0
    return size if math.isfinite(size) else float(torch.where(torch.isfinite(x), x.abs(), 0).max())


def _relative(x: Tensor, y: Tensor) -> float:
    """The largest error by the largest value; infinite where an error is not finite."""
    both = (_wide(x) - _wide(y), _wide(y))
    error, scale = (float(torch.linalg.vector_norm(v, math.inf)) if v.numel() else 0.0 for v in both)
    return error / scale if scale and math.isfinite(error / scale) else math.inf


def _sizes(sizes: dict[str, int]) -> str:
    return ", ".join(f"{a}={n}" for a, n in sizes.items())


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + ", ..." * (len(names) > NAMED)


def _tell(f: ShardMapped, found: list[_Difference], names: list[str], allowed: _Allowed, moved: list[float]) -> str:
    """A paragraph for each axis, or for axes that tell one story; for all axes at once only of other leaves."""
    single = {d.leaf for d in found if len(d.axes) == 1}
    blamed: dict[Any, list[str]] = {}
    for d in found:
        if len(d.axes) == 1 or d.leaf not in single:
            order, lines = _story(d, f.mesh.axes, allowed, moved[d.leaf])
            blamed.setdefault((order, d.leaf, tuple(lines)), []).append(" and ".join(map(repr, d.axes)))
    paragraphs: dict[str, list[tuple[str, Sequence[str]]]] = {}
    for (_, leaf, lines), axes in sorted(blamed.items()):
        paragraphs.setdefault(" or ".join(axes), []).append((names[leaf], lines))
    texts = []
    for by, told in sorted(paragraphs.items()):
        what, notes = f"{told[0][0]} of {f._name} changes", told[0][1]
        if len(told) > 1:
            what = f"{len(told)} of {len(names) - 1} leaves of {f._name} change"
            notes = [line for name, lines in told[:FULL] for line in (name, *[f"  {text}" for text in lines])]
            notes += [f"and {len(told) - FULL} more: {_listed([name for name, _ in told[FULL:]])}"] * (len(told) > FULL)
        texts.append(str(fail(f"verify: {what} with the mesh: collapsing {by} gives another answer", *notes)))
    return "\n".join(texts)


def _story(d: _Difference, sizes: dict[str, int], allowed: _Allowed, noise: float) -> tuple[_Order, list[str]]:
    """A leaf's place among those to tell, by constant ratios, then by size; and what its numbers say."""
    if d.x is None or d.y is None:
        return (0, 0), [d.why]
    x, y, dtype = _wide(d.x), _wide(d.y), d.y.dtype
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
    usual = "a nonlinearity of a partial sum, a mean of unequal counts, or a mask of each rank's own"
    return order, [*lines, f"no constant ratio{_box(off)}: as by {usual}" if _largest(y) else "every value should be 0"]


def _causes(axes: Sequence[str], sizes: dict[str, int]) -> dict[float, str]:
    """The factors that a mesh makes, each with what usually makes it."""
    found = {0.0: "the value, or its gradient, is lost on the way"}
    for group in (g for k in range(len(axes)) for g in itertools.combinations(axes, k + 1)):
        n, name = math.prod(sizes[a] for a in group), " x ".join(group)
        for factor, cause in (
            (n, f"{n} is the size of {name}: a psum of what is a total already, or of what does not vary"),
            (1 / n, f"1/{n}, the size of {name}: a psum is missing, or a mean is taken of a total"),
            (n * n, f"{n * n} is the square of {n}, the size of {name}: a total is summed twice too often"),
            (1 / n**2, f"1/{n * n}, the square of {n}, the size of {name}: a mean is taken twice too often"),
            (n**0.5, f"the square root of {n}, the size of {name}: a norm counts what every rank has"),
        ):
            found.setdefault(factor, cause)
    return found


def _ratio(x: Tensor, y: Tensor, where: Tensor, factors: Iterable[float], same: _Same) -> float | None:
    """The factor of `x` over `y` at every place in `where`, if there is one."""
    a, b = x[where], y[where]
    big = (b.abs() > 1e-3 * _largest(b)) & torch.isfinite(a / b)  # the others are mostly rounding
    if not bool(big.any()):
        return None
    middle = float((a[big] / b[big]).real.median())
    likely = [r for r in factors if abs(middle - r) <= 1e-2 * r] + [middle] * (int(big.sum()) > 1)
    left = {r: torch.where(where, r * y, y) for r in likely}  # a factor explains nearly all of the error
    return next((r for r, z in left.items() if same(x, z) and _largest(x - z) <= 0.1 * _largest(x - y)), None)


def _box(off: Tensor) -> str:
    """The smallest box around those elements, unless it is the whole leaf."""
    if bool(off.all()) or not off.ndim:
        return ""
    at = off.nonzero()
    ends = list(zip(at.amin(0).tolist(), (at.amax(0) + 1).tolist(), off.shape, strict=True))
    box = ", ".join(":" if hi - lo == n else f"{lo}:{hi}" for lo, hi, n in ends)
    return f" in [{box}]" if set(box) - set(":, ") else ""


__all__ = ["Verified", "verify"]
