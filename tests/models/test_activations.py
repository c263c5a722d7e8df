"""The activations have the values and gradients of transformers' table, by every name in it."""

from __future__ import annotations

import pytest
import torch

from fshard.models import bert, gpt2, gpt_neox, gptj, llama
from fshard.models.activations import ACTIVATIONS
from tests.lib.assertions import error_text

activations = pytest.importorskip("transformers.activations")

OPTIONS = {bert: "hidden_act", gpt2: "activation_function", gpt_neox: "hidden_act", gptj: "activation_function",
           llama: "hidden_act"}  # fmt: skip


def test_every_name_is_an_activation_or_refused():
    assert {*ACTIVATIONS, "prelu", "xielu"} == {*activations.ACT2CLS}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_equal_transformers(name, dtype):
    """Near zero, at the kinks and far out. Theirs rounds 1 + erf, or 1 + tanh, and multiplies by x: 4 eps (|x| + 1)."""
    at = torch.tensor([-100.0, -10, -6, -3, -1e-3, -0.0, 0, 1e-3, 3, 6, 10, 100], dtype=dtype)
    x = torch.cat([at, torch.randn(200, dtype=dtype, generator=torch.Generator().manual_seed(0))])
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, want = ACTIVATIONS[name](ours), activations.ACT2FN[name](theirs)
    got.sum().backward()
    want.sum().backward()
    for a, b in ((got, want), (ours.grad, theirs.grad)):
        assert a.dtype == b.dtype == dtype
        assert ((a - b).abs() <= 4 * torch.finfo(dtype).eps * (x.abs() + 1)).all()


@pytest.mark.parametrize("model", OPTIONS, ids=lambda m: m.__name__.split(".")[-1])
@pytest.mark.parametrize("name", ["prelu", "xielu", "Gelu", ""])
def test_other_names_are_refused(model, name):
    label = f"{model.__name__.split('.')[-1]}.Config: {OPTIONS[model]}={name!r}\n"
    text = error_text(model.Config, **{OPTIONS[model]: name})
    assert text.startswith(label)
    assert ("it has parameters of its own" in text) == (name in ("prelu", "xielu"))
    assert text.endswith(f"fix: one of {', '.join(ACTIVATIONS)}")
