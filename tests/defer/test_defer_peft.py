"""Tuners of peft around transformers: each constructor records, and `apply` has the loss and gradients of peft's."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P
from tests.lib.later import Later

os.environ["HF_HUB_OFFLINE"] = "1"
peft = Later("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

V = 61
IDS = torch.randint(0, V, (2, 5), generator=torch.Generator().manual_seed(0))


def gpt2():
    sizes = {"vocab_size": V, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 3}
    dry = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dry))


def llama():
    sizes = {"vocab_size": V, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 32}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def t5():
    sizes = {"vocab_size": V, "d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 3}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


BASES = {  # name -> (model, task, linear layers, of the feed-forward, layer norms, embedding)
    "gpt2": (gpt2, "CAUSAL_LM", ["c_attn"], ["mlp.c_fc"], ["ln_1"], ["wte"]),
    "llama": (llama, "CAUSAL_LM", ["q_proj", "up_proj"], ["up_proj"], ["input_layernorm"], ["embed_tokens"]),
    "t5": (t5, "SEQ_2_SEQ_LM", ["q", "v"], ["wi"], ["layer_norm"], ["shared"]),
}
ALL, CONV, SOME = tuple(BASES), ("gpt2",), ("llama",)  # those of gpt2 have weights [in, out]
TUNERS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {  # name -> (config, options, bases)
    "LoRA": ("LoraConfig", {}, ALL),
    "LoRA, all linear layers": ("LoraConfig", {"target_modules": "all-linear"}, SOME),
    "LoRA and a trained head": ("LoraConfig", {"modules_to_save": ["lm_head"]}, SOME),
    "LoRA by PiSSA": ("LoraConfig", {"init_lora_weights": "pissa"}, SOME),
    "LoRA, orthogonal": ("LoraConfig", {"init_lora_weights": "orthogonal"}, SOME),
    "LoRA by OLoRA": ("LoraConfig", {"init_lora_weights": "olora"}, SOME),
    "DoRA": ("LoraConfig", {"use_dora": True}, SOME),
    "AdaLoRA": ("AdaLoraConfig", {"total_step": 10}, SOME),
    "LoHa": ("LoHaConfig", {}, SOME),
    "LoKr": ("LoKrConfig", {}, SOME),
    "IA3": ("IA3Config", {}, ALL),
    "OFT": ("OFTConfig", {"oft_block_size": 4, "r": 0}, SOME),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4}, SOME),
    "VeRA": ("VeraConfig", {"r": 4}, CONV),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 10}, CONV),
    "WaveFT": ("WaveFTConfig", {"n_frequency": 8}, SOME),
    "HRA": ("HRAConfig", {}, SOME),
    "VBLoRA": ("VBLoRAConfig", {"r": 4, "num_vectors": 6, "vector_length": 4}, CONV),
    "MiSS": ("MissConfig", {"r": 4}, SOME),
    "LNTuning": ("LNTuningConfig", {}, CONV),
    "RandLoRA": ("RandLoraConfig", {"r": 4}, SOME),
    "trainable tokens": ("TrainableTokensConfig", {"token_indices": [1, 2]}, ALL),
    "SHiRA": ("ShiraConfig", {"r": 4, "random_seed": 0}, SOME),
    "C3A": ("C3AConfig", {"block_size": 4}, SOME),
    "RoAd": ("RoadConfig", {}, SOME),
    "DeLoRA": ("DeloraConfig", {}, SOME),
    "GraLoRA": ("GraloraConfig", {"r": 4, "gralora_k": 2}, SOME),
    "Poly": ("PolyConfig", {"r": 4, "n_tasks": 2, "n_skills": 2}, SOME),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 3}, ALL),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 3}, ALL),
    "prefix tuning by a projection": (
        "PrefixTuningConfig", {"num_virtual_tokens": 3, "prefix_projection": True, "encoder_hidden_size": 12}, SOME),
    "P-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 3, "encoder_hidden_size": 12}, CONV),
    "P-tuning by an LSTM": ("PromptEncoderConfig", {
        "num_virtual_tokens": 3, "encoder_hidden_size": 12, "encoder_reparameterization_type": "LSTM",
        "encoder_dropout": 0.0, "encoder_num_layers": 1}, SOME),
    "multitask prompt tuning": ("MultitaskPromptTuningConfig", {"num_virtual_tokens": 3, "num_tasks": 2}, SOME),
    "adaption prompt": ("AdaptionPromptConfig", {"adapter_len": 3, "adapter_layers": 1}, SOME),
}  # fmt: skip
NO_TARGETS = ("Prompt", "Prefix", "Adaption")


def tuned(tuner, base):
    name, options, _ = TUNERS[tuner]
    model, task, linear, feed_forward, norms, embedding = BASES[base]
    options = {"task_type": task, **options}
    if not any(word in name for word in NO_TARGETS):
        options.setdefault("target_modules", linear)
    if name == "IA3Config":
        options |= {"target_modules": [*linear, *feed_forward], "feedforward_modules": feed_forward}
    if name == "LNTuningConfig":
        options["target_modules"] = norms
    if name == "TrainableTokensConfig":
        options["target_modules"] = embedding
    return peft.get_peft_model(model(), getattr(peft, name)(**options)).eval()


CASES = [(tuner, base) for tuner, (*_, bases) in TUNERS.items() for base in bases]


@pytest.mark.parametrize(("tuner", "base"), CASES)
def test_tuner_of_peft_trains_as_peft(tuner, base):
    apply, tree = fs.defer(functools.partial(tuned, tuner, base))
    torch.manual_seed(0)
    module = tuned(tuner, base)
    params = {n: p.detach().clone() for n, p in module.named_parameters()}
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    assert {kind: list(named) for kind, named in tree.items()} == {"params": list(params), "buffers": list(buffers)}
    mesh = fs.make_mesh(data=3)
    placed = fs.materialize(tree, fs.fully_shard(P(), tree, axis="data"), mesh, key=fs.key(0))
    alone = fs.materialize(tree, P(), fs.make_mesh(one=1), key=fs.key(0))
    for a, b in zip(fs.tree.leaves(placed), fs.tree.leaves(alone), strict=True):
        assert torch.equal(fs.device_get(a), fs.device_get(b))

    batch = {"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS)}
    if "task" in tuner or tuner == "Poly":
        batch["task_ids"] = torch.tensor([0, 1])
    trained = {n: p for n, p in params.items() if n not in apply.frozen}
    loss, grads = fs.value_and_grad(lambda p: apply({**params, **p}, buffers, **batch).loss)(trained)
    expected = module(**batch).loss
    expected.backward()
    assert torch.equal(loss, expected.detach())
    assert trained.keys() == {n for n, p in module.named_parameters() if p.requires_grad}
    for name, p in module.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(grads[name], p.grad, msg=lambda m, name=name: f"{name}: {m}")


def test_generator_of_a_tuner_gives_the_numbers_that_peft_saves_no_file_for():
    """FourierFT writes no indices: whoever loads an adapter draws them again, from the seed in its configuration."""
    apply, _ = fs.defer(functools.partial(tuned, "FourierFT", "gpt2"))
    theirs = tuned("FourierFT", "gpt2").get_submodule("base_model.model.transformer.h.1.attn.c_attn")
    ours = apply.module.get_submodule("base_model.model.transformer.h.1.attn.c_attn")
    assert torch.equal(ours.indices["default"], theirs.indices["default"])


@pytest.mark.parametrize(("name", "options"), [("OSFConfig", {}), ("CPTConfig", {"cpt_token_ids": [1, 2]})])
def test_tuner_with_hooks_on_gradients_is_an_error(name, options):
    if name == "CPTConfig":
        options = {**options, "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2]}
    else:
        options = {"target_modules": ["q_proj"]}
    build = lambda: peft.get_peft_model(llama(), getattr(peft, name)(task_type="CAUSAL_LM", **options))  # noqa: E731
    with pytest.raises(fs.ShardingError, match="a hook on the gradient of a parameter would never be called"):
        fs.defer(build)
