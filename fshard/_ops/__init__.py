"""Differentiable collectives: linear maps with their transposes, and the autograd Function that applies them."""

from .autograd import apply, prepare, run
from .dim_sizes import dim_of, gather_layout, part, split_layout, whole
from .dtypes import floating
from .linear_maps import Copy, Exchange, Gather, Map, Permute, Scatter, Slice, Sum, Vary
from .minmax import extreme
from .recast import Precision, Recast

__all__ = [
    "Copy", "Exchange", "Gather", "Map", "Permute", "Precision", "Recast", "Scatter", "Slice", "Sum", "Vary", "apply",
    "dim_of", "extreme", "floating", "gather_layout", "part", "prepare", "run", "split_layout", "whole",
]  # fmt: skip
