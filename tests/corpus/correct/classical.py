"""Classical learning without autograd: local statistics, sums over the ranks, a small problem solved on each.

Legend: B rows, D features, K classes, factors or bins; [n@axis] is a dim split over an axis.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, normal

DATA = {"data": 2}
BATCH = P("data")
X, Y = normal("x", 12, 4).double(), normal("y", 12).double()  # [B@data, D]
LABELS = torch.arange(12) * 5 % 3


def ridge_regression(x, y, strength):
    """Normal equations, with an intercept and centered features."""
    n = len(x) * fs.axis_size("data")
    mean, goal = fs.pmean((x.mean(0), y.mean()), "data")
    a, b = fs.psum(((x - mean).T @ (x - mean), (x - mean).T @ (y - goal)), "data")
    w = torch.linalg.solve(a / n + strength * torch.eye(len(a)), b / n)
    residual = y - (x @ w + goal - mean @ w)
    return w, residual, fs.psum(residual.square().sum(), "data")


def dense_ridge(x, y, strength):
    n = len(x)
    rows = torch.cat([x - x.mean(0), (n * strength).sqrt() * torch.eye(4, dtype=x.dtype)])
    w = torch.linalg.lstsq(rows, torch.cat([y - y.mean(), torch.zeros(4, dtype=x.dtype)])).solution
    residual = (y - y.mean()) - (x - x.mean(0)) @ w
    return w, residual, residual @ residual


def spectral_normalization(w, v):
    """A column-split matrix divided by its largest singular value, which a power iteration finds."""
    for _ in range(9):
        u = w.T @ v  # [D@model]
        u = u / fs.psum(u.square().sum(), "model").sqrt()
        v = fs.psum(w @ u, "model")
        v = v / v.norm()
    sigma = fs.psum(w @ u, "model") @ v
    return w / sigma, sigma


def dense_spectral_normalization(w, v):
    sigma = torch.linalg.matrix_norm(w, 2)
    return w / sigma, sigma


def linear_discriminant(x, labels):
    """LDA: class means and the pooled covariance by sums, local scores."""
    hot = F.one_hot(labels, 3).to(x.dtype)
    counts, sums = fs.psum((hot.sum(0), hot.T @ x), "data")
    means = sums / counts[:, None]
    centered = x - means[labels]
    cov = fs.psum(centered.T @ centered, "data") / counts.sum()
    weights = torch.linalg.solve(cov, means.T)
    bias = (counts / counts.sum()).log() - 0.5 * (means * weights.T).sum(1)
    return x @ weights + bias


def dense_linear_discriminant(x, labels):
    groups = [x[labels == k] for k in range(3)]
    cov = sum((g - g.mean(0)).T @ (g - g.mean(0)) for g in groups) / len(x)
    inverse, scores = torch.linalg.inv(cov), []
    for g in groups:
        m = g.mean(0)
        scores.append(x @ inverse @ m - 0.5 * m @ inverse @ m + torch.tensor(len(g) / len(x)).double().log())
    return torch.stack(scores, 1)


def naive_bayes(counts, labels, queries, smoothing):
    """Multinomial naive Bayes: word counts by class are sums; the queries are replicated, the answers too."""
    hot = F.one_hot(labels, 3).to(counts.dtype)
    words, docs = fs.psum((hot.T @ counts, hot.sum(0)), "data")
    logp = ((words + smoothing) / (words + smoothing).sum(1, keepdim=True)).log()
    return queries @ logp.T + (docs / docs.sum()).log()


def dense_naive_bayes(counts, labels, queries, smoothing):
    out = []
    for k in range(3):
        words = counts[labels == k].sum(0) + smoothing
        out.append(queries @ (words / words.sum()).log() + (labels == k).double().mean().log())
    return torch.stack(out, 1)


def iterative_shrinkage(x, y, w, strength, step):
    """Lasso by ISTA: a local residual, a summed gradient and a soft threshold."""
    n = len(x) * fs.axis_size("data")
    for _ in range(2):
        g = fs.psum(x.T @ (x @ w - y), "data") / n
        w = w - step * g
        w = torch.sign(w) * torch.relu(w.abs() - step * strength)
    return w


def dense_shrinkage(x, y, w, strength, step):
    for _ in range(2):
        w = F.softshrink(w - step * (x.T @ x @ w - x.T @ y) / len(x), float(step * strength))
    return w


def consensus_of_multipliers(x, y, rho):
    """ADMM over blocks of rows, [K@data, n, D]: local solves, a shared consensus, local multipliers."""
    u, z = torch.zeros(len(x), x.shape[2], dtype=x.dtype), torch.zeros(x.shape[2], dtype=x.dtype)
    gram = x.mT @ x + rho * torch.eye(x.shape[2])
    for _ in range(4):
        w = torch.linalg.solve(gram, (x.mT @ y[..., None])[..., 0] + rho * (z - u))
        z = fs.pmean((w + u).mean(0), "data")
        u = u + w - z
    return z, w


def dense_consensus(x, y, rho):
    k, d = x.shape[0], x.shape[2]
    z, u = torch.zeros(d, dtype=x.dtype), [torch.zeros(d, dtype=x.dtype)] * k
    for _ in range(4):
        w = [torch.linalg.inv(a.T @ a + rho * torch.eye(d)) @ (a.T @ b + rho * (z - v))
             for a, b, v in zip(x, y, u, strict=True)]  # fmt: skip
        z = sum(p + q for p, q in zip(w, u, strict=True)) / k
        u = [q + p - z for p, q in zip(w, u, strict=True)]
    return z, torch.stack(w)


def support_vector_machine(x, signs, w, rate, strength):
    """Pegasos: subgradients of the hinge loss of the rows within the margin."""
    n = len(x) * fs.axis_size("data")
    for _ in range(2):
        inside = signs * (x @ w) < 1
        g = fs.psum((signs * inside) @ x, "data") / n
        w = w - rate * (strength * w - g)
    return w, fs.psum(((x @ w) * signs > 0).sum(), "data")


def dense_support_vector_machine(x, signs, w, rate, strength):
    for _ in range(2):
        v = w.clone().requires_grad_()
        (torch.relu(1 - signs * (x @ v)).mean() + 0.5 * strength * v @ v).backward()
        w = w - rate * v.grad
    return w, (torch.sign(x @ w) == signs).sum()


def boosted_stump(x, y, edges):
    """A gradient-boosting round: histograms of residuals by bin and feature are summed; the best split is shared."""
    bins = torch.searchsorted(edges, x.T.contiguous()).T  # [B@data, D], edges [D, K]
    hot = F.one_hot(bins, edges.shape[1] + 1).to(x.dtype)  # [B@data, D, K + 1]
    mass, count = fs.psum((torch.einsum("b,bdk->dk", y, hot), hot.sum(0)), "data")
    left, n = mass.cumsum(1)[:, :-1], count.cumsum(1)[:, :-1]
    right, m = mass.sum(1, keepdim=True) - left, count.sum(1, keepdim=True) - n
    gain = left.square() / (n + 1) + right.square() / (m + 1)
    best = gain.flatten().argmax(0, keepdim=True)
    goes_left = bins.gather(1, (best // gain.shape[1]).expand(len(x), 1))[:, 0] <= best % gain.shape[1]
    leaf = (torch.stack([right, left]) / (torch.stack([m, n]) + 1)).flatten(1)[:, best][:, 0]
    return y - leaf[goes_left.long()], gain.max()


def dense_boosted_stump(x, y, edges):
    best = (-1.0, None, None)
    for d in range(x.shape[1]):
        for cut in edges[d]:
            goes_left = x[:, d] <= cut
            a, b = y[goes_left], y[~goes_left]
            gain = float(a.sum() ** 2 / (len(a) + 1) + b.sum() ** 2 / (len(b) + 1))
            if gain > best[0] + 1e-12:
                best = (gain, goes_left, torch.where(goes_left, a.sum() / (len(a) + 1), b.sum() / (len(b) + 1)))
    return y - best[2], torch.tensor(best[0], dtype=x.dtype)


def alternating_least_squares(ratings, seen, items, strength):
    """Matrix factorization: users [B@data] are split, items replicated; a solve of each user, then of each item."""
    k = items.shape[1]
    for _ in range(2):
        a = torch.einsum("ui,ik,il->ukl", seen, items, items) + strength * torch.eye(k)
        users = torch.linalg.solve(a, (seen * ratings) @ items)
        a, b = fs.psum((torch.einsum("ui,uk,ul->ikl", seen, users, users), (seen * ratings).T @ users), "data")
        items = torch.linalg.solve(a + strength * torch.eye(k), b)
    return users, items


def dense_alternating(ratings, seen, items, strength):
    eye = torch.eye(items.shape[1], dtype=items.dtype)

    def solve(rows, mask, other):
        out = []
        for r, m in zip(rows, mask.bool(), strict=True):
            v = other[m]
            out.append(torch.linalg.inv(v.T @ v + strength * eye) @ v.T @ r[m])
        return torch.stack(out)

    for _ in range(2):
        users = solve(ratings, seen, items)
        items = solve(ratings.T, seen.T, users)
    return users, items


def multiplicative_factorization(v, w, h):
    """NMF by Lee and Seung: rows of v and w are split, h is replicated."""
    for _ in range(3):
        top, bottom = fs.psum((w.T @ v, w.T @ w), "data")
        h = h * top / (bottom @ h + 1e-9)
        w = w * (v @ h.T) / (w @ (h @ h.T) + 1e-9)
    return w, h


def dense_multiplicative(v, w, h):
    for _ in range(3):
        h = h - h / (w.T @ w @ h + 1e-9) * (w.T @ (w @ h - v) + 1e-9)
        w = w - w / (w @ h @ h.T + 1e-9) * ((w @ h - v) @ h.T + 1e-9)
    return w, h


def optimal_transport(cost, a, b, strength):
    """Sinkhorn: rows of the cost are split, with their duals; the duals of the columns are replicated."""
    f, g = torch.zeros_like(a), torch.zeros_like(b)
    for _ in range(4):
        f = strength * (a.log() - torch.logsumexp((g - cost) / strength, 1))
        scores = (f[:, None] - cost) / strength  # [B@data, K]
        top = fs.pmax(scores.amax(0), "data")
        total = fs.psum(torch.exp(scores - top).sum(0), "data")
        g = strength * (b.log() - top - total.log())
    plan = torch.exp((f[:, None] + g - cost) / strength)
    return plan, fs.psum((plan * cost).sum(), "data")


def dense_optimal_transport(cost, a, b, strength):
    kernel, v = torch.exp(-cost / strength), torch.ones_like(b)
    for _ in range(4):
        u = a / (kernel @ v)
        v = b / (kernel.T @ u)
    plan = u[:, None] * kernel * v
    return plan, (plan * cost).sum()


def hidden_markov_counts(emissions, start, transition):
    """Forward-backward over a batch of series [B@data, T, K]; expected transitions are summed over the ranks."""
    forward, alpha = [], start * emissions[:, 0]
    for t in range(emissions.shape[1]):
        if t:
            alpha = (alpha @ transition) * emissions[:, t]
        alpha = alpha / alpha.sum(1, keepdim=True)
        forward.append(alpha)
    beta, total = torch.ones_like(alpha), torch.zeros_like(transition)
    for t in reversed(range(1, emissions.shape[1])):
        after = emissions[:, t] * beta
        joint = forward[t - 1][:, :, None] * transition * after[:, None]
        total = total + (joint / joint.sum((1, 2), keepdim=True)).sum(0)
        beta = after @ transition.T
        beta = beta / beta.sum(1, keepdim=True)
    total = fs.psum(total, "data")
    return total / total.sum(1, keepdim=True)


def dense_hidden_markov(emissions, start, transition):
    """Expected transitions as the gradient of the log-likelihood by the log-transitions."""

    def likelihood(logs):
        alpha = start.log() + emissions[:, 0].log()
        for t in range(1, emissions.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + logs, 1) + emissions[:, t].log()
        return torch.logsumexp(alpha, 1).sum()

    total = torch.func.grad(likelihood)(transition.log())
    return total / total.sum(1, keepdim=True)


def scalar(x):
    return torch.tensor(x, dtype=torch.float64)


COUNTS = (torch.arange(12 * 5).view(12, 5) * 7 % 4).double()
RATINGS, SEEN = normal("ratings", 6, 5).double(), (torch.arange(30).view(6, 5) % 3 > 0).double()
EDGES = torch.tensor([-0.7, -0.1, 0.4, 1.0]).double().repeat(4, 1)
EMISSIONS = normal("emissions", 4, 5, 3).double().square() + 0.1
TRANSITION = torch.softmax(normal("transition", 3, 3).double(), 1)
PROGRAMS = [
    Program(ridge_regression, DATA, (BATCH, BATCH, P()), (P(), BATCH, P()), (X, Y, scalar(0.1)), dense_ridge),
    Program(
        spectral_normalization, {"model": 2}, (fs.column("model"), P()), (fs.column("model"), P()),
        (torch.diag(torch.tensor([8.0, 2.0, 1.0, 0.5])).double() @ torch.linalg.qr(X).Q.T, normal("start", 4).double()),
        dense_spectral_normalization,
    ),
    Program(linear_discriminant, DATA, (BATCH, BATCH), BATCH, (X, LABELS), dense_linear_discriminant),
    Program(
        naive_bayes, DATA, (BATCH, BATCH, P(), P()), P(), (COUNTS, LABELS, COUNTS[:4].flip(1), scalar(0.5)),
        dense_naive_bayes,
    ),
    Program(
        iterative_shrinkage, DATA, (BATCH, BATCH, P(), P(), P()), P(),
        (X, Y, normal("w", 4).double(), scalar(0.2), scalar(0.3)), dense_shrinkage,
    ),
    Program(
        consensus_of_multipliers, DATA, (BATCH, BATCH, P()), (P(), BATCH), (X.view(4, 3, 4), Y.view(4, 3), scalar(0.7)),
        dense_consensus,
    ),
    Program(
        support_vector_machine, DATA, (BATCH, BATCH, P(), P(), P()), P(),
        (X, Y.sign(), normal("w", 4).double(), scalar(0.3), scalar(0.1)), dense_support_vector_machine,
    ),
    Program(boosted_stump, DATA, (BATCH, BATCH, P()), (BATCH, P()), (X, Y, EDGES), dense_boosted_stump),
    Program(
        alternating_least_squares, DATA, (BATCH, BATCH, P(), P()), (BATCH, P()),
        (RATINGS, SEEN, normal("items", 5, 2).double(), scalar(0.3)), dense_alternating,
    ),
    Program(
        multiplicative_factorization, DATA, (BATCH, BATCH, P()), (BATCH, P()),
        (X.square(), normal("left", 12, 2).double().abs(), normal("right", 2, 4).double().abs()), dense_multiplicative,
    ),
    Program(
        optimal_transport, DATA, (BATCH, BATCH, P(), P()), (BATCH, P()),
        (X.square(), torch.full((12,), 1 / 12).double(), scalar([0.1, 0.2, 0.3, 0.4]), scalar(0.5)),
        dense_optimal_transport,
    ),
    Program(
        hidden_markov_counts, DATA, (BATCH, P(), P()), P(), (EMISSIONS, scalar([0.5, 0.3, 0.2]), TRANSITION),
        dense_hidden_markov,
    ),
]  # fmt: skip
