"""Two functions of torch that look at numbers, or at Python objects, replaced while a constructor is recorded.

torch looks both up when it calls them. The replacements act on tensors of a recorder of the same thread alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .graph import Draw, Node


class Records(Protocol):
    """What is asked of a recorder."""

    def find(self, x: Tensor) -> Any:
        """What is known of a tensor; None if nothing is."""

    def write(self, x: Tensor, value: Node) -> None:
        """A tensor is overwritten."""


_lock = threading.RLock()
_here = threading.local()  # the recorders of a thread, the innermost last
_torchs: list[tuple[Callable[..., Any], Callable[..., Any]]] = []  # torch's own, once for each recorder at work


@contextlib.contextmanager
def late_bound(recorder: Records) -> Iterator[None]:
    """Let torch's truncated normals be one draw, and a change of dtype be seen, on this recorder's tensors."""
    with _lock:
        _torchs.append(_torchs[0] if _torchs else (nn.init._no_grad_trunc_normal_, torch.utils.swap_tensors))
        nn.init._no_grad_trunc_normal_, torch.utils.swap_tensors = _trunc_normal_, _swap_tensors
    _here.recorders = [*getattr(_here, "recorders", []), recorder]
    try:
        yield
    finally:
        _here.recorders.pop()
        with _lock:
            own = _torchs.pop()
            if not _torchs:
                nn.init._no_grad_trunc_normal_, torch.utils.swap_tensors = own


def _recorder(x: Tensor) -> Records | None:
    found: list[Records] = getattr(_here, "recorders", [])
    return found[-1] if found and found[-1].find(x) is not None else None


def _own(which: int) -> Callable[..., Any]:
    with _lock:  # a thread may have looked a replacement up just before the last recorder was done
        return _torchs[0][which] if _torchs else (nn.init._no_grad_trunc_normal_, torch.utils.swap_tensors)[which]


def _trunc_normal_(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Tensor:
    """torch's draws until every number is in bounds, and looks at them: this is one draw by inverse CDF."""
    recorder = _recorder(tensor)
    if recorder is None:
        out: Tensor = _own(0)(tensor, mean, std, a, b, generator=generator)
        return out
    args = (float(mean), float(std), float(a), float(b))
    recorder.write(tensor, Draw(tuple(tensor.shape), tensor.dtype, "trunc_normal", args))
    return tensor


def _swap_tensors(a: Tensor, b: Tensor) -> None:
    """torch's exchanges two tensors, which those without storage do not let it: `module.half()` needs only this."""
    if _recorder(a) is None or _recorder(b) is None:
        _own(1)(a, b)
        return
    grad = a.requires_grad
    with torch.no_grad():
        a.data, b.data = b.data, a.data
    a.requires_grad_(grad)
