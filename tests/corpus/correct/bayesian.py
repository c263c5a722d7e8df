"""Sampling, mixtures, kernels.

Legend: B data, D width, K components; [n@axis] is a dim split over an axis.
"""

from __future__ import annotations

import math

import torch

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, normal

DATA = {"data": 2}
BATCH = P("data")
X = normal("x", 8, 3).double()  # [B@data, D]
Y = normal("y", 8).double()
W = normal("w", 3).double()
KEY = fs.key(12)


def log_joint(w, x, y):
    """Log density of w and of the whole split data set: replicated."""
    fit = fs.psum(-0.5 * (x @ fs.pvary(w, "data") - y).square().sum(), "data")
    return fit - 0.5 * w.square().sum()


def dense_log_joint(w, x, y):
    return -0.5 * (x @ w - y).square().sum() - 0.5 * w @ w


def hamiltonian_monte_carlo(w, x, y, step, key):
    """HMC: leapfrog and an accept decision, the same on each rank, with the data split."""
    k1, k2 = fs.split(key)
    momentum = fs.random.normal(k1, w.shape, dtype=w.dtype)
    potential = lambda w: -log_joint(w, x, y)  # noqa: E731
    energy, g = fs.value_and_grad(potential)(w)
    start = energy + 0.5 * momentum.square().sum()
    q = w
    for _ in range(2):
        momentum = momentum - 0.5 * step * g
        q = q + step * momentum
        energy, g = fs.value_and_grad(potential)(q)
        momentum = momentum - 0.5 * step * g
    odds = torch.exp(start - energy - 0.5 * momentum.square().sum())
    accept = fs.random.uniform(k2, (), dtype=w.dtype) < odds
    return torch.where(accept, q, w), odds


def dense_hamiltonian(w, x, y, step, key):
    k1, k2 = fs.split(key)
    p, q = fs.random.normal(k1, w.shape, dtype=w.dtype), w
    h0 = -dense_log_joint(w, x, y) + 0.5 * p @ p
    force = lambda q: x.T @ (y - x @ q) - q  # noqa: E731
    p = p + 0.5 * step * force(q)
    for i in range(2):
        q = q + step * p
        p = p + (step if i < 1 else 0.5 * step) * force(q)
    odds = torch.exp(h0 + dense_log_joint(q, x, y) - 0.5 * p @ p)
    return (q if fs.random.uniform(k2, (), dtype=w.dtype) < odds else w), odds


def expectation_maximization(p, x):
    """EM of a Gaussian mixture: replicated components, local responsibilities, sums over the ranks."""
    for _ in range(2):
        z = (x[:, None] - p["mean"]) / p["std"]  # [B@data, K, D]
        scores = p["weight"].log() - (0.5 * z.square() + p["std"].log()).sum(-1)
        r = torch.softmax(scores, -1)
        n, s1, s2 = fs.psum((r.sum(0), r.T @ x, r.T @ x.square()), "data")
        mean = s1 / n[:, None]
        var = s2 / n[:, None] - mean.square()
        p = {"weight": n / n.sum(), "mean": mean, "std": (var + 1e-3).sqrt()}
    return p


def dense_expectation_maximization(p, x):
    for _ in range(2):
        normals = torch.distributions.Normal(p["mean"], p["std"])
        joint = p["weight"] * normals.log_prob(x[:, None]).sum(-1).exp()
        r = joint / joint.sum(1, keepdim=True)
        mean = torch.stack([(r[:, k, None] * x).sum(0) / r[:, k].sum() for k in range(3)])
        var = torch.stack([(r[:, k, None] * (x - mean[k]) ** 2).sum(0) / r[:, k].sum() for k in range(3)])
        p = {"weight": r.mean(0), "mean": mean, "std": (var + 1e-3).sqrt()}
    return p


def rbf(a, b, scale):
    return torch.exp(-0.5 * torch.cdist(a, b).square() / scale.square())


def kernel_regression(x, y, queries, scale):
    """Nadaraya-Watson: the data are split, the queries and the bandwidth are replicated."""
    k = rbf(queries, x, scale)  # [Q, B@data]
    top, bottom = fs.psum((k @ y, k.sum(1)), "data")
    return top / bottom


def dense_kernel_regression(x, y, queries, scale):
    distance = (queries[:, None] - x).square().sum(-1)
    return torch.softmax(-0.5 * distance / scale**2, -1) @ y


def marginal_likelihood(x, y, p):
    """Evidence of Bayesian linear regression, differentiated by replicated log-precisions through a Cholesky factor."""
    moments = fs.psum((x.T @ x, x.T @ y, y @ y, torch.tensor(float(len(x)), dtype=x.dtype)), "data")

    def loss(p):
        (a, b, c, n), (alpha, beta) = moments, p.exp()
        root = torch.linalg.cholesky(alpha * torch.eye(3) + beta * a)
        mean = torch.cholesky_solve(b[:, None], root)[:, 0]
        fit = 0.5 * beta * (c - beta * b @ mean)
        return fit + root.diagonal().log().sum() - 1.5 * p[0] - 0.5 * n * (p[1] - math.log(2 * math.pi))

    return fs.value_and_grad(loss)(p)


def dense_marginal_likelihood(x, y, p):
    def loss(p):
        cov = torch.eye(len(x), dtype=x.dtype) / p[1].exp() + x @ x.T / p[0].exp()
        return -torch.distributions.MultivariateNormal(torch.zeros_like(y), cov).log_prob(y)

    return torch.func.grad_and_value(loss)(p)[::-1]


def randomized_range_finder(x, key):
    """Randomized PCA: a sketch by a drawn matrix, orthogonalized by a Cholesky factor of its Gram matrix."""
    sketch = x @ fs.random.normal(key, (x.shape[1], 2), dtype=x.dtype)  # [B@data, 2]
    root = torch.linalg.cholesky(fs.psum(sketch.T @ sketch, "data"))
    q = torch.linalg.solve_triangular(root, sketch.T, upper=False).T
    return torch.linalg.svdvals(fs.psum(q.T @ x, "data"))


def dense_range_finder(x, key):
    q = torch.linalg.qr(x @ fs.random.normal(key, (x.shape[1], 2), dtype=x.dtype)).Q
    return torch.linalg.svdvals(q.T @ x)


def bootstrap_of_the_mean(x, key):
    """Poisson-like bootstrap: counts for each row and replicate, split as the rows are."""
    n = len(x) * fs.axis_size("data")
    counts = fs.random.randint(key, (n, 5), high=3, spec=P("data")).to(x.dtype)  # [B@data, 5]
    sums, total = fs.psum((counts.T @ x, counts.sum(0)), "data")
    return (sums / total[:, None]).std(0)


def dense_bootstrap(x, key):
    counts = fs.random.randint(key, (len(x), 5), high=3)
    means = torch.stack([x.repeat_interleave(counts[:, i], 0).mean(0) for i in range(5)])
    return means.var(0).sqrt()


def scalar(x):
    return torch.tensor(x, dtype=torch.float64)


MIXTURE = {"weight": torch.full((3,), 1 / 3).double(), "mean": normal("mean", 3, 3).double(),
           "std": torch.ones(3, 3).double()}  # fmt: skip
QUERIES = normal("queries", 5, 3).double()
SAMPLE = (P(), BATCH, BATCH, P(), P())
PROGRAMS = [
    Program(hamiltonian_monte_carlo, DATA, SAMPLE, P(), (W, X, Y, scalar(0.1), KEY), dense_hamiltonian),
    Program(expectation_maximization, DATA, (P(), BATCH), P(), (MIXTURE, X), dense_expectation_maximization),
    Program(
        kernel_regression, DATA, (BATCH, BATCH, P(), P()), P(), (X, Y, QUERIES, scalar(1.2)), dense_kernel_regression
    ),
    Program(
        marginal_likelihood, DATA, (BATCH, BATCH, P()), P(), (X, Y, torch.tensor([0.3, -0.4]).double()),
        dense_marginal_likelihood,
    ),
    Program(randomized_range_finder, DATA, (BATCH, P()), P(), (X, KEY), dense_range_finder),
    Program(bootstrap_of_the_mean, DATA, (BATCH, P()), P(), (X, KEY), dense_bootstrap),
]  # fmt: skip
