"""Restore a checkpoint: all ranks check that it has the leaves of `like`, then each reads the slices that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard._core.files.io import Ranks, StrPath, open_file
from fshard._core.files.url import AnyPath
from fshard._core.host_memory import HOST, empty_part
from fshard.errors import ShardingError, checked, fail, raise_all
from fshard.init import Deferred
from fshard.mesh import Mesh
from fshard.sharded import Sharded, leaf_from_parts
from fshard.spec import (
    Box,
    P,
    box_bounds,
    box_shape,
    describe,
    full_box,
    is_spec,
    local_box,
    overlap,
    relative_box,
    same_placement,
    spec_errors,
)

from . import commit
from .background import join
from .manifest import SCALARS, Leaves, Manifest, Saved
from .parts import RESTORE_ANOTHER, Chunk, check_part, read_chunk
from .tree_digest import check_base

Reads = dict[str, list[tuple[str, Chunk, list[tuple[Box, Tensor]]]]]  # file -> (leaf, chunk, (box of it, destination))


@checked
def restore(
    path: StrPath, like: Any, *, specs: Any = None, mesh: Mesh | None = None, step: int | None = None, at: str = "",
    base: Mapping[str, str] | None = None,
) -> Any:  # fmt: skip
    """Return a new tree with the structure of `like` and the values of the checkpoint.

    The values in `like` are ignored. Used are the shape, dtype, spec and mesh of a `Sharded` leaf; the shape and dtype
    of a `Deferred` one, which needs `specs` and `mesh`; the shape, dtype and device of a tensor (the CPU for meta); the
    type of a Python value. A leaf that was saved at two paths is one leaf again if both have the same placement.

    Args:
        specs: the placement of the leaves, a prefix of `like`. Without it each `Sharded` leaf keeps its placement.
        mesh: the mesh of the leaves. Without it each `Sharded` leaf stays on its mesh.
        step: restore `path/step_000025` instead of `path` itself.
        at: the dotted path of the subtree to restore: `"params"` for the parameters of a train state.
        base: `digest` of the tree that the leaves belong to, if they were saved with one.

    >>> restore("out", init(), specs=specs, mesh=fs.make_mesh(model=2), step=25, at="params")
    {'up': f32[64, 256@model], 'down': f32[256@model, 64]}

    Raises ShardingError, before anything is loaded, listing every leaf that is missing, extra, or of another shape or
    dtype, every leaf of the base that differs, and every file that is missing, cut short or damaged; and later if the
    data in a file is damaged.
    """
    meshes = [mesh, *(x.mesh for x in tree.leaves(like) if isinstance(x, Sharded))]
    ranks = Ranks("restore", one_process=not any(m is not None and m.kind == "process" for m in meshes))
    join()
    directory = commit.directory_of(path, step)
    targets, errors = _targets(like, specs, mesh, at)
    reads: Reads = {}
    unless_replaced = partial(commit.read_unless_replaced, "restore", directory)

    def plan() -> str:
        raise_all(errors)
        manifest = commit.read(directory, step)
        check_base(directory, manifest.base, base)
        reads.clear()
        return unless_replaced(manifest.digest, lambda: reads.update(_plan(targets, directory, manifest, at)))

    for _ in range(commit.READS):
        first, *others = ranks.run(plan)
        if first and others == [first] * len(others):  # else a save has replaced it, perhaps between two ranks' reads
            read = partial(unless_replaced, first, partial(_read, directory, reads))
            if "" not in ranks.run(read):
                break
    else:
        raise commit.replaced("restore", directory)
    leaves: dict[str, Any] = {}
    for name, t in targets.items():
        leaves[name] = leaves[t.same_as] if t.same_as is not None else t.result()
    return tree.unflatten(tree.structure(like), list(leaves.values()))


@dataclass
class Target:
    """A leaf to restore: a Python value if `value_type` is set, a tensor on `device` if `mesh` is None.

    `parts`: the tensor of each different box in this process. `same_as`: the path of the target that is the same leaf.
    """

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    device: torch.device = HOST
    spec: P = field(default_factory=P)
    mesh: Mesh | None = None
    value_type: type | None = None
    value: Any = None
    same_as: str | None = None
    parts: dict[tuple[tuple[int, int], ...], Tensor] = field(default_factory=dict)

    def __repr__(self) -> str:
        return describe(self) if self.value_type is None else self.value_type.__name__

    def allocate(self) -> list[tuple[Box, Tensor]]:
        """Allocate the parts; return them, each with its box."""
        boxes = [full_box(self.shape)]
        if self.mesh is not None:
            coords = [self.mesh.coords(rank) for rank in self.mesh.ranks]
            boxes = [local_box(self.shape, self.spec, self.mesh.axes, position) for position in coords]
        out = {box_bounds(box): box for box in boxes}
        self.parts = {key: empty_part(box_shape(box), self.dtype, self.spec, self.device) for key, box in out.items()}
        return [(box, self.parts[key]) for key, box in out.items()]

    def is_placed_like(self, other: Target) -> bool:
        same_memory = (self.mesh, self.device) == (other.mesh, other.device)
        return same_memory and same_placement(self.spec, other.spec, len(self.shape))

    def result(self) -> Any:
        if self.value_type is not None:
            return self.value
        if self.mesh is None:
            return self.parts[box_bounds(full_box(self.shape))]
        return leaf_from_parts(self.shape, self.spec, self.mesh, lambda box: self.parts[box_bounds(box)])


def _targets(like: Any, specs: Any, mesh: Mesh | None, at: str) -> tuple[dict[str, Target], list[ShardingError]]:
    """Return the leaves to restore by dotted path in the checkpoint, and an error for each that cannot be restored."""
    leaves = tree.leaves_with_path(like)
    flat = [None] * len(leaves) if specs is None else tree.broadcast(specs, like, name="specs", leaf=is_spec)
    targets: dict[str, Target] = {}
    errors: list[ShardingError] = []
    for (path, leaf), spec in zip(leaves, flat, strict=True):
        name = ".".join(part for part in (at, tree.dotted(path)) if part)
        label = f"restore: {tree.show('like', path)}"
        if name in targets:
            errors.append(fail(f"{label}: another leaf has the name {name!r}", fix="rename a key"))
        try:
            targets[name] = _target(label, leaf, spec, mesh)
        except ShardingError as e:
            errors.append(e)
    return targets, errors


def _target(label: str, leaf: Any, spec: P | None, mesh: Mesh | None) -> Target:
    """Return the target for a leaf of `like`. Raises ShardingError if its placement is missing or impossible."""
    if isinstance(leaf, (Sharded, Deferred)):
        if isinstance(leaf, Sharded):
            spec, mesh = spec or leaf.spec, mesh or leaf.mesh
        if spec is None or mesh is None:
            raise fail(f"{label}: has no spec or no mesh", fix="give specs= and mesh=",
                       leaf=describe(leaf))  # fmt: skip
        raise_all(spec_errors(label, leaf.shape, spec, mesh.axes))
        return Target(leaf.shape, leaf.dtype, mesh.device, spec, mesh)
    if spec is not None and spec.axes:
        raise fail(f"{label}: a {type(leaf).__name__} in `like` cannot be split over a mesh", spec=spec,
                   fix="give it P(), or put a Deferred or Sharded in its place")  # fmt: skip
    if isinstance(leaf, Tensor):
        return Target(tuple(leaf.shape), leaf.dtype, HOST if leaf.is_meta else leaf.device)
    if type(leaf) in SCALARS:
        return Target(value_type=type(leaf))
    raise fail(f"{label}: cannot restore a {type(leaf).__name__}", fix="give a tensor, a number or a string")


def _plan(targets: Mapping[str, Target], directory: AnyPath, manifest: Manifest, at: str) -> Reads:
    """Allocate the targets, and return the slices that fill them, by file in the order of their bytes.

    Raises ShardingError if the leaves differ from the manifest's, and for files that are damaged.
    """
    _check_leaves(targets, directory, manifest.leaves, at)
    reads: Reads = {}
    for path, target in targets.items():
        saved = manifest.leaves[path]
        if not isinstance(saved, Saved):
            target.value = saved
            continue
        first = targets.get(saved.same_as) if saved.same_as is not None else None
        if first is not None and first.is_placed_like(target):
            target.same_as = saved.same_as
            continue
        parts = target.allocate()
        for chunk in saved.chunks:
            wanted = [(relative_box(common, chunk.box), part[relative_box(common, box)])
                      for box, part in parts if (common := overlap(chunk.box, box)) is not None]  # fmt: skip
            if wanted:
                reads.setdefault(chunk.file, []).append((path, chunk, wanted))
    files = {*reads, *list(manifest.files)[:1]}  # one at least: its header has the digest of the Python values
    raise_all([e for file in sorted(files) for e in check_part(directory / file, manifest.files[file])])
    return {file: sorted(reads[file], key=lambda read: read[1].start) for file in sorted(reads)}


def _check_leaves(targets: Mapping[str, Target], directory: AnyPath, leaves: Leaves, at: str) -> None:
    lines = []
    for path, target in targets.items():
        saved = leaves.get(path)
        shown = describe(saved) if isinstance(saved, Saved) else type(saved).__name__
        if path not in leaves:
            lines.append(f"missing  {path}  {target!r}")
        elif shown != repr(target):
            lines.append(f"differs  {path}  saved as {shown}, like says {target!r}")
    subtree = f"{at}." if at else ""
    extra = [path for path in leaves if path.startswith(subtree) and path not in targets]
    lines += [f"extra    {path}  {leaves[path]!r}" for path in extra]
    if lines:
        raise fail(f"restore: {directory} does not hold the leaves of `like`", *lines,
                   fix="give `like` the leaves that fs.checkpoint.inspect shows; "
                       "at='params' restores one subtree")  # fmt: skip


def _read(directory: AnyPath, reads: Reads) -> None:
    for file, of_file in reads.items():
        with open_file(directory / file, RESTORE_ANOTHER) as f:
            for path, chunk, wanted in of_file:
                read_chunk(f, path, chunk, wanted)
