"""What a constructor did, as a pure graph: nodes for values, and how views are read and written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .window import Window

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """A value: a shape and a dtype. Nodes never change; two nodes are the same value only if they are one object."""

    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False, slots=True)
class Unwritten(Node):
    """Memory that nothing has been written to."""


@dataclass(frozen=True, eq=False, slots=True)
class Full(Node):
    """One number everywhere."""

    value: Any


@dataclass(frozen=True, eq=False, slots=True)
class Constant(Node):
    """A tensor that is there: a literal of the constructor."""

    tensor: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Draw(Node):
    """Random numbers by one of the laws of `laws`. One object is one draw, whoever uses it."""

    law: str
    args: tuple[float, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Cast(Node):
    """The source in another dtype."""

    source: Node


@dataclass(frozen=True, eq=False, slots=True)
class View(Node):
    """What a window shows of the source."""

    source: Node
    window: Window


@dataclass(frozen=True, eq=False, slots=True)
class Reshape(Node):
    """The elements of the source, in their row-major order, in another shape."""

    source: Node


@dataclass(frozen=True, eq=False, slots=True)
class Write(Node):
    """The source, with `value` in place of what a window shows of it."""

    source: Node
    window: Window
    value: Node


@dataclass(frozen=True, slots=True)
class Slot:
    """Where in a call's arguments its input of this number stands."""

    at: int


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """An operation, its arguments with slots for tensors, and its inputs. `run` gives [*results, *inputs]."""

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Node, ...]
    default: torch.dtype = field(default_factory=torch.get_default_dtype)  # as it was: numbers promote to it

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of the result, then those given, which the operation may have written to."""
        fill = lambda x: tensors[x.at] if isinstance(x, Slot) else x  # noqa: E731
        before = torch.get_default_dtype()
        if before != self.default:
            torch.set_default_dtype(self.default)
        try:
            out = self.func(*swap(self.args, fill), **swap(self.kwargs, fill))
        finally:
            if before != self.default:
                torch.set_default_dtype(before)
        return [*(x for x in flat(out) if isinstance(x, Tensor)), *tensors]


@dataclass(frozen=True, eq=False, slots=True)
class Op(Node):
    """One of the tensors that a call gives."""

    call: Call
    out: int


def swap(x: Any, to: Callable[[Any], Any]) -> Any:
    """Nested lists, tuples and dicts with every leaf replaced."""
    if isinstance(x, (list, tuple)):
        return type(x)(swap(y, to) for y in x) if type(x) in (list, tuple) else tuple(swap(y, to) for y in x)
    if isinstance(x, dict):
        return {k: swap(y, to) for k, y in x.items()}
    return to(x)


def flat(x: Any) -> Iterator[Any]:
    """The leaves of nested lists, tuples and dicts."""
    if isinstance(x, (list, tuple)):
        for y in x:
            yield from flat(y)
    elif isinstance(x, dict):
        yield from flat(list(x.values()))
    else:
        yield x


# --- looking at a graph ---------------------------------------------------------------------------------------


def inputs(node: Node) -> tuple[Node, ...]:
    """The nodes that a node is made of, in a fixed order."""
    match node:
        case Write():
            return node.source, node.value
        case Cast() | View() | Reshape():
            return (node.source,)
        case Op():
            return node.call.inputs
    return ()


def order(*roots: Node) -> list[Node]:
    """All nodes that the roots are made of and the roots, each once and after those it is made of."""
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
    """The draws a value depends on, in the order of the data flow."""
    return [n for n in order(node) if isinstance(n, Draw)]


def named(node: Node) -> str:
    """What kind of step a node is, in a word."""
    match node:
        case Draw():
            return node.law
        case Op():
            return node.call.name.rstrip("_")
    return type(node).__name__.lower()


# --- views ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Other:
    """A view that is no window: operation `func`, of whose results this is number `out`."""

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: int
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class Flat:
    """A view of another shape on elements in the same row-major order."""

    shape: Shape


Step = Window | Flat | Other


def extend(steps: tuple[Step, ...], step: Step) -> tuple[Step, ...]:
    """One more view on a chain of views."""
    if steps and isinstance(step, Window) and isinstance(steps[-1], Window):
        return (*steps[:-1], steps[-1].then(step))
    return (*steps, step)


def read(node: Node, steps: Sequence[Step]) -> Node:
    """What a chain of views shows of a value."""
    for step in steps:
        node = _read(node, step)
    return node


def _read(node: Node, step: Step) -> Node:
    if isinstance(step, Window):
        return view(node, step)
    if isinstance(step, Flat):
        return reshape(node, step.shape)
    call = Call(step.name, step.func, (Slot(0), *step.args), step.kwargs, (node,))
    return Op(step.shape, step.dtype, call, step.out)


def view(node: Node, window: Window) -> Node:
    """The value a window shows."""
    if window.covers and window.dims == tuple(range(len(window.base))):
        return node
    if isinstance(node, (Full, Unwritten)):
        return Full(window.shape, node.dtype, node.value) if isinstance(node, Full) else \
            Unwritten(window.shape, node.dtype)  # fmt: skip
    if isinstance(node, View):
        return view(node.source, node.window.then(window))
    return View(window.shape, node.dtype, node, window)


def reshape(node: Node, shape: Shape) -> Node:
    """The value in another shape."""
    if shape == node.shape:
        return node
    if isinstance(node, Reshape):
        return reshape(node.source, shape)
    if isinstance(node, Full):
        return Full(shape, node.dtype, node.value)
    return Reshape(shape, node.dtype, node)


def constant(x: Tensor) -> Node:
    """The value that a tensor is."""
    if x.numel() == 1 and not x.dtype.is_complex:
        return Full(tuple(x.shape), x.dtype, x.item())
    return Constant(tuple(x.shape), x.dtype, x)


def cast(node: Node, dtype: torch.dtype) -> Node:
    """The value in a dtype."""
    if node.dtype == dtype:
        return node
    if isinstance(node, Full):
        return Full(node.shape, dtype, torch.tensor(node.value, dtype=node.dtype).to(dtype).item())
    return Cast(node.shape, dtype, node)


def write(base: Node, steps: Sequence[Step], value: Node) -> Node:
    """The base after `value` has been written where a chain of views shows it. What is lost is not kept."""
    if not steps:
        return value
    first, rest = steps[0], steps[1:]
    if rest:
        value = write(_read(base, first), rest, value)
    if isinstance(first, Window):
        if first.covers:
            return view(value, first.inverse())
        return Write(base.shape, base.dtype, base, first, value)
    if isinstance(first, Flat):
        return reshape(value, base.shape)

    def put(x: Tensor, y: Tensor) -> Tensor:
        seen = [t for t in flat(first.func(x, *first.args, **first.kwargs)) if isinstance(t, Tensor)]
        seen[first.out].copy_(y)
        return x

    return Op(base.shape, base.dtype, Call(f"write {first.name}", put, (Slot(0), Slot(1)), {}, (base, value)), 0)
