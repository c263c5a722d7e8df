"""Order of the examples, as a pure function: (key, step) -> the global batch.

Legend: B global batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fshard.errors import checked, fail
from fshard.random import fold_in
from fshard.random.orders import permute


@checked
def steps_per_epoch(size: int, batch: int, *, drop_last: bool = True) -> int:
    """Return the number of batches in one pass over `size` examples; without `drop_last` the last may be smaller.

    >>> steps_per_epoch(10, 4), steps_per_epoch(10, 4, drop_last=False)
    (2, 3)

    Raises ShardingError if that is not even one batch.
    """
    if size < 1 or batch < 1:
        raise fail(f"steps_per_epoch: size={size}, batch={batch}", fix="both are 1 or more")
    if drop_last and size < batch:
        raise fail(f"steps_per_epoch: {size} examples do not fill a batch of {batch}", f"{size} < {batch}",
                   fix=f"batch={size} or less, or drop_last=False")  # fmt: skip
    return size // batch if drop_last else -(-size // batch)


@checked
def indices(
    key: Tensor | None, *, step: int, size: int, batch: int, epoch: int | None = None, drop_last: bool = True,
    even: bool = False,
) -> Tensor:  # fmt: skip
    """Return the examples of the global batch of one step, out of `size`: int64 [B], the same on every rank.

    Each epoch has another order of the examples, by `fold_in(key, epoch)`. Step 1,000,000 costs as much as step 0.

    Args:
        key: `None` leaves the examples in their order, for evaluation.
        step: counts from the start of training; with `epoch`, from the start of that epoch. To resume, or to skip the
            first batches, begin at another step.
        drop_last: leave out the `size % batch` examples that do not fill a batch, different ones in every epoch.
            Without it the last batch of an epoch is smaller.
        even: leave none out, and complete the last batch from the start of the epoch's order: all batches are of one
            size. `counted` is False for the repeated rows of a batch.

    >>> indices(fs.fold_in(fs.key(0), "data"), step=1000, size=50_000, batch=256).shape
    torch.Size([256])
    >>> indices(None, step=2, size=10, batch=4, drop_last=False), indices(None, step=2, size=10, batch=4, even=True)
    (tensor([8, 9]), tensor([8, 9, 0, 1]))

    Raises ShardingError for a negative step, a step past the end of `epoch`, and where no batch can be filled.

    Source: Accelerate's `even_batches`, for `even`.
    """
    steps = steps_per_epoch(size, batch, drop_last=drop_last and not even)
    epoch, step = position_in_epoch("indices", step, epoch, steps, f"{size} examples in batches of {batch}")
    return epoch_order(key, epoch, size, step * batch, batch, even)


def position_in_epoch(verb: str, step: int, epoch: int | None, steps: int, described: str) -> tuple[int, int]:
    """Return (epoch, step from its start) of a step that counts from the start of training, or of `epoch`."""
    if step < 0 or (epoch is not None and epoch < 0):
        raise fail(f"{verb}: step={step}, epoch={epoch}", fix="both count from 0")
    if epoch is not None and step >= steps:
        raise fail(f"{verb}: epoch {epoch} has no step {step}", f"{described} are {steps} steps, 0 to {steps - 1}",
                   fix="leave out epoch= to count steps from the start of training")  # fmt: skip
    return divmod(step, steps) if epoch is None else (epoch, step)


def epoch_order(key: Tensor | None, epoch: int, size: int, start: int, count: int, even: bool) -> Tensor:
    """Return positions `start` to `start + count` of an epoch's order of range(size); if `even` it begins again."""
    positions = torch.arange(start, start + count if even else min(start + count, size)) % size
    return positions if key is None else permute(fold_in(key, epoch), positions, size=size)


@checked
def counted(*, step: int, size: int, batch: int) -> Tensor:
    """Return False for the repeated rows of a batch of `indices(..., even=True)`, else True: bool [B].

    So each example of an epoch is counted once. Use it as weights in a loss or a metric, and to choose the rows that
    `fs.gather_for_metrics` returns.

    >>> counted(step=2, size=10, batch=4)
    tensor([ True,  True, False, False])

    Raises ShardingError for a negative step.
    """
    _, step = position_in_epoch("counted", step, None, steps_per_epoch(size, batch, drop_last=False), "")
    return torch.arange(step * batch, (step + 1) * batch) < size
