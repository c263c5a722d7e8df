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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from . import blame, comm, source, verdicts
from .errors import ShardingError
from .facts import FREE, NONE, Fact, Meeting, Operand, Type, base
from .mesh import Mesh
from .operations import Operation, operation
from .spec import P

_DEVICE = torch.ops.prim.device.default


class Checker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The types of one rank's tensors during one call. `axes` are those of more than one rank."""

    def __init__(self, axes: Sequence[str], sizes: Mapping[str, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.axes, self.sizes = frozenset(axes), sizes
        self._facts: Any = WeakTensorKeyDictionary()
        self._written: dict[int, tuple[StorageWeakRef, Type]] = {}  # what in-place writes brought to whole storages
        self._roots = 0
        self._off = False
        self.arguments: list[Fact] = []
        self.met: list[Meeting] = []  # where integers that vary picked from what is invariant
        # (operation, place, which time) -> the Python numbers it had, over which axes its result is fixed, where
        self.numbers: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._counts: dict[tuple[Any, ...], int] = {}

    # --- types in and out ---

    def fact(self, x: Tensor) -> Fact:
        x = base(x)
        found: Fact = self._facts.get(x, FREE)
        if self._written:
            held = self._written.get(comm.storage_of(x))
            if held is not None and not held[0].expired():  # type: ignore[no-untyped-call]
                found = found._replace(type=_join([found.type, held[1]], x))
        return found

    def give(
        self, x: Tensor, type: Type, *, name: str | None = None, op: str = "", site: source.Site | None = None
    ) -> None:
        """Type a tensor that is no view of another."""
        x, self._roots = base(x), self._roots + 1
        site = None if name else site or source.site()
        self._facts[x] = Fact(type, self._roots, name, op, site, int(x.storage_offset()))

    def argument(self, x: Tensor, varies: frozenset[str], name: str) -> None:
        """Type an argument of the region, which its spec says to vary over these axes."""
        self.give(x, Type(varies & self.axes, self.axes - varies, _floating(x)), name=name)
        self.arguments.append(self._facts[x])

    def made(self, x: Tensor, op: str, *, of: Sequence[Any] = (), varies: Sequence[str] = ()) -> None:
        """Type an integer made outside torch's sight, from these tensors or of this rank's place on these axes."""
        known = [self.fact(t).type for t in of if isinstance(t, Tensor)]
        self.give(x, _join([Type(frozenset(varies) & self.axes), *known], x), op=op)

    def draw(self, x: Tensor, op: str, key: Tensor, spec_axes: Sequence[str]) -> None:
        """Type a random draw: it varies over the axes of its spec, and over those of its key."""
        varies = (frozenset(spec_axes) & self.axes) | self.fact(key).type.varies
        self.give(x, Type(varies, self.axes - varies, drawn=True), op=op)

    def constant(self, x: Tensor) -> None:
        """Let a tensor that is no longer differentiated go with everything."""
        known = self.fact(x)
        self._facts[base(x)] = known._replace(type=Type(known.type.varies))

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
                self._keep(m.verb, (*x.shape, x.storage_offset() - fact.start), fact.type.fixed)
        with self.resting():
            out = tuple(run(xs))
        for y, fact in zip(out, facts, strict=True):
            t = fact.type
            varies = t.varies | axes if m.gives == "V" else t.varies - axes
            fixed = t.fixed - axes if m.gives == "V" else t.fixed | axes
            made = m.verb if m.origin is None else f"{m.verb}, the transpose of the {m.transpose.verb} there,"
            self.give(y, t._replace(varies=varies, fixed=fixed, drawn=False), op=made, site=m.origin)
        return out

    # --- operations ---

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # half of all that fake tensors ask for
            return args[0].fake_device
        if self._off or func.namespace == "prim":
            return func(*args, **kwargs)
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
        self._note_numbers(op, kind, args, kwargs)
        for x, old in before:
            self._write(op, x, old, kind)
        self._give(op, kind, operands, out, {id(x) for x, _ in before})
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
            strict = [o for o in moving if _floating(o.tensor) or _matters(op, o)]
            if strict:
                raise blame.mixed(self, op.words, axis, still[0], strict[0], operands)
            self.met.append(Meeting(axis, op.words, source.site(), still[0].fact, moving[0].fact))
        return _join(kinds)

    def _give(self, op: Operation, kind: Type, operands: Sequence[Operand], out: Any, written: set[int]) -> None:
        if isinstance(out, Tensor):
            if id(out) in written:
                return
            t = kind if _floating(out) or kind.drawn else kind._replace(smooth=False)
            first = operands[0].fact if operands and op.view else None
            if first is not None:
                self._facts[out] = first._replace(type=t)
            else:
                self._roots += 1
                self._facts[out] = Fact(t, self._roots, None, op.words, source.site(), int(out.storage_offset()))
        elif isinstance(out, (list, tuple)):
            for x in out:
                self._give(op, kind, operands, x, written)

    def _write(self, op: Operation, x: Tensor, old: Type, new: Type) -> None:
        """An in-place operation: the tensor and all that share its storage are what was written."""
        storage = x.untyped_storage()
        whole = op.overwrites and x.numel() * x.element_size() == storage.nbytes()
        kind = new if whole else _join([old, new], x)
        self._facts[x] = self.fact(x)._replace(type=kind)
        if whole:
            self._written.pop(storage._cdata, None)
        if kind != old:
            _, held = self._written.get(storage._cdata, (None, Type()))
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._written[storage._cdata] = reference, _join([held, kind], x)

    def _rows(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation on lists: each tensor meets only those at its place in the other lists."""
        kinds = []
        for row in op.rows_of(args, kwargs):
            operands = [Operand(x, self.fact(x)) for x in row]
            kinds.append((row, self._meet(op, operands)))
        out = op.func(*args, **kwargs)
        for i, (row, kind) in enumerate(kinds):
            for x in row[: op.rows_written]:
                self._write(op, x, self.fact(x).type, kind)
            if isinstance(out, (list, tuple)) and i < len(out):
                self._give(op, kind, [], out[i], set())
        return out

    def _note_numbers(self, op: Operation, kind: Type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the Python numbers that go into what is invariant: they must be the same on every rank."""
        if kind.fixed and kind.smooth:
            numbers = tuple(x for x in (*args, *kwargs.values()) if isinstance(x, (bool, int, float)))
            if numbers:
                self._keep(op.words, numbers, kind.fixed)

    def _keep(self, what: str, numbers: tuple[Any, ...], fixed: frozenset[str]) -> None:
        where = source.site()
        self._counts[what, where] = count = self._counts.get((what, where), 0) + 1
        self.numbers[what, where, count] = (numbers, fixed, where)

    # --- what the library asks ---

    def loss(self, name: str, x: Tensor, leaves: Sequence[Tensor]) -> None:
        """Raise where ranks have losses of their own, of parameters which they share."""
        fact = self.fact(x)
        for leaf in leaves:
            own = self.fact(leaf)
            axes = fact.type.varies & own.type.fixed
            if axes:
                raise verdicts.loss_varies(self, name, Operand(base(x), fact), Operand(base(leaf), own), sorted(axes))

    def gradient(self, name: str, x: Tensor, grad: Tensor) -> None:
        """Raise unless a gradient varies over just what its parameter varies over; then it has its type."""
        own, found = self.fact(x), self.fact(grad)
        wrong = (found.type.varies & own.type.fixed) | (found.type.fixed & own.type.varies)
        if wrong:
            pair = Operand(base(x), own), Operand(base(grad), found)
            raise verdicts.gradient_varies(self, name, *pair, sorted(wrong))
        self._facts[base(grad)] = found._replace(type=own.type)

    def results(self, name: str, rows: Sequence[tuple[str, Tensor, P]]) -> list[ShardingError]:
        """The errors of results, each with its path, that do not fit their specs: one for each line and axes."""
        groups: dict[Any, list[tuple[str, Operand, P]]] = {}
        for path, x, spec in rows:
            fact, axes = self.fact(x), set(spec.axes)
            extra, missing = tuple(sorted(fact.type.varies - axes)), tuple(sorted(fact.type.fixed & axes))
            if extra or missing:
                key = (fact.site, extra, () if extra else missing)
                groups.setdefault(key, []).append((path, Operand(base(x), fact), spec))
        return [verdicts.results(self, name, found, *key[1:]) for key, found in groups.items()]


def same_numbers(mesh: Mesh, checkers: Sequence[Checker]) -> None:
    """Raise where a Python number went into an invariant value, and differs between ranks over which it is that.

    `checkers` are those of this process's ranks; on a process mesh the ranks tell each other, once for all.
    """
    everyone: list[Any] = [c.numbers for c in checkers]
    if mesh.kind == "process":
        mine = {
            (op, str(where), where.lasti if where else 0, count): (given, sorted(fixed), str(where))
            for (op, where, count), (given, fixed, _) in everyone[0].items()
        }
        digests: list[Any] = [None] * mesh.size
        dist.all_gather_object(digests, hashlib.blake2b(repr(sorted(mine.items())).encode()).hexdigest())
        if len(set(digests)) == 1:
            return
        everyone = [None] * mesh.size
        dist.all_gather_object(everyone, mine)
    coords = [mesh.coords(rank) for rank in range(mesh.size)]
    for axis, n in mesh.axes.items():
        for rank, at in enumerate(coords):
            if at[axis] or n == 1:
                continue
            line = [r for r, c in enumerate(coords) if {**c, axis: 0} == at]
            for place, (given, fixed, where) in everyone[rank].items():
                others = [everyone[r].get(place, (given,))[0] for r in line]
                if axis in fixed and any(repr(other) != repr(given) for other in others):
                    told = [(f"{axis}={i}", other) for i, other in enumerate(others)]
                    raise verdicts.number_differs(place[0], where, axis, told)


def _join(kinds: Sequence[Type], like: Tensor | None = None) -> Type:
    """The type of what depends on these."""
    typed = [t for t in kinds if t.varies or t.fixed]
    varies = NONE.union(*(t.varies for t in typed))
    fixed = NONE.union(*(t.fixed for t in typed)) - varies
    smooth = any(t.smooth for t in typed) and (like is None or _floating(like))
    return Type(varies, fixed, smooth, bool(typed) and all(t.drawn for t in typed))


def _floating(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _matters(op: Operation, o: Operand) -> bool:
    """Whether it matters to an operation that this operand is invariant: it has a gradient there, or is a draw."""
    t = o.fact.type
    if not t.drawn:
        return t.smooth and not op.compares
    # A drawn integer that is an index, a sampled token, picks from whatever there is.
    return _floating(o.tensor) or o.tensor.dtype == torch.bool or op.pointwise


__all__ = ["Checker", "same_numbers"]
