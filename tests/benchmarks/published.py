"""Plans of published training steps, on fake tensors: what `trust.py` and `published_layouts.py` compare.

torchtitan's are steps of `torchtitan_step.py`. Compiled steps, and products in float8, follow the rules here, which
were chosen with torchtitan's figures in view. Nothing is measured here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import fshard as fs
from fshard import devices
from fshard.planning import Event, Operation, Start
from fshard.planning.devices import Device
from fshard.planning.roofline import joined

from .caching_allocator import reserved
from .torchtitan_step import LLAMA, Layout, step_of

GIB = 2**30
# Boards of Meta's clusters: 8 in a host with NVLink, 400 Gb/s of RoCE for each H100, and 96 GB of HBM2e at 2.4 TB/s,
# 500 W (torchtitan, benchmarks/llama3_h100_202412_torchtitan.md).
H100 = dataclasses.replace(devices.H100, name="H100-96GB", memory=96 * GIB, bandwidth=2.4e12)


EFFICIENCY = 0.509  # of the H100 at 500 W: the row of `published.csv` that `calibrates`, its first


def layout_of(row: Any) -> Layout:
    """Return torchtitan's step of a row of `published.csv`."""
    compiled = "compile" in row.options and row.recompute == "selective op"
    return Layout(LLAMA[row.model], row.data, row.tensor, row.batch * row.accumulate, row.time, row.recompute, compiled,
                  "loss" in row.options.split(), stage=row.stage, microbatches=row.accumulate, schedule=row.schedule,
                  float8=row.stage > 1 and "float8" in row.options)  # fmt: skip


def fused(events: Sequence[Event]) -> list[Event]:
    """Return the events of a compiled step: operations between two products or transfers are one kernel.

    It reads and writes as much as the one of them that moves most, which is a guess: a plan does not know which of
    their results a compiler keeps. Their FLOPs and transfers are the same. The optimizer is not compiled.
    """
    out: list[Event] = []
    for small, group in itertools.groupby(events, _is_small):
        run = list(group)
        out += [max(run, key=lambda e: e.bytes)] if small else run  # type: ignore[union-attr]
    return out


def _is_small(e: Event) -> bool:
    return isinstance(e, Operation) and e.kind in ("elementwise", "copy") and e.phase != "update"


def in_float8(events: Sequence[Event], layout: Layout) -> list[Event]:
    """Return the events of a step whose blocks multiply in float8, and gather their weights in it.

    Attention and the head stay in bfloat16. Each operand is read twice, for its largest magnitude and for its cast, and
    written once, at half the size: 2.5 times its bytes, which are taken to be two thirds of those of a product.
    """
    s = layout.sizes
    head = 2 * layout.batch // layout.microbatches * layout.time * s.width * s.vocab // layout.model
    small = torch.float8_e4m3fn
    out: list[Event] = []
    for e in events:
        if isinstance(e, Operation) and e.kind == "matmul" and e.flops != head:
            out.append(dataclasses.replace(e, name="cast", kind="copy", flops=0, bytes=int(2.5 * 2 / 3 * e.bytes)))
            e = dataclasses.replace(e, dtype=small)
        elif isinstance(e, Start) and e.transfer.op == "all_gather" and e.transfer.axes == ("data",):
            e = dataclasses.replace(
                e, transfer=dataclasses.replace(e.transfer, dtype=small, bytes=e.transfer.bytes // 2)
            )
        out.append(e)
    return out


def unfused(events: Sequence[Event], time: int, head: int, *, again: bool = False) -> list[Event]:
    """Return the events of a step whose attention is products, softmax and dropout over scores [B, H, T, T].

    So programs before flash attention computed it, in half precision: all pairs, and each kernel reads and writes its
    operands once. Megatron-LM scales and masks within the softmax's kernel; dropout has a byte of mask for each score.
    `head` is the width of a head. `again`: backward computes scores, probabilities and result again, as does the
    "selective" recomputation of Megatron-LM.
    """
    out: list[Event] = []
    for e in events:
        if not isinstance(e, Operation) or e.kind != "attention":
            out.append(e)
            continue
        backward = e.phase == "backward"
        pairs = (e.flops or 0) * 2 * time // ((10 if backward else 4) * (time + 1) * head)  # [B, H, T, T]
        nbytes = 2 * (pairs + 2 * pairs // time * head)
        product = dataclasses.replace(e, name="aten.bmm", kind="matmul", flops=2 * pairs * head, bytes=nbytes)
        pointwise = lambda n, e=e, pairs=pairs: dataclasses.replace(  # noqa: E731
            e, name="softmax or dropout", kind="elementwise", flops=0, bytes=n * pairs)  # fmt: skip
        forward = [product, pointwise(4), pointwise(5), product]
        if backward and again:
            out += [dataclasses.replace(x, phase="recompute") for x in forward]
        out += [product, product, pointwise(5), pointwise(6), product, product] if backward else forward
    return out


def summed_once(events: Sequence[Event], microbatches: int) -> tuple[Event, ...]:
    """Return the events of a step that sums gradients over the data ranks after its last microbatch only."""
    sums = [i for i, e in enumerate(events) if isinstance(e, Start) and e.transfer.op == "reduce_scatter"
            and e.transfer.axes == ("data",)]  # fmt: skip
    dropped = set(sums[: len(sums) // microbatches * (microbatches - 1)])
    return tuple(e for i, e in enumerate(events) if i not in dropped)


class Run(NamedTuple):
    """A plan of a step: the events of each stage, by its rank, and the most bytes of its tensors and its allocator."""

    events: dict[int, tuple[Event, ...]]
    mesh: dict[str, int]
    peaks: tuple[int, ...]
    reserved: tuple[int, ...]

    @staticmethod
    def of(f: Any, args: tuple[Any, ...], *, with_reserved: bool = False) -> Run:
        plan = fs.plan(f, *args, device=devices.H100)
        stages = plan.positions or (plan,)
        peaks = tuple(p.memory.peak for p in stages)
        return Run({p.rank: p.events for p in stages}, plan.mesh, peaks,
                   tuple(map(reserved, stages)) if with_reserved else peaks)  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """The plan of a step: of some steps with few blocks or microbatches, whose weighted sum each number of it is."""

    runs: tuple[Run, ...]
    weights: tuple[float, ...] = (1,)

    @staticmethod
    def of(layout: Layout) -> Planned:
        """Plan torchtitan's step with few blocks and with some more, of which all others add as much."""
        stages = layout.stage * layout.chunks if layout.stage > 1 else 2  # a pipeline: one more for each chunk
        few = 2 * layout.stage - 2 if layout.stage > 1 else 4  # 2 on a stage
        sizes = [dataclasses.replace(layout.sizes, layers=n) for n in (few, few + stages)]
        runs = [Run.of(*step_of(dataclasses.replace(layout, sizes=s)), with_reserved=True) for s in sizes]
        more = (layout.sizes.layers - few) / stages
        return Planned(tuple(runs), (1 - more, more))

    def extended(self, numbers: Sequence[float]) -> float:
        """Return a number of the step, by the number of each run."""
        return sum(w * n for w, n in zip(self.weights, numbers, strict=True))

    @property
    def peaks(self) -> list[float]:
        """The most bytes of tensors on each stage."""
        return [self.extended(numbers) for numbers in zip(*[run.peaks for run in self.runs], strict=True)]

    @property
    def reserved(self) -> float:
        """The most bytes that the allocator takes. What it has free grows unevenly: that of the last run is added."""
        last = self.runs[-1]
        return max(n + r - p for n, r, p in zip(self.peaks, last.reserved, last.peaks, strict=True))


def tokens_per_second(row: Any, plan: Planned, device: Device) -> float:
    """Return the tokens per second and device of a row of `published.csv`, of a pipeline by its first stage."""

    def changed(events: Sequence[Event]) -> Sequence[Event]:
        events = fused(events) if "compile" in row.options else events
        if row.is_megatron:
            events = unfused(events, row.time, row.head, again=row.recompute == "selective")
        if "layer" in row.options:  # of a step the blocks, without the update
            events = [e for e in events if not isinstance(e, Operation) or e.phase != "update"]
        return in_float8(events, layout_of(row)) if "float8" in row.options else events

    seconds = [joined({rank: changed(events) for rank, events in run.events.items()}, run.mesh, device)[0].seconds
               for run in plan.runs]  # fmt: skip
    return float(row.batch * row.accumulate * row.time / plan.extended(seconds) / (row.tensor * row.stage))
