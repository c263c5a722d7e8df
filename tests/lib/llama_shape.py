"""A training step of Llama's shape, written as a user would: parallel over `model`, fully sharded over `data`.

Legend: B batch, T time, D width, H heads, G key and value heads, K head width, F hidden width, V vocabulary;
[D@model] is a dim split over an axis. Inside the region B stands for B@data. The residual stream is [B, T@model, D].
Source: Touvron et al., 2023, "Llama 2"; the sizes of `BIG` are those of Llama 3 70B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import P

DATA, MODEL = "data", "model"


@dataclass(frozen=True)
class Config:
    vocab: int = 32
    width: int = 16
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 24
    theta: float = 500_000.0
    std: float = 0.02

    @property
    def head_width(self) -> int:
        return self.width // self.heads


BIG = Config(vocab=128_256, width=8192, layers=80, heads=64, kv_heads=8, ffn=28_672)
FLOAT32, BFLOAT16 = fs.Policy(), fs.Policy(compute=torch.bfloat16)


def init(cfg: Config) -> Any:
    """Described parameters: {"embed", "blocks": [one dict for each layer], "norm", "head"}."""
    v, d, f = cfg.vocab, cfg.width, cfg.ffn
    h, g, k = cfg.heads, cfg.kv_heads, cfg.head_width

    def block() -> Any:
        return {
            "norm1": fs.init.ones(d),
            "q": fs.init.normal((d, h, k), std=cfg.std),
            "k": fs.init.normal((d, g, k), std=cfg.std),
            "v": fs.init.normal((d, g, k), std=cfg.std),
            "o": fs.init.normal((h, k, d), std=cfg.std),
            "norm2": fs.init.ones(d),
            "gate": fs.init.normal((d, f), std=cfg.std),
            "up": fs.init.normal((d, f), std=cfg.std),
            "down": fs.init.normal((f, d), std=cfg.std),
        }

    return {
        "embed": fs.init.normal((v, d), std=cfg.std),
        "blocks": [block() for _ in range(cfg.layers)],
        "norm": fs.init.ones(d),
        "head": fs.init.normal((d, v), std=cfg.std),
    }


def specs(cfg: Config) -> Any:
    """Heads, hidden units and the vocabulary over `model`; then every leaf over `data` too."""
    inputs, outputs = P(MODEL), P(None, MODEL)
    block = {
        "norm1": P(), "q": outputs, "k": outputs, "v": outputs, "o": inputs,
        "norm2": P(), "gate": outputs, "up": outputs, "down": inputs,
    }  # fmt: skip
    tensor_parallel = {"embed": P(MODEL), "blocks": [block] * cfg.layers, "norm": P(), "head": outputs}
    return fs.fully_shard(tensor_parallel, init(cfg), axis=DATA)


def loss(cfg: Config, params: Any, ids: Tensor, targets: Tensor, *, policy: fs.Policy = FLOAT32) -> Tensor:
    """Mean cross-entropy of the next token: ids and targets [B, T] -> [] {I}."""
    described, placed = init(cfg), specs(cfg)

    def whole(p: Any, name: str) -> Any:
        """Unshard one part over `data` in the compute dtype, so that the transfer is small."""
        return fs.unshard(policy.to_compute(p), placed[name], DATA, shapes=described[name])

    rows = fs.nn.embedding(ids, whole(params["embed"], "embed"), axis=MODEL, size=cfg.vocab)  # [B, T, D]{V model}
    x = fs.psum_scatter(rows, MODEL, 1)  # [B, T@model, D]
    spec, shapes = placed["blocks"][0], described["blocks"][0]

    @fs.remat
    def block(p: Any, x: Tensor) -> Tensor:
        p = fs.unshard(policy.to_compute(p), spec, DATA, shapes=shapes)
        x = x + attention(cfg, p, normed(x, p["norm1"]))
        return x + mlp(p, normed(x, p["norm2"]))

    for p in params["blocks"]:
        x = block(p, x)
    x = normed(x, whole(params["norm"], "norm"))
    logits = x @ whole(params["head"], "head")  # [B, T, V@model]
    return fs.nn.cross_entropy(logits, targets, axis=MODEL, size=cfg.vocab, over=DATA)


def normed(x: Tensor, w: Tensor) -> Tensor:
    """Norm each rank's own positions, then gather all: [B, T@model, D] -> [B, T, D]{V model}."""
    return fs.all_gather(fs.nn.rms_norm(x, fs.pvary(w, MODEL)), MODEL, 1)


def attention(cfg: Config, p: Any, x: Tensor) -> Tensor:
    """Grouped-query attention, [B, T, D]{V model} -> [B, T@model, D], over this rank's own heads and groups."""
    q, k, v = (heads(x, p[name]) for name in "qkv")  # [B, H@model, T, K], [B, G@model, T, K] twice
    q, k = rotated(q, cfg.theta), rotated(k, cfg.theta)
    k, v = (repeated(y, cfg.heads // cfg.kv_heads) for y in (k, v))  # [B, H@model, T, K]
    a = fs.nn.attention(q, k, v, causal=True).transpose(1, 2).flatten(2)  # [B, T, HK@model]
    return fs.psum_scatter(a @ p["o"].flatten(0, 1), MODEL, 1)


def mlp(p: Any, x: Tensor) -> Tensor:
    """SwiGLU, [B, T, D]{V model} -> [B, T@model, D]."""
    h = F.silu(x @ p["gate"]) * (x @ p["up"])  # [B, T, F@model]
    return fs.psum_scatter(h @ p["down"], MODEL, 1)


def heads(x: Tensor, w: Tensor) -> Tensor:
    """[B, T, D], w [D, H, K] -> [B, H, T, K]."""
    return (x @ w.flatten(1)).unflatten(-1, w.shape[1:]).transpose(1, 2)


def repeated(x: Tensor, n: int) -> Tensor:
    """Repeat every head for `n` heads of queries: [B, G, T, K] -> [B, nG, T, K]."""
    return x.unsqueeze(2).expand(-1, -1, n, -1, -1).flatten(1, 2)


def rotated(x: Tensor, theta: float) -> Tensor:
    """Apply rotary positions, in pairs of halves of the head: [B, H, T, K]. Source: Su et al., 2021, "RoFormer"."""
    t, k = x.shape[-2:]
    rates = theta ** -(torch.arange(0, k, 2, device=x.device) / k)
    angles = torch.outer(torch.arange(t, device=x.device), rates)  # [T, K / 2], the same on every rank
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def optimizer(cfg: Config) -> fs.optim.Optimizer:
    decayed = lambda params: fs.tree.map(lambda x: x.ndim > 1, params)  # noqa: E731
    clip = fs.optim.clip_by_global_norm(1.0, specs(cfg))
    return fs.optim.chain(clip, fs.optim.adamw(3e-4, b2=0.95, weight_decay=0.1, mask=decayed))


def described_state(cfg: Config) -> tuple[Any, Any]:
    """The described parameters and optimizer state."""
    params = init(cfg)
    return params, optimizer(cfg).init(params)


def train_step(cfg: Config, mesh: fs.Mesh, *, policy: fs.Policy = BFLOAT16, **options: Any) -> Any:
    """step(params, state, ids [B, T], targets [B, T]) -> (params, state, loss), in float32 except inside the model."""
    opt, placed = optimizer(cfg), specs(cfg)
    state_specs = opt.specs(placed)

    def step(params: Any, state: Any, ids: Tensor, targets: Tensor) -> Any:
        value, grads = fs.value_and_grad(lambda p: loss(cfg, p, ids, targets, policy=policy))(params)
        params, state = opt.update(grads, state, params)
        return params, state, value

    return fs.shard_map(step, mesh=mesh, in_specs=(placed, state_specs, P(DATA), P(DATA)),
                        out_specs=(placed, state_specs, P()), **options)  # fmt: skip
