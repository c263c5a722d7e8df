"""Directories of checkpoints: one appears all at once, so that a kill leaves the last one complete.

    out/step_000025/                  complete: it appeared by one rename
    out/.step_000050.tmp-9f2c81d0/    an unfinished save: never read, removed by the next save
    out/.steps.lock                   names the program that saves

A save writes into a temporary sibling, flushes every file and the directory to the disk, then renames the sibling.
To replace a complete checkpoint, the new part files, whose names differ, are moved into its directory first; the rename
of `manifest.json` then replaces the old checkpoint by the new one. Removal begins with a rename.

A save is committed by one rename, of the directory or of `manifest.json`, which is atomic. Before it no file that the
old manifest names is touched: new part files have another generation in their names. After it the old part files are
unused, and only they are removed. So a kill at any moment leaves the old state or the new one, and once `save` has
returned on any rank, the new one; a save that was killed may have been committed or not. This holds for a killed
program by the order of the operations, and for a machine that loses power since all files are flushed before the
rename, and the directory after it.

A storage of objects has no rename: there the part files are put in their final place, under new names, and the
put of `manifest.json` is the commit.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from fshard._core.files.io import StrPath, locked, sync, write_errors
from fshard._core.files.url import AnyPath, UrlPath, as_path, exists, is_file
from fshard.errors import ShardingError, fail

from .manifest import MANIFEST, Manifest, read_manifest
from .parts import PART_NAME, UNCHANGED

READS = 10  # times that a checkpoint is read that another program replaces meanwhile
_STEP = re.compile(r"step_(\d{6,})")


def directory_of(path: StrPath, step: int | None) -> AnyPath:
    if step is not None and step < 0:
        raise fail(f"step={step} is not a step", fix="an integer of 0 or more")
    return as_path(path) if step is None else as_path(path) / f"step_{step:06d}"


def steps(directory: AnyPath) -> list[int]:
    if not exists(directory) or not directory.is_dir():
        return []
    names = [_STEP.fullmatch(d.name) for d in directory.iterdir()]
    return sorted(int(m[1]) for m in names if m and is_complete(directory / m[0]))


def is_complete(directory: AnyPath) -> bool:
    return is_file(directory / MANIFEST)


def check_complete(directory: AnyPath) -> None:
    """Raise ShardingError unless `directory` is a complete checkpoint; its message names the checkpoints nearby."""
    if is_complete(directory):
        return
    known, fix = steps(directory), "give the directory that fs.checkpoint.save wrote"
    if known:
        problem, fix = f"it holds the steps {known}", f"step={known[-1]}"
    elif exists(directory / ".metadata"):
        problem = "torch.distributed.checkpoint wrote it: its .metadata is a pickle, which is never opened"
    elif exists(directory) and directory.is_dir():
        problem = f"it holds no {MANIFEST}"
    else:
        problem = "it is a file" if exists(directory) else "it does not exist"
        known = steps(directory.parent)
        fix = f"the steps here are {known}" if known else fix
    raise fail(f"{directory} is not a checkpoint of fshard", problem, fix=fix)


def read(directory: AnyPath, step: int | None) -> Manifest:
    """Read the manifest of a complete checkpoint. Raises ShardingError if there is none, or it is of another step."""
    check_complete(directory)
    try:
        manifest = read_manifest(directory)
    except ShardingError:
        check_complete(directory)  # it may have been removed meanwhile
        raise
    if step is not None and manifest.step not in (None, step):
        raise fail(f"{directory} holds the checkpoint of another step: it was renamed or replaced", expected=step,
                   got=manifest.step, fix=f"give this directory, without step=, for step {manifest.step}")  # fmt: skip
    return manifest


def read_unless_replaced(verb: str, directory: AnyPath, digest: str, job: Callable[[], object]) -> str:
    """Run a job that reads a checkpoint; return the digest, or `""` if it failed since another one has replaced it."""
    try:
        job()
    except ShardingError:
        try:
            now = read_manifest(directory).digest
        except ShardingError:
            if not is_complete(directory):
                raise replaced(verb, directory) from None
            raise
        if now == digest:
            raise
        return ""
    return digest


def replaced(verb: str, directory: AnyPath) -> ShardingError:
    return fail(f"{verb}: {directory} was replaced or removed by another program while it was read",
                fix=f"call {verb} again")  # fmt: skip


def create_temporary(final: AnyPath, held: contextlib.ExitStack, *, overwrite: bool) -> tuple[AnyPath, int]:
    """Create the temporary directory of a save; return it and the generation number of its part files.

    `held` has the lock of the checkpoint, or of all steps in a directory, and removes the files of a save that failed.
    Those of saves that were killed are removed here. Raises ShardingError if `final` exists, or another program saves.
    """
    if isinstance(final, UrlPath):
        return _begin_objects(final, held, overwrite=overwrite)
    with write_errors("save", final, UNCHANGED):
        _make_directory(final.parent)
        name, folder = (".steps.lock", final.parent) if _STEP.fullmatch(final.name) else (f".{final.name}.lock", final)
        held.enter_context(locked("save", folder, final.parent / name))
    _check_free(final, overwrite, lambda name: True)
    with write_errors("save", final, UNCHANGED):
        _remove_unfinished(final)
        temporary = _temporary_sibling(final)
        temporary.mkdir()
        held.callback(_discard, temporary, final)
        names = [PART_NAME.fullmatch(f.name) for f in final.iterdir()] if final.exists() else []
    return temporary, max((int(m[1] or 0) for m in names if m), default=-1) + 1


def _check_free(final: AnyPath, overwrite: bool, is_foreign: Callable[[str], object]) -> bool:
    """Return whether a save replaces a checkpoint. Raises ShardingError if it may not, or other files are there."""
    if is_complete(final):
        if not overwrite:
            raise fail(f"save: {final} exists", fix="overwrite=True, another step, or another directory")
        return True
    is_a_file = isinstance(final, Path) and not final.is_dir()
    if final.exists() and (is_a_file or any(is_foreign(f.name) for f in final.iterdir())):
        raise fail(f"save: {final} exists, and is not a checkpoint",
                   fix="another directory, or step= for one inside it")  # fmt: skip
    return False


def publish(temporary: AnyPath, final: AnyPath) -> None:
    """Give a complete temporary directory its final name, or move its files into the checkpoint that they replace."""
    if isinstance(temporary, UrlPath) or isinstance(final, UrlPath):  # the manifest is there
        return
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


def _discard(temporary: Path, final: Path) -> None:
    """Remove the files of a save that failed, as far as that is possible."""
    if temporary.exists():
        with contextlib.suppress(OSError):
            _remove_unused_parts(final)
        shutil.rmtree(temporary, ignore_errors=True)


def keep_newest(directory: AnyPath, step: int, keep: int) -> None:
    """Remove all steps but the `keep` newest; `step`, which was just saved, always stays."""
    others = [s for s in steps(directory) if s != step]
    for old in others[: max(0, len(others) - keep + 1)]:
        final = directory_of(directory, old)
        if isinstance(final, UrlPath):
            for file in sorted(final.iterdir(), key=lambda file: file.name != MANIFEST):  # first
                file.unlink()
            continue
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


# --- storages of objects --------------------------------------------------------------------------------------


def _begin_objects(final: UrlPath, held: contextlib.ExitStack, *, overwrite: bool) -> tuple[UrlPath, int]:
    """Return the place of the part files, and a new generation number: the time, in ns.

    Nothing names them until the manifest is put, which commits the save. When `held` ends, of the part files that the
    manifest does not name three kinds are removed: of this save, which then has failed; of the checkpoint that was
    replaced; and of any save that began a day before, and was killed. Another program may be writing the others.
    """
    with write_errors("save", final, UNCHANGED):
        complete = _check_free(final, overwrite, lambda name: not PART_NAME.fullmatch(name))
    replaced: set[str] = set()
    with contextlib.suppress(ShardingError):  # a damaged one is replaced, too
        replaced.update(read_manifest(final).files if complete else ())
    generation = time.time_ns()
    held.callback(_remove_objects, final, replaced, generation)
    return final, generation


def _remove_objects(final: UrlPath, replaced: set[str], generation: int) -> None:
    with contextlib.suppress(OSError, ShardingError):
        used = read_manifest(final).files if is_complete(final) else {}
        for file in final.iterdir() if final.exists() else ():
            if (match := PART_NAME.fullmatch(file.name)) and file.name not in used:
                began = int(match[1] or 0)
                if file.name in replaced or began == generation or began < generation - 86_400 * 10**9:
                    file.unlink()
