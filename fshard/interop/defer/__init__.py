"""Any `nn.Module` constructor as a pure function and a tree of described leaves: `defer`."""

from .functional import Apply
from .module import defer

__all__ = ["Apply", "defer"]
