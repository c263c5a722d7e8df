"""Second derivatives and derivatives per example.

Legend: B batch, D width, C classes, K tasks or members; [n@axis] is a dim split over an axis.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, normal

DATA = {"data": 2}
BATCH = P("data")
FIT = (P(), BATCH, BATCH)
X = normal("x", 8, 4).double()  # [B@data, D]
Y = normal("y", 8).double()  # [B@data]
SIGNS = (Y > 0).double()
LABELS = torch.tensor([0, 2, 1, 1, 2, 0, 2, 1])
W = normal("w", 4, std=0.5).double()  # [D]
V = normal("v", 4).double()
NET = {"w": normal("w1", 4, 5, std=0.6).double(), "v": normal("w2", 5, std=0.6).double()}


def logistic_loss(w, x, y):
    return fs.pmean(F.binary_cross_entropy_with_logits(x @ fs.pvary(w, "data"), y), "data")


def dense_logistic_loss(w, x, y):
    return F.binary_cross_entropy_with_logits(x @ w, y)


def net(p, x):
    return torch.tanh(x @ p["w"]) @ p["v"]


def net_loss(p, x, y):
    return fs.pmean((net(fs.pvary(p, "data"), x) - y).square().mean(), "data")


def dense_net_loss(p, x, y):
    return (net(p, x) - y).square().mean()


def dense_net_hvp(p, v, x, y):
    """Hessian of the loss times v, by the full Hessian of the flat parameters."""

    def of_flat(flat):
        return dense_net_loss({"w": flat[:20].view(4, 5), "v": flat[20:]}, x, y)

    flat = torch.cat([p["w"].flatten(), p["v"]])
    hv = hessian(of_flat)(flat) @ torch.cat([v["w"].flatten(), v["v"]])
    return {"w": hv[:20].view(4, 5), "v": hv[20:]}


def hvp_forward_over_reverse(p, v, x, y):
    """Hessian-vector product: jvp of the gradient."""
    return jvp(lambda q: grad(net_loss)(q, x, y), (p,), (v,))[1]


def hvp_reverse_over_reverse(p, v, x, y):
    """Hessian-vector product: gradient of the product of the gradient with v."""

    def directional(p):
        g = fs.grad(net_loss)(p, x, y)
        return sum((g[k] * v[k]).sum() for k in g)

    return fs.grad(directional)(p)


def hvp_by_autograd(p, v, x, y):
    """Hessian-vector product by two calls of torch.autograd.grad."""
    p = {k: w.clone().requires_grad_() for k, w in p.items()}
    g = torch.autograd.grad(net_loss(p, x, y), p.values(), create_graph=True)
    return dict(zip(p, torch.autograd.grad(g, p.values(), v.values()), strict=True))


def newton_method(w, x, y):
    """Logistic regression by two Newton steps with the Hessian of torch.func."""
    for _ in range(2):
        g, h = fs.grad(logistic_loss)(w, x, y), hessian(logistic_loss)(w, x, y)
        w = w - torch.linalg.solve(h + 1e-2 * torch.eye(4), g + 1e-2 * w)
    return w


def dense_newton_method(w, x, y):
    for _ in range(2):
        p = torch.sigmoid(x @ w)
        h = (x * (p * (1 - p))[:, None]).T @ x / len(x) + 1e-2 * torch.eye(4, dtype=w.dtype)
        w = w - torch.linalg.inv(h) @ (x.T @ (p - y) / len(x) + 1e-2 * w)
    return w


def reweighted_least_squares(w, x, y):
    """IRLS: the weights and working responses are local, the normal equations are summed. No autograd."""
    for _ in range(3):
        p = torch.sigmoid(x @ w)
        s = (p * (1 - p)).clamp(min=1e-6)
        z = x @ w + (y - p) / s
        a, b = fs.psum((x.T @ (s[:, None] * x), x.T @ (s * z)), "data")
        w = torch.linalg.solve(a + 0.1 * torch.eye(4), b)
    return w


def dense_reweighted(w, x, y):
    for _ in range(3):
        p = torch.sigmoid(x @ w)
        s = p * (1 - p)
        rows = torch.cat([s.sqrt()[:, None] * x, 0.1**0.5 * torch.eye(4, dtype=w.dtype)])
        goal = torch.cat([s.sqrt() * (x @ w) + (y - p) / s.sqrt(), torch.zeros(4, dtype=w.dtype)])
        w = torch.linalg.lstsq(rows, goal).solution
    return w


def gauss_newton_product(p, v, x, y):
    """Gauss-Newton matrix times a vector: a local jvp, then a local vjp, then one psum."""
    local, direction = fs.pvary((p, v), "data")
    _, tangent = jvp(lambda q: net(q, x), (local,), (direction,))
    _, pullback = vjp(lambda q: net(q, x), local)
    return fs.pmean(pullback(2 * tangent / len(x))[0], "data")


def dense_gauss_newton_product(p, v, x, y):
    j = jacrev(net)(p, x)
    j = torch.cat([j["w"].flatten(1), j["v"]], 1)
    out = 2 / len(x) * j.T @ (j @ torch.cat([v["w"].flatten(), v["v"]]))
    return {"w": out[:20].view(4, 5), "v": out[20:]}


def fisher_diagonal(p, x, y):
    """Empirical Fisher: squares of the gradients of each example, by vmap of grad."""

    def loss(p, x, y):
        return 0.5 * (net(p, x) - y).square()

    per_example = vmap(grad(loss), (None, 0, 0))(fs.pvary(p, "data"), x, y)
    return fs.tree.map(lambda g: fs.pmean(g.square().mean(0), "data"), per_example)


def dense_fisher_diagonal(p, x, y):
    grads = [grad(lambda p, i=i: 0.5 * (net(p, x[i]) - y[i]) ** 2)(p) for i in range(len(x))]
    return {k: sum(g[k].square() for g in grads) / len(x) for k in p}


def natural_gradient(w, x, y):
    """Natural gradient of logistic regression: the Fisher matrix from vmap of grad, solved on each rank."""

    def loss(w, x, y):
        return F.binary_cross_entropy_with_logits(x @ w, y)

    each = vmap(grad(loss), (None, 0, 0))(fs.pvary(w, "data"), x, y)  # [B@data, D]
    g, fisher = fs.pmean((each.mean(0), each.T @ each / len(x)), "data")
    return torch.linalg.solve(fisher + 1e-2 * torch.eye(4), g)


def dense_natural_gradient(w, x, y):
    r = (torch.sigmoid(x @ w) - y)[:, None] * x
    return torch.linalg.inv(r.T @ r / len(x) + 1e-2 * torch.eye(4, dtype=w.dtype)) @ r.mean(0)


def per_example_clipping(p, x, y, limit, key):
    """DP-SGD: each example's gradient is clipped, their sum gets noise that is drawn once."""

    def loss(p, x, y):
        return (net(p, x) - y).square()

    each = vmap(grad(loss), in_dims=(None, 0, 0))(fs.pvary(p, "data"), x, y)
    norms = torch.sqrt(sum(g.flatten(1).square().sum(1) for g in each.values()))
    scale = torch.clamp(limit / norms, max=1.0)
    total = fs.psum({k: torch.einsum("b,b...->...", scale, g) for k, g in each.items()}, "data")
    n = len(x) * fs.axis_size("data")
    noise = {k: fs.random.normal(fs.fold_in(key, k), g.shape, dtype=g.dtype) for k, g in total.items()}
    return {k: (g + 0.5 * limit * noise[k]) / n for k, g in total.items()}


def dense_per_example_clipping(p, x, y, limit, key):
    out = {}
    for k in p:
        out[k] = 0.5 * limit * fs.random.normal(fs.fold_in(key, k), p[k].shape, dtype=p[k].dtype)
    for row, goal in zip(x, y, strict=True):
        g = grad(lambda p, a=row, b=goal: (net(p, a) - b) ** 2)(p)
        norm = torch.cat([v.flatten() for v in g.values()]).norm()
        out = {k: out[k] + g[k] * min(1.0, float(limit / norm)) for k in p}
    return {k: v / len(x) for k, v in out.items()}


def meta_learning(p, x, y):
    """MAML: tasks [K@data, B, D] are split; gradients go through the inner steps of each task."""

    def inner_loss(q, x, y):
        return (net(q, x) - y).square().mean()

    def outer(p):
        p = fs.pvary(p, "data")

        def one_task(x, y):
            q = p
            for _ in range(2):
                g = grad(inner_loss)(q, x[:3], y[:3])
                q = {k: q[k] - 0.1 * g[k] for k in q}
            return inner_loss(q, x[3:], y[3:])

        return fs.pmean(vmap(one_task)(x, y).mean(), "data")

    return fs.value_and_grad(outer)(p)


def dense_meta_learning(p, x, y):
    leaves = {k: v.clone().requires_grad_() for k, v in p.items()}
    total = torch.zeros((), dtype=x.dtype)
    for rows, goals in zip(x, y, strict=True):
        q = leaves
        for _ in range(2):
            inner = (net(q, rows[:3]) - goals[:3]).square().mean()
            g = torch.autograd.grad(inner, q.values(), create_graph=True)
            q = {k: v - 0.1 * d for (k, v), d in zip(q.items(), g, strict=True)}
        total = total + (net(q, rows[3:]) - goals[3:]).square().mean() / len(x)
    return total.detach(), dict(zip(p, torch.autograd.grad(total, leaves.values()), strict=True))


def meta_learned_rate(p, rate, x, y):
    """Meta-SGD on data-parallel batches: grad of grad with collectives inside, for the weights and the inner rate."""

    def outer(p, rate):
        g = fs.grad(net_loss)(p, x, y)
        q = fs.tree.map(lambda w, d: w - rate * d, p, g)
        return net_loss(q, x.flip(1), y)

    return fs.value_and_grad(outer, (0, 1))(p, rate)


def dense_meta_learned_rate(p, rate, x, y):
    p = {k: v.clone().requires_grad_() for k, v in p.items()}
    rate = rate.clone().requires_grad_()
    g = torch.autograd.grad(dense_net_loss(p, x, y), p.values(), create_graph=True)
    q = {k: v - rate * d for (k, v), d in zip(p.items(), g, strict=True)}
    loss = dense_net_loss(q, x.flip(1), y)
    grads = torch.autograd.grad(loss, [*p.values(), rate])
    return loss.detach(), (dict(zip(p, grads, strict=False)), grads[-1])


def kronecker_factors(w, x, labels):
    """K-FAC of a linear classifier: second moments of inputs and of output gradients, and the preconditioned step."""

    def loss(logits):
        return F.cross_entropy(logits, labels, reduction="sum")

    logits = x @ w
    delta = grad(loss)(logits)  # [B@data, C]
    a, s = fs.pmean((x.T @ x / len(x), delta.T @ delta / len(x)), "data")
    g = fs.pmean(x.T @ delta / len(x), "data")
    damped = [m + 0.1 * torch.eye(len(m)) for m in (a, s)]
    return w - torch.linalg.solve(damped[0], torch.linalg.solve(damped[1], g.T).T)


def dense_kronecker_factors(w, x, labels):
    delta = torch.softmax(x @ w, -1) - F.one_hot(labels, 3)
    a = x.T @ x / len(x) + 0.1 * torch.eye(4, dtype=x.dtype)
    s = delta.T @ delta / len(x) + 0.1 * torch.eye(3, dtype=x.dtype)
    step = torch.linalg.inv(torch.kron(a, s)) @ (x.T @ delta / len(x)).flatten()
    return w - step.view(4, 3)


def laplace_approximation(w, x, y, new):
    """Posterior variance of predictions: the Hessian of the loss at w, inverted, and local test rows."""
    precision = fs.axis_size("data") * len(x) * hessian(logistic_loss)(w, x, y) + torch.eye(4)
    root = torch.linalg.cholesky(precision)
    variance = torch.linalg.solve_triangular(root, new.T, upper=False).square().sum(0)  # [B@data]
    return torch.sigmoid(new @ w / torch.sqrt(1 + torch.pi / 8 * variance)), torch.logdet(precision)


def dense_laplace(w, x, y, new):
    p = torch.sigmoid(x @ w)
    precision = (x.T * (p * (1 - p))) @ x + torch.eye(4, dtype=x.dtype)
    variance = torch.einsum("bd,de,be->b", new, torch.linalg.inv(precision), new)
    return torch.sigmoid(new @ w / (1 + torch.pi * variance / 8) ** 0.5), torch.linalg.eigvalsh(precision).log().sum()


def influence_functions(w, x, y, test_x, test_y):
    """Influence of each training row on one test loss: an inverse Hessian by conjugate gradients."""

    def regularized(w):
        return logistic_loss(w, x, y) + 0.05 * w.square().sum()

    def product(v):
        return jvp(grad(regularized), (w,), (v,))[1]

    goal = grad(lambda w: F.binary_cross_entropy_with_logits(test_x @ w, test_y))(w)
    solution, r = torch.zeros_like(goal), goal
    d = r
    for _ in range(2):
        hd = product(d)
        step = (r @ r) / (d @ hd)
        solution, after = solution + step * d, r - step * hd
        d, r = after + (after @ after) / (r @ r) * d, after
    each = vmap(grad(lambda w, a, b: F.binary_cross_entropy_with_logits(a @ w, b)), (None, 0, 0))
    return -each(fs.pvary(w, "data"), x, y) @ solution


def dense_influence(w, x, y, test_x, test_y):
    p = torch.sigmoid(x @ w)
    h = (x.T * (p * (1 - p))) @ x / len(x) + 0.1 * torch.eye(2, dtype=x.dtype)
    goal = (torch.sigmoid(test_x @ w) - test_y) * test_x
    return -((p - y)[:, None] * x) @ torch.linalg.inv(h) @ goal


def implicit_differentiation(p, x, y):
    """Deep equilibrium: a fixed point of each row, whose gradient solves a linear system instead of unrolling."""

    def cell(p, z, x):
        return torch.tanh(z @ p["a"] + x @ p["b"])

    local = fs.pvary(p, "data")
    with torch.no_grad():
        z = torch.zeros_like(y)
        for _ in range(30):
            z = cell(local, z, x)
    upstream = 2 * (z - y) / (y.numel() * fs.axis_size("data"))
    _, of_z = vjp(lambda z: cell(local, z, x), z)
    adjoint = upstream
    for _ in range(30):
        adjoint = upstream + of_z(adjoint)[0]
    _, of_p = vjp(lambda q: cell(q, z, x), local)
    return fs.psum(of_p(adjoint)[0], "data")


def dense_implicit(p, x, y):
    def loss(p):
        z = torch.zeros(len(x), 3, dtype=x.dtype)
        for _ in range(80):
            z = torch.tanh(z @ p["a"] + x @ p["b"])
        return (z - y).square().mean()

    return grad(loss)(p)


def hypergradient(w, decay, x, y, valid_x, valid_y):
    """Gradient of a validation loss by the weight decay, through two training steps on split batches."""

    def train_loss(w, decay):
        return logistic_loss(w, x, y) + torch.exp(decay) * w.square().sum()

    def outer(decay):
        q = w
        for _ in range(2):
            q = q - 0.5 * fs.grad(train_loss)(q, decay)
        return logistic_loss(q, valid_x, valid_y)

    return fs.value_and_grad(outer)(decay)


def dense_hypergradient(w, decay, x, y, valid_x, valid_y):
    def outer(decay):
        q = w
        for _ in range(2):
            q = q - 0.5 * (x.T @ (torch.sigmoid(x @ q) - y) / len(x) + 2 * torch.exp(decay) * q)
        return dense_logistic_loss(q, valid_x, valid_y)

    return tuple(torch.func.grad_and_value(outer)(decay)[::-1])


def jacobian_penalty(p, x, y):
    """Contractive penalty: the squared Jacobian of the outputs by the inputs, differentiated by the weights."""

    def loss(p):
        p = fs.pvary(p, "data")
        j = vmap(jacrev(lambda row: torch.tanh(row @ p["w"])))(x)  # [B@data, F, D]
        return fs.pmean(j.square().sum((1, 2)).mean() + (net(p, x) - y).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def dense_jacobian_penalty(p, x, y):
    def loss(p):
        slope = 1 - torch.tanh(x @ p["w"]).square()
        return (slope.square() @ p["w"].square().sum(0)).mean() + dense_net_loss(p, x, y)

    return torch.func.grad_and_value(loss)(p)[::-1]


def ensemble(members, x, y):
    """Deep ensemble: members [K@member, ...] trained by vmap, each on all of the split data."""

    def one(p):
        return fs.value_and_grad(net_loss)(p, x, y)

    losses, grads = vmap(one)(members)
    return losses, fs.tree.map(lambda w, g: w - 0.1 * g, members, grads)


def dense_ensemble(members, x, y):
    rows = [{k: v[i] for k, v in members.items()} for i in range(len(members["v"]))]
    grads = [grad(dense_net_loss)(p, x, y) for p in rows]
    new = {k: torch.stack([p[k] - 0.1 * g[k] for p, g in zip(rows, grads, strict=True)]) for k in members}
    return torch.stack([dense_net_loss(p, x, y) for p in rows]), new


VECTOR = {k: v.flip(0) for k, v in NET.items()}
TASKS = normal("tasks", 4, 5, 4).double(), normal("goals", 4, 5).double()
MEMBERS = {"w": normal("members", 4, 4, 5, std=0.6).double(), "v": normal("members", 4, 5, std=0.6).double()}
CELL = {"a": normal("a", 3, 3, std=0.3).double(), "b": normal("b", 4, 3).double()}
PRODUCT = (P(), P(), BATCH, BATCH)
PROGRAMS = [
    Program(hvp_forward_over_reverse, DATA, PRODUCT, P(), (NET, VECTOR, X, Y), dense_net_hvp),
    Program(hvp_reverse_over_reverse, DATA, PRODUCT, P(), (NET, VECTOR, X, Y), dense_net_hvp),
    Program(hvp_by_autograd, DATA, PRODUCT, P(), (NET, VECTOR, X, Y), dense_net_hvp),
    Program(newton_method, DATA, FIT, P(), (W, X, SIGNS), dense_newton_method),
    Program(reweighted_least_squares, DATA, FIT, P(), (W, X, SIGNS), dense_reweighted),
    Program(gauss_newton_product, DATA, PRODUCT, P(), (NET, VECTOR, X, Y), dense_gauss_newton_product),
    Program(fisher_diagonal, DATA, FIT, P(), (NET, X, Y), dense_fisher_diagonal),
    Program(natural_gradient, DATA, FIT, P(), (W, X, SIGNS), dense_natural_gradient),
    Program(
        per_example_clipping, DATA, (*FIT, P(), P()), P(), (NET, X, Y, torch.tensor(0.5).double(), fs.key(2)),
        dense_per_example_clipping,
    ),
    Program(meta_learning, DATA, FIT, P(), (NET, *TASKS), dense_meta_learning),
    Program(
        meta_learned_rate, DATA, PRODUCT, P(), (NET, torch.tensor(0.3).double(), X, Y), dense_meta_learned_rate
    ),
    Program(
        kronecker_factors, DATA, FIT, P(), (normal("w", 4, 3).double(), X, LABELS), dense_kronecker_factors
    ),
    Program(
        laplace_approximation, DATA, (*FIT, BATCH), (BATCH, P()), (W, X, SIGNS, X.flip(1)), dense_laplace
    ),
    Program(
        influence_functions, DATA, (*FIT, P(), P()), BATCH, (W[:2], X[:, :2], SIGNS, V[:2], torch.tensor(1.0).double()),
        dense_influence,
    ),
    Program(
        implicit_differentiation, DATA, FIT, P(), (CELL, X, normal("z", 8, 3).double()), dense_implicit
    ),
    Program(
        hypergradient, DATA, (P(), P(), BATCH, BATCH, BATCH, BATCH), P(),
        (W, torch.tensor(-3.0).double(), X, SIGNS, X.flip(1), SIGNS.flip(0)), dense_hypergradient,
    ),
    Program(jacobian_penalty, DATA, FIT, P(), (NET, X, Y), dense_jacobian_penalty),
    Program(
        ensemble, {"member": 2, "data": 2}, (P("member"), BATCH, BATCH), P("member"), (MEMBERS, X, Y), dense_ensemble
    ),
]  # fmt: skip
