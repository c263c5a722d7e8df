"""Pure layers and losses. With `axis=` a layer is split over a mesh axis; without, it is the dense one.

Legend: B batch, T time, D width, H heads, K head width, V vocabulary; [D@model] is a dim split over an axis.
Matrices are stored `[in, out]` and used as `x @ w`.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from . import random
from .collectives import Axis, axis_size, pmax, psum, pvary
from .comm import region
from .errors import fail
from .spec import P, names_of, piece


def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """x @ w + b: [..., D] -> [..., F], with w [D, F] and b [F]."""
    return F.linear(x, w.transpose(0, 1), b)


def embedding(ids: Tensor, table: Tensor, *, axis: Axis = None, size: int | None = None) -> Tensor:
    """Rows of a table: ids [...] -> [..., D].

        table [V, D]; with `axis` the table is [V@axis, D]{V} and the result a partial one, zero where another rank
        holds the row: [..., D]{V}, to be summed with `psum` or `psum_scatter`

    `size` is V, needed only where the axis does not divide it. Ids that no rank holds give zeros under `axis`.
    """
    if not names_of(axis):
        return F.embedding(ids, table)
    start, length = _own_rows("embedding", axis, table.shape[0], size)
    local = ids - start
    mine = (local >= 0) & (local < length)
    if not length:
        return table.new_zeros(*ids.shape, table.shape[1]) + 0 * table.sum()
    return F.embedding(local.where(mine, 0), table) * mine.unsqueeze(-1).to(table.dtype)


def _own_rows(verb: str, axis: Axis, local: int, size: int | None) -> tuple[int, int]:
    """(first, count) of this rank's part of a dim of global `size` that `axis` splits."""
    n = axis_size(axis)
    whole = local * n if size is None else size
    where = region(verb)
    start, length = piece(whole, [where.sizes[a] for a in names_of(axis)], [where.coords[a] for a in names_of(axis)])
    if length != local:
        raise fail(f"{verb}: this rank holds {local} rows of {whole} over {axis!r}, not {length}", fix="pass size=, the whole number")
    return start, length


def layer_norm(x: Tensor, w: Tensor | None = None, b: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(var + eps) * w + b over the last dim. Source: Ba et al., 2016."""
    return F.layer_norm(x, x.shape[-1:], w, b, eps)


def rms_norm(x: Tensor, w: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * w over the last dim, computed in float32 or better. Source: Zhang & Sennrich, 2019."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y if w is None else y * w


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None, scale: float | None = None,
    rate: float = 0.0, key: Tensor | None = None, spec: P | None = None, shape: tuple[int, ...] | None = None,
) -> Tensor:  # fmt: skip
    """Scaled dot-product attention: q [B, H, T, K], k and v [B, H, S, K] -> [B, H, T, K].

    `causal` lets position t of the last T of S positions see the positions up to its own. With a dropout `rate` the
    weights are dropped by a mask that is the same on every mesh: `spec` and `shape` place the global [B, H, T, S]
    weights, as in `dropout`. Source: Vaswani et al., 2017.
    """
    if causal and mask is not None:
        raise fail("attention: causal=True and a mask", fix="put causality into the mask")
    if causal and q.shape[-2] != k.shape[-2]:
        mask, causal = causal_mask(q.shape[-2], k.shape[-2], device=q.device), False
    if not rate or key is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    if causal:
        mask = causal_mask(q.shape[-2], k.shape[-2], device=q.device)
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype)
    return dropout(weights, rate, key=key, spec=spec, shape=shape) @ v


def causal_mask(t: int, s: int, *, device: torch.device | None = None) -> Tensor:
    """[T, S] bool: whether each of the last T of S positions may see a position."""
    return torch.ones(t, s, dtype=torch.bool, device=device).tril(s - t)


def mlp(x: Tensor, up: Tensor, up_b: Tensor | None, down: Tensor, down_b: Tensor | None, *, axis: Axis = None,
        activation: Any = F.relu) -> Tensor:  # fmt: skip
    """down(activation(up(x))): [..., D]{I} -> [..., D]{I}; with `axis`, up is [D, F@axis] and down [F@axis, D].

    One psum forward and one backward. Source: Shoeybi et al., 2019, "Megatron-LM".
    """
    h = activation(linear(pvary(x, axis), up, up_b))
    y = psum(linear(h, down), axis)
    return y if down_b is None else y + down_b


def dropout(
    x: Tensor, rate: float, *, key: Tensor | None, spec: P | None = None, shape: tuple[int, ...] | None = None
) -> Tensor:
    """Zero a share `rate` of the elements and scale the rest by 1 / (1 - rate).

    The mask is a function of `key` and of each element's global index, hence the same on every mesh. `spec` says how
    the global array lies (its axes are those `x` varies over); `shape` is the global shape, needed only where an
    axis does not divide it. `rate` 0 or key `None` does nothing. Source: Srivastava et al., 2014.

    >>> nn.dropout(x, 0.1, key=fs.fold_in(key, layer), spec=P("data"))        # x [B@data, T, D]
    """
    if not 0 <= rate < 1:
        raise fail(f"dropout: rate={rate}", fix="a share of at least 0 and less than 1")
    if rate == 0 or key is None:
        return x
    spec = spec or P()
    if shape is None:
        shape = tuple(n * axis_size(axes) if axes else n for n, axes in zip(x.shape, spec.parts(x.ndim), strict=True))
    keep = random.bernoulli(key, shape, p=1 - rate, spec=spec, device=x.device)
    if keep.shape != x.shape:
        raise fail(f"dropout: x is {list(x.shape)} here, but its part of {list(shape)} is {list(keep.shape)}",
                   fix="pass the global shape=", spec=spec)  # fmt: skip
    return torch.where(keep, x / (1 - rate), 0)


def cross_entropy(
    logits: Tensor, targets: Tensor, *, axis: Axis = None, size: int | None = None, over: Axis = None,
    weight: Tensor | None = None, ignore_index: int = -100, label_smoothing: float = 0.0,
    reduction: Literal["none", "mean", "sum"] = "mean",
) -> Tensor:  # fmt: skip
    """Softmax cross-entropy in nats: logits [..., V], integer targets [...] -> [] or [...].

        with `axis`: logits [..., V@axis]{V}, targets {I} over it, result {I}: no rank sees another's logits.
        forward: one pmax and one psum of two numbers per target; backward: nothing

    Args:
        size: V, needed only where the axis does not divide it.
        over: axes the targets are split over (`"data"`): "mean" and "sum" are then over all of their ranks, each
            target counted once also where the counts differ.
        weight: [V], or [V@axis], a weight per class; the mean is a weighted one.
        ignore_index: targets of this value count nothing. A mean over no targets is NaN, as in torch.
        label_smoothing: share of the target spread evenly over all classes.
        reduction: "none" gives one loss per target, 0 where ignored.

    Semantics follow torch.nn.functional.cross_entropy with class indices; float32 inside.
    """
    if reduction not in ("none", "mean", "sum"):
        raise fail(f"cross_entropy: reduction={reduction!r}", fix="'none', 'mean' or 'sum'")
    if targets.is_floating_point() or tuple(targets.shape) != tuple(logits.shape[:-1]):
        raise fail("cross_entropy: targets must be one integer class for each row of logits",
                   logits=list(logits.shape), targets=f"{str(targets.dtype)[6:]}{list(targets.shape)}")  # fmt: skip
    v = logits.shape[-1]
    start, length = _own_rows("cross_entropy", axis, v, size) if names_of(axis) else (0, v)
    whole = size if size is not None else v * (axis_size(axis) if names_of(axis) else 1)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted = targets != ignore_index
    local = targets.where(counted, 0) - start
    mine = (local >= 0) & (local < length)
    at = local.where(mine, 0).unsqueeze(-1)

    # log sum exp over all ranks from each rank's own: shifted by the largest, which is a constant to the derivative.
    own = torch.logsumexp(wide, -1) if length else wide.new_full(targets.shape, -math.inf) + 0 * wide.sum()
    top = pmax(own.detach(), axis)
    pick = lambda values: values.gather(-1, at).squeeze(-1) * mine if length else own * 0  # noqa: E731
    parts = {"exp": (own - pvary(top, axis)).exp(), "target": pick(wide)}
    if weight is not None:
        parts["weight"] = pick(weight.to(wide.dtype).expand_as(wide))
    if label_smoothing:
        parts["smooth"] = (wide if weight is None else wide * weight).sum(-1)
        if weight is not None:
            parts["weights"] = weight.to(wide.dtype).sum()
    sums = psum(parts, axis)
    lse = sums["exp"].log() + top
    share = sums.get("weight", torch.ones_like(lse)) * counted
    losses = torch.where(counted, (lse - sums["target"]) * share, 0)
    if label_smoothing:
        total = sums["weights"] if weight is not None else float(whole)
        smooth = torch.where(counted, lse * total - sums["smooth"], 0)
        losses = (1 - label_smoothing) * losses + label_smoothing / whole * smooth
    if reduction == "none":
        return losses
    if reduction == "sum":
        return psum(losses.sum(), over)
    total_loss, total_share = psum((losses.sum(), share.sum()), over)
    return total_loss / total_share


def gelu(x: Tensor) -> Tensor:
    """The tanh form of GELU, GPT-2's. Source: Hendrycks & Gimpel, 2016."""
    return F.gelu(x, approximate="tanh")


__all__ = ["attention", "causal_mask", "cross_entropy", "dropout", "embedding", "gelu", "layer_norm", "linear", "mlp",
           "rms_norm"]  # fmt: skip
