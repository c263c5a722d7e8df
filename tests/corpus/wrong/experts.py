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


def balance_of_local_tokens(router: Tensor, x: Tensor) -> Any:  # router [D, E], x [T@data, D]
    def loss(router: Tensor) -> Tensor:
        gates = torch.softmax(x @ fs.pvary(router, "data"), -1)
        share = functional.one_hot(gates.argmax(-1), gates.shape[-1]).float().mean(0)
        return fs.pmean((share * gates.mean(0)).sum(), "data")  # BUG: a mean of products, not a product of means

    return fs.value_and_grad(loss)(router)


def balance_of_all_tokens(router: Tensor, x: Tensor) -> Any:
    def loss(router: Tensor) -> Tensor:
        gates = torch.softmax(x @ fs.pvary(router, "data"), -1)
        share = functional.one_hot(gates.argmax(-1), gates.shape[-1]).float().mean(0)
        return (fs.pmean(share, "data") * fs.pmean(gates.mean(0), "data")).sum()

    return fs.value_and_grad(loss)(router)


def balance_added_without_a_mean(p: Params, x: Tensor) -> Any:  # router [D, E], w [E, D]
    def loss(p: Params) -> Tensor:
        p = fs.pvary(p, "data")
        gates = torch.softmax(x @ p["router"], -1)
        task = fs.pmean((gates @ p["w"] - x).square().mean(), "data")
        balance = gates.mean(0).square().sum()
        return task + 0.1 * balance  # BUG

    return fs.value_and_grad(loss)(p)


def balance_added_to_the_mean(p: Params, x: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        p = fs.pvary(p, "data")
        gates = torch.softmax(x @ p["router"], -1)
        task = fs.pmean((gates @ p["w"] - x).square().mean(), "data")
        balance = fs.pmean(gates.mean(0), "data").square().sum()
        return task + 0.1 * balance

    return fs.value_and_grad(loss)(p)


def bias_moved_by_local_load(bias: Tensor, x: Tensor) -> Tensor:  # bias [E], x [T@data, E]: balance without a loss
    load = functional.one_hot((x + fs.pvary(bias, "data")).argmax(-1), x.shape[-1]).float().mean(0)
    return bias + 0.1 * (1 / x.shape[-1] - load).sign()  # BUG


def bias_moved_by_load(bias: Tensor, x: Tensor) -> Tensor:
    load = functional.one_hot((x + fs.pvary(bias, "data")).argmax(-1), x.shape[-1]).float().mean(0)
    return bias + 0.1 * (1 / x.shape[-1] - fs.pmean(load, "data")).sign()


def load_summed_over_the_wrong_axis(x: Tensor) -> Tensor:  # x [T@data, E], the same over model
    load = functional.one_hot(x.argmax(-1), x.shape[-1]).float().sum(0)
    return fs.psum(load, "model")  # BUG: all ranks of model have the same tokens


def load_summed_over_tokens(x: Tensor) -> Tensor:
    load = functional.one_hot(x.argmax(-1), x.shape[-1]).float().sum(0)
    return fs.psum(load, "data")


# --- capacity and choice --------------------------------------------------------------------------------------


def _kept(choice: Tensor, before: Tensor | int, capacity: int) -> Tensor:
    """Return the tokens that find room at their expert, [T, E]; `before` are those of earlier ranks."""
    place = before + choice.cumsum(0) - 1
    return choice * (place < capacity)


def capacity_of_local_tokens(x: Tensor) -> Tensor:  # x [T@data, E]
    choice = functional.one_hot(x.argmax(-1), x.shape[-1])
    capacity = len(x) // x.shape[-1] + 1
    return _kept(choice, 0, capacity)  # BUG


def capacity_of_all_tokens(x: Tensor) -> Tensor:
    n = fs.axis_size("data")
    choice = functional.one_hot(x.argmax(-1), x.shape[-1])
    counts = fs.all_gather(choice.sum(0, keepdim=True), "data")
    before = counts.where((torch.arange(n) < fs.axis_index("data")).unsqueeze(1), 0).sum(0)
    return _kept(choice, before, len(x) * n // x.shape[-1] + 1)


def best_of_local_experts(gates: Tensor) -> Tensor:  # [T, E@model]
    top = gates.topk(1, dim=-1).values  # BUG
    return torch.where(gates >= top, gates, 0)  # BUG: one of each rank's experts, not of all


def best_of_all_experts(gates: Tensor) -> Tensor:
    top = fs.pvary(fs.pmax(gates.amax(-1, keepdim=True), "model"), "model")
    return torch.where(gates >= top, gates, 0)


def tokens_chosen_by_local_rank(scores: Tensor) -> Tensor:  # [T@data, E]: each expert chooses its tokens
    chosen = scores.topk(2, dim=0).values[-1]  # BUG
    return torch.where(scores >= chosen, scores, 0)


def tokens_chosen_by_rank(scores: Tensor) -> Tensor:
    chosen = fs.all_gather(scores, "data").topk(2, dim=0).values[-1]
    return torch.where(scores >= chosen, scores, 0)


def expert_numbers_without_offset(experts: Tensor, x: Tensor, choice: Tensor) -> Tensor:  # experts [E@model, D, D]
    mine = torch.arange(len(experts))  # BUG: every rank takes its experts for the first ones
    hot = (choice.unsqueeze(-1) == mine).to(x.dtype)
    return fs.psum(torch.einsum("te,td,edf->tf", hot, fs.pvary(x, "model"), experts), "model")


def expert_numbers_with_offset(experts: Tensor, x: Tensor, choice: Tensor) -> Tensor:
    mine = fs.axis_index("model") * len(experts) + torch.arange(len(experts))
    hot = (choice.unsqueeze(-1) == mine).to(x.dtype)
    return fs.psum(torch.einsum("te,td,edf->tf", hot, fs.pvary(x, "model"), experts), "model")


# --- around the experts ---------------------------------------------------------------------------------------


def shared_expert_inside_the_sum(p: Params, x: Tensor) -> Any:  # experts [E@model, D, D], shared [D, D]
    def loss(p: Params) -> Tensor:
        local = torch.einsum("td,edf->tf", fs.pvary(x, "model"), p["experts"])
        y = fs.psum(local + x @ p["shared"], "model")  # BUG: each rank adds it
        return torch.tanh(y).square().mean()

    return fs.value_and_grad(loss)(p)


def shared_expert_after_the_sum(p: Params, x: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        local = torch.einsum("td,edf->tf", fs.pvary(x, "model"), p["experts"])
        y = fs.psum(local, "model") + x @ p["shared"]
        return torch.tanh(y).square().mean()

    return fs.value_and_grad(loss)(p)


def router_noise_of_each_rank(x: Tensor) -> Tensor:  # x [T, E], the same over model
    key = fs.fold_in(fs.key(2), fs.axis_index("model"))
    noise = fs.random.uniform(key, x.shape, low=0.9, high=1.1)
    return torch.softmax(x * noise, -1)  # BUG: ranks route the same tokens differently


def router_noise_of_all_ranks(x: Tensor) -> Tensor:
    noise = fs.random.uniform(fs.key(2), x.shape, low=0.9, high=1.1)
    return torch.softmax(x * noise, -1)


def _expert_grads(w: Tensor, x: Tensor) -> Tensor:  # w [E@data, D], x [T@data, E, D]: a token for each expert
    def loss(w: Tensor) -> Tensor:
        received = fs.all_to_all(x, "data", split=1, concat=0)  # [T, E@data, D]
        return fs.psum(torch.tanh((received * w).sum(-1)).sum(), "data")

    return fs.grad(loss)(w)


def expert_gradient_averaged(w: Tensor, x: Tensor) -> Tensor:
    return _expert_grads(w, x) / fs.axis_size("data")  # BUG: as for dense weights, but no rank shares it


def expert_gradient_as_it_is(w: Tensor, x: Tensor) -> Tensor:
    return _expert_grads(w, x)


T, D, E = 6, 3, 4
DATA2, MODEL2, GRID = {"data": 2}, {"model": 2}, {"data": 2, "model": 2}
X, ROUTER, SCORES = normal("hidden", T, D), normal("router", D, E), normal("scores", T, E)
EXPERTS, CHOICE = normal("experts", E, D, D), torch.tensor([0, 3, 2, 1, 3, 2])
SPECS = {"experts": MODEL, "shared": P()}

PROGRAMS = [
    WrongProgram(
        balance_of_local_tokens, balance_of_all_tokens, DATA2, (P(), DATA), P(), (ROUTER, X), "verify", "data"
    ),
    WrongProgram(
        balance_added_without_a_mean, balance_added_to_the_mean, DATA2, (P(), DATA), P(), ({"router": ROUTER,
        "w": normal("w", E, D)}, X), "types", "data",
    ),
    WrongProgram(
        bias_moved_by_local_load, bias_moved_by_load, DATA2, (P(), DATA), P(), (torch.zeros(E), SCORES), "types", "data"
    ),
    WrongProgram(
        load_summed_over_the_wrong_axis, load_summed_over_tokens, GRID, (DATA,), P(), (SCORES,), "types", "model"
    ),
    WrongProgram(capacity_of_local_tokens, capacity_of_all_tokens, DATA2, (DATA,), DATA, (SCORES,), "verify", "data"),
    WrongProgram(best_of_local_experts, best_of_all_experts, MODEL2, (COLUMNS,), COLUMNS, (SCORES,), "verify", "model"),
    WrongProgram(tokens_chosen_by_local_rank, tokens_chosen_by_rank, DATA2, (DATA,), DATA, (SCORES,), "verify", "data"),
    WrongProgram(
        expert_numbers_without_offset, expert_numbers_with_offset, MODEL2, (MODEL, P(), P()), P(), (EXPERTS, X,
        CHOICE), "verify", "model",
    ),
    WrongProgram(
        shared_expert_inside_the_sum, shared_expert_after_the_sum, MODEL2, (SPECS, P()), (P(), SPECS),
        ({"experts": EXPERTS, "shared": normal("shared", D, D)}, X), "types", "model",
    ),
    WrongProgram(
        router_noise_of_each_rank, router_noise_of_all_ranks, MODEL2, (P(),), P(), (SCORES,), "types", "model"
    ),
    WrongProgram(
        expert_gradient_averaged, expert_gradient_as_it_is, DATA2, (DATA, DATA), DATA, (normal("w", E, D),
        normal("tokens", T, E, D)), "verify", "data",
    ),
]  # fmt: skip
