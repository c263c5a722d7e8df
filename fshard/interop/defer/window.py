"""Windows: views that pick a strided range of each dim of a base, in any order, with dims of size 1 come and gone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fshard.spec import Box

Shape = tuple[int, ...]
Range = tuple[int, int, int]  # (start, step, length)


@dataclass(frozen=True)
class Window:
    """A view of a base of shape `base`: which range of each of its dims, and which of them each dim of the view is.

    A base dim that is no dim of the view has a range of length 1. A view dim that is none of the base, None, repeats.
    """

    base: Shape
    ranges: tuple[Range, ...]
    dims: tuple[int | None, ...]
    shape: Shape

    @property
    def covers(self) -> bool:
        """Whether every element of the base is seen, and seen once."""
        whole = all(r == (0, 1, n) for r, n in zip(self.ranges, self.base, strict=True))
        return whole and math.prod(self.shape) == math.prod(self.base)

    def then(self, after: Window) -> Window:
        """The window that `after`, a view of this view, is of the base."""
        ranges = list(self.ranges)
        for d, (start, step, length) in zip(self.dims, after.ranges, strict=True):
            if d is not None:
                first, by, _ = self.ranges[d]
                ranges[d] = (first + by * start, by * step, length)
        dims = tuple(None if d is None else self.dims[d] for d in after.dims)
        return Window(self.base, tuple(ranges), dims, after.shape)

    def inverse(self) -> Window:
        """Of a window that covers its base: the base as a window of the view."""
        dims = tuple(self.dims.index(b) if b in self.dims else None for b in range(len(self.base)))
        return Window(self.shape, tuple((0, 1, n) for n in self.shape), dims, self.base)

    def source(self, box: Box) -> tuple[Box, tuple[slice, ...]]:
        """(the base's box that holds a box of the view, the steps to take in it)."""
        ranges = list(self.ranges)
        for d, s in zip(self.dims, box, strict=True):
            if d is not None:
                first, by, _ = self.ranges[d]
                ranges[d] = (first + by * s.start, by, s.stop - s.start)
        hull = tuple(slice(a, a + step * (n - 1) + 1 if n else a) for a, step, n in ranges)
        return hull, tuple(slice(None, None, step) for _, step, _ in ranges)

    def arrange(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Base elements, one for each of the ranges, as a view of these sizes."""
        kept = [d for d in self.dims if d is not None]
        gone = [d for d in range(x.ndim) if d not in kept]
        x = x.permute(*kept, *gone).flatten(len(kept)) if gone else x.permute(kept)
        x = x.squeeze(-1) if gone else x
        for at, d in enumerate(self.dims):
            if d is None:
                x = x.unsqueeze(at)
        return x.expand(tuple(sizes))

    def meets(self, box: Box) -> tuple[Box, tuple[slice, ...]] | None:
        """(the view's box that lies in a box of the base, where in that box it lies); None if nothing does."""
        at, inside = [], []
        for (start, step, length), s in zip(self.ranges, box, strict=True):
            low = min(max(-((start - s.start) // step), 0), length)  # ceil((s.start - start) / step)
            high = min(max(-((start - s.stop) // step), 0), length)
            if low >= high:
                return None
            at.append(slice(low, high))
            first = start + step * low - s.start
            inside.append(slice(first, first + step * (high - low - 1) + 1, step))
        view = tuple(slice(0, n) if d is None else at[d] for d, n in zip(self.dims, self.shape, strict=True))
        return view, tuple(inside)


def identity(shape: Shape) -> Window:
    """All of a base, as it is."""
    return Window(shape, tuple((0, 1, n) for n in shape), tuple(range(len(shape))), shape)


# --- what torch's views are -----------------------------------------------------------------------------------


def _pick(shape: Shape, dim: int, start: int, step: int, length: int) -> Window:
    whole = identity(shape)
    ranges = tuple((start, step, length) if d == dim else r for d, r in enumerate(whole.ranges))
    return Window(shape, ranges, whole.dims, tuple(length if d == dim else n for d, n in enumerate(shape)))


def _without(window: Window, dims: Sequence[int]) -> Window:
    kept = [i for i in range(len(window.dims)) if i not in dims]
    return Window(window.base, window.ranges, tuple(window.dims[i] for i in kept), tuple(window.shape[i] for i in kept))


def _permuted(shape: Shape, order: Sequence[int]) -> Window:
    whole = identity(shape)
    return Window(shape, whole.ranges, tuple(order), tuple(shape[d] for d in order))


def _select(shape: Shape, out: Shape, at: int, dim: int, index: int) -> Window:
    dim %= len(shape)
    return _without(_pick(shape, dim, index % shape[dim], 1, 1), [dim])


def _slice(
    shape: Shape, out: Shape, at: int, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Window:
    dim %= len(shape)
    first, _, by = slice(start, end, step).indices(shape[dim])
    return _pick(shape, dim, first, by, out[dim])


def _split(shape: Shape, out: Shape, at: int, size: int, dim: int = 0) -> Window:
    dim %= len(shape)
    return _pick(shape, dim, size * at, 1, out[dim])


def _split_sizes(shape: Shape, out: Shape, at: int, sizes: Sequence[int], dim: int = 0) -> Window:
    dim %= len(shape)
    return _pick(shape, dim, sum(sizes[:at]), 1, out[dim])


def _unbind(shape: Shape, out: Shape, at: int, dim: int = 0) -> Window:
    return _select(shape, out, 0, dim, at)


def _transpose(shape: Shape, out: Shape, at: int, a: int = 0, b: int = 1) -> Window:
    order = list(range(len(shape)))
    if order:
        order[a], order[b] = order[b], order[a]
    return _permuted(shape, order)


def _t(shape: Shape, out: Shape, at: int) -> Window:
    return _permuted(shape, range(len(shape))[::-1])


def _permute(shape: Shape, out: Shape, at: int, dims: Sequence[int]) -> Window:
    return _permuted(shape, [d % len(shape) for d in dims])


def _unsqueeze(shape: Shape, out: Shape, at: int, dim: int) -> Window:
    dim %= len(shape) + 1
    whole = identity(shape)
    return Window(shape, whole.ranges, (*whole.dims[:dim], None, *whole.dims[dim:]), out)


def _expand(shape: Shape, out: Shape, at: int, size: Any = None, *, implicit: bool = False) -> Window:
    new = len(out) - len(shape)
    dims = [None if i < new or shape[i - new] != n else i - new for i, n in enumerate(out)]
    return Window(shape, tuple((0, 1, n) for n in shape), tuple(dims), out)


def _reshape(shape: Shape, out: Shape, at: int, *_: Any, **__: Any) -> Window | None:
    kept = [d for d, n in enumerate(shape) if n != 1]
    if tuple(shape[d] for d in kept) != tuple(n for n in out if n != 1):
        return None
    queue = iter(kept)
    return Window(shape, identity(shape).ranges, tuple(None if n == 1 else next(queue) for n in out), out)


def _same(shape: Shape, out: Shape, at: int, *_: Any, **__: Any) -> Window | None:
    return identity(shape) if shape == out else None


VIEWS: Mapping[str, Callable[..., Window | None]] = {
    "select": _select, "slice": _slice, "split": _split, "split_with_sizes": _split_sizes, "unbind": _unbind,
    "transpose": _transpose, "t": _t, "permute": _permute, "unsqueeze": _unsqueeze, "expand": _expand,
    "squeeze": _reshape, "view": _reshape, "_unsafe_view": _reshape, "_reshape_alias": _reshape,
    "alias": _same, "detach": _same, "view_as": _same,
}  # fmt: skip


def window_of(name: str, shape: Shape, out: Shape, at: int, args: Sequence[Any], kwargs: Any) -> Window | None:
    """The window that output `at`, of shape `out`, of a view operation is; None if it is no window."""
    rule = VIEWS.get(name)
    return None if rule is None else rule(shape, out, at, *args, **kwargs)
