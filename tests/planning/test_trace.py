"""Traces: the operations, transfers and memory of a run, in Chrome's format."""

from __future__ import annotations

import gzip
import importlib
import itertools
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard._core.comm import TimedComm
from fshard._core.comm.group import GroupComm
from fshard._core.transfers import Transfer
from fshard.models import gpt2
from fshard.planning import Operation, Start, Wait, measure
from fshard.planning.chrome import Slice, Timeline, chrome_events, fitted
from fshard.planning.measure import Record, own_clocks
from tests.lib.assertions import assert_same, error_text
from tests.lib.operations import Operations

X = torch.arange(32.0).view(8, 4).sin()
CFG = gpt2.Config(vocab_size=12, n_positions=4, n_embd=8, n_layer=2, n_head=2)


def training(**axes: int) -> tuple[Any, Any, Any]:
    """Return a step of a transformer that is fully sharded over `data`, its state and a batch of uneven size."""
    mesh = fs.make_mesh(kind="simulated", **axes)
    described, optimizer = gpt2.init(CFG), fs.optim.adamw(1e-3)
    specs = fs.fully_shard(gpt2.specs(CFG), described, axis="data")
    placed = {"params": specs, "opt": optimizer.specs(specs)}

    @fs.shard_map(mesh=mesh, in_specs=(placed, P("data")), out_specs=(placed, P()), donate=0)
    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Tensor:
            return gpt2.loss(CFG, params, *batch, layout=gpt2.Layout("data"), specs=specs)

        loss, grads = fs.value_and_grad(loss_fn)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, loss

    tree = {"params": described, "opt": optimizer.init(described)}
    ids = torch.arange(25).view(5, 5) % 12
    return step, fs.materialize(tree, placed, mesh, key=fs.key(0)), (ids[:, :-1], ids[:, 1:])


@pytest.fixture(scope="module")
def traced() -> tuple[fs.planning.Trace, Any, list[Transfer]]:
    """A trace of the step on two ranks, the result of a plain call, and the transfers of that call."""
    step, state, batch = training(data=2)
    with fs.recording() as log:
        want = step.on(step.mesh, check="never")(state, batch)
    step, state, batch = training(data=2)
    return fs.trace(step, state, batch), fs.device_get(want), log


def check_format(trace: dict[str, Any]) -> None:
    """Raise AssertionError unless the trace is one that Chrome and Perfetto read, whose slices nest in each lane."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    assert trace["displayTimeUnit"] in ("ms", "ns")
    lanes: dict[Any, list[Any]] = {}
    named = set()
    for e in trace["traceEvents"]:
        assert {"ph", "pid", "name", "ts"} <= e.keys()
        assert isinstance(e["name"], str)
        assert e["ts"] >= 0
        if e["ph"] == "X":
            assert e["dur"] >= 0
            assert (e["pid"], e["tid"]) in named
            lanes.setdefault((e["pid"], e["tid"]), []).append(e)
        elif e["ph"] == "C":
            assert all(isinstance(x, (int, float)) for x in e["args"].values())
        else:
            assert e["ph"] == "M"
            assert e["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            named.add((e["pid"], e["tid"]))
    for row in lanes.values():
        open_: list[int] = []  # the ends of the slices around the current one
        for e in row:
            start, end = round(1000 * e["ts"]), round(1000 * (e["ts"] + e["dur"]))
            while open_ and open_[-1] <= start:
                open_.pop()
            assert not open_ or end <= open_[-1], f"{e} overlaps the end of another slice of its lane"
            open_.append(end)


# --- runs -----------------------------------------------------------------------------------------------------


def test_file_of_all_ranks_has_the_format_and_the_lanes(traced: Any, tmp_path: Path) -> None:
    run = traced[0]
    file = run.save(tmp_path / "step.json")
    trace = json.loads(file.read_text())
    check_format(trace)
    assert trace == json.loads(gzip.decompress(run.save(tmp_path / "step.json.gz").read_bytes()))
    names = {
        (e["pid"], e["args"]["name"]) for e in trace["traceEvents"] if e["name"] in ("process_name", "thread_name")
    }
    assert {(0, "rank 0 (data=0)"), (1, "rank 1 (data=1)"), (0, "compute"), (1, "over data")} <= names
    phases = [
        e["name"] for e in trace["traceEvents"] if e["pid"] == 0 and e["name"] in ("forward", "backward", "update")
    ]
    assert [name for name, _ in itertools.groupby(phases)] == ["forward", "backward", "update"]


def test_result_is_that_of_a_plain_call_and_donated_arguments_are_used_up(traced: Any) -> None:
    run, want, _ = traced
    assert_same(fs.device_get(run.result), want)
    step, state, batch = training(data=1)
    fs.trace(step, state, batch)
    assert "donated" in error_text(lambda: fs.device_get(state))


def test_transfers_are_those_that_a_recording_sees(traced: Any) -> None:
    run, _, log = traced
    want = Counter((t.rank, t.op, "+".join(t.axes), t.phase, t.sent, t.bytes, repr(t.where)) for t in log)
    rows = [(t.rank, s, axes) for t in run.timelines for axes, slices in t.transfers.items() for s in slices]
    got = Counter((rank, s.name, axes, s.phase, s.facts["sent_bytes"], s.facts["argument_bytes"], s.where)
                  for rank, s, axes in rows)  # fmt: skip
    assert got == want
    assert {s.phase for _, s, _ in rows} == {"forward", "backward"}
    assert all(s.start <= s.end for _, s, _ in rows)
    assert all(re.fullmatch(r"test_trace\.py:\d+ in loss_fn \(.*\.py:.*\)", s.where) for _, s, _ in rows)
    assert [t.memory[0][0] for t in run.timelines] == [0.0, 0.0]  # each rank has a clock of its own
    starts = {rank: [s for r, s, _ in rows if r == rank] for rank in (0, 1)}
    assert all(
        a.start < b.end and b.start < a.end for a, b in zip(*starts.values(), strict=True)
    )  # on both at one time


VIEWS = {"detach", "view", "transpose", "t", "permute", "unbind", "unsqueeze", "alias", "expand", "slice", "select"}


def test_operations_flops_and_memory_of_one_rank_are_those_of_a_plain_run() -> None:
    mesh = fs.make_mesh(kind="simulated", data=1)

    @fs.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()), check="never")
    def step(w: Tensor, x: Tensor) -> Any:
        loss, grad = fs.value_and_grad(lambda w: (x @ w.view(4, 4)).sin().pow(2).mean())(w)
        return w - grad, loss

    w = X[:4].clone().view(16)
    step(w, X)  # a first call copies plain tensors
    (timeline,) = fs.trace(step, w, X).timelines
    with Operations() as seen:
        step(w, X)
    want: Counter[str] = Counter()
    for op, n in seen.counts.items():
        want[f"aten.{op.overloadpacket.__name__}"] += n * (op.overloadpacket.__name__ not in VIEWS)
    assert Counter(s.name for s in timeline.compute) == +want
    products = [s for s in timeline.compute if s.name == "aten.mm"]
    assert [(s.phase, s.facts["flops"]) for s in products] == [(p, 2 * 8 * 4 * 4) for p in ("forward", "backward")]
    assert products[0].facts["arguments"] == "f32[8, 4], f32[4, 4]"
    assert products[0].where.endswith(" in <lambda>")
    assert timeline.memory[0][1] == w.nbytes + X.nbytes
    assert max(n for _, n in timeline.memory) == w.nbytes + X.nbytes + seen.peak
    assert all(a.end <= b.start for a, b in itertools.pairwise(timeline.compute))


def test_table_of_a_trace() -> None:
    slow = Slice("aten.mm", 0.001, 0.003, "train.py:5 in f", "forward")
    wait = Slice(
        "wait for all_reduce over data", 0.003, 0.004, "train.py:6 in f", "forward", {"waits_for": "all_reduce"}
    )
    moved = (Slice("all_reduce", 0.0, 0.003), Slice("all_reduce", 0.002, 0.004))
    rank = Timeline(0, "rank 0 (data=0)", (slow, wait), {"data": moved}, ((0.0, 1024), (0.003, 2048), (0.004, 512)))
    assert (
        repr(fs.planning.Trace({"data": 1}, "measured", (rank,), notes=("short",)))
        == """\
trace of data=1, measured: 4.00 ms
                   operations    waits  over data  peak memory
  rank 0 (data=0)     2.00 ms  1.00 ms    4.00 ms      2.0 KiB
  lines whose operations take the most time
    100%  2.00 ms  train.py:5 in f
  note: short"""
    )


@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 3, "model": 2}])
def test_programs_of_every_kind_are_traced(axes: dict[str, int]) -> None:
    """Uneven and empty parts, no operation, no transfer, transforms, and a transfer that nothing waits for."""
    mesh, both = fs.make_mesh(kind="simulated", **axes), tuple(axes)

    def verbs(x: Tensor) -> Tensor:
        x = fs.all_gather(fs.pmax(fs.psum(x.sum(), both), None) + x, "data", size=4)
        return fs.ppermute(x, "data", [(0, 1)])

    def summed(x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda x: fs.psum(x.sin().sum(), "data")))(torch.ones(2, 3) + x.sum())

    stages = fs.pipelined(lambda e, b: b, lambda p, h, b: h + p, lambda e, h, b: h, axis="data", microbatches=4)
    programs = {
        "messages": (lambda x: x + stages.forward(({}, x), torch.ones(4, 4)).sum(), X),
        "verbs": (verbs, X[:4]), "summed": (summed, X[:1]), "remat": (fs.remat(torch.sin), X[:0]),
        "scattered": (lambda x: fs.psum_scatter(x.sum(0), "data"), X), "nothing": (lambda x: x, X),
        "printed": (lambda x: fs.print(x.shape) or x.sin(), X),
        "complex": (lambda x: fs.psum(x.sum() * 1j, "data"), X),
    }  # fmt: skip
    for name, (f, x) in programs.items():
        mapped = fs.shard_map(f, mesh=mesh, in_specs=(P("data"),), out_specs=P("data"), check="never")
        if name == "complex":
            mapped = fs.shard_map(f, mesh=mesh, in_specs=(P("data"),), out_specs=P(), check="never")
        run = fs.trace(mapped, x)
        check_format(run.json())
        assert len(run.timelines) == mesh.size, name
        with fs.recording() as log:
            mapped(x)
        slices = [(t.rank, s) for t in run.timelines for row in t.transfers.values() for s in row]
        assert Counter((rank, s.name, s.facts["sent_bytes"]) for rank, s in slices) == Counter(
            (t.rank, t.op, t.sent) for t in log
        )
        assert_same(fs.device_get(run.result), fs.device_get(mapped(x)))


# --- clocks of ranks that take turns ----------------------------------------------------------------------------


def entries(*rows: tuple[Any, ...]) -> list[Any]:
    """Return entries of (begin, end, the ranks of a transfer or None, its axes)."""
    transfer = Transfer("all_reduce", ("data",), torch.float32, 4, ranks=2)
    return [
        measure.Entry(begin, end, 0, Start(transfer, i, 0) if ranks else operation("op"), ranks or ())
        for i, (begin, end, ranks) in enumerate(rows)
    ]  # fmt: skip


def operation(name: str, live: int = 0, phase: Any = "forward") -> Operation:
    return Operation(name, "elementwise", torch.float32, 0, 0, live, None, phase)


def test_ranks_that_take_turns_have_clocks_as_if_they_computed_at_once() -> None:
    # Rank 0 computes for 2 s, waits while rank 1 computes for 5 s, and goes on for 1 s; the exchange takes 0.5 s.
    first = Record(10.0, 19.0, 0, entries((10.0, 12.0, None), (12.0, 18.0, (0, 1)), (18.0, 19.0, None)))
    second = Record(12.0, 22.0, 0, entries((12.0, 17.0, None), (17.0, 17.5, (0, 1)), (19.5, 22.0, None)))
    got = [[(e.start, e.end) for e in r.entries] for r in own_clocks([first, second])]
    assert got == [[(0.0, 2.0), (2.0, 5.5), (5.5, 6.5)], [(0.0, 5.0), (5.0, 5.5), (7.5, 10.0)]]
    assert [r.end for r in own_clocks([first, second])] == [6.5, 10.0]


def test_clocks_of_groups_are_those_of_their_own_ranks() -> None:
    # Ranks 0 and 1 meet, then 2 and 3, then 1 and 2, whose clocks differ.
    rows = [
        Record(0.0, 9.0, 0, entries((1.0, 9.0, (0, 1)))),
        Record(1.0, 9.0, 0, entries((3.0, 3.0, (0, 1)), (5.0, 9.0, (1, 2)))),
        Record(5.0, 9.0, 0, entries((5.0, 6.0, (2, 3)), (6.5, 6.5, (1, 2)))),
        Record(5.0, 9.0, 0, entries((6.0, 6.0, (2, 3)))),
    ]
    got = [[(e.start, e.end) for e in r.entries] for r in own_clocks(rows)]
    assert got == [[(1.0, 2.0)], [(2.0, 2.0), (4.0, 4.0)], [(0.0, 1.0), (1.5, 4.0)], [(1.0, 1.0)]]


# --- timelines ------------------------------------------------------------------------------------------------


def test_transfer_lasts_from_its_start_to_the_end_of_the_wait_for_it() -> None:
    transfer = Transfer("all_gather", ("data", "model"), torch.float32, 8, None, "backward", ranks=4)
    started = [(Start(transfer, i, at), (0, 1)) for i, at in enumerate((0, 3, 5, 8))]
    waits = [(Wait(i, at),) for i, at in ((0, 2), (1, 4), (2, 6))]
    product, total = (operation("aten.mm", 1, "backward"),), (operation("aten.add", 8),)
    rows = [started[0], product, waits[0], started[1], waits[1], started[2], waits[2], started[3], total]
    times = [(0, 0.5), (1, 1.5), (2, 2.5), (3, 3.5), (3.5, 3.5), (4, 4.5), (5, 5.5), (6, 6.5), (7, 7.5)]
    entries = [measure.Entry(*at, 10 + i, *row) for i, (at, row) in enumerate(zip(times, rows, strict=True))]
    got = measure.timeline(0, "rank 0", Record(-1.0, 9.0, 7, entries))
    start, wait = (f"{verb} all_gather over data+model" for verb in ("start", "wait for"))
    assert [(s.name, s.start, s.end) for s in got.compute] == [
        (start, 0, 0.5), ("aten.mm", 1, 1.5), (wait, 2, 2.5), (wait, 3, 3.5), (wait, 4, 5.5), (start, 6, 6.5),
        ("aten.add", 7, 7.5),
    ]  # fmt: skip
    assert [s.phase for s in got.compute] == ["forward", *["backward"] * 5, "update"]
    (moved,) = got.transfers.values()
    assert [(s.start, s.end) for s in moved] == [(0, 2.5), (3, 3.5), (4, 5.5), (6, 9.0)]
    assert [s.facts.get("note") for s in moved] == [None, None, None, "never waited for"]
    assert moved[0].facts == {"sent_bytes": 24, "argument_bytes": 8, "dtype": "f32", "ranks": 4}
    assert got.memory[:4] == ((-1.0, 7), (0, 10), (0.5, 0), (1, 11))  # at first, a peak, at the end, the next peak


def test_timed_comm_reports_each_start_and_wait_around_those_of_its_comm() -> None:
    log: list[str] = []

    class Inner(GroupComm):
        sizes, coords, _note = {"data": 2}, {"data": 0}, lambda *_: None

        def _group(self, *_: Any) -> Any:
            return self

        def gather(self, *_: Any) -> Any:
            log.append("gather")
            return lambda: log.append("waited") or ["result"]  # type: ignore[func-returns-value]

        def all_reduce(self, *_: Any) -> Any:
            log.append("all_reduce")
            return "result"

    class Watch:
        def begin_transfer(self, transfer: Transfer, xs: list[Tensor], into: list[Tensor]) -> int:
            assert xs == [X]
            log.append(f"begin {transfer.op} over {transfer.axes} into {into}")
            return 7

        def __getattr__(self, name: str) -> Any:
            return lambda number, *results: log.append(f"{name} {number} {results}")

    comm = TimedComm(Inner(), Watch())  # type: ignore[arg-type]
    comm.gather([X], ["buffer"], [0], ("data",))()  # type: ignore[list-item]
    comm.all_reduce(X, "max", ("data",))
    assert log == [
        "begin all_gather over ('data',) into ['buffer']", "gather", "end_start 7 ()", "begin_wait 7 ()", "waited",
        "end_transfer 7 (['result'],)", "begin all_reduce max over ('data',) into []", "all_reduce",
        "end_transfer 7 (['result'],)",
    ]  # fmt: skip


# --- Chrome's format --------------------------------------------------------------------------------------------


def test_html_of_a_trace_is_a_strip_for_each_lane() -> None:
    def lane(*rows: tuple[str, float, float]) -> tuple[Slice, ...]:
        facts = lambda kind: {"waits_for": "psum"} if kind == "wait" else {}  # noqa: E731
        return tuple(Slice(kind, a, b, "", kind, facts(kind)) for kind, a, b in rows)

    compute = lane(("forward", 1.0, 3.0), ("backward", 3.0, 3.49), ("forward", 3.49, 3.491), ("wait", 4.0, 5.0))
    rank = Timeline(0, "rank 0", compute, {"data": lane(("backward", 2.0, 5.0))}, ((1.0, 2048),))
    html = fs.planning.Trace({"data": 1}, "measured", (rank,))._repr_html_()
    strips = [[(title, int(width)) for title, width in re.findall('title="([^"]*)".*?width: ([0-9]+)%', line)]
              for line in html.splitlines() if "title=" in line]  # fmt: skip
    assert strips == [
        [("forward, 0.000 to 2000.000 ms", 50), ("backward, 2000.000 to 2480.000 ms", 12),
         ("idle, 2480.000 to 3000.000 ms", 13), ("wait, 3000.000 to 4000.000 ms", 25)],
        [("idle, 0.000 to 1000.000 ms", 25), ("backward, 1000.000 to 4000.000 ms", 75)],
    ]  # fmt: skip
    assert "rank 0: operations 2.49 s, waits 1.00 s, peak memory 2.0 KiB" in html
    assert not re.search("<style|<script|<svg", html)
    empty = fs.planning.Trace({"data": 1}, "planned", (Timeline(0, "rank 0", (), {}, ()),))._repr_html_()
    assert re.findall("width: ([0-9]+)%", empty) == ["100"]


def test_transfers_that_overlap_have_a_lane_each() -> None:
    times = [(0.0, 3.0), (1.0, 2.0), (1.5, 4.0), (3.0, 5.0), (2.0, 2.0)]
    compute = (Slice("a", 0.0, 1.0), Slice("b", 1.0 - 1e-12, 2.0), Slice("c", 2.0, 2.0), Slice("d", 3.0, 4.5))
    timeline = Timeline(0, "rank 0", compute, {"data": tuple(Slice("all_gather", a, b) for a, b in times)}, ())
    events = chrome_events([timeline])
    check_format({"traceEvents": events, "displayTimeUnit": "ms"})
    lanes = {(e["ts"], e["dur"]): e["tid"] for e in events if e["ph"] == "X" and e["tid"]}
    slices = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and not e["tid"]]
    assert slices == [("a", 0.0, 1e6), ("b", 1e6, 1e6), ("c", 2e6, 0.0), ("d", 3e6, 1.5e6)]
    assert lanes[0.0, 3e6] == lanes[3e6, 2e6] == 1
    assert lanes[1e6, 1e6] == lanes[2e6, 0.0] == 2
    assert lanes[1.5e6, 2.5e6] == 3
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names == ["compute", "over data", "over data (2)", "over data (3)"]


def long_timeline(n: int) -> Timeline:
    """Return n operations of 10 lines and 2 phases, 1 us each, with a peak of memory in the middle, and 3 transfers."""
    compute = tuple(
        Slice("aten.mm", i * 1e-6, (i + 0.5) * 1e-6, f"f.py:{10 * i // n}", "backward" if 2 * i >= n else "forward",
              {"flops": 2})
        for i in range(n)
    )  # fmt: skip
    moved = tuple(Slice("all_reduce", i * 1e-6, (i + 1) * 1e-6) for i in range(3))
    memory = tuple((i * 1e-6, 10**6 if i == n // 3 else i % 7) for i in range(n))
    return Timeline(0, "rank 0", compute, {"data": moved}, memory)


@pytest.mark.parametrize(
    ("most", "slices", "note"),
    [
        (10_000, 1000, ""),
        (200, 10, "operations are folded by line"),
        (20, 2, "operations are folded by phase"),
        (4, 1, "operations are folded by phase; what starts after 0.000 ms is left out"),
    ],
)
def test_long_timelines_are_folded_until_they_fit(most: int, slices: int, note: str) -> None:
    whole = long_timeline(1000)
    timeline, said = fitted(whole, most)
    assert (len(timeline.compute), said) == (slices, note)
    assert len([e for e in chrome_events([timeline]) if e["ph"] != "M"]) <= most + 4
    check_format({"traceEvents": chrome_events([timeline]), "displayTimeUnit": "ms"})
    if "left out" not in note:
        assert sum(s.facts["flops"] for s in timeline.compute) == 2000
        assert max(n for _, n in timeline.memory) == 10**6
        assert timeline.end == whole.end


def test_more_ranks_than_fit_are_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("fshard.planning.trace"), "MOST_EVENTS", 40)
    monkeypatch.setattr(importlib.import_module("fshard.planning.trace"), "LEAST_EVENTS", 20)
    f = fs.shard_map(lambda x: x.sin(), mesh=fs.make_mesh(kind="simulated", data=4), in_specs=(P("data"),),
                     out_specs=P("data"))  # fmt: skip
    run = fs.trace(f, X)
    assert [t.rank for t in run.timelines] == [0, 1]
    assert run.notes == ("the first 2 of 4 ranks are shown",)
    assert run.json()["otherData"]["notes"] == "the first 2 of 4 ranks are shown"


# --- planned runs -----------------------------------------------------------------------------------------------


def test_trace_of_a_planned_run_is_its_roofline_and_its_memory() -> None:
    mesh, specs = fs.make_mesh(kind="simulated", data=2), {"w": P("data")}

    @fs.shard_map(mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P()), donate=0)
    def step(params: Any, x: Tensor) -> Any:
        def loss(p: Any) -> Tensor:
            return fs.psum((x @ fs.unshard(p, specs, "data")["w"]).sin().sum(), "data")

        value, grads = fs.value_and_grad(loss)(params)
        return fs.tree.map(lambda w, g: w - g, params, grads), value

    state, batch = fs.device_put({"w": X[:4]}, specs, mesh), X
    planned = fs.plan(step, state, batch, device=fs.devices.H100)
    estimate = fs.planning.roofline(planned.events, planned.mesh, fs.devices.H100)
    run = fs.trace(step, state, batch, device=fs.devices.H100)
    check_format(run.json())
    assert run.result is None
    assert fs.device_get(state)
    (timeline,) = run.timelines
    assert run.seconds == pytest.approx(estimate.seconds)
    waits = sum(s.end - s.start for s in timeline.compute if "waits_for" in s.facts)
    assert waits == pytest.approx(sum(estimate.exposed.values()))
    assert sum(s.facts.get("flops", 0) for s in timeline.compute) == sum(planned.flops.values())
    assert max(n for _, n in timeline.memory) == planned.memory.peak
    got = [(s.name, s.facts["sent_bytes"]) for s in timeline.transfers["data"]]
    assert got == [(t.op, t.sent) for t in planned.transfers]
    lane = [(s.start, s.end) for s in estimate.lanes if s.lane == "data"]
    assert [(s.start, s.end) for s in timeline.transfers["data"]] == lane


# --- errors -----------------------------------------------------------------------------------------------------


def test_wrong_calls_are_named_before_anything_runs(tmp_path: Path) -> None:
    mesh = fs.make_mesh(kind="abstract", data=2)
    f = fs.shard_map(lambda x: x.undefined, mesh=mesh, in_specs=(P("data"),), out_specs=P("data"))
    assert error_text(lambda: fs.trace(f, X)) == (
        "trace: <lambda> is on an abstract mesh, where nothing takes time\n"
        "  fix: name the device to estimate the times of: device=fs.devices.H100"
    )
    f = f.on(fs.make_mesh(kind="simulated", data=2))
    assert error_text(lambda: fs.trace(f, X, path="step.png")) == (
        "trace: step.png: Perfetto knows a trace by the end of its name\n"
        '  fix: path="step.json", or "step.json.gz" for a compressed file'
    )
    none = tmp_path / "none"
    assert error_text(lambda: fs.trace(f, X, path=none / "step.json")) == (
        f"trace: cannot write {none}/step.json\n  there is no folder {none}\n"
        "  fix: name a file in a folder that is there and writable"
    )
    (tmp_path / "a.json").mkdir()
    assert "it is a folder" in error_text(lambda: fs.trace(f, X, path=tmp_path / "a.json"))
    with pytest.raises(AttributeError, match="undefined"):
        fs.trace(f, X, path=tmp_path / "step.json")
    assert os.listdir(tmp_path) == ["a.json"]


def test_file_that_cannot_be_written_leaves_the_earlier_one(
    traced: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = traced[0].save(tmp_path / "step.json")
    before = file.read_bytes()

    def full(path: Path, data: bytes) -> int:
        with path.open("wb") as f:
            f.write(data[:10])
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    assert "No space left on device" in error_text(lambda: traced[0].save(tmp_path / "step.json"))
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["step.json"]


@pytest.mark.gpu
def test_slices_on_cuda_are_times_of_the_device() -> None:
    mesh = fs.make_mesh(kind="simulated", device="cuda", data=2)
    f = fs.shard_map(lambda x: fs.psum((x @ x.T).sum(), "data"), mesh=mesh, in_specs=(P("data"),), out_specs=P())
    x = torch.ones(4096, 2048, device="cuda")
    run = fs.trace(f, x)
    check_format(run.json())
    (product,) = (s for s in run.timelines[0].compute if s.name == "aten.mm")
    assert product.end - product.start > 2 * 2048**3 / 5e15  # faster than any device
    assert float(fs.device_get(run.result)) == 2 * 2048**3
