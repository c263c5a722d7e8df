"""`fs.plan` against real runs: bytes that torch's profiler measured, transfers that were recorded, FLOPs by formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.models import llama
from fshard.planning import Operation, Start, Wait
from fshard.planning.memory import PARTS
from tests.benchmarks import plan_405b
from tests.benchmarks.step_cost import measure_step

CFG = llama.Config(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                   num_key_value_heads=2, max_position_embeddings=16)  # fmt: skip
T = 16


def train(
    mesh: fs.Mesh, cfg: Any = CFG, length: int = T, *, sharded: bool = True, host: bool = False, remat: bool = False,
    steps: int = 1, donate: Any = 0, rows: int = 8, **layout: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """A train step of a Llama, its described arguments, and their specs."""
    data, model = (a if mesh.axes.get(a, 0) > 1 else None for a in ("data", "model"))
    how, described = llama.Layout(data, model, **layout), llama.init(cfg)
    specs = llama.specs(cfg, model=model)
    if sharded and data:
        specs = fs.fully_shard(specs, described, axis="data")
    specs = fs.on_host(specs) if host else specs
    opt = fs.optim.adamw(1e-3)
    placed = {"params": specs, "opt": opt.specs(specs)}

    @fs.shard_map(mesh=mesh, in_specs=(placed, P(data), P(data)), out_specs=(placed, P()), donate=donate)
    def step(state: Any, x: Tensor, y: Tensor) -> Any:
        def loss_fn(params: Any, x: Tensor, y: Tensor) -> Tensor:
            return llama.loss(cfg, params, x, y, layout=how, specs=specs, remat=remat)

        loss, grads = fs.accumulate(loss_fn, steps)(state["params"], x, y)
        params, opt_state = opt.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt_state}, loss

    ids = fs.init.zeros((rows, length), dtype=torch.int64)
    return step, ({"params": described, "opt": opt.init(described)}, ids, ids), (placed, P(data), P(data))


def place(args: Any, specs: Any, mesh: fs.Mesh) -> Any:
    return tuple(fs.materialize(a, s, mesh, key=fs.key(0)) for a, s in zip(args, specs, strict=True))


def test_peak_is_that_of_the_allocator_to_the_byte() -> None:
    mesh = fs.make_mesh(data=1)
    step, args, specs = train(mesh, rows=2, remat=True, steps=2)
    sizes = [0]

    def setup() -> Callable[[], object]:
        state, *batch = place(args, specs, mesh)
        sizes[0] = sum(x.shards[0].nbytes for x in fs.tree.leaves((state, batch)))

        def run() -> object:
            nonlocal state
            state, loss = step(state, *batch)
            return loss

        return run

    plan, cost = fs.plan(step, *args), measure_step(setup, warmup=1)
    assert plan.memory.arguments == sizes[0]
    assert plan.memory.peak == cost.peak - (cost.start - sizes[0])  # without the loss of the step before


def test_transfers_are_those_recorded_in_a_real_run() -> None:
    mesh = fs.make_mesh(data=2, model=2)
    step, args, specs = train(mesh, remat=True, rows=4, sequence=True)
    state, *batch = place(args, specs, mesh)
    unchecked = step.on(mesh, check="never")
    state, _ = unchecked(state, *batch)
    with fs.recording() as log:
        unchecked(state, *batch)
    plan = fs.plan(step, *args)
    assert [t for t in log if t.rank == plan.rank] == list(plan.transfers)
    assert plan.transfers == tuple(e.transfer for e in plan.events if isinstance(e, Start))
    assert {e.number for e in plan.events if isinstance(e, Start)} == {
        e.number for e in plan.events if isinstance(e, Wait)
    }
    # The schedule overlaps: some transfer is waited for after operations that follow its start.
    started = {e.number: i for i, e in enumerate(plan.events) if isinstance(e, Start)}
    assert any(i > started[e.number] + 20 for i, e in enumerate(plan.events) if isinstance(e, Wait))


def test_flops_are_those_of_the_formula_at_the_widths_of_405b() -> None:
    mesh = fs.make_mesh(kind="abstract", data=2048, model=8)
    cfg, length = plan_405b.config(layers=1), 8192
    step, args, _ = train(mesh, cfg, length, remat=True, sequence=True, rows=2 * 2048, dtype=torch.bfloat16)
    plan = fs.plan(step, *args, device=fs.devices.H100)
    total = plan_405b.formula(cfg, 2 * 2048 * length, length)
    assert plan.flops == {(kind, torch.bfloat16): flops // mesh.size for kind, flops in total.items()}
    phases = [e.phase for e in plan.events if isinstance(e, Operation)]
    assert list(dict.fromkeys(phases)) == ["forward", "backward", "recompute", "update"]
    assert plan.time is not None
    assert plan.time.seconds > 0


def test_parts_say_what_the_peak_is() -> None:
    mesh = fs.make_mesh(kind="abstract", data=4)
    step, args, _ = train(mesh)
    plan = fs.plan(step, *args)
    m = plan.memory
    described = fs.tree.leaves(args[0]["params"])
    params = sum(x.numel() for x in described) * 4 // 4  # float32, a quarter
    assert set(m.parts) == set(PARTS)
    assert sum(m.parts.values()) == m.peak
    assert m.parts["parameters"] == params
    assert m.parts["optimizer"] == 2 * params + 8  # two moments, and the count
    assert m.parts["activations"] > 0
    assert m.host == 0
    block = sum(x.numel() for x in fs.tree.leaves(args[0]["params"]["h"][0])) * 4
    assert plan.events[0].live >= m.arguments + 2 * block  # the buffers of gathered blocks are kept from call to call
    assert m.parts["gathered"] >= 2 * block
    assert [row[0] for row in m.largest] == sorted((row[0] for row in m.largest), reverse=True)
    assert m.where is not None


def test_buffers_of_transfers_are_those_of_real_groups() -> None:
    mesh, x, h100 = fs.make_mesh(kind="abstract", data=4), fs.init.zeros((256, 64)), fs.devices.H100
    kib = 1024

    def peak(f: Callable[[Tensor], Tensor], out: P, device: Any = None) -> float:
        step = fs.shard_map(f, mesh=mesh, in_specs=(P("data"),), out_specs=out)
        plan = fs.plan(step, x, device=device)
        assert sum(plan.memory.parts.values()) == plan.memory.peak
        return plan.memory.peak / kib

    gather = lambda dim: lambda x: fs.all_gather(x, "data", dim=dim, to="invariant")  # noqa: E731
    assert peak(gather(0), P()) == 16 + 64  # a part, and the whole, whose rows are received in place
    assert peak(gather(1), P()) == 16 + 64 + 48  # columns of three other ranks are received apart
    assert peak(gather(0), P(), h100) == 16 + 64 + 16 + 64  # a copy that is sent, and all that is received
    assert peak(lambda x: fs.psum(x, "data"), P()) == 16 + 3 * 16  # up to 16 KiB every rank sends all to all others
    assert peak(lambda x: fs.psum(x.repeat(4, 1), "data"), P()) == 16 + 64 + 64  # in two rounds, in the result
    assert peak(lambda x: fs.psum(x, "data"), P(), h100) == 16 + 16
    summed = fs.shard_map(lambda x: fs.psum(x, "data"), mesh=mesh, in_specs=(P("data"),), out_specs=P())
    assert fs.plan(summed, x).memory.parts["buffers"] == 2 * 16 * kib  # the third becomes the result


def test_results_of_work_during_a_transfer_are_no_buffers_of_it() -> None:
    """The gradient of a column-split matrix is computed while that of its input is summed."""
    layout = llama.Layout(model="model")

    def gradients(w: Tensor, x: Tensor) -> Any:
        loss = lambda w, x: fs.psum(layout.column_linear(x, 1, w).sum(), "model")  # noqa: E731
        return fs.grad(loss, argnums=(0, 1))(w, x)

    column = P(None, "model")
    step = fs.shard_map(gradients, mesh=fs.make_mesh(kind="abstract", model=2), in_specs=(column, P()),
                        out_specs=(column, P()))  # fmt: skip
    parts = fs.plan(step, fs.init.zeros((64, 1024)), fs.init.zeros((2, 1, 64))).memory.parts
    assert parts["buffers"] < 64 * 512 * 4 <= parts["gradients"]


def test_host_memory_is_counted_apart_on_an_accelerator() -> None:
    mesh = fs.make_mesh(kind="abstract", data=4)
    step, args, _ = train(mesh, host=True)
    m = fs.plan(step, *args, device=fs.devices.H100).memory
    params = sum(x.numel() for x in fs.tree.leaves(args[0]["params"])) * 4 // 4
    assert m.host >= 4 * params  # parameters, two moments and gradients
    assert m.parts["optimizer"] == 8  # the count
    assert m.parts["parameters"] == 0


def test_donated_arguments_are_overwritten_and_others_copied() -> None:
    mesh, opt, leaf = fs.make_mesh(kind="abstract", data=2), fs.optim.sgd(0.1), fs.init.zeros((64, 8))
    state = {"w": leaf}, opt.init({"w": leaf})
    for donate, copies in ((0, 0), ((), 1)):
        step = fs.shard_map(lambda p, s, g: opt.update(g, s, p)[0], mesh=mesh, in_specs=(P("data"), P(), P("data")),
                            out_specs=P("data"), donate=donate)  # fmt: skip
        m = fs.plan(step, *state, {"w": leaf}).memory
        assert 1024 * (2 + copies) <= m.peak < 1024 * (2 + copies) + 100
    step, args, _ = train(mesh, donate=(), rows=2, sharded=False)
    assert fs.plan(step, *args).memory.parts["gathered"] == 0  # new parameters are no gathered ones


def test_the_rank_with_the_most_is_planned() -> None:
    mesh = fs.make_mesh(kind="abstract", data=4)
    plan = fs.plan(fs.shard_map(lambda x: x * 2, mesh=mesh, in_specs=(P("data"),), out_specs=P("data")),
                   fs.init.zeros((5, 8)))  # fmt: skip
    assert (plan.rank, plan.memory.arguments, plan.memory.peak) == (0, 64, 128)


def test_errors_are_those_of_the_step() -> None:
    mesh = fs.make_mesh(kind="abstract", data=2)
    step = fs.shard_map(lambda x: x if float(x.sum()) > 0 else -x, mesh=mesh, in_specs=(P("data"),),
                        out_specs=P("data"))  # fmt: skip
    with pytest.raises(fs.ShardingError, match="value"):
        fs.plan(step, fs.init.zeros((4, 2)))
    with pytest.raises(fs.ShardingError, match="2 arguments were passed"):
        fs.plan(step, fs.init.zeros((4, 2)), fs.init.zeros((4, 2)))


def test_a_plan_exchanges_no_texts(capsys: pytest.CaptureFixture[str]) -> None:
    def f(x: Tensor) -> Tensor:
        fs.print("rows", x.shape[0])
        return fs.psum(x, "data")

    step = fs.shard_map(f, mesh=fs.make_mesh(kind="abstract", data=2), in_specs=(P("data"),), out_specs=P())
    events = fs.plan(step, fs.init.zeros((4, 2))).events
    assert [type(e) for e in events if not isinstance(e, Operation)] == [Start, Wait]
    assert capsys.readouterr().out == ""
