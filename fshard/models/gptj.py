"""GPT-J as pure functions, with tensor, sequence and vocabulary parallelism, and fully sharded by its specs.

Legend: B batch, T time, D width, H heads, K head width, F hidden width, V vocabulary; [H@model] is a dim split over
an axis; {V} varies over it, {I} does not.
Source: Wang & Komatsuzaki, 2021, "GPT-J-6B"; weights as in Hugging Face `GPTJForCausalLM`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import nn
from fshard.errors import checked, fail, raise_all
from fshard.nn import rope

from .activations import ACTIVATIONS
from .hf_files import ModelFile, file_functions
from .kv_cache import Cache, KeyValues
from .leaves import Leaves, in_blocks, init_of, layer, leaf, specs_of
from .transformer import Layout, Run, config_errors, decoder_of, functions_of, pieces_of, project_heads


@checked
@dataclass(frozen=True)
class Config:
    """Sizes and rates, named as in Hugging Face's `GPTJConfig`. `rotary_dim`: rotated dims of each head.

    >>> gptj.Config(n_layer=2).rotary_dim
    64
    """

    vocab_size: int = 50400
    n_positions: int = 2048
    n_embd: int = 4096
    n_layer: int = 28
    n_head: int = 16
    rotary_dim: int = 64
    n_inner: int | None = None  # None: 4 n_embd
    embd_pdrop: float = 0.0
    attn_pdrop: float = 0.0
    resid_pdrop: float = 0.0
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    activation_function: str = "gelu_new"
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None  # one or more tokens that end a text
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        errors = config_errors("gptj.Config", self, "n_embd", "n_head", "activation_function", own=("rotary_dim",))
        raise_all(errors)
        width = self.n_embd // self.n_head
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= width:
            raise fail(f"gptj.Config: rotary_dim={self.rotary_dim}",
                       fix=f"an even number of at most {width}, the width of a head")  # fmt: skip


LEAVES = Leaves({  # the matrices in the file are [out, in]
    "wte": leaf("transformer.wte.weight", "v d"),
    **in_blocks("h", "transformer.h", {
        **layer("ln_1", "ln_1", "d", "d"),
        **layer("q", "attn.q_proj", "(h k) d -> d h k"),
        **layer("k", "attn.k_proj", "(h k) d -> d h k"),
        **layer("v", "attn.v_proj", "(h k) d -> d h k"),
        **layer("proj", "attn.out_proj", "d (h k) -> h k d"),
        **layer("up", "mlp.fc_in", "f d -> d f", "f"),
        **layer("down", "mlp.fc_out", "d f -> f d", "d"),
    }),
    **layer("ln_f", "transformer.ln_f", "d", "d"),
    **layer("head", "lm_head", "v d -> d v", "v"),
}, blocks=lambda cfg: {"h": cfg.n_layer},
   sizes=lambda cfg: {"v": cfg.vocab_size, "d": cfg.n_embd, "h": cfg.n_head, "k": cfg.n_embd // cfg.n_head,
                      "f": cfg.n_inner or 4 * cfg.n_embd})  # fmt: skip


init = init_of(LEAVES, Config)
specs = specs_of(LEAVES, Config)


def _block(
    run: Run, p: Any, x: Tensor, key: Tensor | None, cached: KeyValues | None
) -> tuple[Tensor, KeyValues | None]:
    """Compute x + attention(norm(x)) + mlp(norm(x)), both of one norm; x [B, T, D]{I model}, or [B, T@model, D]."""
    cfg, layout = run.cfg, run.layout
    h = layout.enter(layout.layer_norm(x, p["ln_1"], cfg.layer_norm_epsilon), run.tokens.t)
    q, k, v = (project_heads(h, p[name]) for name in ("q", "k", "v"))  # each [B, H@model, T, K]
    q, k = (rope.rotate(y, *run.angles, style="pairs") for y in (q, k))
    if cfg.attn_pdrop and key is not None:
        # Scores are computed in float32 for half precision too. Torch's fused kernel does; with dropout it is not used.
        q, k = (y.to(torch.promote_types(y.dtype, torch.float32)) for y in (q, k))
    a, cached = run.attention(q, k, v, key, cached, rate=cfg.attn_pdrop, heads=cfg.n_head)
    a = nn.linear(a, p["proj"]["w"].flatten(0, 1))
    h = ACTIVATIONS[cfg.activation_function](nn.linear(h, p["up"]["w"], p["up"]["b"]))  # [B, T, F@model]
    h, b = nn.linear(h, p["down"]["w"]), layout.replicated(p["down"]["b"])

    # a and h are partial results over model. So is their sum, so that one transfer reduces both, unless each has a
    # dropout mask of its own.
    if not cfg.resid_pdrop or key is None:
        return x + layout.leave(a + h) + b, cached
    a = run.dropout(layout.leave(a), cfg.resid_pdrop, key, "proj")
    return x + a + run.dropout(layout.leave(h) + b, cfg.resid_pdrop, key, "down"), cached


def head_logits(cfg: Config, layout: Layout, top: dict[str, Any], x: Tensor, t: int) -> Tensor:
    w = top["wte"].transpose(0, 1) if cfg.tie_word_embeddings else top["head"]["w"]
    return nn.linear(layout.enter(x, t), w, top["head"]["b"])  # [B, T, V@model]


pieces = pieces_of(
    _block, lambda run, top, x: run.layout.layer_norm(x, top["ln_f"], run.cfg.layer_norm_epsilon),
    rotary=lambda cfg: ({"rope_theta": 10_000.0}, cfg.rotary_dim, cfg.n_positions), embd="embd_pdrop",
    rates=("embd_pdrop", "attn_pdrop", "resid_pdrop"), longest="n_positions",
)  # fmt: skip
apply, states = decoder_of(Config, init, pieces, head_logits)
loss, generate = functions_of(apply, Config)


# --- Hugging Face files ---------------------------------------------------------------------------------------

FILE = ModelFile(
    Config, init, LEAVES.tensor,
    kind="GPTJ", prefix="transformer.", fixed={"model_type": "gptj"}, ignored=(".attn.bias", ".attn.masked_bias"),
    absent={"bos_token_id": 50256, "eos_token_id": 50256}, tied={"lm_head.weight": "transformer.wte.weight"},
)  # fmt: skip
theirs, config, load, save = file_functions(FILE)


__all__ = ["Cache", "Config", "Layout", "apply", "config", "generate", "init", "load", "loss", "save", "specs",
           "states", "theirs"]  # fmt: skip
