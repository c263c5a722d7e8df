"""Messages between the ranks of a group: on a `Board` where they share a host, over the sockets of gloo elsewhere.

Over a socket a large contiguous tensor goes without a copy, and the small ones of a transfer go together, in one
message to each rank. Messages meet by tag, and each transfer has one of its own: what is started in one order may be
landed in another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard._torch_compat import foreach_copy_

from .board import Board
from .functional import broken

_LARGE = 1 << 16  # bytes from which a message of its own costs less than two copies
_TAGS = range(1 << 20, (1 << 20) + 4096)  # more than there are transfers in the air


@dataclass
class Work:
    """A message of gloo's under way, with what it reads or writes. Called, it waits."""

    handle: Any
    x: Tensor

    def __call__(self) -> None:
        _sure(self.handle.wait)


@dataclass
class Wires:
    """The connections of a group, and what is to be kept of them from one transfer to the next."""

    backend: Any
    board: Board | None = None  # of ranks that share a host
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))  # of the transfers
    adrift: list[Mail] = field(default_factory=list)  # of flights that were given up


@dataclass(frozen=True)
class Line:
    """The ranks over some axes, in the order of the axes, as the one at `me` sees them."""

    wires: Wires
    places: Sequence[int]  # each one's rank in the group
    me: int

    @property
    def others(self) -> list[int]:
        return [r for r in range(len(self.places)) if r != self.me]


class Mail:
    """What goes to each rank and comes from it, under way.

    Rank r is sent `outgoing[r]`. What comes from it is like `incoming[r]`, tensor by tensor: to be `place`d there, or
    to be looked at between `land` and `close`. All ranks give it one `number`: in the order in which they start.
    """

    def __init__(
        self, line: Line, outgoing: Mapping[int, Sequence[Tensor]], incoming: Mapping[int, Sequence[Tensor]], *,
        place: bool = False, number: int | None = None,
    ) -> None:  # fmt: skip
        self._line, self._wires = line, line.wires
        self._number = next(line.wires.numbers) if number is None else number
        self._incoming, self._place = incoming, place
        self._works: list[Work] = []
        self._landings: list[tuple[Tensor, list[Tensor]]] = []
        self._came: dict[int, list[Tensor]] = {}
        self._unread: list[int] = []  # ranks on whose boards there is something for me
        self._posted = False  # something on mine
        while self._wires.adrift:
            self._wires.adrift.pop().give_up()
        if self._wires.board is None:
            self._exchange(outgoing)
            return
        self._unread = [r for r, xs in incoming.items() if _nbytes(xs)]
        self._came = {r: list(xs) for r, xs in incoming.items() if not _nbytes(xs)}
        if messages := {line.places[r]: xs for r, xs in outgoing.items() if _nbytes(xs)}:
            _sure(self._wires.board.post, self._number, messages)
            self._posted = True

    def _exchange(self, outgoing: Mapping[int, Sequence[Tensor]]) -> None:
        sealed: dict[int, list[Tensor]] = {}
        for d in range(1, len(self._line.places)):
            r = (self._line.me - d) % len(self._line.places)
            if r in self._incoming:
                self._expect(r, self._incoming[r])
            r = (self._line.me + d) % len(self._line.places)
            if r in outgoing:
                xs = outgoing[r]
                if id(xs) not in sealed:
                    sealed[id(xs)] = seal(xs)
                for x in sealed[id(xs)]:
                    self._go("send", x, r)

    def _expect(self, r: int, like: Sequence[Tensor]) -> None:
        rooms = like if self._place else [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in like]
        self._came[r] = list(rooms)
        for group in _bundles(like):
            targets = [self._came[r][i] for i in group]
            x = targets[0]
            if len(targets) > 1 or not x.is_contiguous():
                x = x.new_empty(sum(t.numel() for t in targets))
                self._landings.append((x, targets))
            self._go("recv", x, r)

    def _go(self, way: str, x: Tensor, r: int) -> None:
        """Begin to "send" a tensor to a rank, or to "recv" one from it."""
        tag = _TAGS[self._number % len(_TAGS)]  # messages of one tag arrive in the order they were sent
        self._works.append(Work(_sure(getattr(self._wires.backend, way), [x], self._line.places[r], tag), x))

    def land(self) -> Mapping[int, Sequence[Tensor]]:
        """Until everything is sent and has come: what came. Raises ShardingError if a rank has failed or left."""
        _settle(self._works)
        for x, targets in self._landings:
            copy(targets, _split(x, targets))
        for r in self._unread:
            assert self._wires.board is not None
            self._came[r] = _sure(self._wires.board.read, self._number, self._line.places[r], self._incoming[r])
            if self._place:
                copy(self._incoming[r], self._came[r])
        if self._place:
            self.close()
        return self._came

    def room(self, g: int) -> Tensor | None:
        """The g-th tensor of the first that came, to be written to; `None` where it is another rank's memory."""
        first = self._line.others[0]
        return None if first in self._unread else self._came[first][g]

    def close(self) -> None:
        """What came has been looked at."""
        if self._wires.board is not None:
            while self._unread:
                self._wires.board.done(self._number, self._line.places[self._unread.pop()])
            if self._posted:
                self._wires.board.landed(self._number)
                self._posted = False

    def give_up(self) -> None:
        """Take what still comes, and leave it. What I have put up goes when the others have read it, or never."""
        _settle(self._works)
        self._posted = False  # it has not landed here: nobody may be waited for
        while self._unread:
            assert self._wires.board is not None
            _sure(self._wires.board.skip, self._number, self._line.places[self._unread.pop()])

    def __del__(self) -> None:
        # A flight that nobody landed, because of an error: what still comes needs its place, or all that comes after
        # it on this connection waits behind it forever. When that is differs by rank.
        if self._works or self._unread or self._posted:
            self._wires.adrift.append(self)


def _nbytes(xs: Sequence[Tensor]) -> int:
    return sum(x.nbytes for x in xs)


def _settle(works: list[Work]) -> None:
    while works:
        works[-1]()
        works.pop()


def _sure(act: Any, *args: Any) -> Any:
    try:
        return act(*args)
    except RuntimeError as e:
        raise broken(e) from e


def _bundles(xs: Sequence[Tensor]) -> list[list[int]]:
    """Which tensors share a message: large ones are alone, the small ones together. Of sizes alone: all agree."""
    large = [[i] for i, x in enumerate(xs) if x.nbytes >= _LARGE]
    small = [i for i, x in enumerate(xs) if 0 < x.nbytes < _LARGE]
    return [*large, small] if small else large


def seal(xs: Sequence[Tensor], *, dense: bool = True) -> list[Tensor]:
    """The messages for some tensors: each its own memory, or packed."""
    out = []
    for group in _bundles(xs):
        x = xs[group[0]]
        if len(group) > 1:
            x = torch.cat([xs[i].reshape(-1) for i in group])
        out.append(x.resolve_conj().resolve_neg().contiguous() if dense else x)
    return out


def unseal(messages: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Undo `seal`."""
    out = [x.new_empty(x.shape) if x.nbytes == 0 else x for x in like]
    for group, message in zip(_bundles(like), messages, strict=True):
        for i, x in zip(group, _split(message, [like[i] for i in group]), strict=True):
            out[i] = x
    return out


def _split(x: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = [x] if len(like) == 1 else x.split_with_sizes([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]


def copy(targets: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    if targets:
        foreach_copy_(list(targets), list(xs))


__all__ = ["Line", "Mail", "Wires", "copy", "seal", "unseal"]
