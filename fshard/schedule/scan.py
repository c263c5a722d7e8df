"""The block loop as a function: All-gather each block's weights just before it runs; free them after.

Source: Zhao et al., 2023, "PyTorch FSDP", for the schedule; `jax.lax.scan` for the form.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard import tree
from fshard._core.region import live_axis, region
from fshard._core.torch import any_tangent, in_transform
from fshard._core.weight import is_weight
from fshard.errors import ShardingError, checked, fail, must_be
from fshard.grad import split_tensors
from fshard.spec import Axis, P, any_on_host, describe, is_spec

from .block_loop import Executor, FlatTree, ScanOptions, run_blocks
from .buckets import BucketPlan, plan_buckets
from .options import BackwardPrefetch, Release
from .remat import check_captured
from .remat import remat as rematerialize
from .unshard import make_whole, placements, routes

# (parameters of a block, x[, the block's extra argument]) -> x, or (x, an output of the block)
Block = Callable[..., Any]


@checked
def scan(
    block: Block, params: Any, x: Any, *, specs: Any, axis: Axis, each: Sequence[Any] | Tensor | None = None,
    shapes: Any = None, has_aux: bool = False, release: Release = True, remat: bool = False, offload: bool = False,
    prefetch: int = 1, backward_prefetch: BackwardPrefetch = None, dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """Apply a stack of blocks to x, each unsharded over `axis` just before it runs: FSDP's schedule as a function.

        block: (params of one block {V axis}, x) -> x          scan: (all params {by specs}, x) -> x

    The result equals `for p, s in zip(params, specs): x = block(unshard(p, s, axis), x)`. The schedule differs:
    `prefetch` blocks are gathered while one computes, forward and backward; at most `prefetch + 1` gathered blocks
    (of the larger prefetch) exist at a time, including blocks in transfer; gradients are summed over the ranks while
    earlier blocks compute theirs. Leaves whose specs lack the axis (data parallel) are used without a copy, and their
    gradients are summed. Leaves in host memory (`P(..., memory="host")`) are copied to the device one block
    before their gather, and freed there after use.

    Args:
        params: a list of one tree for each block, or one tree whose leaves are stacked, [blocks, ...].
        specs: of the params, a prefix tree; the stacked dim is not split. `None`: nothing is split over `axis`.
        each: a list of one tree for each block, passed to it as a third argument: keys, caches; or a tensor,
            [blocks, ...].
        shapes: as for `unshard`, needed only for leaves that the axis does not divide.
        has_aux: `block` returns `(x, out)`; then the result is `(x, outs)`, a list, or stacked like the parameters.
        release: free gathered weights after use and gather them again in backward; if False, keep them. With one or
            more axes of `axis`, keep weights split only over these between forward and backward, and gather only over
            these in backward: more memory, and less traffic over the other axes.
        remat: keep only x before each block, and tensors saved after the last transfer of a block that has any; in
            backward recompute the block up to its last saved tensor or before that transfer.
        offload: with `remat`, keep x before each block in host memory, and copy it back one block ahead.
        prefetch: number of blocks to gather ahead; 0 gathers when needed.
        backward_prefetch: the same in backward, by default equal to `prefetch`; "post" gathers one block ahead after
            the gradients of a block are computed, while they are summed: with prefetch=0 it keeps one gathered block
            fewer in memory than 1.
        dtype, reduce_dtype: as for `unshard`: mixed precision.

    Transfers, for each dtype of a block: a gather in forward, one in backward (except for the last `prefetch + 1`
    blocks, which are still gathered; the larger prefetch counts), and one sum. Frozen leaves have no gradient: no
    buffer and no transfer. In a compiled program, and under a transform of torch.func, it is the plain loop: same
    numbers, without `release` and `offload`.

    >>> x = scan(block, params["h"], x, specs=specs["h"], axis="data")

    Raises ShardingError for the errors of `unshard`, if `block` captures a tensor that is being differentiated, for a
    second backward pass, and inside torch.utils.checkpoint, which does not know that weights are freed.
    """
    options = ScanOptions(release, prefetch, backward_prefetch, remat, offload)
    options.check("scan", axis)
    if offload and not remat:
        raise fail("scan: offload=True offloads x before each block, and without remat=True more is kept",
                   fix="remat=True")  # fmt: skip
    tree.check_leaves("scan", "params", params, Tensor)
    if isinstance(params, Tensor) and not (isinstance(x, Tensor) or specs is None or is_spec(specs)):
        raise _swapped(f"params is {describe(params)}, one tensor, and x and specs are trees")
    blocks = _blocks(params, specs, each.unbind() if isinstance(each, Tensor) else each, shapes)
    if not blocks:
        return (x, []) if has_aux else x
    live = live_axis("scan", axis)
    host = not live and any_on_host(specs)
    split = _check_pair if has_aux else _check_single if not isinstance(x, tuple) else lambda x: (x, None)
    plans = None
    # Neither a compiler nor a transform of torch.func can trace a schedule; its buffers have no tangents.
    if (live or host or offload) and not (
        torch.compiler.is_dynamo_compiling() or in_transform() or any_tangent(split_tensors((params, x, each))[0])
    ):
        plans = _plans(blocks, axis, dtype, reduce_dtype)
    if plans is not None or remat:
        check_captured("scan", block, _EACH)
    if plans is not None:
        step = lambda p, x, extra: split(_run(block, p, x, extra))  # noqa: E731
        block_params, block_each = [b.params for b in blocks], [b.each for b in blocks]
        flat_x, nothing, *flat_params = map(FlatTree.from_tree, (x, (), *block_params))
        flat_each = [FlatTree.from_tree(extra) if extra else nothing for extra in block_each]
        executor = Executor(region("scan"), step, flat_x, flat_params, flat_each, plans, options)
        x, outs = run_blocks(executor, x, block_params, block_each)
    else:  # the definition that every schedule must equal
        outs = []
        for b in blocks:

            def run(p: Any, x: Any, extra: Any, specs: Any = b.specs, shapes: Any = b.shapes) -> Any:
                p = make_whole(p, specs, axis, shapes=shapes, dtype=dtype, reduce_dtype=reduce_dtype)
                return _run(block, p, x, extra)

            x, out = split((rematerialize(run) if remat else run)(b.params, x, b.each))
            outs.append(out)
    if not has_aux:
        return x
    return x, outs if isinstance(params, (list, tuple)) else tree.map(lambda *each: torch.stack(each), *outs)


class _BlockArgs(NamedTuple):
    """The arguments of a block: its parameters, their specs and shapes, and its extra argument, if there is one."""

    params: Any
    specs: Any
    shapes: Any
    each: tuple[Any, ...]


def _blocks(params: Any, specs: Any, each: Sequence[Any] | None, shapes: Any) -> list[_BlockArgs]:
    rows = (_as_lists if isinstance(params, (list, tuple)) else _unstack)(params, specs, shapes)
    n = len(rows[0])
    if each is not None and len(each) != n:
        raise fail(f"scan: each has {len(each)} trees for {n} blocks", fix="one for each block")
    return list(map(_BlockArgs, *rows, [()] * n if each is None else [(one,) for one in each]))


def _plans(
    blocks: Sequence[_BlockArgs], axis: Axis, dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> list[BucketPlan] | None:
    """Return the buckets of each block; `None` if a leaf is gathered along two dims, which has no schedule."""
    current, plans = region("scan"), []
    known: dict[Any, BucketPlan] = {}  # most blocks are alike
    for block in blocks:
        leaves = tree.leaves(block.params)
        leaf_specs, sizes = placements("scan", block.params, block.specs, block.shapes)
        kind = (*leaf_specs, *sizes, *[(x.shape, x.dtype, x.device) for x in leaves])
        plan = known.get(kind)
        if plan is None:
            leaf_routes = routes("scan", current, block.params, leaves, leaf_specs, axis, sizes)
            plan = plan_buckets(current, leaves, leaf_routes, dtype, reduce_dtype)
            if plan is None:
                return None
            if not current.uneven:  # else equal parts here may be unequal ones elsewhere, and ranks exchange sizes
                known[kind] = plan
        plans.append(plan)
    return plans


def _as_lists(params: Sequence[Any], specs: Any, shapes: Any) -> tuple[Any, Any, Any]:
    """Return params, specs and shapes as one tree for each block."""
    n = len(params)
    if n == 2 and isinstance(params[1], Tensor) and not isinstance(params[0], Tensor):  # the xs of lax.scan
        raise fail("scan: params is a pair of a tree and a tensor",
                   fix="fs.scan(block, params[0], x, each=params[1], ...), with block(params, x, one of each)"
                   )  # fmt: skip
    for name, rows in {"specs": specs, "shapes": shapes}.items():
        if rows is None or (name == "specs" and is_spec(rows)):
            continue
        if not isinstance(rows, (list, tuple)):
            raise must_be(f"scan: {name}", "a list of one tree for each block, as params is", rows)
        if len(rows) != n:
            raise fail(f"scan: {name} has {len(rows)} trees for {n} blocks", fix="one for each block, or a prefix")
    prefix = specs is None or is_spec(specs)
    return params, [specs or P()] * n if prefix else specs, [None] * n if shapes is None else shapes


def _unstack(params: Any, specs: Any, shapes: Any) -> tuple[Any, Any, Any]:
    """Return stacked params, their specs and shapes as one tree for each block."""
    if any(map(is_weight, tree.leaves(params, is_weight))):
        raise fail("scan: one of the stacked parameters is a Weight", fix="pass a list of trees, one for each block")
    leaves, treedef = tree.flatten(params)
    named = [tree.show("params", path) for path, _ in tree.leaves_with_path(params)]
    flat = [P()] * len(leaves) if specs is None else tree.broadcast(specs, params, name="specs", leaf=is_spec)
    parts = [spec.parts(x.ndim) if isinstance(x, Tensor) else () for spec, x in zip(flat, leaves, strict=True)]
    if split := [f"{name}  {spec}" for name, spec, dims in zip(named, flat, parts, strict=True) if dims and dims[0]]:
        raise fail("scan: the dim of the blocks, dim 0 of stacked leaves, is split", *split,
                   fix='fs.fully_shard(..., stacked="blocks.**"), or None first in these specs; or a list of one tree '
                       "for each block")  # fmt: skip
    counts = {len(x) if isinstance(x, Tensor) and x.ndim else None for x in leaves}
    if len(counts) != 1 or None in counts:
        shown = [f"{name} {list(x.shape) if isinstance(x, Tensor) else type(x).__name__}"
                 for name, x in zip(named, leaves, strict=True)]  # fmt: skip
        raise fail("scan: stacked parameters must all have the number of blocks as dim 0", *shown,
                   fix="stack every leaf, [blocks, ...], or pass a list of trees")  # fmt: skip
    n = len(leaves[0])
    rest = [s.with_entries(*dims[1:]) for s, dims in zip(flat, parts, strict=True)]
    rows = zip(*(x.unbind(0) for x in leaves), strict=True)
    known = None if shapes is None else tree.map(lambda s: SimpleNamespace(shape=s.shape[1:]), shapes)
    return [tree.unflatten(treedef, row) for row in rows], [tree.unflatten(treedef, rest)] * n, [known] * n


def _check_pair(result: Any) -> tuple[Any, Any]:
    """Return the (x, out) of a block with has_aux. Raises ShardingError if it is not a pair."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise fail(f"scan: has_aux=True, and the block returned a {type(result).__name__}", fix="return (x, out)")
    return result


def _check_single(result: Any) -> tuple[Any, Any]:
    """Return (x, None) for the x of a block. Raises ShardingError if it is a pair as in lax.scan, and x is not."""
    if isinstance(result, tuple) and len(result) == 2:
        pair = "(x, None)" if result[1] is None else "a pair, and x is not one"
        raise fail(f"scan: the block returned {pair}", fix="return x; for an output of each block, has_aux=True")
    return result, None


_EACH = "pass {0!r} as the block's third argument: each=[{0}] * (number of blocks), and block(params, x, {0})"
_FIRST, _SECOND = {"x", "h", "c", "carry"}, {"p", "params", "w", "weights", "layer", "xs"}  # names in lax.scan's order


def _run(block: Block, p: Any, x: Any, extra: tuple[Any, ...]) -> Any:
    """Run a block. An error is explained if the arguments seem to be in the order of lax.scan."""
    if torch.compiler.is_dynamo_compiling():  # its own exceptions, in tracing, are not the block's
        return block(p, x, *extra)
    try:
        return block(p, x, *extra)
    except Exception as e:
        names = [*inspect.signature(block).parameters, "", ""]
        if not (isinstance(p, Tensor) > isinstance(x, Tensor) or (names[0] in _FIRST and names[1] in _SECOND)):
            raise
        raise _swapped(f"{type(e).__name__}: {e}") from e


def _swapped(why: str) -> ShardingError:
    return fail("scan: the arguments seem to be in the order of lax.scan", why,
                fix="fs.scan(block, params, x, specs=, axis=, each=), with block(params, x), which returns x"
                )  # fmt: skip
