"""Folders of transformers' models: what `save_pretrained` writes `hf.weights` reads, and back, bitwise and on meshes.

transformers converts names and shapes between a module and its files. The classes of the default tier have one
conversion each; the slow ones are the others whose folders have other names than their modules.
"""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fshard as fs
from fshard import P
from tests.lib.assertions import assert_same, error_text

os.environ["HF_HUB_OFFLINE"] = "1"
hf = pytest.importorskip("transformers")

TEXT = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
        "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 4}
EXPERTS = {**GROUPED, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24,
          "image_size": 8, "patch_size": 4}  # fmt: skip
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
DETR = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 24,
        "decoder_attention_heads": 4, "decoder_ffn_dim": 24, "num_queries": 5, "use_timm_backbone": False,
        "use_pretrained_backbone": False, "backbone": None}  # fmt: skip
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}


def ids(batch: int = 4) -> dict[str, Any]:
    return {"input_ids": torch.randint(4, 60, (batch, 6), generator=torch.Generator().manual_seed(0))}


def pixels(size: int, batch: int = 4) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))}


# name -> class, config class, config, inputs; the number of tensors in a file of a leaf that has several
FAST = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 3}, ids()),  # experts
    "vit": ("ViTForImageClassification", "ViTConfig", {**VISION, "num_labels": 3}, pixels(8)),  # names
    "llava": ("LlavaForConditionalGeneration", "LlavaConfig",  # prefixes, and scopes of the parts
              {"text_config": {**GROUPED, "model_type": "llama"}, "image_token_index": 60, "vision_feature_layer": -1,
               "vision_config": {**VISION, "model_type": "clip_vision_model"}},
              {"input_ids": torch.cat([torch.full((4, 4), 60), ids()["input_ids"]], 1), **pixels(8)}),
}  # fmt: skip
SLOW = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**EXPERTS, "num_experts": 4}, ids()),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig",
                   {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 8, "linear_num_key_heads": 2,
                    "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
                    "layer_types": ["linear_attention", "full_attention"]}, ids()),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config",
                    {**TEXT, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
                     "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "q_lora_rank": 8,
                     "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4,
                     "first_k_dense_replace": 1}, ids()),
    "jamba": ("JambaForCausalLM", "JambaConfig",
              {**TEXT, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 4,
               "mamba_d_conv": 2, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
               "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False}, ids()),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", "Qwen2VLConfig",
                 {"text_config": {**GROUPED, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]}},
                  "vision_config": {"depth": 1, "embed_dim": 8, "num_heads": 2, "hidden_size": 16, "patch_size": 4,
                                    "spatial_merge_size": 2}, "image_token_id": 60, "video_token_id": 59,
                  "vision_start_token_id": 58, "vision_end_token_id": 57}, ids()),
    "vit_mae": ("ViTMAEForPreTraining", "ViTMAEConfig",
                {**VISION, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4,
                 "decoder_intermediate_size": 24},
                {**pixels(8), "noise": torch.rand(4, 4, generator=torch.Generator().manual_seed(1))}),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", {**VISION, "num_labels": 3, "mlp_ratio": 2},
               pixels(8)),
    "swin": ("SwinForImageClassification", "SwinConfig", {**SWIN, "num_labels": 3}, pixels(16)),
    "segformer": ("SegformerForSemanticSegmentation", "SegformerConfig",
                  {"num_attention_heads": [1, 2], "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [8, 16],
                   "sr_ratios": [2, 1], "patch_sizes": [3, 3], "strides": [2, 2], "mlp_ratios": [2, 2],
                   "decoder_hidden_size": 16}, pixels(16)),
    "detr": ("DetrForObjectDetection", "DetrConfig",
             {**DETR, "backbone_config": {**RESNET, "out_features": ["stage2"]}}, pixels(32)),
    "deformable_detr": ("DeformableDetrForObjectDetection", "DeformableDetrConfig",
                        {**DETR, "num_feature_levels": 2,
                         "backbone_config": {**RESNET, "out_features": ["stage1", "stage2"]}}, pixels(32)),
    "grounding_dino": ("GroundingDinoForObjectDetection", "GroundingDinoConfig",
                       {"backbone_config": {**SWIN, "model_type": "swin", "out_features": ["stage1", "stage2"]},
                        "text_config": {**TEXT, "model_type": "bert"}, "d_model": 32, "encoder_layers": 1,
                        "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
                        "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_queries": 5, "num_feature_levels": 2},
                       {**ids(), **pixels(16)}),
    "rt_detr": ("RTDetrForObjectDetection", "RTDetrConfig",
                {"d_model": 16, "encoder_hidden_dim": 16, "encoder_in_channels": [8, 16, 16],
                 "decoder_in_channels": [16, 16, 16], "encoder_attention_heads": 4, "decoder_attention_heads": 4,
                 "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "decoder_layers": 2, "num_queries": 5,
                 "use_timm_backbone": False, "backbone": None, "num_labels": 3,
                 "backbone_config": {"model_type": "rt_detr_resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16],
                                     "depths": [1, 1, 1, 1], "out_features": ["stage2", "stage3", "stage4"]}},
                pixels(64)),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**TEXT, "max_position_embeddings": 16}, ids()),
}  # fmt: skip
MODELS = FAST | SLOW


def construct(name: str) -> torch.nn.Module:
    model, config, sizes, _ = MODELS[name]
    return getattr(hf, model)(getattr(hf, config)(**sizes)).eval()


@functools.cache
def deferred(name: str) -> tuple[Any, Any]:
    return fs.defer(lambda: construct(name))


def randomized(module: torch.nn.Module) -> torch.nn.Module:
    """Fill a module with values that differ in every element, buffers too: none is what a constructor leaves."""
    gen = torch.Generator().manual_seed(0)
    stored = set(module.state_dict())
    with torch.no_grad():
        for x in module.parameters():
            x.copy_(torch.randn(x.shape, generator=gen) * 0.2)
        for name, x in module.named_buffers():
            if name in stored and x.is_floating_point():
                x.copy_(torch.rand(x.shape, generator=gen) + 0.5)
    return module


def saved(name: str, folder: Path) -> torch.nn.Module:
    theirs = randomized(construct(name))
    theirs.save_pretrained(folder)
    return theirs


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as f:
        return set(f.keys())


def placed(stored: Any, tree: Any, mesh: fs.mesh.Mesh) -> tuple[Any, Any]:
    specs = {"params": fs.fully_shard(P(), tree["params"], axis="data"), "buffers": P()}
    return fs.materialize(stored, specs, mesh, key=fs.key(0)), specs


def logits(apply: Any, values: Any, specs: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Return the logits of a batch that is split over two devices, from parameters that are too."""

    def run(values, inputs):
        params = fs.unshard(values["params"], specs["params"], "data", shapes=None)
        return apply(params, fs.unshard(values["buffers"], P(), "data"), **inputs).logits

    mapped = fs.shard_map(run, mesh=fs.make_mesh(data=2), in_specs=(specs, P("data")), out_specs=P("data"))
    with torch.no_grad():
        return fs.device_get(mapped(values, inputs))


def by_halves(theirs: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """Return the logits of each device's examples, one after the other: the same operations of the same sizes."""
    halves = [{n: x[i : i + 2] for n, x in inputs.items()} for i in (0, 2)]
    with torch.no_grad():
        return torch.cat([theirs(**half).logits for half in halves])


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_folder_is_read_and_written_as_transformers_does(name: str, tmp_path: Path) -> None:
    theirs, inputs = saved(name, tmp_path / "theirs"), MODELS[name][3]
    apply, tree = deferred(name)
    stored = fs.hf.weights(tmp_path / "theirs", tree, of=apply)
    values, specs = placed(stored, tree, fs.make_mesh(data=2))
    want = {n: x.detach() for n, x in theirs.state_dict().items() if n not in apply.ties}
    full = fs.device_get(values)
    got = {n: x for n, x in {**full["params"], **full["buffers"]}.items() if n not in apply.transient}
    assert_same(got, want)
    assert torch.equal(logits(apply, values, specs, inputs), by_halves(theirs, inputs))

    fs.hf.save(tmp_path / "ours", theirs.config.to_dict(), values, of=apply)
    assert names_in(tmp_path / "ours") == names_in(tmp_path / "theirs")
    again, info = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(again.eval()(**inputs).logits, theirs(**inputs).logits)
