"""The law, checked: the mesh never changes the answer. Run a program on smaller meshes and compare every leaf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import tree
from .errors import ShardingError, fail
from .mesh import Mesh, make_mesh
from .reshard import device_get
from .shard_map import ShardMapped
from .sharded import Sharded, device_put
from .spec import describe


@dataclass(frozen=True)
class Verified:
    """What `verify` compared: the meshes, and the largest error found, relative to the largest value of its leaf."""

    meshes: tuple[str, ...]
    leaves: int
    error: float

    def __repr__(self) -> str:
        count = f"{self.leaves} leaves" if self.leaves != 1 else "1 leaf"
        return f"verified: {count} the same on {'; '.join(self.meshes)} (largest relative error {self.error:.0e})"


def verify(
    f: ShardMapped, *args: Any, rtol: float = 1e-4, atol: float | None = None, bitwise: bool = False
) -> Verified:
    """Run `f` on its mesh, on the same mesh with each axis in turn collapsed to size 1, and with all; compare.

    Arguments are placed anew on every mesh, so donated ones are not lost. The smaller meshes are simulated.

    Args:
        rtol: allowed error relative to each value.
        atol: allowed absolute error; by default 1e-5 of the largest value of the leaf, since a sum in another order
            is off by a rounding of its largest term.
        bitwise: allow no difference at all.

    >>> total = shard_map(lambda x: psum(x.sum(), "data"), mesh=mesh, in_specs=(P("data"),), out_specs=P())
    >>> verify(total, torch.ones(8))
    verified: 1 leaf the same on data=2, model=2; data=1, model=2; data=2, model=1; data=1, model=1 (...)

    Raises ShardingError for the first leaf that differs on each mesh, with the axis to blame, the largest error, and
    the ratio where it is constant. NaN equals nothing; another shape, dtype or tree is a difference.
    """
    if not isinstance(f, ShardMapped):
        raise fail(f"verify: {f!r} is a {type(f).__name__}", fix="verify what fs.shard_map gives")
    axes = f.mesh.axes
    collapsed = [{**axes, a: 1} for a, n in axes.items() if n > 1]
    if len(collapsed) > 1:
        collapsed.append(dict.fromkeys(axes, 1))
    whole = device_get(args)
    got = _run(f, f.mesh, args, whole)
    errors: list[ShardingError] = []
    worst = 0.0
    for sizes in collapsed:
        want = _run(f, make_mesh(kind="simulated", device=f.mesh.device, **sizes), args, whole)
        changed = [a for a in axes if sizes[a] != axes[a]]
        found, error = _compare(f, got, want, changed, rtol, atol, bitwise)
        worst = max(worst, error)
        errors += found
    if errors:
        raise _worst_first(errors)
    shown = tuple(", ".join(f"{a}={n}" for a, n in sizes.items()) for sizes in [axes, *collapsed])
    return Verified(shown, len(tree.leaves(got)), worst)


def _run(f: ShardMapped, mesh: Mesh, args: tuple[Any, ...], whole: tuple[Any, ...]) -> Any:
    """The results of `f` on `mesh`, as full tensors, on copies of the arguments."""
    place = lambda x, full: device_put(full, x.spec, mesh) if isinstance(x, Sharded) else _copy(x)  # noqa: E731
    return device_get(f.on(mesh)(*tree.map(place, args, whole)))


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _compare(
    f: ShardMapped, got: Any, want: Any, axes: list[str], rtol: float, atol: float | None, bitwise: bool
) -> tuple[list[ShardingError], float]:
    """The first differing leaf, as an error, and the largest relative error of all."""
    have, want_leaves = tree.leaves_with_path(got), tree.leaves(want)
    if tree.structure(got) != tree.structure(want):
        return [_blame(f, "the tree of results", axes, f"{tree.structure(got)} is not {tree.structure(want)}")], 0.0
    worst = 0.0
    for (path, a), b in zip(have, want_leaves, strict=True):
        where = tree.show("result", path)
        if not isinstance(a, Tensor):
            if a != b:
                return [_blame(f, where, axes, f"{a!r} is not {b!r}")], worst
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            why = f"{describe(a.dtype, a.shape)} is not {describe(b.dtype, b.shape)}"
            return [_blame(f, where, axes, why)], worst
        if not a.numel() or torch.equal(a, b):
            continue
        if bitwise or not (a.is_floating_point() or a.is_complex()):
            n = int((a != b).sum())
            return [_blame(f, where, axes, f"{n} of {a.numel()} elements differ")], worst
        wide = torch.complex128 if a.is_complex() else torch.float64
        x, y = a.to(wide), b.to(wide)
        scale = float(y.abs().max())
        allowed = rtol * y.abs() + (1e-5 * scale if atol is None else atol)
        difference = (x - y).abs()
        if not bool((difference <= allowed).all()):  # also where either is NaN
            return [_blame(f, where, axes, *_words(x, y, difference, f.mesh.axes, axes))], worst
        worst = max(worst, float(difference.max()) / scale if scale else 0.0)
    return [], worst


def _words(x: Tensor, y: Tensor, difference: Tensor, sizes: dict[str, int], axes: list[str]) -> list[str]:
    """The largest error, and the ratio if it is constant, with the likely cause."""
    if not bool(torch.isfinite(difference).all()):
        return [f"{int((~torch.isfinite(difference)).sum())} of {x.numel()} elements are not finite numbers"]
    at = int(difference.argmax())
    mine, theirs = x.flatten()[at].item(), y.flatten()[at].item()
    lines = [f"largest error {difference.max().item():.2g}, of {mine:.6g} against {theirs:.6g}"]
    big = y.abs() > 1e-3 * y.abs().max()
    ratios = (x[big] / y[big]).real if x.is_complex() else x[big] / y[big]
    if ratios.numel() and float(ratios.max() - ratios.min()) < 1e-3 * float(ratios.abs().max()):
        ratio = float(ratios.mean())
        n = 1
        for a in axes:
            n *= sizes[a]
        lines.append(f"every value is {ratio:.4g} times what it should be")
        if abs(ratio - n) < 1e-3 * n:
            named = " x ".join(axes)
            lines.append(f"{n} is the size of {named}: a psum of what is a total already, or of what does not vary")
        elif abs(ratio * n - 1) < 1e-3:
            lines.append(f"1/{n}, the size of {' x '.join(axes)}: a psum is missing, or a mean is taken of a total")
    return lines


def _blame(f: ShardMapped, where: str, axes: list[str], *why: str) -> ShardingError:
    named = " and ".join(map(repr, axes))
    return fail(f"verify: {where} of {f._name} changes with the mesh: collapsing {named} gives another answer", *why)


def _worst_first(errors: list[ShardingError]) -> ShardingError:
    """The errors of single axes, which say most; those of all axes only if there is no other."""
    single = [e for e in errors if "' and '" not in str(e).splitlines()[0]]
    return ShardingError("\n".join(str(e) for e in (single or errors)))


__all__ = ["Verified", "verify"]
