"""The loop that generates tokens: greedy, drawn by a key, or the best of several beams.

Legend: B batch, T the tokens of the prompt, S those so far, V vocabulary; [V@model] is a dim split over an axis.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fshard import random
from fshard._core.ops import described_size, global_size
from fshard._core.region import checker, known_axes, region
from fshard.collectives import axis_size
from fshard.errors import checked, fail
from fshard.random import fold_in
from fshard.spec import Axis, P, names_of, total

from .beams import search
from .decoder import Decoder, check_ids, ended, on_any_rank
from .filters import Vocabulary, argmax, filtered
from .options import Options


@checked
def generate(
    decoder: Decoder, ids: Tensor, *, new: int, options: Options, size: int | None = None, data: Axis = None,
    model: Axis = None, mask: Tensor | None = None, key: Tensor | None = None,
    on_token: Callable[[int, Tensor], object] | None = None,
) -> Tensor:  # fmt: skip
    """Generate `new` more tokens for each sequence: ids [B@data, T] -> [B@data, T + new].

    `size` is V; `None`: as many as the model gives logits, if no axis splits them.

    The loop ends with the last sequence of all ranks: they agree on it by a transfer of one number for each token. A
    compiled program and an abstract mesh run all steps.

    >>> def step(ids, mask, cache):                          # the likeliest token is the next number
    ...     return torch.nn.functional.one_hot((ids[:, -1] + 1) % 8, 8).float(), None
    >>> decoder = Decoder(step, lambda cache, rows: cache, None)
    >>> generate(decoder, torch.tensor([[3]]), new=3, options=Options(), size=8)
    tensor([[3, 4, 5, 6]])

    Raises ShardingError for a mask of another shape than the ids, and for `on_token` with beams.
    """
    check_ids("generate", ids)
    options.check_call(prompt=ids.shape[1], new=new, key=key)
    if size is not None:
        options.check_vocabulary(size)
    for name, axis in (("data", data), ("model", model)):
        if axis is not None and axis != ():
            known_axes(f"generate: {name}", region("generate"), axis)
    if mask is not None and mask.shape != ids.shape:
        raise fail("generate: the mask must have one entry for each token", mask=list(mask.shape), ids=list(ids.shape))
    if on_token is not None and options.beams > 1:
        raise fail(f"generate: on_token with beams={options.beams}: no token is final before the last", fix="beams=1")
    if options.beams > 1:
        with torch.no_grad():
            return search(decoder, ids, new=new, options=options, size=size, model=model, mask=mask)
    batch = 0
    if options.temperature:
        _check_axes_of_draws(ids, data)
        batch = global_batch("generate", len(ids), data, word="prompts that the data axis divides")
    cache, out, last = decoder.cache, ids, ids
    unfinished = torch.ones_like(ids[:, 0], dtype=torch.bool)
    with torch.no_grad():
        for i in range(new):
            logits, cache = decoder.step(last, mask, cache)
            vocabulary = Vocabulary.make(logits, model, size)
            if i == 0 and size is None:
                options.check_vocabulary(vocabulary.size)
            logits = filtered(logits.float(), vocabulary, options, ids=out, mask=mask, step=i, new=new)
            if options.temperature and key is not None:
                logits = logits + gumbel_noise(fold_in(key, i), logits, (batch, vocabulary.size), P(data, model))
            token = argmax(logits, model, vocabulary.size).to(ids.dtype)
            if options.ends:
                token = token.where(unfinished, options.fill)
            last = token.unsqueeze(1)
            out = torch.cat([out, last], 1)
            if mask is not None:
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            if on_token is not None:
                on_token(i, token)
            if options.ends and i >= options.min_new:
                unfinished = unfinished & ~ended(out[:, ids.shape[1] :], options)
                if not on_any_rank(unfinished):
                    break
    rest = out.new_full((len(out), ids.shape[1] + new - out.shape[1]), options.fill)
    return torch.cat([out, rest], 1)


def _check_axes_of_draws(ids: Tensor, data: Axis) -> None:
    """Raise ShardingError if ranks have different prompts over an axis that is not named: their draws are by row."""
    types = checker()
    if types is None:
        return
    split = types.info(ids).type.varying - types.info(ids).history.copies - set(names_of(data))
    if split:
        raise fail(f"generate: the prompts vary over {min(split)!r}, and the draws do not", data=repr(data),
                   fix=f'data="{min(split)}"')  # fmt: skip


def gumbel_noise(key: Tensor, logits: Tensor, shape: tuple[int, int], spec: P) -> Tensor:
    """Draw noise that makes the argmax of logits a draw from their softmax; `shape` is global. Source: Gumbel, 1954."""
    uniform = random.uniform(key, shape, spec=spec, device=logits.device)
    return -(-uniform.log()).log()


def global_batch(verb: str, n: int, axis: Axis, *, word: str) -> int:
    """Return the number of rows on all ranks over `axis`, with `n` on this rank; `word` is how errors say to state it.

    Without values, on an abstract mesh, it is the size of an argument, or else every rank is assumed to have `n`.

    >>> global_batch("generate", 3, "data", word="data")      # data=2
    6
    """
    if axis and not region(verb).comm.has_values:
        return total(described_size(n, axis) or n * axis_size(axis))
    return global_size(verb, n, axis, word=word) if axis else n
