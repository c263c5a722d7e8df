"""A record of the transfers that ranks start: `recording`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fshard import _callsite

from .protocol import Axes
from .region import checker


@dataclass(frozen=True)
class Transfer:
    """One collective of one rank. `bytes` is the size of its argument on that rank; `where` the line that called it.

    In the backward pass, `where` is the line of the forward collective whose transpose it is.
    """

    op: str
    axes: Axes
    dtype: torch.dtype
    bytes: int
    where: _callsite.Site | None = None
    phase: str = "forward"


_record: list[Transfer] | None = None
_thread = threading.local()  # of a rank: see `transfer_count`, `transposing`, `stop_after_transfers`


@contextlib.contextmanager
def recording() -> Iterator[list[Transfer]]:
    """Collect every transfer of every rank this process runs.

    >>> with recording() as log: step(params, batch)
    >>> len(log)
    """
    global _record  # noqa: PLW0603 - one record for the ranks of all threads
    before, _record = _record, []
    try:
        yield _record
    finally:
        _record = before


def note(op: str, xs: Sequence[Tensor], axes: Axes) -> None:
    """Count a transfer, and add it to the record if there is one."""
    if not torch.compiler.is_dynamo_compiling():
        limit: tuple[int, type[BaseException]] | None = getattr(_thread, "limit", None)
        if limit is not None and transfer_count() == limit[0]:
            raise limit[1]
        _thread.count = transfer_count() + 1
    if _record is not None:
        _record.append(transfer(op, xs, axes))


def transfer_count() -> int:
    """Number of transfers that this rank has started."""
    count: int = getattr(_thread, "count", 0)
    return count


@contextlib.contextmanager
def stop_after_transfers(n: int, stop: type[BaseException]) -> Iterator[None]:
    """Let this rank start `n` transfers within, and raise `stop` before one more; a `stop` ends the block."""
    before = getattr(_thread, "limit", None)
    _thread.limit = transfer_count() + n, stop
    try:
        with contextlib.suppress(stop):
            yield
    finally:
        _thread.limit = before


def transfer(op: str, xs: Sequence[Tensor], axes: Axes) -> Transfer:
    """Return the record of a collective of these tensors, of one dtype, called at the current line."""
    phase = "backward" if getattr(_thread, "origin", None) else "forward"
    return Transfer(op, axes, xs[0].dtype, sum(x.numel() for x in xs) * xs[0].element_size(), call_site(), phase)


def call_site() -> _callsite.Site | None:
    """Return the line of the current collective; in a recorded backward pass, that of the forward collective."""
    return getattr(_thread, "origin", None) or _callsite.site()


def reduction(op: str) -> str:
    """Name of an all_reduce in records: the sum has no suffix."""
    return "all_reduce" if op == "sum" else f"all_reduce {op}"


def is_observed() -> bool:
    """Return whether a record or a checker needs the line of each collective."""
    return _record is not None or checker() is not None


@contextlib.contextmanager
def transposing(origin: _callsite.Site) -> Iterator[None]:
    """Record transfers within as the transpose of the collective called at `origin`."""
    before = getattr(_thread, "origin", None)
    _thread.origin = origin
    try:
        yield
    finally:
        _thread.origin = before
