"""An optimizer from one formula: `from_formula`. An `Optimizer` is three pure functions, and its state a plain tree.

    state         = opt.init(params)                    of tensors, `Deferred` or `Sharded`, as `params` are
    params, state = opt.update(grads, state, params)    inside shard_map on local leaves, or on plain tensors
    state_specs   = opt.specs(param_specs)              moments have the specs of their parameters, or their prefix

`update` never changes its arguments, except leaves that were donated to shard_map: those are overwritten, compiled or
not, and take the memory of at most one leaf at a time. Every element is computed alike wherever it is stored,
so the mesh never changes the answer: bitwise, except for sums over ranks and under torch.compile. Moments have the
dtype of their parameter, as in torch.optim: keep parameters in float32 and compute in half precision, by a `Policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fshard import init as _init
from fshard import tree
from fshard._core.host_memory import to_spec_memory, wait_before_writing
from fshard._core.region import in_region
from fshard.collectives import all_gather, global_shape, pslice
from fshard.errors import checked, fail, must_be, no_attribute, raise_all
from fshard.grad import is_differentiated
from fshard.init import Deferred
from fshard.sharded import Sharded, from_callback
from fshard.spec import P, describe, is_spec

from .fused import GRADS, copy_back, donation_test, groups_on_device, has_fused_step, has_kernel, kernel_options, step
from .schedules import Schedule, not_negative

Mask = Any  # a tree of bools, a prefix of one, or a function from the parameters to either

# (parameter, gradient, *moments, lr=, count=, **numbers) -> (parameter, *moments)
Formula = Callable[..., Any]

Shape = Callable[[tuple[int, ...]], tuple[int, ...]]  # global shape of a parameter -> shape of a replicated moment


# Attributes of torch's optimizers, and the calls here.
_NAMES_ELSEWHERE = {
    "step": "params, state = opt.update(grads, state, params), in fs.shard_map",
    "zero_grad": "not needed: fs.value_and_grad returns new gradients",
    "state_dict": "the tree that opt.init and opt.update return: fs.checkpoint.save(path, state)",
    "load_state_dict": "fs.checkpoint.restore(path, opt.init(params))",
    "param_groups": "mask= for weight decay, fs.partition for other groups, a schedule as lr",
    "apply": "params, state = opt.update(grads, state, params)",
}


@dataclass(frozen=True, repr=False)
class _Step:
    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]
    specs: Callable[[Any], Any]
    name: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(f"an {type(self).__name__}", name, self, _NAMES_ELSEWHERE)


@checked
@dataclass(frozen=True, repr=False)
class Transform(_Step):
    """A change of gradients: `update(grads, state, params) -> (grads, state)`. Comes before the optimizer in a `chain`.

    A transform that multiplies each leaf by a number may have `factors` too, which returns those numbers: the optimizer
    then scales while it steps, without a second tree of gradients.

    >>> clip = clip_by_global_norm(1.0, {"w": P()})
    >>> clip.update({"w": torch.tensor([3.0, 4.0])}, clip.init(None), None)[0]
    {'w': tensor([0.6000, 0.8000])}
    """

    factors: Callable[[Any, Any, Any], tuple[list[Tensor], Any]] | None = None  # one factor per leaf, and the new state


@checked
@dataclass(frozen=True, repr=False)
class Optimizer(_Step):
    """A step of the parameters: `update(grads, state, params) -> (params, state)`.

    >>> opt = sgd(0.1)
    >>> params, state = opt.update({"w": torch.ones(2)}, opt.init({"w": torch.ones(2)}), {"w": torch.ones(2)})
    >>> params
    {'w': tensor([0.9000, 0.9000])}
    """

    scaled: Callable[[Any, Any, Any, list[Tensor]], tuple[Any, Any]] | None = None  # `update` by grads * factors
    elementwise: bool = False  # the step of an element reads nothing but its gradient, its moments and the count
    sums_gradients: bool = False  # over the ranks, as `zero` does: what reads their sum comes after that, inside of it
    unscales: bool = False  # takes scaled gradients, as `LossScale.guard` does: what reads the true ones is inside
    reads_leaf: bool = False  # the step of an element reads others of its leaf: it cannot be of some rows only

    def __post_init__(self) -> None:
        step = self.update

        def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            if params is None:
                raise fail(
                    f"{self.name}: update without params", fix="params, state = opt.update(grads, state, params)"
                )
            return step(grads, state, params)

        object.__setattr__(self, "update", update)


# --- one formula, one optimizer -----------------------------------------------------------------------------


@checked
def from_formula(
    name: str, moments: Sequence[str], formula: Callable[..., Any], *, lr: float | Schedule, specs: Any = None,
    mask: Mask = None, **numbers: float,
) -> Optimizer:  # fmt: skip
    """Make an optimizer of a formula, which computes the step of one leaf.

        formula(p, g, *moments, lr=, count=, **numbers) -> (p, *moments)

    p is the parameter and g its gradient; the moments have their shape, and begin with zeros. `lr` is a 0-d float64
    tensor; cast what is computed from it: `lr.to(p.dtype)`. `count` is the number of this step, from 1 on, a 0-d int64
    tensor. Use pure operations of torch: they are differentiated, mapped and compiled. Leaves in half precision are
    passed in float32, and rounded once. State: count, and a tree like the parameters for each moment.

    Args:
        name: of the optimizer, for errors.
        moments: their names in the state.
        formula: computes each element from the same element of the other tensors, unless it takes `spec`.
        lr: a number, or a schedule: a function of the count of steps taken.
        specs: of the parameters, or a prefix. Then the formula takes `spec` too, the spec of the leaf, and may use
            collectives over its axes to read other elements of the leaf.
        mask: the leaves that decay (all of them if None): a tree of bools, a prefix of one, or a function of the
            parameters. The formula gets `weight_decay=0` for the others.
        numbers: further arguments of the formula.

    >>> def signed(p, g, m, *, lr, count, momentum):
    ...     m = momentum * m + g
    ...     return p - lr.to(p.dtype) * m.sign(), m
    >>> opt, params = from_formula("signed", ["m"], signed, lr=0.5, momentum=0.9), {"w": torch.tensor([2.0, -3.0])}
    >>> opt.update({"w": torch.tensor([1.0, -1.0])}, opt.init(params), params)
    ({'w': tensor([ 1.5000, -2.5000])}, {'count': tensor(1), 'm': {'w': tensor([ 1., -1.])}})

    Raises ShardingError for a negative lr, the name of an optimizer that has a fused kernel, and a mask without a
    `weight_decay`; in a step for a formula that returns other tensors than the parameter and the moments.
    """
    not_negative(name, lr=lr)
    if has_kernel(name):
        raise fail(f"from_formula: {name!r} is the name of a fused kernel, which would run in the place of the formula",
                   fix="another name")  # fmt: skip
    if "count" in moments:
        raise fail("from_formula: the state has the count of steps at 'count'", fix="another name for the moment")
    if mask is not None and "weight_decay" not in numbers:
        raise fail(f"from_formula: {name} has a mask and no weight_decay, which the mask switches off for a leaf",
                   fix="weight_decay=, which the formula takes; or no mask")  # fmt: skip
    return make_optimizer(name, moments, formula, numbers, lr=lr, specs=specs, mask=mask)


def make_optimizer(
    name: str, moments: Sequence[str], formula: Formula, numbers: Mapping[str, float], *, lr: float | Schedule,
    specs: Any = None, mask: Mask = None, shapes: Mapping[str, Shape] | None = None,
) -> Optimizer:  # fmt: skip
    """Return the optimizer of `from_formula`, with the fused kernel of its name, if there is one for these numbers.

    The kernel works in place and fast. The formula is for leaves that a gradient or a vmap passes through, and for
    dtypes without a kernel. With `shapes`, which has all moments, these are the same on every rank, in float32 or
    better.
    """
    shapes = shapes or {}
    options = kernel_options(name, numbers)
    if not callable(mask):
        tree.check_leaves(name, "mask", mask, bool)
    if specs is not None:
        tree.check_leaves(name, "specs", specs, P)

    def init(params: Any) -> Any:
        leaves, treedef = tree.check_leaves(f"{name}.init", "params", params, (Tensor, Deferred, Sharded))
        state = {"count": scalar_like(params, 0, torch.int64)}
        for moment in moments:
            made = [_zeros_of_shape(x, spec, shapes[moment])
                    for x, spec in zip(leaves, _leaf_specs(name, specs, params), strict=True)
                    ] if shapes else map(_zeros, leaves)  # fmt: skip
            state[moment] = tree.unflatten(treedef, made)
        return state

    def state_specs(param_specs: Any) -> Any:
        tree.check_leaves(f"{name}.specs", "param_specs", param_specs, P)
        return {"count": P(), **dict.fromkeys(moments, tree.map(lambda _: P(), param_specs) if shapes else param_specs)}

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return scaled(grads, state, params, [])

    def scaled(grads: Any, state: Any, params: Any, factors: Sequence[Tensor]) -> tuple[Any, Any]:
        columns, treedef = _columns(name, moments, shapes, grads, state, params)
        decays = [True] * len(columns[0]) if mask is None else _decays(name, mask, params, treedef)
        places: list[dict[str, P]] = [{} for _ in decays]
        if specs is not None:
            places = [{"spec": spec} for spec in _leaf_specs(name, specs, params)]
        rate, count = lr(state["count"]) if callable(lr) else lr, state["count"] + 1
        is_donated = donation_test()
        wait_before_writing(columns[0])
        # Copy gradients that share storage with a donated leaf, which may be overwritten before they are read.
        columns[GRADS] = [g.clone() if is_donated(g) else g for g in columns[GRADS]]
        fused = has_fused_step(columns) if options is not None else [False] * len(decays)
        groups: dict[Any, list[int]] = {}
        for i, (p, g, *rest) in enumerate(zip(*columns, strict=True)):
            if fused[i]:
                groups.setdefault((p.device, p.dtype, decays[i]), []).append(i)
                continue
            g = (g.to(p.device) * factors[i].to(p.device)).to(g.dtype) if factors else g
            rate64 = torch.as_tensor(rate, dtype=torch.float64, device=p.device)
            wide = torch.float32 if p.dtype.itemsize < 4 else p.dtype  # half precision is rounded once
            row = [x.to(p.device).to(wide) for x in (p, g, *rest)]
            new = formula(*row, lr=rate64, count=count.to(p.device), **_numbers(numbers, decays[i]), **places[i])
            _check_result(name, moments, [row[0], *row[2:]], new)
            for column, old, x in zip([columns[0], *columns[2:]], [p, *rest], new, strict=True):
                reuse = is_donated(old) and not is_differentiated(x)
                column[i] = old.copy_(x) if reuse else x.to(old.device, old.dtype)
        scheduled, fixed = (rate, 0.0) if isinstance(rate, Tensor) else (None, float(rate))
        for (device, _, decay), leaves in groups.items():
            for group, (ps, gs, *ms) in groups_on_device(columns, leaves, is_donated):
                scales = [factors[i].to(device) for i in group] if factors else []
                step(name, ps, gs, [x for column in ms for x in column], scales, scheduled, fixed, count,
                     kernel_options(name, _numbers(numbers, decay)) or [])  # fmt: skip
                for column, new_column in zip([columns[0], *columns[2:]], [ps, *ms], strict=True):
                    for i, x in zip(group, new_column, strict=True):
                        if x.device != column[i].device:
                            x = copy_back(x, column[i], is_donated)
                        column[i] = x
        new_params, _, *new_moments = [tree.unflatten(treedef, column) for column in columns]
        return new_params, {"count": count, **dict(zip(moments, new_moments, strict=True))}

    return Optimizer(init, update, state_specs, name, scaled, elementwise=specs is None, reads_leaf=specs is not None)


def _numbers(numbers: Mapping[str, float], decays: bool) -> Mapping[str, float]:
    """Return the numbers of a leaf: one that the mask leaves out does not decay."""
    return numbers if decays else {**numbers, "weight_decay": 0.0}


def _leaf_specs(name: str, specs: Any, params: Any) -> list[P]:
    flat: list[P] = tree.broadcast(specs, params, name=f"{name}: specs", leaf=is_spec)
    return flat


def _check_result(name: str, moments: Sequence[str], old: Sequence[Tensor], new: Any) -> None:
    """Raise unless a formula returned the parameter and the moments, in their shapes."""
    expected = f"(p, {', '.join(moments)})" if moments else "(p,)"
    if not isinstance(new, (tuple, list)) or len(new) != len(old):
        got = f"{len(new)} values" if isinstance(new, (tuple, list)) else f"a {type(new).__name__}"
        raise fail(f"{name}: the formula returned {got}", fix=f"a tuple of tensors {expected}")
    for label, x, y in zip(("p", *moments), old, new, strict=True):
        if not isinstance(y, Tensor) or y.shape != x.shape:
            got = describe(y) if isinstance(y, Tensor) else f"a {type(y).__name__}"
            raise fail(f"{name}: the formula returned {got} for {label}, which is {describe(x)}",
                       fix=f"tensors {expected} of the shapes that it was passed")  # fmt: skip


# --- full leaves, of formulas that take `spec` --------------------------------------------------------------


def join_parts(x: Tensor, spec: P, sizes: Sequence[int] | None = None) -> Tensor:
    """Gather the parts of a tensor from all ranks: [N@axes, ..] -> [N, ..]{I}. `sizes` are the full ones, if known."""
    for dim, over in enumerate(spec.parts(x.ndim)):
        size = spec.lengths_over(over) or (sizes[dim] if sizes is not None else None)
        x = all_gather(x, over or None, dim, size=size, to="invariant")
    return x


def take_part(x: Tensor, spec: P) -> Tensor:
    """Return this rank's part of a tensor: [N, ..]{I} -> [N@axes, ..]."""
    for dim, over in enumerate(spec.parts(x.ndim)):
        x = pslice(x, over or None, dim, lengths=spec.lengths_over(over))
    return x


# --- states and checks --------------------------------------------------------------------------------------


def _zeros(x: Any) -> Any:
    if isinstance(x, Deferred):
        return _init.zeros(x.shape, dtype=x.dtype)
    if isinstance(x, Sharded):
        made = [_zeros(s) for s in x.shards]
        return Sharded(
            x.shape, x.spec, x.mesh, [s if s.is_meta else to_spec_memory(s, x.spec, x.mesh.device) for s in made]
        )
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


def _zeros_of_shape(x: Any, spec: P, shape_of: Shape) -> Any:
    """Return zeros of the shape that a replicated moment of a leaf has."""
    shape = shape_of(global_shape(x, spec) if isinstance(x, Tensor) and in_region() else tuple(x.shape))
    return _full_like(x, shape, 0, torch.promote_types(x.dtype, torch.float32))


def scalar_like(params: Any, value: float, dtype: torch.dtype) -> Any:
    """Return a 0-d leaf of the same kind (tensor, Deferred, Sharded), device and mesh as the leaves of `params`."""
    leaves = tree.leaves(params)
    return _full_like(next((x for x in leaves if isinstance(x, Deferred)), next(iter(leaves), None)), (), value, dtype)


def _full_like(like: Any, shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Any:
    """Return a replicated leaf of one number, of the same kind, device and mesh as another leaf."""
    if isinstance(like, Deferred):
        return _init.full(shape, value, dtype=dtype)
    if isinstance(like, Sharded):
        return from_callback(shape, P(), like.mesh, lambda box: torch.full(shape, value, dtype=dtype)[box])
    return torch.full(shape, value, dtype=dtype, device=None if like is None else like.device)


def _decays(name: str, mask: Mask, params: Any, treedef: Any) -> list[bool]:
    """Return, for each leaf, whether it decays."""
    bools: Any = mask(params) if callable(mask) else mask
    flat, structure = tree.check_leaves(name, "mask", bools, bool)
    if structure == treedef:
        return flat
    return tree.broadcast(bools, params, name=f"{name}: mask", leaf=lambda x: isinstance(x, bool), kind="bool")


def _columns(
    name: str, moments: Sequence[str], shapes: Mapping[str, Shape], grads: Any, state: Any, params: Any
) -> tuple[list[list[Tensor]], Any]:
    """Return the leaves of parameters, gradients and moments, and the structure of the parameters.

    Raises ShardingError unless gradients and moments are trees like the parameters: the kernels check nothing.
    """
    keys = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
    if keys != sorted(["count", *moments]):
        raise fail(f"{name}: the state is not its state", fix="state = opt.init(params)",
                   got=keys, expected=sorted(["count", *moments]))  # fmt: skip
    if not isinstance(state["count"], Tensor):
        raise must_be(f"{name}: state['count']", "a Tensor", state["count"])
    trees = [(f"state[{k!r}]", state[k]) for k in moments]
    columns, treedef = like_params(name, params, [("grads", grads), *([] if shapes else trees)])
    for label, moment in trees if shapes else []:
        leaves, structure = tree.flatten(moment)
        if structure != treedef or not all(isinstance(x, Tensor) for x in leaves):
            raise fail(f"{name}: {label}: not a tree like params", fix="state = opt.init(params)")
        columns.append(leaves)
    return columns, treedef


def state_owners(optimizer: Optimizer, params: Any) -> tuple[list[int | None], Any]:
    """Return the number of the parameter to which each leaf of the state belongs, None for others, and its structure.

    Raises ShardingError for an optimizer that places its state by other specs: `zero`.
    """
    leaves, treedef = tree.flatten(params)
    marks = [P(f"leaf{i}") for i in range(len(leaves))]  # specs of the state name the parameter of each moment
    specs, structure = tree.flatten(optimizer.specs(tree.unflatten(treedef, marks)))
    numbers = {mark: i for i, mark in enumerate(marks)}
    return [numbers.get(spec) for spec in specs], structure


def like_params(name: str, params: Any, trees: Sequence[tuple[str, Any]]) -> tuple[list[list[Tensor]], Any]:
    """Return the leaves of parameters and of some named trees, and the structure of the parameters.

    Raises ShardingError unless these are trees like the parameters, of floating tensors of their shapes and dtypes.
    """
    leaves, treedef = tree.check_leaves(name, "params", params, Tensor)
    flat = [(label, other, *tree.check_leaves(name, label, other, Tensor)) for label, other in trees]
    equal = all(
        d == treedef and all(x.shape == p.shape and x.dtype == p.dtype for x, p in zip(xs, leaves, strict=True))
        for _, _, xs, d in flat
    )
    if not equal or not all(x.is_floating_point() for x in leaves):
        _refuse(name, params, treedef, flat)
    return [leaves, *[xs for _, _, xs, _ in flat]], treedef


def _refuse(name: str, params: Any, treedef: Any, flat: Sequence[tuple[str, Any, list[Tensor], Any]]) -> None:
    """Raise, with every leaf whose path, shape or dtype is not its parameter's."""
    expected = {tree.show("", path): p for path, p in tree.leaves_with_path(params)}
    errors = [fail(f"{name}: params{path}: {describe(p)} is not floating", fix="keep it in another tree")
              for path, p in expected.items() if not p.is_floating_point()]  # fmt: skip
    for label, other, xs, structure in flat:
        if structure != treedef:
            got = [tree.show("", path) for path, _ in tree.leaves_with_path(other)]
            errors.append(fail(f"{name}: {label}: not a tree like params",
                               f"missing  {', '.join(path for path in expected if path not in got) or 'nothing'}",
                               f"extra    {', '.join(path for path in got if path not in expected) or 'nothing'}",
                               fix="gradients and state of exactly these params, in the same containers"))  # fmt: skip
            continue
        for (path, p), x in zip(expected.items(), xs, strict=True):
            if (x.shape, x.dtype) != (p.shape, p.dtype):
                splits_more = label != "grads" and x.numel() < p.numel()
                fix = ("a state of parameters split alike; or fs.optim.zero, for a state that is split more"
                       if splits_more else "give it that shape and dtype")  # fmt: skip
                errors.append(fail(f"{name}: {label}{path}: is {describe(x)}, its parameter {describe(p)}", fix=fix))
    raise_all(errors)
