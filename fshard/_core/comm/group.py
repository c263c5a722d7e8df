"""The base of all comms, which records each transfer and lets a group of ranks run it; and a comm that reports each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fshard._core.protocol import Axes, Comm, Dims, PendingTransfer, Series
from fshard._core.transfers import Split, Transfer, note, reduction, transfer

Pairs = Sequence[tuple[int, int]]  # of positions on the axes: source and target
TakeTexts = Callable[[Mapping[int, str]], None]  # takes the text of each rank


class GroupComm:
    """A comm whose verbs are verbs of groups, which take no axes: each goes through `_block`, or `_start`."""

    sizes: Mapping[str, int]
    coords: Mapping[str, int]
    has_values = True
    is_scheduled = True

    _group: Callable[[Axes, torch.device], Any]  # the ranks over the axes, in the form that moves tensors of a device
    _note = note

    def agree(self, what: str, axes: Axes, device: torch.device) -> None:
        """Compare nothing: there is one rank, or every exchange compares what its ranks call."""

    def _block(self, verb: str, x: Tensor, axes: Axes, *args: Any, op: str = "", split: Split = ()) -> Tensor:
        """Record a transfer as `op`, by default its verb, and run it."""
        self._note(op or verb, [x], axes, split)
        out: Tensor = getattr(self._group(axes, x.device), verb)(x, *args)
        return out

    def _start(
        self, verb: str, xs: Sequence[Tensor], axes: Axes, *args: Any, op: str, split: Split = (),
        into: Sequence[Tensor] = (),
    ) -> PendingTransfer:  # fmt: skip
        """Record a transfer as `op`, and start it. A gather writes `into` these tensors."""
        self._note(op, xs, axes, split)
        out: PendingTransfer = getattr(self._group(axes, xs[0].device), verb)(xs, *args)
        return out

    def all_reduce(self, x: Tensor, op: str, axes: Axes) -> Tensor:
        return self._block("all_reduce", x, axes, op, op=reduction(op))

    def all_gather(self, x: Tensor, axes: Axes) -> Tensor:
        return self._block("all_gather", x, axes)

    def reduce_scatter(self, x: Tensor, axes: Axes) -> Tensor:
        return self._block("reduce_scatter", x, axes)

    def all_to_all(self, x: Tensor, axes: Axes) -> Tensor:
        return self._block("all_to_all", x, axes)

    def all_to_all_rows(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int], axes: Axes, *, exchanged: bool
    ) -> Tensor:  # fmt: skip
        return self._block("all_to_all_rows", x, axes, send, receive, exchanged, split=send)

    def permute(self, x: Tensor, pairs: Pairs, axes: Axes) -> Tensor:
        return self._block("permute", x, axes, pairs, split=pairs)

    def gather(self, xs: Sequence[Tensor], into: Sequence[Tensor], dims: Dims, axes: Axes) -> PendingTransfer:
        return self._start("gather", xs, axes, into, dims, op="all_gather", into=into)

    def scatter(self, xs: Sequence[Tensor], dims: Dims, axes: Axes) -> PendingTransfer:
        return self._start("scatter", xs, axes, dims, op="reduce_scatter", split=dims)

    def reduce(self, xs: Sequence[Tensor], axes: Axes, *, fresh: bool = False) -> PendingTransfer:
        return self._start("reduce", xs, axes, fresh, op="all_reduce")

    def send(self, xs: Sequence[Tensor], pairs: Pairs, axes: Axes, series: Series | None = None) -> PendingTransfer:
        return self._start("send", xs, axes, pairs, series, op="send", split=pairs)


class Watch(Protocol):
    """Receives reports, on the thread of the rank. Operations between two reports of one transfer are part of it."""

    def begin_transfer(self, transfer: Transfer | None, xs: Sequence[Tensor], into: Sequence[Tensor]) -> int:
        """Report the start of a transfer of `xs`, None for one of texts; return a number for it.

        Of a gather, `into` are the tensors that it writes.
        """

    def end_start(self, number: int) -> None:
        """Report that a pending transfer has started: the rank goes on with other work."""

    def begin_wait(self, number: int) -> None:
        """Report that the rank waits for a pending transfer."""

    def end_transfer(self, number: int, results: Sequence[Tensor]) -> None:
        """Report that a transfer has ended, by its wait or, without one, by the return of its verb."""


class TimedComm(GroupComm):
    """The same rank as `comm`, whose transfers are reported to `watch`."""

    def __init__(self, comm: Comm, watch: Watch) -> None:
        assert isinstance(comm, GroupComm)
        self._comm, self._watch = comm, watch
        self.sizes: Mapping[str, int] = comm.sizes
        self.coords: Mapping[str, int] = comm.coords
        self.has_values, self.is_scheduled = comm.has_values, comm.is_scheduled

    @property
    def direct(self) -> bool:
        return self._comm.direct

    @property
    def static_sizes(self) -> bool:
        return self._comm.static_sizes

    def agree(self, what: str, axes: Axes, device: torch.device) -> None:
        self._comm.agree(what, axes, device)

    def with_all_texts(self, text: str, verb: str, device: torch.device, f: TakeTexts) -> None:
        number = self._watch.begin_transfer(None, [], [])
        self._comm.with_all_texts(text, verb, device, f)
        self._watch.end_transfer(number, [])

    def _block(self, verb: str, x: Tensor, axes: Axes, *args: Any, op: str = "", split: Split = ()) -> Tensor:
        number = self._watch.begin_transfer(transfer(self, op or verb, [x], axes, split), [x], [])
        out = self._comm._block(verb, x, axes, *args, op=op, split=split)
        self._watch.end_transfer(number, [out])
        return out

    def _start(
        self, verb: str, xs: Sequence[Tensor], axes: Axes, *args: Any, op: str, split: Split = (),
        into: Sequence[Tensor] = (),
    ) -> PendingTransfer:  # fmt: skip
        number = self._watch.begin_transfer(transfer(self, op, xs, axes, split), xs, into)
        pending = self._comm._start(verb, xs, axes, *args, op=op, split=split)
        self._watch.end_start(number)

        def wait() -> list[Tensor]:
            self._watch.begin_wait(number)
            out = pending()
            self._watch.end_transfer(number, out)
            return out

        return wait
