"""What the headers of a Hugging Face folder say, and what is wrong with it.

    config.json                           sizes and rates
    model.safetensors                     every tensor; or
    model.safetensors.index.json          the file of every tensor, and
    model-00001-of-00002.safetensors      these

A safetensors file is the length of its header (8 bytes, little-endian), the header (JSON: the dtype, shape and
place of each tensor), then the tensors, row-major, end to end. Source: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fshard.errors import ShardingError, fail

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

Where = str | os.PathLike[str]


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: the dtype, None where `word` is one that is not read, and the byte of the file it begins at.

    `size` (bytes) and `changed` (ns) are the file's, when its header was read. `file` is absolute: it is read later,
    and perhaps from another working directory.
    """

    file: Path
    size: int
    changed: int
    name: str
    word: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    start: int


class Scan:
    """The tensors of a folder, or of one file, by name, and what is wrong with them.

    `complete` is False where a header could not be read, and nobody knows what the file holds.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Entry] = {}
        self.errors: list[ShardingError] = []
        self.complete = True
        single, index = path / SINGLE, path / INDEX
        if path.suffix in PICKLES and path.is_file():
            raise _pickled(path, [path.name])
        if path.is_file():
            self.found = self._file(path)
        elif single.is_file():  # also where an index is there too, as from_pretrained does
            self.found = self._file(single)
        elif index.is_file():
            self._index(index)
        else:
            raise _nothing(path)

    def _file(self, path: Path) -> dict[str, Entry]:
        try:
            return {entry.name: entry for entry in _entries(path, self.errors)}
        except ShardingError as e:
            self.errors.append(e)
            self.complete = False
            return {}

    def _index(self, index: Path) -> None:
        files = read_json(index).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
            raise fail(f"{index}: has no weight_map, from names of tensors to names of files", fix="copy it again")
        for file in sorted(set(files.values())):
            path, named = index.parent / file, [n for n, f in files.items() if f == file]
            if Path(file).is_absolute() or ".." in Path(file).parts:
                raise fail(f"{index}: {file!r} leads out of the folder", f"for {', '.join(named)}")
            if not path.is_file():
                self.errors.append(fail(f"{path}: there is no such file", f"for {', '.join(named)}"))
                self.complete = False
                continue
            known = self.complete
            held = self._file(path)
            if known == self.complete:
                self.errors += [fail(f"{path}: {n!r} is not in it", f"{INDEX} says it is")
                                for n in named if n not in held]  # fmt: skip
            self.found |= {n: e for n, e in held.items() if files.get(n, file) == file}


def _entries(path: Path, errors: list[ShardingError]) -> Iterator[Entry]:
    """What a header says, with what is wrong with single tensors. Raises ShardingError where it says nothing."""
    try:
        with open(path, "rb", buffering=0) as f:  # reads no byte of a value
            stat = os.fstat(f.fileno())
            length = int.from_bytes(f.read(8), "little")
            if not 2 <= length <= min(_LONGEST_HEADER, stat.st_size - 8):
                raise fail(f"{path}: is not safetensors, or is cut short", f"its first 8 bytes promise a header of "
                           f"{length} bytes, the file has {stat.st_size}", fix="copy it again")  # fmt: skip
            text = f.read(length)
    except OSError as e:
        raise unreadable(path, e) from e
    try:
        header = json.loads(text, object_pairs_hook=_once)
        if not isinstance(header, dict):
            raise ValueError(f"it is a {type(header).__name__}")
        header.pop("__metadata__", None)
        spots = [(name, *_spot(spot)) for name, spot in header.items()]
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise fail(f"{path}: the header is damaged", f"{type(e).__name__}: {e}", fix="copy it again") from e
    first, room, end = 8 + length, stat.st_size - 8 - length, 0
    for name, word, shape, start, stop in sorted(spots, key=lambda s: s[3:]):
        where, dtype = f"{path}: {name!r}", DTYPES.get(word)
        if stop > room:
            errors.append(fail(f"{where} is cut short", f"it ends at byte {first + stop}, the file has {stat.st_size}",
                               fix="copy the file again"))  # fmt: skip
        if dtype is not None and stop - start != math.prod(shape) * dtype.itemsize:
            errors.append(fail(f"{where} has the bytes of another shape", f"{stop - start} bytes, where {word}"
                               f"{list(shape)} takes {math.prod(shape) * dtype.itemsize}"))  # fmt: skip
        elif start != end:
            errors.append(fail(f"{where} is out of place", f"it begins at byte {first + start}, and the one before it "
                               f"ends at {first + end}", fix="write the file again"))  # fmt: skip
        end = stop
        yield Entry(path.absolute(), stat.st_size, stat.st_mtime_ns, name, word, dtype, shape, first + start)
    if end < room:
        errors.append(fail(f"{path}: is too long", f"its last tensor ends at byte {first + end}, the file has "
                           f"{stat.st_size}", fix="copy it again"))  # fmt: skip


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} stands twice")
    return found


def _spot(spot: Any) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, start, stop) of a tensor, as the header has them."""
    word, shape, (start, stop) = spot["dtype"], spot["shape"], spot["data_offsets"]
    if not isinstance(word, str) or any(type(n) is not int or n < 0 for n in (*shape, start, stop)) or start > stop:
        raise ValueError(f"{spot} describes no tensor")
    return word, tuple(shape), start, stop


# --- words ----------------------------------------------------------------------------------------------------


def no_dtype(entry: Entry) -> ShardingError:
    return fail(f"{entry.file}: {entry.name!r} has dtype {entry.word!r}, which is not read",
                fix=f"convert it to one of {', '.join(DTYPES)}")  # fmt: skip


def unreadable(path: Path, e: OSError) -> ShardingError:
    return fail(f"{path}: cannot be read", str(e.strerror))


def _nothing(path: Path) -> ShardingError:
    if not path.exists():
        return fail(f"{path}: there is no such folder", fix="give a folder that save_pretrained wrote")
    if not path.is_dir():
        return fail(f"{path}: is neither a file nor a folder", fix="give a folder that save_pretrained wrote")
    names = sorted(f.name for f in path.iterdir())
    pickles = [n for n in names if n.endswith(PICKLES)]
    others = [n for n in names if n.endswith(".safetensors")]
    if pickles and not others:
        return _pickled(path, pickles)
    note = f"it holds {', '.join(others)}" if others else "it holds no safetensors"
    return fail(f"{path}: there is neither {SINGLE} nor {INDEX}", note,
                fix="give one of these files" if others else "give a folder that save_pretrained wrote")  # fmt: skip


def _pickled(path: Path, names: list[str]) -> ShardingError:
    return fail(f"{path}: pickles are refused", f"there is {', '.join(names)}; a pickle runs whatever code is in it",
                fix="convert it where you may run that: AutoModel.from_pretrained(a).save_pretrained(b)")  # fmt: skip


# --- config.json ----------------------------------------------------------------------------------------------


def config_of(folder: Where) -> dict[str, Any]:
    """What `config.json` of a folder says.

    >>> config_of("my-gpt2")["model_type"]
    'gpt2'

    Raises ShardingError where there is none, or it is not a JSON object.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise fail(f"{path}: there is no such file", fix="give a folder that save_pretrained wrote")
    return read_json(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ShardingError where the file holds none."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as e:
        raise unreadable(path, e) from e
    except (ValueError, RecursionError) as e:
        raise fail(f"{path}: is not JSON", str(e), fix="copy it again") from e
    if not isinstance(value, dict):
        raise fail(f"{path}: is not a JSON object", f"it is a {type(value).__name__}", fix="copy it again")
    return value


__all__ = ["CONFIG", "DTYPES", "INDEX", "PICKLES", "SINGLE", "Entry", "Scan", "Where", "config_of", "no_dtype",
           "read_json", "unreadable"]  # fmt: skip
