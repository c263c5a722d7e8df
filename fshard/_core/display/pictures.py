"""Pictures of grids, in text and in HTML: the devices that have each block of a leaf, and the devices of a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from .elements import Html, View, markup, page, rgba
from .numbers import format_runs

Bounds = tuple[tuple[int, int], ...]  # (start, stop) of each dim

_MOST_LINES = 16  # blocks shown in each direction
_MOST_DEVICES = 8  # of one block, each with a stripe
_WIDE, _HIGH = 24, 8  # em, of a leaf in all its layouts; a block has at least the room that its text needs
_BORDER = "1px solid rgba(128, 128, 128, 0.5)"


@dataclass(frozen=True)
class Cell:
    """A block: the devices that have it, with the text of each that is shown under the mouse."""

    devices: Sequence[int]
    hovers: Sequence[str]
    is_marked: bool = False

    def __str__(self) -> str:
        text = format_runs(self.devices, most=8)
        return f"[{text}]" if self.is_marked else text


def picture(
    title: str, shape: Sequence[int], parts: Mapping[Bounds, Sequence[int]], *, itemsize: int = 0,
    place: Callable[[int], str] = lambda _: "", on_host: bool = False,
) -> View:  # fmt: skip
    """Draw the blocks of a leaf: over the dims that are split, at least two dims if there are as many.

    Args:
        title: the line above.
        shape: sizes of the full leaf.
        parts: the bounds of each different part, and the ranks that have it.
        itemsize: bytes of an element, for the bytes of a block under the mouse; 0 leaves them out.
        place: the position of a rank on the mesh, under the mouse.
        on_host: draw blocks in host memory, with dashed borders.
    """
    split = [d for d in range(len(shape)) if len({bounds[d] for bounds in parts}) > 1]
    shown = sorted((split + [d for d in reversed(range(len(shape))) if d not in split])[: max(2, len(split))])
    n = len(shown) // 2 if len(shown) > 3 else 1
    rows, columns = shown[:-n], shown[-n:]  # the last dims run across, all others down
    filled = {bounds: ranks for bounds, ranks in parts.items() if all(a < b for a, b in bounds)}
    empty = sorted(r for bounds, ranks in parts.items() if bounds not in filled for r in ranks)

    def side(dims: Sequence[int]) -> list[Bounds]:
        return sorted({tuple(bounds[d] for d in dims) for bounds in filled})

    def cell(ranks: Sequence[int], bounds: Bounds) -> Cell:
        text = f"[{', '.join(f'{a}:{b}' for a, b in bounds)}]"
        if itemsize:
            text += f", {math.prod(b - a for a, b in bounds) * itemsize:,} B"
        return Cell(ranks, [f"rank {r}{f' ({place(r)})' if place(r) else ''}: {text}" for r in ranks])

    of_place = {tuple(tuple(bounds[d] for d in dims) for dims in (rows, columns)): (ranks, bounds)
                for bounds, ranks in filled.items()}  # fmt: skip
    down, across = side(rows), side(columns)
    cells = [[cell(*of_place[a, b]) for b in across] for a in down]
    notes = [f"down: dim {', '.join(map(str, rows))}    across: dim {', '.join(map(str, columns))}"]
    notes = notes[: len(shape) > 2] + [f"empty on {format_runs(empty, most=8)}"][: bool(empty)]
    names = [[", ".join(f"{a}:{b}" for a, b in bounds) for bounds in at] for at in (down, across)]
    extents = [[math.prod(b - a for a, b in bounds) for bounds in at] if dims else []
               for at, dims in ((down, rows), (across, columns))]  # fmt: skip
    return grid(title, names[0], names[1], cells, notes=notes, extents=extents, on_host=on_host)


def grid(
    title: str, down: Sequence[str], across: Sequence[str], cells: Sequence[Sequence[Cell]], *,
    notes: Sequence[str] = (), extents: Sequence[Sequence[int]] = ((), ()), on_host: bool = False,
) -> View:  # fmt: skip
    """Draw cells with a name for each row and column; `extents` are the heights and widths to be in proportion."""
    down, across = _abbreviate(down, "⋮"), _abbreviate(across, "…")
    shown = [_abbreviate(line, "…") for line in _abbreviate(cells, ["…"] * len(cells[0]))] if cells else []
    if not shown:
        return View("\n".join([title, *notes]), lambda: page(title, *notes))
    return View("\n".join([title, *_text(down, across, shown), *notes]),
                lambda: page(title, _html(down, across, shown, extents, on_host), *notes))  # fmt: skip


def _abbreviate(items: Sequence[Any], gap: Any) -> list[Any]:
    return list(items) if len(items) <= _MOST_LINES else [*items[: _MOST_LINES - 2], gap, items[-1]]


def _text(down: Sequence[str], across: Sequence[str], cells: Sequence[Sequence[Cell | str]]) -> list[str]:
    texts = [[str(c) for c in line] for line in cells]
    side = max(map(len, down))
    wide = max(map(len, [*across, *(c for line in texts for c in line)])) + 2
    margin = " " * (side + 2)
    lines = [(margin + " " + " ".join(c.center(wide) for c in across)).rstrip()][: any(across)]
    rules = [margin + a + b.join(["─" * wide] * len(across)) + c for a, b, c in ("┌┬┐", "├┼┤", "└┴┘")]
    for i, (name, line) in enumerate(zip(down, texts, strict=True)):
        lines += [rules[i > 0], f" {name.rjust(side)} │{'│'.join(c.center(wide) for c in line)}│"]
    return [*lines, rules[2]]


def _html(
    down: Sequence[str], across: Sequence[str], cells: Sequence[Sequence[Cell | str]],
    extents: Sequence[Sequence[int]], on_host: bool,
) -> Html:  # fmt: skip
    sides = zip((_HIGH, _WIDE), extents, strict=True)
    heights, widths = ([round(most * n / sum(ns), 1) for n in ns] for most, ns in sides)
    high = [f"; height: {h}em" for h in _abbreviate(heights, 0)] or [""] * len(down)
    wide = [f"; min-width: {w}em" for w in _abbreviate(widths, 0)] or [""] * len(across)
    border = _BORDER.replace("solid", "dashed") if on_host else _BORDER
    name = "padding: 1px 0.6em; border: none; font-weight: normal; white-space: nowrap"
    head = "".join(f'<th align="center" style="{name}; text-align: center">{escape(c)}</th>' for c in ["", *across])
    rows = [f'<tr style="background: transparent">{head}</tr>'] if any(across) else []
    for label, line, h in zip(down, cells, high, strict=True):
        blocks = "".join(_block(c, f"padding: 0; border: {border}{w}{h}") for c, w in zip(line, wide, strict=True))
        rows.append(f'<tr style="background: transparent"><th align="right" style="{name}; text-align: right">'
                    f"{escape(label)}</th>{blocks}</tr>")  # fmt: skip
    style = "border-collapse: collapse; border: none; margin: 2px 0; font-size: 12px; width: auto; table-layout: auto"
    return Html(f'<table style="{style}">{"".join(rows)}</table>')


def _block(cell: Cell | str, style: str) -> str:
    style = f"{style}; text-align: center; vertical-align: middle; white-space: nowrap"
    if isinstance(cell, str):
        return f'<td align="center" style="{style}">{markup(cell)}</td>'
    pad, text = "padding: 1px 0.6em", str(cell)
    weight = "; font-weight: bold; outline: 2px solid rgba(128, 128, 128, 0.9)" if cell.is_marked else ""
    if len(cell.devices) == 1:
        return (f'<td align="center" title="{escape(cell.hovers[0])}" style="{style.replace("padding: 0", pad)}; '
                f'background: {rgba(cell.devices[0])}{weight}">{escape(text)}</td>')  # fmt: skip
    # One block in stripes of the devices' colours: parts side by side would look like a split of the block.
    n = min(len(cell.devices), _MOST_DEVICES)  # from the first device to the last
    colours = [rgba(cell.devices[round(i * (len(cell.devices) - 1) / (n - 1))]) for i in range(n)]
    stops = ", ".join(f"{c} {100 * i / n:.1f}%, {c} {100 * (i + 1) / n:.1f}%" for i, c in enumerate(colours))
    hover = "\n".join(cell.hovers if n == len(cell.devices) else [f"{cell.hovers[0]}, and the same on ranks {text}"])
    style = f"{style.replace('padding: 0', pad)}; background: linear-gradient(90deg, {stops})"
    return f'<td align="center" title="{escape(hover)}" style="{style}">{escape(text)}</td>'
