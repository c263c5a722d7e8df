"""Transfers over gloo as direct sends between pairs of ranks, from where tensors lie to where they belong.

Gloo's own collectives copy into buffers of theirs, and take 3 to 5 times as long. Here a large contiguous tensor goes
without a copy; the small ones of a transfer go together, in one message to each rank. All ranks sum in the order of
the ranks: the same bits on each, and on a simulated mesh. Messages meet by tag, and each transfer has one of its own:
what is started in one order may be landed in another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .buffers import fold
from .comm import Flight
from .packed import broken

_LARGE = 1 << 16  # bytes from which a message of its own costs less than two copies
_WHOLE = 1 << 14  # bytes up to which everyone sums everything: half the bytes are not worth a second round


@dataclass
class Wires:
    """The connections of a group, and what is to be kept of them from one transfer to the next."""

    backend: Any
    # One for each transfer, and more than are ever in the air. Messages of one tag arrive in the order they were sent.
    tags: Iterator[int] = field(default_factory=lambda: itertools.cycle(range(1 << 20, (1 << 20) + 4096)))
    adrift: list[tuple[Any, Tensor]] = field(default_factory=list)  # of flights that were given up


@dataclass(frozen=True)
class Line:
    """The ranks over some axes, in the order of the axes, as the one at `me` sees them."""

    wires: Wires
    places: Sequence[int]  # each one's rank in the group
    me: int

    @property
    def others(self) -> list[int]:
        return [r for r in range(len(self.places)) if r != self.me]


# --- the transfers --------------------------------------------------------------------------------------------


def gather(line: Line, xs: Sequence[Tensor], into: Sequence[Sequence[Tensor]]) -> Flight:
    """Start to bring rank r's xs[i] to into[i][r]."""
    messages = _seal(xs)
    mail = _Mail(line, next(line.wires.tags), {r: (messages, [parts[r] for parts in into]) for r in line.others})
    _copy([parts[line.me] for parts in into], xs)

    def land() -> list[Tensor]:
        mail.wait()
        return []

    return land


def scatter(line: Line, xs: Sequence[Sequence[Tensor]]) -> Flight:
    """Start to sum, for each i, every rank's xs[i][me]."""
    mine = [row[line.me] for row in xs]
    sealed = _seal(mine, dense=False)
    rooms = {r: [_room(x) for x in sealed] for r in line.others}
    mail = _Mail(line, next(line.wires.tags), {r: (_seal([row[r] for row in xs]), rooms[r]) for r in line.others})

    def land() -> list[Tensor]:
        mail.wait()
        totals = [_total(line, x, [rooms[r][g] for r in line.others], "sum", None) for g, x in enumerate(sealed)]
        return _unseal(totals, mine)

    return land


def reduce(line: Line, xs: Sequence[Tensor], op: str = "sum", *, fresh: bool = False) -> Flight:
    """Start to reduce over the ranks: in place, or to `fresh` tensors."""
    n, me = len(line.places), line.me
    flats = [x.view(-1) for x in _seal(xs)]
    lent = {x.data_ptr() for x in xs} if fresh else set()  # the caller's, and not to be written to
    outs = [None if flat.data_ptr() in lent else flat for flat in flats]
    tag = next(line.wires.tags)

    def results(totals: Sequence[Tensor]) -> list[Tensor]:
        found = _unseal(totals, xs)
        if fresh:
            return found
        moved = [i for i, (x, y) in enumerate(zip(xs, found, strict=True)) if x.data_ptr() != y.data_ptr()]
        _copy([xs[i] for i in moved], [found[i] for i in moved])
        return list(xs)

    if n == 2 or sum(x.nbytes for x in flats) <= _WHOLE:
        rooms = {r: [_room(flat) for flat in flats] for r in line.others}
        whole = _Mail(line, tag, {r: (flats, rooms[r]) for r in line.others})

        def land() -> list[Tensor]:
            whole.wait()
            return results([
                _total(line, flat, [rooms[r][g] for r in line.others], op, out)
                for g, (flat, out) in enumerate(zip(flats, outs, strict=True))
            ])  # fmt: skip

        return land

    cuts = [flat.tensor_split(n) for flat in flats]
    rooms = {r: [_room(cut[me]) for cut in cuts] for r in line.others}
    pieces = _Mail(line, tag, {r: (_seal([cut[r] for cut in cuts]), rooms[r]) for r in line.others})

    def land_pieces() -> list[Tensor]:
        pieces.wait()
        totals = [torch.empty_like(flat) if out is None else out for flat, out in zip(flats, outs, strict=True)]
        into = [total.tensor_split(n) for total in totals]
        for g, cut in enumerate(cuts):
            _total(line, cut[me], [rooms[r][g] for r in line.others], op, into[g][me])
        messages = _seal([parts[me] for parts in into])
        _Mail(line, tag, {r: (messages, [parts[r] for parts in into]) for r in line.others}).wait()
        return results(totals)

    return land_pieces


def all_reduce(line: Line, x: Tensor, op: str) -> Tensor:
    return reduce(line, [x], op, fresh=True)()[0]


def all_gather(line: Line, x: Tensor) -> Tensor:
    out = torch.empty(len(line.places), *x.shape, dtype=x.dtype)
    gather(line, [x], [out.unbind()])()
    return out


def reduce_scatter(line: Line, x: Tensor) -> Tensor:
    return scatter(line, [x.unbind()])()[0]


def all_to_all(line: Line, x: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    mail = _Mail(line, next(line.wires.tags), {r: (_seal([x[r]]), [out[r]]) for r in line.others})
    out[line.me].copy_(x[line.me])
    mail.wait()
    return out


def permute(line: Line, x: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
    to = {target for source, target in pairs if source == line.me}
    of = {source for source, target in pairs if target == line.me}
    out = (torch.empty if of else torch.zeros)(x.shape, dtype=x.dtype)
    message = _seal([x])
    every = {r: (message if r in to else [], [out] if r in of else []) for r in line.others}
    mail = _Mail(line, next(line.wires.tags), every)
    if line.me in of:
        out.copy_(x)
    mail.wait()
    return out


def _total(line: Line, mine: Tensor, rooms: Sequence[Tensor], op: str, out: Tensor | None) -> Tensor:
    """My part and those of the others, in the order of the ranks, reduced to `out`; `None`: to the first of `rooms`."""
    parts = [*rooms[: line.me], mine, *rooms[line.me :]]
    return fold(parts, op, rooms[0], rooms[0] if out is None else out)


# --- messages -------------------------------------------------------------------------------------------------


class _Mail:
    """What goes to each rank and comes from it, as messages and the tensors they land in: under way."""

    def __init__(self, line: Line, tag: int, every: Mapping[int, tuple[Sequence[Tensor], Sequence[Tensor]]]) -> None:
        self._wires = wires = line.wires
        self._works: list[tuple[Any, Tensor]] = []  # each with what it reads or writes
        self._landings: list[tuple[Tensor, list[Tensor]]] = []
        n = len(line.places)
        _settle(wires.adrift)
        for d in range(1, n):
            r = (line.me - d) % n
            for group in _bundles(every[r][1]):
                targets = [every[r][1][i] for i in group]
                x = targets[0]
                if len(targets) > 1 or not x.is_contiguous():
                    x = x.new_empty(sum(t.numel() for t in targets))
                    self._landings.append((x, targets))
                self._works.append((_sure(wires.backend.recv, [x], line.places[r], tag), x))
            r = (line.me + d) % n
            for x in every[r][0]:
                self._works.append((_sure(wires.backend.send, [x], line.places[r], tag), x))

    def wait(self) -> None:
        """Until everything is sent and everything has come. Raises ShardingError if a rank has failed or left."""
        _settle(self._works)
        for x, targets in self._landings:
            _copy(targets, _split(x, targets))

    def __del__(self) -> None:
        # A flight that nobody landed, because of an error: what still comes needs its place, or all that comes after
        # it on this connection waits behind it forever.
        self._wires.adrift += self._works


def _settle(works: list[tuple[Any, Tensor]]) -> None:
    while works:
        _sure(works[-1][0].wait)
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


def _seal(xs: Sequence[Tensor], *, dense: bool = True) -> list[Tensor]:
    """The messages for some tensors: each its own memory, or packed."""
    out = []
    for group in _bundles(xs):
        x = xs[group[0]]
        if len(group) > 1:
            x = torch.cat([xs[i].reshape(-1) for i in group])
        out.append(x.resolve_conj().resolve_neg().contiguous() if dense else x)
    return out


def _unseal(messages: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Undo `_seal`."""
    out = [x.new_empty(x.shape) if x.nbytes == 0 else x for x in like]
    for group, message in zip(_bundles(like), messages, strict=True):
        for i, x in zip(group, _split(message, [like[i] for i in group]), strict=True):
            out[i] = x
    return out


def _split(x: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = [x] if len(like) == 1 else x.split_with_sizes([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]


def _room(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _copy(targets: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(xs))


__all__ = [
    "Line", "Wires", "all_gather", "all_reduce", "all_to_all", "gather", "permute", "reduce", "reduce_scatter",
    "scatter",
]  # fmt: skip
