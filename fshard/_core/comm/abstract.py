"""A rank of a mesh that does not exist: collectives of fake tensors, with the right shapes, that transfer nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fshard._core.packing import part_shape
from fshard._core.protocol import Axes, PendingTransfer, index_of, size_of
from fshard._core.torch import FakeTensorMode, without_modes
from fshard._core.transfers import Split, Transfer, note, reduction, transfer


class AbstractComm:
    """One rank of a mesh of any size. Each transfer is added to `transfers`."""

    has_values = False
    is_scheduled = False
    direct = True
    static_sizes = True

    def __init__(self, sizes: Mapping[str, int], coords: Mapping[str, int], transfers: list[Transfer]) -> None:
        self.sizes: Mapping[str, int] = dict(sizes)
        self.coords = coords
        self._transfers = transfers

    def _note(self, op: str, xs: Sequence[Tensor], axes: Axes, split: Split = ()) -> None:
        self._transfers.append(transfer(self, op, xs, axes, split))
        note(self, op, xs, axes, split)

    def agree(self, what: str, axes: Axes, device: torch.device) -> None:
        pass  # there is one rank

    def with_all_texts(
        self, text: str, verb: str, device: torch.device, f: Callable[[Mapping[int, str]], None]
    ) -> None:  # fmt: skip
        f({index_of(tuple(self.sizes), self.sizes, self.coords): text})  # there is one rank

    def all_reduce(self, x: Tensor, op: str, axes: Axes) -> Tensor:
        self._note(reduction(op), [x], axes)
        return x.new_empty(x.shape)

    def all_gather(self, x: Tensor, axes: Axes) -> Tensor:
        self._note("all_gather", [x], axes)
        return x.new_empty([size_of(axes, self.sizes), *x.shape])

    def reduce_scatter(self, x: Tensor, axes: Axes) -> Tensor:
        self._note("reduce_scatter", [x], axes)
        return x.new_empty(x.shape[1:])

    def all_to_all(self, x: Tensor, axes: Axes) -> Tensor:
        self._note("all_to_all", [x], axes)
        return x.new_empty(x.shape)

    def permute(self, x: Tensor, pairs: Sequence[tuple[int, int]], axes: Axes) -> Tensor:
        self._note("permute", [x], axes, pairs)
        return x.new_empty(x.shape)

    def gather(self, xs: Sequence[Tensor], into: Sequence[Tensor], dims: Sequence[int], axes: Axes) -> PendingTransfer:
        self._note("all_gather", xs, axes)
        return list

    def scatter(self, xs: Sequence[Tensor], dims: Sequence[int], axes: Axes) -> PendingTransfer:
        self._note("reduce_scatter", xs, axes, dims)
        sizes, coords = [self.sizes[a] for a in axes], [self.coords[a] for a in axes]
        return lambda: [x.new_empty(part_shape(x, dim, sizes, coords)) for x, dim in zip(xs, dims, strict=True)]

    def reduce(self, xs: Sequence[Tensor], axes: Axes, *, fresh: bool = False) -> PendingTransfer:
        self._note("all_reduce", xs, axes)
        return lambda: [x.new_empty(x.shape) for x in xs] if fresh else list(xs)


def fake_tensors() -> FakeTensorMode:
    """Return a context in which new tensors have shapes and no values; operations may mix them with real tensors."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def run_on_meta(run: Callable[[Sequence[Tensor]], Sequence[Tensor]], xs: Sequence[Tensor]) -> list[Tensor]:
    """Return fake tensors of the shapes of `run(xs)`; it runs on meta tensors, ten times faster than on fake ones."""
    with without_modes():
        out = run([torch.empty(x.shape, dtype=x.dtype, device="meta") for x in xs])
    return [x.new_empty(y.shape, dtype=y.dtype) for x, y in zip(xs, out, strict=True)]
