"""The directories of checkpoints: how one appears all at once, so that a kill leaves the last one whole.

    out/step_000025/                  complete: it appeared by one rename
    out/.step_000050.tmp-9f2c81d0/    a save under way or killed: never read, removed by the next save

A save writes into a temporary sibling, brings every file and the directory to the disk, then renames it.
Where a complete one has the name and is to be replaced, the new part files, whose names differ, move in
beside the old ones, and the one instant is the rename of `manifest.json`. Removal begins with a rename.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path

from fshard.errors import ShardingError, fail

from .manifest import MANIFEST, read_manifest
from .parts import NAME

_STEP = re.compile(r"step_(\d{6,})")


def step_directory(directory: Path, step: int) -> Path:
    """`out/step_000025`."""
    return directory / f"step_{step:06d}"


def steps(directory: Path) -> list[int]:
    """The steps that have a complete checkpoint, in order."""
    if not directory.is_dir():
        return []
    found = [m for m in (_STEP.fullmatch(d.name) for d in directory.iterdir()) if m and is_complete(directory / m[0])]
    return sorted(int(m[1]) for m in found)


def is_complete(directory: Path) -> bool:
    return (directory / MANIFEST).is_file()


def check_complete(directory: Path) -> None:
    """Raise ShardingError, saying what is there instead, where `directory` is no checkpoint."""
    if is_complete(directory):
        return
    known, fix = steps(directory), "give the directory that fs.checkpoint.save wrote"
    if known:
        why, fix = f"it holds the steps {known}", f"step={known[-1]}"
    elif (directory / ".metadata").exists():
        why = "it is one of torch.distributed.checkpoint: .metadata there is a pickle, and is never opened"
    elif directory.is_dir():
        why = f"it holds no {MANIFEST}"
    else:
        why = "it is a file" if directory.exists() else "there is nothing"
        known = steps(directory.parent)
        fix = f"the steps here are {known}" if known else fix
    raise fail(f"{directory} is not a checkpoint of fshard", why, fix=fix)


def begin(final: Path, *, overwrite: bool) -> tuple[Path, int]:
    """Make the temporary directory of a save, clear what killed saves left, and number the part files.

    Raises ShardingError where something is in the way.
    """
    if is_complete(final) and not overwrite:
        raise fail(f"save: {final} is there already", fix="overwrite=True, another step, or another directory")
    if final.exists() and not is_complete(final) and (not final.is_dir() or any(final.iterdir())):
        raise fail(
            f"save: {final} is there, and is not a checkpoint",
            fix="another directory, or step= for one inside it",
        )
    _make(final.parent)
    _clear_leftovers(final)
    temporary = final.parent / f".{final.name}.tmp-{secrets.token_hex(4)}"
    temporary.mkdir()
    taken = [NAME.fullmatch(f.name) for f in final.iterdir()] if final.exists() else []
    numbers = [int((m[1] or ".0")[1:]) for m in taken if m]
    return temporary, max(numbers, default=-1) + 1


def publish(temporary: Path, final: Path) -> None:
    """Let a complete temporary directory take its final name."""
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
    _drop_unused(final)
    os.rmdir(temporary)  # last: while it is there, the next save looks for unused parts again


def abandon(temporary: Path, final: Path) -> None:
    """Remove what a save that failed has written, as far as that is possible."""
    with contextlib.suppress(OSError):
        _drop_unused(final)
    shutil.rmtree(temporary, ignore_errors=True)


def remove(final: Path) -> None:
    """Remove a checkpoint: gone at once, as far as any reader can see."""
    old = final.parent / f".{final.name}.tmp-{secrets.token_hex(4)}"
    os.rename(final, old)
    shutil.rmtree(old)


def keep_newest(directory: Path, step: int, keep: int) -> None:
    """Remove all steps but the `keep` newest; `step`, which was just saved, always stays."""
    others = [s for s in steps(directory) if s != step]
    for old in others[: max(0, len(others) - keep + 1)]:
        remove(step_directory(directory, old))


def sync(directory: Path) -> None:
    """Bring the entries of a directory to the disk."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _make(directory: Path) -> None:
    if not directory.is_dir():
        _make(directory.parent)
        directory.mkdir(exist_ok=True)
        sync(directory.parent)


def _clear_leftovers(final: Path) -> None:
    """Remove the temporary directories of killed saves: of this checkpoint, or of any step beside it."""
    name = r"step_\d{6,}" if _STEP.fullmatch(final.name) else re.escape(final.name)
    for d in final.parent.iterdir():
        found = re.fullmatch(rf"\.({name})\.tmp-[0-9a-f]{{8}}", d.name)
        if found and d.is_dir():
            _drop_unused(final.parent / found[1])
            shutil.rmtree(d)


def _drop_unused(final: Path) -> None:
    """Remove the part files that the manifest does not name: they were replaced, or never published."""
    if not is_complete(final):
        return
    try:
        used = read_manifest(final).files
    except ShardingError:  # damaged: a person may want to look at it
        return
    for part in final.iterdir():
        if NAME.fullmatch(part.name) and part.name not in used:
            part.unlink()
