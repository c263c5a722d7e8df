"""What a tree weighs and how a leaf lies on a mesh, to look at: as text, and as HTML in a notebook.

Nothing here touches storage: shapes, specs and axis sizes are enough, so a mesh may be a dict of sizes.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import numpy as np
import optree
import torch

from fshard import tree
from fshard.errors import ShardingError, fail, raise_all
from fshard.init import Deferred, describe_initializer
from fshard.mesh import Mesh
from fshard.sharded import Sharded
from fshard.spec import P, describe, format_axes, is_spec, part_lengths, spec_errors

from .grid import Sizes, View, div, mesh_grid, picture, sizes_of

# Bytes on each device: an int where all have as many, else an array that broadcasts over the mesh.
Grid = Any
_NUMBER = r"((?<=[.: ])(?:\d+|\*)(?=[.)]))"  # a part of a dotted name: `0` in `stored(h.0.w)`


def show(tree: Any, *, mesh: Mesh | Sizes | None = None, specs: Any = None, fold: bool = True) -> View:
    """A tree as a table: each leaf's dtype, shape and split, its initializer, and its bytes on one device.

    One placed leaf is shown as a picture of which ranks hold which block, a mesh as the grid of its ranks.

    Args:
        tree: `Deferred`, `Sharded` or tensor leaves, or specs, or a mesh.
        mesh: a mesh, or axis sizes such as `{"data": 64, "model": 8}`; placed leaves bring their own.
        specs: how the leaves would lie, a prefix tree; placed leaves bring their own.
        fold: show equal neighbours (`h.0`, `h.1`, ...) once.

    >>> h = [{"up": fs.init.normal((64, 256), std=0.02)} for _ in range(12)]
    >>> specs = {"h": fs.column("model"), "scale": P()}
    >>> show({"h": h, "scale": fs.init.ones(64)}, specs=specs, mesh={"model": 4})
                                                             per device
    h.0–11.up  ×12  f32[64, 256@model]  normal(std=0.02)  12 × 16.0 KiB
    scale           f32[64]             ones                      256 B
    total  196,672 parameters, 768.2 KiB; 192.2 KiB on each of 4 devices (model=4)

    Raises ShardingError listing every leaf that does not fit its spec, and for leaves on different meshes.
    """
    if isinstance(tree, Mesh):
        return mesh_grid(tree)
    leaves, sizes = _leaves(tree, mesh, specs)
    if len(leaves) == 1 and optree.tree_is_leaf(tree) and leaves[0].spec is not None and sizes:
        return picture(leaves[0].what, leaves[0].shape, leaves[0].spec, sizes)
    root = _node("", tree, iter(leaves), fold)
    return View(_table(root, sizes), _html_table(root, sizes))


# --- the leaves ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Leaf:
    what: str
    init: str = ""
    shape: tuple[int, ...] = ()
    spec: P | None = None
    weighs: bool = False  # False for what has no bytes of its own: a spec, a number, a leaf shown before
    numel: int = 0
    nbytes: int = 0
    local: Grid = 0  # in the memory of a device
    host: Grid = 0  # in that of its host


def _leaves(tree_: Any, mesh: Mesh | Sizes | None, specs: Any) -> tuple[list[_Leaf], Sizes]:
    found = tree.leaves_with_path(tree_)
    own = {tuple(x.mesh.axes.items()) for _, x in found if isinstance(x, Sharded)}
    if mesh is None and len(own) > 1:
        names = [format_axes(dict(axes)) for axes in sorted(own)]
        raise fail("show: leaves on different meshes", *names, fix="pass mesh=, or show them one by one")
    sizes = sizes_of(mesh) if mesh is not None else dict(*own)
    flat = [None] * len(found) if specs is None else tree.broadcast(specs, tree_, name="specs", leaf=is_spec)
    seen: dict[int, str] = {}
    errors: list[ShardingError] = []
    out = []
    for (path, x), spec in zip(found, flat, strict=True):
        if not isinstance(x, (Deferred, Sharded, torch.Tensor)):
            text = " ".join(repr(x).split())
            out.append(_Leaf(text if len(text) <= 60 else text[:59] + "…"))
            continue
        shape = tuple(x.shape)
        spec = spec if spec is not None else x.spec if isinstance(x, Sharded) else None
        wrong = _misfits(f"show: {tree.show('tree', path)}", shape, spec, sizes)
        errors += wrong
        if wrong:
            continue
        what = describe(x.dtype, shape, spec)
        if id(x) in seen:
            out.append(_Leaf(what, f"= {seen[id(x)]}", shape, spec))
            continue
        seen[id(x)] = tree.dotted(path)
        init = describe_initializer(x.init) if isinstance(x, Deferred) else ""
        local = _local(shape, spec or P(), tuple(sizes.items()), x.dtype.itemsize) if sizes else x.nbytes
        kept = (0, local) if spec is not None and spec.memory == "host" else (local, 0)
        out.append(_Leaf(what, init, shape, spec, True, x.numel(), x.nbytes, *kept))
    raise_all(errors)
    return out, sizes


def _misfits(where: str, shape: tuple[int, ...], spec: P | None, sizes: Sizes) -> list[ShardingError]:
    """`problems`; without a mesh any axis will do, but not more dims than there are."""
    if spec is None or sizes:
        return [] if spec is None else spec_errors(where, shape, spec, sizes)
    try:
        spec.parts(len(shape))
    except ShardingError as e:
        return [ShardingError(f"{where}: {e}")]
    return []


@functools.lru_cache(maxsize=4096)
def _local(shape: tuple[int, ...], spec: P, axes: tuple[tuple[str, int], ...], itemsize: int) -> Grid:
    """The bytes of a leaf on every device."""
    sizes = dict(axes)
    out: Grid = itemsize
    for n, names in zip(shape, spec.parts(len(shape)), strict=True):
        cut = [sizes[a] for a in names]
        if n % math.prod(cut) == 0:
            out = out * (n // math.prod(cut))
            continue
        order = sorted(range(len(names)), key=lambda i: list(sizes).index(names[i]))
        line = np.array(part_lengths(n, cut)).reshape(cut).transpose(order)
        out = out * line.reshape([k if a in names else 1 for a, k in sizes.items()])
    return out


# --- the tree -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Node:
    name: str
    leaf: _Leaf | None
    children: tuple[_Node, ...]
    times: int
    numel: int
    nbytes: int
    weighs: bool
    one: Grid  # bytes per device of one of the `times` equal subtrees
    host: Grid  # and those in the memory of its host
    key: Any  # equal for subtrees that look the same


def _node(name: str, tree_: Any, leaves: Iterator[_Leaf], fold: bool) -> _Node | None:
    """The subtree at `tree_`, whose leaves come next; None if it has none."""
    if tree_ is None:
        return None
    if optree.tree_is_leaf(tree_):
        leaf = next(leaves)
        return _Node(
            name, leaf, (), 1, leaf.numel, leaf.nbytes, leaf.weighs, leaf.local, leaf.host, (leaf.what, leaf.init)
        )
    values, _, entries, _ = optree.tree_flatten_one_level(tree_)
    made = {e: _node(str(e), v, leaves, fold) for e, v in zip(entries, values, strict=True)}
    order = list(tree_) if isinstance(tree_, dict) else list(entries)  # a dict's own order: optree sorts it
    if all(str(e).isdecimal() for e in order):
        order.sort(key=int)
    nodes = [node for node in (made[e] for e in order) if node is not None]
    children = _fold(nodes) if fold else nodes
    if not children:
        return None
    return _Node(
        name=name,
        leaf=None,
        children=tuple(children),
        times=1,
        numel=sum(c.numel for c in children),
        nbytes=sum(c.nbytes for c in children),
        weighs=any(c.weighs for c in children),
        one=sum(c.one * c.times for c in children),
        host=sum(c.host * c.times for c in children),
        key=_key(children),
    )


def _key(children: Sequence[_Node]) -> Any:
    return tuple((c.name, c.times, c.key) for c in children)


def _fold(nodes: Sequence[_Node]) -> list[_Node]:
    """Runs of equal neighbours with successive numbers, each as one."""
    out: list[_Node] = []
    for node in nodes:
        run = out[-1] if out else node
        first, _, last = run.name.partition("–")
        merged = None
        if out and first.isdecimal() and node.name == str(int(last or first) + 1):
            merged = _merged(run, node, (first, node.name))
        if merged is None:
            out.append(node)
            continue
        n = run.times + 1
        numel, nbytes = node.numel * n, node.nbytes * n
        out[-1] = replace(merged, name=f"{first}–{node.name}", times=n, numel=numel, nbytes=nbytes)
    return out


def _merged(a: _Node, b: _Node, numbers: tuple[str, str]) -> _Node | None:
    """`a`, if `b` looks the same but for these two numbers in sources, which become `*`; else None."""
    if a.key == b.key:
        return a
    if a.leaf is not None and b.leaf is not None:
        init = _starred(a.leaf.init, b.leaf.init, numbers) if a.leaf.what == b.leaf.what else None
        return None if init is None else replace(a, leaf=replace(a.leaf, init=init), key=(a.leaf.what, init))
    if [(c.name, c.times) for c in a.children] != [(c.name, c.times) for c in b.children]:
        return None
    children = [_merged(c, d, numbers) for c, d in zip(a.children, b.children, strict=True)]
    kept = [c for c in children if c is not None]
    return replace(a, children=tuple(kept), key=_key(kept)) if kept and len(kept) == len(children) else None


def _starred(a: str, b: str, numbers: tuple[str, str]) -> str | None:
    """One text for `stored(h.0.w)` and `stored(h.1.w)`, or for `stored(h.*.w)` and that: `stored(h.*.w)`."""
    parts = list(zip(re.split(_NUMBER, a), re.split(_NUMBER, b), strict=False))
    same = [x if x == y else "*" if (x, y) in (numbers, ("*", numbers[1])) else None for x, y in parts]
    known = [part for part in same if part is not None]
    return "".join(known) if len(known) == len(same) and len(same) == len(re.split(_NUMBER, b)) else None


def _chain(node: _Node) -> tuple[str, int, _Node]:
    """`a.b.c` for a chain of only children: (name, times, the last of them)."""
    name, times = node.name, node.times
    while len(node.children) == 1 and (times == 1 or node.children[0].times == 1):
        (node,) = node.children
        name, times = f"{name}.{node.name}" if name else node.name, times * node.times
    return name, times, node


# --- as text ------------------------------------------------------------------------------------------------


def size(n: int) -> str:
    """Bytes for people.

    >>> size(640), size(1536), size(3 * 2**30)
    ('640 B', '1.5 KiB', '3.0 GiB')
    """
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if n >= 1 << power:
            return f"{n / (1 << power):.1f} {unit}"
    return f"{n} B"


def _span(local: Grid) -> str:
    """The bytes of the emptiest and of the fullest device: `118.7–119.1 MiB`, or once if they agree."""
    low, high = size(int(np.min(local))), size(int(np.max(local)))
    if low == high:
        return high
    return f"{low.split()[0]}–{high}" if low.split()[1] == high.split()[1] else f"{low}–{high}"


def _cells(node: _Node) -> tuple[str, str, str, str, _Node]:
    """Name, what, initializer and bytes of a row, and the node whose children stand below it."""
    name, times, last = _chain(node)
    leaf = last.leaf or _Leaf("", weighs=True)
    weighs = _span(last.one + last.host) if leaf.weighs and last.weighs else ""
    if times > 1:
        name, weighs = f"{name}  ×{times}", f"{times} × {weighs}" if weighs else ""
    return name, leaf.what, leaf.init, weighs, last


def _tops(root: _Node | None) -> Sequence[_Node]:
    """What stands at the margin: the root only where it is a leaf or has a name by its chain."""
    if root is None:
        return ()
    _, _, last = _chain(root)
    return root.children if last is root and root.children else (root,)


def _rows(nodes: Sequence[_Node], depth: int = 0) -> Iterator[tuple[str, str, str, str]]:
    for node in nodes:
        name, what, init, weighs, last = _cells(node)
        yield "  " * depth + name, what, init, weighs
        yield from _rows(last.children, depth + 1)


def _total(root: _Node, sizes: Sizes) -> str:
    whole = f"{root.numel:,} parameters, {size(root.nbytes)}"
    if not sizes:
        return whole
    n = math.prod(sizes.values())
    beside = f", and {_span(root.host)} of its host's memory" if np.max(root.host) else ""
    return f"{whole}; {_span(root.one)} on each of {n} devices ({format_axes(sizes)}){beside}"


def _table(root: _Node | None, sizes: Sizes) -> str:
    rows = list(_rows(_tops(root)))
    if root is None or not rows:
        return "(no leaves)"
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    widths[3] = max(widths[3], len("per device")) if root.weighs and sizes else widths[3]
    head = [("", "", "", "per device")] if root.weighs and sizes else []
    lines = []
    for *left, weighs in [*head, *rows]:
        cells = [text.ljust(w) for text, w in zip(left, widths, strict=False) if w]
        lines.append("  ".join([*cells, weighs.rjust(widths[3])]).rstrip())
    return "\n".join([*lines, f"total  {_total(root, sizes)}"] if root.weighs else lines)


# --- as HTML ------------------------------------------------------------------------------------------------


def _html_table(root: _Node | None, sizes: Sizes) -> str:
    if root is None:
        return div("(no leaves)")
    few = len(list(_rows(_tops(root)))) <= 40
    total = [f"<div>total  {escape(_total(root, sizes))}</div>"] if root.weighs else []
    return div(*(_html_row(node, 0, few) for node in _tops(root)), *total)


def _html_row(node: _Node, depth: int, few: bool) -> str:
    name, *cells, last = _cells(node)
    spans = "".join(f"<span>{escape(text)}</span>" for text in cells)
    line = f'<span class="name" style="padding-left: {2 * depth}ch">{escape(name)}</span>{spans}'
    if not last.children:
        return f'<div class="row">{line}</div>'
    inside = "\n".join(_html_row(child, depth + 1, few) for child in last.children)
    is_open = " open" if few else ""
    return f'<details{is_open}><summary class="row">{line}</summary>\n{inside}</details>'


__all__ = ["View", "show", "size"]
