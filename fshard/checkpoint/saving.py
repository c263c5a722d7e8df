"""Save a checkpoint: every rank writes its part file, then rank 0 writes the manifest and publishes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fshard._core.files.io import Ranks, StrPath, assign_writers, local_part, summary, sync, write_errors
from fshard._core.files.url import AnyPath
from fshard.errors import checked, fail, raise_all
from fshard.sharded import Sharded

from . import commit
from .background import copy_to_host, group_of_ranks, raise_failure, start
from .manifest import SCALARS, Leaves, Manifest, Saved, leaves_digest, write_manifest
from .parts import UNCHANGED, Chunk, PartFile, Piece, part_name, write_part
from .tree_digest import named_leaves

Parts = dict[str, tuple[PartFile, list[tuple[str, Chunk]]]]  # file -> the file, and (leaf, chunk) for each chunk


@checked
def save(
    path: StrPath, tree_: Any, *, step: int | None = None, keep: int | None = None, overwrite: bool = False,
    base: Mapping[str, str] | None = None, background: bool = False,
) -> AnyPath:  # fmt: skip
    """Save a tree of leaves, and return the directory of the checkpoint.

    Each different part of a leaf is written once, by one of the ranks that hold it, also if the leaf has two paths.
    After all parts are flushed to the disk, one rename makes the checkpoint visible. If any rank fails, every rank
    raises, and no checkpoint appears.

    Args:
        step: save to `path/step_000025` instead of `path` itself.
        keep: afterwards remove the oldest other steps in `path`, so that this many are left.
        overwrite: replace a complete checkpoint of that name, by one rename too.
        base: `digest` of another tree, to which these leaves belong, as adapters to frozen parameters. Its values are
            not saved; `restore` with another base is an error.
        background: return when this process has a copy of its parts in host memory, and write it in a thread. Later
            changes to the leaves do not matter. The next `save`, `wait` and the end of the program wait for the thread,
            and raise or print its failure; all that reads a checkpoint waits, too. A kill is as safe as in another
            save. The memory of the copy is kept for the next save; `wait` frees it.

    >>> save("out", {"params": params, "key": fs.key(0), "step": 25}, step=25)
    PosixPath('out/step_000025')

    Raises ShardingError for leaves that cannot be saved, if a checkpoint of that name exists, if the ranks have
    different leaves, and if a file cannot be written.
    """
    if step is not None and (type(step) is not int or step < 0):
        raise fail(f"save: step={step!r} is not a step", fix="an integer of 0 or more")
    if keep is not None and (type(keep) is not int or keep < 1 or step is None):
        raise fail(f"save: keep={keep!r} with step={step!r}", fix="keep= is 1 or more, and needs step=")
    raise_failure()
    leaves, errors = named_leaves("save", tree_)
    ranks = Ranks.from_leaves("save", leaves.values())
    final = commit.directory_of(path, step)
    tensors, tied = _tensors(leaves)

    def describe_leaves() -> dict[str, str]:
        raise_all(errors)
        if ranks.one_process:
            return {}
        of_base = {f"base of {name}": text for name, text in (base or {}).items()}
        return {name: summary(x) + (f" = {tied[name]}" if name in tied else "") for name, x in leaves.items()} | of_base

    ranks.check_equal(describe_leaves, "plain tensors and Python values must be the same on every rank: "
                                       "fs.from_callback places values that differ")  # fmt: skip
    described = {name: x if isinstance(x, SCALARS) else Saved(tuple(x.shape), x.dtype, (), tied.get(name))
                 for name, x in leaves.items()}  # fmt: skip
    digest = leaves_digest(step, described, base or {})
    pieces: dict[int, list[Piece]] = {}
    held = contextlib.ExitStack()  # on rank 0: the lock, and the files of a save that fails

    def begin() -> tuple[AnyPath, int]:
        pieces.update(_own_pieces(tensors, ranks))
        if background:
            copies, events[:] = copy_to_host([p.values for of_rank in pieces.values() for p in of_rank])
            for of_rank in pieces.values():
                of_rank[:] = [replace(p, values=copies.pop(0)) for p in of_rank]
        return commit.create_temporary(final, held, overwrite=overwrite) if ranks.rank == 0 else (final, 0)

    def write() -> None:
        with held:
            for event in events:
                event.synchronize()
            written = ranks.run(lambda: _write_parts(temporary, generation, pieces, digest))
            ranks.run_on_first(lambda: publish(written))

    def publish(written: Iterable[Parts]) -> None:
        with write_errors("save", final, UNCHANGED):
            write_manifest(temporary, _manifest(step, described, written, base or {}))
            commit.publish(temporary, final)
            if step is not None and keep is not None:
                commit.keep_newest(final.parent, step, keep)

    events: list[torch.cuda.Event] = []  # after which the copies are complete
    group = group_of_ranks() if background and not ranks.one_process else None
    try:
        (temporary, generation), *_ = ranks.run(begin)
        if background:
            ranks.group = group
            start(final, write)
        else:
            write()
    except BaseException:
        held.close()
        raise
    return final


def _tensors(leaves: Mapping[str, Any]) -> tuple[dict[str, Sharded | Tensor], dict[str, str]]:
    """Return the different tensors by their first path, and the first path of each tensor at another path."""
    tensors: dict[str, Sharded | Tensor] = {name: x for name, x in leaves.items() if not isinstance(x, SCALARS)}
    first = {id(x): name for name, x in reversed(tensors.items())}
    tied = {name: first[id(x)] for name, x in tensors.items() if first[id(x)] != name}
    return {name: x for name, x in tensors.items() if name not in tied}, tied


def _own_pieces(tensors: Mapping[str, Sharded | Tensor], ranks: Ranks) -> dict[int, list[Piece]]:
    """Return the pieces that this process writes, by rank. Without tensors rank 0 writes an empty file."""
    pieces: dict[int, list[Piece]] = {} if tensors or not ranks.writes_for(0) else {0: []}
    for (name, leaf), boxes in zip(tensors.items(), assign_writers(tensors.values()), strict=True):
        for box, writer in boxes:
            if ranks.writes_for(writer):
                pieces.setdefault(writer, []).append(Piece(name, box, local_part(leaf, writer)))
    return pieces


def _write_parts(directory: AnyPath, generation: int, pieces: Mapping[int, list[Piece]], digest: str) -> Parts:
    """Write the part files of this process, and flush them to the disk."""
    files = {part_name(writer, generation): of_rank for writer, of_rank in pieces.items()}
    parts = {file: write_part(directory / file, of_rank, digest) for file, of_rank in files.items()}
    if parts:
        with write_errors("save", directory, UNCHANGED):
            sync(directory)
    return parts


def _manifest(step: int | None, described: Leaves, written: Iterable[Parts], base: Mapping[str, str]) -> Manifest:
    parts = {file: part for parts in written for file, part in parts.items()}
    chunks: dict[str, list[Chunk]] = {}
    for _, of_file in parts.values():
        for name, chunk in of_file:
            chunks.setdefault(name, []).append(chunk)
    saved = {name: x if isinstance(x, SCALARS) else
             replace(x, chunks=tuple(sorted(chunks[x.same_as or name], key=lambda c: c.offset)))
             for name, x in described.items()}  # fmt: skip
    return Manifest(step, {file: parts[file][0] for file in sorted(parts)}, saved, base)
