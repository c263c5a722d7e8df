"""Every published row that plans are judged by, with its error: `python -m tests.benchmarks.trust`.

`published.csv` has the rows and, once `--write` has run, their plans. Decided before blind rows were planned, but for
one entry:

- `use`: rows of sources that this repository had before (torchtitan's tables of 2024 and 2025) are `fit`: constants
  and rules were chosen with them in view. All rows of other sources are `blind`, and no number is fitted to them.
- Of long tables these rows: models of a billion parameters or more, computed in bfloat16, at 2,048 tokens; MosaicML's
  7B on H100 at every length, and its others on the fewest devices and on 64, 128 and 512. Those of 4,096 tokens and
  more on 8 devices were added after the rule for attention in Triton (below), and planned once.
- `planned`: tokens per second and device, with the constants of `devices.fitted`, as `fshard plan` gives them. The step
  is the one that `fshard plan` plans, of `fs.models`; torchtitan's and KempnerForge's are of `torchtitan_step`.
- `calibrated`: the same with one efficiency for each source and device, at which its row marked `calibrates` is as fast
  as measured. That is its first row, or the 7B at 2,048 tokens on the fewest devices. The row itself is not counted.
- Changed after blind rows were planned, by what sources and papers say. Errors were in view; none is fitted to.
  MosaicML's other numbers of devices were left out, for time; the launch was fitted again, on fit rows; Megatron-LM's
  pipelines sum gradients once a step (`kept`), and its attention is products, softmax and dropout (`unfused`), since
  no fused kernel was there; KempnerForge's steps gather for each product and sum gradients once a step, by its code,
  on a network and with an attention as fast as in its profile; fused attention has an efficiency, which papers on the
  kernels state; pipelines of more than 4 stages extend plans of 2 and 4; MosaicML's attention is FlashAttention in
  Triton, the default of its scripts, but for its table of 128 H100 and more, whose script names FlashAttention-2;
  torchtitan of June 2025 with `--training.compile` compiles its loss, which keeps no float32 logits (`loss`).
- `layer`: forward and backward of one block, without the update: what one block more adds to a step.
- TorchShard's rows are memory, and its first fits what no shape knows.
- Products of compiled steps, and of steps in float8, follow the rules of `published.py`.
- The error bar of a kind is the error that nine in ten of its blind rows are within, or of all rows if few are blind.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fshard as fs
from fshard import devices
from fshard.cli.train_step import Job, train_step
from fshard.models import gpt2, resnet
from fshard.planning.devices import Device

from . import published
from .predict_classes import CLASSES
from .published import GIB, Planned, Run, summed_once, tokens_per_second
from .torchshard_step import BATCH, RANKS, Theirs
from .torchtitan_step import Layout, Sizes, step_of

FILE = Path(__file__).with_name("published.csv")
KINDS = ("one device", "data", "FSDP", "long FSDP", "tensor", "pipeline")
_VOCAB = {"MPT": 50_368, "GPT": 51_200}
SIZES = {  # layers, width, heads, and of Llamas hidden units
    "KempnerForge 7B": (32, 4096, 32, 14336), "KempnerForge 13B": (40, 5120, 40, 17920),
    "KempnerForge 29B": (56, 6144, 48, 21504), "KempnerForge 175B": (96, 12288, 96, 39680),
    "Llama 3 70B": (80, 8192, 64, 28672),
    "MPT 1B": (24, 2048, 16), "MPT 3B": (32, 2560, 20), "MPT 7B": (32, 4096, 32), "MPT 13B": (40, 5120, 40),
    "MPT 30B": (48, 7168, 56), "MPT 70B": (80, 8192, 64),
    "GPT 1.7B": (24, 2304, 24), "GPT 3.6B": (30, 3072, 32), "GPT 7.5B": (36, 4096, 32), "GPT 18.4B": (40, 6144, 48),
    "GPT 22B": (48, 6144, 64), "GPT 39.1B": (48, 8192, 64), "GPT 76.1B": (60, 10240, 80),
    "GPT 145.6B": (80, 12288, 96), "GPT 175B": (96, 12288, 96), "GPT 310.1B": (96, 16384, 128),
    "GPT 529.6B": (105, 20480, 128), "GPT 1008B": (128, 25600, 160),
}  # fmt: skip
Bar = tuple[float, int] | None  # a share, and the number of rows
_TRITON = 1.9  # FlashAttention-2 is 1.3 to 2.5 times as fast as FlashAttention in Triton (arXiv:2307.08691, section 4)
_LAYER = ((2, -1.0), (3, 1.0))  # blocks and weights of a row of one layer
_IN_A_NODE = devices.H200.links[0]._replace(ranks=4)  # KempnerForge's nodes have 4 H200
# By its profile of 13B on 24 H200, which is not a row: 350 GB of gathered and summed parameters take 18.8 s, and a
# backward of attention, by cuDNN, 0.65 ms: 67% of the peak.
_BEYOND = devices.H200.links[1]._replace(bandwidth=18.6e9)
DEVICES = {
    **{d.name: d for d in (devices.H100, devices.H200, devices.A100, devices.A100_40GB, published.H100)},
    "H200, 4 in a node": dataclasses.replace(devices.H200, links=(_IN_A_NODE, _BEYOND)),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One published row: a step, its tokens per second and device, the most GiB, and what was planned for it."""

    source: str
    use: str
    device: str
    model: str
    replica: int
    data: int
    tensor: int
    stage: int
    batch: int  # of a microbatch on each data rank
    accumulate: int
    schedule: Any
    chunks: int
    time: int
    recompute: Any
    options: str
    tokens: float | None
    gib: float | None
    planned: float | None
    calibrated: float | None
    planned_gib: float | None

    @property
    def kind(self) -> str:
        """The kind of parallelism that its error is counted for: the one that is hardest to plan."""
        return ("pipeline" if self.stage > 1 else "tensor" if self.tensor > 1 else
                "long FSDP" if self.data > 1 and self.time > 8192 else "FSDP" if self.data > 1 else
                "data" if self.replica > 1 else "one device")  # fmt: skip

    @property
    def calibrates(self) -> bool:
        return "calibrates" in self.options.split()

    @property
    def cluster(self) -> tuple[str, str]:
        """The rows that one efficiency is calibrated for: of a repository, on a device."""
        return self.source.split(":")[0], self.device

    @property
    def error(self) -> float | None:
        return None if self.planned is None or self.tokens is None else self.planned / self.tokens - 1

    @property
    def calibrated_error(self) -> float | None:
        known = self.calibrated is not None and self.tokens is not None and not self.calibrates
        return self.calibrated / self.tokens - 1 if known else None  # type: ignore[operator]

    @property
    def error_of_bytes(self) -> float | None:
        fitted = self.calibrates and self.tokens is None  # TorchShard's first row
        return None if fitted or self.planned_gib is None or self.gib is None else self.planned_gib / self.gib - 1

    @property
    def devices(self) -> int:
        return self.replica * self.data * self.tensor * self.stage

    @property
    def is_torchtitan(self) -> bool:
        return self.source.startswith("pytorch/torchtitan")

    @property
    def is_megatron(self) -> bool:
        return self.source.startswith("NVIDIA/Megatron-LM")

    @property
    def has_triton(self) -> bool:
        """True for attention by FlashAttention in Triton, the default of MosaicML's benchmarks.

        Its benchmarks of 2024, on 128 H100 and more, name FlashAttention-2.
        """
        return self.source.startswith("mosaicml/llm-foundry") and not (self.device == "H100" and self.devices >= 128)

    @property
    def is_forge(self) -> bool:
        return self.source.startswith("KempnerInstitute/KempnerForge")

    @property
    def head(self) -> int:
        """The width of a head."""
        return SIZES[self.model][1] // SIZES[self.model][2]

    @property
    def is_torchshard(self) -> bool:
        return self.source.startswith("KaiyuYue/torchshard")

    @property
    def step(self) -> Row:
        """The row with nothing but its step: what plans are kept by."""
        of_steps = {"kept", "sequence", "layer", *(["compile", "loss"] if self.is_torchtitan else [])}
        options = " ".join(x for x in self.options.split() if x in of_steps)
        return dataclasses.replace(self, source="", use="", device="", options=options, tokens=0, gib=None,
                                   planned=None, calibrated=None, planned_gib=None)  # fmt: skip

    def __str__(self) -> str:
        axes = (("DP", self.replica), ("FSDP", self.data), ("TP", self.tensor), ("PP", self.stage))
        over = " x ".join(f"{name} {n}" for name, n in axes if n > 1) or "one"
        return f"{self.model}, {self.device}, {over}, {self.batch} x {self.accumulate} of {self.time:,}"


def rows() -> list[Row]:
    """Return the rows of `published.csv`."""
    with FILE.open(newline="") as f:
        return [Row(**{field.name: _read(field.type, line[field.name]) for field in dataclasses.fields(Row)})
                for line in csv.DictReader(f)]  # fmt: skip


def _read(kind: Any, text: str) -> Any:
    if kind == "int":
        return int(text)
    return (float(text) if text else None) if str(kind).startswith("float") else text


def write(found: Sequence[Row]) -> None:
    """Write rows to `published.csv`, with four digits of what is planned."""
    new = FILE.with_suffix(f".{os.getpid()}")
    with new.open("w", newline="") as f:
        out = csv.writer(f, lineterminator="\n")
        names = [field.name for field in dataclasses.fields(Row)]
        out.writerow(names)
        for row in found:
            values = [getattr(row, name) for name in names]
            out.writerow([f"{x:.4g}" if name.startswith(("planned", "calibrated")) and x else "" if x is None
                          else f"{x:g}" if isinstance(x, float) else x
                          for name, x in zip(names, values, strict=True)])  # fmt: skip
    new.replace(FILE)  # at once: several commands may plan parts of it


# --- plans ------------------------------------------------------------------------------------------------------


def job_of(row: Row, layers: int) -> Job:
    """Return the model of a row, with some of its blocks."""
    _, width, heads, *_ = SIZES[row.model]
    vocab = _VOCAB[row.model.split()[0]]
    cfg = gpt2.Config(vocab_size=vocab, n_positions=row.time, n_embd=width, n_layer=layers, n_head=heads)
    return Job(gpt2, cfg, row.time)


def plan_of(row: Row) -> Planned:
    """Plan the step of a row: some of its blocks, microbatches and stages, and more of each, as much as all others add.

    A pipeline of p stages with n microbatches, each of which takes t on a stage, takes (n + p - 1) t.
    """
    if row.is_torchtitan:
        return Planned.of(published.layout_of(row))
    runs, weights = [], []
    for stage, batch, of_both in _sizes(row):
        each = stage * row.chunks
        few = (each, 2 * each) if each > 1 else (3, 4) if row.data > 1 else (2, 3)  # 3: one with others around it
        if row.is_forge and stage > 1:
            few = 2 * stage - 2, 3 * stage - 2  # with the table and the head, as many layers on each stage
        for blocks, more in _LAYER if "layer" in row.options else _line(*few, SIZES[row.model][0] * stage / row.stage):
            run = Run.of(*_step_of(row, stage, blocks, batch))
            if row.is_forge and stage == 1:
                run = run._replace(events={rank: summed_once(events, batch) for rank, events in run.events.items()})
            runs.append(run)
            weights.append(of_both * more)
    return Planned(tuple(runs), tuple(weights))


def _sizes(row: Row) -> list[tuple[int, int, float]]:
    """Return numbers of stages and microbatches to plan, and their weights."""
    if row.stage > 4:  # a line of microbatches on 2 stages, and what 2 stages more add
        (a, less), (b, more) = _line(4, 8, row.accumulate)
        added = (row.stage - 2) / 2
        return [(2, a, less - added), (2, b, more), (4, a, added)]
    few = (1, 2) if row.stage == 1 else (row.stage, 2 * row.stage)
    few = few if row.accumulate > few[1] else (row.accumulate, row.accumulate)
    return [(row.stage, batch, share) for batch, share in _line(*few, row.accumulate)]


def _step_of(row: Row, stage: int, blocks: int, microbatches: int) -> tuple[Any, tuple[Any, ...]]:
    """Return the step of a row with some of its stages, blocks and microbatches, and its arguments."""
    if row.is_forge:
        _, width, heads, hidden = SIZES[row.model]
        sizes = Sizes(width, blocks, heads, 8, hidden)
        return step_of(Layout(sizes, row.data, row.tensor, row.batch * microbatches, row.time, "full", stage=stage,
                              microbatches=microbatches, program="KempnerForge"))  # fmt: skip
    return train_step(
        job_of(row, blocks), stage=stage, replica=row.replica, data=row.data, model=row.tensor,
        batch=row.replica * row.data * row.batch * microbatches, accumulate=microbatches, schedule=row.schedule,
        chunks=row.chunks, remat=row.recompute == "full", release="kept" not in row.options,
        sequence="sequence" in row.options,
    )  # fmt: skip


def _line(a: int, b: int, at: float) -> Iterator[tuple[int, float]]:
    """Yield the points a and b, and their weights in the value at `at` of a line through both."""
    yield a, 1 if a == b else 1 - (at - a) / (b - a)
    if a != b:
        yield b, (at - a) / (b - a)


@functools.cache
def plan_of_step(step: Row, source: str) -> Planned:
    return plan_of(dataclasses.replace(step, source=source))


def device_of(row: Row) -> Device:
    """Return the device of a row with its fitted constants, which the boards of one cluster share."""
    device, like = DEVICES[row.device], row.device.partition(",")[0]
    if like == "H100-96GB":  # at 500 W: `published.py` fits it
        return dataclasses.replace(devices.fitted(devices.H100), name=device.name, memory=device.memory,
                                   bandwidth=device.bandwidth, efficiency=published.EFFICIENCY)  # fmt: skip
    fitted = devices.fitted(device)
    share = 0.67 if row.is_forge else (fitted.attention or 1) / _TRITON if row.has_triton else fitted.attention
    return dataclasses.replace(fitted, attention=share)


def planned(row: Row, fits: dict[tuple[str, str], float]) -> Row:
    """Return a row with its plan; `fits` has one number for each cluster, from the row of it that calibrates.

    It is the efficiency; of TorchShard the GiB that no shape knows: a context, and workspaces of libraries.
    """
    if row.is_torchshard:
        cfg = resnet.Config.of(50, num_labels=CLASSES[row.model.split()[1]])
        mesh = fs.make_mesh(kind="abstract", data=RANKS)
        peak = Theirs(cfg, row.options.split()[0], mesh, BATCH).planned().memory.peak / GIB
        if row.calibrates:
            fits[row.cluster] = (row.gib or 0) - peak
        return dataclasses.replace(row, planned_gib=peak + fits[row.cluster])
    plan = plan_of_step(row.step, row.source.split(":")[0])
    device = device_of(row)
    speed: Callable[[float], float] = lambda e: tokens_per_second(row, plan, dataclasses.replace(device, efficiency=e))  # noqa: E731
    if row.calibrates:
        fits[row.cluster] = devices.efficiency_at(lambda e: 1 / speed(e), 1 / (row.tokens or 1))
    own = fits.get(row.cluster)
    gib = plan.reserved / GIB if row.is_torchtitan and row.gib else None
    return dataclasses.replace(
        row, planned=speed(device.efficiency), calibrated=None if own is None else speed(own), planned_gib=gib
    )


# --- what they say ----------------------------------------------------------------------------------------------


def share_within(errors: Iterable[float | None], share: float = 0.9) -> float | None:
    """Return the smallest error that a share of all are within, rounded up to a percent."""
    sizes = sorted(abs(e) for e in errors if e is not None)
    return math.ceil(100 * sizes[math.ceil(share * len(sizes)) - 1]) / 100 if sizes else None


def bars(found: Sequence[Row]) -> dict[str, tuple[Bar, Bar, float | None]]:
    """Return, for each kind, the error bars of seconds, of calibrated seconds, and of bytes.

    Of seconds they are of the blind rows, or with fewer than five of all. Of bytes it is of all.
    """
    out = {}
    for kind in KINDS:
        own = [r for r in found if r.kind == kind]
        of_seconds: list[Bar] = []
        for name in ("error", "calibrated_error"):
            known = [(r.use, e) for r in own if (e := getattr(r, name)) is not None]
            blind = [e for use, e in known if use == "blind"]
            errors = blind if len(blind) >= 5 else [e for _, e in known]
            share = share_within(errors)
            of_seconds.append(None if share is None else (share, len(errors)))
        out[kind] = of_seconds[0], of_seconds[1], share_within(r.error_of_bytes for r in own)
    return out


def orders(found: Sequence[Row]) -> list[tuple[Row, Row, bool]]:
    """Return pairs of layouts of one model on as many devices of a cluster: the faster first, and if it is planned so.

    Pairs that differ by less than 3% in what was measured are left out: so do repeated runs.
    """
    key = lambda r: (r.cluster, r.model, r.devices, r.time, "layer" in r.options)  # noqa: E731
    out = []
    for _, group in itertools.groupby(sorted((r for r in found if r.tokens), key=key), key):
        for a, b in itertools.combinations(sorted(group, key=lambda r: -(r.tokens or 0)), 2):
            differ = (a.data, a.tensor, a.stage, a.schedule, a.recompute) != (
                b.data, b.tensor, b.stage, b.schedule, b.recompute)  # fmt: skip
            if differ and (a.tokens or 0) > 1.03 * (b.tokens or 0) and a.planned and b.planned:
                out.append((a, b, a.planned > b.planned))
    return out


def _percent(x: float | None) -> str:
    return "" if x is None else f"{x:+.1%}"


def _line_of(r: Row) -> str:
    return (f"  {r!s:70} {r.use:5} {r.tokens or 0:9,.0f} {r.planned or 0:9,.0f} {_percent(r.error):>7} "
            f"{_percent(r.calibrated_error):>7} {r.gib or '':>6} {_percent(r.error_of_bytes):>7}")  # fmt: skip


def report(found: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the report."""
    yield f"{'step':72} {'use':5} {'tokens/s':>9} {'planned':>9} {'error':>7} {'calibr.':>7} {'GiB':>6} {'error':>7}"
    last = ""
    for r in found:
        if r.source != last:
            yield r.source
            last = r.source
        yield _line_of(r)
    yield ""
    yield f"{'kind':12} {'use':6} rows  seconds: median, nine in ten, worst   calibrated: median, nine in ten, worst"
    for kind, use in itertools.product(KINDS, ("blind", "fit")):
        own = [r for r in found if r.kind == kind and r.use == use and r.error is not None]
        if own:
            columns = [
                [e for r in own if (e := getattr(r, name)) is not None] for name in ("error", "calibrated_error")
            ]
            texts = [f"{statistics.median(map(abs, es)):5.1%}, {share_within(es):5.0%}, {max(es, key=abs):+6.1%}" if es
                     else "" for es in columns]  # fmt: skip
            yield f"{kind:12} {use:6} {len(own):4}  {texts[0]:38} {texts[1]}"
    yield ""
    pairs = orders(found)
    yield f"orders: {sum(ok for *_, ok in pairs)} of {len(pairs)} pairs of layouts on the same devices as measured"
    yield from (f"  wrong: {a} is faster than {b}, {a.tokens:,.0f} to {b.tokens:,.0f}" for a, b, ok in pairs if not ok)
    known = bars(found)
    yield f"error bars of fshard/planning/trust.py: {known}"
    missing = [r for r in found if r.planned is None and r.planned_gib is None]
    yield f"not planned yet: {len(missing)} rows of {len(found)}"
    for r in found:
        bar = known[r.kind][0]
        if r.error is not None and bar is not None and abs(r.error) > bar[0]:
            yield f"outside its bar of {bar[0]:.0%}: {r}: {_percent(r.error)} ({r.use}; {r.source})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="plan rows whose source, model or layout has a word")
    parser.add_argument("--stored", action="store_true", help="plan nothing: report what published.csv has")
    parser.add_argument("--write", action="store_true", help="write what was planned to published.csv")
    args = parser.parse_args()
    found, fits = rows(), dict[tuple[str, str], float]()
    chosen = [r for r in found if not args.stored and any(word in f"{r.source} {r}" for word in args.only or [""])]
    clusters = {r.cluster for r in chosen}
    for i, row in enumerate(found):
        if row in chosen or (row.calibrates and row.cluster in clusters):
            found[i] = planned(row, fits)
            print(_line_of(found[i]), flush=True)
            if args.write:
                write([found[i] if n == i else stored for n, stored in enumerate(rows())])
    for cluster, x in fits.items():
        print(f"fitted to {', '.join(cluster)}: {x:.3f}")
    print(*report(found), sep="\n")


if __name__ == "__main__":
    main()
