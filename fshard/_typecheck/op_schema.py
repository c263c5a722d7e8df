"""What the checker needs to know of an operation of torch, read off its schema: what it reads, writes and draws."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# What has the shape of its argument, or its dtype, and none of its values.
_CONSTANT = {
    "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full",
    "new_empty_strided", "_efficientzerotensor",
}  # fmt: skip
_COMPARES = {  # what they give has no gradient
    "eq", "ne", "lt", "le", "gt", "ge", "isclose", "equal", "isin", "bucketize", "searchsorted", "logical_and",
    "logical_or", "logical_xor", "is_same_size",
}  # fmt: skip
_OVERWRITES = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"}
_SAME = {"_to_copy", "clone", "contiguous", "detach", "alias", "lift_fresh"}  # the same values, if not the same storage
_CALLED = {
    "mm": "matmul", "bmm": "matmul", "addmm": "matmul", "baddbmm": "matmul", "t": "transpose",
    "native_layer_norm": "layer_norm",
}  # fmt: skip
_SHAPES = {"size", "stride", "shape", "split_sizes"}
_APART = {"lr", "state_steps", "grad_scale", "found_inf"}  # of a fused step: numbers for every row, without gradients


@dataclass(frozen=True)
class Operation:
    """One overload of one operation."""

    func: Any
    words: str  # what a user calls it
    constant: bool  # its values are not those of its arguments
    compares: bool
    pointwise: bool
    view: bool  # the values of its first argument, or some of them
    copies: bool  # and those in memory of its own
    overwrites: bool  # what it writes it does not read
    writes: tuple[tuple[int, str], ...]  # positions and names of the arguments it writes
    rows: bool  # works on lists, place by place
    rows_written: int
    generator: Callable[[tuple[Any, ...], dict[str, Any]], bool] | None  # whether a call uses torch's own generator

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        found = [args[i] if i < len(args) else kwargs.get(name) for i, name in self.writes]
        if self.words.endswith("batch_norm") and len(args) > 5 and args[5] is True:  # as no schema says
            found += args[3:5]
        return list(_tensors(found))

    def numbers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The Python numbers of a call, those that are left at their defaults too; not the sizes of what it makes."""
        found: list[Any] = []
        for i, a in enumerate(self.func._schema.arguments):
            x = args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
            if isinstance(x, (list, tuple)) and a.name not in _SHAPES:
                found += [y for y in x if isinstance(y, (bool, int, float, complex))]
            elif isinstance(x, (bool, int, float, complex)):
                found.append(x)
        return tuple(found)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        if not self.overwrites:
            return list(_tensors((*args, *kwargs.values())))
        positions, names = {i for i, _ in self.writes}, {name for _, name in self.writes}
        kept = [x for i, x in enumerate(args) if i not in positions]
        return list(_tensors([*kept, *(x for name, x in kwargs.items() if name not in names)]))

    def rows_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[list[Tensor]]:
        """The tensors of each place; first those that are written."""
        names = [a.name for a in self.func._schema.arguments]
        given = [(name, x) for name, x in (*zip(names, args, strict=False), *kwargs.items()) if name not in _APART]
        lists = [x for _, x in given if isinstance(x, (list, tuple)) and x and isinstance(x[0], Tensor)]
        n = len(lists[0]) if lists else 0
        everywhere = [x for _, x in given if isinstance(x, Tensor)]
        return [[*(x[i] for x in lists if len(x) == n), *everywhere] for i in range(n)]


@functools.cache
def operation(func: Any) -> Operation:
    """What is to be known of `func`, an OpOverload."""
    schema = func._schema
    name = schema.name.split("::")[-1]
    arguments = schema.arguments
    writes = [(i, a) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    out = bool(writes) and all(a.kwarg_only for _, a in writes)
    aliases = [r.alias_info for r in schema.returns if r.alias_info is not None]
    rows = name.startswith(("_foreach_", "_fused_")) and bool(arguments) and "List[Tensor]" in str(arguments[0].type)
    return Operation(
        func, _words(name),
        constant=name in _CONSTANT,
        compares=name in _COMPARES,
        pointwise=torch.Tag.pointwise in func.tags,
        copies=name in ("clone", "_to_copy", "contiguous"),
        view=name in _SAME or any(not a.is_write for a in aliases),
        overwrites=name in _OVERWRITES or out,
        writes=tuple((i, a.name) for i, a in writes),
        rows=rows,
        rows_written=sum("List[Tensor]" in str(a.type) and a.name not in _APART for _, a in writes) if rows else 0,
        generator=_generator(name, schema) if torch.Tag.nondeterministic_seeded in func.tags else None,
    )  # fmt: skip


def opaque(func: Any) -> Operation:
    """A higher-order operator, of which no more is known than its operands."""
    return Operation(func, str(func), False, False, False, False, False, False, (), False, 0, None)


def _words(name: str) -> str:
    if "scaled_dot_product" in name:
        return "attention" if "backward" not in name else "the backward of attention"
    return _CALLED.get(name, name.strip("_"))


def _generator(name: str, schema: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], bool]:
    names = [a.name for a in schema.arguments]
    rate = next((n for n in ("dropout_p", "dropout") if n in names), "p" if "dropout" in name else None)

    def draws(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("generator") is not None or given.get("training") is False:
            return False
        if any(x.is_meta for x in args if isinstance(x, Tensor)) or rate is None:  # on meta nothing is drawn
            return not any(x.is_meta for x in args if isinstance(x, Tensor))
        return given.get(rate, 0.0) > 0 and given.get("train", True) is not False

    return draws


def _tensors(xs: Any) -> Iterator[Tensor]:
    for x in xs:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _tensors(x)


__all__ = ["Operation", "opaque", "operation"]
