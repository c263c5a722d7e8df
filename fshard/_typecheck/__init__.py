"""The checker: types every tensor of a region by the axes it varies over, and raises where a program mixes types."""

from .checker import Checker, same_numbers
from .op_schema import operation
from .shared_writes import no_shared_writes

__all__ = ["Checker", "no_shared_writes", "operation", "same_numbers"]
