"""Keys and element-addressed draws: element i of a draw is a function of (key, i), whatever the mesh."""

from .draws import (
    bernoulli,
    bernoulli_box,
    bits,
    normal,
    normal_box,
    randint,
    trunc_normal,
    trunc_normal_box,
    uniform,
    uniform_box,
)
from .keys import check_key, fold_in, key, split

__all__ = [
    "bernoulli", "bernoulli_box", "bits", "check_key", "fold_in", "key", "normal", "normal_box", "randint", "split",
    "trunc_normal", "trunc_normal_box", "uniform", "uniform_box",
]  # fmt: skip
