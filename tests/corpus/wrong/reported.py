"""Bugs of parallel programs from public reports. The programs are ours, and as small as the mistake allows.

Legend: B batch, T positions, D width, E experts, V vocabulary; [T@model] is a dim split over an axis; {V} varies over
the axis of the pattern, {I} does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P, nn
from tests.corpus.wrong.program import WrongProgram

normal = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
Params = dict[str, Tensor]


def trained(loss: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return a program that computes the gradients of a loss, and the loss."""

    @functools.wraps(loss)
    def step(p: Params, *batch: Tensor) -> dict[str, Any]:
        value, grads = fs.value_and_grad(loss)(p, *batch)
        return {"grads": grads, "loss": value}

    return step


# --- a tied embedding: one leaf, two uses, two gradients ------------------------------------------------------


@trained
def tied(p: Params, ids: Tensor, targets: Tensor) -> Tensor:  # [T@model]
    wte = fs.pvary(p["wte"], "model")
    # WRONG: h = nn.embedding(ids, fs.pvary(p["wte"], "model"))  # [T@model, D]
    return nn.cross_entropy(nn.embedding(ids, wte) @ wte.T, targets, over="model")
    # WRONG: logits = h @ p["wte"].T  # BUG: the gradient of this use is not summed over ranks
    # WRONG: return nn.cross_entropy(logits, targets, over="model")


# --- a replicated router that feeds experts on other ranks ----------------------------------------------------


@trained
def router(p: Params, x: Tensor) -> Tensor:  # x [T, D]{I}, experts [E@model, D, D]
    gates = torch.softmax(x @ p["router"], -1)
    local_gates = fs.pslice(gates, "model", dim=1)  # [T, E@model]; the transpose gathers
    # WRONG: mine = fs.axis_index("model") * len(p["experts"]) + torch.arange(len(p["experts"]))
    # WRONG: local_gates = gates.index_select(1, mine)  # BUG: the gradient is of the local experts only
    y = torch.einsum("te,td,edf->tf", local_gates, fs.pvary(x, "model"), p["experts"])
    return fs.psum(y, "model").square().sum()


# --- negatives of other ranks, without their gradient ---------------------------------------------------------


@trained
def contrastive(p: Params, x: Tensor) -> Tensor:  # x [B@data, D]
    z = x @ fs.pvary(p["w"], "data")
    logits = z @ fs.all_gather(z, "data").T
    # WRONG: gathered = fs.all_gather(z, "data", to="invariant")  # its transpose is a slice, not the sum over the ranks
    # WRONG: logits = z @ gathered.T  # BUG
    return nn.cross_entropy(logits, fs.axis_index("data") * len(x) + torch.arange(len(x)), over="data")


# --- a gradient norm that counts replicated leaves on every rank ----------------------------------------------


def norm(grads: Params) -> dict[str, Tensor]:  # bias [D]{I}, up [D, F@model]
    total = grads["bias"].square().sum() + fs.psum(grads["up"].square().sum(), "model")
    # WRONG: parts = [g.square().sum() for g in grads.values()]
    return {"norm": total.sqrt()}
    # WRONG: total = parts[0] + parts[1]  # BUG
    # WRONG: return {"norm": fs.psum(total, "model").sqrt()}


# --- a gradient reduced by the transpose of its gather, and once more by hand ---------------------------------


def _fsdp_grads(p: Params, x: Tensor) -> Params:  # w [D@data, D], x [B@data, D]
    def loss(p: Params) -> Tensor:
        return fs.pmean((x @ fs.all_gather(p["w"], "data")).square().mean(), "data")

    return fs.grad(loss)(p)


def reduced_twice(p: Params, x: Tensor) -> Params:
    return {"w": p["w"] - 0.1 * _fsdp_grads(p, x)["w"]}
    # WRONG: grads = fs.psum(_fsdp_grads(p, x), "data")  # BUG: adds up the gradients of different rows
    # WRONG: return {"w": p["w"] - 0.1 * grads["w"]}


# --- a mean for each of the microbatches, which have unequal counts -------------------------------------------


def _errors(p: Params, x: Tensor) -> Tensor:
    return (x @ fs.pvary(p["w"], "data")).square().sum(-1)  # [B@data]


def accumulation(p: Params, x: Tensor, mask: Tensor) -> dict[str, Any]:  # x [B@data, D], mask [B@data]
    def total_and_count(p: Params, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        # WRONG: def loss(p: Params, x: Tensor, mask: Tensor) -> Tensor:
        return fs.psum(((_errors(p, x) * mask).sum(), mask.sum()), "data")
        # WRONG: total, count = fs.psum(((_errors(p, x) * mask).sum(), mask.sum()), "data")
        # WRONG: return total / count  # BUG: of this microbatch only

    value, grads = fs.accumulate(total_and_count, 2, counted=True)(p, x, mask)
    # WRONG: value, grads = fs.accumulate(loss, 2)(p, x, mask)
    return {"grads": grads, "loss": value}


# --- positions, masks and targets of a sequence that is split -------------------------------------------------


def _rotated(x: Tensor, positions: Tensor) -> Tensor:
    angles = positions.unsqueeze(-1) * 0.5 ** torch.arange(x.shape[-1] // 2)  # [T, D/2]
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def _positions(t: int) -> Tensor:
    return fs.axis_index("model") * t + torch.arange(t)


def rope(q: Tensor, k: Tensor) -> dict[str, Tensor]:  # [T@model, D]
    positions = _positions(len(q))
    # WRONG: positions = torch.arange(len(q))  # begin at 0 on every rank
    return {"scores": _rotated(q, positions) @ fs.all_gather(_rotated(k, positions), "model").T}


def causal(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:  # [B, H, T@model, D]
    k, v = fs.all_gather((k, v), "model", dim=2)
    return {"y": nn.attention(q, k, v, mask=_positions(q.shape[2]).unsqueeze(1) >= torch.arange(k.shape[2]))}
    # WRONG: return {"y": nn.attention(q, k, v, causal=True)}  # takes each rank's queries for the last positions


def shift(table: Tensor, ids: Tensor) -> dict[str, Tensor]:  # table [V, V]{I}, ids [T@model]
    n = fs.axis_size("model")
    after = fs.ppermute(ids[:1], "model", [(i + 1, i) for i in range(n - 1)])
    targets = torch.cat([ids[1:], torch.where(fs.axis_index("model") == n - 1, -100, after)])
    # WRONG (3 lines): targets = torch.cat([ids[1:], torch.full((1,), -100)])
    return {"loss": nn.cross_entropy(nn.embedding(ids, fs.pvary(table, "model")), targets, over="model")}


# --- statistics of a part used as those of the whole ----------------------------------------------------------


def rms(x: Tensor, scale: Tensor) -> dict[str, Tensor]:  # x [B, D@model], scale [D@model]
    mean = fs.pmean(x.square().mean(-1, keepdim=True), "model")
    return {"y": x * fs.pvary(torch.rsqrt(mean + 1e-6), "model") * scale}
    # WRONG (2 lines): return {"y": nn.rms_norm(x, scale)}


def _whitened(x: Tensor, axes: tuple[str, ...]) -> dict[str, Tensor]:  # x [B@data, T@model]
    mean = fs.pvary(fs.pmean(x.mean(), axes), axes)
    variance = fs.pvary(fs.pmean((x - mean).square().mean(), axes), axes)
    return {"advantages": (x - mean) * torch.rsqrt(variance + 1e-6)}


def whitened(x: Tensor) -> dict[str, Tensor]:
    return _whitened(x, ("data", "model"))
    # WRONG: return _whitened(x, ("data",))  # the positions are split too


def _smoothed(logits: Tensor, targets: Tensor, classes: int) -> dict[str, Tensor]:  # logits [T, V@model], targets {I}
    """Smooth labels by 0.1, shared equally by the other classes."""
    v = logits.shape[-1]
    top = fs.pvary(fs.pmax(logits.amax(-1, keepdim=True), "model"), "model")
    exps = fs.psum((logits - top).exp().sum(-1, keepdim=True), "model")
    log_p = logits - top - fs.pvary(exps.log(), "model")
    hot = _positions(v) == targets.unsqueeze(-1)
    at, mean = fs.psum((log_p.where(hot, 0).sum(-1), log_p.sum(-1)), "model")
    share = 0.1 / (classes - 1)
    return {"loss": -((0.9 - share) * at + share * mean).mean()}


def smoothing(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return _smoothed(logits, targets, logits.shape[-1] * fs.axis_size("model"))
    # WRONG: return _smoothed(logits, targets, logits.shape[-1])


# --- a factor that undoes a mean, on a term without that mean -------------------------------------------------


def _terms(p: Params, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the local part of a mean over all counted rows, and a mean over the local rows: both {V}."""
    p = fs.pvary(p, "data")
    count = fs.pvary(fs.psum(mask.sum(), "data"), "data")
    balance = torch.logsumexp(x @ p["router"], -1).square().mean()
    return ((x @ p["w"]).square().sum(-1) * mask).sum() / count, balance


@trained
def auxiliary(p: Params, x: Tensor, mask: Tensor) -> Tensor:  # x [B@data, D], mask [B@data]
    main, balance = _terms(p, x, mask)
    return fs.pmean(main * fs.axis_size("data") + 0.01 * balance, "data")
    # WRONG: return fs.pmean((main + 0.01 * balance) * fs.axis_size("data"), "data")


# --- a Python branch on a value of one rank -------------------------------------------------------------------


def skip(p: Params, grads: Tensor) -> Params:  # w [D]{I}, grads [B@data, D]
    total = fs.psum(grads.sum(0), "data")
    spike = bool(fs.pmax(grads.abs().max(), "data") > 10)
    # WRONG: spike = bool(grads.abs().max() > 10)
    return {"w": p["w"] if spike else p["w"] - 0.1 * total}


IDS = torch.arange(8) * 3 % 8
MASK = torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 0])
DATA, MODEL = P("data"), P("model")
AXES = {"data": 2, "model": 4}

PROGRAMS = [
    WrongProgram(
        "tied", tied, AXES, (P(), MODEL, MODEL), P(), ({"wte": normal(8, 8)}, IDS, IDS.roll(-1)), "types", "model",
        leaf="result['grads']['wte']", report="piper #13",
    ),
    WrongProgram(
        "router", router, AXES, ({"router": P(), "experts": MODEL}, P()),
        {"grads": {"router": P(), "experts": MODEL}, "loss": P()},
        ({"router": normal(8, 4), "experts": normal(4, 8, 8)}, normal(6, 8)), "types", "model",
        leaf="result['grads']['router']", report="torchtitan #2387",
    ),
    WrongProgram(
        "contrastive", contrastive, AXES, (P(), DATA), P(), ({"w": normal(8, 8) / 8}, normal(8, 8)), "types", "data",
        leaf="result['grads']['w']", report="lightly #1528",
    ),
    WrongProgram(
        "norm", norm, AXES, ({"bias": P(), "up": P(None, "model")},), P(), ({"bias": normal(8), "up": normal(8, 8)},),
        "verify", "model", leaf="result['norm']", report="NeMo-RL #3788",
    ),
    WrongProgram(
        "reduced_twice", reduced_twice, AXES, (DATA, DATA), DATA, ({"w": normal(8, 8)}, normal(8, 8)), "types",
        "data", leaf="result['w']", report="Megatron-LM #6500",
    ),
    WrongProgram(
        "accumulation", accumulation, AXES, (P(), DATA, DATA), P(), ({"w": normal(8, 8)}, normal(8, 8), MASK),
        "verify", "data", leaf="result['grads']['w']", report="mlx-lm #1413",
    ),
    WrongProgram(
        "rope", rope, AXES, (MODEL, MODEL), MODEL, (normal(8, 8), normal(8, 8)), "verify", "model",
        leaf="result['scores']", report="Megatron-LM #5243",
    ),
    WrongProgram(
        "causal", causal, AXES, (P(None, None, "model"),) * 3, P(None, None, "model"),
        (normal(1, 2, 8, 4), normal(1, 2, 8, 4), normal(1, 2, 8, 4)), "verify", "model", leaf="result['y']",
        report="Cornstarch #38",
    ),
    WrongProgram(
        "shift", shift, AXES, (P(), MODEL), P(), (normal(8, 8), IDS), "verify", "model", leaf="result['loss']",
        report="transformers #36607",
    ),
    WrongProgram(
        "rms", rms, AXES, (P(None, "model"), MODEL), P(None, "model"), (normal(4, 8), normal(8)), "verify", "model",
        leaf="result['y']", report="gpt-neox #1424",
    ),
    WrongProgram(
        "whitened", whitened, AXES, (P("data", "model"),), P("data", "model"), (normal(4, 8),), "verify", "model",
        leaf="result['advantages']", report="slime #2235",
    ),
    WrongProgram(
        "smoothing", smoothing, AXES, (P(None, "model"), P()), P(), (normal(8, 8), IDS), "verify", "model",
        leaf="result['loss']", report="Megatron-LM #7464",
    ),
    WrongProgram(
        "auxiliary", auxiliary, AXES, (P(), DATA, DATA), P(),
        ({"router": normal(8, 4), "w": normal(8, 8)}, normal(8, 8), MASK), "verify", "data",
        leaf="result['grads']['router']", factor=2, report="transformers #48690",
    ),
    WrongProgram(
        "skip", skip, AXES, (P(), DATA), P(), ({"w": normal(8)}, torch.cat([100 + normal(1, 8), normal(1, 8)])),
        "verify", "data", leaf="result['w']", report="WeatherGenerator #2718",
    ),
]  # fmt: skip
