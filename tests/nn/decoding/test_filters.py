"""Filters of logits equal those of transformers, and are the same bits however the vocabulary is split."""

from __future__ import annotations

import math
import os

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.nn.decoding import Options, argmax
from fshard.nn.decoding.filters import Vocabulary, filtered, log_softmax
from fshard.nn.decoding.loop import gumbel_noise

os.environ["HF_HUB_OFFLINE"] = "1"
V = 29
SPLITS = [1, 3, 7]  # of 7, the last rank has no token


def numbers(rows=6, ties=False, seed=0):
    """Logits, of which many are equal with `ties`, and one row has a token that takes all."""
    x = torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3
    x[0, 7] = 200.0
    return x.round() if ties else x


def ids(rows=6, s=7):
    return torch.randint(0, V, (rows, s), generator=torch.Generator().manual_seed(2))


def ours(logits, n=1, mask=None, tokens=None, step=0, new=4, **options):
    tokens = ids(len(logits)) if tokens is None else tokens

    @fs.shard_map(mesh=fs.make_mesh(model=n), in_specs=(P(None, "model"), P()), out_specs=P(None, "model"),
                  check="first" if n == 3 else "never")  # fmt: skip
    def run(x, tokens):
        vocabulary = Vocabulary.make(x, "model", V)
        return filtered(x, vocabulary, Options.of(options), ids=tokens, mask=mask, step=step, new=new)

    return fs.device_get(run(logits, tokens))


def theirs(logits, *names_and_arguments, tokens=None):
    process = pytest.importorskip("transformers.generation.logits_process")
    tokens = ids(len(logits)) if tokens is None else tokens
    processors = [getattr(process, name)(**arguments) for name, arguments in names_and_arguments]
    return process.LogitsProcessorList(processors)(tokens, logits.clone())


K, TOP, MIN, TYPICAL = "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper"
T = ("TemperatureLogitsWarper", {"temperature": 0.7})
CASES = {
    "temperature": ({}, []),
    "top_k=1": ({"top_k": 1}, [(K, {"top_k": 1})]),
    "top_k=5": ({"top_k": 5}, [(K, {"top_k": 5})]),
    "top_k above V": ({"top_k": 99}, [(K, {"top_k": 99})]),
    "top_p=0.01": ({"top_p": 0.01}, [(TOP, {"top_p": 0.01})]),
    "top_p=0.8": ({"top_p": 0.8}, [(TOP, {"top_p": 0.8})]),
    "min_p": ({"min_p": 0.05}, [(MIN, {"min_p": 0.05})]),
    "typical_p": ({"typical_p": 0.6}, [(TYPICAL, {"mass": 0.6})]),
    "all": ({"top_k": 9, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9, "repetition_penalty": 1.3},
            [("RepetitionPenaltyLogitsProcessor", {"penalty": 1.3}), T, (K, {"top_k": 9}), (TOP, {"top_p": 0.9}),
             (MIN, {"min_p": 0.02}), (TYPICAL, {"mass": 0.9})]),
}  # fmt: skip


@pytest.mark.parametrize(("name", "ties"), [*((name, True) for name in CASES), ("top_k=5", False), ("all", False)])
def test_filters_of_draws_are_those_of_transformers_on_every_mesh(name, ties):
    options, processors = CASES[name]
    want = theirs(numbers(ties=ties), *(processors if T in processors else [T, *processors]))
    assert name == "temperature" or (want == -math.inf).any() or "above" in name
    for n in SPLITS if name == "all" else SPLITS[-1:]:
        got = ours(numbers(ties=ties), n, temperature=0.7, **options)
        assert torch.equal(got, want), f"{n} ranks: {got}\n{want}"


@pytest.mark.parametrize("n", SPLITS)
def test_filters_of_tokens_so_far_are_those_of_transformers(n):
    logits, tokens = numbers(), torch.tensor([[1, 2, 3, 1, 2], [4, 4, 4, 4, 4], [1, 2, 3, 4, 5]]).repeat(2, 1)
    repeated = ("NoRepeatNGramLogitsProcessor", {"ngram_size": 3})
    want = theirs(logits, ("RepetitionPenaltyLogitsProcessor", {"penalty": 1.7}), repeated, tokens=tokens)
    assert (want == -math.inf).sum(1).tolist() == [1, 1, 0, 1, 1, 0]
    assert torch.equal(ours(logits, n, tokens=tokens, repetition_penalty=1.7, no_repeat_ngram=3), want)
    for size in (1, 2, 5, 6):
        want = theirs(logits, ("NoRepeatNGramLogitsProcessor", {"ngram_size": size}), tokens=tokens)
        assert torch.equal(ours(logits, n, tokens=tokens, no_repeat_ngram=size), want)


@pytest.mark.parametrize("n", SPLITS)
def test_forced_and_forbidden_ends_are_those_of_transformers(n):
    logits, eos = numbers(), [3, 28]
    least = ("MinNewTokensLengthLogitsProcessor",
             {"prompt_length_to_skip": 5, "min_new_tokens": 3, "eos_token_id": eos})  # fmt: skip
    for step in (2, 3):
        got = ours(logits, n, tokens=ids(s=5 + step), step=step, eos=eos, min_new=3)
        assert torch.equal(got, theirs(logits, least, tokens=ids(s=5 + step)))
        assert (got[:, eos] == -math.inf).all() == (step < 3)
    last = ("ForcedEOSTokenLogitsProcessor", {"max_length": 9, "eos_token_id": eos})
    for step in (2, 3):
        got = ours(logits, n, tokens=ids(s=5 + step), step=step, forced_eos=eos)
        assert torch.equal(got, theirs(logits, last, tokens=ids(s=5 + step)))
    for s in (1, 2):
        got = ours(logits, n, tokens=ids(s=s), forced_bos=17)
        assert torch.equal(got, theirs(logits, ("ForcedBOSTokenLogitsProcessor", {"bos_token_id": 17}),
                                       tokens=ids(s=s)))  # fmt: skip


def test_padding_is_no_token_of_the_sequence():
    tokens, options = torch.tensor([[5, 6, 5]]), {"repetition_penalty": 2.0, "no_repeat_ngram": 2}
    padded, mask = torch.tensor([[6, 5, 5, 6, 5]]), torch.tensor([[0, 0, 1, 1, 1]])
    logits = numbers(1, seed=1)
    assert torch.equal(ours(logits, tokens=padded, mask=mask, **options), ours(logits, tokens=tokens, **options))
    assert not torch.equal(ours(logits, tokens=padded, **options), ours(logits, tokens=tokens, **options))


def test_top_p_of_a_large_vocabulary_equals_sums_in_float64():
    """Thresholds among 50,257 tokens: float32 sums, of transformers too, are off by more than these weights."""
    logits = torch.randn(3, 50257, generator=torch.Generator().manual_seed(0)) * 2
    logits[1] = logits[1].round()  # a few values, each thousands of times
    got = filtered(logits, Vocabulary.make(logits, None, 50257), Options(temperature=1.0, top_p=0.9),
                   ids=torch.zeros(3, 1, dtype=torch.int64), mask=None, step=0, new=1)  # fmt: skip
    order = logits.sort(stable=True)
    kept = order.values.double().softmax(-1).cumsum(-1) > 1 - 0.9
    assert torch.equal(got > -math.inf, torch.zeros_like(kept).scatter(1, order.indices, kept))


@pytest.mark.parametrize("n", SPLITS)
def test_log_softmax_of_a_split_vocabulary(n):
    @fs.shard_map(mesh=fs.make_mesh(model=n), in_specs=P(None, "model"), out_specs=P(None, "model"))
    def run(x):
        return log_softmax(x, Vocabulary.make(x, "model", V))

    torch.testing.assert_close(fs.device_get(run(numbers())), numbers().log_softmax(-1))


@pytest.mark.parametrize("sizes", [{"data": 1, "model": 1}, {"data": 2, "model": 3}, {"data": 2, "model": 6}])
def test_argmax_is_the_first_among_equals(sizes):
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor(
        [[0.0, 3, 1, 3, 3], [-5, -7, -7, -9, -5], [-inf] * 5, [1, 2, 3, 4, 5.0], [1, 2, nan, inf, nan]]
    )

    @fs.shard_map(mesh=fs.make_mesh(**sizes), in_specs=P("data", "model"), out_specs=P("data"))
    def run(x):
        return argmax(x, "model", 5)

    assert fs.device_get(run(logits)).tolist() == logits.argmax(1).tolist() == [1, 0, 0, 4, 2]


def test_draws_follow_the_softmax_of_the_filtered_logits():
    logits, n = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5]), 4_000
    options = Options(temperature=0.5, top_k=3)

    @fs.shard_map(mesh=fs.make_mesh(data=2, model=2), in_specs=P("data", "model"), out_specs=P("data"))
    def run(x):
        x = filtered(x, Vocabulary.make(x, "model", 5), options, ids=torch.zeros(len(x), 1), mask=None, step=0, new=1)
        return argmax(x + gumbel_noise(fs.key(0), x, (n, 5), P("data", "model")), "model", 5)

    got = fs.device_get(run(logits.expand(n, 5))).bincount(minlength=5) / n
    want = torch.softmax(logits[[1, 2, 4]] / 0.5, 0)
    assert got[0] == got[3] == 0
    assert ((got[[1, 2, 4]] - want).abs() < 5 * (want * (1 - want) / n).sqrt()).all()  # five standard deviations
