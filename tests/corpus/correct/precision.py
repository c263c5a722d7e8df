"""Mixed precision, recomputation, compressed and scaled gradients.

A sum of half-precision terms is rounded where it is cut, so the dense forms take the batch in the same two parts.
Legend: B batch, D width, F hidden; [n@axis] is a dim split over an axis.
"""

from __future__ import annotations

import torch
from torch.func import grad, grad_and_value, vmap

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, normal

DATA = {"data": 2}
BATCH = P("data")
X, Y = normal("x", 8, 6), normal("y", 8, 6)  # [B@data, D]
NET = {"up": normal("up", 6, 8, std=0.4), "down": normal("down", 8, 6, std=0.4)}
SPLIT = {"up": P("data"), "down": P("data")}
TENSOR = {"up": fs.column("model"), "down": fs.row("model")}


def forward(p, x):
    return torch.tanh(x @ p["up"]) @ p["down"]


def squared_error(out, y):
    return (out.float() - y).square().mean()


def dense_halves(of_half, p, x, y):
    """Means over the two halves of the batch of (loss, grads)."""
    halves = [of_half(a, b) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
    mean = lambda a, b: (a.float() + b.float()) / 2  # noqa: E731
    return fs.tree.map(mean, *halves)


def half(tree):
    return fs.tree.map(lambda t: t.bfloat16(), tree)


def autocast_forward(p, x, y):
    """torch.autocast around the forward pass; parameters and gradients are float32."""

    def loss(p):
        p = fs.pvary(p, "data")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = forward(p, x)
        return fs.pmean(squared_error(out, y), "data")

    loss_value, grads = fs.value_and_grad(loss)(p)
    return loss_value.bfloat16(), half(grads)


def dense_autocast(p, x, y):
    def of_half(x, y):
        def loss(p):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = forward(p, x)
            return squared_error(out, y)

        return grad_and_value(loss)(p)[::-1]

    return half(dense_halves(of_half, p, x, y))


def gathered_in_half(p, x, y):
    """FSDP with bfloat16 gathers and float32 reductions of the gradients."""

    def loss(p):
        p = fs.unshard(p, SPLIT, "data", dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return fs.pmean(squared_error(forward(p, x.bfloat16()), y), "data")

    loss_value, grads = fs.value_and_grad(loss)(p)
    return loss_value.bfloat16(), half(grads)


def dense_gathered_in_half(p, x, y):
    def of_half(x, y):
        return grad_and_value(lambda p: squared_error(forward(p, x.bfloat16()), y))(half(p))[::-1]

    return half(dense_halves(of_half, p, x, y))


def master_weights(p, x, y, lr):
    """Float32 master weights, a bfloat16 model, gradients averaged in float32, and the new model."""
    model = fs.pvary(fs.cast(p, torch.bfloat16), "data")
    grads = fs.grad(lambda q: squared_error(forward(q, x.bfloat16()), y))(model)
    grads = fs.pmean(fs.cast(grads, torch.float32), "data")
    p = fs.tree.map(lambda w, g: w - lr * g, p, grads)
    return fs.cast(p, torch.bfloat16)


def dense_master_weights(p, x, y, lr):
    def of_half(x, y):
        return (grad(lambda q: squared_error(forward(q, x.bfloat16()), y))(half(p)),)

    (grads,) = dense_halves(of_half, p, x, y)
    return half({k: p[k] - lr * grads[k] for k in p})


def loss_scaling(p, state, x, y):
    """float16 computation, with a scale of the loss that is part of the state."""
    scaler = fs.LossScale(initial=128.0)

    def loss(p):
        q = fs.pvary(fs.cast(p, torch.float16), "data")
        return scaler.scale(fs.pmean(squared_error(forward(q, x.half()), y), "data"), state)

    grads, finite = scaler.unscale(fs.grad(loss)(p), state, P())
    return fs.cast(grads, torch.float16), scaler.adjust(state, finite)


def loss_scaling_by_hand(p, state, x, y):
    """The same by hand: the scale is a replicated tensor that multiplies the local loss."""
    scale = state["scale"]

    def loss(p):
        q = fs.pvary(fs.cast(p, torch.float16), "data")
        return fs.pmean(squared_error(forward(q, x.half()), y) * scale, "data")

    grads = fs.tree.map(lambda g: g / scale, fs.grad(loss)(p))
    finite = torch.stack([g.isfinite().all() for g in grads.values()]).all()
    good = torch.where(finite, state["good"] + 1, 0)
    return fs.cast(grads, torch.float16), {"scale": torch.where(finite, scale, scale / 2), "good": good}


def dense_loss_scaling(p, state, x, y):
    def of_half(x, y):
        q = {k: v.half() for k, v in p.items()}
        return (grad(lambda q: 128 * squared_error(forward(q, x.half()), y))(q),)

    (grads,) = dense_halves(of_half, p, x, y)
    return {k: (g / 128).half() for k, g in grads.items()}, {"scale": state["scale"], "good": state["good"] + 1}


def stochastic_rounding(p, x, y, lr, key):
    """A bfloat16 update by stochastic rounding: random bits, split as the weights are, added below the last digit."""

    def loss(p):
        h = torch.tanh(fs.pvary(x, "model") @ p["up"])
        return (fs.psum(h @ p["down"], "model") - y).square().mean()

    grads = fs.grad(loss)(p)
    new = {}
    for k, w in p.items():
        shape = {"up": (6, 8), "down": (8, 6)}[k]
        noise = fs.random.bits(fs.fold_in(key, k), shape, spec=TENSOR[k]) & 0xFFFF
        bits = (w - lr * grads[k]).view(torch.int32) + noise.int()
        new[k] = (bits & -65536).view(torch.float32).bfloat16()
    return new


def dense_stochastic_rounding(p, x, y, lr, key):
    grads = grad(lambda p: (forward(p, x) - y).square().mean())(p)
    new = {}
    for k, w in p.items():
        value = w - lr * grads[k]
        towards_zero = (value.view(torch.int32) >> 16 << 16).view(torch.float32)
        away = ((value.view(torch.int32) >> 16) + 1 << 16).view(torch.float32)
        fraction = (value - towards_zero) / (away - towards_zero)
        noise = fs.random.bits(fs.fold_in(key, k), w.shape) & 0xFFFF
        new[k] = torch.where(noise >= 65536 * (1 - fraction), away, towards_zero).bfloat16()
    return new


def recomputed_blocks(p, x, y):
    """Tensor-parallel blocks under remat: their collectives run again in backward."""

    @fs.remat
    def block(p, h):
        inner = torch.tanh(fs.pvary(h, "model") @ p["up"])
        return h + fs.psum(inner @ p["down"], "model")

    def loss(p):
        local = fs.pvary(p, "data")
        h = x
        for _ in range(2):
            h = block(local, h)
        return fs.pmean((h - y).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def dense_recomputed_blocks(p, x, y):
    def loss(p):
        h = x + forward(p, x)
        return (h + forward(p, h) - y).square().mean()

    return grad_and_value(loss)(p)[::-1]


def accumulated_by_transform(p, x, y, weights):
    """fs.accumulate over microbatches of a weighted loss, whose weights are replicated."""

    def loss(p, x, y):
        return fs.pmean((weights * (forward(fs.pvary(p, "data"), x) - y).square()).mean(), "data")

    return fs.accumulate(loss, 2)(p, x, y)


def dense_accumulated(p, x, y, weights):
    return grad_and_value(lambda p: ((forward(p, x) - y).square() @ weights).mean() / 6)(p)[::-1]


def low_rank_gradients(p, basis, x, y):
    """PowerSGD: local gradients times a shared basis, two sums of thin matrices instead of one of a whole matrix."""
    local = fs.pvary(p, "data")
    g = fs.grad(lambda w: (torch.tanh(x @ w) - y).square().mean())(local)
    left = fs.pmean(g @ basis, "data")  # [D, 2]
    left = torch.linalg.qr(left).Q
    right = fs.pmean(g.T @ left, "data")
    return left @ right.T


def dense_low_rank_gradients(p, basis, x, y):
    g = grad(lambda w: (torch.tanh(x @ w) - y).square().mean())(p)
    span = g @ basis
    return span @ torch.linalg.pinv(span) @ g


def federated_averaging(w, x, y, counts):
    """FedAvg: clients [K@data, n, D] start from the same weights, train alone, and are averaged by their counts."""

    def client(w, x, y):
        for _ in range(3):
            w = w - 0.1 * grad(lambda w: (x @ w - y).square().mean())(w)
        return w

    trained = vmap(client, (None, 0, 0))(fs.pvary(w, "data"), x, y)  # [K@data, D]
    total, n = fs.psum((counts @ trained, counts.sum()), "data")
    return total / n


def dense_federated_averaging(w, x, y, counts):
    trained = []
    for a, b in zip(x, y, strict=True):
        v = w
        for _ in range(3):
            v = v - 0.2 * a.T @ (a @ v - b) / len(b)
        trained.append(v)
    return torch.stack(trained).T @ (counts / counts.sum())


def gradient_noise_scale(p, x, y):
    """Critical batch size, from the gradients of each example and of the whole batch."""

    def loss(w, x, y):
        return (torch.tanh(x @ w) - y).square().mean()

    each = vmap(grad(loss), (None, 0, 0))(fs.pvary(p, "data"), x, y)
    n = len(x) * fs.axis_size("data")
    mean = fs.pmean(each.mean(0), "data")
    spread = fs.psum((each - mean).square().sum(), "data") / (n - 1)
    return spread / mean.square().sum()


def dense_gradient_noise_scale(p, x, y):
    each = torch.stack([grad(lambda w, a=a, b=b: (torch.tanh(a @ w) - b).square().mean())(p)
                        for a, b in zip(x, y, strict=True)])  # fmt: skip
    return each.var(0).sum() / each.mean(0).square().sum()


STATE = {"scale": torch.tensor(128.0), "good": torch.tensor(3)}
PROGRAMS = [
    Program(autocast_forward, DATA, (P(), BATCH, BATCH), P(), (NET, X, Y), dense_autocast),
    Program(gathered_in_half, DATA, (SPLIT, BATCH, BATCH), (P(), SPLIT), (NET, X, Y), dense_gathered_in_half),
    Program(
        master_weights, DATA, (P(), BATCH, BATCH, P()), P(), (NET, X, Y, torch.tensor(0.1)), dense_master_weights
    ),
    Program(loss_scaling, DATA, (P(), P(), BATCH, BATCH), P(), (NET, STATE, X, Y), dense_loss_scaling),
    Program(loss_scaling_by_hand, DATA, (P(), P(), BATCH, BATCH), P(), (NET, STATE, X, Y), dense_loss_scaling),
    Program(
        stochastic_rounding, {"model": 2}, (TENSOR, P(), P(), P(), P()), TENSOR,
        (NET, X, Y, torch.tensor(0.1), fs.key(21)), dense_stochastic_rounding,
    ),
    Program(
        recomputed_blocks, {"data": 2, "model": 2}, (TENSOR, BATCH, BATCH), (P(), TENSOR), (NET, X, Y),
        dense_recomputed_blocks,
    ),
    Program(
        accumulated_by_transform, DATA, (P(), BATCH, BATCH, P()), P(), (NET, X, Y, normal("weights", 6).abs()),
        dense_accumulated,
    ),
    Program(
        low_rank_gradients, DATA, (P(), P(), BATCH, BATCH), P(), (normal("w", 6, 6), normal("basis", 6, 2), X, Y),
        dense_low_rank_gradients,
    ),
    Program(
        federated_averaging, DATA, (P(), BATCH, BATCH, BATCH), P(),
        (normal("w", 6), normal("clients", 4, 5, 6), normal("goals", 4, 5), torch.tensor([5.0, 2.0, 1.0, 4.0])),
        dense_federated_averaging,
    ),
    Program(
        gradient_noise_scale, DATA, (P(), BATCH, BATCH), P(), (normal("w", 6, 6), X, Y), dense_gradient_noise_scale
    ),
]  # fmt: skip
