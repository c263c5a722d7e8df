"""What torch.distributed.checkpoint (DCP) asks for when it loads: a planner and a storage.

Each rank plans the slices it needs and reads those. Nothing is read before every rank has agreed that the
checkpoint holds what is asked for, and that the files it will read are whole.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from fshard._comm import HOST, empty_part
from fshard.errors import ShardingError, fail, raise_all
from fshard.mesh import Mesh
from fshard.sharded import from_callback
from fshard.spec import Box, P, box_shape, describe, full_box, local_box, same_placement

from . import commit
from .manifest import Manifest, Saved, Scalar, decode_scalar, encode, read_manifest
from .parts import Chunk, check_part, read_chunk
from .saving import Corner, Ids, call, done


def load(targets: Mapping[str, Target], directory: Path, at: str, *, alone: bool) -> None:
    """Fill the targets, by dotted path, from the checkpoint in `directory`."""
    reader, reads = Reader(directory), Reads(directory, at)
    call("restore", lambda: dcp_load(dict(targets), storage_reader=reader, planner=reads, no_dist=alone), alone)


@dataclass
class Target:
    """A leaf to restore: what it must be, where it goes, and what has been read of it.

    With a mesh it goes there, by `spec`; without one it is a tensor on `device`, or a Python value of type
    `kind`. `same_as` is the path whose result it shares.
    """

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None
    spec: P | None = None
    mesh: Mesh | None = None
    kind: type | None = None
    parts: dict[Corner, Tensor] = field(default_factory=dict)
    value: Any = None
    same_as: str | None = None

    def __repr__(self) -> str:
        return describe(self.dtype, self.shape) if self.kind is None else self.kind.__name__

    def boxes(self) -> list[Box]:
        """The different boxes that this process needs, empty ones left out."""
        if self.mesh is None or self.spec is None:
            return [full_box(self.shape)]
        coords = [self.mesh.coords(rank) for rank in self.mesh.ranks]
        boxes = [local_box(self.shape, self.spec, self.mesh.axes, at) for at in coords]
        return list({_corner(box): box for box in boxes if 0 not in box_shape(box)}.values())

    def goes_with(self, other: Target) -> bool:
        """Whether two paths of one leaf can be one object again."""
        if self.mesh is None or self.spec is None or other.spec is None:
            return self.mesh == other.mesh and self.device == other.device
        return self.mesh == other.mesh and same_placement(self.spec, other.spec, len(self.shape))

    def result(self) -> Any:
        if self.kind is not None:
            return self.value
        if self.mesh is None or self.spec is None:
            return self.parts[_corner(full_box(self.shape))]
        return from_callback(self.shape, self.spec, self.mesh, self._part)

    def empty_part(self, box: Box) -> Tensor:
        """An empty part, where it is to lie."""
        return empty_part(box_shape(box), self.dtype, self.spec or P(), self.device or HOST)

    def _part(self, box: Box) -> Tensor:
        if 0 in box_shape(box):
            return self.empty_part(box)
        return self.parts[_corner(box)]


class Reads(LoadPlanner):
    """Which slices of chunks this process needs. Refuses a checkpoint that is not what was asked for."""

    def __init__(self, directory: Path, at: str) -> None:
        self.directory, self.under = directory, f"{at}." if at else ""
        self.targets: dict[str, Target] = {}
        self.metadata = Metadata({})

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self.targets, self.metadata = state_dict, metadata

    def create_local_plan(self) -> LoadPlan:
        leaves: Mapping[str, Saved | Scalar] = self.metadata.storage_data.leaves
        self._compare(leaves)
        items: list[ReadItem] = []
        for path, target in self.targets.items():
            saved, known = leaves[path], self.metadata.state_dict_metadata[path]
            if not isinstance(saved, Saved) or not isinstance(known, TensorStorageMetadata):
                items.append(_read_value(path))
                continue
            first = self.targets.get(saved.same_as) if saved.same_as is not None else None
            if first is not None and first.goes_with(target):
                target.same_as = saved.same_as
                continue
            wanted = []
            for box in target.boxes():
                part = target.empty_part(box)
                target.parts[_corner(box)] = part
                if part.numel():
                    wanted.append(ChunkStorageMetadata(torch.Size(_corner(box)), part.shape))
            items += create_read_items_for_chunk_list(path, known, wanted)
        return LoadPlan(items)

    def _compare(self, leaves: Mapping[str, Saved | Scalar]) -> None:
        lines = []
        for path, target in self.targets.items():
            saved = leaves.get(path)
            told = describe(saved.dtype, saved.shape) if isinstance(saved, Saved) else type(saved).__name__
            if path not in leaves:
                lines.append(f"missing  {path}  {target!r}")
            elif told != repr(target):
                lines.append(f"differs  {path}  saved as {told}, like says {target!r}")
        extra = [path for path in leaves if path.startswith(self.under) and path not in self.targets]
        lines += [f"extra    {path}  {leaves[path]!r}" for path in extra]
        if lines:
            raise fail(f"restore: {self.directory} does not hold the leaves of `like`", *lines,
                       fix="give `like` what fs.checkpoint.inspect shows; "
                           "at='params' restores one subtree")  # fmt: skip

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.targets[read_item.dest_index.fqn].value = decode_scalar(json.loads(value.getvalue()))

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        at = read_item.dest_index
        part = self.targets[at.fqn].parts[tuple(at.offset or ())]
        return part[_box(read_item.dest_offsets, read_item.lengths)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None: ...


class Reader(StorageReader):
    """Reads and checks the slices that the plan asks for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest = Manifest(None, {}, {})
        self.chunks: dict[tuple[str, Corner], Chunk] = {}
        self.wrong: ShardingError | None = None

    def reset(self, checkpoint_id: Ids = None) -> None: ...

    def read_metadata(self) -> Metadata:
        try:
            commit.check_complete(self.directory)
            self.manifest = read_manifest(self.directory)
        except ShardingError as e:  # said in set_up_storage_reader: here DCP would log it, and reword it
            self.wrong = e
        saved = {path: leaf for path, leaf in self.manifest.leaves.items() if isinstance(leaf, Saved)}
        self.chunks = {(path, c.offset): c for path, leaf in saved.items() for c in leaf.chunks}
        known = {path: _known(leaf) for path, leaf in self.manifest.leaves.items()}
        return Metadata(known, storage_data=self.manifest)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        if self.wrong is not None:
            raise self.wrong

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        errors = []
        for name in self._by_file(plan):
            errors += check_part(self.directory / name, self.manifest.files[name])
        raise_all(errors)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                value = self.manifest.leaves[item.storage_index.fqn]
                planner.load_bytes(item, io.BytesIO(json.dumps(encode(value)).encode()))
        for name, wanted in self._by_file(plan).items():
            with open(self.directory / name, "rb") as f:
                for (path, offset), reads in wanted.items():
                    pairs = [(_box(r.storage_offsets, r.lengths), planner.resolve_tensor(r)) for r in reads]
                    read_chunk(f, path, self.chunks[path, offset], pairs)
        return done(None)

    def _by_file(self, plan: LoadPlan) -> dict[str, dict[tuple[str, Corner], list[ReadItem]]]:
        """What to read: file -> chunk, in the order of the file -> slices."""
        wanted: dict[tuple[str, Corner], list[ReadItem]] = {}
        for item in plan.items:
            if item.type == LoadItemType.TENSOR:
                at = item.storage_index
                wanted.setdefault((at.fqn, tuple(at.offset or ())), []).append(item)
        found: dict[str, dict[tuple[str, Corner], list[ReadItem]]] = {}
        for key in sorted(wanted, key=lambda key: (self.chunks[key].file, self.chunks[key].start)):
            found.setdefault(self.chunks[key].file, {})[key] = wanted[key]
        return found

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Ids) -> bool:
        return True


def _known(leaf: Saved | Scalar) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(leaf, Saved):
        return BytesStorageMetadata()
    chunks = [ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.shape)) for c in leaf.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=leaf.dtype), torch.Size(leaf.shape), chunks)


def _read_value(path: str) -> ReadItem:
    at, none = MetadataIndex(path), torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, at, none, at, none, none)


def _corner(box: Box) -> Corner:
    return tuple(s.start for s in box)


def _box(offsets: Sequence[int], lengths: Sequence[int]) -> Box:
    return tuple(slice(a, a + n) for a, n in zip(offsets, lengths, strict=True))
