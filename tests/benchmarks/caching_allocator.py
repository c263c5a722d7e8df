"""Bytes that CUDA's caching allocator of torch reserves for a planned step, with expandable segments.

`torch.cuda.max_memory_reserved()` is more than the bytes of the tensors: freed blocks lie between others, and those of
one stream are not used by another. A plan knows when each storage is allocated and freed; here these go through the
allocator's policy. Source: torch, `c10/cuda/CUDACachingAllocator.cpp`: sizes are rounded up to 512 bytes; the smallest
free block of the stream that is large enough is taken, and split; else the segment of the stream grows; neighbours that
are free are joined.
"""

from __future__ import annotations

import bisect

from fshard.planning import Plan, Start
from fshard.planning.memory import Storage

STEPS = 2  # the second finds the freed blocks of the first


class Segment:
    """The memory of one stream: blocks in the order of their addresses."""

    def __init__(self) -> None:
        self.size = 0
        self._free: list[tuple[int, int]] = []  # (address, bytes), by address

    def allocate(self, nbytes: int) -> int:
        """Return the address of a new block."""
        fitting = [(n, address) for address, n in self._free if n >= nbytes]
        if fitting:
            n, address = min(fitting)
            self._free.remove((address, n))
            if n > nbytes:
                bisect.insort(self._free, (address + nbytes, n - nbytes))
            return address
        address = self.size
        if self._free and sum(self._free[-1]) == self.size:  # the end of the segment is free, and grows
            address = self._free.pop()[0]
        self.size = address + nbytes
        return address

    def free(self, address: int, nbytes: int) -> None:
        """Give a block back."""
        at = bisect.bisect(self._free, (address, 0))
        if at < len(self._free) and self._free[at][0] == address + nbytes:
            nbytes += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == address:
            address, before = self._free.pop(at - 1)
            at, nbytes = at - 1, nbytes + before
        self._free.insert(at, (address, nbytes))


def reserved(plan: Plan) -> int:
    """Return the bytes that are reserved after some steps, each stream of FSDP2 apart.

    FSDP2 allocates the buffers of a gather on a stream of its own, and those of a sum of gradients, and what the sum
    leaves on this rank, on another one.
    """
    storages = plan.memory.storages
    opened = [e.transfer.op if isinstance(e, Start) else None for e in plan.events]
    for i, op in enumerate(opened):
        opened[i] = op or (opened[i - 1] if i else None)
    segments: dict[str, Segment] = {}
    moments: list[tuple[int, int, int, Storage]] = []
    for i, s in enumerate(storages):
        if s.argument or not s.born:
            continue
        moments.append((s.born, 1, i, s))
        if s.died is not None:
            moments.append((s.died, 0, i, s))
    moments.sort(key=lambda m: m[:3])

    def place(s: Storage) -> Segment:
        stream = "compute"
        if s.sources or s.part == "buffers":
            last = opened[min(s.born, len(opened)) - 1] or ""
            stream = "sums" if s.sources or "reduce" in last else "gathers"
        return segments.setdefault(stream, Segment())

    held: dict[int, tuple[Segment, int, int]] = {}

    def allocate(i: int, s: Storage) -> None:
        segment, nbytes = place(s), -(-s.nbytes // 512) * 512
        held[i] = segment, segment.allocate(nbytes), nbytes

    for i, s in enumerate(storages):
        if (s.argument or not s.born) and s.nbytes:
            allocate(i, s)
    for _ in range(STEPS):
        for _, born, i, s in moments:
            if s.nbytes and born:
                allocate(i, s)
            elif i in held:
                segment, address, nbytes = held.pop(i)
                segment.free(address, nbytes)
        for i, s in enumerate(storages):  # gradients of the caller, which zero_grad frees
            if not s.argument and s.born and i in held:
                segment, address, nbytes = held.pop(i)
                segment.free(address, nbytes)
    return sum(segment.size for segment in segments.values())
