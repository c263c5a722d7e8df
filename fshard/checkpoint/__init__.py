"""Checkpoints: a whole train state saved from one mesh and restored, bitwise, on any other.

    checkpoint.save("out", state, step=25, keep=3)                      # out/step_000025; three stay
    step = checkpoint.latest("out")                                     # 25, or None
    state = checkpoint.restore("out", like, specs=specs, mesh=mesh, step=step)

A tree may hold `Sharded` leaves, plain tensors (a key: the same on every rank) and Python ints, floats, bools
and strings. The ranks write in parallel, each part of a leaf once; a rank reads the slices it needs and no
others, whatever mesh, specs or number of processes the checkpoint was saved with. Simulated and process
meshes write the same files, byte by byte.

A checkpoint appears all at once, so that a kill at any instant leaves the last one as it was (`commit`). It
is a directory of safetensors files and a JSON manifest (`manifest` has the layout); nothing is ever pickled
or unpickled, and every byte that is read is checked. torch.distributed.checkpoint plans and carries it out
(`saving`, `loading`).

On a process mesh every rank must call `save` and `restore`, on a directory that all of them share. One
program at a time may save into a directory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fshard import tree
from fshard._comm import in_region
from fshard.errors import ShardingError, fail, raise_all
from fshard.init import Deferred
from fshard.mesh import Mesh
from fshard.sharded import Sharded
from fshard.spec import P, describe, is_spec, spec_errors

from . import commit
from .manifest import SCALARS, Saved, Scalar, read_manifest
from .parts import DTYPES

if TYPE_CHECKING:
    from .loading import Target

Where = str | os.PathLike[str]


def save(path: Where, tree_: Any, *, step: int | None = None, keep: int | None = None, overwrite: bool = False) -> Path:
    """Save a tree of leaves, and give the directory of the checkpoint.

    Each part of a leaf is written once, by one of the ranks that hold it, and brought to the disk; when all
    are there the checkpoint appears under its name, by one rename. If any rank fails, every rank raises and
    nothing appears. A leaf at two paths of the tree is written once.

    Args:
        step: save to `path/step_000025` instead of `path` itself.
        keep: then remove the other steps in `path` except the newest, so that this many are left.
        overwrite: replace a complete checkpoint of that name, as atomically.

    >>> save("out", {"params": params, "key": fs.key(0), "step": 25}, step=25)
    PosixPath('out/step_000025')

    Raises ShardingError for leaves that cannot be saved, where a checkpoint of that name exists, where the
    ranks hold different leaves, and where a file cannot be written.
    """
    _outside("save")
    if step is not None and (type(step) is not int or step < 0):
        raise fail(f"save: step={step!r} is not a step", fix="an integer of 0 or more")
    if keep is not None and (type(keep) is not int or keep < 1 or step is None):
        raise fail(f"save: keep={keep!r} with step={step!r}", fix="keep= is 1 or more, and needs step=")
    from . import saving  # torch.distributed.checkpoint takes half a second to load

    leaves, wrong = _named(tree_)
    kinds = {x.mesh.kind for x in leaves.values() if isinstance(x, Sharded)}
    if len(kinds) > 1:
        wrong.append(fail("save: the leaves lie on a process mesh and on a simulated one", fix="save them apart"))
    alone = "process" not in kinds if kinds else not dist.is_initialized()
    final = _directory(path, step)
    writer = saving.Writer(final, step=step, keep=keep, overwrite=overwrite)
    saving.save(leaves, writer, wrong, alone=alone)
    return final


def _named(tree_: Any) -> tuple[dict[str, Any], list[ShardingError]]:
    """The leaves by dotted path, and what cannot be saved of them."""
    leaves: dict[str, Any] = {}
    wrong: list[ShardingError] = []
    for path, leaf in tree.leaves_with_path(tree_):
        where, name = f"save: {tree.show('tree', path)}", tree.dotted(path)
        if isinstance(leaf, (Sharded, Tensor)):
            if leaf.dtype not in DTYPES.values():
                wrong.append(fail(f"{where}: cannot save {leaf.dtype}", fix=f"use one of {', '.join(DTYPES)}"))
        elif type(leaf) not in SCALARS:
            fix = "fs.materialize it" if isinstance(leaf, Deferred) else "give a tensor, a number or a string"
            wrong.append(fail(f"{where}: cannot save a {type(leaf).__name__}", fix=fix))
        if name in leaves:
            wrong.append(fail(f"{where}: another leaf is called {name!r} too", fix="rename a key"))
        leaves[name] = leaf
    return leaves, wrong


def restore(
    path: Where,
    like: Any,
    *,
    specs: Any = None,
    mesh: Mesh | None = None,
    step: int | None = None,
    at: str = "",
) -> Any:
    """A new tree with the structure of `like` and the values of the checkpoint, placed as you say.

    A `Sharded` leaf of `like` gives its shape, dtype, spec and mesh; a `Deferred` one its shape and dtype,
    and needs `specs` and `mesh`. A tensor comes back as a tensor on its device (from meta, on the CPU), a
    Python value as one of its type; their values do not matter. Every process reads just the slices it will
    hold. A leaf that was saved at two paths is one leaf again, if both are placed alike.

    Args:
        specs: where leaves go, a prefix of `like`. Without it each `Sharded` leaf keeps its own.
        mesh: where leaves go. Without it each `Sharded` leaf stays on its own.
        step: restore `path/step_000025` instead of `path` itself.
        at: the dotted path of the subtree to restore: `"params"` for the parameters of a train state.

    >>> restore("out", init(), specs=specs, mesh=fs.make_mesh(model=2), step=25, at="params")
    {'up': f32[64, 256@model], 'down': f32[256@model, 64]}

    Raises ShardingError, before anything is loaded, listing every leaf that is missing, extra, or of another
    shape or dtype, and every file that is missing, cut short or damaged; and where data that was read is
    damaged.
    """
    _outside("restore")
    from . import loading

    found = tree.leaves_with_path(like)
    flat = [None] * len(found) if specs is None else tree.broadcast(specs, like, name="specs", leaf=is_spec)
    targets: dict[str, Target] = {}
    wrong: list[ShardingError] = []
    for (where, leaf), spec in zip(found, flat, strict=True):
        name = ".".join(word for word in (at, tree.dotted(where)) if word)
        label = f"restore: {tree.show('like', where)}"
        if name in targets:
            wrong.append(fail(f"{label}: another leaf is called {name!r} too", fix="rename a key"))
        try:
            targets[name] = _target(label, leaf, spec, mesh)
        except ShardingError as e:
            wrong.append(e)
    raise_all(wrong)
    alone = not any(t.mesh is not None and t.mesh.kind == "process" for t in targets.values())
    loading.load(targets, _directory(path, step), at, alone=alone)
    done: dict[str, Any] = {}
    for name, t in targets.items():
        done[name] = done[t.same_as] if t.same_as is not None else t.result()
    return tree.unflatten(tree.structure(like), list(done.values()))


def _target(label: str, leaf: Any, spec: P | None, mesh: Mesh | None) -> Target:
    """What to restore for a leaf of `like`. Raises ShardingError where that is not clear, or not possible."""
    from .loading import Target

    if isinstance(leaf, (Sharded, Deferred)):
        if isinstance(leaf, Sharded):
            spec, mesh = spec or leaf.spec, mesh or leaf.mesh
        if spec is None or mesh is None:
            shown = describe(leaf.dtype, leaf.shape)
            raise fail(f"{label}: nothing says where it goes", fix="give specs= and mesh=", leaf=shown)
        raise_all(spec_errors(label, leaf.shape, spec, mesh.axes))
        return Target(leaf.shape, leaf.dtype, mesh.device, spec, mesh)
    if spec is not None and spec.axes:
        raise fail(f"{label}: a {type(leaf).__name__} in `like` goes onto no mesh", spec=spec,
                   fix="give it P(), or put a Deferred or Sharded in its place")  # fmt: skip
    if isinstance(leaf, Tensor):
        device = torch.device("cpu") if leaf.is_meta else leaf.device
        return Target(tuple(leaf.shape), leaf.dtype, device)
    if type(leaf) in SCALARS:
        return Target(kind=type(leaf))
    raise fail(f"{label}: cannot restore a {type(leaf).__name__}", fix="give a tensor, a number or a string")


def inspect(path: Where, *, step: int | None = None) -> dict[str, Saved | Scalar]:
    """What a checkpoint holds, by dotted path: shapes and dtypes, and Python values. Reads the manifest only.

    >>> inspect("out", step=25)
    {'key': i64[2], 'params.down': f32[256, 64], 'params.up': f32[64, 256], 'step': 25}

    Raises ShardingError where there is no checkpoint, or its manifest is damaged.
    """
    directory = _directory(path, step)
    commit.check_complete(directory)
    return dict(read_manifest(directory).leaves)


def steps(path: Where) -> list[int]:
    """The steps of the complete checkpoints in a directory, in order; `[]` where there is none.

    >>> steps("out")
    [25, 50]
    """
    return commit.steps(Path(path))


def latest(path: Where) -> int | None:
    """The last step with a complete checkpoint in a directory, for `restore(path, like, step=...)`.

    >>> latest("out")
    50
    """
    return max(commit.steps(Path(path)), default=None)


def _directory(path: Where, step: int | None) -> Path:
    return Path(path) if step is None else commit.step_directory(Path(path), step)


def _outside(verb: str) -> None:
    if in_region():
        raise fail(f"{verb}: called inside shard_map, where every leaf is a local part", fix="call it outside")


__all__ = ["Saved", "inspect", "latest", "restore", "save", "steps"]
