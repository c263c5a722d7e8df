"""Batch norms of a module whose batch is split over a mesh axis."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from fshard._core.region import axes_of_own_values, in_region, region
from fshard.errors import ShardingError, fail
from fshard.nn.batch_norm import averaged, normalize_batch
from fshard.spec import Axis, describe, names_of

UNSET: Any = object()  # the axis of a function without `batch_norm_over`
LEAVES = ("weight", "bias", "running_mean", "running_var")
_BATCH_NORMS: dict[type[nn.Module], Sequence[int]] = {  # kind -> the numbers of dims that its input may have
    nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,), nn.SyncBatchNorm: range(2, 64)
}  # fmt: skip


def batch_norms(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return torch's own batch norms with their names, and none whose forward is another."""
    own = {kind.forward for kind in _BATCH_NORMS}
    return [(name, m) for name, m in module.named_modules()
            if any(isinstance(m, kind) for kind in _BATCH_NORMS) and type(m).forward in own
            and ("forward" not in vars(m) or getattr(m.forward, "func", None) is batch_norm_over)]  # fmt: skip


def state_of(m: object) -> str:
    """Return why a norm of torch, or of a subclass, takes the statistics of its batch; "" for another module."""
    if not isinstance(m, nn.modules.batchnorm._NormBase):
        return ""
    return "in train mode" if m.training else "without running statistics"


def axes_of_channels(leaves: Collection[Tensor]) -> frozenset[str]:
    """Return the axes that split the channels of a norm: all its leaves but the counter vary over them."""
    return frozenset[str].intersection(*map(axes_of_own_values, leaves)) if leaves else frozenset()


def one_rank_error(what: str, *why: str, axes: Collection[str]) -> ShardingError:
    """Return the error of a norm that would not take its statistics over all examples."""
    over = "the axes that split the batch" if len(axes) > 1 else f'"{min(axes)}"' if axes else "None"
    return fail(what, *why,
                fix=f"apply = apply.batch_norm_over({over}): the statistics of all examples; or apply.eval(); or\n"
                "       apply.batch_norm_over(None), if each rank has channels or a model of its own")  # fmt: skip


def check_leaves(what: str, axis: Axis, x: Tensor, leaves: Mapping[str, Tensor]) -> None:
    """Raise ShardingError for leaves that do not have the channels of the input, or that `axis` splits."""
    if split := sorted(axes_of_channels(leaves.values()) & set(names_of(axis))):
        raise fail(f"{what} whose leaves vary over {split[0]!r}: batch_norm_over({axis!r}) would take the mean over "
                   "different channels", fix="leave that axis out: each rank has all examples of its channels; "
                   "for no axis at all, leave out batch_norm_over")  # fmt: skip
    for name, leaf in leaves.items():
        if len(leaf) != x.shape[1]:
            raise fail(f"{what} whose {name} has {len(leaf)} channels, and its input has {x.shape[1]}",
                       input=describe(x))  # fmt: skip


def _leaves(m: Any) -> dict[str, Tensor]:
    return {name: leaf for name in LEAVES if (leaf := getattr(m, name)) is not None}


normalize = functools.partial(normalize_batch, fix="a larger batch, or apply.eval()")


def sync_batch_norm(name: str, m: Any, x: Tensor) -> Tensor:
    """Run a SyncBatchNorm. Raise ShardingError if it would take the statistics of its process group."""
    axes = [a for a, n in region().sizes.items() if n > 1] if in_region() else []
    if axes and (m.training or m.running_mean is None):
        batch = set(axes) - axes_of_channels(_leaves(m).values())
        raise one_rank_error(f"{name} is a {type(m).__name__} {state_of(m)}", "it would take the statistics of all "
                             "processes, whatever the mesh; on a simulated mesh, of each rank alone", axes=batch
                             )  # fmt: skip
    return type(m).forward(m, x)  # type: ignore[no-any-return]


def batch_norm_over(axis: Axis, name: str, m: Any, x: Tensor) -> Tensor:
    """Run a batch norm; in train mode with the mean and the variance of the examples on all ranks of `axis`."""
    if has_torch_function_unary(x):  # below `BatchStatistics`, which would see each operation of this one
        return handle_torch_function(batch_norm_over, (x,), axis, name, m, x)
    if axis is None or not (m.training or m.running_mean is None):
        return nn.BatchNorm1d.forward(m, x)  # that of all kinds but SyncBatchNorm's, which uses a process group
    name, leaves = f"{name} is a {type(m).__name__}", _leaves(m)
    if x.ndim not in next(ndims for kind, ndims in _BATCH_NORMS.items() if isinstance(m, kind)):
        raise fail(f"{name}, and its input has {x.ndim} dims", input=describe(x))
    check_leaves(name, axis, x, leaves)
    y, mean, var = normalize(name, x, m.weight, m.bias, eps=m.eps, over=axis)
    if m.training and m.track_running_stats and m.running_mean is not None:
        state = {"mean": m.running_mean, "var": m.running_var, "count": m.num_batches_tracked}
        momentum = m.momentum
        if state["count"] is None:
            state["count"], momentum = torch.zeros((), dtype=torch.int64), m.momentum or 0.0
        new = averaged(state, mean, var, momentum)
        m.running_mean, m.running_var = new["mean"], new["var"]
        if m.num_batches_tracked is not None:
            m.num_batches_tracked = new["count"]
    return y
