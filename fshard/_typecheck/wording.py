"""The pieces of the checker's errors: the line as it stands, the operands in the user's words, the line repaired."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fshard import _callsite
from fshard._torch_compat import in_backward, unwrapped
from fshard.errors import ShardingError, fail

from . import suggestion
from .types import CheckerView, Operand, typed


class Scene:
    """The user's line that is being executed, and what it calls its operands, those of an operator in order."""

    def __init__(self, checker: CheckerView, operands: Sequence[Operand] = ()) -> None:
        self.checker, self.frame, self.site = checker, _callsite.user_frame(), _callsite.site()
        self._places = {id(o.tensor): i for i, o in reversed(list(enumerate(operands)))}

    def verb(self, name: str) -> str:
        """How the user would call a verb of the library: `fs.pvary`."""
        return suggestion.name_of(self.frame, name) if self.frame is not None else f"fs.{name}"

    def known(self, o: Operand) -> str | None:
        """The user's own words for an operand, or its path among the arguments."""
        said = suggestion.operand(self.frame, self.matches(o), self.place(o)) if self.frame is not None else None
        return said or o.fact.name

    def name(self, o: Operand) -> str:
        """The user's own words for an operand; else its path, or what made it."""
        return self.known(o) or (f"a result of {o.fact.op}" if o.fact.op else "a tensor")

    def row(self, o: Operand, name: str = "") -> tuple[str, str]:
        """An operand's name, and its type with the shape that the user's own tensor has, and its path."""
        name, path = name or self.name(o), o.fact.name
        own = suggestion.value(self.frame, self.matches(o), self.place(o)) if self.frame is not None else None
        text = typed(o, own.shape if isinstance(own, Tensor) else o.tensor.shape)
        same = path is None or path.replace("'", '"') == name.replace("'", '"')
        return name, text if same else f"{text}    {path}"

    def repaired(self, o: Operand, wrap: Callable[[str], str]) -> str | None:
        """The line with an operand rewritten; `None` where that cannot be said."""
        if self.frame is None:
            return None
        line = suggestion.repair(self.frame, self.matches(o), wrap, self.place(o))
        known = self.known(o)
        return line or (wrap(known) if known else None)

    def place(self, o: Operand) -> int | None:
        return self._places.get(id(o.tensor))

    def matches(self, o: Operand) -> Callable[[object], bool]:
        """Whether an object of the user's is this operand, or a view of it."""

        def it(x: object) -> bool:
            return isinstance(x, Tensor) and (unwrapped(x) is o.tensor or self.checker.fact(x).root == o.fact.root > 0)

        return it


def differentiating() -> bool:
    """Whether a gradient is being taken: torch.func's functions or `transforms` are on the stack, or a backward."""
    if in_backward():
        return True
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(("eager_transforms.py", "fshard/grad.py")):
            return True
        frame = frame.f_back
    return False


def error(site: _callsite.Site | str | None, what: str, rows: Sequence[tuple[str, str]], *notes: str, fix: str = "") \
        -> ShardingError:  # fmt: skip
    """One error: where and what, the line, the operands, the reasons, the fix."""
    quoted = _callsite.quote(site) if isinstance(site, _callsite.Site) else ""
    width = max([len(name) for name, _ in rows], default=0)
    told = [*("  " + line for line in quoted.splitlines()), *(f"{name:<{width}}  {text}" for name, text in rows)]
    return fail(f"{site}: {what}" if site else what, *told, *notes, fix=fix)


def quoted(axes: Sequence[str]) -> str:
    """Axes as an argument: `"data"`, `("data", "model")`."""
    return f'"{axes[0]}"' if len(axes) == 1 else "(" + ", ".join(f'"{a}"' for a in axes) + ")"


def over(axes: Sequence[str]) -> str:
    """Axes in a sentence: `'data' and 'model'`."""
    return " and ".join(map(repr, axes))


__all__ = ["Scene", "differentiating", "error", "over", "quoted"]
