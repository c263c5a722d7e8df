"""The law, checked: the mesh never changes the answer. Run a program on smaller meshes and compare every leaf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import tree
from ._compare import Allowed, Difference, apart, compare, largest, listed, tell, wide
from ._ops import differentiable_dtype
from .errors import ShardingError, fail, raise_all
from .mesh import Mesh, make_mesh
from .reshard import device_get
from .shard_map import ShardMapped
from .sharded import Sharded, device_put
from .spec import format_axes


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
        noise = f"; only noise: {listed(self.noise)}" if self.noise else ""
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
    if f.mesh.kind == "abstract":
        raise fail(f"verify: {f._name} is on an abstract mesh, where nothing has a value",
                   fix="fs.check it; or verify it on a simulated mesh")  # fmt: skip
    axes, allowed = f.mesh.axes, Allowed(rtol, atol, bitwise)
    collapsed = [{**axes, a: 1} for a, n in axes.items() if n > 1]
    if len(collapsed) > 1:
        collapsed.append(dict.fromkeys(axes, 1))
    whole = device_get(args)
    placed = f(*_placed(args, whole, f.mesh))
    split = apart(f"verify: {f._name}", placed, allowed)
    got = device_get(placed)
    names = [*(tree.show("result", path) for path, _ in tree.leaves_with_path(got)), "the tree of results"]
    one = f
    found: list[Difference] = []
    worst = 0.0
    for sizes in collapsed:
        # Simulated ranks cannot be compiled, and the program was checked on its own mesh.
        one = f.on(make_mesh(kind="simulated", device=f.mesh.device, **sizes), check="never", compile=False)
        try:
            want = _run(one, args, whole)
        except Exception as e:
            raise fail(f"verify: {f._name} runs on {format_axes(axes)}, and raises on {format_axes(sizes)}",
                       f"{type(e).__name__}: {e}") from e  # fmt: skip
        more, error = compare(got, want, tuple(a for a in axes if sizes[a] != axes[a]), allowed)
        found, worst = found + more, max(worst, error)
    noise: list[str] = []
    if any(f.mesh.gather_objects(bool(found))):
        again, moved = _measure(f, one, args, whole, atol is None and not bitwise)
        real = [d for d in found if d.beyond(allowed, moved[d.leaf])]
        unsteady = [names[i] for i in sorted({d.leaf for d in found if d.unsteady(again[d.leaf], allowed)})]
        noise = [names[i] for i in sorted({d.leaf for d in found} - {d.leaf for d in real})]
        text = tell(f._name, axes, real, names, allowed, moved)
        if unsteady:
            text = str(fail(f"verify: {listed(unsteady)} of {f._name}: another run on the same mesh gives another "
                            "answer", fix="draw with fs.random and a key, not with torch's own generator"))  # fmt: skip
        if told := next(filter(None, f.mesh.gather_objects(text)), ""):
            raise ShardingError(told)
    raise_all(split)
    return Verified(tuple(map(format_axes, [axes, *collapsed])), len(names) - 1, worst, tuple(noise))


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
                moved[i] = max(moved[i], largest(wide(a) - wide(b)))
    return again, moved


def _nudged(x: Any) -> Any:
    """The last bit of every float flipped: a rounding, the same for equal values, so that ties stay ties."""
    if not isinstance(x, Tensor) or not differentiable_dtype(x):
        return x
    if x.is_complex():
        return torch.view_as_complex(_nudged(torch.view_as_real(x.resolve_conj())))
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    flipped = (x.detach().contiguous().view(bits) ^ 1).view(x.dtype)
    return torch.where((x == 0) | ~torch.isfinite(x), x, flipped)


__all__ = ["Verified", "verify"]
