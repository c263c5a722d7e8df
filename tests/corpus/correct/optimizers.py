"""Optimizers, written by hand for a split tree.

Legend: B batch, D width, F hidden; [n@axis] is a dim split over an axis.
"""

from __future__ import annotations

import torch
from torch.func import grad as torch_grad

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, normal

BOTH = {"data": 2, "model": 2}
DATA, MODEL = {"data": 2, "model": 1}, {"data": 1, "model": 2}
SPECS = {"up": fs.column("model"), "down": fs.row("model"), "bias": P()}
PARAMS = {
    "up": normal("up", 6, 8, std=0.4),  # [D, F@model]
    "down": normal("down", 8, 6, std=0.4),  # [F@model, D]
    "bias": normal("bias", 6, std=0.1),
}
MOMENT = fs.tree.map(lambda w: 0.1 * w.flip(0), PARAMS)
SECOND = fs.tree.map(lambda w: 0.2 + w.square(), PARAMS)
X, Y = normal("x", 8, 6), normal("y", 8, 6)  # [B@data, D]
RATE = torch.tensor(0.1)
BATCH = (P("data"), P("data"))


def loss_fn(p, x, y):
    p = fs.pvary(p, "data")
    h = torch.tanh(fs.pvary(x, "model") @ p["up"])
    out = fs.psum(h @ p["down"], "model") + p["bias"]
    return fs.pmean((out - y).square().mean(), "data")


def dense_loss(p, x, y):
    return (torch.tanh(x @ p["up"]) @ p["down"] + p["bias"] - y).square().mean()


def split_squares(p):
    """Squared norm of each leaf, summed over the ranks that have its parts."""
    return {k: fs.psum(v.square().sum(), "model") if SPECS[k].axes else v.square().sum() for k, v in p.items()}


def lamb(p, m, v, x, y, lr):
    """Adam's direction, scaled to the size of each leaf."""
    grads = fs.grad(loss_fn)(p, x, y)
    m = fs.tree.map(lambda a, g: torch.lerp(g, a, 0.9), m, grads)
    v = fs.tree.map(lambda a, g: 0.99 * a + 0.01 * g.square(), v, grads)
    step = fs.tree.map(lambda a, b, w: a / (b.sqrt() + 1e-6) + 0.01 * w, m, v, p)
    ratio = fs.tree.map(lambda a, b: torch.sqrt(a / b), split_squares(p), split_squares(step))
    return fs.tree.map(lambda w, r, s: w - lr * r * s, p, ratio, step), m, v


def dense_lamb(p, m, v, x, y, lr):
    grads = torch_grad(dense_loss)(p, x, y)
    m = {k: 0.9 * m[k] + 0.1 * grads[k] for k in p}
    v = {k: 0.99 * v[k] + 0.01 * grads[k] ** 2 for k in p}
    new = {}
    for k, w in p.items():
        step = m[k] / (v[k].sqrt() + 1e-6) + 0.01 * w
        new[k] = w - lr * w.norm() / step.norm() * step
    return new, m, v


def lion(p, m, x, y, lr, decay):
    """Sign of an interpolated momentum, with decoupled weight decay."""
    grads = fs.grad(loss_fn)(p, x, y)
    new = fs.tree.map(lambda w, a, g: w - lr * (torch.sign(0.9 * a + 0.1 * g) + decay * w), p, m, grads)
    return new, fs.tree.map(lambda a, g: 0.99 * a + 0.01 * g, m, grads)


def dense_lion(p, m, x, y, lr, decay):
    grads = torch_grad(dense_loss)(p, x, y)
    new = {k: p[k] * (1 - lr * decay) - lr * (0.9 * m[k] + 0.1 * grads[k]).sign() for k in p}
    return new, {k: 0.99 * m[k] + 0.01 * grads[k] for k in p}


def inverse_root(a, power):
    values, vectors = torch.linalg.eigh(a)
    return vectors @ torch.diag(values.clamp(min=1e-6) ** (-1 / power)) @ vectors.T


def shampoo_of_columns(p, x, y, lr):
    """One-sided Shampoo: the Gram matrix of the rows is a sum over ranks, its root multiplies each rank's columns."""
    g = fs.grad(loss_fn)(p, x, y)["up"]  # [D, F@model]
    left = fs.psum(g @ g.T, "model") + 1e-4 * torch.eye(len(g))
    return p["up"] - lr * inverse_root(left, 2) @ g


def dense_shampoo(p, x, y, lr):
    g = torch_grad(dense_loss)(p, x, y)["up"]
    u, s, v = torch.linalg.svd(g, full_matrices=False)
    return p["up"] - lr * u @ torch.diag(s / (s.square() + 1e-4).sqrt()) @ v


def in_place_adam(p, m, v, x, y, lr):
    """Adam with in-place updates under no_grad, on leaves whose gradients `backward` accumulates."""
    p, m, v = fs.tree.map(torch.clone, (p, m, v))
    fs.tree.map(lambda w: w.requires_grad_(), p)
    loss_fn(p, x, y).backward()
    with torch.no_grad():
        for k, w in p.items():
            m[k].mul_(0.9).add_(w.grad, alpha=0.1)
            v[k].mul_(0.99).addcmul_(w.grad, w.grad, value=0.01)
            w.sub_(lr * m[k] / (v[k].sqrt() + 1e-6))
    return {k: w.detach() for k, w in p.items()}, m, v


def dense_in_place_adam(p, m, v, x, y, lr):
    grads = torch_grad(dense_loss)(p, x, y)
    m = {k: 0.9 * m[k] + 0.1 * grads[k] for k in p}
    v = {k: 0.99 * v[k] + 0.01 * grads[k] ** 2 for k in p}
    return {k: p[k] - lr * m[k] / (v[k].sqrt() + 1e-6) for k in p}, m, v


STEP = (SPECS, *BATCH, P())
PROGRAMS = [
    Program(
        lamb, MODEL, (SPECS, SPECS, *STEP), (SPECS, SPECS, SPECS), (PARAMS, MOMENT, SECOND, X, Y, RATE), dense_lamb
    ),
    Program(
        lion, MODEL, (SPECS, *STEP, P()), (SPECS, SPECS), (PARAMS, MOMENT, X, Y, RATE, torch.tensor(0.01)), dense_lion
    ),
    Program(
        shampoo_of_columns, MODEL, STEP, fs.column("model"),
        fs.tree.map(torch.Tensor.double, (PARAMS, X, Y, RATE)), dense_shampoo,
    ),
    Program(
        in_place_adam, BOTH, (SPECS, SPECS, *STEP), (SPECS, SPECS, SPECS), (PARAMS, MOMENT, SECOND, X, Y, RATE),
        dense_in_place_adam,
    ),
]  # fmt: skip
