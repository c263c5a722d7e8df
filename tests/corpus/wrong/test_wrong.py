"""Wrong programs of many kinds are caught, at the line of the mistake: by the types, or else by verify."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import fshard as fs
from tests.corpus import wrong
from tests.corpus.located import marked_lines, names_the_line
from tests.corpus.wrong.program import WrongProgram
from tests.lib.assertions import error_text
from tests.lib.tiers import slow_unless

MODULES = [m.name for m in pkgutil.iter_modules(wrong.__path__) if m.name not in ("program", "test_wrong")]
PROGRAMS: list[WrongProgram] = [
    p for name in MODULES for p in importlib.import_module(f"{wrong.__name__}.{name}").PROGRAMS
]


# verify names the line after the mistake: the gradient is wrong where it is used, and the numbers of ranks in another
# order are numbers of ranks.
NEXT_LINE = {"gathered_features_detached", "flat_rank_in_the_wrong_order"}

# The first call compares the results that are declared to be one value, but knows no line.
ANOTHER_VALUE_PER_RANK = {"skip"}

BY_TYPES = [program for program in PROGRAMS if program.caught_by == "types"]
OTHERS = [program for program in PROGRAMS if program.caught_by != "types"]
CORRECT = list({program.correct: program for program in PROGRAMS}.values())  # some are of many wrong ones


# Of those whose wrong twin the types catch, plain pytest asks the types, and the slow tests verify.
VERIFIED = [pytest.param(p, marks=[pytest.mark.slow] * (p.caught_by == "types")) for p in CORRECT]


@pytest.mark.parametrize("program", VERIFIED, ids=str)
def test_correct_program_passes_the_types_and_verify(program: WrongProgram):
    fs.verify(program.mapped(program.correct), *program.args)


@pytest.mark.parametrize("program", [p for p in CORRECT if p.caught_by == "types"], ids=str)
def test_correct_program_passes_the_types(program: WrongProgram):
    program.mapped(program.correct)(*program.args)


@pytest.mark.parametrize("program", BY_TYPES, ids=str)
def test_types_name_the_line_and_the_axis(program: WrongProgram):
    text = error_text(program.mapped(program.wrong), *program.args)
    (place,) = marked_lines(program.wrong)
    assert [line for line in text.splitlines() if line.startswith(f"{place} in ")], text
    assert f"'{program.axis}'" in text


@pytest.mark.parametrize("program", slow_unless(OTHERS[::3], OTHERS), ids=str)
def test_verify_names_the_line_and_the_axis(program: WrongProgram):
    if program.caught_by == "verify":
        verify_names_the_axis_and_the_line(program)
    else:
        assert program.out_of_reach
        fs.verify(program.mapped(program.wrong), *program.args)


@pytest.mark.slow
@pytest.mark.parametrize("program", BY_TYPES, ids=str)
def test_verify_catches_what_the_types_catch(program: WrongProgram):
    verify_names_the_axis_and_the_line(program)


@pytest.mark.slow
@pytest.mark.parametrize("program", OTHERS, ids=str)
def test_types_of_a_program_that_they_do_not_catch_are_right(program: WrongProgram):
    if program.name in ANOTHER_VALUE_PER_RANK:
        assert "is not one value" in error_text(program.mapped(program.wrong), *program.args)
    else:
        program.mapped(program.wrong)(*program.args)


def verify_names_the_axis_and_the_line(program: WrongProgram) -> None:
    by_verify = program.caught_by == "verify"
    text = error_text(fs.verify, program.mapped(program.wrong, check="never"), *program.args, locate=by_verify)
    assert f"'{program.axis}'" in text
    assert names_the_line(text, program.wrong) == (by_verify and program.name not in NEXT_LINE), text
    assert program.leaf in text
    if program.factor is not None:
        of_leaf = text.partition(program.leaf)[2].partition("result[")[0]
        assert f"every value is {program.factor} times what it should be" in of_leaf


def test_names_are_unique():
    names = [str(program) for program in PROGRAMS]
    assert len(set(names)) == len(names)


def test_replaced_lines_name_programs():
    sources = (Path(folder, f"{name}.py").read_text() for folder in wrong.__path__ for name in MODULES)
    named = {name for source in sources for name in re.findall(r"# WRONG (\w+)", source)}
    assert named <= {program.name for program in PROGRAMS}
