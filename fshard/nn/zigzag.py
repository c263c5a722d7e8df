"""The zigzag order of positions that an axis splits: of 2n chunks, rank r has numbers r and 2n-1-r.

With causal attention a late position attends to more positions than an early one. In this order all ranks have equal
work. Legend: B batch, T positions, n ranks of the axis; [T@axis] is a dim split over the axis.
Source: Zhu, 2024, "ring-flash-attention".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fshard import tree
from fshard._core.ops import Permute, apply_map, dim_of, total_size
from fshard._core.packing import pad
from fshard._core.protocol import coords_of, index_of
from fshard._core.region import known_axes, live_axes, region
from fshard.errors import checked, fail, must_be
from fshard.spec import Axis, P, part_range

Order = Literal["zigzag", "contiguous"]


class Piece(NamedTuple):
    """Neighbouring positions, from `start` to before `stop`, that are in one rank's memory from `at` on."""

    start: int
    stop: int
    at: int

    @property
    def length(self) -> int:
        """The number of positions."""
        return self.stop - self.start


@dataclass(frozen=True)
class Split:
    """The positions of a sequence of `size` over the ranks of axes of these `sizes`; this rank is number `me`."""

    size: int
    sizes: tuple[int, ...]
    me: int
    order: Order

    @staticmethod
    def make(verb: str, name: str, n: int, axes: tuple[str, ...], order: Order, size: int | None) -> Split:
        """Return the split of the positions of an argument with this `name`; this rank has `n` positions."""
        split = Split.from_size(verb, total_size(verb, n, axes) if size is None else size, axes, order)
        if n != (mine := sum(p.length for p in split.pieces(split.me))):
            raise fail(f"{verb}: {name} has {n} positions here, and this rank's part in {order} order is {mine}",
                       size=split.size, axis=axes, fix="pass the global size=")  # fmt: skip
        return split

    @staticmethod
    def from_size(verb: str, size: int, axes: tuple[str, ...], order: Order) -> Split:
        """Return the split of a sequence of this size."""
        current = region(verb)
        if size < 0:
            raise fail(f"{verb}: size={size}", fix="0 or more")
        me = index_of(axes, current.sizes, current.coords)
        return Split(size, tuple([current.sizes[a] for a in axes]), me, order)

    @property
    def n(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    @property
    def longest(self) -> int:
        """The length of the longest part, by any order."""
        return -(-self.size // self.n)

    @property
    def half(self) -> int:
        """The length of the longest chunk."""
        return -(-self.longest // 2)

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """The (start, stop) of 2n chunks: two for each rank, if it has its positions in order."""
        out = []
        for r in range(self.n):
            start, length = part_range(self.size, self.sizes, coords_of(r, self.sizes))
            middle = start + min(self.half, length)
            out += [(start, middle), (middle, start + length)]
        return out

    def numbers(self, rank: int) -> tuple[int, int]:
        """Return the numbers of the two chunks of a rank."""
        return (rank, 2 * self.n - 1 - rank) if self.order == "zigzag" else (2 * rank, 2 * rank + 1)

    def pieces(self, rank: int) -> list[Piece]:
        """Return the two pieces of a rank; one or both may be empty."""
        (a, b), (c, d) = (self.chunks[i] for i in self.numbers(rank))
        return [Piece(a, b, 0), Piece(c, d, b - a)]

    def joined(self, ranks: range) -> list[Piece]:
        """Return the pieces of some ranks by position, with their places where their padded parts are joined."""
        pieces = [p._replace(at=i * self.longest + p.at) for i, r in enumerate(ranks) for p in self.pieces(r)]
        return sorted(p for p in pieces if p.length)


# --- the order of the tokens ------------------------------------------------------------------------------------


@checked
def to_zigzag(x: Any, axis: Axis, dim: int = 1, *, size: int | None = None) -> Any:
    """Move positions from their order to the zigzag order: of 2n chunks, rank r gets numbers r and 2n-1-r.

        [B, T@axis]{V} -> [B, T@axis in zigzag order]{V}     transpose: from_zigzag     cost: at most bytes

    `size` is the global T, needed only if the axis does not divide it. x may be a tree.

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
    axes = live_axes(region(verb).comm, known_axes(verb, region(verb), axis))
    orders: tuple[Order, Order] = ("contiguous", "zigzag") if verb == "to_zigzag" else ("zigzag", "contiguous")

    def move(x: Any) -> Tensor:
        if not isinstance(x, Tensor):
            raise must_be(f"{verb}: x", "a Tensor or a tree of Tensors", x)
        d = dim_of(f"{verb}: x", x, dim)
        before = Split.make(verb, "x", x.shape[d], axes, orders[0], size)
        if not axes:
            return x
        after = replace(before, order=orders[1])
        sent, kept = before.numbers(before.me), after.numbers(after.me)
        chunks = {i: pad(x.narrow(d, p.at, p.length), d, before.half)
                  for i, p in zip(sent, before.pieces(before.me), strict=True)}  # fmt: skip
        holders = {i: r for r in range(after.n) for i in after.numbers(r)}
        # Of two chunks of a rank one has an even number and one an odd number, in each order: a permute for each.
        for parity in (0, 1):
            pairs = tuple([(r, holders[i]) for r in range(before.n) for i in before.numbers(r) if i % 2 == parity])
            mine = next(i for i in sent if i % 2 == parity)
            (chunks[-1 - parity],) = apply_map(Permute(region(verb).comm, axes, pairs), [chunks[mine]])
        parts = [chunks[-1 - i % 2].narrow(d, 0, p.length) for i, p in zip(kept, after.pieces(after.me), strict=True)]
        return torch.cat(parts, d)

    return tree.map(move, x)


@checked
def zigzag_positions(size: int, axis: Axis) -> Tensor:
    """Return the global positions of this rank's tokens in the zigzag order, of a sequence of `size`: [T@axis] int64.

    >>> zigzag_positions(8, "seq")                                # seq=2: the first rank
    tensor([0, 1, 6, 7])
    """
    return positions_of("zigzag_positions", size, axis, "zigzag")


def positions_of(verb: str, size: int, axis: Axis, order: Order) -> Tensor:
    """Return the global positions of this rank's tokens in this order."""
    current = region(verb)
    axes = known_axes(verb, current, axis)
    split = Split.from_size(verb, size, axes, order)
    out = positions(split.pieces(split.me), current.device)
    if current.checker is not None:
        current.checker.set_integer_type(out, verb, varies=axes)
    return out


def positions(pieces: Sequence[Piece], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(p.start, p.stop, device=device) for p in pieces])


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
    split = Split.from_size(verb, shape[dim], names, "zigzag")
    pieces = split.pieces(split.me)
    start, length = part_range(sum(p.length for p in pieces), [current.sizes[a] for a in others],
                               [current.coords[a] for a in others])  # fmt: skip
    cut = [(max(p.at, start) - p.at, min(p.at + p.length, start + length) - p.at) for p in pieces]
    return dim, [slice(p.start + a, p.start + max(a, b)) for p, (a, b) in zip(pieces, cut, strict=True)]
