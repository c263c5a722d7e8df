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


# --- data parallelism by in_specs alone: no pvary, no mean -----------------------------------------------------


def single_device_training_step(p: Params, x: Tensor, y: Tensor) -> Any:  # x [B@data, D], y [B@data]
    def loss(p: Params) -> Tensor:
        h = torch.tanh(x @ p["w1"] + p["b1"])  # BUG
        errors = h @ p["w2"] - y
        return errors.square().mean()

    value, grads = fs.value_and_grad(loss)(p)
    return {k: p[k] - RATE * grads[k] for k in p}, value


def data_parallel_training_step(p: Params, x: Tensor, y: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        p = fs.pvary(p, "data")
        h = torch.tanh(x @ p["w1"] + p["b1"])
        errors = h @ p["w2"] - y
        return fs.pmean(errors.square().mean(), "data")

    value, grads = fs.value_and_grad(loss)(p)
    return {k: p[k] - RATE * grads[k] for k in p}, value


# --- Megatron's MLP: no pvary at the entry, the bias inside the sum --------------------------------------------


def tensor_parallel_mlp_by_habit(p: Params, x: Tensor) -> Any:  # up [D, F@model], down [F@model, D]
    def loss(p: Params) -> Tensor:
        h = nn.rms_norm(x, p["norm"])
        h = torch.relu(h @ p["up"] + p["up_b"])  # BUG
        y = fs.psum(h @ p["down"] + p["down_b"], "model")
        return (x + y).square().mean()

    return fs.value_and_grad(loss)(p)


def tensor_parallel_mlp(p: Params, x: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        h = nn.rms_norm(x, p["norm"])
        h = torch.relu(fs.pvary(h, "model") @ p["up"] + p["up_b"])
        y = fs.psum(h @ p["down"], "model") + p["down_b"]
        return (x + y).square().mean()

    return fs.value_and_grad(loss)(p)


# --- sequence parallelism: the norm, the bias, and the loss -----------------------------------------------------


def sequence_parallel_mlp_by_habit(p: Params, x: Tensor) -> Any:  # x [T@model, D]
    def loss(p: Params) -> Tensor:
        h = nn.rms_norm(x, p["norm"])  # BUG
        h = torch.relu(fs.all_gather(h, "model") @ p["up"] + p["up_b"])
        y = fs.psum_scatter(h @ p["down"], "model") + p["down_b"]
        return (x + y).square().mean()

    return fs.value_and_grad(loss)(p)


def sequence_parallel_mlp(p: Params, x: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        h = nn.rms_norm(x, fs.pvary(p["norm"], "model"))
        h = torch.relu(fs.all_gather(h, "model") @ p["up"] + p["up_b"])
        y = fs.psum_scatter(h @ p["down"], "model") + fs.pvary(p["down_b"], "model")
        return fs.pmean((x + y).square().mean(), "model")

    return fs.value_and_grad(loss)(p)


# --- a language model on two axes: positions without pvary, a split head without pvary --------------------------


def language_model_by_habit(p: Params, ids: Tensor, targets: Tensor) -> Any:  # ids [B@data, T], head [D, V@model]
    def loss(p: Params) -> Tensor:
        table, head = fs.pvary((p["table"], p["head"]), "data")
        h = table[ids] + p["positions"]  # BUG
        h = torch.tanh(h)
        logits = h @ head
        return nn.cross_entropy(logits, targets, axis="model", over="data")

    return fs.value_and_grad(loss)(p)


def language_model(p: Params, ids: Tensor, targets: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        p = fs.pvary(p, "data")
        h = p["table"][ids] + p["positions"]
        h = torch.tanh(h)
        logits = fs.pvary(h, "model") @ p["head"]
        return nn.cross_entropy(logits, targets, axis="model", over="data")

    return fs.value_and_grad(loss)(p)


# --- FSDP: one gathered value, and the loss of local examples ---------------------------------------------------


def fsdp_by_habit(p: Params, x: Tensor, y: Tensor) -> Any:  # w1 [D@data, D], w2 [D@data], x [B@data, D]
    def loss(p: Params) -> Tensor:
        p = fs.all_gather(p, "data", to="invariant")
        h = torch.tanh(x @ p["w1"])  # BUG
        return (h @ p["w2"] - y).square().mean()

    value, grads = fs.value_and_grad(loss)(p)
    return {k: p[k] - RATE * grads[k] for k in p}, value


def fsdp(p: Params, x: Tensor, y: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        p = fs.all_gather(p, "data")
        h = torch.tanh(x @ p["w1"])
        return fs.pmean((h @ p["w2"] - y).square().mean(), "data")

    value, grads = fs.value_and_grad(loss)(p)
    return {k: p[k] - RATE * grads[k] for k in p}, value


# --- LoRA: an adapter without pvary, gradients averaged again --------------------------------------------------


def lora_by_habit(p: Params, x: Tensor, y: Tensor) -> Any:  # a [D, R], b [R, D], x and y [B@data, D]
    def loss(p: Params) -> Tensor:
        low = x @ p["a"]  # BUG
        high = low @ p["b"]
        return fs.pmean((x + high - y).square().mean(), "data")

    grads = fs.pmean(fs.grad(loss)(p), "data")
    return {k: p[k] - RATE * grads[k] for k in p}


def lora(p: Params, x: Tensor, y: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        p = fs.pvary(p, "data")
        low = x @ p["a"]
        high = low @ p["b"]
        return fs.pmean((x + high - y).square().mean(), "data")

    grads = fs.grad(loss)(p)
    return {k: p[k] - RATE * grads[k] for k in p}


# --- experts: whole gates for local experts, and tokens without pvary ------------------------------------------


def experts_by_habit(p: Params, x: Tensor) -> Any:  # experts [E@model, D, D], router [D, E]
    def loss(p: Params) -> Tensor:
        t = nn.rms_norm(x, p["norm"])
        gates = torch.softmax(t @ p["router"], -1)
        mine = fs.axis_index("model") * len(p["experts"]) + torch.arange(len(p["experts"]))
        h = torch.einsum("td,edf->tef", t, p["experts"])  # BUG
        y = (h * gates[:, mine].unsqueeze(-1)).sum(1)
        return torch.tanh(fs.psum(y, "model")).square().mean()

    return fs.value_and_grad(loss)(p)


def experts(p: Params, x: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        t = nn.rms_norm(x, p["norm"])
        gates = fs.pslice(torch.softmax(t @ p["router"], -1), "model", 1)
        h = torch.einsum("td,edf->tef", fs.pvary(t, "model"), p["experts"])
        y = (h * gates.unsqueeze(-1)).sum(1)
        return torch.tanh(fs.psum(y, "model")).square().mean()

    return fs.value_and_grad(loss)(p)


# --- clipping the local gradient by its local norm, and a step with it -----------------------------------------


def clipped_step_by_habit(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    def loss(w: Tensor) -> Tensor:
        return (x @ w - y).square().mean()

    grad = fs.grad(loss)(fs.pvary(w, "data"))
    grad = grad * torch.clamp(0.5 / grad.norm(), max=1.0)  # the norm of the local gradient
    return w - RATE * grad  # BUG


def clipped_step(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    def loss(w: Tensor) -> Tensor:
        return fs.pmean((x @ fs.pvary(w, "data") - y).square().mean(), "data")

    grad = fs.grad(loss)(w)
    grad = grad * torch.clamp(0.5 / grad.norm(), max=1.0)
    return w - RATE * grad


# --- batch norm: local statistics, its weights without pvary, and local running means ---------------------------


def batch_norm_by_habit(p: Params, running: Tensor, x: Tensor) -> Any:  # x [B@data, D]
    def loss(p: Params) -> tuple[Tensor, Tensor]:
        mean, variance = x.mean(0), x.var(0, correction=0)
        h = (x - mean) * torch.rsqrt(variance + 1e-5)
        h = torch.tanh(h * p["w"] + p["b"])  # BUG
        return fs.pmean(h.square().mean(), "data"), mean

    (value, mean), grads = fs.value_and_grad(loss, has_aux=True)(p)
    return grads, value, 0.9 * running + 0.1 * mean


def batch_norm(p: Params, running: Tensor, x: Tensor) -> Any:
    mean = fs.pmean(x.mean(0), "data")
    centered = x - fs.pvary(mean, "data")
    variance = fs.pvary(fs.pmean(centered.square().mean(0), "data"), "data")

    def loss(p: Params) -> Tensor:
        p = fs.pvary(p, "data")
        h = centered * torch.rsqrt(variance + 1e-5)
        h = torch.tanh(h * p["w"] + p["b"])
        return fs.pmean(h.square().mean(), "data")

    value, grads = fs.value_and_grad(loss)(p)
    return grads, value, 0.9 * running + 0.1 * mean


# --- a contrastive loss: the temperature, and pairs that are numbered locally ----------------------------------


def contrastive_by_habit(p: Params, x: Tensor, y: Tensor) -> Any:  # x and y [B@data, D]
    def loss(p: Params) -> Tensor:
        w = fs.pvary(p["w"], "data")
        logits = (x @ w) @ fs.all_gather(y @ w, "data").T
        logits = logits * p["scale"]  # BUG
        targets = torch.arange(len(x))  # of all columns, these are the first rank's
        return nn.cross_entropy(logits, targets, over="data")

    return fs.value_and_grad(loss)(p)


def contrastive(p: Params, x: Tensor, y: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        p = fs.pvary(p, "data")
        logits = (x @ p["w"]) @ fs.all_gather(y @ p["w"], "data").T
        logits = logits * p["scale"]
        targets = fs.axis_index("data") * len(x) + torch.arange(len(x))
        return nn.cross_entropy(logits, targets, over="data")

    return fs.value_and_grad(loss)(p)


# --- two axes: pvary over one, and the mean over one -----------------------------------------------------------


def two_axes_by_habit(w: Tensor, x: Tensor) -> Any:  # x [B@data, T@seq, D]
    def loss(w: Tensor) -> Tensor:
        h = torch.tanh(x @ fs.pvary(w, "data"))  # BUG
        return fs.pmean(h.square().mean(), "data")

    return fs.value_and_grad(loss)(w)


def two_axes(w: Tensor, x: Tensor) -> Any:
    def loss(w: Tensor) -> Tensor:
        h = torch.tanh(x @ fs.pvary(w, ("data", "seq")))
        return fs.pmean(h.square().mean(), ("data", "seq"))

    return fs.value_and_grad(loss)(w)


# --- distillation: a teacher that follows local weights, and its local targets ---------------------------------


def distillation_by_habit(student: Tensor, teacher: Tensor, x: Tensor) -> Any:  # both [D, V], x [B@data, D]
    targets = torch.softmax(x @ teacher, -1)  # no gradient: it needs no pvary

    def loss(student: Tensor) -> Tensor:
        log_p = torch.log_softmax(x @ student, -1)  # BUG
        return functional.kl_div(log_p, targets, reduction="batchmean")

    value, grad = fs.value_and_grad(loss)(student)
    student = student - RATE * grad
    return student, teacher.lerp(student, 0.1), value


def distillation(student: Tensor, teacher: Tensor, x: Tensor) -> Any:
    targets = torch.softmax(x @ teacher, -1)

    def loss(student: Tensor) -> Tensor:
        log_p = torch.log_softmax(x @ fs.pvary(student, "data"), -1)
        return fs.pmean(functional.kl_div(log_p, targets, reduction="batchmean"), "data")

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
MOE = {"norm": MLP["norm"], "router": normal("router", D, 4), "experts": normal("experts", 4, D, D)}
MOE_SPECS = {"norm": P(), "router": P(), "experts": MODEL}
NORM = {"w": normal("gain", D, mean=1.0), "b": normal("shift", D)}
CLIP = {"w": normal("square", D, D, std=0.5), "scale": torch.tensor(1.5)}

PROGRAMS = [
    WrongProgram(
        single_device_training_step, data_parallel_training_step, DATA2, (P(), DATA, DATA), P(), (NET, X, Y), "types",
        "data",
    ),
    WrongProgram(
        tensor_parallel_mlp_by_habit, tensor_parallel_mlp, MODEL2, (MLP_SPECS, P()), (P(), MLP_SPECS), (MLP, X),
        "types", "model",
    ),
    WrongProgram(
        sequence_parallel_mlp_by_habit, sequence_parallel_mlp, MODEL2, (MLP_SPECS, MODEL), (P(), MLP_SPECS), (MLP, X),
        "types", "model",
    ),
    WrongProgram(
        language_model_by_habit, language_model, GRID, (GPT_SPECS, DATA, DATA), (P(), GPT_SPECS), (GPT, IDS,
        IDS.roll(-1, 1)), "types", "data",
    ),
    WrongProgram(
        fsdp_by_habit, fsdp, DATA2, (DATA, DATA, DATA), (DATA, P()), ({"w1": NET["w1"], "w2": NET["w2"]}, X, Y),
        "types", "data",
    ),
    WrongProgram(
        lora_by_habit, lora, DATA2, (P(), DATA, DATA), P(), (LORA, X, normal("targets", B, D)), "types", "data"
    ),
    WrongProgram(experts_by_habit, experts, MODEL2, (MOE_SPECS, P()), (P(), MOE_SPECS), (MOE, X), "types", "model"),
    WrongProgram(clipped_step_by_habit, clipped_step, DATA2, (P(), DATA, DATA), P(), (W, X, Y), "types", "data"),
    WrongProgram(batch_norm_by_habit, batch_norm, DATA2, (P(), P(), DATA), P(), (NORM, W, X), "types", "data"),
    WrongProgram(
        contrastive_by_habit, contrastive, DATA2, (P(), DATA, DATA), P(), (CLIP, X, normal("texts", B, D)), "types",
        "data",
    ),
    WrongProgram(
        two_axes_by_habit, two_axes, {"data": 2, "seq": 2}, (P(), P("data", "seq")), P(), (NET["w1"], normal("tokens",
        B, T, D)), "types", "seq",
    ),
    WrongProgram(
        distillation_by_habit, distillation, DATA2, (P(), P(), DATA), P(), (normal("student", D, V), normal("teacher",
        D, V), X), "types", "data",
    ),
]  # fmt: skip
