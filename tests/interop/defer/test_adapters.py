"""Adapters beside a frozen base: the numbers of peft, and the memory of two units."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import P
from tests.lib.operations import Operations

os.environ["HF_HUB_OFFLINE"] = "1"
hf = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # peft uses a name that transformers will remove

WIDE = {"vocab_size": 640, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
        "decoder_start_token_id": 0, "pad_token_id": 0, "use_cache": False}  # fmt: skip
RANKS = 4
IDS = torch.arange(3, 3 + 4 * 3).view(4, 3)
OPTIMIZER = fs.optim.adamw(1e-2, weight_decay=0.0)


def t5_with_lora() -> nn.Module:
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q", "v"], init_lora_weights=False)
    return peft.get_peft_model(hf.T5ForConditionalGeneration(hf.T5Config(**WIDE)), config)


Parts = tuple[Any, Any]  # what trains and what is frozen


def measured(specs: Parts, described: Parts, loss: Callable[[Any, Any, Tensor], Tensor], steps: int = 1) -> Any:
    """Return the losses of some steps on all ranks, and the most bytes that one allocates in a step."""
    mesh, peaks = fs.make_mesh(data=RANKS), {}
    placed = {"params": specs[0], "opt": OPTIMIZER.specs(specs[0])}

    def step(state: Any, frozen: Any, ids: Tensor) -> Any:
        with Operations() as seen:
            value, grads = fs.value_and_grad(lambda p: loss(p, frozen, ids))(state["params"])
            params, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
        peaks[int(fs.axis_index("data"))] = seen.peak
        return {"params": params, "opt": opt}, value

    run = fs.shard_map(step, mesh=mesh, in_specs=(placed, specs[1], P("data")), out_specs=(placed, P()), check="never")
    state = fs.materialize({"params": described[0], "opt": OPTIMIZER.init(described[0])}, placed, mesh, key=fs.key(0))
    frozen = fs.materialize(described[1], specs[1], mesh, key=fs.key(0))
    losses = []
    for _ in range(steps):
        state, value = run(state, frozen, IDS)
        losses.append(float(fs.device_get(value)))
    return losses, max(peaks.values())


def by_units(constructor: Callable[[], nn.Module], units: Any, **how: Any) -> Any:
    """Return the arguments of `measured` for a module whose parameters that require no gradient are frozen."""
    apply, tree = fs.defer(constructor, units=units, reference=0)
    specs = fs.fully_shard(P(), tree["params"], axis="data")
    f = apply.unshard(specs, "data", **how)
    split = lambda named: tuple({k: x for k, x in named.items() if (k in apply.frozen) == frozen}  # noqa: E731
                                for frozen in (False, True))  # fmt: skip
    assert not tree["buffers"]
    loss = lambda p, frozen, ids: fs.pmean(f({**p, **frozen}, {}, input_ids=ids, labels=ids).loss, "data")  # noqa: E731
    return split(specs), split(tree["params"]), loss


def saved_bytes(module: nn.Module, ids: Tensor) -> int:
    """Return the bytes that autograd saves for the backward pass of a module on one device, without its weights."""
    weights = {x.untyped_storage().data_ptr() for x in module.parameters()}
    alive: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            alive[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        module(input_ids=ids, labels=ids)
    return sum(x.untyped_storage().nbytes() for x in alive.values())


def limit(module: nn.Module) -> int:
    """Return the bytes of two units, their shards packed to be sent, 16 for each trained parameter, and activations."""
    sizes = {name: sum(x.nbytes for x in m.parameters()) for name, m in module.named_modules()
             if type(m).__name__ in ("T5Block", "Embedding")}  # fmt: skip
    unit = max(sizes.values())
    trained = sum(x.numel() for x in module.parameters() if x.requires_grad)
    own = IDS[:1]
    logits = 4 * own.numel() * WIDE["vocab_size"]
    # The gradient of the logits exists beside what was saved for it.
    return 2 * unit + 2 * unit // RANKS + 16 * trained // RANKS + saved_bytes(module, own) + 2 * logits


UNITS = ("T5Block", "**.shared", "**.embed_tokens", "**.lm_head")


def test_memory_of_a_frozen_base_and_adapters_is_two_units_and_the_activations() -> None:
    most = limit(t5_with_lora())
    assert measured(*by_units(t5_with_lora, UNITS))[1] <= most
    # The tied embedding whole throughout, as in the root of FSDP; and all units.
    assert measured(*by_units(t5_with_lora, "T5Block"))[1] > most
    assert measured(*by_units(t5_with_lora, UNITS, release=False))[1] > most
