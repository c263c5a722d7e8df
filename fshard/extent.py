"""How long a split dim is altogether, and where this rank's part of it begins."""

from __future__ import annotations

import torch

from .abstract import cannot_ask
from .collectives import Axis, axis_size, psum
from .comm import region
from .errors import fail
from .spec import lengths, names_of, piece


def whole(verb: str, n: int, axis: Axis, *, word: str = "size=") -> int:
    """The global size of a dim that `axis` splits and of which this rank holds `n`.

    Where no argument of the region is uneven that is a product. Else the ranks tell each other, which a
    compiled program cannot: there, `word` names the argument that says it.
    """
    where = region(verb)
    ranks = axis_size(axis)
    if ranks == 1 or not where.uneven:
        return n * ranks
    if kind := cannot_ask(where.comm):
        raise fail(f"{verb}: {kind} must know the size of an uneven dim", fix=f"pass {word}")
    return int(psum(torch.tensor(n, device=where.device), axis))


def part(verb: str, n: int, axis: Axis, size: int | None) -> tuple[int, int]:
    """(first, whole): where the `n` entries of this rank begin, and how many there are over `axis`.

    Raises ShardingError where this rank's part of `size` is not `n`.
    """
    names = names_of(axis)
    size = size if size is not None else whole(verb, n, axis) if names else n
    sizes: list[int] = []
    coords: list[int] = []
    if names:
        where, _ = region(verb), axis_size(axis)  # the latter checks the names
        sizes, coords = [where.sizes[a] for a in names], [where.coords[a] for a in names]
    start, length = piece(size, sizes, coords)
    if length != n:
        raise fail(f"{verb}: this rank holds {n} of the vocabulary, its part is {length}",
                   f"{size} over {axis!r} splits into {lengths(size, sizes)}",
                   fix="pass size=, the whole vocabulary")  # fmt: skip
    return start, size


__all__ = ["part", "whole"]
