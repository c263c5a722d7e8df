"""The tensors that are being differentiated: those to which a gradient of autograd or of torch.func can flow.

A plain tensor shows by itself that it requires a gradient. What torch.func differentiates is a wrapper around a plain
tensor, and the modes below torch.func see only the plain one. So a mode above torch.func notes, for each function of
torch, which plain tensors are inside wrappers that require a gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fshard._core.operations import tensors_in
from fshard._core.torch import innermost_transform, level_of, transform_level, unwrapped, unwrapped_once

from .types import Operand

_TENSOR: Any = Tensor
_GRAD, _BACKWARD, _BACKWARD_OF_SEVERAL = torch.autograd.grad, Tensor.backward, torch.autograd.backward
_SET_GRAD, _SET_DATA = _TENSOR.grad.__set__, _TENSOR.data.__set__


class BackwardChecks(Protocol):
    """Checks before and after a backward pass; inputs of `None` are all leaves of the graph."""

    def check_loss(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor] | None) -> None: ...

    def check_gradients(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> None: ...

    def check_accumulated(self, leaves: Sequence[Tensor]) -> None: ...

    def set_data(self, x: Tensor, data: Tensor) -> None: ...


class Differentiated(TorchFunctionMode):
    """A mode that knows, while a function of torch runs, which of its plain tensors are being differentiated.

    Levels: autograd is level 0, transforms of torch.func are levels 1, 2, ... from the outermost. In a backward pass
    that is itself differentiated (create_graph), the operations of that backward count only for the levels that begin
    inside it: a missing sum of a gradient was found in the forward pass.
    """

    def __init__(self, checks: BackwardChecks) -> None:
        super().__init__()
        self._checks = checks
        self._lowest = 0  # level
        # By id, with the tensors themselves: an id can be used again as soon as its tensor is freed.
        self.inside: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _GRAD:
            return self._grad(*args, **(kwargs or {}))
        if func is _BACKWARD:
            return self._backward(*args, **(kwargs or {}))
        if func is _BACKWARD_OF_SEVERAL:
            return self._backward_of_several(*args, **(kwargs or {}))
        if func == _SET_GRAD and args[1] is not None:
            self._checks.check_accumulated(args[:1])
        if func == _SET_DATA:
            self._checks.set_data(*args)
        if innermost_transform() is None:
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        tensors = tensors_in(args, kwargs) if torch.is_grad_enabled() else ()
        before, self.inside = self.inside, {id(y): y for y in map(unwrapped, filter(self, tensors))}
        try:
            return func(*args, **kwargs)
        finally:
            self.inside = before

    def __call__(self, x: Tensor) -> bool:
        """Return whether a gradient can flow to a tensor, as the user's code has it: wrapped or not."""
        if not torch.is_grad_enabled():
            return False
        while True:
            level = level_of(x)
            if x.requires_grad and level >= self._lowest:
                return True
            if level == 0:
                return id(x) in self.inside
            x = unwrapped_once(x)

    def is_inside(self, x: Tensor) -> bool:
        """Return whether a plain tensor is inside a wrapper of torch.func through which a gradient flows."""
        return bool(self.inside) and id(x) in self.inside

    def follow(self, operands: Sequence[Operand], out: Tensor) -> None:
        """Note a result of an operation inside the function of torch that runs now."""
        if self.inside and any(id(o.tensor) in self.inside for o in operands):
            self.inside[id(out)] = out

    # --- backward passes ---

    def _grad(self, outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        create_graph = args[1] if len(args) > 1 else kwargs.get("create_graph", False)
        ys, xs = tensors_in(outputs), tensors_in(inputs)
        if grad_outputs is None:
            self._checks.check_loss(ys, xs)
        with self._backward_pass(create_graph):
            grads = torch.autograd.grad(outputs, inputs, grad_outputs, *args, **kwargs)
        if grad_outputs is None:
            self._checks.check_gradients(ys, xs, list(grads.values() if isinstance(grads, dict) else grads))
        return grads

    def _backward(
        self, outputs: Any, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False,
        inputs: Any = None,
    ) -> None:  # fmt: skip
        ys, xs = tensors_in(outputs), None if inputs is None else tensors_in(inputs)
        leaves = [x for y in ys for x in leaves_of(y)] if xs is None else xs
        self._checks.check_accumulated(leaves)
        if gradient is None:
            self._checks.check_loss(ys, xs)
        with self._backward_pass(create_graph):
            torch.autograd.backward(outputs, gradient, retain_graph, create_graph, inputs=inputs)
        if gradient is None:
            self._checks.check_gradients(ys, leaves, [x.grad if x.is_leaf else None for x in leaves])

    def _backward_of_several(
        self, tensors: Any, grad_tensors: Any = None, retain_graph: Any = None, create_graph: bool = False,
        grad_variables: Any = None, inputs: Any = None,
    ) -> None:  # fmt: skip
        self._backward(tensors, grad_tensors, retain_graph, create_graph, inputs)

    @contextlib.contextmanager
    def _backward_pass(self, create_graph: bool) -> Iterator[None]:
        before = self._lowest, self.inside
        self._lowest, self.inside = (transform_level() + 1 if create_graph else 0), {}
        try:
            yield
        finally:
            self._lowest, self.inside = before


def leaves_of(x: Tensor) -> list[Tensor]:
    """Return the leaves of the graph of a tensor that requires a gradient."""
    if x.is_leaf:
        return [x]
    stack, seen, leaves = [x.grad_fn], {None, x.grad_fn}, []
    while stack:
        node = stack.pop()
        leaf = getattr(node, "variable", None)
        leaves += [] if leaf is None else [leaf]
        new = [n for n in dict.fromkeys(n for n, _ in getattr(node, "next_functions", ())) if n not in seen]
        seen.update(new)
        stack += new
    return leaves
