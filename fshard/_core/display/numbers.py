"""Texts of numbers: runs of integers, and seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence


def format_runs(numbers: Sequence[int], *, separator: str = " ", dash: str = "–", most: float = math.inf) -> str:
    """Format ascending numbers by their runs; of more than `most` runs the middle ones are left out.

    >>> format_runs([0, 1, 2, 3, 8]), format_runs([0, 1, 2, 5], separator=",", dash="..")
    ('0–3 8', '0..2,5')
    >>> format_runs([*range(0, 32, 2)], separator=",", most=4)
    '0,2,…,30'
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}{dash}{run[-1]}" for run in runs]
    return separator.join(texts if len(texts) <= most else [*texts[: int(most) - 2], "…", texts[-1]])


def duration(seconds: float) -> str:
    """Format seconds with a unit and three digits.

    >>> duration(0.01234), duration(75.2), duration(5e-12), duration(0.0)
    ('12.3 ms', '75.2 s', '0.01 ns', '0 s')
    """
    units = {"s": 1.0, "ms": 1e3, "us": 1e6}
    unit, factor = next((row for row in units.items() if seconds * row[1] >= 1), ("ns", 1e9))
    return f"{three_digits(seconds * factor)} {unit}" if seconds else "0 s"


def three_digits(x: float) -> str:
    """Format a number with three digits or more, and commas.

    >>> three_digits(0.123), three_digits(12.34), three_digits(123456.7)
    ('0.12', '12.3', '123,457')
    """
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"
