"""Decoders on stages: loss, gradients and logits are those of the model on one device."""

from __future__ import annotations

import functools
import os

import pytest
import torch
from safetensors.torch import load_file

import fshard as fs
from fshard import P, checkpoint, optim
from fshard.models import gpt2, gpt_neox, gptj, llama, mixtral, qwen3, qwen3_moe, stages, t5
from tests.lib import model_cases as cases
from tests.lib.assertions import assert_same, error_text
from tests.lib.tiers import slow_unless

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
MODELS = {
    "gpt2": (gpt2, gpt2.Config(32, 8, 16, 3, 4)),
    "dropout": (gpt2, gpt2.Config(32, 8, 16, 3, 4, embd_pdrop=0.1, resid_pdrop=0.1, attn_pdrop=0.1)),
    "llama": (llama, llama.Config(32, 16, 24, 3, 4, 2, tie_word_embeddings=True)),
    "gptj": (gptj, gptj.Config(32, 8, 16, 3, 2, 4)),
    "gpt_neox": (gpt_neox, gpt_neox.Config(32, 16, 3, 2, 24)),
    "mixtral": (mixtral, mixtral.Config(32, 16, 24, 3, 4, 2, num_local_experts=4)),
    "balance": (
        qwen3_moe,
        qwen3_moe.Config(
            32,
            16,
            24,
            4,
            4,
            2,
            head_dim=4,
            num_experts=5,
            moe_intermediate_size=8,
            num_experts_per_tok=2,
            mlp_only_layers=(2,),
            output_router_logits=True,
            router_aux_loss_coef=0.5,
            router_z_loss_coef=0.25,
        ),
    ),
    "qwen3": (qwen3, qwen3.Config(32, 16, 24, 3, 4, 2, head_dim=4)),
}
LAYOUTS = {  # axes, schedule, chunks, options of the layout; data splits the parameters, too
    "fsdp": ({"data": 2, "stage": 2}, "1f1b", 1, {}),
    "gathered once": ({"data": 2, "stage": 2}, "1f1b", 1, {"release": False}),
    "tensor": ({"stage": 2, "model": 2}, "zero_bubble", 1, {"sequence": True}),
    "chunks": ({"data": 2, "stage": 3}, "interleaved", 2, {}),
    "all": ({"data": 2, "stage": 2, "model": 2}, "gpipe", 1, {"release": False}),
    "positions": ({"stage": 2, "seq": 2}, "1f1b", 1, {"context": "seq"}),
    "experts": ({"data": 2, "stage": 2}, "zero_bubble", 1, {"experts": "data"}),
}
FAST = [("dropout", "tensor"), ("balance", "tensor")]
EVERY = [(m, name) for m in MODELS for name in LAYOUTS
         if (m, name) != ("dropout", "positions") and (m in ("mixtral", "balance") or name != "experts")]  # fmt: skip


def arguments(model, cfg):
    params = fs.device_get(fs.materialize(model.init(cfg), P(), fs.make_mesh(data=1), key=fs.key(0)))
    ids = torch.randint(cfg.vocab_size, (8, 6), generator=torch.Generator().manual_seed(0))
    targets = ids.roll(-1, 1)
    targets[0, :4] = -100  # the microbatches count different numbers
    return fs.tree.map(lambda x: x.double(), params), ids, targets


def staged(model, cfg, axes, schedule="1f1b", chunks=1, *, key=None, check="first", remat=False, ends=(), **options):
    described, mesh = model.init(cfg), fs.make_mesh(**{"data": 1, "stage": 1, "seq": 1, "model": 1} | axes)
    split = {name: axis for name, axis in options.items() if name == "experts"}
    specs = fs.fully_shard(model.specs(cfg, model="model", **split), described, axis="data")
    specs = specs | {"h": fs.on_stages(specs["h"], described["h"], "stage", mesh.axes["stage"], chunks=chunks)}
    specs |= ends
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


@pytest.mark.slow
def test_embeddings_and_head_may_be_split_over_the_stages_too():
    model, cfg = llama, llama.Config(32, 16, 24, 3, 4, 2)
    args, ends = (
        arguments(model, cfg),
        {
            "wte": P(("model", "stage")),
            "head": {"w": P(None, ("model", "stage"))},
            "norm_f": P("stage", lengths=(0, 16)),
        },
    )
    got = fs.device_get(staged(model, cfg, {"stage": 2, "model": 2}, ends=ends, check="always")(*args))
    params, ids, targets = args
    want = fs.value_and_grad(lambda p: model.loss(cfg, p, ids, targets))(params)
    assert_same(got, (want, model.loss(cfg, params, ids, targets), model.apply(cfg, params, ids)), **CLOSE)


def test_recomputed_blocks_have_the_gradients_of_one_device():
    model, cfg = MODELS["dropout"]
    args = arguments(model, cfg)
    got = staged(model, cfg, {"data": 2, "stage": 2}, key=fs.key(1), remat=True, check="never")(*args)
    assert_same(fs.device_get(got)[0], with_dropout(cfg, args, fs.key(1)), **CLOSE)


def test_a_model_without_parts_and_a_loss_on_stages_are_refused():
    text = error_text(stages.pipelined, t5.Config(), layout=gpt2.Layout(), specs=P(), microbatches=2)
    assert text.startswith("pipelined: cfg is a Config, which has no form in stages"), text
    apply, _ = fs.defer(lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), units="Linear")
    text = error_text(stages.pipelined, apply, layout=gpt2.Layout(), specs=P(), microbatches=2)
    assert "its forward may use the result of a unit anywhere: its units need not form a chain" in text
    model, cfg = MODELS["gpt2"]
    params, ids, targets = arguments(model, cfg)
    text = error_text(model.loss, cfg, params, ids, targets, layout=gpt2.Layout(stage="stage"))
    assert "model: its blocks are on stages, and each rank has some of them" in text


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_each_block_of_a_folder_is_read_once_by_its_stage_and_written_back(name, tmp_path, monkeypatch):
    """Of 2 blocks on 3 stages, one stage has none. No byte of a block is read by two stages."""
    ref, reads, preadv = cases.reference(name), [], os.preadv
    folder = cases.saved(ref.theirs, tmp_path / "theirs")
    cfg, params = ref.module.load(folder)
    specs = on_stages(ref.module.specs(cfg), ref.module.init(cfg), 3)

    def recorded(fd, buffers, offset):
        got = preadv(fd, buffers, offset)
        reads.append(got)
        return got

    monkeypatch.setattr(os, "preadv", recorded)
    mesh = fs.make_mesh(stage=3)
    blocks = fs.materialize(params["h"], specs["h"], mesh, key=fs.key(0))
    assert sum(reads) == sum(x.numel() * 4 for x in fs.tree.leaves(blocks))
    has = [[x.numel() > 0 for x in block["norm_1"]["w"].shards] for block in blocks]
    assert has == [[True, False, False], [False, True, False]]
    ref.module.save(tmp_path / "ours", cfg, fs.materialize(params, specs, mesh, key=fs.key(0)))
    assert_same(load_file(tmp_path / "ours" / "model.safetensors"), load_file(folder / "model.safetensors"))


def on_stages(specs, described, n, lengths=None):
    return specs | {"h": fs.on_stages(specs["h"], described["h"], "stage", n, lengths=lengths)}


def trained(mesh, specs, state, *, steps, **layout):
    """Return the state after some steps from `state`, or from the start, and their losses."""
    model, cfg = MODELS["gpt2"]
    adam = optim.adamw(1e-2)
    state_specs = {"params": specs, "opt": adam.specs(specs)}
    if state is None:
        described = fs.tree.map(lambda x: fs.init.normal(x.shape, std=0.3, dtype=torch.float64), model.init(cfg))
        state = fs.materialize({"params": described, "opt": adam.init(described)}, state_specs, mesh, key=fs.key(0))
    layout = gpt2.Layout("data", **layout)

    @fs.shard_map(mesh=mesh, in_specs=(state_specs, P("data")), out_specs=(state_specs, P()), check="never")
    def step(state, ids):
        if layout.stage:
            f = stages.pipelined(cfg, layout=layout, specs=specs, microbatches=2)
        else:
            f = fs.value_and_grad(functools.partial(model.loss, cfg, layout=layout, specs=specs))
        loss, grads = f(state["params"], ids, ids)
        params, opt = adam.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, loss

    losses, ids = [], fs.random.randint(fs.key(1), (8, 6), low=0, high=32)
    for _ in range(steps):
        state, loss = step(state, ids)
        losses.append(float(fs.device_get(loss)))
    return state, losses


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [None, (0, 2, 0, 1)])
def test_a_pipeline_saved_on_four_stages_resumes_on_two_on_one_and_as_fsdp(lengths, tmp_path):
    model, cfg = MODELS["gpt2"]
    described, axes = model.init(cfg), {"data": 1, "stage": 1}
    specs = fs.fully_shard(model.specs(cfg), described, axis="data")
    one = fs.make_mesh(**axes)
    _, curve = trained(one, specs, None, steps=4)
    assert curve[3] < curve[0]
    state, losses = trained(fs.make_mesh(**axes | {"stage": 4}), on_stages(specs, described, 4, lengths), None,
                            steps=2, stage="stage")  # fmt: skip
    checkpoint.save(tmp_path, state, step=2)
    others = {"two": (axes | {"stage": 2}, on_stages(specs, described, 2, lengths and (1, 2)), {"stage": "stage"}),
              "one stage": (axes, on_stages(specs, described, 1), {"stage": "stage"}), "one": (axes, specs, {}),
              "fsdp": (axes | {"data": 4}, specs, {})}  # fmt: skip
    for name, (sizes, placed, layout) in others.items():
        mesh = fs.make_mesh(**sizes)
        state_specs = {"params": placed, "opt": optim.adamw(1e-2).specs(placed)}
        restored = checkpoint.restore(tmp_path, state, specs=state_specs, mesh=mesh, step=2)
        assert_same(fs.device_get(restored), fs.device_get(state), name)
        assert losses + trained(mesh, placed, restored, steps=2, **layout)[1] == pytest.approx(curve, rel=1e-9)
