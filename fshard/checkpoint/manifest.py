"""Manifest of a checkpoint: one JSON file with the leaves and the positions of their bytes.

    step_000025/manifest.json             every leaf: shape, dtype, and the position of each of its chunks
                part-00000.safetensors    the chunks that rank 0 wrote
                part-00003.safetensors    the chunks that rank 3 wrote

`manifest.json` is one object. Its first line has `format`, `version` and the blake2b of the rest of the file:

    "step": 25 or null
    "base": {"wte": "f32[96, 32] 5be0cd19..."}                 only of a checkpoint with a base, whose version is 2
    "files": {"part-00000.safetensors": {"bytes": 1208, "header_bytes": 184, "header_crc32": 1163250126}}
    "leaves": {
        "params.up":   {"dtype": "float32", "shape": [64, 256], "chunks": [
                           {"offset": [0, 64], "shape": [64, 64], "file": "part-00001.safetensors",
                            "start": 184, "crc32": [3906543921]}]},
        "params.head": {"same_as": "params.up"},            two paths of one leaf
        "cursor":      {"type": "int", "value": 1200}}      a Python value; floats as text, by `repr`

The chunks of a leaf form a grid that fills it, and the chunks of a file fill it, so that none overlap. A file is named
without a directory, so that none is outside. Every part file has the `leaves_digest` in its header, and the manifest
has the CRC-32 of that header: a manifest that was saved with other Python values, paths or shapes does not fit the part
files. A manifest changed on purpose, with a new blake2b, does: the digest itself is not compared.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fshard._core.files.io import open_file, write_errors, write_file
from fshard._core.files.safetensors import MAX_ELEMENTS, is_shape
from fshard._core.files.url import AnyPath
from fshard.errors import fail
from fshard.spec import box_bounds, describe

from .parts import DTYPES, PART_NAME, RESTORE_ANOTHER, UNCHANGED, Chunk, PartFile, block_count

FORMAT, MANIFEST = "fshard.checkpoint", "manifest.json"
VERSIONS = (1, 2)  # 2 with a base, which a reader of 1 would not check
SCALARS = (bool, int, float, str)
Scalar = bool | int | float | str


@dataclass(frozen=True, repr=False)
class Saved:
    """A tensor leaf in a checkpoint, shown as `f32[64, 256]`; `same_as` is the first path of the same leaf.

    >>> saved = fs.checkpoint.inspect("out", step=25)["params.up"]
    >>> saved.shape, saved.dtype
    ((64, 256), torch.float32)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    same_as: str | None = None

    def __repr__(self) -> str:
        return describe(self) + (f" = {self.same_as}" if self.same_as else "")


Leaves = Mapping[str, Saved | Scalar]  # by dotted path


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint, except the bytes of tensors; `digest` is set once the text is written.

    `base` has the digests of the tree that the leaves belong to; without one it is empty.
    """

    step: int | None
    files: Mapping[str, PartFile]
    leaves: Leaves
    base: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""


def leaves_digest(step: int | None, leaves: Leaves, base: Mapping[str, str]) -> str:
    """Return a digest of the step and of all leaves without the bytes of tensors, for the headers of the part files."""
    table = {name: [str(x.dtype), list(x.shape), x.same_as] if isinstance(x, Saved) else _encode(x)
             for name, x in leaves.items()}  # fmt: skip
    return _digest(json.dumps([step, table, *([base] if base else [])]).encode())


def write_manifest(directory: AnyPath, manifest: Manifest) -> None:
    """Write `manifest.json`, one line for each leaf, and flush it to the disk."""
    files = _rows({name: vars(part) for name, part in manifest.files.items()})
    leaves = _rows({path: _encode(leaf) for path, leaf in manifest.leaves.items()})
    base = f'"base": {_rows(manifest.base)},\n' if manifest.base else ""
    body = f'"step": {json.dumps(manifest.step)},\n{base}"files": {files},\n"leaves": {leaves}}}\n'.encode()
    version = VERSIONS[bool(base)]
    first = f'{{"format": "{FORMAT}", "version": {version}, "blake2b": "{_digest(body)}",\n'.encode()
    path = directory / MANIFEST
    with write_errors("save", path, UNCHANGED):
        write_file(path, [first, body])


def read_manifest(directory: AnyPath) -> Manifest:
    """Read and check `manifest.json`. Raises ShardingError if it is damaged or of another version."""
    path = directory / MANIFEST
    with open_file(path, RESTORE_ANOTHER) as f:
        first, _, body = f.read().partition(b"\n")
    try:
        head = json.loads(first.strip().removesuffix(b",") + b"}")
        known = head["format"] == FORMAT
        version, digest = head["version"], head["blake2b"]
    except (ValueError, KeyError, TypeError, RecursionError):
        known = False
    if not known:
        raise fail(f"{path} is not a manifest of fshard, or is damaged", f"its first line has no format {FORMAT!r}",
                   fix=RESTORE_ANOTHER)  # fmt: skip
    if version not in VERSIONS:
        raise fail(f"{path} was written by another version of fshard", fix="restore it with that version",
                   expected=" or ".join(map(str, VERSIONS)), got=version)  # fmt: skip
    if digest != _digest(body):
        raise fail(f"{path} is damaged", fix=RESTORE_ANOTHER, expected=f"blake2b {digest}", got=_digest(body))
    try:
        return dataclasses.replace(_decode(json.loads(b"{" + body)), digest=digest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise fail(f"{path} is malformed", f"{type(e).__name__}: {e}", fix=RESTORE_ANOTHER) from e


def _rows(table: Mapping[str, Any]) -> str:
    rows = (f"\n{json.dumps(key)}: {json.dumps(value)}" for key, value in table.items())
    return f"{{{','.join(rows)}}}"


def _digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def _encode(leaf: Saved | Scalar) -> Any:
    if not isinstance(leaf, Saved):
        return {"type": type(leaf).__name__, "value": repr(leaf) if isinstance(leaf, float) else leaf}
    if leaf.same_as is not None:
        return {"same_as": leaf.same_as}
    dtype = str(leaf.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": leaf.shape, "chunks": [vars(c) for c in leaf.chunks]}


def _decode(body: Any) -> Manifest:
    files = {name: PartFile(**fields) for name, fields in body["files"].items()}
    for name, part in files.items():
        if not PART_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a part file")
        _sizes(dataclasses.astuple(part))
    leaves: dict[str, Saved | Scalar] = {}
    for path, entry in body["leaves"].items():
        if "value" in entry:
            leaves[path] = _decode_scalar(entry)
        elif "same_as" in entry:
            first = leaves[entry["same_as"]]
            if not isinstance(first, Saved):
                raise ValueError(f"{path}: is tied to a Python value")
            leaves[path] = dataclasses.replace(first, same_as=entry["same_as"])
        else:
            leaves[path] = _decode_saved(path, entry)
    _check_files_are_filled(files, [x for x in leaves.values() if isinstance(x, Saved) and x.same_as is None])
    if body["step"] is not None:
        _sizes([body["step"]])
    base = body.get("base", {})
    if not all(isinstance(x, str) for x in base.values()):
        raise ValueError("the digests of the base are not texts")
    return Manifest(body["step"], files, leaves, base)


def _decode_scalar(entry: Any) -> Scalar:
    value = float(entry["value"]) if entry["type"] == "float" else entry["value"]
    if not isinstance(value, SCALARS) or type(value).__name__ != entry["type"]:
        raise ValueError(f"{entry['value']!r} is not a {entry['type']}")
    return value


def _decode_saved(path: str, entry: Any) -> Saved:
    shape, dtype = _sizes(entry["shape"]), DTYPES[entry["dtype"]]
    if not is_shape(shape):
        raise ValueError(f"{path}: no tensor has the {len(shape)} sizes {shape!r:.60}")
    chunks = [Chunk(_sizes(c["offset"]), _sizes(c["shape"]), c["file"], _sizes([c["start"]])[0], _sizes(c["crc32"]))
              for c in entry["chunks"]]  # fmt: skip
    for c in chunks:
        if not len(c.offset) == len(c.shape) == len(shape) or len(c.crc32) != block_count(c.shape, dtype.itemsize):
            raise ValueError(f"{path}: the chunk at {list(c.offset)} does not fit its leaf")
    if not _is_grid(shape, chunks):
        raise ValueError(f"{path}: the chunks do not fill {list(shape)} as a grid: one is missing, twice or overlaps")
    return Saved(shape, dtype, tuple(chunks))


def _is_grid(shape: Sequence[int], chunks: Sequence[Chunk]) -> bool:
    """Return whether the ranges of every dim fill it in order, and the chunks are all products of them, each once."""
    boxes = {box_bounds(c.box) for c in chunks}
    dims = [{box[d] for box in boxes} for d in range(len(shape))]
    filled = all(_fill(0, n, ranges) for n, ranges in zip(shape, dims, strict=True))
    return filled and len(boxes) == len(chunks) == math.prod(map(len, dims))


def _check_files_are_filled(files: Mapping[str, PartFile], leaves: Sequence[Saved]) -> None:
    """Raise ValueError unless the chunks in each file follow its header end to end, in the order of writing."""
    ranges: dict[str, list[tuple[int, int]]] = {file: [] for file in files}
    for leaf in leaves:
        for c in leaf.chunks:
            ranges[c.file].append((c.start, c.start + math.prod(c.shape) * leaf.dtype.itemsize))
    for file, part in files.items():
        if not _fill(part.header_bytes, part.bytes, ranges[file]):
            raise ValueError(f"{file}: the chunks do not follow each other from byte {part.header_bytes} to its end")


def _fill(first: int, end: int, ranges: Iterable[tuple[int, int]]) -> bool:
    """Return whether some ranges (start, stop), in order, follow each other from `first` to `end`."""
    ranges = sorted(ranges)
    return [first, *(stop for _, stop in ranges)] == [*(start for start, _ in ranges), end]


def _sizes(values: Sequence[Any]) -> tuple[int, ...]:
    if any(type(n) is not int or not 0 <= n < MAX_ELEMENTS for n in values):
        raise ValueError(f"{values!r:.200} are not sizes")
    return tuple(values)
