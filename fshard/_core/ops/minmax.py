"""The elementwise maximum and minimum over ranks: the collectives that are not linear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard._core.packing import pack, unpack
from fshard._core.protocol import Comm
from fshard._core.region import checker
from fshard._core.torch import with_tangents
from fshard.errors import fail

from .autograd import apply_function, apply_map, run_map
from .linear_maps import Map, Sum, Vary


@dataclass(frozen=True)
class MinMax(Map):
    """The maximum or minimum: typed like a linear map, but without a transpose."""

    op: str = "max"
    gives = "I"

    @property
    def verb(self) -> str:  # type: ignore[override]
        return f"p{self.op}"

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        return [self.comm.all_reduce(x, self.op, self.axes) for x in xs]


class _MinMaxCompiled(torch.autograd.Function):
    """The maximum or minimum of one tensor, without the jvp and the vmap that dynamo refuses."""

    @staticmethod
    def forward(m: MinMax, tied: bool, x: Tensor) -> Tensor:
        return run_map(m, [x])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.map, ctx.tied, x = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def _weights(ctx: Any) -> Tensor:
        """Return the derivative of each result by this rank's element: 1 / (number of equal ranks), or 0."""
        m: MinMax = ctx.map
        if not ctx.tied:
            fix = f"detach the argument, or p{m.op}(x, axis, grad='tied') to split it among ties"
            raise fail(f"p{m.op}: has no derivative", fix=fix)
        x, out = ctx.saved_tensors
        vary = Vary(m.comm, m.axes)
        equal: Tensor = (x == apply_map(vary, [out])[0]).to(out.dtype)
        return equal / apply_map(vary, apply_map(Sum(m.comm, m.axes), [equal]))[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, apply_map(Vary(ctx.map.comm, ctx.map.axes), [grad])[0] * _MinMax._weights(ctx)


class _MinMax(_MinMaxCompiled):
    @staticmethod
    def jvp(ctx: Any, _map: None, _tied: None, tangent: Tensor) -> Tensor:
        with with_tangents():  # of an outer jvp
            part = tangent * _MinMax._weights(ctx)
        return apply_map(Sum(ctx.map.comm, ctx.map.axes), [part])[0]

    @staticmethod
    def vmap(info: Any, in_dims: Any, m: MinMax, tied: bool, x: Tensor) -> Any:
        return _MinMax.apply(m, tied, x.movedim(in_dims[2], 0)), 0  # type: ignore[no-untyped-call]


def minmax(comm: Comm, axes: tuple[str, ...], op: str, tied: bool, xs: Sequence[Tensor]) -> list[Tensor]:
    """Return the elementwise `op` ("max", "min") over the ranks, of tensors of one dtype."""
    compiling = torch.compiler.is_dynamo_compiling()
    function: Any = _MinMaxCompiled if compiling else _MinMax
    types = None if compiling else checker()
    out: list[Any] = [None] * len(xs)
    # One transfer; in a checked call one for each type, because one buffer has one type.
    for group in [range(len(xs))] if types is None else types.group_by_type(xs):
        members = [xs[i] for i in group]
        x = pack(members)
        m = MinMax(comm, axes, op)
        y = function.apply(m, tied, x.view_as(x)) if compiling else apply_function(m.verb, function, m, tied, x)
        for i, part in zip(group, unpack(y, members), strict=True):
            out[i] = part
    return out
