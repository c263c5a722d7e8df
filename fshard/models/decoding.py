"""Decoding: positions of tokens, the cache of keys and values, and the loop that generates more tokens.

Legend: B batch, T the tokens of this call, S those and all before, H heads, K head width, V vocabulary;
[V@model] is a dim split over an axis; {I} does not vary over it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fshard import nn, random
from fshard._comm import Axis, region
from fshard._ops import global_size, local_range
from fshard.collectives import axis_size, pmax, pmin, pvary
from fshard.errors import fail
from fshard.random import fold_in
from fshard.spec import P


class KeyValues(NamedTuple):
    """The cached keys and values of one block, each [B, H@model, capacity, K]; the tokens so far come first."""

    k: Tensor
    v: Tensor


class Cache(NamedTuple):
    """Keys and values of all blocks for `length` tokens, with room for `capacity`; `Cache(capacity)` is empty.

    A call consumes the cache it is passed: the returned cache reuses its storage.
    """

    capacity: int
    length: int = 0
    blocks: Sequence[KeyValues] = ()

    def updated(self, blocks: Sequence[KeyValues], count: int) -> Cache:
        """The cache with `count` more tokens, which `blocks` have."""
        return Cache(self.capacity, self.length + count, tuple(blocks))


class Tokens(NamedTuple):
    """The positions of the tokens of a call, and the positions each of them attends to."""

    start: int  # the number of tokens before
    t: int
    positions: Tensor  # [T], or [B, T] with a mask
    mask: Tensor | None  # [B, 1, T, S], True where a token attends to a position; None: all up to its own
    capacity: int  # of the cache; 0 without one

    @staticmethod
    def of(ids: Tensor, mask: Tensor | None = None, cache: Cache | None = None) -> Tokens:
        """ids [B, T]; mask [B, S], nonzero for tokens and 0 for padding, which positions do not count."""
        check_ids("model", ids)
        t, start = ids.shape[1], 0 if cache is None else cache.length
        s, capacity = start + t, 0 if cache is None else cache.capacity
        if cache is not None and s > capacity:
            raise fail(f"decoding: {s} tokens do not fit a cache of {capacity}", fix=f"Cache({s})")
        if mask is None:
            return Tokens(start, t, torch.arange(start, s, device=ids.device), None, capacity)
        if tuple(mask.shape) != (len(ids), s):
            raise fail("decoding: the mask must have one entry for each token, also for those in the cache",
                       mask=list(mask.shape), needed=[len(ids), s])  # fmt: skip
        real = mask != 0
        positions = (real.long().cumsum(1) - 1).clamp(min=0)[:, start:]
        attended = real[:, None, None, :] & nn.causal_mask(t, s, device=ids.device)
        return Tokens(start, t, positions, attended, capacity)


def check_ids(verb: str, ids: Tensor) -> None:
    """Raise ShardingError unless ids are integers [B, T]."""
    if ids.ndim != 2 or ids.dtype not in (torch.int32, torch.int64):
        raise fail(f"{verb}: ids must be int64 or int32 [B, T]", f"got {ids.dtype} of shape {list(ids.shape)}",
                   fix="ids[None] for one sequence; ids.long()")  # fmt: skip


def append_to_cache(
    k: Tensor, v: Tensor, tokens: Tokens, cached: KeyValues | None
) -> tuple[Tensor, Tensor, KeyValues | None]:
    """Append the keys and values of these tokens, [B, H, T, K], to those before, in place: all, [B, H, S, K], and both.

    Without a cache, the keys and values are returned as they are.
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


# A model with its other arguments: (ids [B, T], mask [B, S], cache) -> logits [B, T, V@model] and the updated cache.
Step = Callable[[Tensor, Tensor | None, Cache], tuple[Tensor, Cache]]


def generate(
    step: Step, ids: Tensor, *, new: int, size: int, data: Axis = None, model: Axis = None, mask: Tensor | None = None,
    eos: int | None = None, pad: int | None = None, temperature: float = 0.0, key: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Generate `new` more tokens for each sequence: ids [B@data, T] -> [B@data, T + new].

    Takes the likeliest token, the first among equals; with a `temperature`, draws one by `key`, the same on every
    mesh. After `eos` a sequence is filled with `pad` (default: `eos`). Prompts of unequal lengths are padded on the
    left, and `mask` [B@data, T] is 0 there. `size` is V.
    """
    check_ids("generate", ids)
    if temperature < 0 or (temperature > 0 and key is None):
        raise fail(f"generate: temperature={temperature}, key={key}",
                   fix="temperature=0 takes the likeliest; more needs a key")  # fmt: skip
    if eos is None and pad is not None:
        raise fail(f"generate: pad={pad} without eos", fix="name the token that ends a sequence: eos=")
    if new < 0 or not ids.shape[1]:
        raise fail(f"generate: {new} new tokens after {ids.shape[1]}", fix="new=0 or more, after one token or more")
    pad = eos if pad is None else pad
    batch = global_batch("generate", len(ids), data, word="prompts that the data axis divides") if temperature else 0
    cache = Cache(ids.shape[1] + new)
    unfinished = torch.ones_like(ids[:, 0], dtype=torch.bool)
    out, last = [ids], ids
    with torch.no_grad():
        for i in range(new):
            all_logits, cache = step(last, mask, cache)
            logits = all_logits[:, -1]
            if temperature and key is not None:
                logits = logits / temperature + _gumbel_noise(fold_in(key, i), logits, (batch, size), P(data, model))
            token = argmax(logits, model, size)
            if eos is not None:
                token = torch.where(unfinished, token, torch.full_like(token, pad or 0))
                unfinished = unfinished & (token != eos)
            last = token.unsqueeze(1)
            out.append(last)
            if mask is not None:
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return torch.cat(out, 1)


def argmax(logits: Tensor, axis: Axis, size: int) -> Tensor:
    """The class of the highest logit, the first among equals: [B, V@axis] -> [B]{I}; `size` is V."""
    first, whole = local_range("argmax", logits.shape[-1], axis, size)
    if not axis:
        return logits.argmax(-1)
    local = logits if logits.shape[-1] else logits.new_full((len(logits), 1), -math.inf)
    value, index = local.max(-1)
    best = pvary(pmax(value, axis), axis)
    out: Tensor = pmin(torch.where(value == best, index + first, whole), axis)
    return out


def _gumbel_noise(key: Tensor, logits: Tensor, shape: tuple[int, int], spec: P) -> Tensor:
    """Noise that makes the argmax of logits a draw from their softmax; `shape` is global. Source: Gumbel, 1954."""
    uniform = random.uniform(key, shape, spec=spec, device=logits.device)
    return -(-uniform.log()).log()


def global_batch(verb: str, n: int, axis: Axis, *, word: str) -> int:
    """The rows of all ranks over `axis`, of which this rank has `n`; `word` says in errors how to state it.

    Without values, on an abstract mesh, every rank is assumed to have `n`.
    """
    if axis and not region(verb).comm.has_values:
        return n * axis_size(axis)
    return global_size(verb, n, axis, word=word) if axis else n
