"""The functional collectives of torch.distributed: for CUDA, and for programs that `torch.compile` traces."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fshard._core.packing import column_counts, flatten, match_rows, pack, pad, part_shape, unpack
from fshard._core.protocol import Dims, PendingTransfer, Series, coords_of
from fshard._core.torch import foreach_copy_, functional_collectives, group_named
from fshard.errors import fail

from .description import counts_differ
from .group import Pairs

_ops = functional_collectives


class FunctionalGroup:
    """The ranks over axes of these `sizes`, with this one at position `me`, and the verbs of `Comm`.

    `name` names the process group, whose ranks count the axes in the order `order`. No operation is called for
    each rank, so the work of the host is the same for thousands of ranks as for two.
    """

    def __init__(self, name: str, sizes: Sequence[int], me: int, order: list[int]) -> None:
        self.name, self.sizes, self.me, self.order = name, sizes, me, order
        self.n = math.prod(sizes)

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        return self._wait(self._start(_ops.all_reduce, x.contiguous(), op, self.name))

    def all_gather(self, x: Tensor) -> Tensor:
        started = self._start(_ops.all_gather_into_tensor, x.contiguous().view(-1), self.n, self.name)
        return self._by_position(self._wait(started).view(self.n, *x.shape)).reshape(self.n, *x.shape)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        flat = self._by_group_rank(x).reshape(-1)
        return self._wait(self._start(_ops.reduce_scatter_tensor, flat, "sum", self.n, self.name)).view(x.shape[1:])

    def all_to_all(self, x: Tensor) -> Tensor:
        if x.is_complex():
            return torch.view_as_complex(self.all_to_all(torch.view_as_real(x)))
        flat, sizes = self._by_group_rank(x).reshape(-1), [x[0].numel()] * self.n
        out = self._wait(self._start(_ops.all_to_all_single, flat, sizes, sizes, self.name)).view(x.shape)
        return self._by_position(out).reshape(x.shape)

    def all_to_all_rows(self, x: Tensor, send: Sequence[int], receive: Sequence[int], exchanged: bool) -> Tensor:
        if x.is_complex():
            return torch.view_as_complex(self.all_to_all_rows(torch.view_as_real(x), send, receive, exchanged))
        if not exchanged:
            self._compare_counts(x.device, send, receive)
        places = [self._group_rank(position) for position in range(self.n)]
        order = sorted(range(self.n), key=places.__getitem__)  # positions over the axes, by rank of the group
        in_order, width, parts = places == sorted(places), math.prod(x.shape[1:]), x.split_with_sizes(list(send))
        flat = (x if in_order else torch.cat([parts[i] for i in order])).reshape(-1)
        got, sent = [receive[i] for i in order], [send[i] for i in order]
        out = self._wait(self._start(_ops.all_to_all_single, flat, [n * width for n in got],
                                     [n * width for n in sent], self.name))  # fmt: skip
        out = out.view(-1, *x.shape[1:]) if width else x.new_empty(sum(got), *x.shape[1:])
        if in_order:
            return out
        parts = out.split_with_sizes(got)
        return torch.cat([parts[rank] for rank in places])

    def _compare_counts(self, device: torch.device, send: Sequence[int], receive: Sequence[int]) -> None:
        """Raise ShardingError on every rank if one sends another number of rows than the other one receives."""
        sent, received = self.all_gather(torch.tensor([list(send), list(receive)], device=device)).unbind(1)
        for source, target in (sent != received.t()).nonzero().tolist():
            raise counts_differ(source, target, int(sent[source, target]), int(received[target, source]))

    def permute(self, x: Tensor, pairs: Pairs) -> Tensor:
        if x.is_complex():
            return torch.view_as_complex(self.permute(torch.view_as_real(x), pairs))
        sent, received = [0] * self.n, [0] * self.n
        for source, target in pairs:
            if source == self.me:
                sent[self._group_rank(target)] = x.numel()
            if target == self.me:
                received[self._group_rank(source)] = x.numel()
        flat = x.reshape(-1)[: sum(sent)]
        out = self._wait(self._start(_ops.all_to_all_single, flat, received, sent, self.name))
        return out.view(x.shape) if sum(received) == x.numel() else torch.zeros_like(x)

    def send(self, xs: Sequence[Tensor], pairs: Pairs, series: Series | None) -> PendingTransfer:
        """Start messages between pairs of ranks."""
        out = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in xs]
        operations = []
        for source, target in pairs:
            if source == target == self.me:
                foreach_copy_(out, list(xs))
            elif self.me in (source, target):
                is_sent = source == self.me
                peer, group = self._group_rank(target if is_sent else source), group_named(self.name)
                for x in [x.contiguous() for x in xs] if is_sent else out:
                    x = torch.view_as_real(x) if x.is_complex() else x
                    operations.append(
                        dist.P2POp(dist.isend if is_sent else dist.irecv, x, group=group, group_peer=peer)
                    )
        works = call_distributed(dist.batch_isend_irecv, operations) if operations else []

        def wait() -> list[Tensor]:
            for work in works:
                call_distributed(work.wait)
            return out

        return wait

    def gather(self, xs: Sequence[Tensor], into: Sequence[Tensor], dims: Dims) -> PendingTransfer:
        widths = column_counts(into, dims, self.sizes)
        row = flatten([pad(x.reshape(-1), 0, width) for x, width in zip(xs, widths, strict=True)])
        started = self._start(_ops.all_gather_into_tensor, row, self.n, self.name)

        def wait() -> list[Tensor]:
            rows = self._by_position(self._wait(started).view(self.n, len(row)))
            foreach_copy_(*match_rows(rows, into, dims, self.sizes))
            return []

        return wait

    def scatter(self, xs: Sequence[Tensor], dims: Dims) -> PendingTransfer:
        widths, coords = column_counts(xs, dims, self.sizes), coords_of(self.me, self.sizes)
        even = sum(widths) * self.n == sum(x.numel() for x in xs)
        rows = (torch.empty if even else torch.zeros)((self.n, sum(widths)), dtype=xs[0].dtype, device=xs[0].device)
        parts, places = match_rows(self._by_position(rows), xs, dims, self.sizes)
        foreach_copy_(places, parts)
        started = self._start(_ops.reduce_scatter_tensor, rows.view(-1), "sum", self.n, self.name)
        shapes = [part_shape(x, dim, self.sizes, coords) for x, dim in zip(xs, dims, strict=True)]
        out = [torch.empty(shape, dtype=x.dtype, device=x.device) for x, shape in zip(xs, shapes, strict=True)]

        def wait() -> list[Tensor]:
            row = self._wait(started).split_with_sizes(widths)
            foreach_copy_(out, [part[: x.numel()].view(x.shape) for part, x in zip(row, out, strict=True)])
            return out

        return wait

    def reduce(self, xs: Sequence[Tensor], fresh: bool) -> PendingTransfer:
        started = self._start(_ops.all_reduce, pack(xs), "sum", self.name)

        def wait() -> list[Tensor]:
            reduced = unpack(self._wait(started), xs)
            if fresh:
                return reduced
            foreach_copy_(list(xs), reduced)
            return list(xs)

        return wait

    def _start(self, op: Callable[..., Tensor], *args: Any) -> Tensor:
        started: Tensor = call_distributed(op, *args)
        return started

    def _wait(self, started: Tensor) -> Tensor:
        out: Tensor = call_distributed(_ops.wait_tensor, started)
        return out

    def _by_position(self, x: Tensor) -> Tensor:
        """Return a view by position on each axis of a tensor by rank of the group: [n, *S] -> [*sizes, *S]."""
        split = x.view(*[self.sizes[i] for i in self.order], *x.shape[1:])
        return split.movedim(list(range(len(self.order))), self.order)

    def _by_group_rank(self, x: Tensor) -> Tensor:
        """Undo `_by_position`, but for its split of the first dim: [n, *S] -> [*sizes in the group's order, *S]."""
        split = x.reshape(*self.sizes, *x.shape[1:])
        return split.movedim(self.order, list(range(len(self.order))))

    def _group_rank(self, position: int) -> int:
        """Return the rank in the group of a position over the flattened axes."""
        coords, rank = coords_of(position, self.sizes), 0
        for i in self.order:
            rank = rank * self.sizes[i] + coords[i]
        return rank


def call_distributed(f: Callable[..., Any], *args: Any) -> Any:
    """Call a function of torch.distributed. Raises ShardingError if another rank has not taken part."""
    if torch.compiler.is_dynamo_compiling():
        return f(*args)
    try:
        return f(*args)
    except RuntimeError as e:
        raise fail(f"rank {dist.get_rank()}: a collective failed: another rank has failed, or has left the program",
                   str(e).splitlines()[0], fix="see the first traceback of the other ranks") from e  # fmt: skip
