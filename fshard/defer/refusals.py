"""Refusals of what a pure function may not do: write to parameters, read other modules' tensors, run parts again."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from fshard._core.callsite import place_and_source, site, user_frame
from fshard._core.operations import OperationMode, tensors_in
from fshard._core.torch import FakeTensor, in_transform, storage_id, unwrapped
from fshard.errors import ShardingError, fail

from .aten_rules import written_tensors
from .module_leaves import Named, tensors_of


class ParameterWrites(OperationMode):  # type: ignore[no-untyped-call]
    """Refuses writes to the memory of parameters: they reach the caller's leaf on some meshes and not on others."""

    def __init__(self, name: str, params: Named) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name
        self.skeleton: dict[Any, str] | None = None  # storage -> leaf, of the module that a constructor made
        self.read: ShardingError | None = None  # of one of these: views cannot raise it
        self.watched = _memory_of(params)

    def refuse_reads(self, skeletons: Sequence[Named], given: Named) -> None:
        """Refuse operations on the leaves of the module that a call is not given: they have no values, or old ones."""
        present = {storage_id(y) for x in tensors_of(given).values() if (y := unwrapped(x)).layout is torch.strided}
        self.skeleton = {storage_id(x): name for named in skeletons for name, x in named.items()
                         if x.layout is torch.strided and storage_id(x) not in present}  # fmt: skip

    @contextlib.contextmanager
    def watch(self, params: Named) -> Iterator[None]:
        """Refuse writes to these too: gathered leaves of a unit, while it runs. Their memory is used again later."""
        before = self.watched
        self.watched = before | _memory_of(params)
        try:
            yield
            self.check_storages()
        finally:
            self.watched = before

    def __exit__(self, kind: Any, e: BaseException | None, traceback: Any) -> None:
        super().__exit__(kind, e, traceback)  # type: ignore[no-untyped-call]
        if e is None:
            self.check_storages()
        elif isinstance(e, Exception) and self.read not in (None, e):
            raise self.read from e

    def run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for x in written_tensors(func, args, kwargs):
            written = storage_id(x) if x.layout is torch.strided else None
            for name, (_, data, storage) in self.watched.items():
                # The leaves of a unit are parts of one storage.
                if storage == written and 0 <= _first_byte(x) - _first_byte(data) < data.nbytes:
                    raise self._error(name, str(func))
        if self.skeleton is not None and self.read is None:
            for x in tensors_in(args, kwargs):
                leaf = self.skeleton.get(storage_id(x)) if x.layout is torch.strided else None
                if leaf or isinstance(x, FakeTensor):
                    of = repr(leaf) if leaf else "a tensor that is neither a leaf nor an attribute"
                    self.read = not_of_the_call(f"{self.name}: forward reads {of}, of the module that the constructor "
                                                "made, and not of this call", *place_and_source(site()))  # fmt: skip
        return func(*args, **kwargs)

    def check_storages(self) -> None:
        """Raise ShardingError if forward set the `.data` of a parameter, without an operation, or read other leaves."""
        if self.read is not None:
            raise self.read
        for name, (x, data, storage) in self.watched.items():
            if storage_id(x) != storage:
                x.data = data
                raise self._error(name, "params.data = ...")

    def _error(self, name: str, how: str) -> ShardingError:
        return fail(f"{self.name}: forward writes to params[{name!r}]: {how}",
                    "a pure function leaves its arguments unchanged",
                    fix="write in the train step, to the new parameters; or switch it off in the module's "
                    "configuration; or apply.eval(), if it is done only in training")  # fmt: skip


def _memory_of(params: Named) -> dict[str, tuple[Tensor, Tensor, int]]:
    """Return each parameter, another tensor with its present memory, and the storage of that."""
    plain = {name: unwrapped(x) for name, x in tensors_of(params).items()}
    return {name: (x, x.detach(), storage_id(x)) for name, x in plain.items() if x.layout is torch.strided}


def _first_byte(x: Tensor) -> int:
    return int(x.storage_offset()) * x.itemsize


def equal_values(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors have the same values; True for tensors without values."""
    x, y = unwrapped(x.detach()), unwrapped(y.detach())
    if x is y or x.is_meta or isinstance(x, FakeTensor):
        return True
    return x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())  # NaN equals NaN


# --- tensors without values: of a module other than the call's ---------------------------------------------------


def is_valueless(x: object) -> bool:
    return isinstance(x, Tensor) and ((y := unwrapped(x)).is_meta or isinstance(y, FakeTensor))


def not_of_the_call(*what: str) -> ShardingError:
    """Return the error of a forward that reads tensors of another module than the call's."""
    return fail(*what, "a function, a hook or an object refers to that module, and was not copied with it",
                fix="read it from a module's attribute in forward: self.emb.weight; register modules, parameters and "
                "buffers")  # fmt: skip


def first_valueless(out: Any, buffers: Mapping[str, Tensor]) -> str | None:
    """Return the name of a result, or of a buffer, that has no values, also in containers and attributes of results."""
    pending: list[tuple[str, Any]] = [("buffers", buffers), ("its result", out)]
    seen: set[int] = set()
    while pending:
        name, x = pending.pop()
        if isinstance(x, Tensor):
            if is_valueless(x):
                return name
        elif id(x) not in seen and not isinstance(x, (str, int, float, type, nn.Module, type(None))):
            seen.add(id(x))
            if isinstance(x, (Mapping, list, tuple)):
                items = x.items() if isinstance(x, Mapping) else enumerate(x)
                pending += [(f"{name}[{key!r}]", y) for key, y in items]
            pending += [(f"{name}.{key}", y) for key, y in getattr(x, "__dict__", {}).items()]
    return None


# --- torch.utils.checkpoint: it would run parts of forward again, when the module has no leaves -----------------------

AGAIN = "{} would run a part of forward again in backward, when the module has no leaves"


def recomputed(*what: str) -> ShardingError:
    """Return the error of a module whose forward is to be run again, in part, in backward."""
    return fail(*what, fix="switch checkpointing off in the module, and wrap the call in fs.remat; or choose units=, "
                "and apply.unshard(..., remat=True)")  # fmt: skip


class RefuseCheckpoint(OperationMode):  # type: ignore[no-untyped-call]
    """Refuses torch.utils.checkpoint at its call, in each form: its frame is between an operation and `run`.

    It does not refuse one around `run`, which passes the leaves again.
    """

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name, self.run = name, sys._getframe(1).f_code

    def run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not self.run:
            if _is_checkpoint(frame):
                raise _called(self.name, frame)
            frame = frame.f_back
        return func(*args, **kwargs)


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
