"""Data order as a pure function: (key, step) -> the global batch. Each rank reads only its rows.

There is no state beyond the step number: resuming at a step is calling with that step.
The batches are the same on every mesh, because a mesh only decides which rank reads which rows.

    rows = data.indices(key, step=step, size=len(images), batch=256)
    batch = data.load(lambda i: {"x": images[i], "y": labels[i]}, rows, mesh=mesh)

With workers, and any map-style dataset:

    loader = DataLoader(dataset, batch_sampler=data.sampler(key, len(dataset), 256, mesh, step=step), num_workers=4)
    for batch in data.batches(loader): ...
"""

from fshard.random.orders import permute

from .buckets import Bucketed, Buckets, buckets
from .images import ImageFolder, image_folder
from .loader import Sampler, batches, sampler
from .order import counted, indices, steps_per_epoch
from .placed_batch import load
from .tokens import crop, pad

__all__ = [
    "Bucketed", "Buckets", "ImageFolder", "Sampler", "batches", "buckets", "counted", "crop", "image_folder", "indices",
    "load", "pad", "permute", "sampler", "steps_per_epoch",
]  # fmt: skip
