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


def positions(t: int) -> Tensor:
    """Return the global positions of this rank's part of a sequence."""
    return fs.axis_index("seq") * t + torch.arange(t)


# --- masks and biases by position -----------------------------------------------------------------------------


def window_of_global_positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [1, 1, T@seq, D]
    k, v = fs.all_gather((k, v), "seq", 2)
    distance = positions(q.shape[2]).unsqueeze(1) - torch.arange(k.shape[2])
    # WRONG: distance = torch.arange(q.shape[2]).unsqueeze(1) - torch.arange(k.shape[2])
    return nn.attention(q, k, v, mask=(distance >= 0) & (distance < 3))


def relative_bias(table: Tensor, q: Tensor, k: Tensor) -> Any:  # table [2T], q and k [T@seq, D]
    def loss(table: Tensor) -> Tensor:
        keys = fs.all_gather(k, "seq")
        distance = positions(len(q)).unsqueeze(1) - torch.arange(len(keys)) + len(keys)
        scores = q @ keys.T + fs.pvary(table, "seq")[distance]
        # WRONG: scores = q @ keys.T + table[distance]
        return fs.pmean(torch.logsumexp(scores, -1).mean(), "seq")

    return fs.value_and_grad(loss)(table)


def _alibi(q: Tensor, heads: Tensor) -> Tensor:  # q [H@model, T, D]
    slopes = 2.0 ** -(heads + 1.0)
    distance = torch.arange(q.shape[1]).unsqueeze(1) - torch.arange(q.shape[1])
    return torch.softmax(q @ q.mT - slopes.view(-1, 1, 1) * distance.abs(), -1) @ q


def slopes_of_global_heads(q: Tensor) -> Tensor:
    return _alibi(q, fs.axis_index("model") * len(q) + torch.arange(len(q)))
    # WRONG: return _alibi(q, torch.arange(len(q)))  # every rank has the slopes of the first heads


# --- states that pass from part to part -----------------------------------------------------------------------


def recurrence(x: Tensor, w: Tensor) -> Tensor:  # x [T@seq, D], w [D, D]
    w, n, me = fs.pvary(w, "seq"), fs.axis_size("seq"), fs.axis_index("seq")
    first = torch.zeros(x.shape[1])
    for rank in range(n):
        state, out = first, []
        for row in x:
            state = torch.tanh(row + state @ w)
            out.append(state)
        first = torch.where(me == rank + 1, fs.ppermute(state, "seq", [(i, i + 1) for i in range(n - 1)]), first)
        # WRONG (8 lines): w, state, out = fs.pvary(w, "seq"), torch.zeros(x.shape[1]), []
        # WRONG: for row in x:
        # WRONG:     state = torch.tanh(row + state @ w)  # BUG
        # WRONG:     out.append(state)
    return torch.stack(out)


def convolution_with_the_past(x: Tensor, w: Tensor) -> Tensor:  # x [D, T@seq], w [D, 1, 3]: causal, each channel
    n = fs.axis_size("seq")
    past = fs.ppermute(x[:, -2:], "seq", [(i, i + 1) for i in range(n - 1)])
    return functional.conv1d(torch.cat([past, x], 1), fs.pvary(w, "seq"), groups=len(x))
    # WRONG (3 lines): padded = functional.pad(x, (2, 0))  # BUG
    # WRONG: return functional.conv1d(padded, fs.pvary(w, "seq"), groups=len(x))


T, D = 8, 4
SEQ2, MODEL2 = {"seq": 2}, {"model": 2}
SEQ, MODEL = P("seq"), P("model")
Q, K, V = (normal(name, T, D) for name in "qkv")
HEADS = normal("heads", 4, 3, D)

PROGRAMS = [
    WrongProgram(
        "window_of_local_positions", window_of_global_positions, SEQ2, (P(None, None, "seq"),) * 3,
        P(None, None, "seq"), (Q[None, None], K[None, None], V[None, None]), "verify", "seq",
    ),
    WrongProgram(
        "relative_bias_without_pvary", relative_bias, SEQ2, (P(), SEQ, SEQ), P(), (normal("bias", 2 * T), Q, K),
        "types", "seq",
    ),
    WrongProgram("slopes_of_local_heads", slopes_of_global_heads, MODEL2, (MODEL,), MODEL, (HEADS,), "verify", "model"),
    WrongProgram("recurrence_restarted", recurrence, SEQ2, (SEQ, P()), SEQ, (Q, normal("w", D, D)), "verify", "seq"),
    WrongProgram(
        "convolution_without_the_past", convolution_with_the_past, SEQ2, (P(None, "seq"), P()), P(None, "seq"),
        (Q.T.contiguous(), normal("kernel", D, 1, 3)), "verify", "seq",
    ),
]  # fmt: skip
