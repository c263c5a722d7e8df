"""Dims that the ranks do not divide, empty parts, integers and booleans.

Legend: B batch, T positions, D width, F hidden width; [B@data] is a dim split over an axis.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, dense_grad, normal

Params = dict[str, Tensor]


def uneven_mlp(p: Params, x: Tensor, y: Tensor) -> Tensor:  # 5 rows over 2 ranks, 7 hidden units over 3
    """Tensor and data parallel with unequal parts: the mean is a sum over ranks divided by the global count."""
    p = fs.pvary(p, "data")
    h = torch.tanh(fs.pvary(x, "model") @ p["up"] + p["bias"])  # [B@data, F@model]
    error = fs.psum(h @ p["down"], "model") - y
    total, count = fs.psum((error.square().sum(), torch.tensor(error.numel())), "data")
    return total / count


def dense_mlp(p: Params, x: Tensor, y: Tensor) -> Tensor:
    return (torch.tanh(x @ p["up"] + p["bias"]) @ p["down"] - y).square().mean()


def uneven_zero_3(p: Params, x: Tensor, y: Tensor) -> Tensor:  # 5 rows and 7 units over 4 ranks
    """Gathers of parts of 2, 2, 2 and 1; the rows are 2, 2, 1 and none."""
    up, bias = fs.all_gather(p["up"], "data", dim=1, size=7), fs.all_gather(p["bias"], "data", size=7)
    down = fs.all_gather(p["down"], "data", size=7)
    error = torch.tanh(x @ up + bias) @ down - y
    total, count = fs.psum((error.square().sum(), torch.tensor(error.numel())), "data")
    return total / count


def empty_parts(p: Params, x: Tensor, labels: Tensor) -> Tensor:  # 2 rows over 4 ranks: two ranks have none
    """A weighted loss by reduction="sum", which is zero without rows."""
    p = fs.pvary(p, "data")
    loss = F.cross_entropy(x @ p["w"] + p["b"], labels, reduction="sum")
    return fs.psum(loss, "data") / fs.psum(torch.tensor(len(x)), "data")


def dense_empty_parts(p: Params, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x @ p["w"] + p["b"], labels)


def masked_token_loss(p: Params, ids: Tensor, lengths: Tensor) -> Any:  # ids [B@data, T], lengths [B@data]
    """Next-token loss of padded sequences: a mask by length, an integer count over all ranks, accuracy as a count."""

    def loss(p: Params) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        p = fs.pvary(p, "data")
        logits = p["table"][ids[:, :-1]] @ p["head"]
        targets, mask = ids[:, 1:], torch.arange(1, ids.shape[1]) < lengths[:, None]
        nll = F.cross_entropy(logits.mT, targets, reduction="none")
        hits = (logits.argmax(-1) == targets) & mask
        total, count, hits = fs.psum(((nll * mask).sum(), mask.sum(), hits.sum()), "data")
        return total / count, (count, hits)

    return fs.value_and_grad(loss, has_aux=True)(p)


def dense_masked_token_loss(p: Params, ids: Tensor, lengths: Tensor) -> Any:
    def loss(p: Params) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        pairs = [(row[i], row[i + 1]) for row, n in zip(ids, lengths.tolist(), strict=True) for i in range(n - 1)]
        sources, targets = (torch.stack(x) for x in zip(*pairs, strict=True))
        logits = p["table"][sources] @ p["head"]
        return F.cross_entropy(logits, targets), (torch.tensor(len(pairs)), (logits.argmax(-1) == targets).sum())

    grads, out = torch.func.grad_and_value(loss, has_aux=True)(p)
    return out, grads


def skipped_step(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:  # w [D], x [B@data, D] with an infinite row
    """Skip the update on every rank if the gradient of any rank is not finite: a flag as a tensor."""
    local = fs.pvary(w, "data")
    grad = torch.func.grad(lambda w: (x @ w).square().mean())(local)
    bad = fs.pmax((~torch.isfinite(grad)).any().int(), "data") > 0
    mean = fs.pmean(torch.nan_to_num(grad, posinf=0.0, neginf=0.0), "data")
    return torch.where(bad, w, w - 0.1 * mean), bad


def packed_sequences(p: Params, x: Tensor, segment: Tensor) -> Tensor:  # x [T@seq, D], segment [T@seq] ascending
    """Mean of each packed sequence, whose tokens lie on several ranks; segments without tokens count for nothing."""
    h = torch.tanh(x @ fs.pvary(p["w"], "seq"))
    sums = torch.zeros(4, h.shape[1]).index_add(0, segment, h)
    sums, counts = fs.psum((sums, (segment[:, None] == torch.arange(4)).sum(0)), "seq")
    means = sums / counts.clamp(min=1)[:, None]
    return (means @ p["readout"]).square().sum() / (counts > 0).sum()


def dense_packed_sequences(p: Params, x: Tensor, segment: Tensor) -> Tensor:
    means = [torch.tanh(x[segment == s] @ p["w"]).mean(0) for s in range(4) if bool((segment == s).any())]
    return (torch.stack(means) @ p["readout"]).square().sum() / len(means)


def uneven_exchange_loss(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:  # x [5@x, 7], w [7@x, 2], scale [5@x]
    """Exchange rows for columns, multiply by split rows of w, and exchange back, with parts of 2, 2, 1 and 3, 3, 1."""
    columns = fs.all_to_all(x, "x", split=1, concat=0, size=5)  # [5, 7@x]
    y = torch.sin(columns[..., None] * w)  # [5, 7@x, 2]
    y = fs.all_to_all(y, "x", split=0, concat=1, size=7)  # [5@x, 7, 2]
    return fs.psum((scale * y.prod(-1).sum(1)).square().sum(), "x")


def dense_uneven_exchange_loss(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return (scale * torch.sin(x[..., None] * w).prod(-1).sum(1)).square().sum()


def uneven_reduce_scatter_loss(w: Tensor, x: Tensor, scale: Tensor) -> Tensor:  # w [F@x, D], x [N, F@x], scale [N@x]
    """Row-parallel product whose 5 rows are scattered over 3 ranks, and scaled there."""
    y = fs.psum_scatter(x @ w, "x") * scale[:, None]  # [N@x, D]
    return fs.psum(torch.cos(y).sum(), "x")


DATA = P("data")
HIDDEN = {"up": normal("up", 3, 7), "bias": normal("bias", 7), "down": normal("down", 7, 2)}
HIDDEN_SPECS = {"up": P(None, "model"), "bias": P("model"), "down": P("model")}
FULLY_SPECS = {"up": P(None, "data"), "bias": DATA, "down": DATA}
X, Y = normal("x", 5, 3), normal("y", 5, 2)
CLASSES = {"w": normal("w", 3, 4), "b": normal("b", 4)}
TOKENS = torch.arange(28).view(4, 7) * 5 % 9
LANGUAGE = {"table": normal("table", 9, 3), "head": normal("head", 3, 9)}
INFINITE = normal("x", 4, 3).index_fill(0, torch.tensor(2), torch.inf)
PACKED = {"w": normal("w", 3, 2), "readout": normal("readout", 2, 2)}

PROGRAMS = [
    Program(fs.value_and_grad(uneven_mlp), {"data": 2, "model": 3}, (HIDDEN_SPECS, DATA, DATA), (P(), HIDDEN_SPECS),
            (HIDDEN, X, Y), dense_grad(dense_mlp)),
    Program(fs.value_and_grad(uneven_zero_3), {"data": 4}, (FULLY_SPECS, DATA, DATA), (P(), FULLY_SPECS),
            (HIDDEN, X, Y), dense_grad(dense_mlp)),
    Program(fs.value_and_grad(empty_parts), {"data": 4}, (P(), DATA, DATA), P(),
            (CLASSES, normal("x", 2, 3), torch.tensor([3, 1])), dense_grad(dense_empty_parts)),
    Program(masked_token_loss, {"data": 2}, (P(), DATA, DATA), P(), (LANGUAGE, TOKENS, torch.tensor([7, 3, 2, 5])),
            dense_masked_token_loss),
    Program(skipped_step, {"data": 2}, (P(), DATA), P(), (normal("w", 3), INFINITE),
            lambda w, x: (w, torch.tensor(True))),
    Program(fs.value_and_grad(packed_sequences), {"seq": 3}, (P(), P("seq"), P("seq")), P(),
            (PACKED, normal("x", 8, 3), torch.tensor([0, 0, 0, 0, 1, 1, 3, 3])), dense_grad(dense_packed_sequences)),
    Program(fs.value_and_grad(uneven_exchange_loss, (0, 1, 2)), {"x": 3}, (P("x"),) * 3, (P(), P("x")),
            (normal("x", 5, 7), normal("w", 7, 2), normal("scale", 5)),
            dense_grad(dense_uneven_exchange_loss, (0, 1, 2))),
    Program(fs.value_and_grad(uneven_reduce_scatter_loss, (0, 2)), {"x": 3}, (P("x"), P(None, "x"), P("x")),
            (P(), P("x")), (normal("w", 4, 2), normal("x", 5, 4), normal("scale", 5)),
            dense_grad(lambda w, x, scale: torch.cos(x @ w * scale[:, None]).sum(), (0, 2))),
]  # fmt: skip
