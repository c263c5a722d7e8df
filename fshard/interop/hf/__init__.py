"""Folders of safetensors files in the layout of Hugging Face, read and written by slices."""

from .export import write
from .folder import CONFIG, INDEX, PICKLES, SINGLE, WeightHeaders, config_of, read_json
from .module import name_of, read_module
from .weights import FileTensor, read, tensors

__all__ = ["CONFIG", "INDEX", "PICKLES", "SINGLE", "FileTensor", "WeightHeaders", "config_of",
           "name_of", "read", "read_json", "read_module", "tensors", "write"]  # fmt: skip
