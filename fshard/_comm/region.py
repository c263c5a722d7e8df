"""The inside of one `shard_map` call on one rank: the region, in which axis names are bound."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fshard.errors import fail
from fshard.spec import format_axes, names_of

from .protocol import Comm

Axis = str | tuple[str, ...] | None


@dataclass
class Region:
    """The inside of one `shard_map` call, on one rank: axis names are bound here and nowhere else."""

    comm: Comm
    rank: int
    device: torch.device
    uneven: bool = False  # something here does not divide: gathers of unknown size ask first
    donated: frozenset[int] = frozenset()  # storages the call may overwrite
    checker: Any = None  # the `vma.Checker` of a call that is checked
    scratch: dict[Any, Any] = field(default_factory=dict)  # what a rank keeps from one call to the next

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.comm.sizes

    @property
    def coords(self) -> Mapping[str, int]:
        return self.comm.coords


_bound = threading.local()


def region(verb: str = "this") -> Region:
    """The region this thread is in. Raises ShardingError, naming `verb`, outside `shard_map`."""
    found: Region | None = getattr(_bound, "region", None)
    if found is None:
        raise fail(f"{verb}: called outside shard_map, where no mesh axis is bound",
                   fix="call it inside a function wrapped by fs.shard_map(f, mesh=..., ...)")  # fmt: skip
    return found


def in_region() -> bool:
    return getattr(_bound, "region", None) is not None


def refuse_nesting() -> None:
    """Raise inside a region."""
    if in_region():
        raise fail("shard_map inside shard_map: the axes are bound already", fix="call the inner function directly")


@contextlib.contextmanager
def bind(new: Region) -> Iterator[None]:
    """Enter a region on this thread."""
    refuse_nesting()
    _bound.region = new
    try:
        yield
    finally:
        _bound.region = None


def checker() -> Any:
    """The checker of the region this thread is in; `None` outside, and where the call is not checked."""
    found: Region | None = getattr(_bound, "region", None)
    return None if found is None else found.checker


def known_axes(verb: str, where: Region, axis: Axis) -> tuple[str, ...]:
    """The names of an axis argument. Raises for one that the mesh lacks, or that is named twice."""
    names = names_of(axis)
    for name in names:
        if name not in where.sizes:
            raise fail(f"{verb}: the mesh has no axis {name!r}", fix=f"use one of {list(where.sizes)}, or None",
                       mesh=format_axes(where.sizes))  # fmt: skip
    if len(set(names)) < len(names):
        raise fail(f"{verb}: an axis is named twice in {names}", fix="name each axis once")
    return names


def live_axes(comm: Comm, names: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of more than one rank."""
    return tuple(a for a in names if comm.sizes[a] > 1)


__all__ = ["Axis", "Region", "bind", "checker", "in_region", "known_axes", "live_axes", "refuse_nesting", "region"]
