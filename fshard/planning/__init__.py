"""A step before it runs: its memory, FLOPs, transfers and time on a mesh of any size."""

from .events import Event, Operation, Start, Wait
from .memory import Memory
from .plan import Plan, plan
from .roofline import Roofline, Span, roofline
from .search import divisions, search
from .table import PlanRow, PlanTable, plan_table
from .trace import Trace, trace

__all__ = [
    "Event", "Memory", "Operation", "Plan", "PlanRow", "PlanTable", "Roofline", "Span", "Start", "Trace", "Wait",
    "divisions", "plan", "plan_table", "roofline", "search", "trace",
]  # fmt: skip
