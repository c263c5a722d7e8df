"""The command line, `python -m fshard COMMAND`."""

from .command import main
from .inspecting import inspect, nested, spec_of

__all__ = ["inspect", "main", "nested", "spec_of"]
