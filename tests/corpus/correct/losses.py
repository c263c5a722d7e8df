"""Losses: unequal counts, masks, margins, sequences, graphs.

Legend: B batch, D width, C classes, T length, V vocabulary, N nodes, E edges; [n@axis] is a dim split over an axis.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch.func import grad_and_value

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, normal

DATA = {"data": 2}
BATCH = P("data")
X, Y = normal("x", 8, 6), normal("y", 8, 4)  # [B@data, D], [B@data, C]
LABELS = torch.tensor([0, 3, 1, 1, 2, 0, 3, 2])
W = normal("w", 6, 4, std=0.5)  # [D, C]


def dense_value_and_grad(loss, *args):
    return grad_and_value(loss)(*args)[::-1]


def label_smoothing(w, x, labels):
    """Cross-entropy with smoothed labels, written out."""

    def loss(w):
        logp = torch.log_softmax(x @ fs.pvary(w, "data"), -1)
        target = torch.full_like(logp, 0.1 / 4).scatter_add_(1, labels[:, None], torch.full((len(x), 1), 0.9))
        return fs.pmean(-(target * logp).sum(-1).mean(), "data")

    return fs.value_and_grad(loss)(w)


def dense_label_smoothing(w, x, labels):
    return dense_value_and_grad(lambda w: F.cross_entropy(x @ w, labels, label_smoothing=0.1), w)


def mixup_over_ranks(w, x, labels, lam):
    """Mixup with the next rank's batch."""
    n = fs.axis_size("data")
    around = [(i, (i + 1) % n) for i in range(n)]
    other, other_labels = fs.ppermute((x, labels), "data", around)
    mixed = torch.lerp(other, x, lam)

    def loss(w):
        logits = mixed @ fs.pvary(w, "data")
        return fs.pmean(
            lam * F.cross_entropy(logits, labels) + (1 - lam) * F.cross_entropy(logits, other_labels), "data"
        )

    return fs.value_and_grad(loss)(w)


def dense_mixup_over_ranks(w, x, labels, lam):
    other, other_labels = x.roll(4, 0), labels.roll(4)

    def loss(w):
        target = lam * F.one_hot(labels, 4) + (1 - lam) * F.one_hot(other_labels, 4)
        return F.cross_entropy((lam * x + (1 - lam) * other) @ w, target)

    return dense_value_and_grad(loss, w)


def additive_angular_margin(p, x, labels):
    """ArcFace with the classes split over model: margin on the own class, softmax over the ranks."""

    def loss(p):
        features = F.normalize(x @ fs.pvary(p["backbone"], "data"), dim=-1)  # [B@data, D]
        centers = F.normalize(fs.pvary(p["centers"], "data"), dim=-1)  # [C@model, D]
        cosine = fs.pvary(features, "model") @ centers.T
        local = labels - fs.axis_index("model") * len(centers)
        own = local[:, None] == torch.arange(len(centers))  # [B@data, C@model]
        angle = torch.acos(cosine.clamp(-0.999, 0.999))
        logits = 8 * torch.where(own, torch.cos(angle + 0.3), cosine)
        top = fs.pmax(logits.detach().amax(-1), "model")
        total = fs.psum(torch.exp(logits - top[:, None]).sum(-1), "model")
        picked = fs.psum((logits * own).sum(-1), "model")
        return fs.pmean((total.log() + top - picked).mean(), "data")

    return fs.value_and_grad(loss)(p)


def dense_angular_margin(p, x, labels):
    def loss(p):
        cosine = F.normalize(x @ p["backbone"], dim=-1) @ F.normalize(p["centers"], dim=-1).T
        sine = (1 - cosine.square()).sqrt()
        moved = cosine * math.cos(0.3) - sine * math.sin(0.3)
        return F.cross_entropy(8 * torch.where(F.one_hot(labels, 4).bool(), moved, cosine), labels)

    return dense_value_and_grad(loss, p)


def graph_attention(p, nodes, sources, targets):
    """Attention over the edges of each node, with a softmax whose edges are on several ranks."""
    n = len(nodes)

    def loss(p):
        h = nodes @ p["w"]
        values, left, right = fs.pvary((h, h @ p["left"], h @ p["right"]), "data")
        scores = F.leaky_relu(left[sources] + right[targets], 0.2)  # [E@data]
        top = torch.full((n,), -math.inf).scatter_reduce(0, targets, scores.detach(), "amax")
        top = fs.pmax(top, "data").clamp(min=-1e4)
        weights = torch.exp(scores - top[targets])
        total = torch.zeros(n).index_add(0, targets, weights)
        mixed = torch.zeros(n, h.shape[1]).index_add(0, targets, weights[:, None] * values[sources])
        total, mixed = fs.psum((total, mixed), "data")
        return torch.tanh(mixed / (total[:, None] + 1e-9)).square().mean()

    return fs.value_and_grad(loss)(p)


def dense_graph_attention(p, nodes, sources, targets):
    def loss(p):
        h = nodes @ p["w"]
        scores = torch.full((len(nodes), len(nodes)), -math.inf)
        for i, j in zip(sources.tolist(), targets.tolist(), strict=True):
            scores = scores.index_put((torch.tensor(j), torch.tensor(i)),
                                      F.leaky_relu(h[i] @ p["left"] + h[j] @ p["right"], 0.2))  # fmt: skip
        rows = sorted(set(targets.tolist()))
        mixed = torch.softmax(scores[rows], -1) @ h
        return torch.tanh(mixed).square().sum() / h.numel()

    return dense_value_and_grad(loss, p)


FIT = (P(), BATCH, BATCH)
PROGRAMS = [
    Program(label_smoothing, DATA, FIT, P(), (W, X, LABELS), dense_label_smoothing),
    Program(
        mixup_over_ranks, DATA, (*FIT, P()), P(), (W, X, LABELS, torch.tensor(0.6)), dense_mixup_over_ranks,
        meshes=({"data": 2},),
    ),
    Program(
        additive_angular_margin, {"data": 2, "model": 2}, ({"backbone": P(), "centers": P("model")}, BATCH, BATCH),
        (P(), {"backbone": P(), "centers": P("model")}),
        ({"backbone": normal("backbone", 6, 5), "centers": normal("centers", 4, 5)}, X, LABELS), dense_angular_margin,
    ),
    Program(
        graph_attention, DATA, (P(), P(), BATCH, BATCH), P(),
        ({"w": normal("w", 5, 4), "left": normal("left", 4), "right": normal("right", 4)}, normal("nodes", 7, 5),
         torch.tensor([0, 1, 2, 3, 4, 5, 6, 0]), torch.tensor([1, 2, 1, 4, 1, 2, 4, 4])), dense_graph_attention,
    ),
]  # fmt: skip
