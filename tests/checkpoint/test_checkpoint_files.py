"""Files of checkpoints: read by blocks, checked before they are used, complete or absent."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import math
import os
import pickle
import re
import shutil
import signal
import socket
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P, ShardingError, checkpoint
from fshard._core.files import io as file_io
from fshard.checkpoint import commit, loading, manifest, parts
from fshard.spec import full_box
from tests.lib.assertions import assert_same, error_text
from tests.lib.processes import Pool

# --- blocks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(), (0,), (3, 0), (40,), (7, 9), (3, 50), (2, 3, 30), (2, 3, 4), (100, 1), (1, 1, 99)]
)
def test_blocks_are_contiguous_and_within_the_size_limit(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "BLOCK_BYTES", 64)
    x = torch.arange(math.prod(shape)).view(shape)
    boxes = list(parts.blocks(shape, 4))
    assert len(boxes) == parts.block_count(shape, 4)
    assert torch.equal(torch.cat([x[b].flatten() for b in boxes] + [x.new_empty(0)]), x.flatten())
    assert all(x[b].numel() * 4 <= 64 for b in boxes)
    assert len(boxes) <= max(1, 2 * math.ceil(x.numel() * 4 / 64) + math.prod(shape[:-1]))


def test_read_chunk_reads_only_overlapping_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "BLOCK_BYTES", 256)
    x = torch.randn(64, 8)
    part, [(_, chunk)] = parts.write_part(tmp_path / "p", [parts.Piece("x", full_box(x.shape), x)])
    assert len(chunk.crc32) == 8
    assert (tmp_path / "p").stat().st_size == part.bytes
    checked: list[int] = []
    crc32 = parts.crc32
    monkeypatch.setattr(parts, "crc32", lambda data: checked.append(len(data)) or crc32(data))
    for box, blocks in [
        ((slice(9, 15), slice(0, 8)), 1),
        ((slice(7, 9), slice(3, 4)), 2),
        ((slice(0, 64), slice(1, 2)), 8),
        ((slice(3, 41), slice(0, 8)), 6),
    ]:
        checked.clear()
        out = torch.zeros(x[box].shape)
        with open(tmp_path / "p", "rb") as f:
            parts.read_chunk(f, "x", chunk, [(box, out)])
        assert torch.equal(out, x[box])
        assert checked == [256] * blocks


def test_leaves_of_many_blocks_restore_with_other_specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "BLOCK_BYTES", 64)
    want = {"a": torch.randn(50, 9), "b": torch.randn(2, 60), "c": torch.randn(1000), "d": torch.randn(3, 4, 40)}
    checkpoint.save(tmp_path / "c", fs.device_put(want, P("data"), fs.make_mesh(data=3)))
    for spec in (P(None, "data"), P("data"), P()):
        specs = {**dict.fromkeys(want, spec), "c": P("data")}
        assert_same(checkpoint.restore(tmp_path / "c", fs.device_put(want, specs, fs.make_mesh(data=7))), want)


# --- damage -------------------------------------------------------------------------------------------------


def small(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    tree = fs.device_put({"a": torch.randn(4, 3), "b": torch.arange(2)}, P("data"), fs.make_mesh(data=2))
    state = {**tree, "k": fs.key(1), "n": 3}
    return checkpoint.save(tmp_path / "c", state), state


def test_every_flipped_bit_is_detected(tmp_path: Path) -> None:
    at, state = small(tmp_path)
    for file in sorted(at.iterdir()):
        good = file.read_bytes()
        for i in range(0, len(good), 5 if file.suffix == ".json" else 3):
            file.write_bytes(good[:i] + bytes([good[i] ^ 1 << i % 8]) + good[i + 1 :])
            with pytest.raises(ShardingError):
                checkpoint.restore(at, state)
        file.write_bytes(good)
    checkpoint.restore(at, state)


def test_errors_of_damaged_files_name_file_and_leaf(tmp_path: Path) -> None:
    at, state = small(tmp_path)
    one, two = at / "part-00000.safetensors", at / "part-00001.safetensors"
    good, other = one.read_bytes(), two.read_bytes()
    one.write_bytes(good[:-1])
    two.unlink()
    assert (
        error_text(checkpoint.restore, at, state)
        == f"""\
2 problems
{one}: is cut short
  expected  {len(good)} bytes    got  {len(good) - 1} bytes
  fix: restore another checkpoint
{two}: cannot be read
  No such file or directory
  fix: restore another checkpoint"""
    )
    two.write_bytes(other)
    one.write_bytes(good + b"x")
    assert f"{one}: is too long" in error_text(checkpoint.restore, at, state)
    one.write_bytes(b"9" + good[1:])
    assert f"{one}: the header is damaged" in error_text(checkpoint.restore, at, state)
    start = manifest.read_manifest(at).leaves["a"].chunks[0].start
    one.write_bytes(good[:start] + bytes([good[start] ^ 255]) + good[start + 1 :])
    text = error_text(checkpoint.restore, at, state)
    assert text.startswith("a: the data is damaged\n  expected  crc32 ")
    assert f"in {one}, bytes {start} to {start + 24}" in text
    assert checkpoint.restore(at, 0, at="n") == 3  # the files that this reads are not damaged


def rewritten(at: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest, and correct its checksum."""
    body = json.loads((at / "manifest.json").read_bytes())
    change(body)
    head = {k: body.pop(k) for k in ("format", "version", "blake2b")}
    text = json.dumps(body)[1:].encode()
    head["blake2b"] = manifest._digest(text)
    (at / "manifest.json").write_bytes(json.dumps(head)[:-1].encode() + b",\n" + text)


def empty(m: dict[str, Any], *shape: int) -> dict[str, Any]:
    """Return a leaf without elements, at the end of a file."""
    file, part = next(iter(m["files"].items()))
    chunk = {"offset": [0 for _ in shape], "shape": shape, "file": file, "start": part["bytes"], "crc32": []}
    return {"dtype": "float32", "shape": shape, "chunks": [chunk]}


MALFORMED: dict[str, Callable[[dict[str, Any]], object]] = {
    "a header of 2^70 bytes": lambda m: m.update(
        leaves={"n": {"type": "int", "value": 3}},
        files={"part-00000.safetensors": {"bytes": 1 << 70, "header_bytes": 1 << 70, "header_crc32": 0}},
    ),
    "a size of 2^63": lambda m: m["leaves"].update(e=empty(m, 0, 1 << 63)),
    "10,000 dims": lambda m: m["leaves"].update(e=empty(m, *[0] * 10_000)),
    "a file outside": lambda m: m["files"].update(
        {"../part-00000.safetensors": m["files"].pop("part-00000.safetensors")}
    ),
    "an absolute file": lambda m: m["files"].update({"/etc/passwd": m["files"]["part-00000.safetensors"]}),
    "a chunk outside": lambda m: m["leaves"]["a"]["chunks"][0].update(file="../x.safetensors"),
    "a chunk beyond the leaf": lambda m: m["leaves"]["a"]["chunks"][0].update(offset=[3, 0]),
    "a chunk beyond the file": lambda m: m["leaves"]["a"]["chunks"][0].update(start=10**6),
    "a chunk missing": lambda m: m["leaves"]["a"]["chunks"].pop(),
    "a chunk twice": lambda m: m["leaves"]["a"]["chunks"].__setitem__(1, m["leaves"]["a"]["chunks"][0]),
    "chunks that overlap": lambda m: m["leaves"]["a"]["chunks"][1].update(offset=[1, 0]),
    "overlapping chunks that leave a row out": lambda m: m["leaves"]["a"].update(
        shape=[5, 3],
        chunks=[
            {**m["leaves"]["a"]["chunks"][i % 2], "offset": [at, 0], "shape": [n, 3]}
            for i, (at, n) in enumerate([(0, 2), (1, 2), (4, 1)])
        ],
    ),
    "the bytes of another leaf": lambda m: m["leaves"]["a"]["chunks"][0].update(
        start=m["leaves"]["b"]["chunks"][0]["start"]
    ),
    "one leaf less": lambda m: m["leaves"].pop("b"),
    "a negative offset": lambda m: m["leaves"]["a"]["chunks"][0].update(offset=[-1, 0]),
    "a huge chunk": lambda m: m["leaves"]["a"].update(
        shape=[2**60, 3], chunks=[{**m["leaves"]["a"]["chunks"][0], "shape": [2**60, 3]}]
    ),
    "no checksum": lambda m: m["leaves"]["a"]["chunks"][0].update(crc32=[]),
    "another dtype": lambda m: m["leaves"]["a"].update(dtype="object"),
    "no shape": lambda m: m["leaves"]["a"].pop("shape"),
    "a leaf of another kind": lambda m: m["leaves"].update(a=[]),
    "a tie to nothing": lambda m: m["leaves"].update(a={"same_as": "zz"}),
    "a tie to a value": lambda m: m["leaves"].update(zz={"same_as": "n"}),
    "a value of another type": lambda m: m["leaves"]["n"].update(value="3"),
    "a value of no type": lambda m: m["leaves"]["n"].update(type="list", value=[]),
    "no leaves": lambda m: m.pop("leaves"),
    "an invalid step": lambda m: m.update(step="x"),
    "sizes of another type": lambda m: m["files"]["part-00000.safetensors"].update(bytes=1.5),
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_manifest_is_refused(change: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    at, state = small(tmp_path)
    rewritten(at, lambda m: None)
    checkpoint.restore(at, state)
    rewritten(at, change)
    assert f"{at / 'manifest.json'} is malformed" in error_text(checkpoint.restore, at, state)


@pytest.mark.parametrize("like", [{"n": 0}, {"n": 0, "x": torch.zeros(2)}, {"n": 0, "y": 0.0}], ids=str)
def test_manifest_of_another_checkpoint_is_refused(like: dict[str, Any], tmp_path: Path) -> None:
    """Python values stand in the manifest alone: part files say which ones they were saved with."""
    ours, other = ({k: type(v)(n) if k != "x" else v for k, v in like.items()} for n in (3, 4))
    at, another = (checkpoint.save(tmp_path / f"c{i}", tree) for i, tree in enumerate((ours, other)))
    (at / "manifest.json").write_bytes((another / "manifest.json").read_bytes())
    for read in (lambda: checkpoint.restore(at, like), lambda: checkpoint.restore(at, 0, at="n"),
                 lambda: checkpoint.inspect(at)):  # fmt: skip
        assert f"{at / 'part-00000.safetensors'}: the header is damaged\n  expected  crc32 " in error_text(read)


def test_checkpoint_of_another_step_is_refused_by_its_step(tmp_path: Path) -> None:
    saved = checkpoint.save(tmp_path, {"x": 1}, step=5)
    at = saved.rename(tmp_path / "step_000007")
    want = (
        f"{at} holds the checkpoint of another step: it was renamed or replaced\n  expected  7    got  5\n"
        "  fix: give this directory, without step=, for step 5"
    )
    assert error_text(checkpoint.restore, tmp_path, {"x": 0}, step=7) == want
    assert error_text(checkpoint.inspect, tmp_path, step=7) == want
    assert checkpoint.restore(at, {"x": 0}) == {"x": 1}


@pytest.mark.parametrize("times", [1, 2, commit.READS])
def test_checkpoint_replaced_while_it_is_read_is_read_again(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, state = small(tmp_path)
    versions = iter(range(4, 4 + times))

    def replace_first(f: Callable[..., Any]) -> Callable[..., Any]:
        def g(*args: Any) -> Any:
            if n := next(versions, 0):
                checkpoint.save(at, {**state, "n": n}, overwrite=True)
            return f(*args)

        return g

    monkeypatch.setattr(loading, "_read", replace_first(loading._read))
    monkeypatch.setattr(checkpoint, "check_part", replace_first(parts.check_part))
    for read in (lambda: checkpoint.restore(at, state)["n"], lambda: checkpoint.inspect(at)["n"]):
        versions = iter(range(4, 4 + times))
        if times < commit.READS:
            assert read() == 3 + times
        else:
            assert re.fullmatch(
                rf"(restore|inspect): {at} was replaced or removed by another program while it was read\n"
                r"  fix: call \1 again", error_text(read))  # fmt: skip


def test_checkpoint_removed_while_it_is_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at, state = small(tmp_path)
    read = loading._read
    monkeypatch.setattr(loading, "_read", lambda *args: (shutil.rmtree(at), read(*args)))
    assert error_text(checkpoint.restore, at, state) == (
        f"restore: {at} was replaced or removed by another program while it was read\n  fix: call restore again"
    )


def test_ranks_that_read_two_checkpoints_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save between the reads of two ranks: without a comparison each would load a part of another state."""
    at, state = small(tmp_path)
    run = file_io.Ranks.run
    monkeypatch.setattr(file_io.Ranks, "run", lambda self, job: [*run(self, job), "digest of rank 1"])
    assert "was replaced or removed by another program" in error_text(checkpoint.restore, at, state)


def test_directories_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    at, state = small(tmp_path)
    (tmp_path / "file").write_text("x")
    (tmp_path / "dir").mkdir()
    checkpoint.save(tmp_path / "out", {"x": 1}, step=5)
    for path, step, words in [
        ("nothing", None, "it does not exist"),
        ("file", None, "it is a file"),
        ("dir", None, "it holds no manifest.json"),
        ("out", None, "it holds the steps [5]\n  fix: step=5"),
        ("out", 6, "it does not exist\n  fix: the steps here are [5]"),
    ]:
        text = error_text(lambda path=path, step=step: checkpoint.restore(tmp_path / path, {"x": 1}, step=step))
        assert "is not a checkpoint of fshard" in text
        assert words in text
    rewritten(at, lambda m: m.update(version=3))
    (at / "manifest.json").write_bytes((at / "manifest.json").read_bytes().replace(b'"version": 1', b'"version": 3', 1))
    assert "expected  1 or 2    got  3" in error_text(checkpoint.restore, at, state)
    for text in (b"", b"{}", b"[]\n", b'{"format": "other", "version": 1, "blake2b": ""}', b"[" * 100_000):
        (at / "manifest.json").write_bytes(text)
        assert "is not a manifest of fshard, or is damaged" in error_text(checkpoint.inspect, at)


class Malicious:
    ran = False

    def __reduce__(self) -> Any:
        return exec, ("import tests.checkpoint.test_checkpoint_files as t; t.Malicious.ran = True",)


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pickle.loads(pickle.dumps(Malicious()))
    assert Malicious.ran  # unpickling runs code
    Malicious.ran = False
    at, state = small(tmp_path)
    bad = pickle.dumps(Malicious())
    for name in (".metadata", "__0_0.distcp", "extra.pt"):
        (at / name).write_bytes(bad)
    calls: list[Any] = []
    for owner, name in [(pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")]:
        monkeypatch.setattr(owner, name, lambda *a, **k: calls.append(a))
    assert_same(
        {k: v for k, v in checkpoint.restore(at, state).items() if k != "n"},
        {k: v for k, v in state.items() if k != "n"},
    )
    for name in ("part-00000.safetensors", "part-00001.safetensors", "manifest.json"):
        (at / name).write_bytes(bad)
        error_text(checkpoint.restore, at, state)
    (at / "manifest.json").unlink()
    assert "its .metadata is a pickle, which is never opened" in error_text(checkpoint.restore, at, state)
    assert not calls
    assert not Malicious.ran


# --- steps, and atomicity -----------------------------------------------------------------------------------


def test_steps_latest_and_keep(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "no") is None
    assert checkpoint.steps(tmp_path) == []
    for step in (5, 100, 20, 1_234_567):
        checkpoint.save(tmp_path, {"x": step}, step=step)
    assert checkpoint.steps(tmp_path) == [5, 20, 100, 1_234_567]
    assert checkpoint.latest(tmp_path) == 1_234_567
    (tmp_path / "step_999999999").mkdir()  # not complete
    (tmp_path / "step_7").mkdir()
    assert checkpoint.latest(tmp_path) == 1_234_567
    checkpoint.save(tmp_path, {"x": 30}, step=30, keep=3)  # the step just saved stays, even if it is the oldest
    assert checkpoint.steps(tmp_path) == [30, 100, 1_234_567]
    checkpoint.save(tmp_path, {"x": 40}, step=40, keep=1)
    assert checkpoint.steps(tmp_path) == [40]
    assert checkpoint.restore(tmp_path, {"x": 0}, step=40) == {"x": 40}


def test_overwrite_is_explicit_and_removes_old_files(tmp_path: Path) -> None:
    mesh = fs.make_mesh(data=4)
    first = {"x": fs.device_put(torch.arange(8), P("data"), mesh)}
    at = checkpoint.save(tmp_path / "c", first)
    assert error_text(checkpoint.save, at, first) == (
        f"save: {at} exists\n  fix: overwrite=True, another step, or another directory"
    )
    for i in range(3):
        new = {"x": torch.arange(8) + i}
        checkpoint.save(at, new, overwrite=True)
        assert_same(checkpoint.restore(at, first), new)
        assert len(list(at.iterdir())) == 2
        assert list(tmp_path.iterdir()) == [at]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    assert "exists, and is not a checkpoint" in error_text(checkpoint.save, tmp_path / "mine", first, overwrite=True)
    assert (tmp_path / "mine" / "notes").read_text() == "keep"
    (tmp_path / "empty").mkdir()
    checkpoint.save(tmp_path / "empty", first)
    checkpoint.save(tmp_path / "a" / "b" / "c", first)
    assert checkpoint.inspect(tmp_path / "a" / "b" / "c").keys() == {"x"}


@pytest.mark.parametrize("function", ["fsync", "rename", "replace", "mkdir"])
def test_full_disk_leaves_the_last_checkpoint_unchanged(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, state = small(tmp_path)
    before = {f.name: f.read_bytes() for f in at.iterdir()}

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, function, full)
    text = error_text(checkpoint.save, at, state, overwrite=True)
    assert text.startswith("save: ")
    assert "No space left on device" in text
    if function != "replace":  # a new checkpoint replaces no file
        assert "No space left on device" in error_text(checkpoint.save, tmp_path / "new", state)
        assert list(tmp_path.iterdir()) == [at]
    assert {f.name: f.read_bytes() for f in at.iterdir()} == before


def error_of_directories(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the file system refuse to flush directories."""
    fsync = os.fsync

    def of_files(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", of_files)


def test_directory_that_cannot_be_flushed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at, state = small(tmp_path)
    error_of_directories(errno.EIO, monkeypatch)
    text = error_text(checkpoint.save, at, state, overwrite=True)
    assert re.fullmatch(rf"save: cannot write {tmp_path}/\.c\.tmp-\w{{8}}\n  Input/output error\n"
                        "  the last complete checkpoint is unchanged\n  fix: .*", text)  # fmt: skip
    assert list(tmp_path.iterdir()) == [at]
    checkpoint.restore(at, state)


def test_file_system_that_flushes_no_directories_has_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error_of_directories(errno.EINVAL, monkeypatch)
    at, state = small(tmp_path)
    checkpoint.restore(at, state)


# --- two programs -------------------------------------------------------------------------------------------

WRITERS: dict[str, tuple[str, str, Callable[[Path], object]]] = {  # lock, the folder in the error, the save
    "steps": (".steps.lock", "", lambda out: checkpoint.save(out, {"x": 1}, step=3, overwrite=True)),
    "checkpoint": (".c.lock", "/c", lambda out: checkpoint.save(out / "c", {"x": 1}, overwrite=True)),
    "folder": ("c/.saving.lock", "/c", lambda out: fs.hf.save(out / "c", {}, {"w": torch.ones(2)})),
    "file": (".c.pt.lock", "/c.pt", lambda out: fs.state_dict.write(out / "c.pt", {"w": torch.ones(2)})),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_second_program_that_saves_is_told_of_the_first(kind: str, tmp_path: Path) -> None:
    name, folder, save = WRITERS[kind]
    save(tmp_path)
    with file_io.locked("save", tmp_path, tmp_path / name):
        (tmp_path / name).with_name(".step_000009.tmp-0123abcd").mkdir()  # of the first program
        assert re.fullmatch(
            rf"(save|write): another program saves into {tmp_path}{folder}\n"
            rf"  process {os.getpid()} on {re.escape(socket.gethostname())} since [\d-]{{10}} [\d:]{{8}}\n"
            "  fix: wait for its end, or choose another folder", error_text(save, tmp_path))  # fmt: skip
        (tmp_path / name).with_name(".step_000009.tmp-0123abcd").rmdir()
        (tmp_path / name).write_text("\x1b[31m")
        assert "\n  its process is not known yet\n" in error_text(save, tmp_path)
    assert not (tmp_path / name).exists()
    (tmp_path / name).write_text("process 1 on a since 2000-01-01 00:00:00")  # of a program that was killed
    save(tmp_path)
    assert not list(tmp_path.rglob(".*"))


def test_child_of_a_killed_program_does_not_lock(tmp_path: Path) -> None:
    """The kernel releases a lock when no process has its file open, and a forked child has it open, too."""
    lock = tmp_path / "lock"
    fd = file_io._acquire("save", tmp_path, lock)
    ours, childs = socket.socketpair()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        ours.close()
        childs.send(b"started")
        childs.recv(1)  # until the parent closes its end
        os._exit(0)
    childs.close()
    ours.recv(7)
    try:
        file_io._lock_files.discard(fd)
        os.close(fd)  # as the end of the process does
        with file_io.locked("save", tmp_path, lock):
            pass
    finally:
        ours.close()
        os.waitpid(child, 0)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP])
def test_file_system_without_locks_has_checkpoints(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    small(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_keyboard_interrupt_passes_through_and_removes_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path / "c", {"x": torch.zeros(2)})
    assert list(tmp_path.iterdir()) == []


def die_at(n: int) -> None:
    """Make this process kill itself at its n-th operation on the disk; a write is half done then."""
    remaining = itertools.count(n, -1)

    def step(before: Callable[[], object] = lambda: None) -> None:
        if next(remaining) == 0:
            before()
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(f: Callable[..., Any]) -> Callable[..., Any]:
        def g(*args: Any, **kwargs: Any) -> Any:
            step()
            return f(*args, **kwargs)

        return g

    def opened(path: Any, mode: str, **how: Any) -> Any:
        if "x" not in mode:
            return open(path, mode, **how)
        step()
        f = open(path, mode)  # noqa: SIM115
        write = f.write

        def half(data: Any) -> int:
            step(lambda: (write(data[: len(data) // 2]), f.flush()))
            return write(data)

        f.write = half  # type: ignore[method-assign]
        return f

    for name in ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    file_io.open = opened  # type: ignore[attr-defined]


def killed(n: int, job: Callable[[], object]) -> bool:
    """Run `job` in a child process that dies at the n-th operation; return False if the job ended first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the idle rank threads of this process, which the child does not need
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            die_at(n)
            job()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def kill_at_every_operation(folder: str) -> None:
    mesh = fs.make_mesh(kind="simulated", data=2)

    def state(n: int) -> dict[str, Any]:
        return {"w": fs.device_put(torch.full((4,), float(n)), P("data"), mesh), "n": n}

    for case, step, options in [("new step", 2, {}), ("overwrite", 1, {"overwrite": True}), ("keep", 2, {"keep": 1})]:
        restored = []
        for n in itertools.count():
            out = Path(folder) / case / str(n)
            checkpoint.save(out, state(1), step=1)
            died = killed(n, lambda out=out, o=options, s=step: checkpoint.save(out, state(2), step=s, **o))
            last = checkpoint.latest(out)
            assert last in (1, step)
            for known in checkpoint.steps(out):  # every visible one is complete
                got = checkpoint.restore(out, state(0), step=known)
                assert got["n"] in ((1, 2) if case == "overwrite" else (known,))
                assert_same({"w": got["w"]}, {"w": state(got["n"])["w"]})
            restored.append(got["n"])
            checkpoint.save(out, state(1), step=9)  # removes unfinished saves
            assert all(d.name.startswith("step_") for d in out.iterdir())
            assert all(len(list(d.iterdir())) == 3 for d in out.iterdir())
            if not died:
                break
        assert restored == sorted(restored)  # one operation separates the old from the new
        assert set(restored) == {1, 2}
        assert len(restored) > 15


@pytest.mark.process
def test_kill_at_any_disk_operation_leaves_a_complete_checkpoint(ranks: Pool, tmp_path: Path) -> None:
    ranks(1, kill_at_every_operation, str(tmp_path))  # a process as small as a rank is forked in no time


def test_bytes_of_one_element_ignore_its_strides():
    x = torch.arange(24.0).view(4, 6)[1:2, 3:4].T
    assert bytes(file_io.bytes_of(x)) == torch.tensor([9.0]).numpy().tobytes()


@pytest.mark.parametrize("function", [checkpoint.inspect, lambda path: checkpoint.restore(path, {}, step=1)])
def test_path_that_is_too_long_is_no_checkpoint(function: Callable[[str], Any], tmp_path: Path) -> None:
    path = f"{tmp_path}/{'a' * 5000}"
    assert "a" * 100 in error_text(function, path)
    assert checkpoint.latest(path) is None
