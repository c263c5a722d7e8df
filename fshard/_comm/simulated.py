"""Ranks as threads of one process: the last one to enter a collective computes it for all, in rank order."""

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

from fshard._torch_compat import foreach_copy_, set_jvp_nesting
from fshard.errors import fail

from .packing import flatten, pack, reduce_in_order, unpack
from .protocol import Axes, Comm, PendingTransfer, index_of, ranks_over
from .record import note, reduction

T = TypeVar("T")


class _Abandoned(BaseException):
    """Ends a rank after another one has failed: a BaseException, so that user code does not catch it."""


@dataclass
class _Collective:
    """A collective that some ranks have entered: `signature` is (op, axes, shape, dtype, ...), of rank `first`."""

    signature: tuple[Any, ...]
    first: int
    arguments: dict[int, Any] = field(default_factory=dict)
    results: dict[int, Any] | None = None


class _Rendezvous:
    """The collectives of one run. It ends the run at the first failure and at the first deadlock."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.changed = threading.Condition()
        self.entered: dict[tuple[int, ...], _Collective] = {}
        self.waiting: dict[int, str] = {}
        self.finished: set[int] = set()
        self.failure: BaseException | None = None

    def exchange(self, rank: int, group: tuple[int, ...], x: Any, signature: tuple[Any, ...], combine: Any) -> Any:
        """Wait for all ranks of the group, and return this rank's result of `combine`, which takes all their `x`."""
        with self.changed:
            self._stop_if_failed()
            current = self.entered.setdefault(group, _Collective(signature, rank))
            if current.signature != signature:
                raise fail("the ranks disagree on a collective",
                           f"rank {current.first}  {_describe(current.signature)}",
                           f"rank {rank}  {_describe(signature)}",
                           fix="every rank must call the same collectives in the same order, on equal shapes; for a "
                               "dim that the axis does not divide, pass its global size=")  # fmt: skip
            current.arguments[rank] = x
            if len(current.arguments) < len(group):
                self.waiting[rank] = _describe(signature)
                self._stop_if_deadlocked()
                self.changed.wait_for(lambda: current.results is not None or self.failure is not None)
                self._stop_if_failed()
                assert current.results is not None
                return current.results[rank]
            del self.entered[group]
        results = combine([current.arguments[r] for r in group])  # outside the lock: other groups need not wait
        with self.changed:
            current.results = dict(zip(group, results, strict=True))
            for r in group:
                self.waiting.pop(r, None)
            self.changed.notify_all()
        return current.results[rank]

    def finish(self, rank: int) -> None:
        with self.changed:
            self.finished.add(rank)
            self._stop_if_deadlocked()

    def end(self, failure: BaseException) -> None:
        """Record the first failure and wake all ranks."""
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
        lines = [f"rank {r}  waits in {call}" for r, call in sorted(self.waiting.items())]
        lines += [f"rank {r}  has returned" for r in sorted(self.finished)]
        self.failure = fail("deadlock: every rank that has not returned waits for another one", *lines,
                            fix="every rank must call the same collectives in the same order")  # fmt: skip
        self.changed.notify_all()


def _describe(signature: tuple[Any, ...]) -> str:
    op, axes, shape, dtype, *_ = signature
    return f"{op} over {', '.join(map(repr, axes))} of {str(dtype).removeprefix('torch.')}{list(shape)}"


class SimulatedComm:
    """One thread as a rank."""

    has_values = True
    direct = True
    static_sizes = False

    def __init__(self, sizes: Mapping[str, int], coords: Mapping[str, int], rendezvous: _Rendezvous) -> None:
        self.sizes, self.coords, self._rendezvous = sizes, coords, rendezvous
        self._rank = index_of(tuple(sizes), sizes, coords)

    def _collective(
        self, op: str, x: Tensor, axes: Axes, combine: Callable[[list[Tensor]], Any], *more: object
    ) -> Tensor:
        note(op, [x], axes)
        out: Tensor = self._exchange((op, axes, tuple(x.shape), x.dtype, *more), x, combine)
        return out

    def _exchange(self, signature: tuple[Any, ...], x: Any, combine: Callable[[list[Any]], Any]) -> Any:
        group = tuple(ranks_over(signature[1], self.sizes, self.coords))
        return self._rendezvous.exchange(self._rank, group, x, signature, combine)

    def agree(self, what: str, axes: Axes, device: torch.device) -> None:
        pass  # every exchange compares what its ranks call

    def all_reduce(self, x: Tensor, op: str, axes: Axes) -> Tensor:
        def combine(xs: list[Tensor]) -> list[Tensor]:
            total = reduce_in_order(xs, op)
            return [total, *(total.clone() for _ in xs[1:])]

        return self._collective(reduction(op), x, axes, combine)

    def all_gather(self, x: Tensor, axes: Axes) -> Tensor:
        return self._collective("all_gather", x, axes, lambda xs: [torch.stack(xs) for _ in xs])

    def reduce_scatter(self, x: Tensor, axes: Axes) -> Tensor:
        def combine(xs: list[Tensor]) -> list[Tensor]:
            return [reduce_in_order(row, "sum") for row in zip(*xs, strict=True)]

        return self._collective("reduce_scatter", x, axes, combine)

    def all_to_all(self, x: Tensor, axes: Axes) -> Tensor:
        return self._collective("all_to_all", x, axes, lambda xs: [torch.stack(r) for r in zip(*xs, strict=True)])

    def permute(self, x: Tensor, pairs: Sequence[tuple[int, int]], axes: Axes) -> Tensor:
        def combine(xs: list[Tensor]) -> list[Tensor]:
            source = {target: xs[source] for source, target in pairs}
            return [source[i].clone() if i in source else torch.zeros_like(x) for i, x in enumerate(xs)]

        return self._collective("permute", x, axes, combine, tuple(pairs))

    # All tensors are copied at the start, so that a rank that has waited may write to its arguments.

    def gather(self, xs: Sequence[Tensor], into: Sequence[Sequence[Tensor]], axes: Axes) -> PendingTransfer:
        note("all_gather", xs, axes)
        shapes = [tuple(t.shape) for parts in into for t in parts]
        shape = shapes[0] if len(xs) == 1 else (sum(parts[0].numel() for parts in into),)
        mine = flatten(xs)
        signature = ("all_gather", axes, shape, mine.dtype, shapes)
        for r, flat in enumerate(self._exchange(signature, mine, lambda flats: [flats] * len(flats))):
            targets = [parts[r] for parts in into]
            foreach_copy_(targets, unpack(flat, targets))
        return list

    def scatter(self, xs: Sequence[Sequence[Tensor]], axes: Axes) -> PendingTransfer:
        note("reduce_scatter", [x for row in xs for x in row], axes)
        flats = [flatten([row[r] for row in xs]) for r in range(len(xs[0]))]
        shapes = [tuple(t.shape) for row in xs for t in row]
        signature = ("reduce_scatter", axes, (len(flats), len(flats[0])), flats[0].dtype, shapes)
        combine = lambda rows: [reduce_in_order(row, "sum") for row in zip(*rows, strict=True)]  # noqa: E731
        total = self._exchange(signature, flats, combine)
        me = index_of(axes, self.sizes, self.coords)
        mine = unpack(total, [row[me] for row in xs])
        return lambda: mine

    def reduce(self, xs: Sequence[Tensor], axes: Axes, *, fresh: bool = False) -> PendingTransfer:
        reduced = unpack(self.all_reduce(pack(xs), "sum", axes), xs)
        if not fresh:
            foreach_copy_(list(xs), reduced)
        return lambda: reduced if fresh else list(xs)


def simulate(sizes: Mapping[str, int], pool: ThreadPoolExecutor, f: Callable[[Comm, int], T]) -> list[T]:
    """Run `f(comm, rank)` on one thread per rank, and return the results in rank order.

    The first rank that raises ends the others, and its exception, with its own traceback, is the one raised here.
    """
    n = math.prod(sizes.values())
    rendezvous = _Rendezvous(n)
    modes = _modes_of_this_thread()

    def rank_main(rank: int, coords: Mapping[str, int]) -> T | None:
        try:
            with contextlib.ExitStack() as stack:
                for mode in modes():
                    stack.enter_context(mode)
                out = f(SimulatedComm(sizes, coords, rendezvous), rank)
            rendezvous.finish(rank)
            return out
        except _Abandoned:
            return None
        except BaseException as e:
            rendezvous.end(e)
            return None

    grid = itertools.product(*(range(k) for k in sizes.values()))
    with _forward_mode_level:
        futures = [pool.submit(rank_main, r, dict(zip(sizes, at, strict=True))) for r, at in enumerate(grid)]
        try:
            results = [future.result() for future in futures]
        except BaseException as e:  # an interrupt of the caller
            rendezvous.end(e)
            raise
    if rendezvous.failure is not None:
        raise rendezvous.failure
    return results  # type: ignore[return-value]


def _modes_of_this_thread() -> Callable[[], list[contextlib.AbstractContextManager[Any]]]:
    """Return a function that makes the modes of torch on this thread again, for each rank to enter on its own."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = [(d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    return lambda: [
        # Ranks differentiate on their own thread: all would share the engine's device threads.
        torch.autograd.set_multithreading_enabled(False),
        torch.inference_mode(inference),
        torch.set_grad_enabled(grad),
        *(torch.autocast(device, dtype) for device, dtype in casts),
    ]


class _ForwardModeLevel:
    """Keeps one level of forward-mode AD open while simulated ranks run, so that all of them can use `torch.func.jvp`.

    Levels belong to the process, not to the thread: the first jvp opens one, and whichever rank ends the last jvp
    closes it, with the tangents of the others. While the nesting that torch counts is high, no jvp opens or closes one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs = 0
        self._nesting, self._level = 0, None

    def __enter__(self) -> None:
        with self._lock:
            if self._runs == 0:
                with contextlib.suppress(RuntimeError):  # the caller has opened a level
                    self._level = forward_ad.enter_dual_level()  # type: ignore[no-untyped-call]
                self._nesting = set_jvp_nesting(1 << 20)
            self._runs += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._runs -= 1
            if self._runs == 0:
                set_jvp_nesting(self._nesting)
                if self._level is not None:
                    forward_ad.exit_dual_level(level=self._level)
                    self._level = None


_forward_mode_level = _ForwardModeLevel()
