"""Two steps of training the MLP, and mistakes that people make after the gradient: clipping, averaging, noise, rates.

Two steps, since a replicated leaf that differs between ranks changes a loss only when it is used.

{V} varies over an axis, {I} does not.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from tests.corpus import bugs_mlp as mlp
from tests.corpus.bugs import Bug, mapped
from tests.corpus.bugs_mlp import SPECS
from tests.corpus.correct.program import normal

KEY = fs.key(5)
SHAPES = {k: tuple(x.shape) for k, x in mlp.params().items()}
MATRICES = {k: SPECS[k] for k in ("up", "down")}


def loss_of_pvaried(p: Any, x: Tensor) -> Tensor:
    return fs.pmean((torch.tanh(x) - mlp.down(p, mlp.up(p, mlp.norm(p, x)))).square().mean(), "data")


def whole_loss(p: Any, x: Tensor) -> Tensor:
    return loss_of_pvaried(fs.pvary(p, "data"), x)


def matrices_loss(p: Any, x: Tensor) -> Tensor:
    """Loss of parameters that are all split over model."""
    p = fs.pvary(p, "data")
    y = fs.psum(torch.relu(fs.pvary(x, "model") @ p["up"]) @ p["down"], "model")
    return fs.pmean((torch.tanh(x) - y).square().mean(), "data")


def descend(p: Any, grads: Any) -> Any:
    return {k: p[k] - 0.1 * grads[k] for k in p}


def step(p: Any, x: Tensor) -> tuple[Any, Any]:
    """Return the parameters after the step, and the log."""
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


# --- 3, 8: clipping by a norm ---------------------------------------------------------------------------------


def scaled(grads: Any, norm: Tensor) -> Any:
    scale = torch.clamp(0.5 / norm, max=1.0)
    return {k: g * (fs.pvary(scale, "model") if SPECS[k].axes else scale) for k, g in grads.items()}


def step_clipped(p: Any, x: Tensor) -> tuple[Any, Any]:
    loss, grads = fs.value_and_grad(whole_loss)(p, x)
    norm = fs.optim.global_norm(grads, SPECS)
    return descend(p, scaled(grads, norm)), {"loss": loss, "norm": norm}


def step_clipped_by_a_norm_summed_twice(p: Any, x: Tensor) -> tuple[Any, Any]:
    loss, grads = fs.value_and_grad(whole_loss)(p, x)
    norm = fs.psum(fs.optim.global_norm(grads, SPECS), "model")  # BUG: the norm is of the whole tree
    return descend(p, scaled(grads, norm)), {"loss": loss, "norm": norm}


def step_clipped_by_local_norm(p: Any, x: Tensor) -> tuple[Any, Any]:
    loss, grads = fs.value_and_grad(whole_loss)(p, x)
    norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()  # BUG: types name the update below
    return descend(p, scaled(grads, norm)), {"loss": loss, "norm": norm}


def step_matrices_clipped(p: Any, x: Tensor) -> tuple[Any, Any]:
    loss, grads = fs.value_and_grad(matrices_loss)(p, x)
    norm = fs.psum(grads["up"].square().sum() + grads["down"].square().sum(), "model").sqrt()
    return descend(p, scaled(grads, norm)), {"loss": loss}


def step_matrices_clipped_by_local_norm(p: Any, x: Tensor) -> tuple[Any, Any]:
    loss, grads = fs.value_and_grad(matrices_loss)(p, x)
    norm = (grads["up"].square().sum() + grads["down"].square().sum()).sqrt()  # BUG: the types do not see it
    scale = torch.clamp(0.5 / norm, max=1.0)
    return descend(p, {k: g * scale for k, g in grads.items()}), {"loss": loss}


train_matrices = partial(train, specs=MATRICES)


# --- 4, 6, 12: the sum of gradients, by the transpose of pvary or by hand -------------------------------------


def local_grads(p: Any, x: Tensor) -> tuple[Tensor, Any]:
    """Return the loss and each rank's part of the gradient {V data}, whose sum the caller takes."""
    return fs.value_and_grad(loss_of_pvaried)(fs.pvary(p, "data"), x)


def step_on_summed_grads(p: Any, x: Tensor) -> tuple[Any, Any]:
    loss, grads = local_grads(p, x)
    return descend(p, fs.psum(grads, "data")), {"loss": loss}


def step_on_local_grads(p: Any, x: Tensor) -> tuple[Any, Any]:
    loss, grads = local_grads(p, x)
    return {k: p[k] - 0.1 * grads[k] for k in p}, {"loss": loss}  # BUG: the parts need a sum


def step_on_local_grads_and_parameters(p: Any, x: Tensor) -> tuple[Any, Any]:
    loss, grads = local_grads(p, x)
    p = fs.pvary(p, "data")  # silences the error of the function above
    return {k: p[k] - 0.1 * grads[k] for k in p}, {"loss": loss}  # BUG: each rank trains its own copy


# --- 9, 10: noise on gradients --------------------------------------------------------------------------------


def noisy(grads: Any) -> Any:
    return {k: g + fs.random.normal(fs.fold_in(KEY, k), SHAPES[k], spec=SPECS[k]) for k, g in grads.items()}


def noisy_without_spec(grads: Any) -> Any:
    draw = lambda k, g: fs.random.normal(fs.fold_in(KEY, k), g.shape)  # noqa: E731
    return {k: g + draw(k, g) for k, g in grads.items()}  # BUG: all shards get the same noise


def noisy_with_rank_in_key(grads: Any) -> Any:
    key = fs.fold_in(KEY, fs.axis_index("data"))
    draw = lambda k, s: fs.random.normal(fs.fold_in(key, k), SHAPES[k], spec=s)  # noqa: E731
    return {k: g + draw(k, SPECS[k]) for k, g in grads.items()}  # BUG: replicated leaves become different


def with_noise(check: str, *, noise: Any = noisy) -> tuple[Any, tuple[Any, ...]]:
    def step(p: Any, x: Tensor) -> tuple[Any, Any]:
        loss, grads = fs.value_and_grad(whole_loss)(p, x)
        return descend(p, noise(grads)), {"loss": loss}

    return train(check, step=step)


# --- 11: a rate that differs between ranks --------------------------------------------------------------------


def descend_at_rate_of_rank(p: Any, grads: Any) -> Any:
    rate = 0.1 * (1 + fs.axis_index("data"))
    return {k: p[k] - rate * grads[k] for k in p}  # BUG: replicated leaves become different


def descend_at_python_rate_of_rank(p: Any, grads: Any) -> Any:
    rate = 0.1 * (1 + int(fs.axis_index("data")))
    return {k: p[k] - rate * grads[k] for k in p}  # BUG: the same, by a Python number


def train_with_descent(check: str, *, descend: Any = descend) -> tuple[Any, tuple[Any, ...]]:
    def step(p: Any, x: Tensor) -> tuple[Any, Any]:
        loss, grads = fs.value_and_grad(whole_loss)(p, x)
        return descend(p, grads), {"loss": loss}

    return train(check, step=step)


BUGS = [
    Bug(3, "optimizer", "norm", train, "step", step_clipped_by_a_norm_summed_twice, step_clipped, "types", "model",
        "['logs'][0]['norm']", 2),
    Bug(8, "optimizer", "replicated leaves and shards", train, "step", step_clipped_by_local_norm, step_clipped,
        "verify", "model", "['logs'][0]['norm']"),
    Bug(8, "optimizer", "shards", train_matrices, "step", step_matrices_clipped_by_local_norm,
        step_matrices_clipped, "verify", "model", "['logs'][1]['loss']"),
    Bug(9, "optimizer", "noise", with_noise, "noise", noisy_without_spec, None, "types", "model"),
    Bug(10, "optimizer", "noise", with_noise, "noise", noisy_with_rank_in_key, None, "types", "data"),
    Bug(11, "optimizer", "tensor", train_with_descent, "descend", descend_at_rate_of_rank, None, "types", "data"),
    Bug(11, "optimizer", "number", train_with_descent, "descend", descend_at_python_rate_of_rank, None, "types",
        "data"),
    Bug(12, "optimizer", "gradients", train, "step", step_on_local_grads, step_on_summed_grads, "types", "data"),
    Bug(12, "optimizer", "copies", partial(train, steps=1), "step", step_on_local_grads_and_parameters,
        step_on_summed_grads, "types", "data"),
]  # fmt: skip
