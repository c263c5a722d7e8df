"""The one autograd Function that applies the linear maps, in every mode of torch.func and under a compiler."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fshard._core.callsite import site
from fshard._core.comm import run_on_meta
from fshard._core.region import checker, user_line
from fshard._core.torch import (
    any_tangent,
    in_transform,
    is_legacy_batched,
    is_wrapped,
    unwrapped,
    with_legacy_batch,
    with_tangents,
    without_legacy_batch,
    without_torch_function,
)
from fshard._core.transfers import is_observed, note_transpose, transposing
from fshard.errors import ShardingError, fail

from .linear_maps import Map


def differentiable_dtype(x: Tensor) -> bool:
    """Return whether the dtype of a tensor has gradients."""
    return x.dtype.is_floating_point or x.dtype.is_complex


def apply_function(verb: str, function: Any, *args: Any) -> Any:
    """Apply an autograd Function, with an error that names the transform for which torch has no rule of Functions."""
    if not in_transform() and not any(isinstance(x, Tensor) and is_wrapped(x) for x in args):
        # Without `Function.apply`, which reads the signature of `forward` at each call.
        return super(torch.autograd.Function, function).apply(*args)
    try:
        return function.apply(*args)
    except RuntimeError as e:
        if "Functionalize rule" not in str(e):
            raise
        raise fail(f"{verb}: torch.func.functionalize has no rule for it", *user_line(),
                   fix="leave functionalize out") from None  # fmt: skip


def apply_map(m: Map, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Apply a map to tensors of one dtype, differentiably in every mode of torch.func."""
    if torch.compiler.is_dynamo_compiling():
        # Dynamo takes the arguments of torch.func.grad for constants, and would silently drop the backward of a
        # Function that is applied to one of them, but not of a Function that is applied to a view of one.
        traced: tuple[Tensor, ...] = _compiled_function(len(xs)).apply(m, *[x.view_as(x) for x in xs])
        return traced
    if any(is_legacy_batched(unwrapped(x)) for x in xs):
        return _apply_to_legacy_batch(m, xs)
    if not m.moves:
        note_transpose()
    if m.verb == "pvary" and (types := checker()) is not None:
        types.check_pvary(m, xs)  # here, since nothing is differentiated inside a Function
    out: tuple[Tensor, ...] = apply_function(m.verb, Linear, m, *xs)
    return out


def _apply_to_legacy_batch(m: Map, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Apply a map under the vmap of `is_grads_batched=True`: to tensors that have the batch as a dim."""
    which = [is_legacy_batched(x) for x in xs]
    front = [without_legacy_batch(x) if b else x for x, b in zip(xs, which, strict=True)]
    if any(is_legacy_batched(unwrapped(x)) for x in front):  # one vmap inside another
        raise _no_rule_for_legacy_batch(m.verb)
    out = apply_map(m.batched(which), front)
    return tuple(with_legacy_batch(y) if b else y for y, b in zip(out, which, strict=True))


def _no_rule_for_legacy_batch(verb: str) -> ShardingError:
    return fail(f"{verb}: has no rule for this use of is_grads_batched=True or vectorize=True", *user_line(),
                fix="use torch.func.jacrev, jacfwd, hessian, or vmap")  # fmt: skip


class Linear(torch.autograd.Function):
    """Application of a map; its backward pass applies the transpose."""

    @staticmethod
    def forward(m: Map, *xs: Tensor) -> tuple[Tensor, ...]:
        return run_map(m, xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.map, *xs = inputs
        ctx.origin = (ctx.map.origin or site()) if is_observed() else None
        with without_torch_function():
            ctx.like = [(x.shape, x.dtype, x.device) for x in xs]
            # Frozen tensors share the transfer of the others; their gradients are neither computed nor transferred.
            ctx.differentiated = [i for i, x in enumerate(xs) if x.requires_grad]
        if 0 < len(ctx.differentiated) < len(xs):
            with with_tangents():  # which torch hides here
                forward_mode = any_tangent(xs)
            if not forward_mode:
                ctx.mark_non_differentiable(*(y for i, y in enumerate(output) if i not in ctx.differentiated))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        which = ctx.differentiated or range(len(grads))
        transpose = ctx.map.transpose if len(which) == len(grads) else ctx.map.transpose.only(which)
        if ctx.origin is not None:
            transpose = replace(transpose, origin=ctx.origin)
        by_position = dict(zip(which, apply_map(transpose, [grads[i] for i in which]), strict=True))
        return (None, *map(by_position.get, range(len(grads))))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        if any(t is not None and is_legacy_batched(t) for t in tangents):
            raise _no_rule_for_legacy_batch(ctx.map.verb)
        filled = [torch.zeros(shape, dtype=dtype, device=device) if t is None else t
                  for t, (shape, dtype, device) in zip(tangents, ctx.like, strict=True)]  # fmt: skip
        return apply_map(ctx.map, filled)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], m: Map, *xs: Tensor) -> tuple[Any, Any]:
        dims = in_dims[1:]
        front = [x if d is None else x.movedim(d, 0) for x, d in zip(xs, dims, strict=True)]
        out = apply_map(m.batched([d is not None for d in dims]), front)
        return out, tuple(None if d is None else 0 for d in dims)


_compiled_functions: dict[int, Any] = {}


def make_functions(arity: int) -> None:
    """Make the compiled Functions of up to `arity` tensors in advance: dynamo can use classes, but not make them."""
    for n in range(1, arity + 1):
        _compiled_function(n)


def _compiled_function(arity: int) -> Any:
    """Return the Function of `arity` tensors, made once; dynamo does not keep the results of functools.cache.

    Dynamo needs the exact signature, and refuses a jvp or vmap.
    """
    if arity in _compiled_functions:
        return _compiled_functions[arity]

    def forward(m: Map, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(m.run(xs))

    names = ["m", *(f"x{i}" for i in range(arity))]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in names]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.map = inputs[0]

    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (None, *ctx.map.transpose.run(grads))

    members = {f.__name__: staticmethod(f) for f in (forward, setup_context, backward)}
    return _compiled_functions.setdefault(arity, type("Linear", (torch.autograd.Function,), members))


def run_map(m: Map, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run a map without autograd; record its line, and check its types if the call is checked.

    On an abstract mesh it runs only on shapes. On processes the ranks of a checked call agree on it first.
    """
    if not torch.compiler.is_dynamo_compiling() and any(map(is_legacy_batched, xs)):
        raise _no_rule_for_legacy_batch(m.verb)
    with transposing(m.origin) if m.origin else contextlib.nullcontext():
        types, run = checker(), m.run
        if not m.comm.is_scheduled:
            run = functools.partial(run_on_meta, m.run)
        elif types is not None:
            run = functools.partial(_run_if_agreed, m)
        return tuple(run(xs)) if types is None else types.run_collective(m, xs, run)


def start_map(m: Map, xs: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
    """Start a map without autograd; the returned function waits for the results.

    A compiler and a checker see it at the start, and an abstract mesh without a schedule does not wait.
    """
    if checker() is not None or not m.comm.direct or not m.comm.is_scheduled:
        out = run_map(m, xs)
        return lambda: out
    return m.start(xs)


def _run_if_agreed(m: Map, xs: Sequence[Tensor]) -> list[Tensor]:
    """Run a map after checking that every rank is about to run the same one."""
    if m.moves:
        m.comm.agree(f"{m.verb} over {', '.join(m.axes)} of {xs[0].dtype} {m.extent(xs)}", m.axes, xs[0].device)
    return m.run(xs)
