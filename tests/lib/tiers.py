"""The two tiers of a table of cases: the default one, and the one of `pytest -m slow`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_unless(fast: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases as parameters of a test; those that are not in `fast` are slow.

    The fast ones say the same of other sizes, models or meshes, and reach every branch that the slow ones do.
    """
    listed = list(cases)
    if missing := [case for case in fast if case not in listed]:
        raise ValueError(f"not among the cases: {missing}")
    return [case if case in fast else pytest.param(*_row(case), marks=pytest.mark.slow) for case in listed]


def _row(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
