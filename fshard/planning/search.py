"""The fastest layouts that fit: many are bounded, some planned with few blocks, and the best planned as a whole."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fshard import tree
from fshard.devices import Device
from fshard.errors import checked, fail
from fshard.init import Deferred
from fshard.shard_map import ShardMapped
from fshard.sharded import Sharded
from fshard.spec import P, box_shape, is_spec, local_box

from .events import Event, Operation
from .table import Layout, PlanRow, PlanTable, Task, progress_bar, text

_FEW = (3, 4)  # blocks: fewer than 3 are all gathered at once, and not as those of a deep model are


def divisions(n: int, **largest: int) -> list[dict[str, int]]:
    """Return every way to write `n` as a product of axis sizes, each at most the largest of its axis.

    >>> divisions(8, data=8, model=2)
    [{'data': 8, 'model': 1}, {'data': 4, 'model': 2}]
    """
    names = list(largest)
    sizes = [[k for k in range(1, min(n, most) + 1) if n % k == 0] for most in list(largest.values())[1:]]
    out = []
    for rest in itertools.product(*sizes):
        first, left = divmod(n, math.prod(rest))
        if not left and first <= largest[names[0]]:
            out.append(dict(zip(names, (first, *rest), strict=True)))
    return out


@checked
def search(
    step_of: Callable[..., Any], layouts: Sequence[Mapping[str, Any]], *, device: Device,
    tokens: int | Callable[..., int] | None = None, headroom: float = 0.1, best: int = 3, blocks: int | None = None,
    heavier: Callable[..., bool] | None = None, slower: Callable[..., bool] | None = None,
    neighbours: Callable[..., Any] | None = None, progress: bool = False,
) -> PlanTable:  # fmt: skip
    """Find the fastest layouts that fit on the device, and plan these as a whole.

    1. The arguments of a step (parameters, optimizer state) are the least that its peak can be. A layout of which they
       alone do not fit is left out without a plan.
    2. With `blocks`, the others are planned with 3 and 4 blocks: `step_of(**layout, blocks=n)`. Time, transfers and
       peak of each phase of the step grow by the same amount with each block, so those of `blocks` follow.
    3. They are planned as a whole in the order of these times, until `best` fit.

    Args:
        layouts, device, tokens, headroom, progress: as for `fs.plan_table`.
        best: how many layouts to plan as a whole.
        blocks: the number of equal blocks of the model. Without it all layouts are planned as a whole.
        heavier, slower: `heavier(a, b)` is True if layout `a` surely needs at least as much memory as `b`, and
            `slower(a, b)` if it surely takes at least as long. Then `a` is left out if it comes after a `b` that does
            not fit, or that fits.
        neighbours: called with each of the best layouts of step 2; returns more layouts for it.

    The rows are those planned as a whole, in the order of their times, then the others, each with a note.

    >>> def step_of(data, model):
    ...     mesh = fs.make_mesh(kind="abstract", data=data, model=model)
    ...     f = lambda x: fs.psum(x.sum(), ("data", "model"))
    ...     return fs.shard_map(f, mesh=mesh, in_specs=(P("data", "model"),), out_specs=P()), (fs.init.zeros((64, 64)),)
    >>> layouts = fs.planning.divisions(512, data=64, model=16)
    >>> fs.planning.search(step_of, layouts, device=fs.devices.H100)[0].layout
    {'data': 64, 'model': 8}

    Raises ShardingError if there is no layout.
    """
    if not layouts:
        raise fail("search: layouts is empty", fix="fs.planning.divisions(512, data=512, model=8)")
    if best < 1:
        raise fail(f"search: best={best}", fix="1 or more")
    task = Task(step_of, device, tokens, headroom)
    rows: list[PlanRow] = []
    total = len(layouts) + (best if blocks else 0)
    with progress_bar(progress) as advance:

        def screen(more: Sequence[Layout]) -> None:
            for layout in more:
                if all(row.layout != layout for row in rows):
                    reason = _reason(rows, layout, heavier, slower)
                    rows.append(PlanRow(dict(layout), note=reason) if reason else _screened(task, layout, blocks))
                    advance(rows[-1], total)

        screen(layouts)
        if neighbours is not None:
            fitting = [row for row in rows if row.fits]
            for row in sorted(fitting, key=lambda row: row.order)[:best]:
                more = list(neighbours(**row.layout))
                total += len(more)
                screen(more)
        while blocks is not None:
            fitting = [row for row in rows if row.plan is not None and row.fits]
            waiting = sorted((row for row in rows if row.plan is None and row.fits), key=lambda row: row.order)
            if len(fitting) >= best or not waiting:
                break
            at = next(i for i, row in enumerate(rows) if row is waiting[0])
            rows[at] = task.row(waiting[0].layout)
            total = max(total, len(rows) + sum(row.plan is not None for row in rows))
            advance(rows[at], total)
    ordered = sorted(rows, key=lambda row: (row.plan is None or row.fits is False, row.order))
    return PlanTable(tuple(ordered), device)


def _reason(
    rows: Sequence[PlanRow], layout: Layout, heavier: Callable[..., bool] | None, slower: Callable[..., bool] | None
) -> str:
    """Return why a layout need not be planned, by the rows before it; an empty text if there is no reason."""
    for row in rows:
        other = ", ".join(f"{name}={text(x)}" for name, x in row.layout.items() if layout.get(name) != x)
        if heavier is not None and row.fits is False and heavier(layout, row.layout):
            return f"needs more than {other}, which does not fit"
        if slower is not None and row.fits and slower(layout, row.layout):
            return f"takes longer than {other}, which fits"
    return ""


def _screened(task: Task, layout: Layout, blocks: int | None) -> PlanRow:
    """Return the row of a layout: an error, the reason why it cannot fit, or its numbers."""
    try:
        f, args = task.step(layout)
        least = argument_bytes(f, args)
    except Exception as e:  # of any kind: a function of the user runs
        return PlanRow(dict(layout), error=e)
    if task.limit is not None and least > task.limit:
        return PlanRow(dict(layout), f.mesh.size, peak=least, limit=task.limit, note="its arguments alone do not fit")
    if blocks is None or blocks <= _FEW[-1]:
        return task.row(layout, (f, args))
    return _predicted(task, layout, blocks)


def _predicted(task: Task, layout: Layout, blocks: int) -> PlanRow:
    """Return the row of a layout by the plans of few blocks."""
    rows = [replace(task, step_of=functools.partial(task.step_of, blocks=n)).row(layout) for n in _FEW]
    for row in rows:
        if row.plan is None:
            return row
    plans = [row.plan for row in rows if row.plan is not None]
    times = [row.seconds for row in rows if row.seconds is not None]
    peaks = [_phase_peaks(p.events) for p in plans]
    peak = max(_extend([of[phase] for of in peaks], blocks) for phase in peaks[0])
    at_peak = [(row.mfu or 0) * (row.seconds or 0) for row in rows]
    seconds = _extend(times, blocks)
    return replace(rows[-1], layout=dict(layout), plan=None, peak=round(peak), seconds=seconds,
                   sent=round(_extend([row.sent or 0 for row in rows], blocks)), mfu=_extend(at_peak, blocks) / seconds,
                   note=f"from {_FEW[0]} and {_FEW[1]} of its {blocks} blocks")  # fmt: skip


def _extend(values: Sequence[float], blocks: int) -> float:
    """Extend values of `_FEW` blocks along a line."""
    few, more = _FEW
    return values[0] + (values[1] - values[0]) * (blocks - few) / (more - few)


def _phase_peaks(events: Sequence[Event]) -> dict[str, int]:
    """Return the most bytes in use in each phase: the largest of several lines is no line."""
    peaks: dict[str, int] = {}
    phase = "forward"
    for event in events:
        phase = event.phase if isinstance(event, Operation) else phase
        peaks[phase] = max(peaks.get(phase, 0), event.live)
    return peaks


def argument_bytes(f: ShardMapped, args: tuple[Any, ...]) -> int:
    """Return the bytes of the arguments in the memory of rank 0's device, the largest parts; ties count once."""
    specs = tree.broadcast(f._in_specs, args, name="in_specs", leaf=lambda s: s is None or is_spec(s))
    first, sizes = dict.fromkeys(f.mesh.axes, 0), f.mesh.axes
    total, seen = 0, set()
    for x, spec in zip(tree.leaves(args), specs, strict=True):
        if not isinstance(x, (Deferred, Sharded, Tensor)) or id(x) in seen:
            continue
        seen.add(id(x))
        placed = spec if spec is not None else x.spec if isinstance(x, Sharded) else P()
        if placed.memory == "device":
            total += math.prod(box_shape(local_box(tuple(x.shape), placed, sizes, first))) * x.dtype.itemsize
    return total
