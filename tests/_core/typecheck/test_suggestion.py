"""The source text of a tensor in the executing expression, and the line rewritten around it."""

from __future__ import annotations

import collections
import doctest
import marshal
import subprocess
import sys
from types import FrameType
from typing import Any

import pytest
import torch

import fshard
import fshard as fs
from fshard import pvary as as_imported
from fshard._core.callsite import Site
from fshard._core.typecheck.suggestion import Expression, qualified_name
from tests._core.typecheck.probe import Probe, run, run_without_source, set_source

X, Y, W = Probe(), Probe(), Probe()
Batch = collections.namedtuple("Batch", "x y")


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Probe) -> None:
        self.x = x


class RunsCode:
    """An object whose lookups run code, which fails."""

    plain = X

    @property
    def x(self) -> Probe:
        raise AssertionError("a property was run")

    def __getattr__(self, name: str) -> Probe:
        raise AssertionError("__getattr__ was run")

    def __getitem__(self, key: Any) -> Probe:
        raise AssertionError("__getitem__ was run")


class DictWithMissing(dict[str, Any]):
    def __missing__(self, key: str) -> Probe:
        raise AssertionError("__missing__ was run")


def values() -> dict[str, Any]:
    layer = torch.nn.Module()
    layer.w = torch.nn.Parameter(torch.zeros(1))
    layer.x = X
    return {
        "x": X, "y": Y, "w": W, "p": {"up": X, "blocks": [Y, X], 3: X}, "i": 1, "k": "up", "batch": Batch(X, Y),
        "slotted": Slotted(X), "runs_code": RunsCode(), "missing": DictWithMissing(), "f": lambda v: Probe(),
        "layer": layer,
    }  # fmt: skip


def is_x(value: object) -> bool:
    return value is X


def pvary(text: str) -> str:
    return f'fs.pvary({text}, "m")'


def executing(frame: FrameType) -> Expression:
    return Expression(Site(frame.f_code, frame.f_lasti), frame)


def replaced(frame: FrameType, is_it: Any = is_x, position: int = -1) -> tuple[str | None, str | None]:
    """The source text of a tensor, and the line with pvary of it."""
    expression = executing(frame)
    node = expression.find(is_it, position)
    if node is None:
        return None, None
    return expression.source(node), expression.replaced((node, pvary(expression.source(node))))


# program, source text of X, line with pvary of X
OPERANDS = [
    ("h = x @ w", "x", 'h = fs.pvary(x, "m") @ w'),
    ("h = w @ x  # why", "x", 'h = w @ fs.pvary(x, "m")'),
    ("h = w @ p['#'] if 0 else w @ x  # 'why'", "x", "h = w @ p['#'] if 0 else w @ fs.pvary(x, \"m\")"),
    ("h = f(x @ p['up'])", "x", "h = f(fs.pvary(x, \"m\") @ p['up'])"),
    ("h = y @ p['up']", "p['up']", "h = y @ fs.pvary(p['up'], \"m\")"),
    ("h = y @ p['blocks'][i]", "p['blocks'][i]", "h = y @ fs.pvary(p['blocks'][i], \"m\")"),
    ("h = y @ p['blocks'][-1]", "p['blocks'][-1]", "h = y @ fs.pvary(p['blocks'][-1], \"m\")"),
    ("h = y @ p[k]", "p[k]", 'h = y @ fs.pvary(p[k], "m")'),
    ("h = y @ p[3]", "p[3]", 'h = y @ fs.pvary(p[3], "m")'),
    ("h = y @ batch.x", "batch.x", 'h = y @ fs.pvary(batch.x, "m")'),
    ("h = y @ slotted.x", "slotted.x", 'h = y @ fs.pvary(slotted.x, "m")'),
    ("h = y @ layer.x", "layer.x", 'h = y @ fs.pvary(layer.x, "m")'),
    ("h = y @ runs_code.plain", "runs_code.plain", 'h = y @ fs.pvary(runs_code.plain, "m")'),
    ("h = y.method(x)", "x", 'h = y.method(fs.pvary(x, "m"))'),
    ("h = x.method(y)", "x", 'h = fs.pvary(x, "m").method(y)'),
    ("h = [y][0](x)", "x", 'h = [y][0](fs.pvary(x, "m"))'),
    ("h = y.method(other=x)", "x", 'h = y.method(other=fs.pvary(x, "m"))'),
    ("h = y(*[w, x])", "x", 'h = y(*[w, fs.pvary(x, "m")])'),
    ("h = (x) @ w", "x", 'h = fs.pvary(x, "m") @ w'),
    ("h = w.method((x))", "x", 'h = w.method(fs.pvary(x, "m"))'),
    ("h = -x", "x", 'h = -fs.pvary(x, "m")'),
    ("def g():\n    return(x)@ w\ng()", "x", 'return(fs.pvary(x, "m"))@ w'),
    ("h = y + w; h = x + w; i = 3", "x", 'h = y + w; h = fs.pvary(x, "m") + w; i = 3'),
    ("y += x", "x", 'y += fs.pvary(x, "m")'),
    ("x += w", "x", None),  # x is assigned as well
    ("x[0] = w", "x", None),  # pvary(x)[0] = w would assign to another tensor
    ("h = x[0] + y", "x", 'h = fs.pvary(x, "m")[0] + y'),  # the operand is x[0], a view of x
    ("a = f(x); h = w + y", None, None),
    ("h = [t @ w for t in [x]]", "t", 'h = [fs.pvary(t, "m") @ w for t in [x]]'),
    ("h = {t @ x for t in [w]}", "x", 'h = {t @ fs.pvary(x, "m") for t in [w]}'),
    ("fg = (lambda t: t @ w), (lambda t: t + w); fg[1](x)", "t",
     'fg = (lambda t: t @ w), (lambda t: fs.pvary(t, "m") + w); fg[1](x)'),
    ("h = y.method((lambda x: x, [x for x in [1]]))", None, None),  # these x are other names
    ("if x > w:\n    pass", "x", 'if fs.pvary(x, "m") > w:'),
    ("if i > 5:\n    pass\nelif x > w: pass", "x", 'elif fs.pvary(x, "m") > w: pass'),
    ("if 1:\n    h = f(\n        x @ w,\n    )", "x", 'fs.pvary(x, "m") @ w,'),
    ("if 1:\n    h = f(\n        x  # in\n        @ w,\n    )", "x", None),
    ("naïve = 'жжж' and x @ w, 'é'", "x", "naïve = 'жжж' and fs.pvary(x, \"m\") @ w, 'é'"),
    ("h = y(runs_code.x, runs_code[0], runs_code.y, missing['a']) if 0 else y @ w", None, None),
    ("h = y @ (w if 1 else runs_code.x + runs_code[0] + runs_code.y + missing['a'])", None, None),
    ("h = y @ (w if 1 else p[9] + p['blocks'][9] + p['blocks']['a'] + p[y] + what + what.x)", None, None),
    ("h = y @ (w if 1 else layer.w.T + layer.v + layer.w[0])", None, None),
    ("def g(x):\n    return x @ w\ng(p['up'])", "x", 'return fs.pvary(x, "m") @ w'),
]  # fmt: skip


@pytest.mark.parametrize(("program", "text", "line"), OPERANDS, ids=[program for program, *_ in OPERANDS])
def test_operand_is_named_and_its_line_rewritten(program: str, text: str | None, line: str | None) -> None:
    assert run(program, values(), replaced) == (text, line)


# program, position of an operand that cannot be looked up, line with pvary of it
SIDES = [
    ("h = (x + w) @ y", 0, 'h = fs.pvary(x + w, "m") @ y'),
    ("h = y @ (x + w)", 1, 'h = y @ fs.pvary(x + w, "m")'),
    ("h = f(x) @ f(f(w)) + y", 0, 'h = fs.pvary(f(x) @ f(f(w)), "m") + y'),
    ("h = (f(x)\n     + f(w)) @ y", 0, None),  # takes two lines
    ("h = (z := f(x)) @ y", 0, 'h = fs.pvary(z := f(x), "m") @ y'),
    ("h = y.method(f(x))", 0, None),  # a call has no sides
]


@pytest.mark.parametrize(("program", "position", "line"), SIDES, ids=[program for program, *_ in SIDES])
def test_operand_that_cannot_be_looked_up_is_found_by_position(program: str, position: int, line: str | None) -> None:
    assert run(program, values(), lambda frame: replaced(frame, lambda v: False, position)[1]) == line


CALLS = [
    ("h = x(y, 'm')", "h = y"),
    ("h = f(x(y, 'm')).silent_method(i)", "h = f(y).silent_method(i)"),
    ("h = x(i + 1, 'm').silent_method(i)", "h = (i + 1).silent_method(i)"),
    ("h = not x(i if i else 3, 'm') and i", "h = not (i if i else 3) and i"),
    ("h = x(\n    f(y)\n    , 'm',\n)", None),
    ("h = (1, x(y, *[w]))", "h = (1, y)"),
    ("if x(y):\n    pass", "if y:"),
    ("h = x()", None),
    ("h = x + y", None),
]


@pytest.mark.parametrize(("program", "line"), CALLS, ids=[program for program, _ in CALLS])
def test_call_is_replaced_by_its_argument(program: str, line: str | None) -> None:
    def without_call(frame: FrameType) -> str | None:
        expression = executing(frame)
        return expression.without_call()

    assert run(program, values(), without_call) == line


# program, what reduces the executing expression, line with X after the sum
SUMS = [
    ("h = psum(y @ w + x, 'm')", "psum", "h = psum(y @ w, 'm') + x"),
    ("h = psum(x + y @ w, ('a', 'b'))  # [B, D]", "psum", "h = psum(y @ w, ('a', 'b')) + x"),
    ("h = i * psum(y + x, 'm')", "psum", None),  # i * psum(y, 'm') + x is another value
    ("h = psum(y + x, 'm').abs()", "psum", None),
    ("h = psum((y + x), 'm')", "psum", None),
    ("h = psum(\n    y + x,\n    'm',\n)", "psum", None),
    ("h = psum(y.method(x), 'm')", "psum", None),
    ("h = psum(y - x, 'm')", "psum", "h = psum(y, 'm') - x"),
    ("h = psum(x - y, 'm')", "psum", None),
    ("h = psum_scatter(y + x, 'm')", "psum_scatter", None),  # x has another shape than the sum
    ("h = y + x", "", None),
    ("h = f(y + x)", "", None),
]


@pytest.mark.parametrize(("program", "verb", "line"), SUMS, ids=[program for program, *_ in SUMS])
def test_term_is_moved_out_of_a_sum(program: str, verb: str, line: str | None) -> None:
    def moved(frame: FrameType) -> Any:
        expression = executing(frame)
        return expression.reduced_by(), expression.moved_out_of_sum(expression.find(is_x))

    psum = lambda v, axis: torch.ones(())  # noqa: E731
    assert run(program, {**values(), "psum": psum, "psum_scatter": psum}, moved) == (verb, line)


# --- missing, edited and unusual sources ----------------------------------------------------------------------


@pytest.mark.parametrize("file", ["<stdin>", "<string>", "/nowhere/train.py", "train.py"])
def test_missing_source_gives_no_expression(file: str) -> None:
    assert run_without_source("h = x + w\n", values(), executing, file).node is None


@pytest.mark.parametrize("text", ["", "1 +\n", "\n", "\x00", "h = 1\n", "if 1:\n  if"])
def test_edited_source_gives_no_operand(text: str) -> None:
    file = f"<edited {text!r}>"
    set_source(file, text)
    program = "\n\n\nh = 7 and x + w\n" if text != "h = 1\n" else "h = x + w"
    assert run_without_source(program, values(), replaced, file) == (None, None)


def test_doctest_has_source() -> None:
    test = doctest.DocTestParser().get_doctest(">>> h = x + w\n", values(), "sample", None, 0)
    Probe.ask = staticmethod(replaced)  # type: ignore[assignment]
    doctest.DocTestRunner(verbose=False).run(test, clear_globs=False)
    assert Probe.answer == ("x", 'h = fs.pvary(x, "m") + w')


def test_code_without_columns_gives_no_expression() -> None:
    text = "h = y @ x\n"
    compiled = "import marshal, sys; sys.stdout.buffer.write(marshal.dumps(compile(sys.argv[1], 'train', 'exec')))"
    command = [sys.executable, "-X", "no_debug_ranges", "-c", compiled, text]
    code = marshal.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert next(code.co_positions())[2] is None
    set_source("train", text)
    Probe.ask, Probe.answer = staticmethod(executing), X  # type: ignore[assignment]
    exec(code, values())
    assert Probe.answer.node is None


# --- names of functions of the library ------------------------------------------------------------------------


def test_function_is_named_as_it_was_imported() -> None:
    assert qualified_name(sys._getframe(), "pvary") == "as_imported"
    assert qualified_name(sys._getframe(), "psum") == "fs.psum" or fshard is fs
    assert qualified_name(None, "psum") == "fs.psum"
    assert as_imported is fs.pvary


NAMES = [
    ("import fshard", "pvary", "fshard.pvary"),
    ("import fshard as fs", "pvary", "fs.pvary"),
    ("from fshard import pvary", "pvary", "pvary"),
    ("from fshard import pvary as _p", "pvary", "fs.pvary"),
    ("import fshard as F\nfs = 3", "psum", "F.psum"),
    ("pass", "pvary", "fs.pvary"),
]


@pytest.mark.parametrize(("imports", "verb", "name"), NAMES)
def test_name_of_function_follows_the_imports(imports: str, verb: str, name: str) -> None:
    program = f"{imports}\nx + 1"
    for text in (program, "def g():\n " + program.replace("\n", "\n ") + "\ng()"):
        assert run(text, values(), lambda frame: qualified_name(frame, verb)) == name
