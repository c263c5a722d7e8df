"""A lane of a timeline as a strip of HTML: in each column the colour of what takes the most time there."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from html import escape

from fshard._core.display import Html, rgba

from .chrome import Slice

_COLUMNS = 100  # of a percent of the width each
_LETTERS = 60
_KINDS = ("forward", "recompute", "backward", "update", "wait")


def _tint(kind: str) -> str:
    return rgba(_KINDS.index(kind) if kind in _KINDS else len(_KINDS), 0.6)


LEGEND = Html("<div>" + " ".join(f'<span style="background: {_tint(kind)}">&nbsp;{kind}&nbsp;</span>'
                                 for kind in _KINDS) + "</div>")  # fmt: skip


def strip(slices: Sequence[Slice], start: float, seconds: float) -> Html:
    """Return a strip of the `seconds` from `start`: each column has the kind that takes the most of it."""
    width = seconds / _COLUMNS
    kinds = _kinds(slices, start, seconds, _COLUMNS)
    parts, at = [], 0
    for kind, run in itertools.groupby(kinds):
        n = len(list(run))
        hover = escape(f"{kind or 'idle'}, {1e3 * at * width:.3f} to {1e3 * (at + n) * width:.3f} ms")
        parts.append(f'<div title="{hover}" style="float: left; width: {n}%; height: 0.9em; '
                     f'background: {_tint(kind) if kind else "rgba(128, 128, 128, 0.12)"}"></div>')  # fmt: skip
        at += n
    return Html(f'<div style="overflow: hidden; line-height: 0; max-width: 75em">{"".join(parts)}</div>')


def letters(slices: Sequence[Slice], start: float, seconds: float) -> str:
    """Return the strip as a text: F, R, B or U for forward, recompute, backward and update, and a dot for a wait."""
    kinds = _kinds(slices, start, seconds, _LETTERS)
    return "".join("." if kind in ("", "wait") else kind[0].upper() for kind in kinds)


def _kinds(slices: Sequence[Slice], start: float, seconds: float, count: int) -> list[str]:
    """Return the kind that takes the most time in each of `count` columns; an empty text if more of it is idle."""
    width = seconds / count
    columns: list[Counter[str]] = [Counter() for _ in range(count)]
    for s in slices if width else ():
        kind = "wait" if "waits_for" in s.facts else s.phase
        first, last = (min(count - 1, max(0, int((t - start) / width))) for t in (s.start, s.end))
        for i in range(first, last + 1):
            begin = start + i * width
            columns[i][kind] += max(0.0, min(s.end, begin + width) - max(s.start, begin))  # type: ignore[assignment]
    most = [max(shares.items(), key=lambda row: row[1], default=("", 0.0)) for shares in columns]
    return [kind if busy > width - sum(shares.values()) else ""
            for (kind, busy), shares in zip(most, columns, strict=True)]  # fmt: skip
