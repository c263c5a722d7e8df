"""Plots: the numbers that they draw are those of the plan, of the trace and of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard._core.transfers import Transfer
from fshard.planning import Memory, Operation, Plan, PlanTable, Start, Trace, Wait, roofline
from fshard.planning.chrome import Timeline
from tests.lib.assertions import error_text

DEVICE = fs.devices.Device("toy", {torch.float32: 1e6}, 3000, 1e5, (fs.devices.Link("wire", None, 1e4, 0.0),))


def planned(*events: Any, device: Any = None, **parts: int) -> Plan:
    """Return a plan of some events on two ranks; its peak is that of the events."""
    live = [e.live for e in events]
    at = live.index(max(live)) if live else 0
    memory = Memory(max(live, default=100), at, None, parts, 100)
    transfers = tuple(e.transfer for e in events if isinstance(e, Start))
    time = roofline(events, {"data": 2}, device) if device else None
    return Plan({"data": 2}, 0, events, memory, transfers, {}, device, time)


def operation(phase: Any, live: int, flops: int = 0, nbytes: int = 1000) -> Operation:
    return Operation("aten.mm", "matmul" if flops else "elementwise", torch.float32, flops, nbytes, live, None, phase)


def transfer(op: str, nbytes: int, ranks: int = 2) -> Any:
    return Transfer(op, ("data",), torch.float32, nbytes, ranks=ranks)


EVENTS = (
    operation("forward", 1024, 20_000),  # 0.02 s, and 0.01 s of memory: 20 FLOPs a byte
    Start(transfer("all_gather", 300), 0, 2048),  # 0.03 s
    operation("forward", 2048, 1000),  # 0.011 s
    Wait(0, 2048),  # 0.019 s of it are waited for
    operation("backward", 4096),
    operation("update", 512),
)
LIVE = [100, 1024, 2048, 2048, 2048, 4096, 512]


def points(figure: Any, axes: int = 0) -> list[list[tuple[float, float]]]:
    """Return the points of each line."""
    return [[(float(x), float(y)) for x, y in line.get_xydata()] for line in figure.axes[axes].lines]


def texts(figure: Any, axes: int = 0) -> list[str]:
    a = figure.axes[axes]
    return [*(t.get_text() for t in a.texts), a.get_title(), a.get_xlabel(), a.get_ylabel()]


def bars(figure: Any, axes: int = 0) -> list[tuple[float, float]]:
    """Return the lower left corner's place along the bar, and the length, of each bar that has one."""
    boxes = [p for p in figure.axes[axes].patches if p.get_width() and p.get_height()]
    return [(round(p.get_x(), 6), round(p.get_width(), 6)) for p in boxes]


def test_memory_of_a_plan_by_event_and_by_time() -> None:
    figure = fs.plot.memory(planned(*EVENTS, parameters=1024, activations=3072))
    *lines, peak = points(figure)
    forward, backward, update = lines
    assert [*forward, *backward[1:], *update[1:]] == [(i, n / 1024) for i, n in enumerate(LIVE)]
    assert (forward[-1], backward[-1]) == (backward[0], update[0])  # phases are joined
    assert peak == [(5, 4.0)]
    assert texts(figure)[0] == "4.0 KiB"
    assert texts(figure)[-2:] == ["operations and transfers", "KiB"]
    assert texts(figure, 1)[:2] == ["parameters 1.0 KiB", "activations 3.0 KiB"]
    assert [(p.get_y(), p.get_height()) for p in figure.axes[1].patches] == [(0.0, 1.0), (1.0, 3.0)]
    timed = fs.plot.memory(planned(*EVENTS, device=DEVICE, parameters=4096))
    assert [x for x, _ in points(timed)[0]] == pytest.approx([0, 30, 30, 41, 60])  # ms
    assert points(timed)[-1][0][1] == 3000 / 1024  # the device's memory, which the step exceeds
    assert timed._repr_png_().startswith(b"\x89PNG")


def test_memory_of_a_trace_has_a_line_for_each_rank() -> None:
    ranks = tuple(Timeline(r, f"rank {r}", (), {}, ((5.0 + r / 4, 512), (5.5, 2048 * (r + 1)))) for r in range(2))
    figure = fs.plot.memory(Trace({"data": 2}, "measured", ranks))
    assert points(figure) == [[(0.0, 0.5), (500.0, 2.0)], [(250.0, 0.5), (500.0, 4.0)]]
    assert [t.get_text() for t in figure.axes[0].get_legend().get_texts()] == ["rank 0", "rank 1"]


def test_roofline_has_a_point_for_each_line_and_the_share_of_its_time() -> None:
    figure = fs.plot.roofline(planned(*EVENTS, device=DEVICE))
    (axes,) = figure.axes
    found = sorted(tuple(map(float, p)) for dots in axes.collections for p in dots.get_offsets())
    assert found == [(10.5, pytest.approx(21_000 / 0.041))]  # both products of one line: 21,000 FLOPs, 2,000 bytes
    assert axes.get_legend().get_texts()[0].get_text() == "51%  aten.mm f32"  # of 0.08 s
    assert "25% in operations without FLOPs" in axes.get_title()
    assert texts(figure)[0] == "f32 1e-06 TFLOP/s"


def test_traffic_is_seconds_with_a_device_and_bytes_sent_without() -> None:
    figure = fs.plot.traffic(planned(*EVENTS, device=DEVICE))
    assert bars(figure) == [(0.0, 61.0), (0.0, 11.0), (11.0, 19.0)]  # operations; hidden, and waited for
    sent = fs.plot.traffic(planned(*EVENTS, Start(transfer("all_reduce", 100, 4), 1, 0), Wait(1, 0)))
    assert bars(sent) == [(0.0, 300.0), (300.0, 150.0)]  # of 4 ranks: 2 (4-1)/4 of the bytes
    assert "sent by the rank in a step, B" in texts(sent)


def test_losses_of_files_and_folders(tmp_path: Path) -> None:
    rows = [{"step": i, "loss": float(i % 2)} for i in range(4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 4, "lo')
    for path in (tmp_path, tmp_path / "metrics.jsonl", str(tmp_path)):
        each, mean = points(fs.plot.losses(path, window=2))
        assert each == [(0, 0), (1, 1), (2, 0), (3, 1)]
        assert mean == [(1, 0.5), (2, 0.5), (3, 0.5)]
    both = fs.plot.losses({"a": tmp_path, "b": tmp_path})
    assert len(points(both)) == 4
    assert [t.get_text() for t in both.axes[0].get_legend().get_texts()] == ["a", "b"]


def test_what_cannot_be_drawn_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "metrics.jsonl"
    wrong = {
        "cannot be read": lambda: fs.plot.losses(tmp_path / "none"),
        "line 1 is not a step with a loss\n  broken": lambda: (file.write_text("broken\n{}\n"), fs.plot.losses(file)),
        "has no step": lambda: (file.write_text('{"step": 1, "loss"'), fs.plot.losses(file)),
        "window must be a number of steps, 1 or more, got 0": lambda: fs.plot.losses(file, window=0),
        "no run is named": lambda: fs.plot.losses({}),
        "plot.roofline: the plan names no device": lambda: fs.plot.roofline(planned(*EVENTS)),
        "no operation of the step has FLOPs": lambda: fs.plot.roofline(planned(EVENTS[4], device=DEVICE)),
        "has no transfer, and no device": lambda: fs.plot.traffic(planned(EVENTS[0])),
        "no operation and no transfer": lambda: fs.plot.memory(planned()),
        "the trace has no timeline": lambda: fs.plot.memory(Trace({"data": 2}, "measured", ())),
        "a Trace, got 'plan'\n  fix: fs.plan(step, *args), or fs.trace": lambda: fs.plot.memory("plan"),
        "got a PlanTable\n  fix: table[0].plan, the plan of": lambda: fs.plot.memory(PlanTable((), DEVICE)),
        "got a Trace\n  fix: fs.plan(step, *args)": lambda: fs.plot.traffic(Trace({"data": 2}, "measured", ())),
    }
    for text, call in wrong.items():
        assert text in error_text(call)

    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(fs.plot, "import_module", missing)
    assert error_text(lambda: fs.plot.losses(file)) == (
        "plot.losses: needs matplotlib, which is not installed\n  fix: pip install 'fshard[plot]'"
    )
