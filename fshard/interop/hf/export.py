"""Hugging Face folders, written by slices: every rank writes just the bytes of its own parts, and nothing is gathered.

Every rank computes the same plan. Rank 0 lays out the files, each of its final size with its header, in a folder
`.saving-9f2c81d0` inside the one that is meant; every rank writes its bytes there and brings them to the disk; when
all have, rank 0 renames: config.json, then the weights. Readers find the weights that were there before, then the new
ones, and never some of each: where both have shards of the same names, the index names the new ones in the temporary
folder while they move.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from fshard import tree
from fshard._comm import in_region
from fshard.checkpoint.commit import sync
from fshard.checkpoint.parts import bytes_of
from fshard.errors import ShardingError, fail
from fshard.sharded import Sharded
from fshard.spec import Box, box_bounds, full_box

from .folder import CONFIG, INDEX, SINGLE, Where, read_json
from .layout import File, Source, as_json, check_alike, check_described, files_of, lines, slots_of
from .weights import CHUNK, FileTensor

T = TypeVar("T")

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_TEMPORARY = ".saving-"


def write(
    folder: Where, tree_: Any, theirs: Callable[[tree.Path], FileTensor], *, config: Mapping[str, Any],
    prefix: str = "",
    max_shard_bytes: int = 5 * 10**9, metadata: Mapping[str, str] | None = None, described: Any = None,
) -> None:  # fmt: skip
    """Write a folder that `from_pretrained` reads: config.json and model.safetensors, or shards of it with an index.

    Leaves are `Sharded`, on whatever mesh, or tensors that are the same on every rank. Each different part is written
    once, by the first rank that holds it, in chunks of some MiB. A leaf at two paths is written under the name of the
    first. Weights in the folder are replaced, all at once; files of other names stay. On a process mesh every rank
    calls this, on a folder that all of them share.

    Args:
        theirs: the tensor that the leaf at a path is, or is part of.
        config: what config.json will say.
        prefix: put before every name: `"transformer."` for a base model written as part of one with a head.
        max_shard_bytes: begin another file where the tensors of one would be more.
        metadata: of the files; `{"format": "pt"}` if left out.
        described: what the config describes; leaves that are missing, extra or of another shape are then errors too.

    >>> write("my-norm", {"w": torch.ones(16)}, lambda path: Their("ln_f.weight"), config={"model_type": "gpt2"})
    >>> sorted(os.listdir("my-norm"))
    ['config.json', 'model.safetensors']

    Raises ShardingError, on every rank, listing every leaf that cannot be written and every tensor of which a part is
    missing; where the ranks hold different leaves; where one cannot write. Then the folder is as it was.
    """
    if in_region():
        raise fail("write: called inside shard_map, where every leaf is a local part", fix="call it outside")
    leaves = tree.leaves_with_path(tree_)
    kinds = {x.mesh.kind for _, x in leaves if isinstance(x, Sharded)}
    alone = "process" not in kinds if kinds else not dist.is_initialized()
    rank = 0 if alone else dist.get_rank()
    final = Path(folder)

    files: list[File] = []

    def plan() -> list[str]:
        if described is not None:
            check_described(leaves, tree.leaves_with_path(described))
        slots = slots_of(leaves, theirs, prefix)
        files.extend(files_of(slots, max_shard_bytes, dict({"format": "pt"} if metadata is None else metadata)))
        return [] if alone else [f"config.json  {as_json(config)!r}", *lines(slots), f"{len(files)} files"]

    check_alike(_together(plan, alone))
    made = not final.exists()
    try:
        temporary = final / _together(lambda: _begin(final, files, as_json(config)) if rank == 0 else "", alone)[0]
        _together(lambda: _fill(temporary, files, None if alone else rank), alone)
        _together(lambda: _publish(final, temporary, files) if rank == 0 else None, alone)
    except BaseException:
        if rank == 0:
            _abandon(final, made)
        raise


def _together(job: Callable[[], T], alone: bool) -> list[T]:
    """What `job` gives on each rank. What any rank raises, all raise, once all are done."""
    mine: T | None = None
    error: Exception | None = None
    try:
        mine = job()
    except Exception as e:
        error = e
    words = "" if error is None else str(error) if isinstance(error, ShardingError) else f"write: {error!r}"
    told: list[Any] = [(mine, words)]
    if not alone:
        told = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(told, (mine, words))
        except RuntimeError as e:
            raise fail(f"write: rank {dist.get_rank()}: broken off: another rank has failed, or left the program",
                       str(e).splitlines()[0], fix="see the first traceback of the other ranks") from e  # fmt: skip
    said: dict[str, list[int]] = {}
    for rank, (_, text) in enumerate(told):
        if text:
            said.setdefault(text, []).append(rank)
    if said:
        common = len(said) == 1 and len(next(iter(said.values()))) == len(told)
        shown = list(said) if common else [f"rank {', '.join(map(str, r))}: {text}" for text, r in said.items()]
        raise ShardingError("\n".join(shown)) from error
    return [value for value, _ in told]


# --- the files ------------------------------------------------------------------------------------------------


def _begin(final: Path, files: Sequence[File], config: str) -> str:
    """Make the temporary folder, with files of their final size; its name."""
    with _saying(final):
        final.mkdir(parents=True, exist_ok=True)
        _clear(final)
        temporary = final / f"{_TEMPORARY}{secrets.token_hex(4)}"
        temporary.mkdir()
        for file in files:
            _put(temporary / file.name, file.head, file.bytes)
        _put(temporary / CONFIG, config.encode())
        if len(files) > 1:
            total = sum(s.nbytes for f in files for s in f.slots)
            _index(temporary / INDEX, {s.name: f.name for f in files for s in f.slots}, total)
    return temporary.name


def _index(path: Path, weight_map: dict[str, str], total: int) -> None:
    value = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _put(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def _put(path: Path, data: bytes, size: int | None = None) -> None:
    with open(path, "xb") as f:
        f.write(data)
        f.truncate(size)
        f.flush()
        os.fsync(f.fileno())


def _fill(temporary: Path, files: Sequence[File], rank: int | None) -> None:
    """Write this rank's parts, or with None everyone's, and bring them to the disk."""
    if not temporary.is_dir():
        raise fail(f"write: {temporary} is not here, though rank 0 has made it",
                   fix="write to a folder that all ranks share")  # fmt: skip
    for file in files:
        path, start, fd = temporary / file.name, len(file.head), -1
        with _saying(path):
            try:
                for slot in file.slots:
                    for source in slot.sources:
                        for box, part in _parts(source.leaf, rank):
                            fd = os.open(path, os.O_WRONLY) if fd < 0 else fd
                            _write(fd, start, source, box, part)
                    start += slot.nbytes
                if fd >= 0:
                    os.fsync(fd)
            finally:
                if fd >= 0:
                    os.close(fd)


def _parts(leaf: Sharded | Tensor, rank: int | None) -> Iterator[tuple[Box, Tensor]]:
    """The boxes of a leaf that this rank writes: each different one is its first holder's."""
    if isinstance(leaf, Tensor):
        if not rank:
            yield full_box(leaf.shape), leaf
        return
    seen = set()
    for holder in range(leaf.mesh.size):
        box = leaf.box(holder)
        if box_bounds(box) not in seen and rank in (None, holder):
            yield box, leaf.shards[leaf.mesh.ranks.index(holder)]
        seen.add(box_bounds(box))


def _write(fd: int, start: int, source: Source, box: Box, part: Tensor) -> None:
    item = part.dtype.itemsize
    for piece in source.pattern.pieces(source.leaf.shape, box):
        view = piece.of(part)
        for some, starts, run in piece.chunks(CHUNK // item):
            data = bytes_of(view[some])
            for i, at in enumerate(starts):
                left, place = data[i * run * item : (i + 1) * run * item], start + at * item
                while left:
                    done = os.pwrite(fd, left, place)
                    left, place = left[done:], place + done


# --- how it appears -------------------------------------------------------------------------------------------


def _publish(final: Path, temporary: Path, files: Sequence[File]) -> None:
    with _saying(final, "the folder holds what was there before, or all that is new"):
        names = [f.name for f in files]
        sync(temporary)
        clash = len(files) > 1 and not _named(final).isdisjoint(names)
        if clash:  # as long as the old index stands, its shards do: the new ones get a second name first
            (temporary / "links").mkdir()
            for name in names:
                os.link(temporary / name, temporary / "links" / name)
            moving = {s.name: f"{temporary.name}/{f.name}" for f in files for s in f.slots}
            _index(temporary / f"moving.{INDEX}", moving, sum(s.nbytes for f in files for s in f.slots))
        os.replace(temporary / CONFIG, final / CONFIG)
        if clash:
            os.replace(temporary / f"moving.{INDEX}", final / INDEX)  # the instant
            sync(final)
        for name in names:
            os.replace(temporary / "links" / name if clash else temporary / name, final / name)
        sync(final)
        if len(files) > 1:
            os.replace(temporary / INDEX, final / INDEX)
            sync(final)
        stale = [f.name for f in final.iterdir() if _SHARD.fullmatch(f.name) and f.name not in names]
        for name in [SINGLE if len(files) > 1 else INDEX, *stale]:
            (final / name).unlink(missing_ok=True)
        _clear(final)
        sync(final)


def _named(folder: Path) -> set[str]:
    """The files that the index of a folder names."""
    try:
        return set(read_json(folder / INDEX)["weight_map"].values())
    except (ShardingError, KeyError, AttributeError, TypeError):
        return set()


def _clear(final: Path) -> None:
    """Remove temporary folders, except one that the index still needs, of a save that was killed as it moved."""
    needed = {Path(name).parent.name for name in _named(final)}
    for d in final.iterdir():
        if d.name.startswith(_TEMPORARY) and d.name not in needed:
            shutil.rmtree(d)


def _abandon(final: Path, made: bool) -> None:
    """Remove what a save that failed has written, as far as that is possible."""
    with contextlib.suppress(OSError):
        _clear(final)
        if made:
            final.rmdir()


@contextlib.contextmanager
def _saying(path: Path, fix: str = "the folder is as it was") -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise fail(f"write: cannot write {e.filename or path}", str(e.strerror), fix=fix) from e


__all__ = ["write"]
