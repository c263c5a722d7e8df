"""Transfers over the wrong axis, along the wrong dim, in the wrong order or direction, or by the wrong reduction.

Legend: B batch, T positions, D width, F hidden width, H heads; [B@data] is a dim split over an axis; {V} varies over
it, {I} does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P, nn
from tests.corpus.wrong.program import WrongProgram, normal

Params = dict[str, Tensor]


# --- the reduction after a row-parallel matmul ----------------------------------------------------------------


def row_parallel_summed_over_model(p: Params, x: Tensor) -> Any:  # up [D, F@model], down [F@model, D], x [B@data, D]
    def loss(p: Params) -> Tensor:
        p = fs.pvary(p, "data")
        h = torch.relu(fs.pvary(x, "model") @ p["up"])
        y = fs.psum(h @ p["down"], "model")
        # WRONG: y = fs.psum(h @ p["down"], "data")
        return fs.pmean((y + p["b"]).square().mean(), "data")  # BUG: y is a sum over examples

    return fs.value_and_grad(loss)(p)


def row_parallel_summed_then_relu(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(fs.psum(x @ w, "model"))
    # WRONG: y = x @ w
    # WRONG: return torch.relu(y)  # BUG


def sum_divided_by_its_axis(x: Tensor) -> Tensor:  # x [B@data, D@model]
    means = fs.psum(x.mean(0), "data") / fs.axis_size("data")
    # WRONG: means = fs.psum(x.mean(0), "data") / fs.axis_size("model")
    return fs.psum(means.square().sum(), "model")


# --- dims and axes of a gather or scatter ---------------------------------------------------------------------


def gathered_along_its_dim(x: Tensor) -> Tensor:  # x [B, D@model]
    whole = fs.all_gather(x, "model", 1, to="invariant")
    # WRONG: whole = fs.all_gather(x, "model", to="invariant")  # dim 0, the examples
    return (whole @ whole.T).diagonal().square().mean()


def scattered_along_its_dim(x: Tensor, w: Tensor) -> Tensor:  # x [T, F@model], w [F@model, D], result [T@model, D]
    return fs.psum_scatter(x @ w, "model", 0)
    # WRONG: return fs.psum_scatter(x @ w, "model", 1)


def gathered_in_the_order_of_the_spec(x: Tensor) -> Tensor:  # x [B@data+model]
    return fs.all_gather(x, ("data", "model"), to="invariant")
    # WRONG: return fs.all_gather(x, ("model", "data"), to="invariant")


def flat_rank_in_the_order_of_the_spec(x: Tensor) -> Tensor:  # x [B@data+model]
    rank = fs.axis_index(("data", "model"))
    # WRONG: rank = fs.axis_index("model") * fs.axis_size("data") + fs.axis_index("data")
    return x * (rank * len(x) + torch.arange(len(x)))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [B, T, H@seq, D]
    return nn.attention(*(t.transpose(1, 2) for t in (q, k, v)), causal=True).transpose(1, 2)


def heads_and_positions_exchanged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [B, T@seq, H, D]
    """Attention by head (Ulysses), with split and concat mixed up in both exchanges."""
    q, k, v = fs.all_to_all((q, k, v), "seq", split=2, concat=1)
    # WRONG: q, k, v = fs.all_to_all((q, k, v), "seq", split=1, concat=2)  # BUG
    return fs.all_to_all(_attend(q, k, v), "seq", split=1, concat=2)
    # WRONG: return fs.all_to_all(_attend(q, k, v), "seq", split=2, concat=1)  # BUG


# --- matrices on a grid ---------------------------------------------------------------------------------------


def pivot_column_from_its_ranks(a: Tensor) -> Tensor:  # a [M@row, N@col]
    """Eliminate by the first row and column, which the first ranks of each axis broadcast."""
    column = fs.psum(torch.where(fs.axis_index("col") == 0, a[:, 0], 0), "col")
    # WRONG: column = fs.psum(torch.where(fs.axis_index("row") == 0, a[:, 0], 0), "col")  # the ranks of col 0 have it
    row = fs.psum(torch.where(fs.axis_index("row") == 0, a[0], 0), "row")
    return a - torch.outer(fs.pvary(column, "col"), fs.pvary(row, "row"))


def grid_product_summed_over_columns(a: Tensor, x: Tensor) -> Tensor:  # a [M@row, K@col], x [K@col], result [M@row]
    part = a @ fs.pvary(x, "row")
    return fs.psum(part, "col")
    # WRONG: return fs.psum(part, "row")


# --- rings ----------------------------------------------------------------------------------------------------


def ring_of_all_blocks(x: Tensor) -> Tensor:  # x [B@data, D]: the similarity of each with all
    n = fs.axis_size("data")
    total, block = torch.zeros(len(x)), x
    for _ in range(n):
        # WRONG: for _ in range(n - 1):
        total = total + (x @ block.T).exp().sum(1)  # BUG
        block = fs.ppermute(block, "data", [(i, (i + 1) % n) for i in range(n)])
    return total


def _ring_of_past_blocks(x: Tensor, source: int) -> Tensor:
    """Sum similarities with all earlier positions; `source` is the direction in which the first block's owner is."""
    n, me, t = fs.axis_size("seq"), fs.axis_index("seq"), len(x)
    total, block = torch.zeros(t), x
    for step in range(n):
        keys = (me + source * step) % n * t + torch.arange(t)
        earlier = (me * t + torch.arange(t)).unsqueeze(1) >= keys
        total = total + (x @ block.T).where(earlier, 0).sum(1)
        block = fs.ppermute(block, "seq", [(i, (i + 1) % n) for i in range(n)])
    return total


def ring_masked_by_the_owner(x: Tensor) -> Tensor:  # x [T@seq, D]
    return _ring_of_past_blocks(x, -1)
    # WRONG: return _ring_of_past_blocks(x, +1)  # blocks come from the left


# --- pipelines ------------------------------------------------------------------------------------------------


def _pipeline(w: Tensor, x: Tensor, ticks: int, output: int) -> Tensor:  # w [S@stage, D, D], x [M, D]: M microbatches
    n, stage = fs.axis_size("stage"), fs.axis_index("stage")
    x, received, out = fs.pvary(x, "stage"), torch.zeros(x.shape[1]), []
    for tick in range(ticks):
        h = torch.where(stage == 0, x[min(tick, len(x) - 1)], received)
        for block in w:
            h = torch.tanh(h @ block)
        out.append(h)
        received = fs.ppermute(h, "stage", [(i, i + 1) for i in range(n - 1)])
    return fs.psum(torch.where(stage == output, torch.stack(out[-len(x) :]), 0), "stage")


def pipeline(w: Tensor, x: Tensor) -> Tensor:
    n = fs.axis_size("stage")
    return _pipeline(w, x, len(x) + n - 1, output=n - 1)
    # WRONG (2 lines): return _pipeline(w, x, len(x), output=fs.axis_size("stage") - 1)


# --- halos ----------------------------------------------------------------------------------------------------


def _smoothed(x: Tensor, left: Tensor, right: Tensor) -> Tensor:  # x [T@seq]
    padded = torch.cat([left, x, right])
    return (padded[:-2] + padded[1:-1] + padded[2:]) / 3


def halo(x: Tensor) -> Tensor:
    n = fs.axis_size("seq")
    left = fs.ppermute(x[-1:], "seq", [(i, i + 1) for i in range(n - 1)])
    # WRONG halo_that_wraps: left = fs.ppermute(x[-1:], "seq", [(i, (i + 1) % n) for i in range(n)])
    right = fs.ppermute(x[:1], "seq", [(i + 1, i) for i in range(n - 1)])
    # WRONG halo_that_wraps: right = fs.ppermute(x[:1], "seq", [((i + 1) % n, i) for i in range(n)])
    return _smoothed(x, left, right)
    # WRONG halo_missing (4 lines): return _smoothed(x, torch.zeros(1), torch.zeros(1))


DATA2, MODEL2, SEQ2 = {"data": 2}, {"model": 2}, {"seq": 2}
GRID, RECTANGLE = {"data": 2, "model": 2}, {"data": 2, "model": 4}
X, SQUARE, LINE = normal("x", 4, 4), normal("square", 4, 4), normal("line", 8)
COLUMNS, ROWS = P(None, "model"), P("model")
TP = {"up": COLUMNS, "down": ROWS, "b": P()}
MLP = {"up": normal("up", 4, 8, std=0.5), "down": normal("down", 8, 4, std=0.5), "b": normal("b", 4)}
QKV = tuple(normal(name, 1, 4, 4, 2) for name in "qkv")
STAGES = (normal("stages", 2, 4, 4), normal("microbatches", 3, 4))

PROGRAMS = [
    WrongProgram(
        "row_parallel_summed_over_data", row_parallel_summed_over_model, GRID, (TP, P("data")), (P(), TP), (MLP, X),
        "types", "data",
    ),
    WrongProgram(
        "row_parallel_not_summed", row_parallel_summed_then_relu, MODEL2, (COLUMNS, ROWS), P(), (X, SQUARE), "types",
        "model",
    ),
    WrongProgram(
        "sum_divided_by_the_wrong_axis", sum_divided_by_its_axis, RECTANGLE, (P("data", "model"),), P(), (X,),
        "verify", "data",
    ),
    WrongProgram(
        "gathered_along_the_default_dim", gathered_along_its_dim, MODEL2, (COLUMNS,), P(), (X,), "verify", "model",
    ),
    WrongProgram(
        "scattered_along_the_wrong_dim", scattered_along_its_dim, MODEL2, (COLUMNS, ROWS), ROWS, (X, SQUARE),
        "verify", "model",
    ),
    WrongProgram(
        "gathered_in_the_wrong_order_of_axes", gathered_in_the_order_of_the_spec, GRID, (P(("data", "model")),), P(),
        (LINE,), "verify", "data",
    ),
    WrongProgram(
        "flat_rank_in_the_wrong_order", flat_rank_in_the_order_of_the_spec, GRID, (P(("data", "model")),),
        P(("data", "model")), (LINE,), "verify", "data",
    ),
    WrongProgram(
        "heads_and_positions_exchanged_backwards", heads_and_positions_exchanged, SEQ2, (P(None, "seq"),) * 3,
        P(None, "seq"), QKV, "verify", "seq",
    ),
    WrongProgram(
        "pivot_column_from_the_wrong_ranks", pivot_column_from_its_ranks, {"row": 2, "col": 2}, (P("row", "col"),),
        P("row", "col"), (X,), "verify", "row",
    ),
    WrongProgram(
        "grid_product_summed_over_rows", grid_product_summed_over_columns, {"row": 2, "col": 2},
        (P("row", "col"), P("col")), P("row"), (X, SQUARE[0]), "types", "col",
    ),
    WrongProgram(
        "ring_with_one_step_too_few", ring_of_all_blocks, DATA2, (P("data"),), P("data"), (X,), "verify", "data",
    ),
    WrongProgram(
        "ring_masked_by_the_wrong_owner", ring_masked_by_the_owner, {"seq": 4}, (P("seq"),), P("seq"), (X,),
        "verify", "seq",
    ),
    WrongProgram(
        "pipeline_stopped_before_it_is_empty", pipeline, {"stage": 2}, (P("stage"), P()), P(), STAGES, "verify",
        "stage",
    ),
    WrongProgram("halo_missing", halo, SEQ2, (P("seq"),), P("seq"), (LINE,), "verify", "seq"),
    WrongProgram(
        "halo_that_wraps", halo, SEQ2, (P("seq"),), P("seq"), (LINE,), None, "seq",
        out_of_reach="one rank sends its ends to itself, and so the wrapped result is the same on every mesh",
    ),
]  # fmt: skip
