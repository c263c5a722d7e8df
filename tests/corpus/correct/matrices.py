"""Products of matrices and factorizations with split rows and columns.

Legend: A [M, K], B [K, N], rows of a table [N@x]; [M@row, K@col] is a matrix in blocks on a grid of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, dense_grad, normal


def summa(a: Tensor, b: Tensor) -> Tensor:  # a [M@row, K@col], b [K@row, N@col]
    """SUMMA: for each panel of K, its columns of A are sent along rows and its rows of B along columns.

    van de Geijn and Watts, 1997. K is cut into as many panels as fit both splits.
    """
    inner = a.shape[1] * fs.axis_size("col")
    width = inner // 6
    c = a.new_zeros(a.shape[0], b.shape[1])
    for start in range(0, inner, width):
        owner, at = divmod(start, a.shape[1])
        panel_a = fs.psum(torch.where(fs.axis_index("col") == owner, a[:, at : at + width], 0.0), "col")
        owner, at = divmod(start, b.shape[0])
        panel_b = fs.psum(torch.where(fs.axis_index("row") == owner, b[at : at + width], 0.0), "row")
        c = c + fs.pvary(panel_a, "col") @ fs.pvary(panel_b, "row")
    return fs.psum(torch.sin(c).sum(), ("row", "col"))


def gathered_product(a: Tensor, b: Tensor) -> Tensor:
    """The same product by one gather of the rows of ranks, and one of their columns."""
    c = fs.all_gather(a, "col", dim=1) @ fs.all_gather(b, "row", dim=0)
    return fs.psum(torch.sin(c).sum(), ("row", "col"))


def dense_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.sin(a @ b).sum()


def cannon(a: Tensor, b: Tensor) -> Tensor:  # a [M@row, K@col], b [K@row, N@col] on a square grid
    """Cannon's algorithm: blocks are skewed, then A moves left and B moves up (Cannon, 1969)."""
    n, grid = fs.axis_size("row"), ("row", "col")
    cells = [(i, j) for i in range(n) for j in range(n)]
    a = fs.ppermute(a, grid, [(i * n + j, i * n + (j - i) % n) for i, j in cells])
    b = fs.ppermute(b, grid, [(i * n + j, (i - j) % n * n + j) for i, j in cells])
    c = a @ b
    for _ in range(n - 1):
        a = fs.ppermute(a, "col", [(j, (j - 1) % n) for j in range(n)])
        b = fs.ppermute(b, "row", [(i, (i - 1) % n) for i in range(n)])
        c = c + a @ b
    return fs.psum(torch.sin(c).sum(), grid)


def product_2_5d(a: Tensor, b: Tensor) -> Tensor:  # a [M@row, K@col], b [K@row, N@col], on every layer of `depth`
    """2.5D: copies of A and B on each layer, which multiplies its share of K (Solomonik and Demmel, 2011)."""
    # 1. Each layer takes its share of the columns of A and of the rows of B, on every row and column.
    share_a = fs.pslice(fs.all_gather(a, "col", dim=1, to="invariant"), "depth", dim=1)  # [M@row, K@depth]
    share_b = fs.pslice(fs.all_gather(b, "row", dim=0, to="invariant"), "depth", dim=0)  # [K@depth, N@col]
    # 2. The layers' products are parts of a sum.
    c = fs.psum(fs.pvary(share_a, "col") @ fs.pvary(share_b, "row"), "depth")
    return fs.psum(torch.sin(c).sum(), ("row", "col"))


def transpose_by_all_to_all(x: Tensor) -> Tensor:  # x [M@x, N]
    """Transpose a matrix with split rows: columns are exchanged for rows. Neither dim divides the ranks."""
    return fs.all_to_all(x, "x", split=1, concat=0, size=7).T  # [N@x, M]


def cholesky_qr(x: Tensor) -> tuple[Tensor, Tensor]:  # x [N@x, D]
    """QR of a tall matrix by the Cholesky factor of its Gram matrix, twice for accuracy (Fukaya et al., 2014)."""
    r = torch.eye(x.shape[1], dtype=x.dtype)
    for _ in range(2):
        factor = torch.linalg.cholesky(fs.psum(x.T @ x, "x")).T
        x = torch.linalg.solve_triangular(factor, x, upper=True, left=False)
        r = factor @ r
    return x, r


def tall_skinny_qr(x: Tensor) -> tuple[Tensor, Tensor]:  # x [N@x, D]
    """TSQR: QR of the own rows, then of all ranks' R, whose Q is multiplied in (Demmel et al., 2008)."""
    q, r = torch.linalg.qr(x)
    q_of_r, r = torch.linalg.qr(fs.all_gather(r, "x", to="invariant"))
    sign = r.diagonal().sign()
    return q @ fs.pslice(q_of_r, "x") * sign, r * sign[:, None]


def dense_qr(x: Tensor) -> tuple[Tensor, Tensor]:
    q, r = torch.linalg.qr(x)
    sign = r.diagonal().sign()
    return q * sign, r * sign[:, None]


def split_rows_power_iteration(a: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:  # a [N@x, N], v [N]
    """The largest eigenvalue of a symmetric matrix with split rows, and its vector."""
    for _ in range(15):
        v = fs.all_gather(a @ v, "x", to="invariant")
        v = v / v.norm()
    return v @ fs.all_gather(a @ v, "x", to="invariant"), v * v[0].sign()


def dense_split_rows_power_iteration(a: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(a)
    return values[-1], vectors[:, -1] * vectors[0, -1].sign()


def conjugate_gradient(a: Tensor, b: Tensor) -> Tensor:  # a [N@x, N], b [N@x]
    """Solve a x = b with split vectors: a gather for each product, a sum for each dot product."""
    x, r, p = torch.zeros_like(b), b, b
    rr = fs.psum(r @ r, "x")
    for step in range(6):
        if step:
            rr, before = fs.psum(r @ r, "x"), rr
            p = r + (rr / before) * p
        ap = a @ fs.all_gather(p, "x")
        alpha = rr / fs.psum(p @ ap, "x")
        x, r = x + alpha * p, r - alpha * ap
    return x


def differentiated_ridge_regression(w: Tensor, x: Tensor, y: Tensor) -> Tensor:  # w [D, F], x [N@x, D], y [N@x]
    """Loss of a ridge regression on learned features, differentiated through its normal equations."""
    h = torch.tanh(x @ fs.pvary(w, "x"))  # [N@x, F]
    gram, moment = fs.psum((h.T @ h, h.T @ y), "x")
    solution = torch.linalg.solve(gram + 0.1 * torch.eye(len(gram), dtype=gram.dtype), moment)
    return fs.pmean((h @ fs.pvary(solution, "x") - y).square().mean(), "x") + 0.1 * solution.square().sum()


def dense_differentiated_ridge_regression(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    h = torch.tanh(x @ w)
    solution = torch.linalg.solve(h.T @ h + 0.1 * torch.eye(h.shape[1], dtype=h.dtype), h.T @ y)
    return (h @ solution - y).square().mean() + 0.1 * solution.square().sum()


def blocked_cholesky(a: Tensor) -> Tensor:  # a [N, N@x]
    """Right-looking Cholesky factor with split columns: the owner of a column sends it to all."""
    a, start = a.clone(), fs.axis_index("x") * a.shape[1]
    columns = start + torch.arange(a.shape[1])
    for j in range(a.shape[0]):
        own = columns == j
        column = fs.psum((a * own).sum(1), "x")
        column = torch.where(torch.arange(len(a)) >= j, column / column[j].sqrt(), 0.0)
        update = torch.outer(column, fs.pslice(column, "x"))
        a = torch.where(own, column[:, None], torch.where(columns > j, a - update, a))
    return a


def dense_blocked_cholesky(a: Tensor) -> Tensor:
    return torch.linalg.cholesky(a)


def positive(name: str, n: int) -> Tensor:
    x = normal(name, n, n).double()
    return x @ x.T / n + torch.eye(n, dtype=x.dtype)


GRID, ROWS = P("row", "col"), P("x")
A, B = normal("a", 6, 12), normal("b", 12, 4)
TALL = normal("tall", 12, 3).double()
DOMINATED = positive("a", 6) / 10 + torch.ones(6, 6)  # one eigenvalue is much larger than the others

PROGRAMS = [
    Program(fs.value_and_grad(summa, (0, 1)), {"row": 3, "col": 2}, (GRID, GRID), (P(), (GRID, GRID)), (A, B),
            dense_grad(dense_product, (0, 1))),
    Program(fs.value_and_grad(gathered_product, (0, 1)), {"row": 2, "col": 2}, (GRID, GRID), (P(), (GRID, GRID)),
            (A, B), dense_grad(dense_product, (0, 1))),
    Program(fs.value_and_grad(cannon, (0, 1)), {"row": 3, "col": 3}, (GRID, GRID), (P(), (GRID, GRID)),
            (A, normal("b", 12, 3)), dense_grad(dense_product, (0, 1)), meshes=({"row": 1, "col": 1},)),
    Program(fs.value_and_grad(product_2_5d, (0, 1)), {"depth": 2, "row": 2, "col": 2}, (GRID, GRID),
            (P(), (GRID, GRID)), (A, B), dense_grad(dense_product, (0, 1))),
    Program(transpose_by_all_to_all, {"x": 3}, (ROWS,), ROWS, (normal("x", 7, 5),), lambda x: x.T),
    Program(cholesky_qr, {"x": 3}, (ROWS,), (ROWS, P()), (TALL,), dense_qr),
    Program(tall_skinny_qr, {"x": 4}, (ROWS,), (ROWS, P()), (TALL,), dense_qr),
    Program(split_rows_power_iteration, {"x": 2}, (ROWS, P()), P(), (DOMINATED, normal("v", 6).double()),
            dense_split_rows_power_iteration),
    Program(conjugate_gradient, {"x": 3}, (ROWS, ROWS), ROWS, (positive("a", 6), normal("b", 6).double()),
            torch.linalg.solve),
    Program(fs.value_and_grad(differentiated_ridge_regression), {"x": 2}, (P(), ROWS, ROWS), P(),
            (normal("w", 3, 4).double(), normal("x", 8, 3).double(), normal("y", 8).double()),
            dense_grad(dense_differentiated_ridge_regression)),
    Program(blocked_cholesky, {"x": 3}, (P(None, "x"),), P(None, "x"), (positive("a", 6),), dense_blocked_cholesky),
]  # fmt: skip
