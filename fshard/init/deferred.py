"""A leaf that is only described: shape, dtype, and how to fill any part of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from fshard.errors import fail
from fshard.spec import Box, describe


class Initializer(Protocol):
    """Fills any box of a leaf. The values of an element depend on the key and its global index alone."""

    def fill(self, key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The part of a leaf of global `shape` that `box` selects."""


@dataclass(frozen=True)
class Scope:
    """What a leaf is called in the module it is a part of, and the leaves of that module whose draws it is made of.

    A copy of a leaf has its values, so it is filled by the keys of `owners`, not by its own: `fill` is given those,
    int64[owners, 2]. Their paths are the leaf's own, with another name in place of `name` at its end.
    """

    name: str
    owners: tuple[str, ...]


@dataclass(frozen=True)
class Deferred:
    """A described leaf: no storage, no values. `materialize` makes it; `fs.init.*` and `like` describe it.

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
        """The same leaf, rounded to another dtype when it is made."""
        return replace(self, dtype=dtype)

    def __repr__(self) -> str:
        return f"{describe(self.dtype, self.shape)} = {describe_initializer(self.init)}"


def describe_initializer(init: object) -> str:
    """`trunc_normal(std=0.02)`: an initializer's name and what differs from its defaults, or its own `describe()`."""
    own = getattr(init, "describe", None)
    if callable(own):
        return str(own())
    name = "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(type(init).__name__))
    if not is_dataclass(init):
        return name
    given = [(f.name, getattr(init, f.name)) for f in fields(init) if getattr(init, f.name) != f.default]
    return f"{name}({', '.join(f'{n}={x:.4g}' if isinstance(x, float) else f'{n}={x!r}' for n, x in given)})"
