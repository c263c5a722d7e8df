"""The varying-axes checker: what each tensor of a region varies over, followed through every operation.

It is a dispatch mode below torch.func, so it sees plain tensors: forward, backward, optimizer. It only looks: on or
off, results are the same. Over each axis of more than one rank a tensor is one of

    V   varying: each rank has a value of its own
    I   invariant: one logical value, the same on every rank of the axis
    -   free: made here from nothing (zeros, arange), or from Python numbers; it goes with either

and so is what an operation makes of it: V if any operand is, else I if any is. Where one operand is I and another V,
the gradient of the first needs a sum over ranks, which only `pvary` takes; without it that is an error. Operands that
have no gradient, integers and bools and what is cast from them, go with either too; but not what is drawn: a mask must
vary over just what it is applied to.

Source: the per-axis types are those of JAX's shard_map (varying manual axes).
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard import _callsite
from fshard._ops import differentiable_dtype
from fshard._torch_compat import FakeTensor, HigherOrderOperator, TorchDispatchMode, disable_dynamo, unwrapped
from fshard.errors import ShardingError
from fshard.mesh import Mesh
from fshard.spec import P

from . import blame, verdicts
from .op_schema import Operation, opaque, operation
from .type_table import Ledger
from .types import NONE, Fact, IndexMix, Operand, Type, join

_DEVICE = torch.ops.prim.device.default


class Checker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The types of one rank's tensors during one call. `axes` are those of more than one rank."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the first operation of a program would import it, which takes seconds

    def __init__(self, axes: Sequence[str], sizes: Mapping[str, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.axes, self.sizes = frozenset(axes), sizes
        self._ledger = Ledger()
        self._roots = 0
        self._off = False
        self.arguments: list[Fact] = []
        self.met: list[IndexMix] = []  # where integers that vary picked from what is invariant
        # (operation, place, which time) -> the Python numbers it had, over which axes its result is fixed, where
        self.numbers: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._counts: dict[tuple[Any, ...], int] = {}

    # --- types in and out ---

    def fact(self, x: Tensor) -> Fact:
        """What is known of a tensor."""
        return self._ledger.fact(x)

    def give(
        self, x: Tensor, type: Type, *, name: str | None = None, op: str = "", site: _callsite.Site | None = None,
        alias: bool = False,
    ) -> None:  # fmt: skip
        """Type a tensor that no operation made; as an `alias` it shares memory with one of another type."""
        x, self._roots = unwrapped(x), self._roots + 1
        site = None if name else site or _callsite.site()
        fact = Fact(type, self._roots, name, op, site, int(x.storage_offset()))
        self._ledger.set(x, fact, alias=alias)

    def argument(self, x: Tensor, varies: frozenset[str], name: str) -> None:
        """Type an argument of the region, which its spec says to vary over these axes."""
        self.give(x, Type(varies & self.axes, self.axes - varies, differentiable_dtype(x)), name=name)
        self.arguments.append(self.fact(x))

    def made(self, x: Tensor, op: str, *, of: Sequence[Any] = (), varies: Sequence[str] = ()) -> None:
        """Type an integer made outside torch's sight, from these tensors or of this rank's place on these axes."""
        known = [self.fact(t).type for t in of if isinstance(t, Tensor)]
        self.give(x, join([Type(frozenset(varies) & self.axes), *known], x), op=op)

    def draw(self, x: Tensor, op: str, key: Tensor, spec_axes: Sequence[str]) -> None:
        """Type a random draw: it varies over the axes of its spec, and over those of its key."""
        varies = (frozenset(spec_axes) & self.axes) | self.fact(key).type.varies
        self.give(x, Type(varies, self.axes - varies, drawn=True), op=op)

    def constant(self, x: Tensor) -> None:
        """Let a tensor that is no longer differentiated go with everything."""
        known = self.fact(x)
        self._ledger.set(unwrapped(x), known._replace(type=Type(known.type.varies)), alias=True)

    def alike(self, xs: Sequence[Tensor]) -> list[list[int]]:
        """The positions of tensors of one type, together."""
        groups: dict[Type, list[int]] = {}
        for i, x in enumerate(xs):
            groups.setdefault(self.fact(x).type, []).append(i)
        return list(groups.values())

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Look away: what happens here is typed as a whole, by who calls this."""
        before, self._off = self._off, True
        try:
            yield
        finally:
            self._off = before

    # --- collectives ---

    def collective(self, m: Any, xs: Sequence[Tensor], run: Callable[[Any], Sequence[Tensor]]) -> tuple[Tensor, ...]:
        """Run a map of `linear`, by the types it takes and gives over its axes."""
        axes = frozenset(m.axes)
        facts = [self.fact(x) for x in xs]
        for x, fact in zip(xs, facts, strict=True):
            wrong = fact.type.fixed & axes if m.takes == "V" else fact.type.varies & axes
            if wrong:
                raise blame.taken(self, m, Operand(x, fact), sorted(wrong))
            if m.takes == "I" and fact.type.smooth:  # not another piece of it on each rank, picked by a Python number
                self._keep(m.verb, (x.storage_offset() - fact.start,), fact.type.fixed)
        with self.resting():
            out = tuple(run(xs))
        for y, fact in zip(out, facts, strict=True):
            t = fact.type
            varies = t.varies | axes if m.gives == "V" else t.varies - axes
            fixed = t.fixed - axes if m.gives == "V" else t.fixed | axes
            made = m.verb if m.origin is None else f"{m.verb}, the transpose of the {m.transpose.verb} there,"
            self.give(y, t._replace(varies=varies, fixed=fixed, drawn=False), op=made, site=m.origin, alias=not m.moves)
        return out

    # --- operations ---

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        see = _unseen if "torch._dynamo" in sys.modules else Checker._see
        return see(self, func, args, kwargs or {})

    def _see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # half of all that fake tensors ask for
            return args[0].fake_device
        if self._off or func.namespace == "prim":
            return func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):  # torch.cond, flex_attention: typed as a whole
            return self._whole(func, args, kwargs)
        op = operation(func)
        if op.rows:
            return self._rows(op, args, kwargs)
        read = op.read(args, kwargs)
        operands = [Operand(x, self.fact(x)) for x in read]
        if op.generator is not None and op.generator(args, kwargs):
            raise blame.torch_generator(op.words)
        kind = self._meet(op, operands)
        before = [(x, self.fact(x).type) for x in op.written(args, kwargs)]
        out = func(*args, **kwargs)
        self._note_numbers(op, join([kind, *(old for _, old in before)]) if before else kind, args, kwargs)
        for x, old in before:
            self._ledger.write(x, old, kind, over=op.overwrites)
        self._give(op, kind, operands, out, {id(x) for x, _ in before})
        return out

    def _whole(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op = opaque(func)
        operands = [Operand(x, self.fact(x)) for x in op.read(args, kwargs)]
        kind = self._meet(op, operands)
        with self.resting():
            out = func(*args, **kwargs)
        self._give(op, kind, operands, out, set())
        return out

    def _meet(self, op: Operation, operands: Sequence[Operand]) -> Type:
        """The type of what comes of these operands; an error where one is invariant over what another varies over."""
        if op.constant:
            return Type()
        kinds = [o.fact.type for o in operands]
        for axis in sorted(NONE.union(*(t.varies for t in kinds))):
            still = [o for o in operands if axis in o.fact.type.fixed and _matters(op, o)]
            moving = [o for o in operands if axis in o.fact.type.varies]
            if not still:
                continue
            strict = [o for o in moving if differentiable_dtype(o.tensor) or _matters(op, o)]
            if strict:
                raise blame.mixed(self, op.words, axis, still[0], strict[0], operands)
            self.met.append(IndexMix(axis, op.words, _callsite.site(), still[0].fact, moving[0].fact))
        return join(kinds)

    def _give(self, op: Operation, kind: Type, operands: Sequence[Operand], out: Any, written: set[int]) -> None:
        if isinstance(out, Tensor):
            if id(out) in written:
                return
            smooth = kind.smooth and differentiable_dtype(out)
            # A draw is one until it is in what has a gradient; an integer made of it is a number like others.
            drawn = kind.drawn and not smooth and (differentiable_dtype(out) or out.dtype == torch.bool)
            t = kind._replace(smooth=smooth, drawn=drawn)
            first = operands[0].fact if operands and op.view else None
            if first is not None:
                if op.copies:
                    first = first._replace(start=int(out.storage_offset()))
                self._ledger.set(out, first._replace(type=t), alias=True)
            else:
                self._roots += 1
                self._ledger.set(out, Fact(t, self._roots, None, op.words, _callsite.site(), int(out.storage_offset())))
        elif isinstance(out, (list, tuple)):
            for x in out:
                self._give(op, kind, operands, x, written)

    def _rows(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation on lists: each tensor meets only those at its place in the other lists."""
        kinds = []
        for row in op.rows_of(args, kwargs):
            read = row[op.rows_written :] if op.overwrites else row
            kinds.append((row, self._meet(op, [Operand(x, self.fact(x)) for x in read])))
        out = op.func(*args, **kwargs)
        self._note_numbers(op, join([kind for _, kind in kinds]), args, kwargs)
        for i, (row, kind) in enumerate(kinds):
            for x in row[: op.rows_written]:
                self._ledger.write(x, self.fact(x).type, kind, over=op.overwrites)
            if isinstance(out, (list, tuple)) and i < len(out):
                self._give(op, kind, [], out[i], set())
        return out

    def _note_numbers(self, op: Operation, kind: Type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the Python numbers that go into what is invariant: they must be the same on every rank."""
        if kind.fixed and kind.smooth:
            numbers = op.numbers(args, kwargs)
            if numbers:
                self._keep(op.words, numbers, kind.fixed)

    def _keep(self, what: str, numbers: tuple[Any, ...], fixed: frozenset[str]) -> None:
        where = _callsite.site()
        self._counts[what, where] = count = self._counts.get((what, where), 0) + 1
        self.numbers[what, where, count] = (numbers, fixed, where)

    def numbers_to_compare(self) -> dict[Any, Any]:
        """The numbers, in a form that travels."""
        return {
            (op, str(where), where.lasti if where else 0, count): (given, sorted(fixed), str(where))
            for (op, where, count), (given, fixed, _) in self.numbers.items()
        }

    def digest(self) -> str:
        """The same on two ranks whose numbers are."""
        return hashlib.blake2b(repr(sorted(self.numbers_to_compare().items(), key=repr)).encode()).hexdigest()

    # --- what the library asks ---

    def loss(self, name: str, x: Tensor, leaves: Sequence[Tensor]) -> None:
        """Raise where ranks have losses of their own, of parameters which they share."""
        fact = self.fact(x)
        for leaf in leaves:
            own = self.fact(leaf)
            axes = fact.type.varies & own.type.fixed
            if axes:
                raise verdicts.loss_varies(
                    self, name, Operand(unwrapped(x), fact), Operand(unwrapped(leaf), own), sorted(axes)
                )

    def gradient(self, name: str, x: Tensor, grad: Tensor) -> None:
        """Raise unless a gradient varies over just what its parameter varies over; then it has its type."""
        own, found = self.fact(x), self.fact(grad)
        wrong = (found.type.varies & own.type.fixed) | (found.type.fixed & own.type.varies)
        if wrong:
            pair = Operand(unwrapped(x), own), Operand(unwrapped(grad), found)
            raise verdicts.gradient_varies(self, name, *pair, sorted(wrong))
        self._ledger.set(unwrapped(grad), found._replace(type=own.type), alias=True)

    def results(self, name: str, rows: Sequence[tuple[str, Tensor, P]]) -> list[ShardingError]:
        """The errors of results, each with its path, that do not fit their specs: one for each line and axes."""
        groups: dict[Any, list[tuple[str, Operand, P]]] = {}
        for path, x, spec in rows:
            fact, axes = self.fact(x), set(spec.axes)
            extra, missing = tuple(sorted(fact.type.varies - axes)), tuple(sorted(fact.type.fixed & axes))
            if extra or missing:
                key = (fact.site, extra, () if extra else missing)
                groups.setdefault(key, []).append((path, Operand(unwrapped(x), fact), spec))
        return [verdicts.results(self, name, found, *key[1:]) for key, found in groups.items()]


def same_numbers(mesh: Mesh, checkers: Sequence[Checker]) -> None:
    """Raise where a Python number went into an invariant value, and differs between ranks over which it is that.

    `checkers` are those of this process's ranks; processes, whose digests were seen to differ, tell each other.
    """
    everyone: list[Any] = [c.numbers for c in checkers]
    if mesh.kind == "process":
        everyone = mesh.gather_objects(checkers[0].numbers_to_compare())
    coords = [mesh.coords(rank) for rank in range(mesh.size)]
    often = [Counter(place[:-1] for place in numbers) for numbers in everyone]
    for axis, n in mesh.axes.items():
        for rank, at in enumerate(coords):
            if at[axis] or n == 1:
                continue
            line = [r for r, c in enumerate(coords) if {**c, axis: 0} == at]
            for place, (given, fixed, where) in everyone[rank].items():
                if axis not in fixed or len({often[r][place[:-1]] for r in line}) > 1:  # which is which, nobody knows
                    continue
                others = [everyone[r].get(place, (given,))[0] for r in line]
                if any(repr(other) != repr(given) for other in others):
                    told = [(f"{axis}={i}", other) for i, other in enumerate(others)]
                    raise verdicts.number_differs(place[0], where, axis, told)


def _matters(op: Operation, o: Operand) -> bool:
    """Whether it matters to an operation that this operand is invariant: it has a gradient there, or is a draw."""
    t = o.fact.type
    if not t.drawn:
        return t.smooth and not op.compares
    # A drawn integer that is an index, a sampled token, picks from whatever there is.
    return differentiable_dtype(o.tensor) or o.tensor.dtype == torch.bool or op.pointwise


_unseen = disable_dynamo(Checker._see)


__all__ = ["Checker", "same_numbers"]
