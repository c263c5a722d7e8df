"""Fourier transforms and complex numbers on split dims.

Legend: N samples, H rows, W columns, Q qubits; [H@x] is a dim split over an axis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, dense_grad, normal


def four_step_fft(x: Tensor) -> Tensor:  # x [8, 6@x], N = 48: sample i is at (i // 6, i % 6)
    """1-D FFT of a long signal by two short ones with twiddle factors between (Bailey, 1990)."""
    rows, columns = x.shape[0], x.shape[1] * fs.axis_size("x")
    y = torch.fft.fft(x, dim=0)
    own = fs.axis_index("x") * x.shape[1] + torch.arange(x.shape[1])
    angle = -2 * torch.pi * torch.outer(torch.arange(rows), own) / (rows * columns)
    y = y * torch.polar(torch.ones_like(angle), angle)
    y = fs.all_to_all(y, "x", split=0, concat=1)  # [8@x, 6]
    return torch.fft.fft(y, dim=1)  # frequency k is at (k % 8, k // 8)


def dense_four_step_fft(x: Tensor) -> Tensor:
    return torch.fft.fft(x.flatten()).view(6, 8).T


def spectral_poisson_misfit(scale: Tensor, f: Tensor, target: Tensor) -> Tensor:  # f [H@x, W], scale [H, W]
    """Solve a periodic Poisson equation with a scaled source by FFT, and differentiate the misfit."""
    rows, columns = f.shape[0] * fs.axis_size("x"), f.shape[1]
    y = torch.fft.fft(f * fs.pslice(scale, "x"))
    y = torch.fft.fft(fs.all_to_all(y, "x", split=1, concat=0), dim=0)  # [H, W@x]
    own = fs.axis_index("x") * y.shape[1] + torch.arange(y.shape[1])
    k = 2 - 2 * torch.cos(2 * torch.pi * torch.arange(rows) / rows)
    symbol = k[:, None] + 2 - 2 * torch.cos(2 * torch.pi * own / columns)
    y = torch.where(symbol > 0, y / symbol.clamp(min=1e-3), 0)
    y = fs.all_to_all(torch.fft.ifft(y, dim=0), "x", split=0, concat=1)
    return fs.psum((torch.fft.ifft(y).real - target).square().sum(), "x")


def dense_spectral_poisson_misfit(scale: Tensor, f: Tensor, target: Tensor) -> Tensor:
    k, m = (2 - 2 * torch.cos(2 * torch.pi * torch.arange(n) / n) for n in f.shape)
    symbol = k[:, None] + m
    inverse = torch.where(symbol > 0, 1 / symbol.clamp(min=1e-3), 0.0)
    return (torch.fft.ifft2(torch.fft.fft2(f * scale) * inverse).real - target).square().sum()


def complex_least_squares(w: Tensor, x: Tensor, y: Tensor) -> Any:  # w [D], x [N@x, D], y [N@x], all complex
    """Gradient of a real loss by complex weights, from split rows; parts of 2, 2 and 1 rows."""

    def loss(w: Tensor) -> Tensor:
        error = x @ fs.pvary(w, "x") - y
        return fs.psum((error * error.conj()).real.sum(), "x")

    grads, value = torch.func.grad_and_value(loss)(w)
    return value, grads


def dense_complex_least_squares(w: Tensor, x: Tensor, y: Tensor) -> Any:
    error = x @ w - y
    return error.abs().square().sum(), 2 * x.conj().T @ error


def cnormal(name: str, *shape: int) -> Tensor:
    return torch.complex(normal(f"{name}, real", *shape), normal(f"{name}, imaginary", *shape))


ROWS, COLUMNS = P("x"), P(None, "x")

PROGRAMS = [
    Program(four_step_fft, {"x": 2}, (COLUMNS,), ROWS, (cnormal("x", 8, 6),), dense_four_step_fft),
    Program(fs.value_and_grad(spectral_poisson_misfit), {"x": 2}, (P(), ROWS, ROWS), P(),
            (normal("scale", 4, 6), normal("f", 4, 6), normal("target", 4, 6)),
            dense_grad(dense_spectral_poisson_misfit)),
    Program(complex_least_squares, {"x": 3}, (P(), ROWS, ROWS), P(),
            (cnormal("w", 3), cnormal("x", 5, 3), cnormal("y", 5)), dense_complex_least_squares),
]  # fmt: skip
