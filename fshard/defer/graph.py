"""The recorded computation as a graph: nodes are values that never change."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard._core.operations import tensors_in

from .strided_view import Shape, StridedView


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """A value: a shape and a dtype. Two nodes are the same value only if they are one object."""

    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False, slots=True)
class Uninitialized(Node):
    """Memory of `torch.empty`."""


@dataclass(frozen=True, eq=False, slots=True)
class Full(Node):
    """One number in every element."""

    value: Any


@dataclass(frozen=True, eq=False, slots=True)
class Constant(Node):
    """A tensor with values: a literal of the constructor."""

    tensor: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Draw(Node):
    """Random numbers of a distribution of `draw_box`. Every use of one object has the same numbers."""

    distribution: str
    args: tuple[float, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Cast(Node):
    """The source in another dtype."""

    source: Node


@dataclass(frozen=True, eq=False, slots=True)
class View(Node):
    """A strided view of the source."""

    source: Node
    region: StridedView


@dataclass(frozen=True, eq=False, slots=True)
class Reshape(Node):
    """The elements of the source, in their row-major order, in another shape."""

    source: Node


@dataclass(frozen=True, eq=False, slots=True)
class Write(Node):
    """The source, with `value` in a strided region of it."""

    source: Node
    region: StridedView
    value: Node


@dataclass(frozen=True, slots=True)
class InputSlot:
    """Placeholder in a call's arguments for the input at `index`."""

    index: int


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """An operation, its arguments with slots for tensors, and the nodes of these tensors."""

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Node, ...]
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)  # of the recording, for promotion

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of the result, then the inputs, which the operation may have written to."""
        fill = lambda x: tensors[x.index] if isinstance(x, InputSlot) else x  # noqa: E731
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.default_dtype)
        try:
            out = self.func(*tree.map(fill, self.args), **tree.map(fill, self.kwargs))
        finally:
            torch.set_default_dtype(before)
        return [*tensors_in(out), *tensors]


@dataclass(frozen=True, eq=False, slots=True)
class Op(Node):
    """Tensor number `output` in the list that a call's `run` returns."""

    call: Call
    output: int


def computed(name: str, func: Callable[..., Any], shape: Shape, dtype: torch.dtype, *inputs: Node) -> Op:
    """Return the value of `func(*inputs)`."""
    slots = tuple(map(InputSlot, range(len(inputs))))
    return Op(shape, dtype, Call(name, func, slots, {}, inputs), 0)


# --- questions about a graph ----------------------------------------------------------------------------------


def inputs(node: Node) -> tuple[Node, ...]:
    """Return the nodes that a node is computed from, in a fixed order."""
    match node:
        case Write():
            return node.source, node.value
        case Cast() | View() | Reshape():
            return (node.source,)
        case Op():
            return node.call.inputs
    return ()


def topological_order(*roots: Node) -> list[Node]:
    """Return the roots and all nodes that they are computed from, each once and after its inputs."""
    done: dict[int, Node] = {}
    for root in roots:
        stack = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if id(node) in done:
                continue
            if ready:
                done[id(node)] = node
                continue
            stack.append((node, True))
            stack.extend((n, False) for n in reversed(inputs(node)) if id(n) not in done)
    return list(done.values())


def draws(node: Node) -> list[Draw]:
    """Return the draws that a value depends on, in topological order."""
    return [n for n in topological_order(node) if isinstance(n, Draw)]


def step_name(node: Node) -> str:
    """Return a word for a node's kind: its distribution, its operation, or its class."""
    match node:
        case Draw():
            return node.distribution
        case Op():
            return node.call.name.rstrip("_")
    return type(node).__name__.lower()


# --- nodes in their simplest form -----------------------------------------------------------------------------


def view(node: Node, region: StridedView) -> Node:
    if region.is_identity:
        return node
    if isinstance(node, (Full, Uninitialized)):
        return replace(node, shape=region.shape)
    if isinstance(node, Write) and node.region == region:
        return node.value
    return View(region.shape, node.dtype, node, region)


def reshape(node: Node, shape: Shape) -> Node:
    if shape == node.shape:
        return node
    if isinstance(node, Reshape):
        return reshape(node.source, shape)
    if isinstance(node, Full):
        return replace(node, shape=shape)
    return Reshape(shape, node.dtype, node)


def constant(x: Tensor) -> Node:
    if x.numel() == 1 and not x.dtype.is_complex:
        return Full(tuple(x.shape), x.dtype, x.item())
    return Constant(tuple(x.shape), x.dtype, x)


def cast(node: Node, dtype: torch.dtype) -> Node:
    if node.dtype == dtype:
        return node
    if isinstance(node, Full):
        return Full(node.shape, dtype, torch.tensor(node.value, dtype=node.dtype).to(dtype).item())
    return Cast(node.shape, dtype, node)


def write(base: Node, region: StridedView, value: Node) -> Node:
    """Return the base with `value` written to a region, without earlier writes that are overwritten in full."""
    if region.covers:
        return view(value, region.inverse())
    while isinstance(base, Write) and base.region == region:
        base = base.source
    return Write(base.shape, base.dtype, base, region, value)
