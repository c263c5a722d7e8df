"""Checkpoints and folders in storages that fsspec reaches: the values of a disk, and a commit without a rename."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

import fshard as fs
from fshard import P, ShardingError, checkpoint
from fshard._core.files import url
from fshard.checkpoint import commit
from fshard.interop.hf.export import write
from fshard.interop.hf.folder import INDEX, SINGLE
from fshard.interop.hf.weights import FileTensor, read
from fshard.models import gpt2
from tests.lib.assertions import assert_same, error_text
from tests.lib.killed import Killed, dying
from tests.lib.tiers import slow_unless


class PlainFileSystem(LocalFileSystem):
    """The local file system of fsspec under a scheme of its own: `file://` is taken for a disk."""

    protocol = ("plain",)

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return super()._strip_protocol(path.removeprefix("plain://"))


def register() -> None:
    fsspec.register_implementation("plain", PlainFileSystem, clobber=True)


register()


@pytest.fixture(params=["memory", "plain"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory://run" if request.param == "memory" else f"plain://{tmp_path}/run"


@pytest.fixture(autouse=True)
def empty_memory() -> Iterator[None]:
    clear_memory()  # an example of the docs may have run in this process
    yield
    clear_memory()


def clear_memory() -> None:
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


def state(n: float = 0.0, mesh: fs.Mesh | None = None) -> dict[str, Any]:
    leaves = {"w": torch.arange(60.0).view(6, 10) + n, "b": torch.arange(7) + int(n), "e": torch.zeros(0, 3)}
    placed = fs.device_put(leaves, P("data"), mesh or fs.make_mesh(data=3))
    return {**placed, "tied": placed["w"], "key": fs.key(int(n)), "n": float(n)}


def names(folder: Any) -> list[str]:
    return sorted(f.name for f in url.as_path(folder).iterdir())


def check(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["n"] == want["n"]
    assert_same({k: x for k, x in got.items() if k != "n"}, {k: x for k, x in want.items() if k != "n"})


# --- checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_checkpoints_in_a_storage_restore_on_every_mesh(root: str, background: bool) -> None:
    at = checkpoint.save(root, state(), step=5, background=background)
    assert (str(at), repr(at), at.name) == (f"{root}/step_000005", f"UrlPath('{root}/step_000005')", "step_000005")
    for place, step in ((root, 5), (at, None), (f"{root}/step_000005/", None)):
        for size in (1, 2, 5):
            check(checkpoint.restore(place, state(1, fs.make_mesh(data=size)), step=step), state())
    assert checkpoint.inspect(root, step=5)["n"] == 0.0
    assert checkpoint.restore(at, 0.0, at="n") == 0.0
    assert (checkpoint.steps(root), checkpoint.latest(f"{root}/none")) == ([5], None)


def test_steps_keep_and_overwrite_in_a_storage(root: str) -> None:
    for step in (1, 2, 3):
        checkpoint.save(root, state(step), step=step, keep=2)
    assert checkpoint.steps(root) == [2, 3]
    assert [n for n in names(root) if n.startswith("step_") and names(f"{root}/{n}")] == ["step_000002", "step_000003"]
    url.UrlPath(f"{root}/step_000003/manifest.json").write([b"damaged"])
    text = f"save: {root}/step_000003 exists\n  fix: overwrite=True, another step, or another directory"
    assert error_text(checkpoint.save, root, state(), step=3) == text
    parts = names(f"{root}/step_000003")[1:]
    for n in (4, 5):
        checkpoint.save(root, state(n), step=3, overwrite=True)
        check(checkpoint.restore(root, state(), step=3), state(n))
    left = [name for name in names(f"{root}/step_000003") if name in parts]
    assert len(names(f"{root}/step_000003")) == 4 + len(left)  # a manifest, and the files of three ranks
    assert left == parts  # of the damaged one, for a day
    url.UrlPath(f"{root}/other/notes").write([b"mine"])
    text = f"save: {root}/other exists, and is not a checkpoint\n  fix: another directory, or step= for one inside it"
    assert error_text(checkpoint.save, f"{root}/other", state(), overwrite=True) == text
    assert names(f"{root}/other") == ["notes"]


@pytest.mark.parametrize("options", [{"step": 2, "keep": 1}, {"step": 1, "overwrite": True}], ids=["keep", "overwrite"])
def test_kill_at_any_operation_of_a_storage_leaves_a_complete_checkpoint(
    options: dict[str, Any], root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored = []
    for k in itertools.count():
        out = f"{root}/{k}"
        checkpoint.save(out, state(1), step=1)
        calls = iter([False] * k + [True])
        with monkeypatch.context() as m:
            for name in ("write", "unlink"):
                m.setattr(url.UrlPath, name, dying(getattr(url.UrlPath, name), calls))
            m.setattr(commit, "_remove_objects", lambda *_: None)
            try:
                checkpoint.save(out, state(2), **options)
            except Killed:
                pass
            else:
                break
        assert checkpoint.steps(out)
        for step in checkpoint.steps(out):  # every visible one is complete
            got = checkpoint.restore(out, state(), step=step)
            check(got, state(got["n"]))
        restored.append(got["n"])
        checkpoint.save(out, state(3), step=9)  # is not in the way of the next one
    assert restored == sorted(restored)
    assert set(restored) == ({1.0, 2.0} if "keep" in options else {1.0})


def test_parts_of_a_killed_save_are_removed_a_day_later(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(root, state(1))
    day = 86_400 * 10**9
    old, young = time.time_ns() - day - 10**9, time.time_ns() - day + 600 * 10**9
    for generation in (old, young):
        (url.UrlPath(root) / f"part-00000.{generation}.safetensors").write([b"of a killed save"])
    checkpoint.save(root, state(2), overwrite=True)
    check(checkpoint.restore(root, state()), state(2))
    assert not any(f".{old}." in name for name in names(root))
    assert any(f".{young}." in name for name in names(root))
    assert len(names(root)) == 5


def test_two_programs_in_a_storage_leave_the_state_of_the_last(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(root, state(1))
    write_manifest, other = checkpoint.saving.write_manifest, iter([2.0])

    def beside(*args: Any) -> None:
        for n in other:
            checkpoint.save(root, state(n), overwrite=True)  # begins and ends in the middle of the save of state 3
            check(checkpoint.restore(root, state()), state(n))
        write_manifest(*args)

    monkeypatch.setattr(checkpoint.saving, "write_manifest", beside)
    checkpoint.save(root, state(3), overwrite=True)
    check(checkpoint.restore(root, state()), state(3))


# --- failures -----------------------------------------------------------------------------------------------


def failing(error: Exception, monkeypatch: pytest.MonkeyPatch, *methods: str) -> None:
    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise error

    for method in methods:
        monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, method, fails)


class NoCredentialsError(Exception):
    """As of botocore, which is no OSError."""


@pytest.mark.parametrize(("error", "text"), [
    (NoCredentialsError("Unable to locate credentials"), "NoCredentialsError: Unable to locate credentials"),
    (PermissionError("Access Denied"), "Permission denied"),
    (OSError(28, "No space left on device"), "No space left on device"),
    (TimeoutError(), "TimeoutError: "),
])  # fmt: skip
def test_failures_of_a_storage_name_the_url(error: Exception, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = "memory://failing"
    at = checkpoint.save(root, state(1))
    with monkeypatch.context() as m:
        failing(error, m, "open", "pipe_file")
        fix = "make room or choose another disk" if "space" in text else "make it writable or choose another place"
        assert re.fullmatch(
            rf"save: cannot write {root}/part-00000\.\d+\.safetensors\n  {text}\n"
            rf"  the last complete checkpoint is unchanged\n  fix: {fix}, and call it again",
            error_text(checkpoint.save, root, state(2), overwrite=True))  # fmt: skip
    with monkeypatch.context() as m:
        failing(error, m, "cat_file")
        want = f"{at}/manifest.json: cannot be read\n  {text}\n  fix: restore another checkpoint"
        assert error_text(checkpoint.restore, root, state()) == want
    with monkeypatch.context() as m:
        failing(error, m, "info", "ls")
        for call in (lambda: checkpoint.latest(root), lambda: checkpoint.restore(root, state()),
                     lambda: checkpoint.save(root, state(), overwrite=True), lambda: fs.hf.load(root)):  # fmt: skip
            assert text in error_text(call)
    check(checkpoint.restore(root, state()), state(1))
    assert len(names(root)) == 4


def test_save_that_fails_removes_its_part_files(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(root, state(1))
    before = names(root)
    write = url.UrlPath.write

    def full(self: url.UrlPath, chunks: Any) -> None:
        if self.name == "manifest.json":
            raise OSError(28, "No space left on device", str(self))
        write(self, chunks)

    monkeypatch.setattr(url.UrlPath, "write", full)
    assert "manifest.json\n  No space left" in error_text(checkpoint.save, root, state(2), overwrite=True)
    assert names(root) == before


def test_what_a_storage_remembers_is_asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have written or removed it."""
    path, asked = url.UrlPath("memory://run"), []
    (path / "x").write([b"x"])
    for name in ("invalidate_cache", "info", "ls", "glob"):
        method = getattr(fsspec.implementations.memory.MemoryFileSystem, name)
        monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, name, recorded(method, asked))
    for ask in (path.exists, path.is_dir, (path / "x").state, lambda: [*path.iterdir()], lambda: [*path.glob("*")]):
        asked.clear()
        ask()
        assert asked[0] == "invalidate_cache"


def recorded(method: Callable[..., Any], into: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        into.append(method.__name__)
        return method(*args, **kwargs)

    return call


def test_upload_that_fails_leaves_no_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes written before the failure are discarded, not closed."""
    discarded: list[bool] = []

    class Upload:
        closed = False

        def write(self, data: bytes) -> None:
            raise ConnectionError("reset")

        def discard(self) -> None:
            discarded.append(True)

        def close(self) -> None:
            raise AssertionError("closed")

    monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, "open", lambda *a, **k: Upload())
    with pytest.raises(OSError, match="ConnectionError: reset"):
        url.UrlPath("memory://upload").write(iter([b"x"]))
    assert discarded == [True]


def test_unknown_storages_and_missing_packages_are_errors_with_a_fix() -> None:
    assert error_text(checkpoint.latest, "s4://bucket/run") == (
        "s4://bucket/run: there is no such storage\n  Protocol not known: s4\n"
        "  fix: a scheme of fsspec, as s3:// (pip install s3fs), or the path of a file")  # fmt: skip
    with pytest.MonkeyPatch.context() as m:
        m.setitem(known_implementations, "s5", {"class": "s5fs.File", "err": "Install s5fs to access S5"})
        text = error_text(checkpoint.save, "s5://bucket/run", {"x": 1})
    assert text == ("s5://bucket/run: the package of this storage is not installed\n  Install s5fs to access S5\n"
                    "  fix: pip install 's5fs'")  # fmt: skip
    assert error_text(checkpoint.latest, Path("s3://bucket/run")) == (
        "'s3:/bucket/run' is a Path, which cannot hold a URL\n  fix: give the URL as a str")  # fmt: skip


def test_missing_checkpoint_in_a_storage_names_what_is_there(root: str) -> None:
    checkpoint.save(root, state(), step=5)
    assert error_text(checkpoint.restore, root, state(), step=6).startswith(f"{root}/step_000006 is not a checkpoint")
    assert "the steps here are [5]" in error_text(checkpoint.restore, root, state(), step=6)
    assert "it holds the steps [5]\n  fix: step=5" in error_text(checkpoint.restore, root, state())


def test_file_scheme_is_a_disk(tmp_path: Path) -> None:
    at = checkpoint.save(f"file://{tmp_path}/run", state(), step=1)
    assert at == tmp_path / "run" / "step_000001"
    assert names(at)[1] == "part-00000.safetensors"
    check(checkpoint.restore(f"local://{tmp_path}/run", state(), step=1), state())


# --- folders for others -------------------------------------------------------------------------------------


KINDS = {"single": 5 * 10**9, "two shards": 16, "three shards": 8}


def save(folder: str, kind: str, n: float) -> None:
    leaves = {name: torch.arange(2.0) + n for name in "abc"}
    write(folder, leaves, lambda path: FileTensor(str(path[0])), config={"n": n}, max_shard_bytes=KINDS[kind])


def holds(folder: str) -> float:
    """Return n of a folder, which is that of all of its weights."""
    leaves = read(folder, {n: fs.init.zeros(2) for n in "abc"}, lambda path: FileTensor(str(path[0])))
    got = fs.device_get(fs.materialize(leaves, P(), fs.make_mesh(data=1), key=fs.key(0)))
    (n,) = {x.tolist()[0] for x in got.values()}
    return float(n)


@pytest.mark.parametrize(("old", "new"), slow_unless(
    [("single", "two shards"), ("three shards", "two shards"), ("two shards", "single")],
    itertools.product(KINDS, KINDS)))  # fmt: skip
def test_folder_in_a_storage_has_the_old_weights_or_the_new_ones(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for k in itertools.count():
        folder = f"memory://folder/{old}/{new}/{k}"
        save(folder, old, 1.0)
        calls = iter([False] * k + [True])
        with monkeypatch.context() as m:
            for name in ("write", "upload", "unlink"):
                m.setattr(url.UrlPath, name, dying(getattr(url.UrlPath, name), calls))
            try:
                save(folder, new, 2.0)
                ended = True
            except Killed:
                ended = False
        results.append(holds(folder))
        save(folder, new, 3.0)
        assert holds(folder) == 3.0
        if ended:
            break
    assert results == sorted(results)
    assert set(results) == {1.0, 2.0}
    left = [n for n in names(folder) if n.endswith(("safetensors", "json"))]
    assert (SINGLE in left, INDEX in left) == (new == "single", new != "single")


def test_file_of_a_storage_that_the_old_index_names_is_not_removed_as_old() -> None:
    folder = "memory://folder/named"
    save(folder, "single", 1.0)
    url.UrlPath(f"{folder}/{INDEX}").write([json.dumps({"weight_map": dict.fromkeys("abc", SINGLE)}).encode()])
    save(folder, "single", 2.0)
    assert holds(folder) == 2.0


def test_models_are_saved_to_a_storage_and_loaded_on_a_mesh(root: str, tmp_path: Path) -> None:
    cfg = gpt2.Config(vocab_size=31, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    mesh = fs.make_mesh(data=2)
    params = fs.materialize(gpt2.init(cfg), P("data"), mesh, key=fs.key(0))
    fs.hf.save(tmp_path / "disk", cfg, params)
    (tmp_path / "disk" / "tokenizer.json").write_text("{}")
    for limit in (5 * 10**9, 2000):
        fs.hf.save(root, cfg, params, like=tmp_path / "disk", max_shard_bytes=limit)
        loaded, described = fs.hf.load(root)
        assert loaded == cfg
        assert_same(fs.materialize(described, P("data"), fs.make_mesh(data=3), key=fs.key(1)), params)
    fs.hf.save(f"{root}/again", cfg, params, like=root)
    assert "tokenizer.json" in names(f"{root}/again")
    at = url.UrlPath(f"{root}/again/{SINGLE}")
    data = at.read(0, at.state()[0])
    assert data == (tmp_path / "disk" / SINGLE).read_bytes()  # the bytes of a disk
    at.write([data[:-1]])
    with pytest.raises(ShardingError, match="is cut short"):
        fs.hf.load(f"{root}/again")


# --- an object server ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_checkpoints_and_folders_are_saved_to_an_object_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install s3fs 'moto[server]'`: a server of S3's protocol on this machine."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.get_host_and_port()[1]}")
        boto3.client("s3").create_bucket(Bucket="bucket")
        root = "s3://bucket/run"
        test_checkpoints_in_a_storage_restore_on_every_mesh(f"{root}/a", False)
        test_checkpoints_in_a_storage_restore_on_every_mesh(f"{root}/b", True)
        test_steps_keep_and_overwrite_in_a_storage(f"{root}/c")
        test_models_are_saved_to_a_storage_and_loaded_on_a_mesh(f"{root}/d", tmp_path)
        big = {"w": torch.arange(5_000_000.0), "n": 1}  # more than one upload and one read of a file
        checkpoint.save(f"{root}/e", big)
        check(checkpoint.restore(f"{root}/e", big), big)
        text = error_text(checkpoint.save, "s3://other/run", {"x": 1})
        assert re.match(r"save: cannot write s3://other/run/\S+\n  No such file or directory\n", text)
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        fsspec.filesystem("s3").clear_instance_cache()
        assert re.match("s3://bucket/run: cannot be read\n  ", error_text(checkpoint.latest, root))
    finally:
        server.stop()
