"""A rank of torch.distributed: messages between pairs of ranks on CPUs, functional collectives elsewhere."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fshard._torch_compat import backend_of, timeout_of
from fshard.errors import fail

from .functional import FunctionalGroup
from .gloo import GlooConnections
from .p2p import PeerGroup
from .protocol import Axes, PendingTransfer, index_of, ranks_over, size_of
from .record import note, reduction

_CALL_BYTES = 160  # of a rank's description of its call: a digest of 32 bytes, and the beginning of the text


class ProcessComm:
    """A rank of torch.distributed, in a process group with the others over each set of axes.

    On CPUs ranks exchange messages by a `PeerGroup`. On CUDA, and while dynamo traces, collectives are those of a
    `FunctionalGroup`: `torch.compile(fullgraph=True)` traces these, and keeps their order the same on every rank.
    """

    has_values = True

    def __init__(self, sizes: Mapping[str, int], coords: Mapping[str, int]) -> None:
        self.sizes: Mapping[str, int] = dict(sizes)
        self.coords: Mapping[str, int] = dict(coords)
        self._axes = tuple(a for a, n in sizes.items() if n > 1)
        self._group_names: dict[Axes, str] = {}
        self._connections: dict[Axes, GlooConnections] = {}
        self._peers: dict[Axes, PeerGroup] = {}
        # Every subset, in one order on every rank: a group made later, by some ranks only, would be a hang.
        for k in range(1, len(self._axes) + 1):
            for axes in itertools.combinations(self._axes, k):
                group = dist.group.WORLD
                if len(axes) < len(self._axes):
                    members = ranks_over(axes, self.sizes, self.coords)
                    group = dist.new_group(members, timeout=_timeout(), use_local_synchronization=True)
                assert group is not None
                self._group_names[axes] = group.group_name
                if (backend := _gloo_backend(group)) is not None:
                    members = ranks_over(axes, self.sizes, self.coords)
                    self._connections[axes] = GlooConnections(backend, group.rank(), group.size(), axes, members)

    def _group(self, axes: Axes, x: Tensor) -> PeerGroup | FunctionalGroup:
        """Return the ranks over the axes, which may be in any order, in the form that sends tensors of this device."""
        peers = self.direct and x.device.type == "cpu" and bool(self._connections)
        if peers and axes in self._peers:
            return self._peers[axes]
        axes = tuple(a for a in axes if self.sizes[a] > 1)
        sorted_axes = tuple(a for a in self._axes if a in axes)
        n, me = size_of(axes, self.sizes), index_of(axes, self.sizes, self.coords)
        order = None
        if axes != sorted_axes:  # dynamo traces this: no tensors
            order = ranks_over(axes, {a: self.sizes[a] for a in sorted_axes}, {})
        if not peers:
            return FunctionalGroup(self._group_names[sorted_axes], n, me, order)
        return self._peers.setdefault(axes, PeerGroup(self._connections[sorted_axes], order or range(n), me))

    @property
    def direct(self) -> bool:
        return not torch.compiler.is_dynamo_compiling()

    @property
    def static_sizes(self) -> bool:
        return torch.compiler.is_dynamo_compiling()

    def agree(self, what: str, axes: Axes, device: torch.device) -> None:
        """Compare digests of `what`. If a rank has left the program, the others wait until the timeout."""
        digest = hashlib.blake2b(what.encode(), digest_size=32).digest()
        call = digest + what.encode()[: _CALL_BYTES - 32].ljust(_CALL_BYTES - 32)
        mine = torch.tensor(list(call), dtype=torch.uint8, device=device)
        rows = self._group(axes, mine).all_gather(mine).tolist()
        if any(row != rows[0] for row in rows):
            calls = [bytes(row[32:]).decode(errors="replace").rstrip() for row in rows]
            over = ", ".join(axes)
            raise fail("the ranks disagree on a collective", *[f"{over}={i}  {text}" for i, text in enumerate(calls)],
                       fix="every rank must call the same collectives in the same order, on equal shapes")  # fmt: skip

    def all_reduce(self, x: Tensor, op: str, axes: Axes) -> Tensor:
        note(reduction(op), [x], axes)
        return self._group(axes, x).all_reduce(x, op)

    def all_gather(self, x: Tensor, axes: Axes) -> Tensor:
        note("all_gather", [x], axes)
        return self._group(axes, x).all_gather(x)

    def reduce_scatter(self, x: Tensor, axes: Axes) -> Tensor:
        note("reduce_scatter", [x], axes)
        return self._group(axes, x).reduce_scatter(x)

    def all_to_all(self, x: Tensor, axes: Axes) -> Tensor:
        note("all_to_all", [x], axes)
        return self._group(axes, x).all_to_all(x)

    def permute(self, x: Tensor, pairs: Sequence[tuple[int, int]], axes: Axes) -> Tensor:
        note("permute", [x], axes)
        return self._group(axes, x).permute(x, pairs)

    def gather(self, xs: Sequence[Tensor], into: Sequence[Sequence[Tensor]], axes: Axes) -> PendingTransfer:
        note("all_gather", xs, axes)
        return self._group(axes, xs[0]).gather(xs, into)

    def scatter(self, xs: Sequence[Sequence[Tensor]], axes: Axes) -> PendingTransfer:
        note("reduce_scatter", [x for row in xs for x in row], axes)
        return self._group(axes, xs[0][0]).scatter(xs)

    def reduce(self, xs: Sequence[Tensor], axes: Axes, *, fresh: bool = False) -> PendingTransfer:
        note("all_reduce", xs, axes)
        return self._group(axes, xs[0]).reduce(xs, fresh=fresh)


def _timeout() -> Any:
    """Timeout that the job was started with, which groups made later do not inherit."""
    assert dist.group.WORLD is not None
    return timeout_of(backend_of(dist.group.WORLD, "cuda" if dist.get_backend() == "nccl" else "cpu"))


def _gloo_backend(group: dist.ProcessGroup) -> Any:
    """Return the gloo backend of a group, or `None`; calls through the dispatcher would take twice as long."""
    try:
        backend = backend_of(group, "cpu")
    except RuntimeError:  # a group of nccl alone
        return None
    return backend if backend.name() == "gloo" else None
