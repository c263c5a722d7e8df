"""Memory of an argument that every rank shares, overwritten by a value of one rank, without any gradient.

Legend: B batch, D width, K codes; [B@data] is a dim split over an axis; {V} varies over it, {I} does not.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

import fshard as fs
from fshard import P
from tests.corpus.wrong.program import WrongProgram, normal


def last_mean_copied_of_all(last: Tensor, x: Tensor) -> Tensor:
    last.copy_(fs.pmean(x.mean(0), "data"))
    # WRONG: last.copy_(x.mean(0))
    return last


def row_of_history_assigned_of_all(history: Tensor, x: Tensor) -> Tensor:  # history [steps, D]
    history[1] = fs.pmean(x.mean(0), "data")
    # WRONG: history[1] = x.mean(0)
    return history


def total_increased_by_all(total: Tensor, x: Tensor) -> Tensor:
    total += fs.psum(x.sum(0), "data")
    # WRONG: total += x.sum(0)
    return total


def mean_written_by_out_of_all(running: Tensor, x: Tensor) -> Tensor:
    mean = fs.pmean(x.mean(0), "data")
    # WRONG: mean = x.mean(0)
    torch.lerp(running, mean, 0.1, out=running)  # BUG
    return running


def codes_counted_of_all(counts: Tensor, codes: Tensor) -> Tensor:  # counts [K], codes [B@data]
    hot = functional.one_hot(codes, len(counts)).to(counts.dtype)
    counts.add_(fs.psum(hot.sum(0), "data"))
    # WRONG (2 lines): counts.index_add_(0, codes, torch.ones(len(codes)))
    return counts


def weights_pruned_by_activations(w: Tensor, x: Tensor) -> Tensor:  # w [D], x [B@data, D]
    unused = fs.pmean(x.abs().mean(0), "data") < 0.7
    # WRONG: unused = x.abs().mean(0) < 0.7
    w.masked_fill_(unused, 0)  # BUG
    return w


def data_of_the_weight_changed_by_all(w: Tensor, x: Tensor) -> Tensor:
    grad = fs.pmean(fs.grad(lambda w: torch.tanh(x @ w).mean())(fs.pvary(w, "data")), "data")
    # WRONG: grad = fs.grad(lambda w: torch.tanh(x @ w).mean())(fs.pvary(w, "data"))
    w.data.sub_(0.1 * grad)  # BUG
    return w


DATA2, ONE = {"data": 2}, (P(), P("data"))
X, W = normal("x", 4, 4), normal("w", 4)

PROGRAMS = [
    WrongProgram("last_mean_copied", last_mean_copied_of_all, DATA2, ONE, P(), (W, X), "types", "data"),
    WrongProgram(
        "row_of_history_assigned", row_of_history_assigned_of_all, DATA2, ONE, P(), (normal("history", 3, 4), X),
        "types", "data",
    ),
    WrongProgram("total_increased", total_increased_by_all, DATA2, ONE, P(), (W, X), "types", "data"),
    WrongProgram("mean_written_by_out", mean_written_by_out_of_all, DATA2, ONE, P(), (W, X), "types", "data"),
    WrongProgram(
        "codes_counted", codes_counted_of_all, DATA2, ONE, P(), (W, torch.tensor([0, 3, 3, 1])), "types", "data",
    ),
    WrongProgram(
        "weights_pruned_by_local_activations", weights_pruned_by_activations, DATA2, ONE, P(), (W, X), "types",
        "data",
    ),
    WrongProgram(
        "data_of_the_weight_changed", data_of_the_weight_changed_by_all, DATA2, ONE, P(), (W, X), "types", "data",
    ),
]  # fmt: skip
