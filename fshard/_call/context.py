"""Contexts in which the ranks of a call run: eagerly while it is checked, and without values on an abstract mesh."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from fshard import _callsite
from fshard.errors import fail


class _ForceEager:
    """A context that any thread may enter: `torch.compile` does nothing while at least one thread is inside.

    The compiler's stance belongs to the whole process, and leaving it restores the stance found on entering it. Calls
    that overlap would restore each other's, so the first to enter sets the stance and the last to leave restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if self._stance is None and "torch._dynamo" in sys.modules:
                self._stance = torch.compiler.set_stance("force_eager")
            self._calls += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._calls -= 1
            if self._calls == 0 and self._stance is not None:
                stance, self._stance = self._stance, None
                stance.__exit__(None, None, None)


force_eager = _ForceEager()

_NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@contextlib.contextmanager
def explain_missing_values() -> Iterator[None]:
    """Replace the error of an operation that needs values, on a fake tensor, by one that names the user's line."""
    try:
        yield
    except RuntimeError as e:
        tags = getattr(getattr(e, "func", None), "tags", ())  # of the operation that a fake tensor refused
        if _NEEDS_VALUES.isdisjoint(tags):
            raise
        frames = [f for f, _ in traceback.walk_tb(e.__traceback__)]
        frame = next((f for f in reversed(frames) if _callsite.user_frame(f) is f), None)
        line = f"{_callsite.site(frame)}: " if frame is not None else ""
        raise fail(f"{line}an abstract mesh has no data, and this operation needs the value of a tensor: {e}",
                   fix="keep it a tensor (torch.where, indexing by tensors); or check with data, by "
                       'fs.shard_map(..., check="always")') from e  # fmt: skip
