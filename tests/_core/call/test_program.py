"""A call is checked again when the user's code has changed since it was checked: helpers, methods, flags, modules."""

from __future__ import annotations

import importlib
import inspect
import sys
import weakref

import pytest
import torch

import fshard as fs
from fshard import P
from fshard._core.call import read_program
from tests.lib.assertions import error_text

TWO = fs.make_mesh(kind="simulated", data=2)
GOOD, BAD = "fs.pvary(p, 'data')", "p"  # the second loses the sum of the gradient over data
HEAD = """
import functools, types, torch, fshard as fs
def loss(p, x):
    return fs.pmean((x * enter(p)).mean(), "data")
"""
HELPER = f"def enter(p): return {GOOD}\n"

# name: (the rest of a module, what is executed in it later)
CHANGES = {
    "helper": (HELPER, f"def enter(p): return {BAD}"),
    "helper of a helper": (
        f"def inner(p): return {GOOD}\ndef enter(p): return inner(p)",
        f"def inner(p): return {BAD}",
    ),
    "code of the helper, in place": (HELPER, f"enter.__code__ = (lambda p: {BAD}).__code__"),
    "the loss itself, in place": (
        HELPER,
        "def other(p, x): return fs.pmean((x * p).mean(), 'data')\nloss.__code__ = other.__code__",
    ),
    "helper bound to a function of a library": (HELPER, "enter = torch.clone"),
    "flag": (f"sums = True\ndef enter(p): return {GOOD} if sums else {BAD}", "sums = False"),
    "flag in a nested function": (
        f"sums = True\ndef enter(p):\n    return (lambda: {GOOD} if sums else {BAD})()",
        "sums = False",
    ),
    "string": (f"kind = 'sum'\ndef enter(p): return {GOOD} if kind == 'sum' else {BAD}", "kind = 'none'"),
    "None": (f"skip = None\ndef enter(p): return {GOOD} if skip is None else {BAD}", "skip = 3"),
    "default": (f"def enter(p, sums=True): return {GOOD} if sums else {BAD}",
                f"def enter(p, sums=False): return {GOOD} if sums else {BAD}"),
    "keyword default": (f"def enter(p, *, sums=True): return {GOOD} if sums else {BAD}",
                        f"def enter(p, *, sums=False): return {GOOD} if sums else {BAD}"),
    "closure": (
        f"def make(sums):\n    def enter(p): return {GOOD} if sums else {BAD}\n    return enter\nenter = make(True)",
        "enter = make(False)",
    ),
    "variable of a closure": (
        (f"def make():\n    sums = True\n    def enter(p): return {GOOD} if sums else {BAD}\n"
        "    def change():\n        nonlocal sums\n        sums = False\n    return enter, change\n"
        "enter, change = make()"),
        "change()",
    ),
    "partial": (
        f"def full(sums, p): return {GOOD} if sums else {BAD}\nenter = functools.partial(full, True)",
        "enter = functools.partial(full, False)",
    ),
    "function in a partial": (
        f"def full(p): return {GOOD}\nenter = functools.partial(full)",
        f"full.__code__ = (lambda p: {BAD}).__code__",
    ),
    "function behind a decorator": (
        f"def twice(f):\n    return functools.wraps(f)(lambda p: f(p))\n@twice\ndef enter(p): return {GOOD}",
        f"@twice\ndef enter(p): return {BAD}",
    ),
    "function behind a decorator of a library": (
        f"@torch.enable_grad()\ndef enter(p): return {GOOD}",
        f"enter.__wrapped__.__code__ = (lambda p: {BAD}).__code__",
    ),
    "function behind a transform": (
        f"def inner(p): return {GOOD}\nenter = fs.remat(inner)",
        f"inner.__code__ = (lambda p: {BAD}).__code__",
    ),
    "cached function": (
        f"@functools.lru_cache\ndef sums(): return True\ndef enter(p): return {GOOD} if sums() else {BAD}",
        "@functools.lru_cache\ndef sums(): return False",
    ),
    "dict of functions": (
        f"def full(p): return {GOOD}\nlayers = {{'enter': full}}\ndef enter(p): return layers['enter'](p)",
        f"layers['enter'] = lambda p: {BAD}",
    ),
    "list of functions": (
        f"def full(p): return {GOOD}\nlayers = [full]\ndef enter(p):\n    for f in layers: p = f(p)\n    return p",
        f"layers[0] = lambda p: {BAD}",
    ),
    "shorter list of functions": (
        f"def full(p): return {GOOD}\nlayers = [full]\ndef enter(p):\n    for f in layers: p = f(p)\n    return p",
        "layers.clear()",
    ),
    "longer list of functions": (
        "layers = []\ndef enter(p):\n    for f in layers: p = f(p)\n    return fs.pvary(p, 'data')",
        "layers.append(lambda p: p * fs.axis_index('data'))",
    ),
    "flag in a dict": (
        f"config = {{'sums': True, 'lr': 0.1}}\ndef enter(p): return {GOOD} if config['sums'] else {BAD}",
        "config['sums'] = False",
    ),
    "method": (
        f"class Model:\n    def enter(self, p): return {GOOD}\nmodel = Model()\ndef enter(p): return model.enter(p)",
        f"Model.enter = lambda self, p: {BAD}",
    ),
    "class, as a cell defines it again": (
        f"class Model:\n    def enter(self, p): return {GOOD}\ndef enter(p): return Model().enter(p)",
        f"class Model:\n    def enter(self, p): return {BAD}",
    ),
    "inherited method": (
        (f"class Base:\n    def enter(self, p): return {GOOD}\nclass Model(Base): pass\nmodel = Model()\n"
        "def enter(p): return model.enter(p)"),
        f"Base.enter = lambda self, p: {BAD}",
    ),
    "static method": (
        f"class Model:\n    @staticmethod\n    def enter(p): return {GOOD}\ndef enter(p): return Model.enter(p)",
        f"Model.enter = staticmethod(lambda p: {BAD})",
    ),
    "property": (
        (f"class Model:\n    @property\n    def sums(self): return True\nmodel = Model()\n"
        f"def enter(p): return {GOOD} if model.sums else {BAD}"),
        "Model.sums = property(lambda self: False)",
    ),
    "attribute of an object": (
        ("class Model:\n    def __init__(self): self.sums = True\n"
        f"    def __call__(self, p): return {GOOD} if self.sums else {BAD}\nenter = Model()"),
        "enter.sums = False",
    ),
    "attribute that only the caller reads": (
        f"class Config: pass\ncfg = Config()\ncfg.sums = True\ndef enter(p): return {GOOD} if cfg.sums else {BAD}",
        "cfg.sums = False",
    ),
    "attribute in a slot": (
        ("class Config:\n    __slots__ = ('sums', 'other')\ncfg = Config()\ncfg.sums = True\n"
        f"def enter(p): return {GOOD} if cfg.sums else {BAD}"),
        "cfg.sums = False",
    ),
    "method of a class with slots": (
        (f"class Model:\n    __slots__ = ()\n    def enter(self, p): return {GOOD}\nmodel = Model()\n"
        "def enter(p): return model.enter(p)"),
        f"Model.enter = lambda self, p: {BAD}",
    ),
    "method of a named tuple": (
        (f"import typing\nclass Model(typing.NamedTuple):\n    n: int\n    def enter(self, p): return {GOOD}\n"
        "model = Model(3)\ndef enter(p): return model.enter(p)"),
        f"Model.enter = lambda self, p: {BAD}",
    ),
    "flag of a frozen dataclass": (
        ("import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Config:\n    sums: bool = True\n"
        f"cfg = Config()\ndef enter(p): return {GOOD} if cfg.sums else {BAD}"),
        "cfg = dataclasses.replace(cfg, sums=False)",
    ),
    "class of a library": (
        ("Kind = torch.nn.Identity\n"
        f"def enter(p): return Kind()({GOOD} if Kind is torch.nn.Identity else {BAD})"),
        "Kind = torch.nn.ReLU",
    ),
    "module of a library": (
        f"layer = torch.nn.Identity()\ndef enter(p): return {GOOD} if isinstance(layer, torch.nn.Identity) else {BAD}",
        "layer = torch.nn.ReLU()",
    ),
    "bound method": (
        f"class Model:\n    def run(self, p): return {GOOD}\nenter = Model().run",
        f"Model.run.__code__ = (lambda self, p: {BAD}).__code__",
    ),
    "forward of a module": (
        f"class Model(torch.nn.Module):\n    def forward(self, p): return {GOOD}\nenter = Model()",
        f"Model.forward = lambda self, p: {BAD}",
    ),
    "forward of a submodule": (
        f"class Part(torch.nn.Module):\n    def forward(self, p): return {GOOD}\nenter = torch.nn.Sequential(Part())",
        f"Part.forward = lambda self, p: {BAD}",
    ),
    "mode of a module": (
        ("class Model(torch.nn.Module):\n    def forward(self, p): "
        f"return {GOOD} if self.training else {BAD}\nenter = Model()"),
        "enter.eval()",
    ),
    "function of a module": (
        (f"helpers = types.ModuleType('helpers')\nhelpers.__file__ = __file__\nhelpers.enter = lambda p: {GOOD}\n"
        "def enter(p): return helpers.enter(p)"),
        f"helpers.enter = lambda p: {BAD}",
    ),
    "function of a module that two functions use": (
        (f"helpers = types.ModuleType('helpers')\nhelpers.__file__ = __file__\nhelpers.enter = lambda p: {GOOD}\n"
        "helpers.first = lambda p: p\ndef first(p): return helpers.first(p)\n"
        "def enter(p): return helpers.enter(first(p))"),
        f"helpers.enter = lambda p: {BAD}",
    ),
}  # fmt: skip


@pytest.fixture
def define(tmp_path, monkeypatch):
    """Return a function that writes and imports a module of the user."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made = []

    def import_source(source, name="cells"):
        (tmp_path / f"{name}.py").write_text(source)
        made.append(name)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield import_source
    for name in made:
        sys.modules.pop(name, None)


def mapped(loss, **kwargs):
    def step(p, x):
        return fs.grad(loss)(p, x)

    return fs.shard_map(step, mesh=TWO, in_specs=(P(), P("data")), out_specs=P(), **kwargs)


P0, X = torch.ones(1), torch.arange(4.0)


@pytest.fixture
def checks(monkeypatch):
    """Return a function that counts the calls that were checked so far."""
    made = []

    class Counted(inspect.unwrap(fs.shard_map).__globals__["Checker"]):
        def __init__(self, *args):
            made.append(None)
            super().__init__(*args)

    monkeypatch.setitem(inspect.unwrap(fs.shard_map).__globals__, "Checker", Counted)
    return lambda: len(made) // TWO.size


@pytest.mark.parametrize("name", CHANGES)
def test_a_call_is_checked_again_after_a_change_of(name, define):
    source, change = CHANGES[name]
    cells = define(HEAD + source)
    step = mapped(cells.loss)
    for _ in range(2):
        assert fs.device_get(step(P0, X)).item() == 1.5
    exec(change, vars(cells))
    assert "varies" in error_text(step, P0, X)


def test_a_call_that_failed_has_checked_nothing(define):
    cells = define(HEAD + HELPER)
    step = mapped(cells.loss)
    step(P0, X)
    exec(f"def enter(p): return {BAD}", vars(cells))
    for _ in range(2):
        assert "varies" in error_text(step, P0, X)
    exec(HELPER, vars(cells))
    assert fs.device_get(step(P0, X)).item() == 1.5


def test_a_call_is_checked_again_after_a_reload(define, tmp_path):
    helpers = define(HELPER.replace("fs.", "__import__('fshard')."), "helpers")
    imported = define(HEAD + "import helpers\ndef enter(p): return helpers.enter(p)")
    step = mapped(imported.loss)
    step(P0, X)
    (tmp_path / "helpers.py").write_text(f"# new\ndef enter(p): return {BAD}\n")
    importlib.reload(helpers)
    assert "fix" in error_text(step, P0, X)


def test_a_function_passed_as_an_argument_is_part_of_the_signature():
    def loss(p, x, enter):
        return fs.pmean((x * enter(p)).mean(), "data")

    step = fs.shard_map(fs.grad(loss), mesh=TWO, in_specs=(P(), P("data"), P()), out_specs=P())
    step(P0, X, lambda p: fs.pvary(p, "data"))
    assert "varies" in error_text(step, P0, X, lambda p: p)


# --- calls that are not checked again -------------------------------------------------------------------------

NO_CHANGES = {
    "nothing": (HELPER, ""),
    "the same cell": (HELPER, HELPER),
    "a function that nothing refers to": (HELPER, "def other(p): return p"),
    "a slot that is not assigned": (
        f"class Config: __slots__ = ('sums',)\ncfg = Config()\ndef enter(p): return {GOOD} if cfg else cfg.sums", "",
    ),
    "a log": (
        f"log = []\ndef enter(p):\n    log.append(True)\n    log.append('called')\n    return {GOOD}",
        "log.append('later')",
    ),
    "a number": (f"lr = 0.1\ndef enter(p): return {GOOD} * (1 + 0 * lr)", "lr = 0.2"),
    "a tensor": (f"bias = torch.zeros(1)\ndef enter(p): return {GOOD} + bias", "bias = torch.zeros(1)"),
    "a closure made again": (
        f"def make():\n    def enter(p): return {GOOD}\n    return enter\nenter = make()", "enter = make()",
    ),
    "an object made again": (
        f"class Model:\n    def __init__(self): self.n = 3\n    def __call__(self, p): return {GOOD}\nenter = Model()",
        "enter = Model()",
    ),
    "a large container": (
        f"words = ['a'] * 1000\ndef enter(p): return {GOOD} if words else p", "words[3] = 'b'",
    ),
    "code that is not of the user": (HELPER, "fs.__dict__['new'] = 3; del fs.__dict__['new']"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_CHANGES)
def test_a_call_is_not_checked_again_after_a_change_of(name, define, checks):
    cells = define(HEAD)
    step = mapped(cells.loss)
    for cell in NO_CHANGES[name]:
        exec(compile(cell, cells.__file__, "exec", dont_inherit=True), vars(cells))
        step(P0, X)
    assert checks() == 1


def test_a_flag_that_changes_back_and_forth_is_checked_once_for_each_value(define, checks):
    cells = define(HEAD + f"train = True\ndef enter(p): return {GOOD} * (2 if train else 1)")
    step = mapped(cells.loss)
    for i in range(8):
        cells.train = i % 2 == 0
        step(P0, X)
    assert checks() == 2


def test_a_program_that_differs_at_every_call_is_not_checked_at_every_call(define, checks):
    cells = define(HEAD + f"status = ''\ndef enter(p): return {GOOD} if status is not None else p")
    step = mapped(cells.loss)
    for i in range(40):
        cells.status = f"step {i}"
        step(P0, X)
    assert checks() == 32


@pytest.mark.parametrize("check", ["never", "always"])
def test_programs_are_not_read_where_no_call_or_every_call_is_checked(check, define, checks):
    cells = define(HEAD + HELPER)
    step = mapped(cells.loss, check=check)
    for _ in range(3):
        step(P0, X)
    assert checks() == (0 if check == "never" else 3)
    exec(f"def enter(p): return {BAD}", vars(cells))
    if check == "never":
        step(P0, X)
    else:
        assert "varies" in error_text(step, P0, X)


def test_a_program_is_read_without_running_code_of_the_user(define):
    cells = define("""
class Hooks:
    def __getattr__(self, name): raise KeyError(name)
    @property
    def __class__(self): raise RuntimeError
    @property
    def value(self): raise RuntimeError
class Slots:
    __slots__ = ("x",)
    def __getattr__(self, name): raise KeyError(name)
class Entries(dict):
    def get(self, *_): raise RuntimeError
hooks, slots, entries = Hooks(), Slots(), Entries(a=True)
ring = [hooks]
ring.append(ring)
def make():
    def f(): return later, hooks.value, slots.x, entries, ring
    if f is None: later = 3
    return f
f = make()
""")
    program = read_program(cells.f, flags=True)
    assert program.is_current()
    cells.entries["a"] = False
    assert not program.is_current()


def test_a_program_refers_to_no_tensor(define):
    cells = define("import torch\nw = torch.ones(1)\nstate = {'w': w, 'n': 3}\ndef f(): return w, state")
    kept = weakref.ref(cells.w)
    program = read_program(cells.f, flags=True)
    cells.w = cells.state = None
    assert kept() is None
    assert len(program.facts) == 1


def test_flags_are_left_out_for_processes_which_must_check_the_same_calls(define):
    cells = define("flag = True\ndef helper(): return 1\ndef f(): return flag and helper()")
    program = read_program(cells.f, flags=False)
    cells.flag = False
    assert program.is_current()
    cells.helper = lambda: 2
    assert not program.is_current()
    assert read_program(cells.f, flags=False).facts != program.facts


def test_comparison_of_a_program_reads_two_places_for_each_function_and_calls_no_python(define):
    chain = [f"def f{i}(x): return f{i + 1}(x)" for i in range(50)]
    cells = define("\n".join([*chain, "def f50(x): return x"]))
    program = read_program(cells.f0, flags=True)
    assert len(program.facts) == 51
    assert len(program.places) == 2 * 51 - 1
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        program.is_current()
    finally:
        sys.setprofile(None)
    assert calls == ["is_current"]
