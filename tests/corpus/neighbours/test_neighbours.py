"""The page that compares the verdicts of other systems says what the stored verdicts and the corpus say.

The verdicts are made by `run_jax` and `run_spmd_types`, which need environments of their own.
"""

from __future__ import annotations

import pytest

from tests.corpus.neighbours.programs import entries
from tests.corpus.neighbours.table import CORRECT, PAGE, SYSTEMS, WRONG, filled, stored

pytestmark = pytest.mark.xdist_group("neighbours")  # one worker builds the programs, once


@pytest.mark.parametrize("system", SYSTEMS)
def test_stored_verdicts_are_of_programs_of_the_corpus(system: str):
    verdicts = stored(system)["verdicts"]
    is_wrong = {e.name: e.is_wrong for e in entries()}
    assert set(verdicts) <= set(is_wrong), "remove these: the corpus has them no longer"
    unknown = {name: v for name, (v, _) in verdicts.items() if v not in (WRONG if is_wrong[name] else CORRECT)}
    assert not unknown
    # New programs may wait for the next comparison, until they are one in ten.
    assert len(verdicts) > 0.9 * len(is_wrong), f"run python -m tests.corpus.neighbours.run_{system}"


@pytest.mark.parametrize("system", SYSTEMS)
def test_correct_twin_of_a_program_that_is_caught_passes(system: str):
    """An adapter that refuses a program for a fault of its own refuses the correct program too."""
    verdicts = {name: v for name, (v, _) in stored(system)["verdicts"].items()}
    twins = {name: verdicts.get(f"{name} (correct)", "passes") for name, v in verdicts.items() if v == "caught"}
    assert {name: v for name, v in twins.items() if v != "passes"} == {}


def test_page_has_the_tables_of_the_stored_verdicts():
    page = PAGE.read_text()
    assert filled(page) == page, "run python -m tests.corpus.neighbours.table"
    missing = [f"{p} {v}" for s in SYSTEMS for p, v in stored(s)["versions"].items() if f"{p} {v}" not in page]
    assert not missing
