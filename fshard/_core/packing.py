"""Forms of tensors that transfers need: one buffer for several, the parts of a dim in rows, parts and their sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fshard._core.protocol import Dims, coords_of
from fshard.spec import Size, part_lengths, part_range, total


def flatten(xs: Sequence[Tensor]) -> Tensor:
    """Copy tensors of one dtype end to end, [n]."""
    return torch.cat([x.reshape(-1) for x in xs])


def pack(xs: Sequence[Tensor]) -> Tensor:
    """Join tensors of one dtype end to end, [n]; one tensor is returned itself."""
    return xs[0] if len(xs) == 1 else flatten(xs)


def unpack(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Undo `pack`: views of the shapes of `like`."""
    parts = [flat] if len(like) == 1 else flat.split_with_sizes([x.numel() for x in like])
    return [part.view(x.shape) for part, x in zip(parts, like, strict=True)]


def pad(x: Tensor, dim: int, length: int) -> Tensor:
    """Append zeros to a dim, up to a length."""
    short = length - x.shape[dim]
    if not short:
        return x
    return torch.cat([x, x.new_zeros([short if d == dim else n for d, n in enumerate(x.shape)])], dim)


# --- the parts of a dim over some axes, as in `part_lengths` ---
#
# `sizes` are the sizes of the axes, major first, and n is their product.

Positions = tuple[slice, ...]  # of ranks, along each axis


def sized_dim(x: Tensor, dim: int | tuple[int, tuple[int, ...]]) -> tuple[int, Size]:
    """Return a dim of `Dims` and its size."""
    return (dim, x.shape[dim]) if isinstance(dim, int) else dim


def longest_part(size: Size, sizes: Sequence[int]) -> int:
    """Length of the longest part of a dim of this size: of the first one, unless the lengths are chosen."""
    if isinstance(size, tuple):
        return max(part_lengths(size, sizes))
    return -(-size // math.prod(sizes))  # as dividing, and rounding up, by one axis after the other


def part_shape(
    x: Tensor, at: int | tuple[int, tuple[int, ...]], sizes: Sequence[int], coords: Sequence[int]
) -> tuple[int, ...]:  # fmt: skip
    """Shape of the part of a tensor at these coordinates."""
    dim, size = sized_dim(x, at)
    return (*x.shape[:dim], part_range(size, sizes, coords)[1], *x.shape[dim + 1 :])


def parts_by_rank(xs: Sequence[Tensor], dims: Dims, sizes: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """Return for each rank its parts of all tensors, as views."""
    parts = [x.split_with_sizes(part_lengths(size, sizes), dim) for x, at in zip(xs, dims, strict=True)
             for dim, size in [(at, x.shape[at]) if isinstance(at, int) else at]]  # fmt: skip
    return list(zip(*parts, strict=True))


def equal_parts(x: Tensor, dim: int, size: Size, sizes: Sequence[int]) -> list[tuple[Positions, Tensor]]:
    """Return the parts of a dim, one view for all of one length: [.., size, ..] -> [*positions, .., length, ..].

    Each view has the positions of its parts. Empty parts are left out if others are not. There is one view if
    the axes divide the dim, and at most 2 ** len(sizes): the work of a transfer does not grow with the ranks. Of chosen
    lengths each has a view.
    """
    if isinstance(size, tuple):
        parts = enumerate(x.split_with_sizes(part_lengths(size, sizes), dim))
        return [(tuple(slice(c, c + 1) for c in coords_of(i, sizes)), part[(None,) * len(sizes)])
                for i, part in parts if part.shape[dim] or not x.shape[dim]]  # fmt: skip
    views: list[tuple[Positions, Tensor]] = [((), x)]
    for d, n in enumerate(sizes, dim):
        views = [((*at, positions), part) for at, y in views for positions, part in _cut(y, d, n)]
    axes = range(len(sizes))
    return [(at, y.movedim([dim + i for i in axes], list(axes))) for at, y in views]


def _cut(x: Tensor, dim: int, n: int) -> list[tuple[slice, Tensor]]:
    """Return the parts of a dim over one axis of n ranks: the full ones, [.., full, length, ..], and the short one."""
    size, length = x.shape[dim], -(-x.shape[dim] // n)
    full, short = divmod(size, length) if size else (n, 0)
    even = x.narrow(dim, 0, full * length) if short else x
    out = [(slice(full), even.view(*x.shape[:dim], full, length, *x.shape[dim + 1 :]))]
    if short:
        out.append((slice(full, full + 1), x.narrow(dim, size - short, short).unsqueeze(dim)))
    return out


def split_padded(x: Tensor, dim: int, size: Size, sizes: Sequence[int]) -> Tensor:
    """Split a dim into padded parts, stacked in front: [.., size, ..] -> [n, .., longest, ..]."""
    n, longest = math.prod(sizes), longest_part(size, sizes)
    if isinstance(size, int) and (len(sizes) == 1 or size == n * longest):  # only the last parts are padded, or none
        padded = pad(x, dim, n * longest)
        return padded.view(*x.shape[:dim], n, longest, *x.shape[dim + 1 :]).movedim(dim, 0)
    out = x.new_zeros((*sizes, *x.shape[:dim], longest, *x.shape[dim + 1 :]))
    for at, parts in equal_parts(x, dim, size, sizes):
        out[at].narrow(len(sizes) + dim, 0, parts.shape[len(sizes) + dim]).copy_(parts)
    return out.flatten(0, len(sizes) - 1)


def join_padded(stack: Tensor, dim: int, size: Size, sizes: Sequence[int]) -> Tensor:
    """Undo `split_padded`: [n, .., longest, ..] -> [.., size, ..]."""
    if isinstance(size, int) and (len(sizes) == 1 or size == stack.shape[0] * stack.shape[dim + 1]):
        return stack.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, size)
    out = stack.new_empty((*stack.shape[1 : dim + 1], total(size), *stack.shape[dim + 2 :]))
    padded = stack.unflatten(0, sizes)  # type: ignore[no-untyped-call]
    for at, parts in equal_parts(out, dim, size, sizes):
        parts.copy_(padded[at].narrow(len(sizes) + dim, 0, parts.shape[len(sizes) + dim]))
    return out


# --- rows: for each rank its parts of several tensors, end to end ---
#
# A tensor begins at the same column in every row, and has as many columns as its longest part has elements.


def column_counts(xs: Sequence[Tensor], dims: Dims, sizes: Sequence[int]) -> list[int]:
    """Return the number of columns of each tensor."""
    at = map(sized_dim, xs, dims)
    return [math.prod([*x.shape[:dim], longest_part(size, sizes), *x.shape[dim + 1 :]])
            for x, (dim, size) in zip(xs, at, strict=True)]  # fmt: skip


def match_rows(
    rows: Tensor, xs: Sequence[Tensor], dims: Dims, sizes: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Return views of the parts of tensors, and views of the same elements in rows [*sizes, width]."""
    of_xs, of_rows = [], []
    split = rows.split_with_sizes(column_counts(xs, dims, sizes), -1)
    for x, dim, of_x in zip(xs, dims, split, strict=True):
        for at, parts in equal_parts(x, *sized_dim(x, dim), sizes):
            length = parts.shape[len(sizes) :].numel()
            of_xs.append(parts)
            of_rows.append(of_x[at][..., :length].view(parts.shape))
    return of_xs, of_rows


# --- sums in a fixed order ---

_STEPS: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def reduce_in_order(
    parts: Sequence[Tensor], op: str, buffer: Tensor | None = None, out: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Reduce two parts or more in this order, which gives the same bits on every rank and mesh.

    Sums of half precision are computed in float32 and rounded once. The result is written to `out`, intermediate ones
    to `buffer`; `buffer` may be one of the first two parts, and `out` any of them.
    """
    step, last = _STEPS[op], len(parts) - 1
    if op == "sum" and last > 1 and parts[0].dtype in (torch.float16, torch.bfloat16):
        wide = parts[0].float()
        for x in parts[1:]:
            wide += x
        return wide.to(parts[0].dtype) if out is None else out.copy_(wide)
    total = parts[0]
    for i, x in enumerate(parts[1:], 1):
        total = step(total, x, out=out if i == last else buffer)
    return total
