"""Optimizers, written by hand for a split tree.

Legend: B batch, D width, F hidden; [n@axis] is a dim split over an axis.
"""

from __future__ import annotations

import torch
from torch.func import grad as torch_grad

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, normal

BOTH = {"data": 2, "model": 2}
DATA, MODEL = {"data": 2, "model": 1}, {"data": 1, "model": 2}
SPECS = {"up": fs.column("model"), "down": fs.row("model"), "bias": P()}
PARAMS = {
    "up": normal("up", 6, 8, std=0.4),  # [D, F@model]
    "down": normal("down", 8, 6, std=0.4),  # [F@model, D]
    "bias": normal("bias", 6, std=0.1),
}
MOMENT = fs.tree.map(lambda w: 0.1 * w.flip(0), PARAMS)
SECOND = fs.tree.map(lambda w: 0.2 + w.square(), PARAMS)
X, Y = normal("x", 8, 6), normal("y", 8, 6)  # [B@data, D]
RATE = torch.tensor(0.1)
BATCH = (P("data"), P("data"))


def loss_fn(p, x, y):
    p = fs.pvary(p, "data")
    h = torch.tanh(fs.pvary(x, "model") @ p["up"])
    out = fs.psum(h @ p["down"], "model") + p["bias"]
    return fs.pmean((out - y).square().mean(), "data")


def dense_loss(p, x, y):
    return (torch.tanh(x @ p["up"]) @ p["down"] + p["bias"] - y).square().mean()


def split_squares(p):
    """Squared norm of each leaf, summed over the ranks that have its parts."""
    return {k: fs.psum(v.square().sum(), "model") if SPECS[k].axes else v.square().sum() for k, v in p.items()}


def sgd_with_a_tensor_rate(p, x, y, lr):
    """Gradient descent whose learning rate is a replicated tensor."""
    grads = fs.grad(loss_fn)(p, x, y)
    return {k: p[k] - lr * grads[k] for k in p}


def dense_sgd(p, x, y, lr):
    grads = torch_grad(dense_loss)(p, x, y)
    return {k: p[k] - lr * grads[k] for k in p}


def sgd_with_warmup_schedule(p, x, y, lr, count):
    """Linear warmup of the rate by a step count, both replicated tensors."""
    rate = lr * torch.clamp((count + 1) / 10, max=1.0)
    grads = fs.grad(loss_fn)(p, x, y)
    return fs.tree.map(lambda w, g: w - rate * g, p, grads), count + 1


def dense_warmup(p, x, y, lr, count):
    return dense_sgd(p, x, y, lr * (int(count) + 1) / 10), count + 1


def clip_by_norm_by_hand(p, x, y, limit):
    """Gradients scaled down to a global norm."""
    grads = fs.grad(loss_fn)(p, x, y)
    norm = sum(split_squares(grads).values()).sqrt()
    scale = torch.clamp(limit / norm, max=1.0)
    return {k: g * scale for k, g in grads.items()}, norm


def dense_clip(p, x, y, limit):
    grads = torch_grad(dense_loss)(p, x, y)
    leaves = [torch.nn.Parameter(g) for g in grads.values()]
    for leaf in leaves:
        leaf.grad = leaf.detach().clone()
    norm = torch.nn.utils.clip_grad_norm_(leaves, float(limit))
    return {k: leaf.grad for k, leaf in zip(grads, leaves, strict=True)}, norm


def normalized_gradient(p, x, y):
    """Gradient divided by its own norm."""
    grads = fs.grad(loss_fn)(p, x, y)
    total = sum(split_squares(grads).values())
    return fs.tree.map(lambda v: v / total.sqrt(), grads)


def dense_normalized(p, x, y):
    grads = torch_grad(dense_loss)(p, x, y)
    flat = torch.cat([g.flatten() for g in grads.values()])
    return {k: g / flat.norm() for k, g in grads.items()}


def lars(p, x, y, lr):
    """Layer-wise adaptive rates: each leaf's step has the size of the leaf."""
    grads = fs.grad(loss_fn)(p, x, y)
    w2, g2 = split_squares(p), split_squares(grads)
    trust = {k: 0.02 * w2[k].sqrt() / (g2[k].sqrt() + 1e-4 * w2[k].sqrt()) for k in p}
    return {k: p[k] - lr * trust[k] * (grads[k] + 1e-4 * p[k]) for k in p}


def dense_lars(p, x, y, lr):
    grads = torch_grad(dense_loss)(p, x, y)
    new = {}
    for k, w in p.items():
        rate = 0.02 * w.norm() / (grads[k].norm() + 1e-4 * w.norm())
        new[k] = w - lr * rate * (grads[k] + 1e-4 * w)
    return new


def lamb(p, m, v, x, y, lr):
    """Adam's direction, scaled to the size of each leaf."""
    grads = fs.grad(loss_fn)(p, x, y)
    m = fs.tree.map(lambda a, g: torch.lerp(g, a, 0.9), m, grads)
    v = fs.tree.map(lambda a, g: 0.99 * a + 0.01 * g.square(), v, grads)
    step = fs.tree.map(lambda a, b, w: a / (b.sqrt() + 1e-6) + 0.01 * w, m, v, p)
    ratio = fs.tree.map(lambda a, b: torch.sqrt(a / b), split_squares(p), split_squares(step))
    return fs.tree.map(lambda w, r, s: w - lr * r * s, p, ratio, step), m, v


def dense_lamb(p, m, v, x, y, lr):
    grads = torch_grad(dense_loss)(p, x, y)
    m = {k: 0.9 * m[k] + 0.1 * grads[k] for k in p}
    v = {k: 0.99 * v[k] + 0.01 * grads[k] ** 2 for k in p}
    new = {}
    for k, w in p.items():
        step = m[k] / (v[k].sqrt() + 1e-6) + 0.01 * w
        new[k] = w - lr * w.norm() / step.norm() * step
    return new, m, v


def sharpness_aware(p, x, y, lr, rho):
    """SAM: the gradient at the point that is worst within a radius."""
    loss, grads = fs.value_and_grad(loss_fn)(p, x, y)
    norm = torch.sqrt(sum(split_squares(grads).values()))
    worst = fs.tree.map(lambda w, g: w + rho * g / norm, p, grads)
    grads = fs.grad(loss_fn)(worst, x, y)
    return fs.tree.map(lambda w, g: w - lr * g, p, grads), loss


def dense_sam(p, x, y, lr, rho):
    grads = torch_grad(dense_loss)(p, x, y)
    norm = torch.cat([g.flatten() for g in grads.values()]).norm()
    worst = {k: p[k] + rho * grads[k] / norm for k in p}
    grads = torch_grad(dense_loss)(worst, x, y)
    return {k: p[k] - lr * grads[k] for k in p}, dense_loss(p, x, y)


def lion(p, m, x, y, lr, decay):
    """Sign of an interpolated momentum, with decoupled weight decay."""
    grads = fs.grad(loss_fn)(p, x, y)
    new = fs.tree.map(lambda w, a, g: w - lr * (torch.sign(0.9 * a + 0.1 * g) + decay * w), p, m, grads)
    return new, fs.tree.map(lambda a, g: 0.99 * a + 0.01 * g, m, grads)


def dense_lion(p, m, x, y, lr, decay):
    grads = torch_grad(dense_loss)(p, x, y)
    new = {k: p[k] * (1 - lr * decay) - lr * (0.9 * m[k] + 0.1 * grads[k]).sign() for k in p}
    return new, {k: 0.99 * m[k] + 0.01 * grads[k] for k in p}


def adafactor(w, x, y):
    """Second moments of a column-split matrix as an outer product of row and column means."""

    def loss(w):
        h = torch.tanh(fs.pvary(x, "model") @ fs.pvary(w, "data"))  # [B@data, F@model]
        return fs.pmean(fs.psum((h * y).sum(-1), "model").square().mean(), "data")

    g = fs.grad(loss)(w)
    rows = fs.pmean(g.square().mean(1), "model")  # [D]
    columns = g.square().mean(0)  # [F@model]
    second = rows[:, None] * columns / rows.mean()
    step = g * torch.rsqrt(second + 1e-30)
    rms = fs.pmean(step.square().mean(), "model").sqrt()
    return w - 0.01 * step / torch.clamp(rms, min=1.0)


def dense_adafactor(w, x, y):
    w = w.clone().requires_grad_()
    (torch.tanh(x @ w) * y).sum(-1).square().mean().backward()
    g = w.grad
    r, c = g.square().mean(1), g.square().mean(0)
    step = g / (torch.outer(r, c) / r.mean()).sqrt()
    return w.detach() - 0.01 * step / max(1.0, float(step.square().mean().sqrt()))


def inverse_root(a, power):
    values, vectors = torch.linalg.eigh(a)
    return vectors @ torch.diag(values.clamp(min=1e-6) ** (-1 / power)) @ vectors.T


def shampoo_of_columns(p, x, y, lr):
    """One-sided Shampoo: the Gram matrix of the rows is a sum over ranks, its root multiplies each rank's columns."""
    g = fs.grad(loss_fn)(p, x, y)["up"]  # [D, F@model]
    left = fs.psum(g @ g.T, "model") + 1e-4 * torch.eye(len(g))
    return p["up"] - lr * inverse_root(left, 2) @ g


def dense_shampoo(p, x, y, lr):
    g = torch_grad(dense_loss)(p, x, y)["up"]
    u, s, v = torch.linalg.svd(g, full_matrices=False)
    return p["up"] - lr * u @ torch.diag(s / (s.square() + 1e-4).sqrt()) @ v


def newton_schulz(m, steps=5):
    m = m / m.norm()
    for _ in range(steps):
        a = m @ m.T
        m = 3.4445 * m + (-4.7750 * a + 2.0315 * a @ a) @ m
    return m


def muon_gathered(p, m, x, y, lr):
    """Muon: the momentum is gathered, orthogonalized once, and each rank keeps its columns."""
    grads = fs.grad(loss_fn)(p, x, y)
    m = 0.9 * m + grads["up"]
    whole = fs.all_gather(m, "model", dim=1, to="invariant")
    return p["up"] - lr * fs.pslice(newton_schulz(whole), "model", dim=1), m


def muon_by_gram(p, m, x, y, lr):
    """Muon without a gather: Newton-Schulz needs only the Gram matrix of the rows, a sum over ranks."""
    m = 0.9 * m + fs.grad(loss_fn)(p, x, y)["up"]  # [D, F@model]
    o = m / fs.psum(m.square().sum(), "model").sqrt()
    for _ in range(5):
        a = fs.psum(o @ o.T, "model")
        o = 3.4445 * o + (-4.7750 * a + 2.0315 * a @ a) @ o
    return p["up"] - lr * o, m


def dense_muon(p, m, x, y, lr):
    m = 0.9 * m + torch_grad(dense_loss)(p, x, y)["up"]
    u, s, v = torch.linalg.svd(m, full_matrices=False)  # the iteration is a polynomial of the singular values
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return p["up"] - lr * u @ torch.diag(s) @ v, m


def split_dot(a, b):
    products = {k: (a[k] * b[k]).sum() for k in a}
    return sum(fs.psum(v, "model") if SPECS[k].axes else v for k, v in products.items())


def lbfgs_two_loops(p, x, y, past, lr):
    """L-BFGS direction from three points, by the two loops over the differences, on a split tree."""
    points = [past, fs.tree.map(lambda a, b: 0.5 * (a + b), past, p), p]
    grads = [fs.grad(loss_fn)(q, x, y) for q in points]
    minus = lambda a, b: fs.tree.map(torch.sub, a, b)  # noqa: E731
    pairs = [(minus(points[i + 1], points[i]), minus(grads[i + 1], grads[i])) for i in (0, 1)]
    q, alphas = grads[-1], []
    for s, t in reversed(pairs):
        alpha = split_dot(s, q) / split_dot(s, t)
        q = fs.tree.map(lambda a, b, c=alpha: a - c * b, q, t)
        alphas.append(alpha)
    s, t = pairs[-1]
    gamma = split_dot(s, t) / split_dot(t, t)
    q = fs.tree.map(lambda a: gamma * a, q)
    for (s, t), alpha in zip(pairs, reversed(alphas), strict=True):
        beta = split_dot(t, q) / split_dot(s, t)
        q = fs.tree.map(lambda a, b, c=alpha - beta: a + c * b, q, s)
    return fs.tree.map(lambda w, d: w - lr * d, p, q)


def dense_lbfgs(p, x, y, past, lr):
    """The same as a matrix: BFGS updates of the inverse Hessian."""
    flat = lambda q: torch.cat([v.flatten() for v in q.values()])  # noqa: E731
    points = [past, {k: 0.5 * (past[k] + p[k]) for k in p}, p]
    grads = [flat(torch_grad(dense_loss)(q, x, y)) for q in points]
    points = [flat(q) for q in points]
    s, t = points[2] - points[1], grads[2] - grads[1]
    inverse = torch.eye(len(s), dtype=s.dtype) * (s @ t) / (t @ t)
    for i in (0, 1):
        s, t = points[i + 1] - points[i], grads[i + 1] - grads[i]
        left = torch.eye(len(s), dtype=s.dtype) - torch.outer(s, t) / (s @ t)
        inverse = left @ inverse @ left.T + torch.outer(s, s) / (s @ t)
    step = (lr * inverse @ grads[-1]).split([v.numel() for v in p.values()])
    return {k: w - d.view(w.shape) for (k, w), d in zip(p.items(), step, strict=True)}


def averaged_weights(p, average, count, x, y, lr):
    """Stochastic weight averaging: a running mean over steps, whose count is a tensor."""
    for _ in range(2):
        grads = fs.grad(loss_fn)(p, x, y)
        p = fs.tree.map(lambda w, g: w - lr * g, p, grads)
        count = count + 1
        average = {k: average[k] + (p[k] - average[k]) / count for k in p}
    return p, average


def dense_averaged(p, average, count, x, y, lr):
    first = dense_sgd(p, x, y, lr)
    second = dense_sgd(first, x, y, lr)
    n = float(count)
    return second, {k: (n * average[k] + first[k] + second[k]) / (n + 2) for k in p}


def ema_of_params(p, ema, x, y, lr, decay):
    """Exponential moving average of the weights, with a replicated decay."""
    p = fs.tree.map(lambda w, g: w - lr * g, p, fs.grad(loss_fn)(p, x, y))
    return p, fs.tree.map(lambda a, w: decay * a + (1 - decay) * w, ema, p)


def dense_ema(p, ema, x, y, lr, decay):
    new = dense_sgd(p, x, y, lr)
    return new, {k: torch.lerp(new[k], ema[k], float(decay)) for k in p}


def in_place_adam(p, m, v, x, y, lr):
    """Adam with in-place updates under no_grad, on leaves whose gradients `backward` accumulates."""
    p, m, v = fs.tree.map(torch.clone, (p, m, v))
    fs.tree.map(lambda w: w.requires_grad_(), p)
    loss_fn(p, x, y).backward()
    with torch.no_grad():
        for k, w in p.items():
            m[k].mul_(0.9).add_(w.grad, alpha=0.1)
            v[k].mul_(0.99).addcmul_(w.grad, w.grad, value=0.01)
            w.sub_(lr * m[k] / (v[k].sqrt() + 1e-6))
    return {k: w.detach() for k, w in p.items()}, m, v


def dense_in_place_adam(p, m, v, x, y, lr):
    grads = torch_grad(dense_loss)(p, x, y)
    m = {k: 0.9 * m[k] + 0.1 * grads[k] for k in p}
    v = {k: 0.99 * v[k] + 0.01 * grads[k] ** 2 for k in p}
    return {k: p[k] - lr * m[k] / (v[k].sqrt() + 1e-6) for k in p}, m, v


def torch_optimizer_on_shards(p, x, y):
    """torch.optim.SGD with momentum on each rank's local leaves, for two steps."""
    p = {k: w.clone().requires_grad_() for k, w in p.items()}
    optimizer = torch.optim.SGD(p.values(), lr=0.1, momentum=0.9, nesterov=True)
    for _ in range(2):
        optimizer.zero_grad()
        loss_fn(p, x, y).backward()
        optimizer.step()
    return {k: w.detach() for k, w in p.items()}


def dense_torch_optimizer(p, x, y):
    p, moment = dict(p), fs.tree.map(torch.zeros_like, p)
    for _ in range(2):
        g = torch_grad(dense_loss)(p, x, y)
        moment = {k: 0.9 * moment[k] + g[k] for k in p}
        p = {k: p[k] - 0.1 * (g[k] + 0.9 * moment[k]) for k in p}
    return p


def accumulated_gradient(p, x, y, lr):
    """Two microbatches whose gradients are summed locally, and over the ranks once."""
    local = fs.pvary(p, "data")

    def part(q, x, y):
        h = torch.tanh(fs.pvary(x, "model") @ q["up"])
        return (fs.psum(h @ q["down"], "model") + q["bias"] - y).square().mean()

    total = fs.tree.map(torch.zeros_like, local)
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        total = fs.tree.map(torch.add, total, fs.grad(part)(local, a, b))
    grads = fs.pmean(fs.tree.map(lambda g: g / 2, total), "data")
    return fs.tree.map(lambda w, g: w - lr * g, p, grads)


def zero_one(p, m, x, y, lr):
    """ZeRO-1: whole weights, a momentum split over data; each rank updates its rows and the rows are gathered."""

    def loss(w):
        return fs.pmean((torch.tanh(x @ fs.pvary(w, "data")) - y).square().mean(), "data")

    m = 0.9 * m + fs.pslice(fs.grad(loss)(p), "data")
    mine = fs.pslice(p, "data") - lr * m
    return fs.all_gather(mine, "data", to="invariant"), m


def dense_zero_one(p, m, x, y, lr):
    m = 0.9 * m + torch_grad(lambda w: (torch.tanh(x @ w) - y).square().mean())(p)
    return p - lr * m, m


def orthogonal_retraction(w, x, lr):
    """Riemannian descent on the Stiefel manifold: Oja's subspace rule, with a QR retraction."""

    def energy(w):
        return fs.pmean(-(x @ fs.pvary(w, "data")).square().sum(-1).mean(), "data")

    g = fs.grad(energy)(w)  # [D, K]
    tangent = g - w @ (w.T @ g + g.T @ w) / 2
    q, r = torch.linalg.qr(w - lr * tangent)
    return q * torch.sign(torch.diagonal(r))


def dense_retraction(w, x, lr):
    g = -2 / len(x) * x.T @ (x @ w)
    moved = w - lr * (g - w @ (w.T @ g + g.T @ w) / 2)
    return moved @ torch.linalg.inv(torch.linalg.cholesky(moved.T @ moved).T)


DOUBLE = fs.tree.map(torch.Tensor.double, (PARAMS, X, Y, fs.tree.map(lambda w: w + 0.3 * w.flip(-1), PARAMS), RATE))
STEP = (SPECS, *BATCH, P())
PROGRAMS = [
    Program(sgd_with_a_tensor_rate, BOTH, STEP, SPECS, (PARAMS, X, Y, RATE), dense_sgd),
    Program(
        sgd_with_warmup_schedule, MODEL, (*STEP, P()), (SPECS, P()),
        (PARAMS, X, Y, RATE, torch.tensor(3)), dense_warmup,
    ),
    Program(clip_by_norm_by_hand, BOTH, STEP, (SPECS, P()), (PARAMS, X, Y, torch.tensor(0.05)), dense_clip),
    Program(normalized_gradient, MODEL, STEP[:3], SPECS, (PARAMS, X, Y), dense_normalized),
    Program(lars, MODEL, STEP, SPECS, (PARAMS, X, Y, RATE), dense_lars),
    Program(
        lamb, MODEL, (SPECS, SPECS, *STEP), (SPECS, SPECS, SPECS), (PARAMS, MOMENT, SECOND, X, Y, RATE), dense_lamb
    ),
    Program(sharpness_aware, BOTH, (*STEP, P()), (SPECS, P()), (PARAMS, X, Y, RATE, torch.tensor(0.05)), dense_sam),
    Program(
        lion, MODEL, (SPECS, *STEP, P()), (SPECS, SPECS), (PARAMS, MOMENT, X, Y, RATE, torch.tensor(0.01)), dense_lion
    ),
    Program(
        adafactor, BOTH, (fs.column("model"), P("data"), P("data", "model")), fs.column("model"),
        (PARAMS["up"], X, normal("targets", 8, 8)), dense_adafactor,
    ),
    Program(
        shampoo_of_columns, MODEL, STEP, fs.column("model"),
        fs.tree.map(torch.Tensor.double, (PARAMS, X, Y, RATE)), dense_shampoo,
    ),
    Program(
        muon_gathered, MODEL, (SPECS, fs.column("model"), *STEP[1:]), (fs.column("model"),) * 2,
        (PARAMS, MOMENT["up"], X, Y, RATE), dense_muon,
    ),
    Program(
        muon_by_gram, MODEL, (SPECS, fs.column("model"), *STEP[1:]), (fs.column("model"),) * 2,
        (PARAMS, MOMENT["up"], X, Y, RATE), dense_muon,
    ),
    Program(lbfgs_two_loops, MODEL, (SPECS, *BATCH, SPECS, P()), SPECS, DOUBLE, dense_lbfgs),
    Program(
        averaged_weights, MODEL, (SPECS, SPECS, P(), *STEP[1:]), (SPECS, SPECS),
        (PARAMS, MOMENT, torch.tensor(3.0), X, Y, RATE), dense_averaged,
    ),
    Program(
        ema_of_params, MODEL, (SPECS, *STEP, P()), (SPECS, SPECS), (PARAMS, MOMENT, X, Y, RATE, torch.tensor(0.99)),
        dense_ema,
    ),
    Program(
        in_place_adam, BOTH, (SPECS, SPECS, *STEP), (SPECS, SPECS, SPECS), (PARAMS, MOMENT, SECOND, X, Y, RATE),
        dense_in_place_adam,
    ),
    Program(torch_optimizer_on_shards, MODEL, STEP[:3], SPECS, (PARAMS, X, Y), dense_torch_optimizer),
    Program(accumulated_gradient, DATA, STEP, SPECS, (PARAMS, X, Y, RATE), dense_sgd),
    Program(
        zero_one, DATA, (P(), P("data"), *BATCH, P()), (P(), P("data")),
        (normal("w", 6, 6), normal("m", 6, 6), X, Y, RATE), dense_zero_one,
    ),
    Program(
        orthogonal_retraction, DATA, (P(), P("data"), P()), P(),
        (torch.linalg.qr(normal("w", 6, 3)).Q, X, RATE), dense_retraction,
    ),
]  # fmt: skip
