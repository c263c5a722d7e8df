"""The bugs people make in parallel programs, as plain data: each in a small program, next to its repaired twin.

The programs are in bugs_mlp.py, bugs_gpt2.py and bugs_optim.py. Each is a handful of named parts; a wrong program has
one part another way, and `# BUG` stands on the line of the mistake.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import fshard as fs

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
    11: "a number of this rank used as everybody's",
    12: "a value of this rank returned as everybody's",
}


@dataclass(frozen=True)
class Bug:
    """One mistake, and how it is found: by the types, when a call is checked, or else by `verify`."""

    number: int  # of TITLES
    where: Literal["mlp", "block", "optimizer"]
    name: str
    program: Callable[..., tuple[Any, tuple[Any, ...]]]  # (check, **parts) -> what shard_map gives, and its arguments
    part: str  # the name of the part that is wrong
    wrong: Callable[..., Any]
    right: Callable[..., Any] | None  # None: the program's own part
    expected: Literal["static", "verify"]
    axis: str
    leaf: str | None = None  # the path of a result that changes with the mesh; None where nearly all do
    factor: int | None = None  # by which it is too large, where that is one number

    def __str__(self) -> str:
        return f"{self.number}-{self.where}-{self.name.replace(' ', '_')}"

    def made(self, part: Callable[..., Any] | None, check: str) -> tuple[Any, tuple[Any, ...]]:
        """The program with that part, bound to its mesh, and its arguments."""
        return self.program(check, **({self.part: part} if part else {}))

    @property
    def line(self) -> str:
        """Where the mistake is: file:line."""
        lines, first = inspect.getsourcelines(self.wrong)
        (at,) = [i for i, line in enumerate(lines) if "# BUG" in line]
        return f"{Path(inspect.getfile(self.wrong)).name}:{first + at}"


def mapped(f: Callable[..., Any], sizes: dict[str, int], in_specs: Any, out_specs: Any, check: str) -> Any:
    """`f` on a simulated mesh of these sizes; `check` as in shard_map."""
    mesh = fs.make_mesh(kind="simulated", **sizes)
    return fs.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check=check)


def normal(name: str, *shape: int, std: float = 1.0, mean: float = 0.0) -> torch.Tensor:
    """A tensor that is the same in every run."""
    return fs.random.normal(fs.fold_in(fs.key(7), name), shape, std=std, mean=mean)
