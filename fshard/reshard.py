"""Gather placed leaves into full tensors, and move them to other specs and meshes, part by part."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import tree
from ._core.host_memory import copy_to_device, empty_part, to_spec_memory
from ._core.transfers import refuse_transfer
from .errors import checked, fail
from .mesh import Mesh
from .sharded import Sharded, abstract_sharded, place_tree
from .spec import Box, P, box_shape, different_parts, local_box, overlap, relative_box, same_placement


@checked
def device_get(tree_: Any, *, rank: int | None = None) -> Any:
    """Return the full leaves, as CPU tensors. Leaves that are not `Sharded` stay unchanged.

    On a process mesh every rank must call it. With `rank`, only that rank gets the leaves (the others get `None`),
    gathered into its host memory leaf by leaf and part by part, so no device needs memory for more than its part.

    >>> device_get(params)["up"].shape
    torch.Size([64, 256])
    """
    return tree.map(lambda x: _get(x, rank) if isinstance(x, Sharded) else x, tree_)


def _get(x: Sharded, rank: int | None) -> Tensor | None:
    if rank is not None and rank not in range(x.mesh.size):
        raise fail(f"device_get: the mesh has no rank {rank}", fix=f"ranks are 0 to {x.mesh.size - 1}")
    if x.mesh.kind == "abstract":
        raise fail(f"device_get: {x!r} is on an abstract mesh, where leaves have no values")
    if x.mesh.kind == "process":
        refuse_transfer("device_get")
        return _gather_to_host(x, rank)
    out = torch.empty(x.shape, dtype=x.dtype)
    for at, part in zip(x.mesh.ranks, x.shards, strict=True):
        out[x.box(at)] = part.detach().cpu()
    return out


def _gather_to_host(x: Sharded, rank: int | None) -> Tensor | None:
    """Send every part from its first owner to `rank`, or to all, one at a time."""
    me = x.mesh.ranks[0]
    part = copy_to_device(x.shards[0].detach().contiguous(), x.mesh.device)
    out = torch.empty(x.shape, dtype=x.dtype) if rank in (None, me) else None
    for box, (owner, *_) in different_parts(x.shape, x.spec, x.mesh.axes):
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


@checked
def reshard(tree_: Any, specs: Any, mesh: Mesh | None = None) -> Any:
    """Move placed leaves to other specs, or to another mesh of the same kind.

    Every device receives only elements of its new part: a device that needs part of a leaf never allocates the full
    leaf. `specs` may be a prefix; `mesh` defaults to the one each leaf is on.

    >>> reshard(device_put(torch.zeros(4, 6), P("data"), mesh), P(None, "model"))
    f32[4, 6@model]

    Raises ShardingError listing every leaf that is not placed, and for a mesh of another kind.
    """
    for path, leaf in tree.leaves_with_path(tree_):
        if not isinstance(leaf, Sharded):
            raise fail(f"reshard: {tree.show('tree', path)} is a {type(leaf).__name__}, not a placed leaf",
                       fix="fs.device_put places tensors, fs.materialize described leaves")  # fmt: skip
        if mesh is not None and mesh.kind != leaf.mesh.kind:
            raise fail(f"reshard: from {leaf.mesh!r} to {mesh!r}, a mesh of another kind",
                       fix="fs.device_put(fs.device_get(tree), specs, mesh)")  # fmt: skip
    return place_tree("reshard", tree_, specs, mesh, (Sharded,), lambda _, x, spec: _move(x, spec, mesh or x.mesh))


def _move(x: Sharded, spec: P, mesh: Mesh) -> Sharded:
    if mesh.kind == "abstract":
        return abstract_sharded(x.shape, x.dtype, spec, mesh)
    if mesh == x.mesh and same_placement(spec, x.spec.with_entries(*x.spec, memory=spec.memory), x.ndim):
        return Sharded(x.shape, spec, mesh, [to_spec_memory(s, spec, mesh.device, copy=True) for s in x.shards])
    return _exchange(x, spec, mesh) if mesh.kind == "process" else _copy(x, spec, mesh)


def _copy(x: Sharded, spec: P, mesh: Mesh) -> Sharded:
    shards = []
    for rank in mesh.ranks:
        box = local_box(x.shape, spec, mesh.axes, mesh.coords(rank))
        part = empty_part(box_shape(box), x.dtype, spec, mesh.device)
        for source, common in _sources(x, box, rank):
            part[relative_box(common, box)] = x.shards[source][relative_box(common, x.box(source))]
        shards.append(part)
    return Sharded(x.shape, spec, mesh, shards)


def _exchange(x: Sharded, spec: P, mesh: Mesh) -> Sharded:
    refuse_transfer("reshard")
    me = mesh.ranks[0]
    boxes = [local_box(x.shape, spec, mesh.axes, mesh.coords(rank)) for rank in range(mesh.size)]
    mine = x.box(me)
    part = copy_to_device(x.shards[0], mesh.device)
    send = [
        [part[relative_box(c, mine)].reshape(-1) for s, c in _sources(x, box, rank) if s == me]
        for rank, box in enumerate(boxes)
    ]
    # A stable sort keeps the order in which each sender packs its parts.
    incoming = sorted(_sources(x, boxes[me], me), key=lambda pair: pair[0])
    counts = [0] * mesh.size
    for source, common in incoming:
        counts[source] += math.prod(box_shape(common))
    flat = torch.cat([p for pieces in send for p in pieces] or [part.new_empty(0)]).contiguous()
    # Sent as bytes, which every backend supports, unlike some dtypes.
    received = torch.empty(sum(counts), dtype=x.dtype, device=mesh.device)
    size = x.dtype.itemsize
    dist.all_to_all_single(received.view(torch.uint8), flat.view(torch.uint8), [n * size for n in counts],
                           [sum(p.numel() for p in pieces) * size for pieces in send])  # fmt: skip
    out = torch.empty(box_shape(boxes[me]), dtype=x.dtype, device=mesh.device)
    at = 0
    for _, common in incoming:
        n = math.prod(box_shape(common))
        out[relative_box(common, boxes[me])] = received[at : at + n].view(box_shape(common))
        at += n
    return Sharded(x.shape, spec, mesh, [to_spec_memory(out, spec, mesh.device)])


def _sources(x: Sharded, box: Box, rank: int) -> list[tuple[int, Box]]:
    """Return the sources of the elements of `box` for `rank`: (source rank, common box).

    The source is the rank itself if it has the part, else one of its replicas, a different one for each rank in turn.
    """
    return [(rank if rank in ranks else ranks[rank % len(ranks)], common)
            for part, ranks in different_parts(x.shape, x.spec, x.mesh.axes)
            if (common := overlap(box, part)) is not None]  # fmt: skip
