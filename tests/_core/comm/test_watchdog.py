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
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fshard import ShardingError
from fshard._core.comm.description import describe_transfer
from fshard._core.comm.gloo import GlooConnections, Peers, PendingMessages
from fshard._core.comm.meeting import ACCEPTED, HELLO, KEY, listen
from fshard._core.comm.watchdog import _NUMBER, Wait, Watchdog, call_at_exit, launcher_id
from tests.lib.forked import free_port

GRACE, LONG_WAIT = 10.0, 30.0


class Job:
    """Watchdogs of some ranks, connected as by `connect`, whose threads do not run: `step` does what they do."""

    def __init__(self, world: int) -> None:
        self.now = 0.0
        self.ends: dict[int, str] = {}  # by rank, its first reason to end
        self.reports: list[str] = []
        self.ranks = [self.watchdog(rank, world) for rank in range(world)]
        self.store = dist.HashStore()
        for rank in self.ranks:
            rank._store = self.store
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
    monkeypatch.setattr(
        "fshard._core.comm.watchdog._LEAVE", datetime.timedelta(milliseconds=1)
    )  # a test has one thread
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
        while not job.ranks[rank]._is_leaving:
            thread.join(0.001)
    return threads


def test_ranks_wait_until_all_leave_and_rank_0_until_all_have_closed(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr("fshard._core.comm.watchdog._LEAVE", datetime.timedelta(seconds=60))
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
    monkeypatch.setattr("fshard._core.comm.watchdog._LEAVE", datetime.timedelta(seconds=60))
    threads = leaving(job, 0, 2)
    job.kill(3)
    job.step()
    assert sorted(job.ends) == [0, 2]  # by a process that ends, while its main thread waits
    job.store.set("all left", "")
    for thread in threads:
        thread.join(10)


def test_rank_that_is_killed_while_it_waits_for_others_to_leave_has_failed(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Its agent kills it if another rank of its machine has failed."""
    monkeypatch.setattr("fshard._core.comm.watchdog._LEAVE", datetime.timedelta(seconds=60))
    (thread,) = leaving(job, 3)
    job.step()
    job.kill(3)
    job.step()
    assert [job.ranks[rank].failed for rank in range(3)] == [3] * 3
    job.store.set("all left", "")
    thread.join(10)


def test_rank_that_ends_after_all_have_left_has_not_failed(job: Job) -> None:
    job.store.add("left", 3)
    job.leave(0)
    job.kill(3)
    job.step()
    assert job.ranks[0].failed is None


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


@pytest.fixture
def zero(job: Job, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watchdog]:
    """Rank 0 of a job of three ranks, which listens and whose thread runs."""
    monkeypatch.setattr("fshard._core.comm.meeting._RETRY", 0.01)
    monkeypatch.setattr("fshard._core.comm.meeting._HELLO_TIMEOUT", 0.05)  # a rank that is slower tries again
    zero = job.watchdog(0, 3)
    zero.meet(job.store, "127.0.0.1", "29500")
    running = threading.Thread(target=lambda: [zero.step(0.01) for _ in iter(lambda: zero._closed, True)])
    running.start()
    yield zero
    zero._is_leaving = False
    zero.close()
    running.join()
    assert zero._listener is not None
    zero._listener.close()


def meet(job: Job, rank: int, world: int = 3, **options: Any) -> Watchdog:
    watchdog = job.watchdog(rank, world, **options)
    watchdog.meet(job.store, "127.0.0.1", "29500")
    return watchdog


def until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.001)


def test_ranks_of_an_attempt_meet_and_share_a_part_of_the_store(job: Job, zero: Watchdog) -> None:
    one, two = (meet(job, rank) for rank in (1, 2))
    zero._store.set("key", "of attempt 1")
    assert [rank._store.get("key") for rank in (one, two)] == [b"of attempt 1"] * 2
    again = job.watchdog(0, 3)  # after a restart, with the same store
    again.meet(job.store, "127.0.0.1", "29500")
    assert not again._store.check(["key"])
    assert not zero.meet(job.store, "127.0.0.1", "29500").check(["key"])  # torch.distributed is started again
    assert again._listener is not None
    again._listener.close()
    for rank in (one, two):
        rank.close()
    until(lambda: zero.failed is not None)


def test_rank_does_not_take_the_rank_0_of_a_former_attempt_for_its_own(job: Job, zero: Watchdog) -> None:
    now = job.store.get(KEY)
    with socket.create_server(("127.0.0.1", 0)) as other_program, socket.create_server(("127.0.0.1", 0)) as free:
        ports = [other_program.getsockname()[1], free.getsockname()[1]]
        free.close()
        for port in ports:  # an answer that is not rank 0's, and none
            job.store.set(KEY, f"{port} {bytes(16).hex()}")
            one = job.watchdog(1 + ports.index(port), 3)
            meeting = threading.Thread(target=one.meet, args=(job.store, "127.0.0.1", "29500"))
            meeting.start()
            if port == ports[0]:
                connection, _ = other_program.accept()
                connection.sendall(b"H" + bytes(24))
                connection.close()
            job.store.set(KEY, now.decode())
            meeting.join()
            assert one._token == zero._token
            one.leave(failed=False)
            one.close()


STRANGERS = {(1, 3): "has a rank 1 already", (2, 5): "has 3 ranks", (7, 8): "has 3 ranks"}


@pytest.mark.parametrize(("rank", "world"), STRANGERS)
def test_error_text_of_a_rank_of_another_job(job: Job, zero: Watchdog, rank: int, world: int) -> None:
    one = meet(job, 1)
    with pytest.raises(ShardingError) as caught:
        meet(job, rank, world)
    assert str(caught.value) == (
        "make_mesh: another job, or an attempt that is ending, uses port 29500 of 127.0.0.1\n"
        f"  this is rank {rank} of {world}, and that job {STRANGERS[rank, world]}\n"
        "  fix: another port: MASTER_PORT, or --master-port or --rdzv-endpoint of torchrun"
    )
    assert list(zero._connections.values()) == [1]
    one.leave(failed=False)
    one.close()
    until(lambda: not zero._connections)
    assert zero.failed is None


def test_strangers_fail_nobody(job: Job, zero: Watchdog) -> None:
    """Also one that has read the token. `tests.faults.restarts` starts strangers of more kinds."""
    one = meet(job, 1)
    port, token = job.store.get(KEY).decode().split()
    wrong_ranks = [HELLO.pack(b"H", bytes.fromhex(token), 3, rank) for rank in (0, 1, 3, 2**32 - 1)]
    for message in (b"", b"GET / HTTP/1.1", bytes(25), HELLO.pack(b"H", bytes(16), 3, 2), *wrong_ranks):
        with socket.create_connection(("127.0.0.1", int(port))) as stranger:
            stranger.sendall(message)
            assert not stranger.recv(100).startswith(ACCEPTED)
    (connection,) = zero._connections
    zero._send(_NUMBER.pack(3), connection)  # a rank that there is not
    one.step(10)
    assert (zero.failed, one.failed) == (None, None)
    one.leave(failed=True)
    until(lambda: zero.failed == 1)
    late = meet(job, 2)  # a rank that hears of it on arrival
    late.step(10)
    assert late.failed == 1
    for rank in (one, late):
        rank.close()


def test_connection_that_is_accepted_while_the_watchdog_closes_is_closed_too(job: Job) -> None:
    ours, theirs = socket.socketpair()
    job.ranks[0].close()
    job.ranks[0].add(ours, 2)
    assert (ours.fileno(), job.ranks[0]._connections) == (-1, {})
    theirs.close()


def test_error_text_of_a_rank_that_does_not_reach_rank_0(job: Job) -> None:
    port = free_port()
    job.store.set(KEY, f"{port} {bytes(16).hex()}")
    job.store.set_timeout(datetime.timedelta(seconds=-1))
    with pytest.raises(ShardingError) as caught:
        meet(job, 1)
    assert str(caught.value) == (
        f"make_mesh: rank 1 does not reach rank 0 at port {port} of 127.0.0.1\n"
        "  [Errno 111] Connection refused\n"
        "  fix: see rank 0's output; a firewall must let ranks reach each other's ports"
    )


def test_with_agents_one_rank_of_each_machine_stays_connected(job: Job, zero: Watchdog) -> None:
    stays, leaves = meet(job, 1, launcher=os.getppid()), meet(job, 2, launcher=os.getppid(), stays=False)
    assert leaves._token == zero._token
    until(lambda: list(zero._connections.values()) == [1])
    assert (zero.failed, leaves._connections) == (None, {})
    zero._note_failure(2)
    stays.step(10)
    job.now = GRACE
    stays.step(0)
    assert job.ends[1] == (
        "rank 1 ends, since rank 2 or another rank of its machine has failed: it raised, was killed, called os._exit, "
        "or its host was lost; see the output of rank 2"
    )
    stays.close()


def test_rank_0_listens_where_the_others_look_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(host: str) -> str:
        with listen(host, 3) as s:
            return str(s.getsockname()[0])

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert address("127.0.0.1") == "127.0.0.1"
    assert address("localhost") in ("::", "0.0.0.0")  # for the ranks of another machine it may have another name
    assert address("192.0.2.1") in ("::", "0.0.0.0")  # a router's
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert address("localhost") in ("::1", "127.0.0.1")


def test_rank_ends_with_its_launcher(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 4711)  # the tests' parent may be process 1
    rank = job.watchdog(5, 8, launcher=4711)
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
    monkeypatch.setattr("fshard._core.comm.watchdog._waits", waits)

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
    connections = GlooConnections(backend, 6, datetime.timedelta(seconds=1800))
    xs = [torch.ones(30_000)]
    peers = Peers(connections, (0, 3, 5), 0)
    messages = PendingMessages(peers, description, {1: xs}, {1: [torch.empty(30_000)]})
    messages.wait()
    ranks = [5, 3, 3, 3, 5, 3]  # headers from 5 and 3, messages to and from 3, headers to 5 and 3
    said = "may be compiling, saving, slow, stopped, in a debugger, or may not make this call; the timeout is 1800 s"
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
    assert ends == [False, False, False, False, False, True, True]
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
