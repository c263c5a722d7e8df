"""Folders of safetensors files in the layout of Hugging Face, read and written by slices."""

from .export import write
from .folder import CONFIG, INDEX, PICKLES, SINGLE, WeightHeaders, config_of, config_path, read_json
from .generation_config import generation_options
from .weights import FileTensor, FileTensors, read, tensors

__all__ = ["CONFIG", "INDEX", "PICKLES", "SINGLE", "FileTensor", "FileTensors", "WeightHeaders", "config_of",
           "config_path", "generation_options", "read", "read_json", "tensors", "write"]  # fmt: skip
