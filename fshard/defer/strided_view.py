"""Strided views: a strided range of each dim of a base, with dims permuted, added and removed.

torch describes every view by sizes, strides and an offset into a storage. `strided_view` turns these into ranges of the
base's dims, so that a box of the view can be found in the base, and a box of the base in the view.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fshard.spec import Box

Shape = tuple[int, ...]
Range = tuple[int, int, int]  # (start, step, length)


@dataclass(frozen=True)
class StridedView:
    """Range of each dim of a base of shape `base`, and the base dim of each dim of the view.

    A base dim without a view dim has a range of length 1. A view dim of size 1 or stride 0 has None.
    """

    base: Shape
    ranges: tuple[Range, ...]
    dims: tuple[int | None, ...]
    shape: Shape

    @property
    def covers(self) -> bool:
        """Return whether the view has every element of the base exactly once."""
        in_full = all(r[::2] == (0, n) and (r[1] == 1 or n == 1) for r, n in zip(self.ranges, self.base, strict=True))
        return in_full and math.prod(self.shape) == math.prod(self.base)

    @property
    def is_identity(self) -> bool:
        kept = [d for d in self.dims if d is not None]
        return self.covers and self.shape == self.base and kept == sorted(kept)

    def inverse(self) -> StridedView:
        """Return the base as a view of this view, which must cover the base."""
        dims = tuple(self.dims.index(d) if d in self.dims else None for d in range(len(self.base)))
        return StridedView(self.shape, tuple((0, 1, n) for n in self.shape), dims, self.base)

    def in_base(self, box: Box) -> tuple[Box, tuple[slice, ...]]:
        """Return the smallest base box that has the elements of a box of the view, and their slices in it."""
        ranges = list(self.ranges)
        for d, s in zip(self.dims, box, strict=True):
            if d is not None:
                start, step, _ = self.ranges[d]
                ranges[d] = (start + step * s.start, step, s.stop - s.start)
        hull = tuple(slice(start, start + step * (n - 1) + 1) for start, step, n in ranges)
        return hull, tuple(slice(None, None, step) for _, step, _ in ranges)

    def in_view(self, box: Box) -> tuple[Box, tuple[slice, ...]] | None:
        """Return the box of the view that a base box has, and its slices in that base box; None if it is empty."""
        parts, slices = [], []
        for (start, step, length), s in zip(self.ranges, box, strict=True):
            low = min(max(-((start - s.start) // step), 0), length)  # ceil((s.start - start) / step)
            high = min(max(-((start - s.stop) // step), 0), length)
            if low >= high:
                return None
            parts.append(slice(low, high))
            first = start + step * low - s.start
            slices.append(slice(first, first + step * (high - low - 1) + 1, step))
        view = tuple(slice(0, n) if d is None else parts[d] for d, n in zip(self.dims, self.shape, strict=True))
        return view, tuple(slices)

    def arrange(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return base elements, one dim for each range, with the view's dims and these sizes."""
        kept = [d for d in self.dims if d is not None]
        dropped = [d for d in range(x.ndim) if d not in kept]  # of length 1
        x = x.permute([*kept, *dropped])
        for _ in dropped:
            x = x.select(-1, 0)
        for at, d in enumerate(self.dims):
            x = x.unsqueeze(at) if d is None else x
        return x.expand(tuple(sizes))


def strided_view(
    base: Shape, base_strides: Sequence[int], shape: Shape, strides: Sequence[int], offset: int
) -> StridedView | None:
    """Return the view of these sizes and strides, `offset` elements after the base's first; it is not empty.

    None if two dims of the view use one dim of the base, or one crosses the end of a base dim.
    """
    by_stride = sorted((d for d, n in enumerate(base) if n > 1 and base_strides[d]), key=lambda d: -base_strides[d])
    ranges = [(0, 1, 1)] * len(base)
    for d in by_stride:
        start, offset = divmod(offset, base_strides[d])
        if start >= base[d]:
            return None
        ranges[d] = (start, 1, 1)
    if offset:
        return None
    dims: list[int | None] = []
    for n, stride in zip(shape, strides, strict=True):
        if n == 1 or stride == 0:
            dims.append(None)
            continue
        # A view dim would cross the end of a base dim of smaller stride; a base dim of larger stride is too coarse.
        d = next((d for d in by_stride if base_strides[d] <= stride), -1)
        if d < 0 or stride % base_strides[d] or ranges[d][2] > 1:
            return None
        start, step = ranges[d][0], stride // base_strides[d]
        if start + step * (n - 1) >= base[d]:
            return None
        ranges[d] = (start, step, n)
        dims.append(d)
    return StridedView(base, tuple(ranges), tuple(dims), shape)


def broadcast_view(base: Shape, shape: Shape) -> StridedView:
    """Return the base repeated to a shape, as `expand` does."""
    dims = [None] * (len(shape) - len(base)) + [None if n == 1 else d for d, n in enumerate(base)]
    return StridedView(base, tuple((0, 1, n) for n in base), tuple(dims), shape)


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def refined_shape(numel: int, shape: Sequence[int], strides: Sequence[int]) -> Shape | None:
    """Return a shape of `numel` elements in which each view dim uses one dim; None if the strides do not divide.

    >>> refined_shape(48, (3, 4), (16, 1))
    (3, 16)
    """
    sizes: list[int] = []
    for stride in sorted({1, *(s for n, s in zip(shape, strides, strict=True) if n > 1 and s)}, reverse=True):
        if numel % stride:
            return None
        sizes.append(numel // stride)
        numel = stride
    return tuple(sizes)
