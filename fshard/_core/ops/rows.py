"""Rows whose numbers are values: the counts that ranks exchange, and rows padded to a number that is known."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from fshard._core.protocol import size_of
from fshard._core.region import checker, has_values, region, unchecked, user_line
from fshard._core.torch import is_batched, unwrapped, without_functorch
from fshard.errors import fail, number_of

from .autograd import apply_map
from .linear_maps import AllToAll, AllToAllRows, Counts

Numbers = Tensor | Sequence[int]


def row_counts(verb: str, axes: tuple[str, ...], send: Numbers, receive: Numbers | None, rows: int) -> Counts:
    """Return the counts as numbers of the host; without `receive`, the ranks exchange them.

    Counts that are tensors on an abstract mesh, which has no values, are balanced: `rows` split evenly.
    """
    current = region(verb)
    n = size_of(axes, current.sizes)
    for name, counts in (("send", send), ("receive", receive)):
        if counts is not None and ((isinstance(counts, Tensor) and counts.ndim != 1) or len(counts) != n):
            raise fail(f"{verb}: {name} must have a number of rows for each of {number_of(n, 'rank')}",
                       f"it has {list(counts.shape) if isinstance(counts, Tensor) else len(counts)}", *user_line(),
                       fix=f"[{n}] numbers, in the order of the ranks over the axis")  # fmt: skip
        if isinstance(counts, Tensor) and (is_batched(counts) or counts.is_floating_point()):
            raise fail(f"{verb}: {name} must be integers, the same for all examples of a vmap", *user_line(),
                       fix="counts of one example")  # fmt: skip
    if not has_values():
        even = tuple(evenly(rows, n))
        to, of = (even if c is None or isinstance(c, Tensor) else tuple(c) for c in (send, receive))
        return Counts(to, of, True)
    with unchecked(), without_functorch():
        if receive is not None:
            to, of = (tuple(unwrapped(c).tolist() if isinstance(c, Tensor) else c) for c in (send, receive))
            return Counts(to, of, False)
        counts = unwrapped(send) if isinstance(send, Tensor) else list(send)
        mine = torch.as_tensor(counts, dtype=torch.int64, device=current.device)
        others = current.comm.all_to_all(mine.view(n, 1), axes).view(n) if axes else mine
        to, of = map(tuple, host_numbers([mine, others]))
    return Counts(to, of, True)


def evenly(total: int, n: int) -> list[int]:
    """Split a number into n that differ by at most 1: the counts that are assumed without values."""
    return [total // n + (i < total % n) for i in range(n)]


def tally(x: Tensor, n: int, weights: Tensor | None = None) -> Tensor:
    """Count integers from 0 to n - 1, or sum their integer weights: [M] -> [n]."""
    return x.new_zeros(n).scatter_add(0, x, torch.ones_like(x) if weights is None else weights)


def host_numbers(xs: Sequence[Tensor]) -> list[list[int]]:
    """Return integers [n] of a device as lists, by one copy."""
    with unchecked(), without_functorch():
        numbers = iter(torch.cat([unwrapped(x) for x in xs]).tolist())
    return [list(itertools.islice(numbers, len(x))) for x in xs]


def check_counts(verb: str, counts: Counts, xs: Sequence[Tensor]) -> None:
    """Raise ShardingError for counts below 0, and for tensors that do not have the rows to send."""
    for x in xs:
        if min(counts.send + counts.receive) < 0 or sum(counts.send) != len(x):
            raise fail(f"{verb}: x has {number_of(len(x), 'row')}, and send has {sum(counts.send)}",
                       f"send = {list(counts.send)}", *user_line(),
                       fix="counts of at least 0 that sum to the rows of x")  # fmt: skip


def check_types(verb: str, send: Numbers, xs: Sequence[Tensor]) -> None:
    """Raise ShardingError if the counts vary over an axis, and a tensor does not: its result would vary, too."""
    types = checker()
    if types is None or not isinstance(send, Tensor):
        return
    for x in xs:
        if wrong := sorted(types.info(unwrapped(send)).type.varying & types.info(unwrapped(x)).type.invariant):
            raise fail(f"{verb}: send varies over {', '.join(map(repr, wrong))}, and x does not", *user_line(),
                       fix=f"fs.pvary(x, {wrong[0] if len(wrong) == 1 else tuple(wrong)!r})")  # fmt: skip


def exchange_rows(axes: tuple[str, ...], counts: Counts, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Send rows of tensors of one dtype, in one transfer."""
    return apply_map(AllToAllRows(region().comm, axes, counts, (0,) * len(xs)), xs)


def exchange_padded(axes: tuple[str, ...], x: Tensor, send: Numbers, receive: Numbers | None, most: int) -> Tensor:
    """Send rows through buffers of `most` rows for each rank: [N, *S] -> [n * most, *S], zeros after the last row.

    Nothing is read by the host, so that the shapes of a compiled program do not depend on values.
    """
    comm, n = region().comm, size_of(axes, region().sizes)
    to, of = (None if c is None else torch.as_tensor(c, dtype=torch.int64, device=x.device) for c in (send, receive))
    assert to is not None
    fits = (to <= most).all() & (to.sum() <= len(x))
    if has_values() and not torch.compiler.is_compiling() and x.device.type == "cpu" and not unwrapped(fits):
        raise fail(f"all_to_all_rows: send = {unwrapped(to).tolist()}, most = {most}, and x has "
                   f"{number_of(len(x), 'row')}", *user_line(), fix="most= of at least every count")  # fmt: skip

    def exchange(y: Tensor) -> Tensor:
        """[n, m, *S], row j for rank j -> [n, m, *S], row i from rank i."""
        m = AllToAll(comm, axes, ((0, n),), ((1, n * y.shape[1]),))
        return apply_map(m, [y])[0].view(y.shape) if axes else y

    of = exchange(to.view(n, 1)).view(n) if of is None else of
    slot = torch.arange(most, device=x.device)
    first = (to.cumsum(0) - to).unsqueeze(1)
    index = torch.where(slot < to.unsqueeze(1), first + slot, len(x))  # [n, most]; the last row is of zeros
    index = torch.where(fits, index, len(x) + 1)  # out of range: an error of the device, which the host did not see
    received = exchange(_with_zeros(x)[index]).flatten(0, 1)
    row, ends = torch.arange(n * most, device=x.device), of.cumsum(0)
    source = torch.searchsorted(ends, row, right=True).clamp(max=n - 1)
    index = torch.where(row < ends[-1], source * most + row - (ends - of)[source], n * most)
    return _with_zeros(received)[index]


def _with_zeros(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])
