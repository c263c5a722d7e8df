"""Idioms of torch's autograd: forward mode, hooks, `.data`, local leaves, frozen layers, batched gradients.

Legend: B batch, D width, C classes; [n@axis] is a dim split over an axis.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch.func import grad, jacfwd

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, normal

DATA, MODEL = {"data": 2}, {"model": 2}
BATCH = P("data")
FIT = (P(), BATCH, BATCH)
X, LABELS = normal("x", 8, 6), torch.tensor([0, 3, 1, 1, 2, 0, 3, 2])  # [B@data, D], [B@data]
W = normal("w", 6, 4, std=0.5)  # [D, C]
SPLIT = {"w": fs.column("model"), "v": fs.row("model")}
NET = {"w": normal("w", 6, 4, std=0.5), "v": normal("v", 4, 4, std=0.5)}


def local_loss(w, x, labels):
    return F.cross_entropy(x @ w, labels)


def dense_gradient(w, x, labels):
    return x.T @ (torch.softmax(x @ w, -1) - F.one_hot(labels, 4)) / len(x)


def gauss_newton_by_forward_mode(w, x, y):
    """Gauss-Newton step from local Jacobians by jacfwd of replicated weights, [B@data, D]."""
    j = jacfwd(lambda w: torch.tanh(x @ w))(w)
    a, b = fs.psum((j.T @ j, j.T @ (torch.tanh(x @ w) - y)), "data")
    return w - torch.linalg.solve(a + 0.1 * torch.eye(len(w)), b)


def dense_gauss_newton(w, x, y):
    t = torch.tanh(x @ w)
    j = (1 - t.square())[:, None] * x
    rows = torch.cat([j, 0.1**0.5 * torch.eye(len(w), dtype=x.dtype)])
    return w - torch.linalg.lstsq(rows, torch.cat([t - y, torch.zeros(len(w), dtype=x.dtype)])).solution


def step_by_data(p, x, labels, lr):
    """`backward` on split leaves, and the old idiom of a step on `.data`."""
    p = {k: w.clone().requires_grad_() for k, w in p.items()}
    for _ in range(2):
        hidden = torch.tanh(fs.pvary(x, "model") @ p["w"])
        F.cross_entropy(fs.psum(hidden @ p["v"], "model"), labels).backward()
        for w in p.values():
            w.data -= lr * w.grad.data
            w.grad = None
    return {k: w.detach() for k, w in p.items()}


def dense_steps(p, x, labels, lr):
    for _ in range(2):
        g = grad(lambda p: F.cross_entropy(torch.tanh(x @ p["w"]) @ p["v"], labels))(p)
        p = {k: p[k] - lr * g[k] for k in p}
    return p


def local_leaves(w, x, labels, lr):
    """Accumulation in `.grad` of a leaf that varies, without communication, and one mean at the end."""
    leaf = fs.pvary(w, "data").clone().requires_grad_()
    for a, b in zip(x.chunk(2), labels.chunk(2), strict=True):
        (local_loss(leaf, a, b) / 2).backward()
    return w - lr * fs.pmean(leaf.grad, "data")


def hook_that_reduces(w, x, labels, lr):
    """The same with a hook on the leaf that averages each gradient over the ranks."""
    leaf = fs.pvary(w, "data").clone().requires_grad_()
    totals = []
    leaf.register_hook(lambda g: totals.append(fs.pmean(g, "data")))
    local_loss(leaf, x, labels).backward()
    return w - lr * totals[0]


def dense_local_leaves(w, x, labels, lr):
    return w - lr * dense_gradient(w, x, labels)


def frozen_convolutions(head, frozen, images, labels):
    """A head on a frozen extractor of torch's own layers, with replicated weights and running statistics."""

    def loss(head):
        h = F.conv2d(images, frozen["kernel"], frozen["bias"], padding=1)
        h = F.batch_norm(h, frozen["mean"], frozen["var"], frozen["gain"], frozen["shift"])
        h = F.prelu(h, frozen["slope"]).flatten(1)
        h = F.layer_norm(h, (32,), frozen["norm"])
        weight = fs.pvary(head, "data")
        return fs.pmean(F.cross_entropy(F.linear(h, weight), labels), "data")

    return fs.value_and_grad(loss)(head)


def dense_frozen_convolutions(head, frozen, images, labels):
    h = F.unfold(images, 3, padding=1).mT @ frozen["kernel"].flatten(1).T + frozen["bias"]
    h = (h - frozen["mean"]) / (frozen["var"] + 1e-5).sqrt() * frozen["gain"] + frozen["shift"]
    h = torch.where(h > 0, h, frozen["slope"] * h).mT.flatten(1)
    h = (h - h.mean(1, keepdim=True)) / (h.var(1, correction=0, keepdim=True) + 1e-5).sqrt() * frozen["norm"]
    probs = torch.softmax(h @ head.T, -1)
    loss = -probs[torch.arange(len(labels)), labels].log().mean()
    return loss, (probs - F.one_hot(labels, 3)).T @ h / len(labels)


def frozen_embedding(head, table, positions, tokens, weights):
    """Bag of frozen embeddings, by F.embedding_bag and a positive weight of each class."""

    def loss(head):
        h = F.embedding_bag(tokens, table, mode="sum") + positions.sum(0)
        logits = h @ fs.pvary(head, "data")
        targets = (tokens[:, :1] > torch.tensor([2, 5])).float()
        return fs.pmean(F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weights), "data")

    return fs.value_and_grad(loss)(head)


def dense_frozen_embedding(head, table, positions, tokens, weights):
    h = (table[tokens] + positions).sum(1)
    targets = tokens[:, :1] > torch.tensor([2, 5])

    def loss(head):
        logits = h @ head
        return torch.where(targets, weights * F.softplus(-logits), F.softplus(logits)).mean()

    return torch.func.grad_and_value(loss)(head)[::-1]


def hessian_by_functional(w, x, y):
    """A Newton step by torch.autograd.functional."""

    def loss(w):
        return fs.pmean(F.softplus(-y * (x @ fs.pvary(w, "data"))).mean(), "data") + 0.05 * w.square().sum()

    return w - torch.linalg.solve(
        torch.autograd.functional.hessian(loss, w), torch.autograd.functional.jacobian(loss, w)
    )


def dense_hessian_by_functional(w, x, y):
    p = torch.sigmoid(-y * (x @ w))
    g = -(y * p) @ x / len(x) + 0.1 * w
    h = (x.T * (p * (1 - p))) @ x / len(x) + 0.1 * torch.eye(len(w), dtype=w.dtype)
    return w - torch.linalg.inv(h) @ g


FROZEN = {
    "kernel": normal("kernel", 2, 1, 3, 3), "bias": normal("bias", 2), "mean": normal("mean", 2),
    "var": normal("var", 2).square() + 0.5, "gain": normal("gain", 2), "shift": normal("shift", 2),
    "slope": torch.tensor([0.2]), "norm": normal("norm", 32),
}  # fmt: skip
RATE = torch.tensor(0.3)
STEPS = (SPLIT, P(), P(), P())
CURVE = (normal("w", 4).double(), normal("x", 8, 4).double(), normal("y", 8).double())
PROGRAMS = [
    Program(gauss_newton_by_forward_mode, DATA, FIT, P(), CURVE, dense_gauss_newton),
    Program(step_by_data, MODEL, STEPS, SPLIT, (NET, X, LABELS, RATE), dense_steps),
    Program(local_leaves, DATA, (*FIT, P()), P(), (W, X, LABELS, RATE), dense_local_leaves),
    Program(hook_that_reduces, DATA, (*FIT, P()), P(), (W, X, LABELS, RATE), dense_local_leaves),
    Program(
        frozen_convolutions, DATA, (P(), P(), BATCH, BATCH), P(),
        (normal("head", 3, 32, std=0.2), FROZEN, normal("images", 4, 1, 4, 4), torch.tensor([0, 2, 1, 1])),
        dense_frozen_convolutions,
    ),
    Program(
        frozen_embedding, DATA, (P(), P(), P(), BATCH, P()), P(),
        (normal("head", 5, 2), normal("table", 9, 5), normal("positions", 3, 5),
         torch.arange(12).view(4, 3) * 5 % 9, torch.tensor([2.0, 0.5])), dense_frozen_embedding,
    ),
    Program(hessian_by_functional, DATA, FIT, P(), (CURVE[0], CURVE[1], CURVE[2].sign()), dense_hessian_by_functional),
]  # fmt: skip
