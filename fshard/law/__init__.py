"""The law, checked: types without data, answers on other meshes, trees proven initialized, values printed by rank."""

from .check import check
from .printing import print
from .validate import validate
from .verify import verify

__all__ = ["check", "print", "validate", "verify"]
