"""Wrong parallel programs, as data: each is a correct one with some lines replaced, and the check that catches it.

Below a line of a correct program, `# WRONG: line` is the line that the wrong program has in its place, and nothing
after the colon means none; `# WRONG (3 lines): line` replaces three. Where a function has several wrong programs, the
comment names one of them. An error has to name a line that replaces another, or one of those marked `# BUG` if any is.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import fshard as fs
from tests.corpus.correct.program import normal

__all__ = ["WrongProgram", "normal"]

_WRONG = re.compile(r" *# WRONG( \w+)?(?: \((\d+) lines\))?: ?(.*)")


@dataclass(frozen=True)
class WrongProgram:
    """A wrong program and a correct one, of the same arguments and specs.

    `caught_by` is the first check that catches the wrong one: the types, at the line, or `verify`. Of one that neither
    catches, `out_of_reach` gives the reason.
    """

    name: str
    correct: Callable[..., Any]  # runs in a region; the comments in it are the wrong program
    axes: dict[str, int]
    in_specs: tuple[Any, ...]
    out_specs: Any
    args: tuple[Any, ...]
    caught_by: Literal["types", "verify"] | None
    axis: str  # the axis that the error names
    out_of_reach: str = ""
    leaf: str = ""  # a result that changes with the mesh
    factor: int | None = None  # by which the leaf is too large, if one number
    report: str = ""  # project and number of the public report of such a bug

    def __str__(self) -> str:
        return self.name

    @property
    def wrong(self) -> Callable[..., Any]:
        """The wrong program, which has a file of its own."""
        return _patched(self.correct, self.name)[0]

    @property
    def source(self) -> str:
        """The source of the module with the wrong program in the place of the correct one."""
        return _patched(self.correct, self.name)[1]

    def mapped(self, f: Callable[..., Any], check: str = "always") -> Any:
        """Return shard_map of one of the two on the simulated mesh."""
        mesh = fs.make_mesh(kind="simulated", **self.axes)
        return fs.shard_map(f, mesh=mesh, in_specs=self.in_specs, out_specs=self.out_specs, check=check)


@functools.cache
def _patched(correct: Callable[..., Any], name: str) -> tuple[Callable[..., Any], str]:
    """Return a wrong program, and the source of its module with it."""
    lines, first = inspect.getsourcelines(correct)
    body = list(_replaced(lines, name))
    path = Path(inspect.getfile(inspect.unwrap(correct)))
    rest = path.read_text().splitlines(keepends=True)
    source = "".join([*rest[: first - 1], *body, *rest[first - 1 + len(lines) :]])
    file = f"{path.stem}_{name}.py"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    names = dict(inspect.unwrap(correct).__globals__)
    exec(compile("\n" * (first - 1) + "".join(body), file, "exec"), names)
    return names[correct.__name__], source


def _replaced(lines: Iterable[str], name: str) -> Iterator[str]:
    """Yield the lines of a wrong program; all that replace others are marked, if none is."""
    out: list[str] = []
    new: list[int] = []
    indent = None  # of the line that is replaced, below which this one is
    for line in lines:
        match = _WRONG.fullmatch(line.rstrip("\n"))
        if match is None:
            out.append(line)
            indent = None
        elif match[1] in (None, f" {name}"):
            if indent is None:
                first = out[-int(match[2] or 1)]
                indent = first[: len(first) - len(first.lstrip())]
                del out[-int(match[2] or 1) :]
            if match[3]:
                new.append(len(out))
                out.append(f"{indent}{match[3]}\n")
    assert out != list(lines), f"no line of a program is of {name}"
    marked = any("# BUG" in line for line in out)
    return (f"{line.rstrip()}  # BUG\n" if i in new and not marked else line for i, line in enumerate(out))
