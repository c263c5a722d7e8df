"""Precision: the dtypes of parameters, computation and results, and the loss scale that float16 needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard._core.host_memory import common_device
from fshard._core.region import checker
from fshard.collectives import psum, pvary
from fshard.errors import checked, fail, must_be
from fshard.random.keys import values_now
from fshard.spec import P

from .chain import refuse_outside_of_sum
from .formula import Optimizer, scalar_like
from .norm import axes_of


@checked
@dataclass(frozen=True)
class Policy:
    """Dtypes of the stored parameters, of the computation, of its results, and of sums of gradients over ranks.

    >>> policy = Policy(compute=torch.bfloat16)
    >>> logits = policy.to_output(apply(policy.to_compute(params), policy.to_compute(x)))
    >>> policy.options
    {'dtype': torch.bfloat16, 'reduce_dtype': torch.float32}

    Only floating leaves are cast. Raises ShardingError for dtypes of no floats.
    Source: DeepMind's jmp, for the first three roles; torch's `MixedPrecision`.
    """

    param: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    output: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name, dtype in vars(self).items():
            if not dtype.is_floating_point:
                raise must_be(f"Policy: {name}", "a floating-point dtype", dtype, "torch.bfloat16")

    @property
    def options(self) -> dict[str, torch.dtype]:
        """Return options of `scan(..., **options)`, `unshard`, `apply.unshard` and `Layout`: casts at the gather."""
        return {"dtype": self.compute, "reduce_dtype": self.reduce}

    def to_param(self, x: Any) -> Any:
        return cast(x, self.param)

    def to_compute(self, x: Any) -> Any:
        return cast(x, self.compute)

    def to_output(self, x: Any) -> Any:
        return cast(x, self.output)


@checked
def cast(x: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor of a tree to `dtype`; other leaves stay. Transpose: cast back.

    >>> cast({"w": torch.ones(2), "ids": torch.arange(2)}, torch.bfloat16)
    {'w': tensor([1., 1.], dtype=torch.bfloat16), 'ids': tensor([0, 1])}
    """
    return tree.map(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, x)


@checked
@dataclass(frozen=True)
class LossScale:
    """A factor on the loss, adjusted during training, that keeps small gradients from vanishing in float16.

    The loss is multiplied by the scale and gradients are divided by it. All ranks skip a step if a gradient anywhere is
    not finite, and `backoff` lowers the scale; after `interval` finite steps in a row `growth` raises it. The scale
    stays between `floor` and the largest float32. The state is a plain tree, `{"scale": [] float32, "good": [] int64}`.

        opt = scale.guard(optim.adamw(1e-3), specs)           # an Optimizer; its state has the scale's too

    >>> scale = LossScale(initial=8.0)
    >>> opt = scale.guard(optim.sgd(0.5), P())
    >>> params = torch.tensor(3.0)
    >>> state = opt.init(params)
    >>> grads = grad(lambda p: scale.scale(p**2, state["scale"]))(params)
    >>> grads
    tensor(48.)
    >>> opt.update(grads, state, params)
    (tensor(0.), {'scale': {'scale': tensor(8.), 'good': tensor(1)}, 'opt': {'count': tensor(1)}})

    Raises ShardingError for numbers out of range. bfloat16 has the range of float32 and needs no loss scale.
    Source: Micikevicius et al., 2018, "Mixed precision training"; the numbers of `torch.amp.GradScaler`.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    floor: float = torch.finfo(torch.float32).tiny

    def __post_init__(self) -> None:
        valid = {
            "growth": 1 < self.growth < math.inf,
            "backoff": 0 < self.backoff < 1,
            "interval": self.interval >= 1,
            "floor": self.floor >= torch.finfo(torch.float32).tiny,
            "initial": self.floor <= self.initial <= torch.finfo(torch.float32).max,
        }
        wrong = [f"{k}={getattr(self, k)}" for k, is_valid in valid.items() if not is_valid]
        if wrong:
            raise fail(f"LossScale: {', '.join(wrong)}",
                       fix="growth > 1, 0 < backoff < 1, interval >= 1, 0 < floor <= initial, in float32")  # fmt: skip

    def init(self, params: Any = None) -> Any:
        """Return the initial state, of the kind (tensor, Deferred, Sharded), device and mesh of `params`."""
        return {"scale": scalar_like(params, self.initial, torch.float32), "good": scalar_like(params, 0, torch.int64)}

    def specs(self) -> Any:
        return {"scale": P(), "good": P()}

    @checked
    def scale(self, loss: Tensor, state: Any) -> Tensor:
        """Multiply the loss by the scale, before differentiating it. Half precision losses become float32."""
        scale: Tensor = _checked_state("scale", state)["scale"]
        return loss * scale.detach().to(loss.device)

    @checked
    def unscale(self, grads: Any, state: Any, specs: Any) -> tuple[Any, Tensor]:
        """Return the gradients of the unscaled loss, each in its dtype, and whether all of them are finite.

            tree of [*S@axes]{V axes} -> the same, [] bool {I}     cost: one number over all axes of `specs`

        `specs` are the specs of the parameters, or a prefix. With no axes in them, this works outside `shard_map` too.
        """
        return self._unscaled("unscale", grads, state, specs)

    def _unscaled(self, verb: str, grads: Any, state: Any, specs: Any) -> tuple[Any, Tensor]:
        leaves, treedef = tree.check_leaves(verb, "grads", grads, Tensor)
        inverse = _checked_state(verb, state)["scale"].detach().double().reciprocal()
        inverses = {device: inverse.to(device) for device in {g.device for g in leaves}}
        # Half precision is widened: the inverse of the scale may be too small for it.
        wide = [g if g.dtype.itemsize >= 4 else g.float() for g in leaves]
        new = [(x * inverses[g.device]).to(g.dtype) for x, g in zip(wide, leaves, strict=True)]
        return tree.unflatten(treedef, new), _all_finite(new, axes_of(verb, "grads", grads, specs))

    @checked
    def adjust(self, state: Any, finite: Tensor) -> Any:
        """Return the state after a step: a lower scale if it was not finite, a higher one after `interval` finite."""
        scale = _checked_state("adjust", state, "good")["scale"]
        finite = finite.to(scale.device)
        good = torch.where(finite, state["good"] + 1, 0)
        full = good >= self.interval
        raised = (scale.double() * self.growth).float()  # one rounding, as torch does it
        raised = torch.where(full & raised.isfinite(), raised, scale)
        lowered = (scale.double() * self.backoff).clamp(min=self.floor).float()
        new = torch.where(finite, raised, lowered)
        return {"scale": new, "good": torch.where(full, 0, good)}

    @checked
    def guard(self, optimizer: Optimizer, specs: Any) -> Optimizer:
        """Make an optimizer of scaled gradients that skips the steps whose gradients are not finite.

        What reads the gradients is inside: `guard(chain(clip_by_global_norm(1.0, specs), adamw(1e-3)), specs)`. The
        state is `{"scale": state of the scale, "opt": state of the optimizer}`. A skipped step changes no parameter
        and nothing in the optimizer's state, its count included, also where these are donated.

        Eager programs read on the host whether to skip: on CUDA the host waits for the backward pass, as it does in
        `torch.amp.GradScaler`; then a step costs no memory. Compiled programs, and those under vmap, take the step on
        copies of parameters and state and choose between old and new, leaf by leaf.
        """
        tree.check_leaves("guard", "specs", specs, P)
        refuse_outside_of_sum("guard", optimizer)

        def init(params: Any) -> Any:
            return {"scale": self.init(params), "opt": optimizer.init(params)}

        def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
            if not isinstance(state, dict) or sorted(state) != ["opt", "scale"]:
                raise fail(f"guarded {optimizer.name}: the state is not its state", fix="state = opt.init(params)")
            grads, finite = self._unscaled("guard", grads, state["scale"], specs)
            old = (params, state["opt"])
            take = values_now(finite)
            if take is None or checker() is not None:  # only the first call is checked: check the step, taken or not
                new = optimizer.update(grads, *reversed(tree.map(torch.clone, old)))
                new = tree.map(lambda n, o: torch.where(finite.to(o.device), n, o), new, old)
            else:
                new = optimizer.update(grads, *reversed(old)) if take else old
            return new[0], {"scale": self.adjust(state["scale"], finite), "opt": new[1]}

        return Optimizer(init, update, lambda param_specs: {"scale": self.specs(), "opt": optimizer.specs(param_specs)},
                         f"guarded {optimizer.name}", unscales=True, reads_leaf=optimizer.reads_leaf)  # fmt: skip


def _checked_state(verb: str, state: Any, *names: str) -> Any:
    """Return the state of a loss scale. Raises ShardingError unless it is one, with 0-d tensors at these names."""
    if not isinstance(state, dict) or not {"scale", *names} <= state.keys():
        raise must_be(f"{verb}: state", "the state of the loss scale", state, "scale.init()")
    for name in ("scale", *names):
        if not isinstance(state[name], Tensor) or state[name].ndim:
            raise must_be(f"{verb}: state[{name!r}]", "a 0-d Tensor", state[name], "scale.init()")
    return state


def _all_finite(xs: list[Tensor], axes: list[tuple[str, ...]]) -> Tensor:
    """Return whether all elements are finite on all ranks of the axes over which the tensors vary: [] bool."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for x in xs:
        if x.numel():  # by the largest absolute value: one pass, and no mask in memory
            largest = torch.linalg.vector_norm(torch.view_as_real(x) if x.is_complex() else x, math.inf)
            by_device.setdefault(x.device, []).append(largest.isfinite())
    device = common_device(xs)
    all_axes = tuple(sorted({a for names in axes for a in names}))
    no_parts = pvary(torch.ones((), dtype=torch.bool, device=device), all_axes)  # of a rank whose parts are all empty
    good = torch.stack([no_parts, *[torch.stack(group).all().to(device) for group in by_device.values()]]).all()
    return psum((~good).to(torch.int32), all_axes) == 0 if all_axes else good
