"""A rank of a mesh that does not exist: the transfers of a real one, on tensors without values, and without messages.

A group works as in a real mesh: by pairs of ranks on CPUs, and by collectives of torch elsewhere. So the packing of a
transfer, its buffers and their lifetimes need no second description.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard._core.protocol import Axes, PendingTransfer, Place, Series, index_of, size_of
from fshard._core.torch import FakeTensorMode, functional_collectives, without_modes
from fshard._core.transfers import Split, Transfer, transfer

from .description import Description
from .functional import FunctionalGroup
from .gloo import PendingMessages, Work
from .group import GroupComm, Pairs, TakeTexts
from .p2p import PeerGroup

_MOST_PEERS = 16  # ranks up to which messages between pairs are planned one by one; of more, collectives


class AbstractComm(GroupComm):
    """One rank of a mesh of any size. Each transfer is added to `transfers`.

    With `is_scheduled` it runs the loops and makes the buffers of a real rank, for a plan; else only types are checked.
    `peers`: messages between pairs of ranks, as on CPUs; else collectives of torch.
    """

    has_values = False
    direct = True
    static_sizes = True

    def __init__(
        self, sizes: Mapping[str, int], coords: Mapping[str, int], transfers: list[Transfer] | None, *,
        is_scheduled: bool = False, peers: bool = False,
    ) -> None:  # fmt: skip
        self.sizes: Mapping[str, int] = dict(sizes)
        self.coords: Mapping[str, int] = dict(coords)
        self.is_scheduled = is_scheduled
        self._transfers, self._peers = transfers, peers

    def _group(self, axes: Axes, device: torch.device) -> PeerGroup | FunctionalGroup:
        sizes, me = [self.sizes[a] for a in axes], index_of(axes, self.sizes, self.coords)
        n = size_of(axes, self.sizes)
        if self._peers and n <= _MOST_PEERS:
            return _UnsentPeers(None, range(n), me, axes, sizes)  # type: ignore[arg-type]
        order = sorted(range(len(axes)), key=lambda i: list(self.sizes).index(axes[i]))
        return _UnsentCollectives("", sizes, me, order)

    def _note(self, op: str, xs: Sequence[Tensor], axes: Axes, split: Split = ()) -> None:
        if self._transfers is not None:  # else it records nothing
            self._transfers.append(transfer(self, op, xs, axes, split))
            super()._note(op, xs, axes, split)

    def with_all_texts(self, text: str, verb: str, device: torch.device, f: TakeTexts) -> None:
        if not self.is_scheduled:  # a plan runs the program several times, and prints nothing
            f({index_of(tuple(self.sizes), self.sizes, self.coords): text})


def silent_comm(place: Place) -> AbstractComm:
    """Return a comm for a part of a program that one rank runs for its shapes and types, without the others."""
    return AbstractComm(place.sizes, place.coords, None)


class _UnsentMessages(PendingMessages):
    """Messages whose buffers exist until the wait, and that are not sent."""

    def _exchange_headers(self, compared: bool) -> dict[int, int]:
        return dict.fromkeys(self._entered, 0)

    def _start(self, verb: str, x: Tensor, r: int, tag: int) -> Work:
        return Work(None, r, x, tag)

    def _wait_for_works(self) -> None:
        self.works.clear()

    def __del__(self) -> None:
        pass  # a transfer that is dropped before the wait has nothing to receive


class _UnsentPeers(PeerGroup):
    """Pairs of ranks that exchange no messages."""

    messages = _UnsentMessages

    def _describe(self, op: str, xs: Sequence[Tensor], details: Sequence[Any] = ()) -> Description:
        return None  # type: ignore[return-value]


class _UnsentCollectives(FunctionalGroup):
    """Collectives of torch that return the shapes of their results."""

    def _start(self, op: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
        ops = functional_collectives
        if op is ops.all_gather_into_tensor:
            return x.new_empty(x.shape[0] * self.n)
        if op is ops.reduce_scatter_tensor:
            return x.new_empty(x.shape[0] // self.n)
        if op is ops.all_to_all_single:
            return x.new_empty(sum(args[0]))
        return x.new_empty(x.shape)

    def _wait(self, started: Tensor) -> Tensor:
        return started

    def _compare_counts(self, device: torch.device, send: Sequence[int], receive: Sequence[int]) -> None:
        """Compare nothing: the other ranks' counts are not here."""

    def send(self, xs: Sequence[Tensor], pairs: Pairs, series: Series | None) -> PendingTransfer:
        out = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs]
        return lambda: out


def fake_tensors() -> FakeTensorMode:
    """Return a context in which new tensors have shapes and no values; operations may mix them with real tensors."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def run_on_meta(run: Callable[[Sequence[Tensor]], Sequence[Tensor]], xs: Sequence[Tensor]) -> list[Tensor]:
    """Return fake tensors of the shapes of `run(xs)`; it runs on meta tensors, ten times faster than on fake ones."""
    with without_modes():
        out = run([torch.empty(x.shape, dtype=x.dtype, device="meta") for x in xs])
    return [x.new_empty(y.shape, dtype=y.dtype) for x, y in zip(xs, out, strict=True)]
