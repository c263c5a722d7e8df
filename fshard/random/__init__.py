"""Keys and element-addressed draws: element i of a draw is a function of (key, i), whatever the mesh."""

from typing import TYPE_CHECKING

from fshard.errors import other_names

from .draws import (
    bernoulli,
    bernoulli_box,
    bits,
    categorical,
    exponential,
    gumbel,
    normal,
    normal_box,
    randint,
    trunc_normal,
    trunc_normal_box,
    uniform,
    uniform_box,
)
from .keys import check_key, fold_in, key, split
from .orders import permutation

__all__ = [
    "bernoulli", "bernoulli_box", "bits", "categorical", "check_key", "exponential", "fold_in", "gumbel", "key",
    "normal", "normal_box", "permutation", "randint", "split", "trunc_normal", "trunc_normal_box", "uniform",
    "uniform_box",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__ = other_names(__name__, {"PRNGKey": "fs.key", "seed": "fs.key"})
