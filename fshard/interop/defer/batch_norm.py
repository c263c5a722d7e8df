"""Batch norms of a module whose batch is split over a mesh axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fshard._comm import Axis, checker, in_region, region
from fshard.collectives import psum, pvary
from fshard.errors import fail
from fshard.spec import describe, names_of

from .writes import equal_values

_BATCH_NORMS: dict[type[nn.Module], Sequence[int]] = {  # kind -> the numbers of dims that its input may have
    nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,), nn.SyncBatchNorm: range(2, 64)
}  # fmt: skip


def batch_norms(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return torch's own batch norms with their names, and none whose forward is another."""
    own = {kind.forward for kind in _BATCH_NORMS}
    return [(name, m) for name, m in module.named_modules()
            if any(isinstance(m, kind) for kind in _BATCH_NORMS) and type(m).forward in own]  # fmt: skip


def axes_of_own_values(x: Tensor) -> frozenset[str]:
    """Return the axes over which ranks have values of their own, not copies of one; none in calls without checks."""
    types = checker()
    if types is None:
        return frozenset()
    type_, history = types.info(x).type, types.info(x).history
    return frozenset(type_.varying - history.copies - {g.axis for g in history.gathers})


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
        raise fail(f"{name}, and its input has {x.ndim} dims", input=describe(x.dtype, x.shape))
    for key in ("weight", "bias", "running_mean", "running_var"):
        leaf = getattr(m, key)
        if leaf is not None and len(leaf) != x.shape[1]:
            raise fail(f"{name} whose {key} has {len(leaf)} channels, and its input has {x.shape[1]}",
                       input=describe(x.dtype, x.shape))  # fmt: skip
    dims, shape = [d for d in range(x.ndim) if d != 1], [1, -1] + [1] * (x.ndim - 2)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    values = x.numel() // max(1, x.shape[1])  # of each channel on this rank
    count = torch.tensor(values, dtype=wide.dtype, device=x.device)
    total, count = psum((wide.sum(dims), count), axis)
    # Read the count only where so few values are possible.
    if values <= 1 and equal_values(count, torch.ones_like(count), unknown=False):
        raise fail(f"{name}, and all ranks of {axis!r} together have one value of each channel: it has no variance",
                   input=describe(x.dtype, x.shape), fix="a larger batch, or apply.eval()")  # fmt: skip
    mean = total / count
    centred = wide - pvary(mean, axis).view(shape)
    variance = psum(centred.square().sum(dims), axis) / count
    y = centred * pvary(variance + m.eps, axis).rsqrt().view(shape)
    if m.weight is not None:
        y = y * m.weight.view(shape) + m.bias.view(shape)
    if m.training and m.track_running_stats and m.running_mean is not None:
        rate: Any = m.momentum or 0.0
        if m.num_batches_tracked is not None:
            m.num_batches_tracked.add_(1)
            rate = m.momentum if m.momentum is not None else 1 / m.num_batches_tracked.to(wide.dtype)
        unbiased = variance * (count / (count - 1))
        for key, new in (("running_mean", mean), ("running_var", unbiased)):
            old = getattr(m, key)
            setattr(m, key, (old + rate * (new.detach() - old)).to(old.dtype))
    out: Tensor = y.to(x.dtype)
    return out
