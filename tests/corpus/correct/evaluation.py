"""Evaluation and inference: replicated models on a split batch, without gradients.

Legend: B batch, D width, C classes, T length, V vocabulary, N gallery; [n@axis] is a dim split over an axis.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F  # noqa: N812

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, normal

DATA = {"data": 2}
BATCH = P("data")
X = normal("x", 12, 6)  # [B@data, D]
LABELS = torch.arange(12) * 5 % 4
MODEL = {"w": normal("w", 6, 4), "b": normal("b", 4)}  # [D, C], [C]
TOKENS = torch.arange(8 * 6).view(8, 6) * 7 % 11  # [B@data, T]
LANGUAGE = {"embed": normal("embed", 11, 6), "mix": normal("mix", 6, 6, std=0.4), "head": normal("head", 6, 11)}


def logits_of(p, x):
    return x @ p["w"] + p["b"]


@torch.no_grad()
def calibration_error(p, x, labels, edges):
    """Expected calibration error, in bins with replicated edges."""
    confidence, guess = torch.softmax(logits_of(p, x), -1).max(-1)
    bins = torch.bucketize(confidence, edges)
    sums = torch.zeros(3, len(edges) + 1)
    sums[0].index_add_(0, bins, torch.ones(len(x)))
    sums[1].index_add_(0, bins, confidence)
    sums[2].index_add_(0, bins, (guess == labels).float())
    n, confident, right = fs.psum(sums, "data")
    return (confident - right).abs().sum() / n.sum()


def dense_calibration_error(p, x, labels, edges):
    confidence, guess = torch.softmax(logits_of(p, x), -1).max(-1)
    error = torch.zeros(())
    for low, high in itertools.pairwise([-math.inf, *edges.tolist(), math.inf]):
        inside = (confidence > low) & (confidence <= high)
        error += (confidence[inside] - (guess == labels)[inside].float()).sum().abs()
    return error / len(x)


@torch.inference_mode()
def area_under_curve(w, x, labels):
    """ROC AUC: each rank counts the pairs of its positives with all negatives."""
    score = x @ w
    everyone, positive = fs.all_gather((score, labels > 0), "data")
    wins = (score[:, None] > everyone).float() + 0.5 * (score[:, None] == everyone)
    pairs = (labels > 0)[:, None] & ~positive
    won, total = fs.psum(((wins * pairs).sum(), pairs.sum()), "data")
    return won / total


def dense_area_under_curve(w, x, labels):
    score = x @ w
    return (score[labels > 0][:, None] > score[labels == 0]).float().mean()


@torch.inference_mode()
def retrieval_recall(query, x, gallery):
    """Recall at 2 of pairs (row i of x, row i of the gallery), the gallery split over the ranks."""
    n, rank = len(x), fs.axis_index("data")
    scores = F.normalize(x @ query, dim=-1) @ F.normalize(fs.all_gather(gallery, "data"), dim=-1).T
    mine = (torch.arange(n) + rank * n)[:, None]
    hits = (scores.topk(2, dim=-1).indices == mine).any(-1)
    return fs.psum(hits.sum(), "data") / (n * fs.axis_size("data"))


def dense_retrieval_recall(query, x, gallery):
    scores = F.cosine_similarity((x @ query)[:, None], gallery, dim=-1)
    better = (scores > scores.diagonal()[:, None]).sum(1)
    return (better < 2).float().mean()


@torch.no_grad()
def vocabulary_parallel_perplexity(p, tokens):
    """Mean log-likelihood where the head is split over the vocabulary and the rest is replicated."""
    h = torch.tanh(p["embed"][tokens[:, :-1]] @ p["mix"])  # [B@data, T, D]
    logits = h @ p["head"]  # [B@data, T, V@model]
    top = fs.pmax(logits.amax(-1), "model")
    logz = fs.psum(torch.exp(logits - top[..., None]).sum(-1), "model").log() + top
    first = fs.axis_index("model") * logits.shape[-1]
    place = tokens[:, 1:] - first
    inside = (place >= 0) & (place < logits.shape[-1])
    own = logits.gather(-1, place.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0]
    picked = fs.psum(torch.where(inside, own, 0.0), "model")
    return fs.pmean((picked - logz).mean(), "data")


def dense_vocabulary_perplexity(p, tokens):
    logits = torch.tanh(p["embed"][tokens[:, :-1]] @ p["mix"]) @ p["head"]
    return -F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


EVAL = (P(), BATCH, BATCH)
HEAD = {"embed": P(), "mix": P(), "head": fs.column("model")}
PROGRAMS = [
    Program(
        calibration_error, DATA, (*EVAL, P()), P(), (MODEL, X, LABELS, torch.linspace(0.4, 0.9, 5)),
        dense_calibration_error,
    ),
    Program(area_under_curve, DATA, EVAL, P(), (normal("w", 6), X, LABELS % 2), dense_area_under_curve),
    Program(
        retrieval_recall, DATA, EVAL, P(), (normal("query", 6, 6), X, X @ normal("query", 6, 6) + normal("g", 12, 6)),
        dense_retrieval_recall,
    ),
    Program(
        vocabulary_parallel_perplexity, {"data": 2, "model": 2}, (HEAD, BATCH), P(),
        ({**LANGUAGE, "head": normal("head", 6, 12)}, TOKENS), dense_vocabulary_perplexity,
    ),
]  # fmt: skip
