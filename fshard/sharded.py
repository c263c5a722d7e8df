"""Leaves that are placed: `Sharded`, how they are made, and how they come back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import tree
from ._comm import memory_device, to_spec_memory
from .errors import ShardingError, fail, raise_all
from .init import Deferred
from .mesh import Mesh
from .random import check_key, fold_in
from .spec import Box, P, box_bounds, box_shape, describe, is_spec, local_box, same_placement, spec_errors


class Placement(NamedTuple):
    """Where a leaf lies, and what it is but for its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: P
    mesh: Mesh


class Sharded:
    """A placed leaf: a global shape, a spec, a mesh, and the local parts this process holds.

    `shards` has one local tensor for each of `mesh.ranks`: all of them on a simulated mesh, one on a process mesh.
    A `Sharded` is not a tensor: compute with it inside `shard_map`, look at it with `device_get` or `item`.

    >>> materialize(init.zeros((64, 256)), column("model"), make_mesh(model=4), key=key(0))
    f32[64, 256@model]
    """

    __slots__ = ("_donated_to", "_shards", "placement")

    def __init__(self, shape: Sequence[int], spec: P, mesh: Mesh, shards: Sequence[Tensor]) -> None:
        self.placement = Placement(tuple(shape), shards[0].dtype, spec, mesh)
        self._shards = tuple(shards)

    @property
    def shards(self) -> tuple[Tensor, ...]:
        """The local tensors, in the order of `mesh.ranks`. Raises ShardingError once the leaf has been donated."""
        if not self._shards:
            raise fail(f"{self!r} was donated to {self._donated_to}, which may have overwritten it",
                       fix="use the value that call returned, or leave the argument out of donate=")  # fmt: skip
        return self._shards

    def donate_to(self, to: str) -> None:
        """Let go of the storage; any later use is an error that names `to`."""
        self._donated_to, self._shards = to, ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.placement.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.placement.dtype

    @property
    def spec(self) -> P:
        return self.placement.spec

    @property
    def mesh(self) -> Mesh:
        return self.placement.mesh

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole leaf, counted once."""
        return self.numel() * self.dtype.itemsize

    def box(self, rank: int) -> Box:
        """The global slices that `rank` holds."""
        return local_box(self.shape, self.spec, self.mesh.axes, self.mesh.coords(rank))

    def item(self) -> Any:
        """The value of a leaf with one element, as a Python number."""
        if self.numel() != 1:
            raise fail(f"item: {self!r} has {self.numel()} elements", fix="fs.device_get(x)")
        if self.mesh.kind == "abstract":
            raise fail(f"item: {self!r} is on an abstract mesh, where leaves have no values")
        if self.mesh.kind == "process" and self.spec.axes:
            raise fail(f"item: {self!r} is held by one rank of several", fix="fs.device_get(x).item() on every rank")
        return next(x for x in self.shards if x.numel()).item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __format__(self, form: str) -> str:
        return format(self.item(), form) if form else repr(self)

    def __bool__(self) -> bool:
        return bool(self.item())

    def __repr__(self) -> str:
        return describe(self.dtype, self.shape, self.spec)


# --- many at once, as every call of a `shard_map` takes and makes them -------------------------------------------


def make_sharded(placement: Placement, shards: tuple[Tensor, ...]) -> Sharded:
    """A leaf whose shards are known to be what its placement says."""
    leaf = _new(Sharded)
    leaf.placement, leaf._shards = placement, shards
    return leaf


_new = Sharded.__new__


def local_parts(leaves: Sequence[Any], ranks: int) -> list[list[Any]]:
    """What each of this process's ranks has of the leaves: of a `Sharded` its shard, anything else as it is.

    Raises ShardingError for a leaf that has been donated.
    """
    rows = [x._shards if x.__class__ is Sharded else (x,) * ranks for x in leaves]
    if () in rows:
        _ = [x.shards for x in leaves if isinstance(x, Sharded)]  # raises
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(ranks)]


# --- making them ----------------------------------------------------------------------------------------------


def materialize(tree_: Any, specs: Any, mesh: Mesh, *, key: Tensor, dtype: torch.dtype | None = None) -> Any:
    """Place a described tree: every device fills only its own part of every `Deferred` leaf.

    Each element depends on `key`, the leaf's path and the element's global index alone, so the values are bitwise the
    same on every mesh and by every spec, and adding a leaf changes no other. Tensors in the tree are placed as they
    are. One object at several paths is one leaf, with the key of its first path.

    Args:
        specs: a `P` per leaf, or a prefix: one `P` for a whole subtree.
        dtype: replaces the dtype of floating-point `Deferred` leaves.

    >>> materialize({"w": init.normal((64, 256), std=0.02)}, {"w": column("model")}, mesh, key=fs.key(0))
    {'w': f32[64, 256@model]}

    Raises ShardingError listing every leaf that cannot be placed.
    """
    check_key("materialize", key)
    _check_names(tree_)

    def place(path: tree.Path, leaf: Any, spec: P) -> Sharded:
        if isinstance(leaf, Tensor):
            return _put(leaf, spec, mesh)
        return _fill(leaf, spec, mesh, _key_of(leaf, path, key), dtype)

    return place_tree("materialize", tree_, specs, mesh, (Deferred, Tensor), place)


def _check_names(tree_: Any) -> None:
    """Two leaves of one dotted name would have one key, hence the same values."""
    names: dict[str, tree.Path] = {}
    for path, leaf in tree.leaves_with_path(tree_):
        twin = names.setdefault(tree.dotted(path), path)
        if isinstance(leaf, Deferred) and twin != path:
            raise fail(f"materialize: {tree.show('tree', path)} and {tree.show('tree', twin)} have one name",
                       f"both are {tree.dotted(path)!r}, and would be filled alike",
                       fix="rename one: no dots in keys")  # fmt: skip


def _key_of(leaf: Deferred, path: tree.Path, key: Tensor) -> Tensor:
    """The leaf's key; of one that is made of other leaves' draws, their keys, int64[owners, 2]."""
    name, scope = tree.dotted(path), leaf.scope
    if scope is None:
        return fold_in(key, name)
    if name != scope.name and not name.endswith(f".{scope.name}"):
        raise fail(f"materialize: {tree.show('tree', path)}: is made of the draws of other leaves, found by its name",
                   f"{name!r} does not end with {scope.name!r}",
                   fix="keep the tree that fs.defer gave, or a part of it", draws=", ".join(scope.owners))  # fmt: skip
    return torch.stack([fold_in(key, name.removesuffix(scope.name) + owner) for owner in scope.owners])


def _fill(leaf: Deferred, spec: P, mesh: Mesh, key: Tensor, dtype: torch.dtype | None) -> Sharded:
    kind = dtype if dtype is not None and leaf.dtype.is_floating_point else leaf.dtype
    if mesh.kind == "abstract":
        return abstract_sharded(leaf.shape, kind, spec, mesh)
    return from_callback(leaf.shape, spec, mesh, lambda box: leaf.init.fill(key, leaf.shape, box, kind, mesh.device))


def abstract_sharded(shape: Sequence[int], dtype: torch.dtype, spec: P, mesh: Mesh) -> Sharded:
    """A leaf on an abstract mesh: the shape of the first rank's part, and no values."""
    box = local_box(tuple(shape), spec, mesh.axes, mesh.coords(mesh.ranks[0]))
    return Sharded(shape, spec, mesh, [torch.empty(box_shape(box), dtype=dtype, device="meta")])


def device_put(tree_: Any, specs: Any, mesh: Mesh) -> Any:
    """Place global tensors, the same on every rank: each device keeps a copy of its own part.

    `specs` may be a prefix. Python numbers become tensors.

    >>> device_put({"x": torch.arange(6)}, P("data"), make_mesh(data=4))
    {'x': i64[6@data]}
    """
    kinds = (Tensor, int, float, complex)
    return place_tree("device_put", tree_, specs, mesh, kinds, lambda _, x, spec: _put(x, spec, mesh))


def _put(x: Any, spec: P, mesh: Mesh) -> Sharded:
    whole_ = torch.as_tensor(x).detach()
    if mesh.kind == "abstract":
        return abstract_sharded(tuple(whole_.shape), whole_.dtype, spec, mesh)
    there = memory_device(spec, mesh.device)
    part = lambda box: whole_[box].to(there, copy=True, memory_format=torch.contiguous_format)  # noqa: E731
    return from_callback(whole_.shape, spec, mesh, part)


def from_callback(shape: Sequence[int], spec: P, mesh: Mesh, fn: Callable[[Box], Tensor]) -> Sharded:
    """A placed leaf whose local parts come from `fn(global slices)`: how each rank loads only its own data.

    `fn` is called once for each different part this process holds; replicas on a simulated mesh get copies.

    >>> from_callback((8, 4), P("data"), mesh, lambda box: torch.from_numpy(memory_map[box]))
    f32[8@data, 4]

    The tensors become the leaf's storage: copy what something else still uses.

    Raises ShardingError where `fn` gives something else than a tensor of the shape of its slices.
    """
    shape = tuple(shape)
    raise_all(spec_errors("from_callback", shape, spec, mesh.axes))
    parts: dict[tuple[tuple[int, int], ...], Tensor] = {}
    shards = []
    for rank in mesh.ranks:
        box = local_box(shape, spec, mesh.axes, mesh.coords(rank))
        at = box_bounds(box)
        if at in parts:
            shards.append(to_spec_memory(parts[at], spec, mesh.device, copy=True))
            continue
        part = fn(box)
        if not isinstance(part, Tensor) or tuple(part.shape) != box_shape(box):
            got = list(part.shape) if isinstance(part, Tensor) else f"a {type(part).__name__}"
            raise fail(f"from_callback: the callback gave {got} for rank {rank}",
                       fix=f"return the elements of the slices it is called with: {list(box_shape(box))}",
                       slices=[f"{s.start}:{s.stop}" for s in box])  # fmt: skip
        if shards and shards[0].dtype != part.dtype:
            raise fail(f"from_callback: the callback gave {part.dtype} for rank {rank}, and {shards[0].dtype} before",
                       fix="return one dtype for every part")  # fmt: skip
        # A view shares the storage of something else, which a donated leaf would overwrite.
        own = part._is_view()
        parts[at] = part.to("meta") if mesh.kind == "abstract" else to_spec_memory(part, spec, mesh.device, copy=own)
        shards.append(parts[at])
    return Sharded(shape, spec, mesh, shards)


def place_tree(
    verb: str, tree_: Any, specs: Any, mesh: Mesh | None, kinds: tuple[type, ...], place: Callable[..., Sharded]
) -> Any:
    """Check every leaf against its spec, then place them all. An object at two paths, a tie, stays one leaf.

    Without a mesh, each leaf is `Sharded` and stays on its own.
    """
    _, treedef = tree.flatten(tree_)
    found = tree.leaves_with_path(tree_)
    flat = tree.broadcast(specs, tree_, name="specs", leaf=is_spec)
    errors: list[ShardingError] = []
    first: dict[int, tuple[tree.Path, P]] = {}
    for (path, leaf), spec in zip(found, flat, strict=True):
        where = f"{verb}: {tree.show('tree', path)}"
        twin, its_spec = first.setdefault(id(leaf), (path, spec))
        if (
            isinstance(leaf, (Deferred, Sharded, Tensor))
            and its_spec != spec
            and not same_placement(its_spec, spec, leaf.ndim)
        ):
            errors.append(fail(f"{where}: is tied to {tree.show('tree', twin)}, which has another spec",
                               fix="give both one spec, or untie them", spec=spec, other=its_spec))  # fmt: skip
        if not isinstance(leaf, kinds):
            fix = "fs.reshard(tree, specs) moves placed leaves" if isinstance(leaf, Sharded) else \
                "fs.materialize makes described leaves" if isinstance(leaf, Deferred) else "give a tensor"  # fmt: skip
            errors.append(fail(f"{where}: cannot place a {type(leaf).__name__}", fix=fix))
        else:
            shape = tuple(leaf.shape) if isinstance(leaf, (Tensor, Deferred, Sharded)) else ()
            errors += spec_errors(where, shape, spec, (mesh or leaf.mesh).axes)  # type: ignore[attr-defined]
    raise_all(errors)
    made: dict[int, Sharded] = {}
    out = []
    for (path, leaf), spec in zip(found, flat, strict=True):
        if isinstance(leaf, (int, float, complex)):  # equal numbers may be one object, and are no tie
            out.append(place(path, leaf, spec))
            continue
        if id(leaf) not in made:
            made[id(leaf)] = place(path, leaf, spec)
        out.append(made[id(leaf)])
    return tree.unflatten(treedef, out)


__all__ = [
    "Placement",
    "Sharded",
    "abstract_sharded",
    "device_put",
    "from_callback",
    "local_parts",
    "make_sharded",
    "materialize",
    "place_tree",
]  # fmt: skip
