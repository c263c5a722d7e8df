"""The linear maps behind the collectives, each with its transpose.

A map works on tensors of one dtype in one transfer. Its `transpose` is a map of the same family, so a backward pass
is the same code again, and so is the backward of a backward. `layout` gives each tensor's (dim, global size). What a
map `takes` and `gives` varies over its axes ("V") or is invariant over them ("I"): the table that the checker reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fshard._callsite import Site
from fshard._comm import Comm, PendingTransfer, index_of, join_padded, pack, pad, size_of, split_padded, unpack
from fshard._torch_compat import foreach_div_
from fshard.spec import part_lengths

Layout = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Map:
    """A linear map over `axes`, whose sizes multiply to more than one."""

    comm: Comm
    axes: tuple[str, ...]
    origin: Site | None = field(default=None, compare=False, kw_only=True)  # of a transpose: who called the other
    takes: ClassVar[str] = "V"
    gives: ClassVar[str] = "V"
    moves: ClassVar[bool] = True
    verb: ClassVar[str]  # how it is called

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        raise NotImplementedError

    def start(self, xs: Sequence[Tensor]) -> PendingTransfer:
        """Start to do it; the results come with the landing. Until then `xs` are lent."""
        raise NotImplementedError

    @property
    def transpose(self) -> Map:
        raise NotImplementedError

    def batched(self, which: Sequence[bool]) -> Map:
        """The same map where the tensors marked in `which` have a batch dim in front."""
        return self

    def only(self, which: Sequence[int]) -> Map:
        """The same map of some of the tensors."""
        return self

    def extent(self, xs: Sequence[Tensor]) -> Any:
        """The sizes of what it is applied to that are the same on every rank."""
        return [list(x.shape) for x in xs]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.comm.sizes[a] for a in self.axes)

    @property
    def n(self) -> int:
        return size_of(self.axes, self.comm.sizes)

    @property
    def index(self) -> int:
        return index_of(self.axes, self.comm.sizes, self.comm.coords)


@dataclass(frozen=True)
class Sum(Map):
    divisor: int = 1
    gives = "I"

    @property
    def verb(self) -> str:  # type: ignore[override]
        return "psum" if self.divisor == 1 else "pmean"

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        if self.comm.direct:
            return self._divided(self.comm.reduce(xs, self.axes, fresh=True)())
        total = self.comm.all_reduce(pack(xs), "sum", self.axes)
        return unpack(total if self.divisor == 1 else total / self.divisor, xs)

    def start(self, xs: Sequence[Tensor]) -> PendingTransfer:
        """In place: `xs` are contiguous, and the caller's own."""
        flight = self.comm.reduce(xs, self.axes)
        return lambda: self._divided(flight())

    def _divided(self, totals: list[Tensor]) -> list[Tensor]:
        if self.divisor > 1:
            foreach_div_(totals, self.divisor)
        return totals

    @property
    def transpose(self) -> Map:
        return Vary(self.comm, self.axes, self.divisor)


@dataclass(frozen=True)
class Vary(Map):
    divisor: int = 1
    takes = "I"
    moves = False
    verb = "pvary"

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        return [x.view_as(x) if self.divisor == 1 else x / self.divisor for x in xs]

    @property
    def transpose(self) -> Map:
        return Sum(self.comm, self.axes, self.divisor)


@dataclass(frozen=True)
class _Laid(Map):
    layout: Layout = ()

    def batched(self, which: Sequence[bool]) -> Map:
        return replace(self, layout=tuple((d + b, n) for (d, n), b in zip(self.layout, which, strict=True)))

    def only(self, which: Sequence[int]) -> Map:
        return replace(self, layout=tuple(self.layout[i] for i in which))

    def extent(self, xs: Sequence[Tensor]) -> Any:
        return self.layout

    def pieces(self, size: int) -> list[int]:
        return part_lengths(size, self.sizes)


@dataclass(frozen=True)
class Gather(_Laid):
    """all_gather, for each rank a copy of its own."""

    verb = "all_gather"

    def start(self, xs: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> PendingTransfer:
        """`into` are contiguous tensors of the shapes after gathering, which will hold the results."""
        whole = list(into or [])
        for x, (dim, size) in zip(xs, self.layout, strict=True):
            if into is None:
                shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
                whole.append(torch.empty(shape, dtype=x.dtype, device=x.device))
        parts = [y.split_with_sizes(self.pieces(size), dim) for y, (dim, size) in zip(whole, self.layout, strict=True)]
        flight = self.comm.gather(xs, parts, self.axes)

        def land() -> list[Tensor]:
            flight()
            return whole

        return land

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        if self.comm.direct:
            return self.start(xs)()
        chunks = [pad(x, dim, self.pieces(size)[0]) for x, (dim, size) in zip(xs, self.layout, strict=True)]
        rows = self.comm.all_gather(pack(chunks), self.axes).view(self.n, -1)
        parts = torch.split(rows, [c.numel() for c in chunks], dim=1)
        return [
            join_padded(part.view(self.n, *c.shape), dim, self.pieces(size))
            for part, c, (dim, size) in zip(parts, chunks, self.layout, strict=True)
        ]

    @property
    def transpose(self) -> Map:
        return Scatter(self.comm, self.axes, self.layout)


@dataclass(frozen=True)
class GatherInvariant(Gather):
    """all_gather(to="invariant"): one logical value."""

    gives = "I"

    @property
    def transpose(self) -> Map:
        return Slice(self.comm, self.axes, self.layout)


@dataclass(frozen=True)
class Scatter(_Laid):
    verb = "psum_scatter"

    def start(self, xs: Sequence[Tensor]) -> PendingTransfer:
        parts = [x.split_with_sizes(self.pieces(size), dim) for x, (dim, size) in zip(xs, self.layout, strict=True)]
        return self.comm.scatter(parts, self.axes)

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        if self.comm.direct:
            return self.start(xs)()
        stacks = [split_padded(x, dim, self.pieces(size)) for x, (dim, size) in zip(xs, self.layout, strict=True)]
        rows = [s.reshape(self.n, -1) for s in stacks]
        total = self.comm.reduce_scatter(rows[0] if len(rows) == 1 else torch.cat(rows, 1), self.axes)
        parts = torch.split(total, [r.shape[1] for r in rows])
        return [
            part.view(s.shape[1:]).narrow(dim, 0, self.pieces(size)[self.index])
            for part, s, (dim, size) in zip(parts, stacks, self.layout, strict=True)
        ]

    @property
    def transpose(self) -> Map:
        return Gather(self.comm, self.axes, self.layout)


@dataclass(frozen=True)
class Slice(_Laid):
    takes = "I"
    moves = False
    verb = "pslice"

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        out = []
        for x, (dim, size) in zip(xs, self.layout, strict=True):
            pieces = self.pieces(size)
            out.append(x.narrow(dim, sum(pieces[: self.index]), pieces[self.index]))
        return out

    @property
    def transpose(self) -> Map:
        return GatherInvariant(self.comm, self.axes, self.layout)


@dataclass(frozen=True)
class AllToAll(Map):
    """all_to_all: each tensor's (split dim, its whole size) and (concat dim, its whole size)."""

    split: Layout = ()
    concat: Layout = ()
    verb = "all_to_all"

    def extent(self, xs: Sequence[Tensor]) -> Any:
        return self.split, self.concat

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        stacks = []
        for x, (s_dim, s_size), (c_dim, c_size) in zip(xs, self.split, self.concat, strict=True):
            stacks.append(
                split_padded(
                    pad(x, c_dim, part_lengths(c_size, self.sizes)[0]), s_dim, part_lengths(s_size, self.sizes)
                )
            )
        rows = [s.reshape(self.n, -1) for s in stacks]
        got = self.comm.all_to_all(rows[0] if len(rows) == 1 else torch.cat(rows, 1), self.axes)
        parts = torch.split(got, [r.shape[1] for r in rows], dim=1)
        out = []
        for part, s, (s_dim, s_size), (c_dim, c_size) in zip(parts, stacks, self.split, self.concat, strict=True):
            whole = join_padded(part.reshape(s.shape), c_dim, part_lengths(c_size, self.sizes))
            out.append(whole.narrow(s_dim, 0, part_lengths(s_size, self.sizes)[self.index]))
        return out

    @property
    def transpose(self) -> Map:
        return AllToAll(self.comm, self.axes, self.concat, self.split)

    def only(self, which: Sequence[int]) -> Map:
        return replace(self, split=tuple(self.split[i] for i in which), concat=tuple(self.concat[i] for i in which))

    def batched(self, which: Sequence[bool]) -> Map:
        def shift(layout: Layout) -> Layout:
            return tuple((d + b, n) for (d, n), b in zip(layout, which, strict=True))

        return replace(self, split=shift(self.split), concat=shift(self.concat))


@dataclass(frozen=True)
class Permute(Map):
    pairs: tuple[tuple[int, int], ...] = ()
    verb = "ppermute"

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        return unpack(self.comm.permute(pack(xs), self.pairs, self.axes), xs)

    @property
    def transpose(self) -> Map:
        return Permute(self.comm, self.axes, tuple((target, source) for source, target in self.pairs))


__all__ = ["AllToAll", "Gather", "GatherInvariant", "Layout", "Map", "Permute", "Scatter", "Slice", "Sum", "Vary"]
