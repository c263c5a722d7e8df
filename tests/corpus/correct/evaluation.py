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


def next_token_logits(p, tokens):
    """A recurrent language model: tokens [B, T] -> logits [B, T, V]."""
    h, out = torch.zeros(len(tokens), p["mix"].shape[0]), []
    for t in range(tokens.shape[1]):
        h = torch.tanh(h @ p["mix"] + p["embed"][tokens[:, t]])
        out.append(h @ p["head"])
    return torch.stack(out, 1)


@torch.no_grad()
def perplexity(p, tokens, mask):
    """Exponential of the mean negative log-likelihood of the tokens that are not padding."""
    logp = torch.log_softmax(next_token_logits(p, tokens[:, :-1]), -1)
    nll = -logp.gather(-1, tokens[:, 1:, None])[..., 0]
    weight = mask[:, 1:].float()
    total, count = fs.psum(((nll * weight).sum(), weight.sum()), "data")
    return torch.exp(total / count)


def dense_perplexity(p, tokens, mask):
    logits, goal = next_token_logits(p, tokens[:, :-1]), torch.where(mask, tokens, -100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), goal.flatten()).exp()


@torch.inference_mode()
def accuracy(p, x, labels):
    """Fraction of right answers, in inference mode."""
    right = (logits_of(p, x).argmax(-1) == labels).float().sum()
    return fs.psum(right, "data") / (len(x) * fs.axis_size("data"))


def dense_accuracy(p, x, labels):
    return (logits_of(p, x).argmax(-1) == labels).float().mean()


def top_k_accuracy(p, x, labels):
    """Fraction of rows whose label is among the two best, without any guard against gradients."""
    best = logits_of(p, x).topk(2, dim=-1).indices
    return fs.pmean((best == labels[:, None]).any(-1).float().mean(), "data")


def dense_top_k(p, x, labels):
    order = logits_of(p, x).argsort(-1, descending=True)
    return (order[:, :2] == labels[:, None]).sum() / len(x)


@torch.no_grad()
def confusion_matrix(p, x, labels):
    """Counts of (label, prediction), and the F1 score of each class."""
    flat = labels * 4 + logits_of(p, x).argmax(-1)
    counts = fs.psum(torch.zeros(16).index_add_(0, flat, torch.ones(len(x))).view(4, 4), "data")
    hits = counts.diagonal()
    return counts, 2 * hits / (counts.sum(0) + counts.sum(1)).clamp(min=1)


def dense_confusion_matrix(p, x, labels):
    guess = logits_of(p, x).argmax(-1)
    counts = torch.tensor([[((labels == i) & (guess == j)).sum() for j in range(4)] for i in range(4)])
    precision = counts.diag() / counts.sum(0).clamp(min=1)
    recall = counts.diag() / counts.sum(1).clamp(min=1)
    return counts.float(), 2 * precision * recall / (precision + recall).clamp(min=1e-9)


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


@torch.no_grad()
def greedy_decoding(p, prompt):
    """Three greedy tokens after each prompt of the batch."""
    for _ in range(3):
        following = next_token_logits(p, prompt)[:, -1].argmax(-1, keepdim=True)
        prompt = torch.cat([prompt, following], 1)
    return prompt


def dense_greedy_decoding(p, prompt):
    rows = []
    for row in prompt:
        h = torch.zeros(6)
        out = row.tolist()
        for t in range(len(row) + 2):
            h = torch.tanh(h @ p["mix"] + p["embed"][out[t]])
            if t >= len(row) - 1:
                out.append(int((h @ p["head"]).argmax()))
        rows.append(out)
    return torch.tensor(rows)


@torch.no_grad()
def sampling_with_temperature(p, prompt, temperature, key):
    """A token for each prompt, by the Gumbel-max trick, with draws that are split as the batch is."""
    logits = next_token_logits(p, prompt)[:, -1] / temperature
    u = fs.random.uniform(key, (fs.global_shape(prompt, P("data"))[0], 11), low=1e-6, spec=P("data"))
    return (logits - torch.log(-torch.log(u))).argmax(-1)


def dense_sampling(p, prompt, temperature, key):
    u = fs.random.uniform(key, (len(prompt), 11), low=1e-6)
    probs = torch.softmax(next_token_logits(p, prompt)[:, -1] / temperature, -1)
    return (probs / -torch.log(u)).argmax(-1)


@torch.no_grad()
def nearest_neighbours(gallery, gallery_labels, x):
    """k-nearest-neighbour votes in a replicated gallery."""
    near = torch.cdist(x, gallery).topk(3, largest=False).indices  # [B@data, 3]
    votes = F.one_hot(gallery_labels[near], 4).sum(1)
    return votes.argmax(-1)


def dense_nearest_neighbours(gallery, gallery_labels, x):
    distance = (x[:, None] - gallery).square().sum(-1)
    near = distance.argsort(-1)[:, :3]
    return torch.stack([torch.bincount(gallery_labels[row], minlength=4).argmax() for row in near])


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
def monte_carlo_dropout(p, x, keys):
    """Mean and variance of predictions over dropout masks, one key for each."""
    outs = []
    for key in keys:
        keep = fs.random.bernoulli(key, fs.global_shape(x, P("data")), p=0.8, spec=P("data"))
        outs.append(torch.softmax(logits_of(p, torch.where(keep, x / 0.8, 0)), -1))
    return torch.stack(outs).mean(0), torch.stack(outs).var(0)


def dense_monte_carlo_dropout(p, x, keys):
    masks = torch.stack([fs.random.bernoulli(key, x.shape, p=0.8) for key in keys])
    probs = torch.softmax(logits_of(p, masks * x / 0.8), -1)
    return probs.mean(0), (probs.square().mean(0) - probs.mean(0).square()) * len(keys) / (len(keys) - 1)


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


MASK = torch.arange(6) < torch.tensor([6, 3, 4, 6, 2, 5, 6, 6])[:, None]
EVAL = (P(), BATCH, BATCH)
HEAD = {"embed": P(), "mix": P(), "head": fs.column("model")}
PROGRAMS = [
    Program(perplexity, DATA, EVAL, P(), (LANGUAGE, TOKENS, MASK), dense_perplexity),
    Program(accuracy, DATA, EVAL, P(), (MODEL, X, LABELS), dense_accuracy),
    Program(top_k_accuracy, DATA, EVAL, P(), (MODEL, X, LABELS), dense_top_k),
    Program(confusion_matrix, DATA, EVAL, P(), (MODEL, X, LABELS), dense_confusion_matrix),
    Program(
        calibration_error, DATA, (*EVAL, P()), P(), (MODEL, X, LABELS, torch.linspace(0.4, 0.9, 5)),
        dense_calibration_error,
    ),
    Program(area_under_curve, DATA, EVAL, P(), (normal("w", 6), X, LABELS % 2), dense_area_under_curve),
    Program(greedy_decoding, DATA, (P(), BATCH), BATCH, (LANGUAGE, TOKENS[:, :3]), dense_greedy_decoding),
    Program(
        sampling_with_temperature, DATA, (P(), BATCH, P(), P()), BATCH,
        (LANGUAGE, TOKENS[:, :3], torch.tensor(0.7), fs.key(3)), dense_sampling,
    ),
    Program(
        nearest_neighbours, DATA, (P(), P(), BATCH), BATCH, (normal("gallery", 10, 6), torch.arange(10) % 4, X),
        dense_nearest_neighbours,
    ),
    Program(
        retrieval_recall, DATA, EVAL, P(), (normal("query", 6, 6), X, X @ normal("query", 6, 6) + normal("g", 12, 6)),
        dense_retrieval_recall,
    ),
    Program(
        monte_carlo_dropout, DATA, (P(), BATCH, P()), BATCH, (MODEL, X, fs.split(fs.key(1), 3)),
        dense_monte_carlo_dropout,
    ),
    Program(
        vocabulary_parallel_perplexity, {"data": 2, "model": 2}, (HEAD, BATCH), P(),
        ({**LANGUAGE, "head": normal("head", 6, 12)}, TOKENS), dense_vocabulary_perplexity,
    ),
]  # fmt: skip
