"""The dims that a collective gathers or splits, and how long they are altogether."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from .abstract import cannot_ask
from .comm import Comm, checker, index_of, region, size_of
from .errors import fail
from .spec import lengths


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
        if lengths(size, ns)[me] != m:
            raise fail(f"{verb}: this rank's part is not its part of a dim of size {size}",
                       f"over {axes}, {size} splits into {lengths(size, ns)}; rank {me} of them holds {m}",
                       fix="pass the global size of the dim that is gathered")  # fmt: skip
    return tuple(zip(dims, known, strict=True))


def _ask(verb: str, comm: Comm, axes: tuple[str, ...], local: Sequence[int], device: torch.device) -> list[int]:
    if kind := cannot_ask(comm):
        raise fail(f"{verb}: sizes that the axis does not divide must be known to {kind}",
                   fix="pass size= (for unshard: shapes=)")  # fmt: skip
    found = checker()
    # Numbers, not what is differentiated: tensors made inside a transform would be wrapped, and could not be sent.
    with contextlib.nullcontext() if found is None else found.resting(), torch._C._DisableFuncTorch():
        everyone = comm.all_gather(torch.tensor(local, dtype=torch.int64, device=device), axes)
        return [int(n) for n in everyone.sum(0).tolist()]


__all__ = ["dim_of", "gather_layout", "split_layout"]
