"""What the checker says of losses, gradients, results and Python numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fshard import _callsite
from fshard.errors import ShardingError
from fshard.spec import P

from .blame import meetings, picked_by
from .types import CheckerView, Operand, typed
from .wording import error, over, quoted

SHOWN = 4  # results in full


def loss_varies(checker: CheckerView, name: str, x: Operand, leaf: Operand, axes: Sequence[str]) -> ShardingError:
    """value_and_grad of a loss that differs between ranks, by parameters that do not."""
    of, n = leaf.fact.name or "a parameter", math.prod(checker.sizes[a] for a in axes)
    return error(x.fact.site or _callsite.site(), f"value_and_grad({name}): the loss varies over {over(axes)}",
                 [("loss", typed(x)), (of, typed(leaf))],
                 f"each of the {n} ranks would differentiate a loss of its own, and {of} has one gradient",
                 fix=f"return fs.pmean(loss, {quoted(axes)}) of a mean, fs.psum of a sum: one loss for all ranks;\n"
                     f"       but if {over(axes)} splits what the loss is computed from, a psum is missing before this",
                 )  # fmt: skip


def gradient_varies(checker: CheckerView, name: str, x: Operand, grad: Operand, axes: Sequence[str]) -> ShardingError:
    """A gradient that is not of its parameter's type."""
    found = {m.site: m for m in checker.met if m.axis in axes and m.site is not None}
    if len(found) == 1:
        return picked_by(checker, next(iter(found.values())))
    of, n, where = x.fact.name or "a parameter", math.prod(checker.sizes[a] for a in axes), over(axes)
    rows = [(of, typed(x)), ("gradient", typed(grad))]
    if grad.fact.type.varies & set(axes):
        what = f"value_and_grad({name}): the gradient of {of} varies over {where}, and {of} does not"
        why = f"{of} is one value on the {n} ranks of {where}, and each has its own part of a sum never taken"
        fix = f"fs.pvary({of}, {quoted(axes)}), before each rank uses it in its own way"
    else:
        what = f"value_and_grad({name}): the gradient of {of} is the same on every rank of {where}, and {of} is not"
        why = f"the {n} ranks of {where} have parameters of their own"
        fix = "see where they were taken for one"
    return error(_callsite.site(), what, rows, *meetings(checker, axes), why, fix=fix)


def results(
    checker: CheckerView,
    name: str,
    rows: Sequence[tuple[str, Operand, P]],
    extra: Sequence[str],
    missing: Sequence[str],
) -> ShardingError:
    """Results of one line that their out specs do not fit: they vary over `extra`, or do not vary over `missing`."""
    first, x, _ = rows[0]
    axes = extra or missing
    n, where = math.prod(checker.sizes[a] for a in axes), over(axes)
    many = len(rows) > 1
    said = f"{len(rows)} results {'vary' if extra else 'are invariant'}" if many else \
        f"{first} {'varies' if extra else 'is invariant'}"  # fmt: skip
    their = "their out specs do" if many else "its out spec does"
    table = [(path, f"{typed(o)}    out spec {spec}") for path, o, spec in rows[:SHOWN]]
    if len(rows) > SHOWN:
        table.append(("...", f"and {len(rows) - SHOWN} more"))
    if extra:
        what = f"{said} over {where}, which {their} not name"
        why, fix = _missing_sum(x, n, axes)
    else:
        what = f"{said} over {where}, by which {their.removesuffix(' do').removesuffix(' does')} would split " + \
            ("them" if many else "it")  # fmt: skip
        why = f"the result would be {n} equal copies, and another size on another mesh"
        fix = f"leave {where} out of the out spec, or take this rank's part: fs.pslice(..., {quoted(axes)})"
    return error(x.fact.site or f"{name}", what, table, why, fix=fix)


def _missing_sum(x: Operand, n: int, axes: Sequence[str]) -> tuple[str, str]:
    if x.fact.op == "all_gather":
        return "all_gather leaves the whole value on every rank, typed as each rank's own", \
            'fs.all_gather(..., to="invariant"), where it is used as one value'  # fmt: skip
    why = f"the {n} ranks would return different values for what is declared to be one"
    name = f", or name {over(axes)} in its out spec" if x.tensor.ndim else ""
    if x.fact.op in ("sum", "matmul", "dot"):
        return why, f"fs.psum(..., {quoted(axes)}), if each rank has a part of the sum{name}"
    if x.fact.op == "mean":
        return why, f"fs.pmean(..., {quoted(axes)}), if each rank has the mean of as many{name}"
    return why, f"find where it should have been summed or gathered over {over(axes)}{name}"


def number_differs(
    op: str, site: _callsite.Site | str | None, axis: str, numbers: Sequence[tuple[str, tuple[Any, ...]]]
) -> ShardingError:
    """A Python number that is not the same on every rank went into a value that is."""
    if op in ("pvary", "pslice"):
        rows = [(where, f"from element {given[0]}") for where, given in numbers]
        return error(site, f"{op} of another part, on each rank of {axis!r}, of what is one value", rows,
                     "types cannot see a Python number: what a rank picked by one still counts as the same on all",
                     fix=f'fs.pslice(x, "{axis}") takes the part of each rank')  # fmt: skip
    rows = [(where, ", ".join(map(repr, given))) for where, given in numbers]
    return error(site, f"{op} of what is invariant over {axis!r} with a number that differs between its ranks", rows,
                 "types cannot see a Python number: the result counts as one value, and each rank has another",
                 fix=f"the same number on every rank of {axis!r}; or, if they are to differ, a tensor (fs.axis_index\n"
                     "       gives one) and fs.pvary of the other operand; or fs.pslice, to take each rank's part",
                 )  # fmt: skip


__all__ = ["gradient_varies", "loss_varies", "number_differs", "results"]
