"""Every architecture of `architectures.py` through fshard, compared with the module itself: docs/architectures.md.

    python -m tests.interop.defer.zoo              the rows that the table lacks
    python -m tests.interop.defer.zoo all          every row anew
    python -m tests.interop.defer.zoo T5Model ...  these rows anew

Each row is written when it is done, so an interrupted run continues. The checks of a row are in `measure`.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor, nn

import fshard as fs
from fshard import P
from tests.interop.defer.architectures import CASES, Case
from tests.interop.defer.test_defer import check_distribution
from tests.lib.assertions import assert_same

TABLE = Path(__file__).parents[3] / "docs" / "architectures.md"
ONE, TWO, FOUR = fs.make_mesh(data=1), fs.make_mesh(data=2), fs.make_mesh(data=2, model=2)
NOT_COMPARED = ("past_key_values", "cache", "logits_per_")  # the last: every image of a batch with every text
LEAVES = 20_000  # of all architectures: the level of the comparison of distributions


def float_outputs(out: Any) -> list[Tensor]:
    """Return the floating tensors of a module's result that a loss can be made of; caches are none of it."""
    if isinstance(out, Tensor):
        return [out] if out.is_floating_point() and out.requires_grad and out.ndim else []
    if isinstance(out, Mapping):
        out = [x for k, x in out.items() if not any(word in k for word in NOT_COMPARED)]
    return [t for x in out for t in float_outputs(x)] if isinstance(out, (list, tuple)) else []


def loss_of(outputs: Sequence[Tensor]) -> Tensor:
    return torch.stack([(x.float() - 1).square().mean() for x in outputs]).sum()


def measure(case: Case) -> dict[str, Any]:
    apply, tree = fs.defer(case.construct)
    values = fs.device_get(fs.materialize(tree, P(), ONE, key=fs.key(0)))
    both = fs.fully_shard(fs.fully_shard(P(), tree, axis="model"), tree, axis="data")
    for (path, leaf), x in zip(fs.tree.leaves_with_path(fs.materialize(tree, both, FOUR, key=fs.key(0))),
                               fs.tree.leaves(values), strict=True):
        for rank, shard in zip(FOUR.ranks, leaf.shards, strict=True):
            assert_same(shard, x[leaf.box(rank)], f"{path} {leaf.spec}, rank {rank}")

    torch.manual_seed(0)
    module = case.construct()
    check_distribution(tree, values, module, LEAVES)
    values["params"] = {k: moved(x) for k, x in values["params"].items()}
    with torch.no_grad():
        for kind, named in (("params", module.named_parameters()), ("buffers", module.named_buffers())):
            for name, x in named:
                x.copy_(values[kind][name])
    batch, others = case.arguments(module)

    specs = fs.fully_shard(P(), tree["params"], axis="data")
    placed = fs.device_put(values["params"], specs, TWO)

    @fs.shard_map(mesh=TWO, in_specs=(specs, P(), P("data")), out_specs=(P("data"), specs))
    def step(params, buffers, batch):
        buffers = fs.unshard(buffers, P(), "data")

        def loss(trained):
            whole = fs.unshard({**params, **trained}, specs, "data", shapes=tree["params"])
            out = float_outputs(apply(whole, buffers, **batch, **others))
            return fs.pmean(loss_of(out), "data"), out

        frozen = {k: torch.zeros_like(params[k]) for k in apply.frozen}
        (_, out), grads = fs.value_and_grad(loss, has_aux=True)({k: x for k, x in params.items() if k not in frozen})
        return out, {**grads, **frozen}

    halves = [by_autograd(module, {k: x.chunk(2)[i] for k, x in batch.items()} | others, 0.5) for i in range(2)]
    expected = [torch.cat(xs) for xs in zip(*(h[0] for h in halves), strict=True)]
    summed = {k: x + halves[1][1][k] for k, x in halves[0][1].items()}
    dense, whole = by_autograd(module, batch | others, 1.0)
    out, grads = fs.device_get(step(placed, values["buffers"], batch))
    largest = max(float(x.abs().max()) for x in whole.values() if x.numel())
    assert largest > 0, "no gradient"
    assert all(torch.isfinite(x).all() for x in (*expected, *whole.values()))
    return {
        "leaves": len(fs.tree.leaves(tree)), "parameters": sum(x.numel() for x in values["params"].values()),
        "none": sum(not x.any() for x in whole.values()),
        "batch": max(difference(a, b) for a, b in zip(expected, dense, strict=True) if a.shape == b.shape),
        "forward": max(difference(a, b) for a, b in zip(out, expected, strict=True)),
        "rank": max(difference(grads[k], summed[k]) for k in summed),
        "gradient": max(difference(grads[k], whole[k], 1e-3 * largest) for k in whole),
    }


def moved(x):
    """Add noise to a parameter: a leaf of zeros or ones would hide errors."""
    return x + 0.02 * torch.randn(x.shape, generator=torch.Generator().manual_seed(x.numel())).to(x.dtype)


def by_autograd(module, inputs, scale):
    module = copy.deepcopy(module)  # forward may keep tensors in it
    out = float_outputs(module(**inputs))
    trained = {k: x for k, x in module.named_parameters() if x.requires_grad}
    grads = torch.autograd.grad(loss_of(out) * scale, list(trained.values()), allow_unused=True)
    zeros = {k: torch.zeros_like(x) for k, x in module.named_parameters()}
    return [x.detach() for x in out], zeros | {k: g for k, g in zip(trained, grads, strict=True) if g is not None}


def difference(x, y, floor=0.0):
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    if torch.equal(x, y):
        return 0.0
    return float((x - y).abs().max()) / max(float(y.abs().max()), floor)
