"""What a computation has saved for its backward, forgotten, and computed again when backward comes to it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from fshard._comm import storage_key, transfer_count
from fshard._torch_compat import version_of
from fshard.errors import ShardingError, fail
from fshard.spec import short_dtype


class _Held:
    """A tensor that autograd has saved; `x` is None once it is forgotten. It goes with the node it was saved for."""

    __slots__ = ("__weakref__", "kind", "version", "x")

    def __init__(self, x: Tensor) -> None:
        self.kind = x.shape, x.dtype
        self.keep(x)

    def keep(self, x: Tensor) -> None:
        self.x: Tensor | None = x.detach()
        self.version = version_of(x)


class Memo:
    """The saved tensors of one computation. Those in `lasting` memory, which is there anyway, are kept.

    To compute it again stops where the last of them is there: what only gives the results, most often a large product,
    is not done twice. But never before its last transfer: another rank may need what comes of that.
    """

    def __init__(self, lasting: frozenset[int]) -> None:
        self._lasting = lasting
        self._forgotten: list[weakref.ref[_Held]] = []
        self._transfers = 0

    @contextlib.contextmanager
    def forgetting(self) -> Iterator[None]:
        """Within, what is saved is forgotten: nothing that is computed here can take a gradient of it."""
        start = transfer_count()
        with saved_tensors_hooks(self._forget, _value):
            yield
        self._transfers = transfer_count() - start

    def _forget(self, x: Tensor) -> _Held:
        held = _Held(x)
        if storage_key(x) not in self._lasting:
            held.x = None
            self._forgotten.append(weakref.ref(held))
        return held

    def recall(self, again: Callable[[], Any]) -> None:
        """Call what computes the same again, until all is there that is still wanted."""
        wanted = [held() for held in self._forgotten]
        while wanted and wanted[-1] is None:
            wanted.pop()
        if not wanted and not self._transfers:
            return
        rest, end, missing = iter(wanted), transfer_count() + self._transfers, len(wanted)
        del wanted

        def take(x: Tensor) -> _Held:
            nonlocal missing
            new = _Held(x)
            if missing and storage_key(x) not in self._lasting:
                held = next(rest)
                missing -= 1
                if held is not None:
                    if held.kind != new.kind:
                        raise _differs(f"{_words(held)} before, {_words(new)} now")
                    held.keep(x)
            if not missing and transfer_count() >= end:
                raise _Enough
            return new

        with contextlib.suppress(_Enough), saved_tensors_hooks(take, _value):
            again()
        if missing:
            raise _differs(f"it saves {missing} tensors fewer than before")


class _Enough(BaseException):
    """All that was wanted is there."""


def _differs(how: str) -> ShardingError:
    return fail(f"what is computed again differs: {how}",
                fix="a function that is computed again must do the same each time")  # fmt: skip


def _words(held: _Held) -> str:
    shape, dtype = held.kind
    return f"{short_dtype(dtype)}[{', '.join(map(str, shape))}]"


def _value(held: _Held) -> Tensor:
    if held.x is None:
        raise RuntimeError(f"a gradient inside of what is to be computed again, where {HOOKS} are set")
    if version_of(held.x) != held.version:
        raise fail(f"{_words(held)}: needed for the gradient, and modified by an inplace operation since",
                   fix="x = x * 2 for x.mul_(2)")  # fmt: skip
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
