"""A comm that reports the start and the end of each transfer, and of each wait for one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fshard._core.protocol import Axes, Comm, Dims, PendingTransfer, Series
from fshard._core.transfers import Split, Transfer, reduction, transfer


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


class TimedComm:
    """The same rank as `comm`, whose transfers are reported to `watch`."""

    def __init__(self, comm: Comm, watch: Watch) -> None:
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

    def with_all_texts(
        self, text: str, verb: str, device: torch.device, f: Callable[[Mapping[int, str]], None]
    ) -> None:  # fmt: skip
        number = self._watch.begin_transfer(None, [], [])
        self._comm.with_all_texts(text, verb, device, f)
        self._watch.end_transfer(number, [])

    def _block(self, op: str, x: Tensor, axes: Axes, run: Callable[[], Tensor], split: Split = ()) -> Tensor:
        number = self._watch.begin_transfer(transfer(self, op, [x], axes, split), [x], [])
        out = run()
        self._watch.end_transfer(number, [out])
        return out

    def _start(
        self, op: str, xs: Sequence[Tensor], axes: Axes, run: Callable[[], PendingTransfer], split: Split = (),
        into: Sequence[Tensor] = (),
    ) -> PendingTransfer:  # fmt: skip
        number = self._watch.begin_transfer(transfer(self, op, xs, axes, split), xs, into)
        pending = run()
        self._watch.end_start(number)

        def wait() -> list[Tensor]:
            self._watch.begin_wait(number)
            out = pending()
            self._watch.end_transfer(number, out)
            return out

        return wait

    def all_reduce(self, x: Tensor, op: str, axes: Axes) -> Tensor:
        return self._block(reduction(op), x, axes, lambda: self._comm.all_reduce(x, op, axes))

    def all_gather(self, x: Tensor, axes: Axes) -> Tensor:
        return self._block("all_gather", x, axes, lambda: self._comm.all_gather(x, axes))

    def reduce_scatter(self, x: Tensor, axes: Axes) -> Tensor:
        return self._block("reduce_scatter", x, axes, lambda: self._comm.reduce_scatter(x, axes))

    def all_to_all(self, x: Tensor, axes: Axes) -> Tensor:
        return self._block("all_to_all", x, axes, lambda: self._comm.all_to_all(x, axes))

    def all_to_all_rows(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int], axes: Axes, *, exchanged: bool
    ) -> Tensor:  # fmt: skip
        run = functools.partial(self._comm.all_to_all_rows, x, send, receive, axes, exchanged=exchanged)
        return self._block("all_to_all_rows", x, axes, run, send)

    def permute(self, x: Tensor, pairs: Sequence[tuple[int, int]], axes: Axes) -> Tensor:
        return self._block("permute", x, axes, lambda: self._comm.permute(x, pairs, axes), pairs)

    def gather(self, xs: Sequence[Tensor], into: Sequence[Tensor], dims: Dims, axes: Axes) -> PendingTransfer:
        return self._start("all_gather", xs, axes, lambda: self._comm.gather(xs, into, dims, axes), into=into)

    def scatter(self, xs: Sequence[Tensor], dims: Dims, axes: Axes) -> PendingTransfer:
        return self._start("reduce_scatter", xs, axes, lambda: self._comm.scatter(xs, dims, axes), dims)

    def reduce(self, xs: Sequence[Tensor], axes: Axes, *, fresh: bool = False) -> PendingTransfer:
        return self._start("all_reduce", xs, axes, lambda: self._comm.reduce(xs, axes, fresh=fresh))

    def send(
        self, xs: Sequence[Tensor], pairs: Sequence[tuple[int, int]], axes: Axes, series: Series | None = None
    ) -> PendingTransfer:  # fmt: skip
        return self._start("send", xs, axes, lambda: self._comm.send(xs, pairs, axes, series), pairs)
