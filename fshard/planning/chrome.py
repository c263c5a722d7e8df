"""Timelines of ranks as JSON in Chrome's trace format, which Perfetto and chrome://tracing show.

A rank is a process of the format. Its lanes are threads: one for compute, in which a phase contains lines of the user,
and a line its operations; and one for transfers over each set of axes, or several where pending transfers overlap.
Times are microseconds, as the format has them, rounded to nanoseconds.

Source: "Trace Event Format", Google, 2016: events of `ph` X (a complete slice), C (a counter) and M (metadata).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

MOST_EVENTS = 200_000  # of a file: some 30 MB, which Perfetto loads in seconds
LEAST_EVENTS = 2_000  # of a rank: with more ranks than fit, the first ones are written


class Slice(NamedTuple):
    """A part of a lane, in seconds. `facts` are shown where it is selected; `where` is the user's line, or ""."""

    name: str
    start: float
    end: float
    where: str = ""
    phase: str = ""
    facts: dict[str, Any] = {}  # noqa: RUF012 - never written


@dataclass(frozen=True)
class Timeline:
    """A run of one rank. Times are in seconds.

    Attributes:
        compute: operations and waits, in order; none begins before the one before it has ended.
        transfers: from the start of each to the end of the wait for it, in order of the starts, by the names of their
            axes: {"data": (...)}.
        memory: (time, bytes in the rank's memory), in order.
    """

    rank: int
    name: str
    compute: tuple[Slice, ...]
    transfers: dict[str, tuple[Slice, ...]]
    memory: tuple[tuple[float, int], ...]

    @property
    def start(self) -> float:
        return min((*(s.start for s in self._slices()), *(t for t, _ in self.memory)), default=0.0)

    @property
    def end(self) -> float:
        return max((*(s.end for s in self._slices()), *(t for t, _ in self.memory)), default=0.0)

    def _slices(self) -> Iterator[Slice]:
        yield from self.compute
        yield from itertools.chain.from_iterable(self.transfers.values())


# --- size -----------------------------------------------------------------------------------------------------


def fitted(timeline: Timeline, most: int) -> tuple[Timeline, str]:
    """Return the timeline with at most about `most` slices, and a note of the detail that it has lost, or "".

    1. Operations of one line in a row become one slice; 2. of one phase in a row; 3. the end is cut. Of the memory
    in a slice that joins several operations, the peak and the last value stay.
    """
    moved = sum(map(len, timeline.transfers.values()))
    if moved + 2 * len(timeline.compute) + len(timeline.memory) <= most:
        return timeline, ""
    for name, note in (("where", "operations are folded by line"), ("phase", "operations are folded by phase")):
        folded = _folded(timeline, name)
        if moved + 3 * len(folded.compute) + len(folded.memory) <= most:
            return folded, note
    times = sorted(s.start for s in folded._slices())
    end = times[max(1, min(len(times) - 1, most // 4))]
    cut = replace(
        folded,
        compute=tuple(s for s in folded.compute if s.start <= end),
        transfers={name: tuple(s for s in row if s.start <= end) for name, row in folded.transfers.items()},
        memory=tuple(p for p in folded.memory if p[0] <= end),
    )
    return cut, f"{note}; what starts after {1e3 * (end - timeline.start):.3f} ms is left out"


def _folded(timeline: Timeline, by: str) -> Timeline:
    """Join operations in a row that have an equal `where` or `phase`. A wait is not joined."""
    compute: list[Slice] = []
    for (is_wait, _), row in itertools.groupby(timeline.compute, lambda s: ("waits_for" in s.facts, getattr(s, by))):
        slices = list(row)
        if is_wait or len(slices) == 1:
            compute += slices
            continue
        seconds = sum(s.end - s.start for s in slices)
        first, last = slices[0], slices[-1]
        name = getattr(first, by) or "operations"
        facts = {"operations": sum(s.facts.get("operations", 1) for s in slices), "busy_us": round(1e6 * seconds, 3)}
        flops = sum(s.facts.get("flops", 0) for s in slices)
        facts |= {"flops": flops} if flops else {}
        compute.append(Slice(name, first.start, last.end, first.where * (by == "where"), first.phase, facts))
    return replace(timeline, compute=tuple(compute), memory=tuple(_peaks(timeline.memory, compute)))


def _peaks(memory: Sequence[tuple[float, int]], slices: Sequence[Slice]) -> Iterator[tuple[float, int]]:
    """Return the largest and the last value in each slice, and in each gap between slices."""
    bounds = [s.end for s in slices]
    for _, row in itertools.groupby(memory, lambda point: bisect.bisect_left(bounds, point[0])):
        points = list(row)
        yield from dict.fromkeys((max(points, key=lambda p: p[1]), points[-1]))


# --- events ---------------------------------------------------------------------------------------------------


def chrome_events(timelines: Sequence[Timeline]) -> list[dict[str, Any]]:
    """Return the events of all ranks: first the names of processes and lanes, then slices and counters by time."""
    zero = min((t.start for t in timelines), default=0.0)
    names: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for t in timelines:
        lanes = [("compute", _nested(_in_order(t.compute, zero))), *_transfer_lanes(t, zero)]
        names += _named("process", t.rank, 0, t.name, t.rank)
        for lane, (name, slices) in enumerate(lanes):
            names += _named("thread", t.rank, lane, name, lane)
            events += [_slice(s, start, end, t.rank, lane) for s, start, end in slices]
        changes = [next(row) for _, row in itertools.groupby(t.memory, lambda p: p[1])]
        events += [{"ph": "C", "pid": t.rank, "name": "memory", "ts": _ns(at - zero) / 1000, "args": {"bytes": nbytes}}
                   for at, nbytes in changes]  # fmt: skip
    events.sort(key=lambda e: (e["ts"], -e.get("dur", 0.0)))  # stable: an outer slice comes before its first inner one
    return names + events


_Placed = tuple[Slice, int, int]  # a slice, and its start and end in nanoseconds


def _nested(placed: Sequence[_Placed], levels: Sequence[str] = ("phase", "where")) -> list[_Placed]:
    """Return the operations, after slices of the phases and lines that contain them."""
    if not levels:
        return [*placed]
    out: list[_Placed] = []
    for name, group in itertools.groupby(placed, lambda p: getattr(p[0], levels[0])):
        row = list(group)
        (first, start, _), (last, _, end) = row[0], row[-1]
        if name and (len(row) > 1 or first.name != name):
            out.append((Slice(name, first.start, last.end, "", first.phase, {"operations": len(row)}), start, end))
        out += _nested(row, levels[1:])
    return out


def _in_order(slices: Sequence[Slice], zero: float) -> list[_Placed]:
    """Round to nanoseconds so that no slice begins before the one before it has ended."""
    out: list[_Placed] = []
    last = 0
    for s in slices:
        start = max(last, _ns(s.start - zero))
        last = max(start, _ns(s.end - zero))
        out.append((s, start, last))
    return out


def _transfer_lanes(timeline: Timeline, zero: float) -> list[tuple[str, list[_Placed]]]:
    """Return the transfers over each set of axes: in as many lanes as are pending at one time, since lanes nest."""
    out = []
    for axes, slices in timeline.transfers.items():
        lanes: list[list[_Placed]] = []
        for s in sorted(slices, key=lambda s: s.start):
            start, end = _ns(s.start - zero), _ns(s.end - zero)
            lane = next((lane for lane in lanes if lane[-1][2] <= start), None)
            if lane is None:
                lanes.append(lane := [])
            lane.append((s, start, max(start, end)))
        out += [(f"over {axes}" + (f" ({i + 1})" if i else ""), lane) for i, lane in enumerate(lanes)]
    return out


def _slice(s: Slice, start: int, end: int, pid: int, tid: int) -> dict[str, Any]:
    args = {**({"line": s.where} if s.where and s.where != s.name else {}),
            **({"phase": s.phase} if s.phase and s.phase != s.name else {}), **s.facts}  # fmt: skip
    event = {"ph": "X", "pid": pid, "tid": tid, "name": s.name, "ts": start / 1000, "dur": (end - start) / 1000}
    return event | ({"args": args} if args else {})


def _named(kind: str, pid: int, tid: int, name: str, place: int) -> list[dict[str, Any]]:
    """Return the events that name a process or a thread, and place it among the others."""
    return [{"ph": "M", "pid": pid, "tid": tid, "name": f"{kind}_{key}", "ts": 0, "args": {key: value}}
            for key, value in (("name", name), ("sort_index", place))]  # fmt: skip


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)
