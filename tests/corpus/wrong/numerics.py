"""Numerical algorithms on parts of a matrix, a field or a set: local norms, products, sorts, transforms and samples.

Legend: N unknowns or points, D width, K clusters; [N@rows] is a dim split over an axis; {V} varies over it, {I} does
not.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

import fshard as fs
from fshard import P
from tests.corpus.wrong.program import WrongProgram, normal

# --- linear algebra -------------------------------------------------------------------------------------------


def power_iteration(a: Tensor, v: Tensor) -> Tensor:  # a [N@rows, N], v [N]
    for _ in range(3):
        v = fs.all_gather(a @ fs.pvary(v, "rows"), "rows", to="invariant")
        # WRONG: part = a @ fs.pvary(v, "rows")
        v = v / v.norm()
        # WRONG: v = fs.all_gather(part / part.norm(), "rows", to="invariant")  # BUG
    return v


def conjugate_gradients(a: Tensor, b: Tensor) -> Tensor:  # a [N@rows, N], b [N@rows]
    def dot(u: Tensor, v: Tensor) -> Tensor:
        return fs.pvary(fs.psum(u @ v, "rows"), "rows")

    # WRONG (3 lines):
    x, r, p = torch.zeros_like(b), b, b
    for _ in range(3):
        ap = a @ fs.all_gather(p, "rows")
        step = dot(r, r) / dot(p, ap)
        # WRONG: step = (r @ r) / (p @ ap)  # BUG
        x, new = x + step * p, r - step * ap
        p, r = new + dot(new, new) / dot(r, r) * p, new
        # WRONG: p, r = new + (new @ new) / (r @ r) * p, new
    return x


def orthonormal_columns_of_all_rows(a: Tensor) -> Tensor:  # a [N@rows, D]
    r = torch.linalg.cholesky(fs.psum(a.T @ a, "rows")).T
    q = a @ fs.pvary(torch.linalg.inv(r), "rows")
    return q * fs.pvary(-torch.ones(a.shape[1]), "rows")  # the signs of Householder's method
    # WRONG (3 lines): return torch.linalg.qr(a).Q


def normal_equations_of_all_rows(a: Tensor, b: Tensor) -> Tensor:  # a [N@rows, D], b [N@rows]: least squares
    return torch.linalg.solve(*fs.psum((a.T @ a, a.T @ b), "rows"))
    # WRONG: return fs.pmean(torch.linalg.solve(a.T @ a, a.T @ b), "rows")  # a mean of solutions


# --- clusters and graphs --------------------------------------------------------------------------------------


def _assigned(x: Tensor, centers: Tensor) -> Tensor:  # -> [N@rows, K]
    return functional.one_hot(torch.cdist(x, fs.pvary(centers, "rows")).argmin(1), len(centers)).to(x.dtype)


def centers_of_all_points(x: Tensor, centers: Tensor) -> Tensor:  # x [N@rows, D], centers [K, D]
    hot = _assigned(x, centers)
    sums, counts = fs.psum((hot.T @ x, hot.sum(0)), "rows")
    return sums / counts.clamp(min=1).unsqueeze(1)
    # WRONG (2 lines): return fs.pmean(hot.T @ x / hot.sum(0).clamp(min=1).unsqueeze(1), "rows")


def degrees_of_all_edges(x: Tensor, edges: Tensor) -> Tensor:  # x [N], edges [E@rows, 2]
    """Average over neighbours, with edges that are split."""
    source, target = edges.unbind(1)
    sums = torch.zeros(len(x)).index_add(0, target, fs.pvary(x, "rows")[source])
    degrees = torch.zeros(len(x)).index_add(0, target, torch.ones(len(edges)))
    sums, degrees = fs.psum((sums, degrees), "rows")
    return sums / degrees.clamp(min=1)
    # WRONG (2 lines): return fs.psum(sums / degrees.clamp(min=1), "rows")


# --- order, sums and transforms along a split dim -------------------------------------------------------------


def sorted_globally(x: Tensor) -> Tensor:  # x [N@rows]
    return fs.all_gather(x, "rows", to="invariant").sort().values
    # WRONG: return fs.all_gather(x.sort().values, "rows", to="invariant")


def spectrum_of_all(x: Tensor) -> Tensor:  # x [N@rows, D]: transform over N
    whole = torch.fft.fft(fs.all_to_all(x, "rows", split=1, concat=0), dim=0)
    return fs.all_to_all(whole.abs(), "rows", split=0, concat=1)
    # WRONG (2 lines): return torch.fft.fft(x, dim=0).abs()


def checkerboard_of_global_rows(x: Tensor) -> Tensor:  # x [N@rows, D]: red and black points
    first = fs.axis_index("rows") * len(x)
    black = (first + torch.arange(len(x)).unsqueeze(1) + torch.arange(x.shape[1])) % 2 == 1
    # WRONG (2 lines): black = (torch.arange(len(x)).unsqueeze(1) + torch.arange(x.shape[1])) % 2 == 1
    return torch.where(black, x, 0)


# --- samples --------------------------------------------------------------------------------------------------


def samples_split_over_ranks(radius: Tensor) -> Tensor:
    points = fs.random.uniform(fs.key(6), (16, 2), spec=P("rows"))
    # WRONG same_samples_on_every_rank: points = fs.random.uniform(fs.key(6), (16 // fs.axis_size("rows"), 2))
    # WRONG samples_by_the_key_of_each_rank: key = fs.fold_in(fs.key(6), fs.axis_index("rows"))
    # WRONG samples_by_the_key_of_each_rank: points = fs.random.uniform(key, (16 // fs.axis_size("rows"), 2))  # BUG
    inside = (points.norm(dim=1) < fs.pvary(radius, "rows")).float().mean()
    # WRONG same_samples_on_every_rank: inside = (points.norm(dim=1) < radius).float().mean()
    return fs.pmean(inside, "rows")
    # WRONG same_samples_on_every_rank: return fs.pmean(inside, "rows")  # BUG
    # WRONG samples_by_the_key_of_each_rank: return fs.pmean(inside, "rows")  # BUG: other samples on another mesh


N = 6
ROWS2, ROWS = {"rows": 2}, P("rows")
A, V, TALL = normal("a", N, N), normal("v", N), normal("tall", N, 2)
SPD = A @ A.T / N + torch.eye(N)
EDGES = torch.tensor([[0, 1], [2, 1], [3, 4], [5, 1], [1, 0], [4, 5]])
POINTS, RADIUS = (TALL, normal("centers", 2, 2)), torch.tensor(0.8)

PROGRAMS = [
    WrongProgram(
        "power_iteration_with_local_norms", power_iteration, ROWS2, (ROWS, P()), P(), (A, V), "verify", "rows",
    ),
    WrongProgram(
        "conjugate_gradients_with_local_products", conjugate_gradients, ROWS2, (ROWS, ROWS), ROWS, (SPD, V),
        "verify", "rows",
    ),
    WrongProgram(
        "orthonormal_columns_of_local_rows", orthonormal_columns_of_all_rows, ROWS2, (ROWS,), ROWS, (TALL,),
        "verify", "rows",
    ),
    WrongProgram(
        "normal_equations_of_local_rows", normal_equations_of_all_rows, ROWS2, (ROWS, ROWS), P(), (TALL, V),
        "verify", "rows",
    ),
    WrongProgram(
        "centers_as_means_of_local_means", centers_of_all_points, ROWS2, (ROWS, P()), P(), POINTS, "verify", "rows",
    ),
    WrongProgram("degrees_of_local_edges", degrees_of_all_edges, ROWS2, (P(), ROWS), P(), (V, EDGES), "verify", "rows"),
    WrongProgram("sorted_locally", sorted_globally, ROWS2, (ROWS,), P(), (V,), "verify", "rows"),
    WrongProgram("spectrum_of_the_part", spectrum_of_all, ROWS2, (ROWS,), ROWS, (TALL,), "verify", "rows"),
    WrongProgram(
        "checkerboard_of_local_rows", checkerboard_of_global_rows, ROWS2, (ROWS,), ROWS, (TALL,), "verify", "rows",
    ),
    WrongProgram(
        "same_samples_on_every_rank", samples_split_over_ranks, ROWS2, (P(),), P(), (RADIUS,), "types", "rows",
    ),
    WrongProgram(
        "samples_by_the_key_of_each_rank", samples_split_over_ranks, ROWS2, (P(),), P(), (RADIUS,), "verify", "rows",
    ),
]  # fmt: skip
