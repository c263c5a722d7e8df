"""Partition specs: a `P` names, for each dim of a tensor, the mesh axes that split it.

A dim of size n over an axis of size k is split into parts of ceil(n / k); the last ones may be smaller or empty.
Over several axes the parts are split again, major axis first, so that gathering the minor axis of `P(("a", "b"))`
gives exactly `P("a")`, even for sizes that do not divide. (DTensor splits in the same way.) `lengths=` chooses other
parts over the first axis of a dim. All code gets the parts of a dim from `part_range` and `part_lengths`.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any, Protocol

import torch

from . import tree as _tree
from ._core.display import View, page, picture, table
from ._core.protocol import index_of
from .errors import ShardingError, checked, fail, must_be, raise_all, shown

Axis = str | tuple[str, ...] | None
Box = tuple[slice, ...]
Size = int | tuple[int, ...]  # of a dim that axes split: its size, or the lengths of its parts over the first of them


class P:
    """A partition spec: one entry per dim, each `None`, an axis name, or a tuple of names (major first).

    Trailing dims are unsplit. `...` means as many unsplit dims as fit, so `P(..., "model")` splits the last dim. Each
    device keeps its part in its memory; with `memory="host"`, in the computer's: see `on_host`.

    Args:
        lengths: the lengths of the parts over an axis, in the order of its ranks, in place of equal parts. A length may
            be 0: `P("stage", lengths=(0, 0, 0, 1))` places a leaf of one row on the last stage. A spec that names
            several axes takes a dict, `lengths={"stage": (7, 8, 8, 7)}`. The axis must be the first one of its dim;
            the minor axes of the dim split each part evenly. Where the axis has size 1, the leaf is not divided.

    >>> P("data", None) == P("data")
    True
    >>> P(..., "model").parts(3)
    ((), (), ('model',))
    >>> device_put(torch.arange(8.0), P("model", lengths=(4, 3, 0, 1)), mesh).shards[1]
    tensor([4., 5., 6.])

    Raises ShardingError for an axis named twice, for an entry that is not an axis, and for lengths that are not for one
    axis. Placing a leaf raises it if the lengths do not sum to its dim, or if the axis has another number of ranks.
    """

    __slots__ = ("axes", "entries", "lengths", "memory")
    entries: tuple[Axis | EllipsisType, ...]
    axes: tuple[str, ...]  # all axes that the spec names, in order
    lengths: dict[str, tuple[int, ...]]  # of the parts over an axis, where they are chosen
    memory: str

    def __init__(
        self, *entries: Axis | EllipsisType, memory: str = "device",
        lengths: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(memory, str) or memory not in ("device", "host"):
            raise fail(f"P: memory={memory!r}", fix="'device' or 'host'")
        names: list[str] = []
        for entry in entries:
            group = entry if isinstance(entry, tuple) else (entry,)
            if entry is not None and entry is not ... and not all(isinstance(a, str) and a for a in group):
                raise fail(f"P: {shown(entry)} names no axis", fix="use None, ..., an axis name or a tuple of names")
            names += [a for a in group if isinstance(a, str)]
        for name in sorted(set(names)):
            if names.count(name) > 1:
                written = ", ".join("..." if e is ... else repr(e) for e in entries)
                raise fail(f"P({written}): axis {name!r} is used {names.count(name)} times",
                           "an axis splits a leaf once", fix=f"name {name!r} for one dim only")  # fmt: skip
        if entries.count(...) > 1:
            raise fail("P: '...' may be used once", fix="keep one '...'")
        trimmed = [e[0] if isinstance(e, tuple) and len(e) == 1 else None if e == () else e for e in entries]
        while trimmed and ((trimmed[-1] is None and ... not in trimmed) or trimmed[-1] is ...):
            trimmed.pop()
        object.__setattr__(self, "entries", tuple(trimmed))
        object.__setattr__(self, "axes", tuple(names))
        object.__setattr__(self, "memory", memory)
        object.__setattr__(self, "lengths", {})
        if lengths is not None:
            object.__setattr__(self, "lengths", _chosen_lengths(self, lengths))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a P is immutable: make another")

    def __iter__(self) -> Iterator[Axis | EllipsisType]:
        """Iterate over the entries: `P(None, *spec)` is the spec of stacked leaves. See `with_entries` for lengths."""
        return iter(self.entries)

    def __getitem__(self, i: slice) -> tuple[Axis | EllipsisType, ...]:
        """Return some of the entries: `P(*spec[1:])` is the spec of one of the stacked leaves."""
        return self.entries[i]

    def parts(self, ndim: int) -> tuple[tuple[str, ...], ...]:
        """Return the axes that split each of `ndim` dims. Raises ShardingError if the spec has more dims."""
        listed = [e for e in self.entries if e is not ...]
        if len(listed) > ndim:
            raise fail(f"{self} describes {len(listed)} dims, the leaf has {ndim}", fix=f"drop {len(listed) - ndim}")
        at = self.entries.index(...) if ... in self.entries else len(listed)
        unsplit: list[Axis | EllipsisType] = [None] * (ndim - len(listed))
        return tuple(names_of(e) for e in [*listed[:at], *unsplit, *listed[at:]] if e is not ...)

    def lengths_over(self, axes: Sequence[str]) -> tuple[int, ...] | None:
        """Return the chosen lengths of the parts of a dim that these axes split, if they are chosen."""
        return self.lengths.get(axes[0]) if axes else None

    def sizes(self, shape: Sequence[int], mesh: Mapping[str, int]) -> tuple[Size, ...]:
        """Return the size of each dim of a leaf: where lengths are chosen, the lengths of its parts.

        >>> P("data", "model", lengths={"data": (1, 4)}).sizes((5, 8), {"data": 2, "model": 4})
        ((1, 4), 8)
        """
        if not self.lengths:
            return tuple(shape)
        firsts = [axes[0] if axes else "" for axes in self.parts(len(shape))]
        return tuple(as_size(self.lengths[a], (mesh[a],)) if a in self.lengths and mesh[a] > 1 else n
                     for n, a in zip(shape, firsts, strict=True))  # fmt: skip

    def with_entries(self, *entries: Axis | EllipsisType, memory: str | None = None) -> P:
        """Return a spec with other entries, in the same memory, and with the lengths for the axes that it still names.

        >>> P("stage", lengths=(2, 1)).with_entries(None, "stage")
        P(None, 'stage', lengths=(2, 1))
        """
        named = {a for e in entries if e is not ... for a in names_of(e)}
        lengths = {a: n for a, n in self.lengths.items() if a in named}
        return P(*entries, memory=memory or self.memory, lengths=lengths)

    def __eq__(self, other: object) -> bool:
        return (isinstance(other, P) and self.entries == other.entries and self.memory == other.memory
                and self.lengths == other.lengths)  # fmt: skip

    def __hash__(self) -> int:
        return hash(("P", self.entries, self.memory, *self.lengths.items()))

    def __repr__(self) -> str:
        texts = ["..." if e is ... else repr(e) for e in self.entries]
        texts += [f"memory={self.memory!r}"] * (self.memory != "device")
        lengths = next(iter(self.lengths.values())) if self.lengths and len(self.axes) == 1 else self.lengths
        return f"P({', '.join([*texts, *[f'lengths={lengths}'] * bool(lengths)])})"

    def _repr_html_(self) -> str:
        """Show the axes that split each dim, below each other."""
        at = self.entries.index(...) if ... in self.entries else len(self.entries)
        rows = []
        for i, entry in enumerate(self.entries):
            dim = "dims between" if entry is ... else f"dim {i if i < at else i - len(self.entries)}"
            axes = () if entry is ... else names_of(entry)
            chosen = [a + _format_lengths(self, a) for a in axes]
            rows.append((dim, f"split over {', then over '.join(chosen)}" if axes else "not split"))
        rows += [("other dims", "not split")] * (... not in self.entries)
        return page(repr(self), table([*rows, *[("memory", "of the host")] * (self.memory == "host")]))

    def __reduce__(self) -> Any:
        return functools.partial(P, memory=self.memory, lengths=self.lengths), self.entries


def _chosen_lengths(spec: P, lengths: Sequence[int] | Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return the lengths by axis, in the order of the axes. Raises ShardingError unless they are for first axes."""
    by_axis = lengths if isinstance(lengths, Mapping) else dict.fromkeys(spec.axes, lengths)
    what = f"{spec} with lengths={lengths}"
    if not isinstance(lengths, Mapping) and len(by_axis) != 1:
        fix = f"lengths={{{spec.axes[0]!r}: {lengths}}}" if spec.axes else "name the axis that splits it"
        raise fail(f"{what}: lengths of the parts over one axis, and the spec names {len(by_axis)}", fix=fix)
    first = [names_of(e)[0] for e in spec.entries if e is not ... and e is not None]
    for axis, ns in by_axis.items():
        if axis not in first:
            raise fail(f"{what}: {axis!r} is not the first axis of a dim", fix=f"one of {first}")
        if not isinstance(ns, (list, tuple)) or not ns or any(type(n) is not int or n < 0 for n in ns):
            raise fail(f"{what}: not lengths", fix=f"one int of at least 0 for each rank over {axis!r}: (7, 8, 8, 7)")
    return {a: tuple(by_axis[a]) for a in spec.axes if a in by_axis}


@checked
def row(axis: str | tuple[str, ...]) -> P:
    """Split dim 0 over `axis`. With `[in, out]` matrices and `x @ w` this splits the inputs.

    >>> row("model")
    P('model')
    """
    return P(axis)


@checked
def column(axis: str | tuple[str, ...]) -> P:
    """Split the last dim over `axis`. With `[in, out]` matrices and `x @ w` this splits the outputs.

    >>> column("model")
    P(..., 'model')
    """
    return P(..., axis)


@checked
def replicated() -> P:
    """Keep the full leaf on every device.

    >>> replicated()
    P()
    """
    return P()


@checked
def on_host(specs: Any) -> Any:
    """Return the same spec tree, with every part kept in host memory: for parameters, optimizer states, or both.

    >>> on_host({"w": P("data"), "b": P()})
    {'w': P('data', memory='host'), 'b': P(memory='host')}

    `scan` and `unshard` copy parameters to the device when their block is computed, and their gradients back;
    optimizers update a parameter in the memory it is in, and copy a state there if it is in the other. All other code
    inside `shard_map` copies them by `to_device`. On CPUs the two memories are one.
    """
    _tree.check_leaves("on_host", "specs", specs, P)
    return _tree.map(lambda s: s.with_entries(*s, memory="host"), specs)


def any_on_host(specs: Any) -> bool:
    """Return whether any leaf of a spec tree is kept in host memory."""
    each = {id(s): s for s in specs}.values() if isinstance(specs, (list, tuple)) else [specs]  # blocks often share one
    return any(is_spec(s) and s.memory == "host" for one in each for s in _tree.leaves(one))


def is_spec(x: object) -> bool:
    return isinstance(x, P)


def names_of(axis: Axis) -> tuple[str, ...]:
    """Return an axis argument as a tuple of names, empty for `None`."""
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def same_placement(a: P, b: P, ndim: int) -> bool:
    """Return whether two specs place a leaf of `ndim` dims alike: `P(..., "m")` and `P(None, "m")` do for a matrix."""
    return a == b or (a.memory == b.memory and a.parts(ndim) == b.parts(ndim) and a.lengths == b.lengths)


# --- arithmetic of parts --------------------------------------------------------------------------------------


def part_range(n: Size, sizes: Sequence[int], coords: Sequence[int]) -> tuple[int, int]:
    """Return (start, length) of the part of a dim of this size at `coords` of axes of these `sizes`, major first.

    >>> [part_range(10, (2, 2), (i, j)) for i in range(2) for j in range(2)]
    [(0, 3), (3, 2), (5, 3), (8, 2)]
    >>> [part_range((6, 4), (2, 2), (i, j)) for i in range(2) for j in range(2)]
    [(0, 3), (3, 3), (6, 2), (8, 2)]
    """
    start = 0
    if isinstance(n, tuple):
        # The first k axes have these lengths of parts; the other axes split each part evenly.
        k, at = next(k for k in range(1, len(sizes) + 1) if math.prod(sizes[:k]) == len(n)), 0
        for size, coord in zip(sizes[:k], coords[:k], strict=True):
            at = at * size + coord
        start, n, sizes, coords = sum(n[:at]), n[at], sizes[k:], coords[k:]
    for size, coord in zip(sizes, coords, strict=True):
        chunk = -(-n // size)
        offset = min(coord * chunk, n)
        start, n = start + offset, min(chunk, n - offset)
    return start, n


def part_lengths(n: Size, sizes: Sequence[int]) -> list[int]:
    """Return the length of every part of a dim of this size, in flattened axis order.

    >>> part_lengths(10, (4,)), part_lengths((6, 4), (2, 2))
    ([3, 3, 3, 1], [3, 3, 2, 2])
    """
    ranks = math.prod(sizes)
    if isinstance(n, int) and n % ranks == 0:
        return [n // ranks] * ranks
    return [part_range(n, sizes, coords)[1] for coords in itertools.product(*map(range, sizes))]


def total(n: Size) -> int:
    """Return the number of elements of a dim."""
    return sum(n) if isinstance(n, tuple) else n


def is_uneven(n: Size, ranks: int) -> bool:
    """Return whether the parts of a dim over this number of ranks differ in length."""
    return isinstance(n, tuple) or n % ranks != 0


def as_size(lengths: Sequence[int], sizes: Sequence[int]) -> Size:
    """Return the size of a dim whose parts have these lengths: an int if they are the parts of every dim of that size.

    >>> as_size((3, 3, 1), (3,)), as_size((3, 1, 3), (3,))
    (7, (3, 1, 3))
    """
    n = sum(lengths)
    return n if list(lengths) == part_lengths(n, sizes) else tuple(lengths)


def local_box(shape: Sequence[int], spec: P, sizes: Mapping[str, int], coords: Mapping[str, int]) -> Box:
    """Return the global slices of the part of the device at mesh coordinates `coords`.

    >>> local_box((5, 8), P("data", "model"), {"data": 2, "model": 4}, {"data": 1, "model": 0})
    (slice(3, 5, None), slice(0, 2, None))
    """
    box = []
    for n, axes in zip(spec.sizes(shape, sizes) if spec.lengths else shape, spec.parts(len(shape)), strict=True):
        start, length = part_range(n, [sizes[a] for a in axes], [coords[a] for a in axes])
        box.append(slice(start, start + length))
    return tuple(box)


def part_ranks(shape: Sequence[int], spec: P, sizes: Mapping[str, int]) -> dict[tuple[tuple[int, int], ...], list[int]]:
    """Return the bounds of each different part of a leaf, and the ranks that have it.

    >>> part_ranks((5,), P("model"), {"data": 2, "model": 2})
    {((0, 3),): [0, 2], ((3, 5),): [1, 3]}
    """
    parts = spec.parts(len(shape))
    lines = []  # of each dim, the bounds of the part at every position over its axes
    for n, axes in zip(spec.sizes(shape, sizes), parts, strict=True):
        ends = itertools.accumulate(part_lengths(n, [sizes[a] for a in axes]), initial=0)
        lines.append(list(itertools.pairwise(ends)))
    ranks: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank, coords in enumerate(itertools.product(*map(range, sizes.values()))):
        at = dict(zip(sizes, coords, strict=True))
        bounds = tuple(line[index_of(axes, sizes, at)] for line, axes in zip(lines, parts, strict=True))
        ranks.setdefault(bounds, []).append(rank)
    return ranks


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in box)


def full_box(shape: Sequence[int]) -> Box:
    """Return the box of all elements."""
    return tuple(slice(0, n) for n in shape)


def box_bounds(box: Box) -> tuple[tuple[int, int], ...]:
    """Return the (start, stop) of each dim: a key for a box, as slices cannot be hashed before Python 3.12."""
    return tuple((s.start, s.stop) for s in box)


def different_parts(shape: Sequence[int], spec: P, sizes: Mapping[str, int]) -> list[tuple[Box, list[int]]]:
    """Return the box of each different part of a leaf, and the ranks that have it, as `part_ranks`; no empty parts."""
    return [(tuple(slice(start, stop) for start, stop in bounds), ranks)
            for bounds, ranks in part_ranks(shape, spec, sizes).items()
            if all(start < stop for start, stop in bounds)]  # fmt: skip


def overlap(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    box = tuple(slice(max(s.start, t.start), min(s.stop, t.stop)) for s, t in zip(a, b, strict=True))
    return box if all(s.start < s.stop for s in box) else None


def relative_box(inner: Box, outer: Box) -> Box:
    """Return the slices of a box relative to a box that contains it.

    >>> relative_box((slice(5, 7),), (slice(4, 9),))
    (slice(1, 3, None),)
    """
    return tuple(slice(i.start - o.start, i.stop - o.start) for i, o in zip(inner, outer, strict=True))


def spec_errors(
    label: str, shape: Sequence[int], spec: P, sizes: Mapping[str, int], *, local: bool = False
) -> list[ShardingError]:  # fmt: skip
    """Return the errors of placing a leaf of `shape` by `spec` on a mesh with these axis sizes.

    With `local`, `shape` is the shape of a part, which lengths in the spec cannot be compared with.
    """
    unknown = [axis for axis in spec.axes if axis not in sizes]
    listed = len([e for e in spec.entries if e is not ...])
    if not unknown and listed <= len(shape) and not spec.lengths:
        return []
    facts: dict[str, object] = {"shape": list(shape), "spec": spec, "mesh": format_axes(sizes)}
    errors = [fail(f"{label}: the mesh has no axis {axis!r}", fix=f"use one of {list(sizes)}", **facts)
              for axis in unknown]  # fmt: skip
    if listed > len(shape):
        errors.append(fail(f"{label}: the spec is longer than the shape", f"{listed} > {len(shape)} dims",
                           fix=f"drop {listed - len(shape)} of its entries", **facts))  # fmt: skip
    for dim, axes in enumerate(() if errors else spec.parts(len(shape))):
        ns = spec.lengths_over(axes)
        if ns is not None and sizes[axes[0]] not in (1, len(ns)):
            errors.append(fail(f"{label}: lengths of {len(ns)} parts, and axis {axes[0]!r} has {sizes[axes[0]]} ranks",
                               fix=f"a length for each of the {sizes[axes[0]]} ranks, or no lengths=, for equal parts",
                               **facts))  # fmt: skip
        elif ns is not None and not local and sum(ns) != shape[dim]:
            errors.append(fail(f"{label}: the lengths over {axes[0]!r} do not sum to dim {dim}",
                               f"{' + '.join(map(str, ns))} = {sum(ns)}, and dim {dim} has {shape[dim]}",
                               fix=f"lengths that sum to {shape[dim]}", **facts))  # fmt: skip
    return errors


# --- spec trees -----------------------------------------------------------------------------------------------


@checked
def rules(table: Mapping[str, P]) -> Callable[[Any], Any]:
    """Return a function from a tree to its spec tree, by path globs; the first match wins.

    A path is written `h.3.attn.qkv`; `*` matches within one part, `**` any number of parts.

    >>> rules({"h.*.up": column("model"), "**": P()})({"h": [{"up": 1, "b": 2}]})
    {'h': [{'up': P(..., 'model'), 'b': P()}]}

    Raises ShardingError listing every leaf that no rule matches and every rule that no leaf uses.
    """

    def specs(tree: Any) -> Any:
        used: set[str] = set()
        errors: list[ShardingError] = []

        def find(path: _tree.Path, _: Any) -> P:
            parts = _tree.dotted(path).split(".") if path else []
            for glob, spec in table.items():
                if matches(parts, glob.split(".")):
                    used.add(glob)
                    return spec
            name = _tree.dotted(path)
            errors.append(fail(f"rules: no rule matches {name!r}", fix="add a rule, or '**': P() at the end"))
            return P()

        out = _tree.map_with_path(find, tree)
        errors += [
            fail(f"rules: {glob!r} matches no leaf", "(an earlier rule may match all of its leaves)",
                 fix="remove or correct it")
            for glob in table
            if glob not in used
        ]  # fmt: skip
        raise_all(errors)
        return out

    return specs


def matches(path: Sequence[str], glob: Sequence[str]) -> bool:
    if not glob:
        return not path
    if glob[0] == "**":
        return any(matches(path[i:], glob[1:]) for i in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], glob[0]) and matches(path[1:], glob[1:])


@checked
def fully_shard(
    specs: Any, tree: Any, *, axis: str | tuple[str, ...], min_size: int = 0, stacked: str | Sequence[str] = ()
) -> Any:  # fmt: skip
    """Add `axis`, or several, to the best free dim of each leaf of a spec tree: ZeRO-3 / FSDP by spec.

    The best dim is the one that splits evenly on most axis sizes (the largest power of two up to 256 in it), the
    first of several, since its parts are contiguous. Where no dim is free `axis` becomes the minor axis of the largest
    split dim. Leaves with fewer than `min_size` elements and 0-d leaves stay unchanged. `stacked` are globs, as of
    `rules`, of leaves `[blocks, ...]` for `scan`: their dim 0 is not split.

    >>> fully_shard({"w": P(None, "model"), "b": P()}, {"w": torch.empty(64, 8), "b": torch.empty(8)}, axis="data")
    {'w': P('data', 'model'), 'b': P('data')}
    >>> fully_shard(P(), {"blocks": torch.empty(12, 6, 6)}, axis="data", stacked="blocks.**")
    {'blocks': P(None, 'data')}

    `specs` may be a prefix of `tree`, whose leaves need a `.shape`. Leaves that already name one of the axes stay
    unchanged.

    Raises ShardingError listing every leaf without a shape, and for a glob that matches no leaf.
    """
    named = _tree.leaves_with_path(tree)
    leaf_specs = _tree.broadcast(specs, tree, name="specs", leaf=is_spec)
    raise_all([must_be(f"fully_shard: {_tree.show('tree', path)}", "a leaf with a shape", x)
               for path, x in named if not hasattr(x, "shape")])  # fmt: skip
    paths = [_tree.dotted(path).split(".") if path else [] for path, _ in named]
    in_stacks: set[int] = set()  # the leaves whose dim 0 may not be split
    for glob in [stacked] if isinstance(stacked, str) else stacked:
        found = {i for i, path in enumerate(paths) if matches(path, glob.split("."))}
        if not found:
            raise fail(f"fully_shard: stacked={glob!r} matches no leaf",
                       fix=f'a glob of paths: "{glob}.**", "*.{glob}"')  # fmt: skip
        in_stacks |= found
    added = [_add_axes(s, tuple(x.shape), names_of(axis), min_size, int(i in in_stacks))
             for i, (s, (_, x)) in enumerate(zip(leaf_specs, named, strict=True))]  # fmt: skip
    return _tree.unflatten(_tree.structure(tree), added)


def _add_axes(spec: P, shape: tuple[int, ...], axes: tuple[str, ...], min_size: int, first: int) -> P:
    if len(shape) <= first or math.prod(shape) < min_size or any(a in spec.axes for a in axes):
        return spec
    parts = list(spec.parts(len(shape)))
    free = [d for d, split in enumerate(parts) if not split and shape[d] > 1 and d >= first]
    if free:
        dim = max(free, key=lambda d: (math.gcd(shape[d], 256), -d))
    else:
        dim = max(range(first, len(shape)), key=lambda d: (shape[d], -d))
    parts[dim] = (*parts[dim], *axes)
    return spec.with_entries(*parts)


# --- texts ----------------------------------------------------------------------------------------------------

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c", "bool": "bool"}


def short_dtype(dtype: torch.dtype) -> str:
    """Abbreviate a dtype: `f32` for torch.float32, `bf16`, `i64`, `u8`, `bool`, `c64`."""
    name = str(dtype).removeprefix("torch.")
    stem = name.rstrip("0123456789")
    return _SHORT.get(stem, stem) + name[len(stem) :] if stem in _SHORT else name


def format_value(x: torch.Tensor) -> str:
    """Format the number of a 0-d tensor; "" for a tensor with dims, and for one without a value: fake, on meta.

    >>> format_value(torch.tensor(3)), format_value(torch.ones(2)), format_value(torch.tensor(3, device="meta"))
    ('3', '', '')
    """
    has_value = type(x) in (torch.Tensor, torch.nn.Parameter) and not x.is_meta
    return format_number(x) if has_value and not x.ndim else ""


def format_number(x: torch.Tensor) -> str:
    """Format the number of a 0-d tensor, with the digits that its dtype distinguishes.

    >>> format_number(torch.tensor(0.1)), format_number(torch.tensor(0.1, dtype=torch.float64) * 3)
    ('0.1', '0.30000000000000004')
    """
    x = x.detach().cpu()
    narrow = x.is_floating_point() and x.element_size() < 4 and x.dtype != torch.float16  # of these numpy has only one
    return str((x.float() if narrow else x).numpy()[()])


def format_axes(sizes: Mapping[str, int]) -> str:
    """Format mesh axes and their sizes, as messages show them.

    >>> format_axes({"data": 2, "model": 4})
    'data=2, model=4'
    """
    return ", ".join(f"{a}={n}" for a, n in sizes.items())


def size(n: int) -> str:
    """Format a number of bytes.

    >>> size(640), size(1536), size(3 * 2**30)
    ('640 B', '1.5 KiB', '3.0 GiB')
    """
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if n >= 1 << power:
            return f"{n / (1 << power):.1f} {unit}"
    return f"{n} B"


class Sized:
    """Base of leaves that are not tensors and have a global shape and a dtype: numbers that follow from these."""

    __slots__ = ()
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the global leaf, replicas not counted."""
        return self.numel() * self.dtype.itemsize


class _Typed(Protocol):
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> Sequence[int]: ...


def describe(x: _Typed, spec: P | None = None) -> str:
    """Format the dtype and shape of a tensor, or of its description, as `format_tensor`.

    >>> describe(torch.ones(2, 3))
    'f32[2, 3]'
    """
    return format_tensor(x.dtype, x.shape, spec)


def format_tensor(dtype: torch.dtype, shape: Sequence[int], spec: P | None = None) -> str:
    """Format dtype, global shape and axes: `f32[768, 3072@model]`; `f32<host>[...]` for a leaf in host memory.

    Chosen lengths of parts follow their axis: `f32[30@stage(7+8+8+7), 64]`.
    """
    parts = spec.parts(len(shape)) if spec is not None else ((),) * len(shape)
    dims = [f"{n}@{'+'.join([a + _format_lengths(spec, a) for a in axes])}" if axes else str(n)
            for n, axes in zip(shape, parts, strict=True)]  # fmt: skip
    memory = "<host>" if spec is not None and spec.memory == "host" else ""
    return f"{short_dtype(dtype)}{memory}[{', '.join(dims)}]"


def _format_lengths(spec: P | None, axis: str) -> str:
    """Format chosen lengths of parts as `(7+8+8+7)`; more than 8 are abbreviated."""
    texts = [str(n) for n in spec.lengths.get(axis, ())] if spec is not None else []
    return f"({'+'.join(texts if len(texts) <= 8 else [*texts[:6], '...', texts[-1]])})" if texts else ""


def draw(title: str, shape: Sequence[int], spec: P, sizes: Mapping[str, int], **options: Any) -> View:
    """Draw a leaf's blocks with the ranks that have each of them; `options` go to `picture`.

    >>> draw("x", (5, 8), P("data", "model"), {"data": 2, "model": 2})
    x on data=2, model=2
           0:4   4:8
         ┌─────┬─────┐
     0:3 │  0  │  1  │
         ├─────┼─────┤
     3:5 │  2  │  3  │
         └─────┴─────┘
    """
    parts = part_ranks(shape, spec, sizes)
    return picture(f"{title} on {format_axes(sizes)}", shape, parts, sizes, on_host=spec.memory == "host", **options)
