"""The program of a mapped function: the code of the user that it may run, found by names and without running it.

A call whose signature has been checked is checked again if the program has changed since: a cell that defines a helper
was run again, a module was reloaded, a flag was set.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch

from fshard._core.callsite import is_own_file, names_in

_MOST_ENTRIES = 64  # of a container that is searched for functions and flags: a larger one is data
_MOST_FACTS = 1000
_DEEPEST = 100
_PARTS: dict[type, tuple[str, ...]] = {  # attributes that may lead to code or to flags
    FunctionType: ("__code__", "__defaults__", "__kwdefaults__", "__closure__"),
    CellType: ("cell_contents",),
    MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
}


@dataclass(frozen=True)
class Program:
    """Code and flags that a function may use, in the order in which they are found, and the places that have them."""

    facts: tuple[Any, ...]  # code objects, flags, functions and classes that the user did not write
    places: list[Callable[[], Any]]  # each returns what is there now
    found: list[Any]  # what was there

    def is_current(self) -> bool:
        """Return whether every place still has the same object: some 50 ns for each."""
        try:
            return all(map(operator.is_, map(operator.call, self.places), self.found))
        except (AttributeError, IndexError, ValueError):  # an attribute, an entry or a variable is gone
            return False


def read_program(f: Callable[..., Any], *, flags: bool, before: Program | None = None) -> Program:
    """Find the functions of the user that `f` may call, and with `flags` the bools, strings and Nones that it may read.

    Follows global names, closures, defaults, methods and attributes of the user's modules, classes and objects,
    wrapped and partial functions, and entries of small containers. Not noticed are names that are computed (`getattr`
    of a variable), the code of installed packages, and numbers.

    `before` is an earlier reading; the facts stay the same object if they are equal.
    """
    reader = _Reader(flags)
    reader.visit(f, frozenset())
    facts = tuple(reader.facts)
    facts = before.facts if before is not None and before.facts == facts else facts
    return Program(facts, [place for place, _ in reader.places.values()], [x for _, x in reader.places.values()])


class _Reader:
    """A search through the objects that a function refers to, depth first."""

    def __init__(self, flags: bool) -> None:
        self.flags = flags
        self.facts: list[Any] = []
        self.places: dict[tuple[int, Any], tuple[Callable[[], Any], Any]] = {}  # by owner's id and key
        self._seen: dict[Any, tuple[Any, bool]] = {}  # each object, and whether it is of the program
        self._depth = 0

    def visit(self, x: Any, names: frozenset[str]) -> bool:
        """Add the facts of an object, and return whether it is of the program.

        `names` are those in the code that refers to it: of a module or an object only such attributes are visited.
        """
        kind = type(x)
        if _is_flag(x):
            self.facts += [x] * self.flags
            return self.flags
        if len(self.facts) > _MOST_FACTS or self._depth > _DEEPEST:
            return False
        key = (id(x), None if kind is FunctionType or issubclass(kind, type) else names)
        if key not in self._seen:
            self._seen[key] = x, True  # the answer while its parts refer to it
            self._depth += 1
            self._seen[key] = x, self._visit_new(x, kind, names)
            self._depth -= 1
        return self._seen[key][1]

    def _visit_new(self, x: Any, kind: type, names: frozenset[str]) -> bool:
        """Visit the parts of an object, and its class if the user wrote it. What has none of the program is data."""
        kept = bool(_own_bases(kind)) and self.visit(kind, frozenset())
        if kind in (CodeType, BuiltinFunctionType) or (issubclass(kind, type) and not _own_bases(x)):
            self.facts.append(x)
            return True
        if issubclass(kind, torch.nn.Module):
            self.facts.append(kind)
        for owner, get, keys, inner in _parts(x, kind, names):
            for key in sorted(keys) if isinstance(keys, (set, frozenset)) else keys:
                try:
                    part = get(key)
                except (AttributeError, ValueError):  # a slot or a variable of a closure that is not assigned yet
                    continue
                if self.visit(part, inner):
                    kept = True
                    self.places[id(owner), key] = functools.partial(get, key), part
        if (container := _container(kind)) and (kept or not len(x)):
            self.places[id(x), len] = functools.partial(container.__len__, x), len(x)
        return kept or issubclass(kind, type)


def _parts(x: Any, kind: type, names: frozenset[str]) -> Iterator[tuple[Any, Callable[[Any], Any], Iterable[Any], Any]]:
    """Yield what an object refers to: the owner, a function of keys, the keys, and the names in the code there.

    It reads types and stored attributes, so that no property and no `__getattr__` of the user runs.
    """
    if kind is FunctionType:
        names = names_in(x.__code__)
        if is_own_file(x.__code__.co_filename):
            yield x.__globals__, x.__globals__.get, names & x.__globals__.keys(), names
        yield x, vars(x).get, vars(x).keys() & {"__wrapped__"}, names
    if kind in _PARTS:
        parts = [n for n in _PARTS[kind] if kind is not FunctionType or getattr(x, n)]
        yield x, functools.partial(getattr, x), parts, names
    elif issubclass(kind, ModuleType):
        yield x, vars(x).get, names & vars(x).keys() if _is_own(x) else (), names
    elif issubclass(kind, type):
        for base in _own_bases(x):
            defined = [n for n, y in vars(base).items() if type(y) is FunctionType or not n.startswith("__")]
            yield base, vars(base).get, defined, frozenset(defined)
    elif container := _container(kind):
        keys = list(x) if container is dict else range(len(x))
        if container is list:  # strings and bools in a list are more often a log than flags
            keys = [i for i in keys if not _is_flag(x[i])]
        get = dict.get if container is dict else container.__getitem__
        yield x, functools.partial(get, x), keys if len(x) <= _MOST_ENTRIES else (), names
    else:  # the attributes whose names the class of the user, or the code that refers to the object, has
        used = {"__wrapped__"} | ({"training", "_modules"} if issubclass(kind, torch.nn.Module) else set())
        if _own_bases(kind):
            members = [item for c in kind.__mro__ for item in vars(c).items()]
            used |= names.union(*(names_in(m.__code__) for _, m in members if type(m) is FunctionType))
            for name, member in members:
                if name in used and type(member) is MemberDescriptorType:
                    yield x, member.__get__, [x], frozenset(used)
        with contextlib.suppress(AttributeError):  # of an object without them
            attributes = object.__getattribute__(x, "__dict__")
            yield x, attributes.get, used & attributes.keys(), frozenset(used)


def _container(kind: type) -> Any:
    return next((c for c in (dict, list, tuple) if issubclass(kind, c)), None)


def _own_bases(c: type) -> list[type]:
    """Return a class and its bases, those that the user defined."""
    return [base for base in c.__mro__ if _is_own(sys.modules.get(base.__module__))]


def _is_flag(x: Any) -> bool:
    return x is None or type(x) in (bool, str)


def _is_own(module: ModuleType | None) -> bool:
    """Return whether a module is the user's: a file, or the cells of a notebook."""
    if module is None:
        return False
    file = getattr(module, "__file__", None)
    return module.__name__ not in sys.builtin_module_names if file is None else is_own_file(file)
