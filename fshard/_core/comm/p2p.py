"""Transfers as messages between pairs of ranks, from the memory of one rank's tensors to the memory of another's.

Gloo's all_gather and reduce_scatter copy into buffers, and take about twice as long over sockets. Here every rank
reduces in the order of the ranks, so the results have the same bits on all of them, and on a simulated mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard._core.packing import parts_by_rank, reduce_in_order
from fshard._core.protocol import Axes, Dims, PendingTransfer, Series
from fshard._core.region import storage_key
from fshard._core.torch import foreach_copy_
from fshard._core.transfers import reduction
from fshard.spec import part_lengths

from .description import Description, describe_transfer
from .gloo import ByPeer, Peers, PendingMessages, pack_messages, unpack_messages
from .group import Pairs

_WHOLE = 1 << 14  # bytes up to which every rank reduces everything: half the bytes are not worth a second round


@dataclass(frozen=True)
class PeerGroup(Peers):
    """Peers that are the ranks over some axes, in their order, and the verbs of `Comm`."""

    axes: Axes
    sizes: Sequence[int]  # of the axes

    messages = PendingMessages  # a class: each transfer makes one

    @functools.cached_property
    def others(self) -> list[int]:
        return [r for r in range(len(self.ranks)) if r != self.me]

    def _describe(self, op: str, xs: Sequence[Tensor], details: Sequence[Any] = ()) -> Description:
        """Describe a transfer of tensors whose shapes, and other details, are equal on every rank."""
        return describe_transfer(op, self.axes, xs[0].dtype, tuple([x.shape for x in xs]), tuple(details))

    def agree(self, description: Description) -> None:
        """Raise ShardingError on every rank unless all pass an equal description."""
        self.messages(self, description, {}, {}).wait()

    def gather(self, xs: Sequence[Tensor], into: Sequence[Tensor], dims: Dims) -> PendingTransfer:
        rows = parts_by_rank(into, dims, self.sizes)
        description = self._describe("all_gather", into, dims)
        messages = self.messages(self, description, dict.fromkeys(self.others, xs), {r: rows[r] for r in self.others})
        foreach_copy_(list(rows[self.me]), list(xs))

        def wait() -> list[Tensor]:
            messages.wait()
            return []

        return wait

    def scatter(self, xs: Sequence[Tensor], dims: Dims) -> PendingTransfer:
        rows = parts_by_rank(xs, dims, self.sizes)
        mine = rows[self.me]
        parts = _Parts(self, self._describe("reduce_scatter", xs, dims),
                       {r: pack_messages(rows[r]) for r in self.others},
                       pack_messages(mine, contiguous=False))  # fmt: skip
        return lambda: unpack_messages(parts.reduce("sum"), mine)

    def reduce(self, xs: Sequence[Tensor], fresh: bool, op: str = "sum") -> PendingTransfer:
        n, me, description = len(self.ranks), self.me, self._describe(reduction(op), xs)
        flats = [x.view(-1) for x in pack_messages(xs)]
        read_only = {storage_key(x) for x in xs} if fresh else set()
        outs = [None if storage_key(flat) in read_only else flat for flat in flats]

        def results(totals: Sequence[Tensor]) -> list[Tensor]:
            reduced = unpack_messages(totals, xs)
            if fresh:
                return reduced
            for x, y in zip(xs, reduced, strict=True):
                if storage_key(x) != storage_key(y):
                    x.copy_(y)
            return list(xs)

        if n == 2 or sum(x.nbytes for x in flats) <= _WHOLE:
            full = _Parts(self, description, dict.fromkeys(self.others, flats), flats)
            return lambda: results(full.reduce(op, outs))

        # 1. Each rank reduces its n-th of the tensors. 2. Every rank sends it to all others. A new total is the buffer
        # of both rounds: rank r's summand of this n-th is received where the n-th of rank r is received after it.
        pieces = [_split_evenly(flat, n) for flat in flats]
        totals = [_empty(flat, [n * len(row[0])]) if out is None else out
                  for flat, row, out in zip(flats, pieces, outs, strict=True)]  # fmt: skip
        summands = {
            r: [_empty(row[me], row[me].shape) if out is not None else total.chunk(n)[r][: len(row[me])]
                for row, out, total in zip(pieces, outs, totals, strict=True)]
            for r in self.others
        }  # fmt: skip
        outgoing = {r: [row[r] for row in pieces] for r in self.others}
        parts = _Parts(self, description, outgoing, [row[me] for row in pieces], summands)

        def wait() -> list[Tensor]:
            full = [total[: len(flat)] for total, flat in zip(totals, flats, strict=True)]
            into = [_split_evenly(total, n) for total in full]
            reduced = parts.reduce(op, [row[me] for row in into])
            incoming = {r: [row[r] for row in into] for r in self.others}
            self.messages(self, description, dict.fromkeys(self.others, reduced), incoming, parts.messages).wait()
            return results(full)

        return wait

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        return self.reduce([x], True, op)()[0]

    def all_gather(self, x: Tensor) -> Tensor:
        out = _empty(x, (len(self.ranks), *x.shape))
        self.gather([x[None]], [out], [0])()
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.scatter([x], [0])()[0][0]

    def all_to_all(self, x: Tensor) -> Tensor:
        out = _empty(x, x.shape)
        messages = self.messages(self, self._describe("all_to_all", [x]), {r: [x[r]] for r in self.others},
                                 {r: [out[r]] for r in self.others})  # fmt: skip
        out[self.me].copy_(x[self.me])
        messages.wait()
        return out

    def all_to_all_rows(self, x: Tensor, send: Sequence[int], receive: Sequence[int], exchanged: bool) -> Tensor:
        out = _empty(x, (sum(receive), *x.shape[1:]))
        parts, places = x.split_with_sizes(list(send)), out.split_with_sizes(list(receive))
        description = describe_transfer("all_to_all_rows", self.axes, x.dtype, (x.shape[1:],))
        counts = {r: (send[r], receive[r]) for r in self.others}
        messages = self.messages(self, description, {r: [parts[r]] for r in self.others},
                                 {r: [places[r]] for r in self.others}, counts=counts)  # fmt: skip
        places[self.me].copy_(parts[self.me])
        messages.wait()
        return out

    def permute(self, x: Tensor, pairs: Pairs) -> Tensor:
        return self.send([x], pairs, entered=range(len(self.ranks)))()[0].contiguous()

    def send(
        self, xs: Sequence[Tensor], pairs: Pairs, series: Series | None = None, entered: Collection[int] | None = None
    ) -> PendingTransfer:
        """Exchange messages only with the ranks that a pair names with this one, or with all the `entered` ones."""
        me = self.me
        targets = {target for source, target in pairs if source == me}
        sources = {source for source, target in pairs if target == me}
        out = [_empty(x, x.shape) if sources else x.new_zeros(()).expand(x.shape) for x in xs]  # zeros without memory
        if entered is None:
            entered = sorted({me, *targets, *sources})
        details = [*sorted(pairs), *([series.name] if series else [])]
        messages = self.messages(self, self._describe("permute", xs, details), dict.fromkeys(targets - {me}, xs),
                                 dict.fromkeys(sources - {me}, out), entered=entered,
                                 compared=series is None or series.is_first)  # fmt: skip
        if me in sources:
            foreach_copy_(out, list(xs))

        def wait() -> list[Tensor]:
            messages.wait()
            return out

        return wait


class _Parts:
    """The parts of a reduction: this rank's, and the pending ones of each other rank."""

    def __init__(
        self, peers: PeerGroup, description: Description, outgoing: ByPeer, mine: Sequence[Tensor],
        buffers: ByPeer | None = None,
    ) -> None:  # fmt: skip
        received = buffers or {r: [_empty(x, x.shape) for x in mine] for r in peers.others}
        self._parts = list(zip(*(xs for _, xs in sorted({**received, peers.me: mine}.items())), strict=True))
        self._buffers = received[peers.others[0]]
        self.messages = peers.messages(peers, description, outgoing, received)

    def reduce(self, op: str, outs: Sequence[Tensor | None] | None = None) -> list[Tensor]:
        """Wait, and reduce in the order of the ranks: into `outs`, or for `None` into a received part."""
        self.messages.wait()
        return [
            reduce_in_order(parts, op, buffer, buffer if out is None else out)
            for parts, buffer, out in zip(self._parts, self._buffers, outs or [None] * len(self._buffers), strict=True)
        ]


def _split_evenly(flat: Tensor, n: int) -> Sequence[Tensor]:
    return flat.split_with_sizes(part_lengths(len(flat), [n]))


def _empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)
