"""Tensor parallel, beside data parallel: hidden units split over `model`. A column split, a row split, and one sum.

python examples/tensor.py                               4 simulated devices
torchrun --nproc-per-node 4 examples/tensor.py          4 processes; the same losses
"""

import torch

import fshard as fs
from fshard import P

specs = {"up": fs.column("model"), "down": fs.row("model")}
specs = [specs, specs]
opt = fs.optim.adamw(1e-2)


def init():
    return [{"up": fs.init.normal((16, 30), std=0.1), "down": fs.init.normal((30, 16), std=0.1)} for _ in range(2)]


def block(p, x):  # x: [B@data, T, D]
    h = torch.relu(fs.pvary(x, "model") @ p["up"])  # [B@data, T, H@model]
    return x + fs.psum(h @ p["down"], "model")


def loss_fn(params, x):  # x: [B@data, T, D]
    params = fs.pvary(params, "data")
    y = x
    for p in params:
        y = block(p, y)
    return fs.pmean((y - x.flip(-1)).square().mean(), "data")


def train(mesh):
    params = fs.materialize(init(), specs, mesh, key=fs.key(0))
    state = opt.init(params)

    @fs.shard_map(
        mesh=mesh,
        in_specs=(specs, opt.specs(specs), P("data")),
        out_specs=(specs, opt.specs(specs), P()),
        donate=(0, 1),
    )
    def step(params, state, x):
        loss, grads = fs.value_and_grad(loss_fn)(params, x)
        return *opt.update(grads, state, params), loss

    losses = []
    for i in range(3):
        x = fs.random.normal(fs.fold_in(fs.key(1), i), (8, 6, 16))  # one global batch, the same in every process
        params, state, loss = step(params, state, x)
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(train(fs.make_mesh(data=2, model=2)))
