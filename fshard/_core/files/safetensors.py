"""Headers of safetensors files, for checkpoints and for Hugging Face folders.

    8 bytes           length of the header, little-endian
    header            JSON: name -> {"dtype": "F32", "shape": [2, 3], "data_offsets": [start, stop]}
    tensors           row-major, end to end, in the order of their offsets

The package `safetensors` cannot write only a header, for tensors that several processes write later. Its errors name
at most one damaged tensor, and no duplicate name. It slices a memory map: for an eighth of the columns of a 128 MiB
tensor it reads 128 MiB from a cold disk, and `preadv` at the offsets in the header reads 16 MiB. Source of the format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fshard.errors import ShardingError, fail

from .io import file_state, open_file
from .url import AnyPath

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the format's limit
# Of a tensor: most operations of torch take 64 dims, its bytes are counted by 63 bits, and its name is a path.
MAX_DIMS, MAX_ELEMENTS, MAX_NAME = 64, 1 << 59, 512


@dataclass(frozen=True)
class HeaderEntry:
    """A tensor in a file: `start` is its first byte, `dtype` is None if torch has no dtype for `dtype_name`.

    `file_size` and `file_time` are the file's state (`file_state`) when the header was read. `file` is absolute: the
    values may be read later from another working directory. `strides` are set for a tensor that is not row-major, which
    a file of torch may have.
    """

    file: AnyPath
    file_size: int
    file_time: int
    name: str
    dtype_name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        assert self.dtype is not None
        return math.prod(self.shape) * self.dtype.itemsize


def dtype_name(dtype: torch.dtype) -> tuple[str, torch.dtype | None]:
    """Return the name of a dtype in a header, and the dtype; None if safetensors has none."""
    return (_NAMES[dtype], dtype) if dtype in _NAMES else (str(dtype).removeprefix("torch."), None)


@dataclass(frozen=True)
class Header:
    """The tensors of a file, an error for each that is damaged, and the metadata of the file."""

    entries: list[HeaderEntry]
    errors: list[ShardingError]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def aliases(self) -> dict[str, str]:
        """Other names of tensors, as `safetensors.torch.save_model` writes them: the metadata has name -> tensor."""
        names = {entry.name for entry in self.entries}
        return {alias: name for alias, name in self.metadata.items() if name in names and alias not in names}


def encode_header(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the bytes before the first tensor of a file with `tensors`, name -> (dtype, shape), in that order.

    They are padded to a multiple of 8: tensors are aligned if the dtypes go from the widest to the narrowest.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(path: AnyPath) -> Header:
    """Read a header; its errors name tensors that are cut short, out of place or of another size.

    Raises ShardingError if the header itself cannot be read.
    """
    with open_file(path) as f:
        size, time = file_state(f)
        length = int.from_bytes(f.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise fail(f"{path}: is not safetensors, or is cut short", f"its first 8 bytes announce a header of "
                       f"{length} bytes, the file has {size}", fix="copy it again")  # fmt: skip
        text = f.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_without_duplicates)
        if not isinstance(header, dict):
            raise ValueError(f"it is a {type(header).__name__}")
        metadata = header.pop("__metadata__", None)
        texts = metadata if isinstance(metadata, dict) else {}
        for name in (*header, *texts):
            check_name(name)
        fields = [(name, *_fields(value)) for name, value in header.items()]
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise fail(f"{path}: the header is damaged", f"{type(e).__name__}: {e}", fix="copy it again") from e
    entries, errors = [], []
    texts = {k: v for k, v in texts.items() if isinstance(v, str)}
    first, available, end = 8 + length, size - 8 - length, 0
    where = path.absolute()
    for name, dtype_name, shape, start, stop in sorted(fields, key=lambda f: f[3:]):
        label, dtype = f"{path}: {name!r}", DTYPES.get(dtype_name)
        if stop > available:
            errors.append(fail(f"{label} is cut short", f"it ends at byte {first + stop}, the file has {size}",
                               fix="copy the file again"))  # fmt: skip
        if dtype is not None and stop - start != math.prod(shape) * dtype.itemsize:
            errors.append(fail(f"{label} has the bytes of another shape", f"{stop - start} bytes, where {dtype_name}"
                               f"{list(shape)} takes {math.prod(shape) * dtype.itemsize}"))  # fmt: skip
        elif start != end:
            errors.append(fail(f"{label} is out of place", f"it begins at byte {first + start}, and the one before it "
                               f"ends at {first + end}", fix="write the file again"))  # fmt: skip
        end = stop
        entries.append(HeaderEntry(where, size, time, name, dtype_name, dtype, shape, first + start))
    if end < available:
        errors.append(fail(f"{path}: is too long", f"its last tensor ends at byte {first + end}, the file has "
                           f"{size}", fix="copy it again"))  # fmt: skip
    return Header(entries, errors, texts)


def is_shape(sizes: Sequence[Any]) -> bool:
    """Return whether torch can have a tensor of these sizes, of any dtype."""
    numbers = len(sizes) <= MAX_DIMS and all(type(n) is int and n >= 0 for n in sizes)
    return numbers and math.prod(n or 1 for n in sizes) < MAX_ELEMENTS


def check_name(name: str) -> None:
    """Raise ValueError for a name that is too long, or that is not Unicode."""
    name.encode()
    if len(name) > MAX_NAME:
        raise ValueError(f"a name has more than {MAX_NAME} characters: {name[:60]!r}...")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    header = dict(pairs)
    if len(header) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{name[:60]!r} is in it twice")
    return header


def _fields(value: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Split the header's value of a tensor into (dtype name, shape, start, stop)."""
    dtype_name, shape, (start, stop) = value["dtype"], value["shape"], value["data_offsets"]
    if not is_shape(shape) or any(type(n) is not int or n < 0 for n in (start, stop)) or start > stop:
        raise ValueError(f"{value!r:.200} has sizes of no tensor: {MAX_DIMS} dims and 2^59 elements are the most")
    if re.fullmatch(r"\w{1,16}", dtype_name, re.ASCII) is None:
        raise ValueError(f"{dtype_name!r:.60} is not a dtype")
    return dtype_name, tuple(shape), start, stop
