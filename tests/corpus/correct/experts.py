"""Mixtures of experts, with experts split over the ranks.

Legend: G groups of tokens, S tokens of a group, T tokens, E experts, C capacity, D width; [E@expert] is a dim split
over an axis. Groups are split as the experts are, so that the capacity of a group is the same on every mesh.
"""

from __future__ import annotations

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, dense_grad, normal

Params = dict[str, Tensor]


def every_expert(p: Params, x: Tensor) -> Tensor:
    """Results of all experts for all tokens: [T, D] -> [T, E, D]."""
    return torch.einsum("tef,efd->ted", torch.relu(torch.einsum("td,edf->tef", x, p["up"])), p["down"])


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


EXPERT = P("expert")
EXPERTS = {"router": normal("router", 3, 4), "up": normal("expert up", 4, 3, 5), "down": normal("expert down", 4, 5, 3)}
SPECS = {"router": P(), "up": EXPERT, "down": EXPERT}
TOKENS = normal("tokens", 8, 3), normal("token targets", 8, 3)

PROGRAMS = [
    Program(fs.value_and_grad(experts_and_data_parallel), {"data": 2, "expert": 2}, (SPECS, P("data"), P("data")),
            (P(), SPECS), (EXPERTS, *TOKENS), dense_grad(dense_experts_and_data_parallel)),
]  # fmt: skip
