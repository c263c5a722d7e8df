"""Check the law, that the mesh never changes the answer: run a program on smaller meshes and compare every leaf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import tree
from ._compare import Difference, Tolerance, compare, describe_differences, max_finite_magnitude, replica_errors, widen
from ._ops import differentiable_dtype
from .errors import ShardingError, checked, fail, join_limited, raise_all
from .mesh import Mesh, make_mesh
from .reshard import device_get
from .shard_map import ShardMapped
from .sharded import Sharded, device_put
from .spec import format_axes


@dataclass(frozen=True)
class Verified:
    """Outcome of `verify`: the meshes that were compared, and the largest error."""

    meshes: tuple[str, ...]
    leaves: int
    error: float  # relative to the largest value of its leaf
    noise: tuple[str, ...] = ()  # leaves that differ by more, but not by more than rounding the arguments changes them

    def __repr__(self) -> str:
        if len(self.meshes) == 1:
            return f"verified: nothing, as {self.meshes[0]} has no axis to collapse"
        count = f"{self.leaves} leaves" if self.leaves != 1 else "1 leaf"
        noise = f"; only noise: {join_limited(self.noise, 3)}" if self.noise else ""
        meshes = "; ".join(self.meshes)
        return f"verified: {count} the same on {meshes} (largest relative error {self.error:.0e}{noise})"


@checked
def verify(
    f: ShardMapped, *args: Any, rtol: float | None = None, atol: float | None = None, bitwise: bool = False
) -> Verified:
    """Run `f` on its mesh, with each axis in turn collapsed to size 1, and with all collapsed; compare the results.

    Arguments are copied to every mesh, so donated ones stay valid. Every process simulates the smaller meshes, where
    `f` is not compiled. Where something differs, further runs measure the noise.

    Args:
        rtol: allowed error relative to each value; by default 1000 eps of the leaf's dtype, 4 eps of half precision.
        atol: allowed absolute error; by default 100 (or 2) eps of the largest value of the leaf, or the change by
            rounding the arguments, whichever is larger.
        bitwise: allow no difference.

    >>> total = shard_map(lambda x: psum(x.sum(), "data"), mesh=mesh, in_specs=(P("data"),), out_specs=P())
    >>> verify(total, torch.ones(8))
    verified: 1 leaf the same on data=2, model=2; data=1, model=2; data=2, model=1; data=1, model=1 (...)

    Raises ShardingError with the leaves that differ, by the axis that changes them: the largest error, the ratio where
    it is constant, the likely cause. NaN equals nothing; another shape, dtype or tree is a difference.
    """
    if f.mesh.kind == "abstract":
        raise fail(f"verify: {f._name} is on an abstract mesh, where nothing has a value",
                   fix="fs.check it; or verify it on a simulated mesh")  # fmt: skip
    axes, tolerance = f.mesh.axes, Tolerance(rtol, atol, bitwise)
    collapsed = [{**axes, a: 1} for a, n in axes.items() if n > 1]
    if len(collapsed) > 1:
        collapsed.append(dict.fromkeys(axes, 1))
    full_args = device_get(args)
    results = f(*_place_copies(args, full_args, f.mesh))
    mismatched_replicas = replica_errors(f"verify: {f._name}", results, tolerance)
    got = device_get(results)
    names = [*(tree.show("result", path) for path, _ in tree.leaves_with_path(got)), "the tree of results"]
    smallest = f
    differences: list[Difference] = []
    worst = 0.0
    for sizes in collapsed:
        # Simulated ranks cannot be compiled, and the program was checked on its own mesh.
        smallest = f.on(make_mesh(kind="simulated", device=f.mesh.device, **sizes), check="never", compile=False)
        try:
            want = _run(smallest, args, full_args)
        except Exception as e:
            raise fail(f"verify: {f._name} runs on {format_axes(axes)}, and raises on {format_axes(sizes)}",
                       f"{type(e).__name__}: {e}") from e  # fmt: skip
        more, error = compare(got, want, tuple(a for a in axes if sizes[a] != axes[a]), tolerance)
        differences, worst = differences + more, max(worst, error)
    only_noise: list[str] = []
    if any(f.mesh.gather_objects(bool(differences))):
        rerun, noise = _measure_noise(f, smallest, args, full_args, atol is None and not bitwise)
        real = [d for d in differences if d.exceeds(tolerance, noise[d.leaf])]
        only_noise = [names[i] for i in sorted({d.leaf for d in differences} - {d.leaf for d in real})]
        not_repeated = {d.leaf for d in differences if d.changed_in(rerun[d.leaf], tolerance)}
        text = describe_differences(f._name, axes, real, names, tolerance, noise)
        if not_repeated:
            changed = join_limited([names[i] for i in sorted(not_repeated)], 3)
            text = str(fail(f"verify: {changed} of {f._name}: another run on the same mesh gives another answer",
                            fix="draw with fs.random and a key, not with torch's own generator"))  # fmt: skip
        if first_text := next(filter(None, f.mesh.gather_objects(text)), ""):
            raise ShardingError(first_text)
    raise_all(mismatched_replicas)
    meshes = tuple(map(format_axes, [axes, *collapsed]))
    return Verified(meshes, len(names) - 1, worst, tuple(only_noise))


def _run(f: ShardMapped, args: tuple[Any, ...], full_args: tuple[Any, ...]) -> Any:
    """Return the results of `f` as full tensors."""
    return device_get(f(*_place_copies(args, full_args, f.mesh)))


def _place_copies(args: tuple[Any, ...], full_args: tuple[Any, ...], mesh: Mesh) -> Any:
    """Return copies of the arguments on `mesh`. One object at several paths, a tie, becomes one copy."""
    copies: dict[int, Any] = {}

    def copy(x: Any, full: Any) -> Any:
        if isinstance(full, Tensor) and id(x) not in copies:
            copies[id(x)] = device_put(full, x.spec, mesh) if isinstance(x, Sharded) else full.clone()
        return copies.get(id(x), x)

    return tree.map(copy, args, full_args)


def _measure_noise(
    f: ShardMapped, smallest: ShardMapped, args: Any, full_args: Any, flip: bool
) -> tuple[list[Any], list[float]]:
    """Return the leaves of another run of `f`, and the noise in each leaf and in the tree.

    Noise is the largest change, on either mesh, by flipping the last bit of the arguments; 0 without `flip`.
    """
    rerun = tree.leaves(_run(f, args, full_args))
    noise = [0.0] * (len(rerun) + 1)
    for g in (f, smallest) if flip else ():
        try:
            before = rerun if g is f else tree.leaves(_run(g, args, full_args))
            after = tree.leaves(_run(g, args, tree.map(_flip_last_bit, full_args)))
        except Exception:  # a program may refuse such arguments, and then its noise stays unknown
            continue
        for i, (a, b) in enumerate(zip(before, after, strict=False)):
            if i < len(rerun) and isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape:
                noise[i] = max(noise[i], max_finite_magnitude(widen(a) - widen(b)))
    return rerun, noise


def _flip_last_bit(x: Any) -> Any:
    """Flip the last bit of every float: a rounding, the same for equal values, so that ties stay ties."""
    if not isinstance(x, Tensor) or not differentiable_dtype(x):
        return x
    if x.is_complex():
        return torch.view_as_complex(_flip_last_bit(torch.view_as_real(x.resolve_conj())))
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    flipped = (x.detach().contiguous().view(bits) ^ 1).view(x.dtype)
    return torch.where((x == 0) | ~torch.isfinite(x), x, flipped)
