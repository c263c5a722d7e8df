"""What the ranks returned, compared and joined: the second half of a `shard_map` call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import tree
from .comm import memory_of
from .errors import ShardingError, fail, raise_all
from .mesh import Mesh
from .sharded import Sharded
from .spec import P, is_spec, lengths, local_box, problems, short

# A tree's structure, each leaf's dtype and local shape, and what else the ranks compare.
Kinds = tuple[str, list[tuple[str, tuple[int, ...]]], str]


def agree(
    name: str, mesh: Mesh, known: dict[Any, list[Kinds]], signature: Any, out: Any, digest: str
) -> list[Kinds] | None:
    """On a process mesh, what every rank returned: they tell each other, and compare, once per signature.

    A `digest` goes along, for the caller to compare.
    """
    if mesh.kind != "process" or mesh.size == 1:
        return None
    leaves, treedef = tree.flatten(out)
    mine = str(treedef), [_kind(x) for x in leaves], digest
    if signature not in known:
        everyone = mesh.told(mine)
        for rank, other in enumerate(everyone):
            if _alike(other) != _alike(everyone[0]):
                raise fail(f"{name}: rank {rank} returned something else than rank 0",
                           f"rank 0  {_told(everyone[0])}", f"rank {rank}  {_told(other)}",
                           fix="return the same tree, dtypes and Python values on every rank")  # fmt: skip
        known[signature] = everyone
    before = known[signature][mesh.ranks[0]]
    if [shape for _, shape in before[1]] != [shape for _, shape in mine[1]]:
        raise fail(f"{name}: the results changed shape between calls with like arguments",
                   f"before  {_told(before)}", f"now     {_told(mine)}")  # fmt: skip
    return known[signature]


def specs_of(name: str, out: Any, out_specs: Any) -> list[P]:
    """The out spec of each leaf."""
    return tree.broadcast(out_specs, out, name=f"{name}: out_specs", leaf=is_spec)


def collect(name: str, mesh: Mesh, out_specs: Any, results: Sequence[tuple[Any, list[Kinds] | None, set[int]]]) -> Any:
    """Join the ranks' results by `out_specs`.

    Of each rank: its result, what all of them returned (see `agree`), and the storages a result must not share.
    """
    first = results[0][0]
    _, treedef = tree.flatten(first)
    flat = specs_of(name, first, out_specs)
    columns = []
    for rank, (out, *_) in zip(mesh.ranks, results, strict=True):
        own, own_def = tree.flatten(out)
        if own_def != treedef:
            raise fail(f"{name}: rank {rank} returned another tree than rank 0", rank_0=treedef, other=own_def)
        columns.append(own)
    everyone = results[0][1]
    taken: set[int] = set().union(*(kept for _, _, kept in results))
    errors: list[ShardingError] = []
    joined = []
    for i, ((path, leaf), spec) in enumerate(zip(tree.leaves_with_path(first), flat, strict=True)):
        where = f"{name}: {tree.show('result', path)}"
        parts = [own[i] for own in columns]
        kinds = [p.dtype if isinstance(p, Tensor) else None for p in parts]
        if len(set(kinds)) > 1:
            named = [type(p).__name__ if kind is None else str(kind) for p, kind in zip(parts, kinds, strict=True)]
            errors.append(fail(f"{where}: the ranks returned different kinds", f"{named}"))
            continue
        if not isinstance(leaf, Tensor):
            errors += _disagreeing(where, parts)
            joined.append(leaf)
            continue
        shapes = [tuple(p.shape) for p in parts] if everyone is None else [row[i][1] for _, row, _ in everyone]
        wrong = problems(where, tuple(leaf.shape), spec, mesh.axes)
        if wrong:
            errors += wrong
            continue
        shape, wrong = _global_shape(where, mesh, shapes, spec)
        errors += wrong
        joined.append(None if wrong else Sharded(shape, spec, mesh, [_kept(p.detach(), taken, mesh) for p in parts]))
    raise_all(errors)
    return tree.unflatten(treedef, joined)


def _kept(x: Tensor, taken: set[int], mesh: Mesh) -> Tensor:
    """A result, copied where it shares storage with an argument that was not donated, or with another result."""
    if mesh.kind == "abstract":
        return torch.empty(x.shape, dtype=x.dtype, device="meta")
    at = memory_of(x)
    if at in taken:
        return x.clone()
    taken.add(at)
    return x


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
        if lengths(total, sizes) != line:
            fix = "return equal parts, or parts of ceil(n / ranks) with the short ones last"
            return (), [fail(f"{where}: the parts do not make up dim {dim} split by {axes}",
                             f"the ranks hold {line}", f"a dim of {total} splits into {lengths(total, sizes)}",
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
    return (short(x.dtype), tuple(x.shape)) if isinstance(x, Tensor) else (f"{type(x).__name__} {x!r}", ())


def _alike(kinds: Kinds) -> Any:
    """What must be the same on every rank: everything but the sizes."""
    return kinds[0], [(word, len(shape)) for word, shape in kinds[1]]


def _told(kinds: Kinds) -> str:
    return f"{', '.join(word if ' ' in word else f'{word}{list(shape)}' for word, shape in kinds[1])} in {kinds[0]}"


__all__ = ["Kinds", "agree", "collect", "specs_of"]
