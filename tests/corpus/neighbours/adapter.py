"""Parts that the adapters share: fshard's collectives, gradients and draws replaced by those of another system.

An adapter runs the source of a program unchanged. It replaces the functions below in every module that has imported
them, so that a program's collectives, and those inside layers and optimizers of fshard, become the other system's.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import fshard as fs
from fshard import tree
from fshard._core import ops
from fshard._core import torch as compat
from fshard._core.call import broadcast_out_specs, make_plan
from fshard._core.ops import Map
from fshard._core.region import Region, bind, known_axes, region
from fshard.grad import is_differentiated
from fshard.random import draws
from fshard.schedule.remat import remat
from fshard.shard_map import ShardMapped
from fshard.spec import P, full_box, names_of


class MissingError(Exception):
    """The other system has no counterpart of something that a program uses."""


class System(Protocol):
    """The functions of another system that stand in for fshard's."""

    def collective(self, m: Map, x: Tensor) -> Tensor:
        """Apply the counterpart of one of fshard's maps to a tensor."""

    def extremum(self, op: str, axes: tuple[str, ...], tied: bool, x: Tensor) -> Tensor:
        """Return the maximum or minimum over the ranks."""

    def axis_index(self, axes: tuple[str, ...]) -> Tensor:
        """Return the position of this rank."""

    def value_and_grad(self, f: Callable[..., Any], argnums: Any = 0, *, has_aux: bool = False) -> Callable[..., Any]:
        """Return the function of the value and the gradient."""

    def vmap(self, f: Callable[..., Any], in_dims: Any = 0, out_dims: Any = 0) -> Callable[..., Any]:
        """Return the function over batches, as torch.func.vmap."""

    def vjp(self, f: Callable[..., Any], *primals: Any) -> Any:
        """Return the value and the pullback, as torch.func.vjp."""

    def jvp(self, f: Callable[..., Any], primals: Any, tangents: Any) -> Any:
        """Return the value and the tangent, as torch.func.jvp."""

    def jacobian(self, f: Callable[..., Any], argnums: Any = 0) -> Callable[..., Any]:
        """Return the function of the Jacobian, as torch.func.jacrev."""

    def hessian(self, f: Callable[..., Any], argnums: Any = 0) -> Callable[..., Any]:
        """Return the function of the Hessian, as torch.func.hessian."""

    def draw(self, draw: Callable[[Tensor], Tensor], key: Tensor, spec: P) -> Tensor:
        """Return this rank's part of draw(key), a tensor of the global shape."""


@dataclass(frozen=True)
class Comm:
    """The sizes of the axes. Nothing asks for coordinates but checks of even sizes, which are equal on every rank."""

    sizes: Mapping[str, int]
    has_values = True
    static_sizes = True
    direct = False

    @property
    def coords(self) -> Mapping[str, int]:
        return dict.fromkeys(self.sizes, 0)


@dataclass(frozen=True)
class Call:
    """The arguments and results of a program, flat, with the spec of each tensor."""

    f: Callable[..., Any]
    treedef: Any
    leaves: list[Any]
    specs: list[P]
    out_specs: list[P]
    expected: list[Any]
    sizes: Mapping[str, int]

    @staticmethod
    def of(f: ShardMapped, args: tuple[Any, ...], expected: Any) -> Call:
        plan = make_plan(f._name, f._f, f.mesh, f._in_specs, f._out_specs, (), args)
        leaves = [fs.device_get(x) if isinstance(x, fs.Sharded) else x for x in tree.leaves(args)]
        return Call(f._f, plan.treedef, leaves, plan.specs, broadcast_out_specs(plan, expected),
                    tree.leaves(expected), f.mesh.axes)  # fmt: skip

    def run(self, system: System, local: Sequence[Any]) -> list[Any]:
        """Run the program on local leaves, and return the leaves of its result."""
        with bind(Region(Comm(self.sizes), 0, torch.device("cpu"))), replaced(system):  # type: ignore[arg-type]
            out = tree.leaves(self.f(*tree.unflatten(self.treedef, local)))
        if len(out) != len(self.expected):
            raise MissingError(f"{len(out)} results, of which {len(self.expected)} were expected")
        return out


@contextlib.contextmanager
def replaced(system: System) -> Iterator[None]:
    """Replace functions of fshard by those of a system, in every module that has imported them."""

    def apply_map(m: Map, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        out = []
        for i, x in enumerate(xs):
            own = m.only([i])
            if isinstance(own, ops.CastMap):
                y = system.collective(own.inner, x.to(own.before))
                out.append(y.to(own.after))
            else:
                out.append(system.collective(own, x))
        return tuple(out)

    def minmax(comm: Any, axes: tuple[str, ...], op: str, tied: bool, xs: Sequence[Tensor]) -> list[Tensor]:
        return [system.extremum(op, axes, tied, x) for x in xs]

    def axis_index(axis: Any) -> Tensor:
        return system.axis_index(known_axes("axis_index", region(), axis))

    def local_range(verb: str, n: int, axis: Any, size: int | None) -> tuple[Any, int]:
        names = names_of(axis)
        whole = n * fs.axis_size(names) if names else n
        if size not in (None, whole):
            raise MissingError("a dim that the axis does not divide")
        return (axis_index(names) * n if names else 0), whole

    def draw_local(verb: str, key: Tensor, shape: Any, spec: P, distribution: Any, device: Any) -> Tensor:
        for n, axes in zip(shape, spec.parts(len(shape)), strict=True):
            if n % fs.axis_size(axes):
                raise MissingError("a dim that the axis does not divide")
        box, device = full_box(shape), torch.device("cpu")
        return system.draw(lambda k: draws._draw(verb, k, shape, box, distribution, device), key, spec)

    def torch_grad(f: Callable[..., Any], argnums: Any = 0, has_aux: bool = False) -> Callable[..., Any]:
        return fs.grad(f, argnums, has_aux=has_aux)

    def grad_and_value(f: Callable[..., Any], argnums: Any = 0, has_aux: bool = False) -> Callable[..., Any]:
        return lambda *args, **kwargs: system.value_and_grad(f, argnums, has_aux=has_aux)(*args, **kwargs)[::-1]

    new = [
        (torch.func.grad, torch_grad), (torch.func.grad_and_value, grad_and_value), (torch.func.vmap, system.vmap),
        (torch.func.vjp, system.vjp), (torch.func.jvp, system.jvp),
        (torch.func.jacrev, system.jacobian), (torch.func.jacfwd, system.jacobian),
        (torch.func.hessian, system.hessian), (torch.vmap, system.vmap),
        (ops.apply_map, apply_map), (ops.minmax, minmax), (fs.axis_index, axis_index),
        (ops.local_range, local_range), (draws._draw_local, draw_local),
        (fs.value_and_grad, system.value_and_grad), (is_differentiated, lambda x: True),
        (compat.in_transform, lambda: True), (remat, lambda f, *_, **__: f),
    ]  # fmt: skip
    changed = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "fshard" or name.startswith("tests.corpus.") or name in ("torch", "torch.func"):
            for attribute, value in list(vars(module).items()):
                for old, replacement in new:
                    if value is old and name != __name__:
                        changed.append((module, attribute, old))
                        setattr(module, attribute, replacement)
    try:
        yield
    finally:
        for module, attribute, old in changed:
            setattr(module, attribute, old)
