"""The fastest layouts that fit: many are bounded, some planned with few blocks, and the best with all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fshard._core.display import duration
from fshard.errors import checked, fail, number_of
from fshard.spec import box_shape, local_box, size

from .device import Device
from .plan import Plan, plan_ranks
from .reasons import reasons
from .repeat import Repeats
from .table import Layout, PlanRow, PlanTable, Task, progress_bar, row_or_error, settings
from .trust import placed_leaves, unknown_operations, warnings_of

_FEWEST, _MORE = 4, 4  # blocks that are planned, and the most that are added; of fewer none has others around it

Blocks = tuple[int, int] | None  # of a model, and the fewest that are planned


@checked
def divisions(n: int, **largest: int) -> list[dict[str, int]]:
    """Return every way to write `n` as a product of axis sizes, each at most the largest of its axis.

    >>> divisions(8, data=8, model=2)
    [{'data': 8, 'model': 1}, {'data': 4, 'model': 2}]

    Raises ShardingError for numbers below 1, and if no axis is named.
    """
    if not largest:
        raise fail(f"divisions: n={n}, and no axis is named", fix=f"divisions({n}, data={n}, model=8)")
    for name, k in {"n": n, **largest}.items():
        if k < 1:
            raise fail(f"divisions: {name}={k}", fix="1 or more")
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
    tokens: int | Callable[..., int] | None = None, headroom: float = 0.1, best: int = 3,
    blocks: int | Callable[..., Blocks] | None = None, heavier: Callable[..., float] | None = None,
    slower: Callable[..., bool] | None = None, least: Callable[..., tuple[float, float]] | None = None,
    work: Callable[..., float] | None = None, neighbours: Callable[..., Any] | None = None, progress: bool = False,
) -> PlanTable:  # fmt: skip
    """Find the fastest layouts that fit on the device, and plan these with all their blocks.

    1. The arguments of a step (parameters, optimizer state) are the least that its peak can be. A layout whose
       arguments do not fit is left out without a plan.
    2. With `blocks`, the others are planned with 4 and 5 blocks: `step_of(**layout, blocks=n)`. The second step has the
       operations and transfers of the first, some of them once more. Time, transfers and the memory after each of them
       grow by the same amount with each block, so those for `blocks` follow. If they do not repeat with up to 8 blocks,
       the layout is planned with all blocks.
    3. Layouts that `least` knows something about wait for the others. They are planned in the order of their least
       times, as long as one may still be among the best. The others are counted below the table, and have no rows.
    4. In the order of these times, until `best` fit, their full plans are made: from the repeated ones, if these give
       the very plan of 6 blocks, or else directly.

    Args:
        layouts, device, tokens, headroom, progress: as for `fs.plan_table`.
        best: how many layouts to plan with all blocks.
        blocks: the number of equal blocks of the model. Without it all layouts are planned directly. A function
            `blocks(**layout)` returns None for that, or the number and the fewest to plan, (80, 4). In a pipeline,
            these are blocks of each of its places: (20, 2) on 4 stages.
        heavier: `heavier(a, b)` is the share of the memory of layout `b` that `a` surely needs: True for all of it, 0.5
            for half, False if nothing is known. `a` is left out if it comes after a `b` whose share does not fit.
        slower: `slower(a, b)` is True if `a` surely takes at least as long as `b`. `a` is left out if it comes after a
            `b` that fits.
        least: `least(a, row)` is what layout `a` needs at least, (bytes, seconds), by the row of another one, with
            as many devices and tokens; (0, 0) if nothing is known.
        work: `work(a)` is the share of a search that planning `a` takes. Layouts that wait are planned, the fastest by
            `least` first, while the sum is at most 1. Without it all that may be among the best.
        neighbours: called with each of the best layouts of step 2; returns more layouts for it.

    The rows begin with the full plans, in the order of their times, then the others, each with a note. The note of the
    table has what the first row spends its time on, a faster one that does not fit, and what the next one pays.

    >>> def step_of(data, model):
    ...     mesh = fs.make_mesh(kind="abstract", data=data, model=model)
    ...     f = lambda x: fs.psum(x.sum(), ("data", "model"))
    ...     return fs.shard_map(f, mesh=mesh, in_specs=(P("data", "model"),), out_specs=P()), (fs.init.zeros((64, 64)),)
    >>> layouts = fs.planning.divisions(512, data=64, model=16)
    >>> fs.planning.search(step_of, layouts, device=fs.devices.H100)[0].layout
    {'data': 64, 'model': 8}

    If none fits, the note of the table says how far off the smallest is. Ctrl-C ends a search with the rows so far: the
    table is `interrupted`.

    Raises ShardingError if there is no layout, for `best` or `blocks` below 1, and for a headroom that is not a share.
    """
    if not layouts:
        raise fail("search: layouts is empty", fix="fs.planning.divisions(512, data=512, model=8)")
    for name, n in (("best", best), ("blocks", blocks)):
        if isinstance(n, int) and n < 1:
            raise fail(f"search: {name}={n}", fix="1 or more")
    task = Task(step_of, device, tokens, headroom, "search")
    counted = blocks if callable(blocks) else lambda **_: None if blocks is None else (blocks, _FEWEST)
    with progress_bar(progress) as advance:
        found = _Search(task, best, counted, heavier or (lambda a, b: 0.0), slower or (lambda a, b: False),
                        least or (lambda a, row: (0, 0.0)), work or (lambda **_: 0.0), advance)  # fmt: skip
        try:
            found.run(layouts, neighbours or (lambda **_: ()))
        except KeyboardInterrupt:
            found.interrupted = True
    rows = sorted(found.rows, key=lambda row: (row.plan is None or row.fits is False, row.order))
    notes = [_fits_nowhere(rows, task) or "\n".join(reasons(rows)), *found.left_out()]
    return PlanTable(tuple(rows), device, note="\n".join(filter(None, notes)), interrupted=found.interrupted)


@dataclass
class _Search:
    """The rows of a search so far, and what they repeat; layouts that wait for their turn."""

    task: Task
    best: int
    blocks: Callable[..., Blocks]
    heavier: Callable[..., float]
    slower: Callable[..., bool]
    least: Callable[..., tuple[float, float]]
    work: Callable[..., float]
    advance: Callable[[PlanRow, int], None]
    rows: list[PlanRow] = field(default_factory=list)
    repeats: dict[int, list[Repeats]] = field(default_factory=dict)  # by the places of their rows
    waiting: list[PlanRow] = field(default_factory=list)  # what each layout needs at least, by the rows of others
    known: int = 0  # layouts that do not wait
    interrupted: bool = False

    def run(self, layouts: Sequence[Layout], neighbours: Callable[..., Iterable[Layout]]) -> None:
        """Plan layouts, and the neighbours of the best; then those that wait; then the best with all blocks."""
        self._screen(layouts)
        asked, left = list[Layout](), 1.0
        while True:
            for row in self._fastest():
                if row.layout not in asked:
                    more = list(neighbours(**row.layout))
                    asked += [row.layout, *more]
                    self._screen(more)
            able = (b for b in self._bounds() if self._may_be_best(b) and self.work(**b.layout) <= left)
            if (bound := next(able, None)) is None:
                break
            self.waiting.remove(bound)
            self._add(bound.layout)
            left -= self.work(**bound.layout) if self.rows[-1].seconds else 0
        while missing := [row for row in self._fastest() if row.plan is None]:
            at = next(i for i, row in enumerate(self.rows) if row is missing[0])
            self.rows[at] = row = row_or_error(self._whole, missing[0].layout, self.repeats[at])
            # Anew: of the predicted row, which this one replaces, the bounds may have been too high.
            self.waiting = [self._raised(replace(b, peak=0, seconds=0.0), self.rows) for b in self.waiting]
            self.advance(row, len(self.rows) + self.best)

    def _screen(self, layouts: Iterable[Layout]) -> None:
        new = [x for x in layouts if all(row.layout != x for row in (*self.waiting, *self.rows))]
        self.known += len(new)
        for layout in new:
            bound = self._raised(PlanRow(dict(layout), peak=0, seconds=0.0, limit=self.task.limit), self.rows)
            if bound.peak or bound.seconds:
                self.waiting.append(bound)
                self.known -= 1
            else:
                self._add(layout)

    def _add(self, layout: Layout) -> None:
        reason = self._reason(layout)
        row = PlanRow(dict(layout), note=reason) if reason else row_or_error(self._screened, layout)
        self.rows.append(row)
        self.waiting = [self._raised(bound, [row]) for bound in self.waiting]
        self.advance(row, max(self.known, len(self.rows)) + self.best)

    def _reason(self, layout: Layout) -> str:
        """Return why a layout need not be planned, by the rows before it; an empty text if there is no reason."""
        for row in self.rows:
            other = settings(row.layout, [name for name, x in row.layout.items() if layout.get(name) == x])
            if row.fits is False and row.peak is not None and row.limit is not None:
                share = self.heavier(layout, row.layout)
                if share * row.peak > row.limit:
                    part = f"at least {share:.0%} of the {size(row.peak)} of {other}"
                    return f"needs {part if share < 1 else f'more than {other}'}, which does not fit"
            if row.fits and self.slower(layout, row.layout):
                return f"takes longer than {other}, which fits"
        return ""

    def _fastest(self) -> list[PlanRow]:
        return sorted((row for row in self.rows if row.fits), key=lambda row: row.order)[: self.best]

    # --- plans ---

    def _screened(self, layout: Layout) -> PlanRow:
        """Return the row of a layout: the reason why it cannot fit, or its numbers, predicted if blocks repeat."""
        f, args = self.task.step(layout)
        least, limit = rank_bytes(args, f._in_specs, f.mesh.axes), self.task.limit
        if limit is not None and least > limit:
            return PlanRow(dict(layout), f.mesh.size, peak=least, limit=limit, note="its arguments alone do not fit")
        blocks = self.blocks(**layout)
        if blocks is None or blocks[0] <= blocks[1] + 1:
            return self.task.row_of(layout, plan_ranks(f, args, self.task.device))
        return self._predicted(layout, *blocks)

    def _predicted(self, layout: Layout, blocks: int, fewest: int) -> PlanRow:
        """Return the row of a layout by plans of few blocks; if their events do not repeat, it is planned directly."""
        few = self.task.plans(layout, blocks=fewest)
        for n in range(fewest, min(fewest + _MORE, blocks - 1)):
            more = self.task.plans(layout, blocks=n + 1)
            found = [Repeats.of(n, a, b) for a, b in zip(few, more, strict=False)]
            repeats = [r for r in found if r is not None]
            if len(repeats) == len(few) == len(more):
                self.repeats[len(self.rows)] = repeats
                return _row_of(self.task, layout, max(repeats, key=lambda r: r.peak(blocks)), blocks)
            few = more
        return self.task.row(layout)

    def _whole(self, layout: Layout, repeats: Sequence[Repeats]) -> PlanRow:
        """Plan a layout with all blocks: by its repeats, if these give the same plan for two blocks more than a few.

        Of a pipeline, they give the same memory and times.
        """
        blocks = self.blocks(**layout)
        assert blocks is not None
        n = repeats[0].blocks + 2
        if n < blocks[0]:
            pairs = zip([r.plan(n) for r in repeats], self.task.plans(layout, blocks=n), strict=True)
            if all(a == b or (b.positions and _numbers(a) == _numbers(b)) for a, b in pairs):
                return self.task.row_of(layout, [r.plan(blocks[0]) for r in repeats])
        return self.task.row(layout)

    # --- layouts that wait ---

    def _raised(self, bound: PlanRow, rows: Iterable[PlanRow]) -> PlanRow:
        """Return what a layout needs at least, by more rows of others."""
        for row in rows:
            peak, seconds = self.least(bound.layout, row)
            if seconds > (bound.seconds or 0):
                bound = replace(bound, devices=row.devices, tokens=row.tokens, seconds=seconds)
            bound = replace(bound, peak=max(bound.peak or 0, int(peak)))
        return bound

    def _bounds(self) -> list[PlanRow]:
        return sorted(self.waiting, key=lambda bound: bound.order[:2])

    def _may_be_best(self, bound: PlanRow) -> bool:
        return bound.fits is not False and all(bound.cost < row.cost for row in self._fastest()[self.best - 1 :])

    def left_out(self) -> list[str]:
        """Return lines about layouts that have no rows."""
        lines = [f"interrupted after {number_of(len(self.rows), 'layout')}"] * self.interrupted
        large, slow, able = list[PlanRow](), list[PlanRow](), list[PlanRow]()
        for b in self._bounds():
            (large if b.fits is False else able if self._may_be_best(b) else slow).append(b)
        texts = [f"{len(slow):,} take at least {duration(b.seconds or 0)}" for b in slow[:1]]
        texts += [f"{len(large):,} need at least {size(b.peak or 0)}" for b in large[:1]]
        if texts:
            lines.append(f"{len(large + slow):,} more layouts are not among the best {self.best}: {', '.join(texts)}")
        for b in able[:1]:
            first = f"{settings(b.layout)}, takes at least {duration(b.seconds or 0)}"
            lines.append(f"{len(able):,} more layouts are not planned, and may be among the best {self.best}: {first}")
        return lines


def _fits_nowhere(rows: Sequence[PlanRow], task: Task) -> str:
    """Return how far off the smallest peak is if no row fits; else an empty text."""
    peaks = [row.peak for row in rows if row.peak is not None]
    device, limit = task.device, task.limit
    if not peaks or any(row.fits for row in rows) or device is None or limit is None:
        return ""
    return (f"no layout fits: the smallest needs {size(min(peaks))}, and a step may use {size(limit)}, the "
            f"{size(device.memory)} of {device.name} less {task.headroom:.0%}; more devices or a smaller batch "
            "need less")  # fmt: skip


def _row_of(task: Task, layout: Layout, repeats: Repeats, blocks: int) -> PlanRow:
    """Return the row of a layout whose time and transfers grow by the same amount with each block."""
    few, more = (task.row_of(layout, [p]) for p in (repeats.few, repeats.more))

    def extend(few: float | None, more: float | None) -> float:
        return (few or 0) + ((more or 0) - (few or 0)) * (blocks - repeats.blocks)

    seconds = extend(few.seconds, more.seconds)
    at_peak = extend(*((row.mfu or 0) * (row.seconds or 0) for row in (few, more)))
    busy = {name: extend(few.busy.get(name), s) for name, s in more.busy.items()}
    counts, more_counts = (unknown_operations(p.events) for p in (repeats.few, repeats.more))
    unknown = {text: round(extend(counts[text], n)) for text, n in more_counts.items()}
    warnings = warnings_of(unknown, repeats.more.events, task.device, repeats.more.splits)
    place = " of each place" if repeats.positions else ""
    return replace(more, plan=None, peak=(peak := repeats.peak(blocks)), warnings=warnings, seconds=seconds, busy=busy,
                   mfu=at_peak / (seconds or 1), sent=round(extend(few.sent, more.sent)),
                   grown=max(0, peak - repeats.few.memory.peak),
                   note=f"from {repeats.blocks} and {repeats.blocks + 1} of its {blocks} blocks{place}")  # fmt: skip


def _numbers(plan: Plan) -> list[Any]:
    return [(p.rank, p.memory, p.time) for p in plan.positions]


def rank_bytes(leaves: Any, specs: Any, axes: Mapping[str, int]) -> int:
    """Return the bytes of a rank's parts of `placed_leaves` on the device, on the rank with most; ties count once."""
    # Of a tie the first spec counts: later entries of a dict replace earlier ones.
    unique = {id(x): (x, spec) for _, x, spec in reversed(placed_leaves(leaves, specs))}.values()
    chosen = sorted({a for _, spec in unique for a in spec.lengths})
    first = dict.fromkeys(axes, 0)  # has the longest parts over axes without chosen lengths
    positions = itertools.product(*(range(axes[a]) for a in chosen))
    ranks = [{**first, **dict(zip(chosen, at, strict=True))} for at in positions]
    most: int = max(sum(math.prod(box_shape(local_box(tuple(x.shape), spec, axes, coords))) * x.dtype.itemsize
                        for x, spec in unique if spec.memory == "device") for coords in ranks)  # fmt: skip
    return most
