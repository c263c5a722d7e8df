"""Memory that kernels allocate is in the peak of a plan, by rules that real kernels follow; else the plan warns."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import P
from fshard.planning.devices import H100
from fshard.planning.workspace import saved_by_lstm, workspace_of
from tests.benchmarks import below_torch

aten = torch.ops.aten
ONE = fs.make_mesh(kind="abstract", data=1)


def gradient_plan(make: Callable[[], nn.Module], x: Any, device: Any = None) -> Any:
    """Plan the gradients of the mean of a module's first result."""
    apply, module = fs.defer(make)

    def loss(params: Any, x: Tensor) -> Tensor:
        out = apply(params, {}, x)
        return (out if isinstance(out, Tensor) else out[0]).square().mean()

    return fs.plan(
        fs.shard_map(fs.grad(loss), mesh=ONE, in_specs=P(), out_specs=P()), module["params"], x, device=device
    )


def operations(plan: Any) -> list[Any]:
    return [e for e in plan.events if isinstance(e, fs.planning.Operation)]


def lstm_arguments(t: int, n: int, width: int, hidden: int) -> tuple[Any, ...]:
    w, state = nn.LSTM(width, hidden), torch.zeros(n, hidden)
    return (torch.zeros(t, n, width), w.weight_ih_l0, w.weight_hh_l0, w.bias_ih_l0, w.bias_hh_l0, state, state, False,
            [], 2, hidden, 1, True, False, False, True)  # fmt: skip


@pytest.mark.parametrize("sizes", [(2, 3, 8, 16), (50, 8, 128, 256), (10, 1, 512, 64), (33, 3, 20, 20)])
def test_an_lstm_on_a_cpu_saves_what_the_kernel_does(sizes: tuple[int, int, int, int]) -> None:
    args = lstm_arguments(*sizes)
    assert saved_by_lstm(args) == aten.mkldnn_rnn_layer(*args)[3].numel()
    with torch.no_grad():
        assert saved_by_lstm(args) == 0
        assert aten.mkldnn_rnn_layer(*args)[3] is None
        assert workspace_of(aten.mkldnn_rnn_layer.default, args, None, False) is None  # a plan warns


def test_what_an_lstm_saves_is_activations_of_its_plan() -> None:
    plan = gradient_plan(lambda: nn.LSTM(16, 32), fs.init.zeros((5, 2, 16)))
    saved = saved_by_lstm(lstm_arguments(5, 2, 16, 32))
    assert plan.memory.parts["activations"] >= saved
    assert max(e.workspace for e in operations(plan)) > 0
    assert plan.warnings == ()


def test_a_convolution_allocates_copies_of_its_arguments_for_the_time_of_a_call() -> None:
    if torch.backends.cpu.get_cpu_capability() not in ("AVX512", "AVX2"):
        pytest.skip("the rule is of vectors of x86")
    plan = gradient_plan(lambda: nn.Conv2d(64, 64, 3, padding=1, bias=False), fs.init.zeros((4, 64, 8, 8)))
    size, weights = 4 * 4 * 64 * 8 * 8, 4 * 64 * 64 * 9
    found = {e.name: e for e in operations(plan)}
    assert found["aten.convolution"].workspace == size + weights  # of the source and the weights
    backward = found["aten.convolution_backward"]
    assert backward.workspace == max(2 * size, weights)
    m = plan.memory
    assert m.peak == backward.live == sum(m.parts.values())
    assert [s.nbytes for s in m.storages if s.name == "workspace of convolution_backward"] == [backward.workspace]
    after = plan.events[plan.events.index(backward) + 1 :]
    assert all(e.live <= m.peak - backward.workspace for e in after)


@pytest.mark.parametrize(("module", "shape"), [
    (lambda: nn.Conv1d(32, 32, 4, groups=2), (2, 32, 16)),
    (lambda: nn.Conv2d(4, 4, 3, dtype=torch.bfloat16), (2, 4, 8, 8)),
])  # fmt: skip
def test_convolutions_without_a_rule_are_named(module: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    plan = gradient_plan(module, fs.init.zeros(shape, dtype=module().weight.dtype))
    names = ("aten.convolution", "aten.convolution_backward")
    assert plan.warnings == tuple(f"workspace unknown: {name}, 1 call" for name in names)


@pytest.mark.parametrize(("layer", "options"), [
    (nn.LSTM, {"num_layers": 2, "bidirectional": True}), (nn.GRU, {"batch_first": True}), (nn.RNN, {"bias": False}),
])  # fmt: skip
def test_a_gpu_runs_recurrent_layers_by_its_kernels(layer: Any, options: dict[str, Any]) -> None:
    x = fs.init.zeros((6, 2, 8))
    cpu, gpu = (gradient_plan(lambda: layer(8, 16, **options), x, device) for device in (None, H100))
    assert [e.name for e in operations(gpu) if "rnn" in e.name] == ["aten._cudnn_rnn", "aten._cudnn_rnn_backward"]
    assert not any("mkldnn" in e.name or "cpu" in e.name for e in operations(gpu))
    assert gpu.warnings[:2] == tuple(f"workspace unknown: aten._cudnn_rnn{end}, 1 call" for end in ("", "_backward"))
    assert gpu.flops.keys() == cpu.flops.keys()
    if layer is nn.LSTM:
        assert gpu.flops == cpu.flops


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_results_of_recurrent_layers_have_the_same_shapes_for_a_gpu() -> None:
    def shapes(device: Any) -> list[Any]:
        found: list[Any] = []

        def f(x: Tensor) -> Tensor:
            for layer in (nn.LSTM(8, 16, proj_size=4, bidirectional=True), nn.GRU(8, 16, 2, batch_first=True)):
                out, state = layer(x)
                found.append([y.shape for y in (out, *(state if isinstance(state, tuple) else [state]))])
            return x

        fs.plan(fs.shard_map(f, mesh=ONE, in_specs=P(), out_specs=P()), fs.init.zeros((6, 2, 8)), device=device)
        return found

    assert shapes(H100) == shapes(None)


def test_attention_of_a_gpu_has_its_name() -> None:
    def f(q: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, q, q)

    f = fs.shard_map(f, mesh=ONE, in_specs=P(), out_specs=P())
    names = [[e.name for e in operations(fs.plan(f, fs.init.zeros((2, 4, 8, 16)), device=d))] for d in (None, H100)]
    assert names == [["aten._scaled_dot_product_flash_attention_for_cpu"], ["aten._scaled_dot_product_flash_attention"]]


def test_a_gradient_is_added_to_another_in_place() -> None:
    """As torch does without a mode, to a gradient that it has for itself."""

    def sums(f: Callable[..., Tensor], *shapes: tuple[int, ...]) -> list[str]:
        f = fs.shard_map(fs.grad(f), mesh=ONE, in_specs=P(), out_specs=P())
        plan = fs.plan(f, [fs.init.zeros(shape) for shape in shapes])
        return [e.name for e in operations(plan) if e.name.startswith("aten.add") and e.phase == "backward"]

    assert sums(lambda xs: (xs[0] * 2).sum() + (xs[0] * 3).sum() + (xs[0] * 4).sum(), (8,)) == ["aten.add_"] * 2
    assert sums(lambda xs: (xs[0] * 3).sum() + ((xs[0] + xs[1]) * 2).sum(), (8,), (8,)) == ["aten.add"]  # two have it
    assert sums(lambda xs: (xs[0] * 3).sum() + xs[0].sum(), (8,)) == ["aten.add"]


_MEASURE = """
import json
import sys

import torch
from torch import nn

from fshard.planning.workspace import workspace_of
from tests.benchmarks import below_torch
from torch.utils._python_dispatch import TorchDispatchMode


class Compare(TorchDispatchMode):
    rows = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        before = below_torch.reset_peak()
        out = op(*args, **(kwargs or {}))
        peak = below_torch.peak() - before
        new = below_torch.reset_peak() - before
        rule = workspace_of(op, args, out, False)
        if rule or rule is None:
            self.rows.append((str(op), rule, peak - new))
        return out


below_torch.begin()
x = torch.zeros(4, 64, 32, 32, requires_grad=True)
steps = [
    lambda m=nn.LSTM(128, 256, 2): m(torch.zeros(50, 8, 128, requires_grad=True))[0].square().sum().backward(),
    *(lambda m=m: m(x).square().sum().backward() for m in (
        nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 40, 3, padding=1), nn.ConvTranspose2d(64, 32, 2, stride=2),
        nn.Conv2d(64, 128, 1), nn.Conv2d(64, 64, 3, groups=64), nn.Conv2d(64, 64, 5, dilation=2),
        nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.Conv2d(64, 64, 1, stride=2),
        nn.Conv2d(64, 64, 7, stride=3, groups=64),
    )),
    *(lambda m=m: m(x.detach().to(memory_format=torch.channels_last)).square().sum().backward() for m in (
        nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 64, 7, padding=3, groups=64),
    )),
    lambda m=nn.Conv2d(3, 32, 3, padding=1): m(torch.zeros(8, 3, 64, 64)).square().sum().backward(),
    lambda m=nn.Conv1d(64, 128, 2): m(torch.zeros(4, 64, 1024, requires_grad=True)).square().sum().backward(),
]
for step in steps:
    step()
    Compare.rows = []
    with Compare():
        step()
    print(json.dumps(Compare.rows))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_rules_of_workspaces_are_what_the_kernels_allocate(tmp_path: Path) -> None:
    """Within 2% and the 128 KiB that oneDNN's primitives and MKL's packed blocks take, measured below torch."""
    below_torch.build(tmp_path / "counting.so")
    env = {**os.environ, "LD_PRELOAD": str(tmp_path / "counting.so"), "OMP_NUM_THREADS": "1"}
    out = subprocess.run([sys.executable, "-c", _MEASURE], env=env, capture_output=True, text=True, check=True).stdout
    rows = [row for line in out.splitlines() for row in json.loads(line)]
    assert len(rows) == 28
    for op, rule, measured in rows:
        assert rule is not None, op
        assert abs(rule - measured) <= 2**17 + 0.02 * measured, (op, rule, measured)
