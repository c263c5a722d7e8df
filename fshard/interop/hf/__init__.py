"""Folders of safetensors files in the layout of Hugging Face, read and written by slices."""

from .export import write
from .folder import CONFIG, INDEX, PICKLES, SINGLE, Scan, Where, config_of, read_json
from .weights import FileTensor, Stored, read, tensors

__all__ = [
    "CONFIG",
    "INDEX",
    "PICKLES",
    "SINGLE",
    "FileTensor",
    "Scan",
    "Stored",
    "Where",
    "config_of",
    "read",
    "read_json",
    "tensors",
    "write",
]  # fmt: skip
