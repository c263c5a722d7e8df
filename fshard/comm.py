"""What carries the bytes: one small protocol, and the thread-bound region in which it may be used.

`ProcessComm`, in `processes`, is one rank of `torch.distributed`; `SimulatedComm`, in `simulated`, a thread of this
process; `AbstractComm`, in `abstract`, moves nothing and knows the shapes. Nothing above `mesh` knows which it is.

Five verbs move one tensor of equal shape on every rank, and block. Three start a transfer of several tensors of one
dtype, whose parts may differ in size, and give a `Flight`. Dims and the dtypes of a tree are the business of
`collectives`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from . import source
from .errors import fail

Axes = tuple[str, ...]
Flight = Callable[[], list[Tensor]]  # a transfer under way: called, once, it waits and gives the results


class Comm(Protocol):
    """One rank's view of the mesh. `axes` are names of axes whose sizes multiply to more than one, major first."""

    sizes: Mapping[str, int]
    coords: Mapping[str, int]

    @property
    def direct(self) -> bool:
        """Whether a transfer can be started and landed: not where a compiler looks on."""

    def all_reduce(self, x: Tensor, op: str, axes: Axes) -> Tensor:
        """`op` ("sum", "max", "min") over the ranks: [*S] -> [*S]."""

    def all_gather(self, x: Tensor, axes: Axes) -> Tensor:
        """Everyone's tensor, in axis order: [*S] -> [n, *S]."""

    def reduce_scatter(self, x: Tensor, axes: Axes) -> Tensor:
        """The sum of everyone's part for me: [n, *S] -> [*S]."""

    def all_to_all(self, x: Tensor, axes: Axes) -> Tensor:
        """Row j goes to rank j; row i came from rank i: [n, *S] -> [n, *S]."""

    def permute(self, x: Tensor, pairs: Sequence[tuple[int, int]], axes: Axes) -> Tensor:
        """What the rank whose pair is (it, me) sent; zeros if none did: [*S] -> [*S]."""

    # Every rank starts the same transfers in the same order and lands them in the same order, which may be another.
    # Until it has landed, what a transfer was given must stay as it is.

    def gather(self, xs: Sequence[Tensor], into: Sequence[Sequence[Tensor]], axes: Axes) -> Flight:
        """Rank r's xs[i] lands in into[i][r], which may be a strided view. Gives nothing."""

    def scatter(self, xs: Sequence[Sequence[Tensor]], axes: Axes) -> Flight:
        """For each i the sum over the ranks of their xs[i][me], contiguous."""

    def reduce(self, xs: Sequence[Tensor], axes: Axes, *, fresh: bool = False) -> Flight:
        """The sums over the ranks: in place, in contiguous xs that are the caller's own; `fresh`, in new tensors."""


# --- the region -----------------------------------------------------------------------------------------------


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


# --- a record of what moved -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transfer:
    """One collective of one rank. `bytes` is the size of its argument there; `where` the line that called it.

    In the backward pass, that is the line of the forward collective whose transpose it is.
    """

    op: str
    axes: Axes
    dtype: torch.dtype
    bytes: int
    where: source.Site | None = None
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
        _bound.moved = moved() + 1
    if _record is not None:
        _record.append(transfer(op, xs, axes))


def moved() -> int:
    """How many transfers this rank has begun so far."""
    count: int = getattr(_bound, "moved", 0)
    return count


def transfer(op: str, xs: Sequence[Tensor], axes: Axes) -> Transfer:
    """What a collective of these tensors, of one dtype, would be written down as if it were called here."""
    origin: source.Site | None = getattr(_bound, "origin", None)
    where, phase = (origin, "backward") if origin else (source.site(), "forward")
    return Transfer(op, axes, xs[0].dtype, sum(x.numel() for x in xs) * xs[0].element_size(), where, phase)


def reduction(op: str) -> str:
    """What an all_reduce is written down as: the sum by its name alone."""
    return "all_reduce" if op == "sum" else f"all_reduce {op}"


def watched() -> bool:
    """Whether somebody asks where collectives are called: a record or a checker."""
    return _record is not None or checker() is not None


def checker() -> Any:
    """The checker of the region this thread is in; `None` outside, and where the call is not checked."""
    found: Region | None = getattr(_bound, "region", None)
    return None if found is None else found.checker


@contextlib.contextmanager
def transposing(origin: source.Site) -> Iterator[None]:
    """What moves in here is the transpose of the collective called at `origin`."""
    before = getattr(_bound, "origin", None)
    _bound.origin = origin
    try:
        yield
    finally:
        _bound.origin = before


# --- places and memory ---------------------------------------------------------------------------------------


def size_of(axes: Axes, sizes: Mapping[str, int]) -> int:
    """The number of ranks over the flattened `axes`."""
    n = 1
    for a in axes:
        n *= sizes[a]
    return n


def index_of(axes: Axes, sizes: Mapping[str, int], coords: Mapping[str, int]) -> int:
    """Position over the flattened `axes`, the first the most major."""
    at = 0
    for a in axes:
        at = at * sizes[a] + coords[a]
    return at


def storage_of(x: Tensor) -> int:
    """What tells one storage from another while both live, empty and fake ones too."""
    return int(x.untyped_storage()._cdata)


def memory_of(x: Tensor) -> int:
    """What two tensors have in common that share memory; empty ones share none."""
    storage = x.untyped_storage()
    return (storage.data_ptr() if storage.device.type != "meta" else 0) or storage_of(x)


@contextlib.contextmanager
def marked(xs: Sequence[Tensor]) -> Iterator[None]:
    """Within, these tensors say that they are donated: a compiler knows no storage, but it sees attributes."""
    for x in xs:
        x.donated = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for x in xs:
            del x.donated  # type: ignore[attr-defined]


__all__ = [
    "Axes", "Comm", "Flight", "Region", "Transfer", "bind", "checker", "in_region", "index_of", "marked", "memory_of",
    "moved", "note", "recording", "reduction", "region", "size_of", "storage_of", "transfer", "transposing", "watched",
]  # fmt: skip
