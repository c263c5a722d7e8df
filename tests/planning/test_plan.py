"""`fs.plan` against real runs: bytes that torch's profiler measured, transfers that were recorded, FLOPs by formula."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.models import llama
from fshard.planning import Operation, Start, Wait
from fshard.planning.devices import Link
from fshard.planning.memory import PARTS
from fshard.planning.plan import plan_ranks
from tests.benchmarks import plan_405b
from tests.benchmarks.step_cost import measure_step
from tests.lib import stages
from tests.lib.assertions import error_text

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


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def gpt2_module() -> Any:
    config = hf.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=16, n_positions=8, use_cache=False,
                           bos_token_id=0, eos_token_id=0)  # fmt: skip
    return hf.AutoModelForCausalLM.from_config(config)


def resnet_module() -> Any:
    sizes = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic", "num_labels": 4}
    return hf.ResNetForImageClassification(hf.ResNetConfig(**sizes))


IN_TRAIN_MODE = {  # a module, its units, an argument, and whether it has batch norms
    "GPT-2": (gpt2_module, "transformer.h.*", fs.init.zeros((4, 8), dtype=torch.int64), False),
    "ResNet": (resnet_module, None, fs.init.normal((4, 3, 16, 16)), True),
    "LSTM": (Recurrent, None, fs.init.normal((4, 5, 8)), False),
}


@pytest.mark.parametrize("name", IN_TRAIN_MODE)
def test_module_in_train_mode_is_planned_as_it_runs_without_a_check_before(name: str) -> None:
    make, units, x, has_norms = IN_TRAIN_MODE[name]
    apply, module = fs.defer(make, units=units)
    apply = apply.draws_over("data").batch_norm_over("data") if has_norms else apply.draws_over("data")
    mesh, specs = fs.make_mesh(data=2), fs.fully_shard(P(), module["params"], axis="data")

    @fs.shard_map(mesh=mesh, in_specs=(specs, P(), P("data"), P()), out_specs=specs)
    def step(params: Any, buffers: Any, x: Tensor, key: Tensor) -> Any:
        def loss(params: Any) -> Tensor:
            forward = apply.unshard(specs, "data", release=bool(units), shapes=module["params"])
            y = forward.with_buffers(params, buffers, x, key=key)[0]
            return fs.pmean(getattr(y, "logits", y).sum(), "data")

        return fs.grad(loss)(params)

    args = (module["params"], module["buffers"], x, fs.key(0))
    plan = fs.plan(step, *args)
    assert plan.memory.peak <= fs.plan(step, *args).memory.peak  # nothing is left of the run before the check
    placed = place(args[:3], (specs, P(), P("data")), mesh)
    step(*placed, fs.key(0))
    with fs.recording() as log:
        step(*placed, fs.key(0))
    assert [t for t in log if t.rank == plan.rank] == list(plan.transfers)


def test_draws_are_planned_with_uneven_leaves_and_refused_as_in_a_run_that_is_not_checked() -> None:
    apply, module = fs.defer(lambda: torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5)))
    apply, specs = apply.draws_over("data"), fs.fully_shard(P(), module["params"], axis="data")

    def forward(params: Any, x: Tensor) -> Tensor:
        return apply(fs.unshard(params, specs, "data", shapes=module["params"]), {}, x, key=fs.key(0))

    mesh = fs.make_mesh(kind="abstract", data=2)
    step = fs.shard_map(forward, mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"))
    args = module["params"], fs.init.zeros((4, 4))
    assert fs.plan(step, *args).transfers
    with pytest.raises(fs.ShardingError, match="must be a checked one"):
        fs.plan(step.on(fs.make_mesh(kind="abstract", data=4), check="never"), *args)


@pytest.mark.slow
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


def test_line_of_a_model_follows_the_line_that_called_it() -> None:
    cfg = llama.Config(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    step = fs.shard_map(lambda p, ids: llama.loss(cfg, p, ids, ids), mesh=fs.make_mesh(data=1), in_specs=(P(), P()),
                        out_specs=P())  # fmt: skip
    plan = fs.plan(step, llama.init(cfg), torch.zeros(2, 8, dtype=torch.int64))
    assert re.search(r", at test_plan\.py:\d+ in <lambda> \(llama\.py:\d+ in \w+\)\n", str(plan))


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


# --- parts of the arguments, which no name decides ---

WIDTH = 16
Net = tuple[Any, ...]


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Net:
    return tuple(fs.init.zeros(shape, dtype=dtype) for shape in shapes)


def matrices(n: int = 2, dtype: torch.dtype = torch.float32) -> Net:
    return leaves(*[(WIDTH, WIDTH)] * n, dtype=dtype)


def loss_of(net: Net, x: Tensor) -> Tensor:
    for w in net:
        x = torch.tanh(x @ w)
    return fs.pmean(x.square().mean(), "data")


def sgd(net: Net, grads: Net) -> Net:
    return tuple(w - 0.1 * g for w, g in zip(net, grads, strict=True))


def averaged(old: Net, new: Net) -> Net:
    return tuple(0.9 * a + 0.1 * b for a, b in zip(old, new, strict=True))


def adamw(a: Net, b: Any, c: Tensor) -> Any:
    _, grads = fs.value_and_grad(loss_of)(a, c)
    return fs.optim.adamw(0.1).update(grads, b, a)


def adam_by_hand(params: Net, weights: Net, count: Tensor, opt: Net, x: Tensor) -> Any:
    """The names are wrong: params and weights are the moments, opt are the parameters."""
    grads = torch.func.grad(loss_of)(opt, x)
    m, v, t = averaged(params, grads), averaged(weights, [g * g for g in grads]), count + 1
    steps = [a / (1 - 0.9**t) / ((b / (1 - 0.9**t)).sqrt() + 1e-8) for a, b in zip(m, v, strict=True)]
    return m, v, t, sgd(opt, tuple(steps))


class TrainState(NamedTuple):
    first: Any
    second: Any


def momentum(state: TrainState, x: Tensor) -> Any:
    m = averaged(state.second, fs.grad(loss_of)(state.first, x))
    return TrainState(sgd(state.first, m), m)


def in_place(state: TrainState, x: Tensor) -> Any:
    for w, m, g in zip(*state, fs.grad(loss_of)(state.first, x), strict=True):
        m.mul_(0.9).add_(g)
        w.sub_(m, alpha=0.1)
    return state


def by_backward(net: Net, m: Net, x: Tensor) -> Any:
    local = tuple(w.detach().requires_grad_() for w in net)
    loss_of(local, x).backward()  # type: ignore[no-untyped-call]
    m = tuple(torch._foreach_add(torch._foreach_mul(list(m), 0.9), [w.grad for w in local]))  # type: ignore[misc]
    return sgd(net, m), m


def average_and_scale(net: Net, average: Net, scale: Tensor, x: Tensor) -> Any:
    grads = tuple(g / scale for g in fs.grad(lambda net: loss_of(net, x) * scale)(net))
    is_finite = torch.stack([g.isfinite().all() for g in grads]).all()
    net = tuple(torch.where(is_finite, a, w) for a, w in zip(sgd(net, grads), net, strict=True))
    return net, averaged(average, net), torch.where(is_finite, scale * 2, scale / 2)


def master_weights(half: Net, full: Net, x: Tensor) -> Any:
    full = sgd(full, [g.float() for g in fs.grad(loss_of)(half, x.bfloat16())])
    return tuple(w.bfloat16() for w in full), full


def cast_before(full: Net, x: Tensor) -> Any:
    return sgd(full, [g.float() for g in fs.grad(loss_of)(tuple(w.bfloat16() for w in full), x.bfloat16())])


def sharded(net: Net, state: Any, x: Tensor) -> Any:
    block = lambda w, h: torch.tanh(h @ w)  # noqa: E731

    def loss(net: Net, x: Tensor) -> Tensor:
        out = fs.scan(block, list(net), x, specs=[P("data")] * len(net), axis="data", remat=True, dtype=torch.bfloat16)
        return fs.pmean(out.float().square().mean(), "data")

    _, grads = fs.accumulate(loss, 2)(net, x)
    return fs.optim.adamw(0.1).update(grads, state, net)


def adapters(base: Any, ab: Any, m: Any, x: Tensor) -> Any:
    """W + A B of one layer, x W + x A B of another, whose frozen W is 8-bit; and a frozen scale."""
    w, q, scale = base

    def loss(ab: Any) -> Tensor:
        (a, b), (c, d) = ab
        h = torch.tanh(x @ (w + a @ b)) * scale
        return fs.pmean((h @ (q.float() * 0.1) + h @ c @ d).square().mean(), "data")

    m = fs.tree.map(lambda m, g: 0.9 * m + g, m, fs.grad(loss)(ab))
    return fs.tree.map(lambda w, m: w - 0.1 * m, ab, m), m


def images(state: Any) -> Any:
    """All in one tree, images too."""

    def loss(w: Tensor) -> Tensor:
        y = torch.nn.functional.conv2d((state["k"] - 0.5) / 0.2, w).mean((2, 3))
        return fs.pmean((y - state["z"]).square().mean(), "data")

    (m,) = averaged((state["a"],), (fs.grad(loss)(state["m"]),))
    return m, state["m"] - 0.1 * m


def attacked(net: Net, x: Tensor) -> Any:
    """The images and points that a loss differentiates are no parameters: their gradient is in no result."""
    x = x + 0.1 * fs.grad(lambda x: torch.tanh(x @ net[0]).sum())(x).sign()

    def loss(net: Net) -> Tensor:
        slope = torch.func.grad(lambda x: torch.tanh(x @ net[0]).sum())(x)
        return loss_of(net, x) + fs.pmean(slope.square().mean(), "data")

    return sgd(net, fs.grad(loss)(net))


def adversaries(d: Net, dm: Net, g: Net, gm: Net, x: Tensor, z: Tensor) -> Any:
    dm = averaged(dm, fs.grad(lambda d: loss_of(d, x) - loss_of(d, torch.tanh(z @ g[0])))(d))
    d = sgd(d, dm)
    gm = averaged(gm, fs.grad(lambda g: loss_of(d, torch.tanh(z @ g[0])))(g))
    return d, dm, sgd(g, gm), gm


def generate(p: Any, cache: Tensor, ids: Tensor) -> Any:
    h = torch.nn.functional.embedding(ids, p["e"])  # [B, 1, D]
    cache = torch.cat([cache[:, 1:], h @ p["k"]], 1)
    return torch.nn.functional.scaled_dot_product_attention(h, cache, cache) @ p["e"].T, cache


DATA, X = P("data"), fs.init.zeros((8, WIDTH))
STATE = fs.optim.adamw(0.1).init(matrices())
AB = (leaves((WIDTH, 2), (2, WIDTH)), leaves((WIDTH, 2), (2, WIDTH)))
MOMENTUM = TrainState(matrices(), matrices())
BASE = (*matrices(1), *matrices(1, torch.int8), *leaves((WIDTH,)))
IMAGES = dict(zip("amkz", leaves((4, 3, 3, 3), (4, 3, 3, 3), (8, 3, 9, 9), (8, 4)), strict=True))
HALF, COUNT = matrices(dtype=torch.bfloat16), fs.init.zeros(())
PARTS_OF: list[tuple[Callable[..., Any], Any, Any, tuple[int, ...]]] = [
    # a function, its arguments, their parts (a prefix of their trees), what is donated
    (adamw, (matrices(), STATE, X), "p o x", ()),
    (adamw, (matrices(), STATE, X), "p o x", (0, 1)),
    (lambda c, b, a: adamw(a, b, c), (X, STATE, matrices()), "x o p", ()),
    (adam_by_hand, (matrices(), matrices(), COUNT, matrices(), X), "o o o p x", ()),
    (momentum, (MOMENTUM, X), [TrainState("p", "o"), "x"], ()),
    (in_place, (MOMENTUM, X), [TrainState("p", "o"), "x"], (0,)),
    (by_backward, (matrices(), matrices(), X), "p o x", ()),
    (average_and_scale, (matrices(), matrices(), COUNT, X), "p o o x", ()),
    (master_weights, (HALF, matrices(), X), "p o x", ()),
    (cast_before, (matrices(), X), "p x", ()),
    (adapters, (BASE, AB, AB, X), "p p o x", ()),
    (images, (IMAGES,), [{"a": "o", "m": "p", "k": "x", "z": "x"}], ()),
    (attacked, (matrices(1), X), "p x", ()),
    (adversaries, (matrices(), matrices(), matrices(1), matrices(1), X, X), "p o p o x x", ()),
    (fs.grad(loss_of), (matrices(), X), "p x", ()),
    (loss_of, (matrices(), X), "p x", ()),  # an evaluation
    (lambda a, b: sgd(a, [loss_of(a, b) * torch.ones_like(w) for w in a]), (matrices(), X), "p x", ()),  # no gradient
    (lambda s: loss_of(s["x"], s["p"]), ({"x": matrices(), "p": X},), [{"x": "p", "p": "x"}], ()),
    (generate, ({"e": fs.init.zeros((9, WIDTH)), "k": matrices(1)[0]}, fs.init.zeros((2, 4, WIDTH)), *leaves((2, 1),
     dtype=torch.int64)), "p x x", ()),
]  # fmt: skip
WORDS = {"p": "parameters", "o": "optimizer", "x": "other"}


@pytest.mark.parametrize(("f", "args", "want", "donate"), PARTS_OF, ids=[str(i) for i in range(len(PARTS_OF))])
def test_arguments_are_told_apart_by_what_the_step_does_with_them(f: Any, args: Any, want: Any, donate: Any) -> None:
    mesh = fs.make_mesh(kind="abstract", data=1)
    step = fs.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), donate=donate)
    want = tuple(want.split()) if isinstance(want, str) else tuple(want)
    expected = fs.tree.broadcast(want, args, name="want", leaf=lambda x: isinstance(x, str))
    got = [s.part for s in fs.plan(step, *args).memory.storages if s.argument]
    assert got == [WORDS[x] for x in expected]


def test_parts_of_a_sharded_step_are_those_of_its_arguments_and_gradients() -> None:
    mesh = fs.make_mesh(kind="abstract", data=2)
    placed = (P("data"), P("data"))
    state = fs.optim.adamw(0.1).specs(placed)
    step = fs.shard_map(sharded, mesh=mesh, in_specs=(placed, state, DATA), out_specs=(placed, state))
    memory, each = fs.plan(step, matrices(), STATE, X).memory, 4 * WIDTH * WIDTH // 2
    assert [s.part for s in memory.storages if s.argument] == ["parameters"] * 2 + ["optimizer"] * 5 + ["other"]
    assert memory.parts["parameters"] == memory.parts["gradients"] == 2 * each
    assert memory.parts["optimizer"] == 4 * each + 8


def test_gradients_are_of_parameters_alone() -> None:
    """The gradient of the activations is as large as they are, and is alive at the peak."""

    def f(w: Tensor, x: Tensor) -> Tensor:
        return fs.grad(lambda w: torch.nn.functional.conv2d(x, w).mean((2, 3)).square().sum())(w)

    step = fs.shard_map(f, mesh=fs.make_mesh(kind="abstract", data=1), in_specs=P(), out_specs=P())
    memory = fs.plan(step, *leaves((8, 3, 3, 3), (8, 3, 64, 64))).memory
    assert memory.parts["gradients"] <= 8 * 27 * 4
    assert memory.parts["other"] >= 8 * 8 * 62 * 62 * 4


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


def test_events_of_a_plan_do_not_grow_with_the_ranks_beyond_sixteen() -> None:
    def events(ranks: int) -> int:
        step, args, _ = train(fs.make_mesh(kind="abstract", data=ranks), rows=ranks)
        return len(fs.plan(step, *args).events)

    few, many, most = (events(ranks) for ranks in (2, 64, 512))
    assert many <= most
    assert most < 1.5 * few


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


@pytest.mark.slow
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


# --- programs that branch on their position ---------------------------------------------------------------------


def test_each_position_is_planned_and_their_waits_are_in_the_time() -> None:
    """Of one microbatch on n stages of equal work each waits (n - 1) / n of the step, and sends at most 2 messages."""
    f, args = stages.mapped(stage=4, data=2), stages.arguments(16, 2048, 1024)
    planned = fs.plan(f, *args, device=fs.devices.H100)
    assert planned.branches_on == ("stage",)
    assert [p.rank for p in planned.positions] == [0, 1, 2, 3]
    peaks = [p.memory.peak for p in planned.positions]
    assert planned.memory.peak == max(peaks) > min(peaks)
    assert planned == dataclasses.replace(planned.positions[planned.rank], branches_on=planned.branches_on,
                                          positions=planned.positions)  # fmt: skip
    assert planned.bubble == pytest.approx(0.75, abs=0.01)
    assert len({p.time.seconds for p in planned.positions}) == 1
    for p in planned.positions:
        assert p.time.seconds == pytest.approx(p.time.compute + sum(p.time.exposed.values()))
    alone = fs.plan(stages.mapped(stage=1, data=2), *args, device=fs.devices.H100)
    assert (alone.positions, alone.branches_on, alone.bubble) == ((), (), None)
    assert sum(sum(p.flops.values()) for p in planned.positions) == sum(alone.flops.values())
    assert planned.time.seconds == pytest.approx(alone.time.seconds, rel=0.06)  # one stage after the other
    rows = [row.split("  ")[-1] for row in repr(planned).splitlines() if row.startswith("  stage=")]
    assert [row.strip(".")[0] for row in rows] == ["F"] * 4
    assert [row.index("B") for row in rows] == sorted([row.index("B") for row in rows], reverse=True)
    assert [f"stage={r}  peak" in planned._repr_html_() for r in range(4)] == [True] * 4
    run = fs.trace(f, *args, device=fs.devices.H100)
    assert [t.name for t in run.timelines] == [f"rank {r} of data=2, stage=4, H100" for r in range(4)]
    assert run.seconds == pytest.approx(planned.time.seconds)


def test_transfers_at_each_position_are_those_of_a_run() -> None:
    f, args = stages.mapped(stage=3, data=2), stages.arguments(6)
    planned = fs.plan(f, *args)
    assert planned.bubble is None
    assert "  stage=2  peak " in repr(planned)
    with fs.recording() as log:
        f.on(f.mesh, check="never")(*args)
    for p in planned.positions:
        assert p.transfers == tuple(t for t in log if t.rank == p.rank)


def test_ranks_that_wait_for_each_other_are_an_error_of_the_plan() -> None:
    def f(x: Tensor) -> Tensor:
        s = fs.axis_position("stage")
        got = stages.message(x, 1 - s, s)
        return stages.message(x, s, 1 - s) + got

    run = fs.shard_map(f, mesh=fs.make_mesh(stage=2), in_specs=(P("stage"),), out_specs=P("stage"))
    text = error_text(fs.plan, run, torch.ones(2, 3), device=fs.devices.H100)
    line = inspect.getsourcelines(stages.message)[1] + 4
    rows = [f"rank {r} (stage={r})  waits for permute over stage at stages.py:{line} in message" for r in range(2)]
    assert text.splitlines()[:3] == ["plan: the ranks wait for each other", *(f"  {row}" for row in rows)]


def test_uneven_rows_and_positions_are_planned_together() -> None:
    f, args = stages.mapped(stage=2, data=3), stages.arguments(2)
    planned = plan_ranks(f, args, None)
    assert [[p.rank for p in group.positions] for group in planned] == [[0, 1], [4, 5]]
    step, listed = stages.listed(3)
    assert [[p.rank for p in group.positions] for group in plan_ranks(step, listed, None)] == [[0, 1, 2]]


SCHEDULES = [
    (2, 4, "gpipe", 1),
    (3, 4, "1f1b", 1),
    (2, 4, "interleaved", 2),
    (3, 4, "zero_bubble", 1),
    (2, 1, "1f1b", 1),
]
MORE = [(4, 8, "gpipe", 1), (4, 8, "1f1b", 1), (4, 8, "interleaved", 2), (4, 8, "zero_bubble", 1), (4, 2, "1f1b", 1)]


@pytest.mark.parametrize(
    ("n", "m", "kind", "chunks"), SCHEDULES + [pytest.param(*x, marks=pytest.mark.slow) for x in MORE]
)
def test_the_bubble_of_a_pipeline_is_that_of_its_table(n: int, m: int, kind: Any, chunks: int) -> None:
    """Of equal layers whose products take all the time, twice as much backward as forward."""
    device = dataclasses.replace(fs.devices.H100, links=(Link("all", None, 1e15, 0.0),), bandwidth=1e18)
    specs = P(), (P(None, "stage") if chunks > 1 else P("stage"))
    f = fs.pipelined(lambda ends, x: x * ends, lambda w, h, x: torch.relu(h @ w), lambda ends, h, x: (h * ends).mean(),
                     axis="stage", microbatches=m, schedule=kind, chunks=chunks)  # fmt: skip
    step = fs.shard_map(f, mesh=fs.make_mesh(kind="abstract", stage=n), in_specs=(specs, P()), out_specs=(P(), specs))
    layers = fs.init.zeros((chunks, n, 512, 512) if chunks > 1 else (n, 512, 512))
    planned = fs.plan(step, (fs.init.zeros((512,)), layers), fs.init.zeros((64 * m, 512)), device=device)
    table = fs.schedule_table(kind, n, m, chunks)
    assert planned.bubble == pytest.approx(table.bubble(), abs=0.01)
    assert planned.memory.parts["gathered"] == 0
    assert planned.memory.parts["gradients"] >= planned.memory.parts["parameters"] - 4 * 512 > 0  # but for the ends
    pictures = [row.split("  ")[-1] for row in repr(planned).splitlines() if row.startswith("  stage=")]
    assert len(pictures) == n
    if kind == "1f1b":
        assert [p.count("F") for p in pictures] == pytest.approx([60 * (1 - table.bubble()) / 3] * n, abs=3)
