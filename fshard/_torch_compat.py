"""Every private or semi-private API of torch that fshard uses, under a public name of our own.

Nothing else in fshard imports a name of torch that begins with an underscore. Each entry says why there is no public
way; `tests/test_torch_compat.py` tests each on its own, and docs/torch.md lists the versions that were run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    peek_interpreter_stack,
)
from torch._functorch import eager_transforms
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes

_P = ParamSpec("_P")
_R = TypeVar("_R")

# --- transforms of torch.func ---------------------------------------------------------------------------------

# torch.func has no public question for "is this tensor wrapped by a transform", nor for the tensor inside.
is_wrapped = is_functorch_wrapped_tensor
is_batched = is_batchedtensor
is_grad_tracking = is_gradtrackingtensor
without_functorch = torch._C._DisableFuncTorch


def unwrapped(x: Tensor) -> Tensor:
    """The plain tensor inside the wrappers of torch.func."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def in_transform() -> bool:
    """Return whether a transform of torch.func is running on this thread."""
    return peek_interpreter_stack() is not None


def set_jvp_nesting(depth: int) -> int:
    """Set how many calls of torch.func.jvp the process believes are running, and return the count before."""
    before, eager_transforms.JVP_NESTING = eager_transforms.JVP_NESTING, depth
    return before


def in_backward() -> bool:
    """Return whether a backward pass of autograd is running on this thread."""
    return torch._C._current_graph_task_id() != -1


# --- dispatch -------------------------------------------------------------------------------------------------

without_dispatch = torch._C._DisableTorchDispatch
disable_dynamo = torch._disable_dynamo  # type: ignore[attr-defined]
functional_collectives = torch.ops._c10d_functional


def assume_constant_result(f: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let dynamo call `f` while it traces and take the result for a constant.

    This is torch.compiler.assume_constant_result without its import of torch._dynamo, which takes 5 seconds.
    """
    f._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return f


# --- tensors and storages -------------------------------------------------------------------------------------


def storage_id(x: Tensor) -> int:
    """An integer that tells one storage from another while both live, empty and fake ones too."""
    return int(x.untyped_storage()._cdata)


def version_of(x: Tensor) -> int:
    """The number of in-place changes of a tensor; -1 for one of inference mode, which does not count them."""
    return -1 if x.is_inference() else x._version


def replace_trunc_normal(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replace the function behind `torch.nn.init.trunc_normal_`, which no mode can intercept; return the former one."""
    former: Callable[..., Tensor] = torch.nn.init._no_grad_trunc_normal_
    torch.nn.init._no_grad_trunc_normal_ = f
    return former


# --- kernels over lists of tensors ----------------------------------------------------------------------------

foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_


# --- torch.distributed ----------------------------------------------------------------------------------------


def backend_of(group: dist.ProcessGroup, device: str) -> Any:
    """The backend of a group for a kind of device. Raises RuntimeError if the group has none for it."""
    return group._get_backend(torch.device(device))


def timeout_of(backend: Any) -> Any:
    """The timeout that a backend was started with."""
    return backend.options._timeout


__all__ = [
    "DataDependentOutputException", "DynamicOutputShapeException", "FakeTensor", "FakeTensorMode", "TorchDispatchMode",
    "assume_constant_result", "backend_of", "eager_transforms", "foreach_copy_", "foreach_div_",
    "functional_collectives", "in_backward", "in_transform", "is_batched", "is_grad_tracking", "is_wrapped",
    "replace_trunc_normal", "set_jvp_nesting", "storage_id", "timeout_of", "unwrapped", "version_of",
    "without_functorch", "without_modes",
]  # fmt: skip
