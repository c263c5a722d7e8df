"""First half of a `shard_map` call: arguments, checked against their specs and sliced for the ranks.

The first call of a signature checks every leaf and keeps the outcome as a `CallPlan`. Later calls with the same
signature only compare the structure and the placements.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fshard import tree
from fshard._core.region import UnevenSize
from fshard._core.torch import has_tangent, is_wrapped, version_of
from fshard.errors import ShardingError, fail, join_limited, number_of, raise_all
from fshard.init import Deferred
from fshard.mesh import Mesh
from fshard.sharded import Sharded, array_dtype, array_part, local_parts, no_parts_errors
from fshard.spec import Box, P, Size, box_shape, is_spec, is_uneven, local_box, same_placement, spec_errors

from .plan import CallPlan


def call_signature(leaves: Sequence[Any]) -> list[Any]:
    """Return, for each leaf, the properties that a plan depends on."""
    return [x.placement if x.__class__ is Sharded else _leaf_signature(x) for x in leaves]


def _leaf_signature(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        tracked = leaf.requires_grad and torch.is_grad_enabled()
        has_values = not leaf.is_meta and leaf.layout is torch.strided
        transformed = is_wrapped(leaf) or has_tangent(leaf)
        return tuple(leaf.shape), leaf.dtype, tracked, transformed, has_values
    if isinstance(leaf, Deferred):
        return leaf.shape, leaf.dtype
    if (dtype := array_dtype(leaf)) is not None:
        return tuple(leaf.shape), dtype, False, False, True  # a tensor's
    if isinstance(leaf, functools.partial):
        return functools.partial, _leaf_signature(leaf.func)
    if isinstance(leaf, (FunctionType, MethodType)):
        return leaf.__code__ if isinstance(leaf, FunctionType) else leaf.__func__
    return (type(leaf), leaf) if isinstance(leaf, (bool, str)) else type(leaf)  # programs branch on bools and strings


def make_plan(
    name: str, f: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, donate: Sequence[int],
    args: tuple[Any, ...],
) -> CallPlan:  # fmt: skip
    """Check arguments against the specs. Raises ShardingError listing every leaf that does not fit."""
    names = argument_names(name, f, args)
    passed, treedef = tree.flatten(args)
    leaves = [_described(x) for x in passed]
    leaf_specs = tree.broadcast(in_specs, args, name=f"{name}: in_specs", leaf=lambda s: s is None or is_spec(s))
    errors: list[ShardingError] = []
    specs = []
    for (path, _), leaf, spec in zip(tree.leaves_with_path(args), leaves, leaf_specs, strict=True):
        spec = spec if spec is not None else leaf.spec if isinstance(leaf, Sharded) else P()
        specs.append(spec)
        errors += _argument_errors(f"{name}: {tree.show('args', path)}", leaf, spec, mesh)
    raise_all(errors)
    to_slice = (Tensor, Deferred, Sharded) if mesh.kind == "abstract" else (Tensor, Deferred)
    slices: list[list[tuple[int, Box | None]]] = [
        [(i, None if isinstance(x, Sharded) else local_box(tuple(x.shape), s, mesh.axes, coords))
         for i, (x, s) in enumerate(zip(leaves, specs, strict=True)) if isinstance(x, to_slice)]
        for coords in map(mesh.coords, mesh.ranks)
    ]  # fmt: skip
    tensors = [i for i, x in enumerate(leaves) if isinstance(x, (Tensor, Sharded, Deferred))]
    uneven: dict[str, UnevenSize] = {}
    in_parts: dict[tuple[str, ...], set[Size]] = {}
    for i in tensors:
        dims = zip(specs[i].sizes(leaves[i].shape, mesh.axes), specs[i].parts(leaves[i].ndim), strict=True)
        for dim, (n, axes) in enumerate(dims):
            if axes:
                in_parts.setdefault(tuple(a for a in axes if mesh.axes[a] > 1), set()).add(n)
                for a in axes if is_uneven(n, math.prod(mesh.axes[a] for a in axes)) else ():
                    uneven.setdefault(a, UnevenSize(f"dim {dim} of {names[i]}", n, axes))
    donated = [i for i in _donated_positions(name, donate, args) if isinstance(leaves[i], (Sharded, Deferred))]
    kept = [i for i in tensors if i not in set(donated)]
    uneven_leaves = {i for i in tensors if any(a in uneven for a in specs[i].axes)}
    noted = sorted(uneven_leaves | set(donated if mesh.size > 1 else ()))
    ties = {id(leaves[i]) for i in donated}
    placed = {i for i in kept if isinstance(leaves[i], (Sharded, Deferred)) and id(leaves[i]) not in ties}
    return CallPlan(name, mesh, out_specs, treedef, call_signature(passed), specs, names, slices, uneven, in_parts,
                    [(i, tuple(leaves[i].shape)) for i in noted], donated, kept, placed)  # fmt: skip


def _described(x: Any) -> Any:
    """Return a tensor of the shape and dtype of a numpy array, without its memory; anything else unchanged."""
    dtype = array_dtype(x)
    return x if dtype is None else torch.empty((), dtype=dtype).expand(x.shape)


def _argument_errors(label: str, leaf: Any, spec: P, mesh: Mesh) -> list[ShardingError]:
    if not isinstance(leaf, (Sharded, Tensor, Deferred)):
        return no_parts_errors(label, leaf, spec)
    return spec_errors(label, tuple(leaf.shape), spec, mesh.axes) or _placement_errors(label, leaf, spec, mesh)


def _placement_errors(label: str, leaf: Sharded | Tensor | Deferred, spec: P, mesh: Mesh) -> list[ShardingError]:
    if isinstance(leaf, Deferred):
        fix = "fs.materialize it, or fs.check(f, ...), which needs no values"
        return [] if mesh.kind == "abstract" else [fail(f"{label}: is only described", fix=fix, leaf=leaf)]
    if isinstance(leaf, Tensor):
        if leaf.requires_grad and torch.is_grad_enabled():
            return [fail(f"{label}: requires grad, and no gradient flows out of shard_map",
                         fix="differentiate inside, as fs.shard_map(fs.value_and_grad(loss), ...) does; x.detach() if "
                             "no gradient is wanted")]  # fmt: skip
        if leaf.is_meta and mesh.kind != "abstract":
            return [fail(f"{label}: is on the meta device, and has no values", fix="fs.check(f, ...) needs none")]
        if leaf.layout != torch.strided:
            return [fail(f"{label}: is not strided", fix="x.to_dense()", layout=leaf.layout)]
        if is_wrapped(leaf) or has_tangent(leaf):
            kind = "a torch.func transform" if is_wrapped(leaf) else "forward-mode differentiation"
            return [fail(f"{label}: is inside {kind}, which cannot see into shard_map",
                         fix="transform inside")]  # fmt: skip
        return []
    if leaf.mesh != mesh:
        return [fail(f"{label}: is on another mesh", fix="fs.reshard(x, specs, mesh), or f.on(mesh)",
                     leaf=leaf.mesh, function=mesh)]  # fmt: skip
    if not same_placement(leaf.spec, spec, leaf.ndim):
        return [fail(f"{label}: is placed as {leaf.spec}, in_specs says {spec}", fix=f"fs.reshard(x, {spec})",
                     leaf=leaf)]  # fmt: skip
    return []


def _donated_positions(name: str, donate: Sequence[int], args: tuple[Any, ...]) -> list[int]:
    """Return the positions of the leaves of donated arguments, among the leaves of all arguments."""
    starts = list(itertools.accumulate([len(tree.leaves(arg)) for arg in args], initial=0))
    positions: list[int] = []
    for i in donate:
        if i >= len(args):
            raise fail(f"{name}: donate={i}, and the call has {number_of(len(args), 'argument')}", fix="count from 0")
        positions += range(starts[i % len(args)], starts[i % len(args) + 1])
    return positions


def argument_names(name: str, f: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """Return each leaf as `f` would write it, by the names of its parameters: `params['up']`.

    Raises ShardingError for an argument that is missing or too many.
    """
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):  # of a builtin
        return [tree.show("args", path) for path, _ in tree.leaves_with_path(args)]
    try:
        bound = signature.bind(*args)
    except TypeError as e:
        raise fail(f"{name}: {e}", f"{number_of(len(args), 'argument')} {'was' if len(args) == 1 else 'were'} passed",
                   fix=f"{name}({', '.join(signature.parameters)})") from None  # fmt: skip
    return [
        tree.show(name, path) for name, value in bound.arguments.items() for path, _ in tree.leaves_with_path(value)
    ]


def prepare(plan: CallPlan, leaves: list[Any]) -> list[list[Any]]:
    """Donate leaves, and return the local leaves of each rank of this process, for `slice_inputs`.

    Raises ShardingError for a leaf that an earlier call was given, or that is donated twice.
    """
    first: dict[int, int] = {}
    for i in plan.donated:
        j = first.setdefault(id(leaves[i]), i)
        if j != i:
            raise fail(f"{plan.name}: {plan.names[i]} is donated twice", f"it is {plan.names[j]}, too",
                       fix="keep a tied leaf once in the tree; materialize with the same key makes a copy; "
                           "or do not donate it")  # fmt: skip
    parts = local_parts(leaves, len(plan.mesh.ranks))
    for i in plan.donated:
        if isinstance(leaves[i], Sharded):
            leaves[i].donate_to(plan.name)
    return parts


def slice_inputs(plan: CallPlan, local: list[Any], at: int) -> None:
    """Replace global tensors in `local`, in place, by the part of this process's rank number `at`.

    A part is a view; a copy where ranks are threads, which would share it, and where the call may write to it. On an
    abstract mesh every leaf becomes a fake tensor of its local shape.
    """
    mesh = plan.mesh
    for i, box in plan.slices[at]:
        copy = (mesh.kind == "simulated" and mesh.size > 1) or plan.written is None or i in plan.written
        x, device = local[i], mesh.host if plan.specs[i].memory == "host" else mesh.device
        if mesh.kind == "abstract":
            shape = x.shape if box is None else box_shape(box)
            local[i] = torch.empty(shape, dtype=array_dtype(x) or x.dtype, device=device)  # fake under the mesh's mode
            local[i].global_sizes = tuple(x.shape)  # for `dim_sizes.global_shape`
        elif box is not None and isinstance(x, np.ndarray):
            local[i] = array_part(x, box).to(device, copy=copy)
        elif box is not None:
            part = x.detach() if box_shape(box) == x.shape else x.detach()[box]
            local[i] = part.to(device, copy=copy)
    for i, shape in plan.global_shapes:
        local[i].placed = shape, plan.specs[i]  # for `dim_sizes`


def note_written(plan: CallPlan, kept: Sequence[Tensor], versions: Sequence[int], *, refuse: bool) -> None:
    """Note in the plan which of the `kept` arguments a call wrote to; `versions` are those before it.

    Raises ShardingError for placed leaves, if it is to `refuse` them. The checker has refused them at the line, but
    it does not run on one device.
    """
    refused: list[str] = []
    plan.written = set()
    for i, x, version in zip(plan.kept, kept, versions, strict=True):
        if version_of(x) != version:
            plan.written.add(i)
        if i in plan.placed and refuse:
            has_grad = x.requires_grad and x.grad is not None
            refused += [f"the .grad of {plan.names[i]}"] if has_grad else [plan.names[i]] if i in plan.written else []
            if has_grad:
                x.requires_grad_(False).grad = None
    if refused:
        raise fail(f"{plan.name}: writes in place to {join_limited(refused, 3)}, which the caller keeps",
                   "an argument is not written to unless it is donated",
                   fix="x = x + 1 in place of x += 1, or x = x.clone() before it; fs.value_and_grad in place of "
                       "backward(); or fs.shard_map(..., donate=the argument's position)")  # fmt: skip
