"""The watchdog of a rank: what ends it, when and with which text; long waits. Sockets in one process, a fake clock."""

from __future__ import annotations

import atexit
import datetime
import multiprocessing
import multiprocessing.util
import os
import socket
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fshard._comm.description import describe_transfer
from fshard._comm.gloo import GlooConnections, PendingMessages
from fshard._comm.watchdog import Wait, Watchdog, call_at_exit, launcher_id

GRACE, LONG_WAIT = 10.0, 30.0


class Job:
    """Watchdogs of some ranks, connected as by `connect`, whose threads do not run: `step` does what they do."""

    def __init__(self, world: int) -> None:
        self.now = 0.0
        self.ends: dict[int, str] = {}  # by rank, its first reason to end
        self.reports: list[str] = []
        self.ranks = [self.watchdog(rank, world) for rank in range(world)]
        for rank in range(1, world):
            ours, theirs = socket.socketpair()
            self.ranks[0].add(ours, rank)
            self.ranks[rank].add(theirs, 0)

    def watchdog(self, rank: int, world: int, **options: Any) -> Watchdog:
        return Watchdog(rank, world, end=lambda reason: self.ends.setdefault(rank, reason), report=self.reports.append,
                        clock=lambda: self.now, **options)  # fmt: skip

    def step(self, *ranks: int) -> None:
        """Let the ranks, by default all, read their messages: a chain of two, to rank 0 and from it."""
        for _ in range(3):
            for rank in ranks or range(len(self.ranks)):
                if not self.ranks[rank]._closed:
                    self.ranks[rank].step(0)

    def kill(self, rank: int) -> None:
        """Close the sockets as the kernel does for a process that ends."""
        self.ranks[rank]._closed = True
        for connection in self.ranks[rank]._connections:
            connection.close()

    def leave(self, *ranks: int) -> None:
        for rank in ranks:
            self.ranks[rank].leave(failed=False)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr("fshard._comm.watchdog._LEAVE", 0.0)  # no rank waits for others in the one thread of a test
    job = Job(4)
    yield job
    for rank in range(4):
        job.kill(rank)


@pytest.mark.parametrize("victim", range(4))
def test_end_of_a_process_ends_every_other_rank_after_the_grace(job: Job, victim: int) -> None:
    job.step()
    job.kill(victim)
    job.step()
    others = [rank for rank in range(4) if rank != victim]
    assert [job.ranks[rank].failed for rank in others] == [victim] * 3
    job.now = GRACE - 0.1  # an error of their own comes sooner, and says more
    job.step()
    assert job.ends == {}
    job.now = GRACE
    job.step()
    assert sorted(job.ends) == others
    assert job.ends[others[1]] == (
        f"rank {others[1]} ends, since rank {victim} has failed: it raised, was killed, called os._exit, or its host "
        f"was lost; see the output of rank {victim}"
    )


@pytest.mark.parametrize("victim", range(4))
def test_failed_rank_says_so_before_its_process_ends_and_is_named_as_the_first(job: Job, victim: int) -> None:
    job.ranks[victim].leave(failed=True)
    job.step()
    second = (victim + 1) % 4  # fails because of it
    job.ranks[second].leave(failed=True)
    job.kill(second)
    job.step()
    job.now = GRACE
    job.step()
    rest = [rank for rank in range(4) if rank not in (victim, second)]
    assert [job.ranks[rank].failed for rank in rest] == [victim] * 2
    assert job.ends[victim] == f"rank {victim} has failed, and had not ended 10 s later"
    assert set(rest) < set(job.ends)


@pytest.mark.parametrize("first", range(4))
def test_rank_that_leaves_ends_no_other(job: Job, first: int) -> None:
    job.leave(first)
    job.step()
    job.kill(first)  # rank 0 would stay, but may be interrupted
    job.step()
    job.now = 10 * GRACE
    job.step()
    assert job.ends == {}
    assert [r.failed for r in job.ranks] == [None] * 4


def leaving(job: Job, *ranks: int) -> list[threading.Thread]:
    """Let ranks leave, on threads, and return when each has said so."""
    threads = [threading.Thread(target=job.ranks[rank].leave, kwargs={"failed": False}) for rank in ranks]
    for thread, rank in zip(threads, ranks, strict=True):
        thread.start()
        while rank not in job.ranks[rank]._left:
            thread.join(0.001)
    return threads


def test_ranks_wait_until_all_leave_and_rank_0_until_all_have_closed(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr("fshard._comm.watchdog._LEAVE", 60.0)
    threads = leaving(job, 2, 0, 3)
    job.step()
    assert all(thread.is_alive() for thread in threads)
    threads += leaving(job, 1)
    while any(thread.is_alive() for thread in threads):
        job.step()
    closing = threading.Thread(target=job.ranks[0].close)
    closing.start()
    for rank in (1, 2, 3):
        assert closing.is_alive()
        job.ranks[rank].close()
        job.ranks[0].step(0)
    closing.join(10)
    assert not closing.is_alive()
    assert job.ends == {}


def test_rank_that_waits_for_others_to_leave_ends_at_once_when_one_fails(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr("fshard._comm.watchdog._LEAVE", 60.0)
    threads = leaving(job, 0, 2)
    job.kill(3)
    job.step()
    for thread in threads:
        thread.join(10)
    assert sorted(job.ends) == [0, 2]


def test_rank_that_has_waited_ends_without_a_failure_but_rank_0_stays(job: Job) -> None:
    job.leave(0, 2)
    job.kill(3)  # since it needs rank 2, which has left
    job.step()
    assert sorted(job.ends) == [0]
    assert job.ranks[1].failed == 3


def test_failed_rank_waits_for_none(job: Job) -> None:
    job.ranks[0].leave(failed=True)
    job.ranks[0].close()
    job.step(1, 2, 3)
    assert [r.failed for r in job.ranks] == [0] * 4


def test_ranks_connect_by_the_store_and_strangers_do_not(job: Job) -> None:
    store: dict[str, bytes] = {}
    shared: Any = SimpleNamespace(set=lambda key, text: store.update({key: text.encode()}), get=store.__getitem__)
    zero, one, late = (job.watchdog(rank, 3) for rank in range(3))
    zero.connect(shared, "127.0.0.1")
    one.connect(shared, "127.0.0.1")
    (port, _) = store["fshard/watchdog"].split()
    stranger = socket.create_connection(("127.0.0.1", int(port)))
    stranger.sendall(bytes(21))
    for _ in range(2):
        zero.step(10)
    assert list(zero._connections.values()) == [1]
    assert stranger.recv(1) == b""
    one.leave(failed=True)
    zero.step(10)
    late.connect(shared, "127.0.0.1")  # a rank that is told on arrival
    zero.step(10)
    late.step(10)
    assert (zero.failed, late.failed) == (1, 1)
    for w in (one, late, zero):
        w.close()
    assert zero._listener is not None
    zero._listener.close()
    unreached = job.watchdog(1, 3)
    unreached.connect(shared, "127.0.0.1")
    assert len(job.reports) == 1
    assert job.reports[0].startswith(f"rank 1 cannot connect to port {int(port)} of 127.0.0.1, the host of rank 0 (")
    assert job.reports[0].endswith("): if another rank fails, this one may wait for it until the timeout")
    stranger.close()


def test_rank_ends_with_its_launcher(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = job.watchdog(5, 8, launcher=os.getppid())
    rank.step(0)
    assert job.ends == {}
    monkeypatch.setattr(os, "getppid", lambda: 1)
    rank.step(0)
    assert job.ends[5].startswith("rank 5 ends, since its launcher (process ")


def test_only_torchrun_is_a_launcher_to_end_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launcher_id() is None  # `nohup python` outlives its shell
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launcher_id() == os.getppid()


def test_forked_child_closes_its_copies_and_says_nothing(job: Job) -> None:
    copies = [socket.socket(fileno=os.dup(connection.fileno())) for connection in job.ranks[1]._connections]
    child = job.watchdog(1, 4)
    child.add(copies[0], 0)
    child._forget()  # what a fork calls in the child
    assert [c.fileno() for c in copies] == [-1]
    job.step()
    assert [r.failed for r in job.ranks] == [None] * 4
    job.kill(1)
    job.step()
    assert [job.ranks[rank].failed for rank in (0, 2, 3)] == [1] * 3


# --- waits ------------------------------------------------------------------------------------------------------------


def test_long_wait_is_reported_once_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    job, entered, done = Job(1), threading.Event(), threading.Event()
    waits: dict[int, Any] = {}
    monkeypatch.setattr("fshard._comm.watchdog._waits", waits)

    def compute() -> None:
        with Wait(lambda: ("for rank 2 in all_gather over data", "rank 2 may be slow")):
            entered.set()
            done.wait()

    thread = threading.Thread(target=compute)
    thread.start()
    entered.wait()
    ((start, _),) = waits.values()
    for passed in (0, LONG_WAIT - 1, LONG_WAIT + 1, 3 * LONG_WAIT, 100 * LONG_WAIT):
        job.now = start + passed
        job.step()
    done.set()
    thread.join()
    job.step()
    line = compute.__code__.co_firstlineno + 3
    assert "\n".join(job.reports) == (
        f"rank 0 has waited 31 s for rank 2 in all_gather over data, called at {os.path.basename(__file__)}:{line} "
        "in compute: rank 2 may be slow"
    )
    assert not job.ranks[0]._reported
    assert not waits


def test_wait_for_messages_names_the_rank_and_the_collective() -> None:
    waits: list[tuple[str, str]] = []
    description = describe_transfer("all_gather", ("data",), torch.float32, (torch.Size([90_000]),), (0,))

    def work(xs: list[torch.Tensor], *_: Any) -> Any:
        if xs[0].dtype == torch.uint8:  # a header
            xs[0].copy_(description.message)
        return SimpleNamespace(wait=lambda timeout: waits.append(messages._describe_wait()))

    backend = SimpleNamespace(send=work, recv=work)
    connections = GlooConnections(backend, 0, 6, datetime.timedelta(seconds=1800))
    xs = [torch.ones(30_000)]
    messages = PendingMessages(connections, (0, 3, 5), description, {3: xs}, {3: [torch.empty(30_000)]})
    messages.wait()
    ranks = [5, 3, 3, 3, 5, 3]  # headers from 5 and 3, messages to and from 3, headers to 5 and 3
    said = "may be compiling, saving, slow, stopped or in a debugger; the timeout is 1800 s"
    text = "all_gather over data of float32 [90000], dims [0]"
    assert waits == [(f"for rank {rank} in {text}", f"rank {rank} {said}") for rank in ranks]
    GlooConnections.close_all()  # gloo closes its sockets when nothing refers to the backend
    assert connections.backend is None


# --- the end of a program ---------------------------------------------------------------------------------------------


@pytest.fixture
def no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program: an IPython shell that another test of this process has made sets `sys.ps1`, and leaves it."""
    monkeypatch.delattr(sys, "ps1", raising=False)


@pytest.mark.usefixtures("no_prompt")
@pytest.mark.parametrize("child", [False, True])
def test_end_of_a_program_by_an_exception_is_a_failure(child: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[bool] = []
    registered: list[Any] = []
    if child:  # of multiprocessing, which calls finalizers while the exception propagates
        monkeypatch.setattr(multiprocessing, "parent_process", lambda: "a process")
        monkeypatch.setattr(multiprocessing.util, "Finalize", lambda _, f, exitpriority: registered.append(f))
    else:
        monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(sys, "last_value", ValueError("of an earlier cell"), raising=False)
    raised: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda *_: raised.append("printed"))
    call_at_exit(ends.append, lambda: raised.append("failed"))
    (leave,) = registered

    for e in (None, SystemExit(), SystemExit(0), SystemExit(3), SystemExit("a line"), KeyboardInterrupt(), OSError()):
        if child:
            try:
                if e is not None:
                    raise e
                leave()
            except BaseException:
                leave()
        else:
            if not isinstance(e, SystemExit | None):
                monkeypatch.setattr(sys, "last_value", e)
            leave()
    assert ends == [False, False, False, child, child, True, True]
    monkeypatch.setattr(os, "getpid", lambda: -1)
    leave()  # in a forked child
    assert len(ends) == 7
    sys.excepthook(OSError, OSError(), None)
    assert raised == ["printed"]
    monkeypatch.undo()


@pytest.mark.usefixtures("no_prompt")
def test_uncaught_exception_is_told_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of the program may go on for long after it."""
    raised: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda *_: raised.append("printed"))
    monkeypatch.setattr(atexit, "register", lambda _: None)
    call_at_exit(lambda _: None, lambda: raised.append("failed"))
    sys.excepthook(OSError, OSError(), None)
    assert raised == ["printed", "failed"]
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    sys.excepthook(OSError, OSError(), None)  # at a prompt
    assert raised == ["printed", "failed", "printed"]


def test_rank_0_waits_at_its_end_only_where_it_has_the_store() -> None:
    first = Job(1).watchdog(0, 2, has_store=False)
    ours, theirs = socket.socketpair()
    first.add(ours, 1)
    first._left.add(0)
    first.close()  # and does not wait for rank 1
    theirs.close()
    assert first._closed
