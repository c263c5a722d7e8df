"""Adapters of modules that peft has wrapped, in peft's files: the files of `save_pretrained`, from any mesh."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fshard as fs
from fshard import P
from tests.defer.test_defer_peft import gpt2, llama, peft, tuned
from tests.lib.assertions import assert_same, error_text

pytestmark = pytest.mark.filterwarnings("ignore")

# As many keys of the file as there are kinds of leaves: layers, trained copies, prompts, leaves that layers share.
METHODS = [("LoRA and a trained head", "llama"), ("prompt tuning", "gpt2"), ("RandLoRA", "llama")]
MORE = [("IA3", "gpt2"), ("prefix tuning", "llama"), ("DoRA", "llama"), ("LoKr", "llama"), ("VeRA", "gpt2"),
        ("trainable tokens", "gpt2"), ("LNTuning", "gpt2"), ("adaption prompt", "llama"), ("AdaLoRA", "llama"),
        ("IA3", "t5")]  # fmt: skip
# Options of LoraConfig, of which `fs.peft.load` has the last only.
LORA_OPTIONS: dict[str, dict[str, Any]] = {
    "tokens": {"trainable_token_indices": {"embed_tokens": [1, 3]}},
    "replicated layers": {"layer_replication": [[0, 2], [1, 2]]},
    "biases of factors": {"lora_bias": True},
    "parameters": {"target_parameters": ["up_proj.weight"]},
}


def wrapped(method: str, base: str) -> Any:
    if method not in LORA_OPTIONS:
        return tuned(method, base)
    targets = [] if method == "parameters" else ["q_proj"]
    return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=targets, **LORA_OPTIONS[method]))


def config_in(folder: Path) -> dict[str, Any]:
    out = json.loads((folder / "adapter_config.json").read_text())
    return {k: sorted(v) if isinstance(v, list) else v for k, v in out.items()}


@pytest.mark.parametrize(
    ("method", "base"),
    [*METHODS, *(pytest.param(*case, marks=pytest.mark.slow) for case in (*MORE, *((o, "") for o in LORA_OPTIONS)))],
)
def test_folder_of_a_wrapped_module_is_that_of_peft_from_a_mesh(method: str, base: str, tmp_path: Path) -> None:
    apply, tree = fs.defer(functools.partial(wrapped, method, base))
    module = wrapped(method, base)
    with torch.no_grad():  # no leaf has the value of its constructor
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    module.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "adapter_config.json"
    written = file.read_text()
    if method.startswith("LoRA"):  # as an earlier version of peft, which lacks its later fields
        later = ("use_dora", "use_qalora", "lora_bias", "layer_replication", "exclude_modules", "loftq_config")
        file.write_text(json.dumps({k: v for k, v in json.loads(written).items() if k not in later}))
    read = fs.peft.weights(tmp_path / "theirs", tree, of=apply)
    file.write_text(written)
    mesh = fs.make_mesh(data=3)
    placed = fs.materialize(read, fs.fully_shard(P(), tree, axis="data"), mesh, key=fs.key(0))
    fs.peft.save_module(tmp_path / "ours", placed, of=apply)
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert_same(ours, theirs)
    assert config_in(tmp_path / "ours") == config_in(tmp_path / "theirs")
    full = fs.device_get(placed)
    want = {"params": dict(module.named_parameters()), "buffers": dict(module.named_buffers())}
    trained = [n for n, p in module.named_parameters() if p.requires_grad]
    assert trained
    assert all(torch.equal(full["params"][n], want["params"][n]) for n in trained)


def test_one_of_several_adapters_is_written_and_read_by_its_name(tmp_path: Path) -> None:
    def build() -> Any:
        module = peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"]))
        module.add_adapter("other", peft.LoraConfig(r=3, target_modules=["mlp.c_fc"], init_lora_weights=False))
        return module

    apply, tree = fs.defer(build)
    module = build()
    module.save_pretrained(tmp_path / "theirs")
    mesh = fs.make_mesh(data=2)
    read = fs.peft.weights(tmp_path / "theirs" / "other", tree, of=apply, adapter="other")
    placed = fs.materialize(read, P(), mesh, key=fs.key(0))
    fs.peft.save_module(tmp_path / "ours", placed, of=apply, adapter="other")
    ours, theirs = (load_file(p / "adapter_model.safetensors") for p in (tmp_path / "ours", tmp_path / "theirs/other"))
    assert_same(ours, theirs)
    text = error_text(fs.peft.save_module, tmp_path / "new", placed, of=apply, adapter="third")
    assert text == "peft: the module has no adapter 'third'\n  fix: one of default, other"


def test_folder_that_does_not_fit_the_module_is_an_error_with_every_difference(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_alpha=4)
    peft.get_peft_model(llama(), config).save_pretrained(tmp_path / "a")
    other = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], lora_alpha=5)
    apply, tree = fs.defer(lambda: peft.get_peft_model(llama(), other))
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({**tensors, name: torch.ones(3, 64), "extra": torch.ones(1)}, file)
    text = error_text(fs.peft.weights, tmp_path / "a", tree, of=apply)
    for part in ("lora_alpha is not the module's\n  folder  4    module  5", "target_modules is not the module's",
                 f"{name!r} has another shape", "'extra' is not part of the adapters",
                 "up_proj.lora_A.weight' is missing",
                 "fix: the config that peft.PeftConfig.from_pretrained"):  # fmt: skip
        assert part in text, part


def test_module_and_folder_of_another_kind_are_errors(tmp_path: Path) -> None:
    apply, tree = fs.defer(lambda: torch.nn.Linear(2, 3))
    (tmp_path / "adapter_config.json").write_text("{}")
    text = error_text(fs.peft.weights, tmp_path, tree, of=apply)
    assert text.startswith(f"{tmp_path}: has no adapter_model.safetensors\n  it holds adapter_config.json")
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    assert "pickles are refused\n  it has adapter_model.bin" in error_text(fs.peft.weights, tmp_path, tree, of=apply)
    assert "there is no such folder" in error_text(fs.peft.weights, tmp_path / "none", tree, of=apply)
    (tmp_path / "outer" / "first").mkdir(parents=True)
    (tmp_path / "outer" / "first" / "adapter_config.json").write_text("{}")
    text = error_text(fs.peft.weights, tmp_path / "outer", tree, of=apply)
    assert text.endswith("it holds first\n  fix: one of the folders in it: first")
    assert "is not a module that peft has wrapped" in error_text(fs.peft.save_module, tmp_path, tree, of=apply)
    apply, tree = fs.defer(functools.partial(tuned, "P-tuning", "gpt2"))
    text = error_text(fs.peft.save_module, tmp_path / "new", tree, of=apply)
    assert text.startswith("peft: the prompt is computed by an encoder")
    apply, tree = fs.defer(lambda: peft.get_peft_model(llama(), peft.ShiraConfig(r=2, target_modules=["q_proj"])))
    text = error_text(fs.peft.save_module, tmp_path / "new", tree, of=apply)
    assert "q_proj.shira_indices' is computed from several leaves when it is saved" in text
    cpt = peft.CPTConfig(task_type="CAUSAL_LM", cpt_token_ids=[1, 2], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 2])
    assert "hook on the gradient" in error_text(fs.defer, lambda: peft.get_peft_model(gpt2(), cpt))
    assert not (tmp_path / "new").exists()
    apply, tree = fs.defer(functools.partial(tuned, "LoRA", "gpt2"))
    text = error_text(fs.peft.save_module, tmp_path / "new", tree, of=apply)
    assert "is only described, and has no values" in text
    assert not (tmp_path / "new").exists()
    assert "'base_model.model.transformer.h.0.attn.c_attn.lora_A.default.weight' is missing" in error_text(
        fs.peft.save_module, tmp_path / "new", {"params": {}, "buffers": {}}, of=apply
    )


@pytest.mark.parametrize("dora", [False, True])
def test_base_and_adapters_of_a_wrapped_module_are_read_from_two_folders(dora: bool, tmp_path: Path) -> None:
    base = llama().eval()
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], use_dora=dora,
                             init_lora_weights=False)  # fmt: skip
    module = peft.get_peft_model(base, config).eval()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 if p.requires_grad else 0)
    module.save_pretrained(tmp_path / "theirs")
    apply, tree = fs.defer(lambda: peft.get_peft_model(llama(), config).eval())
    if dora:  # the magnitudes are computed from the base: they are read before it
        tree = fs.peft.weights(tmp_path / "theirs", tree, of=apply)
    tree = fs.hf.weights(tmp_path / "base", tree, of=apply, missing=("*.lora_*",))
    tree = fs.peft.weights(tmp_path / "theirs", tree, of=apply)
    full = fs.device_get(fs.materialize(tree, P(), fs.make_mesh(data=1), key=fs.key(0)))
    ids = torch.arange(6)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            apply(full["params"], full["buffers"], ids).logits, module(ids).logits, rtol=0, atol=0
        )
