"""A step of some rows of tables: the classes, or words, that a batch has a gradient for.

Legend: C rows of a table, S rows of these that are stepped; [C@axis] is a dim split over an axis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard._core.region import has_values, storage_key
from fshard._core.torch import in_transform
from fshard.errors import ShardingError, checked, fail, raise_all
from fshard.grad import is_differentiated
from fshard.spec import describe, format_tensor

from .formula import Optimizer, state_owners
from .fused import donation_test

_BLOCK = {"cpu": 1 << 20, "cuda": 1 << 24}  # elements of a block of rows, which is copied, stepped and written back


@checked
def update_rows(opt: Optimizer, rows: Tensor, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """Step some rows of tables, as `opt.update` would step tables of only these rows: (params, state).

        rows int64 [S], grads a tree of [S, ...], params of [C, ...]; on each rank the rows of its part

    Nothing else changes: other rows do not decay, nor do their moments; `count` is the number of steps of the table,
    not of a row, as in `torch.optim.SparseAdam`. Without momentum and weight decay this is the step of a dense
    gradient that is zero elsewhere, bitwise.

    Tables and moments that were donated to shard_map are written in place, and nothing of their size is made: `sgd` and
    `adamw` copy a block of rows at a time, a `chain` all S of them. Other tables are copied.

    Args:
        rows: ascending, each once: those that this rank has of `nn.sample_classes`, counted from its first.
        grads: gradients with respect to `w[rows]`, for each table `w` in `params`.

    >>> opt, params = sgd(0.5, momentum=0.9), {"w": torch.zeros(3, 2)}
    >>> grads = {"w": torch.ones(1, 2)}
    >>> update_rows(opt, torch.tensor([1]), grads, opt.init(params), params)[0]["w"].tolist()
    [[0.0, 0.0], [-0.5, -0.5], [0.0, 0.0]]

    Raises ShardingError, before anything is written, for rows that are not ascending or that the tables do not have,
    gradients of other shapes, a table that is twice in `params`, and integers.
    """
    tables, gradients, moments, by_rows = _checked(opt, rows, grads, state, params)
    treedef, state_def = tree.structure(params), tree.structure(state)
    pure = in_transform() or any(map(is_differentiated, [*tables, *gradients, *moments]))
    copied = Tensor.index_copy if pure else Tensor.index_copy_
    if not pure:
        is_donated = donation_test()
        gradients = [g.clone() if is_donated(g) else g for g in gradients]  # read before a block is written over it
        tables = [x.detach() if is_donated(x) else x.detach().clone() for x in tables]
        moments = [x.detach() if not row or is_donated(x) else x.detach().clone()
                   for x, row in zip(moments, by_rows, strict=True)]  # fmt: skip
    at_once = len(rows)
    if opt.elementwise and tables:  # a chain may need all of the gradients: their norm
        at_once = _BLOCK.get(tables[0].device.type, 1 << 24) // max([1, *(x[:1].numel() for x in tables)])
    before = moments  # each block begins with the count, or the norm, of before
    for part, *gs in zip(*(torch.split(x, max(1, at_once)) for x in (rows, *gradients)), strict=True):
        new_params, new_state = opt.update(
            tree.unflatten(treedef, gs),
            tree.unflatten(state_def, [_take(x, part) if row else old
                                       for x, old, row in zip(moments, before, by_rows, strict=True)]),
            tree.unflatten(treedef, [_take(x, part) for x in tables]),
        )  # fmt: skip
        tables = [copied(x, 0, part.to(x.device), new) for x, new in zip(tables, tree.leaves(new_params), strict=True)]
        moments = [copied(x, 0, part.to(x.device), new) if row else new
                   for x, new, row in zip(moments, tree.leaves(new_state), by_rows, strict=True)]  # fmt: skip
    return tree.unflatten(treedef, tables), tree.unflatten(state_def, moments)


def _take(x: Tensor, rows: Tensor) -> Tensor:
    return x.index_select(0, rows.to(x.device))


def _checked(
    opt: Optimizer, rows: Tensor, grads: Any, state: Any, params: Any
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[bool]]:
    """Return the leaves of params, grads and state, and which of the state have the tables' rows. Refuse wrong ones."""
    if torch.compiler.is_dynamo_compiling():
        raise fail("update_rows: a compiled program has fixed shapes, and the number of rows changes from step to step",
                   fix="leave out compile=True")  # fmt: skip
    for name, x in (("params", params), ("grads", grads), ("state", state)):
        tree.check_leaves("update_rows", name, x, Tensor)
    if rows.dtype != torch.int64 or rows.ndim != 1:
        raise fail(f"update_rows: rows are {describe(rows)}", fix="int64 [S]")
    if opt.reads_leaf:
        raise fail(f"update_rows: a step of {opt.name} needs full leaves, and these are only some rows",
                   fix="an optimizer whose step is elementwise: optim.sgd, optim.adamw")  # fmt: skip
    tables = tree.leaves_with_path(params)
    try:
        owners, state_def = state_owners(opt, params)
    except ShardingError as e:  # zero's
        raise fail(f"update_rows: {opt.name} places its state by specs of its own, not by those of the tables",
                   fix="another optimizer for these tables, optim.sgd or optim.adamw") from e  # fmt: skip
    by_rows = [owner is not None for owner in owners]
    if tree.structure(grads) != tree.structure(params):
        raise fail("update_rows: grads is not a tree like params", fix="the gradients of exactly these tables")
    if tree.structure(state) != state_def:
        raise fail(f"update_rows: the state is not that of {opt.name}", fix="state = opt.init(params)")
    heights = {x.shape[0] if x.ndim else -1 for _, x in tables}
    first: dict[Any, str] = {}
    errors = []
    for (path, x), g in zip(tables, tree.leaves(grads), strict=True):
        name, got = tree.show("params", path), describe(x)
        needed = format_tensor(x.dtype, (len(rows), *x.shape[1:]))
        place = id(x) if in_transform() else (storage_key(x), x.storage_offset())
        if x.numel() and place in first:
            errors.append(fail(f"update_rows: {name} is {first[place]}: its rows would be stepped twice",
                               fix="one table once in the tree, with the sum of its gradients"))  # fmt: skip
        first[place] = name
        if not x.is_floating_point():
            errors.append(fail(f"update_rows: {name}: {got} is not floating", fix="keep it in another tree"))
        elif len(heights) > 1 or not x.ndim:
            errors.append(fail(f"update_rows: {name}: {got} is not a table with the rows of the others",
                               fix="one call for each number of rows"))  # fmt: skip
        elif describe(g) != needed:
            errors.append(fail(f"update_rows: {tree.show('grads', path)}: is {describe(g)}",
                               fix=f"{needed}, for {len(rows)} rows of {name}"))  # fmt: skip
    raise_all(errors)
    n = heights.pop() if heights else 0
    raise_all([fail(f"update_rows: {tree.show('state', path)}: is {describe(x)}, its table has {n} rows",
                    fix="state = opt.init(params)")
               for (path, x), row in zip(tree.leaves_with_path(state), by_rows, strict=True)
               if row and (not x.ndim or x.shape[0] != n)])  # fmt: skip
    is_known = not in_transform() and has_values()
    if is_known and len(rows) and (int(rows[0]) < 0 or int(rows[-1]) >= n or bool((rows.diff() <= 0).any())):
        raise fail("update_rows: rows are not ascending, each once, of those of the tables", rows=rows.tolist()[:8],
                   needed=f"0 to {n - 1}", fix="rows = (classes - first).unique()")  # fmt: skip
    return [x for _, x in tables], tree.leaves(grads), tree.leaves(state), by_rows
