"""The largest logits and the accuracy of a classifier, with the classes on one device or split over a mesh axis.

Legend: B batch, C classes, K results for each row; [C@axis] is a dim split over an axis; {V} varies over it, {I} does
not. One order everywhere: larger logits first, NaN before all numbers, as torch.topk has it, and of equal logits the
class with the lowest number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fshard._core.ops import local_range
from fshard.collectives import all_gather, axis_size, psum
from fshard.errors import checked, fail
from fshard.spec import Axis, Size, describe

from .sampled_classes import checked_targets

_ABSENT = 1 << 62  # number of a class that is not there, after all that are; exact as a float, as F.pad takes it


@checked
def top_k(
    logits: Tensor, k: int, *, axis: Axis = None, size: Size | None = None, classes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of each row and their classes: [..., C] -> ([..., K], [..., K] int64).

        with `axis`: logits [..., C@axis]{V} -> {I}
        cost: an all_gather of k logits and k numbers for each row and rank; no other logits move

    The largest comes first; NaN counts as larger than all numbers, as in torch.topk; of equal logits the lowest class
    comes first, so the result is the same on every mesh. The logits of the result are differentiable.

    Args:
        size: C, needed only where the axis does not divide it.
        classes: [C@axis] int64, ascending over the ranks: the numbers of the columns, if they are a sample
            (`nn.sample_classes`). If there are fewer than k of them the rest is -inf, with class -1.

    >>> values, classes = nn.top_k(logits, 5, axis="model", size=50257)

    Raises ShardingError for a k below 1, or above the number of classes, and for `classes` of another shape.
    """
    _check_logits("top_k", logits)
    n = logits.shape[-1]
    if classes is None:
        start, total = local_range("top_k", n, axis, size)
        if not 1 <= k <= total:
            raise fail(f"top_k: k={k} of {total} classes", fix=f"1 <= k <= {total}")
    elif classes.dtype != torch.int64 or tuple(classes.shape) != (n,):
        raise fail("top_k: classes must be one int64 number for each column", logits=describe(logits),
                   classes=describe(classes))  # fmt: skip
    elif k < 1:
        raise fail(f"top_k: k={k}", fix="1 <= k")
    columns = _top_columns(logits.detach(), min(k, n))
    values = logits.gather(-1, columns)
    indices = columns + start if classes is None else classes[columns]
    if k > n:  # a rank with few classes: the others expect k of each
        values, indices = F.pad(values, (0, k - n), value=-math.inf), F.pad(indices, (0, k - n), value=_ABSENT)
    if axis:
        values, indices = all_gather((values, indices), axis, -1, size=k * axis_size(axis), to="invariant")
        by_class = indices.argsort(-1)
        values, indices = values.gather(-1, by_class), indices.gather(-1, by_class)
        first = _order(values.detach())[..., :k]
        values, indices = values.gather(-1, first), indices.gather(-1, first)
    return values, indices if classes is None else indices.where(indices != _ABSENT, -1)


@checked
def accuracy(
    logits: Tensor, targets: Tensor, k: Sequence[int] = (1, 5), *, axis: Axis = None, size: Size | None = None,
    over: Axis = None, ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Return the share of targets that are among the k largest logits, for each k: [..., C], [...] -> [len(k)].

        with `axis`: logits [..., C@axis]{V}, targets {I} over it -> {I}
        cost: as `top_k` for the largest k; no other logits move

    The order is as in `top_k`: NaN first, then larger logits, of equal logits the lower class. So a model whose
    logits are all equal is right only for class 0. For a k of C or more every target is found.

    Args:
        size: C, needed only where the axis does not divide it.
        over: axes the targets are split over (`"data"`): the share is of the targets of all their ranks, each counted
            once even if ranks have different numbers of them. This is one psum of len(k) + 2 numbers.
        ignore_index: targets of this value are not counted. The share of no targets is NaN.

    A target that is neither a class nor ignored gives NaN. Has no gradient.

    >>> top1, top5 = nn.accuracy(logits, targets, axis="model", size=50257, over="data")

    Raises ShardingError for no k, and for a k below 1.
    """
    _check_logits("accuracy", logits)
    targets = checked_targets("accuracy", logits, targets)
    if not k or min(k) < 1:
        raise fail(f"accuracy: k={tuple(k)}", fix="k=(1, 5): each is 1 or more")
    _, total = local_range("accuracy", logits.shape[-1], axis, size)
    first = top_k(logits.detach(), min(max(k), total), axis=axis, size=size)[1]
    found = first == targets.unsqueeze(-1)  # [..., K]
    counted = targets != ignore_index
    wrong = counted & ((targets < 0) | (targets >= total))
    numbers = torch.stack([*((counted & found[..., :i].any(-1)).sum() for i in k), counted.sum(), wrong.sum()])
    *hits, count, wrong = psum(numbers, over).unbind()
    return (torch.stack(hits) / count).where(wrong == 0, math.nan)


def _check_logits(verb: str, logits: Tensor) -> None:
    if not logits.ndim or not logits.is_floating_point():
        raise fail(f"{verb}: logits are {describe(logits)}", fix="floating logits [..., C]")


# --- the order of the classes of a row ------------------------------------------------------------------------
# Legend: x [..., C] logits on this rank.


def _order(x: Tensor) -> Tensor:
    """Return the columns of each row from the first: NaN, then larger entries, and of equal ones the lower column."""
    return x.argsort(dim=-1, descending=True, stable=True)


def _top_columns(x: Tensor, k: int) -> Tensor:
    """Return the first k columns of each row, in order: [..., C] -> [..., k].

    The columns are cut into chunks, and the chunks ordered by their largest entries. Each of the first k chunks has an
    entry before all entries of later ones, so the first k columns are in these.
    """
    c = x.shape[-1]
    if not k:
        return x[..., :0].long()
    size = max(1, math.isqrt(c // k))  # as many chunks as entries in k of them
    total = c - c % size
    largest = x[..., :total].reshape(*x.shape[:-1], total // size, size).amax(-1)
    if total < c:
        largest = torch.cat([largest, x[..., total:].amax(-1, keepdim=True)], -1)
    chunks = _order(largest)[..., :k].sort(-1).values
    columns = (size * chunks.unsqueeze(-1) + torch.arange(size, device=x.device)).flatten(-2)  # ascending
    values = x.gather(-1, columns.clamp(max=c - 1)).masked_fill(columns >= c, -math.inf)
    return columns.gather(-1, _order(values)[..., :k])
