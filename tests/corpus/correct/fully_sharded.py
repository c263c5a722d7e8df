"""Data parallelism with split parameters, gradients and optimizer states, by hand.

Legend: B batch, D width, F hidden width, W workers, S steps; [B@data] is a dim split over an axis.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, dense_grad, normal

Params = dict[str, Tensor]


def mlp_loss(p: Params, x: Tensor, y: Tensor) -> Tensor:
    return (torch.tanh(x @ p["up"] + p["bias"]) @ p["down"] - y).square().mean()


def dense_sgd(p: Params, x: Tensor, y: Tensor) -> Any:
    grads, loss = torch.func.grad_and_value(mlp_loss)(p, x, y)
    return {name: p[name] - 0.1 * grads[name] for name in p}, loss


def data_parallel_backward(p: Params, x: Tensor, y: Tensor) -> Any:
    """DDP: each rank calls .backward() on the loss of its rows, then gradients are averaged in one transfer."""
    local = {name: w.detach().requires_grad_() for name, w in fs.pvary(p, "data").items()}
    loss = mlp_loss(local, x, y)
    loss.backward()
    loss, grads = fs.pmean((loss.detach(), {name: w.grad for name, w in local.items()}), "data")
    return {name: w - 0.1 * grads[name] for name, w in p.items()}, loss


def zero_1(p: Params, momentum: Params, x: Tensor, y: Tensor) -> Any:
    """ZeRO-1: whole gradients; each rank updates its part with its part of the momentum, and parts are gathered."""

    def loss(p: Params) -> Tensor:
        return fs.pmean(mlp_loss(fs.pvary(p, "data"), x, y), "data")

    value, grads = fs.value_and_grad(loss)(p)
    own_grads, own = fs.pslice((grads, p), "data")  # [D@data, F]
    momentum = fs.tree.map(lambda m, g: 0.9 * m + g, momentum, own_grads)
    own = fs.tree.map(lambda w, m: w - 0.1 * m, own, momentum)
    return fs.all_gather(own, "data", to="invariant"), momentum, value


def zero_2(p: Params, momentum: Params, x: Tensor, y: Tensor) -> Any:
    """ZeRO-2: as ZeRO-1, but gradients are reduced to the own part: of 6 rows over 4 ranks, unequal ones."""
    grads, value = torch.func.grad_and_value(mlp_loss)(fs.pvary(p, "data"), x, y)
    n = fs.axis_size("data")
    own_grads = fs.tree.map(lambda g: g / n, fs.psum_scatter(grads, "data"))
    momentum = fs.tree.map(lambda m, g: 0.9 * m + g, momentum, own_grads)
    own = fs.tree.map(lambda w, m: w - 0.1 * m, fs.pslice(p, "data"), momentum)
    whole = {k: fs.all_gather(w, "data", size=len(p[k]), to="invariant") for k, w in own.items()}
    return whole, momentum, fs.pmean(value, "data")


def dense_momentum(p: Params, momentum: Params, x: Tensor, y: Tensor) -> Any:
    grads, loss = torch.func.grad_and_value(mlp_loss)(p, x, y)
    momentum = {name: 0.9 * momentum[name] + grads[name] for name in p}
    return {name: p[name] - 0.1 * momentum[name] for name in p}, momentum, loss


def zero_3(p: Params, x: Tensor, y: Tensor) -> Any:
    """ZeRO-3: each weight is gathered just before its use; the transpose scatters its gradient to the parts."""

    def loss(p: Params) -> Tensor:
        h = torch.tanh(x @ fs.all_gather(p["up"], "data") + fs.all_gather(p["bias"], "data"))
        return fs.pmean((h @ fs.all_gather(p["down"], "data") - y).square().mean(), "data")

    value, grads = fs.value_and_grad(loss)(p)
    return fs.tree.map(lambda w, g: w - 0.1 * g, p, grads), value


def flat_parameter(flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """FSDP's flat parameter: all weights in one vector, whose length the ranks do not divide."""
    whole = fs.all_gather(flat, "data", size=46)
    up, bias, down = whole.split([24, 6, 16])
    h = torch.tanh(x @ up.view(4, 6) + bias)
    return fs.pmean((h[:, :4] @ down.view(4, 4) - y).square().mean(), "data")


def dense_flat_parameter(flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
    up, bias, down = flat.split([24, 6, 16])
    h = torch.tanh(x @ up.view(4, 6) + bias)
    return (h[:, :4] @ down.view(4, 4) - y).square().mean()


def hybrid_sharded(p: Params, x: Tensor, y: Tensor) -> Any:  # x [B@replica+shard, D]
    """HSDP: weights split within a group of ranks and replicated over groups."""

    def loss(p: Params) -> Tensor:
        p = fs.all_gather(fs.pvary(p, "replica"), "shard")
        return fs.pmean(mlp_loss(p, x, y), ("replica", "shard"))

    value, grads = fs.value_and_grad(loss)(p)
    return fs.tree.map(lambda w, g: w - 0.1 * g, p, grads), value


def fully_sharded_tensor_parallel(p: Params, x: Tensor, y: Tensor) -> Tensor:
    """Weights split by ZeRO-3 over `data` and by columns and rows over `model`: up [D@data, F@model]."""
    up, down = fs.all_gather(p["up"], "data"), fs.all_gather(p["down"], "data", dim=1)
    bias = fs.pvary(p["bias"], "data")
    h = torch.tanh(fs.pvary(x, "model") @ up + bias)  # [B@data, F@model]
    return fs.pmean((fs.psum(h @ down, "model") - y).square().mean(), "data")


def checkpointed_zero_3(p: Params, x: Tensor, y: Tensor) -> Tensor:
    """Gather in forward, release, and gather again in backward: each layer is recomputed."""

    def layer(w: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ fs.all_gather(w, "data"))

    h = fs.remat(layer)(p["up"], x)
    h = fs.remat(layer)(p["down"], h)
    return fs.pmean((h - y).square().mean(), "data")


def dense_checkpointed_zero_3(p: Params, x: Tensor, y: Tensor) -> Tensor:
    return (torch.tanh(torch.tanh(x @ p["up"]) @ p["down"]) - y).square().mean()


def torch_optimizer_on_parts(p: Params, x: Tensor, y: Tensor) -> Params:
    """torch.optim.AdamW over split weights and a replicated bias together, on gathered weights that are recomputed."""
    leaves = {name: w.detach().requires_grad_() for name, w in p.items()}
    optimizer = torch.optim.AdamW(leaves.values(), lr=0.1, foreach=True)

    def forward(up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
        whole = {"up": fs.all_gather(up, "data"), "bias": fs.pvary(bias, "data"), "down": fs.all_gather(down, "data")}
        return fs.pmean(mlp_loss(whole, x, y), "data")

    for _ in range(2):
        optimizer.zero_grad()
        checkpoint(forward, *(leaves[name] for name in ("up", "bias", "down")), use_reentrant=False).backward()
        optimizer.step()
    return {name: w.detach() for name, w in leaves.items()}


def dense_torch_optimizer_on_parts(p: Params, x: Tensor, y: Tensor) -> Params:
    """The formula of AdamW (Loshchilov and Hutter, 2017)."""
    first = second = {name: torch.zeros_like(w) for name, w in p.items()}
    for step in (1, 2):
        grads = torch.func.grad(mlp_loss)(p, x, y)
        first = {name: 0.9 * m + 0.1 * grads[name] for name, m in first.items()}
        second = {name: 0.999 * v + 0.001 * grads[name].square() for name, v in second.items()}
        p = {
            name: w * (1 - 0.1 * 0.01)
            - 0.1 * first[name] / (1 - 0.9**step) / ((second[name] / (1 - 0.999**step)).sqrt() + 1e-8)
            for name, w in p.items()
        }
    return p


def local_sgd(p: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Federated averaging: each worker takes S steps on its own data, then the models are averaged by weight.

    p [D], x [W@data, S, B, D], y [W@data, S, B], weights [W@data] (McMahan et al., 2017).
    """

    def steps(p: Tensor, x: Tensor, y: Tensor) -> Tensor:
        for x_step, y_step in zip(x, y, strict=True):
            p = p - 0.1 * torch.func.grad(lambda p, x=x_step, y=y_step: (x @ p - y).square().mean())(p)
        return p

    models = torch.func.vmap(steps, in_dims=(None, 0, 0))(fs.pvary(p, "data"), x, y)  # [W@data, D]
    total, count = fs.psum((weights @ models, weights.sum()), "data")
    return total / count


def dense_local_sgd(p: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    total = torch.zeros_like(p)
    for worker in range(len(x)):
        own = p
        for x_step, y_step in zip(x[worker], y[worker], strict=True):
            own = own - 0.1 * 2 * (x_step @ own - y_step) @ x_step / len(x_step)
        total = total + weights[worker] * own
    return total / weights.sum()


def gossip_averaging(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Decentralized SGD: each worker averages its model with those of its two neighbours on a ring, then steps.

    w [W@data, D], x [W@data, B, D], y [W@data, B] (Lian et al., 2017).
    """
    n = fs.axis_size("data")
    left = fs.ppermute(w[-1:], "data", [(i, (i + 1) % n) for i in range(n)])
    right = fs.ppermute(w[:1], "data", [((i + 1) % n, i) for i in range(n)])
    padded = torch.cat([left, w, right])
    mixed = (padded[:-2] + padded[1:-1] + padded[2:]) / 3
    loss = lambda w, x, y: (x @ w - y).square().mean()  # noqa: E731
    return mixed - 0.1 * torch.func.vmap(torch.func.grad(loss))(w, x, y)


def dense_gossip_averaging(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    error = torch.einsum("wbd,wd->wb", x, w) - y
    return (w.roll(1, 0) + w + w.roll(-1, 0)) / 3 - 0.2 * torch.einsum("wb,wbd->wd", error, x) / x.shape[1]


def evaluation_of_split_weights(p: Params, x: Tensor, labels: Tensor) -> Any:
    """Accuracy and mean loss of gathered weights: sums and counts of rows, as the last rank has fewer."""
    with torch.no_grad():
        p = {name: fs.all_gather(w, "data", size=len(MLP[name]), to="invariant") for name, w in p.items()}
        logits = torch.tanh(x @ p["up"] + p["bias"]) @ p["down"]
        nll = F.cross_entropy(logits, labels, reduction="sum")
        correct = (logits.argmax(-1) == labels).sum()
        nll, correct, count = fs.psum((nll, correct, torch.tensor(len(x))), "data")
    return nll / count, correct / count


def dense_evaluation_of_split_weights(p: Params, x: Tensor, labels: Tensor) -> Any:
    logits = torch.tanh(x @ p["up"] + p["bias"]) @ p["down"]
    return F.cross_entropy(logits, labels), (logits.argmax(-1) == labels).float().mean()


DATA, BOTH = P("data"), P(("replica", "shard"))
MLP = {"up": normal("up", 4, 6), "bias": normal("bias", 6), "down": normal("down", 6, 4)}
MOMENTUM = {name: normal(f"momentum {name}", *w.shape) for name, w in MLP.items()}
X, Y = normal("x", 8, 4), normal("y", 8, 4)
PARTS_SPECS = {"up": P("data"), "bias": P(), "down": P("data")}
TWO_SPECS = {"up": P("data", "model"), "bias": P("model"), "down": P("model", "data")}
SQUARES = {"up": normal("up", 4, 4), "down": normal("down", 4, 4)}
WORKERS = normal("workers", 4, 2, 3, 2), normal("targets", 4, 2, 3)

PROGRAMS = [
    Program(data_parallel_backward, {"data": 4}, (P(), DATA, DATA), P(), (MLP, X, Y), dense_sgd),
    Program(zero_1, {"data": 2}, (P(), DATA, DATA, DATA), (P(), DATA, P()), (MLP, MOMENTUM, X, Y), dense_momentum),
    Program(zero_2, {"data": 4}, (P(), DATA, DATA, DATA), (P(), DATA, P()), (MLP, MOMENTUM, X, Y), dense_momentum),
    Program(zero_3, {"data": 2}, (DATA, DATA, DATA), (DATA, P()), (MLP, X, Y), dense_sgd),
    Program(fs.value_and_grad(flat_parameter), {"data": 4}, (DATA, DATA, DATA), (P(), DATA),
            (normal("flat", 46), X, Y), dense_grad(dense_flat_parameter)),
    Program(hybrid_sharded, {"replica": 2, "shard": 2}, (P("shard"), BOTH, BOTH), (P("shard"), P()), (MLP, X, Y),
            dense_sgd),
    Program(fs.value_and_grad(fully_sharded_tensor_parallel), {"data": 2, "model": 2}, (TWO_SPECS, DATA, DATA),
            (P(), TWO_SPECS), (MLP, X, Y), dense_grad(mlp_loss)),
    Program(fs.value_and_grad(checkpointed_zero_3), {"data": 2}, (DATA, DATA, DATA), (P(), DATA), (SQUARES, X, Y),
            dense_grad(dense_checkpointed_zero_3)),
    Program(torch_optimizer_on_parts, {"data": 2}, (PARTS_SPECS, DATA, DATA), PARTS_SPECS, (MLP, X, Y),
            dense_torch_optimizer_on_parts),
    Program(local_sgd, {"data": 2}, (P(), DATA, DATA, DATA), P(),
            (normal("p", 2), *WORKERS, torch.tensor([1.0, 2, 3, 5])), dense_local_sgd),
    Program(gossip_averaging, {"data": 2}, (DATA, DATA, DATA), DATA,
            (normal("w", 4, 2), WORKERS[0][:, 0], WORKERS[1][:, 0]), dense_gossip_averaging),
    Program(evaluation_of_split_weights, {"data": 4}, (DATA, DATA, DATA), P(),
            (MLP, X[:7], torch.tensor([0, 1, 2, 3, 0, 1, 2])), dense_evaluation_of_split_weights),
]  # fmt: skip
