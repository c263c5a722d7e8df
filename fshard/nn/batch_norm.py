"""Batch normalization as a pure function: the running statistics are a state tree in and out.

Legend: B batch, C channels; [B@data] is a dim split over an axis; {V} varies over it, {I} does not.
Source: Ioffe & Szegedy, 2015; torch.nn.functional.batch_norm for the meaning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fshard._core.region import axes_of_own_values, live_axis
from fshard._core.torch import FakeTensor, in_transform, unwrapped
from fshard.collectives import psum, pvary
from fshard.errors import checked, fail, must_be
from fshard.spec import Axis, describe, names_of

_STATE = ("mean", "var", "count")


@checked
def batch_norm(
    x: Tensor, state: Any, w: Tensor | None = None, b: Tensor | None = None, *, train: bool,
    momentum: float | None = 0.1, eps: float = 1e-5, over: Axis = None,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Compute (x - mean) / sqrt(var + eps) * w + b for each channel: x [B, C, ...] -> ([B, C, ...], the new state).

        with `over`: x [B@over, C, ...]{V}, w and b [C]{V}, state {I} -> x's type, state {I}
        cost: two psums of C numbers forward, two backward
        channels split: x [B, C@axis, ...], w, b, and the state's mean and var [C@axis]: nothing else changes

    In training mean and var are computed from the batch: the examples on all ranks of `over`, each counted once even if
    ranks have different numbers of them or none. Without training they are read from the state, which is returned.

    Args:
        state: {"mean": [C], "var": [C], "count": [] int64}: the averages of the means and of the unbiased variances of
            `count` batches. It has no gradient. None: no averages, and none are returned.
        momentum: weight of a new batch in the averages; None: they are of all batches alike.
        over: axes the batch is split over, and also those that split height or width.

    float32 or better inside; y has the dtype of x, the state keeps its dtype. Raises ShardingError in training for x
    that varies over an axis that is neither in `over` nor an axis of the state: the statistics of one rank's examples
    change with the mesh; and for a single value of each channel, which has no variance.

    >>> y, state = nn.batch_norm(x, state, p["w"], p["b"], train=True, over="data")     # x [B@data, C, H, W]
    """
    _check("batch_norm", x, state, w, b)
    if (momentum is not None and not 0 <= momentum <= 1) or not 0 < eps < math.inf:
        raise fail(f"batch_norm: momentum={momentum}, eps={eps}", fix="0 <= momentum <= 1, or None; eps above 0")
    if not train:
        if state is None:
            raise fail("batch_norm: train=False without a state, whose mean and var it uses",
                       fix='state={"mean": ..., "var": ..., "count": ...}; or train=True')  # fmt: skip
        mean, var = state["mean"].detach(), state["var"].detach()
        y = _kernel(x, mean, var, w, b, eps, train=False) if _has_kernel(x) else _normalize(x, mean, var, w, b, eps)
        return y, state
    _check_axes("batch_norm", x, state, over)
    y, mean, var = normalize_batch("batch_norm", x, w, b, eps=eps, over=over, fix="a larger batch, or train=False")
    return y, None if state is None else averaged(state, mean, var, momentum)


def _check(verb: str, x: Tensor, state: Any, w: Tensor | None, b: Tensor | None) -> None:
    if x.ndim < 2 or not x.is_floating_point():
        raise fail(f"{verb}: x must be floating, with channels in dim 1", x=describe(x), fix="x [B, C, ...]")
    if state is not None and (not isinstance(state, Mapping) or set(state) != set(_STATE)
                              or not all(isinstance(s, Tensor) for s in state.values())):  # fmt: skip
        raise must_be(f"{verb}: state", 'None, or a dict of tensors "mean", "var" and "count"', state)
    leaves = {"w": w, "b": b} | ({} if state is None else {f"state[{n!r}]": state[n] for n in ("mean", "var")})
    for name, leaf in leaves.items():
        if leaf is not None and tuple(leaf.shape) != (x.shape[1],):
            raise fail(f"{verb}: {name} must have one number for each channel here", x=describe(x),
                       **{name: describe(leaf)}, fix=f"[{x.shape[1]}]")  # fmt: skip
        if leaf is not None and not leaf.is_floating_point():
            raise fail(f"{verb}: {name} must be floating", **{name: describe(leaf)})
    if state is not None and state["count"].ndim:
        raise fail(f"{verb}: state['count'] must be one number", count=describe(state["count"]))


def _check_axes(verb: str, x: Tensor, state: Any, over: Axis) -> None:
    """Raise ShardingError for statistics of one rank's examples, or of several ranks' different channels."""
    channels = (frozenset[str]() if state is None else
                axes_of_own_values(state["mean"]) & axes_of_own_values(state["var"]))  # fmt: skip
    if split := sorted(channels & set(names_of(over))):
        raise fail(f"{verb}: over={over!r}, and the state varies over {split[0]!r}: that is the mean over different "
                   "channels", fix="leave that axis out: each rank has all examples of its channels")  # fmt: skip
    local = axes_of_own_values(x) - channels - set(names_of(over))
    if local:
        axes = tuple(sorted(local | set(names_of(over))))
        raise fail(f"{verb}: x varies over {' and '.join(map(repr, sorted(local)))}, and over={over!r}",
                   "the statistics of each rank's own examples change with the mesh",
                   fix=f"over={axes if len(axes) > 1 else axes[0]!r}: those of all examples; or train=False; or a "
                   "state that varies too, if each rank has channels or a model of its own")  # fmt: skip


def normalize_batch(
    label: str, x: Tensor, w: Tensor | None, b: Tensor | None, *, eps: float, over: Axis, fix: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize by the statistics of the batch: (y, mean [C], unbiased variance [C])."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    values = math.prod((len(x), *x.shape[2:]))  # of each channel on this rank
    if not live_axis(label, over) and values > 1 and _has_kernel(x):
        mean, var = (torch.zeros(x.shape[1], dtype=dtype, device=x.device) for _ in range(2))
        y = _kernel(x, mean, var, w, b, eps, train=True)  # which writes mean and var
        return y, *psum((mean, var), over)  # of one rank: for their types
    mean, squares = _moments(x, values)
    n = torch.tensor(values, dtype=dtype, device=x.device)
    total, count = psum((n * mean, n), over)
    # Read the count only where so few values are possible.
    if values <= 1 and _at_most_one(count):
        where = f"all ranks of {over!r} together have" if over else "x has"
        raise fail(f"{label}: {where} one value of each channel: it has no variance" if values or over else
                   f"{label}: x has no value of a channel", x=describe(x), fix=fix)  # fmt: skip
    global_mean = total / count
    # About the mean of all ranks, without the cancellation of E[x^2] - E[x]^2. Source: Chan et al., 1979.
    var = psum(squares + n * (mean - pvary(global_mean, over)).square(), over) / count
    y = _normalize(x, pvary(global_mean, over), pvary(var, over), w, b, eps)
    return y, global_mean.detach(), (var * (count / (count - 1))).detach()


def _normalize(x: Tensor, mean: Tensor, var: Tensor, w: Tensor | None, b: Tensor | None, eps: float) -> Tensor:
    """Compute (x - mean) / sqrt(var + eps) * w + b, in float32 or better."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    mean, var = mean.to(dtype), var.to(dtype)
    w, b = (None if leaf is None else leaf.to(dtype) for leaf in (w, b))
    if not x.numel() or torch.compiler.is_dynamo_compiling() or in_transform():
        y = (x - _broadcast(x, mean)) * _broadcast(x, (var + eps).rsqrt())
        y = y if w is None else y * _broadcast(x, w)
        return (y if b is None else y + _broadcast(x, b)).to(x.dtype)
    normalized: Tensor = _Normalize.apply(x, mean, var, w, b, eps)  # type: ignore[no-untyped-call]
    return normalized


def _moments(x: Tensor, values: int) -> tuple[Tensor, Tensor]:
    """Return the mean of each channel and the sum of the squared differences from it, in float32 or better."""
    dims, dtype = [d for d in range(x.ndim) if d != 1], torch.promote_types(x.dtype, torch.float32)
    if not values:
        zeros = x.to(dtype).sum(dims)
        return zeros, zeros
    if not x.numel() or torch.compiler.is_dynamo_compiling() or in_transform():
        mean = x.to(dtype).mean(dims)
        return mean, (x - _broadcast(x, mean)).square().sum(dims)
    moments: tuple[Tensor, Tensor] = _Moments.apply(x)  # type: ignore[no-untyped-call]
    return moments


def _broadcast(x: Tensor, channels: Tensor) -> Tensor:
    """View one number for each channel as x."""
    return channels.view([1, -1] + [1] * (x.ndim - 2)) if x.ndim > 2 else channels


# --- kernels --------------------------------------------------------------------------------------------------


def _has_kernel(x: Tensor) -> bool:
    """Return whether torch's kernel computes this: it has no vmap for the statistics, and fails without channels."""
    return x.shape[1] > 0 and (torch.compiler.is_dynamo_compiling() or not in_transform())


def _kernel(
    x: Tensor, mean: Tensor, var: Tensor, w: Tensor | None, b: Tensor | None, eps: float, *, train: bool
) -> Tensor:
    """Run torch's kernel, which takes other leaves than x in float32 or better; in training it writes mean and var."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    w, b = (None if leaf is None else leaf.to(dtype) for leaf in (w, b))
    return F.batch_norm(x, mean.to(dtype), var.to(dtype), w, b, train, 1.0, eps)


class _Moments(torch.autograd.Function):
    """Compute `_moments` in one pass over x, and keeps only x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        # Averages of float32 or better, which are not used, let the kernel compute in their dtype.
        unused = torch.zeros(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        mean, var = torch.batch_norm_update_stats(x, unused, unused.clone(), 0.0)
        ctx.save_for_backward(x, mean)
        return mean, var * (x.numel() // x.shape[1])

    @staticmethod
    def backward(ctx: Any, d_mean: Tensor, d_squares: Tensor) -> Tensor:
        x, mean = ctx.saved_tensors
        scale = 2 * d_squares
        shift = d_mean / (x.numel() // x.shape[1]) - scale * mean
        return torch.addcmul(_broadcast(x, shift), x, _broadcast(x, scale)).to(x.dtype)


class _Normalize(torch.autograd.Function):
    """`_normalize` by torch's kernels, and the gradients of the statistics, which those take for constants."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, var: Tensor, w: Tensor | None, b: Tensor | None, eps: float
    ) -> Tensor:
        ctx.eps, ctx.has_bias = eps, b is not None
        ctx.save_for_backward(x, mean, var, w)
        return _kernel(x, mean, var, w, b, eps, train=False)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        x, mean, var, w = ctx.saved_tensors
        rate = (var + ctx.eps).rsqrt()
        if torch.is_grad_enabled():  # for a second derivative: operations that autograd can differentiate
            dims = [d for d in range(x.ndim) if d != 1]
            wide = d_y.to(mean.dtype)
            d_x = (wide * _broadcast(x, rate if w is None else rate * w)).to(x.dtype)
            d_w, d_b = (wide * (x - _broadcast(x, mean)) * _broadcast(x, rate)).sum(dims), wide.sum(dims)
        else:
            d_x, d_w, d_b = torch.ops.aten.native_batch_norm_backward(
                d_y, x, w, mean, var, None, None, False, ctx.eps, [True, True, True]
            )
        scale = rate if w is None else rate * w
        d_mean, d_var = -scale * d_b, -0.5 * rate * scale * d_w
        return d_x, d_mean, d_var, None if w is None else d_w, d_b if ctx.has_bias else None, None


def averaged(state: Any, mean: Tensor, var: Tensor, momentum: float | None) -> dict[str, Tensor]:
    """Return the state after one more batch, of this mean and unbiased variance."""
    count = state["count"] + 1
    rate = 1 / count.to(mean.dtype) if momentum is None else momentum
    new = {name: (state[name] + rate * (x - state[name])).to(state[name].dtype)
           for name, x in (("mean", mean), ("var", var))}  # fmt: skip
    return {**new, "count": count}


def _at_most_one(count: Tensor) -> bool:
    """Read a count; False for one without a value."""
    count = unwrapped(count.detach())
    return not (count.is_meta or isinstance(count, FakeTensor)) and bool(count <= 1)
