"""Paths in a storage that fsspec reaches: `s3://bucket/run`, `gs://bucket/run`, `memory://run`.

`UrlPath` has the methods of `pathlib.Path` that fshard uses. A storage of objects replaces one object at once, and has
no rename and no lock: what is replaced there has a last object, whose presence is the commit. Every failure is an
OSError that names the URL, as of a disk.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from fshard.errors import fail

_BUFFER = 8 << 20  # bytes of one request, while a file is read in order
_VERSION = ("ETag", "etag", "md5Hash", "content_md5", "generation", "mtime", "LastModified", "last_modified", "created")


class UrlPath(os.PathLike[str]):
    """A path in a storage. Raises ShardingError if the storage is unknown, or its package is missing."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # takes a tenth of a second
        from fsspec.registry import known_implementations  # type: ignore[import-untyped]

        self._url = url.rstrip("/")
        try:
            self._fs, key = url_to_fs(self._url)
        except ImportError as e:
            protocol = self._url.partition("://")[0].rpartition("::")[2]
            known = known_implementations.get(protocol, {}).get("class", "").partition(".")[0]
            package = known if known not in ("", "fsspec") else f"fsspec[{protocol}]"
            raise fail(f"{self._url}: the package of this storage is not installed", str(e),
                       fix=f"pip install '{package}'") from e  # fmt: skip
        except ValueError as e:
            raise fail(f"{self._url}: there is no such storage", str(e),
                       fix="a scheme of fsspec, as s3:// (pip install s3fs), or the path of a file") from e  # fmt: skip
        self._key = key.rstrip("/")

    def __reduce__(self) -> Any:
        return UrlPath, (self._url,)

    def __fspath__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"UrlPath({self._url!r})"

    def __str__(self) -> str:
        return self._url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UrlPath) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str | os.PathLike[str]) -> UrlPath:
        return UrlPath(f"{self._url}/{os.fspath(name)}")

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> UrlPath:
        parent = self._url.rpartition("/")[0]
        return self if parent.endswith(":/") else UrlPath(parent)

    def absolute(self) -> UrlPath:
        return self

    def relative_to(self, folder: AnyPath) -> PurePosixPath:
        return PurePosixPath(self._url.removeprefix(f"{folder}/"))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[Any]:
        """Give the file system, and turn its errors into OSErrors that name the URL."""
        try:
            yield self._fs
        except OSError as e:
            number = e.errno or {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES}.get(type(e), errno.EIO)
            text = os.strerror(number) if number != errno.EIO else e.strerror or f"{type(e).__name__}: {e}"
            raise OSError(number, text, self._url) from e
        except Exception as e:  # of botocore, aiohttp, google.auth, ...
            raise OSError(errno.EIO, f"{type(e).__name__}: {e}", self._url) from e

    @contextlib.contextmanager
    def _query(self) -> Iterator[Any]:
        """Give the file system, to ask what is there now. Raises ShardingError if it cannot be asked."""
        try:
            with self._errors() as fs:
                fs.invalidate_cache()
                yield fs
        except FileNotFoundError:
            raise
        except OSError as e:
            raise fail(f"{self}: cannot be read", str(e.strerror)) from e

    def _info(self) -> dict[str, Any]:
        with self._query() as fs:
            return dict(fs.info(self._key))

    def _kind(self) -> str:
        try:
            return str(self._info()["type"])
        except FileNotFoundError:
            return ""

    def exists(self) -> bool:
        return self._kind() != ""

    def is_file(self) -> bool:
        return self._kind() == "file"

    def is_dir(self) -> bool:
        return self._kind() == "directory"

    def iterdir(self) -> Iterator[UrlPath]:
        with self._query() as fs:
            keys = [key.rstrip("/") for key in fs.ls(self._key, detail=False)]
        return (self / key.rpartition("/")[2] for key in keys if key != self._key)

    def glob(self, pattern: str) -> Iterator[UrlPath]:
        with self._query() as fs:
            keys = fs.glob(f"{self._key}/{pattern}")
        return (self / key.removeprefix(f"{self._key}/") for key in keys)

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            with self._errors() as fs:
                fs.rm_file(self._key)
        except FileNotFoundError:
            if not missing_ok:
                raise

    @contextlib.contextmanager
    def _in_folder(self) -> Iterator[Any]:
        """Give the file system, with the folder of this path if it has folders; a bucket is not made."""
        with self._errors() as fs:
            if fs.root_marker == "/":
                fs.makedirs(fs._parent(self._key), exist_ok=True)
            yield fs

    def write(self, chunks: Iterable[bytes | memoryview]) -> None:
        """Write an object; a list is put at once, and what an iterator gives is sent as it comes."""
        with self._in_folder() as fs:
            if isinstance(chunks, list):
                fs.pipe_file(self._key, b"".join(chunks))
                return
            f = fs.open(self._key, "wb")
        try:
            for chunk in chunks:
                with self._errors():
                    f.write(chunk)
        except BaseException:
            with contextlib.suppress(Exception):
                f.discard()  # else `close` would leave the part that was written
            f.closed = True
            raise
        with self._errors():
            f.close()

    def upload(self, file: Path) -> None:
        """Write an object with the contents of a file on this machine."""
        with self._in_folder() as fs:
            fs.put_file(str(file), self._key)

    def read(self, start: int, stop: int) -> bytes:
        with self._errors() as fs:
            return bytes(fs.cat_file(self._key, start=start, end=stop))

    def open(self) -> io.BufferedReader:
        """Open to read."""
        return io.BufferedReader(UrlFile(self), _BUFFER)

    def state(self) -> tuple[int, int]:
        """Return the size of an object, and a number that is another one when the object is replaced."""
        info = self._info()
        return int(info["size"]), zlib.crc32(repr([info.get(key) for key in _VERSION]).encode())


class UrlFile(io.RawIOBase):
    """An object that is read by ranges."""

    def __init__(self, path: UrlPath) -> None:
        self.path, self.name, self._at = path, str(path), 0
        self._size, _ = path.state()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readall(self) -> bytes:
        data = self.path.read(self._at, self._size) if self._at < self._size else b""
        self._at += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        stop = min(self._at + len(buffer), self._size)
        data = self.path.read(self._at, stop) if self._at < stop else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


AnyPath = Path | UrlPath


def as_path(path: str | os.PathLike[str]) -> AnyPath:
    """Return a path on a disk, or in a storage if it has a scheme. `file://` is a disk.

    Raises ShardingError for a Path that was made of a URL, which it cannot hold.
    """
    if isinstance(path, UrlPath):
        return path
    text = os.fspath(path)
    if isinstance(path, PurePath) and re.match(r"[a-z][a-z0-9+.-]+:/", text):
        raise fail(f"{text!r} is a Path, which cannot hold a URL", fix="give the URL as a str")
    for scheme in ("file://", "local://"):
        if text.startswith(scheme):
            return Path(text.removeprefix(scheme))
    return UrlPath(text) if "://" in text else Path(text)


def exists(path: AnyPath) -> bool:
    """Return whether something is at a path; False for a name that is too long, where `Path.exists` raises."""
    return path.exists() if isinstance(path, UrlPath) else os.path.exists(path)


def is_file(path: AnyPath) -> bool:
    """Return whether a file is at a path; False for a name that is too long, where `Path.is_file` raises."""
    return path.is_file() if isinstance(path, UrlPath) else os.path.isfile(path)
