"""Saves in the background: the bits of the call's time, failures that are not lost, an end that waits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P, checkpoint
from fshard.checkpoint import background, saving
from tests.lib.assertions import assert_same, error_text


class Gate:
    """Holds the threads that save, before they write, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.passed = threading.Event(), 0
        write_parts = saving._write_parts

        def write(*args: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                assert self.opened.wait(600)
                self.passed += 1
            return write_parts(*args)

        monkeypatch.setattr(saving, "_write_parts", write)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    out = Gate(monkeypatch)
    yield out
    out.opened.set()
    background.join()
    background._saves.clear()


def state() -> dict[str, Any]:
    mesh = fs.make_mesh(data=2)
    like = {"w": torch.arange(24.0).view(4, 6), "b": torch.arange(3), "c": torch.randn(3, dtype=torch.complex64)}
    placed = fs.device_put(like, P("data"), mesh)
    x = torch.randn(5, 4)
    return {**placed, "tied": placed["w"], "key": fs.key(3), "view": x.T[1:], "conj": placed["c"].shards[0].conj(),
            "parameter": torch.nn.Parameter(x), "n": 3, "empty": torch.empty(0, 2)}  # fmt: skip


def files_of(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.iterdir()}


def test_background_save_has_the_bytes_of_the_time_of_the_call(tmp_path: Path, gate: Gate) -> None:
    tree = state()
    plain = files_of(checkpoint.save(tmp_path / "plain", tree, step=4))
    at = checkpoint.save(tmp_path / "c", tree, step=4, background=True)
    assert at == tmp_path / "c" / "step_000004"
    assert not at.exists()
    with torch.no_grad():
        for x in (*tree["w"].shards, tree["b"].shards[0], tree["view"], tree["parameter"], tree["key"]):
            x.zero_()
    add = fs.shard_map(lambda x: x + 1, mesh=tree["c"].mesh, out_specs=P("data"), in_specs=P("data"), donate=0)
    add(tree["c"])
    gate.opened.set()
    checkpoint.wait()
    assert files_of(at) == plain


@pytest.mark.parametrize("call", ["steps", "latest", "inspect", "restore", "save", "wait", "end"])
def test_what_follows_waits_for_the_background_save(call: str, tmp_path: Path, gate: Gate) -> None:
    checkpoint.save(tmp_path, {"n": 1}, step=1, background=True)
    threading.Timer(0.05, gate.opened.set).start()
    calls: dict[str, Callable[[], object]] = {
        "steps": lambda: checkpoint.steps(tmp_path) == [1],
        "latest": lambda: checkpoint.latest(tmp_path) == 1,
        "inspect": lambda: checkpoint.inspect(tmp_path, step=1) == {"n": 1},
        "restore": lambda: checkpoint.restore(tmp_path, {"n": 0}, step=1) == {"n": 1},
        "save": lambda: checkpoint.save(tmp_path, {"n": 2}, step=2),
        "wait": lambda: checkpoint.wait() is None,
        "end": lambda: background._end() is None,
    }
    assert calls[call]()
    assert gate.passed == 1
    assert 1 in checkpoint.steps(tmp_path)


def fail_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)


TEXT = r"""save: the save of {at} in the background has failed
  save: cannot write {folder}/\.step_000002\.tmp-\w{{8}}/part-00000\.safetensors
    No space left on device
    the last complete checkpoint is unchanged
    fix: make room or choose another disk, and call it again"""


def test_failure_in_the_background_is_raised_once_by_the_next_save_or_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    gate.opened.set()
    checkpoint.save(tmp_path, {"n": 1}, step=1)
    for after in (checkpoint.wait, lambda: checkpoint.save(tmp_path, {"n": 3}, step=3, background=True)):
        with monkeypatch.context() as m:
            fail_on(m)
            at = checkpoint.save(tmp_path, {"n": 2}, step=2, background=True)
            background.join()
        assert checkpoint.latest(tmp_path) == 1  # does not hide it
        assert re.fullmatch(TEXT.format(at=at, folder=tmp_path), error_text(after))
        assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
        after()
        checkpoint.wait()
    assert checkpoint.steps(tmp_path) == [1, 3]


def test_folder_that_is_removed_during_a_background_save_is_an_error(tmp_path: Path, gate: Gate) -> None:
    checkpoint.save(tmp_path / "c", {"n": 1}, background=True)
    (temporary,) = tmp_path.glob(".c.tmp-*")
    temporary.rmdir()
    gate.opened.set()
    assert "\n    No such file or directory\n" in error_text(checkpoint.wait)
    assert list(tmp_path.iterdir()) == []


def test_refusals_of_a_background_save_are_raised_by_the_call(tmp_path: Path, gate: Gate) -> None:
    assert "cannot write a object" in error_text(checkpoint.save, tmp_path / "a", {"x": object()}, background=True)
    checkpoint.save(tmp_path / "c", {"n": 1})
    assert " exists\n" in error_text(checkpoint.save, tmp_path / "c", {"n": 1}, background=True)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    checkpoint.wait()


def test_folder_is_locked_until_the_background_save_has_ended(tmp_path: Path, gate: Gate) -> None:
    checkpoint.save(tmp_path / "c", {"n": 1}, background=True)
    lock = tmp_path / ".c.lock"
    assert f"process {os.getpid()} on " in lock.read_text()
    gate.opened.set()
    checkpoint.wait()
    assert not lock.exists()


def test_memory_of_the_copy_is_used_by_the_next_save_until_wait(tmp_path: Path) -> None:
    tree = state()
    pointers = []
    for step in range(3):
        at = checkpoint.save(tmp_path, {**tree, "n": step}, step=step, background=True)
        pointers.append([x.data_ptr() for x in background._buffers])
        background.join()
        assert_same(checkpoint.restore(tmp_path, tree, step=step)["w"], tree["w"])
    assert at.is_dir()
    assert sorted(pointers[0]) == sorted(pointers[1]) == sorted(pointers[2])
    checkpoint.save(tmp_path, {"w": torch.ones(5, 5), "b": tree["b"]}, step=9, background=True)
    assert len(background._buffers) == 3
    checkpoint.wait()
    assert background._buffers == []


def test_end_of_the_program_prints_a_failure_and_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    gate.opened.set()
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    background._end()
    with monkeypatch.context() as m:
        fail_on(m)
        at = checkpoint.save(tmp_path, {"n": 2}, step=2, background=True)
        background.join()
    with monkeypatch.context() as m:
        m.setattr(os, "getpid", lambda: 1)  # as in a forked child, whose save it is not
        background._end()
    assert statuses == []
    background._end()
    assert statuses == [1]
    assert re.fullmatch("fshard: " + TEXT.format(at=at, folder=tmp_path) + "\n", capsys.readouterr().err)


PROGRAM = """
import multiprocessing, os, sys, time, torch
from concurrent.futures import ThreadPoolExecutor
from fshard import checkpoint
from fshard.checkpoint import saving

def main(folder, how):
    if how == "full":
        def full(fd): raise OSError(28, "No space left on device")
        os.fsync = full
    if how == "submits":  # as a client of a storage does
        write = saving._write_parts
        def write_parts(*args):
            time.sleep(0.5)
            return ThreadPoolExecutor().submit(write, *args).result()
        saving._write_parts = write_parts
    checkpoint.save(folder, {"w": torch.ones(1 << 22)}, step=1, background=True)
    if how == "raises":
        raise RuntimeError("of the program")
    if how == "exits":
        sys.exit(3)

if __name__ == "__main__":
    folder, how, child = sys.argv[1:]
    if child == "child":
        process = multiprocessing.get_context("fork").Process(target=main, args=(folder, how))
        process.start()
        process.join()
        sys.exit(process.exitcode)
    main(folder, how)
"""


@pytest.mark.slow
@pytest.mark.parametrize("child", ["main", "child"])
@pytest.mark.parametrize(("how", "status"), [("ends", 0), ("raises", 1), ("exits", 3), ("full", 1), ("submits", 0)])
def test_program_ends_after_its_background_save(how: str, status: int, child: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "out"), how, child]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == status, result.stderr
    assert checkpoint.steps(tmp_path / "out") == ([] if how == "full" else [1])
    assert ("No space left on device" in result.stderr) == (how == "full")
    assert list((tmp_path / "out").rglob(".*")) == []
