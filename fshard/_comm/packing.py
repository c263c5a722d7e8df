"""Forms of tensors that transfers need: one buffer for several, a dim as padded pieces, parts and their sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


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


def split_padded(x: Tensor, dim: int, pieces: Sequence[int]) -> Tensor:
    """Split a dim into padded pieces, stacked in front: [.., size, ..] -> [n, .., chunk, ..]."""
    if min(pieces) == pieces[0]:
        chunks: Tensor = x.unflatten(dim, (len(pieces), pieces[0]))  # type: ignore[no-untyped-call]
        return chunks.movedim(dim, 0)
    return torch.stack([pad(p, dim, pieces[0]) for p in torch.split(x, list(pieces), dim)])


def join_padded(stack: Tensor, dim: int, pieces: Sequence[int]) -> Tensor:
    """Undo `split_padded`: [n, .., chunk, ..] -> [.., size, ..]."""
    if len(pieces) == 1 or min(pieces) == pieces[0]:
        return stack.movedim(0, dim).flatten(dim, dim + 1)
    return torch.cat([stack[i].narrow(dim, 0, m) for i, m in enumerate(pieces)], dim)


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
