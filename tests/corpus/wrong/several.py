"""Programs with more than one mistake: the first error is at the marked line, and its fix leads to the next.

Legend: B batch, T positions, D width, F hidden width, V vocabulary, E experts; [B@data] is a dim split over an axis;
{V} varies over it, {I} does not.
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
RATE = 0.1


# --- sequence parallelism: the norm, the bias, and the loss -----------------------------------------------------


def sequence_parallel_mlp(p: Params, x: Tensor) -> Any:  # x [T@model, D]
    def loss(p: Params) -> Tensor:
        h = nn.rms_norm(x, fs.pvary(p["norm"], "model"))
        # WRONG: h = nn.rms_norm(x, p["norm"])  # BUG
        h = torch.relu(fs.all_gather(h, "model") @ p["up"] + p["up_b"])
        y = fs.psum_scatter(h @ p["down"], "model") + fs.pvary(p["down_b"], "model")
        # WRONG: y = fs.psum_scatter(h @ p["down"], "model") + p["down_b"]
        return fs.pmean((x + y).square().mean(), "model")
        # WRONG: return (x + y).square().mean()

    return fs.value_and_grad(loss)(p)


# --- a language model on two axes: positions without pvary, a split head without pvary --------------------------


def language_model(p: Params, ids: Tensor, targets: Tensor) -> Any:  # ids [B@data, T], head [D, V@model]
    def loss(p: Params) -> Tensor:
        p = fs.pvary(p, "data")
        # WRONG: table, head = fs.pvary((p["table"], p["head"]), "data")
        h = p["table"][ids] + p["positions"]
        # WRONG: h = table[ids] + p["positions"]  # BUG
        h = torch.tanh(h)
        logits = fs.pvary(h, "model") @ p["head"]
        # WRONG: logits = h @ head
        return nn.cross_entropy(logits, targets, axis="model", over="data")

    return fs.value_and_grad(loss)(p)


# --- FSDP: one gathered value, and the loss of local examples ---------------------------------------------------


def fsdp(p: Params, x: Tensor, y: Tensor) -> Any:  # w1 [D@data, D], w2 [D@data], x [B@data, D]
    def loss(p: Params) -> Tensor:
        p = fs.all_gather(p, "data")
        # WRONG: p = fs.all_gather(p, "data", to="invariant")
        h = torch.tanh(x @ p["w1"])  # BUG
        return fs.pmean((h @ p["w2"] - y).square().mean(), "data")
        # WRONG: return (h @ p["w2"] - y).square().mean()

    value, grads = fs.value_and_grad(loss)(p)
    return {k: p[k] - RATE * grads[k] for k in p}, value


# --- LoRA: an adapter without pvary, gradients averaged again --------------------------------------------------


def lora(p: Params, x: Tensor, y: Tensor) -> Any:  # a [D, R], b [R, D], x and y [B@data, D]
    def loss(p: Params) -> Tensor:
        p = fs.pvary(p, "data")
        # WRONG:
        low = x @ p["a"]  # BUG
        high = low @ p["b"]
        return fs.pmean((x + high - y).square().mean(), "data")

    grads = fs.grad(loss)(p)
    # WRONG: grads = fs.pmean(fs.grad(loss)(p), "data")
    return {k: p[k] - RATE * grads[k] for k in p}


# --- distillation: a teacher that follows local weights, and its local targets ---------------------------------


def distillation(student: Tensor, teacher: Tensor, x: Tensor) -> Any:  # both [D, V], x [B@data, D]
    targets = torch.softmax(x @ teacher, -1)

    def loss(student: Tensor) -> Tensor:
        log_p = torch.log_softmax(x @ fs.pvary(student, "data"), -1)
        # WRONG: log_p = torch.log_softmax(x @ student, -1)  # BUG
        return fs.pmean(functional.kl_div(log_p, targets, reduction="batchmean"), "data")
        # WRONG: return functional.kl_div(log_p, targets, reduction="batchmean")

    value, grad = fs.value_and_grad(loss)(student)
    student = student - RATE * grad
    return student, teacher.lerp(student, 0.1), value


B, T, D, F, V = 4, 4, 4, 6, 8
DATA2, MODEL2, GRID = {"data": 2}, {"model": 2}, {"data": 2, "model": 2}
DATA, MODEL, COLUMNS = P("data"), P("model"), P(None, "model")
X, Y, W = normal("x", B, D), normal("y", B), normal("w", D)
NET = {"w1": normal("w1", D, D, std=0.5), "b1": normal("b1", D), "w2": normal("w2", D)}
MLP = {"norm": normal("norm", D, mean=1.0, std=0.1), "up": normal("up", D, F), "up_b": normal("up_b", F),
       "down": normal("down", F, D), "down_b": normal("down_b", D)}  # fmt: skip
MLP_SPECS = {"norm": P(), "up": COLUMNS, "up_b": MODEL, "down": MODEL, "down_b": P()}
GPT = {"table": normal("table", V, D), "positions": normal("positions", T, D), "head": normal("head", D, V)}
GPT_SPECS = {"table": P(), "positions": P(), "head": COLUMNS}
IDS = torch.arange(B * T).view(B, T) * 3 % V
LORA = {"a": normal("a", D, 2), "b": normal("b", 2, D)}

PROGRAMS = [
    WrongProgram(
        "sequence_parallel_mlp_by_habit", sequence_parallel_mlp, MODEL2, (MLP_SPECS, MODEL), (P(), MLP_SPECS),
        (MLP, X), "types", "model",
    ),
    WrongProgram(
        "language_model_by_habit", language_model, GRID, (GPT_SPECS, DATA, DATA), (P(), GPT_SPECS),
        (GPT, IDS, IDS.roll(-1, 1)), "types", "data",
    ),
    WrongProgram(
        "fsdp_by_habit", fsdp, DATA2, (DATA, DATA, DATA), (DATA, P()), ({"w1": NET["w1"], "w2": NET["w2"]}, X, Y),
        "types", "data",
    ),
    WrongProgram(
        "lora_by_habit", lora, DATA2, (P(), DATA, DATA), P(), (LORA, X, normal("targets", B, D)), "types", "data",
    ),
    WrongProgram(
        "distillation_by_habit", distillation, DATA2, (P(), P(), DATA), P(),
        (normal("student", D, V), normal("teacher", D, V), X), "types", "data",
    ),
]  # fmt: skip
