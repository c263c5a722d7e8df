"""Ranks as threads of one process, which take turns: the last one to enter a collective computes it for all."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fshard._core.callsite import Site, site, user_frame
from fshard._core.packing import flatten, pack, parts_by_rank, reduce_in_order, unpack
from fshard._core.protocol import Axes, Comm, Dims, PendingTransfer, Series, index_of, ranks_over
from fshard._core.torch import foreach_copy_
from fshard._core.transfers import call_site, reduction
from fshard.errors import ShardingError, fail

from .description import counts_differ
from .group import GroupComm, Pairs, TakeTexts
from .rank_states import RankStates, torch_for_ranks
from .rank_threads import Abandoned, RankThread, dismiss, give_back, take_threads

T = TypeVar("T")
X = TypeVar("X")

_MOST_COMPUTE_THREADS = 256  # of all ranks together: torch keeps a team for each thread that computes


@dataclass
class _Collective:
    """A collective that some ranks have entered: `signature` is (op, axes, shape, dtype, ...), of rank `first`."""

    signature: tuple[Any, ...]
    first: int
    where: Site | None  # the line of that rank
    arguments: dict[int, Any] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)


class _Message(NamedTuple):
    """A message between two ranks; `number` counts the transfers that they started with each other before."""

    source: int
    target: int
    number: int


class _Run:
    """One run of all ranks, which take turns: one runs until it waits in a collective or ends, then the next one.

    Only the rank whose turn it is uses the fields, so there is no lock, and a program does the same at every run. A run
    ends at the first failure, and at the first deadlock: some ranks wait, and no rank can run.
    """

    def __init__(self, n: int) -> None:
        self.wake: list[Callable[[], None]] = []  # starts a turn of each rank
        self.ready = deque(range(n))
        self.running: int | None = None
        self.entered: dict[tuple[int, ...], _Collective] = {}
        self.waiting: dict[int, tuple[tuple[Any, ...], Site | None]] = {}  # the signature, and the line
        self.returned: list[int] = []
        self.over: list[int] = []  # ranks that have returned or raised
        self.interrupted = False
        self.mail: dict[_Message, tuple[Any, tuple[Any, ...], Site | None]] = {}  # sent, and not received yet
        self.awaited: dict[_Message, int] = {}  # by the rank that waits
        self._is_over, self._until_over = False, threading.Lock()
        self._until_over.acquire()
        self.failure: BaseException | None = None
        self.states = RankStates(n)
        self.process = os.getpid()

    def exchange(
        self, group: _ThreadGroup, op: str, x: X, combine: Callable[[list[X]], Sequence[T]], *facts: Any
    ) -> T:  # fmt: skip
        """Wait for all ranks of the group, and return this rank's result of `combine`, which takes all their `x`.

        The ranks must pass the same `facts`, beginning with a shape and a dtype.
        """
        rank, ranks, signature = group.rank, group.ranks, (op, group.axes, *facts)
        self.stop_if_failed()
        if os.getpid() != self.process:
            raise fail(f"{_describe(signature)}: called in a fork of the process, which has no other rank",
                       fix="fork outside of shard_map, or call no collective in the fork")  # fmt: skip
        where = call_site()
        current = self.entered.setdefault(ranks, _Collective(signature, rank, where))
        if current.signature != signature:
            raise _disagreement((current.first, current.signature, current.where), (rank, signature, where))
        current.arguments[rank] = x
        if len(current.arguments) < len(ranks):
            self.wait_for_turn(rank, signature, where)
        else:
            del self.entered[ranks]
            results = combine([current.arguments[r] for r in ranks])
            current.results = dict(zip(ranks, results, strict=True))
            self.ready.extend(r for r in ranks if self.waiting.pop(r, None))
        out: T = current.results.pop(rank)
        return out

    def post(self, message: _Message, x: Any, signature: tuple[Any, ...]) -> None:
        """Send a message, and let the rank go on that waits for it."""
        self.stop_if_failed()
        self.mail[message] = x, signature, call_site()
        if (rank := self.awaited.pop(message, None)) is not None:
            del self.waiting[rank]
            self.ready.append(rank)

    def receive(self, rank: int, message: _Message, signature: tuple[Any, ...]) -> Any:
        """Wait for a message."""
        self.stop_if_failed()
        if message not in self.mail:
            self.awaited[message] = rank
            self.wait_for_turn(rank, signature, call_site())
        x, sent, where = self.mail.pop(message)
        if sent != signature:
            raise _disagreement((message.source, sent, where), (rank, signature, call_site()))
        return x

    def wait_for_turn(self, rank: int, signature: tuple[Any, ...], where: Site | None) -> None:
        """Let other ranks run until one has put this one among the ready ones."""
        self.waiting[rank] = signature, where
        turn = threading.Lock()
        turn.acquire()
        self.wake[rank] = turn.release
        self.end_turn(rank)
        turn.acquire()
        self.begin_turn(rank)

    def begin_turn(self, rank: int) -> None:
        self.running = rank
        self.states.load(rank)
        self.stop_if_failed()

    def end_turn(self, rank: int) -> None:
        self.states.save(rank)
        self.running = None
        self.start_next()

    def start_next(self) -> None:
        """Start the turn of the next rank, if any is left."""
        if not self.ready and self.waiting and self.failure is None:
            lines = [f"rank {r}  waits in {_describe(*call)}" for r, call in sorted(self.waiting.items())]
            lines += [f"rank {r}  has returned" for r in sorted(self.returned)]
            self.failure = fail("deadlock: every rank that has not returned waits for another one", *lines,
                                fix="every rank must call the same collectives in the same order")  # fmt: skip
        if self.failure is not None:
            self.ready.extend(self.waiting)
            self.waiting.clear()
        if self.ready:
            self.wake[self.ready.popleft()]()

    def end(self) -> None:
        """Let the caller go on; once."""
        self._is_over = True
        self._until_over.release()

    def wait_for_end(self, seconds: float) -> bool:
        """Wait for the end, and return whether it has come.

        A signal may interrupt the wait at any place: a threading.Event may then keep its lock.
        """
        return self._is_over or self._until_over.acquire(timeout=seconds) or self._is_over

    def stop_if_failed(self) -> None:
        if self.failure is not None:
            raise Abandoned


def _disagreement(*ranks: tuple[int, tuple[Any, ...], Site | None]) -> ShardingError:
    """Return the error of two ranks, each with its collective and its line."""
    return fail("the ranks disagree on a collective",
                *[f"rank {rank}  {_describe(signature, where)}" for rank, signature, where in ranks],
                fix="every rank must call the same collectives in the same order, on equal shapes; for a "
                    "dim that the axis does not divide, pass its global size=")  # fmt: skip


def _describe(signature: tuple[Any, ...], where: Site | None = None) -> str:
    op, axes, shape, dtype, *_ = signature
    of = "" if shape is None else f" of {str(dtype).removeprefix('torch.')}{list(shape)}"
    return f"{op} over {', '.join(map(repr, axes))}{of}{f', at {where}' if where else ''}"


class SimulatedComm(GroupComm):
    """One thread as a rank."""

    direct = True
    static_sizes = False

    def __init__(self, sizes: Mapping[str, int], coords: Mapping[str, int], run: _Run) -> None:
        self.sizes, self.coords, self._run = sizes, coords, run
        self._group = functools.cache(functools.partial(_ThreadGroup, run, Counter(), sizes, coords))

    def with_all_texts(self, text: str, verb: str, device: torch.device, f: TakeTexts) -> None:
        def call(texts: list[str]) -> list[None]:  # on the last rank to enter, while the others wait
            f(dict(enumerate(texts)))
            return [None] * len(texts)

        self._run.exchange(self._group(tuple(self.sizes), device), verb, text, call, None, None)


class _ThreadGroup:
    """The threads that are the ranks over some axes, with this one at position `me`, and the verbs of `Comm`."""

    def __init__(
        self, run: _Run, started: Counter[int], sizes: Mapping[str, int], coords: Mapping[str, int], axes: Axes,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.run, self.axes = run, axes
        self.started = started  # sends of this rank with each other rank, over any axes
        self.ranks, self.me = tuple(ranks_over(axes, sizes, coords)), index_of(axes, sizes, coords)
        self.rank, self.sizes = self.ranks[self.me], [sizes[a] for a in axes]

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        def combine(xs: list[Tensor]) -> list[Tensor]:
            total = reduce_in_order(xs, op)
            return [total, *(total.clone() for _ in xs[1:])]

        return self.run.exchange(self, reduction(op), x, combine, x.shape, x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        return self.run.exchange(self, "all_gather", x, lambda xs: [torch.stack(xs) for _ in xs], x.shape, x.dtype)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.run.exchange(self, "reduce_scatter", x, _sum_columns, x.shape, x.dtype)

    def all_to_all(self, x: Tensor) -> Tensor:
        combine = lambda xs: [torch.stack(row) for row in zip(*xs, strict=True)]  # noqa: E731
        return self.run.exchange(self, "all_to_all", x, combine, x.shape, x.dtype)

    def all_to_all_rows(self, x: Tensor, send: Sequence[int], receive: Sequence[int], exchanged: bool) -> Tensor:
        def combine(ranks: list[tuple[Tensor, Sequence[int], Sequence[int]]]) -> list[Tensor]:
            parts = [x.split_with_sizes(list(send)) for x, send, _ in ranks]
            for (i, (_, send, _)), (j, (_, _, receive)) in itertools.product(enumerate(ranks), enumerate(ranks)):
                if send[j] != receive[i]:
                    raise counts_differ(i, j, send[j], receive[i])
            return [torch.cat(column) for column in zip(*parts, strict=True)]

        facts = ("rows", *x.shape[1:]), x.dtype
        return self.run.exchange(self, "all_to_all_rows", (x, send, receive), combine, *facts)

    def permute(self, x: Tensor, pairs: Pairs) -> Tensor:
        def combine(xs: list[Tensor]) -> list[Tensor]:
            source = {target: xs[source] for source, target in pairs}
            return [source[i].clone() if i in source else torch.zeros_like(x) for i, x in enumerate(xs)]

        return self.run.exchange(self, "permute", x, combine, x.shape, x.dtype, tuple(pairs))

    # All tensors are copied at the start, so that a rank that has waited may write to its arguments.

    def gather(self, xs: Sequence[Tensor], into: Sequence[Tensor], dims: Dims) -> PendingTransfer:
        rows = parts_by_rank(into, dims, self.sizes)
        shape = tuple(rows[0][0].shape) if len(xs) == 1 else (sum(part.numel() for part in rows[0]),)
        mine = flatten(xs)
        combine = lambda flats: [flats] * len(flats)  # noqa: E731
        flats = self.run.exchange(self, "all_gather", mine, combine, shape, mine.dtype, _joined(into, dims))
        for parts, flat in zip(rows, flats, strict=True):
            foreach_copy_(list(parts), unpack(flat, parts))
        return list

    def scatter(self, xs: Sequence[Tensor], dims: Dims) -> PendingTransfer:
        rows = parts_by_rank(xs, dims, self.sizes)
        flats = [flatten(parts) for parts in rows]
        shape = len(flats), len(flats[0])
        total = self.run.exchange(self, "reduce_scatter", flats, _sum_columns, shape, flats[0].dtype, _joined(xs, dims))
        mine = unpack(total, rows[self.me])
        return lambda: mine

    def reduce(self, xs: Sequence[Tensor], fresh: bool) -> PendingTransfer:
        reduced = unpack(self.all_reduce(pack(xs), "sum"), xs)
        if not fresh:
            foreach_copy_(list(xs), reduced)
        return lambda: reduced if fresh else list(xs)

    def send(self, xs: Sequence[Tensor], pairs: Pairs, series: Series | None) -> PendingTransfer:
        ranks, rank, shapes = self.ranks, self.rank, [list(x.shape) for x in xs]
        signature = ("permute", self.axes, shapes[0] if len(xs) == 1 else shapes, xs[0].dtype, tuple(pairs))
        numbers = {r: self.started[r] for r in {ranks[i] for pair in pairs if self.me in pair for i in pair}}
        self.started.update(numbers.keys())
        source = next((ranks[source] for source, target in pairs if target == self.me), None)
        received: list[Tensor] | None = None
        for target in [ranks[target] for source, target in pairs if source == self.me]:
            copies = [x.clone(memory_format=torch.contiguous_format) for x in xs]
            if target == rank:
                received = copies
            else:
                self.run.post(_Message(rank, target, numbers[target]), copies, signature)
        if source is None:
            received = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in xs]
        if received is not None:
            return lambda: received or []
        assert source is not None
        message = _Message(source, rank, numbers[source])
        return lambda: self.run.receive(rank, message, signature)


def _sum_columns(ranks: Sequence[Any]) -> list[Tensor]:
    """Return for each rank the sum of what all ranks have for it."""
    return [reduce_in_order(column, "sum") for column in zip(*ranks, strict=True)]


def _joined(xs: Sequence[Tensor], dims: Dims) -> list[tuple[Any, ...]]:
    """Shapes and joined dims: ranks that differ in one would cut their flat tensors in other places."""
    return [(tuple(x.shape), dim) for x, dim in zip(xs, dims, strict=True)]


def simulate(sizes: Mapping[str, int], f: Callable[[Comm, int], T]) -> list[T]:
    """Run `f(comm, rank)` on one thread per rank, and return the results in rank order.

    The first rank that raises ends the others, and its exception is the one raised here, with its traceback. An
    interrupt of the caller is raised in the ranks too; nothing waits for a rank that does not end then.
    """
    n = math.prod(sizes.values())
    run = _Run(n)
    modes = _modes_of_this_thread()
    compute_threads = torch.get_num_threads()
    of_rank = max(1, min(compute_threads, _MOST_COMPUTE_THREADS // n))
    results: list[Any] = [f] * n  # of each rank: the program, then its result

    def rank_main(rank: int, coords: Mapping[str, int]) -> None:
        try:
            run.begin_turn(rank)
            if torch.get_num_threads() != of_rank:
                torch.set_num_threads(of_rank)
            with run.states.on_thread(rank), contextlib.ExitStack() as stack:
                for mode in modes():
                    stack.enter_context(mode)
                results[rank] = results[rank](SimulatedComm(sizes, coords, run), rank)
            run.returned.append(rank)
        except Abandoned:
            pass
        except BaseException as e:
            if run.failure is None and n > 1 and isinstance(e, Exception) and not isinstance(e, ShardingError):
                e.add_note(f"on rank {rank}: {', '.join(f'{axis}={i}' for axis, i in coords.items())}")
            run.failure = run.failure or e
        run.over.append(rank)
        is_last = len(run.over) == n  # asked in this rank's turn: after it, other ranks end, too
        run.end_turn(rank)
        if run.interrupted:
            dismiss(threads[rank])
        if is_last:
            run.end()

    with torch_for_ranks:
        threads = take_threads(n)
        try:
            for rank, at in enumerate(itertools.product(*map(range, sizes.values()))):
                job = functools.partial(copy_context().run, rank_main, rank, dict(zip(sizes, at, strict=True)))
                run.wake.append(functools.partial(threads[rank].jobs.put, job))
            run.start_next()
            while not run.wait_for_end(_PATIENCE):
                pass  # Python misses a signal that arrives just before a wait begins
        except BaseException as e:  # an interrupt of the caller
            _interrupt(run, threads, e)
            raise
        give_back(threads)
        run.states.end()
        if of_rank != compute_threads:
            torch.set_num_threads(compute_threads)  # of threads to come: a rank has set that, too
    out, results, run.wake = results, [], []  # a thread that has not left `rank_main` yet keeps nothing of the program
    if run.failure is not None:
        raise run.failure
    for message, (_, signature, where) in run.mail.items():
        raise fail(f"rank {message.target} has not received what rank {message.source} sent it",
                   f"rank {message.source}  {_describe(signature, where)}",
                   fix="every rank that a pair names starts the transfer, and waits for it")  # fmt: skip
    return out


_PATIENCE = 0.1  # seconds: of a wait of the caller, and after each attempt to end the ranks of an interrupted run
_ATTEMPTS = 10


def _interrupt(run: _Run, threads: Sequence[RankThread], e: BaseException) -> None:
    """End the ranks, and add to the interrupt `e` a note of each rank's position.

    A rank that is in a call into C, such as a sleep, ends after it, and other runs do not wait for it.
    """
    positions = [f"rank {rank}  {_position(run, rank, thread)}" for rank, thread in enumerate(threads)]
    e.add_note("\n  ".join(["simulated ranks at the interrupt:", *positions]))
    run.failure, run.interrupted = run.failure or e, True
    try:
        for _ in range(_ATTEMPTS):  # the user's code may catch one
            if (rank := run.running) is not None:  # else the next rank finds the failure at its turn
                threads[rank].interrupt()
            if run.wait_for_end(_PATIENCE):
                return
        e.add_note(f"rank {run.running} has not ended yet; its thread ends after the call that it is in")
    finally:
        for rank in list(run.over):
            dismiss(threads[rank])
        run.states.abandon()


def _position(run: _Run, rank: int, thread: RankThread) -> str:
    if rank in run.waiting:
        return f"waits in {_describe(*run.waiting[rank])}"
    if rank in run.returned:
        return "has returned"
    frame = user_frame(sys._current_frames().get(thread.ident or 0)) if rank == run.running else None
    return f"runs {site(frame)}" if frame is not None else "waits for its turn"


def _modes_of_this_thread() -> Callable[[], list[contextlib.AbstractContextManager[Any]]]:
    """Return a function that makes the modes of torch on this thread again, for each rank to enter."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = [(d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    cache = torch.is_autocast_cache_enabled()
    device = torch.get_default_device()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return lambda: [
        # Each rank differentiates on its thread: all would share the engine's device threads.
        torch.autograd.set_multithreading_enabled(False),
        torch.inference_mode(inference),
        torch.set_grad_enabled(grad),
        *(torch.autocast(device, dtype, cache_enabled=cache) for device, dtype in casts),
        *([torch.cuda.stream(stream)] if stream is not None else []),  # and the current device
        *([device] if device != torch.get_default_device() else []),
    ]
