"""Elements of HTML reprs: tables whose groups of rows collapse, bars, and a colour for each device.

Pages of notebooks are light or dark, and an untrusted JupyterLab removes style sheets, scripts, and what its sanitizer
does not know: `hsl()`, `inherit`, the unit `ch`. So every element has inline styles, of few kinds: no colour of text
or page is set, and lines, bars and blocks are translucent tints.
"""

from __future__ import annotations

import colorsys
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape, unescape
from typing import Any

_EM = 0.62  # width of a character of a monospaced font
_BAR = 8  # characters that a bar takes
_MOST_WIDE = 56  # characters of a column of texts: longer ones wrap
_LINE = "1px solid rgba(128, 128, 128, 0.25)"
_TABLE = (
    "display: inline-table; width: 100%; table-layout: fixed; border-collapse: collapse; margin: 0; border: none; "
    "vertical-align: top; font-size: 12px; word-wrap: break-word"
)
_ROW = f"background: transparent; border-top: {_LINE}"
_SIDE = {"l": "left", "r": "right", "c": "center"}


@dataclass(frozen=True)
class View:
    """Result of `show`: `text` when printed, `html`, which `make_html` returns, as the value of a notebook cell.

    `per_device`: of a tree or a leaf the bytes on the device with the most, as in its table; else None. `blocks`: of a
    picture, the cells of each of its lines.
    """

    text: str
    make_html: Callable[[], str]
    per_device: int | None = None
    blocks: Sequence[Sequence[Any]] = field(default=(), repr=False)

    def __repr__(self) -> str:
        return self.text

    @property
    def html(self) -> str:
        return self.make_html()

    def _repr_html_(self) -> str:
        return self.html


class Html(str):
    """Markup: elements take it unchanged, and escape any other string."""

    __slots__ = ()


@dataclass(frozen=True)
class Row:
    """Row of a table: texts or markup, and the rows below that collapse into it. `hover` is shown under the mouse."""

    cells: Sequence[str]
    children: Sequence[Row] = field(default=())
    hover: str = ""


def markup(text: str) -> Html:
    """Return a text as markup, and markup unchanged."""
    return text if isinstance(text, Html) else Html(escape(text))


def page(*parts: str) -> Html:
    """Return the HTML of a repr: its parts below each other, in a monospaced font. Texts become lines."""
    lines = [
        part if isinstance(part, Html) else f'<div style="white-space: pre-wrap">{escape(part)}</div>' for part in parts
    ]
    return Html("\n".join(['<div style="font: 12px/1.6 monospace; overflow-x: auto">', *lines, "</div>"]))


def rgba(number: int, alpha: float = 0.35) -> str:
    """Return a colour by its number; the golden angle makes neighbours differ."""
    r, g, b = colorsys.hls_to_rgb(number * 137.508 / 360 % 1, 0.5, 0.75)
    return f"rgba({round(255 * r)}, {round(255 * g)}, {round(255 * b)}, {alpha})"


def bar(share: float, hover: str = "") -> Html:
    """Return a bar that takes a share, from 0 to 1, of the width of its cell.

    >>> table([("weights", bar(0.75, "12 of 16 GiB"))])
    '<div style="min-width: ...<table ...weights...12 of 16 GiB...
    """
    return bars({hover: share})


def bars(shares: Mapping[str, float]) -> Html:
    """Return one bar of several parts, each with a name that is shown under the mouse, and a separate colour."""
    total = max(1.0, sum(shares.values()))
    parts = [
        f'<div title="{escape(name)}" style="float: left; width: {100 * share / total:.2f}%; height: 0.8em; '
        f'min-width: 1px; background: {rgba(colour, 0.6)}"></div>'
        for colour, (name, share) in enumerate(shares.items(), 4)
        if share > 0
    ]
    return Html(f'<div style="overflow: hidden; line-height: 0">{"".join(parts)}</div>')


def table(rows: Iterable[Row | Sequence[str]], *, head: Sequence[str] = (), align: str = "", most: int = 40) -> Html:
    """Return a table: `align` has `l`, `r` or `c` for each column; groups are open as far as `most` rows are seen.

    A row with children collapses: the row and its children are tables in one cell, with columns of the same shares of
    the width, which so stay aligned on every page, and texts wrap where the page is too narrow. The marks that open and
    close are in a margin at the left.

    >>> table([Row(("h", "48 B"), [Row(("up", "32 B")), Row(("down", "16 B"))])], head=("", "bytes"), align="lr")
    '<div style="min-width: ...<table ...<details open>...
    """
    listed = [row if isinstance(row, Row) else Row(row) for row in rows]
    columns = max((len(row.cells) for row in [Row(head), *listed]), default=0)
    align = align.ljust(columns, "l")
    # Numbers should not wrap where the page is narrow, texts may.
    everything = [Row(head), *listed]
    lengths = _widths(everything, [0] * columns, _length)
    chars = [min(n, _MOST_WIDE + 10 * (i == 0)) if align[i] == "l" else 1.2 * n for i, n in enumerate(lengths)]
    shares = [100 * n / max(1, sum(chars)) for n in chars]
    layout = _Layout(shares, align, _open_depth(listed, most))
    collapses = any(row.children for row in listed)
    # The least width at which no number and no word breaks: a narrower page scrolls.
    words = [n if align[i] == "l" else m for i, (n, m) in enumerate(zip(
        _widths(everything, [0] * columns, _longest_word), lengths, strict=True))]  # fmt: skip
    least = max((n / c for n, c in zip(words, chars, strict=True) if c), default=1)
    style = f"min-width: {_EM * sum(chars) * min(1, least):.1f}em; max-width: {_EM * sum(chars):.1f}em"
    style += "; padding-left: 1.5em" if collapses else ""
    header = layout.row(Row(head), 0, tag="th") if any(head) else ""
    return Html(f'<div style="{style}">{layout.table(header, listed)}</div>')


def _length(cell: str) -> int:
    """Return the characters that a cell shows."""
    if not isinstance(cell, Html):
        return max(map(len, cell.split("\n")))
    return len(unescape(re.sub("<[^>]*>", "", cell))) or _BAR * ("width:" in cell)


def _longest_word(cell: str) -> int:
    return _length(cell) if isinstance(cell, Html) else max(map(len, cell.split()), default=0)


def _widths(rows: Sequence[Row], least: Sequence[int], of: Callable[[str], int], depth: int = 0) -> list[int]:
    """Return the most characters, by `of`, of a cell of each column, with space around."""
    out = list(least)
    for row in rows:
        for i, cell in enumerate(row.cells):
            out[i] = max(out[i], (of(cell) + 2 + (2 * depth if i == 0 else 0)) if cell else 0)
        out = _widths(row.children, out, of, depth + 1)
    return out


def _open_depth(rows: Sequence[Row], most: int) -> int:
    """Return the depth at which groups are closed, so that at most `most` rows are seen."""
    depth, seen = 0, len(rows)
    while rows:
        rows = [child for row in rows for child in row.children]
        seen += len(rows)
        if seen > most:
            break
        depth += 1
    return depth


@dataclass(frozen=True)
class _Layout:
    shares: Sequence[float]  # percent of the width, of each column
    align: str
    open_depth: int

    def table(self, header: str, rows: Sequence[Row], depth: int = 0) -> str:
        lines = [header] if header else []
        for row in rows:
            lines.append(self.group(row, depth) if row.children else self.row(row, depth))
        return f'<table style="{_TABLE}">{self._columns()}\n' + "\n".join(lines) + "</table>"

    def _columns(self) -> str:
        """Return a row without height that sets the widths, since a first row may be one cell for all columns."""
        cells = "".join(f'<td style="width: {share:.3f}%; padding: 0; border: none"></td>' for share in self.shares)
        return f'<tr style="background: transparent">{cells}</tr>'

    def row(self, row: Row, depth: int, tag: str = "td") -> str:
        cells = []
        weight = "; font-weight: normal" if tag == "th" else ""
        for i, cell in enumerate([*row.cells, *[""] * (len(self.shares) - len(row.cells))]):
            left = f"{0.3 + 1.2 * depth if i == 0 else 0.3:.1f}em"
            style = f"text-align: {_SIDE[self.align[i]]}; padding: 1px 0.3em 1px {left}{weight}"
            cells.append(f'<{tag} align="{_SIDE[self.align[i]]}" style="{style}; {_CELL}">{markup(cell)}</{tag}>')
        hover = f' title="{escape(row.hover)}"' if row.hover else ""
        return f'<tr{hover} style="{_ROW}">{"".join(cells)}</tr>'

    def group(self, row: Row, depth: int) -> str:
        summary = f'<summary style="{_SUMMARY}">{self.table("", [Row(row.cells, (), row.hover)], depth)}</summary>'
        body = self.table("", row.children, depth + 1)
        is_open = " open" if depth < self.open_depth else ""
        return (f'<tr style="background: transparent"><td colspan="{len(self.shares)}" style="padding: 0; '
                f'border: none; text-align: left"><details{is_open}>{summary}{body}</details></td></tr>')  # fmt: skip


_CELL = "border: none; vertical-align: top; white-space: pre-wrap"
_SUMMARY = "cursor: pointer; list-style-position: outside"
