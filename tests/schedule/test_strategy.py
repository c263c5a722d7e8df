"""Strategies of torch's FSDP: one curve of losses, their transfers, memory, specs, and what keeps gathered weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import P
from fshard.defer.units import choose_units
from fshard.models import gpt2
from tests.lib.assertions import assert_same, error_text
from tests.lib.later import Later

wrap = Later("torch.distributed.fsdp.wrap")

CFG = gpt2.Config(vocab_size=31, n_positions=8, n_embd=12, n_layer=2, n_head=2)
ROWS, STEPS = 8, 2
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


PARAMS, OPTIMIZER = {"offload_params": True}, {"offload_optimizer": True}
CASES: list[tuple[str, dict[str, bool]]] = [
    ("FULL_SHARD", {}), ("FULL_SHARD", OPTIMIZER), ("SHARD_GRAD_OP", PARAMS), ("NO_SHARD", {}),
    ("HYBRID_SHARD", PARAMS), ("_HYBRID_SHARD_ZERO2", {}),
]  # fmt: skip
MODELS = {
    "blocks of scan": gpt2_loss,
    "wrap by class": lambda s: stack_loss(s, "Block"),
    "wrap by size": lambda s: stack_loss(s, 200),
    "wrap none": lambda s: stack_loss(s, None),
}


@pytest.mark.filterwarnings("ignore:apply.unshard. no units")
@pytest.mark.parametrize("model", [pytest.param(m, marks=[pytest.mark.slow] * (m != "blocks of scan"))
                                   for m in MODELS])  # fmt: skip
def test_full_shard_grad_op_no_shard_hybrid_offload_and_wrap_policy_have_one_curve_of_losses(model: str) -> None:
    build = MODELS[model]
    one = fs.strategy("NO_SHARD")
    want, _ = train(one, fs.make_mesh(data=1), build(one))  # a single device
    assert len(set(want)) == STEPS
    two, four = fs.make_mesh(data=2), fs.make_mesh(replica=2, shard=2)
    exact: dict[Any, Any] = {}
    for name, offload in CASES[:: list(MODELS).index(model) + 1]:
        mesh, s = four if "HYBRID" in name else two, fs.strategy(name, **offload)
        got = train(s, mesh, build(s))
        torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(want), rtol=1e-6, atol=0)
        assert_same(got, exact.setdefault(mesh, got), f"{name} {offload}")


class Attention(nn.Module):
    """Layers with attention, whose projections are leaves of no forward, and a list and a sequence of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0) for _ in range(2)])
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def wrapped_by_torch(module: nn.Module, least: int) -> set[str]:
    """Return the modules that torch's policy wraps, driven as FSDP drives it; the root is no choice."""
    chosen: set[str] = set()

    def visit(name: str, m: nn.Module) -> int:
        n = sum(p.numel() for p in m.parameters())
        if not wrap.size_based_auto_wrap_policy(m, True, n, min_num_params=least):
            return 0
        wrapped = sum(visit(f"{name}.{key}" if name else key, child) for key, child in m.named_children())
        if name and wrap.size_based_auto_wrap_policy(m, False, n - wrapped, min_num_params=least):
            chosen.add(name)
            return n
        return wrapped

    visit("", module)
    return chosen


def test_wrap_policy_by_class_by_size_and_none() -> None:
    module = Attention()
    units = lambda how: set(choose_units(module, how))  # noqa: E731
    assert units("TransformerEncoderLayer") == {"layers.0", "layers.1"}
    names = [m.numel() for m in module.parameters()] + [
        sum(p.numel() for p in m.parameters()) for m in module.modules()
    ]
    for least in sorted({*names, *(n + 1 for n in names), 10**8} - {0}):
        assert units(least) == wrapped_by_torch(module, least), least
    assert units(None) == set()
    apply, _ = fs.defer(Stack)
    with pytest.warns(UserWarning, match="no units: all leaves are gathered at once, and kept"):
        apply.unshard(P("data"), "data")
    apply.unshard(P("data"), "data", release=False)


def transfers(name: str, mesh: fs.Mesh, n: int, **how: Any) -> dict[tuple[str, Any], int]:
    """Return {(op, axes): transfers} of a rank, for a gradient of n blocks of one matrix."""
    s = fs.strategy(name, **how)
    described = [fs.init.normal((8, 8), std=0.3) for _ in range(n)]
    specs = s.param_specs(described)

    def loss(p: Any, x: Tensor) -> Tensor:
        y = fs.scan(lambda w, x: torch.tanh(x @ w), p, x, specs=specs, axis=s.axis, **s.options)
        return fs.pmean(y.square().mean(), s.axis)

    f = fs.shard_map(fs.grad(loss), mesh=mesh, in_specs=(specs, P(s.axis)), out_specs=specs, check="never")
    with fs.recording() as log:
        f(fs.materialize(described, specs, mesh, key=fs.key(0)), torch.randn(8, 8))
    count = Counter((t.op, t.axes if len(t.axes) > 1 else t.axes[0]) for t in log)
    return {key: n // mesh.size for key, n in count.items()}


def test_transfers_of_full_shard_shard_grad_op_no_shard_hybrid_shard_and_reshard_after_forward() -> None:
    n, two, four = 6, fs.make_mesh(data=2), fs.make_mesh(replica=2, shard=2)
    both = ("replica", "shard")
    released = 2 * n - 2  # the last two blocks are still gathered when backward starts
    assert transfers("FULL_SHARD", two, n) == {
        ("all_gather", "data"): released, ("reduce_scatter", "data"): n, ("all_reduce", "data"): 1}  # fmt: skip
    assert transfers("SHARD_GRAD_OP", two, n) == {
        ("all_gather", "data"): n, ("reduce_scatter", "data"): n, ("all_reduce", "data"): 1}  # fmt: skip
    assert transfers("NO_SHARD", two, n) == {("all_reduce", "data"): n + 1}
    for name, gathers in (("HYBRID_SHARD", released), ("_HYBRID_SHARD_ZERO2", n)):
        assert transfers(name, four, n) == {
            ("all_gather", "shard"): gathers, ("reduce_scatter", "shard"): n, ("all_reduce", "replica"): n,
            ("all_reduce", both): 1}  # fmt: skip
    # reshard_after_forward=2, and the two degenerate groups
    assert transfers("FULL_SHARD", four, n, axis=both, release="shard") == {
        ("all_gather", both): n, ("all_gather", "shard"): n - 2, ("reduce_scatter", both): n,
        ("all_reduce", both): 1}  # fmt: skip


def test_options_of_a_strategy_reach_the_blocks_of_a_model() -> None:
    """Count the gathers of a model of n blocks: one is of its other leaves, and the last blocks are gathered once."""
    n, mesh = 5, fs.make_mesh(data=2)
    cfg = replace(CFG, n_layer=n)
    for s, gathers in (
        (fs.strategy("FULL_SHARD"), 2 * n - 2),
        (fs.strategy("FULL_SHARD", prefetch=0, backward_prefetch="post"), 2 * n - 1),
        (fs.strategy("FULL_SHARD", prefetch=0, backward_prefetch=2), 2 * n - 3),
        (fs.strategy("SHARD_GRAD_OP"), n),
    ):
        specs, layout = s.param_specs(gpt2.init(cfg)), gpt2.Layout(s.axis, **s.options)
        loss = lambda p, x, layout=layout, specs=specs: gpt2.loss(cfg, p, x, x, layout=layout, specs=specs)  # noqa: E731
        f = fs.shard_map(fs.grad(loss), mesh=mesh, in_specs=(specs, P("data")), out_specs=specs, check="never")
        with fs.recording() as log:
            f(fs.materialize(gpt2.init(cfg), specs, mesh, key=fs.key(0)), batch(0)[:, :8])
        assert sum(t.op == "all_gather" for t in log) == mesh.size * (gathers + 1)


def test_offload_params_and_bytes_of_the_train_state_of_each_strategy() -> None:
    """Compare parameters + AdamW's two moments with 12 bytes a parameter, split or not, on the device or the host."""
    described = {"w": fs.init.zeros((16, 8)), "b": fs.init.zeros((8,))}
    n, opt = 16 * 8 + 8, fs.optim.adamw(1e-3)
    for name, split in zip(STRATEGIES, (4, 4, 1, 2, 2), strict=True):
        for offload in (False, True):
            axis = ("replica", "shard") if "HYBRID" in name else "data"
            s = fs.strategy(name, axis=axis, offload_params=offload)
            specs = s.param_specs(described)
            mesh = fs.make_mesh(replica=2, shard=2) if "HYBRID" in name else fs.make_mesh(data=4)
            tree, placed = {"p": described, "o": opt.init(described)}, {"p": specs, "o": s.state_specs(opt, specs)}
            state = fs.materialize(tree, placed, mesh, key=fs.key(0))
            leaves = [x for x in fs.tree.leaves(state) if x.ndim]
            assert sum(x.shards[0].numel() * 4 for x in leaves) == 12 * n // split
            assert {x.spec.memory for x in leaves} == {"host" if offload else "device"}
    only = fs.strategy("FULL_SHARD", offload_optimizer=True)
    specs = only.param_specs(described)
    assert {s.memory for s in fs.tree.leaves(specs)} == {"device"}
    assert {s.memory for s in fs.tree.leaves(only.state_specs(opt, specs))} == {"host"}
    only = fs.strategy("FULL_SHARD", offload_params=True, offload_optimizer=False)
    assert {s.memory for s in fs.tree.leaves(only.state_specs(opt, only.param_specs(described)))} == {"device"}


def test_strategy_keeps_the_split_of_a_models_own_axes() -> None:
    s = fs.strategy("FULL_SHARD", axis=("node", "local"), release="local")
    specs = s.param_specs(gpt2.init(CFG), gpt2.specs(CFG, model="model"))
    assert specs["h"][0]["up"]["w"] == P(("node", "local"), "model")
    assert specs["wte"] == P("model", ("node", "local"))
    assert fs.strategy("NO_SHARD").param_specs({"w": torch.empty(4)}) == {"w": P()}


def test_numbers_and_names_of_accelerate_are_those_of_torch() -> None:
    from accelerate.utils.constants import FSDP_SHARDING_STRATEGY
    from torch.distributed.fsdp import ShardingStrategy

    for i, name in enumerate(FSDP_SHARDING_STRATEGY, 1):
        assert fs.strategy(i) == fs.strategy(name)
        assert fs.strategy(name).name == ShardingStrategy(i).name


@pytest.mark.parametrize(
    ("args", "how", "message"),
    [
        (("FULL",), {}, "strategy: name='FULL'\n  fix: 'FULL_SHARD' (1), 'SHARD_GRAD_OP' (2)"),
        ((0,), {}, "strategy: name=0"),
        ((6,), {}, "strategy: name=6"),
        ((True,), {}, "strategy: name must be a str or an int, got True"),
        (("HYBRID_SHARD",), {"axis": "data"}, "strategy: HYBRID_SHARD with axis='data'"),
        (("FULL_SHARD",), {"axis": ()}, "strategy: FULL_SHARD with axis=()"),
        (("HYBRID_SHARD",), {"axis": ("data", "data")}, "strategy: HYBRID_SHARD with axis=('data', 'data')"),
        (("SHARD_GRAD_OP",), {"release": True}, "strategy: SHARD_GRAD_OP keeps gathered weights until backward"),
        (("HYBRID_SHARD",), {"release": "replica"}, "weights are gathered over ('shard',)"),
        (("FULL_SHARD",), {"prefetch": -1}, "strategy: prefetch=-1"),
    ],
)  # fmt: skip
def test_invalid_strategies_are_errors(args: Any, how: Any, message: str) -> None:
    assert message in error_text(fs.strategy, *args, **how)
