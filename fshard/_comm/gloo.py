"""Messages between the ranks of a process group, by the point-to-point send and receive of gloo.

A large contiguous tensor is sent without a copy, and the small ones of a transfer share one message to each rank.
Messages match by tag, and each transfer has a tag of its own, so the order of the waits may differ from that of the
starts.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from fshard._torch_compat import foreach_copy_, timeout_of

from .functional import call_distributed
from .packing import pack, unpack
from .protocol import Axes
from .record import latest_op
from .watchdog import SLOW, Wait

_LARGE = 1 << 16  # bytes from which a message of its own costs less than two copies
_TAGS = range(1 << 20, (1 << 20) + 4096)  # more than there are pending transfers


@dataclass(eq=False)
class GlooConnections:
    """The connections of this rank of a process group, and their state from one transfer to the next."""

    existing: ClassVar[weakref.WeakSet[GlooConnections]] = weakref.WeakSet()

    backend: Any
    rank: int
    size: int
    axes: Axes = ()
    global_ranks: Sequence[int] = ()  # of the ranks of the group
    sequence_numbers: Iterator[int] = field(default_factory=itertools.count)  # of the transfers
    abandoned: list[PendingMessages] = field(default_factory=list)  # dropped before they were waited for

    def __post_init__(self) -> None:
        self.existing.add(self)

    @classmethod
    def close_all(cls) -> None:
        """Close the sockets of this process at its end. Gloo does so only when nothing refers to a backend."""
        for connections in list(cls.existing):
            connections.backend = None
            connections.abandoned.clear()


class PendingMessages:
    """The messages of one transfer: `outgoing[r]` is being sent to rank r, and `incoming[r]` received from it.

    The sizes of `incoming[r]` are those that rank r sends. Every rank numbers its transfers in the same order.
    """

    def __init__(
        self, connections: GlooConnections, outgoing: Mapping[int, Sequence[Tensor]],
        incoming: Mapping[int, Sequence[Tensor]], sequence_number: int | None = None,
    ) -> None:  # fmt: skip
        self._connections = connections
        self._op = latest_op() if sequence_number is None else "all_reduce"  # which has a second round of messages
        if sequence_number is None:
            sequence_number = next(connections.sequence_numbers)
        self._tag = _TAGS[sequence_number % len(_TAGS)]  # messages of one tag arrive in the order they were sent
        self._works: list[tuple[Any, Tensor, int]] = []  # with the tensor that each reads or writes, and the other rank
        self._packed: list[tuple[Tensor, list[Tensor]]] = []  # received buffers, and the tensors packed in each
        while connections.abandoned:
            connections.abandoned.pop()._wait_for_works()
        n, me = connections.size, connections.rank
        for r in sorted(incoming, key=lambda r: (me - r) % n):  # each rank starts with another peer
            self._receive(r, incoming[r])
        messages: dict[int, list[Tensor]] = {}  # a list for several ranks is packed once
        for r in sorted(outgoing, key=lambda r: (r - me) % n):
            xs = outgoing[r]
            if id(xs) not in messages:
                messages[id(xs)] = pack_messages(xs)
            for x in messages[id(xs)]:
                self._start(connections.backend.send, x, r)

    def _receive(self, rank: int, xs: Sequence[Tensor]) -> None:
        for indices in _messages(xs):
            targets = [xs[i] for i in indices]
            x = targets[0]
            if len(targets) > 1 or not x.is_contiguous():
                x = x.new_empty(sum(t.numel() for t in targets))
                self._packed.append((x, targets))
            self._start(self._connections.backend.recv, x, rank)

    def _start(self, send_or_receive: Any, x: Tensor, rank: int) -> None:
        self._works.append((call_distributed(send_or_receive, [x], rank, self._tag), x, rank))

    def wait(self) -> None:
        """Wait until all is sent and received. Raises ShardingError if a rank has failed or left."""
        self._wait_for_works()
        for x, targets in self._packed:
            foreach_copy_(targets, unpack(x, targets))

    def _wait_for_works(self) -> None:
        if not self._works:
            return
        with Wait(self._describe_wait):
            while self._works:
                call_distributed(self._works[-1][0].wait)
                self._works.pop()

    def _describe_wait(self) -> tuple[str, str]:
        """Return the words for a report of a long wait, which another thread writes."""
        works = self._works[:]
        if not works:
            return "for other ranks", "all messages have arrived"
        rank = self._connections.global_ranks[works[-1][2]]
        size = sum(x.nbytes for _, x, _ in works)
        seconds = timeout_of(self._connections.backend).total_seconds()
        dtype = str(works[0][1].dtype).removeprefix("torch.")
        over = ", ".join(self._connections.axes)
        waited = f"for rank {rank} in {self._op} over {over} ({dtype}, {size:,} bytes pending)"
        return waited, f"rank {rank} {SLOW}; the timeout is {seconds:.0f} s"

    def __del__(self) -> None:
        # After an error a transfer may be dropped before the wait. Its messages must still be received, or they block
        # all later ones on the connection: at the next start, because ranks delete objects at different times.
        if self._works:
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
