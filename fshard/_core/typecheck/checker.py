"""The checker of varying axes: it types every tensor of a region, and raises where a program mixes types.

The checker is a dispatch mode below torch.func, so it sees plain tensors: forward, backward and optimizer. It changes
no result. Over each axis of more than one rank a tensor is one of

    V   varying: each rank has a different value
    I   invariant: one logical value, the same on every rank of the axis
    -   free: made in the region from nothing (zeros, arange), or from Python numbers; mixes with either

A tensor from outside the region that is not an argument (captured: a closure, a global, an attribute of a module) is I,
and an error where an operation or a backward pass writes to it. A free tensor is I from where something differentiates
it, or has the type of the tensor that it was made like (zeros_like).

The result of an operation is V if any operand is, else I if any operand is. Where one operand is I and another V, and a
gradient can flow to the first, that gradient needs a sum over ranks, which only `pvary` takes: without `pvary` that is
an error. Where nothing is differentiated (an optimizer, evaluation, a frozen or detached operand) the result varies,
and the checker remembers the line: an error at the results names it. Random draws do not mix: a mask must vary over
exactly the axes of the tensor that it is applied to.

Source: the per-axis types of JAX's shard_map (varying manual axes).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage

from fshard._core import callsite
from fshard._core.operations import OperationMode
from fshard._core.ops import differentiable_dtype
from fshard._core.protocol import index_of, size_of
from fshard._core.torch import in_backward, storage_id, suspended, unwrapped, without_torch_function
from fshard.errors import ShardingError
from fshard.mesh import Mesh
from fshard.spec import P, Size

from . import messages
from .differentiated import Differentiated, leaves_of
from .op_schema import Operation, operation
from .type_table import TypeTable
from .types import (
    NO_HISTORY,
    NONE,
    Facts,
    GlobalShape,
    History,
    Mixture,
    MixtureText,
    Operand,
    Partial,
    Reduction,
    TensorInfo,
    Type,
    history_like,
    join,
    show_type,
)


class Rank(NamedTuple):
    """One rank of a call, in this process."""

    coords: Mapping[str, int]
    table: TypeTable


class Ranks(list[Rank]):
    """The ranks of a call, in this process, and the texts of mixtures, which are alike on each of them.

    `sent` has the types that each rank passed to a permute, by the permute and the position.
    """

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[Any, MixtureText] = {}
        self.sent: defaultdict[Any, dict[int, list[Type]]] = defaultdict(dict)


_M = TypeVar("_M", bound=Callable[..., Any])


def _without_torch_function(method: _M) -> _M:
    """Decorate a method whose reads of a tensor's attributes no mode of torch functions needs to see."""

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with without_torch_function():
            return method(*args, **kwargs)

    return cast(_M, wrapper)


# Values of one rank that another one read, with the coordinates of the first: a cache has them at the next call too.
_refused: WeakKeyDictionary[UntypedStorage, tuple[Mapping[str, int], TensorInfo]] = WeakKeyDictionary()


class Checker(OperationMode, Facts):
    """The types of one rank's tensors during one call. `axes` are the axes of more than one rank."""

    supports_higher_order_operators = True
    differentiated: Differentiated

    def __init__(
        self, axes: Sequence[str], sizes: Mapping[str, int], coords: Mapping[str, int] | None = None,
        ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        """Make the checker of the rank at `coords`, and add it to the `ranks` of the call in this process, if any."""
        super().__init__()  # type: ignore[no-untyped-call]
        Facts.__init__(self, sizes)
        self.axes = frozenset(axes)
        self.differentiated = Differentiated(weakref.proxy(self))  # a cycle would keep the checker after its call
        # Arguments that split rows were multiplied by, by (root, axis): each rank has other columns for other rows.
        self.blocks: dict[tuple[int, str], tuple[callsite.Site | None, tuple[Operand, Operand]]] = {}
        # (collective, (dim, size) of each tensor, axes, line) that splits a dim into parts of different sizes
        self.uneven_splits: dict[tuple[str, tuple[tuple[int, Size], ...], tuple[str, ...], Any], None] = {}
        self._argument_storages: set[int] = set()
        self._single_rows: dict[int, set[str]] = {}  # axes by whose ranks an argument has one row each, by their size
        self._placed: dict[int, Tensor] = {}  # arguments that the caller keeps as placed leaves, by storage
        self._table = TypeTable()
        self._coords, self._ranks = coords or {}, Ranks() if ranks is None else ranks
        self._ranks.append(Rank(self._coords, self._table))  # and not the checker: a cycle
        self._roots = 0
        self._gathered: set[tuple[int, str]] = set()  # roots, and the axes over which they were gathered
        self._permutes: Counter[tuple[str, ...]] = Counter()  # run so far, by their axes
        self._moved: set[str] = set()  # axes over which ranks sent each other parts
        self._paused = False

    def __enter__(self) -> Checker:
        self.differentiated.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self.differentiated.__exit__(*exception)  # type: ignore[no-untyped-call]

    # --- types of tensors that no operation made ---

    def info(self, x: Tensor) -> TensorInfo:
        """Return the type and origin of a tensor."""
        return self._info_of_plain(unwrapped(x))

    def _info_of_plain(self, x: Tensor) -> TensorInfo:
        info = self._table.get(x) or self._info_of_unknown(x)
        if info.type.differentiable:  # the usual case, made fast
            return info
        starts = (x.requires_grad and x.is_leaf) or self.differentiated.is_inside(x)
        return self._differentiated_info(x, info) if starts and not in_backward() else info

    def _info_of_unknown(self, x: Tensor) -> TensorInfo:
        """Return, and keep, the facts of a tensor that this region did not make: it is captured, or another rank's."""
        storage = x.untyped_storage()
        known = ((rank.coords, rank.table.get(x)) for rank in self._ranks)
        made = _refused.get(storage) or next(((c, i) for c, i in known if i and not i.is_captured), None)
        if made is None:
            type = Type(NONE, self.axes if differentiable_dtype(x) else NONE, x.requires_grad)
            info = TensorInfo(type, 0, start=int(x.storage_offset()), origin="captured")
        else:
            coords, info = made
            apart = [a for a in sorted(info.type.varying & self.axes) if coords[a] != self._coords[a]]
            if apart:
                _refused[storage] = made
                raise messages.made_by_another_rank(Operand(x, info), coords, apart)
        self._roots += 1
        info = info._replace(root=self._roots)
        self._table.set_storage(x, info)
        return info

    def _differentiated_info(self, x: Tensor, info: TensorInfo) -> TensorInfo:
        """Return, and keep, the facts of a tensor that is differentiated from here: one value where it was free."""
        varying = info.type.varying | info.history.like
        type = info.type._replace(varying=varying, invariant=self.axes - varying, differentiable=True)
        made = type.invariant - info.type.invariant
        info = info._replace(type=type, origin="made" if made and not info.origin else info.origin)
        self._table.set(x, info, alias=True)
        return info

    def _set_info(
        self, x: Tensor, type: Type, *, name: str | None = None, op: str = "", site: callsite.Site | None = None,
        alias: bool = False, history: History = NO_HISTORY, spec: P | None = None,
    ) -> None:  # fmt: skip
        """Type a tensor as a new root; an `alias` shares memory with a tensor of another type."""
        self._roots += 1
        x, site = unwrapped(x), None if name else site or callsite.site()
        info = TensorInfo(type, self._roots, name, op, site, int(x.storage_offset()), history, spec)
        self._table.set(x, info, alias=alias)

    @_without_torch_function
    def set_argument_type(self, x: Tensor, spec: P, name: str, *, placed: bool = False) -> None:
        """Type an argument of the region, which varies over the axes that its spec names. Refuse writes to `placed`."""
        varying = frozenset(spec.axes)
        type_ = Type(varying & self.axes, self.axes - varying, differentiable_dtype(x))
        self._set_info(x, type_, name=name, spec=spec)
        self.arguments.append(self.info(x))
        self._argument_storages.add(storage_id(x))
        if varying:
            self.split_arguments[self._roots] = self.arguments[-1]
        split = spec.parts(x.ndim)[0] if x.ndim and x.shape[0] == 1 else ()
        if split:
            self._single_rows.setdefault(size_of(split, self.sizes), set()).update(split)
        if placed:
            self._placed[storage_id(x)] = x

    def set_integer_type(self, x: Tensor, op: str, *, of: Sequence[Any] = (), varies: Sequence[str] = ()) -> None:
        """Type an integer computed outside of torch, from the tensors `of`, or from the rank's index on some axes."""
        operands = [self.info(t).type for t in of if isinstance(t, Tensor)]
        self.asked.update(varies)
        self._set_info(x, join([Type(frozenset(varies) & self.axes), *operands], x), op=op)

    def set_draw_type(
        self, x: Tensor, op: str, key: Tensor, spec_axes: Sequence[str], shared: Sequence[str] = ()
    ) -> None:
        """Type a random draw, which varies over the axes of its spec and of its key.

        Over the axes of its spec, ranks have parts of one draw. Over other axes its numbers are the same on each rank,
        or by a key that varies they have nothing to do with each other. Over the `shared` ones of these it mixes with
        anything: one device too would use the same numbers for the parts of all ranks.
        """
        varying = (frozenset(spec_axes) & self.axes) | self.info(key).type.varying
        drawn = (self.axes - set(spec_axes)) | self.info(key).type.varying
        drawn -= set(shared) - self.info(key).type.varying
        invariant = self.axes - varying - set(shared)
        self._set_info(x, Type(varying, invariant, drawn=drawn), op=op)

    def set_message_type(self, x: Tensor, like: Tensor, op: str, axes: Sequence[str]) -> None:
        """Type a message from a rank of `axes`: it varies over them, and over the others as `like` does."""
        known, over = self.info(like).type, frozenset(axes) & self.axes
        self._set_info(x, Type(known.varying | over, known.invariant - over, differentiable_dtype(x)), op=op)

    def record_number(self, verb: str, number: Any, axes: Sequence[str]) -> None:
        """Record a Python number that a collective takes as the same on every rank of these axes."""
        self._record_numbers(verb, (number,), frozenset(axes) & self.axes)

    def record_shape(self, verb: str, shape: Sequence[int], axes: Iterable[str]) -> None:
        """Record a global shape that ranks of these axes take parts of: it must be the same on each."""
        self._record_numbers(verb, (GlobalShape(shape),), frozenset(axes) & self.axes)

    def record_split(self, verb: str, layout: tuple[tuple[int, Size], ...], axes: tuple[str, ...]) -> None:
        """Record a collective that splits dims into parts that differ in length."""
        self.uneven_splits[verb, layout, axes, callsite.site()] = None

    def group_by_type(self, xs: Sequence[Tensor]) -> list[list[int]]:
        """Return the positions of tensors, grouped by type."""
        groups: dict[Type, list[int]] = {}
        for i, x in enumerate(xs):
            groups.setdefault(self.info(x).type, []).append(i)
        return list(groups.values())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore operations: the caller types the result of all of them."""
        before, self._paused = self._paused, True
        try:
            with suspended(self, self.differentiated):
                yield
        finally:
            self._paused = before

    # --- collectives ---

    @_without_torch_function
    def run_collective(
        self, m: Any, xs: Sequence[Tensor], run: Callable[[Any], Sequence[Tensor]]
    ) -> tuple[Tensor, ...]:
        """Run a linear map, after a check of its operands' types, and type its results."""
        axes, site = frozenset(m.axes), m.origin or callsite.site()
        infos = [self.info(x) for x in xs]
        for x, info in zip(xs, infos, strict=True):
            wrong = info.type.invariant & axes if m.takes == "V" else info.type.varying & axes
            if wrong and (m.verb != "pvary" or m.origin is not None):
                raise messages.collective_of_wrong_type(self, m, Operand(x, info), sorted(wrong))
            if m.verb in ("psum", "pmean") and m.origin is None:
                self._check_elements(m.verb, x, info, axes)
            if m.verb in _MOVES:
                self._moved |= axes
            if m.verb == "all_gather":
                self._gathered.update((info.root, axis) for axis in axes)
            if m.takes == "I" and info.type.differentiable:  # the ranks may have picked different parts by a number
                self._record_numbers(m.verb, (x.storage_offset() - info.start,), info.type.invariant)
        types = [info.type for info in infos]
        if m.verb == "ppermute":
            sent = self._sent(m, types)
        with self.paused():
            out = tuple(run(xs))
        if m.verb == "ppermute" and (senders := {source for source, _ in m.pairs}) and senders <= sent.keys():
            types = [join([sent[r][i] for r in sorted(senders)]) for i in range(len(xs))]
        op = m.verb if m.origin is None else f"{m.verb}, the transpose of the {m.transpose.verb}"
        known: dict[tuple[Type, int], tuple[Type, History]] = {}  # most tensors of a tree have one type
        for y, info, type in zip(out, infos, types, strict=True):
            if (key := (type, id(info.history))) not in known:
                known[key] = self._collective_type(m, type, info.history, site)
            new, history = known[key]
            self._set_info(y, new, op=op, site=site, alias=not m.moves, history=history)
            if m.verb == "pvary" and info.root in self.split_arguments:
                self.split_arguments[self._roots] = self.split_arguments[info.root]
        return out

    def _check_elements(self, verb: str, x: Tensor, info: TensorInfo, axes: frozenset[str]) -> None:
        """Raise for a gradient that the axes split. Record the count of a mean, which must be the same on each rank."""
        if verb == "pmean" and (mean := info.mean) is not None and mean.axes & axes:
            self._record_numbers("pmean of a mean", (mean.averaged,), axes)
        parts = () if info.spec is None or info.name else info.spec.parts(x.ndim)
        for dim, names in enumerate(parts):
            if axes.intersection(names) and x.shape[dim] > 1:  # each rank may have one row, of a copy of a model
                raise messages.parts_of_gradient_reduced(
                    self, verb, Operand(x, info), dim, sorted(axes.intersection(names))
                )

    def _sent(self, m: Any, types: list[Type]) -> dict[int, list[Type]]:
        """Note the types that this rank passes to a permute; return the types from all ranks that have entered it.

        A rank receives values of its senders' types; it may itself send nothing, and pass zeros of no type.
        """
        others = tuple([self._coords[a] for a in self.sizes if a not in m.axes]) if self._coords else ()
        sent = self._ranks.sent[m.axes, others, self._permutes[m.axes]]
        self._permutes[m.axes] += 1
        sent[index_of(m.axes, self.sizes, self._coords) if self._coords else 0] = types
        return sent

    def _collective_type(self, m: Any, t: Type, before: History, site: callsite.Site | None) -> tuple[Type, History]:
        """Return the type and the history of a linear map's result, by the operand's."""
        axes = frozenset(m.axes)
        varying = t.varying | axes if m.gives == "V" else t.varying - axes
        invariant = t.invariant - axes if m.gives == "V" else t.invariant | axes
        reductions = tuple(x for x in before.reductions if x.axis in invariant)
        if m.gives == "I" and m.origin is None:
            reductions += tuple(Reduction(axis, m.verb, site) for axis in m.axes)
        mixtures = tuple(x for x in before.mixtures if x.axis in varying)
        copies = before.copies | axes - t.varying if m.verb == "pvary" else before.copies - axes
        gathers = tuple(x for x in before.gathers if x.axis in varying - axes)
        if m.verb == "all_gather" and m.gives == "V" and m.origin is None:
            gathers += tuple(Reduction(axis, m.verb, site) for axis in m.axes)
        parted = frozenset(x for x in before.parted if x[0] not in axes) if before.parted else before.parted
        partials = before.partials if varying else ()
        history = History(mixtures, reductions, partials, copies, gathers, parted=parted)
        return Type(varying, invariant, t.differentiable), history

    @_without_torch_function
    def check_pvary(self, m: Any, xs: Sequence[Tensor]) -> None:
        """Raise for a pvary of tensors that vary already, if their gradients would be summed.

        For a frozen tensor it does nothing, so that one function can serve a trained model and a frozen one.
        """
        for x in xs:
            info = self.info(x)
            wrong = info.type.varying & frozenset(m.axes)
            if wrong and self.differentiated(x):
                raise messages.collective_of_wrong_type(self, m, Operand(unwrapped(x), info), sorted(wrong))
        self.pvaried.add(callsite.site())

    @_without_torch_function
    def check_operands(self, name: str, xs: Sequence[Tensor]) -> None:
        """Raise where the operands of a Function, which hides its operations from autograd, must not be mixed."""
        self._result_type(Operation(None, name), [Operand(unwrapped(x), self.info(x)) for x in xs], (), {})

    # --- operations ---

    def run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation after a check of its operands' types, and type its results."""
        if self._paused or (op := operation(func)).namespace == "prim":
            return func(*args, **kwargs)
        with without_torch_function():
            if op.namespace == "higher_order":
                return self._run_higher_order(op, args, kwargs)
            return (self._run_on_lists if op.on_lists else self._run_on_tensors)(op, args, kwargs)

    def _run_on_tensors(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands = [Operand(x, self._info_of_plain(x)) for x in op.read(args, kwargs)]
        if op.is_random and op.uses_torch_generator(args, kwargs):
            raise messages.draw_from_torch_generator(op.name)
        if op.of_some_value and op.lacks_a_value(args, kwargs):
            raise messages.reduction_of_no_value(op.name, args[0])
        new, history = self._result_type(op, operands, args, kwargs)
        written: Sequence[Operand] = ()
        if op.writes or op.writes_statistics:
            written = [Operand(x, self._info_of_plain(x)) for x in op.written(args, kwargs)]
            self._check_written(op, new, history, written, operands)
        out = op.func(*args, **kwargs)
        if op.completed_by == "pmean" and history.partials:
            result = out[0] if isinstance(out, tuple) else out
            values = args[1] if op.name == "nll_loss_forward" else operands[0].tensor
            mean = history.partials[0]._replace(averaged=values.numel() // max(1, result.numel()))
            history = history._replace(partials=(mean, *history.partials[1:]))
        known = join([new, *(o.info.type for o in written)]) if written else new
        if known.invariant and known.differentiable:
            self._record_numbers(op.name, op.numbers(args, kwargs), known.invariant)
        for o in written:
            self._set_written_info(op, o, new, history)
        self._set_result_info(op, new, history, operands, out, {id(o.tensor) for o in written} if written else ())
        return out

    def _run_higher_order(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that takes functions (torch.cond, flex_attention), typed only by its operands."""
        operands = [Operand(x, self.info(x)) for x in op.read(args, kwargs)]
        new, history = self._result_type(op, operands, args, kwargs)
        with self.paused():
            out = op.func(*args, **kwargs)
        self._set_result_info(op, new, history, operands, out, ())
        return out

    def _run_on_lists(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on lists: a tensor mixes only with those at its position in the other lists."""
        rows = []
        for row in op.rows(args, kwargs):
            read = [Operand(x, self.info(x)) for x in (row[op.lists_written :] if op.overwrites else row)]
            new, history = self._result_type(op, read, args, kwargs)
            written = [Operand(x, self.info(x)) for x in row[: op.lists_written]]
            # A fused step writes to gradients only to unscale them.
            reads_gradient = op.name.startswith("fused_") and kwargs.get("grad_scale") is None
            self._check_written(op, new, history, written[:1] + written[2:] if reads_gradient else written, read)
            rows.append((written, new, history))
        out = op.func(*args, **kwargs)
        known = join([new for _, new, _ in rows])
        if known.invariant and known.differentiable:
            self._record_numbers(op.name, op.numbers(args, kwargs), known.invariant)
        for i, (written, new, history) in enumerate(rows):
            for o in written:
                self._set_written_info(op, o, new, history)
            if isinstance(out, (list, tuple)) and i < len(out):
                self._set_result_info(op, new, history, [], out[i], ())
        return out

    def _result_type(
        self, op: Operation, operands: Sequence[Operand], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Type, History]:
        """Return the type of an operation's results, and the lines that explain it.

        Raises ShardingError where an operand that is invariant must not meet a varying one.
        """
        if op.constant:
            axes = NONE.union(*(o.info.type.varying | o.info.history.like for o in operands)) if op.like else NONE
            return Type(), history_like(axes)
        if operands:  # the usual case, made fast
            type, history = operands[0].info.type, operands[0].info.history
            for _, info in operands:
                if info.type is not type and info.type != type:
                    break
                if info.history is not history and (history.partials or info.history != history):
                    break
            else:
                if op.completed_by is None or not (type.varying or history.partials):
                    return type if type.varying or type.invariant else _FREE_TYPE, history
        if self._single_rows and op.pointwise:
            self._check_rows(op, operands)
        infos = list({(o.info.type, id(o.info.history)): o.info for o in operands}.values())  # operands are often alike
        new = join([info.type for info in infos])
        mixtures = {m.axis: m for info in reversed(infos) for m in info.history.mixtures}
        for axis in sorted(new.varying & NONE.union(*[info.type.invariant for info in infos])):
            invariant = [o for o in operands if axis in o.info.type.invariant]
            varying = [o for o in operands if axis in o.info.type.varying]
            mixture = self._mix(op, axis, invariant, varying, operands, mixtures.get(axis))
            if mixture is not None and (axis not in mixtures or mixture.is_update):
                mixtures[axis] = mixture
        reductions = {r.axis: r for info in infos for r in info.history.reductions if r.axis in new.invariant}
        partials: tuple[Partial, ...] = ()
        if new.varying and (op.completed_by or any(info.history.partials for info in infos)) and not in_backward():
            partials = self._partials(op, operands, args, kwargs)
        copies = new.varying
        for info in infos:
            copies -= info.type.varying - info.history.copies
        gathers = {r.axis: r for info in infos for r in info.history.gathers}
        for axis in list(gathers):
            histories = [info.history for info in infos if axis in info.type.varying]
            if not all(_is_copied(h, axis) for h in histories):
                del gathers[axis]
        parted = frozenset[tuple[str, str]]().union(*(info.history.parted for info in infos))
        if not (mixtures or reductions or partials or copies or gathers or parted):
            is_free = not (new.varying or new.invariant)
            return new, history_like(NONE.union(*(info.history.like for info in infos)) if is_free else NONE)
        history = History(tuple(mixtures.values()), tuple(reductions.values()), partials, copies,
                          tuple(gathers.values()), parted=parted)  # fmt: skip
        # The same object where it can be: the next operation compares histories by identity.
        return new, next((info.history for info in infos if info.history == history), history)

    def _check_rows(self, op: Operation, operands: Sequence[Operand]) -> None:
        """Raise where a rank's row of an argument is broadcast to the rows of a captured tensor, one for each rank."""
        for o in operands:
            axes = self._single_rows.get(len(o.tensor), set()) if o.info.is_captured and o.tensor.ndim else ()
            for row in operands if axes else ():
                x, same_ndim = row.tensor, row.tensor.ndim == o.tensor.ndim
                if same_ndim and len(x) == 1 < len(o.tensor) and row.info.type.varying.intersection(axes):
                    raise messages.captured_rows(self, op.name, o, row, operands)

    def _partials(
        self, op: Operation, operands: Sequence[Operand], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Partial, ...]:
        """Return the last two reductions of a dim on the way to the result of an operation, the last one first."""
        known: tuple[Partial, ...] = ()
        if op.name == "matmul":
            x, w = operands[-2:]
            if x.info.root in self.split_arguments and w.info.root in self.split_arguments:
                self._note_blocks(x, w)
        for o in operands:
            partials = o.info.history.partials
            if partials and known and partials != known:
                known = self._joined_partials(op, operands)
                break
            known = partials or known
        firsts = [(o.info.site, p) for o in operands for p in o.info.history.partials[:1]]
        is_product_of_sums = len(firsts) == len(operands) > 1 and all(p.axes and p.site == site for site, p in firsts)
        if op.completed_by and not is_product_of_sums:
            reduced = operands[-2:] if op.name == "matmul" else operands[:1]  # before them, a matrix to add
            axes = frozenset[str].intersection(*(o.info.type.varying - o.info.history.copies for o in reduced))
            return Partial(
                op.name, op.completing(args, kwargs), callsite.site(), axes, op.reduced_dim(args, kwargs)
            ), *known[:1]
        return known

    def _note_blocks(self, x: Operand, w: Operand) -> None:
        """Note a product of an argument's rows with another's columns where one axis splits both.

        A rank gets its rows by its columns: blocks on the diagonal of the product, which no mesh-free program computes.
        """
        rows_of, columns_of = (self.split_arguments[o.info.root] for o in (x, w))
        rows, columns = rows_of.spec or P(), columns_of.spec or P()
        flat = w.tensor.ndim != 2 or x.tensor.ndim < 2 or x.tensor.stride(-2) < x.tensor.stride(-1)
        if flat or rows_of.root == columns_of.root or w.tensor.shape[1] < 2:
            return
        out = columns.parts(2)[1 if w.tensor.stride(0) >= w.tensor.stride(1) else 0]
        for axis in w.info.type.varying.intersection(out, rows.parts(max(8, len(rows.entries)))[0]):
            self.blocks.setdefault((columns_of.root, axis), (callsite.site(), (x, w)))

    def _joined_partials(self, op: Operation, operands: Sequence[Operand]) -> tuple[Partial, ...]:
        """Return the partial results that a value was computed from: their sum, which is one, or each of the first."""
        found = {o.info.history.partials[0]: o for o in operands if o.info.history.partials}
        site, verbs = callsite.site(), {p.verb for p in found}
        direct = all(o.info.site in (p.site, site) for p, o in found.items())  # sum() begins with 0 + x
        if direct and len(verbs) == 1 and len(found) == len(operands) and op.name in _LINEAR:
            axes = frozenset[str].intersection(*(p.axes for p in found))
            return (Partial(op.name, verbs.pop(), site, axes, None),)
        return tuple(found)[:2]

    def _mix(
        self, op: Operation, axis: str, invariant: Sequence[Operand], varying: Sequence[Operand],
        operands: Sequence[Operand], earlier: Mixture | None,
    ) -> Mixture | None:  # fmt: skip
        """Return the mixture of operands that are invariant over an axis with some that vary; raise if it is wrong."""
        differentiated = [] if op.compares else [
            o for o in invariant if differentiable_dtype(o.tensor) and self.differentiated(o.tensor)
            and not self._reaches_only_captured(o.tensor)
        ]  # fmt: skip
        drawn = [o for o in varying if _is_draw(op, o, axis)]
        strict = [*differentiated]
        # The same random numbers for copies of one value are right.
        if not all(_is_copied(o.info.history, axis) for o in varying):
            strict += [o for o in invariant if _is_draw(op, o, axis)]
        if not strict and drawn and not op.compares:
            strict = [o for o in invariant if o.info.type.differentiable]
        others = drawn or [o for o in varying if differentiable_dtype(o.tensor)]
        if strict and others:
            raise messages.invariant_mixed_with_varying(self, op.name, axis, strict[0], others[0], operands)
        site = callsite.site()
        if site is None:
            return None
        o, other = (differentiated or invariant)[0], varying[0]
        known = self.mixtures.get((site, axis))
        text = known.text if known else self._mixture_text(op, axis, operands, o, other)
        is_update = op.pointwise and bool(o.info.name) and all(y.tensor.numel() <= o.tensor.numel() for y in operands)
        roots = frozenset(x.info.root for x in invariant)
        mixture = Mixture(axis, op.name, site, o.info, tuple(o.tensor.shape), other.info, text, bool(differentiated),
                          is_update, roots, earlier)  # fmt: skip
        for x in invariant:
            if x.info.is_captured:
                self.mixtures_of_captured.setdefault((x.info.root, axis), mixture)
        if known is None or (mixture.differentiated and not known.differentiated):
            self.mixtures[site, axis] = mixture
        return mixture

    def _mixture_text(
        self, op: Operation, axis: str, operands: Sequence[Operand], invariant: Operand, varying: Operand
    ) -> MixtureText:
        """Return the text of a mixture at the line that runs: the first rank makes it for all."""
        positions = [[x is y for y in operands].index(True) for x in (invariant, varying)]
        facts = [(show_type(x), x.info.name, x.info.op, x.info.origin) for x in (invariant, varying)]
        key = callsite.site(), axis, op.name, *positions, *facts
        if key not in self._ranks.texts:
            self._ranks.texts[key] = messages.mixture_text(self, op.name, operands, invariant, varying)
        return self._ranks.texts[key]

    def _reaches_only_captured(self, x: Tensor) -> bool:
        """Return whether a gradient to a plain tensor reaches only captured leaves.

        Such a leaf requires a gradient as every nn.Parameter does: only a backward pass shows if it is to have one.
        """
        if self.differentiated.is_inside(x):
            return False
        leaves = leaves_of(x)
        return bool(leaves) and all(self.info(leaf).origin == "captured" for leaf in leaves)

    def _check_written(
        self, op: Operation, new: Type, history: History, written: Sequence[Operand], operands: Sequence[Operand]
    ) -> None:
        """Raise where an operation writes to a tensor that the caller has, or values that vary to one that does not."""
        for o in written:
            if o.info.is_captured:
                raise messages.captured_written(self, op.name, o, operands)
            axes = o.info.type.invariant & new.varying
            if axes and storage_id(o.tensor) in self._argument_storages:
                varying = next(x for x in operands if axes & x.info.type.varying)
                raise messages.argument_overwritten(self, op.name, o, varying, operands, history, sorted(axes))
            if storage_id(o.tensor) in self._placed and o.tensor.numel():
                raise messages.placed_written(self, f"{op.name} in place", o, operands)

    def _set_written_info(self, op: Operation, o: Operand, new: Type, history: History) -> None:
        info = TensorInfo(new, o.info.root, op=op.name, site=callsite.site(), history=history)
        self._table.write(o.tensor, info, overwrites=op.overwrites)

    def _set_result_info(
        self, op: Operation, new: Type, history: History, operands: Sequence[Operand], out: Any,
        written: Collection[int],
    ) -> None:  # fmt: skip
        if isinstance(out, (list, tuple)):
            for x in out:
                self._set_result_info(op, new, history, operands, x, written)
        if not isinstance(out, Tensor) or id(out) in written:
            return
        if self.differentiated.inside and not op.constant:
            self.differentiated.follow(operands, out)
        is_real = differentiable_dtype(out)
        differentiable = new.differentiable and is_real
        # A value computed from a draw stays drawn until it has a gradient; an integer is a number like any other.
        drawn = new.drawn if new.drawn and not differentiable and (is_real or out.dtype == torch.bool) else NONE
        same = differentiable == new.differentiable and drawn == new.drawn  # the usual case, made fast
        type = new if same else Type(new.varying, new.invariant, differentiable, drawn)
        if op.view and operands:
            _, root, name, made_by, site, start, views, spec, origin = operands[0].info
            if op.copies:
                start, origin = int(out.storage_offset()), ""
            elif origin == "captured":
                origin = "view of captured"
            spec = spec if op.name in ("detach", "alias") else None
            info = TensorInfo(type, root, name, made_by, site, start, views, spec, origin)
            self._table.set(out, info, alias=not op.copies)
        else:
            self._roots += 1
            start = int(out.storage_offset())
            self._table.set(out, TensorInfo(type, self._roots, None, op.name, callsite.site(), start, history))

    def _record_numbers(self, op: str, numbers: tuple[Any, ...], invariant: frozenset[str]) -> None:
        """Record the Python numbers of an invariant result: they must be the same on every rank."""
        if numbers:
            self.numbers.append((op, callsite.site(), invariant, numbers))

    def numbers_by_run(self) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        """Return the recorded numbers by (operation, line, axes of the invariant result, run).

        Runs are counted for each set of axes: where a leaf is split unevenly, ranks may run a line a different number
        of times for results that vary.
        """
        runs: Counter[tuple[Any, ...]] = Counter()
        found = {}
        for op, site, invariant, numbers in self.numbers:
            place = op, site, tuple(sorted(invariant))
            runs[place] += 1
            found[*place, runs[place]] = numbers
        return found

    def numbers_to_compare(self) -> dict[Any, Any]:
        """Return the recorded numbers as plain data that can be sent to other processes."""
        return {
            (op, str(site), site.lasti if site else 0, invariant, run): numbers
            for (op, site, invariant, run), numbers in self.numbers_by_run().items()
        }

    def digest(self) -> str:
        """Return a hash of the recorded numbers."""
        return hashlib.blake2b(repr(sorted(self.numbers_to_compare().items(), key=repr)).encode()).hexdigest()

    # --- losses, gradients, results ---

    def check_loss(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor] | None) -> None:
        """Raise if a loss varies over an axis over which a tensor that it is differentiated by is invariant.

        The gradient of a tensor that was gathered is a sum over the ranks: of means, it is too large. One that is split
        has no gradient of products of its columns with only the rows of their rank.
        """
        if in_backward():  # a recomputation there differentiates a product with its gradient, and no loss
            return
        for x in outputs:
            loss = Operand(unwrapped(x), self.info(x))
            leaves = leaves_of(x) if inputs is None and (self.blocks or loss.info.type.varying) else inputs or ()
            for (root, axis), (site, operands) in self.blocks.items():
                if axis not in self._moved and any(self.info(leaf).root == root for leaf in leaves):
                    raise messages.columns_of_a_part(self, site, axis, *operands)
            for leaf in leaves if loss.info.type.varying else ():
                parameter = Operand(unwrapped(leaf), self.info(leaf))
                axes = loss.info.type.varying & parameter.info.type.invariant
                if axes:
                    raise messages.loss_varies(self, x, loss, parameter, sorted(axes))
                averaged = loss.info.type.varying & mean.axes if (mean := loss.info.mean) is not None else ()
                if gathered := [a for a in sorted(averaged) if (parameter.info.root, a) in self._gathered]:
                    raise messages.loss_of_gathered_varies(self, loss, parameter, gathered)

    @_without_torch_function
    def check_gradients(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> None:
        """Raise for gradients that vary where parameters do not, or are reduced where these vary; type the others."""
        losses = [self.info(x) for x in outputs]
        reductions = tuple(r for x in losses for r in x.history.reductions)
        apart = {r.axis for r in reductions}  # axes whose ranks differentiate other parts of a loss
        apart |= {a for x in losses for a in x.type.varying if not _is_copied(x.history, a)}
        for x, grad in zip(inputs, grads, strict=True):
            if grad is None:
                continue
            parameter, gradient = Operand(unwrapped(x), self.info(x)), Operand(unwrapped(grad), self.info(grad))
            want, have = parameter.info.type, gradient.info.type
            # Constants make a gradient invariant too, such as a frozen layer's gradient by its input.
            reduced = {r.axis for r in gradient.info.history.reductions}
            wrong = (have.varying & want.invariant) | (have.invariant & want.varying & reduced)
            if wrong:
                raise messages.gradient_has_wrong_type(self, parameter, gradient, sorted(wrong))
            before = parameter.info.history
            copied = *((a, "pvary") for a in before.copies), *((r.axis, "all_gather") for r in before.gathers)
            parted = frozenset(x for x in copied if x[0] in want.varying & apart)
            history = gradient.info.history._replace(reductions=reductions, parted=parted)
            info = gradient.info._replace(type=want, history=history, spec=parameter.info.spec)
            self._table.set(gradient.tensor, info, alias=True)

    def check_accumulated(self, leaves: Sequence[Tensor]) -> None:
        """Raise for leaves of the caller among those into whose `.grad` a backward pass, or an assignment, writes."""
        operands = {id(x): Operand(unwrapped(x), self.info(x)) for x in leaves if x.is_leaf}
        callers = [o for o in operands.values()
                   if o.info.origin == "captured" or self._placed.get(storage_id(o.tensor)) is o.tensor]  # fmt: skip
        if callers:
            raise messages.gradient_accumulated(callers)

    def set_data(self, x: Tensor, data: Tensor) -> None:
        """Type a tensor whose `.data` is set, which no operation shows. Raise for a captured one."""
        x, info = unwrapped(x), self.info(x)
        if info.is_captured:
            raise messages.captured_written(self, "an assignment to .data", Operand(x, info), ())
        if self._placed.get(storage_id(x)) is x:
            raise messages.placed_written(self, "an assignment to .data", Operand(x, info), ())
        self._table.set(x, self.info(data)._replace(name=info.name, origin=""), alias=True)

    @_without_torch_function
    def wrong_results(self, leaves: Sequence[Any], specs: Sequence[P]) -> list[tuple[int, Tensor, P]]:
        """Return the results whose types their specs do not allow, with their positions."""
        axes = {spec: frozenset(spec.axes) for spec in set(specs)}
        wrong = []
        for i, (x, spec) in enumerate(zip(leaves, specs, strict=True)):
            if isinstance(x, Tensor):
                info = self.info(x)
                type_, parted = info.type, info.history.parted
                if type_.varying - axes[spec] or type_.invariant & axes[spec] or (parted and _full_axes(x, info, spec)):
                    wrong.append((i, x, spec))
        return wrong

    @_without_torch_function
    def result_errors(self, name: str, rows: Sequence[tuple[str, Tensor, P]]) -> list[ShardingError]:
        """Return the errors of results, each with its path, that do not fit their specs: one for each line and axes."""
        groups: dict[Any, list[tuple[str, Operand, P]]] = {}
        for path, x, spec in rows:
            info, axes = self.info(x), set(spec.axes)
            extra, missing = tuple(sorted(info.type.varying - axes)), tuple(sorted(info.type.invariant & axes))
            kept = _full_axes(x, info, spec)
            if extra or missing or kept:
                result = Operand(unwrapped(x), info)
                update = messages.update_of(result, extra)
                key = (update.site if update else info.site, extra, () if extra else missing, kept)
                groups.setdefault(key, []).append((path, result, spec))
        return [messages.results_have_wrong_type(self, name, group, *key[1:]) for key, group in groups.items()]


def same_numbers(mesh: Mesh, checkers: Mapping[int, Checker]) -> None:
    """Raise where a Python number that an invariant value was computed from differs between ranks of its axes.

    `checkers` are given for this process's ranks; on a process mesh the numbers are gathered. An abstract mesh may have
    run a few of its ranks.
    """
    if mesh.kind == "process":
        (mine,) = checkers.values()
        by_rank: dict[int, Any] = dict(enumerate(mesh.gather_objects(mine.numbers_to_compare())))
    else:
        zero, *others = (c.numbers for c in checkers.values())
        text = repr([x[-1] for x in zero])
        if all(x == zero and repr([y[-1] for y in x]) == text for x in others):  # the usual case, made fast
            return
        by_rank = {rank: c.numbers_by_run() for rank, c in checkers.items()}
    coords = {rank: mesh.coords(rank) for rank in by_rank}
    runs = {rank: Counter(place[:-1] for place in numbers) for rank, numbers in by_rank.items()}
    for axis, n in mesh.axes.items():
        for first, coord in coords.items():
            if coord[axis] or n == 1:
                continue
            group = [rank for rank, c in coords.items() if {**c, axis: 0} == coord]
            for place, numbers in by_rank[first].items():
                op, site, *_, invariant, _ = place
                # Ranks that ran a line a different number of times cannot be matched run by run.
                if axis not in invariant or len({runs[rank][place[:-1]] for rank in group}) > 1:
                    continue
                values = [by_rank[rank][place] for rank in group]
                if any(repr(value) != repr(numbers) for value in values):
                    rows = [(f"{axis}={coords[rank][axis]}", by_rank[rank][place]) for rank in group]
                    raise messages.number_differs(op, site, axis, rows)


_FREE_TYPE = Type()
_MOVES = ("ppermute", "all_to_all", "all_to_all_rows")
_LINEAR = ("add", "sub", "stack", "cat")  # of parts of sums they are a part of a sum


def _is_copied(history: History, axis: str) -> bool:
    """Return whether a value that varies over an axis is the same on each rank of it."""
    return axis in history.copies or any(g.axis == axis for g in history.gathers)


def _full_axes(x: Tensor, info: TensorInfo, spec: P) -> tuple[str, ...]:
    """Return the axes by which a spec splits a result that was computed from part of the gradient of a gathered leaf.

    Each rank may have one row: its gradient.
    """
    parts = [names for names, size in zip(spec.parts(x.ndim), x.shape, strict=True) if size > 1]
    return tuple(sorted(a for names in parts for a in names if (a, "all_gather") in info.history.parted))


def _is_draw(op: Operation, o: Operand, axis: str) -> bool:
    """Return whether an operand is a random draw that an operation applies to the elements of the others."""
    # A drawn integer used as an index (a sampled token) may pick from any operand, and a matrix may be random.
    applies = (differentiable_dtype(o.tensor) or o.tensor.dtype == torch.bool) and op.name != "matmul"
    return axis in o.info.type.drawn and (applies or op.pointwise)
