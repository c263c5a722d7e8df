"""Warnings of a plan: the texts of `Plan.warnings`, and how each mesh axis is used.

A warning begins with its subject:

    FLOPs unknown        an operation that may compute much has no formula: its time is the time of its bytes
    workspace unknown    a kernel allocates memory by an algorithm that it chooses (`workspace.py`): the peak lacks it
    seconds              they are a bound: the device's efficiency is 1
    leaf                 an axis that splits other leaves of the argument leaves this one full, or its parts differ
    ring                 a collective over more than 1,024 ranks is timed as a ring, which has a latency for each rank
    experts              rows are sent to experts as if all had equally many
    attention            it is planned as a fused kernel; without this line, as products and a softmax, if there is any
    error bars           of the published steps with the kinds of parallelism of this one, all of language models
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
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

_LONG = 8192  # tokens of a sequence
_OF_BYTES = 0.03  # by `tests.benchmarks.plan_accuracy`

_Bar = tuple[float, int] | None  # what 9 in 10 published steps are within, or all of fewer than 10; and their number
# Of tokens/s, of calibrated tokens/s, and of bytes, by `python -m tests.benchmarks.trust`; a test compares them.
_ERRORS: dict[str, tuple[str, _Bar, _Bar, float]] = {
    "one device": ("on one device", (0.04, 1), None, _OF_BYTES),
    "data": ("with data parallelism", (0.08, 1), None, _OF_BYTES),
    "FSDP": ("with FSDP", (0.28, 80), (0.15, 75), 0.07),
    "long FSDP": (f"with FSDP on more than {_LONG:,} tokens", (0.09, 26), (0.04, 26), _OF_BYTES),
    "tensor": ("with tensor parallelism", (0.21, 34), (0.21, 34), 0.08),
    "pipeline": ("with pipelines", (0.18, 15), (0.23, 15), 0.23),
    "context": ("with context parallelism", None, None, _OF_BYTES), "experts": ("with experts", None, None, _OF_BYTES),
}  # fmt: skip


class Splits(NamedTuple):
    """Kinds of splitting by each mesh axis: FSDP, tensor, data, context, experts, pipeline; and warnings of leaves.

    `kinds` are by axis: {"data": "FSDP", "model": "tensor"}. `longest`: the last dim of the longest batch of tokens.
    """

    kinds: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    longest: int = 0


NO_SPLITS = Splits({})


def warnings_of(
    unknown: Mapping[str, int], events: Sequence[Event], device: Device | None, splits: Splits
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
    texts += splits.warnings
    if device is not None and not device.is_bound:
        has_workspaces = any(text.startswith("workspace") for text in unknown)
        if device.attention is not None and any(isinstance(e, Operation) and e.kind == "attention" for e in events):
            texts.append(f"attention: a fused kernel, at {device.attention:.0%} of the peak")
        texts.append(_error_bars(splits, device, has_workspaces))
    return tuple(texts)


def _error_bars(splits: Splits, device: Device, has_workspaces: bool) -> str:
    """Return a line with the largest error bars of the kinds of parallelism: HSDP is FSDP; on a CPU `plan_accuracy`."""
    kinds = {*splits.kinds.values()} or {"one device"}
    kinds -= {"data"} if kinds & {"FSDP", "tensor", "pipeline"} else set()
    kinds = {"long FSDP" if kind == "FSDP" and splits.longest > _LONG else kind for kind in kinds}
    errors = [bars for kind, bars in _ERRORS.items() if kind in kinds and device.queued]
    speeds = [(name, measured if device.calibrated else blind) for name, blind, measured, _ in errors]
    unknown = " and ".join(name for name, bar in speeds if bar is None)
    unknown = unknown if device.queued else "with published steps on CPUs"
    known = [(f"{bar[1]} {name}", *bar) for name, bar in speeds if bar is not None]
    of_speed = f"not compared {unknown}" if unknown else f"within {max(share for _, share, _ in known):.0%}"
    of_bytes = max([share for *_, share in errors], default=_OF_BYTES)
    which = f"{'9 of 10' if max([n for *_, n in known], default=0) >= 10 else 'all'} published steps of language models"
    steps = f", in {which} on GPUs ({', '.join(text for text, *_ in known)})" if known else ""
    head = "error bars, calibrated by one step" if device.calibrated else "error bars"
    missing = ", without unknown workspaces" if has_workspaces else ""
    return f"{head}: speed {of_speed}, bytes within {of_bytes:.0%} of the measured{steps}{missing}"


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
    lengths = [x.shape[-1] for _, x, _ in leaves if len(x.shape) > 1 and x.dtype == torch.int64]
    return Splits(kinds, tuple(found), max(lengths, default=0))


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
