"""Tensors without values that know the places of their elements in files: the conversions of transformers run on them.

A conversion concatenates, splits, transposes and reshapes tensors. On a `Traced` tensor, which is on the meta device,
torch computes the shapes, and the rules here the places. An operation that computes values is refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fshard.errors import fail
from fshard.spec import box_shape, full_box

from .places import FilePart, Places, split

Parts = tuple[FilePart, ...]


class Traced(Tensor):
    """A tensor on the meta device, and the parts of tensors in files that it consists of.

    >>> x = torch.cat([trace("q", (2, 3), torch.float32), trace("k", (4, 3), torch.float32)])
    >>> [(part.name, part.box[0]) for part in x.parts]
    [('q', slice(0, 2, None)), ('k', slice(2, 6, None))]

    Raises ShardingError for an operation that has no rule here.
    """

    parts: Parts

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        kwargs = dict(kwargs or {})
        out = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        results = list(out) if isinstance(out, (tuple, list)) else [out]
        if not any(isinstance(x, Tensor) for x in results):
            return out
        rule = _RULES.get(func.__name__)
        if rule is None:
            raise fail(f"{func.__name__}: the places of its result in files are not known",
                       f"operations that are followed: {', '.join(sorted(_RULES))}")  # fmt: skip
        for x, parts in zip(results, rule(results, *args, **kwargs), strict=True):
            x.parts = tuple(parts)
        return out


def trace(name: str, shape: Sequence[int], dtype: torch.dtype) -> Traced:
    """Return a complete tensor in a file."""
    x = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(Traced)
    x.parts = (FilePart(full_box(shape), name, tuple(shape), Places.of(shape)),)
    return x


# --- rules: the results, and the arguments of the operation -> the parts of each result -----------------------

Results = Sequence[Tensor]


def _same(results: Results, x: Traced, *_: Any, **__: Any) -> list[Parts]:
    return [x.parts]


def _reshape(results: Results, x: Traced, *_: Any, **__: Any) -> list[Parts]:
    shape = tuple(results[0].shape)
    return [tuple(new for part in x.parts for new in _reshape_part(part, tuple(x.shape), shape))]


def _permute(results: Results, x: Traced, *order: Any, dims: Any = None) -> list[Parts]:
    dims = dims if dims is not None else order[0] if order and not isinstance(order[0], int) else order
    dims = [d % x.ndim for d in dims]
    return [tuple(replace(p, box=tuple(p.box[d] for d in dims), places=p.places.permute(dims)) for p in x.parts)]


def _transpose(results: Results, x: Traced, dim0: int = 0, dim1: int = 1) -> list[Parts]:
    order = list(range(x.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(results, x, order)


def _chunk(results: Results, x: Traced, _: Any = None, dim: int = 0) -> list[Parts]:
    dim %= x.ndim
    stops = list(itertools.accumulate(y.shape[dim] for y in results))
    return [tuple(_narrow(x.parts, dim, a, b)) for a, b in zip([0, *stops], stops, strict=False)]


def _unbind(results: Results, x: Traced, dim: int = 0) -> list[Parts]:
    return [y.squeeze(dim).parts for y in x.split(1, dim)]  # type: ignore[no-untyped-call]


def _cat(results: Results, tensors: Sequence[Traced], dim: int = 0) -> list[Parts]:
    dim %= results[0].ndim
    parts: list[FilePart] = []
    start = 0
    for x in tensors:
        parts += [replace(p, box=_moved(p, dim, start)) for p in x.parts]
        start += x.shape[dim]
    return [tuple(parts)]


def _stack(results: Results, tensors: Sequence[Traced], dim: int = 0) -> list[Parts]:
    dim %= results[0].ndim
    return _cat(results, [x.unsqueeze(dim) for x in tensors], dim)  # type: ignore[misc]


_RULES: dict[str, Callable[..., list[Parts]]] = {
    "contiguous": _same, "clone": _same, "detach": _same,
    "reshape": _reshape, "view": _reshape, "flatten": _reshape, "squeeze": _reshape, "unsqueeze": _reshape,
    "permute": _permute, "transpose": _transpose,
    "chunk": _chunk, "split": _chunk, "unbind": _unbind, "cat": _cat, "stack": _stack,
}  # fmt: skip


def _moved(part: FilePart, dim: int, by: int) -> tuple[slice, ...]:
    return tuple(slice(s.start + by, s.stop + by) if d == dim else s for d, s in enumerate(part.box))


def _narrow(parts: Parts, dim: int, start: int, stop: int) -> Iterator[FilePart]:
    """Yield the parts of a range of a dim, by their boxes in it."""
    for part in parts:
        at = part.box[dim]
        a, b = max(at.start, start), min(at.stop, stop)
        if a >= b:
            continue
        for first, last, places in part.places.narrow(dim, a - at.start, b - at.start):
            inside = slice(at.start + first - start, at.start + last - start)
            yield replace(part, box=(*part.box[:dim], inside, *part.box[dim + 1 :]), places=places)


def _reshape_part(part: FilePart, before: tuple[int, ...], after: tuple[int, ...]) -> Iterator[FilePart]:
    """Yield the parts of a tensor of shape `before`, once that has shape `after`, of one part of it.

    1. Dims at both ends that do not change keep their ranges.
    2. The other dims become one; the part is a range of it, or is split into ranges.
    3. That range is split into boxes of the new dims.
    """
    if 0 in before:
        yield replace(part, box=full_box(after), places=part.places.reshape(after))
        return
    most = min(len(before), len(after))
    head = next((i for i in range(most) if before[i] != after[i]), most)
    most -= head
    tail = next((i for i in range(most) if before[-1 - i] != after[-1 - i]), most)
    old, new = slice(head, len(before) - tail), slice(head, len(after) - tail)
    strides = [math.prod(before[old][i + 1 :]) for i in range(len(before[old]))]
    start = sum(s.start * n for s, n in zip(part.box[old], strides, strict=True))
    last = sum((s.stop - 1) * n for s, n in zip(part.box[old], strides, strict=True))
    kept = [s.stop - s.start for s in part.box]
    if math.prod(kept[old]) != last + 1 - start:  # as every other row of the new dims: each index is a range
        dim = next(d for d in range(old.start, old.stop) if kept[d] > 1)
        for i in range(part.box[dim].start, part.box[dim].stop):
            for row in _narrow((part,), dim, i, i + 1):
                yield from _reshape_part(replace(row, box=_moved(row, dim, i)), before, after)
        return
    flat = part.places.reshape([*kept[:head], last + 1 - start, *kept[old.stop :]])
    for a, b, ends in split(after[new], start, last + 1):
        pieces = list(flat.narrow(head, a - start, b - start))
        if len(pieces) > 1:
            raise fail(f"a part of a tensor cannot be reshaped from {list(before)} to {list(after)}")
        box = (*part.box[:head], *(slice(*end) for end in ends), *part.box[old.stop :])
        yield replace(part, box=box, places=pieces[0][2].reshape(box_shape(box)))
