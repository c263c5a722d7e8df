"""Differential equations, physics and inverse problems.

Legend: B points, D space, H hidden, N particles; [n@axis] is a dim split over an axis.
"""

from __future__ import annotations

import torch
from torch.func import grad, grad_and_value, jacfwd, jacrev, jvp, vjp, vmap

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


def inverse_problem(p, log_diffusivity, x, values):
    """The diffusivity learned with the network, from split measurements: replicated, so both are pvaried."""

    def loss(p, k):
        p, k = fs.pvary((p, k), "data")
        t = vmap(jacfwd(grad(net, 1), 1), (None, 0))(p, x).diagonal(dim1=1, dim2=2).sum(-1)
        residual = (k.exp() * t - 1).square().mean()
        return fs.pmean(residual + (net(p, x) - values).square().mean(), "data")

    return fs.grad(loss, (0, 1))(p, log_diffusivity)


def dense_inverse_problem(p, log_diffusivity, x, values):
    def loss(p, k):
        return (k.exp() * dense_laplacian(p, x) - 1).square().mean() + (net(p, x) - values).square().mean()

    return torch.func.grad(loss, (0, 1))(p, log_diffusivity)


def field(p, z):
    return torch.tanh(z @ p["a"]) @ p["b"]


def neural_ode(p, z, goal, step):
    """Neural ODE: Runge-Kutta steps of a replicated size over a split batch, differentiated through."""

    def loss(p):
        p, x = fs.pvary(p, "data"), z
        for _ in range(2):
            k1 = field(p, x)
            k2 = field(p, x + step / 2 * k1)
            k3 = field(p, x + step / 2 * k2)
            k4 = field(p, x + step * k3)
            x = x + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return fs.pmean((x - goal).square().sum(-1).mean(), "data")

    return fs.value_and_grad(loss)(p)


def dense_neural_ode(p, z, goal, step):
    tableau, weights = [0.0, 0.5, 0.5, 1.0], [1 / 6, 1 / 3, 1 / 3, 1 / 6]

    def loss(p):
        x = z
        for _ in range(2):
            k, total = torch.zeros_like(x), torch.zeros_like(x)
            for c, w in zip(tableau, weights, strict=True):
                k = field(p, x + c * step * k)
                total = total + w * k
            x = x + step * total
        return (x - goal).square().sum(-1).mean()

    return grad_and_value(loss)(p)[::-1]


def adjoint_of_euler(p, z, goal, step):
    """The adjoint state by hand: local vjps backward in time, and one psum of the parameters' gradient at the end."""
    local, path = fs.pvary(p, "data"), [z]
    for _ in range(3):
        path.append(path[-1] + step * field(local, path[-1]))
    adjoint = 2 * (path[-1] - goal) / (len(z) * fs.axis_size("data"))
    total = fs.tree.map(torch.zeros_like, local)
    for x in reversed(path[:-1]):
        _, pullback = vjp(field, local, x)
        of_p, of_x = pullback(step * adjoint)
        adjoint, total = adjoint + of_x, fs.tree.map(torch.add, total, of_p)
    return fs.psum(total, "data"), adjoint


def dense_adjoint_of_euler(p, z, goal, step):
    def loss(p, z):
        for _ in range(3):
            z = z + step * field(p, z)
        return (z - goal).square().sum(-1).mean()

    return torch.func.grad(loss, (0, 1))(p, z)


def hamiltonian_network(p, state, velocity, mass):
    """Hamiltonian network: a learned potential whose gradient by the inputs must match observed accelerations."""

    def loss(p):
        p = fs.pvary(p, "data")
        force = -vmap(grad(net, 1), (None, 0))(p, state)
        return fs.pmean((force / mass - velocity).square().sum(-1).mean(), "data")

    return fs.value_and_grad(loss)(p)


def dense_hamiltonian_network(p, state, velocity, mass):
    def loss(p):
        slope = 1 - torch.tanh(state @ p["w"] + p["b"]).square()
        force = -(slope * p["v"]) @ p["w"].T
        return (force / mass - velocity).square().sum(-1).mean()

    return grad_and_value(loss)(p)[::-1]


def pair_energy(r, others, charge, charges):
    distance = torch.sqrt((r[:, None] - others).square().sum(-1) + 0.1)
    return charge[:, None] * charges / distance


def particle_simulation(position, speed, charge, step):
    """Leapfrog of charged particles [N@data, D]: each rank computes the forces on its own from all of them."""
    everyone = fs.all_gather(charge, "data")

    def force(position):
        sources = fs.all_gather(position, "data")
        return -grad(lambda r: pair_energy(r, sources, charge, everyone).sum())(position)

    for _ in range(2):
        speed = speed + 0.5 * step * force(position)
        position = position + step * speed
        speed = speed + 0.5 * step * force(position)
    kinetic = fs.psum(0.5 * speed.square().sum(), "data")
    return position, speed, kinetic


def dense_particle_simulation(position, speed, charge, step):
    def energy(r):
        return 0.5 * pair_energy(r, r, charge, charge).sum()

    for _ in range(2):
        speed = speed - 0.5 * step * grad(energy)(position)
        position = position + step * speed
        speed = speed - 0.5 * step * grad(energy)(position)
    return position, speed, 0.5 * speed.square().sum()


def force_matching(p, molecules, forces):
    """Interatomic potential fitted to forces: a gradient by positions [B@data, N, D] inside one by parameters."""

    def energy(p, r):
        distance = (r[:, None] - r).square().sum(-1)
        return (p["depth"] * torch.exp(-distance[..., None] * p["width"])).sum()

    def loss(p):
        p = fs.pvary(p, "data")
        guess = -vmap(grad(energy, 1), (None, 0))(p, molecules)
        return fs.pmean((guess - forces).square().sum((1, 2)).mean(), "data")

    return fs.value_and_grad(loss)(p)


def dense_force_matching(p, molecules, forces):
    def loss(p):
        apart = molecules[:, :, None] - molecules[:, None]
        bell = torch.exp(-apart.square().sum(-1)[..., None] * p["width"])
        guess = 4 * torch.einsum("bijk,k,bijd->bid", bell, p["depth"] * p["width"], apart)
        return (guess - forces).square().sum((1, 2)).mean()

    return grad_and_value(loss)(p)[::-1]


def ensemble_kalman(members, observed, matrix, noise, key):
    """Ensemble Kalman filter: members [N@data, D], covariances over the ranks, a gain that is the same on each."""
    n = len(members) * fs.axis_size("data")
    mean = fs.pmean(members.mean(0), "data")
    predicted = members @ matrix.T
    predicted_mean = fs.pmean(predicted.mean(0), "data")
    a, b = members - mean, predicted - predicted_mean
    cross, cov = fs.psum((a.T @ b, b.T @ b), "data")
    gain = torch.linalg.solve(cov / (n - 1) + noise * torch.eye(len(cov)), cross.T / (n - 1)).T
    drawn = fs.random.normal(key, (n, len(observed)), spec=P("data"), dtype=members.dtype)
    return members + (observed + noise.sqrt() * drawn - predicted) @ gain.T


def dense_ensemble_kalman(members, observed, matrix, noise, key):
    both = torch.cov(torch.cat([members, members @ matrix.T], 1).T)
    d = members.shape[1]
    gain = both[:d, d:] @ torch.linalg.inv(both[d:, d:] + noise * torch.eye(len(observed), dtype=noise.dtype))
    drawn = fs.random.normal(key, (len(members), len(observed)), dtype=members.dtype)
    new = observed + noise**0.5 * drawn
    return torch.stack([m + gain @ (o - matrix @ m) for m, o in zip(members, new, strict=True)])


def kalman_filter(series, transition, emission, noise):
    """Kalman filters of a batch of series [B@data, T]: means are local, covariances and gains are shared."""
    mean, cov, out = torch.zeros(len(series), 2, dtype=series.dtype), torch.eye(2, dtype=series.dtype), []
    for t in range(series.shape[1]):
        mean, cov = mean @ transition.T, transition @ cov @ transition.T + 0.1 * torch.eye(2)
        gain = cov @ emission / (emission @ cov @ emission + noise)
        mean = mean + (series[:, t] - mean @ emission)[:, None] * gain
        cov = cov - torch.outer(gain, emission @ cov)
        out.append(mean)
    return torch.stack(out, 1), cov


def dense_kalman_filter(series, transition, emission, noise):
    """Each row by the information form of the update."""
    rows = []
    for row in series:
        m, c, out = torch.zeros(2, dtype=series.dtype), torch.eye(2, dtype=series.dtype), []
        for value in row:
            m, c = transition @ m, transition @ c @ transition.T + 0.1 * torch.eye(2, dtype=series.dtype)
            precision = torch.linalg.inv(c) + torch.outer(emission, emission) / noise
            m = torch.linalg.solve(precision, torch.linalg.solve(c, m) + emission * value / noise)
            c = torch.linalg.inv(precision)
            out.append(m)
        rows.append(torch.stack(out))
    return torch.stack(rows), c


FIELD = {"a": normal("a", 3, 5).double(), "b": normal("b", 5, 3, std=0.5).double()}
START, GOAL = normal("start", 8, 3).double(), normal("goal", 8, 3).double()
STEP = torch.tensor(0.2).double()
EQUATION = (P(), BATCH, BATCH, P())
POTENTIAL = {"depth": normal("depth", 2).double(), "width": torch.tensor([0.5, 1.5]).double()}
PROGRAMS = [
    Program(physics_informed, DATA, EQUATION, P(), (NET, POINTS, EDGE, STEP), dense_physics_informed),
    Program(physics_informed_forward, DATA, EQUATION, P(), (NET, POINTS, EDGE, STEP), dense_physics_informed),
    Program(physics_informed_by_autograd, DATA, EQUATION, P(), (NET, POINTS, EDGE, STEP), dense_physics_informed),
    Program(
        inverse_problem, DATA, (P(), P(), BATCH, BATCH), P(), (NET, STEP, POINTS, normal("values", 8).double()),
        dense_inverse_problem,
    ),
    Program(neural_ode, DATA, EQUATION, P(), (FIELD, START, GOAL, STEP), dense_neural_ode),
    Program(adjoint_of_euler, DATA, EQUATION, (P(), BATCH), (FIELD, START, GOAL, STEP), dense_adjoint_of_euler),
    Program(
        hamiltonian_network, DATA, EQUATION, P(),
        (NET, POINTS, POINTS.flip(1), torch.tensor([1.0, 2.0]).double()), dense_hamiltonian_network,
    ),
    Program(
        particle_simulation, DATA, (BATCH, BATCH, BATCH, P()), (BATCH, BATCH, P()),
        (normal("r", 6, 2).double(), normal("v", 6, 2).double(), normal("q", 6).double(), STEP),
        dense_particle_simulation,
    ),
    Program(
        force_matching, DATA, (P(), BATCH, BATCH), P(),
        (POTENTIAL, normal("molecules", 4, 3, 2).double(), normal("forces", 4, 3, 2).double()), dense_force_matching,
    ),
    Program(
        ensemble_kalman, DATA, (BATCH, P(), P(), P(), P()), BATCH,
        (normal("members", 8, 3).double(), normal("observed", 2).double(), normal("matrix", 2, 3).double(), STEP,
         fs.key(31)), dense_ensemble_kalman,
    ),
    Program(
        kalman_filter, DATA, (BATCH, P(), P(), P()), (BATCH, P()),
        (normal("series", 4, 5).double(), normal("transition", 2, 2, std=0.7).double(),
         torch.tensor([1.0, 0.5]).double(), STEP), dense_kalman_filter,
    ),
]  # fmt: skip
