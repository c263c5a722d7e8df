"""Pytrees: optree, re-exported under short names, with paths, and with errors of prefix trees that name the path.

A leaf is any object that optree does not know as a container: a tensor, a `P`, a `Deferred`, a `Sharded`, a number.
`None` is an empty subtree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import optree
import torch
from optree import tree_all as all
from optree import tree_reduce as reduce
from optree import tree_structure as structure
from optree import tree_transpose as transpose

from .errors import a_type, fail, must_be, raise_all

__all__ = ["all", "broadcast", "dotted", "flatten", "leaves", "leaves_with_path", "map", "map_with_path", "reduce",
           "show", "structure", "transpose", "unflatten"]  # fmt: skip

Path = tuple[Any, ...]


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves in order, dicts by sorted key, and the structure for `unflatten`.

    >>> flatten({"b": [1, 2], "a": 0})[0]
    [0, 1, 2]
    """
    if not torch.compiler.is_dynamo_compiling():
        return optree.tree_flatten(tree)
    out: list[Any] = []
    return out, _flatten_traced(tree, out)


def unflatten(treedef: Any, leaves: Iterable[Any]) -> Any:
    """Return the tree of that structure with these leaves."""
    if not torch.compiler.is_dynamo_compiling():
        return optree.tree_unflatten(treedef, leaves)
    return _unflatten_traced(treedef, iter(leaves))


def leaves(tree: Any) -> list[Any]:
    """Return the leaves in order."""
    return flatten(tree)[0]


def map(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Return the tree of `f(leaf, *leaves at the same path of rest)`; `rest` may have subtrees in place of leaves.

    >>> map(lambda a, b: a + b, {"x": 1}, {"x": 2})
    {'x': 3}
    """
    if not torch.compiler.is_dynamo_compiling():
        return optree.tree_map(f, tree, *rest)
    first, treedef = flatten(tree)
    columns = [first, *(flatten(other)[0] for other in rest)]
    return unflatten(treedef, [f(*row) for row in zip(*columns, strict=True)])


# Dynamo replaces optree by its own implementation, which cannot pass the structure of a dict to another graph (torch
# 2.13 with optree 0.20), so traced programs use these functions. The order of the leaves is the same.


def _flatten_traced(tree: Any, out: list[Any]) -> Any:
    if tree is None:
        return ("none",)
    if isinstance(tree, dict):
        keys = _keys(tree)
        cls = OrderedDict if isinstance(tree, OrderedDict) else dict
        return ("dict", cls, tuple(tree), tuple(keys), tuple([_flatten_traced(tree[k], out) for k in keys]))
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return ("namedtuple", type(tree), tuple([_flatten_traced(x, out) for x in tree]))
    if isinstance(tree, (list, tuple)):
        return ("list" if isinstance(tree, list) else "tuple", tuple([_flatten_traced(x, out) for x in tree]))
    out.append(tree)
    return ("leaf",)


def _unflatten_traced(treedef: Any, rest: Iterator[Any]) -> Any:
    kind = treedef[0]
    if kind == "leaf":
        return next(rest)
    if kind == "none":
        return None
    if kind == "dict":
        made = {}
        for key, child in zip(treedef[3], treedef[4], strict=True):
            made[key] = _unflatten_traced(child, rest)
        return treedef[1]([(key, made[key]) for key in treedef[2]])
    children = [_unflatten_traced(child, rest) for child in treedef[-1]]
    return treedef[1](*children) if kind == "namedtuple" else children if kind == "list" else tuple(children)


def leaves_with_path(tree: Any) -> list[tuple[Path, Any]]:
    """Return every leaf with its path, a tuple of keys, indices and field names.

    >>> leaves_with_path({"h": [1, 2]})
    [(('h', 0), 1), (('h', 1), 2)]
    """
    paths, values, _ = optree.tree_flatten_with_path(tree)
    return list(zip(paths, values, strict=True))


def map_with_path(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Map `f` like `map`, with the leaf's path as its first argument.

    >>> map_with_path(lambda path, x: f"{dotted(path)}={x}", {"h": [1, 2]})
    {'h': ['h.0=1', 'h.1=2']}
    """
    return optree.tree_map_with_path(f, tree, *rest)


def dotted(path: Path) -> str:
    """Join a path into one name, as checkpoints, rules and random keys use it.

    >>> dotted(("h", 3, "up"))
    'h.3.up'
    """
    return ".".join(str(p) for p in path)


def show(name: str, path: Path) -> str:
    """Format a path as Python would index it, as errors show it.

    >>> show("params", ("h", 3, "up"))
    "params['h'][3]['up']"
    """
    return name + "".join(f"[{p!r}]" for p in path)


def broadcast(prefix: Any, tree: Any, *, name: str, leaf: Callable[[Any], bool], kind: str = "P") -> list[Any]:
    """Return one entry of `prefix` per leaf of `tree`: a leaf of the prefix applies to the whole subtree below it.

    `leaf` returns whether an object is a leaf of the prefix; errors call the prefix `name` and its leaves `kind`.

    >>> broadcast({"a": 1, "b": 2}, {"a": [5, 6], "b": 7}, name="specs", leaf=lambda x: isinstance(x, int))
    [1, 1, 2]

    Raises ShardingError where the prefix has other keys, another length or another container than the tree.
    """
    out: list[Any] = []
    _broadcast(prefix, tree, (), name, leaf, kind, out)
    return out


def _broadcast(
    prefix: Any, tree: Any, path: Path, name: str, leaf: Callable[[Any], bool], kind: str, out: list[Any]
) -> None:
    if leaf(prefix):
        out.extend([prefix] * len(leaves(tree)))
        return
    children, expected = _children(prefix), _children(tree)
    if children is None:
        raise fail(f"{show(name, path)}: {prefix!r} is a {type(prefix).__name__}, not a {kind}", fix=f"use a {kind}")
    # Users write a tuple of specs for a list of arguments, and the reverse: lists and tuples match.
    matching = type(prefix) is type(tree) or (isinstance(prefix, (list, tuple)) and isinstance(tree, (list, tuple)))
    if expected is None or not matching or list(children) != list(expected):
        missing = [k for k in expected or () if k not in children]
        extra = [k for k in children if k not in (expected or ())]
        why = "the tree has a leaf at this path" if expected is None else f"missing {missing}    extra {extra}"
        raise fail(f"{show(name, path)}: not a prefix of the tree it describes", why,
                   fix=f"give every key a {kind}, or one {kind} for the whole subtree",
                   got=type(prefix).__name__, expected=type(tree).__name__)  # fmt: skip
    for key, child in expected.items():
        _broadcast(children[key], child, (*path, key), name, leaf, kind, out)


def check_leaves(verb: str, name: str, tree: Any, kind: type | tuple[type, ...]) -> None:
    """Raise ShardingError, listing each leaf of the argument `name` of `verb` that is not of that kind."""
    if {isinstance(x, kind) for x in leaves(tree)} <= {True}:
        return
    words = " or ".join(map(a_type, kind if isinstance(kind, tuple) else (kind,)))
    raise_all([must_be(f"{verb}: {show(name, path)}", words, x)
               for path, x in leaves_with_path(tree) if not isinstance(x, kind)])  # fmt: skip


def _keys(tree: dict[Any, Any]) -> list[Any]:
    """Return the keys in the order of optree: as inserted in an OrderedDict, else sorted, by type if not comparable."""
    if isinstance(tree, OrderedDict):
        return list(tree)
    try:
        return sorted(tree)
    except TypeError:
        return sorted(tree, key=lambda k: (f"{type(k).__module__}.{type(k).__qualname__}", k))


def _children(tree: Any) -> dict[Any, Any] | None:
    """Return the children of a container by key, in the order of its leaves; `None` for a leaf."""
    if tree is None:
        return {}
    if isinstance(tree, dict):
        return {key: tree[key] for key in _keys(tree)}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return dict(zip(tree._fields, tree, strict=True))
    if isinstance(tree, (list, tuple)):
        return dict(enumerate(tree))
    if torch.compiler.is_dynamo_compiling() or optree.tree_is_leaf(tree):
        return None
    children, _, entries, _ = optree.tree_flatten_one_level(tree)
    return dict(zip(entries, children, strict=True))
