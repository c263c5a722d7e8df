"""Load a global batch onto a mesh: each rank fetches only its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fshard import tree
from fshard._core.host_memory import memory_device
from fshard.errors import ShardingError, checked, fail, raise_all
from fshard.mesh import Mesh
from fshard.random.orders import Integers, Rows, integers
from fshard.sharded import Sharded, array_dtype, as_tensor, from_callback
from fshard.spec import Box, P, describe, format_tensor, is_spec, local_box, spec_errors

RowRange = tuple[int, int]  # start and stop in the global batch

_SPLIT_ROWS = P("data")


@checked
def load(fetch: Callable[[Rows], Any], indices: Integers, *, mesh: Mesh, spec: Any = _SPLIT_ROWS) -> Any:
    """Load the examples of a batch onto `mesh`: every rank fetches only the rows of its part.

    Replicas (over `model`, say) have the same examples; on a simulated mesh `fetch` is called once for each
    different part. Nothing is communicated.

    Args:
        fetch: from the numbers of some examples to a tensor, an array, or a tree of them, with a row for each
            in dim 0 and the same other dims on every rank. The numbers are a numpy array, which indexes
            arrays and tensors alike (a tensor of one element drops a dim of an array). A rank whose part is
            empty fetches no rows, to learn the dtype and the other dims.
        indices: the global batch, [B].
        spec: a spec, or a prefix tree of specs that all split dim 0 by the same axes; other dims are sliced after
            fetching.

    >>> batch = indices(key, step=step, size=len(images), batch=256)
    >>> load(lambda i: {"x": images[i], "y": labels[i]}, batch, mesh=fs.make_mesh(data=4))
    {'x': f32[256@data, 3, 32, 32], 'y': i64[256@data]}

    Raises ShardingError listing every leaf that is not a tensor, does not have a row per index, or does not fit
    its spec.
    """
    examples = integers("load: indices", indices)
    if examples.ndim != 1:
        raise fail(f"load: indices of shape {list(examples.shape)}", fix="one dim: the examples of the batch")
    split = next((of_rows(s) for s in tree.leaves(spec) if is_spec(s)), P())
    raise_all(spec_errors("load", examples.shape, split, mesh.axes))
    parts: dict[RowRange, Any] = {}
    for rank in mesh.ranks:
        (rows,) = local_box(examples.shape, split, mesh.axes, mesh.coords(rank))
        if (rows.start, rows.stop) not in parts:
            parts[rows.start, rows.stop] = fetch(examples[rows].copy())

    first = next(iter(parts.values()))
    treedef = tree.structure(first)
    for part in parts.values():
        if tree.structure(part) != treedef:
            raise fail("load: fetch returned another tree for other rows", f"{treedef}\n{tree.structure(part)}",
                       fix="return the same keys for any rows")  # fmt: skip
    columns = zip(*(tree.leaves(part) for part in parts.values()), strict=True)
    specs = tree.broadcast(spec, first, name="load: spec", leaf=is_spec)
    errors: list[ShardingError] = []
    placed: list[Sharded] = []
    for (path, _), column, leaf_spec in zip(tree.leaves_with_path(first), columns, specs, strict=True):
        label = f"load: {tree.show('batch', path)}"
        try:
            tensors = {rows: _tensor(label, x) for rows, x in zip(parts, column, strict=True)}
            shape = (examples.size, *_row_shape(label, tensors))
            placed.append(_place(label, tensors, shape, leaf_spec, split, mesh))
        except ShardingError as e:
            errors.append(e)
    raise_all(errors)
    return tree.unflatten(treedef, placed)


def of_rows(spec: P, ndim: int | None = None) -> P:
    """Return the spec of dim 0, of `ndim` dims or as many as the spec has entries."""
    return spec.with_entries(spec.parts(ndim or max(1, len(spec.entries)))[0], memory="device")


def _row_shape(label: str, parts: dict[RowRange, Tensor]) -> tuple[int, ...]:
    """Return the shape of one row, the same in all parts."""
    for (start, stop), part in parts.items():
        if part.ndim == 0 or part.shape[0] != stop - start:
            raise fail(f"{label}: fetch returned {describe(part)} for {stop - start} examples",
                       fix="return a row for each, in dim 0")  # fmt: skip
    shapes = {format_tensor(part.dtype, part.shape[1:]): tuple(part.shape[1:]) for part in parts.values()}
    if len(shapes) > 1:
        raise fail(f"{label}: the rows differ between parts", f"a row is {' or '.join(shapes)}",
                   fix="pad to one shape, and use one dtype")  # fmt: skip
    return next(iter(shapes.values()))


def _place(label: str, parts: dict[RowRange, Tensor], shape: tuple[int, ...], spec: P, split: P, mesh: Mesh) -> Sharded:
    raise_all(spec_errors(label, shape, spec, mesh.axes))
    if of_rows(spec, len(shape)) != split:
        raise fail(f"{label}: its spec is {spec}, other leaves split dim 0 by {split}",
                   fix="split dim 0 by the same axes in every leaf, and fs.reshard afterwards")  # fmt: skip

    def copy_part(box: Box) -> Tensor:
        # A copy: fetch may return views of the data set, which a donated batch would overwrite.
        part = parts[box[0].start, box[0].stop][(slice(None), *box[1:])]
        return part.to(memory_device(spec, mesh.device), copy=True, memory_format=torch.contiguous_format)

    return from_callback(shape, spec, mesh, copy_part)


def _tensor(label: str, x: Any) -> Tensor:
    if isinstance(x, Tensor):
        return x.detach()
    if not isinstance(x, np.ndarray):
        raise fail(f"{label}: fetch returned a {type(x).__name__}",
                   fix="return tensors or numpy arrays, or a tree of them")  # fmt: skip
    if array_dtype(x) is None:
        raise fail(f"{label}: fetch returned an array of {x.dtype}", fix="return numbers")
    return as_tensor(x)
