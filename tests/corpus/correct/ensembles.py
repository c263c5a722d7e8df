"""Independent models, one for a rank or several, and searches over them.

Legend: M members, I islands, B batch, D width; [M@member] is a dim split over an axis.
"""

from __future__ import annotations

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, normal

Params = dict[str, Tensor]


def predict(p: Params, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["up"]) @ p["down"]


def ensemble_prediction(p: Params, x: Tensor) -> tuple[Tensor, Tensor]:  # up [M@member, D, F], x [B, D]
    """Mean and disagreement of the members' predictions, several members a rank."""
    with torch.no_grad():
        y = torch.func.vmap(predict, in_dims=(0, None))(p, x)  # [M@member, B, D]
        mean = fs.pmean(y.mean(0), "member")
        return mean, fs.pmean((y - mean).square().mean(0), "member").sqrt()


def dense_ensemble_prediction(p: Params, x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.einsum("mbf,mfd->mbd", torch.tanh(torch.einsum("bd,mdf->mbf", x, p["up"])), p["down"])
    return y.mean(0), y.std(0, unbiased=False)


def best_of_a_grid(w: Tensor, rates: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # rates [M@member]
    """Train from one start with each learning rate; take the weights of the lowest loss, of any rank."""
    start, x, y = fs.pvary((w, x, y), "member")
    error = lambda w: (x @ w - y).square().mean()  # noqa: E731

    def trained(rate: Tensor) -> Tensor:
        now = start
        for _ in range(3):
            now = now - rate * torch.func.grad(error)(now)
        return now

    models = torch.func.vmap(trained)(rates)  # [M@member, D]
    losses = torch.func.vmap(error)(models)
    best = fs.pmin(losses.amin(), "member")
    return fs.psum((models * (losses == best)[:, None]).sum(0), "member"), best


def dense_best_of_a_grid(w: Tensor, rates: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    models = []
    for rate in rates:
        now = w
        for _ in range(3):
            now = now - rate * 2 * x.T @ (x @ now - y) / len(y)
        models.append(now)
    losses = torch.stack([(x @ m - y).square().mean() for m in models])
    return models[int(losses.argmin())], losses.min()


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


MEMBER, DATA = P("member"), P("data")
MODELS = {"up": normal("member up", 4, 2, 5), "down": normal("member down", 4, 5, 2)}
X, Y = normal("x", 6, 2), normal("y", 6, 2)

PROGRAMS = [
    Program(ensemble_prediction, {"member": 2}, (MEMBER, P()), P(), (MODELS, X), dense_ensemble_prediction),
    Program(best_of_a_grid, {"member": 3}, (P(), MEMBER, P(), P()), P(),
            (normal("w", 2), torch.tensor([0.01, 0.3, 0.1, 1.5, 0.03, 0.05]), X, Y[:, 0]), dense_best_of_a_grid),
    Program(replica_exchange_chain, {"member": 4}, (MEMBER, MEMBER, P()), MEMBER,
            (normal("chains", 4, 2), torch.tensor([0.1, 0.5, 2.0, 5.0]), fs.key(3)), dense_replica_exchange_chain),
]  # fmt: skip
