"""Logits of the next token by the options of generation, with the vocabulary full or split over an axis.

Legend: B batch, S tokens so far, V vocabulary; [V@model] is a dim split over an axis; {I} does not vary over it.

No filter gathers logits. The likeliest tokens are found by radix select: a threshold is fixed by 8 bits at a time, with
one psum of [B, 256] counts for each. Probabilities are summed as integers, so that a threshold is the same bits on
every mesh.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fshard._core.ops import local_range
from fshard.collectives import pmax, pmin, psum, pvary
from fshard.errors import fail, must_be
from fshard.spec import Axis

from .options import Options, token_list

_RADIX = 8  # bits of a key that are fixed by one psum
_ONE = 2.0**40  # of fixed-point weights: 2^22 equally likely tokens do not overflow 63 bits


class Vocabulary(NamedTuple):
    """The tokens of a rank: `n` from `first`, of `size`, split over `axis`."""

    first: int
    n: int
    size: int
    axis: Axis

    @classmethod
    def make(cls, logits: Tensor, axis: Axis, size: int | None) -> Vocabulary:
        first, size = local_range("generate", logits.shape[-1], axis, size)
        return cls(first, logits.shape[-1], size, axis)

    def marked(self, tokens: Tensor, counted: Tensor | None = None) -> Tensor:
        """Mark the tokens of each row, those that are `counted`: [B, N] -> bool [B, V@model]."""
        at = tokens - self.first
        here = (at >= 0) & (at < self.n)
        here = here if counted is None else here & counted
        marks = torch.zeros(len(tokens), self.n + 1, dtype=torch.bool, device=tokens.device)
        return marks.scatter(1, at.where(here, self.n), True)[:, : self.n]

    def only(self, logits: Tensor, tokens: list[int]) -> Tensor:
        """Give some tokens the logit 0, and all others -inf."""
        named = self.marked(torch.tensor([tokens], device=logits.device))
        return logits.masked_fill(~named, -math.inf).masked_fill(named, 0.0)

    def max(self, x: Tensor) -> Tensor:
        """Return the maximum over the vocabulary: [B, V@model] -> [B, 1]{I}."""
        local = x if self.n else x.new_full((len(x), 1), -math.inf)
        return pmax(local.amax(-1, keepdim=True), self.axis)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the vocabulary: [B, V@model] -> [B, 1]{I}."""
        return psum(x.sum(-1, keepdim=True), self.axis)


def filtered(logits: Tensor, vocabulary: Vocabulary, options: Options, *, ids: Tensor, mask: Tensor | None,
             step: int, new: int) -> Tensor:  # fmt: skip
    """Return the logits of new token number `step`, and -inf for tokens that the options exclude.

    logits float32 [B, V@model]; ids [B, S], all tokens so far; mask [B, S], 0 for padding, which counts as no token.
    """
    o = options
    if o.repetition_penalty != 1:
        seen = vocabulary.marked(ids, None if mask is None else mask != 0)
        penalized = torch.where(logits < 0, logits * o.repetition_penalty, logits / o.repetition_penalty)
        logits = torch.where(seen, penalized, logits)
    if 0 < o.no_repeat_ngram <= ids.shape[1]:
        logits = logits.masked_fill(
            vocabulary.marked(*_ends_of_repeated_ngrams(ids, mask, o.no_repeat_ngram)), -math.inf
        )
    if step < o.min_new and o.eos is not None:
        eos = torch.tensor([token_list(o.eos)], device=logits.device)
        logits = logits.masked_fill(vocabulary.marked(eos), -math.inf)
    if o.forced_bos is not None and ids.shape[1] == 1:
        logits = vocabulary.only(logits, [o.forced_bos])
    if o.forced_eos is not None and step == new - 1:
        logits = vocabulary.only(logits, token_list(o.forced_eos))
    if not o.temperature:
        return logits
    logits = logits / o.temperature
    if o.top_k is not None and o.top_k < vocabulary.size:
        keys = ordered_as_integers(logits)
        most = torch.full((len(keys), 1), vocabulary.size - o.top_k, device=keys.device)
        least = _radix_select(keys, torch.ones_like(keys), most, 32, vocabulary.axis)
        logits = logits.masked_fill(keys < least, -math.inf)
    if o.top_p is not None and o.top_p < 1:
        logits = _top_p(logits, vocabulary, o.top_p)
    if o.min_p is not None:
        logits = logits.masked_fill(logits < vocabulary.max(logits) + math.log(o.min_p), -math.inf)
    if o.typical_p is not None and o.typical_p < 1:
        logits = _typical_p(logits, vocabulary, o.typical_p)
    return logits


def _top_p(logits: Tensor, vocabulary: Vocabulary, p: float) -> Tensor:
    """Keep a token if the probabilities of the less likely tokens, and of itself, add up to more than 1 - p.

    Of equally likely tokens the last ones are kept.
    """
    bits = max(1, vocabulary.size - 1).bit_length()
    index = torch.arange(vocabulary.first, vocabulary.first + vocabulary.n, device=logits.device)
    keys = ordered_as_integers(logits) << bits | index
    weights, total = _fixed_point_weights(logits, vocabulary)
    least = _radix_select(keys, weights, (total * (1 - p)).floor().long(), 32 + bits, vocabulary.axis)
    return logits.masked_fill(keys < least, -math.inf)


def _typical_p(logits: Tensor, vocabulary: Vocabulary, p: float) -> Tensor:
    """Keep the tokens whose information, -log of the probability, is nearest to its mean, up to a mass of p.

    Source: Meister et al., 2022, "Locally Typical Sampling".
    """
    logs = log_softmax(logits, vocabulary)
    entropy = -vocabulary.sum(torch.where(logs > -math.inf, logs * logs.exp(), 0.0))
    keys = ordered_as_integers((-logs - entropy).abs())
    weights, total = _fixed_point_weights(logits, vocabulary)
    most = _radix_select(keys, weights, (total * p).ceil().long() - 1, 32, vocabulary.axis)
    return logits.masked_fill(keys > most, -math.inf)


def log_softmax(logits: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return the logarithms of the probabilities: [B, V@model] -> [B, V@model]."""
    if not vocabulary.axis:
        return logits.log_softmax(-1)
    shifted = logits - vocabulary.max(logits)
    return shifted - vocabulary.sum(shifted.exp()).log()


def argmax(logits: Tensor, axis: Axis, size: int) -> Tensor:
    """Return the class of the highest logit, the first among equals: [B, V@axis] -> [B]{I}; `size` is V.

    Of a row with NaN it is the class of the first one, as in torch.

    >>> argmax(torch.tensor([[0.1, 0.7, 0.7]]), None, 3)
    tensor([1])

    Raises ShardingError for logits of one number.
    """
    if not isinstance(logits, Tensor):
        raise must_be("argmax: logits", "a Tensor", logits)
    if not logits.ndim:
        raise fail("argmax: logits are one number", fix="[B, V]")
    first, total = local_range("argmax", logits.shape[-1], axis, size)
    if not axis:
        return logits.argmax(-1)
    local = logits if logits.shape[-1] else logits.new_full((len(logits), 1), -math.inf)
    value, index = local.max(-1)
    best = pvary(pmax(value, axis), axis)
    return pmin(torch.where((value == best) | value.isnan(), index + first, total), axis)


def _ends_of_repeated_ngrams(ids: Tensor, mask: Tensor | None, n: int) -> tuple[Tensor, Tensor]:
    """Return the last tokens of all n-grams of each row, and those that would repeat one: both [B, S - n + 1]."""
    ngrams = ids.unfold(1, n, 1)  # [B, S - n + 1, n]
    repeated = (ngrams[:, :, :-1] == ids[:, None, ids.shape[1] - n + 1 :]).all(-1)
    if mask is not None:
        repeated = repeated & (mask != 0).unfold(1, n, 1).all(-1)
    return ngrams[:, :, -1], repeated


# --- thresholds over a split vocabulary -----------------------------------------------------------------------


def ordered_as_integers(x: Tensor) -> Tensor:
    """Return integers in [0, 2^32) in the order of float32 numbers; 0 and -0 are equal."""
    bits = (x.float() + 0.0).view(torch.int32).long()
    return torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF) + (1 << 31)


def _fixed_point_weights(logits: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Return integers in proportion to the probabilities, [B, V@model], and their sum, [B, 1]."""
    weights = ((logits.double() - vocabulary.max(logits)).exp() * _ONE).round().long()
    return weights, vocabulary.sum(weights)


def _radix_select(keys: Tensor, weights: Tensor, most: Tensor, bits: int, axis: Axis) -> Tensor:
    """Return the smallest key such that the weights of all keys up to it add up to more than `most`.

        keys, weights [B, V@axis], most [B, 1] -> [B, 1]{I}     cost: a psum of [B, 256] for each 8 bits of the keys

    All are integers, so the result is exact.
    """
    found = torch.zeros(len(keys), 1, dtype=torch.int64, device=keys.device)
    below = torch.zeros_like(found)  # the weight of all keys whose first digits are less than `found`
    for shift in reversed(range(0, bits, _RADIX)):
        same = keys >> (shift + _RADIX) == found
        digits = keys >> shift & ((1 << _RADIX) - 1)
        counts = torch.zeros(len(keys), 1 << _RADIX, dtype=torch.int64, device=keys.device)
        counts = counts.scatter_add(1, digits, weights.where(same, 0))
        upto = below + psum(counts, axis).cumsum(1)
        digit = (upto <= most).sum(1, keepdim=True).clamp(max=(1 << _RADIX) - 1)
        below = upto.gather(1, (digit - 1).clamp(min=0)).where(digit > 0, below)
        found = found << _RADIX | digit
    return found
