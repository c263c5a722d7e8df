"""Any `nn.Module` constructor as a pure function and a tree of described leaves: `defer`."""

from .constructor import defer
from .functional_module import Apply
from .generation import generate

__all__ = ["Apply", "defer", "generate"]
