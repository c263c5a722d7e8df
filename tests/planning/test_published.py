"""The benchmark of published figures: its step is the same on every mesh, and its allocator follows the policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P
from tests.benchmarks.caching_allocator import Segment
from tests.benchmarks.torchtitan_step import Checkpointing, Layout, Sizes, init, layers_of, step_of

SIZES = Sizes(width=16, layers=2, heads=4, groups=2, hidden=24, vocab=12)


def train(data: int, model: int, checkpointing: Checkpointing, compiled: bool = False, **pipeline: Any) -> list[float]:
    layout = Layout(SIZES, data, model, 4 // data, 6, checkpointing, compiled, torch.float32, **pipeline)
    f, (_, state, ids, _) = step_of(layout, kind="simulated")
    one = fs.make_mesh(kind="simulated", data=1)
    params, state = (fs.device_get(fs.materialize(tree, P(), one, key=fs.key(0))) for tree in (init(SIZES), state))
    params = layers_of(params) if pipeline else params
    ids, targets = (fs.random.randint(fs.key(i), (4, 6), low=0, high=12) for i in (1, 2))
    loss, params, state = fs.device_get(f(params, state, ids, targets))
    block = params[2] if pipeline else params["h"][1]
    return [float(loss), float(state[0]["norm"]), float(block["k"].double().sum())]


@pytest.mark.slow
def test_the_planned_step_is_one_function_on_every_mesh_and_under_checkpointing() -> None:
    want = train(1, 1, "none")
    torch.testing.assert_close(train(2, 2, "full"), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(train(1, 1, "selective op", compiled=True), want, rtol=1e-5, atol=1e-6)
    on_stages = train(2, 1, "full", stage=2, microbatches=2, schedule="interleaved")
    torch.testing.assert_close(on_stages, want, rtol=1e-5, atol=1e-6)


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
