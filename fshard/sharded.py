"""Leaves that are placed: `Sharded`, how they are made, and how they come back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import random, tree
from .deferred import Deferred, whole
from .errors import ShardingError, fail, raise_all
from .mesh import Mesh
from .spec import Box, P, box_shape, describe, is_spec, local_box, problems, same


class Sharded:
    """A placed leaf: a global shape, a spec, a mesh, and the local parts this process holds.

    `shards` has one local tensor for each of `mesh.ranks`: all of them on a simulated mesh, one on a process mesh.
    A `Sharded` is not a tensor: compute with it inside `shard_map`, look at it with `device_get` or `item`.

    >>> materialize(init.zeros((64, 256)), column("model"), make_mesh(model=4), key=key(0))
    f32[64, 256@model]
    """

    __slots__ = ("_donated_to", "_shards", "dtype", "mesh", "shape", "spec")

    def __init__(self, shape: Sequence[int], spec: P, mesh: Mesh, shards: Sequence[Tensor]) -> None:
        self.shape, self.spec, self.mesh = tuple(shape), spec, mesh
        self.dtype = shards[0].dtype
        self._shards = tuple(shards)
        self._donated_to: str | None = None

    @property
    def shards(self) -> tuple[Tensor, ...]:
        """The local tensors, in the order of `mesh.ranks`. Raises ShardingError once the leaf has been donated."""
        if self._donated_to is not None:
            raise fail(f"{self!r} was donated to {self._donated_to}, which may have overwritten it",
                       fix="use the value that call returned, or leave the argument out of donate=")  # fmt: skip
        return self._shards

    def give_away(self, to: str) -> None:
        """Let go of the storage; any later use is an error that names `to`."""
        self._donated_to, self._shards = to, ()

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
        return device_get(self).item()

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
    random.check_key("materialize", key)

    def place(path: tree.Path, leaf: Any, spec: P) -> Sharded:
        if isinstance(leaf, Tensor):
            return _put(leaf, spec, mesh)
        return _fill(leaf, spec, mesh, random.fold_in(key, tree.dotted(path)), dtype)

    return _place_all("materialize", tree_, specs, mesh, (Deferred, Tensor), place)


def _fill(leaf: Deferred, spec: P, mesh: Mesh, key: Tensor, dtype: torch.dtype | None) -> Sharded:
    kind = dtype if dtype is not None and leaf.dtype.is_floating_point else leaf.dtype
    return from_callback(leaf.shape, spec, mesh, lambda box: leaf.init.fill(key, leaf.shape, box, kind, mesh.device))


def device_put(tree_: Any, specs: Any, mesh: Mesh) -> Any:
    """Place global tensors, the same on every rank: each device keeps a copy of its own part.

    `specs` may be a prefix. Python numbers become tensors.

    >>> device_put({"x": torch.arange(6)}, P("data"), make_mesh(data=4))
    {'x': i64[6@data]}
    """
    return _place_all("device_put", tree_, specs, mesh, (Tensor, int, float, complex), lambda _, x, spec: _put(x, spec, mesh))


def _put(x: Any, spec: P, mesh: Mesh) -> Sharded:
    whole_ = torch.as_tensor(x).detach()
    part = lambda box: whole_[box].to(mesh.device, copy=True, memory_format=torch.contiguous_format)  # noqa: E731
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
    raise_all(problems("from_callback", shape, spec, mesh.axes))
    parts: dict[tuple[tuple[int, int], ...], Tensor] = {}
    shards = []
    for rank in mesh.ranks:
        box = local_box(shape, spec, mesh.axes, mesh.coords(rank))
        at = tuple((s.start, s.stop) for s in box)
        if at in parts:
            shards.append(parts[at].clone())
            continue
        part = fn(box)
        if not isinstance(part, Tensor) or tuple(part.shape) != box_shape(box):
            got = list(part.shape) if isinstance(part, Tensor) else f"a {type(part).__name__}"
            raise fail(f"from_callback: the callback gave {got} for rank {rank}",
                       fix=f"return the elements of the slices it is called with: {list(box_shape(box))}",
                       slices=[f"{s.start}:{s.stop}" for s in box])  # fmt: skip
        # A view shares the storage of something else, which a donated leaf would overwrite.
        parts[at] = part.to(mesh.device, copy=part._is_view())
        shards.append(parts[at])
    return Sharded(shape, spec, mesh, shards)


def _place_all(verb: str, tree_: Any, specs: Any, mesh: Mesh, kinds: tuple[type, ...], place: Callable[..., Sharded]) -> Any:
    """Check every leaf against its spec, then place them all. An object at two paths, a tie, stays one leaf."""
    _, treedef = tree.flatten(tree_)
    found = tree.leaves_with_path(tree_)
    flat = tree.broadcast(specs, tree_, name="specs", leaf=is_spec)
    errors: list[ShardingError] = []
    first: dict[int, tuple[tree.Path, P]] = {}
    for (path, leaf), spec in zip(found, flat, strict=True):
        where = f"{verb}: {tree.show('tree', path)}"
        twin, its_spec = first.setdefault(id(leaf), (path, spec))
        if isinstance(leaf, (Deferred, Sharded, Tensor)) and its_spec != spec and not same(its_spec, spec, leaf.ndim):
            errors.append(fail(f"{where}: is tied to {tree.show('tree', twin)}, which has another spec",
                               fix="give both one spec, or untie them", spec=spec, other=its_spec))  # fmt: skip
        if not isinstance(leaf, kinds):
            fix = "fs.reshard(tree, specs) moves placed leaves" if isinstance(leaf, Sharded) else \
                "fs.materialize makes described leaves" if isinstance(leaf, Deferred) else "give a tensor"  # fmt: skip
            errors.append(fail(f"{where}: cannot place a {type(leaf).__name__}", fix=fix))
        else:
            shape = tuple(leaf.shape) if isinstance(leaf, (Tensor, Deferred, Sharded)) else ()
            errors += problems(where, shape, spec, mesh.axes)
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


# --- moving them ----------------------------------------------------------------------------------------------


def device_get(tree_: Any, *, rank: int | None = None) -> Any:
    """The full leaves, as CPU tensors. Leaves that are not `Sharded` stay as they are.

    On a process mesh every rank must call it. With `rank`, only that rank gets the leaves (the others get `None`),
    gathered into its host memory leaf by leaf and part by part, so no device holds more than its own.

    >>> device_get(params)["up"].shape
    torch.Size([64, 256])
    """
    return tree.map(lambda x: _get(x, rank) if isinstance(x, Sharded) else x, tree_)


def _get(x: Sharded, rank: int | None) -> Tensor | None:
    if rank is not None and rank not in range(x.mesh.size):
        raise fail(f"device_get: the mesh has no rank {rank}", fix=f"ranks are 0 to {x.mesh.size - 1}")
    if x.mesh.kind == "process":
        return _gather_to_host(x, rank)
    out = torch.empty(x.shape, dtype=x.dtype)
    for at, part in zip(x.mesh.ranks, x.shards, strict=True):
        out[x.box(at)] = part.detach().cpu()
    return out


def _gather_to_host(x: Sharded, rank: int | None) -> Tensor | None:
    """Every part from its first owner, to `rank` or to all, one at a time."""
    me = x.mesh.ranks[0]
    part = x.shards[0].detach().contiguous()
    out = torch.empty(x.shape, dtype=x.dtype) if rank in (None, me) else None
    for owner, box in owners(x):
        if not x.spec.axes or me == owner == rank:
            piece = part
        elif rank is None:
            piece = part if me == owner else torch.empty(box_shape(box), dtype=x.dtype, device=part.device)
            dist.broadcast(piece, owner)
        elif me == owner:
            dist.send(part, rank)
        elif me == rank:
            piece = torch.empty(box_shape(box), dtype=x.dtype, device=part.device)
            dist.recv(piece, owner)
        if out is not None:
            out[box] = piece.cpu()
    return out


def owners(x: Sharded) -> Iterator[tuple[int, Box]]:
    """Each different part of a leaf once, with the first rank that holds it."""
    seen = set()
    for rank in range(x.mesh.size):
        box = x.box(rank)
        at = tuple((s.start, s.stop) for s in box)
        if at not in seen and 0 not in box_shape(box):
            seen.add(at)
            yield rank, box


def reshard(tree_: Any, specs: Any, mesh: Mesh | None = None) -> Any:
    """Move placed leaves to other specs, or to another mesh of the same kind.

    Every device receives just the elements it will hold and sends just those it has: a full leaf is never held by a
    device that needs only part of it. `specs` may be a prefix; `mesh` defaults to the one each leaf is on.

    >>> reshard(device_put(torch.zeros(4, 6), P("data"), mesh), P(None, "model"))
    f32[4, 6@model]
    """

    def move(path: tree.Path, x: Sharded, spec: P) -> Sharded:
        return _move(x, spec, mesh or x.mesh)

    flat_mesh = mesh
    for path, leaf in tree.leaves_with_path(tree_):
        if not isinstance(leaf, Sharded):
            raise fail(f"reshard: {tree.show('tree', path)} is a {type(leaf).__name__}, not a placed leaf",
                       fix="fs.device_put places tensors, fs.materialize described leaves")  # fmt: skip
        target = mesh or leaf.mesh
        if target.kind != leaf.mesh.kind:
            raise fail(f"reshard: from a {leaf.mesh.kind} mesh to a {target.kind} one",
                       fix="fs.device_put(fs.device_get(tree), specs, mesh)")  # fmt: skip
        flat_mesh = flat_mesh or target
    if flat_mesh is None:  # no leaves
        return tree_
    return _place_all("reshard", tree_, specs, flat_mesh, (Sharded,), move)


def _move(x: Sharded, spec: P, mesh: Mesh) -> Sharded:
    if mesh == x.mesh and same(spec, x.spec, x.ndim):
        return Sharded(x.shape, spec, mesh, [s.clone() for s in x.shards])
    return _exchange(x, spec, mesh) if mesh.kind == "process" else _copy(x, spec, mesh)


def _copy(x: Sharded, spec: P, mesh: Mesh) -> Sharded:
    shards = []
    for rank in mesh.ranks:
        box = local_box(x.shape, spec, mesh.axes, mesh.coords(rank))
        part = torch.empty(box_shape(box), dtype=x.dtype, device=mesh.device)
        for source, common in _sources(x, box, rank):
            part[_within(common, box)] = x.shards[source][_within(common, x.box(source))].to(mesh.device)
        shards.append(part)
    return Sharded(x.shape, spec, mesh, shards)


def _exchange(x: Sharded, spec: P, mesh: Mesh) -> Sharded:
    me = mesh.ranks[0]
    boxes = [local_box(x.shape, spec, mesh.axes, mesh.coords(rank)) for rank in range(mesh.size)]
    mine = x.box(me)
    part = x.shards[0]
    send = [[part[_within(c, mine)].reshape(-1) for s, c in _sources(x, box, rank) if s == me] for rank, box in enumerate(boxes)]
    incoming = sorted(_sources(x, boxes[me], me), key=lambda pair: pair[0])  # stable: the sender's order within a rank
    counts = [0] * mesh.size
    for source, common in incoming:
        counts[source] += math.prod(box_shape(common))
    flat = torch.cat([p for pieces in send for p in pieces] or [part.new_empty(0)]).contiguous()
    # As bytes: every backend moves those, whatever the dtype.
    got = torch.empty(sum(counts), dtype=x.dtype, device=mesh.device)
    size = x.dtype.itemsize
    dist.all_to_all_single(got.view(torch.uint8), flat.view(torch.uint8), [n * size for n in counts],
                           [sum(p.numel() for p in pieces) * size for pieces in send])  # fmt: skip
    out = torch.empty(box_shape(boxes[me]), dtype=x.dtype, device=mesh.device)
    at = 0
    for _, common in incoming:
        n = math.prod(box_shape(common))
        out[_within(common, boxes[me])] = got[at : at + n].view(box_shape(common))
        at += n
    return Sharded(x.shape, spec, mesh, [out])


def _sources(x: Sharded, box: Box, rank: int) -> list[tuple[int, Box]]:
    """Whence `rank` takes each element of `box`: (source rank, common box). Itself if it can, else replicas in turn."""
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for source in range(x.mesh.size):
        holders.setdefault(tuple((s.start, s.stop) for s in x.box(source)), []).append(source)
    out = []
    for at, ranks in holders.items():
        common = tuple(slice(max(s.start, a), min(s.stop, b)) for s, (a, b) in zip(box, at, strict=True))
        if all(s.start < s.stop for s in common):
            out.append((rank if rank in ranks else ranks[rank % len(ranks)], common))
    return out


def _within(common: Box, box: Box) -> Box:
    """Global slices as slices of the part that holds them."""
    return tuple(slice(c.start - b.start, c.stop - b.start) for c, b in zip(common, box, strict=True))


__all__ = ["Sharded", "device_get", "device_put", "from_callback", "materialize", "owners", "reshard", "whole"]
