"""Hugging Face folders are read by slices: bitwise on every mesh, with exactly the bytes needed, or refused."""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fshard as fs
from fshard import P
from fshard._core.files.safetensors import DTYPES, read_header
from fshard.interop.hf import export, weights
from fshard.interop.hf.folder import config_of
from fshard.interop.hf.weights import FileTensor, read, tensors
from fshard.spec import Box, box_shape, full_box
from tests.lib.assertions import assert_same, error_text
from tests.lib.folder_cases import (
    HEADS,
    HIDDEN,
    KEY,
    MESHES,
    SHAPES,
    SPECS,
    THEIRS,
    WIDTH,
    K,
    as_theirs,
    described,
    sharded_file,
    single_file,
    theirs,
    values,
)

CPU = torch.device("cpu")


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return single_file(tmp_path / "single", values())


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("specs", SPECS, ids=["replicated", "even", "odd"])
def test_leaves_equal_the_file_bitwise_on_every_mesh(tmp_path: Path, specs: Any, sizes: dict[str, int]) -> None:
    mesh = fs.make_mesh(**sizes)
    for folder in (single_file(tmp_path / "single", values()), sharded_file(tmp_path / "sharded", values())):
        assert_same(fs.materialize(read(folder, described(), theirs), specs, mesh, key=KEY), values())


def test_leaves_have_the_dtype_of_the_file_unless_dtype_is_set(tmp_path: Path) -> None:
    ours = values(torch.bfloat16)
    leaves = read(single_file(tmp_path / "single", ours), described(), theirs)
    assert all(x.dtype == torch.bfloat16 for x in leaves.values())
    mesh = fs.make_mesh(data=2, model=2)
    assert_same(fs.materialize(leaves, SPECS[2], mesh, key=KEY), ours)
    wide = fs.materialize(leaves, SPECS[2], mesh, key=KEY, dtype=torch.float64)
    assert_same(wide, {name: x.double() for name, x in ours.items()})


def test_integer_leaves_ignore_the_dtype_argument(tmp_path: Path) -> None:
    save_file({"i": torch.arange(6), "x": torch.arange(6.0)}, tmp_path / "model.safetensors")
    like = {"i": fs.init.arange(6), "x": fs.init.arange(6, start=0.0)}
    leaves = read(tmp_path, like, lambda path: FileTensor(path[0]))
    got = fs.materialize(leaves, P("data"), fs.make_mesh(data=4), key=KEY, dtype=torch.float16)
    assert_same(got, {"i": torch.arange(6), "x": torch.arange(6).half()})


def test_leaf_shows_its_file_and_tensor(tmp_path: Path) -> None:
    leaves = read(sharded_file(tmp_path / "sharded", values()), described(), theirs)
    assert repr(leaves["qkv"]) == "f32[20, 3, 6, 8] = stored(model-00002-of-00002.safetensors: m.qkv.weight)"
    tensors_ = tensors(tmp_path / "sharded")
    assert tensors_.keys() == as_theirs(values()).keys()
    assert tensors_["m.scale"].shape == ()
    assert repr(tensors_["m.emb.weight"]) == "f32[13, 20] = stored(model-00001-of-00002.safetensors: m.emb.weight)"
    one = tensors(tmp_path / "sharded" / "model-00001-of-00002.safetensors")
    assert one.keys() == {n for n, x in tensors_.items() if "00001" in repr(x)}
    mesh = fs.make_mesh(model=2)
    assert_same(fs.materialize(tensors_, P(), mesh, key=KEY), as_theirs(values()))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_is_written_and_read_back_bitwise(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (6 * 5 * dtype.itemsize,), dtype=torch.uint8)
    x = raw.view(dtype).view(6, 5)
    export.write(tmp_path, {"x": x}, lambda _: FileTensor("x", "o i -> i o"), config={})
    like = {"x": fs.Deferred((6, 5), dtype, fs.init.zeros(1).init)}
    leaves = read(tmp_path, like, lambda _: FileTensor("x", "o i -> i o"))
    assert_same(fs.materialize(leaves, P("data", "model"), fs.make_mesh(data=2, model=2), key=KEY), {"x": x})
    if dtype != torch.float8_e8m0fnu:  # safetensors.torch has none in older versions
        assert_same(load_file(tmp_path / "model.safetensors"), {"x": x.T})


def record_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record (start, stop) of every later read."""
    reads: list[tuple[int, int]] = []
    preadv = os.preadv

    def counted(fd: int, buffers: Any, offset: int) -> int:
        got = preadv(fd, buffers, offset)
        reads.append((offset, offset + got))
        return got

    monkeypatch.setattr(os, "preadv", counted)
    return reads


BOXES: list[tuple[str, Box]] = [
    ("qkv", full_box(SHAPES["qkv"])),
    ("qkv", (slice(0, WIDTH), slice(0, 3), slice(2, 4), slice(0, K))),
    ("qkv", (slice(3, 5), slice(1, 2), slice(5, 6), slice(0, 1))),
    ("qkv", (slice(20, 20), slice(0, 3), slice(0, 6), slice(0, K))),
    ("bias", (slice(0, 3), slice(1, 3), slice(0, K))),
    ("gate", (slice(0, WIDTH), slice(5, 7))),
    ("up", (slice(4, 8), slice(0, HIDDEN))),
    ("scale", ()),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [8 << 20, 100, 4])
@pytest.mark.parametrize(("name", "box"), BOXES)
def test_fill_reads_exactly_the_bytes_of_its_box(
    single: Path, monkeypatch: pytest.MonkeyPatch, name: str, box: Box, chunk: int, dtype: torch.dtype
) -> None:
    leaf = read(single, described(), theirs)[name]
    monkeypatch.setattr(weights, "CHUNK_BYTES", chunk)
    reads = record_reads(monkeypatch)
    got = leaf.init.fill(KEY, leaf.shape, box, dtype, CPU)
    assert torch.equal(got, values()[name][box].to(dtype))
    assert sum(b - a for a, b in reads) == 4 * math.prod(box_shape(box))
    assert all(b <= c for (_, b), (c, _) in itertools.pairwise(sorted(reads)))  # no byte twice


def test_adjacent_runs_are_one_read(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaf = read(single, described(), theirs)["qkv"]
    reads = record_reads(monkeypatch)
    leaf.init.fill(KEY, leaf.shape, (slice(0, WIDTH), slice(0, 3), slice(2, 5), slice(0, K)), torch.float32, CPU)
    assert len(reads) == 1  # three heads: q, k and v of each are contiguous


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel does not count")
def test_kernel_counts_the_same_bytes(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1 << 11, 1 << 9)}, tmp_path / "model.safetensors")
    leaf = tensors(tmp_path)["x"]

    def read_by_now() -> int:
        return int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])

    own = -read_by_now() + read_by_now()
    before = read_by_now()
    leaf.init.fill(KEY, leaf.shape, (slice(0, 1 << 11), slice(0, 1 << 7)), torch.float32, CPU)
    assert 0 <= read_by_now() - before - (1 << 20) <= 2 * own


def test_replicas_of_a_simulated_mesh_read_once(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = read(single, described(), theirs)
    reads = record_reads(monkeypatch)
    fs.materialize({"qkv": leaves["qkv"]}, P("model"), fs.make_mesh(data=4, model=2), key=KEY)
    assert sum(b - a for a, b in reads) == leaves["qkv"].nbytes


def test_read_reads_only_headers(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = record_reads(monkeypatch)
    leaves = read(single, described(), theirs)
    fs.materialize(leaves, P(), fs.make_mesh(kind="abstract", data=1024), key=KEY)
    assert not reads


@pytest.mark.parametrize(("prefix", "saved"), [("m.", ""), ("m", ""), ("m.", "m."), ("", "")])
def test_names_are_found_with_and_without_their_prefix(tmp_path: Path, prefix: str, saved: str) -> None:
    x = torch.arange(3.0)
    save_file({f"{saved}x": x, "head": x + 1}, tmp_path / "model.safetensors")
    for name in {f"{saved}x", f"{prefix.rstrip('.')}.x" if prefix else "x", "x" if prefix else f"{saved}x"}:
        called = {"x": FileTensor(name), "head": FileTensor("head")}
        leaves = read(tmp_path, dict.fromkeys(("x",), fs.init.ones(3)) | {"head": fs.init.zeros(3)},
                      lambda path, called=called: called[path[0]], prefix=prefix)  # fmt: skip
        assert_same(fs.materialize(leaves, P(), fs.make_mesh(data=1), key=KEY), {"x": x, "head": x + 1})


@pytest.mark.parametrize("names", [["emb"], ["head"], ["emb", "head"]])
def test_tied_leaf_is_read_under_any_of_its_names(tmp_path: Path, names: list[str]) -> None:
    x = torch.arange(6.0).view(2, 3)
    save_file({n: x.clone() for n in names}, tmp_path / "model.safetensors")
    leaf = fs.init.normal((2, 3))
    leaves = read(tmp_path, {"a": leaf, "z": leaf}, lambda path: FileTensor({"a": "emb", "z": "head"}[path[0]]))
    assert leaves["a"] is leaves["z"]
    got = fs.materialize(leaves, P("data"), fs.make_mesh(data=2), key=KEY)
    assert got["a"] is got["z"]
    assert torch.equal(fs.device_get(got)["a"], x)


def test_single_file_is_preferred_to_an_index_as_in_from_pretrained(tmp_path: Path) -> None:
    ours = values()
    folder = sharded_file(tmp_path / "both", {n: x + 1 for n, x in ours.items()})
    save_file(as_theirs(ours), folder / "model.safetensors")
    assert_same(fs.materialize(read(folder, described(), theirs), P(), fs.make_mesh(data=1), key=KEY), ours)


# --- refusals -------------------------------------------------------------------------------------------------


def test_error_lists_all_tensors_that_do_not_fit_the_model(tmp_path: Path) -> None:
    tensors_ = as_theirs(values())
    del tensors_["m.emb.weight"]
    tensors_ |= {"m.norm.weight": torch.zeros(WIDTH + 1), "m.qkv.weight": torch.zeros(WIDTH, 3 * HEADS * K)}
    tensors_ |= {"m.scale": torch.tensor(1), "more.weight": torch.zeros(2, 3).half(), "a.bias": torch.zeros(1)}
    save_file(tensors_, tmp_path / "model.safetensors")
    like = described() | {"list": [1]}
    del like["up"]
    text = error_text(read, tmp_path, like, lambda path: THEIRS.get(path[0], FileTensor("a")), ignored=(".bias",))
    f = tmp_path
    assert (
        text
        == f"""\
7 problems
{f}: 'm.emb.weight' is missing
  for params['emb'], f32[13, 20]
params['list'][0]: is a int
  fix: describe it: fs.init.*
{f}: 'm.norm.weight' has another shape, for params['norm']
  got  [21]    expected  [20]
{f}: 'm.qkv.weight' has another shape, for params['qkv']
  got  [20, 144]    expected  [144, 20]
  (h c k) d -> d c h k, the leaf is [20, 3, 6, 8]
{f}: 'm.scale' has a dtype of another kind, for params['scale']
  got  i64[]    expected  f32[]
{f}: no leaf is the rest of 'm.gate_up.weight'
  140 of its 280 elements are used
{f}: 'more.weight' is not part of this model
  f16[2, 3]"""
    )


def test_tensor_that_two_leaves_divide_in_different_ways_is_refused(tmp_path: Path) -> None:
    by_path = {"half": FileTensor("x", "(two=2 f) -> f", {"two": 0}),
               "odd": FileTensor("x", "(f two=2) -> f", {"two": 0})}  # fmt: skip
    save_file({"x": torch.ones(8)}, tmp_path / "model.safetensors")
    text = error_text(read, tmp_path, {n: fs.init.ones(4) for n in by_path}, lambda path: by_path[path[0]])
    assert text == (f"{tmp_path}: 'x' is divided in different ways\n  [4] of [8]\n  [4] of [8]\n"
                    "  fix: name the same dims, of the same sizes, in at=")  # fmt: skip


def test_error_of_unfitting_pattern_names_the_leaf(single: Path) -> None:
    text = error_text(
        read, single, {"x": fs.init.zeros((4, 2))}, lambda _: FileTensor("m.scale", "a -> a"), ignored=("",)
    )
    assert text == ("params['x']: Pattern: [4, 2] has 2 dims, the right side has 1\n  a -> a\n"
                    "  fix: one name, or one (group), for each dim of the leaf")  # fmt: skip


def raw_file(path: Path, header: Any, data: int = 0, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + b"\0" * data)
    return path


def header_field(start: int, stop: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_error_lists_all_damaged_tensors_of_a_file(tmp_path: Path) -> None:
    header = {"a": header_field(0, 8, [2]), "b": header_field(4, 12, [2]), "c": header_field(12, 20, [3]),
              "d": header_field(24, 28, [1]), "e": header_field(28, 68, [10]),
              "f": header_field(68, 70, [4], "F4")}  # fmt: skip
    f = raw_file(tmp_path / "model.safetensors", header, data=40)
    n = 8 + len(json.dumps(header))
    listed = ", ".join(DTYPES)
    assert (
        error_text(tensors, tmp_path)
        == f"""\
6 problems
{f}: 'b' is out of place
  it begins at byte {n + 4}, and the one before it ends at {n + 8}
  fix: write the file again
{f}: 'c' has the bytes of another shape
  8 bytes, where F32[3] takes 12
{f}: 'd' is out of place
  it begins at byte {n + 24}, and the one before it ends at {n + 20}
  fix: write the file again
{f}: 'e' is cut short
  it ends at byte {n + 68}, the file has {n + 40}
  fix: copy the file again
{f}: 'f' is cut short
  it ends at byte {n + 70}, the file has {n + 40}
  fix: copy the file again
{f}: 'f' has dtype 'F4', which is not supported
  fix: convert it to one of {listed}"""
    )


def test_error_of_truncated_file_names_only_the_missing_tensors(single: Path) -> None:
    file = single / "model.safetensors"
    size = file.stat().st_size
    last = max(tensors(single).values(), key=lambda x: x.init.parts[0][0].start)  # type: ignore[attr-defined]
    os.truncate(file, size - 1)
    assert error_text(read, single, described(), theirs) == (
        f"{file}: {last.init.parts[0][0].name!r} is cut short\n"  # type: ignore[attr-defined]
        f"  it ends at byte {size}, the file has {size - 1}\n  fix: copy the file again"
    )
    os.truncate(file, size + 2)
    assert error_text(read, single, described(), theirs) == (
        f"{file}: is too long\n  its last tensor ends at byte {size}, the file has {size + 2}\n  fix: copy it again"
    )


NO_SIZES = " has sizes of no tensor: 64 dims and 2^59 elements are the most"


@pytest.mark.parametrize(
    ("header", "length", "why"),
    [
        (b"", None, None),
        (b"{}", 1 << 60, None),
        (b"{}", 100_000_001, None),
        (b"{}", 3, None),
        (b"{}", 1, None),
        (b"[]", None, "ValueError: it is a list"),
        (b"{x}", None, "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (b'"\xff"', None, "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 1: invalid start byte"),
        ({"x": 3}, None, "TypeError: 'int' object is not subscriptable"),
        ({"x": {"dtype": "F32"}}, None, "KeyError: 'shape'"),
        ({"x": header_field(4, 0, [1])}, None, f"ValueError: {header_field(4, 0, [1])}{NO_SIZES}"),
        ({"x": header_field(0, 4, [-1])}, None, f"ValueError: {header_field(0, 4, [-1])}{NO_SIZES}"),
        ({"x": header_field(0, 4, [True])}, None, f"ValueError: {header_field(0, 4, [True])}{NO_SIZES}"),
        ({"x": header_field(0, 0, [0, 1 << 63])}, None, f"ValueError: {header_field(0, 0, [0, 1 << 63])}{NO_SIZES}"),
        ({"x": header_field(0, 4, [1 << 30] * 2)}, None, f"ValueError: {header_field(0, 4, [1 << 30] * 2)}{NO_SIZES}"),
        ({"x": header_field(0, 4, [1] * 65)}, None, f"ValueError: {header_field(0, 4, [1] * 65)!r:.200}{NO_SIZES}"),
        ({"x": header_field(0, 4, [1]) | {"dtype": "F\x1b"}}, None, r"ValueError: 'F\x1b' is not a dtype"),
        ({"x" * 5_000: {}}, None, f"ValueError: a name has more than 512 characters: {'x' * 60!r}..."),
        (b'{"\\ud800": {}}', None,
         r"UnicodeEncodeError: 'utf-8' codec can't encode character '\ud800' in position 0: surrogates not allowed"),
        (b'{"x": 1, "x": 2}', None, "ValueError: 'x' is in it twice"),
    ],
)  # fmt: skip
def test_unreadable_header_is_refused(tmp_path: Path, header: Any, length: int | None, why: str | None) -> None:
    f = raw_file(tmp_path / "model.safetensors", header, length=length)
    if length == 100_000_001:
        os.truncate(f, length + 8)  # a header beyond the limit is refused even if it is complete
    promised = length if length is not None else 0
    want = f"{f}: the header is damaged\n  {why}\n  fix: copy it again" if why else (
        f"{f}: is not safetensors, or is cut short\n  its first 8 bytes announce a header of {promised} bytes, "
        f"the file has {f.stat().st_size}\n  fix: copy it again")  # fmt: skip
    assert error_text(tensors, tmp_path) == want
    assert error_text(read, tmp_path, described(), theirs) == want  # and nothing about missing tensors


def test_last_name_of_many_that_is_in_a_header_twice_is_found_in_linear_time(tmp_path: Path) -> None:
    names = [f'"{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(10_000)]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    gc.disable()  # a collection takes many times as long
    try:
        for i, twice in enumerate((False, True) * 3):
            f = raw_file(tmp_path / f"{i}.safetensors", f"{{{','.join(names + names[-1:] * twice)}}}".encode())
            begun = time.thread_time()
            if twice:
                assert "ValueError: '9999' is in it twice" in error_text(read_header, f)
            else:
                assert len(read_header(f).entries) == 10_000
            seconds[twice].append(time.thread_time() - begun)
    finally:
        gc.enable()
    assert min(seconds[True]) < 5 * min(seconds[False])


def test_index_must_agree_with_its_files(tmp_path: Path) -> None:
    folder = sharded_file(tmp_path / "sharded", values(), count=3)
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"] |= {"m.scale": "model-00001-of-00003.safetensors", "ghost": "model-00002-of-00003.safetensors"}
    index.write_text(json.dumps(table))
    (folder / "model-00003-of-00003.safetensors").unlink()
    lost = ", ".join(n for n, f in table["weight_map"].items() if "00003-of" in f)
    assert (
        error_text(read, folder, described(), theirs)
        == f"""\
3 problems
{folder}/model-00001-of-00003.safetensors: 'm.scale' is not in it
  model.safetensors.index.json says it is
{folder}/model-00002-of-00003.safetensors: 'ghost' is not in it
  model.safetensors.index.json says it is
{folder}/model-00003-of-00003.safetensors: there is no such file
  for {lost}"""
    )
    (folder / "model-00001-of-00003.safetensors").unlink()
    (folder / "model-00002-of-00003.safetensors").write_bytes(b"")
    assert error_text(tensors, folder).startswith("3 problems\n")  # of a file that cannot be read, no missing names
    index.write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
    assert error_text(tensors, folder) == f"{index}: '../x.safetensors' is outside the folder\n  for x"
    for name in ("x" * 5_000, "x\0", "\ud800"):
        index.write_text(json.dumps({"weight_map": {"w": name}}))
        assert error_text(tensors, folder).endswith(": there is no such file\n  for w")
    index.write_text("{}")
    why = "has no weight_map, from names of tensors to names of files"
    assert error_text(tensors, folder) == f"{index}: {why}\n  fix: copy it again"
    index.write_text("[1]")
    assert error_text(tensors, folder) == f"{index}: is not a JSON object\n  it is a list\n  fix: copy it again"


def test_tensor_missing_from_the_index_is_reported_as_extra(tmp_path: Path) -> None:
    folder = sharded_file(tmp_path / "sharded", values() | {"norm": torch.zeros(WIDTH)})
    save_file({"m.emb.weight": values()["emb"], "other": torch.ones(2)}, folder / "model-00001-of-00002.safetensors")
    file_of = {n: "model-00001-of-00002.safetensors" if "emb" in n else "model-00002-of-00002.safetensors"
             for n in as_theirs(values())}  # fmt: skip
    save_file(as_theirs(values()), folder / "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    text = error_text(read, folder, described(), theirs)
    assert text == f"{folder}: 'other' is not part of this model\n  f32[2]"
    leaves = read(folder, described(), theirs, ignored=("other",))
    assert repr(leaves["emb"]) == "f32[13, 20] = stored(model-00001-of-00002.safetensors: m.emb.weight)"


def test_pickles_and_folders_without_weights_are_refused(tmp_path: Path) -> None:
    convert = "fix: convert it on a machine that may run that: AutoModel.from_pretrained(a).save_pretrained(b)"
    runs = ("a pickle runs any code that is in it\n"
            "  fs.state_dict.read reads one file of tensors, or an index, and runs nothing")  # fmt: skip
    (tmp_path / "config.json").write_text("{}")
    wrote = "fix: give a folder that save_pretrained wrote"
    neither = "has neither model.safetensors nor model.safetensors.index.json"
    assert error_text(tensors, tmp_path) == f"{tmp_path}: {neither}\n  it holds no safetensors\n  {wrote}"
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    want = f"{tmp_path}: pickles are refused\n  it has pytorch_model.bin; {runs}\n  {convert}"
    assert error_text(tensors, tmp_path) == want
    one = tmp_path / "pytorch_model.bin"
    want = f"{one}: pickles are refused\n  it has pytorch_model.bin; {runs}\n  {convert}"
    assert error_text(read, one, {}, theirs) == want
    (tmp_path / "adapter.safetensors").write_bytes(b"x")
    want = f"{tmp_path}: {neither}\n  it holds adapter.safetensors\n  fix: give one of these files"
    assert error_text(tensors, tmp_path) == want
    gone = tmp_path / "gone"
    assert error_text(tensors, gone) == f"{gone}: there is no such folder\n  {wrote}"


def test_config_json_is_read_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    want = f"{file}: there is no such file\n  fix: give a folder that save_pretrained wrote"
    assert error_text(config_of, tmp_path) == want
    file.write_text("{")
    why = "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    assert error_text(config_of, tmp_path) == f"{file}: is not JSON\n  {why}\n  fix: copy it again"
    file.write_text('{"model_type": "gpt2"}')
    assert config_of(tmp_path) == {"model_type": "gpt2"}


@pytest.mark.parametrize("change", ["shorter", "longer", "padded", "gone", "other", "replaced"])
def test_file_that_changed_after_its_header_was_read_is_refused(single: Path, change: str) -> None:
    file = single / "model.safetensors"
    leaf = max(read(single, described(), theirs).values(), key=lambda x: x.init.parts[0][0].start)
    size = file.stat().st_size
    if change == "gone":
        file.unlink()
    elif change == "other":
        file.write_bytes(file.read_bytes())
        os.utime(file, ns=(0, 5))
    elif change == "replaced":  # two files that are written at once may have the same time
        shutil.copy2(file, single / "new")
        os.replace(single / "new", file)
    else:
        times = (0, file.stat().st_mtime_ns)
        os.truncate(file, size - 1 if change == "shorter" else size + 1)
        if change == "padded":
            os.utime(file, ns=times)
    why = {"shorter": f"it ends before byte {size}", "longer": f"{size} bytes then, {size + 1} now",
           "padded": f"{size} bytes then, {size + 1} now",
           **dict.fromkeys(["other", "replaced"], f"{size} bytes then, {size} now")}  # fmt: skip
    text = error_text(fs.materialize, {"x": leaf}, P(), fs.make_mesh(data=1), key=KEY)
    name = leaf.init.parts[0][0].name
    assert text == (f"{file}: cannot be read\n  No such file or directory" if change == "gone" else
                    f"{file}: has changed since its header was read\n  {why[change]}\n  in {name!r}\n"
                    "  fix: read the folder again, when nothing writes to it")  # fmt: skip
