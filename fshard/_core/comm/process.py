"""A rank of torch.distributed: messages between pairs of ranks on CPUs, functional collectives elsewhere."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from fshard._core.packing import pad
from fshard._core.protocol import Axes, index_of, ranks_over
from fshard._core.torch import assume_constant_result, backend_of, timeout_of
from fshard._core.transfers import call_site

from .description import Description, disagreement
from .functional import FunctionalGroup, call_distributed
from .gloo import GlooConnections
from .group import GroupComm, TakeTexts
from .p2p import PeerGroup


class ProcessComm(GroupComm):
    """A rank of torch.distributed, whose rank in the mesh is its rank in torch.distributed's group of all, WORLD.

    On CPUs a `PeerGroup` over each set of axes exchanges messages on the connections of WORLD. On CUDA, and while
    dynamo traces, a `FunctionalGroup` runs them: `torch.compile(fullgraph=True)` traces its operations, and keeps
    their order the same on every rank. It has a process group, made at the first collective over its axes.
    """

    def __init__(
        self, sizes: Mapping[str, int], coords: Mapping[str, int], timeout: datetime.timedelta | None = None
    ) -> None:  # fmt: skip
        self.sizes: Mapping[str, int] = dict(sizes)
        self.coords: Mapping[str, int] = dict(coords)
        self._axes = tuple(a for a, n in sizes.items() if n > 1)
        self._connections: GlooConnections | None = None
        self._peers: dict[Axes, PeerGroup] = {}
        if self._axes:
            world = dist.group.WORLD
            assert world is not None
            # Groups made later do not inherit the timeout that the job was started with.
            timeout = timeout or timeout_of(backend_of(world, "cuda" if dist.get_backend() == "nccl" else "cpu"))
            self._world_name = world.group_name
            self._group_name = _process_groups(timeout)
            self._grid = (id(world), *((axis, sizes[axis], coords[axis]) for axis in self._axes))
            if (backend := _gloo_backend(world)) is not None:
                self._connections = GlooConnections(backend, world.size(), timeout)

    def _group(self, axes: Axes, device: torch.device) -> PeerGroup | FunctionalGroup:
        if self._connections is not None and self.direct and device.type == "cpu":
            if axes not in self._peers:
                ranks, me = ranks_over(axes, self.sizes, self.coords), index_of(axes, self.sizes, self.coords)
                self._peers[axes] = PeerGroup(self._connections, ranks, me, axes, [self.sizes[a] for a in axes])
            return self._peers[axes]
        # Dynamo traces this, and each transfer on CUDA runs it: no tensors, and no list of ranks.
        axes = tuple(a for a in axes if self.sizes[a] > 1)
        sizes, me = [self.sizes[a] for a in axes], index_of(axes, self.sizes, self.coords)
        group_axes = tuple(a for a in self._axes if a in axes)
        name = self._world_name if group_axes == self._axes else self._group_name(group_axes, self._grid)
        return FunctionalGroup(name, sizes, me, [axes.index(a) for a in group_axes])

    @property
    def direct(self) -> bool:
        return not torch.compiler.is_dynamo_compiling()

    @property
    def static_sizes(self) -> bool:
        return torch.compiler.is_dynamo_compiling()

    def agree(self, what: str, axes: Axes, device: torch.device) -> None:
        """Compare digests of `what`. If a rank has left the program, the others wait until the timeout."""
        mine = Description.make(axes, what, where=call_site())
        message = mine.message.to(device)
        group = self._group(axes, device)
        if isinstance(group, PeerGroup):
            group.agree(mine)
            return
        headers = [bytes(row) for row in group.all_gather(message).tolist()]
        if any(map(mine.differs, headers)):
            me = index_of(axes, self.sizes, self.coords)
            raise disagreement(mine, {i: None if i == me else header for i, header in enumerate(headers)})

    def with_all_texts(self, text: str, verb: str, device: torch.device, f: TakeTexts) -> None:
        mine = torch.frombuffer(bytearray(f"{text}\n".encode()), dtype=torch.uint8).to(device)
        texts = [mine]
        if self._axes:
            self.agree(verb, self._axes, device)
            group = self._group(self._axes, device)
            lengths = group.all_gather(torch.tensor(len(mine), device=device)).tolist()
            rows = group.all_gather(pad(mine, 0, max(lengths)))
            texts = [row[:n] for row, n in zip(rows, lengths, strict=True)]
        if all(at == 0 for at in self.coords.values()):
            f({rank: bytes(row.tolist()).decode()[:-1] for rank, row in enumerate(texts)})


def _process_groups(timeout: datetime.timedelta) -> Callable[[Axes, tuple[Any, ...]], str]:
    """Return a function of axes and a grid that returns the name of a process group, made at the first call.

    All ranks over these axes must call it. With nccl all ranks of the mesh must, each for its group over these axes:
    torch splits the communicator of all ranks.
    """
    names: dict[Axes, str] = {}

    # Dynamo cannot trace the making of a group. It guards only on arguments: the grid is one, since another mesh whose
    # grid is equal may use the same compiled program.
    @assume_constant_result
    def group_name(axes: Axes, grid: tuple[Any, ...]) -> str:
        if axes not in names:
            sizes, coords = ({axis: place[i] for axis, *place in grid[1:]} for i in (0, 1))
            new_group = functools.partial(dist.new_group, timeout=timeout, use_local_synchronization=True)
            names[axes] = call_distributed(new_group, ranks_over(axes, sizes, coords)).group_name
        return names[axes]

    return group_name


def _gloo_backend(group: dist.ProcessGroup) -> Any:
    """Return the gloo backend of a group, or `None`; calls through the dispatcher would take twice as long."""
    try:
        backend = backend_of(group, "cpu")
    except RuntimeError:  # a group of nccl only
        return None
    return backend if backend.name() == "gloo" else None
