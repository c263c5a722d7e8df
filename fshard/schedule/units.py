"""Units of a program that calls them in any order: their leaves are gathered for each call, and in backward.

    forward   gather 1 | run unit 0, gather 2 | run unit 1, gather 3 | ...
    backward  ... | differentiate unit 3, reduce 4 then gather 2 | differentiate unit 2, reduce 3 then gather 1 | ...

`scan` has its loop, and gives each block a separate graph. Here a program that does not know about units runs
unchanged, in one graph, so that tensors keep their gradients on every way from unit to unit:

    trained shards -> _Collect -> token -> _Weights of each call -> gathered leaves -> the operations of the unit

1. If autograd saves a view of a gathered leaf in a unit, it is stored as a `_SavedWeight`: the number of the leaf, and
   the view's offset, size and stride. So the gathered leaves can be freed after the call.
2. In backward the first `_SavedWeight` of a call that is needed gathers its unit again. Each leaf is freed with its
   last `_SavedWeight`.
3. `_Weights` runs backward when all gradients of a call's leaves are computed, and starts their sum over the ranks. The
   wait comes later: `_Weights` returns only the gradient of the token. `_Collect` runs after all units, and returns the
   sums as the gradients of the shards.
4. Halfway in the unit that is differentiated next, when half the bytes of its views are used, this sum ends, and the
   gather of the unit that was called before starts: about one unit's leaves and one's gradients are in memory at once.
   Half is enough: products take time by these bytes, and the sum and the gather, which send the same bytes, would
   share the network in all of the unit. With `remat` the sum ends halfway in the recomputation.

A gathered leaf has separate memory, freed when nothing refers to it. So a tensor that outlives its unit is never
overwritten.

Only memory depends on the lifetimes of objects. They differ between ranks (one keeps an output to log it; another
collects a reference cycle earlier), and all ranks must start the same transfers. So a schedule shares only gathers that
it holds itself, in `ready` and `ahead`, and gathers ahead for each call that saved a leaf, even if that part of the
graph is gone. autograd runs nodes in the reverse order of their operations, so it does not return to a call that it has
passed: the leaves gathered for that call are freed. Ranks that save other tensors are halfway at other places. So no
other transfer may come between: a call that has others in it gathers ahead at once, and each call before its own sum.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fshard._core.callsite import Site, site
from fshard._core.host_memory import wait_for_copies_to_host
from fshard._core.protocol import PendingTransfer
from fshard._core.region import Region, checker, storage_key
from fshard._core.torch import version_of
from fshard._core.transfers import is_observed, transfer_count, transposing
from fshard.errors import fail
from fshard.grad import fill_tensors, split_tensors

from .buckets import BucketPlan, GatherBuffer, start_copy, start_gather, start_reduce
from .options import GatherOptions
from .overlap import refuse_transforms_of_backward
from .recompute import SavedTensor, autocast_of, refill


@dataclass(frozen=True)
class Unit:
    """The leaves of one unit: this rank's shards, their buckets, and for each shard whether it is differentiated."""

    shards: list[Tensor]
    plan: BucketPlan
    differentiated: list[bool]

    @staticmethod
    def from_shards(shards: Sequence[Tensor], plan: BucketPlan) -> Unit:
        differentiated = [torch.is_grad_enabled() and x.requires_grad for x in shards]
        return Unit([x.detach() for x in shards], plan, differentiated)


# (leaves of the unit, arguments, keyword arguments, calls of units inside it) -> the unit's result
Rerun = Callable[[list[Tensor], Any, Any, Any], Any]


class _Gathered:
    """The gathered leaves of a unit, or their pending gather."""

    def __init__(self, region: Region, name: str, plan: BucketPlan, shards: Sequence[Tensor]) -> None:
        self.name = name
        buffer = GatherBuffer.of_leaves(plan, region) if plan.nbytes else None
        self._leaves, self._pending = start_gather(region, plan, shards, buffer)
        parts = enumerate(zip(self._leaves, plan.slices, strict=True))
        self.storages = {storage_key(x): leaf for leaf, (x, part) in parts if part is not None and x.numel()}
        self.versions = [version_of(x) for x in self._leaves]

    def wait(self) -> list[Tensor]:
        while self._pending:
            self._pending.pop(0)()
        return self._leaves

    def __del__(self) -> None:
        """Wait, if a guess was wrong or backward does not reach the unit: a transfer must not write to freed memory."""
        if getattr(self, "_pending", None):
            self.wait()

    def leaf_of(self, x: Tensor) -> int | None:
        """Return the leaf that a tensor in the memory of this unit is a view of; `None` if it has other values."""
        leaf = self.storages[storage_key(x)]
        same = x.dtype == self._leaves[leaf].dtype and version_of(x) == self.versions[leaf]
        return leaf if same and not x.is_conj() and not x.is_neg() else None


class _SavedWeight:
    """A view of a gathered leaf that autograd saved, as a position in the leaf. It lives as long as its node."""

    gathered: Tensor | None
    __slots__ = ("__weakref__", "call", "gathered", "leaf", "offset", "size", "stride")

    def __init__(self, call: int, leaf: int, x: Tensor) -> None:
        self.call, self.gathered = call, None  # gathered: the leaf, in backward
        self.leaf, self.size, self.stride, self.offset = leaf, x.size(), x.stride(), x.storage_offset()


class _Call:
    """One call of a unit: the saved tensors that need its leaves, and with `remat` its arguments."""

    def __init__(self, unit: str, at: int) -> None:
        self.unit = unit
        self.end = at + 1  # position of the first call that is not inside this one
        self.saved: list[weakref.ref[Any]] = []  # _SavedWeight, or with `remat` SavedTensor
        self.rerun: Callable[[list[Tensor], Any], Any] | None = None  # (leaves, calls of units inside)
        self.autocast: Callable[[], Any] = contextlib.nullcontext  # for the repetition
        self.transfers = False  # whether its computation or gradient starts any, or units inside it may
        self.is_differentiated = False  # whether its backward pass has begun
        self.nbytes = self.used = 0  # of views of leaves: saved in forward, and used in backward

    @property
    def is_needed(self) -> bool:
        """Return whether a backward pass may gather the unit for this call: the same on all ranks."""
        return not self.is_differentiated and bool(self.saved)


@dataclass(frozen=True)
class UnitOptions(GatherOptions):
    """Options of a schedule: see `Apply.unshard`."""

    remat: bool = False


class UnitSchedule:
    """The units of one forward pass and its backward pass.

    The graph refers to it. It must not refer to a tensor of the graph: Python could not free such a cycle.
    """

    def __init__(self, region: Region, units: Mapping[str, Unit], options: UnitOptions) -> None:
        self.region, self.units, self.options = region, units, options
        self.order = list(units)  # as they are defined
        self.position = {name: i for i, name in enumerate(self.order)}
        self.origin: Site | None = site() if is_observed() else None
        self.ready: dict[str, _Gathered] = {}  # in forward: gathered, or pending
        self.before: str | None = None  # in forward: the unit of the call before
        self.copies: dict[str, tuple[BucketPlan, PendingTransfer]] = {}  # pending copies of shards from host memory
        self.kept: dict[str, tuple[BucketPlan, list[Tensor]]] = {}  # parts of released leaves, and their plan
        self.ahead: dict[int, _Gathered] = {}  # in backward: gathered for calls that it has not reached, by position
        self.waiting: int | None = None  # in backward: the call that has not started the gathers ahead of it
        self.owners: weakref.WeakValueDictionary[int, _Gathered] = weakref.WeakValueDictionary()  # by storage
        self.calls: list[_Call] = []
        self.latest: dict[str, int] = {}  # latest call of each unit
        self.pending: deque[Callable[[], None]] = deque()  # sums of gradients
        # Whether the wait for a sum starts another: all ranks at one place.
        self.sums_twice = any(b.gather and b.vary for unit in units.values() for b in unit.plan.buckets)
        self.sums: dict[tuple[str, int], Tensor] = {}  # gradient of a leaf of a unit

    # --- gathers ---

    def start(self, name: str) -> _Gathered:
        """Start to gather a unit's leaves."""
        plan, copy = self.copies.pop(name) if name in self.copies else self._start_copy(name)
        for bucket in plan.buckets if checker() is not None else ():
            if bucket.gather is not None:  # equal blocks have equal shapes: nothing else would notice
                what = f"gather of unit {name!r}; each rank must call the same units in the same order"
                bucket.gather.comm.agree(what, bucket.gather.axes, self.region.device)
        gathered = _Gathered(self.region, name, plan, copy())
        self.owners.update(dict.fromkeys(gathered.storages, gathered))
        return gathered

    def held(self, name: str) -> _Gathered | None:
        """Return a unit's leaves, or their pending gather, if the schedule holds them."""
        return next((g for g in (*self.ready.values(), *self.ahead.values()) if g.name == name), None)

    def start_copies(self, name: str) -> None:
        """Start to copy a unit's shards from host memory, so that they are on the device when its gather starts."""
        if name not in self.copies and self.held(name) is None and any(b.host for b in self.units[name].plan.buckets):
            self.copies[name] = self._start_copy(name)

    def _start_copy(self, name: str) -> tuple[BucketPlan, PendingTransfer]:
        """Start to copy the tensors that a unit is gathered from to the device; also return the plan of the gather."""
        plan, shards = self.kept.get(name) or (self.units[name].plan, self.units[name].shards)
        return plan, start_copy(self.region, plan, shards)

    def gather_forward(self, name: str, running: Sequence[str]) -> list[Tensor]:
        """Return the leaves of a unit that is called now, and start the gathers of the units defined after it."""
        at, ahead = self.position[name], self.options.prefetch
        window = self.order[at : at + 1 + ahead]
        if self.options.release:
            self.drop(self.ready, [other for other in self.ready if other not in window and other not in running])
        for other in window:
            if other not in self.ready:
                self.ready[other] = self.start(other)
        for other in self.order[at + 1 + ahead : at + 2 + ahead]:
            self.start_copies(other)
        return self.ready[name].wait()

    def start_forward(self) -> None:
        """Start the gathers of the first units, while the program before them runs."""
        for name in self.order[: self.options.prefetch]:
            self.ready[name] = self.start(name)

    def drop(self, held: dict[Any, _Gathered], keys: Sequence[Any]) -> None:
        """Free leaves. All ranks wait at this line for a pending gather that no call waited for: of a wrong guess."""
        for key in keys:
            held.pop(key).wait()

    def release(self, name: str) -> None:
        """Free the leaves of a unit after its call; keep them if the call before was of the same unit."""
        repeated, self.before = self.before == name, name
        if self.options.release and not repeated:
            self.keep(name)
            self.drop(self.ready, [name])

    def keep(self, name: str) -> None:
        """Keep parts of a unit's leaves for backward, by `release`."""
        unit, at = self.units[name], self.latest.get(name)
        if self.options.kept_axes and name not in self.kept and at is not None and self.calls[at].saved:
            kept = unit.plan.keep_parts(self.options.kept_axes, self.ready[name].wait(), unit.shards)
            if kept is not None:
                self.kept[name] = kept

    def end_forward(self) -> None:
        """Free all gathered leaves."""
        if self.options.release:
            self.drop(self.ready, list(self.ready))

    def gather_backward(self, at: int) -> list[Tensor]:
        """Return the leaves for the backward pass of a call. The gathers for the calls before it start halfway."""
        call = self.calls[at]
        call.is_differentiated = True
        with self._transposing():
            self.start_ahead()  # of a call around this one
            self.drop(self.ahead, [i for i in self.ahead if i >= call.end])
            leaves = self.gather_ahead(at).wait()
            self.waiting = at
            unit, at_once = self.units[call.unit], checker() is not None or not self.region.comm.is_scheduled
            if at_once or call.transfers or 2 * call.nbytes < unit.plan.nbytes or not any(unit.differentiated):
                self.start_ahead()
            if not any(before.unit == call.unit and before.is_needed for before in self.calls[:at]):
                self.kept.pop(call.unit, None)
        return leaves

    def start_ahead(self) -> None:
        """Start the gathers for the calls before the one that backward is in, if they have not started."""
        if self.waiting is not None:
            at, self.waiting = self.waiting, None
            gathered, count = self.ahead.pop(at), self.options.ahead
            before = [i for i in reversed(range(at)) if self.calls[i].is_needed][: count + 1]
            for i in before[:count]:
                if self.calls[i].unit == gathered.name:
                    self.ahead.setdefault(i, gathered)
            del gathered  # and with it its leaves that were used
            for i in before[:count]:
                self.gather_ahead(i)
            for i in before[count:]:
                self.start_copies(self.calls[i].unit)

    def use(self, at: int, nbytes: int) -> None:
        """Count a use of a saved view of a leaf; when half are used, end the sum before and start the gathers ahead."""
        call = self.calls[at]
        call.used += nbytes
        if at == self.waiting and 2 * call.used > call.nbytes:
            with self._transposing():
                if call.used > nbytes and not self.sums_twice:
                    self.end_sums(self.options.pending_sums - 1)
                self.start_ahead()

    def gather_after(self, at: int) -> None:
        """Start the gather for the call before one whose gradients are computed, if `backward_prefetch` is "post"."""
        if self.options.backward_prefetch == "post":
            with self._transposing():
                for i in [i for i in range(at) if self.calls[i].is_needed][-1:]:
                    self.gather_ahead(i)

    def gather_ahead(self, at: int) -> _Gathered:
        """Return the leaves for the backward pass of a call, or their pending gather; calls of a unit share them."""
        name = self.calls[at].unit
        if at not in self.ahead:
            self.ahead[at] = self.held(name) or self.start(name)
        return self.ahead[at]

    # --- saved tensors ---

    def pack(self, x: Tensor) -> _SavedWeight | SavedTensor:
        """Return what autograd keeps in place of a tensor that it saves in a unit."""
        owner = self.owners.get(storage_key(x))
        leaf = None if owner is None else owner.leaf_of(x)
        if owner is None or leaf is None or owner.name not in self.latest:  # not there: gathered under no_grad
            return SavedTensor(x)
        at = self.latest[owner.name]
        saved = _SavedWeight(at, leaf, x)
        self.calls[at].saved.append(weakref.ref(saved))
        self.calls[at].nbytes += x.nbytes
        return saved

    def unpack(self, saved: _SavedWeight | SavedTensor) -> Tensor:
        """Return the tensor that `pack` was called with; gather its unit if it is not gathered."""
        if isinstance(saved, SavedTensor):
            return saved.get()
        if saved.gathered is None:
            leaves = self.gather_backward(saved.call)
            for ref in self.calls[saved.call].saved:
                if (other := ref()) is not None:
                    other.gathered = leaves[other.leaf]
        assert saved.gathered is not None
        x = saved.gathered.as_strided(saved.size, saved.stride, saved.offset)
        self.use(saved.call, x.nbytes)
        return x

    def discard(self, call: _Call, x: Tensor) -> SavedTensor:
        """Keep nothing of a tensor that a unit saves, with `remat`."""
        saved = SavedTensor(x)
        saved.x = None
        call.saved.append(weakref.ref(saved))
        call.nbytes += x.nbytes if storage_key(x) in self.owners else 0
        return saved

    def load(self, at: int, saved: SavedTensor) -> Tensor:
        """Return a discarded tensor, after a recomputation of its unit if there was none."""
        if saved.x is None:
            self.recompute(at)
        x = saved.get()
        if storage_key(x) in self.owners:
            self.use(at, x.nbytes)
        return x

    def recompute(self, at: int) -> None:
        """Run a unit again, to fill its discarded tensors that are still needed."""
        call = self.calls[at]
        gathered = self.gather_backward(at)
        # Ranks must start the same transfers; a checker and a dry run need all operations.
        repeats_all = call.transfers or checker() is not None or not self.region.comm.is_scheduled
        if call.rerun is None:
            raise fail(f"apply.unshard: unit {call.unit!r} differentiates inside its forward, and remat=True runs it "
                       "again", fix="remat=False; or choose the modules inside it; or units=None")  # fmt: skip
        differentiated = self.units[call.unit].differentiated
        leaves = [x.detach().requires_grad_(d) for x, d in zip(gathered, differentiated, strict=True)]
        run = functools.partial(call.rerun, leaves, _UnitCallsAgain(self))
        # The sum before ends halfway, or where another transfer may come between, before this call's gradients.
        end_sums = functools.partial(self.end_sums, self.options.pending_sums - 1)
        with self._transposing(), torch.enable_grad(), call.autocast():
            refill(call.saved, run, lambda: not repeats_all, None if call.transfers else end_sums)
            end_sums()
        call.rerun = None  # and with it the arguments

    # --- gradients ---

    def start_sums(self, name: str, grads: Sequence[Tensor | None]) -> None:
        """Start to sum the gradients of a unit's differentiated leaves over the ranks."""
        unit, started = self.units[name], []
        left = {leaf for leaf, d in enumerate(unit.differentiated) if d}
        filled = dict(enumerate(grads))
        with self._transposing():
            self.start_ahead()
            for bucket in unit.plan.buckets:
                chosen = [k for k, leaf in enumerate(bucket.which) if leaf in left]
                leaves = [bucket.which[k] for k in chosen]
                left.difference_update(leaves)
                if not chosen:
                    continue
                parts = [unit.plan.zero_gradient(unit.shards, leaf, self.region.device) if g is None else g
                         for leaf in leaves for g in [filled.pop(leaf)]]  # fmt: skip
                if bucket.gather is None and bucket.vary is not None:  # a sum in place; others may use the gradient
                    parts = [g.clone(memory_format=torch.contiguous_format) for g in parts]
                started.append((leaves, start_reduce(bucket, chosen, [g.contiguous() for g in parts])))
                del parts

        def finish() -> None:
            for leaves, wait in started:
                for leaf, g in zip(leaves, wait(), strict=True):
                    self._add(name, leaf, g)

        for leaf in left:
            if (g := filled.pop(leaf)) is not None:
                self._add(name, leaf, g)
        self.pending.append(finish)
        self.end_sums(self.options.pending_sums)

    @torch.no_grad()
    def end_sums(self, most: int) -> None:
        """Wait for the sums of gradients that were started first, until at most this number is pending."""
        while len(self.pending) > max(most, 0):
            self.pending.popleft()()

    def take_sums(self) -> list[Tensor | None]:
        """Return the gradients of all differentiated shards, after the wait for their sums."""
        with self._transposing():
            self.end_sums(0)
            self.waiting = None
            self.drop(self.ahead, list(self.ahead))
            if any(b.host for unit in self.units.values() for b in unit.plan.buckets):
                wait_for_copies_to_host(self.region.device)
        sums, self.sums = self.sums, {}
        return [sums.get((name, leaf)) for name, unit in self.units.items()
                for leaf, d in enumerate(unit.differentiated) if d]  # fmt: skip

    def _add(self, name: str, leaf: int, g: Tensor) -> None:
        before = self.sums.get((name, leaf))
        self.sums[name, leaf] = g if before is None else before + g

    def _transposing(self) -> contextlib.AbstractContextManager[None]:
        return transposing(self.origin) if self.origin else contextlib.nullcontext()


class UnitCalls:
    """The forward pass of a schedule, in which a program calls its units by `run`."""

    def __init__(self, schedule: UnitSchedule, shards: Sequence[Tensor]) -> None:
        """Begin the forward pass, with the shards of all units, in order, with their graph."""
        self.schedule, self.units, self._running = schedule, schedule.units, list[str]()
        trained = [x for x in shards if x.requires_grad] if torch.is_grad_enabled() else []
        self._token = _Collect.apply(schedule, *trained) if trained else None  # type: ignore[no-untyped-call]
        self._discarding: _Call | None = None
        schedule.start_forward()

    def run(self, name: str, f: Callable[..., Any], args: Any, kwargs: Any, rerun: Callable[[], Rerun]) -> Any:
        """Return `f(leaves, args, kwargs)` with the leaves of a unit; with `remat`, `rerun()` is kept to repeat it."""
        schedule = self.schedule
        gathered = schedule.gather_forward(name, self._running)
        if not torch.is_grad_enabled():
            with self._in(name):
                return f(gathered, args, kwargs)
        at = len(schedule.calls)
        unit, call = schedule.units[name], _Call(name, at)
        schedule.calls.append(call)
        schedule.latest[name] = at
        leaves = gathered
        if any(unit.differentiated):
            trained = iter(_Weights.apply(self._token, schedule, at, gathered))  # type: ignore[no-untyped-call]
            leaves = [next(trained) if d else x for x, d in zip(gathered, unit.differentiated, strict=True)]
        with self._in(name, call):
            if not schedule.options.remat:
                with saved_tensors_hooks(schedule.pack, schedule.unpack):
                    return f(leaves, args, kwargs)
            if self._discarding is not None:  # an outer unit is recomputed, with the units in it, gathered again
                self._discarding.transfers = True
                return f(leaves, args, kwargs)
            tensors, rest = split_tensors((args, kwargs))
            once = {id(x): x for x in tensors}  # attention that is given one tensor three times runs other operations
            inputs = [(key, x.detach(), x.requires_grad) for key, x in once.items()]
            which = [id(x) for x in tensors]
            again = rerun()

            def run_again(leaves: list[Tensor], calls: Any) -> None:  # no reference to the schedule: a cycle
                fresh = {key: x.detach().requires_grad_(d) for key, x, d in inputs}
                args, kwargs = fill_tensors(rest, [fresh[key] for key in which])
                again(leaves, args, kwargs, calls)

            call.autocast = autocast_of(schedule.region.device.type)
            call.rerun, self._discarding = run_again, call
            try:
                with saved_tensors_hooks(
                    functools.partial(schedule.discard, call), functools.partial(schedule.load, at)
                ):
                    return f(leaves, args, kwargs)
            finally:
                self._discarding = None

    @contextlib.contextmanager
    def _in(self, name: str, call: _Call | None = None) -> Iterator[None]:
        before = transfer_count(transposes=True)
        self._running.append(name)
        try:
            yield
        finally:
            self._running.pop()
        if call is not None:
            call.end = len(self.schedule.calls)
            call.transfers |= transfer_count(transposes=True) > before
        if name not in self._running:
            self.schedule.release(name)

    def end(self) -> None:
        """End the forward pass."""
        self.schedule.end_forward()


class _UnitCallsAgain:
    """The calls of units inside a unit that is recomputed."""

    def __init__(self, schedule: UnitSchedule) -> None:
        self.schedule, self.units = schedule, schedule.units

    def run(self, name: str, f: Callable[..., Any], args: Any, kwargs: Any, rerun: Callable[[], Rerun]) -> Any:
        gathered, unit = self.schedule.held(name) or self.schedule.start(name), self.schedule.units[name]
        leaves = [x.detach().requires_grad_(d) for x, d in zip(gathered.wait(), unit.differentiated, strict=True)]
        return f(leaves, args, kwargs)


_TWICE = "apply.unshard: the gradient of a schedule"
_ONCE = "fs.defer(constructor, units=None); or nest fs.grad, or use torch.func: there it is the plain apply"


class _Weights(torch.autograd.Function):
    """The differentiated leaves of a unit for one call: (token, schedule, its position, gathered leaves) -> leaves."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, schedule: UnitSchedule, at: int, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.schedule, ctx.at, ctx.name = schedule, at, schedule.calls[at].unit
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x, d in zip(leaves, schedule.units[ctx.name].differentiated, strict=True) if d)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:
        if not torch.is_grad_enabled():
            refuse_transforms_of_backward(_TWICE, grads, _ONCE)
        remaining = iter(grads)
        all_grads = [next(remaining) if d else None for d in ctx.schedule.units[ctx.name].differentiated]
        with torch.no_grad():
            ctx.schedule.start_sums(ctx.name, all_grads)
            ctx.schedule.gather_after(ctx.at)
        return torch.zeros((), device=ctx.schedule.region.device), None, None, None


class _Collect(torch.autograd.Function):
    """The start of all units' graphs: (schedule, differentiated shards of all units) -> token."""

    @staticmethod
    def forward(ctx: Any, schedule: UnitSchedule, *shards: Tensor) -> Tensor:
        ctx.schedule = schedule
        ctx.save_for_backward(*shards)
        return torch.zeros((), device=schedule.region.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            sums = ctx.schedule.take_sums()
        if torch.is_grad_enabled():  # a loss with a gradient inside may have other leaves, whose graph is kept
            once: Any = _Once.apply
            sums = [x if x is None else once(x, w) for x, w in zip(sums, ctx.saved_tensors, strict=True)]
        return None, *sums


class _Once(torch.autograd.Function):
    """The gradient of a shard, which cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        raise fail(f"{_TWICE} cannot be differentiated by torch.autograd", fix=_ONCE)
