"""Kill saving programs at random moments, and see that what they saved is there, and nothing else.

    python -m tests.faults.kills --runs 1000

The promise: after a kill a folder restores to the state of the last `save` that returned, or of the one after it, in
every value. The next save removes what the killed one left. A run is one program, forked from this process, which
reports each return of `save` through a pipe; SIGKILL comes at a random moment. The next run continues in the same
folder, so that kills follow each other. A save in the background has returned when the next one has.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P, ShardingError, checkpoint
from fshard.recipes import pretrain
from fshard.recipes.log import read_metrics
from tests.lib.forked import ended, fork, free_port, set_rank

TIMEOUT = 600  # seconds that only a program that hangs reaches
SIZES = {"w": (64, 300), "b": (301,), "e": (0, 3)}


def state(n: int, mesh: fs.Mesh | None = None) -> dict[str, Any]:
    """Return the n-th state: every value of it tells n; placed on a mesh, or plain tensors."""
    leaves: dict[str, Any] = {name: torch.arange(torch.Size(s).numel()).view(s) * 1.0 + n for name, s in SIZES.items()}
    if mesh is not None:
        leaves = fs.device_put(leaves, {"w": P("data"), "b": P("data"), "e": P()}, mesh)
    return {**leaves, "n": n, "text": f"state {n}"}


def number_of(restored: dict[str, Any]) -> int:
    """Return n of a restored state. Raises AssertionError if a value is that of another state."""
    want = state(restored["n"])
    for name in SIZES:
        assert torch.equal(restored[name], want[name]), f"{name} is not that of state {want['n']}"
    assert restored["text"] == want["text"]
    return int(want["n"])


# --- programs: save the n-th state into a folder; read the last one back, 0 if there is none ----------------------


def save_numbered(folder: Path, n: int, mesh: fs.Mesh | None) -> None:
    checkpoint.save(folder, state(n, mesh), step=n, keep=2)


def save_in_background(folder: Path, n: int, mesh: fs.Mesh | None) -> None:
    checkpoint.save(folder, state(n, mesh), step=n, keep=2, background=True)


def read_numbered(folder: Path) -> int:
    for step in checkpoint.steps(folder):
        assert number_of(checkpoint.restore(folder, state(0), step=step)) == step
    return checkpoint.latest(folder) or 0


def save_over(folder: Path, n: int, mesh: fs.Mesh | None) -> None:
    checkpoint.save(folder / "c", state(n, mesh), overwrite=True)


def save_over_in_background(folder: Path, n: int, mesh: fs.Mesh | None) -> None:
    checkpoint.save(folder / "c", state(n, mesh), overwrite=True, background=True)


def read_over(folder: Path) -> int:
    if not (folder / "c" / "manifest.json").exists():
        return 0
    return number_of(checkpoint.restore(folder / "c", state(0)))


def save_over_step(folder: Path, n: int, mesh: fs.Mesh | None) -> None:
    checkpoint.save(folder, state(n, mesh), step=7, overwrite=True)


def read_over_step(folder: Path) -> int:
    return number_of(checkpoint.restore(folder, state(0), step=7)) if checkpoint.latest(folder) == 7 else 0


def save_folder(folder: Path, n: int, mesh: fs.Mesh | None) -> None:
    leaves = {name: x for name, x in state(n, mesh).items() if name in SIZES}
    fs.hf.save(folder / "c", {"n": n}, leaves, max_shard_bytes=[10**9, 4096, 80_000][n % 3])


def read_folder(folder: Path) -> int:
    if not any((folder / "c" / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")):
        return 0
    described = {name: fs.init.zeros(shape) for name, shape in SIZES.items()}
    got = fs.device_get(fs.materialize(fs.hf.weights(folder / "c", described), P(), MESH, key=fs.key(0)))
    n = int(got["b"][0])
    return number_of({**got, "n": n, "text": f"state {n}"})


def save_file(folder: Path, n: int, mesh: fs.Mesh | None) -> None:
    fs.state_dict.write(folder / "c.pt", {name: x for name, x in state(n, mesh).items() if name in SIZES})


def read_file(folder: Path) -> int:
    if not (folder / "c.pt").exists():
        return 0
    got = torch.load(folder / "c.pt", weights_only=True)
    n = int(got["b"][0])
    return number_of({**got, "n": n, "text": f"state {n}"})


@dataclass(frozen=True)
class Program:
    save: Callable[[Path, int, fs.Mesh | None], None]
    read: Callable[[Path], int]
    ranks: int = 1
    pending: int = 0  # saves that have not ended when `save` returns

    def save_one(self, folder: Path, n: int) -> None:
        """Save a state, and wait until it has been written."""
        self.save(folder, n, None)
        checkpoint.wait()


PROGRAMS = {
    "numbered steps, keep=2": Program(save_numbered, read_numbered),
    "overwrite": Program(save_over, read_over),
    "overwrite of one step": Program(save_over_step, read_over_step),
    "Hugging Face folder": Program(save_folder, read_folder),
    "file of torch": Program(save_file, read_file),
    "background": Program(save_in_background, read_numbered, 1, 1),
    "background, overwrite": Program(save_over_in_background, read_over, 1, 1),
    "numbered steps, 2 ranks": Program(save_numbered, read_numbered, 2),
    "overwrite, 2 ranks": Program(save_over, read_over, 2),
    "Hugging Face folder, 2 ranks": Program(save_folder, read_folder, 2),
    "file of torch, 2 ranks": Program(save_file, read_file, 2),
    "background, 4 ranks": Program(save_in_background, read_numbered, 4, 1),
    "background, overwrite, 4 ranks": Program(save_over_in_background, read_over, 4, 1),
}
MESH = fs.make_mesh(data=1)


# --- one run ------------------------------------------------------------------------------------------------------


def save_for_ever(program: Program, folder: Path, first: int, rank: int, port: int, report: int) -> None:
    """Save state after state, and write the number of each to `report` when its `save` has returned."""
    if program.ranks > 1:
        set_rank(rank, program.ranks, port)
    mesh = fs.make_mesh(data=max(2, program.ranks))
    os.write(report, b"0\n")
    for n in range(first, first + 10_000):
        program.save(folder, n, mesh)
        if n - program.pending >= first:
            os.write(report, f"{n - program.pending}\n".encode())


def run_and_kill(program: Program, folder: Path, first: int, delay: float, victims: list[int]) -> int:
    """Start the program, kill the victims `delay` seconds after all ranks are ready; return the last saved state.

    The other ranks must end by themselves.
    """
    reader, report = os.pipe()
    port = free_port()
    pids = [fork(lambda rank=rank: save_for_ever(program, folder, first, rank, port, report))  # type: ignore[misc]
            for rank in range(program.ranks)]  # fmt: skip
    os.close(report)
    try:
        reports = b""
        while reports.count(b"0\n") < program.ranks:  # all ranks are connected
            ready = select.select([reader], [], [], TIMEOUT)[0] and os.read(reader, 2)
            assert ready, "the program does not start"
            reports += ready
        time.sleep(delay)
        for rank in victims:
            os.kill(pids[rank], signal.SIGKILL)
        more = b"no end"
        while select.select([reader], [], [], TIMEOUT)[0] and (more := os.read(reader, 65536)):
            reports += more
        assert more == b"", f"after {TIMEOUT} s a rank still waits for the one that was killed, or goes on"
    finally:
        os.close(reader)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return max(0, *map(int, reports.split()))


def full_disk(program: Program, folder: Path, n: int, limit: int) -> None:
    """Save where files cannot grow beyond `limit` bytes: a ShardingError says so."""

    def job() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(ShardingError, match="File too large"):
            program.save_one(folder, n)

    assert ended(fork(job)) == 0, "a full disk gives no clear error"


@dataclass
class Tally:
    runs: int = 0
    last: int = 0  # runs after which the state of the last save that returned was there
    next: int = 0  # the one after it: the kill came between its commit and its return
    problems: list[str] = field(default_factory=list)


def attack(name: str, runs: int, rng: random.Random, root: Path, end: float) -> Tally:
    """Run a program `runs` times, kill six of seven of these, and give the seventh a full disk."""
    program, folder, tally, last = PROGRAMS[name], root / "folder", Tally(), 0
    folder.mkdir()
    for i in range(runs):
        if time.monotonic() > end:
            break
        tally.runs += 1
        try:
            saved = last
            if i % 7 == 6 and last:
                full_disk(program, folder, last + 1, rng.choice([100, 2000, 30_000]))
            else:
                victims = rng.sample(range(program.ranks), rng.randint(1, program.ranks))
                delay = rng.uniform(0, 0.15 * program.ranks if program.pending else 0.06)
                saved = max(last, run_and_kill(program, folder, last + 1, delay, victims))
            now = program.read(folder)
            assert 0 <= now - saved <= 1 + program.pending, f"save returned for state {saved}, and state {now} is there"
            tally.last, tally.next = tally.last + (now == saved), tally.next + (now > saved)
            last = now
            if i % 5 == 4:
                last += 1
                assert ended(fork(lambda n=last: program.save_one(folder, n))) == 0  # type: ignore[misc]
                assert program.read(folder) == last
                left = [str(p.relative_to(folder)) for p in folder.rglob(".*")]
                assert not left, f"left after a save that ended: {left}"
        except (AssertionError, ShardingError, OSError) as e:
            tally.problems.append(f"{name}, run {i}: {e}")
            shutil.rmtree(folder)
            folder.mkdir()
            last = 0
    shutil.rmtree(folder)
    return tally


# --- the recipe ---------------------------------------------------------------------------------------------------

STEPS = 6
SMALL = ["--batch", "2", "--context", "8", "--layers", "1", "--heads", "1", "--width", "8", "--save-every", "1"]


def train(text: Path, *flags: str) -> None:
    pretrain.main([*SMALL, "--steps", str(STEPS), "--text", str(text), *flags])


def files_of(folder: Path, step: int) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in (folder / f"step_{step:06d}").iterdir()}


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for _, line in read_metrics(folder / "metrics.jsonl")]
    return [(m["step"], m["loss"]) for m in lines]


def attack_recipe(runs: int, rng: random.Random, root: Path, end: float) -> Tally:
    """Kill and resume trainings until they end: every checkpoint and every loss is that of a training without kills."""
    tally, text, want, out = Tally(), root / "text", root / "want", root / "out"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    begun = time.monotonic()
    assert ended(fork(lambda: train(text, "--out", str(want)))) == 0
    seconds = time.monotonic() - begun
    last = 0
    for i in range(runs):
        if time.monotonic() > end:
            break
        tally.runs += 1
        pid = fork(functools.partial(train, text, "--resume" if last else "--out", str(out)))
        time.sleep(rng.uniform(0.2, 0.8) * seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        status = ended(pid)
        try:
            assert status in (0, -signal.SIGKILL), f"a training ends with status {status}"
            steps = checkpoint.steps(out)
            assert steps == list(range(1, len(steps) + 1)), f"the steps {steps} are there"
            assert len(steps) >= last, f"step {last} was saved, and now there are {steps}"
            for step in steps:
                assert files_of(out, step) == files_of(want, step), f"step {step} differs"
            if status == 0:
                assert losses(out) == losses(want), "the losses differ"
            elif (out / "metrics.jsonl").exists():
                assert losses(out)[:last] == losses(want)[:last], "earlier losses differ"
            tally.last, last = tally.last + 1, len(steps)
        except (AssertionError, ShardingError, OSError) as e:
            tally.problems.append(f"pretrain, run {i}: {e}")
            status = 0
        if status == 0:  # it ended, so the next run begins another
            shutil.rmtree(out, ignore_errors=True)
            last = 0
    return tally


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.faults.kills", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="the programs of these names")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after about this long")
    args = parser.parse_args(argv)
    rng, begun = random.Random(args.seed), time.monotonic()
    attacks: dict[str, Callable[..., Tally]] = {name: functools.partial(attack, name) for name in PROGRAMS}
    attacks["`recipes.pretrain`, resumed"] = attack_recipe
    if args.only:
        attacks = {name: attacks[name] for name in args.only}
    print("| program | runs | last state saved | the next one | anything else |\n|---|---|---|---|---|")
    tallies = []
    for i, (name, one) in enumerate(attacks.items()):
        runs = args.runs * (i + 1) // len(attacks) - args.runs * i // len(attacks)
        with tempfile.TemporaryDirectory() as root:
            t = one(runs, rng, Path(root), begun + args.seconds * (i + 1) / len(attacks))
        print(f"| {name} | {t.runs} | {t.last} | {t.next} | {len(t.problems)} |", flush=True)
        tallies.append(t)
    problems = [problem for t in tallies for problem in t.problems]
    total = [sum(getattr(t, column) for t in tallies) for column in ("runs", "last", "next")]
    print(f"| all | {' | '.join(map(str, total))} | {len(problems)} |\n{time.monotonic() - begun:.0f} s")
    print("\n".join(problems))
    return min(1, len(problems))


if __name__ == "__main__":
    sys.exit(main())
