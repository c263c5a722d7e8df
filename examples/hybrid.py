"""Hybrid: parameters split over the ranks of a machine, and replicated over machines.

python examples/hybrid.py                               4 simulated devices
torchrun --nproc-per-node 4 examples/hybrid.py          4 processes; the same losses
"""

import mlp

import fshard as fs
from fshard import P

opt = fs.optim.adamw(1e-2)
specs = fs.fully_shard(P(), mlp.init(), axis="shard")


def loss_fn(params, x):  # x: [B@(replica, shard), T, D]
    y = fs.scan(mlp.block, params, x, specs=specs, axis=("replica", "shard"))
    return fs.pmean(mlp.loss_of(y, x), ("replica", "shard"))


def train(mesh):
    params = fs.materialize(mlp.init(), specs, mesh, key=fs.key(0))

    @fs.shard_map(mesh=mesh, in_specs=(specs, opt.specs(specs), P(("replica", "shard"))),
                  out_specs=(specs, opt.specs(specs), P()), donate=(0, 1))  # fmt: skip
    def step(params, state, x):
        loss, grads = fs.value_and_grad(loss_fn)(params, x)
        return *opt.update(grads, state, params), loss

    return mlp.losses(step, params, opt.init(params))


if __name__ == "__main__":
    print(train(fs.make_mesh(replica=2, shard=2)))
