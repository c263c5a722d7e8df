"""ZeRO-1: a state of the optimizer that is split over an axis, for parameters that are not.

Source: Rajbhandari et al., 2020, "ZeRO: memory optimizations toward training trillion parameter models".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fshard import tree
from fshard._core.ops import GatherInvariant, Map, Scatter, Slice, Sum, apply_map, split_layout
from fshard._core.region import checker, in_region, known_axes, live_axes, region
from fshard.errors import ShardingError, checked, fail, raise_all
from fshard.grad import is_differentiated
from fshard.reshard import reshard
from fshard.sharded import Sharded
from fshard.spec import Axis, P, Size, is_spec, names_of

from .formula import Optimizer, like_params
from .fused import donation_test


@checked
def zero(
    optimizer: Optimizer, specs: Any, split: Any, *, axis: str | tuple[str, ...], summed: bool = False
) -> Optimizer:
    """Make an optimizer step a part of replicated parameters on each rank: ZeRO-1, with DDP's parameters.

        update: grads [D]{V axis}, state [D@axis]{V}, params [D]{I} -> params [D]{I}, state [D@axis]{V}
        cost: (n-1)/n bytes for the gradients and as much for the parameters, as DDP's sum of gradients

    A step sums the gradients over `axis`, each rank receiving its part; steps that part, as `optimizer` does with
    parameters that are placed by `split`; and gathers the new parameters. That is one reduce-scatter and one all-gather
    per dtype. The values, and the leaves and global shapes of the state, are the plain optimizer's on any mesh, so
    that either resumes from a checkpoint of the other. Donated parameters and states are overwritten.

        split = fs.fully_shard(specs, described, axis="data")
        opt = zero(optim.chain(optim.clip_by_global_norm(1.0, split), optim.adamw(3e-4)), specs, split, axis="data")
        state_specs = opt.specs(specs)

        def step(params, state, x):
            loss, grads = fs.value_and_grad(loss_fn)(fs.pvary(params, "data"), x)    # of this rank's examples
            return loss, *opt.update(grads, state, params)

    Args:
        optimizer: takes summed gradients, parameters and a state that are split by `split`. So transforms are chained
            inside, `LossScale.guard` is applied inside, and both take `split` as their specs.
        specs: of the parameters, or a prefix.
        split: the specs of the state, gradients and update: `specs` with axes of `axis` added to some leaves, as
            `fully_shard` adds them. The state of the other leaves is replicated, and their gradients are summed by one
            all-reduce per dtype. Where it names only some of `axis`, as "shard" of ("replica", "shard"), the parts are
            summed over the others.
        axis: the axes over which the gradients of a replicated leaf are not summed yet. Leaves that `specs` splits over
            one of them have been gathered by `unshard` or `scan`, which has summed their gradients.
        summed: the gradients are summed over `axis` in the loss, as by `unshard`, `scan` or `pvary` inside of it. Then
            a step takes its part without a transfer; together with that sum it is 3/2 of the bytes above.

    >>> zero(adamw(1e-3), P(), {"w": P("data"), "b": P()}, axis="data").specs(P())
    {'count': P(), 'm': {'w': P('data'), 'b': P()}, 'v': {'w': P('data'), 'b': P()}}

    Raises ShardingError for a `split` that is not `specs` with more axes, or adds none.
    """
    name = f"zero({optimizer.name})"
    tree.check_leaves("zero", "specs", specs, P)
    tree.check_leaves("zero", "split", split, P)
    _check(specs, split, names_of(axis))

    def init(params: Any) -> Any:
        leaves, treedef = tree.flatten(params)
        if leaves and all(isinstance(x, Sharded) for x in leaves):
            return optimizer.init(reshard(params, split))
        if not in_region() or not all(isinstance(x, Tensor) for x in leaves):  # described, or global values
            return optimizer.init(params)
        parts = _parts(f"{name}.init", specs, split, params, axis, summed)
        return optimizer.init(tree.unflatten(treedef, _shards(leaves, parts)))

    def state_specs(param_specs: Any) -> Any:
        tree.check_leaves(f"{name}.specs", "param_specs", param_specs, P)
        given = tree.broadcast(param_specs, split, name=f"{name}.specs: param_specs", leaf=is_spec)
        if given != tree.broadcast(specs, split, name="zero: specs", leaf=is_spec):
            raise fail(f"{name}.specs: param_specs are not the specs that it was made for",
                       fix="zero(optimizer, specs, split, axis=...).specs(specs)")  # fmt: skip
        return optimizer.specs(split)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        (full, flat_grads), treedef = like_params(name, params, [("grads", grads)])
        parts = _parts(name, specs, split, params, axis, summed)
        shards = _shards(full, parts)
        try:
            sums = _local_sums(flat_grads, parts)
        except ShardingError as e:
            raise e if checker() is None else _wrong_types(e, axis, summed) from None
        new, state = optimizer.update(tree.unflatten(treedef, sums), state, tree.unflatten(treedef, shards))
        return tree.unflatten(treedef, _joined(tree.leaves(new), parts, full)), state

    return Optimizer(init, update, state_specs, name, sums_gradients=not summed, unscales=optimizer.unscales)


def _check(specs: Any, split: Any, axis: tuple[str, ...]) -> None:
    """Raise, with every leaf whose split is not its spec with axes of `axis` added."""
    fix = "split = fs.fully_shard(specs, tree, axis=...)"
    errors, added = [], False
    each = tree.broadcast(specs, split, name="zero: specs", leaf=is_spec)
    for (path, split_spec), spec in zip(tree.leaves_with_path(split), each, strict=True):
        label, facts = f"zero: {tree.show('split', path)}", {"spec": spec, "split": split_spec}
        more = set(split_spec.axes) - set(spec.axes)
        added = added or bool(more)
        if not set(spec.axes) <= set(split_spec.axes) or not more <= set(axis):
            errors.append(fail(f"{label} is not its spec with axes of {axis} added", fix=fix, **facts))
        elif "host" in (spec.memory, split_spec.memory):
            errors.append(fail(f"{label}: parts are transferred, and so are on the device",
                               fix="only the state in host memory: fs.on_host(opt.specs(specs))", **facts))  # fmt: skip
    raise_all(errors)
    if not added:
        raise fail("zero: split adds no axis to specs, so that no state would be split", axis=axis, fix=fix)


def _wrong_types(error: ShardingError, axis: Axis, summed: bool) -> ShardingError:
    """Replace the fix in the checker's error of gradients that are summed twice, or never."""
    fix = (f"zero(..., summed=False): it sums these over {axis!r}" if summed else
           f"zero(..., summed=True), or let the parameters enter the loss by fs.pvary(params, {axis!r}) before "
           "value_and_grad, and not inside of it")  # fmt: skip
    return fail(str(error).partition("\n  fix: ")[0], fix=fix)


# --- the part of each leaf that a rank steps ---


@dataclass(frozen=True)
class _Part:
    """Part of one dim of a leaf that this rank has, over axes minor to the axes of its spec; over no axes, the dim.

    `place` is (dim, size before the split), and `unsummed` are the axes over which the gradient is still to be summed.
    Axes of one rank are left out.
    """

    axes: tuple[str, ...]
    place: tuple[int, Size]
    unsummed: tuple[str, ...]


def _parts(verb: str, specs: Any, split: Any, params: Any, axis: Axis, summed: bool) -> list[_Part]:
    """Return the part of each leaf of `params`, by its spec and the spec of its state."""
    current = region(verb)
    names = known_axes(verb, current, axis)
    out, errors = [], []
    for (path, x), spec, split_spec in zip(
        tree.leaves_with_path(params),
        tree.broadcast(specs, params, name=f"{verb}: specs", leaf=is_spec),
        tree.broadcast(split, params, name=f"{verb}: split", leaf=is_spec),
        strict=True,
    ):
        before, after = spec.parts(x.ndim), split_spec.parts(x.ndim)
        dims = [d for d, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
        other_lengths = any(spec.lengths.get(a) != split_spec.lengths.get(a) for a in spec.axes)
        if len(dims) > 1 or other_lengths or any(after[d][: len(before[d])] != before[d] for d in dims):
            errors.append(fail(f"{verb}: {tree.show('params', path)}: the state's part is not a part of the leaf's own",
                               "zero adds axes to one dim of a leaf, as its minor axes", spec=spec, split=split_spec,
                               fix="split = fs.fully_shard(specs, tree, axis=...)"))  # fmt: skip
            continue
        more = live_axes(current.comm, after[dims[0]][len(before[dims[0]]) :]) if dims else ()
        chosen = split_spec.sizes(x.shape, current.sizes)[dims[0]] if more and not before[dims[0]] else None
        place = split_layout(verb, more, [x], dims[0], chosen)[0] if more else (0, 0)
        out.append(_Part(more, place, () if summed or set(names) & set(spec.axes) else live_axes(current.comm, names)))
    raise_all(errors)
    return out


def _shards(xs: Sequence[Tensor], parts: Sequence[_Part]) -> list[Tensor]:
    """Return this rank's parts of leaves that are the same on every rank: views."""
    return _apply(Slice, xs, parts, [p.axes for p in parts])


def _local_sums(grads: Sequence[Tensor], parts: Sequence[_Part]) -> list[Tensor]:
    """Return this rank's parts of the gradients, summed over the axes that are left."""
    out = _apply(Slice, grads, parts, [() if p.unsummed else p.axes for p in parts])
    out = _apply(Scatter, out, parts, [p.axes if p.unsummed else () for p in parts])
    return _apply(Sum, out, parts, [tuple(a for a in p.unsummed if a not in p.axes) for p in parts])


def _joined(xs: Sequence[Tensor], parts: Sequence[_Part], old: Sequence[Tensor]) -> list[Tensor]:
    """Gather the leaves: into the old ones where these are donated."""
    is_donated = donation_test()
    reuse = [is_donated(p) and not is_differentiated(x) for x, p in zip(xs, old, strict=True)]
    # A check needs tensors of two types, a compiler functions without writes, and a gradient the old values.
    direct = region("zero").comm.direct and region("zero").comm.is_scheduled and checker() is None

    def gather(m: Any, xs: Sequence[Tensor], at: Sequence[int]) -> Any:
        if not direct or any(map(is_differentiated, xs)):
            return apply_map(m, xs)
        into = [old[i] if reuse[i] and old[i].is_contiguous() else old[i].new_empty(old[i].shape) for i in at]
        return m.start(xs, into)()

    out = _apply(GatherInvariant, xs, parts, [p.axes for p in parts], gather)
    return [p.copy_(x) if again and x is not p else x for x, p, again in zip(out, old, reuse, strict=True)]


def _apply(
    kind: Callable[..., Map], xs: Sequence[Tensor], parts: Sequence[_Part], axes: Sequence[tuple[str, ...]],
    run: Callable[[Map, Sequence[Tensor], list[int]], Sequence[Tensor]] = lambda m, xs, _: apply_map(m, xs),
) -> list[Tensor]:  # fmt: skip
    """Apply to each leaf the map of this kind over its `axes`, if any: one map for the leaves of equal axes and dtype.

    `run(map, leaves, their positions)` does it.
    """
    comm, out = region("zero").comm, list(xs)
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(xs):
        if axes[i]:
            groups.setdefault((axes[i], x.dtype), []).append(i)
    for (names, _), at in groups.items():
        layout = {} if kind is Sum else {"layout": tuple(parts[i].place for i in at)}
        for i, y in zip(at, run(kind(comm, names, **layout), [xs[i] for i in at], at), strict=True):
            out[i] = y
    return out
