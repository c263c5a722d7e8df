"""A tensor- and data-parallel MLP, and what people get wrong in it.

Legend: B batch, D width, F hidden width; [B@data] is a dim split over an axis; {V} varies over it, {I} does not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from tests.corpus.bugs import Bug, mapped, normal

WIDTH, HIDDEN = 8, 16
SPECS = {"norm": P(), "up": P(None, "model"), "up_b": P("model"), "down": P("model"), "down_b": P()}
KEY = fs.key(3)


def params(bias: float = 0.5) -> dict[str, Tensor]:
    return {
        "norm": normal("norm", WIDTH, std=0.1, mean=1.0),
        "up": normal("up", WIDTH, HIDDEN, std=0.4),
        "up_b": normal("up_b", HIDDEN, std=bias),
        "down": normal("down", HIDDEN, WIDTH, std=0.4),
        "down_b": normal("down_b", WIDTH, std=bias),
    }


# --- the right program: its parts ---------------------------------------------------------------------------


def norm(p: Any, x: Tensor) -> Tensor:
    return fs.nn.rms_norm(x, p["norm"])  # [B@data, D]


def up(p: Any, h: Tensor) -> Tensor:
    return torch.relu(fs.pvary(h, "model") @ p["up"] + p["up_b"])  # [B@data, F@model]


def dropout(h: Tensor) -> Tensor:
    return fs.nn.dropout(h, 0.25, key=KEY, spec=P("data", "model"))


def down(p: Any, h: Tensor) -> Tensor:
    return fs.psum(h @ p["down"], "model") + p["down_b"]  # [B@data, D]


def residual(x: Tensor, y: Tensor) -> Tensor:
    return x + fs.nn.dropout(y, 0.25, key=fs.fold_in(KEY, 1), spec=P("data"))


def error(x: Tensor, y: Tensor) -> Tensor:
    return fs.pmean((torch.tanh(x) - y).square().mean(), "data")


def step(loss: Callable[..., Tensor], p: Any, x: Tensor) -> Any:
    value, grads = fs.value_and_grad(loss)(p, x)
    return {"loss": value, "grads": grads}


PARTS = {f.__name__: f for f in (norm, up, dropout, down, residual, error, step)}


def loss_of(part: dict[str, Callable[..., Any]], p: Any, x: Tensor) -> Tensor:
    p = fs.pvary(p, "data")
    h = part["dropout"](part["up"](p, part["norm"](p, x)))
    return part["error"](x, part["residual"](x, part["down"](p, h)))


def mlp(
    check: str, *, base: Any = PARTS, loss: Any = None, batch: int = 4, bias: float = 0.5, more: Any = None,
    model: int = 2, rows: Any = "data", **changed: Any,
) -> tuple[Any, tuple[Any, ...]]:  # fmt: skip
    """One step with some parts changed; `more` are the specs of further results."""
    part = base | changed

    def train(p: Any, x: Tensor) -> Any:
        return part["step"](loss or partial(loss_of, part), p, x)

    out = {"loss": P(), "grads": SPECS, **(more or {})}
    f = mapped(train, {"data": 2, "model": model}, (SPECS, P(rows)), out, check)
    return f, (params(bias), normal("x", batch, WIDTH))


# --- 1: a gradient that is never summed ---------------------------------------------------------------------


def up_of_an_invariant(p: Any, h: Tensor) -> Tensor:
    return torch.relu(h @ p["up"] + p["up_b"])  # BUG: the gradient of h is this rank's share of it


def loss_of_an_invariant(p: Any, x: Tensor) -> Tensor:
    h = fs.nn.rms_norm(x, p["norm"])  # BUG: data parallel, and p was not varied over data
    return fs.pmean((torch.tanh(x) - down(p, up(p, h))).square().mean(), "data")


def loss_of_the_varied(p: Any, x: Tensor) -> Tensor:
    p = fs.pvary(p, "data")
    h = fs.nn.rms_norm(x, p["norm"])
    return fs.pmean((torch.tanh(x) - down(p, up(p, h))).square().mean(), "data")


# --- 2: the same, where the rows are split over model too, between the matmuls (sequence parallel) ----------


def split_norm(p: Any, x: Tensor) -> Tensor:
    return fs.nn.rms_norm(x, fs.pvary(p["norm"], "model"))  # [B@data+model, D]


def gathered_up(p: Any, h: Tensor) -> Tensor:
    return torch.relu(fs.all_gather(h, "model") @ p["up"] + p["up_b"])  # [B@data, F@model]


def scattered_down(p: Any, h: Tensor) -> Tensor:
    return fs.psum_scatter(h @ p["down"], "model") + fs.pvary(p["down_b"], "model")  # [B@data+model, D]


def scattered_down_raw_bias(p: Any, h: Tensor) -> Tensor:
    return fs.psum_scatter(h @ p["down"], "model") + p["down_b"]  # BUG: its gradient is that of these rows only


def split_norm_raw_weight(p: Any, x: Tensor) -> Tensor:
    return fs.nn.rms_norm(x, p["norm"])  # BUG: its gradient is that of these rows only


def split_residual(x: Tensor, y: Tensor) -> Tensor:
    return x + fs.nn.dropout(y, 0.25, key=fs.fold_in(KEY, 1), spec=P(("data", "model")))


def split_error(x: Tensor, y: Tensor) -> Tensor:
    return fs.pmean((torch.tanh(x) - y).square().mean(), ("data", "model"))


SPLIT = PARTS | {"norm": split_norm, "up": gathered_up, "down": scattered_down, "residual": split_residual,
                 "error": split_error}  # fmt: skip
split_mlp = partial(mlp, base=SPLIT, rows=("data", "model"), batch=8)


# --- 3 and 4: reduced again ---------------------------------------------------------------------------------


def down_summed_twice(p: Any, h: Tensor) -> Tensor:
    y = fs.psum(h @ p["down"], "model")
    return fs.psum(y, "model") + p["down_b"]  # BUG: y is the total already


def error_summed(x: Tensor, y: Tensor) -> Tensor:
    return fs.psum((torch.tanh(x) - y).square().sum(), "data")


def error_summed_twice(x: Tensor, y: Tensor) -> Tensor:
    total = fs.psum((torch.tanh(x) - y).square().sum(), "data")
    return fs.psum(total, "data")  # BUG: as one writes it for the log, of what the loss has summed


def step_averaging_again(_: Any, p: Any, x: Tensor) -> Any:
    """What data parallel code in other libraries looks like: a loss of one's own rows, then an average of gradients."""

    def loss_here(p: Any, x: Tensor) -> Tensor:
        p = fs.pvary(p, "data")
        return (torch.tanh(x) - down(p, up(p, x))).square().mean()  # BUG: pvary's transpose sums the ranks' gradients

    loss, grads = fs.value_and_grad(loss_here)(p, x)
    return {"loss": fs.pmean(loss, "data"), "grads": fs.pmean(grads, "data")}


def step_averaging_once(_: Any, p: Any, x: Tensor) -> Any:
    def loss_everywhere(p: Any, x: Tensor) -> Tensor:
        p = fs.pvary(p, "data")
        return fs.pmean((torch.tanh(x) - down(p, up(p, x))).square().mean(), "data")

    loss, grads = fs.value_and_grad(loss_everywhere)(p, x)
    return {"loss": loss, "grads": grads}


def step_summing_again(loss: Callable[..., Tensor], p: Any, x: Tensor) -> Any:
    value, grads = fs.value_and_grad(loss)(p, x)
    return {"loss": value, "grads": fs.psum(grads, "data")}  # BUG: pvary's transpose has summed them


# --- 5 and 6: before the sum, after the sum -----------------------------------------------------------------


def down_with_bias_inside(p: Any, h: Tensor) -> Tensor:
    return fs.psum(h @ p["down"] + p["down_b"], "model")  # BUG: counted once by each rank


def down_with_varied_bias_inside(p: Any, h: Tensor) -> Tensor:
    return fs.psum(h @ p["down"] + fs.pvary(p["down_b"], "model"), "model")  # BUG: the types are content


def down_of_a_nonlinearity(p: Any, h: Tensor) -> Tensor:
    return fs.psum(torch.tanh(h @ p["down"]), "model") + p["down_b"]  # BUG: of a partial sum


def down_then_a_nonlinearity(p: Any, h: Tensor) -> Tensor:
    return torch.tanh(fs.psum(h @ p["down"], "model")) + p["down_b"]


# --- 7: unequal counts --------------------------------------------------------------------------------------


def error_of_totals(x: Tensor, y: Tensor) -> Tensor:
    errors = (torch.tanh(x) - y).square()
    return fs.psum(errors.sum(), "data") / fs.psum(torch.tensor(float(errors.numel())), "data")


def error_of_means(x: Tensor, y: Tensor) -> Tensor:
    return fs.pmean((torch.tanh(x) - y).square().mean(), "data")  # BUG: 5 rows lie as 3 and 2


# --- 9 and 10: masks ----------------------------------------------------------------------------------------


def dropout_one_for_all(h: Tensor) -> Tensor:
    return fs.nn.dropout(h, 0.25, key=KEY, spec=P("data"))  # BUG: h is [B@data, F@model]


def dropout_by_hand(h: Tensor) -> Tensor:
    keep = fs.random.bernoulli(KEY, (4, HIDDEN), p=0.75, spec=P("data", "model"))
    return torch.where(keep, h / 0.75, 0)


def dropout_by_hand_one_for_all(h: Tensor) -> Tensor:
    keep = fs.random.bernoulli(KEY, h.shape, p=0.75)
    return torch.where(keep, h / 0.75, 0)  # BUG: the local shape and no spec: all ranks drop alike


def residual_many_masks(x: Tensor, y: Tensor) -> Tensor:
    key = fs.fold_in(KEY, fs.axis_index("model"))
    return x + fs.nn.dropout(y, 0.25, key=key, spec=P("data"))  # BUG: y is the same on every rank of model


# --- 11 and 12: this rank's, as if everybody's --------------------------------------------------------------


def penalty(p: Any) -> Tensor:
    return fs.psum(p["up"].square().sum(), "model")


def loss_with_penalty(p: Any, x: Tensor) -> Tensor:
    p = fs.pvary(p, "data")
    rate = 0.1
    return fs.pmean((torch.tanh(x) - down(p, up(p, x))).square().mean() + rate * penalty(p), "data")


def loss_with_a_penalty_here(p: Any, x: Tensor) -> Tensor:
    p = fs.pvary(p, "data")
    rate = 0.1 if int(fs.axis_index("data")) == 0 else 0.0  # BUG: "add it once", and then it is averaged
    return fs.pmean((torch.tanh(x) - down(p, up(p, x))).square().mean() + rate * penalty(p), "data")


def step_with_size(loss: Callable[..., Tensor], p: Any, x: Tensor) -> Any:
    value, grads = fs.value_and_grad(loss)(p, x)
    return {"loss": value, "grads": grads, "size": fs.pmean(x.square().mean(), "data")}


def step_with_own_size(loss: Callable[..., Tensor], p: Any, x: Tensor) -> Any:
    value, grads = fs.value_and_grad(loss)(p, x)
    return {"loss": value, "grads": grads, "size": x.square().mean()}  # BUG: of the rows that lie here


logged = partial(mlp, more={"size": P()})

zero_bias = partial(mlp, bias=0.0)  # as it is when training begins: then the loss is right, and a gradient is not

BUGS = [
    Bug(1, "mlp", "tensor parallel", mlp, "up", up_of_an_invariant, None, "static", "model", "['grads']['norm']"),
    Bug(1, "mlp", "data parallel", mlp, "loss", loss_of_an_invariant, loss_of_the_varied, "static", "data"),
    Bug(2, "mlp", "bias", split_mlp, "down", scattered_down_raw_bias, None, "static", "model",
        "['grads']['down_b']"),
    Bug(2, "mlp", "norm", split_mlp, "norm", split_norm_raw_weight, None, "static", "model", "['grads']['norm']"),
    Bug(3, "mlp", "activations", mlp, "down", down_summed_twice, None, "static", "model"),
    Bug(3, "mlp", "loss", mlp, "error", error_summed_twice, error_summed, "static", "data", "['loss']", 2),
    Bug(4, "mlp", "averaged", mlp, "step", step_averaging_again, step_averaging_once, "static", "data", "['grads']", 2),
    Bug(4, "mlp", "summed", mlp, "step", step_summing_again, None, "static", "data", "['grads']", 2),
    Bug(5, "mlp", "as it is", mlp, "down", down_with_bias_inside, None, "static", "model"),
    Bug(5, "mlp", "varied", mlp, "down", down_with_varied_bias_inside, None, "verify", "model"),
    Bug(5, "mlp", "varied and zero", zero_bias, "down", down_with_varied_bias_inside, None, "verify", "model",
        "['grads']['down_b']", 2),
    Bug(5, "mlp", "varied over four", partial(zero_bias, model=4), "down", down_with_varied_bias_inside, None,
        "verify", "model", "['grads']['down_b']", 4),
    Bug(6, "mlp", "tanh", mlp, "down", down_of_a_nonlinearity, down_then_a_nonlinearity, "verify", "model"),
    Bug(7, "mlp", "uneven batch", partial(mlp, batch=5), "error", error_of_means, error_of_totals, "verify", "data"),
    Bug(9, "mlp", "spec too short", mlp, "dropout", dropout_one_for_all, None, "static", "model"),
    Bug(9, "mlp", "no spec", mlp, "dropout", dropout_by_hand_one_for_all, dropout_by_hand, "static", "data"),
    Bug(10, "mlp", "residual", mlp, "residual", residual_many_masks, None, "static", "model", "['grads']"),
    Bug(11, "mlp", "penalty", mlp, "loss", loss_with_a_penalty_here, loss_with_penalty, "verify", "data"),
    Bug(12, "mlp", "a number for the log", logged, "step", step_with_own_size, step_with_size, "static", "data",
        "['size']"),
]  # fmt: skip
