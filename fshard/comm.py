"""What carries the bytes: one small protocol, and the thread-bound region in which it may be used.

`ProcessComm`, here, is one rank of `torch.distributed`; `SimulatedComm`, in `simulated`, a thread of this process;
`AbstractComm`, in `abstract`, moves nothing and knows the shapes. Nothing above `mesh` knows which it is. All parts
have equal shapes here: uneven sizes, dims and dtypes of a tree are the business of `collectives`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from . import source
from .errors import fail

Axes = tuple[str, ...]


class Comm(Protocol):
    """One rank's view of the mesh. `axes` are names of axes whose sizes multiply to more than one, major first."""

    sizes: Mapping[str, int]
    coords: Mapping[str, int]

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


def note(op: str, x: Tensor, axes: Axes) -> None:
    """Write a transfer down, where somebody is recording."""
    if _record is not None:
        _record.append(transfer(op, x, axes))


def transfer(op: str, x: Tensor, axes: Axes) -> Transfer:
    """What a collective called here would be written down as."""
    origin: source.Site | None = getattr(_bound, "origin", None)
    where, phase = (origin, "backward") if origin else (source.site(), "forward")
    return Transfer(op, axes, x.dtype, x.numel() * x.element_size(), where, phase)


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


# --- processes ------------------------------------------------------------------------------------------------


_WORDS = 160  # bytes in which a rank says what it is about to do: 32 of them a digest of the rest


class ProcessComm:
    """A rank of torch.distributed: functional collectives, so that `torch.compile(fullgraph=True)` sees them."""

    def __init__(self, sizes: Mapping[str, int], coords: Mapping[str, int]) -> None:
        self.sizes: Mapping[str, int] = dict(sizes)
        self.coords: Mapping[str, int] = dict(coords)
        self._axes = tuple(a for a, n in sizes.items() if n > 1)
        self._groups: dict[Axes, str] = {}
        # Every subset, in one order on every rank: a group made later, by some ranks only, would be a hang.
        for k in range(1, len(self._axes) + 1):
            for axes in itertools.combinations(self._axes, k):
                group = dist.group.WORLD
                if len(axes) < len(self._axes):
                    group = dist.new_group(self._members(axes), timeout=_patience(), use_local_synchronization=True)
                assert group is not None
                self._groups[axes] = group.group_name

    def _members(self, axes: Axes) -> list[int]:
        """The ranks that share my coordinates on every other axis, in order."""
        ranges = [range(n) if a in axes else [self.coords[a]] for a, n in self.sizes.items()]
        steps = [math.prod(list(self.sizes.values())[i + 1 :]) for i in range(len(self.sizes))]
        return [sum(c * s for c, s in zip(coords, steps, strict=True)) for coords in itertools.product(*ranges)]

    def _group(self, axes: Axes) -> tuple[str, int, list[int] | None]:
        """(group, size, order): `order` takes mesh order to the order of `axes`, where they differ."""
        axes = tuple(a for a in axes if self.sizes[a] > 1)
        sorted_axes = tuple(a for a in self._axes if a in axes)
        n = size_of(axes, self.sizes)
        order = None
        if axes != sorted_axes:
            grid = torch.arange(n).view([self.sizes[a] for a in sorted_axes])
            order = grid.permute([sorted_axes.index(a) for a in axes]).flatten().tolist()
        return self._groups[sorted_axes], n, order

    def agree(self, what: str, axes: Axes, device: torch.device) -> None:
        """Raise, on every rank, unless all of them are about to do the same. A rank that has left is waited for."""
        digest = hashlib.blake2b(what.encode(), digest_size=32).digest()
        words = digest + what.encode()[: _WORDS - 32].ljust(_WORDS - 32)
        mine = torch.tensor(list(words), dtype=torch.uint8, device=device)
        group, n, order = self._group(axes)
        rows = _wait(torch.ops._c10d_functional.all_gather_into_tensor, mine, n, group).view(n, _WORDS).tolist()
        if any(row != rows[0] for row in rows):
            told = [bytes(row[32:]).decode(errors="replace").rstrip() for row in rows]
            told = told if order is None else [told[i] for i in order]
            over = ", ".join(axes)
            raise fail("the ranks disagree on a collective", *[f"{over}={i}  {text}" for i, text in enumerate(told)],
                       fix="every rank must call the same collectives in the same order, on equal shapes")  # fmt: skip

    def all_reduce(self, x: Tensor, op: str, axes: Axes) -> Tensor:
        note(reduction(op), x, axes)
        return _wait(torch.ops._c10d_functional.all_reduce, x.contiguous(), op, self._group(axes)[0])

    def all_gather(self, x: Tensor, axes: Axes) -> Tensor:
        note("all_gather", x, axes)
        group, n, order = self._group(axes)
        flat = x.contiguous().view(-1)
        out = _wait(torch.ops._c10d_functional.all_gather_into_tensor, flat, n, group).view(n, *x.shape)
        return out if order is None else out[order]

    def reduce_scatter(self, x: Tensor, axes: Axes) -> Tensor:
        if x.device.type == "cpu":
            # Measured on gloo: exchange and sum takes 0.6 of its reduce_scatter's time, and sums in rank order.
            return self.all_to_all(x, axes).sum(0, dtype=x.dtype)
        note("reduce_scatter", x, axes)
        group, n, order = self._group(axes)
        x = x if order is None else x[_inverse(order)]
        out = _wait(torch.ops._c10d_functional.reduce_scatter_tensor, x.reshape(-1), "sum", n, group)
        return out.view(x.shape[1:])

    def all_to_all(self, x: Tensor, axes: Axes) -> Tensor:
        note("all_to_all", x, axes)
        if x.is_complex():
            return torch.view_as_complex(self.all_to_all(torch.view_as_real(x), axes))
        group, n, order = self._group(axes)
        x = x if order is None else x[_inverse(order)]
        each = [x[0].numel()] * n
        out = _wait(torch.ops._c10d_functional.all_to_all_single, x.reshape(-1), each, each, group).view(x.shape)
        return out if order is None else out[order]

    def permute(self, x: Tensor, pairs: Sequence[tuple[int, int]], axes: Axes) -> Tensor:
        note("permute", x, axes)
        if x.is_complex():
            return torch.view_as_complex(self.permute(torch.view_as_real(x), pairs, axes))
        group, n, order = self._group(axes)
        me = index_of(axes, self.sizes, self.coords)
        place = list(range(n)) if order is None else order
        send, receive = [0] * n, [0] * n
        for start, target in pairs:
            if start == me:
                send[place[target]] = x.numel()
            if target == me:
                receive[place[start]] = x.numel()
        flat = x.reshape(-1)[: sum(send)]
        out = _wait(torch.ops._c10d_functional.all_to_all_single, flat, receive, send, group)
        return out.view(x.shape) if sum(receive) == x.numel() else torch.zeros_like(x)


def _patience() -> Any:
    """The timeout the job was started with, which groups made later do not inherit."""
    world = dist.group.WORLD
    assert world is not None
    return world._get_backend(torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")).options._timeout


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=lambda i: order[i])


def _wait(op: Callable[..., Tensor], x: Tensor, *args: object) -> Tensor:
    if torch.compiler.is_dynamo_compiling():
        traced: Tensor = torch.ops._c10d_functional.wait_tensor(op(x, *args))
        return traced
    try:
        out: Tensor = torch.ops._c10d_functional.wait_tensor(op(x, *args))
        return out
    except RuntimeError as e:
        raise fail(f"rank {dist.get_rank()}: a collective broke off: another rank has failed, or left the program",
                   str(e).splitlines()[0], fix="see the first traceback of the other ranks") from e  # fmt: skip


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


__all__ = [
    "Axes", "Comm", "ProcessComm", "Region", "Transfer", "bind", "checker", "in_region", "index_of", "memory_of",
    "note", "recording", "reduction", "region", "size_of", "storage_of", "transfer", "transposing", "watched",
]  # fmt: skip
