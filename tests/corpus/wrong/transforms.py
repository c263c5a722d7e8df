"""A missing pvary under each way to differentiate: backward, torch.autograd, torch.func, vmap, checkpoint, Function.

Legend: B batch, D width, M members; [B@data] is a dim split over an axis; {V} varies over it, {I} does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P, nn
from tests.corpus.wrong.program import WrongProgram, normal

Params = dict[str, Tensor]


# --- autograd -------------------------------------------------------------------------------------------------


def pvaried_gain_by_backward(p: Params, x: Tensor) -> Params:  # x [B@data, D]
    leaves = {k: v.detach().clone().requires_grad_() for k, v in p.items()}
    varying = fs.pvary(leaves, "data")
    h = nn.rms_norm(x, varying["gain"])
    loss = fs.pmean(torch.tanh(h @ varying["w"]).square().mean(), "data")
    # WRONG (3 lines): h = nn.rms_norm(x, leaves["gain"])  # BUG
    # WRONG: loss = fs.pmean(torch.tanh(h @ fs.pvary(leaves["w"], "data")).square().mean(), "data")
    loss.backward()
    return {k: v.grad for k, v in leaves.items()}


def global_losses_of_microbatches(w: Tensor, x: Tensor) -> Tensor:
    w = w.clone().requires_grad_()
    for part in x.chunk(2):
        loss = fs.pmean(torch.tanh(part @ fs.pvary(w, "data")).mean(), "data")
        # WRONG: loss = torch.tanh(part @ fs.pvary(w, "data")).mean()
        loss.backward()
    return w.grad / 2


def pvaried_penalty_by_create_graph(w: Tensor, x: Tensor) -> Tensor:
    """Differentiate the norm of a gradient."""
    w = w.clone().requires_grad_()
    loss = fs.pmean(torch.tanh(x @ fs.pvary(w, "data")).square().mean(), "data")
    (grad,) = torch.autograd.grad(loss, w, create_graph=True)
    decay = fs.pmean(x.square().mean(0), "data") * w
    # WRONG: decay = x.square().mean(0) * w  # BUG: weights of local features
    total = grad.square().sum() + decay.square().sum()
    # WRONG: total = grad.square().sum() + fs.pmean(decay.square().sum(), "data")
    return torch.autograd.grad(total, w)[0]


def function_of_the_user_with_pvary(w: Tensor, x: Tensor) -> Any:
    class Rounded(torch.autograd.Function):
        """Round x @ w, with the gradient of x @ w: a straight-through estimator."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return (x @ w * 8).round() / 8  # BUG

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            return grad @ w.T, x.T @ grad

    def loss(w: Tensor) -> Tensor:
        y = Rounded.apply(x, fs.pvary(w, "data"))
        # WRONG: y = Rounded.apply(x, w)
        return fs.pmean(torch.tanh(y).square().mean(), "data")

    return fs.value_and_grad(loss)(w)


# --- torch.func -----------------------------------------------------------------------------------------------


def pvaried_gain_by_torch_func(p: Params, x: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        p = fs.pvary(p, "data")
        # WRONG:
        h = nn.rms_norm(x, p["gain"])  # BUG
        return fs.pmean(torch.tanh(h @ p["w"]).square().mean(), "data")
        # WRONG: return fs.pmean(torch.tanh(h @ fs.pvary(p["w"], "data")).square().mean(), "data")

    return torch.func.grad_and_value(loss)(p)


def pvaried_weight_by_vjp(w: Tensor, x: Tensor) -> Tensor:
    def features(w: Tensor) -> Tensor:
        h = torch.tanh(x @ fs.pvary(w, "data"))
        # WRONG: h = torch.tanh(x @ w)
        return fs.pmean(h.mean(0), "data")

    y, pullback = torch.func.vjp(features, w)
    return pullback(y)[0]


def pvaried_weight_by_jacrev(w: Tensor, x: Tensor) -> Tensor:
    def moments(w: Tensor) -> Tensor:
        h = torch.tanh(x @ fs.pvary(w, "data"))
        # WRONG: h = torch.tanh(x @ w)
        return fs.pmean(torch.stack([h.mean(), h.square().mean()]), "data")

    return torch.func.jacrev(moments)(w)


def pvaried_hessian_times_a_vector(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    def loss(w: Tensor) -> Tensor:
        h = torch.tanh(x @ fs.pvary(w, "data"))
        # WRONG: h = torch.tanh(x @ w)
        return fs.pmean(h.square().mean(), "data")

    return torch.func.jvp(torch.func.grad(loss), (w,), (v,))[1]


DATA2, ONE = {"data": 2}, (P(), P("data"))
X, W, SQUARE = normal("x", 4, 4), normal("w", 4), normal("square", 4, 4, std=0.5)
TREE = {"gain": normal("gain", 4, mean=1.0), "w": SQUARE}

PROGRAMS = [
    WrongProgram("gain_by_backward", pvaried_gain_by_backward, DATA2, ONE, P(), (TREE, X), "types", "data"),
    WrongProgram(
        "local_losses_of_microbatches", global_losses_of_microbatches, DATA2, ONE, P(), (W, X), "types", "data",
    ),
    WrongProgram("penalty_by_create_graph", pvaried_penalty_by_create_graph, DATA2, ONE, P(), (W, X), "types", "data"),
    WrongProgram(
        "function_of_the_user", function_of_the_user_with_pvary, DATA2, ONE, P(), (SQUARE, X), "types", "data",
    ),
    WrongProgram("gain_by_torch_func", pvaried_gain_by_torch_func, DATA2, ONE, P(), (TREE, X), "types", "data"),
    WrongProgram("weight_by_vjp", pvaried_weight_by_vjp, DATA2, ONE, P(), (SQUARE, X), "types", "data"),
    WrongProgram("weight_by_jacrev", pvaried_weight_by_jacrev, DATA2, ONE, P(), (W, X), "types", "data"),
    WrongProgram(
        "hessian_times_a_vector", pvaried_hessian_times_a_vector, DATA2, (P(), P(), P("data")), P(),
        (W, normal("v", 4), X), "types", "data",
    ),
]  # fmt: skip
