"""A backward pass in two parts: a gradient that ranks must sum is under way while those of weights are computed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fshard._callsite import site
from fshard._comm import checker, is_observed, storage_key, transposing
from fshard._ops import Map, apply_map, run_map
from fshard._torch_compat import in_transform
from fshard.errors import fail


def entered(m: Map, f: Callable[..., Tensor], x: Tensor, *weights: Tensor) -> Tensor:
    """f(m(x), *weights), the transpose of `m` in flight while the gradients of the weights are computed.

    `m` lets x into a part that a mesh axis splits (`pvary`, or `all_gather` under sequence parallelism), and `f` is its
    first layer. The same numbers as without: f's graph is walked twice, first for x, then for the weights.

    Source: Shoeybi et al., "Megatron-LM", its asynchronous all-reduce of column parallel layers.
    """
    every = (x, *weights)
    if not (torch.is_grad_enabled() and x.requires_grad and any(w.requires_grad for w in weights)) or _looked_at(m):
        return f(apply_map(m, [x])[0], *weights)
    out: Tensor = _Entered.apply(m, f, *every)  # type: ignore[no-untyped-call]
    return out


def owned(grad: Tensor, taken: set[int]) -> Tensor:
    """A gradient that a sum may overwrite: dense, and in memory that nothing else refers to."""
    at = storage_key(grad)
    if at in taken or not grad.is_contiguous():
        return grad.clone(memory_format=torch.contiguous_format)
    taken.add(at)
    return grad


def _looked_at(m: Map) -> bool:
    """Whether a compiler, a transform of torch.func or the checker looks on, who cannot see into this."""
    return torch.compiler.is_dynamo_compiling() or in_transform() or checker() is not None or not m.comm.has_values


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, m: Map, f: Callable[..., Tensor], x: Tensor, *weights: Tensor) -> Tensor:
        ctx.back, ctx.origin = m.transpose, site() if is_observed() else None
        inside = run_map(m, [x])[0].detach()
        with torch.enable_grad():
            h = _Leaf.apply(torch.empty(0, requires_grad=True), inside)  # type: ignore[no-untyped-call]
            own = [w.detach().requires_grad_(w.requires_grad) for w in weights]
            y = f(h, *own)
        # Edges and not tensors: what the graph needs it has saved, and the rest may go.
        ctx.y, ctx.h = get_gradient_edge(y), get_gradient_edge(h)
        ctx.weights = [get_gradient_edge(w) if w.requires_grad else None for w in own]
        return y.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise fail("the gradient of a column parallel layer is to be differentiated by torch.autograd",
                       "it cannot see into it", fix="nest fs.grad, or use torch.func")  # fmt: skip
        live = [w for w in ctx.weights if w is not None]
        (dh,) = torch.autograd.grad(ctx.y, ctx.h, g, retain_graph=True)
        with transposing(ctx.origin) if ctx.origin else contextlib.nullcontext():
            flight = ctx.back.start([owned(dh, {storage_key(g)})])
        found = iter(torch.autograd.grad(ctx.y, live, g, allow_unused=True))
        grads = [None if w is None else next(found) for w in ctx.weights]
        return None, None, flight()[0], *grads


class _Leaf(torch.autograd.Function):
    """A value as the leaf of a graph that does not keep it."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None]:
        return None, None


__all__ = ["entered", "owned"]
