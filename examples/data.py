"""Data parallel: all parameters on every rank, examples split; the transpose of `unshard` sums the gradients.

python examples/data.py                               4 simulated devices
torchrun --nproc-per-node 4 examples/data.py          4 processes; the same losses
"""

import mlp

import fshard as fs
from fshard import P

specs = P()  # every rank has all of every leaf
opt = fs.optim.adamw(1e-2)


def loss_fn(params, x):  # x: [B@data, T, D]
    params = fs.unshard(params, specs, "data")
    y = mlp.apply(params, x)
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
    print(train(fs.make_mesh(data=4)))
