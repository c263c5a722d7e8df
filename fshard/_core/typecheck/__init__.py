"""The checker: types every tensor of a region by the axes it varies over, and raises where a program mixes types."""

from .checker import Checker, Rank, same_numbers
from .differentiated import leaves_of
from .op_schema import operation

__all__ = ["Checker", "Rank", "leaves_of", "operation", "same_numbers"]
