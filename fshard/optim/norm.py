"""Norm of a tree with any specs: each element counted once, on any mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard._core import callsite
from fshard._core.host_memory import common_device
from fshard._core.region import axes_of_own_values, checker, known_axes, region
from fshard.collectives import axis_index, axis_size, psum, pvary
from fshard.errors import checked, fail, must_be, raise_all
from fshard.grad import is_differentiated
from fshard.spec import is_spec

_BLOCK = 4096  # elements whose squares the CPU kernel adds one by one


@checked
def global_norm(x: Any, specs: Any) -> Tensor:
    """Return the 2-norm of all elements of a tree, each counted once on any mesh.

        tree of [*S@axes]{V axes} -> [] {I}     cost: one number over all axes of `specs`, one pass over the leaves

    Computed in float32, or in float64 if a leaf has it. `specs`, a prefix tree, names the axes each leaf varies over;
    with no axes in it, this works outside `shard_map` too.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor(4.0)}, P())
    tensor(5.)

    Raises ShardingError listing every leaf that is not a tensor of floats, or whose spec does not name its axes.
    """
    leaves, _ = tree.check_leaves("global_norm", "x", x, Tensor)
    raise_all([must_be(f"global_norm: {tree.show('x', path)}", "a tensor of floats", leaf)
               for path, leaf in (tree.leaves_with_path(x) if any(map(_has_no_norm, leaves)) else ())
               if _has_no_norm(leaf)])  # fmt: skip
    return norm_of(leaves, axes_of("global_norm", "x", x, specs))


def _has_no_norm(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex()) or x.layout is not torch.strided


def axes_of(verb: str, label: str, x: Any, specs: Any) -> list[tuple[str, ...]]:
    """Return the axes that each leaf of `x` varies over, by a prefix tree of specs.

    Raises ShardingError for axes that the mesh lacks, and in a checked call for leaves that vary over other axes.
    """
    flat, errors = tree.broadcast(specs, x, name=f"{verb}: specs", leaf=is_spec), []
    axes = [spec.axes for spec in flat]
    if used := {a for names in axes for a in names}:
        known_axes(f"{verb}: specs", region(verb), tuple(sorted(used)))
    if (types := checker()) is not None:
        for (path, leaf), spec in zip(tree.leaves_with_path(x), flat, strict=True):
            equal, varies = types.info(leaf).type.invariant & {*spec.axes}, axes_of_own_values(leaf) - {*spec.axes}
            for axis in sorted(equal | varies):
                what = "varies over {!r}, which its spec {} does not name" if axis in varies else \
                       "is the same on each rank of {!r}, which its spec {} names"  # fmt: skip
                place = f"{callsite.site()}: {verb}: {tree.show(label, path)}"
                errors.append(fail(f"{place} {what.format(axis, spec)}",
                                   fix="pass the specs by which these leaves are placed"))  # fmt: skip
    raise_all(errors)
    return axes


def norm_of(leaves: Sequence[Tensor], axes: Sequence[tuple[str, ...]]) -> Tensor:
    """Return `global_norm` of leaves that vary over these axes."""
    groups: dict[tuple[tuple[str, ...], torch.device], list[Tensor]] = {}
    for leaf, leaf_axes in zip(leaves, axes, strict=True):
        groups.setdefault((tuple(sorted(leaf_axes)), leaf.device), []).append(leaf)
    all_axes = tuple(sorted({a for group_axes, _ in groups for a in group_axes}))
    device = common_device(leaves)
    sums = []
    for (group_axes, _), group in groups.items():
        group_sum = _sum_of_squares(group).to(device)
        others = tuple(a for a in all_axes if a not in group_axes)
        # Only the first of the ranks with equal parts counts them, so that one psum serves every leaf.
        if others and axis_size(others) > 1:
            group_sum = torch.where(axis_index(others) == 0, pvary(group_sum, others), 0.0)
        sums.append(group_sum)
    total = torch.stack([x.to(_sum_dtype(sums)) for x in sums]).sum() if sums else torch.zeros(())
    return torch.sqrt(psum(total, all_axes) if all_axes else total)


def _sum_dtype(xs: list[Tensor]) -> torch.dtype:
    return torch.float64 if any(x.dtype == torch.float64 for x in xs) else torch.float32


def _sum_of_squares(xs: list[Tensor]) -> Tensor:
    dtype = _sum_dtype(xs)
    if torch.compiler.is_dynamo_compiling() or any(map(is_differentiated, xs)):  # a compiler fuses square and sum
        return torch.stack([x.to(dtype).square().sum() for x in xs]).sum()
    return torch.cat([norm for x in xs for norm in _block_norms(x, dtype)]).square().sum()


def _block_norms(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return the norms of the blocks of a leaf, [blocks], and of the remainder, [1].

    The CPU's norm adds squares one by one, with an error of 1e-3 after 16 million elements. The CPU's sum adds in
    pairs, but squares take memory and another pass. So the norm adds each block, and the sum adds the blocks.
    """
    if not x.is_contiguous():  # in the order of memory, which for most strides is a view
        x = x.permute(sorted(range(x.ndim), key=lambda d: x.stride()[d], reverse=True))
    flat, n = x.reshape(-1), x.numel()
    end = n // _BLOCK * _BLOCK
    out = []
    if end:
        blocks = flat if end == n else flat[:end]
        out.append(torch.linalg.vector_norm(blocks.view(-1, _BLOCK), dim=1, dtype=dtype))
    if end < n:
        out.append(torch.linalg.vector_norm(flat[end:] if end else flat, dim=0, keepdim=True, dtype=dtype))
    return out or [flat.to(dtype)]
