"""Contrastive losses, retrieval, and embedding tables that are split.

Legend: B batch, N items of an index, Q queries, D width, V rows of a table, F tables; [B@data] is a dim split over an
axis.
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


def towers(p: Params, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    return F.normalize(image @ p["image"], dim=-1), F.normalize(text @ p["text"], dim=-1)


def cached_contrastive_gradient(p: Params, image: Tensor, text: Tensor) -> Any:
    """GradCache: gradients of the loss by embeddings without a graph, then by the parameters (Gao et al., 2021)."""
    local = {name: w.detach().requires_grad_() for name, w in fs.pvary(p, "data").items()}
    with torch.no_grad():
        embedded = towers(local, image, text)
    cached = tuple(x.requires_grad_() for x in embedded)
    all_v = fs.all_gather(cached[1], "data")
    labels = fs.axis_index("data") * len(image) + torch.arange(len(image))
    loss = fs.pmean(F.cross_entropy(cached[0] @ all_v.T, labels), "data")
    cotangents = torch.autograd.grad(loss, cached)
    grads = torch.autograd.grad(towers(local, image, text), [*local.values()], cotangents)
    return loss.detach(), fs.psum(dict(zip(local, grads, strict=True)), "data")


def dense_cached_contrastive_gradient(p: Params, image: Tensor, text: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        u, v = towers(p, image, text)
        return F.cross_entropy(u @ v.T, torch.arange(len(u)))

    return dense_grad(loss)(p)


def split_embedding_bag(table: Tensor, weights: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:  # table [V@model, D]
    """Weighted sums of rows of a table with split rows; ids on other ranks have weight zero."""
    start = fs.axis_index("model") * len(table)
    own = (ids >= start) & (ids < start + len(table))
    local = (ids - start).where(own, 0)
    bags = F.embedding_bag(local, table, offsets, mode="sum", per_sample_weights=fs.pvary(weights, "model") * own)
    return torch.tanh(fs.psum(bags, "model")).square().sum()


def dense_split_embedding_bag(table: Tensor, weights: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
    return torch.tanh(F.embedding_bag(ids, table, offsets, mode="sum", per_sample_weights=weights)).square().sum()


def recommendation_model(p: Params, ids: Tensor, x: Tensor, target: Tensor) -> Tensor:
    """DLRM: tables are split, and their rows are exchanged for the own part of the batch (Naumov et al., 2019).

    tables [F@data, V, D], ids [B@data, F], x [B@data, D].
    """
    ids = fs.all_to_all(ids, "data", split=1, concat=0)  # [B, F@data]
    rows = torch.stack([table[i] for table, i in zip(p["tables"], ids.T, strict=True)], 1)  # [B, F@data, D]
    rows = fs.all_to_all(rows, "data", split=0, concat=1)  # [B@data, F, D]
    bottom, top = fs.pvary((p["bottom"], p["top"]), "data")
    features = torch.cat([rows, torch.relu(x @ bottom)[:, None]], 1)
    pairs = (features @ features.mT).flatten(1)
    return fs.pmean(F.binary_cross_entropy_with_logits(pairs @ top, target), "data")


def dense_recommendation_model(p: Params, ids: Tensor, x: Tensor, target: Tensor) -> Tensor:
    rows = torch.stack([table[i] for table, i in zip(p["tables"], ids.T, strict=True)], 1)
    features = torch.cat([rows, torch.relu(x @ p["bottom"])[:, None]], 1)
    return F.binary_cross_entropy_with_logits((features @ features.mT).flatten(1) @ p["top"], target)


DATA, MODEL = P("data"), P("model")
TOWERS = {"image": normal("image", 4, 3), "text": normal("text", 5, 3), "scale": torch.tensor(1.2)}
PAIRS = normal("images", 6, 4), normal("texts", 6, 5)
DLRM = {"tables": normal("tables", 4, 5, 2), "bottom": normal("bottom", 3, 2), "top": normal("top", 25) / 5}
DLRM_SPECS = {"tables": DATA, "bottom": P(), "top": P()}

PROGRAMS = [
    Program(cached_contrastive_gradient, {"data": 2}, (P(), DATA, DATA), P(),
            ({"image": TOWERS["image"], "text": TOWERS["text"]}, *PAIRS), dense_cached_contrastive_gradient),
    Program(fs.value_and_grad(split_embedding_bag, (0, 1)), {"model": 4}, (MODEL, P(), P(), P()), (P(), (MODEL, P())),
            (normal("table", 8, 3), normal("weights", 7), torch.tensor([3, 0, 7, 2, 2, 5, 6]), torch.tensor([0, 2, 3])),
            dense_grad(dense_split_embedding_bag, (0, 1))),
    Program(fs.value_and_grad(recommendation_model), {"data": 2}, (DLRM_SPECS, DATA, DATA, DATA), (P(), DLRM_SPECS),
            (DLRM, torch.arange(16).view(4, 4) * 3 % 5, normal("x", 4, 3), torch.tensor([0.0, 1, 1, 0])),
            dense_grad(dense_recommendation_model)),
]  # fmt: skip
