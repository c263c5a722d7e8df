"""Losses with a margin between classes, on one device or with the classes split over a mesh axis.

Each is a change of logits, which `nn.cross_entropy` takes: it makes the logit of the target smaller, so that training
goes on until the target leads by a margin. Nothing is communicated: the rank that has the target's column changes it.

Legend: B batch, D width, C classes; [C@axis] is a dim split over an axis; {V} varies over it, {I} does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fshard._core.region import axes_of_own_values, checker
from fshard._core.torch import in_transform
from fshard._core.weight import Weight
from fshard.errors import checked, fail
from fshard.spec import Axis, Size, describe, names_of

from .row_blocks import row_blocks
from .sampled_classes import target_columns

_PLAIN_UP_TO = 1 << 19  # elements up to which arrays of the size of the table or of the logits do not matter
_BLOCK = {"cpu": 1 << 18, "cuda": 1 << 24}  # elements of a block of the table: on a CPU, what fits a core's cache

Formula = Callable[[Tensor], Tensor]  # the cosine of a target -> the cosine with its margin


@checked
def cosine_logits(x: Tensor, w: Tensor | Weight, *, eps: float = 1e-12) -> Tensor:
    """Compute the cosine of each row of x with each row of a table of classes: x [..., D], w [C, D] -> [..., C].

        classes split over an axis: x {V} over it (by pvary), w [C@axis, D]{V} -> [..., C@axis]{V}, no communication

    Rows shorter than `eps` are divided by it, as by torch's `normalize`. Norms are computed in float32 or better. No
    second table is made, normalized: only the gradient has its size, or nothing where `fs.value_and_update` steps
    the table in the backward pass.

    >>> nn.cosine_logits(torch.tensor([3.0, 4.0]), torch.tensor([[2.0, 0.0], [0.0, -1.0]]))
    tensor([ 0.6000, -0.8000])

    Raises ShardingError for shapes that do not fit, other dtypes than one floating dtype, and a negative eps.
    """
    if w.ndim != 2 or not x.ndim or x.shape[-1] != w.shape[-1] or x.dtype != w.dtype or not x.is_floating_point():
        raise fail("cosine_logits: x is not [..., D] for a table [C, D] of one floating dtype",
                   x=describe(x), w=describe(w))  # fmt: skip
    if not eps > 0:
        raise fail(f"cosine_logits: eps={eps}", fix="more than 0")
    if isinstance(w, Weight):
        y: Tensor = w.map_rows(lambda rows: _normalized(rows, eps)).mT.linear(_normalized(x, eps))
        return y.to(x.dtype)
    if _is_plain(w):
        return _cosines(x, w, eps)
    if checker() is not None:  # which sees in a Function no gradient, and so no operand that forgets a pvary
        F.linear(x.reshape(math.prod(x.shape[:-1]), x.shape[-1])[:0], w[:0])
    logits: Tensor = _Cosines.apply(x, w, eps)  # type: ignore[no-untyped-call]
    return logits


@checked
def margin(
    cosines: Tensor, targets: Tensor, *, m1: float = 1.0, m2: float = 0.0, m3: float = 0.0, scale: float = 64.0,
    axis: Axis = None, size: Size | None = None, classes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Make logits of cosines: scale * cos, and scale * (cos(m1 θ + m2) - m3) for the target, whose cosine is cos θ.

        cosines [..., C], targets [...] -> [..., C]
        with `axis`: cosines [..., C@axis]{V}, targets {I} over it -> {V}, no communication

    m1 is SphereFace's margin, m2 ArcFace's and m3 CosFace's. The target's logit is computed in float32
    or better. A row whose target is not a class (-100) gets no margin.

    The derivative is the formula's, m1 sin(m1 θ + m2) / sin θ, and finite: where rounding hides the angle, cos θ
    is taken to be 1 - eps in size. Beyond the angle where m1 θ + m2 is π a larger angle has a larger logit, as in
    InsightFace's code, which has no threshold either (there the derivative is as with m2 = 0); `arcface` offers one.

    Args:
        size: C, needed only where the axis does not divide it.
        classes: the class of each column here, ascending, from `sample_classes`; `size` is then not used.

    A train step with classes [C@model, D] over the ranks of one batch:

    >>> def loss_fn(params, x):
    ...     x = fs.pvary(x @ params["up"], "model")                         # the features [B, D]
    ...     logits = nn.margin(nn.cosine_logits(x, params["w"]), targets, m2=0.3, m3=0.2, axis="model")
    ...     return nn.cross_entropy(logits, targets, axis="model")
    >>> loss, grads = fs.value_and_grad(loss_fn)(params, x)
    >>> params, state = opt.update(grads, state, params)

    Raises ShardingError for margins and scales out of range.

    Source: Deng et al., 2019, "ArcFace: Additive Angular Margin Loss for Deep Face Recognition", equation 4.
    """
    if not (0 < m1 < math.inf and abs(m2) <= math.pi and math.isfinite(m3) and 0 < scale < math.inf):
        raise fail("margin: m1 and scale are more than 0, m2 is an angle in radians, and all are finite",
                   m1=m1, m2=m2, m3=m3, scale=scale)  # fmt: skip

    def formula(c: Tensor) -> Tensor:
        return _rotated(c, m1, m2) - float(m3)

    return _change_targets("margin", cosines, targets, formula, scale, axis, size, classes)


@checked
def arcface(
    cosines: Tensor, targets: Tensor, *, m: float = 0.5, scale: float = 64.0, easy_margin: bool | None = None,
    axis: Axis = None, size: Size | None = None, classes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Make logits of cosines: scale * cos, and scale * cos(θ + m) for the target: `margin` with m2 = m.

    Args:
        easy_margin: the angles that get the margin. None is all of them. False is those below π - m, beyond which the
            target has cos θ - m sin m, so that a larger angle always has a smaller logit; True is those below π / 2,
            beyond which it has cos θ. Both are options of ArcFace's first code.

    >>> nn.arcface(torch.tensor([[0.6, 0.8]]), torch.tensor([1]), scale=1.0)            # cos(acos(0.8) + 0.5)
    tensor([[0.6000, 0.4144]])

    Raises ShardingError for an angle outside of [0, pi], and a scale that is not positive.

    Source: Deng et al., 2019, "ArcFace: Additive Angular Margin Loss for Deep Face Recognition".
    """
    if not 0 <= m <= math.pi or not 0 < scale < math.inf:
        raise fail(
            "arcface: m is an angle in radians, 0 <= m <= pi, and scale finite and more than 0", m=m, scale=scale
        )

    def formula(c: Tensor) -> Tensor:
        rotated = _rotated(c, 1.0, m)
        if easy_margin is None:
            return rotated
        return rotated.where(c > 0, c) if easy_margin else rotated.where(c > math.cos(math.pi - m), c - m * math.sin(m))

    return _change_targets("arcface", cosines, targets, formula, scale, axis, size, classes)


@checked
def cosface(
    cosines: Tensor, targets: Tensor, *, m: float = 0.35, scale: float = 64.0, axis: Axis = None,
    size: Size | None = None, classes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Make logits of cosines: scale * cos, and scale * (cos θ - m) for the target: `margin` with m3 = m.

    >>> nn.cosface(torch.tensor([[0.5, 0.75]]), torch.tensor([1]), m=0.25, scale=2.0)
    tensor([[1., 1.]])

    Raises ShardingError for a margin or a scale that is not finite, or a scale that is not positive.

    Source: Wang et al., 2018, "CosFace: Large Margin Cosine Loss for Deep Face Recognition".
    """
    if not math.isfinite(m) or not 0 < scale < math.inf:
        raise fail("cosface: m is finite, and scale finite and more than 0", m=m, scale=scale)
    return _change_targets("cosface", cosines, targets, lambda c: c - float(m), scale, axis, size, classes)


# --- formulas ---------------------------------------------------------------------------------------------------------


def _rotated(c: Tensor, m1: float, m2: float) -> Tensor:
    """Return cos(m1 θ + m2) of c = cos θ, with a finite derivative everywhere."""
    if m1 == 1 and m2 == 0:
        return c
    largest = 1 - torch.finfo(c.dtype).eps
    c = c + (c.clamp(-largest, largest) - c).detach()  # clamped, with a derivative of 1 outside too
    # atan2 in the place of acos, whose derivative has 1 - c * c, which cancels near 1.
    return torch.cos(m1 * torch.atan2(((1 - c) * (1 + c)).sqrt(), c) + m2)


def _change_targets(
    verb: str, cosines: Tensor, targets: Tensor, formula: Formula, scale: float, axis: Axis, size: Size | None,
    classes: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return cosines * scale, with the formula applied to the targets whose columns this rank has."""
    if not cosines.ndim or not cosines.is_floating_point():
        raise fail(f"{verb}: cosines are {describe(cosines)}", fix="floats [..., C]")
    if classes is None:
        _check_axis(verb, cosines, targets, axis)
    column, is_local, _ = target_columns(verb, cosines, targets, axis, size, classes)
    column, is_local = column.unsqueeze(-1)[..., : cosines.shape[-1]], is_local.unsqueeze(-1)

    def target_logits(c: Tensor) -> Tensor:
        wide = c.to(torch.promote_types(c.dtype, torch.float32))
        # 0 to the formula elsewhere: at a masked class, -inf, its derivative is NaN.
        return (torch.where(is_local, formula(wide.where(is_local, 0)), wide) * scale).to(c.dtype)

    if _is_plain(cosines):
        return (cosines * scale).scatter(-1, column, target_logits(cosines.gather(-1, column)))
    logits: Tensor = _ChangeTargets.apply(cosines, column, target_logits, scale)[0]  # type: ignore[no-untyped-call]
    return logits


def _check_axis(verb: str, cosines: Tensor, targets: Tensor, axis: Axis) -> None:
    """Raise ShardingError for columns that differ between ranks that `axis` does not name: the loss may name them."""
    types = checker()
    more = () if types is None else axes_of_own_values(cosines) - types.info(targets).type.varying - {*names_of(axis)}
    if more:
        axes = tuple(sorted({*more, *names_of(axis)}))
        named, over = axes if len(axes) > 1 else axes[0], " and ".join(map(repr, sorted(more)))
        raise fail(f"{verb}: cosines vary over {over}, targets do not, and axis={axis!r}",
                   "each rank would take its part of the classes for all of them",
                   fix=f"axis={named!r}, in the order of the table's spec; or fs.pvary(targets, {named!r}), "
                   "if each rank has all classes")  # fmt: skip


def _cosines(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return (F.linear(_normalized(x, eps), w) * _inverse_norm(w, eps)).to(x.dtype)


def _normalized(x: Tensor, eps: float) -> Tensor:
    return (x * _inverse_norm(x, eps).unsqueeze(-1)).to(x.dtype)


def _inverse_norm(x: Tensor, eps: float) -> Tensor:
    """Return 1 / |row| of each row, in float32 or better."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=dtype)
    return norm.clamp(min=eps).reciprocal()


# --- large arrays -----------------------------------------------------------------------------------------------------


def _is_plain(x: Tensor) -> bool:
    """Return whether to leave the gradient to torch: it makes two to four arrays of the size of x."""
    return torch.compiler.is_dynamo_compiling() or x.numel() <= _PLAIN_UP_TO or in_transform()


class _Cosines(torch.autograd.Function):
    """Compute `_cosines`; the backward pass reads the table once, in blocks of rows, and makes only its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, eps: float) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(x, w)
        y = F.linear(_normalized(x, eps), w).to(x.dtype)  # torch.autocast makes it half precision
        return y.mul_(_inverse_norm(w, eps))

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative
            inputs = [t for t, needed in zip((x, w), ctx.needs_input_grad, strict=False) if needed]
            grads = iter(torch.autograd.grad(_cosines(x, w, ctx.eps), inputs, d, create_graph=True))
            return *[next(grads) if needed else None for needed in ctx.needs_input_grad[:2]], None
        n = math.prod(x.shape[:-1])
        rows, d = x.reshape(n, x.shape[-1]), d.reshape(n, len(w))
        unit, dw = _normalized(rows, ctx.eps), torch.empty_like(w)
        dunit = torch.zeros_like(rows, dtype=torch.promote_types(x.dtype, torch.float32))
        for w_part, dw_part, d_part in row_blocks(_BLOCK, w, dw, d.mT):
            by_norm = (d_part * _inverse_norm(w_part, ctx.eps).unsqueeze(-1)).to(w.dtype)
            dunit += by_norm.mT @ w_part
            dw_part.copy_(_tangent(by_norm @ unit, w_part, ctx.eps))
        dx = _tangent(dunit * _inverse_norm(rows, ctx.eps).unsqueeze(-1), rows, ctx.eps)
        return dx.to(x.dtype).view(x.shape), dw, None


def _tangent(d: Tensor, x: Tensor, eps: float) -> Tensor:
    """Remove from each row of d its part along the row of x, unless that is shorter than eps: in float32 or better."""
    inverse = _inverse_norm(x, eps)
    along = (d.to(inverse.dtype) * x).sum(-1) * inverse.square()
    return d - x * along.where(inverse * eps < 1, 0).unsqueeze(-1)


class _ChangeTargets(torch.autograd.Function):
    """Return (x * scale with `target_logits` of the entries at `column`, these entries), keeping no array of x's size.

    The entries are a result so that the backward pass, which keeps them, can itself be differentiated.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, column: Tensor, target_logits: Formula, scale: float) -> tuple[Tensor, Tensor]:
        ctx.target_logits, ctx.scale = target_logits, scale
        c = x.gather(-1, column)
        ctx.save_for_backward(column, c)
        return (x * scale).scatter_(-1, column, target_logits(c)), c

    @staticmethod
    def backward(ctx: Any, d: Tensor, dc: Tensor) -> tuple[Tensor | None, ...]:
        column, c = ctx.saved_tensors
        second = torch.is_grad_enabled()
        with torch.enable_grad():
            c = c if second else c.detach().requires_grad_()
            y = ctx.target_logits(c)
        (picked,) = torch.autograd.grad(y, c, d.gather(-1, column), create_graph=second)
        dx = d * ctx.scale
        return (dx.scatter if second else dx.scatter_)(-1, column, picked + dc), None, None, None
