"""A step before it runs: its memory, FLOPs, transfers and time on a mesh of any size."""

from .events import Event, Operation, Start, Wait
from .memory import Memory
from .plan import Plan, plan
from .roofline import Roofline, Span, roofline

__all__ = ["Event", "Memory", "Operation", "Plan", "Roofline", "Span", "Start", "Wait", "plan", "roofline"]
