"""Threads for simulated ranks, which later runs use again."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue


class Abandoned(BaseException):
    """Ends a rank after another one has failed: a BaseException, so that user code does not catch it."""


class RankThread(threading.Thread):
    """A thread that runs the jobs of its queue, until `None`. It is a daemon: one that hangs does not keep Python."""

    def __init__(self) -> None:
        super().__init__(name="fshard-rank", daemon=True)
        self.jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.start()

    def run(self) -> None:
        try:
            while (job := self.jobs.get()) is not None:
                job()
                del job  # and with it the results of the run
        except Abandoned:  # raised by `interrupt` just after the job had ended
            pass

    def interrupt(self) -> None:
        """Raise `Abandoned` in the thread at its next line of Python; a call into C, such as a sleep, ends first."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), ctypes.py_object(Abandoned))


_idle: list[RankThread] = []
os.register_at_fork(after_in_child=_idle.clear)  # a forked process has none of the threads


def take_threads(n: int) -> list[RankThread]:
    """Return n threads that no other run uses."""
    threads = []
    for _ in range(n):
        try:
            threads.append(_idle.pop())  # atomic: several threads may start runs
        except IndexError:
            threads.append(RankThread())
    return threads


def give_back(threads: Sequence[RankThread]) -> None:
    """Keep threads whose jobs have ended for later runs."""
    _idle.extend(threads)


def dismiss(thread: RankThread) -> None:
    """Let a thread end after its job."""
    thread.jobs.put(None)
