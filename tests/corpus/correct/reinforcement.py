"""Reinforcement learning and search without gradients.

Legend: B batch, T time, S state, A actions, N population; [n@axis] is a dim split over an axis.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch.func import grad, grad_and_value

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
VALUE = {"w": normal("value", 5, std=0.5)}


def logp(p, states, actions):
    return torch.log_softmax(states @ p["w"] + p["b"], -1).gather(1, actions[:, None])[:, 0]


def policy_gradient_with_baseline(p, states, actions, returns, baseline):
    """REINFORCE with a moving-average baseline, which is replicated."""

    def loss(p):
        return fs.pmean(-(logp(fs.pvary(p, "data"), states, actions) * (returns - baseline)).mean(), "data")

    new = 0.9 * baseline + 0.1 * fs.pmean(returns.mean(), "data")
    return fs.grad(loss)(p), new


def dense_policy_gradient(p, states, actions, returns, baseline):
    probs = torch.softmax(states @ p["w"] + p["b"], -1)
    r = (probs - F.one_hot(actions, 3)) * (returns - baseline)[:, None] / len(states)
    return {"w": states.T @ r, "b": r.sum(0)}, torch.lerp(returns.mean(), baseline, 0.9)


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


def actor_and_critic(p, value, states, actions, rewards, following, gamma):
    """Advantage actor-critic: the advantage is detached for the actor, the critic is bootstrapped from itself."""

    def loss(p, value):
        p, value = fs.pvary((p, value), "data")
        v = states @ value["w"]
        goal = rewards + gamma * (following @ value["w"]).detach()
        advantage = (goal - v).detach()
        return fs.pmean((-logp(p, states, actions) * advantage + 0.5 * (goal - v).square()).mean(), "data")

    return fs.grad(loss, (0, 1))(p, value)


def dense_actor_and_critic(p, value, states, actions, rewards, following, gamma):
    delta = rewards + gamma * following @ value["w"] - states @ value["w"]
    actor = grad(lambda p: F.cross_entropy(states @ p["w"] + p["b"], actions, reduction="none") @ delta / 8)(p)
    return actor, {"w": -(states.T @ delta) / 8}


def generalized_advantages(value, states, rewards, gamma, decay):
    """GAE over time, of trajectories [B@data, T, S] by a replicated value function, without gradients."""
    with torch.no_grad():
        v = states @ value["w"]  # [B@data, T + 1]
        delta = rewards + gamma * v[:, 1:] - v[:, :-1]
        out, total = [], torch.zeros(len(states))
        for t in reversed(range(rewards.shape[1])):
            total = delta[:, t] + gamma * decay * total
            out.append(total)
        return torch.stack(out[::-1], 1)


def dense_generalized_advantages(value, states, rewards, gamma, decay):
    v = torch.einsum("bts,s->bt", states, value["w"])
    delta = rewards + gamma * v[:, 1:] - v[:, :-1]
    n = rewards.shape[1]
    powers = (gamma * decay) ** (torch.arange(n) - torch.arange(n)[:, None]).clamp(min=0)
    return delta @ powers.triu().T


def soft_actor_critic(p, critics, temperature, states, key):
    """SAC's actor and temperature: a reparametrized action against the smaller of two frozen critics."""

    def loss(p, log_temperature):
        local = fs.pvary(p, "data")
        mean, log_std = (states @ local["w"]).chunk(2, -1)
        noise = fs.random.normal(key, (fs.global_shape(states, P("data"))[0], 2), spec=P("data"))
        raw = mean + log_std.exp() * noise
        entropy = 0.5 * noise.square() + log_std + torch.log(1 - torch.tanh(raw).square() + 1e-6)
        entropy = entropy.sum(-1)
        values = torch.cat([states, torch.tanh(raw)], -1) @ critics  # [B@data, 2]
        actor = (log_temperature.exp().detach() * -entropy - values.amin(-1)).mean()
        target = fs.pmean((entropy.detach() + 1.0).mean(), "data")
        return fs.pmean(actor, "data") + log_temperature * target

    return fs.grad(loss, (0, 1))(p, temperature)


def dense_soft_actor_critic(p, critics, temperature, states, key):
    noise = fs.random.normal(key, (len(states), 2))

    def parts(p):
        mean, log_std = (states @ p["w"]).chunk(2, -1)
        raw = mean + log_std.exp() * noise
        entropy = (0.5 * noise**2 + log_std + torch.log(1 - torch.tanh(raw) ** 2 + 1e-6)).sum(-1)
        values = states @ critics[:5] + torch.tanh(raw) @ critics[5:]
        return entropy, torch.minimum(values[:, 0], values[:, 1])

    def loss(p):
        entropy, value = parts(p)
        return -(temperature.exp() * entropy + value).mean()

    return grad(loss)(p), parts(p)[0].mean() + 1.0


def behaviour_cloning_with_importance(p, behaviour, states, actions):
    """Off-policy weights, truncated, normalized over all ranks and detached."""

    def loss(p):
        local = fs.pvary(p, "data")
        ratio = torch.exp(logp(local, states, actions) - logp(behaviour, states, actions)).detach().clamp(max=2)
        weights = ratio / fs.psum(ratio.sum(), "data")
        return fs.psum(-(weights * logp(local, states, actions)).sum(), "data")

    return fs.value_and_grad(loss)(p)


def dense_importance(p, behaviour, states, actions):
    weights = torch.exp(logp(p, states, actions) - logp(behaviour, states, actions)).clamp(max=2)
    weights = weights / weights.sum()
    return grad_and_value(lambda p: -(weights @ logp(p, states, actions)))(p)[::-1]


def fitness(w, x, y):
    return -(torch.tanh(x @ w) - y).square().mean()


def evolution_strategy(w, x, y, sigma, key):
    """Antithetic evolution strategy: each rank evaluates its rows of one population, [N@data, S], on all data."""
    noise = fs.random.normal(key, (8, len(w)), spec=P("data"))
    scores = torch.stack([fitness(w + sigma * e, x, y) - fitness(w - sigma * e, x, y) for e in noise])
    step = fs.psum(scores @ noise, "data") / (2 * 8 * sigma)
    return w + 0.1 * step


def dense_evolution_strategy(w, x, y, sigma, key):
    noise = fs.random.normal(key, (8, len(w)))
    plus, minus = torch.tanh(x @ (w + sigma * noise).T), torch.tanh(x @ (w - sigma * noise).T)
    scores = (minus - y[:, None]).square().mean(0) - (plus - y[:, None]).square().mean(0)
    return w + 0.1 * (scores[:, None] * noise).mean(0) / (2 * sigma)


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


def cross_entropy_method(mean, std, x, y, key):
    """CEM: samples split over the ranks, the elite chosen among all."""
    noise = fs.random.normal(key, (8, len(mean)), spec=P("data"))
    samples = mean + std * noise  # [N@data, S]
    scores = torch.stack([fitness(s, x, y) for s in samples])
    scores, samples = fs.all_gather((scores, samples), "data", to="invariant")
    elite = samples[scores.topk(3).indices]
    return elite.mean(0), elite.std(0)


def dense_cross_entropy_method(mean, std, x, y, key):
    samples = torch.addcmul(mean, std, fs.random.normal(key, (8, len(mean))))
    scores = (torch.tanh(x @ samples.T) - y[:, None]).square().mean(0)
    elite = samples[scores.argsort()[:3]]
    return elite.mean(0), elite.var(0).sqrt()


def upper_confidence_bandit(counts, sums, scores, key):
    """A batch of bandit pulls by an upper confidence bound; counts and sums of the arms are replicated."""
    n = len(scores) * fs.axis_size("data")
    bonus = torch.sqrt(2 * counts.sum().log() / counts)
    arms = (scores + sums / counts + bonus).argmax(-1)  # [B@data]
    noise = fs.random.normal(key, (n,), spec=P("data"))
    rewards = scores.gather(1, arms[:, None])[:, 0] + 0.1 * noise
    hot = F.one_hot(arms, len(counts)).float()
    pulled, gained = fs.psum((hot.sum(0), rewards @ hot), "data")
    return counts + pulled, sums + gained


def dense_bandit(counts, sums, scores, key):
    arms = (scores + sums / counts + (2 * counts.sum().log() / counts) ** 0.5).argmax(-1)
    rewards = scores[torch.arange(len(arms)), arms] + 0.1 * fs.random.normal(key, (len(arms),))
    return counts.index_add(0, arms, torch.ones(len(arms))), sums.index_add(0, arms, rewards)


GAMMA = torch.tensor(0.9)
LEARN = (P(), BATCH, BATCH, BATCH, P())
SEARCH = (normal("w", 5), STATES, REWARDS, torch.tensor(0.3), fs.key(4))
PROGRAMS = [
    Program(
        policy_gradient_with_baseline, DATA, LEARN, P(), (POLICY, STATES, ACTIONS, REWARDS, torch.tensor(0.4)),
        dense_policy_gradient,
    ),
    Program(
        proximal_policy, DATA, (P(), *LEARN), P(), (POLICY, OLD, STATES, ACTIONS, REWARDS, torch.tensor(0.01)),
        dense_proximal_policy,
    ),
    Program(
        actor_and_critic, DATA, (P(), P(), BATCH, BATCH, BATCH, BATCH, P()), P(),
        (POLICY, VALUE, STATES, ACTIONS, REWARDS, STATES.roll(1, 0), GAMMA), dense_actor_and_critic,
    ),
    Program(
        generalized_advantages, DATA, (P(), BATCH, BATCH, P(), P()), BATCH,
        (VALUE, normal("trajectories", 4, 6, 5), normal("rewards", 4, 5), GAMMA, torch.tensor(0.95)),
        dense_generalized_advantages,
    ),
    Program(
        soft_actor_critic, DATA, (P(), P(), P(), BATCH, P()), P(),
        ({"w": normal("actor", 5, 4, std=0.3)}, normal("critics", 7, 2), torch.tensor(-1.0), STATES, fs.key(9)),
        dense_soft_actor_critic,
    ),
    Program(
        behaviour_cloning_with_importance, DATA, (P(), P(), BATCH, BATCH), P(), (POLICY, OLD, STATES, ACTIONS),
        dense_importance,
    ),
    Program(evolution_strategy, DATA, (P(), P(), P(), P(), P()), P(), SEARCH, dense_evolution_strategy),
    Program(
        evolution_on_split_data, DATA, (P(), BATCH, BATCH, P(), P()), P(), SEARCH, dense_evolution_on_split_data
    ),
    Program(
        cross_entropy_method, DATA, (P(), P(), P(), P(), P()), P(),
        (normal("mean", 5), torch.tensor([1.0, 0.5, 0.5, 1.0, 2.0]), STATES, REWARDS, fs.key(6)),
        dense_cross_entropy_method,
    ),
    Program(
        upper_confidence_bandit, DATA, (P(), P(), BATCH, P()), P(),
        (torch.tensor([4.0, 2.0, 7.0]), torch.tensor([1.0, 0.5, 3.0]), normal("arms", 8, 3), fs.key(8)), dense_bandit,
    ),
]  # fmt: skip
