"""`defer` of Hugging Face's architectures, from small configurations: equal on meshes, distributions, ties, dtypes.

transformers (5) wraps `torch.nn.init` and skips its own initialization only for tensors that are on the meta device or
marked as loaded; a recorded tensor says it is on the CPU, so every model initializes itself as it does eagerly.
"""

from __future__ import annotations

import functools
import os

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.interop.defer.constructor import defer
from tests.interop.defer.test_defer import (
    check_distribution,
    check_same_on_meshes,
    construct_eagerly,
    is_drawn,
    values_on_one_device,
    without_warnings,
)
from tests.lib.assertions import assert_same

os.environ["HF_HUB_OFFLINE"] = "1"
hf = pytest.importorskip("transformers")

SMALL = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
GROUPED = {**SMALL, "num_key_value_heads": 2}
BERT = {**SMALL, "max_position_embeddings": 12}
GPT = {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 12, "bos_token_id": 1,
       "eos_token_id": 2}  # fmt: skip
VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24, "image_size": 8,
        "patch_size": 4}  # fmt: skip
AUDIO = {**SMALL, "conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_conv_pos_embeddings": 4,
         "num_conv_pos_embedding_groups": 2}  # fmt: skip
SPEECH = {"vocab_size": 61, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_source_positions": 10,
        "max_target_positions": 10, "num_mel_bins": 8, "pad_token_id": 5, "decoder_start_token_id": 6,
        "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}

MODELS = {
    "GPT2": ("GPT2LMHeadModel", "GPT2Config", GPT),
    "GPTJ": ("GPTJForCausalLM", "GPTJConfig", {**GPT, "rotary_dim": 4}),
    "GPTNeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", BERT),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "pad_token_id": 3}),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 3}),
    "T5": ("T5ForConditionalGeneration", "T5Config",
           {"vocab_size": 61, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}),
    "BERT": ("BertForMaskedLM", "BertConfig", BERT),
    "ViT": ("ViTForImageClassification", "ViTConfig", VISION),
    "ResNet": ("ResNetForImageClassification", "ResNetConfig",
               {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "bottleneck"}),
    "Mamba": ("MambaForCausalLM", "MambaConfig",
              {"vocab_size": 61, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}),
    "RWKV": ("RwkvForCausalLM", "RwkvConfig",
             {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "context_length": 8}),
    "CLIP": ("CLIPModel", "CLIPConfig",
             {"text_config": {**BERT, "bos_token_id": 1, "eos_token_id": 2}, "vision_config": VISION,
              "projection_dim": 8}),
    "Whisper": ("WhisperForConditionalGeneration", "WhisperConfig", SPEECH),
    "Falcon": ("FalconForCausalLM", "FalconConfig", SMALL),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "Gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "head_dim": 4}),
    "OPT": ("OPTForCausalLM", "OPTConfig",
            {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 24,
             "max_position_embeddings": 12, "word_embed_proj_dim": 8}),
    "Bloom": ("BloomForCausalLM", "BloomConfig", {"vocab_size": 61, "hidden_size": 16, "n_layer": 2, "n_head": 4}),
    "DeBERTa": ("DebertaForMaskedLM", "DebertaConfig", {**BERT, **RELATIVE}),
    "DeBERTa-v2": ("DebertaV2ForMaskedLM", "DebertaV2Config", {**BERT, **RELATIVE, "position_buckets": 4}),
    "Swin": ("SwinForImageClassification", "SwinConfig",
             {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 4],
              "window_size": 4}),
    "ConvNeXt": ("ConvNextForImageClassification", "ConvNextConfig",
                 {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2}),
    "Wav2Vec2": ("Wav2Vec2ForPreTraining", "Wav2Vec2Config", AUDIO),
}  # fmt: skip

TIES = {
    "GPT2": {"lm_head.weight": "transformer.wte.weight"},
    "T5": {"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight",
           "lm_head.weight": "shared.weight"},
    "BERT": {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
             "cls.predictions.decoder.bias": "cls.predictions.bias"},
    "Gemma2": {"lm_head.weight": "model.embed_tokens.weight"},
    "Llama": {},
}  # fmt: skip
PADDING = {"Llama": ("model.embed_tokens.weight", 3), "BERT": ("bert.embeddings.word_embeddings.weight", 0),
           "OPT": ("model.decoder.embed_tokens.weight", 1),
           "Whisper": ("model.decoder.embed_tokens.weight", 5)}  # fmt: skip


def constructor(name, **kwargs):
    model, config, sizes = MODELS[name]
    return without_warnings(lambda: getattr(hf, model)._from_config(getattr(hf, config)(**sizes), **kwargs))


@functools.cache
def deferred(name):
    return defer(constructor(name))


@pytest.mark.parametrize("name", MODELS)
def test_model_is_equal_on_every_mesh_and_distributed_as_eager(name):
    apply, tree = deferred(name)
    values, eager = values_on_one_device(tree), construct_eagerly(constructor(name))
    check_same_on_meshes(tree, values, [{"a": 3}, {"a": 2, "b": 2}], most=1)
    check_distribution(tree, values, eager, leaves=2000)
    persistent = set(eager.state_dict(keep_vars=True))
    assert {n for n, _ in eager.named_buffers() if n not in persistent} <= apply.transient
    assert not apply.transient & persistent
    names = [n for n, _ in eager.named_parameters(remove_duplicate=False)]
    assert set(names) == {*tree["params"], *(n for n in apply.ties if n in names)}


@pytest.mark.parametrize("name", TIES)
def test_tied_weights_are_one_leaf(name):
    assert deferred(name)[0].ties == TIES[name]


@pytest.mark.parametrize("name", PADDING)
def test_only_the_padding_row_is_zero(name):
    leaf, row = PADDING[name]
    weight = values_on_one_device({"params": deferred(name)[1]["params"]})["params"][leaf]
    assert (weight == 0).all(1).nonzero().tolist() == [[row]]


@pytest.mark.parametrize("name", ["Llama", "GPT2", "BERT"])
def test_dtype_of_the_constructor_is_recorded(name):
    _, tree = defer(constructor(name, dtype=torch.bfloat16))
    eager = construct_eagerly(constructor(name, dtype=torch.bfloat16))
    values = values_on_one_device(tree)
    assert {x.dtype for x in values["params"].values()} == {torch.bfloat16}
    check_distribution(tree, values, eager)
    for n, x in values_on_one_device(deferred(name)[1])["params"].items():
        if is_drawn(deferred(name)[1]["params"][n]):
            assert_same(values["params"][n], x.bfloat16())


def test_auto_class_equals_its_model():
    config = hf.LlamaConfig(**GROUPED)
    for auto, name in ((hf.AutoModelForCausalLM, "model.norm.weight"), (hf.AutoModel, "norm.weight")):
        apply, tree = defer(without_warnings(lambda auto=auto: auto.from_config(config)))
        assert name in tree["params"]
        placed = fs.materialize(tree, P(), fs.make_mesh(a=1), key=fs.key(0))
        params, buffers = fs.device_get(placed["params"]), fs.device_get(placed["buffers"])
        ids = torch.tensor([[1, 2, 3]])
        out = apply.eval()(params, buffers, input_ids=ids)[0]
        assert torch.isfinite(out).all()
        eager = apply_eager(auto, config, params, buffers)(input_ids=ids)[0]
        torch.testing.assert_close(out, eager, rtol=0, atol=0)


def apply_eager(auto, config, params, buffers):
    model = auto.from_config(config).eval()
    model.load_state_dict({**params, **buffers}, strict=False)
    return model


@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_deferred_model_trains_equally_on_every_mesh(name):
    """From `defer` to three steps of AdamW: data parallel, fully sharded, and the single device agree."""
    make = {
        "Llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(
            vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2)),
        "T5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(
            vocab_size=61, d_model=24, d_kv=6, d_ff=40, num_layers=2, num_heads=4, decoder_start_token_id=0)),
    }[name]  # fmt: skip
    apply, tree = fs.defer(lambda: make().eval())
    ids = torch.randint(1, 61, (6, 9), generator=torch.Generator().manual_seed(0))

    def trained(sizes, fsdp):
        mesh = fs.make_mesh(**sizes)
        specs = fs.fully_shard(P(), tree["params"], axis="data") if fsdp else fs.tree.map(lambda _: P(), tree["params"])
        optimizer = fs.optim.adamw(1e-2, eps=1e-4)  # gradients that are zero but for rounding stay small steps
        state = {"params": tree["params"], "opt": optimizer.init(tree["params"]), "buffers": tree["buffers"]}
        places = {"params": specs, "opt": optimizer.specs(specs), "buffers": P()}
        state = fs.materialize(state, places, mesh, key=fs.key(1))
        fs.validate(state["params"], tree["params"])

        @fs.shard_map(mesh=mesh, in_specs=(places, P("data")), out_specs=(places, P()))
        def step(state, ids):
            buffers = fs.unshard(state["buffers"], P(), "data")

            def loss(p):
                out = apply(fs.unshard(p, specs, "data", shapes=tree["params"]), buffers, input_ids=ids, labels=ids)
                return fs.pmean(out.loss, "data")

            value, grads = fs.value_and_grad(loss)(state["params"])
            params, opt = optimizer.update(grads, state["opt"], state["params"])
            return {**state, "params": params, "opt": opt}, value

        losses = []
        for _ in range(3):
            state, value = step(state, ids)
            losses.append(float(value))
        return losses, fs.device_get(state["params"])

    losses, params = trained({"data": 1}, False)
    assert losses[2] < losses[0]
    for sizes, fsdp in (({"data": 2}, False), ({"data": 3}, True)):
        others, same = trained(sizes, fsdp)
        assert others == pytest.approx(losses, rel=1e-5)
        for leaf, expected in params.items():
            # one step moves a weight by at most 1e-2; rounding moved none by a thousandth of that
            torch.testing.assert_close(
                same[leaf], expected, rtol=1e-5, atol=1e-5, msg=lambda m, leaf=leaf: f"{leaf}: {m}"
            )
