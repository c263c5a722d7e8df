"""The table of devices: what is published, names, and bad numbers; measured devices and their files."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P, devices
from fshard._core.transfers import Transfer
from fshard.planning import Operation, Start, Wait, rates, reference
from fshard.planning.device import cost_names
from fshard.planning.devices import Device, Link
from fshard.planning.measure import HostClock
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
    ({"attention": 0.0}, "attention must be a positive number"),
    ({"attention": 1.5}, "attention is 1.5\n  it is a share of flops"),
    ({"costs": {"aten.mm f32": (0.0, math.nan, 0.0)}}, "cost of aten.mm f32 must be three finite numbers"),
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


def test_measure_finds_rates_that_torch_reaches_and_a_link_for_each_axis(tmp_path: Path) -> None:
    device = devices.measure(fs.make_mesh(kind="simulated", machine=2, rank=2), seconds=0.05)
    assert (device.name, device.queued, device.is_bound) == ("cpu", False, False)
    assert 1e8 < device.flops[torch.float32] < 1e14
    assert 1e8 < device.bandwidth < 1e14
    assert 0 <= device.launch < 1e-2
    assert device.costs.keys() >= {"aten.mm f32", "aten.gelu_backward f32", "elementwise f32", "forward", "backward"}
    assert 1e-13 < sum(device.costs["aten.mm f32"]) < 1e-2
    assert [(link.name, link.ranks) for link in device.links] == [("rank", 2), ("machine", None)]
    devices.write(device, tmp_path / "d.json")
    assert devices.of(str(tmp_path / "d.json")) == device
    (link,) = devices.this_cpu(seconds=0.05).links
    assert (link.name, link.ranks) == ("loopback", None)
    for seconds in (0, -1, math.nan, 601):
        assert "seconds must be a number in (0, 600]" in error_text(devices.measure, seconds=seconds)
    assert "mesh must be a mesh of devices" in error_text(devices.measure, fs.make_mesh(kind="abstract", data=2))


@pytest.mark.parametrize("text", ["{", "{}", '{"name": "x", "flops": {"float99": 1}, "memory": 1, "bandwidth": 1}'])
def test_a_file_that_no_device_wrote_is_refused_by_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "d.json").write_text(text)
    assert "d.json is not the file of a device" in error_text(devices.of, str(tmp_path / "d.json"))
    assert "none.json is not the file of a device" in error_text(devices.of, str(tmp_path / "none.json"))


def test_links_follow_from_the_times_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates that a device has are found again in the times that its plans give all_reduces."""
    mesh = fs.make_mesh(kind="simulated", machine=2, rank=4)
    known = dataclasses.replace(devices.H100, links=(Link("rank", 4, 2e9, 1e-5), Link("machine", None, 1e8, 1e-3)))

    def planned(mesh: Any, op: str, axes: Any, nbytes: int, seconds: float) -> float:
        n = math.prod(mesh.axes[a] for a in axes)
        kept = nbytes // n if op in ("reduce_scatter", "all_to_all") else 0
        transfer = Transfer(op, axes, torch.float32, nbytes, ranks=n, kept=kept)
        return fs.planning.roofline([Start(transfer, 0, 0), Wait(0, 0)], mesh.axes, known).seconds

    monkeypatch.setattr(rates, "transfer_seconds", planned)
    for found, link in zip(rates._links(mesh, 1.0), known.links, strict=True):
        assert found[:2] == link[:2]
        assert found[2:] == pytest.approx(link[2:], rel=1e-3)
    rows = rates.compare_transfers(mesh, known)
    assert len(rows) == 20
    assert all(row.measured == pytest.approx(row.planned) for row in rows)


def test_lines_of_operations_are_found_again_in_their_seconds() -> None:
    nbytes, flops = (
        torch.tensor([[10.0**3, 10.0**4], [10.0**6, 10.0**5], [10.0**7, 10.0**9], [10.0**6, 0.0]]).double().T
    )
    for line in ((2e-6, 3e-10, 4e-12), (2e-6, 0.0, 4e-12), (0.0, 3e-10, 0.0)):
        start, byte, flop = line
        seconds = start + nbytes * byte + flops * flop
        assert rates._line(nbytes.numpy(), flops.numpy(), seconds.numpy()) == pytest.approx(line, rel=0.03, abs=1e-15)
    falling = rates._line(nbytes.numpy(), flops.numpy(), (1e-3 - nbytes * 1e-11).numpy())
    assert min(falling) == 0  # no operation is faster for more bytes


@pytest.mark.parametrize("queued", [True, False])
def test_a_plan_for_a_cpu_has_its_kernels(queued: bool) -> None:
    f = torch.nn.functional.scaled_dot_product_attention
    step = fs.shard_map(lambda x: f(x, x, x).sum(), mesh=fs.make_mesh(kind="abstract", data=1), in_specs=P(),
                        out_specs=P())  # fmt: skip
    device = dataclasses.replace(devices.H100, queued=queued)
    names = [e.name for e in fs.plan(step, fs.init.zeros((1, 2, 8, 16)), device=device).events]
    assert "aten._scaled_dot_product_flash_attention" + "_for_cpu" * (not queued) in names


def test_fitted_numbers_are_of_devices_of_that_name() -> None:
    for device in (devices.H100, devices.A100):
        assert 0.3 < devices.fitted(device).efficiency < 0.9
        assert 0 < devices.fitted(device).launch < 1e-4
        assert 0.3 < (devices.fitted(device).attention or 0) < 0.7
    assert devices.fitted(devices.TPU_V5P) == devices.TPU_V5P


def _products(stages: int) -> tuple[Any, tuple[Any, ...]]:
    """Return a step of products and transfers on four ranks; of a pipeline, with stages that wait for each other."""
    mesh = fs.make_mesh(kind="abstract", data=4 // stages, stage=stages)
    specs: Any = P("data")
    params: Any = fs.init.zeros((4096, 4096), dtype=torch.bfloat16)
    loss = lambda p, x: fs.pmean((x @ fs.unshard(p, P("data"), "data")).mean(), "data")  # noqa: E731
    f = fs.value_and_grad(loss)
    if stages > 1:
        first, stage, last = (lambda w, x: x), (lambda w, h, x: h @ w), (lambda w, h, x: h.mean())
        f = fs.pipelined(first, stage, last, axis="stage", microbatches=4)
        specs, params = ((), P("stage")), ((), fs.init.zeros((4, 4096, 4096), dtype=torch.bfloat16))
    step = fs.shard_map(f, mesh=mesh, in_specs=(specs, P("data")), out_specs=(P(), specs), check="never")
    return step, (params, fs.init.zeros((4096, 4096), dtype=torch.bfloat16))


@pytest.mark.parametrize("stages", [1, 2])
def test_a_measured_step_gives_back_the_efficiency_that_it_ran_with(stages: int, tmp_path: Path) -> None:
    step, args = _products(stages)
    truth = dataclasses.replace(devices.fitted(devices.H100), efficiency=0.4321)
    seconds = fs.plan(step, *args, device=truth).time.seconds  # type: ignore[union-attr]
    plan = fs.plan(step, *args, device=devices.fitted(devices.H100))
    ours = devices.calibrated(plan, seconds)
    assert ours.efficiency == pytest.approx(0.4321, abs=1e-6)
    assert ours == dataclasses.replace(truth, efficiency=ours.efficiency, calibrated=True)
    assert fs.plan(step, *args, device=ours).time.seconds == pytest.approx(seconds, rel=1e-6)  # type: ignore[union-attr]
    devices.write(ours, tmp_path / "ours.json")
    assert devices.fitted(devices.of(str(tmp_path / "ours.json"))) == ours  # under the name of a fitted one


def test_seconds_that_no_efficiency_gives_are_refused_with_the_bound() -> None:
    step, args = _products(1)
    plan = fs.plan(step, *args, device=devices.fitted(devices.H100))
    bound = fs.plan(step, *args, device=dataclasses.replace(devices.fitted(devices.H100), efficiency=1.0)).time
    assert bound is not None
    for seconds, words in ((bound.seconds / 2, "too fast"), (60.0, "too slow")):
        text = error_text(devices.calibrated, plan, seconds)
        assert words in text
        assert ("planned with 1  Roofline(" in text) is (words == "too fast")
        assert f"measured  {bound.flops_at_peak / seconds:.1%} MFU" in text
    assert "a step of nan s is too slow" in error_text(devices.calibrated, plan, math.nan)
    assert "a step of 0 s is too fast" in error_text(devices.calibrated, plan, 0.0)
    assert "calibrated: plan: it has no device" in error_text(devices.calibrated, fs.plan(step, *args), 1.0)


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


def test_a_convolution_by_channel_has_its_kinds_cost_in_measured_steps_and_in_plans() -> None:
    program, mesh = reference.convolutional(2, 4, 16), fs.make_mesh(kind="simulated", data=1)
    step, args = reference.train_step(program, mesh.device, torch.float32)
    _, operations = rates._run_step(program, mesh, torch.float32, HostClock(0.0))
    measured = Counter(cost_names(e.name, e.kind) for e, _ in operations if "conv" in e.name)
    assert measured == {("aten.convolution", "convolution"): 7, ("aten.convolution_backward", "convolution"): 7,
                        ("aten.convolution depthwise", "depthwise"): 2,
                        ("aten.convolution_backward depthwise", "depthwise"): 2}  # fmt: skip
    costs = dict.fromkeys(("convolution f32", "aten.convolution depthwise f32"), (0.0, 0.0, 0.0))
    slow = {"aten.convolution_backward depthwise f32": (100.0, 0.0, 0.0)}
    device = dataclasses.replace(devices.H100, queued=False, costs=costs | slow)
    plan = fs.plan(fs.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P()), *args, device=device)
    names = [cost_names(e.name, e.kind) for e in plan.events if isinstance(e, Operation)]
    assert Counter(pair for pair in names if "conv" in pair[0]) == measured
    assert plan.time is not None
    assert plan.time.seconds == pytest.approx(200, abs=1)
    assert plan.time.mfu * 200 == pytest.approx(sum(plan.flops.values()) / device.flops[torch.float32], rel=0.01)
