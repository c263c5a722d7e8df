"""A GPT as a plain `nn.Module`, with the parameters and the arithmetic of `fshard.models.gpt2`.

Legend: B batch, T time, D width, H heads, K head width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fshard as fs
from fshard import P
from fshard.models import gpt2


class Block(nn.Module):
    """The outputs of `qkv` are ordered by head, [H, 3, K], so that a column split of it is a split by heads."""

    def __init__(self, cfg: gpt2.Config) -> None:
        super().__init__()
        d, f, self.k = cfg.n_embd, cfg.n_inner or 4 * cfg.n_embd, cfg.n_embd // cfg.n_head
        self.ln_1 = nn.LayerNorm(d, cfg.layer_norm_epsilon)
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)
        self.ln_2 = nn.LayerNorm(d, cfg.layer_norm_epsilon)
        self.up = nn.Linear(d, f)
        self.down = nn.Linear(f, d)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.ln_1(x)).unflatten(-1, (-1, 3, self.k))  # [B, T, H, 3, K]
        q, k, v = qkv.permute(3, 0, 2, 1, 4).unbind(0)  # each [B, H, T, K]
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, cfg: gpt2.Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.wpe = nn.Embedding(cfg.n_positions, cfg.n_embd)
        self.h = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.ln_f = nn.LayerNorm(cfg.n_embd, cfg.layer_norm_epsilon)
        self.head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy: ids, targets [B, T] -> []."""
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        logits = self.head(self.ln_f(x))  # [B, T, V]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def named(params: Any) -> dict[str, Tensor]:
    """The leaves of a gpt2 tree of plain tensors by the names and in the layout of the module; the tied head once."""
    out = {"wte.weight": params["wte"], "wpe.weight": params["wpe"], **_norm("ln_f", params["ln_f"])}
    for i, p in enumerate(params["h"]):
        at = f"h.{i}."
        out |= {**_norm(at + "ln_1", p["ln_1"]), **_norm(at + "ln_2", p["ln_2"])}
        out |= {f"{at}qkv.weight": p["qkv"]["w"].permute(2, 1, 3, 0).flatten(0, 2),
                f"{at}qkv.bias": p["qkv"]["b"].transpose(0, 1).flatten(),
                f"{at}proj.weight": p["proj"]["w"].flatten(0, 1).T}  # fmt: skip
        out |= {f"{at}{name}.weight": p[name]["w"].T for name in ("up", "down")}
        out |= {f"{at}{name}.bias": p[name]["b"] for name in ("proj", "up", "down")}
    return out


def _norm(name: str, p: Any) -> dict[str, Tensor]:
    return {f"{name}.weight": p["w"], f"{name}.bias": p["b"]}


def from_params(cfg: gpt2.Config, params: Any) -> GPT:
    """The module with the values of a gpt2 tree of plain tensors."""
    with torch.device("meta"):
        module = GPT(cfg).to(params["wte"].dtype)
    module.to_empty(device=params["wte"].device)
    module.tie()  # `to_empty` allocates a tensor for each name
    values = named(params)
    module.load_state_dict({**values, "head.weight": values["wte.weight"]})
    return module


def build(cfg: gpt2.Config, key: Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> GPT:
    """The module with the initial values that fshard draws by this key in a state {"params": ...}."""
    one = fs.make_mesh(kind="simulated", device=device, one=1)
    state = fs.materialize({"params": gpt2.init(cfg)}, P(), one, key=key, dtype=dtype)
    return from_params(cfg, fs.tree.map(lambda x: x.shards[0], state["params"]))
