"""Units of a program without modules: its own order of calls, prefetch, and transfers that no call waits for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard._core.region import region
from fshard.schedule import units
from fshard.schedule.buckets import plan_buckets
from fshard.schedule.units import Unit, UnitCalls, UnitOptions, UnitSchedule
from fshard.schedule.unshard import routes
from tests.lib.operations import Operations

D = 6
SPECS = {name: {"w": P("data"), "b": P()} for name in "abc"}


def run_by_units(
    order: str, params: Any, x: Tensor, seen: list[Any] | None = None, kept: list[Any] | None = None, **options: Any
) -> Tensor:
    """Apply tanh(x @ w + b) of each unit in this order; the result of one in capitals is not used, only kept."""
    units = {}
    for name, p in params.items():
        xs, specs = [p["w"], p["b"]], [SPECS[name]["w"], SPECS[name]["b"]]
        plan = plan_buckets(region(), xs, routes("test", region(), xs, xs, specs, "data", [(D, D), (D,)]))
        assert plan is not None
        units[name] = Unit.from_shards(xs, plan)
    schedule = UnitSchedule(region(), units, UnitOptions(**options))
    calls = UnitCalls(schedule, [x for p in params.values() for x in (p["w"], p["b"])])

    def layer(leaves: Any, args: Any, kwargs: Any, calls: Any = None) -> Tensor:
        w, b = leaves
        return torch.tanh(args[0] @ w + b)

    for name in order:
        y = calls.run(name.lower(), layer, (x,), {}, lambda: layer)
        if name.islower():
            x = y
        elif kept is not None:
            kept.append(y)
        if seen is not None:
            seen.append(sorted({gathered.name for gathered in schedule.owners.values()}))
    calls.end()
    return x


def plain(order: str, params: Any, x: Tensor) -> Tensor:
    whole = fs.unshard(params, SPECS, "data")
    for name in filter(str.islower, order):
        x = torch.tanh(x @ whole[name]["w"] + whole[name]["b"])
    return x


def grads(f: Any, mesh: fs.Mesh) -> Any:
    tree = {name: {"w": fs.init.normal((D, D)), "b": fs.init.normal((D,))} for name in "abc"}
    loss = lambda p, x: fs.pmean(f(p, x).square().mean(), "data")  # noqa: E731
    step = fs.shard_map(fs.value_and_grad(loss), mesh=mesh, in_specs=(SPECS, P("data")), out_specs=(P(), SPECS),
                        check="never")  # fmt: skip
    x = torch.randn(4, D, generator=torch.Generator().manual_seed(0))
    return step(fs.materialize(tree, SPECS, mesh, key=fs.key(0)), x)


def test_any_order_of_calls_has_the_numbers_of_whole_leaves() -> None:
    mesh = fs.make_mesh(data=2)
    for order in ("abc", "cba", "b", "acac"):
        loss, want = grads(lambda p, x, o=order: plain(o, p, x), mesh)
        for options in ({}, {"prefetch": 2}, {"prefetch": 0}, {"release": False}, {"remat": True}):
            got_loss, got = grads(lambda p, x, o=order, s=options: run_by_units(o, p, x, **s), mesh)
            assert torch.equal(fs.device_get(got_loss), fs.device_get(loss))
            for g, w in zip(fs.tree.leaves(got), fs.tree.leaves(want), strict=True):
                g, w = fs.device_get([g, w])
                # A unit that is called twice has two sums over the ranks, which are added after.
                torch.testing.assert_close(
                    g, w, rtol=2e-6 if order == "acac" else 0, atol=2e-8 if order == "acac" else 0
                )


def test_transfers_do_not_depend_on_what_one_rank_keeps() -> None:
    """Keep a result that the loss does not use on rank 0, so that more of the graph lives there than on rank 1."""
    mesh = fs.make_mesh(data=2)
    for order in ("aBc", "abaCb", "aBCc"):
        _, want = grads(lambda p, x, o=order: plain(o, p, x), mesh)
        for options in ({}, {"prefetch": 2}, {"prefetch": 0}, {"release": False}, {"remat": True}):
            kept: list[Any] = []

            def f(p: Any, x: Tensor, order: str = order, options: Any = options, kept: Any = kept) -> Tensor:
                return run_by_units(order, p, x, kept=kept if fs.axis_index("data") == 0 else None, **options)

            for g, w in zip(fs.tree.leaves(grads(f, mesh)[1]), fs.tree.leaves(want), strict=True):
                torch.testing.assert_close(fs.device_get(g), fs.device_get(w), rtol=2e-6, atol=2e-8)


def test_gradients_that_share_a_tensor_are_each_summed_once() -> None:
    """Differentiate additions of leaves that have x's shape: all of them, and x, have one gradient tensor."""
    mesh, specs = fs.make_mesh(data=2), dict.fromkeys("abc", P())

    def loss(params: Any, x: Tensor) -> Tensor:
        units = {}
        for name, w in params.items():
            plan = plan_buckets(region(), [w, w], routes("test", region(), w, [w, w], [P(), P()], "data", [(D,), (D,)]))
            assert plan is not None
            units[name] = Unit.from_shards([w, w], plan)
        calls = UnitCalls(UnitSchedule(region(), units, UnitOptions()), [w for w in params.values() for _ in "ab"])
        y = torch.zeros(D)
        for name in params:
            y = calls.run(name, lambda leaves, args, _: args[0] + leaves[0] + leaves[1], (y,), {}, lambda: None)
        calls.end()
        return fs.psum((y * x).sum(), "data")

    step = fs.shard_map(fs.grad(loss), mesh=mesh, in_specs=(specs, P("data")), out_specs=specs, check="never")
    x = torch.arange(12.0)
    result = step(fs.materialize({n: fs.init.normal((D,)) for n in "abc"}, specs, mesh, key=fs.key(0)), x)
    for g in result.values():
        assert torch.equal(fs.device_get(g), 2 * (x[:D] + x[D:]))


AXES = ("data", "replica")


def deep_step(mesh: fs.Mesh, layers: Any, depth: int = 3, by_units: bool = True, d: int = D, **options: Any) -> Any:
    """Return the gradients of units of four products, (leaves, x) -> y, and the peak bytes of their computation."""
    spec, peaks = P("data"), list[int]()

    def run(leaves: Any, args: Any, kwargs: Any = None, calls: Any = None) -> Any:
        return layers(leaves, *args)

    def loss(params: Any, x: Tensor) -> Tensor:
        units = {}
        for name, xs in params.items():
            plan = plan_buckets(region(), xs, routes("test", region(), xs, xs, [spec] * 4, AXES, [(d, d)] * 4))
            assert plan is not None
            units[name] = Unit.from_shards(xs, plan)
        calls = UnitCalls(UnitSchedule(region(), units, UnitOptions(**options)), fs.tree.leaves(params))
        for name, xs in params.items():
            x = calls.run(name, run, (x,), {}, lambda: run) if by_units else layers(fs.unshard(xs, spec, AXES), x)
        calls.end()
        return fs.pmean(x.square().mean(), AXES)

    @fs.shard_map(mesh=mesh, in_specs=(spec, P(AXES)), out_specs=spec, check="never")
    def step(params: Any, x: Tensor) -> Any:
        with Operations() as seen:
            out = fs.grad(loss)(params, x)
        peaks.append(seen.peak)
        return out

    tree = {name: [fs.init.normal((d, d)) for _ in range(4)] for name in "abcdefgh"[:depth]}
    x = torch.linspace(-1, 1, 4 * d).view(4, d)
    return fs.device_get(step(fs.materialize(tree, spec, mesh, key=fs.key(0)), x)), max(peaks)


def products(leaves: Any, x: Tensor) -> Tensor:
    for w in leaves:
        x = torch.tanh(x @ w)
    return x


def test_backward_gathers_ahead_and_ends_a_sum_halfway_in_a_unit(monkeypatch: Any) -> None:
    """Compare rank 0's order of uses of saved leaves, of starts of gathers and sums, and of waits for sums."""
    events: list[str] = []

    def logged(cls: Any, name: str, word: Any) -> None:
        f = getattr(cls, name)

        def run(self: Any, *args: Any) -> Any:
            if fs.axis_index("data") == 0:
                events.append(word(*args))
            return f(self, *args)

        monkeypatch.setattr(cls, name, run)

    logged(UnitSchedule, "start", lambda name: f"gather {name}")
    logged(UnitSchedule, "start_sums", lambda name, _: f"sum {name}")
    logged(UnitSchedule, "_add", lambda name, leaf, _: f"end {name}" if leaf == 0 else "")
    logged(UnitSchedule, "use", lambda at, nbytes: "use")

    def backward(**options: Any) -> str:
        def layers(leaves: Any, x: Tensor) -> Tensor:
            for w in leaves:
                if fs.axis_index("data") == 0:
                    events.append("run")
                x = torch.tanh(x @ w)
            return x

        events.clear()
        deep_step(fs.make_mesh(data=2, replica=1), layers, **options)
        return " ".join(filter(None, events[events.index("use") :]))

    assert backward() == ("use use use gather b use sum c use use use end c gather a use sum b use use end b use "
                          "sum a end a")  # fmt: skip
    assert backward(remat=True) == ("use use use gather b sum c run run end c run run use use use gather a sum b run "
                                    "run run end b run use use sum a end a")  # fmt: skip


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)])
def test_transfers_have_one_order_where_ranks_are_halfway_at_other_places(sizes: Any, remat: bool) -> None:
    """Rank 0 saves leaves for results that are not used, or sums x, or its gradient, elsewhere than other ranks."""
    mesh = fs.make_mesh(data=sizes[0], replica=sizes[1])
    kept: list[Any] = []

    def unused(leaves: Any, x: Tensor) -> Tensor:
        if fs.axis_index(AXES) == 0:
            kept.append([torch.tanh(x) @ w for w in leaves * 2])
        return products(leaves, x)

    def summed(leaves: Any, x: Tensor, at: int = 3, f: Any = lambda x: fs.pvary(fs.psum(x, AXES), AXES)) -> Tensor:
        at = at if fs.axis_index(AXES) == 0 else 1
        return products(leaves[at:], f(products(leaves[:at], x)))

    def summed_in_backward(leaves: Any, x: Tensor) -> Tensor:
        return summed(leaves, x, f=lambda x: fs.pvary(x, AXES))

    for layers in (unused, summed, summed_in_backward):
        with fs.recording() as log:
            got = deep_step(mesh, layers, remat=remat)[0]
        first, *others = [[(t.op, t.axes, t.bytes) for t in log if t.rank == r] for r in range(math.prod(sizes))]
        assert all(other == first for other in others)
        want = deep_step(mesh, layers, by_units=False)[0]
        assert all(map(torch.equal, fs.tree.leaves(got), fs.tree.leaves(want)))


@pytest.mark.parametrize("remat", [False, True])
def test_memory_is_one_unit_of_leaves_and_one_of_gradients(monkeypatch: Any, remat: bool) -> None:
    """Stand in for sums that keep the gradients until the wait, as a process mesh does."""
    d, depth = 256, 4
    monkeypatch.setattr(units, "start_reduce", lambda _, which, grads: lambda: [g[: d // 2].clone() for g in grads])
    peak = deep_step(fs.make_mesh(data=2, replica=1), products, depth, d=d, remat=remat)[1]
    unit = 4 * d * d * 4
    assert peak <= (1 + 1 + 1 / 4) * unit + depth * unit / 2 + 50_000  # a gradient, the shards of all gradients


def test_gathered_units_after_each_call() -> None:
    """Expect the unit defined next, a guess, and none that ran: its leaves are freed although the graph needs them."""
    mesh = fs.make_mesh(data=2)
    seen: dict[str, list[Any]] = {}
    for name, options in {"ahead": {}, "none ahead": {"prefetch": 0}, "kept": {"release": False}}.items():

        def f(p: Any, x: Tensor, name: str = name, options: Any = options) -> Tensor:
            found: list[Any] = []
            y = run_by_units("bac", p, x, found, **options)
            seen[name] = found
            return y

        grads(f, mesh)
    assert seen == {
        "ahead": [["c"], ["b"], []],
        "none ahead": [[], [], []],
        "kept": [["a", "b", "c"], ["a", "b", "c"], ["a", "b", "c"]],
    }


def test_gradient_of_an_intermediate_tensor_does_not_wait_for_units_before_it() -> None:
    """Differentiate the last unit alone, twice, then all of them in the same graph."""
    mesh = fs.make_mesh(data=2)

    def body(p: Any, x: Tensor) -> Any:
        with torch.enable_grad():
            p = fs.tree.map(lambda w: w.detach().requires_grad_(), p)
            h = run_by_units("ab", p, x)
            y = run_by_units("c", {"c": p["c"]}, h).sum()
            first = torch.autograd.grad(y, h, retain_graph=True)[0]
            again = torch.autograd.grad(y, h, retain_graph=True)[0]
            weights = [p["a"]["w"], p["c"]["w"]]
            both = [torch.autograd.grad(y, weights, retain_graph=True), torch.autograd.grad(y, weights)]
            assert torch.equal(first, again)
            assert all(torch.equal(g, h) for g, h in zip(*both, strict=True))
            (want,) = torch.autograd.grad(plain("abc", p, x).sum(), p["a"]["w"])
            assert torch.equal(both[0][0], want)
        return first

    params = fs.materialize({n: {"w": fs.init.normal((D, D)), "b": fs.init.normal((D,))} for n in "abc"}, SPECS, mesh,
                            key=fs.key(0))  # fmt: skip
    fs.shard_map(body, mesh=mesh, in_specs=(SPECS, P("data")), out_specs=P("data"), check="never")(
        params, torch.ones(4, D)
    )
