"""Batches of similar lengths, and their padding: every example once an epoch, the same batches on every mesh."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fshard as fs
from fshard import data
from tests.lib.assertions import error_text

LENGTHS = np.random.default_rng(0).integers(0, 50, 97)
EDGES = [8, 9, 20, 30, 60]
BATCH = [7, 1, 40, 4, 3]


def epoch(of: Any, n: int, key: Any, **how: Any) -> list[Any]:
    return [of.indices(key, epoch=n, step=s, **how) for s in range(of.steps(drop_last=how.get("drop_last", False)))]


@pytest.mark.parametrize("key", [None, 0, 1])
@pytest.mark.parametrize("even", [False, True])
def test_every_epoch_has_each_example_once_in_batches_of_its_bucket(key: int | None, even: bool) -> None:
    key = None if key is None else fs.key(key)
    of = data.buckets(LENGTHS, EDGES, batch=BATCH)
    orders = []
    for n in range(2):
        batches = epoch(of, n, key, even=even)
        rows = torch.cat([b.rows[b.counted] for b in batches])
        assert rows.sort().values.tolist() == list(range(97))
        for b in batches:
            i = EDGES.index(b.length)
            low = EDGES[i - 1] if i else -1
            assert all(low < LENGTHS[r] <= b.length for r in b.rows.tolist())
            assert len(b.rows) == len(b.counted) <= BATCH[i]
            assert len(b.rows) == BATCH[i] or not even
            assert bool(b.counted.all()) or even
        assert batches[1].rows.equal(of.indices(key, step=n * len(batches) + 1, even=even).rows)  # from the start
        orders.append(rows.tolist())
    assert (orders[0] == orders[1]) is (key is None)
    lengths = [b.length for b in batches]
    assert (lengths == sorted(lengths)) is (key is None)  # batches of all lengths are mixed


def test_drop_last_leaves_out_what_does_not_fill_a_batch_of_its_bucket() -> None:
    of = data.buckets([1, 1, 1, 9, 9, 5], [1, 5, 9], batch=np.int64(2))
    got = epoch(of, 0, fs.key(0), drop_last=True)
    assert [len(b.rows) for b in got] == [2, 2]
    assert sorted(b.length for b in got) == [1, 9]
    left_out = {tuple(sorted({0, 1, 2} - {r for b in epoch(of, n, fs.key(0), drop_last=True) for r in b.rows.tolist()}))
                for n in range(8)}  # fmt: skip
    assert len(left_out) > 1  # another one in each epoch
    assert error_text(data.buckets([1, 5], [1, 5], batch=2).indices, None, step=0, drop_last=True) == (
        "indices: no bucket fills a batch\n"
        "  Buckets(1 up to 1 in batches of 2, 1 up to 5 in batches of 2)\n"
        "  fix: smaller batches, or drop_last=False"
    )


def test_batches_of_buckets_need_less_padding() -> None:
    of = data.buckets(LENGTHS, [10, 20, 30, 40, 50], batch=10)
    padded = sum(len(b.rows) * b.length for b in epoch(of, 0, fs.key(0)))
    assert padded < LENGTHS.sum() + 10 * 97 < 50 * 97


@pytest.mark.parametrize("axes", [{"data": 1}, {"data": 2}, {"data": 4}, {"model": 2, "data": 3}], ids=str)
def test_bucketed_texts_are_loaded_alike_on_every_mesh(axes: dict[str, int]) -> None:
    texts = [np.arange(n) + 1 for n in LENGTHS]
    of, mesh = data.buckets(LENGTHS, EDGES, batch=BATCH), fs.make_mesh(**axes)
    for step in range(0, 60, 7):  # in the second epoch too
        rows, _, length = of.indices(fs.key(2), step=step, even=step % 2 == 0)
        fetch = lambda i, length=length: dict(  # noqa: E731
            zip(("ids", "mask"), data.pad([texts[j] for j in i], length=length), strict=True))  # fmt: skip
        got = fs.device_get(data.load(fetch, rows, mesh=mesh))  # of a batch of one, ranks have no rows
        assert got["ids"].shape == (len(rows), length)
        assert got["mask"].sum(1).tolist() == LENGTHS[rows].tolist()
        for i, r in enumerate(rows.tolist()):
            assert got["ids"][i].tolist() == texts[r].tolist() + [0] * (length - len(texts[r]))


def test_pad() -> None:
    for rows in (
        [[1, 2], [3], []],
        [torch.tensor([1, 2]), np.array([3], np.uint16), torch.zeros(0, dtype=torch.int32)],
    ):
        tokens, mask = data.pad(rows, length=3, value=9)
        assert tokens.tolist() == [[1, 2, 9], [3, 9, 9], [9, 9, 9]]
        assert mask.int().tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 0]]
        assert (tokens.dtype, mask.dtype) == (torch.int64, torch.bool)
        tokens, mask = data.pad(rows, length=3, side="left")
        assert tokens.tolist() == [[0, 1, 2], [0, 0, 3], [0, 0, 0]]
        assert mask.int().tolist() == [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
    assert [x.shape for x in data.pad([], length=2)] == [(0, 2), (0, 2)]


def test_errors() -> None:
    assert error_text(data.pad, [[1], [1, 2, 3], [1, 2]], length=1) == (
        "pad: rows are longer than length=1\n  rows[1] has 3, rows[2] has 2\n"
        "  fix: a larger length, or cut the rows: row[:length]"
    )
    assert "pad: rows[1] has the shape []" in error_text(data.pad, [[1], torch.tensor(3)], length=4)
    assert "pad: rows[0] are float32" in error_text(data.pad, [torch.ones(2)], length=4)
    assert error_text(data.buckets, LENGTHS, [8, 40], batch=2) == (
        f"buckets: {(LENGTHS > 40).sum()} examples are longer than the last of boundaries, 40\n"
        f"  the longest has {LENGTHS.max()} tokens, example {LENGTHS.argmax()}\n"
        "  fix: cut them, and pass lengths.clip(max=40); or one more boundary"
    )
    assert error_text(data.buckets, [-1, 3], [8, 8], batch=[2]) == (
        "3 problems\n"
        "buckets: lengths have -1\n  fix: one dim: the length of each example, 0 or more\n"
        "buckets: boundaries=[8, 8]\n  fix: increasing lengths: [32, 64, 128]\n"
        "buckets: batch=[2] for 2 boundaries\n  fix: 1 or more; one for each bucket"
    )
    of = data.buckets(LENGTHS, EDGES, batch=BATCH)
    assert error_text(of.indices, None, step=of.steps(), epoch=0).startswith(
        f"indices: epoch 0 has no step {of.steps()}"
    )
    assert "step=-1" in error_text(of.indices, None, step=-1)
