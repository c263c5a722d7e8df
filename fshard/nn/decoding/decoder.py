"""A model that generates, and the end of its sequences, on which all ranks agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard._core.region import in_region, live_axes, region, unchecked
from fshard.errors import fail

from .options import Options


class Decoder(NamedTuple):
    """A model with its other arguments, and its cache.

    step(ids [B, T], mask [B, S] or None, cache) -> (logits of the last token [B, V@model], the cache with these tokens)
    reorder(cache, rows [B]) -> the cache of these rows; for beams

    >>> def step(ids, mask, cache):                          # the likeliest token is the next number
    ...     return torch.nn.functional.one_hot((ids[:, -1] + 1) % 8, 8).float(), None
    >>> decoder = Decoder(step, lambda cache, rows: cache, None)
    >>> decoder.step(torch.tensor([[3]]), None, decoder.cache)[0]
    tensor([[0., 0., 0., 0., 1., 0., 0., 0.]])
    """

    step: Callable[[Tensor, Tensor | None, Any], tuple[Tensor, Any]]
    reorder: Callable[[Any, Tensor], Any]
    cache: Any


def check_ids(verb: str, ids: Tensor, name: str = "ids") -> None:
    """Raise ShardingError unless ids are integers [B, T]. `name` is the name of the argument.

    >>> check_ids("generate", torch.ones(3))
    Traceback (most recent call last):
        ...
    ShardingError: generate: ids must be int64 or int32 [B, T]
      got torch.float32 of shape [3]
      fix: ids[None] for one sequence; ids.long()
    """
    if ids.ndim != 2 or ids.dtype not in (torch.int32, torch.int64):
        raise fail(f"{verb}: {name} must be int64 or int32 [B, T]", f"got {ids.dtype} of shape {list(ids.shape)}",
                   fix=f"{name}[None] for one sequence; {name}.long()")  # fmt: skip


def ended(tokens: Tensor, options: Options) -> Tensor:
    """Mark the sequences [*, N] of new tokens that end with one of `options.ends`: [*]."""
    out = torch.zeros_like(tokens[..., 0], dtype=torch.bool)
    for end in options.ends:
        if len(end) <= tokens.shape[-1]:
            out = out | (tokens[..., -len(end) :] == torch.tensor(end, device=tokens.device)).all(-1)
    return out


def on_any_rank(marked: Tensor) -> bool:
    """Return whether any entry on any rank of the mesh is marked; True where ranks cannot read values."""
    if torch.compiler.is_dynamo_compiling():
        return True
    if not in_region():
        return bool(marked.any())
    current = region()
    if current.comm.static_sizes:
        return True
    # All axes: a rank that ends before others, which wait for its part of the weights, would leave them waiting.
    axes = live_axes(current.comm, tuple(current.sizes))
    with unchecked():
        number = marked.any().long()
        return bool(current.comm.all_reduce(number, "max", axes) if axes else number)
