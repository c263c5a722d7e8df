"""A tokenizer for some texts, and the task that a T5 is pretrained on: to restore the spans that a text has lost.

Source: Kudo, 2018, "Subword regularization", for the tokenizer; Raffel et al., 2019, for the spans.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .command import Refusal

PAD, EOS, UNKNOWN = 0, 1, 2  # as T5's
SENTINELS = 16  # <extra_id_0> ... mark the spans
FIRST_SENTINEL = 3
LONGEST_PIECE = 16  # characters
RATE, SPAN = 0.15, 2  # the part of the tokens that is lost, and the mean length of a span


def train_tokenizer(texts: Sequence[str], size: int) -> Any:
    """Train a Unigram tokenizer of at most `size` tokens, after T5's, on some texts in lower case.

    From all frequent parts of words, the pieces that the best segmentations use least are dropped until `size` are left
    (expectation maximization over only the best segmentation). The trainer of the tokenizers package gives other
    tokens in every process; these are the same.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer: Any = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    words: Counter[str] = Counter()
    for text in texts:
        normal = tokenizer.normalizer.normalize_str(text)
        words.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal))
    parts: Counter[str] = Counter()
    for word, n in words.items():
        for i, j in itertools.combinations(range(min(len(word), 32) + 1), 2):
            if j - i <= LONGEST_PIECE:
                parts[word[i:j]] += n
    single = {part: n for part, n in parts.items() if len(part) == 1}  # always kept: every word has a segmentation
    ranked = sorted((part for part in parts if len(part) > 1), key=lambda part: (-parts[part] * len(part), part))
    special = ["<pad>", "</s>", "<unk>", *(f"<extra_id_{i}>" for i in range(SENTINELS))]
    room = max(0, size - len(special) - len(single))
    longer, counts = ranked[: 8 * room], parts
    while True:
        pieces = [*sorted(single), *longer]
        total = sum(counts[p] + 1 for p in pieces)
        vocabulary = [(p, 0.0) for p in special] + [(p, math.log((counts[p] + 1) / total)) for p in pieces]
        model: Any = models.Unigram(vocabulary, UNKNOWN, False)
        if len(longer) <= room:
            break
        counts = Counter()
        for word, n in words.items():
            for token in model.tokenize(word):
                counts[token.value] += n
        longer.sort(key=lambda part: (-counts[part] * len(part), part))
        longer = longer[: max(room, len(longer) * 3 // 5)]
    tokenizer.model = model
    tokenizer.add_special_tokens(special)
    return tokenizer


def corrupt(ids: Sequence[int], seed: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return (source, target): the tokens with a sentinel for each lost span; each sentinel with its span.

    Both end with EOS. A pure function of the tokens and the seed. The source is at most as long as the tokens and EOS.

    >>> corrupt([50, 51, 52, 53, 54, 55, 56, 57, 58, 59], [0])
    ([50, 51, 52, 53, 54, 55, 56, 57, 3, 1], [3, 58, 59, 1])
    """
    n = len(ids)
    lost = max(1, round(n * RATE))
    if n <= lost:
        return [FIRST_SENTINEL, EOS], [FIRST_SENTINEL, *ids, EOS]
    spans = min(max(1, round(lost / SPAN)), n - lost, SENTINELS)
    draw = np.random.default_rng(list(seed))
    kept, dropped = _lengths(draw, n - lost, spans), _lengths(draw, lost, spans)
    source, target, at = [], [], 0
    for i in range(spans):
        source += [*ids[at : at + kept[i]], FIRST_SENTINEL + i]
        at += kept[i]
        target += [FIRST_SENTINEL + i, *ids[at : at + dropped[i]]]
        at += dropped[i]
    return [*source, EOS], [*target, EOS]


def longest_target(n: int) -> int:
    """Return the length of the longest target of at most `n` tokens.

    >>> longest_target(64), len(corrupt(list(range(20, 84)), [0])[1])
    (16, 16)
    """
    lost = max(1, round(n * RATE))
    return lost + min(max(1, round(lost / SPAN)), SENTINELS) + 1


def _lengths(draw: np.random.Generator, total: int, parts: int) -> list[int]:
    """Cut `total` into random parts of 1 or more."""
    cuts = np.sort(draw.choice(total - 1, parts - 1, replace=False)) + 1
    return [int(n) for n in np.diff([0, *cuts, total])]


def read_tokenizer(folder: Path) -> Any:
    """Read the tokenizer of a folder, without its padding and its end of a text."""
    from tokenizers import Tokenizer

    try:
        out: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as e:  # the tokenizers raise plain exceptions
        raise Refusal(
            f"--model {folder}: tokenizer.json: {e}: give a folder with the file of a fast tokenizer"
        ) from None
    out.no_padding()
    out.no_truncation()
    return out
