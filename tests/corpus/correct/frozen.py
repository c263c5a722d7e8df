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


def distillation(student, teacher, x, labels):
    """Hinton's distillation from a replicated teacher under no_grad."""

    def loss(student):
        logits = linear(fs.pvary(student, "data"), x)
        with torch.no_grad():
            target = torch.softmax(linear(teacher, x) / 2, -1)
        soft = F.kl_div(torch.log_softmax(logits / 2, -1), target, reduction="batchmean")
        return fs.pmean(0.5 * F.cross_entropy(logits, labels) + 2.0 * soft, "data")

    return fs.value_and_grad(loss)(student)


def dense_distillation(student, teacher, x, labels):
    def loss(student):
        logits = linear(student, x)
        target = torch.softmax(linear(teacher, x) / 2, -1)
        soft = (target * (target.log() - torch.log_softmax(logits / 2, -1))).sum(-1).mean()
        return 0.5 * F.cross_entropy(logits, labels) + 2.0 * soft

    return grad_and_value(loss)(student)[::-1]


def feature_matching(student, teacher, x):
    """Distillation of features: the teacher's are computed before the loss, and detached."""
    target = torch.tanh(linear(teacher, x)).detach()
    return fs.grad(lambda p: fs.pmean((linear(fs.pvary(p, "data"), x) - target).square().mean(), "data"))(student)


def dense_feature_matching(student, teacher, x):
    r = 2 * (linear(student, x) - torch.tanh(linear(teacher, x))) / (8 * 4)
    return {"w": x.T @ r, "b": r.sum(0)}


def mean_teacher(student, teacher, x, x2, labels, lr, decay):
    """Mean teacher: consistency with an average of past students, on another augmentation."""

    def loss(p):
        logits = linear(fs.pvary(p, "data"), x)
        with torch.no_grad():
            target = torch.softmax(linear(teacher, x2), -1)
        consistency = (torch.softmax(logits, -1) - target).square().sum(-1).mean()
        return fs.pmean(F.cross_entropy(logits, labels) + 3.0 * consistency, "data")

    grads = fs.grad(loss)(student)
    student = fs.tree.map(lambda w, g: w - lr * g, student, grads)
    return student, fs.tree.map(lambda t, w: decay * t + (1 - decay) * w, teacher, student)


def dense_mean_teacher(student, teacher, x, x2, labels, lr, decay):
    target = torch.softmax(linear(teacher, x2), -1)

    def loss(p):
        logits = linear(p, x)
        return F.cross_entropy(logits, labels) + 12.0 * F.mse_loss(torch.softmax(logits, -1), target)

    grads = torch.func.grad(loss)(student)
    student = {k: student[k] - lr * grads[k] for k in student}
    return student, {k: decay * teacher[k] + (1 - decay) * student[k] for k in student}


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


def lora_on_a_replicated_base(lora, base, x, y):
    """Low-rank adapters of a base that is replicated and frozen: no sum of its gradient is asked for."""

    def loss(lora):
        lora = fs.pvary(lora, "data")
        h = torch.relu(x @ base + x @ lora["a"] @ lora["b"])
        return fs.pmean((h - y).square().sum(-1).mean(), "data")

    return fs.value_and_grad(loss)(lora)


def linear_probe(head, backbone, x, labels):
    """A linear classifier on the features of a frozen, FSDP-split backbone."""
    with torch.no_grad():
        w = fs.all_gather(backbone, "data")
        features = torch.tanh(x @ w)

    def loss(head):
        return fs.pmean(F.cross_entropy(linear(fs.pvary(head, "data"), features), labels), "data")

    return fs.grad(loss)(head)


def dense_linear_probe(head, backbone, x, labels):
    features = torch.tanh(x @ backbone)
    r = (torch.softmax(linear(head, features), -1) - F.one_hot(labels, 4)) / len(x)
    return {"w": features.T @ r, "b": r.sum(0)}


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


def double_q_learning(online, target, state, action, reward, following, gamma):
    """Double DQN: the online network picks the action, the target network values it, both detached."""

    def loss(online):
        local = fs.pvary(online, "data")
        q = linear(local, state).gather(1, action[:, None]).squeeze(1)
        pick = linear(local, following).argmax(-1, keepdim=True)
        value = linear(target, following).gather(1, pick).squeeze(1)
        goal = (reward + gamma * value).detach()
        return fs.pmean((q - goal).square().mean(), "data")

    return fs.grad(loss)(online)


def dense_double_q(online, target, state, action, reward, following, gamma):
    rows = torch.arange(len(state))
    pick = linear(online, following).argmax(-1)
    goal = reward + gamma * linear(target, following)[rows, pick]
    return torch.func.grad(lambda p: F.mse_loss(linear(p, state)[rows, action], goal))(online)


def byol(online, target, head, x, x2):
    """BYOL: a prediction of the target network's projection of another view."""

    def loss(online, head):
        online, head = fs.pvary((online, head), "data")
        guess = F.normalize(linear(online, x) @ head, dim=-1)
        with torch.no_grad():
            goal = F.normalize(linear(target, x2), dim=-1)
        return fs.pmean((2 - 2 * (guess * goal).sum(-1)).mean(), "data")

    grads = fs.grad(loss, (0, 1))(online, head)
    new = fs.tree.map(lambda t, o: torch.lerp(o, t, 0.99), target, online)
    return grads, new


def dense_byol(online, target, head, x, x2):
    def loss(online, head):
        return 2 - 2 * F.cosine_similarity(linear(online, x) @ head, linear(target, x2)).mean()

    return torch.func.grad(loss, (0, 1))(online, head), {k: 0.99 * target[k] + 0.01 * online[k] for k in online}


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


def stop_gradient_siamese(p, head, x, x2):
    """SimSiam: each view predicts the other's detached projection."""

    def loss(p, head):
        p, head = fs.pvary((p, head), "data")
        z1, z2 = linear(p, x), linear(p, x2)
        a = F.cosine_similarity(z1 @ head, z2.detach()).mean()
        b = F.cosine_similarity(z2 @ head, z1.detach()).mean()
        return fs.pmean(-(a + b) / 2, "data")

    return fs.grad(loss, (0, 1))(p, head)


def dense_siamese(p, head, x, x2):
    goals = linear(p, x), linear(p, x2)

    def loss(p, head):
        guesses = linear(p, x) @ head, linear(p, x2) @ head
        return -(F.cosine_similarity(guesses[0], goals[1]) + F.cosine_similarity(guesses[1], goals[0])).mean() / 2

    return torch.func.grad(loss, (0, 1))(p, head)


def frozen_batch_norm(p, running, x, labels):
    """A classifier above batch normalization with replicated running statistics, all but the head frozen."""

    def loss(p):
        h = (x - running["mean"]) * torch.rsqrt(running["var"] + 1e-5) * running["weight"] + running["bias"]
        return fs.pmean(F.cross_entropy(linear(fs.pvary(p, "data"), torch.relu(h)), labels), "data")

    return fs.value_and_grad(loss)(p)


def dense_frozen_batch_norm(p, running, x, labels):
    h = F.batch_norm(x, running["mean"], running["var"], running["weight"], running["bias"])
    return grad_and_value(lambda p: F.cross_entropy(linear(p, torch.relu(h)), labels))(p)[::-1]


RUNNING = {
    "mean": normal("mean", 6), "var": normal("var", 6).square() + 0.5, "weight": normal("gain", 6),
    "bias": normal("shift", 6),
}  # fmt: skip
LORA, LORA_SPECS = {"a": normal("a", 6, 2), "b": normal("b", 2, 8)}, {"a": P(), "b": fs.column("model")}
TOKENS = torch.arange(8 * 5).view(8, 5) * 7 % 11
BIGRAMS = {"w": normal("policy", 11, 11)}, {"w": normal("reference", 11, 11)}
REPLAY = (X, LABELS, normal("reward", 8), X2, torch.tensor(0.9))  # state, action, reward, next state, discount
REPLAY_SPECS = (P(), P(), BATCH, BATCH, BATCH, BATCH, P())
QUEUE = torch.nn.functional.normalize(normal("queue", 12, 4), dim=-1)
PROGRAMS = [
    Program(distillation, DATA, (P(), P(), BATCH, BATCH), P(), (STUDENT, TEACHER, X, LABELS), dense_distillation),
    Program(feature_matching, DATA, (P(), P(), BATCH), P(), (STUDENT, TEACHER, X), dense_feature_matching),
    Program(
        mean_teacher, DATA, (P(), P(), BATCH, BATCH, BATCH, P(), P()), P(),
        (STUDENT, TEACHER, X, X2, LABELS, torch.tensor(0.1), torch.tensor(0.9)), dense_mean_teacher,
    ),
    Program(
        lora_on_a_frozen_base, {"data": 2, "model": 2}, (LORA_SPECS, fs.column("model"), BATCH, P("data", "model")),
        (P(), LORA_SPECS), (LORA, normal("base", 6, 8), X, normal("targets", 8, 8)), dense_lora,
    ),
    Program(
        lora_on_a_replicated_base, DATA, (P(), P(), BATCH, BATCH), P(),
        (LORA, normal("base", 6, 8), X, normal("targets", 8, 8)), dense_lora,
    ),
    Program(
        linear_probe, DATA, (P(), P("data"), BATCH, BATCH), P(), (STUDENT, normal("backbone", 6, 6), X, LABELS),
        dense_linear_probe,
    ),
    Program(
        dpo, DATA, (P(), P(), BATCH, BATCH, P()), P(), (*BIGRAMS, TOKENS, TOKENS.flip(1), torch.tensor(0.3)), dense_dpo
    ),
    Program(target_network, DATA, REPLAY_SPECS, P(), (STUDENT, TEACHER, *REPLAY), dense_target_network),
    Program(double_q_learning, DATA, REPLAY_SPECS, P(), (STUDENT, TEACHER, *REPLAY), dense_double_q),
    Program(
        byol, DATA, (P(), P(), P(), BATCH, BATCH), P(), (STUDENT, TEACHER, normal("head", 4, 4), X, X2), dense_byol
    ),
    Program(
        momentum_contrast, DATA, (P(), P(), P(), BATCH, BATCH, P()), P(),
        (STUDENT, TEACHER, QUEUE, X, X2, torch.tensor(0.2)), dense_moco,
    ),
    Program(
        stop_gradient_siamese, DATA, (P(), P(), BATCH, BATCH), P(), (STUDENT, normal("head", 4, 4), X, X2),
        dense_siamese,
    ),
    Program(
        frozen_batch_norm, DATA, (P(), P(), BATCH, BATCH), P(), (STUDENT, RUNNING, X, LABELS), dense_frozen_batch_norm
    ),
]  # fmt: skip
