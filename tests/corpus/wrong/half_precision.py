"""Mistakes in bfloat16 and integer formats, where a tolerance for rounding must not hide them.

Legend: B batch, D width, F hidden width; [F@model] is a dim split over an axis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from tests.corpus.wrong.program import WrongProgram, normal

Params = dict[str, Tensor]
HALF = torch.bfloat16


def half_row_parallel_averaged(p: Params, x: Tensor) -> Any:  # up [D, F@model], down [F@model, D], x [B, D]
    def loss(p: Params) -> Tensor:
        h = torch.relu(fs.pvary(x.to(HALF), "model") @ p["up"].to(HALF))
        y = fs.pmean(h @ p["down"].to(HALF), "model")  # BUG: a mean of the parts of a sum
        return (y.float() - x).square().mean()

    return fs.value_and_grad(loss)(p)


def half_row_parallel(p: Params, x: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        h = torch.relu(fs.pvary(x.to(HALF), "model") @ p["up"].to(HALF))
        y = fs.psum(h @ p["down"].to(HALF), "model")
        return (y.float() - x).square().mean()

    return fs.value_and_grad(loss)(p)


def half_row_parallel_without_pvary(p: Params, x: Tensor, w: Tensor) -> Any:
    def loss(w: Tensor) -> Tensor:
        h = (x @ w).to(HALF)
        y = torch.relu(h @ p["up"].to(HALF))  # BUG
        return fs.psum(y @ p["down"].to(HALF), "model").float().square().sum()

    return fs.value_and_grad(loss)(w)


def half_row_parallel_with_pvary(p: Params, x: Tensor, w: Tensor) -> Any:
    def loss(w: Tensor) -> Tensor:
        h = (x @ w).to(HALF)
        y = torch.relu(fs.pvary(h, "model") @ p["up"].to(HALF))
        return fs.psum(y @ p["down"].to(HALF), "model").float().square().sum()

    return fs.value_and_grad(loss)(w)


def half_gradients_scaled_by_local_count(w: Tensor, x: Tensor, mask: Tensor) -> Tensor:  # x [B@data, D], mask [B@data]
    def loss(w: Tensor) -> Tensor:
        errors = torch.tanh(x.to(HALF) @ fs.pvary(w, "data").to(HALF)).float()
        return fs.psum((errors * mask).sum() / mask.sum(), "data")  # BUG

    return fs.grad(loss)(w).to(HALF)


def half_gradients_scaled_by_count(w: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    count = fs.pvary(fs.psum(mask.sum(), "data"), "data")

    def loss(w: Tensor) -> Tensor:
        errors = torch.tanh(x.to(HALF) @ fs.pvary(w, "data").to(HALF)).float()
        return fs.psum((errors * mask).sum() / count, "data")

    return fs.grad(loss)(w).to(HALF)


def quantized_by_local_range(w: Tensor) -> Tensor:  # w [D, F@model]: a scale for each row
    scale = w.abs().amax(1, keepdim=True) / 7  # BUG
    return (w / scale).round() * scale


def quantized_by_range_of_rows(w: Tensor) -> Tensor:
    scale = fs.pvary(fs.pmax(w.abs().amax(1, keepdim=True), "model"), "model") / 7
    return (w / scale).round() * scale


def loss_scale_and_ranks_removed(w: Tensor, x: Tensor) -> Tensor:  # x [B@data, D]
    """Scale the loss for half precision, and divide by the scale and by the number of ranks."""
    scale = 1024.0

    def loss(w: Tensor) -> Tensor:
        errors = (x.to(HALF) @ fs.pvary(w, "data").to(HALF)).float().square()
        return scale * fs.pmean(errors.mean(), "data")

    return fs.grad(loss)(w) / (scale * fs.axis_size("data"))  # BUG: pmean has divided


def loss_scale_removed(w: Tensor, x: Tensor) -> Tensor:
    scale = 1024.0

    def loss(w: Tensor) -> Tensor:
        errors = (x.to(HALF) @ fs.pvary(w, "data").to(HALF)).float().square()
        return scale * fs.pmean(errors.mean(), "data")

    return fs.grad(loss)(w) / scale


DATA2, MODEL2 = {"data": 2}, {"model": 2}
X = normal("x", 4, 4).to(HALF).float()
W, MASK = normal("w", 4), torch.tensor([1.0, 1, 1, 0])
SPECS = {"up": P(None, "model"), "down": P("model")}
MLP = {"up": normal("up", 4, 6), "down": normal("down", 6, 4)}

PROGRAMS = [
    WrongProgram(
        half_row_parallel_averaged, half_row_parallel, MODEL2, (SPECS, P()), (P(), SPECS), (MLP, X), "verify", "model"
    ),
    WrongProgram(
        half_row_parallel_without_pvary, half_row_parallel_with_pvary, MODEL2, (SPECS, P(), P()), P(), (MLP, X,
        normal("square", 4, 4)), "types", "model",
    ),
    WrongProgram(
        half_gradients_scaled_by_local_count, half_gradients_scaled_by_count, DATA2, (P(), P("data"), P("data")), P(),
        (W, X, MASK), "verify", "data",
    ),
    WrongProgram(
        quantized_by_local_range, quantized_by_range_of_rows, MODEL2, (P(None, "model"),), P(None, "model"),
        (MLP["up"],), "verify", "model",
    ),
    WrongProgram(
        loss_scale_and_ranks_removed, loss_scale_removed, DATA2, (P(), P("data")), P(), (W, X), "verify", "data"
    ),
]  # fmt: skip
