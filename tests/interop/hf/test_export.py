"""Hugging Face folders are written by slices, atomically: the same files from every mesh, which transformers reads."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import fshard as fs
from fshard import P, ShardingError
from fshard._core.files.safetensors import DTYPES
from fshard.interop.hf import export
from fshard.interop.hf.folder import INDEX, SINGLE, config_of
from fshard.interop.hf.weights import FileTensor, read, tensors
from fshard.spec import full_box
from tests.lib.assertions import assert_same, error_text
from tests.lib.folder_cases import KEY, MESHES, SPECS, as_theirs, described, sharded_file, theirs, values
from tests.lib.killed import Killed, dying
from tests.lib.processes import Pool
from tests.lib.tiers import slow_unless

CPU = torch.device("cpu")

CONFIG = {"model_type": "test", "sizes": [1, 2], "rate": 0.5}


def placed(ours: dict[str, Tensor], specs: Any, **sizes: int) -> Any:
    return fs.device_put(ours, specs, fs.make_mesh(**sizes))


def files(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.iterdir()}


@pytest.mark.parametrize("max_bytes", [5 * 10**9, 3000], ids=["single", "sharded"])
def test_every_mesh_writes_the_same_files_and_reads_them_back(tmp_path: Path, max_bytes: int) -> None:
    ours = values(torch.bfloat16) | {"norm": values()["norm"]}  # two dtypes in one file
    export.write(tmp_path / "plain", ours, theirs, config=CONFIG, max_shard_bytes=max_bytes)
    want = files(tmp_path / "plain")
    assert config_of(tmp_path / "plain") == CONFIG | {"dtype": "bfloat16"}  # of most numbers
    for i, (sizes, specs) in enumerate(itertools.product(MESHES, SPECS)):
        export.write(tmp_path / str(i), placed(ours, specs, **sizes), theirs, config=CONFIG, max_shard_bytes=max_bytes)
        assert files(tmp_path / str(i)) == want
    for sizes, specs in itertools.product(MESHES, SPECS):
        mesh = fs.make_mesh(**sizes)
        assert_same(fs.materialize(read(tmp_path / "0", described(), theirs), specs, mesh, key=KEY), ours)


def test_package_safetensors_reads_the_files(tmp_path: Path) -> None:
    ours = placed(values(), SPECS[2], data=2, model=2)
    export.write(tmp_path / "one", ours, theirs, config=CONFIG, metadata={"format": "pt", "by": "me"})
    assert sorted(files(tmp_path / "one")) == ["config.json", "model.safetensors"]
    assert_same(load_file(tmp_path / "one" / "model.safetensors"), as_theirs(values()))
    export.write(tmp_path / "some", ours, theirs, config=CONFIG, max_shard_bytes=5000)
    index = json.loads((tmp_path / "some" / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert names == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in values().values())
    loaded: dict[str, Tensor] = {}
    for name in names:
        of_file = load_file(tmp_path / "some" / name)
        assert set(of_file) == {n for n, f in index["weight_map"].items() if f == name}
        assert sum(x.nbytes for x in of_file.values()) <= 5000 or len(of_file) == 1
        loaded |= of_file
    assert_same(loaded, as_theirs(values()))


def test_tensors_are_aligned_and_large_ones_have_files_of_their_own(tmp_path: Path) -> None:
    mixed = {"a": torch.ones(3, dtype=torch.int8), "b": torch.ones(3), "c": torch.ones(1).half()}
    mixed["d"] = torch.ones(2).double()
    export.write(tmp_path / "one", mixed, lambda path: FileTensor(path[0]), config={})
    for name, x in tensors(tmp_path / "one").items():
        assert x.init.parts[0][0].start % x.dtype.itemsize == 0, name  # type: ignore[attr-defined]
    export.write(tmp_path / "some", mixed, lambda path: FileTensor(path[0]), config={}, max_shard_bytes=2)
    assert {n: list(load_file(tmp_path / "some" / n)) for n in files(tmp_path / "some") if "-of-" in n} == {
        f"model-0000{i + 1}-of-00004.safetensors": [n] for i, n in enumerate("abcd")
    }


def test_each_part_is_written_once_and_in_small_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[int, int]] = []
    pwrite = os.pwrite

    def counted(fd: int, data: Any, offset: int) -> int:
        count = pwrite(fd, data[:70], offset)  # a write may be partial
        written.append((offset, offset + count))
        return count

    monkeypatch.setattr(os, "pwrite", counted)
    monkeypatch.setattr(export, "CHUNK_BYTES", 200)
    export.write(tmp_path, placed(values(), SPECS[1], data=2, model=2), theirs, config=CONFIG)
    assert sum(b - a for a, b in written) == sum(x.nbytes for x in values().values())
    assert all(b == c for (_, b), (c, _) in itertools.pairwise(sorted(written)))
    assert_same(load_file(tmp_path / "model.safetensors"), as_theirs(values()))


def test_tied_leaf_is_written_once_under_its_first_name(tmp_path: Path) -> None:
    leaf = placed({"x": torch.arange(6.0)}, P("data"), data=2)["x"]
    export.write(tmp_path, {"a": leaf, "b": [leaf]}, lambda path: FileTensor(fs.tree.dotted(path)), config={})
    assert list(load_file(tmp_path / "model.safetensors")) == ["a"]


def test_prefix_is_added_to_every_name(tmp_path: Path) -> None:
    export.write(tmp_path, {"x": torch.ones(2)}, lambda path: FileTensor(path[0]), config={}, prefix="base")
    assert list(load_file(tmp_path / "model.safetensors")) == ["base.x"]


def test_strided_conjugate_and_empty_leaves_are_written_by_value(tmp_path: Path) -> None:
    x = torch.arange(24.0).view(4, 6)
    leaves = {"t": x.T, "one": x[1:2, 3:4], "step": x[:, ::2], "none": x[:0], "grad": x.clone().requires_grad_(),
           "conj": torch.complex(x, x + 1).conj()}  # fmt: skip
    export.write(tmp_path, leaves, lambda path: FileTensor(path[0]), config={})
    want = {n: y.detach().resolve_conj().contiguous() for n, y in leaves.items()}
    assert_same(load_file(tmp_path / "model.safetensors"), want)


# max_shard_bytes of the old folders and of those written over them.
KINDS: dict[str, int] = {"single": 10**9, "two shards": 16, "three shards": 8}


def named(path: fs.tree.Path) -> FileTensor:
    return FileTensor(path[0])


def save(folder: Path, kind: str, add: float, like: Path | None = None) -> None:
    ours = {n: torch.arange(2.0) + add for n in "abc"}
    export.write(folder, ours, named, config={"add": add}, like=like, max_shard_bytes=KINDS[kind])


def holds(folder: Path) -> float | None:
    """Return the number added to all weights of the folder; None if it has no weights."""
    if not any((folder / name).exists() for name in (SINGLE, INDEX)):
        return None
    leaves = read(folder, {n: fs.init.zeros(2) for n in "abc"}, named)
    values_of_leaves = {
        tuple(x.init.fill(KEY, x.shape, full_box(x.shape), x.dtype, CPU).tolist()) for x in leaves.values()
    }
    ((add, more),) = values_of_leaves  # the same in every leaf, and so in every file
    assert more == add + 1
    return float(add)


@pytest.mark.parametrize(("old", "new"), [*itertools.product(KINDS, KINDS)])
def test_second_write_replaces_weights_and_keeps_other_files(tmp_path: Path, old: str, new: str) -> None:
    folder = tmp_path / "folder"
    save(folder, old, 1.0)
    (folder / "tokenizer.json").write_text("{}")
    save(folder, new, 2.0)
    save(tmp_path / "fresh", new, 2.0)
    assert files(folder) == files(tmp_path / "fresh") | {"tokenizer.json": b"{}"}
    assert holds(folder) == 2.0


@pytest.mark.parametrize(("old", "new"), slow_unless(
    [(None, "three shards"), ("two shards", "two shards")],
    itertools.product([*KINDS, None], KINDS)))  # fmt: skip
def test_killed_write_leaves_the_old_weights_or_the_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str | None, new: str
) -> None:
    start, folder, fresh, like = (tmp_path / name for name in ("start", "folder", "fresh", "like"))
    start.mkdir()
    like.mkdir()
    (like / "config.json").write_text("{}")
    (like / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    if old is not None:
        save(start, old, 1.0)
    save(fresh, new, 3.0, like)
    results = []
    for k in itertools.count():
        shutil.copytree(start, folder)
        calls = iter([False] * k + [True])
        with monkeypatch.context() as m:
            for name in ("replace", "link", "unlink", "rmdir", "mkdir"):
                m.setattr(os, name, dying(getattr(os, name), calls))
            m.setattr(export, "_try", lambda _: None)
            with contextlib.suppress(Killed):
                save(folder, new, 2.0, like)
        results.append(holds(folder))
        with monkeypatch.context() as m:
            m.setattr(export, "_publish", dying(export._publish, iter([True])))
            m.setattr(export, "_try", lambda _: None)
            with pytest.raises(Killed):
                save(folder, new, 4.0, like)  # a second write, killed before it publishes
        assert holds(folder) == results[-1], k
        save(folder, new, 3.0, like)  # removes the files of killed writes
        assert files(folder) == files(fresh), k
        shutil.rmtree(folder)
        if next(calls, False):
            break  # the write ended first
    before = None if old is None else 1.0
    assert results == sorted(results, key=lambda add: add == 2.0)
    assert set(results) == {before, 2.0}


def test_error_lists_all_unsupported_leaves_before_a_file_is_created(tmp_path: Path) -> None:
    abstract = fs.make_mesh(kind="abstract", data=2)
    names = {"bf": ("cut", "(two=2 a) -> a", {"two": 0}), "twin1": ("twin",), "twin2": ("twin",),
             "half": ("gate", "(two=2 f) -> f", {"two": 1}), "f16": ("mixed", "(two=2 f) -> f", {"two": 0}),
             "f32": ("mixed", "(two=2 f) -> f", {"two": 1}), "bad": ("bad", "a b -> a b")}  # fmt: skip
    x = torch.ones(3)
    leaves = {"bf": x, "half": x + 1, "f16": x.half(), "f32": x + 2, "twin1": x + 3, "twin2": x + 4, "bad": x + 5,
              "number": 3, "described": fs.init.ones(3),
              "abstract": fs.materialize(fs.init.ones(2), P(), abstract, key=KEY),
              "c128": torch.ones(2, dtype=torch.complex128), "p.x": x + 6}  # fmt: skip
    name_of = lambda p: FileTensor(*names.get(p[0], (p[0],)))  # noqa: E731
    text = error_text(export.write, tmp_path / "no", leaves, name_of, config={}, prefix="p.")
    assert (
        text
        == f"""\
10 problems
write: tree['abstract']: is on an abstract mesh, where leaves have no values
  fix: use another mesh
write: tree['bad']: Pattern: [3] has 1 dims, the right side has 2
  a b -> a b
  fix: one name, or one (group), for each dim of the leaf
write: tree['c128']: cannot write torch.complex128
  fix: use one of {", ".join(str(d).removeprefix("torch.") for d in DTYPES.values())}
write: tree['described']: is only described, and has no values
  fix: fs.materialize it
write: tree['number']: cannot write a int
  fix: give a tensor
write: tree['p.x']: 'p.x' begins with the prefix 'p.' already
  fix: leave prefix= out
write: 'p.cut' lacks a part
  tree['bf'] give 3 of its 6 elements
  fix: give one leaf for each part
write: 'p.mixed' has parts of different shapes or dtypes
  tree['f16']  f16[6]
  tree['f32']  f32[6]
  fix: they are parts of one tensor in the file
write: 'p.gate' lacks a part
  tree['half'] give 3 of its 6 elements
  fix: give one leaf for each part
write: 'p.twin' would be written twice
  tree['twin1'] and tree['twin2']
  fix: give each leaf another name"""
    )
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": {"x": object}}, """\
write: config= is not JSON
  Object of type type is not JSON serializable
  fix: numbers, strings, booleans, None, lists and dicts"""),
        ({"max_shard_bytes": 0}, "write: max_shard_bytes=0\n  fix: a number of bytes"),
        ({"metadata": {"x": 1}}, "write: metadata must be a Mapping of str or None, got {'x': 1}"),
        ({"tree_": {}}, "write: there are no leaves\n  fix: give the parameters"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    valid: dict[str, Any] = {"tree_": {"x": torch.ones(1)}, "theirs": lambda _: FileTensor("x"), "config": {}}
    assert error_text(export.write, tmp_path / "no", **valid | arguments) == message
    assert not any(tmp_path.iterdir())


def test_donated_leaf_and_call_inside_shard_map_are_refused(tmp_path: Path) -> None:
    mesh = fs.make_mesh(data=2)
    leaf = fs.device_put(torch.ones(2), P(), mesh)
    leaf.donate_to("step")
    text = error_text(export.write, tmp_path / "no", {"x": leaf}, lambda _: FileTensor("x"), config={})
    assert text.startswith("write: tree['x']: f32[2] was donated to step, which may have overwritten it\n")

    @fs.shard_map(mesh=mesh, in_specs=(P(),), out_specs=P(), check="never")
    def inside(x: Tensor) -> Tensor:
        export.write(tmp_path / "no", {"x": x}, lambda _: FileTensor("x"), config={})
        return x

    want = "write: called inside shard_map, where every leaf is a local part\n  fix: call it outside"
    assert want in error_text(inside, torch.ones(2))


@pytest.mark.parametrize("call", ["fsync", "pwrite", "mkdir"])
def test_full_disk_leaves_the_folder_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    folder, new = tmp_path / "folder", tmp_path / "new"
    save(folder, "two shards", 1.0)
    before = files(folder)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    for target in (folder, new):
        text = error_text(lambda target=target: save(target, "three shards", 2.0))
        assert text.startswith(f"write: cannot write {target}")
        assert text.endswith(
            "\n  No space left on device\n  the weights in the folder are unchanged\n"
            "  fix: make room or choose another disk, and call it again"
        )
    assert files(folder) == before
    assert not new.exists()


def test_file_system_without_links_leaves_the_folder_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "folder", "two shards", 1.0)
    before = files(tmp_path / "folder")

    def none(*args: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", none)
    assert "Operation not supported" in error_text(save, tmp_path / "folder", "two shards", 2.0)
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


def test_files_that_another_program_edits_with_their_metadata_are_read_again(tmp_path: Path) -> None:
    leaves = {"a": torch.randn(4), "b": torch.randn(4)}
    export.write(tmp_path, leaves, lambda path: FileTensor(path[0]), config={}, max_shard_bytes=16)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    with safe_open(shard, "pt") as f:
        metadata = f.metadata()
    assert metadata == {"format": "pt"}
    save_file({"b": leaves["b"] + 1}, shard, metadata=metadata)
    again = read(tmp_path, {n: fs.init.zeros(4) for n in "ab"}, lambda path: FileTensor(path[0]))
    got = fs.device_get(fs.materialize(again, P(), fs.make_mesh(data=1), key=KEY))
    assert_same(got, {**leaves, "b": leaves["b"] + 1})


@pytest.mark.parametrize("max_bytes", ["50GB", "20KB"])
def test_round_trip_with_from_pretrained_and_save_pretrained(tmp_path: Path, max_bytes: str) -> None:
    transformers = pytest.importorskip("transformers")
    gpt2 = fs.models.gpt2
    sizes = {"vocab_size": 31, "n_positions": 8, "n_embd": 12, "n_layer": 2, "n_head": 3}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    model.save_pretrained(tmp_path / "theirs", max_shard_size=max_bytes)
    mesh = fs.make_mesh(data=2, model=2)
    cfg = gpt2.Config(**sizes)
    leaves = read(tmp_path / "theirs", gpt2.init(cfg), gpt2_theirs, prefix="transformer")
    params = fs.materialize(leaves, fs.fully_shard(P(), gpt2.init(cfg), axis="data"), mesh, key=KEY)
    export.write(tmp_path / "ours", params, gpt2_theirs, config=config_of(tmp_path / "theirs"),
                 max_shard_bytes=20_000 if max_bytes == "20KB" else 10**9)  # fmt: skip
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours")
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    assert again.lm_head.weight is again.transformer.wte.weight
    base = transformers.GPT2Model.from_pretrained(tmp_path / "ours")
    base.save_pretrained(tmp_path / "base")
    leaves = read(tmp_path / "base", gpt2.init(cfg), gpt2_theirs, prefix="transformer")
    same_tree = zip(fs.tree.leaves(fs.device_get(fs.materialize(leaves, P(), mesh, key=KEY))),
                    fs.tree.leaves(fs.device_get(params)), strict=True)  # fmt: skip
    assert all(torch.equal(a, b) for a, b in same_tree)


# --- processes ------------------------------------------------------------------------------------------------


def _rank(directory: str) -> dict[str, Any]:
    """On each process: read a folder, write it, and fail in several ways."""
    rank, out = dist.get_rank(), Path(directory)
    mesh = fs.make_mesh(data=1, model=2)
    leaves = read(out / "source", described(), theirs)
    results: dict[str, Any] = {"read": 0, "written": 0}
    functions = {name: getattr(os, name) for name in ("preadv", "pwrite", "fsync")}

    def reading(fd: int, buffers: Any, offset: int) -> int:
        got: int = functions["preadv"](fd, buffers, offset)
        results["read"] += got
        return got

    def writing(fd: int, data: Any, offset: int) -> int:
        done: int = functions["pwrite"](fd, data, offset)
        results["written"] += done
        return done

    try:
        os.preadv, os.pwrite = reading, writing  # type: ignore[assignment]
        params = fs.materialize(leaves, SPECS[1], mesh, key=KEY)
        export.write(out / "written", params, theirs, config=CONFIG, max_shard_bytes=5000)
        before = results["written"]
        fs.state_dict.write(out / "files" / "one.pt", params)
        fs.state_dict.write(out / "files" / "one.safetensors", params)
        results["written"], results["written to files"] = before, results["written"] - before
    finally:
        os.preadv, os.pwrite = functions["preadv"], functions["pwrite"]
    results["bytes of shards"] = sum(x.shards[0].nbytes for x in params.values())

    def attempt(path: str, leaves: Any, metadata: dict[str, str] | None = None, like: str = "", **config: Any) -> str:
        try:
            export.write(out / path, leaves, theirs, config=CONFIG | config, metadata=metadata,
                         like=out / like if like else None)  # fmt: skip
        except ShardingError as e:
            return str(e)
        return "nothing was raised"

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    os.fsync = full if rank == 1 else functions["fsync"]
    try:
        results["full"] = attempt("full", params)
        with pytest.raises(ShardingError) as e:
            fs.state_dict.write(out / "files" / "one.pt", fs.tree.map(lambda x: x, params))
        results["full file"] = str(e.value)
    finally:
        os.fsync = functions["fsync"]
    with pytest.raises(ShardingError) as e:
        fs.state_dict.write(out / "files" / ("no.suffix" if rank else "one.pt"), params)
    results["refused on one"] = str(e.value)
    results["not shared"] = attempt(f"host{rank}", params)
    results["differ"] = attempt("differ", params, seed=rank)
    results["metadata"] = attempt("differ", params, metadata={"rank": "0" * rank})
    results["like"] = attempt("like", params, like="nowhere" if rank else "want")
    results["object"] = attempt("object", {**params, "norm": object() if rank else params["norm"]})
    gathered = fs.device_get(params)
    before = results["written"]
    os.pwrite = writing  # type: ignore[assignment]
    try:
        results["plain"] = attempt("plain", gathered)
    finally:
        os.pwrite = functions["pwrite"]
    results["written"], results["written plain"] = before, results["written"] - before
    results["other values"] = attempt("other", {**gathered, "norm": gathered["norm"] + rank})
    # and a loader, without workers: under coverage a worker of a rank that is itself forked ends with exit code 1
    sampler = fs.data.sampler(KEY, 7, 3, mesh, axis="model", epoch=0, drop_last=False)
    loader: Any = torch.utils.data.DataLoader(torch.arange(7), batch_sampler=sampler)  # type: ignore[arg-type]
    loaded = list(fs.data.batches(loader))
    results["drawn"] = [x.shards[0].tolist() for x in loaded]
    results["batches"] = [x.tolist() for x in fs.device_get(loaded)]
    return results


@pytest.mark.process
def test_process_ranks_read_and_write_only_their_own_bytes(ranks: Pool, tmp_path: Path) -> None:
    sharded_file(tmp_path / "source", values())
    export.write(tmp_path / "plain source", values(), theirs, config=CONFIG)
    export.write(tmp_path / "want", values(), theirs, config=CONFIG, max_shard_bytes=5000)
    results = ranks(2, _rank, str(tmp_path))
    assert files(tmp_path / "written") == files(tmp_path / "want")
    assert files(tmp_path / "plain") == files(tmp_path / "plain source")
    total = sum(x.nbytes for x in values().values())
    assert sum(result["written"] for result in results) == total
    assert sum(result["written to files"] for result in results) == 2 * total
    assert min(result["written to files"] for result in results) > total / 2
    for name in ("one.pt", "one.safetensors"):  # the file of one process; a failure of one rank has not changed it
        fs.state_dict.write(tmp_path / "simulated" / name, placed(values(), SPECS[1], data=1, model=2))
    assert files(tmp_path / "files") == files(tmp_path / "simulated")
    batches = [fs.data.indices(KEY, step=s, size=7, batch=3, drop_last=False).tolist() for s in range(3)]
    for rank, result in enumerate(results):
        assert result["batches"] == batches
        assert result["drawn"] == [
            (rows[:2], rows[2:])[rank] if len(rows) > 1 else (rows, [])[rank] for rows in batches
        ]
        assert result["read"] == result["bytes of shards"]
        assert result["written plain"] == (0 if rank else sum(x.nbytes for x in values().values()))
        assert result["refused on one"].startswith("rank 1: write: path '")
        assert re.fullmatch(
            r"rank 1: write: cannot write \S+/full/\.saving-\w{8}/model.safetensors\n  No space left on device\n"
            r"  the weights in the folder are unchanged\n"
            r"  fix: make room or choose another disk, and call it again", result["full"])  # fmt: skip
        assert re.fullmatch(
            r"rank 1: write: cannot write \S+/files/\.one\.pt\.saving-\w{8}\n  No space left on device\n(.|\n)*",
            result["full file"])  # fmt: skip
        assert re.fullmatch(
            r"rank 1: write: \S+/host1/\.saving-\w{8} does not exist on this rank, and rank 0 has created it\n"
            r"  fix: write to a folder that all ranks share; for a URL, set TMPDIR to one",
            result["not shared"])  # fmt: skip
        assert result["differ"].startswith("write: the ranks do not have the same leaves\n  config.json    rank 0  '{")
        assert result["metadata"].startswith(
            "write: the ranks do not have the same leaves\n  model.safetensors    rank 0  header of ")  # fmt: skip
        assert re.fullmatch(r"rank 1: \S+/nowhere/config.json: there is no such file\n  fix: .*", result["like"])
        assert result["object"] == "rank 1: write: tree['norm']: cannot write a object\n  fix: give a tensor"
        assert result["plain"] == "nothing was raised"
        assert re.fullmatch(
            r"write: the ranks do not have the same leaves\n"
            r"  tree\['norm'\]    rank 0  f32\[20\] of crc32 \w{8} for m.norm.weight    "
            r"rank 1  f32\[20\] of crc32 \w{8} for m.norm.weight\n"
            r"  fix: plain tensors and the arguments must be the same on every rank",
            result["other values"]), rank  # fmt: skip
    names = {d.name for d in tmp_path.iterdir()}
    assert names == {"source", "plain source", "want", "written", "plain", "files", "simulated"}
