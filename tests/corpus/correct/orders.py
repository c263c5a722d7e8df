"""Sorting, selection and scans over a split dim.

Legend: N items; [N@x] is a dim split over an axis.
"""

from __future__ import annotations

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, dense_grad, normal


def odd_even_block_sort(x: Tensor) -> Tensor:  # x [N@x]
    """Sort parts, then in n rounds pairs of neighbours merge: the left one keeps the smaller half."""
    n, rank, size = fs.axis_size("x"), fs.axis_index("x"), len(x)
    x = x.sort().values
    for turn in range(n):
        pairs = [(i, i + 1) for i in range(turn % 2, n - 1, 2)]
        other = fs.ppermute(x, "x", pairs + [(j, i) for i, j in pairs])
        merged = torch.cat([x, other]).sort().values
        left = (rank % 2 == turn % 2) & (rank < n - 1)
        right = (rank % 2 != turn % 2) & (rank > 0)
        x = torch.where(left, merged[:size], torch.where(right, merged[size:], x))
    return x


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


def split_arg_max(x: Tensor) -> tuple[Tensor, Tensor]:  # x [B, N@x], with ties
    """Greedy decoding over a split vocabulary: the largest value, and the first position that has it."""
    top = fs.pmax(x.amax(-1), "x")
    at = fs.axis_index("x") * x.shape[-1] + torch.arange(x.shape[-1])
    first = torch.where(x == top[:, None], at, 10**9).amin(-1)
    return top, fs.pmin(first, "x")


def dense_split_arg_max(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.amax(-1), (x == x.amax(-1, keepdim=True)).int().argmax(-1)


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


def prefix_sums(x: Tensor) -> Tensor:  # x [N@x]
    """Inclusive prefix sums by doubling steps of a scan over ranks, squared and summed (Hillis and Steele, 1986)."""
    n = fs.axis_size("x")
    within = x.cumsum(0)
    total = within[-1]
    step = 1
    while step < n:
        total = total + fs.ppermute(total, "x", [(i, i + step) for i in range(n - step)])
        step *= 2
    return fs.psum((within + total - within[-1]).square().sum(), "x")


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


def linked_list_ranking(following: Tensor) -> Tensor:  # following [N@x]: the next item, the last one names itself
    """Distance to the end of a linked list by pointer jumping; each jump gathers all pointers."""
    distance = (following != fs.axis_index("x") * len(following) + torch.arange(len(following))).long()
    for _ in range(3):
        all_distance, all_following = fs.all_gather((distance, following), "x")
        distance, following = distance + all_distance[following], all_following[following]
    return distance


def dense_linked_list_ranking(following: Tensor) -> Tensor:
    out = []
    for i in range(len(following)):
        steps = 0
        while int(following[i]) != i:
            i, steps = int(following[i]), steps + 1
        out.append(steps)
    return torch.tensor(out)


def unique_flags(x: Tensor) -> tuple[Tensor, Tensor]:  # x [N@x] of integers
    """Mark the first occurrence of each value over all ranks (bool), and tell if any value occurs twice (bool)."""
    everything = fs.all_gather(x, "x")
    at = fs.axis_index("x") * len(x) + torch.arange(len(x))
    seen = ((everything == x[:, None]) & (torch.arange(len(everything)) < at[:, None])).any(1)
    return ~seen, fs.psum(seen.int(), "x").sum() > 0


def dense_unique_flags(x: Tensor) -> tuple[Tensor, Tensor]:
    first = torch.tensor([int(v) not in x[:i].tolist() for i, v in enumerate(x)])
    return first, ~first.all()


LINE, LAST = P("x"), P(None, "x")
LETTERS = torch.tensor([3, 1, 2, 3, 1, 5, 3, 2])
NEXT = torch.tensor([4, 7, 2, 1, 3, 2, 0, 5])

PROGRAMS = [
    Program(odd_even_block_sort, {"x": 4}, (LINE,), LINE, (normal("x", 12),), lambda x: x.sort().values),
    Program(rank_sort, {"x": 2}, (LINE, LINE), LINE, (LETTERS, normal("payload", 8, 2)), dense_rank_sort),
    Program(split_top_k, {"x": 2}, (LAST,), P(), (normal("x", 3, 8),), lambda x: tuple(x.topk(3, -1))),
    Program(split_arg_max, {"x": 4}, (LAST,), P(), ((normal("x", 5, 12) * 2).round(),), dense_split_arg_max),
    Program(nucleus_filter, {"x": 4}, (LAST,), LAST, (normal("logits", 3, 8) * 2,), dense_nucleus_filter),
    Program(fs.value_and_grad(prefix_sums), {"x": 4}, (LINE,), (P(), LINE), (normal("x", 8),),
            dense_grad(lambda x: x.cumsum(0).square().sum())),
    Program(running_extremes, {"x": 3}, (LINE,), (LINE, P()), (normal("price", 9),), dense_running_extremes),
    Program(linked_list_ranking, {"x": 2}, (LINE,), LINE, (NEXT,), dense_linked_list_ranking),
    Program(unique_flags, {"x": 2}, (LINE,), (LINE, P()), (LETTERS,), dense_unique_flags),
]  # fmt: skip
