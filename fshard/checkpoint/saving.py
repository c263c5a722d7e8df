"""What torch.distributed.checkpoint (DCP) asks for when it saves: a planner and a storage.

DCP gathers the ranks' plans, lets each rank write its own, and makes a failure of one rank an error on all of
them. Here are the plan (which rank writes which box) and the storage (over `parts`, `manifest` and `commit`).
DCP's own would save nothing of a `Sharded`, write in place, and pickle.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from fshard.errors import ShardingError, fail, raise_all
from fshard.sharded import Sharded
from fshard.spec import box_bounds, box_shape, describe

from . import commit
from .manifest import SCALARS, Manifest, Saved, Scalar, decode_scalar, encode, write_manifest
from .parts import Chunk, Part, Piece, bytes_of, part_name, write_part

Ids = str | os.PathLike[str] | None
Corner = tuple[int, ...]
Holders = dict[tuple[tuple[int, int], ...], list[int]]  # (start, stop) per dim -> ranks


def save(leaves: Mapping[str, Any], writer: Writer, wrong: Sequence[ShardingError], *, alone: bool) -> None:
    """Save leaves by dotted path. `wrong` is what this rank has found wrong: all ranks will hear of it."""
    planner = Writes(wrong, None if alone else dist.get_rank())
    try:
        call(
            "save",
            lambda: dcp_save(dict(leaves), storage_writer=writer, planner=planner, no_dist=alone),
            alone,
        )
    except BaseException:
        writer.abandon()
        raise


def call(verb: str, job: Callable[[], object], alone: bool) -> None:
    """Call DCP. What any rank raised becomes one ShardingError, the same on every rank."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what `alone` says
            job()
    except CheckpointException as e:
        said: dict[str, list[int]] = {}
        for rank, (error, _) in sorted(e.failures.items()):
            if not isinstance(error, Exception):
                raise error from None  # an interrupt
            words = str(error) if isinstance(error, ShardingError) else f"{verb}: {error!r}"
            said.setdefault(words, []).append(rank)
        if len(said) == 1 and (alone or len(e.failures) == dist.get_world_size()):
            lines = list(said)
        else:
            lines = [f"rank {', '.join(map(str, ranks))}: {words}" for words, ranks in said.items()]
        first = next(iter(e.failures.values()))[0]
        cause = first.__cause__ if isinstance(first, ShardingError) else first
        raise ShardingError("\n".join(lines)) from cause
    except RuntimeError as e:
        if alone:
            raise
        raise fail(
            f"{verb}: rank {dist.get_rank()}: broken off: another rank has failed, or left the program",
            str(e).splitlines()[0],
            fix="see the first traceback of the other ranks",
        ) from e


class Writes(SavePlanner):
    """Which rank writes which box: each different box once, by the holder that has the fewest bytes so far.

    Every rank computes this by itself, and alike. Plain tensors and Python values are the same on every rank:
    rank 0 writes them. With `rank=None` this process writes for all of them.
    """

    def __init__(self, wrong: Sequence[ShardingError], rank: int | None) -> None:
        self.wrong, self.rank = wrong, rank
        self.leaves: dict[str, Any] = {}
        self.tied: dict[str, str] = {}
        self.owner: dict[tuple[str, Corner], int] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.leaves = state_dict

    def create_local_plan(self) -> SavePlan:
        raise_all(self.wrong)
        paths: dict[int, str] = {}
        load: dict[int, int] = {}
        held: dict[Any, Holders] = {}
        items = []
        for path, leaf in self.leaves.items():
            if isinstance(leaf, SCALARS):
                if self.rank in (None, 0):
                    items.append(WriteItem(MetadataIndex(path), WriteItemType.BYTE_IO))
                continue
            if paths.setdefault(id(leaf), path) != path:
                self.tied[path] = paths[id(leaf)]
                continue
            kind = (leaf.shape, leaf.spec, leaf.mesh) if isinstance(leaf, Sharded) else leaf.shape
            if kind not in held:
                held[kind] = _holders(leaf)
            for box, ranks in held[kind].items():
                corner, sizes = tuple(a for a, _ in box), tuple(b - a for a, b in box)
                owner = min(ranks, key=lambda r: load.get(r, 0))
                load[owner] = load.get(owner, 0) + math.prod(sizes) * leaf.dtype.itemsize
                self.owner[path, corner] = owner
                if self.rank in (None, owner):
                    items.append(_write_item(path, leaf, corner, sizes))
        told = dict.fromkeys(self.leaves, "")
        if self.rank is not None:  # there are others to agree with
            told = {path: _told(leaf, self.tied.get(path)) for path, leaf in self.leaves.items()}
        return SavePlan(items, planner_data=told)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        first = all_plans[0].planner_data
        lines = []
        for rank, plan in enumerate(all_plans):
            other = plan.planner_data
            for path in {**first, **other}:
                mine, its = first.get(path, "nothing"), other.get(path, "nothing")
                if mine != its:
                    lines.append(f"{path}    rank 0  {mine}    rank {rank}  {its}")
        if lines:
            raise fail("save: the ranks do not hold the same leaves", *lines,
                       fix="plain tensors and Python values must be the same on every rank: fs.from_callback "
                           "places what differs")  # fmt: skip
        plans, metadata = create_default_global_save_plan(all_plans, rewrite_index_hints=False)
        return plans, dataclasses.replace(metadata, planner_data=(list(first), self.tied))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        leaf = self.leaves[write_item.index.fqn]
        if isinstance(leaf, SCALARS):
            return io.BytesIO(json.dumps(encode(leaf)).encode())
        if isinstance(leaf, Sharded) and leaf.numel():
            return leaf.shards[leaf.mesh.ranks.index(self.owner_of(write_item))]
        return leaf if isinstance(leaf, Tensor) else torch.empty(leaf.shape, dtype=leaf.dtype)

    def owner_of(self, item: WriteItem) -> int:
        return self.owner[item.index.fqn, tuple(item.index.offset or ())]


class Writer(StorageWriter):
    """Writes the files of one checkpoint, and lets it appear when every rank has written its own."""

    def __init__(self, final: Path, *, step: int | None, keep: int | None, overwrite: bool) -> None:
        self.final, self.step, self.keep, self.overwrite = final, step, keep, overwrite
        self.temporary: Path | None = None

    def reset(self, checkpoint_id: Ids = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.temporary, generation = commit.begin(self.final, overwrite=self.overwrite)
        return [dataclasses.replace(p, storage_data=(str(self.temporary), generation)) for p in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assert isinstance(planner, Writes)
        directory, generation = Path(plan.storage_data[0]), plan.storage_data[1]
        results = []
        of_rank: dict[int, list[WriteItem]] = {}
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                data = planner.resolve_data(item)
                assert isinstance(data, io.BytesIO)
                results.append(WriteResult(item.index, data.getbuffer().nbytes, data.getvalue()))
            else:
                of_rank.setdefault(planner.owner_of(item), []).append(item)
        for rank, items in of_rank.items():
            results += _write_file(directory, part_name(rank, generation), items, planner)
        if of_rank:
            commit.sync(directory)
        return done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self.temporary is not None
        paths, tied = metadata.planner_data
        files: dict[str, Part] = {}
        chunks: dict[str, list[Chunk]] = {}
        leaves: dict[str, Saved | Scalar] = {}
        for result in (r for of_rank in results for r in of_rank):
            if isinstance(result.storage_data, bytes):
                leaves[result.index.fqn] = decode_scalar(json.loads(result.storage_data))
            else:
                chunk, part = result.storage_data
                chunks.setdefault(result.index.fqn, []).append(chunk)
                files[chunk.file] = part
        for path, known in metadata.state_dict_metadata.items():
            if isinstance(known, TensorStorageMetadata):
                in_order = tuple(sorted(chunks[path], key=lambda c: c.offset))
                leaves[path] = Saved(tuple(known.size), known.properties.dtype, in_order)
        for path, other in tied.items():
            saved = leaves[other]
            assert isinstance(saved, Saved)
            leaves[path] = dataclasses.replace(saved, same_as=other)
        manifest = Manifest(self.step, dict(sorted(files.items())), {path: leaves[path] for path in paths})
        write_manifest(self.temporary, manifest)
        commit.publish(self.temporary, self.final)
        if self.step is not None and self.keep is not None:
            commit.keep_newest(self.final.parent, self.step, self.keep)

    def abandon(self) -> None:
        """Remove what a failed save has written."""
        if self.temporary is not None:
            commit.abandon(self.temporary, self.final)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Ids) -> bool:
        return True


def _write_file(directory: Path, name: str, items: list[WriteItem], planner: Writes) -> list[WriteResult]:
    def piece(item: WriteItem) -> Piece:
        assert item.tensor_data is not None
        chunk, dtype = item.tensor_data.chunk, item.tensor_data.properties.dtype
        box = ", ".join(f"{a}:{a + n}" for a, n in zip(chunk.offsets, chunk.sizes, strict=True))

        def read() -> Tensor:
            x = planner.resolve_data(item)
            assert isinstance(x, Tensor)
            return x

        return Piece(f"{item.index.fqn}[{box}]", tuple(chunk.sizes), dtype, read)

    pairs = [(piece(item), item) for item in items]
    pairs.sort(key=lambda p: (-p[0].dtype.itemsize, p[0].name))  # the widest first: every tensor is aligned
    part, spots = write_part(directory / name, [p for p, _ in pairs])
    results = []
    for (p, item), (start, crc32) in zip(pairs, spots, strict=True):
        chunk = Chunk(tuple(item.index.offset or ()), p.shape, name, start, crc32)
        results.append(WriteResult(item.index, math.prod(p.shape) * p.dtype.itemsize, (chunk, part)))
    return results


def _write_item(path: str, leaf: Sharded | Tensor, corner: Corner, sizes: tuple[int, ...]) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(corner), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=leaf.dtype), torch.Size(leaf.shape))
    return WriteItem(MetadataIndex(path, corner), WriteItemType.SHARD, tensor_data=data)


def _holders(leaf: Sharded | Tensor) -> Holders:
    """The ranks that hold each different box, no empty ones; rank 0 for plain tensors and empty leaves."""
    shape = tuple(leaf.shape)
    if isinstance(leaf, Tensor) or 0 in shape:
        return {tuple((0, n) for n in shape): [0]}
    found: Holders = {}
    for rank in range(leaf.mesh.size):
        box = leaf.box(rank)
        if 0 not in box_shape(box):
            found.setdefault(box_bounds(box), []).append(rank)
    return found


def _told(leaf: Any, tied: str | None) -> str:
    """A leaf in a line that is equal on two ranks just if they may save it together."""
    if isinstance(leaf, Sharded):
        return f"{leaf!r} on {leaf.mesh!r}" + (f" = {tied}" if tied else "")
    if isinstance(leaf, Tensor):
        return f"{describe(leaf.dtype, leaf.shape)} of crc32 {zlib.crc32(bytes_of(leaf)):08x}"
    return repr(leaf)


def done(value: Any) -> Future[Any]:
    """A future that is."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future
