"""The exception class and the form of its messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor
from typing_extensions import TypeAliasType  # what a `type` statement of Python 3.12 makes

import fshard as fs
from fshard import P
from fshard._comm import Axis
from fshard.errors import checked, fail, raise_all
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
    with pytest.raises(TypeError, match=r"f\(\) missing 1 required positional argument: 'a'"):
        f()


def test_error_text_of_too_many_arguments_by_position():
    assert error_text(fs.show, {}, P(), None) == (
        "show: 3 arguments by position, of which it takes 1\n  fix: show(tree, mesh=, specs=, fold=)"
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
        "specs: cfg must be a Config of fshard.lora, got one of fshard.ia3\n  fix: call fshard.ia3.specs"
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
