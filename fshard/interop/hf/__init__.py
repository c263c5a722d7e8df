"""Folders of safetensors files in the layout of Hugging Face, read and written by slices."""

from .export import write
from .folder import CONFIG, INDEX, PICKLES, SINGLE, Scan, Where, config_of, read_json
from .weights import Stored, Their, read, tensors

__all__ = [
    "CONFIG", "INDEX", "PICKLES", "SINGLE", "Scan", "Stored", "Their", "Where", "config_of", "read", "read_json",
    "tensors", "write",
]  # fmt: skip
