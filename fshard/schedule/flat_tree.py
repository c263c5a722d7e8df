"""A tree taken apart, as the block loop passes it on: its tensors, and which of them are being differentiated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fshard import tree


@dataclass
class FlatTree:
    """A tree taken apart: its leaves, where the tensors are, and which of these are being differentiated."""

    leaves: list[Any]
    treedef: Any
    where: list[int]
    live: list[bool]

    @staticmethod
    def of(x: Any) -> FlatTree:
        leaves, treedef = tree.flatten(x)
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        live = [torch.is_grad_enabled() and leaves[i].requires_grad for i in where]
        return FlatTree([x.detach() if isinstance(x, Tensor) else x for x in leaves], treedef, where, live)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.leaves[i] for i in self.where]

    def with_tensors(self, tensors: Sequence[Tensor]) -> FlatTree:
        """The same with other tensors."""
        full = list(self.leaves)
        for i, x in zip(self.where, tensors, strict=True):
            full[i] = x
        return replace(self, leaves=full)

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The tree with other tensors."""
        return tree.unflatten(self.treedef, self.with_tensors(tensors).leaves)

    def emptied(self) -> FlatTree:
        """The same without its tensors."""
        return replace(self, leaves=[None if isinstance(x, Tensor) else x for x in self.leaves])

    def spread(self, found: Iterator[Tensor | None]) -> list[Tensor | None]:
        """One entry for each tensor: the next of `found` where it is live."""
        return [next(found) if live else None for live in self.live]


__all__ = ["FlatTree"]
