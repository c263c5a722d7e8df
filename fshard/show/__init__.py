"""Tables and pictures of trees: the bytes of each leaf, and its layout on a mesh."""

from .grid import View
from .table import show, size

__all__ = ["View", "show", "size"]
