"""Tables and pictures of trees: the bytes of each leaf, and its layout on a mesh."""

from fshard.spec import size

from .grid import View
from .table import show

__all__ = ["View", "show", "size"]
