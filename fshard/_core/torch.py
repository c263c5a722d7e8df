"""Every private or semi-private API of torch that fshard uses, each under a public name.

Nothing else in fshard uses a name of torch that begins with an underscore, or that is in such a module. Each entry
explains why there is no public way; `tests/_core/test_torch.py` tests each separately, on torch 2.13 to 2.15.
"""

from __future__ import annotations

import fshard._core.torch_version  # noqa: F401  first: where a name below is missing, its warning explains why

# isort: split
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._C._functorch import get_unwrapped as unwrapped_once
from torch._C._functorch import is_batchedtensor as is_batched
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch._C._functorch import is_legacy_batchedtensor as is_legacy_batched
from torch._C._functorch import maybe_get_level
from torch._C._functorch import peek_interpreter_stack as innermost_transform
from torch._functorch import eager_transforms
from torch._subclasses import fake_tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes as without_modes

_P = ParamSpec("_P")
_R = TypeVar("_R")
_F = TypeVar("_F", bound=Callable[..., Any])

# --- transforms of torch.func -----------------------------------------------------------------------------------------

# torch.func does not show publicly if a tensor is wrapped by a transform (`is_wrapped`, `is_batched`), which one, what
# is inside (`unwrapped_once`), nor the innermost transform on this thread, if one runs (`innermost_transform`).

# Tensors made inside a transform are wrapped, and a collective cannot send those.
without_functorch = torch._C._DisableFuncTorch


def unwrapped(x: Tensor) -> Tensor:
    """Return the plain tensor inside the wrappers of torch.func."""
    while is_wrapped(x):
        x = unwrapped_once(x)
    return x


def is_grad_tracking(x: Tensor) -> bool:
    """Return whether a transform that differentiates wrapped a tensor: grad, vjp, jvp."""
    return is_wrapped(x) and not is_batched(x)


def level_of(x: Tensor) -> int:
    """Return the level of the transform of torch.func that wrapped a tensor; 0 for a plain one, -2 after its end."""
    return maybe_get_level(x) if is_wrapped(x) else 0


def transform_level() -> int:
    """Return the number of transforms of torch.func that are running on this thread, one inside the other."""
    innermost = innermost_transform()
    return 0 if innermost is None else innermost.level()


def in_transform() -> bool:
    """Return whether a transform of torch.func is running on this thread."""
    return innermost_transform() is not None


def set_jvp_nesting(depth: int) -> int:
    """Set the number of calls of torch.func.jvp that the process takes to be running; return the number before.

    torch counts them for the process and not for each thread, so ranks that are threads need the count to be above 0.
    """
    before, eager_transforms.JVP_NESTING = eager_transforms.JVP_NESTING, depth
    return before


def has_tangent(x: Tensor) -> bool:
    """Return whether a tensor has a tangent of torch.autograd.forward_ad.

    An open level proves nothing: a simulated mesh opens one.
    """
    return forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


def any_tangent(xs: Iterable[Tensor]) -> bool:
    """Return whether one of some tensors has a tangent. Without an open level, which is usual, none is asked."""
    return forward_ad._current_level >= 0 and any(map(has_tangent, xs))


# torch turns tangents off inside the jvp of an autograd.Function, also for outer levels.
with_tangents = functools.partial(forward_ad._set_fwd_grad_enabled, True)


def replace_dual_levels(enter: Callable[..., Any], leave: Callable[..., Any]) -> tuple[Any, Any]:
    """Replace the functions that `torch.autograd.forward_ad.dual_level` calls; return the former ones.

    torch has one level for the process and not one for each thread, so ranks that are threads share one.
    """
    former = forward_ad.enter_dual_level, forward_ad.exit_dual_level
    forward_ad.enter_dual_level, forward_ad.exit_dual_level = enter, leave
    return former


# The vmap of `is_grads_batched=True` and `vectorize=True` is older than torch.func's. It has other batched tensors
# (`is_legacy_batched`), which an autograd.Function takes for tensors without a gradient.


def without_legacy_batch(x: Tensor) -> Tensor:
    """Return the plain tensor in a batched one of level 1, with the batch as its dim 0."""
    return torch._remove_batch_dim(x, 1, 1, 0)


def with_legacy_batch(x: Tensor) -> Tensor:
    """Return a tensor whose dim 0 is the batch of level 1."""
    return torch._add_batch_dim(x, 0, 1)


def is_traced() -> bool:
    """Return whether operations are recorded, to be repeated later: by make_fx, torch.export, linearize, jit.trace."""
    return get_proxy_mode() is not None or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def replace_reparametrize_module(f: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the context manager with which torch.func.functional_call swaps parameters; return the former one.

    It writes to the module, which ranks that are threads share, and no mode or hook sees that.
    """
    stateless = torch.nn.utils.stateless
    former: Callable[..., Any] = stateless._reparametrize_module
    stateless._reparametrize_module = f
    return former


def in_backward() -> bool:
    """Return whether a backward pass of autograd is running on this thread."""
    return torch._C._current_autograd_node() is not None


# Autograd numbers the nodes of a graph in the order of the forward pass. The public way to the line of a node, anomaly
# mode, makes the text of a traceback for each of them.
def backward_number() -> int | None:
    """Return the number of the node that a backward pass on this thread runs; None outside a backward pass."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def next_number() -> int:
    """Return the number that the next node gets which an operation makes on this thread."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


# --- operations -------------------------------------------------------------------------------------------------------

FakeTensor = fake_tensor.FakeTensor
FakeTensorMode = fake_tensor.FakeTensorMode


@functools.cache
def _is_composite(func: Any) -> bool:
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def view_of_fake(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return `func(*args)`, a view of the fake tensor `args[0]`: by torch's kernel for views, a sixth of the time.

    FakeTensorMode first looks for a result that it knows, by facts of all arguments. Other tensors take its way, and
    so do operations made of others, as `Tensor.to` is.
    """
    x = args[0]
    if type(x) is not FakeTensor or x.constant is not None or x.layout is not torch.strided or _is_composite(func):
        return func(*args, **kwargs)
    with fake_tensor.in_kernel_invocation_manager(x.fake_mode):
        out = func(*args, **kwargs)
    if isinstance(out, Tensor):
        return FakeTensor(x.fake_mode, out, x.fake_device)
    return type(out)(FakeTensor(x.fake_mode, y, x.fake_device) for y in out)


# A dispatch mode that reads a size of a tensor would call the modes above torch.func, if these were not off.
without_torch_function = torch._C.DisableTorchFunction


@contextlib.contextmanager
def suspended(operations: TorchDispatchMode, functions: TorchFunctionMode) -> Iterator[None]:
    """Leave a mode of operations and one of functions of torch: to pass through them costs three times an operation.

    A mode that another one was entered above stays, and sees what runs.
    """
    has_operations = _get_current_dispatch_mode() is operations
    has_functions = _get_current_function_mode() is functions  # type: ignore[no-untyped-call]
    # Not by their `__exit__`, whose flags belong to the process: ranks that are threads leave their modes in any order.
    if has_operations:
        _pop_mode()
    if has_functions:
        _pop_function_mode()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if has_operations:
            _push_mode(operations)
        if has_functions:
            _push_function_mode(functions)  # type: ignore[no-untyped-call]


# The functions of torch.distributed write to their arguments; torch.compile traces these, which return new tensors.
functional_collectives = torch.ops._c10d_functional

# `Tensor.copy_` of each pair starts a kernel for each; there is no public form of this one for a list.
foreach_copy_ = torch._foreach_copy_

# The kernel of torch.optim.AdamW(fused=True), by which each leaf's number of the step is a tensor: the same one here.
# `torch.optim.adamw.adamw` adds 1 to each, and sorts the leaves by device: ten times the price for small leaves.
fused_adamw_ = torch._fused_adamw_


# The kernels behind torch.nn.functional.scaled_dot_product_attention, which does not return the log-sum-exp. The
# second one, for CUDA, pads it to a multiple of 32 queries.
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention
efficient_attention_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward


def is_summed_in_place(x: Tensor) -> bool:
    """Return whether autograd adds to `x` in place, the first argument of a sum that a mode sees it compute.

    The engine does so to a gradient that nothing else refers to, but under a mode: of the references counted here, one
    is the engine's, and one its storage's.
    """
    tensors = x._use_count()  # type: ignore[attr-defined]
    return bool(tensors == 4 and torch._C._storage_Use_Count(x.untyped_storage()._cdata) == 2)


# torch's recurrent layers choose it on CUDA. A plan for a GPU runs it on shapes, where torch would choose oneDNN's.
cudnn_rnn = torch._cudnn_rnn


def convolution_backend(x: Tensor, w: Tensor, args: Sequence[Any]) -> str:
    """Return what computes a convolution: "mkldnn", "slow" (torch's) or "other"; `args` are from the strides on."""
    found = torch._C._select_conv_backend(x, w, None, *args)
    name = found.name.lower()  # oneDNN's transposed convolution has no name
    return "mkldnn" if name.startswith(("mkldnn", "???")) else "slow" if name.startswith("slow") else "other"


def schema_of(op: Any) -> Any:
    """Return the schema of an operation (an OpOverload): its arguments and results, and which of them it writes."""
    return op._schema


def never_traced(f: _F) -> _F:
    """Keep dynamo from tracing a function and all that it calls.

    torch.compiler.disable imports torch._dynamo, and costs more at each call than a small operation. Here the code
    object is marked, and a call costs nothing.
    """
    strategy = eval_frame._FrameExecStrategy()
    strategy.cur_action = strategy.recursive_action = type(strategy.cur_action).SKIP
    eval_frame.set_code_exec_strategy(f.__code__, strategy)
    return f


def assume_constant_result(f: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let dynamo call `f` while it traces and take the result for a constant.

    This is torch.compiler.assume_constant_result without its import of torch._dynamo, which takes 5 seconds.
    """
    f._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return f


def named_as(f: Callable[..., Any]) -> Callable[[_F], _F]:
    """Give a function the name of `f`: functools.wraps without the docstring, for functions that dynamo traces.

    In Python 3.14 and later dynamo takes the first constant of a function for its docstring, even if it is a slice.
    """
    return functools.wraps(f, assigned=("__module__", "__name__", "__qualname__"))  # type: ignore[return-value]


def replace_trunc_normal(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replace the function behind `torch.nn.init.trunc_normal_`, which no mode can intercept; return the former one."""
    former: Callable[..., Tensor] = torch.nn.init._no_grad_trunc_normal_
    torch.nn.init._no_grad_trunc_normal_ = f
    return former


# --- tensors and storages ---------------------------------------------------------------------------------------------


def storage_id(x: Tensor) -> int:
    """Return an integer that differs for two storages while both live, also for empty and fake ones."""
    return int(x.untyped_storage()._cdata)


def version_of(x: Tensor) -> int:
    """Return the number of in-place changes of a tensor; -1 for one of inference mode, which does not count them."""
    return -1 if x.is_inference() else x._version


def is_view(x: Tensor) -> bool:
    """Return whether a tensor is a view of another one."""
    return x._is_view()


# --- torch.distributed ------------------------------------------------------------------------------------------------


def backend_of(group: dist.ProcessGroup, device: str) -> Any:
    """Return the backend of a group for a kind of device. Raises RuntimeError if the group has none for it."""
    return group._get_backend(torch.device(device))


def timeout_of(backend: Any) -> Any:
    """Return the timeout that a backend was started with: groups made later do not inherit it."""
    return backend.options._timeout


def group_named(name: str) -> Any:
    """Return the process group of a name: functional collectives take the name, messages of two ranks the group."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def default_store() -> Any:
    """Return the store of the group of all ranks, also if another program initialized torch.distributed."""
    return dist.distributed_c10d._get_default_store()


__all__ = [
    "FakeTensor", "FakeTensorMode", "TorchDispatchMode", "any_tangent", "assume_constant_result", "backend_of",
    "backward_number", "convolution_backend", "cudnn_rnn", "default_store", "efficient_attention",
    "efficient_attention_backward", "flash_attention", "flash_attention_backward", "foreach_copy_",
    "functional_collectives", "fused_adamw_", "group_named", "has_tangent", "in_backward", "in_transform",
    "innermost_transform", "is_batched", "is_grad_tracking", "is_legacy_batched", "is_summed_in_place", "is_traced",
    "is_view", "is_wrapped", "level_of", "named_as", "never_traced", "next_number", "replace_dual_levels",
    "replace_reparametrize_module", "replace_trunc_normal", "schema_of", "set_jvp_nesting", "storage_id", "suspended",
    "timeout_of", "transform_level", "unwrapped", "unwrapped_once", "version_of", "view_of_fake", "with_legacy_batch",
    "with_tangents", "without_functorch", "without_legacy_batch", "without_modes", "without_torch_function",
]  # fmt: skip
