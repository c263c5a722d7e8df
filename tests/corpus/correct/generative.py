"""Generative models. Legend: B batch, D data, Z latent, H hidden; [n@axis] is a dim split over an axis."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch.func import grad, grad_and_value, jacrev, jvp, vmap

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, normal

DATA = {"data": 2}
BATCH = P("data")
X = normal("x", 8, 4)  # [B@data, D]
KEY = fs.key(11)


def draw(key, like, width):
    """Normal draws for each row of a batch that is split over data."""
    return fs.random.normal(key, (fs.global_shape(like, P("data"))[0], width), spec=P("data"))


def mlp(p, x):
    return torch.tanh(x @ p["w"] + p["b"]) @ p["v"]


def mlp_params(name, n_in, n_out, hidden=5):
    shapes = {"w": (n_in, hidden), "b": (hidden,), "v": (hidden, n_out)}
    return {k: normal(f"{name} {k}", *s, std=0.6) for k, s in shapes.items()}


def evidence_lower_bound(p, x, key):
    """Variational autoencoder: reparametrized draws that are split as the batch is."""

    def loss(p):
        p = fs.pvary(p, "data")
        mean, logvar = mlp(p["encoder"], x).chunk(2, -1)
        z = mean + torch.exp(0.5 * logvar) * draw(key, x, 2)
        fit = 0.5 * (mlp(p["decoder"], z) - x).square().sum(-1)
        kl = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(-1)
        return fs.pmean((fit + kl).mean(), "data")

    return fs.value_and_grad(loss)(p)


def dense_evidence_lower_bound(p, x, key):
    noise = fs.random.normal(key, (len(x), 2))

    def loss(p):
        mean, logvar = mlp(p["encoder"], x).chunk(2, -1)
        posterior = torch.distributions.Normal(mean, (0.5 * logvar).exp(), validate_args=False)
        kl = torch.distributions.kl_divergence(posterior, torch.distributions.Normal(0.0, 1.0)).sum(-1)
        z = mean + (0.5 * logvar).exp() * noise
        return (0.5 * (mlp(p["decoder"], z) - x).square().sum(-1) + kl).mean()

    return grad_and_value(loss)(p)[::-1]


def importance_weighted_bound(p, x, key):
    """IWAE: two draws for each row, one key for each, under a replicated learned prior."""

    def loss(p):
        prior = fs.pvary(p["prior"], "data")
        local = fs.pvary({k: p[k] for k in ("encoder", "decoder")}, "data")
        mean, logvar = mlp(local["encoder"], x).chunk(2, -1)
        terms = []
        for k in fs.split(key, 2):
            noise = draw(k, x, 2)
            z = mean + torch.exp(0.5 * logvar) * noise
            fit = -0.5 * (mlp(local["decoder"], z) - x).square().sum(-1)
            ratio = (-0.5 * (z - prior).square() + 0.5 * noise.square() + 0.5 * logvar).sum(-1)
            terms.append(fit + ratio)
        bound = torch.logsumexp(torch.stack(terms), 0) - math.log(2)
        return fs.pmean(-bound.mean(), "data")

    return fs.value_and_grad(loss)(p)


def dense_importance_weighted_bound(p, x, key):
    noise = torch.stack([fs.random.normal(k, (len(x), 2)) for k in fs.split(key, 2)])

    def loss(p):
        mean, logvar = mlp(p["encoder"], x).chunk(2, -1)
        z = mean + (0.5 * logvar).exp() * noise
        gaussian = torch.distributions.Normal
        log_p = gaussian(p["prior"], 1.0).log_prob(z).sum(-1)
        log_q = gaussian(mean, (0.5 * logvar).exp(), validate_args=False).log_prob(z).sum(-1)
        weights = torch.exp(-0.5 * (mlp(p["decoder"], z) - x).square().sum(-1) + log_p - log_q)
        return -weights.mean(0).log().mean()

    return grad_and_value(loss)(p)[::-1]


def adversarial_players(g, d, x, key, lr):
    """GAN: a step of the discriminator on detached samples, then a step of the generator against the new one."""
    z = draw(key, x, 2)

    def d_loss(d):
        d = fs.pvary(d, "data")
        fake = mlp(fs.pvary(g, "data"), z).detach()
        return fs.pmean((F.softplus(-mlp(d, x)) + F.softplus(mlp(d, fake))).mean(), "data")

    d = fs.tree.map(lambda w, s: w - lr * s, d, fs.grad(d_loss)(d))

    def g_loss(g):
        return fs.pmean(F.softplus(-mlp(fs.pvary(d, "data"), mlp(fs.pvary(g, "data"), z))).mean(), "data")

    return fs.tree.map(lambda w, s: w - lr * s, g, fs.grad(g_loss)(g)), d


def adversarial_players_with_frozen_opponent(g, d, x, key, lr):
    """The same, where each player uses the other's replicated weights as they are: they are not differentiated."""
    z = draw(key, x, 2)
    with torch.no_grad():
        fake = mlp(g, z)

    def d_loss(d):
        d = fs.pvary(d, "data")
        return fs.pmean((F.softplus(-mlp(d, x)) + F.softplus(mlp(d, fake))).mean(), "data")

    d = fs.tree.map(lambda w, s: w - lr * s, d, fs.grad(d_loss)(d))

    def g_loss(g):
        return fs.pmean(F.softplus(-mlp(d, mlp(fs.pvary(g, "data"), z))).mean(), "data")

    return fs.tree.map(lambda w, s: w - lr * s, g, fs.grad(g_loss)(g)), d


def dense_players(g, d, x, key, lr):
    z = fs.random.normal(key, (len(x), 2))
    fake = mlp(g, z)

    def d_loss(d):
        logits = torch.cat([mlp(d, x), mlp(d, fake)])
        return 2 * F.binary_cross_entropy_with_logits(logits, (torch.arange(16) < 8).float()[:, None])

    d_grads = grad(d_loss)(d)
    d = {k: d[k] - lr * d_grads[k] for k in d}
    g_grads = grad(lambda g: -F.logsigmoid(mlp(d, mlp(g, z))).mean())(g)
    return {k: g[k] - lr * g_grads[k] for k in g}, d


def gradient_penalty(d, x, fake, key):
    """WGAN-GP: the critic's gradient by its inputs, at points between data and samples, is part of the loss."""

    def loss(d):
        d = fs.pvary(d, "data")
        t = fs.random.uniform(key, (fs.global_shape(x, P("data"))[0], 1), spec=P("data"))
        between = t * x + (1 - t) * fake
        slopes = vmap(grad(lambda row: mlp(d, row).squeeze(-1)))(between)
        penalty = (slopes.norm(dim=-1) - 1).square().mean()
        return fs.pmean((mlp(d, fake) - mlp(d, x)).mean() + 10 * penalty, "data")

    return fs.value_and_grad(loss)(d)


def gradient_penalty_by_autograd(d, x, fake, key):
    """The same penalty by torch.autograd.grad with create_graph, and backward to the replicated leaves."""
    leaves = {k: w.clone().requires_grad_() for k, w in d.items()}
    local = fs.pvary(leaves, "data")
    t = fs.random.uniform(key, (fs.global_shape(x, P("data"))[0], 1), spec=P("data"))
    between = (t * x + (1 - t) * fake).requires_grad_()
    (slopes,) = torch.autograd.grad(mlp(local, between).sum(), between, create_graph=True)
    penalty = (slopes.norm(dim=-1) - 1).square().mean()
    loss = fs.pmean((mlp(local, fake) - mlp(local, x)).mean() + 10 * penalty, "data")
    loss.backward()
    return loss.detach(), {k: w.grad for k, w in leaves.items()}


def dense_gradient_penalty(d, x, fake, key):
    t = fs.random.uniform(key, (len(x), 1))
    between = torch.lerp(fake, x, t)

    def loss(d):
        slope = 1 - torch.tanh(between @ d["w"] + d["b"]).square()
        slopes = (slope * d["v"][:, 0]) @ d["w"].T
        return (mlp(d, fake) - mlp(d, x)).mean() + 10 * (slopes.norm(dim=-1) - 1).square().mean()

    return grad_and_value(loss)(d)[::-1]


def denoising_diffusion(p, x, alphas, key):
    """DDPM: noise levels drawn for each row index a replicated schedule; the network predicts the noise."""
    k1, k2 = fs.split(key)
    level = fs.random.randint(k1, (fs.global_shape(x, P("data"))[0],), high=len(alphas), spec=P("data"))
    noise = draw(k2, x, x.shape[1])
    a = alphas[level][:, None]
    noisy = a.sqrt() * x + (1 - a).sqrt() * noise

    def loss(p):
        inputs = torch.cat([noisy, level[:, None] / len(alphas)], -1)
        return fs.pmean((mlp(fs.pvary(p, "data"), inputs) - noise).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def dense_denoising_diffusion(p, x, alphas, key):
    k1, k2 = fs.split(key)
    level = fs.random.randint(k1, (len(x),), high=len(alphas))
    noise = fs.random.normal(k2, x.shape)
    rows = [alphas[t] ** 0.5 * r + (1 - alphas[t]) ** 0.5 * e for t, r, e in zip(level, x, noise, strict=True)]
    inputs = torch.cat([torch.stack(rows), (level / len(alphas))[:, None]], -1)
    return grad_and_value(lambda p: F.mse_loss(mlp(p, inputs), noise))(p)[::-1]


@torch.no_grad()
def ancestral_sampling(p, start, alphas, key):
    """Sampling from a diffusion model: replicated weights and schedule, noise split as the batch is."""
    x = start
    for step in range(len(alphas) - 1, -1, -1):
        a = alphas[step]
        before = alphas[step - 1] if step else torch.ones(())
        beta = 1 - a / before
        level = torch.full((len(x), 1), step / len(alphas))
        guess = mlp(p, torch.cat([x, level], -1))
        mean = (x - beta / (1 - a).sqrt() * guess) / (1 - beta).sqrt()
        noise = draw(fs.fold_in(key, step), x, x.shape[1]) if step else torch.zeros_like(x)
        x = mean + beta.sqrt() * noise
    return x


def dense_ancestral_sampling(p, start, alphas, key):
    x, levels = start, [1.0, *alphas.tolist()]
    for step in reversed(range(len(alphas))):
        beta = 1 - levels[step + 1] / levels[step]
        guess = mlp(p, F.pad(x, (0, 1), value=step / len(alphas)))
        x = (x - beta / (1 - levels[step + 1]) ** 0.5 * guess) / (1 - beta) ** 0.5
        if step:
            x = x + beta**0.5 * fs.random.normal(fs.fold_in(key, step), x.shape)
    return x


def flow_matching(p, x, key):
    """Conditional flow matching: times and noise for each row, the velocity is x - noise."""
    k1, k2 = fs.split(key)
    t = fs.random.uniform(k1, (fs.global_shape(x, P("data"))[0], 1), spec=P("data"))
    noise = draw(k2, x, x.shape[1])

    def loss(p):
        inputs = torch.cat([torch.lerp(noise, x, t), t], -1)
        return fs.pmean((mlp(fs.pvary(p, "data"), inputs) - (x - noise)).square().sum(-1).mean(), "data")

    return fs.value_and_grad(loss)(p)


def dense_flow_matching(p, x, key):
    k1, k2 = fs.split(key)
    t, noise = fs.random.uniform(k1, (len(x), 1)), fs.random.normal(k2, x.shape)

    def loss(p):
        v = mlp(p, torch.cat([(1 - t) * noise + t * x, t], -1))
        return 4 * F.mse_loss(v, x - noise)

    return grad_and_value(loss)(p)[::-1]


def coupling_flow(p, x, base):
    """Affine coupling layers, with a base distribution whose location and scale are replicated constants."""

    def loss(p):
        y, logdet = x, 0.0
        for layer in fs.pvary(p, "data"):
            a, b = y.chunk(2, -1)
            scale, shift = mlp(layer, a).chunk(2, -1)
            scale = torch.tanh(scale)
            y, logdet = torch.cat([b * scale.exp() + shift, a], -1), logdet + scale.sum(-1)
        z = (y - base["loc"]) / base["scale"]
        nll = (0.5 * z.square() + 0.5 * math.log(2 * math.pi) + base["scale"].log()).sum(-1) - logdet
        return fs.pmean(nll.mean(), "data")

    return fs.value_and_grad(loss)(p)


def dense_coupling_flow(p, x, base):
    def transform(p, row):
        for layer in p:
            a, b = row.chunk(2, -1)
            scale, shift = mlp(layer, a).chunk(2, -1)
            row = torch.cat([b * torch.tanh(scale).exp() + shift, a], -1)
        return row

    def loss(p):
        prior = torch.distributions.Normal(base["loc"], base["scale"])
        logs = [torch.linalg.slogdet(jacrev(transform, 1)(p, row)).logabsdet for row in x]
        return -(torch.stack([prior.log_prob(transform(p, row)).sum() for row in x]) + torch.stack(logs)).mean()

    return grad_and_value(loss)(p)[::-1]


def sliced_score_matching(p, x, key):
    """Score matching with a random projection of each row: a jvp of the score inside the loss."""

    def loss(p):
        p = fs.pvary(p, "data")
        v = draw(key, x, x.shape[1])
        score, slope = jvp(lambda x: mlp(p, x), (x,), (v,))
        return fs.pmean(((v * slope).sum(-1) + 0.5 * score.square().sum(-1)).mean(), "data")

    return fs.value_and_grad(loss)(p)


def dense_sliced_score_matching(p, x, key):
    v = fs.random.normal(key, x.shape)

    def loss(p):
        slope = 1 - torch.tanh(x @ p["w"] + p["b"]).square()
        curvature = (((v @ p["w"]) * slope) @ p["v"] * v).sum(-1)
        return (curvature + 0.5 * mlp(p, x).square().sum(-1)).mean()

    return grad_and_value(loss)(p)[::-1]


def contrastive_divergence(p, x, chain, key, step):
    """Energy-based model: a persistent Langevin chain, split as the batch is, against replicated weights."""

    def energy(p, x):
        return mlp(p, x).squeeze(-1)

    for i in range(2):
        slope = vmap(grad(energy, 1), (None, 0))(p, chain)
        chain = chain - 0.5 * step * slope + step.sqrt() * draw(fs.fold_in(key, i), chain, x.shape[1])

    def loss(p):
        p = fs.pvary(p, "data")
        return fs.pmean(energy(p, x).mean() - energy(p, chain).mean(), "data")

    return fs.grad(loss)(p), chain


def dense_contrastive_divergence(p, x, chain, key, step):
    for i in range(2):
        hidden = torch.tanh(chain @ p["w"] + p["b"])
        slope = ((1 - hidden.square()) * p["v"][:, 0]) @ p["w"].T
        noise = fs.random.normal(fs.fold_in(key, i), chain.shape)
        chain = chain - 0.5 * step * slope + step**0.5 * noise
    return grad(lambda p: mlp(p, x).mean() - mlp(p, chain).mean())(p), chain


def vector_quantization(p, codes, counts, sums, x, decay):
    """VQ-VAE: nearest codes of a replicated codebook, straight-through gradients, and its moving averages."""

    def loss(p):
        h = mlp(fs.pvary(p, "data"), x)
        near = torch.cdist(h.detach(), codes).argmin(-1)
        q = codes[near]
        out = h + (q - h).detach()
        commit = 0.25 * (h - q).square().sum(-1)
        return fs.pmean(((out - x).square().sum(-1) + commit).mean(), "data"), (h, near)

    (value, (h, near)), grads = fs.value_and_grad(loss, has_aux=True)(p)
    hot = F.one_hot(near, len(codes)).to(h.dtype)
    n, total = fs.psum((hot.sum(0), hot.T @ h), "data")
    counts, sums = decay * counts + (1 - decay) * n, decay * sums + (1 - decay) * total
    return value, grads, sums / counts[:, None]


def dense_vector_quantization(p, codes, counts, sums, x, decay):
    near = (mlp(p, x)[:, None] - codes).square().sum(-1).argmin(-1)
    h = mlp(p, x)

    def loss(p):
        moved = mlp(p, x)
        out = codes[near] + moved - h
        return ((out - x).square() + 0.25 * (moved - codes[near]).square()).sum(-1).mean()

    grads, value = grad_and_value(loss)(p)
    rows = []
    for i in range(len(codes)):
        n = decay * counts[i] + (1 - decay) * (near == i).sum()
        rows.append((decay * sums[i] + (1 - decay) * h[near == i].sum(0)) / n)
    return value, grads, torch.stack(rows)


VAE = {"encoder": mlp_params("encoder", 4, 4), "decoder": mlp_params("decoder", 2, 4)}
PLAYERS = mlp_params("generator", 2, 4), mlp_params("critic", 4, 1)
ALPHAS = torch.tensor([0.95, 0.6, 0.2])
TIMED = mlp_params("timed", 5, 4)
LAYERS = [mlp_params(f"layer {i}", 2, 4) for i in range(2)]
GAN = (P(), P(), BATCH, P(), P())
PENALTY = (P(), BATCH, BATCH, P())
PROGRAMS = [
    Program(evidence_lower_bound, DATA, (P(), BATCH, P()), P(), (VAE, X, KEY), dense_evidence_lower_bound),
    Program(
        importance_weighted_bound, DATA, (P(), BATCH, P()), P(), ({**VAE, "prior": normal("prior", 2)}, X, KEY),
        dense_importance_weighted_bound,
    ),
    Program(adversarial_players, DATA, GAN, P(), (*PLAYERS, X, KEY, torch.tensor(0.2)), dense_players),
    Program(
        adversarial_players_with_frozen_opponent, DATA, GAN, P(), (*PLAYERS, X, KEY, torch.tensor(0.2)), dense_players
    ),
    Program(gradient_penalty, DATA, PENALTY, P(), (PLAYERS[1], X, X.flip(1), KEY), dense_gradient_penalty),
    Program(
        gradient_penalty_by_autograd, DATA, PENALTY, P(), (PLAYERS[1], X, X.flip(1), KEY), dense_gradient_penalty
    ),
    Program(
        denoising_diffusion, DATA, (P(), BATCH, P(), P()), P(), (TIMED, X, ALPHAS, KEY), dense_denoising_diffusion
    ),
    Program(
        ancestral_sampling, DATA, (P(), BATCH, P(), P()), BATCH, (TIMED, X, ALPHAS, KEY), dense_ancestral_sampling
    ),
    Program(flow_matching, DATA, (P(), BATCH, P()), P(), (TIMED, X, KEY), dense_flow_matching),
    Program(
        coupling_flow, DATA, (P(), BATCH, P()), P(),
        (LAYERS, X, {"loc": normal("loc", 4), "scale": torch.tensor([1.0, 2.0, 0.5, 1.5])}), dense_coupling_flow,
    ),
    Program(
        sliced_score_matching, DATA, (P(), BATCH, P()), P(), (mlp_params("score", 4, 4), X, KEY),
        dense_sliced_score_matching,
    ),
    Program(
        contrastive_divergence, DATA, (P(), BATCH, BATCH, P(), P()), (P(), BATCH),
        (PLAYERS[1], X, X.roll(1, 1), KEY, torch.tensor(0.1)), dense_contrastive_divergence,
    ),
    Program(
        vector_quantization, DATA, (P(), P(), P(), P(), BATCH, P()), P(),
        (mlp_params("quantized", 4, 4), normal("codes", 3, 4, std=0.3), torch.ones(3), normal("sums", 3, 4), X,
         torch.tensor(0.9)), dense_vector_quantization,
    ),
]  # fmt: skip
