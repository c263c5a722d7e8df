"""The protocol that moves tensors between ranks.

`ProcessComm`, in `process`, is one rank of `torch.distributed`; `SimulatedComm`, in `simulated`, a thread of this
process; `AbstractComm`, in `abstract`, moves nothing and knows the shapes. Nothing outside this package asks which of
them it has.

Five verbs move one tensor of equal shape on every rank, and block. Three start a transfer of several tensors of one
dtype, whose parts may differ in size, and return a `PendingTransfer`. Dims and the dtypes of a tree are the business
of `collectives`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

Axes = tuple[str, ...]
PendingTransfer = Callable[[], list[Tensor]]  # a transfer under way: called, once, it waits and gives the results


class Comm(Protocol):
    """One rank's view of the mesh. `axes` are names of axes whose sizes multiply to more than one, major first."""

    sizes: Mapping[str, int]
    coords: Mapping[str, int]

    has_values: bool  # False on an abstract mesh: results have a shape and a dtype, and no values

    @property
    def direct(self) -> bool:
        """True if a transfer can be started and waited for in two steps: not while a compiler traces."""

    @property
    def static_sizes(self) -> bool:
        """True if ranks cannot exchange sizes at run time: on an abstract mesh and in a compiled program."""

    def agree(self, what: str, axes: Axes, device: torch.device) -> None:
        """Raise ShardingError on every rank unless all ranks of `axes` pass the same `what`."""

    def all_reduce(self, x: Tensor, op: str, axes: Axes) -> Tensor:
        """`op` ("sum", "max", "min") over the ranks: [*S] -> [*S]."""

    def all_gather(self, x: Tensor, axes: Axes) -> Tensor:
        """Everyone's tensor, in axis order: [*S] -> [n, *S]."""

    def reduce_scatter(self, x: Tensor, axes: Axes) -> Tensor:
        """The sum of everyone's part for me: [n, *S] -> [*S]."""

    def all_to_all(self, x: Tensor, axes: Axes) -> Tensor:
        """Row j goes to rank j; row i came from rank i: [n, *S] -> [n, *S]."""

    def permute(self, x: Tensor, pairs: Sequence[tuple[int, int]], axes: Axes) -> Tensor:
        """What the rank whose pair is (it, me) sent; zeros if none did: [*S] -> [*S]."""

    # Every rank starts the same transfers in the same order and lands them in the same order, which may be another.
    # Until it has landed, what a transfer was given must stay as it is.

    def gather(self, xs: Sequence[Tensor], into: Sequence[Sequence[Tensor]], axes: Axes) -> PendingTransfer:
        """Rank r's xs[i] lands in into[i][r], which may be a strided view. Gives nothing."""

    def scatter(self, xs: Sequence[Sequence[Tensor]], axes: Axes) -> PendingTransfer:
        """For each i the sum over the ranks of their xs[i][me], contiguous."""

    def reduce(self, xs: Sequence[Tensor], axes: Axes, *, fresh: bool = False) -> PendingTransfer:
        """The sums over the ranks: in place, in contiguous xs that are the caller's own; `fresh`, in new tensors."""


def size_of(axes: Axes, sizes: Mapping[str, int]) -> int:
    """The number of ranks over the flattened `axes`."""
    n = 1
    for a in axes:
        n *= sizes[a]
    return n


def index_of(axes: Axes, sizes: Mapping[str, int], coords: Mapping[str, int]) -> int:
    """Position over the flattened `axes`, the first the most major."""
    at = 0
    for a in axes:
        at = at * sizes[a] + coords[a]
    return at


__all__ = ["Axes", "Comm", "PendingTransfer", "index_of", "size_of"]
