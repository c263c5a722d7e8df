"""The classification recipe: the same losses on every mesh, with the classes over any of its axes; what it draws."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fshard as fs
from fshard import P, checkpoint
from fshard.recipes import classify, glyphs, pictures
from tests.lib.curves import assert_same_curve, metrics

CLASSES = ("cat", "dog", "eel", "fox", "gnu")  # 5 classes over 4 ranks: 2, 2, 1 and none
SMALL = ["--steps", "4", "--batch", "8", "--width", "4"]
RTOL = 1e-4  # of a curve: rounding of another order of sums grows with the steps
MESHES = {
    "data=2": "--mesh data=2",
    "model=2": "--mesh model=2 --head model",
    "data=2,model=2 over all": "--mesh data=2,model=2",
    "data=2,model=2 over model": "--mesh data=2,model=2 --head model --zero",
    "data=2,model=2 over none": "--mesh data=2,model=2 --head replicated --zero",
}
SETTINGS = {
    "plain": "",
    "short": "--steps 2",
    "frozen statistics": "--batch-stats frozen",
    "sampled classes with a margin": "--partial-fc 0.5 --margin arcface",
    "more classes": "--classes 9 --margin cosface",
}
CASES = [
    ("data=2,model=2 over all", "sampled classes with a margin"),
    ("data=2", "plain"), ("data=2", "frozen statistics"), ("model=2", "frozen statistics"), ("model=2", "more classes"),
    ("data=2,model=2 over all", "plain"), ("data=2,model=2 over all", "frozen statistics"),
    ("data=2,model=2 over model", "plain"), ("data=2,model=2 over none", "sampled classes with a margin"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return draw_images(tmp_path_factory.mktemp("images"))


def draw_images(root):
    """Write 60 images of noise, around a grey of each class, and return the folder."""
    rng = np.random.default_rng(0)
    for label, name in enumerate(CLASSES):
        (root / name).mkdir()
        for i in range(12):
            pixels = rng.integers(0, 120, (8, 9, 3)) + 25 * label
            Image.fromarray(pixels.astype(np.uint8)).save(root / name / f"{i}.png")
    return str(root)


def run(out, folder, *flags):
    classify.main([*SMALL, "--folder", folder, "--out", str(out), *flags])
    return metrics(out)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a run of two steps on one device."""
    return tmp_path_factory.mktemp("one") / "short"


@pytest.fixture(scope="module")
def on_one(folder, saved):
    """A function from a setting to its curve on one device."""
    curves = {}

    def curve(setting):
        if setting not in curves:
            curves[setting] = run(saved.with_name(setting), folder, *SETTINGS[setting].split())
        return curves[setting]

    return curve


@pytest.mark.slow  # the default tier has a run that resumes on another mesh
@pytest.mark.parametrize(("name", "setting"), CASES)
def test_the_mesh_never_changes_the_curve(name, setting, folder, on_one, tmp_path):
    got = run(tmp_path / "out", folder, *SETTINGS[setting].split(), *MESHES[name].split())
    assert_same_curve(got, on_one(setting), rtol=RTOL)
    if setting != "plain":
        assert abs(got[0]["loss"] - on_one("plain")[0]["loss"]) > 1e-2


@pytest.mark.slow
def test_a_run_resumes_on_another_mesh_and_its_pictures_show_all_of_it(folder, on_one, tmp_path):
    out = tmp_path / "out"
    run(out, folder, "--steps", "2", "--save-every", "1", "--mesh", "data=2", "--head", "model", "--zero")
    assert checkpoint.steps(out) == [1, 2]
    shutil.rmtree(out / "step_000002")
    (out / "loss.png").unlink()
    classify.main([*SMALL, "--steps", "2", "--folder", folder, "--resume", str(out), "--mesh", "model=2"])
    assert_same_curve(metrics(out), on_one("short"), rtol=RTOL)
    for name in ("loss.png", "confusion.png"):
        with Image.open(out / name) as picture:
            assert min(picture.size) > 300
            assert len(picture.convert("RGB").getcolors(1 << 20)) > 10  # lines and text, not an empty page
    classify.main([*SMALL, "--steps", "3", "--folder", folder, "--resume", str(out)])
    assert [row["step"] for row in metrics(out)] == [0, 1, 2]


@pytest.mark.slow
def test_half_precision_follows_the_curve(folder, on_one, tmp_path):
    one = run(tmp_path / "float16", folder, "--dtype", "float16")
    assert abs(one[-1]["loss"] - on_one("plain")[-1]["loss"]) < 0.1
    two = run(tmp_path / "mesh", folder, "--dtype", "float16", "--mesh", "data=2", "--head", "replicated", "--zero")
    assert abs(two[-1]["loss"] - one[-1]["loss"]) < 2e-2


@pytest.mark.slow
def test_full_disk_leaves_the_arguments_of_the_run_that_is_resumed(folder, saved, on_one, tmp_path, monkeypatch):
    on_one("short")
    out = tmp_path / "out"
    shutil.copytree(saved, out)

    def full(path, text):
        path.open("w").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    line = refusal("--steps", "2", "--folder", folder, "--resume", str(out))
    assert line.startswith("cannot write metrics.jsonl: No space left on device: make room; step 2 is saved: resume ")
    assert (out / "arguments.json").read_bytes() == (saved / "arguments.json").read_bytes()


# --- images ---------------------------------------------------------------------------------------------------------


def test_augmentation_is_of_the_image_and_the_key_on_every_mesh():
    images = fs.random.uniform(fs.key(1), (8, 1, 32, 32))

    def on(**axes):
        f = fs.shard_map(lambda x: classify.augment(fs.key(3), x, 8), mesh=fs.make_mesh(**axes),
                         in_specs=(P(("data", "model")),), out_specs=P(("data", "model")))  # fmt: skip
        return fs.device_get(f(images))

    one = on(data=1, model=1)
    assert torch.equal(on(data=2, model=2), one)
    assert all(not torch.equal(a, b) for a, b in zip(one, images, strict=True))
    assert 0 <= one.min() < one.max() <= 1


def test_augmentation_moves_an_image_by_at_most_two_pixels():
    dot = torch.zeros(400, 1, 32, 32)
    dot[:, :, 15:17, 15:17] = 1
    f = fs.shard_map(lambda x: classify.augment(fs.key(3), x, 400), mesh=fs.make_mesh(data=1, model=1),
                     in_specs=(P(("data", "model")),), out_specs=P(("data", "model")))  # fmt: skip
    out = fs.device_get(f(dot))[:, 0]
    at = torch.arange(32) - 15.5
    weights = out.sum((1, 2))
    for dim in (1, 2):
        moved = (out.sum(3 - dim) * at).sum(1) / weights
        assert 1.5 < moved.abs().max() < 2.6  # 0.125 of half the width is 2 pixels, 10% stretched


def image(*pixels):
    out = np.zeros((glyphs.SIZE, glyphs.SIZE), np.uint8)
    out[0, : len(pixels)] = pixels
    return out


def test_characters_that_look_alike_anywhere_are_one_class_and_no_test_image_is_trained_on():
    drawn = [  # (character, image, for testing)
        ("A", image(1), False), ("A", image(2), True),
        ("Б", image(3), False), ("Б", image(2), True),  # as an A in the second face
        ("C", image(3), False), ("C", image(4), True),  # as a Б in the first face, so with A in one class
        ("D", image(5), False), ("D", image(5), True),  # the same in both faces: for training alone
        ("E", image(6), False), ("E", image(), True),  # invisible in one face: left out
        ("E", image(9), False),
        ("F", image(7), False), ("F", image(8), True),
    ]  # fmt: skip
    codes, images, tests = zip(*drawn, strict=True)
    merged = glyphs.merge(np.array([ord(c) for c in codes]), np.stack(images), np.array(tests))
    assert merged.names == ["A", "D", "F"]
    seen = [[(int(x[0, 0]), int(y)) for x, y in zip(*part, strict=True)] for part in (merged.train, merged.test)]
    assert seen == [[(1, 0), (3, 0), (3, 0), (5, 1), (7, 2)],
                    [(2, 0), (2, 0), (4, 0), (8, 2)]]  # fmt: skip


def test_glyphs_of_the_fonts(monkeypatch):
    every = glyphs.characters
    chosen = {ord(c) for c in "AΑАaаO0 Ж→"}  # A of Latin, Greek and Cyrillic; a of Latin and Cyrillic
    monkeypatch.setattr(glyphs, "characters", lambda face: every(face) & chosen)
    drawn = glyphs.load()
    assert drawn.names == ["0", "A", "O", "a", "Ж", "→"]
    counts = np.bincount(drawn.train[1]).tolist(), np.bincount(drawn.test[1]).tolist()
    assert counts[0] == [9 * n for n in (1, 3, 1, 2, 1, 1)]  # of nine typefaces
    assert counts[1][:5] == [3 * n for n in (1, 3, 1, 2, 1)]  # of three unseen ones
    assert counts[1][5] < 3  # an arrow is the same in several
    assert not {x.tobytes() for x in drawn.test[0]} & {x.tobytes() for x in drawn.train[0]}
    assert drawn.train[0].shape[1:] == (32, 32)
    assert all(drawn.train[0].reshape(len(drawn.train[0]), -1).max(1) > 128)


@pytest.mark.slow
def test_the_characters_of_the_default_run():
    drawn = glyphs.load()
    assert len(drawn.names) == 2180
    assert (len(drawn.train[1]), len(drawn.test[1])) == (21267, 5353)
    assert set(drawn.test[1]) <= set(drawn.train[1])


def test_han_and_hangul_characters_are_drawn_in_regional_typefaces(monkeypatch):
    every = glyphs.characters
    chosen = {ord(c) for c in "A直한"}
    monkeypatch.setattr(glyphs, "characters", lambda face: every(face) & chosen)
    drawn = glyphs.load(cjk=True)
    assert drawn.names == sorted("A直한")
    han, hangul = drawn.names.index("直"), drawn.names.index("한")
    assert len({x.tobytes() for x in drawn.train[0][drawn.train[1] == han]}) > 1  # it differs between regions
    assert len({x.tobytes() for x in drawn.train[0][drawn.train[1] == hangul]}) == 1  # it does not
    assert not (drawn.test[1] == hangul).any()


def test_a_missing_font_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "noto_cjk_sans_otc", None)
    assert refusal("--cjk").endswith("pip install noto-cjk-sans-otc, or give --folder DIR")


def test_files_whose_names_are_not_unicode_are_images_too(tmp_path):
    draw_images(tmp_path)
    try:
        os.rename(tmp_path / "cat" / "0.png", os.fsencode(tmp_path / "cat") + b"/\xff.png")
    except OSError:
        pytest.skip("this file system has no such names")
    images = classify.Images.of(classify.Options.parse(["--folder", str(tmp_path)]))
    assert len(images.train) + len(images.test) == 60


# --- pictures -------------------------------------------------------------------------------------------------------


def test_most_confused_classes_come_first_with_the_counts_of_each_mistake():
    targets = np.array([0, 0, 0, 1, 1, 2, 3, 3, 4])
    found = np.array([1, 1, 0, 0, 1, 2, 4, 3, 4])
    classes, counts = pictures.most_confused(targets, found, most=4)
    assert classes.tolist() == [0, 1, 3, 4]  # class 2 is never wrong
    assert counts.tolist() == [[1, 2, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1]]
    assert pictures.most_confused(targets, found, most=3)[0].tolist() == [0, 1]
    assert pictures.most_confused(targets, targets)[1].shape == (0, 0)


def test_a_run_without_mistakes_and_classes_without_names_are_drawn(tmp_path):
    x = np.arange(3)
    pictures.confusion(tmp_path / "none.png", x, x, ["a"])
    pictures.confusion(tmp_path / "all.png", x, x[::-1], ["$a$b$", "直"])  # a glyph that is missing would warn
    assert all((tmp_path / f"{name}.png").stat().st_size > 1000 for name in ("none", "all"))


# --- refusals, each one line ----------------------------------------------------------------------------------------


def refusal(*flags):
    """The one line that ends a run."""
    with pytest.raises(SystemExit) as e:
        classify.main([*SMALL, *flags])
    line = str(e.value)
    assert line.startswith("classify: ")
    assert "\n" not in line
    return line.removeprefix("classify: ")


@pytest.mark.parametrize(("flags", "want"), [
    ("--partial-fc 0", "--partial-fc 0.0: give a share above 0, at most 1"),
    ("--partial-fc nan", "--partial-fc nan: give a share above 0, at most 1"),
    ("--partial-fc 0.1 --dtype float16", "--partial-fc 0.1 --dtype float16: a step that the loss scale skips would "),
    ("--partial-fc 0.1 --compile", "--partial-fc 0.1 --compile: how many sampled classes a rank has depends on the "),
    ("--cjk --folder {folder}", "--folder --cjk: give one of the two"),
    ("--mesh data=2 --compile", "--compile --mesh data=2: the ranks are threads, which one compiler serves: give one"),
    ("--mesh data=3", "--batch 8: the 3 ranks must have equal parts, and 8 % 3 = 2: give --batch 9"),
    ("--mesh data=4,model=4", "--batch 8: the 16 ranks must have equal parts, and 8 % 16 = 8: give --batch 16"),
    ("--mesh data=9", "--mesh data=9: data=9 ranks have nothing to do with --batch 8: give at most data=8"),
    ("--folder {tmp}", "image_folder: {tmp} has no sub-folders"),
    ("--folder {tmp}/none", "image_folder: {tmp}/none is not a folder"),
    ("--folder {folder} --batch 64", "--batch 64: there are only "),
    ("--folder {folder} --classes 3", "--classes 3: the images have 5: give 5 or more, or leave it out"),
    ("--folder {folder} --resume {saved} --steps 2 --lr 1",
     "--resume {saved}: it was trained with other arguments: give --lr"),
    ("--folder {other} --resume {saved} --steps 2",
     "--resume {saved}: it was trained with other arguments: give --folder "),
])  # fmt: skip
def test_what_no_run_can_have_is_refused_in_one_line(flags, want, folder, saved, on_one, tmp_path):
    on_one("short")
    other = tmp_path / "other"
    for name in ("a", "b"):
        (other / name).mkdir(parents=True)
        for i in range(30):
            Image.new("RGB", (4, 4)).save(other / name / f"{i}.png")
    empty = tmp_path / "empty"
    empty.mkdir()
    names = {"tmp": empty, "folder": folder, "saved": saved, "other": other}
    assert refusal(*flags.format(**names).split()).startswith(want.format(**names))
