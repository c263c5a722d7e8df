"""Schedules of a model's blocks: when weights are gathered, what is recomputed, and which transfers overlap."""

from .pipeline import Pipelined, on_stages, pipelined
from .remat import remat
from .scan import scan
from .strategy import Strategy, strategy
from .tables import ScheduleTable, schedule_table
from .unshard import unshard

__all__ = [
    "Pipelined", "ScheduleTable", "Strategy", "on_stages", "pipelined", "remat", "scan", "schedule_table", "strategy",
    "unshard",
]  # fmt: skip
