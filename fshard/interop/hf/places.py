"""Places of the elements of a tensor within another one in a file: strides, offsets and contiguous runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fshard.errors import fail
from fshard.spec import Box, box_shape, full_box

Factor = tuple[int, int]  # (size, stride) of a part of a dim, as of `h` and `k` in `(h k)`
_MAX_RUNS = 1 << 16  # in one chunk: the list of their offsets takes memory too


@dataclass(frozen=True)
class Places:
    """Places of the elements of a tensor within a tensor in a file, counted in elements of that.

    `dims` has the factors of each dim, the slowest first: a dim of several is read from as many dims of the file.
    `offset` is the place of the first element.

    >>> Places.of((4, 6)).permute((1, 0))
    Places(dims=(((6, 1),), ((4, 6),)), offset=0)
    >>> Places.of((4, 6)).reshape((2, 12)).permute((1, 0)).reshape((24,))  # no dim of the file has these in a row
    Places(dims=(((12, 1), (2, 12)),), offset=0)
    """

    dims: tuple[tuple[Factor, ...], ...]
    offset: int = 0

    @classmethod
    def of(cls, shape: Sequence[int], box: Box | None = None) -> Places:
        """Return the places of a whole tensor in the file, in its own order, or of a box of it."""
        box = full_box(shape) if box is None else box
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        dims = tuple(((s.stop - s.start, stride),) for s, stride in zip(box, strides, strict=True))
        return cls(dims, sum(s.start * stride for s, stride in zip(box, strides, strict=True))).reshape(box_shape(box))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(n for n, _ in factors) for factors in self.dims)

    def permute(self, order: Sequence[int]) -> Places:
        return Places(tuple(self.dims[i] for i in order), self.offset)

    def narrow(self, dim: int, start: int, stop: int) -> Iterator[tuple[int, int, Places]]:
        """Split a range of a dim into as few parts as possible; yield (start, stop, places) of each."""
        factors = self.dims[dim]
        for part in split([n for n, _ in factors], start, stop):
            inside = tuple((b - a, stride) for (a, b), (_, stride) in zip(part.ends, factors, strict=True))
            offset = self.offset + sum(a * stride for (a, _), (_, stride) in zip(part.ends, factors, strict=True))
            yield part.start, part.stop, Places((*self.dims[:dim], inside, *self.dims[dim + 1 :]), offset)

    def reshape(self, shape: Sequence[int]) -> Places:
        """Return the places of the tensor in another shape. Raises ShardingError if no factors have these sizes."""
        if 0 in shape:
            return Places(tuple(((n, 1),) for n in shape), self.offset)
        rest: list[Factor] = []
        for size, stride in (factor for factors in self.dims for factor in factors if factor[0] != 1):
            if rest and rest[-1][1] == size * stride:  # one dim of the file
                size *= rest.pop()[0]
            rest.append((size, stride))
        dims: list[tuple[Factor, ...]] = []
        for n in reversed(shape):
            dim: list[Factor] = []
            while n > 1:
                size, stride = rest.pop()
                inner = math.gcd(n, size)
                if inner not in (n, size):
                    raise fail(f"{list(self.shape)} cannot be read as {list(shape)}", f"{size} % {n} = {size % n}")
                if inner < size:
                    rest.append((size // inner, stride * inner))
                dim.insert(0, (inner, stride))
                n //= inner
            dims.insert(0, tuple(dim))
        return Places(tuple(dims), self.offset)

    def restride(self, shape: Sequence[int], strides: Sequence[int]) -> Places:
        """Return the places if the tensor in the file, of `shape`, has these strides, and is not row-major.

        >>> Places.of((4, 6)).restride((4, 6), (1, 4))  # a transposed matrix
        Places(dims=(((4, 1),), ((6, 4),)), offset=0)
        """
        if 0 in self.shape:
            return self
        sizes_after = [math.prod(shape[i + 1 :]) for i in range(len(shape))]  # strides in row-major order
        of_file = [x for x in zip(shape, sizes_after, strides, strict=True) if x[0] > 1]

        def split_factor(size: int, step: int) -> list[Factor]:
            out: list[Factor] = []
            for n, row_major, stride in reversed(of_file):  # from the fastest dim in the file
                if size == 1 or step >= n * row_major:
                    continue
                part = min(size, n * row_major // step)
                out.insert(0, (part, step // row_major * stride))
                size, step = size // part, n * row_major
            return out

        offset = sum(self.offset // row_major % n * stride for n, row_major, stride in of_file)
        dims = tuple(tuple(f for factor in of_dim for f in split_factor(*factor)) for of_dim in self.dims)
        return Places(dims, offset)

    def regions(self, box: Box) -> Iterator[FileRegion]:
        """Split a box of the tensor into regions, most often one, that are boxes of the factors."""
        if 0 in box_shape(box):
            return
        factors = [factor for of_dim in self.dims for factor in of_dim]
        # A stride of 0, of an expanded tensor, is outside the others, where it makes no run shorter.
        order = tuple(sorted(range(len(factors)), key=lambda i: (factors[i][1] > 0, -factors[i][1], -factors[i][0])))
        ranges = [list(split([n for n, _ in of_dim], s.start, s.stop))
                  for of_dim, s in zip(self.dims, box, strict=True)]  # fmt: skip
        for of_dims in itertools.product(*ranges):
            inner = [ends for r in of_dims for ends in r.ends]
            yield FileRegion(
                box=tuple(slice(r.start - s.start, r.stop - s.start) for r, s in zip(of_dims, box, strict=True)),
                split_shape=tuple(b - a for a, b in inner),
                order=order,
                offset=self.offset + sum(a * stride for (a, _), (_, stride) in zip(inner, factors, strict=True)),
                strides=tuple(factors[i][1] for i in order),
            )


@dataclass(frozen=True)
class FileRegion:
    """A part of a box of a leaf, and its position in the tensor in the file, counted in elements.

    `box`: slices of the leaf's box. `split_shape`: its shape with one dim for each name. `order`: these dims in the
    order of the file. `offset`: the first element in the file. `strides`: those in the file, in that order.
    """

    box: Box
    split_shape: tuple[int, ...]
    order: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    def view_of(self, x: Tensor) -> Tensor:
        """Return the region as a view of `x`, the tensor of the box, with its dims in the order of the file."""
        return x[self.box].view(self.split_shape).permute(self.order)

    def chunks(self, max_elements: int) -> Iterator[tuple[Box, list[int], int]]:
        """Split the region into chunks of at most `max_elements`, in the order of the file.

        Each is a box of `view_of(x)`, the offsets in the file of its contiguous runs, and the length of each run. The
        runs of a chunk, one after the other, are its elements in order.
        """
        sizes = [self.split_shape[i] for i in self.order]
        max_elements = min(max_elements, _MAX_RUNS * self._runs(sizes)[0])
        dim, inner = len(sizes), 1
        while dim and inner * sizes[dim - 1] <= max_elements:
            dim -= 1
            inner *= sizes[dim]
        outer, rest = sizes[: max(0, dim - 1)], tuple(slice(0, n) for n in sizes[dim:])
        rows = max(1, max_elements // inner)
        ranges = [(slice(i, min(i + rows, sizes[dim - 1])),) for i in range(0, sizes[dim - 1], rows)] if dim else [()]
        for index in itertools.product(*(range(n) for n in outer)):
            for of_dim in ranges:
                box = (*(slice(i, i + 1) for i in index), *of_dim, *rest)
                run, dims = self._runs(box_shape(box))
                first = self.offset + sum(s.start * stride for s, stride in zip(box, self.strides, strict=True))
                offsets = np.array([first])
                for n, stride in dims:
                    offsets = np.add.outer(offsets, np.arange(n) * stride)
                yield box, offsets.ravel().tolist(), run

    def _runs(self, sizes: Sequence[int]) -> tuple[int, list[tuple[int, int]]]:
        """Return the length of the contiguous runs in a box of these sizes, and (size, stride) of the dims of runs."""
        run = 1
        dims: list[tuple[int, int]] = []
        for n, stride in zip(reversed(sizes), reversed(self.strides), strict=True):
            if stride == run and not dims:
                run *= n
            elif n > 1:
                dims.insert(0, (n, stride))
        return run, dims


# --- a range of a dim that has several names ------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """A range of a dim of the leaf that is a box of the names in it: `ends` has (start, stop) for each name."""

    start: int
    stop: int
    ends: tuple[tuple[int, int], ...]


def split(sizes: Sequence[int], start: int, stop: int) -> Iterator[Range]:
    """Split a range into as few boxes as possible: of (3 4), range(2, 11) is the end of a row, a row, and a start."""
    if len(sizes) <= 1:
        yield Range(start, stop, ((start, stop),) * len(sizes))
        return
    row = math.prod(sizes[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:  # within one row
        yield from _split_row(sizes, last, start, stop)
        return
    if start < first * row:
        yield from _split_row(sizes, first - 1, start, first * row)
    if first < last:
        yield Range(first * row, last * row, ((first, last), *((0, n) for n in sizes[1:])))
    if last * row < stop:
        yield from _split_row(sizes, last, last * row, stop)


def _split_row(sizes: Sequence[int], i: int, start: int, stop: int) -> Iterator[Range]:
    base = i * math.prod(sizes[1:])
    for r in split(sizes[1:], start - base, stop - base):
        yield Range(r.start + base, r.stop + base, ((i, i + 1), *r.ends))
