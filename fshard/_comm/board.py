"""Memory that the ranks of one host share: what one puts up there, the others read where it lies.

Over a socket the system copies what is sent twice, on the cores that compute, and wakes threads to do so. Here a
message is written once, and read in place by all it is for.

A rank's board begins with a line for each transfer that may be under way: its number, and where its page begins. A
page begins with a line for each rank: the number of the transfer it has read there last, and where what is for it lies.
Every cell has one writer, and is written after what it tells of: processors that keep stores in order need no more
(x86). Nothing is left behind, however a process ends: the memory is in no file system (memfd and pidfd, Linux). Until
the board goes, it keeps the pages it has needed at once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import secrets
import select
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from fshard._torch_compat import foreach_copy_
from fshard.errors import fail

_LINE = 64  # bytes that processors share as one: cells of two writers are kept apart, and tensors begin there
_CELLS = _LINE // 8
_TRANSFERS = 4096  # that may be under way
_LEAST = 1 << 12  # bytes of the smallest page
_TURNS = 2  # pages of a size that are waited for, before there is another: who reads may be a transfer behind
_SPINS = 200  # looks at a cell, some 20 us, before the core is left to others


@dataclass(eq=False)
class Arena:
    """The memory of one rank's board, as bytes and as cells of 64 bits, and a file descriptor of its process."""

    memory: Tensor
    cells: memoryview
    process: int

    def ended(self) -> bool:
        watch = select.poll()
        watch.register(self.process)
        return bool(watch.poll(0))

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.process)


@dataclass(eq=False)
class Page:
    """Where something has been put up: transfer `number`, for some ranks to read."""

    start: int
    size: int
    number: int = 0
    readers: Sequence[int] = ()
    landed: bool = True  # the transfer, here


class Board:
    """The board of the rank at `me`, and those of the other ranks of its group. `patience` in seconds."""

    def __init__(self, me: int, arenas: Sequence[Arena], patience: float) -> None:
        self._me, self._arenas, self._patience = me, arenas, patience
        self._own = arenas[me]
        self._end = _TRANSFERS * _LINE  # of the memory in use
        self._pages: dict[int, list[Page]] = {}  # by size, the longest unwritten first
        self._posted: dict[int, Page] = {}  # by the line of a transfer

    def post(self, number: int, messages: Mapping[int, Sequence[Tensor]]) -> None:
        """Put up what each of some ranks is to read in a transfer; what goes to several, the same list, once."""
        profiled: bool = torch.autograd.profiler._is_profiler_enabled
        total = sum(x.nbytes for xs in messages.values() for x in xs) if profiled else 0
        with record_function(f"board:send {total} bytes") if profiled else contextlib.nullcontext():
            self._write(number, messages)

    def _write(self, number: int, messages: Mapping[int, Sequence[Tensor]]) -> None:
        each = {id(xs): xs for xs in messages.values()}
        starts: dict[int, int] = {}
        size = len(self._arenas) * _LINE
        for one, xs in each.items():
            starts[one] = size
            size += sum(map(_room, xs))
        last = self._posted.get(number % _TRANSFERS)
        if last is not None and last.landed and last.number % _TRANSFERS == number % _TRANSFERS:
            self._until_read(last)
        page = self._take(max(_LEAST, 1 << (size - 1).bit_length()))
        for one, xs in each.items():
            foreach_copy_(_lay(self._own.memory, page.start + starts[one], xs), list(xs))
        cells = self._own.cells
        for r, xs in messages.items():
            at = page.start // 8 + r * _CELLS
            cells[at + 1], cells[at + 2], cells[at + 3] = starts[id(xs)], sum(x.nbytes for x in xs), number
        page.number, page.readers, page.landed = number, tuple(messages), False
        line = number % _TRANSFERS * _CELLS
        self._posted[number % _TRANSFERS] = page
        cells[line + 1] = page.start
        cells[line] = number

    def read(self, number: int, rank: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Wait for what a rank puts up for me in a transfer: tensors in its memory, mine to read until `done`."""
        cells, line = self._arenas[rank].cells, number % _TRANSFERS * _CELLS
        self._until(lambda: cells[line] == number, rank)
        start = cells[line + 1]
        at = start // 8 + self._me * _CELLS
        sent = cells[at + 2] if cells[at + 3] == number else 0
        if sent != (expected := sum(x.nbytes for x in like)):
            raise fail(f"a transfer: one rank sends {sent} bytes, another expects {expected}",
                       fix="every rank must call the same collectives in the same order, on equal shapes")  # fmt: skip
        return _lay(self._arenas[rank].memory, start + cells[at + 1], like)

    def done(self, number: int, rank: int) -> None:
        """I have read what a rank has put up for me in a transfer."""
        cells, line = self._arenas[rank].cells, number % _TRANSFERS * _CELLS
        if cells[line] == number:
            cells[cells[line + 1] // 8 + self._me * _CELLS] = number

    def skip(self, number: int, rank: int) -> None:
        """Wait for what a rank puts up in a transfer that was given up here, and let it have its memory back."""
        cells, line = self._arenas[rank].cells, number % _TRANSFERS * _CELLS
        self._until(lambda: cells[line] >= number, rank)  # more: so long ago that its line is another's
        self.done(number, rank)

    def landed(self, number: int) -> None:
        """A transfer has landed here: so it does on the others, whatever this rank does next, and may be waited for."""
        page = self._posted.get(number % _TRANSFERS)
        if page is not None and page.number == number:
            page.landed = True

    def _take(self, size: int) -> Page:
        pages = self._pages.setdefault(size, [])
        page = next(filter(self._is_read, pages), None)
        if page is None:
            over = [p for p in pages if p.landed]
            if len(over) < _TURNS:
                page = Page(self._end, size)
                if self._end + size > self._own.memory.nbytes:
                    raise fail(f"a transfer of {size} bytes finds no memory: all is taken by others under way",
                               fix="land flights sooner, or move less at a time")  # fmt: skip
                self._end += size
            else:
                page = over[0]
                self._until_read(page)
        if page in pages:
            pages.remove(page)
        pages.append(page)
        return page

    def _is_read(self, page: Page) -> bool:
        cells, at = self._own.cells, page.start // 8
        return all(cells[at + r * _CELLS] == page.number for r in page.readers)

    def _until_read(self, page: Page) -> None:
        for r in page.readers:
            at = page.start // 8 + r * _CELLS
            self._until(lambda at=at: self._own.cells[at] == page.number, r)  # type: ignore[misc]

    def _until(self, true: Callable[[], bool], rank: int) -> None:
        """Wait for what a rank is to write. Raises RuntimeError if its process ends, or after much patience."""
        for _ in range(_SPINS):
            if true():
                return
        start = time.monotonic()
        while not true():
            if self._arenas[rank].ended() and not true():
                raise RuntimeError("its process has ended")
            waited = time.monotonic() - start
            if waited > self._patience:
                raise RuntimeError(f"it has done nothing in {self._patience:.0f} s")
            time.sleep(min(1e-3, waited / 20))  # late by no more than a twentieth


def boards(me: int, gather: Callable[[Tensor], Tensor], patience: float) -> Board | None:
    """A board for each rank of a group, where all of them can read all others'; `None` elsewhere.

    All ranks call it. `gather` brings a tensor of each, stacked in their order.
    """
    name = secrets.randbits(62)
    fd = _memory(name)
    try:
        known = gather(torch.tensor([os.getpid(), fd, name], device="cpu")).tolist()
        found = [_look(*place) for place in known]
        everyone = bool(gather(torch.tensor([None not in found], device="cpu")).all())
    finally:
        if fd >= 0:
            os.close(fd)
    arenas = [arena for arena in found if arena is not None]
    return Board(me, arenas, patience) if everyone else None


def _memory(name: int) -> int:
    """A file descriptor of memory as large as the machine's, taken where it is written to; -1 where there is none."""
    if platform.machine() not in ("x86_64", "AMD64") or not {"memfd_create", "pidfd_open"} <= set(dir(os)):
        return -1
    fd = -1
    try:
        fd = os.memfd_create(f"fshard-{name}")
        os.ftruncate(fd, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except OSError:  # not allowed here, or not as much
        if fd >= 0:
            os.close(fd)
        return -1
    return fd


def _look(pid: int, fd: int, name: int) -> Arena | None:
    """The memory that a process has made known, if it can be seen from here."""
    path = f"/proc/{pid}/fd/{fd}"
    try:
        if os.readlink(path) != f"/memfd:fshard-{name} (deleted)":  # on another host, somebody else's
            return None
        with open(path, "r+b", buffering=0) as file:
            memory = mmap.mmap(file.fileno(), 0)
        return Arena(torch.frombuffer(memory, dtype=torch.uint8), memoryview(memory).cast("q"), os.pidfd_open(pid))
    except (OSError, ValueError):  # another host, another user, or not enough room for addresses
        return None


def _room(x: Tensor) -> int:
    return -(-x.nbytes // _LINE) * _LINE


def _lay(memory: Tensor, start: int, like: Iterable[Tensor]) -> list[Tensor]:
    """Tensors like these, one after the other, in some memory."""
    out = []
    for x in like:
        out.append(memory[start : start + x.nbytes].view(x.dtype).view(x.shape))
        start += _room(x)
    return out


__all__ = ["Board", "boards"]
