"""One file per architecture: `Config, init, specs, apply, loss, load, save`."""

from . import gpt2

__all__ = ["gpt2"]
