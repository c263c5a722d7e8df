"""The activations have the values and gradients of transformers' table, by every name in it."""

from __future__ import annotations

import pytest
import torch

from fshard.models import bert, gpt2, gpt_neox, gptj, llama
from fshard.models.activations import ACTIVATIONS, activated
from tests.lib.assertions import error_text
from tests.lib.later import Later

activations = Later("transformers.activations")

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("trained", [True, False])
def test_relu_before_a_frozen_matrix_keeps_a_byte_for_each_element(trained, dtype):
    x = torch.tensor([-torch.inf, -3, -0.0, 0, 1e-3, 3, torch.inf, torch.nan], dtype=dtype)
    w = torch.ones(8, 3, dtype=dtype, requires_grad=trained)
    saved = []

    def keep(x):
        saved.append(x.nbytes)
        return x

    own, rate = x.clone().requires_grad_(), torch.arange(1.0, 9, dtype=dtype)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        got = activated("relu", own, {"base": w, "key": None})
    assert saved == [8 * (dtype.itemsize if trained else 1)]
    want = torch.relu(x)
    torch.testing.assert_close(got.detach(), want, rtol=0, atol=0, equal_nan=True)
    (grad,) = torch.autograd.grad((got * rate).sum(), own)
    assert torch.equal(grad[:-1], (rate * (x > 0))[:-1])  # the last is that of nan
    got = lambda x: (activated("relu", x, w) ** 2 * rate).sum()  # noqa: E731
    finite = x[1:6].clone().requires_grad_()
    w, rate = w[:5], rate[:5]
    (first,) = torch.autograd.grad(got(finite), finite, create_graph=True)
    assert torch.equal(torch.autograd.grad(first.sum(), finite)[0], 2 * rate * (finite > 0))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(finite, rate)
        assert torch.equal(
            torch.autograd.forward_ad.unpack_dual(activated("relu", dual, w)).tangent, rate * (finite > 0)
        )
    assert torch.equal(torch.func.grad(got)(finite.detach()), first.detach())


@pytest.mark.parametrize("model", OPTIONS, ids=lambda m: m.__name__.split(".")[-1])
def test_other_names_are_refused(model):
    for name in ("prelu", "xielu", "Gelu", ""):
        label = f"{model.__name__.split('.')[-1]}.Config: {OPTIONS[model]}={name!r}\n"
        text = error_text(model.Config, **{OPTIONS[model]: name})
        assert text.startswith(label)
        assert ("it has parameters of its own" in text) == (name in ("prelu", "xielu"))
        assert text.endswith(f"fix: one of {', '.join(ACTIVATIONS)}")
