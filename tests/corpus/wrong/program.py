"""Wrong parallel programs, as data: each with a correct one, and the check that catches the mistake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

import fshard as fs
from tests.corpus.located import marked_lines


@dataclass(frozen=True)
class WrongProgram:
    """A wrong program and a correct one, of the same arguments and specs.

    `caught_by` is the first check that catches the wrong one: the types, or `verify`. `# BUG` marks the line, or the
    lines that are only wrong together.
    `out_of_reach` says of a program that neither catches why neither can.
    """

    wrong: Callable[..., Any]  # runs in a region; its name is the name of the program
    correct: Callable[..., Any]
    axes: dict[str, int]
    in_specs: tuple[Any, ...]
    out_specs: Any
    args: tuple[Any, ...]
    caught_by: Literal["types", "verify"] | None
    axis: str  # the axis that the error names
    out_of_reach: str = ""

    def __str__(self) -> str:
        return self.wrong.__name__

    def mapped(self, f: Callable[..., Any], check: str = "always") -> Any:
        """Return shard_map of one of the two on the simulated mesh."""
        mesh = fs.make_mesh(kind="simulated", **self.axes)
        return fs.shard_map(f, mesh=mesh, in_specs=self.in_specs, out_specs=self.out_specs, check=check)

    @property
    def line(self) -> str:
        """Place of the only marked line: file:line."""
        (line,) = marked_lines(self.wrong)
        return line


def normal(name: str, *shape: int, std: float = 1.0, mean: float = 0.0) -> torch.Tensor:
    """Return normal numbers that are a function of the name and the shape."""
    return fs.random.normal(fs.fold_in(fs.key(7), name), shape, std=std, mean=mean)
