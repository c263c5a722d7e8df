"""Folders of PEFT as adapters beside a tree, and back: peft's tensors and logits, on a mesh of data=2, model=2."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.models import bert, gpt2, gpt_neox, heads, llama, t5

os.environ["HF_HUB_OFFLINE"] = "1"
peft = pytest.importorskip("peft")
hf = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
V, LABELS = 37, 3
IDS = torch.randint(1, V, (4, 7), generator=torch.Generator().manual_seed(0))
GPT2 = {"vocab_size": V, "n_positions": 12, "n_embd": 24, "n_layer": 2, "n_head": 3, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}  # fmt: skip
LLAMA = {"vocab_size": V, "hidden_size": 24, "intermediate_size": 29, "num_hidden_layers": 2, "num_attention_heads": 6,
         "num_key_value_heads": 3, "max_position_embeddings": 16}  # fmt: skip
NEOX = {"vocab_size": V, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 34,
        "max_position_embeddings": 16}  # fmt: skip
BERT = {"vocab_size": V, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 34,
        "max_position_embeddings": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
T5 = {"vocab_size": V, "d_model": 24, "d_kv": 5, "d_ff": 34, "num_layers": 2, "num_heads": 3, "dropout_rate": 0.0,
      "decoder_start_token_id": 0}  # fmt: skip


TOKENS = P("data", None, "model")


@dataclasses.dataclass(frozen=True)
class Model:
    """A model here and there: its constructor in transformers, and its logits, of whole batches."""

    build: Callable[[], Any]
    module: Any
    logits: Callable[..., Tensor]
    theirs: Callable[[Any], Tensor] = lambda m: m(input_ids=IDS).logits
    classes: P = TOKENS


def causal(module: Any) -> Callable[..., Tensor]:
    return module.apply


def t5_logits(cfg: Any, p: Any, ids: Tensor, **options: Any) -> Tensor:
    return t5.apply(cfg, p, ids, ids.flip(1), **options)


SEQUENCES = {"theirs": lambda m: m(input_ids=IDS).logits, "classes": P("data")}
MODELS = {
    "gpt2": Model(lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), gpt2, causal(gpt2)),
    "gpt2 classifier": Model(
        lambda: hf.GPT2ForSequenceClassification(hf.GPT2Config(**GPT2, num_labels=LABELS)),
        heads,
        causal(heads),
        **SEQUENCES,
    ),
    "llama": Model(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)), llama, causal(llama)),
    "gpt_neox": Model(lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**NEOX)), gpt_neox, causal(gpt_neox)),
    "bert classifier": Model(
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=LABELS)),
        heads,
        causal(heads),
        **SEQUENCES,
    ),
    "bert": Model(lambda: hf.BertForMaskedLM(hf.BertConfig(**BERT)), bert, bert.logits),
    "t5": Model(
        lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
        t5,
        t5_logits,
        lambda m: m(input_ids=IDS, decoder_input_ids=IDS.flip(1)).logits,
    ),
}

# name -> (model, options of LoraConfig)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2, fused and stored [in, out]": ("gpt2", {"target_modules": ["c_attn"]}),
    "llama, patterns of rank and alpha": ("llama", {
        "target_modules": ["q_proj", "v_proj", "down_proj"], "rank_pattern": {"down_proj": 5, r".*\.1\..*q_proj": 1},
        "alpha_pattern": {"layers.0.self_attn.v_proj": 3}}),
    "t5, q and v": ("t5", {"task_type": "SEQ_2_SEQ_LM"}),
    "bert classifier, its head trained": ("bert classifier", {"task_type": "SEQ_CLS"}),
    "llama, DoRA": ("llama", {"target_modules": ["k_proj", "o_proj", "up_proj"], "use_dora": True}),
    "llama, q and v": ("llama", {"task_type": "CAUSAL_LM"}),
    "llama, every linear layer": ("llama", {"target_modules": "all-linear"}),
    "llama, two layers": ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "llama, a trained head and an embedding": ("llama", {
        "target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}),
    "gpt2, rslora by an expression": ("gpt2", {"target_modules": r".*\.1\.(attn|mlp)\.c_proj", "use_rslora": True}),
    "gpt2, all biases, an embedding": ("gpt2", {"target_modules": ["c_attn", "wpe"], "bias": "all"}),
    "gpt2, DoRA, biases": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "bias": "lora_only", "use_dora": True}),
    "gpt2 classifier, every linear layer": ("gpt2 classifier", {
        "target_modules": "all-linear", "task_type": "SEQ_CLS"}),
    "gpt_neox, interleaved heads": ("gpt_neox", {"target_modules": ["query_key_value", "dense"]}),
    "t5, DoRA of the feed-forward": ("t5", {"target_modules": ["wi", "wo", "o"], "use_dora": True}),
    "bert, all but one": ("bert", {"target_modules": ["query", "key", "dense"], "exclude_modules": ["pooler.dense",
                                   "predictions.transform.dense"], "bias": "lora_only"}),
}  # fmt: skip
FAST = list(CASES)[:5]


@dataclasses.dataclass
class Reference:
    """A base and its adapters in folders, as peft has written them, and the logits of both together."""

    model: Model
    base: Any
    wrapped: Any
    logits: Tensor


def reference(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Reference:
    kind, options = CASES[name]
    model = MODELS[kind]
    torch.manual_seed(0)
    base = model.build().to(dtype).eval()
    with torch.no_grad():
        for p in base.parameters():  # every leaf matters: no bias of zeros, no norm of ones
            p.add_(0.2 * torch.randn(p.shape))
    base.save_pretrained(folder / "base")
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 5, "init_lora_weights": False, **options})
    wrapped = peft.get_peft_model(copy.deepcopy(base), config).eval()
    with torch.no_grad():
        for p in wrapped.parameters():
            p.add_(0.1 * torch.randn(p.shape) if p.requires_grad else 0)
    wrapped.save_pretrained(folder / "theirs")
    with torch.no_grad():
        return Reference(model, base, wrapped, model.theirs(wrapped))


def load(ref: Reference, folder: Path) -> tuple[Any, Any, Any, Any, Any]:
    """Return cfg, params, `of`, and the config and the described adapters."""
    cfg, params = fs.hf.load(folder / "base")
    of = (lambda path: heads.theirs(path, cfg)) if ref.model.module is heads else ref.model.module.theirs
    ignored = [".base_layer.weight"] if "embed_tokens" in ref.wrapped.peft_config["default"].target_modules else []
    return cfg, params, of, *fs.peft.load(folder / "theirs", params, of=of, ignored=ignored)


def placed(params: Any, specs: Any, mesh: fs.Mesh) -> Any:
    return fs.materialize(params, specs, mesh, key=fs.key(0))


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / WEIGHTS)


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        torch.testing.assert_close(ours[name], x, rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_adapters_round_trip_between_peft_and_a_mesh(name: str, tmp_path: Path) -> None:
    ref = reference(name, tmp_path)
    cfg, params, of, lora, adapters = load(ref, tmp_path)
    mesh = fs.make_mesh(data=2, model=2)
    specs = fs.fully_shard(ref.model.module.specs(cfg, model="model"), params, axis="data")
    adapter_specs = fs.lora.specs(lora, params, specs, of=of)
    options = {"layout": ref.model.module.Layout("data", "model"), "specs": specs}

    @fs.shard_map(mesh=mesh, in_specs=(specs, adapter_specs, P("data")), out_specs=(ref.model.classes, adapter_specs),
                  check="first" if name == FAST[0] else "never")  # fmt: skip
    def step(p: Any, a: Any, ids: Tensor) -> Any:
        def loss(a: Any) -> tuple[Tensor, Tensor]:
            adapted = fs.lora.apply(lora, p, a, of=of, specs=specs, adapter_specs=adapter_specs, data="data",
                                    model="model")  # fmt: skip
            logits = ref.model.logits(cfg, adapted, ids, **options)
            return fs.pmean(logits.square().mean(), ref.model.classes.axes), logits

        (_, logits), grads = fs.value_and_grad(loss, has_aux=True)(a)
        return logits, fs.tree.map(lambda x, g: x - 0.1 * g, a, grads)

    p, a = placed(params, specs, mesh), placed(adapters, adapter_specs, mesh)
    first, trained = step(p, a, IDS)
    torch.testing.assert_close(fs.device_get(first), ref.logits, rtol=1e-5, atol=1e-5)

    fs.peft.save(tmp_path / "same", lora, a, params, of=of, like=tmp_path / "theirs")
    theirs = tensors_in(tmp_path / "theirs")
    assert_same(tensors_in(tmp_path / "same"), {n: x for n, x in theirs.items() if "base_layer.weight" not in n})

    fs.peft.save(tmp_path / "ours", lora, trained, params, of=of, like=tmp_path / "theirs")
    assert any(not torch.equal(x, theirs[n]) for n, x in tensors_in(tmp_path / "ours").items())
    again = peft.PeftModel.from_pretrained(ref.base, tmp_path / "ours").eval()
    with torch.no_grad():
        got = fs.device_get(step(p, trained, IDS)[0])
        torch.testing.assert_close(got, ref.model.theirs(again), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(got, ref.logits, atol=1e-3)
