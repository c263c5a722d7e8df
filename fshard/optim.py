"""Pure optimizers: an `Optimizer` is three pure functions, and its state a plain tree.

    state         = opt.init(params)                    of tensors, `Deferred` or `Sharded`; it is of the same
    params, state = opt.update(grads, state, params)    inside shard_map on local leaves, or on plain tensors
    state_specs   = opt.specs(param_specs)              moments lie as their parameters do; prefixes stay so

`update` never changes its arguments, except where shard_map was told that it may: a leaf whose storage is
donated is overwritten, and costs no memory. (Not with dampening, nor for half precision on the CPU.)
Every element is computed alike wherever it lies, so the mesh never changes the answer: bitwise, but for the
norm of a clip and under torch.compile. Moments have the dtype of their parameter, as in torch.optim: keep
parameters in float32 and compute in half precision, by a `Policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import init as _init
from . import tree
from .collectives import pvary
from .comm import in_region, memory_of, region
from .deferred import Deferred
from .errors import fail, raise_all
from .norm import global_norm
from .schedules import Schedule, constant, cosine, linear, not_negative, warmup
from .sharded import Sharded, from_callback
from .spec import P, describe, is_spec

Mask = Any  # a tree of bools, a prefix of one, or a function from the parameters to either
Columns = list[list[Tensor]]  # parameters, gradients, moments...: a list each, in one order


@dataclass(frozen=True, repr=False)
class _Step:
    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]
    specs: Callable[[Any], Any]
    name: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"


class Transform(_Step):
    """A change of gradients: `update(grads, state, params) -> (grads, state)`. Stands first in a `chain`."""


class Optimizer(_Step):
    """A step of the parameters: `update(grads, state, params) -> (params, state)`."""


# --- optimizers ---------------------------------------------------------------------------------------------


def sgd(
    lr: float | Schedule, *, momentum: float = 0.0, nesterov: bool = False, dampening: float = 0.0,
    weight_decay: float = 0.0, mask: Mask = None,
) -> Optimizer:  # fmt: skip
    """Gradient descent, as `torch.optim.SGD`, on its fused kernel. State: count, and m for the momentum.

    Args:
        lr: a number, or a schedule: a function of the count of steps taken.
        mask: which leaves decay (all of them if None): a tree of bools, a prefix of one, or a function of the
            parameters. Let a function look at `ndim`, not at sizes: it sees local shapes.
        dampening: has no fused kernel; with it, donated leaves are not reused.

    >>> opt = sgd(0.5)
    >>> opt.update(torch.tensor(2.0), opt.init(torch.tensor(1.0)), torch.tensor(1.0))
    (tensor(0.), {'count': tensor(1)})

    Source: Polyak, 1964; Sutskever et al., 2013, "On the importance of initialization and momentum".
    """
    not_negative("sgd", lr=lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and (momentum == 0 or dampening != 0):
        raise fail("sgd: nesterov needs a momentum and no dampening", fix="momentum=0.9, dampening=0.0",
                   momentum=momentum, dampening=dampening)  # fmt: skip

    def fused(columns: Columns, lr: Any, count: Tensor, decay: bool) -> None:
        p, g, *m = columns
        torch._fused_sgd_(p, g, m[0] if m else [], lr=lr, momentum=momentum, dampening=0.0, nesterov=nesterov,
                          weight_decay=weight_decay * decay, maximize=False, is_first_step=False)  # fmt: skip

    def plain(row: Sequence[Tensor], lr: Tensor, count: Tensor, decay: bool) -> tuple[Tensor, ...]:
        p, g, *moments = row
        step = g + weight_decay * p if decay and weight_decay else g
        if not moments:
            return (p - lr.to(p.dtype) * step,)
        share = torch.where(count == 1, 1.0, 1.0 - dampening).to(p.dtype)  # the first gradient is not damped
        m = moments[0] * momentum + (step * share if dampening else step)
        return p - lr.to(p.dtype) * (step + momentum * m if nesterov else m), m

    return _optimizer("sgd", ("m",) if momentum else (), lr, mask, None if dampening else fused, plain)


def adamw(
    lr: float | Schedule, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8,
    weight_decay: float = 0.01, mask: Mask = None,
) -> Optimizer:  # fmt: skip
    """Adam with decoupled weight decay, as `torch.optim.AdamW`, on its fused kernel. State: count, m and v.

    `lr` and `mask` are those of `sgd`. With weight_decay=0 this is Adam.

    >>> opt = adamw(warmup(cosine(3e-4, 10_000), 100), mask=lambda p: tree.map(lambda x: x.ndim > 1, p))
    >>> opt.specs({"w": P("model")})
    {'count': P(), 'm': {'w': P('model')}, 'v': {'w': P('model')}}

    Source: Kingma & Ba, 2015, "Adam"; Loshchilov & Hutter, 2019, "Decoupled weight decay regularization".
    """
    not_negative("adamw", lr=lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    if max(b1, b2) >= 1:
        raise fail(f"adamw: b1={b1}, b2={b2}", fix="less than 1")

    def fused(columns: Columns, lr: Any, count: Tensor, decay: bool) -> None:
        p, g, m, v = columns
        steps = [count.to(p[0].device, torch.float32)] * len(p)
        torch._fused_adamw_(p, g, m, v, [], steps, lr=lr, beta1=b1, beta2=b2, eps=eps,
                            weight_decay=weight_decay * decay, amsgrad=False, maximize=False)  # fmt: skip

    def plain(row: Sequence[Tensor], lr: Tensor, count: Tensor, decay: bool) -> tuple[Tensor, ...]:
        p, g, m, v = row
        t = count.to(torch.float64)
        step, root = (lr / (1 - b1**t)).to(p.dtype), (1 - b2**t).sqrt().to(p.dtype)
        m = m + (g - m) * (1 - b1)
        v = v * b2 + g * g * (1 - b2)
        kept = p * (1 - lr * weight_decay).to(p.dtype) if decay and weight_decay else p
        return kept - step * m / (v.sqrt() / root + eps), m, v

    return _optimizer("adamw", ("m", "v"), lr, mask, fused, plain)


def _optimizer(
    name: str, moments: tuple[str, ...], lr: float | Schedule, mask: Mask,
    fused: Callable[[Columns, Any, Tensor, bool], None] | None,
    plain: Callable[[Sequence[Tensor], Tensor, Tensor, bool], tuple[Tensor, ...]],
) -> Optimizer:  # fmt: skip
    """The optimizer of a rule that is written twice: in place on lists of leaves, and pure on one leaf."""

    def init(params: Any) -> Any:
        return {"count": _scalar(params, torch.int64), **{k: tree.map(_zeros, params) for k in moments}}

    def specs(param_specs: Any) -> Any:
        return {"count": P(), **dict.fromkeys(moments, param_specs)}

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        _check(name, moments, grads, state, params)
        leaves, treedef = tree.flatten(params)
        columns = [leaves, tree.leaves(grads), *[tree.leaves(state[k]) for k in moments]]
        decays = _decays(name, mask, params)
        rate, count = lr(state["count"]) if callable(lr) else lr, state["count"] + 1
        groups: dict[Any, list[int]] = {}
        for i, (p, decay) in enumerate(zip(leaves, decays, strict=True)):
            row = [column[i] for column in columns]
            if fused is not None and all(map(_has_kernel, row)):
                groups.setdefault((p.device, p.dtype, decay), []).append(i)
                continue
            rate64 = torch.as_tensor(rate, dtype=torch.float64, device=p.device)
            wide = torch.float32 if p.dtype.itemsize < 4 else p.dtype  # half precision is rounded once
            new = plain([x.to(wide) for x in row], rate64, count, decay)
            for column, x in zip([columns[0], *columns[2:]], new, strict=True):
                column[i] = x.to(p.dtype)
        for (device, _, decay), which in groups.items():
            group = _own([[column[i] for i in which] for column in columns])
            pieces, ends = _full_registers(group) if device.type == "cpu" else (group, [])
            if pieces[0]:
                assert fused is not None
                fused(pieces, _for_kernel(rate, device), count, decay)
            for end, padded in ends:
                end.copy_(padded[: len(end)])
            for column, done in zip(columns, group, strict=True):
                for i, x in zip(which, done, strict=True):
                    column[i] = x
        new_params, _, *new_moments = [tree.unflatten(treedef, column) for column in columns]
        return new_params, {"count": count, **dict(zip(moments, new_moments, strict=True))}

    return Optimizer(init, update, specs, name)


def _has_kernel(x: Tensor) -> bool:
    """Whether torch has a fused step for this leaf, which neither a compiler nor torch.func can look into."""
    if torch.compiler.is_dynamo_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    # On the CPU, up to torch 2.13, the one of SGD skips most of a half precision leaf: pytorch issue 191763.
    return x.device.type == "cuda" or (x.device.type == "cpu" and x.dtype.itemsize >= 4)


def _for_kernel(rate: Any, device: torch.device) -> Any:
    """As numbers are, or as a tensor that CUDA's kernels (they read a float32) or the CPU's can read."""
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    return rate.detach().to(device, dtype) if isinstance(rate, Tensor) else rate


def _own(columns: Columns) -> Columns:
    """What a kernel may write: the leaves that are donated themselves, and copies of the others."""
    donated = region().donated if in_region() else frozenset()

    def own(x: Tensor, read_only: bool) -> Tensor:
        x = x.detach()
        ours = bool(donated) and memory_of(x) in donated
        # A gradient that lies in a donated leaf is copied: that leaf may be overwritten before this is read.
        copy = ours if read_only else not ours or not x.is_contiguous()
        return x.clone(memory_format=torch.contiguous_format) if copy else x.contiguous()

    return [[own(x, i == 1) for x in column] for i, column in enumerate(columns)]


def _full_registers(columns: Columns) -> tuple[Columns, list[tuple[Tensor, Tensor]]]:
    """Cut each leaf after its last full vector register, and pad the end to one: (pieces, [(end, padded)]).

    The CPU kernels round elements that fill no register in another way (multiply-add as one operation or as
    two), so that without this a new value would depend on its place in the shard: on the mesh.
    """
    size = 64 // columns[0][0].element_size()
    pieces: Columns = [[] for _ in columns]
    ends = []
    for i, column in enumerate(columns):
        for x in column:
            rest = x.numel() % size
            if rest == 0:
                pieces[i] += [x] * (x.numel() > 0)
                continue
            body, end = torch.split(x.view(-1), [x.numel() - rest, rest])
            padded = torch.nn.functional.pad(end, (0, size - rest))
            pieces[i] += [body, padded] if len(body) else [padded]
            ends += [(end, padded)] * (i != 1)  # gradients are only read
    return pieces, ends


# --- composition --------------------------------------------------------------------------------------------


def chain(*steps: Transform | Optimizer) -> Optimizer:
    """Transforms of gradients, one after the other, then an optimizer. The state: a tuple of theirs.

    >>> opt = chain(clip_by_global_norm(1.0, specs), adamw(3e-4))
    >>> params, state = opt.update(grads, state, params)
    >>> state[0]["norm"]                                    # of the gradients as they came
    tensor(2.7183)
    """
    kinds = [Transform] * (len(steps) - 1) + [Optimizer]
    wrong = [f"step {i}, {s!r}, is out of place" for i, s in enumerate(steps) if not isinstance(s, kinds[i])]
    if wrong or not steps:
        raise fail(f"chain: {wrong[0] if wrong else 'no steps'}",
                   fix="transforms, then one optimizer: chain(clip_by_global_norm(1.0, specs), adamw(3e-4))")
    names = ", ".join(s.name for s in steps)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        if not isinstance(state, (tuple, list)) or len(state) != len(steps):
            raise fail(f"chain({names}): the state is not its state", fix="state = opt.init(params)")
        value, new = grads, []
        for step, own in zip(steps, state, strict=True):
            value, own = step.update(value, own, params)
            new.append(own)
        return value, tuple(new)  # the last step gave the parameters

    return Optimizer(lambda params: tuple(s.init(params) for s in steps), update,
                     lambda specs: tuple(s.specs(specs) for s in steps), f"chain({names})")  # fmt: skip


def clip_by_global_norm(max_norm: float, specs: Any) -> Transform:
    """Scale the gradients by min(1, max_norm / (norm + 1e-6)), by the norm of the whole tree, on any mesh.

        tree of [*S@axes]{V axes} -> the same     cost: one number over all axes of `specs`

    `specs` are those of the parameters, or a prefix. The state is `{"norm": 0-d float32}`, the norm before
    the clip, for logs. The formula, and what becomes of NaN (NaN everywhere) and of infinity (NaN, and 0
    elsewhere), are those of `torch.nn.utils.clip_grad_norm_`.

    Source: Pascanu et al., 2013, "On the difficulty of training recurrent neural networks".
    """
    not_negative("clip_by_global_norm", max_norm=max_norm)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        norm = global_norm(grads, specs)
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        leaves, treedef = tree.flatten(grads)
        axes = [s.axes for s in tree.broadcast(specs, grads, name="specs", leaf=is_spec)]
        scales = {a: pvary(scale, a) if a else scale for a in axes}
        clipped = [(g * scales[a].to(g.device)).to(g.dtype) for g, a in zip(leaves, axes, strict=True)]
        return tree.unflatten(treedef, clipped), {"norm": norm.to(torch.float32)}

    return Transform(lambda params: {"norm": _scalar(params, torch.float32)}, update,
                     lambda param_specs: {"norm": P()}, "clip_by_global_norm")  # fmt: skip


# --- states and checks --------------------------------------------------------------------------------------


def _zeros(x: Any) -> Any:
    if isinstance(x, Deferred):
        return _init.zeros(x.shape, dtype=x.dtype)
    if isinstance(x, Sharded):
        return Sharded(x.shape, x.spec, x.mesh, [_zeros(s) for s in x.shards])
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


def _scalar(params: Any, dtype: torch.dtype) -> Any:
    """A 0-d zero, of the kind and on the device that the leaves are."""
    leaves = tree.leaves(params)
    if any(isinstance(x, Deferred) for x in leaves):
        return _init.zeros((), dtype=dtype)
    if leaves and isinstance(leaves[0], Sharded):
        return from_callback((), P(), leaves[0].mesh, lambda box: torch.zeros((), dtype=dtype))
    return torch.zeros((), dtype=dtype, device=leaves[0].device if leaves else None)


def _decays(name: str, mask: Mask, params: Any) -> list[bool]:
    given: Any = True if mask is None else mask(params) if callable(mask) else mask
    if not all(isinstance(leaf, bool) for leaf in tree.leaves(given)):
        wrong = [tree.show("mask", at) for at, x in tree.leaves_with_path(given) if not isinstance(x, bool)]
        raise fail(f"{name}: {', '.join(wrong)}: not a bool", fix="True where a leaf decays, False elsewhere")
    return tree.broadcast(given, params, name=f"{name}: mask", leaf=lambda x: isinstance(x, bool), kind="bool")


def _check(name: str, moments: Sequence[str], grads: Any, state: Any, params: Any) -> None:
    """Gradients and moments must be trees like the parameters: the kernels read what they are given."""
    keys = sorted(state) if isinstance(state, dict) else type(state).__name__
    if keys != sorted(["count", *moments]):
        raise fail(f"{name}: the state is not its state", fix="state = opt.init(params)",
                   got=keys, expected=sorted(["count", *moments]))  # fmt: skip
    leaves, treedef = tree.flatten(params)
    kinds = [(x.shape, x.dtype) for x in leaves]
    trees = [("grads", grads), *[(f"state[{k!r}]", state[k]) for k in moments]]
    flat = [(what, other, *tree.flatten(other)) for what, other in trees]
    alike = all(d == treedef and [(x.shape, x.dtype) for x in xs] == kinds for _, _, xs, d in flat)
    if alike and all(x.is_floating_point() for x in leaves):
        return
    want = {tree.show("", path): p for path, p in tree.leaves_with_path(params)}
    errors = [fail(f"{name}: params{at}: {describe(p.dtype, p.shape)} is not floating", fix="keep it in another tree")
              for at, p in want.items() if not p.is_floating_point()]  # fmt: skip
    for what, other, _, structure in flat:
        have = {tree.show("", path): x for path, x in tree.leaves_with_path(other)}
        if structure != treedef:
            errors.append(fail(f"{name}: {what}: not a tree like params",
                               f"missing  {', '.join(at for at in want if at not in have) or 'nothing'}",
                               f"extra    {', '.join(at for at in have if at not in want) or 'nothing'}",
                               fix="gradients and state of exactly these params, in the same containers"))
            continue
        errors += [fail(f"{name}: {what}{at}: is {describe(x.dtype, x.shape)}, its parameter "
                        f"{describe(want[at].dtype, want[at].shape)}", fix="give it that shape and dtype")
                   for at, x in have.items() if (x.shape, x.dtype) != (want[at].shape, want[at].dtype)]
    raise_all(errors)


__all__ = ["Optimizer", "Schedule", "Transform", "adamw", "chain", "clip_by_global_norm", "constant",
           "cosine", "global_norm", "linear", "sgd", "warmup"]  # fmt: skip
