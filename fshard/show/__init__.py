"""Tables and pictures of trees: the bytes of each leaf, and its layout on a mesh."""

from .table import View, show, size

__all__ = ["View", "show", "size"]
