"""Checksums in the folders that fshard writes: what is read by blocks is checked, and nothing else is refused."""

from __future__ import annotations

import itertools
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.interop.hf import FileTensor, export, read, tensors
from tests.lib.assertions import assert_same, error_text
from tests.lib.folder_cases import KEY

CPU = torch.device("cpu")
BLOCK = 1 << 16
COPY_OR_WRITE = (
    "  fix: copy the file again; or, if another program wrote it with the metadata of an earlier file, write it "
    'without the keys "crc32:...": save_file(tensors, path, metadata={"format": "pt"})'
)


def named(path: fs.tree.Path) -> FileTensor:
    return FileTensor(path[0])


def saved(folder: Path, leaves: dict[str, Tensor], **options: Any) -> Path:
    export.write(folder, leaves, named, config={}, **options)
    return folder


def loaded(folder: Path, leaves: dict[str, Tensor], **sizes: int) -> Any:
    described = {n: fs.init.zeros(x.shape) for n, x in leaves.items()}
    spec, mesh = (P("data"), fs.make_mesh(**sizes)) if sizes else (P(), fs.make_mesh(data=1))
    return fs.materialize(read(folder, described, named), spec, mesh, key=KEY)


def test_checksums_are_crc32_of_name_dtype_and_shape_then_of_each_block(tmp_path: Path) -> None:
    x = torch.randn(300, 100)  # 120,000 bytes: two blocks
    file = saved(tmp_path, {"a": x, "none": torch.zeros(0, 3)}) / "model.safetensors"
    raw = x.numpy().tobytes()
    want = "".join(f"{zlib.crc32(b'a F32 [300, 100]' + part):08x}" for part in (raw[:BLOCK], raw[BLOCK:]))
    with safe_open(file, "pt") as f:
        assert f.metadata() == {"format": "pt", "crc32:a": want, "crc32:none": ""}


def flipped(data: bytes, bit: int) -> bytes:
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


@pytest.mark.parametrize("max_bytes", [10**9, 90], ids=["single", "sharded"])
def test_every_flipped_bit_is_refused_or_changes_no_value(max_bytes: int, tmp_path: Path) -> None:
    want = {"a": torch.randn(4, 6), "b": torch.randn(7)}
    folder = saved(tmp_path, want, max_shard_bytes=max_bytes)
    refused = total = 0
    for file in sorted(folder.iterdir()):
        good = file.read_bytes()
        for bit in range(0, 8 * len(good), 37):
            file.write_bytes(flipped(good, bit))
            total += 1
            try:
                got = loaded(folder, want, data=3)
            except fs.ShardingError:
                refused += 1
            else:
                assert_same(got, want)
        file.write_bytes(good)
    assert refused > total / 2
    assert_same(loaded(folder, want, data=3), want)


def test_damaged_tensor_is_named_with_its_bytes(tmp_path: Path) -> None:
    x = torch.randn(300, 100)
    file = saved(tmp_path, {"a": x}) / "model.safetensors"
    good = file.read_bytes()
    file.write_bytes(flipped(good, 8 * (len(good) - 1)))
    start = len(good) - x.nbytes + BLOCK
    assert error_text(loaded, tmp_path, {"a": x}) == (
        f"{file}: 'a' is damaged, or has the checksums of other values\n"
        f"  bytes {start} to {len(good)} of the file do not have their checksum\n" + COPY_OR_WRITE
    )


BOXES = {
    "all": (slice(0, 512), slice(0, 1024)),
    "rows": (slice(3, 200), slice(0, 1024)),
    "one row": (slice(17, 18), slice(0, 1024)),
    "half of the columns": (slice(0, 512), slice(0, 512)),
    "few elements": (slice(100, 102), slice(5, 9)),
}


@pytest.mark.parametrize("name", BOXES)
def test_box_of_rows_wide_columns_or_few_blocks_is_checked(name: str, tmp_path: Path) -> None:
    x, box = torch.randn(512, 1024), BOXES[name]
    file = saved(tmp_path, {"a": x}) / "model.safetensors"
    fill = lambda: tensors(tmp_path)["a"].init.fill(KEY, x.shape, box, torch.float32, CPU)  # noqa: E731
    assert torch.equal(fill(), x[box])
    good = file.read_bytes()
    blocks = {4 * (i * 1024 + j) // BLOCK for i in (box[0].start, box[0].stop - 1) for j in (box[1].start,)}
    for block in blocks:  # one bit anywhere in a block that the box has a part of
        file.write_bytes(flipped(good, 8 * (len(good) - x.nbytes + block * BLOCK + 7)))
        assert "'a' is damaged" in error_text(fill)


def test_narrow_columns_of_a_large_tensor_are_read_without_other_bytes_and_unchecked(tmp_path: Path) -> None:
    x, box = torch.randn(512, 1024), (slice(0, 512), slice(0, 128))
    file = saved(tmp_path, {"a": x}) / "model.safetensors"
    good = file.read_bytes()
    file.write_bytes(flipped(good, 8 * (len(good) - x.nbytes)))
    got = tensors(tmp_path)["a"].init.fill(KEY, x.shape, box, torch.float32, CPU)
    assert (got != x[box]).sum() == 1
    assert "'a' is damaged" in error_text(loaded, tmp_path, {"a": x})


def test_runs_in_any_order_of_dims_are_checked_and_equal(tmp_path: Path) -> None:
    """A file's dims in another order, and parts: runs of one element, of rows, across blocks."""
    x = torch.randn(40, 3, 70, 5)
    dims = FileTensor("x", "(h c k) d -> d c h k")
    y = x.permute(2, 1, 3, 0).reshape(-1, 40).contiguous()
    export.write(tmp_path, {"x": x}, lambda path: dims, config={})
    assert torch.equal(load_file(tmp_path / "model.safetensors")["x"], y)
    leaf = read(tmp_path, {"x": fs.init.zeros(x.shape)}, lambda path: dims)["x"]
    for cuts in itertools.product((slice(0, 40), slice(7, 9)), (slice(0, 3), slice(1, 2)), (slice(0, 70), slice(3, 60)),
                                  (slice(0, 5), slice(2, 4))):  # fmt: skip
        assert torch.equal(leaf.init.fill(KEY, x.shape, cuts, torch.float32, CPU), x[cuts])


def test_shard_of_another_model_is_refused(tmp_path: Path) -> None:
    ours, other = ({n: torch.randn(4) for n in "ab"} for _ in range(2))
    for folder, leaves in (("ours", ours), ("other", other)):
        saved(tmp_path / folder, leaves, max_shard_bytes=16)
    shard = "model-00002-of-00002.safetensors"
    (tmp_path / "ours" / shard).write_bytes((tmp_path / "other" / shard).read_bytes())
    assert error_text(loaded, tmp_path / "ours", ours).startswith(
        f"{tmp_path / 'ours' / shard}: is not the file that model.safetensors.index.json was written with")  # fmt: skip


def test_checksums_of_other_values_are_refused_and_none_are_accepted(tmp_path: Path) -> None:
    """A tool that changes tensors and keeps the metadata; one that writes metadata of its own, as transformers does."""
    x = torch.randn(4)
    file = saved(tmp_path, {"a": x, "b": x.clone()}) / "model.safetensors"
    with safe_open(file, "pt") as f:
        metadata = f.metadata()
    for changed, want in (
        ({"a": x.half(), "b": x.clone()}, "'a' is damaged, or has the checksums of other values\n"),
        ({"a": x.repeat(BLOCK), "b": x.clone()}, "'a' has not the checksums of its bytes\n"),
        ({"a": x, "b": x.clone(), "new": x.clone()}, "'new' has not the checksums of its bytes\n"),
        ({"a": x + 1, "b": x.clone()}, "'a' is damaged, or has the checksums of other values\n"),
    ):
        save_file(changed, file, metadata=metadata)
        text = error_text(loaded, tmp_path, changed)
        assert text.startswith(f"{file}: {want}")
        assert text.endswith(COPY_OR_WRITE)
        save_file(changed, file, metadata={"format": "pt"})  # as it says
        assert_same(loaded(tmp_path, changed), changed)
    save_file(changed, file, metadata={"crc32:b": metadata["crc32:b"]})
    assert error_text(loaded, tmp_path, changed) == (
        f"{file}: 'a' has not the checksums of its bytes\n  0 digits, and 8 for each 65536 of 16 bytes\n"
        + COPY_OR_WRITE
    )
    saved(tmp_path, changed, metadata=metadata)  # of another file: replaced by its own
    assert_same(loaded(tmp_path, changed), changed)


def test_shard_written_by_another_program_is_read_after_what_the_error_says(tmp_path: Path) -> None:
    want = {n: torch.randn(4) for n in "ab"}
    index = saved(tmp_path, want, max_shard_bytes=16) / "model.safetensors.index.json"
    shard = tmp_path / "model-00002-of-00002.safetensors"
    save_file(load_file(shard), shard, metadata={"format": "pt"})
    text = error_text(loaded, tmp_path, want)
    assert text.startswith(
        f"{shard}: is not the file that model.safetensors.index.json was written with, by its header\n"
    )
    assert text.endswith("  fix: copy the folder again; or, if another program wrote the file and it is the right one, "
                         'remove "crc32" from "metadata" in model.safetensors.index.json')  # fmt: skip
    content = json.loads(index.read_text())
    del content["metadata"]["crc32"]
    index.write_text(json.dumps(content))
    assert_same(loaded(tmp_path, want), want)


@pytest.mark.parametrize("metadata", [None, [], {"crc32": []}, {"crc32": {"model-00001-of-00002.safetensors": None}}])
def test_index_without_checksums_is_accepted(metadata: Any, tmp_path: Path) -> None:
    want = {n: torch.randn(4) for n in "ab"}
    index = saved(tmp_path, want, max_shard_bytes=16) / "model.safetensors.index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"metadata": metadata}))
    assert_same(loaded(tmp_path, want), want)
