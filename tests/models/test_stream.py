"""The stream of the models where a batch does not divide: dropout, and angles that depend on the longest sequence."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

import fshard as fs
from fshard import P, ShardingError
from fshard.models import bert, decoding, gpt2, gpt_neox, gptj, llama
from tests.lib.model_cases import close, tokens

CASES = {
    "gpt2": (gpt2, gpt2.Config(5, 8, 12, 1, 3, attn_pdrop=0.2, embd_pdrop=0.2, resid_pdrop=0.2)),
    "gptj": (gptj, gptj.Config(5, 8, 12, 1, 3, rotary_dim=2, attn_pdrop=0.2, embd_pdrop=0.2, resid_pdrop=0.2)),
    "gpt_neox": (gpt_neox, gpt_neox.Config(5, 24, 1, 3, 10, attention_dropout=0.2, hidden_dropout=0.2)),
    "llama": (llama, llama.Config(5, 12, 10, 1, 3, attention_dropout=0.2)),
    "bert": (bert, bert.Config(5, 12, 1, 3, 10, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2)),
}


def loss_and_grads(model, cfg, sizes, ids, *, key=None, mask=None, data=("r", "d"), batch=None):
    mesh, specs = fs.make_mesh(**sizes), fs.fully_shard(model.specs(cfg), model.init(cfg), axis="d")
    params = fs.materialize(fs.tree.map(lambda d: fs.init.normal(d.shape, std=0.2), model.init(cfg)), specs, mesh,
                            key=fs.key(3))  # fmt: skip
    layout = model.Layout(data, batch=batch)

    @fs.shard_map(mesh=mesh, in_specs=(specs, P(data), P(data)), out_specs=(P(), specs))
    def run(p, ids, mask):
        return fs.value_and_grad(lambda p: model.loss(cfg, p, ids, ids.roll(-1, 1), layout=layout, specs=specs, key=key,
                                                      mask=mask, remat=True))(p)  # fmt: skip

    return fs.device_get(run(params, ids, torch.ones_like(ids) if mask is None else mask))


def same(got, want):
    """But for the bias of a BERT's keys: it moves all scores of a row alike, and its gradient is rounding."""
    for _, grads in (got, want):
        for block in grads.get("h", []):
            block.get("k", {}).pop("b", None)
    close(got, want, 1e-5, 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_dropout_of_a_batch_that_does_not_divide_is_the_same_on_every_mesh(name):
    model, cfg = CASES[name]
    ids = tokens(5, b=5, t=4)
    want = loss_and_grads(model, cfg, {"r": 1, "d": 1}, ids, key=fs.key(1))
    for sizes in ({"r": 1, "d": 2}, {"r": 2, "d": 2}):  # 3 and 2 examples; 2, 1, 1 and 1
        same(loss_and_grads(model, cfg, sizes, ids, key=fs.key(1)), want)


def test_a_layout_that_is_told_another_batch_than_there_is_refuses():
    model, cfg = CASES["gpt2"]
    given = {"ids": tokens(5, b=5, t=4), "key": fs.key(1)}
    close(loss_and_grads(model, cfg, {"r": 1, "d": 2}, batch=5, **given),
          loss_and_grads(model, cfg, {"r": 1, "d": 1}, **given), 1e-5, 1e-5)  # fmt: skip
    with pytest.raises(ShardingError, match="dropout: x is not this rank's part of the global array"):
        loss_and_grads(model, cfg, {"r": 1, "d": 2}, batch=6, **given)


def test_on_an_abstract_mesh_nobody_is_asked_how_large_the_batch_is():
    """With an uneven vocabulary the ranks of a real mesh tell each other; there are none here."""
    _, cfg = CASES["gpt2"]
    mesh, specs = fs.make_mesh(kind="abstract", data=4, model=3), gpt2.specs(cfg, model="model")
    params = fs.materialize(gpt2.init(cfg), specs, mesh, key=fs.key(0))
    layout = gpt2.Layout("data", "model")

    @fs.shard_map(mesh=mesh, in_specs=(specs, P("data")), out_specs=P())
    def run(p, ids):
        return gpt2.loss(cfg, p, ids, ids, layout=layout, specs=specs, key=fs.key(1))

    fs.check(run, params, tokens(5, b=8, t=4))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_a_rank_without_examples_has_the_angles_of_the_others(rope_type):
    factors = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0], "original_max_position_embeddings": 2}
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0, **(factors if rope_type == "longrope" else {})}
    cfg = llama.Config(5, 12, 10, 1, 3, max_position_embeddings=2, rope_parameters=rope)
    ids, mask = tokens(5, b=5, t=6), (torch.arange(6) >= torch.arange(5)[:, None]).long()
    want = loss_and_grads(llama, cfg, {"r": 1, "d": 1}, ids, mask=mask)
    close(loss_and_grads(llama, cfg, {"r": 1, "d": 4}, ids, mask=mask), want, 1e-5, 1e-5)  # 2, 2, 1 and none


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_asked_without_dropout_and_once_with_it(name, monkeypatch):
    """The ranks ask where a dim is uneven, here the vocabulary; each time costs a transfer and a wait."""
    model, cfg = CASES[name]
    asked = []
    monkeypatch.setattr(decoding, "global_size", lambda verb, n, axis, word: asked.append(verb) or n)
    for dropped, times in ((cfg, 1), (replace(cfg, **{f.name: 0.0 for f in fields(cfg) if "drop" in f.name}), 0)):
        asked.clear()
        loss_and_grads(model, dropped, {"r": 1, "d": 1}, tokens(5, b=2, t=4), key=fs.key(1))
        assert asked == ["dropout"] * times
