"""Optimizers that use a rank's part of a gradient, of a norm or of a statistic for the whole.

Legend: B batch, D width, F hidden width; [B@data] is a dim split over an axis; {V} varies over it, {I} does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from tests.corpus.wrong.program import WrongProgram, normal

RATE = 0.1


def error(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean error of the local examples."""
    return (torch.tanh(x @ w) - y).square().mean()


def local_grad(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the local examples {V data}."""
    return fs.grad(error)(fs.pvary(w, "data"), x, y)


def mean_grad(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return fs.pmean(local_grad(w, x, y), "data")


# --- moments of local gradients -------------------------------------------------------------------------------


def sign_of_the_mean_gradient(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return w - RATE * mean_grad(w, x, y).sign()
    # WRONG: return w - RATE * fs.pmean(local_grad(w, x, y).sign(), "data")


# --- step sizes from local numbers ----------------------------------------------------------------------------


def polyak_step_of_the_mean_loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    loss, g = fs.pmean(fs.value_and_grad(error)(fs.pvary(w, "data"), x, y), "data")
    # WRONG: loss, g = fs.value_and_grad(error)(fs.pvary(w, "data"), x, y)
    # WRONG: g = fs.pmean(g, "data")
    return w - loss / g.square().sum() * g  # BUG: each rank has its own loss


def halved_rate_where_the_mean_loss_rose(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    loss, g = fs.pmean(fs.value_and_grad(error)(fs.pvary(w, "data"), x, y), "data")
    # WRONG: loss, g = fs.value_and_grad(error)(fs.pvary(w, "data"), x, y)
    rate = 0.1 if float(loss) < 1.0 else 0.05
    return w - rate * g
    # WRONG: return w - rate * fs.pmean(g, "data")  # BUG: ranks use different rates


def step_skipped_where_any_gradient_overflows(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    g = local_grad(w, x, y)
    finite = fs.pmin((g.isfinite().all() & (g.abs().max() < 0.5)).int(), "data") > 0
    # WRONG: finite = g.isfinite().all() & (g.abs().max() < 0.5)
    return torch.where(finite, w - RATE * fs.pmean(g, "data"), w)  # BUG: ranks skip different steps


# --- private gradients: noise ---------------------------------------------------------------------------------


def _clipped_sum(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of clipped gradients of the local examples {V data}."""
    v = fs.pvary(w, "data")
    grads = torch.func.vmap(fs.grad(error), (None, 0, 0))(v, x, y)
    return (grads / grads.norm(dim=1, keepdim=True).clamp(min=1.0)).sum(0)


def noise_added_once(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    noise = fs.random.normal(fs.key(3), w.shape)
    # WRONG noise_of_each_rank: noise = fs.random.normal(fs.fold_in(fs.key(3), fs.axis_index("data")), w.shape)  # BUG
    return w - RATE * (fs.psum(_clipped_sum(w, x, y), "data") + noise)
    # WRONG noise_added_by_every_rank: total = fs.psum(_clipped_sum(w, x, y) + noise, "data")  # BUG: once for each rank
    # WRONG noise_added_by_every_rank: return w - RATE * total
    # WRONG noise_of_each_rank: total = fs.psum(_clipped_sum(w, x, y) + noise, "data")  # BUG: more noise on more ranks
    # WRONG noise_of_each_rank: return w - RATE * total


# --- state that all ranks have --------------------------------------------------------------------------------


def step_count_as_it_is(w: Tensor, count: Tensor, x: Tensor, y: Tensor) -> Any:
    count = count + 1
    # WRONG: count = fs.psum(count + 1, "data")  # each rank has the same count
    return w - RATE / count.sqrt() * mean_grad(w, x, y), count


D, F = 4, 6
DATA2 = {"data": 2}
DATA = P("data")
W, X, Y = normal("w", D), normal("x", 4, D), normal("y", 4)
LINEAR, SPLIT = (W, X, Y), (P(), DATA, DATA)

PROGRAMS = [
    WrongProgram("signs_of_local_gradients", sign_of_the_mean_gradient, DATA2, SPLIT, P(), LINEAR, "verify", "data"),
    WrongProgram(
        "polyak_step_of_the_local_loss", polyak_step_of_the_mean_loss, DATA2, SPLIT, P(), LINEAR, "types", "data",
    ),
    WrongProgram(
        "halved_rate_where_the_local_loss_rose", halved_rate_where_the_mean_loss_rose, DATA2, SPLIT, P(), LINEAR,
        "types", "data",
    ),
    WrongProgram(
        "step_skipped_where_the_local_gradient_overflows", step_skipped_where_any_gradient_overflows, DATA2, SPLIT,
        P(), LINEAR, "types", "data",
    ),
    WrongProgram("noise_added_by_every_rank", noise_added_once, DATA2, SPLIT, P(), LINEAR, "types", "data"),
    WrongProgram("noise_of_each_rank", noise_added_once, DATA2, SPLIT, P(), LINEAR, "verify", "data"),
    WrongProgram(
        "step_count_summed", step_count_as_it_is, DATA2, (P(), *SPLIT), P(), (W, torch.tensor(3.0), X, Y), "types",
        "data",
    ),
]  # fmt: skip
