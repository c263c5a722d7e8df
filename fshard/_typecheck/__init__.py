"""The checker: what every tensor of a region varies over, and the errors where a program mixes that up."""

from .checker import Checker, same_numbers

__all__ = ["Checker", "same_numbers"]
