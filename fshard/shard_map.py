"""Run one function on every device at once, on local tensors: `shard_map`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from . import source, tree
from .comm import Comm, Region, bind, memory_of
from .copies import apart
from .deferred import Deferred
from .differences import Allowed
from .errors import ShardingError, fail, raise_all
from .linear import prepare
from .mesh import Mesh, make_mesh
from .replicas import check_replicas
from .results import Kinds, agree, collect, specs_of
from .sharded import Sharded, described
from .spec import P, box_shape, is_even, is_spec, local_box, problems, same
from .vma import Checker, same_numbers

Check = Literal["first", "always", "never", "values"]


@overload
def shard_map(
    f: Callable[..., Any], *, mesh: Mesh, in_specs: Any = None, out_specs: Any, check: Check = "first",
    compile: bool = False, donate: int | Sequence[int] = (),
) -> ShardMapped: ...  # fmt: skip


@overload
def shard_map(
    f: None = None, *, mesh: Mesh, in_specs: Any = None, out_specs: Any, check: Check = "first",
    compile: bool = False, donate: int | Sequence[int] = (),
) -> Callable[[Callable[..., Any]], ShardMapped]: ...  # fmt: skip


def shard_map(
    f: Callable[..., Any] | None = None,
    *,
    mesh: Mesh,
    in_specs: Any = None,
    out_specs: Any,
    check: Check = "first",
    compile: bool = False,
    donate: int | Sequence[int] = (),
) -> ShardMapped | Callable[[Callable[..., Any]], ShardMapped]:
    """Run `f` on every device of `mesh`, on local tensors, with the mesh axes bound.

    A `Sharded` argument arrives as its local part, and must be placed as `in_specs` says. A plain tensor is a global
    value, the same on every rank, of which each takes its part. Anything else is passed on as it is. Results come
    back as `Sharded`, placed as `out_specs` says. Works as a decorator too; `.on(mesh)` is the same function on
    another mesh.

    Args:
        in_specs: specs for the tuple of arguments, a prefix tree. `None`, for all or for one argument, takes each
            `Sharded` leaf as it is placed and plain tensors whole.
        out_specs: specs for the result, a prefix tree.
        check: follow what each tensor varies over, and raise at the line that breaks the rules: at the "first" call of
            each signature, "always" or "never". "values" also compares, at every call and across the ranks, results
            that are declared replicated. Whichever it is, the results are the same.
        compile: run `torch.compile(f, fullgraph=True)`; needs a process mesh, or a mesh of one rank.
        donate: positions of arguments whose storage the call may overwrite; using them afterwards is an error.

    >>> double = shard_map(lambda x: 2 * x, mesh=make_mesh(data=2), in_specs=(P("data"),), out_specs=P("data"))
    >>> double(torch.arange(3))
    i64[3@data]

    Raises ShardingError for arguments that do not fit `in_specs`, results that do not fit `out_specs`, mixed meshes,
    donated arguments, and what `check` finds. If a rank raises, its own exception is the one seen, and the others end.
    """
    if f is None:
        return functools.partial(
            shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check=check, compile=compile, donate=donate
        )
    donate = (donate,) if isinstance(donate, int) else tuple(donate)
    return ShardMapped(f, mesh, in_specs, out_specs, check, compile, donate)


class ShardMapped:
    """A function bound to a mesh by `shard_map`. Call it with global values."""

    def __init__(
        self, f: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, check: Check, compile: bool,
        donate: tuple[int, ...],
    ) -> None:  # fmt: skip
        if compile and mesh.kind == "simulated" and mesh.size > 1:
            raise fail(f"shard_map: compile=True on {mesh!r}",
                       "simulated ranks are threads, and one compiler serves them all",
                       fix="compile on a process mesh or on a mesh of one rank")  # fmt: skip
        if check not in ("first", "always", "never", "values"):
            raise fail(f"shard_map: check={check!r}", fix="'first', 'always', 'never' or 'values'")
        functools.update_wrapper(self, f)
        self.mesh = mesh
        self._name = getattr(f, "__name__", type(f).__name__)
        self._f, self._in_specs, self._out_specs = f, in_specs, out_specs
        self._check, self._compile, self._donate = check, compile, donate
        self._compiled = compile and mesh.kind != "abstract"
        self._body = torch.compile(f, fullgraph=True) if self._compiled else f
        self._live = [a for a, n in mesh.axes.items() if n > 1]
        self._plans: dict[Any, _Plan] = {}
        self._kinds: dict[Any, list[Kinds]] = {}  # signature -> what every rank returned

    def on(self, mesh: Mesh, *, check: Check | None = None, compile: bool | None = None) -> ShardMapped:
        """The same function on another mesh; checked, or compiled, as before if not said."""
        check, compile = check or self._check, self._compile if compile is None else compile
        return ShardMapped(self._f, mesh, self._in_specs, self._out_specs, check, compile, self._donate)

    def __repr__(self) -> str:
        return f"shard_map({self._name}, {self.mesh!r})"

    def __call__(self, *args: Any) -> Any:
        leaves, treedef = tree.flatten(args)
        signature = (treedef, *[_signature(leaf) for leaf in leaves])
        plan = self._plans.get(signature)
        if plan is None:
            if self._compiled:
                prepare(max(256, 2 * len(leaves)))
            self._plans[signature] = plan = self._plan(args, leaves)
        given = [leaf.shards if isinstance(leaf, Sharded) else None for leaf in leaves]
        checked = bool(self._live) and (self._check == "always" or (self._check != "never" and not plan.checked))
        if checked and self._compiled:
            dry_run(self, args)  # below the compiler no mode sees anything
            plan.checked, checked = True, False
        donated = self._donated(args) if self._donate else []
        given_away = {id(leaf) for i in self._donate for leaf in tree.leaves(args[i])
                      if isinstance(leaf, (Sharded, Deferred))}  # fmt: skip

        def rank_main(comm: Comm, rank: int) -> tuple[Any, list[Kinds] | None, set[int], Any]:
            at = rank if self.mesh.kind == "simulated" else 0
            local = [
                _local(leaf, None if shards is None else shards[at], box, self.mesh)
                for leaf, shards, box in zip(leaves, given, plan.boxes[at], strict=True)
            ]
            storages = frozenset(memory_of(x) for x, leaf in zip(local, leaves, strict=True) if id(leaf) in given_away)
            watch = Checker(self._live, self.mesh.axes) if checked else None
            here = Region(comm, rank, self.mesh.device, plan.uneven, storages, watch)
            # Backward runs on this thread, where the region is, and not on a device's own.
            with bind(here), torch.autograd.set_multithreading_enabled(False), watch or contextlib.nullcontext():
                if watch is not None:
                    for x, spec, name in zip(local, plan.specs, plan.names, strict=True):
                        if isinstance(x, Tensor):
                            watch.argument(x, frozenset(spec.axes), name)
                out = self._body(*tree.unflatten(treedef, local))
                if watch is not None:
                    with watch.resting():
                        self._check_results(watch, out)
                digest = watch.digest() if watch is not None and self.mesh.kind == "process" else ""
                everyone = agree(self._name, self.mesh, self._kinds, signature, out, digest)
                if watch is not None and everyone is not None and len({digest for *_, digest in everyone}) > 1:
                    same_numbers(self.mesh, [watch])
                if self._check == "values" and self._live and self.mesh.kind != "abstract":
                    check_replicas(self._name, out, self._out_specs)
                taken = {memory_of(x) for x in local if isinstance(x, Tensor)} - storages
                return out, everyone, taken, watch

        try:
            with _eager() if checked else contextlib.nullcontext(), _valueless(self.mesh):
                results = self.mesh.run(rank_main)
        finally:
            for x in donated:
                x.give_away(self._name)
        joined = collect(self._name, self.mesh, self._out_specs, [row[:3] for row in results])
        if checked and self.mesh.kind == "simulated":
            same_numbers(self.mesh, [watch for *_, watch in results])
            raise_all(apart(self._name, joined, Allowed(None, None, False)))
        plan.checked = True
        return joined

    def _check_results(self, watch: Checker, out: Any) -> None:
        specs = specs_of(self._name, out, self._out_specs)
        found = zip(tree.leaves_with_path(out), specs, strict=True)
        rows = [(tree.show("result", path), x, spec) for (path, x), spec in found if isinstance(x, Tensor)]
        fit = [row for row in rows if not problems(row[0], tuple(row[1].shape), row[2], self.mesh.axes)]
        raise_all(watch.results(self._name, fit))

    def _plan(self, args: tuple[Any, ...], leaves: list[Any]) -> _Plan:
        """Check the arguments against the specs, once for each signature."""
        flat = self._flat_in_specs(args, len(leaves))
        errors: list[ShardingError] = []
        specs = []
        for (path, leaf), spec in zip(tree.leaves_with_path(args), flat, strict=True):
            where = f"{self._name}: {tree.show('args', path)}"
            spec = spec if spec is not None else leaf.spec if isinstance(leaf, Sharded) else P()
            specs.append(spec)
            if isinstance(leaf, (Sharded, Tensor, Deferred)):
                wrong = problems(where, tuple(leaf.shape), spec, self.mesh.axes)
                errors += wrong or self._misplaced(where, leaf, spec)
        raise_all(errors)
        boxes = []
        for rank in self.mesh.ranks:
            coords = self.mesh.coords(rank)
            boxes.append([local_box(tuple(x.shape), s, self.mesh.axes, coords) if isinstance(x, (Tensor, Deferred))
                          else None for x, s in zip(leaves, specs, strict=True)])  # fmt: skip
        placed = [(x, s) for x, s in zip(leaves, specs, strict=True) if isinstance(x, (Tensor, Sharded, Deferred))]
        uneven = any(not is_even(tuple(x.shape), s, self.mesh.axes) for x, s in placed)
        return _Plan(boxes, specs, _names(self._f, args), uneven)

    def _flat_in_specs(self, args: tuple[Any, ...], n: int) -> list[P | None]:
        if self._in_specs is None:
            return [None] * n
        name = f"{self._name}: in_specs"
        return tree.broadcast(self._in_specs, args, name=name, leaf=lambda s: s is None or is_spec(s))

    def _misplaced(self, where: str, leaf: Sharded | Tensor | Deferred, spec: P) -> list[ShardingError]:
        if isinstance(leaf, Deferred):
            fix = "fs.materialize it, or fs.check(f, ...), which needs no values"
            return [] if self.mesh.kind == "abstract" else [fail(f"{where}: is only described", fix=fix, leaf=leaf)]
        if isinstance(leaf, Tensor):
            if leaf.requires_grad and torch.is_grad_enabled():
                return [fail(f"{where}: requires grad, and no gradient flows out of shard_map",
                             fix="differentiate inside, with fs.value_and_grad, or pass x.detach()")]  # fmt: skip
            if leaf.is_meta and self.mesh.kind != "abstract":
                return [fail(f"{where}: is on the meta device, and has no values", fix="fs.check(f, ...) needs none")]
            if leaf.layout != torch.strided:
                return [fail(f"{where}: is not strided", fix="x.to_dense()", layout=leaf.layout)]
            if is_functorch_wrapped_tensor(leaf):
                return [fail(f"{where}: is inside a torch.func transform, which cannot see into shard_map",
                             fix="transform inside")]  # fmt: skip
            return []
        if leaf.mesh != self.mesh:
            return [fail(f"{where}: is on another mesh", fix="fs.reshard(x, specs, mesh), or f.on(mesh)",
                         leaf=leaf.mesh, function=self.mesh)]  # fmt: skip
        if not same(leaf.spec, spec, leaf.ndim):
            return [fail(f"{where}: is placed as {leaf.spec}, in_specs says {spec}", fix=f"fs.reshard(x, {spec})",
                         leaf=leaf)]  # fmt: skip
        return []

    def _donated(self, args: tuple[Any, ...]) -> list[Sharded]:
        found: dict[int, Sharded] = {}
        for i in self._donate:
            if i >= len(args):
                raise fail(f"{self._name}: donate={i}, but there are {len(args)} arguments", fix="count from 0")
            for path, leaf in tree.leaves_with_path(args[i]):
                if isinstance(leaf, Sharded):
                    if id(leaf) in found:
                        raise fail(f"{self._name}: {tree.show(f'args[{i}]', path)} is donated twice",
                                   fix="keep a tied leaf once in the tree, or do not donate it")  # fmt: skip
                    found[id(leaf)] = leaf
        return list(found.values())


def dry_run(f: ShardMapped, args: tuple[Any, ...]) -> tuple[Any, Mesh]:
    """Check a call on an abstract mesh of the same axes, with no data: the described result, and that mesh."""
    mesh = make_mesh(kind="abstract", device=f.mesh.device, **f.mesh.axes)
    placed = lambda x: described(x.shape, x.dtype, x.spec, mesh) if isinstance(x, Sharded) else x  # noqa: E731
    return f.on(mesh, check="always")(*tree.map(placed, args)), mesh


def _eager() -> contextlib.AbstractContextManager[Any]:
    """Let what a program compiles by itself run as it is written, so that it can be seen."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


@contextlib.contextmanager
def _valueless(mesh: Mesh) -> Iterator[None]:
    """On an abstract mesh, say at which line a program needs the value of a tensor."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as e:
        if mesh.kind != "abstract":
            raise
        frames = [f for f, _ in traceback.walk_tb(e.__traceback__)]
        frame = next((f for f in reversed(frames) if source.user_frame(f) is f), None)
        where = f"{source.site(frame)}: " if frame is not None else ""
        raise fail(f"{where}there is no data on an abstract mesh, and this needs the value of a tensor: {e}",
                   fix="keep it a tensor (torch.where, indexing by tensors); or check with data, by "
                       'fs.shard_map(..., check="always")') from e  # fmt: skip


class _Plan:
    """What a signature of arguments settles: where each leaf lies and what it is called, and if anything is uneven."""

    def __init__(self, boxes: list[list[Any]], specs: list[P], names: list[str], uneven: bool) -> None:
        self.boxes, self.specs, self.names, self.uneven = boxes, specs, names, uneven
        self.checked = False


def _names(f: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """Each leaf as `f` would write it: `params['up']`, by the names of its parameters."""
    try:
        bound = inspect.signature(f).bind(*args)
    except (TypeError, ValueError):  # no signature, or a call that will fail by itself
        return [tree.show("args", path) for path, _ in tree.leaves_with_path(args)]
    named = []
    for name, given in bound.arguments.items():
        named += [tree.show(name, path) for path, _ in tree.leaves_with_path(given)]
    return named


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, Sharded):
        return leaf.shape, leaf.dtype, leaf.spec, leaf.mesh
    if isinstance(leaf, Tensor):
        tracked = leaf.requires_grad and torch.is_grad_enabled()
        return tuple(leaf.shape), leaf.dtype, tracked, is_functorch_wrapped_tensor(leaf)
    if isinstance(leaf, Deferred):
        return leaf.shape, leaf.dtype
    return (type(leaf), leaf) if isinstance(leaf, (bool, str)) else type(leaf)  # what programs branch on


def _local(leaf: Any, shard: Tensor | None, box: Any, mesh: Mesh) -> Any:
    """This rank's part of a leaf: its own shard; of a plain tensor a part, and where threads would share it a copy."""
    if mesh.kind == "abstract" and (shard is not None or box is not None):
        shape = box_shape(box) if shard is None else shard.shape
        return torch.empty(shape, dtype=leaf.dtype, device=mesh.device)  # a fake one, under the mesh's mode
    if shard is not None:
        return shard
    return leaf if box is None else leaf.detach()[box].to(mesh.device, copy=mesh.kind == "simulated" and mesh.size > 1)


__all__ = ["ShardMapped", "dry_run", "shard_map"]
