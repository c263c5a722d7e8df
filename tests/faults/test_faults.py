"""The scripts of random kills and damage, for some seconds each; `--runs` and no `--seconds` run them in full."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("kills --seconds 15", ["| all |"]),
        ("corruptions --seconds 8", ["| all |"]),
        ("two_writers --seconds 2", ["| all |"]),
        ("preemptions --seconds 20", ["| `finetune` |"]),
        ("elastic --steps 30", ["\n| 4 ", "\n| 2 ", "\n| 3 "]),  # ranks: machines that are lost, and others
        ("restarts --runs 6", ["6 jobs with a stranger, 0 problems", "6 restarts, 0 problems"]),
        ("hostile --runs 100 --seconds 20", ["| yaml | 100 |"]),  # a machine may be busy, and a hang takes longer
    ],
)
def test_script_finds_no_problem_and_prints_its_table(command: str, wanted: list[str]) -> None:
    script, *options = command.split()
    line = [sys.executable, "-W", "ignore", "-m", f"tests.faults.{script}", *options]
    result = subprocess.run(line, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    at = [result.stdout.index(text) for text in wanted]
    assert at == sorted(at), result.stdout
