"""Reinforcement learning and search without gradients.

Legend: B batch, T time, S state, A actions, N population; [n@axis] is a dim split over an axis.
"""

from __future__ import annotations

import torch
from torch.func import grad_and_value

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, normal

DATA = {"data": 2}
BATCH = P("data")
STATES = normal("states", 8, 5)  # [B@data, S]
ACTIONS = torch.tensor([0, 2, 1, 1, 2, 0, 2, 1])
REWARDS = normal("rewards", 8)
POLICY = {"w": normal("policy", 5, 3, std=0.5), "b": normal("policy bias", 3, std=0.1)}
OLD = {k: v + 0.1 * v.flip(0) for k, v in POLICY.items()}


def logp(p, states, actions):
    return torch.log_softmax(states @ p["w"] + p["b"], -1).gather(1, actions[:, None])[:, 0]


def proximal_policy(p, old, states, actions, advantages, entropy_weight):
    """PPO: advantages normalized over all ranks, the old policy's ratio, clipping and an entropy bonus."""
    mean = fs.pmean(advantages.mean(), "data")
    var = fs.pmean((advantages - mean).square().mean(), "data")
    advantages = (advantages - mean) / (var.sqrt() + 1e-8)
    before = logp(old, states, actions)

    def loss(p):
        p = fs.pvary(p, "data")
        ratio = torch.exp(logp(p, states, actions) - before)
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages)
        scores = torch.log_softmax(states @ p["w"] + p["b"], -1)
        entropy = -(scores.exp() * scores).sum(-1)
        return fs.pmean(-(gain + entropy_weight * entropy).mean(), "data")

    return fs.value_and_grad(loss)(p)


def dense_proximal_policy(p, old, states, actions, advantages, entropy_weight):
    a = (advantages - advantages.mean()) / advantages.std(correction=0)

    def loss(p):
        policy = torch.distributions.Categorical(logits=states @ p["w"] + p["b"], validate_args=False)
        ratio = torch.exp(policy.log_prob(actions) - logp(old, states, actions))
        allowed = torch.where(a > 0, ratio < 1.1, ratio > 0.9)
        gain = torch.where(allowed, ratio, torch.where(a > 0, 1.1, 0.9)) * a
        return -(gain + entropy_weight * policy.entropy()).mean()

    return grad_and_value(loss)(p)[::-1]


def fitness(w, x, y):
    return -(torch.tanh(x @ w) - y).square().mean()


def evolution_on_split_data(w, x, y, sigma, key):
    """The other way: the population is the same on each rank, and each rank has its part of the data."""
    noise = fs.random.normal(key, (6, len(w)))
    population = w + sigma * noise  # [N, S]
    errors = (torch.tanh(x @ population.T) - y[:, None]).square().mean(0)
    scores = -fs.pmean(errors, "data")
    ranks = scores.argsort().argsort() / 5 - 0.5
    return w + 0.1 * ranks @ noise / (6 * sigma)


def dense_evolution_on_split_data(w, x, y, sigma, key):
    noise = fs.random.normal(key, (6, len(w)))
    scores = torch.stack([fitness(w + sigma * e, x, y) for e in noise])
    ranks = torch.stack([(scores < s).sum() for s in scores]) / 5 - 0.5
    return w + 0.1 * sum(r * e for r, e in zip(ranks, noise, strict=True)) / (6 * sigma)


LEARN = (P(), BATCH, BATCH, BATCH, P())
SEARCH = (normal("w", 5), STATES, REWARDS, torch.tensor(0.3), fs.key(4))
PROGRAMS = [
    Program(
        proximal_policy, DATA, (P(), *LEARN), P(), (POLICY, OLD, STATES, ACTIONS, REWARDS, torch.tensor(0.01)),
        dense_proximal_policy,
    ),
    Program(
        evolution_on_split_data, DATA, (P(), BATCH, BATCH, P(), P()), P(), SEARCH, dense_evolution_on_split_data
    ),
]  # fmt: skip
