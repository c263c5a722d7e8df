"""The line that is being executed as it would read repaired, in the user's own words.

Which part of the executing expression is the tensor in question, and the statement written anew around it. Nothing of
the user's is run: only names, attributes that are plain data and entries of builtin containers are looked up.
"""

from __future__ import annotations

import ast
import builtins
import collections
import functools
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, MemberDescriptorType
from typing import Any

import torch

from fshard._callsite import PACKAGE, Site, text_of

Span = tuple[int, int]  # bytes of a file
Is = Callable[[object], bool]
_BODIES = (ast.stmt, ast.excepthandler, ast.match_case)
_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_TARGETS = (ast.Attribute, ast.Subscript, ast.Starred, ast.Tuple, ast.List)


class _Statement:
    """The smallest statement around what a site executes, `tree`, and the expression it executes, `node`, if known."""

    def __init__(self, text: str, module: ast.Module, site: Site) -> None:
        self.raw = text.encode()
        self.starts = [0, *(m.end() for m in re.finditer(b"\n", self.raw))]
        line, last, column, end = site.columns
        if line is None or last is None or column is None or end is None:  # Python was told to forget columns
            at = len(self.raw) - len(self.raw[self.starts[site.line - 1] :].lstrip())
            span = at, at
        else:
            span = self.starts[line - 1] + column, self.starts[last - 1] + end
        spans = [(self.span(n), n) for n in ast.walk(module) if isinstance(n, ast.stmt)]
        around = [(b - a, n) for (a, b), n in spans if a <= span[0] and span[1] <= b]
        self.tree: Any = min(around, key=lambda found: found[0])[1]
        nodes = [self.tree]
        self.parents: dict[Any, Any] = {}
        for node in nodes:
            self.parents.update(dict.fromkeys(_children(node), node))
            nodes += _children(node)
        exact = [n for n in nodes if isinstance(n, (ast.expr, ast.AugAssign)) and self.span(n) == span]
        chained = [n for n in nodes if isinstance(f := getattr(n, "func", n), ast.Attribute)  # over lines: f(x)\n.g(y)
                   and (self.span(f)[1] - len(f.attr), self.span(n)[1]) == span]  # fmt: skip
        self.node: Any = next(iter(exact + chained), None)
        self.target = getattr(self.node, "target", None)  # of x += y, which is read too
        self.scope: list[Any] = [self.tree]  # the whole of what has the same names in sight
        child = self.node
        while child in self.parents and self.scope == [self.tree]:
            parent = self.parents[child]
            if isinstance(parent, _SCOPES) and child not in _outside(parent):
                self.scope = [n for n in _children(parent) if n not in _outside(parent)]
            child = parent

    def span(self, node: Any) -> Span:
        """Where a node stands; a function or class begins at its decorators."""
        line = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        return self.starts[line - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def cut(self, start: int, end: int) -> str:
        """A part of the statement, its indentation taken off, but not off the insides of strings."""
        indent = re.findall("^[ \t]*", self.raw[self.starts[self.tree.lineno - 1] :].decode())[0]
        strings = [n for n in ast.walk(self.tree) if isinstance(n, (ast.Constant, ast.JoinedStr))]
        inside = {line for n in strings for line in range(n.lineno, n.end_lineno or 0)}
        lines, first = self.raw[start:end].decode().split("\n"), self.raw.count(b"\n", 0, start)
        return "\n".join(x.removeprefix(indent) if i and first + i not in inside else x for i, x in enumerate(lines))

    def words(self, node: ast.AST) -> str:
        """An expression's text, fit to be an argument of a call."""
        bare = isinstance(node, (ast.NamedExpr, ast.Yield, ast.YieldFrom))
        return f"({self.cut(*self.span(node))})" if bare else self.cut(*self.span(node))

    def grouped(self, node: ast.AST) -> Span:
        """Where a node stands, with the parentheses that only group it, unless words would be joined without them."""
        (start, end), parent = self.span(node), self.parents[node]
        low, high = self.span(parent) if isinstance(parent, (ast.expr, ast.stmt)) else (start, end)
        while before := re.compile(rb"(?<!\w)\(\s*\Z").search(self.raw, low, start):
            after = re.compile(rb"\s*\)(?!\w)").match(self.raw, end)
            if after is None or after.end() > high:
                break
            start, end = before.start(), after.end()
        return start, end

    def rewritten(self, node: ast.AST, new: str) -> str:
        """The statement with other words for a node, in parentheses where they would mean something else without."""
        top, (start, end) = node, self.grouped(node)
        while isinstance(self.parents[top], ast.expr):
            top = self.parents[top]
        low, high = self.span(top)
        before, after = self.cut(low, start), self.cut(end, high)
        same = _dump(f"({before}{new}{after})") == _dump(f"({before}({new}){after})")
        new = new if same and ("\n" not in new or _dump(new)) else f"({new})"
        low, high = self.span(self.tree)
        cases = [case.pattern for case in getattr(self.tree, "cases", ())]
        if body := getattr(self.tree, "body", cases):  # only the header
            head = self.raw[low : self.span(body[0])[0]].rstrip().removesuffix(b"case" if cases else b"")
            high = low + len(re.sub(rb"(\s*\n[ \t]*(#.*)?)+\Z", b"", head))
        return self.cut(low, start) + new + self.cut(end, high)

    def is_assigned(self, node: Any) -> bool:
        """Whether it is (a part of) what the statement assigns to: other words there mean another target."""
        while isinstance(self.parents.get(node), _TARGETS) and node is not getattr(self.parents[node], "slice", None):
            node = self.parents[node]
        return isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))


def _children(node: ast.AST) -> list[Any]:
    inner = [x for x in ast.iter_child_nodes(node) if not isinstance(x, _BODIES)]
    return [y for x in inner for y in (ast.iter_child_nodes(x) if isinstance(x, ast.comprehension) else [x])]


def _outside(scope: Any) -> list[Any]:
    """What stands in a lambda or comprehension and is evaluated around it: defaults, the first iterable."""
    return [scope.args] if isinstance(scope, ast.Lambda) else [scope.generators[0].iter]


_parsing = threading.Lock()  # in Python 3.11 parsing counts its depth for all threads at once, and loses count


def _dump(text: str) -> str | None:
    with _parsing:
        try:
            return ast.dump(ast.parse(text, mode="eval"))
        except SyntaxError:
            return None


@functools.lru_cache(maxsize=8)
def _parsed(text: str, file: str) -> ast.Module:
    with _parsing:
        return ast.parse(text, file)


def _executing(frame: FrameType) -> _Statement | None:
    place = Site(frame.f_code, frame.f_lasti)
    text = text_of(place.file, frame.f_globals)
    try:  # the file may be no Python, or another than was run
        return _Statement(text, _parsed(text, place.file), place)
    except (SyntaxError, ValueError, IndexError, RecursionError, MemoryError):
        return None


# --- which part of it is the tensor ------------------------------------------------------------------------------

_NOTHING = object()
_FIELDS = (MemberDescriptorType, type(vars(collections.namedtuple("_", "x"))["x"]))


def _value(node: Any, frame: FrameType) -> Any:
    """What an expression is, if that can be looked up without running anything; else `_NOTHING`."""
    match node:
        case ast.Constant():
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(n))):
            return -n
        case ast.Name():
            spaces = (frame.f_locals, frame.f_globals, vars(builtins))
            return next((space[node.id] for space in spaces if node.id in space), _NOTHING)
        case ast.Attribute():
            return _attribute(_value(node.value, frame), node.attr)
        case ast.Subscript():
            of, key = _value(node.value, frame), _value(node.slice, frame)
            if getattr(type(of), "__getitem__", None) is dict.__getitem__:
                return of[key] if isinstance(key, (int, str)) and key in of else _NOTHING
            if getattr(type(of), "__getitem__", None) in (list.__getitem__, tuple.__getitem__):
                return of[key] if type(key) is int and -len(of) <= key < len(of) else _NOTHING
    return _NOTHING


def _attribute(of: Any, name: str) -> Any:
    found = inspect.getattr_static(of, name, _NOTHING)
    if isinstance(of, torch.nn.Module) and found is _NOTHING:
        return {**of._parameters, **of._buffers, **of._modules}.get(name, _NOTHING)
    if isinstance(found, _FIELDS):
        return getattr(of, name, _NOTHING)
    return _NOTHING if hasattr(type(found), "__get__") else found


def _read(at: _Statement, roots: Sequence[Any]) -> Iterator[Any]:
    """What may be looked up, of nodes that have the same names in sight, the outer ones first."""
    todo = [node for node in roots if node]
    for node in todo:
        todo += _outside(node) if isinstance(node, _SCOPES) else _children(node)
        if node is at.target or isinstance(getattr(node, "ctx", None), ast.Load):
            yield node


def _operand(frame: FrameType, is_it: Is, position: int | None) -> tuple[_Statement, Any] | None:
    """What the frame executes, and the node of it that is the tensor."""
    if (at := _executing(frame)) is None:
        return None
    sides = _children(at.node)[::2] if isinstance(at.node, (ast.BinOp, ast.Compare, ast.AugAssign)) else []
    side = sides[position] if len(sides) == 2 and position is not None else None
    found, around = ((n for n in _read(at, roots) if is_it(_value(n, frame))) for roots in ([at.node], at.scope))
    node = next(found, None) or side or next(around, None)
    return (at, node) if node else None


def operand(frame: FrameType, is_it: Is, position: int | None = None) -> str | None:
    """The user's own words for a tensor: the part of what the frame executes, or of its statement, that is it.

    `position` is which side of an executing operator it is, if known: 0 or 1, for a side that cannot be looked up.
    """
    found = _operand(frame, is_it, position)
    return found and found[0].words(found[1])


def value(frame: FrameType, is_it: Is, position: int | None = None) -> Any:
    """The user's own object for a tensor; `None` where it has no name."""
    found = _operand(frame, is_it, position)
    known = _value(found[1], frame) if found else None
    return None if known is _NOTHING else known


def repair(frame: FrameType, is_it: Is, wrap: Callable[[str], str], position: int | None = None) -> str | None:
    """The statement that the frame executes (of a compound one the header), with the operand rewritten by `wrap`.

    `wrap` is given a text that can be an argument: `lambda x: f'fs.pvary({x}, "model")'`. `position` as in `operand`.
    """
    if (found := _operand(frame, is_it, position)) is None:
        return None
    (at, node), new = found, wrap(found[0].words(found[1]))
    if node is not at.target:
        return None if at.is_assigned(node) else at.rewritten(node, new)
    (start, end), (low, high) = at.span(node), at.grouped(at.node.value)  # x += y  ->  x = f(x) + y
    sign, value = at.cut(end, low).strip().removesuffix("="), at.cut(low, high)
    plain = _dump(f"(x {sign} {value})") == _dump(f"(x {sign} ({value}))")
    return f"{at.cut(start, end)} = {new} {sign} {value if plain else f'({value})'}"


def replace_call(frame: FrameType, by: Callable[[list[str]], str]) -> str | None:
    """The statement with `by(texts of its positional arguments)` for the executing call: `h = psum(y)` is `h = y`."""
    at = _executing(frame)
    if at is None or not isinstance(at.node, ast.Call) or not at.node.args:
        return None
    return at.rewritten(at.node, by([at.words(arg) for arg in at.node.args]))


def summed_in(frame: FrameType, verbs: Sequence[str]) -> bool:
    """Whether what the frame executes is, in the same statement, the first argument of one of these calls."""
    at = _executing(frame)
    return at is not None and _call_around(at, verbs) is not None


def _call_around(at: _Statement, verbs: Sequence[str]) -> Any:
    parent = at.parents.get(at.node)
    called = getattr(parent, "func", None)
    name = getattr(called, "attr", getattr(called, "id", None))
    return parent if isinstance(parent, ast.Call) and name in verbs and parent.args[0] is at.node else None


def move_out(frame: FrameType, is_it: Is, verbs: Sequence[str], position: int | None) -> str | None:
    """The statement with a term taken out of the call around it: `psum(y + b, "model")` is `psum(y, "model") + b`."""
    if (found := _operand(frame, is_it, position)) is None or not isinstance(found[0].node, ast.BinOp):
        return None
    at, term = found
    around, node = _call_around(at, verbs), at.node
    if around is None or not isinstance(node.op, (ast.Add, ast.Sub)):
        return None
    if term is not node.right and term is not node.left:
        return None
    rest = node.left if term is node.right else node.right
    (start, end), (low, high) = at.span(around), at.span(node)
    call = at.cut(start, low) + at.words(rest) + at.cut(high, end)
    sign, first = "+" if isinstance(node.op, ast.Add) else "-", term is node.left and isinstance(node.op, ast.Sub)
    return at.rewritten(around, f"{at.words(term)} - {call}" if first else f"{call} {sign} {at.words(term)}")


def name_of(frame: FrameType, verb: str) -> str:
    """How this frame calls `pvary`, or `nn.dropout`: by what it has imported, else `fs.pvary`."""
    parts, names = verb.split("."), {**frame.f_globals, **frame.f_locals}
    chain: list[Any] = [sys.modules.get(PACKAGE)]
    for part in parts:
        chain.append(getattr(chain[-1], part, None))
    for depth, target in reversed([(i, x) for i, x in enumerate(chain) if x is not None]):
        for name, value in names.items():
            if value is target and not name.startswith("_"):
                return ".".join([name, *parts[depth:]])
    return f"fs.{verb}"
