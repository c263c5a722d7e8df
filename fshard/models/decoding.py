"""Decoding: where tokens stand in their sequences, what attention has seen of them, and the loop that adds more.

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


class Seen(NamedTuple):
    """The keys and values of one block, each [B, H@model, room, K]: those of the tokens so far, then free room."""

    k: Tensor
    v: Tensor


class Cache(NamedTuple):
    """What all the blocks have seen of `length` tokens, with room for more; `Cache(room)` has seen none.

    A call uses up the cache it is given: its storage goes on in the one that comes back.
    """

    room: int
    length: int = 0
    blocks: Sequence[Seen] = ()

    def after(self, seen: Sequence[Seen], count: int) -> Cache:
        """The cache once `count` more tokens are in it."""
        return Cache(self.room, self.length + count, tuple(seen))


class Tokens(NamedTuple):
    """Where the tokens of a call stand, and what each of them sees."""

    start: int  # how many came before
    t: int  # how many they are
    positions: Tensor  # [T], or [B, T] where a mask sets sequences apart
    mask: Tensor | None  # [B, 1, T, S], True where a token sees a position; None: all up to its own
    room: int  # for the cache; 0 without one

    @staticmethod
    def of(ids: Tensor, mask: Tensor | None = None, cache: Cache | None = None) -> Tokens:
        """ids [B, T]; mask [B, S], nonzero where there is a token and not padding. Padding has no position."""
        t, start = ids.shape[1], 0 if cache is None else cache.length
        s = start + t
        if cache is not None and s > cache.room:
            raise fail(f"decoding: {s} tokens do not fit a cache of {cache.room}", fix=f"Cache({s})")
        if mask is None:
            return Tokens(start, t, torch.arange(start, s, device=ids.device), None, cache.room if cache else 0)
        if tuple(mask.shape) != (len(ids), s):
            raise fail("decoding: the mask must have one entry for each token, also for those in the cache",
                       mask=list(mask.shape), needed=[len(ids), s])  # fmt: skip
        real = mask != 0
        positions = (real.long().cumsum(1) - 1).clamp(min=0)[:, start:]
        sees = real[:, None, None, :] & nn.causal_mask(t, s, device=ids.device)
        return Tokens(start, t, positions, sees, cache.room if cache else 0)


def recall(k: Tensor, v: Tensor, tokens: Tokens, seen: Seen | None) -> tuple[Tensor, Tensor, Seen | None]:
    """The keys and values of these tokens, [B, H, T, K], after those before them, [B, H, S, K]; and the cache."""
    if not tokens.room:
        return k, v, None
    if seen is None:
        b, h, _, width = k.shape
        seen = Seen(k.new_zeros(b, h, tokens.room, width), v.new_zeros(b, h, tokens.room, v.shape[-1]))
    stop = tokens.start + tokens.t
    seen.k[:, :, tokens.start : stop] = k
    seen.v[:, :, tokens.start : stop] = v
    return seen.k[:, :, :stop], seen.v[:, :, :stop], seen


# A model with what it is called with: (ids [B, T], mask [B, S], cache) -> logits [B, T, V@model] and the cache after.
Step = Callable[[Tensor, Tensor | None, Cache], tuple[Tensor, Cache]]


def generate(
    step: Step, ids: Tensor, *, new: int, size: int, data: Axis = None, model: Axis = None, mask: Tensor | None = None,
    eos: int | None = None, pad: int | None = None, temperature: float = 0.0, key: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`new` more tokens for each sequence: ids [B@data, T] -> [B@data, T + new].

    Takes the likeliest token, the first of those that tie; with a `temperature` one drawn by `key`, the same on
    every mesh. After `eos` a sequence goes on with `pad` (`eos` if not given). Prompts of unequal lengths are padded
    on their left, and `mask` [B@data, T] is 0 there. `size` is V.
    """
    if temperature < 0 or (temperature > 0 and key is None):
        raise fail(f"generate: temperature={temperature}, key={key}",
                   fix="temperature=0 takes the likeliest; more needs a key")  # fmt: skip
    if eos is None and pad is not None:
        raise fail(f"generate: pad={pad} without eos", fix="name the token that ends a sequence: eos=")
    if new < 0 or not ids.shape[1]:
        raise fail(f"generate: {new} new tokens after {ids.shape[1]}", fix="new=0 or more, after one token or more")
    pad = eos if pad is None else pad
    batch = rows("generate", len(ids), data, word="prompts that the data axis divides") if temperature else 0
    cache = Cache(ids.shape[1] + new)
    going = torch.ones_like(ids[:, 0], dtype=torch.bool)
    out, last = [ids], ids
    with torch.no_grad():
        for i in range(new):
            logits, cache = step(last, mask, cache)
            at = logits[:, -1]
            if temperature and key is not None:
                at = at / temperature + _gumbel(fold_in(key, i), at, (batch, size), P(data, model))
            token = likeliest(at, model, size)
            if eos is not None:
                token = torch.where(going, token, torch.full_like(token, pad or 0))
                going = going & (token != eos)
            last = token.unsqueeze(1)
            out.append(last)
            if mask is not None:
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return torch.cat(out, 1)


def likeliest(logits: Tensor, axis: Axis, size: int) -> Tensor:
    """The class of the highest logit, the first of those that tie: [B, V@axis] -> [B]{I}; `size` is V."""
    first, whole = local_range("likeliest", logits.shape[-1], axis, size)
    if not axis:
        return logits.argmax(-1)
    local = logits if logits.shape[-1] else logits.new_full((len(logits), 1), -math.inf)
    value, at = local.max(-1)
    best = pvary(pmax(value, axis), axis)
    found: Tensor = pmin(torch.where(value == best, at + first, whole), axis)
    return found


def _gumbel(key: Tensor, logits: Tensor, shape: tuple[int, int], spec: P) -> Tensor:
    """Noise that makes the highest sum a draw from the softmax; `shape` is global. Source: Gumbel, 1954."""
    draw = random.uniform(key, shape, spec=spec, device=logits.device)
    return -(-draw.log()).log()


def rows(verb: str, n: int, axis: Axis, *, word: str) -> int:
    """The global batch, of which this rank has `n` rows: draws are placed by it. `word` names how to say it.

    Where the ranks have no values, on an abstract mesh, it is taken for even.
    """
    if axis and not region(verb).comm.has_values:
        return n * axis_size(axis)
    return global_size(verb, n, axis, word=word) if axis else n


__all__ = ["Cache", "Seen", "Step", "Tokens", "generate", "likeliest", "recall", "rows"]
