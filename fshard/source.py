"""The user's line that is being executed, in the user's own words, and how it would read repaired.

Nothing of the user's is run: only names, plain attributes and entries of builtin containers are looked up. Source is
read when it is shown; where there is none, answers are `None` or empty, never an exception.
"""

from __future__ import annotations

import ast
import builtins
import collections
import functools
import inspect
import itertools
import linecache
import os
import re
import sys
import sysconfig
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, MemberDescriptorType
from typing import Any

import torch

PACKAGE = __name__.partition(".")[0]
HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
PROGRAMS = tuple(os.path.join(HERE, name, "") for name in ("models", "recipes"))  # written to be copied: a user's
TORCH = os.path.join(os.path.dirname(torch.__file__), "")
STANDARD = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))
INSTALLED = re.compile(r"[\\/](?:site|dist)-packages[\\/](\w+)")
PLUMBING = ("einops", "functorch", "numpy", "opt_einsum", "optree", "torch", "torchgen")
GENERATED = ("<frozen ", "<eval_with_key", "<__array_function__", "<@", "<attrs generated")  # code without lines


def user_frame(start: FrameType | None = None) -> FrameType | None:
    """The innermost frame of the user's code: not of torch, optree, this library or the standard library.

    `start` is where to look from, outwards: by default the caller. A backward pass on CUDA runs on autograd's threads,
    where no user's frame is: then start at `sys._current_frames()[ident]` of the thread that began it.
    """
    frame: FrameType | None = sys._getframe(1) if start is None else start
    known = _verdicts
    while frame is not None and not known[frame.f_code.co_filename]:
        frame = frame.f_back
    return frame


class _Verdicts(dict[str, bool]):
    """Whether a file is of the user's code, found out once: a loop over a stack must be fast."""

    def __missing__(self, file: str) -> bool:
        if file.startswith((HERE, TORCH, *GENERATED)):
            return self.setdefault(file, file.startswith(PROGRAMS))
        package = INSTALLED.search(file)
        return self.setdefault(file, package[1] not in PLUMBING if package else not file.startswith(STANDARD))


_verdicts = _Verdicts()


@dataclass(frozen=True, slots=True)
class Site:
    """One place in a program: an instruction of a code object. Its `str` is `train.py:14 in loss_fn`."""

    code: CodeType
    lasti: int

    @property
    def columns(self) -> tuple[int | None, int | None, int | None, int | None]:
        """First and last line, from 1, and first and last column, in bytes, of what is executed."""
        nowhere = (None, None, None, None)
        return next(itertools.islice(self.code.co_positions(), self.lasti // 2, None), nowhere)  # 2 bytes each

    @property
    def file(self) -> str:
        """The file's full name."""
        return self.code.co_filename

    @property
    def line(self) -> int:
        """The line, from 1."""
        return self.columns[0] or self.code.co_firstlineno

    @property
    def function(self) -> str:
        """The function's name; that of the function around a comprehension."""
        parts = [p for p in self.code.co_qualname.split(".") if p == "<lambda>" or not p.startswith("<")]
        return parts[-1] if parts else "<module>"

    def __str__(self) -> str:
        name = self.file if self.file.startswith("<") else os.path.basename(self.file)
        get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
        if "ipykernel" in self.file and get_ipython and (shell := get_ipython()):  # a cell is shown by its number
            name = (shell.compile.format_code_name(self.file) or ("", name))[1]
        return f"{name}:{self.line}" + (f" in {self.function}" if self.function != "<module>" else "")


def site(frame: FrameType | None = None) -> Site | None:
    """Where the user's code is now; or where this frame is."""
    frame = user_frame(sys._getframe(1)) if frame is None else frame
    return None if frame is None else Site(frame.f_code, frame.f_lasti)


def quote(site: Site) -> str:
    """The line of the executing expression, without indentation, and ^^^^ under as much of it as is on that line."""
    line, last, column, end = site.columns
    text = "".join(_text(site.file).split("\n")[site.line - 1 : site.line]).rstrip()
    if (shown := text.lstrip()) == "" or column is None:
        return shown
    start = len(text.encode()[:column].decode(errors="ignore"))  # columns are bytes
    inside = text.encode()[: end if line == last else None].decode(errors="ignore")[start:]
    return f"{shown}\n{_drawn(' ', text[len(text) - len(shown) : start])}{_drawn('^', inside)}"


def _drawn(mark: str, under: str) -> str:
    return "".join(c if c == "\t" else mark * (1 + (unicodedata.east_asian_width(c) in "WF")) for c in under)


def _text(file: str, names: dict[str, Any] | None = None) -> str:
    linecache.checkcache(file)
    return "".join(linecache.getlines(file, names)).replace("\r\n", "\n")


# --- the statement that is executed ------------------------------------------------------------------------------

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
            at = self.starts[site.line - 1]
            at += len(self.raw[at:]) - len(self.raw[at:].lstrip())
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
        high -= isinstance(parent, (ast.Call, ast.ClassDef))  # whose last parenthesis is its own
        while match := re.search(rb"(?<!\w)\(\s*\Z", self.raw[low:start]):
            after = re.match(rb"\s*\)(?!\w)", self.raw[end:high])
            if after is None:
                break
            start, end = low + match.start(), end + after.end()
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
        if body := getattr(self.tree, "body", None):  # only the header
            head = self.raw[low : self.span(body[0])[0]].rstrip()
            high = low + len(re.sub(rb"(\s*\n[ \t]*(#.*)?)+\Z", b"", head))
        return self.cut(low, start) + new + self.cut(end, high)

    def is_read(self, node: Any) -> bool:
        return node is self.target or isinstance(getattr(node, "ctx", None), ast.Load)

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


def _dump(text: str) -> str | None:
    try:
        return ast.dump(ast.parse(text, mode="eval"))
    except SyntaxError:
        return None


_parsed = functools.lru_cache(maxsize=8)(ast.parse)


def _executing(frame: FrameType) -> _Statement | None:
    place = Site(frame.f_code, frame.f_lasti)
    text = _text(place.file, frame.f_globals)
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


def _within(roots: Sequence[ast.AST]) -> Iterator[Any]:
    """Nodes that have the same names in sight, the outer ones first."""
    todo = [node for node in roots if node]
    for node in todo:
        yield node
        todo += _outside(node) if isinstance(node, _SCOPES) else _children(node)


def _operand(frame: FrameType, is_it: Is, position: int | None) -> tuple[_Statement, Any] | None:
    """What the frame executes, and the node of it that is the tensor."""
    if (at := _executing(frame)) is None:
        return None
    sides = _children(at.node)[::2] if isinstance(at.node, (ast.BinOp, ast.Compare, ast.AugAssign)) else []
    side = sides[position] if len(sides) == 2 and position is not None else None
    found = (n for n in _within([at.node]) if at.is_read(n) and is_it(_value(n, frame)))
    around = (n for n in _within(at.scope) if at.is_read(n) and is_it(_value(n, frame)))
    node = next(found, None) or side or next(around, None)
    return (at, node) if node else None


def operand(frame: FrameType, is_it: Is, position: int | None = None) -> str | None:
    """The user's own words for a tensor: the part of what the frame executes, or of its statement, that is it.

    `position` is which side of an executing operator it is, if known: 0 or 1, for a side that cannot be looked up.
    """
    found = _operand(frame, is_it, position)
    return found and found[0].words(found[1])


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
