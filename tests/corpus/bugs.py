"""Bugs that people make in parallel programs, as data: a wrong version of a small program, and the correct one.

The programs are in bugs_mlp.py and bugs_optim.py. Each consists of a few named parts; a wrong program
replaces one part, and `# BUG` marks the line of the mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import fshard as fs
from tests.corpus.located import marked_lines

TITLES = {
    1: "no pvary where an invariant enters a column-parallel matmul",
    2: "a replicated weight used on sequence-sharded activations",
    3: "psum twice",
    4: "a gradient reduced again",
    5: "a replicated bias added before the psum",
    6: "a nonlinearity of a partial sum",
    7: "a mean of means over unequal counts",
    8: "clipping by the norm of the local shard",
    9: "one dropout mask on sharded activations",
    10: "many dropout masks on replicated activations",
    11: "a rank-dependent number used as if replicated",
    12: "a per-rank value returned as replicated",
}


@dataclass(frozen=True)
class Bug:
    """One mistake, and the check that catches it: the types, when a call is checked, or else `verify`."""

    number: int  # of TITLES
    model: Literal["mlp", "optimizer"]
    name: str
    program: Callable[..., tuple[Any, tuple[Any, ...]]]  # (check, **parts) -> the mapped function, and its arguments
    part: str  # name of the wrong part
    wrong: Callable[..., Any]
    correct: Callable[..., Any] | None  # None: the program's default part
    caught_by: Literal["types", "verify"]
    axis: str
    leaf: str | None = None  # path of a result that changes with the mesh; None where nearly all do
    factor: int | None = None  # by which the leaf is too large, if one number

    def __str__(self) -> str:
        return f"{self.number}-{self.model}-{self.name.replace(' ', '_')}"

    def build(self, part: Callable[..., Any] | None, check: str) -> tuple[Any, tuple[Any, ...]]:
        """Return the mapped program with a part replaced, and its arguments."""
        return self.program(check, **({self.part: part} if part else {}))

    @property
    def line(self) -> str:
        """Place of the mistake: file:line."""
        (line,) = marked_lines(self.wrong)
        return line


def mapped(f: Callable[..., Any], sizes: dict[str, int], in_specs: Any, out_specs: Any, check: str) -> Any:
    """Return shard_map of `f` on a simulated mesh of these sizes."""
    mesh = fs.make_mesh(kind="simulated", **sizes)
    return fs.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check=check)
