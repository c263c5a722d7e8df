"""Beam search: several sequences of each prompt are continued, and the best that ended is returned.

Legend: B batch, K beams, C candidates for the next step, N tokens, V vocabulary; [V@model] is a dim split over an axis.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fshard.collectives import all_gather, axis_size
from fshard.spec import Axis

from .decoder import Decoder, ended, on_any_rank
from .filters import Vocabulary, filtered, log_softmax, ordered_as_integers
from .options import Options, token_list

_NEVER = 1e9  # added to or taken from a score, it decides


def search(
    decoder: Decoder, ids: Tensor, *, new: int, options: Options, size: int | None, model: Axis, mask: Tensor | None
) -> Tensor:  # fmt: skip
    """Return the best sequence that the search finds for each prompt: ids [B@data, T] -> [B@data, T + new].

    A prompt's result does not depend on the others of the batch. Scores and ties are as in `transformers`.
    """
    b, t, k = len(ids), ids.shape[1], options.beams
    count = max(2, 1 + len(token_list(options.eos))) * k  # so that k candidates go on if others end
    live = torch.cat([ids, ids.new_full((b, new), options.fill)], 1).unsqueeze(1).repeat(1, k, 1)  # [B, K, T + new]
    scores = torch.zeros(b, k, device=ids.device)
    scores[:, 1:] = -_NEVER  # all beams begin with the same prompt: only the first is continued
    best, best_scores = live, torch.full_like(scores, -_NEVER)
    has_ended = torch.zeros_like(scores, dtype=torch.bool)
    open_ = torch.ones(b, 1, dtype=torch.bool, device=ids.device)  # a better sequence may yet be found
    cache, last = decoder.cache, ids
    for i in range(new):
        # 1. The best candidates: a beam and its next token.
        logits, cache = decoder.step(last, mask, cache)
        vocabulary = Vocabulary.make(logits, model, size)
        if i == 0:  # the prompts were run once
            if size is None:
                options.check_vocabulary(vocabulary.size)
            rows = torch.arange(b, device=ids.device).repeat_interleave(k)
            logits, cache = logits[rows], decoder.reorder(cache, rows)
            mask = None if mask is None else mask[rows]
        logs = filtered(log_softmax(logits.float(), vocabulary), vocabulary, options,
                        ids=live[:, :, : t + i].flatten(0, 1), mask=mask, step=i, new=new)  # fmt: skip
        totals = logs.view(b, k, logs.shape[-1]) + scores.unsqueeze(-1)
        top, beam, token = _best_candidates(totals, vocabulary, min(count, k * vocabulary.size))
        candidates = _rows(live, beam)  # [B, C, T + new]
        candidates[:, :, t + i] = token
        ends = ended(candidates[:, :, t : t + i + 1], options) & (i >= options.min_new)
        if i + 1 == new:
            ends = torch.ones_like(ends)

        # 2. Those among the first K that end replace worse ones.
        full = has_ended.all(1, keepdim=True) & (options.early_stopping is True)
        now_ended = ends & (torch.arange(ends.shape[1], device=ids.device) < k)
        refused = full.float() + (~open_).float() + (~now_ended).float()
        final = top / (i + 1) ** options.length_penalty - _NEVER * refused
        best_scores, kept = torch.cat([best_scores, final], 1).topk(k)
        best = _rows(torch.cat([best, candidates], 1), kept)
        has_ended = torch.cat([has_ended, now_ended], 1).gather(1, kept)

        # 3. The others go on.
        scores, kept = (top - _NEVER * ends.float()).topk(k)
        live, beam = _rows(candidates, kept), beam.gather(1, kept)
        source = (torch.arange(b, device=ids.device).unsqueeze(1) * k + beam).flatten()
        cache = decoder.reorder(cache, source)
        last = live[:, :, t + i].flatten().unsqueeze(1)
        if mask is not None:
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        length = new if options.early_stopping == "never" and options.length_penalty > 0 else i + 1
        worst = best_scores.amin(1, keepdim=True).where(has_ended, -_NEVER)
        open_ = open_ & (scores[:, :1] / length**options.length_penalty > worst).any(1, keepdim=True)
        settled = ~open_ | (has_ended.all(1, keepdim=True) & (options.early_stopping is True))
        if i + 1 < new and not on_any_rank(~settled):
            break
    return best[:, 0]


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Return x[b, index[b]] for each b: [B, N, S], [B, C] -> [B, C, S]."""
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def _best_candidates(totals: Tensor, vocabulary: Vocabulary, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores, beams and tokens of the best: [B, K, V@model] -> three [B, C]{I}, the first among equals.

    Each rank's best are gathered: [B, C] of each.
    """
    k = totals.shape[1]
    tokens = torch.arange(vocabulary.first, vocabulary.first + vocabulary.n, device=totals.device)
    index = (torch.arange(k, device=totals.device).unsqueeze(1) * vocabulary.size + tokens).flatten()
    totals = totals.flatten(1)
    keys = ordered_as_integers(totals) << 31 | ((1 << 31) - 1 - index)  # distinct: by score, then the first
    if vocabulary.axis:
        short = max(0, count - keys.shape[1])
        keys = torch.nn.functional.pad(keys, (0, short), value=-1)
        totals = torch.nn.functional.pad(totals, (0, short), value=-torch.inf)
        keys, at = keys.topk(count)
        ranks = axis_size(vocabulary.axis)
        keys, totals = all_gather((keys, totals.gather(1, at)), vocabulary.axis, 1, size=count * ranks, to="invariant")
    keys, at = keys.topk(count)
    index = (1 << 31) - 1 - (keys & ((1 << 31) - 1))
    return totals.gather(1, at), index // vocabulary.size, index % vocabulary.size
