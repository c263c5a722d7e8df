"""Pure optimizers: an `Optimizer` is three pure functions, and its state a plain tree."""

from .norm import global_norm
from .optimizers import Optimizer, Transform, adamw, chain, clip_by_global_norm, sgd
from .rows import update_rows
from .schedules import Schedule, constant, cosine, linear, warmup
from .zero import zero

__all__ = [
    "Optimizer", "Schedule", "Transform", "adamw", "chain", "clip_by_global_norm", "constant", "cosine",
    "global_norm", "linear", "sgd", "update_rows", "warmup", "zero",
]  # fmt: skip
