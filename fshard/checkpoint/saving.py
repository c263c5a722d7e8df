"""Save a checkpoint: every rank writes its own part file, then rank 0 writes the manifest and publishes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fshard import tree
from fshard._io import Ranks, StrPath, assign_writers, local_part, summary, sync, writable, write_errors
from fshard.errors import ShardingError, checked, fail, raise_all
from fshard.sharded import Sharded

from . import commit
from .manifest import SCALARS, Manifest, Saved, leaves_digest, write_manifest
from .parts import DTYPES, UNCHANGED, Chunk, PartFile, Piece, part_name, write_part

Parts = dict[str, tuple[PartFile, list[tuple[str, Chunk]]]]  # file -> the file, and (leaf, chunk) for each chunk


@checked
def save(
    path: StrPath, tree_: Any, *, step: int | None = None, keep: int | None = None, overwrite: bool = False,
    base: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
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

    >>> save("out", {"params": params, "key": fs.key(0), "step": 25}, step=25)
    PosixPath('out/step_000025')

    Raises ShardingError for leaves that cannot be saved, if a checkpoint of that name exists, if the ranks have
    different leaves, and if a file cannot be written.
    """
    if step is not None and (type(step) is not int or step < 0):
        raise fail(f"save: step={step!r} is not a step", fix="an integer of 0 or more")
    if keep is not None and (type(keep) is not int or keep < 1 or step is None):
        raise fail(f"save: keep={keep!r} with step={step!r}", fix="keep= is 1 or more, and needs step=")
    leaves, errors = _named_leaves(tree_)
    ranks = Ranks.of("save", leaves.values())
    final = commit.directory_of(path, step)
    tensors, tied = _tensors(leaves)

    def describe_leaves() -> dict[str, str]:
        raise_all(errors)
        if ranks.alone:
            return {}
        of_base = {f"base of {name}": text for name, text in (base or {}).items()}
        return {name: summary(x) + (f" = {tied[name]}" if name in tied else "") for name, x in leaves.items()} | of_base

    def publish() -> None:
        with write_errors("save", final, UNCHANGED):
            write_manifest(temporary, _manifest(step, leaves, tied, written, base or {}))
            commit.publish(temporary, final)
            if step is not None and keep is not None:
                commit.keep_newest(final.parent, step, keep)

    ranks.check_equal(describe_leaves, "plain tensors and Python values must be the same on every rank: "
                                       "fs.from_callback places values that differ")  # fmt: skip
    temporary, generation = ranks.run_on_first(lambda: commit.create_temporary(final, overwrite=overwrite))
    try:
        digest = leaves_digest(step, leaves, tied, base or {})
        written = ranks.run(lambda: _write_parts(temporary, generation, tensors, digest, ranks))
        ranks.run_on_first(publish)
    except BaseException:
        if ranks.rank == 0:
            commit.discard(temporary, final)
        raise
    return final


def _named_leaves(tree_: Any) -> tuple[dict[str, Any], list[ShardingError]]:
    """Return the leaves by dotted path, and an error for each that cannot be saved."""
    leaves: dict[str, Any] = {}
    errors: list[ShardingError] = []
    for path, leaf in tree.leaves_with_path(tree_):
        label, name = f"save: {tree.show('tree', path)}", tree.dotted(path)
        if type(leaf) not in SCALARS:
            try:
                writable(leaf, DTYPES.values(), "a tensor, a number or a string")
            except ShardingError as e:
                errors.append(ShardingError(f"{label}: {e}"))
        if name in leaves:
            errors.append(fail(f"{label}: another leaf has the name {name!r}", fix="rename a key"))
        leaves[name] = leaf
    return leaves, errors


def _tensors(leaves: Mapping[str, Any]) -> tuple[dict[str, Sharded | Tensor], dict[str, str]]:
    """Return the different tensors by their first path, and the first path of each tensor at another path."""
    tensors: dict[str, Sharded | Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, SCALARS):
            continue
        if id(leaf) in first:
            tied[name] = first[id(leaf)]
        else:
            first[id(leaf)], tensors[name] = name, leaf
    return tensors, tied


def _write_parts(
    directory: Path, generation: int, tensors: Mapping[str, Sharded | Tensor], digest: str, ranks: Ranks
) -> Parts:
    """Write the part files of this process, and flush them to the disk. Without tensors rank 0 writes an empty one."""
    pieces: dict[int, list[Piece]] = {} if tensors or not ranks.writes_for(0) else {0: []}
    for (name, leaf), boxes in zip(tensors.items(), assign_writers(tensors.values()), strict=True):
        for box, writer in boxes:
            if ranks.writes_for(writer):
                pieces.setdefault(writer, []).append(Piece(name, box, local_part(leaf, writer)))
    files = {part_name(writer, generation): of_rank for writer, of_rank in pieces.items()}
    parts = {file: write_part(directory / file, of_rank, digest) for file, of_rank in files.items()}
    if parts:
        sync(directory)
    return parts


def _manifest(
    step: int | None, leaves: Mapping[str, Any], tied: Mapping[str, str], written: Iterable[Parts],
    base: Mapping[str, str],
) -> Manifest:  # fmt: skip
    parts = {file: part for parts in written for file, part in parts.items()}
    chunks: dict[str, list[Chunk]] = {}
    for _, of_file in parts.values():
        for name, chunk in of_file:
            chunks.setdefault(name, []).append(chunk)
    saved = {name: x if isinstance(x, SCALARS) else
             Saved(tuple(x.shape), x.dtype, tuple(sorted(chunks[tied.get(name, name)], key=lambda c: c.offset)),
                   tied.get(name))
             for name, x in leaves.items()}  # fmt: skip
    return Manifest(step, {file: parts[file][0] for file in sorted(parts)}, saved, base)
