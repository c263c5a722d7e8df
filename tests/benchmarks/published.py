"""Published memory and speed of training steps beside what `fs.plan` predicts: `python -m tests.benchmarks.published`.

torchtitan's rows are steps of `torchtitan_step.py`, planned as one rank on fake tensors, at the rates of a `Device`
whose efficiency is fitted to one row, marked `fit`. Nothing is measured here. docs/memory-and-speed.md has the
table and explains why a row misses; `predict_classes.py` has TorchShard's.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch

import fshard as fs
from fshard import devices
from fshard.planning import Event, Operation, Roofline, Start
from fshard.planning.devices import Device
from fshard.planning.roofline import joined

from .caching_allocator import reserved
from .torchtitan_step import LLAMA, Checkpointing, Layout, step_of

GIB = 2**30
# Boards of Meta's clusters: 8 in a host with NVLink, 400 Gb/s of RoCE for each H100, and 96 GB of HBM2e at 2.4 TB/s,
# 500 W (torchtitan, benchmarks/llama3_h100_202412_torchtitan.md). The network of the A100 hosts is not stated: 200
# Gb/s.
H100 = dataclasses.replace(devices.H100, name="H100-96GB", memory=96 * GIB, bandwidth=2.4e12)
A100 = devices.A100


@dataclass(frozen=True)
class Row:
    """One published row: a step, its tokens per second and device, and the most GiB that torch's allocator reserved."""

    source: str
    device: Device
    model: str
    data: int
    tensor: int
    batch: int  # of each data rank
    time: int
    checkpointing: Checkpointing
    tokens: float  # per second and device
    gib: float | None = None
    options: tuple[str, ...] = ()  # compile, float8
    fit: bool = False
    stage: int = 1
    microbatches: int = 1
    schedule: Literal["1f1b", "interleaved"] = "1f1b"

    @property
    def layout(self) -> Layout:
        compiled = "compile" in self.options and self.checkpointing == "selective op"
        return Layout(LLAMA[self.model], self.data, self.tensor, self.batch, self.time, self.checkpointing, compiled,
                      stage=self.stage, microbatches=self.microbatches, schedule=self.schedule,
                      float8=self.stage > 1 and "float8" in self.options)  # fmt: skip

    @property
    def name(self) -> str:
        over = f"FSDP {self.data}" + (f" x TP {self.tensor}" if self.tensor > 1 else "")
        over += f" x PP {self.stage} {self.schedule}" if self.stage > 1 else ""
        return f"{self.model}, {over}, {' + '.join(self.options) or 'eager'}"


DECEMBER = "benchmarks/llama3_h100_202412_torchtitan.md"
JUNE = "benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
APRIL, AUGUST = "docs/performance.md at 1ea476e", "docs/performance.md at 9515a14, 3faaa1a"
_8B, _70B, _405B = "Llama 3 8B", "Llama 3 70B", "Llama 3 405B"
_COMPILE, _FLOAT8 = ("compile",), ("compile", "float8")
_TURNS: Literal["interleaved"] = "interleaved"

ROWS = [
    Row(DECEMBER, H100, _8B, 8, 1, 2, 8192, "selective op", 5762, 82.4, fit=True),
    Row(DECEMBER, H100, _8B, 8, 1, 2, 8192, "selective op", 6667, 77.0, _COMPILE),
    Row(DECEMBER, H100, _8B, 8, 1, 2, 8192, "selective op", 8532, 76.8, _FLOAT8),
    Row(DECEMBER, H100, _8B, 128, 1, 2, 8192, "selective op", 5605, 67.0),
    Row(DECEMBER, H100, _8B, 128, 1, 2, 8192, "selective op", 6514, 62.0, _COMPILE),
    Row(DECEMBER, H100, _8B, 128, 1, 2, 8192, "selective op", 8380, 61.8, _FLOAT8),
    Row(JUNE, H100, _8B, 8, 8, 12, 8192, "selective op", 4378, None, _COMPILE),
    Row(JUNE, H100, _70B, 32, 8, 16, 8192, "full", 597.3, None, _COMPILE),
    Row(DECEMBER, H100, _70B, 32, 8, 16, 8192, "full", 829, 71.9, _FLOAT8),
    Row(AUGUST, H100, _405B, 16, 8, 2, 8192, "full", 109),
    # Tensor parallelism is asynchronous in these two, which is not planned. 8 microbatches are torchtitan's default.
    Row(DECEMBER, H100, _405B, 8, 8, 32, 8192, "full", 100, 82.5, _FLOAT8, stage=8, microbatches=8),
    Row(DECEMBER, H100, _405B, 8, 8, 32, 8192, "full", 128, 72.7, _FLOAT8, stage=8, microbatches=8, schedule=_TURNS),
    Row(APRIL, A100, _8B, 64, 1, 1, 8192, "selective op", 2973, fit=True),
    Row(APRIL, A100, _8B, 64, 1, 1, 8192, "selective layer", 2904),
    Row(APRIL, A100, _70B, 64, 1, 1, 8192, "full", 331),
    Row(APRIL, A100, "Llama 2 13B", 64, 1, 2, 4096, "none", 2162),
    Row(APRIL, A100, "Llama 2 13B", 64, 1, 2, 4096, "selective layer", 1914),
    Row(APRIL, A100, "Llama 2 13B", 64, 1, 2, 4096, "selective op", 1904),
    Row(APRIL, A100, "Llama 2 70B", 64, 1, 1, 4096, "selective op", 355),
    Row(APRIL, A100, "Llama 2 70B", 64, 1, 2, 4096, "full", 353),
]


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


class Run(NamedTuple):
    """A plan of a step: the events of each stage, by its rank, and the most bytes of its tensors and its allocator."""

    events: dict[int, tuple[Event, ...]]
    mesh: dict[str, int]
    peaks: tuple[int, ...]
    reserved: tuple[int, ...]

    @staticmethod
    def of(layout: Layout) -> Run:
        f, args = step_of(layout)
        plan = fs.plan(f, *args, device=devices.H100)
        stages = plan.positions or (plan,)
        peaks = tuple(p.memory.peak for p in stages)
        return Run({p.rank: p.events for p in stages}, plan.mesh, peaks, tuple(map(reserved, stages)))


@dataclass(frozen=True)
class Planned:
    """The plan of a step; of a pipeline two plans with few blocks on each stage.

    Each block on all stages adds as many bytes and seconds once more: `more` times what the second plan adds.
    """

    runs: tuple[Run, ...]
    more: int = 0

    @staticmethod
    def of(layout: Layout) -> Planned:
        if layout.stage == 1:
            return Planned((Run.of(layout),))
        few, one_more = 2 * layout.stage - 2, layout.stage * layout.chunks  # blocks: 2 on a stage, 1 for each chunk
        sizes = [dataclasses.replace(layout.sizes, layers=n) for n in (few, few + one_more)]
        runs = tuple(Run.of(dataclasses.replace(layout, sizes=s)) for s in sizes)
        return Planned(runs, (layout.sizes.layers - few) // one_more)

    def extended(self, numbers: Sequence[float]) -> float:
        """Return a number of the step, by the number of each run."""
        return numbers[0] + self.more * (numbers[-1] - numbers[0])

    @property
    def peaks(self) -> list[float]:
        """The most bytes of tensors on each stage."""
        return [self.extended(numbers) for numbers in zip(*[run.peaks for run in self.runs], strict=True)]

    @property
    def reserved(self) -> float:
        """The most bytes that the allocator takes. What it has free grows unevenly: that of the last run is added."""
        last = self.runs[-1]
        return max(n + r - p for n, r, p in zip(self.peaks, last.reserved, last.peaks, strict=True))


@dataclass(frozen=True)
class Predicted:
    """A row with its prediction: the times of the runs, of a pipeline for its first stage."""

    row: Row
    plan: Planned
    times: tuple[Roofline, ...]

    @property
    def seconds(self) -> float:
        return self.plan.extended([time.seconds for time in self.times])

    @property
    def mfu(self) -> float:
        return self.plan.extended([time.flops_at_peak for time in self.times]) / self.seconds

    @property
    def waits(self) -> dict[str, float]:
        """For the axes of transfers, the share of the step in which operations wait for them."""
        return {axes: self.plan.extended([time.exposed[axes] for time in self.times]) / self.seconds
                for axes in self.times[0].exposed}  # fmt: skip

    @property
    def tokens(self) -> float:
        """Tokens per second and device."""
        own = self.row.layout
        return own.batch * own.time / self.seconds / (own.model * own.stage)


def predict(row: Row, plan: Planned, efficiency: float) -> Predicted:
    """Return the prediction of a row, at an efficiency of its device."""
    device = dataclasses.replace(row.device, efficiency=efficiency)

    def changed(events: Sequence[Event]) -> Sequence[Event]:
        events = fused(events) if "compile" in row.options else events
        return in_float8(events, row.layout) if "float8" in row.options else events

    times = [joined({rank: changed(events) for rank, events in run.events.items()}, run.mesh, device)[0]
             for run in plan.runs]  # fmt: skip
    return Predicted(row, plan, tuple(times))


def fitted_efficiency(speed: Callable[[float], float], measured: float) -> float:
    """Return the efficiency at which a predicted speed, which grows with it, is the measured one, by bisection."""
    low, high = 0.05, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if speed(middle) < measured else (low, middle)
    return low


def fit(row: Row, plan: Planned) -> float:
    """Return the efficiency at which the predicted speed of a row is the published one."""
    return fitted_efficiency(lambda efficiency: predict(row, plan, efficiency).tokens, row.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="rows whose names have one of these words"
    )
    args = parser.parse_args()
    chosen = [row for row in ROWS if row.fit or any(word in row.name for word in args.only)]
    efficiency: dict[str, float] = {}
    plans: dict[Layout, Planned] = {}
    found = []
    heads = ("step", "checkpointing", "tokens/s", "predicted", "GiB", "reserved", "tensors")
    print("{:69} {:16} {:>8} {:>16} {:>6} {:>14} {:>7}  waits".format(*heads))
    for row in sorted(chosen, key=lambda row: (row.device.name, not row.fit)):  # the fitted ones first
        if row.layout not in plans:
            plans[row.layout] = Planned.of(row.layout)
        plan = plans[row.layout]
        if row.fit:
            efficiency[row.device.name] = fit(row, plan)
        p = predict(row, plan, efficiency[row.device.name])
        found.append(p)
        speed = f"{p.tokens:,.0f} " + ("(fit)" if row.fit else f"({p.tokens / row.tokens - 1:+.1%})")
        gib = plan.reserved / GIB
        memory = f"{gib:.1f}" + (f" ({gib / row.gib - 1:+.1%})" if row.gib else "")
        waits = ", ".join(f"{axes} {share:.0%}" for axes, share in p.waits.items())
        print(f"{row.device.name + ': ' + row.name:69} {row.checkpointing:16} {row.tokens:8,.0f} {speed:>16} "
              f"{row.gib or '':>6} {memory:>14} {max(plan.peaks) / GIB:7.1f}  {waits}; MFU {p.mfu:.1%}",
              flush=True)  # fmt: skip
    print("\nefficiency: " + ", ".join(f"{name} {e:.3f}" for name, e in efficiency.items()))
    if args.json:
        args.json.write_text(json.dumps([{
            "source": p.row.source, "step": p.row.name, "checkpointing": p.row.checkpointing, "fit": p.row.fit,
            "tokens": p.row.tokens, "predicted_tokens": p.tokens, "gib": p.row.gib, "reserved": p.plan.reserved,
            "tensors": max(p.plan.peaks),
        } for p in found], indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
