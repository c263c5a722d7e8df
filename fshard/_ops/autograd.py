"""The one autograd Function that applies the linear maps, in every mode of torch.func and under a compiler."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fshard._callsite import site
from fshard._comm import checker, is_observed, run_on_meta, transposing

from .linear_maps import AllToAll, Gather, GatherInvariant, Map, Permute, Scatter, Slice, Sum, Vary


def apply_map(m: Map, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
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


def make_functions(arity: int) -> None:
    """Make the Functions of up to `arity` tensors: dynamo can use classes, not make them."""
    for n in range(1, arity + 1):
        _function(n, True)


def _make_function(arity: int, compiling: bool) -> Any:
    """The Function of `arity` tensors. Dynamo needs the exact signature, and refuses Functions with a jvp or vmap."""

    def forward(m: Map, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(m.run(xs)) if compiling else run_map(m, xs)

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
        ctx.origin = (ctx.map.origin or site()) if is_observed() else None
        ctx.blank = [functools.partial(torch.zeros, x.shape, dtype=x.dtype, device=x.device) for x in inputs[1:]]
        # What is frozen shares the transfer of the others, and has no gradient to compute or to move.
        ctx.live = [i for i, x in enumerate(inputs[1:]) if x.requires_grad]
        if 0 < len(ctx.live) < arity:
            ctx.mark_non_differentiable(*(y for i, y in enumerate(output) if i not in ctx.live))

    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        live = ctx.live or range(arity)
        back = ctx.map.transpose.only(live)
        found = apply_map(back if ctx.origin is None else replace(back, origin=ctx.origin), [grads[i] for i in live])
        given = dict(zip(live, found, strict=True))
        return (None, *(given.get(i) for i in range(arity)))

    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        known = [blank() if t is None else t for t, blank in zip(tangents, ctx.blank, strict=True)]
        return apply_map(ctx.map, known)

    def vmap(info: Any, in_dims: Sequence[int | None], m: Map, *xs: Tensor) -> tuple[Any, Any]:
        dims = in_dims[1:]
        front = [x if d is None else x.movedim(d, 0) for x, d in zip(xs, dims, strict=True)]
        out = apply_map(m.batched([d is not None for d in dims]), front)
        return out, tuple(None if d is None else 0 for d in dims)

    members |= {"setup_context": staticmethod(setup_context_with_shapes), "backward": staticmethod(backward),
                "jvp": staticmethod(jvp), "vmap": staticmethod(vmap)}  # fmt: skip
    return type("Linear", (torch.autograd.Function,), members)


def run_map(m: Map, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The map itself, its line known to a record of transfers; where the call is checked, checked.

    On an abstract mesh it runs on shapes alone. On processes the ranks of a checked call agree on it first.
    """
    with transposing(m.origin) if m.origin else contextlib.nullcontext():
        found, act = checker(), m.run
        if not m.comm.has_values:
            act = functools.partial(run_on_meta, m.run)
        elif found is not None:
            act = functools.partial(_run_if_agreed, m)
        return tuple(act(xs)) if found is None else found.run_collective(m, xs, act)


def _run_if_agreed(m: Map, xs: Sequence[Tensor]) -> list[Tensor]:
    """Run the map once all ranks are known to be about to apply the same one."""
    if m.moves:
        m.comm.agree(f"{m.verb} over {', '.join(m.axes)} of {xs[0].dtype} {m.extent(xs)}", m.axes, xs[0].device)
    return m.run(xs)


__all__ = [
    "AllToAll", "Gather", "GatherInvariant", "Map", "Permute", "Scatter", "Slice", "Sum", "Vary", "apply_map",
    "make_functions", "run_map",
]  # fmt: skip
