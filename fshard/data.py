"""Data order as a pure function: (key, step) -> the global batch. Each rank reads only its own rows of it.

There is no loader object and no state beyond the step number: resuming at a step is calling with that step.
The batches are the same on every mesh, because a mesh only decides which rank reads which rows.

Legend: B global batch, L length of a crop.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import tree
from ._comm import memory_device
from .errors import ShardingError, checked, fail, raise_all
from .mesh import Mesh
from .random import check_key, fold_in
from .sharded import Sharded, from_callback
from .spec import Box, P, describe, is_spec, local_box, spec_errors

Rows = npt.NDArray[np.int64]
Integers = Tensor | Rows | Sequence[int]
RowRange = tuple[int, int]  # start and stop in the global batch
Words = npt.NDArray[np.uint64]

_ROUNDS = 20  # with 16, the orders of 5 to 7 examples are not equally likely, as 400,000 keys show
_LARGEST = 1 << 62
_SPLIT_ROWS = P("data")


@checked
def permute(key: Tensor, positions: Integers, *, size: int) -> Tensor:
    """Map `positions` by a random permutation of range(size): int64 [*S] -> int64 [*S].

    Only these positions are computed, so a `size` of up to 2^62 costs no memory, and a part of the order equals that
    part of the whole order.

    >>> permute(fs.key(0), range(10), size=10).sort().values.tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]

    Raises ShardingError for positions outside range(size).

    Source: the generalized Feistel network with cycle walking of Black & Rogaway, 2002, "Ciphers with
    arbitrary finite domains". Its round function is the finalizer of SplitMix64 (Steele, Lea & Flood, 2014),
    its round keys are `fold_in(key, round)`. It gives an order, not secrecy.
    """
    check_key("permute", key)
    if not 1 <= size <= _LARGEST:
        raise fail(f"permute: size={size}", fix="a size from 1 to 2^62")
    at = _integers("permute: positions", positions)
    if at.size and (at.min() < 0 or at.max() >= size):
        raise fail(f"permute: positions outside range({size})", f"they range from {at.min()} to {at.max()}",
                   fix="0 <= position < size")  # fmt: skip
    keys = _round_keys(*key.tolist())
    rows = (math.isqrt(size - 1) // 2 + 1) * 2  # even: of a grid with odd sides, rounds make only even permutations
    columns = -(-size // rows)
    out = _shuffle(at.reshape(-1).astype(np.uint64), rows, columns, keys)
    # Cycle walking: a bijection of a slightly larger range, applied until the result is inside, is one of the range.
    while (outside := np.flatnonzero(out >= size)).size:
        out[outside] = _shuffle(out[outside], rows, columns, keys)
    return torch.from_numpy(out.astype(np.int64)).reshape(at.shape)


def _shuffle(x: Words, rows: int, columns: int, keys: Sequence[Words]) -> Words:
    """Apply a bijection of range(rows * columns), a grid: rotate columns by a hash of the row, and the reverse."""
    n, m = np.uint64(rows), np.uint64(columns)
    row, column = x // m, x % m
    for i, key in enumerate(keys):
        if i % 2:
            column = (column + _mix(row ^ key) % m) % m
        else:
            row = (row + _mix(column ^ key) % n) % n
    return row * m + column


def _mix(x: Words) -> Words:
    """Mix the bits of x by the finalizer of SplitMix64. Products wrap."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@functools.lru_cache(maxsize=64)
def _round_keys(first: int, second: int) -> tuple[Words, ...]:
    """Return a 64-bit word for each round, as arrays, whose products wrap without a warning."""
    words = [fold_in(torch.tensor([first, second], device="cpu"), i).tolist() for i in range(_ROUNDS)]
    return tuple(np.array([a | b << 32], dtype=np.uint64) for a, b in words)


@checked
def steps_per_epoch(size: int, batch: int, *, drop_last: bool = True) -> int:
    """Return the number of batches in one pass over `size` examples; without `drop_last` the last may be smaller.

    >>> steps_per_epoch(10, 4), steps_per_epoch(10, 4, drop_last=False)
    (2, 3)

    Raises ShardingError if that is no batch.
    """
    if size < 1 or batch < 1:
        raise fail(f"steps_per_epoch: size={size}, batch={batch}", fix="both are 1 or more")
    if drop_last and size < batch:
        raise fail(f"steps_per_epoch: {size} examples do not fill a batch of {batch}", f"{size} < {batch}",
                   fix=f"batch={size} or less, or drop_last=False")  # fmt: skip
    return size // batch if drop_last else -(-size // batch)


@checked
def indices(
    key: Tensor | None, *, step: int, size: int, batch: int, epoch: int | None = None, drop_last: bool = True
) -> Tensor:
    """Return the examples of the global batch of one step, out of `size`: int64 [B], the same on every rank.

    Each epoch has its own order of the examples, that of `fold_in(key, epoch)`. Step 1,000,000 costs as much as step 0.

    Args:
        key: `None` leaves the examples in their order, for evaluation.
        step: counts from the start of training; with `epoch`, from the start of that epoch.
        drop_last: leave out the `size % batch` examples that do not fill a batch, different ones in every epoch.
            Without it the last batch of an epoch is smaller.

    >>> indices(fs.fold_in(fs.key(0), "data"), step=1000, size=50_000, batch=256).shape
    torch.Size([256])
    >>> indices(None, step=2, size=10, batch=4, drop_last=False)
    tensor([8, 9])

    Raises ShardingError for a negative step, a step past the end of `epoch`, and where no batch can be filled.
    """
    steps = steps_per_epoch(size, batch, drop_last=drop_last)
    if step < 0 or (epoch is not None and epoch < 0):
        raise fail(f"indices: step={step}, epoch={epoch}", fix="both count from 0")
    if epoch is not None and step >= steps:
        lines = f"{size} examples in batches of {batch} are {steps} steps, 0 to {steps - 1}"
        fix = "leave out epoch= to count steps from the start of training"
        raise fail(f"indices: epoch {epoch} has no step {step}", lines, fix=fix)
    epoch, step = divmod(step, steps) if epoch is None else (epoch, step)
    positions = torch.arange(step * batch, min((step + 1) * batch, size))  # [B]
    return positions if key is None else permute(fold_in(key, epoch), positions, size=size)


@checked
def load(fetch: Callable[[Rows], Any], indices: Integers, *, mesh: Mesh, spec: Any = _SPLIT_ROWS) -> Any:
    """Load the batch of these examples onto `mesh`: every rank fetches only the rows of its part.

    Replicas (over `model`, say) have the same examples; on a simulated mesh `fetch` is called once for each
    different part. Nothing is communicated.

    Args:
        fetch: from the numbers of some examples to a tensor, an array, or a tree of them, with a row for each
            in dim 0 and the same other dims on every rank. The numbers are a numpy array, which indexes
            arrays and tensors alike (a tensor of one element drops a dim of an array). A rank whose part is
            empty fetches no rows, to learn the dtype and the other dims.
        indices: the global batch, [B].
        spec: a spec, or a prefix tree of specs that split dim 0 alike; other dims are sliced after fetching.

    >>> batch = indices(key, step=step, size=len(images), batch=256)
    >>> load(lambda i: {"x": images[i], "y": labels[i]}, batch, mesh=fs.make_mesh(data=4))
    {'x': f32[256@data, 3, 32, 32], 'y': i64[256@data]}

    Raises ShardingError listing every leaf that is no tensor, has no row per index, or does not fit its spec.
    """
    examples = _integers("load: indices", indices)
    if examples.ndim != 1:
        raise fail(f"load: indices of shape {list(examples.shape)}", fix="one dim: the examples of the batch")
    split = next((s.parts(max(1, len(s.entries)))[0] for s in tree.leaves(spec) if is_spec(s)), ())
    raise_all(spec_errors("load", examples.shape, P(split), mesh.axes))
    parts: dict[RowRange, Any] = {}
    for rank in mesh.ranks:
        (rows,) = local_box(examples.shape, P(split), mesh.axes, mesh.coords(rank))
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


def _row_shape(label: str, parts: dict[RowRange, Tensor]) -> tuple[int, ...]:
    """Return the shape of one row, the same in all parts."""
    for (start, stop), part in parts.items():
        if part.ndim == 0 or part.shape[0] != stop - start:
            raise fail(f"{label}: fetch returned {describe(part.dtype, part.shape)} for {stop - start} examples",
                       fix="return a row for each, in dim 0")  # fmt: skip
    shapes = {describe(part.dtype, part.shape[1:]): tuple(part.shape[1:]) for part in parts.values()}
    if len(shapes) > 1:
        raise fail(f"{label}: the rows differ between parts", f"a row is {' or '.join(shapes)}",
                   fix="pad to one shape, and use one dtype")  # fmt: skip
    return next(iter(shapes.values()))


def _place(
    label: str, parts: dict[RowRange, Tensor], shape: tuple[int, ...], spec: P, split: tuple[str, ...], mesh: Mesh
) -> Sharded:
    raise_all(spec_errors(label, shape, spec, mesh.axes))
    if spec.parts(len(shape))[0] != split:
        raise fail(f"{label}: its spec is {spec}, other leaves split dim 0 by {P(split)}",
                   fix="split dim 0 alike in every leaf, and fs.reshard afterwards")  # fmt: skip

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
    try:
        return torch.from_numpy(np.require(x, requirements=["C", "W"]))
    except TypeError:
        raise fail(f"{label}: fetch returned an array of {x.dtype}", fix="return numbers") from None


def _integers(name: str, x: Integers) -> Rows:
    if isinstance(x, Tensor) and (x.is_meta or x.dtype == torch.bfloat16):  # no array can have it
        raise fail(f"{name} are {'on the meta device' if x.is_meta else 'bfloat16'}", fix="integers")
    array = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise fail(f"{name} are {array.dtype}", fix="integers")
    return array.astype(np.int64)


@checked
def crop(text: Tensor | npt.NDArray[Any], starts: Integers, *, length: int) -> Tensor:
    """Slice windows out of a long 1-d array of tokens: starts [B] -> int64 [B, L].

    Reads only the pages of these windows from a memory map. Starts count tokens: `window * length` gives adjacent
    windows.

    >>> crop(np.arange(100, dtype=np.uint16), [0, 50], length=3)
    tensor([[ 0,  1,  2],
            [50, 51, 52]])

    Raises ShardingError for a window that reaches past either end.
    """
    if length < 0:
        raise fail(f"crop: length={length}", fix="0 or more")
    at = _integers("crop: starts", starts)
    if text.ndim != 1 or at.ndim != 1:
        raise fail(f"crop: text {list(text.shape)}, starts {list(at.shape)}", fix="both have one dim")
    last = len(text) - length
    if at.size and (at.min() < 0 or at.max() > last):
        raise fail(f"crop: starts from {at.min()} to {at.max()} reach past the text",
                   f"{len(text)} - {length} = {last}", fix="0 <= start <= len(text) - length")  # fmt: skip
    positions = at[:, None] + np.arange(length)  # [B, L]
    if isinstance(text, Tensor):
        return text[torch.from_numpy(positions).to(text.device)].long()
    return torch.from_numpy(np.asarray(text[positions]).astype(np.int64))
