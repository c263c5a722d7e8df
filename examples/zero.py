"""ZeRO-1: every rank has all parameters; the moments of the optimizer, and its work, split over the ranks.

python examples/zero.py                               4 simulated devices
torchrun --nproc-per-node 4 examples/zero.py          4 processes; the same losses
"""

import mlp

import fshard as fs
from fshard import P

specs = P()
parts = fs.fully_shard(P(), mlp.init(), axis="data")  # of the moments
opt = fs.optim.zero(fs.optim.adamw(1e-2), specs, parts, axis="data")


def loss_fn(params, x):  # x: [B@data, T, D]
    y = mlp.apply(params, x)
    return fs.pmean(mlp.loss_of(y, x), "data")


def train(mesh):
    params = fs.materialize(mlp.init(), specs, mesh, key=fs.key(0))

    @fs.shard_map(mesh=mesh, in_specs=(specs, opt.specs(specs), P("data")),
                  out_specs=(specs, opt.specs(specs), P()), donate=(0, 1))  # fmt: skip
    def step(params, state, x):
        loss, grads = fs.value_and_grad(loss_fn)(fs.pvary(params, "data"), x)  # summed in `update`
        return *opt.update(grads, state, params), loss

    return mlp.losses(step, params, opt.init(params))


if __name__ == "__main__":
    print(train(fs.make_mesh(data=4)))
