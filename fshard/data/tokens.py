"""Rows of tokens: windows of a long text, and texts padded to one length.

Legend: B batch, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fshard.errors import checked, fail, join_limited, raise_all
from fshard.random.orders import Integers, integers


@checked
def crop(text: Tensor | npt.NDArray[Any], starts: Integers, *, length: int) -> Tensor:
    """Slice windows out of a long 1-d array of tokens: starts [B] -> int64 [B, L].

    Reads only the pages of these windows from a memory map. Starts count tokens: `window * length` gives adjacent
    windows.

    >>> crop(np.arange(100, dtype=np.uint16), [0, 50], length=3)
    tensor([[ 0,  1,  2],
            [50, 51, 52]])

    Raises ShardingError for a window that reaches past either end.
    """
    if length < 0:
        raise fail(f"crop: length={length}", fix="0 or more")
    at = integers("crop: starts", starts)
    if text.ndim != 1 or at.ndim != 1:
        raise fail(f"crop: text {list(text.shape)}, starts {list(at.shape)}", fix="both have one dim")
    last = len(text) - length
    if at.size and (at.min() < 0 or at.max() > last):
        raise fail(f"crop: starts from {at.min()} to {at.max()} reach past the text",
                   f"{len(text)} - {length} = {last}", fix="0 <= start <= len(text) - length")  # fmt: skip
    positions = at[:, None] + np.arange(length)  # [B, L]
    if isinstance(text, Tensor):
        return text[torch.from_numpy(positions).to(text.device)].long()
    return torch.from_numpy(np.asarray(text[positions]).astype(np.int64))


@checked
def pad(
    rows: Sequence[Integers], *, length: int, value: int = 0, side: Literal["right", "left"] = "right"
) -> tuple[Tensor, Tensor]:
    """Pad texts to one length: (tokens int64 [B, L], mask bool [B, L]), the mask True on tokens.

    >>> tokens, mask = pad([[5, 6, 7], [8]], length=4)
    >>> tokens, mask.sum(1)
    (tensor([[5, 6, 7, 0],
            [8, 0, 0, 0]]), tensor([3, 1]))

    Args:
        length: the same on every rank, such as a bucket's length: the longest of the rows differs between ranks.
        value: the token of the padding.
        side: of the padding. Decoders generate from prompts that are padded on the left.

    Raises ShardingError listing the rows that are longer.
    """
    if length < 0:
        raise fail(f"pad: length={length}", fix="0 or more")
    arrays = [integers(f"pad: rows[{i}]", row) for i, row in enumerate(rows)]
    raise_all([fail(f"pad: rows[{i}] has the shape {list(a.shape)}", fix="one dim: its tokens")
               for i, a in enumerate(arrays) if a.ndim != 1])  # fmt: skip
    long = [f"rows[{i}] has {len(a)}" for i, a in enumerate(arrays) if len(a) > length]
    if long:
        raise fail(f"pad: rows are longer than length={length}", join_limited(long, 3),
                   fix="a larger length, or cut the rows: row[:length]")  # fmt: skip
    tokens = np.full((len(arrays), length), value, dtype=np.int64)
    mask = np.zeros((len(arrays), length), dtype=bool)
    for i, a in enumerate(arrays):
        at = slice(0, len(a)) if side == "right" else slice(length - len(a), length)
        tokens[i, at], mask[i, at] = a, True
    return torch.from_numpy(tokens), torch.from_numpy(mask)
