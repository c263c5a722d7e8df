"""Every model file has the same functions with the same arguments, so that one program trains any of them."""

from __future__ import annotations

import inspect

import pytest

from fshard import models

DECODERS = ["gptj", "gpt_neox", "llama", "mistral", "qwen2", "qwen3"]  # compared with gpt2
COMMON = {"Config", "Layout", "apply", "config", "init", "load", "loss", "save", "specs", "theirs"}


@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_every_model_has_the_common_functions(name):
    model = getattr(models, name)
    own = {"bert": set(), "resnet": {"features", "state"}}.get(name, {"Cache", "generate"})
    assert set(model.__all__) >= COMMON | own
    assert all(getattr(model, f).__doc__ for f in COMMON)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "dots1"])
def test_models_of_experts_have_the_signatures_of_decoders_and_one_more_option(name):
    model = getattr(models, name)
    for f in ("apply", "config", "generate", "init", "load", "loss", "save", "theirs"):
        other, gpt2 = (inspect.signature(getattr(m, f)) for m in (model, models.gpt2))
        assert str(other).replace("cfg: BaseConfig", "cfg: Any") == str(gpt2).replace("cfg: Config", "cfg: Any")
    specs, of_gpt2 = (str(inspect.signature(m.specs)).replace("BaseConfig", "Any") for m in (model, models.gpt2))
    assert specs == of_gpt2.replace(") ->", ", experts: Axis = None) ->")


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_have_the_same_signatures(name):
    for f in ("apply", "config", "generate", "init", "load", "loss", "save", "specs", "theirs"):
        other, gpt2 = (inspect.signature(getattr(model, f)) for model in (getattr(models, name), models.gpt2))
        assert str(other).replace("cfg: BaseConfig", "cfg: Config") == str(gpt2), f


@pytest.mark.parametrize("f", ["apply", "load", "loss", "save", "specs"])
def test_the_encoder_has_the_positional_arguments_of_decoders(f):
    def positional(model):
        kinds = inspect.signature(getattr(model, f)).parameters.values()
        return [p.name for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD]

    assert positional(models.bert) == positional(models.gpt2)


@pytest.mark.parametrize("f", ["config", "init", "load", "loss", "save", "specs", "theirs", "generate"])
def test_the_encoder_decoder_has_the_arguments_of_decoders_and_the_masks_of_its_target(f):
    other, gpt2 = (inspect.signature(getattr(model, f)).parameters for model in (models.t5, models.gpt2))
    assert {name: x.kind for name, x in other.items() if not name.startswith("decoder_")} == {
        name: x.kind for name, x in gpt2.items() if name != "documents"}  # fmt: skip
