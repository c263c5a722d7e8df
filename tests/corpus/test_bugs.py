"""Bugs that people make in parallel programs are caught: most by the types, at their line, and all by verify."""

from __future__ import annotations

from typing import Any

import pytest

import fshard as fs
from tests.corpus.bugs import TITLES, Bug
from tests.corpus.bugs_mlp import BUGS as MLP
from tests.corpus.bugs_optim import BUGS as OPTIMIZER
from tests.corpus.located import names_the_line
from tests.lib.assertions import error_text

BUGS = [*MLP, *OPTIMIZER]
CORRECT = list({(bug.program, bug.correct): bug for bug in BUGS}.values())  # many bugs are of one program


def by_verify(bugs: list[Bug]) -> Any:
    """Parameters of a test by `verify`: fast are those that the types do not catch, or with a factor of 2."""
    slow = [bug.factor == 4 or (bug.caught_by == "types" and not bug.factor) for bug in bugs]
    return [pytest.param(bug, marks=[pytest.mark.slow] * s) for bug, s in zip(bugs, slow, strict=True)]


@pytest.mark.parametrize("bug", by_verify(CORRECT), ids=str)
def test_correct_program_passes_the_types_and_verify(bug: Bug):
    f, args = bug.build(bug.correct, check="always")
    fs.verify(f, *args)


@pytest.mark.parametrize("bug", by_verify(BUGS), ids=str)
def test_verify_names_the_leaf_the_axis_the_factor_and_the_line(bug: Bug):
    f, args = bug.build(bug.wrong, check="never")
    message = error_text(fs.verify, f, *args, locate=bug.caught_by == "verify")
    assert names_the_line(message, bug.wrong) == (bug.caught_by == "verify"), message
    parts = [part for part in message.split("verify: ") if f"'{bug.axis}'" in part.partition("\n")[0]]
    assert parts, message
    text = "".join(parts)
    assert bug.leaf is None or f"result{bug.leaf}" in text, text
    assert bug.factor is None or f"is {bug.factor} times" in text, text


@pytest.mark.parametrize("bug", [b for b in BUGS if b.caught_by == "types"], ids=str)
def test_types_name_the_line_and_the_axis(bug: Bug):
    f, args = bug.build(bug.wrong, check="always")
    text = error_text(f, *args)
    errors = [line for line in text.splitlines() if line.startswith(f"{bug.line} in ")]
    assert errors, text
    assert f"'{bug.axis}'" in errors[0]


def test_types_catch_most_kinds_of_bugs():
    assert {bug.number for bug in BUGS} == set(TITLES)
    assert len({bug.number for bug in BUGS if bug.caught_by == "types"}) >= 8
