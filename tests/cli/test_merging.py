"""`python -m fshard merge`: the tensors of a sharded checkpoint, bit for bit, in safetensors files."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import fshard as fs
from fshard import P
from fshard.checkpoint import parts
from fshard.cli import main

KEY = fs.key(0)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def state() -> tuple[Any, Any]:
    """Leaves of several dtypes, uneven, empty, of 0 dims, tied and in nested lists; and their specs."""
    head = fs.init.normal((7, 5))
    params = {
        "blocks": [{"w": fs.init.normal((3, 6, 5)), "b": fs.init.zeros((5,), dtype=torch.bfloat16)} for _ in range(2)],
        "empty": fs.init.zeros((0, 4)), "scale": fs.init.ones(()), "embed": head, "head": head,
        "ids": torch.arange(11), "on": torch.tensor([True, False]), "z": torch.tensor([1 + 2j, 3j]),
    }  # fmt: skip
    specs = {
        "blocks": [{"w": P(None, "data", "model"), "b": P("model")}] * 2, "empty": P(), "scale": P(),
        "embed": P("data", "model"), "head": P("data", "model"), "ids": P(), "on": P(), "z": P(),
    }  # fmt: skip
    return {"params": params, "step": 3, "key": KEY}, {"params": specs, "step": P(), "key": P()}


def saved(path: str = "out", **options: Any) -> dict[str, torch.Tensor]:
    """Save a state from a mesh of 2 x 3, and return its parameters by their dotted paths."""
    tree, specs = state()
    placed = fs.materialize(tree["params"], specs["params"], fs.make_mesh(data=2, model=3), key=KEY)
    fs.checkpoint.save(path, {**tree, "params": placed}, **options)
    return {fs.tree.dotted(name): fs.device_get(x) for name, x in fs.tree.leaves_with_path(placed)}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].dtype == x.dtype
        assert torch.equal(got[name], x), name


def error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["merge", *argv]) == 2
    return capsys.readouterr().err.rstrip("\n")


@pytest.mark.parametrize("piece", [1 << 26, 64], ids=["one piece", "many pieces"])
def test_merged_tensors_are_those_of_the_checkpoint(monkeypatch, capsys, piece: int):
    """Pieces that divide leaves in other places than the shards do."""
    monkeypatch.setattr(parts.stream, "__defaults__", (piece,))
    want = saved()
    del want["head"]
    assert main(["merge", "out", "merged"]) == 0
    assert_same(load_file("merged/model.safetensors"), want)
    nbytes = sum(x.nbytes for x in want.values())
    line = f"merged: {len(want)} tensors of out at params, {nbytes:,} bytes in 1 file\n"
    assert capsys.readouterr().out == line
    assert [f.name for f in Path("merged").iterdir()] == ["model.safetensors"]
    read = fs.interop.hf.tensors("merged")
    placed = fs.materialize(read, P(), fs.make_mesh(data=1), key=KEY)
    assert_same({name: fs.device_get(x) for name, x in placed.items()}, want)


def test_folder_has_the_permissions_of_a_new_one():
    saved()
    before = os.umask(0o027)
    try:
        assert main(["merge", "out", "merged"]) == 0
    finally:
        os.umask(before)
    assert Path("merged").stat().st_mode & 0o777 == 0o750
    assert Path("merged/model.safetensors").stat().st_mode & 0o777 == 0o640


def test_shards_have_an_index(capsys):
    want = saved("runs", step=7)
    del want["head"]
    assert main(["merge", "runs", "merged", "--max_shard_bytes", "400"]) == 0
    index = json.loads(Path("merged/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in want.values())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    got = {}
    for file in files:
        with safe_open(f"merged/{file}", "pt") as f:
            assert f.metadata()["format"] == "pt"
            of_file = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
        assert {n for n, where in index["weight_map"].items() if where == file} == of_file.keys()
        assert sum(x.nbytes for x in of_file.values()) <= 400 or len(of_file) == 1
        got |= of_file
    assert_same(got, want)
    assert "of runs/step_000007 at params" in capsys.readouterr().out


def test_part_of_the_state(capsys):
    want = saved()
    assert main(["merge", "out", "first", "--at", "params.blocks.0"]) == 0
    assert_same(load_file("first/model.safetensors"), {n: want[f"blocks.0.{n}"] for n in ("w", "b")})
    assert main(["merge", "out", "all", "--at", ""]) == 0
    assert load_file("all/model.safetensors").keys() == {f"params.{name}" for name in want if name != "head"} | {"key"}
    got = error(capsys, "out", "none", "--at", "opt")
    assert got == "merge: out has no tensors at 'opt'\n  fix: one of key, params"


def test_leaf_that_was_tied_to_one_outside_of_the_part_is_written():
    x = torch.arange(4.0)
    fs.checkpoint.save("out", {"a": {"w": x}, "b": {"v": x}})
    assert main(["merge", "out", "b", "--at", "b"]) == 0
    assert_same(load_file("b/model.safetensors"), {"v": x})


def test_memory_is_that_of_a_piece_and_not_of_a_leaf(monkeypatch):
    """A leaf of 8 MiB in pieces of 256 KiB."""
    monkeypatch.setattr(parts.stream, "__defaults__", (1 << 18,))
    made: list[int] = []
    empty = torch.empty
    mesh = fs.make_mesh(data=4)
    fs.checkpoint.save("out", {"w": fs.device_put(torch.randn(1024, 2048), P(None, "data"), mesh)})
    monkeypatch.setattr("torch.empty", lambda *a, **k: made.append((x := empty(*a, **k)).nbytes) or x)
    tracemalloc.start()
    assert main(["merge", "out", "merged"]) == 0
    assert tracemalloc.get_traced_memory()[1] < 4 << 20  # of Python: copies of bytes
    tracemalloc.stop()
    assert max(made) <= 1 << 20


def test_folder_of_a_model(monkeypatch, capsys):
    """GPT-2, whose layout differs from that in the files, from a sharded checkpoint."""
    monkeypatch.setattr(parts.stream, "__defaults__", (100,))
    gpt2, cfg = fs.models.gpt2, fs.models.gpt2.Config(33, 8, 16, 2, 4)
    mesh, described = fs.make_mesh(data=2, model=3), fs.models.gpt2.init(cfg)
    specs = fs.fully_shard(gpt2.specs(cfg, model="model"), described, axis="data")
    gpt2.save("base", cfg, fs.materialize(described, P(), fs.make_mesh(data=1), key=KEY))
    params = fs.materialize(described, specs, mesh, key=fs.key(1))
    fs.checkpoint.save("out", {"params": params, "step": 1})
    assert main(["merge", "out", "merged", "--like", "base"]) == 0
    gpt2.save("direct", cfg, params, like="base")
    assert_same(load_file("merged/model.safetensors"), load_file("direct/model.safetensors"))
    assert Path("merged/config.json").read_text() == Path("direct/config.json").read_text()
    assert sorted(p.name for p in Path().iterdir()) == ["base", "direct", "merged", "out"]
    assert "of out at params" in capsys.readouterr().out
    config = json.loads(Path("base/config.json").read_text())
    Path("base/config.json").write_text(json.dumps(config | {"n_positions": 9}))
    assert error(capsys, "out", "again", "--like", "base") == (
        "merge: out at params does not have the parameters of base\n  differs  wpe  [8, 16], [9, 16] in base\n"
        "  fix: --at, or another --like"
    )
    Path("base/config.json").write_text(json.dumps(config | {"n_layer": 1}))
    assert "\n  extra    h.1.down.b  [16]\n" in error(capsys, "out", "again", "--like", "base")
    Path("base/config.json").write_text(json.dumps(config | {"n_layer": 3}))
    assert "\n  missing  h.2.down.b  f32[16] = zeros\n" in error(capsys, "out", "again", "--like", "base")
    Path("base/config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    assert "'mamba' is not a model of fs.models\n  fix: leave out --like" in error(
        capsys, "out", "again", "--like", "base"
    )
    assert not Path("again").exists()


def test_damaged_checkpoint_is_an_error_and_nothing_is_written(capsys):
    saved()
    part = max(Path("out").glob("part-*"), key=lambda p: p.stat().st_size)
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    assert "the data is damaged" in error(capsys, "out", "merged")
    part.write_bytes(data[:-1])
    assert "is cut short" in error(capsys, "out", "merged")
    part.unlink()
    assert str(part) in error(capsys, "out", "merged")
    assert [p.name for p in Path().iterdir()] == ["out"]


def test_wrong_arguments(capsys):
    assert "nowhere" in error(capsys, "nowhere", "merged")
    saved()
    assert error(capsys, "out", "out") == "merge: out exists, and is not replaced\n  fix: name a new folder"
    assert "merge: --max_shard_bytes 0" in error(capsys, "out", "merged", "--max_shard_bytes", "0")
    fs.checkpoint.save("text", {"step": 1})
    assert "has no tensors" in error(capsys, "text", "merged")
    fs.checkpoint.save("wide", {"z": torch.zeros(2, dtype=torch.complex128)})
    assert error(capsys, "wide", "merged") == (
        "merge: safetensors has no such dtype\n  z  torch.complex128\n"
        "  fix: restore the checkpoint, and cast the leaves"
    )
    assert not Path("merged").exists()


@pytest.mark.filterwarnings("ignore")  # of torch about its own code, and that no process group is initialized
def test_torch_checkpoints_are_merged_as_accelerate_does(capsys):
    import torch.distributed.checkpoint as dcp

    want = {"h.0.w": torch.randn(5, 3), "h.0.b": torch.randn(3, dtype=torch.bfloat16), "step": torch.tensor(4)}
    dcp.save({"model": want}, checkpoint_id="dcp", no_dist=True)
    assert error(capsys, "dcp", "merged") == (
        "merge: dcp is a checkpoint of torch, whose .metadata is a pickle\n"
        "  a pickle can run any code when it is read\n  fix: --allow_pickle, if you trust who wrote it"
    )
    assert main(["merge", "dcp", "merged", "--allow_pickle"]) == 0
    assert_same(load_file("merged/model.safetensors"), want)
    assert "3 tensors of dcp at model" in capsys.readouterr().out
    accelerate = pytest.importorskip("accelerate.utils")
    accelerate.merge_fsdp_weights("dcp", "theirs")
    assert_same(load_file("merged/model.safetensors"), load_file("theirs/model.safetensors"))
    dcp.save({"model": want, "other": {"x": torch.ones(2)}}, checkpoint_id="two", no_dist=True)
    assert main(["merge", "two", "both", "--allow-pickle"]) == 0
    assert load_file("both/model.safetensors").keys() == {f"model.{name}" for name in want} | {"other.x"}
    assert "has no tensors at 'x'\n  fix: one of model, other" in error(
        capsys, "two", "m", "--at", "x", "--allow_pickle"
    )
    Path("two/.metadata").write_bytes(b"damaged")
    assert "merge: torch cannot read two/.metadata" in error(capsys, "two", "m", "--allow_pickle")
