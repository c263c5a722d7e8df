"""The part of a batch that one step of `accumulate` runs on. Its draws are its rows of the draws for the full batch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fshard.errors import ShardingError, fail
from fshard.spec import Box, names_of

from .protocol import size_of
from .region import in_region, region, storage_key, user_line
from .torch import is_wrapped

# Rows on this rank, and the axes that split the batch's rows; None: unknown.
Rows = tuple[int, tuple[str, ...] | None]


@dataclass(frozen=True)
class Microbatch:
    """Microbatch number `index` of `steps`, and the rows of its arguments: dim 0 is split over these axes.

    `flattened` draws may have several entries for each row, in one dim.
    """

    index: int
    steps: int
    rows: tuple[Rows, ...]
    flattened: bool = False

    def of_batch(
        self, verb: str, shape: Sequence[int], box: Box, parts: Sequence[tuple[str, ...]], sizes: Mapping[str, int]
    ) -> tuple[tuple[int, ...], Box]:
        """Return the shape of a draw for the full batch and this rank's box of it; a draw without rows is unchanged."""
        dim = self.dim_of_rows(verb, shape, [s.stop - s.start for s in box], parts, sizes)
        if dim is None:
            return tuple(shape), box
        full, cut = list(shape), list(box)
        full[dim] *= self.steps
        cut[dim] = self.range_of(box[dim].start, box[dim].stop - box[dim].start)
        return tuple(full), tuple(cut)

    def range_of(self, start: int, n: int) -> slice:
        """Return the place in the batch of the `n` rows that this rank has from `start` on in the microbatch."""
        first = start * self.steps + self.index * n
        return slice(first, first + n)

    def dim_of_rows(
        self, verb: str, shape: Sequence[int], local: Sequence[int], parts: Sequence[tuple[str, ...]],
        sizes: Mapping[str, int],
    ) -> int | None:  # fmt: skip
        """Return the dim of a draw that has the rows of the microbatch; None if no dim has them.

        It has as many entries on this rank and is split over the same axes; where no axis splits the rows, it is dim 0.

        Raises ShardingError for a draw that may have the rows in another order, or may have nothing to do with them.
        """
        doubt: tuple[int, Rows] | None = None
        for rows, over in self.rows:
            for dim, axes in enumerate(parts):
                n = local[dim]
                fits = n == rows or (n % rows == 0 < n if rows else False)
                if not fits or (dim and not axes):
                    continue
                is_same = dim == 0 and bool(axes) if over is None else _same_axes(axes, over, sizes)
                if is_same and (n == rows or (self.flattened and over is not None)):
                    return dim
                gathered = dim == 0 and not axes and over and n == rows * size_of(over, sizes)
                unknown = over is None and (dim == 0 or n == rows)
                if gathered or unknown or set(axes) & set(over or ()):
                    doubt = doubt or (dim, (rows, over))
        if doubt is not None:
            raise self._doubtful(verb, shape, doubt[0], parts[doubt[0]], *doubt[1])
        return None

    def _doubtful(
        self, verb: str, shape: Sequence[int], dim: int, axes: tuple[str, ...], rows: int,
        over: tuple[str, ...] | None,
    ) -> ShardingError:  # fmt: skip
        how = f"split over {', '.join(axes)}" if axes else "not split"
        names = "axes that are unknown, as the region computed them" if over is None else ", ".join(over)
        fix = "pass accumulate arguments of the region, and compute with them in its function" if over is None else \
            f"if it has the rows, give it one entry for each, in a dim split over {names}"  # fmt: skip
        return fail(f"{verb}: accumulate cannot know whether a draw has the rows of its microbatch", *user_line(),
                    draw=f"{list(shape)}, dim {dim} {how}", microbatch=f"{rows} rows on this rank, split over {names}",
                    fix=f"{fix}; if it has not, draw before accumulate, and pass the numbers by keyword")  # fmt: skip


def _same_axes(axes: tuple[str, ...], over: tuple[str, ...], sizes: Mapping[str, int]) -> bool:
    """Return whether two dims are split alike; axes of one rank count only where the two have no other in common."""
    if not set(axes) & set(over):
        return not axes and not over
    return [a for a in axes if sizes[a] > 1] == [a for a in over if sizes[a] > 1]


_thread = threading.local()


def microbatch() -> Microbatch | None:
    """Return the microbatch that runs on this thread; None outside `accumulate`."""
    return getattr(_thread, "microbatch", None)


@contextlib.contextmanager
def in_microbatch(new: Microbatch | None) -> Iterator[None]:
    """Context in which draws are a microbatch's part of the draws for the batch."""
    before = microbatch()
    _thread.microbatch = new
    # Backward, which may draw again to recompute, stays on this thread. In a region it does so in any case.
    elsewhere = not (in_region() or torch.compiler.is_dynamo_compiling())
    try:
        with torch.autograd.set_multithreading_enabled(False) if elsewhere else contextlib.nullcontext():
            yield
    finally:
        _thread.microbatch = before


def flattened_rows() -> contextlib.AbstractContextManager[None]:
    """Context in which the draws of a microbatch may have several entries for each row, as [B*T]."""
    part = microbatch()
    return contextlib.nullcontext() if part is None else in_microbatch(replace(part, flattened=True))


def microbatches(xs: Iterable[Any], steps: int) -> Iterator[Microbatch | None]:
    """Yield the microbatches of a batch, whose rows on this rank are in tensors among `xs`; for one, the outer one.

    Where axes split the rows of one of them, a tensor whose rows no axis splits has something for each step.
    """
    outer = microbatch()
    found: dict[int, set[tuple[str, ...] | None]] = {}
    for x in (x for x in xs if isinstance(x, Tensor) and x.ndim):
        found.setdefault(x.shape[0] // steps, set()).add(_axes_of_rows(x, outer))
    known = {over for overs in found.values() for over in overs if over is not None}
    ignored: set[tuple[str, ...] | None] = {()} if any(known) else set()
    rows = [(n, over) for n, overs in found.items() for over in (overs - {None} or overs) - ignored]
    index, total = (0, 1) if outer is None else (outer.index, outer.steps)
    for step in range(steps):
        yield outer if steps == 1 else Microbatch(index * steps + step, total * steps, tuple(rows))


def _axes_of_rows(x: Tensor, outer: Microbatch | None) -> tuple[str, ...] | None:
    """Return the axes that split dim 0 of an argument of the region, or of a view that has its rows; else None."""
    if outer is not None:
        return next((over for n, over in outer.rows if n == x.shape[0]), None)
    if not in_region():
        return ()
    if torch.compiler.is_dynamo_compiling():
        return getattr(x, "row_axes", None)  # of `mark_arguments`
    if is_wrapped(x):
        return None
    found, mine = set(), _row_layout(x)
    for y, spec in zip(*region().arguments, strict=True):
        if y.ndim and y.shape[0] == x.shape[0] and _row_layout(y) == mine:
            found.add(names_of(spec.parts(y.ndim)[0]))
    return found.pop() if len(found) == 1 else None


def _row_layout(x: Tensor) -> tuple[int, int]:
    """Return the memory of a tensor, and the distance of its rows in it."""
    return storage_key(x), x.stride(0) if len(x) > 1 else 0
