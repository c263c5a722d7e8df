"""The plan of a model of many equal blocks from plans of a few: each block adds the same events once more.

Of two plans, of k and of k + 1 blocks, the second has the events of the first with some of them repeated:

    k = 3       begin  F F F  loss  B B B  end
    k + 1 = 4   begin  F F F F  loss  B B B B  end

With each block of the model the numbers of an event, such as the bytes in use after it, grow by a fixed amount, and
from one copy of an event to the next by another one. So the numbers for any number of blocks follow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .events import Event, Operation, Start, Wait
from .memory import Memory, Tensors, parts_and_largest, tensors_at
from .plan import Plan, line_of, plan_of, plan_together

_Label = tuple[int, Any]  # of an event, and its work


class _Place(NamedTuple):
    """Event `few` of the smaller plan and `more` of the larger; or its copy number `copy`, whose first is `first`."""

    few: int
    more: int
    first: int
    copy: int = 0


@dataclass(frozen=True)
class Repeats:
    """Plans of one rank for `blocks` and for one block more; the second repeats events of the first.

    `added`: (i, n) for each run of events that the second has more: once more the n events before event i of the first.
    `positions`: of a pipeline, the repeats of each stage; each of its places has `blocks` blocks, and then one more.
    """

    blocks: int
    few: Plan
    more: Plan
    added: tuple[tuple[int, int], ...]
    positions: tuple[Repeats, ...] = ()

    @staticmethod
    def of(blocks: int, few: Plan, more: Plan) -> Repeats | None:
        """Find the repeated events; None if the second plan has others, or host memory, which has another peak."""
        if few.memory.host:
            return None
        if more.positions:
            found = [Repeats.of(blocks, a, b) for a, b in zip(few.positions, more.positions, strict=True)]
            each = tuple(r for r in found if r is not None)
            same = next(p for p in few.positions if p.rank == more.rank)
            few = replace(same, branches_on=few.branches_on, positions=few.positions)
            return Repeats(blocks, few, more, (), each) if len(each) == len(found) else None
        numbers: dict[Any, int] = {}
        a, b = ([(numbers.setdefault(label, len(numbers)), work) for label, work in map(_label, p.events)]
                for p in (few, more))  # fmt: skip
        added = _added(a, b, 0, 0)
        return None if added is None else Repeats(blocks, few, more, tuple(added))

    def peak(self, blocks: int) -> int:
        """Return the peak with `blocks` blocks."""
        if self.positions:
            return max(r.peak(blocks) for r in self.positions)
        extra = blocks - self.blocks
        few, more = ([e.live for e in p.events] for p in (self.few, self.more))
        return max(
            _extended((few[at.few], more[at.more], more[at.first]), extra, at.copy) for at in self._places(extra)
        )

    def plan(self, blocks: int) -> Plan:
        """Return the plan with `blocks` blocks."""
        if self.positions:
            return plan_together([r.plan(blocks) for r in self.positions], self.more.branches_on)
        few, more, extra = self.few, self.more, blocks - self.blocks
        places = list(self._places(extra))
        events: list[Event] = []
        rows = [[_numbers(e) for e in p.events] for p in (few, more)]
        for at in places:
            numbers = zip(rows[0][at.few], rows[1][at.more], rows[1][at.first], strict=True)
            events.append(_with(more.events[at.more], [_extended(n, extra, at.copy) for n in numbers]))
        peak = max(range(len(events)), key=lambda i: events[i].live)
        at = places[peak]
        held = [tensors_at(few.memory.storages, at.few), *(tensors_at(more.memory.storages, i) for i in at[1:3])]
        tensors: Tensors = Counter()
        for x in dict.fromkeys(x for tensors in held for x in tensors):
            tensors[x] = _extended((n[x] for n in held), extra, at.copy)
        arguments = [p.memory.arguments for p in (few, more)]
        parts, largest = parts_and_largest(tensors)
        memory = Memory(events[peak].live, peak, line_of(events[peak]), parts,
                        _extended((*arguments, 0), extra, 0), largest=largest)  # fmt: skip
        return plan_together([plan_of(more.mesh, more.rank, events, memory, more.device, more.splits)], ())

    def _places(self, extra: int) -> Iterator[_Place]:
        """Yield the events of the plan with `extra` blocks more than the smaller one."""
        few = more = 0
        for end, n in (*self.added, (len(self.few.events), 0)):
            yield from (_Place(i, more + i - few, more + i - few) for i in range(few, end))
            few, more = end, more + end - few
            yield from (_Place(few - n + i, more - n + i, more + i, copy + 1)
                        for copy in range(extra if n else 0) for i in range(n))  # fmt: skip
            more += n


def _extended(numbers: Iterable[int], extra: int, copy: int) -> int:
    """Extend the numbers of a `_Place` along a line: by blocks of the model, and by copies of the event."""
    few, more, first = numbers
    return few + extra * (more - few) + copy * (first - more)


def _added(few: Sequence[_Label], more: Sequence[_Label], i: int, j: int) -> list[tuple[int, int]] | None:
    """Return the runs that `more` has beyond `few`, from events i and j on; None if they are not repetitions.

    Where neither event is repeated, the work may differ: an operation on all blocks, such as an optimizer's, grows.
    """
    begin = i
    while i < len(few) or j < len(more):
        if i < len(few) and j < len(more) and few[i] == more[j]:
            i, j = i + 1, j + 1
            continue
        left = len(more) - j - (len(few) - i)
        for n in range(min(left, i - begin), 0, -1):  # the longest first: a run may repeat within itself
            if more[j] == more[j - n] and more[j : j + n] == more[j - n : j]:
                rest = _added(few, more, i, j + n)
                if rest is not None:
                    return [(i, n), *rest]
        if i == len(few) or j == len(more) or few[i][0] != more[j][0]:
            return None
        i, j = i + 1, j + 1
    return []


def _label(e: Event) -> tuple[Event, tuple[int, ...]]:
    """Return what does not change with the number of blocks, and the work, which rarely does."""
    numbers = _numbers(e)
    return _with(e, [0] * len(numbers)), numbers[2:]


def _numbers(e: Event) -> tuple[int, ...]:
    """Return the bytes in use after an event, the number of its transfer, and its work."""
    match e:
        case Operation():
            return e.live, 0, e.flops or 0, e.bytes
        case Start():
            return e.live, e.number, e.transfer.bytes, e.transfer.kept
        case Wait():
            return e.live, e.number


def _with(e: Event, numbers: Sequence[int]) -> Event:
    """Return an event with other `_numbers`."""
    live, number, *work = numbers
    match e:
        case Operation():
            return replace(e, live=live, flops=None if e.flops is None else work[0], bytes=work[1])
        case Start():
            return Start(replace(e.transfer, bytes=work[0], kept=work[1]), number, live)
        case Wait():
            return Wait(number, live)
