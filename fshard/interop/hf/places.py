"""Places of the elements of a tensor within another one in a file: strides, offsets and contiguous runs.

A `FileTensor`'s pattern of dims, and a conversion of transformers, both become parts: a box of a leaf, and its places.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fshard._core.files.safetensors import HeaderEntry
from fshard.errors import fail
from fshard.spec import Box, box_shape

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
    def of(cls, shape: Sequence[int]) -> Places:
        """Return the places of a complete tensor in the file, in its order there."""
        return cls(tuple(((n, math.prod(shape[i + 1 :])),) for i, n in enumerate(shape))).reshape(shape)

    @property
    def factors(self) -> list[Factor]:
        return [factor for of_dim in self.dims for factor in of_dim]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(n for n, _ in factors) for factors in self.dims)

    @property
    def runs(self) -> list[Factor]:
        """The factors in the order of the file, those that are contiguous as one."""
        return _merged(sorted(self.factors, key=lambda f: -f[1]))

    def permute(self, order: Sequence[int]) -> Places:
        return Places(tuple(self.dims[i] for i in order), self.offset)

    def narrow(self, dim: int, start: int, stop: int) -> Iterator[tuple[int, int, Places]]:
        """Split a range of a dim into as few parts as possible; yield (start, stop, places) of each."""
        factors = self.dims[dim]
        for a, b, ends in split([n for n, _ in factors], start, stop):
            inside = tuple((last - first, stride) for (first, last), (_, stride) in zip(ends, factors, strict=True))
            offset = self.offset + sum(first * stride for (first, _), (_, stride) in zip(ends, factors, strict=True))
            yield a, b, Places((*self.dims[:dim], inside, *self.dims[dim + 1 :]), offset)

    def boxes(self, box: Box) -> list[tuple[Box, Places]]:
        """Split a box of the tensor into parts, most often one, that are boxes of the factors, with their places."""
        out: list[tuple[Box, Places]] = [] if 0 in box_shape(box) else [((), self)]
        for dim, s in enumerate(box):
            out = [((*done, slice(a - s.start, b - s.start)), part) for done, places in out
                   for a, b, part in places.narrow(dim, s.start, s.stop)]  # fmt: skip
        return out

    def reshape(self, shape: Sequence[int]) -> Places:
        """Return the places of the tensor in another shape. Raises ShardingError if no factors have these sizes."""
        if 0 in shape:
            return Places(tuple(((n, 1),) for n in shape), self.offset)
        rest = _merged(self.factors)
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

    def chunks(self, x: Tensor, max_elements: int) -> Iterator[tuple[Tensor, list[int], int]]:
        """Split the tensor, `x`, into chunks of at most `max_elements`, in the order of the file.

        Yield a view of each, the offsets in the file of its contiguous runs, and the length of each run. The runs of a
        chunk, one after the other, are the elements of the view in order.
        """
        factors = self.factors
        # A stride of 0, of an expanded tensor, is outside the others, where it makes no run shorter.
        order = sorted(range(len(factors)), key=lambda i: (factors[i][1] > 0, -factors[i][1], -factors[i][0]))
        strides = [factors[i][1] for i in order]
        view = x.view([n for n, _ in factors]).permute(order)
        most = min(max_elements, _MAX_RUNS * _runs(view.shape, strides)[0])

        def parts(view: Tensor, offset: int) -> Iterator[tuple[Tensor, int]]:
            """Split along the slowest dim that has more than one index, until a part is small enough."""
            dim = next((d for d, n in enumerate(view.shape) if n > 1), None)
            if dim is None or view.numel() <= most:
                yield view, offset
                return
            rows = max(1, most // math.prod(view.shape[dim + 1 :]))
            for i, part in enumerate(torch.split(view, rows, dim)):
                yield from parts(part, offset + i * rows * strides[dim])

        for part, offset in parts(view, self.offset):
            run, dims = _runs(part.shape, strides)
            offsets = np.array([offset])
            for n, stride in dims:
                offsets = np.add.outer(offsets, np.arange(n) * stride)
            yield part, offsets.ravel().tolist(), run


def _runs(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, list[Factor]]:
    """Return the length of the contiguous runs of a tensor in the file, and (size, stride) of the dims of runs."""
    dims = _merged(zip(sizes, strides, strict=True))
    return (dims.pop()[0] if dims and dims[-1][1] == 1 else 1), dims


def _merged(factors: Iterable[Factor]) -> list[Factor]:
    """Return the factors that are not of size 1, neighbours that are contiguous in the file as one."""
    out: list[Factor] = []
    for size, stride in factors:
        if size == 1:
            continue
        if out and out[-1][1] == size * stride:
            size *= out.pop()[0]
        out.append((size, stride))
    return out


@dataclass(frozen=True)
class FilePart:
    """A box of a leaf, and the places of its elements in the tensor `name` in a file, which has `shape`.

    A leaf is one part, its full box, or several: the experts of a layer, each a tensor in the file.
    """

    box: Box
    name: str
    shape: tuple[int, ...]
    places: Places

    def places_in(self, entry: HeaderEntry) -> Places:
        """Return the places in this tensor, which may not be row-major."""
        return self.places if entry.strides is None else self.places.restride(self.shape, entry.strides)


def count_elements(parts: Iterable[FilePart]) -> int:
    return sum(math.prod(box_shape(part.box)) for part in parts)


def check_division(parts: Sequence[FilePart]) -> None:
    """Raise ShardingError unless the parts that patterns give divide a tensor in one way.

    Different parts are then disjoint: the dims that `at=` selects from are those between the runs of a part.
    """
    divisions = {tuple(part.places.runs): part for part in parts}
    if len(divisions) > 1:
        shown = [f"{list(box_shape(part.box))} of {list(part.shape)}" for part in divisions.values()]
        raise fail("is divided in different ways", *shown, fix="name the same dims, of the same sizes, in at=")


def split(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, tuple[tuple[int, int], ...]]]:
    """Split a range of a dim that has these factors into as few boxes of them as possible.

    Yield (start, stop, (start, stop) of each factor). Of (3 4), range(2, 11) is the end of a row, a row, and a start.
    """
    if len(sizes) <= 1:
        yield start, stop, ((start, stop),) * len(sizes)
        return
    row = math.prod(sizes[1:])
    full = (min(max(n, start), stop) for n in (-(-start // row) * row, stop // row * row))  # of the full rows
    for a, b in itertools.pairwise(sorted({start, *full, stop})):
        first = a // row
        if not a % row and not b % row:
            yield a, b, ((first, b // row), *((0, n) for n in sizes[1:]))
            continue
        for inner, end, ends in split(sizes[1:], a - first * row, b - first * row):
            yield inner + first * row, end + first * row, ((first, first + 1), *ends)
