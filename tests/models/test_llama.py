"""Llama equals transformers' in logits, gradients, generation and files, leaf by leaf, on every mesh."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import fshard as fs
from fshard import P, ShardingError
from fshard.models import llama
from tests.lib import model_cases as cases
from tests.nn.test_rope import LLAMA3, LONG, SHORT

TINY = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 29, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 64}  # fmt: skip

SHALLOW = {"num_hidden_layers": 1}

# name: what differs from TINY
CONFIGS = {
    "grouped": {},  # 3 groups, 29 hidden units, 37 tokens: none of them even
    "one group": {"num_key_value_heads": 1, **SHALLOW},  # some ranks have no heads
    "each its own": {"num_attention_heads": 4, "num_key_value_heads": None, "tie_word_embeddings": True, **SHALLOW},
    "biased": {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-2, **SHALLOW},
    "wide heads": {"head_dim": 10, "tie_word_embeddings": True, **SHALLOW},
}
PARTS = {"long_factor": LONG[:4], "short_factor": SHORT[:4]}
# Of sequences of 9, and from 5 to 10 in generation: those that depend on the length are crossed on the way.
ROPES = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "dynamic, not yet": {"rope_type": "dynamic", "factor": 2.5},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {"rope_type": "longrope", **PARTS, "factor": 4.0, "original_max_position_embeddings": 7},
    "longrope, short": {"rope_type": "longrope", **PARTS, "factor": 4.0, "original_max_position_embeddings": 10},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "proportional": {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.6},
}  # fmt: skip


def hugging_face(changes, seed=0):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**{**TINY, **changes}, initializer_range=0.2, bos_token_id=None,
                                      eos_token_id=None)  # fmt: skip
    return cases.awake(transformers.LlamaForCausalLM(config))


def scaled(name):
    rope = {**ROPES[name], "rope_theta": 100.0}
    longest = {"dynamic": 6, "dynamic, not yet": 10}.get(name, 64)
    return hugging_face({**SHALLOW, "head_dim": 8, "rope_parameters": rope, "max_position_embeddings": longest})


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        *(("grouped", layout) for layout in ("one device", "data", "model", "both, fully sharded, sequence", "uneven")),
        *(("one group", layout) for layout in ("both", "model, sequence")),
        *(("each its own", layout) for layout in ("one device", "data, fully sharded", "model")),
        *(("biased", layout) for layout in ("one device", "both", "both, fully sharded, sequence")),
        *(("wide heads", layout) for layout in ("one device", "model, sequence")),
    ],
)
def test_equals_transformers(config, layout, tmp_path):
    cases.check_logits_loss_and_gradients(llama, hugging_face(CONFIGS[config]), layout, tmp_path)


@pytest.mark.parametrize("name", ROPES)
def test_every_rope_type_equals_transformers(name, tmp_path):
    cases.check_logits_loss_and_gradients(llama, scaled(name), "model, sequence", tmp_path)


@pytest.mark.parametrize(("config", "layout"), [("grouped", "one device"), ("biased", "model, sequence"),
                                                ("each its own", "both, fully sharded, sequence")])  # fmt: skip
def test_padded_prompts_have_the_logits_of_transformers(config, layout, tmp_path):
    cases.check_padded_logits(llama, hugging_face(CONFIGS[config]), layout, tmp_path)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_padding_does_not_count_as_length(name, tmp_path):
    cases.check_padded_logits(llama, scaled(name), "both", tmp_path)


@pytest.mark.parametrize(
    ("config", "layout", "padded", "eos"),
    [
        ("grouped", "one device", True, 25),
        ("grouped", "both, fully sharded, sequence", True, 25),
        ("one group", "model", False, None),
        ("each its own", "data", True, None),
    ],
)
def test_greedy_generation_is_transformers(config, layout, padded, eos, tmp_path):
    cases.check_generation(llama, hugging_face(CONFIGS[config]), layout, tmp_path, padded=padded, eos=eos)


@pytest.mark.parametrize(("layout", "padded"), [("one device", False), ("both", True)])
@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_greedy_generation_is_transformers_where_angles_change_on_the_way(name, layout, padded, tmp_path):
    cases.check_generation(llama, scaled(name), layout, tmp_path, new=5, padded=padded)


@pytest.mark.parametrize(("config", "layout"), [("grouped", "uneven"), ("each its own", "both"),
                                                ("biased", "both, fully sharded, sequence")])  # fmt: skip
def test_files_go_both_ways(config, layout, tmp_path):
    transformers = pytest.importorskip("transformers")
    cases.check_files(llama, hugging_face(CONFIGS[config]), layout, tmp_path, transformers.LlamaForCausalLM)


@pytest.mark.parametrize("name", ROPES)
def test_configs_go_both_ways(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    cases.check_files(llama, scaled(name), "one device", tmp_path, transformers.LlamaForCausalLM)


def test_files_of_older_versions_are_read(tmp_path):
    theirs = hugging_face({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}})
    folder = cases.saved(theirs, tmp_path)
    new, _ = llama.load(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"], config["head_dim"]
    old = {**config, "rope_theta": 77.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "pretraining_tp": 1}
    (folder / "config.json").write_text(json.dumps(old))
    tensors = load_file(folder / "model.safetensors")
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in range(2)}
    save_file({**tensors, **buffers}, folder / "model.safetensors", metadata={"format": "pt"})
    cfg, params = llama.load(folder)
    assert cfg.rope_parameters == new.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}
    assert (cfg.width, cfg.groups) == (4, 3)
    ids = cases.tokens(37)
    cases.close(cases.logits(llama, cfg, params, "one device", ids), theirs(ids).logits.detach(), 1e-5, 1e-5)


DROPS = llama.Config(**{**TINY, "attention_dropout": 0.3})  # 3 groups of 2 over 2 ranks: 4 heads and 2


@pytest.mark.parametrize(("layout", "remat"), [("model", False), ("both, fully sharded, sequence", True),
                                               ("uneven", False)])  # fmt: skip
def test_the_mesh_never_changes_the_answer(layout, remat):
    cases.check_the_mesh_never_changes_the_answer(llama, DROPS, layout, remat=remat)


def test_dropout_does_something_and_padding_is_not_seen_through_it():
    ids, mask = cases.tokens(37), cases.left_padding(6, 9)
    described = llama.init(DROPS)
    args = (llama, DROPS, described, "model", ids, ids.roll(-1, 1))
    assert cases.loss_and_grads(*args)[0] != cases.loss_and_grads(*args, key=fs.key(0))[0]
    mesh, specs, layout, p = cases.placed(llama, DROPS, described, "model")
    run = fs.shard_map(lambda p, ids, m: llama.apply(DROPS, p, ids, layout=layout, key=fs.key(0), mask=m), mesh=mesh,
                       in_specs=(specs, P(), P()), out_specs=P(None, None, "model"))  # fmt: skip
    seen = mask.bool()
    other = ids.where(seen, (ids + 1) % 37)
    a, b = (fs.device_get(run(p, x, mask)) for x in (ids, other))
    torch.testing.assert_close(a[seen], b[seen], rtol=0, atol=0)


def test_values_do_not_depend_on_the_mesh_and_follow_the_formulas():
    cfg = llama.Config(**{**TINY, "hidden_size": 96, "attention_bias": True, "mlp_bias": True})
    want = fs.device_get(cases.placed(llama, cfg, llama.init(cfg), "one device")[-1])
    got = fs.device_get(cases.placed(llama, cfg, llama.init(cfg), "both, fully sharded, sequence")[-1])
    for (path, a), b in zip(fs.tree.leaves_with_path(got), fs.tree.leaves(want), strict=True):
        assert torch.equal(a, b), path
        if path[-1] == "b":
            assert (a == 0).all()
        elif "norm" in fs.tree.dotted(path):
            assert (a == 1).all()
        else:
            assert abs(float(a.std()) - 0.02) < 0.002, path
            assert abs(float(a.mean())) < 0.002, path


def test_what_is_no_llama_is_refused(tmp_path):
    theirs = hugging_face({"tie_word_embeddings": True})
    folder = cases.saved(theirs, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mistral"}))
    with pytest.raises(ShardingError) as e:
        llama.load(folder)
    assert str(e.value).startswith(f"{folder / 'config.json'}: not a supported llama\n  model_type: 'mistral'")
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(ShardingError) as e:
        llama.load(folder)
    assert "'lm_head.weight' is missing" in str(e.value)
    assert "params['head']" in str(e.value)


REFUSED = [
    ({"hidden_size": 10, "num_attention_heads": 4, "num_key_value_heads": 3, "head_dim": 4}, """\
2 problems
llama.Config: the heads must divide the width
  10 % 4 = 2
llama.Config: the groups must divide the heads
  4 % 3 = 1"""),
    ({"hidden_act": "gelu"}, """\
llama.Config: hidden_act='gelu'
  fix: silu, the activation of Llama"""),
    ({"rope_parameters": {"rope_theta": 10.0, "partial_rotary_factor": 0.5}}, """\
llama.Config: Llama rotates all dims of a head
  rope_parameters  {'rope_theta': 10.0, 'partial_rotary_factor': 0.5}
  fix: leave out partial_rotary_factor"""),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 10.0}}, """\
rope: linear needs ['factor']
  parameters  {'rope_type': 'linear', 'rope_theta': 10.0}"""),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "text"), REFUSED)
def test_configs_that_are_no_llama_are_refused(changes, text):
    with pytest.raises(ShardingError) as e:
        llama.Config(**changes)
    assert str(e.value) == text
