"""`fs.hf`: load and save by the model of the config's type, or a module's leaves by name."""

from __future__ import annotations

import json

import pytest

import fshard as fs
from fshard import P, ShardingError, hf
from fshard.models import bert, dots1, gpt2, gpt_neox, gptj, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, t5
from tests.lib import model_cases
from tests.lib.assertions import error_text

CONFIGS = {
    gpt2: gpt2.Config(31, 8, 16, 1, 4),
    gptj: gptj.Config(vocab_size=31, n_positions=8, n_embd=16, n_layer=1, n_head=4, rotary_dim=4),
    gpt_neox: gpt_neox.Config(31, 32, 1, 4, 24),
    llama: llama.Config(31, 16, 24, 1, 4, 2),
    bert: bert.Config(31, 16, 1, 2, 32),
    mistral: mistral.Config(31, 16, 24, 1, 4, 2, head_dim=4, sliding_window=3),
    qwen2: qwen2.Config(31, 16, 24, 1, 4, 2, use_sliding_window=True, layer_types=("sliding_attention",)),
    qwen3: qwen3.Config(31, 16, 24, 1, 4, 2),
    mixtral: mixtral.Config(31, 16, 24, 1, 4, 2, num_local_experts=3),
    qwen3_moe: qwen3_moe.Config(31, 16, 24, 2, 4, 2, num_experts=3, num_experts_per_tok=2, mlp_only_layers=(1,)),
    dots1: dots1.Config(31, 16, 24, 2, 4, 2, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1),
    t5: t5.Config("mt5", 31, 16, 5, 24, 1, 2, 3, tie_word_embeddings=False),
}


def full(tree, specs):
    return fs.device_get(fs.materialize(tree, specs, fs.make_mesh(data=2, model=2), key=fs.key(0)))


@pytest.mark.parametrize("model", CONFIGS, ids=lambda m: m.__name__.split(".")[-1])
def test_load_and_save_use_the_model_file_of_the_type(model, tmp_path):
    cfg = CONFIGS[model]
    split = lambda cfg: model.specs(cfg, model="model")  # noqa: E731
    mesh = fs.make_mesh(data=2, model=2)
    params = fs.materialize(model.init(cfg), split(cfg), mesh, key=fs.key(3))
    hf.save(tmp_path / "one", cfg, params, max_shard_bytes=4000)
    assert len(list((tmp_path / "one").glob("model-*-of-*.safetensors"))) > 1
    again, stored = hf.load(tmp_path / "one", split, mesh)
    assert again == cfg
    assert all(isinstance(leaf, fs.Deferred) for leaf in fs.tree.leaves(stored))
    model_cases.close(full(stored, split(cfg)), fs.device_get(params), 0, 0)


def test_load_lists_leaves_that_do_not_fit_the_mesh(tmp_path):
    cfg = CONFIGS[gpt2]
    gpt2.save(tmp_path, cfg, full(gpt2.init(cfg), P()))
    text = error_text(
        hf.load, tmp_path, {"wte": P("rows"), "wpe": P(), "h": P(), "ln_f": P(None, "model")}, fs.make_mesh(model=2)
    )
    assert text.startswith("2 problems\n")
    assert "load: params['wte']: the mesh has no axis 'rows'" in text
    assert "load: params['ln_f']['b']: the spec is longer than the shape" in text
    assert "\n  the same for params['ln_f']['w']\n" in text


def test_specs_without_a_mesh_are_refused(tmp_path):
    cfg = CONFIGS[gpt2]
    gpt2.save(tmp_path, cfg, full(gpt2.init(cfg), P()))
    for arguments in ({"specs": P()}, {"mesh": fs.make_mesh(model=2)}):
        with pytest.raises(ShardingError, match="specs and mesh are checked against each other"):
            hf.load(tmp_path, **arguments)


def test_type_without_a_model_file_is_refused_with_an_alternative(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert error_text(hf.load, tmp_path) == (
        f"{tmp_path}/config.json: there is no model file for 'mamba'\n"
        "  models  bert, dots1, gpt2, gpt_neox, gptj, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, resnet, t5\n"
        "  fix: apply, module = fs.defer(lambda: AutoModel.from_config(config)); hf.weights(path, module, of=apply)"
    )
    with pytest.raises(ShardingError, match=r"save: int is not a Config of fs\.models"):
        hf.save(tmp_path, 3, {})
