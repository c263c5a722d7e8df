"""Programs that forget a pvary: a replicated parameter meets local examples, and its gradient is of these alone.

Legend: B batch, T positions, D width, R rank of an adapter, F hidden width, K classes; [B@data] is a dim split over an
axis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import fshard as fs
from fshard import P, nn
from tests.corpus.wrong.program import WrongProgram, normal

Params = dict[str, Tensor]
DATA = P("data")


# --- a class token put before local patches -------------------------------------------------------------------


def class_token(p: Params, patches: Tensor, y: Tensor) -> Any:  # patches [B@data, T, D], y [B@data]
    def loss(p: Params) -> Tensor:
        token = fs.pvary(p["token"], "data").expand(len(patches), 1, -1)
        # WRONG: token = p["token"].expand(len(patches), 1, -1)
        h = torch.cat([token, patches], 1)  # BUG
        h = nn.attention(h.unsqueeze(1), h.unsqueeze(1), h.unsqueeze(1)).squeeze(1)
        return fs.pmean((h[:, 0] @ fs.pvary(p["head"], "data") - y).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


# --- LoRA beside a frozen weight ------------------------------------------------------------------------------


def lora_a(p: Params, base: Tensor, x: Tensor, y: Tensor) -> Any:  # base [D, D]{I}, x and y [B@data, D]
    def loss(p: Params) -> Tensor:
        h = x @ base
        low = x @ fs.pvary(p["a"], "data")
        # WRONG: low = x @ p["a"]
        return fs.pmean((h + low @ fs.pvary(p["b"], "data") - y).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


# --- the prior of a mixture -----------------------------------------------------------------------------------


def prior(p: Params, x: Tensor) -> Any:  # x [B@data, D], means [K, D], prior [K]
    def loss(p: Params) -> Tensor:
        distances = (x.unsqueeze(1) - fs.pvary(p["means"], "data")).square().sum(-1)
        joint = fs.pvary(torch.log_softmax(p["prior"], 0), "data") - distances / 2
        # WRONG: joint = torch.log_softmax(p["prior"], 0) - distances / 2
        return -fs.psum(torch.logsumexp(joint, -1).sum(), "data")

    return fs.value_and_grad(loss)(p)


# --- one axis of two ------------------------------------------------------------------------------------------


def pvary_over_two_axes(p: Params, x: Tensor) -> Any:  # x [B@data, T@seq, D]
    def loss(p: Params) -> Tensor:
        w = fs.pvary(p["w"], ("data", "seq"))
        # WRONG: w = fs.pvary(p["w"], "data")
        h = torch.tanh(x @ w)  # BUG: positions are split too
        return fs.pmean(h.square().mean(), ("data", "seq"))

    return fs.value_and_grad(loss)(p)


# --- the slope of an activation -------------------------------------------------------------------------------


def prelu_slope(p: Params, x: Tensor) -> Any:  # x [B@data, D]
    def loss(p: Params) -> Tensor:
        p = fs.pvary(p, "data")
        h = x @ p["w"]
        # WRONG (2 lines): h = x @ fs.pvary(p["w"], "data")
        h = functional.prelu(h, p["slope"])  # BUG
        return fs.pmean(h.square().mean(), "data")

    return fs.value_and_grad(loss)(p)


# --- the first state of a recurrent network -------------------------------------------------------------------


def first_state(p: Params, x: Tensor) -> Any:  # x [B@data, T, D]
    def loss(p: Params) -> Tensor:
        w = fs.pvary(p["w"], "data")
        state = fs.pvary(p["first"], "data")
        # WRONG: state = p["first"]
        for t in range(x.shape[1]):
            state = torch.tanh(x[:, t] + state @ w)  # BUG: in the first step
        return fs.pmean(state.square().mean(), "data")

    return fs.value_and_grad(loss)(p)


# --- weight normalization -------------------------------------------------------------------------------------


def weight_norm(p: Params, x: Tensor) -> Any:  # x [B@data, D], direction [D, F], gain [F]
    def loss(p: Params) -> Tensor:
        w = p["direction"] * (p["gain"] / p["direction"].norm(dim=0))
        # WRONG: direction = fs.pvary(p["direction"], "data")
        return fs.pmean(torch.tanh(x @ fs.pvary(w, "data")).square().mean(), "data")
        # WRONG: w = direction * (p["gain"] / direction.norm(dim=0))  # BUG
        # WRONG: return fs.pmean(torch.tanh(x @ w).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


B, T, D, F = 4, 3, 4, 6
DATA2 = {"data": 2}
W, WIDE, X, Y = normal("w", D, std=0.5), normal("wide", D, D, std=0.5), normal("x", B, D), normal("y", B)
PATCHES = normal("patches", B, T, D)
SQUARE = {"w": WIDE}

PROGRAMS = [
    WrongProgram(
        "class_token_without_pvary", class_token, DATA2, (P(), DATA, DATA), P(),
        ({"token": normal("token", D), "head": W}, PATCHES, Y), "types", "data",
    ),
    WrongProgram(
        "lora_a_without_pvary", lora_a, DATA2, (P(), P(), DATA, DATA), P(),
        ({"a": normal("a", D, 2), "b": normal("b", 2, D)}, WIDE, X, normal("y", B, D)), "types", "data",
    ),
    WrongProgram(
        "prior_without_pvary", prior, DATA2, (P(), DATA), P(),
        ({"means": normal("means", 3, D), "prior": normal("prior", 3)}, X), "types", "data",
    ),
    WrongProgram(
        "pvary_over_one_of_two_axes", pvary_over_two_axes, {"data": 2, "seq": 2}, (P(), P("data", "seq")), P(),
        (SQUARE, normal("x", B, T + 1, D)), "types", "seq",
    ),
    WrongProgram(
        "prelu_slope_without_pvary", prelu_slope, DATA2, (P(), DATA), P(),
        (SQUARE | {"slope": torch.tensor([0.25])}, X), "types", "data",
    ),
    WrongProgram(
        "first_state_without_pvary", first_state, DATA2, (P(), DATA), P(),
        (SQUARE | {"first": normal("first", D)}, PATCHES), "types", "data",
    ),
    WrongProgram(
        "weight_norm_without_pvary", weight_norm, DATA2, (P(), DATA), P(),
        ({"direction": normal("direction", D, F), "gain": normal("gain", F)}, X), "types", "data",
    ),
]  # fmt: skip
