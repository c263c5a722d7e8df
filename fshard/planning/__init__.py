"""Look ahead of a run, and at its time: `trace`."""

from .trace import Trace, trace

__all__ = ["Trace", "trace"]
