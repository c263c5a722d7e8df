"""Pipeline parallelism as a function: each rank of an axis computes a few layers, for one microbatch after the other.

The order of the operations is a table that every rank knows (`tables`), so that each rank knows who sends what, and
when. For each chunk of layers and microbatch there is a graph of autograd, whose leaves are the received tensors and
the weights of the chunk.

Legend: L layers, v chunks of them in each stage, M microbatches; [L@axis] is a dim split over the axis.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fshard import tree
from fshard._core.call import explain_missing_values
from fshard._core.callsite import site
from fshard._core.comm import fake_tensors, silent_comm
from fshard._core.microbatch import in_microbatch, microbatches
from fshard._core.ops import argument_specs, differentiable_dtype, evenly, keep_placed
from fshard._core.protocol import PendingTransfer, Series, size_of
from fshard._core.region import bind, checker, known_axes, live_axes, region, unchecked
from fshard._core.torch import without_modes
from fshard._core.transfers import transposing, without_others
from fshard.collectives import axis_position, by_dtype, psum, pvary
from fshard.errors import api_boundary, checked, fail, shown
from fshard.grad import (
    accumulate,
    check_leaf,
    check_loss,
    differentiating,
    divided,
    fill_tensors,
    gathered_with_transpose,
    loss_count_aux,
    needs_torch_func,
    split_rows,
    split_tensors,
    stacked,
)
from fshard.spec import Axis, P, is_spec, names_of

from .split_backward import backward_of_inputs
from .tables import Kind, Operation, schedule_table, table
from .unshard import unshard


@checked
def pipelined(
    first: Callable[..., Any], stage: Callable[..., Any], last: Callable[..., Any], *, axis: Axis, microbatches: int,
    schedule: Kind = "1f1b", chunks: int = 1, gather: Callable[..., Any] | None = None, counted: bool = False,
    has_aux: bool = False,
) -> Pipelined:  # fmt: skip
    """Return `value_and_grad` of a model whose layers the ranks of `axis` share: pipeline parallelism.

        first: (ends, batch) -> h     stage: (one layer, h, batch) -> h     last: (ends, h, batch) -> loss []
        returns f: ((ends {I axis}, layers {V axis}), batch) -> (loss [] {I axis}, gradients like the parameters)

    On any number of ranks it equals `accumulate(value_and_grad(model), microbatches)`, where the model is `first`, each
    layer in order, and `last`. h is a tensor of floating numbers or a tree of them, of one shape throughout; a layer
    does not write to it in place.

    - `layers` are stacked, [L, ...], in specs P(axis): a rank has L/n neighbouring layers, or any other number. With
      `chunks=v` they are [v, L/v, ...], in specs P(None, axis): `x.reshape(v, L // v, *x.shape[1:])`. Or they are a
      list, a tree for each layer, in specs of `on_stages`: each on one rank. A layer may itself be several blocks.
    - `ends` are the parameters of `first` and `last`, as embeddings. Both may use the same one. Their gradients are
      summed over the axis. Leaves that their specs split over it, as P("stage"), P(("model", "stage")) or with lengths
      (0, .., V), are gathered once a call, and their gradients are split again.
    - `batch` is split along dim 0, as in `accumulate`. All ranks of the axis have the same batch.
    - `f(params, batch, each=keys)`: `each`, stacked and split like the layers, is passed to `stage` layer by layer as a
      fourth argument, and not differentiated: keys, frozen weights.
    - `f.forward(params, batch)` computes only the results of `last`, any tree, stacked: [microbatches, ...].

    Args:
        schedule: "gpipe", "1f1b", "interleaved" or "zero_bubble": the order of the operations, as `schedule_table`
            shows it, the time that ranks wait, and the number of microbatches whose activations they keep.
        chunks: in an "interleaved" schedule, the parts of the model that each rank has, not neighbouring.
        gather: a function of `(ends, layers)`, called once, as in `accumulate`. The ends vary over `axis` then.
        counted: `last` returns `(total, count)`, as in `accumulate`. `has_aux`: it returns `(loss, aux)`.

    Transfers: each rank sends h of a microbatch to the next rank, and its gradient to the one before, while it
    computes; at the end one sum over the axis of the gradients of the ends, and one of the loss.

    >>> f = pipelined(embed, layer, head_loss, axis="stage", microbatches=4)
    >>> loss, (d_ends, d_layers) = f((params["ends"], params["layers"]), batch)

    Raises ShardingError if M does not divide the batch, for layers that are not stacked or not split over the axis,
    if `stage` returns another shape, dtype or type than h, in a compiled program, and inside another gradient.
    """
    if microbatches < 1:
        raise fail(f"pipelined: microbatches={microbatches}", fix="1 or more")
    schedule_table(schedule, 1, microbatches, chunks)
    return Pipelined(first, stage, last, axis, microbatches, schedule, chunks, gather, counted, has_aux)


@dataclass(frozen=True)
class Pipelined:
    """The function that `pipelined` returns. `forward` computes only the results of `last`."""

    first: Callable[..., Any]
    stage: Callable[..., Any]
    last: Callable[..., Any]
    axis: Axis
    microbatches: int
    schedule: str
    chunks: int
    gather: Callable[..., Any] | None
    counted: bool
    has_aux: bool
    _outlines: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # by the shapes of arguments

    @api_boundary
    def __call__(self, params: Any, batch: Any, *, each: Any = None) -> Any:
        """Return (loss, gradients), or with `has_aux` ((loss, aux), gradients)."""
        axes, n, batches, vary = self._check(params, batch, each)
        if n == 1:
            run = accumulate(self._model, self.microbatches, gather=self.gather, counted=self.counted,
                             has_aux=self.has_aux)  # fmt: skip
            return run(params, batch, each=each)
        k = 1 if self.gather is None else 2  # without `gather` only the ends: to transform layers takes time
        parts, transpose = gathered_with_transpose("pipelined", lambda p: self._gathered(vary, p), params[:k])
        parts = (*parts, *params[k:])
        loss, count, aux, grads = _Run(self, self.schedule, n, axes, parts, params[1], batch, batches,
                                       each).value_and_grad()  # fmt: skip
        del parts
        grads = (*transpose(grads[:k]), *grads[k:])
        if self.counted or self.microbatches > 1:
            in_place = not isinstance(count, Tensor)
            loss, grads = tree.map(lambda x: x.div_(count) if in_place else divided(x, count), (loss, grads))
        return ((loss, aux) if self.has_aux else loss), grads

    @api_boundary
    def forward(self, params: Any, batch: Any, *, each: Any = None) -> Any:
        """Return the results of `last`, any tree of tensors, stacked: [microbatches, ...]."""
        axes, n, batches, vary = self._check(params, batch, each)
        with torch.no_grad():
            parts = self._gathered(vary, params)
            if n > 1:
                run = _Run(self, "forward", n, axes, parts, params[1], batch, batches, each)
                return run.from_last_stage(stacked("pipelined", run.run()))
            found = []
            for part, x in zip(microbatches(tree.leaves(batch), self.microbatches), batches, strict=True):
                with in_microbatch(part):
                    found.append(self._model(parts, x, each))
            return stacked("pipelined", found)

    def _gathered(self, vary: Callable[[Any], Any], params: Any) -> Any:
        """Return the ends, or ends and layers, as the stages use them: the ends vary over the axis."""
        varying = vary(params[0]), *params[1:]
        return varying if self.gather is None else self.gather(varying)

    def _model(self, params: Any, batch: Any, each: Any) -> Any:
        """Return the loss of the model on one device: what a pipeline computes."""
        h = self.first(params[0], batch)
        for layer, extra in zip(*_layers(params[1], each, self.chunks), strict=True):
            h = self.stage(layer, h, batch, *extra)
        return self.last(params[0], h, batch)

    def _check(self, params: Any, batch: Any, each: Any) -> tuple[tuple[str, ...], int, list[Any], Callable[..., Any]]:
        """Check arguments; return axes of several ranks, the number of stages, the microbatches, a gather of ends."""
        if not isinstance(params, tuple) or len(params) != 2:
            raise fail(f"pipelined: params is {shown(params)}", fix="pass a pair: (ends, layers)")
        compiling = torch.compiler.is_dynamo_compiling()
        if compiling or needs_torch_func([x for x in tree.leaves((params, batch, each)) if isinstance(x, Tensor)]):
            raise fail(f"pipelined: called in {'a compiled program' if compiling else 'fs.grad, or another transform'}",
                       "it computes a loss with its gradients, while it sends messages",
                       fix="call it in place of value_and_grad, in a program that is not compiled")  # fmt: skip
        for path, x in tree.leaves_with_path(params):
            check_leaf(f"pipelined: {tree.show('params', path)}", x, "pass it by each=, or capture it")
        m = self.microbatches
        batches = [split_rows("pipelined: batch", batch, i, m, "by a closure") for i in range(m)]
        if not names_of(self.axis):
            return (), 1, batches, lambda ends: ends
        current = region("pipelined")
        names, dim = known_axes("pipelined", current, self.axis), int(self.chunks > 1)
        spec_of = argument_specs()
        for name, part in (("params[1]", params[1]), ("each", each)):
            for path, x in tree.leaves_with_path(part):
                spec = None if isinstance(part, (list, tuple)) else spec_of(x)  # `_listed_places` looks at lists
                if spec is not None and spec.parts(x.ndim)[dim : dim + 1] != (names,):
                    stacked_as = f"{self.chunks}, layers of a chunk" if dim else "layers"
                    raise fail(f"pipelined: {tree.show(name, path)}: the layers are not split over the axis",
                               shape=list(x.shape), spec=spec, chunks=self.chunks,
                               fix=f"P({'None, ' * dim}{self.axis!r}, ...), of leaves [{stacked_as}, ...]")  # fmt: skip
        live = live_axes(current.comm, names)
        of_ends = tree.map(lambda x: spec_of(x) or P(), params[0])
        return live, size_of(live, current.sizes), batches, lambda ends: unshard(ends, of_ends, live)


# --- layers and microbatches ------------------------------------------------------------------------------------


@checked
def on_stages(
    specs: Sequence[Any], layers: Sequence[Any], axis: str, n: int, *, chunks: int = 1,
    lengths: Sequence[int] | None = None,
) -> list[Any]:  # fmt: skip
    """Return specs that place each layer of a list on one of the n ranks of `axis`, for `pipelined`.

    A rank has neighbouring layers: `lengths` numbers of them, or as many on each, the first ranks one more where n does
    not divide them. With `chunks` it has that many groups of neighbours. Dim 0 of a leaf is split first over `axis`:
    one rank has all rows. Then it is split as in `specs`, a list of the specs of each layer.

    >>> on_stages([P(), P()], [{"w": fs.init.zeros((4, 4))}] * 2, "stage", 2)[1]
    {'w': P('stage', lengths=(0, 4))}

    Raises ShardingError for a leaf without dims, and for lengths that do not sum to the number of layers.
    """
    if not axis:
        raise fail("on_stages: axis='' names no axis", fix='axis="stage"')
    possible = 0 < n <= 2**20 and 0 < chunks <= 2**20 // n and len(specs) == len(layers)  # far above any mesh
    counts = list(lengths or ()) if lengths is not None or not possible else evenly(len(layers), n * chunks)
    if not possible or len(counts) != n * chunks or sum(counts) != len(layers):
        raise fail(f"on_stages: {len(specs)} specs, {len(layers)} layers, n={n}, chunks={chunks}, lengths={lengths}",
                   fix="specs and a length for each layer and stage")  # fmt: skip
    out = []
    for layer, of_layer, place in zip(layers, specs, _places(counts), strict=True):
        leaves, treedef = tree.flatten(layer)
        placed = []
        for x, spec in zip(leaves, tree.broadcast(of_layer, layer, name="on_stages: specs", leaf=is_spec), strict=True):
            if not getattr(x, "shape", ()):
                raise fail(f"on_stages: {shown(x)} among the layers has no dims", fix="a leaf of shape (1,)")
            here = {axis: tuple(x.shape[0] * (stage == place % n) for stage in range(n))}
            major, *rest = spec.parts(len(x.shape))
            placed.append(P((axis, *major), *rest, memory=spec.memory, lengths={**spec.lengths, **here}))
        out.append(tree.unflatten(treedef, placed))
    return out


def _places(counts: Sequence[int]) -> list[int]:
    """Return the place of each layer, of places with these numbers of layers."""
    return [place for place, count in enumerate(counts) for _ in range(count)]


def _layers(layers: Any, each: Any, chunks: int) -> tuple[Sequence[Any], list[tuple[Any, ...]]]:
    """Return a tree for each layer, and its extra argument, if there is one; stacked leaves are unbound once."""
    if isinstance(layers, (list, tuple)):
        if each is not None and not (isinstance(each, (list, tuple)) and len(each) == len(layers)):
            raise fail(f"pipelined: each is {shown(each)}", fix=f"a list, for the list of {len(layers)} layers")
        return layers, [()] * len(layers) if each is None else [(extra,) for extra in each]
    if each is not None and not tree.leaves(each):
        raise fail(f"pipelined: each is {shown(each)}, without leaves", fix="leaves that are stacked like the layers")
    leaves, treedef = tree.flatten((layers, () if each is None else (each,)))
    dims = 2 if chunks > 1 else 1
    shapes = {tuple(x.shape[:dims]) if isinstance(x, Tensor) and x.ndim >= dims else None for x in leaves}
    if len(shapes) > 1 or None in shapes or (dims == 2 and any(ns[0] != chunks for ns in shapes if ns)):
        raise fail("pipelined: the leaves must be stacked, with the layers of this stage as "
                   f"{f'dims 0 and 1, [{chunks}, layers of a chunk, ...]' if dims == 2 else 'dim 0, [layers, ...]'}",
                   *[f"{tree.show(path[0], path[1:])} {list(x.shape) if isinstance(x, Tensor) else shown(x)}"
                     for path, x in tree.leaves_with_path({"layers": layers, "each": each})],
                   fix=f"x.reshape({chunks}, L // {chunks}, *x.shape[1:]) of a leaf of L layers" if dims == 2 else
                   "torch.stack the leaves of the layers; each= like them")  # fmt: skip
    rows = zip(*[(x.flatten(0, 1) if dims == 2 else x).unbind(0) for x in leaves], strict=True)
    pairs = [tree.unflatten(treedef, row) for row in rows]
    return [layer for layer, _ in pairs], [extra for _, extra in pairs]


def _listed_places(layers: Sequence[Any], axes: tuple[str, ...], chunks: int, n: int, stage: int) -> list[int]:
    """Return the place of each layer of a list. A layer without leaves is where the one before is.

    The specs of a layer place it: a rank of the stage may have no rows of it, where another axis splits them. Without
    specs, as for results of the region, it is on this stage if this rank has elements of it, and else on another.
    """
    sizes, spec_of = region().sizes, argument_specs()
    places = _places(evenly(len(layers), n * chunks)) if chunks > 1 else [0] * len(layers)
    for i, layer in enumerate(layers):
        at = places[i] if chunks > 1 else places[max(0, i - 1)]
        leaves = tree.leaves(layer)
        specs = [spec for x in leaves if (spec := spec_of(x)) is not None]
        if len(specs) == len(leaves):
            found = {s for spec in specs for s in _stages_of(spec, axes, sizes)}
        else:
            found = {stage if any(x.numel() for x in leaves) else (at + (at % n == stage)) % n}
        places[i] = at if chunks > 1 else max([at, *found])
        if found - {places[i] % n}:
            raise fail(f"pipelined: params[1][{i}] is on stage {' and '.join(map(str, sorted(found)))}, and stage "
                       f"{places[i] % n} is next", chunks=chunks, stages=n,
                       fix=f"fs.on_stages(specs, layers, axis, {n}, chunks={chunks})")  # fmt: skip
    return places


def _stages_of(spec: P, axes: tuple[str, ...], sizes: Mapping[str, int]) -> list[int]:
    """Return the stages that have rows of a leaf: all, if no lengths are chosen."""
    rows = [spec.lengths.get(a, (1,) * sizes[a]) if sizes[a] > 1 else (1,) for a in axes]
    return [i for i, lengths in enumerate(itertools.product(*rows)) if all(lengths)]


# --- messages ---------------------------------------------------------------------------------------------------

Key = tuple[str, int, int]  # of a message: F for h, B for its gradient; the microbatch; the place of the receiver


class _Message(NamedTuple):
    end: float  # of the operation that makes it
    key: Key
    source: int
    target: int


class _Step(NamedTuple):
    """An operation of a stage at its place, the receives that start before it, and the message with its result."""

    operation: Operation
    place: int
    receives: list[tuple[_Message, Series]]
    sends: list[tuple[_Message, Series]]  # at most one


@functools.cache
def _steps(kind: str, n: int, m: int, chunks: int, stage: int) -> list[_Step]:
    """Return the operations of a stage. A receive starts before its sender can have computed the message.

    Two stages start the messages between them in one order: by the time of the operations that make them.
    """
    rows = table(kind, n, m, chunks).ticks
    messages: dict[int, list[_Message]] = {}  # with each other stage
    for source, row in enumerate(rows):
        for _, end, op in row:
            place, step = op.chunk * n + source, 1 if op.kind == "F" else -1
            target = (source + step) % n
            if op.kind != "W" and 0 <= place + step < n * chunks and stage in (source, target):
                key = "F" if step == 1 else "B", op.microbatch, place + step
                messages.setdefault(source + target - stage, []).append(_Message(end, key, source, target))
    steps = [_Step(op, op.chunk * n + stage, [], []) for *_, op in rows[stage]]
    for between in messages.values():
        at = 0
        for i, message in enumerate(sorted(between)):
            while rows[stage][at].end < message.end:
                at += 1
            is_sent = message.source == stage
            series = Series(f"{kind} of {m} microbatches, {chunks} chunks", not i)
            (steps[at].sends if is_sent else steps[at].receives).append((message, series))
            at += is_sent  # what follows starts after it
    return steps


# --- one run ----------------------------------------------------------------------------------------------------

_MOST_SENT = 2  # messages whose sends may be pending
_NOTHING = contextlib.nullcontext()


class _Run:
    """One rank's run of a table."""

    def __init__(
        self, pipe: Pipelined, kind: str, n: int, axes: tuple[str, ...], params: Any, placed: Any, batch: Any,
        batches: Sequence[Any], each: Any,
    ) -> None:  # fmt: skip
        self.pipe, self.axes, self.params, self.batches = pipe, axes, params, batches
        self.stage, self.final = axis_position(axes), n * pipe.chunks - 1
        self.is_last = self.stage == n - 1
        self.steps = _steps(kind, n, pipe.microbatches, pipe.chunks, self.stage)
        self.ends, self.is_listed = params[0], isinstance(params[1], (list, tuple))
        self.layers, self.each = _layers(params[1], each, pipe.chunks)
        places, first, step = _places(evenly(len(self.layers), pipe.chunks)), 0, 1  # of stacked layers all are here
        if self.is_listed:
            if not isinstance(placed, (list, tuple)) or len(placed) != len(self.layers):
                placed = self.layers  # a list that `gather` has made
            places, first, step = _listed_places(placed, axes, pipe.chunks, n, self.stage), self.stage, n
        self.chunks = [[i for i, place in enumerate(places) if place == first + c * step] for c in range(pipe.chunks)]
        self.parts = list(microbatches(tree.leaves(batch), pipe.microbatches))
        h, self.result = self._outline()
        self.h, self.h_def = tree.flatten(h)
        self.comm, self.site, self.groups = region().comm, site(), by_dtype(self.h)
        self.empty = list(map(_zeros, self.h))  # where nothing is sent, only the shapes and dtypes count
        self.arriving: dict[Key, list[PendingTransfer]] = {}
        self.sent: list[list[PendingTransfer]] = []
        self.found: list[Any] = []  # what `last` returns for each microbatch
        # By microbatch and chunk: the received leaves, and the roots: edges, or in a checked call tensors.
        self.graphs: dict[tuple[int, int], tuple[list[Tensor], list[Any]]] = {}
        self.later: dict[tuple[int, int], Callable[[], None]] = {}

    def _outline(self) -> tuple[Any, Any]:
        """Return h, and zeros like the result of `last`: computed without values, on each rank without the others.

        In a checked call it types h, and a layer must not change that type.
        """
        types, current = checker(), region()
        leaves, treedef = tree.flatten((self.ends, self.batches[0]))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        # The shapes of h may follow from numbers in the batch, too.
        is_kept = types is None and current.comm.has_values and len(tensors) == len(leaves)
        known: dict[Any, tuple[Any, Any]] = self.pipe._outlines if is_kept else {}
        device = current.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        key = treedef, cast, *current.sizes.items(), *current.coords.items(), *[(x.shape, x.dtype) for x in tensors]
        if key in known:
            return known[key]
        mode = next((x.fake_mode for x in tensors if hasattr(x, "fake_mode")), None) or fake_tensors()  # of a dry run
        silent = bind(replace(current, comm=silent_comm(current.comm), scratch={}))
        part = in_microbatch(self.parts[0])
        explained = explain_missing_values("in a pipeline each stage first computes shapes without data", "")
        with explained, without_modes(), mode, types or _NOTHING, silent, torch.no_grad(), part:
            h = self.pipe.first(self.ends, self.batches[0])
            self.h, self.h_def = tree.flatten(h)
            for path, x in tree.leaves_with_path(h):
                if not isinstance(x, Tensor) or not differentiable_dtype(x):
                    raise fail(f"pipelined: {tree.show('the h of first', path)} is {_kind(x)}, not a tensor of "
                               "floating numbers", fix="what is not differentiated is in the batch, which each "
                               "stage has")  # fmt: skip
            for i in itertools.islice(itertools.chain(*self.chunks), int(types is not None)):
                self._check_h(self.pipe.stage(self.layers[i], h, self.batches[0], *self.each[i]), "stage")
            result = self.pipe.last(self.ends, h, self.batches[0])
        zeros = lambda x: _zeros(x) if isinstance(x, Tensor) else x  # noqa: E731
        known[key] = h if types is not None else tree.map(zeros, h), tree.map(zeros, result)
        return known[key]

    # --- results ---

    def value_and_grad(self) -> tuple[Tensor, Any, Any, Any]:
        """Return the sums of the losses and the counts, the stacked aux, and the sums of the gradients."""
        self.result = self._of_last(self.result)
        self.ends, self.layers = _differentiated(self.ends), _differentiated(self.layers)
        self.weights = [tree.leaves([self.ends, *[self.layers[i] for i in chunk]]) for chunk in self.chunks]
        with differentiating(), torch.enable_grad():
            losses, counts, auxes = zip(*self.run(), strict=True)
        loss, count, aux = self.from_last_stage((sum(losses), sum(counts), stacked("pipelined", auxes)))
        rows = self.layers
        layers = tree.map(_take_grad, rows) if self.is_listed else tree.map(_stacked_grad, self.params[1], *rows)
        grads = tree.map(_take_grad, self.ends), layers
        if (types := checker()) is not None:
            types.check_gradients([], tree.leaves(self.params), tree.leaves(grads))
        return loss, count, aux, grads

    def from_last_stage(self, xs: Any) -> Any:
        """Return the last stage's tensors on each stage: a sum, in which the others have zeros."""
        tensors, rest = split_tensors(xs)
        # Bools, and some integers and floats of 8 bits, have no sum: these and all integers are summed by their bytes.
        numbers = [x if x.is_complex() or (x.is_floating_point() and x.itemsize > 1)
                   else x.unsqueeze(-1).view(torch.uint8) for x in tensors]  # fmt: skip
        if not self.is_last:
            numbers = list(map(torch.zeros_like, numbers))
        varying = numbers if checker() is None else pvary(numbers, self.axes)
        totals = psum(varying, self.axes)
        out = [y if y.ndim == x.ndim else y.clone().view(x.dtype).squeeze(-1)
               for x, y in zip(tensors, totals, strict=True)]  # fmt: skip
        return fill_tensors(rest, out)

    def _of_last(self, x: Any) -> tuple[Tensor, Any, Any]:
        """Return (loss, count, aux) of a result of `last`."""
        loss, count, aux = loss_count_aux("pipelined(last)", x, self.pipe.counted, self.pipe.has_aux)
        check_loss("pipelined(last)", loss)
        return loss, count, aux

    # --- operations ---

    def run(self) -> Sequence[Any]:
        """Return the results of the microbatches: of a stage that is not the last, zeros like them."""
        fix = "call it in gather=, or after the pipeline; over axes without the stages'"
        with without_others("a stage of a pipeline", fix, self.axes):
            for op, place, receives, sends in self.steps:
                for message, series in receives:
                    self.arriving[message.key] = self._start(message, series, self.empty)
                self._end_sends(_MOST_SENT)
                h: list[Tensor] = []  # of the operation before, not in memory with this one's
                with in_microbatch(self.parts[op.microbatch]):
                    if op.kind != "W":
                        h = self._forward(op, place) if op.kind == "F" else self._backward(op, place)
                    elif of_weights := self.later.pop(op[1:], None):
                        of_weights()
                for message, series in sends:
                    self.sent.append(self._start(message, series, h))
            self._end_sends(0)
        return self.found or [self.result] * len(self.parts)

    def _end_sends(self, most: int) -> None:
        while len(self.sent) > most:
            for wait in self.sent.pop(0):
                wait()

    def _forward(self, op: Operation, place: int) -> list[Tensor]:
        """Compute a chunk for a microbatch; return the leaves of its h."""
        batch, recorded = self.batches[op.microbatch], torch.is_grad_enabled()
        inputs = self._receive(("F", op.microbatch, place)) if place else []
        if recorded:
            inputs = [x.detach().requires_grad_() for x in inputs]
        h = tree.unflatten(self.h_def, inputs) if place else self.pipe.first(self.ends, batch)
        for i in self.chunks[op.chunk]:
            h = self.pipe.stage(self.layers[i], h, batch, *self.each[i])
        self._check_h(h, "stage" if self.chunks[op.chunk] else "first")
        roots = tree.leaves(h)
        if place == self.final:
            result = self.pipe.last(self.ends, h, batch)
            result = self._of_last(result) if recorded else result
            roots = [result[0]] if recorded else []
            self.found.append(tree.map(lambda x: x.detach() if isinstance(x, Tensor) else x, result))
        if recorded:  # h itself is not kept: its graph does not need it
            is_checked = checker() is not None
            kept = [(x if is_checked else get_gradient_edge(x)) if x.requires_grad else None for x in roots]
            self.graphs[op[1:]] = inputs, kept
        return [x.detach() for x in roots]

    def _backward(self, op: Operation, place: int) -> list[Tensor]:
        """Compute the gradients of a chunk for a microbatch; return the gradients of the leaves that it received."""
        inputs, roots = self.graphs.pop(op[1:])
        grads: Sequence[Any] = self._receive(("B", op.microbatch, place)) if place < self.final else [None]
        grads = [g for root, g in zip(roots, grads, strict=True) if root is not None]
        roots, weights = [root for root in roots if root is not None], self.weights[op.chunk]
        if op.kind == "D" and inputs and roots and checker() is None:
            self.later[op[1:]] = backward_of_inputs(roots, grads, inputs, weights)
        elif roots:
            torch.autograd.backward(roots, grads, inputs=[*inputs, *weights])
        return list(map(_take_grad, inputs))

    def _start(self, message: _Message, series: Series, xs: Sequence[Tensor]) -> list[PendingTransfer]:
        """Start a message, the leaves of h or their gradients: a transfer for each dtype."""
        pairs = [(message.source, message.target)]
        with unchecked(), transposing(self.site) if message.key[0] == "B" else _NOTHING:
            return [self.comm.send([xs[i] for i in group], pairs, self.axes, series) for group in self.groups]

    def _receive(self, key: Key) -> list[Tensor]:
        """Wait for a message."""
        out, types = list(self.empty), checker()
        with unchecked():
            for wait, group in zip(self.arriving.pop(key), self.groups, strict=True):
                for i, x in zip(group, wait(), strict=True):
                    out[i] = x
        if types is not None:
            for x, like in zip(out, self.h, strict=True):
                types.set_message_type(x, like, "pipelined", self.axes)
        return out

    def _check_h(self, h: Any, by: str) -> None:
        """Raise for an h of another structure, shape, dtype or type than the stages agreed on."""
        leaves, treedef = tree.flatten(h)
        if treedef != self.h_def or any(not isinstance(x, Tensor) or x.shape != like.shape or x.dtype != like.dtype
                                        for x, like in zip(leaves, self.h, strict=True)):  # fmt: skip
            raise fail(f"pipelined({by}): h has another structure, shape or dtype than first returns",
                       "each stage sends to the next one what it receives", stage=tree.map(_kind, h),
                       first=tree.map(_kind, tree.unflatten(self.h_def, self.h)),
                       fix="one form of h for all layers, x.to(h.dtype) for another dtype")  # fmt: skip
        types = checker()
        for x, like in zip(leaves, self.h, strict=True) if types is not None else ():
            a, b = types.info(x).type, types.info(like).type
            if other := ((a.varying & b.invariant) | (a.invariant & b.varying)) - set(self.axes):
                names = ", ".join(map(repr, sorted(other)))
                here, there = ("stage", "first") if a.varying & other else ("first", "stage")
                raise fail(f"pipelined: the h of {here} varies over {names}, and the h of {there} does not",
                           "each stage sends to the next one what it receives",
                           fix=f"fs.pvary(h, {names}) in {there}")  # fmt: skip


def _zeros(like: Tensor) -> Tensor:
    """Return zeros that take no memory."""
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)


def _kind(x: Any) -> str:
    return f"{str(x.dtype)[6:]}{list(x.shape)}" if isinstance(x, Tensor) else shown(x)


def _differentiated(params: Any) -> Any:
    """Return leaves of autograd that share memory with parameters."""
    leaves, treedef = tree.flatten(params)
    new = [x.detach().requires_grad_() for x in leaves]
    keep_placed(new, leaves)
    return tree.unflatten(treedef, new)


def _take_grad(x: Tensor) -> Tensor:
    """Return the gradient that a leaf of autograd has, and free it there."""
    grad, x.grad = x.grad, None
    return torch.zeros_like(x) if grad is None else grad.contiguous()


def _stacked_grad(like: Tensor, *rows: Tensor) -> Tensor:
    """Return the gradient of a stacked leaf, from the gradients of its rows."""
    if not rows:
        return torch.zeros_like(like)
    grads = list(map(_take_grad, rows))
    return (torch.stack(grads) if len(grads) > 1 else grads[0]).view_as(like)
