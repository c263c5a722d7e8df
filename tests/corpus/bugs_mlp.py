"""A tensor- and data-parallel MLP, and the mistakes that people make in it.

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
from tests.corpus.bugs import Bug, mapped
from tests.corpus.correct.program import normal

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


# --- parts of the correct program -----------------------------------------------------------------------------


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
    """Return one step with some parts changed; `more` are the specs of further results."""
    part = base | changed

    def train(p: Any, x: Tensor) -> Any:
        return part["step"](loss or partial(loss_of, part), p, x)

    out = {"loss": P(), "grads": SPECS, **(more or {})}
    f = mapped(train, {"data": 2, "model": model}, (SPECS, P(rows)), out, check)
    return f, (params(bias), normal("x", batch, WIDTH))


# --- 1: a gradient that is never summed -----------------------------------------------------------------------


def up_without_pvary(p: Any, h: Tensor) -> Tensor:
    return torch.relu(h @ p["up"] + p["up_b"])  # BUG: the gradient of h is this rank's part of it


# --- 2: the same, with rows split over model too between the matmuls (sequence parallelism) -------------------


def split_norm(p: Any, x: Tensor) -> Tensor:
    return fs.nn.rms_norm(x, fs.pvary(p["norm"], "model"))  # [B@data+model, D]


def gathered_up(p: Any, h: Tensor) -> Tensor:
    return torch.relu(fs.all_gather(h, "model") @ p["up"] + p["up_b"])  # [B@data, F@model]


def scattered_down(p: Any, h: Tensor) -> Tensor:
    return fs.psum_scatter(h @ p["down"], "model") + fs.pvary(p["down_b"], "model")  # [B@data+model, D]


def scattered_down_without_pvary_of_bias(p: Any, h: Tensor) -> Tensor:
    return fs.psum_scatter(h @ p["down"], "model") + p["down_b"]  # BUG: the gradient is of the local rows only


def split_residual(x: Tensor, y: Tensor) -> Tensor:
    return x + fs.nn.dropout(y, 0.25, key=fs.fold_in(KEY, 1), spec=P(("data", "model")))


def split_error(x: Tensor, y: Tensor) -> Tensor:
    return fs.pmean((torch.tanh(x) - y).square().mean(), ("data", "model"))


SPLIT = PARTS | {"norm": split_norm, "up": gathered_up, "down": scattered_down, "residual": split_residual,
                 "error": split_error}  # fmt: skip
split_mlp = partial(mlp, base=SPLIT, rows=("data", "model"), batch=8)


# --- 3 and 4: reduced again -----------------------------------------------------------------------------------


def step_summing_grads_again(loss: Callable[..., Tensor], p: Any, x: Tensor) -> Any:
    value, grads = fs.value_and_grad(loss)(p, x)
    return {"loss": value, "grads": fs.psum(grads, "data")}  # BUG: pvary's transpose has summed them


# --- 5 and 6: before the sum, after the sum -------------------------------------------------------------------


def down_with_bias_in_sum(p: Any, h: Tensor) -> Tensor:
    return fs.psum(h @ p["down"] + p["down_b"], "model")  # BUG: counted once by each rank


def down_with_pvaried_bias_in_sum(p: Any, h: Tensor) -> Tensor:
    return fs.psum(h @ p["down"] + fs.pvary(p["down_b"], "model"), "model")  # BUG: the types do not see it


def tanh_before_sum(p: Any, h: Tensor) -> Tensor:
    return fs.psum(torch.tanh(h @ p["down"]), "model") + p["down_b"]  # BUG: of a partial sum


def tanh_after_sum(p: Any, h: Tensor) -> Tensor:
    return torch.tanh(fs.psum(h @ p["down"], "model")) + p["down_b"]


# --- 7: unequal counts ----------------------------------------------------------------------------------------


def error_from_totals(x: Tensor, y: Tensor) -> Tensor:
    errors = (torch.tanh(x) - y).square()
    return fs.psum(errors.sum(), "data") / fs.psum(torch.tensor(float(errors.numel())), "data")


def error_as_mean_of_means(x: Tensor, y: Tensor) -> Tensor:
    return fs.pmean((torch.tanh(x) - y).square().mean(), "data")  # BUG: 5 rows are split into 3 and 2


# --- 9 and 10: masks ------------------------------------------------------------------------------------------


def dropout_by_hand(h: Tensor) -> Tensor:
    keep = fs.random.bernoulli(KEY, (4, HIDDEN), p=0.75, spec=P("data", "model"))
    return torch.where(keep, h / 0.75, 0)


def dropout_by_hand_without_spec(h: Tensor) -> Tensor:
    keep = fs.random.bernoulli(KEY, h.shape, p=0.75)
    return torch.where(keep, h / 0.75, 0)  # BUG: local shape, no spec: ranks use one mask


# --- 11 and 12: a value of one rank used as if replicated -----------------------------------------------------


def penalty(p: Any) -> Tensor:
    return fs.psum(p["up"].square().sum(), "model")


def loss_with_penalty(p: Any, x: Tensor) -> Tensor:
    p = fs.pvary(p, "data")
    rate = 0.1
    return fs.pmean((torch.tanh(x) - down(p, up(p, x))).square().mean() + rate * penalty(p), "data")


def loss_with_penalty_on_rank_0(p: Any, x: Tensor) -> Tensor:
    p = fs.pvary(p, "data")
    rate = 0.1 if int(fs.axis_index("data")) == 0 else 0.0  # BUG: "add it once", but it is averaged
    return fs.pmean((torch.tanh(x) - down(p, up(p, x))).square().mean() + rate * penalty(p), "data")


def step_with_size(loss: Callable[..., Tensor], p: Any, x: Tensor) -> Any:
    value, grads = fs.value_and_grad(loss)(p, x)
    return {"loss": value, "grads": grads, "size": fs.pmean(x.square().mean(), "data")}


def step_with_local_size(loss: Callable[..., Tensor], p: Any, x: Tensor) -> Any:
    value, grads = fs.value_and_grad(loss)(p, x)
    return {"loss": value, "grads": grads, "size": x.square().mean()}  # BUG: of the local rows


logged = partial(mlp, more={"size": P()})

zero_bias = partial(mlp, bias=0.0)  # as when training begins: the loss is correct, one gradient is not

BUGS = [
    Bug(1, "mlp", "tensor parallel", mlp, "up", up_without_pvary, None, "types", "model", "['grads']['norm']"),
    Bug(2, "mlp", "bias", split_mlp, "down", scattered_down_without_pvary_of_bias, None, "types", "model",
        "['grads']['down_b']"),
    Bug(4, "mlp", "summed", mlp, "step", step_summing_grads_again, None, "types", "data", "['grads']", 2),
    Bug(5, "mlp", "as it is", mlp, "down", down_with_bias_in_sum, None, "types", "model"),
    Bug(5, "mlp", "varied over four", partial(zero_bias, model=4), "down", down_with_pvaried_bias_in_sum, None,
        "verify", "model", "['grads']['down_b']", 4),
    Bug(6, "mlp", "tanh", mlp, "down", tanh_before_sum, tanh_after_sum, "verify", "model"),
    Bug(7, "mlp", "uneven batch", partial(mlp, batch=5), "error", error_as_mean_of_means, error_from_totals,
        "verify", "data"),
    Bug(9, "mlp", "no spec", mlp, "dropout", dropout_by_hand_without_spec, dropout_by_hand, "types", "data"),
    Bug(11, "mlp", "penalty", mlp, "loss", loss_with_penalty_on_rank_0, loss_with_penalty, "verify", "data"),
    Bug(12, "mlp", "a number for the log", logged, "step", step_with_local_size, step_with_size, "types", "data",
        "['size']"),
]  # fmt: skip
