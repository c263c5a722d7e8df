"""Copies of a module, which share its tensors: each call that runs at the same time as others uses a separate copy."""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping, Sequence
from operator import is_
from types import CellType
from typing import Any

from torch import Tensor, nn

from fshard.errors import fail

from .module_leaves import MODULE_ATTRIBUTES, Place
from .references import Outside, contents_of, copy_with_functions, items, reachable
from .stand_ins import Split
from .units import UnitForwards


class Contents:
    """The contents of all containers, and variables of closures, that a module refers to, to be restored."""

    def __init__(self, objects: Sequence[Any]) -> None:
        containers: list[Any] = [x for x in objects if isinstance(x, (dict, list, set))]
        self._cells = [(x, contents_of(x)) for x in objects if isinstance(x, CellType)]
        self._empty = [x for x in containers if not x]  # nearly all: dicts of hooks
        self._contents = {id(x): (x, copy.copy(x)) for x in containers if x}

    def is_changed(self, x: Any) -> bool:
        """Return whether a container that was there has other contents."""
        return not _same_objects(*self._contents[id(x)]) if id(x) in self._contents else bool(x)

    def changed_attributes(self, m: nn.Module) -> dict[str, Any]:
        """Return the attributes of a module that were assigned, or whose contents were changed; no functions."""
        _, before = self._contents.get(id(vars(m)), (m, vars(m)))
        out: dict[str, Any] = {}
        for name, x in vars(m).items():
            if name not in before or x is not before[name]:
                if not callable(x):  # one is bound to the modules of this copy
                    out[name] = x
            elif isinstance(x, (list, dict, set)) and name not in MODULE_ATTRIBUTES and self.is_changed(x):
                out[name] = copy.copy(x)
        return out

    def restore(self) -> None:
        if any(map(len, self._empty)):
            for x in self._empty:
                x.clear()
        for x, before in self._contents.values():
            if not _same_objects(x, before):
                x.clear()
                x.extend(before) if isinstance(x, list) else x.update(before)
        for cell, content in self._cells:
            if contents_of(cell) is not content:
                cell.cell_contents = content


class ModuleCopy:
    """A copy of a module, used by one call at a time, and the contents of all its containers.

    Its `references` are the leaves that it has in other lists and dicts, and in closures. `shared` has the ids of the
    objects that other copies may have too.
    """

    def __init__(
        self, module: nn.Module, places: list[Place], units: Mapping[str, Sequence[str]], splits: Mapping[str, Split],
        between_calls: Mapping[str, Tensor], shared: Container[int],
    ) -> None:  # fmt: skip
        self.module, self.places, self._shared = module, places, shared
        objects = list(reachable(module, shared))
        self.references = _references(objects, places)
        self.slots = (*places, *self.references)
        for p in self.slots:
            p.put(between_calls[p.leaf])
        self.units = UnitForwards(module, units, self.slots, splits)
        self.contents = Contents(objects)
        self._unit_contents: dict[str, Contents] = {}

    def unit_contents(self, name: str) -> Contents:
        """Return the contents of the containers of a unit, before anything in them is changed."""
        if name not in self._unit_contents:
            self._unit_contents[name] = Contents(list(reachable(self.module.get_submodule(name), self._shared)))
        return self._unit_contents[name]


def _same_objects(x: Any, before: Any) -> bool:
    if isinstance(x, set):
        return bool(x == before)
    pair = (x.values(), before.values()) if isinstance(x, dict) else (x, before)
    return len(x) == len(before) and all(map(is_, *pair))


def _references(objects: Sequence[Any], places: Sequence[Place]) -> list[Place]:
    """Return a place for each slot that has a leaf, beyond the dicts of parameters and buffers."""
    leaves = {id(p.value): p for p in places}
    holders = {id(p.holder) for p in places}
    found = [(x, key, leaves[id(y)]) for x in objects if id(x) not in holders
             for key, y in items(x) if id(y) in leaves]  # fmt: skip
    return [Place(holder, key, (f"{p.leaf}, reference {i}",), p.leaf, p.kind, p.transient)
            for i, (holder, key, p) in enumerate(found)]  # fmt: skip


def copy_module(module: nn.Module, outside: Outside) -> Any:
    """Copy a module, but share its tensors, and the objects outside of it."""
    try:
        return copy_with_functions(module, outside.objects)
    except Exception as e:
        raise fail(f"{type(module).__name__}: cannot be copied, and each rank of a simulated mesh needs its own",
                   f"{type(e).__name__}: {e}",
                   fix="keep objects that copy.deepcopy refuses out of the module") from e  # fmt: skip
