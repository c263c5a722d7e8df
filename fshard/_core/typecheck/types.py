"""Types of tensors per mesh axis, and the facts about a tensor that an error message prints."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from fshard._core.callsite import Site
from fshard._core.ops import differentiable_dtype
from fshard.spec import P, format_tensor

NONE: frozenset[str] = frozenset()


class Type(NamedTuple):
    """The axes a tensor varies over and those it is invariant over; over the axes in neither it is free."""

    varying: frozenset[str] = NONE
    invariant: frozenset[str] = NONE
    differentiable: bool = False  # may have a gradient: a float computed from a float argument
    drawn: frozenset[str] = NONE  # axes of a random draw whose numbers are not part of one draw of all ranks


class GlobalShape(tuple[int, ...]):
    """A global shape among the Python numbers that must be the same on every rank."""


class History(NamedTuple):
    """The lines by which a value came to have its type, for errors that are found later."""

    mixtures: tuple[Mixture, ...] = ()  # made it vary: at most one for each axis
    reductions: tuple[Reduction, ...] = ()  # made it invariant: at most one for each axis
    partials: tuple[Partial, ...] = ()  # the last two reductions of a dim that a value that varies was computed from
    copies: frozenset[str] = NONE  # axes over which a value varies only by pvary: each rank has a copy of one value
    gathers: tuple[Reduction, ...] = ()  # all_gathers, by which it varies over an axis and by nothing else
    like: frozenset[str] = NONE  # axes of a free value that was made like one that varies over them (zeros_like)
    # (axis, collective before the loss: pvary or all_gather) of the gradients in it that have a part on each rank
    parted: frozenset[tuple[str, str]] = frozenset()


NO_HISTORY = History()


@functools.cache  # one object for each set: the usual case of the checker compares histories by identity
def history_like(axes: frozenset[str]) -> History:
    """Return the history of a free value that was made like one that varies over `axes`."""
    return History(like=axes) if axes else NO_HISTORY


class Reduction(NamedTuple):
    """A collective whose result is the same on every rank of `axis`: invariant, or of an all_gather varying."""

    axis: str
    verb: str
    site: Site | None


class Partial(NamedTuple):
    """An operation that reduced dims of a value that varies: where an axis splits them, each rank has a partial result.

    `verb` is the collective that completes the result, or "all_gather" if only the full operand gives it.
    """

    op: str
    verb: str
    site: Site | None
    axes: frozenset[str]  # those that may split the dims
    dim: int | None  # that is reduced; None for all
    averaged: int = 0  # number of values of a mean


@dataclass(frozen=True)
class Mixture:
    """An operation of an operand that is invariant over `axis` with one that varies over it, not an error so far.

    No gradient flows to the invariant operand, or the other one is an index, where only the backward pass shows that
    the gradient is wrong.
    """

    axis: str
    op: str
    site: Site
    invariant: TensorInfo
    shape: tuple[int, ...]  # of the invariant operand
    varying: TensorInfo
    text: MixtureText
    differentiated: bool  # a gradient can flow to the invariant operand
    is_update: bool  # the result has the shape of the invariant operand, which is an argument
    roots: frozenset[int]  # of all operands that are invariant over the axis
    earlier: Mixture | None  # by which the varying operand came to vary


class MixtureText(NamedTuple):
    """The operands of a mixture as the user's code has them, and the line with other collectives."""

    rows: tuple[tuple[str, str], tuple[str, str]]  # name and type of the invariant operand, and of the varying one
    pvary: str
    pmean: str
    psum: str
    without_pvary: str | None


class TensorInfo(NamedTuple):
    """The type of one tensor, and its origin."""

    type: Type
    root: int  # the same for a tensor and its views
    name: str | None = None  # path among the region's arguments
    op: str = ""  # the operation that made the tensor
    site: Site | None = None  # the user's line that made it
    start: int = 0  # storage offset of the root
    history: History = NO_HISTORY
    spec: P | None = None  # of an argument of the region, or of a gradient by one
    origin: Literal["", "captured", "view of captured", "made"] = ""  # "made": from nothing, and then differentiated

    @property
    def is_captured(self) -> bool:
        """Return whether the tensor's memory is from outside the region."""
        return self.origin in ("captured", "view of captured")

    @property
    def mean(self) -> Partial | None:
        """The mean whose result the tensor is, if it is one of values that vary."""
        partial = next(iter(self.history.partials), None)
        return partial if partial is not None and partial.verb == "pmean" and partial.op == self.op else None


FREE = TensorInfo(Type(), 0)


class Operand(NamedTuple):
    """A plain tensor that an operation reads, and its facts."""

    tensor: Tensor
    info: TensorInfo


class Facts:
    """The facts that a checker knows of a region, for messages and fixes."""

    differentiated: Callable[[Tensor], bool]  # whether a gradient can flow to a tensor

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes  # of the mesh axes
        self.arguments: list[TensorInfo] = []
        self.mixtures: dict[tuple[Site, str], Mixture] = {}  # the first of each line and axis
        self.mixtures_of_captured: dict[tuple[int, str], Mixture] = {}  # the first of each root and axis
        self.pvaried: set[Site | None] = set()  # lines
        self.split_arguments: dict[int, TensorInfo] = {}  # that an axis splits, by root; and what `pvary` made of them
        self.asked: set[str] = set()  # axes on which the program asked for the rank's place: a number may depend on it
        # Python numbers that invariant results were computed from: (operation, line, axes of the result, numbers).
        self.numbers: list[tuple[str, Site | None, frozenset[str], tuple[Any, ...]]] = []

    def info(self, x: Tensor) -> TensorInfo:
        """Return the type and origin of a tensor."""
        raise NotImplementedError


def join(types: Sequence[Type], result: Tensor | None = None) -> Type:
    """Return the type of a value computed from operands of these types; only a float `result` is differentiable."""
    typed = [t for t in types if t.varying or t.invariant]
    can_differentiate = result is None or differentiable_dtype(result)
    if typed and can_differentiate and typed.count(typed[0]) == len(typed):  # the usual case, made fast
        return typed[0]
    varying = NONE.union(*(t.varying for t in typed))
    invariant = NONE.union(*(t.invariant for t in typed)) - varying
    differentiable = can_differentiate and any(t.differentiable for t in typed)
    return Type(varying, invariant, differentiable, NONE.union(*(t.drawn for t in typed)))


def show_type(o: Operand, shape: Sequence[int] | None = None) -> str:
    """Return `f32[64, 256]{V: data; I: model}`; with another `shape` where the user's tensor is a view of `o`."""
    t = o.info.type
    axes = [f"{state}: {', '.join(sorted(names))}" for state, names in (("V", t.varying), ("I", t.invariant)) if names]
    text = format_tensor(o.tensor.dtype, tuple(o.tensor.shape if shape is None else shape))
    return f"{text}{{{'; '.join(axes)}}}" if axes else text
