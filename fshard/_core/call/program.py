"""The program of a mapped function: the code of the user that it may run, found by names and without running it.

A call whose signature has been checked is checked again if the program has changed since: a cell that defines a helper
was run again, a module was reloaded, a flag was set.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import operator
import sys
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch

from fshard._core.callsite import is_own_file

_MOST_ENTRIES = 64  # of a container that is searched for functions and flags: a larger one is data
_MOST_FACTS = 1000
_DEEPEST = 100
_DEFINITIONS = (FunctionType, BuiltinFunctionType, ModuleType, type)  # of a program in any case


@dataclass(frozen=True)
class Program:
    """Code and flags that a function may use, in the order in which they are found, and where they stand."""

    facts: tuple[Any, ...]  # code objects, flags, functions not written in Python
    places: list[Callable[[], Any]]  # each returns what stands there now
    found: list[Any]  # what stood there

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
    """A search through the objects that a function refers to, depth first.

    It reads types and stored attributes, so that no property and no `__getattr__` of the user runs.
    """

    def __init__(self, flags: bool) -> None:
        self.flags = flags
        self.facts: list[Any] = []
        self.places: dict[tuple[int, Any], tuple[Callable[[], Any], Any]] = {}  # by owner's id and key
        self._seen: dict[Any, tuple[Any, bool]] = {}  # each object, and whether it is of the program
        self._depth = 0

    def visit(self, x: Any, names: frozenset[str]) -> bool:
        """Add an object's facts; return whether it is of the program. `names` stand in the code that refers to it."""
        kind = type(x)
        if _is_flag(x):
            if self.flags:
                self.facts.append(x)
            return self.flags
        if len(self.facts) > _MOST_FACTS or self._depth > _DEEPEST:
            return False
        key = (id(x), None if kind is FunctionType or issubclass(kind, type) else names)
        if key not in self._seen:
            self._seen[key] = x, True  # the answer while its own parts refer to it
            self._depth += 1
            self._seen[key] = x, self._visit_new(x, kind, names)
            self._depth -= 1
        return self._seen[key][1]

    def _visit_new(self, x: Any, kind: type, names: frozenset[str]) -> bool:
        if kind is FunctionType:
            self._visit_function(x)
        elif kind is MethodType:
            self.visit(x.__func__, names)
            self.visit(x.__self__, names)
        elif kind is functools.partial:
            for part in (x.func, x.args, x.keywords):
                self.visit(part, names)
        elif kind in (staticmethod, classmethod):
            self.visit(x.__func__, names)
        elif kind is property:
            self.visit(x.fget, names)
        elif kind is BuiltinFunctionType:
            self.facts.append(x)
        elif issubclass(kind, ModuleType):
            return _is_own(x) and self._visit_entries(vars(x), vars(x).get, names & vars(x).keys(), names)
        elif issubclass(kind, type):
            self._visit_class(x)
        elif base := next((c for c in (dict, list, tuple) if issubclass(kind, c)), None):
            return self._visit_container(x, base, names)
        else:
            return self._visit_object(x, kind, names)
        return True

    def _visit_function(self, f: FunctionType) -> None:
        names = _names(f.__code__)
        self.facts.append(f.__code__)
        self._keep(f, "__code__", functools.partial(getattr, f, "__code__"))  # a reload may replace it in place
        for default in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()):
            self.visit(default, names)
        for cell in f.__closure__ or ():
            if _is_filled(cell) and self.visit(cell.cell_contents, names):
                self._keep(cell, None, functools.partial(getattr, cell, "cell_contents"))
        if "__wrapped__" in vars(f):
            self.visit(vars(f)["__wrapped__"], names)
        if is_own_file(f.__code__.co_filename):
            self._visit_entries(
                f.__globals__, f.__globals__.get, _global_names(f.__code__) & f.__globals__.keys(), names
            )

    def _visit_class(self, c: type) -> None:
        """Visit the functions and flags that an own class defines, or inherits from own classes."""
        own = _own_bases(c)
        for base in own:
            defined = [n for n, x in vars(base).items() if type(x) is FunctionType or not n.startswith("__")]
            self._visit_entries(base, vars(base).get, defined, frozenset(defined))
        if not own:
            self.facts.append(c)

    def _visit_container(self, x: Any, base: Any, names: frozenset[str]) -> bool:
        """Visit the entries of a small container. One that has entries, and none of the program, is data."""
        if len(x) > _MOST_ENTRIES:
            return False
        get = functools.partial(dict.get if base is dict else base.__getitem__, x)
        keys = list(x) if base is dict else range(len(x))
        if base is list:  # strings and bools in a list are more often a log than flags
            keys = [i for i in keys if not _is_flag(x[i])]
        kept = self._visit_entries(x, get, keys, names)
        if kept or not len(x):
            self._keep(x, len, functools.partial(base.__len__, x))
        return kept | self._visit_own_kind(type(x))

    def _visit_object(self, x: Any, kind: type, names: frozenset[str]) -> bool:
        """Visit the class of an object, and those of its attributes whose names the class or the referrer uses."""
        kept = self._visit_own_kind(kind)
        if kept:
            functions = [m for base in kind.__mro__ for m in vars(base).values() if type(m) is FunctionType]
            names = names.union(*(_names(m.__code__) for m in functions))
            slots = {n: m for c in kind.__mro__ for n, m in vars(c).items() if type(m) is MemberDescriptorType}
            for name in sorted(names & slots.keys()):
                with contextlib.suppress(AttributeError):  # of a slot that is not assigned yet
                    self._visit_entries(x, slots[name].__get__, [x], names)
        try:
            attributes = object.__getattribute__(x, "__dict__")
        except AttributeError:
            return kept
        used = set(names) if kept else {"__wrapped__"}
        if issubclass(kind, torch.nn.Module):
            self.facts.append(kind)
            used |= {"training", "_modules"}
        return self._visit_entries(x, attributes.get, used & attributes.keys(), names) | kept

    def _visit_own_kind(self, kind: type) -> bool:
        """Visit the class of an object if it is the user's own; return whether it is."""
        return bool(_own_bases(kind)) and self.visit(kind, frozenset())

    def _visit_entries(self, owner: Any, get: Callable[[Any], Any], keys: Iterable[Any], names: frozenset[str]) -> bool:
        """Visit what `get` returns for some keys of a namespace or a container; return if any is of the program."""
        kept = False
        for key in sorted(keys) if isinstance(keys, Set) else list(keys):
            if self.visit(get(key), names):
                kept = True
                self._keep(owner, key, functools.partial(get, key))
        return kept

    def _keep(self, owner: Any, key: Any, place: Callable[[], Any]) -> None:
        self.places[id(owner), key] = place, place()


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> frozenset[str]:
    """Return the global names and attributes in a function's code, and in that of the functions inside it."""
    return frozenset(code.co_names).union(*(_names(c) for c in code.co_consts if isinstance(c, CodeType)))


@functools.lru_cache(maxsize=4096)
def _global_names(code: CodeType) -> frozenset[str]:
    """Return the global names alone."""
    loaded = frozenset(i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return loaded.union(*(_global_names(c) for c in code.co_consts if isinstance(c, CodeType)))


def _own_bases(c: type) -> list[type]:
    """Return a class and its bases, those that the user defined."""
    return [base for base in c.__mro__ if _is_own(sys.modules.get(base.__module__))]


def _is_flag(x: Any) -> bool:
    return x is None or type(x) in (bool, str)


def _is_filled(cell: CellType) -> bool:
    """Return whether the variable of a closure has been assigned."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _is_own(module: ModuleType | None) -> bool:
    """Return whether a module is the user's own: a file, or the cells of a notebook."""
    if module is None:
        return False
    file = getattr(module, "__file__", None)
    return module.__name__ not in sys.builtin_module_names if file is None else is_own_file(file)
