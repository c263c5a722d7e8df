"""Statistics of a rank's part, used as those of the whole: norms of layers, softmax, moments, losses, metrics.

Legend: B batch, T positions, D width, V vocabulary; [B@data] is a dim split over an axis; {V} varies over it, {I} does
not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import fshard as fs
from fshard import P
from tests.corpus.wrong.program import WrongProgram, normal

DATA, MODEL, COLUMNS = P("data"), P("model"), P(None, "model")


# --- over a split dim of features -----------------------------------------------------------------------------


def group_norm_within_groups(x: Tensor) -> Tensor:  # x [B, D@model], one group of all channels
    mean = fs.pvary(fs.pmean(x.mean(1, keepdim=True), "model"), "model")
    square = fs.pvary(fs.pmean(x.square().mean(1, keepdim=True), "model"), "model")
    return (x - mean) * torch.rsqrt(square - mean.square() + 1e-5)
    # WRONG (3 lines): return functional.group_norm(x, 1)


def cosine_of_all_features(x: Tensor, y: Tensor) -> Tensor:  # both [B, D@model]
    dot, xx, yy = fs.psum(((x * y).sum(-1), x.square().sum(-1), y.square().sum(-1)), "model")
    return dot / (xx * yy).sqrt()
    # WRONG (2 lines): return fs.psum(functional.cosine_similarity(x, y), "model")


# --- cross-entropy with a split vocabulary --------------------------------------------------------------------


def local_targets_with_offset(logits: Tensor, targets: Tensor) -> Tensor:  # logits [B, V@model], targets [B]
    top = fs.pvary(fs.pmax(logits.amax(-1, keepdim=True), "model"), "model")
    total = fs.psum((logits - top).exp().sum(-1), "model").log()
    words = fs.axis_index("model") * logits.shape[-1] + torch.arange(logits.shape[-1])
    hot = words == targets.unsqueeze(-1)
    # WRONG (2 lines): hot = torch.arange(logits.shape[-1]) == targets.unsqueeze(-1)
    picked = fs.psum(torch.where(hot, logits - top, 0).sum(-1), "model")
    return (total - picked).mean()


def split_embedding_with_mask(table: Tensor, ids: Tensor) -> Tensor:  # table [V@model, D], ids [T]
    local = ids - fs.axis_index("model") * len(table)
    here = (local >= 0) & (local < len(table))
    # WRONG:
    rows = table[local.clamp(0, len(table) - 1)]  # BUG: rows of other words, not zeros
    return fs.psum(rows.where(here.unsqueeze(-1), 0), "model")
    # WRONG: return fs.psum(rows, "model")


# --- batch norm, and its running statistics -------------------------------------------------------------------


def batch_norm_of_all_examples(w: Tensor, x: Tensor) -> Any:  # x [B@data, D], w [D]
    mean = fs.pmean(x.mean(0), "data")
    variance = fs.pmean(x.square().mean(0), "data") - mean.square()
    mean, variance = fs.pvary((mean, variance), "data")

    # WRONG (4 lines):
    def loss(w: Tensor) -> Tensor:
        h = (x - mean) * torch.rsqrt(variance + 1e-5) * fs.pvary(w, "data")
        # WRONG: h = functional.batch_norm(x, None, None, training=True) * fs.pvary(w, "data")
        return fs.pmean(torch.tanh(h).square().mean(), "data")

    return fs.value_and_grad(loss)(w)


def running_mean_in_place_of_all(running: Tensor, x: Tensor) -> Tensor:
    running.lerp_(fs.pmean(x.mean(0), "data"), 0.1)
    # WRONG: running.lerp_(x.mean(0), 0.1)
    return running


def running_variance_of_all_examples(running: Tensor, x: Tensor) -> Tensor:
    mean = fs.pvary(fs.pmean(x.mean(0), "data"), "data")
    variance = fs.pmean((x - mean).square().mean(0), "data")
    # WRONG (2 lines): variance = fs.pmean(x.var(0, correction=0), "data")  # loses the variance of the means
    return 0.9 * running + 0.1 * variance


# --- standardizing and measuring a data set -------------------------------------------------------------------


def median_of_all(x: Tensor) -> Tensor:  # x [B@data]
    return fs.all_gather(x, "data", to="invariant").median()
    # WRONG: medians = fs.all_gather(x.median().reshape(1), "data", to="invariant")  # BUG
    # WRONG: return medians.median()


def histogram_with_one_range(x: Tensor) -> Tensor:  # x [B@data]
    low, high = fs.pvary((fs.pmin(x.min(), "data"), fs.pmax(x.max(), "data")), "data")
    # WRONG: low, high = x.min(), x.max()
    bins = ((x - low) / (high - low) * 3).long().clamp(0, 2)
    return fs.psum(functional.one_hot(bins, 3).sum(0), "data")


# --- losses and metrics ---------------------------------------------------------------------------------------


def correlation_of_all_examples(x: Tensor, y: Tensor) -> Tensor:  # both [B@data]
    dx, dy = (t - fs.pvary(fs.pmean(t.mean(), "data"), "data") for t in (x, y))
    xy, xx, yy = fs.psum(((dx * dy).sum(), dx.square().sum(), dy.square().sum()), "data")
    return xy / (xx * yy).sqrt()
    # WRONG (3 lines): return fs.pmean(torch.corrcoef(torch.stack([x, y]))[0, 1], "data")


def loss_divided_by_global_count(x: Tensor, mask: Tensor) -> Tensor:
    total, count = fs.psum(((x * mask).sum(), mask.sum()), "data")
    return total / count
    # WRONG (2 lines): return fs.pmean((x * mask).sum() / mask.sum(), "data")


B, D, V = 4, 4, 6
DATA2, MODEL2 = {"data": 2}, {"model": 2}
X, Y, W = normal("x", B, D), normal("y", B, D), normal("w", D)
LOGITS, TARGETS = normal("logits", B, V), torch.tensor([0, 5, 2, 3])
ERRORS, OTHER, MASK = normal("errors", 6), normal("other", 6), torch.tensor([1.0, 1, 1, 1, 0, 0])
HALVES = torch.tensor([1.0, 0, 1, 1, 1, 0])

PROGRAMS = [
    WrongProgram(
        "group_norm_of_split_groups", group_norm_within_groups, MODEL2, (COLUMNS,), COLUMNS, (X,), "verify", "model",
    ),
    WrongProgram(
        "cosine_of_local_features", cosine_of_all_features, MODEL2, (COLUMNS, COLUMNS), P(), (X, Y), "verify",
        "model",
    ),
    WrongProgram(
        "local_targets_without_offset", local_targets_with_offset, MODEL2, (COLUMNS, P()), P(), (LOGITS, TARGETS),
        "verify", "model",
    ),
    WrongProgram(
        "split_embedding_without_mask", split_embedding_with_mask, MODEL2, (MODEL, P()), P(),
        (normal("table", V, D), TARGETS), "verify", "model",
    ),
    WrongProgram(
        "batch_norm_of_local_examples", batch_norm_of_all_examples, DATA2, (P(), DATA), P(), (W, X), "verify",
        "data",
    ),
    WrongProgram(
        "running_mean_in_place", running_mean_in_place_of_all, DATA2, (P(), DATA), P(), (W, X), "types", "data",
    ),
    WrongProgram(
        "running_variance_as_mean_of_variances", running_variance_of_all_examples, DATA2, (P(), DATA), P(), (W, X),
        "verify", "data",
    ),
    WrongProgram(
        "median_of_local_medians", median_of_all, DATA2, (DATA,), P(), (torch.tensor([1.0, 2, 9, 3, 4, 5]),),
        "verify", "data",
    ),
    WrongProgram(
        "histogram_with_local_range", histogram_with_one_range, DATA2, (DATA,), P(), (ERRORS,), "verify", "data",
    ),
    WrongProgram(
        "correlation_as_mean_of_correlations", correlation_of_all_examples, DATA2, (DATA, DATA), P(),
        (ERRORS, OTHER), "verify", "data",
    ),
    WrongProgram(
        "mean_of_means_of_equal_counts", loss_divided_by_global_count, DATA2, (DATA, DATA), P(), (ERRORS, HALVES),
        None, "data",
        out_of_reach="both ranks have two of the four counted examples: a mean of their means is the mean",
    ),
]  # fmt: skip
