"""Mixed precision, recomputation, compressed and scaled gradients.

A sum of half-precision terms is rounded where it is cut, so the dense forms take the batch in the same two parts.
Legend: B batch, D width, F hidden; [n@axis] is a dim split over an axis.
"""

from __future__ import annotations

import torch
from torch.func import grad

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, normal

DATA = {"data": 2}
BATCH = P("data")
X, Y = normal("x", 8, 6), normal("y", 8, 6)  # [B@data, D]
NET = {"up": normal("up", 6, 8, std=0.4), "down": normal("down", 8, 6, std=0.4)}


def forward(p, x):
    return torch.tanh(x @ p["up"]) @ p["down"]


def squared_error(out, y):
    return (out.float() - y).square().mean()


def dense_halves(of_half, p, x, y):
    """Means over the two halves of the batch of (loss, grads)."""
    halves = [of_half(a, b) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
    mean = lambda a, b: (a.float() + b.float()) / 2  # noqa: E731
    return fs.tree.map(mean, *halves)


def half(tree):
    return fs.tree.map(lambda t: t.bfloat16(), tree)


def loss_scaling(p, state, x, y):
    """float16 computation, with a scale of the loss that is part of the state."""
    scaler = fs.LossScale(initial=128.0)

    def loss(p):
        q = fs.pvary(fs.cast(p, torch.float16), "data")
        return scaler.scale(fs.pmean(squared_error(forward(q, x.half()), y), "data"), state)

    grads, finite = scaler.unscale(fs.grad(loss)(p), state, P())
    return fs.cast(grads, torch.float16), scaler.adjust(state, finite)


def dense_loss_scaling(p, state, x, y):
    def of_half(x, y):
        q = {k: v.half() for k, v in p.items()}
        return (grad(lambda q: 128 * squared_error(forward(q, x.half()), y))(q),)

    (grads,) = dense_halves(of_half, p, x, y)
    return {k: (g / 128).half() for k, g in grads.items()}, {"scale": state["scale"], "good": state["good"] + 1}


STATE = {"scale": torch.tensor(128.0), "good": torch.tensor(3)}
PROGRAMS = [
    Program(loss_scaling, DATA, (P(), P(), BATCH, BATCH), P(), (NET, STATE, X, Y), dense_loss_scaling),
]  # fmt: skip
