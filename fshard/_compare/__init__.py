"""Comparison of values: two answers of one program, and the replicas of one leaf."""

from .copies import apart
from .diff import Allowed, Difference, compare, largest, listed, tell, wide
from .replicas import check_replicas, fingerprint, join_limited, span, told, unequal

__all__ = [
    "Allowed",
    "Difference",
    "apart",
    "check_replicas",
    "compare",
    "fingerprint",
    "join_limited",
    "largest",
    "listed",
    "span",
    "tell",
    "told",
    "unequal",
    "wide",
]  # fmt: skip
