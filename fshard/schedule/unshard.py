"""Unshard leaves over an axis by their specs: data parallel, fully sharded, or both, by one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard._core.host_memory import copy_to_device
from fshard._core.ops import CastMap, Gather, Map, Precision, Vary, apply_map, argument_shape, gather_layout
from fshard._core.region import Region, known_axes, live_axes, region
from fshard._core.weight import Part, Weight, is_weight
from fshard.collectives import by_dtype
from fshard.errors import ShardingError, checked, fail, must_be, raise_all
from fshard.spec import Axis, P, Size, any_on_host, is_spec, part_range, spec_errors


@checked
def unshard(
    params: Any, specs: Any, axis: Axis, *, shapes: Any = None, dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """Unshard leaves over `axis`, ready for data that differs between its ranks: DDP, FSDP and HSDP by one call.

        [D@axis, F]{V} -> [D, F]{V}     all_gather     transpose: psum_scatter
        [D, F]{I}      -> [D, F]{V}     pvary          transpose: psum

    Leaves whose spec names the axis are gathered, for the others `pvary` is called; one transfer per dtype in each
    direction. Dims stay split over other axes of the specs. Leaves in host memory are copied to the device first, and
    their gradients are copied back.

    Args:
        specs: of the params, or a prefix.
        shapes: a tree of objects with a global `.shape` (such as the Deferred tree), needed only for leaves that the
            axis does not divide and that are not arguments of the call.
        dtype: floating leaves are cast to it before the transfer.
        reduce_dtype: gradients are summed over the ranks in it, by default in `dtype`, and then cast to the dtype of
            the leaf.

    >>> split = {"w": P("data"), "b": P()}
    >>> parts = {"w": torch.ones(2, 3), "b": torch.ones(3)}         # of one rank
    >>> unshard(parts, split, "data")["w"].shape                      # data=2
    torch.Size([4, 3])

    Raises ShardingError if a dim is split by `axis` and, minor to it, by another axis that stays: its parts cannot be
    joined.
    """
    current = region("unshard")
    leaves, treedef = tree.check_leaves("unshard", "params", params, Tensor)
    leaf_specs, sizes = placements("unshard", params, specs, shapes)
    leaf_routes = routes("unshard", current, params, leaves, leaf_specs, axis, sizes)
    casts = [Precision.make(x, dtype, reduce_dtype) for x in leaves]
    out = [copy_to_device(x, current.device) if r.host else x for x, r in zip(leaves, leaf_routes, strict=True)]
    vary: dict[Any, list[int]] = {}
    gather: dict[tuple[str, ...], list[tuple[int, Joined]]] = {}
    for i, route in enumerate(leaf_routes):
        vary.setdefault((route.vary, None if route.gathers else casts[i], out[i].dtype), []).append(i)
        for joined in route.gathers:
            gather.setdefault(joined.axes, []).append((i, joined))
    for (axes, cast, _), which in vary.items():
        xs = [out[i] for i in which]
        for i, x in zip(which, _apply(Vary(current.comm, axes), cast, xs) if axes else _cast(xs, cast), strict=True):
            out[i] = x
    for axes, parts in gather.items():
        for group in by_dtype([out[i] for i, _ in parts]):
            which, joins = [parts[k][0] for k in group], [parts[k][1] for k in group]
            xs = [out[i] for i in which]
            layout = gather_layout("unshard", axes, xs, [j.dim for j in joins], [j.size for j in joins])
            for i, x in zip(which, _apply(Gather(current.comm, axes, layout), casts[which[0]], xs), strict=True):
                out[i] = x
    return tree.unflatten(treedef, out)


def make_whole(
    params: Any, specs: Any, axis: Axis, *, shapes: Any = None, dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """Call `unshard`, or without an axis and without leaves in host memory only cast, which needs no region."""
    if axis or any_on_host(specs):
        return unshard(params, specs, axis, shapes=shapes, dtype=dtype, reduce_dtype=reduce_dtype)
    return params if dtype is None else tree.map(lambda x: x.to(dtype) if x.is_floating_point() else x, params)


def _apply(m: Map, cast: Precision | None, xs: Sequence[Tensor]) -> Sequence[Tensor]:
    return apply_map(m if cast is None else CastMap.from_precision(m, cast), xs)


def _cast(xs: Sequence[Tensor], cast: Precision | None) -> Sequence[Tensor]:
    return xs if cast is None else [x.to(cast.computed) for x in xs]


@dataclass(frozen=True)
class Joined:
    """A dim whose parts over `axes` are to be joined; `size` is its size, if known."""

    axes: tuple[str, ...]
    dim: int
    size: Size | None


@dataclass(frozen=True)
class Route:
    """Steps that unshard one leaf: a copy from host memory, pvary over some axes, gathers over others."""

    vary: tuple[str, ...]
    gathers: tuple[Joined, ...]
    host: bool = False


def routes(
    verb: str, region: Region, params: Any, leaves: Sequence[Tensor], specs: Sequence[P | None], axis: Axis,
    shapes: Sequence[tuple[int, ...] | None],
) -> list[Route]:  # fmt: skip
    """Return the route of each leaf, over the axes of more than one rank. Raises if parts cannot be joined.

    A leaf without a spec does not change. `params` is the tree of the leaves.
    """
    names = known_axes(verb, region, axis)
    live = live_axes(region.comm, names)
    host_is_other_memory, sizes = region.device != region.host, region.sizes
    out: list[Route] = []
    errors: list[ShardingError] = []

    def label(i: int) -> str:  # of a leaf, for an error
        return f"{verb}: {tree.show('params', tree.leaves_with_path(params)[i][0])}"

    for i, (x, spec, shape) in enumerate(zip(leaves, specs, shapes, strict=True)):
        gathers = []
        if spec is None:
            out.append(Route((), ()))
            continue
        shape = argument_shape(x, spec) if shape is None else shape
        if host_is_other_memory and x.device == region.host and spec.memory != "host":
            errors.append(fail(f"{label(i)} is in host memory, its spec is {spec}",
                               fix="pass fs.on_host(specs), or fs.to_device(params)"))  # fmt: skip
        if shape is not None and len(shape) != x.ndim:
            errors.append(fail(f"{label(i)} has {x.ndim} dims, and {len(shape)} in shapes", leaf=list(x.shape),
                               shapes=list(shape), fix="pass the tree that params were materialized from"))  # fmt: skip
            continue
        if spec_errors(verb, x.shape, spec, sizes, local=True):
            errors += spec_errors(label(i), tuple(x.shape), spec, sizes, local=True)
            continue
        known = spec.sizes(shape or x.shape, sizes) if spec.lengths else shape or x.shape
        for dim, split in enumerate(spec.parts(x.ndim) if spec.axes else ()):
            joined = tuple(a for a in split if a in names)
            major = split[: len(split) - len(joined)]
            if joined and split[len(major) :] != joined:
                first = tuple(a for a in split if a not in names)
                errors.append(fail(f"{label(i)} has dim {dim} split by {split}; {joined} cannot be joined first",
                                   fix=f"make {joined} the minor axes: {(*first, *joined)}"))  # fmt: skip
            elif any(a in live for a in joined):
                position = [sizes[a] for a in major], [region.coords[a] for a in major]
                n: Size | None = None
                if shape is not None or isinstance(known[dim], tuple):
                    n = part_range(known[dim], *position)[1] if major else known[dim]
                gathers.append(Joined(tuple(a for a in joined if a in live), dim, n))
        varied = tuple([a for a in live if a not in spec.axes])
        out.append(Route(varied, tuple(gathers), spec.memory == "host"))
    raise_all(errors)
    return out


def placements(
    verb: str, params: Any, specs: Any, shapes: Any = None
) -> tuple[list[P | None], list[tuple[int, ...] | None]]:
    """Return the spec and the global shape of each tensor of `params`; a `Weight` computes them for its tensors.

    `specs` may be a prefix. Without `shapes` of the caller the shapes are `None`.
    """
    weights = tree.leaves(params, is_weight)
    flat = tree.broadcast(specs, params, name=f"{verb}: specs", leaf=is_spec, is_leaf=is_weight)
    known: list[Any] = [None] * len(weights) if shapes is None else tree.leaves(shapes)
    fix = "pass the tree that params were materialized from"
    if shapes is not None and not all(hasattr(s, "shape") for s in known):
        raise must_be(f"{verb}: shapes", "a tree of leaves with a .shape", shapes, fix)
    if len(known) != len(weights):
        raise fail(f"{verb}: shapes has another structure than params", f"{len(known)} leaves, not {len(weights)}",
                   fix=fix)  # fmt: skip
    parts: list[Part] = []
    for x, spec, like in zip(weights, flat, known, strict=True):
        shape = None if like is None else tuple(like.shape)
        parts += x.parts(spec, shape) if isinstance(x, Weight) else [(spec, shape)]
    return [spec for spec, _ in parts], [shape for _, shape in parts]
