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

Params = dict[str, Tensor]
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


def momentum_of_local_gradients(w: Tensor, m: Tensor, x: Tensor, y: Tensor) -> Any:
    m = 0.9 * m + local_grad(w, x, y)  # BUG
    return w - RATE * fs.pmean(m, "data"), m


def momentum_of_mean_gradients(w: Tensor, m: Tensor, x: Tensor, y: Tensor) -> Any:
    m = 0.9 * m + mean_grad(w, x, y)
    return w - RATE * m, m


def adam_squares_local_gradients(w: Tensor, v: Tensor, x: Tensor, y: Tensor) -> Any:
    g = local_grad(w, x, y)
    mean, square = fs.pmean((g, g.square()), "data")  # BUG: one transfer, but a mean of squares
    v = 0.9 * v + 0.1 * square
    return w - RATE * mean / (v.sqrt() + 1e-8), v


def adam_squares_the_mean_gradient(w: Tensor, v: Tensor, x: Tensor, y: Tensor) -> Any:
    g = mean_grad(w, x, y)
    v = 0.9 * v + 0.1 * g.square()
    return w - RATE * g / (v.sqrt() + 1e-8), v


def signs_of_local_gradients(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return w - RATE * fs.pmean(local_grad(w, x, y).sign(), "data")  # BUG


def sign_of_the_mean_gradient(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return w - RATE * mean_grad(w, x, y).sign()


def largest_elements_of_local_gradients(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    g = local_grad(w, x, y)
    return w - RATE * fs.pmean(g.where(g.abs() >= g.abs().max(), 0), "data")  # BUG


def largest_elements_of_the_mean_gradient(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    g = mean_grad(w, x, y)
    return w - RATE * g.where(g.abs() >= g.abs().max(), 0)


# --- step sizes from local numbers ----------------------------------------------------------------------------


def polyak_step_of_the_local_loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    loss, g = fs.value_and_grad(error)(fs.pvary(w, "data"), x, y)
    g = fs.pmean(g, "data")
    return w - loss / g.square().sum() * g  # BUG: each rank has its own loss


def polyak_step_of_the_mean_loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    loss, g = fs.pmean(fs.value_and_grad(error)(fs.pvary(w, "data"), x, y), "data")
    return w - loss / g.square().sum() * g


def halved_rate_where_the_local_loss_rose(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    loss, g = fs.value_and_grad(error)(fs.pvary(w, "data"), x, y)
    rate = 0.1 if float(loss) < 1.0 else 0.05
    return w - rate * fs.pmean(g, "data")  # BUG: ranks use different rates


def halved_rate_where_the_mean_loss_rose(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    loss, g = fs.pmean(fs.value_and_grad(error)(fs.pvary(w, "data"), x, y), "data")
    rate = 0.1 if float(loss) < 1.0 else 0.05
    return w - rate * g


def step_skipped_where_the_local_gradient_overflows(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    g = local_grad(w, x, y)
    finite = g.isfinite().all() & (g.abs().max() < 0.5)
    return torch.where(finite, w - RATE * fs.pmean(g, "data"), w)  # BUG: ranks skip different steps


def step_skipped_where_any_gradient_overflows(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    g = local_grad(w, x, y)
    finite = fs.pmin((g.isfinite().all() & (g.abs().max() < 0.5)).int(), "data") > 0
    return torch.where(finite, w - RATE * fs.pmean(g, "data"), w)


def trust_ratio_of_local_norms(w: Tensor, g: Tensor) -> Tensor:  # w and g [D, F@model]
    """LARS, LAMB: scale the step of a matrix by the norms of its part."""
    return w - RATE * w.norm() / g.norm() * g  # BUG


def trust_ratio_of_the_matrix(w: Tensor, g: Tensor) -> Tensor:
    ww, gg = fs.pvary(fs.psum((w.square().sum(), g.square().sum()), "model"), "model")
    return w - RATE * (ww / gg).sqrt() * g


# --- sharpness-aware minimization -----------------------------------------------------------------------------


def sam_perturbed_by_local_gradients(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    g = local_grad(w, x, y)
    there = fs.pvary(w, "data") + g / g.norm()  # BUG: another direction on each rank
    return w - RATE * fs.pmean(fs.grad(error)(there, x, y), "data")


def sam_perturbed_by_the_mean_gradient(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    g = mean_grad(w, x, y)
    there = fs.pvary(w + g / g.norm(), "data")
    return w - RATE * fs.pmean(fs.grad(error)(there, x, y), "data")


# --- statistics of matrices that are split --------------------------------------------------------------------


def orthogonalized_part(w: Tensor, g: Tensor) -> Tensor:  # w and g [D, F@model]
    """Muon: orthogonalize the update by iteration, here of local columns."""
    u = g / g.norm()  # BUG
    for _ in range(3):
        u = 1.5 * u - 0.5 * u @ u.T @ u
    return w - RATE * u


def orthogonalized_matrix(w: Tensor, g: Tensor) -> Tensor:
    whole = fs.all_gather(g, "model", 1, to="invariant")
    u = whole / whole.norm()
    for _ in range(3):
        u = 1.5 * u - 0.5 * u @ u.T @ u
    return w - RATE * fs.pslice(u, "model", 1)


def factored_moment_of_local_columns(w: Tensor, g: Tensor) -> Tensor:  # w and g [D, F@model]
    """Adafactor: second moments from the means of rows and columns."""
    rows, columns = g.square().mean(1, keepdim=True), g.square().mean(0, keepdim=True)
    return w - RATE * g * torch.rsqrt(rows * columns / rows.mean())  # BUG


def factored_moment_of_all_columns(w: Tensor, g: Tensor) -> Tensor:
    rows = fs.pvary(fs.pmean(g.square().mean(1, keepdim=True), "model"), "model")
    columns = g.square().mean(0, keepdim=True)
    return w - RATE * g * torch.rsqrt(rows * columns / rows.mean())


def gradient_centered_by_local_rows(w: Tensor, g: Tensor) -> Tensor:  # w and g [D@model, F]
    return w - RATE * (g - g.mean(0))  # BUG


def gradient_centered_by_all_rows(w: Tensor, g: Tensor) -> Tensor:
    return w - RATE * (g - fs.pvary(fs.pmean(g.mean(0), "model"), "model"))


# --- regularization -------------------------------------------------------------------------------------------


def decay_counted_by_every_rank(w: Tensor, x: Tensor, y: Tensor) -> Any:
    def loss(w: Tensor) -> Tensor:
        w = fs.pvary(w, "data")
        errors = (torch.tanh(x @ w) - y).square()
        return fs.psum(errors.sum() + 0.1 * w.square().sum(), "data")  # BUG

    return fs.value_and_grad(loss)(w)


def decay_counted_once(w: Tensor, x: Tensor, y: Tensor) -> Any:
    def loss(w: Tensor) -> Tensor:
        errors = (torch.tanh(x @ fs.pvary(w, "data")) - y).square()
        return fs.psum(errors.sum(), "data") + 0.1 * w.square().sum()

    return fs.value_and_grad(loss)(w)


def decay_of_the_local_part(p: Params, x: Tensor) -> Any:  # up [D, F@model]
    def loss(p: Params) -> Tensor:
        h = torch.tanh(fs.pvary(x, "model") @ p["up"])
        task = fs.psum(h.square().sum(), "model")
        return task + 0.1 * p["up"].square().sum()  # BUG: of the local columns

    return fs.value_and_grad(loss)(p)


def decay_of_all_parts(p: Params, x: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        h = torch.tanh(fs.pvary(x, "model") @ p["up"])
        task = fs.psum(h.square().sum(), "model")
        return task + 0.1 * fs.psum(p["up"].square().sum(), "model")

    return fs.value_and_grad(loss)(p)


# --- private gradients: noise ---------------------------------------------------------------------------------


def _clipped_sum(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of clipped gradients of the local examples {V data}."""
    v = fs.pvary(w, "data")
    grads = torch.func.vmap(fs.grad(error), (None, 0, 0))(v, x, y)
    return (grads / grads.norm(dim=1, keepdim=True).clamp(min=1.0)).sum(0)


def noise_added_by_every_rank(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    noise = fs.random.normal(fs.key(3), w.shape)
    total = fs.psum(_clipped_sum(w, x, y) + noise, "data")  # BUG: the sum has it once for each rank
    return w - RATE * total


def noise_of_each_rank(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    noise = fs.random.normal(fs.fold_in(fs.key(3), fs.axis_index("data")), w.shape)  # BUG
    total = fs.psum(_clipped_sum(w, x, y) + noise, "data")  # BUG: more noise on more ranks
    return w - RATE * total


def noise_added_once(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    noise = fs.random.normal(fs.key(3), w.shape)
    return w - RATE * (fs.psum(_clipped_sum(w, x, y), "data") + noise)


# --- state that all ranks have --------------------------------------------------------------------------------


def step_count_summed(w: Tensor, count: Tensor, x: Tensor, y: Tensor) -> Any:
    count = fs.psum(count + 1, "data")  # BUG: each rank has the same count
    return w - RATE / count.sqrt() * mean_grad(w, x, y), count


def step_count_as_it_is(w: Tensor, count: Tensor, x: Tensor, y: Tensor) -> Any:
    count = count + 1
    return w - RATE / count.sqrt() * mean_grad(w, x, y), count


def moment_returned_whole(m: Tensor, g: Tensor) -> Tensor:  # m [D@data], g [D]{I}
    """ZeRO-1: each rank keeps its part of the moments."""
    whole = fs.all_gather(m, "data", to="invariant")
    return 0.9 * whole + g  # BUG


def moment_returned_in_parts(m: Tensor, g: Tensor) -> Tensor:
    return 0.9 * m + fs.pslice(g, "data")


D, F = 4, 6
DATA2, MODEL2 = {"data": 2}, {"model": 2}
COLUMNS, ROWS, DATA = P(None, "model"), P("model"), P("data")
W, X, Y = normal("w", D), normal("x", 4, D), normal("y", 4)
LINEAR, SPLIT = (W, X, Y), (P(), DATA, DATA)
STATE = (W, normal("m", D).abs(), X, Y)
MATRIX = (normal("matrix", D, F), normal("gradient", D, F))

PROGRAMS = [
    WrongProgram(
        momentum_of_local_gradients, momentum_of_mean_gradients, DATA2, (P(), *SPLIT), P(), STATE, "types", "data"
    ),
    WrongProgram(
        adam_squares_local_gradients, adam_squares_the_mean_gradient, DATA2, (P(), *SPLIT), P(), STATE, "verify", "data"
    ),
    WrongProgram(signs_of_local_gradients, sign_of_the_mean_gradient, DATA2, SPLIT, P(), LINEAR, "verify", "data"),
    WrongProgram(
        largest_elements_of_local_gradients, largest_elements_of_the_mean_gradient, DATA2, SPLIT, P(), LINEAR,
        "verify", "data",
    ),
    WrongProgram(
        polyak_step_of_the_local_loss, polyak_step_of_the_mean_loss, DATA2, SPLIT, P(), LINEAR, "types", "data"
    ),
    WrongProgram(
        halved_rate_where_the_local_loss_rose, halved_rate_where_the_mean_loss_rose, DATA2, SPLIT, P(), LINEAR,
        "types", "data",
    ),
    WrongProgram(
        step_skipped_where_the_local_gradient_overflows, step_skipped_where_any_gradient_overflows, DATA2, SPLIT, P(),
        LINEAR, "types", "data",
    ),
    WrongProgram(
        trust_ratio_of_local_norms, trust_ratio_of_the_matrix, MODEL2, (COLUMNS, COLUMNS), COLUMNS, MATRIX, "verify",
        "model",
    ),
    WrongProgram(
        sam_perturbed_by_local_gradients, sam_perturbed_by_the_mean_gradient, DATA2, SPLIT, P(), LINEAR, "verify",
        "data",
    ),
    WrongProgram(
        orthogonalized_part, orthogonalized_matrix, MODEL2, (COLUMNS, COLUMNS), COLUMNS, MATRIX, "verify", "model"
    ),
    WrongProgram(
        factored_moment_of_local_columns, factored_moment_of_all_columns, MODEL2, (COLUMNS, COLUMNS), COLUMNS, MATRIX,
        "verify", "model",
    ),
    WrongProgram(
        gradient_centered_by_local_rows, gradient_centered_by_all_rows, MODEL2, (ROWS, ROWS), ROWS, MATRIX, "verify",
        "model",
    ),
    WrongProgram(decay_counted_by_every_rank, decay_counted_once, DATA2, SPLIT, P(), LINEAR, "verify", "data"),
    WrongProgram(
        decay_of_the_local_part, decay_of_all_parts, MODEL2, ({"up": COLUMNS}, P()), (P(), {"up": COLUMNS}),
        ({"up": MATRIX[0]}, X), "types", "model",
    ),
    WrongProgram(noise_added_by_every_rank, noise_added_once, DATA2, SPLIT, P(), LINEAR, "types", "data"),
    WrongProgram(noise_of_each_rank, noise_added_once, DATA2, SPLIT, P(), LINEAR, "verify", "data"),
    WrongProgram(
        step_count_summed, step_count_as_it_is, DATA2, (P(), *SPLIT), P(), (W, torch.tensor(3.0), X, Y), "types", "data"
    ),
    WrongProgram(moment_returned_whole, moment_returned_in_parts, DATA2, (DATA, P()), DATA, STATE[:2], "types", "data"),
]  # fmt: skip
