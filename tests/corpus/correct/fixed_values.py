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


def class_weights(w, weights, x, labels):
    """Weighted cross-entropy: the sum over the batch divided by the sum of the weights."""

    def loss(w):
        total = F.cross_entropy(x @ fs.pvary(w, "data"), labels, weight=weights, reduction="sum")
        return fs.psum(total, "data") / fs.psum(weights[labels].sum(), "data")

    return fs.value_and_grad(loss)(w)


def dense_class_weights(w, weights, x, labels):
    return grad_and_value(lambda w: F.cross_entropy(x @ w, labels, weight=weights))(w)[::-1]


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


SEQUENCES = normal("sequences", 4, 4, 6)  # [B@data, T, D]
IMAGES = (torch.arange(4 * 3 * 5 * 5).view(4, 3, 5, 5) * 37 % 256).to(torch.uint8)
FIT = (P(), P(), BATCH, BATCH)
PROGRAMS = [
    Program(class_weights, DATA, FIT, P(), (W, torch.tensor([1.0, 2.0, 0.5, 3.0]), X, LABELS % 3), dense_class_weights),
    Program(
        attention_with_float_mask, DATA, (P(), P(), BATCH), P(),
        (normal("qkv", 3, 6, 4), normal("bias", 4, 4).triu(1) * 3, SEQUENCES), dense_attention_with_float_mask,
    ),
    Program(
        detached_gate, DATA, (P(), BATCH, BATCH), P(), ({"w": W, "gate": normal("gate", 4)}, X, Y), dense_detached_gate
    ),
    Program(
        input_normalization_of_images, DATA, (P(), P(), P(), BATCH, BATCH), P(),
        (normal("kernel", 5, 3, 3, 3), torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.25]), IMAGES,
         torch.arange(4)), dense_images,
    ),
]  # fmt: skip
