"""Show when each rank computes and transfers: `trace`, a file for Perfetto."""

from __future__ import annotations

import functools
import gzip
import json
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fshard._core.comm import TimedComm
from fshard._core.display import duration, page
from fshard._core.files.io import Ranks, StrPath, write_errors
from fshard._core.region import region
from fshard._core.transfers import recording
from fshard.errors import checked, fail
from fshard.mesh import Mesh
from fshard.shard_map import ShardMapped
from fshard.spec import format_axes, size

from .chrome import LEAST_EVENTS, MOST_EVENTS, Slice, Timeline, chrome_events, fitted
from .device import Device
from .measure import CudaClock, HostClock, Recorder, own_clocks, timeline
from .plan import plan
from .strip import LEGEND, strip
from .table import aligned

_MOST_ROWS = 8  # ranks
_MOST_LINES = 5


@dataclass(frozen=True, repr=False)
class Trace:
    """A run of a step: the times of its operations and transfers on each rank, and the memory. Made by `trace`.

    Attributes:
        mesh: size of each axis.
        source: "measured", "simulated" (measured; each rank with its own clock) or "planned".
        timelines: one for each rank; on a process mesh rank 0 has all, and each other rank has one.
        result: what the step returned; None of a planned one.
        notes: what the timelines leave out.

    >>> run = trace(step, *args, device=fs.devices.H100)
    >>> run.source, sorted(run.json())
    ('planned', ['displayTimeUnit', 'otherData', 'traceEvents'])
    """

    mesh: dict[str, int]
    source: str
    timelines: tuple[Timeline, ...]
    result: Any = None
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Return the time from the begin of the first rank to the end of the last one."""
        return max((t.end for t in self.timelines), default=0.0) - self._start

    @property
    def _start(self) -> float:
        return min((t.start for t in self.timelines), default=0.0)

    def json(self) -> dict[str, Any]:
        """Return the trace in Chrome's format: `traceEvents`, `displayTimeUnit`, and in `otherData` the notes."""
        other = {"mesh": format_axes(self.mesh), "times": self.source, "notes": "; ".join(self.notes)}
        return {"traceEvents": chrome_events(self.timelines), "displayTimeUnit": "ms", "otherData": other}

    @checked
    def save(self, path: StrPath) -> Path:
        """Write the trace to `path`, "step.json" or, compressed, "step.json.gz"; return it. ui.perfetto.dev opens both.

        Raises ShardingError for another name, and for a file that cannot be written; an earlier file then stays.
        """
        file, text = _checked_path(path), self._file()
        new = file.with_name(f".{file.name}.new")
        with write_errors("trace", file, "an earlier file of this name is as it was"):
            try:
                new.write_bytes(gzip.compress(text, mtime=0) if file.suffix == ".gz" else text)
                os.replace(new, file)
            finally:
                new.unlink(missing_ok=True)
        return file

    def _file(self) -> bytes:
        return json.dumps(self.json(), separators=(",", ":"), allow_nan=False).encode()

    def _title(self) -> str:
        return f"trace of {format_axes(self.mesh)}, {self.source}: {duration(self.seconds)}"

    def _repr_html_(self) -> str:
        parts: list[str] = []
        for t in self.timelines[:_MOST_ROWS]:
            busy, waits, peak = _totals(t)
            parts += [f"{t.name}: operations {duration(busy)}, waits {duration(waits)}, peak memory {size(peak)}"]
            parts += [strip(t.compute, self._start, self.seconds)]
            for name, slices in t.transfers.items():
                parts += [f"over {name}: {duration(_covered(slices))}", strip(slices, self._start, self.seconds)]
        parts += [f"and {len(self.timelines) - _MOST_ROWS} more ranks"] * (len(self.timelines) > _MOST_ROWS)
        file = f'.save("step.json") writes {size(len(self._file()))}, which https://ui.perfetto.dev opens'
        return page(self._title(), LEGEND, *parts, *(f"note: {note}" for note in self.notes), file)

    def __repr__(self) -> str:
        lines = [self._title()]
        lines += [f"  {row}" for row in _rank_rows(self.timelines)]
        lines += [f"  {row}" for row in _line_rows(self.timelines)]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


@checked
def trace(f: ShardMapped, *args: Any, path: StrPath | None = None, device: Device | None = None) -> Trace:
    """Run `f` once, and return the times of its operations and transfers on each rank, and the memory over time.

    With `path`, `"step.json"` or `"step.json.gz"`, the trace is also written there, one file for all ranks: open it in
    https://ui.perfetto.dev or chrome://tracing. A rank is a process with a lane of compute, in which phases contain the
    user's lines, and lines operations; lanes of transfers, by axes, from the start to the end of the wait; and a
    counter of the bytes of the tensors in its memory: arguments, and what operations and transfers allocate.

    The call is a real one: it uses up donated arguments, and `Trace.result` is its result. It is not checked, nor
    compiled. Call `f` before, so that the trace is not of a first call. To record an operation takes as
    long as some twenty additions of two numbers, between the slices; on CUDA a slice is the time between two events of
    the stream.

    - On a process mesh every rank calls `trace`, and rank 0 has the timelines of all ranks and writes the file. Ranks
      on one host have one clock; the clocks of different hosts begin at a barrier.
    - Ranks of a simulated mesh are threads that take turns. Each has a clock that stops while others have
      their turn, so the timelines show ranks that compute at once, and transfers without a network.
    - With `device`, and on an abstract mesh, nothing runs: the timeline shows `fs.plan(f, *args, device=device)`,
      for the rank with the most memory, by the roofline of the device; or for each position that `f` branches on.

    A trace of more than 200,000 events is folded: operations of one line in a row, or of one phase, become one slice;
    then later ranks, or the end, are left out. `Trace.notes` says so.

    >>> double = shard_map(lambda x: 2 * x, mesh=mesh, in_specs=(P("data"),), out_specs=P("data"))
    >>> run = trace(double, torch.ones(4))
    >>> run.result
    f32[4@data]
    >>> [s.name for s in run.timelines[0].compute], run.timelines[0].memory[-1]
    (['aten.mul'], (..., 16))
    >>> trace(double, torch.ones(4), device=fs.devices.H100)
    trace of data=2, model=4, planned: ...
    ...

    Format: "Trace Event Format", Google, 2016 (events of ph X, C and M).

    Raises ShardingError for a path that is not writable, before `f` runs and on every rank; for an abstract mesh
    without `device`; and what `f` raises.
    """
    ranks = Ranks("trace", one_process=f.mesh.kind != "process" or f.mesh.size == 1)
    mine = ranks.run(lambda: _checked_arguments(path, device))
    if len(set(mine)) > 1:
        rows = [f"rank {rank}  {text}" for rank, text in enumerate(mine)]
        raise fail("trace: the ranks pass different arguments", *rows, fix="pass the same ones on every rank")
    ranks.run_on_first(lambda: _check_writable(path))
    runs = device is None and f.mesh.kind != "abstract"
    out = _measured(f, args) if runs else _planned(f, args, device)
    if path is not None:
        ranks.run_on_first(lambda: out.save(path))
    return out


# --- runs -----------------------------------------------------------------------------------------------------


def _measured(f: ShardMapped, args: tuple[Any, ...]) -> Trace:
    """Run `f` on its mesh, with a recorder on each rank."""
    mesh = f.mesh
    threads = mesh.kind == "simulated"
    recorders: dict[int, Recorder] = {}

    @functools.wraps(f._f)
    def run(*inputs: Any) -> Any:
        here = region()
        recorder = recorders[here.rank] = Recorder(clock, here.comm, mesh.device, inputs, buffers=not threads)
        here.comm = TimedComm(here.comm, recorder)
        with recorder:
            return f._f(*inputs)

    traced = ShardMapped(run, mesh, f._in_specs, f._out_specs, "never", False, f._donate)
    zero = _common_start(mesh)
    clock = CudaClock(mesh.device, zero) if mesh.device.type == "cuda" else HostClock(zero)
    with recording():  # so that transfers of the backward pass are known as such, with the lines of the forward ones
        result = traced(*args)
    records = [recorders[rank].record() for rank in mesh.ranks]
    if threads:
        records = own_clocks(records)
    shown = min(mesh.size, MOST_EVENTS // LEAST_EVENTS)
    notes = [] if shown == mesh.size else [f"the first {shown} of {mesh.size:,} ranks are shown"]
    names = [f"rank {rank} ({format_axes(mesh.coords(rank))})" for rank in mesh.ranks[:shown]]
    mine = _fitted([timeline(*row) for row in zip(mesh.ranks, names, records, strict=False)], shown)
    parts = mesh.gather_objects(mine if mesh.ranks[0] < shown else ([], []), _PURPOSE)
    parts = parts if mesh.ranks[0] == 0 else [mine]
    rows, more = ([x for part in both for x in part] for both in zip(*parts, strict=True))
    source = "simulated" if threads and mesh.size > 1 else "measured"
    return Trace(mesh.axes, source, tuple(rows), result, tuple(dict.fromkeys([*notes, *more])))


def _fitted(timelines: Sequence[Timeline], count: int) -> tuple[list[Timeline], list[str]]:
    """Return timelines, of `count` that share a file, with notes of what they leave out."""
    pairs = [fitted(t, MOST_EVENTS // count) for t in timelines]
    return [t for t, _ in pairs], [f"rank {t.rank}: {note}" for t, note in pairs if note]


def _common_start(mesh: Mesh) -> float:
    """Return the time of a barrier on this host's clock: when the first of its ranks leaves the barrier."""
    mesh.gather_objects(None, _PURPOSE)
    host, now = socket.gethostname(), time.perf_counter()
    times: list[tuple[str, float]] = mesh.gather_objects((host, now), _PURPOSE)
    return min(t for other, t in times if other == host)


_PURPOSE = "to trace a step"


def _planned(f: ShardMapped, args: tuple[Any, ...], device: Device | None) -> Trace:
    """Plan `f`, and return the timeline of the planned rank, or of the ranks at each position."""
    if device is None:
        raise fail(f"trace: {f._name} is on an abstract mesh, where nothing takes time",
                   fix="name the device to estimate the times of: device=fs.devices.H100")  # fmt: skip
    planned = plan(f, *args, device=device)
    ranks = planned.positions or (planned,)
    rows, notes = _fitted([p._timeline() for p in ranks], len(ranks))
    return Trace(planned.mesh, "planned", tuple(rows), None, (*notes, *planned.warnings))


# --- files ----------------------------------------------------------------------------------------------------


def _checked_arguments(path: StrPath | None, device: Device | None) -> str:
    """Return the arguments as a text, which all ranks must have in common."""
    return f"path={None if path is None else str(_checked_path(path))!r}, device={device and device.name!r}"


def _checked_path(path: StrPath) -> Path:
    file = Path(path)
    if not file.name.endswith((".json", ".json.gz")):
        raise fail(f"trace: {file}: Perfetto knows a trace by the end of its name", fix='path="step.json", or '
                   '"step.json.gz" for a compressed file')  # fmt: skip
    return file


def _check_writable(path: StrPath | None) -> None:
    """Raise ShardingError unless a file of this name can be written."""
    if path is None:
        return
    file = Path(path)
    problem = (
        f"there is no folder {file.parent}" if not file.parent.is_dir()
        else "it is a folder" if file.is_dir()
        else f"the folder {file.parent} is not writable" if not os.access(file.parent, os.W_OK)
        else ""
    )  # fmt: skip
    if problem:
        raise fail(f"trace: cannot write {file}", problem, fix="name a file in a folder that is there and writable")


# --- tables ---------------------------------------------------------------------------------------------------


def _rank_rows(timelines: Sequence[Timeline]) -> list[str]:
    """Return a table of the first ranks: time in operations and in waits, in transfers by axes, and the peak."""
    axes = list(dict.fromkeys(name for t in timelines for name in t.transfers))
    head = ["", "operations", "waits", *(f"over {name}" for name in axes), "peak memory"]
    rows = [head]
    for t in timelines[:_MOST_ROWS]:
        busy, waits, peak = _totals(t)
        moved = [_covered(t.transfers.get(name, ())) for name in axes]
        rows.append([t.name, *map(duration, [busy, waits, *moved]), size(peak)])
    return [*aligned(rows, [0]), *([f"and {len(timelines) - _MOST_ROWS} more"] if len(timelines) > _MOST_ROWS else [])]


def _totals(t: Timeline) -> tuple[float, float, int]:
    """Return the seconds of a rank's operations and of its waits, and the most bytes in its memory."""
    waits = sum(s.end - s.start for s in t.compute if "waits_for" in s.facts)
    return sum(s.end - s.start for s in t.compute) - waits, waits, max((n for _, n in t.memory), default=0)


def _covered(slices: Sequence[Slice]) -> float:
    """Return the seconds in which at least one of the slices is going on."""
    seconds, last = 0.0, -math.inf
    for s in sorted(slices, key=lambda s: s.start):
        seconds += max(0.0, s.end - max(s.start, last))
        last = max(last, s.end)
    return seconds


def _line_rows(timelines: Sequence[Timeline]) -> list[str]:
    """Return a table of the lines whose operations take the most time, of all ranks together."""
    seconds: Counter[str] = Counter()
    for s in (s for t in timelines for s in t.compute if s.where and "waits_for" not in s.facts):
        seconds[s.where] += s.end - s.start  # type: ignore[assignment]
    total = sum(seconds.values())
    rows = [[f"{100 * t / total:.0f}%", duration(t), line] for line, t in seconds.most_common(_MOST_LINES) if total]
    if not rows:
        return []
    return ["lines whose operations take the most time", *(f"  {row}" for row in aligned(rows, [2]))]
