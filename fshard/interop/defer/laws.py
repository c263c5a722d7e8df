"""The laws that constructors draw by: each fills any box from a key, and reads as torch's operation of its name.

`normal`, `uniform` and `trunc_normal` are those of `random`. The others are made, in float64, of one uniform word
w of 32 bits for each element, u = w / 2^32 and v = (w + 1/2) / 2^32:

    bernoulli(p)        u < p
    randint(low, high)  low + floor(u (high - low))
    exponential(l)      -log(v) / l
    log_normal(m, s)    exp of a normal
    cauchy(m, s)        m + s tan(pi (v - 1/2))
    geometric(p)        ceil(log(v) / log(1 - p)), at least 1
    randperm            the order of the words of all elements
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fshard import random
from fshard.spec import Box, full_box

Fill = Callable[..., Tensor]


def _words(key: Tensor, shape: tuple[int, ...], box: Box, device: torch.device) -> Tensor:
    return random.uniform_box(key, shape, box, dtype=torch.float64, device=device)


def _centred(key: Tensor, shape: tuple[int, ...], box: Box, device: torch.device) -> Tensor:
    return _words(key, shape, box, device).add_(2.0**-33)


def normal(
    key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device,
    mean: float = 0.0, std: float = 1.0,
) -> Tensor:  # fmt: skip
    return random.normal_box(key, shape, box, mean=mean, std=std, dtype=dtype, device=device)


def uniform(
    key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device,
    low: float = 0.0, high: float = 1.0,
) -> Tensor:  # fmt: skip
    return random.uniform_box(key, shape, box, low=low, high=high, dtype=dtype, device=device)


def trunc_normal(
    key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device,
    mean: float, std: float, a: float, b: float,
) -> Tensor:  # fmt: skip
    return random.trunc_normal_box(key, shape, box, mean=mean, std=std, a=a, b=b, dtype=dtype, device=device)


def bernoulli(
    key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device, p: float
) -> Tensor:
    return (_words(key, shape, box, device) < p).to(dtype)


def randint(
    key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device, low: int, high: int
) -> Tensor:
    n = high - low
    return _words(key, shape, box, device).mul_(n).floor_().clamp_(max=n - 1).add_(low).to(dtype)


def exponential(
    key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device, rate: float
) -> Tensor:
    return _centred(key, shape, box, device).log_().div_(-rate).to(dtype)


def log_normal(
    key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device, mean: float, std: float
) -> Tensor:
    return random.normal_box(key, shape, box, mean=mean, std=std, dtype=torch.float64, device=device).exp_().to(dtype)


def cauchy(
    key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device, median: float, sigma: float
) -> Tensor:
    angle = _centred(key, shape, box, device).sub_(0.5).mul_(math.pi)
    return (angle.sin() / angle.cos()).mul_(sigma).add_(median).to(dtype)


def geometric(
    key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device, p: float
) -> Tensor:
    if p >= 1:
        return torch.ones([s.stop - s.start for s in box], dtype=dtype, device=device)
    return _centred(key, shape, box, device).log_().div_(math.log1p(-p)).ceil_().clamp_(min=1).to(dtype)


def randperm(key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _words(key, shape, full_box(shape), device).argsort(stable=True)[box].to(dtype)


LAWS: Mapping[str, Fill] = {
    law.__name__: law
    for law in (normal, uniform, trunc_normal, bernoulli, randint, exponential, log_normal, cauchy, geometric, randperm)
}
WORDS = 1 << 32  # the most values that `randint` can tell apart

__all__ = ["LAWS", "WORDS"]
