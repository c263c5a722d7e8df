"""GPT-2 as pure functions, with tensor, sequence and vocabulary parallelism, and fully sharded by its specs.

Legend: B batch, T time, D width, H heads, K head width, F hidden width, V vocabulary; [H@model] is a dim split
over an axis.
Source: Radford et al., 2019; weights as in Hugging Face `GPT2LMHeadModel`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fshard import init as initial
from fshard import nn
from fshard.errors import checked, fail, raise_all
from fshard.interop.hf import FileTensor
from fshard.spec import Axis, P

from .activations import ACTIVATIONS, activation_errors
from .hf_files import ModelFile, file_functions, file_tensor, weight_and_bias
from .kv_cache import Cache, KeyValues, Tokens
from .transformer import (
    Layout,
    Pieces,
    causal_attention,
    check_numbers,
    decoder_of,
    forward_of,
    generate_of,
    linear_params,
    loss_of,
    norm_params,
    split_qkv,
)


@checked
@dataclass(frozen=True)
class Config:
    """Sizes and rates, named as in Hugging Face's `GPT2Config`. The head is tied to the token embedding.

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

    def __post_init__(self) -> None:
        raise_all(activation_errors("gpt2.Config", "activation_function", self.activation_function))
        check_numbers("gpt2.Config", self)
        if self.n_embd % self.n_head:
            raise fail("gpt2.Config: the heads must divide the width", f"{self.n_embd} % {self.n_head} = "
                       f"{self.n_embd % self.n_head}", n_embd=self.n_embd, n_head=self.n_head)  # fmt: skip


@checked
def init(cfg: Config) -> Any:
    """Return the described parameters. Projections into the residual stream are drawn with std / sqrt(2 n_layer).

    >>> list(init(cfg))
    ['wte', 'wpe', 'h', 'ln_f']
    """
    d, h, k, f = cfg.n_embd, cfg.n_head, cfg.n_embd // cfg.n_head, cfg.n_inner or 4 * cfg.n_embd
    std, residual = cfg.initializer_range, cfg.initializer_range / math.sqrt(2 * max(1, cfg.n_layer))

    def block() -> Any:
        return {
            "ln_1": norm_params(d),
            "qkv": linear_params((d,), (3, h, k), std),
            "proj": linear_params((h, k), (d,), residual),
            "ln_2": norm_params(d),
            "up": linear_params((d,), (f,), std),
            "down": linear_params((f,), (d,), residual),
        }

    return {
        "wte": initial.normal((cfg.vocab_size, d), std=std),
        "wpe": initial.normal((cfg.n_positions, d), std=std),
        "h": [block() for _ in range(cfg.n_layer)],
        "ln_f": norm_params(d),
    }


@checked
def specs(cfg: Config, *, model: Axis = None) -> Any:
    """Split heads, hidden units and the vocabulary over `model`; replicate the rest. `fs.fully_shard` adds a data axis.

    >>> params = fs.materialize(init(cfg), specs(cfg, model="model"), mesh, key=fs.key(0))
    >>> params["wte"]
    f32[32@model, 16]
    """
    m = model
    block = {
        "ln_1": P(),
        "qkv": {"w": P(None, None, m), "b": P(None, m)},
        "proj": {"w": P(m), "b": P()},
        "ln_2": P(),
        "up": {"w": P(None, m), "b": P(m)},
        "down": {"w": P(m), "b": P()},
    }
    return {"wte": P(m), "wpe": P(), "h": [block] * cfg.n_layer, "ln_f": P()}


def pieces(
    cfg: Config, ids: Tensor, *, layout: Layout, key: Tensor | None, mask: Tensor | Tokens | None,
    cache: Cache | None = None,
) -> Pieces:  # fmt: skip
    """Return the parts of the model on ids [B@data, T]."""
    tokens = Tokens.of(ids, mask, cache)
    if tokens.stop > cfg.n_positions:
        raise fail(f"gpt2: {tokens.stop} tokens do not fit {cfg.n_positions} positions",
                   fix="a larger n_positions")  # fmt: skip
    layout = layout.with_batch(ids, key, cfg.embd_pdrop, cfg.attn_pdrop, cfg.resid_pdrop)

    def embed(top: Any) -> Tensor:  # [B, T, D], or [B, T@model, D] under sequence parallelism
        x = layout.embed(ids, top["wte"], cfg.vocab_size)
        x = x + layout.time_slice(nn.embedding(tokens.positions, top["wpe"]), tokens.positions.ndim - 1)
        return layout.dropout(x, cfg.embd_pdrop, key, "embd", tokens.total)

    return Pieces(layout, embed, lambda _: lambda p, x, key, cached: _block(cfg, p, x, layout, key, tokens, cached),
                  lambda top, x: layout.layer_norm(x, top["ln_f"], cfg.layer_norm_epsilon))  # fmt: skip


def _block(
    cfg: Config, p: Any, x: Tensor, layout: Layout, key: Tensor | None, tokens: Tokens, cached: KeyValues | None
) -> tuple[Tensor, KeyValues | None]:
    """Compute x + attention(norm(x)), then x + mlp(norm(x)); x [B, T, D]{I model}, or [B, T@model, D]."""
    t, w = tokens.t, p["qkv"]["w"]
    h = layout.layer_norm(x, p["ln_1"], cfg.layer_norm_epsilon)
    h = layout.column_linear(h, t, w.flatten(1), p["qkv"]["b"].flatten())  # [B, T, 3HK@model]
    q, k, v = split_qkv(h, w.shape[1:])  # each [B, H@model, T, K]
    a, cached = causal_attention(q, k, v, tokens, cached, layout=layout, rate=cfg.attn_pdrop, key=key,
                                 heads=cfg.n_head)  # fmt: skip
    a = layout.row_linear(a, p["proj"]["w"].flatten(0, 1), p["proj"]["b"])
    x = x + layout.dropout(a, cfg.resid_pdrop, key, "proj", tokens.total)

    h = layout.layer_norm(x, p["ln_2"], cfg.layer_norm_epsilon)
    h = ACTIVATIONS[cfg.activation_function](layout.column_linear(h, t, p["up"]["w"], p["up"]["b"]))  # [B, T, F@model]
    h = layout.row_linear(h, p["down"]["w"], p["down"]["b"])
    return x + layout.dropout(h, cfg.resid_pdrop, key, "down", tokens.total), cached


def head_logits(cfg: Config, layout: Layout, top: dict[str, Any], x: Tensor, t: int) -> Tensor:
    """Return the logits of the normalized stream, [B, T, V@model]."""
    return layout.column_linear(x, t, top["wte"].transpose(0, 1))  # [B, T, V@model]


apply, states = decoder_of(Config, init, forward_of(init, pieces), head_logits)
loss = loss_of(apply, Config)
generate = generate_of(apply, Config)


# --- Hugging Face files ---------------------------------------------------------------------------------------

_TOP = {
    "wte": FileTensor("transformer.wte.weight"),
    "wpe": FileTensor("transformer.wpe.weight"),
    **weight_and_bias("ln_f", "transformer.ln_f"),
}
_BLOCK = {  # the matrices in the file are [in, out], as here
    **weight_and_bias("ln_1", "ln_1"),
    **weight_and_bias("qkv", "attn.c_attn", "d (c h k) -> d c h k", "(c h k) -> c h k"),
    **weight_and_bias("proj", "attn.c_proj", "(h k) d -> h k d"),
    **weight_and_bias("ln_2", "ln_2"),
    **weight_and_bias("up", "mlp.c_fc"),
    **weight_and_bias("down", "mlp.c_proj"),
}
FILE = ModelFile(
    Config, init, functools.partial(file_tensor, top=_TOP, block=_BLOCK, blocks="transformer.h"),
    kind="GPT2", suffix="LMHeadModel", prefix="transformer.", ignored=(".attn.bias", ".attn.masked_bias"),
    absent={"bos_token_id": 50256, "eos_token_id": 50256}, tied={"lm_head.weight": "transformer.wte.weight"},
    fixed={"model_type": "gpt2", "tie_word_embeddings": True, "scale_attn_weights": True,
           "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
)  # fmt: skip
theirs, config, load, save = file_functions(FILE)


__all__ = ["Cache", "Config", "Layout", "apply", "config", "generate", "init", "load", "loss", "save", "specs",
           "states", "theirs"]  # fmt: skip
