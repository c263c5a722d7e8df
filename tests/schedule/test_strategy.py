"""Strategies of torch's FSDP: one curve of losses, their transfers, memory, specs, and what keeps gathered weights."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import P
from fshard.models import gpt2
from tests.lib.assertions import assert_same, error_text

CFG = gpt2.Config(vocab_size=31, n_positions=8, n_embd=12, n_layer=3, n_head=2)
ROWS, STEPS = 8, 3
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]


def batch(i: int) -> Tensor:
    return torch.randint(CFG.vocab_size, (ROWS, 9), generator=torch.Generator().manual_seed(i))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(31, 12), nn.Linear(12, 31)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def gpt2_loss(s: fs.Strategy, **how: Any) -> Any:
    """Return (described tree, a function of param specs that makes a loss (params, ids)) of the model by `scan`."""
    layout = gpt2.Layout(s.axis, **s.options)

    def make(specs: Any) -> Any:
        return lambda p, ids: gpt2.loss(CFG, p, ids[:, :-1], ids[:, 1:], layout=layout, specs=specs, **how)

    return gpt2.init(CFG), make


def stack_loss(s: fs.Strategy, units: Any) -> Any:
    """The same for a module by `units`."""
    apply, described = fs.defer(Stack, units=units)

    def make(specs: Any) -> Any:
        f = apply.unshard(specs, s.axis, **s.options)
        return lambda p, ids: fs.nn.cross_entropy(f(p, {}, ids[:, :-1]), ids[:, 1:], over=s.axis)

    return described["params"], make


def train(s: fs.Strategy, mesh: fs.Mesh, model: Any, check: str = "never") -> tuple[list[float], Any]:
    """Return the losses of some steps of AdamW, and the trained parameters."""
    described, make = model
    specs = s.param_specs(described)
    opt = fs.optim.adamw(1e-2)
    placed = {"params": specs, "opt": s.state_specs(opt, specs)}
    loss_fn = make(specs)

    @fs.shard_map(mesh=mesh, in_specs=(placed, P(s.axis)), out_specs=(placed, P()), donate=0, check=check)
    def step(state: Any, ids: Tensor) -> Any:
        loss, grads = fs.value_and_grad(loss_fn)(state["params"], ids)
        params, new = opt.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": new}, loss

    state = fs.materialize({"params": described, "opt": opt.init(described)}, placed, mesh, key=fs.key(0))
    losses = []
    for i in range(STEPS):
        state, loss = step(state, batch(i))
        losses.append(float(loss))
    return losses, fs.device_get(state["params"])


MODELS = {
    "blocks of scan": gpt2_loss,
    "wrap by class": lambda s: stack_loss(s, "Block"),
    "wrap by size": lambda s: stack_loss(s, 200),
    "wrap none": lambda s: stack_loss(s, None),
}


@pytest.mark.parametrize("model", MODELS)
def test_strategies_offload_and_wrap_policies_have_one_curve_of_losses(model: str) -> None:
    build = MODELS[model]
    one = fs.strategy("NO_SHARD")
    want, _ = train(one, fs.make_mesh(data=1), build(one))  # a single device
    assert len(set(want)) == STEPS
    two, four = fs.make_mesh(data=2), fs.make_mesh(replica=2, shard=2)
    exact: dict[Any, Any] = {}
    for name in STRATEGIES:
        mesh = four if "HYBRID" in name else two
        optimizer = [{"offload_optimizer": True}] * (name == "FULL_SHARD")
        for offload in ({}, {"offload_params": True}, *optimizer):
            s = fs.strategy(name, **offload)
            got = train(s, mesh, build(s))
            torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(want), rtol=1e-6, atol=0)
            assert_same(got, exact.setdefault(mesh, got), f"{name} {offload}")
