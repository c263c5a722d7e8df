"""What people shipped: every repaired program passes, every wrong one is caught, by the net that should catch it."""

from __future__ import annotations

import inspect
import re

import pytest

import fshard as fs
from fshard import ShardingError
from tests.corpus.wild import PATTERNS

CHECKED = "check" in inspect.signature(fs.shard_map).parameters
MESH = fs.make_mesh(data=2, model=4)
every = pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.right.__name__.removesuffix("_right"))
static = pytest.mark.parametrize(
    "pattern", [p for p in PATTERNS if p.expected == "static"], ids=lambda p: p.right.__name__.removesuffix("_right")
)


def mapped(pattern, body, check):
    options = {"check": check} if CHECKED else {}
    return fs.shard_map(body, mesh=MESH, in_specs=pattern.in_specs, out_specs=pattern.out_specs, **options)


def marked(body):
    """The line of a program that is marked BUG."""
    lines, start = inspect.getsourcelines(body)
    (line,) = [start + i for i, text in enumerate(lines) if "# BUG" in text]
    return line


@every
def test_the_right_program_is_the_same_on_every_mesh(pattern):
    fs.verify(mapped(pattern, pattern.right, "always"), *pattern.args)


@every
def test_the_wrong_program_is_caught_by_verify_at_its_leaf_and_axis(pattern):
    with pytest.raises(ShardingError) as e:
        fs.verify(mapped(pattern, pattern.wrong, "never"), *pattern.args)
    text = str(e.value)
    assert re.findall(r"collapsing (.+) gives another answer", text) == [repr(pattern.axis)]
    assert pattern.leaf in text
    if pattern.factor is not None:
        told = text.split(pattern.leaf)[1].split("result[")[0]  # of this leaf, and no other
        assert f"every value is {pattern.factor:g} times what it should be" in told


@pytest.mark.skipif(not CHECKED, reason="shard_map has no checker")
@static
def test_the_wrong_line_is_named_before_anything_is_compared(pattern):
    with pytest.raises(ShardingError, match=rf"wild\.py:{marked(pattern.wrong)} in "):
        mapped(pattern, pattern.wrong, "always")(*pattern.args)


def test_only_what_types_can_see_is_marked():
    assert all((p.expected == "static") == ("# BUG" in inspect.getsource(p.wrong)) for p in PATTERNS)
