"""How the dims of a tensor in somebody else's file become ours, and where in it each part of ours lies.

`Pattern("(h three k) d -> d three h k")`: theirs on the left, ours on the right, in names of dims. Names in
parentheses are one dim, the first of them the slowest. Every name stands once on each side. A size that our shape
does not tell is written where the name stands, `(two=2 f) d -> d f`; a name that ours lacks needs an index, with
`at={"two": 0}`: ours is that part of theirs. A 1 on the left is a dim of size 1 that ours lacks.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fshard.errors import ShardingError, fail
from fshard.spec import Box, box_shape

Group = tuple[str, ...]  # the names that are one dim

_MOST_RUNS = 1 << 16  # in one chunk: a list of them takes memory too
_TOKEN = re.compile(r"\s*(?:([()])|([A-Za-z_]\w*)(?:=(\d+))?(?!\w)|(1)(?!\w)|(->))")


@dataclass(frozen=True)
class Pattern:
    """A rule that takes a tensor's dims to ours, and parts of ours to places in it.

    >>> Pattern("(h three k) d -> d three h k").theirs((64, 3, 4, 16))
    (192, 64)

    Raises ShardingError, with a mark under the place, where the text is none, or where a size is left open.
    """

    text: str
    at: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        parsed, at = _parse(self.text), dict(self.at or {})
        object.__setattr__(self, "at", at)
        known = {n for group in parsed.theirs for n in group}
        ours = {n for group in parsed.ours for n in group}
        for name in sorted(n for n in known - ours - at.keys() if not n.startswith("1")):
            raise self._wrong(f"{name!r} is not on the right", f"say which part of theirs ours is: at={{{name!r}: 0}}")
        for name, index in at.items():
            if name not in known or name in ours:
                raise self._wrong(f"at={{{name!r}: {index}}} selects nothing", "at= names a dim of the left side alone")
            if name not in parsed.sizes:
                raise self._wrong(f"the size of {name!r} is not known", f"write it down: {name}=2")
            if not 0 <= index < parsed.sizes[name]:
                raise self._wrong(f"{name}={index} is outside its size, {parsed.sizes[name]}",
                                  f"an index of 0 to {parsed.sizes[name] - 1}")  # fmt: skip
        for group in parsed.ours:
            if len([n for n in group if n not in parsed.sizes]) > 1:
                raise self._wrong(f"the sizes in ({' '.join(group)}) are not known", "write down all but one: h=4")

    def _wrong(self, why: str, fix: str) -> ShardingError:
        return fail(f"Pattern: {why}", self.text, fix=fix)

    def _sizes(self, shape: Sequence[int]) -> dict[str, int]:
        """The size of every name, for a leaf of ours of this shape."""
        parsed = _parse(self.text)
        if len(shape) != len(parsed.ours):
            raise self._wrong(f"{list(shape)} has {len(shape)} dims, the right side has {len(parsed.ours)}",
                              "one name, or one (group), for each dim of ours")  # fmt: skip
        sizes = dict(parsed.sizes)
        for n, group in zip(shape, parsed.ours, strict=True):
            given = math.prod(sizes[name] for name in group if name in parsed.sizes)
            left = [name for name in group if name not in parsed.sizes]
            if (left and n % max(1, given)) or (not left and n != given):
                sign = f"{n} % {given} = {n % max(1, given)}" if left else f"{given} != {n}"
                raise self._wrong(f"{list(shape)} does not fit ({' '.join(group)})", f"other sizes: {sign}")
            sizes |= dict.fromkeys(left, n // max(1, given))
        return sizes

    def theirs(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the tensor of which a leaf of `shape` is made."""
        sizes = self._sizes(shape)
        return tuple(math.prod(sizes[name] for name in group) for group in _parse(self.text).theirs)

    @property
    def part(self) -> tuple[tuple[str, int, int], ...]:
        """The part of theirs that ours is: (name, index, size), for each name of `at`."""
        return tuple((name, index, _parse(self.text).sizes[name]) for name, index in sorted((self.at or {}).items()))

    def pieces(self, shape: Sequence[int], box: Box) -> Iterator[Piece]:
        """The parts of a box of a leaf of `shape` that are boxes among their dims too; most often one.

        They fill the box and do not overlap. An empty box has none.
        """
        if 0 in box_shape(box):
            return
        sizes, parsed, at = self._sizes(shape), _parse(self.text), self.at or {}
        steps, step, first = {}, 1, 0
        for name in reversed([name for group in parsed.theirs for name in group]):
            steps[name] = step
            step *= sizes[name]
            first += at.get(name, 0) * steps[name]
        names = [name for group in parsed.ours for name in group]
        order = tuple(sorted(range(len(names)), key=lambda i: (-steps[names[i]], -sizes[names[i]])))
        cuts = [list(_split([sizes[n] for n in group], s.start, s.stop))
                for group, s in zip(parsed.ours, box, strict=True)]  # fmt: skip
        for parts in itertools.product(*cuts):
            inner = [ends for part in parts for ends in part.ends]
            yield Piece(
                ours=tuple(slice(p.start - s.start, p.stop - s.start) for p, s in zip(parts, box, strict=True)),
                split=tuple(b - a for a, b in inner),
                order=order,
                first=first + sum(a * steps[name] for (a, _), name in zip(inner, names, strict=True)),
                steps=tuple(steps[names[i]] for i in order),
            )


@dataclass(frozen=True)
class Piece:
    """A part of a box of ours, and its place in their tensor, all counted in elements.

    `ours`: its slices of the box. `split`: its shape when each name is a dim, and `order` these dims in their order.
    `first` and `steps`: its first element there, and how far its neighbours along each dim are, in their order.
    """

    ours: Box
    split: tuple[int, ...]
    order: tuple[int, ...]
    first: int
    steps: tuple[int, ...]

    def of(self, x: Tensor) -> Tensor:
        """The view of `x`, the box's tensor, that is this piece with its dims in their order."""
        return x[self.ours].view(self.split).permute(self.order)

    def chunks(self, most: int) -> Iterator[tuple[Box, list[int], int]]:
        """The piece in chunks of at most `most` elements, as they follow each other in their tensor.

        Each is a box of `of(x)`, where its runs begin in their tensor, and how long a run is. The runs of a chunk, one
        after the other, are its elements in order. No run touches the one before it.
        """
        sizes = [self.split[i] for i in self.order]
        most = min(most, _MOST_RUNS * self._run(sizes)[0])
        dim, whole = len(sizes), 1
        while dim and whole * sizes[dim - 1] <= most:
            dim -= 1
            whole *= sizes[dim]
        lead, rest = sizes[: max(0, dim - 1)], tuple(slice(0, n) for n in sizes[dim:])
        rows = max(1, most // whole)
        ranges = [(slice(i, min(i + rows, sizes[dim - 1])),) for i in range(0, sizes[dim - 1], rows)] if dim else [()]
        for at in itertools.product(*(range(n) for n in lead)):
            for some in ranges:
                box = (*(slice(i, i + 1) for i in at), *some, *rest)
                run, outer = self._run(box_shape(box))
                starts = np.array([self.first + sum(s.start * step for s, step in zip(box, self.steps, strict=True))])
                for n, step in outer:
                    starts = np.add.outer(starts, np.arange(n) * step)
                yield box, starts.ravel().tolist(), run

    def _run(self, sizes: Sequence[int]) -> tuple[int, list[tuple[int, int]]]:
        """How many elements of a box of these sizes follow each other, and (size, step) of the dims outside of that."""
        run = 1
        outer: list[tuple[int, int]] = []
        for n, step in zip(reversed(sizes), reversed(self.steps), strict=True):
            if step == run:  # never again after one that is larger: steps grow
                run *= n
            else:
                outer.insert(0, (n, step))
        return run, outer


def identity(ndim: int) -> Pattern:
    """The pattern of a tensor that is as ours."""
    names = " ".join(f"d{i}" for i in range(ndim))
    return Pattern(f"{names} -> {names}")


def absent(patterns: Iterable[Pattern]) -> list[str]:
    """The parts of a tensor of theirs, `two=1`, that none of its patterns takes.

    Raises ShardingError where they do not name the same dims, of the same sizes.
    """
    parts = [p.part for p in patterns]
    dims = {tuple((name, size) for name, _, size in part): part for part in parts}
    if len(dims) > 1:
        shown = [" ".join(f"{name}={size}" for name, size in dim) or "all of it" for dim in dims]
        raise fail("is cut in different ways", *shown, fix="name the same dims, of the same sizes, in at=")
    taken = {tuple(index for _, index, _ in part) for part in parts}
    every = itertools.product(*(range(size) for dim in dims for _, size in dim))
    names = [name for dim in dims for name, _ in dim]
    return [" ".join(f"{n}={i}" for n, i in zip(names, at, strict=True)) for at in every if at not in taken]


# --- the text -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Parsed:
    theirs: tuple[Group, ...]
    ours: tuple[Group, ...]
    sizes: Mapping[str, int]


@functools.cache
def _parse(text: str) -> _Parsed:
    sides: list[list[Group]] = [[]]
    group: list[str] | None = None
    sizes: dict[str, int] = {}
    at, end = 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            raise _marked("not a name, a parenthesis or '->'", text, at + len(text[at:]) - len(text[at:].lstrip()))
        parenthesis, name, size, one, arrow = match.groups()
        place, at = match.end() - len(match[0].lstrip()), match.end()
        if one:
            name, size = f"1.{place}", "1"
        if name:
            if any(name in g for g in sides[-1]) or name in (group or ()):
                raise _marked(f"{name!r} stands twice on one side", text, place)
            if len(sides) == 2 and not any(name in g for g in sides[0]):
                raise _marked("a 1 may stand on the left only" if one else f"{name!r} is not on the left", text, place)
            if size and sizes.setdefault(name, int(size)) != int(size):
                raise _marked(f"{name!r} has two sizes, {sizes[name]} and {size}", text, place)
            if group is None:
                sides[-1].append((name,))
            else:
                group.append(name)
        elif arrow:
            if group is not None or len(sides) == 2:
                raise _marked("one '->' parts the two sides, outside parentheses", text, place)
            sides.append([])
        elif (parenthesis == "(") != (group is None):
            raise _marked("parentheses do not nest" if group is not None else "nothing is open here", text, place)
        elif parenthesis == "(":
            group = []
        else:
            assert group is not None
            sides[-1].append(tuple(group))
            group = None
    if group is not None or len(sides) != 2:
        raise _marked("a parenthesis is not closed" if group is not None else "no '->'", text, len(text))
    return _Parsed(tuple(sides[0]), tuple(sides[1]), sizes)


def _marked(why: str, text: str, at: int) -> ShardingError:
    return fail(f"Pattern: {why}", text, " " * at + "^", fix='e.g. "(h three k) d -> d three h k", theirs -> ours')


# --- a range of several dims that are one ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """A range of a dim of ours that is a box of the names in it: `ends`, for each, where it begins and stops."""

    start: int
    stop: int
    ends: tuple[tuple[int, int], ...]


def _split(sizes: Sequence[int], start: int, stop: int) -> Iterator[_Part]:
    """A range of a dim as few parts, in order: of (3 4), range(2, 11) is the ends of a row, a row, and a start."""
    if len(sizes) <= 1:
        yield _Part(start, stop, ((start, stop),) * len(sizes))
        return
    row = math.prod(sizes[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:  # within one row
        yield from _within(sizes, last, start, stop)
        return
    if start < first * row:
        yield from _within(sizes, first - 1, start, first * row)
    if first < last:
        yield _Part(first * row, last * row, ((first, last), *((0, n) for n in sizes[1:])))
    if last * row < stop:
        yield from _within(sizes, last, last * row, stop)


def _within(sizes: Sequence[int], i: int, start: int, stop: int) -> Iterator[_Part]:
    base = i * math.prod(sizes[1:])
    for part in _split(sizes[1:], start - base, stop - base):
        yield _Part(part.start + base, part.stop + base, ((i, i + 1), *part.ends))


__all__ = ["Pattern", "Piece", "absent", "identity"]
