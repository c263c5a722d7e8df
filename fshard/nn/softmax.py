"""Sums of exponentials of rows of logits, with a backward pass that needs one buffer: the gradient itself.

Plain torch keeps several arrays of the logits' size from the forward to the end of the backward pass. Here
the logits alone are kept, and both passes work on a few rows at a time, while these are in the cache.
Legend: x [..., V]; at, one column of x for each row, [..., 1], or [..., 0] where V is 0; the rest [...].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fshard._comm import in_region, region

# Up to so many elements plain torch is faster. Measured on a CPU, forward and backward, plain and here, in ms:
# 5 and 11 for 4 million elements, 49 and 32 for 8 million, where fresh memory costs more than the arithmetic.
SMALL = 1 << 22
SLAB = 1 << 17  # elements at a time: what a core keeps close


def exp_sums(x: Tensor, at: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """(the sum of exp(x - shift), the entry x[at]) of each row, in the dtype of `shift`, which is a constant.

    >>> exp_sums(torch.tensor([[0.0, 1.0]]), torch.tensor([[1]]), torch.tensor([1.0]))
    (tensor([1.3679]), tensor([1.]))
    """
    if torch.compiler.is_dynamo_compiling():  # of which a compiler makes one loop, and one more in backward
        wide = x.to(shift.dtype)
        picked = torch.arange(x.shape[-1], device=x.device) == at
        return _exp(wide, shift).sum(-1), wide.where(picked, 0).sum(-1)
    if x.numel() <= SMALL:
        wide = x.to(shift.dtype)
        return _exp(wide, shift).sum(-1), _pick(wide, at)
    out: tuple[Tensor, Tensor] = _apply(_ExpSums, x, at, shift)
    return out


def highest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest entry of each row, -inf where V is 0: a constant to the derivative."""
    if not x.shape[-1]:
        return x.new_full(x.shape[:-1], -math.inf, dtype=dtype)
    return x.detach().amax(-1).to(dtype)


def _exp(x: Tensor, shift: Tensor) -> Tensor:
    return (x.to(shift.dtype) - shift.unsqueeze(-1)).exp()


def _pick(x: Tensor, at: Tensor) -> Tensor:
    return x.gather(-1, at).sum(-1)


def _slabs(x: Tensor, dtype: torch.dtype, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """A few rows at a time: room for them in `dtype`, x as [N, V], what belongs to its rows as [N, ·]."""
    n, v = math.prod(x.shape[:-1]), x.shape[-1]
    size = SLAB if x.device.type == "cpu" else 1 << 24
    if in_region() and not region().comm.has_values:  # shapes only: all rows at a time
        size = x.numel()
    step = max(1, size // max(1, v))
    room = torch.empty(min(n, step), v, dtype=dtype, device=x.device)
    for rows in zip(*(torch.split(t.reshape(n, t.shape[-1]), step) for t in (x, *others)), strict=True):
        yield room[: len(rows[0])], *rows


def _apply(function: Any, *xs: Tensor) -> Any:
    return function.apply(*xs)


class _ExpSums(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, at: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        slabs = _slabs(x, shift.dtype, shift.unsqueeze(-1))
        sums = [torch.sub(rows, s, out=room).exp_().sum(-1) for room, rows, s in slabs]
        return torch.cat(sums).view(shift.shape), _pick(x, at).to(shift.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Any, ...]:
        return _apply(_Pull, *ctx.saved_tensors, g, h), None, None

    @staticmethod
    def jvp(ctx: Any, rate: Tensor, _at: None, _shift: None) -> tuple[Tensor, Tensor]:
        x, at, shift = ctx.saved_tensors
        return (_exp(x, shift) * rate).sum(-1), _pick(rate, at).to(shift.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *xs: Tensor) -> Any:
        return _apply(_ExpSums, *_in_front(info, in_dims, xs)), (0, 0)


class _Pull(torch.autograd.Function):
    """The transpose of `_ExpSums` at x: (g, h) -> exp(x - shift) g, plus h at the picked column."""

    @staticmethod
    def forward(x: Tensor, at: Tensor, shift: Tensor, g: Tensor, h: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        slabs = _slabs(x, shift.dtype, out, at, *(t.unsqueeze(-1) for t in (shift, g, h)))
        for room, rows, to, i, s, a, b in slabs:
            torch.sub(rows, s, out=room).exp_().mul_(a).scatter_add_(-1, i, b[:, : i.shape[1]])
            to.copy_(room)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, y: Tensor) -> tuple[Any, ...]:
        x, at, shift, g, _ = ctx.saved_tensors
        p = _exp(x, shift) * y
        return (p * g.unsqueeze(-1)).to(x.dtype), None, None, p.sum(-1), _pick(y, at).to(shift.dtype)

    @staticmethod
    def jvp(ctx: Any, x_rate: Tensor | None, _at: None, _shift: None, *rates: Tensor | None) -> Tensor:
        x, at, shift, g, _ = ctx.saved_tensors
        dg, dh = ((torch.zeros_like(g) if t is None else t).unsqueeze(-1) for t in rates)
        p = _exp(x, shift)
        out = p * dg if x_rate is None else p * (dg + x_rate * g.unsqueeze(-1))
        return out.scatter_add(-1, at, dh[..., : at.shape[-1]]).to(x.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *xs: Tensor) -> Any:
        return _apply(_Pull, *_in_front(info, in_dims, xs)), 0


def _in_front(info: Any, in_dims: Any, xs: tuple[Tensor, ...]) -> list[Tensor]:
    """Every tensor with the batch as its dim 0: these Functions take any number of leading dims."""
    dims = zip(xs, in_dims, strict=True)
    return [x.expand(info.batch_size, *x.shape) if d is None else x.movedim(d, 0) for x, d in dims]


__all__ = ["SMALL", "exp_sums", "highest"]
