"""The linear maps behind the collectives, each with its transpose.

A map works on tensors of one dtype in one transfer. Its `transpose` is a map of the same family, so the backward pass
runs the same code, and so does the backward pass of a backward pass. `layout` holds the (dim, global size) of each
tensor. The argument (`takes`) and the result (`gives`) of a map vary over its axes ("V") or are invariant over them
("I"): the checker reads this table.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fshard._core.callsite import Site
from fshard._core.packing import join_padded, longest_part, pack, pad, split_padded, unpack
from fshard._core.protocol import Comm, PendingTransfer, size_of
from fshard.errors import must_be
from fshard.spec import Size, part_range, total

Layout = tuple[tuple[int, Size], ...]


@dataclass(frozen=True)
class Map:
    """A linear map over `axes`, whose sizes multiply to more than one."""

    comm: Comm
    axes: tuple[str, ...]
    origin: Site | None = field(default=None, compare=False, kw_only=True)  # of a transpose: line of the forward call
    takes: ClassVar[str] = "V"
    gives: ClassVar[str] = "V"
    moves: ClassVar[bool] = True
    verb: ClassVar[str]  # name of the public function

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Apply the map and wait for the results."""
        raise NotImplementedError

    def start(self, xs: Sequence[Tensor]) -> PendingTransfer:
        """Start the transfer. Do not write to `xs` before waiting for it."""
        raise NotImplementedError

    @property
    def transpose(self) -> Map:
        """The adjoint map: gradients of the results -> gradients of the arguments."""
        raise NotImplementedError

    def batched(self, which: Sequence[bool]) -> Map:
        """Return the map for arguments with a batch dim in front of each one that is marked in `which`."""
        return self

    def only(self, which: Sequence[int]) -> Map:
        """Return the map for only the tensors at these positions."""
        return self

    def extent(self, xs: Sequence[Tensor]) -> Any:
        """Sizes of the arguments, in a form that is equal on every rank."""
        return [list(x.shape) for x in xs]

    @property
    def n(self) -> int:
        """Number of ranks over the axes."""
        return size_of(self.axes, self.comm.sizes)

    @property
    def sizes(self) -> list[int]:
        """Size of each axis."""
        return [self.comm.sizes[a] for a in self.axes]

    @property
    def coords(self) -> list[int]:
        """Position of this rank on each axis."""
        return [self.comm.coords[a] for a in self.axes]


@dataclass(frozen=True)
class Sum(Map):
    """psum, or with a `divisor` pmean: the sum over the ranks, divided."""

    divisor: int = 1
    gives = "I"

    @property
    def verb(self) -> str:  # type: ignore[override]
        return "psum" if self.divisor == 1 else "pmean"

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        if self.comm.direct:
            return self._divide(self.comm.reduce(xs, self.axes, fresh=True)())
        total = self.comm.all_reduce(pack(xs), "sum", self.axes)
        return unpack(total if self.divisor == 1 else total / self.divisor, xs)

    def start(self, xs: Sequence[Tensor]) -> PendingTransfer:
        """Start to sum in place: `xs` must be contiguous, and used by nothing else."""
        pending = self.comm.reduce(xs, self.axes)
        return lambda: self._divide(pending())

    def _divide(self, totals: list[Tensor]) -> list[Tensor]:
        return totals if self.divisor == 1 else [x.div_(self.divisor) for x in totals]

    @property
    def transpose(self) -> Map:
        return Vary(self.comm, self.axes, self.divisor)


@dataclass(frozen=True)
class Vary(Map):
    """pvary: the identity, or a division; its transpose sums."""

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
class _DimMap(Map):
    """A map that joins or splits a dim of each tensor, in `layout`; of two, the fields are named in `layouts`."""

    layout: Layout = ()
    layouts: ClassVar[tuple[str, ...]] = ("layout",)

    def batched(self, which: Sequence[bool]) -> Map:
        return self._change(lambda layout: [(dim + b, size) for (dim, size), b in zip(layout, which, strict=True)])

    def only(self, which: Sequence[int]) -> Map:
        return self._change(lambda layout: [layout[i] for i in which])

    def _change(self, f: Callable[[Layout], list[tuple[int, Size]]]) -> Map:
        changes: dict[str, Any] = {name: tuple(f(getattr(self, name))) for name in self.layouts}
        return replace(self, **changes)

    def extent(self, xs: Sequence[Tensor]) -> Any:
        return self.layout


@dataclass(frozen=True)
class Gather(_DimMap):
    """all_gather(to="varying"): each rank uses the result differently."""

    verb = "all_gather"

    def start(self, xs: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> PendingTransfer:
        """Start to gather `into` contiguous tensors of the global shapes, or into new tensors."""
        out = list(into or [])
        for x, (dim, size) in zip(xs, self.layout, strict=True):
            if into is None:
                shape = (*x.shape[:dim], total(size), *x.shape[dim + 1 :])
                out.append(torch.empty(shape, dtype=x.dtype, device=x.device))
        dims = [dim if isinstance(size, int) else (dim, size) for dim, size in self.layout]
        pending = self.comm.gather(xs, out, dims, self.axes)

        def wait() -> list[Tensor]:
            pending()
            return out

        return wait

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        if self.comm.direct:
            return self.start(xs)()
        chunks = [pad(x, dim, longest_part(size, self.sizes)) for x, (dim, size) in zip(xs, self.layout, strict=True)]
        rows = self.comm.all_gather(pack(chunks), self.axes).view(self.n, -1)
        parts = torch.split(rows, [c.numel() for c in chunks], dim=1)
        return [
            join_padded(part.view(self.n, *c.shape), dim, size, self.sizes)
            for part, c, (dim, size) in zip(parts, chunks, self.layout, strict=True)
        ]

    @property
    def transpose(self) -> Map:
        return Scatter(self.comm, self.axes, self.layout)


@dataclass(frozen=True)
class GatherInvariant(Gather):
    """all_gather(to="invariant"): the result is one logical value."""

    gives = "I"

    @property
    def transpose(self) -> Map:
        return Slice(self.comm, self.axes, self.layout)


@dataclass(frozen=True)
class Scatter(_DimMap):
    """psum_scatter: sum over the ranks; each rank keeps its part."""

    verb = "psum_scatter"

    def start(self, xs: Sequence[Tensor]) -> PendingTransfer:
        dims = [dim if isinstance(size, int) else (dim, size) for dim, size in self.layout]
        return self.comm.scatter(xs, dims, self.axes)

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        if self.comm.direct:
            return self.start(xs)()
        stacks = [split_padded(x, dim, size, self.sizes) for x, (dim, size) in zip(xs, self.layout, strict=True)]
        rows = [s.reshape(self.n, -1) for s in stacks]
        total = self.comm.reduce_scatter(rows[0] if len(rows) == 1 else torch.cat(rows, 1), self.axes)
        parts = torch.split(total, [r.shape[1] for r in rows])
        return [
            part.view(s.shape[1:]).narrow(dim, 0, part_range(size, self.sizes, self.coords)[1])
            for part, s, (dim, size) in zip(parts, stacks, self.layout, strict=True)
        ]

    @property
    def transpose(self) -> Map:
        return Gather(self.comm, self.axes, self.layout)


@dataclass(frozen=True)
class Slice(_DimMap):
    """pslice: this rank's part of an invariant value."""

    takes = "I"
    moves = False
    verb = "pslice"

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        ranges = [part_range(size, self.sizes, self.coords) for _, size in self.layout]
        return [x.narrow(dim, *of_x) for x, (dim, _), of_x in zip(xs, self.layout, ranges, strict=True)]

    @property
    def transpose(self) -> Map:
        return GatherInvariant(self.comm, self.axes, self.layout)


@dataclass(frozen=True)
class AllToAll(_DimMap):
    """all_to_all: split one dim of each tensor over the ranks, in `layout`, and concatenate along another."""

    concat: Layout = ()
    layouts = ("layout", "concat")
    verb = "all_to_all"

    def extent(self, xs: Sequence[Tensor]) -> Any:
        return self.layout, self.concat

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        sizes, coords, stacks = self.sizes, self.coords, []
        for x, (s_dim, s_size), (c_dim, c_size) in zip(xs, self.layout, self.concat, strict=True):
            stacks.append(split_padded(pad(x, c_dim, longest_part(c_size, sizes)), s_dim, s_size, sizes))
        rows = [s.reshape(self.n, -1) for s in stacks]
        received = self.comm.all_to_all(rows[0] if len(rows) == 1 else torch.cat(rows, 1), self.axes)
        parts = torch.split(received, [r.shape[1] for r in rows], dim=1)
        out = []
        for part, s, (s_dim, s_size), (c_dim, c_size) in zip(parts, stacks, self.layout, self.concat, strict=True):
            joined = join_padded(part.reshape(s.shape), c_dim, c_size, sizes)
            out.append(joined.narrow(s_dim, 0, part_range(s_size, sizes, coords)[1]))
        return out

    @property
    def transpose(self) -> Map:
        return AllToAll(self.comm, self.axes, self.concat, self.layout)


class Counts(NamedTuple):
    """Numbers of rows to and from each rank over some axes; `exchanged` if the ranks know that they fit."""

    send: tuple[int, ...]
    receive: tuple[int, ...]
    exchanged: bool

    @property
    def transpose(self) -> Counts:
        """The counts of the rows on their way back."""
        return self._replace(send=self.receive, receive=self.send)


@dataclass(frozen=True)
class AllToAllRows(Map):
    """all_to_all_rows: `counts.send[i]` rows of each tensor to rank i; `dims` has the dim of each tensor's rows."""

    counts: Counts
    dims: tuple[int, ...]
    verb = "all_to_all_rows"

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        rows = [x.movedim(dim, 0) for x, dim in zip(xs, self.dims, strict=True)]
        if len(rows) == 1:
            x = rows[0].contiguous()
        else:
            x = torch.cat([r.reshape(len(r), math.prod(r.shape[1:])) for r in rows], 1)
        send, receive, exchanged = self.counts
        out = self.comm.all_to_all_rows(x, send, receive, self.axes, exchanged=exchanged)
        parts = [out] if len(rows) == 1 else out.split_with_sizes([math.prod(r.shape[1:]) for r in rows], 1)
        return [part.reshape(len(out), *r.shape[1:]).movedim(0, dim)
                for part, r, dim in zip(parts, rows, self.dims, strict=True)]  # fmt: skip

    def extent(self, xs: Sequence[Tensor]) -> Any:
        return [[n for d, n in enumerate(x.shape) if d != dim] for x, dim in zip(xs, self.dims, strict=True)]

    @property
    def transpose(self) -> Map:
        return replace(self, origin=None, counts=self.counts.transpose)

    def only(self, which: Sequence[int]) -> Map:
        return replace(self, dims=tuple(self.dims[i] for i in which))

    def batched(self, which: Sequence[bool]) -> Map:
        return replace(self, dims=tuple(dim + batched for dim, batched in zip(self.dims, which, strict=True)))


@dataclass(frozen=True)
class Permute(Map):
    """ppermute: send along (source, target) pairs of positions."""

    pairs: tuple[tuple[int, int], ...] = ()
    verb = "ppermute"

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        return unpack(self.comm.permute(pack(xs), self.pairs, self.axes), xs)

    def start(self, xs: Sequence[Tensor]) -> PendingTransfer:
        """Start to send: of the other ranks, only those that a pair names with this one must do so, too."""
        wait = self.comm.send(xs, self.pairs, self.axes)
        return lambda: [x.contiguous() for x in wait()]

    @property
    def transpose(self) -> Map:
        return Permute(self.comm, self.axes, tuple((target, source) for source, target in self.pairs))


# --- mixed precision ---


@dataclass(frozen=True)
class Precision:
    """Dtypes of a floating leaf: of the stored leaf, of its computation and transfer, and of the sum of its gradients.

    Sums over ranks of half precision accumulate in float32 in any case, and round once; with `summed` float32 they do
    not round at all.
    """

    stored: torch.dtype
    computed: torch.dtype
    summed: torch.dtype

    @staticmethod
    def make(x: Tensor, computed: torch.dtype | None, summed: torch.dtype | None) -> Precision | None:
        """Return the precision of a leaf; `None` if no cast is needed. Raises ShardingError for dtypes of no floats."""
        for name, dtype in (("dtype", computed), ("reduce_dtype", summed)):
            if dtype is not None and not dtype.is_floating_point:  # values or gradients would be cut off
                raise must_be(f"mixed precision: {name}", "a floating-point dtype", dtype, "torch.bfloat16")
        computed = computed or x.dtype
        summed = summed or computed
        if not x.is_floating_point() or x.dtype == computed == summed:
            return None
        return Precision(x.dtype, computed, summed)


@dataclass(frozen=True)
class CastMap(Map):
    """A map that casts its arguments to `before` and its results to `after`; `back` are these two of its transpose."""

    inner: Map = field(kw_only=True)
    before: torch.dtype = field(kw_only=True)
    after: torch.dtype = field(kw_only=True)
    back: tuple[torch.dtype, torch.dtype] = field(kw_only=True)

    @staticmethod
    def from_precision(inner: Map, precision: Precision) -> CastMap:
        """Return `inner` with the casts of a precision."""
        return CastMap(inner.comm, inner.axes, inner=inner, before=precision.computed, after=precision.computed,
                      back=(precision.summed, precision.stored))  # fmt: skip

    # of the inner map
    takes = property(operator.attrgetter("inner.takes"))
    gives = property(operator.attrgetter("inner.gives"))
    moves = property(operator.attrgetter("inner.moves"))
    verb = property(operator.attrgetter("inner.verb"))

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        return [y.to(self.after) for y in self.inner.run([x.to(self.before) for x in xs])]

    @property
    def transpose(self) -> Map:
        before, after = self.back
        return replace(self, inner=self.inner.transpose, before=before, after=after, back=(self.before, self.after))

    def batched(self, which: Sequence[bool]) -> Map:
        return replace(self, inner=self.inner.batched(which))

    def only(self, which: Sequence[int]) -> Map:
        return replace(self, inner=self.inner.only(which))

    def extent(self, xs: Sequence[Tensor]) -> Any:
        return self.inner.extent(xs)
