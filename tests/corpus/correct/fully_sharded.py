"""Data parallelism with split parameters, gradients and optimizer states, by hand.

Legend: B batch, D width, F hidden width, W workers, S steps; [B@data] is a dim split over an axis.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, normal

Params = dict[str, Tensor]


def mlp_loss(p: Params, x: Tensor, y: Tensor) -> Tensor:
    return (torch.tanh(x @ p["up"] + p["bias"]) @ p["down"] - y).square().mean()


def torch_optimizer_on_parts(p: Params, x: Tensor, y: Tensor) -> Params:
    """torch.optim.AdamW over split weights and a replicated bias together, on gathered weights that are recomputed."""
    leaves = {name: w.detach().requires_grad_() for name, w in p.items()}
    optimizer = torch.optim.AdamW(leaves.values(), lr=0.1, foreach=True)

    def forward(up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
        whole = {"up": fs.all_gather(up, "data"), "bias": fs.pvary(bias, "data"), "down": fs.all_gather(down, "data")}
        return fs.pmean(mlp_loss(whole, x, y), "data")

    for _ in range(2):
        optimizer.zero_grad()
        checkpoint(forward, *(leaves[name] for name in ("up", "bias", "down")), use_reentrant=False).backward()
        optimizer.step()
    return {name: w.detach() for name, w in leaves.items()}


def dense_torch_optimizer_on_parts(p: Params, x: Tensor, y: Tensor) -> Params:
    """The formula of AdamW (Loshchilov and Hutter, 2017)."""
    first = second = {name: torch.zeros_like(w) for name, w in p.items()}
    for step in (1, 2):
        grads = torch.func.grad(mlp_loss)(p, x, y)
        first = {name: 0.9 * m + 0.1 * grads[name] for name, m in first.items()}
        second = {name: 0.999 * v + 0.001 * grads[name].square() for name, v in second.items()}
        p = {
            name: w * (1 - 0.1 * 0.01)
            - 0.1 * first[name] / (1 - 0.9**step) / ((second[name] / (1 - 0.999**step)).sqrt() + 1e-8)
            for name, w in p.items()
        }
    return p


DATA = P("data")
MLP = {"up": normal("up", 4, 6), "bias": normal("bias", 6), "down": normal("down", 6, 4)}
X, Y = normal("x", 8, 4), normal("y", 8, 4)
PARTS_SPECS = {"up": P("data"), "bias": P(), "down": P("data")}

PROGRAMS = [
    Program(torch_optimizer_on_parts, {"data": 2}, (PARTS_SPECS, DATA, DATA), PARTS_SPECS, (MLP, X, Y),
            dense_torch_optimizer_on_parts),
]  # fmt: skip
