"""Plots of a planned step and of a training run, by matplotlib: `pip install 'fshard[plot]'`.

Each function returns a matplotlib `Figure`, which a notebook shows and `figure.savefig("plot.png")` writes. The
background is transparent and the colours are of middle brightness, so a plot can be read on light and dark pages.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from fshard._core.display import duration
from fshard._core.files.io import StrPath, open_file
from fshard.errors import checked, fail, must_be
from fshard.spec import format_axes, short_dtype, size

from . import Operation, Plan, Start, Trace

__all__ = ["losses", "memory", "roofline", "traffic"]

F = TypeVar("F", bound=Callable[..., Any])
Figure = Any  # matplotlib's: it is imported by the first plot

_INK = "#808080"
_COLORS = ("#4a8fe0", "#e08a3c", "#45ac76", "#d9605a", "#9b7fd1", "#b0923f", "#4fa9b5")
_PHASES = {"forward": _COLORS[0], "recompute": _COLORS[4], "backward": _COLORS[1], "update": _COLORS[2]}
_STYLE = {
    "figure.facecolor": "none", "axes.facecolor": "none", "text.color": _INK, "axes.edgecolor": _INK,
    "axes.labelcolor": _INK, "axes.titlecolor": _INK, "xtick.color": _INK, "ytick.color": _INK, "grid.color": _INK,
    "grid.alpha": 0.25, "legend.frameon": False, "legend.labelcolor": _INK, "font.size": 10, "axes.titlesize": 11,
    "axes.spines.top": False, "axes.spines.right": False, "text.parse_math": False,
}  # fmt: skip
_MOST_LINES = 4  # of a legend


def _styled(f: F) -> F:
    """Run a plot in the style of this file. Raises ShardingError if matplotlib is not installed."""

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Figure:
        try:
            matplotlib = import_module("matplotlib")
        except ImportError as e:
            raise fail(f"plot.{f.__name__}: needs matplotlib, which is not installed",
                       fix="pip install 'fshard[plot]'") from e  # fmt: skip
        with matplotlib.rc_context(_STYLE):
            return f(*args, **kwargs)

    return cast(F, run)


@functools.cache
def _figure_class() -> Any:
    """Return matplotlib's Figure, which notebooks show without pyplot."""

    class Figure(import_module("matplotlib.figure").Figure):  # type: ignore[misc]
        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=120)
            return file.getvalue()

    return Figure


def _new_figure(width: float = 8.0, height: float = 4.0) -> Figure:
    return _figure_class()(figsize=(width, height), layout="constrained")


# --- memory -----------------------------------------------------------------------------------------------------


@checked
@_styled
def memory(run: Plan | Trace) -> Figure:
    """Draw the bytes in a rank's memory over a step, and of a plan the parts of the peak.

    `run`: an `fs.plan`, by its events, or by time if a device was named; or an `fs.trace`, with a line for each rank.
    The peak of a plan is marked with the user's line, and the memory of the device is drawn if it is near.

    >>> step = shard_map(lambda x: psum((x @ x.T).sum(), "data"), mesh=mesh, in_specs=(P("data"),), out_specs=P())
    >>> figure = fs.plot.memory(fs.plan(step, fs.init.zeros((8, 3))))

    Raises ShardingError if there is nothing to draw, and without matplotlib.
    """
    return _memory_of_trace(run) if isinstance(run, Trace) else _memory_of_plan(run)


def _memory_of_plan(plan: Plan) -> Figure:
    if not plan.events:
        raise fail("plot.memory: the planned step has no operation and no transfer", fix="plan a step that computes")
    m, live = plan.memory, np.array([m0 := plan.memory.arguments, *(e.live for e in plan.events)], float)
    timed = plan.time is not None
    at = np.array([0.0, *(1e3 * t for t in plan.time.times)]) if plan.time else np.arange(len(live), dtype=float)
    figure = _new_figure(9.0, 4.2)
    axes, bar = figure.subplots(1, 2, width_ratios=(4, 1))
    scale, unit = _unit(max(m.peak, m0))
    for phase, begin, end in _phases(plan):
        axes.fill_between(at[begin : end + 1], live[begin : end + 1] / scale, step="post", color=_PHASES[phase],
                          alpha=0.35, linewidth=0)  # fmt: skip
        axes.plot(at[begin : end + 1], live[begin : end + 1] / scale, drawstyle="steps-post", color=_PHASES[phase])
    axes.plot([at[m.at + 1]], [m.peak / scale], "o", color=_COLORS[3])
    where = f" at {m.where}" if m.where else ""
    right = at[m.at + 1] > at[-1] / 2
    axes.annotate(f"{size(m.peak)}{where}", (at[m.at + 1], m.peak / scale), (0, 8), textcoords="offset points",
                  ha="right" if right else "left")  # fmt: skip
    if plan.device is not None and plan.device.memory < 2 * m.peak:
        axes.axhline(plan.device.memory / scale, color=_COLORS[3], linestyle="--", label=plan.device.name)
    for phase in dict.fromkeys(phase for phase, *_ in _phases(plan)):
        axes.fill_between([], [], color=_PHASES[phase], alpha=0.6, label=phase)
    axes.set(xlabel="time, ms" if timed else "operations and transfers", ylabel=unit, xlim=(0, at[-1]),
             title=f"memory of rank {plan.rank}, {format_axes(plan.mesh)}")  # fmt: skip
    axes.set_ylim(0, 1.18 * axes.get_ylim()[1])
    axes.legend(loc="upper left", ncols=4)
    _stack(bar, {part: n for part, n in m.parts.items() if n}, scale, unit)
    return figure


def _stack(axes: Any, parts: Mapping[str, int], scale: float, unit: str) -> None:
    """Draw parts on top of each other, each with its name and number at its side."""
    bottom, total, last = 0.0, sum(parts.values()) / scale, -math.inf
    for (part, nbytes), color in zip(parts.items(), itertools.cycle(_COLORS)):
        height = nbytes / scale
        axes.bar([0], [height], bottom=bottom, color=color, width=0.8)
        last = max(bottom + height / 2, last + 0.055 * total)  # labels do not overlap
        axes.text(0.5, last, f"{part} {size(nbytes)}", va="center", color=color)
        bottom += height
    axes.set(xlim=(-0.4, 2.6), title="at the peak")
    axes.set_ylim(0, max(1.02 * total, last + 0.05 * total))
    axes.spines[["bottom", "left"]].set_visible(False)
    axes.set_xticks([])
    axes.set_yticks([])


def _phases(plan: Plan) -> Iterator[tuple[str, int, int]]:
    """Return each phase with the first and the last of its points, where the very first is the begin."""
    phase, phases = "forward", []
    for e in plan.events:
        phase = e.phase if isinstance(e, Operation) else phase
        phases.append(phase)
    for name, row in itertools.groupby(enumerate(phases), lambda point: point[1]):
        points = [i for i, _ in row]
        yield name, points[0], points[-1] + 1


def _memory_of_trace(trace: Trace) -> Figure:
    rows = [t for t in trace.timelines if t.memory]
    if not rows:
        raise fail("plot.memory: the trace has no timeline", fix="on a process mesh, plot the trace of rank 0")
    figure = _new_figure()
    axes = figure.subplots()
    scale, unit = _unit(max(n for t in rows for _, n in t.memory))
    zero = min(t.start for t in rows)
    for t, color in zip(rows, itertools.cycle(_COLORS)):
        points = np.array(t.memory)
        label = t.name if len(rows) <= 2 * _MOST_LINES else None
        axes.plot(1e3 * (points[:, 0] - zero), points[:, 1] / scale, drawstyle="steps-post", color=color, label=label)
    axes.set(
        xlabel="time, ms", ylabel=unit, title=f"memory of {len(rows)} ranks, {format_axes(trace.mesh)}", ylim=(0, None)
    )
    if len(rows) <= 2 * _MOST_LINES:
        axes.legend()
    return figure


def _unit(most: float) -> tuple[float, str]:
    """Return the bytes of a unit in which `most` is at least 1, and its name."""
    at = min(4, int(math.log2(max(1, most))) // 10)
    return 1024.0**at, ("B", "KiB", "MiB", "GiB", "TiB")[at]


# --- time -------------------------------------------------------------------------------------------------------


@checked
@_styled
def roofline(plan: Plan) -> Figure:
    """Draw the operations of a planned step under the roofline of its device.

    A point is the operations of one name and dtype at one line: FLOPs per byte of memory traffic, and the FLOP/s that
    the device reaches with these, as large as their share of the time. The lines are the bandwidth of the memory, and
    the peak of each dtype. Operations without a formula for FLOPs, such as sums, are counted only in the title.

    >>> step = shard_map(lambda x: psum((x @ x.T).sum(), "data"), mesh=mesh, in_specs=(P("data"),), out_specs=P())
    >>> figure = fs.plot.roofline(fs.plan(step, fs.init.zeros((8, 3)), device=fs.devices.H100))

    Source: Williams, Waterman and Patterson, 2009, "Roofline". Raises ShardingError for a plan without a device or
    without FLOPs, and without matplotlib.
    """
    device, time = plan.device, plan.time
    if device is None or time is None:
        raise fail("plot.roofline: the plan names no device", fix="fs.plan(..., device=fs.devices.H100)")
    groups: dict[tuple[str, Any, str], Any] = {}
    begin = others = 0.0
    for e, end in zip(plan.events, time.times, strict=True):
        if isinstance(e, Operation):
            if e.flops and e.bytes and end > begin:
                key = e.name, e.dtype, str(e.where or "")
                groups[key] = groups.get(key, 0.0) + np.array([e.flops, e.bytes, end - begin])
            else:
                others += end - begin
        begin = end
    if not groups:
        raise fail("plot.roofline: no operation of the step has FLOPs", fix="plan a step that multiplies matrices")
    figure = _new_figure(8.0, 4.6)
    axes = figure.subplots()
    rows = sorted(groups.items(), key=lambda row: -row[1][2])
    used = list(dict.fromkeys(dtype for (_, dtype, _), _ in rows))
    ridge = max(device.flops[d] for d in used) / device.bandwidth
    xs = [f / b for _, (f, b, _) in rows]
    low, high = min(*xs, ridge) / 3, max(*xs, ridge) * 3
    for dtype in used:
        knee = device.flops[dtype] / device.bandwidth
        x = np.array([low, knee, high])
        axes.plot(x, np.minimum(device.flops[dtype], x * device.bandwidth), color=_INK, linewidth=1)
        axes.text(high, 1.05 * device.flops[dtype], f"{short_dtype(dtype)} {device.flops[dtype] / 1e12:,.4g} TFLOP/s",
                  ha="right", va="bottom")  # fmt: skip
    for i, ((name, dtype, where), (flops, nbytes, seconds)) in enumerate(rows):
        label = f"{seconds / time.seconds:.0%}  {name} {short_dtype(dtype)}" + (f"  {where}" if where else "")
        color = _COLORS[i] if i < _MOST_LINES else _INK
        axes.scatter([flops / nbytes], [flops / seconds], s=40 + 1500 * seconds / time.seconds, color=color, alpha=0.6,
                     linewidths=0, label=label if i < _MOST_LINES else None)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte of memory traffic", ylabel="FLOP/s", xlim=(low, high),
             title=f"{device.name}, rank {plan.rank} of {format_axes(plan.mesh)}: {duration(time.seconds)}, "
                   f"MFU {time.mfu:.0%}\n{others / time.seconds:.0%} in operations without FLOPs, "
                   f"{sum(time.exposed.values()) / time.seconds:.0%} waiting for transfers")  # fmt: skip
    reached = [flops / seconds for _, (flops, _, seconds) in rows]
    axes.set_ylim(min(reached) / 5, max(device.flops[d] for d in used) * 3)
    for axis, unit in ((axes.xaxis, ""), (axes.yaxis, "T")):
        axis.set_major_locator(import_module("matplotlib.ticker").LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda x, _, unit=unit: f"{x / 1e12 if unit else x:g} {unit}".rstrip())
    axes.minorticks_off()
    legend = axes.legend(loc="lower right", title="share of the time", fontsize=9)
    for handle in legend.legend_handles:
        handle.set_sizes([40])
    axes.grid(which="major")
    return figure


@checked
@_styled
def traffic(plan: Plan) -> Figure:
    """Draw the communication of a planned step and its computation, by the axes of the transfers.

    With a device: seconds, of the operations and, for each set of axes, of the transfers, those that operations hide
    and those that are waited for. Without: the bytes that the rank sends by each kind of transfer, `Transfer.sent`.

    >>> step = shard_map(lambda x: psum((x @ x.T).sum(), "data"), mesh=mesh, in_specs=(P("data"),), out_specs=P())
    >>> figure = fs.plot.traffic(fs.plan(step, fs.init.zeros((8, 3))))

    Raises ShardingError for a plan without a device and without transfers, and without matplotlib.
    """
    title, time, device = f"rank {plan.rank} of {format_axes(plan.mesh)}", plan.time, plan.device
    rows: dict[str, Any] = {}  # the numbers of each row, by their names in the legend
    if time is not None and device is not None:
        rows["operations"] = {"": time.compute}
        for name, seconds in time.transfers.items():
            exposed = time.exposed[name]
            rows[f"over {name}"] = {"behind operations": seconds - exposed, "waited for": exposed}
        totals = [duration(sum(row.values())) for row in rows.values()]
        scale, xlabel, colors = 1e-3, "time, ms", [_COLORS[i] for i in (0, 2, 3)]
        title = f"{title}, {device.name}: {duration(time.seconds)}"
    else:
        for e in plan.events:
            if isinstance(e, Start):
                rows.setdefault(f"over {'+'.join(e.transfer.axes)}", Counter())[e.transfer.op] += e.transfer.sent
        if not rows:
            raise fail("plot.traffic: the planned step has no transfer, and no device to compute times for",
                       fix="fs.plan(..., device=fs.devices.H100)")  # fmt: skip
        totals = [size(sum(row.values())) for row in rows.values()]
        scale, unit = _unit(max(sum(row.values()) for row in rows.values()))
        xlabel, colors = f"sent by the rank in a step, {unit}", list(_COLORS)
    figure = _new_figure(8.0, 1.6 + 0.4 * len(rows))
    axes = figure.subplots()
    left = np.zeros(len(rows))
    for name, color in zip(dict.fromkeys(itertools.chain(*rows.values())), itertools.cycle(colors)):
        at = [y for y, row in enumerate(rows.values()) if name in row]
        widths = np.array([row[name] for row in rows.values() if name in row]) / scale
        axes.barh(at, widths, left=left[at], color=color, label=name)
        left[at] += widths
    for y, total in enumerate(totals):
        axes.text(left[y], y, f" {total}", va="center")
    axes.set(xlabel=xlabel, title=title)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xlim(0, 1.15 * axes.get_xlim()[1])
    axes.invert_yaxis()
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28 if len(rows) > 1 else -0.4), ncols=4)
    return figure


# --- training ---------------------------------------------------------------------------------------------------


@checked
@_styled
def losses(path: StrPath | Mapping[str, StrPath], *, window: int = 50) -> Figure:
    r"""Draw the loss of each step of a run, and its mean over the last `window` steps.

    `path`: a file `metrics.jsonl`, a line of JSON with `step` and `loss` for each step, or a folder that has one; or
    several by name, `{"one device": "a", "fsdp": "b"}`, to compare. A last line that a kill has cut short is left out.

    >>> _ = Path("metrics.jsonl").write_text('{"step": 0, "loss": 2.5}\n{"step": 1, "loss": 2.25}\n')
    >>> figure = fs.plot.losses("metrics.jsonl")

    Raises ShardingError for a file that is not there, has no step or a damaged line, and without matplotlib.
    """
    if window < 1:
        raise must_be("plot.losses: window", "a number of steps, 1 or more", window)
    paths = dict(path) if isinstance(path, Mapping) else {"": path}
    if not paths:
        raise fail("plot.losses: no run is named", fix='fs.plot.losses({"one device": "a", "fsdp": "b"})')
    rows = {name: read_losses(p) for name, p in paths.items()}
    figure = _new_figure()
    axes = figure.subplots()
    for (name, (steps, values)), color in zip(rows.items(), itertools.cycle(_COLORS)):
        n = min(window, len(values))
        mean = np.convolve(values, np.ones(n) / n, "valid")
        axes.plot(steps, values, color=color, alpha=0.35, linewidth=0.8, label=None if name else "each step")
        axes.plot(steps[n - 1 :], mean, color=color, label=name or f"mean of {n} steps")
        if len(values) == 1:
            axes.plot(steps, values, "o", color=color)
    axes.set(xlabel="step", ylabel="loss, nats")
    axes.legend()
    axes.grid()
    return figure


def read_losses(path: StrPath) -> tuple[list[int], list[float]]:
    """Return the steps and the losses in a file `metrics.jsonl`, or in the one of a folder."""
    file = Path(path) / "metrics.jsonl" if Path(path).is_dir() else Path(path)
    with open_file(file, "name the file metrics.jsonl of a run, or its folder", "plot.losses") as f:
        lines = f.read().decode(errors="replace").splitlines(keepends=True)
    steps: list[int] = []
    losses: list[float] = []
    for i, line in enumerate(lines):
        try:
            metrics = json.loads(line)
            loss = metrics["loss"]
            step, loss = int(metrics["step"]), math.nan if loss is None else float(loss)  # JSON has no NaN
        except (ValueError, KeyError, TypeError):
            if i + 1 == len(lines) and not line.endswith("\n"):
                break  # a kill has cut it short
            raise fail(f"plot.losses: {file}: line {i + 1} is not a step with a loss", line.strip()[:80],
                       fix='each line is JSON such as {"step": 0, "loss": 2.5}') from None  # fmt: skip
        steps.append(step)
        losses.append(loss)
    if not steps:
        raise fail(f"plot.losses: {file}: has no step", fix="plot it after the first step of the run")
    return steps, losses
