"""Folders of PEFT as adapters beside a tree, and back: peft's tensors and logits, on a mesh of data=2, model=2."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.models import bert, gpt2, gpt_neox, heads, llama, qwen3_moe, t5
from tests.lib.assertions import assert_same, error_text
from tests.lib.later import Later

os.environ["HF_HUB_OFFLINE"] = "1"
peft = Later("peft")
hf = pytest.importorskip("transformers")
tuners_utils = Later("peft.tuners.tuners_utils")

pytestmark = pytest.mark.filterwarnings("ignore")

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
V, LABELS = 37, 3
IDS = torch.randint(1, V, (4, 7), generator=torch.Generator().manual_seed(0))
GPT2 = {"vocab_size": V, "n_positions": 12, "n_embd": 24, "n_layer": 2, "n_head": 3, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}  # fmt: skip
LLAMA = {"vocab_size": V, "hidden_size": 24, "intermediate_size": 29, "num_hidden_layers": 2, "num_attention_heads": 6,
         "num_key_value_heads": 3, "max_position_embeddings": 16}  # fmt: skip
MOE = {**LLAMA, "num_key_value_heads": 3, "head_dim": 4, "moe_intermediate_size": 8, "num_experts": 4,
       "num_experts_per_tok": 2}  # fmt: skip
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


def t5_logits(cfg: Any, p: Any, ids: Tensor, **options: Any) -> Tensor:
    return t5.apply(cfg, p, ids, ids.flip(1), **options)


MODELS = {
    "gpt2": Model(lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), gpt2, gpt2.apply),
    "gpt2 classifier": Model(
        lambda: hf.GPT2ForSequenceClassification(hf.GPT2Config(**GPT2, num_labels=LABELS)),
        heads,
        heads.apply,
        classes=P("data"),
    ),
    "llama": Model(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)), llama, llama.apply),
    "tied llama": Model(
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA, tie_word_embeddings=True)), llama, llama.apply
    ),
    "qwen3_moe": Model(lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**MOE)), qwen3_moe, qwen3_moe.apply),
    "gpt_neox": Model(lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**NEOX)), gpt_neox, gpt_neox.apply),
    "bert classifier": Model(
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=LABELS)),
        heads,
        heads.apply,
        classes=P("data"),
    ),
    "bert": Model(lambda: hf.BertForMaskedLM(hf.BertConfig(**BERT)), bert, bert.logits),
    "t5": Model(
        lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
        t5,
        t5_logits,
        lambda m: m(input_ids=IDS, decoder_input_ids=IDS.flip(1)).logits,
    ),
}


def more_tokens() -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**LLAMA, "vocab_size": V + 2}))


# name -> (model, options of LoraConfig, or of IA3Config)
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
    "tied llama, a table that stays tied": ("tied llama", {
        "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "tied llama, an embedding without its head": ("tied llama", {"target_modules": ["embed_tokens"], "use_dora": True}),
    "llama, a head and norms by the last letters of their names": ("llama", {
        "target_modules": ["q_proj", "up_proj"], "modules_to_save": ["head", "norm", "1.mlp"]}),
    "bert classifier, its head and all biases": ("bert classifier", {
        "target_modules": ["query"], "bias": "all", "task_type": "SEQ_CLS"}),
    "gpt2, rslora by an expression": ("gpt2", {"target_modules": r".*\.1\.(attn|mlp)\.c_proj", "use_rslora": True}),
    "gpt2, all biases, an embedding": ("gpt2", {"target_modules": ["c_attn", "wpe"], "bias": "all"}),
    "gpt2, DoRA, biases": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "bias": "lora_only", "use_dora": True}),
    "gpt2 classifier, every linear layer": ("gpt2 classifier", {
        "target_modules": "all-linear", "task_type": "SEQ_CLS"}),
    "gpt_neox, interleaved heads": ("gpt_neox", {"target_modules": ["query_key_value", "dense"]}),
    "t5, DoRA of the feed-forward": ("t5", {"target_modules": ["wi", "wo", "o"], "use_dora": True}),
    "bert, all but one": ("bert", {"target_modules": ["query", "key", "dense"], "exclude_modules": ["pooler.dense",
                                   "predictions.transform.dense"], "bias": "lora_only"}),
    "gpt2, IA3": ("gpt2", {"feedforward_modules": ["mlp.c_proj"], "target_modules": ["c_attn", "mlp.c_proj"]}),
    "gpt2, IA3 of outputs that are summed": ("gpt2", {
        "feedforward_modules": [], "target_modules": r".*(attn.c_proj|c_fc)"}),
    "llama, IA3": ("llama", {"feedforward_modules": None, "task_type": "CAUSAL_LM"}),
    "t5, IA3": ("t5", {"feedforward_modules": None, "task_type": "SEQ_2_SEQ_LM"}),
    "bert classifier, IA3": ("bert classifier", {"feedforward_modules": None, "task_type": "SEQ_CLS"}),
}  # fmt: skip
EXPERTS = "qwen3_moe, parameters of experts"
CASES_OF_MODULES: dict[str, tuple[str, dict[str, Any]]] = {EXPERTS: ("qwen3_moe", {
    "target_modules": ["q_proj"], "target_parameters": ["experts.down_proj", "mlp.experts.gate_up_proj", "gate.weight"],
    "rank_pattern": {"gate_up_proj": 2}, "use_rslora": True})}  # fmt: skip
FAST = ["gpt2, fused and stored [in, out]", "llama, patterns of rank and alpha", "gpt2, IA3"]


@dataclasses.dataclass
class Reference:
    """A base and its adapters in folders, as peft has written them, and the logits of both together."""

    model: Model
    base: Any
    wrapped: Any
    logits: Tensor


def reference(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Reference:
    kind, options = {**CASES, **CASES_OF_MODULES}[name]
    model = MODELS[kind]
    torch.manual_seed(0)
    base = model.build().to(dtype).eval()
    with torch.no_grad():
        for p in base.parameters():  # every leaf matters: no bias of zeros, no norm of ones
            p.add_(0.2 * torch.randn(p.shape))
    base.save_pretrained(folder / "base")
    lora = {"r": 3, "lora_alpha": 5, "init_lora_weights": False}
    config = peft.IA3Config(**options) if "feedforward_modules" in options else peft.LoraConfig(**{**lora, **options})
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
    return cfg, params, of, *fs.peft.load(folder / "theirs", params, of=of)


def placed(params: Any, specs: Any, mesh: fs.Mesh) -> Any:
    return fs.materialize(params, specs, mesh, key=fs.key(0))


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / WEIGHTS)


def check_step(ref: Reference, ours: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    """Compare each leaf after a step of 0.1 times the gradient of the mean square of the logits with PEFT's."""
    ref.model.theirs(ref.wrapped).square().mean().backward()
    with torch.no_grad():
        for x in ref.wrapped.parameters():
            if x.grad is not None:
                x.sub_(0.1 * x.grad)
    stepped = peft.get_peft_model_state_dict(ref.wrapped)
    for n, x in ours.items():
        torch.testing.assert_close(x, stepped[n], rtol=1e-5, atol=1e-5, msg=lambda m, n=n: f"{n}: {m}")
    assert any(not torch.allclose(x, before[n], atol=1e-3) for n, x in ours.items())


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_adapters_round_trip_between_peft_and_a_mesh(name: str, tmp_path: Path) -> None:
    ref = reference(name, tmp_path)
    cfg, params, of, lora, adapters = load(ref, tmp_path)
    mesh = fs.make_mesh(data=2, model=2)
    specs = fs.fully_shard(ref.model.module.specs(cfg, model="model"), params, axis="data")
    method: Any = fs.lora if isinstance(lora, fs.lora.Config) else fs.ia3
    adapter_specs = method.specs(lora, params, specs, of=of)
    options = {"layout": ref.model.module.Layout("data", "model"), "specs": specs}

    @fs.shard_map(mesh=mesh, in_specs=(specs, adapter_specs, P("data")), out_specs=(ref.model.classes, adapter_specs),
                  check="first" if name == FAST[0] else "never")  # fmt: skip
    def step(p: Any, a: Any, ids: Tensor) -> Any:
        def loss(a: Any) -> tuple[Tensor, Tensor]:
            adapted = method.apply(lora, p, a, of=of, specs=specs, adapter_specs=adapter_specs, model="model")
            logits = ref.model.logits(cfg, adapted, ids, **options)
            return fs.psum(logits.square().sum(), ref.model.classes.axes) / ref.logits.numel(), logits

        (_, logits), grads = fs.value_and_grad(loss, has_aux=True)(a)
        return logits, fs.tree.map(lambda x, g: x - 0.1 * g, a, grads)

    p, a = placed(params, specs, mesh), placed(adapters, adapter_specs, mesh)
    first, trained = step(p, a, IDS)
    torch.testing.assert_close(fs.device_get(first), ref.logits, rtol=1e-5, atol=1e-5)

    fs.peft.save(tmp_path / "same", lora, a, params, of=of, like=tmp_path / "theirs")
    theirs = tensors_in(tmp_path / "theirs")
    twice = ("base_layer.weight", ".modules_to_save.bias", ".original_module.bias")
    assert_same(tensors_in(tmp_path / "same"), {n: x for n, x in theirs.items() if not n.endswith(twice)})
    ours, wanted = contents(tmp_path / "same"), contents(tmp_path / "theirs")
    assert isinstance(ours["target_modules"], str) == isinstance(wanted["target_modules"], str)
    for field in ours.keys() - {"target_modules", "modules_to_save"}:  # their order; the heads that the model lacks
        assert ours[field] == wanted[field], field
    assert bool(ours["modules_to_save"]) == bool(wanted["modules_to_save"])  # without it peft has the same logits

    fs.peft.save(tmp_path / "ours", lora, trained, params, of=of, like=tmp_path / "theirs")
    check_step(ref, tensors_in(tmp_path / "ours"), theirs)
    again = peft.PeftModel.from_pretrained(ref.base, tmp_path / "ours").eval()
    with torch.no_grad():
        got = fs.device_get(step(p, trained, IDS)[0])
        torch.testing.assert_close(got, ref.model.theirs(again), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(got, ref.logits, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "auto"),
    [
        ("gpt2, fused and stored [in, out]", "CausalLM"),
        (EXPERTS, "CausalLM"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("llama, DoRA", "CausalLM"),
                ("llama, patterns of rank and alpha", "CausalLM"),
                ("bert classifier, its head trained", "SequenceClassification"),
                ("t5, q and v", "Seq2SeqLM"),
                ("t5, IA3", "Seq2SeqLM"),
                ("gpt2, IA3", "CausalLM"),
                ("tied llama, a table that stays tied", "CausalLM"),
            )
        ),
    ],
)
def test_adapters_round_trip_beside_a_deferred_module(name: str, auto: str, tmp_path: Path) -> None:
    ref = reference(name, tmp_path)
    config = hf.AutoConfig.from_pretrained(tmp_path / "base")
    apply, module = fs.defer(lambda: getattr(hf, f"AutoModelFor{auto}").from_config(config).eval())
    params = fs.hf.weights(tmp_path / "base", module, of=apply)["params"]
    lora, adapters = fs.peft.load(tmp_path / "theirs", params, of=apply)
    mesh = fs.make_mesh(data=2)
    specs = fs.fully_shard(P(), params, axis="data")
    method: Any = fs.lora if isinstance(lora, fs.lora.Config) else fs.ia3
    adapter_specs = method.specs(lora, params, specs, of=apply)
    tree = {"p": params, "a": adapters, "b": module["buffers"]}
    placed_tree = placed(tree, {"p": specs, "a": adapter_specs, "b": P()}, mesh)
    decoder = {"decoder_input_ids": IDS.flip(1)} if auto == "Seq2SeqLM" else {}

    @fs.shard_map(mesh=mesh, in_specs=({"p": specs, "a": adapter_specs, "b": P()}, P("data")),
                  out_specs=(P("data"), adapter_specs), check="never")  # fmt: skip
    def step(t: Any, inputs: Any) -> Any:
        def loss(a: Any) -> tuple[Tensor, Tensor]:
            adapted = method.apply(lora, t["p"], a, of=apply, specs=specs)
            whole = fs.unshard(adapted, specs, "data", shapes=apply.shapes)
            logits = apply(whole, fs.unshard(t["b"], P(), "data"), **inputs).logits
            return fs.pmean(logits.square().mean(), "data"), logits

        (_, logits), grads = fs.value_and_grad(loss, has_aux=True)(t["a"])
        return logits, fs.tree.map(lambda x, g: x - 0.1 * g, t["a"], grads)

    inputs = {"input_ids": IDS, **decoder}
    first, trained = step(placed_tree, inputs)
    torch.testing.assert_close(fs.device_get(first), ref.logits, rtol=1e-5, atol=1e-5)
    fs.peft.save(tmp_path / "same", lora, placed_tree["a"], params, of=apply)
    assert_same(tensors_in(tmp_path / "same"), tensors_in(tmp_path / "theirs"))
    assert contents(tmp_path / "same")["fan_in_fan_out"] == (ref.model.module is gpt2)
    fs.peft.save(tmp_path / "ours", lora, trained, params, of=apply, like=tmp_path / "theirs")
    check_step(ref, tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs"))
    again = peft.PeftModel.from_pretrained(ref.base, tmp_path / "ours").eval()
    got = fs.device_get(step({**placed_tree, "a": trained}, inputs)[0])
    with torch.no_grad():
        torch.testing.assert_close(got, ref.model.theirs(again), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(got, ref.logits, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "options", "text", "deferred"),
    [
        (
            "tied llama",
            {"modules_to_save": ["embed_tokens"]},
            "has no lm_head.weight: PEFT has trained 'model.embed_",
            False,
        ),
        (
            "gpt2",
            {"modules_to_save": ["wte"]},
            "has no lm_head.weight: PEFT has trained 'transformer.wte' apart from",
            True,
        ),
        (
            "tied llama",
            {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
            "and 'model.embed_tokens' is",
            False,
        ),
        (
            "t5",
            {"target_modules": ["shared"]},
            "'shared' is one table with encoder.embed_tokens, decoder.embed_tokens",
            True,
        ),
        (
            "t5",
            {"modules_to_save": ["shared"]},
            "'shared' is one table with encoder.embed_tokens, decoder.embed_tok",
            False,
        ),
        (
            "more tokens",
            {"target_modules": ["lm_head"]},
            "'lm_head.base_layer.weight' has another shape than the leaf of params: the vocabulary",
            False,
        ),
    ],
)
def test_table_that_peft_trains_apart_from_a_layer_that_shares_it_is_refused(
    kind: str, options: dict[str, Any], text: str, deferred: bool, tmp_path: Path
) -> None:
    layer = {"t5": "k", "gpt2": "c_attn"}.get(kind, "q_proj")
    config = peft.LoraConfig(r=1, **{"target_modules": [layer], **options})
    kind, build = ("llama", more_tokens) if kind == "more tokens" else (kind, MODELS[kind].build)
    peft.get_peft_model(build(), config).save_pretrained(tmp_path)
    of, tree = MODELS[kind].module.theirs, None
    if deferred:
        of, tree = fs.defer(MODELS[kind].build)
    else:
        MODELS[kind].build().save_pretrained(tmp_path / "base")
        _, tree = fs.hf.load(tmp_path / "base")
    assert text in error_text(fs.peft.load, tmp_path, tree["params"] if deferred else tree, of=of)


def test_several_adapters_are_in_folders_of_their_own_and_compose(tmp_path: Path) -> None:
    ref = reference(FAST[0], tmp_path)
    other = peft.LoraConfig(r=2, target_modules=["c_attn", "c_fc"], init_lora_weights=False)
    ref.wrapped.add_adapter("other", other)
    ref.wrapped.save_pretrained(tmp_path / "theirs")
    ref.wrapped.base_model.set_adapter(["default", "other"])
    cfg, params, of, first, a = load(ref, tmp_path)
    second, b = fs.peft.load(tmp_path / "theirs" / "other", params, of=of)
    mesh = fs.make_mesh(data=1)
    full = [fs.device_get(placed(x, P(), mesh)) for x in (params, a, b)]
    adapted = fs.lora.apply(second, fs.lora.apply(first, full[0], full[1], of=of), full[2], of=of)
    with torch.no_grad():
        torch.testing.assert_close(gpt2.apply(cfg, adapted, IDS), ref.model.theirs(ref.wrapped), rtol=1e-5, atol=1e-5)
    fs.peft.save(tmp_path / "ours", first, full[1], params, of=of)
    fs.peft.save(tmp_path / "ours" / "other", second, full[2], params, of=of)
    again = peft.PeftModel.from_pretrained(ref.base, tmp_path / "ours")
    again.load_adapter(tmp_path / "ours" / "other", adapter_name="other")
    again.base_model.set_adapter(["default", "other"])
    with torch.no_grad():
        torch.testing.assert_close(ref.model.theirs(again), ref.model.theirs(ref.wrapped), rtol=0, atol=0)


def test_adapters_of_a_base_model_lack_the_prefix_of_a_model_with_a_head(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = hf.BertModel(hf.BertConfig(**BERT)).eval()
    base.save_pretrained(tmp_path / "base")
    targets = r"encoder\.layer\.\d\.attention\.self\.(query|key)"
    options = {"r": 2, "target_modules": targets, "init_lora_weights": False,
               "rank_pattern": {r"^encoder\.layer\.0\.attention\.self\.key": 4}}  # fmt: skip
    wrapped = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**options)).eval()
    wrapped.save_pretrained(tmp_path / "theirs")
    cfg, params = bert.load(tmp_path / "base")
    with pytest.raises(fs.ShardingError, match=r"no module is named 'encoder\\."):
        fs.peft.load(tmp_path / "theirs", params, of=bert.theirs)
    lora, adapters = fs.peft.load(tmp_path / "theirs", params, of=bert.theirs, prefix="bert")
    mesh = fs.make_mesh(data=1)
    p, a = (fs.device_get(placed(x, P(), mesh)) for x in (params, adapters))
    assert a["h.0.k.w"]["a"].shape == (24, 4)
    with torch.no_grad():
        states = bert.apply(cfg, fs.lora.apply(lora, p, a, of=bert.theirs), IDS)
        torch.testing.assert_close(states, wrapped(input_ids=IDS).last_hidden_state, rtol=1e-5, atol=1e-5)
    fs.peft.save(tmp_path / "ours", lora, a, params, of=bert.theirs, prefix="bert.")
    assert_same(tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs"))
    again = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    with torch.no_grad():
        assert torch.equal(again(input_ids=IDS).last_hidden_state, wrapped(input_ids=IDS).last_hidden_state)


# --- without peft ---------------------------------------------------------------------------------------------

TREE = {"h": [{"q": fs.init.zeros((6, 4)), "up": fs.init.zeros((6, 5)), "norm": fs.init.ones(6)} for _ in range(2)]}


def small(tmp_path: Path, **options: Any) -> tuple[Any, Any]:
    """Return a config and placed adapters of TREE, which are also in the folder `a`."""
    cfg = fs.lora.Config(**{"targets": ("q",), "rank": 3, "init": "random", **options})
    adapters = placed(fs.lora.init(cfg, TREE), P(), fs.make_mesh(data=2))
    fs.peft.save(tmp_path / "a", cfg, adapters, TREE, config={"task_type": "CAUSAL_LM"})
    return cfg, adapters


def contents(folder: Path) -> dict[str, Any]:
    return json.loads((folder / CONFIG).read_text())


def change(folder: Path, **fields: Any) -> None:
    (folder / CONFIG).write_text(json.dumps(contents(folder) | fields))


def test_every_option_of_a_config_is_read_as_it_was_written(tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [
        {"alpha": 16, "dropout": 0.1, "rslora": True, "ranks": {r"0\.q": 2}, "alphas": {"1.q": 3.5}},
        {"targets": r"h\.\d\.q", "init": "gaussian", "bias": "lora_only"},
        {"targets": ("q", "up"), "exclude": ("1.up",), "modules_to_save": ("h.0.norm",)},
    ]
    for i, one in enumerate(options):
        cfg, adapters = small(tmp_path / str(i), **one)
        again, read = fs.peft.load(tmp_path / str(i) / "a", TREE)
        assert again == cfg
        assert fs.tree.structure(read) == fs.tree.structure(adapters)
        got = fs.device_get(placed(read, P(), fs.make_mesh(data=1)))
        for x, y in zip(fs.tree.leaves(got), fs.tree.leaves(fs.device_get(adapters)), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("targets", [("h.*.q", "h.1.up"), "all-linear"])
def test_targets_that_peft_would_read_otherwise_are_written_as_names(targets: Any, tmp_path: Path) -> None:
    small(tmp_path, targets=targets)
    names = ["h.0.q", "h.1.q", "h.1.up"] if targets != "all-linear" else ["h.0.q", "h.0.up", "h.1.q", "h.1.up"]
    assert sorted(contents(tmp_path / "a")["target_modules"]) == names


def test_targets_whose_names_end_other_names_are_written_as_an_expression(tmp_path: Path) -> None:
    matrix = fs.init.zeros((4, 4))
    tree = {"q": matrix, "up": matrix, "h": {"q": matrix, "up": matrix}}
    both: dict[str, Any] = {"targets": ("q", "up", "h.up"), "exclude": ("h.*q",)}
    for cfg in (fs.lora.Config(**both), fs.ia3.Config(**both, feedforward=r"up")):
        method = fs.lora if isinstance(cfg, fs.lora.Config) else fs.ia3
        adapters = placed(method.init(cfg, tree), P(), fs.make_mesh(data=1))
        fs.peft.save(tmp_path, cfg, adapters, tree)
        theirs = peft.PeftConfig.from_pretrained(tmp_path)
        names = [n for n in ("q", "up", "h.q", "h.up") if tuners_utils.check_target_module_exists(theirs, n)]
        assert {fs.tree.dotted((n,)) for n in names} == set(adapters)
        again, read = fs.peft.load(tmp_path, tree)
        assert fs.tree.structure(read) == fs.tree.structure(adapters)
        if isinstance(again, fs.ia3.Config):
            assert [again.scales_inputs(n) for n in ("q", "up", "h.up")] == [False, True, False]


def test_modules_to_save_that_peft_would_read_otherwise_are_written_as_names(tmp_path: Path) -> None:
    small(tmp_path, modules_to_save=("h.*.norm",))
    assert contents(tmp_path / "a")["modules_to_save"] == ["h.0.norm", "h.1.norm"]
    cfg, _ = fs.peft.load(tmp_path / "a", TREE)
    assert cfg.modules_to_save == ("h.0.norm", "h.1.norm")
    change(tmp_path / "a", modules_to_save=["orm"])
    assert fs.peft.load(tmp_path / "a", TREE)[0] == cfg


def test_config_says_what_the_caller_and_the_other_folder_say(tmp_path: Path) -> None:
    cfg, adapters = small(tmp_path)
    change(tmp_path / "a", base_model_name_or_path="base", revision="main", inference_mode=False, r=7)
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    config = {"base_model_name_or_path": "other"}
    fs.peft.save(tmp_path / "b", cfg, adapters, TREE, like=tmp_path / "a", config=config)
    got = contents(tmp_path / "b")
    want = {"task_type": "CAUSAL_LM", "base_model_name_or_path": "other", "revision": "main", "inference_mode": True,
            "r": 3, "peft_type": "LORA"}  # fmt: skip
    assert want.items() <= got.items()
    assert (tmp_path / "b" / "tokenizer.json").exists()
    text = (tmp_path / "b" / CONFIG).read_text()
    assert text == json.dumps(got, indent=2, sort_keys=True)
    with open(tmp_path / "b" / WEIGHTS, "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    assert header["__metadata__"]["format"] == "pt"
    text = error_text(fs.peft.save, tmp_path / "c", cfg, adapters, TREE, config={"r": 8})
    assert text.startswith("save: config= has 'r', which follows from cfg")


def test_tensors_that_do_not_fit_are_all_listed(tmp_path: Path) -> None:
    small(tmp_path)
    file = tmp_path / "a" / WEIGHTS
    tensors = load_file(file)
    first, second = "base_model.model.h.0.q.lora_A.weight", "base_model.model.h.1.q.lora_B.weight"
    tensors |= {first: torch.ones(2, 6), "base_model.model.h.0.up.lora_A.weight": torch.ones(1)}
    del tensors[second]
    save_file(tensors, file)
    text = error_text(fs.peft.load, tmp_path / "a", TREE)
    for part in ("3 problems", "base_model.model.h.0.q.lora_A.weight' has another shape, for params['h.0.q']['a']\n",
                 "got  [2, 6]    expected  [3, 6]\n  rank i -> i rank, the leaf is [6, 3]",
                 "'h.1.q.lora_B.weight' is missing", "'h.0.up.lora_A.weight' is not part of"):  # fmt: skip
        assert part in text, part
    save_file({**tensors, "h.0.q.lora_A.weight": torch.ones(3, 6)}, file)
    assert "'h.0.q.lora_A.weight' does not begin with base_model.model." in error_text(
        fs.peft.load, tmp_path / "a", TREE
    )


def test_parameters_need_a_module_and_options_that_peft_takes_with_them(tmp_path: Path) -> None:
    with pytest.raises(fs.ShardingError, match=r"'h\.0\.q': PEFT's target_parameters are of modules of transformers"):
        small(tmp_path, targets=(), parameters=("h.*.q",))
    assert "parameters: no module is named 'w'" in error_text(fs.lora.init, fs.lora.Config((), parameters=("w",)), TREE)
    for wrong in ({"dropout": 0.1}, {"dora": True}):
        text = error_text(fs.lora.Config, (), parameters=["q"], **wrong)
        assert text.endswith("fix: parameters without dropout and dora, as in PEFT")


def test_targets_that_the_model_lacks_are_left_out_unless_it_lacks_all(tmp_path: Path) -> None:
    small(tmp_path)
    change(tmp_path / "a", target_modules=["q", "query"], modules_to_save=["classifier", "score"])
    cfg, _ = fs.peft.load(tmp_path / "a", TREE)
    assert (cfg.targets, cfg.modules_to_save) == (("q",), ())
    change(tmp_path / "a", target_modules=["query"])
    assert "no module is named 'query'" in error_text(fs.peft.load, tmp_path / "a", TREE)
    change(tmp_path / "a", target_modules=["q"], layers_to_transform=[7])
    assert "target_modules and layers_to_transform name no layer" in error_text(fs.peft.load, tmp_path / "a", TREE)
    change(tmp_path / "a", target_modules=["q"], use_qalora=True, lora_bias=True)
    text = error_text(fs.peft.load, tmp_path / "a", TREE)
    assert "use_qalora is not supported" in text
    assert "lora_bias is not supported" in text


def test_folder_is_unchanged_if_the_adapters_cannot_be_written(tmp_path: Path) -> None:
    cfg, adapters = small(tmp_path)
    before = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    described = fs.lora.init(cfg, TREE)
    wrong = {**adapters, "h.1.q": {"a": torch.ones(6, 2)}, "other": {"a": torch.ones(1)}}
    for own, parts in (
        (described, ["is only described, and has no values"]),
        (wrong, ["tree['h.1.q']['b'] is missing", "got  [6, 2]    expected  [6, 3]", "tree['other']['a'] is not in"]),
    ):
        text = error_text(fs.peft.save, tmp_path / "a", cfg, own, TREE)
        assert all(part in text for part in parts), text
        assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == before
    fs.peft.save(tmp_path / "a", cfg, adapters, TREE)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [CONFIG, WEIGHTS]


def test_reader_of_models_says_what_reads_a_folder_of_adapters(tmp_path: Path) -> None:
    small(tmp_path)
    assert error_text(fs.hf.load, tmp_path / "a") == (
        f"{tmp_path / 'a' / 'config.json'}: there is no such file\n  the folder has the adapters of peft\n"
        "  fix: give the folder of the base model; fs.peft.load reads adapters"
    )
    assert "read the adapters by fs.peft.load" in error_text(fs.hf.weights, tmp_path / "a", TREE)


def test_adapters_and_the_weights_of_their_base_may_share_a_folder(tmp_path: Path) -> None:
    full = {"v": torch.ones(2), "w": torch.ones(2)}
    for _ in range(2):
        small(tmp_path)
        fs.hf.save(tmp_path / "a", {"model_type": "other"}, full, max_shard_bytes=8)
    small(tmp_path)
    weights = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [CONFIG, WEIGHTS, "config.json", *weights]
    fs.peft.load(tmp_path / "a", TREE)
    assert fs.hf.weights(tmp_path / "a", {n: fs.init.zeros(2) for n in full})["w"].shape == (2,)


def test_targets_of_a_config_without_them_are_those_of_peft_for_the_model(tmp_path: Path) -> None:
    cfg = t5.Config(vocab_size=11, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    tree = t5.init(cfg)
    lora = fs.lora.Config(("q", "v"), rank=1)
    fs.peft.save(tmp_path, lora, placed(fs.lora.init(lora, tree, of=t5.theirs), P(), fs.make_mesh(a=1)), tree,
                 of=t5.theirs)  # fmt: skip
    change(tmp_path, target_modules=None)
    assert fs.peft.load(tmp_path, tree, of=t5.theirs)[0].targets == ("q", "v")

    def names(path: Any) -> Any:
        return t5.theirs(path)

    text = error_text(fs.peft.load, tmp_path, tree, of=names)
    assert "target_modules is null, and there is no default for the model type 'test_adapters'" in text


def test_adapters_of_a_half_precision_base_stay_in_the_dtype_of_the_file(tmp_path: Path) -> None:
    ref = reference("llama, q and v", tmp_path, torch.bfloat16)
    cfg, params, of, lora, adapters = load(ref, tmp_path)
    assert {x.dtype for x in fs.tree.leaves(adapters)} == {torch.float32}
    assert {x.dtype for x in fs.tree.leaves(params)} == {torch.bfloat16}
    mesh = fs.make_mesh(data=2)
    specs = fs.fully_shard(P(), params, axis="data")
    p, a = placed(params, specs, mesh), placed(adapters, P(), mesh)

    @fs.shard_map(mesh=mesh, in_specs=(specs, P(), P("data")), out_specs=P("data"), check="never")
    def logits(p: Any, a: Any, ids: Tensor) -> Tensor:
        adapted = fs.lora.apply(lora, p, a, of=of, specs=specs, adapter_specs=P(), data="data")
        return llama.apply(cfg, adapted, ids, layout=llama.Layout("data"), specs=specs)

    got = fs.device_get(logits(p, a, IDS))
    assert got.dtype == torch.bfloat16
    # Logits are sums of 24 products of bfloat16, eps 2^-8 each; attention there and here rounds in other places.
    atol = 2**-6 * ref.logits.abs().max().item()
    torch.testing.assert_close(got, ref.logits, rtol=2**-6, atol=atol)
    with torch.no_grad():
        assert (ref.model.theirs(ref.base) - ref.logits).abs().max() > 10 * atol
    half = fs.materialize(adapters, P(), mesh, key=fs.key(0), dtype=torch.bfloat16)
    fs.peft.save(tmp_path / "ours", lora, half, params, of=of)
    assert {x.dtype for x in tensors_in(tmp_path / "ours").values()} == {torch.bfloat16}
    again, read = fs.peft.load(tmp_path / "ours", params, of=of)
    assert again == lora
    assert {x.dtype for x in fs.tree.leaves(read)} == {torch.bfloat16}
