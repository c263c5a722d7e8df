"""Split a tree in two of one structure, by leaf, and join such trees again: the part that trains, and the rest.

    trained, frozen = partition(params, "**.lora_*.**")
    grads = grad(lambda p: loss(combine(p, frozen), batch))(trained)

A leaf that is in the other tree is None here, which is an empty subtree: everything that maps, differentiates, updates,
places or saves a tree works on a part of it, and on nothing else. The specs of the tree serve each part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fshard import tree
from fshard.errors import ShardingError, checked, fail, join_limited, must_be, raise_all
from fshard.init import Deferred
from fshard.sharded import Sharded
from fshard.spec import matches


@checked
def partition(tree_: Any, rules: str | Sequence[str] | Callable[[tree.Path, Any], bool]) -> tuple[Any, Any]:
    """Return (selected, rest): two trees of one structure, with None where the other one has the leaf.

    The leaves are the same objects: nothing is copied. Also a part can be partitioned. A leaf at two paths, a tie, is
    selected at both or at none. The same rules split a tree of specs, of gradients or of moments alike.

    Args:
        rules: a glob of dotted paths, as `fs.rules` matches them (`*` within one part, `**` any number of parts), or
            several; or a function of a leaf's path, a tuple of keys, and the leaf: True selects it.

    >>> params = {"h": [{"w": 1, "b": 2}, {"w": 3, "b": 4}], "head": 5}
    >>> partition(params, ["h.*.b", "head"])
    ({'h': [{'w': None, 'b': 2}, {'w': None, 'b': 4}], 'head': 5}, {'h': [{'w': 1, 'b': None}, {'w': 3, 'b': None}], 'head': None})
    >>> partition(params, lambda path, x: x > 3)[0]
    {'h': [{'w': None, 'b': None}, {'w': None, 'b': 4}], 'head': 5}

    Raises ShardingError listing every glob that matches no leaf, and every tie with one path selected and another not.

    Source: `equinox.partition`.
    """  # noqa: E501
    leaves = tree.leaves_with_path(tree_)
    errors: list[ShardingError] = []
    if isinstance(rules, (str, Sequence)):
        selected = _match([path for path, _ in leaves], [rules] if isinstance(rules, str) else rules, errors)
    else:
        selected = [_is_true(path, rules(path, x), errors) for path, x in leaves]
    raise_all([*errors, *_split_ties(leaves, selected)])
    pairs = [(x, None) if chosen else (None, x) for (_, x), chosen in zip(leaves, selected, strict=True)]
    treedef = tree.structure(tree_)
    return tree.unflatten(treedef, [a for a, _ in pairs]), tree.unflatten(treedef, [b for _, b in pairs])


def _match(paths: Sequence[tree.Path], globs: Sequence[str], errors: list[ShardingError]) -> list[bool]:
    """Return whether a glob matches, for each path; add an error for each glob that matches no path."""
    names = [tree.dotted(path) for path in paths]
    parts = [name.split(".") if path else [] for path, name in zip(paths, names, strict=True)]
    selected = [False] * len(paths)
    for glob in globs:
        found = [matches(part, glob.split(".")) for part in parts]
        if not any(found):
            errors.append(fail(f"partition: rules: {glob!r} matches no leaf of the tree",
                               f"its leaves are {join_limited(names, 4) or 'none'}",
                               fix=_wider(glob, parts) or "correct it, or leave it out"))  # fmt: skip
        selected = [a or b for a, b in zip(selected, found, strict=True)]
    return selected


def _wider(glob: str, paths: Sequence[Sequence[str]]) -> str:
    """Return a fix of a glob that matches nothing: one that matches more, and where, if there is one.

    A leaf of a module is named by several parts: PEFT's `...q.lora_A.default.weight` is below `lora_A`, and `*.lora_*`
    or `**lora_*`, which match it as a text or a file's name, do not match it by parts.
    """
    parts = [part if part == "**" else part.replace("**", "*") for part in glob.split(".")]
    while len(parts) > 1 and parts[0] in ("*", "**"):
        del parts[0]
    anywhere = ".".join(["**", *parts])
    for wider, where in ((f"{glob}.**", "every leaf below it"), (anywhere, "it at any depth"),
                         (f"{anywhere}.**", "it at any depth, and every leaf below it")):  # fmt: skip
        if any(matches(path, wider.split(".")) for path in paths):
            return f"{wider!r} matches {where}"
    return ""


def _is_true(path: tree.Path, answer: Any, errors: list[ShardingError]) -> bool:
    if not isinstance(answer, bool):  # a tensor or None would select by what Python takes as true
        errors.append(must_be(f"partition: rules: the result for {tree.show('tree', path)}", "True or False", answer))
    return answer is True


def _split_ties(leaves: Sequence[tuple[tree.Path, Any]], selected: Sequence[bool]) -> list[ShardingError]:
    """Return an error for each leaf that is selected at one of its paths and not at another."""
    first: dict[int, tuple[tree.Path, bool]] = {}
    errors = []
    for (path, x), chosen in zip(leaves, selected, strict=True):
        if isinstance(x, (Tensor, Sharded, Deferred)):  # equal numbers and specs may be one object without being tied
            twin, of_twin = first.setdefault(id(x), (path, chosen))
            if of_twin is not chosen:
                inside, outside = (path, twin) if chosen else (twin, path)
                errors.append(fail(f"partition: {tree.show('tree', inside)} is tied to {tree.show('tree', outside)}, "
                                   "which is not selected",
                                   fix="select both or none of them, or untie them: a copy of one"))  # fmt: skip
    return errors


@checked
def combine(*trees: Any, partial: bool = False) -> Any:
    """Return the tree that has each leaf of these trees, of one structure: undoes `partition`.

    >>> combine({"w": 1, "b": None}, {"w": None, "b": 2})
    {'w': 1, 'b': 2}
    >>> combine({"w": 1, "b": None, "head": None}, {"w": None, "b": 2, "head": None}, partial=True)
    {'w': 1, 'b': 2, 'head': None}

    Args:
        partial: leave None where no tree has a leaf: to join some of the parts, or of a tree that has None itself.

    Raises ShardingError listing every path with a leaf in two trees, or in none, and for trees of other structures.

    Source: `equinox.combine`, which takes the first of two leaves.
    """
    if not trees:
        raise fail("combine: no trees", fix="the parts that fs.partition returned")
    flat, treedefs = zip(*(tree.flatten(t, _is_none) for t in trees), strict=True)
    for i, treedef in enumerate(treedefs):
        if treedef != treedefs[0]:
            raise _other_structure(trees, i)
    columns = list(zip(*flat, strict=True))
    out = [next((x for x in column if x is not None), None) for column in columns]
    counts = [sum(x is not None for x in column) for column in columns]
    if any(n > 1 or (n == 0 and not partial) for n in counts):
        raise_all([_not_one(path, column)
                   for path, column, n in zip(_paths(trees[0]), columns, counts, strict=True)
                   if n > 1 or (n == 0 and not partial)])  # fmt: skip
    return tree.unflatten(treedefs[0], out)


def _paths(x: Any) -> list[tree.Path]:
    return [path for path, _ in tree.leaves_with_path(x, _is_none)]


def _not_one(path: tree.Path, column: Sequence[Any]) -> ShardingError:
    places = [f"trees[{i}]" for i, x in enumerate(column) if x is not None]
    at = tree.show("tree", path)
    if places:
        return fail(f"combine: {at}: is in {join_limited(places, 3)}", fix="give parts of one tree, each of them once")
    return fail(f"combine: {at}: is None in every tree", fix="give all parts; partial=True leaves None where it is so")


def _other_structure(trees: Sequence[Any], i: int) -> ShardingError:
    """Return the error for the tree at position `i`, whose structure differs from the first's."""
    first, other = (dict.fromkeys(tree.show("tree", path) for path in _paths(trees[j])) for j in (0, i))
    missing, extra = ([at for at in a if at not in b] for a, b in ((first, other), (other, first)))
    notes = [f"{what} {join_limited(at, 3)}" for what, at in (("missing", missing), ("extra", extra)) if at]
    return fail(f"combine: trees[{i}] has another structure than trees[0]",
                *(notes or ["the containers at the same paths differ"]),
                fix="give parts of one tree, as fs.partition returns them")  # fmt: skip


def _is_none(x: Any) -> bool:
    return x is None
