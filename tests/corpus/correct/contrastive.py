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


def clip_loss(p: Params, image: Tensor, text: Tensor) -> Tensor:  # [B@data, D]
    """Each rank classifies its images among all texts and its texts among all images (Radford et al., 2021)."""
    p = fs.pvary(p, "data")
    u, v = towers(p, image, text)
    all_u, all_v = fs.all_gather((u, v), "data")
    labels = fs.axis_index("data") * len(u) + torch.arange(len(u))
    scale = p["scale"].exp()
    loss = F.cross_entropy(scale * u @ all_v.T, labels) + F.cross_entropy(scale * v @ all_u.T, labels)
    return fs.pmean(loss / 2, "data")


def dense_clip_loss(p: Params, image: Tensor, text: Tensor) -> Tensor:
    u, v = towers(p, image, text)
    logits, labels = p["scale"].exp() * u @ v.T, torch.arange(len(u))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def sigmoid_loss_by_ring(p: Params, image: Tensor, text: Tensor) -> Tensor:  # [B@data, D]
    """SigLIP: blocks of texts travel around a ring; only the own block has positives (Zhai et al., 2023)."""
    p = fs.pvary(p, "data")
    n = fs.axis_size("data")
    u, v = towers(p, image, text)
    total = torch.zeros(())
    for step in range(n):
        sign = 2 * torch.eye(len(u)) - 1 if step == 0 else -torch.ones(len(u), len(u))
        total = total - F.logsigmoid(sign * (p["scale"].exp() * u @ v.T + p["bias"])).sum()
        v = fs.ppermute(v, "data", [(i, (i + 1) % n) for i in range(n)])
    return fs.psum(total, "data") / (n * len(u))


def dense_sigmoid_loss_by_ring(p: Params, image: Tensor, text: Tensor) -> Tensor:
    u, v = towers(p, image, text)
    logits = p["scale"].exp() * u @ v.T + p["bias"]
    return -F.logsigmoid((2 * torch.eye(len(u)) - 1) * logits).sum() / len(u)


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


def search_split_index(query: Tensor, index: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """The 3 best of an index with split items: best of each rank, then best of all, as global numbers.

    query [Q, D], index [N@data, D], allowed [N@data] bool.
    """
    scores = (query @ index.T).masked_fill(~allowed, -torch.inf)  # [Q, N@data]
    best, at = scores.topk(3, -1)
    at = at + fs.axis_index("data") * len(index)
    best, at = fs.all_gather((best, at), "data", dim=1, to="invariant")  # [Q, 3 n]
    best, chosen = best.topk(3, -1)
    return best, at.gather(1, chosen)


def dense_search_split_index(query: Tensor, index: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    best, at = (query @ index.T).masked_fill(~allowed, -torch.inf).sort(-1, descending=True)
    return best[:, :3], at[:, :3]


def search_quantized_index(query: Tensor, centers: Tensor, codes: Tensor) -> Tensor:
    """Scores of product-quantized items: a table of query and centers, looked up by the split codes (int8).

    query [Q, 2, D], centers [2, K, D], codes [N@data, 2] (Jégou et al., 2011).
    """
    table = torch.einsum("qsd,skd->qsk", query, centers)  # on every rank
    return sum(table[:, s, codes[:, s].long()] for s in range(2))  # [Q, N@data]


def dense_search_quantized_index(query: Tensor, centers: Tensor, codes: Tensor) -> Tensor:
    items = torch.stack([centers[s, codes[:, s].long()] for s in range(2)], 1)
    return torch.einsum("qsd,nsd->qn", query, items)


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


def split_classes_margin_loss(w: Tensor, x: Tensor, labels: Tensor) -> Tensor:  # w [C@model, D], x [B@model, D]
    """CosFace with split classes: features and labels are gathered, each rank has logits of its own classes.

    Wang et al., 2018; the split of the last layer is that of partial FC (An et al., 2021).
    """
    x, labels = fs.all_gather((F.normalize(x, dim=-1), labels), "model")
    classes = fs.axis_index("model") * len(w) + torch.arange(len(w))
    hot = labels[:, None] == classes  # [B, C@model]
    logits = 8 * (x @ F.normalize(w, dim=-1).T - 0.35 * hot)
    top = fs.pvary(fs.pmax(logits.detach().amax(-1), "model"), "model")
    exps, own = fs.psum(((logits - top[:, None]).exp().sum(-1), ((logits - top[:, None]) * hot).sum(-1)), "model")
    return (exps.log() - own).mean()


def dense_split_classes_margin_loss(w: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    cosines = F.normalize(x, dim=-1) @ F.normalize(w, dim=-1).T
    return F.cross_entropy(8 * (cosines - 0.35 * F.one_hot(labels, len(w))), labels)


DATA, MODEL = P("data"), P("model")
TOWERS = {"image": normal("image", 4, 3), "text": normal("text", 5, 3), "scale": torch.tensor(1.2)}
PAIRS = normal("images", 6, 4), normal("texts", 6, 5)
CODES = torch.arange(24).view(12, 2).mul(7).remainder(4).to(torch.int8)
DLRM = {"tables": normal("tables", 4, 5, 2), "bottom": normal("bottom", 3, 2), "top": normal("top", 25) / 5}
DLRM_SPECS = {"tables": DATA, "bottom": P(), "top": P()}

PROGRAMS = [
    Program(fs.value_and_grad(clip_loss), {"data": 3}, (P(), DATA, DATA), P(), (TOWERS, *PAIRS),
            dense_grad(dense_clip_loss)),
    Program(fs.value_and_grad(sigmoid_loss_by_ring), {"data": 3}, (P(), DATA, DATA), P(),
            (TOWERS | {"bias": torch.tensor(-1.0)}, *PAIRS), dense_grad(dense_sigmoid_loss_by_ring)),
    Program(cached_contrastive_gradient, {"data": 2}, (P(), DATA, DATA), P(),
            ({"image": TOWERS["image"], "text": TOWERS["text"]}, *PAIRS), dense_cached_contrastive_gradient),
    Program(search_split_index, {"data": 3}, (P(), DATA, DATA), P(),
            (normal("queries", 2, 4), normal("index", 12, 4), torch.arange(12) % 4 != 1), dense_search_split_index),
    Program(search_quantized_index, {"data": 4}, (P(), P(), DATA), P(None, "data"),
            (normal("queries", 3, 2, 2), normal("codebook", 2, 4, 2), CODES), dense_search_quantized_index),
    Program(fs.value_and_grad(split_embedding_bag, (0, 1)), {"model": 4}, (MODEL, P(), P(), P()), (P(), (MODEL, P())),
            (normal("table", 8, 3), normal("weights", 7), torch.tensor([3, 0, 7, 2, 2, 5, 6]), torch.tensor([0, 2, 3])),
            dense_grad(dense_split_embedding_bag, (0, 1))),
    Program(fs.value_and_grad(recommendation_model), {"data": 2}, (DLRM_SPECS, DATA, DATA, DATA), (P(), DLRM_SPECS),
            (DLRM, torch.arange(16).view(4, 4) * 3 % 5, normal("x", 4, 3), torch.tensor([0.0, 1, 1, 0])),
            dense_grad(dense_recommendation_model)),
    Program(fs.value_and_grad(split_classes_margin_loss, (0, 1)), {"model": 2}, (MODEL,) * 3, (P(), (MODEL, MODEL)),
            (normal("classes", 6, 3), normal("x", 4, 3), torch.tensor([5, 0, 2, 3])),
            dense_grad(dense_split_classes_margin_loss, (0, 1))),
]  # fmt: skip
