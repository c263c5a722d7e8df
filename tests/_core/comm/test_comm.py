"""Simulated ranks never hang, raise the first failure, and share no memory."""

from __future__ import annotations

import functools
import gc
import math
import operator
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import Counter
from dataclasses import replace
from queue import SimpleQueue

import pytest
import torch

import fshard as fs
from fshard import P, ShardingError
from fshard._core.comm import AbstractComm, simulated
from fshard._core.comm.rank_threads import RankThread
from fshard._core.region import in_region, region
from fshard._core.torch import set_jvp_nesting
from fshard._core.transfers import Recording, transfer_rows
from tests.lib.assertions import error_text
from tests.lib.collective_cases import verbs_with_bytes

LIMIT = 600.0  # seconds, far above the time of a test that does not hang on a loaded machine


WHOLE = P()


def on_ranks(mesh, f, *args, out=WHOLE):
    return fs.shard_map(f, mesh=mesh, in_specs=P(), out_specs=out)(*args)


def rank_of():
    return region().rank


def still_works(mesh):
    """Assert that the mesh runs again after a failure."""
    total = on_ranks(mesh, lambda: fs.psum(torch.tensor(float(rank_of())), tuple(mesh.axes)))
    assert total.item() == sum(range(mesh.size))


def in_child(f):
    """Return the result of `f` as text, from a forked child that is killed if it hangs."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        try:
            answer = f()
        except BaseException as e:
            answer = f"{type(e).__name__}: {e}"
        os.write(write, str(answer).encode())
        os._exit(0)
    os.close(write)
    try:
        if select.select([read], [], [], LIMIT)[0]:
            return os.read(read, 1 << 16).decode()
        os.kill(pid, signal.SIGKILL)
        return "it hangs"
    finally:
        os.waitpid(pid, 0)  # not killed while it saves its coverage: files that are cut short may fail the run
        os.close(read)


# --- failures of a rank ------------------------------------------------------------------------------------------


class OwnError(Exception):
    """An exception of the user."""


def culprit(error):
    raise error("mine")


@pytest.mark.parametrize("error", [OwnError, ValueError, KeyboardInterrupt, SystemExit, ShardingError, StopIteration])
@pytest.mark.parametrize("when", ["first", "last", "later"])
def test_exception_of_one_rank_ends_the_others_and_is_raised(error, when):
    mesh = fs.make_mesh(a=2, b=2)

    def f(x):
        x = fs.pvary(x, ("a", "b"))
        if when == "later":
            x = fs.pvary(fs.psum(fs.psum(x, "a"), "b"), ("a", "b"))
        if rank_of() == 2:
            time.sleep(0.02 if when == "last" else 0)  # the others wait by then
            culprit(error)
        if when == "first":
            time.sleep(0.02)
        return fs.psum(x, ("a", "b"))

    start = time.monotonic()
    with pytest.raises(error, match="mine") as caught:
        on_ranks(mesh, f, torch.ones(3))
    assert time.monotonic() - start < LIMIT
    assert type(caught.value) is error
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-1] == "culprit"
    assert "f" in names
    still_works(mesh)


def test_one_exception_is_raised_if_all_ranks_raise():
    mesh = fs.make_mesh(a=4)
    with pytest.raises(OwnError, match="mine"):
        on_ranks(mesh, lambda: culprit(OwnError))
    still_works(mesh)


def test_user_code_cannot_catch_the_end_of_its_run():
    mesh = fs.make_mesh(a=2)
    caught = []

    def f(x):
        if rank_of() == 1:
            culprit(OwnError)
        x = fs.pvary(x, "a")
        try:
            return fs.psum(x, "a")
        except Exception as e:
            caught.append(e)
            return x

    with pytest.raises(OwnError):
        on_ranks(mesh, f, torch.ones(3))
    assert caught == []
    still_works(mesh)


def test_exception_in_backward_of_one_rank_is_raised():
    mesh = fs.make_mesh(a=3)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            if rank_of() == 1:
                culprit(OwnError)
            return grad

    def f(x):
        return fs.grad(lambda x: fs.psum(Fails.apply(fs.pvary(x, "a")).sum(), "a"))(x)

    with pytest.raises(OwnError, match="mine"):
        on_ranks(mesh, f, torch.ones(3))
    still_works(mesh)


# --- interrupts ---------------------------------------------------------------------------------------------------


def interrupted(mesh, f, *args):
    """Return the interrupt that a call of `f` raises; `f` calls `interrupt`."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("interrupts reach the main thread")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            on_ranks(mesh, f, *args)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < LIMIT
    still_works(mesh)
    return caught.value


def interrupt():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


# The exception that ends a rank may arrive while Python runs a callback of a weak reference there, which cannot raise:
# Python reports it as ignored, and the rank ends at its next transfer, or by the exception that is sent again.
may_arrive_in_a_callback = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def looping(monkeypatch):
    """A list that the loop of a rank fills: while it is empty, the rank may be elsewhere, and is not interrupted."""
    looping, interrupt_thread = [], RankThread.interrupt

    def when_looping(thread):
        if looping:
            interrupt_thread(thread)
            looping.clear()

    monkeypatch.setattr(RankThread, "interrupt", when_looping)
    monkeypatch.setattr(simulated, "_ATTEMPTS", int(LIMIT / simulated._PATIENCE))
    return looping


@may_arrive_in_a_callback
def test_interrupt_of_the_caller_ends_ranks_that_communicate():
    def f(x):
        for i in range(1 << 40):
            x = fs.pmean(fs.pvary(x, "a"), "a")
            if i == 5 and rank_of() == 0:
                interrupt()
        return x

    interrupted(fs.make_mesh(a=2), f, torch.ones(3))


@may_arrive_in_a_callback
def test_interrupt_of_the_caller_ends_a_rank_that_computes_and_names_its_line(looping):
    ended, threads = [], []

    def f(x):
        threads.append(threading.current_thread())
        if rank_of() == 0:
            return x
        if rank_of() == 1:
            fs.psum(fs.pvary(x, "a"), "a")
        try:
            interrupt()
            while True:
                looping[:] = [True]
                time.sleep(0)
        finally:
            ended.append(rank_of())

    e = interrupted(fs.make_mesh(a=4), f, torch.ones(3))
    assert ended == [2]
    line = f.__code__.co_firstlineno + 8
    lines = "|".join(str(line + i) for i in (-1, 0, 1, 2))
    notes = re.sub(rf":({lines}) in f(?=\n)|:\d+ in interrupt", ":LINE in f", "\n".join(e.__notes__))
    assert notes == (
        "simulated ranks at the interrupt:\n"
        "  rank 0  has returned\n"
        f"  rank 1  waits in all_reduce over 'a' of float32[3], at test_comm.py:{line - 3} in f\n"
        "  rank 2  runs test_comm.py:LINE in f\n"
        "  rank 3  waits for its turn"
    )
    assert len(threads) == 3
    for thread in threads:  # a late interrupt must not reach another run
        thread.join(LIMIT)
        assert not thread.is_alive()


@may_arrive_in_a_callback
def test_interrupt_of_the_caller_ends_a_rank_that_catches_everything(monkeypatch, looping):
    monkeypatch.setattr(simulated, "_PATIENCE", 0.01)
    caught = []

    def f():
        while len(caught) < 2:
            try:
                if not caught:
                    interrupt()
                while True:
                    looping[:] = [True]
                    time.sleep(0)
            except BaseException as e:
                caught.append(e)
        fs.psum(torch.ones(1), "a")

    interrupted(fs.make_mesh(a=2), f)
    assert len(caught) == 2


@may_arrive_in_a_callback
def test_rank_that_an_interrupt_cannot_end_holds_up_no_other_run(monkeypatch):
    if sys.gettrace() is not None:
        pytest.skip("under a tracer, such as coverage, the caller waits until the rank's call into C ends")
    monkeypatch.setattr(simulated, "_PATIENCE", 0.002)
    module = torch.nn.Linear(1, 1)
    before, threads = dict(module.named_parameters()), []
    inside, leave = SimpleQueue(), threading.Lock()
    leave.acquire()
    calls = [functools.partial(inside.put, None), functools.partial(leave.acquire, timeout=LIMIT)]

    class Waits(torch.nn.Module):
        def forward(self, x):
            threading.Thread(target=lambda: (inside.get(), interrupt())).start()  # when the rank is in the next call
            assert list(map(operator.call, calls))[1]  # one call into C, which no exception reaches

    def f(x):
        threads.append(threading.current_thread())
        torch.func.functional_call(torch.nn.Sequential(module, Waits()), {"0.weight": x}, x)

    e = interrupted(fs.make_mesh(a=2), f, torch.ones(1, 1))
    assert e.__notes__[1] == "rank 0 has not ended yet; its thread ends after the call that it is in"
    assert all(before[k] is v for k, v in module.named_parameters())
    leave.release()
    assert len(threads) == 1
    threads[0].join(LIMIT)
    assert not threads[0].is_alive()
    assert all(before[k] is v for k, v in module.named_parameters())


# --- forks --------------------------------------------------------------------------------------------------------


def test_mesh_works_in_a_fork_of_the_process_that_used_it():
    """Also while another thread of the parent is in a run."""
    mesh = fs.make_mesh(a=2)
    still_works(mesh)
    inside, leave = threading.Event(), threading.Event()

    def waits():
        inside.set()
        assert leave.wait(LIMIT)

    def in_fork():
        still_works(mesh)
        still_works(fs.make_mesh(a=3))
        assert mesh.run(lambda comm, rank: torch.func.jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))[1].item()) \
            == [1, 1]  # fmt: skip
        return f"functional_call of {torch.nn.utils.stateless._reparametrize_module.__module__}"

    other = threading.Thread(target=lambda: fs.make_mesh(a=2).run(lambda comm, rank: waits()), daemon=True)
    other.start()
    assert inside.wait(LIMIT)
    try:
        assert in_child(in_fork) == "functional_call of torch.nn.utils.stateless"
    finally:
        leave.set()
        other.join()


def test_error_text_of_a_collective_in_a_fork_that_a_rank_makes():
    texts = []

    def f(x):
        if rank_of() == 0:
            texts.append(in_child(lambda: fs.psum(x, "a")))
        return fs.psum(x, "a")

    on_ranks(fs.make_mesh(a=2), lambda x: f(fs.pvary(x, "a")), torch.ones(3))
    assert texts == [
        (
            "ShardingError: all_reduce over 'a' of float32[3]: called in a fork of the process, which has no other "
            "rank\n  fix: fork outside of shard_map, or call no collective in the fork"
        )
    ]


# --- deadlocks and disagreements --------------------------------------------------------------------------------


def text(mesh, f, *args):
    start = time.monotonic()
    text = error_text(on_ranks, mesh, f, *args)
    assert time.monotonic() - start < LIMIT
    still_works(mesh)
    return text


@pytest.mark.parametrize("first", [True, False])
def test_error_text_of_rank_that_returns_while_others_wait(first):
    def f(x):
        if rank_of() == 1:
            time.sleep(0 if first else 0.02)
            return x
        return fs.psum(fs.pvary(x, "a"), "a")

    where = f"at test_comm.py:{f.__code__.co_firstlineno + 4} in f"
    assert text(fs.make_mesh(a=3), f, torch.ones(2, 4)) == (
        "deadlock: every rank that has not returned waits for another one\n"
        f"  rank 0  waits in all_reduce over 'a' of float32[2, 4], {where}\n"
        f"  rank 2  waits in all_reduce over 'a' of float32[2, 4], {where}\n"
        "  rank 1  has returned\n"
        "  fix: every rank must call the same collectives in the same order"
    )


def test_error_text_of_deadlock_across_axes():
    def f(x):
        x = fs.pvary(x, ("a", "b"))
        if rank_of() in (0, 3):
            return fs.psum(fs.all_gather(x, "a"), "b")
        return fs.all_gather(fs.psum(x, "b"), "a")

    first = f.__code__.co_firstlineno
    gather, total = (f"at test_comm.py:{first + n} in f" for n in (3, 4))
    assert text(fs.make_mesh(a=2, b=2), f, torch.ones(3)) == (
        "deadlock: every rank that has not returned waits for another one\n"
        f"  rank 0  waits in all_gather over 'a' of float32[3], {gather}\n"
        f"  rank 1  waits in all_reduce over 'b' of float32[3], {total}\n"
        f"  rank 2  waits in all_reduce over 'b' of float32[3], {total}\n"
        f"  rank 3  waits in all_gather over 'a' of float32[3], {gather}\n"
        "  fix: every rank must call the same collectives in the same order"
    )


def test_axes_in_another_order_are_an_error():
    message = text(
        fs.make_mesh(a=2, b=2),
        lambda x: fs.psum(fs.pvary(x, ("a", "b")), ("a", "b") if rank_of() % 2 else ("b", "a")),
        torch.ones(3),
    )
    assert "deadlock" in message or "disagree" in message
    assert "over 'a', 'b' of float32[3]" in message
    assert "over 'b', 'a' of float32[3]" in message


def test_rank_that_calls_one_collective_more_is_an_error():
    f = lambda x: [fs.psum(fs.pvary(x, "a"), "a") for _ in range(2 + rank_of())][-1]  # noqa: E731
    message = text(fs.make_mesh(a=2), f, torch.ones(3))
    assert "rank 0  has returned" in message
    assert "rank 1  waits in all_reduce" in message


DISAGREEMENTS = {
    "op": (
        lambda x: fs.psum(x, "a") if rank_of() else fs.pmax(x, "a"),
        {0: "all_reduce max over 'a' of float32[4]", 1: "all_reduce over 'a' of float32[4]"},
    ),
    "collective": (
        lambda x: fs.psum(x, "a") if rank_of() else fs.all_gather(x, "a"),
        {0: "all_gather over 'a' of float32[4]", 1: "all_reduce over 'a' of float32[4]"},
    ),
    "shape": (
        lambda x: fs.psum(x[: 4 - rank_of()], "a"),
        {0: "all_reduce over 'a' of float32[4]", 1: "all_reduce over 'a' of float32[3]"},
    ),
    "dtype": (
        lambda x: fs.psum(x.double() if rank_of() else x, "a"),
        {0: "all_reduce over 'a' of float32[4]", 1: "all_reduce over 'a' of float64[4]"},
    ),
    "pairs": (
        lambda x: fs.ppermute(x, "a", [(0, 1)] if rank_of() else [(1, 0)]),
        {0: "permute over 'a' of float32[4]", 1: "permute over 'a' of float32[4]"},
    ),
    "leaves": (
        lambda x: fs.psum([x] * (1 + rank_of()), "a")[0],
        {0: "all_reduce over 'a' of float32[4]", 1: "all_reduce over 'a' of float32[8]"},
    ),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_error_text_of_ranks_that_call_different_collectives(name):
    f, calls = DISAGREEMENTS[name]
    message = text(fs.make_mesh(a=2), lambda x: f(fs.pvary(x, "a")), torch.ones(4)).splitlines()
    assert message[0] == "the ranks disagree on a collective"
    where = f"at test_comm.py:{f.__code__.co_firstlineno} in <lambda>"
    assert sorted(message[1:3]) == [f"  rank {r}  {calls[r]}, {where}" for r in (0, 1)]
    assert message[3:] == [
        (
            "  fix: every rank must call the same collectives in the same order, on equal shapes; "
            "for a dim that the axis does not divide, pass its global size="
        )
    ]


# --- sequential, nested and concurrent runs -------------------------------------------------------------


@pytest.mark.parametrize("inner_axes", [{"a": 2}, {"b": 2}, {"b": 1}], ids=repr)
@pytest.mark.parametrize("outer_axes", [{"a": 2}, {"a": 1}], ids=repr)
def test_shard_map_inside_shard_map_is_an_error(outer_axes, inner_axes):
    def nested():
        outer, inner = fs.make_mesh(**outer_axes), fs.make_mesh(**inner_axes)
        inner = outer if outer == inner else inner
        return on_ranks(outer, lambda x: on_ranks(inner, lambda x: x, x).shards[0], torch.ones(2))

    assert in_child(nested) == (
        "ShardingError: shard_map inside shard_map: the axes are bound already\n  fix: call the inner function directly"
    )


def test_a_run_ends_once_where_a_rank_ends_its_turn_late(monkeypatch):
    """A second end is an error in the thread of a rank, which dies, and the next run waits for it forever."""
    ends, over, done = [], threading.Event(), threading.Event()
    end_turn, set_ = simulated._Run.end_turn, simulated._Run.end

    def late(run, rank):
        end_turn(run, rank)
        assert rank == 1 or over.wait(LIMIT)  # rank 1 has ended the run before rank 0 goes on

    def end(self):
        ends.append(self)
        if len(ends) == 1:
            set_(self)
        over.set()

    monkeypatch.setattr(simulated._Run, "end_turn", late)
    monkeypatch.setattr(simulated._Run, "end", end)
    threads = fs.make_mesh(a=2).run(lambda comm, rank: threading.current_thread())
    threads[0].jobs.put(done.set)
    assert done.wait(LIMIT)
    assert len(ends) == 1


def test_nothing_refers_to_a_program_and_its_results_after_a_run_whose_threads_end_late(monkeypatch):
    """Neither does a cycle, also where no rank waits for another one."""
    leave, set_ = threading.Event(), simulated._Run.end

    def end(self):
        set_(self)
        assert leave.wait(LIMIT)

    monkeypatch.setattr(simulated._Run, "end", end)
    given, enabled = torch.ones(1), gc.isenabled()
    gc.disable()
    try:
        made = fs.make_mesh(a=2).run(lambda comm, rank, given=given: given + rank)
        kept = [weakref.ref(x) for x in (given, *made)]
        del given, made
        assert [x() for x in kept] == [None] * 3
    finally:
        leave.set()
        if enabled:
            gc.enable()


def test_threads_can_share_a_mesh():
    mesh = fs.make_mesh(a=2, b=2)
    wrong: list[object] = []

    def many(base):
        axes = ("a", "b")
        f = fs.shard_map(lambda x: fs.psum(fs.pvary(x, axes), axes), mesh=mesh, in_specs=P(), out_specs=P())
        for i in range(15):
            got = f(torch.tensor(float(base + i))).item()
            if got != 4 * (base + i):
                wrong.append((base, i, got))

    threads = [threading.Thread(target=many, args=(base,), daemon=True) for base in (0, 100, 200)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(LIMIT)
    assert not any(t.is_alive() for t in threads)
    assert wrong == []


def test_thread_that_a_rank_starts_can_use_the_mesh():
    mesh, totals = fs.make_mesh(a=2), []

    def f(x):
        thread = threading.Thread(target=lambda: totals.append(still_works(mesh)), daemon=True)
        thread.start()
        thread.join(LIMIT)
        return fs.psum(x, "a")

    on_ranks(mesh, lambda x: f(fs.pvary(x, "a")), torch.ones(1))
    assert len(totals) == 2


def test_jvp_works_in_concurrent_runs_and_after():
    square = lambda x: torch.func.jvp(lambda x: x * x, (x,), (torch.ones_like(x),))[1]  # noqa: E731
    inside, outside = threading.Event(), threading.Event()

    def early(x):  # ends while `late` runs
        assert inside.wait(LIMIT)
        return square(x)

    def late(x):
        inside.set()
        assert outside.wait(LIMIT)
        return square(x)

    results: dict[str, object] = {}

    def call(name, mesh, f):
        try:
            results[name] = fs.device_get(on_ranks(mesh, f, torch.full((2,), 3.0))).tolist()
        except Exception as e:
            results[name] = e
        if name == "early":
            outside.set()

    started = threading.Event()

    def early_and_signal(x):
        started.set()
        return early(x)

    first = threading.Thread(target=call, args=("early", fs.make_mesh(a=2), early_and_signal), daemon=True)
    second = threading.Thread(target=call, args=("late", fs.make_mesh(b=2), late), daemon=True)
    first.start()
    assert started.wait(LIMIT)
    second.start()
    first.join(LIMIT)
    second.join(LIMIT)
    after = set_jvp_nesting(0)  # in any case, for the tests that follow
    assert results == {"early": [6, 6], "late": [6, 6]}
    assert after == 0
    assert square(torch.full((2,), 3.0)).tolist() == [6, 6]


@pytest.mark.parametrize("n", [1, 2])
def test_simulated_mesh_runs_in_a_forward_mode_level_of_the_caller(n):
    with torch.autograd.forward_ad.dual_level():
        assert on_ranks(fs.make_mesh(a=n), lambda x: fs.psum(fs.pvary(x, "a"), "a"), torch.ones(())).item() == n


@pytest.mark.parametrize("n", [1, 3])
def test_modes_of_the_caller_apply_on_every_rank(n):
    mesh = fs.make_mesh(a=n)

    def modes(comm, rank):
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")

    assert mesh.run(modes) == [(True, False, False)] * n
    with torch.no_grad():
        assert mesh.run(modes) == [(False, False, False)] * n
        with torch.enable_grad():
            assert mesh.run(modes) == [(True, False, False)] * n
    with torch.inference_mode():
        assert mesh.run(modes) == [(False, True, False)] * n
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mesh.run(modes) == [(True, False, True)] * n
    assert mesh.run(modes) == [(True, False, False)] * n


# --- results ------------------------------------------------------------------------------------

VERBS = {
    "psum": lambda x: fs.pvary(fs.psum(x, "a"), "a"),  # pvary is a view: writing into it writes into the sum
    "psum of a tree": lambda x: fs.pvary(fs.psum([x, x], "a")[1], "a"),
    "pmean": lambda x: fs.pvary(fs.pmean(x, "a"), "a"),
    "pmax": lambda x: fs.pvary(fs.pmax(x, "a"), "a"),
    "pmin": lambda x: fs.pvary(fs.pmin(x, "a"), "a"),
    "all_gather": lambda x: fs.all_gather(x, "a"),
    "psum_scatter": lambda x: fs.psum_scatter(x, "a"),
    "all_to_all": lambda x: fs.all_to_all(x, "a", split=0, concat=1),
    "all_to_all_rows": lambda x: fs.all_to_all_rows(x, "a", [2 * (r - rank_of()) % 6 for r in range(3)]),
    "ppermute": lambda x: fs.ppermute(x, "a", [(0, 1), (1, 2)]),
}


@pytest.mark.parametrize("verb", VERBS)
def test_result_shares_no_memory_with_other_ranks(verb):
    """Writing into a result, or afterwards into the argument, changes nothing on other ranks."""
    mesh = fs.make_mesh(a=3)

    def f(x, overwrite):
        x = fs.pvary(x, "a") * (1 + rank_of())
        y = VERBS[verb](x)
        if overwrite:
            kept = y.clone()
            fs.psum(torch.zeros(1), "a")
            x.fill_(1000 + rank_of())
            y.add_(1 + rank_of())
            fs.psum(torch.zeros(1), "a")
            y = torch.where(y == kept + 1 + rank_of(), kept, float("nan"))
        return y[None]

    x = torch.arange(12.0).view(6, 2)
    get = lambda overwrite: fs.device_get(on_ranks(mesh, f, x, overwrite, out=P("a")))  # noqa: E731
    torch.testing.assert_close(get(True), get(False), rtol=0, atol=0)


# --- the region --------------------------------------------------------------------------------------------


def test_region_has_rank_and_coordinates():
    mesh = fs.make_mesh(a=2, b=2)

    def f():
        here = region()
        assert in_region()
        assert dict(here.sizes) == mesh.axes
        return torch.tensor([[here.rank, here.coords["a"], here.coords["b"]]])

    got = fs.device_get(on_ranks(mesh, f, out=P(("a", "b"))))
    assert got.tolist() == [[rank, *mesh.coords(rank).values()] for rank in mesh.ranks]
    assert not in_region()


@pytest.mark.parametrize("n", [1, 2])
def test_no_region_is_bound_after_a_failure(n):
    mesh = fs.make_mesh(a=n)
    with pytest.raises(OwnError):
        on_ranks(mesh, lambda: culprit(OwnError))
    assert not in_region()
    assert mesh.run(lambda comm, rank: in_region()) == [False] * n


@pytest.mark.parametrize("verb", ["psum", "pmean", "pvary", "pmax", "all_gather", "psum_scatter", "pslice",
                                  "axis_index", "axis_size"])  # fmt: skip
def test_error_text_of_collective_outside_a_region(verb):
    args = () if verb in ("axis_index", "axis_size") else (torch.ones(2),)
    assert error_text(getattr(fs, verb), *args, "a") == (
        f"{verb}: called outside shard_map, where no mesh axis is bound\n"
        "  fix: call it inside a function wrapped by fs.shard_map(f, mesh=..., ...)"
    )


def test_other_threads_of_a_rank_are_not_in_its_region():
    def f():
        seen = []
        other = threading.Thread(target=lambda: seen.append(in_region()))
        other.start()
        other.join()
        assert seen == [False]

    on_ranks(fs.make_mesh(a=2), f)


# --- recording ---------------------------------------------------------------------------------------------


def test_recording_has_every_transfer_of_every_rank():
    mesh = fs.make_mesh(a=2, b=2)

    def f(x):
        v = fs.pvary(x, ("a", "b"))
        fs.psum({"x": v, "y": v[:1], "z": v.double()}, "a")  # one transfer per dtype
        fs.all_gather(v, ("a", "b"))
        fs.pvary(x, "a")  # transfers nothing
        fs.axis_index("a")

    with fs.recording() as log:
        on_ranks(mesh, f, torch.ones(3))
    each = [
        ("all_reduce", ("a",), torch.float32, 16),
        ("all_reduce", ("a",), torch.float64, 24),
        ("all_gather", ("a", "b"), torch.float32, 12),
    ]
    assert Counter((t.op, t.axes, t.dtype, t.bytes) for t in log) == Counter(each * 4)


@pytest.mark.parametrize("axes", [("a",), ("b",), ("a", "b"), ("b", "c", "a")])
def test_ranks_together_send_the_bytes_that_they_receive(axes):
    mesh = fs.make_mesh(a=2, b=3, c=2)
    n = math.prod(mesh.axes[a] for a in axes)

    def run(comm, rank):
        for verb, _ in verbs_with_bytes(comm, axes):
            verb()

    with fs.recording() as log:
        mesh.run(run)
    wanted = [nbytes for _, nbytes in verbs_with_bytes(AbstractComm(mesh.axes, mesh.coords(0), []), axes)]
    assert len(log) == len(wanted) * mesh.size
    by_rank = [[t for t in log if t.rank == rank] for rank in range(mesh.size)]
    assert [sum(t.sent for t in ts) for ts in zip(*by_rank, strict=True)] == [w * mesh.size // n for w in wanted]
    assert {t.ranks for t in log} == {n}
    for rank, ts in enumerate(by_rank):  # and so are those of the mesh that transfers nothing
        dry = []
        run(AbstractComm(mesh.axes, mesh.coords(rank), dry), rank)
        assert dry == ts


def test_repr_of_a_recording_is_a_table_by_line():
    def f(x):
        v = fs.pvary(x, "a")
        for _ in range(2):
            fs.all_gather(v, "a")
        return fs.psum(v.bfloat16(), "a")

    line = f.__code__.co_firstlineno
    with fs.recording() as log:
        on_ranks(fs.make_mesh(a=4), f, torch.ones(300))
    assert repr(log) == (
        "12 transfers of 4 ranks, 31.6 KiB sent in all\n"
        f"      8  all_gather  a  forward    28.1 KiB  test_comm.py:{line + 3} in f\n"
        f"      4  all_reduce  a  forward     3.5 KiB  test_comm.py:{line + 4} in f"
    )
    assert repr(Recording()) == "0 transfers of 0 ranks, 0 B sent in all"
    many = [replace(log[0], where=None, axes=(f"axis{i}",), bytes=1 + i) for i in range(25)]
    assert transfer_rows(many)[0].split() == ["1", "all_gather", "axis5", "forward", "18", "B"]
    assert transfer_rows(many)[20:] == ["      5  of 5 other rows, 45 B"]


def test_recordings_nest():
    mesh = fs.make_mesh(a=2)
    once = lambda: on_ranks(mesh, lambda: fs.psum(torch.ones(1), "a"))  # noqa: E731
    with fs.recording() as outer:
        once()
        with fs.recording() as inner:
            once()
        once()
    once()
    assert (len(outer), len(inner)) == (4, 2)
    with pytest.raises(OwnError), fs.recording() as failed:
        culprit(OwnError)
    once()
    assert failed == []


def test_axis_of_size_one_transfers_nothing():
    with fs.recording() as log:
        on_ranks(fs.make_mesh(a=1, b=2), lambda: fs.psum(torch.ones(1), "a"))
    assert log == []
