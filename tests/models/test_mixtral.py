"""Mixtral's own properties: experts over an axis, losses of the router, ties, files, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import fshard as fs
from fshard import P
from fshard.models import mixtral, qwen3_moe
from tests.lib import model_cases as cases
from tests.lib.assertions import error_text
from tests.lib.model_cases import DECODERS, reference

VARIANT = "router losses, window"  # 5 experts, 3 for each token, 2 layers

# name: (mesh, data axes, axis of the experts, fully sharded, sequence, remat)
SPLITS = {
    "model": ({"data": 1, "model": 2}, "data", "model", False, False, False),  # 3 experts and 2
    "model, all": ({"data": 2, "model": 3}, "data", "model", True, True, True),
    "data": ({"data": 2, "model": 1}, "data", "data", False, False, False),
    "data, all": ({"data": 2, "model": 2}, "data", "data", True, True, True),
    "more ranks than experts": ({"data": 6, "model": 1}, "data", "data", False, False, False),
    "an axis of their own": ({"data": 2, "model": 1, "expert": 2}, "data", "expert", True, False, False),
    "data and model": ({"data": 2, "model": 2}, "data", ("data", "model"), True, False, False),
    "data and model, sequence": ({"data": 2, "model": 2}, "data", ("model", "data"), False, True, True),
    "one of two data axes": ({"replica": 2, "data": 3, "model": 1}, ("replica", "data"), "data", False, False, True),
}


def placed(ref, name):
    """The mesh, specs and layout by the name of a split, and the parameters placed on that mesh."""
    sizes, data, experts, fully_sharded, sequence, remat = SPLITS[name]
    mesh, specs = fs.make_mesh(**sizes), mixtral.specs(ref.cfg, model="model", experts=experts)
    if fully_sharded:
        specs = fs.fully_shard(specs, mixtral.init(ref.cfg), axis="data")
    layout = mixtral.Layout(data, "model", sequence, experts=experts)
    return mesh, specs, layout, remat, fs.materialize(ref.params, specs, mesh, key=fs.key(0))


FAST = ("model", "data and model, sequence")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in SPLITS])
def test_experts_over_an_axis_have_the_logits_loss_and_gradients_of_transformers(name):
    ref = reference("mixtral", VARIANT)
    mesh, specs, layout, remat, p = placed(ref, name)
    targets = torch.cat([ref.ids[:, 1:], torch.full_like(ref.ids[:, :1], -100)], 1)
    batch = P(layout.data)

    @fs.shard_map(mesh=mesh, in_specs=(specs, batch, batch), out_specs=(P(layout.data, None, "model"), P(), specs),
                  check="never" if name in ("model", "more ranks than experts") else "first")  # fmt: skip
    def run(p, ids, targets):
        options = {"layout": layout, "specs": specs, "remat": remat}
        loss, grads = fs.value_and_grad(lambda p: mixtral.loss(ref.cfg, p, ids, targets, **options))(p)
        return mixtral.apply(ref.cfg, p, ids, **options), loss, grads

    logits, loss, grads = fs.device_get(run(p, ref.ids, targets))
    cases.close(logits, ref.logits, 1e-5, 1e-5)
    torch.testing.assert_close(loss, ref.loss, rtol=1e-5, atol=0)
    cases.close(grads, ref.grads, 1e-5, 1e-5)


@pytest.mark.parametrize("name", ["data, all", *(pytest.param(name, marks=pytest.mark.slow)
                                                 for name in ("model", "an axis of their own"))])  # fmt: skip
def test_experts_over_an_axis_generate_the_tokens_of_transformers(name):
    ref = reference("mixtral", "base")
    mesh, specs, layout, _, p = placed(ref, name)
    ids = cases.tokens(37, t=5)
    want = ref.theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)

    @fs.shard_map(mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"))
    def run(p, ids):
        return mixtral.generate(ref.cfg, p, ids, new=2, layout=layout, specs=specs)

    assert torch.equal(fs.device_get(run(p, ids)), want)


@pytest.mark.parametrize("name", [pytest.param("model, all", marks=pytest.mark.slow), "data, all"])
def test_losses_of_the_router_equal_transformers_without_padding(name):
    ref = reference("mixtral", VARIANT)
    mesh, specs, layout, remat, p = placed(ref, name)
    mask = cases.left_padding(*ref.ids.shape)
    with torch.no_grad():
        out = ref.theirs(ref.ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    z = torch.stack([logits.logsumexp(-1).square()[mask.flatten() != 0] for logits in out.router_logits]).mean()

    @fs.shard_map(mesh=mesh, in_specs=(specs, P("data"), P("data")), out_specs=P(), check="never")
    def run(p, ids, mask):
        return mixtral.losses(ref.cfg, p, ids, ids, mask=mask, layout=layout, specs=specs, remat=remat)

    got = fs.device_get(run(p, ref.ids, mask))
    cases.close({"balance": got["balance"], "z": got["z"]}, {"balance": out.aux_loss, "z": z}, 1e-5, 0)


def test_a_balanced_router_has_the_least_balance_loss_and_the_loss_weighs_its_parts():
    cfg = DECODERS["mixtral"].config(output_router_logits=True, router_aux_loss_coef=0.5, router_z_loss_coef=0.25)
    ids, p = cases.tokens(37), fs.tree.map(lambda d: fs.init.normal(d.shape, std=0.2), mixtral.init(cfg))
    p = fs.device_get(fs.materialize(p, P(), fs.make_mesh(data=1), key=fs.key(0)))
    parts = mixtral.losses(cfg, p, ids, ids)
    want = parts["cross_entropy"] + 0.5 * parts["balance"] + 0.25 * parts["z"]
    torch.testing.assert_close(mixtral.loss(cfg, p, ids, ids), want)
    assert parts["balance"] > 2 + 1e-3
    for block in p["h"]:
        block["router"]["w"] *= 0
    even = mixtral.losses(cfg, p, ids, ids)
    torch.testing.assert_close(even["balance"], torch.tensor(2.0))  # probabilities are equal
    torch.testing.assert_close(even["z"], torch.tensor(5.0).log().square())
    none = mixtral.losses(cfg, p, ids, ids, mask=torch.zeros_like(ids))
    assert none["balance"] == none["z"] == 0


def test_parts_of_a_padded_sequence_have_the_logits_of_one_call():
    ref, got, cache = reference("mixtral", "base"), [], mixtral.Cache(9)
    p = fs.device_get(fs.materialize(ref.params, P(), fs.make_mesh(data=1), key=fs.key(0)))
    mask = cases.left_padding(*ref.ids.shape)
    for part in ref.ids.split([4, 3, 2], 1):
        seen = mask[:, : cache.length + part.shape[1]]
        logits, cache = mixtral.apply(ref.cfg, p, part, mask=seen, cache=cache)
        got.append(logits)
    want = mixtral.apply(ref.cfg, p, ref.ids, mask=mask)
    torch.testing.assert_close(torch.cat(got, 1)[mask.bool()], want[mask.bool()], rtol=1e-5, atol=1e-5)


def test_among_equal_experts_a_token_goes_to_the_first():
    """With tied probabilities the experts 0 and 1 compute, whatever the number of tokens."""
    cfg = DECODERS["mixtral"].config(num_hidden_layers=1)
    p = fs.tree.map(lambda d: fs.init.normal(d.shape, std=0.2), mixtral.init(cfg))
    p = fs.device_get(fs.materialize(p, P(), fs.make_mesh(data=1), key=fs.key(0)))
    p["h"][0]["router"]["w"] = torch.zeros(24, 5)
    for ids in (cases.tokens(37), cases.tokens(37, b=1, t=1)):
        p = fs.tree.map(lambda x: x.detach().requires_grad_(), p)
        mixtral.apply(cfg, p, ids).sum().backward()
        used = p["h"][0]["experts"]["down"].grad.abs().amax((1, 2)) > 0
        assert used.tolist() == [True, True, False, False, False]


@pytest.mark.parametrize("split", [("data", "data", True), pytest.param(("data", "model", False),
                                                                         marks=pytest.mark.slow)])  # fmt: skip
def test_the_step_verifies_on_smaller_meshes_with_an_uneven_batch(split):
    data, experts, sequence = split
    cfg = DECODERS["mixtral"].config(output_router_logits=True, router_z_loss_coef=0.1, num_hidden_layers=1)
    mesh, specs = fs.make_mesh(data=2, model=2), mixtral.specs(cfg, model="model", experts=experts)
    described = fs.tree.map(lambda d: fs.init.normal(d.shape, std=0.2), mixtral.init(cfg))
    layout = mixtral.Layout(data, "model", sequence, experts=experts)

    @fs.shard_map(mesh=mesh, in_specs=(specs, P("data")), out_specs=(P(), specs))
    def step(p, ids):
        return fs.value_and_grad(lambda p: mixtral.loss(cfg, p, ids, ids, layout=layout, specs=specs))(p)

    fs.verify(step, fs.materialize(described, specs, mesh, key=fs.key(0)), cases.tokens(37, b=5))


@pytest.mark.parametrize("experts", ["model", *(pytest.param(axes, marks=pytest.mark.slow)
                                               for axes in ("data", ("data", "model")))])  # fmt: skip
def test_shapes_are_checked_without_values(experts):
    cfg = DECODERS["mixtral"].config(num_hidden_layers=1)
    specs, ids = mixtral.specs(cfg, model="model", experts=experts), torch.zeros(4, 6, dtype=torch.int64)
    layout = mixtral.Layout("data", "model", experts=experts)

    def run(p, ids):
        return fs.value_and_grad(lambda p: mixtral.loss(cfg, p, ids, ids, layout=layout, specs=specs))(p)

    mapped = fs.shard_map(run, mesh=fs.make_mesh(kind="abstract", data=2, model=3),
                          in_specs=(specs, P("data")), out_specs=(P(), specs))  # fmt: skip
    fs.check(mapped, mixtral.init(cfg), ids)


def test_layers_without_experts_have_no_balance_and_nothing_waits_for_them():
    """A stage without a mixture hangs elsewhere (Megatron-LM#3401)."""
    cfg = DECODERS["qwen3_moe"].config(mlp_only_layers=(0, 1), output_router_logits=True)
    specs = qwen3_moe.specs(cfg, model="model", experts="data")
    mesh, ids = fs.make_mesh(data=2, model=2), cases.tokens(37)
    layout = mixtral.Layout("data", "model", experts="data")
    run = fs.shard_map(lambda p, ids: qwen3_moe.losses(cfg, p, ids, ids, layout=layout, specs=specs), mesh=mesh,
                       in_specs=(specs, P("data")), out_specs=P())  # fmt: skip
    params = qwen3_moe.init(cfg)
    leaves = fs.tree.leaves(params)
    assert len({id(x) for x in leaves}) == len(leaves), "layers are tied"
    got = fs.device_get(run(fs.materialize(params, specs, mesh, key=fs.key(0)), ids))
    assert (got["balance"], got["z"]) == (0, 0)
    assert got["cross_entropy"] > 0


@pytest.mark.parametrize("name", ["model", pytest.param("data, all", marks=pytest.mark.slow), "one of two data axes"])
def test_split_experts_are_written_as_transformers_writes_them(name, tmp_path):
    ref = reference("mixtral", "base")
    *_, p = placed(ref, name)
    mixtral.save(tmp_path / "ours", ref.cfg, p)
    cases.saved(ref.theirs, tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / x / "model.safetensors") for x in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert mixtral.load(tmp_path / "ours")[0] == ref.cfg


def test_a_stored_leaf_of_experts_names_its_first_tensor():
    assert repr(reference("mixtral", "base").params["h"][1]["experts"]["up"]) == (
        "f32[5, 24, 29] = stored(model.safetensors: model.layers.1.block_sparse_moe.experts.0.w3.weight and 4 more)"
    )


def test_wrong_trees_and_layouts_are_refused(tmp_path):
    ref = reference("mixtral", "base")
    mesh, specs, _, _, p = placed(ref, "model")

    def logits(layout, specs):
        run = fs.shard_map(lambda p, ids: mixtral.apply(ref.cfg, p, ids, layout=layout), mesh=mesh,
                           in_specs=(specs, P()), out_specs=P(None, None, "model"))  # fmt: skip
        return error_text(run, p, ref.ids)

    text = logits(mixtral.Layout("data", "model"), specs)
    assert "mixtral: this rank has 3 of 5 experts" in text
    assert "fix: Layout(experts=), the axis that specs(experts=) splits them over" in text
    assert "experts=('data', 'other') has axes of 'data' and others" in logits(
        mixtral.Layout("data", "model", experts=("data", "other")), specs)  # fmt: skip
    assert "experts=('data', 'a') has axes of 'data' and others" in logits(
        mixtral.Layout("data", ("a", "b"), experts=("data", "a")), specs)  # fmt: skip
    text = logits(mixtral.Layout("data", "model", experts="data"), specs)
    assert "mixtral: specs must be the specs of all leaves, got None" in text
    assert "experts are split over a data axis" in text
    del p["h"][0]["experts"]["up"]
    assert "write: tree['h'][0]['experts']['up'] is missing" in error_text(mixtral.save, tmp_path, ref.cfg, p)
