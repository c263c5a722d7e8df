"""A collective as its ranks describe it to one another, to find out that they are in different ones."""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard._core.protocol import Axes
from fshard._core.region import user_line
from fshard._core.transfers import call_site
from fshard.errors import ShardingError, fail, number_of

_DIGEST_BYTES, _HEADER_BYTES = 16, 256
_COUNTS = struct.Struct("<qq")  # at the end of a header: the rows that its rank sends to this one, and receives
_MOST_SHAPES = 6  # in a text
_DETAILS = {"permute": "pairs", "all_gather": "dims", "reduce_scatter": "dims"}


@dataclass(frozen=True, eq=False)
class Description:
    """Description of a collective over some axes, equal on every rank; errors show `text`."""

    axes: Axes
    text: str
    digest: bytes
    message: Tensor  # the header, uint8[n]: the digest, and the beginning of the text with its line
    number: int  # 16 bits of the digest

    @staticmethod
    def make(axes: Axes, text: str, *details: Any, where: object = None) -> Description:
        """Describe a collective, called at `where`; its ranks must have equal axes, text and details."""
        digest = hashlib.blake2b(repr((axes, text, details)).encode(), digest_size=_DIGEST_BYTES).digest()
        line = f", at {where}".encode()[: _HEADER_BYTES // 2] if where else b""
        header = digest + text.encode()[: _HEADER_BYTES - _DIGEST_BYTES - _COUNTS.size - len(line)] + line
        message = torch.frombuffer(bytearray(header.ljust(_HEADER_BYTES)), dtype=torch.uint8)
        return Description(axes, text, digest, message, int.from_bytes(digest[:2], "big"))

    def differs(self, header: bytes) -> bool:
        """Return whether the header of another rank is of another collective."""
        return not header.startswith(self.digest)

    def message_with(self, counts: tuple[int, int]) -> Tensor:
        """Return the header for a rank that is sent the first number of rows, and sends the second."""
        message = self.message.clone()
        message[-_COUNTS.size :] = torch.frombuffer(bytearray(_COUNTS.pack(*counts)), dtype=torch.uint8)
        return message


def counts_in(header: bytes) -> tuple[int, int]:
    """Return the numbers of rows that the rank of a header sends, and receives."""
    sent, received = _COUNTS.unpack(header[-_COUNTS.size :])
    return sent, received


def counts_differ(source: int, target: int, sent: int, received: int) -> ShardingError:
    """Return the error of two ranks, by their positions, which do not expect the same number of rows."""
    sends = f"rank {source} sends {number_of(sent, 'row')} to rank {target}, which expects {received}"
    return fail(f"all_to_all_rows: {sends}", *user_line(),
                fix=f"make send[{target}] of rank {source} equal receive[{source}] of rank {target}; without receive= "
                    "the ranks exchange their counts")  # fmt: skip


@functools.lru_cache(maxsize=4096)  # a step of training has the same transfers each time
def describe_transfer(
    op: str, axes: Axes, dtype: torch.dtype, shapes: tuple[torch.Size, ...], details: tuple[Any, ...] = ()
) -> Description:  # fmt: skip
    """Describe a transfer of tensors of these shapes, and its pairs of ranks or dims."""
    sizes = f"{sum(shape.numel() for shape in shapes):,} elements in {len(shapes)} tensors"
    if len(shapes) <= _MOST_SHAPES:
        sizes = " + ".join(str(list(shape)) for shape in shapes)
    along = f", {_DETAILS[op]} {list(details[:_MOST_SHAPES])}" if op in _DETAILS else ""
    text = f"{op} over {', '.join(axes)} of {str(dtype).removeprefix('torch.')} {sizes}{along}"
    return Description.make(axes, text, shapes, details)


def disagreement(mine: Description, headers: Mapping[int, bytes | None]) -> ShardingError:
    """Return the error of ranks that are in different collectives, by position and header; None is this rank."""
    over, rows, site = ", ".join(mine.axes), [], call_site()
    for i, header in headers.items():
        if header is None:
            text = mine.text if site is None else f"{mine.text}, at {site}"
        else:
            text = header[_DIGEST_BYTES : -_COUNTS.size].decode(errors="ignore").rstrip()
        rows.append(f"{over}={i}  {text}")
    return fail("the ranks disagree on a collective", *rows,
                fix="every rank must call the same collectives in the same order, on equal shapes")  # fmt: skip
