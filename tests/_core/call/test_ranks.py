"""Ranks that `fs.check` and `fs.plan` run: one of each length of a part, at each position that the program asks for."""

from __future__ import annotations

import pytest

from fshard._core.call.ranks import groups_to_run

SIZES = {"stage": 2, "data": 4}
CASES = {
    "equal parts": ([(("data",), 8), (("stage", "data"), 8)], (), [(0,)]),
    "a short last part": ([(("data",), 10)], (), [(0,), (3,)]),
    "two uneven axes": ([(("data",), 10), (("stage",), 3)], (), [(0,), (7,)]),
    "chosen lengths, the longest first": ([(("data",), (1, 4, 2, 1))], (), [(0,), (1,), (2,), (3,)]),
    "at most three of the lengths": ([(("stage", "data"), tuple(range(8)))], (), [(0,), (7,), (6,), (5,)]),
    "each position": ([(("data",), 10)], ("stage",), [(0, 4), (3, 7)]),
    "lengths that the position decides on": ([(("stage", "data"), (8, 0))], ("stage",), [(0, 4)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_groups_have_the_lengths_of_each_dim_at_each_position(name: str) -> None:
    splits, branches_on, groups = CASES[name]
    assert groups_to_run(splits, branches_on, SIZES) == groups
