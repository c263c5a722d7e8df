"""Whole leaves over an axis, by their specs: one call that is data parallel, fully sharded, or both at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard._comm import HOST, Axis, Region, copy_to_device, known_axes, live_axes, region
from fshard._ops import CastMap, Gather, Map, Precision, Vary, apply_map, gather_layout
from fshard.collectives import by_dtype
from fshard.errors import ShardingError, fail, raise_all
from fshard.spec import P, part_range
from fshard.spec import is_spec as _is_spec


def unshard(
    params: Any, specs: Any, axis: Axis, *, shapes: Any = None, dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """Whole leaves over `axis`, ready for each rank's own data: DDP, FSDP and HSDP are this one call.

        [D@axis, F]{V} -> [D, F]{V}     all_gather     transpose: psum_scatter
        [D, F]{I}      -> [D, F]{V}     pvary          transpose: psum

    Leaves whose spec names the axis are gathered, the others varied; one transfer per dtype each way. Other axes in
    the specs stay split. Leaves in host memory come to the device first, and their gradients go back there.

    Args:
        specs: of the params, or a prefix.
        shapes: a tree of things with a global `.shape` (the Deferred tree, say), needed only for leaves that the axis
            does not divide.
        dtype: floating leaves are cast to it before they move.
        reduce_dtype: their gradients are summed over the ranks in it, `dtype` if not given, and come back in the
            dtype of the leaf.

    Raises ShardingError where a dim is split by `axis` and, minor to it, by another axis that would stay: the pieces
    of such a dim do not join.
    """
    where = region("unshard")
    leaves, treedef = tree.flatten(params)
    flat = tree.broadcast(specs, params, name="specs", leaf=_is_spec)
    ways = routes("unshard", where, leaves, flat, axis, sizes_of("unshard", len(leaves), shapes))
    how = [Precision.of(x, dtype, reduce_dtype) for x in leaves]
    out = [copy_to_device(x, where.device) if way.host else x for x, way in zip(leaves, ways, strict=True)]
    vary: dict[Any, list[int]] = {}
    gather: dict[tuple[str, ...], list[tuple[int, Joined]]] = {}
    for i, way in enumerate(ways):
        vary.setdefault((way.vary, None if way.gathers else how[i], out[i].dtype), []).append(i)
        for joined in way.gathers:
            gather.setdefault(joined.axes, []).append((i, joined))
    for (axes, cast, _), which in vary.items():
        xs = [out[i] for i in which]
        for i, x in zip(which, _apply(Vary(where.comm, axes), cast, xs) if axes else _cast(xs, cast), strict=True):
            out[i] = x
    for parts in gather.values():
        _gather_leaves(where, parts, how, out)
    return tree.unflatten(treedef, out)


def _apply(m: Map, how: Precision | None, xs: Sequence[Tensor]) -> Sequence[Tensor]:
    return apply_map(m if how is None else CastMap.of(m, how), xs)


def _cast(xs: Sequence[Tensor], how: Precision | None) -> Sequence[Tensor]:
    return xs if how is None else [x.to(how.computed) for x in xs]


@dataclass(frozen=True)
class Joined:
    """A dim whose pieces over `axes` are to be joined; `size` is what they make up, where it is known."""

    axes: tuple[str, ...]
    dim: int
    size: int | None


@dataclass(frozen=True)
class Route:
    """How one leaf becomes whole: varied over some axes, gathered over others, mostly along one dim."""

    vary: tuple[str, ...]
    gathers: tuple[Joined, ...]
    host: bool = False  # whether it is in host memory, and first of all comes to the device


def routes(
    verb: str, where: Region, leaves: Sequence[Tensor], specs: Sequence[P], axis: Axis,
    shapes: Sequence[tuple[int, ...] | None],
) -> list[Route]:  # fmt: skip
    """The route of each leaf, over the axes of more than one rank. Raises for pieces that do not join."""
    names = known_axes(verb, where, axis)
    live = live_axes(where.comm, names)
    elsewhere = where.device != HOST
    found: list[Route] = []
    errors: list[ShardingError] = []
    for i, (x, spec, shape) in enumerate(zip(leaves, specs, shapes, strict=True)):
        gathers = []
        if elsewhere and x.device == HOST and spec.memory != "host":
            errors.append(fail(f"{verb}: leaf {i} is in host memory, its spec says {spec}",
                               fix="specs that say so, fs.on_host(specs); or fs.to_device(params)"))  # fmt: skip
        for dim, split in enumerate(spec.parts(x.ndim)):
            joined = tuple(a for a in split if a in names)
            major = split[: len(split) - len(joined)]
            if joined and split[len(major) :] != joined:
                first = tuple(a for a in split if a not in names)
                errors.append(fail(f"{verb}: leaf {i} has dim {dim} split by {split}; {joined} cannot be joined first",
                                   fix=f"make {joined} the minor axes: {(*first, *joined)}"))  # fmt: skip
            elif any(a in live for a in joined):
                sizes, coords = [where.sizes[a] for a in major], [where.coords[a] for a in major]
                n = None if shape is None else part_range(shape[dim], sizes, coords)[1]
                gathers.append(Joined(tuple(a for a in joined if a in live), dim, n))
        found.append(Route(tuple(a for a in live if a not in spec.axes), tuple(gathers),
                           spec.memory == "host"))  # fmt: skip
    raise_all(errors)
    return found


def sizes_of(verb: str, n: int, shapes: Any) -> list[tuple[int, ...] | None]:
    """The global shape of each of `n` leaves, where a tree of things that have one was given."""
    if shapes is None:
        return [None] * n
    known: list[tuple[int, ...] | None] = [tuple(s.shape) for s in tree.leaves(shapes)]
    if len(known) != n:
        raise fail(f"{verb}: shapes is another tree than params", f"{len(known)} leaves, not {n}",
                   fix="pass the tree that params were materialized from")  # fmt: skip
    return known


def _gather_leaves(
    where: Region, which: list[tuple[int, Joined]], how: Sequence[Precision | None], out: list[Tensor]
) -> None:
    # A leaf split by the axes on two dims is gathered in two rounds; all others share one transfer per dtype.
    axes = which[0][1].axes
    while which:
        seen: set[int] = set()
        now = [w for w in which if not (w[0] in seen or seen.add(w[0]))]  # type: ignore[func-returns-value]
        which = [w for w in which if w not in now]
        for group in by_dtype([out[i] for i, _ in now]):
            xs = [out[now[g][0]] for g in group]
            dims, sizes = [now[g][1].dim for g in group], [now[g][1].size for g in group]
            layout = gather_layout("unshard", where.comm, axes, xs, dims, sizes)
            ys = _apply(Gather(where.comm, axes, layout), how[now[group[0]][0]], xs)
            for g, y in zip(group, ys, strict=True):
                out[now[g][0]] = y


__all__ = ["Joined", "Route", "routes", "sizes_of", "unshard"]
