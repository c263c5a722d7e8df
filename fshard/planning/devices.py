"""Devices that a step can be planned for: rates, memory and links, as their makers publish them.

A `Device` is plain data. `H100`, `H200`, `B200`, `A100`, `A100_40GB`, `MI300X` and `TPU_V5P` are eight (a TPU: a pod)
in a node with a network beyond it; `of("h100")` finds one by name, `this_cpu()` measures this machine, and your own is

    Device("my-gpu", flops={torch.bfloat16: 400e12}, memory=48 * 2**30, bandwidth=1e12,
           links=(Link("PCIe", 8, 25e9, 5e-6), Link("Ethernet", None, 12.5e9, 30e-6)))

or `dataclasses.replace(H100, memory=96 * 2**30, bandwidth=2.4e12)`.

FLOP/s are dense: data sheets often print twice as many, with sparsity. float32 is the rate of float32 units, as torch
computes unless it is allowed TF32. The bandwidth of a link is what one device sends in one direction: half of the "900
GB/s" of NVLink. Memory is in the GiB that makers call GB; a CUDA context and libraries take one or two of them.
Latencies of links are per step of a ring in NCCL's cost model, for NVLink and for the network.

Sources: NVIDIA, "A100 Tensor Core GPU" data sheet (nvidia.com, 1758950-r4); "H100 Tensor Core GPU Architecture" (2022),
table 2; "H200 Tensor Core GPU" (nvidia.com/en-us/data-center/h200); "Blackwell Architecture Technical Brief" (2024),
HGX B200; AMD, "Instinct MI300X Accelerator" data sheet and "CDNA 3" white paper (2023); Google Cloud, "TPU v5p"
(cloud.google.com/tpu/docs/v5p); NVIDIA, NCCL, `src/graph/tuning.cc`, `hwLat`, the ring with LL128.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from fshard.errors import checked, fail, must_be

__all__ = ["A100", "A100_40GB", "B200", "H100", "H200", "MI300X", "TPU_V5P", "Device", "Link", "of", "this_cpu",
           "with_bus_bandwidth"]  # fmt: skip


class Link(NamedTuple):
    """One level of the network: all links between the devices of a group of `ranks` consecutive ones.

    `ranks`: None for any number. `bandwidth`: bytes/s that each device sends. `latency`: seconds of one step.

    >>> fs.devices.H100.links[0]
    Link(name='NVLink', ranks=8, bandwidth=450000000000.0, latency=1.9e-06)
    """

    name: str
    ranks: int | None
    bandwidth: float
    latency: float


@checked
@dataclass(frozen=True)
class Device:
    """One device and the links between its kind, from the nearest outwards.

    `flops`: FLOP/s of matrix products, by dtype. `memory`: bytes. `bandwidth`: bytes/s of that memory, reads and
    writes. `links`: none for a single device.
    `efficiency`: the share of `flops` that products reach in a program, from 0 to 1: the one number to fit to a
    measured step. 1 is the bound of the hardware; 0.5 to 0.75 are usual.

    >>> fs.devices.H100.flops[torch.bfloat16] / 1e12, fs.devices.H100.memory // 2**30
    (989.4, 80)

    Raises ShardingError for rates that are not positive, and for links that do not reach further one after the other.
    """

    name: str
    flops: Mapping[torch.dtype, float] = field(hash=False)
    memory: int
    bandwidth: float
    links: tuple[Link, ...] = ()
    efficiency: float = 1.0
    launch: float = 0.0

    @property
    def is_bound(self) -> bool:
        """True if seconds are a lower bound: neither number is fitted or measured."""
        return self.efficiency == 1 and self.launch == 0

    def __post_init__(self) -> None:
        numbers = {"memory": self.memory, "bandwidth": self.bandwidth, "efficiency": self.efficiency}
        numbers |= {f"flops[{dtype}]": rate for dtype, rate in self.flops.items()}
        for link in self.links:
            numbers |= {f"bandwidth of {link.name}": link.bandwidth}
        if self.efficiency > 1:
            raise fail(f"Device {self.name!r}: efficiency is {self.efficiency}", "it is a share of flops",
                       fix="a number from 0 to 1; a device that computes faster has larger flops")  # fmt: skip
        for name, x in numbers.items():
            if not 0 < x < math.inf:
                raise must_be(f"Device {self.name!r}: {name}", "a positive number", x)
        for link in self.links:
            if not 0 <= link.latency < math.inf:
                raise must_be(f"Device {self.name!r}: latency of {link.name}", "seconds, 0 or more", link.latency)
        reach = [math.inf if link.ranks is None else link.ranks for link in self.links]
        if any(n < 2 for n in reach) or any(a >= b or (b < math.inf and b % a) for a, b in itertools.pairwise(reach)):
            levels = ", ".join(f"{link.name} {link.ranks}" for link in self.links)
            raise fail(
                f"Device {self.name!r}: each level of links joins a multiple of the ranks of the one before",
                f"links: {levels}", fix="order them from the nearest outwards; None as the last is any number",
            )  # fmt: skip

    def __repr__(self) -> str:
        links = ", ".join(f"{link.name} {link.bandwidth / 1e9:g} GB/s" for link in self.links)
        best = max(self.flops, key=lambda dtype: (dtype is torch.bfloat16, self.flops[dtype]), default=None)
        rate = f"{self.flops[best] / 1e12:,.4g} TFLOP/s {str(best).removeprefix('torch.')}, " if best else ""
        share = f", efficiency {self.efficiency:.2f}" if self.efficiency != 1 else ""
        return (f"Device({self.name}: {rate}{self.memory / 2**30:,.3g} GiB at {self.bandwidth / 1e12:.3g} TB/s, "
                f"{links or 'no links'}{share})")  # fmt: skip


_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FP8_AMD = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_HALF = (torch.bfloat16, torch.float16)
_STEP, _NETWORK_STEP = 1.9e-6, 4.0e-6


def _rates(*rates: tuple[tuple[torch.dtype, ...], float]) -> dict[torch.dtype, float]:
    return {dtype: tera * 1e12 for dtypes, tera in rates for dtype in dtypes}


def _node(nearest: str, bandwidth: float, network: float) -> tuple[Link, ...]:
    return (Link(nearest, 8, bandwidth, _STEP), Link("InfiniBand", None, network, _NETWORK_STEP))


_INT8 = (torch.int8,)
_HOPPER = _rates(((*_FP8, *_INT8), 1978.9), (_HALF, 989.4), ((torch.float32, torch.float64), 66.9))
_AMPERE = _rates((_INT8, 624), (_HALF, 312), ((torch.float32, torch.float64), 19.5))
_GIB = 2**30

# SXM boards, in nodes of 8 with one 400 Gb/s port for each device (A100: 200 Gb/s).
A100 = Device("A100", _AMPERE, 80 * _GIB, 2.039e12, _node("NVLink", 300e9, 25e9))
A100_40GB = Device("A100-40GB", _AMPERE, 40 * _GIB, 1.555e12, _node("NVLink", 300e9, 25e9))
H100 = Device("H100", _HOPPER, 80 * _GIB, 3.35e12, _node("NVLink", 450e9, 50e9))
H200 = Device("H200", _HOPPER, 141 * _GIB, 4.8e12, _node("NVLink", 450e9, 50e9))
B200 = Device("B200", _rates(((*_FP8, *_INT8), 4500), (_HALF, 2250), ((torch.float32,), 80), ((torch.float64,), 40)),
              180 * _GIB, 8e12, _node("NVLink", 900e9, 50e9))  # fmt: skip
# 7 links of 64 GB/s each way, one to each other device of the node
MI300X = Device("MI300X", _rates(((*_FP8_AMD, *_INT8), 2614.9), (_HALF, 1307.4),
                                 ((torch.float32, torch.float64), 163.4)),
                192 * _GIB, 5.3e12, _node("Infinity Fabric", 448e9, 50e9))  # fmt: skip
# 1,200 GB/s in both directions of 6 links, 2 along each axis of the torus: 200 GB/s for a ring.
TPU_V5P = Device("TPU-v5p", _rates(((*_FP8, torch.bfloat16), 459), (_INT8, 918)), 95 * _GIB, 2.765e12,
                 (Link("ICI", 8960, 200e9, 1e-6), Link("DCN", None, 6.25e9, 10e-6)))  # fmt: skip

_KNOWN = {device.name.lower(): device for device in (A100, A100_40GB, H100, H200, B200, MI300X, TPU_V5P)}


@checked
def of(name: str) -> Device:
    """Return a device by its name, in any case; "cpu" is `this_cpu()`.

    >>> fs.devices.of("h100").name
    'H100'

    Raises ShardingError for an unknown name.
    """
    key = name.strip().lower().replace("_", "-")
    if key == "cpu":
        return this_cpu()
    if key not in _KNOWN:
        raise fail(f"devices.of: name: no device is called {name!r}",
                   fix=f"one of {', '.join(sorted(_KNOWN))}, cpu; or make an fs.devices.Device")  # fmt: skip
    return _KNOWN[key]


@checked
def with_bus_bandwidth(device: Device, measured: Mapping[int, float]) -> Device:
    """Return the device with a network as fast as sums were measured: "busbw" of nccl-tests.

    A ring over n ranks passes between groups of p, the ranks of the level before, on the links of p of them at a time.
    So a level has 1/p of what the sum over its ranks reaches. The nearest links and the latencies stay.

    Args:
        measured: bytes/s of an all_reduce of many bytes, 2 (n - 1) / n of its bytes / its seconds, by the number n of
            ranks, from the fewest: each a multiple of the one before, the first of those in a node. What was measured
            for the most ranks is taken for more, too.

    >>> slow = with_bus_bandwidth(H100, {16: 362e9, 32: 160e9, 512: 33e9})       # 2, 4 and 64 nodes
    >>> [(link.name, link.ranks, round(link.bandwidth / 1e9, 2)) for link in slow.links]
    [('NVLink', 8, 450.0), ('16 ranks', 16, 45.25), ('32 ranks', 32, 10.0), ('512 ranks', None, 1.03)]

    Raises ShardingError for a device without links, and for ranks that are not such multiples.
    """
    if not device.links:
        raise fail(f"with_bus_bandwidth: {device.name} has no links", fix="give the Device a Link for those in a node")
    if not measured:
        raise fail("with_bus_bandwidth: measured is empty", fix="bytes/s by ranks: {16: 362e9}")
    nearest, network = device.links[0], device.links[-1]
    if nearest.ranks is None:
        raise fail(f"with_bus_bandwidth: {nearest.name} of {device.name} joins any number of ranks, so no network is "
                   "beyond it", fix="give the Device a first Link with the ranks of a node")  # fmt: skip
    levels, before = [nearest], nearest.ranks
    for n, rate in measured.items():
        if n <= before or n % before:
            raise fail(
                f"with_bus_bandwidth: measured over {n} ranks, after {before}", measured=dict(measured),
                fix=f"multiples of {nearest.ranks}, the ranks of {nearest.name}, and each of the one before",
            )  # fmt: skip
        levels.append(Link(f"{n} ranks", n, rate / before, network.latency))
        before = n
    levels[-1] = levels[-1]._replace(ranks=None)
    return replace(device, links=tuple(levels))


@checked
def this_cpu(*, seconds: float = 1.5) -> Device:
    """Measure this machine, in about `seconds`: products of matrices by dtype, a copy in memory, a loopback link.

    The rates are for the threads of this process (`torch.get_num_threads`): ranks that share its cores share them.
    The link is TCP over the loopback interface, as gloo uses it between processes of one machine. `memory` is the
    machine's. Each rate is the best of several runs.

    >>> device = fs.devices.this_cpu(seconds=0.3)
    >>> device.name, device.flops[torch.float32] > 0
    ('cpu', True)

    Raises ShardingError for seconds that are not in (0, 600].
    """
    if not 0 < seconds <= 600:
        raise must_be("devices.this_cpu: seconds", "a number in (0, 600]", seconds, "this_cpu(seconds=1.5)")
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    each = seconds / (len(dtypes) + 2)
    flops = {dtype: _matmul_rate(dtype, each) for dtype in dtypes}
    source = torch.zeros(2**22)
    copy = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / _shortest(lambda: copy.copy_(source), each)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device("cpu", flops, memory, bandwidth, (Link("loopback", None, *_loopback(each)),))


def _matmul_rate(dtype: torch.dtype, seconds: float) -> float:
    """Return FLOP/s of square products, of a size that suits the rate: some CPUs have no half-precision units."""
    rate = 0.0
    for n in (64, 256, 1024):
        x, out = torch.ones(n, n, dtype=dtype), torch.empty(n, n, dtype=dtype)
        if rate and 2 * n**3 / rate > seconds / 4:
            break
        rate = max(rate, 2 * n**3 / _shortest(lambda x=x, out=out: torch.mm(x, x, out=out), seconds / 3))  # type: ignore[misc]
    return rate


def _shortest(f: Callable[[], object], seconds: float) -> float:
    """Return the least seconds of a call of `f`, after one that is not counted; at least three calls."""
    f()
    end, least, calls = time.perf_counter() + seconds, math.inf, 0
    while calls < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        f()
        least, calls = min(least, time.perf_counter() - start), calls + 1
    return least


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

        trip = _shortest(lambda: exchange(b"\0"), seconds / 3)
        block_trip = _shortest(lambda: exchange(b"\1" + block[1:]), seconds / 2)
        near.shutdown(socket.SHUT_WR)
        thread.join()
        far.close()
    return size / max(block_trip - trip, 1e-9), trip / 2
