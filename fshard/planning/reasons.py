"""Reasons of a search in words: what the first row spends its time on, and what the next one pays."""

from __future__ import annotations

from collections.abc import Sequence

from fshard._core.display import duration
from fshard.spec import size

from .roofline import Roofline
from .table import PlanRow, PlanTable, settings

_COMPUTE = "operations"


def reasons(rows: Sequence[PlanRow]) -> list[str]:
    """Return lines: the seconds of the first row by kind, a faster row that does not fit, and the price of the next."""
    same = PlanTable(tuple(rows)).same
    planned = [(row, row.plan.time) for row in rows if row.fits and row.plan is not None and row.plan.time is not None]
    if not planned:
        return []
    (first, time), *others = planned
    spent = ", ".join(f"{s / time.seconds:.0%} {'' if lane == _COMPUTE else 'waits for '}{lane}"
                      for lane, s in _parts(time).items() if s > 0.005 * time.seconds)  # fmt: skip
    lines = [f"first: {settings(first.layout, same)}: {spent} of {duration(time.seconds)}"]
    large = [row for row in rows if row.fits is False and row.cost < first.cost]
    for row in sorted(large, key=lambda row: row.cost)[:1]:
        needs = f"{duration(row.seconds or 0)}, and needs {size(row.peak or 0)} of the {size(row.limit or 0)}"
        lines.append(f"faster, but too large: {settings(row.layout, same)} takes {needs} that a step may use")
    for after, its in others[:1]:
        more = after.cost / first.cost - 1
        price = f"takes {more:.1%} longer{_price(after, time, its)}" if more >= 0.0005 else "is as fast"
        lines.append(f"the next, {settings(after.layout, same)}, {price}")
    return lines


def _parts(time: Roofline) -> dict[str, float]:
    """Return the seconds of operations, and of waits for the transfers over each of the axes."""
    return {_COMPUTE: time.compute, **time.exposed}


def _price(after: PlanRow, a: Roofline, b: Roofline) -> str:
    """Return the part of the second row that grows most, if one does; of transfers, the one that takes longest."""
    before, parts = _parts(a), _parts(b)
    more = {lane: seconds - before.get(lane, 0.0) for lane, seconds in parts.items()}
    lane = max(more, key=more.__getitem__)
    if more[lane] <= 0:
        return ""
    if lane == _COMPUTE or after.plan is None:
        return f": its operations take {duration(more[lane])} more"
    if lane in after.plan.branches_on:
        return f": its stages wait for each other, {duration(more[lane])} more"
    spans = [span for span in b.lanes if span.lane == lane]
    op = max(sorted({s.name for s in spans}), key=lambda op: sum(s.end - s.start for s in spans if s.name == op))
    sent = sum(t.sent for t in after.plan.transfers if t.op == op and "+".join(t.axes) == lane)
    return f": its {op} of {size(sent)} over {lane} is exposed, {duration(more[lane])} more"
