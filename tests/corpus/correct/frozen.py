"""Models with a part that is not trained: teachers, references, bases, targets.

Legend: B batch, D width, C classes, R rank, T length, V vocabulary; [n@axis] is a dim split over an axis.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch.func import grad_and_value

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, normal

DATA = {"data": 2}
BATCH = P("data")
X = normal("x", 8, 6)  # [B@data, D]
X2 = X + normal("augmentation", 8, 6, std=0.1)
LABELS = torch.arange(8) % 4
STUDENT = {"w": normal("student", 6, 4, std=0.5), "b": normal("student bias", 4, std=0.1)}
TEACHER = {"w": normal("teacher", 6, 4), "b": normal("teacher bias", 4, std=0.1)}


def linear(p, x):
    return x @ p["w"] + p["b"]


def lora_on_a_frozen_base(lora, base, x, y):
    """Low-rank adapters of a column-split, frozen base."""

    def loss(lora):
        a, b = fs.pvary(lora["a"], ("data", "model")), fs.pvary(lora["b"], "data")
        h = fs.pvary(x, "model") @ base + (fs.pvary(x, "model") @ a) @ b  # [B@data, D@model]
        return fs.pmean(fs.psum((torch.relu(h) - y).square().sum(-1), "model").mean(), "data")

    return fs.value_and_grad(loss)(lora)


def dense_lora(lora, base, x, y):
    def loss(lora):
        return (torch.relu(x @ (base + lora["a"] @ lora["b"])) - y).square().sum(-1).mean()

    return grad_and_value(loss)(lora)[::-1]


def sequence_logp(p, tokens):
    """Log-probability of each sequence under a bigram model: tokens [B, T] -> [B]."""
    logp = torch.log_softmax(p["w"], -1)  # [V, V]
    return logp[tokens[:, :-1], tokens[:, 1:]].sum(-1)


def dpo(policy, reference, chosen, rejected, beta):
    """Direct preference optimization, with a replicated reference and a tensor temperature."""

    def loss(policy):
        policy = fs.pvary(policy, "data")
        margin = sequence_logp(policy, chosen) - sequence_logp(policy, rejected)
        with torch.no_grad():
            reference_margin = sequence_logp(reference, chosen) - sequence_logp(reference, rejected)
        return fs.pmean(-F.logsigmoid(beta * (margin - reference_margin)).mean(), "data")

    return fs.value_and_grad(loss)(policy)


def dense_dpo(policy, reference, chosen, rejected, beta):
    def loss(policy):
        margin = [sequence_logp(p, chosen) - sequence_logp(p, rejected) for p in (policy, reference)]
        return torch.log1p(torch.exp(-beta * (margin[0] - margin[1]))).mean()

    return grad_and_value(loss)(policy)[::-1]


def target_network(online, target, state, action, reward, following, gamma):
    """Q-learning with a target network; the target and the discount are replicated."""

    def loss(online):
        online = fs.pvary(online, "data")
        q = linear(online, state).gather(1, action[:, None])[:, 0]
        with torch.no_grad():
            best = linear(target, following).amax(-1)
        return fs.pmean(F.smooth_l1_loss(q, reward + gamma * best), "data")

    return fs.value_and_grad(loss)(online)


def dense_target_network(online, target, state, action, reward, following, gamma):
    goal = reward + gamma * linear(target, following).max(-1).values

    def loss(online):
        q = linear(online, state)[torch.arange(len(state)), action]
        return F.smooth_l1_loss(q, goal)

    return grad_and_value(loss)(online)[::-1]


def momentum_contrast(query, key_encoder, queue, x, x2, temperature):
    """MoCo: positives by a momentum encoder, negatives from a replicated queue, which takes the new keys."""
    with torch.no_grad():
        keys = F.normalize(linear(key_encoder, x2), dim=-1)

    def loss(query):
        q = F.normalize(linear(fs.pvary(query, "data"), x), dim=-1)
        positive, negative = (q * keys).sum(-1, keepdim=True), q @ queue.T
        logits = torch.cat([positive, negative], -1) / temperature
        return fs.pmean(F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long)), "data")

    value, grads = fs.value_and_grad(loss)(query)
    fresh = fs.all_gather(keys, "data", to="invariant")
    return value, grads, torch.cat([queue, fresh])[-len(queue) :]


def dense_moco(query, key_encoder, queue, x, x2, temperature):
    keys = F.normalize(linear(key_encoder, x2), dim=-1)

    def loss(query):
        q = F.normalize(linear(query, x), dim=-1)
        logits = torch.cat([torch.einsum("bd,bd->b", q, keys)[:, None], q @ queue.T], -1) / temperature
        return torch.logsumexp(logits, -1).mean() - logits[:, 0].mean()

    grads, value = grad_and_value(loss)(query)
    return value, grads, torch.cat([queue[len(keys) :], keys])


LORA, LORA_SPECS = {"a": normal("a", 6, 2), "b": normal("b", 2, 8)}, {"a": P(), "b": fs.column("model")}
TOKENS = torch.arange(8 * 5).view(8, 5) * 7 % 11
BIGRAMS = {"w": normal("policy", 11, 11)}, {"w": normal("reference", 11, 11)}
REPLAY = (X, LABELS, normal("reward", 8), X2, torch.tensor(0.9))  # state, action, reward, next state, discount
REPLAY_SPECS = (P(), P(), BATCH, BATCH, BATCH, BATCH, P())
QUEUE = torch.nn.functional.normalize(normal("queue", 12, 4), dim=-1)
PROGRAMS = [
    Program(
        lora_on_a_frozen_base, {"data": 2, "model": 2}, (LORA_SPECS, fs.column("model"), BATCH, P("data", "model")),
        (P(), LORA_SPECS), (LORA, normal("base", 6, 8), X, normal("targets", 8, 8)), dense_lora,
    ),
    Program(
        dpo, DATA, (P(), P(), BATCH, BATCH, P()), P(), (*BIGRAMS, TOKENS, TOKENS.flip(1), torch.tensor(0.3)), dense_dpo
    ),
    Program(target_network, DATA, REPLAY_SPECS, P(), (STUDENT, TEACHER, *REPLAY), dense_target_network),
    Program(
        momentum_contrast, DATA, (P(), P(), P(), BATCH, BATCH, P()), P(),
        (STUDENT, TEACHER, QUEUE, X, X2, torch.tensor(0.2)), dense_moco,
    ),
]  # fmt: skip
