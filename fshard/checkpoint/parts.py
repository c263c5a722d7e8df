"""Part files: the chunks that one rank writes, and slices of them that any rank reads and checks.

A chunk is a box of a leaf, contiguous, at byte `start` of its file. It has a CRC-32 for each block of at most 1 MiB: a
rank reads and checks only the blocks that overlap the slices it needs. The manifest has the CRC-32 of the header. The
files are plain safetensors; complex numbers have a last dim of 2 in them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from zlib_ng.zlib_ng import crc32  # equal to zlib's, at ten times its speed

from fshard._core.files import safetensors
from fshard._core.files.io import bytes_of, file_state, open_file, write_errors, write_file
from fshard._core.files.url import AnyPath
from fshard.errors import ShardingError, fail
from fshard.spec import Box, box_shape, full_box, overlap, relative_box

BLOCK_BYTES = 1 << 20  # part of the format: another size needs another version
PART_NAME = re.compile(r"part-\d{5,}(?:\.(\d+))?\.safetensors")  # and the generation, if not 0
RESTORE_ANOTHER = "restore another checkpoint"  # the fix for a damaged one
UNCHANGED = "the last complete checkpoint is unchanged"

_COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*safetensors.DTYPES.values(), *_COMPLEX)}


@dataclass(frozen=True)
class Chunk:
    """A box of a leaf, and the position and checksums of its bytes."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    crc32: tuple[int, ...]

    @property
    def box(self) -> Box:
        return tuple(slice(a, a + n) for a, n in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True)
class PartFile:
    """Size and header of a part file."""

    bytes: int
    header_bytes: int
    header_crc32: int


def blocks(shape: Sequence[int], itemsize: int, nbytes: int | None = None) -> Iterator[Box]:
    """Split a contiguous tensor into boxes of at most `nbytes`, or `BLOCK_BYTES`, in the order of their bytes.

    >>> [box[0] for box in blocks((1000, 300), 4)]
    [slice(0, 873, None), slice(873, 1000, None)]
    """
    if 0 in shape:
        return
    outer, n, inner, rows = _block_layout(shape, itemsize, nbytes)
    for index in itertools.product(*map(range, outer)):
        for start in range(0, n, rows):
            box = *(slice(i, i + 1) for i in index), slice(start, min(start + rows, n)), *full_box(inner)
            yield box[1:]


def _block_layout(
    shape: Sequence[int], itemsize: int, limit: int | None = None
) -> tuple[Sequence[int], int, Sequence[int], int]:
    """Return (outer, n, inner, rows) of (1, *shape): a block is `rows` indices of a dim of `n`, and all of `inner`."""
    shape, size, limit = (1, *shape), itemsize, limit or BLOCK_BYTES
    dim = len(shape) - 1
    while dim and size * shape[dim] <= limit:
        size *= shape[dim]
        dim -= 1
    return shape[:dim], shape[dim], shape[dim + 1 :], limit // size


def block_count(shape: Sequence[int], itemsize: int) -> int:
    if 0 in shape:
        return 0
    outer, n, _, rows = _block_layout(shape, itemsize)
    return math.prod(outer) * -(-n // rows)


def _block_ranges(shape: Sequence[int], itemsize: int, stop: int = 0) -> Iterator[tuple[Box, int, int]]:
    """Yield the blocks of a contiguous tensor that begins at byte `stop`, each with the range of its bytes."""
    for box in blocks(shape, itemsize):
        start, stop = stop, stop + math.prod(box_shape(box)) * itemsize
        yield box, start, stop


@dataclass(frozen=True)
class Piece:
    """A box of the leaf at a dotted path, with its values, for `write_part`."""

    path: str
    box: Box
    values: Tensor

    def __str__(self) -> str:
        return f"{self.path}[{', '.join(f'{s.start}:{s.stop}' for s in self.box)}]"


def part_name(rank: int, generation: int) -> str:
    return f"part-{rank:05d}{f'.{generation}' if generation else ''}.safetensors"


def write_part(path: AnyPath, pieces: Sequence[Piece], digest: str = "") -> tuple[PartFile, list[tuple[str, Chunk]]]:
    """Write a safetensors file, one piece at a time in host memory, and return (path, chunk) for each piece.

    `digest`: the `leaves_digest` of the checkpoint, for the header.
    """
    pieces = sorted(pieces, key=lambda p: (-p.values.dtype.itemsize, str(p)))  # widest first: each tensor is aligned
    table = {}
    for p in pieces:
        dtype, shape = p.values.dtype, box_shape(p.box)
        table[str(p)] = (_COMPLEX[dtype], (*shape, 2)) if dtype in _COMPLEX else (dtype, shape)
    header = safetensors.encode_header(table, {"leaves_blake2b": digest})
    chunks: list[tuple[str, Chunk]] = []

    def contents() -> Iterator[bytes | memoryview]:
        start = len(header)
        yield header
        for p in pieces:
            data, shape = bytes_of(p.values), box_shape(p.box)
            ranges = _block_ranges(shape, p.values.dtype.itemsize)
            checksums = tuple(crc32(data[a:b]) for _, a, b in ranges)
            chunks.append((p.path, Chunk(tuple(s.start for s in p.box), shape, path.name, start, checksums)))
            start += len(data)
            yield data

    with write_errors("save", path, UNCHANGED):
        write_file(path, contents())
    size = len(header) + sum(p.values.nbytes for p in pieces)
    return PartFile(size, len(header), crc32(header)), chunks


def check_part(path: AnyPath, part: PartFile) -> list[ShardingError]:
    """Compare the size and the header of a part file with the manifest; return the differences as errors."""
    try:
        with open_file(path, RESTORE_ANOTHER) as f:
            size, _ = file_state(f)
            header = f.read(min(part.header_bytes, size))
    except ShardingError as e:
        return [e]
    if size != part.bytes:
        problem = "is cut short" if size < part.bytes else "is too long"
        return [fail(f"{path}: {problem}", fix=RESTORE_ANOTHER, expected=f"{part.bytes} bytes", got=f"{size} bytes")]
    if crc32(header) != part.header_crc32:
        return [fail(f"{path}: the header is damaged", fix=RESTORE_ANOTHER,
                     expected=f"crc32 {part.header_crc32:08x}", got=f"{crc32(header):08x}")]  # fmt: skip
    return []


def read_chunk(f: Any, leaf: str, chunk: Chunk, wanted: Sequence[tuple[Box, Tensor]]) -> None:
    """Copy boxes of a chunk into tensors: `wanted` has pairs of a box of the chunk and its destination.

    A block is read once, and only if a box overlaps it; straight into its destination where that is contiguous.
    Raises ShardingError if the checksum of a block differs.
    """
    dtype = wanted[0][1].dtype
    ranges = _block_ranges(chunk.shape, dtype.itemsize, chunk.start)
    for (block, start, stop), expected in zip(ranges, chunk.crc32, strict=True):
        overlaps = [(common, box, out) for box, out in wanted if (common := overlap(block, box)) is not None]
        if not overlaps:
            continue
        common, box, out = overlaps[0]
        values = out[relative_box(common, box)]
        in_place = common == block and values.is_cpu and values.is_contiguous()
        if not in_place:
            values = torch.empty(box_shape(block), dtype=dtype)
        data = bytes_of(values)
        f.seek(start)
        count, got = f.readinto(data), crc32(data)
        if count != len(data) or got != expected:
            raise fail(f"{leaf}: the data is damaged", f"in {f.name}, bytes {start} to {stop}",
                       fix=RESTORE_ANOTHER, expected=f"crc32 {expected:08x}", got=f"{got:08x}")  # fmt: skip
        for common, box, out in overlaps[in_place:]:
            out[relative_box(common, box)].copy_(values[relative_box(common, block)])


def stream(directory: AnyPath, leaf: str, shape: Sequence[int], dtype: torch.dtype, chunks: Sequence[Chunk],
           nbytes: int = 1 << 26) -> Iterator[Tensor]:  # fmt: skip
    """Read a leaf in pieces of at most `nbytes`, in the order of their bytes.

    A block of a chunk that reaches into two pieces is read for each: with much smaller pieces, many times.
    """
    for box in blocks(shape, dtype.itemsize, nbytes):
        out = torch.empty(box_shape(box), dtype=dtype)
        for chunk in chunks:
            if (common := overlap(chunk.box, box)) is not None:
                with open_file(directory / chunk.file, RESTORE_ANOTHER) as f:
                    read_chunk(f, leaf, chunk, [(relative_box(common, chunk.box), out[relative_box(common, box)])])
        yield out
