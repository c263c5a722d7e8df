"""The first line of a program whose result differs between two meshes while its operands agree: for `verify`.

A walk from a result that differs, through operands that do not agree, ends at operations whose operands agree. Of these
the first in the order of the program is named: other ones have been wrong before.

Over an axis that it varies over, a value is split, or each rank has a term of a sum or of a mean, or a copy. Which of
these it is cannot be known: a value agrees if one of them gives the other mesh's value. So sums over the elements of
tensors are compared. The linear ones are right for terms: the plain sum, and sums weighted by the position along a dim,
if the dim is not split. The sums of magnitudes and of squares are right for parts in any order, and for copies.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fshard._core.callsite import Site, place_and_source, quote
from fshard.spec import format_axes

from .recorder import COUNT, DIMS, ORDER, SCALE, SIZE, SQUARES, TOTAL, Key, Record, Recorder

# In which an axis may spread a value, and the numbers that cannot be compared then.
_WAYS: dict[str, list[int]] = {"same": [], "split": [ORDER], "sum": [SIZE, SQUARES], "mean": [SIZE, SQUARES]}
_SHOWN = {TOTAL: "sum", SIZE: "sum of magnitudes", SQUARES: "sum of squares"}
_CALLERS = 2  # that are shown
_READS = re.compile(r"(?<!\.)\b(int|float|bool)\(|\.(item|tolist)\(|\b(if|while)\b")

_Ranks = list[list[Record]]  # of each rank
_Array = np.ndarray[Any, Any]
_Pair = tuple[_Array, _Array, float]  # numbers on the two meshes, and the tolerance


class Comparison:
    """Compare the recordings of one program by the ranks of two meshes of these sizes."""

    def __init__(self, sizes: Sequence[Mapping[str, int]], recorders: Sequence[Sequence[Recorder]]) -> None:
        self.sizes, (self.here, self.there) = sizes, recorders
        self.order = {key: i for i, key in enumerate(dict.fromkeys(k for r in self.here for k in r.records))}
        self.agrees = functools.cache(self._agrees)

    def first(self, leaves: Iterable[int]) -> Key | None:
        """Return what is computed first, of the values that do not agree but whose operands do; None if nothing is."""
        start = list(dict.fromkeys(k for i in leaves for r in self.here for k in r.results[i]))
        stack, seen, found = [(key, frozenset[str]()) for key in start], set(), list[Key]()
        while stack:
            key, terms = stack.pop()
            if (key, terms) in seen or self.agrees(key, terms):
                continue
            seen.add((key, terms))
            operands = self._operands(key)
            wrong = [(k, terms) for k in operands if not self.agrees(k)]
            # An index or a mask of local rows differs in right programs too.
            wrong = [(k, t) for k, t in wrong if self._any_record(k).is_float] or wrong
            # The sum over ranks that the transpose of a pvary, or of an all_gather, takes is right for terms: if its
            # operand is not that, the mistake is where the operand comes from, in the backward pass.
            terms = terms.union(*(r.records[key].terms for r in self.here if key in r.records))
            if not wrong and terms and not any(self.agrees(k, terms) for k in operands):
                wrong = [(k, terms) for k in operands if k[0].is_backward]
            stack += wrong
            found += [] if wrong else [key]
        return min(found or start, key=self.order.__getitem__, default=None)

    def _operands(self, key: Key) -> list[Key]:
        """Return the operands of a value; where fshard computes one on this mesh only, for a transfer, its operands."""
        known: dict[Key, bool] = {}
        stack = [k for r in self.here if key in r.records for k in r.records[key].operands]
        while stack:
            if (k := stack.pop()) not in known:
                known[k] = not k[0].is_library or k[0].op == "ppermute" or self._counterpart(k) is not None
                stack += [] if known[k] else [o for r in self.here if k in r.records for o in r.records[k].operands]
        return [k for k, is_shared in known.items() if is_shared]

    def _agrees(self, key: Key, terms: frozenset[str] = frozenset()) -> bool | None:
        """Return whether a value is the same on both meshes, over `terms` as a sum or split; None if not comparable."""
        if key[0].op in ("argument", "axis_index"):
            return True
        first, other = self._any_record(key), self._counterpart(key)
        if first.is_view and len(first.operands) == 1:  # the operand's values, if none are left out
            operand = self._any_record(first.operands[0])
            same = math.isclose(first.numbers[SQUARES], operand.numbers[SQUARES])
            if same and (agrees := self.agrees(first.operands[0], terms)) is not None:
                return agrees
        if math.isnan(first.numbers[TOTAL]):  # NaN equals nothing
            return False
        if other is None:
            return None
        single = self._ranks(key, other)
        # Where a loop splits a value in another way, or runs a line a different number of times, the sums are the same.
        groups = [[r.groups.get((k[0], 0 if first.is_view else k[2]), []) for r in recorders]
                  for k, recorders in ((key, self.here), (other, self.there))]  # fmt: skip
        for mine, others in (single, groups):
            if all((*mine, *others)) and any(not _differs(*x).any() for _, x in self._spread(mine, others, terms)):
                return True
        return first.is_index or (False if all((*single[0], *single[1])) else None)

    def _any_record(self, key: Key) -> Record:
        return next(r.records[key] for r in self.here if key in r.records)

    def _counterpart(self, key: Key) -> Key | None:
        """Return the key on the other mesh: for a collective that needs no transfer there, its operand's key."""
        while not any(r.runs[key[0]] for r in self.there):
            moved = {r.records[key].moved if key in r.records else None for r in self.here}
            if len(moved) > 1 or (operand := moved.pop()) is None:
                return None
            key = operand
        return key

    def _ranks(self, key: Key, other: Key) -> list[_Ranks]:
        """Return each rank's record on the two meshes; none where the line runs a different number of times."""
        runs = {r.runs[key[0]] for r in self.here}, {r.runs[other[0]] for r in (*self.here, *self.there)}
        is_known = max(map(len, runs)) == 1
        return [[[r.records[k]] if is_known and k in r.records else [] for r in recorders]
                for k, recorders in ((key, self.here), (other, self.there))]  # fmt: skip

    def _spread(
        self, mine: _Ranks, others: _Ranks, terms: frozenset[str] = frozenset()
    ) -> Iterator[tuple[Sequence[str], _Pair]]:
        """Return the ways in which a value may be spread over each axis, with its numbers then."""
        eps, axes = max(r.eps for rank in (*mine, *others) for r in rank), self.sizes[0]
        tolerance = 4 * eps if eps > 1e-6 else max(1000 * eps, 1e-12)
        both = [x.reshape(*s.values(), -1) for x, s in zip(_rows(mine, others), self.sizes, strict=True)]
        same = {a for a in axes if a in mine[0][0].invariant or max(s[a] for s in self.sizes) == 1}
        possible = [("same",) if a in same else ("split", "sum") if a in terms else tuple(_WAYS) for a in axes]
        for ways in itertools.product(*possible):
            x, y = (_combined(rows, ways, tolerance) for rows in both)
            if x is not None and y is not None:
                yield ways, (x, y, tolerance)

    def describe(self, key: Key) -> list[str]:
        """Return the lines of an error about the value that is the first to differ."""
        lines, names = key[0].lines, [format_axes(s) for s in self.sizes]
        place, *source = place_and_source(lines[0]) if lines else ("a line that is not known",)
        text = [f"first different line{', in its backward pass' if key[0].is_backward else ''}: {place}", *source,
                *(f"called at {line}" for line in lines[1 : 1 + _CALLERS])]  # fmt: skip
        other = self._counterpart(key)
        mine, others = self._ranks(key, other) if other else list[_Ranks](([[]], [[]]))
        if math.isnan(self._any_record(key).numbers[TOTAL]):
            text.append("its result has NaN")
        elif self.agrees(key):
            text.append("its result agrees, but not as the out spec or the next operation takes it")
        elif not all(mine + others):
            runs = ["/".join(map(str, sorted({r.runs[key[0]] for r in rs}))) for rs in (self.here, self.there)]
            text.append("    ".join(f"times that it runs: {n} on {name}" for n, name in zip(runs, names, strict=True)))
        elif found := list(self._spread(mine, others)):
            text.append(self._values(*min(found, key=lambda row: _distance(*row[1]))))
        else:
            text.append("ranks have different values where its type says that they are the same")
        text += ["its operands agree"] * bool(self._any_record(key).operands)
        return text + [f"a number that differs is read at {at}" for at in self._reads(key)[-1:]]

    def _values(self, ways: Sequence[str], pair: _Pair) -> str:
        wrong = _differs(*pair)
        which = next((i for i in _SHOWN if wrong[i]), None)
        if which is None:
            return "its elements are others, or in another order"
        x, y = (float(v[which]) for v in pair[:2])
        mean = [a for a, way in zip(self.sizes[0], ways, strict=True) if way == "mean"]
        over = f", a mean over the ranks of {' and '.join(mean)}" if mean else ""
        values = [f"{v:.6g} on {format_axes(s)}" for v, s in zip((x, y), self.sizes, strict=True)]
        ratio = [f"ratio {x / y:.4g}"] if y else []
        return "    ".join([f"{_SHOWN[which]} of its result{over}  {values[0]}", values[1], *ratio])

    def _reads(self, key: Key) -> list[Site]:
        """Return the earlier lines of the function that read a number which differs between ranks or meshes."""
        sites: list[Site] = []
        for r in (r for r in self.here if key in r.records and key[0].lines):
            end, line = list(r.records).index(key), key[0].lines[0]
            for when, place, k in r.reads:
                numbers = {q.records[k].numbers for q in (*self.here, *self.there) if k in q.records}
                at = next((at for at in place.lines[:1] if at.code is line.code and at != line), None)
                sites += [at] if at and when <= end and len(numbers) > 1 and _READS.search(quote(at)) else []
        return sites


def _rows(mine: _Ranks, others: _Ranks) -> list[_Array]:
    """Return the numbers of each rank on the two meshes; NaN for what is not to be compared."""
    records = [r for rank in (*mine, *others) for r in rank]
    ndims = {len(r.shape) for r in records}
    sizes = [{r.shape[d] for r in records} for d in range(ndims.pop())] if len(ndims) == 1 else []
    unknown = [DIMS + d for d, of_dim in enumerate(sizes) if len(of_dim) > 1]
    unknown += [COUNT, SIZE, SQUARES, ORDER] * (max(map(len, (*mine, *others))) > 1)
    out = []
    for ranks in (mine, others):
        rows = np.array([np.sum([r.numbers[: DIMS + len(sizes)] for r in rank], axis=0) for rank in ranks])
        rows[:, unknown] = math.nan
        out.append(rows)
    return out


def _combined(rows: _Array, ways: Sequence[str], tolerance: float) -> _Array | None:
    """Return the numbers of the value that is spread over the ranks in these ways; None if it is not."""
    for way in reversed(ways):  # the last axis first
        x, rows = rows, rows[..., 0, :]
        if x.shape[-2] == 1:
            continue
        if way != "split":
            different = np.abs(x - rows[..., None, :]) > tolerance * x[..., SCALE : SCALE + 1]
            if (different if way == "same" else different[..., COUNT]).any():
                return None
        if way != "same":
            count, rows = rows[..., COUNT], x.mean(-2) if way == "mean" else x.sum(-2)
            rows[..., COUNT] = rows[..., COUNT] if way == "split" else count
            rows[..., _WAYS[way]] = math.nan
    return rows


def _differs(x: _Array, y: _Array, tolerance: float) -> _Array:
    scale = np.full_like(x, max(x[SCALE], y[SCALE]))
    scale[COUNT], scale[SCALE], scale[SQUARES] = 0, math.inf, np.maximum(x[SQUARES], y[SQUARES])
    different: _Array = np.abs(x - y) > tolerance * scale
    return different


def _distance(x: _Array, y: _Array, tolerance: float) -> tuple[bool, float]:
    """Return how far two values are apart; first if their numbers of elements differ."""
    return bool(x[COUNT] != y[COUNT]), abs(float(x[TOTAL] - y[TOTAL]))
