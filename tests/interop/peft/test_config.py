"""`adapter_config.json`: what each of its fields means, by peft itself, and what is refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import fshard as fs
from fshard.interop.peft.config import DEFAULT_TARGETS, config_fields, selects
from fshard.lora.config import value_for
from tests.lib.later import Later
from tests.lib.tiers import slow_unless

peft = Later("peft")
utils, tuners_utils = Later("peft.utils"), Later("peft.tuners.tuners_utils")

FILE = Path("adapter_config.json")
NAMES = [
    f"{top}{stack}.{i}.{rest}"
    for top in ("", "model.", "a.model.", "base.3.")
    for stack in ("layers", "encoder.layer", "h")
    for i in (0, 1, 2, 11, 12)
    for rest in ("attn.q_proj", "attn.c_attn", "mlp.experts.1.up", "q_proj", "1.q_proj", "layers.2.q_proj")
] + ["q_proj", "lm_head", "model.q_proj", "h.q_proj", "xq_proj", "a.xq_proj", "2.q_proj", "a.2.q_proj"]


def fields(**changes: Any) -> dict[str, Any]:
    contents = {"peft_type": "LORA", "target_modules": ["q_proj"], **changes}
    return config_fields(FILE, contents, [])


def error_text(**changes: Any) -> str:
    with pytest.raises(fs.ShardingError) as e:
        fields(**changes)
    return str(e.value)


@pytest.mark.parametrize(
    "patterns", [None, "layers", ["layers"], ["h", "layers"], ["encoder.layer", "experts"], "l.*s"]
)
@pytest.mark.parametrize(
    "targets", [["q_proj"], ["attn.q_proj", "up"], ["1.q_proj"], ["h.1.q_proj", "h.2.attn.q_proj"]]
)
def test_layers_to_transform_chooses_the_modules_that_peft_chooses(targets: Any, patterns: Any) -> None:
    for layers in (1, [1], [0, 2], [11, 12]):
        contents = {"target_modules": targets, "layers_to_transform": layers, "layers_pattern": patterns}
        theirs = peft.LoraConfig(**contents)
        ours = config_fields(FILE, {"peft_type": "LORA", **contents}, NAMES)["targets"]
        want = [n for n in NAMES if tuners_utils.check_target_module_exists(theirs, n)]
        assert [n for n in NAMES if selects(ours, n)] == want, layers


@pytest.mark.parametrize("targets", [["q_proj"], ["h.1.attn.q_proj"], r".*\.[02]\..*q_proj", r"q_proj", ["proj"]])
def test_targets_are_exact_names_ends_or_a_whole_regular_expression_as_in_peft(targets: Any) -> None:
    theirs = peft.LoraConfig(target_modules=targets)
    assert [selects(targets, n) for n in NAMES] == [
        bool(tuners_utils.check_target_module_exists(theirs, n)) for n in NAMES
    ]


@pytest.mark.parametrize("patterns", [{"q_proj": 1, "h.0.attn.q_proj": 2}, {"^q_proj": 3, ".*": 4}, {"proj": 5}])
def test_rank_of_a_module_is_that_of_the_first_pattern_as_in_peft(patterns: dict[str, int]) -> None:
    for name in NAMES:
        assert value_for(patterns, name, 8) == patterns.get(utils.other.get_pattern_key(patterns, name), 8)


def test_default_targets_are_those_of_peft() -> None:
    table = utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    assert {kind: list(names) for kind, names in DEFAULT_TARGETS.items()} == {k: table[k] for k in DEFAULT_TARGETS}
    contents = {"peft_type": "LORA", "target_modules": None}
    assert config_fields(FILE, contents, [], model_type="t5", prefix="")["targets"] == ("q", "v")


def test_every_field_of_peft_is_known_and_its_default_is_accepted() -> None:
    config = peft.LoraConfig(target_modules=["q_proj"])
    fields(**{k: v for k, v in config.to_dict().items() if k not in ("peft_type", "target_modules", "runtime_config")})
    for field in dataclasses.fields(peft.LoraConfig):
        if field.name not in ("runtime_config", "peft_type"):
            assert "not a field of LORA" not in error_text(**{"r": -1, "bias": "", field.name: object()})


def test_fields_of_other_methods_and_unknown_fields_are_named_all_at_once() -> None:
    text = error_text(use_qalora=True, lora_bias=True, layer_replication=[[0, 2]], trainable_token_indices=[1],
                      target_parameters="w", loftq_config={"loftq_bits": 4}, corda_config={"a": 2.0}, r=0,
                      bias="some", new_field=1, another=None, lora_dropout=1.0, rank_pattern={"q": "3"})  # fmt: skip
    for name in ("use_qalora", "lora_bias", "layer_replication", "trainable_token_indices", "target_parameters",
                 "loftq_config", "corda_config", "r", "bias", "new_field", "lora_dropout", "rank_pattern"):  # fmt: skip
        assert re.search(rf"^adapter_config.json: {name} is ", text, re.MULTILINE), name
    assert "another" not in text
    assert text.startswith("12 problems")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA', and neither 'LORA' nor 'IA3'"),
        ({"peft_type": "IA3", "r": 8}, "r is not a field of IA3 that is known here"),
        ({"peft_type": "IA3", "target_modules": None}, "target_modules is null"),
        ({"target_modules": None}, "target_modules is null, and there is no default for the model type None"),
        (
            {"target_modules": "q.*", "layers_to_transform": [1]},
            "layers_to_transform is [1], and target_modules a regul",
        ),
        ({"layers_pattern": "h"}, "layers_pattern is 'h', without layers_to_transform"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which changes the weights of"),
        ({"init_lora_weights": "mica"}, "init_lora_weights is 'mica', which is not known here"),
        ({"rank_pattern": {"q_proj": 2.5}}, "rank_pattern is {'q_proj': 2.5}"),
        ({"target_modules": "(q"}, "'(q' is not a regular expression"),
        ({"layers_pattern": ["("], "layers_to_transform": [0]}, "'(' is not a regular expression"),
        ({"alpha_pattern": {"q": float("nan")}}, "alpha_pattern is {'q': nan}"),
        ({"alpha_pattern": {"[": 3}}, "'[' is not a regular expression"),
        ({"r": True}, "r is True"),
        ({"target_modules": "a{99999999999}"}, "'a{99999999999}' is not a regular expression"),
        ({"target_modules": "(" * 500}, "'((("),
        ({"rank_pattern": {"(?i)q": 2}}, "'(?i)q' is not a regular expression"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
        ({"modules_to_save": ["a"] * 101}, "modules_to_save is ['a', "),
    ],
)
def test_config_that_has_no_meaning_here_is_an_error(changes: dict[str, Any], text: str) -> None:
    assert f"adapter_config.json: {text}" in error_text(**changes)


@pytest.mark.parametrize("name", slow_unless(["alpha_pattern"], ["target_modules", "alpha_pattern", "layers_pattern"]))
def test_expression_that_backtracks_is_refused_soon(name: str) -> None:
    slow = "(.*.*)*="
    changes: dict[str, Any] = {name: {slow: 2} if name == "alpha_pattern" else slow}
    if name == "layers_pattern":
        changes["layers_to_transform"] = [0]
    with pytest.raises(fs.ShardingError) as e:
        config_fields(
            FILE, {"peft_type": "LORA", "target_modules": ["q"], **changes}, ["model.layers.0.self_attn.q_proj"] * 9
        )
    assert str(e.value) == (
        f"{FILE}: '(.*.*)*=' takes too long to match\n"
        "  more than 0.4 s of CPU time, for the names of 9 modules\n"
        "  fix: a list of names; or an expression without repeats of repeats, as in (a+)+"
    )


def test_expression_with_repeats_of_repeats_that_is_fast_is_read() -> None:
    targets = r"(?:\w+\.)*(q|v)_proj"
    assert config_fields(FILE, {"peft_type": "LORA", "target_modules": targets}, NAMES)["targets"] == targets


def test_fields_of_other_versions_that_change_nothing_are_accepted() -> None:
    plain = fields()
    first = {"enable_lora": None, "merge_weights": False, "fan_in_fan_out": False, "inference_mode": True}
    later = {"alora_invocation_tokens": None, "eva_config": {"rho": 2.0}, "megatron_config": None, "loftq_config": {},
             "megatron_core": "megatron.core", "layer_replication": None, "target_parameters": None,
             "runtime_config": {"ephemeral_gpu_offload": False}, "init_lora_weights": "eva"}  # fmt: skip
    assert fields(**first) == fields(**later) == plain
    assert fields(init_lora_weights="orthogonal")["init"] == "kaiming"
    assert fields(init_lora_weights="Gaussian")["init"] == "gaussian"
    assert "enable_lora is not a field" in error_text(enable_lora=[True, False, True])


def test_prefix_that_names_may_lack_is_optional_in_an_expression() -> None:
    contents = {"peft_type": "LORA", "target_modules": r"h\.\d+\.q", "exclude_modules": r"h\.1\.q"}
    found = config_fields(FILE, contents, [], prefix="transformer.")
    assert selects(found["targets"], "transformer.h.0.q")
    assert selects(found["targets"], "h.0.q")
    assert selects(found["exclude"], "transformer.h.1.q")
    assert not selects(found["exclude"], "transformer.h.0.q")
