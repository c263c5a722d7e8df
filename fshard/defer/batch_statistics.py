"""Operations of a forward that compute with all rows of its batch, where a mesh axis splits the batch.

Norms in train mode take the statistics of all examples, and embeddings with `scale_grad_by_freq` count all ids. Both
are found at the operation, whichever class or function calls it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Collection, Mapping
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fshard._core.callsite import is_users_frame, place_and_source, site, user_frame
from fshard._core.region import axes_of_own_values, checker
from fshard._core.torch import in_transform
from fshard.collectives import psum
from fshard.errors import ShardingError, fail
from fshard.nn.batch_norm import normalize_batch
from fshard.spec import Axis, describe, names_of

from .stand_ins import StandIn

UNSET: Any = object()  # the axis of a function without `batch_norm_over`
_LEAVES = ("weight", "bias", "running_mean", "running_var")
_NORM = "input weight bias running_mean running_var training momentum eps"
_PYTHON: tuple[Any, ...] = (F.batch_norm, F.instance_norm, F.embedding, F.embedding_bag)
_NAMES: dict[Any, tuple[str, ...]] = {  # the names of each operation's arguments
    **{f: tuple(inspect.signature(f).parameters) for f in _PYTHON},
    **{f: tuple(_NORM.split()) for f in (torch.batch_norm, torch.native_batch_norm, torch.cudnn_batch_norm)},
    torch.instance_norm: tuple(_NORM.replace("training", "use_input_stats").split()),
    torch.batch_norm_stats: ("input",),  # of torch's SyncBatchNorm, as the next
    torch.batch_norm_update_stats: ("input",),
    torch.embedding: ("weight", "input", "padding_idx", "scale_grad_by_freq", "sparse"),
    torch.embedding_bag: ("weight", "input", "offsets", "scale_grad_by_freq", "mode", "sparse"),
}


class _Cumulative(float):
    """The momentum of a norm that averages all batches, `momentum=None`: one by the count of batches, as a tensor.

    The forward of torch's norms reads that count as a number, which an abstract mesh does not have.
    """

    norm: Any

    def __new__(cls, norm: nn.Module) -> _Cumulative:
        out = super().__new__(cls)
        out.norm = norm
        return out

    def factor(self) -> Tensor | float:
        count = self.norm.num_batches_tracked
        return 0.0 if count is None else 1.0 / count.double()


class BatchStatistics(TorchFunctionMode):
    """Takes the statistics of norms over all ranks of an axis; checked calls refuse statistics of one rank."""

    def __init__(self, name: str, module: nn.Module, over: Axis) -> None:
        super().__init__()
        self.name, self.module, self.over = name, module, over
        self._cumulative: list[Any] = []

    def __enter__(self) -> Any:
        if self.over is not UNSET and self.over is not None:
            norms = (m for m in self.module.modules() if isinstance(m, nn.modules.batchnorm._NormBase))
            self._cumulative = [m for m in norms if m.momentum is None]
        for norm in self._cumulative:
            norm.momentum = _Cumulative(norm)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        for norm in self._cumulative:
            norm.momentum = None
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (names := _NAMES.get(func)) is None:
            return func(*args, **kwargs)
        given, op = {**dict(zip(names, args, strict=False)), **kwargs}, func.__name__
        if "embedding" in op:
            self._check_embedding(op, given)
        elif self.over is not None and _takes_statistics(op, given):
            if self.over is UNSET or func not in (F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm):
                self._refuse(op, given)
            else:
                return self._over_all_ranks(op, given)
        return func(*args, **kwargs)

    def _over_all_ranks(self, op: str, given: Mapping[str, Any]) -> Tensor:
        what, x, leaves = self._caller(op), given["input"], _leaves(given)
        _check_leaves(what, self.over, x, leaves)
        options = {"momentum": 0.1, "eps": 1e-5} | {k: given[k] for k in ("momentum", "eps") if k in given}
        w, b = leaves.get("weight"), leaves.get("bias")
        if "batch" in op:
            y, *new = normalize_batch(what, x, w, b, eps=options["eps"], over=self.over,
                                      fix="a larger batch, or apply.eval()")  # fmt: skip
        else:  # the statistics of each example; running ones are their mean
            y, n = F.instance_norm(x, None, None, w, b, eps=options["eps"]), len(x)
            local = [torch.zeros_like(leaves[name]) for name in _LEAVES[2:]]
            if n:
                F.instance_norm(x.detach(), local[0], local[1], momentum=1.0)
            *totals, count = psum((*(n * s for s in local), torch.tensor(float(n), device=x.device)), self.over)
            new = [total / count for total in totals]
        momentum = options["momentum"]
        factor = momentum.factor() if isinstance(momentum, _Cumulative) else momentum
        with torch.no_grad():
            for name, statistic in zip(_LEAVES[2:], new, strict=True):
                if (running := leaves.get(name)) is not None:
                    running.add_((factor * (statistic - running)).to(running.dtype))
        return y

    def _refuse(self, op: str, given: Mapping[str, Any]) -> None:
        if axes := axes_of_own_values(given["input"]) - _axes_of_channels(_leaves(given).values()):
            if self.over is not UNSET:
                raise self._error(op, "", f"batch_norm_over({self.over!r}) computes F.batch_norm and F.instance_norm",
                                  fix="one of these")  # fmt: skip
            over = "the axes that split the batch" if len(axes) > 1 else f'"{min(axes)}"'
            raise self._error(op, "", f"its input varies over {' and '.join(map(repr, sorted(axes)))}: the statistics "
                              "of each rank's own examples change with the mesh",
                              fix=f"apply = apply.batch_norm_over({over}): the statistics of all examples; or "
                              "apply.eval(); or\n       apply.batch_norm_over(None), if each rank has channels or a "
                              "model of its own")  # fmt: skip

    def _check_embedding(self, op: str, given: Mapping[str, Any]) -> None:
        """Raise ShardingError for a table whose gradient no sum over ranks makes right."""
        table, ids = given["weight"], given["input"]
        if isinstance(table, StandIn) or not torch.is_grad_enabled():
            return
        if given.get("scale_grad_by_freq") and (axes := axes_of_own_values(ids) - axes_of_own_values(table)):
            over = repr(min(axes) if len(axes) == 1 else tuple(sorted(axes)))
            raise self._error(
                op, " with scale_grad_by_freq=True", f"its ids vary over {over}: it divides the gradients of each "
                "rank's ids by their number on that rank, which changes with the mesh",
                fix="scale_grad_by_freq=False; and if nothing else uses the table, divide row i of its gradient by the "
                f"number of ids i:\n       fs.psum(torch.bincount(ids.flatten(), minlength={len(table)}), {over})"
                ".clamp(min=1)")  # fmt: skip
        if given.get("sparse") and (table.requires_grad or in_transform()):
            raise self._error(op, " with sparse=True", "collectives and optimizers take dense gradients",
                              fix="sparse=False: the gradient has the same numbers")  # fmt: skip

    def _error(self, op: str, what: str, *notes: str, fix: str) -> ShardingError:
        """Return the error of an operation, with the user's line in a call that is checked."""
        line = () if checker() is None else place_and_source(site(user_frame()))
        return fail(f"{self._caller(op)}{what}", *line, *notes, fix=fix)

    @functools.cached_property
    def _names(self) -> dict[int, str]:
        return {id(m): name for name, m in self.module.named_modules()}

    def _caller(self, op: str) -> str:
        """Return the submodule that calls an operation, as the subject of an error."""
        names = self._names
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and id(m := frame.f_locals.get("self")) not in names:
            frame = frame.f_back
        if frame is None:
            return f"{self.name}: a {op}"
        label = f"{self.name}: {repr(names[id(m)]) if names[id(m)] else 'it'} is a {type(m).__name__}"
        if isinstance(m, nn.modules.batchnorm._NormBase):
            return f"{label} {'in train mode' if m.training else 'without running statistics'}"
        return label if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) else f"{label} that calls {op}"


def without_process_group(module: nn.Module) -> None:
    """Let torch's SyncBatchNorm call `F.batch_norm`, as others do, and not a process group, whatever the mesh."""
    for m in module.modules():
        if isinstance(m, nn.SyncBatchNorm) and m.forward.__func__ is nn.SyncBatchNorm.forward:  # type: ignore[attr-defined]
            m.forward = functools.partial(nn.BatchNorm1d.forward, m)  # type: ignore[method-assign]


def _leaves(given: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: leaf for name in _LEAVES if (leaf := given.get(name)) is not None}


def _axes_of_channels(leaves: Collection[Tensor]) -> frozenset[str]:
    """Return the axes that split the channels of a norm: all its leaves but the counter vary over them."""
    return frozenset[str].intersection(*map(axes_of_own_values, leaves)) if leaves else frozenset()


def _check_leaves(what: str, axis: Axis, x: Tensor, leaves: Mapping[str, Tensor]) -> None:
    """Raise ShardingError for leaves that do not have the channels of the input, or that `axis` splits."""
    if split := sorted(_axes_of_channels(leaves.values()) & set(names_of(axis))):
        raise fail(f"{what} whose leaves vary over {split[0]!r}: batch_norm_over({axis!r}) would take the mean over "
                   "different channels", fix="leave that axis out: each rank has all examples of its channels; "
                   "for no axis at all, leave out batch_norm_over")  # fmt: skip
    for name, leaf in leaves.items():
        if len(leaf) != x.shape[1]:
            raise fail(f"{what} whose {name} has {len(leaf)} channels, and its input has {x.shape[1]}",
                       input=describe(x))  # fmt: skip


def _takes_statistics(op: str, given: Mapping[str, Any]) -> bool:
    """Return whether a norm takes statistics of its batch, and is not one of fshard, which has an `over=` itself."""
    if not given.get("training", given.get("use_input_stats", True)):
        return False
    if "instance" in op and given.get("running_mean") is None:  # each example is normalized without the others
        return False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_users_frame(frame):
        if frame.f_globals.get("__name__") == "fshard.nn.batch_norm":
            return False
        frame = frame.f_back
    return True
