"""The norm of a tree whose leaves lie anywhere: each element counted once, on any mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import tree
from .collectives import axis_index, psum, pvary
from .spec import is_spec


def global_norm(x: Any, specs: Any) -> Tensor:
    """The 2-norm of all elements of a tree, each counted once on any mesh.

        tree of [*S@axes]{V axes} -> [] {I}     cost: one number over all axes of `specs`

    In float32, or in float64 if a leaf is. `specs`, a prefix tree, says what each leaf varies over; with no axes in it,
    this works anywhere.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor(4.0)}, P())
    tensor(5.)
    """
    groups: dict[tuple[str, ...], list[Tensor]] = {}
    for leaf, spec in zip(tree.leaves(x), tree.broadcast(specs, x, name="specs", leaf=is_spec), strict=True):
        groups.setdefault(tuple(sorted(spec.axes)), []).append(leaf)
    every = tuple(sorted({a for axes in groups for a in axes}))
    parts = []
    for axes, leaves in groups.items():
        part = _sum_of_squares(leaves)
        rest = tuple(a for a in every if a not in axes)
        if rest:  # of the ranks that hold one part the first counts it, so that one psum serves every leaf
            part = torch.where(axis_index(rest) == 0, pvary(part, rest), 0.0)
        parts.append(part)
    total = torch.stack([p.to(_wide(parts)) for p in parts]).sum() if parts else torch.zeros(())
    return torch.sqrt(psum(total, every) if every else total)


def _wide(xs: list[Tensor]) -> torch.dtype:
    return torch.float64 if any(x.dtype == torch.float64 for x in xs) else torch.float32


def _sum_of_squares(xs: list[Tensor]) -> Tensor:
    wide = _wide(xs)
    if xs[0].is_cuda and not torch.compiler.is_dynamo_compiling():
        return torch.stack(torch._foreach_norm(xs, 2, wide)).square().sum()
    # The CPU's norm adds one by one, 1e-5 off after a few million elements; its sum adds by halves.
    return torch.stack([x.to(wide).square().sum() for x in xs]).sum()


__all__ = ["global_norm"]
