"""Pure optimizers: an `Optimizer` is three pure functions, and its state a plain tree."""

from typing import TYPE_CHECKING

from fshard.errors import other_names

from .adafactor import adafactor
from .chain import chain, clip_by_global_norm
from .formula import Optimizer, Transform, from_formula
from .muon import muon
from .norm import global_norm
from .optimizers import adagrad, adam, adamw, lion, nadam, rmsprop, schedule_free, sgd
from .rows import update_rows
from .schedules import Schedule, constant, cosine, linear, warmup
from .zero import zero

__all__ = [
    "Optimizer", "Schedule", "Transform", "adafactor", "adagrad", "adam", "adamw", "chain", "clip_by_global_norm",
    "constant", "cosine", "from_formula", "global_norm", "linear", "lion", "muon", "nadam", "rmsprop", "schedule_free",
    "sgd", "update_rows", "warmup", "zero",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__ = other_names(
        __name__,
        {
            "CosineAnnealingLR": "fs.optim.cosine", "cosine_decay_schedule": "fs.optim.cosine",
            "linear_schedule": "fs.optim.linear", "constant_schedule": "fs.optim.constant",
            "warmup_cosine_decay_schedule": "fs.optim.warmup(fs.optim.cosine(peak, steps), warmup_steps)",
            "MultiSteps": "fs.accumulate", "apply_updates": "opt.update, which returns the params",
        },
    )  # fmt: skip
