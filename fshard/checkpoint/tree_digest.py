"""Digests of a tree that do not depend on its placement: by them a checkpoint of a part names what it belongs to.

The digest of a leaf is two sums over all of its 32-bit words v, mod 2^64: of v[i, j] * a[i] * b[j], for a matrix, with
random 64-bit a and b that depend only on the dim and the position (one such factor for each dim). Each rank adds the
words of its part, of any split of any dims, and the sums are added over the ranks.

For two different leaves one of the sums is the same with a probability of about 2^-29 at most, and both with 2^-58. For
let the words of a row i differ by D[j], and let 2^k, with k < 32, be the largest power of two that divides all of them.
Then c[i], the sum of D[j] * b[j], is 2^k times a number that is random mod 2^(64 - k), and the sum of c[i] * a[i] is a
random multiple of the largest power of two in c[i]: it is 0 with a probability of (64 - k) * 2^(k - 65) and less.
Another dim adds a factor of about the number of bits that are left, which is below 2^6.

Source: as `_core.compare.digest`, which is faster, and compares parts that are split alike.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fshard import tree
from fshard._core.files.io import Ranks, assign_writers, local_part, writable
from fshard._core.files.url import AnyPath
from fshard.errors import ShardingError, checked, fail, join_limited, raise_all
from fshard.spec import Box, describe

from .manifest import SCALARS
from .parts import DTYPES

_BLOCK = 1 << 17  # words that are widened to 64 bits at a time
_SUMS = 2


@checked
def digest(tree_: Any) -> dict[str, str]:
    """Digest every leaf of a tree: {dotted path: dtype, global shape and digest}, the same for any mesh and specs.

    For `save(..., base=)` and `restore(..., base=)`. Equal for bitwise equal leaves; for others of one shape and dtype
    too with a probability of about 2^-58. On a process mesh every rank must call it.

    Cost: one pass over the parts of each rank, some 6 ns for each element on a CPU core, with 8 MiB of extra memory.
    Compute it once for a base that is frozen, and pass it to each save.

    >>> digest({"w": torch.arange(4.0)})
    {'w': 'f32[4] 86014b4c1e0000007f6f499a51000000'}

    Raises ShardingError for leaves that a checkpoint cannot have.
    """
    leaves, errors = named_leaves("digest", tree_)
    ranks = Ranks.from_leaves("digest", leaves.values())
    tensors = {name: x for name, x in leaves.items() if type(x) not in SCALARS}

    def sums_of_parts() -> dict[str, np.ndarray[Any, Any]]:
        raise_all(errors)
        out: dict[str, np.ndarray[Any, Any]] = {}
        for (name, leaf), boxes in zip(tensors.items(), assign_writers(tensors.values()), strict=True):
            for box, rank in boxes:
                if ranks.writes_for(rank):
                    out[name] = out.get(name, 0) + _digest_part(local_part(leaf, rank), box)
        return out

    everyone = ranks.run(sums_of_parts)
    sums = {name: np.sum([of_rank[name] for of_rank in everyone if name in of_rank], axis=0) for name in tensors}
    return {name: f"{describe(leaf)} {sums[name].astype('>i8').tobytes().hex()}"
            if name in sums else repr(leaf) for name, leaf in leaves.items()}  # fmt: skip


def named_leaves(verb: str, tree_: Any) -> tuple[dict[str, Any], list[ShardingError]]:
    """Return the leaves by dotted path, and an error for each that a checkpoint cannot have."""
    leaves: dict[str, Any] = {}
    errors: list[ShardingError] = []
    for path, leaf in tree.leaves_with_path(tree_):
        label, name = f"{verb}: {tree.show('tree', path)}", tree.dotted(path)
        if type(leaf) not in SCALARS:
            try:
                writable(leaf, DTYPES.values(), "a tensor, a number or a string")
            except ShardingError as e:
                errors.append(ShardingError(f"{label}: {e}"))
        if name in leaves:
            errors.append(fail(f"{label}: another leaf has the name {name!r}", fix="rename a key"))
        leaves[name] = leaf
    return leaves, errors


def _digest_part(x: Tensor, box: Box) -> np.ndarray[Any, Any]:
    """Return the sums over the words of the part of a leaf in this box: int64 [sums]. A tensor is slow to pickle."""
    words, per_element = _as_words(x.detach())
    starts = [s.start for s in box] or [0]
    starts[-1] *= per_element
    return _sums(words, 0, starts).cpu().numpy()


def _as_words(x: Tensor) -> tuple[Tensor, int]:
    """Return a tensor as integers of at most 32 bits, [*S, n * k] of [*S, n], and k."""
    x = (x if x.ndim else x.reshape(1)).resolve_conj().resolve_neg()
    if x.element_size() <= 4:
        return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]), 1
    if x.stride(-1) != 1:
        x = x.clone(memory_format=torch.contiguous_format)  # `contiguous` leaves the strides of a dim of one element
    return x.view(torch.int32), x.element_size() // 4


@functools.lru_cache(maxsize=4)
def _random_words(dim: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Return the random factors of these positions of a dim: int64 [sums, n]. NumPy keeps these streams stable."""
    out = []
    for k in range(_SUMS):
        generator = np.random.Philox(key=_SUMS * dim + k)
        generator.advance(start // 4)  # each step of the counter gives four words
        out.append(generator.random_raw(stop - start // 4 * 4)[start % 4 :])
    return torch.from_numpy(np.stack(out).view(np.int64)).to(device)


def _sums(words: Tensor, dim: int, starts: Sequence[int]) -> Tensor:
    """Return the sums of words [*S] times the factors of their positions, in `dim` and the next ones: int64 [sums]."""
    total = torch.zeros(_SUMS, dtype=torch.int64, device=words.device)
    if not words.numel():
        return total
    row = words.numel() // len(words)
    if row > _BLOCK:  # then there is another dim
        for i, factor in enumerate(_random_words(dim, starts[0], starts[0] + len(words), words.device).T):
            total += factor * _sums(words[i], dim + 1, starts[1:])
        return total
    for i in range(0, len(words), _BLOCK // row):
        x = words[i : i + _BLOCK // row].long()
        ranges = zip([starts[0] + i, *starts[1:]], x.shape, strict=True)
        factors = [_random_words(dim + d, a, a + n, words.device) for d, (a, n) in enumerate(ranges)]
        for k in range(_SUMS):
            y = x
            for factor in reversed(factors):
                y = _dot(y, factor[k])
            total[k] += y
    return total


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Return the sums of int64 [*S, n] times [n], over the last dim: [*S]."""
    if not x.is_cpu:  # CUDA has no matmul of integers
        return (x * y).sum(-1)
    return torch.mv(x.reshape(-1, x.shape[-1]), y).reshape(x.shape[:-1])


def check_base(directory: AnyPath, saved: Mapping[str, str], base: Mapping[str, str] | None) -> None:
    """Raise ShardingError, naming the leaves that differ, unless a checkpoint has the caller's base."""
    if base is None:
        if saved:
            raise fail(f"restore: {directory} belongs to a base: it was saved with base=",
                       fix="base=fs.checkpoint.digest(tree) of the tree that it belongs to")  # fmt: skip
        return
    if base and not saved:
        raise fail(f"restore: {directory} was saved without base=", fix="leave out base=")
    lines = []
    for path in {**saved, **base}:
        if path not in base:
            lines.append(f"missing  {path}  {saved[path]}")
        elif path not in saved:
            lines.append(f"extra    {path}  {base[path]}")
        elif saved[path] != base[path]:
            lines.append(f"differs  {path}  saved with {saved[path]}, base has {base[path]}")
    if lines:
        raise fail(f"restore: {directory} was saved with another base", join_limited(lines, 8, "\n"),
                   fix="restore it with the base that it was saved with")  # fmt: skip
