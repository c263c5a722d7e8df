"""Tensor parallel with data parallel: hidden units split over `model`. A column split, a row split, and one sum.

python examples/tensor.py                               4 simulated devices
torchrun --nproc-per-node 4 examples/tensor.py          4 processes; the same losses
"""

import mlp
import torch

import fshard as fs
from fshard import P

specs = {"up": fs.column("model"), "down": fs.row("model")}
specs = [specs, specs]
opt = fs.optim.adamw(1e-2)


def block(p, x):  # x: [B@data, T, D]
    h = torch.relu(fs.pvary(x, "model") @ p["up"])  # [B@data, T, H@model]
    return x + fs.psum(h @ p["down"], "model")


def loss_fn(params, x):  # x: [B@data, T, D]
    params = fs.pvary(params, "data")
    y = mlp.apply(params, x, block)
    return fs.pmean(mlp.loss_of(y, x), "data")


def train(mesh):
    params = fs.materialize(mlp.init(), specs, mesh, key=fs.key(0))

    @fs.shard_map(mesh=mesh, in_specs=(specs, opt.specs(specs), P("data")),
                  out_specs=(specs, opt.specs(specs), P()), donate=(0, 1))  # fmt: skip
    def step(params, state, x):
        loss, grads = fs.value_and_grad(loss_fn)(params, x)
        return *opt.update(grads, state, params), loss

    return mlp.losses(step, params, opt.init(params))


if __name__ == "__main__":
    print(train(fs.make_mesh(data=2, model=2)))
