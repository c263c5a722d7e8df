"""Schedules of a model's blocks: when weights are gathered, what is recomputed, and which transfers overlap."""

from .remat import remat
from .scan import scan
from .strategy import Strategy, strategy
from .unshard import unshard

__all__ = ["Strategy", "remat", "scan", "strategy", "unshard"]
