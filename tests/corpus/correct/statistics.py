"""Statistics, clustering and graph algorithms over split samples, channels and edges.

Legend: N samples, D features, K centers, C channels, V vertices, E edges; [N@data] is a dim split over an axis.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, normal


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


def histogram_equalization(x: Tensor) -> tuple[Tensor, Tensor]:  # x [N@data] of integers below 16
    """Map gray levels by their cumulative histogram over all ranks: integers only."""
    counts = fs.psum(torch.bincount(x, minlength=16), "data")
    return counts, counts.cumsum(0)[x] * 15 // counts.sum()


def dense_histogram_equalization(x: Tensor) -> tuple[Tensor, Tensor]:
    counts = torch.stack([(x == level).sum() for level in range(16)])
    return counts, torch.stack([(x <= level).sum() for level in x]) * 15 // len(x)


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


DATA = P("data")
NORM = {"w": normal("w", 3, 3), "scale": normal("scale", 3), "shift": normal("shift", 3)}
RUNNING = {"mean": normal("running mean", 3), "var": normal("running var", 3).exp()}
LEVELS = (normal("levels", 10) * 3).long().abs() % 16
EDGES = torch.tensor([1, 2, 2, 5, 6, 0, 7, 0, 3]), torch.tensor([0, 1, 3, 4, 5, 2, 4, 1, 0])
DEGREE = EDGES[1].bincount(minlength=8)
PATHS = torch.tensor([0, 1, 2, 0, 3]), torch.tensor([1, 2, 4, 3, 4])

PROGRAMS = [
    Program(batch_norm_evaluation, {"data": 2}, (P(), P(), DATA), DATA, (NORM, RUNNING, normal("x", 4, 3, 2)),
            lambda p, running, x: F.batch_norm(x, running["mean"], running["var"], p["scale"], p["shift"])),
    Program(merged_moments, {"data": 3}, (DATA,), P(), (normal("x", 7, 2),), dense_merged_moments),
    Program(histogram_equalization, {"data": 3}, (DATA,), (P(), DATA), (LEVELS,), dense_histogram_equalization,
            static=False),
    Program(split_edges_page_rank, {"data": 3}, (DATA, DATA, P()), P(), (*EDGES, DEGREE), dense_split_edges_page_rank),
    Program(connected_components, {"data": 4}, (DATA, DATA), P(), PATHS, dense_connected_components),
]  # fmt: skip
