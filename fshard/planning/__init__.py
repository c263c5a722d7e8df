"""A step before it runs: its memory, FLOPs, transfers and time on a mesh of any size; and the times of a run."""

from .events import Event, Operation, Start, Wait
from .memory import Memory
from .plan import Plan, plan
from .trace import Trace, trace

__all__ = ["Event", "Memory", "Operation", "Plan", "Start", "Trace", "Wait", "plan", "trace"]
