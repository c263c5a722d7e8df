"""Adapters beside FSDP2 with peft: `python -m tests.benchmarks.lora [--only NAME ...] [--repeats 9]`.

T5, GPT-2 and Llama train LoRA of rank 8 on their attention, beside a frozen and sharded base, in two processes over
gloo: the module of peft through `fully_shard` of each block and then of the model; the same through
`fs.defer(units=)`; and the model of fshard with `fs.lora`. Same values, batches and fused AdamW. README.md in this
folder describes the report.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fshard as fs
from fshard import P, lora
from fshard.models import gpt2, llama, t5
from tests.lib.adapters import described_model, like_described

from . import units
from .units import LOSSES, Built, Model, fsdp2_step, report, run, units_step

LIMITS = {"time": 0.9, "live": 0.9}


def _adapted(constructor: Callable[[], nn.Module], targets: list[str]) -> nn.Module:
    return peft.get_peft_model(constructor(), peft.LoraConfig(r=8, lora_alpha=32, target_modules=targets))  # type: ignore[arg-type]


OURS: dict[str, Any] = {"t5": t5, "gpt2": gpt2, "llama": llama}
TARGETS = {"t5": ["q", "v"], "gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}
MODELS: dict[str, Model] = {
    name: replace(units.MODELS[name], constructor=functools.partial(_adapted, units.MODELS[name].constructor, targets))
    for name, targets in TARGETS.items()
}


def ours_step(name: str) -> Built:
    """A step of the model of fshard, whose blocks are gathered by `scan`, and of adapters split as their base."""
    ranks, model, hf_model = dist.get_world_size(), OURS[name], MODELS[name]
    mesh = fs.make_mesh(kind="process", data=ranks)
    torch.manual_seed(0)
    adapted = hf_model.constructor()
    torch.manual_seed(0)  # the base draws first in both
    with described_model(model, units.MODELS[name].constructor()) as (cfg, base):
        specs = fs.fully_shard(model.specs(cfg), base, axis="data")
        frozen = fs.materialize(base, specs, mesh, key=fs.key(0))
    config, layout = lora.Config(TARGETS[name], rank=8, alpha=32), model.Layout("data")
    described = lora.init(config, base, of=model.theirs)
    values = like_described(described, base, model.theirs, dict(adapted.named_parameters()))
    own = fs.fully_shard(lora.specs(config, base, specs, of=model.theirs), described, axis="data")
    optimizer = fs.optim.adamw(units.LR, weight_decay=0.0)
    placed = {"adapters": own, "opt": optimizer.specs(own)}

    @fs.shard_map(mesh=mesh, in_specs=(placed, specs, P("data")), out_specs=(placed, P()), donate=0)
    def train(state: Any, base: Any, ids: Tensor) -> Any:
        def loss_fn(adapters: Any) -> Tensor:
            params = lora.apply(config, base, adapters, of=model.theirs, specs=specs, adapter_specs=own, data="data")
            inputs, targets = (ids, ids) if name == "t5" else (ids[:, :-1], ids[:, 1:])
            return model.loss(cfg, params, inputs, targets, layout=layout, specs=specs)

        loss, grads = fs.value_and_grad(loss_fn)(state["adapters"])
        adapters, opt = optimizer.update(grads, state["opt"], state["adapters"])
        return {"adapters": adapters, "opt": opt}, loss

    state = fs.device_put({"adapters": values, "opt": optimizer.init(values)}, placed, mesh)
    data = [fs.device_put(ids, P("data"), mesh) for ids in units.batches(hf_model, ranks)]
    del adapted, values

    def step(i: int) -> Tensor:
        nonlocal state
        state, loss = train(state, frozen, data[i % units.BATCHES])
        return loss.shards[0]

    nbytes = lambda placed: sum(x.shards[0].nbytes for x in fs.tree.leaves(placed))  # noqa: E731
    return step, 3 * nbytes(state["adapters"]) + nbytes(frozen)


def main(argv: list[str] | None = None) -> int:
    def found(name: str, repeats: int, measures: list[str]) -> dict[str, Any]:
        steps = {"fsdp2": fsdp2_step, "units": units_step}
        builders = {one: functools.partial(step, MODELS[name]) for one, step in steps.items()}
        return report(name, {**builders, "ours": functools.partial(ours_step, name)}, LIMITS, repeats, measures)

    return run(argv, __doc__, found, dict.fromkeys(MODELS, LOSSES["float32"]))


if __name__ == "__main__":
    sys.exit(main())
