"""Second derivatives and derivatives per example.

Legend: B batch, D width, C classes, K tasks or members; [n@axis] is a dim split over an axis.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch.func import grad, hessian, jvp, vmap

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, normal

DATA = {"data": 2}
BATCH = P("data")
FIT = (P(), BATCH, BATCH)
X = normal("x", 8, 4).double()  # [B@data, D]
Y = normal("y", 8).double()  # [B@data]
SIGNS = (Y > 0).double()
W = normal("w", 4, std=0.5).double()  # [D]
V = normal("v", 4).double()


def logistic_loss(w, x, y):
    return fs.pmean(F.binary_cross_entropy_with_logits(x @ fs.pvary(w, "data"), y), "data")


def net(p, x):
    return torch.tanh(x @ p["w"]) @ p["v"]


def net_loss(p, x, y):
    return fs.pmean((net(fs.pvary(p, "data"), x) - y).square().mean(), "data")


def dense_net_loss(p, x, y):
    return (net(p, x) - y).square().mean()


def laplace_approximation(w, x, y, new):
    """Posterior variance of predictions: the Hessian of the loss at w, inverted, and local test rows."""
    precision = fs.axis_size("data") * len(x) * hessian(logistic_loss)(w, x, y) + torch.eye(4)
    root = torch.linalg.cholesky(precision)
    variance = torch.linalg.solve_triangular(root, new.T, upper=False).square().sum(0)  # [B@data]
    return torch.sigmoid(new @ w / torch.sqrt(1 + torch.pi / 8 * variance)), torch.logdet(precision)


def dense_laplace(w, x, y, new):
    p = torch.sigmoid(x @ w)
    precision = (x.T * (p * (1 - p))) @ x + torch.eye(4, dtype=x.dtype)
    variance = torch.einsum("bd,de,be->b", new, torch.linalg.inv(precision), new)
    return torch.sigmoid(new @ w / (1 + torch.pi * variance / 8) ** 0.5), torch.linalg.eigvalsh(precision).log().sum()


def influence_functions(w, x, y, test_x, test_y):
    """Influence of each training row on one test loss: an inverse Hessian by conjugate gradients."""

    def regularized(w):
        return logistic_loss(w, x, y) + 0.05 * w.square().sum()

    def product(v):
        return jvp(grad(regularized), (w,), (v,))[1]

    goal = grad(lambda w: F.binary_cross_entropy_with_logits(test_x @ w, test_y))(w)
    solution, r = torch.zeros_like(goal), goal
    d = r
    for _ in range(2):
        hd = product(d)
        step = (r @ r) / (d @ hd)
        solution, after = solution + step * d, r - step * hd
        d, r = after + (after @ after) / (r @ r) * d, after
    each = vmap(grad(lambda w, a, b: F.binary_cross_entropy_with_logits(a @ w, b)), (None, 0, 0))
    return -each(fs.pvary(w, "data"), x, y) @ solution


def dense_influence(w, x, y, test_x, test_y):
    p = torch.sigmoid(x @ w)
    h = (x.T * (p * (1 - p))) @ x / len(x) + 0.1 * torch.eye(2, dtype=x.dtype)
    goal = (torch.sigmoid(test_x @ w) - test_y) * test_x
    return -((p - y)[:, None] * x) @ torch.linalg.inv(h) @ goal


def ensemble(members, x, y):
    """Deep ensemble: members [K@member, ...] trained by vmap, each on all of the split data."""

    def one(p):
        return fs.value_and_grad(net_loss)(p, x, y)

    losses, grads = vmap(one)(members)
    return losses, fs.tree.map(lambda w, g: w - 0.1 * g, members, grads)


def dense_ensemble(members, x, y):
    rows = [{k: v[i] for k, v in members.items()} for i in range(len(members["v"]))]
    grads = [grad(dense_net_loss)(p, x, y) for p in rows]
    new = {k: torch.stack([p[k] - 0.1 * g[k] for p, g in zip(rows, grads, strict=True)]) for k in members}
    return torch.stack([dense_net_loss(p, x, y) for p in rows]), new


MEMBERS = {"w": normal("members", 4, 4, 5, std=0.6).double(), "v": normal("members", 4, 5, std=0.6).double()}
PROGRAMS = [
    Program(
        laplace_approximation, DATA, (*FIT, BATCH), (BATCH, P()), (W, X, SIGNS, X.flip(1)), dense_laplace
    ),
    Program(
        influence_functions, DATA, (*FIT, P(), P()), BATCH, (W[:2], X[:, :2], SIGNS, V[:2], torch.tensor(1.0).double()),
        dense_influence,
    ),
    Program(
        ensemble, {"member": 2, "data": 2}, (P("member"), BATCH, BATCH), P("member"), (MEMBERS, X, Y), dense_ensemble
    ),
]  # fmt: skip
