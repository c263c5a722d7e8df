"""Activations by their names in Hugging Face configs, with the values of transformers' table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fshard import nn, tree
from fshard._core.torch import in_transform
from fshard.errors import ShardingError, fail


def _gelu_fast(x: Tensor) -> Tensor:
    """Return the tanh form of GELU with the ten digits of sqrt(2 / pi) that transformers writes."""
    return 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x)))


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({
    "gelu": F.gelu, "gelu_10": lambda x: F.gelu(x).clip(-10, 10), "gelu_accurate": nn.gelu, "gelu_fast": _gelu_fast,
    "gelu_new": nn.gelu, "gelu_python": F.gelu, "gelu_python_tanh": nn.gelu, "gelu_pytorch_tanh": nn.gelu,
    "hardswish": F.hardswish,
    # the distribution function of a normal distribution; Ma et al., 2022, "Mega"
    "laplace": lambda x: 0.5 * (1 + torch.erf((x - 0.707107) / (0.282095 * math.sqrt(2)))),
    "leaky_relu": F.leaky_relu, "linear": lambda x: x, "mish": F.mish,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),  # the sigmoid form of GELU; Hendrycks & Gimpel, 2016
    "relu": F.relu, "relu2": lambda x: F.relu(x).square(),  # So et al., 2021, "Primer"
    "relu6": F.relu6, "sigmoid": torch.sigmoid, "silu": F.silu, "sqrtsoftplus": lambda x: F.softplus(x).sqrt(),
    "swish": F.silu, "tanh": torch.tanh,
})  # fmt: skip
_WITH_PARAMETERS = ("prelu", "xielu")


def activated(name: str, x: Tensor, w: Any) -> Tensor:
    """Apply the activation of a name to x, the input of a matrix w, keeping little for backward if w is frozen.

    A matrix that trains needs the result for its gradient, and relu's own backward pass reads it there. Beside a frozen
    one relu keeps only where the result is positive: a byte for each element.
    """
    eager = not (torch.compiler.is_dynamo_compiling() or in_transform())
    if name == "relu" and eager and x.requires_grad and not any(t.requires_grad for t in tree.leaves(w)):
        out: Tensor = _Relu.apply(x)  # type: ignore[no-untyped-call]
        return out
    return ACTIVATIONS[name](x)


class _Relu(torch.autograd.Function):
    """relu that saves where its result is positive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = F.relu(x)
        positive = out > 0
        ctx.save_for_backward(positive)
        ctx.save_for_forward(positive)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]  # type: ignore[no-any-return]

    @staticmethod
    def jvp(ctx: Any, dx: Tensor) -> Tensor:
        return dx * ctx.saved_tensors[0]  # type: ignore[no-any-return]


def activation_errors(verb: str, option: str, name: str) -> list[ShardingError]:
    """Return the error, if there is one, of an `option` that names an activation."""
    if name in ACTIVATIONS:
        return []
    why = ["it has parameters of its own, for which the model has no leaf"] if name in _WITH_PARAMETERS else []
    return [fail(f"{verb}: {option}={name!r}", *why, fix=f"one of {', '.join(ACTIVATIONS)}")]
