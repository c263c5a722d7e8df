"""Hugging Face folders are written by slices: the same files from every mesh, all at once, read by transformers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

import fshard as fs
from fshard import P, ShardingError
from fshard.interop.hf import export
from fshard.interop.hf.folder import DTYPES, INDEX, SINGLE, config_of
from fshard.interop.hf.weights import FileTensor, read, tensors
from fshard.spec import full_box
from tests.lib.folder_cases import (
    KEY,
    MESHES,
    SPECS,
    as_theirs,
    described,
    refusal,
    same,
    theirs,
    values,
)
from tests.lib.processes import Pool

CPU = torch.device("cpu")

CONFIG = {"model_type": "test", "sizes": [1, 2], "rate": 0.5}


def placed(ours: dict[str, Tensor], specs: Any, **sizes: int) -> Any:
    return fs.device_put(ours, specs, fs.make_mesh(**sizes))


def files(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.iterdir()}


@pytest.mark.parametrize("most", [5 * 10**9, 3000], ids=["single", "sharded"])
def test_every_mesh_writes_the_same_files_and_every_other_reads_them(tmp_path: Path, most: int) -> None:
    ours = values(torch.bfloat16) | {"norm": values()["norm"]}  # two dtypes in one file
    export.write(tmp_path / "plain", ours, theirs, config=CONFIG, max_shard_bytes=most)
    want = files(tmp_path / "plain")
    assert config_of(tmp_path / "plain") == CONFIG
    for i, (sizes, specs) in enumerate(itertools.product(MESHES, SPECS)):
        export.write(tmp_path / str(i), placed(ours, specs, **sizes), theirs, config=CONFIG, max_shard_bytes=most)
        assert files(tmp_path / str(i)) == want
    for sizes, specs in itertools.product(MESHES, SPECS):
        mesh = fs.make_mesh(**sizes)
        same(fs.materialize(read(tmp_path / "0", described(), theirs), specs, mesh, key=KEY), ours)


def test_the_files_are_what_that_package_reads_too(tmp_path: Path) -> None:
    ours = placed(values(), SPECS[2], data=2, model=2)
    export.write(tmp_path / "one", ours, theirs, config=CONFIG, metadata={"format": "pt", "by": "me"})
    assert sorted(files(tmp_path / "one")) == ["config.json", "model.safetensors"]
    same(load_file(tmp_path / "one" / "model.safetensors"), as_theirs(values()))
    export.write(tmp_path / "some", ours, theirs, config=CONFIG, max_shard_bytes=5000)
    index = json.loads((tmp_path / "some" / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert names == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert index["metadata"] == {"total_size": sum(x.nbytes for x in values().values())}
    found: dict[str, Tensor] = {}
    for name in names:
        held = load_file(tmp_path / "some" / name)
        assert set(held) == {n for n, f in index["weight_map"].items() if f == name}
        assert sum(x.nbytes for x in held.values()) <= 5000 or len(held) == 1
        found |= held
    same(found, as_theirs(values()))


def test_tensors_are_aligned_and_one_that_is_too_large_has_a_file_of_its_own(tmp_path: Path) -> None:
    mixed = {"a": torch.ones(3, dtype=torch.int8), "b": torch.ones(3), "c": torch.ones(1).half()}
    mixed["d"] = torch.ones(2).double()
    export.write(tmp_path / "one", mixed, lambda path: FileTensor(path[0]), config={})
    for name, x in tensors(tmp_path / "one").items():
        assert x.init.entry.start % x.dtype.itemsize == 0, name  # type: ignore[attr-defined]
    export.write(tmp_path / "some", mixed, lambda path: FileTensor(path[0]), config={}, max_shard_bytes=2)
    assert {n: list(load_file(tmp_path / "some" / n)) for n in files(tmp_path / "some") if "-of-" in n} == {
        f"model-0000{i + 1}-of-00004.safetensors": [n] for i, n in enumerate("abcd")
    }


def test_each_part_is_written_once_and_in_small_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    real = os.pwrite

    def counted(fd: int, data: Any, offset: int) -> int:
        done = real(fd, data[:70], offset)  # a write may take less than it was given
        seen.append((offset, offset + done))
        return done

    monkeypatch.setattr(os, "pwrite", counted)
    monkeypatch.setattr(export, "CHUNK", 200)
    export.write(tmp_path, placed(values(), SPECS[1], data=2, model=2), theirs, config=CONFIG)
    assert sum(b - a for a, b in seen) == sum(x.nbytes for x in values().values())
    assert all(b == c for (_, b), (c, _) in itertools.pairwise(sorted(seen)))
    same(load_file(tmp_path / "model.safetensors"), as_theirs(values()))


def test_a_tie_is_written_once_under_its_first_name(tmp_path: Path) -> None:
    leaf = placed({"x": torch.arange(6.0)}, P("data"), data=2)["x"]
    export.write(tmp_path, {"a": leaf, "b": [leaf]}, lambda path: FileTensor(fs.tree.dotted(path)), config={})
    assert list(load_file(tmp_path / "model.safetensors")) == ["a"]


def test_a_prefix_stands_before_every_name(tmp_path: Path) -> None:
    export.write(tmp_path, {"x": torch.ones(2)}, lambda path: FileTensor(path[0]), config={}, prefix="base")
    assert list(load_file(tmp_path / "model.safetensors")) == ["base.x"]


def test_leaves_that_lie_in_odd_ways_are_written_right(tmp_path: Path) -> None:
    x = torch.arange(24.0).view(4, 6)
    odd = {"t": x.T, "one": x[1:2, 3:4], "step": x[:, ::2], "none": x[:0], "grad": x.clone().requires_grad_(),
           "conj": torch.complex(x, x + 1).conj()}  # fmt: skip
    export.write(tmp_path, odd, lambda path: FileTensor(path[0]), config={})
    want = {n: y.detach().resolve_conj().contiguous() for n, y in odd.items()}
    same(load_file(tmp_path / "model.safetensors"), want)


# Folders as they may be found, each with other weights in it, and what is written over them.
KINDS: dict[str, int] = {"single": 10**9, "two shards": 16, "three shards": 8}


def named(path: fs.tree.Path) -> FileTensor:
    return FileTensor(path[0])


def put(folder: Path, kind: str, add: float) -> None:
    ours = {n: torch.arange(2.0) + add for n in "abc"}
    export.write(folder, ours, named, config={"add": add}, max_shard_bytes=KINDS[kind])


def holds(folder: Path) -> float | None:
    """What was added to all that is there; None where there are no weights."""
    if not any((folder / name).exists() for name in (SINGLE, INDEX)):
        return None
    leaves = read(folder, {n: fs.init.zeros(2) for n in "abc"}, named)
    found = {tuple(x.init.fill(KEY, x.shape, full_box(x.shape), x.dtype, CPU).tolist()) for x in leaves.values()}
    ((add, more),) = found  # one in every leaf, and so in every file
    assert more == add + 1
    return float(add)


@pytest.mark.parametrize(("old", "new"), [*itertools.product(KINDS, KINDS)])
def test_writing_again_replaces_the_weights_and_leaves_the_rest(tmp_path: Path, old: str, new: str) -> None:
    folder = tmp_path / "folder"
    put(folder, old, 1.0)
    (folder / "tokenizer.json").write_text("{}")
    put(folder, new, 2.0)
    put(tmp_path / "fresh", new, 2.0)
    assert files(folder) == files(tmp_path / "fresh") | {"tokenizer.json": b"{}"}
    assert holds(folder) == 2.0


class Killed(BaseException):
    """Ends a save as a kill would: nothing is cleaned up after it."""


@pytest.mark.parametrize(("old", "new"), [*itertools.product([*KINDS, None], KINDS)])
def test_a_save_that_is_killed_leaves_the_old_weights_or_the_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str | None, new: str
) -> None:
    start, folder, fresh = tmp_path / "start", tmp_path / "folder", tmp_path / "fresh"
    start.mkdir()
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    if old is not None:
        put(start, old, 1.0)
    put(fresh, new, 3.0)
    seen = []
    for k in itertools.count():
        shutil.copytree(start, folder)
        left = iter([False] * k + [True])
        with monkeypatch.context() as m:
            for name in ("replace", "link", "unlink", "rmdir", "mkdir"):
                m.setattr(os, name, dying(getattr(os, name), left))
            m.setattr(export, "_abandon", lambda *_: None)
            with contextlib.suppress(Killed):
                put(folder, new, 2.0)
        seen.append(holds(folder))
        with monkeypatch.context() as m:
            m.setattr(export, "_publish", dying(export._publish, iter([True])))
            m.setattr(export, "_abandon", lambda *_: None)
            with pytest.raises(Killed):
                put(folder, new, 4.0)  # a second one that is killed, before it appears
        assert holds(folder) == seen[-1], k
        put(folder, new, 3.0)  # whatever was left is cleared by the next one
        assert files(folder) == files(fresh), k
        shutil.rmtree(folder)
        if next(left, False):
            break  # it was not killed
    before = None if old is None else 1.0
    assert seen == sorted(seen, key=lambda add: add == 2.0)
    assert set(seen) == {before, 2.0}


def dying(f: Callable[..., Any], left: Iterator[bool]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if next(left, False):
            raise Killed
        return f(*args, **kwargs)

    return call


def test_everything_that_cannot_be_written_is_listed_before_a_file_is_made(tmp_path: Path) -> None:
    abstract = fs.make_mesh(kind="abstract", data=2)
    names = {"bf": ("cut", "(two=2 a) -> a", {"two": 0}), "twin1": ("twin",), "twin2": ("twin",),
             "half": ("gate", "(two=2 f) -> f", {"two": 1}), "f16": ("mixed", "(two=2 f) -> f", {"two": 0}),
             "f32": ("mixed", "(two=2 f) -> f", {"two": 1}), "bad": ("bad", "a b -> a b")}  # fmt: skip
    x = torch.ones(3)
    leaves = {"bf": x, "half": x + 1, "f16": x.half(), "f32": x + 2, "twin1": x + 3, "twin2": x + 4, "bad": x + 5,
              "number": 3, "described": fs.init.ones(3),
              "abstract": fs.materialize(fs.init.ones(2), P(), abstract, key=KEY),
              "c128": torch.ones(2, dtype=torch.complex128), "p.x": x + 6}  # fmt: skip
    text = refusal(lambda: export.write(tmp_path / "no", leaves,
                                        lambda p: FileTensor(*names.get(p[0], (p[0],))), config={},
                                        prefix="p."))  # fmt: skip
    assert (
        text
        == f"""\
10 problems
write: tree['abstract']: is on an abstract mesh, where leaves have no values
  fix: use another mesh
write: tree['bad']: Pattern: [3] has 1 dims, the right side has 2
  a b -> a b
  fix: one name, or one (group), for each dim of ours
write: tree['c128']: cannot write torch.complex128
  fix: use one of {", ".join(DTYPES)}
write: tree['described']: is only described
  fix: fs.materialize it
write: tree['number']: cannot write a int
  fix: give a tensor
write: tree['p.x']: 'p.x' begins with the prefix 'p.' already
  fix: leave prefix= out
write: 'p.cut' lacks a part
  tree['bf'] leave out two=1
  fix: give a leaf for each part
write: 'p.mixed' has parts of different shapes or dtypes
  tree['f16']  f16[6]
  tree['f32']  f32[6]
  fix: they are parts of one tensor there
write: 'p.gate' lacks a part
  tree['half'] leave out two=0
  fix: give a leaf for each part
write: 'p.twin' would be written twice
  tree['twin1'] and tree['twin2']
  fix: give each leaf a name of its own"""
    )
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"config": {"x": object}}, """\
write: config= is not JSON
  Object of type type is not JSON serializable
  fix: numbers, strings, booleans, None, lists and dicts"""),
        ({"max_shard_bytes": 0}, "write: max_shard_bytes=0\n  fix: a number of bytes"),
        ({"metadata": {"x": 1}}, "write: metadata={'x': 1}\n  fix: from strings to strings, as the format has it"),
        ({"tree_": {}}, "write: there are no leaves\n  fix: give the parameters"),
    ],
)  # fmt: skip
def test_arguments_that_make_no_folder(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    args: dict[str, Any] = {"tree_": {"x": torch.ones(1)}, "theirs": lambda _: FileTensor("x"), "config": {}} | given
    assert refusal(lambda: export.write(tmp_path / "no", **args)) == message
    assert not any(tmp_path.iterdir())


def test_a_donated_leaf_and_a_region_are_refused(tmp_path: Path) -> None:
    mesh = fs.make_mesh(data=2)
    leaf = fs.device_put(torch.ones(2), P(), mesh)
    leaf.donate_to("step")
    text = refusal(lambda: export.write(tmp_path / "no", {"x": leaf}, lambda _: FileTensor("x"), config={}))
    assert text.startswith("write: tree['x']: f32[2] was donated to step, which may have overwritten it\n")

    @fs.shard_map(mesh=mesh, in_specs=(P(),), out_specs=P(), check="never")
    def inside(x: Tensor) -> Tensor:
        export.write(tmp_path / "no", {"x": x}, lambda _: FileTensor("x"), config={})
        return x

    want = "write: called inside shard_map, where every leaf is a local part\n  fix: call it outside"
    assert want in refusal(lambda: inside(torch.ones(2)))


@pytest.mark.parametrize("call", ["fsync", "pwrite", "mkdir"])
def test_a_disk_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    folder, new = tmp_path / "folder", tmp_path / "new"
    put(folder, "two shards", 1.0)
    before = files(folder)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    for where in (folder, new):
        text = refusal(lambda where=where: put(where, "three shards", 2.0))
        assert text.startswith(f"write: cannot write {where}")
        assert text.endswith("\n  No space left on device\n  fix: the folder is as it was")
    assert files(folder) == before
    assert not new.exists()


def test_a_folder_that_cannot_be_linked_in_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "folder", "two shards", 1.0)
    before = files(tmp_path / "folder")

    def none(*args: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", none)
    assert "Operation not supported" in refusal(lambda: put(tmp_path / "folder", "two shards", 2.0))
    assert files(tmp_path / "folder") == before


# --- transformers ---------------------------------------------------------------------------------------------

GPT2 = {
    "ln_1.w": FileTensor("ln_1.weight"), "ln_1.b": FileTensor("ln_1.bias"), "ln_2.w": FileTensor("ln_2.weight"),
    "ln_2.b": FileTensor("ln_2.bias"), "qkv.w": FileTensor("attn.c_attn.weight", "d (c h k) -> d c h k"),
    "qkv.b": FileTensor("attn.c_attn.bias", "(c h k) -> c h k"),
    "proj.w": FileTensor("attn.c_proj.weight", "(h k) d -> h k d"),
    "proj.b": FileTensor("attn.c_proj.bias"),
    "up.w": FileTensor("mlp.c_fc.weight"), "up.b": FileTensor("mlp.c_fc.bias"),
    "down.w": FileTensor("mlp.c_proj.weight"), "down.b": FileTensor("mlp.c_proj.bias"),
}  # fmt: skip


def gpt2_theirs(path: fs.tree.Path) -> FileTensor:
    if path[0] == "h":
        their = GPT2[fs.tree.dotted(path[2:])]
        return FileTensor(f"transformer.h.{path[1]}.{their.name}", their.dims)
    last = {"w": "weight", "b": "bias"}
    return FileTensor(".".join(["transformer", path[0], *([last[p] for p in path[1:]] or ["weight"])]))


@pytest.mark.parametrize("most", ["50GB", "20KB"])
def test_from_pretrained_reads_what_is_written_and_what_it_saves_is_read(tmp_path: Path, most: str) -> None:
    transformers = pytest.importorskip("transformers")
    gpt2 = fs.models.gpt2
    sizes = {"vocab_size": 31, "n_positions": 8, "n_embd": 12, "n_layer": 2, "n_head": 3}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    model.save_pretrained(tmp_path / "theirs", max_shard_size=most)
    mesh = fs.make_mesh(data=2, model=2)
    cfg = gpt2.Config(**sizes)
    leaves = read(tmp_path / "theirs", gpt2.init(cfg), gpt2_theirs, prefix="transformer")
    params = fs.materialize(leaves, fs.fully_shard(P(), gpt2.init(cfg), axis="data"), mesh, key=KEY)
    export.write(tmp_path / "ours", params, gpt2_theirs, config=config_of(tmp_path / "theirs"),
                 max_shard_bytes=20_000 if most == "20KB" else 10**9)  # fmt: skip
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours")
    same(dict(again.state_dict()), dict(model.state_dict()))
    assert again.lm_head.weight is again.transformer.wte.weight
    base = transformers.GPT2Model.from_pretrained(tmp_path / "ours")
    base.save_pretrained(tmp_path / "base")
    leaves = read(tmp_path / "base", gpt2.init(cfg), gpt2_theirs, prefix="transformer")
    same_tree = zip(fs.tree.leaves(fs.device_get(fs.materialize(leaves, P(), mesh, key=KEY))),
                    fs.tree.leaves(fs.device_get(params)), strict=True)  # fmt: skip
    assert all(torch.equal(a, b) for a, b in same_tree)


# --- real ranks -----------------------------------------------------------------------------------------------


def _rank(directory: str) -> dict[str, Any]:
    """On each real rank: read what is there, write it, and fail in several ways."""
    rank, out = dist.get_rank(), Path(directory)
    mesh = fs.make_mesh(data=1, model=2)
    leaves = read(out / "there", described(), theirs)
    told: dict[str, Any] = {"read": 0, "written": 0}
    real = {name: getattr(os, name) for name in ("preadv", "pwrite", "fsync")}

    def reading(fd: int, buffers: Any, offset: int) -> int:
        got: int = real["preadv"](fd, buffers, offset)
        told["read"] += got
        return got

    def writing(fd: int, data: Any, offset: int) -> int:
        done: int = real["pwrite"](fd, data, offset)
        told["written"] += done
        return done

    try:
        os.preadv, os.pwrite = reading, writing  # type: ignore[assignment]
        params = fs.materialize(leaves, SPECS[1], mesh, key=KEY)
        export.write(out / "written", params, theirs, config=CONFIG, max_shard_bytes=5000)
    finally:
        os.preadv, os.pwrite = real["preadv"], real["pwrite"]
    told["held"] = sum(x.shards[0].nbytes for x in params.values())

    def attempt(path: str, leaves: Any, **config: Any) -> str:
        try:
            export.write(out / path, leaves, theirs, config=CONFIG | config)
        except ShardingError as e:
            return str(e)
        return "nothing was raised"

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    os.fsync = full if rank == 1 else real["fsync"]
    try:
        told["full"] = attempt("full", params)
    finally:
        os.fsync = real["fsync"]
    told["elsewhere"] = attempt(f"host{rank}", params)
    told["differ"] = attempt("differ", params, seed=rank)
    told["object"] = attempt("object", {**params, "norm": object() if rank else params["norm"]})
    whole_ = fs.device_get(params)
    before = told["written"]
    os.pwrite = writing  # type: ignore[assignment]
    try:
        told["plain"] = attempt("plain", whole_)
    finally:
        os.pwrite = real["pwrite"]
    told["written"], told["written plain"] = before, told["written"] - before
    told["unlike"] = attempt("unlike", {**whole_, "norm": whole_["norm"] + rank})
    return told


@pytest.mark.process
def test_real_ranks_read_and_write_their_own_bytes_only(ranks: Pool, tmp_path: Path) -> None:
    export.write(tmp_path / "there", values(), theirs, config={}, max_shard_bytes=3000)
    export.write(tmp_path / "plain there", values(), theirs, config=CONFIG)
    export.write(tmp_path / "want", values(), theirs, config=CONFIG, max_shard_bytes=5000)
    told = ranks(2, _rank, str(tmp_path))
    assert files(tmp_path / "written") == files(tmp_path / "want")
    assert files(tmp_path / "plain") == files(tmp_path / "plain there")
    assert sum(one["written"] for one in told) == sum(x.nbytes for x in values().values())
    for rank, one in enumerate(told):
        assert one["read"] == one["held"]
        assert one["written plain"] == (0 if rank else sum(x.nbytes for x in values().values()))
        assert re.fullmatch(
            r"rank 1: write: cannot write \S+/full/\.saving-\w{8}/model.safetensors\n  No space left on device\n"
            r"  fix: the folder is as it was", one["full"])  # fmt: skip
        assert re.fullmatch(
            r"rank 1: write: \S+/host1/\.saving-\w{8} is not here, though rank 0 has made it\n"
            r"  fix: write to a folder that all ranks share", one["elsewhere"])  # fmt: skip
        assert one["differ"].startswith("write: the ranks do not hold the same leaves\n  rank 0  config.json  '{")
        assert one["object"] == "rank 1: write: tree['norm']: cannot write a object\n  fix: give a tensor"
        assert one["plain"] == "nothing was raised"
        assert re.fullmatch(
            r"write: the ranks do not hold the same leaves\n"
            r"  rank 0  m.norm.weight  f32\[20\]  from tree\['norm'\]  a tensor of crc32 \w{8}    "
            r"rank 1  m.norm.weight  f32\[20\]  from tree\['norm'\]  a tensor of crc32 \w{8}\n"
            r"  fix: plain tensors and the config must be the same on every rank", one["unlike"]), rank  # fmt: skip
    left = {d.name for d in tmp_path.iterdir()}
    assert left == {"there", "plain there", "want", "written", "plain"}
