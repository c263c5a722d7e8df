"""Verdicts of JAX: `shard_map(check_vma=True)` on CPU devices, the program's torch run on JAX arrays by torchax.

Needs an environment of its own: pip install torch==2.13.0 jax torchax optree numpy safetensors rich. Then

    python -m tests.corpus.neighbours.run_jax
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=16 --xla_backend_optimization_level=0"

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.sharding import PartitionSpec
from torch import Tensor
from torch._ops import OpOverloadPacket

import fshard as fs
from fshard import tree
from fshard._core import ops
from fshard._core.ops import Map
from fshard.grad import fill_tensors, split_tensors
from fshard.spec import P
from tests.corpus.neighbours.adapter import Call, MissingError
from tests.corpus.neighbours.verdicts import RefusedError, write


def _import_torchax() -> Any:
    """Import torchax 0.0.13, which names overloads (of named dims) that torch 2.13 no longer has."""
    original: Any = OpOverloadPacket.__getattr__

    def overload(self: Any, name: str) -> Any:
        try:
            return original(self, name)
        except AttributeError:
            if "imname" in name or "names" in name:
                return (str(self), name)
            raise

    OpOverloadPacket.__getattr__ = overload
    try:
        import torchax
        import torchax.decompositions
        from torchax.ops import jaten, jc10d, jtorch, jtorchvision_nms  # noqa: F401

        return torchax.default_env()
    finally:
        OpOverloadPacket.__getattr__ = original


jax.config.update("jax_enable_x64", True)
ENV = _import_torchax()
ENV.config.force_materialize_views = True


def to_jax(x: Any) -> Any:
    """Return the JAX array of a tensor; of a plain one, a constant."""
    from torchax.tensor import Tensor as TorchaxTensor
    from torchax.view import View

    if isinstance(x, (TorchaxTensor, View)):
        x = x.jax()
    elif isinstance(x, Tensor):
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            return jnp.asarray(np.array(x.detach().tolist(), dtype=str(x.dtype)[6:]).reshape(tuple(x.shape)))
    return x if torch.is_grad_enabled() else lax.stop_gradient(x)


class _Grad(threading.local):
    """Grad mode of the program's own line: some functions of torch switch it off inside."""

    enabled = True


_GRAD = _Grad()


def _operand(x: Any) -> Any:
    with torch.set_grad_enabled(_GRAD.enabled):
        return to_jax(x)


def dispatch(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Run a function of torchax, or torch's own if torchax has none and it takes no tensors (`promote_types`)."""
    from torchax.tensor import OperatorNotFound
    from torchax.tensor import Tensor as TorchaxTensor
    from torchax.view import View

    if not isinstance(func, torch._ops.OpOverload):
        _GRAD.enabled = torch.is_grad_enabled()
    try:
        return _dispatch(func, types, args, kwargs)
    except OperatorNotFound:
        leaves = tree.leaves((args, kwargs or {}))
        if any(isinstance(x, (TorchaxTensor, View)) for x in leaves):
            if not any(type(x) is Tensor for x in leaves):
                raise
            args, kwargs = to_torch(_arrays((args, kwargs or {})))  # of a mixture of both kinds of tensor
            return func(*args, **kwargs)
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


_dispatch, ENV.dispatch = ENV.dispatch, dispatch
ENV.override_op_definition(torch.ops.aten.erfinv_, lambda x: x.copy_(torch.erfinv(x)))
for _name in ("__matmul__", "matmul"):  # torchax gives a product with a vector a wrong size
    ENV.override_op_definition(getattr(Tensor, _name), lambda x, y: to_torch(jnp.matmul(to_jax(x), to_jax(y))))
ENV.override_op_definition(torch.matmul, lambda x, y: to_torch(jnp.matmul(to_jax(x), to_jax(y))))
ENV.override_op_definition(Tensor.expand_as, lambda x, y: x.expand(y.shape))
ENV._is_same_device = lambda x, device: True  # a move between devices is none
ENV.t2j_iso = lambda values: torch.utils._pytree.tree_map_only(Tensor, _operand, values)


def to_torch(x: Any) -> Any:
    """Return the tensor that holds a JAX array."""
    return ENV.j2t_iso(x)


def _no_backward(*_: Any, **__: Any) -> None:
    raise MissingError("a call of backward or torch.autograd.grad: JAX differentiates functions")


def _no_function(cls: type, *_: Any) -> None:
    raise MissingError(f"an autograd Function of the program, {cls.__name__}: JAX has custom_vjp")


class Jax:
    """JAX's collectives under the names of fshard's."""

    def collective(self, m: Map, x: Tensor) -> Tensor:
        return to_torch(self._map(m, to_jax(x)))

    def _map(self, m: Map, x: Any) -> Any:
        match m:
            case ops.Sum():
                return lax.psum(x, m.axes) if m.divisor == 1 else lax.pmean(x, m.axes)
            case ops.Vary():
                return lax.pcast(x, m.axes, to="varying")
            case ops.GatherInvariant():
                return lax.all_gather(x, m.axes, axis=m.layout[0][0], tiled=True, to="invarying")
            case ops.Gather():
                return lax.all_gather(x, m.axes, axis=m.layout[0][0], tiled=True)
            case ops.Scatter():
                return lax.psum_scatter(x, m.axes, scatter_dimension=m.layout[0][0], tiled=True)
            case ops.Slice():
                dim, size = m.layout[0]
                _even(size, m.n)
                return lax.dynamic_slice_in_dim(x, lax.axis_index(m.axes) * (size // m.n), size // m.n, dim)
            case ops.AllToAll():
                split, concat = m.split[0], m.concat[0]
                _even(split[1], m.n)
                return lax.all_to_all(x, m.axes, split[0], concat[0], tiled=True)
            case ops.Permute():
                return lax.ppermute(x, m.axes, m.pairs)
        raise MissingError(f"{m.verb} has no counterpart")

    def extremum(self, op: str, axes: tuple[str, ...], tied: bool, x: Tensor) -> Tensor:
        if tied:
            whole = lax.all_gather(to_jax(x), axes, to="invarying")
            return to_torch(whole.max(0) if op == "max" else whole.min(0))
        return to_torch((lax.pmax if op == "max" else lax.pmin)(to_jax(x), axes))

    def axis_index(self, axes: tuple[str, ...]) -> Tensor:
        return to_torch(_index(axes).astype(jnp.int64))

    def draw(self, draw: Callable[[Tensor], Tensor], key: Tensor, spec: P) -> Tensor:
        full = draw(key)
        if not spec.axes:
            return full
        x = to_jax(full)
        for dim, axes in enumerate(spec.parts(x.ndim)):
            if axes:
                n = x.shape[dim] // fs.axis_size(axes)
                x = lax.dynamic_slice_in_dim(x, _index(axes) * n, n, dim)
        return to_torch(x)

    def value_and_grad(self, f: Callable[..., Any], argnums: Any = 0, *, has_aux: bool = False) -> Callable[..., Any]:
        numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            leaves, treedef = tree.flatten(tuple(args[i] for i in numbers))
            rest: list[Any] = []

            def of_leaves(*flat: Any) -> Any:
                full = list(args)
                for i, arg in zip(numbers, tree.unflatten(treedef, to_torch(list(flat))), strict=True):
                    full[i] = arg
                out = f(*full, **kwargs)
                loss, aux = out if has_aux else (out, None)
                tensors, rest[:] = split_tensors(aux)
                return to_jax(loss), [to_jax(t) for t in tensors]

            transform = jax.value_and_grad(of_leaves, argnums=tuple(range(len(leaves))), has_aux=True)
            (loss, tensors), flat_grads = transform(*map(to_jax, leaves))
            grads = tree.unflatten(treedef, to_torch(list(flat_grads)))
            value, aux = to_torch(loss), fill_tensors(rest, to_torch(tensors))
            return (value, aux) if has_aux else value, grads[0] if isinstance(argnums, int) else grads

        return wrapped

    def vmap(self, f: Callable[..., Any], in_dims: Any = 0, out_dims: Any = 0) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            return to_torch(jax.vmap(_of_arrays(f), in_dims, out_dims)(*_arrays(args)))

        return wrapped

    def vjp(self, f: Callable[..., Any], *primals: Any) -> Any:
        value, pullback = jax.vjp(_of_arrays(f), *_arrays(primals))
        return to_torch(value), lambda grads: to_torch(pullback(_arrays(grads)))

    def jvp(self, f: Callable[..., Any], primals: Any, tangents: Any) -> Any:
        return to_torch(jax.jvp(_of_arrays(f), _arrays(primals), _arrays(tangents)))

    def jacobian(self, f: Callable[..., Any], argnums: Any = 0) -> Callable[..., Any]:
        return lambda *args: to_torch(jax.jacrev(_of_arrays(f), argnums)(*_arrays(args)))

    def hessian(self, f: Callable[..., Any], argnums: Any = 0) -> Callable[..., Any]:
        return lambda *args: to_torch(jax.hessian(_of_arrays(f), argnums)(*_arrays(args)))


def _arrays(x: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, to_jax, x)


def _of_arrays(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: _arrays(f(*to_torch(args)))


def _index(axes: tuple[str, ...]) -> Any:
    """Return the position of this rank; the mesh has no axes of one rank, which fshard's collectives leave out too."""
    live = tuple(a for a in axes if fs.axis_size(a) > 1)
    return lax.axis_index(live) if live else jnp.zeros((), jnp.int64)


def _even(size: int, n: int) -> None:
    if size % n:
        raise MissingError("a dim that the axis does not divide")


def _spec(spec: P, ndim: int, live: dict[str, int]) -> PartitionSpec:
    return PartitionSpec(*(tuple(a for a in axes if a in live) or None for axes in spec.parts(ndim)))


# Words of the errors that JAX's types of varying manual axes raise. TYPES is matched with the text of an exception.
TYPES = ("manual axes", "varying", "vma", "unreduced", "replicated across mesh axes", "out_specs")
# A Python number, or a Python branch, of a traced value.
TRACED = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError,
          jax.errors.TracerIntegerConversionError, jax.errors.TracerBoolConversionError)  # fmt: skip


def run(call: Call) -> list[Any]:
    """Run a program under jit of shard_map, and return the leaves of its result."""
    is_tensor = [isinstance(x, Tensor) for x in call.leaves]
    tensors = [x for x in call.leaves if isinstance(x, Tensor)]
    specs = [s for s, t in zip(call.specs, is_tensor, strict=True) if t]
    for x, spec in zip([*tensors, *call.expected], [*specs, *call.out_specs], strict=True):
        for n, axes in zip(getattr(x, "shape", ()), spec.parts(getattr(x, "ndim", 0)), strict=True):
            _even(n, math.prod([call.sizes[a] for a in axes]))
    live = {a: n for a, n in call.sizes.items() if n > 1}
    devices = np.array(jax.devices()[: math.prod(live.values())]).reshape(tuple(live.values()))
    mesh = jax.sharding.Mesh(devices, tuple(live))
    out_tensors = [isinstance(x, Tensor) for x in call.expected]
    others: list[Any] = []

    def local(*arrays: Any) -> list[Any]:
        with ENV:
            parts = iter(to_torch(list(arrays)))
            leaves = [next(parts) if t else x for x, t in zip(call.leaves, is_tensor, strict=True)]
            with contextlib.ExitStack() as stack:
                for owner, name in ((Tensor, "backward"), (Tensor, "requires_grad_"), (torch.autograd, "grad")):
                    stack.enter_context(mock.patch.object(owner, name, _no_backward))
                stack.enter_context(mock.patch.object(torch.autograd.Function, "apply", classmethod(_no_function)))
                out = call.run(Jax(), leaves)
            others[:] = [None if t else x for x, t in zip(out, out_tensors, strict=True)]
            return [to_jax(x) for x, t in zip(out, out_tensors, strict=True) if t]

    in_specs = tuple(_spec(s, x.ndim, live) for s, x in zip(specs, tensors, strict=True))
    results = zip(call.expected, call.out_specs, strict=True)
    out_specs = [_spec(s, x.ndim, live) for x, s in results if isinstance(x, Tensor)]
    mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)
    arrays = [to_jax(x) for x in tensors]
    try:
        out = iter(jax.jit(mapped)(*arrays))
    except TRACED as e:
        raise MissingError("a Python number or branch of a traced value") from e
    except (TypeError, ValueError, NotImplementedError) as e:
        if any(word in str(e) for word in TYPES):
            raise RefusedError(str(e)) from e
        raise
    return [_to_torch_cpu(next(out)) if t else x for x, t in zip(others, out_tensors, strict=True)]


def _to_torch_cpu(x: Any) -> Tensor:
    """Return a plain tensor; numpy has no bfloat16 that torch reads."""
    return torch.from_numpy(np.array(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x))


if __name__ == "__main__":
    write("jax", ["jax", "jaxlib", "torchax", "torch"], run)
