"""The pretraining recipe: the losses of 20 steps are the same on every mesh, and after resuming on another one."""

from __future__ import annotations

import os
import re
import shlex
import shutil

import pytest
import torch

from fshard import checkpoint, pmean
from fshard.checkpoint import commit
from fshard.models import transformer
from fshard.recipes import classify, pretrain
from fshard.recipes.log import read_metrics
from tests.e2e import test_classify
from tests.lib import curves
from tests.lib.curves import metrics

TEXT = "\n".join(f"def f{i}(x, y={i}):\n    return x * {i} + y  # line {i * i}\n" for i in range(600))
SMALL = [
    "--steps", "20", "--batch", "8", "--context", "16", "--layers", "2", "--heads", "3", "--width", "24",
    "--lr", "3e-3",
]  # fmt: skip
MESHES = {
    "data=4 fsdp": "--mesh data=4 --fsdp",
    "data=3 zero": "--mesh data=3 --zero",
    "data=2,model=2 zero sequence": "--mesh data=2,model=2 --zero --sequence-parallel",
    "data=2,model=2 fsdp sequence": "--mesh data=2,model=2 --fsdp --sequence-parallel",
    "model=4": "--mesh model=4",  # 257 tokens and 3 heads over 4
    "data=2,seq=2 fsdp": "--mesh data=2,seq=2 --fsdp",
    "data=2,seq=2 zero": "--mesh data=2,seq=2 --zero",
    "data=2,stage=2 fsdp": "--mesh data=2,stage=2 --fsdp --schedule zero_bubble --microbatches 2",
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text(TEXT)
    return str(path)


def run(out, text, *flags):
    pretrain.main([*SMALL, "--text", text, "--out", str(out), *flags])
    return metrics(out)


def assert_same_curve(got, want):
    """1e-6 relative over the first 5 steps, 1e-4 over all."""
    curves.assert_same_curve(got[:5], want[:5], rtol=1e-6)
    curves.assert_same_curve(got, want, rtol=1e-4)


@pytest.fixture(scope="module")
def one(text, tmp_path_factory):
    return run(tmp_path_factory.mktemp("one"), text)


@pytest.fixture(scope="module")
def one_with_dropout(text, tmp_path_factory):
    return run(tmp_path_factory.mktemp("one"), text, "--dropout", "0.1")


def test_the_loss_falls(one):
    assert [m["step"] for m in one] == list(range(20))
    assert one[0]["loss"] == pytest.approx(5.55, abs=0.2)  # about ln 257
    assert one[-1]["loss"] < 5
    assert all(m["tokens_per_s"] > 0 for m in one)


@pytest.mark.slow
def test_a_mixture_of_eight_experts_has_one_curve_and_norm_on_every_mesh_and_resumes_on_another(text, tmp_path):
    """The norm counts each expert once (Automodel#3816, Megatron-LM#5916)."""
    flags, out = ["--experts", "8", "--steps", "6"], tmp_path / "out"
    one = run(tmp_path / "one", text, *flags)
    assert one[-1]["loss"] < one[0]["loss"]
    with pytest.raises(StopError):
        stop_after(3, out, text, *flags, *MESHES["data=2,model=2 fsdp sequence"].split())
    run(out, text, *flags, "--resume", str(out), *MESHES["data=2,stage=2 fsdp"].split())
    assert_same_curve(metrics(out), one)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data=2,model=2 zero sequence", "data=2,model=2 fsdp sequence", "model=4",
                                  "data=2,seq=2 fsdp", "data=2,seq=2 zero", "data=2,stage=2 fsdp"])  # fmt: skip
def test_the_mesh_never_changes_the_curve_with_dropout(name, text, one, one_with_dropout, tmp_path):
    assert abs(one_with_dropout[9]["loss"] - one[9]["loss"]) > 1e-3
    assert_same_curve(run(tmp_path, text, "--dropout", "0.1", *MESHES[name].split()), one_with_dropout)


@pytest.mark.parametrize(
    ("before", "after", "step", "steps"),
    [
        ("data=1", "data=2,model=2 fsdp sequence", 1, 2),
        pytest.param("data=3 zero", "data=4 fsdp", 14, 20, marks=pytest.mark.slow),
        pytest.param("data=2,stage=2 fsdp", "data=4 fsdp", 2, 4, marks=pytest.mark.slow),
        pytest.param("data=1", "data=2,stage=2 fsdp", 2, 4, marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_on_another_mesh(before, after, step, steps, text, tmp_path):
    flags = ["--dropout", "0.1", "--steps", str(steps)]
    want = run(tmp_path / "one", text, *flags)
    out = tmp_path / "out"
    with pytest.raises(StopError):
        stop_after(step, out, text, *flags, *MESHES.get(before, "--mesh data=1").split())
    assert checkpoint.latest(out) == step
    run(out, text, *flags, "--resume", str(out), *MESHES[after].split())
    assert_same_curve(metrics(out), want)


class StopError(Exception):
    """Ends a run on purpose."""


def stop_after(step, out, text, *flags):
    """Train as if to the end, and interrupt right after the checkpoint of `step`."""
    saved = checkpoint.save

    def save_and_stop(path, state, *, step, **options):
        saved(path, state, step=step, **options)
        raise StopError

    try:
        checkpoint.save = save_and_stop
        run(out, text, "--save-every", str(step), *flags)
    finally:
        checkpoint.save = saved


@pytest.mark.slow
def test_remat_does_not_change_the_curve_and_bfloat16_hardly(text, one, tmp_path):
    assert_same_curve(run(tmp_path / "remat", text, "--remat", "--mesh", "data=2"), one)
    low = run(tmp_path / "bf16", text, "--dtype", "bfloat16")
    assert abs(low[-1]["loss"] - one[-1]["loss"]) < 0.05


@pytest.mark.slow
def test_compile_does_not_change_the_curve(text, tmp_path):
    flags = ["--steps", "8", "--layers", "1"]
    assert_same_curve(run(tmp_path / "compiled", text, "--compile", *flags), run(tmp_path / "eager", text, *flags))


@pytest.mark.slow
def test_a_sample_is_the_same_on_every_mesh(text, tmp_path, capsys):
    texts = []
    for mesh in ("data=1", "data=2,model=2"):
        pretrain.main([*SMALL, *FEW, "--text", text, "--mesh", mesh, "--sample", "12"])
        out = capsys.readouterr().out
        assert "validation loss" in out
        assert "nats per byte" in out
        texts.append(out.split("written by the model\n")[1])
    assert texts[0] == texts[1]
    assert len(texts[0]) > 8


FEW = ["--steps", "2", "--layers", "1"]


def test_verify_passes_and_does_not_change_the_training(text, tmp_path, capsys):
    flags = [*FEW, "--steps", "1", "--mesh", "data=2,model=1", "--fsdp", "--dropout", "0.1"]
    plain = run(tmp_path / "plain", text, *flags)
    assert "verified" not in capsys.readouterr().out
    verified = run(tmp_path / "verified", text, *flags, "--verify")
    printed = capsys.readouterr().out
    # all leaves: 16 parameters, two moments of each, count, norm, key, step, loss, norm; none of them is only rounding
    assert re.search(
        r"\nverified: 54 leaves the same on data=2, model=1; data=1, model=1 "
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


@pytest.mark.slow
def test_verify_compares_in_float32_with_training_in_bfloat16(text, tmp_path, capsys):
    flags = [*FEW, "--steps", "1", "--mesh", "data=2", "--dtype", "bfloat16"]
    assert run(tmp_path / "a", text, *flags, "--verify")[-1]["loss"] == run(tmp_path / "b", text, *flags)[-1]["loss"]
    assert "e-07)" in capsys.readouterr().out


def replace_psum_by_pmean(monkeypatch):
    """Make the model wrong in its values, but not in its types."""
    monkeypatch.setattr(transformer, "psum", pmean)


@pytest.mark.slow
def test_verify_ends_a_run_of_a_wrong_model(text, tmp_path, monkeypatch):
    replace_psum_by_pmean(monkeypatch)
    with pytest.raises(SystemExit) as e:
        run(tmp_path, text, *FEW, "--mesh", "data=2,model=2", "--verify")
    assert e.value.code not in (None, 0)
    assert "leaves of train_step change with the mesh: collapsing 'model' gives a different answer" in str(e.value)
    assert "collapsing 'data'" not in str(e.value)
    assert not (tmp_path / "metrics.jsonl").exists()


# --- refusals, each one line ----------------------------------------------------------------------------------------

TINY = ["--steps", "2", "--batch", "2", "--context", "8", "--layers", "1", "--heads", "1", "--width", "8"]


@pytest.fixture(scope="module")
def saved(text, tmp_path_factory):
    """A folder of a run of two steps."""
    out = tmp_path_factory.mktemp("saved") / "out"
    pretrain.main([*TINY, "--text", text, "--out", str(out)])
    return out


def refusal(*flags):
    """The one line that ends a run."""
    with pytest.raises(SystemExit) as e:
        pretrain.main([*TINY, *flags])
    line = str(e.value)
    assert line.startswith("pretrain: ")
    assert "\n" not in line
    return line.removeprefix("pretrain: ")


@pytest.mark.parametrize(("flags", "want"), [
    ("--steps 0", "--steps 0: give 1 or more"),
    ("--steps -1 --batch 0", "--steps -1: give 1 or more; --batch 0: give 1 or more"),
    ("--layers 0 --heads -1 --width 0",
     "--layers 0: give 1 or more; --heads -1: give 1 or more; --width 0: give 1 or more"),
    (
        "--fsdp --zero",
        "--fsdp --zero: fully sharded parameters have a sharded optimizer state: give one of the two",
    ),
    ("--heads 3 --width 128", "--heads 3: must divide --width, and 128 % 3 = 2: give --heads 2"),
    ("--lr nan", "--lr nan: give a number above 0"),
    ("--lr inf", "--lr inf: give a number above 0"),
    ("--dropout 1", "--dropout 1.0: give a rate from 0 to below 1"),
    ("--seed -1", "--seed -1: give 0 or more"),
    ("--seed 18446744073709551616", "--seed 18446744073709551616: give 0 or more, and less than 2^64"),
    ("--save-every -1", "--save-every -1: give 0 or more; --save-every -1: give the folder too, --out FOLDER"),
    ("--save-every 5", "--save-every 5: give the folder too, --out FOLDER"),
    ("--mesh row=2", "--mesh row=2: 'row=2' is not data=N or model=N"),
    ("--mesh stage=1 --zero --batch 8",
     "--mesh stage=1: stage= takes neither --zero nor --compile: leave them out"),
    ("--mesh stage=1 --microbatches 3", "--microbatches 3: must divide --batch, and 2 % 3 = 2"),
    ("--mesh data=--1", "--mesh data=--1: 'data=--1' is not data=N or model=N"),
    ("--mesh data=1,data=2", "--mesh data=1,data=2: 'data' appears twice"),
    ("--mesh data=3", "--mesh data=3: data=3 ranks have nothing to do with --batch 2: give at most data=2"),
    ("--mesh model=100000000",
     "--mesh model=100000000: model=100000000 ranks have nothing to do with --width 8: give at most model=8"),
    ("--mesh data=0", "--mesh data=0: make_mesh(data=0, model=1): not the sizes of a mesh; fix: "),
    ("--mesh data=-1", "--mesh data=-1: make_mesh(data=-1, model=1): a simulated mesh has no world size to infer"),
    ("--compile --mesh data=2", "--compile --mesh data=2: the ranks are threads, which one compiler serves: give one"),
    ("--text {tmp}/none", "{tmp}/none: cannot be read; No such file or directory; fix: give a file of text"),
    ("--text {tmp}", "{tmp}: cannot be read; Is a directory; fix: give a file of text"),
    ("--text {tmp}/empty", "the text to train on has 0 tokens, fewer than 2 sequences of 8 + 1: give a longer "),
    ("--text {tmp}/short --out {tmp}/new",
     "the held-out twentieth of the text has 10 tokens, fewer than 2 sequences of 8 + 1: give a longer --text, or "),
    ("--out {tmp}/empty", "--out {tmp}/empty: {tmp}/empty is a file: give a folder"),
    ("--out {tmp}/empty/a/b", "--out {tmp}/empty/a/b: {tmp}/empty is a file: give a folder"),
    ("--out {saved}", "--out {saved} holds a run, up to step 2: give --resume {saved}, or another folder"),
    ("--resume {saved} --out {other} --steps 3", "--out {other} holds a run, up to step 1: give --resume {other}, or "),
    ("--resume {tmp}/none", "--resume {tmp}/none: there is no complete checkpoint in it"),
    ("--resume {tmp}/empty", "--resume {tmp}/empty: {tmp}/empty is a file: give a folder"),
    ("--resume {saved}/step_000002",
     "--resume {saved}/step_000002: there is no complete checkpoint in it: give --resume {saved}"),
    ("--resume {other}", "--resume {other}: {other}/arguments.json: cannot be read; No such file or directory: give a"),
    ("--resume {foreign}",
     "--resume {foreign}: pretrain did not write its arguments.json: give a folder of pretrain"),
    ("--resume {saved} --text {text} --layers 3 --width 16",
     "--resume {saved}: it was trained with other arguments: give --layers 1 --width 8"),
    ("--resume {saved} --text {text} --context 4 --heads 2",
     "--resume {saved}: it was trained with other arguments: give --context 8 --heads 1"),
    ("--resume {saved} --steps 1", "--resume {saved}: it is at step 2, after --steps 1: give --steps 2 or more"),
    ("--resume {saved} --text " + __file__,
     "--resume {saved}: it was trained with other arguments: give the same --text, or run the same Python, whose "),
    ("--resume {saved} --text {text} --seed 1",
     "--resume {saved}: it was trained with other arguments: give --seed 0"),
    ("--resume {damaged}", "{damaged}/step_000002/manifest.json is not a manifest of fshard, or is damaged; its first"),
])  # fmt: skip
def test_what_no_run_can_have_is_refused_in_one_line(flags, want, text, saved, tmp_path):
    names = {
        "tmp": tmp_path,
        "saved": saved,
        "other": tmp_path / "other",
        "foreign": tmp_path / "foreign",
        "text": text,
        "damaged": tmp_path / "damaged",
    }
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("x" * 200)
    for name in ("other", "foreign"):
        checkpoint.save(tmp_path / name, {"x": 1}, step=1)
    (tmp_path / "foreign" / "arguments.json").write_text("{}")
    shutil.copytree(saved, tmp_path / "damaged")
    (tmp_path / "damaged" / "step_000002" / "manifest.json").write_text("{")
    before = {p: p.read_bytes() for p in saved.rglob("*") if p.is_file()}
    assert refusal("--text", text, *flags.format(**names).split()).startswith(want.format(**names))
    assert {p: p.read_bytes() for p in saved.rglob("*") if p.is_file()} == before
    assert not (tmp_path / "new").exists()  # refused before the first step


def test_folders_that_cannot_be_read_or_written_are_refused(saved, tmp_path, monkeypatch):
    with monkeypatch.context() as m:
        m.setattr(os, "access", lambda path, mode: False)  # the tests may run as root
        assert refusal("--out", str(tmp_path)) == f"--out {tmp_path}: {tmp_path} cannot be written: give another folder"

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint, "latest", denied)
    assert refusal("--resume", str(saved)) == f"{saved}: Permission denied: give another folder"


def test_only_rank_0_speaks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as e:
        pretrain.main(["--heads", "3"])
    assert e.value.code == 1
    assert capsys.readouterr() == ("", "")


# --- runs that are stopped, and resumed -------------------------------------------------------------------------------


def test_metrics_cut_short_are_resumed_and_damage_is_named(text, saved, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(saved, out)
    path = out / "metrics.jsonl"
    first, second = path.read_text().splitlines(keepends=True)
    for half in ("", '{"step": 1, "lo', '{"step": 1}', "{", "\0\0\0"):  # a line without its end is cut short too
        path.write_text(first + half)
        assert read_metrics(path) == [(0, first)]
    pretrain.main([*TINY, "--text", text, "--resume", str(out)])
    assert path.read_text() == first
    for damage in ("nonsense", "[]", '{"loss": 1}', '{"step": "x"}', "\0\0"):
        path.write_text(damage + "\n" + second)
        line = refusal("--text", text, "--resume", str(out))
        assert line == f"{path}: line 1 is damaged: remove it, or move the file away"
    assert path.read_text() == damage + "\n" + second  # a refused run changes nothing


@pytest.mark.slow
def test_run_resumed_into_another_folder_keeps_no_lines_of_that_folder(text, saved, tmp_path):
    out, link = tmp_path / "out", tmp_path / "link"
    out.mkdir()
    link.symlink_to(out)
    (out / "metrics.jsonl").write_text('{"step": 0, "loss": 1}\n')  # of a run that ended before its first checkpoint
    pretrain.main([*TINY, "--text", text, "--resume", str(saved), "--out", str(out), "--steps", "3"])
    assert [m["step"] for m in metrics(out)] == [2]
    pretrain.main([*TINY, "--text", text, "--resume", str(out), "--out", str(link), "--steps", "4"])  # the same folder
    assert [m["step"] for m in metrics(out)] == [2, 3]


class Full:
    """A file on a disk that is full after one line."""

    def __init__(self, file):
        self.file, self.lines = file, 0

    def write(self, line):
        self.lines += 1
        if self.lines > 1:
            self.file.write(line[:20])
            raise OSError(28, "No space left on device")
        self.file.write(line)

    def flush(self):
        self.file.flush()

    def close(self):
        self.file.close()


def test_full_disk_ends_the_run_with_the_command_that_resumes_it(text, tmp_path, monkeypatch):
    out = tmp_path / "my out"
    flags = ["--steps", "3", "--text", text, "--save-every", "1", "--lr", "0.001", "--remat"]
    command = (
        f"resume with python -m fshard.recipes.pretrain --resume '{out}' --steps 3 --batch 2 --lr 0.001 --save-every 1 "
        f"--text {text} --context 8 --layers 1 --heads 1 --width 8 --remat"
    )
    with monkeypatch.context() as m:
        log = pretrain.Log.__init__

        def full(self, *args):
            log(self, *args)
            self.file = Full(self.file)

        m.setattr(pretrain.Log, "__init__", full)
        assert refusal("--out", str(out), *flags) == (
            f"cannot write metrics.jsonl: No space left on device: make room; step 1 is saved: {command}")  # fmt: skip
    with monkeypatch.context() as m:
        fsync = os.fsync

        def full(fd):
            if checkpoint.latest(out) == 2:
                raise OSError(28, "No space left on device")
            fsync(fd)

        m.setattr(os, "fsync", full)
        line = refusal("--resume", str(out), *flags)
    assert line.startswith(f"save: cannot write {out}")
    assert "No space left on device; the last complete checkpoint is unchanged; fix: make room" in line
    assert line.endswith(f"step 2 is saved: {command}")
    run_again = shlex.split(command.split("resume with python -m fshard.recipes.pretrain ")[1])
    pretrain.main(run_again)
    assert [m["step"] for m in metrics(out)] == [0, 1, 2]


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("when", ["in a step", "in a save"])
def test_interrupt_names_the_command_that_resumes(when, rank, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    calls = []

    def interrupt(f):
        def g(*args, **kwargs):
            calls.append(f)
            if len(calls) == 2:
                monkeypatch.setenv("RANK", rank)
                raise KeyboardInterrupt
            return f(*args, **kwargs)

        return g

    owner, name = (pretrain.Log, "write") if when == "in a step" else (commit, "publish")
    monkeypatch.setattr(owner, name, interrupt(getattr(owner, name)))
    with pytest.raises(SystemExit) as e:
        pretrain.main([*TINY, "--text", text, "--out", str(tmp_path), "--save-every", "1"])
    assert e.value.code == 130
    err = capsys.readouterr().err
    want = (
        "pretrain: interrupted; step 1 is saved: resume with torchrun --nproc-per-node 4 -m fshard.recipes.pretrain "
        f"--resume {tmp_path} --steps 2 --batch 2 --save-every 1 --text {text} --context 8 --layers 1 --heads 1 "
        "--width 8\n"
    )
    assert err == (want if rank == "0" else "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["arguments.json", "metrics.jsonl", "step_000001"]


@pytest.mark.slow
def test_interrupt_before_the_first_checkpoint_elsewhere_names_both_folders(text, saved, tmp_path, monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as m:
        m.setattr(pretrain.Log, "write", interrupt)
        with pytest.raises(SystemExit):
            pretrain.main([*TINY, "--text", text, "--steps", "3", "--resume", str(saved), "--out", str(out)])
    command = capsys.readouterr().err.strip().split("resume with python -m fshard.recipes.pretrain ")[1]
    assert command.startswith(f"--resume {saved} --out {out} ")
    pretrain.main(shlex.split(command))
    assert (checkpoint.steps(saved), checkpoint.steps(out)) == ([2], [3])


def test_command_that_resumes_on_several_nodes_needs_their_arguments(saved, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    args = pretrain.Options.parse([*TINY, "--resume", str(saved)])
    assert args.resume_hint().startswith(
        "step 2 is saved: resume on every node, with its --rdzv arguments, with torchrun --nnodes 2 --nproc-per-node 4 "
    )


def test_interrupt_before_a_checkpoint_says_that_nothing_is_saved(text, monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrain, "tokens", interrupt)
    with pytest.raises(SystemExit) as e:
        pretrain.main(TINY)
    assert e.value.code == 130
    assert capsys.readouterr().err == (
        "pretrain: interrupted; nothing is saved yet: --out FOLDER --save-every N save checkpoints\n")  # fmt: skip


# --- real ranks -------------------------------------------------------------------------------------------------


def run_on_rank(main, *flags):
    os.environ["RANK"] = str(torch.distributed.get_rank())
    main([*flags])


def train_and_verify_on_rank(out, text):
    flags = [*SMALL, *FEW, "--text", text, "--mesh", "model=2", "--verify"]
    run_on_rank(pretrain.main, *flags, "--out", out)
    with pytest.MonkeyPatch.context() as monkeypatch:
        replace_psum_by_pmean(monkeypatch)
        with pytest.raises(SystemExit) as e:
            pretrain.main(flags)
    return e.value.code


@pytest.mark.slow
@pytest.mark.process
def test_real_ranks_have_the_same_curve_and_verify_it(text, one, one_with_dropout, tmp_path, ranks):
    train = [run_on_rank, pretrain.main, *SMALL, "--text", text]
    out = tmp_path / "plain"
    ranks(4, *train, "--out", str(out), *MESHES["data=2,model=2 fsdp sequence"].split())
    assert_same_curve(metrics(out), one)
    out = tmp_path / "dropout"
    flags = ["--dropout", "0.1", "--save-every", "10", *MESHES["data=4 fsdp"].split()]
    ranks(4, *train, "--out", str(out), *flags)
    assert_same_curve(metrics(out), one_with_dropout)
    # resume from step 10 on a simulated mesh
    shutil.rmtree(out / "step_000020")
    run(out, text, "--dropout", "0.1", "--resume", str(out), "--mesh", "data=2,model=2")
    assert_same_curve(metrics(out), one_with_dropout)
    # verify: the ranks agree on what it says
    out = tmp_path / "verified"
    codes = ranks(2, train_and_verify_on_rank, str(out), text)
    assert "collapsing 'model' gives a different answer" in codes[0]
    assert codes[1] == 1
    assert_same_curve(metrics(out), run(tmp_path / "few", text, *FEW))
    # classify: 5 classes over 4 ranks
    (tmp_path / "images").mkdir()
    folder = test_classify.draw_images(tmp_path / "images")
    flags = [*test_classify.SMALL, "--folder", folder, "--partial-fc", "0.5", "--margin", "arcface"]
    classify.main([*flags, "--out", str(tmp_path / "one")])
    ranks(4, run_on_rank, classify.main, *flags, "--out", str(tmp_path / "ranks"), "--mesh", "data=2,model=2")
    curves.assert_same_curve(metrics(tmp_path / "ranks"), metrics(tmp_path / "one"), rtol=test_classify.RTOL)
