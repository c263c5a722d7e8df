"""Losses with replicated values that are not trained: statistics, weights, tables, masks.

Legend: B batch, D width, C classes, T length, H heads; [n@axis] is a dim split over an axis.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch.func import grad_and_value

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, normal

DATA = {"data": 2}
BATCH = P("data")
X, Y = normal("x", 8, 6), normal("y", 8, 4)  # [B@data, D], [B@data, C]
LABELS = torch.arange(8) * 3 % 4
W = normal("w", 6, 4, std=0.5)  # [D, C]
MEAN, STD = normal("mean", 6), normal("std", 6).abs() + 0.5


def standardized_inputs(w, mean, std, x, y):
    """Regression on inputs and targets that are standardized by replicated statistics."""

    def loss(w):
        return fs.pmean((((x - mean) / std) @ fs.pvary(w, "data") - y).square().mean(), "data")

    return fs.value_and_grad(loss)(w)


def dense_standardized_inputs(w, mean, std, x, y):
    design = (x - mean) / std
    return F.mse_loss(design @ w, y), 2 * design.T @ (design @ w - y) / y.numel()


def global_standardization(w, x, y):
    """Statistics of the whole batch, computed first by pmean, and then used as constants."""
    with torch.no_grad():
        mean = fs.pmean(x.mean(0), "data")
        std = fs.pmean((x - mean).square().mean(0), "data").sqrt()

    def loss(w):
        return fs.pmean((((x - mean) / std) @ fs.pvary(w, "data") - y).square().mean(), "data")

    return fs.grad(loss)(w)


def dense_global_standardization(w, x, y):
    design = (x - x.mean(0)) / x.std(0, correction=0)
    return 2 * design.T @ (design @ w - y) / y.numel()


def class_weights(w, weights, x, labels):
    """Weighted cross-entropy: the sum over the batch divided by the sum of the weights."""

    def loss(w):
        total = F.cross_entropy(x @ fs.pvary(w, "data"), labels, weight=weights, reduction="sum")
        return fs.psum(total, "data") / fs.psum(weights[labels].sum(), "data")

    return fs.value_and_grad(loss)(w)


def dense_class_weights(w, weights, x, labels):
    return grad_and_value(lambda w: F.cross_entropy(x @ w, labels, weight=weights))(w)[::-1]


def logit_adjustment(w, prior, x, labels):
    """Cross-entropy with logits shifted by the log of a replicated prior of the classes."""

    def loss(w):
        return fs.pmean(F.cross_entropy(x @ fs.pvary(w, "data") + 0.7 * prior.log(), labels), "data")

    return fs.value_and_grad(loss)(w)


def dense_logit_adjustment(w, prior, x, labels):
    def loss(w):
        scores = (x @ w).exp() * prior**0.7
        return -(scores[torch.arange(len(x)), labels] / scores.sum(-1)).log().mean()

    return grad_and_value(loss)(w)[::-1]


def focal_loss(w, alpha, gamma, x, labels):
    """Focal loss, with a weight for each class and an exponent, both replicated."""

    def loss(w):
        logp = torch.log_softmax(x @ fs.pvary(w, "data"), -1).gather(1, labels[:, None])[:, 0]
        return fs.pmean((-alpha[labels] * (1 - logp.exp()) ** gamma * logp).mean(), "data")

    return fs.value_and_grad(loss)(w)


def dense_focal_loss(w, alpha, gamma, x, labels):
    def loss(w):
        p = torch.softmax(x @ w, -1)[torch.arange(len(x)), labels]
        return -(alpha[labels] * (1 - p).pow(float(gamma)) * p.log()).mean()

    return grad_and_value(loss)(w)[::-1]


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rotary_attention(p, cos, sin, x):
    """Attention with rotary positions from replicated tables, the heads split over model."""
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()

    def loss(p):
        h = fs.pvary(x, "model")
        q, k, v = (torch.einsum("btd,dhe->bhte", h, p[n]) for n in "qkv")  # [B, H@model, T, E]
        scores = rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(-1, -2) / math.sqrt(q.shape[-1])
        mixed = torch.softmax(scores.masked_fill(~causal, -torch.inf), -1) @ v
        out = fs.psum(torch.einsum("bhte,dhe->btd", mixed, p["o"]), "model")
        return (out - x).square().mean()

    return fs.value_and_grad(loss)(p)


def dense_rotary_attention(p, cos, sin, x):
    turn = torch.complex(cos, sin)

    def rotated(x):
        a, b = x.chunk(2, dim=-1)
        z = torch.complex(a, b) * turn
        return torch.cat([z.real, z.imag], -1)

    def loss(p):
        q, k, v = (torch.einsum("btd,dhe->bhte", x, p[n]) for n in "qkv")
        mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return F.mse_loss(torch.einsum("bhte,dhe->btd", mixed, p["o"]), x)

    return grad_and_value(loss)(p)[::-1]


def attention_with_float_mask(p, bias, x):
    """Scaled dot-product attention with a replicated additive mask of floats."""

    def loss(p):
        q, k, v = ((x @ w).unflatten(-1, (2, 2)).transpose(1, 2) for w in fs.pvary(p, "data").unbind())
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return fs.pmean(out.square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def dense_attention_with_float_mask(p, bias, x):
    def loss(p):
        q, k, v = ((x @ w).view(*x.shape[:2], 2, 2) for w in p)
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / math.sqrt(2) + bias
        return torch.einsum("bhqk,bkhe->bqhe", torch.softmax(scores, -1), v).square().mean()

    return grad_and_value(loss)(p)[::-1]


def linear_bias_of_heads(p, slopes, x):
    """ALiBi: scores lowered by distance, with the heads, and so the slopes, split over model."""
    distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])

    def loss(p):
        h = fs.pvary(x, "model")
        q, k, v = (torch.einsum("btd,dhe->bhte", h, fs.pvary(p[n], "data")) for n in "qkv")
        scores = q @ k.mT - slopes[:, None, None] * distance
        out = torch.softmax(torch.where(distance >= 0, scores, -torch.inf), -1) @ v
        return fs.pmean(fs.psum(out.square().sum((1, 3)), "model").mean(), "data")

    return fs.grad(loss)({n: p[n] for n in "qkv"})


def dense_linear_bias_of_heads(p, slopes, x):
    n = x.shape[1]
    future = torch.full((n, n), -torch.inf).triu(1)
    ramp = torch.stack([-s * (torch.arange(n)[:, None] - torch.arange(n)) for s in slopes])

    def loss(p):
        q, k, v = (torch.einsum("btd,dhe->bhte", x, p[n]) for n in "qkv")
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=ramp + future, scale=1.0)
        return out.square().sum((1, 3)).mean()

    return torch.func.grad(loss)({n: p[n] for n in "qkv"})


def position_table(p, table, x):
    """Sinusoidal positions added to a split batch."""

    def loss(p):
        return fs.pmean(torch.tanh((x + table) @ fs.pvary(p, "data")).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def dense_position_table(p, table, x):
    return grad_and_value(lambda p: torch.tanh(torch.stack([row + table for row in x]) @ p).square().mean())(p)[::-1]


def weighted_outputs(w, weights, x, y):
    """A weight for each output, replicated and detached from what computed it."""
    scale = torch.softmax(weights, -1).detach()

    def loss(w):
        return fs.pmean((scale * (x @ fs.pvary(w, "data") - y).square()).sum(-1).mean(), "data")

    return fs.value_and_grad(loss)(w)


def dense_weighted_outputs(w, weights, x, y):
    scale = torch.diag(torch.softmax(weights, -1))
    r = x @ w - y
    return (r @ scale * r).sum() / len(x), 2 * x.T @ r @ scale / len(x)


def pruning_mask(w, mask, x, y):
    """A pruned weight: the mask of floats multiplies it on each rank, after pvary."""

    def loss(w):
        return fs.pmean((x @ (fs.pvary(w, "data") * mask) - y).square().mean(), "data")

    g = fs.grad(loss)(w)
    return (w - 0.1 * g) * mask


def dense_pruning_mask(w, mask, x, y):
    g = 2 * x.T @ (x @ (w * mask) - y) / y.numel()
    return torch.where(mask > 0, w - 0.1 * g, 0)


def detached_gate(p, x, y):
    """A gate that one term trains, and by which another term is only weighted: used whole and detached."""

    def loss(p):
        gate = torch.sigmoid(p["gate"])
        fit = (x @ fs.pvary(p["w"], "data") - y).square() * gate.detach()
        return fs.pmean(fit.mean(), "data") + (gate - 0.5).square().sum()

    return fs.value_and_grad(loss)(p)


def dense_detached_gate(p, x, y):
    gate = torch.sigmoid(p["gate"])

    def loss(p):
        fit = ((x @ p["w"] - y).square() * gate).mean()
        return fit + (torch.sigmoid(p["gate"]) - 0.5).square().sum()

    return grad_and_value(loss)(p)[::-1]


def random_fourier_features(w, frequencies, phase, x, y):
    """Ridge regression on fixed random features, by gradient."""
    features = math.sqrt(2 / frequencies.shape[1]) * torch.cos(x @ frequencies + phase)

    def loss(w):
        fit = fs.pmean((features @ fs.pvary(w, "data") - y).square().sum(-1).mean(), "data")
        return fit + 0.1 * w.square().sum()

    return fs.value_and_grad(loss)(w)


def dense_random_fourier_features(w, frequencies, phase, x, y):
    z = (x @ frequencies + phase).cos() * (2 / len(phase)) ** 0.5
    r = z @ w - y
    return r.square().sum() / len(x) + 0.1 * w.square().sum(), 2 * z.T @ r / len(x) + 0.2 * w


def fake_quantization(w, scale, x, y):
    """Quantization-aware training with a fixed scale: rounding forward, identity backward."""

    def loss(w):
        local = fs.pvary(w, "data")
        rounded = torch.round(local / scale).clamp(-8, 7) * scale
        w = local + (rounded - local).detach()
        activations = torch.round(x / scale) * scale
        return fs.pmean((activations @ w - y).square().mean(), "data")

    return fs.value_and_grad(loss)(w)


def dense_fake_quantization(w, scale, x, y):
    s = float(scale)
    q = (w / s).round().clamp(-8, 7) * s
    a = (x / s).round() * s
    return F.mse_loss(a @ q, y), 2 * a.T @ (a @ q - y) / y.numel()


def input_normalization_of_images(w, mean, std, images, labels):
    """Bytes to floats, then the mean and deviation of each channel: images [B@data, C, H, W]."""

    def loss(w):
        x = (images.float() / 255 - mean[:, None, None]) / std[:, None, None]
        h = F.conv2d(x, fs.pvary(w, "data"), stride=2).relu().mean((2, 3))
        return fs.pmean(F.cross_entropy(h, labels), "data")

    return fs.value_and_grad(loss)(w)


def dense_images(w, mean, std, images, labels):
    x = torch.stack([(images[:, c] / 255 - mean[c]) / std[c] for c in range(3)], 1)
    return grad_and_value(lambda w: F.cross_entropy(F.conv2d(x, w, stride=2).relu().mean((2, 3)), labels))(w)[::-1]


def backward_with_fixed_weights(w, weights, x, y):
    """Gradients by `backward` on a leaf, with replicated weights that do not require one."""
    w = w.clone().requires_grad_()
    loss = fs.pmean((weights * (x @ fs.pvary(w, "data") - y).square()).mean(), "data")
    loss.backward()
    return loss.detach(), w.grad


def dense_backward_with_fixed_weights(w, weights, x, y):
    r = x @ w - y
    return (weights * r.square()).mean(), 2 * x.T @ (weights * r) / r.numel()


POSITIONS = torch.arange(4)[:, None] / 100 ** (torch.arange(3) / 3)  # [T, D/2]
SEQUENCES = normal("sequences", 4, 4, 6)  # [B@data, T, D]
ANGLES = torch.arange(4.0)[:, None] / torch.tensor([1.0, 10.0])  # [T, E/2]
HEADS = {n: normal(n, 6, 2, 4, std=0.5) for n in "qkvo"}  # [D, H, E]
HEAD_SPECS = P(None, "model")
IMAGES = (torch.arange(4 * 3 * 5 * 5).view(4, 3, 5, 5) * 37 % 256).to(torch.uint8)
FIT = (P(), P(), BATCH, BATCH)
PROGRAMS = [
    Program(
        standardized_inputs, DATA, (P(), P(), P(), BATCH, BATCH), P(), (W, MEAN, STD, X, Y), dense_standardized_inputs
    ),
    Program(global_standardization, DATA, (P(), BATCH, BATCH), P(), (W, X, Y), dense_global_standardization),
    Program(class_weights, DATA, FIT, P(), (W, torch.tensor([1.0, 2.0, 0.5, 3.0]), X, LABELS % 3), dense_class_weights),
    Program(
        logit_adjustment, DATA, FIT, P(), (W, torch.tensor([0.1, 0.2, 0.3, 0.4]), X, LABELS), dense_logit_adjustment
    ),
    Program(
        focal_loss, DATA, (P(), P(), P(), BATCH, BATCH), P(),
        (W, torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor(2.0), X, LABELS), dense_focal_loss,
    ),
    Program(
        rotary_attention, {"model": 2}, (HEAD_SPECS, P(), P(), P()), (P(), HEAD_SPECS),
        (HEADS, ANGLES.cos(), ANGLES.sin(), SEQUENCES), dense_rotary_attention,
    ),
    Program(
        attention_with_float_mask, DATA, (P(), P(), BATCH), P(),
        (normal("qkv", 3, 6, 4), normal("bias", 4, 4).triu(1) * 3, SEQUENCES), dense_attention_with_float_mask,
    ),
    Program(
        linear_bias_of_heads, {"data": 2, "model": 2}, (HEAD_SPECS, P("model"), BATCH), HEAD_SPECS,
        (HEADS, torch.tensor([0.5, 0.25]), SEQUENCES), dense_linear_bias_of_heads,
    ),
    Program(
        position_table, DATA, (P(), P(), BATCH), P(),
        (W, torch.cat([POSITIONS.sin(), POSITIONS.cos()], 1), SEQUENCES), dense_position_table,
    ),
    Program(weighted_outputs, DATA, FIT, P(), (W, normal("weights", 4), X, Y), dense_weighted_outputs),
    Program(pruning_mask, DATA, FIT, P(), (W, (W.abs() > 0.3).float(), X, Y), dense_pruning_mask),
    Program(
        detached_gate, DATA, (P(), BATCH, BATCH), P(), ({"w": W, "gate": normal("gate", 4)}, X, Y), dense_detached_gate
    ),
    Program(
        random_fourier_features, DATA, (P(), P(), P(), BATCH, BATCH), P(),
        (normal("readout", 10, 4), normal("frequencies", 6, 10), normal("phase", 10), X, Y),
        dense_random_fourier_features,
    ),
    Program(fake_quantization, DATA, FIT, P(), (W, torch.tensor(0.11), X, Y), dense_fake_quantization),
    Program(
        input_normalization_of_images, DATA, (P(), P(), P(), BATCH, BATCH), P(),
        (normal("kernel", 5, 3, 3, 3), torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.25]), IMAGES,
         torch.arange(4)), dense_images,
    ),
    Program(
        backward_with_fixed_weights, DATA, FIT, P(), (W, torch.tensor([1.0, 0.0, 2.0, 0.5]), X, Y),
        dense_backward_with_fixed_weights,
    ),
]  # fmt: skip
