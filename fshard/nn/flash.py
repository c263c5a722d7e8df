"""Attention with its log-sum-exp, by which results over parts of the keys can be merged.

The log-sum-exp of a query is log(sum_s exp(score_s)) over the positions it attends to: -inf if there are none.

Legend: B batch, H heads of queries, G of keys and values, T queries, S positions, K head width.
Source: Dao et al., 2022, "FlashAttention"; Milakov & Gimelshein, 2018, for the merge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fshard._core.callsite import Site, site
from fshard._core.ops import apply_function
from fshard._core.region import checker, device_type
from fshard._core.torch import (
    assume_constant_result,
    efficient_attention,
    efficient_attention_backward,
    flash_attention,
    flash_attention_backward,
)
from fshard._core.transfers import is_observed, transposing
from fshard.errors import checked, fail

from .layers import causal_mask, check_groups, masked_scores, repeat_heads

_ALIGNMENT = 32  # of the queries in the log-sum-exp of the kernel on CUDA


@checked
def attention_lse(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `attention` and the log-sum-exp of its scores: q [B, H, T, K] -> ([B, H, T, K], [B, H, T]).

    k and v are [B, G, S, K], and arguments are as of `attention`. Both results are differentiable, so attention over
    parts of the keys can be merged: with `lse = torch.logaddexp(lse_1, lse_2)` it is the sum of the parts' results,
    each times `exp(lse_i - lse)`. A query that attends to no position has the result 0 and the log-sum-exp -inf. The
    log-sum-exp is float32 or better.

    On a CPU and on CUDA this is torch's fused kernel, which has neither jvp nor second derivatives; torch's plain
    formula has both: `with torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`.

    >>> out, lse = nn.attention_lse(q, k, v)
    >>> torch.equal(out, nn.attention(q, k, v)), lse.shape == q.shape[:-1]
    (True, True)

    Raises ShardingError for shapes that do not fit, and for a mask with `causal=True`.
    """
    if causal and mask is not None:
        raise fail("attention_lse: causal=True and a mask", fix="combine the mask with nn.causal_mask(T, S)")
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.ndim != 4:
            raise fail(f"attention_lse: {name} is {list(x.shape)}", fix="[B, heads, positions, K]")
    check_groups("attention_lse", q.shape[1], k.shape[1])
    t, s = q.shape[2], k.shape[2]
    if causal and t != s:
        mask, causal = causal_mask(t, s, device=q.device), False
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not has_kernel(q, k, v) or (mask is not None and mask.requires_grad):
        return plain(q, k, v, causal, mask, scale)
    if (types := checker()) is not None:
        types.check_operands("attention", [q, k, v])
    if mask is not None:  # with the batch as its first dim
        mask = additive(mask, q.dtype).expand(len(q), *mask.shape[-3:-2] or (1,), t, s)
    return apply_fused(_Attention(causal, scale), q, k, v, mask)


def has_kernel(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether torch has a fused kernel for these tensors, and the user has not turned it off."""
    if not _is_enabled() or q.shape[-1] != k.shape[-1] or k.shape[-1] != v.shape[-1]:
        return False
    on_cuda = device_type(q) == "cuda" and q.shape[-1] % 8 == 0 and q.dtype != torch.float64
    return q.is_floating_point() and (on_cuda or device_type(q) == "cpu")


@assume_constant_result
def _is_enabled() -> bool:
    return bool(torch.backends.cuda.flash_sdp_enabled())  # type: ignore[no-untyped-call]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as numbers to add to the scores: 0 for True, -inf for False."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)


def block(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp, without autograd; `mask` is a number to add, or None."""
    if not has_kernel(q, k, v) or not q.numel() or not k.numel():
        return plain(q, k, v, causal, mask, scale)
    if device_type(q) == "cpu":
        out, lse = flash_attention(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    else:
        k, v = (repeat_heads(q.shape[1], x) for x in (k, v))
        out, lse, *_ = efficient_attention(q, k, v, _aligned(mask, q, k), True, 0.0, causal, scale=scale)
        lse = lse[..., : q.shape[2]]
    if mask is not None:
        none = (mask == -math.inf).all(-1)
        out, lse = out.masked_fill(none.unsqueeze(-1), 0), lse.masked_fill(none, -math.inf)
    return out, lse


def block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients by q, k and v.

    `out` and `lse` may be merged results over more keys: then these are the gradients of the part with k and v.
    """
    if not q.numel() or not k.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if mask is not None:
        lse = lse.masked_fill(lse == -math.inf, 0)
    grad, out = grad.to(q.dtype).contiguous(), out.to(q.dtype).contiguous()
    if device_type(q) == "cpu":
        dq, dk, dv = flash_attention_backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
        return dq, dk, dv
    groups, bias = k.shape[1], _aligned(mask, q, k)
    k, v = (repeat_heads(q.shape[1], x) for x in (k, v))
    lse = F.pad(lse, (0, -lse.shape[-1] % _ALIGNMENT))
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # of dropout, which there is none of
    dq, dk, dv, _ = efficient_attention_backward(grad, q, k, v, bias, out, lse, seed, seed, 0.0,
                                                 [True, True, True, False], causal, scale=scale)  # fmt: skip
    return dq, _sum_groups(dk, groups), _sum_groups(dv, groups)


def _sum_groups(x: Tensor, groups: int) -> Tensor:
    """Sum the gradients of the heads of each group: [B, H, S, K] -> [B, G, S, K]. Transpose: `repeat_heads`."""
    if x.shape[1] == groups:
        return x
    split: Tensor = x.unflatten(1, (groups, x.shape[1] // groups))  # type: ignore[no-untyped-call]
    return split.sum(2)


def _aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return a mask as CUDA's kernel takes it: of all dims, and with rows of 16 numbers in memory."""
    if mask is None:
        return None
    s = mask.shape[-1]
    return F.pad(mask, (0, -s % 16))[..., :s].expand(*q.shape[:3], k.shape[2])


def plain(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return attention and its log-sum-exp by torch's operations, with dropout of the weights [B, H, T, S]."""
    if causal or not k.shape[2]:  # without keys the queries attend to none
        mask = causal_mask(q.shape[2], k.shape[2], device=q.device)
    k, v = (repeat_heads(q.shape[1], x) for x in (k, v))
    scores, masked = masked_scores(q, k, mask, scale)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp()
    if masked is not None:
        weights, lse = weights.masked_fill(masked, 0), lse.masked_fill(masked, -math.inf)
    weights = weights.to(v.dtype)
    return (weights if drop is None else drop(weights)) @ v, lse.squeeze(-1)


# --- autograd ---------------------------------------------------------------------------------------------------


def apply_fused(f: Any, *xs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Apply a function so that autograd and transforms of torch.func differentiate it, once.

    `f.forward(*xs)` returns attention and its log-sum-exp; `f.backward`, from these, the results and the gradients of
    the results, the gradients by `xs`: both without autograd. `f.verb` names it in errors. All have a dim of examples.
    """
    if torch.compiler.is_dynamo_compiling():
        # Of views: dynamo drops the backward of a Function that is applied to an argument of torch.func.grad.
        return _Traced.apply(f, *[None if x is None else x.view_as(x) for x in xs])  # type: ignore[no-any-return,no-untyped-call]
    return apply_function(f.verb, _Fused, f, *xs)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Attention:
    causal: bool
    scale: float
    verb = "attention_lse"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return block(q, k, v, mask, self.causal, self.scale)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, d_out: Tensor | None,
        d_lse: Tensor | None,
    ) -> tuple[Any, ...]:  # fmt: skip
        width = q.shape[-1]
        if d_out is None:
            d_out = torch.zeros_like(out)
        if d_lse is not None:
            # The gradient of a score is weight * (grad @ v - sum(grad * out) + d_lse): one more column of values, 1,
            # whose gradient is d_lse and whose result, for the second summand, is 0. The kernels need equal widths.
            q, k, out = (F.pad(x, (0, 8)) for x in (q, k, out))
            v = torch.cat([v, torch.ones_like(v[..., :1]), v.new_zeros(*v.shape[:-1], 7)], -1)
            d_lse = d_lse.masked_fill(lse == -math.inf, 0)
            d_out = torch.cat([d_out, F.pad(d_lse.unsqueeze(-1), (0, 7)).to(d_out.dtype)], -1)
        grads = block_backward(d_out, q, k, v, out, lse, mask, self.causal, self.scale)
        return *[x[..., :width] for x in grads], None


class _Once(torch.autograd.Function):
    """Base of Functions without jvp, whose vmap joins the examples of all tensors in their first dim."""

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise fail("torch's fused attention has no jvp and no second derivative",
                   fix="the plain formula: with torch.nn.attention.sdpa_kernel(SDPBackend.MATH)")  # fmt: skip

    @classmethod
    def vmap(cls, info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
        n, joined = info.batch_size, []
        for x, d in zip(args, in_dims, strict=True):
            if isinstance(x, Tensor):
                x = x.expand(n, *x.shape) if d is None else x.movedim(d, 0)
                x = x.flatten(0, 1)
            joined.append(x)
        outs = cls.apply(*joined)  # type: ignore[no-untyped-call]
        split = tuple([None if y is None else y.unflatten(0, (n, len(y) // n)) for y in outs])
        return split, tuple([None if y is None else 0 for y in outs])


class _Traced(torch.autograd.Function):
    """A function for dynamo, which refuses a jvp, a vmap and arguments without names."""

    @staticmethod
    def forward(f: Any, q: Tensor, k: Tensor, v: Tensor, extra: Tensor | None) -> Any:
        return f.forward(q, k, v, extra)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.f, q, k, v, extra = inputs
        ctx.save_for_backward(q, k, v, extra, *output)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Any, ...]:
        q, k, v, extra, out, lse = ctx.saved_tensors
        return None, *ctx.f.backward(q, k, v, extra, out, lse, d_out, d_lse)


class _Fused(_Once, _Traced):
    """The same function for autograd and torch.func, whose backward pass is a function too."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _Traced.setup_context(ctx, inputs, output)
        ctx.origin = site() if is_observed() else None
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, *apply_function(ctx.f.verb, _FusedBackward, ctx.f, ctx.origin, *ctx.saved_tensors, *grads)


class _FusedBackward(_Once):
    @staticmethod
    def forward(f: Any, origin: Site | None, *xs: Any) -> Any:
        with transposing(origin) if origin else nullcontext():
            return f.backward(*xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        pass

    backward = _Once.jvp
