"""The protocol that moves tensors between ranks.

`ProcessComm`, in `process`, is one rank of `torch.distributed`; `SimulatedComm`, in `simulated`, a thread of this
process; `AbstractComm`, in `abstract`, moves nothing and returns the right shapes.

Five verbs move one tensor of equal shape on every rank, and block; `all_to_all_rows` moves any numbers of rows. Four
start a transfer of several tensors of one dtype, whose parts may differ in size, and return a `PendingTransfer`. Dims,
and trees of several dtypes, are handled in `collectives`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Axes = tuple[str, ...]
Dims = Sequence[int | tuple[int, tuple[int, ...]]]  # of each tensor, a dim; and the lengths of its parts, if chosen
PendingTransfer = Callable[[], list[Tensor]]  # a pending transfer: call it once, to wait for the results


class Place(Protocol):
    """The sizes of the axes of a mesh, and the coordinates of a rank on them."""

    sizes: Mapping[str, int]
    coords: Mapping[str, int]


class Series(NamedTuple):
    """Transfers between two ranks in an order that both know, with no other transfers of the two in between."""

    name: str  # what the order depends on
    is_first: bool  # whether this transfer is the first of its series between the two


class Comm(Place, Protocol):
    """One rank's view of the mesh. `axes` are names of axes whose sizes multiply to more than one, major first."""

    has_values: bool  # False on an abstract mesh: results have a shape and a dtype, but no values
    is_scheduled: bool  # False where only types are checked: loops run plainly, and transfers need no buffers

    @property
    def direct(self) -> bool:
        """True if a transfer can be started and waited for in two steps: not while a compiler traces."""

    @property
    def static_sizes(self) -> bool:
        """True if ranks cannot exchange sizes at run time: on an abstract mesh and in a compiled program."""

    def agree(self, what: str, axes: Axes, device: torch.device) -> None:
        """Raise ShardingError on every rank unless all ranks of `axes` pass the same `what`."""

    def with_all_texts(
        self, text: str, verb: str, device: torch.device, f: Callable[[Mapping[int, str]], None]
    ) -> None:  # fmt: skip
        """Call `f` once, on one rank, with the text of each rank of the mesh; no other rank goes on before its text.

        All ranks must call it. It is not a transfer of the program: it is neither recorded nor counted.
        """

    def all_reduce(self, x: Tensor, op: str, axes: Axes) -> Tensor:
        """Reduce over the ranks by `op`, one of "sum", "max", "min": [*S] -> [*S]."""

    def all_gather(self, x: Tensor, axes: Axes) -> Tensor:
        """Stack the tensors of all ranks, in axis order: [*S] -> [n, *S]."""

    def reduce_scatter(self, x: Tensor, axes: Axes) -> Tensor:
        """Sum over the ranks, and return row `me` of the sum to rank `me`: [n, *S] -> [*S]."""

    def all_to_all(self, x: Tensor, axes: Axes) -> Tensor:
        """Send row j to rank j, and receive row i from rank i: [n, *S] -> [n, *S]."""

    def all_to_all_rows(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int], axes: Axes, *, exchanged: bool
    ) -> Tensor:  # fmt: skip
        """Send the first send[0] rows to rank 0, the next send[1] to rank 1; receive[i] rows from rank i, in order.

        [N, *S] -> [M, *S], for contiguous x. `exchanged`: the ranks know that their counts fit; otherwise they compare
        them. Raises ShardingError, on both ranks, for counts that do not fit.
        """

    def permute(self, x: Tensor, pairs: Sequence[tuple[int, int]], axes: Axes) -> Tensor:
        """Send to rank b for a pair (me, b), and receive from rank a for (a, me); without one, zeros: [*S] -> [*S]."""

    # All ranks start the same transfers in one order, and wait for them in one order, which may differ from the order
    # of the starts. Until a rank has waited for a transfer, it must not write to its arguments.

    def gather(self, xs: Sequence[Tensor], into: Sequence[Tensor], dims: Dims, axes: Axes) -> PendingTransfer:
        """Start to join the ranks' xs[i] along dim dims[i], in the contiguous into[i]. The result is empty.

        into[i] is split as by a spec: rank r's part has the r-th of `part_lengths`, and xs[i] has this shape.
        """

    def scatter(self, xs: Sequence[Tensor], dims: Dims, axes: Axes) -> PendingTransfer:
        """Start to sum each xs[i] over the ranks; the result is this rank's part of dim dims[i], contiguous."""

    def reduce(self, xs: Sequence[Tensor], axes: Axes, *, fresh: bool = False) -> PendingTransfer:
        """Start to sum over the ranks: in place in contiguous xs, or with `fresh` in new tensors."""

    # Only the ranks that a pair names need to start this one; two of them start their common transfers in one order.

    def send(
        self, xs: Sequence[Tensor], pairs: Sequence[tuple[int, int]], axes: Axes, series: Series | None = None
    ) -> PendingTransfer:  # fmt: skip
        """Start to send xs to rank b for a pair (me, b). The result is received for (a, me); without one, zeros.

        Ranks that disagree find out at the first transfer of a `series`: the others are not compared.
        """


def size_of(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Return the number of ranks over the flattened `axes`."""
    return math.prod([sizes[a] for a in axes])  # a list: dynamo refuses a generator here


def index_of(axes: Axes, sizes: Mapping[str, int], coords: Mapping[str, int]) -> int:
    """Return the position over the flattened `axes`, the first the most major."""
    at = 0
    for a in axes:
        at = at * sizes[a] + coords[a]
    return at


def coords_of(position: int, sizes: Sequence[int]) -> list[int]:
    """Return the coordinates of a position over flattened axes of these sizes: undoes `index_of`."""
    coords = [0] * len(sizes)
    for i in reversed(range(len(sizes))):
        position, coords[i] = divmod(position, sizes[i])
    return coords


def ranks_over(axes: Axes, sizes: Mapping[str, int], coords: Mapping[str, int]) -> list[int]:
    """Return the ranks over the flattened `axes`, in their order, which have these coordinates on the other axes."""
    positions = itertools.product(*[range(sizes[a]) for a in axes])
    return [index_of(tuple(sizes), sizes, {**coords, **dict(zip(axes, at, strict=True))}) for at in positions]
