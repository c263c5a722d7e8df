"""Wrong arguments of the library's own functions: an axis left out or mixed up, specs of another layout, local grads.

Legend: B batch, D width, F hidden width, V vocabulary; [V@model] is a dim split over an axis; {V} varies over it, {I}
does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P, nn
from tests.corpus.wrong.program import WrongProgram, normal

Params = dict[str, Tensor]


# --- embedding and cross-entropy with a split vocabulary ------------------------------------------------------


def embedding_with_axis(table: Tensor, ids: Tensor) -> Tensor:  # table [V@model, D]
    rows = nn.embedding(ids, table, axis="model")
    # WRONG: rows = nn.embedding(ids, table)
    return fs.psum(rows, "model")


def embedding_summed(p: Params, ids: Tensor) -> Any:  # table [V@model, D], w [D, D]
    def loss(p: Params) -> Tensor:
        h = fs.psum(nn.embedding(ids, p["table"], axis="model"), "model")
        # WRONG: h = nn.embedding(ids, p["table"], axis="model")
        y = torch.tanh(h @ p["w"])  # BUG: other ranks have the rows that are zero here
        return y.square().sum()
        # WRONG: return fs.psum(y.square().sum(), "model")

    return fs.value_and_grad(loss)(p)


def cross_entropy_over_examples(w: Tensor, x: Tensor, y: Tensor) -> Any:  # w [D, V], x [B@data, D]
    def loss(w: Tensor) -> Tensor:
        logits = x @ fs.pvary(w, "data")
        return nn.cross_entropy(logits, y, over="data")
        # WRONG cross_entropy_without_over: return nn.cross_entropy(logits, y)
        # WRONG cross_entropy_over_the_wrong_axis: return nn.cross_entropy(logits, y, over="model")

    return fs.value_and_grad(loss)(w)


def cross_entropy_with_axis(p: Params, x: Tensor, y: Tensor) -> Any:  # w [D, D], head [D, V@model]
    def loss(p: Params) -> Tensor:
        h = torch.tanh(x @ p["w"])
        logits = fs.pvary(h, "model") @ p["head"]
        return nn.cross_entropy(logits, y, axis="model")
        # WRONG: return nn.cross_entropy(logits, y)  # softmax of the local words

    return fs.value_and_grad(loss)(p)


# --- optimizers -----------------------------------------------------------------------------------------------


def _loss(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w).square().mean()


def norm_by_its_specs(grads: Params) -> Tensor:  # up [D, F@model], down [F@model, D]
    return fs.optim.global_norm(grads, {"up": P(None, "model"), "down": P("model")})
    # WRONG: return fs.optim.global_norm(grads, P())


def momentum_by_mean_gradients(w: Tensor, state: Any, x: Tensor) -> Any:
    optimizer = fs.optim.sgd(0.1, momentum=0.9)
    grads = fs.pmean(fs.grad(_loss)(fs.pvary(w, "data"), x), "data")
    # WRONG: grads = fs.grad(_loss)(fs.pvary(w, "data"), x)
    return optimizer.update(grads, state, w)  # BUG


# --- unshard, scan, remat, accumulate -------------------------------------------------------------------------


def unshard_by_its_specs(p: Params, x: Tensor) -> Any:  # w [D@data, D]
    def loss(p: Params) -> Tensor:
        p = fs.unshard(p, P("data"), "data")
        # WRONG: p = fs.unshard(p, P(), "data")
        h = torch.tanh(x[:, : len(p["w"])] @ p["w"])
        return fs.pmean(h.square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def block_of_remat(p: Params, x: Tensor) -> Any:
    @fs.remat
    def block(gain: Tensor, w: Tensor, x: Tensor) -> Tensor:
        h = nn.rms_norm(x, gain)  # BUG
        return x + torch.tanh(h @ w)

    def loss(p: Params) -> Tensor:
        p = fs.pvary(p, "data")
        y = block(p["gain"], p["w"], x)
        # WRONG (2 lines): y = block(p["gain"], fs.pvary(p["w"], "data"), x)
        return fs.pmean(y.square().mean(), "data")

    return fs.value_and_grad(loss)(p)


B, D, F, V = 4, 4, 6, 6
DATA2, MODEL2, GRID = {"data": 2}, {"model": 2}, {"data": 2, "model": 2}
DATA, MODEL, COLUMNS = P("data"), P("model"), P(None, "model")
X, W, SQUARE, GAIN = normal("x", B, D), normal("w", D), normal("square", D, D), normal("gain", D, mean=1.0)
TABLE, HEAD = normal("table", V, D), normal("head", D, V)
LOW, LABELS = torch.tensor([0, 2, 1, 0]), torch.tensor([0, 2, 1, 5])

PROGRAMS = [
    WrongProgram(
        "embedding_without_axis", embedding_with_axis, MODEL2, (MODEL, P()), P(), (TABLE, LOW), "verify", "model",
    ),
    WrongProgram(
        "embedding_not_summed", embedding_summed, MODEL2, ({"table": MODEL, "w": P()}, P()),
        (P(), {"table": MODEL, "w": P()}), ({"table": TABLE, "w": SQUARE}, LABELS), "types", "model",
    ),
    WrongProgram(
        "cross_entropy_without_over", cross_entropy_over_examples, DATA2, (P(), DATA, DATA), P(), (HEAD, X, LABELS),
        "types", "data",
    ),
    WrongProgram(
        "cross_entropy_over_the_wrong_axis", cross_entropy_over_examples, GRID, (P(), DATA, DATA), P(),
        (HEAD, X, LABELS), "types", "model",
    ),
    WrongProgram(
        "cross_entropy_without_axis", cross_entropy_with_axis, MODEL2, ({"w": P(), "head": COLUMNS}, P(), P()),
        (P(), {"w": P(), "head": COLUMNS}), ({"w": SQUARE, "head": HEAD}, X, LOW), "types", "model",
    ),
    WrongProgram(
        "norm_by_specs_of_whole_leaves", norm_by_its_specs, MODEL2, ({"up": COLUMNS, "down": MODEL},), P(),
        ({"up": HEAD, "down": TABLE},), "types", "model",
    ),
    WrongProgram(
        "momentum_by_local_gradients", momentum_by_mean_gradients, DATA2, (P(), P(), DATA), P(),
        (W, fs.optim.sgd(0.1, momentum=0.9).init(W), X), "types", "data",
    ),
    WrongProgram(
        "unshard_by_specs_of_whole_leaves", unshard_by_its_specs, DATA2, (DATA, DATA), (P(), DATA),
        ({"w": SQUARE}, X), "types", "data",
    ),
    WrongProgram(
        "block_of_remat_without_pvary", block_of_remat, DATA2, (P(), DATA), P(), ({"gain": GAIN, "w": SQUARE}, X),
        "types", "data",
    ),
]  # fmt: skip
