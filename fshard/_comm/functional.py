"""The functional collectives of torch.distributed: what a compiler can see, and what CUDA has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fshard._torch_compat import foreach_copy_, functional_collectives
from fshard.errors import ShardingError, fail

from .packing import pack, pad, unpack
from .protocol import PendingTransfer

_ops = functional_collectives


class Group(NamedTuple):
    """The ranks over some axes; `order` takes their places in the group to the order of the axes, where they differ."""

    name: str
    n: int
    me: int
    order: list[int] | None


# --- of one tensor --------------------------------------------------------------------------------------------


def all_reduce(group: Group, x: Tensor, op: str) -> Tensor:
    return _land(_start(_ops.all_reduce, x.contiguous(), op, group.name))


def all_gather(group: Group, x: Tensor) -> Tensor:
    flat = x.contiguous().view(-1)
    out = _land(_start(_ops.all_gather_into_tensor, flat, group.n, group.name)).view(group.n, *x.shape)
    return out if group.order is None else out[group.order]


def reduce_scatter(group: Group, x: Tensor) -> Tensor:
    return _land(_start_sum(group, x)).view(x.shape[1:])


def all_to_all(group: Group, x: Tensor) -> Tensor:
    if x.is_complex():
        return torch.view_as_complex(all_to_all(group, torch.view_as_real(x)))
    x = x if group.order is None else x[_inverse(group.order)]
    each = [x[0].numel()] * group.n
    out = _land(_start(_ops.all_to_all_single, x.reshape(-1), each, each, group.name)).view(x.shape)
    return out if group.order is None else out[group.order]


def permute(group: Group, x: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
    if x.is_complex():
        return torch.view_as_complex(permute(group, torch.view_as_real(x), pairs))
    place = list(range(group.n)) if group.order is None else group.order
    send, receive = [0] * group.n, [0] * group.n
    for source, target in pairs:
        if source == group.me:
            send[place[target]] = x.numel()
        if target == group.me:
            receive[place[source]] = x.numel()
    flat = x.reshape(-1)[: sum(send)]
    out = _land(_start(_ops.all_to_all_single, flat, receive, send, group.name))
    return out.view(x.shape) if sum(receive) == x.numel() else torch.zeros_like(x)


# --- of several, started and landed ---------------------------------------------------------------------------


def gather(group: Group, xs: Sequence[Tensor], into: Sequence[Sequence[Tensor]]) -> PendingTransfer:
    rows = [[parts[r] for parts in into] for r in range(group.n)]
    width = max(sum(t.numel() for t in row) for row in rows)
    started = _start(_ops.all_gather_into_tensor, pad(_flat(xs), 0, width), group.n, group.name)

    def arrive() -> list[Tensor]:
        found = _land(started).view(group.n, width)
        for r, row in enumerate(rows):
            _fill(row, found[r if group.order is None else group.order[r]])
        return []

    return arrive


def scatter(group: Group, xs: Sequence[Sequence[Tensor]]) -> PendingTransfer:
    flats = [_flat([row[r] for row in xs]) for r in range(group.n)]
    width = max(len(flat) for flat in flats)
    started = _start_sum(group, torch.stack([pad(flat, 0, width) for flat in flats]))
    out = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (row[group.me] for row in xs)]

    def arrive() -> list[Tensor]:
        _fill(out, _land(started))
        return out

    return arrive


def reduce(group: Group, xs: Sequence[Tensor], fresh: bool) -> PendingTransfer:
    started = _start(_ops.all_reduce, pack(xs), "sum", group.name)

    def arrive() -> list[Tensor]:
        found = unpack(_land(started), xs)
        if fresh:
            return found
        foreach_copy_(list(xs), found)
        return list(xs)

    return arrive


def _flat(xs: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in xs])


def _fill(targets: Sequence[Tensor], flat: Tensor) -> None:
    sizes = [t.numel() for t in targets]
    parts = flat[: sum(sizes)].split_with_sizes(sizes)
    foreach_copy_(list(targets), [part.view(t.shape) for part, t in zip(parts, targets, strict=True)])


# --- underneath -----------------------------------------------------------------------------------------------


def _start_sum(group: Group, x: Tensor) -> Tensor:
    x = x if group.order is None else x[_inverse(group.order)]
    return _start(_ops.reduce_scatter_tensor, x.reshape(-1), "sum", group.n, group.name)


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(i) for i in range(len(order))]


def _start(op: Callable[..., Tensor], x: Tensor, *args: object) -> Tensor:
    if torch.compiler.is_dynamo_compiling():
        return op(x, *args)
    try:
        return op(x, *args)
    except RuntimeError as e:
        raise broken(e) from e


def _land(started: Tensor) -> Tensor:
    if torch.compiler.is_dynamo_compiling():
        traced: Tensor = _ops.wait_tensor(started)
        return traced
    try:
        out: Tensor = _ops.wait_tensor(started)
        return out
    except RuntimeError as e:
        raise broken(e) from e


def broken(e: RuntimeError) -> ShardingError:
    """What a rank says of a transfer that another one has not taken part in."""
    return fail(f"rank {dist.get_rank()}: a collective broke off: another rank has failed, or left the program",
                str(e).splitlines()[0], fix="see the first traceback of the other ranks")  # fmt: skip


__all__ = [
    "Group", "all_gather", "all_reduce", "all_to_all", "broken", "gather", "permute", "reduce", "reduce_scatter",
    "scatter",
]  # fmt: skip
