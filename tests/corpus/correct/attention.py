"""Attention with split positions.

Legend: B batch, T positions, H heads, K width of a head, D width; [T@seq] is a dim split over an axis.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, dense_grad, normal

Params = dict[str, Tensor]

SEQ = P(None, "seq")


def heads(x: Tensor, width: int) -> Tensor:
    """[B, T, H * K] -> [B, H, T, K]."""
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    """[B, H, T, K] -> [B, T, H * K]."""
    return x.transpose(1, 2).flatten(2)


def ring(axis: str) -> list[tuple[int, int]]:
    n = fs.axis_size(axis)
    return [(i, (i + 1) % n) for i in range(n)]


def ring_attention(qkv: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:  # each [B, H, T@seq, K]
    """Blocks of keys and values travel around a ring; softmax is accumulated online (Liu et al., 2023)."""
    q, k, v = qkv
    out, total = torch.zeros_like(q), q.new_zeros(q.shape[:-1])
    top = q.new_full(q.shape[:-1], -math.inf)
    for _ in range(fs.axis_size("seq")):
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        new_top = torch.maximum(top, scores.amax(-1))
        weights, rescale = (scores - new_top[..., None]).exp(), (top - new_top).exp()
        out = out * rescale[..., None] + weights @ v
        total, top = total * rescale + weights.sum(-1), new_top
        k, v = fs.ppermute((k, v), "seq", ring("seq"))
    return fs.pmean((out / total[..., None] - target).square().mean(), "seq")


def dense_ring_attention(qkv: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    return (F.scaled_dot_product_attention(*qkv) - target).square().mean()


def dense_causal_attention(p: Params, x: Tensor, target: Tensor) -> Tensor:
    q, k, v = (heads(x @ p[name], 2) for name in "qkv")
    out = merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)) @ p["out"]
    return (out - target).square().mean()


def gathered_keys_attention(p: Params, x: Tensor, target: Tensor) -> Any:  # x [B, T@seq, D]
    """Context parallelism: every rank gathers all keys and values, and masks by global position."""
    p = fs.pvary(p, "seq")

    def loss(p: Params) -> Tensor:
        q, k, v = (heads(x @ p[name], 2) for name in "qkv")
        k, v = fs.all_gather((k, v), "seq", dim=2)
        rows = fs.axis_index("seq") * x.shape[1] + torch.arange(x.shape[1])
        mask = torch.arange(k.shape[2]) <= rows[:, None]
        out = merged(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)) @ p["out"]
        return (out - target).square().mean()

    # Each rank differentiates its own loss; the gradients are averaged as in data parallelism.
    grads, value = torch.func.grad_and_value(loss)(p)
    return fs.pmean((value, grads), "seq")


def linear_attention(qkv: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:  # each [B, H, T@seq, K]
    """Causal attention without softmax: the state k^T v of all ranks before is added to that within the rank."""
    q, k, v = qkv
    states = fs.all_gather((k.mT @ v)[None], "seq")  # [n, B, H, K, K]
    earlier = torch.arange(len(states)) < fs.axis_index("seq")
    state = (states * earlier[:, None, None, None, None]).sum(0)
    out = (q @ k.mT).tril() @ v + q @ state
    return fs.pmean((out - target).square().mean(), "seq")


def dense_linear_attention(qkv: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    q, k, v = qkv
    return ((q @ k.mT).tril() @ v - target).square().mean()


def selective_scan(p: Params, x: Tensor) -> Tensor:  # x [T@seq, D]
    """Recurrence h = a h + b x of a state space model; ranks combine (a, b) pairs in log2(n) steps (Blelloch, 1990)."""
    p = fs.pvary(p, "seq")
    n, rank = fs.axis_size("seq"), fs.axis_index("seq")
    gates, inputs = torch.sigmoid(x @ p["gate"]), x @ p["in"]
    decays = gates.cumprod(0)  # [T@seq, D], from the first position of the rank
    h, within = torch.zeros_like(inputs[0]), []
    for a, b in zip(gates, inputs, strict=True):
        h = a * h + b
        within.append(h)
    decay, state = decays[-1], h  # of the rank; then of all ranks up to it
    step = 1
    while step < n:
        pairs = [(i, i + step) for i in range(n - step)]
        before_decay, before = fs.ppermute((decay, state), "seq", pairs)
        state = torch.where(rank >= step, decay * before + state, state)
        decay = torch.where(rank >= step, decay * before_decay, decay)
        step *= 2
    initial = fs.ppermute(state, "seq", [(i, i + 1) for i in range(n - 1)])
    out = torch.stack(within) + decays * initial
    return fs.psum(out.square().sum(), "seq")


def dense_selective_scan(p: Params, x: Tensor) -> Tensor:
    h, out = torch.zeros_like(x[0]), []
    for row in x:
        h = torch.sigmoid(row @ p["gate"]) * h + row @ p["in"]
        out.append(h)
    return torch.stack(out).square().sum()


QKV = tuple(normal(f"attention {name}", 1, 2, 6, 3) for name in "qkv")
PROJECTIONS = {name: normal(f"projection {name}", 4, 8, std=0.5) for name in "qkv"} | {
    "out": normal("projection out", 8, 4, std=0.5)
}
X, Y = normal("x", 2, 4, 4), normal("y", 2, 4, 4)
THIRD = P(None, None, "seq")

PROGRAMS = [
    Program(fs.value_and_grad(ring_attention), {"seq": 3}, (THIRD, THIRD), (P(), THIRD),
            (QKV, normal("target", 1, 2, 6, 3)), dense_grad(dense_ring_attention)),
    Program(gathered_keys_attention, {"seq": 2}, (P(), SEQ, SEQ), P(), (PROJECTIONS, X, Y),
            dense_grad(dense_causal_attention)),
    Program(fs.value_and_grad(linear_attention), {"seq": 3}, (THIRD, THIRD), (P(), THIRD),
            (QKV, normal("target", 1, 2, 6, 3)), dense_grad(dense_linear_attention)),
    Program(fs.value_and_grad(selective_scan), {"seq": 4}, (P(), P("seq")), P(),
            ({"gate": normal("gate", 3, 3), "in": normal("in", 3, 3)}, normal("scan", 8, 3)),
            dense_grad(dense_selective_scan)),
]  # fmt: skip
