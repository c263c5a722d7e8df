"""GPT-2 as pure functions, with tensor, sequence and vocabulary parallelism, and fully sharded by its specs.

Legend: B batch, T time, D width, H heads, K head width, F hidden width, V vocabulary; [H@model] is a dim split
over an axis.
Source: Radford et al., 2019; weights as in Hugging Face `GPT2LMHeadModel`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fshard.errors import checked, raise_all

from .activations import ACTIVATIONS
from .hf_files import ModelFile, file_functions
from .kv_cache import Cache, KeyValues
from .leaves import Leaves, in_blocks, init_of, layer, leaf, specs_of
from .transformer import Layout, Run, config_errors, decoder_of, functions_of, pieces_of, split_qkv


@checked
@dataclass(frozen=True)
class Config:
    """Sizes and rates, named as in Hugging Face's `GPT2Config`. By default the head is tied to the token embedding.

    >>> gpt2.Config(n_layer=2, n_embd=128, n_head=4).n_positions
    1024
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None  # None: 4 n_embd
    embd_pdrop: float = 0.0
    attn_pdrop: float = 0.0
    resid_pdrop: float = 0.0
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    activation_function: str = "gelu_new"
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None  # one or more tokens that end a text
    pad_token_id: int | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        raise_all(config_errors("gpt2.Config", self, "n_embd", "n_head", "activation_function"))


def _std(cfg: Config, name: str) -> float:
    is_residual = name in ("h.*.proj.w", "h.*.down.w")
    return cfg.initializer_range / math.sqrt(2 * max(1, cfg.n_layer)) if is_residual else cfg.initializer_range


LEAVES = Leaves({  # the matrices in the file are [in, out], as here
    "wte": leaf("transformer.wte.weight", "v d"),
    "wpe": leaf("transformer.wpe.weight", "t d"),
    **in_blocks("h", "transformer.h", {
        **layer("ln_1", "ln_1", "d", "d"),
        **layer("qkv", "attn.c_attn", "d (c h k) -> d c h k", "(c h k) -> c h k"),
        **layer("proj", "attn.c_proj", "(h k) d -> h k d", "d"),
        **layer("ln_2", "ln_2", "d", "d"),
        **layer("up", "mlp.c_fc", "d f", "f"),
        **layer("down", "mlp.c_proj", "f d", "d"),
    }),
    **layer("ln_f", "transformer.ln_f", "d", "d"),
    "head.w": leaf("lm_head.weight", "v d -> d v"),
}, blocks=lambda cfg: {"h": cfg.n_layer}, std=_std,
   sizes=lambda cfg: {"v": cfg.vocab_size, "t": cfg.n_positions, "d": cfg.n_embd, "c": 3, "h": cfg.n_head,
                      "k": cfg.n_embd // cfg.n_head, "f": cfg.n_inner or 4 * cfg.n_embd})  # fmt: skip


init = init_of(LEAVES, Config)
specs = specs_of(LEAVES, Config)


def _block(
    run: Run, p: Any, x: Tensor, key: Tensor | None, cached: KeyValues | None
) -> tuple[Tensor, KeyValues | None]:
    """Compute x + attention(norm(x)), then x + mlp(norm(x)); x [B, T, D]{I model}, or [B, T@model, D]."""
    cfg, layout, t, w = run.cfg, run.layout, run.tokens.t, p["qkv"]["w"]
    h = layout.layer_norm(x, p["ln_1"], cfg.layer_norm_epsilon)
    h = layout.column_linear(h, t, w.flatten(1), p["qkv"]["b"].flatten())  # [B, T, 3HK@model]
    q, k, v = split_qkv(h, w.shape[1:])  # each [B, H@model, T, K]
    a, cached = run.attention(q, k, v, key, cached, rate=cfg.attn_pdrop, heads=cfg.n_head)
    a = layout.row_linear(a, p["proj"]["w"].flatten(0, 1), p["proj"]["b"])
    x = x + run.dropout(a, cfg.resid_pdrop, key, "proj")

    h = layout.layer_norm(x, p["ln_2"], cfg.layer_norm_epsilon)
    h = ACTIVATIONS[cfg.activation_function](layout.column_linear(h, t, p["up"]["w"], p["up"]["b"]))  # [B, T, F@model]
    h = layout.row_linear(h, p["down"]["w"], p["down"]["b"])
    return x + run.dropout(h, cfg.resid_pdrop, key, "down"), cached


def head_logits(cfg: Config, layout: Layout, top: dict[str, Any], x: Tensor, t: int) -> Tensor:
    w = top["wte"].transpose(0, 1) if cfg.tie_word_embeddings else top["head"]["w"]
    return layout.column_linear(x, t, w)  # [B, T, V@model]


pieces = pieces_of(
    _block, lambda run, top, x: run.layout.layer_norm(x, top["ln_f"], run.cfg.layer_norm_epsilon),
    embd="embd_pdrop", rates=("embd_pdrop", "attn_pdrop", "resid_pdrop"), longest="n_positions",
)  # fmt: skip
apply, states = decoder_of(Config, init, pieces, head_logits)
loss, generate = functions_of(apply, Config)


# --- Hugging Face files ---------------------------------------------------------------------------------------

FILE = ModelFile(
    Config, init, LEAVES.tensor,
    kind="GPT2", suffix="LMHeadModel", prefix="transformer.", ignored=(".attn.bias", ".attn.masked_bias"),
    absent={"bos_token_id": 50256, "eos_token_id": 50256}, tied={"lm_head.weight": "transformer.wte.weight"},
    fixed={"model_type": "gpt2", "scale_attn_weights": True,
           "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
)  # fmt: skip
theirs, config, load, save = file_functions(FILE)


__all__ = ["Cache", "Config", "Layout", "apply", "config", "generate", "init", "load", "loss", "save", "specs",
           "states", "theirs"]  # fmt: skip
