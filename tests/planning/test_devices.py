"""The table of devices: what is published, names, and bad numbers; `this_cpu` measures."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import fshard as fs
from fshard import P, devices
from fshard.planning.devices import Device, Link
from tests.lib.assertions import error_text

NAMES = ["a100", "a100-40gb", "b200", "h100", "h200", "mi300x", "tpu-v5p"]


@pytest.mark.parametrize("name", NAMES)
def test_each_device_is_found_by_its_name_and_reaches_any_number_of_ranks(name: str) -> None:
    device = devices.of(name.upper().replace("-", "_"))
    assert device.name.lower() == name
    assert device.links[-1].ranks is None
    assert device.flops[torch.bfloat16] > 0
    assert device.links[0].bandwidth > device.links[-1].bandwidth  # the nearest is the fastest
    assert 10e9 < device.memory < 300e9
    assert 1e12 < device.bandwidth < 1e13


def test_rates_are_dense_and_links_count_one_direction() -> None:
    # "1,979 TFLOPS with sparsity" and "900 GB/s" of data sheets
    assert devices.H100.flops[torch.bfloat16] == pytest.approx(1979e12 / 2, rel=1e-3)
    assert devices.H100.links[0].bandwidth == 900e9 / 2
    # from clocks and units: 132 multiprocessors of 4 tensor cores, 1,024 multiply-adds of half precision, 1.83 GHz
    assert devices.H100.flops[torch.float16] == pytest.approx(132 * 4 * 1024 * 1.83e9, rel=1e-3)
    assert devices.A100.flops[torch.bfloat16] == pytest.approx(108 * 4 * 512 * 1.41e9, rel=1e-3)


@pytest.mark.parametrize(("change", "words"), [
    ({"memory": 0}, "memory must be a positive number, got 0"),
    ({"bandwidth": math.nan}, "bandwidth must be a positive number, got nan"),
    ({"efficiency": -1.0}, "efficiency must be a positive number"),
    ({"efficiency": 60.0}, "efficiency is 60.0\n  it is a share of flops\n  fix: a number from 0 to 1"),
    ({"flops": {torch.bfloat16: math.inf}}, r"flops\[torch.bfloat16\] must be a positive number, got inf"),
    ({"links": (Link("NVLink", 8, 0.0, 1e-6),)}, "bandwidth of NVLink must be a positive number"),
    ({"links": (Link("NVLink", 8, 1e9, -1.0),)}, "latency of NVLink must be seconds"),
    ({"links": (Link("far", None, 1e9, 0.0), Link("near", 8, 1e9, 0.0))}, "links: far None, near 8"),
    ({"links": (Link("near", 8, 1e9, 0.0), Link("rack", 12, 1e9, 0.0))}, "links: near 8, rack 12"),
    ({"links": (Link("self", 1, 1e9, 0.0),)}, "a multiple of the ranks of the one before"),
])  # fmt: skip
def test_numbers_that_no_device_can_have_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(fs.ShardingError, match=words):
        dataclasses.replace(devices.H100, **change)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(fs.ShardingError, match=f"no device is called 'h1000'\n  fix: one of {', '.join(NAMES)}, cpu"):
        devices.of("h1000")


def test_this_cpu_measures_rates_that_torch_reaches() -> None:
    cpu = devices.this_cpu(seconds=0.03)
    assert set(cpu.flops) == {torch.float32, torch.float64, torch.bfloat16, torch.float16}
    assert cpu.flops[torch.float32] > 1e8
    assert cpu.bandwidth > 1e8
    (link,) = cpu.links
    assert link.ranks is None
    assert link.bandwidth > 1e6
    assert 0 < link.latency < 1
    for seconds in (0.0, math.nan, -1.0, 1e9):
        with pytest.raises(fs.ShardingError, match="seconds must be a number in"):
            devices.this_cpu(seconds=seconds)


def test_repr_says_rates_memory_and_links() -> None:
    own = Device("mine", {torch.float32: 5e12}, 8 * 2**30, 5e11, efficiency=0.5)
    assert repr(own) == "Device(mine: 5 TFLOP/s float32, 8 GiB at 0.5 TB/s, no links, efficiency 0.50)"


# --- a measured network -----------------------------------------------------------------------------------------


def test_a_sum_takes_as_long_as_it_was_measured() -> None:
    measured = {16: 362e9, 32: 160e9, 128: 85e9, 512: 33e9}
    device = devices.with_bus_bandwidth(devices.H100, measured)
    assert (device.links[0], device.links[-1].ranks) == (devices.H100.links[0], None)
    for n, rate in measured.items():
        mesh = fs.make_mesh(kind="abstract", data=n)
        step = fs.shard_map(lambda x: fs.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
        seconds = fs.plan(step, fs.init.zeros((n, 2**28)), device=device).time.transfers["data"]
        latencies = 2 * (n * 7 / 8 * device.links[0].latency + (n / 8 - 1) * device.links[1].latency)
        assert seconds == pytest.approx(2 * (n - 1) / n * 2**30 / rate + latencies, rel=1e-6)


def test_two_sums_over_halves_of_each_node_share_its_measured_network() -> None:
    """Rings of every second rank: both together send as fast as one ring of all ranks."""
    device = devices.with_bus_bandwidth(devices.H100, {16: 320e9})
    mesh = fs.make_mesh(kind="abstract", data=8, model=2)
    step = fs.shard_map(lambda x: fs.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    seconds = fs.plan(step, fs.init.zeros((8, 2**28)), device=device).time.transfers["data"]
    assert seconds == pytest.approx(2 * 7 / 8 * 2**30 / 160e9, rel=0.01)


def test_ranks_that_are_no_multiples_and_devices_without_a_network_are_refused() -> None:
    for measured in ({12: 1e9}, {8: 1e9}, {32: 1e9, 16: 1e9}, {16: 1e9, 40: 1e9}):
        assert "multiples of 8, the ranks of NVLink" in error_text(devices.with_bus_bandwidth, devices.H100, measured)
    assert "bandwidth of 16 ranks" in error_text(devices.with_bus_bandwidth, devices.H100, {16: 0.0})
    assert "measured is empty" in error_text(devices.with_bus_bandwidth, devices.H100, {})
    alone = dataclasses.replace(devices.H100, links=())
    assert "H100 has no links" in error_text(devices.with_bus_bandwidth, alone, {16: 1e9})
    flat = dataclasses.replace(devices.H100, links=devices.H100.links[1:])
    assert "joins any number of ranks" in error_text(devices.with_bus_bandwidth, flat, {16: 1e9})
