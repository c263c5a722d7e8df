"""GPT-2 equals transformers' in logits and gradients, leaf by leaf, dense and on every mesh."""

from __future__ import annotations

import json

import pytest
import torch

import fshard as fs
from fshard import ShardingError
from fshard.models import gpt2
from tests.lib import model_cases as cases

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 61, "n_positions": 12, "n_embd": 24, "n_layer": 2, "n_head": 3}
TINY = gpt2.Config(**SIZES)
DROPS = gpt2.Config(**SIZES, embd_pdrop=0.2, attn_pdrop=0.3, resid_pdrop=0.1)
MORE = {  # beside those of all models
    "model=4": ({"data": 1, "model": 4}, False, False),  # an empty part of 3 heads
    "model=5, sequence": ({"data": 1, "model": 5}, False, True),  # 9 positions over 5
    "data=3, fully sharded, model=2": ({"data": 3, "model": 2}, True, False),
}


@pytest.mark.parametrize("name", MORE)
def test_the_mesh_never_changes_the_answer(name, monkeypatch):
    monkeypatch.setitem(cases.LAYOUTS, name, MORE[name])
    cases.check_the_mesh_never_changes_the_answer(gpt2, TINY, name)


@pytest.mark.parametrize(("name", "remat"), [
    ("one device", True), ("both", False), ("both, fully sharded, sequence", True), ("uneven", False),
])  # fmt: skip
def test_remat_and_dropout_are_the_same_on_every_mesh(name, remat):
    cases.check_the_mesh_never_changes_the_answer(gpt2, DROPS, name, remat=remat)


def test_dropout_does_something():
    ids = cases.tokens(61)
    args = (gpt2, DROPS, gpt2.init(DROPS), "one device", ids, ids.roll(-1, 1))
    assert abs(cases.loss_and_grads(*args, key=fs.key(3))[0] - cases.loss_and_grads(*args)[0]) > 1e-4


def hugging_face(seed=0, **sizes):
    torch.manual_seed(seed)
    none = {"embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0}
    config = transformers.GPT2Config(**{**SIZES, **none, "initializer_range": 0.2, **sizes})
    return cases.awake(transformers.GPT2LMHeadModel(config), seed)


@pytest.fixture(scope="module")
def theirs():
    return hugging_face()


@pytest.mark.parametrize("name", cases.LAYOUTS)
def test_logits_loss_and_gradients_are_transformers(name, theirs, tmp_path):
    cases.check_logits_loss_and_gradients(gpt2, theirs, name, tmp_path)


@pytest.mark.parametrize("sizes", [{"n_embd": 16, "n_layer": 3, "n_head": 1, "n_inner": 10},
                                   {"vocab_size": 50257, "n_embd": 16, "n_layer": 1, "n_head": 4}])  # fmt: skip
def test_other_sizes_are_transformers_too(sizes, tmp_path):
    theirs = hugging_face(1, **sizes)
    cases.check_logits_loss_and_gradients(gpt2, theirs, "both, fully sharded, sequence", tmp_path)


@pytest.mark.parametrize(("name", "how"), [
    ("one device", {}), ("model", {"padded": True}), ("both, fully sharded, sequence", {"eos": 51, "padded": True}),
    ("uneven", {"new": 3}),
])  # fmt: skip
def test_greedy_generation_is_transformers(name, how, theirs, tmp_path):
    cases.check_generation(gpt2, theirs, name, tmp_path, **how)


@pytest.mark.parametrize("name", ["one device", "uneven"])
def test_padded_prompts_have_transformers_logits(name, theirs, tmp_path):
    cases.check_padded_logits(gpt2, theirs, name, tmp_path)


@pytest.mark.parametrize("name", ["one device", "both, fully sharded, sequence", "uneven"])
def test_a_saved_folder_is_read_by_transformers(name, theirs, tmp_path):
    cases.check_files(gpt2, theirs, name, tmp_path, transformers.GPT2LMHeadModel)


def test_a_foreign_or_broken_folder_is_refused(tmp_path):
    theirs = hugging_face(n_positions=12)
    with pytest.raises(ShardingError, match="there is no such file"):
        gpt2.load(tmp_path)
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_layer": 3, "n_positions": 13}))
    with pytest.raises(ShardingError) as e:
        gpt2.load(tmp_path)
    assert "'transformer.h.2.ln_1.weight' is missing" in str(e.value)
    assert (
        "'transformer.wpe.weight' has another shape, for params['wpe']\n  got  [12, 24]    expected  [13, 24]"
        in str(e.value)
    )
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(ShardingError) as e:
        gpt2.load(tmp_path)
    assert str(e.value) == (
        f"{tmp_path}/config.json: not a supported gpt2\n  model_type: 'llama', not 'gpt2'\n"
        "  fix: use the model of its type, or fs.defer(lambda: AutoModel.from_config(config))"
    )
    (tmp_path / "config.json").write_text(json.dumps({**config, "activation_function": "relu"}))
    with pytest.raises(ShardingError, match="activation_function: 'relu', not 'gelu_new'"):
        gpt2.load(tmp_path)


def test_bad_sizes():
    with pytest.raises(ShardingError, match="the heads must divide the width\n  n_embd  10    n_head  3\n  10 % 3 = 1"):
        gpt2.Config(n_embd=10, n_head=3)
    with pytest.raises(ShardingError, match="20 tokens do not fit 12 positions"):
        cases.logits(gpt2, TINY, gpt2.init(TINY), "one device", cases.tokens(61, t=20))
