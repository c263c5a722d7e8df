"""Targets, described adapters and their specs; bad input; the tensors of a Weight in a tree."""

from __future__ import annotations

import math
import sys

import pytest
import torch

import fshard as fs
from fshard import P, lora
from fshard.models import gpt2, heads, llama, mixtral
from tests.lib.assertions import error_text

CFG = gpt2.Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=2, n_head=2)
PARAMS = gpt2.init(CFG)
ONE = fs.make_mesh(data=1)


def adapted(cfg, params=PARAMS, of=gpt2.theirs):
    return sorted(lora.init(cfg, params, of=of))


def test_targets_are_names_ends_globs_or_a_regular_expression():
    both = ["h.0.qkv.w", "h.1.qkv.w"]
    assert adapted(lora.Config(["c_attn"])) == both
    assert adapted(lora.Config(["transformer.h.0.attn.c_attn", "h.1.attn.c_attn"])) == both
    assert adapted(lora.Config(["transformer.h.*.attn.c_attn"])) == both
    assert adapted(lora.Config(["**.1.**.c_*"])) == ["h.1.down.w", "h.1.proj.w", "h.1.qkv.w", "h.1.up.w"]
    assert adapted(lora.Config(r".*\.1\.attn\.c_.*")) == ["h.1.proj.w", "h.1.qkv.w"]
    assert adapted(lora.Config(["c_proj"], exclude=["mlp.c_proj"])) == ["h.0.proj.w", "h.1.proj.w"]
    assert adapted(lora.Config(["c_proj"], exclude=r".*mlp.*")) == ["h.0.proj.w", "h.1.proj.w"]
    assert len(adapted(lora.Config("all-linear"))) == 8
    assert adapted(lora.Config(["up"]), {"up": fs.init.zeros((2, 3)), "b": fs.init.zeros(3)}, None) == ["up"]
    assert adapted(lora.Config(["h.*.up"]), PARAMS, None) == ["h.0.up.w", "h.1.up.w"]


def test_all_linear_leaves_out_heads_and_routers():
    sizes = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}  # fmt: skip
    params = mixtral.init(mixtral.Config(**sizes))
    assert adapted(lora.Config("all-linear"), params, mixtral.theirs) == [f"h.0.{n}.w" for n in ("k", "proj", "q", "v")]
    cfg = heads.Config(CFG, "sequence")
    names = adapted(
        lora.Config("all-linear", modules_to_save=["score"]), heads.init(cfg), lambda p: heads.theirs(p, cfg)
    )
    assert len(names) == 9
    assert "score.w" in names


def test_ranks_and_scales_follow_patterns():
    cfg = lora.Config(["c_attn", "c_fc"], rank=4, alpha=8, ranks={"0.attn.c_attn": 2, "c_(fc|x)": 6},
                      alphas={r"h\.1\.mlp\.c_fc": 3})  # fmt: skip
    made = lora.init(cfg, PARAMS, of=gpt2.theirs)
    assert [made[f"h.{i}.{n}.w"]["a"].shape[-1] for i in (0, 1) for n in ("qkv", "up")] == [2, 6, 4, 6]
    names = ("transformer.h.0.attn.c_attn", "transformer.h.0.mlp.c_fc", "transformer.h.1.mlp.c_fc")
    assert [cfg.scale_of(n) for n in names] == [8 / 2, 8 / 6, 3 / 6]
    assert lora.Config(["q"], rank=4, alpha=8, rslora=True).scale_of("q") == 4


def test_factors_are_drawn_as_peft_draws_them():
    params = {"wte": PARAMS["wte"], "h": [{"up": {"w": fs.init.zeros((100, 300)), "b": fs.init.zeros(300)}}]}
    for name, spread in (("kaiming", 0.1 / math.sqrt(3)), ("gaussian", 1 / 16)):
        cfg = lora.Config(["c_fc", "wte"], rank=16, init=name)
        made = lora.init(cfg, params, of=gpt2.theirs)
        full = fs.device_get(fs.materialize(made, P(), ONE, key=fs.key(0)))
        a, b = full["h.0.up.w"]["a"], full["h.0.up.w"]["b"]
        assert abs(float(a.std()) / spread - 1) < 0.1
        assert name == "gaussian" or a.abs().max() <= 0.1
        assert not b.any()
        assert not full["wte"]["a"].any()
        assert abs(float(full["wte"]["b"].std()) - 1) < 0.4
        assert {x.dtype for x in fs.tree.leaves(full)} == {torch.float32}


def test_magnitudes_and_copies_begin_with_the_values_of_the_base():
    cfg = lora.Config(["c_attn", "mlp.c_proj", "wpe"], dora=True, modules_to_save=["ln_f"], bias="lora_only")
    mesh = fs.make_mesh(model=3)
    made = lora.init(cfg, PARAMS, of=gpt2.theirs, key=fs.key(5))
    base = fs.device_get(fs.materialize(PARAMS, P(), ONE, key=fs.key(5)))
    specs = lora.specs(cfg, PARAMS, gpt2.specs(CFG, model="model"), of=gpt2.theirs)
    own = fs.device_get(fs.materialize(made, specs, mesh, key=fs.key(9)))
    torch.testing.assert_close(own["h.1.qkv.w"]["magnitude"], base["h"][1]["qkv"]["w"].norm(dim=0))
    torch.testing.assert_close(own["h.0.down.w"]["magnitude"], base["h"][0]["down"]["w"].norm(dim=0))
    torch.testing.assert_close(own["wpe"]["magnitude"], base["wpe"].norm(dim=0))
    assert torch.equal(own["ln_f.w"]["value"], base["ln_f"]["w"])
    assert sorted(n for n in own if n.startswith("h.0.") and n.endswith(".b")) == ["h.0.down.b", "h.0.qkv.b"]
    of_tensors = lora.init(cfg, base, of=gpt2.theirs)
    torch.testing.assert_close(of_tensors["h.1.qkv.w"]["magnitude"], own["h.1.qkv.w"]["magnitude"])
    drawn = lora.init(cfg, PARAMS, of=gpt2.theirs)
    text = error_text(fs.materialize, drawn, P(), ONE, key=fs.key(5))
    assert (
        text
        == """\
lora.init: params['h.0.down.w'] is drawn, and its adapter begins with its values
  fix: lora.init(..., key=): the key that params is materialized with"""
    )


def test_factors_lie_as_their_base():
    cfg = lora.Config(["q_proj", "o_proj", "down_proj", "embed_tokens"], dora=True)
    model = llama.Config(vocab_size=8, hidden_size=4, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2)
    specs = fs.fully_shard(llama.specs(model, model="m"), llama.init(model), axis="d")
    assert lora.specs(cfg, llama.init(model), specs, of=llama.theirs) == {
        "h.0.q.w": {"a": P("d"), "b": P(None, "m"), "magnitude": P("m")},
        "h.0.proj.w": {"a": P("m"), "b": P(None, "d"), "magnitude": P("d")},
        "h.0.down.w": {"a": P("m"), "b": P(None, "d"), "magnitude": P("d")},
        "wte": {"a": P("m"), "b": P(None, "d"), "magnitude": P("d")},
    }


def test_many_names_and_modules_are_not_compared_one_by_one():
    described = {f"h.{i}.up": fs.init.zeros((2, 2)) for i in range(100)}
    cfg = lora.Config([f"h.{i}.up" for i in range(0, 2000, 20)] + [f"h.{i}.no" for i in range(400)])
    calls = 0

    def count(_frame, event, _arg):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        text = error_text(lora.init, cfg, described)
    finally:
        sys.setprofile(None)
    assert calls < 50_000, "50,000 pairs of a name and a module"
    assert text.endswith("lora.init: 475 more entries name no module")


# --- bad input ------------------------------------------------------------------------------------------------

NEAR = "  near  transformer.h.*.attn.c_attn, transformer.h.*.mlp.c_fc, transformer.h.*.attn.c_proj, transformer.wte"
REFUSED = {
    "a name like others, and a vector": (["c_atn", "ln_1"], {}, f"""\
2 problems
lora.init: params['h'][0]['ln_1']['w'] is a target and no matrix: it is a vector
  module  transformer.h.0.ln_1
  fix: name other targets, or exclude it
  the same for params['h'][1]['ln_1']['w']
lora.init: targets: no module is named 'c_atn'
{NEAR}
  fix: one of these, by its last parts or in full"""),
    "everything is excluded": ("all-linear", {"exclude": ".*"}, """\
lora.init: every target is excluded, or a module to save
  targets  all-linear    exclude  .*    modules_to_save  ()
  fix: a narrower exclude"""),
    "a tied head is no module to save": (["c_attn"], {"modules_to_save": ["lm_head"]}, """\
lora.init: modules_to_save: no module is named 'lm_head'
  near  transformer.h.*.attn.c_attn, transformer.wte, transformer.wpe, transformer.h.*.mlp.c_fc
  fix: one of these, by its last parts or in full"""),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_targets_that_name_nothing_to_adapt_are_refused(name):
    targets, options, text = REFUSED[name]
    assert error_text(lora.init, lora.Config(targets, **options), PARAMS, of=gpt2.theirs) == text


def test_experts_are_no_matrix():
    params = mixtral.init(mixtral.Config(8, 4, 4, 1, 2, 2, num_local_experts=2))
    text = error_text(lora.init, lora.Config(["w1"]), params, of=mixtral.theirs)
    assert "params['h'][0]['experts']['gate'] is a target and no matrix: it is a stack of matrices" in text


def test_options_out_of_range_are_listed():
    text = error_text(lora.Config, [], rank=0, alpha=math.inf, dropout=1.0, ranks={"(": 0}, exclude="[")
    assert text.startswith("7 problems\nlora.Config: targets is empty")
    for part in ("rank=0", "ranks['(']=0", "alpha=inf", "dropout=1.0", "ranks['('] is no regular expression",
                 "exclude='[' is no regular expression"):  # fmt: skip
        assert f"lora.Config: {part}" in text


def placed_pair():
    cfg = lora.Config(["c_attn"], rank=2)
    made = lora.init(cfg, PARAMS, of=gpt2.theirs)
    return cfg, *(fs.device_get(fs.materialize(x, P(), ONE, key=fs.key(0))) for x in (PARAMS, made))


def test_adapters_of_another_tree_or_config_are_refused():
    cfg, params, made = placed_pair()
    own = made["h.0.qkv.w"]
    wrong = {"h.9.qkv.w": own, "h.0.ln_1.w": own, "h.1.qkv.w": {"a": own["a"]}, "wte": 3,
             "h.0.qkv.w": {**own, "b": torch.ones(3)}}  # fmt: skip
    text = error_text(lora.apply, cfg, params, wrong, of=gpt2.theirs)
    for part in (
        "5 problems",
        "adapters['h.9.qkv.w']: params has no leaf 'h.9.qkv.w'\n  near  h.1.qkv.w, h.0.qkv.w",
        "adapters['h.0.ln_1.w']: cfg does not adapt this leaf",
        "has ['a'], not ['a', 'b']",
        "adapters['h.0.qkv.w']['b'] is [3], of a leaf [4, 3, 2, 2]",
        "adapters['wte'] must be a dict",
    ):
        assert part in text  # fmt: skip
    other = lora.Config(["c_attn"], rank=3)  # would be scaled by another s
    assert error_text(lora.apply, other, params, made, of=gpt2.theirs).startswith(
        "2 problems\nlora.apply: adapters['h.0.qkv.w']['a'] is [4, 2], of a leaf [4, 3, 2, 2], and of rank 3"
    )
    assert "and of rank 3" in error_text(lora.merge, other, params, made, of=gpt2.theirs)
    for verb in (lora.apply, lora.merge):
        text = error_text(verb, cfg, params, {"h.1.qkv.w": own}, of=gpt2.theirs)
        assert text.startswith(f"lora.{verb.__name__}: adapters['h.0.qkv.w'] is missing")
        text = error_text(verb, cfg, params, lora.init(cfg, PARAMS, of=gpt2.theirs), of=gpt2.theirs)
        assert text.startswith(f"lora.{verb.__name__}: adapters['h.0.qkv.w'] must be a dict of Tensor")
        assert "the same for adapters['h.1.qkv.w']" in text
    both = {"a": {"b": torch.ones(2, 2)}, "a.b": torch.ones(2, 2)}
    assert "have one dotted path, 'a.b'" in error_text(lora.init, lora.Config(["a.b"]), both)


def test_names_are_matched_once_for_a_structure_not_in_every_step():
    asked = []

    def of(path):
        asked.append(path)
        return gpt2.theirs(path)

    cfg, params, made = placed_pair()
    for _ in range(3):
        adapted = lora.apply(cfg, params, made, of=of)
    assert len(asked) == len(fs.tree.leaves(params))
    assert adapted["h"][1]["qkv"]["w"].rank == 2
    ranks = {"c_attn": 3}
    other = lora.Config(["c_attn"], ranks=ranks)
    ranks["c_attn"] = 5  # the config has a copy
    assert lora.init(other, PARAMS, of=of)["h.0.qkv.w"]["a"].shape == (4, 3)


def test_specs_that_do_not_fit_the_base_are_refused():
    cfg, params, made = placed_pair()
    mesh, specs = fs.make_mesh(model=2), gpt2.specs(CFG, model="model")
    wrong = {name: {"a": P("model"), "b": P()} for name in made}

    def run(p, own):
        lora.apply(cfg, p, own, of=gpt2.theirs, specs=specs, adapter_specs=wrong, model="model")

    step = fs.shard_map(run, mesh=mesh, in_specs=(specs, wrong), out_specs=P())
    text = error_text(step, params, made)
    assert "adapters['h.0.qkv.w']['a'] has dim 0 over ('model',), and its base that dim over None" in text
    assert "lora.specs: specs" in error_text(lora.specs, cfg, PARAMS, None, of=gpt2.theirs)


def test_uses_of_an_adapted_leaf_as_a_tensor_are_refused():
    cfg, params, made = placed_pair()
    w = lora.apply(cfg, params, made, of=gpt2.theirs)["h"][0]["qkv"]["w"]
    x = torch.ones(2, 4)
    uses = {
        "matmul": lambda: x @ w,
        "linear": lambda: torch.nn.functional.linear(x, w),
        "[]": lambda: w[0],
        "cat": lambda: torch.cat([w, w]),
        "transpose": lambda: w.transpose(0, 1),
        "embedding": lambda: fs.nn.embedding(torch.tensor([0]), w.flatten(1)),
    }
    for operation, use in uses.items():
        assert error_text(use).startswith(f"{operation}: LoraWeight[4, "), operation
    with pytest.raises(AttributeError, match=r"\.sum: LoraWeight\[4, 3, 2, 2\] is not a tensor"):
        _ = w.sum
    assert error_text(w.flatten).startswith("flatten: dims 0 to 3 of [4, 3, 2, 2] are inputs and outputs")
    assert error_text(fs.nn.linear, x, w).startswith("linear: w is LoraWeight(f32[4, 3, 2, 2], rank=2)")
    table = lora.apply(lora.Config(["wpe"], rank=2), params, {"wpe": {"a": torch.ones(4, 2), "b": torch.ones(2, 4)}},
                       of=gpt2.theirs)["wpe"]  # fmt: skip
    assert torch.equal(table.transpose(0, 1), params["wpe"].T)  # a tied head, which PEFT does not adapt


# --- the tree -------------------------------------------------------------------------------------------------


def test_a_weight_is_a_node_whose_leaves_are_its_tensors():
    cfg, params, made = placed_pair()
    t = lora.apply(cfg, params, made, of=gpt2.theirs)
    paths = [fs.tree.dotted(path) for path, _ in fs.tree.leaves_with_path(t["h"][0]["qkv"])]
    assert paths == ["b", "w.base", "w.a", "w.b"]
    again = fs.tree.map(lambda x: x, t)
    assert fs.tree.structure(again) == fs.tree.structure(t)
    other = lora.apply(cfg, params, made, of=gpt2.theirs, weight=2.0)
    assert fs.tree.structure(other) != fs.tree.structure(t)
    leaves, treedef = [], None
    treedef = fs.tree._flatten_traced(t, leaves)
    assert all(x is y for x, y in zip(leaves, fs.tree.leaves(t), strict=True))
    assert fs.tree.structure(fs.tree._unflatten_traced(treedef, iter(leaves))) == fs.tree.structure(t)


def test_scan_refuses_stacked_adapters():
    w = lora.apply(lora.Config(["w"], rank=1), {"w": torch.ones(3, 3)},
                   {"w": {"a": torch.ones(3, 1), "b": torch.ones(1, 3)}})  # fmt: skip
    assert "pass a list of trees" in error_text(fs.scan, lambda p, x: x, w, torch.ones(3), specs=P(), axis=None)


@pytest.mark.parametrize("remat", [False, True])
def test_a_frozen_base_has_no_gradient_and_no_transfer_of_one(remat):
    cfg = lora.Config(["c_attn"], rank=2)
    mesh, specs = fs.make_mesh(data=2), fs.fully_shard(gpt2.specs(CFG), PARAMS, axis="data")
    made = lora.init(cfg, PARAMS, of=gpt2.theirs)
    params = fs.materialize(PARAMS, specs, mesh, key=fs.key(0))
    own = fs.materialize(made, P(), mesh, key=fs.key(0))
    layout = gpt2.Layout("data")

    @fs.shard_map(mesh=mesh, in_specs=(specs, P(), P("data")), out_specs=P())
    def step(p, own, ids):
        def loss(own):
            t = lora.apply(cfg, p, own, of=gpt2.theirs, specs=specs, adapter_specs=P())
            return gpt2.loss(CFG, t, ids, ids, layout=layout, specs=specs, remat=remat)

        grads = fs.grad(loss)(own)
        assert not any(x.requires_grad or x.grad is not None for x in fs.tree.leaves(p))
        return grads

    ids = torch.arange(16).reshape(4, 4) % 8
    step(params, own, ids)
    with fs.recording() as log:
        step(params, own, ids)
    assert {t.op for t in log} == {"all_gather", "all_reduce"}  # no reduce_scatter: none of the base's gradients
    reduced = sum(t.bytes for t in log if t.op == "all_reduce") // mesh.size
    loss = 2 * 4  # the sum of the losses, and their number
    assert reduced == sum(4 * x.numel() for x in fs.tree.leaves(made)) + loss
