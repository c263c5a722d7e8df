"""Write Hugging Face folders by slices: every rank writes the bytes of its parts, and nothing is gathered.

1. Every rank computes the same layout of files.
2. Rank 0 creates the files, each of its final size with its header, in a temporary folder `.saving-9f2c81d0` inside the
   folder to write.
3. Every rank writes its bytes into them and flushes them to the disk.
4. Rank 0 renames the files that are carried over from another folder, config.json, then the weights.

A reader finds the old weights until one rename, and the new ones after it, never some of each. If old and new shards
have the same names, the index refers to the new ones in the temporary folder while they are renamed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor

from fshard import tree
from fshard._core.files import io
from fshard._core.files.io import Ranks, StrPath, locked, sync, write_errors, write_file
from fshard._core.files.url import AnyPath, UrlPath, as_path
from fshard.errors import ShardingError, checked, fail
from fshard.spec import Box, overlap, relative_box

from .carried import carried_files, complete_config
from .folder import CONFIG, INDEX, SINGLE, read_json
from .layout import Leaves, OutputFile, OutputTensor, Source, Theirs, check_described, output_files, output_tensors
from .weights import CHUNK_BYTES

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_TEMPORARY, _LOCK = ".saving-", ".saving.lock"
_UNCHANGED = "the weights in the folder are unchanged"
Contents = tuple[list[OutputTensor], dict[str, bytes]]  # the tensors, and the config by its name, if there is one
Parts = list[tuple[int, Source, Box, Tensor]]  # first byte of the tensor in its file, leaf, box of it, values


@checked
def write(
    folder: StrPath, tree_: Any, theirs: Theirs, *, config: Mapping[str, Any] | None, like: StrPath | None = None,
    prefix: str = "", max_shard_bytes: int = 5 * 10**9, metadata: Mapping[str, str] | None = None,
    described: Any = None,
) -> None:  # fmt: skip
    """Write a folder that `from_pretrained` reads: config.json and model.safetensors, or shards of it with an index.

    Leaves are `Sharded`, on any mesh, or tensors that are the same on every rank. Each different part is written once,
    by one of the ranks that hold it. A leaf at two paths is written under the name of the first. Weights in the folder
    are replaced all at once; files of other names stay. On a process mesh every rank calls this, on a shared folder.

    Args:
        theirs: path of a leaf -> its tensor in the file, all or a part of it; or its parts in files.
        config: the contents of config.json, to which the dtype of the leaves is added; None writes no config.json.
        like: a folder of the same type of model, whose tokenizer and other small files are copied, and the keys of its
            config.json that `config` lacks.
        prefix: put before every name: `"transformer."` for a base model written as part of one with a head.
        max_shard_bytes: the most bytes of tensors in one file, unless a single tensor has more.
        metadata: of the files; `{"format": "pt"}` if left out.
        described: the tree that the config describes; leaves that are missing, extra or of another shape are errors.

    >>> write("my-norm", {"w": torch.ones(16)}, lambda path: FileTensor("ln_f.weight"), config={"model_type": "gpt2"})
    >>> sorted(os.listdir("my-norm"))
    ['config.json', 'model.safetensors']

    Raises ShardingError, on every rank, listing every leaf that cannot be written and every tensor that lacks a
    part; if the ranks have different leaves; if one cannot write. The folder is then unchanged.
    """
    leaves = tree.leaves_with_path(tree_)
    write_files(folder, leaves, lambda: model_contents(leaves, theirs, config, like, prefix, described), like=like,
                max_shard_bytes=max_shard_bytes, metadata=metadata)  # fmt: skip


def model_contents(
    leaves: Leaves, file_tensor: Theirs, config: Mapping[str, Any] | None, like: StrPath | None, prefix: str = "",
    described: Any = None,
) -> Contents:  # fmt: skip
    """Return the contents of a model's folder, for `write_files`."""
    if described is not None:
        check_described(leaves, tree.leaves_with_path(described))
    tensors = output_tensors(leaves, file_tensor, prefix)
    if config is None:
        return tensors, {}
    return tensors, {CONFIG: complete_config(config, [s.leaf for t in tensors for s in t.sources], like)}


def write_files(
    folder: StrPath, leaves: Leaves, contents: Callable[[], Contents], *, like: StrPath | None, single: str = SINGLE,
    max_shard_bytes: int = sys.maxsize, metadata: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Write a folder of tensors and a config, all at once, as `write` does.

    Args:
        leaves: all that is to be written, each with its path.
        contents: returns the tensors, and the config by its name, if there is one: the same on every rank.
        like: the folder with the other files.
        single: the name of the file of tensors. Under the name of a model's, its older weights of other names are
            removed.
    """
    if "\0" in os.fspath(folder):
        raise fail(f"write: folder {folder!r} has a null byte, which no path can have")
    ranks = Ranks.from_leaves("write", [leaf for _, leaf in leaves])
    final = as_path(folder)
    files: list[OutputFile] = []
    config: dict[str, bytes] = {}
    small: dict[str, bytes] = {}  # all but the tensors; the config is the last to be renamed

    def plan() -> dict[str, str]:
        tensors, found = contents()
        config.update(found)
        files.extend(output_files(tensors, max_shard_bytes, {"format": "pt"} if metadata is None else metadata, single))
        out = {name: repr(data.decode()) for name, data in config.items()}
        return out if ranks.one_process else out | summaries(files)

    def create() -> str:
        small.update({**carried_files(json.loads(config.get(CONFIG, b"{}")), like), **config})
        with write_errors("write", final, _UNCHANGED):
            if isinstance(final, UrlPath):
                temporary = Path(tempfile.mkdtemp(prefix="fshard"))
                held.callback(shutil.rmtree, temporary, ignore_errors=True)
                return str(_create_files(temporary, files, small))
            if not final.exists():
                held.callback(_try, final.rmdir)  # if nothing is in it at the end
            final.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked("write", final, final / _LOCK))
            held.callback(_try, partial(_remove_temporary_folders, final))
            _remove_temporary_folders(final)
            return _create_files(final / f"{_TEMPORARY}{secrets.token_hex(4)}", files, small).name

    ranks.check_equal(plan, "plain tensors and the arguments must be the same on every rank")
    with contextlib.ExitStack() as held:
        created = ranks.run_on_first(create)
        temporary = Path(created) if isinstance(final, UrlPath) else final / created
        write_parts(temporary, files, ranks)
        ranks.run_on_first(lambda: _publish(final, temporary, files, small))


# --- the files ------------------------------------------------------------------------------------------------


def _create_files(temporary: Path, files: Sequence[OutputFile], small: Mapping[str, bytes]) -> Path:
    """Create the temporary folder, with files of their final size, and return it."""
    temporary.mkdir(exist_ok=True)
    for file in files:
        write_file(temporary / file.name, [file.header], file.nbytes)
    for name, data in small.items():
        (temporary / name).parent.mkdir(exist_ok=True)
        write_file(temporary / name, [data])
    return temporary


def _write_index(path: AnyPath, files: Sequence[OutputFile], folder: str = "") -> None:
    """Write an index of files in `folder`, a path relative to the index."""
    value = {
        "metadata": {"total_size": sum(t.nbytes for file in files for t in file.tensors)},
        "weight_map": {t.name: folder + file.name for file in files for t in file.tensors},
    }
    write_file(path, [(json.dumps(value, indent=2, sort_keys=True) + "\n").encode()])


def summaries(files: Sequence[OutputFile]) -> dict[str, str]:
    """Return texts by name that are equal on two ranks if they may write the files together."""
    out = {file.name: f"header of crc32 {zlib.crc32(file.header):08x}" for file in files}
    return out | {s.label: f"{io.summary(s.leaf)} for {t.name}" for f in files for t in f.tensors for s in t.sources}


def write_parts(temporary: Path, files: Sequence[OutputFile], ranks: Ranks) -> None:
    """Write the tensors into files of their final size, each rank its parts, and flush them to the disk.

    `temporary` is the folder of the files or, of one file, its path.
    """

    def write_own() -> None:
        if not temporary.exists():
            raise fail(f"write: {temporary} does not exist on this rank, and rank 0 has created it",
                       fix="write to a folder that all ranks share; for a URL, set TMPDIR to one")  # fmt: skip
        writers = iter(io.assign_writers(s.leaf for file in files for t in file.tensors for s in t.sources))
        for file in files:
            parts: Parts = []
            for start, tensor in zip(file.starts, file.tensors, strict=True):
                for source in tensor.sources:
                    parts += [(start, source, box, io.local_part(source.leaf, writer)) for box, writer in next(writers)
                              if ranks.writes_for(writer)]  # fmt: skip
            if parts:
                path = temporary / file.name if temporary.is_dir() else temporary
                with write_errors("write", path, _UNCHANGED):
                    _write_into(path, parts)

    ranks.run(write_own)


def _write_into(path: Path, parts: Parts) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        for start, source, box, part in parts:
            itemsize = part.dtype.itemsize
            common = overlap(source.part.box, box)
            if common is None:
                continue
            inside = part[relative_box(common, box)]
            for inner, places in source.part.places.boxes(relative_box(common, source.part.box)):
                for chunk, offsets, run in places.chunks(inside[inner], CHUNK_BYTES // itemsize):
                    data, size = io.bytes_of(chunk), run * itemsize
                    for i, offset in enumerate(offsets):
                        _write_at(fd, data[i * size : (i + 1) * size], start + offset * itemsize)
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_at(fd: int, data: memoryview, position: int) -> None:
    while data:
        count = os.pwrite(fd, data, position)
        data, position = data[count:], position + count


# --- replacing the old weights --------------------------------------------------------------------------------


def _publish(final: AnyPath, temporary: Path, files: Sequence[OutputFile], small: Mapping[str, bytes]) -> None:
    with write_errors("write", final, "the folder has all of the old weights, or all of the new ones"):
        names = [file.name for file in files]
        if isinstance(final, UrlPath):
            _upload(final, temporary, files, small)
            return
        if len(files) > 1:
            _write_index(temporary / INDEX, files)
        sync(temporary)
        shared_names = len(files) > 1 and not _indexed_files(final).isdisjoint(names)
        if shared_names:  # the old index needs the old shards until it is replaced: hard links are renamed over them
            (temporary / "links").mkdir()
            for name in names:
                os.link(temporary / name, temporary / "links" / name)
            _write_index(temporary / f"links.{INDEX}", files, f"{temporary.name}/")
        for name in small:
            (final / name).parent.mkdir(exist_ok=True)
            os.replace(temporary / name, final / name)
        if shared_names:
            os.replace(temporary / f"links.{INDEX}", final / INDEX)  # from here on a reader finds the new weights
            sync(final)
        for name in names:
            os.replace(temporary / "links" / name if shared_names else temporary / name, final / name)
        sync(final)
        if len(files) > 1:
            os.replace(temporary / INDEX, final / INDEX)
            sync(final)
        _remove_older_weights(final, names)
        _remove_temporary_folders(final)
        sync(final)


def _upload(final: UrlPath, temporary: Path, files: Sequence[OutputFile], small: Mapping[str, bytes]) -> None:
    """Put the files into a storage that has no rename: the one that readers look at first is the last.

    An index is replaced at once, so new shards have names that the old index lacks: they are in a folder.
    """
    old, names = _indexed_files(final), {file.name for file in files}
    folder = "" if old.isdisjoint(names) else f"{time.time_ns()}/"
    for name, data in small.items():
        write_file(final / name, [data])
    new = [folder + file.name for file in files] if len(files) > 1 else [files[0].name]
    for name, file in zip(new, files, strict=True):
        (final / name).upload(temporary / file.name)
    if len(files) > 1:
        _write_index(final / INDEX, files, folder)
    _remove_older_weights(final, new, old)


def _remove_older_weights(final: AnyPath, new: Sequence[str], old: Collection[str] = ()) -> None:
    """Remove a model's weights that the files `new`, if they have the names of a model's, have replaced."""
    if SINGLE in new or _SHARD.fullmatch(PurePosixPath(new[0]).name):
        shards = [f.name for f in final.iterdir() if _SHARD.fullmatch(f.name)]
        for name in {SINGLE, INDEX, *shards, *old}.difference(new, [INDEX] if len(new) > 1 else ()):
            (final / name).unlink(missing_ok=True)


def _indexed_files(folder: AnyPath) -> set[str]:
    try:
        return set(read_json(folder / INDEX)["weight_map"].values())
    except (ShardingError, KeyError, AttributeError, TypeError):
        return set()


def _remove_temporary_folders(final: Path) -> None:
    """Remove the temporary folders of killed saves and of failed ones, except one that the index refers to."""
    needed = {Path(name).parent.name for name in _indexed_files(final)}
    for d in final.iterdir():
        if d.name.startswith(_TEMPORARY) and d.name not in needed:
            shutil.rmtree(d)


def _try(remove: Callable[[], object]) -> None:
    with contextlib.suppress(OSError):
        remove()
