"""Weights by slices of safetensors files: leaves whose initializer reads, on every rank, just the bytes of its part."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.checkpoint.parts import bytes_of
from fshard.errors import ShardingError, fail, raise_all
from fshard.init import Deferred
from fshard.spec import Box, box_shape, describe

from .folder import Entry, Scan, Where, no_dtype, unreadable
from .pattern import Pattern, absent, identity

CHUNK = 8 << 20  # bytes in memory beside the part itself, while it is read


@dataclass(frozen=True)
class FileTensor:
    """The name of a tensor in the file, and how its dims become ours: `dims` and `at` as in `Pattern`; None is as ours.

    >>> Their("h.0.attn.c_attn.weight", "d (three h k) -> d three h k")
    Their(name='h.0.attn.c_attn.weight', dims='d (three h k) -> d three h k', at=None)
    """

    name: str
    dims: str | None = None
    at: Mapping[str, int] | None = None

    def pattern(self, ndim: int) -> Pattern:
        """The rule, for a leaf of ours with `ndim` dims."""
        return identity(ndim) if self.dims is None else Pattern(self.dims, self.at)


class Stored:
    """An initializer that reads its box from a file. Shown as `stored(model.safetensors: h.0.ln_1.weight)`.

    `copy` is a tensor that must hold the same: where it does not, whoever saved it had not tied the two.
    """

    def __init__(self, entry: Entry, pattern: Pattern, copy: Entry | None = None) -> None:
        self.entry, self.pattern, self.copy = entry, pattern, copy

    def describe(self) -> str:
        """What it is called where a leaf is shown."""
        return f"stored({self.entry.file.name}: {self.entry.name})"

    def fill(self, key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The part of the leaf, read and rounded to `dtype` chunk by chunk. No other byte of the tensor is read.

        Raises ShardingError where the file cannot be read, or is not what it was when its header was read.
        """
        out = torch.empty(box_shape(box), dtype=dtype, device=device)
        kind = self.entry.dtype
        assert kind is not None
        most = CHUNK // kind.itemsize
        room = torch.empty(0, dtype=kind, device="cpu")
        with _opened(self.entry) as fd:
            for piece in self.pattern.pieces(shape, box):
                view = piece.of(out)
                for part, starts, run in piece.chunks(most):
                    target = view[part]
                    if target.dtype == kind and target.device.type == "cpu" and target.is_contiguous():
                        self._read(fd, target, starts, run)
                        continue
                    if room.numel() < target.numel():
                        room = torch.empty(target.numel(), dtype=kind, device="cpu")
                    values = room[: target.numel()]
                    self._read(fd, values, starts, run)
                    target.copy_(values.view(target.shape))
        if self.copy is not None:
            other = Stored(self.copy, self.pattern).fill(key, shape, box, dtype, device)
            if not torch.equal(out.flatten().view(torch.uint8), other.flatten().view(torch.uint8)):
                raise fail(f"{self.copy.file}: {self.copy.name!r} is not equal to {self.entry.name!r}",
                           "the config ties them: they would be one leaf",
                           fix="tie_word_embeddings: false in config.json, or take it out of the file")  # fmt: skip
        return out

    def _read(self, fd: int, values: Tensor, starts: Sequence[int], run: int) -> None:
        """Fill a contiguous tensor from the runs of `run` elements that begin at `starts`."""
        room = bytes_of(values)  # its own, as it is contiguous and on the CPU
        size, item, first = run * values.itemsize, values.itemsize, self.entry.start
        for i, start in enumerate(starts):
            part, place = room[i * size : (i + 1) * size], first + start * item
            got = os.preadv(fd, (part,), place)
            while got < size:
                more = os.preadv(fd, (part[got:],), place + got)
                if not more:
                    raise _altered(self.entry, f"it ends before byte {place + size}")
                got += more


@contextlib.contextmanager
def _opened(entry: Entry) -> Iterator[int]:
    """A file descriptor; afterwards the file must be what it was when its header was read."""
    try:
        fd = os.open(entry.file, os.O_RDONLY)
    except OSError as e:
        raise unreadable(entry.file, e) from e
    try:
        yield fd
        now = os.fstat(fd)
    finally:
        os.close(fd)
    if (now.st_size, now.st_mtime_ns) != (entry.size, entry.changed):
        raise _altered(entry, f"{entry.size} bytes then, {now.st_size} now")


def _altered(entry: Entry, why: str) -> ShardingError:
    return fail(f"{entry.file}: has changed since its header was read", why, f"in {entry.name!r}",
                fix="read the folder again, when nothing writes to it")  # fmt: skip


# --- the leaves -----------------------------------------------------------------------------------------------


def tensors(path: Where) -> dict[str, Deferred]:
    """Every tensor of a folder, or of one safetensors file, described; only the headers are read.

    >>> tensors("my-gpt2")["transformer.ln_f.weight"]
    f32[16] = stored(model.safetensors: transformer.ln_f.weight)

    Raises ShardingError listing every tensor whose bytes are not there, or whose dtype torch does not have.
    """
    scan = Scan(Path(path))
    errors = scan.errors + [no_dtype(e) for e in scan.found.values() if e.dtype is None]
    raise_all(errors)
    return {n: Deferred(e.shape, e.dtype or torch.float32, Stored(e, identity(len(e.shape))))
            for n, e in scan.found.items()}  # fmt: skip


def read(
    folder: Where | Scan, described: Any, theirs: Callable[[tree.Path], FileTensor], *, prefix: str = "",
    ignored: Sequence[str] = (), copies: Mapping[str, str] | None = None,
) -> Any:  # fmt: skip
    """The tree `described` with its values in a folder: leaves of the same shapes, which `materialize` reads.

    They have the dtypes of the file. Only the headers are read here. A leaf at two paths of `described`, a tie, is one
    leaf again, read under the first of its names that is there.

    Args:
        folder: where it is, or what `folder.Scan` found there.
        theirs: the tensor of the leaf at a path.
        prefix: `"transformer."`: names are looked up as given, without it, and with it; for a base model that was saved
            without its head, or the reverse.
        ignored: the ends of names of tensors that need not be used.
        copies: another name -> the tensor that it is tied to. Where a file has both, both are read and compared.

    >>> weights = read("my-gpt2", {"w": fs.init.ones(16)}, lambda path: Their("ln_f.weight"), prefix="transformer.",
    ...                ignored=("weight", "bias"))
    >>> fs.materialize(weights, P("model"), mesh, key=fs.key(0))
    {'w': f32[16@model]}

    Raises ShardingError, before any value is read, listing every tensor that is missing, extra, of another shape, of no
    dtype of torch, cut short or out of place in its file, or promised by an index and not in its file.
    """
    scan = folder if isinstance(folder, Scan) else Scan(Path(folder))
    folder = scan.path
    errors, prefix = list(scan.errors), prefix and prefix.rstrip(".") + "."
    places: dict[int, list[tuple[tree.Path, FileTensor]]] = {}
    leaves = tree.leaves_with_path(described)
    for path, leaf in leaves:
        places.setdefault(id(leaf), []).append((path, theirs(path)))
    made: dict[int, Deferred] = {}
    used: set[str] = set()
    patterns: dict[str, list[Pattern]] = {}
    for _, leaf in leaves:
        if id(leaf) in made:
            continue
        options = [(name, path, their) for path, their in places[id(leaf)] for name in _spellings(their.name, prefix)
                   if name in scan.found]  # fmt: skip
        used |= {name for name, _, _ in options}
        made[id(leaf)] = leaf
        try:
            path, their = places[id(leaf)][0]
            if not isinstance(leaf, Deferred):
                raise fail(f"{tree.show('params', path)}: is a {type(leaf).__name__}", fix="describe it: fs.init.*")
            if not options:
                if scan.complete:
                    raise fail(f"{folder}: {their.name!r} is missing",
                               f"for {tree.show('params', path)}, {describe(leaf.dtype, leaf.shape)}")  # fmt: skip
                continue
            name, path, their = options[0]
            twins = [n for other, own in (copies or {}).items() if own == their.name
                     for n in _spellings(other, prefix) if n in scan.found]  # fmt: skip
            used |= set(twins)
            made[id(leaf)], pattern = _stored(folder, scan.found[name], leaf, tree.show("params", path), their,
                                              scan.found[twins[0]] if twins else None)  # fmt: skip
            patterns.setdefault(name, []).append(pattern)
        except ShardingError as e:
            errors.append(e)
    for name, of_tensor in patterns.items():
        try:
            rest = absent(of_tensor)
        except ShardingError as e:
            errors.append(ShardingError(f"{folder}: {name!r} {e}"))
            continue
        if rest:
            errors.append(fail(f"{folder}: no leaf takes all of {name!r}", f"left over: {', '.join(rest)}"))
    errors += [fail(f"{folder}: {e.name!r} is not part of this model", f"{e.word.lower()}{list(e.shape)}")
               for name, e in scan.found.items() if name not in used and not name.endswith(tuple(ignored))]  # fmt: skip
    raise_all(errors)
    return tree.unflatten(tree.structure(described), [made[id(leaf)] for _, leaf in leaves])


def _spellings(name: str, prefix: str) -> list[str]:
    return list(dict.fromkeys([name, name.removeprefix(prefix), prefix + name]))


def _stored(
    folder: Path, entry: Entry, leaf: Deferred, where: str, their: FileTensor, copy: Entry | None
) -> tuple[Deferred, Pattern]:
    try:
        pattern = their.pattern(leaf.ndim)
        expected = pattern.theirs(leaf.shape)
    except ShardingError as e:
        raise ShardingError(f"{where}: {e}") from e
    if entry.shape != expected:
        note = [] if their.dims is None else [f"{their.dims}, ours {list(leaf.shape)}"]
        raise fail(f"{folder}: {entry.name!r} has another shape, for {where}", *note,
                   got=list(entry.shape), expected=list(expected))  # fmt: skip
    if entry.dtype is None:
        raise no_dtype(entry)
    if entry.dtype.is_floating_point != leaf.dtype.is_floating_point:
        raise fail(f"{folder}: {entry.name!r} has a dtype of another kind, for {where}",
                   got=describe(entry.dtype, entry.shape), expected=describe(leaf.dtype, expected))  # fmt: skip
    if copy is not None and (copy.shape, copy.word) != (entry.shape, entry.word):
        raise fail(f"{folder}: {copy.name!r} is tied to {entry.name!r} by the config, and another tensor",
                   got=f"{copy.word}{list(copy.shape)}", expected=f"{entry.word}{list(entry.shape)}")  # fmt: skip
    return Deferred(leaf.shape, entry.dtype, Stored(entry, pattern, copy)), pattern


__all__ = ["FileTensor", "Stored", "read", "tensors"]
