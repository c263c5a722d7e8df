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


def power_iteration_with_local_norms(a: Tensor, v: Tensor) -> Tensor:  # a [N@rows, N], v [N]
    for _ in range(3):
        part = a @ fs.pvary(v, "rows")
        v = fs.all_gather(part / part.norm(), "rows", to="invariant")  # BUG
    return v


def power_iteration(a: Tensor, v: Tensor) -> Tensor:
    for _ in range(3):
        v = fs.all_gather(a @ fs.pvary(v, "rows"), "rows", to="invariant")
        v = v / v.norm()
    return v


def conjugate_gradients_with_local_products(a: Tensor, b: Tensor) -> Tensor:  # a [N@rows, N], b [N@rows]
    x, r, p = torch.zeros_like(b), b, b
    for _ in range(3):
        ap = a @ fs.all_gather(p, "rows")
        step = (r @ r) / (p @ ap)  # BUG
        x, new = x + step * p, r - step * ap
        p, r = new + (new @ new) / (r @ r) * p, new
    return x


def conjugate_gradients(a: Tensor, b: Tensor) -> Tensor:
    def dot(u: Tensor, v: Tensor) -> Tensor:
        return fs.pvary(fs.psum(u @ v, "rows"), "rows")

    x, r, p = torch.zeros_like(b), b, b
    for _ in range(3):
        ap = a @ fs.all_gather(p, "rows")
        step = dot(r, r) / dot(p, ap)
        x, new = x + step * p, r - step * ap
        p, r = new + dot(new, new) / dot(r, r) * p, new
    return x


def orthonormal_columns_of_local_rows(a: Tensor) -> Tensor:  # a [N@rows, D]
    return torch.linalg.qr(a).Q  # BUG


def orthonormal_columns_of_all_rows(a: Tensor) -> Tensor:
    r = torch.linalg.cholesky(fs.psum(a.T @ a, "rows")).T
    q = a @ fs.pvary(torch.linalg.inv(r), "rows")
    return q * fs.pvary(-torch.ones(a.shape[1]), "rows")  # the signs of Householder's method


def normal_equations_of_local_rows(a: Tensor, b: Tensor) -> Tensor:  # a [N@rows, D], b [N@rows]: least squares
    return fs.pmean(torch.linalg.solve(a.T @ a, a.T @ b), "rows")  # BUG: a mean of solutions


def normal_equations_of_all_rows(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.solve(*fs.psum((a.T @ a, a.T @ b), "rows"))


def kernel_of_local_points(x: Tensor) -> Tensor:  # x [N@rows, D]
    return (-torch.cdist(x, x).square()).exp().sum(1)  # BUG


def kernel_of_all_points(x: Tensor) -> Tensor:
    return (-torch.cdist(x, fs.all_gather(x, "rows")).square()).exp().sum(1)


# --- clusters and graphs --------------------------------------------------------------------------------------


def _assigned(x: Tensor, centers: Tensor) -> Tensor:  # -> [N@rows, K]
    return functional.one_hot(torch.cdist(x, fs.pvary(centers, "rows")).argmin(1), len(centers)).to(x.dtype)


def centers_as_means_of_local_means(x: Tensor, centers: Tensor) -> Tensor:  # x [N@rows, D], centers [K, D]
    hot = _assigned(x, centers)
    return fs.pmean(hot.T @ x / hot.sum(0).clamp(min=1).unsqueeze(1), "rows")  # BUG


def centers_divided_by_local_counts(x: Tensor, centers: Tensor) -> Tensor:
    hot = _assigned(x, centers)
    sums = fs.psum(hot.T @ x, "rows")
    return sums / hot.sum(0).clamp(min=1).unsqueeze(1)  # BUG


def centers_of_all_points(x: Tensor, centers: Tensor) -> Tensor:
    hot = _assigned(x, centers)
    sums, counts = fs.psum((hot.T @ x, hot.sum(0)), "rows")
    return sums / counts.clamp(min=1).unsqueeze(1)


def degrees_of_local_edges(x: Tensor, edges: Tensor) -> Tensor:  # x [N], edges [E@rows, 2]
    """Average over neighbours, with edges that are split."""
    source, target = edges.unbind(1)
    sums = torch.zeros(len(x)).index_add(0, target, fs.pvary(x, "rows")[source])
    degrees = torch.zeros(len(x)).index_add(0, target, torch.ones(len(edges)))
    return fs.psum(sums / degrees.clamp(min=1), "rows")  # BUG


def degrees_of_all_edges(x: Tensor, edges: Tensor) -> Tensor:
    source, target = edges.unbind(1)
    sums = torch.zeros(len(x)).index_add(0, target, fs.pvary(x, "rows")[source])
    degrees = torch.zeros(len(x)).index_add(0, target, torch.ones(len(edges)))
    sums, degrees = fs.psum((sums, degrees), "rows")
    return sums / degrees.clamp(min=1)


# --- order, sums and transforms along a split dim -------------------------------------------------------------


def sorted_locally(x: Tensor) -> Tensor:  # x [N@rows]
    return fs.all_gather(x.sort().values, "rows", to="invariant")  # BUG


def sorted_globally(x: Tensor) -> Tensor:
    return fs.all_gather(x, "rows", to="invariant").sort().values


def prefix_sums_of_the_part(x: Tensor) -> Tensor:  # x [N@rows]
    return x.cumsum(0)  # BUG


def prefix_sums_of_all(x: Tensor) -> Tensor:
    totals = fs.all_gather(x.sum().reshape(1), "rows")
    before = totals.where(torch.arange(len(totals)) < fs.axis_index("rows"), 0).sum()
    return x.cumsum(0) + before


def spectrum_of_the_part(x: Tensor) -> Tensor:  # x [N@rows, D]: transform over N
    return torch.fft.fft(x, dim=0).abs()  # BUG


def spectrum_of_all(x: Tensor) -> Tensor:
    whole = torch.fft.fft(fs.all_to_all(x, "rows", split=1, concat=0), dim=0)
    return fs.all_to_all(whole.abs(), "rows", split=0, concat=1)


def integral_with_ends_of_each_part(y: Tensor) -> Tensor:  # y [N@rows], samples of a function
    return fs.psum(torch.trapezoid(y), "rows")  # BUG: misses the interval between two parts


def integral_with_two_ends(y: Tensor) -> Tensor:
    n, me = fs.axis_size("rows"), fs.axis_index("rows")
    ends = torch.where(me == 0, y[0], 0) + torch.where(me == n - 1, y[-1], 0)
    return fs.psum(y.sum() - ends / 2, "rows")


def convolution_padded_at_each_part(x: Tensor, w: Tensor) -> Tensor:  # x [1, 1, H@rows, W], w [1, 1, 3, 3]
    return functional.conv2d(x, fs.pvary(w, "rows"), padding=1)  # BUG


def convolution_with_neighbours(x: Tensor, w: Tensor) -> Tensor:
    n = fs.axis_size("rows")
    above = fs.ppermute(x[:, :, -1:], "rows", [(i, i + 1) for i in range(n - 1)])
    below = fs.ppermute(x[:, :, :1], "rows", [(i + 1, i) for i in range(n - 1)])
    return functional.conv2d(torch.cat([above, x, below], 2), fs.pvary(w, "rows"), padding=(0, 1))


def checkerboard_of_local_rows(x: Tensor) -> Tensor:  # x [N@rows, D]: red and black points
    black = (torch.arange(len(x)).unsqueeze(1) + torch.arange(x.shape[1])) % 2 == 1  # BUG
    return torch.where(black, x, 0)


def checkerboard_of_global_rows(x: Tensor) -> Tensor:
    first = fs.axis_index("rows") * len(x)
    black = (first + torch.arange(len(x)).unsqueeze(1) + torch.arange(x.shape[1])) % 2 == 1
    return torch.where(black, x, 0)


# --- samples --------------------------------------------------------------------------------------------------


def same_samples_on_every_rank(radius: Tensor) -> Tensor:
    points = fs.random.uniform(fs.key(6), (16 // fs.axis_size("rows"), 2))
    inside = (points.norm(dim=1) < radius).float().mean()
    return fs.pmean(inside, "rows")  # BUG


def samples_by_the_key_of_each_rank(radius: Tensor) -> Tensor:
    points = fs.random.uniform(fs.fold_in(fs.key(6), fs.axis_index("rows")), (16 // fs.axis_size("rows"), 2))  # BUG
    inside = (points.norm(dim=1) < fs.pvary(radius, "rows")).float().mean()
    return fs.pmean(inside, "rows")  # BUG: other samples on another mesh


def samples_split_over_ranks(radius: Tensor) -> Tensor:
    points = fs.random.uniform(fs.key(6), (16, 2), spec=P("rows"))
    inside = (points.norm(dim=1) < fs.pvary(radius, "rows")).float().mean()
    return fs.pmean(inside, "rows")


N = 6
ROWS2, ROWS = {"rows": 2}, P("rows")
A, V, TALL = normal("a", N, N), normal("v", N), normal("tall", N, 2)
SPD = A @ A.T / N + torch.eye(N)
EDGES = torch.tensor([[0, 1], [2, 1], [3, 4], [5, 1], [1, 0], [4, 5]])
POINTS, RADIUS = (TALL, normal("centers", 2, 2)), torch.tensor(0.8)

PROGRAMS = [
    WrongProgram(power_iteration_with_local_norms, power_iteration, ROWS2, (ROWS, P()), P(), (A, V), "verify", "rows"),
    WrongProgram(
        conjugate_gradients_with_local_products, conjugate_gradients, ROWS2, (ROWS, ROWS), ROWS, (SPD, V), "verify",
        "rows",
    ),
    WrongProgram(
        orthonormal_columns_of_local_rows, orthonormal_columns_of_all_rows, ROWS2, (ROWS,), ROWS, (TALL,), "verify",
        "rows",
    ),
    WrongProgram(
        normal_equations_of_local_rows, normal_equations_of_all_rows, ROWS2, (ROWS, ROWS), P(), (TALL, V), "verify",
        "rows",
    ),
    WrongProgram(kernel_of_local_points, kernel_of_all_points, ROWS2, (ROWS,), ROWS, (TALL,), "verify", "rows"),
    WrongProgram(
        centers_as_means_of_local_means, centers_of_all_points, ROWS2, (ROWS, P()), P(), POINTS, "verify", "rows"
    ),
    WrongProgram(
        centers_divided_by_local_counts, centers_of_all_points, ROWS2, (ROWS, P()), P(), POINTS, "types", "rows"
    ),
    WrongProgram(degrees_of_local_edges, degrees_of_all_edges, ROWS2, (P(), ROWS), P(), (V, EDGES), "verify", "rows"),
    WrongProgram(sorted_locally, sorted_globally, ROWS2, (ROWS,), P(), (V,), "verify", "rows"),
    WrongProgram(prefix_sums_of_the_part, prefix_sums_of_all, ROWS2, (ROWS,), ROWS, (V,), "verify", "rows"),
    WrongProgram(spectrum_of_the_part, spectrum_of_all, ROWS2, (ROWS,), ROWS, (TALL,), "verify", "rows"),
    WrongProgram(integral_with_ends_of_each_part, integral_with_two_ends, ROWS2, (ROWS,), P(), (V,), "verify", "rows"),
    WrongProgram(
        convolution_padded_at_each_part, convolution_with_neighbours, ROWS2, (P(None, None, "rows"), P()), P(None,
        None, "rows"), (normal("image", 1, 1, 4, 4), normal("kernel", 1, 1, 3, 3)), "verify", "rows",
    ),
    WrongProgram(
        checkerboard_of_local_rows, checkerboard_of_global_rows, ROWS2, (ROWS,), ROWS, (TALL,), "verify", "rows"
    ),
    WrongProgram(same_samples_on_every_rank, samples_split_over_ranks, ROWS2, (P(),), P(), (RADIUS,), "types", "rows"),
    WrongProgram(
        samples_by_the_key_of_each_rank, samples_split_over_ranks, ROWS2, (P(),), P(), (RADIUS,), "verify", "rows"
    ),
]  # fmt: skip
