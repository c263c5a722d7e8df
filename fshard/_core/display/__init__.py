"""Displays of values: texts and HTML, for printing and for notebooks; plain data in, strings out."""

from .elements import Html, Row, View, bar, bars, markup, page, rgba, table
from .numbers import duration, format_runs, three_digits
from .pictures import Cell, grid, picture

__all__ = [
    "Cell", "Html", "Row", "View", "bar", "bars", "duration", "format_runs", "grid", "markup", "page", "picture",
    "rgba", "table", "three_digits",
]  # fmt: skip
