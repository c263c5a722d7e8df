"""The inside of one `shard_map` call on one rank: the region, in which axis names are bound."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import ShardingError, fail
from fshard.spec import Axis, P, Size, format_axes, names_of

from . import callsite
from .protocol import Comm
from .torch import storage_id


class UncheckedError(ShardingError):
    """A call that needs the types of its arguments, without a checker."""


class UnevenSize(NamedTuple):
    """A size whose parts differ in length: the axes do not divide it, or it is lengths; `name` is `dim 0 of x`."""

    name: str
    size: Size
    axes: tuple[str, ...]


@dataclass
class Region:
    """The inside of one `shard_map` call, on one rank: axis names are bound here and nowhere else."""

    comm: Comm
    rank: int
    device: torch.device
    # axis -> the first size that it does not divide: gathers of unknown size over the axis exchange sizes first
    uneven: dict[str, UnevenSize] = field(default_factory=dict)
    # axes -> sizes of dims that they split, for an abstract mesh, where ranks cannot exchange them
    split_sizes: dict[tuple[str, ...], set[Size]] = field(default_factory=dict)
    donated: frozenset[int] = frozenset()  # `storage_key` of each tensor that the call may overwrite
    checker: Any = None  # the `Checker` of a call that is checked
    scratch: dict[Any, Any] = field(default_factory=dict)  # objects that a rank keeps from one call to the next
    host: torch.device = field(default=torch.device("cpu"))
    arguments: tuple[Sequence[Tensor], Sequence[P]] = ((), ())  # the tensors that the call keeps, with their specs
    branches_on: set[str] = field(default_factory=set)  # axes whose positions a dry run has asked for, as numbers

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.comm.sizes

    @property
    def coords(self) -> Mapping[str, int]:
        return self.comm.coords


_thread = threading.local()


def region(verb: str = "this") -> Region:
    """Return the region of this thread. Raises ShardingError, naming `verb`, outside `shard_map`."""
    current: Region | None = getattr(_thread, "region", None)
    if current is None:
        raise fail(f"{verb}: called outside shard_map, where no mesh axis is bound",
                   fix="call it inside a function wrapped by fs.shard_map(f, mesh=..., ...)")  # fmt: skip
    return current


def in_region() -> bool:
    """Return whether this thread is in a region."""
    return getattr(_thread, "region", None) is not None


def has_values() -> bool:
    """Return whether tensors have values here: everywhere but in a region of an abstract mesh, a dry run."""
    return not in_region() or region().comm.has_values


def is_scheduled() -> bool:
    """Return whether loops run, and memory is used, as on a device: not where only types are checked."""
    return not in_region() or region().comm.is_scheduled


def refuse_nesting() -> None:
    """Raise ShardingError inside a region."""
    if in_region():
        raise fail("shard_map inside shard_map: the axes are bound already", fix="call the inner function directly")


class bind:  # noqa: N801 - a context, which a generator would make three times as dear
    """Enter a region on this thread: of a mesh, which refuses nesting, or a dry one of the same rank."""

    def __init__(self, new: Region) -> None:
        self._new = new

    def __enter__(self) -> None:
        self._before = getattr(_thread, "region", None)
        _thread.region = self._new

    def __exit__(self, *_: object) -> None:
        _thread.region = self._before


@contextlib.contextmanager
def set_within(thread: threading.local, **values: Any) -> Iterator[None]:
    """Context in which these attributes of a thread have these values."""
    before = {name: getattr(thread, name, None) for name in values}
    thread.__dict__.update(values)
    try:
        yield
    finally:
        thread.__dict__.update(before)


def checker() -> Any:
    """Return the checker of this thread's region; `None` outside, and where the call is not checked."""
    current: Region | None = getattr(_thread, "region", None)
    return None if current is None else current.checker


def unchecked() -> contextlib.AbstractContextManager[None]:
    """Return a context in which the checker, if this call has one, ignores operations: the caller types the results."""
    types = checker()
    return contextlib.nullcontext() if types is None else types.paused()


def axes_of_own_values(x: Tensor) -> frozenset[str]:
    """Return the axes over which ranks have different values, not copies of one; none in calls without checks."""
    types = checker()
    if types is None:
        return frozenset()
    info = types.info(x)
    return frozenset(info.type.varying - info.history.copies - {g.axis for g in info.history.gathers})


def known_axes(verb: str, region: Region, axis: Axis) -> tuple[str, ...]:
    """Return the names of an axis argument. Raises ShardingError for a name that the mesh lacks, or a repeated one."""
    names = names_of(axis)
    for name in names:
        if name not in region.sizes:
            raise fail(f"{verb}: the mesh has no axis {name!r}", *user_line(), mesh=format_axes(region.sizes),
                       fix=f"use one of {list(region.sizes)}, or None")  # fmt: skip
    if len(set(names)) < len(names):
        raise fail(f"{verb}: an axis is named twice in {names}", fix="name each axis once")
    return names


def user_line() -> list[str]:
    """Return the line of the user's code, for an error; none while dynamo traces, which cannot read frames."""
    where = None if torch.compiler.is_dynamo_compiling() else callsite.site()
    return [f"at {where}"] if where else []


def live_axes(comm: Comm, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes of more than one rank."""
    return tuple(a for a in names if comm.sizes[a] > 1)


def live_axis(verb: str, axis: Axis) -> Axis:
    """Return an argument's axes of more than one rank; None if it has no such axis: nothing is split then."""
    if not names_of(axis):
        return None
    current = region(verb)
    return live_axes(current.comm, known_axes(verb, current, axis)) or None


def device_type(x: Tensor) -> str:
    """Return the type of the device that computes with a tensor: "cuda" where a plan for an accelerator looks on."""
    planned = in_region() and region().host.type == "meta" and x.device == region().device
    return "cuda" if planned else x.device.type


def storage_key(x: Tensor) -> int:
    """Return a number that is equal for tensors that share memory, and different for others and for empty tensors."""
    storage = x.untyped_storage()
    return (storage.data_ptr() if storage.device.type != "meta" else 0) or storage_id(x)


@contextlib.contextmanager
def mark_arguments(xs: Sequence[Any], specs: Sequence[P], donated: Sequence[int]) -> Iterator[None]:
    """Set attributes of arguments while a compiled program runs, which cannot compute a `storage_key`.

    `row_axes` are the axes that split dim 0; `donated` is set on the leaves at these positions.
    """
    rows = [(x, spec) for x, spec in zip(xs, specs, strict=True) if isinstance(x, Tensor) and x.ndim]
    for x, spec in rows:
        x.row_axes = names_of(spec.parts(x.ndim)[0])  # type: ignore[attr-defined]
    for i in donated:
        xs[i].donated = True
    try:
        yield
    finally:
        for x, _ in rows:
            vars(x).pop("row_axes", None)
        for i in donated:
            vars(xs[i]).pop("donated", None)
