"""Folders that are refused: wrong values in configs, weights of another config, ties that do not hold."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fshard as fs
from fshard import P
from fshard.interop.hf import tensors
from fshard.models import bert, gpt2, gpt_neox, gptj, llama
from tests.lib.assertions import error_text

CASES = {
    "gpt2": (gpt2, gpt2.Config(5, 8, 12, 1, 3)),
    "gptj": (gptj, gptj.Config(5, 8, 12, 1, 3, rotary_dim=2)),
    "gpt_neox": (gpt_neox, gpt_neox.Config(5, 24, 1, 3, 10)),
    "llama": (llama, llama.Config(5, 12, 10, 1, 3)),
    "bert": (bert, bert.Config(5, 12, 1, 3, 10)),
}


def params_of(model, cfg):
    return fs.device_get(fs.materialize(model.init(cfg), P(), fs.make_mesh(data=1), key=fs.key(0)))


@pytest.mark.parametrize("name", CASES)
def test_weights_of_another_config_are_not_written(name, tmp_path):
    """`from_pretrained` would initialize missing weights at random, or refuse the shapes, when training is over."""
    model, cfg = CASES[name]
    params = params_of(model, cfg)
    top = "word" if name == "bert" else "wte"
    width = params[top].shape[1]
    wrong = {**params, top: torch.ones(6, width), "more": torch.ones(2)}
    lost = {"llama": "norm_f", "bert": "ln"}.get(name, "ln_f")
    del wrong[lost]
    text = error_text(model.save, tmp_path / "new", cfg, wrong)
    assert f"write: tree['{lost}']['w'] is missing" in text
    assert "write: tree['more'] is not in the model of the config" in text
    assert re.search(rf"write: tree\['{top}'\] has another shape than the config says\n +got +\[6, {width}\] +"
                     rf"expected +\[5, {width}\]", text)  # fmt: skip
    assert not (tmp_path / "new").exists()
    model.save(tmp_path / "new", cfg, params)


@pytest.mark.parametrize(("name", "key", "value"), [
    ("llama", "hidden_size", None), ("llama", "hidden_size", "12"), ("llama", "num_attention_heads", 3.0),
    ("llama", "vocab_size", -5), ("llama", "rms_norm_eps", "1e-6"), ("llama", "attention_bias", None),
    ("llama", "num_hidden_layers", True), ("gpt2", "n_layer", None), ("gpt2", "embd_pdrop", "0.1"),
    ("bert", "hidden_act", 7), ("bert", "vocab_size", [5]), ("gpt2", "n_embd", 1 << 63),
])  # fmt: skip
def test_config_values_of_the_wrong_kind_are_named(name, key, value, tmp_path):
    model, cfg = CASES[name]
    model.save(tmp_path, cfg, params_of(model, cfg))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, key: value}))
    assert error_text(model.config, tmp_path) == (
        f"{path}: has values of the wrong kind\n  {key}: {value!r}\n  fix: copy it again")  # fmt: skip


@pytest.mark.parametrize(("name", "key"), [("gpt2", "n_layer"), ("bert", "num_hidden_layers")])
def test_config_of_more_layers_than_a_model_has_is_refused(name, key, tmp_path):
    model, cfg = CASES[name]
    model.save(tmp_path, cfg, params_of(model, cfg))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: 10**7}))
    assert error_text(model.load, tmp_path) == (
        f"{path}: describes more than 1,000 layers\n  10,000,000 {key}\n"
        "  fix: copy it again; or cls(num_layers), of the model file, for so deep a model")  # fmt: skip


@pytest.mark.parametrize(("changes", "want"), [
    ({"rope_theta": [1]}, "config.json: describes no model\n  TypeError: unsupported operand"),
    ({"hidden_size": 1 << 30, "num_attention_heads": 2}, "rope: cannot rotate 536870912 dims of a head in pairs"),
])  # fmt: skip
def test_rotary_parameters_that_cannot_be_computed_are_refused(changes, want, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **changes}))
    assert want in error_text(llama.config, tmp_path)


def test_zero_heads_and_unknown_rope_parameters_are_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "n_head": 0}))
    assert error_text(gpt2.config, tmp_path) == "gpt2.Config: n_head=0\n  fix: 1 or more"
    path.write_text(json.dumps({"model_type": "llama", "rope_parameters": "default"}))
    assert error_text(llama.config, tmp_path).startswith("rope: 'default' is not a dict of parameters\n")


def test_config_accepts_null_for_optional_values_and_ints_for_floats(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(
        {"model_type": "llama", "head_dim": None, "num_key_value_heads": None, "attention_dropout": 0}))  # fmt: skip
    assert llama.config(tmp_path) == llama.Config(bos_token_id=1, eos_token_id=2)  # those of transformers


def test_relative_folder_is_read_after_a_change_of_directory(tmp_path, monkeypatch):
    """Leaves are read when they are placed: a relative path may mean another folder by then."""
    for folder, std in (("a", 1.0), ("b", 2.0)):
        cfg = gpt2.Config(5, 8, 12, 1, 3, initializer_range=std)
        gpt2.save(tmp_path / folder / "mine", cfg, params_of(gpt2, cfg))
    monkeypatch.chdir(tmp_path / "a")
    cfg, weights = gpt2.load(Path("mine"))
    monkeypatch.chdir(tmp_path / "b")
    got = fs.device_get(fs.materialize(weights, P(), fs.make_mesh(data=1), key=fs.key(0)))
    torch.testing.assert_close(got, params_of(gpt2, cfg), rtol=0, atol=0)


def test_path_that_is_neither_file_nor_folder_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert error_text(tensors, tmp_path / "pipe").startswith(
        f"{tmp_path / 'pipe'}: is neither a file nor a folder\n")  # fmt: skip


@pytest.mark.parametrize(("name", "head", "embedding"), [
    ("gpt2", "lm_head.weight", "transformer.wte.weight"), ("llama", "lm_head.weight", "model.embed_tokens.weight"),
    ("gptj", "lm_head.weight", "transformer.wte.weight"), ("gpt_neox", "embed_out.weight", "gpt_neox.embed_in.weight"),
    ("gpt_neox", "lm_head.weight", "gpt_neox.embed_in.weight"),
    ("bert", "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ("bert", "cls.predictions.decoder.bias", "cls.predictions.bias"),
])  # fmt: skip
def test_tied_head_in_the_file_must_equal_the_embedding(name, head, embedding, tmp_path):
    """transformers unties them if they differ: a model that reads one of them alone is another model."""
    model, cfg = CASES[name]
    cfg = replace(cfg, tie_word_embeddings=True) if hasattr(cfg, "tie_word_embeddings") else cfg
    params, mesh = params_of(model, cfg), fs.make_mesh(model=2)
    model.save(tmp_path, cfg, params)
    weights = load_file(tmp_path / "model.safetensors")

    def placed():
        return fs.materialize(model.load(tmp_path)[1], model.specs(cfg, model="model"), mesh, key=fs.key(0))

    save_file({**weights, head: weights[embedding].clone()}, tmp_path / "model.safetensors")
    for got, want in zip(fs.tree.leaves(fs.device_get(placed())), fs.tree.leaves(params), strict=True):
        assert torch.equal(got, want)
    other = weights[embedding].clone()
    other[-1] += 1
    save_file({**weights, head: other}, tmp_path / "model.safetensors")
    assert f"{head!r} is not equal to {embedding!r}\n  they are tied: they would be one leaf" in error_text(placed)
    save_file({**weights, head: other[1:].clone()}, tmp_path / "model.safetensors")
    assert f"{head!r} is tied to {embedding!r} by the config, and is another tensor\n" in error_text(
        model.load, tmp_path
    )
