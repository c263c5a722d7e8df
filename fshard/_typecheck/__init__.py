"""The checker: types every tensor of a region by the axes it varies over, and raises where a program mixes types."""

from .checker import Checker, same_numbers

__all__ = ["Checker", "same_numbers"]
