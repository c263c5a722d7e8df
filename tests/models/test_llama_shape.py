"""The train step of Llama's shape is right at a size that runs; `check` gets it at sizes that do not."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import fshard as fs
from tests.lib.llama_shape import FLOAT32, Config, described_state, init, optimizer, rotated, specs, train_step

TINY = Config(layers=1, std=0.3)  # std: logits and all gradients are far from 0


def batch(cfg: Config, b: int = 4, t: int = 6) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, cfg.vocab, (b, t + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def placed(cfg: Config, mesh: fs.Mesh):
    """The initial parameters and optimizer state."""
    state_specs = specs(cfg), optimizer(cfg).specs(specs(cfg))
    return fs.materialize(described_state(cfg), state_specs, mesh, key=fs.key(0))


def test_the_mesh_never_changes_the_step():
    mesh = fs.make_mesh(data=2, model=2)
    step = train_step(TINY, mesh, policy=FLOAT32)
    before = placed(TINY, mesh)
    fs.verify(step, *before, *batch(TINY))
    _, (clipped, adam), loss = fs.device_get(step(*before, *batch(TINY)))
    for path, m in fs.tree.leaves_with_path(adam["m"]):  # a tenth of the clipped gradient
        assert m.abs().max() > 1e-4, path  # no leaf is compared with zeros
    assert clipped["norm"] > 1
    assert 0.5 * math.log(TINY.vocab) < loss < 2 * math.log(TINY.vocab)


def test_in_bfloat16_parameters_and_state_stay_in_float32():
    mesh = fs.make_mesh(data=2, model=1)
    params, state, loss = train_step(TINY, mesh)(*placed(TINY, mesh), *batch(TINY))
    _, _, exact = train_step(TINY, mesh, policy=FLOAT32)(*placed(TINY, mesh), *batch(TINY))
    assert {x.dtype for x in fs.tree.leaves((params, state, loss))} == {torch.float32, torch.int64}
    error = abs(float(fs.device_get(loss)) / float(fs.device_get(exact)) - 1)
    assert 1e-6 < error < 0.02  # the error of bfloat16's 8 bits


def test_rotated_scores_depend_only_on_distances():
    q, k = torch.randn(2, 1, 1, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    shifted = torch.nn.functional.pad(q, (0, 0, 3, 0)), torch.nn.functional.pad(k, (0, 0, 3, 0))
    near, far = (rotated(x, 100.0) @ rotated(y, 100.0).mT for x, y in ((q, k), shifted))
    torch.testing.assert_close(far[..., 3:, 3:], near, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(near, q @ k.mT)


def test_every_leaf_is_fully_sharded():
    for (path, spec), leaf in zip(fs.tree.leaves_with_path(specs(TINY)), fs.tree.leaves(init(TINY)), strict=True):
        assert "data" in spec.axes, path
        assert ("model" in spec.axes) == (leaf.ndim > 1), path
