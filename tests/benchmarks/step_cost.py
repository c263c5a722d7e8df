"""The memory and the transfers of one step: each allocation of torch's CPU allocator, and each operation of gloo.

Both are read from `torch.profiler`, below dispatch modes, reducers and compilers, so alike for torch and fshard.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

_STEP = "the measured step"
_ITEMSIZE = {
    "float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "int": 4, "short int": 2,
    "signed char": 1, "unsigned char": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True)
class StepCost:
    """Bytes live in tensors at the start of a step, at its peak and at its end; and its transfers.

    A transfer is (its name, the bytes of its argument): each operation of gloo, without the `recv` that matches the
    `send` of another rank.
    """

    start: int
    peak: int
    end: int
    transfers: list[tuple[str, int]]

    def sent(self, ranks: int) -> int:
        """The least bytes that a rank must send for these transfers."""
        return sum(round(nbytes * _share(op, ranks)) for op, nbytes in self.transfers)


def _share(op: str, n: int) -> float:
    shares = {"all_reduce": 2 * (n - 1) / n, "all_gather": n - 1, "all_to_all": (n - 1) / n, "send": 1, "broadcast": 1,
              "reduce_scatter": (n - 1) / n}  # fmt: skip
    return shares[op]


def counting(step: Callable[[int], object]) -> Callable[[], object]:
    """Return the function that calls a step with its number."""
    numbers = itertools.count()
    return lambda: step(next(numbers))


def measure_step(setup: Callable[[], Callable[[], object]], *, warmup: int = 2) -> StepCost:
    """Measure a call of the step that `setup` returns, after `warmup` calls.

    `setup` must allocate everything the step uses: earlier allocations are not counted.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiler:
        step = setup()
        for _ in range(warmup):
            step()
        gc.collect()
        with record_function(_STEP):
            step()
    result = profiler.profiler.kineto_results  # type: ignore[union-attr]
    nodes = list(_descendants(result.experimental_event_tree()))
    mark = next(n for n in nodes if n.name == _STEP)
    begin, end = mark.start_time_ns, mark.end_time_ns

    live: dict[int, int] = {}
    total = start = peak = 0
    allocations = sorted((n.start_time_ns, n.extra_fields.ptr, n.extra_fields.alloc_size) for n in nodes
                   if n.typed[0].name == "Allocation" and n.extra_fields.device.type == "cpu")  # fmt: skip
    for when, address, size in allocations:
        if when > end:
            break
        # A thread that is not profiled may free a block; a new allocation at the same address shows it.
        total -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            total += size
        if when < begin:
            start = total
        peak = max(peak, total) if when >= begin else total
    moved = [(e.name().removeprefix("gloo:"), _bytes(e)) for e in result.events()
             if e.name().startswith("gloo:") and begin <= e.start_ns() <= end]  # fmt: skip
    moved = [(op, n) for op, n in moved if op not in ("recv", "barrier")]
    return StepCost(start, peak, total, moved)


def _descendants(nodes: list[Any]) -> Iterator[Any]:
    stack = list(nodes)
    while stack:
        node = stack.pop()
        yield node
        stack += node.children


def _bytes(event: Any) -> int:
    return sum(math.prod(s) * _ITEMSIZE[d] for s, d in zip(event.shapes(), event.dtypes(), strict=True) if d)
