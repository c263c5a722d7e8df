"""The functional collectives of torch.distributed: for CUDA, and for programs that `torch.compile` traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fshard._torch_compat import foreach_copy_, functional_collectives
from fshard.errors import fail

from .packing import flatten, pack, pad, unpack
from .protocol import PendingTransfer

_ops = functional_collectives


class FunctionalGroup:
    """The `n` ranks over some axes, with this one at `me`; the verbs are those of `Comm`.

    `name` is that of the process group. If its ranks are in another order than those over the axes, `order` is the rank
    in the group of each position over the axes.
    """

    def __init__(self, name: str, n: int, me: int, order: list[int] | None) -> None:
        self.name, self.n, self.me, self.order = name, n, me, order

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        return _wait(_start(_ops.all_reduce, x.contiguous(), op, self.name))

    def all_gather(self, x: Tensor) -> Tensor:
        started = _start(_ops.all_gather_into_tensor, x.contiguous().view(-1), self.n, self.name)
        out = _wait(started).view(self.n, *x.shape)
        return out if self.order is None else out[self.order]

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return _wait(self._start_reduce_scatter(x)).view(x.shape[1:])

    def all_to_all(self, x: Tensor) -> Tensor:
        if x.is_complex():
            return torch.view_as_complex(self.all_to_all(torch.view_as_real(x)))
        x = x if self.order is None else x[_inverse(self.order)]
        sizes = [x[0].numel()] * self.n
        out = _wait(_start(_ops.all_to_all_single, x.reshape(-1), sizes, sizes, self.name)).view(x.shape)
        return out if self.order is None else out[self.order]

    def permute(self, x: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
        if x.is_complex():
            return torch.view_as_complex(self.permute(torch.view_as_real(x), pairs))
        ranks = list(range(self.n)) if self.order is None else self.order
        sent, received = [0] * self.n, [0] * self.n
        for source, target in pairs:
            if source == self.me:
                sent[ranks[target]] = x.numel()
            if target == self.me:
                received[ranks[source]] = x.numel()
        flat = x.reshape(-1)[: sum(sent)]
        out = _wait(_start(_ops.all_to_all_single, flat, received, sent, self.name))
        return out.view(x.shape) if sum(received) == x.numel() else torch.zeros_like(x)

    def gather(self, xs: Sequence[Tensor], into: Sequence[Sequence[Tensor]]) -> PendingTransfer:
        rows = [[parts[r] for parts in into] for r in range(self.n)]
        width = max(sum(t.numel() for t in row) for row in rows)
        started = _start(_ops.all_gather_into_tensor, pad(flatten(xs), 0, width), self.n, self.name)

        def wait() -> list[Tensor]:
            gathered = _wait(started).view(self.n, width)
            for r, row in enumerate(rows):
                _copy_from_flat(row, gathered[r if self.order is None else self.order[r]])
            return []

        return wait

    def scatter(self, xs: Sequence[Sequence[Tensor]]) -> PendingTransfer:
        flats = [flatten([row[r] for row in xs]) for r in range(self.n)]
        width = max(len(flat) for flat in flats)
        started = self._start_reduce_scatter(torch.stack([pad(flat, 0, width) for flat in flats]))
        out = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (row[self.me] for row in xs)]

        def wait() -> list[Tensor]:
            _copy_from_flat(out, _wait(started))
            return out

        return wait

    def reduce(self, xs: Sequence[Tensor], *, fresh: bool = False) -> PendingTransfer:
        started = _start(_ops.all_reduce, pack(xs), "sum", self.name)

        def wait() -> list[Tensor]:
            reduced = unpack(_wait(started), xs)
            if fresh:
                return reduced
            foreach_copy_(list(xs), reduced)
            return list(xs)

        return wait

    def _start_reduce_scatter(self, x: Tensor) -> Tensor:
        x = x if self.order is None else x[_inverse(self.order)]
        return _start(_ops.reduce_scatter_tensor, x.reshape(-1), "sum", self.n, self.name)


def call_distributed(f: Callable[..., Any], *args: Any) -> Any:
    """Call a function of torch.distributed. Raises ShardingError if another rank has not taken part."""
    if torch.compiler.is_dynamo_compiling():
        return f(*args)
    try:
        return f(*args)
    except RuntimeError as e:
        raise fail(f"rank {dist.get_rank()}: a collective failed: another rank has failed, or has left the program",
                   str(e).splitlines()[0], fix="see the first traceback of the other ranks") from e  # fmt: skip


def _start(op: Callable[..., Tensor], *args: Any) -> Tensor:
    started: Tensor = call_distributed(op, *args)
    return started


def _wait(started: Tensor) -> Tensor:
    out: Tensor = call_distributed(_ops.wait_tensor, started)
    return out


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(i) for i in range(len(order))]


def _copy_from_flat(targets: Sequence[Tensor], flat: Tensor) -> None:
    """Copy to each target its part of a flat tensor, which may be longer."""
    foreach_copy_(list(targets), unpack(flat[: sum(t.numel() for t in targets)], targets))
