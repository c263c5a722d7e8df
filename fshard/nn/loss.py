"""Softmax cross-entropy, with the vocabulary on one device or split over a mesh axis.

Legend: B batch, T time, V vocabulary; [V@axis] is a dim split over an axis; {V} varies over it, {I} does not.
Source: Shoeybi et al., 2019, "Megatron-LM", for the split; torch.nn.functional.cross_entropy for the meaning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fshard._core.ops import local_range
from fshard._core.region import live_axis
from fshard._core.torch import in_transform
from fshard.collectives import pmax, psum, pvary
from fshard.errors import checked, fail
from fshard.spec import Axis, Size, describe

from .row_blocks import row_blocks
from .sampled_classes import check_range, checked_targets, target_columns

# Largest number of logits for which the plain formula is faster. Forward and backward on one core of a busy machine:
# plain 4.3 and in row blocks 2.3 ms for half a million elements in rows of 4096, 2.3 and 2.5 in rows of 32128; 17 and
# 8 ms for two million, 14 and 9.
_PLAIN_UP_TO = 1 << 19
_BLOCK = {"cpu": 1 << 17, "cuda": 1 << 24}  # elements of a row block: on a CPU, as many as stay in a core's cache


@checked
def cross_entropy(
    logits: Tensor, targets: Tensor, *, axis: Axis = None, size: Size | None = None, over: Axis = None,
    weight: Tensor | None = None, ignore_index: int = -100, label_smoothing: float = 0.0,
    reduction: Literal["none", "mean", "sum"] = "mean", donate: bool = False, classes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute softmax cross-entropy in nats: logits [..., V], integer targets [...] -> [], or [...].

        with `axis`: logits [..., V@axis]{V}, targets {I} over it -> {I}
        cost: forward one pmax and one psum, of one and of two numbers per target; backward none

    Args:
        size: V, needed only where the axis does not divide it.
        over: axes the targets are split over (`"data"`): "mean" and "sum" are then over all of their ranks,
            each target counted once even if ranks have different numbers of them. This is one psum of two numbers.
        weight: [V], or [V@axis]: a constant for each class; the mean is a weighted one.
        ignore_index: targets of this value are ignored. A mean over no targets is NaN, as in torch.
        label_smoothing: share of the target spread evenly over all classes.
        reduction: "none" gives one loss per target, 0 where ignored.
        donate: backward may write the gradient over large logits, if nothing else uses them: then no second array of
            their size is made. A second backward pass through the same logits is torch's error for a tensor modified
            in place; second derivatives by `create_graph` or torch.func do not write.
        classes: [V], or [V@axis]: the class of each column, ascending, from `sample_classes`: the softmax is only over
            these, and so are `weight` and `label_smoothing`. `size` is then not used. A target that is none of them,
            or that two ranks have, gives NaN. One more number per target is sent.

    The semantics are as in torch.nn.functional.cross_entropy with class indices; float32 or better inside
    and out. A target that is neither a class nor ignored is an error on a CPU. Elsewhere, in a compiled program and
    under vmap it gives NaN with `axis` (to raise, the host would have to wait for it), and torch's error without.
    Under `fs.value_and_grad` large logits are kept once, and the only other array of their size is their gradient
    (label smoothing adds one); torch.func.grad keeps three.

    >>> nn.cross_entropy(logits, targets, axis="model", size=50257, over="data")     # [B@data, T, V@model]
    """
    if not 0 <= label_smoothing <= 1:
        raise fail(f"cross_entropy: label_smoothing={label_smoothing}", fix="0 <= label_smoothing <= 1")
    targets = checked_targets("cross_entropy", logits, targets)
    v = logits.shape[-1]
    if weight is not None and tuple(weight.shape) != (v,):
        raise fail("cross_entropy: weight must be one number for each class here",
                   logits=describe(logits), weight=describe(weight))  # fmt: skip
    wide = torch.promote_types(logits.dtype, torch.float32)
    if weight is not None:
        weight = weight.detach().to(wide)
    plain = torch.compiler.is_dynamo_compiling() or logits.numel() <= _PLAIN_UP_TO
    n_classes = v
    if axis or classes is not None:
        column, is_local, n_classes = target_columns("cross_entropy", logits, targets, axis, size, classes)
    in_range = classes is None and check_range("cross_entropy", "target", targets, n_classes, ignore_index,
                                               kind="classes", unsplit=None if axis else logits)  # fmt: skip
    is_whole = classes is None and (not axis or (in_range and not live_axis("cross_entropy", axis)))
    if plain and is_whole and not (label_smoothing or (over and weight is not None)):  # torch cannot vmap its smoothing
        rows = logits.reshape(targets.numel(), v).to(wide)
        here: str = "sum" if over and reduction == "mean" else reduction
        losses: Tensor = F.cross_entropy(rows, targets.reshape(-1), weight, ignore_index=ignore_index, reduction=here)
        if not over or reduction == "none":
            return losses.view(targets.shape) if reduction == "none" else losses
        return _reduced(losses, (targets != ignore_index).sum().to(wide), over, reduction)

    counted = targets != ignore_index
    if not axis and classes is None:
        column, is_local = targets.where(counted, 0), counted
        local_range("cross_entropy", v, axis, size)  # raises for another size
    is_local = is_local & counted
    column = column.unsqueeze(-1)[..., :v]
    # Subtract the largest logit of all ranks, a constant to the derivative, so that no exponential overflows. A part
    # whose logits are all -inf adds 0.
    largest = _row_max(logits, wide)
    if axis:
        largest = pvary(pmax(largest, axis), axis)
    exps, target = _exp_sums(logits, column, largest, donate)
    parts = {"exp": exps, "target": (target - largest).where(is_local, 0)}
    if weight is not None:
        parts["target_weight"] = weight.expand_as(logits).gather(-1, column).sum(-1).where(is_local, 0)
    if label_smoothing:
        shifted = logits - largest.unsqueeze(-1)
        parts["all_classes"] = (shifted if weight is None else shifted * weight).sum(-1)
        if weight is not None:
            parts["total_weight"] = weight.sum()
    if classes is not None:
        parts["found"], parts["classes"] = is_local.to(wide), (classes >= 0).sum().to(wide)
    sums = psum(parts, axis) if axis else parts

    is_class = (targets >= 0) & (targets < n_classes) if classes is None else sums["found"] == 1
    number = n_classes if classes is None else sums["classes"]
    lse = sums["exp"].log()
    losses = lse - sums["target"]
    target_weight = counted.to(wide) if weight is None else sums["target_weight"]
    if weight is not None:
        losses = losses * target_weight
    if label_smoothing:
        smooth = lse * (number if weight is None else sums["total_weight"]) - sums["all_classes"]
        losses = (1 - label_smoothing) * losses + label_smoothing / number * smooth
    if axis or classes is not None:
        losses = losses.where(is_class, math.nan)
    losses = losses.where(counted, 0)
    if reduction == "none":
        return losses
    return _reduced(losses.sum(), target_weight.sum(), over, reduction)


def _reduced(total: Tensor, count: Tensor, over: Axis, reduction: str) -> Tensor:
    """Return the sum, or the mean, over the ranks of `over`."""
    if over:
        total, count = psum((total, count), over)
    return total if reduction == "sum" else total / count


# --- sums of exponentials -------------------------------------------------------------------------------------
# Legend: x [..., V] logits; column [..., 1], the target's column in each row, or [..., 0] where V is 0; the rest [...].


def _row_max(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest entry of each row, without a gradient; -inf where V is 0."""
    if not x.shape[-1]:
        return x.new_full(x.shape[:-1], -math.inf, dtype=dtype)
    return x.detach().amax(-1).to(dtype)


def _exp_sums(x: Tensor, column: Tensor, shift: Tensor, donate: bool = False) -> tuple[Tensor, Tensor]:
    """Return (sum of exp(x - shift), entry x[column]) of each row, in the dtype of `shift`, which has no gradient.

    With `donate` the gradient of x may be written over x.
    """
    if torch.compiler.is_dynamo_compiling():  # inductor makes one loop of this, and one more in backward
        wide = x.to(shift.dtype)
        picked = torch.arange(x.shape[-1], device=x.device) == column
        return _exp(wide, shift).sum(-1), wide.where(picked, 0).sum(-1)
    if x.numel() <= _PLAIN_UP_TO or in_transform():
        wide = x.to(shift.dtype)
        return _exp(wide, shift).sum(-1), _pick(wide, column)
    sums: tuple[Tensor, Tensor] = _ExpSums.apply(x, column, shift, donate)  # type: ignore[no-untyped-call]
    return sums


def _exp(x: Tensor, shift: Tensor) -> Tensor:
    return (x.to(shift.dtype) - shift.unsqueeze(-1)).exp()


def _pick(x: Tensor, column: Tensor) -> Tensor:
    return x.gather(-1, column).sum(-1)


class _ExpSums(torch.autograd.Function):
    """Compute `_exp_sums` a few rows at a time: the only new array of the logits' size is their gradient.

    The plain formula keeps the exponentials, and of half precision logits a float32 copy, until the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, column: Tensor, shift: Tensor, donate: bool) -> tuple[Tensor, Tensor]:
        ctx.donate = donate
        ctx.save_for_backward(x, column, shift)
        ctx.save_for_forward(x, column, shift)
        blocks = _row_blocks(x, shift.dtype, shift.unsqueeze(-1))
        sums = [torch.sub(rows, s, out=buffer).exp_().sum(-1) for buffer, rows, s in blocks]
        return torch.cat(sums).view(shift.shape), _pick(x, column).to(shift.dtype)

    @staticmethod
    def backward(ctx: Any, d_sum: Tensor, d_pick: Tensor) -> tuple[Any, ...]:
        x, column, shift = ctx.saved_tensors
        d_sum, d_pick = d_sum.unsqueeze(-1), d_pick.unsqueeze(-1)
        if torch.is_grad_enabled():  # for a second derivative: operations that autograd can differentiate
            exps = _exp(x, shift) * d_sum
            return exps.scatter_add(-1, column, d_pick[..., : column.shape[-1]]).to(x.dtype), None, None, None
        out = x.detach() if ctx.donate and x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        blocks = _row_blocks(x, shift.dtype, out, column, shift.unsqueeze(-1), d_sum, d_pick)
        for buffer, rows, to, i, s, a, b in blocks:
            torch.sub(rows, s, out=buffer).exp_().mul_(a).scatter_add_(-1, i, b[:, : i.shape[1]])
            to.copy_(buffer)
        return out, None, None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, _column: None, _shift: None, _donate: None) -> tuple[Tensor, Tensor]:
        x, column, shift = ctx.saved_tensors
        return (_exp(x, shift) * dx).sum(-1), _pick(dx, column).to(shift.dtype)


def _row_blocks(x: Tensor, dtype: torch.dtype, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split x [..., V] and `others` [..., any] into blocks of rows: (a buffer of the block's size, x, *others)."""
    buffer = None
    for block in row_blocks(_BLOCK, x, *others):
        if buffer is None:  # the first block is the largest
            buffer = torch.empty(block[0].shape, dtype=dtype, device=x.device)
        yield buffer[: len(block[0])], *block
