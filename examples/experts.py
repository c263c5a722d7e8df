"""Expert parallel: each rank has two of eight experts, and tokens go to the ranks of their experts and back.

python examples/experts.py                               4 simulated devices
torchrun --nproc-per-node 4 examples/experts.py          4 processes; the same losses
"""

import mlp
import torch

import fshard as fs
from fshard import P, nn

specs = {"router": P(), "up": P("expert"), "down": P("expert")}
opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0, specs), fs.optim.adamw(1e-2))  # counts each expert once


def init():
    return {"router": fs.init.normal((16, 8), std=0.1), "up": fs.init.normal((8, 16, 30), std=0.1),
            "down": fs.init.normal((8, 30, 16), std=0.1)}  # fmt: skip


def run(p, rows, counts):  # rows: [M, D], of the first expert here, then of the second
    h = torch.relu(nn.grouped_linear(rows, p["up"], counts))
    return nn.grouped_linear(h, p["down"], counts)


def loss_fn(params, x):  # x: [B@expert, T, D]
    tokens = x.flatten(0, 1)
    routing = nn.route(tokens @ fs.pvary(params["router"], "expert"), 2)
    experts = {"up": params["up"], "down": params["down"]}  # [2, ..], of this rank
    y = tokens + nn.mixture(tokens, routing, experts, run, axis="expert")
    balance = nn.balance(routing, "expert")  # over the tokens of all ranks
    return fs.pmean(mlp.loss_of(y, tokens), "expert") + 0.01 * balance.loss


def train(mesh):
    params = fs.materialize(init(), specs, mesh, key=fs.key(0))

    @fs.shard_map(mesh=mesh, in_specs=(specs, opt.specs(specs), P("expert")),
                  out_specs=(specs, opt.specs(specs), P()), donate=(0, 1))  # fmt: skip
    def step(params, state, x):
        loss, grads = fs.value_and_grad(loss_fn)(params, x)
        return *opt.update(grads, state, params), loss

    return mlp.losses(step, params, opt.init(params))


if __name__ == "__main__":
    print(train(fs.make_mesh(expert=4)))
