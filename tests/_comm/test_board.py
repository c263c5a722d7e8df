"""Memory that ranks of one host share: what is put up is read, once, and its memory comes back; a failure is told.

That the transfers over boards have the right values is in `test_flights`, beside those over sockets.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from fshard import ShardingError
from fshard._comm.board import Board, boards

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory without a name here")


class Meeting:
    """Brings a tensor of each thread to all of them."""

    def __init__(self, n: int) -> None:
        self.barrier, self.given = threading.Barrier(n, timeout=20), [torch.empty(0)] * n

    def gather(self, me: int, x: Tensor) -> Tensor:
        self.given[me] = x
        self.barrier.wait()
        out = torch.stack(self.given)
        self.barrier.wait()
        return out


def group(n: int, patience: float = 20.0, change: Any = lambda me, x: x) -> list[Board | None]:
    """A board for each of n ranks of this process. `change` what they tell each other."""
    meeting = Meeting(n)
    with ThreadPoolExecutor(n) as pool:
        make = lambda me: boards(me, lambda x: meeting.gather(me, change(me, x)), patience)  # noqa: E731
        return [f.result(30) for f in [pool.submit(make, me) for me in range(n)]]


def size(board: Board) -> int:
    """The bytes of its memory that have been in use."""
    return board._end


def test_what_is_put_up_for_several_is_written_once_and_read_in_place():
    a, b, c = group(3)
    x, y = torch.arange(5000.0), torch.tensor([True, False, True])
    both = [x.view(50, 100).t(), y]
    before = size(a)
    a.post(1, {1: both, 2: both})
    assert x.nbytes < size(a) - before < 2 * x.nbytes
    for me, other in ((1, b), (2, c)):
        got = other.read(1, 0, both)
        assert all(torch.equal(g, w) for g, w in zip(got, both, strict=True)), me
    a._own.memory[before:].view(torch.float32)[3 * 16] = 7.0  # behind a line for each rank
    assert b.read(1, 0, both)[0].flatten()[0] == 7.0


def test_each_reader_has_its_own_part():
    a, b, c = group(3)
    a.post(1, {1: [torch.ones(3)], 2: [torch.zeros(2), torch.full((2, 2), 5.0)]})
    assert b.read(1, 0, [torch.empty(3)])[0].tolist() == [1, 1, 1]
    assert [x.tolist() for x in c.read(1, 0, [torch.empty(2), torch.empty(2, 2)])] == [[0, 0], [[5, 5], [5, 5]]]


def test_memory_is_written_again_once_all_have_read_it():
    a, b, c = group(3)
    x = torch.ones(10_000)
    for number in range(1, 40):
        message = [x * number]
        a.post(number, {1: message, 2: message})
        a.landed(number)
        for other in (b, c):
            assert other.read(number, 0, message)[0][-1] == number
            other.done(number, 0)
        if number == 1:
            once = size(a)
    assert size(a) == once
    many = {n: [x * n] for n in range(40, 50)}  # under way all at once, and read in another order
    for number, message in many.items():
        a.post(number, {1: message})
    for number, message in reversed(many.items()):
        assert torch.equal(b.read(number, 0, message)[0], message[0])
        b.done(number, 0)


def test_who_sends_and_never_receives_waits_for_who_reads():
    """Or what is put up would grow without end."""
    a, b = group(2)
    message, ahead = [torch.ones(10_000)], []

    def send() -> None:
        for number in range(1, 21):
            a.post(number, {1: message})
            a.landed(number)
            ahead.append(number)

    sender = threading.Thread(target=send)
    sender.start()
    time.sleep(0.1)
    assert len(ahead) == 2
    for number in range(1, 21):
        b.read(number, 0, message)
        b.done(number, 0)
    sender.join(20)
    assert len(ahead) == 20


def test_more_transfers_than_lines():
    a, b = group(2)
    message = [torch.ones(1)]
    for number in range(1, 10_000):
        a.post(number, {1: message})
        assert b.read(number, 0, message)[0].item() == 1
        b.done(number, 0)
    for number in range(10_000, 10_000 + 4096):
        a.post(number, {1: message})
    a.landed(10_000)
    waits = threading.Thread(target=a.post, args=(10_000 + 4096, {1: message}))  # in the line of one that is not read
    waits.start()
    waits.join(0.1)
    assert waits.is_alive()
    b.read(10_000, 0, message)
    b.done(10_000, 0)
    waits.join(20)
    assert not waits.is_alive()


def test_ranks_that_mean_different_transfers_are_told():
    a, b = group(2)
    a.post(1, {1: [torch.ones(3)]})
    with pytest.raises(ShardingError, match="sends 12 bytes, another expects 16"):
        b.read(1, 0, [torch.ones(4)])


def test_a_wait_ends_when_the_process_of_the_other_rank_has():
    a, b = group(2, patience=60.0)
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    b._arenas[0].process = os.pidfd_open(other.pid)
    threading.Timer(0.2, other.kill).start()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="its process has ended"):  # a zombie: nobody has waited for it
        b.read(1, 0, [torch.ones(1)])
    assert time.monotonic() - start < 10
    a.post(2, {1: [torch.ones(1)]})
    assert b.read(2, 0, [torch.ones(1)])[0].item() == 1  # what it left behind can be read
    other.communicate()


def test_patience_ends():
    _, b = group(2, patience=0.05)
    with pytest.raises(RuntimeError, match="it has done nothing in"):
        b.read(1, 0, [torch.ones(1)])


def test_all_have_boards_or_nobody_has():
    assert None not in group(2)
    another_name = lambda me, x: x + torch.tensor([0, 0, 1]) if me == 1 and len(x) == 3 else x  # noqa: E731
    no_such_process = lambda me, x: torch.tensor([1 << 40, 3, 0]) if me == 2 and len(x) == 3 else x  # noqa: E731
    none_here = lambda me, x: torch.tensor([False]) if me == 0 and len(x) == 1 else x  # noqa: E731
    for change in (another_name, no_such_process, none_here):
        assert group(3, change=change) == [None] * 3


def test_where_no_memory_is_to_be_had_there_are_no_boards(monkeypatch):
    def refused(name: str) -> int:
        raise PermissionError(1, "not here")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "memfd_create", refused)
    assert group(2) == [None] * 2
    monkeypatch.undo()
    monkeypatch.setattr(os, "ftruncate", lambda fd, size: refused(""))
    assert group(2) == [None] * 2
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_transfer_that_is_given_up_keeps_nobody_waiting():
    a, b = group(2)
    message = [torch.ones(10_000)]
    for number in range(1, 9):  # not one of them lands here
        a.post(number, {1: message})
    for number in (2, 4, 5, 7):
        b.skip(number, 0)
    once = size(a)
    for number in range(9, 13):  # where those lay that were skipped
        a.post(number, {1: message})
    assert size(a) == once
    for number in range(13, 13 + 4096):  # the lines of all of them are written again, read or not
        a.post(number, {1: [torch.ones(1)]})
        a.landed(number)
        b.read(number, 0, [torch.ones(1)])
        b.done(number, 0)
    b.skip(1, 0)  # so long ago that it cannot be told from what came later


def test_boards_leave_nothing_behind():
    count = lambda: len(os.listdir("/proc/self/fd"))  # noqa: E731
    before = count()
    ranks = group(4)
    assert count() > before
    del ranks
    assert count() == before
