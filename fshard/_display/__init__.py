"""Displays of values: texts and HTML, for printing and for notebooks; plain data in, strings out."""

from .elements import Html, Row, View, bar, bars, markup, page, rgba, table
from .pictures import Cell, grid, picture, ranks_text

__all__ = [
    "Cell", "Html", "Row", "View", "bar", "bars", "grid", "markup", "page", "picture", "ranks_text", "rgba", "table",
]  # fmt: skip
