"""The block loop, forward and backward, that overlaps computation with the transfers of other blocks' weights.

    forward   gather 1 | run block 0, gather 2 | run block 1, gather 3 | ...
    backward  ... | differentiate block 3, gather 1, reduce 3 | differentiate block 2, gather 0, reduce 2 | ...

All-gather each block's weights just before it runs; free them after. Each block has a separate autograd graph,
from leaves (its gathered weights and its x) to its results. So backward frees the saved tensors of a block right after
it, and a buffer of weights can be used for other blocks between forward and backward while the graph refers to it.
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
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fshard import tree
from fshard._core.callsite import Site, site
from fshard._core.host_memory import start_copy_to_device, start_copy_to_host, wait_for_copies_to_host
from fshard._core.ops import differentiable_dtype
from fshard._core.protocol import PendingTransfer
from fshard._core.region import Region, checker, storage_key
from fshard._core.transfers import is_observed, recomputing, transposing
from fshard.errors import fail
from fshard.grad import Rest, fill_tensors, split_tensors

from .buckets import BucketPlan, GatherBuffer, buffer_pool, start_copy, start_gather, start_reduce
from .options import GatherOptions
from .overlap import make_writable, refuse_transforms_of_backward
from .recompute import DiscardedTensors, UnderHooksError, autocast_of, needs_saved_tensors, refuse_saved_tensor_hooks

# (parameters of a block, x, the block's extra argument) -> (x, an output of the block)
Step = Callable[[Any, Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class ScanOptions(GatherOptions):
    """Options of `scan`: when weights are gathered, and what is kept for backward."""

    remat: bool = False
    offload: bool = False


@dataclass
class FlatTree:
    """A tree as its detached tensors, the rest of the tree, and for each tensor whether it is differentiated."""

    tensors: list[Tensor]
    rest: Rest
    differentiated: list[bool]

    @staticmethod
    def from_tree(x: Any) -> FlatTree:
        return FlatTree.from_tensors(*split_tensors(x))

    @staticmethod
    def from_tensors(tensors: Sequence[Tensor], rest: Rest) -> FlatTree:
        differentiated = [torch.is_grad_enabled() and t.requires_grad for t in tensors]
        return FlatTree([t.detach() for t in tensors], rest, differentiated)

    def take_grads(self, grads: Iterator[Tensor | None]) -> list[Tensor | None]:
        """Return an entry for each tensor: the next gradient if it is differentiated."""
        return [next(grads) if d else None for d in self.differentiated]


_NOTHING = split_tensors(None)


@dataclass
class BlockGraph:
    """The autograd graph of one block: its differentiated leaves, and an edge for each result, first for x.

    An edge, unlike the result itself, lets backward free what the graph has saved as soon as it is used.
    """

    inputs: list[Tensor]
    outputs: list[GradientEdge | None]  # None for a result without a gradient
    discarded: DiscardedTensors | None = None  # to be recomputed before backward


class Executor:
    """One forward pass through all blocks, and its backward pass."""

    def __init__(
        self, region: Region, step: Step, x: FlatTree, params: Sequence[FlatTree], each: Sequence[FlatTree],
        plans: Sequence[BucketPlan], options: ScanOptions,
    ) -> None:  # fmt: skip
        self.region, self.step, self.options = region, step, options
        self.x, self.params, self.each, self.plans, self.n = x, params, each, plans, len(params)
        self.origin: Site | None = site() if is_observed() else None
        self.token = object()  # marks the buffers that this executor has filled; the executor itself would be a cycle
        self.autocast = autocast_of(region.device.type)
        # Without discarding, remat runs a block without a graph and recomputes all of it. A checker and a dry run need
        # every operation, and a graph would keep an x that is to be offloaded.
        self.discards = not options.offload and checker() is None and region.comm.is_scheduled
        # x before each differentiated block; with its tensors only for remat: a block's graph saves what it needs.
        self.block_inputs: list[FlatTree | None] = [None] * self.n
        self.input_copies: dict[int, PendingTransfer] = {}  # pending copies of these tensors to the device
        self.graphs: list[BlockGraph | None] = [None] * self.n
        self.widths: list[int] = []  # number of tensors in x before each block
        self.results: list[FlatTree] = []  # x after the last block, and each block's output, without tensors
        self.weights: dict[int, list[Tensor]] = {}
        self.gathers: dict[int, list[PendingTransfer]] = {}  # pending
        self.shard_copies: dict[int, PendingTransfer] = {}  # pending
        self.kept: dict[int, tuple[BucketPlan, list[Tensor]]] = {}  # parts of weights kept for backward, and their plan
        self.is_differentiated = False
        sizes = [p.nbytes for p in plans]
        if options.release:
            sizes = [max(sizes)] * min(self.n, max(options.prefetch, options.ahead) + 1)
        self.buffers = buffer_pool(region).take(sizes, region)
        self.buffer_keys = {storage_key(buffer.write) for buffer in self.buffers}

    # --- forward ---

    def run_forward(self) -> list[Tensor]:
        """Return the tensors of x after the last block, then the tensors of each block's output."""
        x, outs = self.x, []
        graph: BlockGraph | None
        refuse_saved_tensor_hooks("scan")
        with self._reserved_buffers():
            for i in range(self.n):
                differentiated = any((*x.differentiated, *self.params[i].differentiated, *self.each[i].differentiated))
                weights = self._gather(i, 1, self.n, self.options.prefetch)
                if differentiated and self.options.remat:
                    graph, y, out = self._run_and_discard(i, weights, x)
                else:
                    graph, y, out = self._run_block(i, weights, x, differentiated)
                if differentiated:
                    if self.options.offload:
                        x = replace(x, tensors=[start_copy_to_host(t) for t in x.tensors])
                    self.block_inputs[i] = x if self.options.remat else replace(x, tensors=[])
                    self.graphs[i] = graph
                    self._keep(i, weights)
                self.widths.append(len(x.tensors))
                x = y
                outs.append(out)
        self.x = replace(self.x, tensors=[])
        # Results refer to their graph, and the graph to this executor, which must not refer to the results.
        self.results = [replace(flat, tensors=[]) if flat.tensors else flat for flat in (x, *outs)]
        return [t for flat in (x, *outs) for t in flat.tensors]

    def _run_and_discard(
        self, i: int, weights: Sequence[Tensor], x: FlatTree
    ) -> tuple[BlockGraph | None, FlatTree, FlatTree]:
        """Run a block and discard its saved tensors; or run it without a graph, if it cannot run under hooks."""
        if self.discards:
            discarded = DiscardedTensors()
            try:
                with discarded.discard():
                    graph, y, out = self._run_block(i, weights, x, True)
                return replace(graph, discarded=discarded), y, out
            except (UnderHooksError, RuntimeError) as e:
                if not needs_saved_tensors(e):
                    raise
                self.discards = False
        _, y, out = self._run_block(i, weights, x, False)
        for flat in (y, out):
            flat.differentiated = [differentiable_dtype(t) for t in flat.tensors]
        return None, y, out

    def _recompute_block(self, i: int, weights: Sequence[Tensor], x: FlatTree) -> BlockGraph:
        """Run a block again, under the autocast of forward."""
        with self.autocast(), recomputing():
            return self._run_block(i, weights, x, True)[0]

    def _run_block(
        self, i: int, weights: Sequence[Tensor], x: FlatTree, make_graph: bool
    ) -> tuple[BlockGraph, FlatTree, FlatTree]:
        """Run a block from new leaves; return its graph, x after it, and its output."""
        inputs: list[Tensor] = []

        def as_leaves(flat: FlatTree, tensors: Sequence[Tensor]) -> Any:
            leaves = [t.detach() for t in tensors]
            if make_graph:
                inputs.extend(t.requires_grad_() for t, d in zip(leaves, flat.differentiated, strict=True) if d)
            return fill_tensors(flat.rest, leaves)

        params, each = self.params[i], self.each[i]
        with torch.set_grad_enabled(make_graph):
            results = self.step(as_leaves(params, weights), as_leaves(x, x.tensors), as_leaves(each, each.tensors))
            # A result that is a view of a buffer is copied, because the buffer will be overwritten.
            pairs = [([t.clone() if storage_key(t) in self.buffer_keys else t for t in tensors], rest)
                     for tensors, rest in [_NOTHING if r is None else split_tensors(r) for r in results]]  # fmt: skip
            y, out = (FlatTree.from_tensors(*pair) for pair in pairs)
        edges = [get_gradient_edge(t) if t.requires_grad else None for tensors, _ in pairs for t in tensors]
        return BlockGraph(inputs, edges), y, out

    # --- backward ---

    def run_backward(self, cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the differentiated tensors: of x, of each block's shards, of its extra argument."""
        remaining = iter(cotangents)
        dx, *douts = [[next(remaining) for _ in flat.differentiated] for flat in self.results]
        param_grads: list[list[Tensor | None]] = [[None] * len(p.tensors) for p in self.params]
        each_grads: list[list[Tensor | None]] = [[None] * len(e.tensors) for e in self.each]
        pending: deque[Callable[[], None]] = deque()
        first = min((i for i, x in enumerate(self.block_inputs) if x is not None), default=self.n)
        with self._reserved_buffers(), transposing(self.origin) if self.origin else contextlib.nullcontext():
            for i in range(self.n - 1, -1, -1):
                x, graph, dy = self._block_input(i), self.graphs[i], [*dx, *douts[i]]
                dx = [None] * self.widths[i]
                if x is None:  # neither this block nor one before it is differentiated
                    continue
                weights = self._gather(i, -1, first - 1, self.options.ahead)
                self.kept.pop(i, None)
                if graph is None:
                    graph = self._recompute_block(i, weights, x)
                elif graph.discarded is not None:
                    graph.discarded.recompute(functools.partial(self._recompute_block, i, weights, x))
                self.block_inputs[i] = self.graphs[i] = None
                grads = iter(_input_grads(graph, dy))
                del graph, weights
                dp, dx, each_grads[i] = (flat.take_grads(grads) for flat in (self.params[i], x, self.each[i]))
                others = [*dy, *dx, *each_grads[i]]
                pending.append(self._start_reduces(i, dp, param_grads[i], others))
                del dp, dy, others
                if self.options.backward_prefetch == "post":
                    self._start_gathers(i - 1, -1, first - 1, 0)
                while len(pending) > self.options.pending_sums:
                    pending.popleft()()
            while pending:
                pending.popleft()()
            if any(bucket.host for plan in self.plans for bucket in plan.buckets):
                wait_for_copies_to_host(self.region.device)
        pairs = [(self.x, dx), *zip(self.params, param_grads, strict=True), *zip(self.each, each_grads, strict=True)]
        return [g for flat, gs in pairs for g, d in zip(gs, flat.differentiated, strict=True) if d]

    def _block_input(self, i: int) -> FlatTree | None:
        """Return x before a block, on the device; if offloaded, also start the copy for the block before it."""
        x = self.block_inputs[i]
        if x is None or not self.options.offload:
            return x
        for j in (i, i - 1):
            before = self.block_inputs[j] if j >= 0 else None
            if before is not None and j not in self.input_copies:
                self.input_copies[j] = start_copy_to_device(self.region, before.tensors)
        return replace(x, tensors=self.input_copies.pop(i)())

    def _start_reduces(
        self, i: int, dp: list[Tensor | None], grads: list[Tensor | None], others: Sequence[Tensor | None]
    ) -> Callable[[], None]:
        """Start to sum the gradients `dp` of a block over the ranks, without overwriting `others`.

        The returned function waits, and writes the sums into `grads`.
        """
        params = self.params[i]
        pending: list[tuple[list[int], PendingTransfer]] = []
        used = {storage_key(t) for t in others if t is not None}
        for leaf, differentiated in enumerate(params.differentiated):
            if differentiated and dp[leaf] is None:
                dp[leaf] = self.plans[i].zero_gradient(params.tensors, leaf, self.region.device)
        grads[:] = dp
        for bucket in self.plans[i].buckets:
            chosen = [k for k, leaf in enumerate(bucket.which) if params.differentiated[leaf]]
            if not chosen:
                continue
            leaves = [bucket.which[k] for k in chosen]
            writable = [make_writable(grads[leaf], used) for leaf in leaves]  # type: ignore[arg-type]
            for leaf in leaves:
                grads[leaf] = None
            pending.append((leaves, start_reduce(bucket, chosen, writable)))

        def finish() -> None:
            for leaves, wait in pending:
                for leaf, grad in zip(leaves, wait(), strict=True):
                    grads[leaf] = grad

        return finish

    # --- weights ---

    def _gather(self, i: int, direction: int, end: int, ahead: int) -> list[Tensor]:
        """Return the gathered weights of a block; first start the gathers of the `ahead` next blocks."""
        self._start_gathers(i, direction, end, ahead)
        for wait in self.gathers.pop(i, ()):
            wait()
        return self.weights[i]

    def _start_gathers(self, i: int, direction: int, end: int, ahead: int) -> None:
        """Start the missing gathers of block i and of the `ahead` next blocks, before block `end`.

        Copies from host memory start a block earlier, so that the shards are on the device when their gather starts.
        """
        window = range(i, i + direction * (ahead + 2), direction)
        missing = [j for j in window if (end - j) * direction > 0 and not self._is_gathered(j)]
        for j in missing:
            if j not in self.shard_copies:
                plan, shards = self._source(j)
                self.shard_copies[j] = start_copy(self.region, plan, shards)
        for j in missing:
            if j != window[-1]:
                buffer = self._buffer(j)
                if buffer is not None:
                    buffer.contents = (self.token, j)
                plan, _ = self._source(j)
                self.weights[j], self.gathers[j] = start_gather(self.region, plan, self.shard_copies.pop(j)(), buffer)

    def _source(self, i: int) -> tuple[BucketPlan, list[Tensor]]:
        """Return the tensors that the weights of a block are gathered from, and their plan."""
        return self.kept.get(i) or (self.plans[i], self.params[i].tensors)

    def _keep(self, i: int, weights: Sequence[Tensor]) -> None:
        """Keep parts of a block's weights for backward, by `release`, unless its buffer keeps all of them."""
        if self.options.kept_axes and i < self.n - len(self.buffers):
            kept = self.plans[i].keep_parts(self.options.kept_axes, weights, self.params[i].tensors)
            if kept is not None:
                self.kept[i] = kept

    def _is_gathered(self, i: int) -> bool:
        """Return whether the weights of a block are gathered, or their gather is pending."""
        buffer = self._buffer(i)
        return i in self.weights and (buffer is None or buffer.contents == (self.token, i))

    def _buffer(self, i: int) -> GatherBuffer | None:
        """Return the buffer for the weights of a block; `None` if it needs none."""
        return self.buffers[i % len(self.buffers)] if self.plans[i].nbytes else None

    @contextlib.contextmanager
    def _reserved_buffers(self) -> Iterator[None]:
        """Reserve the buffers. After a failure they are not released: a transfer into them may be pending."""
        buffer_pool(self.region).reserve(self.buffers)
        yield
        buffer_pool(self.region).release(self.buffers)


def _input_grads(graph: BlockGraph, cotangents: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return the gradients of a block's inputs, and free its graph."""
    pairs = [(y, g) for y, g in zip(graph.outputs, cotangents, strict=True) if y is not None and g is not None]
    if not pairs or not graph.inputs:
        return [None] * len(graph.inputs)
    outputs, grads = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, graph.inputs, grads, allow_unused=True)


class _BlockLoop(torch.autograd.Function):
    """The loop over all blocks as one operation: (executor, differentiated tensors) -> results."""

    @staticmethod
    def forward(ctx: Any, executor: Executor, *differentiated: Tensor) -> tuple[Tensor, ...]:
        out = executor.run_forward()
        ctx.executor = executor
        flags = [d for flat in executor.results for d in flat.differentiated]
        ctx.mark_non_differentiable(*[y for y, d in zip(out, flags, strict=True) if not d])
        ctx.set_materialize_grads(False)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        fix = "nest fs.grad, or use torch.func: there it is the plain loop"
        refuse_transforms_of_backward("scan: the gradient of a schedule", cotangents, fix)
        if ctx.executor.is_differentiated:  # retain_graph=True
            raise fail("scan: a second backward pass through it; the first has freed the graphs of the blocks",
                       fix="one backward pass for the sum of the losses")  # fmt: skip
        ctx.executor.is_differentiated = True
        return None, *ctx.executor.run_backward(cotangents)


def run_blocks(executor: Executor, x: Any, params: Sequence[Any], each: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return x after all blocks, and their outputs; differentiable once."""
    leaves = tree.leaves((x, list(params), list(each))) if torch.is_grad_enabled() else []
    differentiated = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    results = _BlockLoop.apply(executor, *differentiated) if differentiated else executor.run_forward()  # type: ignore[no-untyped-call]
    remaining = iter(results)
    last, *outs = [fill_tensors(flat.rest, [next(remaining) for _ in flat.differentiated]) for flat in executor.results]
    return last, outs
