"""The ranks that run a program without data, as `fs.check` and `fs.plan` do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from fshard._core.protocol import Axes, coords_of, ranks_over
from fshard.spec import Size, part_lengths

_MOST_RANKS = 3  # after the first, for each set of axes

Lengths = tuple[int, ...]  # of the parts of a dim, by rank over its axes


def run_groups(
    run: Callable[[int], Any], splits: Callable[[Iterable[Any]], Iterable[tuple[Axes, Size]]], sizes: Mapping[str, int]
) -> tuple[dict[int, Any], list[tuple[int, ...]], Axes]:  # fmt: skip
    """Run rank 0, then the ranks of `groups_to_run` by the `splits` of all runs, until each of them has run.

    Return the runs by rank, the groups, and the axes that a run `branches_on`.
    """
    runs, missing = dict[int, Any](), {0}
    while missing:
        for rank in sorted(missing):
            runs[rank] = run(rank)
        over = tuple(a for a in sizes if any(a in found.branches_on for found in runs.values()))
        groups = groups_to_run(splits(runs.values()), over, sizes)
        missing = {rank for group in groups for rank in group} - runs.keys()
    return runs, groups, over


def groups_to_run(
    splits: Iterable[tuple[Axes, Size]], branches_on: Collection[str], sizes: Mapping[str, int]
) -> list[tuple[int, ...]]:  # fmt: skip
    """Return groups of ranks that together have the lengths of every dim in `splits`. The first group has rank 0.

    A group has a rank at each position of the axes `branches_on`, by which the program differs. `splits` are the axes
    that split a dim, and its size, or the lengths of its parts.

    1. Over each set of axes choose the position that adds most new lengths, the longest of several, until every length
       is covered or 3 are chosen; of a dim with a size none, as rank 0 has its longest part. Other positions are 0.
    2. Add the last position on all axes whose parts differ.
    """
    first = dict.fromkeys(sizes, 0)
    places, last = [first], first
    rows: dict[Axes, dict[Lengths, None]] = {}
    for axes, n in splits:
        lengths = tuple(part_lengths(n, [sizes[a] for a in axes]))
        if len(set(lengths)) > 1 and not is_settled(axes, lengths, branches_on, sizes):
            last = last | {a: sizes[a] - 1 for a in axes}
            if isinstance(n, tuple):
                rows.setdefault(axes, {})[lengths] = None
    for axes, several in rows.items():
        missing = {(i, n) for i, row in enumerate(several) for n in row if n != row[0]}
        columns = list(zip(*several, strict=True))  # of each position
        for _ in range(_MOST_RANKS):
            new = [missing & set(enumerate(column)) for column in columns]
            at = max(range(len(columns)), key=lambda at: (len(new[at]), sum(columns[at]), at))
            missing -= new[at]
            places += [first | _coords(axes, at, sizes)] * bool(new[at])
    return list(dict.fromkeys(tuple(ranks_over(tuple(branches_on), sizes, place)) for place in [*places, last]))


def is_settled(axes: Axes, lengths: Lengths, branches_on: Collection[str], sizes: Mapping[str, int]) -> bool:
    """Return whether a position on `branches_on` decides on the length of a part, such as of a layer on one stage."""
    found: dict[Lengths, int] = {}
    for i, n in enumerate(lengths):
        position = tuple(at for a, at in _coords(axes, i, sizes).items() if a in branches_on)
        if found.setdefault(position, n) != n:
            return False
    return True


def _coords(axes: Axes, position: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the coordinates of a position over the flattened axes."""
    return dict(zip(axes, coords_of(position, [sizes[a] for a in axes]), strict=True))
