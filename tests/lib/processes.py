"""Real gloo ranks for the tests: teams of forked workers that load torch once and serve the whole session.

    main ──fork──> nursery ──fork──> ranks 0, 1 of the team of two; ranks 0..3 of the team of four; ...

The nursery is forked before the main process computes anything. It never computes itself, so it holds no
thread and no OpenMP pool, and a worker forked from it at any later time is sound: a team that hung or failed
is thrown away, and the next test gets another one within a tenth of a second.
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

TIMEOUT = 60.0  # seconds for a job; a checked first call takes its time where cores are few
GRACE = 2.0  # seconds that the other ranks get once one has failed: long enough to fail as well


class RanksError(AssertionError):
    """What the ranks of one call raised, or where they hung."""


class Pool:
    """Every team of this session, made when first called for. `close` ends them all."""

    def __init__(self) -> None:
        self._place = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._listener = Listener(str(self._place / "socket"))
        self._teams: dict[int, _Team] = {}
        self._made = 0
        self._orders, theirs = Pipe()
        self._nursery = os.fork()
        if self._nursery == 0:
            with _exits():
                self._orders.close()
                _nurse(theirs, self._listener.address)
        theirs.close()

    def __call__(self, size: int, job: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """`job(*args)` on each of `size` ranks; the results by rank. `job` is a module's own function.

        Raises RanksError with the traceback of every rank that raised, or the stacks of those that hang.
        """
        __tracebackhide__ = True
        team = self._teams.get(size)
        if team is None:
            self._made += 1
            place = self._place / f"team{self._made}"
            place.mkdir()
            self._orders.send((size, str(place)))
            self._teams[size] = team = _Team(place, [self._listener.accept() for _ in range(size)])
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
        self._orders.close()
        os.waitpid(self._nursery, 0)
        self._listener.close()
        shutil.rmtree(self._place, ignore_errors=True)


class _Team:
    def __init__(self, place: Path, connections: Iterable[Connection]) -> None:
        self.place = place
        met = sorted(((*pickle.loads(c.recv_bytes()), c) for c in connections), key=lambda m: m[0])
        self.pids = [pid for _, pid, _ in met]
        self.connections: list[Connection] = [c for _, _, c in met]
        self.printed: dict[int, int] = {}

    def run(self, job: bytes, timeout: float) -> tuple[list[Any], str]:
        """The results, and a report of what went wrong: empty where nothing did."""
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
                    good, value = pickle.loads(c.recv_bytes())
                except EOFError:
                    good, value = False, "the process is gone: it was killed, or it crashed"
                (results if good else failed)[rank] = value
                if not good:
                    end = min(end, time.monotonic() + GRACE)
        if waiting and not failed:
            for rank in waiting.values():
                failed[rank] = f"no answer after {timeout:.0f} s; it was in\n{self._stack(rank)}"
        elif waiting:
            failed |= dict.fromkeys(waiting.values(), "was waiting for the others")
        self._print_output()
        same: dict[str, list[int]] = {}
        for rank in sorted(failed):
            same.setdefault(failed[rank].rstrip(), []).append(rank)
        reports = [f"rank {', '.join(map(str, ranks))} of {len(self.pids)}: {text}" for text, ranks in same.items()]
        return [results.get(i) for i in range(len(self.pids))], "\n\n".join(reports)

    def _print_output(self) -> None:
        """What the ranks printed, printed here, where pytest captures it."""
        for rank in range(len(self.pids)):
            with open(self.place / f"out{rank}", errors="replace") as out:
                out.seek(self.printed.get(rank, 0))
                for line in out.read().splitlines():
                    print(f"rank {rank}: {line}")
                self.printed[rank] = out.tell()

    def _stack(self, rank: int) -> str:
        """Where a hanging rank is: its faulthandler writes that on a signal."""
        os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(0.2)
        return (self.place / f"stack{rank}").read_text().partition(f'  File "{__file__}"')[0]

    def close(self) -> None:
        """End the workers, and wait until each has gone (and with it has saved its coverage)."""
        for c in self.connections:
            c.send_bytes(b"")
        for c in self.connections:
            with contextlib.suppress(EOFError, ConnectionError):
                if not c.poll(5):
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
    """The end of a forked process: never back into the code it was forked from."""
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


def _nurse(orders: Connection, address: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the main process's to handle
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended workers leave nothing behind
    while True:
        try:
            size, place = orders.recv()
        except EOFError:
            return
        for rank in range(size):
            if os.fork() == 0:
                with _exits():
                    orders.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    _serve(rank, size, Path(place), address)


def _serve(rank: int, size: int, place: Path, address: Any) -> None:
    """One worker: a rank of a process group, running one job after another."""
    with Client(address) as main, open(place / f"stack{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, stack)
        out = os.open(place / f"out{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        main.send_bytes(pickle.dumps((rank, os.getpid())))
        torch.set_num_threads(1)
        timeout = datetime.timedelta(seconds=TIMEOUT)
        dist.init_process_group(
            "gloo", init_method=f"file://{place}/store", rank=rank, world_size=size, timeout=timeout
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
