"""Layers whose weights, channels or vocabulary are split.

Legend: B batch, T positions, D width, F hidden width, V vocabulary, C channels; [F@model] is a dim split over an axis.
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


class _Copy(torch.autograd.Function):
    """Megatron's f: the identity, whose gradient is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return fs.pvary(x, "model")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return fs.psum(grad, "model")


class _Reduce(torch.autograd.Function):
    """Megatron's g: a sum, whose gradient is passed on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return fs.psum(x, "model")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def mlp_with_functions_f_and_g(p: Params, x: Tensor, target: Tensor) -> Tensor:  # x [B, D]
    """The two operators of the paper as autograd Functions (Shoeybi et al., 2019, section 3)."""
    h = F.gelu(_Copy.apply(x * p["scale"]) @ p["up"])  # [B, F@model]
    return (_Reduce.apply(h @ p["down"]) - target).square().mean()


def dense_mlp_with_functions_f_and_g(p: Params, x: Tensor, target: Tensor) -> Tensor:
    return (F.gelu((x * p["scale"]) @ p["up"]) @ p["down"] - target).square().mean()


def sequence_parallel_block(p: Params, x: Tensor, target: Tensor) -> Any:  # x [B, T@model, D]
    """Megatron's sequence parallelism: norm and residual on split positions, a gather in, a reduce-scatter out."""

    def loss(p: Params) -> Tensor:
        scale, bias = fs.pvary((p["scale"], p["bias"]), "model")
        h = fs.all_gather(F.rms_norm(x, (x.shape[-1],), scale), "model", dim=1)  # [B, T, D]
        h = F.silu(h @ p["gate"]) * (h @ p["up"])  # [B, T, F@model]
        y = x + fs.psum_scatter(h @ p["down"], "model", dim=1) + bias  # [B, T@model, D]
        return fs.pmean((y - target).square().mean(), "model")

    return torch.func.grad_and_value(loss)(p)


def dense_sequence_parallel_block(p: Params, x: Tensor, target: Tensor) -> Any:
    def loss(p: Params) -> Tensor:
        h = F.rms_norm(x, (x.shape[-1],), p["scale"])
        y = x + (F.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"] + p["bias"]
        return (y - target).square().mean()

    return torch.func.grad_and_value(loss)(p)


def vocabulary_parallel_model(p: Params, ids: Tensor, targets: Tensor) -> Tensor:  # ids [B@data, T]
    """Embedding and cross-entropy of a tied table with split rows (Shoeybi et al., 2019)."""
    table = fs.pvary(p["table"], "data")  # [V@model, D]
    start = fs.axis_index("model") * len(table)

    # 1. Look up the own rows; the others add zeros.
    own = (ids >= start) & (ids < start + len(table))
    rows = F.embedding((ids - start).where(own, 0), table)
    x = torch.tanh(fs.psum(rows * own[..., None], "model"))  # [B@data, T, D]

    # 2. Logits of the own columns, their maximum and their sum over all ranks.
    logits = fs.pvary(x, "model") @ table.T  # [B@data, T, V@model]
    top = fs.pvary(fs.pmax(logits.detach().amax(-1, keepdim=True), "model"), "model")
    total = fs.psum((logits - top).exp().sum(-1), "model")

    # 3. The logit of the target is on one rank.
    own = (targets >= start) & (targets < start + len(table))
    at_target = (logits - top).gather(-1, (targets - start).where(own, 0)[..., None])[..., 0]
    nll = total.log() - fs.psum(at_target.where(own, 0.0), "model")
    return fs.pmean(nll.mean(), "data")


def dense_vocabulary_parallel_model(p: Params, ids: Tensor, targets: Tensor) -> Tensor:
    logits = torch.tanh(F.embedding(ids, p["table"])) @ p["table"].T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def channel_parallel_convolutions(p: Params, x: Tensor, target: Tensor) -> Tensor:  # x [B@data, C, H, W]
    """Split the output channels of one convolution and the input channels of the next."""
    p = fs.pvary(p, "data")
    h = F.relu(F.conv2d(fs.pvary(x, "model"), p["first"], p["bias"], padding=1))  # [B@data, C@model, H, W]
    y = fs.psum(F.conv2d(h, p["second"], padding=1), "model")
    return fs.pmean((y - target).abs().mean(), "data")


def dense_channel_parallel_convolutions(p: Params, x: Tensor, target: Tensor) -> Tensor:
    h = F.relu(F.conv2d(x, p["first"], p["bias"], padding=1))
    return (F.conv2d(h, p["second"], padding=1) - target).abs().mean()


def three_axis_block(p: Params, x: Tensor, target: Tensor) -> Tensor:
    """Split batch, positions and heads: attention gathers the keys over `seq`, projections reduce over `model`.

    x [B@data, T@seq, D], qkv [3, D, F@model], out [F@model, D].
    """
    p = fs.pvary(p, ("data", "seq"))
    q, k, v = fs.pvary(x, "model") @ p["qkv"][:, None]  # 3 of [B@data, T@seq, F@model], one head a rank
    q, k, v = (y.unflatten(-1, (-1, 2)).transpose(1, 2) for y in (q, k, v))
    k, v = fs.all_gather((k, v), "seq", dim=2)
    out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    y = x + fs.psum(out @ p["out"], "model")
    return fs.pmean((y - target).square().mean(), ("data", "seq"))


def dense_three_axis_block(p: Params, x: Tensor, target: Tensor) -> Tensor:
    q, k, v = (y.unflatten(-1, (-1, 2)).transpose(1, 2) for y in x @ p["qkv"][:, None])
    out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return (x + out @ p["out"] - target).square().mean()


COLUMN, ROW, DATA = P(None, "model"), P("model"), P("data")
BLOCK = {"scale": normal("scale", 4), "gate": normal("gate", 4, 6), "up": normal("up", 4, 6),
         "down": normal("down", 6, 4), "bias": normal("bias", 4)}  # fmt: skip
BLOCK_SPECS = {"scale": P(), "gate": COLUMN, "up": COLUMN, "down": ROW, "bias": P()}
FUNCTIONS_SPECS = {name: BLOCK_SPECS[name] for name in ("scale", "up", "down")}
CONVOLUTIONS = {"first": normal("first", 4, 2, 3, 3), "bias": normal("bias", 4), "second": normal("second", 2, 4, 3, 3)}
CONVOLUTION_SPECS = {"first": P("model"), "bias": P("model"), "second": P(None, "model")}
IDS = torch.arange(12).view(4, 3) * 5 % 8
THREE = {"qkv": normal("qkv", 3, 4, 8, std=0.5), "out": normal("out", 8, 4, std=0.5)}
THREE_SPECS = {"qkv": P(None, None, "model"), "out": P("model")}
POSITIONS = P("data", "seq")

PROGRAMS = [
    Program(fs.value_and_grad(mlp_with_functions_f_and_g), {"model": 2},
            (FUNCTIONS_SPECS, P(), P()), (P(), FUNCTIONS_SPECS),
            ({name: BLOCK[name] for name in FUNCTIONS_SPECS}, normal("x", 4, 4), normal("y", 4, 4)),
            dense_grad(dense_mlp_with_functions_f_and_g)),
    Program(sequence_parallel_block, {"model": 2}, (BLOCK_SPECS, P(None, "model"), P(None, "model")),
            (BLOCK_SPECS, P()), (BLOCK, normal("x", 2, 4, 4), normal("y", 2, 4, 4)), dense_sequence_parallel_block),
    Program(fs.value_and_grad(vocabulary_parallel_model), {"data": 2, "model": 2}, ({"table": ROW}, DATA, DATA),
            (P(), {"table": ROW}), ({"table": normal("table", 8, 3)}, IDS, IDS.roll(-1)),
            dense_grad(dense_vocabulary_parallel_model)),
    Program(fs.value_and_grad(channel_parallel_convolutions), {"data": 2, "model": 2},
            (CONVOLUTION_SPECS, DATA, DATA), (P(), CONVOLUTION_SPECS),
            (CONVOLUTIONS, normal("x", 2, 2, 4, 4), normal("y", 2, 2, 4, 4)),
            dense_grad(dense_channel_parallel_convolutions)),
    Program(fs.value_and_grad(three_axis_block), {"data": 2, "seq": 2, "model": 2},
            (THREE_SPECS, POSITIONS, POSITIONS), (P(), THREE_SPECS),
            (THREE, normal("x", 2, 4, 4), normal("y", 2, 4, 4)), dense_grad(dense_three_axis_block)),
]  # fmt: skip
