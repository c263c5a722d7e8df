"""Messages between the ranks of a mesh, by the point-to-point send and receive of gloo.

A large contiguous tensor is sent without a copy, and the small ones of a transfer share one message to each rank.
Every transfer begins with a header of a fixed size from each rank to each other one, which describes it. The headers
of two ranks match in the order of their sends, so two ranks that start different transfers find out. The tag of the
other messages is computed from the description and a number, so messages of different transfers never match, and the
order of the waits may differ from the order of the starts.
"""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fshard._core.packing import pack, unpack
from fshard._core.torch import foreach_copy_

from .description import Description, counts_differ, counts_in, disagreement
from .functional import call_distributed
from .watchdog import SLOW, Wait

_LARGE = 1 << 16  # bytes from which a separate message costs less than two copies
HEADER_TAG = 1 << 20
_FIRST_TAG = 1 << 30
_NUMBERS = 1 << 13  # more than there are pending transfers

ByPeer = Mapping[int, Sequence[Tensor]]
Counts = Mapping[int, tuple[int, int]]  # by peer: the numbers of rows that are sent to it, and received from it


class Work(NamedTuple):
    """A message that is being sent to a peer or received from it, and the tensor that it reads or writes."""

    work: Any
    peer: int
    tensor: Tensor
    tag: int


@dataclass(eq=False)
class GlooConnections:
    """The connections of this rank to all others of the mesh, and their state from one transfer to the next."""

    existing: ClassVar[weakref.WeakSet[GlooConnections]] = weakref.WeakSet()

    backend: Any
    size: int
    timeout: datetime.timedelta
    started: list[int] = field(init=False)  # number of transfers with each rank
    abandoned: list[PendingMessages] = field(default_factory=list)  # dropped before they were waited for

    def __post_init__(self) -> None:
        self.started = [0] * self.size
        self.existing.add(self)

    @classmethod
    def close_all(cls) -> None:
        """Close the sockets of this process at its end. Gloo does so only when nothing refers to a backend."""
        for connections in list(cls.existing):
            connections.backend = None
            connections.abandoned.clear()


@dataclass(frozen=True)
class Peers:
    """Ranks that exchange messages, with this one at position `me`."""

    connections: GlooConnections
    ranks: Sequence[int]  # each one's rank in the mesh
    me: int


class PendingMessages:
    """The messages of one transfer: `outgoing[r]` is being sent to the r-th peer, and `incoming[r]` received from it.

    The sizes of `incoming[r]` are those that it sends. All peers, or only the `entered` ones, must start the same
    transfers with one another, in the same order. A transfer may have a second round of messages, another
    `PendingMessages`: `second_round_of` is the first. Peers whose `counts` of rows do not fit find out. Without
    `compared` there is no header: peers that start different transfers wait until the timeout.

    Attributes: `description`, and `works`: the messages that are not known to have ended.
    """

    def __init__(
        self, peers: Peers, description: Description, outgoing: ByPeer, incoming: ByPeer,
        second_round_of: PendingMessages | None = None, counts: Counts | None = None,
        entered: Collection[int] | None = None, compared: bool = True,
    ) -> None:  # fmt: skip
        n, me = len(peers.ranks), peers.me
        self.description, self._counts = description, counts
        self.works: list[Work] = []
        self._peers, self._entered = peers, range(n) if entered is None else entered
        self._headers: list[Work] = []
        self._received: dict[int, Tensor] = {}  # the header from each peer
        self._awaited = me  # the peer that is waited for
        self._packed: list[tuple[Tensor, list[Tensor]]] = []  # received buffers, and the tensors packed in each
        if second_round_of is not None:
            self._tags: dict[int, int] = {r: tag + _NUMBERS for r, tag in second_round_of._tags.items()}
        else:
            self._tags = self._exchange_headers(compared)
        for r in sorted(incoming, key=lambda r: (me - r) % n):  # each rank starts with another peer
            self._receive(r, incoming[r])
        messages: dict[int, list[Tensor]] = {}  # a list for several peers is packed once
        for r in sorted(outgoing, key=lambda r: (r - me) % n):
            xs = outgoing[r]
            if id(xs) not in messages:
                messages[id(xs)] = pack_messages(xs)
            self.works += [self._start("send", x, r, self._tags[r]) for x in messages[id(xs)]]

    def _exchange_headers(self, compared: bool) -> dict[int, int]:
        """Start to exchange headers, if they are compared; return the tag of the messages to and from each peer."""
        connections, me, message = self._peers.connections, self._peers.me, self.description.message
        tags, number, counts = {}, self.description.number, self._counts
        while connections.abandoned:
            connections.abandoned.pop()._wait_for_works()
        for r in self._entered:
            if r == me:
                continue
            if counts is not None:  # messages of other sizes must not match
                message = self.description.message_with(counts[r])
                both = counts[r] if me < r else counts[r][::-1]
                number = hash((self.description.number, *both)) & 0xFFFF
            if compared:
                self._received[r] = torch.empty(message.shape, dtype=torch.uint8, device="cpu")
                self._headers.append(self._start("recv", self._received[r], r, HEADER_TAG))
                self.works.append(self._start("send", message, r, HEADER_TAG))
            rank = self._peers.ranks[r]
            tags[r] = _FIRST_TAG + (number << 14) + connections.started[rank] % _NUMBERS
            connections.started[rank] += 1
        return tags

    def _receive(self, r: int, xs: Sequence[Tensor]) -> None:
        for indices in _messages(xs):
            targets = [xs[i] for i in indices]
            x = targets[0]
            if len(targets) > 1 or not x.is_contiguous():
                x = x.new_empty(sum(t.numel() for t in targets))
                self._packed.append((x, targets))
            self.works.append(self._start("recv", x, r, self._tags[r]))

    def _start(self, verb: str, x: Tensor, r: int, tag: int) -> Work:
        start = getattr(self._peers.connections.backend, verb)
        return Work(call_distributed(start, [x], self._peers.ranks[r], tag), r, x, tag)

    def wait(self) -> None:
        """Wait until all is sent and received. Raises ShardingError if a peer has failed, left, or sends another."""
        self._wait_for_works()
        for x, targets in self._packed:
            foreach_copy_(targets, unpack(x, targets))

    def _wait_for_works(self) -> None:
        if not self._headers and not self.works:
            return
        with Wait(self._describe_wait):
            if self._received:
                self._compare_headers()
            while self.works:
                self._wait_for(self.works[-1])
                self.works.pop()

    def _compare_headers(self) -> None:
        while self._headers:
            self._wait_for(self._headers[-1])
            self._headers.pop()  # a message must not be waited for twice
        received, self._received = {r: x.numpy().tobytes() for r, x in self._received.items()}, {}
        different = {r for r, header in received.items() if self.description.differs(header)}
        wrong = {r: counts_in(header) for r, header in received.items()
                 if self._counts and r not in different and counts_in(header) != self._counts[r][::-1]}  # fmt: skip
        if failed := {*different, *wrong}:  # the messages to and from these peers will never match
            self.works = [work for work in self.works if work.tag == HEADER_TAG or work.peer not in failed]
        if different:
            raise disagreement(self.description, {r: received.get(r) for r in sorted(self._entered)})
        for r, (sends, expects) in wrong.items():
            assert self._counts is not None
            (to, of), me = self._counts[r], self._peers.me
            raise counts_differ(me, r, to, expects) if to != expects else counts_differ(r, me, sends, of)

    def _wait_for(self, work: Work) -> None:
        self._awaited = work.peer
        call_distributed(work.work.wait, self._peers.connections.timeout)

    def _describe_wait(self) -> tuple[str, str]:
        """Return the words for a report of a long wait, which another thread writes."""
        rank, seconds = self._peers.ranks[self._awaited], self._peers.connections.timeout.total_seconds()
        return f"for rank {rank} in {self.description.text}", f"rank {rank} {SLOW}; the timeout is {seconds:.0f} s"

    def __del__(self) -> None:
        # After an error a transfer may be dropped before the wait. Its messages must still be received, or they block
        # all later ones on the connection: at the next start, because ranks delete objects at different times.
        if self.works or self._headers:
            self._peers.connections.abandoned.append(self)


def _messages(xs: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the tensors of each message, one large or all small ones; sizes are equal on all ranks."""
    large = [[i] for i, x in enumerate(xs) if x.nbytes >= _LARGE]
    small = [i for i, x in enumerate(xs) if 0 < x.nbytes < _LARGE]
    return [*large, small] if small else large


def pack_messages(xs: Sequence[Tensor], *, contiguous: bool = True) -> list[Tensor]:
    """Return the messages for some tensors: each large tensor itself, and the small ones end to end."""
    out = []
    for indices in _messages(xs):
        x = pack([xs[i] for i in indices])
        out.append(x.resolve_conj().resolve_neg().contiguous() if contiguous else x)
    return out


def unpack_messages(messages: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Undo `pack_messages`: views of the shapes of `like`."""
    out = [x.new_empty(x.shape) if x.nbytes == 0 else x for x in like]
    for indices, message in zip(_messages(like), messages, strict=True):
        for i, x in zip(indices, unpack(message, [like[i] for i in indices]), strict=True):
            out[i] = x
    return out
