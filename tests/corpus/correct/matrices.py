"""Products of matrices and factorizations with split rows and columns.

Legend: A [M, K], B [K, N], rows of a table [N@x]; [M@row, K@col] is a matrix in blocks on a grid of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, dense_grad, normal


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


GRID, ROWS = P("row", "col"), P("x")
A, B = normal("a", 6, 12), normal("b", 12, 4)
TALL = normal("tall", 12, 3).double()

PROGRAMS = [
    Program(fs.value_and_grad(cannon, (0, 1)), {"row": 3, "col": 3}, (GRID, GRID), (P(), (GRID, GRID)),
            (A, normal("b", 12, 3)), dense_grad(dense_product, (0, 1)), meshes=({"row": 1, "col": 1},)),
    Program(fs.value_and_grad(product_2_5d, (0, 1)), {"depth": 2, "row": 2, "col": 2}, (GRID, GRID),
            (P(), (GRID, GRID)), (A, B), dense_grad(dense_product, (0, 1))),
    Program(tall_skinny_qr, {"x": 4}, (ROWS,), (ROWS, P()), (TALL,), dense_qr),
    Program(fs.value_and_grad(differentiated_ridge_regression), {"x": 2}, (P(), ROWS, ROWS), P(),
            (normal("w", 3, 4).double(), normal("x", 8, 3).double(), normal("y", 8).double()),
            dense_grad(dense_differentiated_ridge_regression)),
]  # fmt: skip
