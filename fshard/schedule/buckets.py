"""The weights of one block: how they come whole to a rank, where they lie, and how their gradients go back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard._comm import (
    PendingTransfer,
    Region,
    checker,
    copy_to_device,
    start_copy_to_device,
    start_copy_to_host,
)
from fshard._ops import Gather, Map, Precision, Vary, gather_layout, run_map
from fshard._torch_compat import foreach_copy_

from .unshard import Route

ALIGNED = 64  # bytes: where vector registers and caches begin


@dataclass(frozen=True)
class Bucket:
    """Leaves of a block that travel together: gathered over some axes and used by each rank of others in its own way.

    One transfer forward and one back; two back where they were both gathered and varied (hybrid sharding).
    """

    which: tuple[int, ...]
    gather: Gather | None
    vary: Vary | None
    cast: Precision | None
    host: bool  # whether they are in host memory

    @property
    def copied(self) -> bool:
        """Whether what computes is a copy of a rank's own."""
        return self.cast is not None or self.host


class Place(NamedTuple):
    """Where a whole leaf lies in a slot: from which byte on, and what it is there."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class BucketPlan:
    """How the leaves of a block travel, and the place in a slot of each that is gathered or cast."""

    bundles: tuple[Bucket, ...]
    places: tuple[Place | None, ...]
    nbytes: int


def plan(
    where: Region, leaves: Sequence[Tensor], ways: Sequence[Route], dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> BucketPlan | None:  # fmt: skip
    """The plan for leaves by these routes; `None` where a leaf is split by the axes on more than one dim."""
    if any(len(way.gathers) > 1 for way in ways):
        return None
    groups: dict[Any, list[int]] = {}
    for i, (x, way) in enumerate(zip(leaves, ways, strict=True)):
        groups.setdefault((way.gathers[0].axes if way.gathers else (), way.vary, x.dtype, way.host), []).append(i)
    places: list[Place | None] = [None] * len(leaves)
    bundles, end = [], 0
    for (axes, vary, _, host), which in groups.items():
        xs, gather, cast = [leaves[i] for i in which], None, Precision.of(leaves[which[0]], dtype, reduce_dtype)
        if axes:
            joined = [ways[i].gathers[0] for i in which]
            layout = gather_layout("scan", where.comm, axes, xs, [j.dim for j in joined], [j.size for j in joined])
            gather = Gather(where.comm, axes, layout)
        kind = xs[0].dtype if cast is None else cast.computed
        for k, (i, x) in enumerate(zip(which, xs, strict=True)):
            if gather is not None or kind != x.dtype or host:
                dim, size = gather.layout[k] if gather is not None else (0, x.shape[0] if x.ndim else 0)
                shape = (*x.shape[:dim], size, *x.shape[dim + 1 :]) if x.ndim else ()
                places[i] = Place(end, kind, shape)
                end += -(-math.prod(shape) * kind.itemsize // ALIGNED) * ALIGNED
        if axes or vary or cast or host:
            bundles.append(Bucket(tuple(which), gather, Vary(where.comm, vary) if vary else None, cast, host))
    return BucketPlan(tuple(bundles), tuple(places), end)


@dataclass
class GatherBuffer:
    """A buffer in which the gathered weights of one block lie at a time.

    Backward fills it again with what its views held in forward, which autograd must not take for a change: `filling`
    and `reading` are the same memory, with a version counter each.
    """

    filling: Tensor  # uint8[n]
    reading: Tensor
    holds: Any = None  # of which walk, and which of its blocks

    @staticmethod
    def of(nbytes: int, device: torch.device) -> GatherBuffer:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return GatherBuffer(buffer, buffer.data)


def views(buffer: Tensor, of: BucketPlan, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The whole leaves of a block in a buffer; those that need no place, as they are."""
    out = []
    for place, x in zip(of.places, leaves, strict=True):
        if place is not None:
            end = place.start + math.prod(place.shape) * place.dtype.itemsize
            x = buffer[place.start : end].view(place.dtype).view(place.shape)
        out.append(x)
    return out


# --- buffers that outlive a call ----------------------------------------------------------------------------------


@dataclass
class BufferPool:
    """The slots of a rank, kept from call to call by the region's scratch. A loop inside a loop takes others."""

    free: list[GatherBuffer] = field(default_factory=list)

    def take(self, n: int, nbytes: int, where: Region) -> list[GatherBuffer]:
        """`n` slots of at least so many bytes, those in the pool first. On an abstract mesh they have none."""
        if not nbytes:
            return []
        if not where.comm.has_values:
            return [GatherBuffer(torch.empty(0), torch.empty(0)) for _ in range(n)]
        fit = [s for s in self.free if s.filling.numel() >= nbytes and s.filling.device == where.device][:n]
        new = [GatherBuffer.of(nbytes, where.device) for _ in range(n - len(fit))]
        if new:  # those too small are not kept beside the larger ones
            self.free = [*fit, *new]
        return [*fit, *new]

    def hold(self, slots: Sequence[GatherBuffer]) -> None:
        """Let no other loop have these until they are given back."""
        self.free = [s for s in self.free if all(s is not t for t in slots)]

    def give_back(self, slots: Sequence[GatherBuffer]) -> None:
        self.free += [s for s in slots if s.filling.numel() and all(s is not t for t in self.free)]


def pool(where: Region) -> BufferPool:
    """The slots of this rank."""
    found: BufferPool = where.scratch.setdefault("scan", BufferPool())
    return found


# --- there and back -----------------------------------------------------------------------------------------------


def stage(where: Region, of: BucketPlan, shards: Sequence[Tensor]) -> PendingTransfer:
    """Start to copy to the device what of a block lies in host memory; lands as the shards to `fetch`.

    Those that are used as they are stay where they are: they are copied to their places, and need no other.
    """
    moving = [i for b in of.bundles if b.host and (b.gather or b.cast) for i in b.which]
    flight = start_copy_to_device(where, [shards[i] for i in moving])

    def land() -> list[Tensor]:
        out = list(shards)
        for i, x in zip(moving, flight(), strict=True):
            out[i] = x
        return out

    return land


def fetch(
    where: Region, of: BucketPlan, shards: Sequence[Tensor], slot: GatherBuffer | None
) -> tuple[list[Tensor], list[PendingTransfer]]:  # fmt: skip
    """Start to gather a block: its whole leaves, which are those once the flights have landed.

    Where the call is checked they are typed, and land at once. On an abstract mesh they are shapes.
    """
    whole, flights = list(shards), []
    found, virtual = checker(), slot is not None and not slot.filling.numel()
    filling = reading = whole
    if slot is not None and not virtual:
        filling, reading = views(slot.filling, of, shards), views(slot.reading, of, shards)
    for bundle in of.bundles:
        xs, ys = [shards[i] for i in bundle.which], [reading[i] for i in bundle.which]
        into = [filling[i] for i in bundle.which]
        if bundle.vary is not None and found is not None:
            xs = list(run_map(bundle.vary, xs))
        if bundle.gather is not None and bundle.cast is not None:
            xs = [x.to(bundle.cast.computed) for x in xs]
        if bundle.gather is not None and virtual:
            ys = list(run_map(bundle.gather, xs))
        elif bundle.gather is not None and found is not None:
            run_map(_Placed(bundle.gather.comm, bundle.gather.axes, bundle.gather.layout, tuple(into), tuple(ys)), xs)
        elif bundle.gather is not None:
            flights.append(bundle.gather.start(xs, into))
        elif not bundle.copied or slot is None or virtual or found is not None:
            ys = [copy_to_device(x, where.device) for x in xs] if bundle.host else xs
            ys = ys if bundle.cast is None else [y.to(bundle.cast.computed) for y in ys]
        elif bundle.cast is None:
            flights.append(start_copy_to_device(where, xs, into))
        else:
            foreach_copy_(into, xs)
        for i, y in zip(bundle.which, ys, strict=True):
            whole[i] = y
    return whole, flights


@dataclass(frozen=True)
class _Placed(Gather):
    """A gather into tensors that are there, which are known as others of the same memory."""

    into: tuple[Tensor, ...] = field(default=(), compare=False)
    seen: tuple[Tensor, ...] = field(default=(), compare=False)

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        self.start(xs, self.into)()
        return list(self.seen)


def send_back(bundle: Bucket, which: Sequence[int], grads: list[Tensor]) -> PendingTransfer:
    """Start to sum the gradients of some leaves of a bundle over the ranks; lands as those of their shards.

    `which` counts within the bundle. The gradients are overwritten. Those of leaves in host memory are on their way
    there when they land, until the device is awaited.
    """
    total, back = None if bundle.vary is None else bundle.vary.transpose, None
    if bundle.gather is not None:
        back = bundle.gather.only(which).transpose
    if bundle.cast is not None:
        grads = [g.to(bundle.cast.summed) for g in grads]
    first = back or total
    flight = _start(first, grads) if first is not None else lambda: grads
    kept = None if bundle.cast is None else bundle.cast.kept

    def land() -> list[Tensor]:
        out = flight() if kept is None else [g.to(kept) for g in flight()]
        out = out if back is None or total is None else _start(total, out)()
        return [start_copy_to_host(g) for g in out] if bundle.host else out

    return land


def _start(m: Map, xs: list[Tensor]) -> PendingTransfer:
    """Start a sum over the ranks. Where the call is checked, or a dry run, it lands at once."""
    if checker() is not None or not m.comm.has_values:
        out = list(run_map(m, xs))
        return lambda: out
    return m.start(xs)


__all__ = ["Bucket", "BucketPlan", "BufferPool", "GatherBuffer", "fetch", "plan", "pool", "send_back", "stage", "views"]
