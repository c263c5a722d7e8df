"""Writes that are killed: an exception in the place of the end of the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Killed(BaseException):
    """Raised where a process would be killed: nothing is cleaned up after it."""


def dying(f: Callable[..., Any], calls: Iterator[bool]) -> Callable[..., Any]:
    """Return `f`, which raises `Killed` in place of the call for which `calls` gives True."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls, False):
            raise Killed
        return f(*args, **kwargs)

    return call
