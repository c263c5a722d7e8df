"""Muon: steps of matrices along an orthogonal matrix near their momentum."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.errors import checked, fail, raise_all
from fshard.spec import P, describe

from .formula import Mask, Optimizer, join_parts, take_part
from .optimizers import checked_optimizer, decayed
from .schedules import Schedule

_COEFFICIENTS = (3.4445, -4.775, 2.0315)  # of the polynomial whose slope at 0 is largest
_ITERATIONS = 5


@checked
def muon(
    lr: float | Schedule, specs: Any, *, momentum: float = 0.95, weight_decay: float = 0.1, mask: Mask = None
) -> Optimizer:
    """Make Muon for matrices, as `torch.optim.Muon` with adjust_lr_fn="match_rms_adamw". State: count and m.

        params [R@a, C@b]{V}, grads and m the same
        cost: a gather of each matrix over the axes that split it; each of their ranks computes all of it

        m = momentum m + (1 - momentum) g
        o = orthogonal((1 - momentum) g + momentum m)
        p = p - lr weight_decay p - lr 0.2 sqrt(max(R, C)) o

    orthogonal(x) brings the singular values of x near 1, by 5 Newton-Schulz iterations in bfloat16 on the full matrix,
    so that every mesh takes the step of one device. The factor gives steps the rms of AdamW's, and so its rates.

    Args:
        lr, mask: as for `sgd`.
        specs: of the parameters, or a prefix.

    Matrices only: `fs.partition` gives the other leaves, and as a rule embeddings and heads, to another optimizer.

    >>> opt, params = muon(0.1, P(), weight_decay=0.0), torch.eye(2)
    >>> (params - opt.update(torch.eye(2), opt.init(params), params)[0]).diagonal().round(decimals=2)
    tensor([0.0300, 0.0300])

    Raises ShardingError for negative numbers, a momentum that is not below 1, and leaves that are not matrices.

    Source: Jordan et al., 2024, "Muon: an optimizer for hidden layers in neural networks"; Liu et al., 2025, "Muon is
    scalable for LLM training", for the factor.
    """
    opt = checked_optimizer("muon", ("m",), _muon, lr=lr, below_one=("momentum",), specs=specs, mask=mask,
                            momentum=momentum, weight_decay=weight_decay)  # fmt: skip

    def init(params: Any) -> Any:
        raise_all([fail(f"muon: {tree.show('params', path)} is {describe(x)}, not a matrix",
                        fix="fs.partition: muon for the matrices, adamw for the other leaves")
                   for path, x in tree.leaves_with_path(params) if getattr(x, "ndim", 2) != 2])  # fmt: skip
        return opt.init(params)

    return replace(opt, init=init)


def _muon(
    p: Tensor, g: Tensor, m: Tensor, *, lr: Tensor, count: Tensor, spec: P, momentum: float, weight_decay: float
) -> tuple[Tensor, ...]:
    m = m + (g - m) * (1 - momentum)
    step = g + (m - g) * momentum
    step = join_parts(step, spec)
    scale = 0.2 * math.sqrt(max(step.shape))
    step = take_part(_orthogonal(step), spec)
    return decayed(p, lr, weight_decay) - (lr * scale).to(p.dtype) * step.to(p.dtype), m


def _orthogonal(x: Tensor) -> Tensor:
    """Return a matrix with the singular vectors of x and singular values near 1, in bfloat16; 0 for 0.

    The polynomial a s + b s^3 + c s^5 of the singular values s moves each from (0, 1] to about [0.7, 1.2].
    """
    a, b, c = _COEFFICIENTS
    is_tall = x.shape[0] > x.shape[1]
    y = (x.T if is_tall else x).to(torch.bfloat16)
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.T if is_tall else y
