"""Softmax cross-entropy, also of a vocabulary that is split over a mesh axis.

Legend: B batch, T time, V vocabulary; [V@axis] is a dim split over an axis; {V} varies over it, {I} does not.
Source: Shoeybi et al., 2019, "Megatron-LM", for the split; torch.nn.functional.cross_entropy for the meaning.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fshard._comm import Axis, checker
from fshard._ops import local_range
from fshard.collectives import pmax, psum, pvary
from fshard.errors import fail
from fshard.spec import describe

from . import softmax


def cross_entropy(
    logits: Tensor, targets: Tensor, *, axis: Axis = None, size: int | None = None, over: Axis = None,
    weight: Tensor | None = None, ignore_index: int = -100, label_smoothing: float = 0.0,
    reduction: Literal["none", "mean", "sum"] = "mean",
) -> Tensor:  # fmt: skip
    """Softmax cross-entropy in nats: logits [..., V], integer targets [...] -> [], or [...].

        with `axis`: logits [..., V@axis]{V}, targets {I} over it -> {I}: no rank sees another's logits
        forward: one pmax and one psum, of one and of two numbers per target; backward: nothing moves

    Args:
        size: V, needed only where the axis does not divide it.
        over: axes the targets are split over (`"data"`): "mean" and "sum" are then over all of their ranks,
            each target counted once also where the counts differ. This is one psum of two numbers.
        weight: [V], or [V@axis]: a constant for each class; the mean is a weighted one.
        ignore_index: targets of this value count nothing. A mean over no targets is NaN, as in torch.
        label_smoothing: share of the target spread evenly over all classes.
        reduction: "none" gives one loss per target, 0 where ignored.

    The semantics are those of torch.nn.functional.cross_entropy with class indices; float32 or better inside
    and out. A target that is neither a class nor ignored gives NaN with `axis` (to raise, the host would have
    to wait for the device), and torch's error without. Large logits are kept once, and the only other array
    of their size is their gradient (label smoothing adds one).

    >>> nn.cross_entropy(logits, targets, axis="model", size=50257, over="data")     # [B@data, T, V@model]
    """
    v = logits.shape[-1]
    if reduction not in ("none", "mean", "sum"):
        raise fail(f"cross_entropy: reduction={reduction!r}", fix="'none', 'mean' or 'sum'")
    if not 0 <= label_smoothing <= 1:
        raise fail(f"cross_entropy: label_smoothing={label_smoothing}", fix="a share, from 0 to 1")
    if targets.dtype not in (torch.int64, torch.int32, torch.uint8) or targets.shape != logits.shape[:-1]:
        raise fail("cross_entropy: targets must be one integer class for each row of logits",
                   logits=_words(logits), targets=_words(targets))  # fmt: skip
    if weight is not None and tuple(weight.shape) != (v,):
        raise fail("cross_entropy: weight must be one number for each class here",
                   logits=_words(logits), weight=_words(weight))  # fmt: skip
    wide = torch.promote_types(logits.dtype, torch.float32)
    if weight is not None:
        weight, found = weight.detach().to(wide), checker()
        if found is not None:  # without a gradient it goes with logits of any type
            found.mark_constant(weight)
    small = torch.compiler.is_dynamo_compiling() or logits.numel() <= softmax.SMALL
    if small and not (axis or over or label_smoothing):  # torch cannot vmap its label smoothing
        rows, classes = logits.reshape(targets.numel(), v).to(wide), targets.reshape(-1).long()
        losses = F.cross_entropy(rows, classes, weight, ignore_index=ignore_index,
                                 label_smoothing=label_smoothing, reduction=reduction)  # fmt: skip
        return losses.view(targets.shape) if reduction == "none" else losses

    start, whole = local_range("cross_entropy", v, axis, size)
    counted = targets != ignore_index
    local = targets.long() - start
    mine = counted & (local >= 0) & (local < v) if axis else counted
    at = local.where(mine, 0).unsqueeze(-1)[..., :v]
    # Relative to the largest logit of all ranks, which is a constant to the derivative: nothing overflows,
    # and a part whose logits are all -inf adds 0.
    top = softmax.highest(logits, wide)
    if axis:
        top = pvary(pmax(top, axis), axis)
    exps, target = softmax.exp_sums(logits, at, top)
    parts = {"exp": exps, "target": (target - top).where(mine, 0)}
    if weight is not None:
        parts["share"] = weight.expand_as(logits).gather(-1, at).sum(-1).where(mine, 0)
    if label_smoothing:
        every = logits - top.unsqueeze(-1)
        parts["all"] = (every if weight is None else every * weight).sum(-1)
        if weight is not None:
            parts["weight"] = weight.sum()
    sums = psum(parts, axis) if axis else parts

    lse = sums["exp"].log()
    losses = lse - sums["target"]
    share = counted.to(wide) if weight is None else sums["share"]
    if weight is not None:
        losses = losses * share
    if label_smoothing:
        smooth = lse * (whole if weight is None else sums["weight"]) - sums["all"]
        losses = (1 - label_smoothing) * losses + label_smoothing / whole * smooth
    if axis:
        losses = losses.where((targets >= 0) & (targets < whole), math.nan)
    losses = losses.where(counted, 0)
    if reduction == "none":
        return losses
    total, count = losses.sum(), share.sum()
    if over:
        total, count = psum((total, count), over)
    return total if reduction == "sum" else total / count


def _words(x: Tensor) -> str:
    return describe(x.dtype, x.shape)


__all__ = ["cross_entropy"]
