"""Operations of torch, as a dispatch mode sees them: the tensors of a call, and the arguments that it writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .torch import TorchDispatchMode, never_traced, schema_of


def tensors_in(*values: Any) -> list[Tensor]:
    """Return the tensors among some values, and those in their lists, tuples and dicts."""
    found: list[Tensor] = []
    for x in values:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            found += tensors_in(*x) if x else ()
        elif isinstance(x, dict) and x:
            found += tensors_in(*x.values())
    return found


def written_arguments(func: Any) -> list[tuple[int, Any]]:
    """Return the position and the schema of each argument that an operation (an OpOverload) writes."""
    arguments = enumerate(schema_of(func).arguments)
    return [(i, a) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


_DEVICE_OF = torch.ops.prim.device.default


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that runs each operation by its method `run_operation`, which dynamo does not trace."""

    def run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and return its result."""
        raise NotImplementedError

    def _dispatch(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF and hasattr(args[0], "fake_device"):  # which autograd asks more often than it computes
            return args[0].fake_device
        return self.run_operation(func, args, kwargs or {})


# A __torch_dispatch__ in the class body would be wrapped by torch: the first operation would import dynamo for seconds.
OperationMode.__torch_dispatch__ = never_traced(OperationMode._dispatch)  # type: ignore[assignment,method-assign]
