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


def adversarial_training(p, x, labels, radius):
    """FGSM: the attack differentiates its local inputs only, so it uses the replicated weights as they are."""

    def attack(x):
        return F.cross_entropy(logits_of(p, x), labels, reduction="sum")

    worst = x + radius * torch.sign(fs.grad(attack)(x))

    def loss(p):
        return fs.pmean(F.cross_entropy(logits_of(fs.pvary(p, "data"), worst), labels), "data")

    return fs.value_and_grad(loss)(p)


def adversarial_training_by_autograd(p, x, labels, radius):
    """The same attack by torch.autograd.grad on a detached copy of the inputs, in two projected steps of half size."""
    worst = x.clone()
    for _ in range(2):
        worst = worst.detach().requires_grad_()
        loss = F.cross_entropy(logits_of(p, worst), labels, reduction="sum")
        (g,) = torch.autograd.grad(loss, worst)
        worst = (worst.detach() + radius * g.sign()).clamp(x - radius, x + radius)

    leaves = {k: w.clone().requires_grad_() for k, w in p.items()}
    loss = fs.pmean(F.cross_entropy(logits_of(fs.pvary(leaves, "data"), worst), labels), "data")
    loss.backward()
    return loss.detach(), {k: w.grad for k, w in leaves.items()}


def input_gradient(p, x, labels):
    """Gradient of the cross-entropy by the inputs, in closed form."""
    hidden = torch.tanh(x @ p["w"])
    r = torch.softmax(hidden @ p["v"], -1) - F.one_hot(labels, 4)
    return ((r @ p["v"].T) * (1 - hidden.square())) @ p["w"].T


def dense_adversarial_training(p, x, labels, radius):
    worst = x + radius * input_gradient(p, x, labels).sign()
    return dense_value_and_grad(lambda p: F.cross_entropy(logits_of(p, worst), labels), p)


def dense_projected_training(p, x, labels, radius):
    worst = x
    for _ in range(2):
        step = worst + radius * input_gradient(p, worst, labels).sign()
        worst = torch.maximum(torch.minimum(step, x + radius), x - radius)
    return dense_value_and_grad(lambda p: F.cross_entropy(logits_of(p, worst), labels), p)


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


def input_optimization(p, x, goal, lr):
    """Activation maximization: local images follow the gradient of a frozen network towards a replicated goal."""
    for _ in range(2):
        x = x - lr * fs.grad(lambda x: (logits_of(p, x) - goal).square().sum())(x)
    return x


def dense_input_optimization(p, x, goal, lr):
    for _ in range(2):
        hidden = torch.tanh(x @ p["w"])
        r = 2 * (hidden @ p["v"] - goal)
        x = x - lr * ((r @ p["v"].T) * (1 - hidden.square())) @ p["w"].T
    return x


def metrics_beside_the_loss(p, x, labels, weights):
    """Weighted accuracy and a distance from replicated means, as auxiliary results that nobody differentiates."""

    def loss(p):
        logits = logits_of(fs.pvary(p, "data"), x)
        right = (logits.argmax(-1) == labels) * weights[labels]
        drift = (logits - p["v"].detach().mean(0)).square().sum(-1)  # a metric: p["v"] without pvary
        metrics = fs.psum({"right": right.sum(), "drift": drift.sum(), "n": weights[labels].sum()}, "data")
        return fs.pmean(F.cross_entropy(logits, labels), "data"), metrics

    return fs.value_and_grad(loss, has_aux=True)(p)


def dense_metrics(p, x, labels, weights):
    logits = logits_of(p, x)
    metrics = {
        "right": weights[labels][logits.argmax(-1) == labels].sum(),
        "drift": torch.cdist(logits, p["v"].mean(0)[None]).square().sum(),
        "n": weights[labels].sum(),
    }
    value, grads = dense_value_and_grad(lambda p: F.cross_entropy(logits_of(p, x), labels), p)
    return (value, metrics), grads


def train_and_evaluate(p, x, labels, test_x, test_labels, lr):
    """Leaves that require gradients: `backward`, an in-place step, and an evaluation on them under no_grad."""
    leaves = {k: w.clone().requires_grad_() for k, w in p.items()}
    fs.pmean(F.cross_entropy(logits_of(fs.pvary(leaves, "data"), x), labels), "data").backward()
    with torch.no_grad():
        for w in leaves.values():
            w -= lr * w.grad
        logits = logits_of(leaves, test_x)
        loss = fs.pmean(F.cross_entropy(logits, test_labels), "data")
        right = fs.psum((logits.argmax(-1) == test_labels).sum(), "data")
    return {k: w.detach() for k, w in leaves.items()}, loss, right


def dense_train_and_evaluate(p, x, labels, test_x, test_labels, lr):
    grads = grad(lambda p: F.cross_entropy(logits_of(p, x), labels))(p)
    p = {k: p[k] - lr * grads[k] for k in p}
    logits = logits_of(p, test_x)
    return p, F.cross_entropy(logits, test_labels), (logits.max(-1).indices == test_labels).sum()


class ReverseGradient(torch.autograd.Function):
    """Identity forward, minus a factor backward."""

    @staticmethod
    def forward(x, factor):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, grad_output):
        (factor,) = ctx.saved_tensors
        return -factor * grad_output, None


def domain_adversarial(p, x, labels, domains, factor):
    """DANN: a domain classifier behind a custom gradient reversal, whose factor is a replicated tensor."""

    def loss(p):
        p = fs.pvary(p, "data")
        features = torch.tanh(x @ p["w"])
        task = F.cross_entropy(features @ p["v"], labels)
        domain = ReverseGradient.apply(features, factor) @ p["d"]
        return fs.pmean(task + F.binary_cross_entropy_with_logits(domain, domains), "data")

    return fs.value_and_grad(loss)(p)


def dense_domain_adversarial(p, x, labels, domains, factor):
    def loss(p):
        features = torch.tanh(x @ p["w"])
        reverse = (1 + factor) * features.detach() - factor * features
        domain = F.binary_cross_entropy_with_logits(reverse @ p["d"], domains)
        return F.cross_entropy(features @ p["v"], labels) + domain

    return dense_value_and_grad(loss, p)


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


def remat_with_captured_table(p, table, x, labels):
    """Blocks under remat that capture a replicated table: it is a constant, and only arguments are differentiated."""

    @fs.remat
    def block(w, h):
        return h + torch.tanh((h + table) @ w)

    def loss(p):
        p = fs.pvary(p, "data")
        h = x
        for w in p["blocks"].unbind():
            h = block(w, h)
        return fs.pmean(F.cross_entropy(h @ p["head"], labels), "data")

    return fs.value_and_grad(loss)(p)


def dense_remat(p, table, x, labels):
    def loss(p):
        h = x
        for w in p["blocks"]:
            h = h + torch.tanh(h @ w + table @ w)
        return F.cross_entropy(h @ p["head"], labels)

    return dense_value_and_grad(loss, p)


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
RADIUS = torch.tensor(0.1)
SPLIT = {"w": fs.column("model"), "v": fs.row("model")}
KERNEL = torch.complex(normal("real", 4), normal("imaginary", 4) * torch.tensor([0.0, 1.0, 1.0, 0.0]))
PROGRAMS = [
    Program(adversarial_training, DATA, (*FIT, P()), P(), (NET, X, LABELS, RADIUS), dense_adversarial_training),
    Program(
        adversarial_training_by_autograd, DATA, (*FIT, P()), P(), (NET, X, LABELS, RADIUS), dense_projected_training
    ),
    Program(
        integrated_gradients, DATA, (P(), BATCH, P(), BATCH), BATCH, (NET, X, normal("baseline", 6), LABELS),
        dense_integrated_gradients,
    ),
    Program(
        input_optimization, DATA, (P(), BATCH, P(), P()), BATCH, (NET, X, normal("goal", 4), RADIUS),
        dense_input_optimization,
    ),
    Program(
        metrics_beside_the_loss, DATA, (*FIT, P()), P(), (NET, X, LABELS, torch.tensor([1.0, 2.0, 0.5, 3.0])),
        dense_metrics,
    ),
    Program(
        train_and_evaluate, DATA, (*FIT, BATCH, BATCH, P()), P(), (NET, X, LABELS, X.flip(1), LABELS.flip(0), RADIUS),
        dense_train_and_evaluate,
    ),
    Program(
        domain_adversarial, DATA, (*FIT, BATCH, P()), P(),
        ({**NET, "d": normal("d", 5)}, X, LABELS, (LABELS % 2).float(), torch.tensor(0.3)), dense_domain_adversarial,
    ),
    Program(forward_gradient, DATA, (*FIT, P()), P(), (NET, X, LABELS, fs.key(41)), dense_forward_gradient),
    Program(
        spectral_filter, DATA, (P(), P(), BATCH, BATCH), P(), (normal("gain", 6), KERNEL, X, X.roll(1, 1)),
        dense_spectral_filter,
    ),
    Program(
        remat_with_captured_table, DATA, (P(), P(), BATCH, BATCH), P(), (BLOCKS, normal("table", 6), X, LABELS),
        dense_remat,
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
