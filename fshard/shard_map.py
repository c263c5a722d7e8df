"""Run one function on every device at once, on local tensors: `shard_map`."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from . import _callsite, tree
from ._call import (
    CallPlan,
    Kinds,
    Row,
    agree,
    collect,
    cut,
    donated,
    leaves_as,
    make_plan,
    memories,
    returned,
    signature,
    specs_of,
)
from ._comm import Comm, Region, bind, mark_donated
from ._compare import Allowed, apart, check_replicas
from ._ops import make_functions
from ._torch_compat import DataDependentOutputException, DynamicOutputShapeException
from ._typecheck import Checker, same_numbers
from .errors import fail, raise_all
from .mesh import Mesh, make_mesh
from .sharded import Sharded, abstract_sharded, local_parts
from .spec import spec_errors

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
        self._plans: list[CallPlan] = []  # the last used first
        self._steady = True  # whether all arguments have had one structure so far
        self._spare: list[tuple[CallPlan, list[dict[Any, Any]]]] = []  # the scratch of the last call that has ended

    def on(self, mesh: Mesh, *, check: Check | None = None, compile: bool | None = None) -> ShardMapped:
        """The same function on another mesh; checked, or compiled, as before if not said."""
        check, compile = check or self._check, self._compile if compile is None else compile
        return ShardMapped(self._f, mesh, self._in_specs, self._out_specs, check, compile, self._donate)

    def __repr__(self) -> str:
        return f"shard_map({self._name}, {self.mesh!r})"

    def __call__(self, *args: Any) -> Any:
        plan, leaves = self._planned(args)
        parts = local_parts(leaves, len(self.mesh.ranks))
        checked = bool(self._live) and (self._check == "always" or (self._check != "never" and not plan.checked))
        if checked and self._compiled:
            dry_run(self, args)  # below the compiler no mode sees anything
            plan.checked, checked = True, False
        scratch = self._scratch(plan, checked)
        # Nothing out here holds what is donated: a program may free it, and what it writes over is not there twice.
        for x in donated(self._name, plan, args, leaves):
            x.donate_to(self._name)

        def rank_main(comm: Comm, rank: int) -> tuple[Row, list[Kinds] | None, set[int], Checker | None]:
            at = rank if self.mesh.kind == "simulated" else 0
            local, parts[at] = parts[at], []
            cut(plan, local, self.mesh, at)
            ours = frozenset(memories([local[i] for i in plan.donated], self.mesh))
            taken = {*memories([local[i] for i in plan.kept], self.mesh)} - ours
            watch = Checker(self._live, self.mesh.axes) if checked else None
            here = Region(comm, rank, self.mesh.device, plan.uneven, ours, watch, scratch[at])
            # Backward runs on this thread, where the region is, and not on a device's own.
            with bind(here), torch.autograd.set_multithreading_enabled(False), watch or contextlib.nullcontext():
                if watch is not None:
                    for x, spec, name in zip(local, plan.specs, plan.names, strict=True):
                        if isinstance(x, Tensor):
                            watch.set_argument_type(x, frozenset(spec.axes), name)
                inputs = tree.unflatten(plan.treedef, local)
                given = [local[i] for i in plan.donated if isinstance(local[i], Tensor)] if self._compiled else []
                del local
                with mark_donated(given):
                    out = self._body(*inputs)
                del given
                if watch is not None:
                    with watch.paused():
                        self._check_results(watch, out)
                row = returned(out, plan.joint if watch is None else None, at)
                digest = watch.digest() if watch is not None and self.mesh.kind == "process" else ""
                plan.everyone = everyone = agree(self._name, self.mesh, plan.everyone, row, digest)
                if watch is not None and everyone is not None and len({digest for *_, digest in everyone}) > 1:
                    same_numbers(self.mesh, [watch])
                if self._check == "values" and self._live and self.mesh.kind != "abstract":
                    check_replicas(self._name, out, self._out_specs)
                return row, everyone, taken, watch

        with _eager if checked else contextlib.nullcontext(), _valueless(self.mesh):
            results = self.mesh.run(rank_main)
        everyone, taken = results[0][1], set().union(*(kept for _, _, kept, _ in results))
        rows = [row for row, *_ in results]
        joined, plan.joint = collect(self._name, self.mesh, self._out_specs, rows, everyone, taken, plan.joint)
        if checked and self.mesh.kind == "simulated":
            same_numbers(self.mesh, [watch for *_, watch in results if watch is not None])
            raise_all(apart(self._name, joined, Allowed(None, None, False)))
        plan.checked = True
        if not checked:
            self._spare[:] = [(plan, scratch)]  # of one signature only, or every batch size would keep its buffers
        return joined

    def _planned(self, args: tuple[Any, ...]) -> tuple[CallPlan, list[Any]]:
        """The plan of a call's signature, most often that of the last one, and the leaves of its arguments."""
        last = self._plans[0] if self._plans else None
        if last is not None and self._steady:
            leaves = leaves_as(last.treedef, args)
            if leaves is not None and (kinds := signature(leaves)) == last.signature:
                last.signature = kinds  # which the next call will mostly have too: one object is compared faster
                return last, leaves
        leaves, treedef = tree.flatten(args)
        kinds = signature(leaves)
        self._steady = self._steady and (last is None or last.treedef == treedef)
        found = next((p for p in self._plans if p.treedef == treedef and p.signature == kinds), None)
        if found is None:
            if self._compiled:
                make_functions(max(256, 2 * len(leaves)))
            found = make_plan(self._name, self._f, self.mesh, self._in_specs, self._donate, args)
        self._plans = [found, *(p for p in self._plans if p is not found)]
        return found, leaves

    def _scratch(self, plan: CallPlan, checked: bool) -> list[dict[Any, Any]]:
        """What each rank kept from the last call, if it was of this plan; of calls at once one has it.

        A call that is checked starts with nothing and leaves nothing, and so does one that failed.
        """
        if not checked and self.mesh.kind != "abstract":
            with contextlib.suppress(IndexError):
                owner, kept = self._spare.pop()
                if owner is plan:
                    return kept
        return [{} for _ in self.mesh.ranks]

    def _check_results(self, watch: Checker, out: Any) -> None:
        specs = specs_of(self._name, out, self._out_specs)
        found = zip(tree.leaves_with_path(out), specs, strict=True)
        rows = [(tree.show("result", path), x, spec) for (path, x), spec in found if isinstance(x, Tensor)]
        fit = [row for row in rows if not spec_errors(row[0], tuple(row[1].shape), row[2], self.mesh.axes)]
        raise_all(watch.result_errors(self._name, fit))


def dry_run(f: ShardMapped, args: tuple[Any, ...]) -> tuple[Any, Mesh]:
    """Check a call on an abstract mesh of the same axes, with no data: the described result, and that mesh."""
    mesh = make_mesh(kind="abstract", device=f.mesh.device, **f.mesh.axes)
    placed = lambda x: abstract_sharded(x.shape, x.dtype, x.spec, mesh) if isinstance(x, Sharded) else x  # noqa: E731
    return f.on(mesh, check="always")(*tree.map(placed, args)), mesh


class _Eager:
    """While any checked call runs, on whichever thread, what a program compiles by itself runs as it is written.

    The stance is of the whole process, and each one that is set gives back what it found: two calls that overlapped,
    each with a stance of its own, could leave it set for good.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if self._stance is None and "torch._dynamo" in sys.modules:
                self._stance = torch.compiler.set_stance("force_eager")
            self._calls += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._calls -= 1
            if self._calls == 0 and self._stance is not None:
                stance, self._stance = self._stance, None
                stance.__exit__(None, None, None)


_eager = _Eager()


def _valueless(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """On an abstract mesh, say at which line a program needs the value of a tensor."""
    return _told() if mesh.kind == "abstract" else contextlib.nullcontext()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as e:
        frames = [f for f, _ in traceback.walk_tb(e.__traceback__)]
        frame = next((f for f in reversed(frames) if _callsite.user_frame(f) is f), None)
        where = f"{_callsite.site(frame)}: " if frame is not None else ""
        raise fail(f"{where}there is no data on an abstract mesh, and this needs the value of a tensor: {e}",
                   fix="keep it a tensor (torch.where, indexing by tensors); or check with data, by "
                       'fs.shard_map(..., check="always")') from e  # fmt: skip


__all__ = ["ShardMapped", "dry_run", "shard_map"]
