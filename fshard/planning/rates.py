"""Rates of the devices of a mesh, measured by it: products, memory, the start of an operation, collectives."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fshard._core.region import region
from fshard._core.transfers import Transfer
from fshard.collectives import all_gather, all_to_all, ppermute, psum, psum_scatter
from fshard.errors import checked, must_be
from fshard.init import zeros
from fshard.mesh import Mesh, make_mesh
from fshard.random import key
from fshard.shard_map import shard_map
from fshard.sharded import materialize
from fshard.spec import P, short_dtype

from .device import Device, Link, cost_names
from .events import Operation, Start, Wait
from .measure import CudaClock, HostClock, Recorder
from .reference import SIZES, Program, train_step
from .roofline import roofline

_Cost = tuple[float, float, float]  # of `Device.costs`
_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
_FEW, _MANY = 2**10, 2**22  # bytes of a transfer on a rank: latency, and bandwidth
_ROUNDS = 4
_REPEATS = 3  # of a reference step
_SHORTEST = 2e-6  # seconds of an operation: the errors of shorter ones count less


@checked
def measure(mesh: Mesh | None = None, *, seconds: float = 6.0) -> Device:
    """Measure the device of this process, and the links of a mesh: in about `seconds`.

    `flops` are the best of square products of several sizes, `bandwidth` is of copies. `costs` are of the operations of
    small train steps: a transformer, a perceptron, convolutions, recurrent layers, functions of elements; in float32,
    and on an accelerator in bfloat16. `launch` is for operations that these do not have. Each axis of the mesh, the
    last one nearest, is a `Link`, by the time of an all_reduce of 1 KiB and of 4 MiB. One rank has no link. Rates are
    for the threads of this process: ranks that share its cores share them. All ranks call it together, and return the
    rates of rank 0. On a CPU with one thread its seconds, but for links, leave out the time of other programs.

    >>> device = fs.devices.measure(fs.make_mesh(data=2), seconds=0.3)
    >>> device.links[0].name, device.efficiency, "aten.mm f32" in device.costs
    ('data', 1.0, True)

    Raises ShardingError for an abstract mesh, and for seconds that are not in (0, 600].
    """
    if not 0 < seconds <= 600:
        raise must_be("devices.measure: seconds", "a number in (0, 600]", seconds, "measure(seconds=6)")
    if mesh is None:
        mesh = make_mesh(kind="simulated", data=1)
    elif mesh.kind == "abstract":
        raise must_be("devices.measure: mesh", "a mesh of devices", mesh, "make_mesh(data=8) under a launcher")
    device, each = mesh.device, seconds / 2 / (len(_DTYPES) + 1 + len(mesh.axes))
    flops = {dtype: rate for dtype in _DTYPES if (rate := _product_rate(dtype, device, each))}
    source = torch.zeros(2**22, device=device)
    copy = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / min(_times(lambda: copy.copy_(source), device, each))
    costs = _costs(device, seconds / 2)
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    made = Device(name, flops, _memory_of(device), bandwidth, _links(mesh, each), launch=costs["elementwise f32"][0],
                  queued=device.type != "cpu", costs=costs)  # fmt: skip
    return mesh.gather_objects(made, "to measure a device")[0]  # type: ignore[no-any-return]


def _memory_of(device: torch.device) -> int:
    if device.type != "cpu":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _costs(device: torch.device, seconds: float) -> dict[str, _Cost]:
    """Return costs of the operations of reference steps, by name and by kind, and what phases add to each operation.

    1. Each step runs unchanged, and with a recorder of its operations. 2. A line is fitted to the seconds of each name,
    and of each kind. 3. What steps take beyond their operations is fitted to the operations of each phase and to their
    bytes; it is negative if it takes longer to record an operation than to start one.
    """
    threads = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    clock = HostClock(0.0, threads) if device.type == "cpu" else CudaClock(device, time.perf_counter())
    mesh, spent = make_mesh(kind="simulated", device=device, rank=1), 0.0
    rows: dict[str, list[tuple[float, ...]]] = {}
    steps: list[tuple[float, ...]] = []
    for dtype, (make, *size) in itertools.product(_DTYPES[: 1 if device.type == "cpu" else 2], SIZES):
        if spent > seconds:
            break
        took, operations = _run_step(make(*size), mesh, dtype, clock)
        spent += 2 * _REPEATS * took
        for e, each in operations:
            for name in cost_names(e.name, e.kind):
                rows.setdefault(f"{name} {short_dtype(e.dtype)}", []).append((e.bytes, e.flops or 0, each))
        backward = sum(e.phase == "backward" for e, _ in operations)
        counts = len(operations) - backward, backward, sum(e.bytes for e, _ in operations)
        steps.append((*counts, took, sum(each for _, each in operations)))
    *counted, seconds_of, inside = np.array(steps).T
    first, later, byte = np.linalg.lstsq((counted / seconds_of).T, 1 - inside / seconds_of)[0].tolist()
    phases = {"forward": (first, byte, 0.0), "backward": (later, byte, 0.0)}
    return {name: _line(*np.array(row).T) for name, row in rows.items()} | phases


def _run_step(
    program: Program, mesh: Mesh, dtype: torch.dtype, clock: HostClock | CudaClock
) -> tuple[float, list[tuple[Operation, float]]]:  # fmt: skip
    """Return the seconds of a reference step, and its operations with theirs: medians."""
    step, args = train_step(program, mesh.device, dtype)
    recorders: list[Recorder] = []

    def recorded(*inputs: Any) -> Any:
        recorders.append(Recorder(clock, region().comm, mesh.device, inputs, buffers=False))
        with recorders[-1]:
            return step(*inputs)

    plain, other = (shard_map(f, mesh=mesh, in_specs=(P(),) * len(args), out_specs=P(), check="never")
                    for f in (step, recorded))  # fmt: skip
    plain(*args)
    stamps = []
    for _ in range(_REPEATS):
        stamps.append(clock.now())
        plain(*args)
        stamps.append(clock.now())
        other(*args)
    times = clock.seconds(stamps)
    took = statistics.median(b - a for a, b in zip(times[::2], times[1::2], strict=True))
    runs = zip(*(r.record().entries for r in recorders), strict=True)
    medians = [(run[0].event, statistics.median(e.end - e.start for e in run)) for run in runs]
    return took, [(e, seconds) for e, seconds in medians if isinstance(e, Operation) and e.bytes]


def _line(nbytes: Any, flops: Any, seconds: Any) -> _Cost:
    """Return the line with coefficients of 0 or more that has the least sum of squared errors / seconds.

    A sum of squared relative errors would be least for a line that is too low, and plans add up many operations.
    """
    weights = 1 / np.sqrt(np.maximum(seconds, _SHORTEST))
    columns, best, found = np.stack([np.ones_like(seconds), nbytes, flops], 1) * weights[:, None], math.inf, np.zeros(3)
    for keep in itertools.product((0, 1), repeat=3):
        x = np.linalg.lstsq(columns * keep, seconds * weights)[0]
        error = float(((columns @ x - seconds * weights) ** 2).sum())
        if (x >= 0).all() and error < best:
            best, found = error, x
    return float(found[0]), float(found[1]), float(found[2])


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


def compare_transfers(mesh: Mesh, device: Device) -> list[ComparedTransfer]:
    """Return measured transfers of two sizes over each axis of a mesh, and their seconds in plans with `device`."""
    found = []
    for axis, n in mesh.axes.items():
        for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute") if n > 1 else ():
            for nbytes in (_FEW, _MANY):
                kept = nbytes // n if op in ("reduce_scatter", "all_to_all") else 0
                transfer = Transfer(op, (axis,), torch.float32, nbytes, ranks=n, kept=kept)
                planned = roofline([Start(transfer, 0, 0), Wait(0, 0)], mesh.axes, device).seconds
                measured = transfer_seconds(mesh, op, (axis,), nbytes, 0.2)
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
        return min(_times(lambda: g(x), mesh.device, seconds / 2, mesh))

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


def _times(f: Callable[[], object], device: torch.device, seconds: float, mesh: Mesh | None = None) -> list[float]:
    """Return the seconds of each call of `f`, at least five, after two that are not counted.

    The ranks of a mesh call it equally often.
    """

    def once() -> float:
        start = time.perf_counter()
        f()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter() - start

    once()
    count = max(5, int(seconds / max(once(), 1e-7)))
    return [once() for _ in range(min(mesh.gather_objects(count, "to measure transfers")) if mesh else count)]


def _loopback(seconds: float) -> tuple[float, float]:
    """Return bytes/s and latency, half of a round trip, of a TCP connection of this machine with itself."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        block, into = bytes(2**20), bytearray(2**20 - 1)

        def echo() -> None:  # a byte for each message: the end of a transfer
            for first in iter(lambda: far.recv(1), b""):
                if first == b"\0" or far.recv_into(into, flags=socket.MSG_WAITALL) == len(into):
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
    return len(block) / max(block_trip - trip, 1e-9), trip / 2
