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
from fshard import P, nn
from tests.corpus.wrong.program import WrongProgram, normal

Params = dict[str, Tensor]
DATA, MODEL, COLUMNS = P("data"), P("model"), P(None, "model")


# --- over a split dim of features -----------------------------------------------------------------------------


def layer_norm_of_local_features(x: Tensor, w: Tensor) -> Tensor:  # x [B, D@model], w [D@model]
    return nn.layer_norm(x, w)  # BUG


def layer_norm_of_all_features(x: Tensor, w: Tensor) -> Tensor:
    mean = fs.pvary(fs.pmean(x.mean(-1, keepdim=True), "model"), "model")
    variance = fs.pvary(fs.pmean((x - mean).square().mean(-1, keepdim=True), "model"), "model")
    return (x - mean) * torch.rsqrt(variance + 1e-5) * w


def group_norm_of_split_groups(x: Tensor) -> Tensor:  # x [B, D@model], one group of all channels
    return functional.group_norm(x, 1)  # BUG


def group_norm_within_groups(x: Tensor) -> Tensor:
    mean = fs.pvary(fs.pmean(x.mean(1, keepdim=True), "model"), "model")
    square = fs.pvary(fs.pmean(x.square().mean(1, keepdim=True), "model"), "model")
    return (x - mean) * torch.rsqrt(square - mean.square() + 1e-5)


def unit_vectors_of_local_features(x: Tensor) -> Tensor:  # x [B, D@model]
    return functional.normalize(x, dim=-1)  # BUG


def unit_vectors_of_all_features(x: Tensor) -> Tensor:
    norm = fs.psum(x.square().sum(-1, keepdim=True), "model").sqrt()
    return x / fs.pvary(norm, "model")


def cosine_of_local_features(x: Tensor, y: Tensor) -> Tensor:  # both [B, D@model]
    return fs.psum(functional.cosine_similarity(x, y), "model")  # BUG


def cosine_of_all_features(x: Tensor, y: Tensor) -> Tensor:
    dot, xx, yy = fs.psum(((x * y).sum(-1), x.square().sum(-1), y.square().sum(-1)), "model")
    return dot / (xx * yy).sqrt()


# --- softmax over a split dim ---------------------------------------------------------------------------------


def softmax_of_local_words(logits: Tensor) -> Tensor:  # [B, V@model]
    return torch.softmax(logits, -1)  # BUG


def softmax_of_all_words(logits: Tensor) -> Tensor:
    top = fs.pvary(fs.pmax(logits.amax(-1, keepdim=True), "model"), "model")
    exps = (logits - top).exp()
    return exps / fs.pvary(fs.psum(exps.sum(-1, keepdim=True), "model"), "model")


def softmax_with_local_maxima(logits: Tensor) -> Tensor:
    top = logits.amax(-1, keepdim=True)  # BUG
    exps = (logits - top).exp()
    return exps / fs.pvary(fs.psum(exps.sum(-1, keepdim=True), "model"), "model")  # BUG: parts have different units


def logsumexp_of_local_words(logits: Tensor) -> Tensor:  # [B, V@model]
    log_z = torch.logsumexp(logits, -1)
    return log_z.square().mean()  # BUG: the z-loss of PaLM, of local words


def logsumexp_of_all_words(logits: Tensor) -> Tensor:
    top = fs.pmax(logits.amax(-1, keepdim=True), "model")
    total = fs.psum((logits - fs.pvary(top, "model")).exp().sum(-1), "model")
    return (total.log() + top.squeeze(-1)).square().mean()


def mean_of_local_logsumexps(logits: Tensor) -> Tensor:
    log_z = fs.pmean(torch.logsumexp(logits, -1), "model")  # BUG: a mean of logarithms of parts
    return log_z.square().mean()


# --- cross-entropy with a split vocabulary --------------------------------------------------------------------


def local_targets_without_offset(logits: Tensor, targets: Tensor) -> Tensor:  # logits [B, V@model], targets [B]
    top = fs.pvary(fs.pmax(logits.amax(-1, keepdim=True), "model"), "model")
    total = fs.psum((logits - top).exp().sum(-1), "model").log()
    hot = torch.arange(logits.shape[-1]) == targets.unsqueeze(-1)  # BUG: every rank takes its words for the first ones
    picked = fs.psum(torch.where(hot, logits - top, 0).sum(-1), "model")
    return (total - picked).mean()


def local_targets_with_offset(logits: Tensor, targets: Tensor) -> Tensor:
    top = fs.pvary(fs.pmax(logits.amax(-1, keepdim=True), "model"), "model")
    total = fs.psum((logits - top).exp().sum(-1), "model").log()
    words = fs.axis_index("model") * logits.shape[-1] + torch.arange(logits.shape[-1])
    hot = words == targets.unsqueeze(-1)
    picked = fs.psum(torch.where(hot, logits - top, 0).sum(-1), "model")
    return (total - picked).mean()


def split_embedding_without_mask(table: Tensor, ids: Tensor) -> Tensor:  # table [V@model, D], ids [T]
    local = ids - fs.axis_index("model") * len(table)
    rows = table[local.clamp(0, len(table) - 1)]  # BUG: rows of other words, not zeros
    return fs.psum(rows, "model")


def split_embedding_with_mask(table: Tensor, ids: Tensor) -> Tensor:
    local = ids - fs.axis_index("model") * len(table)
    here = (local >= 0) & (local < len(table))
    rows = table[local.clamp(0, len(table) - 1)]
    return fs.psum(rows.where(here.unsqueeze(-1), 0), "model")


# --- batch norm, and its running statistics -------------------------------------------------------------------


def batch_norm_of_local_examples(w: Tensor, x: Tensor) -> Any:  # x [B@data, D], w [D]
    def loss(w: Tensor) -> Tensor:
        h = functional.batch_norm(x, None, None, training=True) * fs.pvary(w, "data")  # BUG
        return fs.pmean(torch.tanh(h).square().mean(), "data")

    return fs.value_and_grad(loss)(w)


def batch_norm_of_all_examples(w: Tensor, x: Tensor) -> Any:
    mean = fs.pmean(x.mean(0), "data")
    variance = fs.pmean(x.square().mean(0), "data") - mean.square()
    mean, variance = fs.pvary((mean, variance), "data")

    def loss(w: Tensor) -> Tensor:
        h = (x - mean) * torch.rsqrt(variance + 1e-5) * fs.pvary(w, "data")
        return fs.pmean(torch.tanh(h).square().mean(), "data")

    return fs.value_and_grad(loss)(w)


def running_mean_of_local_examples(running: Tensor, x: Tensor) -> Tensor:  # running [D], x [B@data, D]
    mean = x.mean(0)
    return 0.9 * running + 0.1 * mean  # BUG


def running_mean_of_all_examples(running: Tensor, x: Tensor) -> Tensor:
    mean = fs.pmean(x.mean(0), "data")
    return 0.9 * running + 0.1 * mean


def running_mean_in_place(running: Tensor, x: Tensor) -> Tensor:
    running.lerp_(x.mean(0), 0.1)  # BUG
    return running


def running_mean_in_place_of_all(running: Tensor, x: Tensor) -> Tensor:
    running.lerp_(fs.pmean(x.mean(0), "data"), 0.1)
    return running


def running_variance_as_mean_of_variances(running: Tensor, x: Tensor) -> Tensor:
    variance = fs.pmean(x.var(0, correction=0), "data")  # BUG: loses the variance of the means
    return 0.9 * running + 0.1 * variance


def running_variance_of_all_examples(running: Tensor, x: Tensor) -> Tensor:
    mean = fs.pvary(fs.pmean(x.mean(0), "data"), "data")
    variance = fs.pmean((x - mean).square().mean(0), "data")
    return 0.9 * running + 0.1 * variance


# --- standardizing and measuring a data set -------------------------------------------------------------------


def standardized_by_local_moments(x: Tensor) -> Tensor:  # x [B@data, D]
    return (x - x.mean(0)) / x.std(0)  # BUG


def standardized_by_moments_of_all(x: Tensor) -> Tensor:
    n = len(x) * fs.axis_size("data")
    mean = fs.pvary(fs.psum(x.sum(0), "data") / n, "data")
    variance = fs.psum((x - mean).square().sum(0), "data") / (n - 1)
    return (x - mean) / fs.pvary(variance.sqrt(), "data")


def scaled_by_local_range(x: Tensor) -> Tensor:  # x [B@data, D]
    low, high = x.amin(0), x.amax(0)  # BUG
    return (x - low) / (high - low)


def scaled_by_range_of_all(x: Tensor) -> Tensor:
    low, high = fs.pvary((fs.pmin(x.amin(0), "data"), fs.pmax(x.amax(0), "data")), "data")
    return (x - low) / (high - low)


def median_of_local_medians(x: Tensor) -> Tensor:  # x [B@data]
    medians = fs.all_gather(x.median().reshape(1), "data", to="invariant")  # BUG
    return medians.median()


def median_of_all(x: Tensor) -> Tensor:
    return fs.all_gather(x, "data", to="invariant").median()


def histogram_with_local_range(x: Tensor) -> Tensor:  # x [B@data]
    low, high = x.min(), x.max()  # BUG
    bins = ((x - low) / (high - low) * 3).long().clamp(0, 2)
    return fs.psum(functional.one_hot(bins, 3).sum(0), "data")


def histogram_with_one_range(x: Tensor) -> Tensor:
    low, high = fs.pvary((fs.pmin(x.min(), "data"), fs.pmax(x.max(), "data")), "data")
    bins = ((x - low) / (high - low) * 3).long().clamp(0, 2)
    return fs.psum(functional.one_hot(bins, 3).sum(0), "data")


def covariance_about_local_means(x: Tensor) -> Tensor:  # x [B@data, D]
    centered = x - x.mean(0)  # BUG
    return fs.psum(centered.T @ centered, "data") / (len(x) * fs.axis_size("data"))


def covariance_about_the_mean(x: Tensor) -> Tensor:
    centered = x - fs.pvary(fs.pmean(x.mean(0), "data"), "data")
    return fs.psum(centered.T @ centered, "data") / (len(x) * fs.axis_size("data"))


# --- losses and metrics ---------------------------------------------------------------------------------------


def weights_normalized_locally(x: Tensor, weight: Tensor) -> Tensor:  # both [B@data]
    return fs.pmean((x * weight).sum() / weight.sum(), "data")  # BUG


def weights_normalized_globally(x: Tensor, weight: Tensor) -> Tensor:
    total, count = fs.psum(((x * weight).sum(), weight.sum()), "data")
    return total / count


def perplexity_as_mean_of_exps(errors: Tensor) -> Tensor:  # [B@data]
    return fs.pmean(errors.mean().exp(), "data")  # BUG


def perplexity_as_exp_of_mean(errors: Tensor) -> Tensor:
    return fs.pmean(errors.mean(), "data").exp()


def root_mean_square_as_mean_of_roots(errors: Tensor) -> Tensor:
    return fs.pmean(errors.square().mean().sqrt(), "data")  # BUG


def root_of_the_mean_square(errors: Tensor) -> Tensor:
    return fs.pmean(errors.square().mean(), "data").sqrt()


def f1_as_mean_of_local_scores(hit: Tensor, wrong: Tensor) -> Tensor:  # counts of each example, [B@data]
    return fs.pmean(2 * hit.sum() / (2 * hit.sum() + wrong.sum()), "data")  # BUG


def f1_of_all_counts(hit: Tensor, wrong: Tensor) -> Tensor:
    hits, wrongs = fs.psum((hit.sum(), wrong.sum()), "data")
    return 2 * hits / (2 * hits + wrongs)


def accuracy_of_the_local_shard(logits: Tensor, y: Tensor) -> Tensor:  # logits [B@data, V], y [B@data]
    correct = logits.argmax(-1) == y
    return correct.float().mean()  # BUG


def accuracy_of_all_examples(logits: Tensor, y: Tensor) -> Tensor:
    correct = logits.argmax(-1) == y
    return fs.pmean(correct.float().mean(), "data")


def correlation_as_mean_of_correlations(x: Tensor, y: Tensor) -> Tensor:  # both [B@data]
    return fs.pmean(torch.corrcoef(torch.stack([x, y]))[0, 1], "data")  # BUG


def correlation_of_all_examples(x: Tensor, y: Tensor) -> Tensor:
    dx, dy = (t - fs.pvary(fs.pmean(t.mean(), "data"), "data") for t in (x, y))
    xy, xx, yy = fs.psum(((dx * dy).sum(), dx.square().sum(), dy.square().sum()), "data")
    return xy / (xx * yy).sqrt()


def global_average_pool_of_local_rows(x: Tensor, w: Tensor) -> Tensor:  # x [B, H@model, W, D], w [D, V]
    pooled = x.mean((1, 2))
    return pooled @ fs.pvary(w, "model")  # BUG


def global_average_pool_of_all_rows(x: Tensor, w: Tensor) -> Tensor:
    pooled = fs.pmean(x.mean((1, 2)), "model")
    return pooled @ w


def loss_divided_by_local_count(x: Tensor, mask: Tensor) -> Tensor:  # both [B@data]
    count = mask.sum()
    return fs.psum((x * mask).sum() / count, "data")  # BUG


def loss_divided_by_global_count(x: Tensor, mask: Tensor) -> Tensor:
    total, count = fs.psum(((x * mask).sum(), mask.sum()), "data")
    return total / count


def mean_of_means_of_equal_counts(x: Tensor, mask: Tensor) -> Tensor:
    return fs.pmean((x * mask).sum() / mask.sum(), "data")


B, D, V = 4, 4, 6
DATA2, MODEL2 = {"data": 2}, {"model": 2}
X, Y, W = normal("x", B, D), normal("y", B, D), normal("w", D)
LOGITS, TARGETS = normal("logits", B, V), torch.tensor([0, 5, 2, 3])
ERRORS, OTHER, MASK = normal("errors", 6), normal("other", 6), torch.tensor([1.0, 1, 1, 1, 0, 0])
HALVES = torch.tensor([1.0, 0, 1, 1, 1, 0])

PROGRAMS = [
    WrongProgram(
        layer_norm_of_local_features, layer_norm_of_all_features, MODEL2, (COLUMNS, MODEL), COLUMNS, (X, W),
        "verify", "model",
    ),
    WrongProgram(
        group_norm_of_split_groups, group_norm_within_groups, MODEL2, (COLUMNS,), COLUMNS, (X,), "verify", "model"
    ),
    WrongProgram(
        unit_vectors_of_local_features, unit_vectors_of_all_features, MODEL2, (COLUMNS,), COLUMNS, (X,), "verify",
        "model",
    ),
    WrongProgram(
        cosine_of_local_features, cosine_of_all_features, MODEL2, (COLUMNS, COLUMNS), P(), (X, Y), "verify", "model"
    ),
    WrongProgram(
        softmax_of_local_words, softmax_of_all_words, MODEL2, (COLUMNS,), COLUMNS, (LOGITS,), "verify", "model"
    ),
    WrongProgram(
        softmax_with_local_maxima, softmax_of_all_words, MODEL2, (COLUMNS,), COLUMNS, (LOGITS,), "verify", "model"
    ),
    WrongProgram(
        logsumexp_of_local_words, logsumexp_of_all_words, MODEL2, (COLUMNS,), P(), (LOGITS,), "types", "model"
    ),
    WrongProgram(
        mean_of_local_logsumexps, logsumexp_of_all_words, MODEL2, (COLUMNS,), P(), (LOGITS,), "verify", "model"
    ),
    WrongProgram(
        local_targets_without_offset, local_targets_with_offset, MODEL2, (COLUMNS, P()), P(), (LOGITS, TARGETS),
        "verify", "model",
    ),
    WrongProgram(
        split_embedding_without_mask, split_embedding_with_mask, MODEL2, (MODEL, P()), P(),
        (normal("table", V, D), TARGETS), "verify", "model",
    ),
    WrongProgram(
        batch_norm_of_local_examples, batch_norm_of_all_examples, DATA2, (P(), DATA), P(), (W, X), "verify", "data"
    ),
    WrongProgram(
        running_mean_of_local_examples, running_mean_of_all_examples, DATA2, (P(), DATA), P(), (W, X), "types", "data"
    ),
    WrongProgram(
        running_mean_in_place, running_mean_in_place_of_all, DATA2, (P(), DATA), P(), (W, X), "types", "data"
    ),
    WrongProgram(
        running_variance_as_mean_of_variances, running_variance_of_all_examples, DATA2, (P(), DATA), P(), (W, X),
        "verify", "data",
    ),
    WrongProgram(
        standardized_by_local_moments, standardized_by_moments_of_all, DATA2, (DATA,), DATA, (X,), "verify", "data"
    ),
    WrongProgram(scaled_by_local_range, scaled_by_range_of_all, DATA2, (DATA,), DATA, (X,), "verify", "data"),
    WrongProgram(
        median_of_local_medians, median_of_all, DATA2, (DATA,), P(), (torch.tensor([1.0, 2, 9, 3, 4, 5]),), "verify",
        "data"
    ),
    WrongProgram(
        histogram_with_local_range, histogram_with_one_range, DATA2, (DATA,), P(), (ERRORS,), "verify", "data"
    ),
    WrongProgram(covariance_about_local_means, covariance_about_the_mean, DATA2, (DATA,), P(), (X,), "verify", "data"),
    WrongProgram(
        weights_normalized_locally, weights_normalized_globally, DATA2, (DATA, DATA), P(), (ERRORS, OTHER.abs()),
        "verify", "data",
    ),
    WrongProgram(
        perplexity_as_mean_of_exps, perplexity_as_exp_of_mean, DATA2, (DATA,), P(), (ERRORS,), "verify", "data"
    ),
    WrongProgram(
        root_mean_square_as_mean_of_roots, root_of_the_mean_square, DATA2, (DATA,), P(), (ERRORS,), "verify", "data"
    ),
    WrongProgram(
        f1_as_mean_of_local_scores, f1_of_all_counts, DATA2, (DATA, DATA), P(), (MASK, OTHER.abs().round()),
        "verify", "data",
    ),
    WrongProgram(
        accuracy_of_the_local_shard, accuracy_of_all_examples, DATA2, (DATA, DATA), P(),
        (LOGITS, torch.stack([*LOGITS.argmax(-1)[:2], TARGETS[1], TARGETS[1]])), "types", "data",
    ),
    WrongProgram(
        correlation_as_mean_of_correlations, correlation_of_all_examples, DATA2, (DATA, DATA), P(), (ERRORS, OTHER),
        "verify", "data",
    ),
    WrongProgram(
        global_average_pool_of_local_rows, global_average_pool_of_all_rows, MODEL2, (P(None, "model"), P()), P(),
        (normal("images", 2, 4, 2, D), normal("head", D, V)), "types", "model",
    ),
    WrongProgram(
        loss_divided_by_local_count, loss_divided_by_global_count, DATA2, (DATA, DATA), P(), (ERRORS, MASK),
        "verify", "data",
    ),
    WrongProgram(
        mean_of_means_of_equal_counts, loss_divided_by_global_count, DATA2, (DATA, DATA), P(), (ERRORS, HALVES), None,
        "data", out_of_reach="both ranks have two of the four counted examples: a mean of their means is the mean",
    ),
]  # fmt: skip
