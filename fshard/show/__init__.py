"""Tables and pictures of trees: what leaves weigh, and how they lie on a mesh."""

from .table import View, show, size

__all__ = ["View", "show", "size"]
