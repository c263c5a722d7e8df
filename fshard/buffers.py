"""Tensors as one buffer, and a dim as padded pieces: the forms in which a transfer takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pack(xs: Sequence[Tensor]) -> Tensor:
    """Tensors of one dtype as one: several end to end, [n]; one as it is."""
    return xs[0] if len(xs) == 1 else torch.cat([x.reshape(-1) for x in xs])


def unpack(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Undo `pack`: views of the shapes of `like`."""
    if len(like) == 1:
        return [flat]
    parts = torch.split(flat, [x.numel() for x in like])
    return [part.view(x.shape) for part, x in zip(parts, like, strict=True)]


def pad(x: Tensor, dim: int, length: int) -> Tensor:
    """Zeros at the end of a dim, up to a length."""
    short = length - x.shape[dim]
    if not short:
        return x
    return torch.cat([x, x.new_zeros([short if d == dim else n for d, n in enumerate(x.shape)])], dim)


def cut(x: Tensor, dim: int, pieces: Sequence[int]) -> Tensor:
    """Split a dim into padded pieces, stacked in front: [.., size, ..] -> [n, .., chunk, ..]."""
    if min(pieces) == pieces[0]:
        chunks: Tensor = x.unflatten(dim, (len(pieces), pieces[0]))  # type: ignore[no-untyped-call]
        return chunks.movedim(dim, 0)
    return torch.stack([pad(p, dim, pieces[0]) for p in torch.split(x, list(pieces), dim)])


def join(stack: Tensor, dim: int, pieces: Sequence[int]) -> Tensor:
    """Undo `cut`: [n, .., chunk, ..] -> [.., size, ..]."""
    if len(pieces) == 1 or min(pieces) == pieces[0]:
        return stack.movedim(0, dim).flatten(dim, dim + 1)
    return torch.cat([stack[i].narrow(dim, 0, m) for i, m in enumerate(pieces)], dim)


__all__ = ["cut", "join", "pack", "pad", "unpack"]
