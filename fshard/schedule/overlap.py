"""A backward pass in two parts: the sum of x's gradient over the ranks overlaps the gradients of the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fshard._core.callsite import site
from fshard._core.ops import Map, apply_map, run_map
from fshard._core.region import checker, storage_key
from fshard._core.torch import any_tangent, in_transform, is_legacy_batched, is_wrapped
from fshard._core.transfers import is_observed, transposing
from fshard.errors import fail
from fshard.grad import fill_tensors, split_tensors


def apply_then_compute(m: Map, f: Callable[..., Tensor], x: Tensor, *weights: Any) -> Tensor:
    """Return f(m(x), *weights); in backward the transpose of `m` overlaps the gradients of the weights (trees).

    `f` is the first layer of a part that a mesh axis splits, and `m` the collective before it (`pvary`, or `all_gather`
    under sequence parallelism). The numbers equal f(m(x), *weights). Backward passes f's graph twice, first for x, then
    for the weights.

    Source: Shoeybi et al., "Megatron-LM", its asynchronous all-reduce of column parallel layers.
    """
    tensors, rest = split_tensors(weights)
    differentiated = torch.is_grad_enabled() and x.requires_grad and any(w.requires_grad for w in tensors)
    if not differentiated or _needs_plain_graph(m) or any_tangent((x, *tensors)):
        return f(apply_map(m, [x])[0], *weights)
    of_tensors = lambda h, *tensors: f(h, *fill_tensors(rest, tensors))  # noqa: E731
    out: Tensor = _Overlapped.apply(m, of_tensors, x, *tensors)  # type: ignore[no-untyped-call]
    return out


def make_writable(grad: Tensor, used: set[int]) -> Tensor:
    """Return a gradient that a sum may overwrite: contiguous, in a storage not in `used`; add its storage to `used`."""
    key = storage_key(grad)
    if key in used or not grad.is_contiguous():
        return grad.clone(memory_format=torch.contiguous_format)
    used.add(key)
    return grad


def refuse_transforms_of_backward(what: str, grads: Sequence[Tensor | None], fix: str) -> None:
    """Raise in a backward pass that is itself differentiated (create_graph=True), or that has a batch of gradients."""
    if torch.is_grad_enabled():
        raise fail(f"{what} cannot be differentiated by torch.autograd", fix=fix)
    if any(g is not None and (is_wrapped(g) or is_legacy_batched(g)) for g in grads):
        raise fail(f"{what} cannot be batched by is_grads_batched=True, vectorize=True or vmap of torch.autograd",
                   fix="torch.func.jacrev, or torch.func.vmap of the pullback of torch.func.vjp")  # fmt: skip


def _needs_plain_graph(m: Map) -> bool:
    """Return whether a compiler, a transform of torch.func or a checker must see each operation."""
    return torch.compiler.is_dynamo_compiling() or in_transform() or checker() is not None or not m.comm.is_scheduled


class _Overlapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, m: Map, f: Callable[..., Tensor], x: Tensor, *weights: Tensor) -> Tensor:
        ctx.is_differentiated, ctx.transpose, ctx.origin = False, m.transpose, site() if is_observed() else None
        mapped = run_map(m, [x])[0].detach()
        with torch.enable_grad():
            h = _ValuelessLeaf.apply(torch.empty(0, requires_grad=True), mapped)  # type: ignore[no-untyped-call]
            leaves = [w.detach().requires_grad_(w.requires_grad) for w in weights]
            y = f(h, *leaves)
        # Gradient edges instead of tensors: tensors that the graph has not saved are freed.
        ctx.y, ctx.h = get_gradient_edge(y), get_gradient_edge(h)
        ctx.weights = [get_gradient_edge(w) if w.requires_grad else None for w in leaves]
        return y.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_transforms_of_backward(
            "the gradient of a column parallel layer", [grad], "nest fs.grad, or use torch.func"
        )
        if ctx.is_differentiated:  # retain_graph=True
            raise fail("a second backward pass through a column parallel layer; the first has freed its graph",
                       fix="one backward pass for the sum of the losses; or torch.func.jacrev")  # fmt: skip
        ctx.is_differentiated, edges = True, [w for w in ctx.weights if w is not None]
        (dh,) = torch.autograd.grad(ctx.y, ctx.h, grad, retain_graph=True)
        with transposing(ctx.origin) if ctx.origin else contextlib.nullcontext():
            wait = ctx.transpose.start([make_writable(dh, {storage_key(grad)})])
        weight_grads = iter(torch.autograd.grad(ctx.y, edges, grad, allow_unused=True))
        grads = [None if w is None else next(weight_grads) for w in ctx.weights]
        return None, None, wait()[0], *grads


class _ValuelessLeaf(torch.autograd.Function):
    """A leaf of a graph that does not keep the leaf's value."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None
