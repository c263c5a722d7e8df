"""A step before it runs: memory, FLOPs and transfers of one rank, from the function that trains: `plan`."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fshard import tree
from fshard._core.call import CallPlan, run_groups
from fshard._core.callsite import Site, site
from fshard._core.display import Row, bar, page, table
from fshard._core.operations import OperationMode, tensors_in
from fshard._core.protocol import coords_of
from fshard._core.region import UncheckedError, region
from fshard._core.torch import in_backward, is_summed_in_place, storage_id, unwrapped, view_of_fake
from fshard._core.transfers import Transfer, recording, transfer_rows, transfer_table
from fshard._core.typecheck import leaves_of
from fshard.errors import checked, number_of
from fshard.mesh import planned_mesh
from fshard.shard_map import ShardMapped, dry_run, planned_calls
from fshard.spec import Size, format_axes, short_dtype, size

from .chrome import Timeline
from .device import Device
from .events import Event, Kind, Operation, Phase, Start, Wait, phase_now
from .flops import CONSTANTS, is_elementwise, is_view, kind_of, name_of, weight_arguments, work_of, written_by
from .measure import Entry, Record, timeline
from .memory import PARTS, Memory, Storage, Storages, arguments_of, assign_parts, parts_and_largest, tensors_at
from .roofline import Roofline, joined
from .strip import LEGEND, letters, strip
from .trust import NO_SPLITS, Splits, placed_leaves, splits_of, unknown_operations, warnings_of
from .workspace import RECURRENT, on_gpu, run_on_shapes, workspace_of

_aten = torch.ops.aten
_GET_GRAD, _SET_GRAD = cast(Any, Tensor).grad.__get__, cast(Any, Tensor).grad.__set__
# Formulas of torch's gradients add into zeros that they have just made; of fake tensors they add out of place.
_IN_PLACE = {
    _aten.scatter_add.default: _aten.scatter_add_.default, _aten.index_add.default: _aten.index_add_.default,
    _aten.scatter.src: _aten.scatter_.src, _aten.scatter.value: _aten.scatter_.value,
    _aten.index_put.default: _aten.index_put_.default,
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class Plan:
    """Outcome of `plan`, for one rank: the one with the highest peak.

    >>> step = shard_map(lambda x: psum(x.sum(), "data"), mesh=make_mesh(data=4), in_specs=(P("data"),), out_specs=P())
    >>> plan(step, fs.init.zeros((8, 3))).memory.parts["other"]
    24

    Attributes:
        mesh: the size of each axis.
        rank: the planned rank.
        events: its operations and transfers in order.
        memory: the peak, and what it is.
        transfers: those that `fs.recording` sees in a real run of that rank.
        flops: by kind of operation and dtype; no entry for kinds that only read and write.
        device: the device of the estimates, if one was named.
        time: estimate of the seconds, with a device.
        warnings: what the plan does not know: operations without a formula for their FLOPs, which `flops` and `time`
            lack (`torch.utils.flop_counter.register_flop_formula` adds one), kernels with an unknown workspace,
            seconds that are a bound, leaves that an axis does not split evenly, long rings, experts assumed balanced.
        branches_on: the axes whose positions the program asks for by `fs.axis_position`.
        positions: the plan of each of these positions, this one included: the stages of a pipeline. They send each
            other messages, so the time of each has its waits for the others.
        splits: what each axis is used for: `plan.splits.kinds` may be {"data": "FSDP", "model": "tensor"}.
    """

    mesh: dict[str, int]
    rank: int
    events: tuple[Event, ...]
    memory: Memory
    transfers: tuple[Transfer, ...]
    flops: dict[tuple[Kind, torch.dtype], int]
    device: Device | None = None
    time: Roofline | None = None
    warnings: tuple[str, ...] = ()
    branches_on: tuple[str, ...] = ()
    positions: tuple[Plan, ...] = ()
    splits: Splits = NO_SPLITS

    @property
    def bubble(self) -> float | None:
        """Return the share of the step for which `positions` wait for each other, on average; None without a device."""
        times = [p.time for p in self.positions if p.time is not None]
        waits = [s for time in times for lane, s in time.exposed.items() if set(lane.split("+")) & {*self.branches_on}]
        return sum(waits) / sum(time.seconds for time in times) if times else None

    def _timeline(self) -> Timeline:
        """Return the events of the rank by their estimated times, of a plan with a device."""
        assert self.device is not None
        assert self.time is not None
        name, ends = f"rank {self.rank} of {format_axes(self.mesh)}, {self.device.name}", self.time.times
        rows = [Entry(begin, end, e.live, e) for begin, end, e in zip((0.0, *ends), ends, self.events, strict=False)]
        spans = {s.number: (s.start, s.end) for s in self.time.lanes if s.number is not None}
        return timeline(self.rank, name, Record(0.0, self.time.seconds, self.memory.arguments, rows), spans)

    def __repr__(self) -> str:
        rows = [f"  {size(n):>10}  {100 * n / max(1, self.memory.peak):3.0f} %  {part}" for part, n in self._parts()]
        flops = [f"  {flops:10.3e}  {kind} in {short_dtype(dtype)}" for (kind, dtype), flops in self.flops.items()]
        schedule = self._position_rows(letters)
        width = max([len(head) for head, _ in schedule[1:]], default=0)
        positions = [
            f"{'  ' * (i > 0)}{head:<{width}}  {picture}".rstrip() for i, (head, picture) in enumerate(schedule)
        ]
        return "\n".join([self._title(), self._peak(), *rows, *self._notes(), *positions,
                          *["FLOPs of the rank"][: len(flops)], *flops, *self._warnings(), self._sent(),
                          *transfer_rows(self.transfers)])  # fmt: skip

    def _repr_html_(self) -> str:
        peak = max(1, self.memory.peak)
        parts = [Row((part, size(n), bar(n / peak, f"{100 * n / peak:.3g} %"), ""), [
            Row((what, size(nbytes), bar(nbytes / peak, f"{100 * nbytes / peak:.3g} %"), where.lines if where else ""))
            for nbytes, what, where in self.memory.largest if what.startswith(part)
        ]) for part, n in self._parts()]  # fmt: skip
        schedule = self._position_rows(strip)
        positions = [*[LEGEND] * (self.bubble is not None), *filter(None, itertools.chain.from_iterable(schedule))]
        work = [(kind, short_dtype(dtype), f"{flops:.3e}") for (kind, dtype), flops in self.flops.items()]
        return page(
            self._title(), self._peak(), table(parts, head=("at the peak", "bytes", "", "line"), align="lrll", most=8),
            *self._notes(), *positions,
            *[table(work, head=("FLOPs of the rank", "dtype", ""), align="llr")][: len(work)],
            *self._warnings(), self._sent(), *[transfer_table(self.transfers)][: len(self.transfers)],
        )  # fmt: skip

    def _title(self) -> str:
        return f"planned on {math.prod(self.mesh.values())} ranks ({format_axes(self.mesh)}), as rank {self.rank}"

    def _peak(self) -> str:
        where = f", at {self.memory.where!r}" if self.memory.where else ""
        whose = "the device with the most" if self.positions else "each device"
        return f"peak {size(self.memory.peak)} of {whose}{where}"

    def _parts(self) -> list[tuple[str, int]]:
        return [(part, n) for part, n in self.memory.parts.items() if n]

    def _notes(self) -> list[str]:
        notes = [f"host memory {size(self.memory.host)}"] if self.memory.host else []
        if self.device is not None and self.time is not None:
            share = 100 * self.memory.peak / self.device.memory
            notes.append(f"{self.device.name}: {share:.3g} % of its memory; {self.time!r}")
        return notes

    def _position_rows(self, draw: Callable[..., str]) -> list[tuple[str, str]]:
        """Return a title, then the place and the peak of each of `positions`, with a drawing of its schedule."""
        bubble = "" if self.bubble is None else f", which wait for each other {self.bubble:.1%} of the step"
        rows = [(f"{len(self.positions)} positions on {', '.join(self.branches_on)}{bubble}", "")]
        for p in self.positions:
            coords = dict(zip(self.mesh, coords_of(p.rank, list(self.mesh.values())), strict=True))
            head = f"{format_axes({a: coords[a] for a in self.branches_on})}  peak {size(p.memory.peak)}"
            rows.append((head, draw(p._timeline().compute, 0.0, p.time.seconds) if p.time else ""))
        return rows if self.positions else []

    def _warnings(self) -> list[str]:
        return ["warnings", *(f"  {text}" for text in self.warnings)] if self.warnings else []

    def _sent(self) -> str:
        count = number_of(len(self.transfers), "transfer")
        return f"{count} of the rank, which sends {size(sum(t.sent for t in self.transfers))}"


@checked
def plan(f: ShardMapped, *args: Any, device: Device | None = None) -> Plan:
    """Run a step without data, as one rank of a mesh of any size: its memory, FLOPs and transfers.

    The rank runs `f`, the function that trains, on fake tensors, with the schedule and the buffers of a real run, and
    follows every storage. The mesh is `f`'s, or any other by `f.on(make_mesh(kind="abstract", ...))`. Arguments
    may be `Deferred`, `Sharded` or tensors: only shapes and dtypes matter. The plan is that of a step which is not the
    first: buffers that one call keeps for the next are there from the start.

    Without `device` on a mesh of CPUs, and with one that has no queue, kernels are a CPU's, and transfers over up to 16
    ranks are messages over gloo, whose buffers differ. On accelerators transfers are collectives of torch, host memory
    is counted apart, and attention is a fused kernel.
    Counted are the bytes of tensors, and what oneDNN's convolutions and LSTMs allocate on a CPU; not what other kernels
    do, which `warnings` lists, nor what an allocator rounds up.

    The first rank has the longest part of every dim that is split evenly. Where parts of an argument differ, the last
    rank is planned too, and the rank with the longest of chosen lengths. The plan with the highest peak is returned. A
    program that asks for `fs.axis_position` is planned at each position of these axes: `Plan.positions` has them all.

    >>> step = shard_map(lambda x: psum(x.sum(), "data"), mesh=make_mesh(data=4), in_specs=(P("data"),), out_specs=P())
    >>> plan(step, fs.init.zeros((8, 3))).memory.peak
    40

    Types are not checked: `fs.check` does that. A module of `fs.defer` whose draws are by a key needs that check.

    Raises ShardingError for a program that needs the value of a tensor, and for arguments that do not fit their specs.
    """
    return max(plan_ranks(f, args, device), key=lambda p: p.memory.peak)


def plan_ranks(f: ShardMapped, args: tuple[Any, ...], device: Device | None) -> list[Plan]:
    """Return the plan of the first rank, and of others where ranks have parts of different sizes.

    Of a program that branches on its position, each is the plan of the position with the highest peak.
    """
    mesh = f.mesh
    runs, groups, over = run_groups(
        lambda rank: _run_rank(f, args, rank, device),
        lambda runs: [split for run in runs for split in run.splits],
        mesh.axes,
    )
    parameters = {s.path for s in runs[0].memory.storages if s.argument and s.part == "parameters"}
    splits = splits_of(placed_leaves(args, f._in_specs), mesh.axes, parameters, runs[0].events, over)
    plans = {rank: plan_of(dict(mesh.axes), rank, run.events, run.memory, device, splits)
             for rank, run in runs.items()}  # fmt: skip
    return [plan_together([plans[r] for r in group], over) for group in groups]


class _RankRun(NamedTuple):
    """The run of one rank; the axes and the sizes of dims that are split, and axes that it branches on."""

    events: Sequence[Event]
    memory: Memory
    splits: list[tuple[tuple[str, ...], Size]]
    branches_on: set[str]


def _run_rank(f: ShardMapped, args: tuple[Any, ...], rank: int, device: Device | None) -> _RankRun:
    """Run a step as one rank, after a check if its first call must be checked."""
    try:
        return _run_unchecked(f, args, rank, device)
    except UncheckedError:
        if f._check == "never":
            raise
    dry_run(f, args, rank)  # outside of the except clause, whose error holds the tensors of the first run
    return _run_unchecked(f, args, rank, device)


def _run_unchecked(f: ShardMapped, args: tuple[Any, ...], rank: int, device: Device | None) -> _RankRun:
    accelerator = f.mesh.device.type != "cpu" if device is None else device.queued
    recorder, splits, branches_on = _Recorder(accelerator), list[tuple[tuple[str, ...], Size]](), set[str]()
    mesh = planned_mesh(f.mesh.axes, rank, recorder, accelerator=accelerator)

    def observe(plan: CallPlan, g: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        splits[:] = [(axes, n) for axes, ns in plan.split_sizes.items() for n in ns]
        recorder.begin(plan.names, tree.leaves_with_path(inputs))
        with _Gradients(recorder.note_gradients, accelerator), recorder:
            out = g(*inputs)
        recorder.end(out)
        branches_on.update(region().branches_on)
        return out

    with recording():
        for _ in planned_calls(f, args, mesh, observe):
            if not recorder.replaced_buffers():
                break
    return _RankRun(*recorder.outcome(), splits, branches_on)


def plan_together(plans: Sequence[Plan], over: tuple[str, ...]) -> Plan:
    """Return the plan with the highest peak, of ranks that wait for each other: one at each position of `over`."""
    if (device := plans[0].device) is not None:
        times = joined({p.rank: p.events for p in plans}, plans[0].mesh, device)
        plans = [replace(p, time=time) for p, time in zip(plans, times, strict=True)]
    highest = max(plans, key=lambda p: p.memory.peak)
    if not over:
        return highest
    warnings = tuple(dict.fromkeys(text for p in plans for text in p.warnings))
    return replace(highest, warnings=warnings, branches_on=over, positions=tuple(plans))


def plan_of(
    mesh: dict[str, int], rank: int, events: Sequence[Event], memory: Memory, device: Device | None, splits: Splits
) -> Plan:
    """Return the plan of a rank with these events, without times."""
    transfers = tuple(e.transfer for e in events if isinstance(e, Start))
    flops: Counter[tuple[Kind, torch.dtype]] = Counter()
    for e in events:
        if isinstance(e, Operation) and e.flops:
            flops[e.kind, e.dtype] += e.flops
    warnings = warnings_of(unknown_operations(events), events, device, splits)
    return Plan(mesh, rank, tuple(events), memory, transfers, dict(flops), device, warnings=warnings, splits=splits)


def _adds_to_gradient(x: Any, y: Any) -> bool:
    """Return whether autograd adds a gradient to another, in place."""
    dense = isinstance(x, Tensor) and isinstance(y, Tensor) and x.nbytes == x.untyped_storage().nbytes()
    return dense and x.shape == y.shape and x.dtype == y.dtype and is_summed_in_place(x)


class _Gradients(TorchFunctionMode):
    """A mode above torch.func that passes on what is differentiated, and its gradients; not those inside a backward.

    With an accelerator it runs recurrent layers by its kernels.
    """

    def __init__(self, note: Callable[[Sequence[Tensor], Sequence[Tensor | None]], None], accelerator: bool) -> None:
        super().__init__()
        self._note, self._accelerator = note, accelerator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = leaves_of(args[0]) if func is Tensor.backward else []  # backward frees the graph
        if self._accelerator and getattr(func, "__name__", "") in RECURRENT and not kwargs:
            return on_gpu(func.__name__, args, lambda: func(*args))
        out = func(*args, **kwargs)
        if func is torch.autograd.grad:
            xs = args[1] if len(args) > 1 else kwargs["inputs"]
            self._note([xs] if isinstance(xs, Tensor) else xs, out)
        elif leaves:
            self._note(leaves, [x.grad for x in leaves])
        elif func == _GET_GRAD:
            self._note([args[0]], [out])
        elif func == _SET_GRAD and isinstance(args[1], Tensor):  # backward will add to it
            self._note([args[0]], [args[1]])
        return out


class _Recorder(OperationMode):  # type: ignore[no-untyped-call]
    """A mode that notes the operations of a rank, and a `Watch` of its transfers."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: torch compiles the functions of `torch.cond` and `flex_attention` without this mode."""
        return True

    def __init__(self, accelerator: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self._accelerator = accelerator
        self.storages = Storages()
        self._gradients: list[tuple[Storage, Storage]] = []  # what is differentiated, and its gradient
        self._results: list[Storage] = []
        self._kept: list[Storage] = []  # allocated in this call, and left for the next one
        self._is_transferring = False
        self._started: list[tuple[list[Storage], Sequence[Tensor]]] = []  # their arguments, and what gathers write

    def begin(self, names: Sequence[str], leaves: Sequence[tuple[tree.Path, Any]]) -> None:
        """Note the arguments of a call."""
        self.events.clear()
        self._gradients.clear()
        self._started.clear()
        self.storages.begin_again()
        for name, (path, x) in zip(names, leaves, strict=True):
            if isinstance(x, Tensor) and self.storages.get(x) is None:
                self.storages.add(x, name, None, argument=True, path=path)

    def end(self, out: Any) -> None:
        """Note the results of a call."""
        results = [self.storages.get(x) for x in tree.leaves(out) if isinstance(x, Tensor)]
        self._results = [s for s in results if s is not None]
        self._kept = [s for s in self.storages.alive() if not s.argument and all(s is not r for r in results)]

    def replaced_buffers(self) -> bool:
        """Return whether a call has dropped a buffer for a larger one, which the next call begins with."""
        pool = {s.dtype for s in self._kept if s.born} & {torch.uint8}
        return bool(pool) and any(s.name == "empty" and s.dtype == torch.uint8 and s.died is not None
                                  for s in self.storages.all)  # fmt: skip

    # --- operations ---

    def run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace == "prim":  # a question about a tensor
            return func(*args, **kwargs)
        if is_view(func):
            return view_of_fake(func, args, kwargs)
        if func in _IN_PLACE and in_backward() and self.storages.is_newest(args[0]):
            func = _IN_PLACE[func]
        elif func is _aten.add.Tensor and phase_now() == "backward" and _adds_to_gradient(*args):
            func = _aten.add_.Tensor
        inputs = tensors_in(args, kwargs)
        before = {storage_id(x) for x in inputs}
        out = run_on_shapes(func, args, kwargs)
        written = written_by(func, args, kwargs)
        new = [x for x in tensors_in(out) if storage_id(x) not in before and self.storages.get(x) is None]
        if not new and not written:
            return out
        phase, storages = phase_now(), self.storages
        known = [s for s in map(storages.get, inputs) if s is not None]
        where = self._line(known, phase)
        if phase != "backward":
            for s in known:
                s.read_at = storages.clock, where
        part = self._part_of_new(func, known, phase)
        for x in new:
            if storages.get(x) is None:
                storages.add(x, name_of(func), where, phase=phase, part=part)
        self._note_origins(func, args, inputs, [*new, *written], phase)
        workspace = workspace_of(func, args, out, self._accelerator)
        if workspace:
            storages.add_workspace(workspace, name_of(func), where, phase)
        work = work_of(func, args, kwargs, out, inputs, new, written)
        done = Operation(*work, storages.live + (workspace or 0), where, phase, workspace)
        self._append(replace(done, name=done.name.replace("_for_cpu", "")) if self._accelerator else done)
        return out

    def _note_origins(
        self, func: Any, args: tuple[Any, ...], inputs: Sequence[Tensor], outs: Sequence[Tensor], phase: Phase
    ) -> None:
        """Note what the results of an operation are made of, element by element, and which arguments are its weights.

        Without a gradient, these are arguments of the size of the result: W + A B is made of W, x + bias of neither.
        """
        known = {x: s for x in inputs if (s := self.storages.get(x)) is not None}
        has_gradient = phase == "backward" or any(s.has_gradient for s in known.values())
        sources: Sequence[Storage] = ()
        if is_elementwise(func) and has_gradient:
            sources = list(known.values())
        elif is_elementwise(func):
            sizes = {x.numel() for x in outs}
            found = [arguments_of(s) for x, s in known.items() if kind_of(func) == "copy" or x.numel() in sizes]
            if kind_of(func) != "copy" or all(found):  # a cache with new rows is made of more than the cache
                sources = list(dict.fromkeys(a for arguments in found for a in arguments))
        for x in outs:
            if (s := self.storages.get(x)) is not None:
                s.has_gradient |= has_gradient
                s.is_state |= not has_gradient
                if sources:
                    s.made_of.append(sources)
        if not has_gradient and (at := weight_arguments(func)):
            weights = {id(x) for x in tensors_in([args[i] for i in at if i < len(args)])}
            for x, s in known.items():
                for a in arguments_of(s):
                    if id(x) in weights:
                        a.weight_at.setdefault(name_of(func) in ("bmm", "baddbmm"), self.storages.clock)
                    else:
                        a.is_data = True

    def note_gradients(self, xs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Note the gradients of tensors, which torch.func may have wrapped."""
        for x, g in zip(xs, gradients, strict=True):
            pair = None if g is None else (self.storages.get(unwrapped(x)), self.storages.get(unwrapped(g)))
            if pair is not None and pair[0] is not None and pair[1] is not None:
                pair[1].has_gradient = True
                self._gradients.append((pair[0], pair[1]))

    def _part_of_new(self, func: Any, inputs: Sequence[Storage], phase: Phase) -> str | None:
        if self._is_transferring:
            return "buffers"
        weights = bool(inputs) and phase != "update" and all(s.argument or s.part == "gathered" for s in inputs)
        is_copy = kind_of(func) == "copy" and name_of(func) not in CONSTANTS
        return "gathered" if weights and is_copy and inputs[0].dtype.is_floating_point else None

    def _line(self, inputs: Sequence[Storage], phase: Phase) -> Site | None:
        """Return the user's line; in backward the last line of forward that read a tensor which is read now."""
        read = [s.read_at for s in inputs if not s.argument and s.part is None] if phase == "backward" else []
        return max(read, key=lambda at: at[0], default=(-1, None))[1] or site()

    def _append(self, event: Event) -> None:
        self.events.append(event)
        self.storages.clock += 1

    # --- transfers ---

    def begin_transfer(self, transfer: Transfer | None, xs: Sequence[Tensor], into: Sequence[Tensor]) -> int:
        if transfer is None:  # a plan exchanges no texts
            return -1
        number, sources = len(self._started), [s for s in map(self.storages.get, xs) if s is not None]
        self._started.append((sources, into))
        self._append(Start(transfer, number, self.storages.live))
        self._is_transferring = True
        return number

    def end_start(self, number: int) -> None:
        self._is_transferring = False

    def begin_wait(self, number: int) -> None:
        self._is_transferring = True

    def end_transfer(self, number: int, results: Sequence[Tensor]) -> None:
        if number < 0:
            return
        self._is_transferring = False
        sources, into = self._started[number]
        self._started[number] = [], ()  # which frees what the transfer has written
        weights = bool(sources) and all(s.argument or s.part == "gathered" for s in sources)
        for x in (*results, *into):
            s = self.storages.get(x)
            if s is not None and not s.argument:
                s.part = "gathered" if weights else None
                s.has_gradient = any(source.has_gradient for source in sources)
                s.made_of = [sources if s.has_gradient else [a for source in sources for a in arguments_of(source)]]
                if not weights:
                    s.sources = sources
        self._append(Wait(number, self.storages.live))

    # --- outcome ---

    def outcome(self) -> tuple[list[Event], Memory]:
        """Return the events and the memory, once the step has ended."""
        # Storages that outlive the step and are not results are kept for the next one, which has them from its start.
        kept = [(s.born, s.nbytes) for s in self._kept if not s.host]
        for s in self._kept:
            s.born = 0
        backward = [i for i, e in enumerate(self.events) if isinstance(e, Operation) and e.phase == "backward"]
        last = backward[-1] if backward else len(self.events)
        for s in self.storages.all:
            if s.phase == "forward" and s.born > last:
                s.phase = "update"
                s.part = None if s.part == "gathered" else s.part  # a new parameter, which is made of the old one
        events: list[Event] = []
        for i, e in enumerate(self.events):
            later = sum(nbytes for born, nbytes in kept if born > i)
            changes: dict[str, Any] = {"live": e.live + later} if later else {}
            if isinstance(e, Operation) and i > last and e.phase == "forward":
                changes["phase"] = "update"
            events.append(replace(e, **changes) if changes else e)
        arguments = sum(s.nbytes for s in self.storages.all if s.argument)
        if not events:
            return [], Memory(arguments, 0, None, {**dict.fromkeys(PARTS, 0), "other": arguments}, arguments)
        at = max(range(len(events)), key=lambda i: events[i].live)
        assign_parts(self.storages.all, self._gradients, self._results, last)
        parts, largest = parts_and_largest(tensors_at(self.storages.all, at))
        return events, Memory(events[at].live, at, line_of(events[at]), parts, arguments, self.storages.host_peak,
                              largest, tuple(self.storages.all))  # fmt: skip


def line_of(event: Event) -> Site | None:
    """Return the user's line of an event."""
    if isinstance(event, Operation):
        return event.where
    return event.transfer.where if isinstance(event, Start) else None
