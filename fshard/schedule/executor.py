"""The walk through a stack of blocks, forward and backward, with the weights of the next ones in flight.

    forward   fetch 1 | block 0, fetch 2 | block 1, fetch 3 | ...
    backward  ... | block 3 back, fetch 1, reduce 3 | block 2 back, fetch 0, reduce 2 | ...

Each block is a small autograd graph of its own, from leaves (its whole weights and its x) to its results, so that
nothing is kept longer than its block needs it, and weights can leave memory while the graph refers to them.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard._callsite import Site, site
from fshard._comm import (
    PendingTransfer,
    Region,
    checker,
    is_observed,
    start_copy_to_device,
    start_copy_to_host,
    storage_key,
    transposing,
    wait_for_copies_to_host,
)
from fshard._ops import differentiable_dtype
from fshard.errors import fail

from .buckets import BucketPlan, GatherBuffer, fetch, pool, send_back, stage
from .flat_tree import FlatTree
from .overlap import owned
from .recompute import HOOKS, Memo, no_hooks

# The parameters of a block, x, and what belongs to the block alone -> x, and an output of the block.
Step = Callable[[Any, Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Schedule:
    """When weights are fetched and what is kept; see `scan`."""

    release: bool
    remat: bool
    offload: bool
    prefetch: int


@dataclass
class Record:
    """The graph of one block: its leaves that have a gradient, and its results, those of x first.

    With a `memo`, what it has saved is to be computed again before it is used.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    memo: Memo | None = None


class Executor:
    """One walk through all blocks, and its way back."""

    def __init__(
        self, where: Region, step: Step, x: FlatTree, params: Sequence[FlatTree], each: Sequence[FlatTree],
        plans: Sequence[BucketPlan], how: Schedule,
    ) -> None:  # fmt: skip
        self.region, self.step, self.how = where, step, how
        self.x, self.params, self.each, self.plans, self.n = x, params, each, plans, len(params)
        self.origin: Site | None = site() if is_observed() else None
        self.token = object()
        kind = where.device.type if torch.amp.is_autocast_available(where.device.type) else "cpu"
        how_cast = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()
        self.autocast = functools.partial(torch.autocast, kind, *how_cast)
        # A checker and a dry run see a block as it is, and have no use for less work; a graph would hold its x.
        self.forgetful = not how.offload and checker() is None and where.comm.has_values
        self.before: list[FlatTree | None] = [None] * self.n  # x before each block that is differentiated
        self.coming: dict[int, PendingTransfer] = {}  # those on their way back to the device
        self.records: list[Record | None] = [None] * self.n
        self.widths: list[int] = []  # how many tensors x was before each block
        self.results: list[FlatTree] = []  # x after the last block, and each block's output
        self.whole: dict[int, list[Tensor]] = {}
        self.flying: dict[int, list[PendingTransfer]] = {}
        self.staged: dict[int, PendingTransfer] = {}
        count = min(self.n, how.prefetch + 1) if how.release else self.n
        self.slots = pool(where).take(count, max(p.nbytes for p in plans), where)

    # --- forward ---

    def forward(self) -> list[Tensor]:
        """The tensors of x after the last block, then those of each block's output."""
        x, outs = self.x, []
        record: Record | None
        no_hooks("scan")
        with self._at_work():
            for i in range(self.n):
                moving = any(x.live) or any(self.params[i].live) or any(self.each[i].live)
                whole = self._fetched(i, 1, self.n)
                if moving and self.how.remat:
                    record, y, out = self._forgotten(i, whole, x)
                else:
                    record, y, out = self._block(i, whole, x, graph=moving)
                if moving:
                    kept = x.with_tensors([start_copy_to_host(t) for t in x.tensors]) if self.how.offload else x
                    self.before[i], self.records[i] = kept, record
                self.widths.append(len(x.where))
                x = y
                outs.append(out)
        found = [t for given in (x, *outs) for t in given.tensors]
        self.results = [given.emptied() for given in (x, *outs)]  # results refer to their graph, and that to this walk
        return found

    def _forgotten(self, i: int, whole: Sequence[Tensor], x: FlatTree) -> tuple[Record | None, FlatTree, FlatTree]:
        """Compute a block, and forget what its graph has saved; or, if that cannot be, make no graph."""
        if self.forgetful:
            memo = Memo(frozenset(storage_key(t) for t in (*whole, *x.tensors, *self.each[i].tensors)))
            try:
                with memo.forgetting():
                    record, y, out = self._block(i, whole, x, graph=True)
                return replace(record, memo=memo), y, out
            except Exception as e:
                if HOOKS not in str(e):
                    raise
                self.forgetful = False
        _, y, out = self._block(i, whole, x, graph=False)
        y.live, out.live = [differentiable_dtype(t) for t in y.tensors], [differentiable_dtype(t) for t in out.tensors]
        return None, y, out

    def _again(self, i: int, whole: Sequence[Tensor], x: FlatTree) -> tuple[Record, FlatTree, FlatTree]:
        """Compute a block again, as it was in forward."""
        with self.autocast():
            return self._block(i, whole, x, graph=True)

    def _block(self, i: int, whole: Sequence[Tensor], x: FlatTree, graph: bool) -> tuple[Record, FlatTree, FlatTree]:
        """Compute a block; with a `graph`, from leaves of its own."""
        params, each = self.params[i], self.each[i]
        inputs: list[Tensor] = []

        def leaves(tensors: Sequence[Tensor], live: Sequence[bool]) -> list[Tensor]:
            fresh = [t.detach() for t in tensors]
            inputs.extend(t.requires_grad_() for t, wanted in zip(fresh, live, strict=True) if wanted and graph)
            return fresh

        with torch.set_grad_enabled(graph):
            y, out = self.step(params.filled(leaves(whole, params.live)), x.filled(leaves(x.tensors, x.live)),
                               each.filled(leaves(each.tensors, each.live)))  # fmt: skip
            y, out = (tree.map(self._out_of_slots, t) for t in (y, out))
            after, own = (FlatTree.of(t) for t in (y, out))
        results = [t for t in (*tree.leaves(y), *tree.leaves(out)) if isinstance(t, Tensor)]
        return Record(inputs, results), after, own

    def _out_of_slots(self, x: Any) -> Any:
        """A result of a block; a copy of one that lies in a slot, where other weights will lie soon."""
        lent = isinstance(x, Tensor) and any(storage_key(x) == storage_key(slot.filling) for slot in self.slots)
        return x.clone() if lent else x

    # --- backward ---

    def backward(self, cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of all that is live: of x, of each block's shards, of what is each block's own."""
        rest = iter(cotangents)
        dx, *douts = [[next(rest) for _ in given.where] for given in self.results]
        grads: list[list[Tensor | None]] = [[None] * len(p.where) for p in self.params]
        downs: list[list[Tensor | None]] = [[None] * len(e.where) for e in self.each]
        queue: deque[list[Sent]] = deque()
        moving = [i for i, x in enumerate(self.before) if x is not None]
        first = min(moving, default=self.n)
        with self._at_work(), transposing(self.origin) if self.origin else contextlib.nullcontext():
            for i in range(self.n - 1, -1, -1):
                x, record, given = self._before(i), self.records[i], [*dx, *douts[i]]
                dx = [None] * self.widths[i]
                if x is None:  # nothing here is differentiated, and so nothing goes back from here
                    continue
                whole = self._fetched(i, -1, first - 1)
                if record is None:
                    record, *_ = self._again(i, whole, x)
                elif record.memo is not None:
                    record.memo.recall(functools.partial(self._again, i, whole, x))
                self.before[i] = self.records[i] = None
                shapes = [like.shape for like in whole]
                found = iter(_pull(record, given))
                del record, whole
                dp, dx, downs[i] = (one.spread(found) for one in (self.params[i], x, self.each[i]))
                queue.append(self._sent(i, dp, shapes, grads[i], [*given, *dx, *downs[i]]))
                del dp, given
                while len(queue) > self.how.prefetch:
                    _land(queue.popleft())
            while queue:
                _land(queue.popleft())
            if any(bundle.host for of in self.plans for bundle in of.bundles):
                wait_for_copies_to_host(self.region.device)
        pairs = [(self.x, dx), *zip(self.params, grads, strict=True), *zip(self.each, downs, strict=True)]
        return [g for one, gs in pairs for g, live in zip(gs, one.live, strict=True) if live]

    def _before(self, i: int) -> FlatTree | None:
        """x before a block, on the device; that of the block before, if it is in host memory, on its way."""
        x = self.before[i]
        if x is None or not self.how.offload:
            return x
        for j in (i, i - 1):
            before = self.before[j] if j >= 0 else None
            if before is not None and j not in self.coming:
                self.coming[j] = start_copy_to_device(self.region, before.tensors)
        return x.with_tensors(self.coming.pop(i)())

    def _sent(
        self, i: int, dp: list[Tensor | None], shapes: Sequence[torch.Size], grads: list[Tensor | None],
        foreign: Sequence[Tensor | None],
    ) -> list[Sent]:  # fmt: skip
        """Start to sum the gradients of a block over the ranks; they land in `grads`."""
        params, sent = self.params[i], []
        taken = {storage_key(t) for t in foreign if t is not None}
        for leaf, live in enumerate(params.live):
            if live and dp[leaf] is None:  # not used by this rank; the others may have
                shard = params.leaves[leaf]
                dp[leaf] = torch.zeros(shapes[leaf], dtype=shard.dtype, device=self.region.device)
        grads[:] = dp
        for bundle in self.plans[i].bundles:
            chosen = [k for k, leaf in enumerate(bundle.which) if params.live[leaf]]
            if not chosen:
                continue
            leaves = [bundle.which[k] for k in chosen]
            own = [owned(grads[leaf], taken) for leaf in leaves]  # type: ignore[arg-type]
            for leaf in leaves:
                grads[leaf] = None
            sent.append(Sent(grads, leaves, send_back(bundle, chosen, own)))
        return sent

    # --- weights ---

    def _fetched(self, i: int, way: int, end: int) -> list[Tensor]:
        """The whole weights of a block; those of the next ones on the way, before `end`, are sent for.

        What lies in host memory starts a block earlier, so that it is on the device when its gather starts.
        """
        soon = range(i, i + way * (self.how.prefetch + 2), way)
        ahead = [j for j in soon if (end - j) * way > 0 and not self._there(j)]
        for j in ahead:
            if j not in self.staged:
                self.staged[j] = stage(self.region, self.plans[j], self.params[j].leaves)
        for j in ahead:
            if j != soon[-1]:
                slot = self._slot(j)
                if slot is not None:
                    slot.holds = (self.token, j)
                self.whole[j], self.flying[j] = fetch(self.region, self.plans[j], self.staged.pop(j)(), slot)
        for flight in self.flying.pop(i, ()):
            flight()
        return self.whole[i]

    def _there(self, i: int) -> bool:
        """Whether the weights of a block are whole, or on their way."""
        slot = self._slot(i)
        return i in self.whole and (slot is None or slot.holds == (self.token, i))

    def _slot(self, i: int) -> GatherBuffer | None:
        """Where the gathered weights of a block lie; `None` if it has none."""
        return self.slots[i % len(self.slots)] if self.plans[i].nbytes else None

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """Keep the slots from other loops. After a failure nobody gets them back: something may be on its way there."""
        pool(self.region).hold(self.slots)
        yield
        pool(self.region).give_back(self.slots)


def _pull(record: Record, cotangents: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """The gradients of a block's inputs, whose graph is used up."""
    pairs = [(y, g) for y, g in zip(record.outputs, cotangents, strict=True) if g is not None and y.requires_grad]
    if not pairs or not record.inputs:
        return [None] * len(record.inputs)
    outputs, given = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, record.inputs, given, allow_unused=True)


@dataclass
class Sent:
    """Gradients on their way: where they land."""

    grads: list[Tensor | None]
    leaves: list[int]
    flight: PendingTransfer


def _land(sent: Sequence[Sent]) -> None:
    for one in sent:
        for leaf, grad in zip(one.leaves, one.flight(), strict=True):
            one.grads[leaf] = grad


class _Loop(torch.autograd.Function):
    """The walk as one operation: its tensors in, its results out."""

    @staticmethod
    def forward(ctx: Any, walk: Executor, *live: Tensor) -> tuple[Tensor, ...]:
        out = walk.forward()
        ctx.walk = walk
        wanted = [wanted for given in walk.results for wanted in given.live]
        ctx.mark_non_differentiable(*[y for y, smooth in zip(out, wanted, strict=True) if not smooth])
        ctx.set_materialize_grads(False)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise fail("scan: its gradient is to be differentiated by torch.autograd, which cannot see into a schedule",
                       fix="nest fs.grad, or use torch.func: there it is the plain loop")  # fmt: skip
        return None, *ctx.walk.backward(cotangents)


def go(walk: Executor, x: Any, params: Sequence[Any], each: Sequence[Any]) -> tuple[Any, list[Any]]:
    """x after all blocks, and their outputs; differentiable once."""
    live = [t for given in (x, *params, *each) for t in tree.leaves(given)
            if isinstance(t, Tensor) and torch.is_grad_enabled() and t.requires_grad]  # fmt: skip
    out = iter(_Loop.apply(walk, *live) if live else walk.forward())  # type: ignore[no-untyped-call]
    last, *outs = [given.filled([next(out) for _ in given.where]) for given in walk.results]
    return last, outs


__all__ = ["Executor", "Schedule", "go"]
