"""The largest logits and the accuracy of a classifier, with the classes on one device or split over a mesh axis.

Legend: B batch, C classes, K results for each row; [C@axis] is a dim split over an axis; {V} varies over it, {I} does
not. One order everywhere: larger logits first, NaN before all numbers, as torch.topk has it, and of equal logits the
class with the lowest number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fshard._comm import Axis, in_region, region
from fshard._ops import local_range
from fshard.collectives import all_gather, axis_size, psum, pvary
from fshard.errors import checked, fail
from fshard.spec import describe

_BLOCK = {"cpu": 1 << 17, "cuda": 1 << 24}  # elements that are compared at a time: the masks and numbers are small
_ABSENT = 1 << 62  # number of a class that is not there, after all that are; exact as a float, as F.pad takes it


@checked
def top_k(
    logits: Tensor, k: int, *, axis: Axis = None, size: int | None = None, classes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of each row and their classes: [..., C] -> ([..., K], [..., K] int64).

        with `axis`: logits [..., C@axis]{V} -> {I}
        cost: an all_gather of k logits and k numbers for each row and rank; no logits beside these move

    The largest comes first; NaN counts as larger than all numbers, as in torch.topk; of equal logits the lowest class
    comes first, so the result is the same on every mesh. The logits of the result are differentiable.

    Args:
        size: C, needed only where the axis does not divide it.
        classes: [C@axis] int64, ascending over the ranks: the numbers of the columns, if they are a sample
            (`nn.sample_classes`). If there are fewer than k of them the rest is -inf, with class -1.

    >>> values, classes = nn.top_k(logits, 5, axis="model", size=50257)
    """
    _check_logits("top_k", logits)
    n = logits.shape[-1]
    if classes is None:
        start, whole = local_range("top_k", n, axis, size)
        if not 1 <= k <= whole:
            raise fail(f"top_k: k={k} of {whole} classes", fix=f"1 <= k <= {whole}")
    elif classes.dtype != torch.int64 or tuple(classes.shape) != (n,):
        raise fail("top_k: classes must be one int64 number for each column", logits=_describe(logits),
                   classes=_describe(classes))  # fmt: skip
    elif k < 1:
        raise fail(f"top_k: k={k}", fix="1 <= k")
    columns = _by_row_blocks(lambda rows: _top_columns(rows, min(k, n)), logits.detach())
    values = logits.gather(-1, columns)
    indices = columns + start if classes is None else classes[columns]
    if k > n:  # a rank with few classes: the others expect k of each
        values, indices = F.pad(values, (0, k - n), value=-math.inf), F.pad(indices, (0, k - n), value=_ABSENT)
    if axis:
        values, indices = all_gather((values, indices), axis, -1, size=k * axis_size(axis), to="invariant")
    values, indices = _first(values, indices, k)
    return values, indices if classes is None else indices.where(indices != _ABSENT, -1)


@checked
def accuracy(
    logits: Tensor, targets: Tensor, k: Sequence[int] = (1, 5), *, axis: Axis = None, size: int | None = None,
    over: Axis = None, ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Return the share of targets that are among the k largest logits, for each k: [..., C], [...] -> [len(k)].

        with `axis`: logits [..., C@axis]{V}, targets {I} over it -> {I}
        cost: two psums of one number per target; no logits beside the targets' own move

    Counts the classes before each target in the order of `top_k` (NaN first, then larger logits, then of equal logits
    the lower class), so a model whose logits are all equal is right for class 0 alone. With k of C or more every target
    counts as found.

    Args:
        size: C, needed only where the axis does not divide it.
        over: axes the targets are split over (`"data"`): the share is that of all of their ranks' targets, each counted
            once even if ranks have different numbers of them. This is one psum of len(k) + 2 numbers.
        ignore_index: targets of this value are not counted. The share of no targets is NaN.

    A target that is neither a class nor ignored gives NaN. Has no gradient.

    >>> top1, top5 = nn.accuracy(logits, targets, axis="model", size=50257, over="data")
    """
    _check_logits("accuracy", logits)
    if targets.dtype not in (torch.int64, torch.int32, torch.uint8) or targets.shape != logits.shape[:-1]:
        raise fail("accuracy: targets must be one integer class for each row of logits",
                   logits=_describe(logits), targets=_describe(targets))  # fmt: skip
    if not k or min(k) < 1:
        raise fail(f"accuracy: k={tuple(k)}", fix="k=(1, 5): each is 1 or more")
    x, n = logits.detach(), logits.shape[-1]
    start, whole = local_range("accuracy", n, axis, size)
    local = targets.long() - start
    is_local = (local >= 0) & (local < n)
    column = local.where(is_local, 0).unsqueeze(-1)  # [..., 1]
    own = psum(x.gather(-1, column[..., :n]).sum(-1).where(is_local, 0), axis)  # the target's logit
    own, local = pvary((own.unsqueeze(-1), local.unsqueeze(-1)), axis)
    before = psum(_by_row_blocks(_count_before, x, own, local), axis).squeeze(-1)
    counted = targets != ignore_index
    wrong = counted & ((targets < 0) | (targets >= whole))
    numbers = torch.stack([*((counted & (before < i)).sum() for i in k), counted.sum(), wrong.sum()])
    *hits, count, wrong = psum(numbers, over).unbind()
    shares: Tensor = (torch.stack(hits) / count).where(wrong == 0, math.nan)
    return shares


def _check_logits(verb: str, logits: Tensor) -> None:
    if not logits.ndim or not logits.is_floating_point():
        raise fail(f"{verb}: logits are {_describe(logits)}", fix="floating logits [..., C]")


def _describe(x: Tensor) -> str:
    return describe(x.dtype, x.shape)


# --- the order of the classes of a row ------------------------------------------------------------------------
# Legend: x [R, C] rows of logits on this rank.


def _by_row_blocks(f: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
    """Apply `f` to blocks of rows of tensors [..., any]: [R, any] -> [R, N]. Return [..., N]."""
    rows, step = math.prod(x.shape[:-1]), _BLOCK.get(x.device.type, 1 << 24) // max(1, x.shape[-1])
    if torch.compiler.is_dynamo_compiling() or (in_region() and not region().comm.has_values):  # one block of all rows
        step = rows
    flat = [torch.split(t.reshape(rows, t.shape[-1]), max(1, step)) for t in (x, *others)]
    out = torch.cat([f(*block) for block in zip(*flat, strict=True)])
    return out.view(*x.shape[:-1], out.shape[-1])


def _top_columns(x: Tensor, k: int) -> Tensor:
    """Return the columns of the k largest entries of each row, in order: [R, C] -> [R, k]."""
    if not k:
        return x[:, :0].long()
    values, columns = x.topk(k)  # of entries equal to the last of these torch takes any: find the first ones
    last = values[:, -1:]
    number = torch.arange(x.shape[1], device=x.device)
    tied = torch.where(_equal(x, last), number, _ABSENT).topk(k, largest=False).values
    columns = columns.where(~_equal(values, last), _ABSENT)
    values = torch.cat([values, last.expand_as(tied).where(tied != _ABSENT, -math.inf)], 1)
    return _first(values, torch.cat([columns, tied], 1), k)[1]


def _first(values: Tensor, indices: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the first k of candidates [..., N]: the largest values, of equal ones the lowest index."""
    by_index = indices.argsort(-1)
    values, indices = values.gather(-1, by_index), indices.gather(-1, by_index)
    by_value = values.detach().argsort(dim=-1, descending=True, stable=True)[..., :k]
    return values.gather(-1, by_value), indices.gather(-1, by_value)


def _equal(x: Tensor, y: Tensor) -> Tensor:
    return (x == y) | (x.isnan() & y.isnan())


def _count_before(x: Tensor, own: Tensor, column: Tensor) -> Tensor:
    """Count the classes of this rank before an entry of value `own` in a column, here or not: [R, 1] each -> [R, 1]."""
    larger = (x > own) | (x.isnan() & ~own.isnan())
    lower = torch.arange(x.shape[1], device=x.device) < column
    return (larger | (_equal(x, own) & lower)).sum(1, keepdim=True)
