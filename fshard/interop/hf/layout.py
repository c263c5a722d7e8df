"""The files of a Hugging Face folder that is to be written: which tensor lies where, and of which leaves it is made."""

from __future__ import annotations

import itertools
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.checkpoint.parts import bytes_of
from fshard.errors import ShardingError, fail, raise_all
from fshard.init import Deferred
from fshard.sharded import Sharded
from fshard.spec import describe

from .folder import DTYPES, SINGLE
from .pattern import Pattern, absent
from .weights import FileTensor

_WORDS = {dtype: word for word, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Source:
    """A leaf of ours: the whole of a tensor of theirs, or a part of it."""

    where: str
    leaf: Sharded | Tensor
    pattern: Pattern


@dataclass(frozen=True)
class Slot:
    """A tensor of theirs, and the leaves it is made of."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sources: tuple[Source, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class File:
    """A file: what it begins with, and the tensors that follow, end to end."""

    name: str
    head: bytes
    slots: tuple[Slot, ...]

    @property
    def bytes(self) -> int:
        return len(self.head) + sum(s.nbytes for s in self.slots)


def slots_of(
    leaves: Sequence[tuple[tree.Path, Any]], theirs: Callable[[tree.Path], FileTensor], prefix: str
) -> list[Slot]:
    """The tensors of theirs in the order of the leaves. Raises ShardingError listing all that cannot be written."""
    errors: list[ShardingError] = []
    sources: dict[str, list[Source]] = {}
    seen: set[int] = set()
    prefix = prefix and prefix.rstrip(".") + "."
    for path, leaf in leaves:
        where = f"write: {tree.show('tree', path)}"
        if isinstance(leaf, (Sharded, Tensor)) and id(leaf) in seen:
            continue
        seen.add(id(leaf))
        try:
            _check_leaf(leaf)
            their = theirs(path)
            if prefix and their.name.startswith(prefix):
                raise fail(f"{their.name!r} begins with the prefix {prefix!r} already", fix="leave prefix= out")
            pattern = their.pattern(leaf.ndim)
            pattern.theirs(leaf.shape)
            sources.setdefault(prefix + their.name, []).append(Source(tree.show("tree", path), leaf, pattern))
        except ShardingError as e:
            errors.append(ShardingError(f"{where}: {e}"))
    slots = []
    for name, parts in sources.items():
        try:
            slots.append(_slot(name, parts))
        except ShardingError as e:
            errors.append(ShardingError(f"write: {name!r} {e}"))
    kinds = {p.leaf.mesh.kind for parts in sources.values() for p in parts if isinstance(p.leaf, Sharded)}
    if len(kinds) > 1:
        errors.append(fail("write: the leaves lie on a process mesh and on a simulated one", fix="write them apart"))
    raise_all(errors)
    return slots


def _check_leaf(leaf: Any) -> None:
    if isinstance(leaf, Deferred):
        raise fail("is only described", fix="fs.materialize it")
    if not isinstance(leaf, (Sharded, Tensor)):
        raise fail(f"cannot write a {type(leaf).__name__}", fix="give a tensor")
    if isinstance(leaf, Sharded):
        if leaf.mesh.kind == "abstract":
            raise fail("is on an abstract mesh, where leaves have no values", fix="use another mesh")
        _ = leaf.shards  # raises where it was donated
    if leaf.dtype not in _WORDS:
        raise fail(f"cannot write {leaf.dtype}", fix=f"use one of {', '.join(DTYPES)}")


def _slot(name: str, parts: Sequence[Source]) -> Slot:
    shapes = {p.pattern.theirs(p.leaf.shape) for p in parts}
    dtypes = {p.leaf.dtype for p in parts}
    if len(shapes) > 1 or len(dtypes) > 1:
        shown = [f"{p.where}  {describe(p.leaf.dtype, p.pattern.theirs(p.leaf.shape))}" for p in parts]
        raise fail("has parts of different shapes or dtypes", *shown, fix="they are parts of one tensor there")
    rest = absent(p.pattern for p in parts)
    if rest:
        raise fail("lacks a part", f"{', '.join(p.where for p in parts)} leave out {', '.join(rest)}",
                   fix="give a leaf for each part")  # fmt: skip
    of_part: dict[Any, str] = {}
    for p in parts:
        twin = of_part.setdefault(p.pattern.part, p.where)
        if twin != p.where:
            raise fail("would be written twice", f"{twin} and {p.where}", fix="give each leaf a name of its own")
    return Slot(name, dtypes.pop(), shapes.pop(), tuple(parts))


def check_described(leaves: Sequence[tuple[tree.Path, Any]], described: Sequence[tuple[tree.Path, Any]]) -> None:
    """Raise, listing every leaf, unless those to be written are those described, and of their shapes."""
    found, wanted = dict(leaves), dict(described)
    errors = [fail(f"write: {tree.show('tree', p)} is missing", described=w) for p, w in wanted.items()
              if p not in found]  # fmt: skip
    for path, x in found.items():
        shape = getattr(x, "shape", None)
        if path not in wanted:
            errors.append(fail(f"write: {tree.show('tree', path)} is not in the model of the config"))
        elif shape is not None and tuple(shape) != tuple(wanted[path].shape):
            errors.append(fail(f"write: {tree.show('tree', path)} has another shape than the config says",
                               got=list(shape), expected=list(wanted[path].shape)))  # fmt: skip
    raise_all(errors)


def files_of(slots: Sequence[Slot], most: int, metadata: dict[str, str]) -> list[File]:
    """The tensors in order, and another file where one would grow beyond `most` bytes of them."""
    if not slots:
        raise fail("write: there are no leaves", fix="give the parameters")
    if type(most) is not int or most < 1:
        raise fail(f"write: max_shard_bytes={most!r}", fix="a number of bytes")
    if not all(isinstance(x, str) for pair in metadata.items() for x in pair):
        raise fail(f"write: metadata={metadata!r}", fix="from strings to strings, as the format has it")
    groups: list[list[Slot]] = [[]]
    for slot in slots:
        if groups[-1] and sum(s.nbytes for s in groups[-1]) + slot.nbytes > most:
            groups.append([])
        groups[-1].append(slot)
    files = []
    for i, group in enumerate(groups):
        group.sort(key=lambda s: -s.dtype.itemsize)  # the widest first: every tensor is aligned
        header: dict[str, Any] = {"__metadata__": metadata}
        at = 0
        for s in group:
            spot = [at, at + s.nbytes]
            header[s.name] = {"dtype": _WORDS[s.dtype], "shape": list(s.shape), "data_offsets": spot}
            at += s.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        name = SINGLE if len(groups) == 1 else f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        files.append(File(name, len(text).to_bytes(8, "little") + text, tuple(group)))
    return files


def as_json(config: Mapping[str, Any]) -> str:
    """The text of config.json."""
    try:
        return json.dumps(dict(config), indent=2, sort_keys=True) + "\n"
    except (TypeError, ValueError) as e:
        raise fail("write: config= is not JSON", str(e), fix="numbers, strings, booleans, None, lists and dicts") from e


def lines(slots: Sequence[Slot]) -> list[str]:
    """What is written, in lines that are equal on two ranks just if they may write it together."""
    return [f"{s.name}  {describe(s.dtype, s.shape)}  from {p.where}  " + (
                f"{p.leaf!r} on {p.leaf.mesh!r}" if isinstance(p.leaf, Sharded)
                else f"a tensor of crc32 {zlib.crc32(bytes_of(p.leaf)):08x}")
            for s in slots for p in s.sources]  # fmt: skip


def check_alike(told: Sequence[Sequence[str]]) -> None:
    """Raise, naming what differs, unless every rank has the same `lines`."""
    wrong = []
    for rank, lines in enumerate(told):
        for mine, its in itertools.zip_longest(told[0], lines, fillvalue="nothing"):
            if mine != its:
                wrong.append(f"rank 0  {mine}    rank {rank}  {its}")
    if wrong:
        raise fail("write: the ranks do not hold the same leaves", *wrong,
                   fix="plain tensors and the config must be the same on every rank")  # fmt: skip


__all__ = ["File", "Slot", "Source", "as_json", "check_alike", "check_described", "files_of", "lines", "slots_of"]
