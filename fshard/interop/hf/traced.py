"""Tensors without values that know the places of their elements in files: the conversions of transformers run on them.

A conversion concatenates, splits, transposes and reshapes tensors. On a `Traced` tensor, which is on the meta device,
torch computes the shapes, and the rules here the places. An operation that computes values is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fshard.errors import fail
from fshard.spec import full_box

from .places import Places
from .weights import FilePart

Parts = tuple[FilePart, ...]


class Traced(Tensor):
    """A tensor on the meta device, and the parts of tensors in files that it consists of.

    >>> x = torch.cat([trace("q", (2, 3), torch.float32), trace("k", (4, 3), torch.float32)])
    >>> [(part.name, part.box[0]) for part in x.parts]
    [('q', slice(0, 2, None)), ('k', slice(2, 6, None))]

    Raises ShardingError for an operation that does not only move elements.
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
            raise fail(f"{func.__name__} computes values, and a conversion may only move them")
        for x, parts in zip(results, rule(results, *args, **kwargs), strict=True):
            x.parts = tuple(parts)
        return out


def trace(name: str, shape: Sequence[int], dtype: torch.dtype) -> Traced:
    """Return a whole tensor in a file."""
    x = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(Traced)
    x.parts = (FilePart(full_box(shape), name, tuple(shape), Places.of(shape)),)
    return x


# --- rules: the results, and the arguments of the operation -> the parts of each result -----------------------

Results = Sequence[Tensor]


def _same(results: Results, x: Traced, *_: Any, **__: Any) -> list[Parts]:
    return [x.parts]


def _reshape(results: Results, x: Traced, *_: Any, **__: Any) -> list[Parts]:
    shape = tuple(results[0].shape)
    return [tuple(_reshape_part(part, tuple(x.shape), shape) for part in x.parts)]


def _permute(results: Results, x: Traced, *order: Any, dims: Any = None) -> list[Parts]:
    dims = dims if dims is not None else order[0] if order and not isinstance(order[0], int) else order
    dims = [d % x.ndim for d in dims]
    return [tuple(replace(p, box=tuple(p.box[d] for d in dims), places=p.places.permute(dims)) for p in x.parts)]


def _transpose(results: Results, x: Traced, dim0: int = 0, dim1: int = 1) -> list[Parts]:
    order = list(range(x.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(results, x, order)


def _split(results: Results, x: Traced, _: Any = None, dim: int = 0) -> list[Parts]:
    dim %= x.ndim
    stops = list(itertools.accumulate(y.shape[dim] for y in results))
    return [tuple(_narrow(x.parts, dim, a, b)) for a, b in zip([0, *stops], stops, strict=False)]


def _unbind(results: Results, x: Traced, dim: int = 0) -> list[Parts]:
    dim %= x.ndim
    return [
        tuple(_reshape_part(part, (*x.shape[:dim], 1, *x.shape[dim + 1 :]), tuple(y.shape))
              for part in _narrow(x.parts, dim, i, i + 1))
        for i, y in enumerate(results)
    ]  # fmt: skip


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
    return [tuple(
        FilePart((*p.box[:dim], slice(i, i + 1), *p.box[dim:]), p.name, p.shape,
                 Places((*p.places.dims[:dim], (), *p.places.dims[dim:]), p.places.offset))
        for i, x in enumerate(tensors) for p in x.parts
    )]  # fmt: skip


_RULES: dict[str, Callable[..., list[Parts]]] = {
    "contiguous": _same, "clone": _same, "detach": _same,
    "reshape": _reshape, "view": _reshape, "flatten": _reshape, "squeeze": _reshape, "unsqueeze": _reshape,
    "permute": _permute, "transpose": _transpose,
    "chunk": _split, "split": _split, "unbind": _unbind, "cat": _cat, "stack": _stack,
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


def _reshape_part(part: FilePart, before: tuple[int, ...], after: tuple[int, ...]) -> FilePart:
    """Return a part of a tensor of shape `before`, once that has shape `after`.

    Dims at both ends that stay as they are may be split among parts, and so may others if they become one dim.
    """
    most = min(len(before), len(after))
    head = next((i for i in range(most) if before[i] != after[i]), most)
    most -= head
    tail = next((i for i in range(most) if before[-1 - i] != after[-1 - i]), most)
    old, new = part.box[head : len(before) - tail], after[head : len(after) - tail]
    sizes = before[head : len(before) - tail]
    if all(s.start == 0 and s.stop == n for s, n in zip(old, sizes, strict=True)):
        middle = full_box(new)
    elif len(new) == 1 and all(s.start == 0 and s.stop == n for s, n in zip(old[1:], sizes[1:], strict=True)):
        row = new[0] // sizes[0]
        middle = (slice(old[0].start * row, old[0].stop * row),)
    else:
        raise fail(f"a tensor of several parts cannot be reshaped from {list(before)} to {list(after)}")
    box = (*part.box[:head], *middle, *part.box[len(before) - tail :])
    return replace(part, box=box, places=part.places.reshape([s.stop - s.start for s in box]))
