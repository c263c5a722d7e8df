"""Send SIGTERM to each recipe at random moments: the step is saved, and a resumed run has the same losses.

    python -m tests.faults.preemptions --runs 100

A run is a training with `--resume auto`, forked from this process, in the folder of the run before; one that ends by
itself is compared as a whole, and the next begins anew. A signal before the first step has ended ends the process, as
there is nothing to save. Each loss has to equal that of a training without signals, bit by bit.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fshard import checkpoint
from fshard.recipes import classify, finetune, pretrain
from fshard.recipes.command import PREEMPTED
from tests.e2e import test_classify
from tests.lib.forked import ended, fork

TEXT = "".join(f"def f{i}(x, y={i}):\n    return x * {i} + y\n" for i in range(60))
RECIPES: dict[str, tuple[Callable[[list[str]], object], str]] = {
    "pretrain": (pretrain.main, "--steps 150 --batch 2 --context 8 --layers 1 --heads 1 --width 8 --dropout 0.1"),
    "classify": (classify.main, "--steps 40 --batch 8 --width 4 --partial-fc 0.5 --margin arcface"),
    "finetune": (finetune.main, "--steps 60 --vocab 60 --width 16 --batch 4 --rank 2 --methods t5-lora --epochs 7"),
}


@dataclass
class Tally:
    runs: int = 0
    told: int = 0  # runs that saved their step and left with 75
    early: int = 0  # that were ended before their first step was done
    ended: int = 0  # trainings that came to their end, with all losses of the training without signals
    lost: int = 0  # steps that a resumed run computed again
    problems: list[str] = field(default_factory=list)


def losses(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, loss) of each step of each part of a run; a line that was cut short is left out."""
    out = {}
    for file in sorted(folder.rglob("metrics.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        out[str(file.parent.relative_to(folder))] = [(m["step"], m["loss"]) for m in lines]
    return out


def data_of(recipe: str, root: Path) -> list[str]:
    """Write the data of a recipe, and return the arguments that name it."""
    if recipe == "pretrain":
        (root / "text.py").write_text(TEXT)
        return ["--text", str(root / "text.py")]
    if recipe == "classify":
        (root / "images").mkdir()
        return ["--folder", test_classify.draw_images(root / "images")]
    rows = [f"this film is {kind} number {i},{kind}" for i in range(20) for kind in ("good", "bad")]
    (root / "texts.csv").write_text("\n".join(["text,label", *rows]))
    return ["--data", str(root / "texts.csv")]


def attack(recipe: str, runs: int, rng: random.Random, root: Path, end: float) -> Tally:
    main, flags = RECIPES[recipe]
    command = [*flags.split(), *data_of(recipe, root)]
    out, tally = root / "out", Tally()
    begun = time.monotonic()
    assert ended(fork(functools.partial(main, [*command, "--out", str(root / "want")]))) == 0
    seconds = time.monotonic() - begun
    want = losses(root / "want")
    while tally.told + tally.early < runs and time.monotonic() < end:
        tally.runs += 1
        pid = fork(functools.partial(main, [*command, "--out", str(out), "--resume", "auto"]))
        time.sleep(rng.uniform(0, 0.6) * seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        status = ended(pid)
        try:
            assert status in (0, PREEMPTED, -signal.SIGTERM), f"it ends with status {status}"
            got = losses(out)
            for part, curve in got.items():
                assert curve == want[part][: len(curve)], f"the losses of {part} differ"
                lost = len(curve) - (checkpoint.latest(out / part) or 0)
                assert lost in ((0,) if status != -signal.SIGTERM else (0, 1)), f"{lost} steps of {part} are lost"
                tally.lost += lost
            tally.told, tally.early = tally.told + (status == PREEMPTED), tally.early + (status == -signal.SIGTERM)
            if status == 0:
                assert got == want, "the losses differ"
                tally.ended += 1
        except (AssertionError, OSError, ValueError) as e:
            tally.problems.append(f"{recipe}, run {tally.runs}: {e}")
            status = 0
        if status == 0:  # it ended, so the next run begins another
            shutil.rmtree(out, ignore_errors=True)
    return tally


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.faults.preemptions", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=100, help="signals for each recipe")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after about this long")
    args = parser.parse_args(argv)
    rng, begun = random.Random(args.seed), time.monotonic()
    print("| recipe | runs | told: saved its step | ended before its first step | trainings completed, "
          "all losses equal | steps computed again | anything else |\n|---|---|---|---|---|---|---|")  # fmt: skip
    problems: list[str] = []
    for i, recipe in enumerate(RECIPES):
        with tempfile.TemporaryDirectory() as root:
            t = attack(recipe, args.runs, rng, Path(root), begun + args.seconds * (i + 1) / len(RECIPES))
        print(
            f"| `{recipe}` | {t.runs} | {t.told} | {t.early} | {t.ended} | {t.lost} | {len(t.problems)} |", flush=True
        )
        problems += t.problems
    print(f"{time.monotonic() - begun:.0f} s", *problems, sep="\n")
    return min(1, len(problems))


if __name__ == "__main__":
    sys.exit(main())
