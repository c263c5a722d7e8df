"""Deferred leaves: shape, dtype and an initializer that can fill any part of the leaf."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fshard.errors import checked, fail
from fshard.spec import Box, describe


@runtime_checkable
class Initializer(Protocol):
    """Fills any box of a leaf. The value of an element depends on the key and its global index alone."""

    def fill(self, key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the part of a leaf of global `shape` that `box` selects."""


@dataclass(frozen=True)
class Scope:
    """A leaf's name in its module, and the names of the leaves of that module whose draws determine its values.

    A copy of a leaf has the same values, so it is filled with the keys of `owners` and not with its own: `fill` gets
    those, int64[owners, 2]. The path of an owner is that of the leaf, with the owner's name in place of `name`.
    """

    name: str
    owners: tuple[str, ...]


@checked
@dataclass(frozen=True)
class Deferred:
    """A described leaf, without storage or values: made by `fs.init.*` or `like`, filled by `materialize`.

    >>> fs.init.normal((64, 256), std=0.02)
    f32[64, 256] = normal(std=0.02)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    init: Initializer
    scope: Scope | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.shape)
        if any(not isinstance(n, int) or n < 0 for n in shape):
            raise fail(f"Deferred: {list(shape)} is not a shape", fix="sizes are integers of 0 or more")
        object.__setattr__(self, "shape", shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel() * self.dtype.itemsize

    def to(self, dtype: torch.dtype) -> Deferred:
        """Describe the same leaf, rounded to another dtype when it is filled."""
        return replace(self, dtype=dtype)

    def __repr__(self) -> str:
        return f"{describe(self.dtype, self.shape)} = {describe_initializer(self.init)}"


def describe_initializer(init: object) -> str:
    """Describe an initializer by its own `describe()`, or by name and non-default fields: `trunc_normal(std=0.02)`."""
    own = getattr(init, "describe", None)
    if callable(own):
        return str(own())
    name = "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(type(init).__name__))
    if not is_dataclass(init):
        return name
    changed = [(f.name, getattr(init, f.name)) for f in fields(init) if getattr(init, f.name) != f.default]
    return f"{name}({', '.join(f'{n}={x:.4g}' if isinstance(x, float) else f'{n}={x!r}' for n, x in changed)})"
