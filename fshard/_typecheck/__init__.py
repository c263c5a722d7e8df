"""The checker: types every tensor of a region by the axes it varies over, and raises where a program mixes types."""

from .checker import Checker, same_numbers
from .differentiated import leaves_of
from .shared_writes import no_shared_writes

__all__ = ["Checker", "leaves_of", "no_shared_writes", "same_numbers"]
