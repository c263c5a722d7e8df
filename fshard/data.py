"""Data order as a pure function: (key, step) -> the global batch, of which each rank reads its own rows only.

There is no loader object and no state beyond the step number: resuming at a step is calling with that step.
The batches are the same on every mesh, because a mesh only decides who reads which rows.

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
from .errors import ShardingError, fail, raise_all
from .mesh import Mesh
from .random import check_key, fold_in
from .sharded import Sharded, from_callback
from .spec import Box, P, describe, is_spec, local_box, spec_errors

Rows = npt.NDArray[np.int64]
Integers = Tensor | Rows | Sequence[int]
Cut = tuple[int, int]  # start and stop in the global batch
Words = npt.NDArray[np.uint64]

_ROUNDS = 20  # with 16, the orders of 5 to 7 examples are measurably not equally likely: 400,000 keys tell
_LARGEST = 1 << 62
_BY_ROW = P("data")


def permute(key: Tensor, positions: Integers, *, size: int) -> Tensor:
    """Where a random permutation of range(size) sends each of `positions`: int64 [*S] -> int64 [*S].

    Only the positions asked for are computed, so a `size` of up to 2^62 costs no memory, and a part of the
    order is that part of the whole order.

    >>> permute(fs.key(0), range(10), size=10).sort().values.tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]

    Raises ShardingError for positions outside of range(size).

    Source: the generalized Feistel network with cycle walking of Black & Rogaway, 2002, "Ciphers with
    arbitrary finite domains". Its round function is the finalizer of SplitMix64 (Steele, Lea & Flood, 2014),
    its round keys are `fold_in(key, round)`. It gives an order, not secrecy.
    """
    check_key("permute", key)
    if not 1 <= size <= _LARGEST:
        raise fail(f"permute: size={size}", fix="a size from 1 to 2^62")
    at = _integers("permute: positions", positions)
    if at.size and (at.min() < 0 or at.max() >= size):
        lines = f"they go from {at.min()} to {at.max()}"
        raise fail(f"permute: positions outside of range({size})", lines, fix="0 <= position < size")
    keys = _round_keys(*key.tolist())
    tall = (math.isqrt(size - 1) // 2 + 1) * 2  # even: moves in a grid of odd sides are all even permutations
    wide = -(-size // tall)
    out = _shuffle(at.reshape(-1).astype(np.uint64), tall, wide, keys)
    # A bijection of a slightly larger range, followed until it is back inside, is a bijection of the range.
    while (outside := np.flatnonzero(out >= size)).size:
        out[outside] = _shuffle(out[outside], tall, wide, keys)
    return torch.from_numpy(out.astype(np.int64)).reshape(at.shape)


def _shuffle(x: Words, tall: int, wide: int, keys: Sequence[Words]) -> Words:
    """A bijection of range(tall * wide), as a grid: a hash of the column moves the row, then the reverse."""
    n, m = np.uint64(tall), np.uint64(wide)
    row, column = x // m, x % m
    for i, key in enumerate(keys):
        if i % 2:
            column = (column + _mix(row ^ key) % m) % m
        else:
            row = (row + _mix(column ^ key) % n) % n
    return row * m + column


def _mix(x: Words) -> Words:
    """The finalizer of SplitMix64: every bit of the result depends on every bit of x. Products wrap."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@functools.lru_cache(maxsize=64)
def _round_keys(first: int, second: int) -> tuple[Words, ...]:
    """A 64-bit word for each round, as arrays, whose products wrap without a warning."""
    words = [fold_in(torch.tensor([first, second], device="cpu"), i).tolist() for i in range(_ROUNDS)]
    return tuple(np.array([a | b << 32], dtype=np.uint64) for a, b in words)


def steps_per_epoch(size: int, batch: int, *, drop_last: bool = True) -> int:
    """How many batches one pass over `size` examples gives; without `drop_last` the last may be smaller.

    >>> steps_per_epoch(10, 4), steps_per_epoch(10, 4, drop_last=False)
    (2, 3)

    Raises ShardingError where that is no batch at all.
    """
    if size < 1 or batch < 1:
        raise fail(f"steps_per_epoch: size={size}, batch={batch}", fix="both are 1 or more")
    if drop_last and size < batch:
        what = f"steps_per_epoch: {size} examples do not fill a batch of {batch}"
        raise fail(what, f"{size} < {batch}", fix=f"batch={size} or less, or drop_last=False")
    return size // batch if drop_last else -(-size // batch)


def indices(
    key: Tensor | None, *, step: int, size: int, batch: int, epoch: int | None = None, drop_last: bool = True
) -> Tensor:
    """The examples of the global batch of one step, out of `size`: int64 [B], the same on every rank.

    Each epoch goes through the examples in its own order, the one of `fold_in(key, epoch)`. Asking for step
    1,000,000 costs what asking for step 0 does.

    Args:
        key: `None` leaves the examples in their order, as evaluation wants them.
        step: counts from the start of training; with `epoch`, from the start of that epoch.
        drop_last: leave out the `size % batch` examples that do not fill a batch, others in every epoch.
            Without it the last batch of an epoch is smaller.

    >>> indices(fs.fold_in(fs.key(0), "data"), step=1000, size=50_000, batch=256).shape
    torch.Size([256])
    >>> indices(None, step=2, size=10, batch=4, drop_last=False)
    tensor([8, 9])

    Raises ShardingError for a negative step, a step past the given epoch, and where no batch can be filled.
    """
    steps = steps_per_epoch(size, batch, drop_last=drop_last)
    if step < 0 or (epoch is not None and epoch < 0):
        raise fail(f"indices: step={step}, epoch={epoch}", fix="both count from 0")
    if epoch is not None and step >= steps:
        lines = f"{size} examples in batches of {batch} are {steps} steps, 0 to {steps - 1}"
        fix = "leave out epoch= to count steps from the start of training"
        raise fail(f"indices: epoch {epoch} has no step {step}", lines, fix=fix)
    turn, at = divmod(step, steps) if epoch is None else (epoch, step)
    positions = torch.arange(at * batch, min((at + 1) * batch, size))  # [B]
    return positions if key is None else permute(fold_in(key, turn), positions, size=size)


def load(fetch: Callable[[Rows], Any], indices: Integers, *, mesh: Mesh, spec: Any = _BY_ROW) -> Any:
    """The batch of these examples, placed on `mesh`: every rank fetches only the rows that it holds.

    Replicas (over `model`, say) hold the same examples; on a simulated mesh `fetch` is called once for each
    different part. Nothing is communicated.

    Args:
        fetch: from the numbers of some examples to a tensor, an array, or a tree of them, with a row for each
            in dim 0 and the same other dims on every rank. The numbers are a numpy array, which indexes
            arrays and tensors alike (a tensor of one element drops a dim of an array). A rank whose part is
            empty asks for no rows, as it needs the dtype and the other dims.
        indices: the global batch, [B].
        spec: a spec, or a prefix tree of specs that split dim 0 alike; other dims are cut after fetching.

    >>> batch = indices(key, step=step, size=len(images), batch=256)
    >>> load(lambda i: {"x": images[i], "y": labels[i]}, batch, mesh=fs.make_mesh(data=4))
    {'x': f32[256@data, 3, 32, 32], 'y': i64[256@data]}

    Raises ShardingError listing every leaf that is no tensor, has no row per index, or does not fit its spec.
    """
    asked = _integers("load: indices", indices)
    if asked.ndim != 1:
        raise fail(f"load: indices of shape {list(asked.shape)}", fix="one dim: the examples of the batch")
    split = next((s.parts(max(1, len(s.entries)))[0] for s in tree.leaves(spec) if is_spec(s)), ())
    raise_all(spec_errors("load", asked.shape, P(split), mesh.axes))
    parts: dict[Cut, Any] = {}
    for rank in mesh.ranks:
        (own,) = local_box(asked.shape, P(split), mesh.axes, mesh.coords(rank))
        if (own.start, own.stop) not in parts:
            parts[own.start, own.stop] = fetch(asked[own].copy())

    first = next(iter(parts.values()))
    treedef = tree.structure(first)
    for part in parts.values():
        if tree.structure(part) != treedef:
            what, lines = "load: fetch gave another tree for other rows", f"{treedef}\n{tree.structure(part)}"
            raise fail(what, lines, fix="return the same keys for any rows")
    columns = zip(*(tree.leaves(part) for part in parts.values()), strict=True)
    specs = tree.broadcast(spec, first, name="load: spec", leaf=is_spec)
    errors: list[ShardingError] = []
    placed: list[Sharded] = []
    for (path, _), column, one in zip(tree.leaves_with_path(first), columns, specs, strict=True):
        where = f"load: {tree.show('batch', path)}"
        try:
            rows = {cut: _tensor(where, x) for cut, x in zip(parts, column, strict=True)}
            shape = (asked.size, *_row(where, rows))
            placed.append(_place(where, rows, shape, one, split, mesh))
        except ShardingError as e:
            errors.append(e)
    raise_all(errors)
    return tree.unflatten(treedef, placed)


def _row(where: str, rows: dict[Cut, Tensor]) -> tuple[int, ...]:
    """The shape of one row, which all parts have."""
    for (start, stop), part in rows.items():
        if part.ndim == 0 or part.shape[0] != stop - start:
            what = f"{where}: fetch gave {describe(part.dtype, part.shape)} for {stop - start} examples"
            raise fail(what, fix="return a row for each, in dim 0")
    kinds = {describe(part.dtype, part.shape[1:]): tuple(part.shape[1:]) for part in rows.values()}
    if len(kinds) > 1:
        what = f"{where}: the rows differ between parts"
        raise fail(what, f"a row is {' or '.join(kinds)}", fix="pad to one shape, and use one dtype")
    return next(iter(kinds.values()))


def _place(
    where: str, rows: dict[Cut, Tensor], shape: tuple[int, ...], spec: P, split: tuple[str, ...], mesh: Mesh
) -> Sharded:
    raise_all(spec_errors(where, shape, spec, mesh.axes))
    if spec.parts(len(shape))[0] != split:
        what = f"{where}: its spec is {spec}, other leaves split dim 0 by {P(split)}"
        raise fail(what, fix="split dim 0 alike in every leaf, and fs.reshard afterwards")

    def own(box: Box) -> Tensor:
        # A copy: fetch may give views of the data set, which a donated batch would overwrite.
        part = rows[box[0].start, box[0].stop][(slice(None), *box[1:])]
        return part.to(memory_device(spec, mesh.device), copy=True, memory_format=torch.contiguous_format)

    return from_callback(shape, spec, mesh, own)


def _tensor(where: str, x: Any) -> Tensor:
    if isinstance(x, Tensor):
        return x.detach()
    if not isinstance(x, np.ndarray):
        what = f"{where}: fetch gave a {type(x).__name__}"
        raise fail(what, fix="return tensors or numpy arrays, or a tree of them")
    try:
        return torch.from_numpy(np.require(x, requirements=["C", "W"]))
    except TypeError:
        raise fail(f"{where}: fetch gave an array of {x.dtype}", fix="return numbers") from None


def _integers(what: str, x: Integers) -> Rows:
    array = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise fail(f"{what} are {array.dtype}", fix="integers")
    return array.astype(np.int64)


def crop(text: Tensor | npt.NDArray[Any], starts: Integers, *, length: int) -> Tensor:
    """Pieces of a long 1-d array of tokens: starts [B] -> int64 [B, L].

    Of a memory map only the pages of these pieces are read. Starts count tokens: `window * length` gives
    windows side by side.

    >>> crop(np.arange(100, dtype=np.uint16), [0, 50], length=3)
    tensor([[ 0,  1,  2],
            [50, 51, 52]])

    Raises ShardingError for a piece that reaches past an end.
    """
    at = _integers("crop: starts", starts)
    if text.ndim != 1 or at.ndim != 1:
        raise fail(f"crop: text {list(text.shape)}, starts {list(at.shape)}", fix="both have one dim")
    last = len(text) - length
    if at.size and (at.min() < 0 or at.max() > last):
        what = f"crop: starts from {at.min()} to {at.max()} reach past the text"
        raise fail(what, f"{len(text)} - {length} = {last}", fix="0 <= start <= len(text) - length")
    where = at[:, None] + np.arange(length)  # [B, L]
    if isinstance(text, Tensor):
        return text[torch.from_numpy(where).to(text.device)].long()
    return torch.from_numpy(np.asarray(text[where]).astype(np.int64))
