"""Initializers: each describes a leaf as a `Deferred`, without storage until it is materialized."""

from typing import TYPE_CHECKING

from fshard.errors import other_names

from .deferred import Deferred, Initializer, Scope, describe_initializer
from .initializers import (
    Arange,
    Eye,
    Full,
    Normal,
    Orthogonal,
    TruncNormal,
    Uniform,
    arange,
    eye,
    fans,
    full,
    kaiming_normal,
    kaiming_uniform,
    normal,
    ones,
    orthogonal,
    stacked,
    trunc_normal,
    uniform,
    xavier_normal,
    xavier_uniform,
    zero_row,
    zeros,
)

__all__ = [
    "Arange", "Deferred", "Eye", "Full", "Initializer", "Normal", "Orthogonal", "Scope", "TruncNormal", "Uniform",
    "arange", "describe_initializer", "eye", "fans", "full", "kaiming_normal", "kaiming_uniform", "normal", "ones",
    "orthogonal", "stacked", "trunc_normal", "uniform", "xavier_normal", "xavier_uniform", "zero_row", "zeros",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__ = other_names(__name__, {
        "constant_": "fs.init.full", "lecun_normal": 'fs.init.kaiming_normal(..., nonlinearity="linear")',
        "he_normal": 'fs.init.kaiming_normal(..., nonlinearity="relu")', "glorot_normal": "fs.init.xavier_normal",
        "glorot_uniform": "fs.init.xavier_uniform",
    })  # fmt: skip
