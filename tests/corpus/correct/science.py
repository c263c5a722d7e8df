"""Differential equations, physics and inverse problems.

Legend: B points, D space, H hidden, N particles; [n@axis] is a dim split over an axis.
"""

from __future__ import annotations

import torch
from torch.func import grad_and_value, jacrev, jvp, vmap

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, normal

DATA = {"data": 2}
BATCH = P("data")
NET = {"w": normal("w", 2, 5), "b": normal("b", 5), "v": normal("v", 5)}
NET = {k: v.double() for k, v in NET.items()}
POINTS, EDGE = normal("points", 8, 2).double(), normal("edge", 4, 2).double()  # [B@data, D]


def net(p, x):
    return torch.tanh(x @ p["w"] + p["b"]) @ p["v"]


def dense_laplacian(p, x):
    """Sum of the second derivatives of `net`, in closed form."""
    t = torch.tanh(x @ p["w"] + p["b"])
    return (-2 * t * (1 - t.square()) * p["w"].square().sum(0)) @ p["v"]


def physics_informed(p, x, edge, diffusivity):
    """PINN for Poisson's equation: the Laplacian from a Hessian by the inputs; the diffusivity is replicated."""

    def loss(p):
        p = fs.pvary(p, "data")
        laplacian = vmap(jacrev(jacrev(net, 1), 1), (None, 0))(p, x).diagonal(dim1=1, dim2=2).sum(-1)
        inside = (diffusivity * laplacian + x.square().sum(-1)).square().mean()
        return fs.pmean(inside + net(p, edge).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def physics_informed_forward(p, x, edge, diffusivity):
    """The same, with second derivatives by nested jvp along each direction of space."""

    def second(p, x, direction):
        slope = lambda x: jvp(lambda x: net(p, x), (x,), (direction.expand_as(x),))[1]  # noqa: E731
        return jvp(slope, (x,), (direction.expand_as(x),))[1]

    def loss(p):
        p = fs.pvary(p, "data")
        laplacian = sum(second(p, x, e) for e in torch.eye(2, dtype=x.dtype))
        inside = (diffusivity * laplacian + x.square().sum(-1)).square().mean()
        return fs.pmean(inside + net(p, edge).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def physics_informed_by_autograd(p, x, edge, diffusivity):
    """The same, with torch.autograd.grad and create_graph, and backward to the leaves."""
    leaves = {k: w.clone().requires_grad_() for k, w in p.items()}
    local, x = fs.pvary(leaves, "data"), x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(net(local, x).sum(), x, create_graph=True)
    rows = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)]
    inside = (diffusivity * sum(rows) + x.square().sum(-1)).square().mean()
    loss = fs.pmean(inside + net(local, edge).square().mean(), "data")
    loss.backward()
    return loss.detach(), {k: w.grad for k, w in leaves.items()}


def dense_physics_informed(p, x, edge, diffusivity):
    def loss(p):
        inside = diffusivity * dense_laplacian(p, x) + x.square().sum(-1)
        return inside.square().mean() + net(p, edge).square().mean()

    return grad_and_value(loss)(p)[::-1]


STEP = torch.tensor(0.2).double()
EQUATION = (P(), BATCH, BATCH, P())
PROGRAMS = [
    Program(physics_informed, DATA, EQUATION, P(), (NET, POINTS, EDGE, STEP), dense_physics_informed),
    Program(physics_informed_forward, DATA, EQUATION, P(), (NET, POINTS, EDGE, STEP), dense_physics_informed),
    Program(physics_informed_by_autograd, DATA, EQUATION, P(), (NET, POINTS, EDGE, STEP), dense_physics_informed),
]  # fmt: skip
