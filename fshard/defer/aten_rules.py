"""Rules for aten operations: the values of tensors that they allocate, overwrite or draw."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard._core.operations import tensors_in, written_arguments
from fshard._core.torch import schema_of, without_modes

from .distributions import MAX_RANDINT_RANGE, distribution_of
from .graph import Call, Draw, Full, InputSlot, Node, Op, Uninitialized, cast, computed, view, write
from .replay import is_pointwise
from .strided_view import Shape, broadcast_view, row_major_strides, strided_view

Values = dict[str, Any]  # argument name -> value, of one call of an operation


def values_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Values:
    """Return the arguments of a call by name, with defaults."""
    values = {a.name: None if a.name == "dtype" else a.default_value for a in schema_of(func).arguments}
    return {**values, **dict(zip(values, args, strict=False)), **kwargs}


class AtenCall:
    """One call of an aten operation, before it is known to be a node."""

    def __init__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], node_of: Callable[[Tensor], Node]
    ) -> None:
        self.generator = explicit_generator(kwargs.get("generator"))
        self.func, self.args, self.node_of = func, args, node_of
        self.kwargs = {k: None if k == "generator" else x for k, x in kwargs.items()}
        self.full_name = schema_of(func).name.split("::")[-1]
        self.name = self.full_name.rstrip("_") if self.full_name[0] != "_" else self.full_name
        self.inplace = self.full_name.endswith("_") and not self.full_name.endswith("__")

    @functools.cached_property
    def arguments(self) -> Values:
        return values_of(self.func, self.args, self.kwargs)

    @property
    def inputs(self) -> list[Tensor]:
        return list({id(x): x for x in tensors_in(self.args, self.kwargs)}.values())

    def call(self) -> Call:
        """Return the call with nodes in place of tensors."""
        slots = {id(x): InputSlot(i) for i, x in enumerate(self.inputs)}
        args, kwargs = tree.map(lambda x: slots.get(id(x), x), (self.args, self.kwargs))
        kwargs.pop("pin_memory", None)
        return Call(self.full_name, self.func, args, kwargs, tuple(map(self.node_of, self.inputs)))


def written_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to, by its schema."""
    if schema_of(func).name == "aten::native_batch_norm":  # the running statistics are not in its schema
        return [x for x in args[3:5] if isinstance(x, Tensor) and args[5]]
    return tensors_in(*(args[i] if i < len(args) else kwargs.get(a.name) for i, a in written_arguments(func)))


# --- tensors that an operation allocates or overwrites --------------------------------------------------------

_EMPTY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
_FULL = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_VALUE = {"full": "fill_value", "full_like": "fill_value", "new_full": "fill_value", "scalar_tensor": "s"}
_COPY = ("clone", "_to_copy", "lift_fresh", "lift", "lift_fresh_copy", "contiguous", "detach_copy", "alias_copy")


def new_value(op: AtenCall, shape: Shape, dtype: torch.dtype) -> Node:
    """Return the value of the one new tensor that an operation returns."""
    if op.name in _EMPTY:
        return Uninitialized(shape, dtype)
    if op.name in _FULL:
        return _full(shape, dtype, _FULL[op.name])
    if op.name in _VALUE:
        return _full(shape, dtype, op.arguments[_VALUE[op.name]])
    if op.name in _COPY or (op.name == "constant_pad_nd" and not any(op.args[1])):
        return cast(op.node_of(op.args[0]), dtype)
    if op.name in ("cat", "stack"):
        return _concatenated(op, shape, dtype)
    return fold_constant(Op(shape, dtype, op.call(), 0))


def _full(shape: Shape, dtype: torch.dtype, value: Any) -> Full:
    if not dtype.is_complex:
        with without_modes():
            value = torch.tensor(value, dtype=dtype).item()
    return Full(shape, dtype, value)


def _concatenated(op: AtenCall, shape: Shape, dtype: torch.dtype) -> Node:
    """Return `cat` or `stack` as writes to slices, so that a box needs only the parts that overlap it."""
    dim, start, stacked = op.arguments["dim"] % len(shape), 0, op.name == "stack"
    out: Node = Full(shape, dtype, 0)
    strides = row_major_strides(shape)
    for x in op.arguments["tensors"]:
        if 0 in x.shape:  # torch also takes an empty tensor of another number of dims
            continue
        along = [s for d, s in enumerate(strides) if d != dim or not stacked]
        region = strided_view(shape, strides, tuple(x.shape), along, start * strides[dim])
        assert region is not None
        out = write(out, region, cast(op.node_of(x), dtype))
        start += 1 if stacked else x.shape[dim]
    return out


def overwriting_value(op: AtenCall, target: Tensor) -> Node | None:
    """Return the new value of an operation's target. None: it depends on the old value."""
    shape, dtype = tuple(target.shape), target.dtype
    if op.name == "zero":
        return _full(shape, dtype, 0)
    if op.name == "eye":  # eye(n, out=target)
        return Op(shape, dtype, Call("eye", torch.eye, shape, {"dtype": dtype}, ()), 0)
    if op.name in ("fill", "copy"):
        value = op.args[1]
        if not isinstance(value, Tensor):
            return _full(shape, dtype, value)
        node = cast(op.node_of(value), dtype)
        return view(node, broadcast_view(node.shape, shape))
    return None


def fold_constant(node: Op) -> Node:
    """Return a `Full` for an elementwise operation on `Full` inputs; else the node itself."""
    call = node.call
    numbers = [n for n in call.inputs if isinstance(n, Full)]
    if not numbers or len(numbers) < len(call.inputs) or not is_pointwise(node) or node.dtype.is_complex:
        return node
    with without_modes(), torch.no_grad():
        # One element with the same number of dims: dtypes are promoted differently for tensors without dims.
        out = call.run([torch.full((1,) * len(n.shape), n.value, dtype=n.dtype) for n in numbers])[node.output]
    return Full(node.shape, node.dtype, out.to(node.dtype).item())


# --- draws ----------------------------------------------------------------------------------------------------


def drawn_by_position(op: AtenCall, shape: Shape, dtype: torch.dtype) -> Node | None:
    """Return a value whose elements are each drawn by their position. None: no distribution is known for it."""
    if op.name == "bernoulli":
        p = op.arguments["self"] if op.arguments.get("p") is None else op.arguments["p"]
        return _bernoulli(op.node_of(p) if isinstance(p, Tensor) else float(p), shape, dtype)
    found = distribution_of(op.name, op.arguments, dtype)
    if found is None:
        return None
    name, *numbers = found
    if name == "randint":
        return Draw(shape, dtype, name, (*numbers,)) if 0 < numbers[1] - numbers[0] <= MAX_RANDINT_RANGE else None
    given = any(isinstance(x, Tensor) for x in numbers)
    if dtype.is_complex and name in ("uniform", "normal"):  # a normal one has half of the variance in each part
        if given or op.name == "uniform" or (name == "normal" and numbers[0]):
            return None
        return Draw(shape, dtype, name, (0.0, 1.0 if name == "uniform" else numbers[1] / math.sqrt(2)))
    if not dtype.is_floating_point and name not in ("geometric", "randperm"):
        return None
    if given:
        return _normal(op, numbers[0], numbers[1], shape, dtype)
    is_constant = (name == "uniform" and numbers[0] >= numbers[1]) or (name == "normal" and not numbers[1])
    return _full(shape, dtype, numbers[0]) if is_constant else Draw(shape, dtype, name, (*numbers,))


def _normal(op: AtenCall, mean: Any, std: Any, shape: Shape, dtype: torch.dtype) -> Node:
    """Return a normal value whose mean, standard deviation or both are tensors."""
    node: Node = Draw(shape, dtype, "normal", (0.0, 1.0))
    for func, other in ((torch.ops.aten.mul, std), (torch.ops.aten.add, mean)):
        if isinstance(other, Tensor):
            node = computed(func.__name__, func.Tensor, shape, dtype, node, cast(op.node_of(other), dtype))
        else:
            node = Op(shape, dtype, Call(func.__name__, func.Scalar, (InputSlot(0), other), {}, (node,)), 0)
    return node


def _bernoulli(p: Node | float, shape: Shape, dtype: torch.dtype) -> Node:
    if isinstance(p, float):
        return Draw(shape, dtype, "bernoulli", (p,))
    u = Draw(shape, torch.float64, "uniform", (0.0, 1.0))
    return cast(computed("lt", torch.ops.aten.lt.Tensor, shape, torch.bool, u, p), dtype)


# --- draws of a torch.Generator -------------------------------------------------------------------------------

SEEDS = (0, 1 << 32)


def explicit_generator(generator: torch.Generator | None) -> torch.Generator | None:
    """Return a generator whose numbers a constructor asks for; None for torch's default and for other devices."""
    if generator is None or generator is torch.default_generator:
        return None
    return generator if generator.device.type == "cpu" else None


def generated(
    name: str, draw: Callable[..., Tensor], shape: Shape, dtype: torch.dtype, inputs: tuple[Node, ...], seed: Node
) -> Op:
    """Return the value of `draw(generator, *inputs)`, computed in full. Output 1 is the generator's state after it.

    seed: the state of the generator (uint8), or a number to seed it with
    """

    def run(seed: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        generator = torch.Generator()
        if seed.ndim:
            generator.set_state(seed)
        else:
            generator.manual_seed(int(seed))
        return draw(generator, *tensors), generator.get_state()

    return computed(name, run, shape, dtype, seed, *inputs)


def generated_value(op: AtenCall, shape: Shape, dtype: torch.dtype, seed: Node) -> Op | None:
    """Return the value that an operation draws from a generator. None: it takes no generator."""
    if "generator" not in op.arguments:
        return None
    # The order of the numbers depends on the strides of a tensor that is overwritten, and not on its old value.
    strides = op.args[0].stride() if op.inplace else ()
    func, inplace = op.func, op.inplace
    call = AtenCall(func, op.args[inplace:], op.kwargs, op.node_of).call()

    def draw(generator: torch.Generator, *tensors: Tensor) -> Tensor:
        target = [torch.empty_strided(shape, strides, dtype=dtype)] if inplace else []
        kwargs = {**call.kwargs, "generator": generator}
        return replace(call, func=functools.partial(func, *target), kwargs=kwargs).run(tensors)[0]

    return generated(op.name, draw, shape, dtype, call.inputs, seed)
