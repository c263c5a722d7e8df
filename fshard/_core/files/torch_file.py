"""Files of `torch.save`, to read and write by slices: zip archives without compression, whose bytes have known places.

    archive/data.pkl      the tree; of a tensor its dtype, shape, strides, storage, and offset in that
    archive/byteorder     "little"
    archive/data/0        the bytes of a storage; at a multiple of 64 in the file, as `torch.load(mmap=True)` wants

torch writes a file with holes for the storages (`torch.serialization.skip_data`), which several processes then fill.

A file from elsewhere may be hostile. `torch.load(weights_only=True)` runs no code of it either, but 600 bytes can have
it hash a tuple of 2^40 parts, or fill the memory. So the pickle is read by Python's unpickler in Python, with a part of
its opcodes. None of these calls a function that the file names, hashes a tuple, or takes more time or memory than its
bytes. The CRC-32 in the archive is of a complete storage, so reading slices does not check it (neither does torch).

Sources: the section "Serialized file format for torch.save" of torch's notes on serialization; APPNOTE.TXT of PKWARE.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fshard._core.torch import FakeTensorMode
from fshard.errors import ShardingError, fail

from .io import file_state, open_file
from .safetensors import MAX_DIMS, MAX_ELEMENTS, MAX_NAME, Header, HeaderEntry, check_name, dtype_name, is_shape

_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128, "ComplexFloatStorage": torch.complex64, "UntypedStorage": torch.uint8,
}  # fmt: skip
_READ = ("byteorder", "data.pkl")
_SAVE_AGAIN = "torch.save(torch.load(path, weights_only=True), path), by a recent torch"


class _Record(NamedTuple):
    start: int
    size: int
    info: zipfile.ZipInfo


class _SparseFile:
    """A file in memory without the storages: `torch.serialization.skip_data` moves on where it leaves one out."""

    def __init__(self) -> None:
        self.parts = [(0, bytearray())]  # the first byte, and all bytes up to the next storage

    def write(self, data: bytes) -> int:
        self.parts[-1][1].extend(data)
        return len(data)

    def seek(self, n: int, whence: int) -> None:
        start, data = self.parts[-1]
        self.parts.append((start + len(data) + n, bytearray()))

    def flush(self) -> None:
        pass


class Archive(NamedTuple):
    """All of a file but the storages, as (first byte, bytes), and the first byte and the size of each storage."""

    storages: list[tuple[int, int]]
    rest: list[tuple[int, bytearray]]

    @classmethod
    def make(cls, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], aliases: Mapping[str, str]) -> Archive:
        """Return the archive of a dict of contiguous tensors, with a storage for each, and of other names of them."""
        with FakeTensorMode():
            fakes = {
                name: torch.empty(tuple(shape), dtype=dtype, device="cpu") for name, (dtype, shape) in tensors.items()
            }
        file = _SparseFile()
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(fakes | {alias: fakes[name] for alias, name in aliases.items()}, file)  # type: ignore[arg-type]
        ends = (start + len(data) for start, data in file.parts)
        sizes = (math.prod(shape) * dtype.itemsize for dtype, shape in tensors.values())
        return cls([(next(ends) if size else 0, size) for size in sizes], file.parts)

    @property
    def nbytes(self) -> int:
        return self.rest[-1][0] + len(self.rest[-1][1])

    def pieces(self, crc32: Sequence[int]) -> list[tuple[int, bytes]]:
        """Return `rest` with the CRC-32 of the storages: in the record after each, and in the directory at the end."""
        rest = [bytearray(piece) for _, piece in self.rest]
        at = after = 0
        for i, (value, (_, size)) in enumerate(zip(crc32, self.storages, strict=True)):
            at = rest[-1].index(f"archive/data/{i}".encode(), at)
            struct.pack_into("<I", rest[-1], at - 30, value)
            if size:
                after += 1
                struct.pack_into("<I", rest[after], 4, value)
        return [(start, bytes(piece)) for (start, _), piece in zip(self.rest, rest, strict=True)]


def read_torch_file(path: Path) -> Header:
    """Read the places of the tensors in a file; those in dicts and lists have dotted names: `model.h.0.weight`.

    Errors of the result name tensors that are out of their storage, or have the name of another one. Numbers and
    strings are left out.

    Raises ShardingError if the file is none of `torch.save`, is cut short or damaged, or has objects of other kinds.
    """
    with open_file(path) as f:
        size, time = file_state(f)
        try:
            archive = zipfile.ZipFile(f)
            records = _records(path, archive)
            order, text = (archive.read(records[name].info) if name in records else b"" for name in _READ)
        except (ShardingError, OSError):
            raise
        except Exception as e:  # zipfile raises errors of many kinds for a damaged directory
            fix = f"copy it again; if a torch before 1.6 wrote it, or one without checksums: {_SAVE_AGAIN}"
            raise fail(f"{path}: is no file of torch.save, or is damaged or cut short", str(e), fix=fix) from e
    if order not in (b"", sys.byteorder.encode()):
        raise fail(f"{path}: was written on a machine of another byte order", f"{order!r:.60}", fix=_SAVE_AGAIN)
    try:
        tensors = list(_named(_Unpickler(text, size).load(), size))
    except _UnknownError as e:
        raise fail(f"{path}: has an object of the kind {e}", "tensors, dicts, lists, numbers and strings are read; "
                   "another kind could run code that is in the file", fix="on a machine that may run that: "
                   "torch.save({name: x for name, x in model.state_dict().items()}, path)") from e  # fmt: skip
    except Exception as e:  # damaged bytes make an unpickler raise errors of many kinds
        raise fail(f"{path}: is damaged", f"data.pkl: {type(e).__name__}: {e}", fix="copy it again") from e
    entries: dict[str, HeaderEntry] = {}
    errors, where = [], path.absolute()
    for name, x in tensors:
        try:
            if name in entries:
                raise fail(f"{path}: {name!r} is the name of two tensors", fix="save a dict of other keys")
            entries[name] = _entry(path, where, (size, time), name, x, records)
        except ShardingError as e:
            errors.append(e)
    return Header(list(entries.values()), errors)


def _records(path: Path, archive: zipfile.ZipFile) -> dict[str, _Record]:
    """Return the places of the records, by their names without the first folder."""
    out, f = {}, archive.fp
    assert f is not None
    for info in archive.infolist():
        if info.compress_type != zipfile.ZIP_STORED:
            raise fail(f"{path}: is a compressed archive, whose tensors cannot be read by slices", fix=_SAVE_AGAIN)
        f.seek(info.header_offset)
        name, extra = struct.unpack("<26xHH", f.read(30))
        if f.read(name) != info.orig_filename.encode():
            raise zipfile.BadZipFile(f"{info.filename} is not at its place")
        start = info.header_offset + 30 + name + extra
        out[info.filename.partition("/")[2]] = _Record(start, info.file_size, info)
    if "data.pkl" not in out:
        raise fail(f"{path}: is an archive, and none of torch.save", "it has no data.pkl")
    return out


@dataclass(frozen=True, eq=False, slots=True)
class _Tensor:
    """A tensor in a file: its first element is number `offset` of the storage.

    `lazy` has "conj" for one that torch conjugates, and "neg" for one that it negates, when it is used.
    """

    storage: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    lazy: tuple[str, ...]


_TREES = (dict, list, tuple, _Tensor)


def _entry(
    path: Path, where: Path, state: tuple[int, int], name: str, x: _Tensor, records: Mapping[str, _Record]
) -> HeaderEntry:
    itemsize, record = x.dtype.itemsize, records.get(f"data/{x.storage}")
    if record is None:
        raise fail(f"{path}: {name!r} is damaged", f"there is no storage {x.storage!r:.60}", fix="copy it again")
    if x.lazy:
        raise fail(f"{path}: {name!r} has the values of another tensor, and is to be changed: {', '.join(x.lazy)}",
                   fix="save x.resolve_conj().resolve_neg()")  # fmt: skip
    end = (x.offset + sum((n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)) + 1) * itemsize
    present = min(record.size, state[0] - record.start)
    if 0 not in x.shape and end > present:
        fact = f"it ends at byte {end} of its storage, and the file has {present}"
        raise fail(f"{path}: {name!r} is cut short", fact, fix="copy it again")
    row_major = [math.prod(x.shape[i + 1 :]) for i in range(len(x.shape))]  # the stride of a dim of 1 does not matter
    in_order = all(n == 1 or a == b for n, a, b in zip(x.shape, x.strides, row_major, strict=True))
    return HeaderEntry(where, *state, name, *dtype_name(x.dtype), x.shape,
                       record.start + x.offset * itemsize,
                       strides=None if 0 in x.shape or in_order else x.strides)  # fmt: skip


# --- pickles --------------------------------------------------------------------------------------------------


def _named(tree: Any, size: int) -> Iterator[tuple[str, _Tensor]]:
    """Yield the tensors in a tree, with their dotted names.

    Raises ValueError if a file of `size` bytes cannot have them all, or their names: it may repeat a list 10^9 times.
    """
    left = 64_000 + size

    def walk(value: Any, prefix: str) -> Iterator[tuple[str, _Tensor]]:
        nonlocal left
        check_name(prefix)
        if isinstance(value, _Tensor):
            left -= 64
            yield prefix.removesuffix("."), value
            return
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            left -= 1
            if left < 0:
                raise ValueError("it has more tensors and numbers than a file of its size")
            if isinstance(child, _TREES):
                yield from walk(child, f"{prefix}{key}.")

    return walk(tree if isinstance(tree, _TREES) else (), "")


class _UnknownError(Exception):
    """A name in a pickle that is not one of those that describe tensors."""


class _Dict(dict[Any, Any]):
    """A dict without tuples as keys: the hash of a tuple, unlike its pickle, may take 2^40 steps."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, tuple):
            raise TypeError("a key is a tuple")
        super().__setitem__(key, value)


def _rebuild(
    storage: Any, offset: int, shape: Any, strides: Any, requires_grad: Any, hooks: Any, *rest: Any
) -> _Tensor:  # fmt: skip
    """Return the tensor of torch's arguments: `rest` are the dtype of an untyped storage, and metadata."""
    if len(rest) > 2 or not len(shape) == len(strides) <= MAX_DIMS:
        raise ValueError(f"a tensor has {len(shape)} sizes and {len(strides)} strides, and may have {MAX_DIMS}")
    if not is_shape(shape) or any(type(n) is not int or not 0 <= n < MAX_ELEMENTS for n in (offset, *strides)):
        raise ValueError("a tensor has sizes, strides or an offset that are negative, too large or not numbers")
    key, of_storage = storage
    dtype = next((x for x in rest if isinstance(x, torch.dtype)), of_storage)
    metadata = next((x for x in rest if isinstance(x, dict)), {})
    if not metadata.keys() <= {"conj", "neg"}:
        raise ValueError("a tensor has unknown metadata")
    return _Tensor(key, dtype, offset, tuple(shape), tuple(strides), tuple(k for k in metadata if metadata[k]))


_KNOWN: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): lambda: _Dict(),  # noqa: PLW0108  its arguments would be copied
    ("torch", "Size"): lambda sizes: sizes,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild,  # with the dtype, of an untyped storage
    ("torch._utils", "_rebuild_parameter"): lambda data, grad, hooks: data,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda data, grad, hooks, state: data,
    **{("torch", name): name for name in _STORAGES},
    ("torch.storage", "UntypedStorage"): "UntypedStorage",
}


Opcode = Callable[[Any], None]


def _make(unpickler: Any, *, run: Opcode) -> None:
    """Run an opcode that makes an object, of about 100 bytes."""
    unpickler.left -= 1
    if unpickler.left < 0:
        raise ValueError("it makes more objects than a file of its size has")
    run(unpickler)


_OPCODES: dict[int, Opcode] = {
    code: pickle._Unpickler.dispatch[code] for code in b"\x80.NXUJKMG\x88\x89\x8a)qrhjcQsuae(]Rt\x85\x86\x87"
}
_OPCODES |= {ord("}"): lambda unpickler: unpickler.append(_Dict()), ord("b"): lambda unpickler: unpickler.stack.pop()}
_OPCODES |= {code: functools.partial(_make, run=_OPCODES[code]) for code in b"(]}Rt\x85\x86\x87"}


class _Unpickler(pickle._Unpickler):
    """An unpickler of trees of tensors, that calls nothing but what `_KNOWN` has, and takes memory as the file does.

    It has the opcodes that torch.save writes. `size` is the size of the file.
    """

    dispatch = _OPCODES

    def __init__(self, text: bytes, size: int) -> None:
        super().__init__(io.BytesIO(text))
        self.left = 1000 + size // 8

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if not isinstance(dtype, torch.dtype):
            raise _UnknownError(f"{module}.{name}")
        return dtype

    def persistent_load(self, of: Any) -> Any:
        _, kind, key, _, _ = of
        return key if isinstance(key, str) and len(key) < MAX_NAME else "", _STORAGES[kind]


__all__ = ["Archive", "read_torch_file"]
