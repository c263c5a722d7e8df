"""Displays of values: texts and HTML, for printing and for notebooks; plain data in, strings out."""

from .elements import Html, Row, View, bar, bars, markup, page, rgba, table

__all__ = ["Html", "Row", "View", "bar", "bars", "markup", "page", "rgba", "table"]
