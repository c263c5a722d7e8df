"""Programs that differentiate the wrong thing, or reduce a gradient the wrong way.

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
DATA, MODEL = P("data"), P("model")
RATE = 0.1


def error(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean error of a linear model: of local examples, if x [B@data, D] is split."""
    return (x @ w - y).square().mean()


# --- a local loss, by each of the ways to differentiate it ----------------------------------------------------


def local_loss_by_torch_func(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    def loss(w: Tensor) -> Tensor:
        prediction = x @ fs.pvary(w, "data")
        return (prediction - y).square().mean()  # BUG

    return w - RATE * torch.func.grad(loss)(w)


def global_loss_by_torch_func(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    def loss(w: Tensor) -> Tensor:
        prediction = x @ fs.pvary(w, "data")
        return fs.pmean((prediction - y).square().mean(), "data")

    return w - RATE * torch.func.grad(loss)(w)


def local_loss_by_backward(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    leaf = w.detach().clone().requires_grad_()
    loss = (x @ fs.pvary(leaf, "data") - y).square().mean()  # BUG
    loss.backward()
    return w - RATE * leaf.grad


def global_loss_by_backward(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    leaf = w.detach().clone().requires_grad_()
    loss = fs.pmean((x @ fs.pvary(leaf, "data") - y).square().mean(), "data")
    loss.backward()
    return w - RATE * leaf.grad


def local_loss_by_autograd_grad(w: Tensor, x: Tensor, y: Tensor) -> Any:
    leaf = w.detach().clone().requires_grad_()
    loss = error(fs.pvary(leaf, "data"), x, y)
    regularized = loss + 0.01 * fs.pvary(leaf, "data").square().sum()  # BUG
    (grad,) = torch.autograd.grad(regularized, leaf)
    return {"loss": fs.pmean(loss.detach(), "data"), "grad": grad}


def global_loss_by_autograd_grad(w: Tensor, x: Tensor, y: Tensor) -> Any:
    leaf = w.detach().clone().requires_grad_()
    loss = fs.pmean(error(fs.pvary(leaf, "data"), x, y), "data")
    regularized = loss + 0.01 * leaf.square().sum()
    (grad,) = torch.autograd.grad(regularized, leaf)
    return {"loss": loss.detach(), "grad": grad}


def local_loss_by_value_and_grad(w: Tensor, x: Tensor, y: Tensor) -> Any:
    def loss(w: Tensor) -> Tensor:
        errors = (x @ fs.pvary(w, "data") - y).square()
        return errors.mean()  # BUG: the mean below is for the log

    value, grad = fs.value_and_grad(loss)(w)
    return {"loss": fs.pmean(value, "data"), "grad": grad}


def global_loss_by_value_and_grad(w: Tensor, x: Tensor, y: Tensor) -> Any:
    def loss(w: Tensor) -> Tensor:
        errors = (x @ fs.pvary(w, "data") - y).square()
        return fs.pmean(errors.mean(), "data")

    value, grad = fs.value_and_grad(loss)(w)
    return {"loss": value, "grad": grad}


# --- per-example gradients: pvary belongs outside of the transform --------------------------------------------


def pvary_inside_per_example_grad(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    def one(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        prediction = x @ fs.pvary(w, "data")
        return (prediction - y).square()  # BUG: the transpose of pvary sums over examples of different ranks

    grads = torch.func.vmap(torch.func.grad(one), (None, 0, 0))(w, x, y)
    return fs.psum((grads / grads.norm(dim=1, keepdim=True)).sum(0), "data")


def pvary_before_per_example_grad(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    def one(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (x @ w - y).square()

    grads = torch.func.vmap(torch.func.grad(one), (None, 0, 0))(fs.pvary(w, "data"), x, y)
    return fs.psum((grads / grads.norm(dim=1, keepdim=True)).sum(0), "data")


# --- a local gradient, used as if it were summed --------------------------------------------------------------


def step_by_local_gradient(p: Params, x: Tensor, y: Tensor) -> Params:
    grads = fs.grad(lambda p: error(p["w"], x, y))(fs.pvary(p, "data"))
    new = {}
    for k in p:
        new[k] = p[k] - RATE * grads[k]  # BUG: the copies of p would diverge
    return new


def step_by_mean_of_gradients(p: Params, x: Tensor, y: Tensor) -> Params:
    grads = fs.pmean(fs.grad(lambda p: error(p["w"], x, y))(fs.pvary(p, "data")), "data")
    return {k: p[k] - RATE * grads[k] for k in p}


def step_in_place_by_local_gradient(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    grad = fs.grad(lambda w: error(w, x, y))(fs.pvary(w, "data"))
    with torch.no_grad():
        w.sub_(RATE * grad)  # BUG
    return w


def step_in_place_by_mean_of_gradients(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    grad = fs.pmean(fs.grad(lambda w: error(w, x, y))(fs.pvary(w, "data")), "data")
    with torch.no_grad():
        w.sub_(RATE * grad)
    return w


# --- one reduction too many, one too few, or the wrong one ----------------------------------------------------


def gradient_averaged_again(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Compute the sum of local losses, and average gradients as with DDP, which expects local ones."""
    grad = fs.grad(lambda w: fs.psum(error(fs.pvary(w, "data"), x, y), "data"))(w)
    return w - RATE * fs.pmean(grad, "data")  # BUG: a sum over ranks already, of their means


def gradient_of_the_mean(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    grad = fs.grad(lambda w: fs.pmean(error(fs.pvary(w, "data"), x, y), "data"))(w)
    return w - RATE * grad


def sum_of_local_means(w: Tensor, x: Tensor, y: Tensor) -> Any:
    return fs.value_and_grad(lambda w: fs.psum(error(fs.pvary(w, "data"), x, y), "data"))(w)  # BUG


def mean_of_local_means(w: Tensor, x: Tensor, y: Tensor) -> Any:
    return fs.value_and_grad(lambda w: fs.pmean(error(fs.pvary(w, "data"), x, y), "data"))(w)


def mean_of_local_sums(w: Tensor, x: Tensor, y: Tensor) -> Any:
    def loss(w: Tensor) -> Tensor:
        errors = (x @ fs.pvary(w, "data") - y).square()
        return fs.pmean(errors.sum(), "data")  # BUG: the log-likelihood of all examples was meant

    return fs.value_and_grad(loss)(w)


def sum_of_local_sums(w: Tensor, x: Tensor, y: Tensor) -> Any:
    def loss(w: Tensor) -> Tensor:
        errors = (x @ fs.pvary(w, "data") - y).square()
        return fs.psum(errors.sum(), "data")

    return fs.value_and_grad(loss)(w)


def gradients_summed_over_the_wrong_axis(p: Params, x: Tensor) -> Params:  # up [D, F@model], x [B@data, D]
    def loss(p: Params) -> Tensor:
        h = torch.tanh(fs.pvary(x, "model") @ p["up"])
        return fs.psum(h.square().sum(), "model")

    grads = fs.grad(loss)(fs.pvary(p, "data"))
    summed = fs.psum(grads, "model")  # adds up the gradients of different columns
    return {"up": p["up"] - RATE * summed["up"]}  # BUG


def gradients_summed_over_the_right_axis(p: Params, x: Tensor) -> Params:
    def loss(p: Params) -> Tensor:
        h = torch.tanh(fs.pvary(x, "model") @ p["up"])
        return fs.psum(h.square().sum(), "model")

    grads = fs.grad(loss)(fs.pvary(p, "data"))
    summed = fs.psum(grads, "data")
    return {"up": p["up"] - RATE * summed["up"]}


def gradient_divided_by_ranks_again(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    grad = fs.grad(lambda w: fs.pmean(error(fs.pvary(w, "data"), x, y), "data"))(w)
    return grad / fs.axis_size("data")  # BUG: pmean has divided already


def gradient_not_divided_again(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return fs.grad(lambda w: fs.pmean(error(fs.pvary(w, "data"), x, y), "data"))(w)


def learning_rate_scaled_by_ranks(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Scale the rate by the number of ranks, while the global batch stays as it is."""
    grad = fs.grad(lambda w: fs.pmean(error(fs.pvary(w, "data"), x, y), "data"))(w)
    return w - RATE * fs.axis_size("data") * grad  # BUG


def learning_rate_of_the_global_batch(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    grad = fs.grad(lambda w: fs.pmean(error(fs.pvary(w, "data"), x, y), "data"))(w)
    return w - RATE * grad


# --- accumulation over microbatches ---------------------------------------------------------------------------


def accumulated_without_a_final_sum(p: Params, x: Tensor, y: Tensor) -> Params:
    _, grads = fs.accumulate(lambda p, x, y: error(p["w"], x, y), 2)(fs.pvary(p, "data"), x, y)
    return {"w": p["w"] - RATE * grads["w"]}  # BUG: the pvary before leaves the sum to us


def accumulated_with_a_final_mean(p: Params, x: Tensor, y: Tensor) -> Params:
    _, grads = fs.accumulate(lambda p, x, y: error(p["w"], x, y), 2)(fs.pvary(p, "data"), x, y)
    return {"w": p["w"] - RATE * fs.pmean(grads, "data")["w"]}


# --- FSDP by hand ---------------------------------------------------------------------------------------------


def weight_gathered_as_one_value(w: Tensor, x: Tensor, y: Tensor) -> Tensor:  # w [D@data], x [B@data, D]
    def loss(w: Tensor) -> Tensor:
        whole = fs.all_gather(w, "data", to="invariant")  # its transpose is a slice, without a sum over examples
        prediction = x @ whole  # BUG
        return fs.pmean((prediction - y).square().mean(), "data")

    return w - RATE * fs.grad(loss)(w)


def weight_gathered_for_local_use(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    def loss(w: Tensor) -> Tensor:
        whole = fs.all_gather(w, "data")
        prediction = x @ whole
        return fs.pmean((prediction - y).square().mean(), "data")

    return w - RATE * fs.grad(loss)(w)


def gathered_weight_updated_by_its_scattered_sum(w: Tensor, x: Tensor, y: Tensor) -> Tensor:  # w [D@data]
    """ZeRO-2 by hand: average the examples' losses locally, reduce-scatter, and forget that it sums."""
    grad = fs.grad(lambda whole: error(whole, x, y))(fs.all_gather(w, "data"))
    return w - RATE * fs.psum_scatter(grad, "data")  # BUG


def gathered_weight_updated_by_its_scattered_mean(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    grad = fs.grad(lambda whole: error(whole, x, y))(fs.all_gather(w, "data"))
    return w - RATE * fs.psum_scatter(grad, "data") / fs.axis_size("data")


# --- second derivatives, nested gradients ---------------------------------------------------------------------


def local_gradient_penalty(w: Tensor, x: Tensor) -> Any:  # w [D], x [B@data, D]
    def loss(w: Tensor) -> Tensor:
        w = fs.pvary(w, "data")
        slopes = w * torch.cosh(x @ w).pow(-2).unsqueeze(-1)  # [B@data, D], the gradient of tanh(x @ w) by x
        distance = fs.pmean(torch.tanh(x @ w).mean(), "data")
        return distance + 10 * (slopes.norm(dim=-1) - 1).square().mean()  # BUG: the penalty is of local examples

    return fs.value_and_grad(loss)(w)


def global_gradient_penalty(w: Tensor, x: Tensor) -> Any:
    def loss(w: Tensor) -> Tensor:
        w = fs.pvary(w, "data")
        slopes = w * torch.cosh(x @ w).pow(-2).unsqueeze(-1)
        distance = fs.pmean(torch.tanh(x @ w).mean(), "data")
        return distance + 10 * fs.pmean((slopes.norm(dim=-1) - 1).square().mean(), "data")

    return fs.value_and_grad(loss)(w)


def _saturated(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return fs.pmean(torch.tanh((x @ fs.pvary(w, "data") - y).square()).mean(), "data")


def probe_of_each_rank(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the product of the Hessian with a random vector."""

    def slope(w: Tensor) -> Tensor:
        probe = fs.random.normal(fs.fold_in(fs.key(3), fs.axis_index("data")), w.shape)
        return (fs.grad(_saturated)(w, x, y) * probe).sum()  # BUG: one Hessian, many probes

    return fs.grad(slope)(w)


def probe_of_all_ranks(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    def slope(w: Tensor) -> Tensor:
        probe = fs.random.normal(fs.key(3), w.shape)
        return (fs.grad(_saturated)(w, x, y) * probe).sum()

    return fs.grad(slope)(w)


def inner_step_of_local_tasks(w: Tensor, x: Tensor, y: Tensor) -> Any:  # a task per example: x [B@data, D]
    """MAML: a loss after one step of each task; here one step is made for all tasks of a rank."""

    def loss(w: Tensor) -> Tensor:
        w = fs.pvary(w, "data")
        inner = fs.grad(error)(w, x, y)  # BUG
        return fs.pmean(error(w - RATE * inner, x, y), "data")

    return fs.value_and_grad(loss)(w)


def inner_step_of_each_task(w: Tensor, x: Tensor, y: Tensor) -> Any:
    def task(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        inner = fs.grad(error)(w, x, y)
        return error(w - RATE * inner, x, y)

    def loss(w: Tensor) -> Tensor:
        return fs.pmean(torch.func.vmap(task, (None, 0, 0))(fs.pvary(w, "data"), x, y).mean(), "data")

    return fs.value_and_grad(loss)(w)


B, D, F = 4, 4, 6
DATA2, GRID = {"data": 2}, {"data": 2, "model": 2}
LINEAR = (normal("w", D), normal("x", B, D), normal("y", B))
TREE = ({"w": LINEAR[0]}, *LINEAR[1:])
SPLIT = (P(), DATA, DATA)

PROGRAMS = [
    WrongProgram(
        local_loss_by_torch_func, global_loss_by_torch_func, DATA2, SPLIT, P(), LINEAR, "types", "data"
    ),
    WrongProgram(local_loss_by_backward, global_loss_by_backward, DATA2, SPLIT, P(), LINEAR, "types", "data"),
    WrongProgram(
        local_loss_by_autograd_grad, global_loss_by_autograd_grad, DATA2, SPLIT, P(), LINEAR, "types", "data"
    ),
    WrongProgram(
        local_loss_by_value_and_grad, global_loss_by_value_and_grad, DATA2, SPLIT, P(), LINEAR, "types", "data"
    ),
    WrongProgram(
        pvary_inside_per_example_grad, pvary_before_per_example_grad, DATA2, SPLIT, P(), LINEAR, "types", "data"
    ),
    WrongProgram(step_by_local_gradient, step_by_mean_of_gradients, DATA2, SPLIT, P(), TREE, "types", "data"),
    WrongProgram(
        step_in_place_by_local_gradient, step_in_place_by_mean_of_gradients, DATA2, SPLIT, P(), LINEAR, "types", "data"
    ),
    WrongProgram(gradient_averaged_again, gradient_of_the_mean, DATA2, SPLIT, P(), LINEAR, "types", "data"),
    WrongProgram(sum_of_local_means, mean_of_local_means, DATA2, SPLIT, P(), LINEAR, "verify", "data"),
    WrongProgram(mean_of_local_sums, sum_of_local_sums, DATA2, SPLIT, P(), LINEAR, "verify", "data"),
    WrongProgram(
        gradients_summed_over_the_wrong_axis, gradients_summed_over_the_right_axis, GRID,
        ({"up": P(None, "model")}, DATA), {"up": P(None, "model")}, ({"up": normal("up", D, F)}, LINEAR[1]),
        "types", "data",
    ),
    WrongProgram(
        gradient_divided_by_ranks_again, gradient_not_divided_again, DATA2, SPLIT, P(), LINEAR, "verify", "data"
    ),
    WrongProgram(
        learning_rate_scaled_by_ranks, learning_rate_of_the_global_batch, DATA2, SPLIT, P(), LINEAR, "verify", "data"
    ),
    WrongProgram(
        accumulated_without_a_final_sum, accumulated_with_a_final_mean, DATA2, SPLIT, P(), TREE, "types", "data"
    ),
    WrongProgram(
        weight_gathered_as_one_value, weight_gathered_for_local_use, DATA2, (DATA, DATA, DATA), DATA, LINEAR,
        "types", "data",
    ),
    WrongProgram(
        gathered_weight_updated_by_its_scattered_sum, gathered_weight_updated_by_its_scattered_mean, DATA2,
        (DATA, DATA, DATA), DATA, LINEAR, "verify", "data",
    ),
    WrongProgram(local_gradient_penalty, global_gradient_penalty, DATA2, (P(), DATA), P(), LINEAR[:2], "types", "data"),
    WrongProgram(
        probe_of_each_rank, probe_of_all_ranks, DATA2, SPLIT, P(), LINEAR, "types", "data"
    ),
    WrongProgram(inner_step_of_local_tasks, inner_step_of_each_task, DATA2, SPLIT, P(), LINEAR, "verify", "data"),
]  # fmt: skip
