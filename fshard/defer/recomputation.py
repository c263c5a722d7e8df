"""Refusal of torch.utils.checkpoint in a forward: it would run parts of it again, when the module has no leaves."""

from __future__ import annotations

import sys
import traceback
from types import FrameType
from typing import Any

from fshard._core.callsite import place_and_source, site, user_frame
from fshard._core.torch import TorchDispatchMode, in_transform
from fshard.errors import ShardingError, fail

AGAIN = "{} would run a part of forward again in backward, when the module has no leaves"


def recomputed(*what: str) -> ShardingError:
    """Return the error of a module whose forward is to be run again, in part, in backward."""
    return fail(*what, fix="switch checkpointing off in the module, and wrap the call in fs.remat; or choose units=, "
                "and apply.unshard(..., remat=True)")  # fmt: skip


class RefuseCheckpoint(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses torch.utils.checkpoint at its call, in each form: its frame is between an operation and `run`.

    It does not refuse one around `run`, which passes the leaves again.
    """

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name, self.run = name, sys._getframe(1).f_code

    def _dispatch(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not self.run:
            if _is_checkpoint(frame):
                raise _called(self.name, frame)
            frame = frame.f_back
        return func(*args, **(kwargs or {}))


# A __torch_dispatch__ in the class body would be wrapped by torch: the first operation would import dynamo for seconds.
RefuseCheckpoint.__torch_dispatch__ = RefuseCheckpoint._dispatch  # type: ignore[assignment]


def refused_by_torch_func(name: str, e: Exception) -> ShardingError | None:
    """Return the error of a checkpoint that torch.func refuses, in words that do not name it; None for other errors."""
    if in_transform() and any(text in str(e) for text in ("saved tensor hooks", "setup_context")):
        for frame, _ in traceback.walk_tb(e.__traceback__):
            if _is_checkpoint(frame):
                return _called(name, frame)
    return None


def _is_checkpoint(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == "torch.utils.checkpoint"


def _called(name: str, frame: FrameType) -> ShardingError:
    return recomputed(f"{name}: forward calls torch.utils.checkpoint", *place_and_source(site(user_frame(frame))),
                      AGAIN.format("it"))  # fmt: skip
