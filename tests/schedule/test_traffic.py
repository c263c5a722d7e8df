"""Transfers of a train step: each strategy has the fewest transfers and bytes that it needs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import fshard as fs
from fshard import P
from fshard.models import gpt2, llama
from tests.lib.tiers import slow_unless

CFG = gpt2.Config(vocab_size=96, n_positions=8, n_embd=32, n_layer=3, n_head=4)
ROWS, N = 4, 2
SIZE = 4  # bytes of a float32


def transfers_of_a_step(
    axes: dict[str, int], specs: Any, layout: gpt2.Layout, remat: bool = False
) -> dict[str, tuple[int, int]]:
    """Return {op: (transfers, bytes of their arguments)} of each rank in one step with AdamW."""
    mesh, described = fs.make_mesh(**axes), gpt2.init(CFG)
    optimizer = fs.optim.adamw(1e-3)
    placed = {"params": specs, "opt": optimizer.specs(specs)}

    @fs.shard_map(mesh=mesh, in_specs=(placed, P(layout.data)), out_specs=(placed, P()), donate=0, check="never")
    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Tensor:
            return gpt2.loss(CFG, params, *batch, layout=layout, specs=specs, remat=remat)

        loss, grads = fs.value_and_grad(loss_fn)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, loss

    ids = torch.randint(96, (ROWS, 9), generator=torch.Generator().manual_seed(0))
    batch = (ids[:, :-1], ids[:, 1:])
    tree = {"params": described, "opt": optimizer.init(described)}
    state = fs.materialize(tree, placed, mesh, key=fs.key(0))
    with fs.recording() as log:
        step(state, batch)
    count, total = Counter(t.op for t in log), Counter[str]()
    for t in log:
        total[t.op] += t.bytes
    assert all(n % mesh.size == 0 for n in (*count.values(), *total.values()))
    return {op: (count[op] // mesh.size, total[op] // mesh.size) for op in count}


DESCRIBED = gpt2.init(CFG)
BLOCK = sum(x.numel() for x in fs.tree.leaves(DESCRIBED["h"][0])) * SIZE
TOP = sum(x.numel() for name in ("wte", "wpe", "ln_f") for x in fs.tree.leaves(DESCRIBED[name])) * SIZE
LOSS = 2 * SIZE  # the sum of the losses, and their number


def test_data_parallel_reduces_each_gradient_once() -> None:
    got = transfers_of_a_step({"data": N}, gpt2.specs(CFG), gpt2.Layout("data"))
    assert got == {"all_reduce": (CFG.n_layer + 2, CFG.n_layer * BLOCK + TOP + LOSS)}


@pytest.mark.parametrize("remat", [False, True])
def test_fully_sharded_gathers_released_blocks_twice_and_scatters_once(remat: bool) -> None:
    specs = fs.fully_shard(gpt2.specs(CFG), DESCRIBED, axis="data")
    got = transfers_of_a_step({"data": N}, specs, gpt2.Layout("data"), remat)
    gathers = 2 * CFG.n_layer - 2  # two blocks are gathered at a time, and still are when backward starts
    assert got == {
        "all_gather": (gathers + 1, (gathers * BLOCK + TOP) // N),
        "reduce_scatter": (CFG.n_layer + 1, CFG.n_layer * BLOCK + TOP),
        "all_reduce": (1, LOSS),
    }


def test_tensor_parallel_reduces_twice_per_block_and_direction_and_for_embedding_head_and_loss() -> None:
    got = transfers_of_a_step({"model": N}, gpt2.specs(CFG, model="model"), gpt2.Layout(model="model"))
    tokens = ROWS * CFG.n_positions
    stream = tokens * CFG.n_embd * SIZE  # bytes of x, in each of these sums
    assert got == {
        "all_reduce": (4 * CFG.n_layer + 3, (4 * CFG.n_layer + 2) * stream + 2 * tokens * SIZE),  # exp and target
        "all_reduce max": (1, tokens * SIZE),
    }


def test_mesh_of_one_rank_has_no_transfers() -> None:
    assert (
        transfers_of_a_step({"data": 1, "model": 1}, gpt2.specs(CFG, model="model"), gpt2.Layout("data", "model")) == {}
    )


def test_tensor_parallel_and_fully_sharded_together_have_the_transfers_of_each() -> None:
    specs = fs.fully_shard(gpt2.specs(CFG, model="model"), DESCRIBED, axis="data")
    got = transfers_of_a_step({"data": N, "model": N}, specs, gpt2.Layout("data", "model"))
    gathers = 2 * CFG.n_layer - 2
    assert got["all_gather"][0] == gathers + 1
    assert got["reduce_scatter"][0] == CFG.n_layer + 1
    assert got["all_reduce"][0] == 4 * CFG.n_layer + 3 + 1


REMAT = [(gpt2, {"model": N}, False), (llama, {"data": N, "model": N}, True)]


@pytest.mark.parametrize(("model", "axes", "sequence"), slow_unless(REMAT[1:], REMAT))
def test_remat_repeats_the_products_of_a_block_but_the_last(model: Any, axes: dict[str, int], sequence: bool) -> None:
    """Count products: backward needs the arguments of the last one, but not its result."""
    t, d, hidden, layers = CFG.n_positions, CFG.n_embd, 4 * CFG.n_embd, 2
    cfg = replace(CFG, n_layer=layers)
    if model is llama:
        cfg = llama.Config(vocab_size=96, hidden_size=d, intermediate_size=hidden, num_hidden_layers=layers,
                           num_attention_heads=4, num_key_value_heads=4)  # fmt: skip
    mesh, described, layout = fs.make_mesh(**axes), model.init(cfg), gpt2.Layout("data" if "data" in axes else None,
                                                                                "model", sequence)  # fmt: skip
    specs = model.specs(cfg, model="model")
    products: list[int] = []  # floating-point operations of each rank

    def f(params: Any, ids: Tensor, remat: bool) -> Any:
        def loss_fn(p: Any) -> Tensor:
            return model.loss(cfg, fs.pvary(p, layout.data), ids, ids, layout=layout, remat=remat)

        with FlopCounterMode(display=False) as counter:
            out = fs.value_and_grad(loss_fn)(params)
        counts = counter.get_flop_counts()["Global"]
        products.append(counts[torch.ops.aten.mm] + counts.get(torch.ops.aten.addmm, 0))  # those with weights
        return out

    params = fs.materialize(described, specs, mesh, key=fs.key(0))
    ids = torch.randint(96, (ROWS, t), generator=torch.Generator().manual_seed(0))
    got = []
    for remat in (False, True):
        g = fs.shard_map(lambda p, ids, r=remat: f(p, ids, r), mesh=mesh, in_specs=(specs, P(layout.data)),
                         out_specs=(P(), specs), check="never")  # fmt: skip
        got.append(fs.tree.leaves(fs.device_get(g(params, ids))))
    for a, b in zip(*got, strict=True):
        assert torch.equal(a, b)
    outputs = 4 * d + (2 if model is llama else 1) * hidden  # of all products of a block but the last, from d inputs
    repeated = layers * 2 * ROWS * t * d * outputs
    assert sum(products[mesh.size :]) - sum(products[: mesh.size]) == repeated
