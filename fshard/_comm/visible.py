"""The same messages behind the interface of torch.distributed: transfers that a compiler can see.

`torch.compile` starts the functional collectives in the order of the program, the same on every rank whatever the
sizes there; no other operation has that promise. They know a group by its name, and find one of these.

Where a compiler puts the waits is another matter, and differs by rank. A transfer lands after all that were started
before it: of ranks that land in different orders each might wait for the other.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fshard._torch_compat import register_process_group

from . import p2p
from .gloo import Line, Mail, copy
from .protocol import PendingTransfer

_OPS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min"}


class Landing(dist.Work):
    """A transfer under way. `wait` ends it and those before it in the queue. What went wrong its own `wait` raises."""

    def __init__(self, land: PendingTransfer, queue: deque[Landing]) -> None:
        super().__init__()
        self._land: PendingTransfer | None = land
        self._error: BaseException | None = None
        self._queue = queue
        queue.append(self)

    def wait(self, timeout: Any = None) -> bool:
        while self in self._queue:
            self._queue.popleft()._end()
        if self._error is not None:
            raise self._error
        return True

    def _end(self) -> None:
        assert self._land is not None
        land, self._land = self._land, None  # torch keeps what nobody has waited for, but its tensors may go
        try:
            land()
        except BaseException as e:
            self._error = e
            if not isinstance(e, Exception):
                raise


class VisibleGroup(dist.ProcessGroup):
    """The ranks on a line. It has what the functional collectives ask for.

    All groups of a rank share a queue of what is under way.
    """

    def __init__(self, line: Line, queue: deque[Landing]) -> None:
        super().__init__(line.me, len(line.places))  # type: ignore[call-arg]  # of two, where there is no store
        self.world = dist.group.WORLD
        self._line, self._queue = line, queue

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "fshard"

    def allreduce(self, xs: Sequence[Tensor], opts: Any = None) -> Landing:  # type: ignore[override]
        return Landing(p2p.reduce(self._line, xs, _OPS[opts.reduceOp.op]), self._queue)

    def all_gather_single_coalesced(self, outs: Sequence[Tensor], xs: Sequence[Tensor], opts: Any = None) -> Landing:
        n = len(self._line.places)
        into = [out.view(n, *x.shape).unbind() for out, x in zip(outs, xs, strict=True)]
        return Landing(p2p.gather(self._line, xs, into), self._queue)

    def reduce_scatter_single_coalesced(self, outs: Any, xs: Any, opts: Any = None) -> Landing:
        n = len(self._line.places)
        rows = [x.view(n, *out.shape).unbind() for out, x in zip(outs, xs, strict=True)]
        flight = p2p.scatter(self._line, rows)

        def land() -> list[Tensor]:
            copy(outs, flight())
            return []

        return Landing(land, self._queue)

    def all_to_all_single(self, out: Tensor, x: Tensor, outs: Any, xs: Any, opts: Any = None) -> Landing:
        """`outs` and `xs`: how much of dim 0 comes from each rank and goes to it."""
        come, gone = out.split_with_sizes(outs), x.split_with_sizes(xs)
        me, others = self._line.me, self._line.others
        mail = Mail(self._line, {r: [gone[r]] for r in others}, {r: [come[r]] for r in others}, place=True)
        come[me].copy_(gone[me])

        def land() -> list[Tensor]:
            mail.land()
            return []

        return Landing(land, self._queue)

    # What torch called them up to 2.12.
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]


_groups: dict[str, VisibleGroup] = {}  # as long as torch.distributed runs, as its own
_queue: deque[Landing] = deque()


def visible(members: Sequence[int], line: Line) -> str:
    """The name under which the functional collectives find these ranks of the world: on this line, or an earlier one.

    It is in what is compiled: a mesh that is made again has the same, and its programs are not compiled again.
    """
    name = f"fshard/{hashlib.blake2b(repr(list(members)).encode(), digest_size=8).hexdigest()}"
    if name in _groups and _groups[name].world is not dist.group.WORLD:  # it was ended, and started anew
        _groups.clear()
        _queue.clear()
    if name not in _groups:
        _groups[name] = VisibleGroup(line, _queue)
        register_process_group(name, _groups[name])  # type: ignore[arg-type]
    return name


__all__ = ["visible"]
