"""Random permutations of range(size) by key. Any part of one can be computed without the rest."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fshard.errors import checked, fail

from .keys import check_key, fold_in

Rows = npt.NDArray[np.int64]
Integers = Tensor | Rows | Sequence[int]
Words = npt.NDArray[np.uint64]

_ROUNDS = 20  # with 16, the orders of 5 to 7 examples are not equally likely, as 400,000 keys show
_LARGEST = 1 << 62


@checked
def permute(key: Tensor, positions: Integers, *, size: int) -> Tensor:
    """Map `positions` by a random permutation of range(size): int64 [*S] -> int64 [*S].

    Only these positions are computed, so a `size` of up to 2^62 costs no memory, and the result does not depend on
    which other positions are asked for.

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
    at = integers("permute: positions", positions)
    if at.size and (at.min() < 0 or at.max() >= size):
        raise fail(f"permute: positions outside range({size})", f"they range from {at.min()} to {at.max()}",
                   fix="0 <= position < size")  # fmt: skip
    keys = _round_keys(*key.tolist())
    rows = (math.isqrt(size - 1) // 2 + 1) * 2  # even: on a grid with odd sides, rounds make only even permutations
    columns = -(-size // rows)
    out = _shuffle(at.reshape(-1).astype(np.uint64), rows, columns, keys)
    # Cycle walking: a bijection of a slightly larger range, applied until the result is inside, is a bijection.
    while (outside := np.flatnonzero(out >= size)).size:
        out[outside] = _shuffle(out[outside], rows, columns, keys)
    return torch.from_numpy(out.astype(np.int64)).reshape(at.shape)


@checked
def permutation(key: Tensor, x: int | Tensor, *, dim: int = 0) -> Tensor:
    """Return range(x) in a random order, or a tensor with its slices along `dim` in one, as `jax.random.permutation`.

    The order is the same on every mesh: `permute` of all positions. The tensor must not be split along `dim`. Not for
    compiled programs.

    >>> permutation(fs.key(0), 6)
    tensor([5, 4, 2, 3, 0, 1])

    Raises ShardingError for a negative number, and a `dim` that the tensor does not have.
    """
    if isinstance(x, Tensor) and not -x.ndim <= dim < x.ndim:
        raise fail(f"random.permutation: x, {list(x.shape)}, has no dim {dim}", fix="one of its dims")
    size = x.shape[dim] if isinstance(x, Tensor) else x
    if size < 0:
        raise fail(f"random.permutation: x={x}", fix="0 or more")
    order = permute(key, range(size), size=max(1, size))
    return x.index_select(dim, order.to(x.device)) if isinstance(x, Tensor) else order


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
    """Return a 64-bit word for each round, as arrays: their products wrap without a warning."""
    words = [fold_in(torch.tensor([first, second], device="cpu"), i).tolist() for i in range(_ROUNDS)]
    return tuple(np.array([a | b << 32], dtype=np.uint64) for a, b in words)


def integers(name: str, x: Integers) -> Rows:
    if isinstance(x, Tensor) and (x.is_meta or x.dtype == torch.bfloat16):  # numpy has no array for these
        raise fail(f"{name} are {'on the meta device' if x.is_meta else 'bfloat16'}", fix="integers")
    if isinstance(x, range):  # the error of numpy says how many bytes a long one takes
        x = np.arange(x.start, x.stop, x.step)
    array = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise fail(f"{name} are {array.dtype}", fix="integers")
    return array.astype(np.int64)
