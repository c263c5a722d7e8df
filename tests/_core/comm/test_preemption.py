"""An agreement to stop: all ranks stop at one call, whatever the moments; and until a signal arrives none sends."""

from __future__ import annotations

import datetime
import itertools
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

import fshard as fs
from fshard._core.comm import preemption
from fshard._core.comm.preemption import StopAgreement
from tests.lib.assertions import error_text
from tests.lib.signals import default_signals


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


class Counting:
    """A store that counts the requests of all ranks."""

    def __init__(self, store: dist.Store, requests: list[str]) -> None:
        self.store, self.requests = store, requests

    def clone(self) -> Counting:
        return Counting(self.store, self.requests)

    def __getattr__(self, name: str) -> Any:
        def request(*args: Any) -> Any:
            self.requests.append(name)
            return getattr(self.store, name)(*args)

        return request


def calls_of(agreement: StopAgreement, pause: random.Random, ask_at: int | None) -> int:
    """Run a program whose steps take random times; return the call at which it stops."""
    for call in itertools.count(1):  # as many as a slow asker leaves time for
        if call == ask_at:
            agreement.ask()
        if agreement.reached():
            break
        time.sleep(pause.choice([0.0, 0.0, 0.0002, 0.001]))
    return call


@pytest.mark.parametrize("seed", range(20))
def test_all_ranks_stop_at_the_same_call(seed: int, store: dist.Store) -> None:
    rng = random.Random(seed)
    world = rng.choice([2, 3, 8])
    ranks = [StopAgreement(store, rank, world) for rank in range(world)]
    askers = {rank: rng.randint(1, 50) for rank in rng.sample(range(world), rng.choice([1, 1, 2]))}
    with ThreadPoolExecutor(world) as pool:
        jobs = [pool.submit(calls_of, agreement, random.Random(rng.random()), askers.get(rank))
                for rank, agreement in enumerate(ranks)]  # fmt: skip
        ends = [job.result(timeout=600) for job in jobs]
    assert len(set(ends)) == 1
    assert ends[0] >= min(askers.values())
    assert all(agreement.reached() for agreement in ranks)  # and at each later call


def test_ranks_in_step_stop_at_most_one_call_later(store: dist.Store) -> None:
    ranks = [StopAgreement(store, rank, 2) for rank in range(2)]
    for _ in range(5):
        assert [agreement.reached() for agreement in ranks] == [False, False]
    ranks[1].ask()
    for agreement in ranks:
        agreement._decided.wait(60)
    assert [agreement.reached() for agreement in ranks] == [True, True]


def test_nothing_is_sent_while_nobody_is_told(store: dist.Store) -> None:
    requests: list[str] = []
    ranks = [StopAgreement(Counting(store, requests), rank, 3) for rank in range(3)]  # type: ignore[arg-type]
    while len(requests) < 3:
        time.sleep(0.001)
    for _ in range(1000):
        assert not any(agreement.reached() for agreement in ranks)
    assert requests == ["wait"] * 3  # of each rank's thread, at the start
    for agreement in ranks:
        agreement.close()


def test_rank_that_has_ended_keeps_no_other_rank_waiting(store: dist.Store) -> None:
    ranks = [StopAgreement(store, rank, 2) for rank in range(2)]
    for _ in range(7):
        assert not ranks[0].reached()
    ranks[0].close()
    assert ranks[0]._decided.is_set()
    assert ranks[0]._error is None
    assert not ranks[1].reached()
    ranks[1].ask()
    ranks[1]._decided.wait(60)
    assert [ranks[1].reached() for _ in range(8)] == [False] * 6 + [True] * 2  # calls 2 to 9: the end is 8


def test_rank_that_does_not_answer_is_named(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_ANSWER", datetime.timedelta(seconds=1))
    store.multi_set(["call/0", "call/2"], ["1", "1"])  # their answers, which may take more than a second
    ranks = [StopAgreement(store, rank, 4) for rank in (0, 2)]
    ranks[0].ask()
    for agreement in ranks:
        agreement._decided.wait(60)
        assert error_text(agreement.reached) == (
            "preempted: the ranks were asked to stop, and do not agree on a step\n"
            "  no answer from ranks [1, 3] in 1 s\n"
            "  fix: see the output of the other ranks"
        )


def test_store_that_is_gone_is_an_error_of_the_call_and_not_of_the_end() -> None:
    end = threading.Event()

    class Gone:
        def clone(self) -> Gone:
            return self

        def wait(self, *args: Any) -> None:
            end.wait(60)  # the thread does not know yet

        def __getattr__(self, name: str) -> Any:
            def request(*args: Any) -> Any:
                raise RuntimeError("the connection was closed")

            return request

    agreement: Any = StopAgreement(Gone(), 0, 2)  # type: ignore[arg-type]
    assert not agreement.reached()
    agreement.ask()
    assert "  the connection was closed\n" in error_text(agreement.reached)
    assert not agreement._decided.is_set()
    end.set()
    agreement.close()


# --- signals of one process -------------------------------------------------------------------------------------------

MESH = fs.make_mesh(data=2)


@default_signals()
def test_sigterm_and_sigusr1_are_told_at_the_next_call_and_all_later_ones() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        with default_signals():
            assert not fs.preempted(MESH)
            assert not fs.preempted(MESH)
            signal.raise_signal(number)
            assert all(fs.preempted(mesh) for mesh in (MESH, fs.make_mesh(kind="abstract", data=2), MESH))


@default_signals()
def test_ctrl_c_is_told_once_and_the_second_one_interrupts(capfd: pytest.CaptureFixture[str]) -> None:
    assert not fs.preempted(MESH)
    signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == (
        "fshard: Ctrl-C: the program stops after this step. Press it again to stop now.\n")  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert [fs.preempted(MESH) for _ in range(3)] == [True, False, False]  # a notebook can run its loop again
    signal.raise_signal(signal.SIGINT)
    assert [fs.preempted(MESH) for _ in range(2)] == [True, False]


@default_signals()
def test_handler_of_the_program_is_called_too_and_ignored_signals_stay_ignored() -> None:
    seen = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert not fs.preempted(MESH)
    signal.raise_signal(signal.SIGUSR1)
    assert not fs.preempted(MESH)
    signal.raise_signal(signal.SIGTERM)
    assert fs.preempted(MESH)
    assert seen == [signal.SIGTERM]


@default_signals()
def test_forked_child_ends_by_the_signal() -> None:
    assert not fs.preempted(MESH)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, b"1")  # Python forgets signals that arrive before the child runs
        time.sleep(30)
        os._exit(0)
    os.read(reader, 1)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


@default_signals()
def test_first_call_in_another_thread_is_refused() -> None:
    texts: list[str] = []

    def call() -> None:
        texts.append(error_text(fs.preempted, MESH))

    for _ in range(2):
        thread = threading.Thread(target=call if not texts else lambda: texts.append(str(fs.preempted(MESH))))
        thread.start()
        thread.join()
        fs.preempted(MESH)  # the handlers are installed: from now on any thread may call it
    assert texts[0] == (
        "preempted: the first call is not in the main thread\n"
        "  signal only works in main thread of the main interpreter\n"
        "  fix: call it once in the main thread, before this thread starts"
    )
    assert texts[1] == "False"
