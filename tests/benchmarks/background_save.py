"""Saves while a program trains, ours and DCP's: `python -m tests.benchmarks.background_save [--ranks 1] [--mib 256]`.

The seconds that steps lose to one save: the call itself, what an asynchronous copy makes an update wait, and how much
slower the steps are until all is on the disk. README.md in this folder says how to read the report.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

import fshard as fs
from fshard import P, checkpoint

from .peers import run_on_ranks

OURS = "fshard"
LIMIT = 1.1  # of the seconds of any way of DCP
LEAF = 1 << 20  # elements of a leaf on each rank, 4 MiB
STEP = 0.05  # seconds of a step, about

Report = dict[str, Any]


def synchronous() -> DefaultStager:
    return DefaultStager(StagingOptions(False, False, False, False))


# name -> what makes the stager, and whether one is kept from save to save
STAGERS: dict[str, tuple[Callable[[], Any] | None, bool]] = {
    "async_save": (None, False),
    "DefaultStager, kept": (synchronous, True),
    "DefaultStager, asynchronous": (lambda: DefaultStager(StagingOptions(False, False, True, False)), True),
    "BlockingAsyncStager": (BlockingAsyncStager, False),
}


# What an update waits for; whether all is written; the last wait.
Started = tuple[Callable[[], object], Callable[[], bool], Callable[[], object]]


class Clock:
    """Seconds since it was made: of the wall, and of this thread on its core."""

    def __init__(self) -> None:
        self.begun = time.perf_counter(), time.thread_time()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self.begun[0], time.thread_time() - self.begun[1]


class Steps:
    """Steps of equal work, which read and then update the leaves as a training does."""

    def __init__(self) -> None:
        self.x = torch.randn(256, 256)
        self.products = 1
        seconds = min(self.run()[0] for _ in range(50))
        self.products = max(1, round(STEP / seconds))

    def run(self, before_update: Callable[[], object] = lambda: None) -> tuple[float, float]:
        clock = Clock()
        for _ in range(self.products):
            self.x @ self.x
        before_update()
        return clock.read()


def measure(save: Callable[[], Started], steps: Steps) -> Report:
    """Save once while steps run until all is written."""
    before = [steps.run() for _ in range(7)]
    clock = Clock()
    copied, is_written, wait = save()
    call = clock.read()
    taken = [steps.run(copied)]
    while not is_written():
        taken.append(steps.run())
    written, _ = clock.read()
    wait()
    out = {"written": written}
    for k, name in enumerate(("wall", "core")):
        step = statistics.median(seconds[k] for seconds in before)
        slower = sum(seconds[k] for seconds in taken) - step * len(taken)
        out |= {f"{name} call": call[k], f"{name} slower": slower, f"{name} lost": call[k] + slower}
    return out


def rank_job(mib: int, repeats: int, folder: str) -> list[dict[str, Report]]:
    """Measure every way in turn, on one rank, and return a report for each round."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = fs.make_mesh(data=ranks)
    leaves = max(1, mib * 2**20 // (4 * LEAF))
    parts = {f"w{i}": torch.randn(LEAF) for i in range(leaves)}
    tree = {name: fs.from_callback((LEAF * ranks,), P("data"), mesh, lambda _, x=x: x) for name, x in parts.items()}
    named = {f"{name}.{rank}": x for name, x in parts.items()}
    steps, out = Steps(), Path(folder)
    kept = {name: make() for name, (make, is_kept) in STAGERS.items() if make is not None and is_kept}

    def ours() -> Any:
        checkpoint.save(out / "fshard", tree, overwrite=True, background=True)
        thread = checkpoint.background._saves[-1].thread
        return lambda: None, lambda: not thread.is_alive(), checkpoint.background.raise_failure

    def dcps(name: str) -> Any:
        make, is_kept = STAGERS[name]
        stager = kept[name] if is_kept else make and make()
        response = dcp.async_save(named, checkpoint_id=str(out / "dcp"), async_stager=stager)
        if isinstance(response, dcp.state_dict_saver.AsyncSaveResponse):
            upload = response.upload_completion
            return response.staging_completion.result, upload.done, upload.result
        return lambda: None, response.done, response.result

    ways: dict[str, Callable[[], Any]] = {OURS: ours} | {name: lambda name=name: dcps(name) for name in STAGERS}
    rounds = []
    for _ in range(repeats + 1):
        found = {}
        for name, save in ways.items():
            dist.barrier()
            found[name] = measure(save, steps)
        rounds.append(found)
    checkpoint.wait()
    return rounds[1:]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.benchmarks.background_save", description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--mib", type=int, default=256, help="of leaves on each rank")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    folder = tempfile.mkdtemp()
    try:
        by_rank = run_on_ranks(args.ranks, rank_job, args.mib, args.repeats, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"torch {torch.__version__}, cpu, ranks {args.ranks}, of one thread; {os.cpu_count()} cores, load "
          f"{os.getloadavg()[0]:.1f}; {args.mib} MiB on each rank; medians of {args.repeats} rounds")  # fmt: skip
    rounds = [{name: max((of_rank[i][name] for of_rank in by_rank), key=lambda r: r["core lost"])
               for name in by_rank[0][i]} for i in range(args.repeats)]  # fmt: skip
    columns = ["core call", "core lost", "wall call", "wall lost", "written"]
    print(f"\n{'milliseconds':<28}{''.join(f'{c:>11}' for c in columns)}   fshard / this: core, wall")
    for name in rounds[0]:
        cells = "".join(f"{1e3 * statistics.median(r[name][c] for r in rounds):11.0f}" for c in columns)
        core, wall = (statistics.median(r[OURS][c] / r[name][c] for r in rounds) for c in ("core lost", "wall lost"))
        verdict = "" if name == OURS else f"{core:9.2f}{wall:9.2f}   {'ok' if core <= LIMIT else f'above {LIMIT}'}"
        print(f"{name:<28}{cells}{verdict}")
    if args.json:
        args.json.write_text(json.dumps(rounds, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
