"""Two steps of training the MLP, and what people get wrong after the gradient: clipping, averaging, noise, rates.

Two steps, since what the ranks of a replicated leaf disagree on shows only when it is used. {V} varies over an axis,
{I} does not.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from tests.corpus import bugs_mlp as mlp
from tests.corpus.bugs import Bug, mapped, normal
from tests.corpus.bugs_mlp import SPECS

KEY = fs.key(5)
SHAPES = {k: tuple(x.shape) for k, x in mlp.params().items()}
MATRICES = {k: SPECS[k] for k in ("up", "down")}


def loss_of_the_varied(p: Any, x: Tensor) -> Tensor:
    return fs.pmean((torch.tanh(x) - mlp.down(p, mlp.up(p, mlp.norm(p, x)))).square().mean(), "data")


def whole_loss(p: Any, x: Tensor) -> Tensor:
    return loss_of_the_varied(fs.pvary(p, "data"), x)


def matrices_loss(p: Any, x: Tensor) -> Tensor:
    """Of parameters that are all split over model."""
    p = fs.pvary(p, "data")
    y = fs.psum(torch.relu(fs.pvary(x, "model") @ p["up"]) @ p["down"], "model")
    return fs.pmean((torch.tanh(x) - y).square().mean(), "data")


def descend(p: Any, grads: Any) -> Any:
    return {k: p[k] - 0.1 * grads[k] for k in p}


def step(p: Any, x: Tensor) -> tuple[Any, Any]:
    """The parameters after it, and what goes to the log."""
    loss, grads = fs.value_and_grad(whole_loss)(p, x)
    return descend(p, grads), {"loss": loss}


def train(check: str, *, specs: Any = SPECS, step: Any = step, steps: int = 2) -> tuple[Any, tuple[Any, ...]]:
    def several_steps(p: Any, x: Tensor) -> Any:
        logs = []
        for _ in range(steps):
            p, log = step(p, x)
            logs.append(log)
        return {"logs": logs, "params": p}

    f = mapped(several_steps, {"data": 2, "model": 2}, (specs, P("data")), {"logs": P(), "params": specs}, check)
    everything = mlp.params()
    return f, ({k: everything[k] for k in specs}, normal("x", 4, mlp.WIDTH))


# --- 3, 8: clipping by a norm -------------------------------------------------------------------------------


def scaled(grads: Any, norm: Tensor) -> Any:
    scale = torch.clamp(0.5 / norm, max=1.0)
    return {k: g * (fs.pvary(scale, "model") if SPECS[k].axes else scale) for k, g in grads.items()}


def step_clipped(p: Any, x: Tensor) -> tuple[Any, Any]:
    loss, grads = fs.value_and_grad(whole_loss)(p, x)
    norm = fs.optim.global_norm(grads, SPECS)
    return descend(p, scaled(grads, norm)), {"loss": loss, "norm": norm}


def step_clipped_by_a_norm_summed_twice(p: Any, x: Tensor) -> tuple[Any, Any]:
    loss, grads = fs.value_and_grad(whole_loss)(p, x)
    norm = fs.psum(fs.optim.global_norm(grads, SPECS), "model")  # BUG: the norm is that of the whole tree already
    return descend(p, scaled(grads, norm)), {"loss": loss, "norm": norm}


def step_clipped_by_the_shards_norm(p: Any, x: Tensor) -> tuple[Any, Any]:
    loss, grads = fs.value_and_grad(whole_loss)(p, x)
    norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()  # BUG: replicated leaves and shards
    return descend(p, scaled(grads, norm)), {"loss": loss, "norm": norm}


def step_matrices_clipped(p: Any, x: Tensor) -> tuple[Any, Any]:
    loss, grads = fs.value_and_grad(matrices_loss)(p, x)
    norm = fs.psum(grads["up"].square().sum() + grads["down"].square().sum(), "model").sqrt()
    return descend(p, scaled(grads, norm)), {"loss": loss}


def step_matrices_clipped_by_the_shards_norm(p: Any, x: Tensor) -> tuple[Any, Any]:
    loss, grads = fs.value_and_grad(matrices_loss)(p, x)
    norm = (grads["up"].square().sum() + grads["down"].square().sum()).sqrt()  # BUG: the types are content
    scale = torch.clamp(0.5 / norm, max=1.0)
    return descend(p, {k: g * scale for k, g in grads.items()}), {"loss": loss}


train_matrices = partial(train, specs=MATRICES)


# --- 4, 6, 12: the sum of gradients, which pvary's transpose makes, or the writer ---------------------------


def step_summing_again(p: Any, x: Tensor) -> tuple[Any, Any]:
    loss, grads = fs.value_and_grad(whole_loss)(p, x)
    grads = fs.psum(grads, "data")  # BUG: an all-reduce, as in other libraries; here it is done
    norm = fs.optim.global_norm(grads, SPECS)
    return descend(p, scaled(grads, norm)), {"loss": loss, "norm": norm}


def own_grads(p: Any, x: Tensor) -> tuple[Tensor, Any]:
    """The loss, and each rank's share of the gradient {V data}: varied outside, so that one psum will do for many."""
    return fs.value_and_grad(loss_of_the_varied)(fs.pvary(p, "data"), x)


def bounded(grads: Any) -> Any:
    return {k: g.clamp(-0.05, 0.05) for k, g in grads.items()}


def step_bounding_sums(p: Any, x: Tensor) -> tuple[Any, Any]:
    loss, grads = own_grads(p, x)
    return descend(p, bounded(fs.psum(grads, "data"))), {"loss": loss}


def step_summing_bounded(p: Any, x: Tensor) -> tuple[Any, Any]:
    loss, grads = own_grads(p, x)
    return descend(p, fs.psum(bounded(grads), "data")), {"loss": loss}  # BUG: each share is bounded, not the gradient


def step_of_sums(p: Any, x: Tensor) -> tuple[Any, Any]:
    loss, grads = own_grads(p, x)
    return descend(p, fs.psum(grads, "data")), {"loss": loss}


def step_of_own_grads(p: Any, x: Tensor) -> tuple[Any, Any]:
    loss, grads = own_grads(p, x)
    return {k: p[k] - 0.1 * grads[k] for k in p}, {"loss": loss}  # BUG: the shares were to be summed


def step_of_own_copies(p: Any, x: Tensor) -> tuple[Any, Any]:
    loss, grads = own_grads(p, x)
    p = fs.pvary(p, "data")  # to silence the error of the one above
    return {k: p[k] - 0.1 * grads[k] for k in p}, {"loss": loss}  # BUG: each rank trains a copy of its own


# --- 9, 10: noise on gradients ------------------------------------------------------------------------------


def noisy(grads: Any) -> Any:
    return {k: g + fs.random.normal(fs.fold_in(KEY, k), SHAPES[k], spec=SPECS[k]) for k, g in grads.items()}


def noisy_alike(grads: Any) -> Any:
    return {k: g + fs.random.normal(fs.fold_in(KEY, k), g.shape) for k, g in grads.items()}  # BUG: shards all alike


def noisy_each_its_own(grads: Any) -> Any:
    key = fs.fold_in(KEY, fs.axis_index("data"))
    draw = lambda k, s: fs.random.normal(fs.fold_in(key, k), SHAPES[k], spec=s)  # noqa: E731
    return {k: g + draw(k, SPECS[k]) for k, g in grads.items()}  # BUG: replicated leaves drift apart


def with_noise(check: str, *, noise: Any = noisy) -> tuple[Any, tuple[Any, ...]]:
    def step(p: Any, x: Tensor) -> tuple[Any, Any]:
        loss, grads = fs.value_and_grad(whole_loss)(p, x)
        return descend(p, noise(grads)), {"loss": loss}

    return train(check, step=step)


# --- 11: the rate of this rank ------------------------------------------------------------------------------


def descend_at_own_rate(p: Any, grads: Any) -> Any:
    rate = 0.1 * (1 + fs.axis_index("data"))
    return {k: p[k] - rate * grads[k] for k in p}  # BUG: replicated leaves drift apart


def descend_at_own_number(p: Any, grads: Any) -> Any:
    rate = 0.1 * (1 + int(fs.axis_index("data")))
    return {k: p[k] - rate * grads[k] for k in p}  # BUG: the same, and the rate is a Python number


def at_a_rate(check: str, *, descend: Any = descend) -> tuple[Any, tuple[Any, ...]]:
    def step(p: Any, x: Tensor) -> tuple[Any, Any]:
        loss, grads = fs.value_and_grad(whole_loss)(p, x)
        return descend(p, grads), {"loss": loss}

    return train(check, step=step)


BUGS = [
    Bug(3, "optimizer", "norm", train, "step", step_clipped_by_a_norm_summed_twice, step_clipped, "static", "model",
        "['logs'][0]['norm']", 2),
    Bug(4, "optimizer", "summed", train, "step", step_summing_again, step_clipped, "static", "data",
        "['logs'][0]['norm']", 2),
    Bug(6, "optimizer", "bounded", train, "step", step_summing_bounded, step_bounding_sums, "verify", "data"),
    Bug(8, "optimizer", "replicated leaves and shards", train, "step", step_clipped_by_the_shards_norm, step_clipped,
        "static", "model", "['logs'][0]['norm']"),
    Bug(8, "optimizer", "shards", train_matrices, "step", step_matrices_clipped_by_the_shards_norm,
        step_matrices_clipped, "verify", "model", "['logs'][1]['loss']"),
    Bug(9, "optimizer", "noise", with_noise, "noise", noisy_alike, None, "static", "model"),
    Bug(10, "optimizer", "noise", with_noise, "noise", noisy_each_its_own, None, "static", "data"),
    Bug(11, "optimizer", "tensor", at_a_rate, "descend", descend_at_own_rate, None, "static", "data"),
    Bug(11, "optimizer", "number", at_a_rate, "descend", descend_at_own_number, None, "static", "data"),
    Bug(12, "optimizer", "gradients", train, "step", step_of_own_grads, step_of_sums, "static", "data"),
    Bug(12, "optimizer", "copies", partial(train, steps=1), "step", step_of_own_copies, step_of_sums, "static", "data"),
]  # fmt: skip
