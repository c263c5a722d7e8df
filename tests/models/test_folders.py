"""Folders of decoders: files of older versions are read, those of other models or sizes are refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import fshard as fs
from fshard.models import gpt2, heads
from tests.lib import model_cases as cases
from tests.lib.assertions import error_text
from tests.lib.model_cases import DECODERS

transformers = pytest.importorskip("transformers")


def changed(folder, config, tensors=None):
    """Change keys of config.json in a folder, remove keys that are None there, and add tensors."""
    old = json.loads((folder / "config.json").read_text()) | config
    kept = {key: x for key, x in old.items() if config.get(key, x) is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    if tensors:
        both = {**load_file(folder / "model.safetensors"), **tensors}
        save_file(both, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


LINEAR = {"rope_type": "linear", "factor": 4.0}
# model: (options of transformers, changes of config.json, buffers that older versions wrote, fields of our Config)
OLD = {
    "gptj": (
        {}, {},
        {"transformer.h.0.attn.bias": torch.ones(1, 1, 12, 12, dtype=torch.bool),
         "transformer.h.0.attn.masked_bias": torch.tensor(-1e9)},
        {},
    ),
    "gpt_neox": (
        {},
        {"rope_parameters": None, "attention_bias": None, "rotary_pct": 1.0, "rotary_emb_base": 300,
         "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
         "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
         "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(4)},
        {"rope_parameters": {**LINEAR, "rope_theta": 300, "partial_rotary_factor": 1}},
    ),
    "llama": (
        {"rope_parameters": {**LINEAR, "rope_theta": 77.0}},
        {"rope_parameters": None, "head_dim": None, "rope_theta": 77.0, "pretraining_tp": 1,
         "rope_scaling": {"type": "linear", "factor": 4.0}},
        {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in range(2)},
        {"rope_parameters": {**LINEAR, "rope_theta": 77.0}, "width": 4, "groups": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", OLD)
def test_configs_and_buffers_of_older_versions_are_read(model, tmp_path):
    options, config, buffers, fields = OLD[model]
    theirs, module = cases.hugging_face(model, **options), DECODERS[model].module
    cfg, params = module.load(changed(cases.saved(theirs, tmp_path), config, buffers))
    assert {name: getattr(cfg, name) for name in fields} == fields
    again, ids = type(theirs).from_pretrained(tmp_path).eval(), cases.tokens(cfg.vocab_size)
    with torch.no_grad():
        cases.close(cases.logits(module, cfg, params, "one device", ids), again(ids).logits, 1e-5, 1e-5)


def test_config_is_read_from_a_file_under_any_name(tmp_path):
    contents = {"model_type": "gpt2", "n_layer": 3, "architectures": ["GPT2ForSequenceClassification"]}
    (tmp_path / "step.json").write_text(json.dumps(contents))
    assert gpt2.config(tmp_path / "step.json") == heads.config(tmp_path / "step.json").base
    assert gpt2.config(tmp_path / "step.json").n_layer == 3
    (tmp_path / "step.json").write_text(json.dumps({**contents, "n_layer": "3"}))
    assert "/step.json: has values of the wrong kind" in error_text(gpt2.config, tmp_path / "step.json")


def test_untied_head_of_gpt2_is_read_and_written(tmp_path):
    theirs = cases.hugging_face("gpt2", tie_word_embeddings=False)
    with torch.no_grad():
        theirs.lm_head.weight.copy_(torch.randn_like(theirs.lm_head.weight))
    cfg, params = gpt2.load(cases.saved(theirs, tmp_path / "theirs"))
    assert not cfg.tie_word_embeddings
    mesh = fs.make_mesh(data=1)
    gpt2.save(tmp_path / "ours", cfg, fs.materialize(params, fs.P(), mesh, key=fs.key(0)), like=tmp_path / "theirs")
    again = type(theirs).from_pretrained(tmp_path / "ours").state_dict()
    assert again.keys() == theirs.state_dict().keys()
    assert all(torch.equal(x, again[name]) for name, x in theirs.state_dict().items())


@pytest.mark.parametrize(("model", "leaves"), [("gptj", {"b"}), ("gpt_neox", set())])
def test_head_in_the_file_is_not_read_if_the_config_ties_it(model, leaves, tmp_path):
    folder = changed(cases.saved(cases.hugging_face(model), tmp_path), {"tie_word_embeddings": True})
    assert set(DECODERS[model].module.load(folder)[1].get("head", ())) == leaves


REFUSED = [  # (model, changes of config.json, texts of the error)
    ("gpt2", {"n_layer": 3, "n_positions": 13},
     ["'transformer.h.2.ln_1.weight' is missing",
      "'transformer.wpe.weight' has another shape, for params['wpe']\n  got  [12, 24]    expected  [13, 24]"]),
    ("gpt2", {"tie_word_embeddings": False}, ["'lm_head.weight' is missing", "params['head']"]),
    ("gpt2", {"model_type": "llama"},
     [("/config.json: not a supported gpt2\n  model_type: 'llama', not 'gpt2'\n"
       "  fix: use the model of its type, or fs.defer(lambda: AutoModel.from_config(config))")]),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx: True, not False"]),
    ("gptj", {"model_type": "gpt_neo"}, ["not a supported gptj\n  model_type: 'gpt_neo', not 'gptj'\n  fix: "]),
    ("gptj", {"n_inner": 35}, ["'transformer.h.0.mlp.fc_in.weight' has another shape"]),
    ("gpt_neox", {"model_type": "gptj"}, ["not a supported gpt_neox\n  model_type: 'gptj', not 'gpt_neox'"]),
    ("gpt_neox", {"intermediate_size": 35, "attention_bias": False},
     ["'gpt_neox.layers.0.mlp.dense_h_to_4h.weight' has another shape",
      "'gpt_neox.layers.0.attention.dense.bias' is not part of this model"]),
    ("llama", {"model_type": "mistral"}, ["/config.json: not a supported llama\n  model_type: 'mistral'"]),
    ("llama", {"tie_word_embeddings": False}, ["'lm_head.weight' is missing", "params['head']"]),
    ("mistral", {"layer_types": ["full_attention"] * 2}, ["layer_types: ['full_attention', 'full_attention'], not"]),
    ("qwen2", {"use_mrope": True}, ["use_mrope: True, not"]),
    ("mixtral", {"router_jitter_noise": 0.1}, ["router_jitter_noise: 0.1, not 0.0"]),
    ("mixtral", {"model_type": "qwen3_moe"}, ["model_type: 'qwen3_moe', not 'mixtral'"]),
    ("mixtral", {"num_local_experts": 4}, ["experts.4.w1.weight' is not part of this model"]),
    ("mixtral", {"num_local_experts": 6}, ["experts.5.w1.weight' is missing"]),
    ("mixtral", {"num_experts_per_tok": 9}, ["9 experts per token, of 5\n  fix: num_experts_per_tok of 1 to 5"]),
]  # fmt: skip


@pytest.mark.parametrize(("model", "config", "texts"), REFUSED)
def test_folders_of_other_models_or_sizes_are_refused(model, config, texts, tmp_path):
    theirs = cases.hugging_face(model, tie_word_embeddings=model in ("gpt2", "llama"))
    text = error_text(DECODERS[model].module.load, changed(cases.saved(theirs, tmp_path), config))
    for part in texts:
        assert part in text
