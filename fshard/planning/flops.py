"""Work of an operation of torch: its kind, its FLOPs, and the bytes that it reads and writes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fshard._operations import tensors_in, written_arguments
from fshard._torch_compat import schema_of

from .events import Kind

_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "_scaled_mm", "_int_mm"}
_COPIES = {"_to_copy", "clone", "copy_", "copy", "_foreach_copy_", "cat", "stack", "constant_pad_nd", "fill_", "zero_",
           "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones",
           "new_full"}  # fmt: skip
_LOOKUPS = {"embedding", "index", "index_select", "gather"}  # read as many bytes as they write
_OVERWRITE = {"copy_", "fill_", "zero_", "_foreach_copy_", "normal_", "uniform_"}  # do not read what they write
_STEPS = {"_fused_adamw_", "_fused_adam_", "_fused_sgd_"}  # in place: shapes alone need not run them


def name_of(op: Any) -> str:
    """Name of an operation (an OpOverload) without its namespace: `mm`."""
    return str(op.overloadpacket.__name__)


@functools.cache
def kind_of(op: Any) -> Kind:
    """Return the kind of an operation."""
    name = name_of(op)
    if name in _MATMULS:
        return "matmul"
    if "attention" in name:
        return "attention"
    if "convolution" in name:
        return "convolution"
    return "copy" if name in _COPIES or name.startswith(("empty", "new_empty")) else "elementwise"


@functools.cache
def is_view(op: Any) -> bool:
    """Return whether the results of an operation are views of its arguments, so that it computes nothing."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema_of(op).returns)


def is_optimizer_step(op: Any) -> bool:
    """Return whether an operation is a kernel of an optimizer, which allocates nothing."""
    return name_of(op) in _STEPS


def flops_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the FLOPs of a matmul, a convolution or an attention, a multiply-add as two; 0 for any other operation.

    Attention counts all of [T, S], as torch's counters do, also where half of it is masked.
    """
    formula = _formula(op)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


@functools.cache
def _formula(op: Any) -> Callable[..., int] | None:
    return _OWN.get(name_of(op)) or flop_registry.get(op.overloadpacket)


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    b, h, t, d = q.shape  # two products for each query, key and dim
    return 2 * b * h * t * k.shape[-2] * (d + v.shape[-1])


def _attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    b, h, t, d = q.shape  # the scores again, then the gradients of scores, q, k and v
    return 2 * b * h * t * k.shape[-2] * (3 * d + 2 * v.shape[-1])


def _product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel()


def _added_product(x: Tensor, a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel()


# The kernels of the CPU, and products with vectors, which torch's registry lacks.
_OWN: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "mv": _product, "dot": _product, "vdot": _product, "addmv": _added_product,
}  # fmt: skip


@functools.cache
def _written(op: Any) -> tuple[int, ...]:
    return tuple(i for i, _ in written_arguments(op))


@functools.cache
def _written_names(op: Any) -> tuple[str, ...]:
    return tuple(a.name for _, a in written_arguments(op))


def written_by(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments of an operation that it writes."""
    at = [args[i] for i in _written(op) if i < len(args)]
    return tensors_in(at, [kwargs.get(name) for name in _written_names(op)])


def bytes_of(op: Any, inputs: Sequence[Tensor], written: Sequence[Tensor], new: Sequence[Tensor]) -> int:
    """Return the bytes that an operation reads and writes; an expanded dim is read once."""
    name, out = name_of(op), sum(map(_bytes, new)) + sum(map(_bytes, written))
    if name.startswith(("empty", "new_empty")):
        return 0
    if name in _LOOKUPS:
        return 2 * out + sum(_bytes(x) for x in inputs if not x.is_floating_point())
    overwritten = sum(map(_bytes, written)) if name in _OVERWRITE else 0
    return sum(map(_bytes, inputs)) - overwritten + out


def _bytes(x: Tensor) -> int:
    sizes = [n for n, stride in zip(x.shape, x.stride(), strict=True) if stride or not n]
    return math.prod(sizes) * x.element_size()


def dtype_of(inputs: Sequence[Tensor], new: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype that an operation computes in: that of its first floating tensor, if there is one."""
    tensors = [*inputs, *new]
    floating = (x.dtype for x in tensors if x.is_floating_point() or x.is_complex())
    return next(floating, tensors[0].dtype if tensors else torch.get_default_dtype())
