"""The benchmark of published figures: its step is the same on every mesh, and its allocator follows the policy."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P
from fshard._core.transfers import Transfer
from fshard.planning import Operation, Start
from tests.benchmarks import trust
from tests.benchmarks.caching_allocator import Segment
from tests.benchmarks.published import summed_once, unfused
from tests.benchmarks.torchtitan_step import Checkpointing, Layout, Sizes, init, layers_of, step_of

SIZES = Sizes(width=16, layers=2, heads=4, groups=2, hidden=24, vocab=12)


def train(data: int, model: int, checkpointing: Checkpointing, compiled: bool = False, **pipeline: Any) -> list[float]:
    layout = Layout(SIZES, data, model, 4 // data, 6, checkpointing, compiled, torch.float32, **pipeline)
    f, (_, state, ids, _) = step_of(layout, kind="simulated")
    one = fs.make_mesh(kind="simulated", data=1)
    params, state = (fs.device_get(fs.materialize(tree, P(), one, key=fs.key(0))) for tree in (init(SIZES), state))
    params = layers_of(params) if "stage" in pipeline else params
    ids, targets = (fs.random.randint(fs.key(i), (4, 6), low=0, high=12) for i in (1, 2))
    loss, params, state = fs.device_get(f(params, state, ids, targets))
    block = params[2] if "stage" in pipeline else params["h"][1]
    return [float(loss), float(state[0]["norm"]), float(block["k"].double().sum())]


@pytest.mark.slow
def test_the_planned_step_is_one_function_on_every_mesh_and_under_checkpointing() -> None:
    want = train(1, 1, "none")
    torch.testing.assert_close(train(2, 2, "full"), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(train(2, 2, "full", compiled_loss=True), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(train(1, 1, "selective op", compiled=True), want, rtol=1e-5, atol=1e-6)
    on_stages = train(2, 1, "full", stage=2, microbatches=2, schedule="interleaved")
    torch.testing.assert_close(on_stages, want, rtol=1e-5, atol=1e-6)
    want = train(1, 1, "none", program="KempnerForge")
    torch.testing.assert_close(train(2, 2, "full", program="KempnerForge"), want, rtol=1e-5, atol=1e-6)
    on_stages = train(1, 2, "full", stage=2, microbatches=2, program="KempnerForge")
    torch.testing.assert_close(on_stages, want, rtol=1e-5, atol=1e-6)


def test_unfused_attention_computes_all_pairs_and_its_kernels_read_and_write_the_scores() -> None:
    b, h, t, k = 2, 3, 8, 4
    pairs, side = b * h * t * t, b * h * t * k
    fused = Operation("flash", "attention", torch.bfloat16, 4 * pairs * k * (t + 1) // (2 * t), 9, 0, None, "forward")
    backward = dataclasses.replace(fused, flops=(fused.flops or 0) * 5 // 2, phase="backward")
    for event, again, products, scores in (  # bytes of scores: written by two products, read by others
        (fused, False, 2, 2 * 2 + 4 + 5),
        (backward, False, 4, 4 * 2 + 5 + 6),
        (backward, True, 6, 6 * 2 + 4 + 5 + 5 + 6),
    ):
        got = [e for e in unfused([event], t, k, again=again) if isinstance(e, Operation)]
        assert sum(e.flops or 0 for e in got) == products * 2 * pairs * k
        assert sum(e.bytes for e in got) == scores * pairs + products * 2 * 2 * side
        assert [e.phase for e in got].count("recompute") == (4 if again else 0)
    other = dataclasses.replace(fused, kind="matmul")
    assert unfused([other], t, k) == [other]


def test_gradients_are_summed_after_the_last_microbatch_only() -> None:
    sums = [Start(Transfer("reduce_scatter", ("data",), torch.float32, n, ranks=2), n, 0) for n in range(6)]
    gather = Start(Transfer("all_gather", ("data",), torch.float32, 8, ranks=2), 6, 0)
    assert summed_once([*sums, gather], 3) == (*sums[4:], gather)
    assert summed_once([*sums, gather], 1) == (*sums, gather)


def test_weights_of_planned_stages_and_microbatches_extend_to_those_of_the_row() -> None:
    row = next(r for r in trust.rows() if r.stage > 4)
    for stage, accumulate in ((1, 1), (1, 8), (2, 12), (4, 28), (8, 48), (64, 512)):
        sizes = trust._sizes(dataclasses.replace(row, stage=stage, accumulate=accumulate))
        assert sum(weight for *_, weight in sizes) == pytest.approx(1)
        assert sum(weight * (n + p - 1) for p, n, weight in sizes) == pytest.approx(accumulate + stage - 1)


def test_a_segment_takes_the_smallest_free_block_that_is_large_enough_and_joins_neighbours() -> None:
    s = Segment()
    a, b, c, d = (s.allocate(n) for n in (4, 2, 8, 1))
    assert (a, b, c, d, s.size) == (0, 4, 6, 14, 15)
    s.free(a, 4)
    s.free(c, 8)
    assert s.allocate(3) == 0  # of 4 and 8
    assert s.allocate(5) == 6
    s.free(b, 2)  # after the last of block a, which is free
    assert s.allocate(3) == 3
    assert s.allocate(4) == 15  # 3 are free at 11: no block is large enough
    s.free(15, 4)
    assert (s.allocate(6), s.size) == (15, 21)  # the free end grows
    assert s.allocate(4) == 21
