"""What a folder must not be taken for, nor become: odd configs, a namesake, weights of another config."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

import fshard as fs
from fshard import P, ShardingError
from fshard.models import bert, gpt2, llama

CASES = {
    "gpt2": (gpt2, gpt2.Config(5, 8, 12, 1, 3)),
    "llama": (llama, llama.Config(5, 12, 10, 1, 3)),
    "bert": (bert, bert.Config(5, 12, 1, 3, 10)),
}


def params_of(model, cfg):
    return fs.device_get(fs.materialize(model.init(cfg), P(), fs.make_mesh(data=1), key=fs.key(0)))


def refusal(f, *args) -> str:
    with pytest.raises(ShardingError) as e:
        f(*args)
    return str(e.value)


@pytest.mark.parametrize("name", CASES)
def test_weights_of_another_config_are_not_written(name, tmp_path):
    """`from_pretrained` would draw at random what is missing, or refuse the shapes: too late to save again."""
    model, cfg = CASES[name]
    params = params_of(model, cfg)
    top = {"gpt2": "wte", "llama": "embed", "bert": "word"}[name]
    wrong = {**params, top: torch.ones(6, 12), "more": torch.ones(2)}
    lost = {"gpt2": "ln_f", "llama": "norm", "bert": "ln"}[name]
    del wrong[lost]
    said = refusal(model.save, tmp_path / "new", cfg, wrong)
    assert f"write: tree['{lost}']['w'] is missing" in said
    assert "write: tree['more'] is not in the model of the config" in said
    assert re.search(rf"write: tree\['{top}'\] has another shape than the config says\n +got +\[6, 12\] +"
                     r"expected +\[5, 12\]", said)  # fmt: skip
    assert not (tmp_path / "new").exists()
    model.save(tmp_path / "new", cfg, params)


@pytest.mark.parametrize(("name", "key", "value"), [
    ("llama", "hidden_size", None), ("llama", "hidden_size", "12"), ("llama", "num_attention_heads", 3.0),
    ("llama", "vocab_size", -5), ("llama", "rms_norm_eps", "1e-6"), ("llama", "attention_bias", None),
    ("llama", "num_hidden_layers", True), ("gpt2", "n_layer", None), ("gpt2", "embd_pdrop", "0.1"),
    ("bert", "hidden_act", 7), ("bert", "vocab_size", [5]),
])  # fmt: skip
def test_values_of_the_wrong_kind_in_a_config_are_named(name, key, value, tmp_path):
    model, cfg = CASES[name]
    model.save(tmp_path, cfg, params_of(model, cfg))
    path = tmp_path / "config.json"
    given = json.loads(path.read_text())
    path.write_text(json.dumps({**given, key: value}))
    assert refusal(model.config, tmp_path) == (
        f"{path}: has values of the wrong kind\n  {key}: {value!r}\n  fix: copy it again")  # fmt: skip


def test_numbers_that_divide_nothing_and_rope_that_is_none_are_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "n_head": 0}))
    assert refusal(gpt2.config, tmp_path).startswith(f"{path}: describes no model\n  ZeroDivisionError: ")
    path.write_text(json.dumps({"model_type": "llama", "rope_parameters": "default"}))
    assert refusal(llama.config, tmp_path).startswith("rope: 'default' are no parameters\n")


def test_nulls_where_none_is_a_value_and_whole_numbers_for_rates_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(
        {"model_type": "llama", "head_dim": None, "num_key_value_heads": None, "attention_dropout": 0}))  # fmt: skip
    assert llama.config(tmp_path) == llama.Config()


def test_a_folder_given_by_a_relative_path_is_read_from_elsewhere_too(tmp_path, monkeypatch):
    """Leaves are read when they are placed; another folder of that name may be there by then."""
    for where, std in (("a", 1.0), ("b", 2.0)):
        cfg = gpt2.Config(5, 8, 12, 1, 3, initializer_range=std)
        gpt2.save(tmp_path / where / "mine", cfg, params_of(gpt2, cfg))
    monkeypatch.chdir(tmp_path / "a")
    cfg, weights = gpt2.load(Path("mine"))
    monkeypatch.chdir(tmp_path / "b")
    got = fs.device_get(fs.materialize(weights, P(), fs.make_mesh(data=1), key=fs.key(0)))
    torch.testing.assert_close(got, params_of(gpt2, cfg), rtol=0, atol=0)


def test_what_is_neither_a_file_nor_a_folder_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert refusal(fs.interop.weights.tensors, tmp_path / "pipe").startswith(
        f"{tmp_path / 'pipe'}: is neither a file nor a folder\n")  # fmt: skip
