"""Bugs from public reports: every correct program passes, and every wrong one is caught by the check that should."""

from __future__ import annotations

import re

import pytest

import fshard as fs
from fshard import ShardingError
from tests.corpus.located import marked_lines, names_the_line
from tests.corpus.reported_bugs import REPORTED_BUGS
from tests.lib.assertions import error_text

MESH = fs.make_mesh(data=2, model=4)
TYPES = [bug for bug in REPORTED_BUGS if bug.caught_by == "types"]


def name_of(bug):
    return bug.correct.__name__.removesuffix("_correct")


def mapped(bug, program, check):
    return fs.shard_map(program, mesh=MESH, in_specs=bug.in_specs, out_specs=bug.out_specs, check=check)


@pytest.mark.parametrize("bug", REPORTED_BUGS, ids=name_of)
def test_correct_program_passes_the_types_and_verify(bug):
    fs.verify(mapped(bug, bug.correct, "always"), *bug.args)


@pytest.mark.parametrize("bug", REPORTED_BUGS, ids=name_of)
def test_verify_names_the_leaf_the_axis_the_factor_and_the_line(bug):
    text = error_text(fs.verify, mapped(bug, bug.wrong, "never"), *bug.args, locate=bug.caught_by == "verify")
    assert names_the_line(text, bug.wrong) == (bug.caught_by == "verify"), text
    assert re.findall(r"collapsing (.+) gives another answer", text) == [repr(bug.axis)]
    assert bug.leaf in text
    if bug.factor is not None:
        text_of_leaf = text.split(bug.leaf)[1].split("result[")[0]
        assert f"every value is {bug.factor:g} times what it should be" in text_of_leaf


@pytest.mark.parametrize("bug", TYPES, ids=name_of)
def test_types_name_the_line(bug):
    with pytest.raises(ShardingError, match=f"{marked_lines(bug.wrong)[0]} in "):
        mapped(bug, bug.wrong, "always")(*bug.args)
