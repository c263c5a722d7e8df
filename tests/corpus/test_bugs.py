"""The bugs people make in parallel programs are found: most by the types, with the line, and all by verify."""

from __future__ import annotations

import pytest

import fshard as fs
from fshard import ShardingError
from tests.corpus.bugs import TITLES, Bug
from tests.corpus.bugs_gpt2 import BUGS as BLOCK
from tests.corpus.bugs_mlp import BUGS as MLP
from tests.corpus.bugs_optim import BUGS as OPTIMIZER

BUGS = [*MLP, *BLOCK, *OPTIMIZER]
RIGHT = list({(bug.program, bug.right): bug for bug in BUGS}.values())  # many are one program

every_bug = pytest.mark.parametrize("bug", BUGS, ids=str)
static_bug = pytest.mark.parametrize("bug", [b for b in BUGS if b.expected == "static"], ids=str)
right_program = pytest.mark.parametrize("bug", RIGHT, ids=str)


@right_program
def test_the_right_program_is_verified(bug: Bug):
    f, args = bug.made(bug.right, check="never")
    fs.verify(f, *args)


@every_bug
def test_verify_tells_the_leaf_the_axis_and_the_factor(bug: Bug):
    f, args = bug.made(bug.wrong, check="never")
    with pytest.raises(ShardingError) as e:
        fs.verify(f, *args)
    told = [part for part in str(e.value).split("verify: ") if f"'{bug.axis}'" in part.partition("\n")[0]]
    assert told, str(e.value)
    text = "".join(told)
    assert bug.leaf is None or f"result{bug.leaf}" in text, text
    assert bug.factor is None or f"is {bug.factor} times" in text, text


@right_program
def test_the_types_let_the_right_program_pass(bug: Bug):
    f, args = bug.made(bug.right, check="always")
    f(*args)


@static_bug
def test_the_types_name_the_line_and_the_axis(bug: Bug):
    f, args = bug.made(bug.wrong, check="always")
    with pytest.raises(ShardingError) as e:
        f(*args)
    text = str(e.value)
    blamed = [line for line in text.splitlines() if line.startswith(f"{bug.line} in ")]
    assert blamed, text
    assert f"'{bug.axis}'" in blamed[0]


def test_most_of_the_table_is_found_by_the_types():
    assert {bug.number for bug in BUGS} == set(TITLES)
    assert len({bug.number for bug in BUGS if bug.expected == "static"}) >= 8
