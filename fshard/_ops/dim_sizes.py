"""The dims that a collective gathers or splits, their global sizes, and this rank's range of a split dim."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from fshard._comm import Axis, Comm, checker, index_of, known_axes, live_axes, region, size_of
from fshard._torch_compat import without_functorch
from fshard.errors import fail
from fshard.spec import names_of, part_lengths, part_range


def dim_of(verb: str, x: Tensor, dim: int) -> int:
    """The dim counted from the front. Raises ShardingError, naming `verb`, if the tensor has no such dim."""
    if not -x.ndim <= dim < x.ndim:
        raise fail(f"{verb}: a {x.ndim}-d tensor has no dim {dim}", shape=list(x.shape))
    return dim % x.ndim


def split_layout(verb: str, axes: tuple[str, ...], xs: Sequence[Tensor], dim: int) -> tuple[tuple[int, int], ...]:
    """The dim to be split, of each tensor, and its size. Pieces of unequal size make the region an uneven one."""
    layout = tuple((d, x.shape[d]) for x in xs for d in [dim_of(verb, x, dim)])
    where = region(verb)
    if not where.uneven and any(size % size_of(axes, where.sizes) for _, size in layout):
        where.uneven = True
    return layout


def gather_layout(
    verb: str, comm: Comm, axes: tuple[str, ...], xs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[int | None]
) -> tuple[tuple[int, int], ...]:
    """The global size of each gathered dim: as given, or found out."""
    ns = [comm.sizes[a] for a in axes]
    me = index_of(axes, comm.sizes, comm.coords)
    local = [x.shape[d] for x, d in zip(xs, dims, strict=True)]
    if any(s is None for s in sizes) and region(verb).uneven:
        sizes = _ask(verb, comm, axes, local, region(verb).device)
    known = [m * size_of(axes, comm.sizes) if s is None else s for m, s in zip(local, sizes, strict=True)]
    for m, size in zip(local, known, strict=True):
        if part_lengths(size, ns)[me] != m:
            raise fail(f"{verb}: this rank's part is not its part of a dim of size {size}",
                       f"over {axes}, {size} splits into {part_lengths(size, ns)}; rank {me} of them holds {m}",
                       fix="pass the global size of the dim that is gathered")  # fmt: skip
    return tuple(zip(dims, known, strict=True))


def _ask(verb: str, comm: Comm, axes: tuple[str, ...], local: Sequence[int], device: torch.device) -> list[int]:
    if comm.static_sizes:
        raise fail(f"{verb}: sizes that the axis does not divide must be known to {_of_static_sizes(comm)}",
                   fix="pass size= (for unshard: shapes=)")  # fmt: skip
    found = checker()
    # Numbers, not what is differentiated: tensors made inside a transform would be wrapped, and could not be sent.
    with contextlib.nullcontext() if found is None else found.paused(), without_functorch():
        everyone = comm.all_gather(torch.tensor(local, dtype=torch.int64, device=device), axes)
        return [int(n) for n in everyone.sum(0).tolist()]


def _of_static_sizes(comm: Comm) -> str:
    """Name of the program that must know its sizes, for an error."""
    return "a compiled program" if comm.has_values else "an abstract mesh"


def global_size(verb: str, n: int, axis: Axis, *, word: str = "size=") -> int:
    """The global size of a dim that `axis` splits and of which this rank holds `n`.

    Where no argument of the region is uneven that is a product. Else the ranks tell each other, which a
    compiled program cannot: there, `word` names the argument that says it.
    """
    where = region(verb)
    live = live_axes(where.comm, known_axes(verb, where, axis))
    if not live or not where.uneven:
        return n * size_of(live, where.sizes)
    if where.comm.static_sizes:
        raise fail(f"{verb}: {_of_static_sizes(where.comm)} must know the size of an uneven dim", fix=f"pass {word}")
    return _ask(verb, where.comm, live, [n], where.device)[0]


def local_range(verb: str, n: int, axis: Axis, size: int | None) -> tuple[int, int]:
    """(first, whole): where the `n` entries of this rank begin, and how many there are over `axis`.

    Raises ShardingError where this rank's part of `size` is not `n`.
    """
    names = names_of(axis)
    size = size if size is not None else global_size(verb, n, axis) if names else n
    sizes: list[int] = []
    coords: list[int] = []
    if names:
        where = region(verb)
        known_axes(verb, where, axis)
        sizes, coords = [where.sizes[a] for a in names], [where.coords[a] for a in names]
    start, length = part_range(size, sizes, coords)
    if length != n:
        raise fail(f"{verb}: this rank holds {n} of the vocabulary, its part is {length}",
                   f"{size} over {axis!r} splits into {part_lengths(size, sizes)}",
                   fix="pass size=, the whole vocabulary")  # fmt: skip
    return start, size


__all__ = ["dim_of", "gather_layout", "global_size", "local_range", "split_layout"]
