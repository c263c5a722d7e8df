"""Schedules: pure functions of the count of steps taken, from an int to a float or from a tensor to a 0-d float64.

The arguments have one order: a value, the number of steps, and by name the value at the other end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fshard.errors import checked, fail, must_be

Schedule = Callable[[Any], Any]  # the count of steps taken, an int or 0-d tensor -> a number or 0-d tensor


def _schedule(f: Callable[[Tensor], Tensor]) -> Schedule:
    """Make a schedule from a function of a 0-d float64 tensor."""

    def at(count: Any) -> Any:
        if isinstance(count, Tensor):
            return f(count.to(torch.float64))
        if not isinstance(count, (int, float)):
            raise must_be("schedule: count", "an int or a Tensor", count)
        return f(torch.tensor(count, dtype=torch.float64)).item()

    return at


def _progress(count: Tensor, steps: int) -> Tensor:
    return torch.clamp(count / steps, 0, 1) if steps else torch.ones_like(count)


@checked
def constant(value: float) -> Schedule:
    """Return the same number at every step.

    >>> constant(3e-4)(100)
    0.0003
    """
    return _schedule(lambda count: torch.full_like(count, value))


@checked
def linear(start: float, steps: int, *, end: float = 0.0) -> Schedule:
    """Interpolate linearly from `start` at step 0 to `end` at `steps`; stay at `end` afterwards.

    >>> [linear(1.0, 4)(i) for i in (0, 1, 4, 9)]
    [1.0, 0.75, 0.0, 0.0]
    """
    not_negative("linear", steps=steps)
    return _schedule(lambda count: _between(start, end, _progress(count, steps)))


@checked
def cosine(peak: float, steps: int, *, end: float = 0.0) -> Schedule:
    """Decrease from `peak` at step 0 to `end` at `steps` along half a cosine; stay at `end` afterwards.

    >>> cosine(1.0, 10)(10)
    0.0

    Source: Loshchilov & Hutter, 2017, "SGDR: stochastic gradient descent with warm restarts".
    """
    not_negative("cosine", steps=steps)

    def at(count: Tensor) -> Tensor:
        return _between(end, peak, (torch.cos(math.pi * _progress(count, steps)) + 1) / 2)

    return _schedule(at)


@checked
def warmup(after: float | Schedule, steps: int, *, start: float = 0.0) -> Schedule:
    """Interpolate linearly from `start` to the first value of `after` in `steps` steps; then follow `after`.

    >>> lr = warmup(cosine(3e-4, 10_000 - 500, end=3e-5), 500)
    >>> [lr(0), lr(250), lr(500), lr(10_000)]
    [0.0, 0.00015, 0.0003, 3e-05]
    """
    not_negative("warmup", steps=steps)
    schedule = after if callable(after) else constant(after)
    peak = float(schedule(torch.zeros((), dtype=torch.float64)))

    def at(count: Tensor) -> Tensor:
        rising = _between(start, peak, _progress(count, steps))
        return torch.where(count < steps, rising, schedule(torch.clamp(count - steps, min=0)))

    return _schedule(at)


def _between(start: float | Tensor, end: float | Tensor, t: Tensor) -> Tensor:
    return torch.mul(1 - t, start) + torch.mul(t, end)  # exact at both ends


def not_negative(name: str, **options: Any) -> None:
    """Raise for an option that is negative or NaN. Functions are not checked."""
    for option, value in options.items():
        if not callable(value) and not value >= 0:
            raise fail(f"{name}: {option}={value}", fix="0 or more")
