"""Plans of the calls of one signature: what is known of arguments and results without their values."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from fshard._core.region import UnevenSize
from fshard.mesh import Mesh
from fshard.sharded import Placement
from fshard.spec import Box, P, Size


class ResultTypes(NamedTuple):
    """Structure and types of one rank's results, which ranks that are processes exchange."""

    structure: str
    leaves: list[tuple[str, tuple[int, ...]]]  # dtype and local shape, or a Python value and ()
    digest: str  # of what the checker compares between ranks


class RankResult(NamedTuple):
    """Results of one rank: as a tree, and flat."""

    out: Any
    leaves: list[Any]
    treedef: Any


@dataclass(frozen=True)
class OutputPlan:
    """Placements of results of these types. Nothing in a plan depends on a value."""

    treedef: Any
    types: list[Any]  # by rank of this process: `leaf_types`
    placements: list[Placement | None]  # of each leaf; None for a leaf that is not a tensor
    tensors: list[int]  # positions of the leaves that are tensors
    plain: bool  # all tensors can be kept unchanged: none is of a subclass or requires grad

    def fits(self, results: Sequence[RankResult]) -> bool:
        """Return whether all ranks returned the structure and types of this plan."""
        for result, (classes, facts) in zip(results, self.types, strict=True):
            if result.treedef != self.treedef or list(map(type, result.leaves)) != classes:
                return False
            # One by one: the garbage collector would visit a list of all.
            if not all(map(operator.eq, map(_FACTS, [result.leaves[i] for i in self.tensors]), facts)):
                return False
        return True


_FACTS = operator.attrgetter("dtype", "shape", "requires_grad")


def leaf_types(leaves: list[Any]) -> tuple[list[type], list[Any]]:
    """Return the class of each leaf, and the dtype, the shape and requires_grad of each tensor."""
    return list(map(type, leaves)), [_FACTS(x) for x in leaves if isinstance(x, Tensor)]


@dataclass
class CallPlan:
    """Properties that a signature of arguments determines, followed by findings of calls with that signature."""

    name: str  # of the function
    mesh: Mesh
    out_specs: Any
    treedef: Any
    signature: list[Any]  # of each leaf
    specs: list[P]
    names: list[str]  # as the function would write them: `params['up']`
    slices: list[list[tuple[int, Box | None]]]  # by rank: each leaf that is not a local shard yet, and the rank's box
    uneven: dict[str, UnevenSize]  # axis -> the first size of a leaf whose parts over it differ
    split_sizes: dict[tuple[str, ...], set[Size]]  # axes of several ranks -> the sizes of dims that they split
    global_shapes: list[tuple[int, tuple[int, ...]]]  # of leaves split over an uneven axis, and donated ones
    donated: list[int]  # leaves of arguments that the call may overwrite
    kept: list[int]  # all other leaves that are tensors inside
    placed: set[int]  # leaves of `kept` that the caller has placed: a call must not write to them
    written: set[int] | None = None  # leaves of `kept` that the first call wrote to; None before it
    checked: list[tuple[Any, ...]] = field(default_factory=list)  # facts of each program that calls have checked
    rank_types: list[ResultTypes] | None = None  # of every rank of a process mesh
    output: OutputPlan | None = None  # of the last results

    def __post_init__(self) -> None:
        self.kept_specs = [self.specs[i] for i in self.kept]

    def note_checked(self, facts: tuple[Any, ...]) -> None:
        if facts not in self.checked:
            self.checked.append(facts)
