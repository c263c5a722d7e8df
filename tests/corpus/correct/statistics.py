"""Statistics, clustering and graph algorithms over split samples, channels and edges.

Legend: N samples, D features, K centers, C channels, V vertices, E edges; [N@data] is a dim split over an axis.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, dense_grad, normal


def synchronized_batch_norm(p: dict[str, Tensor], running: dict[str, Tensor], x: Tensor, target: Tensor) -> Any:
    """Batch norm in training, with the statistics of all ranks' rows, and its running statistics.

    x [N@data, C, L], running mean and variance [C].
    """

    def loss(p: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        p = fs.pvary(p, "data")
        h = torch.einsum("ncl,cd->ndl", x, p["w"])
        mean = fs.pmean(h.mean((0, 2)), "data")
        variance = fs.pmean((h - fs.pvary(mean, "data")[:, None]).square().mean((0, 2)), "data")
        mean_here, scale = fs.pvary((mean, torch.rsqrt(variance + 1e-5)), "data")
        y = (h - mean_here[:, None]) * (scale * p["scale"])[:, None] + p["shift"][:, None]
        return fs.pmean((y - target).square().mean(), "data"), (mean, variance)

    (value, (mean, variance)), grads = fs.value_and_grad(loss, has_aux=True)(p)
    count = x.shape[0] * x.shape[2] * fs.axis_size("data")
    new = {
        "mean": 0.9 * running["mean"] + 0.1 * mean,
        "var": 0.9 * running["var"] + 0.1 * variance * count / (count - 1),
    }
    return value, grads, new


def dense_synchronized_batch_norm(p: dict[str, Tensor], running: dict[str, Tensor], x: Tensor, target: Tensor) -> Any:
    new = {name: value.clone() for name, value in running.items()}
    leaves = {name: w.clone().requires_grad_() for name, w in p.items()}
    h = torch.einsum("ncl,cd->ndl", x, leaves["w"])
    y = F.batch_norm(h, new["mean"], new["var"], leaves["scale"], leaves["shift"], training=True)
    loss = (y - target).square().mean()
    return loss.detach(), dict(zip(leaves, torch.autograd.grad(loss, [*leaves.values()]), strict=True)), new


def batch_norm_evaluation(p: dict[str, Tensor], running: dict[str, Tensor], x: Tensor) -> Tensor:
    """Batch norm in evaluation: running statistics that are on every rank, rows that are split."""
    with torch.inference_mode():
        return F.batch_norm(x, running["mean"], running["var"], p["scale"], p["shift"])


def merged_moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # x [N@data, D]; parts of 3, 3 and 1 rows
    """Mean, variance and count, merged from those of the parts (Chan et al., 1979)."""
    n, count = fs.axis_size("data"), torch.tensor(float(len(x)))
    mean, squares = x.mean(0), (x - x.mean(0)).square().sum(0)
    counts, means, many = fs.all_gather((count[None], mean[None], squares[None]), "data", size=n, to="invariant")
    total = counts.sum()
    merged = (counts[:, None] * means).sum(0) / total
    between = (counts[:, None] * (means - merged).square()).sum(0)
    return merged, (many.sum(0) + between) / total, total


def dense_merged_moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.mean(0), x.var(0, unbiased=False), torch.tensor(float(len(x)))


def split_softmax(logits: Tensor, values: Tensor) -> Tensor:  # [N, D@model], [D@model]
    """Expectation under a softmax over a split dim, and the logarithm of its normalizer."""
    top = fs.pmax(logits.detach().amax(-1, keepdim=True), "model")
    exps = (logits - fs.pvary(top, "model")).exp()
    total = fs.psum(exps.sum(-1, keepdim=True), "model")
    probabilities = exps / fs.pvary(total, "model")
    return fs.psum(probabilities @ values, "model").square().sum() + (total.log() + top).sum()


def dense_split_softmax(logits: Tensor, values: Tensor) -> Tensor:
    return (logits.softmax(-1) @ values).square().sum() + logits.logsumexp(-1).sum()


def log_partition_over_ranks(logits: Tensor, weights: Tensor) -> Tensor:
    """Logsumexp of weighted scores with the maximum differentiated too: pmax with grad="tied"."""
    scores = logits + weights
    top = fs.pmax(scores.amax(), "model", grad="tied")
    return fs.psum((scores - fs.pvary(top, "model")).exp().sum(), "model").log() + top


def dense_log_partition_over_ranks(logits: Tensor, weights: Tensor) -> Tensor:
    return (logits + weights).flatten().logsumexp(0)


def k_means(x: Tensor, centers: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # x [N@data, D], centers [K, D]
    """Lloyd's algorithm: sums and counts of the rows of each center; a center without rows stays."""
    for _ in range(4):
        nearest = torch.cdist(x, centers).argmin(-1)
        hot = F.one_hot(nearest, len(centers)).to(x.dtype)  # [N@data, K]
        sums, counts = fs.psum((hot.T @ x, hot.sum(0)), "data")
        centers = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], centers)
    inertia = fs.psum(torch.cdist(x, centers).amin(-1).square().sum(), "data")
    return centers, nearest, inertia


def dense_k_means(x: Tensor, centers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    for _ in range(4):
        nearest = (x[:, None] - centers).norm(dim=-1).argmin(-1)
        groups = [x[nearest == k] for k in range(len(centers))]
        centers = torch.stack([g.mean(0) if len(g) else c for g, c in zip(groups, centers, strict=True)])
    return centers, nearest, (x[:, None] - centers).norm(dim=-1).amin(-1).square().sum()


def histogram_equalization(x: Tensor) -> tuple[Tensor, Tensor]:  # x [N@data] of integers below 16
    """Map gray levels by their cumulative histogram over all ranks: integers only."""
    counts = fs.psum(torch.bincount(x, minlength=16), "data")
    return counts, counts.cumsum(0)[x] * 15 // counts.sum()


def dense_histogram_equalization(x: Tensor) -> tuple[Tensor, Tensor]:
    counts = torch.stack([(x == level).sum() for level in range(16)])
    return counts, torch.stack([(x <= level).sum() for level in x]) * 15 // len(x)


def median_by_bisection(x: Tensor) -> Tensor:  # x [N@data] of integers below 32
    """Lower median by halving an interval of values, with a count over all ranks at each step."""
    low, high, count = fs.pmin(x.amin(), "data") - 1, fs.pmax(x.amax(), "data"), fs.psum(torch.tensor(len(x)), "data")
    for _ in range(6):
        middle = (low + high) // 2
        below = fs.psum((x <= middle).sum(), "data")
        low, high = torch.where(2 * below < count, middle, low), torch.where(2 * below < count, high, middle)
    return high


def split_edges_page_rank(target: Tensor, source: Tensor, degree: Tensor) -> Tensor:  # edges [E@data], degree [V]
    """PageRank of a graph with split edges; vertices without a way out give to all."""
    rank = torch.full((len(degree),), 1 / len(degree), dtype=torch.float64)
    for _ in range(10):
        given = rank[source] / degree[source]
        received = fs.psum(torch.zeros_like(rank).index_add(0, target, given), "data")
        lost = (rank * (degree == 0)).sum() / len(degree)
        rank = 0.15 / len(degree) + 0.85 * (received + lost)
    return rank


def dense_split_edges_page_rank(target: Tensor, source: Tensor, degree: Tensor) -> Tensor:
    n = len(degree)
    m = torch.full((n, n), 1 / n, dtype=torch.float64)
    m[:, degree > 0] = 0
    for i, j in zip(target.tolist(), source.tolist(), strict=True):
        m[i, j] += 1 / degree[j]
    rank = torch.full((n,), 1 / n, dtype=torch.float64)
    for _ in range(10):
        rank = 0.15 / n + 0.85 * m @ rank
    return rank


def split_vertices_page_rank(links: Tensor) -> Tensor:  # links [V, V@data], columns that add up to 1
    """PageRank with split vertices: each rank multiplies its columns, and a reduce-scatter adds up the products."""
    n = links.shape[0]
    rank = torch.full((links.shape[1],), 1 / n, dtype=links.dtype)
    for _ in range(8):
        rank = 0.15 / n + 0.85 * fs.psum_scatter(links @ rank, "data")
    return rank


def dense_split_vertices_page_rank(links: Tensor) -> Tensor:
    rank = torch.full((len(links),), 1 / len(links), dtype=links.dtype)
    for _ in range(8):
        rank = 0.15 / len(links) + 0.85 * links @ rank
    return rank


def connected_components(left: Tensor, right: Tensor) -> Tensor:  # edges [E@data]; one rank has none
    """Label of each of 8 vertices: the least vertex that it reaches; labels travel along edges, then over ranks."""
    labels = torch.arange(8)
    for _ in range(7):
        own = labels.scatter_reduce(0, left, labels[right], "amin").scatter_reduce(0, right, labels[left], "amin")
        labels = fs.pmin(own, "data")
    return labels


def dense_connected_components(left: Tensor, right: Tensor) -> Tensor:
    reach = torch.eye(8)
    reach[left, right] = reach[right, left] = 1
    return (torch.linalg.matrix_power(reach, 8) > 0).int().argmax(1)


def gravity_by_ring(p: Tensor, mass: Tensor) -> Tensor:  # p [N@data, 3], mass [N@data]
    """Potential energy of all pairs: copies of the bodies travel around a ring. Its gradient is the force."""
    n = fs.axis_size("data")
    others, other_mass = p, mass
    energy = torch.zeros((), dtype=p.dtype)
    for _ in range(n):
        squares = (p[:, None] - others).square().sum(-1) + 0.01
        energy = energy - (mass[:, None] * other_mass / squares.sqrt()).sum() / 2
        others, other_mass = fs.ppermute((others, other_mass), "data", [(i, (i + 1) % n) for i in range(n)])
    return fs.psum(energy, "data")


def dense_gravity_by_ring(p: Tensor, mass: Tensor) -> Tensor:
    return -(torch.outer(mass, mass) / ((p[:, None] - p).square().sum(-1) + 0.01).sqrt()).sum() / 2


def kernel_two_sample_loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:  # w [D, D], x [N@data, D], y [N@data, D]
    """Maximum mean discrepancy of two split samples; a pair's second member is gathered."""
    w = fs.pvary(w, "data")
    x, y = x @ w, y @ w
    all_x, all_y = fs.all_gather((x, y), "data")
    kernel = lambda a, b: (-(a[:, None] - b).square().sum(-1) / 2).exp().mean()  # noqa: E731
    return fs.pmean(kernel(x, all_x) + kernel(y, all_y) - 2 * kernel(x, all_y), "data")


def dense_kernel_two_sample_loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    both = torch.cat([x, y]) @ w
    sign = torch.ones(len(both), dtype=w.dtype)
    sign[len(x) :] = -1
    pairs = (-(both[:, None] - both).square().sum(-1) / 2).exp()
    return sign @ pairs @ sign / len(x) ** 2


DATA, LAST = P("data"), P(None, "model")
NORM = {"w": normal("w", 3, 3), "scale": normal("scale", 3), "shift": normal("shift", 3)}
RUNNING = {"mean": normal("running mean", 3), "var": normal("running var", 3).exp()}
LEVELS = (normal("levels", 10) * 3).long().abs() % 16
POINTS = normal("points", 10, 2)
EDGES = torch.tensor([1, 2, 2, 5, 6, 0, 7, 0, 3]), torch.tensor([0, 1, 3, 4, 5, 2, 4, 1, 0])
DEGREE = EDGES[1].bincount(minlength=8)
PATHS = torch.tensor([0, 1, 2, 0, 3]), torch.tensor([1, 2, 4, 3, 4])
BODIES = normal("bodies", 6, 3).double(), normal("masses", 6).double().exp()

PROGRAMS = [
    Program(synchronized_batch_norm, {"data": 2}, (P(), P(), DATA, DATA), P(),
            (NORM, RUNNING, normal("x", 4, 3, 2), normal("y", 4, 3, 2)), dense_synchronized_batch_norm),
    Program(batch_norm_evaluation, {"data": 2}, (P(), P(), DATA), DATA, (NORM, RUNNING, normal("x", 4, 3, 2)),
            lambda p, running, x: F.batch_norm(x, running["mean"], running["var"], p["scale"], p["shift"])),
    Program(merged_moments, {"data": 3}, (DATA,), P(), (normal("x", 7, 2),), dense_merged_moments),
    Program(fs.value_and_grad(split_softmax, (0, 1)), {"model": 4}, (LAST, P("model")), (P(), (LAST, P("model"))),
            (normal("logits", 3, 8) * 9, normal("values", 8)), dense_grad(dense_split_softmax, (0, 1))),
    Program(fs.value_and_grad(log_partition_over_ranks, (0, 1)), {"model": 2}, (LAST, LAST), (P(), (LAST, LAST)),
            (normal("logits", 3, 8) * 9, normal("weights", 3, 8)), dense_grad(dense_log_partition_over_ranks, (0, 1))),
    Program(k_means, {"data": 4}, (DATA, P()), (P(), DATA, P()), (POINTS, normal("centers", 3, 2)), dense_k_means),
    Program(histogram_equalization, {"data": 3}, (DATA,), (P(), DATA), (LEVELS,), dense_histogram_equalization,
            static=False),
    Program(median_by_bisection, {"data": 3}, (DATA,), P(), ((normal("x", 9) * 8).long() + 16,), lambda x: x.median()),
    Program(split_edges_page_rank, {"data": 3}, (DATA, DATA, P()), P(), (*EDGES, DEGREE), dense_split_edges_page_rank),
    Program(split_vertices_page_rank, {"data": 2}, (P(None, "data"),), DATA,
            (normal("links", 6, 6).double().softmax(0),), dense_split_vertices_page_rank),
    Program(connected_components, {"data": 4}, (DATA, DATA), P(), PATHS, dense_connected_components),
    Program(fs.value_and_grad(gravity_by_ring, (0, 1)), {"data": 3}, (DATA, DATA), (P(), DATA), BODIES,
            dense_grad(dense_gravity_by_ring, (0, 1))),
    Program(fs.value_and_grad(kernel_two_sample_loss), {"data": 2}, (P(), DATA, DATA), P(),
            (normal("w", 2, 2), normal("x", 6, 2), normal("y", 6, 2)), dense_grad(dense_kernel_two_sample_loss)),
]  # fmt: skip
