"""The checker: types every tensor of a region by the axes it varies over, and raises where a program mixes types."""

from .checker import Checker, Ranks, same_numbers
from .differentiated import leaves_of
from .op_schema import operation

__all__ = ["Checker", "Ranks", "leaves_of", "operation", "same_numbers"]
