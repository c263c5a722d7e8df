"""Activation checkpointing of one block: discard its saved tensors after forward, recompute them before backward.

torch.utils.checkpoint does not serve here: it does not notice a saved tensor that is modified in place, and its early
stop may skip transfers that other ranks wait for.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from fshard._core.torch import version_of
from fshard._core.transfers import recomputing, stop_after_transfers, transfer_count
from fshard.errors import ShardingError, fail
from fshard.spec import short_dtype


class UnderHooksError(ShardingError):
    """A computation that cannot run where saved tensor hooks are set."""


class SavedTensor:
    """A tensor that autograd saved, alive as long as its node; `x` is None while the tensor is discarded."""

    __slots__ = ("__weakref__", "dtype", "shape", "version", "x")

    def __init__(self, x: Tensor) -> None:
        self.shape, self.dtype = x.shape, x.dtype
        self.set(x)

    def set(self, x: Tensor) -> None:
        self.x: Tensor | None = x.detach()
        self.version = version_of(x)

    def get(self) -> Tensor:
        if self.x is None:
            raise UnderHooksError("a gradient was computed inside a block whose saved tensors are discarded")
        if version_of(self.x) != self.version:
            raise fail(f"{self}: saved for the gradient, and modified by an inplace operation afterwards",
                       fix="x = x * 2 for x.mul_(2)")  # fmt: skip
        return self.x

    def __str__(self) -> str:
        return f"{short_dtype(self.dtype)}[{', '.join(map(str, self.shape))}]"


class DiscardedTensors:
    """The saved tensors of one computation, discarded until `recompute`.

    Tensors that are saved after the last transfer are kept. So the recomputation stops before that transfer, on every
    rank: ranks may save different tensors, but all start the same transfers, and no rank may wait for a transfer that
    another rank skips. It also stops before a large product whose result only that transfer needs: at the last saved
    tensor that backward needs. Without transfers all are discarded.
    """

    def __init__(self) -> None:
        self._saved: list[weakref.ref[SavedTensor]] = []
        self._transfers = 0

    @contextlib.contextmanager
    def discard(self) -> Iterator[None]:
        """Discard the tensors that autograd saves in this context: no gradient can be computed inside it."""
        before = count = transfer_count()
        recent: list[tuple[weakref.ref[SavedTensor], Tensor | None]] = []  # saved after the latest transfer

        def discard_recent() -> None:
            self._saved += [saved for saved, _ in recent]
            recent.clear()

        def save(x: Tensor) -> SavedTensor:
            nonlocal count
            if transfer_count() > count:
                count = transfer_count()
                discard_recent()
            saved = SavedTensor(x)
            recent.append((weakref.ref(saved), saved.x if count > before else None))
            saved.x = None
            return saved

        with saved_tensors_hooks(save, SavedTensor.get):
            yield
        self._transfers = transfer_count() - before
        if transfer_count() > count or not self._transfers:
            discard_recent()
        for ref, x in recent:
            if (saved := ref()) is not None:
                saved.x = x

    def recompute(self, run: Callable[[], Any]) -> None:
        """Call `run`, which repeats the computation, until every saved tensor that is still needed is recomputed."""
        repeated = max(self._transfers - 1, 0)
        if not repeated and all(saved() is None for saved in self._saved):
            return
        last_repeated = transfer_count() + repeated
        with stop_after_transfers(repeated, _StopRecomputation):
            refill(self._saved, run, lambda: transfer_count() >= last_repeated)


def refill(
    discarded: Sequence[weakref.ref[SavedTensor]], run: Callable[[], Any], may_stop: Callable[[], bool],
    halfway: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """Call `run`, which repeats a computation, to fill its discarded tensors that are still needed.

    Call `halfway` when half are filled. Stop when all are filled and `may_stop()` is true.
    """
    needed = [saved() for saved in discarded]
    while needed and needed[-1] is None:
        needed.pop()
    count = 0

    def save(x: Tensor) -> SavedTensor:
        nonlocal count
        new = SavedTensor(x)
        if count < len(needed):
            old, needed[count] = needed[count], None
            count += 1
            if old is not None:
                if (old.shape, old.dtype) != (new.shape, new.dtype):
                    raise _differs(f"{old} in forward, {new} in backward")
                old.set(x)
            if halfway is not None and count == (len(needed) + 1) // 2:
                halfway()
        if count == len(needed) and may_stop():
            raise _StopRecomputation
        return new

    with contextlib.suppress(_StopRecomputation), recomputing(), saved_tensors_hooks(save, SavedTensor.get):
        run()
    if count < len(needed):
        raise _differs(f"it saved {len(needed) - count} tensors fewer than in forward")


class _StopRecomputation(BaseException):
    """Raised when all saved tensors that are needed are recomputed, and all transfers except the last are started."""


def _differs(how: str) -> ShardingError:
    return fail(f"a recomputed block differs from its forward pass: {how}",
                fix="a function that is recomputed must do the same operations each time")  # fmt: skip


def needs_saved_tensors(e: Exception) -> bool:
    """Return whether an error means that a computation cannot run where its saved tensors are discarded.

    torch.func raises a plain RuntimeError. Do not run a block again after another error: its transfers would wait for
    ranks that had no error.
    """
    return isinstance(e, UnderHooksError) or "saved tensor hooks" in str(e)


def autocast_of(device: str) -> Callable[[], torch.autocast]:
    """Return a function that enters the present autocast again."""
    kind = device if torch.amp.is_autocast_available(device) else "cpu"
    options = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()
    return functools.partial(torch.autocast, kind, *options)


def under_saved_tensor_hooks() -> bool:
    """Return whether saved tensor hooks are set."""
    try:
        with disable_saved_tensors_hooks("scan"):
            return False
    except RuntimeError:
        return True


def refuse_saved_tensor_hooks(verb: str) -> None:
    """Raise if saved tensor hooks are set: they do not know that weights are freed and gathered again."""
    if under_saved_tensor_hooks():
        message = fail(f"{verb}: called where saved tensor hooks are set, as in torch.utils.checkpoint",
                       fix=f"use {verb}(..., remat=True) instead")  # fmt: skip
        raise UnderHooksError(str(message))
