"""Pytrees: optree, re-exported under short names, with paths, and with errors of prefix trees that name the path.

A leaf is any object that optree does not know as a container: a tensor, a `P`, a `Deferred`, a `Sharded`, a number.
`None` is an empty subtree. A `Node` is a container with fields, such as a `Weight`; `register` makes a dataclass one.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, TypeVar

import optree
import torch
from optree import PyTreeSpec
from optree import tree_structure as structure
from optree.utils import total_order_sorted

from .errors import ShardingError, a_type, call_of, checked, fail, join_limited, must_be, raise_all, shown

__all__ = ["all", "broadcast", "dotted", "flatten", "leaves", "leaves_with_path", "map", "map_with_path", "reduce",
           "register", "show", "structure", "transpose", "unflatten"]  # fmt: skip

Path = tuple[Any, ...]
C = TypeVar("C", bound=type)

_subtrees: dict[type, tuple[str, ...]] = {}  # of each node and registered class, the fields that are subtrees


class Node:
    """Base of dataclasses that are containers of a tree: the fields in `children` are subtrees, the others static data.

    Two nodes have one structure if their classes and static data are equal.
    """

    children: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _add_container(cls, cls.children)


def _add_container(cls: Any, children: tuple[str, ...]) -> None:
    everywhere: Any = optree.registry.__GLOBAL_NAMESPACE
    optree.register_pytree_node(cls, _flatten_node, functools.partial(_make_node, cls), namespace=everywhere)
    _subtrees[cls] = children


def register(cls: C) -> C:
    """Make a dataclass a container of every tree, with a subtree in each field: a decorator above `@dataclass`.

    Without it an object is one leaf. A field with `metadata={"static": True}`, as in JAX, is not a subtree: a name, a
    size, an option. Two objects have one structure if these are equal. The class is made by its fields, by name. It
    gets a method `replace(**changes)`, as of flax.struct, unless it has one.

    >>> @register
    ... @dataclasses.dataclass
    ... class Batch:
    ...     tokens: Any
    ...     name: str = dataclasses.field(metadata={"static": True})
    >>> map(lambda x: 10 * x, Batch(tokens=1, name="a"))
    Batch(tokens=10, name='a')
    >>> Batch(tokens=1, name="a").replace(tokens=2)
    Batch(tokens=2, name='a')

    Raises ShardingError for a class that is not a dataclass, or that optree knows already.
    """
    kind: Any = cls
    if cls in _subtrees and not issubclass(cls, Node):
        return cls
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise must_be("register: cls", "a dataclass", cls, "@fs.tree.register above @dataclass")
    try:
        _add_container(kind, tuple(f.name for f in dataclasses.fields(kind) if f.init and not f.metadata.get("static")))
    except ValueError as e:
        raise fail(f"register: {cls.__name__} is a container already, by optree or as a Node") from e
    if not hasattr(cls, "replace"):
        kind.replace = dataclasses.replace
    return cls


def _flatten_node(node: Any) -> tuple[list[Any], tuple[Any, ...], tuple[str, ...]]:
    children = _subtrees[type(node)]
    return [getattr(node, name) for name in children], _static(node), children


def _static(node: Any) -> tuple[tuple[str, Any], ...]:
    """Return (name, value) of each field that is passed to the class and is not a subtree."""
    names = [f.name for f in dataclasses.fields(node) if f.init and f.name not in _subtrees[type(node)]]
    return tuple([(name, getattr(node, name)) for name in names])


def _make_node(cls: Any, static: tuple[tuple[str, Any], ...], children: Iterable[Any]) -> Any:
    return cls(**dict(zip(_subtrees[cls], children, strict=True)), **dict(static))


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """Return the leaves in order, dicts by sorted key, and the structure for `unflatten`.

    A subtree for which `is_leaf` is true is one leaf.

    >>> flatten({"b": [1, 2], "a": 0})[0]
    [0, 1, 2]
    """
    if not torch.compiler.is_dynamo_compiling():
        return optree.tree_flatten(tree, is_leaf)
    out: list[Any] = []
    return out, _flatten_traced(tree, out, is_leaf)


def unflatten(treedef: Any, leaves: Iterable[Any]) -> Any:
    """Return the tree of that structure with these leaves.

    >>> found, treedef = flatten({"b": [1, 2], "a": 0})
    >>> unflatten(treedef, [10 * leaf for leaf in found])
    {'b': [10, 20], 'a': 0}

    Raises ShardingError for leaves that are not as many as the structure has.
    """
    if not torch.compiler.is_dynamo_compiling():
        try:
            return optree.tree_unflatten(treedef, leaves)
        except (AttributeError, TypeError, ValueError) as e:
            if not isinstance(treedef, PyTreeSpec):
                raise must_be("unflatten: treedef", "a PyTreeSpec", treedef, "what flatten returned") from None
            if not isinstance(leaves, Iterable):
                raise must_be("unflatten: leaves", "an iterable", leaves) from None
            if isinstance(e, ValueError) and str(e).startswith("Too "):
                raise fail(f"unflatten: leaves: {e}", fix="as many leaves as flatten returned") from None
            raise
    return _unflatten_traced(treedef, iter(leaves))


def leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Return the leaves in order.

    >>> leaves({"b": [1, 2], "a": 0})
    [0, 1, 2]
    """
    return flatten(tree, is_leaf)[0]


def map(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Return the tree of `f(leaf, *leaves at the same path of rest)`; `rest` may have subtrees in place of leaves.

    >>> map(lambda a, b: a + b, {"x": 1}, {"x": 2})
    {'x': 3}
    """
    if not torch.compiler.is_dynamo_compiling():
        try:
            return optree.tree_map(f, tree, *rest)
        except (TypeError, ValueError):
            _refuse_map("map", f, tree, rest)
            raise
    first, treedef = flatten(tree)
    columns = [first, *(flatten(other)[0] for other in rest)]
    return unflatten(treedef, [f(*row) for row in zip(*columns, strict=True)])


# Dynamo replaces optree by another implementation, which cannot pass the structure of a dict to another graph (torch
# 2.13 with optree 0.20), so traced programs use these functions. The order of the leaves is the same.


def _flatten_traced(tree: Any, out: list[Any], is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Append the leaves to `out`; return the structure: None for a leaf, else (type, static data, keys, children)."""
    children = None if is_leaf is not None and is_leaf(tree) else _children(tree)
    if children is None:
        out.append(tree)
        return None
    kind: Any = type(tree)
    static: tuple[Any, ...] = ()
    if isinstance(tree, dict):
        kind, static = OrderedDict if isinstance(tree, OrderedDict) else dict, tuple(tree)
    elif isinstance(tree, (list, tuple)):
        kind = kind if hasattr(tree, "_fields") else list if isinstance(tree, list) else tuple
    elif tree is not None:
        static = _static(tree)
    return kind, static, tuple(children), tuple([_flatten_traced(x, out, is_leaf) for x in children.values()])


def _unflatten_traced(treedef: Any, rest: Iterator[Any]) -> Any:
    if treedef is None:
        return next(rest)
    kind, static, keys, parts = treedef
    children = [_unflatten_traced(part, rest) for part in parts]
    if kind is type(None):
        return None
    if kind in (dict, OrderedDict):
        made = dict(zip(keys, children, strict=True))
        return kind([(key, made[key]) for key in static])
    if kind in (list, tuple):
        return kind(children)
    return kind(*children) if hasattr(kind, "_fields") else _make_node(kind, static, children)


def leaves_with_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[Path, Any]]:
    """Return every leaf with its path, a tuple of keys, indices and field names.

    >>> leaves_with_path({"h": [1, 2]})
    [(('h', 0), 1), (('h', 1), 2)]
    """
    if torch.compiler.is_dynamo_compiling():
        values, treedef = flatten(tree, is_leaf)
        return list(zip(_paths_traced(treedef), values, strict=True))
    paths, values, _ = optree.tree_flatten_with_path(tree, is_leaf)
    return list(zip(paths, values, strict=True))


def _paths_traced(treedef: Any, path: Path = ()) -> list[Path]:
    if treedef is None:
        return [path]
    _, _, keys, parts = treedef
    return [found for key, part in zip(keys, parts, strict=True) for found in _paths_traced(part, (*path, key))]


def map_with_path(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Map `f` like `map`, with the leaf's path as its first argument.

    >>> map_with_path(lambda path, x: f"{dotted(path)}={x}", {"h": [1, 2]})
    {'h': ['h.0=1', 'h.1=2']}
    """
    try:
        return optree.tree_map_with_path(f, tree, *rest)
    except (TypeError, ValueError):
        _refuse_map("map_with_path", f, tree, rest)
        raise


def _refuse_map(verb: str, f: Any, tree: Any, rest: tuple[Any, ...]) -> None:
    """Raise ShardingError if the arguments of a map are what failed, and not `f` itself."""
    if not callable(f):
        raise must_be(f"{verb}: f", "a function", f) from None
    treedef = optree.tree_structure(tree)
    for i, other in enumerate(rest):
        try:
            treedef.flatten_up_to(other)
        except ValueError as e:
            swapped = getattr(other, "ndim", None) == 0 and not treedef.is_leaf()
            raise fail(f"{verb}: rest[{i}] has another structure than the tree", str(e).partition(", got ")[0],
                       fix="loss, grads = fs.value_and_grad(...): the loss comes first" if swapped else "",
                       tree=treedef, other=optree.tree_structure(other)) from None  # fmt: skip


def all(tree: Any) -> bool:
    """Return whether every leaf is true.

    >>> all({"a": True, "b": [1, "x"]})
    True

    Raises ShardingError for a tensor of several elements.
    """
    for path, leaf in leaves_with_path(tree):
        if isinstance(leaf, torch.Tensor) and leaf.numel() != 1:
            raise fail(f"all: {show('tree', path)}: a tensor of {leaf.numel()} elements is neither true nor false",
                       fix="map it to one value first: x.all()")  # fmt: skip
        if not leaf:
            return False
    return True


_NO_VALUE = object()


@checked
def reduce(f: Callable[[Any, Any], Any], tree: Any, initial: Any = _NO_VALUE) -> Any:
    """Combine the leaves from the first to the last: f(f(a, b), c); `initial`, if passed, comes before the first.

    >>> reduce(lambda a, b: a + b, {"x": 1, "y": [2, 3]})
    6

    Raises ShardingError for a tree without leaves, if there is no initial value.
    """
    values = leaves(tree) if initial is _NO_VALUE else [initial, *leaves(tree)]
    if not values:
        raise fail("reduce: the tree has no leaves", fix="pass the result for an empty tree as initial")
    return functools.reduce(f, values)


@checked
def transpose(outer: PyTreeSpec, inner: PyTreeSpec, tree: Any) -> Any:
    """Return a tree of structure inner of outer, from one of outer of inner.

    >>> transpose(structure([0, 0]), structure({"a": 0}), [{"a": 1}, {"a": 2}])
    {'a': [1, 2]}

    Raises ShardingError for a tree without the structure of `outer` with `inner` at each leaf.
    """
    try:
        return optree.tree_transpose(outer, inner, tree)
    except (TypeError, ValueError) as e:
        raise fail("transpose: the tree does not have the structure of outer with inner at each leaf", str(e),
                   outer=outer, inner=inner) from None  # fmt: skip


@checked
def dotted(path: Path) -> str:
    """Join a path into one name, as checkpoints, rules and random keys use it.

    >>> dotted(("h", 3, "up"))
    'h.3.up'
    """
    return ".".join(str(p) for p in path)


@checked
def show(name: str, path: Path) -> str:
    """Format a path as Python would index it, as errors show it.

    >>> show("params", ("h", 3, "up"))
    "params['h'][3]['up']"
    """
    return name + "".join(f"[{p!r}]" for p in path)


def broadcast(
    prefix: Any, tree: Any, *, name: str, leaf: Callable[[Any], bool], kind: str = "P",
    is_leaf: Callable[[Any], bool] | None = None,
) -> list[Any]:  # fmt: skip
    """Return one entry of `prefix` per leaf of `tree`: a leaf of the prefix applies to the subtree below it.

    `leaf` returns whether an object is a leaf of the prefix; errors call the prefix `name` and its leaves `kind`.
    `is_leaf`: as in `flatten`, for the tree.

    >>> broadcast({"a": 1, "b": 2}, {"a": [5, 6], "b": 7}, name="specs", leaf=lambda x: isinstance(x, int))
    [1, 1, 2]

    Raises ShardingError where the prefix has other keys, another length or another container than the tree.
    """
    if not torch.compiler.is_dynamo_compiling():  # optree is fast, and has neither these errors nor all that fits
        values, structure = optree.tree_flatten(prefix, None if kind == "P" else leaf)  # a P is not a container
        full = optree.tree_structure(tree, is_leaf)
        if builtins.all(map(leaf, values)):
            if structure == full:
                return values
            with contextlib.suppress(ValueError):
                if structure.broadcast_to_common_suffix(full) == full:  # also of the same kinds of dicts
                    below = [[x] if isinstance(x, torch.Tensor) else leaves(x, is_leaf)
                             for x in structure.flatten_up_to(tree)]  # fmt: skip
                    return [value for value, xs in zip(values, below, strict=True) for _ in xs]
        is_described = kind == "P" and not [x for x in values if leaf(x)]
        if is_described and [type(x).__name__ for x in leaves(tree, leaf)[:1]] == ["P"]:
            raise fail(f"{name} and the tree are swapped: the tree has leaves that are a P",
                       fix="device_put(tree, specs, mesh), materialize(tree, specs, mesh, key=), "
                           "fully_shard(specs, tree, axis=)")  # fmt: skip
    out: list[Any] = []
    _broadcast(prefix, tree, (), name, leaf, kind, is_leaf, out)
    return out


def _broadcast(
    prefix: Any, tree: Any, path: Path, name: str, leaf: Callable[[Any], bool], kind: str,
    is_leaf: Callable[[Any], bool] | None, out: list[Any],
) -> None:  # fmt: skip
    if leaf(prefix):
        out.extend([prefix] * len(leaves(tree, is_leaf)))
        return
    children = _children(prefix)
    expected = None if is_leaf is not None and is_leaf(tree) else _children(tree)
    if children is None:
        spec = f": P({prefix!r})" if kind == "P" and isinstance(prefix, str) else ""
        text, of_type = shown(prefix), a_type(type(prefix))
        text = text if text == of_type else f"{text} is {of_type}"
        raise fail(f"{show(name, path)}: {text}, not a {kind}", fix=f"use a {kind}{spec}")
    # Users write a tuple of specs for a list of arguments, and the reverse: lists and tuples match.
    matching = type(prefix) is type(tree) or (isinstance(prefix, (list, tuple)) and isinstance(tree, (list, tuple)))
    if expected is None or not matching or list(children) != list(expected):
        raise _not_a_prefix(show(name, path), prefix, children, tree, expected, kind)
    for key, child in expected.items():
        _broadcast(children[key], child, (*path, key), name, leaf, kind, is_leaf, out)


def _not_a_prefix(
    label: str, prefix: Any, children: dict[Any, Any], tree: Any, expected: dict[Any, Any] | None, kind: str
) -> ShardingError:  # fmt: skip
    """Return the error of a container whose children differ from the tree's at its path."""
    what, one_for_all = f"{label}: not a prefix of the tree it describes", f"one {kind} for the whole subtree"
    missing = [k for k in expected or () if k not in children]
    extra = [k for k in children if k not in (expected or ())]
    difference = f"missing {_limited(missing)}    extra {_limited(extra)}"
    got, wanted = _container(prefix), _container(tree)
    facts = {} if got == wanted else {"got": got, "expected": wanted}
    if expected is None:
        spec = (
            f": P({', '.join([repr(entry) for entry in prefix])})"
            if kind == "P" and isinstance(prefix, (tuple, list))
            else ""
        )
        fix = f"pass its result, {call_of(tree)}" if call_of(tree) else f"give the leaf a {kind}{spec}"
        return fail(what, "the tree has a leaf at this path", fix=fix, **facts)
    fix, notes = f"give every key a {kind}, or {one_for_all}", [difference]
    if extra and not missing:
        fix = f"leave {_limited(extra)} out, or add what they describe to the tree"
    if type(tree) is list and len(tree) > 1 and (not isinstance(prefix, (list, tuple)) or len(prefix) == 1):
        fix, notes = f"[{'spec' if kind == 'P' else kind}] * {len(tree)}, or {one_for_all}", []  # one, for all blocks
    elif children and (same := [k for k, x in expected.items() if list(_children(x) or ()) == list(children)]):
        notes.append(f"its keys are those of the tree at {join_limited([f'[{k!r}]' for k in same], 3)}")
        fix = f"give every key a {kind}; opt.specs(specs) makes those of an optimizer's state"
    return fail(what, *notes, fix=fix, **facts)


def _container(x: Any) -> str:
    """Return the type of a container; of a list or a tuple with its length."""
    return f"{type(x).__name__} of {len(x)}" if isinstance(x, (list, tuple)) else type(x).__name__


def _limited(keys: list[Any]) -> str:
    return f"[{join_limited(list(map(repr, keys)), 6)}]"


def check_leaves(verb: str, name: str, tree: Any, kind: type | tuple[type, ...]) -> tuple[list[Any], Any]:
    """Flatten the argument `name` of `verb`. Raises ShardingError, listing each leaf that is not of that kind."""
    found, treedef = flatten(tree)
    if not {isinstance(x, kind) for x in found} <= {True}:
        words = " or ".join(map(a_type, kind if isinstance(kind, tuple) else (kind,)))
        raise_all([must_be(f"{verb}: {show(name, path)}", words, x)
                   for path, x in leaves_with_path(tree) if not isinstance(x, kind)])  # fmt: skip
    return found, treedef


def _children(tree: Any) -> dict[Any, Any] | None:
    """Return the children of a container by key, in the order of its leaves; `None` for a leaf."""
    if tree is None:
        return {}
    if isinstance(tree, OrderedDict):
        return dict(tree)
    if isinstance(tree, dict):
        return {key: tree[key] for key in total_order_sorted(tree)}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return dict(zip(tree._fields, tree, strict=True))
    if isinstance(tree, (list, tuple)):
        return dict(enumerate(tree))
    if type(tree) in _subtrees:
        return {name: getattr(tree, name) for name in _subtrees[type(tree)]}
    if torch.compiler.is_dynamo_compiling() or optree.tree_is_leaf(tree):
        return None
    children, _, entries, _ = optree.tree_flatten_one_level(tree)
    return dict(zip(entries, children, strict=True))
