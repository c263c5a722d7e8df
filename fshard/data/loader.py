"""Batches of `torch.utils.data.DataLoader`, with its workers and any map-style dataset, in the order of `indices`.

Legend: B global batch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from fshard import tree
from fshard.errors import checked, fail, must_be, raise_all
from fshard.mesh import Mesh
from fshard.random.orders import Rows
from fshard.spec import Axis, P, describe, is_spec, local_box, spec_errors

from .order import indices, steps_per_epoch
from .placed_batch import load, of_rows


@dataclass(frozen=True, eq=False)
class Sampler:
    """A batch sampler, made by `sampler`: each iteration begins at `step` again.

    Its length is the number of steps to the end of `epoch`; without `epoch` it has no end and no length.

    >>> mesh = fs.make_mesh(data=2)
    >>> list(sampler(None, 8, 4, mesh, epoch=0))
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    """

    key: Tensor | None
    size: int
    batch: int
    mesh: Mesh
    spec: P
    step: int
    epoch: int | None
    drop_last: bool
    even: bool
    with_epoch: bool

    def indices(self, step: int) -> Tensor:
        """Return the global batch of a step: int64 [B], the same on every rank."""
        return indices(self.key, step=step, size=self.size, batch=self.batch, epoch=self.epoch,
                       drop_last=self.drop_last, even=self.even)  # fmt: skip

    def _length(self, step: int) -> int:
        """Return the number of rows of the global batch of a step, without computing its indices."""
        in_epoch = step % self._epoch_steps
        return self.batch if self.even else min(self.batch, self.size - in_epoch * self.batch)

    def _steps(self) -> Iterator[int]:
        return itertools.count(self.step) if self.epoch is None else iter(range(self.step, self._epoch_steps))

    def _local_rows(self, size: int) -> slice:
        """Return the rows of a global batch of `size` that this process loads.

        If its part is empty this is the first row, which has the dtypes and dims of the empty part.
        """
        boxes = [local_box((size,), self.spec, self.mesh.axes, self.mesh.coords(rank))[0] for rank in self.mesh.ranks]
        start, stop = min(b.start for b in boxes), max(b.stop for b in boxes)
        return slice(start, stop) if start < stop else slice(0, 1)

    @property
    def _epoch_steps(self) -> int:
        return steps_per_epoch(self.size, self.batch, drop_last=self.drop_last and not self.even)

    def __iter__(self) -> Iterator[list[Any]]:
        for step in self._steps():
            examples = self.indices(step)
            local = examples[self._local_rows(len(examples))].tolist()
            epoch = step // self._epoch_steps if self.epoch is None else self.epoch
            yield [(i, epoch) for i in local] if self.with_epoch else local

    def __len__(self) -> int:
        if self.epoch is None:
            raise TypeError("a sampler without epoch= has no end: zip(range(steps), batches), or give epoch=")
        return self._epoch_steps - self.step


@checked
def sampler(
    key: Tensor | None, size: int, batch: int, mesh: Mesh, *, axis: Axis = "data", step: int = 0,
    epoch: int | None = None, drop_last: bool = True, even: bool = False, with_epoch: bool = False,
) -> Sampler:  # fmt: skip
    """Return a batch sampler for `torch.utils.data.DataLoader`: the batches of `indices`, from `step` on.

    It yields the examples that this process loads: its rank's part of each global batch, or the full batch on a
    simulated mesh. Ranks that differ in other axes than `axis` (a model group) load the same examples. Its only state
    is the step: to resume, on any mesh, make it with that step. Pass the loader to `batches`.

    Args:
        key, size, batch, step, epoch, drop_last, even: as for `indices`. `size` is the length of the dataset. With
            `epoch` the sampler ends where the epoch does; without it there is no end.
        axis: the mesh axes that rows are split over; `None` for none.
        with_epoch: ask the dataset for `(example, epoch)` in the place of `example`. An augmentation draws by the key
            `fold_in(fold_in(key, epoch), example)`, and is then the same in any worker and on any mesh.

    >>> mesh = fs.make_mesh(data=2, model=2)
    >>> loader = DataLoader(torch.arange(10), batch_sampler=sampler(None, 10, 4, mesh, epoch=0, step=1, even=True))
    >>> [[x.tolist() for x in batch.shards] for batch in fs.data.batches(loader)]
    [[[4, 5], [4, 5], [6, 7], [6, 7]], [[8, 9], [8, 9], [0, 1], [0, 1]]]

    Raises ShardingError for an axis that the mesh lacks, and where `indices` does for `step`.
    """
    raise_all(spec_errors("sampler", (batch,), P(axis), mesh.axes))
    out = Sampler(key, size, batch, mesh, P(axis), step, epoch, drop_last, even, with_epoch)
    out.indices(step)  # raises
    return out


@checked
def batches(loader: DataLoader[Any], *, spec: Any = None) -> Iterator[Any]:
    """Iterate over the global batches of a loader with a `sampler`: trees of `Sharded`, the same on every mesh.

    Args:
        loader: it collates the rows of this process into a tensor, an array or a tree of them, with dim 0 for rows.
            Its workers decode, and prefetch in order.
        spec: as for `load`: a spec, or a prefix tree of specs that split dim 0 as the sampler does. By default only
            the rows are split.

    >>> mesh = fs.make_mesh(data=2)
    >>> loader = DataLoader(torch.arange(8), batch_sampler=sampler(None, 8, 4, mesh, epoch=0))
    >>> list(batches(loader))
    [i64[4@data], i64[4@data]]

    Raises ShardingError for a loader without such a sampler or that may change the order, and for leaves that `load`
    refuses. The errors of a dataset are raised as the loader raises them.
    """
    made_by = loader.batch_sampler
    if not isinstance(made_by, Sampler):
        fix = "DataLoader(dataset, batch_sampler=fs.data.sampler(key, len(dataset), batch, mesh))"
        raise fail(f"batches: the batch sampler of the loader is a {type(made_by).__name__}, of one process", fix=fix)
    if loader.num_workers and not loader.in_order:
        raise fail("batches: the loader returns batches in the order in which they are ready",
                   "each mesh, and each run, would have another", fix="in_order=True")  # fmt: skip
    size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else made_by.size
    if size != made_by.size:
        raise fail(f"batches: the dataset has {size} examples, the sampler {made_by.size}",
                   fix=f"sampler(key, {size}, ...); torch.utils.data.Subset for a part of a dataset")  # fmt: skip
    spec = made_by.spec if spec is None else spec
    for leaf in tree.leaves(spec):
        if not is_spec(leaf):
            raise must_be("batches: spec", "a P or a tree of them", leaf)
        if of_rows(leaf) != made_by.spec:
            raise fail(f"batches: spec={leaf} splits dim 0 by other axes than the sampler, {made_by.spec}",
                       fix="sampler(..., axis=) and spec= name the same axes")  # fmt: skip
    return _load_batches(loader, made_by, spec)


def _load_batches(loader: DataLoader[Any], rows: Sampler, spec: Any) -> Iterator[Any]:
    for step, local in zip(rows._steps(), loader, strict=True):
        size = rows._length(step)
        drawn = rows._local_rows(size)
        for path, x in tree.leaves_with_path(local):
            if isinstance(x, (Tensor, np.ndarray)) and x.shape[:1] != (drawn.stop - drawn.start,):
                raise fail(f"batches: {tree.show('batch', path)} is {_text(x)}, of {drawn.stop - drawn.start} examples",
                           fix="collate_fn= returns a row for each example, in dim 0")  # fmt: skip
        yield load(functools.partial(_part, local, drawn.start), np.arange(size), mesh=rows.mesh, spec=spec)


def _part(local: Any, first: int, rows: Rows) -> Any:
    """Return consecutive rows of a global batch; `local` are the rows of this process, from row `first` on."""
    part = slice(rows[0] - first, rows[-1] + 1 - first) if len(rows) else slice(0, 0)
    return tree.map(lambda x: x[part] if isinstance(x, (Tensor, np.ndarray)) else x, local)


def _text(x: Tensor | np.ndarray[Any, Any]) -> str:
    return describe(x) if isinstance(x, Tensor) else f"{x.dtype}{list(x.shape)}"
