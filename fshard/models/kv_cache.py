"""Decoding: positions of tokens, and the cache of keys and values.

Legend: B batch, T the tokens of this call, S those and all before, H heads, K head width, V vocabulary;
[V@model] is a dim split over an axis; {I} does not vary over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fshard import nn, tree
from fshard._core.ops import global_size
from fshard.collectives import all_gather
from fshard.errors import fail
from fshard.nn.decoding import check_ids
from fshard.spec import Axis


class KeyValues(NamedTuple):
    """The cached keys and values of one block, each [B, H@model, capacity, K]; the tokens so far come first."""

    k: Tensor
    v: Tensor


class Cache(NamedTuple):
    """Keys and values of all blocks for `length` tokens, with room for `capacity`; `Cache(capacity)` is empty.

    A call consumes the cache it is passed: the returned cache reuses its storage.

    >>> cache = Cache(8)
    >>> logits, cache = fs.models.gpt2.apply(cfg, params, ids, cache=cache)
    >>> logits.shape, cache.length
    (torch.Size([2, 4, 32]), 4)
    """

    capacity: int
    length: int = 0
    blocks: Sequence[Any] = ()  # of each block its KeyValues; in an encoder-decoder a pair, the second of the source

    def reordered(self, rows: Tensor) -> Cache:
        """Return the cache of these rows [B] of the batch."""
        return self._replace(blocks=tree.map(lambda x: x.index_select(0, rows), self.blocks))

    def updated(self, blocks: Sequence[Any], count: int) -> Cache:
        """Return the cache with `count` more tokens, which `blocks` have."""
        return Cache(self.capacity, self.length + count, tuple(blocks))


class Tokens(NamedTuple):
    """The positions of the tokens of a call, and the positions each of them attends to."""

    start: int  # the number of tokens before
    t: int
    positions: Tensor  # [T], or [B, T] with a mask or documents
    mask: Tensor | None  # [B, 1, T, S], True where a token attends to a position; None: all up to it
    capacity: int  # of the cache; 0 without one
    real: Tensor | None = None  # [B, T], False for padding
    documents: Tensor | None = None  # [B, T@context]: numbers, if a token attends only to its document
    size: int | None = None  # of the sequence, where an axis splits it

    @property
    def total(self) -> int:
        """The number of tokens of this call, on all ranks."""
        return self.t if self.size is None else self.size

    @property
    def stop(self) -> int:
        """The number of tokens so far, on all ranks."""
        return self.start + self.total

    @staticmethod
    def of(
        ids: Tensor, mask: Tensor | None = None, cache: Cache | None = None, documents: Tensor | None = None,
        context: Axis = None,
    ) -> Tokens:  # fmt: skip
        """Locate ids [B, T], or [B, T@context] in the zigzag order.

        A mask [B, S] is nonzero for tokens and 0 for padding, which positions do not count; with packed `documents`
        [B, T] positions begin anew with each.
        """
        check_ids("model", ids)
        if (cache is not None and context) or (documents is not None and (cache is not None or mask is not None)):
            raise fail("model: Layout(context=) takes no cache, and documents take neither a cache nor a mask",
                       fix="generate with a Layout without context; padding as a document")  # fmt: skip
        t, start, capacity = ids.shape[1], 0 if cache is None else cache.length, 0 if cache is None else cache.capacity
        s, attended = start + t, None
        if cache is not None and s > capacity:
            raise fail(f"decoding: {s} tokens do not fit a cache of {capacity}", fix=f"Cache({s})")
        real = None if mask is None else mask != 0
        numbers = documents if real is None else real.long()
        if numbers is not None and tuple(numbers.shape) != (len(ids), s):
            raise fail("model: a mask, or documents, must have one entry for each token, also for those in the cache",
                       got=list(numbers.shape), needed=[len(ids), s])  # fmt: skip
        size = global_size("model", t, context, word="an even T") if context else s
        positions = nn.zigzag_positions(size, context) if context else torch.arange(start, s, device=ids.device)
        if numbers is not None:
            if context:
                numbers = all_gather(nn.from_zigzag(numbers, context, size=size), context, 1, size=size)
            if documents is not None:
                begins = F.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0), value=True)
                every = torch.arange(size, device=ids.device)
                numbers = every - torch.where(begins, every, 0).cummax(1).values
            else:
                numbers = (numbers.cumsum(1) - 1).clamp(min=0)
            positions = numbers[:, positions] if context else numbers[:, start:]
        if real is not None and not context:
            attended = real[:, None, None, :] & nn.causal_mask(t, s, device=ids.device)
        elif documents is not None and not context:
            same = documents[:, None, :, None] == documents[:, None, None, :]
            attended = same & nn.causal_mask(t, t, device=ids.device)
        return Tokens(start, t, positions, attended, capacity, None if real is None else real[:, start:], documents,
                      size if context else None)  # fmt: skip


def append_to_cache(
    k: Tensor, v: Tensor, tokens: Tokens, cached: KeyValues | None
) -> tuple[Tensor, Tensor, KeyValues | None]:
    """Append the keys and values of these tokens, [B, H, T, K], to those before, in place: all, [B, H, S, K], and both.

    Without a cache, the keys and values are returned unchanged.
    """
    if not tokens.capacity:
        return k, v, None
    if cached is None:
        b, h, _, width = k.shape
        cached = KeyValues(k.new_zeros(b, h, tokens.capacity, width), v.new_zeros(b, h, tokens.capacity, v.shape[-1]))
    stop = tokens.start + tokens.t
    cached.k[:, :, tokens.start : stop] = k
    cached.v[:, :, tokens.start : stop] = v
    return cached.k[:, :, :stop], cached.v[:, :, :stop], cached
