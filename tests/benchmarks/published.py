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

import torch

from fshard import devices
from fshard.planning import Event, Operation, Roofline, Start, roofline
from fshard.planning.devices import Device

from .caching_allocator import plan_with_storages, reserved
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

    @property
    def layout(self) -> Layout:
        compiled = "compile" in self.options and self.checkpointing == "selective op"
        return Layout(LLAMA[self.model], self.data, self.tensor, self.batch, self.time, self.checkpointing, compiled)

    @property
    def name(self) -> str:
        over = f"FSDP {self.data}" + (f" x TP {self.tensor}" if self.tensor > 1 else "")
        return f"{self.model}, {over}, {' + '.join(self.options) or 'eager'}"


DECEMBER = "benchmarks/llama3_h100_202412_torchtitan.md"
JUNE = "benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
APRIL, AUGUST = "docs/performance.md at 1ea476e", "docs/performance.md at 9515a14, 3faaa1a"
_8B, _70B = "Llama 3 8B", "Llama 3 70B"
_COMPILE, _FLOAT8 = ("compile",), ("compile", "float8")

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
    Row(AUGUST, H100, "Llama 3 405B", 16, 8, 2, 8192, "full", 109),
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
    head = 2 * layout.batch * layout.time * s.width * s.vocab // layout.model
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


@dataclass(frozen=True)
class Planned:
    """The events of a step, the mesh, and the bytes that its tensors and the allocator take."""

    events: tuple[Event, ...]
    mesh: dict[str, int]
    peak: int
    reserved: int

    @staticmethod
    def of(layout: Layout) -> Planned:
        f, args = step_of(layout)
        plan, storages = plan_with_storages(f, args, devices.H100)
        return Planned(plan.events, plan.mesh, plan.memory.peak, reserved(plan, storages))


@dataclass(frozen=True)
class Predicted:
    """A row with its prediction."""

    row: Row
    plan: Planned
    time: Roofline

    @property
    def tokens(self) -> float:
        """Tokens per second and device."""
        own = self.row.layout
        return self.time.tokens_per_second(own.batch * own.time) / own.model


def predict(row: Row, plan: Planned, efficiency: float) -> Predicted:
    """Return the prediction of a row, at an efficiency of its device."""
    events: Sequence[Event] = plan.events
    events = fused(events) if "compile" in row.options else events
    events = in_float8(events, row.layout) if "float8" in row.options else events
    return Predicted(row, plan, roofline(events, plan.mesh, dataclasses.replace(row.device, efficiency=efficiency)))


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
    print("{:58} {:16} {:>8} {:>16} {:>6} {:>14} {:>7}  waits".format(*heads))
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
        waits = ", ".join(f"{axes} {s / p.time.seconds:.0%}" for axes, s in p.time.exposed.items())
        print(f"{row.device.name + ': ' + row.name:58} {row.checkpointing:16} {row.tokens:8,.0f} {speed:>16} "
              f"{row.gib or '':>6} {memory:>14} {plan.peak / GIB:7.1f}  {waits}; MFU {p.time.mfu:.1%}",
              flush=True)  # fmt: skip
    print("\nefficiency: " + ", ".join(f"{name} {e:.3f}" for name, e in efficiency.items()))
    if args.json:
        args.json.write_text(json.dumps([{
            "source": p.row.source, "step": p.row.name, "checkpointing": p.row.checkpointing, "fit": p.row.fit,
            "tokens": p.row.tokens, "predicted_tokens": p.tokens, "gib": p.row.gib, "reserved": p.plan.reserved,
            "tensors": p.plan.peak,
        } for p in found], indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
