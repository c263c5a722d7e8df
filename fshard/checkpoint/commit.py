"""Directories of checkpoints: one appears all at once, so that a kill leaves the last one complete.

    out/step_000025/                  complete: it appeared by one rename
    out/.step_000050.tmp-9f2c81d0/    an unfinished save: never read, removed by the next save

A save writes into a temporary sibling, flushes every file and the directory to the disk, then renames the sibling.
To replace a complete checkpoint, the new part files, whose names differ, are moved into its directory first; the rename
of `manifest.json` then replaces the old checkpoint by the new one. Removal begins with a rename.

A save is committed by one rename, of the directory or of `manifest.json`, which is atomic. Before it no file that the
old manifest names is touched: new part files have another generation in their names. After it the old part files are
unused, and only they are removed. So a kill at any moment leaves the old state or the new one, and once `save` has
returned on any rank, the new one; a save that was killed may have been committed or not. This holds for a killed
program by the order of the operations, and for a machine that loses power since all files are flushed before the
rename, and the directory after it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path

from fshard._io import StrPath, sync, write_errors
from fshard.errors import ShardingError, fail

from .manifest import MANIFEST, Manifest, read_manifest
from .parts import PART_NAME, UNCHANGED

_STEP = re.compile(r"step_(\d{6,})")


def directory_of(path: StrPath, step: int | None) -> Path:
    if step is not None and step < 0:
        raise fail(f"step={step} is not a step", fix="an integer of 0 or more")
    return Path(path) if step is None else Path(path) / f"step_{step:06d}"


def steps(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    names = [_STEP.fullmatch(d.name) for d in directory.iterdir()]
    return sorted(int(m[1]) for m in names if m and is_complete(directory / m[0]))


def is_complete(directory: Path) -> bool:
    return (directory / MANIFEST).is_file()


def check_complete(directory: Path) -> None:
    """Raise ShardingError unless `directory` is a complete checkpoint; its message names the checkpoints nearby."""
    if is_complete(directory):
        return
    known, fix = steps(directory), "give the directory that fs.checkpoint.save wrote"
    if known:
        problem, fix = f"it holds the steps {known}", f"step={known[-1]}"
    elif (directory / ".metadata").exists():
        problem = "torch.distributed.checkpoint wrote it: its .metadata is a pickle, which is never opened"
    elif directory.is_dir():
        problem = f"it holds no {MANIFEST}"
    else:
        problem = "it is a file" if directory.exists() else "it does not exist"
        known = steps(directory.parent)
        fix = f"the steps here are {known}" if known else fix
    raise fail(f"{directory} is not a checkpoint of fshard", problem, fix=fix)


def read(directory: Path, step: int | None) -> Manifest:
    """Read the manifest of a complete checkpoint. Raises ShardingError if there is none, or it is of another step."""
    check_complete(directory)
    manifest = read_manifest(directory)
    if step is not None and manifest.step not in (None, step):
        raise fail(f"{directory} holds the checkpoint of another step: it was renamed or replaced", expected=step,
                   got=manifest.step, fix=f"give this directory, without step=, for step {manifest.step}")  # fmt: skip
    return manifest


def create_temporary(final: Path, *, overwrite: bool) -> tuple[Path, int]:
    """Create the temporary directory of a save; return it and the generation number of its part files.

    Removes the temporary directories of saves that were killed. Raises ShardingError if `final` exists.
    """
    if is_complete(final) and not overwrite:
        raise fail(f"save: {final} exists", fix="overwrite=True, another step, or another directory")
    if final.exists() and not is_complete(final) and (not final.is_dir() or any(final.iterdir())):
        raise fail(f"save: {final} exists, and is not a checkpoint",
                   fix="another directory, or step= for one inside it")  # fmt: skip
    with write_errors("save", final, UNCHANGED):
        _make_directory(final.parent)
        _remove_unfinished(final)
        temporary = _temporary_sibling(final)
        temporary.mkdir()
        names = [PART_NAME.fullmatch(f.name) for f in final.iterdir()] if final.exists() else []
    generations = [int((m[1] or ".0")[1:]) for m in names if m]
    return temporary, max(generations, default=-1) + 1


def publish(temporary: Path, final: Path) -> None:
    """Give a complete temporary directory its final name, or move its files into the checkpoint that they replace."""
    sync(temporary)
    if not is_complete(final):
        os.rename(temporary, final)
        sync(final.parent)
        return
    for part in sorted(temporary.iterdir()):
        if part.name != MANIFEST:
            os.rename(part, final / part.name)
    sync(final)
    os.replace(temporary / MANIFEST, final / MANIFEST)
    sync(final)
    _remove_unused_parts(final)
    os.rmdir(temporary)  # last: while it exists, the next save looks for unused parts again


def discard(temporary: Path, final: Path) -> None:
    """Remove the files of a save that failed, as far as that is possible."""
    with contextlib.suppress(OSError):
        _remove_unused_parts(final)
    shutil.rmtree(temporary, ignore_errors=True)


def keep_newest(directory: Path, step: int, keep: int) -> None:
    """Remove all steps but the `keep` newest; `step`, which was just saved, always stays."""
    others = [s for s in steps(directory) if s != step]
    for old in others[: max(0, len(others) - keep + 1)]:
        final = directory_of(directory, old)
        temporary = _temporary_sibling(final)
        os.rename(final, temporary)  # no reader sees a checkpoint that is half removed
        shutil.rmtree(temporary)


def _temporary_sibling(final: Path) -> Path:
    return final.parent / f".{final.name}.tmp-{secrets.token_hex(4)}"


def _make_directory(directory: Path) -> None:
    if not directory.is_dir():
        _make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        sync(directory.parent)


def _remove_unfinished(final: Path) -> None:
    """Remove the temporary directories of killed saves: of this checkpoint, or of any step in the same directory."""
    name = r"step_\d{6,}" if _STEP.fullmatch(final.name) else re.escape(final.name)
    for d in final.parent.iterdir():
        match = re.fullmatch(rf"\.({name})\.tmp-[0-9a-f]{{8}}", d.name)
        if match and d.is_dir():
            _remove_unused_parts(final.parent / match[1])
            shutil.rmtree(d)


def _remove_unused_parts(final: Path) -> None:
    """Remove the part files that are not in the manifest: they were replaced, or never published."""
    if not is_complete(final):
        return
    try:
        used = read_manifest(final).files
    except ShardingError:  # damaged: a person may want to look at it
        return
    for part in final.iterdir():
        if PART_NAME.fullmatch(part.name) and part.name not in used:
            part.unlink()
