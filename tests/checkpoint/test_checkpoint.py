"""Checkpoints restore bitwise on every mesh, simulated or of processes, and each part is written once."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import fshard as fs
from fshard import P, ShardingError, checkpoint
from fshard.checkpoint import parts
from fshard.checkpoint.manifest import read_manifest
from tests.lib.assertions import assert_same, error_text
from tests.lib.processes import Pool

from . import test_storage

MESHES: list[dict[str, int]] = [{"data": 1}, {"data": 4}, {"data": 2, "model": 3}, {"model": 8, "data": 1}]


def values() -> dict[str, Tensor]:
    """Leaves of every kind: dtypes, 0-d, empty, uneven, special values."""
    gen = torch.Generator().manual_seed(0)
    special = torch.tensor([math.nan, -0.0, math.inf, -math.inf, 1e-45, 1.0, 2.0])
    real = torch.randn(7, 10, generator=gen)
    ints = torch.randint(0, 100, (6, 5), generator=gen)
    out = {f"float{i}": real.to(dtype) for i, dtype in enumerate((torch.float32, torch.float64, torch.float16))}
    out |= {f"int{i}": ints.to(dtype) for i, dtype in enumerate((torch.int64, torch.int32, torch.int8, torch.uint8))}
    out |= {
        "bf16": special.bfloat16(),
        "special": special,
        "bool": ints > 50,
        "complex": torch.complex(real, -real),
        "fp8": special[3:].to(torch.float8_e5m2),
        "scale": torch.arange(120, 130, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    }
    out |= {"complex128": torch.complex(real, real).to(torch.complex128), "u16": ints.to(torch.uint16)}
    out |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "empty2": torch.empty(4, 0, dtype=torch.int64),
        "one": real[:1, :1],
    }
    return out


def spec_of(mesh: fs.Mesh, x: Tensor, choice: int) -> P:
    """Choose one of several placements of a leaf: over each axis, over both, nested, or replicated."""
    axes = [tuple(c) for n in range(3) for c in itertools.permutations(mesh.axes, n)]
    options = (
        [P()] if x.ndim == 0 else [P(a or None) for a in axes] + ([P(None, a) for a in axes] if x.ndim > 1 else [])
    )
    options += [P(*list(mesh.axes)[: x.ndim])] if x.ndim > 1 and len(mesh.axes) > 1 else []
    return options[choice % len(options)]


def place(tree: dict[str, Tensor], mesh: fs.Mesh, choice: int) -> dict[str, fs.Sharded]:
    specs = {k: spec_of(mesh, x, choice + i) for i, (k, x) in enumerate(sorted(tree.items()))}
    return fs.device_put(tree, specs, mesh)


@pytest.mark.parametrize(("saved_on", "to"), list(zip(MESHES, [*MESHES[1:], MESHES[0]], strict=True)), ids=str)
def test_restore_is_bitwise_equal_on_every_mesh(saved_on: dict[str, int], to: dict[str, int], tmp_path: Path) -> None:
    want = values()
    checkpoint.save(tmp_path / "c", place(want, fs.make_mesh(**saved_on), 3))
    for choice in range(3):
        like = place({k: torch.zeros_like(x) for k, x in want.items()}, fs.make_mesh(**to), choice)
        got = checkpoint.restore(tmp_path / "c", like)
        assert_same(got, want)
        for k, x in got.items():
            assert (x.spec, x.mesh) == (like[k].spec, like[k].mesh)
            assert [s.shape for s in x.shards] == [s.shape for s in like[k].shards]


def test_like_may_be_deferred_sharded_tensors_or_meta(tmp_path: Path) -> None:
    want = {"w": torch.randn(5, 6), "b": torch.arange(4)}
    mesh = fs.make_mesh(data=3)
    checkpoint.save(tmp_path / "c", fs.device_put(want, P("data"), fs.make_mesh(data=2)))
    deferred = {"w": fs.init.zeros((5, 6)), "b": fs.init.zeros((4,), dtype=torch.int64)}
    likes: list[tuple[Any, Any, Any]] = [
        (deferred, P("data"), mesh),
        (deferred, {"w": P(None, "data"), "b": P()}, mesh),
        (fs.device_put(want, P(), mesh), None, None),
        (fs.device_put(want, P(), mesh), P("data"), None),
        (fs.device_put(want, P("data"), mesh), None, fs.make_mesh(data=5)),
        (want, None, None),
        ({k: x.to("meta") for k, x in want.items()}, P(), mesh),
    ]
    for like, specs, on in likes:
        got = checkpoint.restore(tmp_path / "c", like, specs=specs, mesh=on)
        assert_same(got, want)
    assert isinstance(got["w"], Tensor)
    assert got["w"] is not want["w"]


def test_train_state_with_scalars_restores_on_another_mesh(tmp_path: Path) -> None:
    mesh, other = fs.make_mesh(data=2, model=2), fs.make_mesh(model=4)
    params = {"h": [{"up": fs.init.normal((8, 6))}, {"up": fs.init.normal((8, 6))}]}
    placed = fs.materialize(params, P(None, "model"), mesh, key=fs.key(0))
    values = {"step": 25, "lr": 0.1, "nan": math.nan, "inf": -math.inf, "zero": -0.0, "big": 2**70,
              "yes": True,
              "name": "é\n\"x\"\ud800", "empty": ""}  # fmt: skip
    state = {"params": placed, "opt": (placed, fs.device_put(3, P(), mesh)), "key": fs.key(7), "none": None, **values}
    assert checkpoint.save(tmp_path, state, step=25) == tmp_path / "step_000025"
    like = {
        **state,
        **{k: type(v)() for k, v in values.items()},
        "params": params,
        "key": torch.zeros(2, dtype=torch.int64),
    }
    got = checkpoint.restore(tmp_path, like, specs=P(), mesh=other, step=25)
    for k, v in values.items():
        assert repr(got[k]) == repr(v)
        assert type(got[k]) is type(v)
    assert torch.equal(got["key"], fs.key(7))
    assert got["none"] is None
    assert isinstance(got["opt"], tuple)
    assert got["opt"][1].item() == 3
    for tree in (got["params"], got["opt"][0]):
        for i in range(2):
            assert tree["h"][i]["up"].mesh == other
            assert_same(tree["h"][i]["up"], placed["h"][i]["up"])
    up = checkpoint.restore(tmp_path, params["h"][1], specs=P("model"), mesh=other, step=25, at="params.h.1")["up"]
    assert_same(up, placed["h"][1]["up"])
    assert checkpoint.restore(tmp_path, 0, step=25, at="step") == 25
    listed = checkpoint.inspect(tmp_path, step=25)
    assert listed["big"] == 2**70
    assert listed["params.h.0.up"].shape == (8, 6)
    assert repr(listed["opt.0.h.1.up"]) == "f32[8, 6]"
    assert repr(listed["params.h.1.up"]) == "f32[8, 6] = opt.0.h.1.up"


def test_each_part_is_written_once_by_its_holder_with_fewest_bytes(tmp_path: Path) -> None:
    mesh = fs.make_mesh(data=2, model=2)
    tree = {f"w{i}": torch.randn(8, 8) for i in range(8)} | {"u": torch.randn(3, 5)}
    specs = {k: P() if k < "w4" else P("model") for k in tree} | {"u": P(("data", "model"))}
    at = checkpoint.save(tmp_path / "c", fs.device_put(tree, specs, mesh))
    written = {p.name: 0 for p in at.glob("part-*")}
    for name in written:
        with safe_open(at / name, "pt") as f:
            for key in f.keys():  # noqa: SIM118
                written[name] += f.get_tensor(key).numel()
                leaf, box = key.removesuffix("]").split("[")  # w0[0:8, 4:8]
                slices = tuple(slice(*map(int, s.split(":"))) for s in box.split(", "))
                assert torch.equal(f.get_tensor(key), tree[leaf][slices])
    assert sum(written.values()) == sum(x.numel() for x in tree.values())
    assert sorted(written) == [f"part-0000{r}.safetensors" for r in range(4)]
    assert max(written.values()) - min(written.values()) <= 32  # half a leaf


def test_part_files_are_safetensors(tmp_path: Path) -> None:
    at = checkpoint.save(tmp_path / "c", values())
    with safe_open(at / "part-00000.safetensors", "pt") as f:
        assert torch.equal(f.get_tensor("bool[0:6, 0:5]"), values()["bool"])
        assert torch.equal(torch.view_as_complex(f.get_tensor("complex[0:7, 0:10]")), values()["complex"])
        assert f.get_tensor("empty[0:0, 0:4]").shape == (0, 4)
        assert f.get_tensor("scalar[]").item() == 2.5
    for leaf in read_manifest(at).leaves.values():  # aligned, so that a memory map of the file works
        assert isinstance(leaf, checkpoint.Saved)
        assert all(c.start % leaf.dtype.itemsize == 0 or leaf.dtype.itemsize > 8 for c in leaf.chunks)


def test_manifest_is_strict_json(tmp_path: Path) -> None:
    at = checkpoint.save(tmp_path / "c", {"a": math.nan, "b": -math.inf, "w": torch.tensor(math.nan)})
    body = json.loads((at / "manifest.json").read_bytes(), parse_constant=pytest.fail)
    assert body["format"] == "fshard.checkpoint"
    assert body["leaves"]["b"] == {"type": "float", "value": "-inf"}


def test_views_conjugates_and_parameters_are_saved_by_value(tmp_path: Path) -> None:
    x = torch.randn(4, 6, dtype=torch.complex64)
    want = {
        "conj": x.conj(),
        "neg": x.conj().imag,
        "t": x.real.T,
        "step": x.real[::2, 1::3],
        "n": x.real[:1].expand(3, 6),
    }
    want["grad"] = torch.nn.Parameter(torch.randn(3))
    checkpoint.save(tmp_path / "c", want)
    got = checkpoint.restore(tmp_path / "c", want)
    assert_same(got, {k: v.detach().clone() for k, v in want.items()})
    assert not any(v.requires_grad for v in got.values())


# --- ties ---------------------------------------------------------------------------------------------------


def test_tied_leaf_is_stored_once_and_restored_as_one_leaf(tmp_path: Path) -> None:
    mesh = fs.make_mesh(data=2)
    w, t = fs.device_put(torch.randn(6, 4), P("data"), mesh), torch.arange(3)
    at = checkpoint.save(tmp_path / "c", {"head": w, "wte": w, "t": t, "u": t})
    assert sum(len(safe_open(p, "pt").keys()) for p in at.glob("part-*")) == 3
    assert repr(checkpoint.inspect(at)["wte"]) == "f32[6, 4] = head"
    separate = {"head": w, "wte": fs.device_put(torch.zeros(6, 4), P("data"), mesh), "t": t, "u": t.clone()}
    got = checkpoint.restore(at, separate)
    assert got["head"] is got["wte"]
    assert got["t"] is got["u"]
    want = {"head": w, "wte": w, "t": t, "u": t}
    assert_same(got, want)
    got = checkpoint.restore(at, separate, specs={"head": P(), "wte": P(None, "data"), "t": P(), "u": P()})
    assert got["head"] is not got["wte"]
    assert_same(got, want)
    assert_same(checkpoint.restore(at, w, at="wte"), w)


def test_leaf_repeated_in_like_does_not_tie_leaves_saved_separately(tmp_path: Path) -> None:
    a, b = torch.randn(4), torch.randn(4)
    checkpoint.save(tmp_path / "c", {"a": a, "b": b})
    like = fs.init.zeros((4,))
    assert_same(
        checkpoint.restore(tmp_path / "c", {"a": like, "b": like}, specs=P(), mesh=fs.make_mesh(data=2)),
        {"a": a, "b": b},
    )


# --- refusals -----------------------------------------------------------------------------------------------


def test_restore_error_lists_all_differences_from_like(tmp_path: Path) -> None:
    mesh = fs.make_mesh(data=2)
    state = {
        "params": {"up": torch.zeros(4, 6), "down": torch.zeros(6, 4), "old": torch.zeros(3)},
        "step": 3,
        "lr": 1.0,
    }
    at = checkpoint.save(tmp_path / "c", state)
    down = fs.init.zeros((6, 4), dtype=torch.bfloat16)
    like = {"params": {"up": fs.init.zeros((4, 8)), "down": down, "new": fs.init.zeros((2,))},
            "step": True, "lr": torch.zeros(())}  # fmt: skip
    assert (
        error_text(checkpoint.restore, at, like, specs=P(), mesh=mesh)
        == f"""\
restore: {at} does not hold the leaves of `like`
  differs  lr  saved as float, like says f32[]
  differs  params.down  saved as f32[6, 4], like says bf16[6, 4]
  missing  params.new  f32[2]
  differs  params.up  saved as f32[4, 6], like says f32[4, 8]
  differs  step  saved as int, like says bool
  extra    params.old  f32[3]
  fix: give `like` the leaves that fs.checkpoint.inspect shows; at='params' restores one subtree"""
    )


def test_restore_refuses_unsupported_like_before_reading(tmp_path: Path) -> None:
    mesh = fs.make_mesh(data=2)
    like = {"a": fs.init.zeros((4,)), "b": torch.zeros(3), "c": None, "d": object()}
    text = error_text(checkpoint.restore, tmp_path, like)
    assert text.startswith("2 problems\nrestore: like['a']: has no spec or no mesh\n  leaf  f32[4]\n  fix: give specs=")
    assert "like['d']: cannot restore a object" in text
    text = error_text(checkpoint.restore, tmp_path, {"a": like["a"], "b": like["b"]}, specs=P("model"), mesh=mesh)
    assert "restore: like['a']: the mesh has no axis 'model'" in text
    assert "restore: like['b']: a Tensor in `like` cannot be split over a mesh\n  spec  P('model')" in text
    assert "another leaf has the name 'x.y'" in error_text(checkpoint.restore, tmp_path, {"x.y": 1, "x": {"y": 2}})


def test_save_refuses_unsupported_leaves_and_arguments(tmp_path: Path) -> None:
    mesh = fs.make_mesh(data=2)
    x = fs.device_put(torch.zeros(4), P("data"), mesh)
    fs.shard_map(lambda x: x + 1, mesh=mesh, out_specs=P("data"), donate=0)(x)
    tree = {
        "d": fs.init.zeros((4,)),
        "o": object(),
        "x": {"y": 1},
        "x.y": 2,
        "q": torch.zeros(2).to(torch.float8_e4m3fnuz),
    }
    text = error_text(checkpoint.save, tmp_path / "c", tree)
    for part in ["4 problems", "tree['d']: is only described, and has no values\n  fix: fs.materialize it",
                  "tree['o']: cannot write a object",
                  "tree['x.y']: another leaf has the name 'x.y'",
                  "tree['q']: cannot write torch.float8_e4m3fnuz"]:  # fmt: skip
        assert part in text
    abstract = fs.materialize(fs.init.ones(2), P(), fs.make_mesh(kind="abstract", data=2), key=fs.key(0))
    assert error_text(checkpoint.save, tmp_path / "c", {"a": abstract}) == (
        "save: tree['a']: is on an abstract mesh, where leaves have no values\n  fix: use another mesh"
    )
    assert "was donated to" in error_text(checkpoint.save, tmp_path / "c", {"x": x})
    for bad in ({"step": -1}, {"step": 2.0}, {"keep": 2}, {"keep": 0, "step": 1}):
        assert text != error_text(lambda bad=bad: checkpoint.save(tmp_path / "c", {"x": 1}, **bad))
    inside = fs.shard_map(lambda x: checkpoint.save(tmp_path / "c", x) and x, mesh=mesh, out_specs=P("data"))
    assert "save: called inside shard_map" in error_text(inside, torch.zeros(4))
    assert list(tmp_path.iterdir()) == []


# --- processes ----------------------------------------------------------------------------------------------


def _state(mesh: fs.Mesh, specs: Any) -> dict[str, Any]:
    like = {
        "up": fs.init.normal((6, 10)),
        "down": fs.init.normal((10, 5)),
        "b": fs.init.normal((3,)),
        "e": fs.init.zeros((0, 2)),
    }
    return {"params": fs.materialize(like, specs, mesh, key=fs.key(0)), "key": fs.key(5), "n": 4}


SPECS: list[Any] = [
    {"up": P(None, "data"), "down": P("data"), "b": P("data"), "e": P()},
    P(),
    {"up": P(None, "data", lengths=(3, 7)), "down": P("data", lengths=(0, 10)), "b": P("data", lengths=(3, 0)),
     "e": P()},
]  # fmt: skip


def _rank(directory: str) -> dict[str, Any]:
    """On each process: save, restore a checkpoint of a simulated mesh, and fail in several ways."""
    import torch.distributed as dist

    test_storage.register()
    rank, out = dist.get_rank(), Path(directory)
    mesh = fs.make_mesh(data=2)
    state = _state(mesh, SPECS[0])
    checkpoint.save(out / "process", state)
    results: dict[str, Any] = {"same": []}

    checked: list[int] = []
    crc32 = parts.crc32
    parts.crc32 = lambda data, *a: checked.append(len(data)) or crc32(data, *a)  # type: ignore[assignment]
    try:
        for specs in SPECS:
            got = checkpoint.restore(out / "simulated", _state(mesh, specs))
            want = _state(mesh, specs)
            pairs = (got["params"], want["params"]), (fs.reshard(got["params"], SPECS[0]), state["params"])
            results["same"] += [torch.equal(a.shards[0], b.shards[0]) for both in pairs for a, b in zip(
                *map(fs.tree.leaves, both), strict=True)]  # fmt: skip
            results["same"] += [torch.equal(got["key"], want["key"]), got["n"] == 4]
        parts.BLOCK_BYTES = 40  # type: ignore[misc]
        checked.clear()
        checkpoint.restore(out / "big", {"w": fs.init.zeros((64, 10))}, specs=P("data"), mesh=mesh)
        results["bytes"] = sum(n for n in checked if n == 40)
    finally:
        parts.BLOCK_BYTES, parts.crc32 = 1 << 20, crc32  # type: ignore[misc]

    def attempt(f: Callable[[], object]) -> str:
        try:
            f()
        except ShardingError as e:
            return str(e)
        return "nothing was raised"

    fsync = os.fsync

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    os.fsync = full if rank == 1 else fsync
    results["full"] = attempt(lambda: checkpoint.save(out / "full", state))
    checkpoint.save(out / "lost", state, background=True)
    results["lost"] = attempt(checkpoint.wait)
    os.fsync = fsync
    checkpoint.save(out / "background", state, background=True)
    sums = fs.shard_map(lambda x: fs.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    for _ in range(30):  # transfers of the program and of the thread do not meet
        results["sums"] = fs.device_get(sums(fs.device_put(torch.arange(4.0), P("data"), mesh))).tolist()
    checkpoint.save(out / "again", state, background=True)
    checkpoint.save(f"plain://{out}/url", state, background=True)
    results["url"] = torch.equal(checkpoint.restore(f"plain://{out}/url", state)["params"]["up"].shards[0],
                                 state["params"]["up"].shards[0])  # fmt: skip
    fs.hf.save(f"plain://{out}/folder", {}, state["params"])
    checkpoint.wait()
    results["differ"] = attempt(lambda: checkpoint.save(out / "differ", {**state, "n": 4 + rank}))
    results["bases"] = attempt(lambda: checkpoint.save(out / "bases", state, base={"w": f"of {rank}"}))
    results["object"] = attempt(lambda: checkpoint.save(out / "object", {**state, "n": object() if rank else 4}))
    results["exists"] = attempt(lambda: checkpoint.save(out / "process", state))
    results["missing"] = attempt(lambda: checkpoint.restore(out / "simulated", {**state, "more": 1}))
    results["cut"] = attempt(lambda: checkpoint.restore(out / "cut", state))
    results["plain"] = attempt(lambda: checkpoint.save(out / "plain", {"x": torch.arange(3)}))  # rank 0 writes
    results["digest"] = [checkpoint.digest(_state(mesh, specs)) for specs in SPECS]
    results["base"] = attempt(lambda: checkpoint.restore(out / "part", {"x": 1}, base=results["digest"][0]))
    return results


@pytest.mark.process
def test_process_and_simulated_meshes_write_and_read_the_same_files(
    ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = fs.make_mesh(data=2)
    want = _state(mesh, SPECS[0])
    simulated = checkpoint.save(tmp_path / "simulated", want)
    cut = checkpoint.save(tmp_path / "cut", want)
    (cut / "part-00001.safetensors").write_bytes(b"")
    with monkeypatch.context() as m:
        m.setattr(parts, "BLOCK_BYTES", 40)
        checkpoint.save(tmp_path / "big", {"w": torch.randn(64, 10)})
    base = checkpoint.digest(want)
    checkpoint.save(tmp_path / "part", {"x": 1}, base={**base, "params.up": "another"})
    results = ranks(2, _rank, str(tmp_path))

    process = tmp_path / "process"
    want_files = {f.name: f.read_bytes() for f in simulated.iterdir()}
    for name in ("process", "background", "again"):
        assert {f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} == want_files, name
    for specs in (P(), P("model"), P(("model", "data"))):
        like = _state(fs.make_mesh(data=2, model=3), specs)
        assert_same(checkpoint.restore(process, like)["params"], want["params"])

    for result in results:
        assert all(result["same"])
        assert result["bytes"] == 64 * 10 * 4 / 2  # half of the blocks
        assert result["full"].startswith("rank 1: save: cannot write ")
        assert result["lost"].startswith(f"save: the save of {tmp_path / 'lost'} in the background has failed\n"
                                         "  rank 1: save: cannot write ")  # fmt: skip
        assert result["sums"] == [2, 4]
        assert result["url"]
        assert result["differ"].startswith(
            "save: the ranks do not have the same leaves\n  n    rank 0  4    rank 1  5\n  fix: "
        )
        assert "\n  base of w    rank 0  of 0    rank 1  of 1\n" in result["bases"]
        assert result["object"].startswith("rank 1: save: tree['n']: cannot write a object")
        assert "process exists" in result["exists"]
        assert result["missing"].startswith(
            f"restore: {simulated} does not hold the leaves of `like`\n  missing  more  int"
        )
        assert "part-00001.safetensors: is cut short" in result["cut"]
        assert result["plain"] == "nothing was raised"
        assert result["digest"] == [base] * len(SPECS)
        assert "  differs  params.up  saved with another, base has f32[6, 10] " in result["base"]
    loaded = fs.hf.weights(tmp_path / "folder", {n: fs.init.zeros(x.shape) for n, x in want["params"].items()})
    assert_same(fs.materialize(loaded, P(), mesh, key=fs.key(0)), want["params"])
    complete = {"url", "folder", "simulated", "cut", "big", "process", "plain", "part", "background", "again"}
    assert {d.name for d in tmp_path.iterdir()} == complete
    assert checkpoint.restore(tmp_path / "plain", {"x": torch.zeros(3, dtype=torch.int64)})["x"].tolist() == [0, 1, 2]
