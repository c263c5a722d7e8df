"""Ways to differentiate: inputs, captured values, leaves with `backward`, custom functions, auxiliary results.

Legend: B batch, D width, C classes, T length; [n@axis] is a dim split over an axis.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch.func import grad, grad_and_value, jvp, vmap

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, normal

DATA = {"data": 2}
BATCH = P("data")
FIT = (P(), BATCH, BATCH)
X, LABELS = normal("x", 8, 6), torch.tensor([0, 3, 1, 1, 2, 0, 3, 2])  # [B@data, D], [B@data]
NET = {"w": normal("w", 6, 5, std=0.5), "v": normal("v", 5, 4, std=0.5)}


def logits_of(p, x):
    return torch.tanh(x @ p["w"]) @ p["v"]


def dense_value_and_grad(loss, *args):
    return grad_and_value(loss)(*args)[::-1]


def integrated_gradients(p, x, baseline, labels):
    """Attributions of a frozen network along the way from a replicated baseline to each input."""

    def score(x):
        return logits_of(p, x).gather(1, labels[:, None]).sum()

    steps = (torch.arange(4) + 0.5) / 4
    slopes = [grad(score)(baseline + t * (x - baseline)) for t in steps]
    return (x - baseline) * torch.stack(slopes).mean(0)


def dense_integrated_gradients(p, x, baseline, labels):
    rows = []
    for row, label in zip(x, labels, strict=True):
        total = torch.zeros_like(row)
        for t in (0.125, 0.375, 0.625, 0.875):
            hidden = torch.tanh(torch.lerp(baseline, row, t) @ p["w"])
            total += p["w"] @ (p["v"][:, label] * (1 - hidden.square())) / 4
        rows.append((row - baseline) * total)
    return torch.stack(rows)


def forward_gradient(p, x, labels, key):
    """A gradient estimate without backward: the derivative of the loss along a drawn direction, times it."""
    direction = {k: fs.random.normal(fs.fold_in(key, k), w.shape) for k, w in p.items()}

    def loss(p):
        return fs.pmean(F.cross_entropy(logits_of(fs.pvary(p, "data"), x), labels), "data")

    _, slope = jvp(loss, (p,), (direction,))
    return fs.tree.map(lambda v: slope * v, direction)


def dense_forward_gradient(p, x, labels, key):
    direction = {k: fs.random.normal(fs.fold_in(key, k), w.shape) for k, w in p.items()}
    g = grad(lambda p: F.cross_entropy(logits_of(p, x), labels))(p)
    slope = sum((g[k] * direction[k]).sum() for k in p)
    return {k: v * slope for k, v in direction.items()}


def spectral_filter(p, kernel, x, goal):
    """A learned gain behind a fixed complex filter in the Fourier domain; the batch is split."""

    def loss(p):
        spectrum = torch.fft.rfft(x * fs.pvary(p, "data"))
        out = torch.fft.irfft(spectrum * kernel, n=x.shape[1])
        return fs.pmean((out - goal).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def dense_spectral_filter(p, kernel, x, goal):
    n = x.shape[1]
    matrix = torch.stack([torch.fft.irfft(torch.fft.rfft(e) * kernel, n=n) for e in torch.eye(n)])
    return dense_value_and_grad(lambda p: F.mse_loss((x * p) @ matrix, goal), p)


def scan_with_captured_mask(p, mask, x, labels):
    """FSDP by fs.scan over stacked blocks, which capture a replicated mask of floats."""

    def block(w, h):
        return h + torch.tanh(h @ w) * mask

    def loss(p):
        h = fs.scan(block, p["blocks"], x, specs=STACKED["blocks"], axis="data", remat=True)
        return fs.pmean(F.cross_entropy(h @ fs.pvary(p["head"], "data"), labels), "data")

    return fs.value_and_grad(loss)(p)


def dense_scan(p, mask, x, labels):
    def loss(p):
        h = x
        for w in p["blocks"]:
            h = h + torch.tanh(h @ w) @ torch.diag(mask)
        return F.cross_entropy(h @ p["head"], labels)

    return dense_value_and_grad(loss, p)


def torch_clipping_of_split_leaves(p, x, labels):
    """torch's optimizer and its clipping, of leaves split over model, by a norm that is a sum over the ranks."""
    p = {k: w.clone().requires_grad_() for k, w in p.items()}
    optimizer = torch.optim.SGD(p.values(), lr=0.5, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        hidden = torch.tanh(fs.pvary(x, "model") @ p["w"])
        F.cross_entropy(fs.psum(hidden @ p["v"], "model"), labels).backward()
        norm = fs.psum(sum(w.grad.square().sum() for w in p.values()), "model").sqrt()
        torch.nn.utils.clip_grads_with_norm_(p.values(), 0.2, norm)
        optimizer.step()
    return {k: w.detach() for k, w in p.items()}


def dense_torch_clipping(p, x, labels):
    for _ in range(2):
        g = grad(lambda p: F.cross_entropy(logits_of(p, x), labels))(p)
        norm = torch.cat([d.flatten() for d in g.values()]).norm()
        p = {k: 0.95 * p[k] - 0.5 * min(1.0, 0.2 / float(norm + 1e-6)) * g[k] for k in p}
    return p


def curvature_probe(p, x, labels, key):
    """Hutchinson's trace of the Hessian: probes of signs, the same on each rank, mapped by vmap."""
    probes = {k: 2.0 * fs.random.bernoulli(fs.fold_in(key, k), (3, *w.shape)) - 1 for k, w in p.items()}

    def loss(p):
        return fs.pmean(F.cross_entropy(logits_of(fs.pvary(p, "data"), x), labels), "data")

    def product(v):
        hv = jvp(grad(loss), (p,), (v,))[1]
        return sum((hv[k] * v[k]).sum() for k in v)

    return vmap(product)(probes).mean()


def dense_curvature_probe(p, x, labels, key):
    probes = {k: 2.0 * fs.random.bernoulli(fs.fold_in(key, k), (3, *w.shape)) - 1 for k, w in p.items()}

    def of_flat(flat):
        return F.cross_entropy(logits_of({"w": flat[:30].view(6, 5), "v": flat[30:].view(5, 4)}, x), labels)

    h = torch.func.hessian(of_flat)(torch.cat([w.flatten() for w in p.values()]))
    flat = torch.cat([v.flatten(1) for v in probes.values()], 1)
    return torch.einsum("pi,ij,pj->p", flat, h, flat).mean()


BLOCKS = {"blocks": normal("blocks", 2, 6, 6, std=0.4), "head": normal("head", 6, 4)}
STACKED = {"blocks": P(None, "data"), "head": P()}
SPLIT = {"w": fs.column("model"), "v": fs.row("model")}
KERNEL = torch.complex(normal("real", 4), normal("imaginary", 4) * torch.tensor([0.0, 1.0, 1.0, 0.0]))
PROGRAMS = [
    Program(
        integrated_gradients, DATA, (P(), BATCH, P(), BATCH), BATCH, (NET, X, normal("baseline", 6), LABELS),
        dense_integrated_gradients,
    ),
    Program(forward_gradient, DATA, (*FIT, P()), P(), (NET, X, LABELS, fs.key(41)), dense_forward_gradient),
    Program(
        spectral_filter, DATA, (P(), P(), BATCH, BATCH), P(), (normal("gain", 6), KERNEL, X, X.roll(1, 1)),
        dense_spectral_filter,
    ),
    Program(
        scan_with_captured_mask, DATA, (STACKED, P(), BATCH, BATCH), (P(), STACKED),
        (BLOCKS, torch.tensor([1.0, 0.0, 1.0, 0.5, 1.0, 0.0]), X, LABELS), dense_scan,
    ),
    Program(
        torch_clipping_of_split_leaves, {"model": 2}, (SPLIT, P(), P()), SPLIT,
        ({"w": normal("w", 6, 4), "v": normal("v", 4, 4)}, X, LABELS), dense_torch_clipping,
    ),
    Program(curvature_probe, DATA, (*FIT, P()), P(), (NET, X, LABELS, fs.key(43)), dense_curvature_probe),
]  # fmt: skip
