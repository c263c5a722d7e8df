"""Part files: the chunks that one rank wrote, and how any slice of one is read and checked.

A chunk is a box of a leaf, contiguous, at byte `start` of its file. It is checked by blocks of at most 1 MiB,
one CRC-32 each, so that whoever needs a slice reads and checks the blocks it lies in and no others. With the
header's checksum every byte of a file is covered. The files are plain safetensors, for any tool to look at;
complex numbers have a last dim of 2 there. They are written here, and not by that package, to have one chunk
in memory at a time.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fshard.errors import ShardingError, fail
from fshard.spec import Box, box_shape, relative_box

BLOCK = 1 << 20  # part of the format: another size needs another version
NAME = re.compile(r"part-\d{5,}(\.\d+)?\.safetensors")
ELSE = "restore another checkpoint"

_SAFETENSORS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "F32", torch.complex128: "F64",
}  # fmt: skip
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _SAFETENSORS}


@dataclass(frozen=True)
class Chunk:
    """A box of a leaf, and where its bytes are."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    crc32: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """The size of a part file, and its header's."""

    bytes: int
    header_bytes: int
    header_crc32: int


def blocks(shape: Sequence[int], itemsize: int) -> Iterator[Box]:
    """The boxes, each of at most `BLOCK` bytes, that follow each other in a contiguous tensor.

    >>> [box[0] for box in blocks((1000, 300), 4)]
    [slice(0, 873, None), slice(873, 1000, None)]
    """
    if 0 in shape:
        return
    dim, rows = _cut(shape, itemsize)
    rest = tuple(slice(0, n) for n in shape[dim:])
    if not dim:
        yield rest
        return
    n = shape[dim - 1]
    for lead in itertools.product(*(range(m) for m in shape[: dim - 1])):
        for at in range(0, n, rows):
            yield *(slice(i, i + 1) for i in lead), slice(at, min(at + rows, n)), *rest


def _cut(shape: Sequence[int], itemsize: int) -> tuple[int, int]:
    """(d, rows): `rows` entries of dim d - 1, with all dims from d on, make a block; d = 0 where one does."""
    dim, size = len(shape), itemsize
    while dim and size * shape[dim - 1] <= BLOCK:
        dim -= 1
        size *= shape[dim]
    return dim, BLOCK // size


def count(shape: Sequence[int], itemsize: int) -> int:
    """How many `blocks` there are."""
    if 0 in shape:
        return 0
    dim, rows = _cut(shape, itemsize)
    if not dim:
        return 1
    return math.prod(shape[: dim - 1]) * -(-shape[dim - 1] // rows)


@dataclass(frozen=True)
class Piece:
    """What `write_part` writes: a chunk that `read` gives when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def part_name(rank: int, generation: int) -> str:
    return f"part-{rank:05d}{f'.{generation}' if generation else ''}.safetensors"


def write_part(path: Path, pieces: Sequence[Piece]) -> tuple[Part, list[tuple[int, tuple[int, ...]]]]:
    """Write a safetensors file, one piece in memory at a time. Gives (start, checksums) of each."""
    header: dict[str, Any] = {}
    at = 0
    for p in pieces:
        size = math.prod(p.shape) * p.dtype.itemsize
        shape = [*p.shape, 2] if p.dtype.is_complex else [*p.shape]
        header[p.name] = {"dtype": _SAFETENSORS[p.dtype], "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    spots = []
    try:
        with open(path, "xb") as f:
            f.write(head)
            start = len(head)
            for p in pieces:
                data = bytes_of(p.read())
                spots.append((start, tuple(_crc32s(data, p.shape, p.dtype.itemsize))))
                f.write(data)
                start += len(data)
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        raise unwritable(path, e) from e
    return Part(len(head) + at, len(head), zlib.crc32(head)), spots


def bytes_of(x: Tensor) -> memoryview:
    x = x.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat = x.as_strided((x.numel(),), (1,))  # one element counts as contiguous whatever its strides
    return flat.view(torch.uint8).numpy().data


def _crc32s(data: memoryview, shape: Sequence[int], itemsize: int) -> Iterator[int]:
    at = 0
    for box in blocks(shape, itemsize):
        size = math.prod(box_shape(box)) * itemsize
        yield zlib.crc32(data[at : at + size])
        at += size


def check_part(path: Path, part: Part) -> list[ShardingError]:
    """What is wrong with a part file, by its size and its header; empty if nothing."""
    where = f"{path}"
    try:
        with open(path, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            head = f.read(part.header_bytes)
    except OSError as e:
        return [fail(f"{where}: cannot be read", str(e.strerror), fix=ELSE)]
    if size != part.bytes:
        why = "is cut short" if size < part.bytes else "is too long"
        return [fail(f"{where}: {why}", fix=ELSE, expected=f"{part.bytes} bytes", got=f"{size} bytes")]
    if zlib.crc32(head) != part.header_crc32:
        return [fail(f"{where}: the header is damaged", fix=ELSE,
                     expected=f"crc32 {part.header_crc32:08x}", got=f"{zlib.crc32(head):08x}")]  # fmt: skip
    return []


def read_chunk(f: io.BufferedReader, leaf: str, chunk: Chunk, wanted: Sequence[tuple[Box, Tensor]]) -> None:
    """Copy slices of a chunk, each pair a box of it and where that goes, by way of the blocks they lie in.

    A block is read once, and checked before it is used. Raises ShardingError, naming leaf and file, where its
    checksum differs.
    """
    dtype = wanted[0][1].dtype
    room = torch.empty(min(BLOCK, math.prod(chunk.shape) * dtype.itemsize), dtype=torch.uint8)
    at = chunk.start
    for block, crc32 in zip(blocks(chunk.shape, dtype.itemsize), chunk.crc32, strict=True):
        start, size = at, math.prod(box_shape(block)) * dtype.itemsize
        at += size
        shared = [(_common(block, box), box, out) for box, out in wanted]
        shared = [(common, box, out) for common, box, out in shared if all(s.start < s.stop for s in common)]
        if not shared:
            continue
        f.seek(start)
        got = f.readinto(room.numpy().data[:size])
        crc = zlib.crc32(room.numpy().data[:size])
        if got != size or crc != crc32:
            raise fail(f"{leaf}: the data is damaged", f"in {f.name}, bytes {start} to {start + size}",
                       fix=ELSE, expected=f"crc32 {crc32:08x}", got=f"{crc:08x}")  # fmt: skip
        values = room[:size].view(dtype).view(box_shape(block))
        for common, box, out in shared:
            out[relative_box(common, box)] = values[relative_box(common, block)]


def _common(a: Box, b: Box) -> Box:
    return tuple(slice(max(s.start, t.start), min(s.stop, t.stop)) for s, t in zip(a, b, strict=True))


def unwritable(path: Path, e: OSError) -> ShardingError:
    return fail(f"save: cannot write {path}", str(e.strerror), fix="the last complete checkpoint is as it was")
