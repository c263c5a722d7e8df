"""The zigzag order of positions that an axis splits: of 2n chunks, rank r has numbers r and 2n-1-r.

With causal attention a late position attends to more positions than an early one. In this order all ranks have equal
work. Legend: B batch, T positions, n ranks of the axis; [T@axis] is a dim split over the axis.
Source: Zhu, 2024, "ring-flash-attention".
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fshard import tree
from fshard._core.ops import Counts, dim_of, exchange_rows, global_size
from fshard._core.protocol import index_of
from fshard._core.region import known_axes, live_axis, region
from fshard.errors import checked, fail, must_be
from fshard.spec import Axis, P, names_of, part_lengths, part_range

Order = Literal["zigzag", "contiguous"]


class Piece(NamedTuple):
    """Neighbouring positions, from `start` to before `stop`, that are in memory from `at` on."""

    start: int
    stop: int
    at: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Split:
    """A sequence of `size` positions over ranks, whose parts have these lengths in each order; this rank is `me`."""

    size: int
    lengths: tuple[int, ...]
    me: int
    order: Order

    @staticmethod
    def make(verb: str, axes: tuple[str, ...], order: Order, size: int | None, n: int | None = None) -> Split:
        """Return the split over these axes; this rank has `n` positions, by which the size is known."""
        current = region(verb)
        if size is None:
            assert n is not None
            size = global_size(verb, n, axes)
        if size < 0:
            raise fail(f"{verb}: size={size}", fix="0 or more")
        lengths = tuple(part_lengths(size, [current.sizes[a] for a in axes]))
        me = index_of(axes, current.sizes, current.coords)
        if n not in (None, lengths[me]):
            raise fail(f"{verb}: this rank has {n} positions, and its part is {lengths[me]}", size=size, axis=axes,
                       fix="pass the global size=")  # fmt: skip
        return Split(size, lengths, me, order)

    def pieces(self, *ranks: int) -> list[Piece]:
        """Return the positions of some ranks, with their places in memory if the parts are joined."""
        out, at = [], 0
        for r in ranks:
            length, before = self.lengths[r], sum(self.lengths[:r])
            ends = [before, before + length]
            if self.order == "zigzag":  # the first halves of all parts, then the second ones, from the last rank on
                first, firsts = -(-length // 2), sum(-(-n // 2) for n in self.lengths[:r])
                stop = self.size - (before - firsts)
                ends = [firsts, firsts + first, stop - (length - first), stop]
            for start, stop in zip(ends[::2], ends[1::2], strict=True):
                out.append(Piece(start, stop, at))
                at += stop - start
        return [p for p in out if p.length]


def compact(pieces: Sequence[Piece]) -> list[Piece]:
    """Return pieces with their places once `take` has copied them."""
    ends = itertools.accumulate([p.length for p in pieces], initial=0)
    return [p._replace(at=at) for p, at in zip(pieces, ends, strict=False)]


def take(x: Tensor, pieces: Sequence[Piece], dim: int) -> Tensor:
    """Return the pieces of a dim end to end."""
    if list(pieces) == compact(pieces):
        return x.narrow(dim, 0, sum(p.length for p in pieces))
    return torch.cat([x.narrow(dim, p.at, p.length) for p in pieces], dim)


# --- the order of the tokens ------------------------------------------------------------------------------------


@checked
def to_zigzag(x: Any, axis: Axis, dim: int = 1, *, size: int | None = None) -> Any:
    """Move positions from their order to the zigzag order: of 2n chunks, rank r gets numbers r and 2n-1-r.

        [B, T@axis]{V} -> [B, T@axis in zigzag order]{V}     transpose: from_zigzag     cost: at most bytes

    All ranks have as many positions as before. `size` is the global T, needed only by a compiled program where the axis
    does not divide it. x may be a tree.

    >>> moved = to_zigzag(ids, "seq")                                # seq=2, T=8: ranks get 0 1 6 7 and 2 3 4 5

    Raises ShardingError if this rank does not have its part of `size`.
    """
    return _reorder("to_zigzag", x, axis, dim, size)


@checked
def from_zigzag(x: Any, axis: Axis, dim: int = 1, *, size: int | None = None) -> Any:
    """Move positions from the zigzag order back to their order; see `to_zigzag`, its transpose.

    >>> torch.equal(from_zigzag(to_zigzag(ids, "seq"), "seq"), ids)
    True
    """
    return _reorder("from_zigzag", x, axis, dim, size)


def _reorder(verb: str, x: Any, axis: Axis, dim: int, size: int | None) -> Any:
    axes = names_of(live_axis(verb, axis))
    orders: tuple[Order, Order] = ("contiguous", "zigzag") if verb == "to_zigzag" else ("zigzag", "contiguous")

    def move(x: Any) -> Tensor:
        if not isinstance(x, Tensor):
            raise must_be(f"{verb}: x", "a Tensor or a tree of Tensors", x)
        d = dim_of(f"{verb}: x", x, dim)
        before = Split.make(verb, axes, orders[0], size, x.shape[d])
        if not axes:
            return x
        after, ranks = replace(before, order=orders[1]), range(len(before.lengths))
        sent = [_common(before.pieces(before.me), after.pieces(r)) for r in ranks]
        received = [_common(before.pieces(r), after.pieces(after.me)) for r in ranks]
        to, of = (tuple([sum(p.length for p in pieces) for pieces in runs]) for runs in (sent, received))
        rows = take(x, list(itertools.chain(*sent)), d).movedim(d, 0)
        (rows,) = exchange_rows(axes, Counts(to, of, True), [rows])
        return take(rows, sorted(compact(list(itertools.chain(*received)))), 0).movedim(0, d)

    return tree.map(move, x)


def _common(pieces: Sequence[Piece], others: Sequence[Piece]) -> list[Piece]:
    """Return the positions that are in two parts, with their places in the first one's memory."""
    both = [(p, max(p.start, q.start), min(p.stop, q.stop)) for p in pieces for q in others]
    return [Piece(start, stop, p.at + start - p.start) for p, start, stop in both if start < stop]


@checked
def zigzag_positions(size: int, axis: Axis) -> Tensor:
    """Return the global positions of this rank's tokens in the zigzag order, of a sequence of `size`: [T@axis] int64.

    >>> zigzag_positions(8, "seq")                                # seq=2: the first rank
    tensor([0, 1, 6, 7])
    """
    current = region("zigzag_positions")
    axes = known_axes("zigzag_positions", current, axis)
    split = Split.make("zigzag_positions", axes, "zigzag", size)
    out = positions(split.pieces(split.me), current.device)
    if current.checker is not None:
        current.checker.set_integer_type(out, "zigzag_positions", varies=axes)
    return out


def positions(pieces: Sequence[Piece], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(p.start, p.stop, device=device) for p in pieces or [Piece(0, 0, 0)]])


def local_ranges(verb: str, shape: Sequence[int], spec: P, axis: Axis) -> tuple[int, list[slice]]:
    """Return the dim of a global array that `axis` splits in the zigzag order, and the ranges that this rank has.

    Further axes of that dim split this rank's part of it, in its order.
    """
    current, names = region(verb), known_axes(verb, region(verb), axis)
    found = [(d, axes[len(names) :]) for d, axes in enumerate(spec.parts(len(shape))) if axes[: len(names)] == names]
    if len(found) != 1:
        raise fail(f"{verb}: zigzag={axis!r} is not the first axis of a dim of spec {spec}", shape=list(shape),
                   fix="the axis that to_zigzag moved positions over")  # fmt: skip
    dim, others = found[0]
    split = Split.make(verb, names, "zigzag", shape[dim])
    pieces = split.pieces(split.me)
    start, length = part_range(split.lengths[split.me], [current.sizes[a] for a in others],
                               [current.coords[a] for a in others])  # fmt: skip
    cut = [(max(p.at, start) - p.at, min(p.at + p.length, start + length) - p.at) for p in pieces]
    return dim, [slice(p.start + a, p.start + max(a, b)) for p, (a, b) in zip(pieces, cut, strict=True)]
