"""Files of `torch.save`, to read and write by slices: zip archives without compression, whose bytes have known places.

    archive/data.pkl      the tree; of a tensor its dtype, shape, strides, storage, and offset in that
    archive/byteorder     "little"
    archive/data/0        the bytes of a storage; at a multiple of 64 in the file, as `torch.load(mmap=True)` wants
    archive/version       "3"

`torch.save` cannot write the places alone, for tensors of which several processes have parts, and `torch.load` has no
places to read at. The pickle is read by a `pickle.Unpickler` that makes tensors' descriptions, dicts and numbers, and
that refuses every other name in it: no code of the file runs. The CRC-32 in the archive is of a whole storage, so
reading slices does not check it (neither does torch).

Sources: the section "Serialized file format for torch.save" of torch's notes on serialization; APPNOTE.TXT of PKWARE.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ._io import cannot_read
from ._safetensors import Header, HeaderEntry, dtype_name
from .errors import ShardingError, fail

_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128, "ComplexFloatStorage": torch.complex64, "UntypedStorage": torch.uint8,
}  # fmt: skip
_STORAGE_OF = {dtype: name for name, dtype in _STORAGES.items() if name != "UntypedStorage"}
_ALIGNMENT = 64
_LOCAL = 0x04034B50  # before each record
_SAVE_AGAIN = "torch.save(torch.load(path, weights_only=True), path), by a recent torch"


# --- writing --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Archive:
    """The records of a file in order: name -> contents, or the number of bytes of a storage.

    `records` of tensors are named `data/0`, `data/1` ...
    """

    records: Mapping[str, bytes | int]

    @classmethod
    def of(cls, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], aliases: Mapping[str, str]) -> Archive:
        """Return the archive of a dict of contiguous tensors, with a storage for each, and of other names of them."""
        values = {name: _View(_Storage(str(i), dtype, math.prod(shape)), dtype, tuple(shape), _row_major(shape))
                  for i, (name, (dtype, shape)) in enumerate(tensors.items())}  # fmt: skip
        out = io.BytesIO()
        _Pickler(out, protocol=2).dump(values | {alias: values[name] for alias, name in aliases.items()})
        data = {f"data/{i}": x.storage.nbytes for i, x in enumerate(values.values())}
        return cls({"data.pkl": out.getvalue(), "byteorder": b"little", **data, "version": b"3\n"})

    @property
    def starts(self) -> list[int]:
        """The first byte of each storage."""
        return [at for name, at in self._layout()[0].items() if name.startswith("data/")]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._end({}))) + self._layout()[1]

    def pieces(self, crc32: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """Yield all of the file but the storages, as (first byte, bytes); `crc32` has those of the storages."""
        starts, end = self._layout()
        position = 0
        for name, content in self.records.items():
            header = self._local_header(name, position, crc32)
            yield position, header + (content if isinstance(content, bytes) else b"")
            position = starts[name] + _size(content)
        yield end, b"".join(self._end(crc32))

    def _layout(self) -> tuple[dict[str, int], int]:
        """Return the first byte of the contents of each record, and that of the directory after them."""
        starts, position = {}, 0
        for name, content in self.records.items():
            starts[name] = position + len(self._local_header(name, position, {}))
            position = starts[name] + _size(content)
        return starts, position

    def _local_header(self, name: str, position: int, crc32: Mapping[str, int]) -> bytes:
        path, size = f"archive/{name}".encode(), _size(self.records[name])
        sizes = struct.pack("<HHQQ", 1, 16, size, size)  # of zip64
        padding = -(position + 30 + len(path) + len(sizes) + 4) % _ALIGNMENT
        extra = sizes + b"FB" + struct.pack("<H", padding) + bytes(padding)
        return struct.pack("<IHHHHHIIIHH", _LOCAL, 45, 0, 0, 0, 0x21, self._crc32(name, crc32), 0xFFFFFFFF,
                           0xFFFFFFFF, len(path), len(extra)) + path + extra  # fmt: skip

    def _end(self, crc32: Mapping[str, int]) -> list[bytes]:
        """Return the directory, an entry for each record, and the records that locate it."""
        starts, end = self._layout()
        out, position = [], 0
        for name, content in self.records.items():
            path, size = f"archive/{name}".encode(), _size(content)
            extra = struct.pack("<HHQQQ", 1, 24, size, size, position)
            out.append(struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 45, 45, 0, 0, 0, 0x21, self._crc32(name, crc32),
                                   0xFFFFFFFF, 0xFFFFFFFF, len(path), len(extra), 0, 0, 0, 0, 0xFFFFFFFF)
                       + path + extra)  # fmt: skip
            position = starts[name] + size
        n, size = len(out), sum(map(len, out))
        out.append(struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, n, n, size, end))
        out.append(struct.pack("<IIQI", 0x07064B50, 0, end + size, 1))
        out.append(struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0))
        return out

    def _crc32(self, name: str, crc32: Mapping[str, int]) -> int:
        content = self.records[name]
        return zlib.crc32(content) if isinstance(content, bytes) else crc32.get(name, 0)


def _size(content: bytes | int) -> int:
    return content if isinstance(content, int) else len(content)


@dataclass(frozen=True)
class _Storage:
    """A storage in a file, of `size` elements."""

    key: str
    dtype: torch.dtype
    size: int

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class _View:
    """A tensor in a file: its first element is number `offset` of the storage.

    `lazy` has "conj" for one that torch conjugates, and "neg" for one that it negates, when it is used.
    """

    storage: _Storage
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    lazy: tuple[str, ...] = ()


class _Pickler(pickle.Pickler):
    """A pickler of tensors in a file, as torch pickles tensors."""

    def persistent_id(self, x: Any) -> Any:
        if not isinstance(x, _Storage):
            return None
        kind = _STORAGE_OF.get(x.dtype, "UntypedStorage")
        return "storage", getattr(torch, kind), x.key, "cpu", x.nbytes if kind == "UntypedStorage" else x.size

    def reducer_override(self, x: Any) -> Any:
        if not isinstance(x, _View):
            return NotImplemented
        like: Any = torch.empty(0, dtype=x.dtype, device="cpu")
        rebuild, (_, _, _, _, *rest) = like.__reduce_ex__(2)
        return rebuild, (x.storage, x.offset, x.shape, x.strides, *rest)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


# --- reading --------------------------------------------------------------------------------------------------


class _Record(NamedTuple):
    start: int
    size: int
    crc32: int


def read_torch_file(path: Path) -> Header:
    """Read the places of the tensors in a file; those in dicts and lists have dotted names: `model.h.0.weight`.

    Errors of the result name tensors that are out of their storage, or have the name of another one. Numbers and
    strings are left out.

    Raises ShardingError if the file is none of `torch.save`, is cut short or damaged, or has objects of other kinds.
    """
    try:
        with open(path, "rb") as f:
            stat = os.fstat(f.fileno())
            records = _records(path, f)
            order = _content(path, f, "byteorder", records)
            if order not in (b"", sys.byteorder.encode()):
                raise fail(f"{path}: was written on a machine of another byte order", f"{order!r}", fix=_SAVE_AGAIN)
            text = _content(path, f, "data.pkl", records)
    except OSError as e:
        raise cannot_read(path, e) from e
    except zipfile.BadZipFile as e:
        raise fail(f"{path}: is no file of torch.save, or is cut short", str(e), fix="copy it again; if a torch before "
                   f"1.6 wrote it: {_SAVE_AGAIN}") from e  # fmt: skip
    try:
        tensors = list(_named(_Unpickler(io.BytesIO(text)).load(), ""))
    except _UnknownError as e:
        raise fail(f"{path}: has an object of the kind {e}", "tensors, dicts, lists, numbers and strings are read; "
                   "another kind could run code that is in the file", fix="on a machine that may run that: "
                   "torch.save({name: x for name, x in model.state_dict().items()}, path)") from e  # fmt: skip
    except Exception as e:  # damaged bytes make an unpickler raise errors of many kinds
        raise fail(f"{path}: is damaged", f"data.pkl: {type(e).__name__}: {e}", fix="copy it again") from e
    entries: dict[str, HeaderEntry] = {}
    errors = []
    for name, x in tensors:
        try:
            if name in entries:
                raise fail(f"{path}: {name!r} is the name of two tensors", fix="save a dict of other keys")
            entries[name] = _entry(path, stat, name, x, records)
        except ShardingError as e:
            errors.append(e)
    return Header(list(entries.values()), errors, zlib.crc32(text))


def _records(path: Path, f: Any) -> dict[str, _Record]:
    """Return the places of the records, by their names without the first folder."""
    out = {}
    try:
        for info in zipfile.ZipFile(f).infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise fail(f"{path}: is a compressed archive, whose tensors cannot be read by slices", fix=_SAVE_AGAIN)
            f.seek(info.header_offset)
            signature, *_, name, extra = struct.unpack("<IHHHHHIIIHH", f.read(30))
            if signature != _LOCAL or f.read(name) != info.orig_filename.encode():
                raise zipfile.BadZipFile(f"{info.filename} is not at its place")
            start = info.header_offset + 30 + name + extra
            out[info.filename.partition("/")[2]] = _Record(start, info.file_size, info.CRC)
    except (ValueError, NotImplementedError, struct.error) as e:  # of a damaged directory
        if isinstance(e, ShardingError):
            raise
        raise zipfile.BadZipFile(str(e)) from e
    if "data.pkl" not in out:
        raise fail(f"{path}: is an archive, and none of torch.save", "it has no data.pkl")
    return out


def _content(path: Path, f: Any, name: str, records: Mapping[str, _Record]) -> bytes:
    """Return the contents of a small record; `b""` if there is none."""
    if name not in records:
        return b""
    record = records[name]
    f.seek(record.start)
    out = bytes(f.read(record.size))
    if zlib.crc32(out) != record.crc32:
        raise fail(f"{path}: is damaged", f"{name} does not have its checksum",
                   fix="copy it again; or save it with torch.serialization.set_crc32_options(True)")  # fmt: skip
    return out


def _entry(path: Path, stat: os.stat_result, name: str, x: _View, records: Mapping[str, _Record]) -> HeaderEntry:
    itemsize, record = x.dtype.itemsize, records.get(f"data/{x.storage.key}")
    if record is None or any(type(n) is not int or n < 0 for n in (*x.shape, *x.strides, x.offset)):
        raise fail(f"{path}: {name!r} is damaged", f"shape {x.shape}, strides {x.strides}, storage {x.storage.key}",
                   fix="copy it again")  # fmt: skip
    if x.lazy:
        raise fail(f"{path}: {name!r} has the values of another tensor, and is to be changed: {', '.join(x.lazy)}",
                   fix="save x.resolve_conj().resolve_neg()")  # fmt: skip
    end = (x.offset + sum((n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)) + 1) * itemsize
    present = min(record.size, stat.st_size - record.start)
    if 0 not in x.shape and end > present:
        fact = f"it ends at byte {end} of its storage, and the file has {present}"
        raise fail(f"{path}: {name!r} is cut short", fact, fix="copy it again")
    strides = None if 0 in x.shape or _is_contiguous(x.shape, x.strides) else x.strides
    return HeaderEntry(path.absolute(), stat.st_size, stat.st_mtime_ns, name, *dtype_name(x.dtype), x.shape,
                       record.start + x.offset * itemsize, strides=strides)  # fmt: skip


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether the elements are in order; the stride of a dim of size 1 does not matter."""
    return all(n == 1 or a == b for n, a, b in zip(shape, strides, _row_major(shape), strict=True))


def _named(value: Any, prefix: str) -> Iterator[tuple[str, _View]]:
    """Yield the tensors in a tree, with their dotted names."""
    if isinstance(value, _View):
        yield prefix.removesuffix("."), value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, child in items:
        yield from _named(child, f"{prefix}{key}.")


class _UnknownError(Exception):
    """A name in a pickle that is not one of those that describe tensors."""


def _rebuild(storage: Any, offset: int, shape: Any, strides: Any, *rest: Any) -> _View:
    """Return the tensor of torch's arguments: requires_grad, hooks, the dtype of an untyped storage, and metadata."""
    dtype = next((x for x in rest if isinstance(x, torch.dtype)), storage.dtype)
    if len(shape) != len(strides):
        raise ValueError(f"shape {shape}, strides {strides}")
    lazy = [name for x in rest[2:] if isinstance(x, dict) for name, value in x.items() if value]
    return _View(storage, dtype, tuple(shape), tuple(strides), offset, tuple(lazy))


_KNOWN = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild,  # with the dtype, of an untyped storage
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *_: data,
    **{("torch", name): name for name in _STORAGES},
    ("torch.storage", "UntypedStorage"): "UntypedStorage",
}


class _Unpickler(pickle.Unpickler):
    """An unpickler of trees of tensors in a file, that calls nothing but what `_KNOWN` has."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if not isinstance(dtype, torch.dtype):
            raise _UnknownError(f"{module}.{name}")
        return dtype

    def persistent_load(self, of: Any) -> Any:
        _, kind, key, _, size = of
        return _Storage(str(key), _STORAGES[kind], size)
