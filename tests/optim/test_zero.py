"""ZeRO-1: the state is split over axes of the data and the parameters are not.

The ranks' gradients are multiples of one gradient whose sum it is, exactly in any order of pairs: 8, -4, -2 and -1
times it on four ranks. So a step on any mesh has the bits of the plain step of one device.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

import fshard as fs
from fshard import P, ShardingError, checkpoint, optim, tree
from tests.lib.assertions import assert_same, error_text
from tests.optim.test_optim import grads_at, pointers, train


def make_params():
    """Make leaves of even and uneven dims, with empty parts, 0-d, of no elements and of three dtypes."""
    g = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(16, 8, generator=g),
        "conv": torch.randn(6, 3, 3, 3, generator=g),
        "odd": [torch.randn(7, 5, generator=g), torch.randn(3, generator=g)],
        "half": torch.randn(5, 2, generator=g).bfloat16(),
        "wide": torch.randn(9, generator=g, dtype=torch.float64),
        "scale": torch.randn((), generator=g),
        "frozen": None,
        "empty": torch.zeros(0, 4),
        "one": torch.randn(1, 1, generator=g),
    }


# Placements of parameters, and the axes that a state is split over beside them.
PLAIN = P()
MODEL = {"w": P(None, "model"), "conv": P(), "odd": [P("model"), P()], "half": P(), "wide": P("model"), "scale": P(),
         "frozen": None, "empty": P("model"), "one": P()}  # fmt: skip
LAYOUTS = {
    "data=1": ({"data": 1}, PLAIN, "data", "data"),
    "data=2": ({"data": 2}, PLAIN, "data", "data"),
    "data=3": ({"data": 3}, PLAIN, "data", "data"),
    "data=5": ({"data": 5}, PLAIN, "data", "data"),
    "2x2": ({"data": 2, "model": 2}, MODEL, "data", "data"),
    "3x2": ({"data": 3, "model": 2}, MODEL, "data", "data"),
    "hybrid": ({"replica": 2, "shard": 2}, PLAIN, ("replica", "shard"), "shard"),
    "hybrid, over both": ({"replica": 2, "shard": 3}, PLAIN, ("replica", "shard"), ("replica", "shard")),
    "an axis of one rank": ({"replica": 2, "shard": 1}, PLAIN, ("replica", "shard"), "shard"),
}
OPTIMIZERS = {
    "sgd": lambda split: optim.sgd(0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "dampened": lambda split: optim.sgd(0.05, momentum=0.9, dampening=0.5),
    "adamw": lambda split: optim.adamw(
        optim.warmup(0.02, 3), weight_decay=0.1, mask=lambda p: tree.map(lambda x: x.ndim > 1, p)
    ),
}


def weights(sizes):
    """Make factors [*sizes] of a gradient whose sum over the axes is 1, exactly, one axis after the other."""
    out = torch.ones(())
    for n in sizes:
        out = out[..., None] * torch.tensor([2.0 ** (n - 1), *(-(2.0**i) for i in reversed(range(n - 1)))])
    return out


def step_on(mesh, opt, specs, axis, *, summed=False, **options):
    """Make a step of whole gradients, of which each rank of `axis` gets its multiple, or all the sum."""
    names = (axis,) if isinstance(axis, str) else axis
    state_specs = opt.specs(specs)

    @fs.shard_map(mesh=mesh, in_specs=(specs, state_specs, specs, P(*names)), out_specs=(specs, state_specs), **options)
    def step(grads, state, params, factor):
        partial = tree.map(lambda g: fs.pvary(g, names) * factor.view(()).to(g.dtype), grads)
        return opt.update(grads if summed else partial, state, params)

    factors = weights([mesh.axes[a] for a in names])
    return lambda grads, state, params: step(grads, state, params, factors)


def train_on(layout, make, *, steps=4, summed=False, donate=False, check="never", params=None):
    axes, specs, axis, over = LAYOUTS[layout]
    params, mesh = make_params() if params is None else params, fs.make_mesh(**axes)
    split = fs.fully_shard(specs, params, axis=over)
    opt = optim.zero(make(split), specs, split, axis=axis, summed=summed)
    step = step_on(mesh, opt, specs, axis, summed=summed, donate=(1, 2) if donate else (), check=check)
    placed = fs.device_put(params, specs, mesh)
    state = opt.init(placed)
    for i in range(steps):
        placed, state = step(grads_at(i, params), state, placed)
    return placed, state


# --- the law --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_mesh_changes_a_step(name, layout):
    want = train(OPTIMIZERS[name](P()), make_params(), 4)
    for summed in (False, True):
        for donate in (False, True):
            check = "first" if layout in ("3x2", "hybrid") else "never"
            got = train_on(layout, OPTIMIZERS[name], summed=summed, donate=donate, check=check)
            assert_same(fs.device_get(got), want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_clipped_by_the_norm_of_the_summed_gradients(layout):
    make = lambda split: optim.chain(optim.clip_by_global_norm(0.7, split), optim.adamw(0.02))  # noqa: E731
    params = {**make_params(), "half": None}  # the rest differs by the rounding of the norm
    layout_specs = {**MODEL, "half": None}
    LAYOUTS["here"] = (*LAYOUTS[layout][:1], layout_specs if LAYOUTS[layout][1] is MODEL else PLAIN, *LAYOUTS[layout][2:])
    try:
        got, (clip, _) = train_on("here", make, params=params)
    finally:
        del LAYOUTS["here"]
    want, (norm, _) = train(make(P()), params, 4)
    assert_same(fs.device_get(got), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fs.device_get(clip["norm"]), norm["norm"], rtol=1e-6, atol=0)
