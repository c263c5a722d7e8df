"""The expression that the user's code is executing: the source text of a tensor in it, and its line rewritten.

Only the expression is parsed, never the statement around it. None of the user's code is run: only names, plain
attributes and entries of dicts, lists and tuples are looked up.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import inspect
import operator
import re
import sys
import threading
import tokenize
from collections import namedtuple
from collections.abc import Callable, Iterator
from types import FrameType, MemberDescriptorType
from typing import Any

import torch

from fshard._core.callsite import PACKAGE, Site, text_of

_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)  # bind other names
_ATOMS = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Constant)  # need no parentheses anywhere
# As people import them.
MODULES = (
    "torch", "torch.linalg", "torch.nn.functional", "nn.functional", "tnn.functional", "F", "fs", "fs.nn", "nn",
)  # fmt: skip
_FIELDS = (MemberDescriptorType, type(vars(namedtuple("_", "x"))["x"]))  # of __slots__ and namedtuples
_parsing = threading.Lock()  # the parser of Python 3.11 counts its depth for all threads together


class Expression:
    """The expression or augmented assignment at a place, without a node where its source is missing or was edited.

    Its names have values in the `frame` that executes it. The lines that its methods return have code in the place of
    the expression, or of a part; they are `None` where that cannot be written.
    """

    def __init__(self, site: Site | None, frame: FrameType | None = None) -> None:
        self.node: Any = None
        self._line: bytes | None = None  # if it can be rewritten
        self._frame, self._code, self._preceding = frame, "", ""
        if site is not None:
            with contextlib.suppress(LookupError, SyntaxError, ValueError, RecursionError, MemoryError):
                self._read(site)

    def _read(self, site: Site) -> None:
        first, last, start, end = site.columns
        lines = text_of(site.file, self._frame and self._frame.f_globals).encode().splitlines()
        if first is None or last is None or start is None or end is None or last > len(lines):
            return
        code = b"\n".join([*lines[first - 1 : last - 1], lines[last - 1][:end]])[start:].decode()
        self._code, node = _parse(code)
        self._preceding = b"\n".join([*lines[: first - 1], lines[first - 1][:start]]).decode()
        # Neither several lines nor an assignment to x[0], which must not become one to pvary(x)[0], can be rewritten.
        stores = dis.opname[site.code.co_code[site.lasti]].startswith(("STORE", "DELETE"))
        self._line = _without_comment(lines[first - 1]) if first == last and not stores else None
        self._start = start - (len(self._code) - len(code)) // 2  # column of the parsed code
        self.node = node

    @property
    def text(self) -> str:
        """The source text of the expression."""
        return self.source(self.node)

    @property
    def is_in_a_line(self) -> bool:
        """Return whether it is an expression in one line, which can be rewritten."""
        return self._line is not None and isinstance(self.node, ast.expr)

    def find(self, is_it: Callable[[object], bool], position: int = -1, op: str = "") -> Any:
        """Return the node of a tensor, or `None` where its source is unknown or takes several lines.

        `position` is the tensor's among the operands of the operation `op`; -1 if it is unknown.
        """
        node = next((part for part in _parts(self.node) if is_it(self.value(part))), None) if self.node else None
        if node is None and position >= 0:
            node = next(iter(self._operands(op)[position:]), None)
        return node if node is not None and node.lineno == node.end_lineno else None

    def _operands(self, op: str | None = None) -> list[Any]:
        """Return the nodes of the operands of an operator, or of a call of a method or function: of `op`, if given."""
        match self.node:
            case ast.BinOp(left=left, right=right):
                return [left, right]
            case ast.Call(func=func, args=args) if op in (None, (self.called() or "").strip("_")):
                owners = [func.value] if isinstance(func, ast.Attribute) else []
                return [*(x for x in owners if ast.unparse(x) not in MODULES), *args]
        return []

    def source(self, node: Any) -> str:
        """Return the source text of a node."""
        return ast.get_source_segment(self._code, node) or ""

    def value(self, node: Any) -> Any:
        """Return the object that a node names; `None` for other expressions, which would have to run."""
        match node:
            case ast.Constant():
                return node.value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(n))):
                return -n
            case ast.Name() if self._frame is not None:
                return self._frame.f_locals.get(node.id, self._frame.f_globals.get(node.id))
            case ast.Attribute():
                return _attribute(self.value(node.value), node.attr)
            case ast.Subscript():
                container, key = self.value(node.value), self.value(node.slice)
                if isinstance(container, dict) and isinstance(key, (int, str)):
                    return dict.get(container, key)
                if isinstance(container, (list, tuple)) and isinstance(key, int):
                    return next(iter(container[key:][:1]), None)
        return None

    def replaced(self, *changes: tuple[Any, str]) -> str | None:
        """Return the line with new text for each node."""
        target = getattr(self.node, "target", None)  # x += y assigns to x as well
        if self._line is None or any(node is target for node, _ in changes):
            return None
        line = self._line
        for node, new in sorted(changes, key=lambda change: change[0].col_offset, reverse=True):
            before, after = _without_group(*self._around(line, node))
            line = f"{before}{new}{after}".encode()
        return line.decode().strip()

    def with_text(self, new: str) -> str | None:
        """Return the line with another text for the expression."""
        return self.replaced((self.node, new))

    def with_axis(self, old: str, new: str) -> str | None:
        """Return the line with `new` for the axis `old` of a call: its second argument, or `axis=`."""
        keywords = [k.value for k in getattr(self.node, "keywords", []) if k.arg == "axis"]
        axes = [*getattr(self.node, "args", [])[1:2], *keywords]
        axis = next((x for x in axes if ast.unparse(x) == ast.unparse(_parse(old)[1])), None)
        return axis and self.replaced((axis, new))

    def with_first_operand(self, rebuild: Callable[[str], str]) -> str | None:
        """Return the line with `rebuild(first operand of a call)`: `x` of `x.sum(0)` and of `torch.sum(x, 0)`."""
        operand = next(iter(self._operands()), None)
        return operand and self.replaced((operand, rebuild(self.source(operand))))

    def with_picked_operand(self, rebuild: Callable[[str], str]) -> str | None:
        """Return the line with `rebuild(x)` of `x[a:b]`, or of a call of narrow or select, if no constant picks."""
        index = getattr(self.node, "slice", None) or ast.Tuple(getattr(self.node, "args", []))
        if not any(isinstance(part, ast.Name) for part in ast.walk(index)):
            return None
        if isinstance(self.node, ast.Subscript):
            x = self._before_bracket()
            return self.with_text(rebuild(x) + self.text.removeprefix(x))
        return self.with_first_operand(rebuild) if self.called() in ("narrow", "select") else None

    def sliced_operand(self, dim: int) -> str | None:
        """Return `x` of `x[a:b]`, or of `x[:, a:b]` for `dim` 1; `None` for another expression."""
        if not isinstance(self.node, ast.Subscript):
            return None
        entries = self.node.slice.elts if isinstance(self.node.slice, ast.Tuple) else [self.node.slice]
        which = [i for i, x in enumerate(entries) if ast.unparse(x) != ":"]
        return self._before_bracket() if which == [dim] and isinstance(entries[dim], ast.Slice) else None

    def _before_bracket(self) -> str:
        text = self.text.encode()  # columns count bytes
        return text[: text.index(b"[", self.node.value.end_col_offset - self.node.col_offset)].decode()

    def mean_of_all(self) -> str | None:
        """Return the line with `pmean(x.mean(), axis)` as the sum of all elements over their number."""
        match self.node:
            case ast.Call(
                func=f, args=[ast.Call(func=ast.Attribute(value=x, attr="mean"), args=[], keywords=[]), axis]
            ):
                psum = ast.unparse(f).removesuffix("pmean") + "psum"
                text, over = self.source(x), self.source(axis)
                values = text if isinstance(x, _ATOMS) else f"({text})"
                return self.with_text(f"{psum}({values}.sum(), {over}) / {psum}(torch.ones_like({text}).sum(), {over})")
        return None

    def without_call(
        self, rebuild: Callable[[list[str]], str] = operator.itemgetter(0), node: Any = None
    ) -> str | None:  # fmt: skip
        """Return the line with `rebuild(source of each positional argument)`, or the first one, in place of a call.

        `node` is the call, by default the expression.
        """
        node = node or self.node
        if not isinstance(node, ast.Call) or not node.args:
            return None
        new = rebuild([self.source(arg) for arg in node.args])
        return self.replaced((node, new if isinstance(_parse(new)[1], _ATOMS) else f"({new})"))

    def without_call_of_statement(self) -> str | None:
        """Return the line with the first argument of a call in its place, if the call is all of its statement."""
        is_all = re.fullmatch(r"[\w\s,]+=|return", self.with_text("") or "")
        args = getattr(self.node, "args", [])
        return self.with_text(self.source(args[0])) if is_all and args else None

    def out_of_place(self) -> str | None:
        """Return the line `x += y` as `x = x + y`, and `x.add_(y)` as `x = x.add(y)`; `None` for others."""
        match self.node:
            case ast.AugAssign(target=target, op=op, value=value):
                x, y = self.source(target), self.source(value)
                y = y if isinstance(value, _ATOMS) else f"({y})"
                return f"{x} = {ast.unparse(ast.BinOp(ast.Name(x), op, ast.Name(y)))}"
            case ast.Call(func=ast.Attribute(value=ast.Name() | ast.Subscript() as x, attr=attr)):
                if attr.endswith("_") and hasattr(torch.Tensor, attr[:-1]):
                    return f"{self.source(x)} = {self.source(self.node).replace(f'.{attr}(', f'.{attr[:-1]}(', 1)}"
        return None

    def called(self) -> str | None:
        """Return the name of the function that the expression calls; `None` if it is not a call."""
        func = getattr(self.node, "func", None)
        return getattr(func, "id", None) or getattr(func, "attr", None)

    def reduced_by(self) -> str:
        """Return the collective that the expression is the first argument of: "psum"; `""` if there is none."""
        found = re.search(r"\b(psum_scatter|psum|pmean)[\s(]*$", self._preceding)
        return found[1] if found else ""

    def moved_out_of_sum(self, term: Any) -> str | None:
        """Return the line `psum(x + term, axis)` as `psum(x, axis) + term`; `None` where it is not that simple."""
        node, rest, sign = self.node, None, "+"
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            sign = "-" if isinstance(node.op, ast.Sub) else "+"
            rest = self.source(node.left) if term is node.right else None
            if term is node.left and sign == "+":
                rest = self.source(node.right)
        elif isinstance(node, ast.Call) and len(node.args) > 1 and term is node.args[-1] and not node.keywords:
            text = self._code.encode()[node.col_offset : node.args[-2].end_col_offset].decode()
            rest = self.source(node.args[0]) if self.called() in ("add", "sub") else f"{text})"
            sign = "-" if self.called() == "sub" else "+"
        if self._line is None or rest is None or self.reduced_by() == "psum_scatter":  # which changes the shape
            return None
        before, after = self._around(self._line, node)
        call = re.search(r"(^|=|:|\+|\breturn)\s*[\w.]+\($", before)
        if call is None or re.match(r"\s*,[^()]*(\([^()]*\))?[^()]*\)$", after) is None:
            return None
        text = self.source(term)
        return f"{before}{rest}{after} {sign} {text if isinstance(term, _ATOMS) else f'({text})'}".strip()

    def _around(self, line: bytes, node: Any) -> tuple[str, str]:
        return line[: self._start + node.col_offset].decode(), line[self._start + node.end_col_offset :].decode()


def rewritten(site: Site | None, rewrite: Callable[[Expression], str | None]) -> str | None:
    """Return `rewrite(the expression at a place)`; `None` where its line is unknown, or is one of several."""
    at = Expression(site)
    return rewrite(at) if at.is_in_a_line else None


def called_at(site: Site | None) -> str | None:
    """Return the function that the expression at a place calls, as its source has it; `None` if it is not a call."""
    return rewritten(site, lambda at: ast.unparse(at.node.func) if isinstance(at.node, ast.Call) else None)


def _without_group(before: str, after: str) -> tuple[str, str]:
    """Return what is around an expression, without parentheses that only group it."""
    is_group = re.search(r"(?<![\w)\]])\($", before) and after.startswith(")")
    return (before[:-1], after[1:]) if is_group else (before, after)


def _parse(text: str) -> tuple[str, Any]:
    """Return a text, in parentheses unless it is an assignment, and its node."""
    with _parsing:
        try:
            return f"({text})", ast.parse(f"({text})", mode="eval").body
        except SyntaxError:
            return text, ast.parse(text, mode="single").body[0]


def _without_comment(line: bytes) -> bytes:
    with contextlib.suppress(tokenize.TokenError, SyntaxError):  # the statement may continue on the next line
        for token in tokenize.generate_tokens(iter([line.decode()]).__next__):
            if token.type == tokenize.COMMENT:
                return line.decode()[: token.start[1]].rstrip().encode()
    return line


def _parts(node: Any) -> Iterator[Any]:
    """Yield a node and all in it that use the names of the frame, outer ones first."""
    queue = [node]
    for node in queue:
        yield node
        queue += [] if isinstance(node, _SCOPES) else ast.iter_child_nodes(node)


def _attribute(owner: Any, name: str) -> Any:
    static = inspect.getattr_static(owner, name, None)
    if isinstance(owner, torch.nn.Module):
        parts = (owner.named_parameters(recurse=False), owner.named_buffers(recurse=False), owner.named_children())
        return dict(x for part in parts for x in part).get(name, static)
    return getattr(owner, name) if isinstance(static, _FIELDS) else static


def qualified_name(frame: FrameType | None, verb: str) -> str:
    """Return the name by which a frame's code calls a function of the library: `fs.pvary`, by its imports."""
    names = {**frame.f_globals, **frame.f_locals} if frame is not None else {}
    library = sys.modules[PACKAGE]
    by_object = {id(x): name for name, x in names.items() if not name.startswith("_")}
    imported = by_object.get(id(getattr(library, verb)))
    return imported or f"{by_object.get(id(library), 'fs')}.{verb}"
