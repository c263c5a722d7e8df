"""Tables of plans: each row is the plan of its layout, and fast ones that fit are first; a search finds the same."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P
from fshard._core.display import duration
from fshard.planning import PlanRow, PlanTable, divisions, search
from fshard.planning.devices import H100, Device, Link
from fshard.planning.plan import plan_ranks
from fshard.planning.repeat import Repeats
from fshard.planning.search import rank_bytes
from fshard.spec import size
from tests.lib.assertions import error_text

WIDTH, BLOCKS = 24, 6
# Slow links and units, so that times differ, and a memory that some layouts do not fit in.
SMALL = Device("small", {torch.float32: 1e9, torch.bfloat16: 2e9}, 270 * 1024, 1e9, (*H100.links,))
LAYOUTS = [
    {**sizes, "remat": remat, "batch": 512} for sizes in divisions(4, data=4, model=2) for remat in (True, False)
]


def step_of(
    data: int, remat: bool, batch: int, model: int = 1, blocks: int = BLOCKS, dtype: torch.dtype = torch.float32
) -> Any:
    """A step of an MLP: two matrices a block, split over model and data."""
    mesh = fs.make_mesh(kind="abstract", data=data, model=model)
    described = [{"up": fs.init.zeros((WIDTH, 2 * WIDTH)), "down": fs.init.zeros((2 * WIDTH, WIDTH))}] * blocks
    params = fs.tree.map(lambda x: fs.init.zeros(x.shape), described)  # no ties
    specs = fs.fully_shard([{"up": fs.column("model"), "down": fs.row("model")}] * blocks, params, axis="data")

    def block(p: Any, x: Any) -> Any:
        h = torch.relu(fs.pvary(x, "model") @ p["up"])
        return x + fs.psum(h @ p["down"], "model")

    def loss(p: Any, x: Any) -> Any:
        out = fs.scan(block, p, x.to(dtype), specs=specs, axis="data", remat=remat, dtype=dtype)
        return fs.pmean(out.float().square().mean(), "data")

    def step(params: Any, x: Any) -> Any:
        value, grads = fs.value_and_grad(loss)(params, x)
        return fs.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    f = fs.shard_map(step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P()), donate=0)
    return f, (params, fs.init.zeros((batch, WIDTH)))


def sum_of(batch: int, data: int = 2) -> Any:
    """A step of one transfer."""
    mesh = fs.make_mesh(kind="abstract", data=data)
    f = fs.shard_map(lambda x: fs.psum(x.sum(), "data"), mesh=mesh, in_specs=(P("data"),), out_specs=P())
    return f, (fs.init.zeros((batch, 1024)),)


@pytest.fixture(scope="module")
def table() -> PlanTable:
    return fs.plan_table(step_of, LAYOUTS, device=SMALL, tokens=lambda batch, **_: batch, headroom=0.0)


def test_a_row_has_the_numbers_of_the_plan_of_its_layout(table: PlanTable):
    assert sorted(map(str, (row.layout for row in table))) == sorted(map(str, LAYOUTS))
    row = table[0]
    f, args = step_of(**row.layout)
    plan = fs.plan(f, *args, device=SMALL)
    assert plan.time is not None
    assert (row.peak, row.seconds, row.mfu) == (plan.memory.peak, plan.time.seconds, plan.time.mfu)
    assert (row.sent, row.devices, row.tokens) == (sum(t.sent for t in plan.transfers), 4, 512)
    assert row.rate == 512 / plan.time.seconds / 4


def test_rows_that_fit_come_first_and_the_fastest_of_them(table: PlanTable):
    fits = [row.fits for row in table]
    n = sum(map(bool, fits))
    assert 0 < n < len(table)
    assert fits == [True] * n + [False] * (len(table) - n)
    assert [row.fits for row in table] == [row.peak <= SMALL.memory for row in table]  # type: ignore[operator]
    times = [row.seconds for row in table]
    assert times[:n] == sorted(times[:n])  # type: ignore[type-var]
    peaks = [row.peak for row in table]
    assert peaks[n:] == sorted(peaks[n:])  # type: ignore[type-var]
    assert times != sorted(times)  # type: ignore[type-var]  # the fastest of all does not fit


def uneven(kind: str, data: int = 4) -> Any:
    """A step that is refused: by the size of a leaf, by the statistics of its norm, or by two leaves."""
    mesh, x = fs.make_mesh(kind="abstract", data=data), fs.init.zeros((12, 10))
    if kind == "leaves":
        w = {name: fs.init.zeros((4,)) for name in "ab"}
        specs = {"a": P(None, "data"), "b": P("model")}
        return fs.shard_map(lambda w: w, mesh=mesh, in_specs=(specs,), out_specs=specs), (w,)
    if kind == "size":
        w = {"a": fs.init.zeros((10, 8)), "b": fs.init.zeros((8, 10))}
        f = fs.shard_map(lambda w: fs.unshard({k: 2 * x for k, x in w.items()}, P("data"), "data")["a"], mesh=mesh,
                         in_specs=(P("data"),), out_specs=P("data"))  # fmt: skip
        return f, (w,)
    apply, module = fs.defer(lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(10), torch.nn.Dropout(0.5)))
    apply = apply.draws_over("data")
    f = fs.shard_map(lambda p, b, x: apply.with_buffers(p, b, x, key=fs.key(0))[0], mesh=mesh,
                     in_specs=(P(), P(), P("data")), out_specs=P("data"))  # fmt: skip
    return f, (module["params"], module["buffers"], x)


def test_error_of_a_row_has_its_fix_in_all_lines_and_the_first_of_several_problems():
    size, norms, leaves = (repr(fs.plan_table(uneven, [{"kind": kind}])) for kind in ("size", "norms", "leaves"))
    fix = "pass shapes=, the described tree, such as init(); or make dim 0 of w['a'] a multiple of 4, such as 12"
    assert f"; fix: {fix}" in size
    assert "or apply.eval(); or apply.batch_norm_over(None), if each rank has channels or a model of its own" in norms
    assert "error: 2 problems: <lambda>: args[0]['a']: the spec is longer" in leaves
    assert "; fix: " in leaves


def test_without_a_device_rows_are_in_the_order_of_their_peaks():
    got = fs.plan_table(sum_of, [{"batch": 64}, {"batch": 8}])
    peaks = [row.peak for row in got]
    assert peaks == sorted(peaks)  # type: ignore[type-var]
    assert [(row.fits, row.seconds, row.rate, row.mfu) for row in got] == [(None, None, None, None)] * 2
    assert "step" not in repr(got)


def test_layouts_of_different_batches_are_compared_by_their_rate():
    layouts = [{"batch": n} for n in (4, 64)]
    by_rate = fs.plan_table(sum_of, layouts, device=H100, tokens=lambda batch: batch)
    (wrong, *_) = fs.plan_table(sum_of, layouts, device=H100, tokens=lambda layout: 1)
    assert "plan_table: tokens(**layout): " in str(wrong.error)
    by_time = fs.plan_table(sum_of, layouts, device=H100)
    assert [row.layout["batch"] for row in by_rate] == [64, 4]
    assert [row.layout["batch"] for row in by_time] == [4, 64]


def test_the_headroom_is_memory_that_a_step_must_leave():
    (row,) = fs.plan_table(sum_of, [{"batch": 8}], device=H100)
    assert row.peak is not None
    for share, fits in ((0.0, True), (0.1, False)):
        device = dataclasses.replace(SMALL, memory=row.peak)
        (got,) = fs.plan_table(sum_of, [row.layout], device=device, headroom=share)
        assert got.fits is fits
    assert "must be a share in [0, 1), got 1.0" in error_text(fs.plan_table, step_of, LAYOUTS, headroom=1.0)


def test_errors_of_any_kind_stay_in_their_rows():
    def fails(data: int, why: str) -> Any:
        if why == "kind":
            raise KeyError("<b>no</b>")
        return 3 if why == "no pair" else sum_of(8, data)

    layouts = [{"data": 2, "why": why} for why in ("kind", "none", "no pair")] + [{"data": 2}, {"data": 0, "why": ""}]
    got = fs.plan_table(fails, layouts, device=H100)
    assert [row.error is None for row in got] == [True, False, False, False, False]
    words = [row["error"] for row in got.as_dict()["rows"][1:]]
    assert sorted(text.partition(":")[0] for text in words) == [
        "KeyError",
        "TypeError",
        "make_mesh(data=0)",
        "plan_table",
    ]
    assert "the result of step_of must be a pair (f, args)" in "".join(words)
    assert repr(got).count("error: ") == 4
    html = got._repr_html_()
    assert "&lt;b&gt;no" in html
    assert "<b>no" not in html
    assert error_text(fs.plan_table, step_of, []).startswith("plan_table: layouts is empty")


def test_a_table_as_text_html_and_json(table: PlanTable):
    lines = repr(table).splitlines()
    assert lines[0] == "4 layouts on 4 small of 270.0 KiB; batch=512; of each device"
    assert lines[1].split() == ["data", "model", "remat", "peak", "memory", "sent", "step", "tokens/s", "MFU"]
    assert len(lines) == 7
    assert len({line.index("%") for line in lines[2:6]}) == 1  # columns are aligned
    assert all(line.count("≥") == 1 and line.count("≤") == 2 for line in lines[2:6])
    assert lines[6].startswith("seconds are a lower bound")
    html = table._repr_html_()
    assert html.count("<tr") >= 5
    assert "parameters " in html
    assert not re.search("<style|<script|http", html)
    data = json.loads(json.dumps(fs.plan_table(lambda batch, data, **_: sum_of(batch, data), [
        {"data": 2, "remat": True, "batch": 4, "dtype": torch.bfloat16}]).as_dict()))  # fmt: skip
    (row,) = data["rows"]
    assert row["layout"] == {"data": 2, "remat": True, "batch": 4, "dtype": "bfloat16"}
    assert sum(row["parts"].values()) == row["peak_bytes"]
    assert (row["seconds"], row["fits"], data["device"]) == (None, None, None)


def test_progress_is_a_line_for_each_layout_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]):
    fs.plan_table(sum_of, [{"batch": 8}, {"data": 1}], progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith("1/2  batch=8: 16.0 KiB")
    assert second.startswith("2/2  data=1: error: TypeError: sum_of() missing")


# --- search ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_search_predicts_whole_plans_and_finds_what_a_table_finds(table: PlanTable):
    got = search(step_of, LAYOUTS, device=SMALL, tokens=512, headroom=0.0, best=1, blocks=BLOCKS)
    whole = {str(row.layout): row for row in table}
    assert [row.layout for row in got if row.fits] == [row.layout for row in table if row.fits]
    assert [row.plan is not None for row in got] == [True] + [False] * (len(got) - 1)
    predicted = [row for row in got if row.seconds is not None]
    assert len(predicted) >= 3
    for row in predicted:
        want = whole[str(row.layout)]
        assert row.peak == want.peak, row.layout
        assert row.sent == want.sent
        assert row.seconds == pytest.approx(want.seconds, rel=1e-9)
        assert row.mfu == pytest.approx(want.mfu, rel=1e-9)


def sines(count: Callable[[int], int], blocks: int = 9, rows: int = 16) -> Any:
    """A step of so many operations after a large one, all of one line, and a sum over all of them."""
    run = lambda f, *args: f(*args)  # noqa: E731

    def loss(x: Any) -> Any:
        sums = [run(torch.Tensor.repeat, x.detach(), 20, 1).sum()]
        sums += [(x := run(torch.sin, x)).sum() for _ in range(count(blocks))]
        return fs.psum(torch.stack(sums).sum(), "data")

    mesh = fs.make_mesh(kind="abstract", data=2)
    f = fs.shard_map(fs.grad(loss), mesh=mesh, in_specs=(P("data"),), out_specs=P("data"))
    return f, (fs.init.zeros((rows, 8)),)


@pytest.mark.parametrize(("make", "n"), [
    pytest.param(functools.partial(step_of, data=4, remat=True, batch=512), 7, marks=pytest.mark.slow),
    (functools.partial(sines, lambda n: n, rows=15), 40),  # uneven
])  # fmt: skip
def test_a_plan_of_many_blocks_from_two_plans_of_few_is_that_of_a_direct_one(make: functools.partial[Any], n: int):
    few, more, many = (plan_ranks(*make(blocks=blocks), SMALL) for blocks in (4, 5, n))
    assert len(many) == (2 if "rows" in make.keywords else 1)
    for a, b, want in zip(few, more, many, strict=True):
        repeats = Repeats.of(4, a, b)
        assert repeats is not None
        got = repeats.plan(n)
        assert (got, repeats.peak(n), repr(got)) == (want, want.memory.peak, repr(want))


def test_the_peak_of_many_blocks_may_be_at_another_event():
    """That of a few is before the blocks. Both events are of one line and phase: its peaks tell too little."""
    few, more, many = (plan_ranks(*sines(lambda n: n, n), SMALL)[0] for n in (4, 5, 40))
    repeats = Repeats.of(4, few, more)
    assert repeats is not None
    by_peaks = few.memory.peak + 36 * (more.memory.peak - few.memory.peak)
    assert repeats.peak(40) == many.memory.peak > 1.05 * by_peaks
    on_host = dataclasses.replace(few, memory=dataclasses.replace(few.memory, host=1))
    assert Repeats.of(4, on_host, more) is None  # host memory has a peak of its own


@pytest.mark.parametrize("counts", [{5: 14}, {6: 7, 9: 10}, {5: 14, 7: 11}])
def test_blocks_that_do_not_repeat_are_planned_directly(counts: dict[int, int]):
    """Steps of some numbers of blocks have more operations than others."""
    make = functools.partial(sines, lambda n: counts.get(n, n))
    (row,) = search(make, [{}], device=SMALL, blocks=9)
    (want,) = plan_ranks(*make(), SMALL)
    assert row.plan is not None
    assert want.time is not None
    assert (row.peak, row.seconds, len(row.plan.events)) == (want.memory.peak, want.time.seconds, len(want.events))


def test_a_layout_that_a_whole_plan_does_not_rule_out_may_be_among_the_best():
    """The predicted row, with 9 sines, would: one is in the whole plan."""
    make = functools.partial(sines, lambda n: {6: 7, 9: 1}.get(n, n))
    got = search(make, [{}, {"rows": 32}], device=SMALL, best=1, blocks=9, work=lambda **_: 2,
                 least=lambda a, row: (0, 0.9 * row.seconds))  # fmt: skip
    assert "1 more layouts are not planned, and may be among the best 1: rows=32, takes at least" in got.note


def test_a_layout_whose_arguments_do_not_fit_is_not_planned():
    calls = []

    def counted(**layout: Any) -> Any:
        f, args = step_of(**layout)
        run = fs.shard_map(lambda *xs: calls.append(1), mesh=f.mesh, in_specs=f._in_specs, out_specs=P())
        return run, args

    (row,) = search(counted, LAYOUTS[:1], device=dataclasses.replace(SMALL, memory=10_000), blocks=BLOCKS)
    f, args = step_of(**LAYOUTS[0])
    assert (calls, row.fits, row.note) == ([], False, "its arguments alone do not fit")
    assert row.peak == rank_bytes(args, f._in_specs, f.mesh.axes)


def test_argument_bytes_are_those_that_a_plan_counts():
    mesh = fs.make_mesh(kind="abstract", data=3)
    x = fs.init.zeros((7, 5))
    tree = {"uneven": x, "whole": fs.init.zeros((4,)), "host": fs.init.zeros((6,)), "n": 3, "chosen": fs.init.zeros(6)}
    specs = {"uneven": P("data"), "whole": P(), "host": P("data", memory="host"), "n": P(),
             "chosen": P("data", lengths=(0, 4, 2))}  # fmt: skip
    f = fs.shard_map(lambda t: t["whole"].sum(), mesh=mesh, in_specs=(specs,), out_specs=P())
    assert rank_bytes(tree, specs, mesh.axes) == 4 * (3 * 5 + 4 + 4)  # of 7 rows, 3 and 3 and 1
    memory = fs.plan(f, tree, device=H100).memory
    assert memory.arguments - memory.host == 4 * (3 * 5 + 4 + 4)


def test_layouts_that_others_rule_out_are_not_made():
    made = []

    def counted(size: int, blocks: int | None = None, **_: Any) -> Any:
        made.append(size)
        return sum_of(size, 1)

    sizes = [{"size": n} for n in (8, 16, 4000, 4, 8000)]
    slower = lambda a, b: a["size"] < b["size"]  # noqa: E731
    heavier = lambda a, b: a["size"] > b["size"]  # noqa: E731
    device = dataclasses.replace(SMALL, memory=10_000_000)
    got = search(counted, sizes, device=device, heavier=heavier, slower=slower, neighbours=lambda size: [{"size": 20}])
    assert made == [8, 16, 4000, 20]
    notes = {row.layout["size"]: row.note for row in got}
    assert notes[4] == "takes longer than size=8, which fits"
    assert notes[8000] == "needs more than size=4000, which does not fit"
    assert [row.layout["size"] for row in got if row.plan is not None and row.fits] == [8, 16, 20]


@pytest.mark.slow
def test_a_search_goes_on_until_enough_layouts_fit(monkeypatch: pytest.MonkeyPatch):
    """A prediction that is too low is found out by the whole plan."""
    monkeypatch.setattr(Repeats, "peak", lambda repeats, blocks: 1)
    got = search(step_of, LAYOUTS[:2], device=SMALL, headroom=0.0, best=1, blocks=BLOCKS)
    assert [(row.layout["remat"], row.fits, row.plan is not None) for row in got] == [
        (True, True, True), (False, False, True)]  # fmt: skip


def test_errors_of_a_search():
    assert error_text(search, step_of, LAYOUTS, device=SMALL, best=0) == "search: best=0\n  fix: 1 or more"
    assert error_text(search, step_of, LAYOUTS, device=SMALL, blocks=-1).startswith("search: blocks=-1")
    assert error_text(search, step_of, divisions(7, data=3), device=SMALL).startswith("search: layouts is empty")
    assert error_text(search, step_of, LAYOUTS, device=SMALL, headroom=1.0).startswith("search: headroom")
    assert "Device" in error_text(search, step_of, LAYOUTS, device="h100")
    (row,) = search(lambda **_: 3, LAYOUTS[:1], device=SMALL)
    assert str(row.error).startswith("search: the result of step_of")


def test_a_model_that_fits_nowhere_says_how_far_off_it_is():
    sizes = [{"batch": 1024, "data": 2}, {"batch": 4096, "data": 2}]
    small = dataclasses.replace(SMALL, memory=2**20)
    got = search(sum_of, sizes, device=small, headroom=0.25)
    assert [row.fits for row in got] == [False, False]
    assert got.note.startswith(f"no layout fits: the smallest needs {size(got[0].peak)}, and a step may use 768.0 KiB")
    assert "the 1.0 MiB of small less 25%" in got.note
    assert got.note in repr(got)


def test_a_search_gives_the_reason_and_the_price_of_the_next_row():
    layouts = [
        {"data": 4, "model": 1, "remat": True, "batch": 512},
        {"data": 2, "model": 2, "remat": True, "batch": 512},
    ]
    slow = dataclasses.replace(SMALL, memory=2**30, links=(Link("slow", None, 1e6, 1e-6),))
    got = search(functools.partial(step_of, blocks=2), layouts, device=slow, headroom=0.0)
    first, price = got.note.splitlines()
    assert re.fullmatch(r"first: data=., model=.: (\d+% operations, )?\d+% waits for .* of [\d.]+ m?s", first)
    assert got[0].seconds is not None
    assert f" takes {(got[1].seconds or 0.0) / got[0].seconds - 1:.1%} longer: its " in price
    assert re.search(r": its (all_\w+|reduce_scatter) of [\d.]+ KiB over \w+ is exposed, [\d.]+ m?s more", price)
    remat = [{"data": 4, "model": 1, "remat": on, "batch": 512} for on in (True, False)]
    plenty = search(functools.partial(step_of, blocks=2), remat, device=dataclasses.replace(SMALL, memory=2**30))
    assert [row.layout["remat"] for row in plenty] == [False, True]
    limit = sum(row.peak or 0 for row in plenty) // 2
    small = search(functools.partial(step_of, blocks=2), remat, device=dataclasses.replace(SMALL, memory=limit),
                   headroom=0.0)  # fmt: skip
    assert [row.fits for row in small] == [True, False]
    needs = f"needs {size(plenty[0].peak or 0)} of the {size(limit)} that a step may use"
    assert f"faster, but too large: remat=no takes {duration(plenty[0].seconds or 0)}, and {needs}" in small.note
    of_two = {"data": 2, "model": 1, "remat": True, "batch": 512}  # slower, but not for each device
    rows = search(functools.partial(step_of, blocks=2), [layouts[0], of_two], device=slow, headroom=0.0, tokens=512)
    assert rows[0].layout == of_two
    assert rows[0].rate is not None
    assert rows[1].rate is not None
    assert f" takes {rows[0].rate / rows[1].rate - 1:.1%} longer" in rows.note


def test_a_share_of_a_layout_rules_out_others():
    made = []

    def counted(parts: int) -> Any:
        made.append(parts)
        return sum_of(4096 // parts, 1)

    share = lambda a, b: b["parts"] / a["parts"]  # noqa: E731
    device = dataclasses.replace(SMALL, memory=5 * 2**20)  # of 16, 8, 4 and 2 MiB
    layouts = [{"parts": n} for n in (1, 2, 4, 8)]
    got = search(counted, layouts, device=device, headroom=0.0, heavier=share)
    assert made == [1, 4, 8]
    (note,) = {row.note for row in got if row.layout["parts"] == 2}
    assert note == "needs at least 50% of the 16.0 MiB of parts=1, which does not fit"
    want = fs.plan_table(counted, layouts, device=device, headroom=0.0)
    assert [row.layout for row in got if row.fits] == [row.layout for row in want if row.fits]


def test_what_a_plan_passes_over_does_not_change_it(monkeypatch: pytest.MonkeyPatch):
    """Views, and questions of autograd for a device: with each of them looked at the plan is the same."""
    f, args = step_of(**LAYOUTS[2], blocks=2)
    fast = fs.plan(f, *args, device=SMALL)
    monkeypatch.setattr(sys.modules["fshard.planning.plan"], "is_view", lambda op: False)
    monkeypatch.setattr("fshard._core.operations._DEVICE_OF", None)
    assert fs.plan(f, *args, device=SMALL) == fast


def test_divisions_are_all_products():
    grid = itertools.product(range(1, 13), range(1, 5), range(1, 4))
    want = {sizes for sizes in grid if math.prod(sizes) == 12}
    got = divisions(12, data=12, model=4, replica=3)
    assert {tuple(sizes.values()) for sizes in got} == want
    assert len(got) == len(want)
    assert divisions(7, data=3) == []
    assert error_text(divisions, 7) == "divisions: n=7, and no axis is named\n  fix: divisions(7, data=7, model=8)"
    assert error_text(divisions, 7, data=0).startswith("divisions: data=0")


def test_a_row_prints_what_is_known():
    for shown in (PlanTable((PlanRow({"data": 2}),)), PlanRow({"data": 2})):
        assert not re.search("None|nan", repr(shown))
    assert repr(PlanRow({"data": 2}, 2, peak=2048)).splitlines()[1:] == ["data     peak", "   2  2.0 KiB"]
    assert "2.0 KiB" in PlanRow({"data": 2}, 2, peak=2048)._repr_html_()


def pipeline_of(stage: int, microbatches: int, schedule: Any = "1f1b", blocks: int = 6) -> Any:
    """A pipeline of matrices, of 32 rows."""
    f = fs.pipelined(lambda ends, x: x * ends, lambda w, h, x: torch.relu(h @ w), lambda ends, h, x: (h * ends).mean(),
                     axis="stage", microbatches=microbatches, schedule=schedule)  # fmt: skip
    specs, mesh = (P(), P("stage")), fs.make_mesh(kind="abstract", stage=stage)
    params = fs.init.zeros((WIDTH,)), fs.init.zeros((blocks, WIDTH, WIDTH))
    return fs.shard_map(f, mesh=mesh, in_specs=(specs, P()), out_specs=(P(), specs)), (params, fs.init.zeros((32, 24)))


def test_tables_and_searches_know_pipelines():
    """More microbatches wait less; a search plans each pipeline with all blocks."""
    fast = dataclasses.replace(SMALL, links=(Link("all", None, 1e15, 0.0),), bandwidth=1e15, memory=2**20)
    layouts = [{"stage": 2, "microbatches": m} for m in (2, 4)]
    rows = fs.plan_table(pipeline_of, layouts, device=fast)
    assert [row.layout["microbatches"] for row in rows] == [4, 2]
    want = [fs.schedule_table("1f1b", 2, m).bubble() for m in (4, 2)]
    assert [row.plan.bubble for row in rows] == pytest.approx(want, abs=0.01)
    assert rows[0].as_dict()["bubble"] == rows[0].plan.bubble
    assert f"stages wait {rows[0].plan.bubble:.1%}" in repr(rows)
    assert rows[0].mfu == pytest.approx(1 - want[0], abs=0.01)
    found = search(pipeline_of, layouts, device=fast, blocks=6)
    assert [(row.layout, row.peak, row.seconds) for row in found] == [
        (row.layout, row.peak, row.seconds) for row in rows
    ]
