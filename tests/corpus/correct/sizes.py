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


def uneven_exchange_loss(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:  # x [5@x, 7], w [7@x, 2], scale [5@x]
    """Exchange rows for columns, multiply by split rows of w, and exchange back, with parts of 2, 2, 1 and 3, 3, 1."""
    columns = fs.all_to_all(x, "x", split=1, concat=0, size=5)  # [5, 7@x]
    y = torch.sin(columns[..., None] * w)  # [5, 7@x, 2]
    y = fs.all_to_all(y, "x", split=0, concat=1, size=7)  # [5@x, 7, 2]
    return fs.psum((scale * y.prod(-1).sum(1)).square().sum(), "x")


def dense_uneven_exchange_loss(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return (scale * torch.sin(x[..., None] * w).prod(-1).sum(1)).square().sum()


DATA = P("data")
TOKENS = torch.arange(28).view(4, 7) * 5 % 9
LANGUAGE = {"table": normal("table", 9, 3), "head": normal("head", 3, 9)}
INFINITE = normal("x", 4, 3).index_fill(0, torch.tensor(2), torch.inf)

PROGRAMS = [
    Program(masked_token_loss, {"data": 2}, (P(), DATA, DATA), P(), (LANGUAGE, TOKENS, torch.tensor([7, 3, 2, 5])),
            dense_masked_token_loss),
    Program(skipped_step, {"data": 2}, (P(), DATA), P(), (normal("w", 3), INFINITE),
            lambda w, x: (w, torch.tensor(True))),
    Program(fs.value_and_grad(uneven_exchange_loss, (0, 1, 2)), {"x": 3}, (P("x"),) * 3, (P(), P("x")),
            (normal("x", 5, 7), normal("w", 7, 2), normal("scale", 5)),
            dense_grad(dense_uneven_exchange_loss, (0, 1, 2))),
]  # fmt: skip
