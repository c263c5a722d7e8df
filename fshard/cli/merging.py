"""`python -m fshard merge`: a sharded checkpoint as safetensors files, piece by piece, never complete in memory."""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fshard import checkpoint, tree
from fshard._core.files.io import write_errors
from fshard._core.files.safetensors import DTYPES
from fshard._core.files.url import AnyPath, as_path
from fshard.checkpoint.commit import directory_of, is_complete, read
from fshard.checkpoint.parts import check_part, stream
from fshard.errors import fail, join_limited, number_of, raise_all
from fshard.interop.hf import config_of, write
from fshard.interop.hf.module import by_name
from fshard.models import hf

_DCP = ".metadata"  # of torch.distributed.checkpoint


@dataclass(frozen=True)
class Entry:
    """A tensor of the checkpoint: `fill` reads it into a tensor of its shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    fill: Callable[[Tensor], None]

    def mapped(self, path: Path) -> Tensor:
        """Read the tensor into a file that is mapped to memory."""
        count = math.prod(self.shape)
        if not count:
            return torch.empty(self.shape, dtype=self.dtype)
        out = torch.from_file(str(path), shared=True, size=count, dtype=self.dtype).view(self.shape)
        self.fill(out)
        return out


def add(commands: Any) -> None:
    """Add `merge` to the commands of a parser."""
    command = commands.add_parser(
        "merge", help="write a sharded checkpoint as safetensors files with an index",
        description="Write the tensors of a checkpoint, of fs.checkpoint.save or of torch.distributed.checkpoint "
                    "(Accelerate's SHARDED_STATE_DICT), into a new folder: model.safetensors, or shards with an index. "
                    "Names are the dotted paths of the leaves.",
    )  # fmt: skip
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint, or a folder of them: its last step")
    command.add_argument("out", metavar="OUT", help="the folder to write; it must not exist")
    command.add_argument("--step", type=int, help="this step of a folder of checkpoints")
    command.add_argument("--at", help="the part to write (default: params, or all if there is none)")
    command.add_argument("--like", metavar="FOLDER", help="the Hugging Face folder of the model, one of fs.models: "
                         "write its names and shapes, and copy its config and tokenizer")  # fmt: skip
    command.add_argument("--max_shard_bytes", "--max-shard-bytes", type=int, default=5 * 10**9, metavar="N",
                         help="bytes of one file, at most (default: 5e9)")  # fmt: skip
    command.add_argument("--allow_pickle", "--allow-pickle", action="store_true",
                         help="read torch's checkpoint, whose .metadata is a pickle: it can run any code")  # fmt: skip
    command.set_defaults(run=lambda options: merge(
        options.checkpoint, options.out, step=options.step, at=options.at, max_shard_bytes=options.max_shard_bytes,
        like=options.like, allow_pickle=options.allow_pickle))  # fmt: skip


def merge(
    path: str | Path, out: str | Path, *, step: int | None = None, at: str | None = None,
    max_shard_bytes: int = 5 * 10**9, like: str | Path | None = None, allow_pickle: bool = False,
) -> str:  # fmt: skip
    """Write the tensors of a checkpoint into a new folder of safetensors files, and return a line about them.

    Memory: a piece of 64 MiB of one tensor. The tensors are in mapped files next to the folder until it is written,
    which take as much room on the disk. With `like`, the folder of a model in `fs.models`, it is a folder that
    `from_pretrained` reads.
    Raises ShardingError if the checkpoint is damaged, or the folder exists.
    """
    place, out = as_path(path), Path(out)
    if max_shard_bytes < 1:
        raise fail(f"merge: --max_shard_bytes {max_shard_bytes}", fix="1 or more")
    if out.exists():
        raise fail(f"merge: {out} exists, and is not replaced", fix="name a new folder")
    if (place / _DCP).is_file() and not is_complete(place):
        source, entries = _torch_entries(Path(path), at, allow_pickle)
    else:
        source, entries = _entries(place, step, at)
    if not entries:
        raise fail(f"merge: {source} has no tensors", fix="python -m fshard inspect shows the leaves")
    if wrong := [f"{e.name}  {e.dtype}" for e in entries if e.dtype not in DTYPES.values()]:
        raise fail("merge: safetensors has no such dtype", *wrong, fix="restore the checkpoint, and cast the leaves")
    cfg, described = (None, None) if like is None else _model(entries, like, source)
    with write_errors("merge", out, "nothing is written"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
            tensors = {e.name: e.mapped(Path(folder, str(i))) for i, e in enumerate(entries)}
            if like is None:
                write(out, tensors, by_name(tensors), config=None, max_shard_bytes=max_shard_bytes)
            else:
                params = tree.map_with_path(lambda path, _: tensors[tree.dotted(path)], described)
                hf.save(out, cfg, params, like=like, max_shard_bytes=max_shard_bytes)
    files = number_of(len(list(out.glob("*.safetensors"))), "file")
    where = f"in {files}" if like is None else f"as {like} has them"
    nbytes = sum(x.nbytes for x in tensors.values())
    return f"{out}: {len(entries)} tensors of {source}, {nbytes:,} bytes{',' * (like is not None)} {where}"


def _model(entries: Sequence[Entry], like: str | Path, source: str) -> tuple[Any, Any]:
    """Return the config and the described parameters of a model in `fs.models`, whose tensors are `entries`."""
    config = config_of(like)
    model = hf.model_of(config)
    if model is None:
        raise fail(f"merge: --like {like}: {config.get('model_type')!r} is not a model of fs.models",
                   fix="leave out --like: the leaves of a module have the module's own names")  # fmt: skip
    cfg = model.config(Path(like))
    described = model.init(cfg)
    expected = {tree.dotted(path): x for path, x in tree.leaves_with_path(described)}
    found = {e.name: e for e in entries}
    lines = [f"missing  {name}  {x!r}" for name, x in expected.items() if name not in found]
    lines += [f"extra    {name}  {list(e.shape)}" for name, e in found.items() if name not in expected]
    lines += [f"differs  {name}  {list(e.shape)}, {list(expected[name].shape)} in {like}" for name, e in found.items()
              if name in expected and e.shape != tuple(expected[name].shape)]  # fmt: skip
    if lines:
        raise fail(f"merge: {source} does not have the parameters of {like}", *lines[:12],
                   *[f"and {len(lines) - 12} more"][: len(lines) > 12], fix="--at, or another --like")  # fmt: skip
    return cfg, described


def _entries(path: AnyPath, step: int | None, at: str | None) -> tuple[str, list[Entry]]:
    """Return the tensors of a checkpoint of fshard, tied ones once."""
    if step is None and not is_complete(path):
        step = checkpoint.latest(path)
    directory = directory_of(path, step)
    manifest = read(directory, step)
    raise_all([e for name, part in manifest.files.items() for e in check_part(directory / name, part)])
    tensors = {name: x for name, x in manifest.leaves.items() if isinstance(x, checkpoint.Saved)}
    if at is None:
        at = "params" if any(name.startswith("params.") for name in tensors) else ""
    tops = {name.split(".")[0] for name, x in tensors.items() if x.same_as is None}
    source, chosen = _chosen(directory, tensors, at, tops)
    entries: dict[str, Entry] = {}  # by the first path of the leaf, which may be in another part of the tree
    for name, short in chosen.items():
        first = tensors[name].same_as or name
        x = tensors[first]
        entries.setdefault(first, Entry(short, x.dtype, x.shape, functools.partial(_fill, directory, first, x)))
    return source, list(entries.values())


def _chosen(path: AnyPath, names: Collection[str], at: str, tops: Collection[str]) -> tuple[str, dict[str, str]]:
    """Return a text for the part of a checkpoint, and its tensors: the names that they have, and those to write."""
    prefix = f"{at}." if at else ""
    chosen = {name: name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    if names and not chosen:
        raise fail(f"merge: {path} has no tensors at {at!r}", fix=f"one of {join_limited(sorted(tops), 8)}")
    return f"{path}{f' at {at}' * bool(at)}", chosen


def _fill(directory: AnyPath, name: str, x: checkpoint.Saved, out: Tensor) -> None:
    flat, start = out.view(-1), 0
    for piece in stream(directory, name, x.shape, x.dtype, x.chunks):
        flat[start : start + piece.numel()] = piece.flatten()
        start += piece.numel()


def _torch_entries(path: Path, at: str | None, allow_pickle: bool) -> tuple[str, list[Entry]]:
    """Return the tensors of a folder of torch.distributed.checkpoint.

    A key that all names begin with, such as Accelerate's `model`, is left out of the names.
    """
    if not allow_pickle:
        raise fail(f"merge: {path} is a checkpoint of torch, whose {_DCP} is a pickle",
                   "a pickle can run any code when it is read",
                   fix="--allow_pickle, if you trust who wrote it")  # fmt: skip
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        metadata = FileSystemReader(path).read_metadata()
    except Exception as e:
        raise fail(f"merge: torch cannot read {path / _DCP}", f"{type(e).__name__}: {e}") from e
    tensors = {name: x for name, x in metadata.state_dict_metadata.items() if isinstance(x, TensorStorageMetadata)}
    paths: dict[str, Sequence[Any]] = metadata.planner_data or {}
    tops = {str(paths[name][0]) if len(paths.get(name, ())) > 1 else "" for name in tensors}
    if at is None:
        at = tops.pop() if len(tops) == 1 else ""
    source, chosen = _chosen(path, tensors, at, tops)

    def fill(name: str, out: Tensor) -> None:
        load({name: out}, checkpoint_id=path, no_dist=True)

    rows = [(short, name, tensors[name]) for name, short in chosen.items()]
    return source, [Entry(short, x.properties.dtype, tuple(x.size), functools.partial(fill, name))
                    for short, name, x in rows]  # fmt: skip
