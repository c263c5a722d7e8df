"""Hostile files: what the script of random ones, `tests.faults.hostile`, cannot see."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fshard as fs
from fshard import ShardingError
from fshard.cli import main
from tests.lib.assertions import error_text


def restore_from_pipe(folder: Path) -> None:
    fs.checkpoint.save(folder / "out", {"w": torch.ones(2)})
    part = next((folder / "out").glob("part-*"))
    part.unlink()
    os.mkfifo(part)
    fs.checkpoint.restore(folder / "out", {"w": torch.zeros(2)})


READERS: dict[str, Callable[[Path], object]] = {
    "a.pt": lambda folder: fs.state_dict.read(folder / "a.pt", {}),
    "a.safetensors": lambda folder: fs.state_dict.read(folder / "a.safetensors", {}),
    "a.yaml": lambda folder: fs.accelerate.read(folder / "a.yaml"),
    "metrics.jsonl": lambda folder: fs.plot.losses(folder / "metrics.jsonl"),
    "out/part-00000.safetensors": restore_from_pipe,
}


@pytest.mark.parametrize("name", READERS)
def test_pipe_in_the_place_of_a_file_is_an_error_and_not_waited_for(name: str, tmp_path: Path) -> None:
    if "/" not in name:
        os.mkfifo(tmp_path / name)
    verb = "plot.losses: " if name == "metrics.jsonl" else ""
    want = f"{verb}{tmp_path / name}: cannot be read\n  it is not a regular file"
    assert error_text(READERS[name], tmp_path).startswith(want)


def test_names_that_control_a_terminal_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"\x1b]0;title\x07.w\u202e": torch.ones(2), "\x1b[2J": torch.ones(3)}, path)
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert r"\x1b]0;title\x07" in shown
    assert r"w\u202e" in shown
    assert r"\x1b[2J" in shown
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)
    assert str(ShardingError("a\x1b[2J\ud800\n  b\tc")) == "a\\x1b[2J\\ud800\n  b\tc"


@pytest.mark.parametrize("command", ["inspect", "estimate"])
def test_path_of_5000_characters_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "x" * 5_000]) == 2
    got = capsys.readouterr()
    assert got.out == ""
    assert "x" * 5_000 in got.err
    assert "Traceback" not in got.err
