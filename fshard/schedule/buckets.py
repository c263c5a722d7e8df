"""The weights of one block in transfer: the buckets in which they are gathered and their gradients are reduced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard._core.host_memory import copy_to_device, start_copy_to_device, start_copy_to_host
from fshard._core.ops import Gather, Precision, Slice, Vary, gather_layout, run_map, start_map
from fshard._core.protocol import PendingTransfer
from fshard._core.region import Region, checker
from fshard._core.torch import foreach_copy_
from fshard.spec import total

from .unshard import Route

ALIGNMENT = 64  # bytes: the width of vector registers and cache lines


@dataclass(frozen=True)
class Bucket:
    """Leaves of a block that share each transfer: gathered over some axes, varied over others.

    One transfer in forward and one in backward; two in backward if they are gathered and varied (hybrid sharding).
    """

    which: tuple[int, ...]  # positions of the leaves in the block
    gather: Gather | None
    vary: Vary | None
    cast: Precision | None
    host: bool  # whether the leaves are in host memory


class BufferSlice(NamedTuple):
    """Part of a buffer for one gathered leaf: first byte, dtype, shape."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of a block, and a slice of a buffer for each leaf that is gathered, cast or copied."""

    buckets: tuple[Bucket, ...]
    slices: tuple[BufferSlice | None, ...]
    nbytes: int

    def keep_parts(
        self, axes: Sequence[str], gathered: Sequence[Tensor], shards: Sequence[Tensor]
    ) -> tuple[BucketPlan, list[Tensor]] | None:
        """Return what a released block is gathered from over `axes`, into the same slices, and the plan of that.

        These are copies of this rank's parts of gathered leaves. A leaf that is gathered only over `axes`, or not over
        any of them, is gathered from its shard again; `None` if all are.
        """
        buckets, parts = list(self.buckets), list(shards)
        for k, bucket in enumerate(buckets):
            over = () if bucket.gather is None else tuple(a for a in bucket.gather.axes if a in axes)
            if bucket.gather is not None and over and over != bucket.gather.axes:
                layout = tuple((dim, total(size)) for dim, size in bucket.gather.layout)
                gather = replace(bucket.gather, axes=over, layout=layout)
                buckets[k] = replace(bucket, gather=gather, vary=None, cast=None, host=False)
                local = Slice(gather.comm, over, layout).run([gathered[i] for i in bucket.which])
                for i, part in zip(bucket.which, local, strict=True):
                    parts[i] = part.clone(memory_format=torch.contiguous_format)
        return None if tuple(buckets) == self.buckets else (replace(self, buckets=tuple(buckets)), parts)

    def zero_gradient(self, shards: Sequence[Tensor], leaf: int, device: torch.device) -> Tensor:
        """Return the gradient of a leaf that this rank did not use; another rank may have used it."""
        part, x = self.slices[leaf], shards[leaf]
        shape, dtype = (x.shape, x.dtype) if part is None else (part.shape, part.dtype)
        return torch.zeros(shape, dtype=dtype, device=device)


def plan_buckets(
    region: Region, leaves: Sequence[Tensor], leaf_routes: Sequence[Route], dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> BucketPlan | None:  # fmt: skip
    """Return the plan for leaves by these routes; `None` if a leaf is gathered along more than one dim."""
    if any(len(route.gathers) > 1 for route in leaf_routes):
        return None
    groups: dict[Any, list[int]] = {}
    for i, (x, route) in enumerate(zip(leaves, leaf_routes, strict=True)):
        axes = route.gathers[0].axes if route.gathers else ()
        groups.setdefault((axes, route.vary, x.dtype, route.host), []).append(i)
    slices: list[BufferSlice | None] = [None] * len(leaves)
    buckets, end = [], 0
    for (axes, vary, _, host), which in groups.items():
        xs, gather, cast = [leaves[i] for i in which], None, Precision.make(leaves[which[0]], dtype, reduce_dtype)
        if axes:
            joined = [leaf_routes[i].gathers[0] for i in which]
            layout = gather_layout("scan", axes, xs, [j.dim for j in joined], [j.size for j in joined])
            gather = Gather(region.comm, axes, layout)
        computed = xs[0].dtype if cast is None else cast.computed
        for k, (i, x) in enumerate(zip(which, xs, strict=True)):
            if gather is not None or computed != x.dtype or host:
                dim, size = gather.layout[k] if gather is not None else (0, x.shape[0] if x.ndim else 0)
                shape = (*x.shape[:dim], total(size), *x.shape[dim + 1 :]) if x.ndim else ()
                slices[i] = BufferSlice(end, computed, shape)
                end += -(-math.prod(shape) * computed.itemsize // ALIGNMENT) * ALIGNMENT
        if axes or vary or cast or host:
            buckets.append(Bucket(tuple(which), gather, Vary(region.comm, vary) if vary else None, cast, host))
    return BucketPlan(tuple(buckets), tuple(slices), end)


# --- buffers, kept from call to call ---


@dataclass
class GatherBuffer:
    """Memory for the gathered weights of one block at a time.

    Backward writes the same weights as forward again, and autograd must not take this for a modification. So two
    tensors with separate version counters share the memory: transfers write to `write`, blocks compute with `read`.
    """

    write: Tensor  # uint8[n]
    read: Tensor
    contents: Any = None  # (executor, block) of its weights
    cut: tuple[Any, ...] = ((), [], [])  # the slices of the last block, and its views of both tensors

    @staticmethod
    def allocate(nbytes: int, device: torch.device) -> GatherBuffer:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return GatherBuffer(buffer, buffer.data)

    @staticmethod
    def of_leaves(plan: BucketPlan, region: Region) -> GatherBuffer:
        """Return a buffer whose views have separate memory: each is freed when nothing refers to it."""
        if not region.comm.is_scheduled:  # on an abstract mesh
            return GatherBuffer(torch.empty(0), torch.empty(0))
        leaves = [s and torch.empty(s.shape, dtype=s.dtype, device=region.device) for s in plan.slices]
        some = next(x for x in leaves if x is not None and x.numel())
        return GatherBuffer(some, some, cut=(plan.slices, leaves, leaves))

    def views(self, plan: BucketPlan, leaves: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the leaves of a block to write and to read; a leaf without a slice is unchanged.

        A leaf to read has a version counter that no other one has: a write to one does not modify the others.
        """
        if self.cut[0] != plan.slices:
            self.cut = plan.slices, _views(self.write, plan), _views(self.read, plan)
        _, write, read = self.cut
        return ([x if y is None else y for x, y in zip(leaves, write, strict=True)],
                [x if y is None else y.data for x, y in zip(leaves, read, strict=True)])  # fmt: skip


def _views(buffer: Tensor, plan: BucketPlan) -> list[Tensor | None]:
    """Return a view of a buffer for each leaf of a block that has a slice."""
    return [
        s and buffer[s.start : s.start + math.prod(s.shape) * s.dtype.itemsize].view(s.dtype).view(s.shape)
        for s in plan.slices
    ]


@dataclass
class BufferPool:
    """The buffers of a rank. A loop reserves its buffers while it runs, so that a loop inside it uses others."""

    free: list[GatherBuffer] = field(default_factory=list)
    reserved: int = 0
    most_reserved: int = 0

    def take(self, sizes: Sequence[int], region: Region) -> list[GatherBuffer]:
        """Return a buffer of at least each number of bytes: free buffers that fit best, and new ones.

        So loops share buffers. If only types are checked, the buffers have no memory.
        """
        if not any(sizes):
            return []
        if not region.comm.is_scheduled:
            return [GatherBuffer.allocate(0, region.host) for _ in sizes]
        free = sorted((b for b in self.free if b.write.device == region.device), key=lambda b: b.write.numel())
        taken: dict[int, GatherBuffer] = {}
        for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            fit = next((k for k, b in enumerate(free) if b.write.numel() >= sizes[i]), None)
            taken[i] = GatherBuffer.allocate(sizes[i], region.device) if fit is None else free.pop(fit)
        out = [taken[i] for i in range(len(sizes))]
        if not set(map(id, out)) <= set(map(id, self.free)):  # drop buffers that are too small
            self.free = out
        return out

    def reserve(self, buffers: Sequence[GatherBuffer]) -> None:
        """Keep these buffers from other loops until they are released."""
        taken = set(map(id, buffers))
        self.free = [b for b in self.free if id(b) not in taken]
        self.reserved += len(buffers)
        self.most_reserved = max(self.most_reserved, self.reserved)

    def release(self, buffers: Sequence[GatherBuffer]) -> None:
        """Let other loops use these buffers. Keeps the largest, as many as were in use at one time."""
        self.reserved -= len(buffers)
        free = set(map(id, self.free))
        self.free += [b for b in buffers if b.write.numel() and id(b) not in free]
        self.free = sorted(self.free, key=lambda b: -b.write.numel())[: self.most_reserved - self.reserved]


def buffer_pool(region: Region) -> BufferPool:
    """Return the buffers of this rank."""
    pool: BufferPool = region.scratch.setdefault("scan", BufferPool())
    return pool


# --- transfers ---


def start_copy(region: Region, plan: BucketPlan, shards: Sequence[Tensor]) -> PendingTransfer:
    """Start to copy the shards that are in host memory to the device; its result is the shards to gather.

    It does not copy leaves that are neither gathered nor cast: `start_gather` copies them into the buffer.
    """
    which = [i for b in plan.buckets if b.host and (b.gather or b.cast) for i in b.which]
    pending = start_copy_to_device(region, [shards[i] for i in which])

    def wait() -> list[Tensor]:
        out = list(shards)
        for i, x in zip(which, pending(), strict=True):
            out[i] = x
        return out

    return wait


def start_gather(
    region: Region, plan: BucketPlan, shards: Sequence[Tensor], buffer: GatherBuffer | None
) -> tuple[list[Tensor], list[PendingTransfer]]:  # fmt: skip
    """Start to gather a block; return its gathered leaves, to be used after the wait for all pending transfers.

    In a checked call the leaves have types, and nothing is pending. On an abstract mesh they are shapes.
    """
    gathered, pending = list(shards), []
    types, virtual = checker(), buffer is not None and not buffer.write.numel()
    write = read = gathered
    if buffer is not None and not virtual:
        write, read = buffer.views(plan, shards)
    for bucket in plan.buckets:
        xs, ys = [shards[i] for i in bucket.which], [read[i] for i in bucket.which]
        into = [write[i] for i in bucket.which]
        if bucket.vary is not None and types is not None:
            xs = list(run_map(bucket.vary, xs))
        if bucket.gather is not None and bucket.cast is not None:
            xs = [x.to(bucket.cast.computed) for x in xs]
        if bucket.gather is not None and virtual:
            ys = list(run_map(bucket.gather, xs))
        elif bucket.gather is not None and types is not None:
            gather = bucket.gather
            run_map(_GatherInto(gather.comm, gather.axes, gather.layout, tuple(into), tuple(ys)), xs)
        elif bucket.gather is not None:
            pending.append(bucket.gather.start(xs, into))
        elif buffer is None or virtual or types is not None or not (bucket.cast or bucket.host):
            ys = [copy_to_device(x, region.device) for x in xs] if bucket.host else xs
            ys = ys if bucket.cast is None else [y.to(bucket.cast.computed) for y in ys]
        elif bucket.cast is None:
            pending.append(start_copy_to_device(region, xs, into))
        else:
            foreach_copy_(into, xs)
        for i, y in zip(bucket.which, ys, strict=True):
            gathered[i] = y
    return gathered, pending


@dataclass(frozen=True)
class _GatherInto(Gather):
    """A gather that writes to the tensors `into`, and returns the tensors `read` of the same memory."""

    into: tuple[Tensor, ...] = field(default=(), compare=False)
    read: tuple[Tensor, ...] = field(default=(), compare=False)

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        self.start(xs, self.into)()
        return list(self.read)


def start_reduce(bucket: Bucket, which: Sequence[int], grads: list[Tensor]) -> PendingTransfer:
    """Start to sum the gradients of some leaves of a bucket over the ranks; its result is the gradients of the shards.

    `which` are positions in the bucket. The sum overwrites `grads`. Gradients of leaves in host memory are complete
    only after `wait_for_copies_to_host`.
    """
    total = None if bucket.vary is None else bucket.vary.transpose
    scatter = None if bucket.gather is None else bucket.gather.only(which).transpose
    if bucket.cast is not None:
        grads = [g.to(bucket.cast.summed) for g in grads]
    first = scatter or total
    pending = start_map(first, grads) if first is not None else lambda: grads

    def wait() -> Any:
        out = pending() if bucket.cast is None else [g.to(bucket.cast.stored) for g in pending()]
        out = out if scatter is None or total is None else start_map(total, out)()
        return [start_copy_to_host(g) for g in out] if bucket.host else out

    return wait
