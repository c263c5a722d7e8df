"""Timelines of the ranks that run a program: the time of each operation and of each transfer, and the memory."""

from __future__ import annotations

import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard._core import callsite
from fshard._core.operations import OperationMode, tensors_in
from fshard._core.protocol import Comm, ranks_over
from fshard._core.torch import storage_id
from fshard._core.transfers import Transfer
from fshard.spec import short_dtype

from .chrome import Slice, Timeline
from .events import Event, Operation, Start, phase_now
from .flops import bytes_of, dtype_of, flops_fact, flops_of, full_name_of, is_view, kind_of, written_by
from .roofline import Roofline

_MOST_SHAPES = 4

# --- clocks ---------------------------------------------------------------------------------------------------


class HostClock:
    """Times of this process: CPUs compute when they are called. Ranks of one host read the same clock.

    With `time.thread_time` they are of the CPU, and leave out the time in which other programs have it.
    """

    def __init__(self, zero: float, now: Callable[[], float] = time.perf_counter) -> None:
        self.zero, self.now = zero, now

    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        """Return the seconds of each time since `zero`, on the same clock."""
        return [t - self.zero for t in stamps]


class CudaClock:
    """Times at which a CUDA device reaches the place of a call in its stream."""

    def __init__(self, device: torch.device, zero: float) -> None:
        torch.cuda.synchronize(device)
        self.begin, self.zero = time.perf_counter() - zero, self.now()

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        """Wait for the device, and return the seconds of each time."""
        torch.cuda.synchronize()
        return [self.begin + self.zero.elapsed_time(stamp) / 1e3 for stamp in stamps]


# --- the recorder ---------------------------------------------------------------------------------------------


class _Started(NamedTuple):
    number: int
    transfer: Transfer | None  # None: the exchange of texts that fs.print makes
    ranks: tuple[int, ...]
    is_pending: bool  # a wait follows, as another entry


class _Entry(NamedTuple):
    """A part of a rank's run. Times are a clock's. `peak` is the most bytes since the entry before, `live` at its end.

    Exactly one of the last three is not None: an operation, as a slice without times; a transfer that starts; the
    number of the transfer that is waited for.
    """

    start: Any
    end: Any
    peak: int
    live: int
    phase: str
    operation: Slice | None = None
    started: _Started | None = None
    waited: int | None = None


class Record(NamedTuple):
    """The entries of a rank's run between two times."""

    begin: float
    end: float
    live: int  # bytes at the begin
    entries: list[_Entry]


class Recorder(OperationMode):
    """Records the operations and transfers that one rank runs within, and its memory: a `Watch` of its comm.

    Memory counts the storages of `arguments`, storages that operations allocate, and results of transfers.
    With `buffers` the memory of operations inside a transfer counts, too: a simulated rank allocates there for others.
    """

    supports_higher_order_operators = True

    def __init__(self, clock: Any, comm: Comm, device: torch.device, arguments: Any, *, buffers: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[_Entry] = []
        self.clock, self.comm, self.device, self.buffers = clock, comm, device, buffers
        self.live = self.peak = 0
        self._storages: dict[int, Any] = {}
        self._begun: tuple[Any, Transfer | None, tuple[int, ...]] | None = None  # the transfer that is being started
        self._waits_from: Any = None
        self._number = -1
        self._lines: dict[int, tuple[callsite.Site, str]] = {}
        self._follow(arguments)
        self.first = self.live
        self.begin, self.end = clock.now(), None

    def __exit__(self, *exception: Any) -> None:
        self.end = self.clock.now()
        self._storages.clear()  # and with it the callbacks
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def record(self) -> Record:
        """Return the entries with times in seconds, after the run."""
        stamps = [self.begin, self.end, *(t for e in self.entries for t in (e.start, e.end))]
        begin, end, *times = self.clock.seconds(stamps)
        pairs = zip(self.entries, times[::2], times[1::2], strict=True)
        return Record(begin, end, self.first, [e._replace(start=start, end=stop) for e, start, stop in pairs])

    def run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._begun is not None or self._waits_from is not None:
            out = func(*args, **kwargs)
            if self.buffers:
                self._follow(out)
            return out
        begin = self.clock.now()
        out = func(*args, **kwargs)
        end = self.clock.now()
        self._follow(out)
        if not is_view(func):
            operation = Slice(full_name_of(func), 0.0, 0.0, self._line(), "", _facts(func, args, kwargs, out))
            self._add(begin, end, operation=operation)
        return out

    def _line(self) -> str:
        """Return the user's line; its text is made once, since to find the number of a line takes long."""
        site = callsite.site()
        if site is None:
            return ""
        if id(site) not in self._lines:
            self._lines[id(site)] = site, repr(site)  # with the site, whose id another could have
        return self._lines[id(site)][1]

    def _add(self, begin: Any, end: Any, **what: Any) -> None:
        self.entries.append(_Entry(begin, end, self.peak, self.live, phase_now(), **what))
        self.peak = self.live

    # --- the reports of the comm ---

    def begin_transfer(self, transfer: Transfer | None, xs: Sequence[Tensor], into: Sequence[Tensor]) -> int:
        sizes = self.comm.sizes
        ranks = ranks_over(tuple(sizes) if transfer is None else transfer.axes, sizes, self.comm.coords)
        self._number += 1
        self._begun = self.clock.now(), transfer, tuple(ranks)
        return self._number

    def end_start(self, number: int) -> None:
        self._end_start(number, is_pending=True)

    def _end_start(self, number: int, is_pending: bool) -> None:
        assert self._begun is not None
        begin, transfer, ranks = self._begun
        self._begun = None
        self._add(begin, self.clock.now(), started=_Started(number, transfer, ranks, is_pending))

    def begin_wait(self, number: int) -> None:
        self._waits_from = self.clock.now()

    def end_transfer(self, number: int, results: Sequence[Tensor]) -> None:
        self._follow(results)
        if self._begun is not None:
            self._end_start(number, is_pending=False)
        else:
            begin, self._waits_from = self._waits_from, None
            self._add(begin, self.clock.now(), waited=number)

    # --- memory ---

    def _follow(self, values: Any) -> None:
        for x in tensors_in(values):
            if x.layout is not torch.strided or x.device.type != self.device.type or storage_id(x) in self._storages:
                continue
            storage, key = x.untyped_storage(), storage_id(x)
            nbytes = storage.nbytes()
            self._storages[key] = weakref.ref(storage, functools.partial(self._forget, key, nbytes))
            self.live += nbytes
            self.peak = max(self.peak, self.live)

    def _forget(self, key: int, nbytes: int, _: Any) -> None:
        del self._storages[key]
        self.live -= nbytes


def _facts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> dict[str, Any]:
    inputs, flops = tensors_in(args, kwargs), flops_of(func, args, kwargs, out)
    shapes = ", ".join(f"{short_dtype(x.dtype)}{list(x.shape)}" for x in inputs[:_MOST_SHAPES])
    before = {storage_id(x) for x in inputs}
    new = [x for x in tensors_in(out) if storage_id(x) not in before]
    written = written_by(func, args, kwargs)
    nbytes = bytes_of(func, inputs, written, new) if new or written else 0
    work = {"kind": kind_of(func, args, kwargs), "bytes": nbytes, "dtype": short_dtype(dtype_of(inputs, new))}
    return ({"arguments": shapes} if inputs else {}) | flops_fact(flops) | work


# --- from records to timelines --------------------------------------------------------------------------------


def own_clocks(records: Sequence[Record]) -> list[Record]:
    """Return the records of simulated ranks on one clock for each rank, as if all ranks computed at once.

    Ranks that are threads take turns, and change turns in transfers only. The clock of a rank stops while others have
    their turn: 1. each clock begins at 0; 2. between transfers it goes as fast as the host's; 3. a transfer begins for
    all its ranks when the last of them starts it, by its clock, and takes only the time of the simulation:
    the shortest that it took a rank, since the rank that starts it last waits for no other.
    """
    clocks = [_OwnClock(0.0, r.begin) for r in records]
    out: list[list[_Entry]] = [[] for _ in records]
    started: dict[tuple[int, ...], dict[int, tuple[float, _Entry]]] = {}  # by ranks: those that wait, and since when
    ready = deque(range(len(records)))
    left = [iter(r.entries) for r in records]
    while ready:
        rank = ready.popleft()
        for e in left[rank]:
            start = clocks[rank].at(e.start)
            if e.started is None:
                out[rank].append(e._replace(start=start, end=clocks[rank].at(e.end)))
                continue
            meeting = started.setdefault(e.started.ranks, {})
            meeting[rank] = start, e
            if len(meeting) == len(e.started.ranks):
                del started[e.started.ranks]
                end = max(t for t, _ in meeting.values()) + min(e.end - e.start for _, e in meeting.values())
                for r, (t, e) in meeting.items():
                    out[r].append(e._replace(start=t, end=end))
                    clocks[r] = _OwnClock(end, e.end)
                ready.extend(meeting)
            break
    return [Record(0.0, clock.at(r.end), r.live, rows) for r, clock, rows in zip(records, clocks, out, strict=True)]


class _OwnClock(NamedTuple):
    """A rank's clock, which shows `mine` when the host's shows `host`."""

    mine: float
    host: float

    def at(self, host: float) -> float:
        return self.mine + host - self.host


def _line(where: callsite.Site | None) -> str:
    return repr(where) if where else ""


def timeline(rank: int, name: str, record: Record) -> Timeline:
    """Return the timeline of a rank whose record has times in seconds."""
    compute: list[Slice] = []
    transfers: dict[str, list[Slice]] = {}
    pending: dict[int, tuple[str, int]] = {}  # the place in `transfers` of each that is not waited for yet
    memory = [(record.begin, record.live)]
    last = max((i for i, e in enumerate(record.entries) if e.phase != "forward"), default=len(record.entries))
    for i, e in enumerate(record.entries):
        phase = "update" if i > last else e.phase
        memory += [(e.start, e.peak)] * (e.peak > max(memory[-1][1], e.live)) + [(e.end, e.live)]
        if e.operation is not None:
            compute.append(e.operation._replace(start=e.start, end=e.end, phase=phase))
        elif e.started is not None:
            t = e.started.transfer
            if t is None:
                compute.append(Slice("print", e.start, e.end, "", phase, {"waits_for": "print"}))
                continue
            axes = "+".join(t.axes)
            row = transfers.setdefault(axes, [])
            end = record.end if e.started.is_pending else e.end
            row.append(Slice(t.op, e.start, end, _line(t.where), t.phase, facts_of(t)))
            verb = "start" if e.started.is_pending else "wait for"
            compute.append(
                Slice(f"{verb} {t.op} over {axes}", e.start, e.end, row[-1].where, phase, {"waits_for": t.op})
            )
            if e.started.is_pending:
                pending[e.started.number] = axes, len(row) - 1
        else:
            assert e.waited is not None
            axes, at = pending.pop(e.waited)
            s = transfers[axes][at] = transfers[axes][at]._replace(end=e.end)
            start, before = e.start, record.entries[i - 1].started
            if before is not None and before.number == e.waited:  # a transfer that blocks is one slice
                start = compute.pop().start
            compute.append(Slice(f"wait for {s.name} over {axes}", start, e.end, s.where, phase, {"waits_for": s.name}))
    for axes, at in pending.values():
        s = transfers[axes][at]
        transfers[axes][at] = s._replace(facts={**s.facts, "note": "never waited for"})
    return Timeline(rank, name, tuple(compute), {k: tuple(v) for k, v in transfers.items()}, tuple(memory))


def facts_of(transfer: Transfer) -> dict[str, Any]:
    """Return the facts of a transfer's slice."""
    return {"sent_bytes": transfer.sent, "argument_bytes": transfer.bytes, "dtype": short_dtype(transfer.dtype),
            "ranks": transfer.ranks}  # fmt: skip


def planned_timeline(rank: int, name: str, events: Sequence[Event], estimate: Roofline, arguments: int) -> Timeline:
    """Return the events of a planned rank, each at its time by the roofline."""
    compute: list[Slice] = []
    starts: dict[int, Transfer] = {}
    of_lane: dict[str, list[tuple[int, Transfer]]] = {}
    now, phase = 0.0, "forward"
    for e, end in zip(events, estimate.times, strict=True):
        if isinstance(e, Operation):
            phase = e.phase
            if end > now:
                work = {"kind": e.kind, "bytes": e.bytes, "dtype": short_dtype(e.dtype)}
                compute.append(Slice(e.name, now, end, _line(e.where), phase, flops_fact(e.flops) | work))
        elif isinstance(e, Start):
            starts[e.number] = e.transfer
            of_lane.setdefault("+".join(e.transfer.axes), []).append((e.number, e.transfer))
        elif end > now:
            t = starts[e.number]
            what = f"wait for {t.op} over {'+'.join(t.axes)}"
            compute.append(Slice(what, now, end, _line(t.where), phase, {"waits_for": t.op}))
        now = end
    spans = {s.number: s for s in estimate.lanes}
    transfers = {
        axes: tuple(
            Slice(t.op, spans[number].start, spans[number].end, _line(t.where), t.phase, facts_of(t))
            for number, t in row
        )
        for axes, row in of_lane.items()
    }
    memory = [(0.0, arguments), *zip(estimate.times, [e.live for e in events], strict=True)]
    return Timeline(rank, name, tuple(compute), transfers, tuple(memory))
