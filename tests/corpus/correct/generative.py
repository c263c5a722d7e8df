"""Generative models. Legend: B batch, D data, Z latent, H hidden; [n@axis] is a dim split over an axis."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch.func import grad, vmap

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, normal

DATA = {"data": 2}
BATCH = P("data")
X = normal("x", 8, 4)  # [B@data, D]
KEY = fs.key(11)


def draw(key, like, width):
    """Normal draws for each row of a batch that is split over data."""
    return fs.random.normal(key, (fs.global_shape(like, P("data"))[0], width), spec=P("data"))


def mlp(p, x):
    return torch.tanh(x @ p["w"] + p["b"]) @ p["v"]


def mlp_params(name, n_in, n_out, hidden=5):
    shapes = {"w": (n_in, hidden), "b": (hidden,), "v": (hidden, n_out)}
    return {k: normal(f"{name} {k}", *s, std=0.6) for k, s in shapes.items()}


@torch.no_grad()
def ancestral_sampling(p, start, alphas, key):
    """Sampling from a diffusion model: replicated weights and schedule, noise split as the batch is."""
    x = start
    for step in range(len(alphas) - 1, -1, -1):
        a = alphas[step]
        before = alphas[step - 1] if step else torch.ones(())
        beta = 1 - a / before
        level = torch.full((len(x), 1), step / len(alphas))
        guess = mlp(p, torch.cat([x, level], -1))
        mean = (x - beta / (1 - a).sqrt() * guess) / (1 - beta).sqrt()
        noise = draw(fs.fold_in(key, step), x, x.shape[1]) if step else torch.zeros_like(x)
        x = mean + beta.sqrt() * noise
    return x


def dense_ancestral_sampling(p, start, alphas, key):
    x, levels = start, [1.0, *alphas.tolist()]
    for step in reversed(range(len(alphas))):
        beta = 1 - levels[step + 1] / levels[step]
        guess = mlp(p, F.pad(x, (0, 1), value=step / len(alphas)))
        x = (x - beta / (1 - levels[step + 1]) ** 0.5 * guess) / (1 - beta) ** 0.5
        if step:
            x = x + beta**0.5 * fs.random.normal(fs.fold_in(key, step), x.shape)
    return x


def contrastive_divergence(p, x, chain, key, step):
    """Energy-based model: a persistent Langevin chain, split as the batch is, against replicated weights."""

    def energy(p, x):
        return mlp(p, x).squeeze(-1)

    for i in range(2):
        slope = vmap(grad(energy, 1), (None, 0))(p, chain)
        chain = chain - 0.5 * step * slope + step.sqrt() * draw(fs.fold_in(key, i), chain, x.shape[1])

    def loss(p):
        p = fs.pvary(p, "data")
        return fs.pmean(energy(p, x).mean() - energy(p, chain).mean(), "data")

    return fs.grad(loss)(p), chain


def dense_contrastive_divergence(p, x, chain, key, step):
    for i in range(2):
        hidden = torch.tanh(chain @ p["w"] + p["b"])
        slope = ((1 - hidden.square()) * p["v"][:, 0]) @ p["w"].T
        noise = fs.random.normal(fs.fold_in(key, i), chain.shape)
        chain = chain - 0.5 * step * slope + step**0.5 * noise
    return grad(lambda p: mlp(p, x).mean() - mlp(p, chain).mean())(p), chain


PLAYERS = mlp_params("generator", 2, 4), mlp_params("critic", 4, 1)
ALPHAS = torch.tensor([0.95, 0.6, 0.2])
TIMED = mlp_params("timed", 5, 4)
PROGRAMS = [
    Program(
        ancestral_sampling, DATA, (P(), BATCH, P(), P()), BATCH, (TIMED, X, ALPHAS, KEY), dense_ancestral_sampling
    ),
    Program(
        contrastive_divergence, DATA, (P(), BATCH, BATCH, P(), P()), (P(), BATCH),
        (PLAYERS[1], X, X.roll(1, 1), KEY, torch.tensor(0.1)), dense_contrastive_divergence,
    ),
]  # fmt: skip
