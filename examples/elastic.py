"""Save the step on a signal to end, and go on, on the same loss curve, with the machines that are there.

python examples/elastic.py out                        4 simulated devices; Ctrl-C, and the same command again, goes on
python -m fshard launch --nnodes=1:4 --nproc-per-node=8 --max-restarts=100 --rdzv-endpoint=HOST:29500 \
    examples/elastic.py out                           on 1 to 4 machines: machines may leave and join
Slurm: elastic.sbatch. Kubernetes: elastic.yaml.
"""

import os
import sys

import mlp
import torch

import fshard as fs
from fshard import P, checkpoint

opt = fs.optim.adamw(1e-2)
specs = fs.fully_shard(P(), mlp.init(), axis="data")
state_specs = {"params": specs, "opt": opt.specs(specs), "step": P()}


def loss_fn(params, x):  # x: [B@data, T, D]
    y = fs.scan(mlp.block, params, x, specs=specs, axis="data")
    squares = (y - x.flip(-1)).square()
    total, count = fs.psum((squares.sum(), torch.ones_like(squares).sum()), "data")
    return total / count  # a mean of means would depend on the mesh where it splits the batch unevenly


def train(mesh, out=None, steps=3):
    """Train from the last checkpoint in `out`, or from the start. The mesh may be another one each time."""
    described = {"params": mlp.init(), "opt": opt.init(mlp.init()), "step": torch.tensor(0)}
    last = checkpoint.latest(out) if out else None
    if last is None:
        state = fs.materialize(described, state_specs, mesh, key=fs.key(0))
    else:
        state = checkpoint.restore(out, described, specs=state_specs, mesh=mesh, step=last)

    @fs.shard_map(mesh=mesh, in_specs=(state_specs, P("data")), out_specs=(state_specs, P()), donate=0)
    def step(state, x):
        loss, grads = fs.value_and_grad(loss_fn)(state["params"], x)
        params, moments = opt.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": moments, "step": state["step"] + 1}, loss

    losses = []
    for i in range(int(state["step"]), steps):  # the batch is a function of the step, on every mesh
        state, loss = step(state, *mlp.batch(i))
        losses.append(loss.item())
        signalled = fs.preempted(mesh)
        if out and (signalled or i + 1 == steps or (i + 1) % 100 == 0):
            checkpoint.save(out, state, step=i + 1, keep=2, overwrite=True)
        if signalled:
            sys.exit(75)  # for whoever starts it again
    return losses


if __name__ == "__main__":
    print(train(fs.make_mesh(data=-1 if "RANK" in os.environ else 4), sys.argv[1], steps=5000)[-1:])
