"""Deferred leaves: shape, dtype and an initializer that can fill any part of the leaf."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fshard._core.display import page, table
from fshard.errors import checked, fail
from fshard.spec import Box, Sized, describe, size


@runtime_checkable
class Initializer(Protocol):
    """Fills any box of a leaf. The value of an element depends only on the key and its global index.

    >>> isinstance(fs.init.normal((3,)).init, Initializer)
    True
    """

    def fill(self, key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the part of a leaf of global `shape` that `box` selects."""


@dataclass(frozen=True)
class Scope:
    """Name of a leaf in the tree that `fs.defer` returned, such as `params.h.0.weight`, which is part of its key.

    So a subtree of that tree, or a larger tree that contains it, has the same values. If the values are drawn by other
    leaves, `owners` are their names: a copy of a leaf has the values of that leaf. It is filled with the keys of the
    owners, int64[owners, 2].

    >>> Deferred((3,), torch.float32, Normal(), Scope("dense")).scope
    Scope(name='dense', owners=())
    """

    name: str
    owners: tuple[str, ...] = ()

    def module_path(self, path: str) -> str | None:
        """Return the path of the module, with a dot at its end, from the path of the leaf; None if it has no name.

        >>> scope = Scope("params.h.0.weight")
        >>> [scope.module_path(p) for p in ("params.h.0.weight", "encoder.h.0.weight", "0.weight", "other.weight")]
        ['', 'encoder.', '', None]
        """
        kind, _, name = self.name.partition(".")
        if f".{path}".endswith(f".{self.name}"):
            return path.removesuffix(self.name)
        if f".{path}".endswith(f".{name}"):
            module = path.removesuffix(name)
            # Owners of the other kind may be elsewhere: `{"a": tree["params"], "b": tree["buffers"]}`.
            elsewhere = module and any(not owner.startswith(f"{kind}.") for owner in self.owners)
            return None if elsewhere else module
        return "" if not path or self.name.endswith(f".{path}") else None


@checked
@dataclass(frozen=True)
class Deferred(Sized):
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

    def to(self, dtype: torch.dtype) -> Deferred:
        """Describe the same leaf, rounded to another dtype when it is filled."""
        return replace(self, dtype=dtype)

    def __repr__(self) -> str:
        return f"{describe(self)} = {describe_initializer(self.init)}"

    def _repr_html_(self) -> str:
        cells = describe(self), describe_initializer(self.init), size(self.nbytes)
        return page(table([cells], head=("described leaf", "initializer", "bytes"), align="llr"))


def describe_initializer(init: object) -> str:
    """Describe an initializer by its `describe()`, or by name and non-default fields: `trunc_normal(std=0.02)`.

    >>> describe_initializer(Normal(0.0, 0.02))
    'normal(std=0.02)'
    """
    describe_ = getattr(init, "describe", None)
    if callable(describe_):
        return str(describe_())
    name = "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(type(init).__name__))
    if not is_dataclass(init):
        return name
    changed = [(f.name, getattr(init, f.name)) for f in fields(init) if getattr(init, f.name) != f.default]
    return f"{name}({', '.join(f'{n}={x:.4g}' if isinstance(x, float) else f'{n}={x!r}' for n, x in changed)})"
