"""Comparison of values: two answers of one program, replicas of one leaf, arguments of several processes."""

from .arguments import check_same_arguments
from .diff import Difference, Evidence, Tolerance, compare, describe_differences, max_finite_magnitude, widen
from .digest import digest_and_value, flat_slice
from .locate import Comparison
from .recorder import recording_program
from .replicas import check_replicas, compare_digests, format_mismatch, replica_errors, sum_over_ranks
from .rounding import OtherRounding, reround

__all__ = [
    "Comparison", "Difference", "Evidence", "OtherRounding", "Tolerance", "check_replicas", "check_same_arguments",
    "compare", "compare_digests", "describe_differences", "digest_and_value", "flat_slice", "format_mismatch",
    "max_finite_magnitude", "recording_program", "replica_errors", "reround", "sum_over_ranks", "widen",
]  # fmt: skip
