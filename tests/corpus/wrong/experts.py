"""Mixtures of experts: routing, capacity, balance and gradients of a rank's part of the tokens or experts.

Legend: T tokens, D width, E experts; [T@data] is a dim split over an axis; {V} varies over it, {I} does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import fshard as fs
from fshard import P
from tests.corpus.wrong.program import WrongProgram, normal

Params = dict[str, Tensor]
DATA, MODEL, COLUMNS = P("data"), P("model"), P(None, "model")


# --- balance --------------------------------------------------------------------------------------------------


def bias_moved_by_load(bias: Tensor, x: Tensor) -> Tensor:  # bias [E], x [T@data, E]: balance without a loss
    load = functional.one_hot((x + fs.pvary(bias, "data")).argmax(-1), x.shape[-1]).float().mean(0)
    return bias + 0.1 * (1 / x.shape[-1] - fs.pmean(load, "data")).sign()
    # WRONG: return bias + 0.1 * (1 / x.shape[-1] - load).sign()


def load_summed_over_tokens(x: Tensor) -> Tensor:  # x [T@data, E], the same over model
    load = functional.one_hot(x.argmax(-1), x.shape[-1]).float().sum(0)
    return fs.psum(load, "data")
    # WRONG: return fs.psum(load, "model")  # all ranks of model have the same tokens


# --- capacity and choice --------------------------------------------------------------------------------------


def _kept(choice: Tensor, before: Tensor | int, capacity: int) -> Tensor:
    """Return the tokens that find room at their expert, [T, E]; `before` are those of earlier ranks."""
    place = before + choice.cumsum(0) - 1
    return choice * (place < capacity)


def capacity_of_all_tokens(x: Tensor) -> Tensor:  # x [T@data, E]
    n = fs.axis_size("data")
    # WRONG:
    choice = functional.one_hot(x.argmax(-1), x.shape[-1])
    counts = fs.all_gather(choice.sum(0, keepdim=True), "data")
    before = counts.where((torch.arange(n) < fs.axis_index("data")).unsqueeze(1), 0).sum(0)
    return _kept(choice, before, len(x) * n // x.shape[-1] + 1)
    # WRONG (3 lines): capacity = len(x) // x.shape[-1] + 1
    # WRONG: return _kept(choice, 0, capacity)  # BUG


def best_of_all_experts(gates: Tensor) -> Tensor:  # [T, E@model]
    top = fs.pvary(fs.pmax(gates.amax(-1, keepdim=True), "model"), "model")
    # WRONG: top = gates.topk(1, dim=-1).values  # BUG
    return torch.where(gates >= top, gates, 0)  # BUG: one of each rank's experts, not of all


def tokens_chosen_by_rank(scores: Tensor) -> Tensor:  # [T@data, E]: each expert chooses its tokens
    chosen = fs.all_gather(scores, "data").topk(2, dim=0).values[-1]
    # WRONG: chosen = scores.topk(2, dim=0).values[-1]
    return torch.where(scores >= chosen, scores, 0)


# --- around the experts ---------------------------------------------------------------------------------------


def shared_expert_after_the_sum(p: Params, x: Tensor) -> Any:  # experts [E@model, D, D], shared [D, D]
    def loss(p: Params) -> Tensor:
        local = torch.einsum("td,edf->tf", fs.pvary(x, "model"), p["experts"])
        y = fs.psum(local, "model") + x @ p["shared"]
        # WRONG: y = fs.psum(local + x @ p["shared"], "model")  # each rank adds it
        return torch.tanh(y).square().mean()

    return fs.value_and_grad(loss)(p)


def router_noise_of_all_ranks(x: Tensor) -> Tensor:  # x [T, E], the same over model
    noise = fs.random.uniform(fs.key(2), x.shape, low=0.9, high=1.1)
    # WRONG: key = fs.fold_in(fs.key(2), fs.axis_index("model"))
    # WRONG: noise = fs.random.uniform(key, x.shape, low=0.9, high=1.1)
    return torch.softmax(x * noise, -1)  # BUG: ranks route the same tokens differently


T, D, E = 6, 3, 4
DATA2, MODEL2, GRID = {"data": 2}, {"model": 2}, {"data": 2, "model": 2}
X, SCORES = normal("hidden", T, D), normal("scores", T, E)
EXPERTS = normal("experts", E, D, D)
SPECS = {"experts": MODEL, "shared": P()}

PROGRAMS = [
    WrongProgram(
        "bias_moved_by_local_load", bias_moved_by_load, DATA2, (P(), DATA), P(), (torch.zeros(E), SCORES), "types",
        "data",
    ),
    WrongProgram(
        "load_summed_over_the_wrong_axis", load_summed_over_tokens, GRID, (DATA,), P(), (SCORES,), "types", "model",
    ),
    WrongProgram("capacity_of_local_tokens", capacity_of_all_tokens, DATA2, (DATA,), DATA, (SCORES,), "verify", "data"),
    WrongProgram(
        "best_of_local_experts", best_of_all_experts, MODEL2, (COLUMNS,), COLUMNS, (SCORES,), "verify", "model",
    ),
    WrongProgram(
        "tokens_chosen_by_local_rank", tokens_chosen_by_rank, DATA2, (DATA,), DATA, (SCORES,), "verify", "data",
    ),
    WrongProgram(
        "shared_expert_inside_the_sum", shared_expert_after_the_sum, MODEL2, (SPECS, P()), (P(), SPECS),
        ({"experts": EXPERTS, "shared": normal("shared", D, D)}, X), "types", "model",
    ),
    WrongProgram(
        "router_noise_of_each_rank", router_noise_of_all_ranks, MODEL2, (P(),), P(), (SCORES,), "types", "model",
    ),
]  # fmt: skip
