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


def periodic_heat_equation(u: Tensor) -> Tensor:  # u [N@x]
    """Explicit Euler steps of du/dt = d2u/dx2 on a ring."""
    for _ in range(4):
        padded = with_halo(u, "x", 0, periodic=True)
        u = u + 0.2 * (padded[:-2] - 2 * u + padded[2:])
    return u


def dense_periodic_heat_equation(u: Tensor) -> Tensor:
    for _ in range(4):
        u = u + 0.2 * (u.roll(1) - 2 * u + u.roll(-1))
    return u


def uneven_heat_equation(u: Tensor, diffusivity: Tensor) -> tuple[Tensor, Tensor]:
    """The same with cold ends, a coefficient for each cell, and parts of 4, 4 and 2 cells; the total heat too."""
    for _ in range(3):
        padded = with_halo(u, "x", 0, periodic=False)
        u = u + diffusivity * (padded[:-2] - 2 * u + padded[2:])
    return u, fs.psum(u.sum(), "x")


def dense_uneven_heat_equation(u: Tensor, diffusivity: Tensor) -> tuple[Tensor, Tensor]:
    for _ in range(3):
        padded = F.pad(u, (1, 1))
        u = u + diffusivity * (padded[:-2] - 2 * u + padded[2:])
    return u, u.sum()


def wave_inversion(initial: Tensor, speed: Tensor, measured: Tensor) -> Tensor:  # [N@x], [N@x], [N@x]
    """Misfit of a wave simulation, differentiated by the initial state and by the speed in each cell."""
    before, now = initial, initial
    for _ in range(4):
        padded = with_halo(now, "x", 0, periodic=False)
        after = 2 * now - before + speed.square() * (padded[:-2] - 2 * now + padded[2:])
        before, now = now, after
    return fs.psum((now - measured).square().sum(), "x")


def dense_wave_inversion(initial: Tensor, speed: Tensor, measured: Tensor) -> Tensor:
    before, now = initial, initial
    for _ in range(4):
        padded = F.pad(now, (1, 1))
        before, now = now, 2 * now - before + speed.square() * (padded[:-2] - 2 * now + padded[2:])
    return (now - measured).square().sum()


def split_sequence_convolution(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:  # x [B, C, N@x]
    """Two 1-D convolutions of kernel 5 with zeros outside, each after its own exchange of 2 columns."""
    p = fs.pvary(p, "x")
    h = F.conv1d(with_halo(x, "x", 2, 2, periodic=False), p["first"], p["bias"])
    y = F.conv1d(with_halo(torch.tanh(h), "x", 2, 2, periodic=False), p["second"])
    return fs.pmean((y - target).square().mean(), "x")


def dense_split_sequence_convolution(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    h = torch.tanh(F.conv1d(x, p["first"], p["bias"], padding=2))
    return (F.conv1d(h, p["second"], padding=2) - target).square().mean()


def split_image_convolution(kernel: Tensor, x: Tensor) -> Tensor:  # kernel [C, C, 3, 3], x [B, C, H@y, W@x]
    """A 2-D convolution of a split image: rows are exchanged, then columns with the corners."""
    padded = with_halo(with_halo(x, "y", 2, periodic=False), "x", 3, periodic=False)
    y = F.conv2d(padded, fs.pvary(kernel, ("y", "x")))
    return fs.psum(torch.sin(y).sum(), ("y", "x"))


def dense_split_image_convolution(kernel: Tensor, x: Tensor) -> Tensor:
    return torch.sin(F.conv2d(x, kernel, padding=1)).sum()


def torus_convolution(kernel: Tensor, x: Tensor) -> Tensor:
    """A 2-D convolution with circular boundaries; gradients of each rank by torch.autograd.grad."""
    local = fs.pvary(kernel, ("y", "x")).detach().requires_grad_()
    y = F.conv2d(with_halo(with_halo(x, "y", 2, periodic=True), "x", 3, periodic=True), local)
    (grad,) = torch.autograd.grad(y.square().sum(), local)
    return fs.psum(grad, ("y", "x"))


def dense_torus_convolution(kernel: Tensor, x: Tensor) -> Tensor:
    loss = lambda kernel: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), kernel).square().sum()  # noqa: E731
    return torch.func.grad(loss)(kernel)


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


LINE, PLANE, IMAGE = P("x"), P("y", "x"), P(None, None, "y", "x")
KERNELS = {"first": normal("first", 3, 2, 5), "bias": normal("bias", 3), "second": normal("second", 2, 3, 5)}

PROGRAMS = [
    Program(periodic_heat_equation, {"x": 4}, (LINE,), LINE, (normal("u", 8),), dense_periodic_heat_equation),
    Program(uneven_heat_equation, {"x": 3}, (LINE, LINE), (LINE, P()), (normal("u", 10), normal("k", 10).abs() / 8),
            dense_uneven_heat_equation),
    Program(fs.value_and_grad(wave_inversion, (0, 1)), {"x": 4}, (LINE,) * 3, (P(), LINE),
            (normal("initial", 8), normal("speed", 8) / 4, normal("measured", 8)),
            dense_grad(dense_wave_inversion, (0, 1))),
    Program(fs.value_and_grad(split_sequence_convolution), {"x": 3}, (P(), P(None, None, "x"), P(None, None, "x")),
            P(), (KERNELS, normal("x", 2, 2, 9), normal("y", 2, 2, 9)), dense_grad(dense_split_sequence_convolution)),
    Program(fs.value_and_grad(split_image_convolution, (0, 1)), {"y": 2, "x": 3}, (P(), IMAGE), (P(), (P(), IMAGE)),
            (normal("kernel", 2, 2, 3, 3), normal("image", 1, 2, 4, 6)),
            dense_grad(dense_split_image_convolution, (0, 1))),
    Program(torus_convolution, {"y": 2, "x": 2}, (P(), IMAGE), P(),
            (normal("kernel", 1, 2, 3, 3), normal("image", 1, 2, 4, 4)), dense_torus_convolution),
    Program(game_of_life, {"y": 2, "x": 3}, (PLANE,), (PLANE, P()), (normal("alive", 4, 6) > 0,), dense_game_of_life),
    Program(poisson_by_jacobi, {"y": 2, "x": 2}, (PLANE,), (PLANE, P(), P()), (normal("f", 4, 4).double() / 2,),
            dense_poisson_by_jacobi, static=False),
    Program(fs.value_and_grad(bilinear_sampling_loss, (0, 1)), {"x": 4}, (LINE, P()), (P(), (LINE, P())),
            (normal("field", 8), torch.tensor([0.3, 1.7, 2.5, 3.9, 6.2])),
            dense_grad(dense_bilinear_sampling_loss, (0, 1))),
]  # fmt: skip
