"""Large arrays a block of rows at a time, so that what is computed of them stays in a core's cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fshard._core.region import device_type, is_scheduled


def row_blocks(most: Mapping[str, int], x: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors [..., any] of as many rows into blocks of rows, as matrices.

    A block has about `most[device]` elements of `x`; all of them where only types are checked.
    """
    n, width = math.prod(x.shape[:-1]), x.shape[-1]
    step = max(1, most.get(device_type(x), 1 << 24) // max(1, width) if is_scheduled() else n)
    return zip(*(torch.split(t.reshape(n, t.shape[-1]), step) for t in (x, *others)), strict=True)
