"""Ranks as threads of one process: they meet, and the last to arrive does the exchange, in rank order."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fshard._torch_compat import eager_transforms, foreach_copy_
from fshard.errors import fail

from .packing import pack, reduce_in_order, unpack
from .protocol import Axes, Comm, PendingTransfer, index_of
from .record import note, reduction

T = TypeVar("T")


class _Abandoned(BaseException):
    """Ends a rank whose job another rank has ended: a BaseException, so that no user code catches it."""


@dataclass
class _Slot:
    tag: tuple[Any, ...]
    first: int
    payloads: dict[int, Any] = field(default_factory=dict)
    results: dict[int, Any] | None = None


class _Meeting:
    """Where the threads of one run meet. It ends the run at the first failure and at the first deadlock."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.changed = threading.Condition()
        self.slots: dict[tuple[int, ...], _Slot] = {}
        self.waiting: dict[int, str] = {}
        self.finished: set[int] = set()
        self.failure: BaseException | None = None

    def exchange(self, rank: int, group: tuple[int, ...], x: Any, tag: tuple[Any, ...], combine: Any) -> Any:
        with self.changed:
            self._stop_if_failed()
            slot = self.slots.setdefault(group, _Slot(tag, rank))
            if slot.tag != tag:
                raise fail("the ranks disagree on a collective", f"rank {slot.first}  {_tell(slot.tag)}",
                           f"rank {rank}  {_tell(tag)}",
                           fix="every rank must call the same collectives in the same order, on equal shapes; for a "
                               "dim that the axis does not divide, pass its global size=")  # fmt: skip
            slot.payloads[rank] = x
            if len(slot.payloads) < len(group):
                self.waiting[rank] = _tell(tag)
                self._stop_if_deadlocked()
                self.changed.wait_for(lambda: slot.results is not None or self.failure is not None)
                self._stop_if_failed()
                assert slot.results is not None
                return slot.results[rank]
            del self.slots[group]
        results = combine([slot.payloads[r] for r in group])  # the others wait; other groups may go on
        with self.changed:
            slot.results = dict(zip(group, results, strict=True))
            for r in group:
                self.waiting.pop(r, None)
            self.changed.notify_all()
        return slot.results[rank]

    def finish(self, rank: int) -> None:
        with self.changed:
            self.finished.add(rank)
            self._stop_if_deadlocked()

    def end(self, failure: BaseException) -> None:
        """Record the first failure and wake everyone."""
        with self.changed:
            if self.failure is None:
                self.failure = failure
            self.changed.notify_all()

    def _stop_if_failed(self) -> None:
        if self.failure is not None:
            raise _Abandoned

    def _stop_if_deadlocked(self) -> None:
        if not self.waiting or len(self.waiting) + len(self.finished) < self.n or self.failure is not None:
            return
        lines = [f"rank {r}  waits in {where}" for r, where in sorted(self.waiting.items())]
        lines += [f"rank {r}  has returned" for r in sorted(self.finished)]
        self.failure = fail("deadlock: every rank waits for one that will not come", *lines,
                            fix="every rank must call the same collectives in the same order")  # fmt: skip
        self.changed.notify_all()


def _tell(tag: tuple[Any, ...]) -> str:
    op, axes, shape, dtype, *_ = tag
    return f"{op} over {', '.join(map(repr, axes))} of {str(dtype).removeprefix('torch.')}{list(shape)}"


class SimulatedComm:
    """One thread as a rank."""

    has_values = True
    direct = True
    static_sizes = False

    def __init__(self, sizes: Mapping[str, int], coords: Mapping[str, int], meeting: _Meeting) -> None:
        self.sizes, self.coords, self._meeting = sizes, coords, meeting
        self._rank = index_of(tuple(sizes), sizes, coords)

    def _meet(self, op: str, x: Tensor, axes: Axes, combine: Callable[[list[Tensor]], Any], *more: object) -> Tensor:
        note(op, [x], axes)
        out: Tensor = self._exchange((op, axes, tuple(x.shape), x.dtype, *more), x, combine)
        return out

    def _exchange(self, tag: tuple[Any, ...], x: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """What `combine` makes for me of what everyone gives; `tag` is the same on all: op, axes, shape, dtype, ..."""
        group, axes = [], tag[1]
        for at in itertools.product(*(range(self.sizes[a]) for a in axes)):
            group.append(index_of(tuple(self.sizes), self.sizes, {**self.coords, **dict(zip(axes, at, strict=True))}))
        return self._meeting.exchange(self._rank, tuple(group), x, tag, combine)

    def agree(self, what: str, axes: Axes, device: torch.device) -> None:
        pass  # every exchange compares what its ranks call

    def all_reduce(self, x: Tensor, op: str, axes: Axes) -> Tensor:
        def combine(xs: list[Tensor]) -> list[Tensor]:
            total = reduce_in_order(xs, op)
            return [total, *(total.clone() for _ in xs[1:])]

        return self._meet(reduction(op), x, axes, combine)

    def all_gather(self, x: Tensor, axes: Axes) -> Tensor:
        return self._meet("all_gather", x, axes, lambda xs: [torch.stack(xs) for _ in xs])

    def reduce_scatter(self, x: Tensor, axes: Axes) -> Tensor:
        def combine(xs: list[Tensor]) -> list[Tensor]:
            return [reduce_in_order(row, "sum") for row in zip(*xs, strict=True)]

        return self._meet("reduce_scatter", x, axes, combine)

    def all_to_all(self, x: Tensor, axes: Axes) -> Tensor:
        return self._meet("all_to_all", x, axes, lambda xs: [torch.stack(r) for r in zip(*xs, strict=True)])

    def permute(self, x: Tensor, pairs: Sequence[tuple[int, int]], axes: Axes) -> Tensor:
        def combine(xs: list[Tensor]) -> list[Tensor]:
            source = {target: xs[source] for source, target in pairs}
            return [source[i].clone() if i in source else torch.zeros_like(x) for i, x in enumerate(xs)]

        return self._meet("permute", x, axes, combine, tuple(pairs))

    # Everything moves at the start, and what the others see is a copy: who lands may write to what it gave.

    def gather(self, xs: Sequence[Tensor], into: Sequence[Sequence[Tensor]], axes: Axes) -> PendingTransfer:
        note("all_gather", xs, axes)
        shapes = [tuple(t.shape) for parts in into for t in parts]
        told = shapes[0] if len(xs) == 1 else (sum(parts[0].numel() for parts in into),)
        mine = torch.cat([x.reshape(-1) for x in xs])
        tag = ("all_gather", axes, told, mine.dtype, shapes)
        for r, flat in enumerate(self._exchange(tag, mine, lambda flats: [flats] * len(flats))):
            targets = [parts[r] for parts in into]
            foreach_copy_(targets, _parts(flat, targets))
        return list

    def scatter(self, xs: Sequence[Sequence[Tensor]], axes: Axes) -> PendingTransfer:
        note("reduce_scatter", [x for row in xs for x in row], axes)
        flats = [torch.cat([row[r].reshape(-1) for row in xs]) for r in range(len(xs[0]))]
        shapes = [tuple(t.shape) for row in xs for t in row]
        tag = ("reduce_scatter", axes, (len(flats), len(flats[0])), flats[0].dtype, shapes)
        total = self._exchange(
            tag, flats, lambda rows: [reduce_in_order(row, "sum") for row in zip(*rows, strict=True)]
        )
        me = index_of(axes, self.sizes, self.coords)
        found = _parts(total, [row[me] for row in xs])
        return lambda: found

    def reduce(self, xs: Sequence[Tensor], axes: Axes, *, fresh: bool = False) -> PendingTransfer:
        found = unpack(self.all_reduce(pack(xs), "sum", axes), xs)
        if not fresh:
            foreach_copy_(list(xs), found)
        return lambda: found if fresh else list(xs)


def _parts(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split_with_sizes([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]


def simulate(sizes: Mapping[str, int], pool: ThreadPoolExecutor, f: Callable[[Comm, int], T]) -> list[T]:
    """Run `f(comm, rank)` on one thread per rank and give the results in rank order.

    The first rank that raises ends the others, and its exception, with its own traceback, is the one raised here.
    """
    n = math.prod(sizes.values())
    meeting = _Meeting(n)
    modes = _modes_of_this_thread()

    def rank_main(rank: int, coords: Mapping[str, int]) -> T | None:
        try:
            with contextlib.ExitStack() as stack:
                for mode in modes():
                    stack.enter_context(mode)
                out = f(SimulatedComm(sizes, coords, meeting), rank)
            meeting.finish(rank)
            return out
        except _Abandoned:
            return None
        except BaseException as e:
            meeting.end(e)
            return None

    grid = itertools.product(*(range(k) for k in sizes.values()))
    with _dual_level:
        futures = [pool.submit(rank_main, r, dict(zip(sizes, at, strict=True))) for r, at in enumerate(grid)]
        try:
            results = [future.result() for future in futures]
        except BaseException as e:  # an interrupt of the caller
            meeting.end(e)
            raise
    if meeting.failure is not None:
        raise meeting.failure
    return results  # type: ignore[return-value]


def _modes_of_this_thread() -> Callable[[], list[contextlib.AbstractContextManager[Any]]]:
    """The modes of torch that a thread does not inherit, to be entered by each rank."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = [(d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    return lambda: [
        # Ranks differentiate on their own thread: the engine's device threads would be shared by all of them.
        torch.autograd.set_multithreading_enabled(False),
        torch.inference_mode(inference),
        torch.set_grad_enabled(grad),
        *(torch.autocast(device, dtype) for device, dtype in casts),
    ]


class _DualLevel:
    """Lets every rank use `torch.func.jvp` at once.

    Forward-mode levels belong to the process, not to the thread: the first rank to leave its jvp would erase the
    tangents of the others. So one level is opened here around all that run, and the depth that functorch counts
    starts high enough that no rank opens or closes another.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running = 0
        self.depth, self.level = 0, None

    def __enter__(self) -> None:
        with self.lock:
            if self.running == 0:
                self.depth = eager_transforms.JVP_NESTING
                if self.depth == 0 and forward_ad._current_level < 0:
                    self.level = forward_ad.enter_dual_level()  # type: ignore[no-untyped-call]
                eager_transforms.JVP_NESTING = 1 << 20
            self.running += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.running -= 1
            if self.running == 0:
                eager_transforms.JVP_NESTING = self.depth
                if self.level is not None:
                    forward_ad.exit_dual_level(level=self.level)
                    self.level = None


_dual_level = _DualLevel()

__all__ = ["SimulatedComm", "simulate"]
