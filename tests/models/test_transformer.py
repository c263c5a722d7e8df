"""Batches that the mesh does not divide: dropout, and rotary angles that depend on the longest sequence."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

import fshard as fs
from fshard import P, ShardingError
from fshard.models import bert, gpt2, gpt_neox, gptj, llama, t5
from fshard.nn.decoding import loop
from tests.lib.assertions import error_text
from tests.lib.model_cases import close, tokens
from tests.lib.tiers import slow_unless

MODELS = {
    "gpt2": (gpt2, gpt2.Config(5, 8, 12, 1, 3, attn_pdrop=0.2, embd_pdrop=0.2, resid_pdrop=0.2)),
    "gptj": (gptj, gptj.Config(5, 8, 12, 1, 3, rotary_dim=2, attn_pdrop=0.2, embd_pdrop=0.2, resid_pdrop=0.2)),
    "gpt_neox": (gpt_neox, gpt_neox.Config(5, 24, 1, 3, 10, attention_dropout=0.2, hidden_dropout=0.2)),
    "llama": (llama, llama.Config(5, 12, 10, 1, 3, attention_dropout=0.2)),
    "bert": (bert, bert.Config(5, 12, 1, 3, 10, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2)),
    "t5": (t5, t5.Config("t5", 5, 12, 4, 10, 1, 1, 3, dropout_rate=0.2)),
}


def loss_and_grads(model, cfg, sizes, ids, *, key=None, mask=None, data=("r", "d"), batch=None):
    mesh, specs = fs.make_mesh(**sizes), fs.fully_shard(model.specs(cfg), model.init(cfg), axis="d")
    params = fs.materialize(fs.tree.map(lambda d: fs.init.normal(d.shape, std=0.2), model.init(cfg)), specs, mesh,
                            key=fs.key(3))  # fmt: skip
    layout = model.Layout(data, batch=batch)

    @fs.shard_map(mesh=mesh, in_specs=(specs, P(data), P(data)), out_specs=(P(), specs),
                  check="first" if sizes == {"r": 1, "d": 2} else "never")  # fmt: skip
    def run(p, ids, mask):
        return fs.value_and_grad(lambda p: model.loss(cfg, p, ids, ids.roll(-1, 1), layout=layout, specs=specs, key=key,
                                                      mask=mask, remat=True))(p)  # fmt: skip

    return fs.device_get(run(params, ids, torch.ones_like(ids) if mask is None else mask))


def assert_same(got, want):
    """Per leaf, except the biases of BERT's keys: they shift all scores of a row alike, so their gradient is 0."""
    for _, grads in (got, want):
        for block in grads.get("h", []):
            block.get("k", {}).pop("b", None)
    close(got, want, 1e-5, 1e-5)


@pytest.mark.parametrize("name", slow_unless(["bert", "llama"], MODELS))
def test_dropout_of_an_uneven_batch_is_the_same_on_every_mesh(name):
    model, cfg = MODELS[name]
    ids = tokens(5, b=5, t=4)
    want = loss_and_grads(model, cfg, {"r": 1, "d": 1}, ids, key=fs.key(1))
    for sizes in ({"r": 1, "d": 2}, {"r": 2, "d": 2}):  # 3 and 2 examples; 2, 1, 1 and 1
        assert_same(loss_and_grads(model, cfg, sizes, ids, key=fs.key(1)), want)


def test_a_layout_with_a_wrong_batch_is_an_error():
    model, cfg = MODELS["gpt2"]
    options = {"ids": tokens(5, b=5, t=4), "key": fs.key(1)}
    close(loss_and_grads(model, cfg, {"r": 1, "d": 2}, batch=5, **options),
          loss_and_grads(model, cfg, {"r": 1, "d": 1}, **options), 1e-5, 1e-5)  # fmt: skip
    with pytest.raises(ShardingError, match="dropout: x is not this rank's part of the global array"):
        loss_and_grads(model, cfg, {"r": 1, "d": 2}, batch=6, **options)


def test_an_abstract_mesh_computes_the_batch_without_a_transfer():
    """With an uneven vocabulary the ranks of other meshes exchange the batch; an abstract mesh has no values."""
    _, cfg = MODELS["gpt2"]
    mesh, specs = fs.make_mesh(kind="abstract", data=4, model=3), gpt2.specs(cfg, model="model")
    params = fs.materialize(gpt2.init(cfg), specs, mesh, key=fs.key(0))
    layout = gpt2.Layout("data", "model")

    @fs.shard_map(mesh=mesh, in_specs=(specs, P("data")), out_specs=P())
    def run(p, ids):
        return gpt2.loss(cfg, p, ids, ids, layout=layout, specs=specs, key=fs.key(1))

    fs.check(run, params, tokens(5, b=8, t=4))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_a_rank_without_examples_uses_the_angles_of_other_ranks(rope_type):
    factors = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0], "original_max_position_embeddings": 2}
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0, **(factors if rope_type == "longrope" else {})}
    cfg = llama.Config(5, 12, 10, 1, 3, max_position_embeddings=2, rope_parameters=rope)
    ids, mask = tokens(5, b=5, t=6), (torch.arange(6) >= torch.arange(5)[:, None]).long()
    want = loss_and_grads(llama, cfg, {"r": 1, "d": 1}, ids, mask=mask)
    close(loss_and_grads(llama, cfg, {"r": 1, "d": 4}, ids, mask=mask), want, 1e-5, 1e-5)  # 2, 2, 1 and 0 examples


@pytest.mark.parametrize("name", MODELS)
def test_the_batch_is_exchanged_once_with_dropout_and_never_without(name, monkeypatch):
    """With an uneven dim, here the vocabulary, each exchange costs a transfer and a wait."""
    model, cfg = MODELS[name]
    exchanged = []
    monkeypatch.setattr(loop, "global_size", lambda verb, n, axis, word: exchanged.append(verb) or n)
    for config, times in ((cfg, 1), (replace(cfg, **{f.name: 0.0 for f in fields(cfg) if "drop" in f.name}), 0)):
        exchanged.clear()
        loss_and_grads(model, config, {"r": 1, "d": 1}, tokens(5, b=2, t=4), key=fs.key(1))
        assert exchanged == ["dropout"] * times


def test_blocks_that_are_missing_or_lack_a_leaf_are_named():
    cfg = gpt2.Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=2, n_head=1)
    params = fs.device_get(fs.materialize(gpt2.init(cfg), P(), fs.make_mesh(data=1), key=fs.key(0)))
    ids = torch.zeros(1, 3, dtype=torch.int64)
    first, second = params["h"]
    without = {name: leaf for name, leaf in second.items() if name != "ln_2"}
    for blocks, words in (
        ([first, without], "params['h'][1]['ln_2']['w']: is missing"),
        ([first], "params['h'][1]['down']['b']: is missing"),
        (iter([first, second]), "params['h']: is more than the model has"),
    ):
        assert words in error_text(gpt2.apply, cfg, params | {"h": blocks}, ids)
    del params["h"]
    assert "params['h'][0]['down']['b']: is missing" in error_text(gpt2.apply, cfg, params, ids)
