"""The checker of varying axes: it types every tensor of a region, and raises where a program mixes types.

The checker is a dispatch mode below torch.func, so it sees plain tensors: forward, backward and optimizer. It changes
no result. Over each axis of more than one rank a tensor is one of

    V   varying: each rank has its own value
    I   invariant: one logical value, the same on every rank of the axis
    -   free: made in the region from nothing (zeros, arange), or from Python numbers; mixes with either

The result of an operation is V if any operand is, else I if any operand is. Where one operand is I and another V, the
gradient of the first needs a sum over ranks, which only `pvary` takes: without `pvary` that is an error. Operands
without a gradient, such as integers, bools and values cast from them, mix with either. Random draws do not: a mask must
vary over exactly the axes of the tensor that it is applied to.

Source: the per-axis types are those of JAX's shard_map (varying manual axes).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard import _callsite
from fshard._ops import differentiable_dtype
from fshard._torch_compat import TorchDispatchMode, unwrapped
from fshard.errors import ShardingError
from fshard.mesh import Mesh
from fshard.spec import P

from . import messages
from .op_schema import Operation, operation
from .type_table import TypeTable
from .types import NONE, IndexMix, Operand, TensorInfo, Type, join


class Checker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The types of one rank's tensors during one call. `axes` are those of more than one rank."""

    supports_higher_order_operators = True

    def __init__(self, axes: Sequence[str], sizes: Mapping[str, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.axes, self.sizes = frozenset(axes), sizes
        self.arguments: list[TensorInfo] = []
        self.index_mixes: list[IndexMix] = []
        self._table = TypeTable()
        self._roots = 0
        self._paused = False
        # (operation, line, axes of the invariant result, run) -> its Python numbers. Runs are counted for each set of
        # axes: where a leaf is split unevenly, ranks may run a line a different number of times for results that vary.
        self.numbers: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._runs: Counter[tuple[Any, ...]] = Counter()

    # --- types of tensors that no operation made ---

    def info(self, x: Tensor) -> TensorInfo:
        """Return the type and origin of a tensor."""
        return self._table.get(x)

    def _set_info(
        self, x: Tensor, type: Type, *, name: str | None = None, op: str = "", site: _callsite.Site | None = None,
        alias: bool = False,
    ) -> None:  # fmt: skip
        """Type a tensor as a new root; an `alias` shares memory with a tensor of another type."""
        self._roots += 1
        x, site = unwrapped(x), None if name else site or _callsite.site()
        info = TensorInfo(type, self._roots, name, op, site, int(x.storage_offset()))
        self._table.set(x, info, alias=alias)

    def set_argument_type(self, x: Tensor, varying: frozenset[str], name: str) -> None:
        """Type an argument of the region, which varies over the axes that its spec names."""
        self._set_info(x, Type(varying & self.axes, self.axes - varying, differentiable_dtype(x)), name=name)
        self.arguments.append(self.info(x))

    def set_integer_type(self, x: Tensor, op: str, *, of: Sequence[Any] = (), varies: Sequence[str] = ()) -> None:
        """Type an integer computed outside of torch, from the tensors `of`, or from the rank's index on some axes."""
        operands = [self.info(t).type for t in of if isinstance(t, Tensor)]
        self._set_info(x, join([Type(frozenset(varies) & self.axes), *operands], x), op=op)

    def set_draw_type(self, x: Tensor, op: str, key: Tensor, spec_axes: Sequence[str]) -> None:
        """Type a random draw, which varies over the axes of its spec and those of its key."""
        varying = (frozenset(spec_axes) & self.axes) | self.info(key).type.varying
        self._set_info(x, Type(varying, self.axes - varying, random=True), op=op)

    def record_number(self, verb: str, number: Any, axes: Sequence[str]) -> None:
        """Record a Python number that a collective takes as the same on every rank of these axes."""
        self._record_numbers(verb, (number,), frozenset(axes) & self.axes)

    def mark_constant(self, x: Tensor) -> None:
        """Let a tensor that is no longer differentiated mix with every type."""
        info = self.info(x)
        self._table.set(unwrapped(x), info._replace(type=Type(info.type.varying)), alias=True)

    def group_by_type(self, xs: Sequence[Tensor]) -> list[list[int]]:
        """Return the positions of tensors, those of one type together."""
        groups: dict[Type, list[int]] = {}
        for i, x in enumerate(xs):
            groups.setdefault(self.info(x).type, []).append(i)
        return list(groups.values())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore operations: the caller types their result as a whole."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # --- collectives ---

    def run_collective(
        self, m: Any, xs: Sequence[Tensor], run: Callable[[Any], Sequence[Tensor]]
    ) -> tuple[Tensor, ...]:
        """Run a linear map, after a check of its operands' types, and type its results."""
        axes = frozenset(m.axes)
        infos = [self.info(x) for x in xs]
        for x, info in zip(xs, infos, strict=True):
            wrong = info.type.invariant & axes if m.takes == "V" else info.type.varying & axes
            if wrong:
                raise messages.collective_of_wrong_type(self, m, Operand(x, info), sorted(wrong))
            if m.takes == "I" and info.type.differentiable:  # the ranks may have picked different parts by a number
                self._record_numbers(m.verb, (x.storage_offset() - info.start,), info.type.invariant)
        with self.paused():
            out = tuple(run(xs))
        op = m.verb if m.origin is None else f"{m.verb}, the transpose of the {m.transpose.verb}"
        for y, info in zip(out, infos, strict=True):
            t = info.type
            varying = t.varying | axes if m.gives == "V" else t.varying - axes
            invariant = t.invariant - axes if m.gives == "V" else t.invariant | axes
            new = t._replace(varying=varying, invariant=invariant, random=False)
            self._set_info(y, new, op=op, site=m.origin, alias=not m.moves)
        return out

    # --- operations ---

    def _dispatch(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        run = _run_without_dynamo() if "torch._dynamo" in sys.modules else Checker._run
        return run(self, func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._paused or func.namespace == "prim":
            return func(*args, **kwargs)
        if func.namespace == "higher_order":
            return self._run_higher_order(func, args, kwargs)
        op = operation(func)
        if op.on_lists:
            return self._run_on_lists(op, args, kwargs)
        operands = [Operand(x, self.info(x)) for x in op.read(args, kwargs)]
        if op.uses_torch_generator is not None and op.uses_torch_generator(args, kwargs):
            raise messages.draw_from_torch_generator(op.name)
        new = self._result_type(op, operands)
        written = [(x, self.info(x).type) for x in op.written(args, kwargs)]
        out = func(*args, **kwargs)
        invariant_part = join([new, *(old for _, old in written)]) if written else new
        self._record_numbers_of_call(op, invariant_part, args, kwargs)
        for x, old in written:
            self._table.write(x, old, new, overwrites=op.overwrites)
        self._set_result_info(op, new, operands, out, {id(x) for x, _ in written})
        return out

    def _run_higher_order(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that takes functions (torch.cond, flex_attention), typed by its operands alone."""
        op = Operation(func, str(func))
        operands = [Operand(x, self.info(x)) for x in op.read(args, kwargs)]
        new = self._result_type(op, operands)
        with self.paused():
            out = func(*args, **kwargs)
        self._set_result_info(op, new, operands, out, set())
        return out

    def _run_on_lists(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on lists: a tensor mixes only with those at its position in the other lists."""
        rows = []
        for row in op.rows(args, kwargs):
            read = row[op.lists_written :] if op.overwrites else row
            rows.append((row, self._result_type(op, [Operand(x, self.info(x)) for x in read])))
        out = op.func(*args, **kwargs)
        self._record_numbers_of_call(op, join([new for _, new in rows]), args, kwargs)
        for i, (row, new) in enumerate(rows):
            for x in row[: op.lists_written]:
                self._table.write(x, self.info(x).type, new, overwrites=op.overwrites)
            if isinstance(out, (list, tuple)) and i < len(out):
                self._set_result_info(op, new, [], out[i], set())
        return out

    def _result_type(self, op: Operation, operands: Sequence[Operand]) -> Type:
        """Return the type of an operation's results; raise where an invariant operand mixes with a varying one."""
        if op.constant:
            return Type()
        types = [o.info.type for o in operands]
        for axis in sorted(NONE.union(*(t.varying for t in types))):
            invariant = [o for o in operands if axis in o.info.type.invariant and _is_strict(op, o)]
            if not invariant:
                continue
            varying = [o for o in operands if axis in o.info.type.varying]
            strict = [o for o in varying if differentiable_dtype(o.tensor) or _is_strict(op, o)]
            if strict:
                raise messages.invariant_mixed_with_varying(self, op.name, axis, invariant[0], strict[0], operands)
            if site := _callsite.site():
                self.index_mixes.append(IndexMix(axis, op.name, site, invariant[0].info, varying[0].info))
        return join(types)

    def _set_result_info(
        self, op: Operation, new: Type, operands: Sequence[Operand], out: Any, written: set[int]
    ) -> None:
        if isinstance(out, (list, tuple)):
            for x in out:
                self._set_result_info(op, new, operands, x, written)
        if not isinstance(out, Tensor) or id(out) in written:
            return
        differentiable = new.differentiable and differentiable_dtype(out)
        # A value computed from a draw stays random until it has a gradient; an integer is a number like any other.
        random = new.random and not differentiable and (differentiable_dtype(out) or out.dtype == torch.bool)
        type = new._replace(differentiable=differentiable, random=random)
        if op.view and operands:
            info = operands[0].info._replace(type=type)
            if op.copies:
                info = info._replace(start=int(out.storage_offset()))
            self._table.set(out, info, alias=True)
        else:
            self._set_info(out, type, op=op.name)

    def _record_numbers_of_call(self, op: Operation, new: Type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the Python numbers of an invariant result: they must be the same on every rank."""
        if new.invariant and new.differentiable:
            numbers = op.numbers(args, kwargs)
            if numbers:
                self._record_numbers(op.name, numbers, new.invariant)

    def _record_numbers(self, op: str, numbers: tuple[Any, ...], invariant: frozenset[str]) -> None:
        place = (op, _callsite.site(), tuple(sorted(invariant)))
        self._runs[place] += 1
        self.numbers[*place, self._runs[place]] = numbers

    def numbers_to_compare(self) -> dict[Any, Any]:
        """Return the recorded numbers as plain data that can be sent to other processes."""
        return {
            (op, str(site), site.lasti if site else 0, invariant, run): numbers
            for (op, site, invariant, run), numbers in self.numbers.items()
        }

    def digest(self) -> str:
        """Return a hash of the recorded numbers."""
        return hashlib.blake2b(repr(sorted(self.numbers_to_compare().items(), key=repr)).encode()).hexdigest()

    # --- losses, gradients, results ---

    def check_loss(self, name: str, x: Tensor, leaves: Sequence[Tensor]) -> None:
        """Raise if a loss varies over an axis over which a parameter is invariant."""
        loss = Operand(unwrapped(x), self.info(x))
        for leaf in leaves:
            parameter = Operand(unwrapped(leaf), self.info(leaf))
            axes = loss.info.type.varying & parameter.info.type.invariant
            if axes:
                raise messages.loss_varies(self, name, loss, parameter, sorted(axes))

    def check_gradient(self, name: str, x: Tensor, grad: Tensor) -> None:
        """Raise unless a gradient varies over exactly the axes of its parameter; then give it the parameter's type."""
        parameter, gradient = Operand(unwrapped(x), self.info(x)), Operand(unwrapped(grad), self.info(grad))
        want, have = parameter.info.type, gradient.info.type
        wrong = (have.varying & want.invariant) | (have.invariant & want.varying)
        if wrong:
            raise messages.gradient_has_wrong_type(self, name, parameter, gradient, sorted(wrong))
        self._table.set(gradient.tensor, gradient.info._replace(type=want), alias=True)

    def result_errors(self, name: str, rows: Sequence[tuple[str, Tensor, P]]) -> list[ShardingError]:
        """Return the errors of results, each with its path, that do not fit their specs: one for each line and axes."""
        groups: dict[Any, list[tuple[str, Operand, P]]] = {}
        for path, x, spec in rows:
            info, axes = self.info(x), set(spec.axes)
            extra, missing = tuple(sorted(info.type.varying - axes)), tuple(sorted(info.type.invariant & axes))
            if extra or missing:
                key = (info.site, extra, () if extra else missing)
                groups.setdefault(key, []).append((path, Operand(unwrapped(x), info), spec))
        return [messages.results_have_wrong_type(self, name, group, *key[1:]) for key, group in groups.items()]


# A __torch_dispatch__ in the class body would be wrapped by torch: the first operation would import dynamo for seconds.
Checker.__torch_dispatch__ = Checker._dispatch  # type: ignore[assignment,method-assign]


@functools.cache
def _run_without_dynamo() -> Callable[..., Any]:
    return torch.compiler.disable(Checker._run)  # type: ignore[no-any-return,no-untyped-call]


def same_numbers(mesh: Mesh, checkers: Sequence[Checker]) -> None:
    """Raise where a Python number that an invariant value was computed from differs between ranks of its axes.

    `checkers` are those of this process's ranks; on a process mesh the numbers are gathered.
    """
    by_rank: list[Any] = [c.numbers for c in checkers]
    if mesh.kind == "process":
        by_rank = mesh.gather_objects(checkers[0].numbers_to_compare())
    coords = [mesh.coords(rank) for rank in range(mesh.size)]
    runs = [Counter(place[:-1] for place in numbers) for numbers in by_rank]
    for axis, n in mesh.axes.items():
        for first, coord in enumerate(coords):
            if coord[axis] or n == 1:
                continue
            group = [rank for rank, c in enumerate(coords) if {**c, axis: 0} == coord]
            for place, numbers in by_rank[first].items():
                op, site, *_, invariant, _ = place
                # Ranks that ran a line a different number of times cannot be matched run by run.
                if axis not in invariant or len({runs[rank][place[:-1]] for rank in group}) > 1:
                    continue
                values = [by_rank[rank][place] for rank in group]
                if any(repr(value) != repr(numbers) for value in values):
                    rows = [(f"{axis}={i}", value) for i, value in enumerate(values)]
                    raise messages.number_differs(op, site, axis, rows)


def _is_strict(op: Operation, o: Operand) -> bool:
    """Return whether an operand must not mix with another type here: it has a gradient, or is a random draw."""
    t = o.info.type
    if not t.random:
        return t.differentiable and not op.compares
    # A drawn integer used as an index (a sampled token) may pick from any operand.
    return differentiable_dtype(o.tensor) or o.tensor.dtype == torch.bool or op.pointwise
