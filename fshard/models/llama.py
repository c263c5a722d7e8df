"""Llama as pure functions, with tensor, sequence and vocabulary parallelism, and fully sharded by its specs.

Legend: B batch, T time, D width, G key and value heads, R heads of queries for each, H = GR, K head width, F hidden
width, V vocabulary; [G@model] is a dim split over an axis; {V} varies over it, {I} does not.
Source: Touvron et al., 2023, "Llama 2"; Ainslie et al., 2023, for grouped queries; weights as in Hugging Face
`LlamaForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from fshard import nn
from fshard.collectives import pvary
from fshard.errors import checked, fail, raise_all
from fshard.nn import rope

from .activations import ACTIVATIONS, activation_errors
from .hf_files import ModelFile, file_functions
from .kv_cache import Cache, KeyValues
from .leaves import Leaf, Leaves, in_blocks, init_of, layer, leaf, specs_of
from .transformer import Layout, Run, check_numbers, decoder_of, flat_linear, functions_of, pieces_of, project_heads


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
        """The sliding window of each layer, in tokens, by fields of some relatives; None attends to all before."""
        window = getattr(self, "sliding_window", None) if getattr(self, "use_sliding_window", True) else None
        kinds, first = getattr(self, "layer_types", None), getattr(self, "max_window_layers", 0)
        late = [i >= first for i in range(self.num_hidden_layers)]
        slides = late if kinds is None else [kind == "sliding_attention" for kind in kinds]
        return [window if slide else None for slide in slides]

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


def has(cfg: BaseConfig, name: str, _: int) -> bool:
    part, last = name.partition(".")[::2]
    if last == "b":
        return part in cfg.biased
    return cfg.qk_norm or part not in ("q_norm", "k_norm")


def decoder_leaves(mlp: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Return the leaves of a decoder with these leaves after attention in each block."""
    return {
        "wte": leaf("model.embed_tokens.weight", "v d"),
        **in_blocks("h", "model.layers", {
            "norm_1.w": leaf("input_layernorm.weight", "d"),
            **layer("q", "self_attn.q_proj", "(g r k) d -> d g r k", "(g r k) -> g r k"),
            **layer("k", "self_attn.k_proj", "(g k) d -> d g k", "(g k) -> g k"),
            **layer("v", "self_attn.v_proj", "(g k) d -> d g k", "(g k) -> g k"),
            **layer("proj", "self_attn.o_proj", "d (g r k) -> g r k d", "d"),
            "q_norm.w": leaf("self_attn.q_norm.weight", "k"),
            "k_norm.w": leaf("self_attn.k_norm.weight", "k"),
            "norm_2.w": leaf("post_attention_layernorm.weight", "d"),
            **mlp,
        }),
        "norm_f.w": leaf("model.norm.weight", "d"),
        "head.w": leaf("lm_head.weight", "v d -> d v"),
    }  # fmt: skip


MLP = {
    **layer("gate", "mlp.gate_proj", "f d -> d f", "f"),
    **layer("up", "mlp.up_proj", "f d -> d f", "f"),
    **layer("down", "mlp.down_proj", "d f -> f d", "d"),
}


def sizes(cfg: BaseConfig) -> dict[str, int]:
    return {"v": cfg.vocab_size, "d": cfg.hidden_size, "g": cfg.groups, "r": cfg.num_attention_heads // cfg.groups,
            "k": cfg.width, "f": cfg.intermediate_size}  # fmt: skip


LEAVES = Leaves(decoder_leaves(MLP), lambda cfg: {"h": cfg.num_hidden_layers}, sizes, has)
init = init_of(LEAVES, BaseConfig)
specs = specs_of(LEAVES, BaseConfig)


def norm(run: Run, x: Tensor, p: Any) -> Tensor:
    return nn.rms_norm(x, run.layout.replicated(p["w"]), eps=run.cfg.rms_norm_eps)


def attention(
    run: Run, p: Any, x: Tensor, key: Tensor | None, cached: KeyValues | None, window: int | None
) -> tuple[Tensor, KeyValues | None]:
    """Compute the first half of a block, and the updated cache; x is the stream."""
    cfg, layout = run.cfg, run.layout
    h = layout.enter(norm(run, x, p["norm_1"]), run.tokens.t)
    q, k, v = (project_heads(h, p[name]) for name in "qkv")  # [B, H@model, T, K], [B, G@model, T, K] twice
    if cfg.qk_norm:
        q_norm, k_norm = pvary((p["q_norm"]["w"], p["k_norm"]["w"]), layout.model)
        q, k = nn.rms_norm(q, q_norm, eps=cfg.rms_norm_eps), nn.rms_norm(k, k_norm, eps=cfg.rms_norm_eps)
    q, k = (rope.rotate(y, *run.angles) for y in (q, k))
    heads = cfg.num_attention_heads
    a, cached = run.attention(q, k, v, key, cached, rate=cfg.attention_dropout, heads=heads,
                              group=heads // cfg.groups, window=window)  # fmt: skip
    return x + layout.row_linear(a, p["proj"]["w"].flatten(0, -2), p["proj"].get("b")), cached


def _block(
    run: Run, p: Any, x: Tensor, key: Tensor | None, cached: KeyValues | None, window: int | None
) -> tuple[Tensor, KeyValues | None]:
    """Compute x + attention(norm(x)), then x + mlp(norm(x)); x [B, T, D]{I model}, or [B, T@model, D]."""
    x, cached = attention(run, p, x, key, cached, window)
    h = hidden_units(run.cfg, p, run.layout.enter(norm(run, x, p["norm_2"]), run.tokens.t))
    return x + run.layout.row_linear(h, p["down"]["w"], p["down"].get("b")), cached


def pieces_with(block: Callable[..., Any]) -> Callable[..., Any]:
    """Make the `pieces` of a decoder with another block, which takes its window; see `pieces_of`."""
    return pieces_of(block, lambda run, top, x: norm(run, x, top["norm_f"]), rates=("attention_dropout",),
                     rotary=lambda cfg: (cfg.rope_parameters, cfg.width, cfg.max_position_embeddings),
                     each=lambda cfg: [(window,) for window in cfg.windows])  # fmt: skip


def hidden_units(cfg: BaseConfig, p: Any, h: Tensor) -> Tensor:
    """Compute the hidden units of a gated MLP, [B, T, F@model]."""
    return ACTIVATIONS[cfg.hidden_act](flat_linear(h, p["gate"])) * flat_linear(h, p["up"])


pieces = pieces_with(_block)
apply, states = decoder_of(BaseConfig, init, pieces)
loss, generate = functions_of(apply, Config)


# --- Hugging Face files ---------------------------------------------------------------------------------------


def rotary(config: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Return the rotary positions of a config.json, which old ones have in several fields."""
    return {"rope_parameters": rope.parameters(config, **defaults)}


def _file_sizes(cfg: BaseConfig) -> dict[str, Any]:
    fields = {**asdict(cfg), "num_key_value_heads": cfg.groups}
    if cfg.head_dim is None:  # each class has its own way to leave it out
        del fields["head_dim"]
    return fields


FILE = ModelFile(
    Config, init, LEAVES.tensor,
    kind="Llama", prefix="model.", fixed={"model_type": "llama"}, ignored=("rotary_emb.inv_freq",),
    absent={"bos_token_id": 1, "eos_token_id": 2}, tied={"lm_head.weight": "model.embed_tokens.weight"},
    other_fields=rotary, sizes=_file_sizes,
)  # fmt: skip
theirs, config, load, save = file_functions(FILE)


__all__ = ["Cache", "Config", "Layout", "apply", "config", "generate", "init", "load", "loss", "save", "specs",
           "states", "theirs"]  # fmt: skip
