"""Each file of examples/ trains to the losses of one device; those of one model, to the losses of torch's own AdamW."""

from __future__ import annotations

import functools

import pytest
import torch

import fshard as fs
from tests.lib.examples import FOLDER, example

EXAMPLES = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != "mlp")  # which the others import
ONE_MODEL = ["accumulation", "data", "fsdp", "hybrid", "remat_offload", "sequence", "tensor", "zero"]
MESHES = {
    "hybrid": [{"replica": 2, "shard": 2}, {"replica": 1, "shard": 4}],
    **{name: [{"data": 2, "model": 2}, {"data": 1, "model": 3}] for name in ("tensor", "sequence", "vocabulary")},
}


@functools.cache
def dense_losses() -> list[float]:
    """The losses of the model that most examples train, by torch alone on one device."""
    init = example("mlp")["init"]
    blocks = fs.device_get(fs.materialize(init(), fs.P(), fs.make_mesh(one=1), key=fs.key(0)))
    leaves = [block[name].requires_grad_() for block in blocks for name in ("up", "down")]
    optimizer = torch.optim.AdamW(leaves, lr=1e-2)
    losses = []
    for i in range(3):
        y = x = fs.random.normal(fs.fold_in(fs.key(1), i), (8, 6, 16))
        for block in blocks:
            y = y + torch.relu(y @ block["up"]) @ block["down"]
        loss = (y - x.flip(-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_has_the_losses_of_one_device(name: str) -> None:
    train = example(name)["train"]
    meshes = MESHES.get(name, [{"data": 4}])
    want = train(fs.make_mesh(**dict.fromkeys(meshes[0], 1)))
    if name in ONE_MODEL:
        assert want == pytest.approx(dense_losses(), rel=1e-5)
    for axes in meshes:
        assert train(fs.make_mesh(**axes)) == pytest.approx(want, rel=1e-5)


def test_every_parallelism_has_an_example() -> None:
    assert set(EXAMPLES) == {*ONE_MODEL, "lora", "vocabulary"}
