"""Recipes that are told to end save the step and leave with status 75; one with a NaN ends before it saves that."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

import fshard as fs
from fshard import checkpoint
from fshard.recipes import classify, finetune, minilm, pretrain
from fshard.recipes.command import Options, Refusal
from fshard.recipes.log import Log
from tests.e2e import test_classify
from tests.lib.curves import assert_same_curve, metrics
from tests.lib.signals import default_signals

TEXT = "".join(f"def f{i}(x, y={i}):\n    return x * {i} + y\n" for i in range(60))
TINY = {
    "pretrain": "--steps 6 --batch 2 --context 8 --layers 1 --heads 1 --width 8 --dropout 0.1",
    "classify": "--steps 6 --batch 8 --width 4",
    "finetune": "--steps 6 --vocab 60 --width 16 --batch 4 --rank 2 --methods t5-lora",
}
MAIN = {"pretrain": pretrain.main, "classify": classify.main, "finetune": finetune.main}
RECIPES = [
    "pretrain",
    pytest.param("classify", marks=pytest.mark.slow),
    pytest.param(
        "finetune",
        marks=[pytest.mark.slow, pytest.mark.skipif(minilm.installed() is None, reason="needs MiniLM's weights")],
    ),
]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """`train(recipe, *flags)` runs a recipe on data of its own."""
    root = tmp_path_factory.mktemp("data")
    (root / "text.py").write_text(TEXT)
    rows = [f"this film is {['bad', 'good'][i % 2]} number {i},{['bad', 'good'][i % 2]}" for i in range(40)]
    (root / "texts.csv").write_text("\n".join(["text,label", *rows]))
    (root / "images").mkdir()
    data = {"pretrain": ["--text", str(root / "text.py")], "finetune": ["--data", str(root / "texts.csv")],
            "classify": ["--folder", test_classify.draw_images(root / "images")]}  # fmt: skip

    def train(recipe, *flags):
        with default_signals():
            before = {number: signal.getsignal(number) for number in signal.valid_signals()}
            try:
                return MAIN[recipe]([*TINY[recipe].split(), *data[recipe], *flags])
            finally:  # the caller goes on, with its own handlers
                assert {number: signal.getsignal(number) for number in before} == before

    return train


def at_step(monkeypatch, step, action):
    """Call `action` in a step, after its result is known."""
    write = Log.write

    def write_and_act(self, **values):
        write(self, **values)
        if values["step"] == step:
            action()

    monkeypatch.setattr(Log, "write", write_and_act)


def part(recipe, out):
    return out / "pretrain" if recipe == "finetune" else out


@pytest.mark.parametrize("recipe", RECIPES)
def test_told_run_saves_the_step_and_resumes_on_the_same_curve(recipe, train, tmp_path, monkeypatch, capsys):
    want = train(recipe, "--out", str(tmp_path / "want"))
    out = tmp_path / "out"
    flags = ["--out", str(out), "--resume", "auto"]  # at every attempt
    for step, number in ((1, signal.SIGTERM), (3, signal.SIGUSR1)):
        with monkeypatch.context() as m:
            at_step(m, step, lambda number=number: signal.raise_signal(number))
            with pytest.raises(SystemExit) as e:
                train(recipe, *flags)
        assert e.value.code == 75
        assert checkpoint.latest(part(recipe, out)) == step + 1
        assert capsys.readouterr().err.startswith(
            f"{recipe}: told to end; step {step + 1} is saved: "
            f"resume with python -m fshard.recipes.{recipe} --resume {out} "
        )
    got = train(recipe, *flags)
    for folder in [p.parent.relative_to(tmp_path / "want") for p in (tmp_path / "want").rglob("metrics.jsonl")]:
        assert_same_curve(metrics(out / folder), metrics(tmp_path / "want" / folder), rtol=0)
    if recipe != "finetune":  # whose result has times
        assert got == want
    assert train(recipe, *flags) == got or recipe == "finetune"  # a run that is complete is evaluated again


@pytest.mark.parametrize("recipe", RECIPES)
def test_value_that_is_not_finite_ends_a_run_before_it_is_saved(recipe, train, tmp_path, monkeypatch):
    save = Options.save

    def save_poisoned(self, mesh, folder, state, *, step, steps, **values):
        if step == 3:
            for x in fs.tree.leaves(state["params"])[-1].shards:
                x.view(-1)[0] = torch.inf
        save(self, mesh, folder, state, step=step, steps=steps, **values)

    monkeypatch.setattr(Options, "save", save_poisoned)
    with pytest.raises(SystemExit) as e:
        train(recipe, "--out", str(tmp_path), "--save-every", "1")
    assert str(e.value).startswith(f"{recipe}: step 2: state['params']")
    assert " is not finite in 1 of " in str(e.value)
    assert f"; step 2 is saved: resume with python -m fshard.recipes.{recipe} " in str(e.value)
    assert checkpoint.steps(part(recipe, tmp_path)) == [1, 2]


def strict(line):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


@pytest.mark.slow
def test_loss_that_is_not_finite_ends_a_run_with_its_first_leaf(train, tmp_path):
    with pytest.raises(SystemExit) as e:
        train("pretrain", "--out", str(tmp_path), "--save-every", "1", "--lr", "1e30")
    first = checkpoint.steps(tmp_path)[-1]
    assert str(e.value).startswith(
        f"pretrain: step {first}: loss is nan, grad_norm is nan, state['params']['h'][0]['down']['b'] is not finite in "
    )
    assert ": the run would end here again: give a lower --lr; step " in str(e.value)
    lines = [strict(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == first
    assert lines[-1]["loss"] is None
    assert fs.plot.losses(tmp_path)


@default_signals()
def test_step_that_a_loss_scale_skips_ends_nothing():
    args, mesh = pretrain.Options.parse([]), fs.make_mesh(data=1)
    state = {"params": torch.ones(2), "opt": {"scale": torch.ones(1), "opt": torch.ones(2)}}
    args.save(mesh, None, state, step=1, steps=2, loss=float("nan"))
    for leaf in ("params", "opt"):
        broken = {**state, leaf: torch.tensor([torch.nan])}
        with pytest.raises(Refusal, match=rf"step 0: loss is inf, state\['{leaf}'\] is not finite in 1 of 1 elem"):
            args.save(mesh, None, broken, step=1, steps=2, loss=float("inf"))


def test_ctrl_c_saves_the_step_too(train, tmp_path, monkeypatch, capsys):
    at_step(monkeypatch, 1, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit) as e:
        train("pretrain", "--out", str(tmp_path))
    assert e.value.code == 75
    assert checkpoint.steps(tmp_path) == [2]
    assert "pretrain: told to end; step 2 is saved: " in capsys.readouterr().err


def test_run_without_a_folder_says_that_nothing_is_saved(train, monkeypatch, capsys):
    at_step(monkeypatch, 1, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as e:
        train("pretrain")
    assert e.value.code == 1
    assert capsys.readouterr().err == (
        "pretrain: told to end; nothing is saved yet: --out FOLDER --save-every N save checkpoints\n")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_evaluation_ends_when_it_is_told(recipe, train, tmp_path, monkeypatch):
    seen = []
    until_told = Options.until_told

    def told_in_evaluation(self, mesh, items):
        for item in until_told(self, mesh, items):
            seen.append(item)
            signal.raise_signal(signal.SIGTERM)
            yield item

    monkeypatch.setattr(Options, "until_told", told_in_evaluation)
    with pytest.raises(SystemExit) as e:
        train(recipe, "--out", str(tmp_path))
    assert (e.value.code, len(seen)) == (75, 1)
    folder, last = (tmp_path / "t5-lora", 4) if recipe == "finetune" else (tmp_path, 6)
    assert checkpoint.latest(folder) == last


def test_auto_resumes_only_in_a_folder_that_is_named():
    with pytest.raises(SystemExit) as e:
        pretrain.main(["--resume", "auto"])
    assert str(e.value) == "pretrain: --resume auto: give the folder too, --out FOLDER"


# --- real processes ---------------------------------------------------------------------------------------------------


def end_in_training(command, out, number, *, group):
    """Start a command, send a signal to it or to its process group after some steps; return its status and output."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               start_new_session=True)  # fmt: skip
    end = time.monotonic() + 300
    while not (out / "metrics.jsonl").exists() or len((out / "metrics.jsonl").read_text().splitlines()) < 3:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, "it does not begin"
        time.sleep(0.05)
    (os.killpg if group else os.kill)(process.pid, number)
    printed, _ = process.communicate(timeout=300)
    return process.returncode, printed


@pytest.mark.slow
def test_worker_processes_outlive_a_signal_to_the_process_group(tmp_path):
    (tmp_path / "images").mkdir()
    folder, out = test_classify.draw_images(tmp_path / "images"), tmp_path / "out"
    command = [sys.executable, "-m", "fshard.recipes.classify", *TINY["classify"].split(), "--steps", "100000",
               "--folder", folder, "--workers", "2", "--out", str(out)]  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGINT):
        status, printed = end_in_training(command, out, number, group=True)
        assert status == 75, printed
        last = [line for line in printed.splitlines() if not line.startswith("step ")][-1]
        assert last.startswith(f"classify: told to end; step {checkpoint.latest(out)} is saved: ")
        assert "Traceback" not in printed
        shutil.rmtree(out)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_launcher_that_is_told_passes_it_on_and_its_ranks_save_the_same_step(number, tmp_path):
    (tmp_path / "text.py").write_text(TEXT)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "fshard", "launch", "--num_processes", "3", "--cpu", "-m",
               "fshard.recipes.pretrain", *TINY["pretrain"].split(), "--batch", "4", "--steps", "100000",
               "--text", str(tmp_path / "text.py"), "--fsdp", "--out", str(out), "--resume", "auto"]  # fmt: skip
    status, printed = end_in_training(command, out, number, group=False)
    assert status == 128 + number, printed
    (step,) = checkpoint.steps(out)
    assert [m["step"] for m in metrics(out)] == list(range(step))
    others = (" torch/distributed/elastic/", "fshard: Ctrl-C: ")
    ours = [line for line in printed.splitlines() if not any(text in line for text in others)]
    assert ours[-1].startswith(f"pretrain: told to end; step {step} is saved: resume with torchrun --nproc-per-node 3 ")
    assert "Traceback" not in printed
    assert "has failed" not in printed
