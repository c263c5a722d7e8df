"""A record of the transfers that ranks begin: `recording`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fshard import _callsite

from .protocol import Axes
from .region import _bound, checker


@dataclass(frozen=True)
class Transfer:
    """One collective of one rank. `bytes` is the size of its argument there; `where` the line that called it.

    In the backward pass, that is the line of the forward collective whose transpose it is.
    """

    op: str
    axes: Axes
    dtype: torch.dtype
    bytes: int
    where: _callsite.Site | None = None
    phase: str = "forward"


_record: list[Transfer] | None = None


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
    """Count a transfer, and write it down where somebody is recording."""
    if not torch.compiler.is_dynamo_compiling():
        _bound.moved = transfer_count() + 1
    if _record is not None:
        _record.append(transfer(op, xs, axes))


def transfer_count() -> int:
    """How many transfers this rank has begun so far."""
    count: int = getattr(_bound, "moved", 0)
    return count


def transfer(op: str, xs: Sequence[Tensor], axes: Axes) -> Transfer:
    """What a collective of these tensors, of one dtype, would be written down as if it were called here."""
    origin: _callsite.Site | None = getattr(_bound, "origin", None)
    where, phase = (origin, "backward") if origin else (_callsite.site(), "forward")
    return Transfer(op, axes, xs[0].dtype, sum(x.numel() for x in xs) * xs[0].element_size(), where, phase)


def reduction(op: str) -> str:
    """What an all_reduce is written down as: the sum by its name alone."""
    return "all_reduce" if op == "sum" else f"all_reduce {op}"


def is_observed() -> bool:
    """Whether somebody asks where collectives are called: a record or a checker."""
    return _record is not None or checker() is not None


@contextlib.contextmanager
def transposing(origin: _callsite.Site) -> Iterator[None]:
    """What moves in here is the transpose of the collective called at `origin`."""
    before = getattr(_bound, "origin", None)
    _bound.origin = origin
    try:
        yield
    finally:
        _bound.origin = before


__all__ = ["Transfer", "is_observed", "note", "recording", "reduction", "transfer", "transfer_count", "transposing"]
