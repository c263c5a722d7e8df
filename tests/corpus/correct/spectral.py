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


def split_fft_2d(x: Tensor) -> Tensor:  # x [H@x, W] -> [H, W@x]
    """2-D FFT: transform the rows, exchange rows for columns, transform the columns."""
    return torch.fft.fft(fs.all_to_all(torch.fft.fft(x), "x", split=1, concat=0), dim=0)


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


def swapped(state: Tensor) -> Tensor:  # [2@x, 2, R] -> the same state with its first two qubits swapped
    """Swap the split qubit with the next one: an exchange of one dim for the other, then of the names of the dims."""
    return fs.all_to_all(state, "x", split=1, concat=0).transpose(0, 1)


def quantum_circuit_energy(angles: Tensor, state: Tensor) -> Tensor:  # angles [Q], state [2@x, 2, 2] complex
    """Rotations of 3 qubits and a chain of controlled phases; expectation of Z on each qubit (a state in two parts)."""

    def rotated(state: Tensor, dim: int, angle: Tensor) -> Tensor:  # by exp(-i angle Y / 2), on a dim that is not split
        c, s = torch.cos(angle / 2), torch.sin(angle / 2)
        gate = torch.stack([torch.stack([c, -s]), torch.stack([s, c])]).to(state.dtype)
        return torch.tensordot(gate, state, ([1], [dim])).movedim(0, dim)

    angles = fs.pvary(angles, "x")
    state = rotated(rotated(state, 1, angles[1]), 2, angles[2])
    state = swapped(rotated(swapped(state), 1, angles[0]))
    bits = fs.axis_index("x") * len(state) + torch.arange(len(state))  # of the split qubit
    phases = torch.ones(len(state), 2, 2, dtype=state.dtype)
    phases[:, 1] = torch.where(bits == 1, 1j, 1)[:, None]
    state = state * phases
    p = (state * state.conj()).real
    sign = 1 - 2 * bits
    weighted = (sign[:, None, None] * p).sum() + 0.5 * (p[:, 0] - p[:, 1]).sum() + 0.25 * (p[..., 0] - p[..., 1]).sum()
    x_of_last = (state[..., 0].conj() * state[..., 1]).real.sum()
    x_of_middle = (state[:, 0].conj() * state[:, 1]).real.sum()
    return fs.psum(weighted + x_of_last + x_of_middle, "x")


def dense_quantum_circuit_energy(angles: Tensor, state: Tensor) -> Tensor:
    x = torch.tensor([[0, 1], [1, 0]], dtype=state.dtype)
    y, z, one = torch.tensor([[0, -1j], [1j, 0]], dtype=state.dtype), torch.diag(x.new_tensor([1, -1])), torch.eye(2)
    kron = lambda a, b, c: torch.kron(torch.kron(a, b.to(a)), c.to(a))  # noqa: E731
    one = one.to(state.dtype)
    rotation = kron(*(torch.matrix_exp(-0.5j * angle * y) for angle in angles))
    phase = torch.diag(x.new_tensor([1, 1, 1, 1, 1, 1, 1j, 1j]))
    psi = phase @ rotation @ state.flatten()
    observable = (kron(z, one, one) + 0.5 * kron(one, z, one) + 0.25 * kron(one, one, z)
                  + 0.5 * kron(one, one, x) + 0.5 * kron(one, x, one))  # fmt: skip
    return (psi.conj() @ observable @ psi).real


def cnormal(name: str, *shape: int) -> Tensor:
    return torch.complex(normal(f"{name}, real", *shape), normal(f"{name}, imaginary", *shape))


ROWS, COLUMNS = P("x"), P(None, "x")
STATE = cnormal("state", 2, 2, 2).to(torch.complex128)
STATE = STATE / STATE.abs().square().sum().sqrt()

PROGRAMS = [
    Program(split_fft_2d, {"x": 2}, (ROWS,), COLUMNS, (cnormal("x", 4, 6),), torch.fft.fft2),
    Program(four_step_fft, {"x": 2}, (COLUMNS,), ROWS, (cnormal("x", 8, 6),), dense_four_step_fft),
    Program(fs.value_and_grad(spectral_poisson_misfit), {"x": 2}, (P(), ROWS, ROWS), P(),
            (normal("scale", 4, 6), normal("f", 4, 6), normal("target", 4, 6)),
            dense_grad(dense_spectral_poisson_misfit)),
    Program(complex_least_squares, {"x": 3}, (P(), ROWS, ROWS), P(),
            (cnormal("w", 3), cnormal("x", 5, 3), cnormal("y", 5)), dense_complex_least_squares),
    Program(fs.value_and_grad(quantum_circuit_energy, (0, 1)), {"x": 2}, (P(), ROWS), (P(), (P(), ROWS)),
            (torch.tensor([0.3, 1.1, -0.7], dtype=torch.float64), STATE),
            dense_grad(dense_quantum_circuit_energy, (0, 1))),
]  # fmt: skip
