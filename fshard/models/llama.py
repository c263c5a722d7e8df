"""Llama as pure functions, with tensor, sequence and vocabulary parallelism, and fully sharded by its specs.

Legend: B batch, T time, D width, G key and value heads, R heads of queries for each, H = GR, K head width, F hidden
width, V vocabulary; [G@model] is a dim split over an axis; {V} varies over it, {I} does not.
Source: Touvron et al., 2023, "Llama 2"; Ainslie et al., 2023, for grouped queries; weights as in Hugging Face
`LlamaForCausalLM`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from fshard import init as initial
from fshard import nn
from fshard.collectives import pvary
from fshard.errors import checked, fail, raise_all
from fshard.interop.hf import FileTensor
from fshard.nn import rope
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
    flat_linear,
    forward_of,
    generate_of,
    linear_params,
    loss_of,
    project_heads,
    rope_angles,
)


@dataclass(frozen=True)
class BaseConfig:
    """The options that Llama and its relatives share, named as in Hugging Face; a model is a `Config` made of it.

    `rope_parameters`: see `rope.frequencies`.
    """

    qk_norm: ClassVar[bool] = False  # True if each head of queries and keys is normalized before its rotation
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None  # None: num_attention_heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: rope.parameters({}), hash=False)
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None  # one or more tokens that end a text
    pad_token_id: int | None = None

    @property
    def groups(self) -> int:
        """G, the number of heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def width(self) -> int:
        """K, the width of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def biased(self) -> tuple[str, ...]:
        """The linear layers of a block that have a bias, by fields that some relatives have."""
        attention, mlp = (getattr(self, name, False) for name in ("attention_bias", "mlp_bias"))
        return ("q", "k", "v", "proj") * attention + ("gate", "up", "down") * mlp

    @property
    def windows(self) -> list[int | None]:
        """The sliding window of each layer, in tokens; None attends to all before."""
        window: int | None = getattr(self, "sliding_window", None)
        return [window if getattr(self, "use_sliding_window", True) else None] * self.num_hidden_layers

    def __post_init__(self) -> None:
        verb = f"{type(self).__module__.rpartition('.')[2]}.Config"
        check_numbers(verb, self)
        errors = []
        rules = [("the groups must divide the heads", self.num_attention_heads, self.groups)]
        if self.head_dim is None or isinstance(self, Config):  # `LlamaConfig` asks for it with a head_dim too
            rules.insert(0, ("the heads must divide the width", self.hidden_size, self.num_attention_heads))
        for rule, n, by in rules:
            if n % by:
                errors.append(fail(f"{verb}: {rule}", f"{n} % {by} = {n % by}"))
        errors += activation_errors(verb, "hidden_act", self.hidden_act)
        rotary = self.rope_parameters
        if rotary.get("partial_rotary_factor", 1.0) != 1.0 and rotary.get("rope_type") != "proportional":
            errors.append(fail(f"{verb}: all dims of a head are rotated", rope_parameters=dict(rotary),
                               fix="leave out partial_rotary_factor"))  # fmt: skip
        raise_all(errors)
        rope.frequencies(rotary, self.width, self.max_position_embeddings)  # raises for incomplete ones


@checked
@dataclass(frozen=True)
class Config(BaseConfig):
    """Sizes, rates and rotary positions, named as in Hugging Face's `LlamaConfig`; see `rope.frequencies` for the last.

    >>> Config(num_key_value_heads=8).groups, Config(hidden_size=2048).width
    (8, 64)
    """

    attention_bias: bool = False
    mlp_bias: bool = False


@checked
def init(cfg: BaseConfig) -> Any:
    """Return the described parameters: matrices are drawn from N(0, initializer_range^2), biases are 0, norms 1.

    >>> init(Config(num_key_value_heads=8))["h"][0]["q"]
    {'w': f32[4096, 8, 4, 128] = normal(std=0.02)}
    """
    return init_with(cfg, functools.partial(mlp_params, cfg, cfg.intermediate_size))


def mlp_params(cfg: BaseConfig, f: int) -> Any:
    """Return the described parameters of a gated MLP of hidden width `f`."""
    d, std = cfg.hidden_size, cfg.initializer_range
    shapes = {"gate": (d, f), "up": (d, f), "down": (f, d)}
    return {name: linear_params((i,), (o,), std, bias=name in cfg.biased) for name, (i, o) in shapes.items()}


def init_with(cfg: BaseConfig, mlp: Callable[[], Any]) -> Any:
    """Return the described parameters of a decoder; `mlp()` describes the layer after attention."""
    d, g, k, std = cfg.hidden_size, cfg.groups, cfg.width, cfg.initializer_range
    r = cfg.num_attention_heads // g

    def block() -> Any:
        shapes = {"q": ((d,), (g, r, k)), "k": ((d,), (g, k)), "v": ((d,), (g, k)), "proj": ((g, r, k), (d,))}
        return {
            "norm_1": {"w": initial.ones(d)},
            **{name: linear_params(i, o, std, bias=name in cfg.biased) for name, (i, o) in shapes.items()},
            **({f"{name}_norm": {"w": initial.ones(k)} for name in "qk"} if cfg.qk_norm else {}),
            "norm_2": {"w": initial.ones(d)},
            **mlp(),
        }

    head = {} if cfg.tie_word_embeddings else {"head": linear_params((d,), (cfg.vocab_size,), std, bias=False)}
    return {
        "wte": initial.normal((cfg.vocab_size, d), std=std),
        "h": [block() for _ in range(cfg.num_hidden_layers)],
        "norm_f": {"w": initial.ones(d)},
        **head,
    }


@checked
def specs(cfg: BaseConfig, *, model: Axis = None) -> Any:
    """Split key and value heads with their queries, hidden units and the vocabulary over `model`; replicate the rest.

    `fs.fully_shard` adds a data axis.

    >>> params = fs.materialize(init(cfg), specs(cfg, model="model"), mesh, key=fs.key(0))
    >>> params["wte"]
    f32[32@model, 16]
    """
    return specs_with(cfg, model, mlp_specs(cfg, model))


def mlp_specs(cfg: BaseConfig, model: Axis) -> Any:
    """Return the specs of a gated MLP."""
    return {**{name: column_specs(cfg, name, model) for name in ("gate", "up")}, "down": row_specs(cfg, "down", model)}


def specs_with(cfg: BaseConfig, model: Axis, mlp: Any) -> Any:
    """Return the specs of a decoder; `mlp` has the specs of the layer after attention."""
    block = {
        "norm_1": P(), **{name: column_specs(cfg, name, model) for name in "qkv"},
        "proj": row_specs(cfg, "proj", model),
        **({"q_norm": P(), "k_norm": P()} if cfg.qk_norm else {}), "norm_2": P(), **mlp,
    }  # fmt: skip
    head = {} if cfg.tie_word_embeddings else {"head": {"w": P(None, model)}}
    return {"wte": P(model), "h": [block] * cfg.num_hidden_layers, "norm_f": P(), **head}


def column_specs(cfg: BaseConfig, name: str, model: Axis) -> Any:
    """Return the specs of a linear layer whose outputs are split."""
    return {"w": P(None, model), "b": P(model)} if name in cfg.biased else {"w": P(None, model)}


def row_specs(cfg: BaseConfig, name: str, model: Axis) -> Any:
    """Return the specs of a linear layer whose inputs are split."""
    return {"w": P(model), "b": P()} if name in cfg.biased else {"w": P(model)}


def pieces(
    cfg: BaseConfig, ids: Tensor, *, layout: Layout, key: Tensor | None, mask: Tensor | Tokens | None,
    cache: Cache | None = None, block: Callable[..., Any] | None = None, each: Sequence[tuple[Any, ...]] = (),
) -> Pieces:  # fmt: skip
    """Return the parts of the model on ids [B@data, T].

    A relative has its `block(forward, params, x, key, cached, window)`; `each` has more arguments for each block.
    """
    tokens = Tokens.of(ids, mask, cache)
    layout = layout.with_batch(ids, key, cfg.attention_dropout)

    def forward_of(x: Tensor) -> Forward:
        angles = rope_angles(cfg.rope_parameters, cfg.width, cfg.max_position_embeddings, tokens=tokens, layout=layout,
                             dtype=x.dtype)  # fmt: skip
        return Forward(cfg, layout, tokens, angles)

    own = [(window, *more) for window, more in zip(cfg.windows, each or [()] * cfg.num_hidden_layers, strict=True)]
    # x: [B, T, D], or [B, T@model, D] under sequence parallelism
    return Pieces(layout, lambda top: layout.embed(ids, top["wte"], cfg.vocab_size),
                  lambda x: functools.partial(block or _block, forward_of(x)),
                  lambda top, x: norm(cfg, layout, x, top["norm_f"]), own)  # fmt: skip


def norm(cfg: BaseConfig, layout: Layout, x: Tensor, p: Any) -> Tensor:
    """Normalize the stream."""
    return nn.rms_norm(x, layout.replicated(p["w"]), eps=cfg.rms_norm_eps)


class Forward(NamedTuple):
    """The arguments that all blocks of one forward pass share."""

    cfg: BaseConfig
    layout: Layout
    tokens: Tokens
    angles: tuple[Tensor, Tensor]  # the cos and sin that rotate queries and keys

    def norm(self, x: Tensor, p: Any) -> Tensor:
        """Normalize the stream."""
        return norm(self.cfg, self.layout, x, p)

    def attention(
        self, p: Any, x: Tensor, key: Tensor | None, cached: KeyValues | None, window: int | None
    ) -> tuple[Tensor, KeyValues | None]:
        """Compute the first half of a block, and the updated cache; x is the stream."""
        cfg, layout = self.cfg, self.layout
        h = layout.enter(self.norm(x, p["norm_1"]), self.tokens.t)
        q, k, v = (project_heads(h, p[name]) for name in "qkv")  # [B, H@model, T, K], [B, G@model, T, K] twice
        if cfg.qk_norm:
            q_norm, k_norm = pvary((p["q_norm"]["w"], p["k_norm"]["w"]), layout.model)
            q, k = nn.rms_norm(q, q_norm, eps=cfg.rms_norm_eps), nn.rms_norm(k, k_norm, eps=cfg.rms_norm_eps)
        q, k = (rope.rotate(y, *self.angles) for y in (q, k))
        a, cached = causal_attention(q, k, v, self.tokens, cached, layout=layout, rate=cfg.attention_dropout, key=key,
                                     heads=cfg.num_attention_heads, group=cfg.num_attention_heads // cfg.groups,
                                     window=window)  # fmt: skip
        return x + layout.row_linear(a, p["proj"]["w"].flatten(0, -2), p["proj"].get("b")), cached


def _block(
    run: Forward, p: Any, x: Tensor, key: Tensor | None, cached: KeyValues | None, window: int | None
) -> tuple[Tensor, KeyValues | None]:
    """Compute x + attention(norm(x)), then x + mlp(norm(x)); x [B, T, D]{I model}, or [B, T@model, D]."""
    x, cached = run.attention(p, x, key, cached, window)
    h = hidden_units(run.cfg, p, run.layout.enter(run.norm(x, p["norm_2"]), run.tokens.t))
    return x + run.layout.row_linear(h, p["down"]["w"], p["down"].get("b")), cached


def hidden_units(cfg: BaseConfig, p: Any, h: Tensor) -> Tensor:
    """Compute the hidden units of a gated MLP, [B, T, F@model]."""
    return ACTIVATIONS[cfg.hidden_act](flat_linear(h, p["gate"])) * flat_linear(h, p["up"])


apply, states = decoder_of(BaseConfig, init, forward_of(init, pieces))
loss = loss_of(apply, Config)
generate = generate_of(apply, Config)


# --- Hugging Face files ---------------------------------------------------------------------------------------

TOP = {
    "wte": FileTensor("model.embed_tokens.weight"),
    "norm_f.w": FileTensor("model.norm.weight"),
    "head.w": FileTensor("lm_head.weight", "v d -> d v"),
}
ATTENTION = {
    "norm_1.w": FileTensor("input_layernorm.weight"),
    **weight_and_bias("q", "self_attn.q_proj", "(g r k) d -> d g r k", "(g r k) -> g r k"),
    **weight_and_bias("k", "self_attn.k_proj", "(g k) d -> d g k", "(g k) -> g k"),
    **weight_and_bias("v", "self_attn.v_proj", "(g k) d -> d g k", "(g k) -> g k"),
    **weight_and_bias("proj", "self_attn.o_proj", "d (g r k) -> g r k d"),
    "q_norm.w": FileTensor("self_attn.q_norm.weight"),
    "k_norm.w": FileTensor("self_attn.k_norm.weight"),
    "norm_2.w": FileTensor("post_attention_layernorm.weight"),
}
BLOCK = {
    **ATTENTION,
    **weight_and_bias("gate", "mlp.gate_proj", "f d -> d f"),
    **weight_and_bias("up", "mlp.up_proj", "f d -> d f"),
    **weight_and_bias("down", "mlp.down_proj", "d f -> f d"),
}
BLOCKS = "model.layers"


def rotary(config: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Return the rotary positions of a config.json, which old ones have in several fields."""
    return {"rope_parameters": rope.parameters(config, **defaults)}


def _sizes(cfg: BaseConfig) -> dict[str, Any]:
    sizes = {**asdict(cfg), "num_key_value_heads": cfg.groups}
    if cfg.head_dim is None:  # each class has its own way to leave it out
        del sizes["head_dim"]
    return sizes


FILE = ModelFile(
    Config, init, functools.partial(file_tensor, top=TOP, block=BLOCK, blocks=BLOCKS),
    kind="Llama", prefix="model.", fixed={"model_type": "llama"}, ignored=("rotary_emb.inv_freq",),
    absent={"bos_token_id": 1, "eos_token_id": 2}, tied={"lm_head.weight": "model.embed_tokens.weight"},
    other_fields=rotary, sizes=_sizes,
)  # fmt: skip
theirs, config, load, save = file_functions(FILE)


__all__ = ["Cache", "Config", "Layout", "apply", "config", "generate", "init", "load", "loss", "save", "specs",
           "states", "theirs"]  # fmt: skip
