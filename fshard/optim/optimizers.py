"""Pure optimizers: an `Optimizer` is three pure functions, and its state a plain tree.

    state         = opt.init(params)                    of tensors, `Deferred` or `Sharded`, as `params` are
    params, state = opt.update(grads, state, params)    inside shard_map on local leaves, or on plain tensors
    state_specs   = opt.specs(param_specs)              moments have the specs of their parameters, or their prefix

`update` never changes its arguments, except leaves that were donated to shard_map: those are overwritten, compiled or
not, and take no memory but that of one leaf at a time, or less. Every element is computed alike wherever it is stored,
so the mesh never changes the answer: bitwise, but for the norm of a clip and under torch.compile. Moments have the
dtype of their parameter, as in torch.optim: keep parameters in float32 and compute in half precision, by a `Policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import init as _init
from fshard import tree
from fshard._core.host_memory import to_spec_memory, wait_before_writing
from fshard.collectives import pvary
from fshard.errors import checked, fail, must_be, raise_all
from fshard.grad import is_differentiated
from fshard.init import Deferred
from fshard.sharded import Sharded, from_callback
from fshard.spec import P, describe

from .fused import GRADS, copy_back, donation_test, groups_on_device, has_fused_step, step
from .norm import axes_of, norm_of
from .schedules import Schedule, not_negative

Mask = Any  # a tree of bools, a prefix of one, or a function from the parameters to either

# (parameter, gradient, moments...), lr, count, decay? -> (parameter, moments...)
Formula = Callable[[Sequence[Tensor], Tensor, Tensor, bool], tuple[Tensor, ...]]


@dataclass(frozen=True, repr=False)
class _Step:
    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]
    specs: Callable[[Any], Any]
    name: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"


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


# --- optimizers ---------------------------------------------------------------------------------------------


@checked
def sgd(
    lr: float | Schedule, *, momentum: float = 0.0, nesterov: bool = False, dampening: float = 0.0,
    weight_decay: float = 0.0, mask: Mask = None,
) -> Optimizer:  # fmt: skip
    """Gradient descent, as `torch.optim.SGD`, on its fused kernel. State: count, and m for the momentum.

    Args:
        lr: a number, or a schedule: a function of the count of steps taken.
        mask: the leaves that decay (all of them if None): a tree of bools, a prefix of one, or a function of the
            parameters. A function should read `ndim`, not sizes: it gets local shapes.
        dampening: has no fused kernel, so each leaf is computed anew and then copied to a donated one.

    >>> opt = sgd(0.5)
    >>> opt.update(torch.tensor(2.0), opt.init(torch.tensor(1.0)), torch.tensor(1.0))
    (tensor(0.), {'count': tensor(1)})

    Raises ShardingError for negative numbers, and nesterov without a momentum or with dampening.

    Source: Polyak, 1964; Sutskever et al., 2013, "On the importance of initialization and momentum".
    """
    not_negative("sgd", lr=lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and (momentum == 0 or dampening != 0):
        raise fail("sgd: nesterov needs a momentum and no dampening", fix="momentum=0.9, dampening=0.0",
                   momentum=momentum, dampening=dampening)  # fmt: skip

    def formula(row: Sequence[Tensor], lr: Tensor, count: Tensor, decay: bool) -> tuple[Tensor, ...]:
        p, g, *moments = row
        step = g + weight_decay * p if decay and weight_decay else g
        if not moments:
            return (p - lr.to(p.dtype) * step,)
        undamped = torch.where(count == 1, 1.0, 1.0 - dampening).to(p.dtype)  # all of the first gradient
        m = moments[0] * momentum + (step * undamped if dampening else step)
        return p - lr.to(p.dtype) * (step + momentum * m if nesterov else m), m

    options = None if dampening else (momentum, float(nesterov))
    return _optimizer("sgd", ("m",) if momentum else (), lr, weight_decay, mask, options, formula)


@checked
def adamw(
    lr: float | Schedule, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8,
    weight_decay: float = 0.01, mask: Mask = None,
) -> Optimizer:  # fmt: skip
    """Adam with decoupled weight decay, as `torch.optim.AdamW`, on its fused kernel. State: count, m and v.

    `lr` and `mask` are those of `sgd`. With weight_decay=0 this is Adam.

    >>> opt = adamw(warmup(cosine(3e-4, 10_000), 100), mask=lambda p: tree.map(lambda x: x.ndim > 1, p))
    >>> opt.specs({"w": P("model")})
    {'count': P(), 'm': {'w': P('model')}, 'v': {'w': P('model')}}

    Raises ShardingError for betas outside of [0, 1), and negative numbers.

    Source: Kingma & Ba, 2015, "Adam"; Loshchilov & Hutter, 2019, "Decoupled weight decay regularization".
    """
    not_negative("adamw", lr=lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    if max(b1, b2) >= 1:
        raise fail(f"adamw: b1={b1}, b2={b2}", fix="less than 1")

    def formula(row: Sequence[Tensor], lr: Tensor, count: Tensor, decay: bool) -> tuple[Tensor, ...]:
        p, g, m, v = row
        t = count.to(torch.float64)
        step, root = (lr / (1 - b1**t)).to(p.dtype), (1 - b2**t).sqrt().to(p.dtype)
        m = m + (g - m) * (1 - b1)
        v = v * b2 + g * g * (1 - b2)
        decayed = p * (1 - lr * weight_decay).to(p.dtype) if decay and weight_decay else p
        return decayed - step * m / (v.sqrt() / root + eps), m, v

    return _optimizer("adamw", ("m", "v"), lr, weight_decay, mask, (b1, b2, eps), formula)


def _optimizer(
    name: str, moments: tuple[str, ...], lr: float | Schedule, weight_decay: float, mask: Mask,
    options: tuple[float, ...] | None, formula: Formula,
) -> Optimizer:  # fmt: skip
    """Make an optimizer of a fused kernel, which takes `options` (None if there is no kernel), and a pure formula.

    The kernel works in place and fast. The formula is for leaves that a gradient or a vmap passes through, and for
    dtypes without a kernel.
    """
    if not callable(mask):
        tree.check_leaves(name, "mask", mask, bool)

    def init(params: Any) -> Any:
        tree.check_leaves(f"{name}.init", "params", params, (Tensor, Deferred, Sharded))
        return {"count": scalar_like(params, 0, torch.int64), **{k: tree.map(_zeros, params) for k in moments}}

    def specs(param_specs: Any) -> Any:
        tree.check_leaves(f"{name}.specs", "param_specs", param_specs, P)
        return {"count": P(), **dict.fromkeys(moments, param_specs)}

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return scaled(grads, state, params, [])

    def scaled(grads: Any, state: Any, params: Any, factors: Sequence[Tensor]) -> tuple[Any, Any]:
        columns, treedef = _columns(name, moments, grads, state, params)
        decays = _decays(name, mask, params, treedef)
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
            new = formula([x.to(p.device).to(wide) for x in (p, g, *rest)], rate64, count, decays[i])
            for column, old, x in zip([columns[0], *columns[2:]], [p, *rest], new, strict=True):
                reuse = is_donated(old) and not is_differentiated(x)
                column[i] = old.copy_(x) if reuse else x.to(old.device, p.dtype)
        scheduled, fixed = (rate, 0.0) if isinstance(rate, Tensor) else (None, float(rate))
        for (device, _, decay), leaves in groups.items():
            for group, (ps, gs, *ms) in groups_on_device(columns, leaves, is_donated):
                scales = [factors[i].to(device) for i in group] if factors else []
                step(name, ps, gs, [x for column in ms for x in column], scales, scheduled, fixed, count,
                     [*(options or ()), weight_decay * decay])  # fmt: skip
                for column, new_column in zip([columns[0], *columns[2:]], [ps, *ms], strict=True):
                    for i, x in zip(group, new_column, strict=True):
                        column[i] = copy_back(x, column[i], is_donated)
        new_params, _, *new_moments = [tree.unflatten(treedef, column) for column in columns]
        return new_params, {"count": count, **dict(zip(moments, new_moments, strict=True))}

    return Optimizer(init, update, specs, name, scaled, elementwise=True)


# --- composition --------------------------------------------------------------------------------------------


def chain(*steps: Transform | Optimizer) -> Optimizer:
    """Apply transforms of gradients one after another, then an optimizer. The state is a tuple of theirs.

    >>> opt = chain(clip_by_global_norm(1.0, specs), adamw(3e-4))
    >>> params, state = opt.update(grads, state, params)
    >>> state[0]["norm"]                                    # of the gradients, before the clip
    tensor(2.7183)

    Raises ShardingError for an optimizer that sums or unscales the gradients itself: the transforms go inside of it.
    """
    kinds = [Transform] * (len(steps) - 1) + [Optimizer]
    article = {Transform: "a Transform", Optimizer: "an Optimizer"}
    wrong = [f"step {i} is {s!r}, not {article[kinds[i]]}" for i, s in enumerate(steps) if not isinstance(s, kinds[i])]
    if wrong or not steps:
        raise fail(
            f"chain: {wrong[0] if wrong else 'no steps'}",
            fix="transforms, then one optimizer: chain(clip_by_global_norm(1.0, specs), adamw(3e-4))",
        )
    refuse_outside_of_sum("chain", steps[-1], len(steps) > 1)
    if len(steps) > 1 and steps[-1].unscales:  # type: ignore[union-attr]  # the last is an Optimizer
        raise fail(f"chain: {steps[-1].name} takes scaled gradients, and {steps[0].name} before it would read those",
                   fix="inside of it: scale.guard(chain(...), specs)")  # fmt: skip
    names = ", ".join(s.name for s in steps)
    # If the last transform only scales, the optimizer scales: that saves a second tree of gradients.
    factors_of = getattr(steps[-2], "factors", None) if len(steps) > 1 else None
    scaled = getattr(steps[-1], "scaled", None) if factors_of is not None else None

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        if not isinstance(state, (tuple, list)) or len(state) != len(steps):
            raise fail(f"chain({names}): the state is not its state", fix="state = opt.init(params)")
        value, new = grads, []
        for s, old in list(zip(steps, state, strict=True))[: None if scaled is None else -2]:
            value, changed = s.update(value, old, params)
            new.append(changed)
        if factors_of is not None and scaled is not None:
            factors, changed = factors_of(value, state[-2], params)
            value, last = scaled(value, state[-1], params, factors)
            new += [changed, last]
        return value, tuple(new)  # `value` is now the parameters

    return Optimizer(lambda params: tuple(s.init(params) for s in steps), update,
                     lambda specs: tuple(s.specs(specs) for s in steps), f"chain({names})")  # fmt: skip


def refuse_outside_of_sum(verb: str, optimizer: Any, reads: bool = True) -> None:
    """Raise for an optimizer that sums gradients, around which `verb` would read those of one rank."""
    if reads and optimizer.sums_gradients:
        raise fail(f"{verb}: {optimizer.name} sums the gradients over ranks, and before it each rank has its own",
                   fix=f"inside of it: zero({verb}(...), specs, split, axis=...), with the specs `split`")  # fmt: skip


@checked
def clip_by_global_norm(max_norm: float, specs: Any) -> Transform:
    """Scale the gradients by min(1, max_norm / (norm + 1e-6)), by the norm of the whole tree, on any mesh.

        tree of [*S@axes]{V axes} -> the same     cost: one number over all axes of `specs`

    `specs` are those of the parameters, or a prefix. The state is `{"norm": 0-d float32}`, the norm before the clip,
    for logs. The formula is that of `torch.nn.utils.clip_grad_norm_`: a NaN makes all gradients NaN, an infinity
    becomes NaN and makes all others 0.

    >>> clip = clip_by_global_norm(1.0, {"w": P("model")})
    >>> grads, _ = clip.update({"w": torch.ones(1)}, clip.init(None), None)      # model=4: the norm is 2
    >>> grads
    {'w': tensor([0.5000])}

    Source: Pascanu et al., 2013, "On the difficulty of training recurrent neural networks".
    """
    not_negative("clip_by_global_norm", max_norm=max_norm)
    tree.check_leaves("clip_by_global_norm", "specs", specs, P)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        scales, state = factors(grads, state, params)
        leaves, treedef = tree.flatten(grads)
        clipped = [(g * scale.to(g.device)).to(g.dtype) for g, scale in zip(leaves, scales, strict=True)]
        return tree.unflatten(treedef, clipped), state

    def factors(grads: Any, state: Any, params: Any) -> tuple[list[Tensor], Any]:
        leaves, treedef = tree.flatten(grads)
        axes = axes_of(specs, grads, treedef)
        norm = norm_of(leaves, axes)
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        scales = {a: pvary(scale, a) if a else scale for a in axes}
        return [scales[a] for a in axes], {"norm": norm.to(torch.float32)}

    return Transform(lambda params: {"norm": scalar_like(params, 0, torch.float32)}, update,
                     lambda param_specs: {"norm": P()}, "clip_by_global_norm", factors)  # fmt: skip


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


def scalar_like(params: Any, value: float, dtype: torch.dtype) -> Any:
    """0-d leaf of the same kind (tensor, Deferred, Sharded), device and mesh as the leaves of `params`."""
    leaves = tree.leaves(params)
    if any(isinstance(x, Deferred) for x in leaves):
        return _init.full((), value, dtype=dtype)
    if leaves and isinstance(leaves[0], Sharded):
        return from_callback((), P(), leaves[0].mesh, lambda box: torch.tensor(value, dtype=dtype))
    return torch.tensor(value, dtype=dtype, device=leaves[0].device if leaves else None)


def _decays(name: str, mask: Mask, params: Any, treedef: Any) -> list[bool]:
    """Return, for each leaf, whether it decays."""
    bools: Any = True if mask is None else mask(params) if callable(mask) else mask
    tree.check_leaves(name, "mask", bools, bool)
    flat, structure = tree.flatten(bools)
    if structure == treedef:
        return flat
    return tree.broadcast(bools, params, name=f"{name}: mask", leaf=lambda x: isinstance(x, bool), kind="bool")


def _columns(name: str, moments: Sequence[str], grads: Any, state: Any, params: Any) -> tuple[list[list[Tensor]], Any]:
    """Leaves of parameters, gradients and moments, and the structure of the parameters.

    Raises ShardingError unless gradients and moments are trees like the parameters: the kernels check nothing.
    """
    keys = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
    if keys != sorted(["count", *moments]):
        raise fail(f"{name}: the state is not its state", fix="state = opt.init(params)",
                   got=keys, expected=sorted(["count", *moments]))  # fmt: skip
    if not isinstance(state["count"], Tensor):
        raise must_be(f"{name}: state['count']", "a Tensor", state["count"])
    return like_params(name, params, [("grads", grads), *[(f"state[{k!r}]", state[k]) for k in moments]])


def state_owners(optimizer: Optimizer, params: Any) -> tuple[list[int | None], Any]:
    """Return the number of the parameter to which each leaf of the state belongs, None for others, and its structure.

    Raises ShardingError for an optimizer that places its state by specs of its own: `zero`.
    """
    leaves, treedef = tree.flatten(params)
    marks = [P(f"leaf{i}") for i in range(len(leaves))]  # specs of the state name the parameter of each moment
    specs, structure = tree.flatten(optimizer.specs(tree.unflatten(treedef, marks)))
    numbers = {mark: i for i, mark in enumerate(marks)}
    return [numbers.get(spec) for spec in specs], structure


def like_params(name: str, params: Any, trees: Sequence[tuple[str, Any]]) -> tuple[list[list[Tensor]], Any]:
    """Leaves of parameters and of some named trees, and the structure of the parameters.

    Raises ShardingError unless these are trees like the parameters, of floating tensors of their shapes and dtypes.
    """
    for label, other in [("params", params), *trees]:
        tree.check_leaves(name, label, other, Tensor)
    leaves, treedef = tree.flatten(params)
    kinds = [(x.shape, x.dtype) for x in leaves]
    flat = [(label, other, *tree.flatten(other)) for label, other in trees]
    equal = all(d == treedef and [(x.shape, x.dtype) for x in xs] == kinds for _, _, xs, d in flat)
    if not equal or not all(x.is_floating_point() for x in leaves):
        _refuse(name, params, treedef, flat)
    return [leaves, *[xs for _, _, xs, _ in flat]], treedef


def _refuse(name: str, params: Any, treedef: Any, flat: Sequence[tuple[str, Any, list[Tensor], Any]]) -> None:
    """Raise, with every leaf whose path, shape or dtype is not that of its parameter."""
    expected = {tree.show("", path): p for path, p in tree.leaves_with_path(params)}
    errors = [
        fail(f"{name}: params{path}: {describe(p)} is not floating", fix="keep it in another tree")
        for path, p in expected.items()
        if not p.is_floating_point()
    ]
    for label, other, _, structure in flat:
        got = {tree.show("", path): x for path, x in tree.leaves_with_path(other)}
        if structure != treedef:
            errors.append(
                fail(
                    f"{name}: {label}: not a tree like params",
                    f"missing  {', '.join(path for path in expected if path not in got) or 'nothing'}",
                    f"extra    {', '.join(path for path in got if path not in expected) or 'nothing'}",
                    fix="gradients and state of exactly these params, in the same containers",
                )
            )
            continue
        errors += [
            fail(
                f"{name}: {label}{path}: is {describe(x)}, its parameter {describe(expected[path])}",
                fix="give it that shape and dtype"
                if label == "grads" or x.numel() >= expected[path].numel()
                else "a state of parameters split alike; or fs.optim.zero, for a state that is split more",
            )
            for path, x in got.items()
            if (x.shape, x.dtype) != (expected[path].shape, expected[path].dtype)
        ]
    raise_all(errors)
