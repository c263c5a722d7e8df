"""A collective as its ranks describe it to one another, to find out that they are in different ones."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard.errors import ShardingError, fail

from .protocol import Axes
from .record import call_site

_DIGEST_BYTES, HEADER_BYTES = 16, 256
_MOST_SIZES = 6  # in a text


@dataclass(frozen=True, eq=False)
class Description:
    """Description of a collective over some axes, equal on every rank; `text` is that of errors."""

    axes: Axes
    text: str
    header: bytes  # a digest, and the beginning of the text
    message: Tensor  # the header, in the dtype of the transfer
    number: int  # 16 bits of the digest

    @staticmethod
    def of(axes: Axes, text: str, *details: Any, dtype: torch.dtype = torch.uint8) -> Description:
        """Describe a collective; its ranks must have equal axes, text and details."""
        digest = hashlib.blake2b(repr((axes, text, details)).encode(), digest_size=_DIGEST_BYTES).digest()
        header = (digest + text.encode())[:HEADER_BYTES].ljust(HEADER_BYTES)
        message = torch.frombuffer(bytearray(header), dtype=torch.uint8 if dtype == torch.bool else dtype)
        return Description(axes, text, header, message, int.from_bytes(digest[:2], "big"))


@functools.lru_cache(maxsize=4096)  # a step of training has the same transfers each time
def describe_transfer(
    op: str, axes: Axes, dtype: torch.dtype, sizes: tuple[int, ...], pairs: tuple[tuple[int, int], ...] = ()
) -> Description:  # fmt: skip
    """Describe a transfer of parts of these sizes, in elements; the list of the sizes is the same on every rank."""
    elements = f"{sum(sizes):,}"
    if 1 < len(sizes) <= _MOST_SIZES:
        elements = " + ".join(f"{n:,}" for n in sizes)
    elif len(sizes) > 1:
        elements += f" in {len(sizes)} parts"
    along = f", pairs {pairs}" if op == "permute" else ""
    text = f"{op} over {', '.join(axes)} of {str(dtype).removeprefix('torch.')}, {elements} elements{along}"
    return Description.of(axes, text, sizes, pairs, dtype=dtype)


def header_of(message: Tensor) -> bytes:
    """Return the header with which a received message begins."""
    return ctypes.string_at(message.data_ptr(), HEADER_BYTES)


def disagreement(mine: Description, headers: Sequence[bytes | None]) -> ShardingError:
    """Return the error of ranks that are in different collectives, by their headers; None is this rank."""
    over, rows, site = ", ".join(mine.axes), [], call_site()
    for i, header in enumerate(headers):
        if header is None:
            text = mine.text if site is None else f"{mine.text}, at {site}"
        else:
            text = header[_DIGEST_BYTES:].decode(errors="replace").rstrip()
        rows.append(f"{over}={i}  {text}")
    return fail("the ranks disagree on a collective", *rows,
                fix="every rank must call the same collectives in the same order, on equal shapes")  # fmt: skip
