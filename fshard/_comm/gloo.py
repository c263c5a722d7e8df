"""Messages between the ranks of a mesh, by the point-to-point send and receive of gloo.

A large contiguous tensor is sent without a copy, and the small ones of a transfer share one message to each rank.
Every transfer begins with a header of a fixed size from each rank to each other one, which describes it. The headers
of two ranks match in the order of their sends, so two ranks that start different transfers find out. The tag of the
other messages is computed from the description and a number, so messages of different transfers never match, and the
order of the waits may differ from that of the starts.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard._torch_compat import foreach_copy_

from .description import Description, disagreement, header_of
from .functional import call_distributed
from .packing import pack, unpack

_LARGE = 1 << 16  # bytes from which a message of its own costs less than two copies
HEADER_TAG = 1 << 20
_INLINE = 1 << 12  # bytes up to which a message follows the header in one message: a copy costs less than a message
_FIRST_TAG = 1 << 30
_NUMBERS = 1 << 13  # more than there are pending transfers


class Work(NamedTuple):
    """A message that is being sent to a rank or received from it, and the tensor that it reads or writes."""

    work: Any
    rank: int
    tensor: Tensor


@dataclass
class GlooConnections:
    """The connections of this rank to all others of the mesh, and their state from one transfer to the next."""

    backend: Any
    rank: int
    size: int
    timeout: datetime.timedelta
    started: list[int] = field(init=False)  # number of transfers with each rank
    abandoned: list[PendingMessages] = field(default_factory=list)  # dropped before they were waited for

    def __post_init__(self) -> None:
        self.started = [0] * self.size


class PendingMessages:
    """The messages of one transfer: `outgoing[r]` is being sent to rank r, and `incoming[r]` received from it.

    The sizes of `incoming[r]` are those that rank r sends. All `ranks` must start the same transfers with one another,
    in the same order. A transfer may have a second round of messages, which is a `PendingMessages` of its own:
    `second_round_of` is the first.

    Attributes: `description`; `headers` and then `works`: messages that are not known to have ended; it waits for the
    last of them.
    """

    def __init__(
        self, connections: GlooConnections, ranks: Sequence[int], description: Description,
        outgoing: Mapping[int, Sequence[Tensor]], incoming: Mapping[int, Sequence[Tensor]],
        second_round_of: PendingMessages | None = None,
    ) -> None:  # fmt: skip
        self.description = description
        self.works: list[Work] = []
        self._connections, self._ranks = connections, ranks
        self.headers: list[Work] = []  # to and from each rank: the first messages
        self._received: dict[int, Tensor] = {}  # the header from each rank
        self._packed: list[tuple[Tensor, list[Tensor]]] = []  # received buffers, and the tensors packed in each
        n, me = connections.size, connections.rank
        lists = {id(xs): pack_messages(xs) for xs in outgoing.values()}  # a list for several ranks is packed once
        if second_round_of is not None:
            self._tags: dict[int, int] = {r: tag + _NUMBERS for r, tag in second_round_of._tags.items()}
        else:
            while connections.abandoned:
                connections.abandoned.pop()._wait_for_works()
            lists = {key: self._with_header(messages) for key, messages in lists.items()}
            self._tags = {r: self._next_tag(r) for r in ranks if r != me}
        order = sorted(self._tags, key=lambda r: (r - me) % n)  # each rank starts with another peer
        first = second_round_of is None
        for r in reversed(order):
            self._receive(r, incoming.get(r, ()), first)
        for r in order:
            messages = lists[id(outgoing[r])] if r in outgoing else [description.message] * first
            self._send(r, messages, first)

    def _next_tag(self, rank: int) -> int:
        """Return the tag of the messages to and from a rank but the first ones; count the transfer."""
        number = self._connections.started[rank]
        self._connections.started[rank] += 1
        return _FIRST_TAG + (self.description.number << 14) + number % _NUMBERS

    def _with_header(self, messages: list[Tensor]) -> list[Tensor]:
        """Put a header before the messages: in the last one, if it is small, else in a message of its own."""
        header = self.description.message
        if not messages or messages[-1].nbytes > _INLINE:
            return [header, *messages]
        last = messages[-1].view(-1)
        return [torch.cat([header, last if last.dtype == header.dtype else last.view(header.dtype)]), *messages[:-1]]

    def _send(self, rank: int, messages: Sequence[Tensor], first: bool) -> None:
        send = self._connections.backend.send
        if first:
            header, *messages = messages
            self.headers.append(self._start(send, header, rank, HEADER_TAG))
        self.works += [self._start(send, x, rank, self._tags[rank]) for x in messages]

    def _receive(self, rank: int, xs: Sequence[Tensor], first: bool) -> None:
        groups, receive = [[xs[i] for i in indices] for indices in _messages(xs)], self._connections.backend.recv
        if first:  # of any size: that of a rank which is in another collective may be smaller or larger
            n, dtype = self.description.message.numel(), self.description.message.dtype
            header = torch.empty(n + _INLINE // dtype.itemsize, dtype=dtype, device="cpu")
            self.headers.append(self._start(receive, header, rank, HEADER_TAG))
            self._received[rank] = header
            if groups and sum([x.nbytes for x in groups[-1]]) <= _INLINE:
                targets = groups.pop()
                x = header[n : n + sum([x.numel() for x in targets])]
                self._packed.append((x if x.dtype == targets[0].dtype else x.view(targets[0].dtype), targets))
        for targets in groups:
            x = targets[0]
            if len(targets) > 1 or not x.is_contiguous():
                x = x.new_empty(sum(t.numel() for t in targets))
                self._packed.append((x, targets))
            self.works.append(self._start(receive, x, rank, self._tags[rank]))

    def _start(self, send_or_receive: Any, x: Tensor, rank: int, tag: int) -> Work:
        return Work(call_distributed(send_or_receive, [x], rank, tag), rank, x)

    def wait(self) -> None:
        """Wait until all is sent and received. Raises ShardingError if a rank has failed, left, or sends another."""
        self._wait_for_works()
        for x, targets in self._packed:
            foreach_copy_(targets, unpack(x, targets))

    def _wait_for_works(self) -> None:
        self._wait_for_each(self.headers)
        headers, self._received = {r: header_of(x) for r, x in self._received.items()}, {}
        different = {r for r, header in headers.items() if header != self.description.header}
        if different:
            self.works = [work for work in self.works if work.rank not in different]  # theirs will never match
            raise disagreement(self.description, [headers.get(r) for r in self._ranks])
        self._wait_for_each(self.works)

    def _wait_for_each(self, works: list[Work]) -> None:
        while works:
            call_distributed(works[-1].work.wait, self._connections.timeout)
            works.pop()  # a message must not be waited for twice

    def __del__(self) -> None:
        # After an error a transfer may be dropped before the wait. Its messages must still be received, or they block
        # all later ones on the connection: at the next start, because ranks delete objects at different times.
        if self.works or self.headers:
            self._connections.abandoned.append(self)


def _messages(xs: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the tensors of each message, large ones alone; the sizes decide, equal on all ranks."""
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
