"""Copies of a module, which share its tensors: each call that runs at the same time as others uses one of its own."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from fshard.errors import fail

from .module_leaves import Place
from .stand_ins import Split
from .units import UnitForwards

_OF_ALL_MODULES = frozenset(vars(nn.Module()))  # its parameters, buffers, modules, hooks


class Contents:
    """The contents of all containers that a module refers to, to be restored."""

    def __init__(self, module: nn.Module) -> None:
        containers: list[Any] = [x for x in reachable(module) if isinstance(x, (dict, list, set))]
        self._empty = [x for x in containers if not x]  # nearly all: dicts of hooks
        self._contents = [(x, copy.copy(x)) for x in containers if x]
        self._before = {id(x): before for x, before in self._contents}

    def is_changed(self, x: Any) -> bool:
        """Return whether a container that was there has other contents."""
        before = self._before.get(id(x))
        return bool(x) if before is None else not _same_objects(x, before)

    def changed_attributes(self, m: nn.Module) -> dict[str, Any]:
        """Return the attributes of a module that were assigned, or whose contents were changed; no functions."""
        before = self._before.get(id(vars(m)), vars(m))
        out: dict[str, Any] = {}
        for name, x in vars(m).items():
            if name not in before or x is not before[name]:
                if not callable(x):  # one is bound to the modules of this copy
                    out[name] = x
            elif isinstance(x, (list, dict, set)) and name not in _OF_ALL_MODULES and self.is_changed(x):
                out[name] = copy.copy(x)
        return out

    def restore(self) -> None:
        if any(map(len, self._empty)):
            for x in self._empty:
                x.clear()
        for x, before in self._contents:
            if not _same_objects(x, before):
                x.clear()
                x.extend(before) if isinstance(x, list) else x.update(before)


class ModuleCopy:
    """A copy of a module, used by one call at a time, and the contents of all its containers."""

    def __init__(
        self, module: nn.Module, places: list[Place], units: Mapping[str, Sequence[str]], splits: Mapping[str, Split],
        between_calls: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        self.module, self.places = module, places
        for p in places:
            p.holder[p.key] = between_calls[p.leaf]
        self.units = UnitForwards(module, units, places, splits)
        self.contents = Contents(module)
        self._unit_contents: dict[str, Contents] = {}

    def unit_contents(self, name: str) -> Contents:
        """Return the contents of the containers of a unit, before anything in them is changed."""
        if name not in self._unit_contents:
            self._unit_contents[name] = Contents(self.module.get_submodule(name))
        return self._unit_contents[name]


def _same_objects(x: Any, before: Any) -> bool:
    """Return whether a container has the same objects as before."""
    if isinstance(x, set):
        return bool(x == before)
    pair = (x.values(), before.values()) if isinstance(x, dict) else (x, before)
    return len(x) == len(before) and all(map(is_, *pair))


def copy_module(module: nn.Module) -> Any:
    """Copy a module, but share its tensors."""
    memo = {id(x): x for x in reachable(module) if isinstance(x, Tensor)}
    try:
        return copy.deepcopy(module, memo)
    except Exception as e:
        raise fail(
            f"{type(module).__name__}: cannot be copied, and each rank of a simulated mesh needs its own",
            f"{type(e).__name__}: {e}",
            fix="keep objects that copy.deepcopy refuses out of the module",
        ) from e


def reachable(module: nn.Module) -> Iterator[Any]:
    """Yield the objects that a module refers to, directly or not: attributes, containers, tensors."""
    pending: list[Any] = [module]
    seen: dict[int, Any] = {}
    while pending:
        x = pending.pop()
        if id(x) in seen or isinstance(x, (str, int, float, type, FunctionType, ModuleType)):
            continue
        seen[id(x)] = x
        yield x
        if isinstance(x, Tensor):
            continue
        if isinstance(x, Mapping):
            pending += x.values()
        elif isinstance(x, (list, tuple, set, frozenset, deque)):
            pending += x
        elif isinstance(x, MethodType):
            pending.append(x.__self__)
        elif isinstance(x, functools.partial):
            pending += [x.func, *x.args, x.keywords]
        if hasattr(x, "__dict__"):
            pending.append(x.__dict__)
