"""Real gloo ranks for the tests: teams of forked workers that load torch once for the whole session.

    main ──fork──> fork server ──fork──> ranks 0, 1 of the team of two; ranks 0..3 of the team of four; ...

The fork server is forked before the main process computes anything. It computes nothing itself, so it has no threads
and no OpenMP pool, and can fork workers at any later time. A team that hung or failed is killed, and the next test
gets another one within a tenth of a second.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Client, Connection, Listener, Pipe, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Limits that only a job that fails or hangs reaches; a job that passes waits for none of them.
TIMEOUT = 600.0  # seconds for a job: a checked first call is slow where cores are few, or busy
GRACE = 120.0  # seconds for the other ranks to fail as well, after one has failed


class RanksError(AssertionError):
    """Tracebacks of the ranks of one call, or their stacks where they hung."""


class Pool:
    """The teams of this session, each started at its first call. `close` ends them all."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._listener = Listener(str(self._folder / "socket"))
        self._teams: dict[int, _Team] = {}
        self._started = 0
        self._requests, requests = Pipe()
        self._fork_server = os.fork()
        if self._fork_server == 0:
            with _exits():
                self._requests.close()
                _serve_forks(requests, self._listener.address)
        requests.close()

    def __call__(self, size: int, job: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """Call `job(*args)`, a function of a module, on each of `size` ranks, and return the results by rank.

        Raises RanksError with the traceback of every rank that raised, or the stacks of those that hang.
        """
        __tracebackhide__ = True
        team = self._teams.get(size)
        if team is None:
            self._started += 1
            folder = self._folder / f"team{self._started}"
            folder.mkdir()
            self._requests.send((size, str(folder)))
            self._teams[size] = team = _Team(folder, [self._listener.accept() for _ in range(size)])
        results, problem = team.run(pickle.dumps((job, args)), timeout)
        if problem:
            self._teams.pop(size).kill()
            raise RanksError(problem)
        return results

    def end_teams(self) -> None:
        for team in self._teams.values():
            team.close()
        self._teams.clear()

    def close(self) -> None:
        self.end_teams()
        self._requests.close()
        os.waitpid(self._fork_server, 0)
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class _Team:
    def __init__(self, folder: Path, connections: Iterable[Connection]) -> None:
        self.folder = folder
        workers = sorted(((*pickle.loads(c.recv_bytes()), c) for c in connections), key=lambda worker: worker[0])
        self.pids = [pid for _, pid, _ in workers]
        self.connections: list[Connection] = [c for _, _, c in workers]
        self.printed: dict[int, int] = {}

    def run(self, job: bytes, timeout: float) -> tuple[list[Any], str]:
        """Return the results, and a report of failures, empty if there are none."""
        for c in self.connections:
            c.send_bytes(job)
        results: dict[int, Any] = {}
        failed: dict[int, str] = {}
        end = time.monotonic() + timeout
        waiting = dict(zip(self.connections, range(len(self.connections)), strict=True))
        while waiting and (ready := wait(list(waiting), max(0.0, end - time.monotonic()))):
            for c in ready:
                assert isinstance(c, Connection)
                rank = waiting.pop(c)
                try:
                    succeeded, value = pickle.loads(c.recv_bytes())
                except EOFError:
                    succeeded, value = False, "the process is gone: it was killed, or it crashed"
                (results if succeeded else failed)[rank] = value
                if not succeeded:
                    end = min(end, time.monotonic() + GRACE)
        if waiting and not failed:
            for rank in waiting.values():
                failed[rank] = f"no answer after {timeout:.0f} s; it was in\n{self._stack(rank)}"
        elif waiting:
            failed |= {rank: f"was waiting for the others; it was in\n{self._stack(rank)}" for rank in waiting.values()}
        self._print_output()
        ranks_of: dict[str, list[int]] = {}
        for rank in sorted(failed):
            ranks_of.setdefault(failed[rank].rstrip(), []).append(rank)
        reports = [f"rank {', '.join(map(str, ranks))} of {len(self.pids)}: {text}" for text, ranks in ranks_of.items()]
        return [results.get(i) for i in range(len(self.pids))], "\n\n".join(reports)

    def _print_output(self) -> None:
        """Print the output of the ranks, for pytest to capture."""
        for rank in range(len(self.pids)):
            with open(self.folder / f"out{rank}", errors="replace") as out:
                out.seek(self.printed.get(rank, 0))
                for line in out.read().splitlines():
                    print(f"rank {rank}: {line}")
                self.printed[rank] = out.tell()

    def _stack(self, rank: int) -> str:
        """Stack of a hanging rank, which its faulthandler writes on a signal."""
        os.kill(self.pids[rank], signal.SIGUSR1)
        end, here, text = time.monotonic() + GRACE, f'  File "{__file__}"', ""
        while here not in text and time.monotonic() < end:  # the frame of _serve_jobs is the last but a few
            time.sleep(0.02)
            text = (self.folder / f"stack{rank}").read_text()
        return text.partition(here)[0]

    def close(self) -> None:
        """End the workers, and wait until each has saved its coverage and ended."""
        for c in self.connections:
            c.send_bytes(b"")
        for c in self.connections:
            with contextlib.suppress(EOFError, ConnectionError):
                if not c.poll(TIMEOUT):
                    break
                c.recv_bytes()
        self.kill()

    def kill(self) -> None:
        for c, pid in zip(self.connections, self.pids, strict=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            c.close()


@contextlib.contextmanager
def _exits() -> Any:
    """End a forked process after the block, so that it never runs the code of its parent."""
    status = 1
    try:
        yield
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _serve_forks(requests: Connection, address: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles interrupts
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended workers do not become zombies
    while True:
        try:
            size, folder = requests.recv()
        except EOFError:
            return
        for rank in range(size):
            if os.fork() == 0:
                with _exits():
                    requests.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    main = Client(address)  # the end of the process closes it, after it has saved its coverage
                    _serve_jobs(rank, size, Path(folder), main)


def _serve_jobs(rank: int, size: int, folder: Path, main: Connection) -> None:
    """Run one job after another, as a rank of a process group."""
    with open(folder / f"stack{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, stack)
        out = os.open(folder / f"out{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        main.send_bytes(pickle.dumps((rank, os.getpid())))
        torch.set_num_threads(1)
        timeout = datetime.timedelta(seconds=TIMEOUT)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timeout
        )
        while True:
            try:
                message = main.recv_bytes()
            except EOFError:
                return
            if not message:
                return
            try:
                job, args = pickle.loads(message)
                answer = pickle.dumps((True, job(*args)))
            except BaseException:  # SystemExit too: a job may not end its worker
                answer = pickle.dumps((False, traceback.format_exc()))
            sys.stdout.flush()
            main.send_bytes(answer)
