"""Adafactor: second moments of matrices as a product of one number for each row and one for each column."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fshard.collectives import psum
from fshard.errors import checked, fail
from fshard.spec import P

from .formula import Mask, Optimizer, Shape, join_parts, take_part
from .optimizers import checked_optimizer, decayed
from .schedules import Schedule


@checked
def adafactor(
    lr: float | Schedule, specs: Any, *, decay: float = 0.8, clip: float = 1.0, min_scale: float = 1e-3,
    weight_decay: float = 0.0, mask: Mask = None,
) -> Optimizer:  # fmt: skip
    """Make Adafactor, as `torch.optim.Adafactor`. State: count, row and col, each the same on every rank.

        params [.., R@a, C@b]{V}, grads the same; state row [.., R]{I}, col [.., C]{I}; of a vector row [R]{I}, col [0]
        cost: a sum and a gather of R + C numbers over the axes of a leaf, and a sum of 3 numbers

        w = t^-decay
        row = (1 - w) row + w mean of g^2 over C       col = (1 - w) col + w mean of g^2 over R
        v = row col / (mean of row over R)             of a vector: v = row = (1 - w) row + w g^2
        u = g / max(sqrt(v), eps)                      eps of the dtype
        p = p - lr weight_decay p - min(lr, 1 / sqrt(t)) max(min_scale, rms(p)) u / max(1, rms(u) / clip)

    The last two dims of a leaf are factored; rms is the root of the mean square of the full leaf.

    Args:
        lr, mask: as for `sgd`.
        specs: of the parameters, or a prefix.
        decay: makes the averages longer as training goes on.
        clip: the largest rms of u.
        min_scale: the least rms of a parameter, by which the rate is multiplied.

    >>> opt, params = adafactor(0.1, P()), {"w": torch.ones(2, 3), "b": torch.ones(3)}
    >>> params, state = opt.update(params, opt.init(params), params)
    >>> params["b"], state["row"]["w"], state["col"]["w"]
    (tensor([0.9000, 0.9000, 0.9000]), tensor([1., 1.]), tensor([1., 1., 1.]))

    Raises ShardingError for negative numbers, a decay that is not below 1, and a clip of 0.

    Source: Shazeer & Stern, 2018, "Adafactor: adaptive learning rates with sublinear memory cost".
    """
    if not clip > 0:
        raise fail(f"adafactor: clip={clip}", fix="above 0")
    shapes: dict[str, Shape] = {
        "row": lambda shape: shape[:-1] if len(shape) > 1 else shape,
        "col": lambda shape: (*shape[:-2], shape[-1]) if len(shape) > 1 else (0,),
    }
    return checked_optimizer("adafactor", tuple(shapes), _adafactor, lr=lr, below_one=("decay",), specs=specs,
                             mask=mask, shapes=shapes, decay=decay, clip=clip, min_scale=min_scale,
                             weight_decay=weight_decay)  # fmt: skip


def _adafactor(
    p: Tensor, g: Tensor, row: Tensor, col: Tensor, *, lr: Tensor, count: Tensor, spec: P, decay: float,
    clip: float, min_scale: float, weight_decay: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    t = count.to(torch.float64)
    w, square = (t**-decay).to(p.dtype), g * g
    if p.ndim < 2:
        row = row + (join_parts(square, spec, row.shape) - row) * w
        v = take_part(row, spec)
    else:
        *lead, of_rows, of_columns = spec.parts(p.ndim)
        across_rows, across_columns = spec.with_entries(*lead, of_rows), spec.with_entries(*lead, of_columns)
        row_mean = psum(square.sum(-1), of_columns or None) / max(1, col.shape[-1])
        col_mean = psum(square.sum(-2), of_rows or None) / max(1, row.shape[-1])
        row = row + (join_parts(row_mean, across_rows, row.shape) - row) * w
        col = col + (join_parts(col_mean, across_columns, col.shape) - col) * w
        share = row / row.mean(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).eps)
        v = take_part(share, across_rows).unsqueeze(-1) * take_part(col, across_columns).unsqueeze(-2)
    u = g / v.sqrt().clamp(min=torch.finfo(p.dtype).eps)
    sums = torch.stack([(p * p).sum(), (u * u).sum(), torch.tensor(float(p.numel()), dtype=p.dtype, device=p.device)])
    total: Tensor = psum(sums, spec.axes or None)
    rms_p, rms_u = (total[:2] / total[2].clamp(min=1)).sqrt().to(torch.float64)
    rate = torch.minimum(lr, t.rsqrt()) * rms_p.clamp(min=min_scale) / (rms_u / clip).clamp(min=1)
    return decayed(p, lr, weight_decay) - rate.to(p.dtype) * u, row, col
