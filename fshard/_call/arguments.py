"""What a `shard_map` call is given, checked against its specs and cut for the ranks: the first half of a call.

The first call of a signature is checked leaf by leaf, and what that settles is kept as a `Plan`. Later calls of the
same signature compare structure and placements with it, at a fraction of a microsecond a leaf.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard._comm import memory_device
from fshard._torch_compat import is_wrapped
from fshard.errors import ShardingError, fail, raise_all
from fshard.init import Deferred
from fshard.mesh import Mesh
from fshard.sharded import Sharded
from fshard.spec import Box, P, box_shape, is_even, is_spec, local_box, same_placement, spec_errors

from .results import Kinds, OutputPlan


@dataclass
class CallPlan:
    """What a signature of arguments settles, and below it what the calls so far have shown of it."""

    treedef: Any
    signature: list[Any]  # of each leaf
    specs: list[P]
    names: list[str]  # as the function would write them: `params['up']`
    cuts: list[list[tuple[int, Box | None]]]  # by rank: the leaves that are not there as a shard, and its part
    uneven: bool  # whether any leaf has parts of different sizes
    donated: list[int]  # leaves of arguments that the call may overwrite
    kept: list[int]  # all other leaves that are tensors inside
    checked: bool = False
    everyone: list[Kinds] | None = None  # what the ranks told each other of their results
    joint: OutputPlan | None = None  # how the last results were joined


def signature(leaves: Sequence[Any]) -> list[Any]:
    """What a plan depends on, leaf by leaf."""
    return [x.placement if x.__class__ is Sharded else _kind(x) for x in leaves]


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        tracked = leaf.requires_grad and torch.is_grad_enabled()
        return tuple(leaf.shape), leaf.dtype, tracked, is_wrapped(leaf)
    if isinstance(leaf, Deferred):
        return leaf.shape, leaf.dtype
    return (type(leaf), leaf) if isinstance(leaf, (bool, str)) else type(leaf)  # what programs branch on


def make_plan(
    name: str, f: Callable[..., Any], mesh: Mesh, in_specs: Any, donate: Sequence[int], args: tuple[Any, ...]
) -> CallPlan:
    """Check arguments against the specs. Raises ShardingError listing every leaf that does not fit."""
    leaves, treedef = tree.flatten(args)
    flat = _specs(name, in_specs, args, len(leaves))
    errors: list[ShardingError] = []
    specs = []
    for (path, leaf), spec in zip(tree.leaves_with_path(args), flat, strict=True):
        where = f"{name}: {tree.show('args', path)}"
        spec = spec if spec is not None else leaf.spec if isinstance(leaf, Sharded) else P()
        specs.append(spec)
        if isinstance(leaf, (Sharded, Tensor, Deferred)):
            wrong = spec_errors(where, tuple(leaf.shape), spec, mesh.axes)
            errors += wrong or _misplaced(where, leaf, spec, mesh)
    raise_all(errors)
    absent = (Tensor, Deferred, Sharded) if mesh.kind == "abstract" else (Tensor, Deferred)
    cuts: list[list[tuple[int, Box | None]]] = []
    for rank in mesh.ranks:
        coords = mesh.coords(rank)
        cuts.append([
            (i, None if isinstance(x, Sharded) else local_box(tuple(x.shape), s, mesh.axes, coords))
            for i, (x, s) in enumerate(zip(leaves, specs, strict=True)) if isinstance(x, absent)
        ])  # fmt: skip
    inside = [i for i, x in enumerate(leaves) if isinstance(x, (Tensor, Sharded, Deferred))]
    uneven = any(not is_even(tuple(leaves[i].shape), specs[i], mesh.axes) for i in inside)
    given = [i for i in _given(name, donate, args) if isinstance(leaves[i], (Sharded, Deferred))]
    kept = [i for i in inside if i not in set(given)]
    return CallPlan(treedef, signature(leaves), specs, _names(f, args), cuts, uneven, given, kept)


def _specs(name: str, in_specs: Any, args: tuple[Any, ...], n: int) -> list[P | None]:
    if in_specs is None:
        return [None] * n
    return tree.broadcast(in_specs, args, name=f"{name}: in_specs", leaf=lambda s: s is None or is_spec(s))


def _misplaced(where: str, leaf: Sharded | Tensor | Deferred, spec: P, mesh: Mesh) -> list[ShardingError]:
    if isinstance(leaf, Deferred):
        fix = "fs.materialize it, or fs.check(f, ...), which needs no values"
        return [] if mesh.kind == "abstract" else [fail(f"{where}: is only described", fix=fix, leaf=leaf)]
    if isinstance(leaf, Tensor):
        if leaf.requires_grad and torch.is_grad_enabled():
            return [fail(f"{where}: requires grad, and no gradient flows out of shard_map",
                         fix="differentiate inside, with fs.value_and_grad, or pass x.detach()")]  # fmt: skip
        if leaf.is_meta and mesh.kind != "abstract":
            return [fail(f"{where}: is on the meta device, and has no values", fix="fs.check(f, ...) needs none")]
        if leaf.layout != torch.strided:
            return [fail(f"{where}: is not strided", fix="x.to_dense()", layout=leaf.layout)]
        if is_wrapped(leaf):
            return [fail(f"{where}: is inside a torch.func transform, which cannot see into shard_map",
                         fix="transform inside")]  # fmt: skip
        return []
    if leaf.mesh != mesh:
        return [fail(f"{where}: is on another mesh", fix="fs.reshard(x, specs, mesh), or f.on(mesh)",
                     leaf=leaf.mesh, function=mesh)]  # fmt: skip
    if not same_placement(leaf.spec, spec, leaf.ndim):
        return [fail(f"{where}: is placed as {leaf.spec}, in_specs says {spec}", fix=f"fs.reshard(x, {spec})",
                     leaf=leaf)]  # fmt: skip
    return []


def _given(name: str, donate: Sequence[int], args: tuple[Any, ...]) -> list[int]:
    """The leaves of the donated arguments."""
    starts = [0]
    for arg in args:
        starts.append(starts[-1] + len(tree.leaves(arg)))
    found: list[int] = []
    for i in donate:
        if i >= len(args):
            raise fail(f"{name}: donate={i}, but there are {len(args)} arguments", fix="count from 0")
        found += range(starts[i % len(args)], starts[i % len(args) + 1])
    return found


def _names(f: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """Each leaf as `f` would write it: `params['up']`, by the names of its parameters."""
    try:
        bound = inspect.signature(f).bind(*args)
    except (TypeError, ValueError):  # no signature, or a call that will fail by itself
        return [tree.show("args", path) for path, _ in tree.leaves_with_path(args)]
    named = []
    for name, given in bound.arguments.items():
        named += [tree.show(name, path) for path, _ in tree.leaves_with_path(given)]
    return named


def donated(name: str, plan: CallPlan, args: tuple[Any, ...], leaves: Sequence[Any]) -> list[Sharded]:
    """The leaves to give away. Raises ShardingError for one that is there twice."""
    given = [x for i in plan.donated if (x := leaves[i]).__class__ is Sharded]
    if len(set(map(id, given))) < len(given):
        seen: set[int] = set()
        for i in plan.donated:
            if id(leaves[i]) in seen:
                path, _ = tree.leaves_with_path(args)[i]
                raise fail(f"{name}: {tree.show('args', path)} is donated twice",
                           fix="keep a tied leaf once in the tree, or do not donate it")  # fmt: skip
            seen.add(id(leaves[i]))
    return given


def cut(plan: CallPlan, local: list[Any], mesh: Mesh, at: int) -> None:
    """Put one rank's part in the place of what is no shard: a view, and where threads would share it a copy."""
    for i, box in plan.cuts[at]:
        x, there = local[i], memory_device(plan.specs[i], mesh.device)
        if mesh.kind == "abstract":
            shape = x.shape if box is None else box_shape(box)
            local[i] = torch.empty(shape, dtype=x.dtype, device=there)  # a fake one, under the mesh's mode
        elif box is not None:
            part = x.detach() if box_shape(box) == x.shape else x.detach()[box]
            local[i] = part.to(there, copy=mesh.kind == "simulated" and mesh.size > 1)


__all__ = ["CallPlan", "cut", "donated", "make_plan", "signature"]
