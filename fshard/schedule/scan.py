"""The block loop as a function: weights come just before their use, and go after it.

Source: Zhao et al., 2023, "PyTorch FSDP", for the schedule; `jax.lax.scan` for the form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard._comm import Axis, known_axes, live_axes, region
from fshard._torch_compat import in_transform
from fshard.errors import fail
from fshard.spec import P, any_on_host, is_spec

from .buckets import plan
from .executor import Executor, Schedule, go
from .flat_tree import FlatTree
from .remat import check_captured
from .remat import remat as rematerialize
from .unshard import routes, sizes_of, unshard

# params of a block, x, and what belongs to this block alone -> x, or (x, an output of this block)
Block = Callable[..., Any]


def scan(
    block: Block, params: Any, x: Any, *, specs: Any, axis: Axis, each: Sequence[Any] | None = None,
    shapes: Any = None, has_aux: bool = False, release: bool = True, remat: bool = False, offload: bool = False,
    prefetch: int = 1, dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """x through a stack of blocks, each made whole over `axis` just before its use: FSDP's schedule as a function.

        block: (params of one block {V axis}, x) -> x          scan: (all params {by specs}, x) -> x

    The same numbers as `for p, s in zip(params, specs): x = block(unshard(p, s, axis), x)`. What differs is when bytes
    move and how long they stay: `prefetch` blocks are gathered while one computes, forward and backward; at most
    `prefetch + 1` gathered blocks exist at a time; gradients are summed over the ranks while the blocks before compute
    theirs. Leaves whose specs lack the axis (data parallel) are used where they lie, and their gradients summed.
    Leaves in host memory (`P(..., memory="host")`) come to the device a block earlier still, and go when it is done.

    Args:
        params: a list of one tree for each block, or one tree whose leaves are stacked, [blocks, ...].
        specs: of those, a prefix tree; the stacked dim is not split. `None`: nothing is split over `axis`.
        each: a list of one tree for each block, passed to it as a third argument: keys, caches.
        shapes: as for `unshard`, needed only for leaves that the axis does not divide.
        has_aux: `block` gives `(x, out)`; then the result is `(x, outs)`, a list, or stacked like the parameters.
        release: gathered weights are let go after use and gathered again in backward; without, they are kept.
        remat: keep only x before each block; in backward compute again, up to the last thing that it needs.
        offload: with `remat`, keep x before each block in host memory, and have it back a block ahead.
        prefetch: how many blocks ahead are gathered; 0 gathers when needed.
        dtype, reduce_dtype: as for `unshard`: mixed precision.

    Transfers, for each dtype of a block: a gather forward, one in backward (not of the last `prefetch + 1` blocks,
    which are still there), and one sum. Frozen leaves have no gradient: no buffer and no transfer. In a compiled
    program, and under a transform of torch.func, it is the plain loop: same numbers, without `release` and `offload`.

    >>> x = scan(block, params["h"], x, specs=specs["h"], axis="data")

    Raises ShardingError for what `unshard` does, where `block` captures a tensor that is being differentiated, and
    inside torch.utils.checkpoint, which does not know that weights leave memory.
    """
    if prefetch < 0:
        raise fail(f"scan: prefetch={prefetch}", fix="0 or more")
    if offload and not remat:
        raise fail("scan: offload=True keeps x before each block, and without remat there is more", fix="remat=True")
    blocks = _Blocks.of(params, specs, each, shapes)
    if not len(blocks):
        return (x, []) if has_aux else x
    live = axis and live_axes(region("scan").comm, known_axes("scan", region(), axis))
    host = not live and any_on_host(specs)
    if not (live or host or offload) or _transformed():
        x, outs = _plain(block, blocks, x, axis, bool(axis) or host, has_aux, remat, dtype, reduce_dtype)
    else:
        check_captured("scan", block)
        how = Schedule(release, remat, offload, prefetch)
        x, outs = _scheduled(block, blocks, x, axis, has_aux, how, dtype, reduce_dtype)
    return (x, blocks.like_params(outs)) if has_aux else x


@dataclass(frozen=True)
class _Blocks:
    """What each block is given: its parameters, their specs and shapes, and what belongs to it alone."""

    params: Sequence[Any]
    specs: Sequence[Any]
    shapes: Sequence[Any]
    each: Sequence[tuple[Any, ...]]  # none, or one more argument
    stacked: bool

    @staticmethod
    def of(params: Any, specs: Any, each: Sequence[Any] | None, shapes: Any) -> _Blocks:
        stacked = not isinstance(params, (list, tuple))
        rows, spec_rows, shape_rows = (_unstacked if stacked else _listed)(params, specs, shapes)
        if each is not None and len(each) != len(rows):
            raise fail(f"scan: each has {len(each)} trees for {len(rows)} blocks", fix="one for each block")
        own = [()] * len(rows) if each is None else [(one,) for one in each]
        return _Blocks(rows, spec_rows, shape_rows, own, stacked)

    def __len__(self) -> int:
        return len(self.params)

    def like_params(self, outs: list[Any]) -> Any:
        return tree.map(lambda *xs: torch.stack(xs), *outs) if self.stacked else outs


def _listed(params: Sequence[Any], specs: Any, shapes: Any) -> tuple[Any, Any, Any]:
    n = len(params)
    given = {"specs": specs, "shapes": shapes}
    for name, rows in given.items():
        if isinstance(rows, (list, tuple)) and not is_spec(rows) and len(rows) != n:
            raise fail(f"scan: {name} has {len(rows)} trees for {n} blocks", fix="one for each block, or a prefix")
    whole = specs is None or is_spec(specs)
    return params, [specs or P()] * n if whole else specs, [None] * n if shapes is None else shapes


def _unstacked(params: Any, specs: Any, shapes: Any) -> tuple[Any, Any, Any]:
    """One tree of stacked leaves as a tree for each block."""
    leaves, treedef = tree.flatten(params)
    counts = {len(x) if isinstance(x, Tensor) and x.ndim else None for x in leaves}
    if len(counts) != 1 or None in counts:
        shown = [f"{tree.show('params', path)} {list(x.shape) if isinstance(x, Tensor) else type(x).__name__}"
                 for path, x in tree.leaves_with_path(params)]  # fmt: skip
        raise fail("scan: stacked parameters have one number of blocks in front", *shown,
                   fix="stack every leaf, [blocks, ...], or give a list of trees")  # fmt: skip
    n = len(leaves[0])
    flat = [P()] * len(leaves) if specs is None else tree.broadcast(specs, params, name="specs", leaf=is_spec)
    parts = [spec.parts(x.ndim) for spec, x in zip(flat, leaves, strict=True)]
    if any(split[0] for split in parts):
        raise fail("scan: the dim of the blocks is split", fix="None first in the specs of stacked leaves",
                   specs=[s for s, split in zip(flat, parts, strict=True) if split[0]])  # fmt: skip
    rest = [P(*(axes or None for axes in split[1:]), memory=s.memory) for s, split in zip(flat, parts, strict=True)]
    rows = zip(*(x.unbind(0) for x in leaves), strict=True)
    known = None if shapes is None else tree.map(lambda s: _Shape(tuple(s.shape[1:])), shapes)
    return [tree.unflatten(treedef, row) for row in rows], [tree.unflatten(treedef, rest)] * n, [known] * n


@dataclass(frozen=True)
class _Shape:
    shape: tuple[int, ...]


def _halves(result: Any) -> tuple[Any, Any]:
    """What a block with an output gave."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise fail(f"scan: has_aux=True, and the block gave a {type(result).__name__}", fix="return (x, out)")
    return result


def _transformed() -> bool:
    """Whether a compiler or a transform of torch.func looks on, which cannot see into a schedule."""
    return torch.compiler.is_dynamo_compiling() or in_transform()


def _plain(
    block: Block, blocks: _Blocks, x: Any, axis: Axis, apart: bool, has_aux: bool, remat: bool,
    dtype: torch.dtype | None, reduce_dtype: torch.dtype | None,
) -> tuple[Any, list[Any]]:  # fmt: skip
    """The loop as it is written: what every schedule must equal. `apart` if weights may lie elsewhere, or in parts."""
    outs = []
    for p, specs, shapes, own in zip(blocks.params, blocks.specs, blocks.shapes, blocks.each, strict=True):

        def whole(p: Any, x: Any, own: Any, specs: Any = specs, shapes: Any = shapes) -> Any:
            if apart:
                p = unshard(p, specs, axis, shapes=shapes, dtype=dtype, reduce_dtype=reduce_dtype)
            elif dtype is not None:
                p = tree.map(lambda t: t.to(dtype) if t.is_floating_point() else t, p)
            return block(p, x, *own)

        result = (rematerialize(whole) if remat else whole)(p, x, own)
        x, out = _halves(result) if has_aux else (result, None)
        outs.append(out)
    return x, outs


def _scheduled(
    block: Block, blocks: _Blocks, x: Any, axis: Axis, has_aux: bool, how: Schedule, dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
) -> tuple[Any, list[Any]]:  # fmt: skip
    where, plans = region("scan"), []
    for p, specs, shapes in zip(blocks.params, blocks.specs, blocks.shapes, strict=True):
        leaves = tree.leaves(p)
        flat = tree.broadcast(specs, p, name="specs", leaf=is_spec)
        ways = routes("scan", where, leaves, flat, axis, sizes_of("scan", len(leaves), shapes))
        found = plan(where, leaves, ways, dtype, reduce_dtype)
        if found is None:  # a leaf that is gathered along two dims
            return _plain(block, blocks, x, axis, True, has_aux, how.remat, dtype, reduce_dtype)
        plans.append(found)

    def step(p: Any, x: Any, own: Any) -> tuple[Any, Any]:
        result = block(p, x, *own)
        return _halves(result) if has_aux else (result, None)

    params, each = [FlatTree.of(p) for p in blocks.params], [FlatTree.of(e) for e in blocks.each]
    walk = Executor(where, step, FlatTree.of(x), params, each,
                plans, how)  # fmt: skip
    return go(walk, x, blocks.params, blocks.each)


__all__ = ["Block", "scan"]
