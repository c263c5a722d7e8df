"""An ensemble of chains, one for a rank. Legend: M members, D width; [M@member] is a dim split over an axis."""

from __future__ import annotations

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, normal


def replica_exchange_chain(p: Tensor, heat: Tensor, key: Tensor) -> Tensor:  # p [M@member, D], heat [M@member]
    """Parallel tempering: Langevin steps at each temperature, then odd and even neighbours swap by Metropolis."""
    energy = lambda p: ((p.square() - 1).square()).sum(-1)  # noqa: E731
    at = fs.axis_index("member") * len(p) + torch.arange(len(p))
    heats = fs.all_gather(heat, "member")
    for step in range(2):
        noise = fs.random.normal(fs.fold_in(key, step), (4, 2), spec=P("member"))
        leaf = p.detach().requires_grad_()
        (slope,) = torch.autograd.grad(energy(leaf).sum(), leaf)
        p = p - 0.05 * slope + (0.1 * heat).sqrt()[:, None] * noise
        everyone = fs.all_gather(p, "member")
        low = at - (at - step) % 2  # the colder one of the pair
        partner = torch.where(at == low, low + 1, low)
        paired = (low >= 0) & (low + 1 < len(heats))
        partner = partner.where(paired, at)
        gain = (energy(p) - energy(everyone[partner])) * (1 / heat - 1 / heats[partner])
        u = fs.random.uniform(fs.fold_in(key, 100 + step), (4,))[low.clamp(min=0)]  # one number for each pair
        p = everyone[partner.where(u.log() < gain, at)]
    return p


def dense_replica_exchange_chain(p: Tensor, heat: Tensor, key: Tensor) -> Tensor:
    energy = lambda p: ((p.square() - 1).square()).sum(-1)  # noqa: E731
    for step in range(2):
        noise = fs.random.normal(fs.fold_in(key, step), (4, 2))
        p = p - 0.05 * 4 * p * (p.square() - 1) + (0.1 * heat).sqrt()[:, None] * noise
        u = fs.random.uniform(fs.fold_in(key, 100 + step), (4,))
        for i in range(step % 2, 3, 2):
            gain = (energy(p[i]) - energy(p[i + 1])) * (1 / heat[i] - 1 / heat[i + 1])
            if u[i].log() < gain:
                p = p[[*range(i), i + 1, i, *range(i + 2, 4)]]
    return p


MEMBER = P("member")

PROGRAMS = [
    Program(replica_exchange_chain, {"member": 4}, (MEMBER, MEMBER, P()), MEMBER,
            (normal("chains", 4, 2), torch.tensor([0.1, 0.5, 2.0, 5.0]), fs.key(3)), dense_replica_exchange_chain),
]  # fmt: skip
