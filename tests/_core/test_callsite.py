"""The frame of the user's code, found from deep inside torch, and the quoted line that it executes."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from types import FrameType
from typing import Any

import optree
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard import P
from fshard._core import callsite
from fshard.models import gpt2
from tests._core.typecheck.probe import Probe, run, run_without_source, set_source

VALUES = {"x": Probe(), "y": Probe(), "w": Probe(), "f": lambda v: Probe()}

QUOTES = [
    ("if 1:\n    h = f(x @ w)", "h = f(x @ w)\n      ^^^^^"),
    ("h = f(x(f(y)))", "h = f(x(f(y)))\n      ^^^^^^^"),
    ("h = f(f(x)) + x(\n    y)", "h = f(f(x)) + x(\n    ^^^^^^^^^^^^"),
    ("h = 'é' and x @ w", "h = 'é' and x @ w\n            ^^^^^"),
    ("h = '日本' and x @ w", "h = '日本' and x @ w\n               ^^^^^"),
    ("fg = (lambda t: t @ w), (lambda t: t + w); fg[1](x)",
     "fg = (lambda t: t @ w), (lambda t: t + w); fg[1](x)\n                                   ^^^^^"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "quoted"), QUOTES, ids=[program for program, _ in QUOTES])
def test_quote_marks_the_executing_expression(program: str, quoted: str) -> None:
    assert run(program, VALUES, lambda f: callsite.quote(callsite.site(f))) == quoted  # type: ignore[arg-type]


# --- frames, through torch ------------------------------------------------------------------------------------


class AskAtEachOperation(TorchDispatchMode):
    """Calls `ask` with each operation below torch.func and the user's frame, as a checker does."""

    def __init__(self, ask: Callable[[str, FrameType | None], Any]) -> None:
        super().__init__()
        self.ask = ask

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ask(func.overloadpacket.__name__, callsite.user_frame(sys._getframe(1)))
        return func(*args, **(kwargs or {}))


class Double(torch.autograd.Function):
    """A function with a backward in this file, so in the user's code."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g.sin()


def loss_fn(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    h = torch.relu(x @ p["up"])
    h = Double.apply(h)
    return (
        h.cos()
        .square().mean()
    )  # fmt: skip


def step(p: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
    return fs.value_and_grad(loss_fn)(p, x)


def lines_of_operations() -> dict[str, list[tuple[str, str]]]:
    """Function and line of the user's code, by operation, for each time that the operation ran."""
    lines: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)

    def ask(op: str, frame: FrameType | None) -> None:
        site = callsite.site(frame)
        assert frame is not None
        assert site is not None
        lines[op].append((site.function, callsite.quote(site).partition("\n")[0]))

    with AskAtEachOperation(ask):
        step({"up": torch.ones(2, 3)}, torch.ones(4, 2))
    return lines


def test_user_frame_is_found_through_torch_forward_and_backward() -> None:
    lines = lines_of_operations()
    matmul, grad = ("loss_fn", 'h = torch.relu(x @ p["up"])'), ("step", "return fs.value_and_grad(loss_fn)(p, x)")
    assert lines["mm"][0] == lines["relu"][0] == matmul
    assert lines["cos"] == [("loss_fn", "h.cos()")]
    assert lines["mean"][0] == ("loss_fn", ".square().mean()")
    # In backward: the user's own backward, else the line that called value_and_grad.
    assert lines["sin"] == [grad, ("backward", "return g.sin()")]
    assert lines["threshold_backward"][0] == lines["mm"][1] == grad


def test_each_thread_has_its_own_user_frame() -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        lines = [pool.submit(lines_of_operations) for _ in range(2)]
        assert [f.result()["mm"][0][0] for f in lines] == ["loss_fn"] * 2


def test_user_frame_is_found_through_the_standard_library_and_optree() -> None:
    functions: list[str] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        yield

    def record(value: Any) -> Any:
        functions.append(str(callsite.site(callsite.user_frame())).partition(" in ")[2])
        return value

    functools.partial(record, 0)()
    optree.tree_map(record, [1])
    max([1, 2], key=functools.lru_cache(record))
    with context():
        record(0)
    assert set(functions) == {"record"}
    code = compile("def g(f): return f()", contextlib.__file__, "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["g"](callsite.user_frame) is sys._getframe()
    assert names["g"](callsite.site).function == "test_user_frame_is_found_through_the_standard_library_and_optree"


FILES = [
    (torch.nn.functional.__file__, False), (optree.__file__, False), (functools.__file__, False),
    (concurrent.futures.thread.__file__, False), (fs.nn.__file__, False), (fs.optim.__file__, False),
    (callsite.__file__, False), ("<frozen importlib._bootstrap>", False), ("<eval_with_key>.3", False),
    (gpt2.__file__, True), (os.path.join(os.path.dirname(fs.__file__), "recipes", "pretrain.py"), True),
    (__file__, True), ("<stdin>", True), ("<string>", True), ("<ipython-input-1-abc>", True), ("train.py", True),
    ("/tmp/ipykernel_12/34.py", True), (os.path.dirname(fs.__file__) + "_experiments/train.py", True),
    (os.path.join(sysconfig.get_path("purelib"), "mine", "train.py"), True),
    (os.path.join(sysconfig.get_path("stdlib"), "site-packages", "mine", "train.py"), True),
]  # fmt: skip


@pytest.mark.parametrize(("file", "users"), FILES)
def test_user_code_is_distinguished_from_libraries_by_its_file(file: str, users: bool) -> None:
    names: dict[str, Any] = {"user_frame": callsite.user_frame}
    exec(compile("import sys\ndef g(): return user_frame(), sys._getframe()", file, "exec"), names)
    frame, own = names["g"]()
    assert (frame is own) is users


def test_own_files_are_those_of_no_package() -> None:
    own = {file for file, _ in FILES if callsite.is_own_file(file)}
    others = [file for file, users in FILES if users and ("site-packages" in file or file.startswith(callsite.HERE))]
    assert own == {file for file, users in FILES if users} - set(others)
    assert len(others) == 4


def test_thread_without_user_code_has_no_user_frame() -> None:
    answers: list[Any] = []
    from _thread import start_new_thread
    from threading import Event

    done = Event()
    names = {"answers": answers, "user_frame": callsite.user_frame, "site": callsite.site, "done": done}
    exec(compile("def h(): answers.extend([user_frame(), site()]); done.set()", torch.__file__, "exec"), names)
    start_new_thread(names["h"], ())
    assert done.wait(600)
    assert answers == [None, None]


# --- sites ----------------------------------------------------------------------------------------------------


def own_site() -> callsite.Site:
    return callsite.site(sys._getframe(1))  # type: ignore[return-value]


def test_site_in_a_model_has_the_line_that_called_the_model() -> None:
    cfg = gpt2.Config(vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=2)
    ids = torch.zeros(2, 4, dtype=torch.int64)
    loss = lambda p, x: gpt2.loss(cfg, p, x, x, layout=gpt2.Layout("data"))  # noqa: E731
    step = fs.shard_map(fs.grad(loss), mesh=fs.make_mesh(data=2), in_specs=(P(), P("data")), out_specs=P())
    with fs.recording() as log:
        step(fs.device_get(fs.materialize(gpt2.init(cfg), P(), fs.make_mesh(one=1), key=fs.key(0))), ids)
    assert {t.phase for t in log} == {"forward", "backward"}
    here = f"{Path(__file__).name}:{loss.__code__.co_firstlineno} in <lambda>"
    rows = repr(log).splitlines()[1:]
    assert all(
        above.endswith(f"  {here}") and " in " in below for above, below in zip(rows[::2], rows[1::2], strict=True)
    )
    assert {below.split(":")[0].strip() for below in rows[1::2]} == {"transformer.py"}
    assert f"{escape(here)}\ntransformer.py:" in log._repr_html_()


def test_site_is_compared_by_value() -> None:
    a, b = [own_site() for _ in range(2)]
    assert a == b
    assert len({a, b}) == 1
    assert a != own_site()


def test_str_of_site_is_file_line_and_function() -> None:
    line = sys._getframe().f_lineno
    assert str(own_site()) == f"test_callsite.py:{line + 1} in test_str_of_site_is_file_line_and_function"
    assert str(next(own_site() for _ in [0])).startswith(f"test_callsite.py:{line + 2} in test_str_of_site")
    assert str((lambda n: own_site())(0)) == f"test_callsite.py:{line + 3} in <lambda>"
    assert run("\n\nx + 1", VALUES, lambda f: str(callsite.site(f))) == "<program>:3"  # a module has no function


@pytest.mark.parametrize("file", ["<stdin>", "<string>", "/nowhere/train.py", "train.py"])
def test_quote_of_missing_source_is_empty(file: str) -> None:
    answer = run_without_source("h = x + w\n", VALUES, callsite.site, file)
    assert (str(answer), callsite.quote(answer)) == (f"{os.path.basename(file)}:1", "")


def test_quote_without_columns_is_the_line() -> None:
    set_source("<columns>", "h = 1\n")
    code = compile("h = 1\n", "<columns>", "exec").replace(co_linetable=b"")
    assert callsite.Site(code, 0).columns[2] is None
    assert callsite.quote(callsite.Site(code, 0)) == "h = 1"


def test_notebook_cell_is_shown_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shell:
        class compile:  # noqa: N801
            @staticmethod
            def format_code_name(file: str) -> Any:
                return ("Cell", "In[3]") if file.endswith("34.py") else None

    monkeypatch.setitem(sys.modules, "IPython", Shell)
    monkeypatch.setattr(Shell, "get_ipython", lambda: Shell, raising=False)
    for file, shown in [("/tmp/ipykernel_12/34.py", "In[3]:1"), ("/tmp/ipykernel_12/35.py", "35.py:1")]:
        site = run("h = x + w\n", VALUES, callsite.site, file)
        assert (str(site), callsite.quote(site)) == (shown, "h = x + w\n    ^^^^^")


def test_source_is_read_only_when_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any) -> Any:
        raise AssertionError("source was read")

    monkeypatch.setattr(linecache, "getlines", read)
    assert own_site().code
