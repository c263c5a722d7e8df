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
DATA, MODEL = P("data"), P("model")


# --- a bias, where the weight has its pvary -------------------------------------------------------------------


def bias_without_pvary(p: Params, x: Tensor, y: Tensor) -> Any:  # x [B@data, D], y [B@data]
    def loss(p: Params) -> Tensor:
        w1, w2 = fs.pvary((p["w1"], p["w2"]), "data")
        h = torch.tanh(x @ w1 + p["b1"])  # BUG
        return fs.pmean((h @ w2 - y).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def bias(p: Params, x: Tensor, y: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        p = fs.pvary(p, "data")
        h = torch.tanh(x @ p["w1"] + p["b1"])
        return fs.pmean((h @ p["w2"] - y).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def last_bias_without_pvary(p: Params, x: Tensor, y: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        prediction = x @ fs.pvary(p["w"], "data") + p["b"]  # BUG
        return fs.pmean((prediction - y).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def last_bias(p: Params, x: Tensor, y: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        prediction = x @ fs.pvary(p["w"], "data") + fs.pvary(p["b"], "data")
        return fs.pmean((prediction - y).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


# --- an embedding, looked up by local ids ---------------------------------------------------------------------


def embedding_without_pvary(p: Params, ids: Tensor, y: Tensor) -> Any:  # ids [B@data, T], y [B@data]
    def loss(p: Params) -> Tensor:
        h = p["table"][ids].mean(1)  # BUG
        return fs.pmean((h @ fs.pvary(p["w"], "data") - y).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def embedding(p: Params, ids: Tensor, y: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        h = fs.pvary(p["table"], "data")[ids].mean(1)
        return fs.pmean((h @ fs.pvary(p["w"], "data") - y).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


# --- a table of positions added to local embeddings -----------------------------------------------------------


def position_table_without_pvary(p: Params, x: Tensor, y: Tensor) -> Any:  # x [B@data, T, D], y [B@data]
    w = fs.pvary(p["w"], "data")

    def loss(positions: Tensor) -> Tensor:
        h = torch.tanh(x + positions)  # BUG
        return fs.pmean((h.mean(1) @ w - y).square().mean(), "data")

    return fs.value_and_grad(loss)(p["positions"])


def position_table(p: Params, x: Tensor, y: Tensor) -> Any:
    w = fs.pvary(p["w"], "data")

    def loss(positions: Tensor) -> Tensor:
        h = torch.tanh(x + fs.pvary(positions, "data"))
        return fs.pmean((h.mean(1) @ w - y).square().mean(), "data")

    return fs.value_and_grad(loss)(p["positions"])


# --- the temperature of a contrastive loss --------------------------------------------------------------------


def logit_scale_without_pvary(p: Params, images: Tensor, texts: Tensor) -> Any:  # both [B@data, D]
    def loss(p: Params) -> Tensor:
        w = fs.pvary(p["w"], "data")
        everything = fs.all_gather(functional.normalize(texts @ w, dim=-1), "data")
        similarity = functional.normalize(images @ w, dim=-1) @ everything.T
        logits = p["logit_scale"].exp() * similarity  # BUG
        targets = fs.axis_index("data") * len(images) + torch.arange(len(images))
        return nn.cross_entropy(logits, targets, over="data")

    return fs.value_and_grad(loss)(p)


def logit_scale(p: Params, images: Tensor, texts: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        w = fs.pvary(p["w"], "data")
        everything = fs.all_gather(functional.normalize(texts @ w, dim=-1), "data")
        similarity = functional.normalize(images @ w, dim=-1) @ everything.T
        logits = fs.pvary(p["logit_scale"], "data").exp() * similarity
        targets = fs.axis_index("data") * len(images) + torch.arange(len(images))
        return nn.cross_entropy(logits, targets, over="data")

    return fs.value_and_grad(loss)(p)


# --- a class token put before local patches -------------------------------------------------------------------


def class_token_without_pvary(p: Params, patches: Tensor, y: Tensor) -> Any:  # patches [B@data, T, D], y [B@data]
    def loss(p: Params) -> Tensor:
        token = p["token"].expand(len(patches), 1, -1)
        h = torch.cat([token, patches], 1)  # BUG
        h = nn.attention(h.unsqueeze(1), h.unsqueeze(1), h.unsqueeze(1)).squeeze(1)
        return fs.pmean((h[:, 0] @ fs.pvary(p["head"], "data") - y).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def class_token(p: Params, patches: Tensor, y: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        token = fs.pvary(p["token"], "data").expand(len(patches), 1, -1)
        h = torch.cat([token, patches], 1)
        h = nn.attention(h.unsqueeze(1), h.unsqueeze(1), h.unsqueeze(1)).squeeze(1)
        return fs.pmean((h[:, 0] @ fs.pvary(p["head"], "data") - y).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


# --- LoRA beside a frozen weight ------------------------------------------------------------------------------


def lora_a_without_pvary(p: Params, base: Tensor, x: Tensor, y: Tensor) -> Any:  # base [D, D]{I}, x and y [B@data, D]
    def loss(p: Params) -> Tensor:
        h = x @ base  # frozen: it needs no pvary
        low = x @ p["a"]  # BUG
        return fs.pmean((h + low @ fs.pvary(p["b"], "data") - y).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def lora_a(p: Params, base: Tensor, x: Tensor, y: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        h = x @ base
        low = x @ fs.pvary(p["a"], "data")
        return fs.pmean((h + low @ fs.pvary(p["b"], "data") - y).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def lora_b_split_without_pvary(
    p: Params, base: Tensor, x: Tensor
) -> Any:  # base [D, F@model], a [D, R], b [R, F@model]
    h = fs.pvary(x, "model") @ base

    def loss(p: Params) -> Tensor:
        low = x @ p["a"]
        y = h + low @ p["b"]  # BUG: the gradient of a is of the local columns
        return fs.psum(torch.tanh(y).square().sum(), "model")

    return fs.value_and_grad(loss)(p)


def lora_b_split(p: Params, base: Tensor, x: Tensor) -> Any:
    h = fs.pvary(x, "model") @ base

    def loss(p: Params) -> Tensor:
        low = x @ p["a"]
        y = h + fs.pvary(low, "model") @ p["b"]
        return fs.psum(torch.tanh(y).square().sum(), "model")

    return fs.value_and_grad(loss)(p)


# --- FiLM: features scaled and shifted by a condition ---------------------------------------------------------


def film_without_pvary(p: Params, x: Tensor, condition: Tensor) -> Any:  # x [B@data, D], condition [D]{I}
    def loss(p: Params) -> Tensor:
        scale, shift = (condition @ p["film"]).chunk(2)
        h = x @ fs.pvary(p["w"], "data")
        h = h * (1 + scale) + fs.pvary(shift, "data")  # BUG: one condition for all examples
        return fs.pmean(torch.tanh(h).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def film(p: Params, x: Tensor, condition: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        scale, shift = fs.pvary(condition @ p["film"], "data").chunk(2)
        h = x @ fs.pvary(p["w"], "data")
        h = h * (1 + scale) + shift
        return fs.pmean(torch.tanh(h).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


# --- learned weights of two losses (Kendall) ------------------------------------------------------------------


def loss_weights_without_pvary(p: Params, x: Tensor, y: Tensor, z: Tensor) -> Any:  # x [B@data, D], y and z [B@data]
    def loss(p: Params) -> Tensor:
        w = fs.pvary(p["w"], "data")
        errors = torch.stack([(x @ w - y).square().mean(), (x @ w - z).abs().mean()])
        weighted = (-p["log_var"]).exp() * errors  # BUG
        return fs.pmean(weighted.sum(), "data") + p["log_var"].sum()

    return fs.value_and_grad(loss)(p)


def loss_weights(p: Params, x: Tensor, y: Tensor, z: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        w = fs.pvary(p["w"], "data")
        errors = torch.stack([(x @ w - y).square().mean(), (x @ w - z).abs().mean()])
        return ((-p["log_var"]).exp() * fs.pmean(errors, "data")).sum() + p["log_var"].sum()

    return fs.value_and_grad(loss)(p)


# --- the prior of a mixture -----------------------------------------------------------------------------------


def prior_without_pvary(p: Params, x: Tensor) -> Any:  # x [B@data, D], means [K, D], prior [K]
    def loss(p: Params) -> Tensor:
        distances = (x.unsqueeze(1) - fs.pvary(p["means"], "data")).square().sum(-1)
        joint = torch.log_softmax(p["prior"], 0) - distances / 2  # BUG
        return -fs.psum(torch.logsumexp(joint, -1).sum(), "data")

    return fs.value_and_grad(loss)(p)


def prior(p: Params, x: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        distances = (x.unsqueeze(1) - fs.pvary(p["means"], "data")).square().sum(-1)
        joint = fs.pvary(torch.log_softmax(p["prior"], 0), "data") - distances / 2
        return -fs.psum(torch.logsumexp(joint, -1).sum(), "data")

    return fs.value_and_grad(loss)(p)


# --- one axis of two ------------------------------------------------------------------------------------------


def pvary_over_one_of_two_axes(p: Params, x: Tensor) -> Any:  # x [B@data, T@seq, D]
    def loss(p: Params) -> Tensor:
        w = fs.pvary(p["w"], "data")
        h = torch.tanh(x @ w)  # BUG: positions are split too
        return fs.pmean(h.square().mean(), ("data", "seq"))

    return fs.value_and_grad(loss)(p)


def pvary_over_two_axes(p: Params, x: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        w = fs.pvary(p["w"], ("data", "seq"))
        h = torch.tanh(x @ w)
        return fs.pmean(h.square().mean(), ("data", "seq"))

    return fs.value_and_grad(loss)(p)


# --- the slope of an activation -------------------------------------------------------------------------------


def prelu_slope_without_pvary(p: Params, x: Tensor) -> Any:  # x [B@data, D]
    def loss(p: Params) -> Tensor:
        h = x @ fs.pvary(p["w"], "data")
        h = functional.prelu(h, p["slope"])  # BUG
        return fs.pmean(h.square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def prelu_slope(p: Params, x: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        p = fs.pvary(p, "data")
        h = x @ p["w"]
        h = functional.prelu(h, p["slope"])
        return fs.pmean(h.square().mean(), "data")

    return fs.value_and_grad(loss)(p)


# --- the first state of a recurrent network -------------------------------------------------------------------


def first_state_without_pvary(p: Params, x: Tensor) -> Any:  # x [B@data, T, D]
    def loss(p: Params) -> Tensor:
        w = fs.pvary(p["w"], "data")
        state = p["first"]
        for t in range(x.shape[1]):
            state = torch.tanh(x[:, t] + state @ w)  # BUG: in the first step
        return fs.pmean(state.square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def first_state(p: Params, x: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        w = fs.pvary(p["w"], "data")
        state = fs.pvary(p["first"], "data")
        for t in range(x.shape[1]):
            state = torch.tanh(x[:, t] + state @ w)
        return fs.pmean(state.square().mean(), "data")

    return fs.value_and_grad(loss)(p)


# --- weight normalization -------------------------------------------------------------------------------------


def weight_norm_without_pvary(p: Params, x: Tensor) -> Any:  # x [B@data, D], direction [D, F], gain [F]
    def loss(p: Params) -> Tensor:
        direction = fs.pvary(p["direction"], "data")
        w = direction * (p["gain"] / direction.norm(dim=0))  # BUG
        return fs.pmean(torch.tanh(x @ w).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def weight_norm(p: Params, x: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        w = p["direction"] * (p["gain"] / p["direction"].norm(dim=0))
        return fs.pmean(torch.tanh(x @ fs.pvary(w, "data")).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


# --- a router of experts on data-parallel tokens --------------------------------------------------------------


def router_without_pvary(p: Params, x: Tensor) -> Any:  # x [B@data, D], router [D, E], experts [E, D, D]
    def loss(p: Params) -> Tensor:
        gates = torch.softmax(x @ p["router"], -1)  # BUG
        y = torch.einsum("be,bd,edf->bf", gates, x, fs.pvary(p["experts"], "data"))
        return fs.pmean(y.square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def router(p: Params, x: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        gates = torch.softmax(x @ fs.pvary(p["router"], "data"), -1)
        y = torch.einsum("be,bd,edf->bf", gates, x, fs.pvary(p["experts"], "data"))
        return fs.pmean(y.square().mean(), "data")

    return fs.value_and_grad(loss)(p)


# --- keys and values made from a replicated memory, for split heads -------------------------------------------


def cross_attention_memory_without_pvary(p: Params, x: Tensor, memory: Tensor) -> Any:  # heads [H@model, D, D]
    def loss(p: Params) -> Tensor:
        context = torch.tanh(memory @ p["memory"])  # [T, D], the same on every rank
        q = torch.einsum("btd,hde->bhte", fs.pvary(x, "model"), p["q"])
        k = torch.einsum("td,hde->hte", context, p["k"])  # BUG: the gradient of context is of the local heads
        weights = torch.softmax(torch.einsum("bhte,hse->bhts", q, k), -1)
        return fs.psum(weights.square().sum(), "model")

    return fs.value_and_grad(loss)(p)


def cross_attention_memory(p: Params, x: Tensor, memory: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        context = fs.pvary(torch.tanh(memory @ p["memory"]), "model")
        q = torch.einsum("btd,hde->bhte", fs.pvary(x, "model"), p["q"])
        k = torch.einsum("td,hde->hte", context, p["k"])
        weights = torch.softmax(torch.einsum("bhte,hse->bhts", q, k), -1)
        return fs.psum(weights.square().sum(), "model")

    return fs.value_and_grad(loss)(p)


# --- the gradient of the inputs -------------------------------------------------------------------------------


def saliency_without_pvary(p: Params, x: Tensor) -> Tensor:  # x [B, D]{I}, up [D, F@model]
    def score(x: Tensor) -> Tensor:
        h = torch.tanh(x @ p["up"])  # BUG: the gradient of x is of the local columns
        return fs.psum(h.square().sum(), "model")

    return fs.grad(score)(x)


def saliency(p: Params, x: Tensor) -> Tensor:
    def score(x: Tensor) -> Tensor:
        h = torch.tanh(fs.pvary(x, "model") @ p["up"])
        return fs.psum(h.square().sum(), "model")

    return fs.grad(score)(x)


B, T, D, F = 4, 3, 4, 6
DATA2, MODEL2 = {"data": 2}, {"model": 2}
W, WIDE, X, Y = normal("w", D, std=0.5), normal("wide", D, D, std=0.5), normal("x", B, D), normal("y", B)
PATCHES = normal("patches", B, T, D)
SQUARE = {"w": WIDE}

PROGRAMS = [
    WrongProgram(
        bias_without_pvary, bias, DATA2, (P(), DATA, DATA), P(), ({"w1": WIDE, "b1": normal("b1", D), "w2": W}, X, Y),
        "types", "data",
    ),
    WrongProgram(
        last_bias_without_pvary, last_bias, DATA2, (P(), DATA, DATA), P(), ({"w": W, "b": normal("b")}, X, Y),
        "types", "data",
    ),
    WrongProgram(
        embedding_without_pvary, embedding, DATA2, (P(), DATA, DATA), P(),
        ({"table": normal("table", 8, D), "w": W}, torch.arange(B * T).view(B, T) * 3 % 8, Y), "types", "data",
    ),
    WrongProgram(
        position_table_without_pvary, position_table, DATA2, (P(), DATA, DATA), P(),
        ({"positions": normal("positions", T, D), "w": W}, PATCHES, Y), "types", "data",
    ),
    WrongProgram(
        logit_scale_without_pvary, logit_scale, DATA2, (P(), DATA, DATA), P(),
        (SQUARE | {"logit_scale": torch.tensor(0.7)}, X, normal("texts", B, D)), "types", "data",
    ),
    WrongProgram(
        class_token_without_pvary, class_token, DATA2, (P(), DATA, DATA), P(),
        ({"token": normal("token", D), "head": W}, PATCHES, Y), "types", "data",
    ),
    WrongProgram(
        lora_a_without_pvary, lora_a, DATA2, (P(), P(), DATA, DATA), P(),
        ({"a": normal("a", D, 2), "b": normal("b", 2, D)}, WIDE, X, normal("y", B, D)), "types", "data",
    ),
    WrongProgram(
        lora_b_split_without_pvary, lora_b_split, MODEL2, ({"a": P(), "b": P(None, "model")}, P(None, "model"), P()),
        (P(), {"a": P(), "b": P(None, "model")}),
        ({"a": normal("a", D, 2), "b": normal("b", 2, F)}, normal("base", D, F, std=0.5), X), "types", "model",
    ),
    WrongProgram(
        film_without_pvary, film, DATA2, (P(), DATA, P()), P(),
        ({"film": normal("film", 3, 2 * D), "w": WIDE}, X, normal("condition", 3)), "types", "data",
    ),
    WrongProgram(
        loss_weights_without_pvary, loss_weights, DATA2, (P(), DATA, DATA, DATA), P(),
        ({"w": W, "log_var": torch.tensor([0.5, -0.2])}, X, Y, normal("z", B)), "types", "data",
    ),
    WrongProgram(
        prior_without_pvary, prior, DATA2, (P(), DATA), P(),
        ({"means": normal("means", 3, D), "prior": normal("prior", 3)}, X), "types", "data",
    ),
    WrongProgram(
        pvary_over_one_of_two_axes, pvary_over_two_axes, {"data": 2, "seq": 2}, (P(), P("data", "seq")), P(),
        (SQUARE, normal("x", B, T + 1, D)), "types", "seq",
    ),
    WrongProgram(
        prelu_slope_without_pvary, prelu_slope, DATA2, (P(), DATA), P(),
        (SQUARE | {"slope": torch.tensor([0.25])}, X), "types", "data",
    ),
    WrongProgram(
        first_state_without_pvary, first_state, DATA2, (P(), DATA), P(),
        (SQUARE | {"first": normal("first", D)}, PATCHES), "types", "data",
    ),
    WrongProgram(
        weight_norm_without_pvary, weight_norm, DATA2, (P(), DATA), P(),
        ({"direction": normal("direction", D, F), "gain": normal("gain", F)}, X), "types", "data",
    ),
    WrongProgram(
        router_without_pvary, router, DATA2, (P(), DATA), P(),
        ({"router": normal("router", D, 3), "experts": normal("experts", 3, D, D)}, X), "types", "data",
    ),
    WrongProgram(
        cross_attention_memory_without_pvary, cross_attention_memory, MODEL2,
        ({"memory": P(), "q": MODEL, "k": MODEL}, P(), P()), (P(), {"memory": P(), "q": MODEL, "k": MODEL}),
        ({"memory": normal("memory", D, D), "q": normal("q", 2, D, D), "k": normal("k", 2, D, D)}, PATCHES,
         normal("context", T, D)), "types", "model",
    ),
    WrongProgram(
        saliency_without_pvary, saliency, MODEL2, ({"up": P(None, "model")}, P()), P(),
        ({"up": normal("up", D, F)}, X), "types", "model",
    ),
]  # fmt: skip
