"""Batch norms of a module whose batch is split over a mesh axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fshard._comm import Axis, axes_of_own_values, in_region, region
from fshard.errors import fail
from fshard.nn.batch_norm import averaged, normalize_batch
from fshard.spec import describe, names_of

_BATCH_NORMS: dict[type[nn.Module], Sequence[int]] = {  # kind -> the numbers of dims that its input may have
    nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,), nn.SyncBatchNorm: range(2, 64)
}  # fmt: skip


def batch_norms(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return torch's own batch norms with their names, and none whose forward is another."""
    own = {kind.forward for kind in _BATCH_NORMS}
    return [(name, m) for name, m in module.named_modules()
            if any(isinstance(m, kind) for kind in _BATCH_NORMS) and type(m).forward in own]  # fmt: skip


def _axes_of_channels(m: Any) -> frozenset[str]:
    """Return the axes that split the channels of a batch norm: all its leaves but the counter vary over them."""
    leaves = [x for x in (m.weight, m.bias, m.running_mean, m.running_var) if x is not None]
    return frozenset[str].intersection(*map(axes_of_own_values, leaves)) if leaves else frozenset()


def batch_norm_of_one_rank(name: str, m: Any, x: Tensor) -> Tensor:
    """Run a batch norm. Raise ShardingError if it would take the statistics of one rank's examples."""
    axes: frozenset[str] = frozenset()
    if m.training or m.running_mean is None:
        if not isinstance(m, nn.SyncBatchNorm):
            axes = axes_of_own_values(x) - _axes_of_channels(m)
        elif in_region():  # its process group is none of the mesh's
            axes = frozenset(a for a, n in region().sizes.items() if n > 1)
    if not axes:
        return type(m).forward(m, x)  # type: ignore[no-any-return]
    kind = type(m).__name__
    state = "in train mode" if m.training else "without running statistics"
    why = ("it would take the statistics of all processes, whatever the mesh; on a simulated mesh, of each rank alone"
           if isinstance(m, nn.SyncBatchNorm) else
           f"its input varies over {' and '.join(map(repr, sorted(axes)))}: the statistics of each rank's own examples "
           "change with the mesh")  # fmt: skip
    batch = axes - _axes_of_channels(m)
    over = "the axes that split the batch" if len(batch) > 1 else f'"{min(batch)}"' if batch else "None"
    raise fail(f"{name} is a {kind} {state}", why,
               fix=f"apply = apply.batch_norm_over({over}): the statistics of all examples; or apply.eval(); or\n"
                   "       apply.batch_norm_over(None), if each rank has channels or a model of its own")  # fmt: skip


def batch_norm_over(axis: Axis, name: str, m: Any, x: Tensor) -> Tensor:
    """Run a batch norm; in train mode with the mean and the variance of the examples on all ranks of `axis`."""
    if axis is None or not (m.training or m.running_mean is None):
        return nn.BatchNorm1d.forward(m, x)  # that of all kinds but SyncBatchNorm's, which uses a process group
    name = f"{name} is a {type(m).__name__}"
    if split := sorted(_axes_of_channels(m) & set(names_of(axis))):
        raise fail(f"{name} whose leaves vary over {split[0]!r}: batch_norm_over({axis!r}) would take the mean over "
                   "different channels", fix="leave that axis out: each rank has all examples of its channels; "
                   "for no axis at all, leave out batch_norm_over")  # fmt: skip
    if x.ndim not in next(ndims for kind, ndims in _BATCH_NORMS.items() if isinstance(m, kind)):
        raise fail(f"{name}, and its input has {x.ndim} dims", input=describe(x))
    for key in ("weight", "bias", "running_mean", "running_var"):
        leaf = getattr(m, key)
        if leaf is not None and len(leaf) != x.shape[1]:
            raise fail(f"{name} whose {key} has {len(leaf)} channels, and its input has {x.shape[1]}",
                       input=describe(x))  # fmt: skip
    y, mean, var = normalize_batch(name, x, m.weight, m.bias, eps=m.eps, over=axis,
                                   fix="a larger batch, or apply.eval()")  # fmt: skip
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
