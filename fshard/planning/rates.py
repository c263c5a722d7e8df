"""Rates of the devices of a mesh, measured by it: products, memory, the start of an operation, collectives."""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard import tree
from fshard._core.transfers import Transfer
from fshard.collectives import all_gather, all_to_all, ppermute, psum, psum_scatter
from fshard.errors import checked, must_be
from fshard.grad import grad
from fshard.init import zeros
from fshard.mesh import Mesh, make_mesh
from fshard.random import key
from fshard.shard_map import shard_map
from fshard.sharded import materialize
from fshard.spec import P

from .device import Device, Link
from .events import Operation, Start, Wait
from .plan import plan
from .roofline import roofline

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_FEW, _MANY = 2**10, 2**22  # bytes of a transfer on a rank: latency, and bandwidth
_ROUNDS = 4


@checked
def measure(mesh: Mesh | None = None, *, seconds: float = 6.0) -> Device:
    """Measure the device of this process, and the links of a mesh: in about `seconds`.

    `flops` are the best of square products of several sizes. `bandwidth` and `cache` are of copies. `launch` is what an
    operation of a small train step takes beyond its work. Each axis of the mesh, the last one nearest, is a `Link`, by
    the time of an all_reduce of 1 KiB and of 4 MiB. One rank has no link. Each rate is the best of several runs, for
    the threads of this process: ranks that share its cores share them. All ranks call it together, and return the
    rates of rank 0.

    >>> device = fs.devices.measure(fs.make_mesh(data=2), seconds=0.3)
    >>> device.links[0].name, device.efficiency, device.launch > 0
    ('data', 1.0, True)

    Raises ShardingError for an abstract mesh, and for seconds that are not in (0, 600].
    """
    if not 0 < seconds <= 600:
        raise must_be("devices.measure: seconds", "a number in (0, 600]", seconds, "measure(seconds=6)")
    if mesh is None:
        mesh = make_mesh(kind="simulated", data=1)
    elif mesh.kind == "abstract":
        raise must_be("devices.measure: mesh", "a mesh of devices", mesh, "make_mesh(data=8) under a launcher")
    device, each = mesh.device, seconds / (len(_DTYPES) + 2 + len(mesh.axes))
    flops = {dtype: rate for dtype in _DTYPES if (rate := _product_rate(dtype, device, each))}
    copies = {n: _copy_rate(n, device, each / 5) for n in (2**14, 2**16, 2**18, 2**20, 2**24)}  # by bytes
    bandwidth, fastest = copies[2**24], max(copies.values())
    cached = [2 * n for n, rate in copies.items() if rate > (bandwidth + fastest) / 2]
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    made = Device(name, flops, _memory_of(device), bandwidth, queued=device.type != "cpu",
                  cache=max(cached, default=0), cache_bandwidth=fastest)  # fmt: skip
    made = dataclasses.replace(made, launch=_launch(mesh, made, each))
    made = dataclasses.replace(made, links=_links(mesh, each))
    return mesh.gather_objects(made, "to measure a device")[0]  # type: ignore[no-any-return]


def _copy_rate(nbytes: int, device: torch.device, seconds: float) -> float:
    source = torch.zeros(nbytes // 4, device=device)
    copy = torch.empty_like(source)
    return 2 * nbytes / min(_times(lambda: copy.copy_(source), device, seconds))


def _memory_of(device: torch.device) -> int:
    if device.type != "cpu":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _launch(mesh: Mesh, device: Device, seconds: float) -> float:
    """Return the seconds that each operation of a small step takes beyond its work: a perceptron with SGD, 8 layers."""
    weights = [zeros((32, 32)) for _ in range(8)]

    def loss(weights: list[Tensor], x: Tensor) -> Tensor:
        for w in weights:
            x = torch.nn.functional.layer_norm(torch.relu(x @ w), (32,))
        return x.square().mean()

    def step(weights: list[Tensor], x: Tensor) -> Any:
        return tree.map(lambda w, g: w - 0.1 * g, weights, grad(loss)(weights, x))

    one = make_mesh(kind="simulated", device=mesh.device, rank=1)
    f = shard_map(step, mesh=one, in_specs=(P(), P()), out_specs=P())
    planned = plan(f, weights, zeros((16, 32)), device=dataclasses.replace(device, queued=False))
    assert planned.time is not None
    count = len([e for e in planned.events if isinstance(e, Operation) and e.bytes])
    args = materialize((weights, zeros((16, 32))), P(), one, key=key(0))
    took = min(_times(lambda: f(*args), mesh.device, seconds))
    return max(0.0, took - planned.time.seconds) / count


def _links(mesh: Mesh, seconds: float) -> tuple[Link, ...]:
    """Return a level of links for each axis, the last one nearest: a ring's steps and its bytes, as `roofline` does."""
    links: list[Link] = []
    before = 1
    axes: tuple[str, ...] = ()
    for axis in reversed(mesh.axes):
        axes = (axis, *axes)
        n = before * mesh.axes[axis]
        if n > before:
            few, many = (transfer_seconds(mesh, "all_reduce", axes, nbytes, seconds / 2) for nbytes in (_FEW, _MANY))
            slope = max(many - few, 1e-9) / (_MANY - _FEW)
            steps, done = (few - slope * _FEW) / 2, 1
            for link in links:  # the steps within nearer groups
                assert link.ranks is not None
                steps -= (n / done - n / link.ranks) * link.latency
                done = link.ranks
            bandwidth = 2 * (n - 1) / n / slope / before
            links.append(Link(axis, n, bandwidth, max(steps, 0.0) / (n / before - 1)))
            before = n
    return tuple(links[:-1]) + tuple(link._replace(ranks=None) for link in links[-1:])


class ComparedTransfer(NamedTuple):
    """A measured transfer of `nbytes` of each rank, and the seconds that a plan with the measured device gives it."""

    op: str
    axes: tuple[str, ...]
    ranks: int
    nbytes: int
    measured: float
    planned: float


def compare_transfers(mesh: Mesh, device: Device, *, seconds: float = 0.2) -> list[ComparedTransfer]:
    """Return measured transfers of two sizes over each axis of a mesh, and their seconds in plans with `device`."""
    found = []
    for axis, n in mesh.axes.items():
        for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute") if n > 1 else ():
            for nbytes in (_FEW, _MANY):
                kept = nbytes // n if op in ("reduce_scatter", "all_to_all") else 0
                transfer = Transfer(op, (axis,), torch.float32, nbytes, ranks=n, kept=kept)
                planned = roofline([Start(transfer, 0, 0), Wait(0, 0)], mesh.axes, device).seconds
                measured = transfer_seconds(mesh, op, (axis,), nbytes, seconds)
                found.append(ComparedTransfer(op, (axis,), n, nbytes, measured, planned))
    return found


def transfer_seconds(mesh: Mesh, op: str, axes: Sequence[str], nbytes: int, seconds: float) -> float:
    """Return the seconds of a transfer of `nbytes` on each rank: one more of it in a call."""
    names, count = tuple(axes), math.prod(mesh.axes[a] for a in axes)
    elements = max(nbytes // 4 // count, 1) * count
    x = materialize(zeros((elements * count,)), P(names), mesh, key=key(0))
    run: Callable[[Tensor], object] = {
        "all_reduce": lambda x: psum(x, names), "all_gather": lambda x: all_gather(x, names),
        "reduce_scatter": lambda x: psum_scatter(x, names),
        "all_to_all": lambda x: all_to_all(x.view(count, -1), names, split=0, concat=1),
        "permute": lambda x: ppermute(x, names, [(i, (i + 1) % count) for i in range(count)]),
    }[op]  # fmt: skip

    def best(times: int) -> float:
        def f(x: Tensor) -> Tensor:
            for _ in range(times):
                run(x)
            return x

        g = shard_map(f, mesh=mesh, in_specs=P(names), out_specs=P(names))
        agree = lambda calls: max(mesh.gather_objects(calls, "to measure a transfer"))  # noqa: E731
        return min(_times(lambda: g(x), mesh.device, seconds / 2, agree))

    return max(best(_ROUNDS + 1) - best(1), 1e-9) / _ROUNDS


@checked
def this_cpu(*, seconds: float = 1.5) -> Device:
    """Measure this machine, in about `seconds`, by `measure`; its link is TCP over the loopback interface.

    gloo uses that link between processes of one machine. `memory` is the machine's.

    >>> device = fs.devices.this_cpu(seconds=0.3)
    >>> device.name, device.flops[torch.float32] > 0
    ('cpu', True)

    Raises ShardingError for seconds that are not in (0, 600].
    """
    if not 0 < seconds <= 600:
        raise must_be("devices.this_cpu: seconds", "a number in (0, 600]", seconds, "this_cpu(seconds=1.5)")
    device = measure(seconds=seconds * 0.8)
    return dataclasses.replace(device, links=(Link("loopback", None, *_loopback(seconds * 0.2)),))


def _product_rate(dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """Return FLOP/s of square products, of a size that suits the rate: some CPUs have no half-precision units.

    The rate is 0 for a dtype in which the device has no products.
    """
    rate = 0.0
    for n in (64, 256, 1024, 4096, 8192):
        if rate and 2 * n**3 / rate > seconds / 8:
            break
        try:
            x = torch.ones(n, n, dtype=dtype, device=device)
            out = torch.empty_like(x)
            least = min(_times(lambda x=x, out=out: torch.mm(x, x, out=out), device, seconds / 3))  # type: ignore[misc]
        except (RuntimeError, NotImplementedError):
            break
        rate = max(rate, 2 * n**3 / least)
    return rate


def _times(
    f: Callable[[], object], device: torch.device, seconds: float, agree: Callable[[int], int] = lambda calls: calls
) -> list[float]:
    """Return the seconds of each call of `f`, after one that is not counted: five, and as many as fit into `seconds`.

    If `f` communicates, `agree` returns a number of calls that is the same on all ranks.
    """

    def seconds_of_a_call() -> float:
        start = time.perf_counter()
        f()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter() - start

    seconds_of_a_call()
    times = [seconds_of_a_call() for _ in range(5)]
    more = agree(max(0, int((seconds - sum(times)) / min(times))))
    return times + [seconds_of_a_call() for _ in range(more)]


def _loopback(seconds: float) -> tuple[float, float]:
    """Return bytes/s and latency, half of a round trip, of a TCP connection of this machine with itself."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        size = 2**20
        block, into = bytes(size), bytearray(size)

        def receive(n: int, at: socket.socket) -> bool:
            while n and (got := at.recv_into(into, min(n, size))):
                n -= got
            return n == 0

        def echo() -> None:  # a byte for each message: the end of a transfer
            for length in iter(lambda: far.recv(1), b""):
                if receive(size - 1 if length == b"\1" else 0, far):
                    far.sendall(b"\0")

        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        thread = threading.Thread(target=echo, daemon=True)
        thread.start()

        def exchange(message: bytes) -> None:
            near.sendall(message)
            near.recv(1)

        cpu = torch.device("cpu")
        trip = min(_times(lambda: exchange(b"\0"), cpu, seconds / 3))
        block_trip = min(_times(lambda: exchange(b"\1" + block[1:]), cpu, seconds / 2))
        near.shutdown(socket.SHUT_WR)
        thread.join()
        far.close()
    return size / max(block_trip - trip, 1e-9), trip / 2
