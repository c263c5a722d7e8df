"""Distributions of torch's draws: fill any box of a tensor from a key.

`normal`, `uniform` and `trunc_normal` are as in `fs.random`. The others are computed in float64 from one uniform
32-bit word w for each element, with u = w / 2^32 and v = (w + 1/2) / 2^32:

    bernoulli(p)        u < p
    randint(low, high)  low + floor(u (high - low))
    exponential(l)      -log(v) / l
    log_normal(m, s)    exp of a normal
    cauchy(m, s)        m + s tan(pi (v - 1/2))
    geometric(p)        ceil(log(v) / log(1 - p)), at least 1
    randperm            the order that sorts the words of all elements
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard.random import normal_box, trunc_normal_box, uniform_box
from fshard.spec import Box, full_box

MAX_RANDINT_RANGE = 1 << 32  # `randint` maps one 32-bit word to each value
_UNIT: tuple[Any, ...] = (0.0, 1.0)
# operation, without the _ of one in place -> its distribution, and its numbers or the names of these arguments
_DISTRIBUTIONS: dict[str, tuple[Any, ...]] = {
    "uniform": ("uniform", "from", "to"), "rand": ("uniform", *_UNIT), "rand_like": ("uniform", *_UNIT),
    **dict.fromkeys(("normal", "normal_functional"), ("normal", "mean", "std")),
    **dict.fromkeys(("randn", "randn_like"), ("normal", *_UNIT)),
    "exponential": ("exponential", "lambd"), "log_normal": ("log_normal", "mean", "std"),
    "cauchy": ("cauchy", "median", "sigma"), "geometric": ("geometric", "p"), "randperm": ("randperm",),
}  # fmt: skip


def distribution_of(name: str, arguments: Mapping[str, Any], dtype: torch.dtype) -> tuple[Any, ...] | None:
    """Return the distribution of an operation and its numbers, as `draw_box` takes them; None if none is known."""
    if name in ("random", "randint", "randint_like"):  # randint(low, high), random_(from, to), random_(to) or random_()
        low = arguments.get("low", arguments.get("from", 0)) or 0
        high = arguments.get("high", arguments.get("to"))
        if high is None and dtype.is_floating_point:  # all integers that the dtype has without gaps
            high = round(2 / torch.finfo(dtype).eps) + 1
        elif high is None:
            high = 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1
        return ("randint", low, high)
    found = _DISTRIBUTIONS.get(name)
    return found and tuple(arguments.get(x, x) for x in found)


def draw_box(
    distribution: str, args: Sequence[float], key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype,
    device: torch.device,
) -> Tensor:  # fmt: skip
    """Fill a box of a tensor of this shape."""
    if dtype.is_complex:  # of two real numbers
        real, parts = dtype.to_real(), (*box, slice(0, 2))
        return torch.view_as_complex(draw_box(distribution, args, key, (*shape, 2), parts, real, device))
    values: Any = (distribution, *args)
    match values:
        case "normal", mean, std:
            return normal_box(key, shape, box, mean=mean, std=std, dtype=dtype, device=device)
        case "uniform", low, high:
            return uniform_box(key, shape, box, low=low, high=high, dtype=dtype, device=device)
        case "trunc_normal", mean, std, a, b:
            return trunc_normal_box(key, shape, box, mean=mean, std=std, a=a, b=b, dtype=dtype, device=device)
        case "log_normal", mean, std:
            x = normal_box(key, shape, box, mean=mean, std=std, dtype=torch.float64, device=device)
            return x.exp_().to(dtype)
        case ("randperm",):
            words = uniform_box(key, shape, full_box(shape), dtype=torch.float64, device=device)
            return words.argsort(stable=True)[box].to(dtype)
    x = uniform_box(key, shape, box, dtype=torch.float64, device=device)
    half_word = 2.0**-33
    match values:
        case "bernoulli", p:
            x = x < p
        case "randint", low, high:
            x.mul_(high - low).floor_().clamp_(max=high - low - 1).add_(low)
        case "exponential", rate:
            x.add_(half_word).log_().div_(-rate)
        case "cauchy", median, sigma:
            x.add_(half_word).sub_(0.5).mul_(math.pi)
            x = (x.sin() / x.cos()).mul_(sigma).add_(median)
        case "geometric", p if p >= 1:
            x.fill_(1)
        case "geometric", p:
            x.add_(half_word).log_().div_(math.log1p(-p)).ceil_().clamp_(min=1)
        case _:
            raise AssertionError(distribution)
    return x.to(dtype)
