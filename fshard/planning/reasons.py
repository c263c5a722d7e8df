"""Reasons of a search in words: what the first row spends its time on, and what the next one pays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from fshard._core.display import duration
from fshard.spec import size

from .roofline import Roofline
from .table import PlanRow, PlanTable, text


def reasons(rows: Sequence[PlanRow]) -> list[str]:
    """Return lines: the seconds of the first row by kind, a faster row that does not fit, and the price of the next."""
    same = PlanTable(tuple(rows)).same
    planned = [(row, row.plan.time) for row in rows if row.fits and row.plan is not None and row.plan.time is not None]
    if not planned:
        return []
    (first, time), *others = planned
    spent = ", ".join(f"{s / time.seconds:.0%} {_kind(lane)}" for lane, s in _parts(time).items()
                      if s > 0.005 * time.seconds)  # fmt: skip
    lines = [f"first: {_name(first, same)}: {spent} of {duration(time.seconds)}"]
    large = [row for row in rows if row.fits is False and row.seconds and _cost(row) < _cost(first)]
    if large:
        row = min(large, key=_cost)
        needs = f"{size(row.peak or 0)} of the {size(row.limit or 0)} that a step may use"
        lines.append(f"faster, but too large: {_name(row, same)} takes {duration(row.seconds or 0)}, and needs {needs}")
    for after, its in others[:1]:
        more = _cost(after) / _cost(first) - 1
        price = f"takes {more:.1%} longer: {_price(after, time, its)}" if more >= 0.0005 else "is as fast"
        lines.append(f"the next, {_name(after, same)}, {price}")
    return lines


def _cost(row: PlanRow) -> float:
    return (row.seconds or 0.0) / (row.tokens or 1)


def _name(row: PlanRow, same: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={text(x)}" for name, x in row.layout.items() if name not in same)


def _kind(lane: str) -> str:
    return lane if lane == "operations" else f"waits for {lane}"


def _parts(time: Roofline) -> dict[str, float]:
    """Return the seconds of operations, and of waits for the transfers over each of the axes."""
    return {"operations": time.compute, **time.exposed}


def _price(after: PlanRow, a: Roofline, b: Roofline) -> str:
    """Return which part of the second row grows most; of transfers, the operation that its axes are busiest with."""
    before, parts = _parts(a), _parts(b)
    more = {lane: seconds - before.get(lane, 0.0) for lane, seconds in parts.items()}
    lane = max(more, key=more.__getitem__)
    if lane == "operations" or after.plan is None:
        return f"its operations take {duration(more[lane])} more"
    seconds: dict[str, float] = defaultdict(float)
    for span in b.lanes:
        if span.lane == lane:
            seconds[span.name] += span.end - span.start
    op = max(seconds, key=seconds.__getitem__)
    sent = sum(t.sent for t in after.plan.transfers if t.op == op and "+".join(t.axes) == lane)
    return f"its {op} of {size(sent)} over {lane} is exposed, {duration(more[lane])} more"
