"""Tables of pipeline schedules: which microbatch each stage computes, in which order. They know nothing of tensors.

Legend: n stages, m microbatches, v chunks of layers in each stage. A microbatch passes n * v places: place
chunk * n + stage. F is a chunk's forward pass; B its backward pass, or in two parts D, the gradient by the chunk's
input, and W, by its weights.
Source: Huang et al., 2019, "GPipe"; Narayanan et al., 2021, "Efficient large-scale language model training" (1F1B,
interleaved); Qi et al., 2023, "Zero bubble pipeline parallelism" (its schedule ZB-H1).
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fshard.errors import checked, fail, number_of

Kind = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
_WIDEST = 108  # characters of a row of a picture


class Operation(NamedTuple):
    """One operation of a stage: F, B, D or W of a microbatch, on a chunk of the stage's layers."""

    kind: Literal["F", "B", "D", "W"]
    microbatch: int
    chunk: int = 0


class Timed(NamedTuple):
    """An operation with the times of its start and of its end."""

    start: float
    end: float
    operation: Operation


@dataclass(frozen=True)
class ScheduleTable:
    """The operations of each stage in order, in `orders`. Its repr draws a row for each stage, a column for each tick.

    Each operation starts as early as its stage and its input allow.
    """

    kind: str
    stages: int
    microbatches: int
    chunks: int
    orders: tuple[tuple[Operation, ...], ...]

    @functools.cached_property
    def ticks(self) -> tuple[tuple[Timed, ...], ...]:
        """The operations of each stage with their times, if F, D and W take 1."""
        return self.times()

    def times(self, f: float = 1, b: float = 1, w: float = 1) -> tuple[tuple[Timed, ...], ...]:
        """Return the operations of each stage with their times, if F takes f, D b, W w, and B their sum b + w."""
        cost = {"F": f, "B": b + w, "D": b, "W": w}
        ends: dict[tuple[str, int, int] | None, float] = {None: 0}
        rows: list[list[Timed]] = [[] for _ in self.orders]
        waiting = True
        while waiting:
            waiting = False
            for stage, (order, row) in enumerate(zip(self.orders, rows, strict=True)):
                for op in order[len(row) :]:
                    before = self._input_of(op, stage)
                    if before not in ends:
                        break
                    start = max(row[-1].end if row else 0, ends[before])
                    row.append(Timed(start, start + cost[op.kind], op))
                    result = "B" if op.kind == "D" else op.kind  # both have the gradient by the chunk's input
                    ends[result, op.microbatch, op.chunk * self.stages + stage] = row[-1].end
                    waiting = True
        assert list(map(len, rows)) == list(map(len, self.orders)), f"{self.kind}: stages wait for each other"
        return tuple(map(tuple, rows))

    def _input_of(self, op: Operation, stage: int) -> tuple[str, int, int] | None:
        """Return the result that an operation needs, as (F, B or W, microbatch, place); None for the batch."""
        place = op.chunk * self.stages + stage
        if op.kind == "F":
            return ("F", op.microbatch, place - 1) if place else None
        if op.kind == "W":
            return "B", op.microbatch, place
        is_last = place == self.stages * self.chunks - 1
        return ("F", op.microbatch, place) if is_last else ("B", op.microbatch, place + 1)

    def bubble(self, f: float = 1, b: float = 1, w: float = 1) -> float:
        """Return the share of the time in which a stage waits: f, b and w are the times of F, D and W of a chunk."""
        total = max(row[-1].end for row in self.times(f, b, w))
        return 1 - (f + b + w) * self.microbatches * self.chunks / total

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The most chunks whose activations each stage keeps at a time: those between their F and their B or W."""
        change = {"F": 1, "B": -1, "D": 0, "W": -1}
        return tuple(max(itertools.accumulate(change[op.kind] for op in order)) for order in self.orders)

    def __repr__(self) -> str:
        has_chunks = self.chunks > 1
        width, ticks = len(str(self.microbatches - 1)) + 1 + has_chunks, int(max(row[-1].end for row in self.ticks))
        most = _WIDEST // (width + 1)
        lines = [f"{self.kind}: {number_of(self.stages, 'stage')}, microbatches 0 to {self.microbatches - 1}"
                 + f", {self.chunks} chunks in each stage" * has_chunks]  # fmt: skip
        for stage, row in enumerate(self.ticks):
            cells = ["."] * ticks
            for start, end, op in row:
                cell = f"{op.kind}{op.microbatch}{chr(ord('a') + op.chunk % 26) * has_chunks}"
                cells[int(start) : int(end)] = [cell] * int(end - start)
            shown = " ".join(f"{cell:<{width}}" for cell in cells[:most]).rstrip()
            lines.append(f"  stage {stage}  {shown}{' ...' * (ticks > most)}")
        unit = "chunks" if has_chunks else "microbatches"
        return "\n".join([*lines, f"  stages wait {100 * self.bubble():.1f}% of the time",
                          f"  {unit} whose activations a stage keeps: {', '.join(map(str, self.in_flight))}"
                          ])  # fmt: skip


@checked
def schedule_table(kind: Kind, n: int, m: int, chunks: int = 1) -> ScheduleTable:
    """Return the order of a pipeline's operations: n stages, m microbatches, `chunks` of layers in each stage.

        kind           bubble, if F, D and W take 1 each     microbatches kept on stage s
        gpipe          3(n-1) / (3m + 3(n-1))                m
        1f1b           3(n-1) / (3m + 3(n-1))                min(m, n-s)
        interleaved    3(n-1) / (3mv + 3(n-1))               ((v-1)n + 2(n-s-1) + 1) / v
        zero_bubble    (n-1) / (3m + n-1)                    n

    These are for m of at least n; in an interleaved schedule a multiple of n. Any m is possible. The table knows
    nothing of tensors; `.bubble(f, b, w)` is the share of waiting for other times, `.in_flight` what each stage keeps,
    `.orders` the operations.

    >>> schedule_table("1f1b", 2, 3)
    1f1b: 2 stages, microbatches 0 to 2
      stage 0  F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
      stage 1  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .
      stages wait 25.0% of the time
      microbatches whose activations a stage keeps: 2, 1

    Raises ShardingError for chunks of a schedule that has none.
    """
    if n < 1 or m < 1 or chunks < 1:
        raise fail(f"schedule_table: n={n}, m={m}, chunks={chunks}", fix="1 or more of each")
    if chunks > 1 and kind not in ("interleaved", "gpipe"):
        raise fail(f"schedule_table: chunks={chunks}, and a stage of {kind!r} has one", fix='"interleaved"')
    return table(kind, n, m, chunks)


@functools.cache
def table(kind: str, n: int, m: int, v: int) -> ScheduleTable:
    """Return the table of a schedule; of the kind "forward", it has only the forward passes."""
    return ScheduleTable(kind, n, m, v, tuple(tuple(_order(kind, n, m, v, stage)) for stage in range(n)))


def _order(kind: str, n: int, m: int, v: int, stage: int) -> list[Operation]:
    """Return some forward passes, then one and one backward pass in turn, then the other backward passes.

    Each chunk computes n microbatches before the next chunk does. Where n does not divide m, the order is the one of
    the next multiple of n, without the microbatches that are not there. A zero bubble is 1F1B with D in the place of B
    and with W `stage` microbatches later: stage s so keeps n - s microbatches before their D, as 1F1B does, and s
    before their W.
    """
    rounds = [range(i, i + n) for i in range(0, m, n)]
    forward = [Operation("F", i, c) for group in rounds for c in range(v) for i in group]
    backward = [Operation("B", i, c) for group in rounds for c in reversed(range(v)) for i in group]
    behind = n - stage - 1
    first = len(forward) if kind in ("gpipe", "forward") else behind if v == 1 else 2 * behind + (v - 1) * n
    order = forward[:first]
    for pair in zip(forward[first:], backward, strict=False):
        order += pair
    order += backward[max(0, len(forward) - first) :] if kind != "forward" else []
    order = [op for op in order if op.microbatch < m]
    if kind != "zero_bubble":
        return order
    parts = [[op] if op.kind == "F" else [op._replace(kind="D"), Operation("W", op.microbatch - stage)] for op in order]
    late = [Operation("W", i) for i in range(max(0, m - stage), m)]
    return [op for op in itertools.chain(*parts, late) if op.microbatch >= 0]
