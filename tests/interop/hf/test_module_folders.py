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


# name -> class, config class, config, inputs
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
                 "backbone_config": {"model_type": "rt_detr_resnet", "embedding_size": 8, "depths": [1, 1, 1, 1],
                                     "hidden_sizes": [8, 8, 16, 16], "out_features": ["stage2", "stage3", "stage4"]}},
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

    mapped = fs.shard_map(run, mesh=fs.make_mesh(data=2), in_specs=(specs, P("data")), out_specs=P("data"),
                          check="never")  # fmt: skip
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
    # The leaves are equal to the last bit. The kernels of convolutions sum in an order that depends on the addresses of
    # their operands, also where transformers runs twice on copies of the weights: 1.2e-7 in logits of 0.7.
    torch.testing.assert_close(logits(apply, values, specs, inputs), by_halves(theirs, inputs), rtol=1e-5, atol=1e-6)

    fs.hf.save(tmp_path / "ours", theirs.config.to_dict(), values, of=apply)
    assert names_in(tmp_path / "ours") == names_in(tmp_path / "theirs")
    again, info = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(**inputs).logits, theirs(**inputs).logits, rtol=1e-5, atol=1e-6)
    assert_same({n: x.detach() for n, x in again.state_dict().items()}, dict(theirs.state_dict()))


GENERATE = ("mixtral", "llava", "qwen3_moe", "qwen3_next", "deepseek_v3", "jamba", "qwen2_vl", "gpt_neox")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "mixtral")) for n in GENERATE])
def test_saved_folder_generates_the_tokens_of_the_one_it_was_read_from(name: str, tmp_path: Path) -> None:
    theirs, prompts, new = randomized(construct(name)), ids()["input_ids"], 8
    mask = torch.ones_like(prompts)
    mask[0, :3] = mask[2, :1] = 0
    prompts = prompts.where(mask.bool(), 3)

    def greedy(model: Any) -> torch.Tensor:
        with torch.no_grad():
            out = model.generate(prompts, attention_mask=mask, max_new_tokens=new, do_sample=False)
        return torch.nn.functional.pad(out, (0, prompts.shape[1] + new - out.shape[1]), value=3)

    theirs.generation_config.eos_token_id = None
    free = greedy(theirs)
    theirs.generation_config.eos_token_id = [int(free[0, -4]), int(free[1, -6])]  # and not that of config.json
    want = greedy(theirs)
    assert not torch.equal(want, free)
    theirs.save_pretrained(tmp_path / "theirs")
    apply, tree = deferred(name)
    mesh = fs.make_mesh(data=2, model=2)
    values, specs = placed(fs.hf.weights(tmp_path / "theirs", tree, of=apply), tree, mesh)
    fs.hf.save(tmp_path / "ours", theirs.config.to_dict(), values, of=apply, like=tmp_path / "theirs")
    assert torch.equal(greedy(type(theirs).from_pretrained(tmp_path / "ours").eval()), want)

    def run(values: Any, prompts: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        params = fs.unshard(values["params"], specs["params"], "data", shapes=tree["params"])
        return fs.hf.generate(apply, params, fs.unshard(values["buffers"], P(), "data"), prompts, mask=mask, new=new,
                              data="data", **fs.hf.generation_options(tmp_path / "ours"))  # fmt: skip

    mapped = fs.shard_map(run, mesh=mesh, in_specs=(specs, P("data"), P("data")), out_specs=P("data"), check="never")
    assert torch.equal(fs.device_get(mapped(values, prompts, mask)), want)


# --- parts of a leaf in several tensors -----------------------------------------------------------------------


def test_each_rank_reads_only_the_bytes_of_its_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("mixtral", tmp_path)
    apply, tree = deferred("mixtral")
    leaf = fs.hf.weights(tmp_path, tree, of=apply)["params"]["model.layers.1.mlp.experts.gate_up_proj"]
    assert repr(leaf) == ("f32[3, 48, 16] = stored(model.safetensors: "
                          "model.layers.1.block_sparse_moe.experts.0.w1.weight and 5 more)")  # fmt: skip
    reads = []
    preadv = os.preadv

    def counted(fd: int, buffers: Any, offset: int) -> int:
        reads.append(preadv(fd, buffers, offset))
        return reads[-1]

    monkeypatch.setattr(os, "preadv", counted)
    box = (slice(1, 2), slice(20, 30), slice(0, 16))  # of gate and up of one expert
    got = leaf.init.fill(fs.key(0), leaf.shape, box, torch.float32, torch.device("cpu"))
    assert sum(reads) == got.nbytes == 4 * 10 * 16
    file = load_file(tmp_path / "model.safetensors")
    gate, up = (file[f"model.layers.1.block_sparse_moe.experts.1.{w}.weight"] for w in ("w1", "w3"))
    assert torch.equal(got[0], torch.cat([gate, up])[20:30])


def changed(folder: Path, change: Any) -> Path:
    """Change the tensors of a folder's file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


EXPERT = "model.layers.0.block_sparse_moe.experts.1.w2.weight"


def test_expert_that_is_missing_or_of_another_shape_or_dtype_is_an_error(tmp_path: Path) -> None:
    saved("mixtral", tmp_path)
    apply, tree = deferred("mixtral")
    file = load_file(tmp_path / "model.safetensors")
    label = "tree['params']['model.layers.0.mlp.experts.down_proj']"

    def text(value: torch.Tensor | None) -> str:
        save_file({n: x for n, x in file.items() if n != EXPERT} | ({} if value is None else {EXPERT: value}),
                  tmp_path / "model.safetensors")  # fmt: skip
        return error_text(fs.hf.weights, tmp_path, tree, of=apply)

    others = [EXPERT.replace("experts.1", f"experts.{i}") for i in (0, 2)]
    assert text(None) == (
        f"{tmp_path}: 2 tensors, {others[0]!r} to {others[1]!r}, make another shape, for {label}\n"
        "  got  [2, 16, 24]    expected  [3, 16, 24]"
    )
    assert f"{tmp_path}: transformers cannot convert " in text(torch.zeros(16, 23))
    assert "has a dtype of another kind" in text(torch.zeros(16, 24, dtype=torch.int32))
    assert text(torch.zeros(16, 24, dtype=torch.float16)) == (
        f"{tmp_path}: the tensors of {label} have different dtypes\n  f32[16, 24]  {others[0]}\n  f16[16, 24]  {EXPERT}"
    )


def test_sharded_folders_have_an_index_and_are_the_same_bytes_from_every_mesh(tmp_path: Path) -> None:
    theirs = randomized(construct("mixtral")).bfloat16()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=2000)
    apply, tree = deferred("mixtral")
    stored, params = fs.hf.weights(tmp_path / "theirs", tree, of=apply), tree["params"]
    both = fs.fully_shard(fs.fully_shard(P(), params, axis="model"), params, axis="data")
    for name, sizes, specs in (("ours", {"data": 2, "model": 2}, both), ("whole", {"data": 1}, P()),
                               ("uneven", {"data": 5}, fs.fully_shard(P(), params, axis="data"))):  # fmt: skip
        values = fs.materialize(stored, {"params": specs, "buffers": P()}, fs.make_mesh(**sizes), key=fs.key(0))
        fs.hf.save(tmp_path / name, theirs.config.to_dict(), values, of=apply, max_shard_bytes=2000)
    ours = {f.name: f.read_bytes() for f in (tmp_path / "ours").iterdir()}
    assert len(ours) > 10
    for name in ("whole", "uneven"):
        assert {f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} == ours
    indexes = [json.loads((tmp_path / n / "model.safetensors.index.json").read_text()) for n in ("theirs", "ours")]
    assert indexes[0]["weight_map"].keys() == indexes[1]["weight_map"].keys()
    again = type(theirs).from_pretrained(tmp_path / "ours")  # in bfloat16: its angles, which no file has, are float32
    assert_same({n: x.detach() for n, x in again.state_dict().items()}, dict(theirs.state_dict()))


def test_conversion_that_is_not_read_back_exactly_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import core_model_loading as loading

    apply, tree = deferred("mixtral")
    values, _ = placed(tree, tree, fs.make_mesh(data=2))
    revert = loading.revert_weight_conversion
    one, other = EXPERT, EXPERT.replace("experts.1", "experts.2")

    def swapped(model: Any, leaves: Any) -> Any:
        files = revert(model, leaves)
        return files | {one: files[other], other: files[one]}

    monkeypatch.setattr(loading, "revert_weight_conversion", swapped)
    assert error_text(fs.hf.save, tmp_path / "out", {}, values, of=apply) == (
        "MixtralForCausalLM: transformers cannot read what its conversion writes\n"
        "  'model.layers.0.mlp.experts.down_proj' of the module is not the same when its file is read again"
    )
    assert not (tmp_path / "out").exists()


# --- ties, buffers, heads, adapters ---------------------------------------------------------------------------

BERT = {**TEXT, "max_position_embeddings": 12, "type_vocab_size": 2}


def bert(kind: str, **options: Any) -> torch.nn.Module:
    return getattr(hf, f"Bert{kind}")(hf.BertConfig(**BERT, **options)).eval()


@functools.cache
def their_bert(kind: str) -> torch.nn.Module:
    return randomized(bert(kind))


@functools.cache
def deferred_bert(kind: str) -> tuple[Any, Any]:
    return fs.defer(lambda: bert(kind))


def test_tie_that_stands_twice_in_a_file_is_read_if_both_are_equal(tmp_path: Path) -> None:
    theirs = their_bert("ForMaskedLM")
    theirs.save_pretrained(tmp_path)
    word, decoder = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
    changed(tmp_path, lambda t: t.update({decoder: t[word].clone()}))
    apply, tree = deferred_bert("ForMaskedLM")
    stored = fs.hf.weights(tmp_path, tree["params"], of=apply)
    mesh = fs.make_mesh(data=2)
    full = fs.device_get(fs.materialize(stored, P("data"), mesh, key=fs.key(0)))
    assert_same(full, {n: x.detach() for n, x in theirs.named_parameters()})
    changed(tmp_path, lambda t: t[decoder][60, 15].add_(1))
    stored = fs.hf.weights(tmp_path, tree["params"], of=apply)
    text = error_text(fs.materialize, stored, P("data"), mesh, key=fs.key(0))
    assert f"model.safetensors: {decoder!r} is not equal to {word!r}\n  they are tied" in text
    changed(tmp_path, lambda t: t.update({decoder: t[decoder][:60].clone()}))
    assert f"{decoder!r} has another shape" in error_text(fs.hf.weights, tmp_path, tree["params"], of=apply)


HEADS = {  # folder -> module: what the error must propose
    ("Model", "ForSequenceClassification"): "missing=('classifier.*',)",
    ("Model", "ForTokenClassification"): "missing=('classifier.*',), ignored=('pooler.*',)",
    ("Model", "ForQuestionAnswering"): "missing=('qa_outputs.*',), ignored=('pooler.*',)",
    ("ForMaskedLM", "ForSequenceClassification"): "missing=('classifier.*', 'bert.pooler.*'), ignored=('cls.*',)",
    ("ForMaskedLM", "Model"): "missing=('pooler.*',), ignored=('cls.*',)",
    ("ForSequenceClassification", "Model"): "ignored=('classifier.*',)",
}


@pytest.mark.parametrize("pair", HEADS, ids="-".join)
def test_folder_with_another_head_is_read_with_the_arguments_that_the_error_names(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    theirs = their_bert(pair[0])
    theirs.save_pretrained(tmp_path)
    apply, tree = deferred_bert(pair[1])
    text = error_text(fs.hf.weights, tmp_path, tree, of=apply)
    (arguments,) = re.findall(r"fix: if that is intended, hf\.weights\(\.\.\., (.*)\)$", text)
    assert arguments == HEADS[pair]
    stored = fs.hf.weights(tmp_path, tree, of=apply, **eval(f"dict({arguments})"))
    lacking = {n for n, leaf in stored["params"].items() if leaf is tree["params"][n]}
    prefix = re.compile(r"^bert\.")
    source = {prefix.sub("", n): x.detach() for n, x in theirs.named_parameters()}
    params = fs.device_get(fs.materialize(stored, P(), fs.make_mesh(data=1), key=fs.key(0)))["params"]
    assert lacking == {n for n in params if prefix.sub("", n) not in source}
    assert_same({n: x for n, x in params.items() if n not in lacking},
                {n: source[prefix.sub("", n)] for n in params if n not in lacking})  # fmt: skip


def _gptq(tensors: dict[str, torch.Tensor]) -> None:
    for name in [n for n in tensors if "attention" in n and n.endswith("dense.weight")]:
        del tensors[name]
        owner = name.removesuffix("weight")
        tensors |= {f"{owner}qweight": torch.zeros(4, 32, dtype=torch.int32), f"{owner}scales": torch.ones(1, 32)}


def _fp8(tensors: dict[str, torch.Tensor]) -> None:
    tensors |= {n: x.to(torch.float8_e4m3fn) for n, x in tensors.items() if n.endswith("dense.weight")}
    tensors |= {f"{n}_scale_inv": torch.ones(2, 2) for n in list(tensors) if n.endswith("dense.weight")}


def _renamed(rename: Any) -> Any:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        stored = {rename(name): x for name, x in tensors.items()}
        tensors.clear()
        tensors.update(stored)

    return change


NAMES = {  # how the tensors of a folder differ from those of the model, and the fix
    "gptq": (_gptq, "dequantize it first"),
    "fp8": (_fp8, "dequantize it first"),
    "data_parallel": (_renamed(lambda n: f"module.{n}"), "hf.weights(..., prefix='module.')"),
    "compiled": (_renamed(lambda n: f"_orig_mod.module.{n}"), "hf.weights(..., prefix='_orig_mod.module.')"),
    "compiled_layers": (_renamed(lambda n: n.replace("layer.0.", "layer.0._orig_mod.")),
                        """rename its tensors: {name.replace('_orig_mod.', ""): x for name, x in tensors.items()}"""),
    "others": (_renamed(lambda n: f"{n}_1"), "give the folder of this model, or rename its tensors"),
    "norms": (_renamed(lambda n: n.replace("LayerNorm.weight", "LayerNorm.scale")), "give the folder of this model"),
}  # fmt: skip


@pytest.mark.parametrize("what", NAMES)
def test_no_fix_leaves_initial_values_where_the_folder_has_the_weights_in_another_form(
    what: str, tmp_path: Path
) -> None:
    change, fix = NAMES[what]
    theirs = their_bert("Model")
    theirs.save_pretrained(tmp_path)
    changed(tmp_path, change)
    apply, tree = deferred_bert("Model")
    for options in ({"of": apply}, {}):
        text = error_text(fs.hf.weights, tmp_path, tree if options else tree["params"], **options)
        assert f"\n  fix: {fix}" in text
        assert "missing=(" not in text
        assert "ignored=(" not in text
    if "prefix=" in fix:
        (prefix,) = re.findall(r"prefix='(.*)'", fix)
        stored = fs.hf.weights(tmp_path, tree, of=apply, prefix=prefix)
        params = fs.device_get(fs.materialize(stored, P(), fs.make_mesh(data=1), key=fs.key(0)))["params"]
        assert_same(params, {n: x.detach() for n, x in theirs.named_parameters()})
    with pytest.raises(fs.ShardingError, match=r"quantized|begin with|inside|is missing") as error:
        fs.models.bert.load(tmp_path)
    assert ("  fix: " in str(error.value)) == (what not in ("others", "norms"))


def test_pattern_of_missing_that_names_no_leaf_is_an_error(tmp_path: Path) -> None:
    their_bert("Model").save_pretrained(tmp_path)
    apply, tree = deferred_bert("Model")
    text = error_text(fs.hf.weights, tmp_path, tree, of=apply, missing=("clasifier.*",))
    assert text == "weights: missing= has 'clasifier.*', and no leaf has such a name\n  fix: correct it"


class Norms(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6)
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def test_buffers_are_read_and_never_forgotten(tmp_path: Path) -> None:
    theirs = randomized(Norms())
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    apply, tree = fs.defer(Norms)
    mesh = fs.make_mesh(data=2)
    full = fs.device_get(fs.materialize(fs.hf.weights(tmp_path, tree, of=apply), P(), mesh, key=fs.key(0)))
    assert_same(
        {**full["params"], **full["buffers"]}, {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    )
    alone = fs.hf.weights(tmp_path, tree["buffers"], of=apply)
    assert repr(alone["norm.running_var"]) == "f32[6] = stored(model.safetensors: norm.running_var)"
    assert alone["table"] is tree["buffers"]["table"]
    text = error_text(fs.hf.weights, tmp_path, tree["params"], of=apply)
    assert (
        f"{tmp_path}: 'norm.running_var' is in the module's buffers, and not in this tree\n  f32[6]\n"
        "  fix: read the full tree: {'params': ..., 'buffers': ...}"
    ) in text
    fs.hf.save(tmp_path / "again", {"model_type": "norms"}, full, of=apply)
    assert_same(load_file(tmp_path / "again" / "model.safetensors"), dict(theirs.state_dict()))
    text = error_text(fs.hf.save, tmp_path / "again", {}, full["params"], of=apply)
    assert text == (
        "write: buffers['norm.running_mean'] is missing\n"
        "  fix: write the full tree: {'params': ..., 'buffers': ...}\n"
        "  the same for buffers['norm.running_var'], buffers['norm.num_batches_tracked']"
    )
    assert_same(load_file(tmp_path / "again" / "model.safetensors"), dict(theirs.state_dict()))
    other = {"params": {**full["params"], "w": torch.ones(1)}, "buffers": full["buffers"]}
    assert error_text(fs.hf.save, tmp_path / "again", {}, other, of=apply) == \
        "write: tree['params']['w'] is not a leaf of Apply(Norms)"  # fmt: skip
    wrong = {"params": {**tree["params"], "w": tree["params"]["norm.bias"]}, "buffers": tree["buffers"]}
    assert "Apply(Norms) has no leaf 'w'" in error_text(fs.hf.weights, tmp_path, wrong, of=apply)


def test_without_the_function_of_the_module_names_are_those_in_the_file(tmp_path: Path) -> None:
    theirs = randomized(Norms())
    tensors = {**theirs.state_dict(), "table": torch.arange(4.0) + 1}
    save_file({f"model.{n}": x for n, x in tensors.items()}, tmp_path / "model.safetensors")
    _, tree = fs.defer(Norms)
    for described in (tree, {**tree["params"], **tree["buffers"]}):
        stored = fs.hf.weights(tmp_path, described, prefix="model")
        full = fs.device_get(fs.materialize(stored, P(), fs.make_mesh(data=2), key=fs.key(0)))
        assert_same(full if described is not tree else {**full["params"], **full["buffers"]}, tensors)
    text = error_text(fs.hf.weights, tmp_path, tree["params"], prefix="model")
    assert "for the names, ties and buffers of fs.defer's module: of=apply" in text
    fs.hf.save(tmp_path / "again", {}, {"params": {"w": torch.ones(2)}, "buffers": {"b": torch.ones(1)}})
    assert sorted(load_file(tmp_path / "again" / "model.safetensors")) == ["b", "w"]


def test_positions_that_are_not_stored_keep_the_values_of_the_constructor(tmp_path: Path) -> None:
    config = hf.MarianConfig(vocab_size=61, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
                             decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, pad_token_id=3,
                             max_position_embeddings=12, decoder_start_token_id=3)  # fmt: skip
    theirs = hf.MarianMTModel(config).eval()
    theirs.save_pretrained(tmp_path)
    names = [n for n in theirs.state_dict() if n.endswith("embed_positions.weight")]
    changed(tmp_path, lambda t: [t.pop(n, None) for n in names])
    apply, tree = fs.defer(lambda: hf.MarianMTModel(config).eval())
    stored = fs.hf.weights(tmp_path, tree, of=apply)
    full = fs.device_get(fs.materialize(stored, P(), fs.make_mesh(data=1), key=fs.key(0)))
    assert_same({n: full["params"][n] for n in names}, {n: theirs.state_dict()[n] for n in names})


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_base_folder_is_read_into_a_module_that_peft_has_wrapped(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    theirs = saved("mixtral", tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    apply, tree = fs.defer(lambda: peft.get_peft_model(construct("mixtral"), config).eval())
    text = error_text(fs.hf.weights, tmp_path / "base", tree, of=apply)
    assert text.endswith("hf.weights(..., missing=('*.lora_A.*', '*.lora_B.*'))")
    stored = fs.hf.weights(tmp_path / "base", tree, of=apply, missing=("*.lora_A.*", "*.lora_B.*"))
    full = fs.device_get(fs.materialize(stored, P(), fs.make_mesh(data=1), key=fs.key(0)))
    wrapped = peft.get_peft_model(theirs, config).eval()
    want = {n: x.detach() for n, x in wrapped.named_parameters() if "lora_" not in n}
    assert_same({n: x for n, x in full["params"].items() if "lora_" not in n}, want)
    inputs = ids()
    with torch.no_grad():  # B is zero: the adapters change nothing yet
        assert torch.equal(apply(full["params"], full["buffers"], **inputs).logits, wrapped(**inputs).logits)
    assert "has adapters of peft" in error_text(fs.hf.save, tmp_path / "out", {}, full, of=apply)
    dora = peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    apply, tree = fs.defer(lambda: peft.get_peft_model(construct("mixtral"), dora).eval())
    text = error_text(fs.hf.weights, tmp_path / "base", tree, of=apply, missing=("*.lora_*",))
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    assert text.startswith(
        f"weights: tree['params']['{layer}.lora_magnitude_vector.default.weight'] is computed from "
        f"{layer}.base_layer.weight\n  that is read from the folder, and this leaf would have the value for another one"
    )
    wrapped.save_pretrained(tmp_path / "adapters")
    text = error_text(fs.hf.weights, tmp_path / "adapters", tree, of=apply)
    assert text == (
        f"{tmp_path / 'adapters'}: has the adapters of peft, and not the weights of the base model\n"
        "  it holds adapter_model.safetensors\n"
        "  fix: give the folder of the base model, and read the adapters by fs.peft.load; or, into a module that peft "
        "has wrapped, by fs.peft.weights"
    )


def test_what_is_outside_of_a_prefix_is_left(tmp_path: Path) -> None:
    save_file(
        {"up.weight": torch.ones(2, 3), "up.bias": torch.ones(2), "down.weight": torch.ones(1)},
        tmp_path / "a.safetensors",
    )
    apply, module = fs.defer(lambda: torch.nn.Linear(3, 2))
    for of in (apply, None):
        found = fs.hf.weights(tmp_path / "a.safetensors", module["params"], of=of, prefix="up")
        assert repr(found["bias"]).endswith("up.bias)")
    text = error_text(fs.hf.weights, tmp_path / "a.safetensors", {"weight": fs.init.zeros((2, 3))}, prefix="up")
    assert f"{tmp_path}/a.safetensors: 'up.bias' is not part of this model" in text
    assert "down" not in text
    read = fs.interop.hf.read(
        tmp_path / "a.safetensors", module["params"], lambda path: fs.interop.hf.FileTensor(str(path[0])), prefix="up"
    )
    assert repr(read["weight"]).endswith("up.weight)")
