"""The ranks that run a program without data, as `fs.check` and `fs.plan` do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from fshard._core.protocol import Axes, coords_of, ranks_over

_MOST_RANKS = 3  # after the first, for each set of axes

Lengths = tuple[int, ...]  # of the parts of a dim, by rank over its axes


def groups_to_run(
    uneven: Iterable[tuple[Axes, Lengths]], branches_on: Collection[str], sizes: Mapping[str, int],
    most: int = _MOST_RANKS,
) -> list[tuple[int, ...]]:  # fmt: skip
    """Return groups of ranks that together have the lengths of every uneven dim. The first group has rank 0.

    A group has a rank at each position of the axes `branches_on`, by which the program differs.

    1. Over each set of axes choose the position that adds most new lengths, the longest of several, until every length
       is covered or `most` are chosen. The position on other axes is 0.
    2. Add the last position on all these axes together.
    """
    first = dict.fromkeys(sizes, 0)
    places = [first]
    rows: dict[Axes, dict[Lengths, None]] = {}
    for axes, lengths in uneven:
        if not is_settled(axes, lengths, branches_on, sizes):
            rows.setdefault(axes, {})[lengths] = None
    for axes, several in rows.items():
        missing = {(i, n) for i, row in enumerate(several) for n in row if n != row[0]}
        columns = list(zip(*several, strict=True))  # of each position
        for _ in range(most if missing else 0):
            new = [missing & set(enumerate(column)) for column in columns]
            at = max(range(len(columns)), key=lambda at: (len(new[at]), sum(columns[at]), at))
            missing -= new[at]
            places += [first | _coords(axes, at, sizes)] * bool(new[at])
    places.append(first | {a: sizes[a] - 1 for axes in rows for a in axes})
    return list(dict.fromkeys(tuple(ranks_over(tuple(branches_on), sizes, place)) for place in places))


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
