"""What torch's operations mean: which make memory, which overwrite it, which draw and by which law."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fshard._torch_compat import without_dispatch

from .evaluate import is_pointwise
from .graph import Call, Draw, Full, Node, Op, Shape, Slot, Unwritten, cast, read, swap
from .laws import WORDS
from .window import identity, window_of


class Meaning:
    """One call of an operation: its name, its arguments by name, and the nodes of those that are tensors."""

    def __init__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], node: Callable[[Tensor], Node]
    ) -> None:
        self.func, self.args, self.kwargs, self.node = func, args, kwargs, node
        self.full_name = func._schema.name.split("::")[-1]
        self.name = self.full_name.rstrip("_") if self.full_name[0] != "_" else self.full_name
        self.inplace = self.full_name.endswith("_") and not self.full_name.endswith("__")

    @property
    def gives_tensors(self) -> bool:
        return any(isinstance(r.type, torch.TensorType) or "Tensor" in str(r.type) for r in self.func._schema.returns)

    @functools.cached_property
    def named(self) -> dict[str, Any]:
        """The arguments by the names of the schema, left out ones by their defaults."""
        out = {}
        for at, a in enumerate(self.func._schema.arguments):
            out[a.name] = self.args[at] if at < len(self.args) else self.kwargs.get(a.name, a.default_value)
        return out

    def call(self) -> Call:
        """The call, of the nodes of its tensors. It runs on the CPU, or where its tensors are."""
        slots: dict[int, Slot] = {}
        inputs: list[Node] = []

        def put(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if id(x) not in slots:
                slots[id(x)] = Slot(len(inputs))
                inputs.append(self.node(x))
            return slots[id(x)]

        args, kwargs = swap(self.args, put), swap(self.kwargs, put)
        kwargs.pop("pin_memory", None)
        return Call(self.full_name, self.func, args, kwargs, tuple(inputs))

    def op(self, shape: Shape, dtype: torch.dtype) -> Op:
        """What it gives, as one more step."""
        if self.name == "eye":  # its rule needs no arguments
            return Op(shape, dtype, Call("eye", torch.eye, shape, {}, ()), 0)
        return Op(shape, dtype, self.call(), 0)


# --- memory ---------------------------------------------------------------------------------------------------

_EMPTY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
_FULL = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_VALUE = {"full": "fill_value", "full_like": "fill_value", "new_full": "fill_value", "scalar_tensor": "s"}
_SAME = ("clone", "_to_copy", "lift_fresh", "lift", "lift_fresh_copy", "contiguous", "detach_copy", "alias_copy")


def made(op: Meaning, shape: Shape, dtype: torch.dtype) -> Node:
    """The value of the tensor that an operation makes."""
    if op.name in _EMPTY:
        return Unwritten(shape, dtype)
    if op.name in _FULL:
        return _full(shape, dtype, _FULL[op.name])
    if op.name in _VALUE:
        return _full(shape, dtype, op.named[_VALUE[op.name]])
    if op.name in _SAME or (op.name == "constant_pad_nd" and not any(op.args[1])):
        return cast(op.node(op.args[0]), dtype)
    return folded(op.op(shape, dtype))


def _full(shape: Shape, dtype: torch.dtype, value: Any) -> Full:
    return Full(shape, dtype, torch.tensor(value, dtype=dtype).item() if not dtype.is_complex else value)


def overwritten(op: Meaning, target: Tensor) -> Node | None:
    """The value of a tensor that an operation overwrites; None if what was there matters."""
    shape, dtype = tuple(target.shape), target.dtype
    if op.name == "zero":
        return _full(shape, dtype, 0)
    if op.name in ("fill", "copy"):
        value = op.args[1]
        if not isinstance(value, Tensor):
            return _full(shape, dtype, value)
        return _spread(cast(op.node(value), dtype), shape)
    return None


def _spread(node: Node, shape: Shape) -> Node:
    window = window_of("expand", node.shape, shape, 0, (), {})
    return read(node, [window or identity(shape)])


def folded(node: Op) -> Node:
    """The step itself, or one number where it is elementwise and all it is made of is one number."""
    call = node.call
    plain = is_pointwise(node) and all(isinstance(n, Full) for n in call.inputs)
    if not plain or not call.inputs or node.dtype.is_complex:
        return node
    with without_dispatch(), torch.no_grad():
        # One element of each, with as many dims: numbers and tensors of no dims promote differently.
        one = [torch.full((1,) * len(n.shape), n.value, dtype=n.dtype) for n in call.inputs if isinstance(n, Full)]
        found = call.run(one)[node.out]
    return Full(node.shape, node.dtype, found.to(node.dtype).item())


# --- draws ----------------------------------------------------------------------------------------------------

_UNIFORM = ("uniform", "rand", "rand_like")
_NORMAL = ("normal", "randn", "randn_like", "normal_functional")
_RANDINT = ("random", "randint", "randint_like")


def drawn(op: Meaning, shape: Shape, dtype: torch.dtype) -> Node | None:
    """The value of a tensor that is drawn; None if there is no law for it."""
    given = op.named
    if op.name in _RANDINT:
        return _integers(op, shape, dtype)
    if op.name == "randperm":
        return Draw(shape, dtype, "randperm", ())
    if op.name == "bernoulli":
        p = given.get("p", given["self"]) if "p" in given else given["self"]
        return _bernoulli(op.node(p) if isinstance(p, Tensor) else float(p), shape, dtype)
    if not dtype.is_floating_point and op.name != "geometric":
        return None
    if op.name in _UNIFORM:
        low, high = (given["from"], given["to"]) if op.name == "uniform" else (0.0, 1.0)
        return Draw(shape, dtype, "uniform", (low, high)) if low < high else _full(shape, dtype, low)
    if op.name in _NORMAL:
        return _normal(op, shape, dtype)
    if op.name == "exponential":
        return Draw(shape, dtype, "exponential", (given["lambd"],))
    if op.name == "log_normal":
        return Draw(shape, dtype, "log_normal", (given["mean"], given["std"]))
    if op.name == "cauchy":
        return Draw(shape, dtype, "cauchy", (given["median"], given["sigma"]))
    if op.name == "geometric":
        return Draw(shape, dtype, "geometric", (given["p"],))
    return None


def _normal(op: Meaning, shape: Shape, dtype: torch.dtype) -> Node:
    mean, std = op.named.get("mean", 0.0), op.named.get("std", 1.0)
    if not isinstance(mean, Tensor) and not isinstance(std, Tensor):
        return Draw(shape, dtype, "normal", (mean, std)) if std else _full(shape, dtype, mean)
    node: Node = Draw(shape, dtype, "normal", (0.0, 1.0))
    for func, by in ((torch.ops.aten.mul, std), (torch.ops.aten.add, mean)):
        if isinstance(by, Tensor):
            other = cast(op.node(by), dtype)
            node = Op(shape, dtype, Call(func.__name__, func.Tensor, (Slot(0), Slot(1)), {}, (node, other)), 0)
        else:
            node = Op(shape, dtype, Call(func.__name__, func.Scalar, (Slot(0), by), {}, (node,)), 0)
    return node


def _bernoulli(p: Node | float, shape: Shape, dtype: torch.dtype) -> Node:
    if isinstance(p, float):
        return Draw(shape, dtype, "bernoulli", (p,))
    word = Draw(shape, torch.float64, "uniform", (0.0, 1.0))
    less = Op(shape, torch.bool, Call("lt", torch.ops.aten.lt.Tensor, (Slot(0), Slot(1)), {}, (word, p)), 0)
    return cast(less, dtype)


def _integers(op: Meaning, shape: Shape, dtype: torch.dtype) -> Node | None:
    """randint(low, high), random_(from, to), random_(to), random_(): up to the largest exact integer of the dtype."""
    given = op.named
    low = given.get("low", given.get("from", 0)) or 0
    high = given.get("high", given.get("to"))
    if high is None:
        high = 2 ** (1 - round(math.log2(torch.finfo(dtype).eps))) if dtype.is_floating_point else \
            2 if dtype == torch.bool else torch.iinfo(dtype).max + 1  # fmt: skip
        high += dtype.is_floating_point
    return Draw(shape, dtype, "randint", (low, high)) if 0 < high - low <= WORDS else None
