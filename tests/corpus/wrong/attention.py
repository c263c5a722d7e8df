"""Attention and sequence models over positions or heads that are split, with local positions, parts and tables.

Legend: B batch, T positions, D width, H heads, G heads of keys and values; [T@seq] is a dim split over an axis; {V}
varies over it, {I} does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import fshard as fs
from fshard import P, nn
from tests.corpus.wrong.program import WrongProgram, normal

Params = dict[str, Tensor]


def positions(t: int) -> Tensor:
    """Return the global positions of this rank's part of a sequence."""
    return fs.axis_index("seq") * t + torch.arange(t)


# --- keys and values that are split ---------------------------------------------------------------------------


def outputs_of_parts_averaged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # q [T, D]{I}, k and v [T@seq, D]
    part = torch.softmax(fs.pvary(q, "seq") @ k.T, -1) @ v  # BUG
    return fs.pmean(part, "seq")  # BUG: parts have different weights


def outputs_of_parts_weighted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = fs.pvary(q, "seq") @ k.T
    scores = scores - fs.pvary(fs.pmax(scores.amax(-1, keepdim=True), "seq"), "seq")
    out, total = fs.psum((scores.exp() @ v, scores.exp().sum(-1, keepdim=True)), "seq")
    return out / total


def state_of_linear_attention_of_the_part(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # all [T@seq, D]
    q, k = torch.relu(q), torch.relu(k)
    state, total = k.T @ v, k.sum(0)
    return q @ state / (q @ total + 1e-3).unsqueeze(-1)  # BUG


def state_of_linear_attention_of_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = torch.relu(q), torch.relu(k)
    state, total = fs.pvary(fs.psum((k.T @ v, k.sum(0)), "seq"), "seq")
    return q @ state / (q @ total + 1e-3).unsqueeze(-1)


def cache_written_by_every_rank(cache: Tensor, k: Tensor, q: Tensor) -> Tensor:  # cache [T@seq, D], k and q [D]
    """Decode position 2 of a cache whose positions are split."""
    here = torch.arange(len(cache)) == 2 % len(cache)  # BUG: each rank takes the position for its own
    cache = torch.where(here.unsqueeze(1), fs.pvary(k, "seq"), cache)
    return fs.psum((cache @ fs.pvary(q, "seq")).exp().sum(), "seq")


def cache_written_by_its_rank(cache: Tensor, k: Tensor, q: Tensor) -> Tensor:
    here = positions(len(cache)) == 2
    cache = torch.where(here.unsqueeze(1), fs.pvary(k, "seq"), cache)
    return fs.psum((cache @ fs.pvary(q, "seq")).exp().sum(), "seq")


# --- masks and biases by position -----------------------------------------------------------------------------


def window_of_local_positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [1, 1, T@seq, D]
    k, v = fs.all_gather((k, v), "seq", 2)
    distance = torch.arange(q.shape[2]).unsqueeze(1) - torch.arange(k.shape[2])  # BUG
    return nn.attention(q, k, v, mask=(distance >= 0) & (distance < 3))


def window_of_global_positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = fs.all_gather((k, v), "seq", 2)
    distance = positions(q.shape[2]).unsqueeze(1) - torch.arange(k.shape[2])
    return nn.attention(q, k, v, mask=(distance >= 0) & (distance < 3))


def relative_bias_without_pvary(table: Tensor, q: Tensor, k: Tensor) -> Any:  # table [2T], q and k [T@seq, D]
    def loss(table: Tensor) -> Tensor:
        keys = fs.all_gather(k, "seq")
        distance = positions(len(q)).unsqueeze(1) - torch.arange(len(keys)) + len(keys)
        scores = q @ keys.T + table[distance]  # BUG
        return fs.pmean(torch.logsumexp(scores, -1).mean(), "seq")

    return fs.value_and_grad(loss)(table)


def relative_bias(table: Tensor, q: Tensor, k: Tensor) -> Any:
    def loss(table: Tensor) -> Tensor:
        keys = fs.all_gather(k, "seq")
        distance = positions(len(q)).unsqueeze(1) - torch.arange(len(keys)) + len(keys)
        scores = q @ keys.T + fs.pvary(table, "seq")[distance]
        return fs.pmean(torch.logsumexp(scores, -1).mean(), "seq")

    return fs.value_and_grad(loss)(table)


def _alibi(q: Tensor, heads: Tensor) -> Tensor:  # q [H@model, T, D]
    slopes = 2.0 ** -(heads + 1.0)
    distance = torch.arange(q.shape[1]).unsqueeze(1) - torch.arange(q.shape[1])
    return torch.softmax(q @ q.mT - slopes.view(-1, 1, 1) * distance.abs(), -1) @ q


def slopes_of_local_heads(q: Tensor) -> Tensor:
    return _alibi(q, torch.arange(len(q)))  # BUG: every rank has the slopes of the first heads


def slopes_of_global_heads(q: Tensor) -> Tensor:
    return _alibi(q, fs.axis_index("model") * len(q) + torch.arange(len(q)))


# --- heads and widths that are split --------------------------------------------------------------------------


def scaled_by_local_width(q: Tensor, k: Tensor) -> Tensor:  # [T, D@model]
    scores = fs.psum(q @ k.T, "model")
    return torch.softmax(scores / q.shape[-1] ** 0.5, -1)  # BUG


def scaled_by_width(q: Tensor, k: Tensor) -> Tensor:
    scores = fs.psum(q @ k.T, "model")
    return torch.softmax(scores / (q.shape[-1] * fs.axis_size("model")) ** 0.5, -1)


def first_group_on_every_rank(q: Tensor, k: Tensor) -> Tensor:  # q [H@model, T, D], k [G, T, D]{I}, H = 2G
    groups = fs.pvary(k, "model")[: len(q) // 2]  # BUG
    return q @ groups.repeat_interleave(2, 0).mT


def own_group_on_every_rank(q: Tensor, k: Tensor) -> Tensor:
    groups = fs.pslice(k, "model")
    return q @ groups.repeat_interleave(2, 0).mT


def error_of_each_ranks_heads(p: Params, x: Tensor) -> Any:  # v [H@model, D, D], out [H@model, D, D]
    def loss(p: Params) -> Tensor:
        h = torch.tanh(torch.einsum("td,hde->hte", fs.pvary(x, "model"), p["v"]))
        y = torch.einsum("hte,hed->td", h, p["out"])
        return fs.pmean((y - fs.pvary(x, "model")).square().mean(), "model")  # BUG: of each rank's heads alone

    return fs.value_and_grad(loss)(p)


def error_of_all_heads(p: Params, x: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        h = torch.tanh(torch.einsum("td,hde->hte", fs.pvary(x, "model"), p["v"]))
        y = fs.psum(torch.einsum("hte,hed->td", h, p["out"]), "model")
        return (y - x).square().mean()

    return fs.value_and_grad(loss)(p)


# --- pooling over positions -----------------------------------------------------------------------------------


def last_local_position(x: Tensor, w: Tensor) -> Tensor:  # x [B, T@seq, D], w [D]
    last = x[:, -1]  # BUG
    return fs.pmean(last @ fs.pvary(w, "seq"), "seq")


def last_position(x: Tensor, w: Tensor) -> Tensor:
    is_last = fs.axis_index("seq") == fs.axis_size("seq") - 1
    last = fs.psum(torch.where(is_last, x[:, -1], 0), "seq")
    return last @ w


def pooled_by_local_lengths(x: Tensor, mask: Tensor) -> Tensor:  # x [B, T@seq, D], mask [B, T@seq]
    sums = (x * mask.unsqueeze(-1)).sum(1)
    return fs.pmean(sums / mask.sum(1, keepdim=True).clamp(min=1), "seq")  # BUG


def pooled_by_lengths(x: Tensor, mask: Tensor) -> Tensor:
    sums, lengths = fs.psum(((x * mask.unsqueeze(-1)).sum(1), mask.sum(1, keepdim=True)), "seq")
    return sums / lengths.clamp(min=1)


# --- states that pass from part to part -----------------------------------------------------------------------


def recurrence_restarted(x: Tensor, w: Tensor) -> Tensor:  # x [T@seq, D], w [D, D]
    w, state, out = fs.pvary(w, "seq"), torch.zeros(x.shape[1]), []
    for row in x:
        state = torch.tanh(row + state @ w)  # BUG
        out.append(state)
    return torch.stack(out)


def recurrence(x: Tensor, w: Tensor) -> Tensor:
    w, n, me = fs.pvary(w, "seq"), fs.axis_size("seq"), fs.axis_index("seq")
    first = torch.zeros(x.shape[1])
    for rank in range(n):
        state, out = first, []
        for row in x:
            state = torch.tanh(row + state @ w)
            out.append(state)
        first = torch.where(me == rank + 1, fs.ppermute(state, "seq", [(i, i + 1) for i in range(n - 1)]), first)
    return torch.stack(out)


def convolution_without_the_past(x: Tensor, w: Tensor) -> Tensor:  # x [D, T@seq], w [D, 1, 3]: causal, each channel
    padded = functional.pad(x, (2, 0))  # BUG
    return functional.conv1d(padded, fs.pvary(w, "seq"), groups=len(x))


def convolution_with_the_past(x: Tensor, w: Tensor) -> Tensor:
    n = fs.axis_size("seq")
    past = fs.ppermute(x[:, -2:], "seq", [(i, i + 1) for i in range(n - 1)])
    return functional.conv1d(torch.cat([past, x], 1), fs.pvary(w, "seq"), groups=len(x))


def masked_words_of_local_shape(x: Tensor) -> Tensor:  # [B, T@seq, D]
    """Hide the same positions of every part."""
    keep = fs.random.bernoulli(fs.key(4), x.shape[:2], p=0.7).unsqueeze(-1)
    return torch.where(keep, x, 0)  # BUG


def masked_words_of_global_shape(x: Tensor) -> Tensor:
    keep = fs.random.bernoulli(fs.key(4), (2, 8), p=0.7, spec=P(None, "seq")).unsqueeze(-1)
    return torch.where(keep, x, 0)


T, D = 8, 4
SEQ2, MODEL2 = {"seq": 2}, {"model": 2}
SEQ, MODEL = P("seq"), P("model")
Q, K, V = (normal(name, T, D) for name in "qkv")
HEADS = normal("heads", 4, 3, D)
BATCH = normal("batch", 2, T, D)
LENGTHS = (torch.arange(T) < torch.tensor([[8], [5]])).float()

PROGRAMS = [
    WrongProgram(
        outputs_of_parts_averaged, outputs_of_parts_weighted, SEQ2, (P(), SEQ, SEQ), P(), (Q, K, V), "verify", "seq"
    ),
    WrongProgram(
        state_of_linear_attention_of_the_part, state_of_linear_attention_of_all, SEQ2, (SEQ,) * 3, SEQ, (Q, K, V),
        "verify", "seq",
    ),
    WrongProgram(
        cache_written_by_every_rank, cache_written_by_its_rank, SEQ2, (SEQ, P(), P()), P(), (K, Q[0], Q[1]), "verify",
        "seq",
    ),
    WrongProgram(
        window_of_local_positions, window_of_global_positions, SEQ2, (P(None, None, "seq"),) * 3, P(None, None, "seq"),
        (Q[None, None], K[None, None], V[None, None]), "verify", "seq",
    ),
    WrongProgram(
        relative_bias_without_pvary, relative_bias, SEQ2, (P(), SEQ, SEQ), P(), (normal("bias", 2 * T), Q, K), "types",
        "seq",
    ),
    WrongProgram(slopes_of_local_heads, slopes_of_global_heads, MODEL2, (MODEL,), MODEL, (HEADS,), "verify", "model"),
    WrongProgram(
        scaled_by_local_width, scaled_by_width, MODEL2, (P(None, "model"),) * 2, P(), (Q, K), "verify", "model"
    ),
    WrongProgram(
        first_group_on_every_rank, own_group_on_every_rank, MODEL2, (MODEL, P()), MODEL, (HEADS, normal("groups", 2, 3,
        D)), "verify", "model",
    ),
    WrongProgram(
        error_of_each_ranks_heads, error_of_all_heads, MODEL2, (MODEL, P()), (P(), MODEL), ({"v": normal("v", 2,
        D, D), "out": normal("out", 2, D, D)}, Q), "verify", "model",
    ),
    WrongProgram(
        last_local_position, last_position, SEQ2, (P(None, "seq"), P()), P(), (BATCH, normal("w", D)), "verify", "seq"
    ),
    WrongProgram(
        pooled_by_local_lengths, pooled_by_lengths, SEQ2, (P(None, "seq"),) * 2, P(), (BATCH, LENGTHS), "verify", "seq"
    ),
    WrongProgram(recurrence_restarted, recurrence, SEQ2, (SEQ, P()), SEQ, (Q, normal("w", D, D)), "verify", "seq"),
    WrongProgram(
        convolution_without_the_past, convolution_with_the_past, SEQ2, (P(None, "seq"), P()), P(None, "seq"),
        (Q.T.contiguous(), normal("kernel", D, 1, 3)), "verify", "seq",
    ),
    WrongProgram(
        masked_words_of_local_shape, masked_words_of_global_shape, SEQ2, (P(None, "seq"),), P(None, "seq"), (BATCH,),
        "types", "seq",
    ),
]  # fmt: skip
