"""Adapters in the files of PEFT."""

from .wrapped import save_module, weights

__all__ = ["save_module", "weights"]
