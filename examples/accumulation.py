"""Accumulation: gradients of 2 microbatches are added on each rank, and summed over the ranks once.

python examples/accumulation.py                               4 simulated devices
torchrun --nproc-per-node 4 examples/accumulation.py          4 processes; the same losses
"""

import torch

import fshard as fs
from fshard import P

specs = P()
opt = fs.optim.adamw(1e-2)


def init():
    return [{"up": fs.init.normal((16, 30), std=0.1), "down": fs.init.normal((30, 16), std=0.1)} for _ in range(2)]


def block(p, x):
    return x + torch.relu(x @ p["up"]) @ p["down"]


def loss_fn(params, x):  # x: [B@data, T, D]
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
        loss, grads = fs.accumulate(loss_fn, 2, gather=lambda p: fs.unshard(p, specs, "data"))(params, x)
        return *opt.update(grads, state, params), loss

    losses = []
    for i in range(3):
        x = fs.random.normal(fs.fold_in(fs.key(1), i), (8, 6, 16))  # one global batch, the same in every process
        params, state, loss = step(params, state, x)
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(train(fs.make_mesh(data=4)))
