"""Attention with split heads or split positions.

Legend: B batch, T positions, H heads, G heads of keys and values, K width of a head, D width; [T@seq] is a dim split
over an axis.
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

SEQ, HEADS = P(None, "seq"), P(None, "model")


def heads(x: Tensor, width: int) -> Tensor:
    """[B, T, H * K] -> [B, H, T, K]."""
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    """[B, H, T, K] -> [B, T, H * K]."""
    return x.transpose(1, 2).flatten(2)


def ring(axis: str) -> list[tuple[int, int]]:
    n = fs.axis_size(axis)
    return [(i, (i + 1) % n) for i in range(n)]


# --- split positions ------------------------------------------------------------------------------------------


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


class _RingAttention(torch.autograd.Function):
    """Ring attention with its own backward pass, in which gradients of keys and values travel with them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks, logs, outs = (k, v), [], []
        for _ in range(fs.axis_size("seq")):
            scores = q @ blocks[0].mT
            logs.append(scores.logsumexp(-1, keepdim=True))
            outs.append(scores.softmax(-1) @ blocks[1])
            blocks = fs.ppermute(blocks, "seq", ring("seq"))
        log_total = torch.stack(logs).logsumexp(0)
        out = sum((log - log_total).exp() * part for log, part in zip(logs, outs, strict=True))
        ctx.save_for_backward(q, k, v, out, log_total)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, log_total = ctx.saved_tensors
        delta = (grad * out).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for _ in range(fs.axis_size("seq")):
            weights = (q @ k.mT - log_total).exp()
            d_scores = weights * (grad @ v.mT - delta)
            dq, dk, dv = dq + d_scores @ k, dk + d_scores.mT @ q, dv + weights.mT @ grad
            k, v, dk, dv = fs.ppermute((k, v, dk, dv), "seq", ring("seq"))  # after n steps they are at home
        return dq, dk, dv


def ulysses_attention(p: Params, x: Tensor, target: Tensor) -> Tensor:  # x [B, T@seq, D]
    """Heads are split during attention and positions elsewhere (Jacobs et al., 2023)."""
    p = fs.pvary(p, "seq")
    qkv = torch.stack([heads(x @ p[name], 2) for name in "qkv"])  # [3, B, H, T@seq, K]
    q, k, v = fs.all_to_all(qkv, "seq", split=2, concat=3)  # [B, H@seq, T, K]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    out = merged(fs.all_to_all(out, "seq", split=2, concat=1)) @ p["out"]
    return fs.pmean((out - target).square().mean(), "seq")


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


# --- split heads ----------------------------------------------------------------------------------------------


def grouped_query_attention(p: Params, x: Tensor, target: Tensor) -> Tensor:
    """Fewer heads of keys and values (2) than ranks (4): each rank picks those that its queries use.

    x [B, T, D], q [D, H * K@model], kv [2, D, G, K], out [H * K@model, D] (Ainslie et al., 2023).
    """
    x, kv = fs.pvary((x, p["kv"]), "model")
    q = heads(x @ p["q"], 2)  # [B, H@model, T, K]
    own = fs.axis_index("model") * q.shape[1] + torch.arange(q.shape[1])
    group = own // (4 // kv.shape[2])
    k, v = torch.einsum("btd,sdgk->sbgtk", x, kv.index_select(2, group))
    out = F.scaled_dot_product_attention(q, k, v)
    return (fs.psum(merged(out) @ p["out"], "model") - target).square().mean()


def dense_grouped_query_attention(p: Params, x: Tensor, target: Tensor) -> Tensor:
    k, v = torch.einsum("btd,sdgk->sbgtk", x, p["kv"])
    out = F.scaled_dot_product_attention(heads(x @ p["q"], 2), k, v, enable_gqa=True)
    return (merged(out) @ p["out"] - target).square().mean()


QKV = tuple(normal(f"attention {name}", 1, 2, 6, 3) for name in "qkv")
PROJECTIONS = {name: normal(f"projection {name}", 4, 8, std=0.5) for name in "qkv"} | {
    "out": normal("projection out", 8, 4, std=0.5)
}
X, Y = normal("x", 2, 4, 4), normal("y", 2, 4, 4)
GROUPED = {"q": PROJECTIONS["q"], "kv": normal("kv", 2, 4, 2, 2), "out": PROJECTIONS["out"]}
GROUPED_SPECS = {"q": HEADS, "kv": P(), "out": P("model")}
THIRD = P(None, None, "seq")

PROGRAMS = [
    Program(fs.value_and_grad(ring_attention), {"seq": 3}, (THIRD, THIRD), (P(), THIRD),
            (QKV, normal("target", 1, 2, 6, 3)), dense_grad(dense_ring_attention)),
    Program(fs.value_and_grad(ulysses_attention), {"seq": 2}, (P(), SEQ, SEQ), P(), (PROJECTIONS, X, Y),
            dense_grad(dense_causal_attention)),
    Program(gathered_keys_attention, {"seq": 2}, (P(), SEQ, SEQ), P(), (PROJECTIONS, X, Y),
            dense_grad(dense_causal_attention)),
    Program(fs.value_and_grad(linear_attention), {"seq": 3}, (THIRD, THIRD), (P(), THIRD),
            (QKV, normal("target", 1, 2, 6, 3)), dense_grad(dense_linear_attention)),
    Program(fs.value_and_grad(selective_scan), {"seq": 4}, (P(), P("seq")), P(),
            ({"gate": normal("gate", 3, 3), "in": normal("in", 3, 3)}, normal("scan", 8, 3)),
            dense_grad(dense_selective_scan)),
    Program(fs.value_and_grad(grouped_query_attention), {"model": 4}, (GROUPED_SPECS, P(), P()),
            (P(), GROUPED_SPECS), (GROUPED, X, Y), dense_grad(dense_grouped_query_attention)),
]  # fmt: skip
