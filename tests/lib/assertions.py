"""Assertions that many tests make: two trees are equal, a call raises a ShardingError with a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs


def error_text(f: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the text of the ShardingError that a call raises."""
    with pytest.raises(fs.ShardingError) as e:
        f(*args, **kwargs)
    return str(e.value)


def assert_same(got: Any, want: Any, where: str = "", **tolerance: float) -> None:
    """Assert that two trees have the same structure, dtypes and shapes, and bits, or values within a tolerance.

    Placed leaves are compared as whole tensors. `tolerance` is that of `torch.testing.assert_close`, for all leaves.
    """
    assert fs.tree.structure(got) == fs.tree.structure(want), where
    for (path, a), b in zip(fs.tree.leaves_with_path(got), fs.tree.leaves(want), strict=True):
        a, b = (fs.device_get(x) if isinstance(x, fs.Sharded) else x for x in (a, b))
        at = f"{where} {fs.tree.show('tree', path)}"
        if tolerance or not isinstance(a, Tensor):
            torch.testing.assert_close(a, b, **tolerance, equal_nan=True, msg=lambda m, at=at: f"{at}: {m}")
        else:
            assert (a.dtype, a.shape) == (b.dtype, b.shape), at
            assert torch.equal(_bytes(a), _bytes(b)), f"{at}: {a} is not {b}"


def _bytes(x: Tensor) -> Tensor:
    return (
        x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    )
