"""Generation by deferred models of transformers: the tokens are those of their own `generate`, on every mesh."""

from __future__ import annotations

import functools
import os

import pytest
import torch

import fshard as fs
from fshard import P, ShardingError
from fshard.interop.defer import generate
from tests.interop.defer.test_defer import without_warnings

os.environ["HF_HUB_OFFLINE"] = "1"
hf = pytest.importorskip("transformers")

WIDE = {"initializer_range": 0.5, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1}  # logits that differ
SMALL = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
         "max_position_embeddings": 32, **WIDE}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
T5 = {"vocab_size": 61, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "initializer_factor": 8.0,
      "decoder_start_token_id": 0, "eos_token_id": None}  # fmt: skip
BART = {"vocab_size": 61, "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
        "init_std": 0.5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 2,
        "forced_eos_token_id": None, "scale_embedding": True}  # fmt: skip

MODELS = {
    "GPT2": ("GPT2LMHeadModel", "GPT2Config",
             {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, **WIDE}),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "Mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 4}),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "GPTNeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 3}),
    "OPT": ("OPTForCausalLM", "OPTConfig",
            {**WIDE, "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
             "ffn_dim": 24, "max_position_embeddings": 32, "word_embed_proj_dim": 16, "init_std": 0.5}),
    "Mamba": ("MambaForCausalLM", "MambaConfig",
              {"vocab_size": 61, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, **WIDE}),
    "RWKV": ("RwkvForCausalLM", "RwkvConfig",
             {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "context_length": 32, "eos_token_id": None}),
    "T5": ("T5ForConditionalGeneration", "T5Config", T5),
    "BART": ("BartForConditionalGeneration", "BartConfig", BART),
}  # fmt: skip
ENCODERS = ("T5", "BART")
PADDED = [name for name in MODELS if name != "RWKV"]  # which has no attention_mask
EOS = 60


@functools.cache
def reference(name):
    """The deferred model, its values on one device, and transformers' model with these."""
    cls, config, sizes = MODELS[name]
    make = without_warnings(lambda: getattr(hf, cls)._from_config(getattr(hf, config)(**sizes)).eval())
    apply, tree = fs.defer(make)
    placed = fs.materialize(tree, P(), fs.make_mesh(a=1), key=fs.key(3))
    values = {kind: fs.device_get(placed[kind]) for kind in ("params", "buffers")}
    theirs = make()
    theirs.load_state_dict({**values["params"], **values["buffers"]}, strict=False)
    theirs.tie_weights()
    return apply.eval(), tree, values, theirs


def ours(name, ids, sizes, mask=None, **kwargs):
    apply, tree, values, _ = reference(name)
    mesh = fs.make_mesh(**sizes)
    specs = fs.fully_shard(P(), tree["params"], axis="data")
    params = fs.device_put(values["params"], specs, mesh)

    @fs.shard_map(mesh=mesh, in_specs=(specs, P(), P("data"), P("data")), out_specs=P("data"))
    def run(p, b, ids, mask):
        whole = fs.unshard(p, specs, "data", shapes=tree["params"])
        return generate(apply, whole, fs.unshard(b, P(), "data"), ids, mask=mask, data="data", **kwargs)

    return fs.device_get(run(params, values["buffers"], ids, mask))


def wanted(name, ids, mask=None, **kwargs):
    kwargs = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 6, **kwargs}
    mask = torch.ones_like(ids) if mask is None else mask
    with torch.no_grad():
        out = reference(name)[3].generate(ids, attention_mask=mask, **kwargs)
    n = 1 if name in ENCODERS else ids.shape[1]
    return torch.nn.functional.pad(out, (0, n + kwargs["max_new_tokens"] - out.shape[1]))  # to the length of ours


def prompts(b=3, t=5):
    ids = torch.randint(1, EOS, (b, t), generator=torch.Generator().manual_seed(b))
    mask = torch.ones_like(ids)
    for row in range(b):
        mask[row, : (0, 3, 1)[row % 3]] = 0
    return ids, mask


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers_with_padding_and_ends(name):
    ids, mask = prompts()
    plain = wanted(name, ids)
    assert len({tuple(row) for row in plain[:, -6:].tolist()}) > 1
    assert torch.equal(ours(name, ids, {"data": 2}, new=6), plain)
    if name not in PADDED:
        return
    ids = ids.where(mask.bool(), 0)
    free = wanted(name, ids, mask)
    eos = [int(free[0, -4]), int(free[1, -3])]
    ended = wanted(name, ids, mask, eos_token_id=eos)
    assert (ended != free).any()
    assert torch.equal(ours(name, ids, {"data": 2}, mask, new=6, eos=eos, pad=0), ended)
