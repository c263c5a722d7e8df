"""Classes of a split classifier: the columns of targets, and a sample of classes that holds all targets (Partial FC).

Legend: B targets, C classes, S sampled classes; [C@axis] is a dim split over an axis.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fshard._core.ops import local_range, own_range
from fshard._core.region import axes_of_own_values, checker, has_values, unchecked, user_line
from fshard._core.torch import is_wrapped
from fshard.collectives import all_gather
from fshard.errors import checked, fail
from fshard.random import check_key
from fshard.random.orders import permute
from fshard.spec import Axis, Size, describe, names_of

_INTEGERS = (torch.int64, torch.int32, torch.uint8)  # the dtypes of classes


@checked
def sample_classes(
    key: Tensor, targets: Tensor, *, size: int, count: int, axis: Axis = None, over: Axis = None
) -> Tensor:
    """Choose `count` of `size` classes, all targets among them: targets [...] -> int64 [S@axis], ascending.

        targets {I} over `axis`, {V} over `over` -> {V} over `axis`     cost: the targets are gathered over `over`

    A softmax over only these classes is Partial FC: `nn.margin` and `nn.cross_entropy` take them as `classes=`, and
    `optim.update_rows` steps only their rows. Apart from the targets, the classes are the first of a random order, a
    function of `key`: so the sample, and with it the loss and each gradient, is the same on every mesh. How many of the
    classes a rank has is random too, about `count` divided by the ranks of `axis`; it may have none.

    Args:
        key: one for each step, `fs.fold_in(key, step)`.
        targets: classes; negative ones are ignored.
        size: C, the number of all classes; the table of classes is [C@axis, D].
        count: number of sampled classes over all ranks: all of them where it is `size` or more, only the targets where
            these are `count` or more.
        over: axes the targets are split over (`"data"`).

    A step that trains a tenth of the classes of `params`, {"w": [C@model, D]}, on features x [B@data, D]:

    >>> def step(params, state, x, targets, key):
    ...     classes = nn.sample_classes(key, targets, size=40, count=4, axis="model", over="data")
    ...     rows = classes - fs.local_range(len(params["w"]), "model", size=40)[0]
    ...     def loss_fn(sampled, x):
    ...         sampled, x = fs.pvary(sampled, "data"), fs.pvary(x, "model")
    ...         cosines = nn.cosine_logits(x, sampled["w"])                 # [B@data, S@model]
    ...         logits = nn.arcface(cosines, targets, axis="model", classes=classes)
    ...         return nn.cross_entropy(logits, targets, axis="model", classes=classes, over="data")
    ...     sampled = fs.tree.map(lambda w: w[rows], params)
    ...     loss, (grads, dx) = fs.value_and_grad(loss_fn, (0, 1))(sampled, x)
    ...     params, state = fs.optim.update_rows(opt, rows, grads, state, params)
    ...     return loss, params, state, dx                                  # dx is the gradient for what makes x
    >>> loss, params, state, dx = step(params, state, x, targets, fs.fold_in(fs.key(0), 7))

    Raises ShardingError for a target of `size` or more, and in a compiled program: the shapes depend on the targets.

    Source: An et al., 2022, "Killing Two Birds with One Stone: Efficient and Robust Training of Face Recognition CNNs
    by Partial FC", with one sample for all ranks in the place of one for each.
    """
    check_key("sample_classes", key)
    if size < 1 or count < 1:
        raise fail(f"sample_classes: size={size}, count={count}", fix="both are 1 or more")
    if targets.dtype not in _INTEGERS:
        raise fail(f"sample_classes: targets are {describe(targets)}", fix="integer classes")
    if torch.compiler.is_dynamo_compiling():
        raise fail("sample_classes: a compiled program has fixed shapes, and the number of classes that a rank has "
                   "depends on the targets", fix="leave out compile=True")  # fmt: skip
    known = all_gather(targets.long() if targets.ndim else targets.long().view(1), over, to="invariant")
    out = _sample(key, known, size, count, axis)
    if (types := checker()) is not None:
        types.set_integer_type(out, "sample_classes", of=(key, known), varies=names_of(axis))
    return out


def _sample(key: Tensor, targets: Tensor, size: int, count: int, axis: Axis) -> Tensor:
    start, length = own_range("sample_classes", size, axis)
    if not has_values():  # a dry run: about as many on each rank
        return targets.new_empty(own_range("sample_classes", min(count, size), axis)[1])
    known = torch.unique(targets.cpu())
    known = known[known >= 0]
    if len(known) and known[-1] >= size:
        raise fail(f"sample_classes: target {int(known[-1])} is not a class", f"classes are 0 to {size - 1}")
    if count >= size:
        return torch.arange(start, start + length, device=targets.device)
    order = permute(key, torch.arange(count), size=size)
    others = order[~torch.isin(order, known)][: max(0, count - len(known))]
    chosen = torch.cat([known, others]).sort().values
    return chosen[(chosen >= start) & (chosen < start + length)].to(targets.device)


def target_columns(
    verb: str, logits: Tensor, targets: Tensor, axis: Axis, size: Size | None, classes: Tensor | None
) -> tuple[Tensor, Tensor, int]:
    """Return (column of each target [...], 0 where this rank has none; whether it has one [...]; number of classes).

    The columns of `logits` [..., V] are this rank's part of the classes, or `classes` [V].
    """
    targets = checked_targets(verb, logits, targets)
    v = logits.shape[-1]
    if classes is None:
        start, total = local_range(verb, v, axis, size)
        column = targets - start
        is_local = (column >= 0) & (column < v)
        return column.where(is_local, 0), is_local, total
    if classes.dtype != torch.int64 or tuple(classes.shape) != (v,):
        raise fail(f"{verb}: classes must be the class of each column of logits, ascending",
                   logits=describe(logits), classes=describe(classes),
                   fix="classes = nn.sample_classes(...)")  # fmt: skip
    column = torch.searchsorted(classes, targets.contiguous())
    is_local = torch.cat([classes, classes.new_full((1,), -1 << 63)])[column] == targets
    if (types := checker()) is not None:  # the ranks have different columns, also where they made `classes` themselves
        types.set_integer_type(is_local, verb, of=(targets, classes), varies=names_of(axis))
    return column.where(is_local, 0), is_local, v


def check_range(
    verb: str, word: str, xs: Tensor, size: int, ignored: int | None = None, *, kind: str, unsplit: Tensor | None = None
) -> bool:  # fmt: skip
    """Raise ShardingError for integers that are not 0 to size - 1, nor `ignored`; else return whether it has looked.

    `kind` names them. `unsplit`: logits without an `axis`, which is the fix if they vary over one and `xs` do not.

    Only on a CPU, where no device is waited for; not in a compiled program, under vmap or without values.
    """
    if torch.compiler.is_dynamo_compiling() or xs.device.type != "cpu" or not has_values() or is_wrapped(xs):
        return False
    with unchecked():
        if not xs.numel():
            return True
        least, most = xs.aminmax()  # the common case, without an array of their size
        if least >= 0 and most < size:
            return True
        wrong = xs[(xs < 0) | (xs >= size)]
        if ignored is not None:
            wrong = wrong[wrong != ignored]
        if len(wrong):
            fix = f"0 to {size - 1}" + (f", or ignore_index={ignored}" if ignored is not None else "")
            types = checker()
            axes = axes_of_own_values(unsplit) - types.info(xs).type.varying if types and unsplit is not None else ()
            for axis in sorted(axes)[:1]:
                fix = f'{verb}(..., axis="{axis}"), which splits the {kind}'
            raise fail(f"{verb}: {word} {int(wrong[0])} is out of range, of {size} {kind}",
                       f"so are {len(wrong)} of {xs.numel()}", *user_line(), fix=fix)  # fmt: skip
        return True


def checked_targets(verb: str, logits: Tensor, targets: Tensor) -> Tensor:
    """Return the targets as int64: as bytes they could not be compared with -100, or with a number of classes."""
    if targets.dtype not in _INTEGERS or not logits.ndim or targets.shape != logits.shape[:-1]:
        raise fail(f"{verb}: targets must be one integer class for each row of logits",
                   logits=describe(logits), targets=describe(targets),
                   fix="gather targets where features are gathered; .long() makes integers")  # fmt: skip
    return targets.long()
