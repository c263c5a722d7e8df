"""GPT-NeoX as pure functions, with tensor, sequence and vocabulary parallelism, and fully sharded by its specs.

Legend: B batch, T time, D width, H heads, K head width, F hidden width, V vocabulary; [H@model] is a dim split over
an axis; {V} varies over it, {I} does not.
Source: Black et al., 2022, "GPT-NeoX-20B"; weights as in Hugging Face `GPTNeoXForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fshard import nn
from fshard.collectives import pvary
from fshard.errors import checked, raise_all
from fshard.nn import rope

from .activations import ACTIVATIONS
from .hf_files import ModelFile, file_functions
from .kv_cache import Cache, KeyValues
from .leaves import Leaves, in_blocks, init_of, layer, leaf, specs_of
from .transformer import Layout, Run, config_errors, decoder_of, flat_linear, functions_of, pieces_of, split_qkv

_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}


@checked
@dataclass(frozen=True)
class Config:
    """Sizes and rates, named as in Hugging Face's `GPTNeoXConfig`.

    `rope_parameters`: see `rope.frequencies`; the defaults of rope_type, rope_theta and
    partial_rotary_factor are "default", 10000 and 0.25.

    >>> gpt_neox.Config(num_hidden_layers=2).hidden_size
    6144
    """

    vocab_size: int = 50432
    hidden_size: int = 6144
    num_hidden_layers: int = 44
    num_attention_heads: int = 64
    intermediate_size: int = 24576
    hidden_act: str = "gelu"
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    max_position_embeddings: int = 2048  # of no effect without a rope_type that scales
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    use_parallel_residual: bool = True
    attention_bias: bool = True
    tie_word_embeddings: bool = False
    rope_parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None  # one or more tokens that end a text
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        raise_all(config_errors("gpt_neox.Config", self))
        object.__setattr__(self, "rope_parameters", {**_ROPE, **self.rope_parameters})
        width = self.hidden_size // self.num_attention_heads
        rope.frequencies(self.rope_parameters, width, self.max_position_embeddings)  # raises for wrong ones


_HEADS = ("lm_head.weight", "embed_out.weight")  # in memory transformers 5 uses the first, in files the second
LEAVES = Leaves({  # the matrices in the file are [out, in]; q, k and v are interleaved by head
    "wte": leaf("gpt_neox.embed_in.weight", "v d"),
    **in_blocks("h", "gpt_neox.layers", {
        **layer("ln_1", "input_layernorm", "d", "d"),
        **layer("qkv", "attention.query_key_value", "(h c k) d -> d c h k", "(h c k) -> c h k"),
        **layer("proj", "attention.dense", "d (h k) -> h k d", "d"),
        **layer("ln_2", "post_attention_layernorm", "d", "d"),
        **layer("up", "mlp.dense_h_to_4h", "f d -> d f", "f"),
        **layer("down", "mlp.dense_4h_to_h", "d f -> f d", "d"),
    }),
    **layer("ln_f", "gpt_neox.final_layer_norm", "d", "d"),
    "head.w": leaf("embed_out.weight", "v d -> d v"),
}, blocks=lambda cfg: {"h": cfg.num_hidden_layers},
   has=lambda cfg, name, _: cfg.attention_bias or name not in ("qkv.b", "proj.b"),
   sizes=lambda cfg: {"v": cfg.vocab_size, "d": cfg.hidden_size, "c": 3, "h": cfg.num_attention_heads,
                      "k": cfg.hidden_size // cfg.num_attention_heads, "f": cfg.intermediate_size})  # fmt: skip


init = init_of(LEAVES, Config)
specs = specs_of(LEAVES, Config)


def _block(
    run: Run, p: Any, x: Tensor, key: Tensor | None, cached: KeyValues | None
) -> tuple[Tensor, KeyValues | None]:
    """Compute x + attention(norm(x)), then x + mlp(norm(x)), or both of one x; x [B, T, D]{I model}, or split."""
    cfg, layout, t, eps = run.cfg, run.layout, run.tokens.t, run.cfg.layer_norm_eps

    def attention(h: Tensor) -> tuple[Tensor, KeyValues | None]:
        """Return a rank's term of the sum over model, without the last bias: [B, T, D]{V model} -> the same."""
        q, k, v = split_qkv(flat_linear(h, p["qkv"]), p["qkv"]["w"].shape[1:])  # each [B, H@model, T, K]
        q, k = (rope.rotate(y, *run.angles, style="half") for y in (q, k))
        a, new = run.attention(q, k, v, key, cached, rate=cfg.attention_dropout, heads=cfg.num_attention_heads)
        return nn.linear(a, p["proj"]["w"].flatten(0, 1)), new

    def mlp(h: Tensor) -> Tensor:
        """Return a rank's term, as `attention` does."""
        h = ACTIVATIONS[cfg.hidden_act](nn.linear(h, p["up"]["w"], p["up"]["b"]))  # [B, T, F@model]
        return nn.linear(h, p["down"]["w"])

    def add_bias(x: Tensor, name: str) -> Tensor:
        return x + layout.replicated(p[name]["b"]) if "b" in p[name] else x

    def leave(h: Tensor, name: str) -> Tensor:
        return run.dropout(add_bias(layout.leave(h), name), cfg.hidden_dropout, key, name)

    if not cfg.use_parallel_residual:
        a, new = attention(layout.enter(layout.layer_norm(x, p["ln_1"], eps), t))
        x = x + leave(a, "proj")
        return x + leave(mlp(layout.enter(layout.layer_norm(x, p["ln_2"], eps), t)), "down"), new

    # Both norms normalize the same x: it is normalized and enters once, and each norm scales and shifts it inside.
    h = layout.enter(nn.layer_norm(x, eps=eps), t)
    ln_1, ln_2 = pvary((p["ln_1"], p["ln_2"]), layout.model)
    a, new = attention(h * ln_1["w"] + ln_1["b"])
    h = mlp(h * ln_2["w"] + ln_2["b"])
    # a and h are partial results over model. So is their sum, so that one transfer reduces both, unless each has a
    # dropout mask of its own.
    if not cfg.hidden_dropout or key is None:
        return x + add_bias(add_bias(layout.leave(a + h), "proj"), "down"), new
    return x + leave(a, "proj") + leave(h, "down"), new


pieces = pieces_of(
    _block, lambda run, top, x: run.layout.layer_norm(x, top["ln_f"], run.cfg.layer_norm_eps),
    rotary=lambda cfg: (cfg.rope_parameters, cfg.hidden_size // cfg.num_attention_heads, cfg.max_position_embeddings),
    rates=("hidden_dropout", "attention_dropout"), embd="hidden_dropout",
)  # fmt: skip
apply, states = decoder_of(Config, init, pieces)
loss, generate = functions_of(apply, Config)


# --- Hugging Face files ---------------------------------------------------------------------------------------


def _rotary(config: dict[str, Any]) -> dict[str, Any]:
    theta = config.get("rotary_emb_base") or _ROPE["rope_theta"]
    rotary = rope.parameters(config, theta=theta, partial=config.get("rotary_pct") or _ROPE["partial_rotary_factor"])
    # `rope.parameters` leaves out a partial_rotary_factor of 1, and the default of a Config is another one.
    return {"rope_parameters": {"partial_rotary_factor": 1.0, **rotary}}


FILE = ModelFile(
    Config, init, LEAVES.tensor,
    kind="GPTNeoX", prefix="gpt_neox.", fixed={"model_type": "gpt_neox"},
    ignored=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
    absent={"bos_token_id": 0, "eos_token_id": 2}, heads=_HEADS, tied=dict.fromkeys(_HEADS, "gpt_neox.embed_in.weight"),
    other_fields=_rotary, name_in=lambda name, names: _HEADS[0] if name in _HEADS and _HEADS[0] in names else name,
)  # fmt: skip
theirs, config, load, save = file_functions(FILE)


__all__ = ["Cache", "Config", "Layout", "apply", "config", "generate", "init", "load", "loss", "save", "specs",
           "states", "theirs"]  # fmt: skip
