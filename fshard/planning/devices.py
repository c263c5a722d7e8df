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

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from fshard.errors import checked, fail

from .device import Device, Link, read, write
from .plan import Plan
from .rates import measure, this_cpu
from .roofline import Roofline, joined

__all__ = ["A100", "A100_40GB", "B200", "H100", "H200", "MI300X", "TPU_V5P", "Device", "Link", "calibrated", "fitted",
           "measure", "of", "this_cpu", "with_bus_bandwidth", "write"]  # fmt: skip


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

# Efficiency: of the H100 from `python -m tests.benchmarks.published_layouts`, of the A100 from torchtitan's first row
# in `published.csv`. Seconds to start an operation: with them 1.34B in TP 8 on one sequence takes as long as measured
# in `published_layouts.csv`. By 3.57B it would be 25 us. An eager program of another library runs other operations.
# Attention: of FlashAttention-2, 35% on an H100 (arXiv:2407.08608); on an A100 the middle of 50% to 73% (2307.08691).
_HOPPER_FITTED, _AMPERE_FITTED = (0.744, 26e-6, 0.35), (0.708, 26e-6, 0.61)
_FITTED = {"H100": _HOPPER_FITTED, "H200": _HOPPER_FITTED, "A100": _AMPERE_FITTED, "A100-40GB": _AMPERE_FITTED}
_LEAST = 0.05  # a lower efficiency is something else
_KNOWN = {device.name.lower(): device for device in (A100, A100_40GB, H100, H200, B200, MI300X, TPU_V5P)}


@checked
def of(name: str) -> Device:
    """Return a device by its name, in any case, or by its JSON file; "cpu" is `this_cpu()`.

    >>> fs.devices.of("h100").name
    'H100'

    Raises ShardingError for an unknown name, and for a file that `write` has not written.
    """
    if name.endswith(".json"):
        return read(name)
    key = name.strip().lower().replace("_", "-")
    if key == "cpu":
        return this_cpu()
    if key not in _KNOWN:
        raise fail(f"devices.of: name: no device is called {name!r}",
                   fix=f"one of {', '.join(sorted(_KNOWN))}, cpu; or device.json, by fshard measure")  # fmt: skip
    return _KNOWN[key]


@checked
def fitted(device: Device) -> Device:
    """Return a device of this file with the efficiencies and the launch that were measured; others unchanged.

    The efficiency is of large products in a program that is not compiled, the launch of operations that Python starts,
    `attention` of FlashAttention-2. An H200 has the units of an H100; the launch was measured on an H100.

    >>> fs.devices.fitted(fs.devices.H100).efficiency < 1, fs.devices.fitted(fs.devices.B200).is_bound
    (True, True)
    """
    if device.name not in _FITTED or not device.is_bound:  # it was measured
        return device
    efficiency, launch, attention = _FITTED[device.name]
    return replace(device, efficiency=efficiency, launch=launch, attention=attention)


@checked
def calibrated(plan: Plan, seconds: float) -> Device:
    """Return the device of a plan with the efficiency at which it takes the seconds that its step was measured to take.

    Its links, launch and share of attention stay. Plan other layouts with it.

    >>> step = shard_map(lambda x: x @ x @ x, mesh=make_mesh(data=2), in_specs=P(), out_specs=P())
    >>> p = plan(step, fs.init.zeros((8192, 8192), dtype=torch.bfloat16), device=fs.devices.H100)
    >>> round(fs.devices.calibrated(p, seconds=4e-3).efficiency, 3)
    0.591

    Raises ShardingError for a plan without a device, and for seconds that no efficiency from 0.05 to 1 gives.
    """
    if (device := plan.device) is None:
        raise fail("calibrated: plan: it has no device", fix="fs.plan(step, *args, device=devices.H100)")
    events = {p.rank: p.events for p in plan.positions or (plan,)}

    def at(efficiency: float) -> Roofline:
        return joined(events, plan.mesh, replace(device, efficiency=efficiency))[0]

    too, e = ("fast", 1.0) if seconds < at(1.0).seconds else ("slow", _LEAST)
    if e == 1 or not seconds <= at(e).seconds:
        raise fail(f"calibrated: seconds: a step of {seconds:.3g} s is too {too} for any efficiency of {device.name}",
                   f"planned with {e:g}  {at(e)!r}", f"measured  {at(e).flops_at_peak / (seconds or 1e-9):.1%} MFU",
                   fix="plan the layout, batch and length that were measured; a rate is of one device; measure its "
                       "network (with_bus_bandwidth, --bus-bandwidth)")  # fmt: skip
    return replace(device, efficiency=efficiency_at(lambda e: at(e).seconds, seconds), calibrated=True)


def efficiency_at(seconds: Callable[[float], float], measured: float) -> float:
    """Return the efficiency at which predicted seconds, which fall with it, are the measured ones: by bisection."""
    low, high = _LEAST, 1.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) > measured else (low, middle)
    return (low + high) / 2


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
