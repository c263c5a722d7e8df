"""Digests of trees that do not depend on the mesh, and checkpoints of a part that know what they belong to."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P, checkpoint
from fshard._core.files.io import Ranks
from fshard.checkpoint import tree_digest as base_module
from fshard.spec import describe
from tests.checkpoint.test_checkpoint import MESHES, place, values
from tests.checkpoint.test_checkpoint_files import rewritten
from tests.lib.assertions import assert_same, error_text
from tests.lib.operations import Operations


def by_the_formula(x: Tensor) -> str:
    """Digest a leaf with Python's integers, word by word, as the docstring of the module says."""
    size = x.element_size()
    kind = {1: np.uint8, 2: np.int16}.get(size, np.int32)
    raw = x.contiguous().view(-1).view(torch.uint8).numpy().view(kind)
    *outer, last = x.shape or (1,)
    words = raw.reshape(*outer, last * max(1, size // 4))
    sums = [0, 0]
    for k, at in itertools.product(range(2), np.ndindex(*words.shape)):
        product = int(words[at])
        for dim, i in enumerate(at):
            product *= int(np.random.Philox(key=2 * dim + k).random_raw(i + 1)[-1])
        sums[k] = (sums[k] + product) % 2**64
    return "".join(f"{n:016x}" for n in sums)


def test_digest_is_that_of_the_formula() -> None:
    for x in values().values():
        assert checkpoint.digest({"x": x})["x"] == f"{describe(x)} {by_the_formula(x)}"
    for dtype in (torch.float64, torch.int64, torch.float32):  # one element, whose stride is 2
        x = torch.arange(2).to(dtype)[1:].as_strided((1,), (2,))
        assert checkpoint.digest({"x": x}) == checkpoint.digest({"x": torch.ones(1, dtype=dtype)})
    # golden, since checkpoints have it
    assert checkpoint.digest({"x": torch.arange(6.0).view(2, 3)}) == {"x": GOLDEN}


GOLDEN = "f32[2, 3] 3adc98783e4000008c05c24812e00000"


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_digest_is_the_same_on_every_mesh_and_with_every_spec(
    axes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    want = checkpoint.digest(values())
    monkeypatch.setattr(base_module, "_BLOCK", 16)  # blocks of each kind: of rows, and of parts of a row
    for choice in range(8):
        assert checkpoint.digest(place(values(), fs.make_mesh(**axes), choice)) == want


def test_digest_differs_for_every_change_of_a_leaf() -> None:
    x = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))
    others = [x.half(), x.view(5, 12), x.view(3, 5, 4), x.view(torch.int32), x.flip(0), x.flip(2), x.mT.contiguous(),
              -x, x[:, [1, 0, 2]], x[[4, 1, 2, 3, 0]]]  # fmt: skip
    for at in np.ndindex(*x.shape):
        for change in (
            lambda v: -v,
            lambda v: torch.nextafter(v, torch.tensor(9.0)),
            lambda v: v * 2,
            torch.zeros_like,
        ):
            other = x.clone()
            other[at] = change(other[at])
            others.append(other)
    swapped = x.clone()
    swapped[0, 0, 0], swapped[1, 1, 1] = x[1, 1, 1], x[0, 0, 0]
    signs = x.clone()
    signs[0, 0, :2] *= -1  # two signs at once
    texts = [checkpoint.digest({"x": y})["x"] for y in (x, *others, swapped, signs)]
    assert len(set(texts)) == len(texts)
    assert checkpoint.digest({"x": x.mT.contiguous().mT})["x"] == texts[0]  # any strides
    zero = checkpoint.digest({"x": torch.tensor([0.0, -0.0])}), checkpoint.digest({"x": torch.tensor([-0.0, 0.0])})
    assert zero[0] != zero[1]


@pytest.mark.parametrize("shape", [(1 << 21,), (2, 1 << 20), (1 << 20, 2), (3, 1024, 1024)], ids=str)
def test_digest_streams_over_the_leaf(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    with Operations() as seen:
        checkpoint.digest({"x": x})
    block = 8 * base_module._BLOCK  # the words, the sums of rows, and a few random factors
    assert seen.peak <= 7 * block + 1000 < x.nbytes


def test_ranks_exchange_little_for_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    run, exchanged = Ranks.run, []

    def measured(ranks: Ranks, job: Any) -> Any:
        exchanged.append(len(pickle.dumps(result := job())))
        return run(ranks, lambda: result)

    monkeypatch.setattr(Ranks, "run", measured)
    checkpoint.digest({f"w{i}": torch.ones(2) for i in range(100)})
    assert exchanged[0] < 100 * 100  # for each leaf two sums, of 8 bytes, and its name


def adapters(mesh: fs.Mesh) -> Any:
    return fs.device_put({"a": torch.ones(4, 2), "b": torch.zeros(2, 4)}, P("data"), mesh)


def test_restore_with_another_base_is_an_error_that_names_the_leaves(tmp_path: Path) -> None:
    mesh, other = fs.make_mesh(data=2), fs.make_mesh(data=3)
    params = {"w": torch.randn(5, 4), "h": [torch.ones(3), torch.ones(2)], "n": 3}
    base = checkpoint.digest(fs.device_put({k: params[k] for k in "wh"}, P("data"), mesh) | {"n": 3})
    saved = checkpoint.save(tmp_path, adapters(mesh), step=3, base=base)
    assert b'"version": 2' in (saved / "manifest.json").read_bytes()
    same = checkpoint.digest(params)  # not placed at all
    assert_same(checkpoint.restore(tmp_path, adapters(other), step=3, base=same), adapters(other))
    assert_same(checkpoint.restore(tmp_path, adapters(other)["a"], step=3, base=same, at="a"), adapters(other)["a"])
    assert list(checkpoint.inspect(saved)) == ["a", "b"]  # nothing of the base is saved

    changed = {"w": params["w"].clone(), "h": [torch.ones(3).bfloat16()], "n": 4, "more": torch.ones(1)}
    changed["w"][4, 3] += 1e-6
    digests = checkpoint.digest(changed)
    assert error_text(checkpoint.restore, tmp_path, adapters(other), step=3, base=digests) == (
        f"restore: {saved} was saved with another base\n"
        f"  differs  h.0  saved with {same['h.0']}, base has {digests['h.0']}\n"
        f"  missing  h.1  {same['h.1']}\n"
        "  differs  n  saved with 3, base has 4\n"
        f"  differs  w  saved with {same['w']}, base has {digests['w']}\n"
        f"  extra    more  {digests['more']}\n"
        "  fix: restore it with the base that it was saved with"
    )
    assert error_text(checkpoint.restore, saved, adapters(mesh)) == (
        f"restore: {saved} belongs to a base: it was saved with base=\n"
        "  fix: base=fs.checkpoint.digest(tree) of the tree that it belongs to"
    )
    plain = checkpoint.save(tmp_path / "plain", adapters(mesh))
    assert b'"version": 1' in (plain / "manifest.json").read_bytes()
    assert error_text(checkpoint.restore, plain, adapters(mesh), base=same) == (
        f"restore: {plain} was saved without base=\n  fix: leave out base="
    )
    assert "fs.checkpoint.digest(tree)" in error_text(checkpoint.save, tmp_path / "x", adapters(mesh), base=params)


def test_base_of_a_manifest_is_checked(tmp_path: Path) -> None:
    mesh = fs.make_mesh(data=1)
    base = checkpoint.digest({"w": torch.ones(3)})
    a = checkpoint.save(tmp_path / "a", adapters(mesh), base=base)
    b = checkpoint.save(tmp_path / "b", adapters(mesh), base=checkpoint.digest({"w": torch.zeros(3)}))
    (b / "manifest.json").write_bytes(
        (a / "manifest.json").read_bytes()
    )  # the header of the part has the base's digest
    assert "the header is damaged" in error_text(checkpoint.restore, b, adapters(mesh), base=base)
    rewritten(a, lambda m: m["base"].update(w=3))
    assert "is malformed" in error_text(checkpoint.inspect, a)


def test_errors_of_digest() -> None:
    text = error_text(checkpoint.digest, {"d": fs.init.zeros(2), "o": object(), "w": torch.ones(2)})
    assert text.startswith("2 problems\ndigest: tree['d']: is only described")
    assert "digest: tree['o']: cannot write a object" in text
    json.dumps(checkpoint.digest({"w": torch.ones(2), "s": "text", "f": 0.1}))  # plain data
