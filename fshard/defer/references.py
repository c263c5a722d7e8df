"""Objects that a module refers to, also through the functions that it has: hooks, lambdas, replaced forwards.

A function is bound by its closure to the objects of one module, so a copy of the module needs a copy of the function.
One that is found by its name in a file (`torch.relu`), or in a class, is shared by all copies, as classes are.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import sys
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from fshard import tree
from fshard._core.callsite import Site, is_own_file, names_in, place_and_source
from fshard.errors import ShardingError, fail


def reachable(
    root: Any, outside: Container[int] = (), *, closures: bool = True, classes: bool = False
) -> Iterator[Any]:
    """Yield the objects that an object refers to, directly or not: attributes, containers, tensors, functions.

    Not those with the ids `outside`, and not those in closures, or in methods of local classes, if the flags are False.
    """
    pending: list[Any] = [root]
    seen: dict[int, Any] = {}
    while pending:
        x = pending.pop()
        if id(x) in seen or id(x) in outside or isinstance(x, (str, int, float, ModuleType)):
            continue
        if isinstance(x, type) and not (classes and "<locals>" in x.__qualname__):
            continue
        seen[id(x)] = x
        yield x
        if isinstance(x, Tensor) or (isinstance(x, FunctionType) and (not closures or _is_global(x))):
            continue
        of = next((of for kind, of in _CONTENTS.items() if isinstance(x, kind)), lambda _: ())
        pending.extend(iter(of(x)))  # `+=` would call the `__len__` of a subclass, and e3nn's raises
        if hasattr(x, "__dict__") and not isinstance(x, type):
            pending.append(x.__dict__)


def _is_global(f: FunctionType) -> bool:
    """Return whether a function is found by its name in its file."""
    x: Any = sys.modules.get(f.__module__ or "")
    for part in f.__qualname__.split("."):
        x = getattr(x, part, None)
    return x is f


def _is_of_class(method: MethodType) -> bool:
    return getattr(type(method.__self__), method.__name__, None) is method.__func__


def contents_of(cell: CellType) -> Any:
    """Return the value of a variable of a closure; None before it has one."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


_CONTENTS: dict[Any, Callable[[Any], Iterable[Any]]] = {  # the objects that an object of a class has
    Mapping: lambda x: x.values(),
    (list, tuple, set, frozenset, deque): lambda x: x,
    type: lambda x: vars(x).values(),
    MethodType: lambda x: (x.__self__,) if _is_of_class(x) else (x.__self__, x.__func__),
    BuiltinMethodType: lambda x: (x.__self__,),
    functools.partial: lambda x: (x.func, *x.args, x.keywords),
    FunctionType: lambda x: (x.__closure__, x.__defaults__, x.__kwdefaults__),
    CellType: lambda x: (contents_of(x),),
}


@dataclass(frozen=True)
class Slot:
    """A place of an object in a list, a dict, a closure, or the arguments of a function."""

    holder: Any
    key: Any

    @property
    def value(self) -> Any:
        """The object that is there now; None if there is none."""
        try:
            return _items(self.holder)[self.key]
        except LookupError:
            return None

    def put(self, x: Any) -> None:
        if isinstance(self.holder, (dict, list)):
            self.holder[self.key] = x
        elif isinstance(self.holder, CellType):
            self.holder.cell_contents = x
        else:
            items = tuple(x if i == self.key else y for i, y in enumerate(_items(self.holder)))
            if isinstance(self.holder, FunctionType):
                self.holder.__defaults__ = items
            else:  # the arguments of a partial have no other way to change in place
                self.holder.__setstate__((self.holder.func, items, self.holder.keywords, self.holder.__dict__))


def _items(x: Any) -> Any:
    """Return the objects in a list, a dict, a variable of a closure, or the arguments of a function; else none."""
    if isinstance(x, (dict, list)):
        return x
    if isinstance(x, CellType):
        return (contents_of(x),)
    return (x.__defaults__ if isinstance(x, FunctionType) else x.args if isinstance(x, functools.partial) else ()) or ()


def items(x: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys of the slots of an object, and the objects in them."""
    held = _items(x)
    return held.items() if isinstance(held, dict) else enumerate(held)


# --- copies -----------------------------------------------------------------------------------------------------------


def copy_with_functions(root: Any, outside: Mapping[int, Any]) -> Any:
    """Copy an object, and the functions that it has, but share tensors and the objects `outside`, by their ids."""
    found = list(reachable(root, outside))
    memo = {**outside, **{id(x): x for x in found if isinstance(x, Tensor)}}
    functions = [x for x in found if isinstance(x, FunctionType) and (x.__closure__ or x.__defaults__ or
                 x.__kwdefaults__) and not _is_global(x)]  # fmt: skip
    cells = {id(c): (c, CellType()) for f in functions for c in f.__closure__ or () if id(c) not in outside}
    copies = [(f, _copy_of(f, cells)) for f in functions]
    # copy.deepcopy calls `__new__` without arguments, which a class that has one may not take.
    modules = [(m, object.__new__(type(m))) for m in found if isinstance(m, nn.Module)
               and type(m).__new__ is not object.__new__ and not hasattr(m, "__deepcopy__")]  # fmt: skip
    memo.update((id(x), new) for x, new in (*copies, *modules))
    for m, new_module in modules:
        vars(new_module).update(copy.deepcopy(vars(m), memo))
    out = copy.deepcopy(root, memo)
    for cell, new_cell in cells.values():
        with contextlib.suppress(ValueError):  # a variable without a value
            new_cell.cell_contents = _copied(cell.cell_contents, memo)
    for f, new in copies:
        new.__defaults__, new.__kwdefaults__ = _copied(f.__defaults__, memo), _copied(f.__kwdefaults__, memo)
        new.__dict__.update((key, _copied(x, memo)) for key, x in vars(f).items())
    if copies or any(isinstance(x, BuiltinMethodType) for x in found):  # which copy.deepcopy shares
        for x in list(reachable(out, memo)):  # and not into the original
            for key, value in list(items(x)):
                if (bound := _bound(value, memo)) is not value:
                    Slot(x, key).put(bound)
    return out


def _copy_of(f: FunctionType, cells: Mapping[int, tuple[CellType, CellType]]) -> FunctionType:
    """Return a function like another one, whose variables have no values yet."""
    closure = tuple(cells[id(c)][1] if id(c) in cells else c for c in f.__closure__ or ())
    new = FunctionType(f.__code__, f.__globals__, f.__name__, None, closure or None)
    new.__qualname__, new.__module__, new.__doc__ = f.__qualname__, f.__module__, f.__doc__
    new.__annotations__ = f.__annotations__
    return new


def _copied(x: Any, memo: dict[int, Any]) -> Any:
    """Copy an object that a function has; share one that cannot be copied."""
    if type(x) is object:  # it marks an argument that was left out
        return x
    try:
        return copy.deepcopy(x, memo)
    except Exception:
        return x


def _bound(x: Any, memo: Mapping[int, Any]) -> Any:
    """Return a function or a method, of the copy where it is of the original."""
    if isinstance(x, FunctionType):
        return memo.get(id(x), x)
    if isinstance(x, MethodType) and id(x.__func__) in memo:
        return MethodType(memo[id(x.__func__)], x.__self__)
    if isinstance(x, BuiltinMethodType) and id(x.__self__) in memo:
        return getattr(memo[id(x.__self__)], x.__name__)
    return x


# --- objects from outside of the constructor --------------------------------------------------------------------------


class Outside:
    """The objects that functions of a module capture from outside of its constructor, where others may read them.

    They are not copied, and no forward may store a tensor in them.
    """

    def __init__(self, constructor: Any, module: nn.Module) -> None:
        self.made: Mapping[str, weakref.ref[Tensor]] = {}  # the leaves that the constructor made, with values
        self.objects: dict[int, Any] = {}
        found = list(reachable(module))
        if not any(isinstance(x, (CellType, BuiltinMethodType)) for x in found):
            return
        outside = {id(x): x for x in reachable(constructor, classes=True)}
        inside = {id(x): x for x in reachable(module, closures=False)}
        modules = {key for key, x in inside.items() if isinstance(x, nn.Module)}
        self.objects = {id(x): x for x in found if id(x) in outside and id(x) not in inside and x is not None
                        and modules.isdisjoint(map(id, reachable(x)))}  # fmt: skip

    def seen_by(self, module: nn.Module) -> Iterator[Seen]:
        """Yield the variables and containers from outside that the functions of a module name."""
        for x in reachable(module, self.objects):
            if isinstance(x, BuiltinMethodType) and id(x.__self__) in self.objects:
                yield Seen(x.__name__, x, functools.partial(getattr, x, "__self__"))
            f = x.__func__ if isinstance(x, MethodType) and not _is_of_class(x) else x
            if not isinstance(f, FunctionType):
                continue
            for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
                if id(cell) in self.objects or id(contents_of(cell)) in self.objects:
                    yield Seen(name, f, functools.partial(contents_of, cell))
            for name in names_in(f.__code__) & f.__globals__.keys() if is_own_file(f.__code__.co_filename) else ():
                if isinstance(f.__globals__[name], (dict, list, Tensor, type(None))):
                    yield Seen(name, f, functools.partial(operator.getitem, f.__globals__, name))


class Seen:
    """A variable from outside of the constructor that a function of a module reads or writes."""

    def __init__(self, name: str, function: Any, value: Callable[[], Any]) -> None:
        self.name, self.function, self._value = name, function, value

    def tensors(self) -> list[Tensor]:
        x = self._value()
        held = x if isinstance(x, (dict, list, Tensor)) else getattr(x, "__dict__", None)
        return [y for y in tree.leaves(held) if isinstance(y, Tensor)]

    def stored(self, name: str) -> ShardingError:
        """Return the error of a forward that stores a tensor in it."""
        code = getattr(self.function, "__code__", None)
        line = () if code is None else place_and_source(Site(code, 0))
        return fail(f"{name}: forward stores a tensor in {self.name!r}, which is not of the module", *line,
                    "ranks that are threads share it, and a pure function returns all that it computes",
                    fix="make it in the constructor, as an attribute of the module, and return it from forward"
                    )  # fmt: skip
