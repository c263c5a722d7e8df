"""A rank of torch.distributed: messages between pairs of ranks on CPUs, functional collectives elsewhere."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fshard.errors import fail

from . import functional, p2p
from .board import boards
from .functional import Group
from .gloo import Line, Wires
from .protocol import Axes, PendingTransfer, index_of, size_of
from .record import note, reduction
from .visible import visible

_WORDS = 160  # bytes in which a rank says what it is about to do: 32 of them a digest of the rest


class ProcessComm:
    """A rank of torch.distributed, in a group with the others over each set of axes.

    On CPUs they exchange messages. Where dynamo looks on, and on CUDA, the functional collectives are taken, which
    `torch.compile(fullgraph=True)` sees, and keeps in their order: it keeps that of no operations of ours. On CPUs
    these find a `VisibleGroup`, and so the same messages.
    """

    has_values = True

    def __init__(self, sizes: Mapping[str, int], coords: Mapping[str, int]) -> None:
        self.sizes: Mapping[str, int] = dict(sizes)
        self.coords: Mapping[str, int] = dict(coords)
        self._axes = tuple(a for a, n in sizes.items() if n > 1)
        self._groups: dict[Axes, str] = {}
        self._wires: dict[Axes, Wires] = {}
        self._visible: dict[Axes, str] = {}  # a group on CPUs, as a compiler knows it
        self._lines: dict[Axes, Line] = {}
        # Every subset, in one order on every rank: a group made later, by some ranks only, would be a hang.
        for k in range(1, len(self._axes) + 1):
            for axes in itertools.combinations(self._axes, k):
                group = dist.group.WORLD
                if len(axes) < len(self._axes):
                    group = dist.new_group(self._members(axes), timeout=_patience(), use_local_synchronization=True)
                assert group is not None
                self._groups[axes] = group.group_name
                if (backend := _gloo(group)) is not None:
                    self._wires[axes] = wires = Wires(backend)
                    line = Line(wires, range(group.size()), index_of(axes, sizes, coords))
                    patience = _patience().total_seconds()
                    wires.board = boards(line.me, functools.partial(p2p.all_gather, line), patience)
                    self._visible[axes] = visible(self._members(axes), line)

    def _members(self, axes: Axes) -> list[int]:
        """The ranks that share my coordinates on every other axis, in order."""
        ranges = [range(n) if a in axes else [self.coords[a]] for a, n in self.sizes.items()]
        steps = [math.prod(list(self.sizes.values())[i + 1 :]) for i in range(len(self.sizes))]
        return [sum(c * s for c, s in zip(coords, steps, strict=True)) for coords in itertools.product(*ranges)]

    def _sorted(self, axes: Axes) -> Axes:
        return tuple(a for a in self._axes if a in axes)

    def _group(self, axes: Axes, x: Tensor) -> Group:
        axes = tuple(a for a in axes if self.sizes[a] > 1)
        sorted_axes = self._sorted(axes)
        n = size_of(axes, self.sizes)
        order = None
        if axes != sorted_axes:  # dynamo follows: no tensors
            places = itertools.product(*[range(self.sizes[a]) for a in axes])
            order = [index_of(sorted_axes, self.sizes, dict(zip(axes, at, strict=True))) for at in places]
        names = self._visible if x.device.type == "cpu" and self._visible else self._groups
        return Group(names[sorted_axes], n, index_of(axes, self.sizes, self.coords), order)

    def _line(self, axes: Axes, x: Tensor) -> Line | None:
        """The ranks over the axes, where they send to each other directly."""
        if torch.compiler.is_dynamo_compiling() or x.device.type != "cpu" or not self._wires:
            return None
        if axes not in self._lines:
            group = self._group(axes, x)
            self._lines[axes] = Line(self._wires[self._sorted(axes)], group.order or range(group.n), group.me)
        return self._lines[axes]

    @property
    def direct(self) -> bool:
        return not torch.compiler.is_dynamo_compiling()

    @property
    def static_sizes(self) -> bool:
        return torch.compiler.is_dynamo_compiling()

    def agree(self, what: str, axes: Axes, device: torch.device) -> None:
        """Raise, on every rank, unless all of them are about to do the same. A rank that has left is waited for."""
        digest = hashlib.blake2b(what.encode(), digest_size=32).digest()
        words = digest + what.encode()[: _WORDS - 32].ljust(_WORDS - 32)
        mine = torch.tensor(list(words), dtype=torch.uint8, device=device)
        rows = self._gathered(mine, axes).tolist()
        if any(row != rows[0] for row in rows):
            told = [bytes(row[32:]).decode(errors="replace").rstrip() for row in rows]
            over = ", ".join(axes)
            raise fail("the ranks disagree on a collective", *[f"{over}={i}  {text}" for i, text in enumerate(told)],
                       fix="every rank must call the same collectives in the same order, on equal shapes")  # fmt: skip

    def all_reduce(self, x: Tensor, op: str, axes: Axes) -> Tensor:
        note(reduction(op), [x], axes)
        line = self._line(axes, x)
        return functional.all_reduce(self._group(axes, x), x, op) if line is None else p2p.all_reduce(line, x, op)

    def all_gather(self, x: Tensor, axes: Axes) -> Tensor:
        note("all_gather", [x], axes)
        return self._gathered(x, axes)

    def _gathered(self, x: Tensor, axes: Axes) -> Tensor:
        line = self._line(axes, x)
        return functional.all_gather(self._group(axes, x), x) if line is None else p2p.all_gather(line, x)

    def reduce_scatter(self, x: Tensor, axes: Axes) -> Tensor:
        note("reduce_scatter", [x], axes)
        line = self._line(axes, x)
        return functional.reduce_scatter(self._group(axes, x), x) if line is None else p2p.reduce_scatter(line, x)

    def all_to_all(self, x: Tensor, axes: Axes) -> Tensor:
        note("all_to_all", [x], axes)
        line = self._line(axes, x)
        return functional.all_to_all(self._group(axes, x), x) if line is None else p2p.all_to_all(line, x)

    def permute(self, x: Tensor, pairs_: Sequence[tuple[int, int]], axes: Axes) -> Tensor:
        note("permute", [x], axes)
        line = self._line(axes, x)
        return functional.permute(self._group(axes, x), x, pairs_) if line is None else p2p.permute(line, x, pairs_)

    def gather(self, xs: Sequence[Tensor], into: Sequence[Sequence[Tensor]], axes: Axes) -> PendingTransfer:
        note("all_gather", xs, axes)
        line = self._line(axes, xs[0])
        return functional.gather(self._group(axes, xs[0]), xs, into) if line is None else p2p.gather(line, xs, into)

    def scatter(self, xs: Sequence[Sequence[Tensor]], axes: Axes) -> PendingTransfer:
        note("reduce_scatter", [x for row in xs for x in row], axes)
        line = self._line(axes, xs[0][0])
        return functional.scatter(self._group(axes, xs[0][0]), xs) if line is None else p2p.scatter(line, xs)

    def reduce(self, xs: Sequence[Tensor], axes: Axes, *, fresh: bool = False) -> PendingTransfer:
        note("all_reduce", xs, axes)
        if (line := self._line(axes, xs[0])) is None:
            return functional.reduce(self._group(axes, xs[0]), xs, fresh)
        return p2p.reduce(line, xs, fresh=fresh)


def _patience() -> Any:
    """The timeout the job was started with, which groups made later do not inherit."""
    world = dist.group.WORLD
    assert world is not None
    return world._get_backend(torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")).options._timeout


def _gloo(group: dist.ProcessGroup) -> Any:
    """What sends and receives, if that is gloo: below the dispatcher, in whose sight it would cost as much again."""
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # a group of nccl alone
        return None
    return backend if backend.name() == "gloo" else None


__all__ = ["ProcessComm"]
