"""Batches of similar lengths: a pure function of (key, epoch, step), as `indices` is for batches of any examples."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from fshard.errors import checked, fail, join_limited, raise_all
from fshard.random import fold_in
from fshard.random.orders import Integers, Rows, integers, permute

from .order import counted, epoch_order, position_in_epoch


class Bucketed(NamedTuple):
    """A global batch: `rows` int64 [B], the examples; `counted` bool [B], False for repetitions; `length`.

    >>> rows, counted, length = buckets([3, 9, 4, 8], [4, 12], batch=2).indices(None, step=0)
    >>> rows, counted, length
    (tensor([0, 2]), tensor([True, True]), 4)
    """

    rows: Tensor
    counted: Tensor
    length: int


@dataclass(frozen=True, eq=False, repr=False)
class Buckets:
    """Examples by length, made by `buckets`.

    Attributes: `lengths`, to which the batches of each bucket are padded; `batch`, their sizes; `members`, the examples
    of each bucket, in the order of the data. A bucket without examples is left out.

    >>> found = buckets([3, 9, 4, 8], [4, 12], batch=2)
    >>> found.lengths, found.batch, found.steps()
    ((4, 12), (2, 2), 2)
    """

    lengths: tuple[int, ...]
    batch: tuple[int, ...]
    members: tuple[Rows, ...]

    @checked
    def steps(self, *, drop_last: bool = False) -> int:
        """Return the number of batches of an epoch; with `drop_last` only the full ones."""
        return sum(self._steps(drop_last))

    def _steps(self, drop_last: bool) -> list[int]:
        sizes = zip(map(len, self.members), self.batch, strict=True)
        return [n // b if drop_last else -(-n // b) for n, b in sizes]

    @checked
    def indices(
        self, key: Tensor | None, *, step: int, epoch: int | None = None, drop_last: bool = False, even: bool = False
    ) -> Bucketed:  # fmt: skip
        """Return the global batch of one step, of examples of one bucket: the same on every rank and mesh.

        Every epoch has each example once (with `drop_last` without the examples that do not fill a batch, different
        ones in every epoch). The order of the examples and the order of the batches differ between epochs. Every step
        costs the same.

        Args:
            key: `None` leaves the examples in their order, shortest bucket first, for evaluation.
            step: counts from the start of training; with `epoch`, from the start of that epoch.
            drop_last: leave out the batches that are not full, one of each bucket. Otherwise they are smaller.
            even: complete them instead, from the start of the bucket's order; `counted` is False for the repetitions.

        Raises ShardingError for a negative step, a step past the end of `epoch`, and where no batch can be filled.
        """
        steps = self._steps(drop_last and not even)
        if not sum(steps):
            raise fail("indices: no bucket fills a batch", repr(self), fix="smaller batches, or drop_last=False")
        epoch, step = position_in_epoch("indices", step, epoch, sum(steps), "the batches of all buckets")
        if key is not None:  # shuffles batches of different lengths
            step = int(permute(fold_in(fold_in(key, "batches"), epoch), [step], size=sum(steps)))
        starts = list(itertools.accumulate(steps, initial=0))
        at = bisect.bisect_right(starts, step) - 1  # the last of those that begin here: the others have no batches
        members, batch, step = self.members[at], self.batch[at], step - starts[at]
        bucket_key = None if key is None else fold_in(key, at)
        positions = epoch_order(bucket_key, epoch, len(members), step * batch, batch, even)
        rows = positions.new_tensor(members[positions.numpy()])
        return Bucketed(rows, counted(step=step, size=len(members), batch=batch)[: len(rows)], self.lengths[at])

    def __repr__(self) -> str:
        rows = zip(self.members, self.lengths, self.batch, strict=True)
        texts = [f"{len(m)} up to {n} in batches of {b}" for m, n, b in rows]
        return f"Buckets({join_limited(texts, 8)})"


@checked
def buckets(lengths: Integers, boundaries: Sequence[int], *, batch: int | Sequence[int]) -> Buckets:
    """Group examples by length, for batches that need little padding: lengths [N] -> Buckets.

    An example is in the bucket of the first boundary that is not below its length. The batches of a bucket are padded
    to its boundary: there are as many shapes as buckets, the same on every rank. Cost: 8 bytes for each example.

    Args:
        lengths: tokens of each example.
        boundaries: lengths of the buckets, increasing.
        batch: examples of a global batch; or one number for each bucket, so that all have about as many tokens.

    >>> found = buckets([3, 9, 4, 2, 12, 8], [4, 12], batch=[2, 1])
    >>> found
    Buckets(3 up to 4 in batches of 2, 3 up to 12 in batches of 1)
    >>> found.steps(), found.indices(None, step=1)
    (5, Bucketed(rows=tensor([3]), counted=tensor([True]), length=4))
    >>> rows, counted, length = found.indices(fs.key(0), step=7)       # the third batch of the second epoch

    Raises ShardingError for examples longer than the last boundary, for boundaries that do not increase, and for sizes
    of batches below 1.

    Source: `tf.data.Dataset.bucket_by_sequence_length`, with an order that does not depend on what was read before.
    """
    n = integers("buckets: lengths", lengths)
    edges = tuple(boundaries)
    sizes = tuple(batch) if isinstance(batch, Sequence) else (batch,) * len(edges)
    errors = []
    if n.ndim != 1 or not n.size or n.min() < 0:
        got = f"the shape {list(n.shape)}" if n.ndim != 1 or not n.size else f"{n.min()}"
        errors.append(fail(f"buckets: lengths have {got}", fix="one dim: the length of each example, 0 or more"))
    if not edges or min(edges) < 0 or any(a >= b for a, b in itertools.pairwise(edges)):
        errors.append(fail(f"buckets: boundaries={list(edges)}", fix="increasing lengths: [32, 64, 128]"))
    if len(sizes) != len(edges) or any(b < 1 for b in sizes):
        errors.append(fail(f"buckets: batch={batch} for {len(edges)} boundaries", fix="1 or more; one for each bucket"))
    raise_all(errors)
    bucket_of = np.searchsorted(np.array(edges), n)
    if len(too_long := np.flatnonzero(bucket_of == len(edges))):
        raise fail(f"buckets: {len(too_long)} examples are longer than the last of boundaries, {edges[-1]}",
                   f"the longest has {n.max()} tokens, example {n.argmax()}",
                   fix=f"cut them, and pass lengths.clip(max={edges[-1]}); or one more boundary")  # fmt: skip
    members = [np.flatnonzero(bucket_of == i) for i in range(len(edges))]
    used = [i for i, m in enumerate(members) if len(m)]
    return Buckets(tuple(edges[i] for i in used), tuple(sizes[i] for i in used), tuple(members[i] for i in used))
