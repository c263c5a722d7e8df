"""Objectives of representation, generation and reinforcement learning, whose terms are of local examples.

Legend: B batch, T steps, D width, Z latent width, K classes; [B@data] is a dim split over an axis; {V} varies over it,
{I} does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import fshard as fs
from fshard import P, nn
from tests.corpus.wrong.program import WrongProgram, normal

Params = dict[str, Tensor]


# --- similarities with all examples ---------------------------------------------------------------------------


def negatives_of_all_examples(w: Tensor, x: Tensor, y: Tensor) -> Any:  # pairs x and y [B@data, D]
    def loss(w: Tensor) -> Tensor:
        w = fs.pvary(w, "data")
        logits = (x @ w) @ fs.all_gather(y @ w, "data").T
        # WRONG negatives_of_local_examples: logits = (x @ w) @ (y @ w).T  # BUG
        # WRONG gathered_features_detached: mine, n, me = y @ w, fs.axis_size("data"), fs.axis_index("data")
        return nn.cross_entropy(logits, fs.axis_index("data") * len(x) + torch.arange(len(x)), over="data")
        # WRONG negatives_of_local_examples: return nn.cross_entropy(logits, torch.arange(len(x)), over="data")
        # WRONG gathered_features_detached: others = fs.all_gather(mine.detach(), "data").unflatten(0, (n, -1))  # BUG
        # WRONG gathered_features_detached: parts = torch.where(torch.arange(n).view(-1, 1, 1) == me, mine, others)
        # WRONG gathered_features_detached: logits = (x @ w) @ parts.flatten(0, 1).T
        # WRONG gathered_features_detached: targets = me * len(x) + torch.arange(len(x))
        # WRONG gathered_features_detached: return nn.cross_entropy(logits, targets, over="data")

    return fs.value_and_grad(loss)(w)


# --- statistics in a loss -------------------------------------------------------------------------------------


def variance_of_all_features(w: Tensor, x: Tensor) -> Any:
    """VICReg: keep the deviation of each feature, over the batch, above 1."""

    def loss(w: Tensor) -> Tensor:
        # WRONG:
        # WRONG: def loss(w: Tensor) -> Tensor:
        z = x @ fs.pvary(w, "data")
        mean, square = fs.pmean((z.mean(0), z.square().mean(0)), "data")
        return torch.relu(1 - (square - mean.square()).sqrt()).mean()
        # WRONG (3 lines): deviation = (x @ fs.pvary(w, "data")).std(0, correction=0)  # BUG
        # WRONG: return fs.pmean(torch.relu(1 - deviation).mean(), "data")

    return fs.value_and_grad(loss)(w)


def class_weights_of_all_counts(logits: Tensor, y: Tensor) -> Tensor:  # logits [B@data, K], y [B@data]
    counts = fs.psum(torch.bincount(y, minlength=logits.shape[-1]), "data")
    weight = 1 / counts.clamp(min=1)
    # WRONG (2 lines): weight = 1 / torch.bincount(y, minlength=logits.shape[-1]).clamp(min=1)
    losses = functional.cross_entropy(logits, y, reduction="none")
    return fs.psum((losses * weight[y]).sum(), "data")


def mixed_with_global_partners(x: Tensor, w: Tensor) -> Tensor:  # x [B@data, D]: mixup with the next example
    n = fs.axis_size("data")
    after = fs.ppermute(x[:1], "data", [((i + 1) % n, i) for i in range(n)])
    mixed = 0.7 * x + 0.3 * torch.cat([x[1:], after])
    # WRONG (3 lines): mixed = 0.7 * x + 0.3 * x.roll(-1, 0)
    return fs.pmean(torch.tanh(mixed @ fs.pvary(w, "data")).mean(), "data")


# --- generative models ----------------------------------------------------------------------------------------


def prior_term_counted_once(p: Params, x: Tensor) -> Any:  # a Bayesian weight: mean and log_std [D]
    def loss(p: Params) -> Tensor:
        errors = (x @ fs.pvary(p["mean"], "data")).square().sum()
        # WRONG: p = fs.pvary(p, "data")
        # WRONG: errors = (x @ p["mean"]).square().sum()
        kl = (p["mean"].square() + (2 * p["log_std"]).exp() - 2 * p["log_std"] - 1).sum() / 2
        return fs.psum(errors, "data") + kl
        # WRONG: return fs.psum(errors + kl, "data")  # BUG

    return fs.value_and_grad(loss)(p)


def latents_of_global_shape(w: Tensor, x: Tensor) -> Any:  # w [D, Z], x [B@data, D]
    def loss(w: Tensor) -> Tensor:
        mean = x @ fs.pvary(w, "data")
        noise = fs.random.normal(fs.key(5), (fs.global_shape(x, P("data"))[0], w.shape[1]), spec=P("data"))
        # WRONG: noise = fs.random.normal(fs.key(5), mean.shape)
        z = mean + noise  # BUG
        return fs.pmean(torch.tanh(z).square().mean(), "data")

    return fs.value_and_grad(loss)(w)


def diffusion_times_of_global_shape(w: Tensor, x: Tensor) -> Any:
    """Noise examples to random times: the first of each rank have the same ones."""
    times = fs.random.randint(fs.key(5), (fs.global_shape(x, P("data"))[0],), high=10, spec=P("data"))
    # WRONG: times = fs.random.randint(fs.key(5), (len(x),), high=10)
    scale = (1 - times / 10).unsqueeze(-1)

    def loss(w: Tensor) -> Tensor:
        h = torch.tanh((scale * x) @ fs.pvary(w, "data"))  # BUG
        return fs.pmean((h * scale).square().mean(), "data")

    return fs.value_and_grad(loss)(w)


def critic_loss_of_all_examples(p: Params, x: Tensor) -> Any:  # generator [Z, D], critic [D]
    """Return the gradients of a generator and its critic, which has the opposite loss."""

    def scores(p: Params) -> Tensor:
        # WRONG:
        # WRONG: def scores(p: Params) -> Tensor:
        p = fs.pvary(p, "data")
        noise = fs.random.normal(fs.key(5), (4, 3), spec=P("data"))
        return torch.tanh(x @ p["critic"]) - torch.tanh((noise @ p["generator"]) @ p["critic"])

    generator = fs.grad(lambda g: fs.pmean(scores({**p, "generator": g}).mean(), "data"))(p["generator"])
    critic = fs.grad(lambda c: -fs.pmean(scores({**p, "critic": c}).mean(), "data"))(p["critic"])
    # WRONG: critic = fs.grad(lambda c: -scores({**p, "critic": c}).mean())(p["critic"])  # BUG
    return {"generator": generator, "critic": critic}


# --- reinforcement learning -----------------------------------------------------------------------------------


def _discounted(rewards: Tensor, last: Tensor) -> Tensor:  # [T]
    out = []
    for reward in rewards.flip(0):
        last = reward + 0.9 * last
        out.append(last)
    return torch.stack(out).flip(0)


def returns_with_the_later_parts(rewards: Tensor) -> Tensor:  # [T@data]
    return fs.pslice(_discounted(fs.all_gather(rewards, "data", to="invariant"), torch.zeros(())), "data")
    # WRONG: return _discounted(rewards, torch.zeros(()))


def penalty_adapted_to_mean_divergence(beta: Tensor, divergence: Tensor) -> Tensor:  # beta [], divergence [B@data]
    too_far = fs.pmean(divergence.mean(), "data") > 0.5
    # WRONG: too_far = divergence.mean() > 0.5
    return torch.where(too_far, beta * 2, beta / 2)  # BUG


B, D, K = 4, 4, 3
DATA2, DATA = {"data": 2}, P("data")
X, Y, W, SQUARE = normal("x", B, D), normal("y", B, D), normal("w", D, K), normal("square", D, D, std=0.5)
LABELS = torch.tensor([0, 0, 2, 0])
RETURNS = normal("returns", 6)
BAYES = {"mean": normal("mean", D), "log_std": normal("log_std", D, std=0.3)}
GAN = {"generator": normal("generator", 3, D), "critic": normal("critic", D)}
ONE, PAIRS = (P(), DATA), (P(), DATA, DATA)

PROGRAMS = [
    WrongProgram(
        "negatives_of_local_examples", negatives_of_all_examples, DATA2, PAIRS, P(), (SQUARE, X, Y), "verify",
        "data",
    ),
    WrongProgram(
        "gathered_features_detached", negatives_of_all_examples, DATA2, PAIRS, P(), (SQUARE, X, Y), "verify", "data",
    ),
    WrongProgram(
        "variance_of_local_features", variance_of_all_features, DATA2, ONE, P(), (SQUARE, X), "verify", "data",
    ),
    WrongProgram(
        "class_weights_of_local_counts", class_weights_of_all_counts, DATA2, (DATA, DATA), P(), (X, LABELS),
        "verify", "data",
    ),
    WrongProgram(
        "mixed_with_local_partners", mixed_with_global_partners, DATA2, (DATA, P()), P(), (X, W), "verify", "data",
    ),
    WrongProgram(
        "prior_term_counted_by_every_rank", prior_term_counted_once, DATA2, ONE, P(), (BAYES, X), "verify", "data",
    ),
    WrongProgram("latents_of_local_shape", latents_of_global_shape, DATA2, ONE, P(), (W, X), "types", "data"),
    WrongProgram(
        "diffusion_times_of_local_shape", diffusion_times_of_global_shape, DATA2, ONE, P(), (W, X), "types", "data",
    ),
    WrongProgram(
        "critic_loss_of_local_examples", critic_loss_of_all_examples, DATA2, ONE, P(), (GAN, X), "types", "data",
    ),
    WrongProgram(
        "returns_cut_at_the_part", returns_with_the_later_parts, DATA2, (DATA,), DATA, (RETURNS,), "verify", "data",
    ),
    WrongProgram(
        "penalty_adapted_to_local_divergence", penalty_adapted_to_mean_divergence, DATA2, (P(), DATA), P(),
        (torch.tensor(0.2), torch.tensor([0.9, 0.8, 0.2, 0.3])), "types", "data",
    ),
]  # fmt: skip
