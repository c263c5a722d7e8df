"""Dtypes that have gradients."""

from __future__ import annotations

from torch import Tensor


def differentiable_dtype(x: Tensor) -> bool:
    """Whether a tensor is of a dtype that has gradients."""
    return x.is_floating_point() or x.is_complex()
