"""Sequence parallel, with tensor parallel: between blocks each rank of `model` has a part of the sequence.

python examples/sequence.py                               4 simulated devices
torchrun --nproc-per-node 4 examples/sequence.py          4 processes; the same losses
"""

import torch

import fshard as fs
from fshard import P

specs = {"up": fs.column("model"), "down": fs.row("model")}
specs = [specs, specs]
opt = fs.optim.adamw(1e-2)


def init():
    return [{"up": fs.init.normal((16, 30), std=0.1), "down": fs.init.normal((30, 16), std=0.1)} for _ in range(2)]


def block(p, x):  # x: [B@data, T@model, D]
    whole = fs.all_gather(x, "model", dim=1)  # [B@data, T, D]
    h = torch.relu(whole @ p["up"])  # [B@data, T, H@model]
    return x + fs.psum_scatter(h @ p["down"], "model", dim=1)


def loss_fn(params, x):  # x: [B@data, T@model, D]
    params = fs.pvary(params, "data")
    y = x
    for p in params:
        y = block(p, y)
    return fs.pmean((y - x.flip(-1)).square().mean(), ("data", "model"))


def train(mesh):
    params = fs.materialize(init(), specs, mesh, key=fs.key(0))
    state = opt.init(params)

    @fs.shard_map(
        mesh=mesh,
        in_specs=(specs, opt.specs(specs), P("data", "model")),
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
