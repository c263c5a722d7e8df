"""One device as plain data: rates, memory, links, and what is fitted or measured; its file."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fshard.errors import checked, fail, must_be


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
    `efficiency`: the share of `flops` that products reach in a program, from 0 to 1: fit it to a measured step of large
    products. 1 is the bound of the hardware; 0.45 to 0.75 are usual.
    `attention`: the share that fused attention reaches; None for `efficiency`.
    `launch`: seconds that a program takes to start an operation: fit it to a measured step of small ones.
    `queued`: whether operations wait in a queue, so that starting one overlaps with those before; a CPU has none, and
    plans for it run the kernels of CPUs.
    `costs`: measured seconds of operations, in the place of the rates above: to start, for each byte, for each FLOP. By
    name and dtype, "aten.mm f32", "aten.convolution depthwise f32"; by kind, "matmul f32"; and what a phase adds to
    each, "forward", "backward".
    `calibrated`: whether the efficiency is of a measured step (`devices.calibrated`), whose error bars plans then have.

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
    queued: bool = True
    attention: float | None = None
    costs: Mapping[str, tuple[float, float, float]] = field(default_factory=dict, hash=False)
    calibrated: bool = False

    def share_of(self, kind: str) -> float:
        """Return the share of `flops` that operations of a kind reach."""
        return self.attention or self.efficiency if kind == "attention" else self.efficiency

    @property
    def is_bound(self) -> bool:
        """True if seconds are a lower bound: nothing is fitted or measured."""
        return self.efficiency == 1 and self.launch == 0 and self.attention is None and not self.costs

    def __post_init__(self) -> None:
        shares = {"efficiency": self.efficiency} | ({} if self.attention is None else {"attention": self.attention})
        rates = {"memory": self.memory, "bandwidth": self.bandwidth,
                 **{f"flops[{dtype}]": rate for dtype, rate in self.flops.items()},
                 **{f"bandwidth of {link.name}": link.bandwidth for link in self.links}}  # fmt: skip
        seconds = {f"latency of {link.name}": link.latency for link in self.links} | {"launch": self.launch}
        for name, share in shares.items():
            if share > 1:
                raise fail(f"Device {self.name!r}: {name} is {share}", "it is a share of flops",
                           fix="a number from 0 to 1; a device that computes faster has larger flops")  # fmt: skip
        for name, x in (shares | rates).items():
            if not 0 < x < math.inf:
                raise must_be(f"Device {self.name!r}: {name}", "a positive number", x)
        for name, x in seconds.items():
            if not 0 <= x < math.inf:
                raise must_be(f"Device {self.name!r}: {name}", "seconds, 0 or more", x)
        for name, cost in self.costs.items():
            if not all(map(math.isfinite, cost)):
                raise must_be(f"Device {self.name!r}: cost of {name}", "three finite numbers", cost)
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


def cost_names(name: str, kind: str) -> tuple[str, str]:
    """Return the names in `Device.costs` of an operation and, for one that was not measured, of its kind."""
    return name.rstrip("_") + (" depthwise" if kind == "depthwise" else ""), kind


@checked
def write(device: Device, path: str | Path) -> None:
    """Write a device to a JSON file, as `read` reads it.

    >>> devices.write(devices.H100, "device.json")
    >>> devices.read("device.json") == devices.H100
    True
    """
    flops = {str(dtype).removeprefix("torch."): rate for dtype, rate in device.flops.items()}
    links = [link._asdict() for link in device.links]
    Path(path).write_text(json.dumps({**asdict(device), "flops": flops, "links": links}, indent=2) + "\n")


@checked
def read(path: str | Path) -> Device:
    """Return the device of a JSON file. Raises ShardingError for a file that has other fields, or no JSON."""
    try:
        data: dict[str, Any] = json.loads(Path(path).read_text())
        flops = {getattr(torch, name): rate for name, rate in data["flops"].items()}
        links = tuple(Link(**link) for link in data.get("links", ()))
        costs = {name: (start, byte, flop) for name, (start, byte, flop) in data.get("costs", {}).items()}
        return Device(**{**data, "flops": flops, "links": links, "costs": costs})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
        raise fail(f"device: {path} is not the file of a device", f"{type(e).__name__}: {e}",
                   fix="python -m fshard measure --out device.json writes one") from e  # fmt: skip
