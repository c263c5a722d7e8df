"""Transforms of gradients before an optimizer: `chain`, and the clip by the global norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.collectives import pvary
from fshard.errors import a_type, checked, fail
from fshard.spec import P

from .formula import Optimizer, Transform, scalar_like
from .norm import axes_of, norm_of
from .schedules import not_negative


def chain(*steps: Transform | Optimizer) -> Optimizer:
    """Apply transforms of gradients one after another, then an optimizer. The state is a tuple of their states.

    >>> opt = chain(clip_by_global_norm(1.0, specs), adamw(3e-4))
    >>> params, state = opt.update(grads, state, params)
    >>> state[0]["norm"]                                    # of the gradients, before the clip
    tensor(2.7183)

    Raises ShardingError for an optimizer that sums or unscales the gradients itself: the transforms go inside of it.
    """
    kinds = [Transform] * (len(steps) - 1) + [Optimizer]
    wrong = [f"step {i} is {s!r}, not {a_type(kind)}" for i, (s, kind) in enumerate(zip(steps, kinds, strict=False))
             if not isinstance(s, kind)]  # fmt: skip
    if wrong or not steps:
        raise fail(f"chain: {wrong[0] if wrong else 'no steps'}",
                   fix="transforms, then one optimizer: chain(clip_by_global_norm(1.0, specs), adamw(3e-4))"
                   )  # fmt: skip
    parts: list[Any] = list(steps)
    *transforms, optimizer = parts
    refuse_outside_of_sum("chain", optimizer, bool(transforms))
    if transforms and optimizer.unscales:
        raise fail(f"chain: {optimizer.name} takes scaled gradients, and {steps[0].name} before it would read those",
                   fix="inside of it: scale.guard(chain(...), specs)")  # fmt: skip
    names = ", ".join(s.name for s in steps)
    # If the last transform only scales, the optimizer scales: that saves a second tree of gradients.
    scale = transforms.pop() if transforms and transforms[-1].factors and optimizer.scaled else None

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        if not isinstance(state, (tuple, list)) or len(state) != len(steps):
            raise fail(f"chain({names}): the state is not its state", fix="state = opt.init(params)")
        new = []
        for s, old in zip(transforms, state, strict=False):
            grads, changed = s.update(grads, old, params)
            new.append(changed)
        if scale is None:
            params, last = optimizer.update(grads, state[-1], params)
            return params, (*new, last)
        factors, changed = scale.factors(grads, state[-2], params)
        params, last = optimizer.scaled(grads, state[-1], params, factors)
        return params, (*new, changed, last)

    return Optimizer(lambda params: tuple(s.init(params) for s in steps), update,
                     lambda specs: tuple(s.specs(specs) for s in steps), f"chain({names})",
                     reads_leaf=optimizer.reads_leaf)  # fmt: skip


def refuse_outside_of_sum(verb: str, optimizer: Any, reads: bool = True) -> None:
    """Raise for an optimizer that sums gradients, around which `verb` would read the gradients of one rank."""
    if reads and optimizer.sums_gradients:
        raise fail(f"{verb}: {optimizer.name} sums the gradients over ranks, and before it each rank has its own",
                   fix=f"inside of it: zero({verb}(...), specs, split, axis=...), with the specs `split`")  # fmt: skip


@checked
def clip_by_global_norm(max_norm: float, specs: Any) -> Transform:
    """Scale the gradients by min(1, max_norm / (norm + 1e-6)), by the norm of all leaves, on any mesh.

        tree of [*S@axes]{V axes} -> the same     cost: one number over all axes of `specs`

    `specs` are the specs of the parameters, or a prefix. The state is `{"norm": 0-d float32}`, the norm before the
    clip, for logs. As in `torch.nn.utils.clip_grad_norm_`, a NaN makes all gradients NaN, and an infinity becomes NaN
    and makes all others 0.

    >>> clip = clip_by_global_norm(1.0, {"w": P("model")})
    >>> grads, _ = clip.update({"w": torch.ones(1)}, clip.init(None), None)      # model=4: the norm is 2
    >>> grads
    {'w': tensor([0.5000])}

    Raises ShardingError in a step for specs that do not name the axes over which the gradients vary.

    Source: Pascanu et al., 2013, "On the difficulty of training recurrent neural networks".
    """
    not_negative("clip_by_global_norm", max_norm=max_norm)
    tree.check_leaves("clip_by_global_norm", "specs", specs, P)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        scales, state = factors(grads, state, params)
        leaves, treedef = tree.flatten(grads)
        clipped = [(g * scale.to(g.device)).to(g.dtype) for g, scale in zip(leaves, scales, strict=True)]
        return tree.unflatten(treedef, clipped), state

    def factors(grads: Any, state: Any, params: Any) -> tuple[list[Tensor], Any]:
        leaves, axes = tree.leaves(grads), axes_of("clip_by_global_norm", "grads", grads, specs)
        norm = norm_of(leaves, axes)
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        scales = {a: pvary(scale, a) if a else scale for a in dict.fromkeys(axes)}
        return [scales[a] for a in axes], {"norm": norm.to(torch.float32)}

    return Transform(lambda params: {"norm": scalar_like(params, 0, torch.float32)}, update,
                     lambda param_specs: {"norm": P()}, "clip_by_global_norm", factors)  # fmt: skip
