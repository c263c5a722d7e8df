"""The checker: types every tensor of a region by the axes it varies over, and raises where a program mixes types."""

from .checker import Checker, Rank, same_numbers
from .differentiated import leaves_of

__all__ = ["Checker", "Rank", "leaves_of", "same_numbers"]
