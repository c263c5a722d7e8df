"""Decisions by one rank: choices, samples, counters, branches and results that are declared to be the same everywhere.

Legend: B batch, D width, V vocabulary; [V@model] is a dim split over an axis; {V} varies over it, {I} does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from tests.corpus.wrong.program import WrongProgram, normal

# --- the next token -------------------------------------------------------------------------------------------


def next_token(logits: Tensor) -> Tensor:  # [B, V@model]
    top, best = logits.max(-1)
    best = best + fs.axis_index("model") * logits.shape[-1]
    here = top == fs.pmax(top, "model")
    return fs.pmax(torch.where(here, best, -1), "model")
    # WRONG next_token_of_local_words (4 lines): return logits.argmax(-1)
    # WRONG next_token_by_number (4 lines): best = logits.argmax(-1) + fs.axis_index("model") * logits.shape[-1]
    # WRONG next_token_by_number: return fs.pmax(best, "model")  # BUG: of the numbers, not of the logits


def sampled_by_global_draws(logits: Tensor) -> Tensor:  # [B@data, V]
    shape = fs.global_shape(logits, P("data"))
    u = fs.random.uniform(fs.key(1), shape, low=1e-6, spec=P("data"))
    # WRONG (2 lines): u = fs.random.uniform(fs.key(1), logits.shape, low=1e-6)
    return (logits - (-u.log()).log()).argmax(-1)  # BUG: all ranks draw the same numbers


def nucleus_of_all_words(p: Tensor) -> Tensor:  # [B, V@model], probabilities
    """Keep the most probable words, of a total of 0.6."""
    sorted_p = fs.all_gather(p, "model", 1).sort(-1, descending=True).values
    # WRONG: sorted_p = p.sort(-1, descending=True).values
    threshold = sorted_p.where(sorted_p.cumsum(-1) - sorted_p < 0.6, 1).amin(-1, keepdim=True)  # BUG
    return torch.where(p >= threshold, p, 0)


# --- stopping, keeping, skipping ------------------------------------------------------------------------------


def best_weights_by_mean_loss(best: Tensor, w: Tensor, x: Tensor) -> Tensor:  # x [B@data, D], validation
    before, after = fs.pmean(((x @ best).square().mean(), (x @ w).square().mean()), "data")
    # WRONG: before, after = (x @ best).square().mean(), (x @ w).square().mean()
    return torch.where(after < before, w, best)  # BUG


def stopped_by_mean_loss(w: Tensor, x: Tensor) -> Tensor:  # x [B@data, D]
    w = fs.pvary(w, "data")
    for _ in range(4):
        if float(fs.pmean((x @ w).square().mean(), "data")) < 0.5:
            # WRONG: if float((x @ w).square().mean()) < 0.5:
            break
        w = w * 0.5  # BUG: ranks take a different number of steps
    return fs.pmean((x @ w).square().mean(), "data")


def tokens_counted_globally(seen: Tensor, mask: Tensor) -> Tensor:  # seen [] int, mask [B@data] bool
    return seen + fs.psum(mask.sum(), "data")
    # WRONG: return seen + mask.sum()


def seed_of_all_ranks(x: Tensor) -> Tensor:  # x [B@data, D]
    """Return random features: the projection was meant to be one."""
    projection = fs.random.normal(fs.key(0), (4, 3))
    # WRONG: projection = fs.random.normal(fs.key(int(fs.axis_index("data"))), (4, 3))
    return torch.cos(x @ fs.pvary(projection, "data"))


def domain_of_each_example(table: Tensor, x: Tensor) -> Any:
    # table [2, D], x [B@data, D]: the first half is of domain 0
    half = len(x) * fs.axis_size("data") // 2
    domains = (fs.axis_index("data") * len(x) + torch.arange(len(x))) // half
    # WRONG (2 lines): rank = int(fs.axis_index("data"))

    def loss(table: Tensor) -> Tensor:
        domain = fs.pvary(table, "data")[domains]
        # WRONG: domain = fs.pvary(table[rank], "data")  # BUG: a number of this rank picks from one value
        return fs.pmean(torch.tanh(x + domain).square().mean(), "data")

    return fs.value_and_grad(loss)(table)


def first_weights_of_global_shape(x: Tensor) -> Tensor:  # x [B, D]; weights [D, F@model] made in the region
    w = fs.random.normal(fs.key(9), (4, 6), spec=P(None, "model"))
    # WRONG: w = fs.random.normal(fs.key(9), (4, 3))
    return fs.pvary(x, "model") @ w
    # WRONG: return x @ w  # BUG: the columns of each rank are the same, and the out spec declares parts


def spikes_clipped_by_all_values(x: Tensor) -> Tensor:  # x [B@data]
    top = fs.pvary(fs.pmax(x.abs().max(), "data"), "data")
    # WRONG: if float(x.abs().max()) > 100:
    return fs.pmean((x / top if float(top) > 100 else x).square().mean(), "data")
    # WRONG:     x = x / x.abs().max()  # of this rank's values
    # WRONG: return fs.pmean(x.square().mean(), "data")


# --- specs of results -----------------------------------------------------------------------------------------


def features_gathered(x: Tensor, w: Tensor) -> Any:  # x [B@data, D]
    h = torch.tanh(x @ fs.pvary(w, "data"))  # BUG
    return {"features": fs.all_gather(h, "data", to="invariant")}
    # WRONG: return {"features": h}


DATA2, MODEL2 = {"data": 2}, {"model": 2}
DATA, COLUMNS = P("data"), P(None, "model")
X, W, LOGITS = normal("x", 4, 4), normal("w", 4), normal("logits", 4, 6)

PROGRAMS = [
    WrongProgram(
        "domain_of_this_rank", domain_of_each_example, DATA2, (P(), DATA), P(), (normal("table", 2, 4), X), "types",
        "data",
    ),
    WrongProgram("seed_of_each_rank", seed_of_all_ranks, DATA2, (DATA,), DATA, (X,), "verify", "data"),
    WrongProgram("next_token_of_local_words", next_token, MODEL2, (COLUMNS,), P(), (LOGITS,), "types", "model"),
    WrongProgram(
        "next_token_by_number", next_token, MODEL2, (COLUMNS,), P(), (LOGITS,), "verify", "model",
    ),
    WrongProgram("sampled_by_local_draws", sampled_by_global_draws, DATA2, (DATA,), DATA, (LOGITS,), "types", "data"),
    WrongProgram(
        "nucleus_of_local_words", nucleus_of_all_words, MODEL2, (COLUMNS,), COLUMNS, (LOGITS.softmax(-1),), "verify",
        "model",
    ),
    WrongProgram(
        "best_weights_by_local_loss", best_weights_by_mean_loss, DATA2, (P(), P(), DATA), P(),
        (W, normal("best", 4), X), "types", "data",
    ),
    WrongProgram("stopped_by_local_loss", stopped_by_mean_loss, DATA2, (P(), DATA), P(), (W, X), "verify", "data"),
    WrongProgram(
        "tokens_counted_locally", tokens_counted_globally, DATA2, (P(), DATA), P(), (torch.tensor(5), X[:, 0] > 0),
        "types", "data",
    ),
    WrongProgram(
        "first_weights_of_local_shape", first_weights_of_global_shape, MODEL2, (P(),), COLUMNS, (X,), "types",
        "model",
    ),
    WrongProgram(
        "features_declared_whole", features_gathered, DATA2, (DATA, P()), P(), (X, normal("w", 4, 3)), "types",
        "data",
    ),
    WrongProgram(
        "spikes_clipped_by_local_values", spikes_clipped_by_all_values, DATA2, (DATA,), P(), (X,), None, "data",
        out_of_reach="no value of these arguments takes the branch",
    ),
]  # fmt: skip
