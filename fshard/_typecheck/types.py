"""What the checker knows of a tensor: its type over each mesh axis, and what to call it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from fshard._callsite import Site
from fshard._ops import differentiable_dtype
from fshard.spec import describe

NONE: frozenset[str] = frozenset()


class Type(NamedTuple):
    """What a tensor varies over and is fixed (invariant) over; the axes in neither are free."""

    varies: frozenset[str] = NONE
    fixed: frozenset[str] = NONE
    smooth: bool = False  # may have a gradient: a float that comes of a float argument
    drawn: bool = False  # a random draw, or made of draws alone


class Fact(NamedTuple):
    """What is known of one tensor: its type, and what to call it."""

    type: Type
    root: int  # the same for a tensor and its views
    name: str | None = None  # its path among the arguments
    op: str = ""  # what made it, and where
    site: Site | None = None
    start: int = 0  # of the root, in its storage


FREE = Fact(Type(), 0)


class Operand(NamedTuple):
    """A tensor in an error."""

    tensor: Tensor
    fact: Fact


class IndexMix(NamedTuple):
    """Where an integer or bool that varies over `axis` met what is invariant over it, which is no error by itself."""

    axis: str
    op: str
    site: Site | None
    still: Fact
    moving: Fact


class CheckerView(Protocol):
    """What can be asked of a checker."""

    sizes: Mapping[str, int]
    arguments: list[Fact]
    met: list[IndexMix]

    def fact(self, x: Tensor) -> Fact:
        """What is known of a tensor."""


def join(kinds: Sequence[Type], like: Tensor | None = None) -> Type:
    """The type of what depends on these."""
    typed = [t for t in kinds if t.varies or t.fixed]
    if (
        typed and (like is None or differentiable_dtype(like)) and typed.count(typed[0]) == len(typed)
    ):  # as nearly always
        return typed[0]
    varies = NONE.union(*(t.varies for t in typed))
    fixed = NONE.union(*(t.fixed for t in typed)) - varies
    smooth = any(t.smooth for t in typed) and (like is None or differentiable_dtype(like))
    return Type(varies, fixed, smooth, any(t.drawn for t in typed))


def typed(o: Operand, shape: Sequence[int] | None = None) -> str:
    """`f32[64, 256]{V: data; I: model}`; of another shape where the user's tensor is a view of it."""
    t = o.fact.type
    parts = [f"{letter}: {', '.join(sorted(axes))}" for letter, axes in (("V", t.varies), ("I", t.fixed)) if axes]
    return f"{describe(o.tensor.dtype, tuple(o.tensor.shape if shape is None else shape))}{{{'; '.join(parts)}}}"


__all__ = ["FREE", "NONE", "CheckerView", "Fact", "IndexMix", "Operand", "Type", "join", "typed"]
