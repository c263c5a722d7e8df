"""The fixes that errors print are right: applied to the source of a wrong program, they make it a correct one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fshard as fs
from fshard import ShardingError
from tests.corpus import bugs_gpt2, bugs_mlp, bugs_optim, fixes, refused, reported_bugs
from tests.corpus.test_reported_bugs import MESH
from tests.corpus.wrong.test_wrong import MODULES, wrong

Call = tuple[Any, tuple[Any, ...]]  # the mapped function and its arguments


def _bug(name: str) -> Callable[[Any], Call]:
    def build(module: Any) -> Call:
        bug = next(bug for bug in module.BUGS if str(bug) == name)
        return bug.build(bug.wrong, check="always")

    return build


def _reported(name: str) -> Callable[[Any], Call]:
    def build(module: Any) -> Call:
        bug = next(bug for bug in module.REPORTED_BUGS if bug.wrong.__name__ == name)
        f = fs.shard_map(bug.wrong, mesh=MESH, in_specs=bug.in_specs, out_specs=bug.out_specs, check="always")
        return f, bug.args

    return build


def _refused(name: str) -> Callable[[Any], Call]:
    def build(module: Any) -> Call:
        f, ins, out, args = module.CASES[name]
        return fs.shard_map(f, mesh=module.MESH, in_specs=ins, out_specs=out, check="always"), args

    return build


def _wrong(name: str) -> Callable[[Any], Call]:
    def build(module: Any) -> Call:
        program = next(program for program in module.PROGRAMS if str(program) == name)
        return program.mapped(program.wrong), program.args

    return build


PROGRAMS: dict[str, tuple[Any, Callable[[Any], Call]]] = {
    **{f"bug {bug}": (m, _bug(str(bug))) for m in (bugs_mlp, bugs_gpt2, bugs_optim) for bug in m.BUGS
       if bug.caught_by == "types"},
    **{f"reported {bug.wrong.__name__}": (reported_bugs, _reported(bug.wrong.__name__))
       for bug in reported_bugs.REPORTED_BUGS if bug.caught_by == "types"},
    **{f"refused {name}": (refused, _refused(name)) for name in refused.CASES},
    **{f"wrong {p}": (m, _wrong(str(p))) for m in (sys.modules[f"{wrong.__name__}.{name}"] for name in MODULES)
       for p in m.PROGRAMS if p.caught_by == "types"},
}  # fmt: skip


def ends(module: Any, source: str, build: Callable[[Any], Call], steps: int = 3) -> list[str]:
    """Return the ends of all sequences of fixes, at most `steps` long: "right", "wrong", or the last message.

    "wrong" is a program that the types accept and `verify` does not. A sequence in which a message offers several
    fixes, and one of them leads to a right program, counts as right: the message says when to take it.
    """
    f, args = build(fixes.loaded(module, source) if source else module)
    try:
        f(*args)
    except (ShardingError, RuntimeError, TypeError, NameError) as e:
        message = f"{type(e).__name__}: {e}" if not isinstance(e, ShardingError) else str(e)
        source = source or Path(module.__file__).read_text()
        found = [new for option in fixes.options(message) if (new := fixes.applied(source, option)) is not None]
        if not found or not steps:
            return [message]
        results = [end for new in found for end in ends(module, new, build, steps - 1)]
        return ["right"] if "right" in results else results
    try:
        fs.verify(f, *args)
    except ShardingError:
        return ["wrong"]
    return ["right"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_fixes_lead_to_a_correct_program(name):
    module, build = PROGRAMS[name]
    found = ends(module, "", build)
    assert found == ["right"], "\n\n".join(found)
