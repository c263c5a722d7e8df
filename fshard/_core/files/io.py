"""Files that all ranks of a mesh write together.

`assign_writers` chooses one rank for each different part of a leaf. If a rank fails, `Ranks` raises the same error on
every rank.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import re
import socket
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from zlib_ng.zlib_ng import crc32

from fshard._core.region import in_region
from fshard._core.transfers import refuse_transfer
from fshard.errors import ShardingError, fail
from fshard.init import Deferred
from fshard.sharded import Sharded
from fshard.spec import Box, box_shape, describe, different_parts, full_box

from .url import AnyPath, UrlFile, UrlPath

T = TypeVar("T")
StrPath = str | os.PathLike[str]

# --- bytes and files ------------------------------------------------------------------------------------------


def bytes_of(x: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order: its memory if it is contiguous on the CPU, else a copy."""
    x = x.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat = x.as_strided((x.numel(),), (1,))  # torch takes one element as contiguous with any strides
    return flat.view(torch.uint8).numpy().data


def write_file(path: AnyPath, chunks: Iterable[bytes | memoryview], size: int | None = None) -> None:
    """Write a new file, extended with zeros to `size`, and flush it to the disk; or an object, which it may replace."""
    if isinstance(path, UrlPath):
        path.write(chunks)
        return
    with open(path, "xb") as f:
        f.writelines(chunks)
        f.truncate(size)
        f.flush()
        os.fsync(f.fileno())


def sync(directory: AnyPath) -> None:
    """Flush the entries of a directory to the disk, where the file system can."""
    if isinstance(directory, UrlPath):  # where a put that has returned is durable
        return
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise OSError(e.errno, e.strerror, str(directory)) from e
    finally:
        os.close(fd)


@contextlib.contextmanager
def open_file(path: StrPath, fix: str = "", verb: str = "") -> Iterator[BinaryIO]:
    """Open a regular file or an object to read, for `verb`. A pipe in its place is an error, and is not waited for.

    Raises ShardingError if it cannot be opened, or read inside the block.
    """
    if "\0" in os.fspath(path):
        raise fail(f"{str(path)!r} has a null byte, which no path can have")
    try:
        if isinstance(path, UrlPath):
            with path.open() as obj:
                yield obj
            return
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as f:
            if not stat.S_ISREG(os.fstat(f.fileno()).st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            yield f
    except OSError as e:
        raise fail(f"{verb and f'{verb}: '}{path}: cannot be read", str(e.strerror), fix=fix) from e


@contextlib.contextmanager
def write_errors(verb: str, path: AnyPath, state: str) -> Iterator[None]:
    """Turn an OSError into a ShardingError that names the file; `state` describes the disk after the failure."""
    try:
        yield
    except OSError as e:
        is_full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "make room or choose another disk" if is_full else "make it writable or choose another place"
        raise fail(f"{verb}: cannot write {e.filename or path}", str(e.strerror), state,
                   fix=f"{advice}, and call it again") from e  # fmt: skip


def file_state(f: BinaryIO) -> tuple[int, int]:
    """Return the size of an open file, and a number that differs when it changes or is replaced.

    The number has the time, in ns, and the inode: two files that are written at once may have the same time.
    """
    raw = getattr(f, "raw", None)
    if isinstance(raw, UrlFile):
        return raw.path.state()
    stat = os.fstat(f.fileno())
    return stat.st_size, stat.st_mtime_ns + (stat.st_ino << 64)


def read_at(f: BinaryIO, buffer: memoryview, start: int) -> int:
    """Read from a position of a file into a buffer; return the number of bytes."""
    if isinstance(getattr(f, "raw", None), UrlFile):
        f.seek(start)
        return f.readinto(buffer)  # type: ignore[attr-defined, no-any-return]
    return os.preadv(f.fileno(), (buffer,), start)


# --- one program at a time ------------------------------------------------------------------------------------

_OWNER = re.compile(r"process \d+ on [\w.-]+ since [\d: -]+")
_lock_files: set[int] = set()  # descriptors of the locks that this process holds


def _close_locks() -> None:
    for fd in _lock_files:
        os.close(fd)
    _lock_files.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_locks)  # or the lock of a process that was killed lives in its children


@contextlib.contextmanager
def locked(verb: str, folder: Path, lock: Path) -> Iterator[None]:
    """Hold the lock of a folder, a file that names this process. Raises ShardingError if another program holds it.

    The lock is an flock, which the kernel releases when the process ends: the file of a killed program locks nothing.
    On a file system without flock (ENOLCK, ENOSYS, ENOTSUP) there is no lock.
    """
    fd = _acquire(verb, folder, lock)
    try:
        yield
    finally:
        if fd in _lock_files:  # not in a forked child
            _lock_files.discard(fd)
            with contextlib.closing(os.fdopen(fd)), contextlib.suppress(OSError):
                os.unlink(lock)


def _acquire(verb: str, folder: Path, lock: Path) -> int:
    import fcntl  # Windows has none

    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.read(fd, 400).decode(errors="replace")
                raise fail(f"{verb}: another program saves into {folder}",
                           owner if _OWNER.fullmatch(owner) else "its process is not known yet",
                           fix="wait for its end, or choose another folder") from None  # fmt: skip
            except OSError as e:
                if e.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                    raise
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(lock)):  # else its last owner removed it after the `open`
                    now = f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}"
                    os.ftruncate(fd, 0)
                    os.write(fd, f"process {os.getpid()} on {socket.gethostname()} since {now}".encode())
                    _lock_files.add(fd)
                    return fd
        finally:
            if fd not in _lock_files:
                os.close(fd)


# --- agreement between ranks ----------------------------------------------------------------------------------


class Ranks:
    """The processes that save, restore or write together: one process, or one for each rank.

    Errors begin with `verb`. Raises ShardingError inside `shard_map`.
    """

    def __init__(self, verb: str, *, one_process: bool) -> None:
        if in_region():
            raise fail(f"{verb}: called inside shard_map, where every leaf is a local part", fix="call it outside")
        if not one_process:
            refuse_transfer(verb)
        self.verb, self.one_process = verb, one_process
        self.group: Any = None  # of torch.distributed; None is the group of all ranks
        self.rank, self.size = (0, 1) if one_process else (dist.get_rank(), dist.get_world_size())

    @classmethod
    def from_leaves(cls, verb: str, leaves: Iterable[Any]) -> Ranks:
        """Return the processes that hold the leaves.

        Raises ShardingError if some leaves are on a process mesh and some on a simulated one.
        """
        kinds = {x.mesh.kind for x in leaves if isinstance(x, Sharded)}
        if {"process", "simulated"} <= kinds:
            raise fail(f"{verb}: some leaves are on a process mesh and some on a simulated mesh",
                       fix=f"{verb} them in two calls")  # fmt: skip
        return cls(verb, one_process="process" not in kinds if kinds else not dist.is_initialized())

    def writes_for(self, rank: int) -> bool:
        """Return whether this process writes the parts of a rank."""
        return self.one_process or rank == self.rank

    def run(self, job: Callable[[], T]) -> list[T]:
        """Run `job` in every process and return all results, by rank.

        If any rank raises an Exception, every rank raises ShardingError with the messages of all.
        """
        if self.one_process:
            return [job()]
        result: T | None = None
        error: Exception | None = None
        text = ""
        try:
            result = job()
        except Exception as e:
            error = e
            text = str(e) if isinstance(e, ShardingError) else f"{self.verb}: {e!r}"
        gathered: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(gathered, (result, text), self.group)
        except RuntimeError as e:
            raise fail(f"{self.verb}: rank {self.rank} cannot reach the others: one has failed or left the program",
                       str(e).splitlines()[0], fix="see the first traceback of the other ranks") from e  # fmt: skip
        ranks_of: dict[str, list[str]] = {}
        for rank, (_, message) in enumerate(gathered):
            if message:
                ranks_of.setdefault(message, []).append(str(rank))
        if len(ranks_of) == 1 and len(ranks_of.get(text, ())) == len(gathered):
            raise ShardingError(text) from error
        if ranks_of:
            lines = [f"rank {', '.join(ranks)}: {message}" for message, ranks in ranks_of.items()]
            raise ShardingError("\n".join(lines)) from error
        return [value for value, _ in gathered]

    def run_on_first(self, job: Callable[[], T]) -> T:
        """Run `job` only on rank 0 and return its result on every rank. Raises as `run`."""
        return cast(T, self.run(lambda: job() if self.rank == 0 else None)[0])

    def check_equal(self, job: Callable[[], Mapping[str, str]], fix: str) -> None:
        """Raise ShardingError, listing the differences, unless `job` returns the same texts by name on every rank."""
        texts = self.run(job)
        lines = [f"{name}    rank 0  {texts[0].get(name, 'nothing')}    rank {rank}  {other.get(name, 'nothing')}"
                 for rank, other in enumerate(texts) for name in {**texts[0], **other}
                 if texts[0].get(name) != other.get(name)]  # fmt: skip
        if lines:
            raise fail(f"{self.verb}: the ranks do not have the same leaves", *lines, fix=fix)


def summary(leaf: Any) -> str:
    """Describe a leaf in one line: if two ranks have equal lines, they may write the leaf together."""
    if isinstance(leaf, Sharded):
        return f"{leaf!r} on {leaf.mesh!r}"
    if isinstance(leaf, Tensor):
        return f"{describe(leaf)} of crc32 {crc32(bytes_of(leaf)):08x}"
    return repr(leaf)


# --- the parts of leaves --------------------------------------------------------------------------------------


def writable(leaf: Any, dtypes: Collection[torch.dtype], supported: str = "a tensor") -> Sharded | Tensor:
    """Return the leaf if it has values of one of `dtypes`. Raises ShardingError, without the leaf's path, otherwise."""
    if isinstance(leaf, Deferred):
        raise fail("is only described, and has no values", fix="fs.materialize it")
    if not isinstance(leaf, (Sharded, Tensor)):
        raise fail(f"cannot write a {type(leaf).__name__}", fix=f"give {supported}")
    if isinstance(leaf, Sharded):
        if leaf.mesh.kind == "abstract":
            raise fail("is on an abstract mesh, where leaves have no values", fix="use another mesh")
        _ = leaf.shards  # raises if the leaf was donated
    elif leaf.is_meta or leaf.layout is not torch.strided:
        where = "is on the meta device" if leaf.is_meta else f"is {leaf.layout}"
        raise fail(f"{where}, and cannot be written", fix="give a tensor with values; x.to_dense() of a sparse one")
    if leaf.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise fail(f"cannot write {leaf.dtype}", fix=f"use one of {names}")
    return leaf


def assign_writers(leaves: Iterable[Sharded | Tensor]) -> list[list[tuple[Box, int]]]:
    """Return the different boxes of each leaf, without empty ones, each with the rank that writes it.

    It is the rank with the fewest bytes so far among those that hold the box, so that all ranks write about as much.
    Every rank computes the same result. Rank 0 writes plain tensors and leaves without elements.
    """
    nbytes: Counter[int] = Counter()
    holders: dict[Any, list[tuple[Box, list[int]]]] = {}
    out = []
    for leaf in leaves:
        key = (leaf.shape, leaf.spec, leaf.mesh) if isinstance(leaf, Sharded) else leaf.shape
        if key not in holders:
            holders[key] = _holders(leaf)
        boxes = []
        for box, ranks in holders[key]:
            writer = min(ranks, key=lambda rank: nbytes[rank])
            nbytes[writer] += torch.Size(box_shape(box)).numel() * leaf.dtype.itemsize
            boxes.append((box, writer))
        out.append(boxes)
    return out


def _holders(leaf: Sharded | Tensor) -> list[tuple[Box, list[int]]]:
    """Return each different box of a leaf, with the ranks that hold it."""
    if isinstance(leaf, Tensor) or not leaf.numel():
        return [(full_box(leaf.shape), [0])]
    return different_parts(leaf.shape, leaf.spec, leaf.mesh.axes)


def local_part(leaf: Sharded | Tensor, rank: int) -> Tensor:
    """Return the part of a leaf that a rank of this process holds."""
    return leaf if isinstance(leaf, Tensor) else leaf.shards[leaf.mesh.ranks.index(rank)]
