"""Tables of a tree's leaves and their bytes on each device, as text, and as HTML in a notebook.

Only the values of 0-d leaves are read: shapes, specs and axis sizes are enough, so a mesh may be a dict of sizes.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import optree
import torch

from fshard import tree
from fshard._core.display import Html, Row, View, bar, format_runs, page, table
from fshard._core.torch import in_transform
from fshard.errors import ShardingError, checked, fail, join_limited, raise_all
from fshard.init import Deferred, describe_initializer
from fshard.mesh import Mesh, mesh_grid
from fshard.sharded import Sharded
from fshard.spec import P, Size, draw, format_axes, format_tensor, format_value, is_spec, part_range, size, spec_errors

from .table import aligned

Sizes = Mapping[str, int]
# Bytes on each device: an int where all devices have the same number, else an array that broadcasts over the mesh.
Bytes = Any
# The number of a file in `stored(model-00001-of-00004.safetensors: h.0.w)`, and a number in the dotted name: 00001, 0.
_NUMBER = r"((?<=-)(?:\d{5}|\*)(?=-of-\d{5}\.)|(?<=[.: ])(?:\d+|\*)(?=[.)]))"
_CANDIDATES = 16  # rows of one look that a sibling is compared with: the longest period of layers that is found


@checked
def show(
    tree: Any, shape: Sequence[int] | None = None, *, mesh: Mesh | Sizes | None = None, specs: Any = None,
    against: Any = None, fold: bool = True,
) -> View:  # fmt: skip
    """Show a tree as a table: each leaf's dtype, shape and split, its initializer, and its bytes on one device.

    A 0-d leaf that has a value shows it. One placed leaf is shown as a picture of the ranks that have each block, a
    mesh as the grid of its ranks, and a spec with a shape as the blocks of `torch.arange(n).reshape(shape)`.

    Args:
        tree: `Deferred`, `Sharded` or tensor leaves, or specs, or a mesh.
        shape: the shape of a tensor to which the spec `tree` applies.
        mesh: a mesh, or axis sizes such as `{"data": 64, "model": 8}`; by default the mesh of the placed leaves.
        specs: the leaves' specs, a prefix tree; by default how the leaves are placed.
        against: other specs of the leaves, a prefix tree: show what moves if the leaves are resharded to them.
        fold: show equal siblings with numbers for names (`h.0`, `h.1`, ...; `h.0`, `h.2`, ...) once.

    >>> h = [{"up": fs.init.normal((64, 256), std=0.02)} for _ in range(12)]
    >>> specs = {"h": fs.column("model"), "scale": P()}
    >>> show({"h": h, "scale": fs.init.ones(64)}, specs=specs, mesh={"model": 4})
                                                             per device
    h.0–11.up  ×12  f32[64, 256@model]  normal(std=0.02)  12 × 16.0 KiB
    scale           f32[64]             ones                      256 B
    total  196,672 parameters, 768.2 KiB; 192.2 KiB on each of 4 devices (model=4)

    With `against`, the bytes are those that each device receives in `fs.reshard(tree, against)`, which sends the parts
    in one exchange. Next to them are the collectives of the same effect inside a region; a slice moves nothing. One
    leaf is drawn in both layouts.

    >>> show({"w": fs.init.zeros((8, 6))}, specs=P("data"), against=P(None, "data"), mesh={"data": 2})
                                                         received per device
    w  f32[8@data, 6] → f32[8, 6@data]  all_to_all data                 48 B
    moves  96 B; 48 B to each of 2 devices (data=2)

    `per_device` of the result is the bytes of its column on the device with the most, as a number to compute with.

    >>> show({"h": h}, specs=fs.column("model"), mesh={"model": 4}).per_device
    196608

    A spec needs no tensor:

    >>> show(P(None, "model"), (2, 4), mesh={"model": 2})
    P(None, 'model'): [2, 4@model] on model=2
            0:2      2:4
         ┌────────┬────────┐
         │ rank 0 │ rank 1 │
     0:2 │  0 1   │  2 3   │
         │  4 5   │  6 7   │
         └────────┴────────┘
    dim 1 is split over model

    The total of a tree with a group `params`, such as a train state, counts the parameters apart from other values.
    Without one it counts the parameters of a tree of floating leaves, and the elements of any other tree.

    Raises ShardingError listing every leaf that does not fit its spec, and for leaves on different meshes.
    """
    if isinstance(tree, Mesh):
        return mesh_grid(tree)
    if shape is not None:
        return _spec_picture(tree, tuple(shape), mesh)
    leaves, sizes = _leaves(tree, mesh, specs)
    is_one = len(leaves) == 1 and optree.tree_is_leaf(tree) and leaves[0].spec is not None and bool(sizes)
    if against is None:
        if is_one:
            return _picture(leaves[0], sizes)
        is_described = any(isinstance(x, Deferred) for x in optree.tree_leaves(tree))
        return _table(_node("", tree, iter(leaves), fold), sizes, "initializer" if is_described else "value")
    if not sizes:
        raise fail("show: against= needs a mesh", fix='pass mesh=, or axis sizes such as mesh={"data": 64}')
    others, _ = _leaves(tree, sizes, against, "show: against")
    moved = [_moved(a, b, sizes) for a, b in zip(leaves, others, strict=True)]
    if is_one:
        before, after = _picture(leaves[0], sizes), _picture(others[0], sizes)
        said = f"{moved[0].init}: {_received(moved[0].local, sizes)}"
        pair = "".join('<div style="display: inline-block; vertical-align: top; margin-right: 3em">'
                       f"{view.html}</div>" for view in (before, after))  # fmt: skip
        return View(f"{before.text}\n{said}\n{after.text}", lambda: page(Html(pair), said), _most(moved[0].local))
    return _table(_node("", tree, iter(moved), fold), sizes, "moved by", is_move=True)


# --- leaves -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Node:
    """A leaf, or a group of nodes, with the sums of their numbers."""

    type: str = ""  # dtype, shape and split; the text of a leaf that is not a tensor
    init: str = ""  # initializer; value of a 0-d leaf; `= name` of a leaf that was shown before
    shape: tuple[int, ...] = ()
    spec: P | None = None
    itemsize: int = 0
    has_bytes: bool = False  # False for specs, numbers, and leaves that were shown before
    is_floating: bool = True
    numel: int = 0  # of one of the `times` equal subtrees, like all numbers
    nbytes: int = 0
    local: Bytes = 0  # in the memory of each device
    host: Bytes = 0  # and in the memory of its host
    name: str = ""
    children: tuple[_Node, ...] = ()
    times: int = 1

    @functools.cached_property
    def key(self) -> Any:
        """Equal for subtrees that look the same."""
        return tuple((c.name, c.times, c.key) for c in self.children) or (self.type, self.init)

    @functools.cached_property
    def look(self) -> Any:
        """The same without initializers."""
        return tuple((c.name, c.times, c.look) for c in self.children) or self.type


def _leaves(tree_: Any, mesh: Mesh | Sizes | None, specs: Any, label: str = "show") -> tuple[list[_Node], Sizes]:
    leaves = tree.leaves_with_path(tree_)
    meshes = {tuple(x.mesh.axes.items()) for _, x in leaves if isinstance(x, Sharded)}
    if mesh is None and len(meshes) > 1:
        names = [format_axes(dict(axes)) for axes in sorted(meshes)]
        raise fail("show: leaves on different meshes", *names, fix="pass mesh=, or show them one by one")
    sizes = mesh.axes if isinstance(mesh, Mesh) else dict(*meshes) if mesh is None else dict(mesh)
    flat = [None] * len(leaves) if specs is None else tree.broadcast(specs, tree_, name="specs", leaf=is_spec)
    seen: dict[int, str] = {}
    errors: list[ShardingError] = []
    out = []
    for (path, x), spec in zip(leaves, flat, strict=True):
        if not isinstance(x, (Deferred, Sharded, torch.Tensor)):
            text = " ".join(repr(x).split())
            out.append(_Node(text if len(text) <= 60 else text[:59] + "…"))
            continue
        shape = tuple(x.shape)
        spec = spec if spec is not None else x.spec if isinstance(x, Sharded) else None
        leaf_errors = [] if spec is None else _spec_errors(f"{label}: {tree.show('tree', path)}", shape, spec, sizes)
        errors += leaf_errors
        if leaf_errors:
            continue
        type_ = format_tensor(x.dtype, shape, spec)
        if id(x) in seen:
            out.append(_Node(type_, f"= {seen[id(x)]}", shape, spec, x.dtype.itemsize))
            continue
        seen[id(x)] = tree.dotted(path)
        init = describe_initializer(x.init) if isinstance(x, Deferred) else _value(x)
        local = _bytes_per_device(shape, spec or P(), tuple(sizes.items()), x.dtype.itemsize) if sizes else x.nbytes
        memories = (0, local) if spec is not None and spec.memory == "host" else (local, 0)
        is_floating = x.dtype.is_floating_point or x.dtype.is_complex
        out.append(_Node(type_, init, shape, spec, x.dtype.itemsize, True, is_floating, x.numel(), x.nbytes, *memories))
    raise_all(errors)
    return out, sizes


def _value(x: Sharded | torch.Tensor) -> str:
    if isinstance(x, Sharded):
        return x._value()
    return "" if in_transform() else format_value(x)  # a transform's tensors have the values of all examples


def _spec_errors(where: str, shape: tuple[int, ...], spec: P, sizes: Sizes) -> list[ShardingError]:
    """Return the errors of a leaf's spec; without a mesh any axis is valid, and only the number of dims is checked."""
    if sizes:
        return spec_errors(where, shape, spec, sizes)
    try:
        spec.parts(len(shape))
    except ShardingError as e:
        return [ShardingError(f"{where}: {e}")]
    return []


@functools.lru_cache(maxsize=4096)
def _bytes_per_device(shape: tuple[int, ...], spec: P, axes: tuple[tuple[str, int], ...], itemsize: int) -> Bytes:
    """Return the bytes of a leaf on every device."""
    out: Bytes = itemsize
    for n, names in zip(spec.sizes(shape, dict(axes)), spec.parts(len(shape)), strict=True):
        ranks = math.prod(k for a, k in axes if a in names)
        start, stop = _ranges(n, names, axes) if isinstance(n, tuple) or n % ranks else (0, n // ranks)
        out = out * (stop - start)
    return out


@functools.lru_cache(maxsize=4096)
def _ranges(n: Size, names: tuple[str, ...], axes: tuple[tuple[str, int], ...]) -> tuple[Bytes, Bytes]:
    """Return the start and the stop of the part of range(n) on every device: arrays that broadcast over the mesh."""
    sizes = dict(axes)
    cut = [sizes[a] for a in names]
    order = sorted(range(len(names)), key=lambda i: list(sizes).index(names[i]))
    line = np.array([part_range(n, cut, at) for at in np.ndindex(*cut)])
    starts, lengths = (line[:, i].reshape(cut).transpose(order) for i in range(2))
    shape = [k if a in names else 1 for a, k in axes]
    return starts.reshape(shape), (starts + lengths).reshape(shape)


# --- pictures -----------------------------------------------------------------------------------------------


def _picture(leaf: _Node, sizes: Sizes) -> View:
    view = draw(leaf.type, leaf.shape, leaf.spec or P(), sizes, itemsize=leaf.itemsize)
    return replace(view, per_device=_most(leaf.local))


def _spec_picture(spec: Any, shape: tuple[int, ...], mesh: Mesh | Sizes | None) -> View:
    """Draw the blocks of a tensor that has the spec, and a legend."""
    if not isinstance(spec, P) or mesh is None:
        raise fail("show: with shape=, tree must be one spec, and mesh a Mesh or its axis sizes",
                   fix='fs.show(P("data", "model"), (4, 8), mesh={"data": 2, "model": 4})')  # fmt: skip
    sizes = mesh.axes if isinstance(mesh, Mesh) else mesh
    raise_all(spec_errors("show: tree", shape, spec, sizes))
    parts = spec.parts(len(shape))
    split = [f"dim {d} over {' and '.join(axes)}" for d, axes in enumerate(parts) if axes]
    free = [a for a in sizes if a not in itertools.chain(*parts) and sizes[a] > 1]
    copies = f"each block has a copy on every rank of {' and '.join(free)}"
    legend = ", ".join(split).replace(" over", " is split over", 1)
    dims = format_tensor(torch.float32, shape, spec).removeprefix("f32")
    return draw(f"{spec}: {dims}", shape, spec, sizes, numbered=True,
                notes=[legend or "no dim is split", *[copies][: bool(free)]])  # fmt: skip


# --- two layouts ----------------------------------------------------------------------------------------------


_Split = tuple[Size, tuple[str, ...]]  # of a dim: its size, and the axes that split it


def _moved(a: _Node, b: _Node, sizes: Sizes) -> _Node:
    """Return a row for a move between the two layouts of a leaf: its bytes are those that each device receives."""
    if not a.has_bytes:
        return a
    old, new = a.spec or P(), b.spec or P()
    axes = tuple(sizes.items())
    wanted: Bytes = a.itemsize
    kept: Bytes = a.itemsize
    of_old, of_new = (list(zip(p.sizes(a.shape, sizes), p.parts(len(a.shape)), strict=True)) for p in (old, new))
    for one, other in zip(of_old, of_new, strict=True):
        (start, stop), (new_start, new_stop) = _ranges(*one, axes), _ranges(*other, axes)
        wanted = wanted * (new_stop - new_start)
        kept = kept * np.maximum(np.minimum(stop, new_stop) - np.maximum(start, new_start), 0)
    init = _collectives(of_old, of_new, sizes)
    if old.memory != new.memory:
        init = f"{init}, copy to {'host' if new.memory == 'host' else 'the device'}".removeprefix("stays, ")
    same = a.type == b.type
    return replace(a, type=a.type if same else f"{a.type} → {b.type}", init=init, local=wanted - kept, host=0)


def _collectives(old: Sequence[_Split], new: Sequence[_Split], sizes: Sizes) -> str:
    """Return the collectives that move the parts, in the order that moves least.

    The last axes of a dim can be gathered, new ones slice it; an axis that does both, on two dims, is an all_to_all.
    Where one dim loses axes and gets others, another order of them, or other lengths of its parts, no such collective
    has the same effect.
    """
    lost: list[str] = []
    got: list[str] = []
    is_exchange = False
    for (n, one), (m, other) in zip(old, new, strict=True):
        first, second = ([a for a in axes if sizes[a] > 1] for axes in (one, other))
        pairs = zip(first, second, strict=False) if n == m else ()
        same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        lost, got = lost + first[same:], got + second[same:]
        is_exchange = is_exchange or len(first) > same < len(second)
    if is_exchange:
        return f"exchange {'+'.join(dict.fromkeys(lost + got))}"
    words = {"slice": [a for a in got if a not in lost], "all_to_all": [a for a in lost if a in got],
             "all_gather": [a for a in lost if a not in got]}  # fmt: skip
    return ", ".join(f"{name} {'+'.join(axes)}" for name, axes in words.items() if axes) or "stays"


def _received(local: Bytes, sizes: Sizes) -> str:
    """Return the bytes that all devices receive, and the bytes for one."""
    n = math.prod(sizes.values())
    total = int(np.broadcast_to(local, tuple(sizes.values())).sum())
    return f"moves  {size(total)}; {_span(local)} to each of {n} devices ({format_axes(sizes)})"


# --- nodes --------------------------------------------------------------------------------------------------


def _node(name: str, tree_: Any, leaves: Iterator[_Node], fold: bool) -> _Node | None:
    """Make the node of a subtree, whose leaves are the next of `leaves`; None if it has no leaves."""
    if tree_ is None:
        return None
    if optree.tree_is_leaf(tree_):
        return replace(next(leaves), name=name)
    values, _, entries, _ = optree.tree_flatten_one_level(tree_)
    made = {e: _node(str(e), v, leaves, fold) for e, v in zip(entries, values, strict=True)}
    order = tree_ if isinstance(tree_, dict) else entries  # dicts in the order of insertion: optree sorts keys
    nodes = [node for node in (made[e] for e in order) if node is not None]
    if isinstance(tree_, dict) and all(isinstance(e, str) for e in tree_):
        nodes = _grouped(nodes, fold)
    return _group(name, nodes, fold) if nodes else None


def _grouped(nodes: Sequence[_Node], fold: bool) -> list[_Node]:
    """Put nodes with dotted names, as `h.0.weight` of a module, below nodes for the parts of their names."""
    groups: dict[tuple[str, bool], list[_Node]] = {}  # a leaf `h` and a group `h` have a node each
    for node in nodes:
        head, _, rest = node.name.partition(".")
        is_dotted = all(node.name.split(".")) and bool(rest)
        groups.setdefault((head, True) if is_dotted else (node.name, False), []).append(
            replace(node, name=rest) if is_dotted else node
        )
    out = []
    for (name, is_dotted), inside in groups.items():
        out += [_group(name, _grouped(inside, fold), fold)] if is_dotted else inside
    return out


def _group(name: str, nodes: Sequence[_Node], fold: bool) -> _Node:
    """Make the node of a group: numbered nodes in order, equal ones folded."""
    if all(node.name.isdecimal() for node in nodes):
        nodes = sorted(nodes, key=lambda node: int(node.name))
    children = _fold(nodes) if fold else nodes
    return _Node(
        name=name,
        children=tuple(children),
        numel=sum(c.numel * c.times for c in children),
        nbytes=sum(c.nbytes * c.times for c in children),
        has_bytes=any(c.has_bytes for c in children),
        is_floating=all(c.is_floating for c in children),
        local=sum(c.local * c.times for c in children),
        host=sum(c.host * c.times for c in children),
    )


def _fold(nodes: Sequence[_Node]) -> list[_Node]:
    """Merge equal siblings whose names are numbers into one node, at the place of the first."""
    rows: list[tuple[_Node, list[int]]] = []  # the first of equal nodes, and the numbers of all
    of_look: dict[Any, list[int]] = {}  # indices of rows
    for node in nodes:
        same = of_look.setdefault(node.look, []) if node.name.isdecimal() else []
        for i in reversed(same[-_CANDIDATES:]):
            first, numbers = rows[i]
            merged = _merged(first, node, (first.name, node.name))
            if merged is not None:
                rows[i] = (merged, [*numbers, int(node.name)])
                break
        else:
            same.append(len(rows))
            rows.append((node, [int(node.name)] if node.name.isdecimal() else []))
    return [replace(node, name=format_runs(sorted(numbers), separator=",", most=4), times=len(numbers))
            if len(numbers) > 1 else node for node, numbers in rows]  # fmt: skip


def _merged(a: _Node, b: _Node, numbers: tuple[str, str]) -> _Node | None:
    """Return `a` if `b` looks the same, with `*` for these two numbers in the initializers' sources; else None."""
    if a.key == b.key:
        return a
    if not a.children and not b.children:
        init = _starred(a.init, b.init, numbers) if a.type == b.type else None
        return None if init is None else replace(a, init=init)
    if [(c.name, c.times) for c in a.children] != [(c.name, c.times) for c in b.children]:
        return None
    children = [_merged(c, d, numbers) for c, d in zip(a.children, b.children, strict=True)]
    merged = [c for c in children if c is not None]
    return replace(a, children=tuple(merged)) if merged and len(merged) == len(children) else None


def _starred(a: str, b: str, numbers: tuple[str, str]) -> str | None:
    """Merge `stored(h.0.w)`, or `stored(h.*.w)`, with `stored(h.1.w)` to `stored(h.*.w)`; None if more differs.

    Numbers of files may differ at will: `stored(model-*-of-00004.safetensors: h.*.w)`.
    """
    parts, others = re.split(_NUMBER, a), re.split(_NUMBER, b)
    if len(parts) != len(others):
        return None
    out = []
    for i, (x, y) in enumerate(zip(parts, others, strict=True)):
        of_file = i % 2 == 1 and parts[i - 1].endswith("-")
        if x != y and not of_file and (x, y) not in (numbers, ("*", numbers[1])):
            return None
        out.append(x if x == y else "*")
    return "".join(out)


def _chain(node: _Node) -> tuple[str, int, _Node]:
    """Join a chain of only children to one row `a.b.c`: (name, times, last node)."""
    name, times = node.name, node.times
    while len(node.children) == 1 and (times == 1 or node.children[0].times == 1):
        (node,) = node.children
        name, times = f"{name}.{node.name}" if name else node.name, times * node.times
    return name, times, node


# --- text and HTML ------------------------------------------------------------------------------------------


def _most(local: Bytes) -> int:
    return int(np.max(local))


def _span(local: Bytes) -> str:
    """Format the fewest and the most bytes on a device: `118.7–119.1 MiB`, or one number if they are equal."""
    low, high = size(int(np.min(local))), size(_most(local))
    if low == high:
        return high
    return f"{low.split()[0]}–{high}" if low.split()[1] == high.split()[1] else f"{low}–{high}"


def _cells(node: _Node) -> tuple[str, str, str, str, _Node]:
    """Return name, type, initializer and bytes of a row, and the node whose children are the rows below."""
    name, times, last = _chain(node)
    nbytes = _span(last.local + last.host) if last.has_bytes else ""
    if times > 1:
        name, nbytes = f"{name}  ×{times}", f"{times} × {nbytes}" if nbytes else ""
    return name, last.type, last.init, nbytes, last


def _rows(nodes: Sequence[_Node], depth: int = 0) -> Iterator[tuple[str, str, str, str]]:
    for node in nodes:
        name, type_, init, nbytes, last = _cells(node)
        yield "  " * depth + name, type_, init, nbytes
        yield from _rows(last.children, depth + 1)


def _total(root: _Node, sizes: Sizes) -> str:
    params = [c for c in root.children if c.name == "params"]
    noun = "parameters" if params or (root.is_floating and root.children) else "elements"
    total = f"{root.numel:,} {noun}, {size(root.nbytes)}"
    others = [c for c in root.children if c.name != "params" and c.has_bytes]
    if params and others:  # a train state: optimizer states are not parameters
        count, nbytes = sum(c.numel * c.times for c in others), sum(c.nbytes * c.times for c in others)
        total = (f"{params[0].numel:,} parameters, {size(params[0].nbytes)}, and {count:,} other values "
                 f"({join_limited([c.name for c in others], 4)}), {size(nbytes)}")  # fmt: skip
    if not sizes:
        return total
    n = math.prod(sizes.values())
    on_host = f", and {_span(root.host)} of its host's memory" if np.max(root.host) else ""
    return f"{total}; {_span(root.local)} on each of {n} devices ({format_axes(sizes)}){on_host}"


def _table(root: _Node | None, sizes: Sizes, third: str, *, is_move: bool = False) -> View:
    """Return the table of a tree, as text and as HTML; `third` names the column after the types."""
    if root is None:
        return View("(no leaves)", lambda: page("(no leaves)"))
    # Without indentation: the root's children, or the root if it is a leaf or a chain of only children.
    nodes = root.children if _chain(root)[2] is root and root.children else (root,)
    rows = list(_rows(nodes))
    heading, last = "", []
    if root.has_bytes:
        heading = f"{'received ' * is_move}per device" if sizes else "bytes"
        last = [_received(root.local, sizes) if is_move else f"total  {_total(root, sizes)}"]
    lines = [("", "", "", heading), *rows] if heading and sizes else rows
    shown = [i for i in range(4) if any(line[i] for line in lines)]
    texts = aligned([[line[i] for i in shown] for line in lines], [at for at, i in enumerate(shown) if i < 3])

    def html() -> Html:
        head = ["leaf", "type", third if any(row[2] for row in rows) else "", heading, ""]
        most = max(1, _most(root.local + root.host))
        return page(table([_html_row(node, most) for node in nodes], head=head, align="lllrl"), *last)

    return View("\n".join([*texts, *last]), html, _most(root.local) if root.has_bytes else None)


def _html_row(node: _Node, most: int, times: int = 1) -> Row:
    """Return the row of a node, and of those below; its bar is the share of all equal subtrees in `most` bytes."""
    *cells, last = _cells(node)
    times *= _chain(node)[1]
    children = [_html_row(child, most, times) for child in last.children]
    if not last.has_bytes:
        return Row([*cells, ""], children)
    share = _most(last.local + last.host) * times / most
    hover = f"{times * last.numel:,} elements, {size(times * last.nbytes)} in all"
    return Row([*cells, bar(share, f"{100 * share:.3g} %")], children, hover)
