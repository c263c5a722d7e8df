"""The loop of generation on meshes: ends, stop sequences, callbacks, agreement of ranks, draws, beams, and errors.

The model is a table: the logits of a token are a row of its own, so that thousands of tokens cost milliseconds.
"""

from __future__ import annotations

import os

import pytest
import torch

import fshard as fs
from fshard import P, ShardingError
from fshard.nn.decoding import Decoder, Options, generate
from tests.lib.tiers import slow_unless

os.environ["HF_HUB_OFFLINE"] = "1"
V = 11
MESHES = [{"data": 1, "model": 1}, {"data": 2, "model": 2}, {"data": 3, "model": 1}]  # of 4 prompts, one has none
TABLE = torch.randn(V, V, generator=torch.Generator().manual_seed(3)) * 2


def prompts(b=4, t=3):
    return torch.randint(0, V, (b, t), generator=torch.Generator().manual_seed(b))


def table_model(table):
    """A decoder whose cache is the number of calls and, for each row, its last two tokens."""

    def step(ids, mask, cache):
        calls, before = cache
        both = torch.stack([ids[:, -2] if ids.shape[1] > 1 else before, ids[:, -1]], 1)
        calls.append(len(ids))
        return table[both[:, 1]] + 0.7 * table[both[:, 0]].roll(1, -1), (calls, both[:, 1])

    def reorder(cache, rows):
        return cache[0], cache[1][rows]

    return Decoder(step, reorder, ([], None))


def generated(sizes, ids, *, new, key=None, mask=None, on_token=None, calls=None, table=TABLE, data="data", **options):
    # The whole table on every rank, of which it uses its part of the next tokens: [V, V@model].
    @fs.shard_map(mesh=fs.make_mesh(**sizes), in_specs=(P(), P("data"), P("data")), out_specs=P("data"),
                  check="first" if sizes == MESHES[1] else "never")  # fmt: skip
    def run(table, ids, mask):
        decoder = table_model(table)

        def step(*args):
            logits, cache = decoder.step(*args)
            return fs.pslice(logits, "model", 1), cache

        out = generate(decoder._replace(step=step), ids, new=new, size=V, options=Options.of(options), data=data,
                       model="model", mask=mask, key=key, on_token=on_token)  # fmt: skip
        if calls is not None:
            calls.append(len(decoder.cache[0]))
        return out

    return fs.device_get(run(table, ids, mask))


def greedy(row, new):
    """Continue a list of tokens one by one."""
    row = list(row)
    for _ in range(new):
        row.append(int((TABLE[row[-1]] + 0.7 * TABLE[row[-2]].roll(1)).argmax()))
    return row


@pytest.mark.parametrize("sizes", slow_unless([MESHES[0], MESHES[2]], MESHES))
def test_sequences_end_after_any_of_their_ends_and_the_loop_with_the_last(sizes):
    ids, new = prompts(5), 9
    free = [greedy(row, new) for row in ids.tolist()]
    first, second, pair = free[0][4], free[1][5], free[2][4:6]
    for options, ends, fill in (
        ({"eos": first}, [[first]], first),
        ({"eos": [second, first], "pad": 7}, [[second], [first]], 7),
        ({"stop": [pair, [first]], "pad": 0}, [pair, [first]], 0),
        ({"eos": second, "stop": [pair]}, [[second], pair], second),
    ):
        want, lengths = [], []
        for row in free:
            n = next((i for i in range(1, new + 1) for end in ends
                      if i >= len(end) and row[3 + i - len(end) : 3 + i] == list(end)), new)  # fmt: skip
            want.append(row[: 3 + n] + [fill] * (new - n))
            lengths.append(n)
        calls = []
        assert generated(sizes, ids, new=new, calls=calls, **options).tolist() == want
        assert min(lengths) < max(lengths)
        assert set(calls) == {max(lengths)}  # every rank, also one whose sequences ended before


def test_a_sequence_does_not_end_before_min_new_tokens():
    ids = prompts()
    end = greedy(ids[0].tolist(), 2)[4]
    got = generated(MESHES[1], ids, new=8, eos=end, min_new=3)
    assert not (got[:, 3:6] == end).any()
    stop = greedy(ids[0].tolist(), 2)[3:]
    assert generated(MESHES[1], ids, new=8, stop=[stop], pad=0)[0, 5:].tolist() == [0] * 6
    got = generated(MESHES[1], ids, new=3, stop=[stop], pad=0, min_new=2)
    assert got[0].tolist() == greedy(ids[0].tolist(), 3)


@pytest.mark.parametrize("sizes", MESHES)
def test_on_token_has_the_tokens_of_each_step_on_every_rank(sizes):
    ids, seen = prompts(5), []
    want = generated(MESHES[0], ids, new=6, eos=greedy(ids[1].tolist(), 3)[5])

    def on_token(step, tokens):
        seen.append((int(fs.axis_index("data")), int(fs.axis_index("model")), step, tokens.tolist()))

    generated(sizes, ids, new=6, eos=greedy(ids[1].tolist(), 3)[5], on_token=on_token)
    steps = {step for _, _, step, _ in seen}
    for model in range(sizes["model"]):
        rows = [[t for rank in range(sizes["data"]) for r, m, s, ts in seen if (r, m, s) == (rank, model, step)
                 for t in ts] for step in sorted(steps)]  # fmt: skip
        assert torch.equal(torch.tensor(rows).T, want[:, 3 : 3 + len(steps)])


@pytest.mark.parametrize(("b", "options"), [
    (4, {}), pytest.param(5, {"top_k": 3, "top_p": 0.9}, marks=pytest.mark.slow),
    (5, {"min_p": 0.01, "typical_p": 0.8, "eos": 4}),
])  # fmt: skip
def test_a_draw_is_the_same_on_every_mesh(b, options):
    options, ids = {"new": 3, "temperature": 0.9, **options}, prompts(b)
    want = generated(MESHES[0], ids, key=fs.key(5), **options)
    assert not torch.equal(want, generated(MESHES[0], ids, key=fs.key(6), **options))
    for sizes in MESHES[1:]:
        assert torch.equal(generated(sizes, ids, key=fs.key(5), **options), want)


def test_draws_of_prompts_over_an_axis_that_is_not_named_are_an_error():
    with pytest.raises(ShardingError, match="the prompts vary over 'data', and the draws do not\n  data  None\n"
                                            '  fix: data="data"'):  # fmt: skip
        generated(MESHES[1], prompts(), new=2, temperature=1.0, key=fs.key(0), data=None)
    assert generated(MESHES[1], prompts(), new=2, data=None).shape == (4, 5)


# --- beams ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", MESHES[:2])
def test_beams_of_enough_width_find_the_most_likely_sequence(sizes):
    """Against all sequences of three new tokens: the sum of log probabilities over their length^penalty."""
    ids, new, eos = prompts(3), 3, 5
    for penalty in (0.0, 2.0):
        got = generated(sizes, ids, new=new, beams=V**2, eos=eos, pad=0, length_penalty=penalty,
                        early_stopping="never")  # fmt: skip
        for row, found in zip(ids.tolist(), got.tolist(), strict=True):
            assert found == best_of_all(row, new, eos, penalty) + [eos] * (6 - len(best_of_all(row, new, eos, penalty)))


def best_of_all(row, new, eos, penalty):
    best = (-float("inf"), row)
    pending = [(0.0, row)]
    while pending:
        score, so_far = pending.pop()
        logs = (TABLE[so_far[-1]] + 0.7 * TABLE[so_far[-2]].roll(1)).log_softmax(0).tolist()
        n = len(so_far) - len(row) + 1
        for token, log in enumerate(logs):
            if token == eos or n == new:
                best = max(best, ((score + log) / n**penalty, [*so_far, token]))
            else:
                pending.append((score + log, [*so_far, token]))
    return best[1]


@pytest.mark.parametrize("options", [
    pytest.param({"beams": 3, "eos": [1, 5, 9], "length_penalty": 2.0}, marks=pytest.mark.slow),
    pytest.param({"beams": 2, "eos": [2, 7], "early_stopping": True, "length_penalty": 3.0}, marks=pytest.mark.slow),
    pytest.param({"beams": 4, "eos": 2, "early_stopping": "never", "length_penalty": -1.0}, marks=pytest.mark.slow),
    {"beams": 2, "stop": [[3], [1, 4]], "pad": 0, "repetition_penalty": 1.4, "no_repeat_ngram": 2, "forced_eos": 2},
])  # fmt: skip
def test_beams_do_not_depend_on_the_batch_or_the_mesh(options):
    ids = prompts(5)

    def alone(ids):
        return generate(table_model(TABLE), ids, new=8, size=V, options=Options(**options))

    want = torch.cat([alone(row) for row in ids.split(1)])
    assert torch.equal(alone(ids), want)
    assert torch.equal(generated(MESHES[1], ids, mask=torch.ones(5, 3), new=8, **options), want)


# --- errors ---------------------------------------------------------------------------------------------------

WRONG = {
    "temperature=0.5, key=None\n  fix: temperature=0 takes the likeliest; more needs a key": {"temperature": 0.5},
    "temperature=-1.0\n  fix: 0 or more": {"temperature": -1.0},
    "top_k=0\n  fix: 1 or more; None for all": {"top_k": 0, "temperature": 1.0, "key": fs.key(0)},
    "top_p=0.0\n  fix: above 0, at most 1": {"top_p": 0.0, "temperature": 1.0, "key": fs.key(0)},
    "top_p=1.5\n": {"top_p": 1.5, "temperature": 1.0, "key": fs.key(0)},
    "min_p=nan\n": {"min_p": float("nan"), "temperature": 1.0, "key": fs.key(0)},
    "typical_p=-0.1\n": {"typical_p": -0.1, "temperature": 1.0, "key": fs.key(0)},
    "top_k, top_p without a temperature: no token is drawn\n": {"top_k": 5, "top_p": 0.5},
    "repetition_penalty=0.0\n": {"repetition_penalty": 0.0},
    "no_repeat_ngram=-1\n": {"no_repeat_ngram": -1},
    "min_new=3 of 2 new tokens\n  fix: at most 2": {"min_new": 3, "eos": 1},
    "min_new=1 without eos": {"min_new": 1},
    "pad=3 without eos": {"pad": 3},
    "stop=\\[\\[1\\]\\] without pad or eos": {"stop": [[1]]},
    "stop=\\[\\[\\]\\]\n  fix: sequences of one token or more": {"stop": [[]], "eos": 1},
    "eos has the token 11, and the vocabulary has 11\n  fix: 0 to 10": {"eos": [3, 11]},
    "pad has the token 11, and": {"eos": 1, "pad": 11},  # the model is given it
    "forced_eos has the token -1, and": {"forced_eos": -1},
    "stop has the token 50, and": {"stop": [[1, 50]], "eos": 1},
    "beams=0\n": {"beams": 0},
    "beams=2, temperature=1.0: beams are not drawn": {"beams": 2, "temperature": 1.0, "key": fs.key(0)},
    "length_penalty, early_stopping without beams": {"length_penalty": 2.0, "early_stopping": True},
    "on_token with beams=2: no token is final": {"beams": 2, "on_token": print},
    "2 problems\n": {"top_k": 0},
    "there is no option topk, max_new\n  fix: one of eos, pad, stop": {"topk": 3, "max_new": 4},
    "-1 new tokens after 3\n  fix: new=0 or more": {"new": -1},
    "2 new tokens after 0\n": {"ids": prompts()[:, :0]},
    "ids must be int64 or int32": {"ids": prompts() * 1.0},
    "the mask must have one entry for each token\n  mask  \\[4, 2\\]    ids  \\[4, 3\\]": {"mask": torch.ones(4, 2)},
    "top_k must be an int or None, got 2.5": {"top_k": 2.5},
    "eos must be": {"eos": "2"},
}


@pytest.mark.parametrize("message", WRONG)
def test_impossible_options_are_errors(message):
    with pytest.raises(ShardingError, match=message):
        generated(MESHES[0], **{"ids": prompts(), "new": 2, **WRONG[message]})


def test_no_new_token():
    assert torch.equal(generated(MESHES[1], prompts(), new=0, eos=3), prompts())
    assert torch.equal(generated(MESHES[1], prompts(), new=0, eos=3, beams=2), prompts())
