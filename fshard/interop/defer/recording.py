"""Recording a whole constructor, what reads memory without an operation included."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fshard._torch_compat import FakeTensorMode

from .late import late_bound
from .record import Recorder, refuse


class Asking(TorchFunctionMode):
    """What reads a tensor's memory without an operation."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = _ASKED.get(func)
        if rule is not None and args and isinstance(args[0], Tensor) and self.recorder.find(args[0]) is not None:
            return rule(self.recorder, *args, **kwargs)
        return func(*args, **kwargs)


def _arrayed(recorder: Recorder, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    out = recorder.value(x, ".numpy()").numpy()
    out.flags.writeable = False  # a write to it would not reach the tensor
    return out if not args else out.astype(args[0])


def _addressed(recorder: Recorder, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    raise refuse("data_ptr() asks where a tensor without storage lies")


def _copied(recorder: Recorder, x: Tensor, memo: dict[int, Any]) -> Tensor:
    """`Tensor.__deepcopy__`, whose own would copy a storage unseen."""
    if id(x) not in memo:
        with torch.no_grad():
            out = x.detach().clone(memory_format=torch.preserve_format)
        if isinstance(x, nn.Parameter):
            out = nn.Parameter(out, requires_grad=x.requires_grad)
        extra = {k: v for k, v in vars(x).items() if k not in vars(out)}
        vars(out).update(copy.deepcopy(extra, memo))
        memo[id(x)] = out.requires_grad_(x.requires_grad)
    found: Tensor = memo[id(x)]
    return found


_ASKED: dict[Any, Callable[..., Any]] = {
    Tensor.numpy: _arrayed, Tensor.__array__: _arrayed, Tensor.data_ptr: _addressed,
    Tensor.__deepcopy__: _copied,
}  # fmt: skip


@contextmanager
def recording(budget: int) -> Iterator[Recorder]:
    """Record the operations of this thread."""
    recorder = Recorder(budget)
    with ExitStack() as stack:
        stack.enter_context(late_bound(recorder))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(recorder)
        stack.enter_context(Asking(recorder))
        yield recorder
