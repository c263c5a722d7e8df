"""What the ranks returned, compared and joined: the second half of a `shard_map` call.

The first results of a kind are checked leaf by leaf, and how they are joined is kept as a `Joint`. Results of the same
structure, dtypes and local shapes are joined by it again, at about a microsecond a leaf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard._comm import memory_device, storage_key, to_spec_memory
from fshard.errors import ShardingError, fail, raise_all
from fshard.mesh import Mesh
from fshard.sharded import Placement, make_sharded
from fshard.spec import P, is_spec, local_box, part_lengths, short_dtype, spec_errors

# A tree's structure, each leaf's dtype and local shape, and what else the ranks compare.
Kinds = tuple[str, list[tuple[str, tuple[int, ...]]], str]


@dataclass(frozen=True)
class OutputPlan:
    """How results of these kinds become `Sharded`: nothing in it depends on a value."""

    treedef: Any
    kinds: list[list[Any]]  # by rank of this process, of each leaf: see `_kinds`
    placements: list[Placement | None]  # of each leaf; None of what is no tensor
    tensors: list[int]  # which leaves are
    plain: bool  # whether all tensors can be kept as they are: none is of another class, or requires grad
    steady: bool  # whether results have had one structure so far


@dataclass(frozen=True)
class Row:
    """What one rank returned, flat; with the joint, if it is of the kinds that the joint is for."""

    out: Any
    leaves: list[Any]
    treedef: Any
    joint: OutputPlan | None


def returned(out: Any, known: OutputPlan | None, at: int) -> Row:
    """The results of this process's rank number `at`, compared with what they were before."""
    if known is not None and known.steady:
        leaves = leaves_as(known.treedef, out)
        if leaves is not None and _kinds(leaves) == known.kinds[at]:
            return Row(out, leaves, known.treedef, known)
    leaves, treedef = tree.flatten(out)
    same = known is not None and treedef == known.treedef and _kinds(leaves) == known.kinds[at]
    return Row(out, leaves, treedef, known if same else None)


def leaves_as(treedef: Any, tree_: Any) -> list[Any] | None:
    """The leaves of a tree that has this structure, six times faster than asking for its structure; else `None`.

    That is slow where it has not, for optree prints the tree. What is taken for a leaf may be a subtree: compare the
    leaves too. Dicts of one set of keys are alike here, in any order, and an `OrderedDict` is one of them.
    """
    try:
        found: list[Any] = treedef.flatten_up_to(tree_)
    except ValueError:
        return None
    return found


_kind_of = attrgetter("__class__", "dtype", "shape", "requires_grad")


def _kinds(leaves: list[Any]) -> list[Any]:
    """What a joint depends on: of a tensor its class, dtype, shape and whether it requires grad; else the class."""
    try:
        return list(map(_kind_of, leaves))
    except AttributeError:
        return [_kind_of(x) if isinstance(x, Tensor) else x.__class__ for x in leaves]


def memories(xs: list[Tensor], mesh: Mesh) -> list[int]:
    """`memory_of` each, at a fifth of the cost, but 0 for those without elements."""
    if mesh.kind == "abstract":
        return [storage_key(x) for x in xs]
    starts = list(map(Tensor.data_ptr, xs))
    if any(map(Tensor.storage_offset, xs)):
        return [p and p - int(x.storage_offset()) * x.element_size() for p, x in zip(starts, xs, strict=True)]
    return starts


def agree(name: str, mesh: Mesh, known: list[Kinds] | None, row: Row, digest: str) -> list[Kinds] | None:
    """On a process mesh, what every rank returned: they tell each other, and compare, once per signature.

    `known` is what they told before. A `digest` goes along, for the caller to compare.
    """
    if mesh.kind != "process" or mesh.size == 1:
        return None
    if known is not None and row.joint is not None:
        return known
    mine = str(row.treedef), [_kind(x) for x in row.leaves], digest
    if known is None:
        known = mesh.gather_objects(mine)
        for rank, other in enumerate(known):
            if _alike(other) != _alike(known[0]):
                raise fail(f"{name}: rank {rank} returned something else than rank 0",
                           f"rank 0  {_told(known[0])}", f"rank {rank}  {_told(other)}",
                           fix="return the same tree, dtypes and Python values on every rank")  # fmt: skip
    before = known[mesh.ranks[0]]
    if [shape for _, shape in before[1]] != [shape for _, shape in mine[1]]:
        raise fail(f"{name}: the results changed shape between calls with like arguments",
                   f"before  {_told(before)}", f"now     {_told(mine)}")  # fmt: skip
    return known


def specs_of(name: str, out: Any, out_specs: Any) -> list[P]:
    """The out spec of each leaf."""
    return tree.broadcast(out_specs, out, name=f"{name}: out_specs", leaf=is_spec)


def collect(
    name: str, mesh: Mesh, out_specs: Any, rows: Sequence[Row], everyone: list[Kinds] | None, taken: set[int],
    known: OutputPlan | None,
) -> tuple[Any, OutputPlan]:  # fmt: skip
    """Join the ranks' results by `out_specs`, and how the next ones like them are joined.

    `everyone` is what all of them returned (see `agree`), `known` how they were joined before. A result is kept as it
    is, and copied where it shares memory with an argument that was not donated (`taken`), or with another result: a
    later call may be given one to overwrite.
    """
    joint = rows[0].joint
    if joint is None or any(row.joint is not joint for row in rows):
        steady = known is None or (known.steady and known.treedef == rows[0].treedef)
        joint = _joint(name, mesh, out_specs, rows, everyone, steady)
    elif len(rows) > 1 and len(joint.tensors) < len(joint.placements):
        errors: list[ShardingError] = []
        for i, (path, parts) in enumerate(zip(joint.treedef.paths(), _across(rows), strict=True)):
            if joint.placements[i] is None:
                errors += _disagreeing(f"{name}: {tree.show('result', path)}", parts)
        raise_all(errors)
    columns = [_own(row.leaves, joint, mesh, taken) for row in rows]
    each = zip(joint.placements, zip(*columns, strict=True), strict=True)
    made = [parts[0] if p is None else make_sharded(p, parts) for p, parts in each]
    return tree.unflatten(joint.treedef, made), joint


def _own(leaves: list[Any], joint: OutputPlan, mesh: Mesh, taken: set[int]) -> list[Any]:
    """One rank's leaves, of which no tensor shares memory with what is taken; then theirs is taken too."""
    if mesh.kind == "abstract":
        return [torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x for x in leaves]
    if not joint.plain:
        leaves = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
    at = memories(leaves if len(joint.tensors) == len(leaves) else [leaves[i] for i in joint.tensors], mesh)
    each = set(at)
    if len(each) < len(at) or not taken.isdisjoint(each):
        leaves = list(leaves)
        for i, memory in zip(joint.tensors, at, strict=True):
            if memory in taken:
                leaves[i] = leaves[i].clone()
            elif memory:
                taken.add(memory)
    taken |= each
    taken.discard(0)
    if mesh.device.type != "cpu":  # elsewhere they may lie in another memory than their specs say
        for i, p in enumerate(joint.placements):
            if p is not None and leaves[i].device != memory_device(p.spec, mesh.device):
                leaves[i] = to_spec_memory(leaves[i], p.spec, mesh.device)
    return leaves


def _joint(
    name: str, mesh: Mesh, out_specs: Any, rows: Sequence[Row], everyone: list[Kinds] | None, steady: bool
) -> OutputPlan:
    """Check results leaf by leaf: what they make up."""
    first = rows[0]
    flat = specs_of(name, first.out, out_specs)
    for rank, row in zip(mesh.ranks, rows, strict=True):
        if row.treedef != first.treedef:
            raise fail(f"{name}: rank {rank} returned another tree than rank 0", rank_0=first.treedef,
                       other=row.treedef)  # fmt: skip
    errors: list[ShardingError] = []
    placements: list[Placement | None] = []
    named = tree.leaves_with_path(first.out)
    for i, ((path, leaf), spec, parts) in enumerate(zip(named, flat, _across(rows), strict=True)):
        where = f"{name}: {tree.show('result', path)}"
        kinds = [p.dtype if isinstance(p, Tensor) else None for p in parts]
        if len(set(kinds)) > 1:
            words = [type(p).__name__ if kind is None else str(kind) for p, kind in zip(parts, kinds, strict=True)]
            errors.append(fail(f"{where}: the ranks returned different kinds", f"{words}"))
            continue
        if not isinstance(leaf, Tensor):
            errors += _disagreeing(where, parts)
            placements.append(None)
            continue
        shapes = [tuple(p.shape) for p in parts] if everyone is None else [row[i][1] for _, row, _ in everyone]
        wrong = spec_errors(where, tuple(leaf.shape), spec, mesh.axes)
        if wrong:
            errors += wrong
            continue
        shape, wrong = _global_shape(where, mesh, shapes, spec)
        errors += wrong
        placements.append(Placement(shape, leaf.dtype, spec, mesh))
    raise_all(errors)
    tensors = [i for i, p in enumerate(placements) if p is not None]
    plain = all(type(row.leaves[i]) is Tensor and not row.leaves[i].requires_grad for row in rows for i in tensors)
    return OutputPlan(first.treedef, [_kinds(row.leaves) for row in rows], placements, tensors, plain, steady)


def _across(rows: Sequence[Row]) -> list[list[Any]]:
    """Of each leaf, what every rank has of it."""
    return [list(parts) for parts in zip(*(row.leaves for row in rows), strict=True)]


def _global_shape(
    where: str, mesh: Mesh, shapes: Sequence[tuple[int, ...]], spec: P
) -> tuple[tuple[int, ...], list[ShardingError]]:
    """The shape whose parts by `spec` are these, rank by rank; on an abstract mesh all are as large as the first."""
    ndim = len(shapes[0])
    if any(len(s) != ndim for s in shapes):
        return (), [fail(f"{where}: the ranks returned {sorted(set(map(len, shapes)))} dims")]
    if mesh.kind == "abstract":
        ranks = [math.prod(mesh.axes[a] for a in axes) for axes in spec.parts(ndim)]
        return tuple(n * k for n, k in zip(shapes[0], ranks, strict=True)), []
    shape = []
    for dim, axes in enumerate(spec.parts(ndim)):
        sizes = [mesh.axes[a] for a in axes]
        line = _along(mesh, axes, shapes, dim)
        total = sum(line)
        if part_lengths(total, sizes) != line:
            fix = "return equal parts, or parts of ceil(n / ranks) with the short ones last"
            return (), [fail(f"{where}: the parts do not make up dim {dim} split by {axes}",
                             f"the ranks hold {line}", f"a dim of {total} splits into {part_lengths(total, sizes)}",
                             fix=fix)]  # fmt: skip
        shape.append(total)
    for rank, have in enumerate(shapes):
        want = tuple(s.stop - s.start for s in local_box(shape, spec, mesh.axes, mesh.coords(rank)))
        if have != want:
            return (), [fail(f"{where}: rank {rank} returned {list(have)}, its part of {shape} is {list(want)}",
                             spec=spec)]  # fmt: skip
    return tuple(shape), []


def _along(mesh: Mesh, axes: Sequence[str], shapes: Sequence[tuple[int, ...]], dim: int) -> list[int]:
    """The local sizes of a dim over the flattened axes, on the ranks at the origin of all other axes."""
    strides = {}
    stride = mesh.size
    for a, n in mesh.axes.items():
        stride //= n
        strides[a] = stride
    ranks = [0]
    for a in axes:
        ranks = [r + i * strides[a] for r in ranks for i in range(mesh.axes[a])]
    return [shapes[r][dim] for r in ranks]


def _disagreeing(where: str, parts: Sequence[Any]) -> list[ShardingError]:
    """A result that is no tensor must be the same on every rank this process runs."""
    try:
        equal = all(bool(p == parts[0]) or (p != p and parts[0] != parts[0]) for p in parts)
    except (TypeError, ValueError, RuntimeError):
        equal = all(p is parts[0] for p in parts)
    if equal:
        return []
    shown = f"{parts[:4]}"
    if len(shown) > 200:  # the output of a model, say, which is no pytree
        shown = f"a {type(parts[0]).__name__} on each"
    return [fail(f"{where}: is not a tensor and differs between ranks", shown,
                 fix="return a tensor with a spec, or a pytree of them")]  # fmt: skip


def _kind(x: Any) -> tuple[str, tuple[int, ...]]:
    """A result in words that travel: its dtype and local shape, or a Python value."""
    return (short_dtype(x.dtype), tuple(x.shape)) if isinstance(x, Tensor) else (f"{type(x).__name__} {x!r}", ())


def _alike(kinds: Kinds) -> Any:
    """What must be the same on every rank: everything but the sizes."""
    return kinds[0], [(word, len(shape)) for word, shape in kinds[1]]


def _told(kinds: Kinds) -> str:
    return f"{', '.join(word if ' ' in word else f'{word}{list(shape)}' for word, shape in kinds[1])} in {kinds[0]}"


__all__ = ["Kinds", "OutputPlan", "Row", "agree", "collect", "leaves_as", "memories", "returned", "specs_of"]
