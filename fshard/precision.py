"""Precision: the dtypes of parameters, computation and results, and the loss scale that float16 needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import init as _init
from . import tree
from ._comm import checker, common_device
from ._torch_compat import foreach_norm, is_wrapped
from .collectives import psum, pvary
from .errors import fail
from .init import Deferred
from .optim.optimizers import Optimizer
from .sharded import Sharded, from_callback
from .spec import P, is_spec


@dataclass(frozen=True)
class Policy:
    """Which dtype parameters are kept in, the model computes in, and results come out in.

    >>> policy = Policy(compute=torch.bfloat16)
    >>> logits = policy.to_output(apply(policy.to_compute(params), policy.to_compute(x)))

    Only floating leaves are cast. Source: the idea and the three roles are those of DeepMind's jmp.
    """

    param: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    output: torch.dtype = torch.float32

    def to_param(self, x: Any) -> Any:
        return cast(x, self.param)

    def to_compute(self, x: Any) -> Any:
        return cast(x, self.compute)

    def to_output(self, x: Any) -> Any:
        return cast(x, self.output)


def cast(x: Any, dtype: torch.dtype) -> Any:
    """Every floating-point tensor of a tree in `dtype`; other leaves as they are. Transpose: cast back."""
    return tree.map(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, x)


@dataclass(frozen=True)
class LossScale:
    """A factor on the loss, found as training goes, that keeps small gradients from vanishing in float16.

    The loss is multiplied by it and gradients are divided by it. A step with a gradient that is not finite is left out,
    by all ranks or none, and lowers it by `backoff`; `interval` good steps in a row raise it by `growth`. It never goes
    below `floor`, nor out of float32. The state is a plain tree, `{"scale": [] float32, "good": [] int64}`.

        opt = scale.guard(optim.adamw(1e-3), specs)           # an Optimizer; its state holds that of the scale

    >>> scale = LossScale(initial=8.0)
    >>> opt = scale.guard(optim.sgd(0.5), P())
    >>> params = torch.tensor(3.0)
    >>> state = opt.init(params)
    >>> grads = grad(lambda p: scale.scale(p**2, state["scale"]))(params)
    >>> grads
    tensor(48.)
    >>> opt.update(grads, state, params)
    (tensor(0.), {'scale': {'scale': tensor(8.), 'good': tensor(1)}, 'opt': {'count': tensor(1)}})

    Raises ShardingError for numbers that could not work. bfloat16 has the range of float32, and needs none of this.
    Source: Micikevicius et al., 2018, "Mixed precision training"; the numbers are those of `torch.amp.GradScaler`.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    floor: float = torch.finfo(torch.float32).tiny

    def __post_init__(self) -> None:
        right = {
            "growth": 1 < self.growth < math.inf,
            "backoff": 0 < self.backoff < 1,
            "interval": self.interval >= 1,
            "floor": self.floor >= torch.finfo(torch.float32).tiny,
            "initial": self.floor <= self.initial <= torch.finfo(torch.float32).max,
        }
        wrong = [f"{k}={getattr(self, k)}" for k, good in right.items() if not good]
        if wrong:
            raise fail(f"LossScale: {', '.join(wrong)}",
                       fix="growth > 1, 0 < backoff < 1, interval >= 1, 0 < floor <= initial, in float32")  # fmt: skip

    def init(self, params: Any = None) -> Any:
        """The state at the start: of the kind, and on the device or mesh, that the leaves of `params` are."""
        return {"scale": _number(self.initial, params, torch.float32), "good": _number(0, params, torch.int64)}

    def specs(self) -> Any:
        return {"scale": P(), "good": P()}

    def scale(self, loss: Tensor, state: Any) -> Tensor:
        """The loss times the scale: what to differentiate. Half precision losses come out in float32."""
        return loss * _constant(state["scale"]).to(loss.device)

    def unscale(self, grads: Any, state: Any, specs: Any) -> tuple[Any, Tensor]:
        """The gradients of the loss itself, each in its dtype, and whether all of them are finite.

            tree of [*S@axes]{V axes} -> the same, [] bool {I}     cost: one number over all axes of `specs`

        `specs` are those of the parameters, or a prefix. With no axes in them, this works anywhere.
        """
        leaves, treedef = tree.flatten(grads)
        inverse = _constant(state["scale"]).double().reciprocal()
        there = {device: inverse.to(device) for device in {g.device for g in leaves}}
        new = [(_wide(g) * there[g.device]).to(g.dtype) for g in leaves]
        axes = [tuple(sorted(s.axes)) for s in tree.broadcast(specs, grads, name="specs", leaf=is_spec)]
        return tree.unflatten(treedef, new), _all_finite(new, axes)

    def adjust(self, state: Any, finite: Tensor) -> Any:
        """The state after a step: lower at once where it was not finite, higher after `interval` that were."""
        scale, finite = state["scale"], finite.to(state["scale"].device)
        good = torch.where(finite, state["good"] + 1, 0)
        full = good >= self.interval
        raised = (scale.double() * self.growth).float()  # one rounding, as torch does it
        raised = torch.where(full & raised.isfinite(), raised, scale)
        lowered = (scale.double() * self.backoff).clamp(min=self.floor).float()
        new = torch.where(finite, raised, lowered)
        return {"scale": new, "good": torch.where(full, 0, good)}

    def guard(self, optimizer: Optimizer, specs: Any) -> Optimizer:
        """An optimizer of scaled gradients, which leaves out the steps whose gradients are not finite.

        Its state is `{"scale": that of the scale, "opt": that of the optimizer}`. A step that is left out changes no
        parameter and nothing in the optimizer's state, its count included, also where these are donated.

        Eager programs look at the one number that says so: on CUDA the host waits for the backward pass, as it does in
        `torch.amp.GradScaler`; then a step costs no memory. Compiled ones, and those under torch.func, take the step on
        copies of parameters and state and choose between old and new, leaf by leaf.
        """

        def init(params: Any) -> Any:
            return {"scale": self.init(params), "opt": optimizer.init(params)}

        def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
            if not isinstance(state, dict) or sorted(state) != ["opt", "scale"]:
                raise fail(f"guarded {optimizer.name}: the state is not its state", fix="state = opt.init(params)")
            grads, finite = self.unscale(grads, state["scale"], specs)
            old = (params, state["opt"])
            if not _can_be_looked_at(finite):
                new = optimizer.update(grads, *reversed(tree.map(torch.clone, old)))
                new = tree.map(lambda n, o: torch.where(finite.to(o.device), n, o), new, old)
            elif finite.item():
                new = optimizer.update(grads, *reversed(old))
            else:
                new = old
                if checker() is not None:  # of the calls of this signature only this one is checked: take the step too
                    optimizer.update(grads, *reversed(tree.map(torch.clone, old)))
            return new[0], {"scale": self.adjust(state["scale"], finite), "opt": new[1]}

        return Optimizer(init, update, lambda param_specs: {"scale": self.specs(), "opt": optimizer.specs(param_specs)},
                         f"guarded {optimizer.name}")  # fmt: skip


def _number(value: float, params: Any, dtype: torch.dtype) -> Any:
    leaves = tree.leaves(params)
    if any(isinstance(x, Deferred) for x in leaves):
        return _init.full((), value, dtype=dtype)
    if leaves and isinstance(leaves[0], Sharded):
        return from_callback((), P(), leaves[0].mesh, lambda box: torch.tensor(value, dtype=dtype))
    return torch.tensor(value, dtype=dtype, device=leaves[0].device if leaves else None)


def _constant(x: Tensor) -> Tensor:
    """What is not differentiated, and the same on every rank: it goes with what varies and what does not."""
    x = x.detach()
    found = None if torch.compiler.is_dynamo_compiling() else checker()
    if found is not None:
        found.mark_constant(x)
    return x


def _wide(x: Tensor) -> Tensor:
    """Half precision in float32: the inverse of a scale may be too small for it."""
    return x if x.dtype.itemsize >= 4 else x.float()


def _all_finite(xs: list[Tensor], axes: list[tuple[str, ...]]) -> Tensor:
    """Whether all elements are, on all ranks of the axes over which the tensors vary: [] bool."""
    groups: dict[Any, list[Tensor]] = {}
    for x, names in zip(xs, axes, strict=True):
        if x.numel():
            real = torch.view_as_real(x) if x.is_complex() else x
            groups.setdefault((names, x.dtype, x.device), []).append(real)
    first = common_device(xs)
    every = tuple(sorted({a for names in axes for a in names}))
    found = [pvary(torch.ones((), dtype=torch.bool, device=first), every)]  # all there is where every part is empty
    for group in groups.values():
        if torch.compiler.is_dynamo_compiling() or any(map(is_wrapped, group)):
            each = [x.isfinite().all() for x in group]
        else:  # in one pass, and without a mask: by the largest absolute value of each
            each = [x.isfinite() for x in foreach_norm(group, math.inf)]
        found.append(torch.stack(each).all().to(first))
    good = torch.stack(found).all()
    return psum((~good).to(torch.int32), every) == 0 if every else good


def _can_be_looked_at(x: Tensor) -> bool:
    """Whether a tensor has one value, now."""
    if torch.compiler.is_dynamo_compiling() or x.is_meta:
        return False
    return type(x) is Tensor and not is_wrapped(x)


__all__ = ["LossScale", "Policy", "cast"]
