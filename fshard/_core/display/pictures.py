"""Pictures of grids, in text and in HTML: the devices that have each block of a leaf, and the devices of a mesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from .elements import Html, View, markup, page, rgba
from .numbers import format_runs

Bounds = tuple[tuple[int, int], ...]  # (start, stop) of each dim

_MOST_LINES = 16  # blocks shown in each direction
_MOST_HOVERS = 8  # devices of one block, each with a line under the mouse
_MOST_SHEETS = 3  # of a stack
_WIDE, _HIGH = 24, 8  # em, of a leaf in all its layouts; a block has at least the room that its text needs
_BORDER = "1px solid rgba(128, 128, 128, 0.5)"


@dataclass(frozen=True)
class Cell:
    """A block: the devices that have it, with the text of each that is shown under the mouse.

    `position`: the number of the block in the picture, for its colour. `values`: lines of numbers in the block.
    """

    devices: Sequence[int]
    hovers: Sequence[str]
    position: int
    is_marked: bool = False
    values: Sequence[str] = ()

    @property
    def lines(self) -> list[str]:
        text = format_runs(self.devices, most=8)
        if self.values:
            text = f"rank{'s' * (len(self.devices) > 1)} {text}"
        return [f"[{text}]" if self.is_marked else text, *self.values]


def picture(
    title: str, shape: Sequence[int], parts: Mapping[Bounds, Sequence[int]], sizes: Mapping[str, int], *,
    itemsize: int = 0, on_host: bool = False, numbered: bool = False, notes: Sequence[str] = (),
) -> View:  # fmt: skip
    """Draw the blocks of a leaf: over the dims that are split, at least two dims if there are as many.

    `parts` has the bounds of each different part, and the ranks that have it. Under the mouse are the bytes of a block,
    from `itemsize` if that is not 0. Blocks in host memory have dashed borders. `numbered` writes the numbers of the
    elements into the blocks, where there is room. `notes` are lines below.
    """
    split = [d for d in range(len(shape)) if len({bounds[d] for bounds in parts}) > 1]
    shown = sorted((split + [d for d in reversed(range(len(shape))) if d not in split])[: max(2, len(split))])
    n = len(shown) // 2 if len(shown) > 3 else 1
    rows, columns = shown[:-n], shown[-n:]  # the last dims run across, all others down
    filled = {bounds: ranks for bounds, ranks in parts.items() if all(a < b for a, b in bounds)}
    empty = sorted(r for bounds, ranks in parts.items() if bounds not in filled for r in ranks)

    def cell(position: int, ranks: Sequence[int], bounds: Bounds) -> Cell:
        text = f"[{', '.join(f'{a}:{b}' for a, b in bounds)}]"
        if itemsize:
            text += f", {math.prod(b - a for a, b in bounds) * itemsize:,} B"
        coords = (np.unravel_index(r, tuple(sizes.values())) for r in ranks)
        places = (", ".join(f"{a}={i}" for a, i in zip(sizes, at, strict=True)) for at in coords)
        hovers = [f"rank {r} ({place}): {text}" for r, place in zip(ranks, places, strict=True)]
        return Cell(ranks, hovers, position, values=numbers(bounds) if numbered and has_room else ())

    def numbers(bounds: Bounds) -> list[str]:
        """Return the lines of a block of `torch.arange(n).reshape(shape)`."""
        digits = len(str(math.prod(shape) - 1))
        ((top, bottom), (left, right)) = ((0, 1), (0, 1), *bounds)[-2:]
        return [" ".join(str(i * shape[-1] + j if shape else 0).rjust(digits) for j in range(left, right))
                for i in range(top, bottom)]  # fmt: skip

    has_room = len(shape) <= 2 and max(shape, default=0) <= _MOST_LINES
    of_place = {tuple(tuple(bounds[d] for d in dims) for dims in (rows, columns)): (ranks, bounds)
                for bounds, ranks in filled.items()}  # fmt: skip
    down, across = (sorted(set(side)) for side in zip(*of_place, strict=True)) if of_place else ([], [])
    cells = [[cell(i * len(across) + j, *of_place[a, b]) for j, b in enumerate(across)] for i, a in enumerate(down)]
    dims = [f"down: dim {', '.join(map(str, rows))}    across: dim {', '.join(map(str, columns))}"]
    notes = [*dims[: len(shape) > 2], *[f"empty on {format_runs(empty, most=8)}"][: bool(empty)], *notes]
    names = [[", ".join(f"{a}:{b}" for a, b in bounds) for bounds in at] for at in (down, across)]
    extents = [[math.prod(b - a for a, b in bounds) for bounds in at] if of else []
               for at, of in ((down, rows), (across, columns))]  # fmt: skip
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
                lambda: page(title, _html(down, across, shown, extents, on_host), *notes), blocks=cells)  # fmt: skip


def _abbreviate(items: Sequence[Any], gap: Any) -> list[Any]:
    return list(items) if len(items) <= _MOST_LINES else [*items[: _MOST_LINES - 2], gap, items[-1]]


def _text(down: Sequence[str], across: Sequence[str], cells: Sequence[Sequence[Cell | str]]) -> list[str]:
    texts = [[[c] if isinstance(c, str) else c.lines for c in line] for line in cells]
    side = max(map(len, down))
    wide = max(map(len, [*across, *(c for line in texts for lines in line for c in lines)])) + 2
    margin = " " * (side + 2)
    out = [(margin + " " + " ".join(c.center(wide) for c in across)).rstrip()][: any(across)]
    rules = [margin + a + b.join(["─" * wide] * len(across)) + c for a, b, c in ("┌┬┐", "├┼┤", "└┴┘")]
    for i, (name, line) in enumerate(zip(down, texts, strict=True)):
        rows = list(itertools.zip_longest(*line, fillvalue=""))
        names = [name if j == (len(rows) - 1) // 2 else "" for j in range(len(rows))]
        out += [rules[i > 0], *(f" {at.rjust(side)} │{'│'.join(c.center(wide) for c in row)}│"
                                for at, row in zip(names, rows, strict=True))]  # fmt: skip
    return [*out, rules[2]]


def _html(
    down: Sequence[str], across: Sequence[str], cells: Sequence[Sequence[Cell | str]],
    extents: Sequence[Sequence[int]], on_host: bool,
) -> Html:  # fmt: skip
    sides = zip((_HIGH, _WIDE), extents, strict=True)
    heights, widths = ([round(most * n / sum(ns), 1) for n in ns] for most, ns in sides)
    high = [f"; height: {h}em" for h in _abbreviate(heights, 0)] or [""] * len(down)
    wide = [f"; width: {w}em" for w in _abbreviate(widths, 0)] or [""] * len(across)
    border = _BORDER.replace("solid", "dashed") if on_host else _BORDER
    name = "padding: 1px 0.6em; border: none; font-weight: normal; white-space: nowrap"
    head = "".join(f'<th align="center" style="{name}; text-align: center">{escape(c)}</th>' for c in ["", *across])
    rows = [f'<tr style="background: transparent">{head}</tr>'] if any(across) else []
    for label, line, h in zip(down, cells, high, strict=True):
        blocks = "".join(_block(c, f"padding: 0; border: {border}{w}{h}") for c, w in zip(line, wide, strict=True))
        rows.append(f'<tr style="background: transparent"><th align="right" style="{name}; text-align: right">'
                    f"{escape(label)}</th>{blocks}</tr>")  # fmt: skip
    has_stacks = any(isinstance(c, Cell) and len(c.devices) > 1 for line in cells for c in line)
    style = (f"border-collapse: separate; border-spacing: {10 if has_stacks else 2}px; border: none; margin: 2px 0; "
             "font-size: 12px; width: auto; table-layout: auto")  # fmt: skip
    return Html(f'<table style="{style}">{"".join(rows)}</table>')


def _block(cell: Cell | str, style: str) -> str:
    style = f"{style}; text-align: center; vertical-align: middle; white-space: nowrap"
    if isinstance(cell, str):
        return f'<td align="center" style="{style}">{markup(cell)}</td>'
    n = len(cell.devices)
    first, *values = cell.lines
    numbers = "\n".join(values)
    hover = "\n".join(cell.hovers) if n <= _MOST_HOVERS else f"{cell.hovers[0]}, and the same on ranks {first}"
    style = f"{style.replace('padding: 0', 'padding: 1px 0.6em')}; background: {rgba(cell.position)}"
    if n > 1:  # a stack: parts side by side would look like a split of the block
        sheets = range(1, min(n, _MOST_SHEETS))
        style += "; box-shadow: " + ", ".join(f"{rgba(cell.position, 0.3)} {4 * i}px {4 * i}px" for i in sheets)
    if cell.is_marked:
        style += "; font-weight: bold; outline: 2px solid rgba(128, 128, 128, 0.9)"
    numbers = f'<div style="white-space: pre">{escape(numbers)}</div>' if numbers else ""
    return f'<td align="center" title="{escape(hover)}" style="{style}">{escape(first)}{numbers}</td>'
