"""Decoders on stages: loss, gradients and logits are those of the model on one device."""

from __future__ import annotations

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.models import gpt2, gpt_neox, gptj, llama, mixtral, qwen3, stages
from tests.lib.assertions import assert_same, error_text
from tests.lib.tiers import slow_unless

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
MODELS = {
    "gpt2": (gpt2, gpt2.Config(32, 8, 16, 3, 4)),
    "dropout": (gpt2, gpt2.Config(32, 8, 16, 3, 4, embd_pdrop=0.1, resid_pdrop=0.1, attn_pdrop=0.1)),
    "llama": (llama, llama.Config(32, 16, 24, 3, 4, 2, tie_word_embeddings=True)),
    "gptj": (gptj, gptj.Config(32, 8, 16, 3, 2, 4)),
    "gpt_neox": (gpt_neox, gpt_neox.Config(32, 16, 3, 2, 24)),
    "qwen3": (qwen3, qwen3.Config(32, 16, 24, 3, 4, 2, head_dim=4)),
}
LAYOUTS = {  # axes, schedule, chunks, options of the layout; data splits the parameters, too
    "fsdp": ({"data": 2, "stage": 2}, "1f1b", 1, {}),
    "gathered once": ({"data": 2, "stage": 2}, "1f1b", 1, {"release": False}),
    "tensor": ({"stage": 2, "model": 2}, "zero_bubble", 1, {"sequence": True}),
    "chunks": ({"data": 2, "stage": 3}, "interleaved", 2, {}),
    "all": ({"data": 2, "stage": 2, "model": 2}, "gpipe", 1, {"release": False}),
    "positions": ({"stage": 2, "seq": 2}, "1f1b", 1, {"context": "seq"}),
}
FAST = [("dropout", "tensor"), ("llama", "chunks")]  # fsdp: with recomputed blocks
EVERY = [(m, name) for m in MODELS for name in LAYOUTS if m != "dropout" or name != "positions"]


def arguments(model, cfg):
    params = fs.device_get(fs.materialize(model.init(cfg), P(), fs.make_mesh(data=1), key=fs.key(0)))
    ids = torch.randint(cfg.vocab_size, (8, 6), generator=torch.Generator().manual_seed(0))
    targets = ids.roll(-1, 1)
    targets[0, :4] = -100  # the microbatches count different numbers
    return fs.tree.map(lambda x: x.double(), params), ids, targets


def staged(model, cfg, axes, schedule="1f1b", chunks=1, *, key=None, check="first", remat=False, **options):
    described, mesh = model.init(cfg), fs.make_mesh(**{"data": 1, "stage": 1, "seq": 1, "model": 1} | axes)
    specs = fs.fully_shard(model.specs(cfg, model="model"), described, axis="data")
    specs = specs | {"h": fs.on_stages(specs["h"], described["h"], "stage", mesh.axes["stage"], chunks=chunks)}
    layout = gpt2.Layout("data", "model", stage="stage", **options)
    f = stages.pipelined(cfg, layout=layout, specs=specs, microbatches=2, schedule=schedule, chunks=chunks, remat=remat)
    return fs.shard_map(
        lambda p, ids, targets: (f(p, ids, targets, key), f.loss(p, ids, targets), f.logits(p, ids)), mesh=mesh,
        in_specs=(specs, P("data", "seq"), P("data", "seq")),
        out_specs=((P(), specs), P(), P("data", "seq", "model")), check=check)  # fmt: skip


@pytest.mark.parametrize(("name", "layout"), slow_unless(FAST, EVERY))
def test_stages_equal_the_model_on_one_device(name, layout):
    (model, cfg), (axes, schedule, chunks, options) = MODELS[name], LAYOUTS[layout]
    params, ids, targets = args = arguments(model, cfg)
    key = fs.key(7) if name == "dropout" else None
    got = fs.device_get(staged(model, cfg, axes, schedule, chunks, key=key, check="always", **options)(*args))
    if key is not None:
        want = with_dropout(cfg, args, key)
    else:
        want = fs.value_and_grad(lambda p: model.loss(cfg, p, ids, targets))(params)
    evaluated = model.loss(cfg, params, ids, targets), model.apply(cfg, params, ids)
    assert_same(got, (want, *evaluated), **CLOSE)


def with_dropout(cfg, args, key):
    def counted(params, ids, targets):
        count = (targets != -100).sum()
        return gpt2.loss(cfg, params, ids, targets, key=key) * count, count

    return fs.accumulate(counted, 2, counted=True)(*args)


def test_recomputed_blocks_have_the_gradients_of_one_device():
    model, cfg = MODELS["dropout"]
    args = arguments(model, cfg)
    got = staged(model, cfg, {"data": 2, "stage": 2}, key=fs.key(1), remat=True, check="never")(*args)
    assert_same(fs.device_get(got)[0], with_dropout(cfg, args, fs.key(1)), **CLOSE)


def test_a_model_without_parts_and_a_loss_on_stages_are_refused():
    text = error_text(stages.pipelined, mixtral.Config(32, 16, 24, 2, 4, 2), layout=gpt2.Layout(), specs=P(),
                      microbatches=2)  # fmt: skip
    assert text.startswith("pipelined: cfg is a Config, which has no form in stages"), text
    model, cfg = MODELS["gpt2"]
    params, ids, targets = arguments(model, cfg)
    text = error_text(model.loss, cfg, params, ids, targets, layout=gpt2.Layout(stage="stage"))
    assert "model: its blocks are on stages, and each rank has some of them" in text
