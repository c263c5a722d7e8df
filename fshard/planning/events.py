"""The events of one rank in a planned run, in the order in which the rank starts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fshard._core.callsite import Site
from fshard._core.torch import in_backward
from fshard._core.transfers import Transfer

Kind = Literal["matmul", "attention", "convolution", "depthwise", "linalg", "fft", "elementwise", "copy"]
Phase = Literal["forward", "recompute", "backward", "update"]


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of torch on this rank.

    `dtype` is its arguments' (a matmul's matrices'). `flops` is None for an operation that may compute
    much and has no formula, and 0 for one that only reads and writes. `bytes` are those that it reads and writes,
    `live` counts tensors in this rank's device memory after it, and the memory that the kernel allocates and frees, its
    `workspace`: None if nobody knows, and then not counted. `where` is the user's line; in backward the line of the
    call which computes the gradient.

    >>> [(e.name, e.kind, e.flops) for e in plan.events if isinstance(e, fs.planning.Operation)][:2]
    [('aten.mm', 'matmul', 24), ('aten.sum', 'elementwise', 0)]
    """

    name: str  # "aten.mm"
    kind: Kind
    dtype: torch.dtype
    flops: int | None
    bytes: int
    live: int
    where: Site | None
    phase: Phase
    workspace: int | None = 0


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a transfer, which a `Wait` of the same number ends; a blocking one is waited for at once.

    >>> [(e.transfer.op, e.transfer.sent) for e in plan.events if isinstance(e, fs.planning.Start)]
    [('all_reduce', 6)]
    """

    transfer: Transfer
    number: int
    live: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The end of a transfer: operations after it may use the result.

    >>> [e.number for e in plan.events if isinstance(e, fs.planning.Wait)]
    [0]
    """

    number: int
    live: int


Event = Operation | Start | Wait


def phase_now() -> Phase:
    """Return the phase of an operation; "forward" for the update, until the full step is known."""
    if not in_backward():
        return "forward"
    return "recompute" if torch.is_grad_enabled() else "backward"
