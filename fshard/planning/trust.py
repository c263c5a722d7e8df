"""Warnings of a plan: the texts of `Plan.warnings`, and how each mesh axis is used.

A warning begins with its subject:

    FLOPs unknown        an operation that may compute much has no formula: its time is the time of its bytes
    workspace unknown    a kernel allocates memory by an algorithm that it chooses (`workspace.py`): the peak lacks it
    seconds              they are a bound: the device's efficiency is 1
    leaf                 an axis that splits other leaves of the argument leaves this one full, or its parts differ
    ring                 a collective over more than 1,024 ranks is timed as a ring, which has a latency for each rank
    experts              rows are sent to experts as if all had equally many
    error bars           of the published steps with the kinds of parallelism of this one, all of language models
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fshard import tree
from fshard.errors import number_of
from fshard.init import Deferred
from fshard.sharded import Sharded
from fshard.spec import P, box_shape, is_spec, local_box, size

from .device import Device
from .events import Event, Operation, Start

_LONGEST_RING = 1024
_LEAST = 2**20  # bytes of a leaf on a rank that are worth a line
_BOUND = "seconds are a lower bound: the efficiency is 1 (devices.fitted, --efficiency, or devices.measure)"
_BALANCED = "experts are assumed balanced: the one with the most rows needs more memory and time"

_OF_BYTES = 0.03  # by `tests.benchmarks.plan_accuracy`


class _Bars(NamedTuple):
    """Error bars of tokens/s, by published steps: of plans by fitted rates, of calibrated ones; and of bytes."""

    blind: tuple[float, int] | None  # what 9 in 10 are within, or all if fewer than 10; and how many there are
    calibrated: tuple[float, int] | None
    of_bytes: float = _OF_BYTES


_NONE = _Bars(None, None)
# By kind, from `python -m tests.benchmarks.trust`; a test compares them.
_ERRORS = {
    "FSDP": _Bars((0.36, 57), (0.15, 52), 0.43), "tensor": _Bars((0.21, 34), (0.21, 34), 0.08),
    "pipeline": _Bars((0.18, 15), (0.23, 15), 0.23), "data": _NONE, "context": _NONE, "experts": _NONE,
}  # fmt: skip
_NAMES = {"FSDP": "FSDP", "tensor": "tensor parallelism", "pipeline": "pipelines", "data": "data parallelism",
          "context": "context parallelism", "experts": "experts"}  # fmt: skip


class Splits(NamedTuple):
    """Kinds of splitting by each mesh axis: FSDP, tensor, data, context, experts, pipeline; and warnings of leaves.

    `kinds` are by axis: {"data": "FSDP", "model": "tensor"}.
    """

    kinds: Mapping[str, str]
    warnings: tuple[str, ...] = ()


NO_SPLITS = Splits({})


def warnings_of(
    unknown: Mapping[str, int], events: Iterable[Event], device: Device | None, splits: Splits
) -> tuple[str, ...]:  # fmt: skip
    """Return the warnings of a plan, by `unknown_operations` of its events and the device of its times."""
    texts = [f"{text}, {number_of(n, 'call')}" for text, n in unknown.items()]
    texts += [_BOUND] * (device is not None and device.is_bound)
    found = {(e.transfer.op, e.transfer.axes, e.transfer.ranks) for e in events if isinstance(e, Start)}
    for op, axes, ranks in sorted(found) if device is not None else ():
        if ranks > _LONGEST_RING and op.startswith(("all_reduce", "all_gather", "reduce_scatter")):
            over = f"{op} over {'+'.join(axes)}"
            texts.append(f"ring of {ranks:,} ranks: {over} waits for a step of each, where libraries use trees")
    texts += [_BALANCED] * ("experts" in splits.kinds.values())
    if device is not None and not device.is_bound and splits.kinds:
        has_workspaces = any(text.startswith("workspace") for text in unknown)
        return (*texts, *splits.warnings, _error_bars({*splits.kinds.values()}, device, has_workspaces))
    return (*texts, *splits.warnings)


def _error_bars(kinds: set[str], device: Device, has_workspaces: bool) -> str:
    """Return a line with the largest error bars of the kinds of parallelism; on a CPU, of `plan_accuracy`."""
    errors = {kind: bars for kind, bars in _ERRORS.items() if kind in kinds and device.queued}
    speeds = {_NAMES[kind]: bars.calibrated if device.calibrated else bars.blind for kind, bars in errors.items()}
    known = {name: bar for name, bar in speeds.items() if bar is not None}
    of_speed = f"within {max((share for share, _ in known.values()), default=0):.0%}"
    if unknown := " and ".join(name for name in speeds if name not in known):
        of_speed = f"not compared for {unknown}"
    elif not errors:
        of_speed = "not compared with published steps on CPUs"
    of_bytes = max((bars.of_bytes for bars in errors.values()), default=_OF_BYTES)
    steps = ", ".join(f"{n} with {name}" for name, (_, n) in known.items())
    steps = f", in 9 of 10 published steps of language models on GPUs ({steps})" if steps else ""
    which = ", calibrated by one step" if device.calibrated else ""
    missing = ", without unknown workspaces" if has_workspaces else ""
    return f"error bars{which}: speed {of_speed}, bytes within {of_bytes:.0%} of the measured{steps}{missing}"


def unknown_operations(events: Iterable[Event]) -> Counter[str]:
    """Return how often each operation with unknown FLOPs runs, by its name and line, or with an unknown workspace."""
    found: Counter[str] = Counter()
    for e in events:
        if isinstance(e, Operation) and e.flops is None:
            found[f"FLOPs unknown: {e.name} at {e.where!r}" if e.where else f"FLOPs unknown: {e.name}"] += 1
        elif isinstance(e, Operation) and e.workspace is None:
            found[f"workspace unknown: {e.name}"] += 1
    return found


def placed_leaves(leaves: Any, specs: Any) -> list[tuple[tree.Path, Any, P]]:
    """Return (path, leaf, spec) of the tensors of a tree; `specs` may be a prefix.

    Without a spec, a placed leaf has the spec of its placement, and another leaf is full on every rank.
    """
    flat = tree.broadcast(specs, leaves, name="specs", leaf=lambda s: s is None or is_spec(s))
    return [(path, x, x.spec if spec is None and isinstance(x, Sharded) else spec or P())
            for (path, x), spec in zip(tree.leaves_with_path(leaves), flat, strict=True)
            if isinstance(x, (Deferred, Sharded, Tensor))]  # fmt: skip


def splits_of(
    leaves: Sequence[tuple[tree.Path, Any, P]], axes: Mapping[str, int], parameters: set[tree.Path],
    events: Sequence[Event], stages: Sequence[str],
) -> Splits:  # fmt: skip
    """Return how the axes split `placed_leaves` of the arguments, and warnings of the leaf that each splits worst."""
    by_rows = {
        a for e in events if isinstance(e, Start) and e.transfer.op == "all_to_all_rows" for a in e.transfer.axes
    }
    kinds: dict[str, str] = {}
    found: list[str] = []
    for axis in [a for a, n in axes.items() if n > 1]:
        split = [(path, axis in spec.parts(len(x.shape))[0]) for path, x, spec in leaves if axis in spec.axes]
        of_weights = any(path in parameters for path, _ in split)
        of_batch = [is_first for path, is_first in split if not any(path[0] == p[0] for p in parameters)]
        kinds[axis] = ("pipeline" if axis in stages else "experts" if axis in by_rows else
                       "context" if of_batch and not any(of_batch) else "FSDP" if of_batch and of_weights else
                       "tensor" if of_weights else "data")  # fmt: skip
        found += _worst_leaf(leaves, {path[0] for path, _ in split}, axis, axes)
    return Splits(kinds, tuple(found))


def _worst_leaf(
    leaves: Sequence[tuple[tree.Path, Any, P]], splitting: set[Any], axis: str, axes: Mapping[str, int]
) -> Iterator[str]:  # fmt: skip
    """Yield a warning of the leaf that loses most by an axis, if that is 1 MiB or more on a rank.

    A leaf loses the bytes that its longest part has more than an even one. One that is full loses all other parts,
    if the axis splits other leaves of its argument, at the indices `splitting`.
    """
    most, found = _LEAST - 1, ""
    first = dict.fromkeys(axes, 0)
    for path, x, spec in leaves:
        if path[0] not in splitting or spec.lengths or not x.dtype.is_floating_point:
            continue
        part = math.prod(box_shape(local_box(tuple(x.shape), spec, axes, first)))
        even = math.prod(x.shape) / math.prod(axes[a] for a in spec.axes)
        lost = round((part - even if axis in spec.axes else part * (1 - 1 / axes[axis])) * x.dtype.itemsize)
        if lost > most:
            how = "parts differ in size" if axis in spec.axes else "full on each rank"
            more = f"{size(lost)} more than in even parts"
            most, found = lost, f"leaf {tree.dotted(path[1:])} {list(x.shape)}: {how} over {axis}={axes[axis]}, {more}"
    yield from [found] if found else []
