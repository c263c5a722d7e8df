"""Sorting, selection and scans over a split dim.

Legend: N items; [N@x] is a dim split over an axis.
"""

from __future__ import annotations

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, normal


def rank_sort(x: Tensor, payload: Tensor) -> tuple[Tensor, Tensor]:  # x [N@x] of integers, payload [N@x, D]
    """Stable sort by counting: an item's place is the number of items before it; rows are summed into their places."""
    everything = fs.all_gather(x, "x")
    at = fs.axis_index("x") * len(x) + torch.arange(len(x))
    earlier = (everything < x[:, None]) | ((everything == x[:, None]) & (torch.arange(len(everything)) < at[:, None]))
    place = earlier.sum(1)
    keys = torch.zeros_like(everything).index_copy(0, place, x)
    rows = payload.new_zeros(len(everything), payload.shape[1]).index_copy(0, place, payload)
    return fs.psum_scatter((keys, rows), "x")


def dense_rank_sort(x: Tensor, payload: Tensor) -> tuple[Tensor, Tensor]:
    keys, order = x.sort(stable=True)
    return keys, payload[order]


def split_top_k(x: Tensor) -> tuple[Tensor, Tensor]:  # x [B, N@x]
    """The largest 3 of a split dim with their positions; candidates are the largest 3 of each rank."""
    values, at = x.topk(3, -1)
    at = at + fs.axis_index("x") * x.shape[-1]
    values, at = fs.all_gather((values, at), "x", dim=1, to="invariant")
    values, chosen = values.topk(3, -1)
    return values, at.gather(-1, chosen)


def nucleus_filter(logits: Tensor) -> Tensor:  # logits [B, N@x]
    """Top-p: keep the most probable tokens that add up to 0.7; probabilities of all ranks are sorted by each."""
    p = fs.all_gather(logits, "x", dim=1, to="invariant").softmax(-1)
    values = p.sort(-1, descending=True).values
    least = values.masked_fill(values.cumsum(-1) - values >= 0.7, 1.0).amin(-1, keepdim=True)
    kept = p * (p >= least)
    return fs.pslice(kept / kept.sum(-1, keepdim=True), "x", dim=1)


def dense_nucleus_filter(logits: Tensor) -> Tensor:
    out = []
    for row in logits.softmax(-1):
        order, total, kept = row.argsort(descending=True).tolist(), 0.0, torch.zeros_like(row)
        for i in order:
            if total >= 0.7:
                break
            kept[i] = row[i]
            total += float(row[i])
        out.append(kept / kept.sum())
    return torch.stack(out)


def running_extremes(price: Tensor) -> tuple[Tensor, Tensor]:  # price [T@x]
    """Running maximum over split time and the largest drawdown: the maxima of earlier ranks are gathered."""
    within = price.cummax(0).values
    tops = fs.all_gather(within[-1:], "x")
    earlier = tops.where(torch.arange(len(tops)) < fs.axis_index("x"), -torch.inf).amax()
    running = torch.maximum(within, earlier)
    return running, fs.pmax((running - price).amax(), "x")


def dense_running_extremes(price: Tensor) -> tuple[Tensor, Tensor]:
    running = price.cummax(0).values
    return running, (running - price).max()


LINE, LAST = P("x"), P(None, "x")
LETTERS = torch.tensor([3, 1, 2, 3, 1, 5, 3, 2])

PROGRAMS = [
    Program(rank_sort, {"x": 2}, (LINE, LINE), LINE, (LETTERS, normal("payload", 8, 2)), dense_rank_sort),
    Program(split_top_k, {"x": 2}, (LAST,), P(), (normal("x", 3, 8),), lambda x: tuple(x.topk(3, -1))),
    Program(nucleus_filter, {"x": 4}, (LAST,), LAST, (normal("logits", 3, 8) * 2,), dense_nucleus_filter),
    Program(running_extremes, {"x": 3}, (LINE,), (LINE, P()), (normal("price", 9),), dense_running_extremes),
]  # fmt: skip
