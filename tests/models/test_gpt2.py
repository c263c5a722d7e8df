"""GPT-2's own errors: folders that it cannot load."""

from __future__ import annotations

import json

import pytest

from fshard import ShardingError
from fshard.models import gpt2
from tests.lib import model_cases as cases
from tests.lib.assertions import error_text


def test_a_folder_of_another_model_or_without_tensors_is_refused(tmp_path):
    with pytest.raises(ShardingError, match="there is no such file"):
        gpt2.load(tmp_path)
    cases.hugging_face("gpt2").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_layer": 3, "n_positions": 13}))
    text = error_text(gpt2.load, tmp_path)
    assert "'transformer.h.2.ln_1.weight' is missing" in text
    assert (
        "'transformer.wpe.weight' has another shape, for params['wpe']\n  got  [12, 24]    expected  [13, 24]" in text
    )
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    assert error_text(gpt2.load, tmp_path) == (
        f"{tmp_path}/config.json: not a supported gpt2\n  model_type: 'llama', not 'gpt2'\n"
        "  fix: use the model of its type, or fs.defer(lambda: AutoModel.from_config(config))"
    )
    (tmp_path / "config.json").write_text(json.dumps({**config, "scale_attn_by_inverse_layer_idx": True}))
    with pytest.raises(ShardingError, match="scale_attn_by_inverse_layer_idx: True, not False"):
        gpt2.load(tmp_path)
