"""Second half of a `shard_map` call: the ranks' results, compared and joined.

The first results of a call are checked leaf by leaf, and the outcome is kept as an `OutputPlan`. Later results with the
same structure, dtypes and local shapes are joined by that plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard._core.host_memory import memory_device, to_spec_memory
from fshard._core.protocol import ranks_over
from fshard._core.region import storage_key
from fshard._core.torch import FakeTensor
from fshard.errors import ShardingError, fail, raise_all
from fshard.mesh import Mesh
from fshard.sharded import Placement, arrays_as_tensors, joined, no_parts_errors
from fshard.spec import P, box_shape, describe, is_spec, local_box, part_lengths, short_dtype, spec_errors, total

from .plan import CallPlan, OutputPlan, RankResult, ResultTypes, leaf_types


def flatten_result(out: Any) -> RankResult:
    """Return the results of one rank, its numpy arrays as tensors."""
    found, treedef = tree.flatten(out)
    leaves = arrays_as_tensors(found)
    return RankResult(out if leaves is found else tree.unflatten(treedef, leaves), leaves, treedef)


def refuse_valueless(plan: CallPlan, result: RankResult) -> None:
    """Raise ShardingError for tensors without values (fake, or on meta) in the result of ranks that compute values."""
    if plan.mesh.kind != "abstract" and any(map(_is_valueless, result.leaves)):
        raise_all([fail(f"{plan.name}: {tree.show('result', path)} has a shape and no values: {describe(x)}",
                        "it was computed from a tensor without values (fake, or on meta), which the function captured",
                        fix="pass tensors as arguments")
                   for path, x in tree.leaves_with_path(result.out) if _is_valueless(x)])  # fmt: skip


def _is_valueless(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_meta or isinstance(x, FakeTensor))


def storage_pointers(xs: list[Tensor], mesh: Mesh) -> list[int]:
    """Return an integer for the storage of each tensor; 0 for an empty storage."""
    if mesh.kind == "abstract":
        return [storage_key(x) for x in xs]
    if not any(map(Tensor.storage_offset, xs)):  # the usual case, without the storage, a Python object that would stay
        pointers = list(map(Tensor.data_ptr, xs))
        if 0 not in pointers:
            return pointers
    return [x.untyped_storage().data_ptr() for x in xs]


def exchange_result_types(plan: CallPlan, result: RankResult, digest: str) -> None:
    """Let the processes of a mesh exchange and compare their result types, at the first call of a signature.

    Raises ShardingError for ranks that return different trees or dtypes, and for results that change shape later.
    """
    mesh = plan.mesh
    if mesh.kind != "process" or mesh.size == 1:
        return
    if plan.rank_types is None:
        plan.rank_types = mesh.gather_objects(result_types(result, digest))
        compare_result_types(plan.name, dict(enumerate(plan.rank_types)))
        return
    before = plan.rank_types[mesh.ranks[0]]
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else () for x in result.leaves]
    if shapes != [shape for _, shape in before.leaves]:
        now = result_types(result, digest)
        raise fail(f"{plan.name}: the results changed shape between calls with the same argument shapes",
                   f"before  {_format_types(before)}", f"now     {_format_types(now)}")  # fmt: skip


def result_types(result: RankResult, digest: str = "") -> ResultTypes:
    """Return the structure and types of one rank's results."""
    return ResultTypes(str(result.treedef), [_type_of(x) for x in result.leaves], digest)


def compare_result_types(name: str, by_rank: Mapping[int, ResultTypes]) -> None:
    """Raise ShardingError for a rank that returned another tree, dtype or Python value than the first of them."""
    first = min(by_rank)
    for rank, other in by_rank.items():
        if _without_sizes(other) != _without_sizes(by_rank[first]):
            raise fail(f"{name}: rank {rank} returned something else than rank {first}",
                       f"rank {first}  {_format_types(by_rank[first])}", f"rank {rank}  {_format_types(other)}",
                       fix="return the same tree, dtypes and Python values on every rank")  # fmt: skip


def _type_of(x: Any) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and local shape of a tensor; the text of a Python value, and ()."""
    return (short_dtype(x.dtype), tuple(x.shape)) if isinstance(x, Tensor) else (f"{type(x).__name__} {x!r}", ())


def _without_sizes(types: ResultTypes) -> Any:
    """Return the part that must be equal on every rank: all but the sizes of the dims."""
    return types.structure, [(text, len(shape)) for text, shape in types.leaves]


def _format_types(types: ResultTypes) -> str:
    leaves = ", ".join(text if " " in text else f"{text}{list(shape)}" for text, shape in types.leaves)
    return f"{leaves} in {types.structure}"


def broadcast_out_specs(plan: CallPlan, out: Any) -> list[P]:
    """Return the out spec of each leaf."""
    return tree.broadcast(plan.out_specs, out, name=f"{plan.name}: out_specs", leaf=is_spec)


def finish(plan: CallPlan, results: Sequence[RankResult], used: set[int]) -> Any:
    """Join the results of this process's ranks by the out specs, and plan the results of later calls.

    `used` has the storages of the arguments that were not donated. A result in one of them, or in the storage of
    another result, is copied, since a later call may overwrite either of the two.
    """
    output = plan.output
    if output is None or not output.fits(results):
        output = _plan_outputs(plan, results)
    elif len(results) > 1 and len(output.tensors) < len(output.placements):
        errors: list[ShardingError] = []
        for path, placement, parts in zip(output.treedef.paths(), output.placements, _by_leaf(results), strict=True):
            if placement is None:
                errors += _value_errors(f"{plan.name}: {tree.show('result', path)}", parts)
        raise_all(errors)
    columns = [_copy_shared(result.leaves, output, plan.mesh, used) for result in results]
    plan.output = output
    for x in itertools.chain(*columns) if plan.donated else ():
        if isinstance(x, Tensor) and hasattr(x, "placed"):  # a donated one: torch.save would keep its spec, too
            del x.placed
    return tree.unflatten(output.treedef, joined(output.placements, columns))


def _copy_shared(leaves: list[Any], plan: OutputPlan, mesh: Mesh, used: set[int]) -> list[Any]:
    """Return one rank's leaves, each tensor in a separate storage, and add these storages to `used`."""
    if mesh.kind == "abstract":
        return [torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x for x in leaves]
    leaves = list(leaves) if plan.plain else [x.detach() if isinstance(x, Tensor) else x for x in leaves]
    storages = storage_pointers([leaves[i] for i in plan.tensors], mesh)
    if len(new := set(storages)) == len(storages) and 0 not in new and used.isdisjoint(new):  # the usual case
        used |= new
    else:
        for i, storage in zip(plan.tensors, storages, strict=True):
            if storage in used:
                leaves[i] = leaves[i].clone()
            elif storage:
                used.add(storage)
    if mesh.device.type != "cpu":  # elsewhere a result may be in another memory than its spec names
        for i, p in enumerate(plan.placements):
            if p is not None and leaves[i].device != memory_device(p.spec, mesh.device):
                leaves[i] = to_spec_memory(leaves[i], p.spec, mesh.device)
    return leaves


def _plan_outputs(plan: CallPlan, results: Sequence[RankResult]) -> OutputPlan:
    """Check results leaf by leaf. Raises ShardingError listing every leaf that does not fit."""
    name, mesh, rank_types = plan.name, plan.mesh, plan.rank_types
    first = results[0]
    specs = broadcast_out_specs(plan, first.out)
    for rank, result in zip(mesh.ranks, results, strict=True):
        if result.treedef != first.treedef:
            raise fail(f"{name}: rank {rank} returned another tree than rank 0", rank_0=first.treedef,
                       other=result.treedef)  # fmt: skip
    for result in results:
        refuse_valueless(plan, result)
    errors: list[ShardingError] = []
    placements: list[Placement | None] = []
    known: dict[Any, Placement] = {}  # of the leaves before: many have the same shapes, dtype and spec
    named = tree.leaves_with_path(first.out)
    for i, ((path, _), spec, parts) in enumerate(zip(named, specs, _by_leaf(results), strict=True)):
        dtypes = [p.dtype if isinstance(p, Tensor) else None for p in parts]
        shapes: list[tuple[int, ...]] = []
        if None not in dtypes:
            shapes = [tuple(p.shape) for p in parts] if rank_types is None else [t.leaves[i][1] for t in rank_types]
        kind = (*shapes, *dtypes, spec)
        if kind in known:
            placements.append(known[kind])
            continue
        label = f"{name}: {tree.show('result', path)}"
        placement, wrong = _place_result(label, parts, shapes, dtypes, spec, mesh)
        errors += wrong
        placements.append(placement)
        if placement is not None:
            known[kind] = placement
    raise_all(errors)
    tensors = [i for i, p in enumerate(placements) if p is not None]
    plain = all(type(r.leaves[i]) is Tensor and not r.leaves[i].requires_grad for r in results for i in tensors)
    return OutputPlan(first.treedef, [leaf_types(r.leaves) for r in results], placements, tensors, plain)


def _place_result(
    label: str, parts: Sequence[Any], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[Any], spec: P, mesh: Mesh
) -> tuple[Placement | None, list[ShardingError]]:
    """Return the placement of a result, by its parts on the ranks; or errors, or neither if it is not a tensor."""
    leaf = parts[0]
    if len(set(dtypes)) > 1:
        texts = [str(dtype or type(p).__name__) for p, dtype in zip(parts, dtypes, strict=True)]
        return None, [fail(f"{label}: the ranks returned different types", f"{texts}")]
    if not isinstance(leaf, Tensor):
        return None, no_parts_errors(label, leaf, spec) or _value_errors(label, parts)
    if wrong := spec_errors(label, tuple(leaf.shape), spec, mesh.axes, local=True):
        return None, wrong
    shape, wrong = _global_shape(label, mesh, shapes, spec)
    return None if wrong else Placement(shape, leaf.dtype, spec, mesh), wrong


def _by_leaf(results: Sequence[RankResult]) -> list[list[Any]]:
    """Return, for each leaf, its parts on all ranks of this process."""
    return [list(parts) for parts in zip(*(result.leaves for result in results), strict=True)]


def _global_shape(
    label: str, mesh: Mesh, shapes: Sequence[tuple[int, ...]], spec: P
) -> tuple[tuple[int, ...], list[ShardingError]]:
    """Return the shape whose parts by `spec` have these shapes, rank by rank, or errors.

    On an abstract mesh all parts are taken to be as large as the first, unless the spec has their lengths.
    """
    ndim = len(shapes[0])
    if any(len(s) != ndim for s in shapes):
        return (), [fail(f"{label}: the ranks returned {sorted(set(map(len, shapes)))} dims")]
    if mesh.kind == "abstract":
        ranks = [math.prod(mesh.axes[a] for a in axes) for axes in spec.parts(ndim)]
        found = spec.sizes([n * k for n, k in zip(shapes[0], ranks, strict=True)], mesh.axes)
        box = local_box(list(map(total, found)), spec, mesh.axes, mesh.coords(mesh.ranks[0]))
        wrong = [] if box_shape(box) == shapes[0] else [
            fail(f"{label}: rank {mesh.ranks[0]} returned {list(shapes[0])}, its part is {list(box_shape(box))}",
                 spec=spec)]  # fmt: skip
        return tuple(map(total, found)), wrong
    sizes = [[shapes[rank][dim] for rank in ranks_over(axes, mesh.axes, mesh.coords(0))]
             for dim, axes in enumerate(spec.parts(ndim))]  # fmt: skip
    shape = list(map(sum, sizes))
    for dim, (axes, n) in enumerate(zip(spec.parts(ndim), spec.sizes(shape, mesh.axes), strict=True)):
        expected = part_lengths(n, [mesh.axes[a] for a in axes])
        if expected != sizes[dim]:
            fix = "return equal parts, or parts of ceil(n / ranks) with the short ones last"
            if len(axes) == 1:
                fix = f"{fix}, or name the lengths: P({axes[0]!r}, lengths={tuple(sizes[dim])})"
            return (), [fail(f"{label}: the parts do not make up dim {dim} split by {axes}",
                             f"the ranks hold {sizes[dim]}", f"a dim of {total(n)} splits into {expected}",
                             fix=fix)]  # fmt: skip
    for rank, returned in enumerate(shapes):
        part = box_shape(local_box(shape, spec, mesh.axes, mesh.coords(rank)))
        if returned != part:
            return (), [fail(f"{label}: rank {rank} returned {list(returned)}, its part of {shape} is {list(part)}",
                             spec=spec)]  # fmt: skip
    return tuple(shape), []


def _value_errors(label: str, parts: Sequence[Any]) -> list[ShardingError]:
    """Return the error of a result that is not a tensor and differs between ranks of this process."""
    try:
        equal = all(bool(p == parts[0]) or (p != p and parts[0] != parts[0]) for p in parts)
    except (TypeError, ValueError, RuntimeError):
        equal = all(p is parts[0] for p in parts)
    if equal:
        return []
    shown = f"{parts[:4]}"
    if len(shown) > 200:  # an object that is not a pytree, such as the output of a model
        shown = f"a {type(parts[0]).__name__} on each"
    return [fail(f"{label}: is not a tensor and differs between ranks", shown,
                 fix="return a tensor with a spec, or a pytree of them")]  # fmt: skip
