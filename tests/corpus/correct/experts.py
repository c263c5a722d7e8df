"""Mixtures of experts, with experts split over the ranks.

Legend: G groups of tokens, S tokens of a group, T tokens, E experts, C capacity, D width; [E@expert] is a dim split
over an axis. Groups are split as the experts are, so that the capacity of a group is the same on every mesh.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, dense_grad, normal

Params = dict[str, Tensor]


def run_experts(p: Params, x: Tensor) -> Tensor:  # x [E, N, D], up [E, D, F], down [E, F, D]
    return torch.relu(x @ p["up"]) @ p["down"]


def dispatched(chosen: Tensor, capacity: int) -> Tensor:
    """[G, S, E] of 0 and 1 -> [G, S, E, C]: the slot of each token at its expert; tokens beyond capacity have none."""
    slot = (chosen.cumsum(1) - 1).where(chosen > 0, capacity)
    return F.one_hot(slot.clamp(max=capacity), capacity + 1)[..., :capacity]


def every_expert(p: Params, x: Tensor) -> Tensor:
    """Results of all experts for all tokens: [T, D] -> [T, E, D]."""
    return torch.einsum("tef,efd->ted", torch.relu(torch.einsum("td,edf->tef", x, p["up"])), p["down"])


def switch_layer(p: Params, x: Tensor, target: Tensor) -> Tensor:  # x [G@expert, S, D]
    """Top-1 routing with a capacity: tokens travel to their expert and back by all_to_all (Fedus et al., 2021)."""
    gates = (x @ fs.pvary(p["router"], "expert")).softmax(-1)  # [G@expert, S, E]
    gate, index = gates.max(-1)
    slots = dispatched(F.one_hot(index, gates.shape[-1]), capacity=2).to(x.dtype)
    sent = torch.einsum("gsec,gsd->egcd", slots, x)
    received = fs.all_to_all(sent, "expert", split=0, concat=1)  # [E@expert, G, C, D]
    y = run_experts(p, received.flatten(1, 2)).view(received.shape)
    back = fs.all_to_all(y, "expert", split=1, concat=0)  # [E, G@expert, C, D]
    out = torch.einsum("gsec,egcd->gsd", slots * gate[..., None, None], back)
    return fs.pmean((x + out - target).square().mean(), "expert")


def dense_switch_layer(p: Params, x: Tensor, target: Tensor) -> Tensor:
    out = []
    for group in x:
        seen = [0] * 4
        for token in group:
            gates = (token @ p["router"]).softmax(-1)
            e = int(gates.argmax())
            seen[e] += 1
            y = torch.relu(token @ p["up"][e]) @ p["down"][e]
            out.append(gates[e] * y if seen[e] <= 2 else torch.zeros_like(y))
    return (x + torch.stack(out).view(x.shape) - target).square().mean()


def top_2_layer(p: Params, x: Tensor, target: Tensor) -> Tensor:  # x [G@expert, S, D]
    """Top-2 routing with renormalized gates and a loss that balances the load (Lepikhin et al., 2020)."""
    logits = x @ fs.pvary(p["router"], "expert")
    top, index = logits.topk(2, -1)
    chosen = F.one_hot(index, logits.shape[-1]).sum(2)  # [G@expert, S, E]
    gates = torch.zeros_like(logits).scatter(-1, index, top.softmax(-1))
    slots = dispatched(chosen, capacity=x.shape[1]).to(x.dtype)
    received = fs.all_to_all(torch.einsum("gsec,gsd->egcd", slots, x), "expert", split=0, concat=1)
    y = run_experts(p, received.flatten(1, 2)).view(received.shape)
    back = fs.all_to_all(y, "expert", split=1, concat=0)
    out = torch.einsum("gsec,egcd->gsd", slots * gates[..., None], back)
    share, probability = fs.pmean((chosen.to(x.dtype).mean((0, 1)), logits.softmax(-1).mean((0, 1))), "expert")
    balance = chosen.shape[-1] * (share * probability).sum()
    return fs.pmean((out - target).square().mean(), "expert") + 0.01 * balance


def dense_top_2_layer(p: Params, x: Tensor, target: Tensor) -> Tensor:
    x, target = x.flatten(0, 1), target.flatten(0, 1)
    logits = x @ p["router"]
    kept = logits >= logits.topk(2, -1).values[:, -1:]
    gates = logits.masked_fill(~kept, -torch.inf).softmax(-1)
    out = torch.einsum("te,ted->td", gates, every_expert(p, x))
    balance = 4 * (kept.to(x.dtype).mean(0) * logits.softmax(-1).mean(0)).sum()
    return (out - target).square().mean() + 0.01 * balance


def experts_and_data_parallel(p: Params, x: Tensor, target: Tensor) -> Tensor:  # x [T@data, D]
    """Dropless top-2: tokens are on every rank of `expert`, which adds up what its own experts contribute."""
    p = fs.pvary(p, "data")
    logits = x @ p["router"]  # [T@data, E], the same on each rank of `expert`
    top, index = logits.topk(2, -1)
    gates = torch.zeros_like(logits).scatter(-1, index, top.softmax(-1))
    own = fs.pslice(gates, "expert", dim=1)  # [T@data, E@expert]
    y = torch.einsum("te,ted->td", own, every_expert(p, fs.pvary(x, "expert")))
    return fs.pmean((fs.psum(y, "expert") - target).square().mean(), "data")


def dense_experts_and_data_parallel(p: Params, x: Tensor, target: Tensor) -> Tensor:
    logits = x @ p["router"]
    kept = logits >= logits.topk(2, -1).values[:, -1:]
    gates = logits.masked_fill(~kept, -torch.inf).softmax(-1)
    return (torch.einsum("te,ted->td", gates, every_expert(p, x)) - target).square().mean()


def biased_routing(p: Params, bias: Tensor, x: Tensor, target: Tensor) -> Any:  # x [T@data, D], bias [E]
    """A bias chooses experts and scales nothing; it rises for those with few tokens (Wang et al., 2024)."""

    def loss(p: Params) -> tuple[Tensor, Tensor]:
        p = fs.pvary(p, "data")
        scores = torch.sigmoid(x @ p["router"])
        index = (scores + bias).topk(2, -1).indices
        gates = torch.zeros_like(scores).scatter(-1, index, scores.gather(-1, index))
        gates = gates / gates.sum(-1, keepdim=True)
        out = torch.einsum("te,ted->td", gates, every_expert(p, x))
        return fs.pmean((out - target).square().mean(), "data"), F.one_hot(index, len(bias)).sum((0, 1))

    (value, counts), grads = fs.value_and_grad(loss, has_aux=True)(p)
    counts = fs.psum(counts, "data")
    return value, grads, bias + 0.01 * torch.sign(counts.float().mean() - counts), counts


def dense_biased_routing(p: Params, bias: Tensor, x: Tensor, target: Tensor) -> Any:
    def loss(p: Params) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(x @ p["router"])
        biased = scores + bias
        kept = biased >= biased.topk(2, -1).values[:, -1:]
        gates = scores * kept
        out = torch.einsum("te,ted->td", gates / gates.sum(-1, keepdim=True), every_expert(p, x))
        return (out - target).square().mean(), kept.sum(0)

    grads, (value, counts) = torch.func.grad_and_value(loss, has_aux=True)(p)
    return value, grads, bias + 0.01 * torch.sign(counts.float().mean() - counts), counts


def expert_choice(p: Params, x: Tensor, target: Tensor) -> Tensor:  # x [T@expert, D], up [E@expert, D, F]
    """Each expert picks the C tokens that score highest for it (Zhou et al., 2022)."""
    gates = (x @ fs.pvary(p["router"], "expert")).softmax(-1)  # [T@expert, E]
    gates = fs.all_to_all(gates, "expert", split=1, concat=0)  # [T, E@expert]
    picked, index = gates.T.topk(3, -1)  # [E@expert, C]
    tokens = fs.all_gather(x, "expert")
    y = picked[..., None] * run_experts(p, tokens[index])  # [E@expert, C, D]
    out = torch.zeros_like(tokens).index_add(0, index.flatten(), y.flatten(0, 1))
    out = fs.psum_scatter(out, "expert")  # [T@expert, D]
    return fs.pmean((x + out - target).square().mean(), "expert")


def dense_expert_choice(p: Params, x: Tensor, target: Tensor) -> Tensor:
    gates = (x @ p["router"]).softmax(-1)
    kept = gates >= gates.topk(3, 0).values[-1]
    out = torch.einsum("te,ted->td", gates * kept, every_expert(p, x))
    return (x + out - target).square().mean()


EXPERT = P("expert")
EXPERTS = {"router": normal("router", 3, 4), "up": normal("expert up", 4, 3, 5), "down": normal("expert down", 4, 5, 3)}
SPECS = {"router": P(), "up": EXPERT, "down": EXPERT}
GROUPS = normal("groups", 4, 5, 3), normal("group targets", 4, 5, 3)
TOKENS = normal("tokens", 8, 3), normal("token targets", 8, 3)

PROGRAMS = [
    Program(fs.value_and_grad(switch_layer), {"expert": 2}, (SPECS, EXPERT, EXPERT), (P(), SPECS), (EXPERTS, *GROUPS),
            dense_grad(dense_switch_layer)),
    Program(fs.value_and_grad(top_2_layer), {"expert": 4}, (SPECS, EXPERT, EXPERT), (P(), SPECS), (EXPERTS, *GROUPS),
            dense_grad(dense_top_2_layer)),
    Program(fs.value_and_grad(experts_and_data_parallel), {"data": 2, "expert": 2}, (SPECS, P("data"), P("data")),
            (P(), SPECS), (EXPERTS, *TOKENS), dense_grad(dense_experts_and_data_parallel)),
    Program(biased_routing, {"data": 4}, (P(), P(), P("data"), P("data")), P(),
            (EXPERTS, normal("router bias", 4), *TOKENS), dense_biased_routing),
    Program(fs.value_and_grad(expert_choice), {"expert": 2}, (SPECS, EXPERT, EXPERT), (P(), SPECS), (EXPERTS, *TOKENS),
            dense_grad(dense_expert_choice)),
]  # fmt: skip
