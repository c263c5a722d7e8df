"""Writes of a forward to its parameters and buffers, which a pure function may not make unseen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard._core.callsite import place_and_source, site
from fshard._core.torch import FakeTensor, TorchDispatchMode, storage_id, unwrapped, version_of
from fshard.errors import ShardingError, fail

from .aten_rules import written_tensors
from .graph import tensors_in
from .module_leaves import Named
from .stand_ins import tensors_of
from .values import not_of_the_call


class ParameterWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses writes to the memory of parameters: they reach the caller's leaf on some meshes and not on others."""

    def __init__(self, name: str, params: Named) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name
        self.skeleton: dict[Any, str] | None = None  # storage -> leaf, of the module that a constructor made
        self.read: ShardingError | None = None  # of one of these: views cannot raise it
        self.before: dict[str, tuple[Tensor, Tensor, Any]] = {}
        self.ranges: dict[Any, list[tuple[int, int, str]]] = {}  # storage -> (first byte, end, name) of each parameter
        self._add(params)

    def refuse_reads(self, skeletons: Sequence[Named], given: Named) -> None:
        """Refuse operations on the leaves of the module that a call is not given: they have no values, or old ones."""
        present = {storage_id(y) for x in tensors_of(given).values() if (y := unwrapped(x)).layout is torch.strided}
        self.skeleton = {storage_id(x): name for named in skeletons for name, x in named.items()
                         if x.layout is torch.strided}  # fmt: skip
        self.skeleton = {n: name for n, name in self.skeleton.items() if n not in present}

    def _add(self, params: Named) -> None:
        plain = {name: unwrapped(x) for name, x in tensors_of(params).items()}
        new = {k: (x, x.detach(), storage_id(x)) for k, x in plain.items() if x.layout is torch.strided}
        self.before = self.before | new
        self.ranges = dict(self.ranges)
        for name, (x, _, storage) in new.items():
            start = int(x.storage_offset()) * x.itemsize
            # The leaves of a unit are parts of one storage.
            self.ranges[storage] = [*self.ranges.get(storage, ()), (start, start + int(x.nbytes), name)]

    @contextlib.contextmanager
    def watch(self, params: Named) -> Iterator[None]:
        """Refuse writes to these too: gathered leaves of a unit, while it runs. Their memory is used again later."""
        before = self.before, self.ranges
        self._add(params)
        try:
            yield
            self.check_storages()
        finally:
            self.before, self.ranges = before

    def _dispatch(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        for x in written_tensors(func, args, kwargs or {}):
            at = x.storage_offset() * x.itemsize if x.layout is torch.strided else -1
            for start, end, name in self.ranges.get(storage_id(x), ()) if at >= 0 else ():
                if start <= at < end:
                    raise self._error(name, str(func))
        if self.skeleton is not None and self.read is None:
            for x in tensors_in((args, kwargs)):
                leaf = self.skeleton.get(storage_id(x)) if x.layout is torch.strided else None
                if leaf or isinstance(x, FakeTensor):
                    of = repr(leaf) if leaf else "a tensor that is neither a leaf nor an attribute"
                    self.read = not_of_the_call(f"{self.name}: forward reads {of}, of the module that the constructor "
                                                "made, and not of this call", *place_and_source(site()))  # fmt: skip
        return func(*args, **(kwargs or {}))

    def check_storages(self) -> None:
        """Raise ShardingError if forward set the `.data` of a parameter, without an operation, or read other leaves."""
        if self.read is not None:
            raise self.read
        for name, (x, data, n) in self.before.items():
            if storage_id(x) != n:
                x.data = data
                raise self._error(name, "params.data = ...")

    def _error(self, name: str, how: str) -> ShardingError:
        return fail(f"{self.name}: forward writes to params[{name!r}]: {how}",
                    "a pure function leaves its arguments unchanged",
                    fix="write in the train step, to the new parameters; or switch it off in the module's "
                    "configuration; or apply.eval(), if it is done in training alone")  # fmt: skip


# A __torch_dispatch__ in the class body would be wrapped by torch: the first operation would import dynamo for seconds.
ParameterWrites.__torch_dispatch__ = ParameterWrites._dispatch  # type: ignore[assignment]


def version(x: Tensor) -> int:
    return version_of(unwrapped(x))


def equal_values(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors have the same values; True for tensors without values."""
    x, y = unwrapped(x.detach()), unwrapped(y.detach())
    if x is y or x.is_meta or isinstance(x, FakeTensor):
        return True
    return x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())  # NaN equals NaN
