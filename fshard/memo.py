"""What a computation has saved for its backward, forgotten, and computed again when backward comes to it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from .comm import memory_of
from .errors import fail


class _Held:
    """A tensor that autograd has saved; `x` is None once it is forgotten. It goes with the node it was saved for."""

    __slots__ = ("__weakref__", "shape", "x")

    def __init__(self, x: Tensor, *, forgotten: bool) -> None:
        self.shape = x.shape
        self.x = None if forgotten else x.detach()


class Memo:
    """The saved tensors of one computation. Those in `lasting` memory, which is there anyway, are kept.

    To compute it again stops where the last of them is there: what only gives the results, most often a large product
    and the sum over the ranks behind it, is not done twice.
    """

    def __init__(self, lasting: frozenset[int]) -> None:
        self._lasting = lasting
        self._forgotten: list[weakref.ref[_Held]] = []

    def forgetting(self) -> contextlib.AbstractContextManager[Any]:
        """Within, what is saved is forgotten: nothing that is computed here can take a gradient of it."""
        return saved_tensors_hooks(self._forget, _value)

    def _forget(self, x: Tensor) -> _Held:
        held = _Held(x, forgotten=memory_of(x) not in self._lasting)
        if held.x is None:
            self._forgotten.append(weakref.ref(held))
        return held

    def recall(self, again: Callable[[], Any]) -> None:
        """Call what computes the same again, until all is there that is still wanted."""
        wanted = [held() for held in self._forgotten]
        while wanted and wanted[-1] is None:
            wanted.pop()
        if not wanted:
            return
        rest: Iterator[_Held | None] = iter(wanted)
        last = wanted[-1]
        del wanted

        def take(x: Tensor) -> _Held:
            new = _Held(x, forgotten=False)
            if memory_of(x) in self._lasting:
                return new
            held = next(rest, None)
            if held is not None:
                if held.shape != x.shape:
                    raise fail(f"what is computed again differs: {tuple(held.shape)} before, {tuple(x.shape)} now",
                               fix="a function that is computed again must do the same each time")  # fmt: skip
                held.x = new.x
            if held is last:
                raise _Enough
            return new

        try:
            with saved_tensors_hooks(take, _value):
                again()
        except _Enough:
            return
        raise fail("what is computed again saves fewer tensors than before",
                   fix="a function that is computed again must do the same each time")  # fmt: skip


class _Enough(BaseException):
    """All that was wanted is there."""


def _value(held: _Held) -> Tensor:
    if held.x is None:
        raise RuntimeError(f"a gradient inside of what is to be computed again, where {HOOKS} are set")
    return held.x


HOOKS = "saved tensor hooks"  # the words by which torch, too, says that it cannot do something where they are set


def no_hooks(verb: str) -> None:
    """Raise where saved tensor hooks are set, which do not know that weights leave memory and come back."""
    try:
        with disable_saved_tensors_hooks(verb):
            pass
    except RuntimeError as e:
        raise fail(f"{verb}: called where {HOOKS} are set, as in torch.utils.checkpoint",
                   fix=f"use {verb}(..., remat=True) instead") from e  # fmt: skip


__all__ = ["HOOKS", "Memo", "no_hooks"]
