"""Stencils and convolutions on split grids: neighbours exchange the edges of their parts (halos).

Legend: N cells, H rows, W columns, C channels, T time steps; [N@x] is a dim split over an axis.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, dense_grad, normal


def with_halo(x: Tensor, axis: str, dim: int, width: int = 1, *, periodic: bool) -> Tensor:
    """Add the edges of both neighbours; outside of a grid that is not periodic there are zeros."""
    n = fs.axis_size(axis)
    to_next = [(i, (i + 1) % n) for i in range(n if periodic else n - 1)]
    to_previous = [(j, i) for i, j in to_next]
    before = fs.ppermute(x.narrow(dim, x.shape[dim] - width, width), axis, to_next)
    after = fs.ppermute(x.narrow(dim, 0, width), axis, to_previous)
    return torch.cat([before, x, after], dim)


def game_of_life(alive: Tensor) -> tuple[Tensor, Tensor]:  # alive bool [H@y, W@x]
    """Conway's game of life on a torus, and the number of living cells after each step."""
    counts = []
    for _ in range(3):
        padded = with_halo(with_halo(alive.int(), "y", 0, periodic=True), "x", 1, periodic=True)
        around = sum(padded[i : i + alive.shape[0], j : j + alive.shape[1]] for i in range(3) for j in range(3))
        alive = (around == 3) | (alive & (around == 4))
        counts.append(fs.psum(alive.sum(), ("y", "x")))
    return alive, torch.stack(counts)


def dense_game_of_life(alive: Tensor) -> tuple[Tensor, Tensor]:
    counts = []
    for _ in range(3):
        around = sum(alive.int().roll((i, j), (0, 1)) for i in (-1, 0, 1) for j in (-1, 0, 1))
        alive = (around == 3) | (alive & (around == 4))
        counts.append(alive.sum())
    return alive, torch.stack(counts)


def poisson_by_jacobi(f: Tensor) -> Any:  # f [H@y, W@x]
    """Jacobi steps for the Poisson equation with zeros outside, until the residual is small on every rank."""
    u, steps = torch.zeros_like(f), 0
    while True:
        p = with_halo(with_halo(u, "y", 0, periodic=False), "x", 1, periodic=False)
        around = p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:]
        residual = fs.pmax((f + around - 4 * u).abs().max(), ("y", "x"))
        if residual < 0.2:
            return u, residual, torch.tensor(steps)
        u, steps = (f + around) / 4, steps + 1


def dense_poisson_by_jacobi(f: Tensor) -> Any:
    u, steps = torch.zeros_like(f), 0
    laplacian = torch.tensor([[0.0, 1, 0], [1, 0, 1], [0, 1, 0]], dtype=f.dtype)[None, None]
    while True:
        around = F.conv2d(u[None, None], laplacian, padding=1)[0, 0]
        residual = (f + around - 4 * u).abs().max()
        if residual < 0.2:
            return u, residual, torch.tensor(steps)
        u, steps = (f + around) / 4, steps + 1


def bilinear_sampling_loss(field: Tensor, at: Tensor) -> Tensor:  # field [N@x], at [M] of positions in the whole field
    """Particles sample a split field by linear interpolation: each rank adds the weights of its own cells."""
    cells = fs.axis_index("x") * len(field) + torch.arange(len(field))
    weights = (1 - (fs.pvary(at, "x")[:, None] - cells).abs()).clamp(min=0)  # [M, N@x]
    return torch.sin(fs.psum(weights @ field, "x")).sum()


def dense_bilinear_sampling_loss(field: Tensor, at: Tensor) -> Tensor:
    low = at.floor().long()
    share = at - low
    return torch.sin((1 - share) * field[low] + share * field[low + 1]).sum()


LINE, PLANE = P("x"), P("y", "x")

PROGRAMS = [
    Program(game_of_life, {"y": 2, "x": 3}, (PLANE,), (PLANE, P()), (normal("alive", 4, 6) > 0,), dense_game_of_life),
    Program(poisson_by_jacobi, {"y": 2, "x": 2}, (PLANE,), (PLANE, P(), P()), (normal("f", 4, 4).double() / 2,),
            dense_poisson_by_jacobi, static=False),
    Program(fs.value_and_grad(bilinear_sampling_loss, (0, 1)), {"x": 4}, (LINE, P()), (P(), (LINE, P())),
            (normal("field", 8), torch.tensor([0.3, 1.7, 2.5, 3.9, 6.2])),
            dense_grad(dense_bilinear_sampling_loss, (0, 1))),
]  # fmt: skip
