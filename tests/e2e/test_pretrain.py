"""The pretraining recipe: the losses of 50 steps are the same on every mesh, and after resuming on another one."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest
import torch

from fshard import checkpoint, pmean
from fshard.models import transformer
from fshard.recipes import pretrain

TEXT = "\n".join(f"def f{i}(x, y={i}):\n    return x * {i} + y  # line {i * i}\n" for i in range(600))
SMALL = [
    "--steps", "50", "--batch", "8", "--context", "16", "--layers", "2", "--heads", "3", "--width", "24",
    "--lr", "1e-3",
]  # fmt: skip
MESHES = {
    "data=2": "--mesh data=2",
    "model=2": "--mesh model=2",
    "data=2,model=2": "--mesh data=2,model=2",
    "data=4 fsdp": "--mesh data=4 --fsdp",
    "data=2,model=2 fsdp sequence": "--mesh data=2,model=2 --fsdp --sequence-parallel",
    "model=4": "--mesh model=4",  # 257 tokens and 3 heads over 4
}
FAST = "model=2"  # the others are slow


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text(TEXT)
    return str(path)


def run(out, text, *flags):
    pretrain.main([*SMALL, "--text", text, "--out", str(out), *flags])
    return metrics(out)


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def assert_same_curve(got, want):
    """1e-6 relative over the first 5 steps, 1e-4 over all, in loss and in gradient norm."""
    assert [m["step"] for m in got] == [m["step"] for m in want]
    for a, b in zip(got, want, strict=True):
        rtol = 1e-6 if a["step"] < 5 else 1e-4
        for name in ("loss", "grad_norm"):
            assert abs(a[name] - b[name]) <= rtol * abs(b[name]), (a["step"], name, a[name], b[name])
        assert a["lr"] == b["lr"]


@pytest.fixture(scope="module")
def one(text, tmp_path_factory):
    return run(tmp_path_factory.mktemp("one"), text)


@pytest.fixture(scope="module")
def one_with_dropout(text, tmp_path_factory):
    return run(tmp_path_factory.mktemp("one"), text, "--dropout", "0.1")


def test_the_loss_falls(one):
    assert [m["step"] for m in one] == list(range(50))
    assert one[0]["loss"] == pytest.approx(5.55, abs=0.2)  # about ln 257
    assert one[-1]["loss"] < 5
    assert all(m["tokens_per_s"] > 0 for m in one)


@pytest.mark.parametrize("name", [name if name == FAST else pytest.param(name, marks=pytest.mark.slow)
                                  for name in MESHES])  # fmt: skip
def test_the_mesh_never_changes_the_curve(name, text, one, tmp_path):
    assert_same_curve(run(tmp_path, text, *MESHES[name].split()), one)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data=2", "data=2,model=2 fsdp sequence", "model=4"])
def test_the_mesh_never_changes_the_curve_with_dropout(name, text, one, one_with_dropout, tmp_path):
    assert abs(one_with_dropout[9]["loss"] - one[9]["loss"]) > 1e-3
    assert_same_curve(run(tmp_path, text, "--dropout", "0.1", *MESHES[name].split()), one_with_dropout)


@pytest.mark.parametrize(
    ("before", "after"),
    [("data=1", "data=2,model=2 fsdp sequence"), pytest.param("model=4", "data=4 fsdp", marks=pytest.mark.slow)],
)
def test_a_run_resumes_on_another_mesh(before, after, text, one_with_dropout, tmp_path):
    flags = MESHES.get(before, "--mesh data=1").split()
    with pytest.raises(StopError):
        stop_after(25, tmp_path, text, *flags)
    assert checkpoint.latest(tmp_path) == 25
    run(tmp_path, text, "--dropout", "0.1", "--resume", str(tmp_path), *MESHES[after].split())
    assert_same_curve(metrics(tmp_path), one_with_dropout)


class StopError(Exception):
    """Ends a run on purpose."""


def stop_after(step, out, text, *flags):
    """Train as if for 50 steps, and interrupt right after the checkpoint of `step`."""
    saved = checkpoint.save

    def save_and_stop(path, state, *, step, **options):
        saved(path, state, step=step, **options)
        raise StopError

    try:
        checkpoint.save = save_and_stop
        run(out, text, "--dropout", "0.1", "--save-every", str(step), *flags)
    finally:
        checkpoint.save = saved


@pytest.mark.slow
def test_remat_does_not_change_the_curve_and_bfloat16_hardly(text, one, tmp_path):
    assert_same_curve(run(tmp_path / "remat", text, "--remat", "--mesh", "data=2"), one)
    low = run(tmp_path / "bf16", text, "--dtype", "bfloat16")
    assert abs(low[-1]["loss"] - one[-1]["loss"]) < 0.05


@pytest.mark.slow
def test_compile_does_not_change_the_curve(text, one, tmp_path):
    assert_same_curve(run(tmp_path, text, "--compile", "--dropout", "0"), one)


def test_a_sample_is_the_same_on_every_mesh(text, tmp_path, capsys):
    texts = []
    for mesh in ("data=1", "data=2,model=2"):
        pretrain.main([*SMALL, "--text", text, "--steps", "10", "--mesh", mesh, "--sample", "30"])
        out = capsys.readouterr().out
        assert "validation loss" in out
        assert "nats per byte" in out
        texts.append(out.split("written by the model\n")[1])
    assert texts[0] == texts[1]
    assert len(texts[0]) > 20


def test_wrong_flags_are_refused(text):
    with pytest.raises(SystemExit, match="'stage=2' is not data=N or model=N"):
        pretrain.main(["--mesh", "stage=2"])
    with pytest.raises(SystemExit, match="fewer than 9000 sequences"):
        pretrain.main([*SMALL, "--text", text, "--batch", "9000"])


FEW = ["--steps", "4", "--layers", "1"]


def test_verify_passes_and_does_not_change_the_training(text, tmp_path, capsys):
    flags = [*FEW, *MESHES["data=2,model=2 fsdp sequence"].split(), "--dropout", "0.1"]
    plain = run(tmp_path / "plain", text, *flags)
    assert "verified" not in capsys.readouterr().out
    verified = run(tmp_path / "verified", text, *flags, "--verify")
    printed = capsys.readouterr().out
    # all leaves: 16 parameters, two moments of each, count, norm, key, step, loss, norm; none of them is only rounding
    assert re.search(
        r"\nverified: 54 leaves the same on data=2, model=2; data=1, model=2; data=2, model=1; data=1, model=1 "
        r"\(largest relative error \d+e-0[678]\)\nstep     0 ", printed)  # fmt: skip
    assert_same_checkpoints(tmp_path / "verified", tmp_path / "plain")
    assert [(m["loss"], m["grad_norm"]) for m in verified] == [(m["loss"], m["grad_norm"]) for m in plain]


def assert_same_checkpoints(one, other):
    """Bitwise, in every file of tensors."""
    files = [p.relative_to(one) for p in one.rglob("*") if p.suffix == ".safetensors"]
    assert files
    for file in files:
        assert (one / file).read_bytes() == (other / file).read_bytes(), file


def test_verify_on_one_rank_compares_nothing(text, capsys):
    pretrain.main([*SMALL, *FEW, "--text", text, "--verify"])
    assert "\nverified: nothing, as data=1, model=1 has no axis to collapse\n" in capsys.readouterr().out


def test_verify_compares_in_float32_with_training_in_bfloat16(text, tmp_path, capsys):
    flags = [*FEW, "--mesh", "data=2", "--dtype", "bfloat16"]
    assert run(tmp_path / "a", text, *flags, "--verify")[-1]["loss"] == run(tmp_path / "b", text, *flags)[-1]["loss"]
    assert "e-07)" in capsys.readouterr().out


def replace_psum_by_pmean(monkeypatch):
    """Make the model wrong in its values, but not in its types."""
    monkeypatch.setattr(transformer, "psum", pmean)


def test_verify_ends_a_run_of_a_wrong_model(text, tmp_path, monkeypatch):
    replace_psum_by_pmean(monkeypatch)
    with pytest.raises(SystemExit) as e:
        run(tmp_path, text, *FEW, "--mesh", "data=2,model=2", "--verify")
    assert e.value.code not in (None, 0)
    assert "leaves of train_step change with the mesh: collapsing 'model' gives another answer" in str(e.value)
    assert "collapsing 'data'" not in str(e.value)
    assert not (tmp_path / "metrics.jsonl").exists()


# --- real ranks -------------------------------------------------------------------------------------------------


def train_on_rank(out, text, *flags):
    torch.set_num_threads(1)
    os.environ["RANK"] = str(torch.distributed.get_rank())
    pretrain.main([*SMALL, "--text", text, "--out", out, *flags])


@pytest.mark.slow
@pytest.mark.process
def test_real_ranks_have_the_same_curve(text, one, one_with_dropout, tmp_path, ranks):
    for n, plain, dropped in ((2, "data=2", "model=2"), (4, "data=2,model=2 fsdp sequence", "data=4 fsdp")):
        out = tmp_path / f"plain{n}"
        ranks(n, train_on_rank, str(out), text, *MESHES[plain].split(), timeout=120)
        assert_same_curve(metrics(out), one)
        out = tmp_path / f"dropout{n}"
        flags = ["--dropout", "0.1", "--save-every", "25", *MESHES[dropped].split()]
        ranks(n, train_on_rank, str(out), text, *flags, timeout=120)
        assert_same_curve(metrics(out), one_with_dropout)
        # resume from step 25 on a simulated mesh
        shutil.rmtree(out / "step_000050")
        run(out, text, "--dropout", "0.1", "--resume", str(out), "--mesh", "data=2,model=2")
        assert_same_curve(metrics(out), one_with_dropout)


def train_and_verify_on_rank(out, text):
    torch.set_num_threads(1)
    os.environ["RANK"] = str(torch.distributed.get_rank())
    flags = [*SMALL, *FEW, "--text", text, "--mesh", "model=2", "--verify"]
    pretrain.main([*flags, "--out", out])
    with pytest.MonkeyPatch.context() as monkeypatch:
        replace_psum_by_pmean(monkeypatch)
        with pytest.raises(SystemExit) as e:
            pretrain.main(flags)
    return e.value.code


@pytest.mark.process
def test_training_and_verify_on_real_ranks(text, tmp_path, ranks):
    codes = ranks(2, train_and_verify_on_rank, str(tmp_path), text, timeout=120)
    assert "collapsing 'model' gives another answer" in codes[0]
    assert codes[1] == 1
    assert_same_curve(metrics(tmp_path), run(tmp_path / "one", text, *FEW))
