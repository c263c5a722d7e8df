"""A time for a planned step: each operation and transfer at the rates of a device, overlapped as scheduled.

Operations run one after the other on one lane, in the order of the plan. With a peak of F FLOP/s for its dtype, of
which programs reach the share e, `Device.efficiency`, and a memory of M bytes/s,

    operation    max(FLOPs / (e F), bytes / M)        source: Williams et al., 2009, "Roofline"

A transfer starts at its `Start`, or when the links that it needs are free, and overlaps the operations; a `Wait`
holds the lane until the transfer has ended. Ranks are laid out with the last axis nearest, and a `Link` of a device
joins groups of `ranks` consecutive ranks. The n ranks that communicate fall into k_l groups at level l: k_0 = n, and
k_l is at most the number of groups of level l that they touch. With `sent` bytes of each rank (see
`Transfer.sent`), a bandwidth of B_l and a latency of a_l,

    all_reduce, all_gather, reduce_scatter    rounds x sum_l (k_l-1 - k_l) a_l  +  max_l sent k_l-1 / n / B_l
    all_to_all, all_to_all_rows    a_l of the furthest level  +  max_l sent (peers at level l) / (n - 1) / B_l
    permute       a_l  +  sent / B_l    of the furthest level

An all_reduce makes two rounds, the others one. A ring enters and leaves each group once, and n / k_l-1 devices of the
group share what passes: eight devices of a node send eight times as fast over the network as one. Source of the ring's
latency and of this sharing: NVIDIA, NCCL, `src/graph/tuning.cc`.

It is an estimate, not a simulation: it has no launch of a kernel, no pause of the program, no fusion by a compiler, and
no competition between transfers and operations for a device's units or memory. Operations without a formula for their
FLOPs, which `Plan.warnings` lists, take the time of their bytes. The efficiency of a device, fitted to a
measured step, has to account for all of these ([docs/planning.md](../../docs/planning.md)).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fshard._core.callsite import Site
from fshard._core.display import duration
from fshard._core.transfers import Transfer
from fshard.errors import checked, fail
from fshard.spec import format_axes

from .devices import Device, Link
from .events import Event, Operation, Start, Wait

COMPUTE = "compute"
_MODEL = ("matmul", "attention", "convolution")  # kinds whose FLOPs count for the MFU
_AT_PEAK = (*_MODEL, "linalg", "fft")  # kinds that take at least their FLOPs at the peak


class Span(NamedTuple):
    """One operation or transfer: its lane, its name, when it starts and ends in seconds, and the user's line.

    The lane is "compute", or the axes of a transfer: "data", "data+model".

    >>> [(span.lane, span.name) for span in plan.time.lanes]
    [('compute', 'aten.mm'), ('compute', 'aten.sum'), ('data', 'all_reduce')]
    """

    lane: str
    name: str
    start: float
    end: float
    where: Site | None


@dataclass(frozen=True)
class Roofline:
    """The predicted time of one step on one rank.

    `seconds`: of the step. `compute`: only of its operations, so `seconds` = `compute` + the sum of `exposed`.
    `exposed`: for the axes of transfers ("data", "data+model"), the seconds for which operations wait for them.
    `transfers`: for the same axes, the seconds of all of them, hidden or not.
    `lanes`: the spans, by start.
    `times`: for each event of the plan, the second at which the lane of operations is past it.
    `flops_at_peak`: seconds that the FLOPs of the step, but for recomputed ones, take at the peak of their dtypes.

    >>> plan.time
    Roofline(11.4 us: 0.03 ns of operations, 11.4 us waiting for data; MFU 0.0%)
    """

    seconds: float
    compute: float
    exposed: Mapping[str, float]
    transfers: Mapping[str, float]
    lanes: tuple[Span, ...]
    times: tuple[float, ...]
    flops_at_peak: float

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilization: `flops_at_peak` / `seconds`.

        FLOPs are of matrix products, attention and convolutions, forward and backward, as the step runs them:
        causal attention counts in full. Those that a step recomputes do not count, nor the scores that the backward of
        attention computes again, one of its five products. Source: Chowdhery et al., 2022, "PaLM", appendix B.
        """
        return self.flops_at_peak / self.seconds if self.seconds else 0.0

    def tokens_per_second(self, tokens: int) -> float:
        """Return `tokens` / `seconds`; the tokens of the global batch give the rate of all ranks together."""
        return tokens / self.seconds if self.seconds else 0.0

    def __repr__(self) -> str:
        waits = "".join(f", {duration(seconds)} waiting for {axes}" for axes, seconds in self.exposed.items())
        return f"Roofline({duration(self.seconds)}: {duration(self.compute)} of operations{waits}; MFU {self.mfu:.1%})"


@checked
def roofline(events: Sequence[Event], mesh: Mapping[str, int], device: Device) -> Roofline:
    """Return the time of a planned step on a device: `fs.plan(...).events`, the sizes of its mesh, the device.

    Cost: linear in the events. The formulas are at the head of this file.

    >>> roofline(plan.events, plan.mesh, fs.devices.A100).seconds > plan.time.compute
    True

    Raises ShardingError for a dtype that the device has no rate for, and for ranks that its links do not reach.
    """
    axes = tuple(mesh.items())
    now = compute = at_peak = 0.0
    free: dict[str, float] = {}
    pending: dict[int, tuple[float, str]] = {}
    exposed: dict[str, float] = {}
    transfers: dict[str, float] = {}
    lanes: list[Span] = []
    times: list[float] = []

    def wait(number: int) -> None:
        nonlocal now
        end, lane = pending.pop(number)
        exposed[lane] += max(end - now, 0.0)
        now = max(now, end)

    for event in events:
        match event:
            case Operation():
                seconds, counted = _operation_seconds(event, device)
                compute += seconds
                again = 0.2 if event.kind == "attention" and event.phase == "backward" else 0.0
                counts = event.phase != "recompute" and event.kind in _MODEL
                at_peak += (1 - again) * counted if counts else 0.0
                if seconds:
                    lanes.append(Span(COMPUTE, event.name, now, now + seconds, event.where))
                now += seconds
            case Start():
                transfer = event.transfer
                lane = "+".join(transfer.axes)
                seconds, levels = _transfer_seconds(transfer, axes, device)
                start = max([now, *(free.get(level, 0.0) for level in levels)])
                free.update(dict.fromkeys(levels, start + seconds))
                pending[event.number] = start + seconds, lane
                exposed.setdefault(lane, 0.0)
                transfers[lane] = transfers.get(lane, 0.0) + seconds
                lanes.append(Span(lane, transfer.op, start, start + seconds, transfer.where))
            case Wait():
                if event.number in pending:
                    wait(event.number)
        times.append(now)
    for number in list(pending):  # a transfer that nothing waits for ends before the step does
        wait(number)
    lanes.sort(key=lambda span: span.start)
    return Roofline(now, compute, exposed, transfers, tuple(lanes), tuple(times), at_peak)


def _operation_seconds(operation: Operation, device: Device) -> tuple[float, float]:
    """Return the seconds of an operation, and the seconds of its FLOPs at the peak."""
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
    return max(at_peak / device.efficiency, operation.bytes / device.bandwidth), at_peak


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
