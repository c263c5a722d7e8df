"""Every model file offers the same functions with the same arguments, so that one program trains any of them."""

from __future__ import annotations

import inspect

import pytest

from fshard import models

DECODERS = ["gptj", "gpt_neox", "llama"]  # and gpt2, whose arguments are theirs
OF_ALL = {"Config", "Layout", "apply", "config", "init", "load", "loss", "save", "specs", "theirs"}


@pytest.mark.parametrize("name", models.__all__)
def test_every_model_offers_the_same_functions(name):
    model = getattr(models, name)
    assert set(model.__all__) >= (OF_ALL if name == "bert" else OF_ALL | {"Cache", "generate"})
    assert all(getattr(model, f).__doc__ for f in OF_ALL)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("f", ["apply", "config", "generate", "init", "load", "loss", "save", "specs", "theirs"])
def test_decoders_are_called_alike(f, name):
    ours, gpt2 = (inspect.signature(getattr(model, f)) for model in (getattr(models, name), models.gpt2))
    assert str(ours) == str(gpt2)


@pytest.mark.parametrize("f", ["apply", "load", "loss", "save", "specs"])
def test_an_encoder_takes_what_decoders_take_in_the_same_order(f):
    def positional(model):
        kinds = inspect.signature(getattr(model, f)).parameters.values()
        return [p.name for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD]

    assert positional(models.bert) == positional(models.gpt2)
