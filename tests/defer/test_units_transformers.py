"""`Apply.unshard` of Hugging Face's models by block: the numbers of the definition, and of the module itself."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.defer.constructor import defer
from tests.lib.assertions import assert_same
from tests.lib.later import Later
from tests.lib.tiers import slow_unless

os.environ["HF_HUB_OFFLINE"] = "1"
hf = pytest.importorskip("transformers")
peft = Later("peft")

GROUPED = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
           "intermediate_size": 24, "num_key_value_heads": 2}  # fmt: skip
T5 = {"vocab_size": 61, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
      "decoder_start_token_id": 0, "pad_token_id": 0}  # fmt: skip
ALBERT = {"vocab_size": 61, "hidden_size": 16, "embedding_size": 8, "num_hidden_layers": 3, "num_attention_heads": 4,
          "intermediate_size": 24, "max_position_embeddings": 12, "hidden_dropout_prob": 0.0}  # fmt: skip
GPT2 = {"vocab_size": 61, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 12, "bos_token_id": 1,
        "eos_token_id": 2, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip


def lora() -> Any:
    config = peft.LoraConfig(r=2, lora_dropout=0.0, target_modules=["q", "v"], init_lora_weights=False)
    return peft.get_peft_model(hf.T5ForConditionalGeneration(hf.T5Config(**T5)), config)


# name -> (constructor, units)
MODELS: dict[str, tuple[Any, Any]] = {
    "T5": (lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)), "T5Block"),
    "T5 + LoRA": (lora, "T5Block"),
    "GPT2": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), "transformer.h.*"),
    "Llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)), "LlamaDecoderLayer"),
    "ALBERT": (lambda: hf.AlbertForMaskedLM(hf.AlbertConfig(**ALBERT)), "AlbertLayer"),
    "Mixtral": (
        lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, num_local_experts=3)),
        ("MixtralDecoderLayer", "MixtralAttention"),
    ),
}
IDS = torch.arange(3, 3 + 4 * 6).view(4, 6) % 61


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft uses a name that transformers will remove
@pytest.mark.parametrize("name", slow_unless(["T5 + LoRA", "Mixtral"], MODELS))
def test_model_by_unit_has_the_numbers_of_the_definition_and_of_one_device(name: str) -> None:
    constructor, units = MODELS[name]
    mesh, (apply, tree) = fs.make_mesh(data=2), defer(constructor, units=units, reference=0)
    specs = fs.fully_shard(P(), tree["params"], axis="data")
    params = fs.materialize(tree["params"], specs, mesh, key=fs.key(0))
    buffers = fs.materialize(tree["buffers"], P(), mesh, key=fs.key(0))
    trained = {name: s for name, s in specs.items() if name not in apply.frozen}

    def step(f: Any, check: str = "never") -> Any:
        @fs.shard_map(mesh=mesh, in_specs=(specs, P(), P("data")), out_specs=(P(), trained), check=check)
        def run(p: Any, buffers: Any, ids: Tensor) -> Any:
            frozen = {name: p[name] for name in apply.frozen}
            loss = lambda q: fs.pmean(f({**q, **frozen}, buffers, input_ids=ids, labels=ids).loss, "data")  # noqa: E731
            return fs.value_and_grad(loss)({name: p[name] for name in trained})

        return run(params, buffers, IDS)

    def plain(p: Any, b: Any, **inputs: Any) -> Any:
        return apply(fs.unshard(p, specs, "data", shapes=apply.shapes), fs.unshard(b, P(), "data"), **inputs)

    torch.manual_seed(0)
    module = constructor()
    loss = torch.stack([module(input_ids=ids, labels=ids).loss for ids in IDS.chunk(2)]).mean()
    leaves = {name: x for name, x in module.named_parameters() if name in trained}
    dense = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True), strict=True))
    want = step(plain)
    assert_same(want, (loss.detach(), dense), rtol=2e-5, atol=2e-7)
    # ALBERT's layer is called three times: its sums over the ranks are added, instead of the sum of what is added.
    tolerance = {"rtol": 2e-6, "atol": 2e-8} if name == "ALBERT" else {}
    for how in ({}, {"remat": True}):
        # A recomputed block would add to a cache twice; otherwise the cache hides tensors of each block from the next.
        cache = {"use_cache": False} if "remat" in how and name != "ALBERT" else {}
        f = apply.unshard(specs, "data", **how)
        got = step(lambda p, b, f=f, cache=cache, **inputs: f(p, b, **inputs, **cache))
        assert_same(got, want, f"{how}", **tolerance)
    if name == "T5":
        assert_same(step(apply.unshard(specs, "data"), "always"), want, "checked")
