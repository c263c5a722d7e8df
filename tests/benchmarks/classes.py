"""The head of many classes beside torch: `python -m tests.benchmarks.classes [--ranks 2 4] [--classes 1k 100k 1M]`.

A table of classes, its softmax cross-entropy and a step of SGD with momentum, under DDP, DTensor and fshard: memory of
a rank and seconds of a step, by the number of classes. README.md in this folder says how to read the report.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fshard as fs
from fshard import P

from .init import MIB, peak_bytes, reset_peak, spread
from .peers import distance, ratios, run_on_ranks
from .predict_classes import CLASSES
from .step_cost import counting, measure_step
from .train_steps import Step, groups, optimized

WIDTH = 2048
BATCH = 64  # of all ranks
INPUTS = 4  # width of what the features are computed from: a body of a few rows
LR, MOMENTUM = 1e-3, 0.9
WARMUP = 2
LOSSES = 1e-4  # the largest relative difference of two loss curves
# Tensors of the size of a rank's part of the table that live at once; DDP's gradients are in its buckets too.
TABLES = {"ddp": 4, "dtensor": 3, "ours": 3, "chunked": 2}
WHAT = {"ddp": "weight, gradient, momentum, bucket", "dtensor": "weight, gradient, momentum",
        "ours": "weight, gradient, momentum", "chunked": "weight, momentum"}  # fmt: skip
LIMITS = [  # (ours, peer, measure, limit)
    ("ours", "ddp", "live", 0.40), ("ours", "dtensor", "live", 1.0), ("ours", "dtensor", "time", 0.95),
    ("chunked", "ddp", "live", 0.40), ("chunked", "dtensor", "live", 0.80), ("chunked", "dtensor", "time", 0.95),
    ("ours", "minimum", "live", 1.15), ("chunked", "minimum", "live", 1.15),
]  # fmt: skip

Report = dict[str, Any]


# --- values: the same for all, and made without a whole table --------------------------------------------------


def fill(table: Tensor, first: int) -> None:
    """Write the rows of the classes from `first` on: a few random rows, repeated."""
    rows = torch.randn(997, table.shape[1], generator=torch.Generator().manual_seed(0)) * table.shape[1] ** -0.5
    with torch.no_grad():
        for at in range(0, len(table), 997):
            part = table[at : at + 997]
            part.copy_(rows.roll(-(first + at), 0)[: len(part)])


def batches(classes: int) -> list[tuple[Tensor, Tensor]]:
    """The (inputs, targets) of a few steps, [BATCH, INPUTS] and [BATCH]."""
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(BATCH, INPUTS, generator=g), torch.randint(classes, (BATCH,), generator=g)) for _ in range(2)]


def body() -> Tensor:
    """The matrix of the body, [INPUTS, WIDTH]."""
    return torch.randn(INPUTS, WIDTH, generator=torch.Generator().manual_seed(2))


def table(classes: int, mesh: fs.Mesh) -> fs.Sharded:
    """The table of the classes, split over the ranks, [C@model, WIDTH]."""

    def part(box: tuple[slice, ...]) -> Tensor:
        out = torch.empty([s.stop - s.start for s in box])
        fill(out, box[0].start)
        return out

    return fs.from_callback((classes, WIDTH), P("model"), mesh, part)


# --- steps ----------------------------------------------------------------------------------------------------


class Head(nn.Module):
    """A body of one small matrix, so that the features have a gradient, and the classifier."""

    def __init__(self, classes: int, device: str) -> None:
        super().__init__()
        self.body = nn.Parameter(body())
        self.fc = nn.Linear(WIDTH, classes, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x @ self.body)
        return y


def torch_step(model: nn.Module, data: list[tuple[Tensor, Tensor]], context: Any = contextlib.nullcontext) -> Step:
    # The fused kernel has no rule for DTensor in torch 2.13.
    kernel = "foreach" if any(isinstance(p, DTensor) for p in model.parameters()) else "fused"
    optimizer = torch.optim.SGD(groups(model), lr=LR, momentum=MOMENTUM, **{kernel: True})

    def loss_of(i: int) -> Tensor:
        x, targets = data[i % len(data)]
        return F.cross_entropy(model(x), targets)

    return optimized(loss_of, optimizer, context)


def ddp(classes: int) -> Step:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = Head(classes, "cpu")
    fill(model.fc.weight, 0)
    own = [(x.chunk(ranks)[rank], t.chunk(ranks)[rank]) for x, t in batches(classes)]
    return torch_step(DistributedDataParallel(model), own)


def dtensor(classes: int) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Head(classes, "meta")
    style = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"fc": style})
    own = torch.empty(classes // mesh.size(), WIDTH)  # every size is a multiple of the ranks
    fill(own, len(own) * dist.get_rank())
    model.fc.weight = nn.Parameter(DTensor.from_local(own, mesh, [Shard(0)]))
    return torch_step(model, batches(classes), loss_parallel)


def ours(classes: int, *, in_backward: tuple[str, ...]) -> Step:
    mesh = fs.make_mesh(kind="process", model=dist.get_world_size())
    specs = {"body": P(), "w": P("model")}
    opt = fs.optim.sgd(LR, momentum=MOMENTUM)
    placed = {"params": specs, "opt": opt.specs(specs)}

    def loss_fn(params: Any, x: Tensor, targets: Tensor) -> Tensor:
        logits = fs.nn.linear(fs.pvary(x @ params["body"], "model"), params["w"].mT)  # [B, C@model]
        return fs.nn.cross_entropy(logits, targets, axis="model", size=classes, donate=True)

    @fs.shard_map(mesh=mesh, in_specs=(placed, P(), P()), out_specs=(placed, P()), donate=0)
    def train(state: Any, x: Tensor, targets: Tensor) -> Any:
        params, opt_state = state["params"], state["opt"]
        if in_backward:
            loss, params, opt_state = fs.value_and_update(loss_fn, opt, in_backward=in_backward)(
                params, opt_state, x, targets)  # fmt: skip
        else:
            loss, grads = fs.value_and_grad(loss_fn)(params, x, targets)
            params, opt_state = opt.update(grads, opt_state, params)
        return {"params": params, "opt": opt_state}, loss

    params = {"body": fs.device_put(body(), P(), mesh), "w": table(classes, mesh)}
    state = {"params": params, "opt": opt.init(params)}
    data = [fs.device_put(b, P(), mesh) for b in batches(classes)]

    def step(i: int) -> Tensor:
        nonlocal state
        state, loss = train(state, *data[i % len(data)])
        return loss.shards[0]

    return step


STEPS: dict[str, Callable[[int], Step]] = {
    "ddp": ddp,
    "dtensor": dtensor,
    "ours": functools.partial(ours, in_backward=()),
    "chunked": functools.partial(ours, in_backward=("w",)),
}


# --- on the ranks ---------------------------------------------------------------------------------------------


def timed(build: Callable[[], Step], steps: int) -> Report:
    """Seconds and losses of some steps, and the peak of resident bytes in them above those before."""
    before = reset_peak()
    step = build()
    losses = [float(step(i)) for i in range(WARMUP)]
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    reset_peak()
    seconds, cpu = [], []
    for i in range(WARMUP, WARMUP + steps):
        dist.barrier()
        start, of_cpu = time.perf_counter(), time.process_time()
        loss = step(i)
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - of_cpu)
        losses.append(float(loss))
    return {"seconds": seconds, "cpu": cpu, "losses": losses, "resident": peak_bytes() - before}


def tensor_bytes(build: Callable[[], Step]) -> int:
    """The most bytes live in tensors during a step, of everything that the process allocated."""
    return measure_step(lambda: counting(build()), warmup=WARMUP).peak


# --- the report -----------------------------------------------------------------------------------------------


def minimum(which: str, classes: int, ranks: int) -> int:
    """Bytes of a rank that cannot be avoided: its parts of the tables, and of the logits."""
    own = classes if which == "ddp" else -(-classes // ranks)
    tables = min(TABLES[which], 3)
    return 4 * own * (tables * WIDTH + (BATCH // ranks if which == "ddp" else BATCH))


def needed(which: str, classes: int, ranks: int) -> tuple[int, str]:
    """The bytes of all ranks that a step needs, and the arithmetic."""
    own = classes if which == "ddp" else -(-classes // ranks)
    total = ranks * TABLES[which] * own * WIDTH * 4
    return total, f"{ranks} ranks x {TABLES[which]} ({WHAT[which]}) x {own:,} x {WIDTH} x 4 B = {total / 1e9:.1f} GB"


def available() -> int:
    line = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def described(classes: int, ranks: int, args: argparse.Namespace) -> Report:
    """The minimum of every way, and the arithmetic of those that do not fit."""
    rows: Report = {}
    for which in args.which:
        total, arithmetic = needed(which, classes, ranks)
        fits = total < args.memory * 1e9
        rows[which] = {"minimum": minimum(which, classes, ranks)} | ({} if fits else {"skipped": arithmetic})
    return rows


def measure(rows: Report, ways: Mapping[str, Callable[[int], Step]], classes: int, ranks: int, *, rounds: int,
            steps: int, measures: Sequence[str] = ("live", "time")) -> None:  # fmt: skip
    """Add the figures of the ways that fit: every way in turn, each time in new processes, `rounds` times over."""
    here = {which: functools.partial(ways[which], classes) for which, row in rows.items() if "skipped" not in row}
    if "live" in measures:
        for which, build in here.items():
            rows[which]["live"] = max(run_on_ranks(ranks, tensor_bytes, build))
    for which in here if "time" in measures else ():
        rows[which] |= {"seconds": [], "cpu": [], "resident": 0}
    for _ in range(rounds if "time" in measures else 0):
        for which, build in here.items():
            found, row = run_on_ranks(ranks, timed, build, steps), rows[which]
            for clock in ("seconds", "cpu"):
                row[clock] += [max(ts) for ts in zip(*(r[clock] for r in found), strict=True)]
            row["resident"] = max(row["resident"], *(r["resident"] for r in found))
            row["losses"] = [statistics.fmean(xs) for xs in zip(*(r["losses"] for r in found), strict=True)]


def show(rows: Report) -> None:
    titles = ["live MiB", "minimum", "of it", "resident", "s/step", "least", "most", "CPU s", "loss"]
    print(f"  {'':9}" + "".join(f"{t:>10}" for t in titles), flush=True)
    for which, row in rows.items():
        if "skipped" in row:
            print(f"  {which:9} does not fit: {row['skipped']}")
            continue
        cells = [f"{row['live'] / MIB:10.1f}" if "live" in row else f"{'-':>10}", f"{row['minimum'] / MIB:10.1f}",
                 f"{row['live'] / row['minimum']:10.3f}" if "live" in row else f"{'-':>10}"]  # fmt: skip
        if "seconds" in row:
            x = spread(row["seconds"])
            cells += [f"{row['resident'] / MIB:10.1f}", *(f"{x[k]:10.3f}" for k in ("median", "least", "most"))]
            cells += [f"{spread(row['cpu'])['median']:10.3f}", f"{row['losses'][-1]:10.4f}"]
        print(f"  {which:9}" + "".join(cells))


def verdicts(rows: Report) -> list[Report]:
    out = []
    for one, peer, measure, limit in LIMITS:
        x, y = rows.get(one, {}), rows.get(one if peer == "minimum" else peer, {})
        if measure == "time" and {"seconds"} <= x.keys() & y.keys():
            out.append({"ratio": ratios(x["seconds"], y["seconds"])[0]})
        elif measure == "live" and "live" in x and ("minimum" if peer == "minimum" else "live") in y:
            out.append({"ratio": x["live"] / y["minimum" if peer == "minimum" else "live"]})
        else:
            continue
        verdict = "pass" if out[-1]["ratio"] <= limit else "miss"
        out[-1] |= {"ours": one, "peer": peer, "measure": measure, "limit": limit, "verdict": verdict}
    return out


def main(argv: list[str] | None = None) -> int:
    """Print the report; the exit status is 0 if the losses agree, even if a limit was missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.classes", description=__doc__)
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--which", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--measure", nargs="+", choices=("time", "live"), default=["time", "live"])
    parser.add_argument("--rounds", type=int, default=5, help="new processes for each way, in turn")
    parser.add_argument("--steps", type=int, default=3, help="counted steps of each process")
    parser.add_argument("--memory", type=float, default=0.95 * available() / 1e9, help="GB that may be used")
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    args = parser.parse_args(argv)
    print(f"torch {torch.__version__}, batch {BATCH}, {WIDTH} features, float32, SGD with momentum, 1 thread a rank, "
          f"load {os.getloadavg()[0]:.1f}, {args.memory:.1f} GB")  # fmt: skip
    gc.freeze()
    report: Report = {}
    problems = []
    for ranks in args.ranks:
        for name in args.classes:
            print(f"\n{name} classes on {ranks} ranks", flush=True)
            rows = described(CLASSES[name], ranks, args)
            measure(rows, STEPS, CLASSES[name], ranks, rounds=args.rounds, steps=args.steps, measures=args.measure)
            show(rows)
            found = verdicts(rows)
            for x in found:
                ratio = f"{x['ratio']:.3f}, at most {x['limit']:.2f}"
                print(f"  {x['ours']} / {x['peer']}, {x['measure']}: {ratio}  {x['verdict']}")
            curves = {which: row["losses"] for which, row in rows.items() if "losses" in row}
            for which, curve in curves.items():
                difference = distance(curve, next(iter(curves.values())))
                if not difference <= LOSSES:
                    problems.append(f"{name} on {ranks}: the losses of {which} differ by {difference:.1e}")
            report[f"{name} on {ranks}"] = {"rows": rows, "verdicts": found}
            if args.json:
                args.json.write_text(json.dumps(report, indent=1))
    for x in problems:
        print(f"PROBLEM: {x}")
    return 1 if problems else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
