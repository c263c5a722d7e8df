"""`python -m fshard config`: answers become a file that `fs.accelerate.read` and Accelerate's own loader read."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.cli import main

Settings = fs.accelerate.Settings


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gpus(monkeypatch, 0)


def gpus(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: n > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: n)


def answered(monkeypatch: pytest.MonkeyPatch, *answers: str) -> list[str]:
    """Answer the questions in order, and return them as they were asked."""
    asked: list[str] = []
    rest: Iterator[str] = iter(answers)

    def answer(question: str) -> str:
        asked.append(question)
        try:
            return next(rest)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", answer)
    return asked


def read(path: str) -> tuple[Settings, Any]:
    """Read a file without a warning, here and by Accelerate."""
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return fs.accelerate.read(path), config_args.load_config_from_file(path)


NO = ""  # Return: the default
CASES: dict[str, tuple[list[str], Settings]] = {
    "defaults": ([NO] * 4, Settings()),
    "compiled": (["one process", "yes", "y", "BF16"], Settings(debug=True, compile=True, compute=torch.bfloat16)),
    "data parallel": (["2", NO, NO, NO, "4", NO, NO], Settings(processes=4, cpu=True)),
    "FSDP 1": (
        ["2", "1", NO, NO, "2", "yes", "1", "shard_grad_op", "yes", NO, "T5Block", "2", "y", "local_state_dict", "yes",
         NO],
        Settings(strategy="SHARD_GRAD_OP", processes=2, cpu=True, offload=True, wrap=("T5Block",), state_dict="local",
                 backward_prefetch="post", forward_prefetch=True, remat=True),
    ),
    "FSDP 2 by size, hybrid": (
        ["2", "1", NO, NO, "8", "yes", NO, "no", NO, "2", "1e6", NO, NO, "yes", "2", "2", "fp16"],
        Settings(strategy="_HYBRID_SHARD_ZERO2", processes=8, cpu=True, wrap=1_000_000, state_dict="sharded",
                 backward_prefetch="pre", forward_prefetch=True, replicas=2, shards=2, model=2, compute=torch.float16),
    ),
    "two machines": (
        ["2", "2", "1", "node0", NO, "no", "c10d", NO, NO, NO, NO, NO],
        Settings(processes=4, machines=2, machine_rank=1, address="node0", port=29500, rendezvous="c10d", cpu=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("file", ["fshard.yaml", "ours.json"])
def test_answers_are_written_and_read_again(monkeypatch, capsys, name: str, file: str):
    answers, want = CASES[name]
    asked = answered(monkeypatch, *answers)
    assert main(["config", *([] if file == "fshard.yaml" else ["--config_file", file])]) == 0
    assert len(asked) == len(answers)
    ours, theirs = read(file)
    assert ours == want
    assert theirs.num_processes == want.processes
    assert capsys.readouterr().out.endswith(f"python -m fshard launch --config_file {file} SCRIPT\n")


def test_gpus_are_asked_for_where_there_are_some(monkeypatch):
    gpus(monkeypatch, 4)
    answered(monkeypatch, NO, NO, NO, NO, NO, NO, "0,2,3,1", NO)
    assert main(["config"]) == 0
    settings, theirs = read("fshard.yaml")
    assert settings == Settings(processes=4, gpus=(0, 2, 3, 1))
    assert theirs.gpu_ids == "0,2,3,1"
    answered(monkeypatch, "one process", "yes", NO, NO, NO)
    assert main(["config", "--config_file", "cpu.yaml"]) == 0
    assert read("cpu.yaml")[0] == Settings(cpu=True)


def test_wrong_answers_are_explained_and_asked_again(monkeypatch, capsys):
    asked = answered(
        monkeypatch, "TPU", "2", "x", "2", "5", "1", "node0", NO, "maybe", NO, NO, NO, "3", "0", NO, NO, NO
    )
    assert main(["config"]) == 0
    assert capsys.readouterr().out.splitlines()[:7] == [
        "  'TPU' is not one of one process, several processes on CPUs, several GPUs",
        "  'x' is not an integer of 1 or more",
        "  '5' is not one of 0 to 1",
        "  'maybe' is not yes or no",
        "  '3' is not a multiple of 2, the number of machines",
        "  '0' is not 1 or more",
        "fshard.yaml: NO_SHARD, data=4",
    ]
    assert asked.count("How many machines? [1] ") == 2
    assert read("fshard.yaml")[0].machine_rank == 1


def test_empty_answer_where_there_is_no_default_is_asked_again(monkeypatch, capsys):
    answered(monkeypatch, "2", "2", "", "0", "", "node0")
    assert main(["config"]) == 2
    got = capsys.readouterr()
    assert got.out.splitlines() == [
        "  an answer is needed: an integer of 0 or more", "  an answer is needed: a text",
    ]  # fmt: skip
    assert "no answer to 'A free port on that machine?', and nothing is written\n  fix: --default" in got.err
    assert not Path("fshard.yaml").exists()


def test_existing_file_is_replaced_only_after_a_question(monkeypatch, capsys):
    Path("fshard.yaml").write_text("mine")
    for answers in ([NO], ["no"], ["yes"]):  # the last: the questions end without answers
        answered(monkeypatch, *answers)
        main(["config"])
        assert Path("fshard.yaml").read_text() == "mine"
    assert "fshard.yaml is unchanged\n" in capsys.readouterr().out
    answered(monkeypatch, "yes", NO, NO, NO, NO)
    assert main(["config"]) == 0
    assert read("fshard.yaml")[0] == Settings()
    assert [p.name for p in Path().iterdir()] == ["fshard.yaml"]


@pytest.mark.parametrize(("n", "want"), [
    (0, Settings(cpu=True)), (1, Settings()), (4, Settings(processes=4)),
])  # fmt: skip
def test_default_asks_nothing(monkeypatch, capsys, n: int, want: Settings):
    gpus(monkeypatch, n)
    asked = answered(monkeypatch)
    assert main(["config", "--default", "--config_file", "d.json"]) == 0
    assert asked == []
    assert read("d.json")[0] == want
    assert json.loads(Path("d.json").read_text())["mixed_precision"] == "no"
    assert main(["config", "--default", "--config_file", "d.json"]) == 2
    assert "d.json exists, and is not replaced" in capsys.readouterr().err
    assert main(["config", "--default", "--mixed_precision", "bf16"]) == 0
    assert read("fshard.yaml")[0].compute == torch.bfloat16


def test_file_that_cannot_be_written_is_an_error(monkeypatch, capsys):
    asked = answered(monkeypatch)
    assert main(["config", "--config_file", "none/f.yaml"]) == 2
    assert "config: cannot write none/f.yaml\n  there is no folder none" in capsys.readouterr().err
    assert main(["config", "--config_file", "."]) == 2
    assert "config: . is a folder\n  fix: --config_file fshard.yaml" in capsys.readouterr().err
    assert main(["config", "--mixed_precision", "bf16"]) == 2
    assert "--mixed_precision is asked" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert main(["config", "--config_file", "f.yaml"]) == 2
    assert "f.yaml: a YAML file needs the package pyyaml" in capsys.readouterr().err
    assert asked == []  # before the first question
