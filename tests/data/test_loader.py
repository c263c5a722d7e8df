"""`data.sampler` and `data.batches` with torch's DataLoader, and folders of images."""

from __future__ import annotations

import errno
import io
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import fshard as fs
from fshard import P, data
from tests.lib.assertions import error_text

MESHES: dict[str, dict[str, int]] = {
    "one": {"data": 1},
    "data=4": {"data": 4},  # of 5 rows the parts are 2, 2, 1 and 0
    "model first": {"model": 2, "data": 3},
    "data first": {"data": 2, "model": 2},
}
SIZE = 11
HOW: dict[str, dict[str, Any]] = {
    "drop": {},
    "short": {"drop_last": False},
    "even": {"even": True},
    "in order": {"key": None, "drop_last": False},
}


class Squares(Dataset[Any]):
    """A map-style dataset that draws: the noise of example i in epoch e is that of their key."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, at: tuple[int, int]) -> dict[str, Any]:
        i, epoch = at
        noise = fs.random.normal(fs.fold_in(fs.fold_in(fs.key(7), epoch), i), (2,))
        return {"x": noise, "i": i, "epoch": epoch}


def on_ranks(monkeypatch: pytest.MonkeyPatch, axes: dict[str, int]) -> list[fs.Mesh]:
    """Return the mesh of each rank as if each were a process, which knows of its own rank alone."""
    meshes = [fs.make_mesh(**axes) for _ in range(fs.make_mesh(**axes).size)]
    for rank, mesh in enumerate(meshes):
        monkeypatch.setattr(mesh, "ranks", (rank,))
    return meshes


KEY = fs.key(3)


def loaded(dataset: Any, mesh: fs.Mesh, key: Any = KEY, *, workers: int = 0, steps: int = 9, **how: Any) -> Any:
    sampler = data.sampler(key, SIZE, how.pop("batch", 4), mesh, **how)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=workers)
    return list(itertools.islice(data.batches(loader), steps))


# --- the order: that of `indices`, on every mesh ------------------------------------------------------------


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES.keys())
def test_batches_are_those_of_indices_on_every_mesh(axes: dict[str, int]) -> None:
    for how, batch in itertools.product(HOW.values(), (6, 1)):
        got = loaded(torch.arange(SIZE) * 10, fs.make_mesh(**axes), **how, batch=batch)
        for step, x in enumerate(got):
            want = data.indices(**({"key": KEY} | how), step=step, size=SIZE, batch=batch)
            assert fs.device_get(x).tolist() == (want * 10).tolist()
            assert x.spec == P("data")


class Drawn(Dataset[Any]):
    """A dataset that gives back what it is asked for."""

    def __getitem__(self, at: tuple[int, int]) -> dict[str, int]:
        return {"i": at[0], "epoch": at[1]}


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES.keys())
def test_each_process_draws_the_rows_of_its_part_and_a_model_group_the_same(
    monkeypatch: pytest.MonkeyPatch, axes: dict[str, int]
) -> None:
    """The sampler that TorchShard announced, with uneven and empty parts; placed as a simulated mesh places them."""
    meshes = on_ranks(monkeypatch, axes)
    for batch in (6, 5, 1):
        how: dict[str, Any] = {"epoch": 1, "drop_last": False}
        whole = loaded(Drawn(), fs.make_mesh(**axes), **how, batch=batch, with_epoch=True, steps=SIZE)
        assert len(whole) == -(-SIZE // batch)
        for rank, mesh in enumerate(meshes):
            at = mesh.coords(rank)["data"]
            drawn = list(data.sampler(KEY, SIZE, batch, mesh, **how))
            placed = loaded(Drawn(), mesh, **how, batch=batch, with_epoch=True, steps=SIZE)
            for step, (rows, own, of_all) in enumerate(zip(drawn, placed, whole, strict=True)):
                want = data.indices(KEY, step=step, size=SIZE, batch=batch, **how)
                per_rank = -(-len(want) // axes["data"])
                part = want[at * per_rank : (at + 1) * per_rank].tolist()
                assert rows == (part or want[:1].tolist())  # the one row of an empty part is not placed
                assert own["i"].shards[0].tolist() == of_all["i"].shards[rank].tolist() == part
                assert own["epoch"].shards[0].tolist() == [1] * len(part)
                assert own["i"].shape == own["epoch"].shape == of_all["i"].shape == (len(want),)


def test_axis_may_be_several_axes_or_none() -> None:
    mesh = fs.make_mesh(data=2, pipe=2, model=2)
    (x, *_) = loaded(torch.arange(SIZE), mesh, None, axis=("data", "pipe"), batch=5, epoch=0)
    assert [s.tolist() for s in x.shards] == [[0, 1], [0, 1], [2], [2], [3], [3], [4], [4]]
    (x, *_) = loaded(torch.arange(SIZE), mesh, None, axis=None, batch=5, epoch=0)
    assert {tuple(s.tolist()) for s in x.shards} == {(0, 1, 2, 3, 4)}


# --- steps and epochs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [None, 2])
def test_a_run_that_resumes_on_another_mesh_has_the_batches_of_one_that_did_not_stop(epoch: int | None) -> None:
    how: dict[str, Any] = {"epoch": epoch, "drop_last": False, "with_epoch": True, "batch": 3}
    whole = loaded(Squares(), fs.make_mesh(data=2), **how)
    again = loaded(Squares(), fs.make_mesh(data=3, model=2), **how, step=2, steps=len(whole) - 2)
    assert len(whole) == (9 if epoch is None else 4)
    for a, b in zip(whole[2:], again, strict=True):
        assert fs.tree.map(lambda x: x.tolist(), fs.device_get(a)) == fs.tree.map(
            lambda x: x.tolist(), fs.device_get(b)
        )


def test_every_iteration_of_a_loader_begins_at_the_step_of_its_sampler() -> None:
    sampler = data.sampler(fs.key(0), SIZE, 4, fs.make_mesh(data=2), step=1, epoch=0)
    assert list(sampler) == list(sampler) == [data.indices(fs.key(0), step=1, size=SIZE, batch=4).tolist()]
    assert len(sampler) == len(DataLoader(torch.arange(SIZE), batch_sampler=sampler)) == 1
    assert len(list(data.sampler(fs.key(0), SIZE, 4, fs.make_mesh(data=2), epoch=0, even=True))) == 3
    with pytest.raises(TypeError, match="no end"):
        len(data.sampler(fs.key(0), SIZE, 4, fs.make_mesh(data=2)))


def test_draws_by_key_differ_between_examples_and_epochs_and_not_between_meshes() -> None:
    one, four = (loaded(Squares(), fs.make_mesh(data=n), with_epoch=True, drop_last=False) for n in (1, 4))
    noise: dict[tuple[int, int], list[float]] = {}
    for a, b in zip(fs.device_get(one), fs.device_get(four), strict=True):
        assert a["x"].equal(b["x"])
        for i, epoch, x in zip(a["i"].tolist(), a["epoch"].tolist(), a["x"].tolist(), strict=True):
            assert noise.setdefault((i, epoch), x) == x
    assert len(noise) == len({tuple(x) for x in noise.values()}) == 3 * SIZE  # 9 steps are 3 epochs


class Failing(Dataset[Any]):
    def __getitem__(self, i: int) -> int:
        if i == 5:
            raise ValueError(f"example {i} is broken")
        return i


def test_workers_give_the_same_batches_in_order_and_raise_their_errors() -> None:
    want, got = (loaded(Squares(), fs.make_mesh(data=2), with_epoch=True, workers=w, steps=5) for w in (0, 2))
    for a, b in zip(fs.device_get(want), fs.device_get(got), strict=True):
        assert fs.tree.map(lambda x: x.tolist(), a) == fs.tree.map(lambda x: x.tolist(), b)
    with pytest.raises(ValueError, match="example 5 is broken"):
        loaded(Failing(), fs.make_mesh(data=2), None, epoch=0)  # torch waits 5 s for a worker that has raised


# --- what a loader collates ---------------------------------------------------------------------------------


def test_other_dims_may_be_split_and_arrays_collated() -> None:
    mesh = fs.make_mesh(data=2, model=2)
    images = [(np.full((3, 4), i, np.float32), i) for i in range(SIZE)]

    def collate(rows: list[Any]) -> Any:
        return {"x": np.stack([x for x, _ in rows]), "y": torch.tensor([y for _, y in rows])}

    loader: DataLoader[Any] = DataLoader(
        images,  # type: ignore[arg-type]
        batch_sampler=data.sampler(fs.key(0), SIZE, 3, mesh),
        collate_fn=collate,
    )
    batch = next(data.batches(loader, spec={"x": P("data", None, "model"), "y": P("data")}))
    want = data.indices(fs.key(0), step=0, size=SIZE, batch=3)
    assert repr(batch) == "{'x': f32[3@data, 3, 4@model], 'y': i64[3@data]}"
    assert fs.device_get(batch)["x"].equal(want[:, None, None].expand(3, 3, 4).float())


def a_loader(dataset: Any = None, collate: Any = None, **how: Any) -> DataLoader[Any]:
    how = {"batch_sampler": data.sampler(None, SIZE, 4, fs.make_mesh(data=2))} | how
    return DataLoader(torch.arange(SIZE) if dataset is None else dataset, collate_fn=collate, **how)  # type: ignore[arg-type]


ERRORS = {
    "axis": (
        lambda: data.sampler(None, SIZE, 4, fs.make_mesh(model=2)),
        ("sampler: the mesh has no axis 'data'\n  shape  [4]    spec  P('data')    mesh  model=2\n"
         "  fix: use one of ['model']"),
    ),
    "step": (
        lambda: data.sampler(None, SIZE, 4, fs.make_mesh(data=2), epoch=1, step=2),
        ("indices: epoch 1 has no step 2\n  11 examples in batches of 4 are 2 steps, 0 to 1\n"
         "  fix: leave out epoch= to count steps from the start of training"),
    ),
    "size": (
        lambda: data.sampler(None, 3, 4, fs.make_mesh(data=2)),
        "steps_per_epoch: 3 examples do not fill a batch of 4\n  3 < 4\n  fix: batch=3 or less, or drop_last=False",
    ),
    "another sampler": (
        lambda: data.batches(DataLoader(torch.arange(3), batch_size=2)),  # type: ignore[arg-type]
        ("batches: the batch sampler of the loader is a BatchSampler, of one process\n"
         "  fix: DataLoader(dataset, batch_sampler=fs.data.sampler(key, len(dataset), batch, mesh))"),
    ),
    "order": (
        lambda: data.batches(a_loader(num_workers=1, in_order=False)),
        ("batches: the loader returns batches in the order in which they are ready\n"
         "  each mesh, and each run, would have another\n  fix: in_order=True"),
    ),
    "another size": (
        lambda: data.batches(a_loader(torch.arange(SIZE + 2))),
        ("batches: the dataset has 13 examples, the sampler 11\n"
         "  fix: sampler(key, 13, ...); torch.utils.data.Subset for a part of a dataset"),
    ),
    "spec": (
        lambda: data.batches(a_loader(), spec=P(None, "data")),
        ("batches: spec=P(None, 'data') splits dim 0 by other axes than the sampler, P('data')\n"
         "  fix: sampler(..., axis=) and spec= name the same axes"),
    ),
    "rows": (
        lambda: next(data.batches(a_loader(collate=lambda rows: {"n": torch.tensor(len(rows))}))),
        "batches: batch['n'] is i64[], of 4 examples\n  fix: collate_fn= returns a row for each example, in dim 0",
    ),
    "too many rows": (
        lambda: next(data.batches(a_loader(collate=lambda rows: np.zeros((len(rows) + 1, 2), np.int32)))),
        "batches: batch is int32[5, 2], of 4 examples\n  fix: collate_fn= returns a row for each example, in dim 0",
    ),
    "strings": (
        lambda: next(data.batches(a_loader([{"name": "a"}] * SIZE))),
        ("load: batch['name'][0]: fetch returned a str\n"
         "  fix: return tensors or numpy arrays, or a tree of them\n"
         "  the same for batch['name'][1], batch['name'][2], batch['name'][3]"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "text"), ERRORS.values(), ids=ERRORS.keys())
def test_error_texts(call: Any, text: str) -> None:
    assert error_text(call) == text


# --- folders of images --------------------------------------------------------------------------------------

Image = pytest.importorskip("PIL.Image")


def write_image(path: Path, pixels: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, np.uint8)).save(path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Images whose pixels are known: a class of nested folders, other suffixes, hidden files, other modes."""
    grey = np.arange(12).reshape(3, 4) * 20
    write_image(tmp_path / "dog" / "b.png", np.stack([grey, grey + 1, grey + 2], -1))
    write_image(tmp_path / "dog" / "a" / "z.PNG", grey)
    write_image(tmp_path / "cat" / "1.bmp", np.dstack([grey] * 3))
    write_image(tmp_path / "cat" / "alpha.png", np.dstack([grey] * 4))
    write_image(tmp_path / "cat" / ".hidden.png", grey)
    write_image(tmp_path / ".cache" / "x.png", grey)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "labels.csv").write_text("no class")
    return tmp_path


def test_an_image_folder_has_sorted_classes_and_files_and_decodes_pixels(photos: Path) -> None:
    images = data.image_folder(photos)
    grey = torch.arange(12, dtype=torch.uint8).view(3, 4) * 20
    assert images.classes == ("cat", "dog")
    assert images.files == ("cat/1.bmp", "cat/alpha.png", "dog/a/z.PNG", "dog/b.png")
    assert images.labels == (0, 0, 1, 1)
    assert repr(images) == f"ImageFolder({photos}: 4 images of 2 classes)"
    for i, label in enumerate(images.labels):
        pixels, got = images[i]
        assert got == label
        assert pixels.is_contiguous()
        assert pixels.equal(torch.stack([grey, grey + (i == 3), grey + 2 * (i == 3)]))
    assert data.image_folder(photos, mode="L")[2][0].equal(grey[None])


def test_images_are_scaled_to_cover_a_size_and_their_middle_is_cut_out(photos: Path) -> None:
    grey = torch.arange(12.0).view(3, 4) * 20
    for size in [(3, 4), (3, 2), (6, 8), (2, 2), (1, 9)]:
        pixels, _ = data.image_folder(photos, size=size, mode="L")[2]
        assert pixels.shape == (1, *size)
        scale = max(size[0] / 3, size[1] / 4)
        # independent: the mean of a symmetric middle of a linear ramp is its mean
        assert abs(pixels.float().mean() - grey.mean()) < 1 + 20 * max(0.0, 1 - scale)
        if size == (3, 4):
            assert pixels[0].equal(grey.byte())
        if size == (3, 2):
            assert pixels[0].equal(grey[:, 1:3].byte())
    for side, to in [(47, 96), (49, 64), (31, 299)]:  # side / (to / side) is rounded up, to above the size of the image
        write_image(photos / "dog" / "a" / "z.PNG", np.full((side, side), 7))
        assert data.image_folder(photos, size=(to, to), mode="L")[2][0].equal(torch.full((1, to, to), 7).byte())


def test_an_image_folder_is_loaded_alike_on_every_mesh(photos: Path) -> None:
    images = data.image_folder(photos, size=(2, 2))
    want = [images[i] for i in data.indices(fs.key(0), step=1, size=4, batch=3, drop_last=False).tolist()]
    for axes in MESHES.values():
        sampler = data.sampler(fs.key(0), 4, 3, fs.make_mesh(**axes), step=1, drop_last=False)
        x, y = fs.device_get(next(data.batches(DataLoader(images, batch_sampler=sampler))))
        assert x.equal(torch.stack([pixels for pixels, _ in want]))
        assert y.tolist() == [label for _, label in want]


def test_an_image_is_read_by_the_format_of_its_suffix_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_image(tmp_path / "class" / "a.png", [[7]])
    whole = io.BytesIO()
    Image.fromarray(np.full((8, 8), 7, np.uint8)).save(whole, "JPEG")
    (tmp_path / "class" / "b.png").write_bytes(whole.getvalue())
    (tmp_path / "class" / "c.png").write_text(
        "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
    )
    Image.init()
    monkeypatch.setitem(Image.OPEN, "EPS", (lambda *_: pytest.fail("PostScript was interpreted"), None))
    images = data.image_folder(tmp_path)
    assert images[0][0].tolist() == [[[7]]] * 3
    assert error_text(images.__getitem__, 1) == (
        f"image_folder: {tmp_path / 'class' / 'b.png'} is of the format JPEG, and its suffix names PNG\n"
        "  fix: give it the suffix of its format, or write it again"
    )
    assert "c.png cannot be read as an image" in error_text(images.__getitem__, 2)


def test_errors_of_image_folders_name_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error_text(data.image_folder, tmp_path / "x") == (
        f"image_folder: {tmp_path / 'x'} is not a folder\n  fix: a folder with a sub-folder of images for each class"
    )
    assert error_text(data.image_folder, tmp_path) == (
        f"image_folder: {tmp_path} has no sub-folders\n  fix: one sub-folder for the images of each class"
    )
    (tmp_path / "empty").mkdir()
    write_image(tmp_path / "full" / "a.png", [[0]])
    assert error_text(data.image_folder, tmp_path).startswith(
        f"image_folder: 1 of the 2 classes in {tmp_path} have no images\n  empty\n  suffixes of images: .bmp"
    )
    whole = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40), np.uint8)).save(whole, "PNG")
    for name, content in {"text.png": b"no image", "cut.png": whole.getvalue()[:900], "none.png": b""}.items():
        (tmp_path / "empty" / name).write_bytes(content)
    images = data.image_folder(tmp_path)
    for i, name in enumerate(["cut.png", "none.png", "text.png"]):
        text = error_text(images.__getitem__, i)
        assert text.startswith(f"image_folder: {tmp_path / 'empty' / name} cannot be read as an image\n")
    Image.fromarray(np.full((2, 2), 300, np.uint16)).save(tmp_path / "empty" / "cut.png")
    assert error_text(images.__getitem__, 0) == (
        f"image_folder: {tmp_path / 'empty' / 'cut.png'} has pixels of more than 8 bits, Pillow's mode 'I;16'\n"
        "  fix: scale them to 0 to 255, and write it with 8 bits"
    )
    (tmp_path / "full" / "all").symlink_to("..")
    assert error_text(data.image_folder, tmp_path) == (
        f"image_folder: {tmp_path / 'full' / 'all'} is a link to a folder that it is in\n  {tmp_path.resolve()}\n"
        "  fix: remove the link: each image would be found again and again"
    )
    (tmp_path / "full" / "all").unlink()
    (tmp_path / "full" / "more").symlink_to("../empty")  # a circle of links between two classes
    (tmp_path / "empty" / "more").symlink_to("../full")
    assert error_text(data.image_folder, tmp_path).startswith(
        f"image_folder: {tmp_path / 'empty' / 'more' / 'more'} is a link to a folder that it is in\n"
        f"  {(tmp_path / 'empty').resolve()}\n"
    )
    (tmp_path / "empty" / "more").unlink()
    followed = data.image_folder(tmp_path).files
    assert followed == tuple(f"{at}/{name}.png" for at, names in {"empty": ["cut", "none", "text"], "full": ["a"],
                             "full/more": ["cut", "none", "text"]}.items() for name in names)  # fmt: skip
    for link, target, why in [("class", "gone", "No such file"), ("full/x.png", "x.png", "Too many levels")]:
        (tmp_path / link).symlink_to(target)
        assert error_text(data.image_folder, tmp_path).startswith(
            f"image_folder: {tmp_path / link} is a link to {target}, which cannot be read\n  {why}"
        )
        (tmp_path / link).unlink()
    scan = os.scandir

    def deny(path: Any) -> Any:
        if Path(path).name == "empty":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", deny)
        assert error_text(data.image_folder, tmp_path) == (
            f"image_folder: {tmp_path / 'empty'} cannot be read\n  Permission denied"
        )
    assert "mode='CMYK'" in error_text(data.image_folder, tmp_path, mode="CMYK")
    assert "size=(0, 2)" in error_text(data.image_folder, tmp_path, size=(0, 2))
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    assert error_text(data.image_folder, tmp_path).endswith("fix: pip install 'fshard[images]'")
