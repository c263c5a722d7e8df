"""Data order as a pure function: (key, step) -> the global batch. Each rank reads only its own rows of it.

There is no loader object and no state beyond the step number: resuming at a step is calling with that step.
The batches are the same on every mesh, because a mesh only decides which rank reads which rows.

    rows = data.indices(key, step=step, size=len(images), batch=256)
    batch = data.load(lambda i: {"x": images[i], "y": labels[i]}, rows, mesh=mesh)
"""

from .buckets import Bucketed, Buckets, buckets
from .loading import load
from .order import counted, indices, permute, steps_per_epoch
from .tokens import crop, pad

__all__ = [
    "Bucketed", "Buckets", "buckets", "counted", "crop", "indices", "load", "pad", "permute", "steps_per_epoch",
]  # fmt: skip
