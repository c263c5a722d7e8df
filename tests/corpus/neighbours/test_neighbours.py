"""The page that compares the verdicts of other systems says what the stored verdicts and the corpus say.

The verdicts are made by `run_jax` and `run_spmd_types`, which need environments of their own.
"""

from __future__ import annotations

import pytest

from tests.corpus.neighbours.programs import entries
from tests.corpus.neighbours.table import CORRECT, PAGE, SYSTEMS, WRONG, filled, stored

IS_WRONG = {e.name: e.is_wrong for e in entries()}


@pytest.mark.parametrize("system", SYSTEMS)
def test_stored_verdicts_are_of_programs_of_the_corpus(system: str):
    verdicts = stored(system)["verdicts"]
    assert set(verdicts) <= set(IS_WRONG), "remove these: the corpus has them no longer"
    unknown = {name: v for name, (v, _) in verdicts.items() if v not in (WRONG if IS_WRONG[name] else CORRECT)}
    assert not unknown
    # New programs may wait for the next comparison, until they are one in ten.
    assert len(verdicts) > 0.9 * len(IS_WRONG), f"run python -m tests.corpus.neighbours.run_{system}"


def test_page_has_the_tables_of_the_stored_verdicts():
    page = PAGE.read_text()
    assert filled(page) == page, "run python -m tests.corpus.neighbours.table"
    missing = [f"{p} {v}" for s in SYSTEMS for p, v in stored(s)["versions"].items() if f"{p} {v}" not in page]
    assert not missing
