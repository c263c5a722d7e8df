"""The elementwise maximum and minimum over ranks: the collectives that are not linear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard._comm import Comm, checker, pack, unpack
from fshard.errors import fail

from .autograd import Map, Sum, Vary, apply_map, run_map


@dataclass(frozen=True)
class MinMax(Map):
    """The maximum or minimum: typed like a map, but not linear."""

    op: str = "max"
    gives = "I"

    @property
    def verb(self) -> str:  # type: ignore[override]
        return f"p{self.op}"

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        return [self.comm.all_reduce(x, self.op, self.axes) for x in xs]


class _Extreme(torch.autograd.Function):
    """The elementwise maximum (or minimum) over ranks: not linear; differentiated only by sharing among ties."""

    @staticmethod
    def forward(comm: Comm, axes: tuple[str, ...], op: str, tied: bool, x: Tensor) -> Tensor:
        return run_map(MinMax(comm, axes, op), [x])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.comm, ctx.axes, ctx.op, ctx.tied, x = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def _share(ctx: Any) -> Tensor:
        """This rank's share of each element: 1 / (ranks that hold it), or 0."""
        if not ctx.tied:
            fix = f"detach the argument, or p{ctx.op}(x, axis, grad='tied') to split it among ties"
            raise fail(f"p{ctx.op}: has no derivative", fix=fix)
        x, out = ctx.saved_tensors
        vary = Vary(ctx.comm, ctx.axes)
        mine: Tensor = (x == apply_map(vary, [out])[0]).to(out.dtype)
        return mine / apply_map(vary, apply_map(Sum(ctx.comm, ctx.axes), [mine]))[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, None, None, apply_map(Vary(ctx.comm, ctx.axes), [grad])[0] * _Extreme._share(ctx)


class _ExtremeEager(_Extreme):
    @staticmethod
    def jvp(ctx: Any, _comm: None, _axes: None, _op: None, _tied: None, tangent: Tensor) -> Tensor:
        return apply_map(Sum(ctx.comm, ctx.axes), [tangent * _Extreme._share(ctx)])[0]

    @staticmethod
    def vmap(info: Any, in_dims: Any, comm: Comm, axes: tuple[str, ...], op: str, tied: bool, x: Tensor) -> Any:
        front = x.movedim(in_dims[4], 0)
        return _ExtremeEager.apply(comm, axes, op, tied, front), 0  # type: ignore[no-untyped-call]


def minmax(comm: Comm, axes: tuple[str, ...], op: str, tied: bool, xs: Sequence[Tensor]) -> list[Tensor]:
    """The elementwise `op` ("max", "min") over the ranks, of tensors of one dtype."""
    compiling = torch.compiler.is_dynamo_compiling()
    function: Any = _Extreme if compiling else _ExtremeEager
    found = None if compiling else checker()
    out: list[Any] = [None] * len(xs)
    # One transfer; in a checked call one for each type: in one buffer they would have one.
    for group in [range(len(xs))] if found is None else found.group_by_type(xs):
        some = [xs[i] for i in group]
        x = pack(some)
        y = function.apply(comm, axes, op, tied, x.view_as(x) if compiling else x)
        for i, part in zip(group, unpack(y, some), strict=True):
            out[i] = part
    return out


__all__ = ["MinMax", "minmax"]
