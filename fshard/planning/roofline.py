"""A time for a planned step: each operation and transfer at the rates of a device, overlapped as scheduled.

Operations run one after the other on one lane, in the order of the plan. With a peak of F FLOP/s for its dtype, of
which programs reach the share e, `Device.efficiency` or in fused attention `Device.attention`, and a memory of M
bytes/s,

    operation    FLOPs / (e F) + bytes / M, or its line in `Device.costs`

The sum, where a roofline (Williams et al., 2009) has the maximum: a product of small sides, as one part of a matrix
over 8 ranks, reads many bytes for its FLOPs and is far from both. A program starts an operation in `Device.launch`
seconds. On a device with a queue this overlaps with the operations before; on a CPU it does not.

A transfer starts at its `Start`, or when the links that it needs are free, and overlaps the operations; a `Wait`
holds the lane until the transfer has ended. Where a program branches on its position, the ranks at all positions are
followed together, and a transfer between them starts when each has reached its `Start`. Ranks are laid out with the
last axis nearest, and a `Link` of a device joins groups of `ranks` consecutive ranks. The n ranks that communicate fall
into k_l groups at level l: k_0 = n, and k_l is at most the number of groups of level l that they touch. With `sent`
bytes of each rank (see `Transfer.sent`), a bandwidth of B_l and a latency of a_l,

    all_reduce, all_gather, reduce_scatter    rounds x sum_l (k_l-1 - k_l) a_l  +  max_l sent k_l-1 / n / B_l
    all_to_all, all_to_all_rows    a_l of the furthest level  +  max_l sent (peers at level l) / (n - 1) / B_l
    permute       a_l  +  sent / B_l    of the furthest level

An all_reduce makes two rounds, the others one. A ring enters and leaves each group once, and n / k_l-1 devices of the
group share what passes: eight devices of a node send eight times as fast over the network as one. Source of the ring's
latency and of this sharing: NVIDIA, NCCL, `src/graph/tuning.cc`.

It is an estimate, not a simulation: it has no pause of the program, no fusion by a compiler, and no competition between
transfers and operations for a device's units or memory. Operations without a formula for their FLOPs, which
`Plan.warnings` lists, take the time of their bytes. The efficiency of a device, fitted to a measured step, has to
account for all of these ([docs/planning.md](../../docs/planning.md)).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fshard._core.callsite import Site
from fshard._core.display import duration
from fshard._core.protocol import coords_of
from fshard._core.transfers import Transfer, groups_of
from fshard.errors import ShardingError, checked, fail
from fshard.spec import format_axes, short_dtype

from .device import Device, Link, cost_names
from .events import Event, Operation, Start, Wait

COMPUTE = "compute"
_MODEL = ("matmul", "attention", "convolution", "depthwise")  # kinds whose FLOPs count for the MFU
_AT_PEAK = (*_MODEL, "linalg", "fft")  # kinds that take at least their FLOPs at the peak


class Span(NamedTuple):
    """One operation or transfer: its lane, its name, when it starts and ends in seconds, and the user's line.

    The lane is "compute", or the axes of a transfer: "data", "data+model", which has the `number` of its `Start`.

    >>> [(span.lane, span.name) for span in plan.time.lanes]
    [('compute', 'aten.mm'), ('compute', 'aten.sum'), ('data', 'all_reduce')]
    """

    lane: str
    name: str
    start: float
    end: float
    where: Site | None
    number: int | None = None


@dataclass(frozen=True)
class Roofline:
    """The predicted time of one step on one rank.

    `seconds`: of the step. `compute`: only of its operations, so `seconds` = `compute` + the sum of `exposed`.
    `exposed`: for the axes of transfers ("data", "data+model"), the seconds for which operations wait for them.
    `transfers`: for the same axes, the seconds of all of them, hidden or not.
    `lanes`: the spans, by start.
    `times`: for each event of the plan, the second at which the lane of operations is past it.
    `flops_at_peak`: seconds that the FLOPs of the step, but for recomputed ones, take at the peak of their dtypes.
    `is_bound`: whether the device has neither a fitted nor a measured efficiency, so that a step takes longer.

    >>> plan.time
    Roofline(at least 11.4 us: 0.03 ns of operations, 11.4 us waiting for data; MFU at most 0.0%)
    """

    seconds: float
    compute: float
    exposed: Mapping[str, float]
    transfers: Mapping[str, float]
    lanes: tuple[Span, ...]
    times: tuple[float, ...]
    flops_at_peak: float
    is_bound: bool = False

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilization: `flops_at_peak` / `seconds`.

        FLOPs are of matrix products, attention and convolutions, forward and backward, as the step runs them: causal
        attention counts only the pairs that it computes. Those that a step recomputes do not count, nor the scores that
        the backward of attention computes again, one of its five products. Source: Chowdhery et al., 2022, "PaLM",
        appendix B.
        """
        return self.flops_at_peak / self.seconds if self.seconds else 0.0

    def tokens_per_second(self, tokens: int) -> float:
        """Return `tokens` / `seconds`; the tokens of the global batch give the rate of all ranks together."""
        return tokens / self.seconds if self.seconds else 0.0

    def __repr__(self) -> str:
        waits = "".join(f", {duration(seconds)} waiting for {axes}" for axes, seconds in self.exposed.items())
        least, most = ("at least ", "at most ") if self.is_bound else ("", "")
        return (f"Roofline({least}{duration(self.seconds)}: {duration(self.compute)} of operations{waits}; "
                f"MFU {most}{self.mfu:.1%})")  # fmt: skip


@checked
def roofline(events: Sequence[Event], mesh: Mapping[str, int], device: Device) -> Roofline:
    """Return the time of a planned step on a device: `fs.plan(...).events`, the sizes of its mesh, the device.

    Cost: linear in the events. The formulas are at the head of this file.

    >>> roofline(plan.events, plan.mesh, fs.devices.A100).seconds > plan.time.compute
    True

    Raises ShardingError for a dtype that the device has no rate for, and for ranks that its links do not reach.
    """
    return joined({0: events}, mesh, device)[0]


def joined(events: Mapping[int, Sequence[Event]], mesh: Mapping[str, int], device: Device) -> list[Roofline]:
    """Return the time of each of several ranks of a mesh, by their events: they begin together, and end together.

    A transfer in which several of them take part begins when all these have started it, and a message when its source
    and its target have. The other ranks are assumed to start with these.

    Raises ShardingError if the ranks wait for each other.
    """
    meetings = _Meetings(tuple(events), mesh, device)
    lanes = {rank: _Lanes(rank, meetings) for rank in events}
    runs = {rank: lanes[rank].run(row) for rank, row in events.items()}
    clocks = dict.fromkeys(events, 0.0)  # the earliest goes on: transfers queue for links in the order of their starts
    while clocks:
        rank = min(clocks, key=clocks.__getitem__)
        if clocks[rank] == math.inf:
            raise meetings.stuck({r: lanes[r].waits_for for r in clocks})
        then = next(runs[rank], None)
        if then is None:
            del clocks[rank]
        else:
            clocks[rank] = then
        for r, clock in clocks.items():
            if clock == math.inf and not any(meeting.missing for meeting in lanes[r].blocked):
                clocks[r] = lanes[r].now
    end = max(row.now for row in lanes.values())
    return [row.roofline(end) for row in lanes.values()]


@dataclass(eq=False)
class _Meeting:
    """A transfer of one planned rank, or of several: it begins when all have started it and the links are free."""

    missing: set[int]  # the ranks that have not started it
    senders: tuple[int, ...]
    begin: float = 0.0
    end: float = math.inf
    seconds: float = 0.0
    levels: Sequence[str] = ()  # of links


class _Meetings:
    """The transfers of the planned ranks: each rank uses a link for one transfer after the other."""

    def __init__(self, ranks: tuple[int, ...], mesh: Mapping[str, int], device: Device) -> None:
        self.device = device
        self._mesh, self._free = mesh, dict[tuple[int, str], float]()
        self._coords = {r: dict(zip(mesh, coords_of(r, tuple(mesh.values())), strict=True)) for r in ranks}
        self.apart = tuple(axis for axis in mesh if len({at[axis] for at in self._coords.values()}) > 1)
        self._numbers: Counter[Any] = Counter()
        self._open: dict[Any, _Meeting] = {}

    def start(self, rank: int, transfer: Transfer, now: float) -> list[_Meeting]:
        """Start a rank's part of its next transfer; return the meeting, or one for each message to or from a rank."""
        found, is_message = [], transfer.message is not None
        for group in groups_of(transfer, rank, self._mesh) if self.apart else []:
            planned = tuple(r for r in group if r in self._coords)
            if len(set(planned)) > 1:
                number = self._numbers[rank, is_message, planned] = self._numbers[rank, is_message, planned] + 1
                new = _Meeting(set(planned), planned[:1] if is_message else planned)
                found.append(self._open.setdefault((is_message, planned, number), new))
        found = found or [_Meeting({rank}, (rank,))]
        for meeting in found:
            meeting.begin = max(meeting.begin, now)
            meeting.missing.discard(rank)
            if rank in meeting.senders:
                meeting.seconds, meeting.levels = _transfer_seconds(transfer, tuple(self._mesh.items()), self.device)
            if not meeting.missing:
                links = [(sender, level) for sender in meeting.senders for level in meeting.levels]
                meeting.begin = max([meeting.begin, *(self._free.get(link, 0.0) for link in links)])
                meeting.end = meeting.begin + meeting.seconds
                self._free.update(dict.fromkeys(links, meeting.end))
        return found

    def stuck(self, waits: Mapping[int, Transfer | None]) -> ShardingError:
        """Return the error of ranks that wait for each other, by the transfers that they wait for."""
        rows = []
        for rank, coords in self._coords.items():
            t, place = waits.get(rank), format_axes({a: coords[a] for a in self.apart})
            where = f" at {t.where}" if t is not None and t.where else ""
            what = "has returned" if t is None else f"waits for {t.op} over {', '.join(t.axes)}{where}"
            rows.append(f"rank {rank} ({place})  {what}")
        return fail("plan: the ranks wait for each other", *rows,
                    fix="start the messages of two ranks in one order, and before a wait for another one")  # fmt: skip


class _Lanes:
    """The operations and transfers of one rank, up to its time `now`."""

    def __init__(self, rank: int, meetings: _Meetings) -> None:
        self.now = self._compute = self._at_peak = self._launched = 0.0
        self.waits_for: Transfer | None = None
        self.blocked: list[_Meeting] = []  # that it waits for
        self._rank, self._meetings = rank, meetings
        self._exposed: dict[str, float] = {}
        self._transfers: dict[str, float] = {}
        self._spans: list[Span] = []
        self._times: list[float] = []

    def run(self, events: Sequence[Event]) -> Iterator[float]:
        """Yield the time before each transfer that other ranks may meet, and infinity until they have started it."""
        pending: dict[int, tuple[Start, list[_Meeting]]] = {}
        for event in events:
            match event:
                case Operation():
                    launch, seconds, counted = _operation_seconds(event, self._meetings.device)
                    again = 0.2 if event.kind == "attention" and event.phase == "backward" else 0.0
                    counts = event.phase != "recompute" and event.kind in _MODEL
                    self._at_peak += (1 - again) * counted if counts else 0.0
                    if seconds:  # a program starts them one by one, ahead of a device with a queue
                        self._launched = (self._launched if self._meetings.device.queued else self.now) + launch
                        begin = max(self.now, self._launched)
                        self._spans.append(Span(COMPUTE, event.name, begin, begin + seconds, event.where))
                        self._compute += begin + seconds - self.now
                        self.now = begin + seconds
                case Start():
                    if self._meetings.apart:
                        yield self.now
                    pending[event.number] = event, self._meetings.start(self._rank, event.transfer, self.now)
                    for seconds_of in (self._exposed, self._transfers):
                        seconds_of.setdefault("+".join(event.transfer.axes), 0.0)
                case Wait():
                    if event.number in pending:
                        yield from self._wait(*pending.pop(event.number))
            self._times.append(self.now)
        for start, found in pending.values():  # a transfer that nothing waits for ends before the step does
            yield from self._wait(start, found)
        self.waits_for = None

    def _wait(self, start: Start, found: list[_Meeting]) -> Iterator[float]:
        t, lane = start.transfer, "+".join(start.transfer.axes)
        self.waits_for, self.blocked = t, found
        while any(meeting.missing for meeting in found):
            yield math.inf
        last = max(found, key=lambda meeting: meeting.end)
        self._spans.append(Span(lane, t.op, last.begin, last.end, t.where, start.number))
        self._transfers[lane] += last.seconds
        self._exposed[lane] += max(last.end - self.now, 0.0)
        self.now = max(self.now, last.end)

    def roofline(self, end: float) -> Roofline:
        """Return the time of the rank in a step that ends at `end`."""
        if end > self.now:  # until the other ranks end, too
            over = "+".join(self._meetings.apart)
            self._exposed[over] = self._exposed.get(over, 0.0) + end - self.now
        spans = sorted(self._spans, key=lambda span: (span.start, math.inf if span.number is None else span.number))
        return Roofline(end, self._compute, self._exposed, self._transfers, tuple(spans), tuple(self._times),
                        self._at_peak, self._meetings.device.is_bound)  # fmt: skip


def _operation_seconds(operation: Operation, device: Device) -> tuple[float, float, float]:
    """Return the seconds to start an operation, the seconds it takes then, and the seconds of its FLOPs at the peak."""
    at_peak = 0.0
    if operation.flops and operation.kind in _AT_PEAK:
        rate = device.flops.get(operation.dtype)
        if rate is None:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in device.flops)
            where = f" at {operation.where}" if operation.where else ""
            dtype = str(operation.dtype).removeprefix("torch.")
            raise fail(f"roofline: {device.name} has no FLOP/s of {dtype}, in which {operation.name}{where} computes",
                       f"it has {known}",
                       fix="dataclasses.replace(device, flops={**device.flops, dtype: rate})")  # fmt: skip
        at_peak = operation.flops / rate
    dtype, share = short_dtype(operation.dtype), device.share_of(operation.kind)
    names = cost_names(operation.name, operation.kind)
    cost = next((c for name in names if (c := device.costs.get(f"{name} {dtype}"))), None)
    if cost is None or not operation.bytes:
        return device.launch, at_peak / share + operation.bytes / device.bandwidth, at_peak
    beyond = device.costs.get("backward" if operation.phase == "backward" else "forward", (0.0, 0.0, 0.0))
    start, byte, flop = map(sum, zip(cost, beyond, strict=True))
    seconds = start + operation.bytes * byte + (operation.flops or 0) * flop / share
    return 0.0, max(seconds, 0.0), at_peak


def _transfer_seconds(transfer: Transfer, mesh: tuple[tuple[str, int], ...], device: Device) -> tuple[float, list[str]]:
    """Return the seconds of a transfer, and the names of the levels of links that it uses."""
    parts = _parts_of(transfer.axes, mesh, device)
    n = parts[0]
    crossed = [(link, a, b) for link, a, b in zip(device.links, parts, parts[1:], strict=False) if a > b]
    if not crossed:
        return 0.0, []
    furthest = crossed[-1][0]
    if transfer.op == "permute":
        seconds = furthest.latency + transfer.sent / furthest.bandwidth
    elif transfer.op.startswith("all_to_all"):  # n / b - n / a of the n - 1 peers are at this level
        most = max(transfer.sent * (n / b - n / a) / (n - 1) / link.bandwidth for link, a, b in crossed)
        seconds = furthest.latency + most
    else:
        rounds = 2 if transfer.op.startswith("all_reduce") else 1
        steps = sum((a - b) * link.latency for link, a, b in crossed)
        most = max(transfer.sent * a / n / link.bandwidth for link, a, _ in crossed)
        seconds = rounds * steps + most
    return seconds, [link.name for link, _, _ in crossed]


@functools.lru_cache(maxsize=256)  # asked for each transfer
def _parts_of(axes: tuple[str, ...], mesh: tuple[tuple[str, int], ...], device: Device) -> tuple[int, ...]:
    """Return the ranks of a transfer, and for each level of links the groups of it that they touch, at most."""
    sizes = dict(mesh)
    ranks = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    dims = [list(sizes).index(axis) for axis in axes]
    ranks = np.moveaxis(ranks, dims, range(-len(dims), 0)).reshape(-1, math.prod(sizes[a] for a in axes))
    parts = (ranks.shape[1], *(_groups_touched(ranks, link) for link in device.links))
    if parts[-1] > 1:
        reach = device.links[-1].ranks if device.links else 1
        raise fail(f"roofline: the links of {device.name} do not reach all ranks of {', '.join(axes)}",
                   f"mesh {format_axes(sizes)}: {ranks.size} ranks; links join {reach}",
                   fix="give the device a last Link of ranks=None")  # fmt: skip
    return parts


def _groups_touched(ranks: np.ndarray[tuple[int, int], np.dtype[np.int64]], link: Link) -> int:
    """Return the most groups of a level that one row of ranks touches."""
    if link.ranks is None:
        return 1
    groups = np.sort(ranks // link.ranks, axis=1)
    return int((np.diff(groups, axis=1) != 0).sum(axis=1).max()) + 1
