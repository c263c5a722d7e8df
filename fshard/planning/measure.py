"""Timelines of the ranks that run a program: the time of each operation and of each transfer, and the memory."""

from __future__ import annotations

import functools
import math
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard._core import callsite
from fshard._core.operations import OperationMode, tensors_in
from fshard._core.protocol import Comm, index_of
from fshard._core.torch import storage_id
from fshard._core.transfers import Transfer, groups_of
from fshard.spec import short_dtype

from .chrome import Slice, Timeline
from .events import Event, Operation, Start, Wait, phase_now
from .flops import is_view, work_of, written_by

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


class Entry(NamedTuple):
    """A part of a rank's run. Times are a clock's. `peak` is the most bytes since the entry before.

    A transfer that blocks is a `Start`, and a `Wait` that takes no time. `event` is None for the exchange of texts that
    fs.print makes. `ranks` make the transfer that starts together; messages are (source, target, number): a start
    `sends` some, and a wait `receives` some. `arguments` are an operation's, as a text.
    """

    start: Any
    end: Any
    peak: int
    event: Event | None
    ranks: tuple[int, ...] = ()
    sends: Sequence[tuple[int, ...]] = ()
    receives: Sequence[tuple[int, ...]] = ()
    arguments: str = ""


class Record(NamedTuple):
    """The entries of a rank's run between two times."""

    begin: float
    end: float
    live: int  # bytes at the begin
    entries: list[Entry]


class Recorder(OperationMode):
    """Records the operations and transfers that one rank runs within, and its memory: a `Watch` of its comm.

    Memory counts the storages of `arguments`, storages that operations allocate, and results of transfers.
    With `buffers` the memory of operations inside a transfer counts, too: a simulated rank allocates there for others.
    """

    supports_higher_order_operators = True

    def __init__(self, clock: Any, comm: Comm, device: torch.device, arguments: Any, *, buffers: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Entry] = []
        self.clock, self.comm, self.device, self.buffers = clock, comm, device, buffers
        self.live = self.peak = 0
        self._storages: dict[int, Any] = {}
        self._begun: tuple[Any, Transfer | None] | None = None  # the transfer that is being started
        self._waits_from: Any = None
        self._messages: Counter[tuple[int, ...]] = Counter()  # so far, by source and target
        self._expected: dict[int, list[tuple[int, ...]]] = {}  # messages, by the number of a pending transfer
        self._number = -1
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
            inputs = tensors_in(args, kwargs)
            before = {storage_id(x) for x in inputs}
            new = [x for x in tensors_in(out) if storage_id(x) not in before]
            work = work_of(func, args, kwargs, out, inputs, new, written_by(func, args, kwargs))
            shapes = ", ".join(f"{short_dtype(x.dtype)}{list(x.shape)}" for x in inputs[:_MOST_SHAPES])
            self._add(begin, end, Operation(*work, self.live, callsite.site(), phase_now()), arguments=shapes)
        return out

    def _add(self, begin: Any, end: Any, event: Event | None, **more: Any) -> None:
        self.entries.append(Entry(begin, end, self.peak, event, **more))
        self.peak = self.live

    # --- the reports of the comm ---

    def begin_transfer(self, transfer: Transfer | None, xs: Sequence[Tensor], into: Sequence[Tensor]) -> int:
        self._number += 1
        self._begun = self.clock.now(), transfer
        return self._number

    def end_start(self, number: int) -> None:
        assert self._begun is not None
        (begin, transfer), self._begun = self._begun, None
        sizes = self.comm.sizes
        rank = index_of(tuple(sizes), sizes, self.comm.coords)
        groups = [tuple(range(math.prod(sizes.values())))] if transfer is None else groups_of(transfer, rank, sizes)
        event = None if transfer is None else Start(transfer, number, self.live)
        if transfer is None or transfer.message is None:
            self._add(begin, self.clock.now(), event, ranks=groups[0])
            return
        self._messages.update(groups)
        messages = [(*group, self._messages[group]) for group in groups]
        self._expected[number] = [message for message in messages if message[0] != rank]
        self._add(begin, self.clock.now(), event, sends=[message for message in messages if message[0] == rank])

    def begin_wait(self, number: int) -> None:
        self._waits_from = self.clock.now()

    def end_transfer(self, number: int, results: Sequence[Tensor]) -> None:
        self._follow(results)
        if self._waits_from is not None:
            begin, self._waits_from = self._waits_from, None
            self._add(begin, self.clock.now(), Wait(number, self.live), receives=self._expected.pop(number, ()))
            return
        self.end_start(number)
        if self.entries[-1].event is not None:  # it blocks
            self._add(self.entries[-1].end, self.entries[-1].end, Wait(number, self.live))

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


# --- from records to timelines --------------------------------------------------------------------------------


def own_clocks(records: Sequence[Record]) -> list[Record]:
    """Return the records of simulated ranks on one clock for each rank, as if all ranks computed at once.

    Ranks that are threads take turns, and change turns in transfers only. The clock of a rank stops while others have
    their turn: 1. each clock begins at 0; 2. between transfers it goes as fast as the host's; 3. a transfer begins for
    all its ranks when the last of them starts it, by its clock, and takes only the time of the simulation:
    the shortest that it took a rank, since the rank that starts it last waits for no other; 4. a wait for messages ends
    when their sources have sent them.
    """
    ahead = [-r.begin for r in records]  # of the host's clock, each rank's
    out: list[list[Entry]] = [[] for _ in records]
    started: dict[tuple[int, ...], dict[int, tuple[float, Entry]]] = {}  # by ranks: those that wait, and since when
    sent: dict[tuple[int, ...], float] = {}  # messages, and when
    awaited: dict[tuple[int, ...], int] = {}  # messages, and the ranks that wait
    ready = deque(range(len(records)))
    left = [deque(r.entries) for r in records]
    while ready:
        rank = ready.popleft()
        while left[rank]:
            e = left[rank][0]
            if missing := [message for message in e.receives if message not in sent]:
                awaited[missing[0]] = rank
                break
            left[rank].popleft()
            start = e.start + ahead[rank]
            if e.receives:
                ahead[rank] = max(start, *[sent[message] for message in e.receives]) - e.end
            for message in e.sends:
                sent[message] = e.end + ahead[rank]
                ready.extend([awaited.pop(message)] if message in awaited else [])
            if not e.ranks:
                out[rank].append(e._replace(start=start, end=e.end + ahead[rank]))
                continue
            meeting = started.setdefault(e.ranks, {})
            meeting[rank] = start, e
            if len(meeting) == len(e.ranks):
                del started[e.ranks]
                end = max(t for t, _ in meeting.values()) + min(e.end - e.start for _, e in meeting.values())
                for r, (t, e) in meeting.items():
                    out[r].append(e._replace(start=t, end=end))
                    ahead[r] = end - e.end
                ready.extend(meeting)
            break
    return [Record(0.0, r.end + more, r.live, rows) for r, more, rows in zip(records, ahead, out, strict=True)]


def timeline(
    rank: int, name: str, record: Record, spans: Mapping[int, tuple[float, float]] | None = None
) -> Timeline:  # fmt: skip
    """Return the timeline of a rank whose record has times in seconds.

    `spans`: the begin and the end of each transfer, by number; if not known, from its start to the end of its wait.
    """
    compute: list[Slice] = []
    transfers: dict[str, list[Slice]] = {}
    pending: dict[int, tuple[str, int]] = {}  # the place in `transfers` of each that is not waited for yet
    memory = [(record.begin, record.live)]
    phases = [e.event.phase if isinstance(e.event, Operation) else "forward" for e in record.entries]
    last = max((i for i, phase in enumerate(phases) if phase != "forward"), default=len(phases))
    phase = "forward"
    line = functools.cache(lambda site: repr(site) if site else "")  # to find the number of a line takes long
    for i, e in enumerate(record.entries):
        event, live = e.event, memory[-1][1] if e.event is None else e.event.live
        memory += [(e.start, e.peak)] * (e.peak > max(memory[-1][1], live)) + [(e.end, live)]
        start, what, where, facts = e.start, "print", "", dict[str, Any](waits_for="print")
        if isinstance(event, Operation):
            phase = "update" if i > last else event.phase
            known = {"arguments": e.arguments, "note": "FLOPs unknown" * (event.flops is None), "flops": event.flops}
            work = {"kind": event.kind, "bytes": event.bytes, "dtype": short_dtype(event.dtype)}
            what, where, facts = event.name, line(event.where), {name: x for name, x in known.items() if x} | work
        elif isinstance(event, Start):
            t, where = event.transfer, line(event.transfer.where)
            axes = "+".join(t.axes)
            row = transfers.setdefault(axes, [])
            pending[event.number] = axes, len(row)
            begin, end = (e.start, record.end) if spans is None else spans[event.number]
            moved = {"sent_bytes": t.sent, "argument_bytes": t.bytes, "dtype": short_dtype(t.dtype), "ranks": t.ranks}
            row.append(Slice(t.op, begin, end, where, t.phase, moved))
            what, facts = f"start {t.op} over {axes}", {"waits_for": t.op}
        elif event is not None:
            axes, at = pending.pop(event.number)
            s = transfers[axes][at]
            transfers[axes][at] = s._replace(end=e.end) if spans is None else s
            before = record.entries[i - 1].event
            if isinstance(before, Start) and before.number == event.number:  # a transfer that blocks is one slice
                start = compute.pop().start
            what, where, facts = f"wait for {s.name} over {axes}", s.where, {"waits_for": s.name}
        compute.append(Slice(what, start, e.end, where, phase, facts))
    for axes, at in pending.values():
        s = transfers[axes][at]
        transfers[axes][at] = s._replace(facts={**s.facts, "note": "never waited for"})
    shown = tuple(s for s in compute if s.end > s.start)
    return Timeline(rank, name, shown, {k: tuple(v) for k, v in transfers.items()}, tuple(memory))
