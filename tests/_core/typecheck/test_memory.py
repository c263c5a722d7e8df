"""Memory of a checked call: at its peak that of a call without check, and none of it after the call."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, UntypedStorage

import fshard as fs
from fshard import P
from fshard._core.typecheck.types import TensorInfo
from fshard.models import gpt2, llama


@contextmanager
def without_collection() -> Iterator[None]:
    """Free only objects that nothing refers to, not cycles."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def infos() -> int:
    return sum(type(x) is TensorInfo for x in gc.get_objects())


def test_checker_forgets_freed_tensors() -> None:
    known = []
    gc.freeze()  # `infos` visits what this test makes, not the million objects of the tests before

    @fs.shard_map(mesh=fs.make_mesh(data=2), in_specs=(P("data"),), out_specs=P("data"))
    def f(x: Tensor) -> Tensor:
        before = infos()
        for i in range(1000):
            kept[i % 100] = x.sin().mul_(2.0)  # 1000 tensors and storages, 100 at a time
        known.append(infos() - before)
        kept.clear()
        return x

    kept: dict[int, Tensor] = {}
    f(torch.ones(4))
    assert max(known) <= 3 * 256 + 100  # each of three tables removes the freed ones when it has 256 or has doubled


def train_step(
    model: Any, width: int = 16, tokens: int = 32, *, layers: int = 4, **options: Any
) -> tuple[Any, Any, Any, Tensor]:
    """Return a fully sharded AdamW step with remat, its parameters, its state and a batch."""
    if model is llama:
        cfg: Any = llama.Config(
            vocab_size=64,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
        )
    else:
        cfg = gpt2.Config(vocab_size=64, n_positions=tokens, n_embd=width, n_layer=layers, n_head=4)
    mesh, opt, described = fs.make_mesh(data=2, model=2), fs.optim.adamw(1e-3), model.init(cfg)
    specs = fs.fully_shard(model.specs(cfg, model="model"), described, axis="data")
    state_specs, layout = opt.specs(specs), model.Layout("data", "model", True)

    @fs.shard_map(mesh=mesh, in_specs=(specs, state_specs, P("data")), out_specs=(specs, state_specs, P()), **options)
    def step(p: Any, s: Any, ids: Tensor) -> Any:
        loss = lambda p: model.loss(cfg, p, ids, ids, layout=layout, specs=specs, remat=True)  # noqa: E731
        value, grads = fs.value_and_grad(loss)(p)
        return *opt.update(grads, s, p), value

    params = fs.materialize(described, specs, mesh, key=fs.key(0))
    state = fs.materialize(opt.init(described), state_specs, mesh, key=fs.key(0))
    return step, params, state, torch.arange(4 * tokens).view(4, tokens) % 64


def storages(tree: Any) -> list[weakref.ref[UntypedStorage]]:
    return [weakref.ref(t.untyped_storage()) for x in fs.tree.leaves(tree) for t in x.shards]


def test_nothing_refers_to_the_results_of_a_checked_call() -> None:
    step, params, state, ids = train_step(llama, layers=1)
    with without_collection():
        results = step(params, state, ids)
        kept = storages(results)
        del results
        assert [s() for s in kept if s() is not None] == []


_RESIDENT = """
import torch
import tests._core.typecheck.test_memory as t

def read(key):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(key))

step, params, state, ids = t.train_step(t.llama, 512, 128, donate=(0, 1), check="{check}")
start, peaks = read("VmRSS"), []
for _ in range(4):
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    params, state, loss = step(params, state, ids)
    peaks.append(read("VmHWM") - start)
print(*peaks)
"""


def resident_peaks(check: str) -> list[int]:
    """Return the resident peak of each of four calls in a fresh process, above the memory before the first one."""
    program = _RESIDENT.format(check=check)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return [int(n) for n in ran.stdout.split()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_peak_of_a_checked_call_is_that_of_later_calls_without_check() -> None:
    """Compare with a process that never checks: small blocks that a checker keeps split the heap for good."""
    checked, unchecked = resident_peaks("first"), resident_peaks("never")
    assert checked[0] <= 1.2 * max(unchecked[1:])
