"""Dense files of `torch.save` and safetensors: written by slices from every mesh, read by slices onto every mesh."""

from __future__ import annotations

import json
import os
import random
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

import fshard as fs
from fshard import P
from fshard._core.files import torch_file
from fshard._core.files.torch_file import Archive, read_torch_file
from fshard.interop.hf import weights
from fshard.interop.hf.weights import FileTensor
from tests.faults.hostile import DOUBLED, archive, doubled, get, put, tensor, text
from tests.lib.assertions import assert_same, error_text
from tests.lib.operations import Operations

KEY = fs.key(0)
MESHES = [{"data": 1}, {"data": 3}, {"data": 2, "model": 2}, {"model": 4}]
SUFFIXES = (".pt", ".safetensors")


def values() -> dict[str, Any]:
    """Leaves of several dtypes, without dims, without elements, uneven, strided, and one at two paths."""
    draw = torch.Generator().manual_seed(0)
    w = torch.randn(5, 7, generator=draw)
    return {
        "w": w,
        "layers": [{"up": torch.randn(6, 4, generator=draw).T, "b": torch.randn(9, generator=draw).bfloat16()}],
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3, dtype=torch.int32),
        "few": torch.randn(2, 3, generator=draw).half(),  # fewer rows than ranks
        "bytes": torch.arange(11, dtype=torch.uint8),
        "quantized": torch.randn(9, generator=draw).to(torch.float8_e4m3fn),
        "short": torch.arange(3).to(torch.uint16),
        "complex": torch.randn(3, dtype=torch.complex64, generator=draw).conj(),
        "mask": torch.tensor([True, False, True]),
        "head": {"w": w},
    }


def specs(axes: dict[str, int]) -> Any:
    one = P(next(iter(axes)))
    both = P(*axes) if len(axes) > 1 else one
    return {"w": both, "layers": one, "scalar": P(), "empty": one, "few": one, "bytes": P(tuple(axes)),
            "quantized": one, "short": one, "complex": P(), "mask": one, "head": {"w": both}}  # fmt: skip


def placed(axes: dict[str, int]) -> Any:
    ours = values()
    out = fs.device_put(ours, specs(axes), fs.make_mesh(**axes))
    return out | {"head": {"w": out["w"]}}


def described(tree: Any) -> Any:
    seen: dict[int, fs.Deferred] = {}
    return fs.tree.map(lambda x: seen.setdefault(id(x), fs.init.full(x.shape, 1, dtype=x.dtype)), tree)


def named(tree: Any) -> dict[str, Tensor]:
    return {fs.tree.dotted(path): x.resolve_conj() for path, x in fs.tree.leaves_with_path(tree)}


# --- every mesh ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_mesh_writes_the_same_file_and_reads_it_back(tmp_path: Path, suffix: str) -> None:
    fs.state_dict.write(tmp_path / f"plain{suffix}", values())
    want = (tmp_path / f"plain{suffix}").read_bytes()
    for i, axes in enumerate(MESHES):
        fs.state_dict.write(tmp_path / f"{i}{suffix}", placed(axes))
        assert (tmp_path / f"{i}{suffix}").read_bytes() == want
        back = fs.state_dict.read(tmp_path / f"{i}{suffix}", described(values()))
        for to in MESHES:
            got = fs.materialize(back, specs(to), fs.make_mesh(**to), key=KEY)
            assert got["head"]["w"] is got["w"]
            assert_same(got, values())
    assert sorted(f.name for f in tmp_path.iterdir()) == sorted([f"plain{suffix}", *(f"{i}{suffix}" for i in range(4))])


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_the_file_as_a_state_dict(tmp_path: Path, mmap: bool) -> None:
    fs.state_dict.write(tmp_path / "a.pt", placed(MESHES[2]))
    got = torch.load(tmp_path / "a.pt", weights_only=True, mmap=mmap)
    assert list(got) == [*(n for n in named(values()) if n != "w"), "w"]
    assert_same(got, {n: named(values())[n] for n in got})
    assert got["w"].data_ptr() == got["head.w"].data_ptr()  # stored once
    assert all(x.data_ptr() % 64 == 0 for x in got.values() if mmap and x.numel())
    torch.save(got, tmp_path / "again.pt")  # no place of its own is lost to the format
    assert os.path.getsize(tmp_path / "a.pt") < os.path.getsize(tmp_path / "again.pt") + 200


def test_other_readers_of_zip_archives_find_the_checksums_right(tmp_path: Path) -> None:
    fs.state_dict.write(tmp_path / "a.pth", placed(MESHES[1]))
    with zipfile.ZipFile(tmp_path / "a.pth") as archive:
        assert archive.testzip() is None
        assert archive.read("archive/data/0") == values()["bytes"].numpy().tobytes()
    raw = bytearray((tmp_path / "a.pth").read_bytes())
    raw[raw.find(values()["bytes"].numpy().tobytes())] ^= 1
    (tmp_path / "a.pth").write_bytes(raw)
    with zipfile.ZipFile(tmp_path / "a.pth") as archive:
        assert archive.testzip() == "archive/data/0"


def test_package_safetensors_loads_the_file_and_ties_as_save_model_writes_them(tmp_path: Path) -> None:
    fs.state_dict.write(tmp_path / "a.safetensors", placed(MESHES[2]), metadata={"by": "me"})
    assert_same(load_file(tmp_path / "a.safetensors"), {n: x for n, x in named(values()).items() if n != "w"})
    module = nn.Module()
    module.a, module.b = nn.Linear(3, 2), nn.Linear(3, 2)
    module.b.weight = module.a.weight
    save_model(module, str(tmp_path / "theirs.safetensors"))
    tied = fs.init.zeros((2, 3))
    tree = {"a": {"weight": tied, "bias": fs.init.zeros(2)}, "b": {"weight": tied, "bias": fs.init.zeros(2)}}
    for names in ({"w", "pt"}, {"w"}):  # texts of the metadata that are names of tensors: of no leaf, and no error
        fs.state_dict.write(tmp_path / "b.safetensors", {n: torch.ones(2) for n in names}, metadata={"best": "w"})
        for theirs in (None, lambda path: FileTensor(path[0])):
            fs.state_dict.read(tmp_path / "b.safetensors", {n: fs.init.zeros(2) for n in names}, theirs=theirs)
    got = fs.materialize(fs.state_dict.read(tmp_path / "theirs.safetensors", tree), P(), fs.make_mesh(data=2), key=KEY)
    assert_same(
        {n: fs.device_get(x) for n, x in named_leaves(got)}, {n: x.detach() for n, x in module.state_dict().items()}
    )
    assert got["a"]["weight"] is got["b"]["weight"]
    tree["b"]["weight"] = fs.init.zeros((2, 3))  # no tie here: both names are found
    apart = fs.materialize(
        fs.state_dict.read(tmp_path / "theirs.safetensors", tree), P(), fs.make_mesh(data=2), key=KEY
    )
    assert_same(apart, fs.device_get(got))
    assert apart["a"]["weight"] is not apart["b"]["weight"]


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    return [(fs.tree.dotted(path), x) for path, x in fs.tree.leaves_with_path(tree)]


def test_optimizer_states_and_leaves_in_host_memory_are_written(tmp_path: Path) -> None:
    mesh = fs.make_mesh(data=2, model=2)
    init = {"w": fs.init.normal((5, 6), dtype=torch.bfloat16), "b": fs.init.zeros(3)}
    opt = fs.optim.adamw(0.1)
    state = {"params": init, "opt": opt.init(init)}
    where = {"params": fs.on_host({"w": P("data", "model"), "b": P()}), "opt": opt.specs(P("model"))}
    here = fs.materialize(state, where, mesh, key=KEY)
    fs.state_dict.write(tmp_path / "train.pt", here)
    got = torch.load(tmp_path / "train.pt", weights_only=True)
    assert_same(got, {n: fs.device_get(x) for n, x in named_leaves(here)})
    again = fs.materialize(fs.state_dict.read(tmp_path / "train.pt", state), P(), fs.make_mesh(data=1), key=KEY)
    assert_same(again, fs.device_get(here))


# --- memory and bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_no_rank_holds_a_whole_leaf(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the parts there is one buffer: columns of a matrix of 256 KiB are written and read in chunks of 16 KiB."""
    monkeypatch.setattr(weights, "CHUNK_BYTES", 1 << 14)
    monkeypatch.setattr("fshard.interop.hf.export.CHUNK_BYTES", 1 << 14)
    mesh = fs.make_mesh(model=4)
    x = torch.arange(1 << 16, dtype=torch.float32).view(256, 256)
    tree = fs.device_put({"a": x, "b": x.T.contiguous()}, P(None, "model"), mesh)
    with Operations(torch.device("cpu")) as writing:
        fs.state_dict.write(tmp_path / f"x{suffix}", tree)
    with Operations(torch.device("cpu")) as reading:
        back = fs.materialize(fs.state_dict.read(tmp_path / f"x{suffix}", described(tree)), P("model"), mesh, key=KEY)
    assert_same(back, {"a": x, "b": x.T.contiguous()})
    assert writing.largest <= 1 << 14
    assert reading.largest == 1 << 16  # a part


def test_each_part_is_written_once_and_only_the_parts_that_are_needed_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = {"pwrite": 0, "preadv": 0}
    for name, nbytes in (("pwrite", len), ("preadv", lambda buffers: sum(map(len, buffers)))):
        function = getattr(os, name)

        def counting(fd: int, data: Any, at: int, name: str = name, nbytes: Any = nbytes, f: Any = function) -> int:
            moved[name] += nbytes(data)
            return int(f(fd, data, at))

        monkeypatch.setattr(os, name, counting)
    tree = placed({"data": 2, "model": 2})
    fs.state_dict.write(tmp_path / "a.pt", tree)
    total = sum(x.nbytes for n, x in named(values()).items() if n != "w")
    assert moved["pwrite"] == total
    mesh = fs.make_mesh(model=4)
    monkeypatch.setattr(mesh, "ranks", (1,))  # as a process that is rank 1
    of_rank = fs.materialize(
        fs.state_dict.read(tmp_path / "a.pt", described(values())), specs({"model": 4}), mesh, key=KEY
    )
    read = {n: x.shards[0].nbytes for n, x in named_leaves(of_rank) if n != "w"}
    assert moved["preadv"] == sum(read.values()) < total / 2


# --- files of others ----------------------------------------------------------------------------------------


class Net(nn.Module):
    """A module with a tie, buffers, one of them not persistent, and a weight that is not row-major."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(3), persistent=False)
        self.norm.register_buffer("steps", self.steps, persistent=False)  # of a module at two paths: a rotary embedding

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return self.head(self.embed(ids).mean(1) + self.norm(self.conv(x)).mean((2, 3)))


def trained(seed: int) -> Net:
    torch.manual_seed(seed)
    net = Net()
    net(torch.tensor([[1, 2], [3, 4]]), torch.randn(2, 3, 4, 4))  # moves the statistics
    return net


def test_any_module_both_ways(tmp_path: Path) -> None:
    net, mesh = trained(1), fs.make_mesh(data=2, model=2)
    torch.save(net.state_dict(), tmp_path / "theirs.pt")
    apply, module = fs.defer(Net)
    split = {"params": P("model"), "buffers": P()}
    here = fs.materialize(fs.state_dict.read(tmp_path / "theirs.pt", module, of=apply), split, mesh, key=KEY)
    assert here["buffers"]["steps"].shape == (3,)  # keeps its initializer
    for suffix in SUFFIXES:
        fs.state_dict.write(tmp_path / f"ours{suffix}", here, of=apply)
    again = trained(2)
    again.load_state_dict(torch.load(tmp_path / "ours.pt", weights_only=True))  # strict
    assert_same(dict(again.state_dict()), dict(net.state_dict()))
    from_safetensors = fs.state_dict.read(tmp_path / "ours.safetensors", module, of=apply)
    assert_same(fs.materialize(from_safetensors, P(), mesh, key=KEY), fs.device_get(here))
    lacking = {"params": here["params"], "buffers": {}}
    assert "write: buffers['norm.running_mean'] is missing" in error_text(
        fs.state_dict.write, tmp_path / "ours.pt", lacking, of=apply
    )
    assert "write: tree['extra'] is not a leaf of" in error_text(
        fs.state_dict.write, tmp_path / "ours.pt", {"extra": torch.ones(1), **here["params"]}, of=apply
    )


def test_index_of_several_files_of_torch(tmp_path: Path) -> None:
    w, b = torch.arange(24.0).view(6, 4), torch.arange(6.0)
    torch.save({"w": w, "tied": w}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": b}, tmp_path / "pytorch_model-00002-of-00002.bin")
    files = {"w": 1, "tied": 1, "b": 2}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {k: f"pytorch_model-0000{n}-of-00002.bin" for k, n in files.items()}}))
    described = {"w": fs.init.zeros((6, 4)), "tied": fs.init.zeros((6, 4)), "b": fs.init.zeros((6,))}
    read = fs.state_dict.read(index, described)
    assert_same(fs.materialize(read, P("data"), fs.make_mesh(data=2), key=fs.key(0)), {"w": w, "tied": w, "b": b})
    assert "or an index, and runs nothing" in error_text(fs.hf.weights, tmp_path, described)
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    assert "pytorch_model-00002-of-00002.bin: there is no such file" in error_text(fs.state_dict.read, index, described)


def test_tensors_in_dicts_and_lists_have_dotted_names(tmp_path: Path) -> None:
    w = nn.Parameter(torch.arange(12.0).view(3, 4))
    opt = torch.optim.Adam([w])
    w.sum().backward()
    opt.step()
    state = {"model": OrderedDict(w=w), "optimizer": opt.state_dict(), "step": 3, "name": "x", "rate": [0.1, None]}
    torch.save(state, tmp_path / "train.ckpt")
    want = {"model.w", "optimizer.state.0.exp_avg", "optimizer.state.0.exp_avg_sq", "optimizer.state.0.step"}
    assert {e.name for e in read_torch_file(tmp_path / "train.ckpt").entries} == want
    read = fs.state_dict.read(
        tmp_path / "train.ckpt", {"w": fs.init.zeros((3, 4))}, prefix="model", ignored=["optimizer.*"]
    )
    assert_same(fs.materialize(read, P("data"), fs.make_mesh(data=2), key=KEY), {"w": w.detach()})
    moments = fs.state_dict.read(
        tmp_path / "train.ckpt",
        {"state": [{"exp_avg": fs.init.ones((3, 4)), "exp_avg_sq": fs.init.ones((3, 4)), "step": fs.init.ones(())}]},
        prefix="optimizer.", ignored=["model.w"],
    )  # fmt: skip
    got = fs.device_get(fs.materialize(moments, P(), fs.make_mesh(data=2), key=KEY))["state"][0]
    assert_same(got, {n: opt.state[w][n] for n in got})


def strided(draw: random.Random) -> Tensor:
    """Return a tensor with random strides: permuted, sliced with a step, expanded, or a part of a storage."""
    x = torch.arange(2000.0)[draw.randrange(9) :]
    sizes = [draw.choice([1, 2, 3, 4, 6]) for _ in range(draw.randrange(1, 5))]
    x = x[: int(torch.Size(sizes).numel())].view(sizes)
    for _ in range(draw.randrange(3)):
        dim = draw.randrange(x.ndim)
        if draw.random() < 0.5:
            x = x.narrow(dim, start := draw.randrange(x.shape[dim]), draw.randrange(1, x.shape[dim] - start + 1))
        else:
            x = x[(slice(None),) * dim + (slice(draw.randrange(2), None, 2),)]
    x = x.permute(draw.sample(range(x.ndim), x.ndim))
    return x[None].expand(3, *x.shape) if draw.random() < 0.2 else x


def test_tensors_of_any_strides_are_read_by_slices(tmp_path: Path) -> None:
    draw = random.Random(0)
    theirs = {str(i): strided(draw) for i in range(60)}
    theirs["windows"] = torch.arange(40.0).as_strided((3, 2, 3), (3, 2, 1))  # elements in several places
    theirs["expanded"] = torch.arange(6.0)[:, None].expand(6, 5)
    torch.save(theirs, tmp_path / "a.pt")
    tree = described(theirs)
    mesh = fs.make_mesh(data=2, model=3)
    choices = [P(), P("data"), P(None, "model"), P("model", "data"), P(("data", "model")), P(None, ("data", "model"))]
    of = {n: draw.choice([s for s in choices if len(s.entries) <= x.ndim]) for n, x in theirs.items()}
    assert_same(fs.materialize(fs.state_dict.read(tmp_path / "a.pt", tree), of, mesh, key=KEY), theirs)


@pytest.mark.parametrize("memory", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
def test_leaves_of_other_dims_than_those_of_a_strided_tensor(tmp_path: Path, memory: tuple[int, ...]) -> None:
    x = torch.arange(6.0 * 4 * 5).view([(6, 4, 5)[d] for d in memory]).permute([memory.index(d) for d in range(3)])
    assert x.shape == (6, 4, 5)
    torch.save({"x": x}, tmp_path / "a.pt")
    forms = {
        "(h k) a b -> a h k b": x.view(2, 3, 4, 5).permute(2, 0, 1, 3),
        "h (two=2 a) b -> h a two b": x.view(6, 2, 2, 5).permute(0, 2, 1, 3),
        "h a b -> b (h a)": x.reshape(24, 5).T,
    }
    for dims, want in forms.items():
        if "(h k)" in dims:
            dims = dims.replace("(h k)", "(h=2 k)")
        if "(h a)" in dims:
            dims = "(h=6) (a=4) b -> b (h a)"
        tree = {"x": fs.init.zeros(want.shape)}
        read = fs.state_dict.read(tmp_path / "a.pt", tree, theirs=lambda path, dims=dims: FileTensor("x", dims))
        for spec in (P(), P("data"), P(None, "data"), P("data", "model")):
            assert_same(fs.materialize(read, spec, fs.make_mesh(data=2, model=2), key=KEY), {"x": want})
        halves = {n: fs.init.zeros((3, 4, 5)) for n in "ab"}
        of_half = {n: FileTensor("x", "(two=2 h) a b -> h a b", {"two": i}) for i, n in enumerate("ab")}
        read = fs.state_dict.read(tmp_path / "a.pt", halves, theirs=lambda path, of=of_half: of[path[0]])
        got = fs.materialize(read, P(None, "data"), fs.make_mesh(data=2), key=KEY)
        assert_same(got, {"a": x[:3], "b": x[3:]})
        if memory == (0, 1, 2):  # and written by the same function
            fs.state_dict.write(tmp_path / "b.pt", {"x": want}, theirs=lambda path, dims=dims: FileTensor("x", dims))
            assert_same(torch.load(tmp_path / "b.pt", weights_only=True), {"x": x})


def test_a_file_of_more_than_4_gib(tmp_path: Path) -> None:
    """Only the places are written: the disk has no blocks for the rest."""
    small = torch.arange(5, dtype=torch.float32)
    archive = Archive.make({"large": (torch.uint8, (5 << 30,)), "small": (small.dtype, small.shape)}, {})
    path = tmp_path / "large.pt"
    with open(path, "xb") as f:
        f.truncate(archive.nbytes)
        for start, piece in archive.pieces([0, 0]):
            f.seek(start)
            f.write(piece)
        f.seek(archive.storages[1][0])
        f.write(small.numpy().tobytes())
    assert os.path.getsize(path) == archive.nbytes > 5 << 30
    got = torch.load(path, weights_only=True, mmap=True)
    assert got["large"].shape == (5 << 30,)
    assert got["small"].equal(small)
    tree = {"large": fs.init.zeros(5 << 30, dtype=torch.uint8), "small": fs.init.zeros(5)}
    read = fs.state_dict.read(path, tree)
    assert_same(fs.materialize(read["small"], P("data"), fs.make_mesh(data=2), key=KEY), small)


# --- what is wrong ------------------------------------------------------------------------------------------


class Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("it-ran",)


def test_a_pickle_with_other_objects_is_refused_and_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in (Runs(), print, Path("x"), nn.Linear(2, 2)):
        torch.save({"w": torch.ones(2), "x": value}, "a.pt")
        text = error_text(fs.state_dict.read, "a.pt", {"w": fs.init.zeros(2)})
        assert text.startswith("a.pt: has an object of the kind ")
        assert "fix: on a machine that may run that" in text
    assert not Path("it-ran").exists()


def damaged(path: Path) -> Iterator[tuple[str, str]]:
    """Write files that are damaged, in turn, and yield what their error has."""
    good = {"w": torch.arange(600.0).view(20, 30)}
    torch.save(good, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:1500])
    yield "cut short", "is no file of torch.save, or is damaged or cut short"
    path.write_bytes(b"")
    yield "empty", "is no file of torch.save"
    torch.save(good, path, _use_new_zipfile_serialization=False)
    yield "legacy", "if a torch before 1.6 wrote it, or one without checksums"
    with zipfile.ZipFile(path, "w") as other:
        other.writestr("a/b.txt", "text")
    yield "another archive", "is an archive, and none of torch.save"
    for pickled in (b"", b"K", b"]q\x00K\x01Qe"):
        path.write_bytes(archive(pickled))
        yield "pickle", "is damaged\n  data.pkl: "
    torch.save(good, path)
    with zipfile.ZipFile(path) as whole:
        records = {info.filename: whole.read(info) for info in whole.infolist()}
    for name in list(records):
        changed = dict(records)
        if name.endswith("data/0"):
            changed[name] = records[name][:100]
            want = "'w' is cut short\n  it ends at byte 2400 of its storage, and the file has 100"
        elif name.endswith("byteorder"):
            changed[name] = b"big"
            want = "was written on a machine of another byte order"
        else:
            continue
        with zipfile.ZipFile(path, "w") as other:
            for record, content in changed.items():
                other.writestr(record, content)
        yield name, want
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as other:
        for record, content in records.items():
            other.writestr(record, content)
    yield "compressed", "is a compressed archive"
    torch.save({"w": good["w"], "x": {"y.z": good["w"]}, "x.y": {"z": good["w"]}}, path)
    yield "names", "'x.y.z' is the name of two tensors"
    torch.save({"w": torch.complex(good["w"], good["w"]).conj()}, path)
    yield "conjugate", "'w' has the values of another tensor, and is to be changed: conj\n  fix: save x.resolve_conj()"
    torch.save({"w": good["w"].to(torch.complex128)}, path)
    yield "dtype", "'w' has dtype 'complex128', which is not supported"


def test_errors_of_files_name_the_file_and_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    assert error_text(fs.state_dict.read, path, {}) == f"{path}: cannot be read\n  No such file or directory"
    for what, want in damaged(path):
        text = error_text(fs.state_dict.read, path, {"w": fs.init.zeros((20, 30))})
        assert str(path) in text, what
        assert want in text, what
    torch.save({"w": torch.ones(2, 3), "b": torch.ones(2)}, path)
    text = error_text(fs.state_dict.read, path, {"w": fs.init.zeros((3, 2)), "c": fs.init.zeros(2)})
    for part in ("'w' has another shape", "'c' is missing", "'b' is not part of this model", "missing=", "ignored="):
        assert part in text
    assert "if that is intended, state_dict.read(..., missing=('c',), ignored=('b',))" in text
    assert "read: theirs= and missing=" in error_text(
        fs.state_dict.read, path, {}, theirs=lambda p: FileTensor("w"), missing=["w"]
    )
    leaf = fs.state_dict.read(path, {"w": fs.init.zeros((2, 3))}, ignored=["b"])
    os.truncate(path, 300)
    assert "has changed since its header was read" in error_text(
        fs.materialize, leaf, P(), fs.make_mesh(data=1), key=KEY
    )


# What is in the pickle -> what its error has; the whole file has 500 bytes, to 90 KB.
HOSTILE = {
    "names of one list": (doubled(b"]", b"e"), "more tensors and numbers than a file of its size"),
    "hash of a key": (doubled(b"", b"t") + b"}" + get(DOUBLED) + b"Ns", "TypeError: a key is a tuple"),
    "dims": (b"}" + text("w") + tensor(*[b"(" + b"K\x01" * 30_000 + b"t"] * 2) + b"s", "30000 sizes and 30000 strides"),
    "sizes": (b"](" + tensor(b"\x8a\x09" + bytes(8) + b"\x01\x85") + b"e", "negative, too large or not numbers"),
    "objects": (b"](" + b"}" * 90_000 + b"e", "it makes more objects than a file of its size"),
    "length of a name": (b"}" + text("x" * 600) + tensor() + b"s", "a name has more than 512 characters: 'xxx"),
    "arguments": (b"ccollections\nOrderedDict\n](K\x01K\x02\x86e\x85R", "is damaged"),
    "number of bytes": (b"X\xff\xff\xff\xff" + b"x" * 99, "is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_pickle_that_would_take_more_time_or_memory_than_its_bytes_is_refused(tmp_path: Path, what: str) -> None:
    pickled, want = HOSTILE[what]
    (tmp_path / "a.pt").write_bytes(archive(pickled))
    assert want in error_text(read_torch_file, tmp_path / "a.pt")


def test_pickle_with_a_large_number_of_the_memo_needs_no_memory_for_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(archive(b"}" + put(1 << 27) + text("w") + tensor() + b"s"))
    tracemalloc.start()
    assert [e.name for e in read_torch_file(tmp_path / "a.pt").entries] == ["w"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_pickle_cannot_change_the_functions_that_read_it(tmp_path: Path) -> None:
    before = dict(vars(torch_file._rebuild))
    call = b"ctorch._utils\n_rebuild_tensor_v2\n}" + text("mark") + text("theirs") + b"sb"
    (tmp_path / "a.pt").write_bytes(archive(b"](" + call + tensor() + b"e"))
    read_torch_file(tmp_path / "a.pt")
    assert dict(vars(torch_file._rebuild)) == before


def test_a_changed_bit_outside_of_the_tensors_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    path, other, draw = tmp_path / "a.pt", tmp_path / "b.pt", random.Random(0)
    torch.save({"w": torch.ones(2, 3), "b": torch.ones(2)}, path)
    whole, want = path.read_bytes(), read_torch_file(path).entries
    inside = {at for e in want for at in range(e.start, e.start + e.nbytes)}
    texts = []
    for at in draw.sample(sorted(set(range(len(whole))) - inside), 200):
        other.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << draw.randrange(8))]) + whole[at + 1 :])
        try:
            got = read_torch_file(other)
        except fs.ShardingError as e:
            texts.append(str(e))
            continue
        texts += map(str, got.errors)
        assert got.errors or [replace(e, file=path, file_time=want[0].file_time) for e in got.entries] == want
    assert all(str(other) in text for text in texts)
    assert len(texts) > 30


def test_errors_of_write_leave_the_older_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w, x, both = torch.ones(3), torch.ones(3), torch.ones(2, 2)
    cases: list[tuple[str, Any, dict[str, Any], str]] = [
        ("a.npz", {"w": w}, {}, "fix: .safetensors for safetensors; .pt, .pth, .bin, .ckpt for torch.load"),
        ("a", {"w": w}, {}, "has the suffix ''"),
        ("a\0.pt", {"w": w}, {}, "has a null byte, which no path can have"),
        ("a.pt", {"w": w}, {"metadata": {"a": "b"}}, "a file of torch none"),
        ("a.pt", {"w": w, "x": fs.init.zeros(2)}, {}, "write: tree['x']: is only described"),
        ("a.pt", {"w": w, "x": 3}, {}, "write: tree['x']: cannot write a int"),
        ("a.pt", {"w": w.to(torch.complex128)}, {}, "cannot write torch.complex128"),
        ("a.pt", {}, {}, "write: tree_ has no leaves"),
        ("a.pt", {"a.b": w, "a": {"b": x}}, {}, "write: 'a.b' would be written twice"),
        ("a.pt", {"a": w, "b": w, "c": x}, {"theirs": lambda p: FileTensor({"a": "x"}.get(p[0], "y"))},
         "write: 'y' is the name of two leaves"),
        ("a.pt", {"0": w, "1": x, "a": {"b": w}, "a.b": x}, {}, "write: 'a.b' is the name of two leaves"),
        ("a.pt", {"a": both, "b": both}, {"theirs": lambda p: FileTensor(p[0], "i j -> j i" if p[0] == "b" else None)},
         "write: tree['b'] is the leaf tree['a'], and its dims in the file are others"),
    ]  # fmt: skip
    (tmp_path / "a.pt").write_bytes(b"older")
    for name, tree, how, want in cases:
        assert want in error_text(fs.state_dict.write, tmp_path / name, tree, **how)
        assert [(f.name, f.read_bytes()) for f in tmp_path.iterdir()] == [("a.pt", b"older")]
    for function in ("fsync", "pwrite", "replace"):
        with monkeypatch.context() as m:

            def full(*args: Any) -> None:
                raise OSError(28, "No space left on device")

            m.setattr(os, function, full)
            text = error_text(fs.state_dict.write, tmp_path / "a.pt", placed(MESHES[2]))
        assert text.startswith("write: cannot write ")
        assert "No space left on device" in text
        assert [(f.name, f.read_bytes()) for f in tmp_path.iterdir()] == [("a.pt", b"older")]
    with monkeypatch.context() as m:  # of a folder, which some file systems cannot flush: the file is there
        m.setattr("fshard.interop.state_dict.sync", full)
        text = error_text(fs.state_dict.write, tmp_path / "a.pt", {"w": w + 1})
    assert "a.pt is the older file, or all of the new one" in text
    assert_same(torch.load(tmp_path / "a.pt", weights_only=True), {"w": w + 1})
    fs.state_dict.write(tmp_path / "a.pt", {"a.b": w, "a": {"b": w}, "c": w})  # one leaf, two of whose paths are a name
    assert list(torch.load(tmp_path / "a.pt", weights_only=True)) == ["a.b", "c"]
    (tmp_path / ".a.pt.saving-00000000").write_bytes(b"of a save that was killed")
    fs.state_dict.write(tmp_path / "a.pt", {"w": w})
    assert [f.name for f in tmp_path.iterdir()] == ["a.pt"]
    assert_same(torch.load(tmp_path / "a.pt", weights_only=True), {"w": w})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def test_a_gathered_tree_is_loaded_by_its_module_with_ties() -> None:
    apply, described = fs.defer(Tied)
    specs = fs.fully_shard(P(), described, axis="data")
    placed_tree = fs.materialize(described, specs, fs.make_mesh(data=2), key=KEY)
    module = Tied()
    module.load_state_dict(fs.state_dict.gather(placed_tree, of=apply))  # strict
    assert module.head.weight is module.table.weight
    for name, x in placed_tree["params"].items():
        assert torch.equal(module.get_parameter(name), fs.device_get(x))
    with pytest.raises(fs.ShardingError, match="must be a Sharded or a Tensor"):
        fs.state_dict.gather(described)
    leaf = torch.ones(2)
    assert fs.state_dict.gather({"a": {"b": leaf}, "c": leaf}).keys() == {"a.b", "c"}
    with pytest.raises(fs.ShardingError, match=r"gather: 'a\.b' is the name of two leaves"):
        fs.state_dict.gather({"a": {"b": leaf}, "a.b": torch.ones(3)})
