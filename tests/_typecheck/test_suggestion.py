"""The user's line, its operand in the user's words, and the line repaired: found from deep inside torch."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import doctest
import functools
import linecache
import marshal
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import optree
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fshard
import fshard as fs
from fshard import _callsite as source
from fshard import pvary as as_imported
from fshard._typecheck import suggestion as repair
from fshard.models import gpt2


class Probe:
    """A value whose operators and calls ask about the user's frame: `seen` is the last answer."""

    ask: Callable[[FrameType], Any] = staticmethod(lambda frame: None)  # type: ignore[assignment]
    seen: Any = None

    def look(self, *_: Any) -> Probe:
        frame = source.user_frame(sys._getframe(2))
        assert frame is not None
        Probe.seen = Probe.ask(frame)
        return Probe()

    def plainly(self, other: Any) -> Probe:
        return self.look(other)

    def quietly(self, other: Any) -> Probe:
        return Probe()


for _name in ["add", "matmul", "mul", "gt", "iadd", "imul", "getitem", "neg", "call"]:
    setattr(Probe, f"__{_name}__", lambda self, *args: self.look(*args))
Probe.__setitem__ = lambda self, *args: self.look(*args) and None  # type: ignore[attr-defined]


def run(text: str, names: dict[str, Any], ask: Callable[[FrameType], Any]) -> Any:
    """Execute a program that has source; what `ask` said of the frame at the last operation of a `Probe`."""
    run.count += 1  # type: ignore[attr-defined]
    file = f"<program {run.count}>"  # type: ignore[attr-defined]
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    Probe.ask, Probe.seen = staticmethod(ask), None  # type: ignore[assignment]
    exec(compile(text, file, "exec"), {"__builtins__": __builtins__, "p": None, **names})
    return Probe.seen


run.count = 0  # type: ignore[attr-defined]


def pvary(text: str) -> str:
    return f'fs.pvary({text}, "m")'


X, Y, W = Probe(), Probe(), Probe()
Batch = collections.namedtuple("Batch", "x y")


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Probe) -> None:
        self.x = x


class Refuses:
    """Whatever would run anything of the user's fails."""

    plain = X

    @property
    def x(self) -> Probe:
        raise AssertionError("a property was run")

    def __getattr__(self, name: str) -> Probe:
        raise AssertionError("__getattr__ was run")

    def __getitem__(self, key: Any) -> Probe:
        raise AssertionError("__getitem__ was run")


class Odd(dict[str, Any]):
    def __missing__(self, key: str) -> Probe:
        raise AssertionError("__missing__ was run")


def values() -> dict[str, Any]:
    layer = torch.nn.Module()
    layer.w = torch.nn.Parameter(torch.zeros(1))
    return {
        "x": X, "y": Y, "w": W, "p": {"up": X, "blocks": [Y, X], 3: X}, "i": 1, "k": "up", "batch": Batch(X, Y),
        "slotted": Slotted(X), "refuses": Refuses(), "odd": Odd(), "f": lambda v: Probe(), "layer": layer,
    }  # fmt: skip


def is_x(value: object) -> bool:
    return value is X


# program, its words for X, the repaired statement
REPAIRS = [
    ("h = x @ w", "x", 'h = fs.pvary(x, "m") @ w'),
    ("h = w @ x  # why", "x", 'h = w @ fs.pvary(x, "m")'),
    ("h = f(x @ p['up'])", "x", "h = f(fs.pvary(x, \"m\") @ p['up'])"),
    ("h = y @ p['up']", "p['up']", "h = y @ fs.pvary(p['up'], \"m\")"),
    ("h = y @ p['blocks'][i]", "p['blocks'][i]", "h = y @ fs.pvary(p['blocks'][i], \"m\")"),
    ("h = y @ p['blocks'][-1]", "p['blocks'][-1]", "h = y @ fs.pvary(p['blocks'][-1], \"m\")"),
    ("h = y @ p[k]", "p[k]", 'h = y @ fs.pvary(p[k], "m")'),
    ("h = y @ p[3]", "p[3]", 'h = y @ fs.pvary(p[3], "m")'),
    ("h = y @ batch.x", "batch.x", 'h = y @ fs.pvary(batch.x, "m")'),
    ("h = y @ slotted.x", "slotted.x", 'h = y @ fs.pvary(slotted.x, "m")'),
    ("h = y @ refuses.plain", "refuses.plain", 'h = y @ fs.pvary(refuses.plain, "m")'),
    ("h = y.plainly(x)", "x", 'h = y.plainly(fs.pvary(x, "m"))'),
    ("h = x.plainly(y)", "x", 'h = fs.pvary(x, "m").plainly(y)'),
    ("h = [y][0](x)", "x", 'h = [y][0](fs.pvary(x, "m"))'),
    ("h = y.plainly(other=x)", "x", 'h = y.plainly(other=fs.pvary(x, "m"))'),
    ("h = y(*[w, x])", "x", 'h = y(*[w, fs.pvary(x, "m")])'),
    ("h = (x) @ w", "x", 'h = fs.pvary(x, "m") @ w'),
    ("h = w.plainly((x))", "x", 'h = w.plainly(fs.pvary(x, "m"))'),
    ("h = -x", "x", 'h = -fs.pvary(x, "m")'),
    ("def g():\n    return(x)@ w\ng()", "x", 'return(fs.pvary(x, "m"))@ w'),
    ("h = y + w; h = x + w; i = 3", "x", 'h = fs.pvary(x, "m") + w'),
    ("h = x > w", "x", 'h = fs.pvary(x, "m") > w'),
    ("x += w", "x", 'x = fs.pvary(x, "m") + w'),
    ("y += x", "x", 'y += fs.pvary(x, "m")'),
    ("x *= y.look and w or y", "x", 'x = fs.pvary(x, "m") * (y.look and w or y)'),
    ("p['up'] += w", "p['up']", "p['up'] = fs.pvary(p['up'], \"m\") + w"),
    ("y[0] = x", "x", 'y[0] = fs.pvary(x, "m")'),
    ("y[x] = w", "x", 'y[fs.pvary(x, "m")] = w'),
    ("x[0] = w", "x", None),  # pvary(x)[0] = w would assign to another tensor
    ("h = x[0] + y", "x", 'h = fs.pvary(x, "m")[0] + y'),  # the operand is x[0], made from x
    ("a = f(x); h = w + y", None, None),
    ("h = [t @ w for t in [x]]", "t", 'h = [fs.pvary(t, "m") @ w for t in [x]]'),
    ("h = {t @ x for t in [w]}", "x", 'h = {t @ fs.pvary(x, "m") for t in [w]}'),
    ("h = {1: t @ w for t in [x]}", "t", 'h = {1: fs.pvary(t, "m") @ w for t in [x]}'),
    ("h = list(t @ w for t in (x,))", "t", 'h = list(fs.pvary(t, "m") @ w for t in (x,))'),
    ("fg = (lambda t: t @ w), (lambda t: t + w); fg[1](x)", "t",
     'fg = (lambda t: t @ w), (lambda t: fs.pvary(t, "m") + w)'),
    ("fg = (lambda t: t @ w), (lambda t: t @ w); fg[0](x)", "t",
     'fg = (lambda t: fs.pvary(t, "m") @ w), (lambda t: t @ w)'),
    ("h = f(lambda x: x) and f([x for x in [1]]) and w @ x", "x",
     'h = f(lambda x: x) and f([x for x in [1]]) and w @ fs.pvary(x, "m")'),  # the other x are other names
    ("h = f(lambda x: x) and w @ y", None, None),
    ("if x > w:  # compare\n    pass", "x", 'if fs.pvary(x, "m") > w:  # compare'),
    ("if i > 5:\n    pass\nelif x > w: pass", "x", 'elif fs.pvary(x, "m") > w:'),
    ("for t in [1,\n    x @ w]:\n    # then\n\n    pass", "x", 'for t in [1,\n    fs.pvary(x, "m") @ w]:'),
    ("match x @ w:\n    case _: pass", "x", 'match fs.pvary(x, "m") @ w:'),
    ("@f\n@x\ndef g(v): pass", "x", '@f\n@fs.pvary(x, "m")\ndef g(v):'),
    ("if 1:\n    h = f(\n        x  # in\n        @ w,\n    )", "x", 'h = f(\n    fs.pvary(x, "m")  # in\n    @ w,\n)'),
    ('if 1:\n    h = f("""\n    a""" and x @ w)', "x", 'h = f("""\n    a""" and fs.pvary(x, "m") @ w)'),
    ("naïve = 'жжж' and x @ w, 'é'", "x", "naïve = 'жжж' and fs.pvary(x, \"m\") @ w, 'é'"),
    ("h = (f(y)\n     .plainly(w)\n     .plainly(x))", "x",
     'h = (f(y)\n     .plainly(w)\n     .plainly(fs.pvary(x, "m")))'),
    ("h = y @ w if 1 else refuses.x + refuses[0] + refuses.y + odd['a']", None, None),
    ("h = y @ w if 1 else p[9] + p['blocks'][9] + p['blocks']['a'] + p[y] + what + what.x", None, None),
    ("h = y @ w if 1 else layer.w.T + layer.v + layer.w[0]", None, None),
    ("def g(x):\n    return x @ w\ng(p['up'])", "x", 'return fs.pvary(x, "m") @ w'),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words", "repaired"), REPAIRS, ids=[text for text, *_ in REPAIRS])
def test_an_operand_is_named_and_repaired(text: str, words: str | None, repaired: str | None) -> None:
    def ask(frame: FrameType) -> Any:
        return repair.operand(frame, is_x), repair.repair(frame, is_x, pvary)

    assert run(text, values(), ask) == (words, repaired)


# program, position, the repaired statement: an operand that cannot be looked up
SIDES = [
    ("h = (x + w) @ y", 0, 'h = fs.pvary(x + w, "m") @ y'),
    ("h = y @ (x + w)", 1, 'h = y @ fs.pvary(x + w, "m")'),
    ("h = f(x) @ f(f(w)) + y", 0, 'h = fs.pvary(f(x) @ f(f(w)), "m") + y'),
    ("h = (f(x)\n     + f(w)) @ y", 0, 'h = fs.pvary(f(x)\n     + f(w), "m") @ y'),
    ("h = (z := f(x)) @ y", 0, 'h = fs.pvary((z := f(x)), "m") @ y'),
    ("y += f(x) if x else y", 1, 'y += fs.pvary(f(x) if x else y, "m")'),
    ("h = f(x) > y", 0, 'h = fs.pvary(f(x), "m") > y'),
    ("h = y.plainly(f(x))", 0, None),  # which argument that is is not known
]


@pytest.mark.parametrize(("text", "position", "repaired"), SIDES, ids=[text for text, *_ in SIDES])
def test_a_side_that_cannot_be_looked_up_is_found_by_position(text: str, position: int, repaired: str | None) -> None:
    assert run(text, values(), lambda f: repair.repair(f, lambda v: False, pvary, position)) == repaired


CALLS = [
    ("h = x(y, 'm')", "h = y"),
    ("h = f(x(i + 1, 'm')).quietly(i)", "h = f(i + 1).quietly(i)"),
    ("h = i and x(i + 1, 'm') or i", "h = i and i + 1 or i"),
    ("h = x(i + 1, 'm').quietly(i)", "h = (i + 1).quietly(i)"),
    ("h = [x(i + 1, 'm')][0]", "h = [i + 1][0]"),
    ("h = not x(i if i else 3, 'm') and i", "h = not (i if i else 3) and i"),
    ("h = x(\n    f(y)\n    , 'm',\n)", "h = f(y)"),
    ("h = x(\n    i\n    + 1,\n    'm',\n)", "h = (i\n    + 1)"),
    ("h = (1, x(y, *[w]))", "h = (1, y)"),
    ("if x(y):\n    pass", "if y:"),
    ("h = (w\n     .quietly(i)\n     .plainly(y))", "h = y"),  # Python says that this call begins at .plainly
    ("h = x()", None),
    ("h = x + y", None),
]


@pytest.mark.parametrize(("text", "replaced"), CALLS, ids=[text for text, _ in CALLS])
def test_a_call_is_replaced_by_its_argument(text: str, replaced: str | None) -> None:
    assert run(text, values(), lambda f: repair.replace_call(f, lambda given: given[0])) == replaced


QUOTES = [
    ("if 1:\n    h = f(x @ w)", "h = f(x @ w)\n      ^^^^^"),
    ("h = f(x(f(y)))", "h = f(x(f(y)))\n      ^^^^^^^"),
    ("h = f(f(x)) + x(\n    y)", "h = f(f(x)) + x(\n    ^^^^^^^^^^^^"),
    ("h = 'é' and x @ w", "h = 'é' and x @ w\n            ^^^^^"),
    ("h = '日本' and x @ w", "h = '日本' and x @ w\n               ^^^^^"),
    ("fg = (lambda t: t @ w), (lambda t: t + w); fg[1](x)",
     "fg = (lambda t: t @ w), (lambda t: t + w); fg[1](x)\n                                   ^^^^^"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "shown"), QUOTES, ids=[text for text, _ in QUOTES])
def test_a_site_is_quoted(text: str, shown: str) -> None:
    assert run(text, values(), lambda f: source.quote(source.site(f))) == shown  # type: ignore[arg-type]


# --- through torch -----------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Asks at every operation below torch.func, as a checker does."""

    def __init__(self, ask: Callable[[str, tuple[Any, ...], FrameType | None], Any]) -> None:
        super().__init__()
        self.ask = ask

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ask(func.overloadpacket.__name__, args, source.user_frame(sys._getframe(1)))
        return func(*args, **(kwargs or {}))


class Double(torch.autograd.Function):
    """One whose backward is this file's: the user's own."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g.sin()


def below(x: Any) -> Any:
    """The tensor under torch.func's wrappers."""
    while isinstance(x, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def loss_fn(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    h = torch.relu(x @ p["up"])
    h = Double.apply(h)
    return (
        h.cos()
        .square().mean()
    )  # fmt: skip


def step(p: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
    return fs.value_and_grad(loss_fn)(p, x)


def watched() -> dict[str, list[Any]]:
    """op -> (line's function, quote, words and repair of its last tensor), once for each time it ran."""
    seen: dict[str, list[Any]] = collections.defaultdict(list)

    def ask(op: str, args: tuple[Any, ...], frame: FrameType | None) -> None:
        assert frame is not None
        place = source.site(frame)
        assert place is not None
        tensor = [a for a in args if isinstance(a, torch.Tensor)][-1]
        repaired = repair.repair(frame, lambda v: below(v) is tensor, pvary)
        seen[op].append((place.function, source.quote(place).partition("\n")[0], repaired))

    params, x = {"up": torch.ones(2, 3)}, torch.ones(4, 2)
    with Watch(ask):
        step(params, x)
    return seen


def test_frames_are_found_through_torch_forward_and_backward() -> None:
    seen = watched()
    matmul = ("loss_fn", 'h = torch.relu(x @ p["up"])', 'h = torch.relu(x @ fs.pvary(p["up"], "m"))')
    assert seen["mm"][0] == matmul
    assert seen["relu"][0][:2] == matmul[:2]
    assert seen["cos"] == [("loss_fn", "h.cos()", 'return (\n    fs.pvary(h, "m").cos()\n    .square().mean()\n)')]
    assert seen["mean"][0][:2] == ("loss_fn", ".square().mean()")
    # backward: the user's own, else the line that called value_and_grad
    line = "return fs.value_and_grad(loss_fn)(p, x)"
    repaired = [found[2] for found in seen["sin"]]
    assert [found[:2] for found in seen["sin"]] == [("step", line), ("backward", "return g.sin()")], repaired
    assert repaired == [None, 'return fs.pvary(g, "m").sin()']
    assert seen["threshold_backward"][0][:2] == ("step", line)
    assert seen["mm"][1][:2] == ("step", line)


def test_each_rank_has_its_own_frame() -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = [pool.submit(watched) for _ in range(2)]
        assert [f.result()["mm"][0][0] for f in found] == ["loss_fn"] * 2


def test_frames_are_found_through_plumbing() -> None:
    found: list[Any] = []

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        yield

    def at(value: Any) -> Any:
        found.append(str(source.site(source.user_frame())).partition(" in ")[2])
        return value

    functools.partial(at, 0)()
    optree.tree_map(at, [1])
    max([1, 2], key=functools.lru_cache(at))
    with around():
        at(0)
    assert set(found) == {"at"}
    # from inside of plumbing: the frame of threading, functools and optree is never the one
    code = compile("def g(f): return f()", contextlib.__file__, "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["g"](source.user_frame) is sys._getframe()
    assert names["g"](source.site).function == "test_frames_are_found_through_plumbing"


OWNERS = [
    (torch.nn.functional.__file__, False), (optree.__file__, False), (functools.__file__, False),
    (concurrent.futures.thread.__file__, False), (fs.nn.__file__, False), (fs.optim.__file__, False),
    (source.__file__, False), ("<frozen importlib._bootstrap>", False), ("<eval_with_key>.3", False),
    (gpt2.__file__, True), (os.path.join(os.path.dirname(fs.__file__), "recipes", "pretrain.py"), True),
    (__file__, True), ("<stdin>", True), ("<string>", True), ("<ipython-input-1-abc>", True), ("train.py", True),
    ("/tmp/ipykernel_12/34.py", True), (os.path.dirname(fs.__file__) + "_experiments/train.py", True),
    (os.path.join(sysconfig.get_path("purelib"), "mine", "train.py"), True),
    (os.path.join(sysconfig.get_path("stdlib"), "site-packages", "mine", "train.py"), True),
]  # fmt: skip


@pytest.mark.parametrize(("file", "users"), OWNERS)
def test_whose_code_it_is(file: str, users: bool) -> None:
    names: dict[str, Any] = {"user_frame": source.user_frame}
    exec(compile("import sys\ndef g(): return user_frame(), sys._getframe()", file, "exec"), names)
    found, own = names["g"]()
    assert (found is own) is users


def test_no_user_is_none() -> None:
    names: dict[str, Any] = {}
    exec(compile("def g(f): return f()", torch.__file__, "exec"), names)
    found: list[Any] = []
    from _thread import start_new_thread
    from threading import Event

    done = Event()
    names.update(found=found, user_frame=source.user_frame, site=source.site, done=done)
    exec(compile("def h(): found.extend([user_frame(), site()]); done.set()", torch.__file__, "exec"), names)
    start_new_thread(names["h"], ())
    assert done.wait(60)
    assert found == [None, None]


# --- sites, and sources that are not there -----------------------------------------------------------------------


def test_a_site_is_plain_data() -> None:
    a, b = [here_of() for _ in range(2)]
    assert a == b
    assert len({a, b}) == 1
    assert a != here_of()


def test_a_site_tells_its_line() -> None:
    line = sys._getframe().f_lineno
    assert str(here_of()) == f"test_suggestion.py:{line + 1} in test_a_site_tells_its_line"
    assert str(next(here_of() for _ in [0])) == f"test_suggestion.py:{line + 2} in test_a_site_tells_its_line"
    assert str((lambda n: here_of())(0)) == f"test_suggestion.py:{line + 3} in <lambda>"


def here_of() -> source.Site:
    return source.site(sys._getframe(1))  # type: ignore[return-value]


def test_a_module_has_no_function() -> None:
    assert run("\n\nx + 1", values(), lambda f: str(source.site(f))) == f"<program {run.count}>:3"


NO_SOURCE = "h = x + w\n"


@pytest.mark.parametrize("file", ["<stdin>", "<string>", "/nowhere/train.py", "train.py"])
def test_without_source_there_is_no_answer(file: str) -> None:
    Probe.ask = staticmethod(answers)  # type: ignore[assignment]
    exec(compile(NO_SOURCE, file, "exec"), values())
    assert Probe.seen == (f"{os.path.basename(file)}:1", "", None, None, None)


def answers(frame: FrameType) -> tuple[Any, ...]:
    place = source.site(frame)
    assert place is not None
    return (str(place), source.quote(place), repair.operand(frame, is_x), repair.repair(frame, is_x, pvary, 0),
            repair.replace_call(frame, lambda given: given[0]))  # fmt: skip


@pytest.mark.parametrize("text", ["", "1 +\n", "\n", "\x00", "h = 1\n", "if 1:\n  if"])
def test_a_file_that_was_changed_since_gives_no_exception(text: str) -> None:
    file = f"<changed {text!r}>"
    Probe.ask = staticmethod(answers)  # type: ignore[assignment]
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile("\n\n\nh = 7 and x + w\n" if text != "h = 1\n" else "h = x + w", file, "exec"), values())
    assert Probe.seen[2:] == (None, None, None)


def test_a_cell_of_a_notebook_is_shown_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shell:
        class compile:  # noqa: N801
            @staticmethod
            def format_code_name(file: str) -> Any:
                return ("Cell", "In[3]") if file.endswith("34.py") else None

    monkeypatch.setitem(sys.modules, "IPython", Shell)
    monkeypatch.setattr(Shell, "get_ipython", lambda: Shell, raising=False)
    for file, shown in [("/tmp/ipykernel_12/34.py", "In[3]:1"), ("/tmp/ipykernel_12/35.py", "35.py:1")]:
        linecache.cache[file] = (len(NO_SOURCE), None, [NO_SOURCE], file)
        Probe.ask = staticmethod(answers)  # type: ignore[assignment]
        exec(compile(NO_SOURCE, file, "exec"), values())
        assert Probe.seen == (shown, "h = x + w\n    ^^^^^", "x", 'h = fs.pvary(x, "m") + w', None)


def test_a_doctest_has_source() -> None:
    test = doctest.DocTestParser().get_doctest(">>> h = x + w\n", values(), "sample", None, 0)
    Probe.ask = staticmethod(answers)  # type: ignore[assignment]
    doctest.DocTestRunner(verbose=False).run(test, clear_globs=False)
    assert Probe.seen[1:4] == ("h = x + w\n    ^^^^^", "x", 'h = fs.pvary(x, "m") + w')


def test_a_python_without_columns_knows_the_line() -> None:
    """The statement is then the line's first, and the operand any of its parts."""
    text = "if x is not y:\n    h = (y\n         @ x)  # why\n"
    compiled = "import marshal, sys; sys.stdout.buffer.write(marshal.dumps(compile(sys.argv[1], 'train', 'exec')))"
    command = [sys.executable, "-X", "no_debug_ranges", "-c", compiled, text]
    done = subprocess.run(command, capture_output=True, check=True)
    code = marshal.loads(done.stdout)
    assert next(code.co_positions())[2] is None
    linecache.cache["train"] = (len(text), None, text.splitlines(keepends=True), "train")
    Probe.ask = staticmethod(answers)  # type: ignore[assignment]
    exec(code, values())
    del linecache.cache["train"]
    assert Probe.seen == ("train:2", "h = (y", "x", 'h = (y\n     @ fs.pvary(x, "m"))', None)


def test_source_is_read_only_when_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any) -> Any:
        raise AssertionError("source was read")

    monkeypatch.setattr(linecache, "getlines", read)
    assert here_of().code


# --- names -------------------------------------------------------------------------------------------------------


def test_a_verb_is_called_as_it_was_imported() -> None:
    assert repair.name_of(sys._getframe(), "pvary") == "as_imported"
    assert repair.name_of(sys._getframe(), "psum") == "fs.psum" or fshard is fs
    assert as_imported is fs.pvary


NAMES = [
    ("import fshard", "pvary", "fshard.pvary"),
    ("import fshard as fs", "pvary", "fs.pvary"),
    ("import fshard as F", "nn.dropout", "F.nn.dropout"),
    ("from fshard import pvary", "pvary", "pvary"),
    ("from fshard import nn as layers", "nn.dropout", "layers.dropout"),
    ("from fshard import pvary as _p", "pvary", "fs.pvary"),
    ("import fshard as F\nfs = 3", "psum", "F.psum"),
    ("import fshard", "not_there", "fshard.not_there"),
    ("pass", "pvary", "fs.pvary"),
    ("pass", "nn.not_there.at_all", "fs.nn.not_there.at_all"),
]


@pytest.mark.parametrize(("imports", "verb", "name"), NAMES)
def test_names_follow_the_imports(imports: str, verb: str, name: str) -> None:
    program = f"{imports}\nx + 1"
    for text in (program, "def g():\n " + program.replace("\n", "\n ") + "\ng()"):
        assert run(text, values(), lambda f: repair.name_of(f, verb)) == name
