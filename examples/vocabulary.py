"""Vocabulary or class parallel: the table of a head split over `model`; no rank has all logits, and none moves.

python examples/vocabulary.py                               4 simulated devices
torchrun --nproc-per-node 4 examples/vocabulary.py          4 processes; the same losses
"""

import mlp
import torch

import fshard as fs
from fshard import P, nn

CLASSES = 1003  # that the axis does not divide
specs = {"up": P(), "head": P("model")}
opt = fs.optim.adamw(1e-2)


def init():
    return {"up": fs.init.normal((8, 16), std=0.3), "head": fs.init.normal((CLASSES, 16), std=0.1)}


def loss_fn(params, x, targets):  # x: [B@data, 8], targets: [B@data]
    params = fs.pvary(params, "data")
    features = torch.tanh(x @ params["up"])
    logits = nn.linear(features, params["head"].mT, axis="model")  # [B@data, C@model]
    return nn.cross_entropy(logits, targets, axis="model", size=CLASSES, over="data")


def batch(i):
    x_key, target_key = fs.split(fs.fold_in(fs.key(1), i), 2)
    return fs.random.normal(x_key, (8, 8)), fs.random.randint(target_key, (8,), low=0, high=CLASSES)


def train(mesh):
    params = fs.materialize(init(), specs, mesh, key=fs.key(0))

    @fs.shard_map(mesh=mesh, in_specs=(specs, opt.specs(specs), P("data"), P("data")),
                  out_specs=(specs, opt.specs(specs), P()), donate=(0, 1))  # fmt: skip
    def step(params, state, x, targets):
        loss, grads = fs.value_and_grad(loss_fn)(params, x, targets)
        return *opt.update(grads, state, params), loss

    return mlp.losses(step, params, opt.init(params), batch)


if __name__ == "__main__":
    print(train(fs.make_mesh(data=2, model=2)))
