"""Options of `scan`'s schedule: weights that stay split over one axis, prefetch in backward, gathers in flight."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import P
from fshard.schedule import block_loop, units
from fshard.schedule.units import UnitSchedule
from tests.lib.assertions import assert_same, error_text
from tests.lib.operations import Operations

D, F, BLOCKS = 7, 10, 4
AXES = ("node", "local")


def described() -> Any:
    block = {
        "up": fs.init.normal((D, F), std=0.4),
        "down": fs.init.normal((F, D), std=0.4, dtype=torch.bfloat16),
        "bias": fs.init.normal((D,), std=0.1),
        "frozen": fs.init.normal((D, D), std=0.3),
    }
    return [block] * BLOCKS


# Split by both axes (uneven: 7 and 10 over 4), by the other order, replicated, and by the axis that is not kept.
SPECS = [{"up": P(AXES), "down": P(("local", "node")), "bias": P(), "frozen": P("node")}] * BLOCKS


def block(p: Any, x: Tensor) -> Tensor:
    h = torch.tanh(x @ p["up"].to(x.dtype)) @ p["down"].to(x.dtype) + p["bias"].to(x.dtype)
    return x + torch.tanh(h @ p["frozen"].to(x.dtype))


def step_of(mesh: fs.Mesh, *, specs: Any = SPECS, check: str = "never", **how: Any) -> Any:
    """Return a step (params, x) -> (loss, gradients of the trained leaves)."""
    trained = [{k: s for k, s in one.items() if k != "frozen"} for one in specs]

    @fs.shard_map(mesh=mesh, in_specs=(specs, P(AXES)), out_specs=(P(), trained), check=check)
    def step(params: Any, x: Tensor) -> Any:
        def loss(own: Any) -> Tensor:
            both = [{**a, "frozen": b["frozen"]} for a, b in zip(own, params, strict=True)]
            y = fs.scan(block, both, x, specs=specs, axis=AXES, shapes=described(), **how)
            return fs.pmean(y.float().square().mean(), AXES)

        return fs.value_and_grad(loss)([{k: v for k, v in p.items() if k != "frozen"} for p in params])

    return step


def place(mesh: fs.Mesh, specs: Any = SPECS) -> tuple[Any, Tensor]:
    x = torch.randn(8, D, generator=torch.Generator().manual_seed(1))
    return fs.materialize(described(), specs, mesh, key=fs.key(0)), x


RELEASES: list[Any] = ["local", "node", AXES, True, False]
PREFETCHES = [(1, None), (0, "post"), (2, 0), (0, 9)]


@pytest.mark.parametrize("remat", [pytest.param(False, marks=pytest.mark.slow), True])
def test_every_release_and_prefetch_has_the_numbers_of_the_default(remat: bool) -> None:
    mesh = fs.make_mesh(node=2, local=2)
    params, x = place(mesh)
    for precision in ({}, {"dtype": torch.bfloat16, "reduce_dtype": torch.float32}):
        want = step_of(mesh, **precision)(params, x)
        for release in RELEASES if not precision else ["local"]:
            for prefetch, backward in PREFETCHES if release == "local" else PREFETCHES[remat : remat + 1]:
                how = {"release": release, "prefetch": prefetch, "backward_prefetch": backward, "remat": remat}
                assert_same(step_of(mesh, **how, **precision)(params, x), want, str(how))


def test_checked_call_and_dry_run_with_weights_that_stay_split() -> None:
    mesh = fs.make_mesh(node=2, local=2)
    params, x = place(mesh)
    want = step_of(mesh)(params, x)
    how = {"release": "local", "backward_prefetch": "post", "prefetch": 0}
    assert_same(step_of(mesh, check="always", **how)(params, x), want)
    abstract = fs.make_mesh(kind="abstract", node=4, local=8)
    with fs.recording() as log:
        step_of(abstract, release="local", specs=EVEN)(*place(abstract, EVEN))
    again = [t for t in log if t.op == "all_gather" and t.phase == "backward"]
    assert {t.axes for t in again} == {("local",)}


EVEN = [{"up": P(None, AXES), "down": P(AXES), "bias": P(), "frozen": P(None, AXES)}] * BLOCKS


@pytest.mark.parametrize(("node", "local"), [(2, 2), (1, 4), (4, 1), (2, 3)])
def test_reshard_after_forward_to_a_group_gathers_in_backward_over_that_group_alone(node: int, local: int) -> None:
    mesh = fs.make_mesh(node=node, local=local)
    params, _ = place(mesh)
    step, x = step_of(mesh, release="local"), torch.randn(2 * mesh.size, D)
    with fs.recording() as log:
        step(params, x)
    again = Counter(t.axes for t in log if t.op == "all_gather" and t.phase == "backward")
    blocks = (BLOCKS - 2) * mesh.size  # the last two are still gathered
    # "up" and "down" have two dtypes; "frozen" is split over node alone, and so gathered over it again.
    want = {("local",): 2 * blocks, ("node",): blocks}
    if 1 in (node, local):
        want = {("local",) if node == 1 else ("node",): 2 * blocks}  # over all axes there are
    assert again == want
    if 1 not in (node, local):
        sent = sum(t.bytes for t in log if t.phase == "backward" and t.op == "all_gather" and t.axes == ("local",))
        assert sent == (BLOCKS - 2) * node * D * F * (4 + 2)  # the ranks of a node together: each number once


def test_weights_that_stay_split_take_their_share_of_memory() -> None:
    """Compare peaks: two whole blocks, and of each other block nothing, its part, or all of it."""
    d, n, peaks = 64, 8, {}
    mesh, specs = fs.make_mesh(node=2, local=2), [P(AXES)] * n
    params = fs.materialize([fs.init.normal((d, d), std=0.1)] * n, specs, mesh, key=fs.key(0))
    for release in (True, "local", False):
        most = {}

        def step(p: Any, x: Tensor, release: Any = release, most: Any = most) -> Any:
            def loss(p: Any) -> Tensor:
                y = fs.scan(lambda w, x: torch.tanh(x @ w), p, x, specs=specs, axis=AXES, release=release)
                most[fs.axis_index(AXES).item()] = seen.peak  # of forward: gradients take the place of activations
                return fs.pmean(y.sum(), AXES)

            with Operations() as seen:
                return fs.grad(loss)(p)

        f = fs.shard_map(step, mesh=mesh, in_specs=(specs, P(AXES)), out_specs=specs, check="never")
        f(params, torch.randn(4, d))
        peaks[release] = most[0]
    whole = d * d * 4
    assert peaks["local"] - peaks[True] == (n - 2) * whole // 2
    assert peaks[False] - peaks[True] == (n - 2) * whole


def events_of_backward(monkeypatch: Any, **how: Any) -> list[str]:
    """Return the starts (+) and waits (-) of gathers and sums of rank 0 in backward, by block: "+gather 2"."""
    mesh, n, events = fs.make_mesh(data=2), 4, []
    params = [fs.init.normal((D, D), std=0.3) for _ in range(n)]
    first = lambda: int(fs.axis_index("data")) == 0  # noqa: E731

    def logged(what: str, start: Any, block_of: Any) -> Any:
        def f(*args: Any) -> Any:
            pending, name = start(*args), f"{what} {block_of(*args)}"
            if not first():
                return pending
            events.append(f"+{name}")
            waits = pending[1] if what == "gather" else [pending]

            def wait(wait: Any) -> Any:
                events.append(f"-{name}")
                return wait()

            waits = [lambda w=w: wait(w) for w in waits]
            return (pending[0], waits) if what == "gather" else waits[0]

        return f

    sums = iter(range(n - 1, -1, -1))
    start_gather, start_reduce = block_loop.start_gather, block_loop.start_reduce
    number = lambda region, plan, shards, buffer: buffer.contents[1]  # noqa: E731
    monkeypatch.setattr(block_loop, "start_gather", logged("gather", start_gather, number))
    monkeypatch.setattr(
        block_loop, "start_reduce", logged("sum", start_reduce, lambda *_: next(sums) if first() else -1)
    )
    body = lambda w, x: torch.tanh(x @ w)  # noqa: E731

    def loss(p: Any, x: Tensor) -> Tensor:
        y = fs.pmean(fs.scan(body, p, x, specs=P("data"), axis="data", shapes=params, **how).sum(), "data")
        if first():
            events.append("backward")
        return y

    specs = [P("data")] * n
    f = fs.shard_map(fs.grad(loss), mesh=mesh, in_specs=(specs, P("data")), out_specs=specs, check="never")
    f(fs.materialize(params, specs, mesh, key=fs.key(0)), torch.randn(4, D))
    return events


def most_pending(events: list[str], what: str) -> int:
    """Return the most transfers of a kind that are started and not waited for at one time."""
    counts = [sum((e[0] == "+") - (e[0] == "-") for e in events[:i] if what in e) for i in range(len(events) + 1)]
    return max(counts)


def test_backward_prefetch_pre_post_and_none_and_forward_prefetch(monkeypatch: Any) -> None:
    """Compare the order of starts and waits in backward: the next block's gather around this block's sum."""

    def backward(**how: Any) -> list[str]:
        with monkeypatch.context() as patch:
            events = events_of_backward(patch, **how)
        return events[events.index("backward") + 1 :]

    assert backward(prefetch=0) == [  # none: a transfer at a time
        "+sum 3", "-sum 3", "+gather 2", "-gather 2", "+sum 2", "-sum 2", "+gather 1", "-gather 1", "+sum 1", "-sum 1",
        "+gather 0", "-gather 0", "+sum 0", "-sum 0",
    ]  # fmt: skip
    assert backward(prefetch=0, backward_prefetch="post") == [  # the gather starts beside the sum of gradients
        "+sum 3", "+gather 2", "-gather 2", "+sum 2", "+gather 1", "-sum 3", "-gather 1", "+sum 1", "+gather 0",
        "-sum 2", "-gather 0", "+sum 0", "-sum 1", "-sum 0",
    ]  # fmt: skip
    assert backward(prefetch=0, backward_prefetch=1) == [  # pre: the gather starts before the gradients of the block
        "+sum 3", "+gather 1", "+sum 2", "-sum 3", "+gather 0", "-gather 1", "+sum 1", "-sum 2", "-gather 0", "+sum 0",
        "-sum 1", "-sum 0",
    ]  # fmt: skip
    with monkeypatch.context() as patch:
        events = events_of_backward(patch, prefetch=1, backward_prefetch=0)
    assert events[: events.index("backward")] == [  # forward prefetch
        "+gather 0", "+gather 1", "-gather 0", "+gather 2", "-gather 1", "+gather 3", "-gather 2", "-gather 3",
    ]  # fmt: skip


def test_limit_all_gathers_is_the_number_of_blocks_ahead(monkeypatch: Any) -> None:
    for prefetch, backward in ((0, "post"), (1, None), (2, 1)):
        with monkeypatch.context() as patch:
            events = events_of_backward(patch, prefetch=prefetch, backward_prefetch=backward)
        assert most_pending(events, "gather") == prefetch + 1


# --- units of a module ---


on_gradient: list[Any] = []  # called in backward, before the gradients of each layer


class Stack(nn.Module):
    """Layers called in an order of their own: 0, 2, 1, 2, 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(D, D) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 2, 1, 2, 0):
            y = self.layers[i](x)
            for f in on_gradient if y.requires_grad else ():
                y.register_hook(lambda _, f=f: f())
            x = torch.tanh(y)
        return x


@functools.cache
def stack() -> Any:
    return fs.defer(Stack, units="Linear")


def unit_step(mesh: fs.Mesh, check: str = "never", **how: Any) -> Any:
    """Return (step, params): step is (params, x) -> (loss, gradients) of a Stack by units."""
    apply, described = stack()
    f, specs = apply.unshard(P(AXES), AXES, **how), dict.fromkeys(described["params"], P(AXES))

    def loss(p: Any, x: Tensor) -> Tensor:
        return fs.pmean(f(p, {}, x).square().mean(), AXES)

    step = fs.shard_map(fs.value_and_grad(loss), mesh=mesh, in_specs=(specs, P(AXES)), out_specs=(P(), specs),
                        check=check)  # fmt: skip
    return step, fs.materialize(described["params"], specs, mesh, key=fs.key(0))


@pytest.mark.slow
def test_units_have_the_same_numbers_by_every_release_and_prefetch() -> None:
    mesh, x = fs.make_mesh(node=2, local=2), torch.randn(8, D, generator=torch.Generator().manual_seed(1))
    step, params = unit_step(mesh)
    want = step(params, x)
    for release in ("local", "node", AXES, True, False):
        for i, (prefetch, backward) in enumerate(PREFETCHES if release == "local" else PREFETCHES[:1]):
            how = {"release": release, "prefetch": prefetch, "backward_prefetch": backward, "remat": i % 2 == 1}
            step, _ = unit_step(mesh, **how)
            with fs.recording() as log:
                got = step(params, x)
            assert_same(got, want, str(how))
            again = {t.axes for t in log if t.op == "all_gather" and t.phase == "backward"}
            assert again == ({AXES} if release is True else {(release,)} if isinstance(release, str)
                             else {release} if release else set())  # fmt: skip
    assert_same(unit_step(mesh, "always", release="local")[0](params, x), want)
    assert_same(unit_step(mesh, "always", backward_prefetch="post")[0](params, x), want)


def test_units_keep_parts_until_the_last_backward_that_needs_them(monkeypatch: Any) -> None:
    seen: list[tuple[str, list[str]]] = []
    start_sums = UnitSchedule.start_sums

    def spy(self: UnitSchedule, name: str, grads: Any) -> None:
        seen.append((name[-1], [kept[-1] for kept in self.kept]))
        start_sums(self, name, grads)

    monkeypatch.setattr(UnitSchedule, "start_sums", spy)
    step, params = unit_step(fs.make_mesh(node=1, local=2), release="local")
    step(params, torch.randn(4, D))
    assert {tuple(kept) for _, kept in seen} == {()}  # weights that are gathered over `local` alone have shards there
    seen.clear()
    step, params = unit_step(fs.make_mesh(node=2, local=2), release="local")
    step(params, torch.randn(4, D))
    # The first call needs no weight: x before it has no gradient.
    assert seen[::4] == [("0", ["2", "1"]), ("2", ["2", "1"]), ("1", ["2"]), ("2", []), ("0", [])]


def test_units_are_gathered_before_or_after_the_gradients_of_the_unit_called_next(monkeypatch: Any) -> None:
    """Compare the starts of gathers and sums of rank 0 in backward, the waits for sums, and gradients of layers."""
    events: list[str] = []
    start_sums, start, start_reduce = UnitSchedule.start_sums, UnitSchedule.start, units.start_reduce

    def log(event: str) -> None:
        if fs.axis_index(AXES) == 0:
            events.append(event)

    def reduce(*args: Any) -> Any:
        wait = start_reduce(*args)
        return lambda: (log("done"), wait())[1]

    monkeypatch.setattr(UnitSchedule, "start_sums", lambda s, name, g: (log(f"sum {name[-1]}"), start_sums(s, name, g)))
    monkeypatch.setattr(UnitSchedule, "start", lambda s, name: (log(f"gather {name[-1]}"), start(s, name))[1])
    monkeypatch.setattr(units, "start_reduce", reduce)
    on_gradient.append(lambda: log("grad"))
    got = {}
    for backward in (0, 1, "post"):
        step, params = unit_step(fs.make_mesh(node=1, local=2), prefetch=0, backward_prefetch=backward)
        events.clear()
        step(params, torch.randn(4, D))
        got[backward] = " ".join(events[5:])  # after the five gathers of forward
    on_gradient.clear()
    assert got[0] == ("grad gather 0 sum 0 done grad gather 2 sum 2 done grad gather 1 sum 1 done grad gather 2 sum 2 "
                      "done grad sum 0 done")  # fmt: skip
    assert got[1] == ("grad gather 0 gather 2 sum 0 grad gather 1 sum 2 done grad gather 2 sum 1 done grad sum 2 done "
                      "grad sum 0 done done")  # fmt: skip
    assert got["post"] == ("grad gather 0 sum 0 gather 2 grad sum 2 done gather 1 grad sum 1 done gather 2 grad sum 2 "
                           "done grad sum 0 done done")  # fmt: skip


def test_invalid_options_are_errors() -> None:
    mesh = fs.make_mesh(node=2, local=2)
    for how, message in (
        ({"release": "model"}, "scan: release='model'"),
        ({"release": ()}, "scan: release=()"),
        ({"backward_prefetch": -1}, "scan: backward_prefetch=-1"),
        ({"backward_prefetch": "pre"}, "scan: backward_prefetch must be an int, 'post' or None, got 'pre'"),
    ):
        assert message in error_text(step_of(mesh, **how), *place(mesh))
        assert message.replace("scan", "unshard").partition("=")[0] in error_text(unit_step, mesh, **how)
    for name in ("dtype", "reduce_dtype"):
        message = f"mixed precision: {name} must be a floating-point dtype, got torch.int32"
        assert message in error_text(step_of(mesh, **{name: torch.int32}), *place(mesh))
