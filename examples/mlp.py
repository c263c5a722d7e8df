"""The model and the loop of the other examples: a residual MLP that learns to reverse vectors, in 3 steps."""

import torch

import fshard as fs


def init():
    return [{"up": fs.init.normal((16, 30), std=0.1), "down": fs.init.normal((30, 16), std=0.1)} for _ in range(2)]


def block(p, x):
    return x + torch.relu(x @ p["up"]) @ p["down"]


def apply(params, x, block=block):
    for p in params:
        x = block(p, x)
    return x


def loss_of(y, x):
    return (y - x.flip(-1)).square().mean()


def batch(i):
    return (fs.random.normal(fs.fold_in(fs.key(1), i), (8, 6, 16)),)  # the global batch, the same in every process


def losses(step, params, state, batch=batch):
    """Return the loss of each of 3 steps, (params, state, *batch) -> (params, state, loss)."""
    found = []
    for i in range(3):
        params, state, loss = step(params, state, *batch(i))
        found.append(loss.item())
    return found
