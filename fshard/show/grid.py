"""Layout of a leaf on a mesh as a picture, in text and in HTML: the ranks that have each block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import torch

from fshard.errors import raise_all
from fshard.mesh import Mesh
from fshard.spec import P, format_axes, format_tensor, part_range, spec_errors

Sizes = Mapping[str, int]

# No colour of text or page is set: translucent grey lines and tints are readable on light and dark pages.
_STYLE = """<style>
.fshard {font: 12px/1.6 ui-monospace, monospace; color: inherit}
.fshard .row {display: grid; grid-template-columns: 3fr 3fr 3fr 2fr; column-gap: 1em}
.fshard .row {border-top: 1px solid rgba(128, 128, 128, .2); white-space: pre}
.fshard .row :last-child {text-align: right}
.fshard summary {cursor: pointer; list-style: none}
.fshard summary .name::before {content: "▸ "}
.fshard details[open] > summary .name::before {content: "▾ "}
.fshard td, .fshard th {border: 1px solid rgba(128, 128, 128, .4); padding: .2em .8em; text-align: center}
</style>"""


@dataclass(frozen=True)
class View:
    """Result of `show`: `text` when printed, `html` when it is the value of a notebook cell."""

    text: str
    html: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html


def layout(shape: Sequence[int], spec: P, *, mesh: Mesh | Sizes) -> View:
    """Draw a leaf's blocks with the ranks that have each of them.

    >>> layout((5, 8), P("data", "model"), mesh={"data": 2, "model": 2})
    [5@data, 8@model] on data=2, model=2
           0:4   4:8
         ┌─────┬─────┐
     0:3 │  0  │  1  │
         ├─────┼─────┤
     3:5 │  2  │  3  │
         └─────┴─────┘

    Raises ShardingError where the spec does not fit the shape or the mesh.
    """
    sizes = sizes_of(mesh)
    raise_all(spec_errors("layout", tuple(shape), spec, sizes))
    title = format_tensor(torch.float32, shape, spec).removeprefix("f32")
    return picture(title, tuple(shape), spec, sizes)


def sizes_of(mesh: Mesh | Sizes) -> Sizes:
    return mesh.axes if isinstance(mesh, Mesh) else dict(mesh)


def mesh_grid(mesh: Mesh) -> View:
    """Draw the ranks of a mesh: the last axis runs across, all others down."""
    *rest, last = mesh.axes
    n = mesh.axes[last]
    down = [", ".join(f"{a}={mesh.coords(r)[a]}" for a in rest) for r in range(0, mesh.size, n)]
    cells = [[str(r + i) for i in range(n)] for r in range(0, mesh.size, n)]
    text, html = _grid(repr(mesh), down, [f"{last}={i}" for i in range(n)], cells)
    return View(text, div(html))


def picture(title: str, shape: tuple[int, ...], spec: P, sizes: Sizes) -> View:
    """Draw the ranks that have each block: over the dims that are split, at least two dims if there are as many."""
    parts = spec.parts(len(shape))
    split = [d for d, axes in enumerate(parts) if math.prod(sizes[a] for a in axes) > 1]
    shown = sorted((split + [d for d in reversed(range(len(shape))) if d not in split])[: max(2, len(split))])
    boxes: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank, indices in enumerate(np.ndindex(*sizes.values())):
        coords = dict(zip(sizes, indices, strict=True))
        cuts = [part_range(shape[d], [sizes[a] for a in parts[d]], [coords[a] for a in parts[d]]) for d in shown]
        boxes.setdefault(tuple((start, start + n) for start, n in cuts), []).append(rank)
    empty = [r for box, ranks in boxes.items() if any(a == b for a, b in box) for r in ranks]
    filled = {box: ranks for box, ranks in boxes.items() if all(a < b for a, b in box)}
    notes = [f"empty on {_ranks(sorted(empty))}"] if empty else []
    # The last dim shown runs across, all others down.
    down = sorted({box[:-1] for box in filled})
    across = sorted({box[-1:] for box in filled})
    cells = [[_ranks(filled[a + b]) for b in across] for a in down]
    if len(shape) > 2:
        notes.insert(0, f"down: dim {', '.join(map(str, shown[:-1]))}    across: dim {shown[-1]}")
    names = [[", ".join(f"{a}:{b}" for a, b in box) for box in side] for side in (down, across)]
    text, html = _grid(f"{title} on {format_axes(sizes)}", names[0], names[1], cells)
    return View("\n".join([text, *notes]), div(html, *(f"<div>{escape(n)}</div>" for n in notes)))


def _ranks(ranks: Sequence[int]) -> str:
    """Format ranks: `0–3 8` for 0, 1, 2, 3, 8; long lists are abbreviated."""
    runs: list[list[int]] = []
    for r in ranks:
        if runs and runs[-1][-1] == r - 1:
            runs[-1].append(r)
        else:
            runs.append([r])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    return " ".join(texts if len(texts) <= 8 else [*texts[:6], "…", texts[-1]])


_MAX_SHOWN = 16  # blocks shown in each direction


def _abbreviate(items: Sequence[Any], gap: Any) -> list[Any]:
    return list(items) if len(items) <= _MAX_SHOWN else [*items[: _MAX_SHOWN - 2], gap, items[-1]]


def _grid(title: str, down: list[str], across: list[str], cells: Sequence[Sequence[str]]) -> tuple[str, str]:
    """Draw a grid of short texts with a name for each row and column, as text and as HTML."""
    down, across = _abbreviate(down, "⋮"), _abbreviate(across, "…")
    cells = [_abbreviate(line, "…") for line in _abbreviate(cells, ["…"] * len(cells[0]))] if cells else []
    side = max(map(len, down), default=0)
    wide = max(map(len, [*across, *(c for line in cells for c in line)]), default=0) + 2
    margin = " " * (side + 2)
    lines = [title, (margin + " " + " ".join(c.center(wide) for c in across)).rstrip()][: 1 + any(across)]
    rules = [margin + a + b.join(["─" * wide] * len(across)) + c for a, b, c in ("┌┬┐", "├┼┤", "└┴┘")]
    body = ""
    for i, (name, line) in enumerate(zip(down, cells, strict=True)):
        lines += [rules[i > 0], f" {name.rjust(side)} │{'│'.join(c.center(wide) for c in line)}│"]
        body += f"<tr><th>{escape(name)}</th>"
        for j, c in enumerate(line):
            hue = (i * len(across) + j) * 137 % 360  # the golden angle: neighbours differ
            body += f'<td style="background: hsla({hue}, 70%, 50%, .25)">{escape(c)}</td>'
        body += "</tr>"
    head = "".join(f"<th>{escape(c)}</th>" for c in ["", *across])
    table = f"<div>{escape(title)}</div>\n<table><tr>{head}</tr>{body}</table>" if cells else escape(title)
    return "\n".join([*lines, rules[2]] if cells else [title]), table


def div(*parts: str) -> str:
    return "\n".join([f'<div class="fshard">{_STYLE}', *parts, "</div>"])
