"""The scripts of random kills and damage, for some seconds each; `--runs` and no `--seconds` run them in full."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "seconds", "row"),
    [("kills", 15, "| all |"), ("corruptions", 8, "| all |"), ("two_writers", 2, "| all |"),
     ("preemptions", 20, "| `finetune` |")],
)  # fmt: skip
def test_nothing_is_lost_or_changed(script: str, seconds: int, row: str) -> None:
    command = [sys.executable, "-m", f"tests.faults.{script}", "--seconds", str(seconds)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert row in result.stdout


@pytest.mark.slow
def test_run_that_loses_machines_and_gets_others_has_the_losses_of_one_device() -> None:
    command = [sys.executable, "-m", "tests.faults.elastic", "--steps", "30"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line[:4] for line in result.stdout.splitlines()[-3:]] == ["| 4 ", "| 2 ", "| 3 "]


@pytest.mark.slow
def test_restarts_and_strangers_stop_no_job() -> None:
    command = [sys.executable, "-m", "tests.faults.restarts", "--runs", "6"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "6 jobs with a stranger, 0 problems" in result.stdout
    assert "6 restarts, 0 problems" in result.stdout
