"""Correct programs of many kinds pass the types and verify, and compute what one device computes."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch

import fshard as fs
from tests.corpus import correct
from tests.corpus.correct.program import Program
from tests.lib.assertions import error_text

MODULES = [m.name for m in pkgutil.iter_modules(correct.__path__) if m.name not in ("program", "test_correct")]
PROGRAMS: list[Program] = [
    p for name in MODULES for p in importlib.import_module(f"{correct.__name__}.{name}").PROGRAMS
]


# Plain pytest runs two of three.
SOME = [pytest.param(p, marks=[pytest.mark.slow] * (i % 3 == 0)) for i, p in enumerate(PROGRAMS)]


@pytest.mark.parametrize("program", SOME, ids=str)
def test_correct_program_passes_the_types_and_equals_one_device(program: Program):
    result = fs.device_get(program.mapped()(*program.args))
    torch.testing.assert_close(result, program.dense(*program.args))


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_correct_program_passes_check_and_verify(program: Program):
    f = program.mapped()
    if program.static:
        fs.check(f, *program.args)
    else:
        assert "needs the value of a tensor" in error_text(fs.check, f, *program.args)
    unchecked = program.mapped("never")  # the types are those of the call
    if str(program) == "skipped_step":
        assert "returns args[0] unchanged" in error_text(fs.verify, unchecked, *program.args)
    elif program.meshes != (program.axes,):  # the only mesh of such a program
        fs.verify(unchecked, *program.args, meshes=program.meshes)


def test_names_are_unique():
    names = [str(program) for program in PROGRAMS]
    assert len(set(names)) == len(names)
