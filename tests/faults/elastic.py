"""Train on 4 ranks, lose 2 of them, go on with 2, then with 3: the losses are those of a run on one device.

    python -m tests.faults.elastic --steps 90 --picture docs/elastic.svg

Two launchers (`python -m fshard launch --nnodes=1:2`) act as two machines. The second one is killed with its ranks, and
later another one joins. The launchers start the ranks again each time, and `pretrain --resume auto` makes the mesh of
the ranks that there are. The batch of 8 does not divide by 3: the parts are 3, 3 and 2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch.distributed.run  # noqa: F401  before launchers are forked

from fshard import cli
from fshard.recipes import pretrain
from tests.lib.forked import free_port

SMALL = "--batch 8 --context 16 --layers 2 --heads 3 --width 24 --lr 3e-3 --dropout 0.1 --fsdp --save-every 5"
RTOL = 1e-4
TIMEOUT = 300  # seconds that only a run that hangs reaches


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of the steps so far; a line that is being written is left out."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


@contextlib.contextmanager
def agent(ranks: int, port: int, output: Path, flags: list[str], *, first: bool) -> Iterator[ForkProcess]:
    """Start the launcher of one machine. At the end kill it, and its ranks.

    It is forked: launchers that each load torch may start further apart than the first one waits for a second one.
    """
    command = [
        "launch", "--nnodes=1:2", f"--nproc-per-node={ranks}", "--cpu",
        "--max-restarts=3", f"--rdzv-endpoint=127.0.0.1:{port}",
        f"--rdzv-conf=is_host={int(first)},last_call_timeout=10", "-m", "fshard.recipes.pretrain", *flags,
    ]  # fmt: skip

    def launch() -> None:
        out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ["OMP_NUM_THREADS"] = "1"
        sys.exit(cli.main(command))

    process = multiprocessing.get_context("fork").Process(target=launch)
    process.start()
    try:
        yield process
    finally:
        kill_machine(process)


def ranks_of(process: ForkProcess) -> list[int]:
    """Return the process ids of an agent's ranks."""
    command = ["ps", "-o", "pid=", "--ppid", str(process.pid)]
    return [int(pid) for pid in subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()]


def kill_machine(process: ForkProcess) -> None:
    """End an agent and its ranks by SIGKILL, as a machine that loses its power."""
    ranks = ranks_of(process) if process.is_alive() else []
    process.kill()
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.join()


def wait_until(happened: Callable[[], bool], output: Path, first: ForkProcess) -> None:
    """Wait for an event while the first agent runs."""
    end = time.monotonic() + TIMEOUT
    while not happened():
        assert first.is_alive(), f"the first agent has ended: {output.read_text()}"
        assert time.monotonic() < end, f"too late: {output.read_text()}"
        time.sleep(0.02)


def attempts(output: Path) -> list[tuple[int, int]]:
    """Return (ranks, first step) of each attempt, as rank 0 prints them."""
    lines = re.findall(
        r"parameters on Mesh\(data=(\d+).*?\)(?:, resumed at step (\d+))?$", output.read_text(), re.MULTILINE
    )
    return [(int(ranks), int(step or 0)) for ranks, step in lines]


def run_elastic(steps: int, root: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[tuple[int, int]]]:
    """Return the metrics on one device, those of the interrupted run, and the attempts of the latter."""
    text = root / "text.py"
    text.write_text("\n".join(f"def f{i}(x, y={i}):\n    return x * {i} + y  # line {i * i}\n" for i in range(600)))
    flags = [*SMALL.split(), "--steps", str(steps), "--text", str(text)]
    pretrain.main([*flags, "--out", str(root / "one"), "--mesh", "data=1"])
    out, output = root / "out", root / "output"
    flags += ["--out", str(out), "--resume", "auto"]
    port = free_port()

    def reached(step: int, begun: int) -> bool:
        return output.exists() and len(attempts(output)) >= begun and any(m["step"] >= step for m in metrics(out))

    with agent(2, port, output, flags, first=True) as first:
        with agent(2, port, output, flags, first=False) as second:
            wait_until(lambda: reached(steps // 3, 1), output, first)
            kill_machine(second)
        wait_until(lambda: reached(2 * steps // 3, 2), output, first)
        ranks, told = ranks_of(first), output.read_text().count("closing signal")
        for pid in ranks:  # so that steps are left for the machine that starts
            os.kill(pid, signal.SIGSTOP)
        with agent(1, port, output, flags, first=False) as third:
            wait_until(lambda: output.read_text().count("closing signal") > told, output, first)
            for pid in ranks:
                os.kill(pid, signal.SIGCONT)
            for process in (first, third):
                process.join(TIMEOUT)
    statuses = [process.exitcode for process in (first, third)]
    assert statuses == [0, 0], (statuses, output.read_text())
    return metrics(root / "one"), metrics(out), attempts(output)


def draw(path: Path, one: list[dict[str, Any]], got: list[dict[str, Any]], begun: list[tuple[int, int]]) -> None:
    """Draw the two curves; the interrupted one has a colour for each attempt."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "elastic"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot([m["step"] for m in one], [m["loss"] for m in one], color="0.75", lw=5, label="1 device, not interrupted")
    ends = [begin for _, begin in begun[1:]] + [len(got)]
    for (ranks, begin), end in zip(begun, ends, strict=True):
        part = got[begin:end]
        axes.plot([m["step"] for m in part], [m["loss"] for m in part], lw=1.5, label=f"{ranks} ranks")
    for _, begin in begun[1:]:
        axes.axvline(begin, color="0.4", lw=0.8, ls=":")
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.faults.elastic", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as root:
        one, got, begun = run_elastic(args.steps, Path(root))
    print("| ranks | steps | loss of the first and the last | on one device | largest relative difference |")
    print("|---|---|---|---|---|")
    ends = [begin for _, begin in begun[1:]] + [len(got)]
    worst = 0.0
    for (ranks, begin), end in zip(begun, ends, strict=True):
        pairs = [(got[i]["loss"], one[i]["loss"]) for i in range(begin, end)]
        error = max(abs(a - b) / b for a, b in pairs)
        shown = [f"{x[0][k]:.6f}, {x[-1][k]:.6f}" for k in (0, 1) for x in [pairs]]
        print(f"| {ranks} | {begin} to {end - 1} | {shown[0]} | {shown[1]} | {error:.1e} |")
        worst = max(worst, error)
    if args.picture:
        draw(args.picture, one, got, begun)
    assert [m["step"] for m in got] == list(range(args.steps)), "a step is missing, or stands twice"
    assert [ranks for ranks, _ in begun] == [4, 2, 3], f"the attempts were {begun}"
    assert worst <= RTOL, f"the losses differ by {worst}"
    return 0


if __name__ == "__main__":
    sys.exit(main())
