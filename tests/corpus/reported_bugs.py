"""Bugs of parallel programs from public reports, as data: for each a wrong program and a correct one.

The programs are ours, and as small as the mistake allows.

Legend: B batch, T positions, D width, E experts, V vocabulary; [T@model] is a dim split over an axis; {V} varies over
the axis of the pattern, {I} does not. `# BUG` marks the line of the mistake.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import fshard as fs
from fshard import P, nn


@dataclass(frozen=True)
class ReportedBug:
    """A wrong program and a correct one, with the same arguments and specs.

    `caught_by` is the first check that catches the wrong one: the types, at the marked line, or `verify`. `verify`
    catches every one: at `leaf`, on `axis` and, where the ratio is the size of an axis, by `factor`.
    """

    name: str
    source: str
    wrong: Callable[..., Any]
    correct: Callable[..., Any]
    caught_by: Literal["types", "verify"]
    axis: str
    leaf: str
    in_specs: tuple[Any, ...]
    out_specs: Any
    args: tuple[Any, ...]
    factor: float | None = None


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
def tied_wrong(p: Params, ids: Tensor, targets: Tensor) -> Tensor:  # [T@model]
    h = nn.embedding(ids, fs.pvary(p["wte"], "model"))  # [T@model, D]
    logits = h @ p["wte"].T  # BUG: the gradient of this use is not summed over ranks
    return nn.cross_entropy(logits, targets, over="model")


@trained
def tied_correct(p: Params, ids: Tensor, targets: Tensor) -> Tensor:
    wte = fs.pvary(p["wte"], "model")
    return nn.cross_entropy(nn.embedding(ids, wte) @ wte.T, targets, over="model")


# --- a replicated router that feeds experts on other ranks ----------------------------------------------------


@trained
def router_wrong(p: Params, x: Tensor) -> Tensor:  # x [T, D]{I}, experts [E@model, D, D]
    gates = torch.softmax(x @ p["router"], -1)  # [T, E]{I}
    mine = fs.axis_index("model") * len(p["experts"]) + torch.arange(len(p["experts"]))
    local_gates = gates.index_select(1, mine)  # BUG: the gradient is of the local experts only
    y = torch.einsum("te,td,edf->tf", local_gates, fs.pvary(x, "model"), p["experts"])
    return fs.psum(y, "model").square().sum()


@trained
def router_correct(p: Params, x: Tensor) -> Tensor:
    gates = torch.softmax(x @ p["router"], -1)
    local_gates = fs.pslice(gates, "model", dim=1)  # [T, E@model]; the transpose gathers
    y = torch.einsum("te,td,edf->tf", local_gates, fs.pvary(x, "model"), p["experts"])
    return fs.psum(y, "model").square().sum()


# --- negatives of other ranks, without their gradient ---------------------------------------------------------


@trained
def contrastive_wrong(p: Params, x: Tensor) -> Tensor:  # x [B@data, D]
    z = x @ fs.pvary(p["w"], "data")
    gathered = fs.all_gather(z, "data", to="invariant")  # its transpose is a slice, not the sum over the ranks
    logits = z @ gathered.T  # BUG
    return nn.cross_entropy(logits, fs.axis_index("data") * len(x) + torch.arange(len(x)), over="data")


@trained
def contrastive_correct(p: Params, x: Tensor) -> Tensor:
    z = x @ fs.pvary(p["w"], "data")
    logits = z @ fs.all_gather(z, "data").T
    return nn.cross_entropy(logits, fs.axis_index("data") * len(x) + torch.arange(len(x)), over="data")


# --- a gradient norm that counts replicated leaves on every rank ----------------------------------------------


def norm_wrong(grads: Params) -> dict[str, Tensor]:  # bias [D]{I}, up [D, F@model]
    parts = [g.square().sum() for g in grads.values()]
    total = parts[0] + parts[1]  # BUG
    return {"norm": fs.psum(total, "model").sqrt()}


def norm_correct(grads: Params) -> dict[str, Tensor]:
    total = grads["bias"].square().sum() + fs.psum(grads["up"].square().sum(), "model")
    return {"norm": total.sqrt()}


# --- a gradient reduced by the transpose of its gather, and once more by hand ---------------------------------


def _fsdp_grads(p: Params, x: Tensor) -> Params:  # w [D@data, D], x [B@data, D]
    def loss(p: Params) -> Tensor:
        return fs.pmean((x @ fs.all_gather(p["w"], "data")).square().mean(), "data")

    return fs.grad(loss)(p)


def reduced_twice_wrong(p: Params, x: Tensor) -> Params:
    grads = fs.psum(_fsdp_grads(p, x), "data")  # BUG: adds up the gradients of different rows
    return {"w": p["w"] - 0.1 * grads["w"]}


def reduced_twice_correct(p: Params, x: Tensor) -> Params:
    return {"w": p["w"] - 0.1 * _fsdp_grads(p, x)["w"]}


# --- a mean for each of the microbatches, which have unequal counts -------------------------------------------


def _errors(p: Params, x: Tensor) -> Tensor:
    return (x @ fs.pvary(p["w"], "data")).square().sum(-1)  # [B@data]


def accumulation_wrong(p: Params, x: Tensor, mask: Tensor) -> dict[str, Any]:  # x [B@data, D], mask [B@data]
    def loss(p: Params, x: Tensor, mask: Tensor) -> Tensor:
        total, count = fs.psum(((_errors(p, x) * mask).sum(), mask.sum()), "data")
        return total / count  # BUG: of this microbatch only

    value, grads = fs.accumulate(loss, 2)(p, x, mask)
    return {"grads": grads, "loss": value}


def accumulation_correct(p: Params, x: Tensor, mask: Tensor) -> dict[str, Any]:
    def total_and_count(p: Params, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return fs.psum(((_errors(p, x) * mask).sum(), mask.sum()), "data")

    value, grads = fs.accumulate(total_and_count, 2, counted=True)(p, x, mask)
    return {"grads": grads, "loss": value}


# --- positions, masks and targets of a sequence that is split -------------------------------------------------


def _rotated(x: Tensor, positions: Tensor) -> Tensor:
    angles = positions.unsqueeze(-1) * 0.5 ** torch.arange(x.shape[-1] // 2)  # [T, D/2]
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def _positions(t: int) -> Tensor:
    return fs.axis_index("model") * t + torch.arange(t)


def rope_wrong(q: Tensor, k: Tensor) -> dict[str, Tensor]:  # [T@model, D]
    positions = torch.arange(len(q))  # BUG: begin at 0 on every rank
    return {"scores": _rotated(q, positions) @ fs.all_gather(_rotated(k, positions), "model").T}


def rope_correct(q: Tensor, k: Tensor) -> dict[str, Tensor]:
    positions = _positions(len(q))
    return {"scores": _rotated(q, positions) @ fs.all_gather(_rotated(k, positions), "model").T}


def causal_wrong(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:  # [B, H, T@model, D]
    k, v = fs.all_gather((k, v), "model", dim=2)
    return {"y": nn.attention(q, k, v, causal=True)}  # BUG: takes each rank's queries for the last positions


def causal_correct(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    k, v = fs.all_gather((k, v), "model", dim=2)
    return {"y": nn.attention(q, k, v, mask=_positions(q.shape[2]).unsqueeze(1) >= torch.arange(k.shape[2]))}


def shift_wrong(table: Tensor, ids: Tensor) -> dict[str, Tensor]:  # table [V, V]{I}, ids [T@model]
    targets = torch.cat([ids[1:], torch.full((1,), -100)])  # BUG: the last target of each part is on the next rank
    return {"loss": nn.cross_entropy(nn.embedding(ids, fs.pvary(table, "model")), targets, over="model")}


def shift_correct(table: Tensor, ids: Tensor) -> dict[str, Tensor]:
    n = fs.axis_size("model")
    after = fs.ppermute(ids[:1], "model", [(i + 1, i) for i in range(n - 1)])
    targets = torch.cat([ids[1:], torch.where(fs.axis_index("model") == n - 1, -100, after)])
    return {"loss": nn.cross_entropy(nn.embedding(ids, fs.pvary(table, "model")), targets, over="model")}


# --- statistics of a part used as those of the whole ----------------------------------------------------------


def rms_wrong(x: Tensor, scale: Tensor) -> dict[str, Tensor]:  # x [B, D@model], scale [D@model]
    return {"y": nn.rms_norm(x, scale)}  # BUG


def rms_correct(x: Tensor, scale: Tensor) -> dict[str, Tensor]:
    mean = fs.pmean(x.square().mean(-1, keepdim=True), "model")
    return {"y": x * fs.pvary(torch.rsqrt(mean + 1e-6), "model") * scale}


def _whitened(x: Tensor, axes: tuple[str, ...]) -> dict[str, Tensor]:  # x [B@data, T@model]
    mean = fs.pvary(fs.pmean(x.mean(), axes), axes)
    variance = fs.pvary(fs.pmean((x - mean).square().mean(), axes), axes)
    return {"advantages": (x - mean) * torch.rsqrt(variance + 1e-6)}


def whitened_wrong(x: Tensor) -> dict[str, Tensor]:
    return _whitened(x, ("data",))  # BUG: the positions are split too


def whitened_correct(x: Tensor) -> dict[str, Tensor]:
    return _whitened(x, ("data", "model"))


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


def smoothing_wrong(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return _smoothed(logits, targets, logits.shape[-1])  # BUG


def smoothing_correct(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return _smoothed(logits, targets, logits.shape[-1] * fs.axis_size("model"))


# --- a factor that undoes a mean, on a term without that mean -------------------------------------------------


def _terms(p: Params, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the local part of a mean over all counted rows, and a mean over the local rows: both {V}."""
    p = fs.pvary(p, "data")
    count = fs.pvary(fs.psum(mask.sum(), "data"), "data")
    balance = torch.logsumexp(x @ p["router"], -1).square().mean()
    return ((x @ p["w"]).square().sum(-1) * mask).sum() / count, balance


@trained
def auxiliary_wrong(p: Params, x: Tensor, mask: Tensor) -> Tensor:  # x [B@data, D], mask [B@data]
    main, balance = _terms(p, x, mask)
    return fs.pmean((main + 0.01 * balance) * fs.axis_size("data"), "data")  # BUG


@trained
def auxiliary_correct(p: Params, x: Tensor, mask: Tensor) -> Tensor:
    main, balance = _terms(p, x, mask)
    return fs.pmean(main * fs.axis_size("data") + 0.01 * balance, "data")


# --- a Python branch on a value of one rank -------------------------------------------------------------------


def skip_wrong(p: Params, grads: Tensor) -> Params:  # w [D]{I}, grads [B@data, D]
    total = fs.psum(grads.sum(0), "data")
    spike = bool(grads.abs().max() > 10)  # BUG
    return {"w": p["w"] if spike else p["w"] - 0.1 * total}


def skip_correct(p: Params, grads: Tensor) -> Params:
    total = fs.psum(grads.sum(0), "data")
    spike = bool(fs.pmax(grads.abs().max(), "data") > 10)
    return {"w": p["w"] if spike else p["w"] - 0.1 * total}


IDS = torch.arange(8) * 3 % 8
MASK = torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 0])
DATA, MODEL = P("data"), P("model")

REPORTED_BUGS = [
    ReportedBug("a tied embedding, one of its two gradients not summed", "piper #13", tied_wrong, tied_correct,
            "types", "model", "result['grads']['wte']", (P(), MODEL, MODEL), P(),
            ({"wte": normal(8, 8)}, IDS, IDS.roll(-1))),
    ReportedBug("a router's gradient from the local experts only", "torchtitan #2387", router_wrong, router_correct,
            "types", "model", "result['grads']['router']", ({"router": P(), "experts": MODEL}, P()),
            {"grads": {"router": P(), "experts": MODEL}, "loss": P()},
            ({"router": normal(8, 4), "experts": normal(4, 8, 8)}, normal(6, 8))),
    ReportedBug("gathered negatives without the other ranks' gradient", "lightly #1528", contrastive_wrong,
            contrastive_correct, "types", "data", "result['grads']['w']", (P(), DATA), P(),
            ({"w": normal(8, 8) / 8}, normal(8, 8))),
    ReportedBug("a norm that counts replicated leaves on every rank", "NeMo-RL #3788", norm_wrong, norm_correct,
            "verify", "model", "result['norm']", ({"bias": P(), "up": P(None, "model")},), P(),
            ({"bias": normal(8), "up": normal(8, 8)},)),
    ReportedBug("a gradient reduced twice", "Megatron-LM #6500", reduced_twice_wrong, reduced_twice_correct,
            "verify", "data", "result['w']", (DATA, DATA), DATA, ({"w": normal(8, 8)}, normal(8, 8))),
    ReportedBug("means of microbatches of unequal counts", "mlx-lm #1413", accumulation_wrong, accumulation_correct,
            "verify", "data", "result['grads']['w']", (P(), DATA, DATA), P(),
            ({"w": normal(8, 8)}, normal(8, 8), MASK)),
    ReportedBug("positions that begin at 0 on every rank", "Megatron-LM #5243", rope_wrong, rope_correct,
            "verify", "model", "result['scores']", (MODEL, MODEL), MODEL, (normal(8, 8), normal(8, 8))),
    ReportedBug("a causal mask without the offset of the part", "Cornstarch #38", causal_wrong, causal_correct,
            "verify", "model", "result['y']", (P(None, None, "model"),) * 3, P(None, None, "model"),
            (normal(1, 2, 8, 4), normal(1, 2, 8, 4), normal(1, 2, 8, 4))),
    ReportedBug("targets shifted within each part", "transformers #36607", shift_wrong, shift_correct,
            "verify", "model", "result['loss']", (P(), MODEL), P(), (normal(8, 8), IDS)),
    ReportedBug("an RMS norm over the local features", "gpt-neox #1424", rms_wrong, rms_correct,
            "verify", "model", "result['y']", (P(None, "model"), MODEL), P(None, "model"), (normal(4, 8), normal(8))),
    ReportedBug("whitening over one of two axes", "slime #2235", whitened_wrong, whitened_correct,
            "verify", "model", "result['advantages']", (P("data", "model"),), P("data", "model"), (normal(4, 8),)),
    ReportedBug("label smoothing by the size of the local vocabulary", "Megatron-LM #7464", smoothing_wrong,
            smoothing_correct,
            "verify", "model", "result['loss']", (P(None, "model"), P()), P(), (normal(8, 8), IDS)),
    ReportedBug("an auxiliary loss scaled up with the main one", "transformers #48690", auxiliary_wrong,
            auxiliary_correct,
            "verify", "data", "result['grads']['router']", (P(), DATA, DATA), P(),
            ({"router": normal(8, 4), "w": normal(8, 8)}, normal(8, 8), MASK), factor=2),
    ReportedBug("a step skipped by the local gradient", "WeatherGenerator #2718", skip_wrong, skip_correct,
            "verify", "data", "result['w']", (P(), DATA), P(),
            ({"w": normal(8)}, torch.cat([100 + normal(1, 8), normal(1, 8)]))),
]  # fmt: skip
