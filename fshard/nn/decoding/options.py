"""Options of generation: which tokens are likely enough to be taken, and what ends a sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import Tensor

from fshard.errors import ShardingError, checked, fail, raise_all


@checked
@dataclass(frozen=True)
class Options:
    """Options of `generate`, which takes them by name. They apply in this order, as in `transformers`.

    Of every token's logit, in float32:

        repetition_penalty  divides the positive logits of tokens that the sequence has, and multiplies the others
        no_repeat_ngram     no n tokens appear twice in a sequence; 0: no limit
        min_new             the number of tokens before which a sequence does not end
        forced_bos          the second token of a sequence that begins with one token, as an encoder-decoder's does
        forced_eos          the last of the `new` tokens, if the sequence has not ended before

    With a `temperature`, tokens are drawn by the `key` of the call from the softmax of the logits, divided by it:

        top_k               only from the k likeliest, and those equal to the last of these
        top_p               only from the likeliest tokens whose probabilities reach this sum
        min_p               only from tokens that have this share of the probability of the likeliest
        typical_p           only from tokens whose information is nearest to its mean, up to this sum of probabilities

    Otherwise the likeliest is taken, the first among equals; with `beams`, the sequence with the highest sum of log
    probabilities over length^length_penalty that a search with so many sequences finds. The search of a sequence ends
    if `early_stopping` with so many ended ones; if not, or "never", once none that it continues can become better: as
    judged by its length now, or at any length.

    A sequence ends after one of the tokens `eos`, and after one of the sequences `stop`, among its new tokens; `pad`
    fills it up (default: the first of `eos`).

    >>> Options(temperature=0.7, top_p=0.9, eos=(2, 3)).ends
    ((2,), (3,))

    Raises ShardingError listing every option that is out of its range or does nothing without another one.
    """

    eos: int | Sequence[int] | None = None
    pad: int | None = None
    stop: Sequence[Sequence[int]] = ()
    min_new: int = 0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float = 1.0
    no_repeat_ngram: int = 0
    forced_bos: int | None = None
    forced_eos: int | Sequence[int] | None = None
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Options:
        """Return the options of a call. Raises ShardingError for one that does not exist."""
        if unknown := [name for name in options if name not in _NAMES]:
            raise fail(f"generate: there is no option {', '.join(unknown)}", fix=f"one of {', '.join(_NAMES)}")
        return cls(**options)

    @property
    def ends(self) -> tuple[tuple[int, ...], ...]:
        """The sequences of tokens after which a sequence ends: `eos`, then `stop`."""
        return (*((token,) for token in token_list(self.eos)), *map(tuple, self.stop))

    @property
    def fill(self) -> int:
        """The token after the end of a sequence. Beams take `eos` for a pad of 0, as transformers."""
        eos = next(iter(token_list(self.eos)), 0)
        return self.pad or eos if self.pad is None or self.beams > 1 else self.pad

    def __post_init__(self) -> None:
        sampled = ("top_k", "top_p", "min_p", "typical_p")
        beam = ["length_penalty"] * (self.length_penalty != 1) + ["early_stopping"] * (self.early_stopping is not False)
        ranges = (
            ("temperature", self.temperature >= 0 and math.isfinite(self.temperature), "0 or more"),
            ("top_k", self.top_k is None or self.top_k >= 1, "1 or more; None for all tokens"),
            *((name, x is None or 0 < x <= 1, "above 0, at most 1; None for all tokens")
              for name in sampled[1:] for x in [getattr(self, name)]),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0; 1 for none"),
            ("no_repeat_ngram", self.no_repeat_ngram >= 0, "0 or more"),
            ("min_new", self.min_new >= 0, "0 or more"),
            ("beams", self.beams >= 1, "1 or more"),
            ("length_penalty", math.isfinite(self.length_penalty), "a finite number"),
            ("stop", all(len(sequence) for sequence in self.stop), "sequences of one token or more"),
        )  # fmt: skip
        errors = [fail(f"generate: {name}={getattr(self, name)}", fix=fix) for name, good, fix in ranges if not good]
        drawn = [name for name in sampled if getattr(self, name) is not None]
        if self.temperature == 0 and drawn:
            errors.append(fail(f"generate: {', '.join(drawn)} without a temperature: no token is drawn",
                               fix=f"temperature=1.0 and a key; or leave out {', '.join(drawn)}"))  # fmt: skip
        if self.temperature > 0 and self.beams > 1:
            errors.append(fail(f"generate: beams={self.beams}, temperature={self.temperature}: beams are not drawn",
                               fix="temperature=0, or beams=1"))  # fmt: skip
        if self.beams == 1 and beam:
            errors.append(fail(f"generate: {', '.join(beam)} without beams", fix="beams=4"))
        if not self.ends and (self.pad is not None or self.min_new):
            name = "pad" if self.pad is not None else "min_new"
            errors.append(fail(f"generate: {name}={getattr(self, name)} without eos",
                               fix="name the token that ends a sequence: eos="))  # fmt: skip
        if self.stop and self.pad is None and not token_list(self.eos):
            errors.append(fail(f"generate: stop={self.stop} without pad or eos",
                               fix="name the token that fills up a sequence: pad="))  # fmt: skip
        raise_all(errors)

    def check_call(self, *, prompt: int, new: int, key: Tensor | None) -> None:
        """Raise ShardingError unless the options fit a call: `new` tokens after `prompt`."""
        errors: list[ShardingError] = []
        if self.temperature > 0 and key is None:
            errors.append(fail(f"generate: temperature={self.temperature}, key=None",
                               fix="temperature=0 takes the likeliest; more needs a key"))  # fmt: skip
        if new < 0 or not prompt:
            errors.append(fail(f"generate: {new} new tokens after {prompt}",
                               fix="new=0 or more, after one token or more"))  # fmt: skip
        if self.min_new > max(new, 0):
            errors.append(fail(f"generate: min_new={self.min_new} of {new} new tokens", fix=f"at most {new}"))
        raise_all(errors)

    def check_vocabulary(self, size: int) -> None:
        """Raise ShardingError listing the tokens that a vocabulary of `size` does not have."""
        named = {"eos": token_list(self.eos), "pad": token_list(self.pad), "forced_bos": token_list(self.forced_bos),
                 "forced_eos": token_list(self.forced_eos), "stop": [t for s in self.stop for t in s]}  # fmt: skip
        raise_all([fail(f"generate: {name} has the token {token}, and the vocabulary has {size}",
                        fix=f"0 to {size - 1}")
                   for name, tokens in named.items() for token in tokens if not 0 <= token < size])  # fmt: skip


_NAMES = tuple(f.name for f in fields(Options))


def token_list(tokens: int | Sequence[int] | None) -> list[int]:
    """Return the tokens of an option that has one, several or none."""
    return [] if tokens is None else list(tokens) if isinstance(tokens, Sequence) else [int(tokens)]


def with_tokens(options: Mapping[str, Any], eos: Any, pad: int | None, size: int | None) -> dict[str, Any]:
    """Return the options of a call; those that it lacks are the tokens of a config: `eos`, one or several, and `pad`.

    Tokens outside of the vocabulary, of `size`, never come. Without an end nothing is filled up.

    >>> with_tokens({"top_k": 3}, eos=[2, 99], pad=0, size=50)
    {'eos': (2,), 'pad': 0, 'top_k': 3}
    """
    bound = math.inf if size is None else size
    known = tuple(token for token in token_list(eos) if 0 <= token < bound)
    end = options.get("eos", known)
    has_end = bool(end) if isinstance(end, Sequence) else end is not None
    padding = {"pad": pad} if pad is not None and 0 <= pad < bound and (has_end or options.get("stop")) else {}
    return {"eos": known, **padding, **options}
