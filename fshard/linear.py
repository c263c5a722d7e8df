"""The linear maps behind the collectives, each with its transpose, and the one autograd Function that applies them.

A map works on tensors of one dtype in one transfer. Its `transpose` is a map of the same family, so a backward pass
is the same code again, and so is the backward of a backward. `layout` gives each tensor's (dim, global size). What a
map `takes` and `gives` varies over its axes ("V") or is invariant over them ("I"): the table that the checker reads.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from .abstract import AbstractComm, dry
from .buffers import cut, join, pack, pad, unpack
from .comm import Comm, ProcessComm, checker, index_of, size_of, transposing, watched
from .source import Site, site
from .spec import lengths

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
        total = self.comm.all_reduce(pack(xs), "sum", self.axes)
        return unpack(total if self.divisor == 1 else total / self.divisor, xs)

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
        return lengths(size, self.sizes)


@dataclass(frozen=True)
class Gather(_Laid):
    """all_gather, for each rank a copy of its own."""

    verb = "all_gather"

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        chunks = [pad(x, dim, self.pieces(size)[0]) for x, (dim, size) in zip(xs, self.layout, strict=True)]
        rows = self.comm.all_gather(pack(chunks), self.axes).view(self.n, -1)
        parts = torch.split(rows, [c.numel() for c in chunks], dim=1)
        return [
            join(part.view(self.n, *c.shape), dim, self.pieces(size))
            for part, c, (dim, size) in zip(parts, chunks, self.layout, strict=True)
        ]

    @property
    def transpose(self) -> Map:
        return Scatter(self.comm, self.axes, self.layout)


@dataclass(frozen=True)
class Copy(Gather):
    """all_gather(to="invariant"): one logical value."""

    gives = "I"

    @property
    def transpose(self) -> Map:
        return Slice(self.comm, self.axes, self.layout)


@dataclass(frozen=True)
class Scatter(_Laid):
    verb = "psum_scatter"

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        stacks = [cut(x, dim, self.pieces(size)) for x, (dim, size) in zip(xs, self.layout, strict=True)]
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
        return Copy(self.comm, self.axes, self.layout)


@dataclass(frozen=True)
class Exchange(Map):
    """all_to_all: each tensor's (split dim, its whole size) and (concat dim, its whole size)."""

    split: Layout = ()
    concat: Layout = ()
    verb = "all_to_all"

    def extent(self, xs: Sequence[Tensor]) -> Any:
        return self.split, self.concat

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        stacks = []
        for x, (s_dim, s_size), (c_dim, c_size) in zip(xs, self.split, self.concat, strict=True):
            stacks.append(cut(pad(x, c_dim, lengths(c_size, self.sizes)[0]), s_dim, lengths(s_size, self.sizes)))
        rows = [s.reshape(self.n, -1) for s in stacks]
        got = self.comm.all_to_all(rows[0] if len(rows) == 1 else torch.cat(rows, 1), self.axes)
        parts = torch.split(got, [r.shape[1] for r in rows], dim=1)
        out = []
        for part, s, (s_dim, s_size), (c_dim, c_size) in zip(parts, stacks, self.split, self.concat, strict=True):
            whole = join(part.reshape(s.shape), c_dim, lengths(c_size, self.sizes))
            out.append(whole.narrow(s_dim, 0, lengths(s_size, self.sizes)[self.index]))
        return out

    @property
    def transpose(self) -> Map:
        return Exchange(self.comm, self.axes, self.concat, self.split)

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


# --- the Function ---------------------------------------------------------------------------------------------


def apply(m: Map, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Apply a map to tensors of one dtype, differentiably in every mode of torch.func."""
    compiling = torch.compiler.is_dynamo_compiling()
    if compiling:
        # Dynamo takes the arguments of a torch.func.grad for constants, and would silently drop the backward of a
        # Function that is applied to them; a view of them it takes for what it is.
        xs = [x.view_as(x) for x in xs]
    out: tuple[Tensor, ...] = _function(len(xs), compiling).apply(m, *xs)
    return out


_functions: dict[tuple[int, bool], Any] = {}


def _function(arity: int, compiling: bool) -> Any:
    if (arity, compiling) not in _functions:
        _functions[arity, compiling] = _make_function(arity, compiling)
    return _functions[arity, compiling]


def prepare(arity: int) -> None:
    """Make the Functions of up to `arity` tensors: dynamo can use classes, not make them."""
    for n in range(1, arity + 1):
        _function(n, True)


def _make_function(arity: int, compiling: bool) -> Any:
    """The Function of `arity` tensors. Dynamo needs the exact signature, and refuses Functions with a jvp or vmap."""

    def forward(m: Map, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(m.run(xs)) if compiling else run(m, xs)

    names = ["m", *(f"x{i}" for i in range(arity))]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in names]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.map = inputs[0]

    def backward_compiled(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (None, *ctx.map.transpose.run(grads))

    members = {"forward": staticmethod(forward), "setup_context": staticmethod(setup_context)}
    if compiling:
        members["backward"] = staticmethod(backward_compiled)
        return type("Linear", (torch.autograd.Function,), members)

    def setup_context_with_shapes(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.map = inputs[0]
        ctx.origin = (ctx.map.origin or site()) if watched() else None
        ctx.blank = [functools.partial(torch.zeros, x.shape, dtype=x.dtype, device=x.device) for x in inputs[1:]]
        # What is frozen shares the transfer of the others, and has no gradient to compute or to move.
        ctx.live = [i for i, x in enumerate(inputs[1:]) if x.requires_grad]
        if 0 < len(ctx.live) < arity:
            ctx.mark_non_differentiable(*(y for i, y in enumerate(output) if i not in ctx.live))

    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        live = ctx.live or range(arity)
        back = ctx.map.transpose.only(live)
        found = apply(back if ctx.origin is None else replace(back, origin=ctx.origin), [grads[i] for i in live])
        given = dict(zip(live, found, strict=True))
        return (None, *(given.get(i) for i in range(arity)))

    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        known = [blank() if t is None else t for t, blank in zip(tangents, ctx.blank, strict=True)]
        return apply(ctx.map, known)

    def vmap(info: Any, in_dims: Sequence[int | None], m: Map, *xs: Tensor) -> tuple[Any, Any]:
        dims = in_dims[1:]
        front = [x if d is None else x.movedim(d, 0) for x, d in zip(xs, dims, strict=True)]
        out = apply(m.batched([d is not None for d in dims]), front)
        return out, tuple(None if d is None else 0 for d in dims)

    members |= {"setup_context": staticmethod(setup_context_with_shapes), "backward": staticmethod(backward),
                "jvp": staticmethod(jvp), "vmap": staticmethod(vmap)}  # fmt: skip
    return type("Linear", (torch.autograd.Function,), members)


def run(m: Map, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The map itself, its line known to a record of transfers; where the call is checked, checked.

    On an abstract mesh it runs on shapes alone. On processes the ranks of a checked call agree on it first.
    """
    with transposing(m.origin) if m.origin else contextlib.nullcontext():
        found, act = checker(), m.run
        if isinstance(m.comm, AbstractComm):
            act = functools.partial(dry, m.run)
        elif isinstance(m.comm, ProcessComm) and found is not None:
            act = functools.partial(_agreed, m, m.comm)
        return tuple(act(xs)) if found is None else found.collective(m, xs, act)


def _agreed(m: Map, comm: ProcessComm, xs: Sequence[Tensor]) -> list[Tensor]:
    """The map, once the ranks have told each other that all of them are about to apply it."""
    if m.moves:
        comm.agree(f"{m.verb} over {', '.join(m.axes)} of {xs[0].dtype} {m.extent(xs)}", m.axes, xs[0].device)
    return m.run(xs)


__all__ = ["Copy", "Exchange", "Gather", "Map", "Permute", "Scatter", "Slice", "Sum", "Vary", "apply", "prepare", "run"]
