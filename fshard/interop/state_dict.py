"""One dense file of tensors by name, to and from any mesh: a state_dict of `torch.save`, or a safetensors file.

    state_dict.write("model.pt", params)               # every rank writes the bytes of its parts
    module.load_state_dict(torch.load("model.pt", weights_only=True))

    module.load_state_dict(state_dict.gather(params))                  # in memory: full tensors, on every rank

    torch.save(module.state_dict(), "model.pt")
    params = fs.materialize(state_dict.read("model.pt", described), specs, mesh, key=key)      # and reads them

A rank holds only its parts of the leaves, and a buffer of at most 8 MiB. A name is the dotted path of
a leaf, in `{"params": ..., "buffers": ...}` without that first key. A tie, one leaf at two paths, is stored once and
has both names.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import secrets
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from zlib_ng.zlib_ng import crc32

from fshard import tree
from fshard._core.files.io import Ranks, StrPath, locked, sync, write_errors, write_file
from fshard._core.files.torch_file import Archive
from fshard._core.files.url import as_path
from fshard.defer import Apply
from fshard.errors import ShardingError, checked, fail, must_be, raise_all
from fshard.reshard import device_get
from fshard.sharded import Sharded

from .hf.export import summaries, write_parts
from .hf.folder import SUFFIX, WeightHeaders
from .hf.layout import Leaves, OutputFile, output_files, output_tensors
from .hf.module import Names, by_name, name_of, read_leaves
from .hf.places import count_elements
from .hf.weights import FileTensor, file_tensor
from .hf.weights import read as read_tree

Theirs = Callable[[tree.Path], FileTensor]
_BLOCK_BYTES = 1 << 20  # read at once

_OF_TORCH = (".pt", ".pth", ".bin", ".ckpt")


@checked
def write(
    path: StrPath, tree_: Any, *, of: Apply | None = None, theirs: Theirs | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Write a tree of tensors as one dense file: `.safetensors`, or `.pt`, `.pth`, `.bin`, `.ckpt` of `torch.save`.

    Leaves are `Sharded`, on any mesh, or tensors that are the same on every rank; optimizer states too. Each different
    part is written once, by one of the ranks that hold it. An older file is replaced at once, when all is on the disk.
    On a process mesh every rank calls this, on a shared folder. The files of all meshes are equal, byte by byte.

    Args:
        of: the function that `fs.defer` returned with a module, whose full tree is written under the names of its
            `state_dict`, with its ties, and without the buffers that are not persistent.
        theirs: path of a leaf -> its tensor in the file, as of `interop.hf.write`; its dotted path if left out.
        metadata: texts by name, of a safetensors file.

    >>> params = fs.device_put({"up": torch.ones(4, 6), "norm": {"w": torch.ones(6)}}, P("model"), mesh)
    >>> write("mlp.pt", params)
    >>> {name: x.shape for name, x in torch.load("mlp.pt", weights_only=True).items()}
    {'norm.w': torch.Size([6]), 'up': torch.Size([4, 6])}

    Raises ShardingError, on every rank, listing every leaf that cannot be written; for two leaves of one name; for a
    path with another suffix; if the ranks have different leaves; if one cannot write. The older file is then unchanged.
    """
    _check_path("write", path)
    final = Path(path)
    leaves = tree.leaves_with_path(tree_)
    ranks = Ranks.from_leaves("write", [leaf for _, leaf in leaves])
    files: list[OutputFile] = []

    def plan() -> dict[str, str]:
        _check_arguments(final, of, theirs, metadata)
        named = theirs or by_name(tree_)
        stored, ties = _of_module(leaves, tree_, of)
        tensors = output_tensors(stored, named, "")
        aliases = _aliases(stored, named) | ties
        if not tensors:
            raise fail("write: tree_ has no leaves", fix="give the tree of tensors")
        (file,) = output_files(tensors, 1 << 62, {"format": "pt"} | dict(metadata or {}), final.name)
        if clash := sorted(aliases.keys() & {t.name for t in tensors}):
            raise _two_leaves(clash[0])
        if final.suffix == SUFFIX:
            files.append(replace(file, metadata={**file.metadata, **aliases}))
        else:
            shapes = {t.name: (t.dtype, t.shape) for t in tensors}
            with write_errors("write", final, f"{final.name} is unchanged"):  # torch writes the places to a file
                archive = Archive.make(shapes, aliases)
            files.append(_TorchFile(file.name, {}, tuple(tensors), archive))
        return {} if ranks.one_process else summaries(files)

    def create() -> str:
        with write_errors("write", final, f"{final.name} is unchanged"):
            final.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked("write", final, final.with_name(f".{final.name}.lock")))
            held.callback(_discard, final)
            _discard(final)
            temporary = final.with_name(f"{_temporary(final)}{secrets.token_hex(4)}")
            write_file(temporary, [files[0].header], files[0].nbytes)
        return temporary.name

    def publish(crc32: Mapping[str, int]) -> None:
        with write_errors("write", final, f"{final.name} is the older file, or all of the new one"):
            if isinstance(file, _TorchFile):
                _overwrite(temporary, file.archive.pieces([crc32[t.name] for t in file.tensors]))
            os.replace(temporary, final)
            sync(final.parent)

    ranks.check_equal(plan, "plain tensors and the arguments must be the same on every rank")
    with contextlib.ExitStack() as held:
        temporary = final.with_name(ranks.run_on_first(create))
        (file,) = files
        write_parts(temporary, files, ranks)
        crc32 = ChainMap(*ranks.run(lambda: _crc32(temporary, file, ranks) if isinstance(file, _TorchFile) else {}))
        ranks.run_on_first(lambda: publish(crc32))


@checked
def gather(tree_: Any, *, of: Apply | None = None) -> dict[str, Tensor]:
    """Return a tree as a `state_dict` in memory: full CPU tensors by name, for `module.load_state_dict`.

    A name is the dotted path of a leaf. A tied tensor has all of its names. On a process mesh every rank calls this,
    and gets all tensors: `write` needs only the memory of a rank's parts.

    Args:
        of: the function that `fs.defer` returned with a module, whose full tree is gathered under the names of its
            `state_dict`, with its ties, and without the buffers that are not persistent.

    >>> params = fs.device_put({"up": torch.ones(4, 6), "norm": {"w": torch.ones(6)}}, P("model"), mesh)
    >>> {name: x.shape for name, x in gather(params).items()}
    {'norm.w': torch.Size([6]), 'up': torch.Size([4, 6])}

    Raises ShardingError for leaves that are not tensors, and, with `of`, listing every leaf that is missing or not the
    module's.
    """
    leaves = tree.leaves_with_path(tree_)
    raise_all([must_be(f"gather: {tree.show('tree', path)}", "a Sharded or a Tensor", x) for path, x in leaves
               if not isinstance(x, (Sharded, Tensor))])  # fmt: skip
    stored, ties = _of_module(leaves, tree_, of)
    full: dict[int, Tensor] = {}  # of each leaf: a tie is gathered once
    out: dict[str, Tensor] = {}
    for path, leaf in stored:
        if id(leaf) not in full:
            full[id(leaf)] = device_get(leaf) if isinstance(leaf, Sharded) else leaf.detach().cpu()
        if out.setdefault(name_of(path, tree_), full[id(leaf)]) is not full[id(leaf)]:
            raise fail(f"gather: {name_of(path, tree_)!r} is the name of two leaves", fix="give each another name")
    return out | {tied: out[name] for tied, name in ties.items()}


@checked
def read(
    path: StrPath, described: Any, *, of: Apply | None = None, theirs: Theirs | None = None, prefix: str = "",
    ignored: Sequence[str] = (), missing: Sequence[str] = (),
) -> Any:  # fmt: skip
    """Return the tree `described` with its values in a file: leaves of the same shapes, which `fs.materialize` reads.

    Every rank reads only the bytes of its parts. `path` may be an index of several files,
    `pytorch_model.bin.index.json`. Names of tensors in dicts and lists of a file of torch are dotted,
    `model.h.0.weight`. Its pickle is read without running anything in it. The dtypes are the file's.

    Args:
        of: as of `write`. The file may have any or all names of a tie; buffers that are not persistent keep their
            initializers.
        theirs: as of `write`.
        prefix: names are looked up unchanged, without this prefix (`"model."`), and with it.
        ignored: names of tensors that are not read: their ends, or globs (`"optimizer.*"`); only ends with `theirs`.
        missing: names of leaves that keep their initializers if the file lacks them: ends, or globs.

    >>> torch.save({"model": {"w": torch.ones(6, 4).T}, "step": 3}, "train.pt")
    >>> read("train.pt", {"w": fs.init.zeros((4, 6))}, prefix="model.")
    {'w': f32[4, 6] = stored(train.pt: model.w)}

    Raises ShardingError, before any value is read, listing every tensor that is missing, extra, of another shape or cut
    short; and for a file with other objects than tensors, dicts, lists, numbers and strings.
    """
    _check_path("read", path)
    headers = WeightHeaders(path, state_dict=True)
    if theirs is None:
        names = replace(Names.of(of), pretrained=None)  # the module's names, not the names in a library's files
        return read_leaves(headers, described, names, prefix, ignored, missing, "state_dict.read")
    if of is not None or missing:
        raise fail(f"read: theirs= and {'of=' if of is not None else 'missing='}", fix="leave one of them out")
    return read_tree(headers, described, theirs, prefix=prefix, ignored=ignored)


@dataclass(frozen=True)
class _TorchFile(OutputFile):
    """A file of `torch.save`: a dict of the tensors, each a storage of the archive."""

    archive: Archive

    @property
    def header(self) -> bytes:
        return bytes(self.archive.rest[0][1])

    @property
    def nbytes(self) -> int:
        return self.archive.nbytes

    @property
    def starts(self) -> list[int]:
        return [start for start, _ in self.archive.storages]


def _crc32(path: Path, file: OutputFile, ranks: Ranks) -> dict[str, int]:
    """Return the CRC-32, by name, of this process's share of the tensors, read back from the file."""
    out, nbytes = {}, [0] * ranks.size
    with open(path, "rb") as f:
        for start, t in zip(file.starts, file.tensors, strict=True):
            reader = nbytes.index(min(nbytes))  # the one with the fewest bytes so far, as in `assign_writers`
            nbytes[reader] += t.nbytes
            if reader == ranks.rank:
                f.seek(start)
                sizes = (min(_BLOCK_BYTES, t.nbytes - i) for i in range(0, t.nbytes, _BLOCK_BYTES))
                out[t.name] = functools.reduce(lambda value, block: crc32(block, value), map(f.read, sizes), 0)
    return out


def _overwrite(path: Path, pieces: Iterable[tuple[int, bytes]]) -> None:
    """Replace some bytes of a file, and flush them to the disk."""
    with open(path, "r+b") as f:
        for start, data in pieces:
            f.seek(start)
            f.write(data)
        f.flush()
        os.fsync(f.fileno())


def _check_path(verb: str, path: StrPath) -> None:
    if "\0" in os.fspath(path):
        raise fail(f"{verb}: path {str(path)!r} has a null byte, which no path can have")
    if not isinstance(as_path(path), Path):
        raise fail(f"{verb}: path {str(path)!r} is in a storage, whose files are not written or read by parts",
                   fix="fs.hf.save of a folder, or fs.checkpoint.save; or a path on a disk")  # fmt: skip


def _check_arguments(path: Path, of: Apply | None, theirs: Theirs | None, metadata: Mapping[str, str] | None) -> None:
    if path.suffix not in (SUFFIX, *_OF_TORCH):
        raise fail(f"write: path {str(path)!r} has the suffix {path.suffix!r}",
                   fix=f"{SUFFIX} for safetensors; {', '.join(_OF_TORCH)} for torch.load")  # fmt: skip
    if metadata is not None and path.suffix != SUFFIX:
        raise fail(f"write: metadata of {str(path)!r}", fix="a safetensors file has metadata, a file of torch none")
    if of is not None and theirs is not None:
        raise fail("write: theirs= and of=", fix="leave one of them out")


def _of_module(leaves: Leaves, tree_: Any, of: Apply | None) -> tuple[Leaves, dict[str, str]]:
    """Return the leaves that a module's state_dict has, and its ties: name -> the name of the leaf that it uses."""
    if of is None:
        return leaves, {}
    names = Names.of(of)
    named = [(name_of(path, tree_), path, leaf) for path, leaf in leaves]
    found = {name: path for name, path, _ in named}
    raise_all(names.errors(found))
    not_stored = {*names.transient, *(tied for tied, name in names.ties.items() if name in names.transient)}
    stored = [(path, leaf) for name, path, leaf in named if name not in not_stored]
    return stored, {tied: name for tied, name in names.ties.items() if tied not in {*found, *not_stored}}


def _aliases(leaves: Leaves, theirs: Theirs) -> dict[str, str]:
    """Return the other names of leaves that are at several paths: name -> the name under which the leaf is written."""
    first: dict[int, tree.Path] = {}
    aliases: dict[str, str] = {}
    errors: list[ShardingError] = []
    for path, leaf in leaves:
        of_first = first.setdefault(id(leaf), path)
        if of_first == path:
            continue
        parts, others = (file_tensor("write", p, theirs(p)).parts(leaf.shape) for p in (of_first, path))
        full = all(count_elements([p]) == math.prod(p.shape) for p in parts)
        if not full or [replace(p, name="") for p in parts] != [replace(p, name="") for p in others]:
            errors.append(fail(f"write: {tree.show('tree', path)} is the leaf {tree.show('tree', of_first)}, and its "
                               "dims in the file are others", fix="make it another leaf: x.clone()"))  # fmt: skip
            continue
        for a, b in zip(parts, others, strict=True):
            if a.name != b.name and aliases.setdefault(b.name, a.name) != a.name:
                errors.append(_two_leaves(b.name))
    raise_all(errors)
    return aliases


def _two_leaves(name: str) -> ShardingError:
    return fail(f"write: {name!r} is the name of two leaves", fix="give each leaf another name")


def _temporary(final: Path) -> str:
    return f".{final.name}.saving-"


def _discard(final: Path) -> None:
    """Remove the temporary files of saves that failed or were killed, as far as that is possible."""
    with contextlib.suppress(OSError):
        for file in final.parent.iterdir():
            if file.name.startswith(_temporary(final)):
                file.unlink()


__all__ = ["gather", "read", "write"]
