"""The time of a plan: by hand for each formula, and by relations that hold for any plan."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import fshard as fs
from fshard._core.transfers import Message, Transfer
from fshard.planning.devices import Device, Link
from fshard.planning.events import Operation, Start, Wait
from fshard.planning.roofline import Roofline, joined, roofline

# 1 TFLOP/s, 10 GB/s of memory; 4 ranks at 1 GB/s and 1 ms, 16 ranks at 0.5 GB/s and 10 ms, beyond 0.1 GB/s and 100 ms
DEVICE = Device("d", {torch.float32: 1e12, torch.bfloat16: 4e12}, 2**30, 1e10, (
    Link("near", 4, 1e9, 1e-3), Link("rack", 16, 5e8, 1e-2), Link("far", None, 1e8, 1e-1),
))  # fmt: skip


def op(
    flops: int = 0, nbytes: int = 0, dtype: torch.dtype = torch.float32, kind: str = "matmul", phase: str = "forward"
) -> Operation:
    return Operation("aten.mm", kind, dtype, flops, nbytes, 0, None, phase)


def transfer(name: str, axes: tuple[str, ...], nbytes: int, ranks: int) -> Transfer:
    kept = nbytes // ranks if name in ("reduce_scatter", "all_to_all") else 0
    return Transfer(name, axes, torch.float32, nbytes, ranks=ranks, kept=kept)


def blocking(*transfers: Transfer) -> list[Start | Wait]:
    return [event for i, t in enumerate(transfers) for event in (Start(t, i, 0), Wait(i, 0))]


def one(name: str, axes: tuple[str, ...], nbytes: int, **mesh: int) -> float:
    ranks = 1
    for axis in axes:
        ranks *= mesh[axis]
    return roofline(blocking(transfer(name, axes, nbytes, ranks)), mesh, DEVICE).seconds


def test_an_operation_takes_its_flops_and_its_bytes() -> None:
    for event, seconds in [
        (op(2 * 10**12, 10), 2.0),
        (op(2 * 10**12, 10, torch.bfloat16), 0.5),
        (op(10, 3 * 10**10), 3.0),
        (op(10**12, 10**10), 2.0),
        (op(5 * 10**12, 10**10, kind="elementwise"), 1.0),  # the FLOPs of no matrix units
        (op(0, 10**10, torch.int64, kind="copy"), 1.0),  # no rate is needed
    ]:
        assert roofline([event], {"data": 1}, DEVICE).seconds == pytest.approx(seconds)
    half = dataclasses.replace(DEVICE, efficiency=0.5)  # of the FLOPs, not of the memory
    assert roofline([op(10**12, 10**10), op(10**12, 3 * 10**10)], {"data": 1}, half).seconds == pytest.approx(8.0)
    for device, seconds in ((half, 2.0), (dataclasses.replace(half, attention=0.25), 4.0)):
        assert roofline([op(10**12, kind="attention")], {"data": 1}, device).seconds == pytest.approx(seconds)


def test_a_program_starts_operations_ahead_of_a_device_with_a_queue() -> None:
    small, large = op(10**11), op(10**12)  # 0.1 s and 1 s
    queued, synchronous = (dataclasses.replace(DEVICE, launch=0.5, queued=queued) for queued in (True, False))
    free = op(0, 0, kind="copy")  # allocates only
    for events, ahead, after in [
        ([small] * 3, 1.6, 1.8),
        ([large, small, small, small], 2.1, 0.5 * 4 + 1.3),
        ([small, large, free, small], 2.1, 0.5 * 3 + 1.2),
    ]:
        for device, seconds in ((queued, ahead), (synchronous, after)):
            found = roofline(events, {"data": 1}, device)
            assert found.seconds == found.compute == pytest.approx(seconds)
            assert not found.is_bound


def test_a_measured_cost_takes_the_place_of_the_rates() -> None:
    costs = {"aten.mm f32": (1.0, 1e-9, 1e-12), "matmul bf16": (2.0, 0.0, 0.0), "forward": (0.5, 1e-9, 0.0),
             "backward": (-5.0, 0.0, 0.0)}  # fmt: skip
    device = dataclasses.replace(DEVICE, costs=costs, launch=7.0, queued=False)
    work = op(10**12, 10**9)
    for event, seconds in [
        (work, 3.0 + 1.5),
        (dataclasses.replace(work, name="aten.mm_", phase="update"), 3.0 + 1.5),
        (dataclasses.replace(work, phase="backward"), 0.0),
        (op(10**12, 10**9, torch.bfloat16), 2.0 + 1.5),
        (op(0, 10**10, torch.int64, kind="copy"), 7.0 + 1.0),  # nothing of it is measured
        (op(0, 0), 0.0),
    ]:
        found = roofline([event], {"data": 1}, device)
        assert found.seconds == found.compute == pytest.approx(seconds)
        assert not found.is_bound
    half = dataclasses.replace(device, efficiency=0.5)
    assert roofline([work], {"data": 1}, half).seconds == pytest.approx(4.0 + 1.5)


def test_mfu_leaves_out_recomputed_flops_and_counts_each_dtype_at_its_peak() -> None:
    events = [
        op(10**12),
        op(4 * 10**12, dtype=torch.bfloat16),
        op(10**12, phase="recompute"),
        op(0, 10**10, kind="copy"),
    ]
    found = roofline(events, {"data": 1}, DEVICE)
    assert found.seconds == pytest.approx(4.0)
    assert found.mfu == pytest.approx(0.5)
    assert found.tokens_per_second(100) == pytest.approx(25.0)
    assert Roofline(0.0, 0.0, {}, {}, (), (), 0.0).mfu == 0.0


def test_a_ring_inside_a_node() -> None:
    b = 10**6  # 1 ms at 1 GB/s
    assert one("all_reduce", ("model",), b, model=4) == pytest.approx(2 * 3 * 1e-3 + 2 * 3 / 4 * 1e-3)
    assert one("all_gather", ("model",), b, model=4) == pytest.approx(3 * 1e-3 + 3 * 1e-3)
    assert one("reduce_scatter", ("model",), b, model=4) == pytest.approx(3 * 1e-3 + 3 / 4 * 1e-3)
    assert one("all_to_all", ("model",), b, model=4) == pytest.approx(1e-3 + 3 / 4 * 1e-3)
    assert one("permute", ("model",), b, model=4) == pytest.approx(1e-3 + 1e-3)
    assert one("all_reduce max", ("model",), b, model=4) == one("all_reduce", ("model",), b, model=4)
    assert one("all_gather", ("model",), b, model=1, data=4) == 0.0


def test_the_last_axis_is_the_nearest() -> None:
    b = 10**6
    # model: ranks 0, 1, 2, 3. data: ranks 0, 4, 8, 12, one of each node: 2 ms a byte, 10 ms a step
    assert one("all_gather", ("model",), b, data=4, model=4) == pytest.approx(3e-3 + 3e-3)
    assert one("all_gather", ("data",), b, data=4, model=4) == pytest.approx(3e-2 + 3 * 2e-3)
    assert one("all_gather", ("model",), b, model=4, data=4) == pytest.approx(3e-2 + 3 * 2e-3)
    assert one("all_gather", ("data",), b, data=4, model=16) == pytest.approx(3e-1 + 3 * 1e-2)


def test_the_ranks_of_a_node_share_what_a_ring_sends_beyond_it() -> None:
    b = 10**6
    # 16 ranks in 4 nodes: 12 steps near, 3 beyond; 15 b of each rank near, 15/4 b beyond, which takes half as long
    assert one("all_gather", ("data",), b, data=16) == pytest.approx(12e-3 + 3e-2 + 15e-3)
    # 64 ranks in 16 nodes in 4 racks: 63 b near, 63/4 b of the rack's links, 63/16 b of the far ones
    seconds = 48e-3 + 12e-2 + 3e-1 + max(63e-3, 63 / 4 * 2e-3, 63 / 16 * 1e-2)
    assert one("all_gather", ("data",), b, data=64) == pytest.approx(seconds)
    # both axes as one are the same ring
    assert one("all_gather", ("data", "model"), b, data=16, model=4) == pytest.approx(seconds)
    assert one("all_gather", ("model", "data"), b, data=16, model=4) == pytest.approx(seconds)
    # the outer and the inner axis of three: two ranks of a node, and 8 groups of them
    assert one("all_gather", ("a", "c"), b, a=8, b=2, c=2) == pytest.approx(
        8e-3 + (8 - 2) * 1e-2 + 1e-1 + max(15e-3, 15 / 2 * 2e-3, 15 / 8 * 1e-2))  # fmt: skip


def test_peers_beyond_the_node_are_sent_to_by_each_rank_itself() -> None:
    b = 16 * 10**6
    # 3 of 16 peers are near, 12 beyond
    assert one("all_to_all", ("data",), b, data=16) == pytest.approx(1e-2 + max(3e-3, 12 * 2e-3))
    assert one("permute", ("data",), b, data=16) == pytest.approx(1e-2 + 16 * 2e-3)


def test_sizes_that_do_not_fill_nodes_take_the_ranks_that_are_furthest_apart() -> None:
    b = 10**6
    # 6 ranks: 0 to 3 and 4, 5. model=3 is 0 to 2, which is near, and 3 to 5, which is not
    assert one("all_gather", ("data",), b, data=6) == pytest.approx(4e-3 + 1e-2 + max(5e-3, 5 * 2 / 6 * 2e-3))
    assert one("all_gather", ("model",), b, data=2, model=3) == pytest.approx(1e-3 + 1e-2 + max(2e-3, 2 * 2 / 3 * 2e-3))
    assert one("all_gather", ("model",), b, data=1, model=3) == pytest.approx(2e-3 + 2e-3)


def test_a_started_transfer_is_hidden_by_operations_until_its_wait() -> None:
    gather = transfer("all_gather", ("model",), 10**9, 4)  # 3.003 s
    for seconds, stall in [(1, 2.003), (3, 0.003), (5, 0.0)]:
        work = op(seconds * 10**12)
        found = roofline([Start(gather, 0, 0), work, Wait(0, 0), op(10**12)], {"model": 4}, DEVICE)
        assert found.exposed["model"] == pytest.approx(stall)
        assert found.seconds == pytest.approx(seconds + 1 + stall)
        assert found.compute == pytest.approx(seconds + 1)
        assert found.transfers == {"model": pytest.approx(3.003)}
    never_waited = roofline([Start(gather, 0, 0), op(10**12)], {"model": 4}, DEVICE)
    assert never_waited.seconds == pytest.approx(3.003)
    assert never_waited.exposed["model"] == pytest.approx(2.003)


def test_transfers_over_one_link_queue_and_over_two_do_not() -> None:
    near, far = transfer("all_gather", ("model",), 10**9, 4), transfer("all_gather", ("data",), 5 * 10**8, 4)
    mesh = {"data": 4, "model": 4}  # near takes 3.003 s, far 3.03 s
    both = roofline([Start(near, 0, 0), Start(near, 1, 0), Wait(0, 0), Wait(1, 0)], mesh, DEVICE)
    assert both.seconds == pytest.approx(6.006)
    assert both.exposed == {"model": pytest.approx(6.006)}
    apart = roofline([Start(near, 0, 0), Start(far, 1, 0), Wait(1, 0), Wait(0, 0)], mesh, DEVICE)
    assert apart.seconds == pytest.approx(3.03)
    assert apart.exposed == {"model": 0.0, "data": pytest.approx(3.03)}
    # a ring over all 16 ranks uses both
    ring = transfer("all_gather", ("data", "model"), 10**8, 16)
    queued = roofline([Start(ring, 0, 0), Start(near, 1, 0), Wait(1, 0), Wait(0, 0)], mesh, DEVICE)
    assert queued.seconds == pytest.approx((12e-3 + 3e-2 + 1.5) + 3.003)
    queued = roofline([Start(ring, 0, 0), Start(far, 1, 0), Wait(1, 0), Wait(0, 0)], mesh, DEVICE)
    assert queued.seconds == pytest.approx((12e-3 + 3e-2 + 1.5) + 3.03)
    queued = roofline([Start(far, 0, 0), Start(ring, 1, 0), Wait(1, 0), Wait(0, 0)], mesh, DEVICE)
    assert queued.seconds == pytest.approx(3.03 + (12e-3 + 3e-2 + 1.5))
    # the link is free long before the second starts, and has no time to make up
    late = roofline([*blocking(near), op(5 * 10**12), Start(near, 7, 0), op(10**12), Wait(7, 0)], mesh, DEVICE)
    assert late.seconds == pytest.approx(3.003 + 5 + 3.003)
    assert late.lanes[-2].start == pytest.approx(8.003)


def test_lanes_and_times_of_any_schedule_add_up() -> None:
    gather, reduce = transfer("all_gather", ("model",), 10**8, 4), transfer("reduce_scatter", ("data",), 10**9, 4)
    pieces = [
        [Start(gather, 0, 0), Wait(0, 0)],
        [Start(reduce, 1, 0), Wait(1, 0)],
        [op(10**11), op(0, 10**9), op(0, 0)],
    ]
    for order in set(itertools.permutations([0, 0, 1, 1, 2, 2, 2])):
        left = [iter(piece) for piece in pieces]
        events = [next(left[i]) for i in order]
        found = roofline(events, {"data": 4, "model": 4}, DEVICE)
        assert found.seconds == pytest.approx(found.compute + sum(found.exposed.values()))
        assert found.seconds >= max(span.end for span in found.lanes) - 1e-12
        assert len(found.times) == len(events)
        assert list(found.times) == sorted(found.times)
        for lane in ("compute", "data", "model"):
            spans = [span for span in found.lanes if span.lane == lane]
            assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(spans))
        assert sum(span.end - span.start for span in found.lanes if span.lane == "compute") == pytest.approx(0.2)


def test_a_rate_or_a_link_that_the_device_lacks_is_named() -> None:
    with pytest.raises(
        fs.ShardingError, match=r"d has no FLOP/s of float64, in which aten.mm computes\n  it has float32, bfloat16"
    ):
        roofline([op(1, dtype=torch.float64)], {"data": 1}, DEVICE)
    events = blocking(transfer("all_reduce", ("data",), 8, 8))
    near = dataclasses.replace(DEVICE, links=DEVICE.links[:1])
    with pytest.raises(
        fs.ShardingError, match="links of d do not reach all ranks of data\n  mesh data=8: 8 ranks; links join 4"
    ):
        roofline(events, {"data": 8}, near)
    with pytest.raises(fs.ShardingError, match="links join 1"):
        roofline(events, {"data": 8}, dataclasses.replace(DEVICE, links=()))


# --- ranks that meet ----------------------------------------------------------------------------------------------


def message(source: int, target: int, rank: int, nbytes: int = 10**9) -> Transfer:
    """A message over a stage axis of 2: it takes 1.001 s."""
    kept = 0 if rank == source else nbytes
    return Transfer("permute", ("stage",), torch.float32, nbytes, ranks=2, kept=kept,
                    message=Message(((source, target),), ((nbytes // 4,),)))  # fmt: skip


def test_a_message_begins_when_both_ranks_have_started_it() -> None:
    """The receive is started early: it takes no link before the message comes, and the sender goes on at once."""
    sender = [op(2 * 10**12), Start(message(0, 1, 0), 0, 0), op(10**12), Wait(0, 0)]
    receiver = [Start(message(0, 1, 1), 0, 0), *blocking(), Start(message(1, 0, 1, 10), 5, 0), op(10**12), Wait(0, 0)]
    sender.insert(0, Start(message(1, 0, 0, 10), 9, 0))
    first, last = joined({0: sender, 1: [*receiver, op(10**12)]}, {"stage": 2}, DEVICE)
    assert first.seconds == last.seconds == pytest.approx(2 + 1.001 + 1)
    assert first.exposed == {"stage": pytest.approx(0.001 + 1)}  # for the end of the message, and of the other rank
    assert last.exposed == {"stage": pytest.approx(1 + 1.001)}
    spans = [(s.number, s.start) for s in last.lanes if s.lane == "stage"]
    assert sorted(spans) == [(0, pytest.approx(2.0)), (5, 0.0)]
    assert first.transfers == {"stage": pytest.approx(1.001 + 0.001)}


def test_messages_of_one_rank_queue_for_its_link() -> None:
    both = [Start(message(0, 1, 0), 0, 0), Start(message(0, 1, 0), 1, 0), Wait(0, 0), Wait(1, 0)]
    there = [Start(message(0, 1, 1), 0, 0), Start(message(0, 1, 1), 1, 0), Wait(1, 0), Wait(0, 0)]
    assert joined({0: both, 1: there}, {"stage": 2}, DEVICE)[1].seconds == pytest.approx(2.002)


def test_a_collective_begins_when_all_planned_ranks_have_started_it() -> None:
    total = blocking(transfer("all_reduce", ("stage",), 0, 2))
    of_each = {r: [op(seconds * 10**12), *total, op(10**12)] for r, seconds in ((0, 1), (2, 3))}
    times = joined(of_each, {"stage": 2, "model": 2}, DEVICE)
    assert [t.seconds for t in times] == [pytest.approx(3 + 2e-3 + 1)] * 2
    assert [t.exposed["stage"] for t in times] == [pytest.approx(2 + 2e-3), pytest.approx(2e-3)]
    alone = blocking(transfer("all_reduce", ("model",), 0, 2))  # with ranks that are not planned: nobody is waited for
    times = joined({0: [op(10**12), *alone], 2: [op(3 * 10**12), *alone]}, {"stage": 2, "model": 2}, DEVICE)
    assert times[0].exposed == {"model": pytest.approx(2e-3), "stage": pytest.approx(2)}
