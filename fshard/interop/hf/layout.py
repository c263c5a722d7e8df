"""The layout of a Hugging Face folder to write: the files, their tensors in order, and the leaves of each tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard._core.files.io import writable
from fshard._core.files.safetensors import DTYPES, encode_header
from fshard.errors import ShardingError, fail, raise_all
from fshard.sharded import Sharded
from fshard.spec import format_tensor

from .folder import SINGLE
from .places import FilePart, check_division, count_elements
from .weights import FileTensor, file_tensor, with_dot

Leaves = Sequence[tuple[tree.Path, Any]]  # of a tree, each with its path
Theirs = Callable[[tree.Path], FileTensor | tuple[FilePart, ...]]  # path of a leaf -> its places in the files


@dataclass(frozen=True)
class Source:
    """A leaf, or a box of one, that is a tensor in the file or a part of one; `label` is the leaf's path."""

    label: str
    leaf: Sharded | Tensor
    part: FilePart


@dataclass(frozen=True)
class OutputTensor:
    """A tensor in the file, and the leaves that are its parts."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sources: tuple[Source, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class OutputFile:
    """A file: its header, and the tensors that follow, end to end."""

    name: str
    metadata: Mapping[str, str]
    tensors: tuple[OutputTensor, ...]

    @property
    def header(self) -> bytes:
        return encode_header({t.name: (t.dtype, t.shape) for t in self.tensors}, self.metadata)

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(t.nbytes for t in self.tensors)

    @property
    def starts(self) -> list[int]:
        """The first byte of each tensor."""
        return list(itertools.accumulate((t.nbytes for t in self.tensors[:-1]), initial=len(self.header)))


def output_tensors(leaves: Leaves, theirs: Theirs, prefix: str) -> list[OutputTensor]:
    """Return the tensors to write, in the order of the leaves."""
    errors: list[ShardingError] = []
    sources: dict[str, list[Source]] = {}
    by_pattern: set[str] = set()
    seen: set[int] = set()
    prefix = with_dot(prefix)
    for path, leaf in leaves:
        if isinstance(leaf, (Sharded, Tensor)) and id(leaf) in seen:
            continue
        seen.add(id(leaf))
        label = tree.show("tree", path)
        try:
            leaf = writable(leaf, DTYPES.values())
            parts = theirs(path)
            if not isinstance(parts, tuple):
                target = file_tensor("write", path, parts)
                if prefix and target.name.startswith(prefix):
                    raise fail(f"{target.name!r} begins with the prefix {prefix!r} already", fix="leave prefix= out")
                parts = tuple(target.parts(leaf.shape))
                by_pattern.update(prefix + part.name for part in parts)
            for part in parts:
                sources.setdefault(prefix + part.name, []).append(Source(label, leaf, part))
        except ShardingError as e:
            errors.append(ShardingError(f"write: {label}: {e}"))
    tensors = []
    for name, of_tensor in sources.items():
        try:
            if name in by_pattern:
                check_division([s.part for s in of_tensor])
            tensors.append(_output_tensor(name, of_tensor))
        except ShardingError as e:
            errors.append(ShardingError(f"write: {name!r} {e}"))
    raise_all(errors)
    return tensors


def _output_tensor(name: str, sources: Sequence[Source]) -> OutputTensor:
    shapes = {s.part.shape for s in sources}
    dtypes = {s.leaf.dtype for s in sources}
    if len(shapes) > 1 or len(dtypes) > 1:
        shown = [f"{s.label}  {format_tensor(s.leaf.dtype, s.part.shape)}" for s in sources]
        raise fail("has parts of different shapes or dtypes", *shown, fix="they are parts of one tensor in the file")
    first: dict[Any, str] = {}
    for s in sources:
        other = first.setdefault((s.part.places.offset, *s.part.places.runs), s.label)
        if other != s.label:
            raise fail("would be written twice", f"{other} and {s.label}", fix="give each leaf another name")
    parts, labels = [s.part for s in sources], ", ".join(dict.fromkeys(s.label for s in sources))
    written, total = count_elements(parts), math.prod(parts[0].shape)
    if written != total:
        raise fail("lacks a part" if written < total else "would be written twice",
                   f"{labels} give {written} of its {total} elements", fix="give one leaf for each part")  # fmt: skip
    return OutputTensor(name, dtypes.pop(), shapes.pop(), tuple(sources))


def check_described(leaves: Leaves, described: Leaves) -> None:
    """Raise ShardingError, listing every difference, unless the leaves have the paths and shapes that are described."""
    ours, expected = dict(leaves), dict(described)
    errors = [fail(f"write: {tree.show('tree', path)} is missing", described=leaf)
              for path, leaf in expected.items() if path not in ours]  # fmt: skip
    for path, x in ours.items():
        shape = getattr(x, "shape", None)
        if path not in expected:
            errors.append(fail(f"write: {tree.show('tree', path)} is not in the model of the config"))
        elif shape is not None and tuple(shape) != tuple(expected[path].shape):
            errors.append(fail(f"write: {tree.show('tree', path)} has another shape than the config says",
                               got=list(shape), expected=list(expected[path].shape)))  # fmt: skip
    raise_all(errors)


def output_files(
    tensors: Sequence[OutputTensor], max_shard_bytes: int, metadata: Mapping[str, str], single: str = SINGLE
) -> list[OutputFile]:
    """Divide the tensors, in order, into files of at most `max_shard_bytes`, or of one tensor; one file is `single`."""
    if not tensors:
        raise fail("write: there are no leaves", fix="give the parameters")
    if max_shard_bytes < 1:
        raise fail(f"write: max_shard_bytes={max_shard_bytes!r}", fix="a number of bytes")
    groups: list[list[OutputTensor]] = [[]]
    nbytes = 0  # of the last group: a model of experts has tens of thousands of tensors
    for t in tensors:
        if groups[-1] and nbytes + t.nbytes > max_shard_bytes:
            groups.append([])
            nbytes = 0
        groups[-1].append(t)
        nbytes += t.nbytes
    files = []
    for i, group in enumerate(groups):
        group.sort(key=lambda t: -t.dtype.itemsize)  # the widest first: every tensor is aligned
        name = single if len(groups) == 1 else f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        files.append(OutputFile(name, metadata, tuple(group)))
    return files
