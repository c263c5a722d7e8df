"""Adapters against PEFT: logits, loss and gradients per leaf, on every mesh."""

from __future__ import annotations

import pytest

import fshard as fs
from tests.lib.model_cases import LAYOUTS, close
from tests.lora import cases

BASE = {
    "gpt2": {"targets": ("c_attn",)},
    "llama": {"targets": ("q_proj", "v_proj"), "rank": 4, "alpha": 12},
    "bert": {"targets": ("query", "value"), "rank": 2},
}
OPTIONS = {
    "dora": ("llama", {"targets": ("q_proj", "o_proj", "down_proj"), "dora": True}),
    "dora, fused": ("gpt2", {"targets": ("c_attn", "attn.c_proj"), "dora": True}),
    "rslora, ranks": ("llama", {"targets": ("k_proj", "up_proj", "down_proj"), "rslora": True, "alpha": 3,
                                "ranks": {"layers.0.mlp.*": 3, "k_proj": 1}, "alphas": {"up_proj": 7}}),
    "all-linear": ("gpt2", {"targets": "all-linear", "rank": 3}),
    "all-linear, neox": ("gpt_neox", {"targets": "all-linear", "rank": 3}),
    "all-linear, bert": ("bert", {"targets": "all-linear", "rank": 3}),
    "embeddings, tied": ("gpt2", {"targets": ("wte", "wpe", "c_fc"), "rank": 3}),
    "embeddings, dora": ("llama", {"targets": ("embed_tokens", "lm_head"), "rank": 3, "dora": True}),
    "regex, bias of the adapted": ("gpt2", {"targets": r".*\.1\.(attn\.c_attn|mlp\.c_proj)", "bias": "lora_only"}),
    "all biases": ("gpt2", {"targets": ("c_proj",), "bias": "all"}),
    "a module to save": ("llama", {"targets": ("q_proj",), "modules_to_save": ("lm_head", "norm")}),
    "exclude": ("llama", {"targets": "all-linear", "exclude": ("mlp.up_proj", "k_proj")}),
}  # fmt: skip
TWO_AXES = "both, fully sharded, sequence"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BASE)
def test_logits_loss_and_gradients_are_those_of_peft(name, layout):
    case = cases.pair(name, **BASE[name])
    close(cases.our_results(case, layout), cases.peft_results(case), 1e-5, 1e-5)


@pytest.mark.parametrize("layout", ["one device", "uneven", TWO_AXES])
@pytest.mark.parametrize("option", OPTIONS)
def test_options_have_the_numbers_of_peft(option, layout):
    name, options = OPTIONS[option]
    case = cases.pair(name, **options)
    close(cases.our_results(case, layout), cases.peft_results(case), 1e-5, 2e-5)


@pytest.mark.parametrize("option", ["dora", "all-linear", "embeddings, tied"])
def test_replicated_adapters_of_a_split_base_are_sliced(option):
    name, options = OPTIONS[option]
    case = cases.pair(name, **options)
    got = cases.our_results(case, TWO_AXES, adapter_specs=fs.P(), remat=True)
    close(got, cases.peft_results(case), 1e-5, 2e-5)
