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


def weighted_mean_of_unequal_counts(w, x, y, valid):
    """Mean squared error of the valid rows: a psum of sums over a psum of counts."""

    def loss(w):
        errors = (x @ fs.pvary(w, "data") - y).square().sum(-1)
        total, count = fs.psum(((errors * valid).sum(), valid.sum()), "data")
        return total / count

    return fs.value_and_grad(loss)(w)


def dense_unequal_counts(w, x, y, valid):
    return dense_value_and_grad(lambda w: (x[valid] @ w - y[valid]).square().sum(-1).mean(), w)


def masked_language_model(p, tokens, key):
    """Masked tokens by draws that are split as the batch is; the mean is over the masked ones of all ranks."""
    shape = fs.global_shape(tokens, P("data"))
    masked = fs.random.bernoulli(key, shape, p=0.4, spec=P("data"))
    inputs = torch.where(masked, 10, tokens)

    def loss(p):
        p = fs.pvary(p, "data")
        h = p["embed"][inputs]
        h = torch.tanh(h + h.mean(1, keepdim=True))
        losses = F.cross_entropy((h @ p["embed"].T).mT, tokens, reduction="none")  # [B@data, T]
        total, count = fs.psum(((losses * masked).sum(), masked.sum()), "data")
        return total / count

    return fs.value_and_grad(loss)(p)


def dense_masked_language_model(p, tokens, key):
    masked = fs.random.bernoulli(key, tokens.shape, p=0.4)

    def loss(p):
        h = p["embed"][tokens.masked_fill(masked, 10)]
        h = torch.tanh(h + h.mean(1, keepdim=True))
        return F.cross_entropy((h @ p["embed"].T)[masked], tokens[masked])

    return dense_value_and_grad(loss, p)


def label_smoothing(w, x, labels):
    """Cross-entropy with smoothed labels, written out."""

    def loss(w):
        logp = torch.log_softmax(x @ fs.pvary(w, "data"), -1)
        target = torch.full_like(logp, 0.1 / 4).scatter_add_(1, labels[:, None], torch.full((len(x), 1), 0.9))
        return fs.pmean(-(target * logp).sum(-1).mean(), "data")

    return fs.value_and_grad(loss)(w)


def dense_label_smoothing(w, x, labels):
    return dense_value_and_grad(lambda w: F.cross_entropy(x @ w, labels, label_smoothing=0.1), w)


def mixup(w, x, labels, weights):
    """Mixup of neighbours in the rank's batch, with a replicated weight for each step."""
    lam = weights[2]
    mixed = lam * x + (1 - lam) * x.flip(0)

    def loss(w):
        logits = mixed @ fs.pvary(w, "data")
        both = lam * F.cross_entropy(logits, labels) + (1 - lam) * F.cross_entropy(logits, labels.flip(0))
        return fs.pmean(both, "data")

    return fs.value_and_grad(loss)(w)


def dense_mixup(w, x, labels, weights):
    lam = float(weights[2])
    pair = torch.arange(8).view(2, 4).flip(1).flatten()  # each half of the batch reversed

    def loss(w):
        target = lam * F.one_hot(labels, 4) + (1 - lam) * F.one_hot(labels[pair], 4)
        return F.cross_entropy((lam * x + (1 - lam) * x[pair]) @ w, target)

    return dense_value_and_grad(loss, w)


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


def triplet_loss(w, anchor, positive, negative, margin):
    """Triplet margin loss; mean over the triplets that violate the margin, on all ranks."""

    def loss(w):
        local = fs.pvary(w, "data")
        a, b, c = (F.normalize(x @ local, dim=-1) for x in (anchor, positive, negative))
        hinge = torch.relu((a - b).norm(dim=-1) - (a - c).norm(dim=-1) + margin)
        return fs.psum(hinge.sum(), "data") / fs.psum((hinge > 0).sum(), "data").clamp(min=1)

    return fs.value_and_grad(loss)(w)


def dense_triplet_loss(w, anchor, positive, negative, margin):
    def loss(w):
        a, b, c = (F.normalize(x @ w, dim=-1) for x in (anchor, positive, negative))
        hinge = F.pairwise_distance(a, b, eps=0) - F.pairwise_distance(a, c, eps=0) + margin
        return hinge[hinge > 0].mean()

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


def connectionist_temporal(w, frames, targets, lengths, target_lengths):
    """CTC loss of frames [B@data, T, D], with lengths of frames and of targets that differ by row."""
    extended = F.pad(targets[:, :, None], (1, 0)).flatten(1)  # a blank before each label and one at the end
    extended = F.pad(extended, (0, 1))  # [B@data, S]
    may_skip = (extended != 0) & (extended != F.pad(extended, (2, 0))[:, :-2])

    def loss(w):
        logp = torch.log_softmax(frames @ fs.pvary(w, "data"), -1)
        emit = logp.gather(2, extended[:, None].expand(-1, frames.shape[1], -1))  # [B@data, T, S]
        alpha = torch.where(torch.arange(extended.shape[1]) < 2, emit[:, 0], -1e5)
        for t in range(1, frames.shape[1]):
            before = F.pad(alpha, (2, 0), value=-1e5)
            skipped = torch.where(may_skip, before[:, :-2], -1e5)
            new = torch.logsumexp(torch.stack([alpha, before[:, 1:-1], skipped]), 0) + emit[:, t]
            alpha = torch.where((t < lengths)[:, None], new, alpha)
        ends = alpha.gather(1, 2 * target_lengths[:, None] - torch.arange(2))
        return fs.pmean((-torch.logsumexp(ends, 1) / target_lengths).mean(), "data")

    return fs.value_and_grad(loss)(w)


def dense_connectionist_temporal(w, frames, targets, lengths, target_lengths):
    def loss(w):
        logp = torch.log_softmax(frames @ w, -1).transpose(0, 1)
        return F.ctc_loss(logp, targets, lengths, target_lengths)

    return dense_value_and_grad(loss, w)


def graph_convolution(w, nodes, sources, targets):
    """Two rounds of messages: the edges are split, segment sums are summed over the ranks."""

    def loss(w):
        h = nodes  # [N, D], the same on each rank
        for layer in w.unbind():
            sent = fs.pvary(h @ layer, "data")[sources]  # [E@data, D]
            sums = torch.zeros(len(nodes), h.shape[1]).index_add(0, targets, sent)
            degree = torch.zeros(len(nodes)).index_add(0, targets, torch.ones(len(targets)))
            sums, degree = fs.psum((sums, degree), "data")
            h = torch.tanh(sums / degree.clamp(min=1)[:, None]) + h
        return h.square().mean()

    return fs.value_and_grad(loss)(w)


def dense_graph_convolution(w, nodes, sources, targets):
    adjacency = torch.zeros(len(nodes), len(nodes))
    for i, j in zip(sources.tolist(), targets.tolist(), strict=True):
        adjacency[j, i] += 1
    adjacency = adjacency / adjacency.sum(1, keepdim=True).clamp(min=1)

    def loss(w):
        h = nodes
        for layer in w:
            h = torch.tanh(adjacency @ h @ layer) + h
        return h.square().mean()

    return dense_value_and_grad(loss, w)


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


def ranking_within_groups(w, x, relevance):
    """ListNet: a softmax over the items of each query; queries are split, [B@data, items, D]."""

    def loss(w):
        scores = x @ fs.pvary(w, "data")
        return fs.pmean(-(torch.softmax(relevance, -1) * torch.log_softmax(scores, -1)).sum(-1).mean(), "data")

    return fs.value_and_grad(loss)(w)


def dense_ranking(w, x, relevance):
    return dense_value_and_grad(lambda w: F.cross_entropy(x @ w, torch.softmax(relevance, -1)), w)


def multitask_uncertainty(p, x, y, labels):
    """Two losses weighted by learned, replicated variances."""

    def loss(p):
        local = fs.pvary({"w": p["w"], "v": p["v"]}, "data")
        fit = fs.pmean((x @ local["w"] - y).square().mean(), "data")
        classes = fs.pmean(F.cross_entropy(x @ local["v"], labels), "data")
        return (torch.exp(-p["s"]) * torch.stack([0.5 * fit, classes]) + 0.5 * p["s"]).sum()

    return fs.value_and_grad(loss)(p)


def dense_multitask(p, x, y, labels):
    def loss(p):
        a, b = p["s"]
        fit = F.mse_loss(x @ p["w"], y) / (2 * a.exp())
        return fit + F.cross_entropy(x @ p["v"], labels) / b.exp() + (a + b) / 2

    return dense_value_and_grad(loss, p)


def tied_embeddings(p, tokens):
    """Language model whose embedding is also its head; the vocabulary is gathered from its FSDP parts."""

    def loss(p):
        p = fs.unshard(p, {"embed": P("data"), "mix": P()}, "data")
        h = torch.tanh(p["embed"][tokens[:, :-1]].cumsum(1) @ p["mix"])
        logits = h @ p["embed"].T
        return fs.pmean(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), "data")

    return fs.value_and_grad(loss)(p)


def dense_tied_embeddings(p, tokens):
    def loss(p):
        h = torch.tanh(p["embed"][tokens[:, :-1]].cumsum(1) @ p["mix"])
        return F.cross_entropy((h @ p["embed"].T).mT, tokens[:, 1:])

    return dense_value_and_grad(loss, p)


FIT = (P(), BATCH, BATCH)
TOKENS = torch.arange(8 * 5).view(8, 5) * 7 % 10
TRIPLETS = (X, X + normal("positive", 8, 6, std=0.7), X + normal("negative", 8, 6, std=0.9))
FRAMES = normal("frames", 4, 6, 5)
TARGETS = torch.tensor([[1, 2, 3], [2, 2, 0], [3, 1, 1], [4, 0, 0]])
EDGES = torch.arange(16) * 5 % 7, torch.arange(16) * 3 % 6  # [E@data]; node 6 has no messages
EMBED_SPECS = {"embed": P("data"), "mix": P()}
PROGRAMS = [
    Program(
        weighted_mean_of_unequal_counts, DATA, (*FIT, BATCH), P(),
        (W, X, Y, torch.tensor([True, True, False, True, False, False, True, False])), dense_unequal_counts,
    ),
    Program(
        masked_language_model, DATA, (P(), BATCH, P()), P(), ({"embed": normal("embed", 11, 6)}, TOKENS, fs.key(5)),
        dense_masked_language_model,
    ),
    Program(label_smoothing, DATA, FIT, P(), (W, X, LABELS), dense_label_smoothing),
    Program(
        mixup, DATA, (*FIT, P()), P(), (W, X, LABELS, torch.tensor([0.1, 0.2, 0.7])), dense_mixup, meshes=({"data": 2},)
    ),
    Program(
        mixup_over_ranks, DATA, (*FIT, P()), P(), (W, X, LABELS, torch.tensor(0.6)), dense_mixup_over_ranks,
        meshes=({"data": 2},),
    ),
    Program(
        triplet_loss, DATA, (P(), BATCH, BATCH, BATCH, P()), P(), (W, *TRIPLETS, torch.tensor(0.1)), dense_triplet_loss
    ),
    Program(
        additive_angular_margin, {"data": 2, "model": 2}, ({"backbone": P(), "centers": P("model")}, BATCH, BATCH),
        (P(), {"backbone": P(), "centers": P("model")}),
        ({"backbone": normal("backbone", 6, 5), "centers": normal("centers", 4, 5)}, X, LABELS), dense_angular_margin,
    ),
    Program(
        connectionist_temporal, DATA, (P(), BATCH, BATCH, BATCH, BATCH), P(),
        (normal("w", 5, 5), FRAMES, TARGETS, torch.tensor([6, 5, 6, 4]), torch.tensor([3, 2, 3, 1])),
        dense_connectionist_temporal,
    ),
    Program(
        graph_convolution, DATA, (P(), P(), BATCH, BATCH), P(), (normal("w", 2, 5, 5), normal("nodes", 7, 5), *EDGES),
        dense_graph_convolution,
    ),
    Program(
        graph_attention, DATA, (P(), P(), BATCH, BATCH), P(),
        ({"w": normal("w", 5, 4), "left": normal("left", 4), "right": normal("right", 4)}, normal("nodes", 7, 5),
         torch.tensor([0, 1, 2, 3, 4, 5, 6, 0]), torch.tensor([1, 2, 1, 4, 1, 2, 4, 4])), dense_graph_attention,
    ),
    Program(
        ranking_within_groups, DATA, FIT, P(), (normal("w", 6), normal("items", 4, 5, 6), normal("relevance", 4, 5)),
        dense_ranking,
    ),
    Program(
        multitask_uncertainty, DATA, (*FIT, BATCH), P(),
        ({"w": W, "v": normal("v", 6, 4), "s": torch.tensor([0.3, -0.2])}, X, Y, LABELS), dense_multitask,
    ),
    Program(
        tied_embeddings, DATA, (EMBED_SPECS, BATCH), (P(), EMBED_SPECS),
        ({"embed": normal("embed", 10, 6), "mix": normal("mix", 6, 6)}, TOKENS), dense_tied_embeddings,
    ),
]  # fmt: skip
