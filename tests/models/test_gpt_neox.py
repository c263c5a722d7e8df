"""GPT-NeoX's own properties: configs and files of older versions, defaults of rotary positions, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from fshard import ShardingError
from fshard.models import gpt_neox
from tests.lib import model_cases as cases
from tests.lib.assertions import error_text
from tests.lib.model_cases import DECODERS

transformers = pytest.importorskip("transformers")


def test_configs_and_buffers_of_older_versions_are_read(tmp_path):
    folder = cases.saved(cases.hugging_face("gpt_neox"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for new in ("rope_parameters", "attention_bias"):
        del config[new]
    old = {"rotary_pct": 1.0, "rotary_emb_base": 300, "rope_scaling": {"type": "linear", "factor": 4.0}}
    (folder / "config.json").write_text(json.dumps({**config, **old}))
    tensors = load_file(folder / "model.safetensors")
    tensors["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    tensors["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    tensors["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    cfg, params = gpt_neox.load(folder)
    assert cfg.rope_parameters == {"rope_type": "linear", "factor": 4.0, "rope_theta": 300, "partial_rotary_factor": 1}
    theirs, ids = transformers.GPTNeoXForCausalLM.from_pretrained(folder).eval(), cases.tokens(61)
    with torch.no_grad():
        cases.close(cases.logits(gpt_neox, cfg, params, "one device", ids), theirs(ids).logits, 1e-5, 1e-5)
    (folder / "config.json").write_text(json.dumps({**config, **old, "tie_word_embeddings": True}))
    assert "head" not in gpt_neox.load(folder)[1]  # although the file has one


def test_defaults_of_rope_parameters_are_those_of_transformers():
    assert gpt_neox.Config().rope_parameters == transformers.GPTNeoXConfig().rope_parameters
    linear = {"rope_type": "linear", "factor": 2.0}
    assert gpt_neox.Config(rope_parameters=linear).rope_parameters == {
        **transformers.GPTNeoXConfig().rope_parameters, **linear,
    }  # fmt: skip


def test_another_model_or_other_sizes_are_refused(tmp_path):
    folder = cases.saved(cases.hugging_face("gpt_neox"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gptj"}))
    with pytest.raises(ShardingError, match="not a supported gpt_neox\n  model_type: 'gptj', not 'gpt_neox'"):
        gpt_neox.load(folder)
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 35, "attention_bias": False}))
    text = error_text(gpt_neox.load, folder)
    assert "'gpt_neox.layers.0.mlp.dense_h_to_4h.weight' has another shape" in text
    assert "'gpt_neox.layers.0.attention.dense.bias' is not part of this model" in text
    with pytest.raises(ShardingError, match="cannot rotate 3 dims of a head in pairs"):
        DECODERS["gpt_neox"].config(rope_parameters={"partial_rotary_factor": 0.4})
    with pytest.raises(ShardingError, match="unknown rope_type 'spiral'"):
        DECODERS["gpt_neox"].config(rope_parameters={"rope_type": "spiral"})
