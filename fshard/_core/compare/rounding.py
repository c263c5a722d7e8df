"""Other roundings: every float of a program with other last bits, to measure how much of a result is only rounding."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fshard._core.operations import OperationMode, tensors_in, written_arguments
from fshard._core.torch import schema_of

# The last bits are replaced by a hash of the bits above them. So equal values stay equal, the order stays, and a value
# with such bits keeps them where it is copied, gathered, compared or the largest: only operations that round make new
# ones. Numbers with few bits, such as 0, 1, a count, a power of 2, infinity or NaN, are exact most times and
# stay, so no value becomes infinite or NaN.
#
# Of each dtype: the bits of the fraction, how many of them are replaced, and integers of its size. An operation sums
# half precision in float32 and rounds once: 1 bit. A sum in float32 rounds at each term, within one operation: 2 bits.
_BITS = {
    torch.float64: (52, 2, torch.int64), torch.float32: (23, 2, torch.int32), torch.float16: (10, 1, torch.int16),
    torch.bfloat16: (7, 1, torch.int16), torch.float8_e5m2: (2, 1, torch.uint8),
    torch.float8_e4m3fn: (3, 1, torch.uint8),
}  # fmt: skip
_MULTIPLIER = {torch.int64: 0x1E3779B97F4A7C15, torch.int32: 0x1E3779B1, torch.int16: 0x1E37, torch.uint8: 0x2D}


def reround(x: Any, key: int) -> Any:
    """Return a tensor of floats with other last bits, by `key`; anything else unchanged.

    Keys 2k and 2k + 1 replace the bits by opposite ones, so that the two results differ by 1 unit in the last place (or
    3) in each value.
    """
    if isinstance(x, Tensor) and _is_float(x):
        x = x.detach().clone(memory_format=torch.contiguous_format)
        _reround_(x, key)
    return x


def _is_float(x: Tensor) -> bool:
    return x.dtype in _BITS or x.is_complex()


def _reround_(x: Tensor, key: int) -> None:
    if x.is_complex():
        x = torch.view_as_real(x)
    fraction, count, integer = _BITS[x.dtype]
    bits = x.view(integer)
    # A multiplication modulo 2^n mixes the bits upwards: one in the middle depends on all below it.
    new = bits.bitwise_right_shift(count).mul_(_MULTIPLIER[integer] * (key | 1) % 2 ** (8 * x.element_size() - 1))
    new.bitwise_right_shift_(4 * x.element_size())
    change = new.bitwise_xor_(bits)  # in its last `count` bits
    if key % 2:
        change.bitwise_not_()
    change.bitwise_and_((1 << count) - 1)
    change.mul_((bits & ((1 << fraction // 2) - 1)).ne_(0))
    if x.dtype == torch.float8_e4m3fn:
        change.mul_((bits & 0x7F).ne_(0x7F))  # NaN, the only one with bits to the last
    bits.bitwise_xor_(change)


class OtherRounding(OperationMode):
    """Replace the last bits of what every operation computes, forward and backward: see `reround`."""

    def __init__(self, key: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key = key

    def run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        view, written = _effects(func)
        changed = [args[i] if i < len(args) else kwargs.get(name) for i, name in written]
        for x in tensors_in(changed if written else () if view else out):
            if _is_float(x) and not x.is_conj():
                _reround_(x, self.key)
        return out


@functools.cache
def _effects(func: Any) -> tuple[bool, list[tuple[int, str]]]:
    """Return if an operation returns a view or computes nothing, and the positions and names of what it writes."""
    if func.namespace not in ("aten", "prims"):  # a transfer; its sums are separate operations
        return True, []
    schema = schema_of(func)
    if schema.name == "aten::_efficientzerotensor":  # zeros without memory, of forward-mode differentiation
        return True, []
    written = [(i, a.name) for i, a in written_arguments(func)]
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns), written
