"""Tables and pictures of trees: the bytes of each leaf, and its layout on a mesh."""

from fshard._display import View
from fshard.spec import size

from .table import show

__all__ = ["View", "show", "size"]
