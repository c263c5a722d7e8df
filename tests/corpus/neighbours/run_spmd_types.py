"""Verdicts of spmd_types: its checker and collectives, on all ranks in one process by torch's LocalTensorMode.

Needs an environment of its own: pip install torch==2.13.0 spmd_types optree numpy safetensors rich. Then

    python -m tests.corpus.neighbours.run_spmd_types
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types import _mesh_axis
from spmd_types._checker import _check_backward_loss_type, _SpmdTypeMode
from spmd_types.checker import no_typecheck, typecheck
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode, _LocalContiguous
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fshard import tree
from fshard._core import ops
from fshard._core.ops import Map
from fshard.spec import P, box_shape, local_box
from tests.corpus.neighbours.adapter import Call, MissingError
from tests.corpus.neighbours.verdicts import RefusedError, write

_VMAP, _BACKWARD, _GRAD, _AS_TENSOR = torch.vmap, Tensor.backward, torch.autograd.grad, torch.as_tensor
spmd.register_local_autograd_function(_LocalContiguous)
I, R, V, PARTIAL = spmd.I, spmd.R, spmd.V, spmd.P  # noqa: E741


class SpmdTypes:
    """The collectives of spmd_types under the names of fshard's.

    An argument of a program is V over the axes of its spec and I over the others. `pvary` becomes convert(I, R), after
    which R mixes with V; a sum takes V or P, and gives I.
    """

    def __init__(self, mode: LocalTensorMode | None, groups: dict[str, Any], coords: list[dict[str, int]]) -> None:
        self.mode, self.groups, self.coords = mode, groups, coords
        self.sizes = {a: dist.get_world_size(g) for a, g in groups.items()}
        self._depth = threading.local()

    def on_ranks(self, f: Callable[[int], Tensor], varies: Sequence[str], otherwise: Any = I) -> Tensor:
        """Return the tensor that `f` computes for each rank, of a type that varies over some axes."""
        with no_typecheck():
            x = f(0) if self.mode is None else self.mode.rank_map(f)
        return spmd.assert_type(x, {g: V if a in varies else otherwise for a, g in self.groups.items()})

    def collective(self, m: Map, x: Tensor) -> Tensor:
        # As fshard does: sums of half precision are of float32, and rounded once. spmd_types wants it said.
        wide = {"op_dtype": torch.float32, "out_dtype": x.dtype} if x.dtype.itemsize == 2 else {}
        back = {"backward_options": wide} if wide and x.requires_grad else {}
        axes = [self.groups[a] for a in m.axes]
        match m:
            case ops.Sum():
                for axis in axes:
                    x = spmd.all_reduce(_contiguous(x), axis, src=PARTIAL, dst=I, **wide)
                return x if m.divisor == 1 else x / m.divisor
            case ops.Vary():
                differentiated = x.requires_grad and torch.is_grad_enabled()
                for axis in axes:
                    if differentiated:
                        x = spmd.convert(x, axis, src=I, dst=R, **back)
                    else:
                        x = spmd.reinterpret(x, axis, src=I, dst=V)
                if differentiated:
                    x.register_hook(no_typecheck(_contiguous))
                return x if m.divisor == 1 else x / m.divisor
            case ops.Gather():
                dst = I if isinstance(m, ops.GatherInvariant) else R
                for axis in reversed(axes):
                    x = spmd.all_gather(
                        _contiguous(x), axis, src=spmd.S(m.layout[0][0]), dst=dst, **(back if dst is R else {})
                    )
                    if dst is R and not x.requires_grad:
                        x = spmd.reinterpret(x, axis, src=R, dst=V, expert_mode=True)
                return x
            case ops.Scatter():
                for axis in axes:
                    x = spmd.reduce_scatter(_contiguous(x), axis, src=PARTIAL, dst=spmd.S(m.layout[0][0]), **wide)
                return x
            case ops.Slice():
                _even(m.layout[0][1], m.n)
                for axis in axes:
                    x = spmd.convert(x, axis, src=I, dst=spmd.S(m.layout[0][0]))
                return x
            case ops.AllToAll():
                if len(axes) > 1:
                    raise MissingError("all_to_all over two axes")
                (split, size), (concat, _) = m.split[0], m.concat[0]
                _even(size, m.n)
                return spmd.all_to_all(_contiguous(x), axes[0], src=spmd.S(concat), dst=spmd.S(split))
            case ops.Permute():
                return self._permute(m, x)
        raise MissingError(f"{m.verb} has no counterpart")

    def _permute(self, m: ops.Permute, x: Tensor) -> Tensor:
        """Send along pairs: gather all parts, of which each rank takes that of its source, V -> R -> V."""
        if len(m.axes) > 1:
            raise MissingError("ppermute over two axes")
        (axis,) = m.axes
        source = {target: source for source, target in m.pairs}
        at = self.on_ranks(lambda r: torch.tensor([source.get(self.coords[r][axis], 0)]), m.axes)
        receives = self.on_ranks(lambda r: torch.tensor(self.coords[r][axis] in source), m.axes)
        parts = spmd.all_gather(_contiguous(x), self.groups[axis], src=V, dst=R)
        return torch.where(receives, parts.index_select(0, at).squeeze(0), 0)

    def extremum(self, op: str, axes: tuple[str, ...], tied: bool, x: Tensor) -> Tensor:
        for a in axes:
            whole = spmd.all_gather(_contiguous(x), self.groups[a], src=V, dst=I)
            x = whole.amax(0) if op == "max" else whole.amin(0)
        return x

    def axis_index(self, axes: tuple[str, ...]) -> Tensor:
        def index(rank: int) -> Tensor:
            at = 0
            for a in axes:
                at = at * self.sizes[a] + self.coords[rank][a]
            return torch.tensor(at)

        return self.on_ranks(index, axes)

    def draw(self, draw: Callable[[Any], Tensor], key: Tensor, spec: P) -> Tensor:
        key_type = spmd.get_local_type(key) if spmd.has_local_type(key) else {}
        varies = [a for a, g in self.groups.items() if a in spec.axes or key_type.get(spmd.MeshAxis.of(g)) is V]

        def part(rank: int) -> Tensor:
            own = key._local_tensors[rank] if isinstance(key, LocalTensor) else key
            full = draw(own)
            return full[local_box(tuple(full.shape), spec, self.sizes, self.coords[rank])].clone()

        return self.on_ranks(part, varies)

    def declared(self, loss: Tensor, leaves: Sequence[Tensor]) -> Tensor:
        """Return a loss that varies over an axis, as all leaves do, as the sum over the axis.

        Each rank then has its own problem. The checker refuses such a loss, and its message asks for this declaration.
        """
        for g in self.groups.values():
            varies = spmd.maybe_get_axis_local_type(loss, g) is V
            if varies and all(spmd.maybe_get_axis_local_type(x, g) is not I for x in leaves):
                loss = spmd.reinterpret(loss, g, src=V, dst=PARTIAL)
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward, and give each gradient the type that its leaf's type gives it: P for R."""
        leaves, seen, stack = [], set(), [loss.grad_fn]
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaves += [node.variable] if hasattr(node, "variable") else []
            stack += [following for following, _ in node.next_functions]
        _BACKWARD(loss if args or kwargs.get("gradient") is not None else self.declared(loss, leaves), *args, **kwargs)
        for x in leaves:
            if x.grad is not None:
                _set_gradient_type(x.grad, x)

    def grad(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Differentiate, and give each gradient the type that its input's type gives it.

        The checker takes torch.autograd.grad for an operation of mixed types: check the loss as `backward` does.
        """
        xs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        if isinstance(outputs, Tensor) and not outputs.ndim and not args and kwargs.get("grad_outputs") is None:
            outputs = self.declared(outputs, xs)
            _check_backward_loss_type((outputs,), {})
        with no_typecheck():
            grads = _GRAD(outputs, inputs, *args, **kwargs)
        for grad, x in zip(grads, xs, strict=True):
            if grad is not None:
                _set_gradient_type(grad, x)
        return grads

    def value_and_grad(self, f: Callable[..., Any], argnums: Any = 0, *, has_aux: bool = False) -> Callable[..., Any]:
        numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            outer = getattr(self._depth, "value", 0)
            if outer:
                raise MissingError("a gradient of a gradient")
            leaves, treedef = tree.flatten(tuple(args[i] for i in numbers))
            inputs = [_leaf(x) for x in leaves]
            full = list(args)
            for i, arg in zip(numbers, tree.unflatten(treedef, inputs), strict=True):
                full[i] = arg
            self._depth.value = outer + 1
            try:
                with torch.enable_grad():
                    out = f(*full, **kwargs)
            finally:
                self._depth.value = outer
            loss, aux = out if has_aux else (out, None)
            value = _detached(loss)
            loss = self.declared(loss, inputs)
            if loss.requires_grad:
                loss.backward(inputs=inputs)
            grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
            aux = tree.map(lambda x: _detached(x) if isinstance(x, Tensor) else x, aux)
            result = tree.unflatten(treedef, grads)
            return (value, aux) if has_aux else value, result[0] if isinstance(argnums, int) else result

        return wrapped

    def vmap(self, f: Callable[..., Any], in_dims: Any = 0, out_dims: Any = 0) -> Callable[..., Any]:
        return _VMAP(f, in_dims, out_dims)

    def vjp(self, *_: Any, **__: Any) -> Any:
        raise MissingError("torch.func, of which the collectives have no setup_context")

    jvp = jacobian = hessian = vjp


def _detached(x: Tensor) -> Tensor:
    return x.detach() if x.requires_grad else x


def _leaf(x: Tensor) -> Tensor:
    """Return a leaf of the graph with the value and type of a tensor.

    Without a gradient R and I are alike, and a mixture of both is R. As a leaf such a value is I.
    """
    with no_typecheck():
        y = x.detach().clone().requires_grad_()
    if not spmd.has_local_type(x):
        return y
    return spmd.assert_type(y, {a: I if t is R else t for a, t in spmd.get_local_type(x).items()})


def _method(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that becomes a method of a tensor where it is an attribute of the class."""

    def method(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return f(x, *args, **kwargs)

    return method


def _set_gradient_type(grad: Tensor, x: Tensor) -> None:
    if spmd.has_local_type(x) and not spmd.has_local_type(grad):
        spmd.assert_type(grad, {a: t.backward_type() for a, t in spmd.get_local_type(x).items()})


def _as_tensor(x: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Return torch.as_tensor of a number by torch.tensor, of whose result the checker knows that all ranks have it."""
    return torch.tensor(x, *args, **kwargs) if isinstance(x, (bool, int, float)) else _AS_TENSOR(x, *args, **kwargs)


def _annotated(x: Any) -> Any:
    """Return a tensor from outside of the region with the type I, as a user writes in strict mode."""
    if not isinstance(x, Tensor) or spmd.has_local_type(x):
        return x
    with no_typecheck():
        y = x.detach()
    return spmd.assert_type(y, I)


def _check_annotated(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    args, kwargs = torch.utils._pytree.tree_map(_annotated, (args, kwargs))
    return _check(mode, func, types, args, kwargs)


_check, _SpmdTypeMode._typecheck_core = _SpmdTypeMode._typecheck_core, _check_annotated


def _contiguous(x: Tensor) -> Tensor:
    """Return a contiguous tensor, which the collectives and their backward passes need.

    `LocalTensor.contiguous` is an autograd Function that the checker does not know.
    """
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def _even(size: int, n: int) -> None:
    if size % n:
        raise MissingError("a dim that the axis does not divide")


def run(call: Call) -> list[Any] | None:
    """Run a program on all ranks in one process, and return the leaves of its result.

    LocalTensorMode cannot turn a tensor that differs between ranks into a Python number. A program that does is checked
    on rank 0 alone, where collectives return no numbers, and the result is None.
    """
    try:
        return _run(call, all_ranks=True)
    except (AttributeError, TypeError, AssertionError) as e:
        if not any(words in str(e) for words in ("LocalIntNode", "LocalTensor", "must be equal for all ranks")):
            raise
    _run(call, all_ranks=False)
    return None


def _run(call: Call, all_ranks: bool) -> list[Any]:
    live = {a: n for a, n in call.sizes.items() if n > 1}
    for x, spec in zip([*call.leaves, *call.expected], [*call.specs, *call.out_specs], strict=True):
        if isinstance(x, Tensor):
            for n, axes in zip(x.shape, spec.parts(x.ndim), strict=True):
                _even(n, math.prod([call.sizes[a] for a in axes]))
    world = math.prod(live.values())
    dist.init_process_group(backend="fake", rank=0, world_size=world, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", tuple(live.values()), mesh_dim_names=tuple(live))
        groups = {a: mesh.get_group(a) for a in live}
        coords = []
        for rank in range(world):
            at = torch.unravel_index(torch.tensor(rank), tuple(live.values()))
            coords.append({**dict.fromkeys(call.sizes, 0), **dict(zip(live, map(int, at), strict=True))})
        ranks = LocalTensorMode(world) if all_ranks else contextlib.nullcontext()
        with ranks as mode, spmd.set_current_mesh(mesh), typecheck():
            system = SpmdTypes(mode, groups, coords)
            leaves = [
                system.on_ranks(lambda r, x=x, s=s: x[local_box(tuple(x.shape), s, call.sizes, coords[r])].clone(),
                                s.axes) if isinstance(x, Tensor) else x
                for x, s in zip(call.leaves, call.specs, strict=True)
            ]  # fmt: skip
            with (mock.patch.object(Tensor, "backward", _method(system.backward)),
                  mock.patch.object(torch.autograd, "grad", system.grad),
                  mock.patch.object(torch, "as_tensor", _as_tensor)):  # fmt: skip
                out = call.run(system, leaves)
            for x, spec in zip(out, call.out_specs, strict=True):
                if isinstance(x, Tensor) and spmd.has_local_type(x):
                    _check_result(x, spec, groups)
        if not all_ranks:
            return []
        return [_joined(x, y, s, call, coords) for x, y, s in zip(out, call.expected, call.out_specs, strict=True)]
    except (spmd.SpmdTypeError, ValueError) as e:
        if "is not registered for SPMD type checking" in str(e):
            raise MissingError("an autograd Function of the program: spmd_types asks for its rule") from e
        if not isinstance(e, spmd.SpmdTypeError) and "src" not in str(e) and "reinterpret" not in str(e):
            raise  # an error of the program or the adapter, and not of the types
        raise RefusedError(str(e)) from e
    except RuntimeError as e:
        if "functorch transform" in str(e):
            raise MissingError("a gradient inside torch.vmap: the collectives have no setup_context") from e
        raise
    finally:
        dist.destroy_process_group()
        _mesh_axis._reset()


def _check_result(x: Tensor, spec: P, groups: dict[str, Any]) -> None:
    """Assert the type that an out spec gives a result: V over its axes, R or I over the others."""
    for a, g in groups.items():
        found = spmd.maybe_get_axis_local_type(x, g)
        if found is not None and not (a not in spec.axes and found in (R, I)):
            spmd.assert_type(x, {g: V if a in spec.axes else I})


def _joined(x: Any, expected: Any, spec: P, call: Call, coords: list[dict[str, int]]) -> Any:
    """Return the full tensor of all ranks' parts; NaN where ranks that should be equal differ."""
    if not isinstance(expected, Tensor):
        return x
    full = torch.zeros(expected.shape, dtype=torch.complex128 if expected.is_complex() else torch.float64)
    filled = torch.zeros(expected.shape, dtype=torch.bool)
    for rank, at in enumerate(coords):
        box = local_box(tuple(expected.shape), spec, call.sizes, at)
        part = (x._local_tensors[rank] if isinstance(x, LocalTensor) else x).detach().to(full.dtype)
        if tuple(part.shape) != box_shape(box):
            return torch.empty(0)  # another shape than expected
        differs = filled[box] & ~torch.isclose(full[box], part, rtol=1e-3, atol=1e-5, equal_nan=True)
        full[box] = part.where(~differs, math.inf)
        filled[box] = True
    return full


if __name__ == "__main__":
    write("spmd_types", ["spmd_types", "torch"], run)
