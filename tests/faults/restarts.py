"""Restart ranks by torchrun, and start strangers on the port of a job: each attempt and each job must go on.

    python -m tests.faults.restarts --runs 20

Restarts: after `torchrun --max-restarts` a new attempt finds nothing of a former one. In each attempt the ranks make a
mesh and compute a sum; then one of them ends in a random way, so that the agent starts all of them again. In every
third attempt it ends at a random moment of the start. The last attempt ends by itself. With `--agents 2` there are two
machines, whose agents count restarts differently.

Strangers: while a job of two ranks computes, others come to its port: a rank of another job that is killed at a random
moment, or ends by itself with an error that names the port; all ranks of that job; a rank of a larger job; a rank that
uses only torch; and a program that reads what the store has and sends wrong messages. The job must end with status 0,
without a word.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fshard as fs
from fshard import P
from fshard._core.comm.meeting import ACCEPTED, HELLO, KEY, OTHER_PORT
from tests.lib.forked import free_port, set_rank

WAYS: dict[str, Callable[[], object]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL), "os._exit": lambda: os._exit(7), "raise": lambda: 1 / 0,
}  # fmt: skip
TIMEOUT = 600  # seconds that only a job that hangs reaches
TROUBLE = re.compile(r".*(?:cannot connect|connectFullMesh|has waited|Connection refused|another job).*")


def work(log: Path, runs: int) -> None:
    """Compute as one rank of an attempt, whose number is that of the former ones that ended; then end it, or not."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = log.read_text().count("ends")
    rng = random.Random(attempt)
    victim, way, delay = rng.randrange(world), rng.choice(sorted(WAYS)), rng.uniform(0, 0.2)

    def end() -> None:
        if rank == victim and attempt < runs:
            note(log, f"attempt {attempt}: rank {rank} ends by {way}")
            WAYS[way]()

    if attempt % 3 == 2:  # during the start of the others
        time.sleep(delay)
        end()
    mesh = fs.make_mesh(data=-1, device="cpu")
    total = fs.shard_map(lambda x: fs.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P(None))
    assert fs.device_get(total(torch.arange(float(world)))).tolist() == [world * (world - 1) / 2]
    note(log, f"attempt {attempt}: rank {rank} computed")
    mesh.gather_objects(None)  # so that all have
    end()
    mesh.gather_objects(None)


def note(log: Path, line: str) -> None:
    with log.open("a") as f:
        f.write(line + "\n")


def restart(runs: int, ranks: int, agents: int, folder: Path) -> list[str]:
    """Return the problems of one job that is restarted `runs` times."""
    log = folder / "log"
    log.write_text("")
    where = ["--standalone"]
    if agents > 1:
        where = [f"--nnodes={agents}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    command = [sys.executable, "-m", "torch.distributed.run", *where, f"--nproc-per-node={ranks // agents}",
               f"--max-restarts={runs}", "-m", "tests.faults.restarts", f"--work={log}", f"--runs={runs}"]  # fmt: skip
    jobs = []
    for i in range(agents):
        with (folder / f"agent{i}").open("w") as stderr:
            jobs.append(subprocess.Popen(command, stderr=stderr))
    end = time.monotonic() + TIMEOUT + 60 * runs
    for job in jobs:
        try:
            job.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            job.terminate()  # the agent ends the ranks
            job.wait()
    text = "".join((folder / f"agent{i}").read_text() for i in range(agents))
    lines = log.read_text().splitlines()
    computed = [n for n in range(runs + 1) if sum(f"attempt {n}: " in x and "computed" in x for x in lines) == ranks]
    problems = [f"attempt {n} did not compute" for n in range(runs + 1) if n % 3 != 2 and n not in computed]
    if any(job.returncode for job in jobs):
        problems += [f"torchrun ended with status {[job.returncode for job in jobs]}", text[-3000:]]
    return problems + TROUBLE.findall(text)


# --- strangers ----------------------------------------------------------------------------------------------------


def start(rank: int, world: int, port: int, out: Path, job: Callable[..., object], *args: Any) -> Any:
    """Start a rank, whose stderr is a file, in a process that is forked from this one."""

    def main() -> None:
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT), 2)
        set_rank(rank, world, port)
        job(*args)

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    return process


def compute_until(ready: Path, done: Path) -> None:
    mesh = fs.make_mesh(data=2, device="cpu")
    ready.touch()
    while not mesh.gather_objects(done.exists())[0]:
        time.sleep(0.01)


def read_and_lie(port: int) -> None:
    """Send to rank 0 what no rank of its job sends."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    zero, token = store.get(KEY).decode().split()
    hellos = [HELLO.pack(b"H", bytes.fromhex(token), 2, rank) for rank in (0, 1, 2, 7, 2**32 - 1)]
    silent = socket.create_connection(("127.0.0.1", int(zero)))
    for message in (b"", b"H", bytes(100), b"GET / HTTP/1.1", *hellos, bytes([255] * 4), bytes([0, 0, 0, 1])):
        with socket.create_connection(("127.0.0.1", int(zero))) as connection:
            connection.sendall(message)
            answer = connection.recv(100) if message in hellos else b""
            assert not answer.startswith(ACCEPTED), message
    silent.close()


WANTED = {
    1: "ShardingError: make_mesh: another job, or an attempt that is ending, uses port {port} of 127.0.0.1\n"
       "  this is rank 1 of 2, and that job has a rank 1 already\n  fix: " + OTHER_PORT,
    5: "ShardingError: make_mesh: another job, or an attempt that is ending, uses port {port} of 127.0.0.1\n"
       "  this is rank 5 of 8, and that job has 2 ranks\n  fix: " + OTHER_PORT,
    0: "ShardingError: make_mesh: another job or program uses port {port} of 127.0.0.1\n  fix: " + OTHER_PORT,
}  # fmt: skip


def meet_stranger(kind: str, rng: random.Random, folder: Path) -> list[str]:
    """Return the problems of a job, while a stranger of a kind comes to its port."""
    port, done = free_port(), folder / "done"
    job = [start(r, 2, port, folder / f"job{r}", compute_until, folder / f"ready{r}", done) for r in range(2)]
    end = time.monotonic() + TIMEOUT
    while not all((folder / f"ready{r}").exists() for r in range(2)) and time.monotonic() < end:
        time.sleep(0.01)
    world = 8 if kind == "larger" else 2
    ranks = {"larger": [5], "both": [0, 1], "lies": []}.get(kind, [1])
    torch_alone = functools.partial(dist.init_process_group, "gloo")
    other = torch_alone if kind == "torch" else functools.partial(fs.make_mesh, data=-1, device="cpu")
    strangers = {r: start(r, world, port, folder / f"stranger{r}", other) for r in ranks}
    problems = []
    if kind == "lies":
        read_and_lie(port)
    for rank, stranger in strangers.items():
        if kind in ("killed", "torch"):
            time.sleep(rng.uniform(0, 0.3))
            stranger.kill()
        stranger.join(TIMEOUT)
        text = (folder / f"stranger{rank}").read_text()
        if kind not in ("killed", "torch") and WANTED[rank].format(port=port) not in text:
            problems.append(f"{kind}: stranger {rank}, status {stranger.exitcode}, prints {text!r}")
        stranger.kill()
    time.sleep(0.2)  # in which the job would hear of a failure
    done.touch()
    for rank, process in enumerate(job):
        process.join(TIMEOUT)
        text = (folder / f"job{rank}").read_text()
        if process.exitcode != 0 or text:
            problems.append(f"{kind}: rank {rank} of the job ended with status {process.exitcode}: {text!r}")
        process.kill()
    return problems


KINDS = ("killed", "one rank", "both", "larger", "torch", "lies")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.faults.restarts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=20, help="restarts, and jobs with a stranger")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--agents", type=int, default=1)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.work:
        work(args.work, args.runs)
        return 0
    count, rng = 0, random.Random(0)
    for name in ("jobs with a stranger", "restarts"):
        begun, problems = time.monotonic(), []
        if name == "restarts":
            with tempfile.TemporaryDirectory() as folder:
                problems = restart(args.runs, args.ranks, args.agents, Path(folder))
        for i in range(args.runs if name != "restarts" else 0):
            with tempfile.TemporaryDirectory() as folder:
                problems += meet_stranger(KINDS[i % len(KINDS)], rng, Path(folder))
        print(f"{args.runs} {name}, {len(problems)} problems, {time.monotonic() - begun:.0f} s", *problems,
              sep="\n", flush=True)  # fmt: skip
        count += len(problems)
    return min(1, count)


if __name__ == "__main__":
    sys.exit(main())
