"""Plans of many layouts side by side: which of them fit, and which is the fastest."""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fshard._core.display import Row, bars, duration, page, table, three_digits
from fshard.errors import ShardingError, checked, fail, must_be, number_of
from fshard.shard_map import ShardMapped
from fshard.spec import size

from .device import Device
from .plan import Plan, plan_ranks

_MOST_LINES = 8
_CALLS = re.compile(r"( at .*)?, \d+ calls?$")  # of a warning

Layout = Mapping[str, Any]
StepOf = Callable[..., Any]  # (**layout) -> (f, args)


@dataclass(frozen=True)
class PlanRow:
    """A layout, and the numbers of its plan for the device with the most.

    `plan` is None after an error, which `error` is, and for a layout that a search has not planned with all blocks:
    `note` says why. `peak` is in bytes; the transfers of a step send `sent` bytes; a step takes `seconds`,
    in which all devices together compute `tokens`. Numbers that are not known are None; `warnings` are the plan's.
    `busy` has the seconds of "operations", and for each axis how long operations wait for its transfers. `grown` is
    what the other blocks add to the peak, in a row that is predicted from a few.

    >>> step_of = lambda data: (step.on(make_mesh(kind="abstract", data=data)), args)
    >>> row = plan_table(step_of, [{"data": 2}, {"data": 4}])[0]
    >>> row.layout, row.peak, row.fits
    ({'data': 4}, 44, None)
    """

    layout: dict[str, Any]
    devices: int = 0
    plan: Plan | None = None
    peak: int | None = None
    sent: int | None = None
    seconds: float | None = None
    tokens: int | None = None
    mfu: float | None = None
    limit: int | None = None  # bytes that a step may use of the device
    error: Exception | None = None
    note: str = ""
    warnings: tuple[str, ...] = ()
    busy: Mapping[str, float] = field(default_factory=dict)
    grown: int = 0

    @property
    def fits(self) -> bool | None:
        """Return whether the peak is at most the device's memory less the headroom; None without a device or a peak."""
        return None if self.peak is None or self.limit is None else self.peak <= self.limit

    @property
    def rate(self) -> float | None:
        """Return tokens per second and device."""
        return None if not self.seconds or self.tokens is None else self.tokens / self.seconds / self.devices

    @property
    def cost(self) -> float:
        """Return the seconds of a step; with `tokens`, of a device for each token."""
        return math.inf if self.seconds is None else self.seconds if self.rate is None else 1 / max(self.rate, 1e-30)

    @property
    def order(self) -> tuple[Any, ...]:
        """Return a sort key: rows that fit, the fastest first; then those that do not, by their peak; then errors."""
        group = 4 if self.error else 3 if self.peak is None else 2 if self.fits is False else 1
        return group, *((self.peak or 0, self.cost) if group == 2 else (self.cost, self.peak or 0)), bool(self.note)

    def __repr__(self) -> str:
        return repr(PlanTable((self,)))

    def _repr_html_(self) -> str:
        return PlanTable((self,))._repr_html_()

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON: dtypes by their names, an error by its text, and None for what is not known."""
        parts = None if self.plan is None else dict(self.plan.memory.parts)
        return {
            "layout": {name: x if isinstance(x, (bool, int, float, str)) else text(x)
                       for name, x in self.layout.items()},
            "devices": self.devices, "fits": self.fits, "peak_bytes": self.peak, "parts": parts,
            "sent_bytes": self.sent, "seconds": self.seconds, "tokens": self.tokens,
            "tokens_per_second_per_device": self.rate, "mfu": self.mfu,
            "bubble": None if self.plan is None else self.plan.bubble,
            "error": None if self.error is None else _words(self.error), "note": self.note,
            "warnings": list(self.warnings),
        }  # fmt: skip


@dataclass(frozen=True, repr=False)
class PlanTable:
    """Rows in order: layouts that fit, the fastest first, then those that do not fit, then those with an error.

    Without a device, by the peak. Prints as a table of text, and in a notebook as HTML. `unit` are the things that a
    step computes, `note` are lines below the table. `interrupted`: by Ctrl-C, and so without some of the rows.

    >>> step_of = lambda data: (step.on(make_mesh(kind="abstract", data=data)), args)
    >>> plan_table(step_of, [{"data": 2}, {"data": 4}])
    2 layouts on 2 to 4 devices; of each device
    data   peak  sent
       4   44 B   6 B
       2  116 B   4 B
    """

    rows: tuple[PlanRow, ...]
    device: Device | None = None
    unit: str = "tokens"
    note: str = field(default="", kw_only=True)
    interrupted: bool = field(default=False, kw_only=True)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[PlanRow]:
        return iter(self.rows)

    def __getitem__(self, i: int) -> PlanRow:
        return self.rows[i]

    @property
    def same(self) -> dict[str, Any]:
        """Return the settings that are the same in all rows."""
        first = self.rows[0].layout if len(self.rows) > 1 else {}
        return {
            name: x
            for name, x in first.items()
            if all(name in row.layout and type(y := row.layout[name]) is type(x) and y == x for row in self.rows)
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the table for JSON."""
        return {"device": None if self.device is None else self.device.name, "rows": [r.as_dict() for r in self.rows]}

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Return the header, and the cells of each row: the settings that differ, then the numbers that are known."""
        same = self.same
        least, most = ("≥ ", "≤ ") if self.device is not None and self.device.is_bound else ("", "")
        names = list(dict.fromkeys(name for row in self.rows for name in row.layout if name not in same))
        columns: dict[str, tuple[str, Callable[[Any], str]]] = {  # the number of a row, and its text
            "peak": ("peak", size),
            "memory": ("peak", lambda n: f"{n / self.device.memory:.0%}" if self.device else ""),
            "sent": ("sent", size),
            "step": ("seconds", lambda seconds: least + duration(seconds)),
            f"{self.unit}/s": ("rate", lambda rate: most + three_digits(rate)),
            "MFU": ("mfu", lambda mfu: f"{most}{mfu:.1%}"),
        }
        texts = {name: ["" if (x := getattr(row, number)) is None else text_of(x) for row in self.rows]
                 for name, (number, text_of) in columns.items()}  # fmt: skip
        texts[""] = [_remark(row) for row in self.rows]
        known = {name: column for name, column in texts.items() if any(column)}
        settings = [[text(row.layout.get(name, "")) for name in names] for row in self.rows]
        rows = [cells + [column[i] for column in known.values()] for i, cells in enumerate(settings)]
        return names + list(known), rows

    def _repr_html_(self) -> str:
        header, rows = self.cells()
        if "memory" in header:  # a bar of the device's memory
            at = header.index("memory")
            for cells, row in zip(rows, self.rows, strict=True):
                if row.peak is not None and self.device is not None:
                    cells[at] = bars(_shares(row, self.device.memory))
        align = "".join("l" if name in ("", "memory") else "r" for name in header)
        lines = [Row(cells, hover="" if row.error is None else _words(row.error))
                 for cells, row in zip(rows, self.rows, strict=True)]  # fmt: skip
        return page(self.head, table(lines, head=header, align=align), *self._notes())

    def _notes(self) -> list[str]:
        """Return the lines below the table: the note, and the warnings of the rows without their places and counts."""
        texts = Counter(x for row in self.rows for x in {_CALLS.sub("", text): None for text in row.warnings})
        planned = sum(row.peak is not None for row in self.rows)
        lines = [f"{text} ({number_of(n, 'layout')})" if n < planned else text for text, n in texts.items()]
        more = [f"and {len(lines) - _MOST_LINES} more warnings, in JSON"][: len(lines) > _MOST_LINES]
        return [*self.note.splitlines(), *lines[:_MOST_LINES], *more]

    @property
    def head(self) -> str:
        """Return the line above the table."""
        sizes = sorted({row.devices for row in self.rows if row.devices})
        on = "" if not sizes else f" on {sizes[0]:,}" if len(sizes) == 1 else f" on {sizes[0]:,} to {sizes[-1]:,}"
        name = " devices" if self.device is None else f" {self.device.name} of {size(self.device.memory)}"
        same = settings(self.same)
        count = number_of(len(self.rows), "layout")
        return f"{count}{f'{on}{name}' if on else ''}{f'; {same}' if same else ''}; of each device"

    def __repr__(self) -> str:
        header, rows = self.cells()
        left = [i for i, name in enumerate(header) if not name]
        return "\n".join([self.head, *aligned([header, *rows], left), *self._notes()])


@checked
def plan_table(
    step_of: Callable[..., Any], layouts: Sequence[Mapping[str, Any]], *, device: Device | None = None,
    tokens: int | Callable[..., int] | None = None, headroom: float = 0.1, progress: bool = False,
) -> PlanTable:  # fmt: skip
    """Plan many layouts, and put them side by side: which of them fit, and which is the fastest.

    A layout is a dict of settings: axis sizes, the batch, remat, a dtype. `step_of(**layout)` returns `(f, args)` as
    for `fs.plan`: a function of `fs.shard_map`, and its arguments, which may be described. A layout whose step cannot
    be made or planned has its error in its row; the others are planned.

    Args:
        device: one of `fs.devices`, for what fits and for times. Without it rows are in the order of their peaks.
        tokens: the number that a step of all devices trains on, or `tokens(**layout)`: for tokens per second, by
            which rows are then compared, since their batches may differ.
        headroom: the share of a device's memory that a step must leave: for the driver, for buffers of the network and
            for gaps between tensors, which a plan does not count.
        progress: show a bar on stderr; on anything but a terminal, a line for each layout.

    >>> def step_of(data, remat):
    ...     mesh = fs.make_mesh(kind="abstract", data=data)
    ...     block = fs.remat(torch.sin) if remat else torch.sin
    ...     loss = lambda x: fs.pmean(block(block(x)).mean(), "data")
    ...     f = fs.shard_map(fs.grad(loss), mesh=mesh, in_specs=(P("data"),), out_specs=P("data"))
    ...     return f, (fs.init.zeros((64, 1024)),)
    >>> table = fs.plan_table(step_of, [{"data": n, "remat": remat} for n in (2, 4) for remat in (False, True)])
    >>> [row.layout["data"] for row in table]
    [4, 4, 2, 2]

    Raises ShardingError if there is no layout, and for a headroom that is not a share. Errors of `step_of` and of its
    step, whatever their kind, are in the table.
    """
    if not layouts:
        raise fail("plan_table: layouts is empty", fix="[{'data': 8, 'model': 1}, {'data': 4, 'model': 2}]")
    task = Task(step_of, device, tokens, headroom)
    rows = []
    with progress_bar(progress) as advance:
        for layout in layouts:
            rows.append(row_or_error(task.row, layout))
            advance(rows[-1], len(layouts))
    return PlanTable(tuple(sorted(rows, key=lambda row: row.order)), device)


@dataclass(frozen=True)
class Task:
    """The arguments that the plans of all layouts share."""

    step_of: StepOf
    device: Device | None
    tokens: int | Callable[..., int] | None
    headroom: float
    name: str = "plan_table"  # of the function that was called

    def __post_init__(self) -> None:
        if not 0 <= self.headroom < 1:
            raise must_be(f"{self.name}: headroom", "a share in [0, 1)", self.headroom, "headroom=0.1")

    @property
    def limit(self) -> int | None:
        """Return the most bytes of a device that a step may use."""
        return None if self.device is None else int(self.device.memory * (1 - self.headroom))

    def plans(self, layout: Layout, **more: Any) -> list[Plan]:
        """Plan the ranks of one layout."""
        return plan_ranks(*self.step(layout, **more), self.device)

    def row(self, layout: Layout) -> PlanRow:
        """Plan one layout."""
        return self.row_of(layout, self.plans(layout))

    def row_of(self, layout: Layout, plans: Sequence[Plan]) -> PlanRow:
        """Return the row of a layout with these plans."""
        found = max(plans, key=lambda p: p.memory.peak)
        tokens = self.tokens_of(layout)
        times = [p.time for p in found.positions or (found,) if p.time is not None]
        seconds, mfu = (times[0].seconds, sum(t.mfu for t in times) / len(times)) if times else (None, None)
        busy = {} if (time := found.time) is None else {
            "operations": time.compute, **{a: min(s, time.transfers[a]) for a, s in time.exposed.items()}}  # fmt: skip
        return PlanRow(dict(layout), math.prod(found.mesh.values()), found, found.memory.peak,
                       sum(t.sent for t in found.transfers), seconds, tokens, mfu, self.limit,
                       warnings=found.warnings, busy=busy)  # fmt: skip

    def tokens_of(self, layout: Layout) -> int | None:
        """Return the tokens of a step. Raises ShardingError if `tokens` does not take the settings of the layout."""
        if not callable(self.tokens):
            return self.tokens
        try:
            return self.tokens(**layout)
        except TypeError as e:
            raise fail(f"{self.name}: tokens(**layout): {e}", f"layout  {settings(layout)}",
                       fix="tokens=lambda **layout: a number") from e  # fmt: skip

    def step(self, layout: Layout, **more: Any) -> tuple[ShardMapped, tuple[Any, ...]]:
        """Call `step_of`. Raises ShardingError unless it returns a function of shard_map and its arguments."""
        self.tokens_of(layout)  # before a plan, which may take minutes
        made = self.step_of(**layout, **more)
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], ShardMapped)
                and isinstance(made[1], (tuple, list))):  # fmt: skip
            raise must_be(f"{self.name}: the result of step_of", "a pair (f, args), where fs.shard_map made f", made,
                          fix="return step, (state, batch)")  # fmt: skip
        return made[0], tuple(made[1])


def row_or_error(row_of: Callable[..., PlanRow], layout: Layout, *args: Any) -> PlanRow:
    """Return `row_of(layout, *args)`, or a row with its error."""
    try:
        return row_of(layout, *args)
    except Exception as e:  # of any kind: functions of the user run
        return PlanRow(dict(layout), error=e)


# --- texts ----------------------------------------------------------------------------------------------------


def settings(layout: Layout, but: Collection[str] = ()) -> str:
    """Return a layout as text, `data=4, remat=yes`, but for some names."""
    return ", ".join(f"{name}={text(x)}" for name, x in layout.items() if name not in but)


def text(x: object) -> str:
    """Return a setting as a word of a table."""
    if isinstance(x, bool):
        return "yes" if x else "no"
    return str(x).removeprefix("torch.") if isinstance(x, torch.dtype) else str(x)


def aligned(rows: Sequence[Sequence[str]], left: Container[int]) -> list[str]:
    """Return rows of text in columns: those numbered in `left` are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(x.ljust(w) if i in left else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True)))
            .rstrip() for row in rows]  # fmt: skip


def _words(e: Exception) -> str:
    """Return the text of an error, with its kind unless it is a ShardingError."""
    return str(e) if isinstance(e, ShardingError) else f"{type(e).__name__}: {e}"


def _shares(row: PlanRow, memory: int) -> dict[str, float]:
    """Return the parts of the peak as shares of the memory; all of it, if the parts are not known."""
    parts = {"peak": row.peak or 0} if row.plan is None else row.plan.memory.parts
    return {f"{name} {size(n)}": n / memory for name, n in parts.items() if n}


def _remark(row: PlanRow) -> str:
    if row.error is not None:
        words = _words(row.error).strip().replace(" problems\n", " problems: ", 1)
        fix = re.search(r"(?m)^  fix: .*(?:\n {7}.*)*", words)
        texts = (f"error: {words.splitlines()[0] if words else ''}", " ".join(fix[0].split()) if fix else "")
        return "; ".join(filter(None, texts))
    bubble = None if row.plan is None else row.plan.bubble
    waits = "" if bubble is None else f"stages wait {bubble:.1%}"
    return "; ".join(filter(None, ("does not fit" * (row.fits is False), row.note, waits)))


# --- progress -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def progress_bar(shown: bool) -> Iterator[Callable[[PlanRow, int], None]]:
    """Yield a function to call after each row, with the number of all: a bar on a terminal, lines elsewhere."""
    done = 0
    bar: Progress | None = None
    if shown and sys.stderr.isatty():
        count = TextColumn("{task.completed}/{task.total} layouts  {task.description}")
        bar = Progress(BarColumn(), count, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
        task = bar.add_task("", total=None)

    def advance(row: PlanRow, total: int) -> None:
        nonlocal done
        done += 1
        summary = f"{settings(row.layout)}: {_outcome(row)}"
        if bar is not None:
            bar.update(task, completed=done, total=total, description=escape(summary))
        elif shown:
            sys.stderr.write(f"{done}/{total}  {summary}\n")

    with bar or contextlib.nullcontext():
        yield advance


def _outcome(row: PlanRow) -> str:
    known = (None if row.peak is None else size(row.peak), None if row.seconds is None else duration(row.seconds))
    return ", ".join(filter(None, (*known, _remark(row))))
