"""Run one function on every device at once, on local tensors: `shard_map`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from . import tree
from ._core import call
from ._core.call import CallPlan, RankResult
from ._core.compare import Tolerance, check_replicas, check_same_arguments, replica_errors
from ._core.ops import make_functions
from ._core.protocol import Comm
from ._core.region import Region, bind, mark_arguments
from ._core.torch import version_of
from ._core.transfers import refuse_tracing
from ._core.typecheck import Checker, Ranks, same_numbers
from .errors import api_boundary, checked, fail, raise_all
from .mesh import Mesh
from .sharded import Sharded, abstract_sharded
from .spec import P, spec_errors

Check = Literal["first", "always", "never", "values"]

_NOTHING = contextlib.nullcontext()
# Signatures that a function keeps, of some KB each: more than a loader has lengths.
_MOST_PLANS = 256
_MOST_PROGRAMS = 32  # a program that differs at every call, by a string that it reads, is not checked at every call


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


@checked
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

    A `Sharded` argument is passed as its local part, and must be placed by `in_specs`. A plain tensor is a global
    value, the same on every rank (a checked call compares the processes' values, by digests), and each rank is passed
    its part of it. A numpy array is a plain tensor, as an argument and as a result. Anything else is passed on
    unchanged, and is an error under a spec that names an axis. Results become `Sharded`, placed by `out_specs`. Works
    as a decorator too; `.on(mesh)` is the same function on another mesh.

    Args:
        in_specs: specs for the tuple of arguments, a prefix tree. `None`, for all or for one argument, takes each
            `Sharded` leaf by its spec and plain tensors unsplit.
        out_specs: specs for the result, a prefix tree.
        check: follow what each tensor varies over, and raise at the line that breaks the rules: at the "first" call of
            each signature, and of code that has changed since (docs/the-law.md), "always" or "never". "values" also
            compares, at every call and across the ranks, results that are declared replicated. The results are the
            same for every choice.
        compile: run `torch.compile(f, fullgraph=True)`; needs a process mesh, or a mesh of one rank.
        donate: positions of arguments whose storage the call may overwrite; using them afterwards is an error. A write
            in place to another placed leaf is an error, and one to a plain tensor is to a copy.

    >>> double = shard_map(lambda x: 2 * x, mesh=make_mesh(data=2), in_specs=(P("data"),), out_specs=P("data"))
    >>> double(torch.arange(3))
    i64[3@data]

    Raises ShardingError for arguments that do not fit `in_specs`, results that do not fit `out_specs`, mixed meshes,
    donated arguments, processes that pass different global values, and what `check` finds. If a rank raises, its
    exception is raised here, and the other ranks end.
    """
    if f is None:
        return functools.partial(
            shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check=check, compile=compile, donate=donate
        )
    donate = (donate,) if isinstance(donate, int) else tuple(donate)
    return ShardMapped(f, mesh, in_specs, out_specs, check, compile, donate)


class _RankRun(NamedTuple):
    """Outcome of the function on one rank."""

    result: RankResult
    kept: set[int]  # storages of arguments that the call must not overwrite
    checker: Checker | None
    branches_on: set[str]


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
        for which, specs in {"in_specs": in_specs, "out_specs": out_specs}.items():
            tree.check_leaves("shard_map", which, specs, P)
        functools.update_wrapper(self, f)
        self.mesh = mesh
        self._name = getattr(f, "__name__", type(f).__name__)
        self._f, self._in_specs, self._out_specs = f, in_specs, out_specs
        self._check, self._compile, self._donate = check, compile, donate
        self._compiled = compile and mesh.kind != "abstract"
        self._body = call.compiled(f) if self._compiled else f
        self._live = [a for a, n in mesh.axes.items() if n > 1]
        self._plans: list[CallPlan] = []  # the last one used comes first; other threads read it, so it is replaced
        self._program: call.Program | None = None  # as the last call found it
        self._scratch: list[list[dict[Any, Any]]] = []  # at most one entry: of the last call that has ended

    @checked
    def on(self, mesh: Mesh, *, check: Check | None = None, compile: bool | None = None) -> ShardMapped:
        """Return the same function on another mesh; checked and compiled as before by default."""
        check, compile = check or self._check, self._compile if compile is None else compile
        return ShardMapped(self._f, mesh, self._in_specs, self._out_specs, check, compile, self._donate)

    def __repr__(self) -> str:
        return f"shard_map({self._name}, {self.mesh!r})"

    @api_boundary
    def __call__(self, *args: Any, **by_name: Any) -> Any:
        if by_name:
            raise fail(f"{self._name}: {', '.join(by_name)} passed by name",
                       fix="pass arguments by position, as in_specs")  # fmt: skip
        return self._run(args)[0]

    def _run(self, args: tuple[Any, ...]) -> tuple[Any, CallPlan, list[_RankRun]]:
        refuse_tracing(self._name)
        leaves, treedef = tree.flatten(args)
        plan, facts = self._find_plan(leaves, treedef), self._program_facts()
        checked = self._must_check(plan, facts)
        if checked:  # before the plan, whose errors are the same on every rank if the arguments are
            self._compare_arguments(args)
        plan = plan or self._make_plan(leaves, args)
        if checked:
            plan.rank_types, plan.output = None, None  # of other code, perhaps
        if checked and self._compiled:
            dry_run(self, args, self.mesh.ranks[0])  # in a compiled program the checker sees no operation
            plan.note_checked(facts)
            checked = False
        scratch = [{} for _ in self.mesh.ranks] if checked else self._take_scratch()
        parts = call.prepare(plan, leaves)
        ranks = Ranks() if checked else None

        def rank_main(comm: Comm, rank: int) -> _RankRun:
            at = rank if self.mesh.kind == "simulated" else 0
            return self._run_rank(plan, comm, rank, at, parts[at], scratch[at], ranks)

        abstract = self.mesh.kind == "abstract"
        with call.force_eager if checked else _NOTHING, call.explain_missing_values() if abstract else _NOTHING:
            try:
                runs = self.mesh.run(rank_main)
            except (RuntimeError, IndexError, TypeError, ValueError) as e:
                call.explain_shapes(plan, e)
                raise
        joined = call.finish(plan, [run.result for run in runs], set().union(*[run.kept for run in runs]))
        if checked and self.mesh.kind == "simulated":
            checkers = {rank: run.checker for rank, run in enumerate(runs) if run.checker is not None}
            same_numbers(self.mesh, checkers)
            raise_all(replica_errors(self._name, joined, Tolerance(None, None, False)))
        if checked:
            plan.note_checked(facts)
        else:
            self._scratch[:] = [scratch]
        return joined, plan, runs

    def _program_facts(self) -> tuple[Any, ...]:
        """Return the code and flags that the function may use now; none where they do not decide on a check."""
        if not self._live or self._check in ("never", "always"):
            return ()
        if self._program is None or not self._program.is_current():
            # Processes must check the same calls: a flag may change on one of them only, code does not.
            self._program = call.read_program(self._f, flags=self.mesh.kind != "process", before=self._program)
        return self._program.facts

    def _must_check(self, plan: CallPlan | None, facts: tuple[Any, ...]) -> bool:
        """Return whether to check a call: with "first", one of a signature or of code that no call has checked yet."""
        if not self._live or self._check == "never":
            return False
        known = plan is not None and (facts in plan.checked or len(plan.checked) >= _MOST_PROGRAMS)
        return self._check == "always" or not known

    def _compare_arguments(self, args: tuple[Any, ...]) -> None:
        """Raise for arguments that processes have passed different values of."""
        if self.mesh.kind == "process":
            names = call.argument_names(self._name, self._f, args)
            check_same_arguments(self._name, self.mesh, names, tree.leaves(args))

    def _find_plan(self, leaves: list[Any], treedef: Any) -> CallPlan | None:
        """Return the plan of this signature; None before the first call that has it."""
        signature = call.call_signature(leaves)
        for i, plan in enumerate(plans := self._plans):
            if plan.treedef == treedef and plan.signature == signature:
                plan.signature = signature  # the next call often has the same objects, which compare faster
                if i > 0:
                    self._plans = [plan, *plans[:i], *plans[i + 1 :]]
                return plan
        return None

    def _make_plan(self, leaves: list[Any], args: tuple[Any, ...]) -> CallPlan:
        if self._compiled:
            make_functions(max(256, 2 * len(leaves)))
        plan = call.make_plan(self._name, self._f, self.mesh, self._in_specs, self._out_specs, self._donate, args)
        self._plans = [plan, *self._plans[: _MOST_PLANS - 1]]
        return plan

    def _take_scratch(self) -> list[dict[Any, Any]]:
        """Return each rank's dict of buffers from the call before, to use them again.

        The dicts are empty if that call failed, was checked, or has not ended.
        """
        try:
            return self._scratch.pop()  # atomic: of two calls at once, one finds it
        except IndexError:
            return [{} for _ in self.mesh.ranks]

    def _run_rank(
        self, plan: CallPlan, comm: Comm, rank: int, at: int, local: list[Any], scratch: dict[Any, Any],
        ranks: Ranks | None,
    ) -> _RankRun:  # fmt: skip
        """Run the function on one rank, this process's number `at`. Empties `local`, the rank's part of every leaf.

        A checked call has the `ranks` of this process that it has started.
        """
        call.slice_inputs(plan, local, at)
        # Without the donated ones, which the function frees.
        arguments = [local[i] for i in plan.kept], plan.kept_specs
        versions = [version_of(x) for x in arguments[0]] if plan.written is None or self._check == "always" else []
        donated = frozenset(call.storage_pointers([local[i] for i in plan.donated], self.mesh))
        kept = set(call.storage_pointers(arguments[0], self.mesh)) - donated
        checker = None if ranks is None else Checker(self._live, self.mesh.axes, comm.coords, ranks)
        region = Region(comm, rank, self.mesh.device, dict(plan.uneven), plan.split_sizes, donated, checker, scratch,
                        self.mesh.host, arguments)  # fmt: skip
        # Backward runs on this thread, to which the region is bound, and not on a thread of autograd.
        with bind(region), torch.autograd.set_multithreading_enabled(False):
            with checker or _NOTHING:
                if checker is not None:
                    for i, (x, spec, name) in enumerate(zip(local, plan.specs, plan.names, strict=True)):
                        if isinstance(x, Tensor):
                            checker.set_argument_type(x, spec, name, placed=i in plan.placed)
                inputs = tree.unflatten(plan.treedef, local)
                marks = mark_arguments(local[:], plan.specs, plan.donated) if self._compiled else _NOTHING
                local.clear()
                with marks:
                    out = self._body(*inputs)
                result = call.flatten_result(out)  # seen by the checker: tensors made of numpy arrays are not captured
            if versions:
                call.note_written(plan, arguments[0], versions, refuse=self._check != "never")
            if checker is not None:
                self._check_results(checker, plan, result.out)
            digest = checker.digest() if checker is not None and self.mesh.kind == "process" else ""
            call.exchange_result_types(plan, result, digest)
            if checker is not None and len({types.digest for types in plan.rank_types or ()}) > 1:
                same_numbers(self.mesh, {rank: checker})
            # The checked results of ranks that are threads are compared when they are joined, by value and not by bit.
            compared = self._check == "values" or (checker is not None and self.mesh.kind == "process")
            if compared and self._live and comm.has_values:
                call.refuse_valueless(plan, result)
                check_replicas(self._name, result.out, self._out_specs)
            return _RankRun(result, kept, checker, region.branches_on)

    def _check_results(self, checker: Checker, plan: CallPlan, out: Any) -> None:
        """Raise for results that vary over an axis which their out spec does not name."""
        specs = call.broadcast_out_specs(plan, out)
        wrong = checker.wrong_results(tree.leaves(out), specs)
        if wrong:  # a result that its spec does not fit has another error
            paths = [tree.show("result", path) for path, _ in tree.leaves_with_path(out)]
            rows = [(paths[i], x, spec) for i, x, spec in wrong
                    if not spec_errors("", tuple(x.shape), spec, self.mesh.axes)]  # fmt: skip
            raise_all(checker.result_errors(self._name, rows))


class DryRun(NamedTuple):
    """A checked call without data, as one rank of an abstract mesh."""

    mesh: Mesh
    plan: CallPlan
    joined: Any  # the described result, if the parts of all ranks are as large as this one's
    result: RankResult
    checker: Checker | None  # None if every axis has one rank
    branches_on: set[str]  # the axes whose positions the function asks for, as numbers


def dry_run(f: ShardMapped, args: tuple[Any, ...], rank: int = 0) -> DryRun:
    """Check a call without data, as one rank of an abstract mesh with the same axes."""
    mesh = Mesh(f.mesh.axes, "abstract", f.mesh.device, rank=rank)
    joined, plan, (run,) = f.on(mesh, check="always")._run(tree.map(lambda x: _described(x, mesh), args))
    return DryRun(mesh, plan, joined, run.result, run.checker, run.branches_on)


def _described(x: Any, mesh: Mesh) -> Any:
    """Return a placed leaf as one of an abstract mesh; anything else unchanged."""
    return abstract_sharded(x.shape, x.dtype, x.spec, mesh) if isinstance(x, Sharded) else x


def planned_calls(f: ShardMapped, args: tuple[Any, ...], mesh: Mesh, observe: Callable[..., Any]) -> Iterator[None]:
    """Yield after each of any number of unchecked calls without data, as the rank of an abstract mesh.

    Each calls `observe(plan, function, arguments)`, which must call the function on the arguments and return its
    result. Buffers are kept from one call to the next.
    """
    plans: list[CallPlan] = []

    @functools.wraps(f._f)
    def observed(*inputs: Any) -> Any:
        return observe(plans[0], f._f, inputs)

    g = ShardMapped(observed, mesh, f._in_specs, f._out_specs, "never", False, f._donate)
    while True:
        described = tree.map(lambda x: _described(x, mesh), args)  # a call may donate them
        plans[:] = [g._find_plan(*tree.flatten(described)) or g._make_plan(tree.leaves(described), described)]
        g._run(described)
        yield
