"""The exception class and the form of its messages."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pydoc
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor
from typing_extensions import TypeAliasType  # what a `type` statement of Python 3.12 makes

import fshard as fs
from fshard import P
from fshard.errors import api_boundary, checked, fail, raise_all
from fshard.spec import Axis
from tests.lib.assertions import error_text

T = TypeVar("T")


def test_sharding_error_is_a_value_error():
    assert issubclass(fs.ShardingError, ValueError)
    assert type(fail("no")) is fs.ShardingError


def test_fail_omits_empty_sections():
    assert str(fail("no")) == "no"
    assert str(fail("no", fix="yes")) == "no\n  fix: yes"
    assert str(fail("no", "because")) == "no\n  because"
    assert str(fail("no", shape=[3])) == "no\n  shape  [3]"


def test_fail_orders_facts_notes_and_fix():
    error = fail("no", "first", "second\nthird", fix="yes", shape=[3], spec=fs.P("a"))
    assert str(error) == "no\n  shape  [3]    spec  P('a')\n  first\n  second\n  third\n  fix: yes"


# --- help ---


def test_help_shows_the_signature_of_the_function_without_quotes():
    by_text = {
        fs.psum: "psum(x: T, axis: Axis) -> T",
        fs.key: "key(n: int) -> Tensor",
        fs.replicated: "replicated() -> P",
    }
    for f, text in by_text.items():
        shown = pydoc.plain(pydoc.render_doc(f)).splitlines()
        assert shown[2] == text
        assert shown[3].strip() == f.__doc__.splitlines()[0]
    functions = [x for x in (getattr(fs, name) for name in fs.__all__) if hasattr(x, "__wrapped__")]
    assert len(functions) > 40
    for f in functions:
        assert re.search(r": '|-> '", str(inspect.signature(f))) is None, f
        assert f.__annotations__ == f.__wrapped__.__annotations__
    assert str(inspect.signature(fs.Policy)).startswith("(param: torch.dtype = torch.float32, ")


# --- tracebacks ---


MESH = fs.make_mesh(data=2)


def in_loss(w: Tensor, x: Tensor) -> Tensor:
    return fs.pmean((x @ w).mean(), "data")  # without a pvary


def in_step(w: Tensor, x: Tensor) -> Any:
    return torch.func.grad(in_loss)(w, x)


step = fs.shard_map(in_step, mesh=MESH, in_specs=(P(), P("data")), out_specs=P())


def by_value(x: Tensor) -> Tensor:
    return -x if x.sum() > 0 else x


WRONG = {  # a wrong call, and the user's functions in its traceback after the caller
    "a rule of the checker": (lambda: step(torch.ones(3, 2), torch.ones(4, 3)), ["in_step", "in_loss"]),
    "without data": (lambda: fs.check(step, torch.ones(3, 2), torch.ones(4, 3)), ["in_step", "in_loss"]),
    "an argument": (lambda: step(torch.ones(3, 2), torch.ones(4, 3), 1), []),
    "by name": (lambda: step(w=torch.ones(3, 2)), []),
    "a result": (lambda: fs.shard_map(lambda x: x, mesh=MESH, in_specs=(P("data"),), out_specs=P())(torch.ones(2)), []),
    "a kind of argument": (lambda: fs.psum(torch.ones(2), P()), []),
    "too many arguments": (lambda: fs.key(0, 1), []),
    "of a class": (lambda: fs.Policy(param=3), []),
    "a gradient": (lambda: fs.grad(in_loss)(torch.ones(3, 2), torch.ones(4, 3)), ["in_loss"]),
    "a loss": (lambda: fs.value_and_grad(by_value)(torch.ones(2)), []),
    "remat": (lambda: fs.remat(in_loss)(torch.ones(3, 2), torch.ones(4, 3)), ["in_loss"]),
    "an operator": (lambda: fs.device_put(torch.ones(3), P(), MESH) + 1, []),
    "a cause": (lambda: fs.check(fs.shard_map(by_value, mesh=MESH, out_specs=P()), torch.ones(2)), []),
}


@pytest.mark.parametrize(("call", "functions"), WRONG.values(), ids=WRONG)
def test_traceback_has_the_frames_of_the_users_code_alone(call, functions, monkeypatch):
    def frames() -> list[list[traceback.FrameSummary]]:
        with pytest.raises(fs.ShardingError) as caught:
            call()
        chain = [caught.value, *filter(None, [caught.value.__cause__])]
        return [[f for f in traceback.extract_tb(e.__traceback__) if f.name != "frames"] for e in chain]

    mine, *of_cause = frames()
    assert [f.name for f in mine] == ["<lambda>", *functions]
    assert {f.filename for f in mine} == {__file__}
    assert [f.name for tb in of_cause for f in tb] == (["by_value"] if call is WRONG["a cause"][0] else [])
    monkeypatch.setenv("FSHARD_TRACEBACK", "full")
    every = frames()
    assert sum(map(len, every)) > len(mine) + sum(map(len, of_cause))
    assert [f.name for f in every[0] if f.filename == __file__] == ["<lambda>", *functions]


def own_error(w: Tensor, x: Tensor) -> Tensor:
    return {"w": w}["v"] @ x


def error_of_torch(w: Tensor, x: Tensor) -> Tensor:
    return fs.psum(fs.nn.linear(x, w).sum(), "data")


MODULE = torch.nn.Linear(5, 5)


def of_module(w: Tensor, x: Tensor) -> Tensor:
    return torch.func.functional_call(MODULE, {}, (fs.pvary(w, "data"),))


FOREIGN = {  # a loss, the type of its error, and the functions of libraries below the user's last frame
    "of the user's code": (own_error, KeyError, []),
    "of torch in a layer": (error_of_torch, RuntimeError, ["__call__"]),
    "of torch in a module": (of_module, RuntimeError, ["functional_call", "_functional_call", "_wrapped_call_impl",
                                                       "_call_impl", "forward", "__call__"]),
}  # fmt: skip


@pytest.mark.parametrize(("loss", "kind", "below"), FOREIGN.values(), ids=FOREIGN)
def test_traceback_of_another_error_has_no_library_frame_above_the_users_last_one(loss, kind, below, monkeypatch):
    def in_step(w: Tensor, x: Tensor) -> Any:
        return fs.value_and_grad(fs.remat(loss))(fs.pvary(w, "data"), x)

    run = fs.shard_map(in_step, mesh=MESH, in_specs=(P(), P("data")), out_specs=P())

    def frames(call: Callable[..., Any]) -> list[str]:
        with pytest.raises(kind) as caught:
            call(torch.ones(3, 2), torch.ones(4, 4))
        names = [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
        return [name for name in names if name != "_fn"]  # of torch.compiler.disable, once dynamo is imported

    assert frames(run) == ["frames", "in_step", loss.__name__, *below]
    if loss is error_of_torch:  # unchecked, a frame of fshard calls the kernel
        assert frames(run.on(MESH, check="never"))[3:] == ["wrapper", "linear", "_linear"]
    assert frames(functools.partial(fs.plan, run))[:3] == ["frames", "in_step", loss.__name__]
    monkeypatch.setenv("FSHARD_TRACEBACK", "full")
    assert len(every := frames(run)) > 12
    assert {"_run_rank", "_grad_by_autograd"} <= {*every}


def test_an_error_that_is_its_own_cause_is_raised():
    @api_boundary
    def f():
        e, other = ValueError("mine"), KeyError("other")
        e.__cause__, other.__cause__ = other, e
        raise e

    with pytest.raises(ValueError, match="mine"):
        f()


def test_traceback_of_another_error_that_no_frame_of_the_user_raised_is_whole():
    @checked
    def f(x: int) -> int:
        return {}[x]

    f.__wrapped__.__code__ = f.__wrapped__.__code__.replace(co_filename=fs.errors.__file__)  # as a bug of fshard
    with pytest.raises(KeyError) as caught:
        f(1)
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][1:] == ["wrapper", "f"]


def test_ipython_shows_the_message_and_then_the_users_lines(monkeypatch):
    def wrong() -> None:
        step(torch.ones(3, 2), torch.ones(4, 3))

    with pytest.raises(fs.ShardingError) as caught:
        wrong()
    caught.value.add_note("a note")
    lines = caught.value._render_traceback_()
    message = str(caught.value).splitlines()
    assert lines[0] == f"\x1b[1;31mShardingError\x1b[0m: {message[0]}"
    assert lines[1 : len(message)] == message[1:]
    assert lines[len(message) : len(message) + 3] == ["a note", "", "called from"]
    first = wrong.__code__.co_firstlineno + 1
    assert lines[-9:-6] == [f"  test_errors.py:{first} in wrong", "    step(torch.ones(3, 2), torch.ones(4, 3))",
                            "    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^"]  # fmt: skip
    assert lines[-3].endswith(" in in_loss")
    assert lines[-1].strip() == "^^^^^"
    with pytest.raises(fs.ShardingError) as caught:
        WRONG["a cause"][0]()
    causes = [line for line in caught.value._render_traceback_() if line.startswith("caused by ")]
    assert len(causes) == 1
    assert "DataDependent" in causes[0]
    monkeypatch.setenv("FSHARD_TRACEBACK", "full")
    assert caught.value._render_traceback_() == "".join(traceback.format_exception(caught.value)).splitlines()
    assert fail("never raised")._render_traceback_()[-1] == "fshard.errors.ShardingError: never raised"


@pytest.mark.slow
def test_ipython_asks_for_these_lines(capsys):
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell()
    shell.run_cell("import fshard as fs, torch\nfs.psum(torch.ones(2), 'data')")
    out = capsys.readouterr().out
    assert "IPython" not in out
    assert re.search(r"ShardingError.*called outside shard_map[^\0]*called from\n.*ipython-input.*\n +fs\.psum", out)


def test_raise_all_without_errors_does_nothing():
    assert raise_all([]) is None


def test_raise_all_raises_a_single_error_itself():
    error = fail("only this", fix="that")
    with pytest.raises(fs.ShardingError) as caught:
        raise_all([error])
    assert caught.value is error


def test_raise_all_shows_every_error_in_full():
    with pytest.raises(fs.ShardingError) as caught:
        raise_all([fail("one", fix="a"), fail("two", n=2)])
    assert str(caught.value) == "2 problems\none\n  fix: a\ntwo\n  n  2"


def test_raise_all_tells_errors_of_one_cause_once():
    def text(tree_: Any, spec: P) -> str:
        return error_text(fs.shard_map(lambda p: p, mesh=MESH, in_specs=(spec,), out_specs=P()), tree_)

    block = {"w": fs.init.zeros((4, 4)), "b": fs.init.zeros((4,))}
    described = {"embed": fs.init.zeros((6, 4)), "h": [block] * 24, "head": block}
    same = "args[0]['h'][0]['b'], args[0]['h'][0]['w'], args[0]['h'][1]['b'], and 47 more"
    assert text(described, P()) == (
        "<lambda>: args[0]['embed']: is only described\n"
        "  leaf  f32[6, 4] = zeros\n"
        "  fix: fs.materialize it, or fs.check(f, ...), which needs no values\n"
        f"  the same for {same}"
    )
    placed = fs.materialize({"a": fs.init.zeros(4), "b": fs.init.zeros((4, 2))}, P("data"), MESH, key=fs.key(0))
    assert text(placed, P()).count("fix: ") == 1
    assert text({**placed, "c": fs.init.zeros(3)}, P()).startswith("2 problems\n")  # another cause
    assert text({**placed, "c": torch.ones(3, 2)}, P(None, "data", None)).count("fix: ") == 2  # one spec, two ranks


# --- arguments ---------------------------------------------------------------------------------------------

KINDS = [  # annotation, its words, values that it accepts, values that it does not
    (int, "an int", [0, -1, np.int64(3)], [True, 1.0, "1", None, torch.tensor(1)]),
    (float, "a float", [0.5, 1, True, np.float32(0.5)], ["1", 1j, None, torch.tensor(1.0)]),
    (bool, "a bool", [True, False], [0, None, "True"]),
    (str | None, "a str or None", ["", None], [b"", 0, ["a"]]),
    (Tensor, "a Tensor", [torch.ones(2), torch.nn.Parameter(torch.ones(2))], [1.0, [1.0], np.ones(2)]),
    (Axis, "a str, a tuple of str or None", ["a", ("a", "b"), (), None], [P("a"), ["a"], ("a", None), 0]),
    (Sequence[int], "a Sequence of int", [[1], (1, 2), torch.Size([3]), []], ["12", [1.0], 1, None, {1}]),
    (tuple[int, int], "a tuple of 2 int", [(1, 2)], [(1,), (1, 2, 3), [1, 2], (1, "a")]),
    (Mapping[str, P], "a Mapping of P", [{"a": P()}, {}], [{"a": 1}, {1: P()}, [P()], None]),
    (Literal['x', 'y'], "'x' or 'y'", ["x", "y"], ["z", None, 0, torch.ones(2)]),
    (Callable[[int], int], "a function", [len, int, lambda: 0], ["len", None, 1]),
    (TypeAliasType("Size", int) | None, "an int or None", [1, None], [1.0, "1"]),
    (TypeAliasType("Row", list[T], type_params=(T,))[int], "a list of int", [[1], []], [["a"], (1,)]),
    (torch.dtype | None, "a dtype or None", [torch.float32, None], ["float32", float, np.float32]),
    (Any, "anything", [1, None, "a", torch.ones(2)], []),
]  # fmt: skip


@pytest.mark.parametrize(("annotation", "words", "right", "wrong"), KINDS, ids=[k[1] for k in KINDS])
def test_annotation_states_the_kind_of_an_argument(annotation, words, right, wrong):
    def f(x): ...

    f.__annotations__["x"] = annotation
    f = checked(f)
    for x in right:
        f(x)
        f(x=x)
    for x in wrong:
        assert error_text(f, x).startswith(f"f: x must be {words}, got "), x
        assert error_text(f, x=x) == error_text(f, x)


def test_every_form_of_parameter_is_checked():
    @checked
    def f(a: int, /, b_: str = "", *rest: float, c: bool = True, **others: int) -> Undefined:  # noqa: F821
        return a, b_, rest, c, others

    assert f(1, "2", 3.0, 4, c=False, d=5) == (1, "2", (3.0, 4), False, {"d": 5})
    assert error_text(f, "1") == "f: a must be an int, got '1'"
    assert error_text(f, 1, 2) == "f: b must be a str, got 2"
    assert error_text(f, 1, "2", 3, "4") == "f: rest must be a float, got '4'"
    assert error_text(f, 1, c=0) == "f: c must be a bool, got 0"
    assert error_text(f, 1, d="5") == "f: d must be an int, got '5'"
    assert error_text(f) == "f: a is missing\n  fix: f(a, b)"


def test_error_text_of_arguments_by_wrong_names():
    assert error_text(fs.optim.adamw, 1e-3, betas=(0.9, 0.95)) == (
        "adamw: no argument is called 'betas'\n  near  b1, b2\n  fix: adamw(lr, b1=, b2=, eps=, weight_decay=, mask=)"
    )
    assert error_text(fs.optim.adam, 1e-3, betas2=1).startswith("adam: no argument is called 'betas2'\n  fix: ")
    assert error_text(fs.psum, torch.ones(2), axs="data") == (
        "psum: no argument is called 'axs'\n  near  axis\n  fix: psum(x, \"data\")"
    )
    assert error_text(fs.materialize, {}) == (
        "materialize: specs, mesh and key are missing\n  fix: materialize(tree, specs, mesh, key=fs.key(0))"
    )
    assert error_text(fs.psum, 1, "data", x=2) == (
        "psum: x is passed by position, as 1, and by name\n  fix: psum(x, axis)"
    )


def test_error_text_of_too_many_arguments_by_position():
    assert error_text(fs.show, {}, P(), None) == (
        "show: 3 arguments by position, and it takes 2\n  fix: show(tree, shape, mesh=, specs=, against=, fold=)"
    )
    f, mesh = (lambda x: x), fs.make_mesh(data=1)
    assert error_text(fs.shard_map(f, mesh=mesh, out_specs=P()).on, mesh, "never") == (  # a method, without self
        "on: 2 arguments by position, and it takes 1\n  fix: on(mesh, check=, compile=)"
    )
    assert error_text(fs.plan, f, device="H100").startswith("plan: f must be a ShardMapped")
    assert error_text(fs.plan, fs.shard_map(f, mesh=mesh, out_specs=P()), device="H100").endswith(
        "fix: fs.devices.H100, fs.devices.this_cpu(), or fs.devices.Device(...)"
    )


def test_methods_and_dataclasses_are_checked():
    @checked
    @dataclasses.dataclass(frozen=True)
    class Pair:
        a: int
        b: tuple[str, ...] = ()

        @checked
        def plus(self, n: int) -> int:
            return self.a + n

    assert Pair(1, ("x",)).plus(2) == 3
    assert error_text(Pair, 1, ["x"]) == "Pair: b must be a tuple of str, got ['x']"
    assert error_text(Pair(1).plus, "2") == "plus: n must be an int, got '2'"


def test_error_of_a_tensor_says_where_a_placed_or_described_leaf_is_one():
    described = fs.init.zeros(4)
    placed = fs.materialize(described, P("a"), fs.make_mesh(a=2), key=fs.key(0))
    assert error_text(fs.nn.gelu, placed) == (
        "gelu: x must be a Tensor, got f32[4@a]\n"
        "  fix: compute inside fs.shard_map, where it is a tensor; fs.device_get(x) is the full tensor"
    )
    assert error_text(fs.nn.gelu, described) == (
        "gelu: x must be a Tensor, got f32[4] = zeros\n  fix: fs.materialize it, and compute inside fs.shard_map"
    )
    assert error_text(fs.nn.gelu, [1.0]) == "gelu: x must be a Tensor, got [1.0]\n  fix: torch.as_tensor(x)"


@pytest.mark.slow
def test_error_of_a_class_of_the_same_name_says_of_which_module_each_is():
    assert error_text(fs.lora.specs, fs.ia3.Config(["q"]), {}, {}) == (
        "specs: cfg must be a Config of fshard.lora, got one of fshard.lora.ia3\n  fix: call fshard.lora.ia3.specs"
    )
    assert error_text(fs.ia3.apply, fs.lora.Config(["q"]), {}, {}).endswith("fix: call fshard.lora.apply")
    assert error_text(fs.models.t5.init, fs.models.llama.Config()) == (
        "init: cfg must be a Config of fshard.models.t5, got one of fshard.models.llama\n"
        "  fix: call fshard.models.llama.init"
    )
    assert error_text(fs.ia3.apply, 3, {}, {}) == "apply: cfg must be a Config, got 3"


def test_a_compiled_program_checks_no_argument():
    double = checked(doubled)
    compiled = torch.compile(double, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


def doubled(x: Tensor) -> Tensor:
    return 2 * x
