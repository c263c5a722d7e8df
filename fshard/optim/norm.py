"""The norm of a tree whose leaves lie anywhere: each element counted once, on any mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard._comm import common_device
from fshard._torch_compat import foreach_norm
from fshard.collectives import axis_index, psum, pvary
from fshard.grad import is_differentiated
from fshard.spec import is_spec

_BLOCK = 4096  # elements whose squares are added one by one


def global_norm(x: Any, specs: Any) -> Tensor:
    """The 2-norm of all elements of a tree, each counted once on any mesh.

        tree of [*S@axes]{V axes} -> [] {I}     cost: one number over all axes of `specs`, one pass over the leaves

    In float32, or in float64 if a leaf is. `specs`, a prefix tree, says what each leaf varies over; with no axes in it,
    this works anywhere.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor(4.0)}, P())
    tensor(5.)
    """
    leaves, treedef = tree.flatten(x)
    return norm_of(leaves, axes_of(specs, x, treedef))


def axes_of(specs: Any, x: Any, treedef: Any) -> list[tuple[str, ...]]:
    """The axes that each leaf of `x` varies over, by a prefix tree of specs."""
    flat, same = tree.flatten(specs)
    if same != treedef or not all(map(is_spec, flat)):
        flat = tree.broadcast(specs, x, name="specs", leaf=is_spec)
    return [s.axes for s in flat]


def norm_of(leaves: Sequence[Tensor], axes: Sequence[tuple[str, ...]]) -> Tensor:
    """`global_norm` of leaves that vary over these axes."""
    groups: dict[tuple[tuple[str, ...], torch.device], list[Tensor]] = {}
    for leaf, over in zip(leaves, axes, strict=True):
        groups.setdefault((tuple(sorted(over)), leaf.device), []).append(leaf)
    every = tuple(sorted({a for over, _ in groups for a in over}))
    device = common_device(leaves)
    parts = []
    for (over, _), group in groups.items():
        part = _sum_of_squares(group).to(device)
        rest = tuple(a for a in every if a not in over)
        if rest:  # of the ranks that hold one part the first counts it, so that one psum serves every leaf
            part = torch.where(axis_index(rest) == 0, pvary(part, rest), 0.0)
        parts.append(part)
    total = torch.stack([p.to(_wide(parts)) for p in parts]).sum() if parts else torch.zeros(())
    return torch.sqrt(psum(total, every) if every else total)


def _wide(xs: list[Tensor]) -> torch.dtype:
    return torch.float64 if any(x.dtype == torch.float64 for x in xs) else torch.float32


def _sum_of_squares(xs: list[Tensor]) -> Tensor:
    wide = _wide(xs)
    if torch.compiler.is_dynamo_compiling() or any(
        map(is_differentiated, xs)
    ):  # a compiler adds the squares as they are made
        return torch.stack([x.to(wide).square().sum() for x in xs]).sum()
    if xs[0].is_cuda:
        return torch.stack(foreach_norm(xs, 2, wide)).square().sum()
    return torch.cat([norm for x in xs for norm in _norms(x, wide)]).square().sum()


def _norms(x: Tensor, wide: torch.dtype) -> list[Tensor]:
    """The norms of the blocks of a leaf: [blocks], and of what is left [1].

    The CPU's norm adds one by one, 1e-3 off after 16 million elements; its sum adds by halves, but of squares that need
    memory and a pass of their own. So blocks are summed by the one, and what they give by the other.
    """
    if not x.is_contiguous():  # in the order of memory, which for most strides is a view
        x = x.permute(sorted(range(x.ndim), key=lambda d: x.stride()[d], reverse=True))
    flat = x.reshape(-1)
    whole = len(flat) // _BLOCK * _BLOCK
    out = []
    if whole:
        out.append(torch.linalg.vector_norm(flat[:whole].view(-1, _BLOCK), dim=1, dtype=wide))
    if whole < len(flat):
        out.append(torch.linalg.vector_norm(flat[whole:], dim=0, keepdim=True, dtype=wide))
    return out or [flat.to(wide)]


__all__ = ["axes_of", "global_norm", "norm_of"]
