"""Patterns: the dims of a tensor in a file as the dims of a leaf.

`Pattern("(h three k) d -> d three h k")`: the file's dims on the left, the leaf's dims on the right. Names in
parentheses are one dim, the first of them the slowest. Every name appears once on each side. A size that does not
follow from the leaf's shape is written after the name, `(two=2 f) d -> d f`. A name only on the left needs an index,
with `at={"two": 0}`: the leaf is that part of the tensor. A 1 on the left is a dim of size 1 that the leaf lacks.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fshard.errors import ShardingError, fail

from .places import Places

Group = Sequence[str]  # the names in one dim

_TOKEN = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:=(?P<size>\d+))?(?!\w)|1(?!\w)|->|\S")


@dataclass(frozen=True)
class Pattern:
    """A rule from the dims of a tensor in a file to the dims of a leaf.

    >>> Pattern("(h three k) d -> d three h k").file_shape((64, 3, 4, 16))
    (192, 64)

    Raises ShardingError, with a mark under the position, for a text that is not a pattern, or a size that is not known.
    """

    text: str
    at: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        parsed, at = _parse(self.text), dict(self.at or {})
        object.__setattr__(self, "at", at)
        left = {n for group in parsed.file for n in group}
        right = {n for group in parsed.leaf for n in group}
        for name in sorted(n for n in left - right - at.keys() if not n.startswith("1")):
            raise self._error(f"{name!r} is not on the right", f"say which part the leaf is: at={{{name!r}: 0}}")
        for name, index in at.items():
            if name not in left or name in right:
                raise self._error(f"at={{{name!r}: {index}}} selects nothing", "at= names a dim of the left side alone")
            if name not in parsed.sizes:
                raise self._error(f"the size of {name!r} is not known", f"write it after the name: {name}=2")
            if not 0 <= index < parsed.sizes[name]:
                raise self._error(f"{name}={index} is outside its size, {parsed.sizes[name]}",
                                  f"an index of 0 to {parsed.sizes[name] - 1}")  # fmt: skip
        for group in parsed.leaf:
            if len([n for n in group if n not in parsed.sizes]) > 1:
                raise self._error(f"the sizes in ({' '.join(group)}) are not known",
                                  "write all but one after their names: h=4")  # fmt: skip

    def _error(self, problem: str, fix: str) -> ShardingError:
        return fail(f"Pattern: {problem}", self.text, fix=fix)

    def _sizes(self, shape: Sequence[int]) -> dict[str, int]:
        """Return the size of every name, for a leaf of this shape."""
        parsed = _parse(self.text)
        if len(shape) != len(parsed.leaf):
            raise self._error(f"{list(shape)} has {len(shape)} dims, the right side has {len(parsed.leaf)}",
                              "one name, or one (group), for each dim of the leaf")  # fmt: skip
        sizes = dict(parsed.sizes)
        for n, group in zip(shape, parsed.leaf, strict=True):
            known = math.prod(sizes[name] for name in group if name in parsed.sizes)
            unknown = [name for name in group if name not in parsed.sizes]
            rest = n % max(1, known)
            if (unknown and rest) or (not unknown and n != known):
                arithmetic = f"{n} % {known} = {rest}" if unknown else f"{known} != {n}"
                raise self._error(f"{list(shape)} does not fit ({' '.join(group)})", f"other sizes: {arithmetic}")
            sizes |= dict.fromkeys(unknown, n // max(1, known))
        return sizes

    def file_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the tensor in the file, for a leaf of `shape`."""
        sizes = self._sizes(shape)
        return tuple(math.prod(sizes[name] for name in group) for group in _parse(self.text).file)

    @property
    def origins(self) -> tuple[int, ...]:
        """The dim in the file that each dim of the leaf is of: its first name's.

        >>> Pattern("d (h k) -> h k d").origins
        (1, 1, 0)
        """
        parsed = _parse(self.text)
        return tuple(next(i for i, names in enumerate(parsed.file) if group[0] in names) for group in parsed.leaf)

    def places(self, shape: Sequence[int]) -> Places:
        """Return the places, in the tensor in the file, of the elements of a leaf of `shape`."""
        sizes, parsed, at = self._sizes(shape), _parse(self.text), self.at or {}
        strides, stride, offset = {}, 1, 0
        for name in reversed([name for group in parsed.file for name in group]):
            strides[name] = stride
            stride *= sizes[name]
            offset += at.get(name, 0) * strides[name]
        return Places(tuple(tuple((sizes[name], strides[name]) for name in group) for group in parsed.leaf), offset)


@functools.cache
def identity(ndim: int) -> Pattern:
    """Return the pattern of a tensor whose dims are the same in the file and in the leaf."""
    names = " ".join(f"d{i}" for i in range(ndim))
    return Pattern(f"{names} -> {names}")


# --- the text -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Parsed:
    file: Sequence[Group]
    leaf: Sequence[Group]
    sizes: Mapping[str, int]


@functools.cache
def _parse(text: str) -> _Parsed:
    sides: list[list[list[str]]] = [[]]
    group: list[str] | None = None  # that is open
    sizes: dict[str, int] = {}
    for token in _TOKEN.finditer(text):
        wrong = functools.partial(_marked, text=text, at=token.start())
        word, name, size = token[0], token["name"], token["size"]
        if word == "1":
            name, size = f"1.{token.start()}", "1"
        if name:
            if any(name in g for g in sides[-1]):
                raise wrong(f"{name!r} appears twice on one side")
            if len(sides) == 2 and not any(name in g for g in sides[0]):
                raise wrong("a 1 may be on the left only" if word == "1" else f"{name!r} is not on the left")
            if size and sizes.setdefault(name, int(size)) != int(size):
                raise wrong(f"{name!r} has two sizes, {sizes[name]} and {size}")
            if group is None:
                sides[-1].append([name])
            else:
                group.append(name)
        elif word == "->":
            if group is not None or len(sides) == 2:
                raise wrong("one '->' separates the two sides, outside parentheses")
            sides.append([])
        elif word not in "()":
            raise wrong("neither a name, a parenthesis nor '->'")
        elif (word == "(") != (group is None):
            raise wrong("no parenthesis is open here" if group is None else "parentheses do not nest")
        elif group is None:
            group = []
            sides[-1].append(group)
        else:
            group = None
    if group is not None or len(sides) != 2:
        raise _marked("a parenthesis is not closed" if group is not None else "no '->'", text, len(text))
    return _Parsed(sides[0], sides[1], sizes)


def _marked(problem: str, text: str, at: int) -> ShardingError:
    return fail(f"Pattern: {problem}", text, " " * at + "^", fix='e.g. "(h three k) d -> d three h k", file -> leaf')
