"""Record what each operation of a program computes on each rank, forward and backward, and from which tensors."""

from __future__ import annotations

import functools
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage
from torch.utils.weak import WeakTensorKeyDictionary

from fshard import tree
from fshard._core.callsite import HERE, Site, is_users_frame
from fshard._core.operations import tensors_in
from fshard._core.region import region
from fshard._core.torch import (
    backward_number,
    next_number,
    unwrapped,
    without_functorch,
    without_modes,
    without_torch_function,
)
from fshard._core.typecheck import Checker, operation
from fshard.spec import P


@dataclass(frozen=True, eq=False)
class Place:
    """An operation of the program: one object for the ranks of all meshes, so that it is looked up fast."""

    lines: tuple[Site, ...]  # of the user's code that execute, the innermost first
    op: str
    is_backward: bool
    is_library: bool  # fshard runs it, not the user's line itself


_Lines = tuple[tuple[Any, int], ...]  # number of a code object, instruction; of an argument, its name, 0
Key = tuple[Place, int, int]  # place, occurrence, which result

_RECORDS = {__file__, *(sys.modules[c.__module__].__file__ for c in Checker.__mro__[:2])}  # files that run an operation

_COPIES = ("aten.clone.default", "aten.detach.default", "aten._to_copy.default")

COUNT, TOTAL, SIZE, SQUARES, SCALE, ORDER, DIMS = range(7)  # numbers of a tensor: the size twice, one for each dim


class Record(NamedTuple):
    """A tensor that an operation returned or wrote, on one rank."""

    shape: tuple[int, ...]
    numbers: tuple[float, ...]
    invariant: frozenset[str]
    eps: float  # of the lowest precision that it was computed in
    operands: tuple[Key, ...]
    is_float: bool
    is_index: bool  # integers computed from the rank's position, which differ in right programs
    moved: Key | None = None  # the operand of a collective: its result where no axis has more than one rank
    is_view: bool = False
    terms: frozenset[str] = frozenset()  # axes that the transpose of a pvary or of an all_gather sums over


class Recorder(Checker):  # type: ignore[no-untyped-call]
    """A checker that records what one rank computes.

    `places` are shared by all ranks; `start` is the code of the frame that calls the program.
    """

    def __init__(
        self, axes: Sequence[str], sizes: Mapping[str, int], places: dict[Any, Place], start: CodeType
    ) -> None:
        super().__init__(axes, sizes)
        self._places, self._codes = places, dict[int, CodeType]()
        self.records: dict[Key, Record] = {}
        self.runs: Counter[Place] = Counter()
        self.groups: dict[tuple[Place, int], list[Record]] = {}  # of all occurrences
        self.reads: list[tuple[int, Place, Key]] = []  # number of records before, line, and tensor of a number
        self.results: list[tuple[Key, ...]] = []
        self._start = start
        self._made: Any = WeakTensorKeyDictionary()
        self._written: WeakKeyDictionary[UntypedStorage, list[tuple[int, Key]]] = WeakKeyDictionary()
        self._lines_of_node: dict[int | None, _Lines] = {}
        self._next_node = next_number()

    def set_argument_type(self, x: Tensor, spec: P, name: str, *, placed: bool = False) -> None:
        super().set_argument_type(x, spec, name)
        self._add("argument", [x], [()], ((name, 0),))

    def set_integer_type(self, x: Tensor, op: str, *, of: Sequence[Any] = (), varies: Sequence[str] = ()) -> None:
        super().set_integer_type(x, op, of=of, varies=varies)
        self._add(op, [x], [self.makers(tensors_in(of))])

    def set_draw_type(self, x: Tensor, op: str, key: Tensor, *axes: Any, **more: Any) -> None:
        super().set_draw_type(x, op, key, *axes, **more)
        self._add(op, [x], [self.makers([key])])

    def run_collective(
        self, m: Any, xs: Sequence[Tensor], run: Callable[[Any], Sequence[Tensor]]
    ) -> tuple[Tensor, ...]:
        operands = [self.makers([x]) for x in xs]
        out = super().run_collective(m, xs, run)
        is_sum = m.verb in ("psum", "psum_scatter") and m.origin is not None
        terms = frozenset(m.axes) if is_sum else frozenset[str]()
        self._add(m.verb, out, operands, moves=m.verb != "ppermute", terms=terms)
        return out

    def run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._paused or func.namespace == "prim":
            return super().run_operation(func, args, kwargs)
        with without_torch_function():
            op = operation(func) if func.namespace != "higher_order" else None
            operands = self.makers(tensors_in(args, kwargs))
            out = super().run_operation(func, args, kwargs)
            returned, written = tensors_in(out), op.written(args, kwargs) if op else []
            if operands and not returned:
                self.reads.append((len(self.records), self._place("read", *self._lines()), operands[0]))
            made = list({id(x): x for x in [*returned, *written]}.values())
            is_view = op is not None and op.view and not written
            self._add(str(func), made, [operands] * len(made), written=written, is_view=is_view)
        return out

    def makers(self, xs: Sequence[Tensor]) -> tuple[Key, ...]:
        """Return the keys of what made tensors, and of later writes to their memory."""
        keys: list[Key] = []
        for x in map(unwrapped, xs):
            at, key = self._made.get(x, (-1, None))
            writes = self._written.get(x.untyped_storage(), []) if x.layout is torch.strided else []
            keys += [*([key] if key else []), *(k for when, k in writes if when > at)]
        return tuple(dict.fromkeys(keys))

    def is_argument(self, result: int) -> bool:
        """Return whether a result is an argument, or a copy of one."""
        keys = self.results[result]
        while len(keys) == 1 and (self.records[keys[0]].is_view or keys[0][0].op in _COPIES):
            keys = self.records[keys[0]].operands
        return len(keys) == 1 and keys[0][0].op == "argument"

    def _lines(self) -> tuple[_Lines, bool]:
        """Return the user's lines, and if fshard runs this. In a backward pass, the lines of what is differentiated."""
        frame: FrameType | None = sys._getframe(1)
        lines: _Lines = ()
        known, is_library = self._lines_of_node.get(backward_number()), False
        while frame is not None and frame.f_code is not self._start:
            if is_users_frame(frame):
                if known is not None:
                    break
                lines += ((id(frame.f_code), frame.f_lasti),)
                self._codes[id(frame.f_code)] = frame.f_code
            elif not lines:
                is_library |= frame.f_code.co_filename.startswith(HERE) and frame.f_code.co_filename not in _RECORDS
            frame = frame.f_back
        return lines if known is None else known, is_library

    def _place(self, op: str, lines: _Lines, is_library: bool) -> Place:
        known = lines, op, backward_number() is not None, is_library
        if known not in self._places:
            sites = tuple(Site(self._codes[code], at) for code, at in lines if code in self._codes)
            return self._places.setdefault(known, Place(sites, *known[1:]))
        return self._places[known]

    def _add(
        self, op: str, made: Sequence[Tensor], operands: Sequence[tuple[Key, ...]], lines: _Lines | None = None, *,
        written: Sequence[Tensor] = (), moves: bool = False, **facts: Any,
    ) -> None:  # fmt: skip
        lines, is_library = self._lines() if lines is None else (lines, True)
        for node in range(self._next_node, next_number()):  # one for each transform that differentiates
            self._lines_of_node[node] = lines
        self._next_node = next_number()
        place = self._place(op, lines, is_library)
        self.runs[place] += 1
        in_place = set(map(id, written))
        for j, (x, sources) in enumerate(zip(map(unwrapped, made), operands, strict=True)):
            key, earlier = (place, self.runs[place], j), [self.records[k] for k in sources]
            with self.paused(), without_functorch(), without_modes(), without_torch_function(), torch.no_grad():
                numbers = _numbers(x)
            is_float = x.is_floating_point() or x.is_complex()
            eps = torch.finfo(x.dtype).eps if is_float else 0.0
            is_index = x.dtype == torch.int64 and (op == "axis_index" or any(r.is_index for r in earlier))
            moved = sources[0] if moves and len(sources) == 1 else None
            record = Record(tuple(x.shape), numbers, self.info(x).type.invariant, max([eps, *(r.eps for r in earlier)]),
                            sources, is_float, is_index, moved, **facts)  # fmt: skip
            self.records[key] = record
            self.groups.setdefault((place, 0 if record.is_view else j), []).append(record)
            if id(x) in in_place and x.layout is torch.strided:
                self._written.setdefault(x.untyped_storage(), []).append((len(self.records), key))
            else:
                self._made[x] = len(self.records), key


def _numbers(x: Tensor) -> tuple[float, ...]:
    """Return sums over the elements: of ones, values, magnitudes, squares, magnitudes, and values by position."""
    if x.is_meta or x.layout is not torch.strided:
        return (x.numel(), *[0.0] * (5 + x.ndim))
    x = torch.view_as_real(x.resolve_conj()).sum(-1) if x.is_complex() else x
    x = torch.nan_to_num(x.detach().to(torch.float64), nan=math.nan, posinf=5.0, neginf=-3.0)
    size = float(x.abs().sum())
    others = [[i for i in range(x.ndim) if i != d] for d in range(x.ndim)]
    by_position = [x.flatten(), *(x.sum(dims) if dims else x for dims in others)]
    weighted = (float(v @ _weights(v)) for v in by_position)
    return (x.numel(), float(x.sum()), size, float(x.square().sum()), size, *weighted)


def _weights(x: Tensor) -> Tensor:
    """Return weights by position, between 0 and 1: the fractional parts of multiples of the golden ratio."""
    return torch.arange(1, len(x) + 1, dtype=x.dtype, device=x.device).mul_(0.5 * (math.sqrt(5) - 1)).frac_()


def recording_program(
    f: Callable[..., Any], sizes: Mapping[str, int], specs: Sequence[P], names: Sequence[str], places: dict[Any, Place]
) -> tuple[Callable[..., Any], list[Any]]:
    """Return a program that records what it computes, and the list of the ranks' recorders, which a run fills.

    `places` is one dict for all meshes.
    """
    recorders: list[Any] = [None] * math.prod(sizes.values())

    @functools.wraps(f)
    def run(*args: Any) -> Any:
        here, code = region(), sys._getframe().f_code
        here.checker = recorder = Recorder([a for a, n in sizes.items() if n > 1], sizes, places, code)
        recorders[here.rank] = recorder
        try:
            with recorder:
                for x, spec, name in zip(tree.leaves(args), specs, names, strict=True):
                    if isinstance(x, Tensor):
                        recorder.set_argument_type(x, spec, name)
                out = f(*args)
            recorder.results = [recorder.makers(tensors_in(x)) for x in tree.leaves(out)]
            return out
        finally:
            here.checker = None

    return run, recorders
