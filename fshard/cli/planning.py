"""`python -m fshard plan`: memory, transfers and time of a model's train step on many devices, without any of them.

The step is the one of `train_step.py`. Each layout is planned by `fs.plan`: the step runs once, as one rank, on shapes.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, get_args

import torch

from fshard import models, tree
from fshard._core.display import duration
from fshard.errors import ShardingError, fail, number_of, raise_all
from fshard.planning import PlanRow, PlanTable, devices, divisions, plan, plan_table, search
from fshard.schedule.tables import Kind

from .train_step import AXES, Job, read_job, train_step

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_NUMBERS = (*AXES, "accumulate", "chunks", "prefetch", "batch")
_SWITCHES = ("remat", "sequence", "experts", "release")
_SCHEDULES = get_args(Kind)
_CHOICES: dict[str, dict[Any, Any]] = {  # by the texts behind `=`
    **{name: {"yes": True, "no": False, None: True} for name in _SWITCHES},
    "schedule": {kind: kind for kind in _SCHEDULES}, "dtype": DTYPES,
}  # fmt: skip
_SETTINGS = (f"{', '.join(AXES)}: axis sizes; accumulate, chunks, prefetch, batch: numbers; "
             f"{', '.join(_SWITCHES)}: yes or no; schedule: {', '.join(_SCHEDULES)}")  # fmt: skip
_MOST_DEVICES = 1 << 20
_PASSES = 8  # of microbatches through the places of pipelines: as many as a search plans
_MOST_BY_DATA_SHEET = 100  # devices, by tests/benchmarks/published_layouts.csv


def add(commands: Any) -> None:
    """Add `plan` to the commands of a parser."""
    command = commands.add_parser(
        "plan", help="print the memory, transfers and time of a train step on many devices, for layouts side by side",
        description="Plan the train step of a model for each layout: AdamW in float32, weights gathered in bfloat16, "
                    "split over data and context (FSDP, positions) and model (tensor and sequence parallel). Nothing "
                    "is computed or loaded.",
    )  # fmt: skip
    option = command.add_argument
    option("model", metavar="MODEL", help="a Hugging Face folder, or its config, with the suffix .json")
    option("--devices", type=int, metavar="N", help="of all machines (default: by the first layout, or 8)")
    option("--device", metavar="NAME",
           help="of fs.devices: h100, a100, mi300x, tpu-v5p, cpu ..., or the file of `measure`")  # fmt: skip
    option("--efficiency", type=float, metavar="SHARE",
           help="of the peak that products reach (default: the fitted one, or 1: a bound)")  # fmt: skip
    option("--measured", metavar="TOKENS/S[,GiB]",
           help="of your step with the first layout, for each device: all are planned by it")  # fmt: skip
    option("--bus-bandwidth", metavar="RANKS=GB/s",
           help="of an all_reduce over that many ranks, as nccl-tests prints it: 16=362,32=160,512=33")  # fmt: skip
    option("--layout", nargs="+", action="extend", default=[], metavar="AXES",
           help=f"data=64,model=8,remat=yes; {_SETTINGS}; dtype: {', '.join(DTYPES)} (default: data=N)")  # fmt: skip
    option("--search", action="store_true",
           help="find the three fastest layouts that fit; --layout are settings of all")  # fmt: skip
    option("--batch", type=int, metavar="N", help="examples of a step on all devices (default: one for each)")
    option("--seq", type=int, metavar="N", help="tokens of a sequence, or the side of an image (default: the model's "
                                                "longest sequence, at most 8192; 224)")  # fmt: skip
    option("--best", type=int, default=3, metavar="N", help="layouts that a search plans with all blocks (default: 3)")
    option("--headroom", type=float, default=0.1, metavar="SHARE",
           help="of a device's memory that a step must leave (default: 0.1)")  # fmt: skip
    option("--json", action="store_true", help="print the numbers as JSON")
    option("--html", metavar="FILE", help="also write the table as a page")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> str:
    for name in ("devices", "batch", "seq", "best"):
        if (n := getattr(options, name)) is not None and n < 1:
            raise fail(f"plan: --{name} {n}", fix="1 or more")
    if options.html and not Path(options.html).parent.is_dir():  # known before the plans
        raise fail(f"plan: --html {options.html}: there is no folder {Path(options.html).parent}")
    for name in ("search", "bus_bandwidth", "efficiency", "measured"):
        if getattr(options, name) and not options.device:
            lacks = "nothing to compare" if name == "search" else "no time to plan"
            raise fail(f"plan: --{name.replace('_', '-')} without --device: there is {lacks}", fix="--device h100")
    if options.measured and (options.efficiency or options.search):
        raise fail("plan: --measured finds an --efficiency by the first of some layouts, and a search has none",
                   fix="leave out --efficiency and --search; then search with the one that it prints")  # fmt: skip
    device = devices.fitted(devices.of(options.device)) if options.device else None
    if device is not None and options.efficiency:
        device = dataclasses.replace(device, efficiency=options.efficiency, calibrated=False)
    if device is not None and options.bus_bandwidth:
        device = devices.with_bus_bandwidth(device, _rates(options.bus_bandwidth))
    job = read_job(options.model, options.seq)
    given = _layouts(options.layout)
    count = options.devices or (_product(given[0]) if given and not options.search else 8)
    if count > _MOST_DEVICES:
        raise fail(f"plan: --devices {count}", fix=f"at most {_MOST_DEVICES:,}")
    batch = options.batch or count
    is_by_data_sheet = device is not None and not options.bus_bandwidth and not options.device.endswith(".json")
    if is_by_data_sheet and count > _MOST_BY_DATA_SHEET:
        print(f"warning: on more than {_MOST_BY_DATA_SHEET} devices, plans with a data sheet's network put layouts in "
              "the wrong order: measure it, and pass --bus-bandwidth", file=sys.stderr)  # fmt: skip

    def step_of(*, blocks: int | None = None, **layout: Any) -> Any:
        less = job if blocks is None else job.with_blocks(blocks * _places(layout))
        return train_step(less, **{"batch": batch, **layout})

    def blocks_of(**layout: Any) -> tuple[int, int] | None:
        n = _places(layout)
        return None if job.blocks is None or job.blocks % n else (job.blocks // n, 4 if n == 1 else 2)

    def tokens(**layout: Any) -> int:
        return job.units(layout.get("batch", batch))

    if options.search:
        assert device is not None
        settings = given[0] if given else {}
        candidates = list(_candidates(job, device, count, batch, settings))
        if not candidates:
            raise _no_candidate(device, count, batch, settings)
        table = search(step_of, candidates, device=device, tokens=tokens,
                       headroom=options.headroom, best=options.best, blocks=blocks_of, heavier=_heavier,
                       slower=_slower, least=_least, work=_work, neighbours=_neighbours, progress=True)  # fmt: skip
    else:
        layouts, note = _complete(given or [{}], count), ""
        if device is not None and options.measured:
            device, note = _calibrated(options.measured, device, step_of, layouts[0], tokens(**layouts[0]))
        table = plan_table(step_of, layouts, device=device, tokens=tokens, headroom=options.headroom, progress=True)
        table = dataclasses.replace(table, note=note)
    table = dataclasses.replace(table, unit=job.unit)
    if options.html:
        _write(Path(options.html), f"{options.model}: {_facts(job, batch)}", table)
    text = f"{options.model}: {_facts(job, batch)}\n{table!r}"
    if options.json:
        head = {"model": options.model, "batch": batch, "length": job.length, "note": table.note}
        text = json.dumps({**head, "efficiency": device and device.efficiency, **table.as_dict()}, indent=2)
    if table.interrupted:
        print(text, flush=True)
        raise KeyboardInterrupt  # the exit status is 130
    return text


def _rates(text: str) -> dict[int, float]:
    """Parse `16=362,32=160`, in GB/s: bytes/s by ranks. Raises ShardingError for the first part that is none."""
    rates: dict[int, float] = {}
    for part in text.split(","):
        ranks, _, rate = part.strip().partition("=")
        try:
            rates[int(ranks)] = float(rate) * 1e9
        except ValueError as e:
            raise fail(f"plan: --bus-bandwidth {text}: {part.strip()!r} is not RANKS=GB/s",
                       fix="--bus-bandwidth 16=362,32=160,512=33") from e  # fmt: skip
    return rates


def _calibrated(
    text: str, device: devices.Device, step_of: Any, layout: dict[str, Any], units: int
) -> tuple[devices.Device, str]:  # fmt: skip
    """Return the device on which a layout is as fast as measured, `5762,58.4GiB`, and lines on what was found."""
    match = re.fullmatch(r"(\d+\.?\d*)(?:, ?(\d+\.?\d*) ?GiB)?", text)
    rate, gib = (float(x or 0) for x in match.groups()) if match else (0.0, 0.0)
    if not rate:
        raise fail(f"plan: --measured {text}: not a rate of one device, nor one with GiB",
                   fix="--measured 5762 or --measured 5762,58.4GiB")  # fmt: skip
    f, args = step_of(**layout)
    planned = plan(f, *args, device=device)
    step = f"{units:,} / ({rate:,g} x {number_of(f.mesh.size, 'device')}) = {duration(units / rate / f.mesh.size)}"
    print(f"measured: {step} a step", file=sys.stderr)  # before an error
    device = devices.calibrated(planned, units / rate / f.mesh.size)
    found, peak = f"efficiency {device.efficiency:.4f}", planned.memory.peak / 2**30
    note = f"{found}, by the first layout's {step}; again: --{found}"
    more = f"\npeak of the first layout: planned {peak:.1f} GiB, measured {gib:g} GiB: {peak / (gib or 1) - 1:+.1%}"
    return device, note + more * (gib > 0)


def _facts(job: Job, batch: int) -> str:
    """Return the model and the step in a line."""
    n = sum(x.numel() for x in tree.leaves(job.model.init(job.cfg)))
    each = f"images of {job.length} x {job.length}" if job.unit == "images" else f"sequences of {job.length:,} tokens"
    return f"{job.source}, {n:,} parameters; {batch:,} {each} a step, AdamW"


def _write(path: Path, title: str, table: PlanTable) -> None:
    page = f"<!doctype html><meta charset='utf-8'><title>{escape(title)}</title><h3>{escape(title)}</h3>"
    try:
        path.write_text(page + table._repr_html_())
    except OSError as e:
        raise fail(f"plan: --html {path}: {e.strerror}") from e


# --- layouts --------------------------------------------------------------------------------------------------


def _product(layout: dict[str, Any]) -> int:
    return math.prod(layout.get(axis, 1) for axis in AXES)


def _layouts(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Parse `data=64,model=8,remat=yes`. Raises ShardingError listing every part that is not a setting."""
    layouts, errors = [], []
    for text in texts:
        layout: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, value = part.strip().partition("=")
            known = _CHOICES.get(name, {}).get(value if equals else None)
            if name in _NUMBERS and value.isdecimal() and len(value) < 10 and int(value) >= (name != "prefetch"):
                known = int(value)
            if known is None or name in layout:
                twice = "it has a value already" if name in layout else _SETTINGS
                errors.append(fail(f"plan: --layout {text}: {part.strip()!r} is not a setting", twice,
                                   fix="--layout data=64,model=8,remat=yes"))  # fmt: skip
            layout[name] = known
        layouts.append(layout)
    raise_all(errors)
    return layouts


def _complete(layouts: Sequence[dict[str, Any]], devices: int) -> list[dict[str, Any]]:
    """Give `data` the devices that the other axes leave. Raises ShardingError listing layouts of other numbers."""
    errors, out = [], []
    for layout in layouts:
        n = _product(layout)
        if "data" not in layout and devices % n == 0:
            layout = {"data": devices // n, **layout}
        elif n != devices:
            sizes = " x ".join(str(layout[axis]) for axis in AXES if axis in layout)
            errors.append(fail(f"plan: a layout of {n} devices, and there are {devices}", f"{sizes} = {n}",
                               fix="leave out data, or --devices"))  # fmt: skip
        out.append(layout)
    raise_all(errors)
    return out


def _candidates(
    job: Job, device: devices.Device, count: int, batch: int, settings: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the layouts of a search: axis sizes, experts, remat, microbatches.

    The model is split at most over the nearest links of the device, and each data rank has equally many examples.
    Positions are split only where each data rank has one example: to split examples sends less. Stages have equally
    many blocks, in every schedule; such layouts are last, since others bound them. `settings` are fixed.
    One microbatch is first, which is the fastest if it fits, and shows if many can fit; then the most of them: if they
    do not fit, fewer do not either.
    """
    batch, nearest = settings.get("batch", batch), _nearest(device, count)
    fixed = {axis: settings[axis] for axis in AXES if axis in settings}
    longest, widest = count if job.splits_positions else 1, min(count, nearest) if job.splits_weights else 1
    deepest = min(count, job.blocks or 1) if job.splits_blocks and "stage" not in settings else 1
    given: dict[str, int] = {axis: settings[axis] for axis in AXES[:2] if axis in settings}
    most = {"data": count, "stage": deepest, "context": longest, "model": widest}
    for sizes in sorted(divisions(count // math.prod(given.values()), **most), key=lambda sizes: sizes["stage"]):
        sizes = {**sizes, **given}
        if any(sizes[axis] != n for axis, n in fixed.items()):
            continue
        rows, rest = divmod(batch, sizes["data"] * sizes.get("replica", 1))
        ranks = sizes["data"] * sizes["context"]
        if rest or not rows or (sizes["context"] > 1 < rows and "context" not in settings):
            continue
        sizes = {name: n for name, n in sizes.items() if name not in ("context", "stage") or n > 1 or name in given}
        choices: dict[str, list[Any]] = {
            "experts": [False, True] if 1 < ranks <= job.experts else [False],
            "remat": [True, False],
            "accumulate": [n for n in (1, 8, 4, 2) if rows % n == 0 and (n == 1 or job.model is not models.resnet)],
            "schedule": [{}],
        }
        if (stage := sizes.get("stage", 1)) > 1:  # more microbatches wait less
            choices["accumulate"] = [n for n in (4 * stage, 2 * stage, stage) if rows % n == 0]
            kinds = ["interleaved"] if "chunks" in settings else ["1f1b", "zero_bubble", "interleaved"]
            kinds = [settings["schedule"]] if "schedule" in settings else kinds
            choices["schedule"] = [{"schedule": kind, "chunks": 1 + (kind == "interleaved")} for kind in kinds]
            if "stage" not in settings:
                shared = [x for x in choices["schedule"] if not (job.blocks or 1) % (stage * x["chunks"])]
                kept = [{"release": False}, {}] if sizes["data"] > 1 and "release" not in settings else [{}]
                choices["schedule"] = [{**x, **more} for x in shared for more in kept]
        choices |= {name: [value] for name, value in settings.items() if name in choices and name != "schedule"}
        for experts, remat, accumulate, schedule in itertools.product(*choices.values()):
            more = {**({"experts": experts} if job.experts else {}), **schedule}
            yield {**sizes, **more, "remat": remat, "accumulate": accumulate, **settings}


def _nearest(device: devices.Device, count: int) -> int:
    return next((link.ranks for link in device.links if link.ranks), count)


def _no_candidate(device: devices.Device, count: int, batch: int, settings: dict[str, Any]) -> ShardingError:
    """Return the error of a search without a candidate."""
    n, batch = _product(settings), settings.get("batch", batch)
    fixed = " x ".join(f"{axis}={settings[axis]}" for axis in AXES if axis in settings)
    head = f"plan: there is no layout to search for {count} devices"
    if count % n:
        more = n * (count // n + 1)
        return fail(head, f"--layout fixes {fixed}: {count} % {n} = {count % n}", fix=f"--devices {more}")
    if "data" in settings and "model" in settings and n != count:
        return fail(head, f"--layout fixes {fixed}: {n} devices", fix=f"--devices {n}, or leave out data")
    if settings.get("model", 1) > (most := _nearest(device, count)):
        return fail(head, f"model={settings['model']}: a search splits the model over the nearest links, which on "
                    f"{device.name} join {most}", fix="--layout without --search")  # fmt: skip
    return fail(head, f"each data rank has as many examples as the others, and the model is split over at most {most}: "
                f"no number of data ranks divides a batch of {batch}", fix=f"--batch {count}")  # fmt: skip


def _heavier(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Return the share of the memory of `b` that `a` needs at least, by its settings.

    Of n times as many microbatches each needs 1/n of the memory that grows with the batch, and all of the rest. Several
    microbatches need a second copy of the gradients, and so one of them may need less than two.
    """
    same = all(a.get(name, 1) == b.get(name, 1) for name in ("context", "model", "stage", "schedule", "chunks"))
    same = same and a.get("experts", False) == b.get("experts", False)
    split = a.get("replica", 1) >= b.get("replica", 1)
    kept = a["remat"] <= b["remat"] and a.get("release", True) <= b.get("release", True)
    if not (same and split and kept) or a["accumulate"] == 1 < b["accumulate"]:
        return 0.0
    return min(1.0, b["accumulate"] / a["accumulate"])  # type: ignore[no-any-return]


def _slower(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether `a` is `b` with more microbatches: it has the same operations in parts, and more transfers.

    On stages, more microbatches wait less; there `a` is `b` that gathers weights in each of them, and not once.
    """
    if a.get("stage", 1) > 1:
        return "release" not in a and {**a, "release": False} == b
    return bool(a["accumulate"] > b["accumulate"] and {**a, "accumulate": 0} == {**b, "accumulate": 0})


def _least(a: dict[str, Any], row: PlanRow) -> tuple[float, float]:
    """Return the bytes and seconds that a layout needs at least, by a row without stages; 0 if nothing is known.

    `a` has stages, or more copies of weights. A device then computes as much, in the same operations or smaller ones,
    and waits for the same transfers over `model`. It copies less: up to a twentieth of the time, without stages a
    hundredth. Of n stages, with m >= n microbatches and v chunks, each waits for others for (n - 1) / (m v) of that;
    with a zero bubble for F + D - W of F + D + W, at least 1/3, or 1/2 where D recomputes F. The first stage keeps n
    microbatches, of an n-th of the blocks.
    """
    b, n = row.layout, a.get("stage", 1)
    same = all(a.get(name, 1) == b.get(name, 1) for name in ("context", "model", "experts"))
    copies = [(x.get("replica", 1), not x.get("release", True)) for x in (a, b)]
    less = all(x >= y for x, y in zip(*copies, strict=True)) and (n > 1 or copies[0] != copies[1])
    rows, of = (x["data"] * x.get("replica", 1) * x["accumulate"] for x in (b, a))  # a microbatch has 1 / rows
    if b.get("stage", 1) > 1 or not (same and less and rows <= of):
        return 0, 0.0
    if not row.busy:  # arguments that do not fit, here neither
        return row.peak or 0, 0.0
    waits = (n - 1) / (a["accumulate"] * a.get("chunks", 1))
    waits *= 1 if a.get("schedule") != "zero_bubble" else 1 / 2 if a["remat"] else 1 / 3
    seconds = (0.99 if n == 1 else 0.95) * (row.busy["operations"] + row.busy.get("model", 0.0)) * (1 + waits)
    return row.grown * rows / of * (a["remat"] <= b["remat"]), seconds * (a["remat"] >= b["remat"])


def _places(layout: dict[str, Any]) -> int:
    """Return the number of places with equally many blocks: the chunks of all stages."""
    return layout.get("stage", 1) * layout.get("chunks", 1)  # type: ignore[no-any-return]


def _work(**layout: Any) -> float:
    """Return the share of a search that the plan of a pipeline takes, by its passes."""
    return _places(layout) * layout["accumulate"] / _PASSES if layout.get("stage", 1) > 1 else 0.0


def _neighbours(**layout: Any) -> list[dict[str, Any]]:
    """Return the layouts that need more memory and fewer transfers: weights are kept, or are replicated over groups."""
    out = [] if "release" in layout or layout["data"] == 1 else [{**layout, "release": False}]
    if "replica" not in layout:
        out += [{**layout, "data": layout["data"] // n, "replica": n} for n in (2, 8) if layout["data"] % n == 0]
    return out
