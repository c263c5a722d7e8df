"""Pipelines: layers split over stages, microbatches sent from stage to stage.

Legend: M microbatches, B batch, D width, L layers, R rounds; [L@stage] is a dim split over an axis. A collapsed mesh
runs all layers on one stage.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, dense_grad, normal

Params = dict[str, Tensor]


def run_layers(layers: Tensor, h: Tensor) -> Tensor:  # layers [L, D, D], h [B, D]
    for w in layers:
        h = torch.tanh(h @ w)
    return h


def one_forward_one_backward(p: Params, x: Tensor, y: Tensor) -> Any:
    """1F1B: each tick runs a microbatch forward and an earlier one backward (Narayanan et al., 2019).

    Microbatch m is forward on stage s at tick m + s, and backward at tick m + 2 (n - 1) - s. The inputs of layers are
    kept between; the backward pass recomputes the rest.
    """
    n, stage, count = fs.axis_size("stage"), fs.axis_index("stage"), len(x)
    down, up = [(i, i + 1) for i in range(n - 1)], [(i + 1, i) for i in range(n - 1)]
    last = stage == n - 1
    x, y = fs.pvary((x, y), "stage")
    kept = torch.zeros_like(x)  # inputs of this stage, [M, B, D]
    received, cotangent = torch.zeros_like(x[0]), torch.zeros_like(x[0])
    total, grads = torch.zeros(()), torch.zeros_like(p["layers"])
    for tick in range(count + 2 * (n - 1)):
        # 1. One microbatch forward.
        m = tick - stage
        valid = (m >= 0) & (m < count)
        at = m.clamp(0, count - 1)
        h = torch.where(stage == 0, x[at], received)
        kept = torch.where(valid & (torch.arange(count) == at)[:, None, None], h, kept)
        out = run_layers(p["layers"], h)

        # 2. One microbatch backward; on the last stage it is the same one.
        m = tick - 2 * (n - 1) + stage
        valid = (m >= 0) & (m < count)
        at = m.clamp(0, count - 1)
        result, pullback = torch.func.vjp(run_layers, p["layers"], kept[at])
        error = result - y[at]
        w_grad, h_grad = pullback(torch.where(last, 2 * error / y.numel(), cotangent))
        grads = grads + torch.where(valid, w_grad, 0.0)
        total = total + torch.where(valid & last, error.square().sum() / y.numel(), 0.0)

        received, cotangent = fs.ppermute(out, "stage", down), fs.ppermute(h_grad, "stage", up)
    return fs.psum(total, "stage"), {"layers": grads}


def dense_one_forward_one_backward(p: Params, x: Tensor, y: Tensor) -> Any:
    return dense_grad(lambda p: (run_layers(p["layers"], x) - y).square().mean())(p)


def pipeline_with_data_parallel(p: Params, x: Tensor, y: Tensor) -> Any:  # x [M, B@data, D]
    """A pipeline for each part of the batch; .backward() inside the region, then one mean of gradients."""
    n, stage = fs.axis_size("stage"), fs.axis_index("stage")
    layers = fs.pvary(p["layers"], "data").detach().requires_grad_()
    h, errors = torch.zeros_like(x[0]), []
    for tick in range(len(x) + n - 1):
        h = run_layers(layers, torch.where(stage == 0, fs.pvary(x[min(tick, len(x) - 1)], "stage"), h))
        errors.append((h - fs.pvary(y[max(tick - n + 1, 0)], "stage")).square().mean())
        h = fs.ppermute(h, "stage", [(i, i + 1) for i in range(n - 1)])
    own = torch.stack(errors[n - 1 :]).mean()
    loss = fs.psum(torch.where(stage == n - 1, own, 0.0), "stage")  # over data each rank has its own loss
    loss.backward()
    return fs.pmean((loss.detach(), {"layers": layers.grad}), "data")


LAYERS = {"layers": normal("layers", 6, 3, 3)}
STAGES = {"layers": P("stage")}
X, Y = normal("x", 4, 2, 3), normal("y", 4, 2, 3)
BATCH = P(None, "data")

PROGRAMS = [
    Program(one_forward_one_backward, {"stage": 3}, (STAGES, P(), P()), (P(), STAGES), (LAYERS, X, Y),
            dense_one_forward_one_backward),
    Program(pipeline_with_data_parallel, {"data": 2, "stage": 2}, (STAGES, BATCH, BATCH), (P(), STAGES),
            (LAYERS, X, Y), dense_one_forward_one_backward),
]  # fmt: skip
