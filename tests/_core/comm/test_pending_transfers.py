"""Pending transfers: their values on every kind of mesh, and the messages between pairs of ranks."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import math
import queue
import re
import threading
import time
import unittest.mock
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard._core.comm import functional
from fshard._core.comm.gloo import HEADER_TAG, GlooConnections
from fshard._core.comm.process import ProcessComm
from fshard._core.ops.linear_maps import Gather, Scatter, Sum
from fshard._core.protocol import ranks_over
from fshard._core.transfers import recording
from fshard.spec import part_lengths
from tests.lib.assertions import error_text
from tests.lib.collective_cases import EVERY_DTYPE, check_pending_transfers, check_transfer_records
from tests.lib.tiers import slow_unless

TIMEOUT = datetime.timedelta(seconds=600)
MESHES = [
    ({"a": 2}, ("a",)),
    ({"a": 3}, ("a",)),
    ({"a": 2, "b": 3}, ("b", "a")),
    ({"a": 2, "b": 1, "c": 2, "d": 2}, ("a", "d")),
]


# --- a network in memory, under the code of process meshes -----------------------------------------------------


class MemoryBackend:
    """Does as the backend of gloo for ranks that are threads: messages match by sender, receiver and tag, in order."""

    def __init__(self, network: dict[Any, Any], me: int) -> None:
        self.network, self.me = network, me
        self.sent: list[tuple[int, Tensor]] = []
        self.received: list[tuple[int, Tensor]] = []
        self.tags: list[tuple[int, int]] = []

    def _channel(self, *key: int) -> Any:
        """The queues of a channel: messages that were sent, and queues of the receivers that wait for one."""
        return self.network.setdefault(key, (queue.Queue(), queue.Queue()))  # atomic

    def send(self, xs: list[Tensor], to: int, tag: int) -> Work:
        (x,) = xs
        assert x.is_contiguous()
        assert not x.is_conj()  # a conjugate view has the bytes of its base
        self.sent.append((to, x))
        channel = self._channel(self.me, to, tag)
        with self.network.setdefault("lock", threading.Lock()):
            channel[0].put(x.clone())
            self._match(*channel)
        return Work(lambda: None)

    def _match(self, messages: Any, receivers: Any) -> None:
        while not messages.empty() and not receivers.empty():
            receivers.get().put(messages.get())

    def recv(self, xs: list[Tensor], source: int, tag: int) -> Work:
        (x,) = xs
        assert x.is_contiguous()
        self.received.append((source, x))
        channel, receiver = self._channel(source, self.me, tag), queue.Queue()
        with self.network.setdefault("lock", threading.Lock()):
            channel[1].put(receiver)
            self._match(*channel)

        def wait() -> None:
            message = receiver.get(timeout=TIMEOUT.total_seconds())
            assert message.numel() == x.numel()
            x.view(-1).copy_(message.view(-1))

        return Work(wait)


class Work:
    def __init__(self, wait: Any) -> None:
        self._wait = wait

    def wait(self, timeout: datetime.timedelta) -> None:
        self._wait()


class InMemoryComm(ProcessComm):
    """A rank of a process mesh without processes: its connections are a network in memory."""

    def __init__(self, sizes: dict[str, int], coords: dict[str, int], backend: Any) -> None:
        super().__init__(dict.fromkeys(sizes, 1), dict.fromkeys(sizes, 0))  # a mesh of one rank has no connections
        self.sizes, self.coords = sizes, coords
        self._connections = GlooConnections(backend, math.prod(sizes.values()), TIMEOUT)


def run_in_memory(sizes: dict[str, int], kind: type[ProcessComm] = InMemoryComm) -> Any:
    """`Mesh.run` of a mesh whose ranks are threads and send messages in memory."""

    def run(f: Any) -> list[Any]:
        network: dict[Any, Any] = {}
        places = list(itertools.product(*(range(n) for n in sizes.values())))
        with ThreadPoolExecutor(len(places)) as pool:
            comms = [
                kind(sizes, dict(zip(sizes, at, strict=True)), MemoryBackend(network, rank))
                for rank, at in enumerate(places)
            ]
            return [future.result() for future in [pool.submit(f, c, r) for r, c in enumerate(comms)]]

    return run


@dataclasses.dataclass
class MemoryGroup:
    """A process group in memory: `ranks` are its ranks in the mesh, by their rank in the group."""

    backend: MemoryBackend
    axes: tuple[str, ...]
    ranks: list[int]
    numbers: Any = dataclasses.field(default_factory=itertools.count)  # of its transfers


class FunctionalComm(InMemoryComm):
    """A rank of a process mesh that has the functional collectives alone, as on CUDA."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        backend, self._connections = self._connections.backend, None
        self._axes = tuple(a for a, n in self.sizes.items() if n > 1)
        group = lambda axes: MemoryGroup(backend, axes, ranks_over(axes, self.sizes, self.coords))  # noqa: E731
        groups: dict[Any, MemoryGroup] = {}
        self._group_name = lambda axes, grid: groups.setdefault(axes, group(axes))
        self._world_name, self._grid = group(self._axes), ()


class FunctionalOps:
    """Does as the functional collectives of torch.distributed, between ranks that are threads."""

    @staticmethod
    def wait_tensor(started: Any) -> Tensor:
        return started()

    @staticmethod
    def all_to_all_single(x: Tensor, received: list[int], sent: list[int], group: MemoryGroup) -> Any:
        return FunctionalOps._exchange(x.split(sent), received, group, torch.cat)

    @staticmethod
    def all_gather_into_tensor(x: Tensor, n: int, group: MemoryGroup) -> Any:
        assert n == len(group.ranks)
        return FunctionalOps._exchange([x] * n, [len(x)] * n, group, torch.cat)

    @staticmethod
    def reduce_scatter_tensor(x: Tensor, op: str, n: int, group: MemoryGroup) -> Any:
        assert (op, n) == ("sum", len(group.ranks))
        return FunctionalOps._exchange(x.split([len(x) // n] * n), [len(x) // n] * n, group, FunctionalOps._sum)

    @staticmethod
    def all_reduce(x: Tensor, op: str, group: MemoryGroup) -> Any:
        combine = {"sum": FunctionalOps._sum, "max": lambda xs: torch.stack(xs).amax(0),
                   "min": lambda xs: torch.stack(xs).amin(0)}[op]  # fmt: skip
        started = FunctionalOps._exchange(
            [x.reshape(-1)] * len(group.ranks), [x.numel()] * len(group.ranks), group, combine
        )
        return lambda: started().view(x.shape)

    @staticmethod
    def _sum(xs: list[Tensor]) -> Tensor:
        return functools.reduce(torch.add, xs)

    @staticmethod
    def _exchange(outgoing: Any, lengths: list[int], group: MemoryGroup, combine: Any) -> Any:
        tag: Any = (group.axes, next(group.numbers))
        incoming = [outgoing[0].new_empty(length) for length in lengths]
        works = [group.backend.recv([x], r, tag) for r, x in zip(group.ranks, incoming, strict=True)]
        for r, x in zip(group.ranks, outgoing, strict=True):
            group.backend.send([x.resolve_conj()], r, tag)  # torch's dispatcher does so for the real ones

        def wait() -> Tensor:
            for work in works:
                work.wait(TIMEOUT)
            return combine(incoming)

        return wait


def run_functional(sizes: dict[str, int]) -> Any:
    """`Mesh.run` of a mesh whose ranks are threads and call the functional collectives."""

    def run(f: Any) -> list[Any]:
        with unittest.mock.patch.object(functional, "_ops", FunctionalOps):
            return run_in_memory(sizes, FunctionalComm)(f)

    return run


IN_RANK_ORDER = {"simulated": lambda sizes: fs.make_mesh(**sizes).run, "messages": run_in_memory}
RUNS = {**IN_RANK_ORDER, "functional": run_functional}


# --- values ----------------------------------------------------------------------------------------------------


TRIED = [(kind, *mesh) for kind in RUNS for mesh in MESHES[1:3]]


@pytest.mark.parametrize(("kind", "sizes", "axes"), slow_unless([TRIED[0], TRIED[3], TRIED[4]], TRIED))
def test_pending_transfers_waited_for_in_another_order_have_the_right_values(kind, sizes, axes):
    dtypes = EVERY_DTYPE if sizes == {"a": 2} else EVERY_DTYPE[2::3]
    check_pending_transfers(RUNS[kind](sizes), sizes, axes, dtypes)


@pytest.mark.parametrize(("sizes", "axes"), MESHES)
@pytest.mark.parametrize("kind", RUNS)
def test_pending_transfer_is_recorded_once_with_the_bytes_of_its_arguments(kind, sizes, axes):
    check_transfer_records(RUNS[kind](sizes), sizes, axes, math.prod(sizes.values()))


@pytest.mark.parametrize("size", [1, 5_001, 50_001])  # one round; two rounds; a large message
def test_sums_are_in_rank_order_and_half_precision_is_rounded_once(size):
    parts = {torch.float32: [1e8, 1.0, -1e8, 1.0, 3.0], torch.bfloat16: [1000.0, 1.25, 1.25, -1000.0, 1.0],
             torch.float16: [1000.0, 1.25, 1.25, -1000.0, 1.0]}  # fmt: skip
    runs = {n: [run({"a": n}) for run in IN_RANK_ORDER.values()] for n in ((2, 5) if size == 1 else (5,))}
    for n, (dtype, values) in itertools.product(runs, parts.items()):
        total = torch.tensor(values[0], dtype=torch.float32)
        for v in values[1:n]:
            total = total + torch.tensor(v)
        want = total.to(dtype).expand(size)

        def sums(comm: Any, rank: int, n: int = n, dtype: Any = dtype, values: Any = values) -> list[Tensor]:
            x = torch.full((size,), values[rank], dtype=dtype)
            stack = x.expand(n, size)
            out = [comm.reduce([x], ("a",), fresh=True)()[0], comm.all_reduce(x, "sum", ("a",))]
            out += [comm.scatter([stack], [0], ("a",))()[0][0], comm.reduce_scatter(stack, ("a",))]
            return [*out, comm.reduce([x], ("a",))()[0]]

        for run in runs[n]:
            for got in itertools.chain(*run(sums)):
                torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("kind", RUNS)
def test_values_of_blocking_collectives(kind):
    sizes, axes = {"a": 2, "b": 2}, ("b", "a")

    def f(comm: Any, rank: int) -> None:
        me, n = 2 * comm.coords["b"] + comm.coords["a"], 4
        every = torch.arange(float(n * n * 3)).view(n, n, 3)  # [source, target, 3]
        mine = every[me]
        same = lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0)  # noqa: E731
        same(comm.all_reduce(mine, "sum", axes), every.sum(0))
        same(comm.all_reduce(mine.t(), "max", axes), every[-1].t())
        same(comm.all_reduce(-mine, "min", axes), -every[-1])
        same(comm.all_gather(mine.t(), axes), every.transpose(1, 2))
        same(comm.all_gather(mine[0, 0], axes), every[:, 0, 0])
        same(comm.reduce_scatter(mine, axes), every.sum(0)[me])
        same(comm.all_to_all(mine, axes), every[:, me])
        same(comm.all_to_all(mine[:, 0], axes), every[:, me, 0])
        counts = [[(i + 2 * j) % 4 for j in range(n)] for i in range(n)]  # of rows from i to j
        parts = [[10 * i + j + torch.arange(2.0 * k).view(k, 2) for j, k in enumerate(row)]
                 for i, row in enumerate(counts)]  # fmt: skip
        for exchanged in (True, False):
            receive = [row[me] for row in counts]
            got = comm.all_to_all_rows(torch.cat(parts[me]), counts[me], receive, axes, exchanged=exchanged)
            same(got, torch.cat([row[me] for row in parts]))
        got = comm.permute(mine, [(0, 1), (1, 3), (2, 2)], axes)
        same(got, {1: every[0], 3: every[1], 2: every[2]}.get(me, torch.zeros(n, 3)))
        conj = torch.view_as_complex(torch.stack([every, every + 1], -1)).conj()  # a view: its memory is not conjugated
        same(comm.all_gather(conj[me], axes), conj.resolve_conj())

    RUNS[kind](sizes)(f)


@pytest.mark.parametrize("kind", RUNS)
def test_sums_are_contiguous_and_on_the_device_of_their_parts(kind):
    def f(comm: Any, rank: int) -> None:
        x = torch.arange(24.0).view(4, 6)
        with torch.device("meta"):
            (part,) = comm.scatter([x.t()], [0], ("a",))()
            total, every = comm.all_reduce(x.t(), "sum", ("a",)), comm.all_gather(x, ("a",))
            permuted, exchanged = comm.permute(x, [(0, 1)], ("a",)), comm.all_to_all(x[:2], ("a",))
        for y, want in ((part, 2 * x[:, 3 * rank :][:, :3].t()), (total, 2 * x.t()), (every, torch.stack([x, x])),
                        (permuted, x * rank), (exchanged, x[[rank, rank]])):  # fmt: skip
            assert torch.equal(y, want)
        assert part.is_contiguous()

    RUNS[kind]({"a": 2})(f)


def test_transfer_that_one_rank_drops_and_another_keeps_blocks_no_later_one():
    def f(comm: Any, rank: int) -> None:
        kept = [comm.reduce([torch.ones(9)], ("a",)) for _ in range(3)]
        if rank == 0:
            kept.clear()
        for i in range(5):
            assert comm.all_reduce(torch.full((9,), float(i)), "sum", ("a",))[0] == 2 * i

    run_in_memory({"a": 2})(f)


@pytest.mark.parametrize("kind", RUNS)
def test_rank_may_start_transfers_before_it_waits_for_one_that_others_have_waited_for(kind):
    def f(comm: Any, rank: int) -> None:
        a, b, c = torch.ones(50_000), torch.full((50_000,), float(rank)), torch.zeros(3, 50_000)
        first = comm.reduce([a], ("a",))
        if rank == 1 and kind != "simulated":  # which transfers everything at the start
            time.sleep(0.05)
            second, third = comm.reduce([b], ("a",)), comm.gather([torch.ones(1, 50_000) * rank], [c], [0], ("a",))
            first()
        else:
            first()
            second, third = comm.reduce([b], ("a",)), comm.gather([torch.ones(1, 50_000) * rank], [c], [0], ("a",))
        second()
        third()
        assert (a == 3).all()
        assert (b == 3).all()
        assert (c == torch.arange(3)[:, None]).all()

    RUNS[kind]({"a": 3})(f)


# --- messages between the ranks that pairs name ------------------------------------------------------------------


class FunctionalMessages:
    """Does as the point-to-point operations of torch.distributed, between ranks that are threads."""

    isend, irecv = "isend", "irecv"

    @staticmethod
    def P2POp(op: str, x: Tensor, *, group: MemoryGroup, group_peer: int) -> Any:  # noqa: N802
        return op, x, group.backend, group.ranks[group_peer]

    @staticmethod
    def batch_isend_irecv(operations: Any) -> list[Any]:
        for op, x, backend, rank in operations:
            if op == "isend":
                backend.send([x], rank, 0)
        works = [backend.recv([x], rank, 0) for op, x, backend, rank in operations if op == "irecv"]
        return [unittest.mock.Mock(wait=functools.partial(work.wait, TIMEOUT)) for work in works]


@pytest.mark.parametrize("kind", RUNS)
def test_only_the_ranks_that_pairs_name_take_part_in_a_send(kind):
    """Rank 3 never enters; rank 1 waits in another order than it starts, and all compute meanwhile."""

    def f(comm: Any, rank: int) -> Any:
        if rank == 3:
            return None
        x = [torch.full((20_000,), float(rank)), torch.arange(6.0).view(2, 3).t() + rank]
        if rank == 2:
            return comm.send(x, [(2, 2)], ("a",))(), comm.send(x, [(1, 2)], ("a",))()
        pending = [comm.send([y + i for y in x], [(0, 1), (1, 0)], ("a",)) for i in range(2)]
        back = comm.send(x, [(1, 2)], ("a",)) if rank == 1 else list
        return [wait() for wait in pending[:: -1 if rank else 1]], back()

    patch = unittest.mock.patch.object
    with patch(functional, "dist", FunctionalMessages), patch(functional, "group_named", lambda name: name):
        out = RUNS[kind]({"a": 4})(f)
    numbers = lambda xs: [(x[0][-1].item(), *x[1].shape, x[1][2, 1].item()) for x in xs]  # noqa: E731
    assert numbers(out[0][0]) == [(1, 3, 2, 6), (2, 3, 2, 7)]
    assert numbers(out[1][0]) == [(1, 3, 2, 6), (0, 3, 2, 5)]
    assert numbers(out[2]) == [(2, 3, 2, 7), (1, 3, 2, 6)]
    assert numbers([out[1][1]]) == [(0, 3, 2, 0)]  # a rank that receives nothing has zeros


def test_ranks_that_disagree_on_a_send_and_messages_that_nobody_receives_are_errors():
    def differ(comm: Any, rank: int) -> None:
        comm.send([torch.ones(3 + rank)], [(0, 1)], ("a",))()

    for run in IN_RANK_ORDER.values():
        text = error_text(run({"a": 2}), differ)
        assert "the ranks disagree on a collective" in text
        assert "[3]" in text
        assert "[4]" in text
    sent = lambda comm, rank: rank or comm.send([torch.ones(3)], [(0, 1)], ("a",))()  # noqa: E731
    text = error_text(fs.make_mesh(a=2).run, sent)
    assert text.startswith("rank 1 has not received what rank 0 sent it\n  rank 0  permute over 'a' of float32[3]")
    waits = lambda comm, rank: rank and comm.send([torch.ones(3)], [(0, 1)], ("a",))()  # noqa: E731
    assert "deadlock: every rank that has not returned waits" in error_text(fs.make_mesh(a=2).run, waits)


def test_transfers_in_the_backward_pass_of_a_function_are_recorded_as_backward():
    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return fs.psum(x, "a")

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return fs.psum(grad, "a")

    step = fs.shard_map(fs.grad(lambda x: Summed.apply(x).sum()), mesh=fs.make_mesh(a=2),
                        in_specs=P("a"), out_specs=P("a"), check="never")  # fmt: skip
    with recording() as log:
        step(torch.ones(2))
    assert [x.phase for x in log if x.rank == 0] == ["forward", "backward"]


# --- maps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("n", [2, 4])
def test_started_map_gives_the_result_of_run(kind, n):
    """Over two dims, one that divides and one that does not, and gathered into views."""
    layout = ((0, 2 * n), (1, 5))
    whole = [torch.arange(2.0 * n * 3).view(2 * n, 3), torch.arange(20.0).view(4, 5)]

    def f(comm: Any, rank: int) -> None:
        same = lambda xs, ys: [torch.testing.assert_close(x, y, rtol=0, atol=0) for x, y in zip(xs, ys, strict=True)]  # noqa: E731
        gather, scatter = Gather(comm, ("a",), layout), Scatter(comm, ("a",), layout)
        mine = [x.split(part_lengths(size, [n]), dim)[rank] for x, (dim, size) in zip(whole, layout, strict=True)]
        same(gather.run(mine), whole)
        into = [torch.zeros_like(x) for x in whole]
        results = gather.start(mine, into)()
        assert all(x is y for x, y in zip(results, into, strict=True))
        same(into, whole)
        for got in (scatter.run(whole), scatter.start(whole)()):
            same(got, [n * x for x in mine])
            assert all(x.is_contiguous() for x in got)
        for divisor in (1, n):
            m, xs = Sum(comm, ("a",), divisor), [x + rank for x in whole]
            want = [(n * x + sum(range(n))) / divisor for x in whole]
            same(m.run(xs), want)
            same(xs, [x + rank for x in whole])  # not written to
            results = m.start(xs)()
            assert all(x is y for x, y in zip(results, xs, strict=True))
            same(xs, want)

    RUNS[kind]({"a": n})(f)


# --- messages ---------------------------------------------------------------------------------------------------


class ZeroBackend(MemoryBackend):
    """A backend that receives zeros from every rank, at once, and a header equal to the one that is sent."""

    def send(self, xs: list[Tensor], to: int, tag: int) -> Work:
        if tag == HEADER_TAG:
            self.header = xs[0]
            return Work(lambda: None)
        self.tags.append((to, tag))
        return super().send(xs, to, tag)

    def recv(self, xs: list[Tensor], source: int, tag: int) -> Work:
        if tag == HEADER_TAG:
            return Work(lambda: xs[0].copy_(self.header))
        self.received.append((source, xs[0]))
        return Work(xs[0].zero_)


def zero_comm(n: int) -> tuple[Any, ZeroBackend]:
    """Rank 1 of n, which receives zeros, and its backend."""
    backend = ZeroBackend({}, 1)
    return InMemoryComm({"a": n}, {"a": 1}, backend), backend


def memory(messages: list[tuple[int, Tensor]]) -> list[tuple[int, int, int]]:
    """List (the other rank, address, bytes) of each message."""
    return sorted((r, x.data_ptr(), x.nbytes) for r, x in messages)


def at(r: int, x: Tensor) -> tuple[int, int, int]:
    return r, x.data_ptr(), x.nbytes


def test_large_tensors_are_sent_and_received_without_a_copy():
    comm, backend = zero_comm(3)
    x, whole = torch.ones(40_000), torch.zeros(120_000)
    comm.gather([x], [whole], [0], ("a",))()
    assert memory(backend.sent) == sorted([at(0, x), at(2, x)])
    assert memory(backend.received) == sorted([at(0, whole[:40_000]), at(2, whole[80_000:])])

    comm, backend = zero_comm(3)
    (total,) = comm.scatter([whole], [0], ("a",))()
    assert memory(backend.sent) == sorted([at(0, whole[:40_000]), at(2, whole[80_000:])])
    assert at(0, total) in memory(backend.received)  # the sum is computed in the first received part

    comm, backend = zero_comm(2)
    (total,) = comm.reduce([x], ("a",), fresh=True)()
    assert (memory(backend.sent), memory(backend.received)) == ([at(0, x)], [at(0, total)])

    comm, backend = zero_comm(3)  # of three, each sums a third
    comm.reduce([whole], ("a",))()
    mine = whole[40_000:80_000]
    assert memory(backend.sent) == sorted([at(0, whole[:40_000]), at(2, whole[80_000:]), at(0, mine), at(2, mine)])
    assert [m for m in memory(backend.received) if m in (at(0, whole[:40_000]), at(2, whole[80_000:]))]

    comm, backend = zero_comm(3)
    (total,) = comm.reduce([whole], ("a",), fresh=True)()  # both rounds are received in the result: no other buffer
    assert memory(backend.received) == sorted([at(0, total[:40_000]), at(2, total[80_000:])] * 2)


def test_small_tensors_share_one_message_to_each_rank():
    small, large = [torch.ones(10, 3), torch.ones(1), torch.ones(0), torch.ones(100)], torch.ones(30_000)
    whole = lambda xs: [torch.ones(3 * len(x), *x.shape[1:]) for x in xs]  # noqa: E731
    for start in (
        lambda comm, xs: comm.gather(xs, whole(xs), [0] * len(xs), ("a",)),
        lambda comm, xs: comm.scatter(whole(xs), [0] * len(xs), ("a",)),
    ):
        comm, backend = zero_comm(3)
        start(comm, [small[0], large, *small[1:]])()
        sizes = [(r, size) for r, _, size in memory(backend.sent)]
        assert sorted(sizes) == [(0, 4 * 131), (0, 4 * 30_000), (2, 4 * 131), (2, 4 * 30_000)]
        assert sorted((r, size) for r, _, size in memory(backend.received)) == sorted(sizes)
    comm, backend = zero_comm(3)
    comm.reduce([*small, torch.ones(())], ("a",))()
    assert [(r, size) for r, _, size in memory(backend.sent)] == [(0, 4 * 132), (2, 4 * 132)]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_bytes_sent_by_gather_scatter_reduce_and_permute_are_the_least(n):
    """A gather or a scatter sends (n-1)/n of the whole, a sum twice that, and uneven parts are not padded."""
    comm, backend = zero_comm(n)
    sizes = part_lengths(30_000 * n - 1, [n])
    whole = torch.ones(sum(sizes))
    count = lambda: sum(x.numel() for _, x in backend.sent)  # noqa: E731
    comm.gather([torch.ones(sizes[1])], [whole], [0], ("a",))()
    assert count() == (n - 1) * sizes[1]
    backend.sent.clear()
    comm.scatter([whole], [0], ("a",))()
    assert count() == sum(sizes) - sizes[1]
    backend.sent.clear()
    comm.reduce([whole], ("a",))()
    assert abs(count() - 2 * (n - 1) / n * whole.numel()) <= 2 * n
    backend.sent.clear()
    comm.permute(whole, [(0, 1)], ("a",))
    assert count() == 0


def test_dropped_transfer_is_received_before_the_next_one_starts():
    comm, backend = zero_comm(2)
    received = []
    receive = backend.recv
    backend.recv = lambda xs, of, tag: (  # type: ignore[method-assign]
        receive(xs, of, tag) if tag == HEADER_TAG else Work(lambda: received.append(tag))
    )
    pending = comm.gather([torch.ones(3)], [torch.empty(6)], [0], ("a",))
    del pending
    assert received == []
    comm.gather([torch.ones(3)], [torch.empty(6)], [0], ("a",))
    assert len(received) == 1


# --- ranks that disagree -------------------------------------------------------------------------------------------

A, AB, BA = ("a",), ("a", "b"), ("b", "a")


def halves(x: Tensor) -> Any:
    return x.tensor_split(2)


# Calls of equal bytes where the name does not say otherwise: of rank 0, and of the other ranks.
DISAGREEMENTS: dict[str, tuple[Any, Any]] = {
    "operation": (lambda c, x: c.all_reduce(x, "sum", A), lambda c, x: c.all_reduce(x, "max", A)),
    "order": (lambda c, x: [c.all_reduce(x, op, A) for op in ("max", "min")],
              lambda c, x: [c.all_reduce(x, op, A) for op in ("min", "max")]),
    "dtype": (lambda c, x: c.all_reduce(x, "sum", A), lambda c, x: c.all_reduce(x.view(torch.int32), "sum", A)),
    "size": (lambda c, x: c.all_reduce(x, "sum", A), lambda c, x: c.all_reduce(x[3:], "sum", A)),
    "parts": (lambda c, x: c.reduce([x], A)(), lambda c, x: c.reduce([*halves(x)], A)()),
    "tensors of a gather": (lambda c, x: c.gather([x[:2], x[2:4]], [x[6:12], x[:6].clone()], [0, 0], A)(),
                            lambda c, x: c.gather([x[:3], x[3:4]], [x[3:12], x[:3].clone()], [0, 0], A)()),
    "dims of a gather": (lambda c, x: c.gather([x[:3].view(1, 3)], [torch.ones(3, 3)], [0], A)(),
                         lambda c, x: c.gather([x[:3].view(3, 1)], [torch.ones(3, 3)], [1], A)()),
    "shape": (lambda c, x: c.all_reduce(x[:4].view(1, 4), "sum", A),
              lambda c, x: c.all_reduce(x[:4].view(4, 1), "sum", A)),
    "verb": (lambda c, x: c.all_gather(x, A), lambda c, x: c.all_reduce(x.repeat(3), "sum", A)),
    "scatter": (lambda c, x: c.reduce_scatter(x.expand(3, -1), A), lambda c, x: c.all_to_all(x.repeat(3, 1), A)),
    "pairs": (lambda c, x: c.permute(x, [(0, 1)], A), lambda c, x: c.permute(x, [(1, 0)], A)),
    "no pairs": (lambda c, x: c.permute(x, [(2, 0)], A), lambda c, x: c.permute(x, [], A)),
    "order of axes": (lambda c, x: c.all_gather(x, AB), lambda c, x: c.all_gather(x, BA)),
    "agreement": (lambda c, x: c.agree("psum", A, x.device), lambda c, x: c.agree("pmax", A, x.device)),
    "agreement and transfer": (lambda c, x: c.agree("psum", A, x.device), lambda c, x: c.all_reduce(x, "sum", A)),
}  # fmt: skip


@pytest.mark.parametrize(  # in one small message; large messages, and sums in two rounds
    ("name", "size"),
    slow_unless([*((name, 12) for name in DISAGREEMENTS), *((name, 50_001) for name in ("order", "size", "verb"))],
                itertools.product(DISAGREEMENTS, (12, 50_001))),
)  # fmt: skip
def test_ranks_in_different_collectives_all_raise_and_may_go_on(name, size):
    sizes = {"a": 2, "b": 2} if name == "order of axes" else {"a": 3}

    def f(comm: Any, rank: int) -> str:
        with pytest.raises(fs.ShardingError) as e:
            DISAGREEMENTS[name][rank > 0](comm, torch.ones(size))
        for k in range(3):  # no message of the failed call is received by a later one
            x = torch.full((size,), float(comm.coords["a"] + k))
            assert comm.all_reduce(x, "max", A).unique().tolist() == [sizes["a"] - 1 + k]
        return str(e.value)

    agreeing = {"agreement": {0, 1, 2}, "agreement and transfer": {0}}.get(name, set())
    for rank, message in enumerate(run_in_memory(sizes)(f)):
        first, *rows, _ = message.splitlines()
        assert first == "the ranks disagree on a collective"
        # The line of that rank, and of those that agree first, as in a checked call.
        assert message.count(", at test_pending_transfers.py:") == len({rank} | agreeing)
        calls = {re.sub(r"  \w.*=\d  |, at .*", "", row) for row in rows}
        assert len(calls) == 2, message


@pytest.mark.parametrize("size", [1, 50_001])
@pytest.mark.parametrize("kind", RUNS)
def test_counts_of_rows_that_do_not_fit_name_both_ranks_on_both(kind, size):
    """Rank 1 sends rank 2 two rows and says three; rank 0 goes on."""

    def f(comm: Any, rank: int) -> str | None:
        send, receive = [[0, 1, 0], [0, 0, 2], [1, 0, 0]][rank], [[0, 0, 1], [1, 0, 0], [0, 3, 0]][rank]
        try:
            comm.all_to_all_rows(torch.ones(sum(send), size), send, receive, A, exchanged=False)
        except fs.ShardingError as e:
            if kind == "simulated":  # ends every rank
                raise
            text = str(e)
        else:
            text = None
        assert comm.all_reduce(torch.ones(9), "sum", A)[0] == 3  # no message of the failed call is received by another
        return text

    want = "all_to_all_rows: rank 1 sends 2 rows to rank 2, which expects 3\n"
    if kind == "simulated":
        with pytest.raises(fs.ShardingError, match=want):
            RUNS[kind]({"a": 3})(f)
        return
    texts = RUNS[kind]({"a": 3})(f)
    assert [text is not None and text.startswith(want) for text in texts] == [kind == "functional", True, True]


def test_error_text_of_ranks_in_different_collectives():
    def f(comm: Any, rank: int) -> str:
        with pytest.raises(fs.ShardingError) as e:
            comm.all_reduce(torch.ones(12), "sum", A) if rank else comm.gather(
                [torch.ones(2)], [torch.ones(4)], [0], A
            )()
        return str(e.value)

    where = f"test_pending_transfers.py:{f.__code__.co_firstlineno + 2} in f"
    assert run_in_memory({"a": 2})(f) == [
        "the ranks disagree on a collective\n"
        f"  a=0  all_gather over a of float32 [4], dims [0]{at0}\n"
        f"  a=1  all_reduce over a of float32 [12]{at1}\n"
        "  fix: every rank must call the same collectives in the same order, on equal shapes"
        for at0, at1 in ((f", at {where}", ""), ("", f", at {where}"))
    ]


def test_messages_of_different_transfers_never_match():
    """Tags of a transfer, of its second round, of other descriptions and of the next transfers all differ."""
    tags = []
    for k in (0, 1):
        comm, backend = zero_comm(3)
        for _ in range(3):
            comm.reduce([torch.ones(50_000 + k)], A)()
        tags += [tag for to, tag in backend.tags if to == 2]
    assert len(set(tags)) == len(tags) == 12
    assert all(0 < tag < 1 << 31 for tag in tags)
