"""The base of all adapted matrices: the matrix that they adapt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fshard import nn
from fshard._core.weight import Leaf, Part, Weight
from fshard.errors import fail
from fshard.spec import P


def sum_of_factors(leaf: Leaf, a: Tensor, b: Tensor) -> Tensor:
    """Return a b in the shape of a summed leaf: [.., in, r], [r, .., out] -> [.., in, out], or [.., out, in]."""
    ab = a @ b.movedim(0, -2)
    return ab if leaf.layout == "sum_io" else ab.mT


class AdaptedWeight(Weight):
    """Base class of a matrix `base`, a tensor or a Weight, with a few numbers that train."""

    base: Any  # [in.., out..]; flattened as its user asks
    leaf: Leaf
    inputs: int  # the number of input dims of the base, as flattened now

    @property
    def shape(self) -> torch.Size:
        shape: torch.Size = self.base.shape
        return shape

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.base.dtype
        return dtype

    def base_parts(self, spec: P | None, shape: Sequence[int] | None) -> list[Part]:
        """Return the parts of the base: several if it is a Weight."""
        return self.base.parts(spec, shape) if isinstance(self.base, Weight) else [(spec, shape)]  # type: ignore[list-item]

    def flatten(self, start: int = 0, end: int = -1) -> Self:
        start, end, inputs = self.flattened(self.inputs, start, end)
        return replace(self, base=self.base.flatten(start, end), inputs=inputs)  # type: ignore[type-var]

    @property
    def layout(self) -> str | None:
        """The order of the dims of the base, as `Leaf` has it."""
        return self.leaf.layout

    def base_linear(self, x: Tensor, b: Tensor | None) -> Tensor:
        """Compute x @ base + b; of a module a base is stored [out, in]."""
        if self.layout == "oi" and isinstance(self.base, Tensor):
            return F.linear(x, self.base, b)
        if isinstance(self.base, Weight) and (stored := getattr(self.base, "layout", None)) != self.layout:
            name, ours = self.leaf.module or "the base", _DIMS[self.layout]
            raise fail(f"linear: {name} is {ours}, and its base was quantized as {_DIMS[stored]}",
                       fix="pass one of= to lora.quantize and to lora.apply: of a module, the function that fs.defer "
                           "returned")  # fmt: skip
        return nn.linear(x, self.base, b)


_DIMS = {"io": "[in, out]", "oi": "[out, in]", "table": "a table", None: "no matrix"}
