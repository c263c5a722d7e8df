"""Optimizers whose step is elementwise: each is one formula, and options.

In the formulas g is the gradient, p the parameter, t the number of the step from 1 on, and lr the rate of that step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard.errors import checked, fail

from .formula import Formula, Mask, Optimizer, Shape, make_optimizer
from .schedules import Schedule, not_negative

BETAS = ("b1", "b2")  # the factors of Adam and its relatives


def checked_optimizer(
    name: str, moments: Sequence[str], formula: Formula, *, lr: float | Schedule, below_one: Sequence[str] = (),
    specs: Any = None, mask: Mask = None, shapes: Mapping[str, Shape] | None = None, **numbers: float,
) -> Optimizer:  # fmt: skip
    """Make an optimizer of `make_optimizer`. Raises for negative numbers, and factors of averages not below 1."""
    not_negative(name, lr=lr, **numbers)
    factors = {key: numbers[key] for key in below_one}
    if any(x >= 1 for x in factors.values()):
        raise fail(f"{name}: {', '.join(f'{key}={x}' for key, x in factors.items())}", fix="less than 1")
    return make_optimizer(name, moments, formula, numbers, lr=lr, specs=specs, mask=mask, shapes=shapes)


@checked
def sgd(
    lr: float | Schedule, *, momentum: float = 0.0, nesterov: bool = False, dampening: float = 0.0,
    weight_decay: float = 0.0, mask: Mask = None,
) -> Optimizer:  # fmt: skip
    """Make gradient descent, as `torch.optim.SGD`, on its fused kernel. State: count, and m for the momentum.

        g = g + weight_decay p
        m = momentum m + (1 - dampening) g          at t = 1: g
        p = p - lr m                                nesterov: p - lr (g + momentum m)

    Args:
        lr: a number, or a schedule: a function of the count of steps taken.
        mask: the leaves that decay (all of them if None): a tree of bools, a prefix of one, or a function of the
            parameters. A function should read `ndim`, not sizes: it gets local shapes.
        dampening: has no fused kernel, so each leaf is computed anew and then copied to a donated one.

    >>> opt = sgd(0.5)
    >>> opt.update(torch.tensor(2.0), opt.init(torch.tensor(1.0)), torch.tensor(1.0))
    (tensor(0.), {'count': tensor(1)})

    Raises ShardingError for negative numbers, and nesterov without a momentum or with dampening.

    Source: Polyak, 1964; Sutskever et al., 2013, "On the importance of initialization and momentum".
    """
    not_negative("sgd", lr=lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and (momentum == 0 or dampening != 0):
        raise fail("sgd: nesterov needs a momentum and no dampening", fix="momentum=0.9, dampening=0.0",
                   momentum=momentum, dampening=dampening)  # fmt: skip
    numbers = {"momentum": momentum, "nesterov": float(nesterov), "weight_decay": weight_decay}
    if dampening:
        numbers["dampening"] = dampening
    return make_optimizer("sgd", ("m",) if momentum else (), _sgd, numbers, lr=lr, mask=mask)


def _sgd(
    p: Tensor, g: Tensor, *moments: Tensor, lr: Tensor, count: Tensor, momentum: float, nesterov: float,
    weight_decay: float, dampening: float = 0.0,
) -> tuple[Tensor, ...]:  # fmt: skip
    step = g + weight_decay * p if weight_decay else g
    if not moments:
        return (p - lr.to(p.dtype) * step,)
    undamped = torch.where(count == 1, 1.0, 1.0 - dampening).to(p.dtype)  # all of the first gradient
    m = moments[0] * momentum + (step * undamped if dampening else step)
    return p - lr.to(p.dtype) * (step + momentum * m if nesterov else m), m


@checked
def adam(lr: float | Schedule, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    """Make Adam, as `torch.optim.Adam` without weight decay, on its fused kernel. State: count, m and v.

        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) g^2
        p = p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    `lr` is as for `sgd`. It is `adamw` with weight_decay=0, bit for bit.

    >>> opt, params = adam(0.1), torch.tensor([1.0, 2.0])
    >>> opt.update(torch.tensor([0.5, -2.0]), opt.init(params), params)[0]
    tensor([0.9000, 2.1000])

    Raises ShardingError for betas outside of [0, 1), and negative numbers.

    Source: Kingma & Ba, 2015, "Adam: a method for stochastic optimization".
    """
    return checked_optimizer("adam", ("m", "v"), _adam, lr=lr, below_one=BETAS, b1=b1, b2=b2, eps=eps,
                             weight_decay=0.0)  # fmt: skip


@checked
def adamw(
    lr: float | Schedule, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8,
    weight_decay: float = 0.01, mask: Mask = None,
) -> Optimizer:  # fmt: skip
    """Make Adam with decoupled weight decay, as `torch.optim.AdamW`, on its fused kernel. State: count, m and v.

        m, v  as `adam`
        p = p - lr weight_decay p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    `lr` and `mask` are as for `sgd`.

    >>> opt = adamw(warmup(cosine(3e-4, 10_000), 100), mask=lambda p: tree.map(lambda x: x.ndim > 1, p))
    >>> opt.specs({"w": P("model")})
    {'count': P(), 'm': {'w': P('model')}, 'v': {'w': P('model')}}

    Raises ShardingError for betas outside of [0, 1), and negative numbers.

    Source: Loshchilov & Hutter, 2019, "Decoupled weight decay regularization".
    """
    return checked_optimizer("adamw", ("m", "v"), _adam, lr=lr, below_one=BETAS, mask=mask, b1=b1, b2=b2, eps=eps,
                             weight_decay=weight_decay)  # fmt: skip


def _adam(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, *, lr: Tensor, count: Tensor, b1: float, b2: float, eps: float,
    weight_decay: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    t = count.to(torch.float64)
    step, root = (lr / (1 - b1**t)).to(p.dtype), (1 - b2**t).sqrt().to(p.dtype)
    m = m + (g - m) * (1 - b1)
    v = v * b2 + g * g * (1 - b2)
    return decayed(p, lr, weight_decay) - step * m / (v.sqrt() / root + eps), m, v


def decayed(p: Tensor, lr: Tensor, weight_decay: float) -> Tensor:
    """Return p - lr weight_decay p."""
    return p * (1 - lr * weight_decay).to(p.dtype) if weight_decay else p


@checked
def nadam(
    lr: float | Schedule, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, momentum_decay: float = 4e-3
) -> Optimizer:
    """Make Adam with Nesterov's momentum, as `torch.optim.NAdam`. State: count, m and v.

        m, v  as `adam`
        mu_t = b1 (1 - 0.96^(t momentum_decay) / 2)          M_t = mu_1 mu_2 ... mu_t
        p = p - lr (mu_{t+1} m / (1 - M_{t+1}) + (1 - mu_t) g / (1 - M_t)) / (sqrt(v / (1 - b2^t)) + eps)

    `lr` is as for `sgd`.

    >>> nadam(1e-3).specs(P("data"))
    {'count': P(), 'm': P('data'), 'v': P('data')}

    Raises ShardingError for betas outside of [0, 1), and negative numbers.

    Source: Dozat, 2016, "Incorporating Nesterov momentum into Adam".
    """
    return checked_optimizer("nadam", ("m", "v"), _nadam, lr=lr, below_one=BETAS, b1=b1, b2=b2, eps=eps,
                             momentum_decay=momentum_decay)  # fmt: skip


def _nadam(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, *, lr: Tensor, count: Tensor, b1: float, b2: float, eps: float,
    momentum_decay: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    t = count.to(torch.float64)
    slope = momentum_decay * math.log(0.96)  # of the logarithm of q_t, the power of 0.96
    mu, mu_next = (b1 * (1 - 0.5 * torch.exp(slope * s)) for s in (t, t + 1))
    product = b1**t * torch.exp(_sum_of_logs(slope, t))
    m = m + (g - m) * (1 - b1)
    v = v * b2 + g * g * (1 - b2)
    root = (1 - b2**t).sqrt().to(p.dtype)
    of_g, of_m = (lr * (1 - mu) / (1 - product)).to(p.dtype), (lr * mu_next / (1 - product * mu_next)).to(p.dtype)
    return p - (of_g * g + of_m * m) / (v.sqrt() / root + eps), m, v


def _sum_of_logs(slope: float, t: Tensor) -> Tensor:
    """Return the sum over i = 1..t of log(1 - q^i / 2), q = exp(slope), so that no product is kept in the state.

    log(1 - x) is -sum_k x^k / k, and the sum over i of q^(ik) a geometric one. 53 terms reach the last bit of a double.
    """
    k = torch.arange(1, 54, dtype=torch.float64, device=t.device)
    powers = t * torch.ones_like(k) if slope == 0 else \
        torch.exp(slope * k) * torch.expm1(slope * k * t) / torch.expm1(slope * k)  # fmt: skip
    return -(0.5**k / k * powers).sum()


@checked
def lion(
    lr: float | Schedule, *, b1: float = 0.9, b2: float = 0.99, weight_decay: float = 0.0, mask: Mask = None
) -> Optimizer:
    """Make Lion, which steps by the sign of a momentum. State: count and m.

        p = p - lr weight_decay p - lr sign(b1 m + (1 - b1) g)
        m = b2 m + (1 - b2) g

    `lr` and `mask` are as for `sgd`. Good rates are 3 to 10 times lower than for `adamw`, and decays as much higher.

    >>> opt, params = lion(0.1), torch.tensor([1.0, 2.0])
    >>> opt.update(torch.tensor([0.5, -3.0]), opt.init(params), params)[0]
    tensor([0.9000, 2.1000])

    Raises ShardingError for betas outside of [0, 1), and negative numbers.

    Source: Chen et al., 2023, "Symbolic discovery of optimization algorithms".
    """
    return checked_optimizer("lion", ("m",), _lion, lr=lr, below_one=BETAS, mask=mask, b1=b1, b2=b2,
                             weight_decay=weight_decay)  # fmt: skip


def _lion(
    p: Tensor, g: Tensor, m: Tensor, *, lr: Tensor, count: Tensor, b1: float, b2: float, weight_decay: float
) -> tuple[Tensor, ...]:
    step = (m * b1 + g * (1 - b1)).sign()
    return decayed(p, lr, weight_decay) - lr.to(p.dtype) * step, m * b2 + g * (1 - b2)


@checked
def adagrad(lr: float | Schedule, *, eps: float = 1e-10) -> Optimizer:
    """Make Adagrad, as `torch.optim.Adagrad`. State: count, and v, the sum of the squared gradients.

        v = v + g^2
        p = p - lr g / (sqrt(v) + eps)

    `lr` is as for `sgd`.

    >>> opt, params = adagrad(0.1), torch.tensor([1.0, 2.0])
    >>> opt.update(torch.tensor([0.5, -3.0]), opt.init(params), params)[0]
    tensor([0.9000, 2.1000])

    Raises ShardingError for negative numbers.

    Source: Duchi et al., 2011, "Adaptive subgradient methods for online learning and stochastic optimization".
    """
    return checked_optimizer("adagrad", ("v",), _adagrad, lr=lr, eps=eps)


def _adagrad(p: Tensor, g: Tensor, v: Tensor, *, lr: Tensor, count: Tensor, eps: float) -> tuple[Tensor, ...]:
    v = v + g * g
    return p - lr.to(p.dtype) * g / (v.sqrt() + eps), v


@checked
def rmsprop(lr: float | Schedule, *, alpha: float = 0.99, eps: float = 1e-8, momentum: float = 0.0) -> Optimizer:
    """Make RMSprop, as `torch.optim.RMSprop`. State: count and v, and m for the momentum.

        v = alpha v + (1 - alpha) g^2
        m = momentum m + g / (sqrt(v) + eps)
        p = p - lr m

    `lr` is as for `sgd`.

    >>> opt, params = rmsprop(0.1, alpha=0.75), torch.tensor([1.0, 2.0])
    >>> opt.update(torch.tensor([0.5, -3.0]), opt.init(params), params)[0]
    tensor([0.8000, 2.2000])

    Raises ShardingError for an alpha outside of [0, 1), and negative numbers.

    Source: Tieleman & Hinton, 2012, "Lecture 6.5: RMSProp".
    """
    return checked_optimizer("rmsprop", ("v", "m") if momentum else ("v",), _rmsprop, lr=lr, below_one=("alpha",),
                             alpha=alpha, eps=eps, momentum=momentum)  # fmt: skip


def _rmsprop(
    p: Tensor, g: Tensor, v: Tensor, *moments: Tensor, lr: Tensor, count: Tensor, alpha: float, eps: float,
    momentum: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    v = v * alpha + g * g * (1 - alpha)
    step = g / (v.sqrt() + eps)
    if not moments:
        return p - lr.to(p.dtype) * step, v
    m = moments[0] * momentum + step
    return p - lr.to(p.dtype) * m, v, m


@checked
def schedule_free(
    lr: float, *, warmup: int = 0, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0,
    mask: Mask = None,
) -> Optimizer:  # fmt: skip
    """Make AdamW that averages its iterates in the place of a schedule. State: count, v and offset.

    The parameters are y, where gradients are taken; evaluate at the average x = y + offset:

        averages = tree.map(torch.add, params, state["offset"])

    Three sequences begin at the initial parameters:

        lr_t = lr min(1, t / warmup)                   c_t = lr_t^2 / (lr_1^2 + ... + lr_t^2)
        v = b2 v + (1 - b2) g^2                        g the gradient at y
        z = z - lr_t (g / (sqrt(v / (1 - b2^t)) + eps) + weight_decay y)
        x = (1 - c_t) x + c_t z
        y = (1 - b1) z + b1 x

    Args:
        warmup: the number of steps in which the rate rises linearly to `lr`; then it is constant.
        mask: the leaves that decay, as for `sgd`.

    >>> opt, params = schedule_free(0.1), torch.tensor([1.0, 2.0])
    >>> params, state = opt.update(torch.tensor([0.5, -3.0]), opt.init(params), params)
    >>> params, params + state["offset"]
    (tensor([0.9000, 2.1000]), tensor([0.9000, 2.1000]))

    Raises ShardingError for betas outside of [0, 1), and negative numbers.

    Source: Defazio et al., 2024, "The road less scheduled".
    """
    return checked_optimizer("schedule_free", ("v", "offset"), _schedule_free, lr=lr, below_one=BETAS, mask=mask,
                             warmup=warmup, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)  # fmt: skip


def _schedule_free(
    p: Tensor, g: Tensor, v: Tensor, offset: Tensor, *, lr: Tensor, count: Tensor, warmup: float, b1: float, b2: float,
    eps: float, weight_decay: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    # Of z and x only the offset x - y is kept, which begins with zeros: z - y is -b1 / (1 - b1) times it.
    t, w = count.to(torch.float64), max(1.0, warmup)
    rising = torch.clamp(t, max=w)
    squares = rising * (rising + 1) * (2 * rising + 1) / (6 * w * w) + (t - rising)  # sum of (lr_i / lr)^2
    share, rate = (rising / w) ** 2 / squares, lr * rising / w
    v = v * b2 + g * g * (1 - b2)
    step = g / (v.sqrt() / (1 - b2**t).sqrt().to(p.dtype) + eps) + weight_decay * p
    to_z, of_step = (share * b1 / (1 - b1)).to(p.dtype), (rate * (1 - b1 * (1 - share))).to(p.dtype)
    kept, moved = (1 - share).to(p.dtype), (rate * (1 - b1)).to(p.dtype)
    return p - to_z * offset - of_step * step, v, kept * (offset + moved * step)
