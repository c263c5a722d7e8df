"""Maps that move, and sum, in other dtypes than those that tensors are kept in: mixed precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .linear_maps import Map


@dataclass(frozen=True)
class Precision:
    """The dtypes of floating leaves: as they are `kept`, as they move and compute, and as their gradients are `summed`.

    Of half precision, ranks sum in float32 in any case, and round once; summed in float32, it is not rounded at all.
    """

    kept: torch.dtype
    computed: torch.dtype
    summed: torch.dtype

    @staticmethod
    def of(x: Tensor, computed: torch.dtype | None, summed: torch.dtype | None) -> Precision | None:
        """That of a leaf; `None` where it is as it is kept throughout."""
        if not x.is_floating_point():
            return None
        there = computed or x.dtype
        found = Precision(x.dtype, there, summed or there)
        return None if found == Precision(x.dtype, x.dtype, x.dtype) else found


@dataclass(frozen=True)
class CastMap(Map):
    """A map of tensors in another dtype: cast `before`, and `after`; likewise the transpose."""

    inner: Map = field(kw_only=True)
    before: torch.dtype = field(kw_only=True)
    after: torch.dtype = field(kw_only=True)
    back: tuple[torch.dtype, torch.dtype] = field(kw_only=True)

    @staticmethod
    def of(inner: Map, how: Precision) -> CastMap:
        return CastMap(inner.comm, inner.axes, inner=inner, before=how.computed, after=how.computed,
                      back=(how.summed, how.kept))  # fmt: skip

    @property
    def takes(self) -> str:  # type: ignore[override]
        return self.inner.takes

    @property
    def gives(self) -> str:  # type: ignore[override]
        return self.inner.gives

    @property
    def moves(self) -> bool:  # type: ignore[override]
        return self.inner.moves

    @property
    def verb(self) -> str:  # type: ignore[override]
        return self.inner.verb

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        return [y.to(self.after) for y in self.inner.run([x.to(self.before) for x in xs])]

    @property
    def transpose(self) -> Map:
        before, after = self.back
        return replace(self, inner=self.inner.transpose, before=before, after=after, back=(self.before, self.after))

    def batched(self, which: Sequence[bool]) -> Map:
        return replace(self, inner=self.inner.batched(which))

    def only(self, which: Sequence[int]) -> Map:
        return replace(self, inner=self.inner.only(which))

    def extent(self, xs: Sequence[Tensor]) -> Any:
        return self.inner.extent(xs)


__all__ = ["CastMap", "Precision"]
