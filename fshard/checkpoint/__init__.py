"""Checkpoints: a train state saved from one mesh and restored, bitwise, on any other.

    checkpoint.save("out", state, step=25, keep=3)                      # out/step_000025; the three newest stay
    step = checkpoint.latest("out")                                     # 25, or None
    state = checkpoint.restore("out", like, specs=specs, mesh=mesh, step=step)

A tree has `Sharded` leaves, plain tensors (a key: the same on every rank) and Python ints, floats, bools and strings.
The ranks write in parallel, each part of a leaf once. A rank reads only the slices that it needs, for any mesh, specs
and number of processes at saving. Simulated and process meshes write the same files, byte by byte.

A save in the background copies the leaves, and writes the copy while the program goes on:

    checkpoint.save("out", state, step=25, background=True)
    checkpoint.wait()                                                   # raises its failure, as the next save does

A part of a tree, as the adapters of frozen parameters, is saved with the digest of what it belongs to:

    base = checkpoint.digest(params)                                    # once
    checkpoint.save("out", adapters, step=25, base=base)
    checkpoint.restore("out", adapters, step=25, base=base)             # an error with other parameters

A checkpoint is a directory of safetensors files (`parts`) and a JSON manifest (`manifest`). It appears all at once: a
kill at any time leaves the last one or the new one, and the new one if `save` has returned (`commit`). Nothing is
pickled, and every byte that is read is checked.

A path with a scheme, `s3://bucket/run`, is in a storage that fsspec reaches.

On a process mesh every rank must call `save` and `restore`, on a shared directory. One program at a time saves into a
directory, and an error of a second one names the first. Others may read it: `restore` reads a checkpoint again if
another one replaces it meanwhile.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fshard._core.files.io import StrPath
from fshard._core.files.url import as_path
from fshard.errors import checked, other_names, raise_all

from . import commit
from .background import join, wait
from .loading import restore
from .manifest import Saved, Scalar
from .parts import check_part
from .saving import save
from .tree_digest import digest


@checked
def inspect(path: StrPath, *, step: int | None = None) -> dict[str, Saved | Scalar]:
    """Return the leaves of a checkpoint by dotted path: shapes and dtypes, and Python values.

    Reads the manifest, and the header of one part file to see that the two belong together.

    >>> inspect("out", step=25)
    {'key': i64[2], 'params.down': f32[256, 64], 'params.up': f32[64, 256], 'step': 25}

    Raises ShardingError if there is no checkpoint, or its manifest is damaged.
    """
    join()
    directory = commit.directory_of(path, step)
    for _ in range(commit.READS):
        manifest = commit.read(directory, step)
        errors = [e for file in list(manifest.files)[:1] for e in check_part(directory / file, manifest.files[file])]
        if commit.read_unless_replaced("inspect", directory, manifest.digest, partial(raise_all, errors)):
            return dict(manifest.leaves)
    raise commit.replaced("inspect", directory)


@checked
def steps(path: StrPath) -> list[int]:
    """Return the steps of the complete checkpoints in a directory, in order; `[]` if there is none.

    >>> steps("out")
    [25, 50]
    """
    join()
    return commit.steps(as_path(path))


@checked
def latest(path: StrPath) -> int | None:
    """Return the last step with a complete checkpoint in a directory, for `restore(path, like, step=...)`.

    >>> latest("out")
    50
    """
    return max(steps(path), default=None)


__all__ = ["Saved", "digest", "inspect", "latest", "restore", "save", "steps", "wait"]

if not TYPE_CHECKING:
    __getattr__ = other_names(__name__, {"load": "fs.checkpoint.restore", "async_save": "save(..., background=True)"})
