"""Llama as pure functions, with tensor, sequence and vocabulary parallelism, and fully sharded by its specs.

Legend: B batch, T time, D width, G key and value heads, R heads of queries for each, H = GR, K head width, F hidden
width, V vocabulary; [G@model] is a dim split over an axis; {V} varies over it, {I} does not.
Source: Touvron et al., 2023, "Llama 2"; Ainslie et al., 2023, for grouped queries; weights as in Hugging Face
`LlamaForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fshard import init as initial
from fshard import nn, tree
from fshard._comm import Axis
from fshard._io import StrPath
from fshard.errors import checked, fail, raise_all
from fshard.interop.hf import FileTensor, config_of, read, write
from fshard.nn import rope
from fshard.spec import P

from .decoding import Cache, KeyValues, Tokens
from .hf_files import file_tensor, read_config, weight_and_bias
from .transformer import (
    ONE_DEVICE,
    Layout,
    apply_blocks,
    causal_attention,
    check_numbers,
    flat_linear,
    generate_of,
    linear_params,
    loss_of,
    project_heads,
    rope_angles,
)


@checked
@dataclass(frozen=True)
class Config:
    """Sizes, rates and rotary positions, named as in Hugging Face's `LlamaConfig`; see `rope.frequencies` for the last.

    >>> Config(num_key_value_heads=8).groups, Config(hidden_size=2048).width
    (8, 64)
    """

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
    attention_bias: bool = False
    mlp_bias: bool = False
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

    def __post_init__(self) -> None:
        check_numbers("llama.Config", self)
        errors = []
        for rule, n, by in (("the heads must divide the width", self.hidden_size, self.num_attention_heads),
                            ("the groups must divide the heads", self.num_attention_heads, self.groups)):  # fmt: skip
            if n % by:
                errors.append(fail(f"llama.Config: {rule}", f"{n} % {by} = {n % by}"))
        if self.hidden_act != "silu":
            errors.append(fail(f"llama.Config: hidden_act={self.hidden_act!r}", fix="silu, the activation of Llama"))
        rotary = self.rope_parameters
        if rotary.get("partial_rotary_factor", 1.0) != 1.0 and rotary.get("rope_type") != "proportional":
            errors.append(fail("llama.Config: Llama rotates all dims of a head", rope_parameters=dict(rotary),
                               fix="leave out partial_rotary_factor"))  # fmt: skip
        raise_all(errors)
        rope.frequencies(rotary, self.width, self.max_position_embeddings)  # raises for incomplete ones


@checked
def init(cfg: Config) -> Any:
    """The described parameters: matrices are drawn from N(0, initializer_range^2), biases are 0, norms 1.

    >>> init(Config(num_key_value_heads=8))["h"][0]["q"]
    {'w': f32[4096, 8, 4, 128] = normal(std=0.02)}
    """
    d, f, g, k, std = cfg.hidden_size, cfg.intermediate_size, cfg.groups, cfg.width, cfg.initializer_range
    r = cfg.num_attention_heads // g

    def block() -> Any:
        return {
            "norm_1": {"w": initial.ones(d)},
            "q": linear_params((d,), (g, r, k), std, bias=cfg.attention_bias),
            "k": linear_params((d,), (g, k), std, bias=cfg.attention_bias),
            "v": linear_params((d,), (g, k), std, bias=cfg.attention_bias),
            "proj": linear_params((g, r, k), (d,), std, bias=cfg.attention_bias),
            "norm_2": {"w": initial.ones(d)},
            "gate": linear_params((d,), (f,), std, bias=cfg.mlp_bias),
            "up": linear_params((d,), (f,), std, bias=cfg.mlp_bias),
            "down": linear_params((f,), (d,), std, bias=cfg.mlp_bias),
        }

    head = {} if cfg.tie_word_embeddings else {"head": linear_params((d,), (cfg.vocab_size,), std, bias=False)}
    return {
        "wte": initial.normal((cfg.vocab_size, d), std=std),
        "h": [block() for _ in range(cfg.num_hidden_layers)],
        "norm_f": {"w": initial.ones(d)},
        **head,
    }


@checked
def specs(cfg: Config, *, model: Axis = None) -> Any:
    """Key and value heads with their queries, hidden units and the vocabulary over `model`; the rest replicated.

    `fs.fully_shard` adds a data axis.
    """
    m = model

    def column(bias: bool) -> Any:
        return {"w": P(None, m), "b": P(m)} if bias else {"w": P(None, m)}

    def row(bias: bool) -> Any:
        return {"w": P(m), "b": P()} if bias else {"w": P(m)}

    block = {
        "norm_1": P(), **{name: column(cfg.attention_bias) for name in ("q", "k", "v")},
        "proj": row(cfg.attention_bias),
        "norm_2": P(), **{name: column(cfg.mlp_bias) for name in ("gate", "up")},
        "down": row(cfg.mlp_bias),
    }  # fmt: skip
    head = {} if cfg.tie_word_embeddings else {"head": {"w": P(None, m)}}
    return {"wte": P(m), "h": [block] * cfg.num_hidden_layers, "norm_f": P(), **head}


@checked
def apply(
    cfg: Config, params: Any, ids: Tensor, *, layout: Layout = ONE_DEVICE, specs: Any = None, key: Tensor | None = None,
    remat: bool = False, mask: Tensor | None = None, cache: Cache | None = None,
) -> Any:  # fmt: skip
    """Logits of the next token: ids [B@data, T] -> [B@data, T, V@model]; with a `cache`, (logits, the updated cache).

    `params` are as placed. Pass their `specs` if they vary over `layout.data` or are split over it (FSDP): each block
    is then unsharded just before it runs. `key` turns dropout on; `remat` recomputes blocks in backward. `mask`
    [B@data, T] is 0 for padding; with a cache it has entries for the cached tokens too.

    With the rope_type dynamic or longrope, angles depend on the longest sequence of the batch so far. Cached keys are
    not rotated again, as in transformers: the logits are not those of one call with all the tokens.
    """
    tokens = Tokens.of(ids, mask, cache)
    layout = layout.with_batch(ids, key, cfg.attention_dropout)
    described = init(cfg)
    top = layout.unshard([name for name in described if name != "h"], params, specs, described)

    t = tokens.t
    x = layout.embed(ids, top["wte"], cfg.vocab_size)  # [B, T, D], or [B, T@model, D] under sequence parallelism
    angles = rope_angles(cfg.rope_parameters, cfg.width, cfg.max_position_embeddings, tokens=tokens, layout=layout,
                         dtype=x.dtype)  # fmt: skip

    x, blocks = apply_blocks(lambda p, x, key, cached: _block(cfg, p, x, layout, key, tokens, angles, cached),
                             params, x, layout=layout, described=described, specs=specs, key=key, remat=remat,
                             cache=cache)  # fmt: skip
    x = layout.enter(_norm(cfg, x, top["norm_f"], layout), t)
    w = top["wte"].transpose(0, 1) if cfg.tie_word_embeddings else top["head"]["w"]
    logits = nn.linear(x, w)  # [B, T, V@model]
    return logits if cache is None else (logits, cache.updated(blocks, t))


def _block(
    cfg: Config, p: Any, x: Tensor, layout: Layout, key: Tensor | None, tokens: Tokens, angles: tuple[Tensor, Tensor],
    cached: KeyValues | None,
) -> tuple[Tensor, KeyValues | None]:  # fmt: skip
    """x + attention(norm(x)), then x + mlp(norm(x)); x [B, T, D]{I model}, or [B, T@model, D]."""
    h = layout.enter(_norm(cfg, x, p["norm_1"], layout), tokens.t)
    q, k, v = (project_heads(h, p[name]) for name in ("q", "k", "v"))  # [B, H@model, T, K], [B, G@model, T, K] twice
    q, k = (rope.rotate(y, *angles) for y in (q, k))
    a, cached = causal_attention(q, k, v, tokens, cached, layout=layout, rate=cfg.attention_dropout, key=key,
                                 heads=cfg.num_attention_heads,
                                 group=cfg.num_attention_heads // cfg.groups)  # fmt: skip
    x = x + layout.row_linear(a, p["proj"]["w"].flatten(0, -2), p["proj"].get("b"))

    h = layout.enter(_norm(cfg, x, p["norm_2"], layout), tokens.t)
    h = F.silu(flat_linear(h, p["gate"])) * flat_linear(h, p["up"])  # [B, T, F@model]
    return x + layout.row_linear(h, p["down"]["w"], p["down"].get("b")), cached


def _norm(cfg: Config, x: Tensor, p: Any, layout: Layout) -> Tensor:
    return nn.rms_norm(x, layout.replicated(p["w"]), eps=cfg.rms_norm_eps)


loss = loss_of(apply, Config)
generate = generate_of(apply, Config)


# --- Hugging Face files ---------------------------------------------------------------------------------------

_TOP = {
    "wte": FileTensor("model.embed_tokens.weight"),
    "norm_f.w": FileTensor("model.norm.weight"),
    "head.w": FileTensor("lm_head.weight", "v d -> d v"),
}
_BLOCK = {
    "norm_1.w": FileTensor("input_layernorm.weight"),
    **weight_and_bias("q", "self_attn.q_proj", "(g r k) d -> d g r k", "(g r k) -> g r k"),
    **weight_and_bias("k", "self_attn.k_proj", "(g k) d -> d g k", "(g k) -> g k"),
    **weight_and_bias("v", "self_attn.v_proj", "(g k) d -> d g k", "(g k) -> g k"),
    **weight_and_bias("proj", "self_attn.o_proj", "d (g r k) -> g r k d"),
    "norm_2.w": FileTensor("post_attention_layernorm.weight"),
    **weight_and_bias("gate", "mlp.gate_proj", "f d -> d f"),
    **weight_and_bias("up", "mlp.up_proj", "f d -> d f"),
    **weight_and_bias("down", "mlp.down_proj", "d f -> f d"),
}
_FIXED = {"model_type": "llama"}
_ABSENT = {"bos_token_id": 1, "eos_token_id": 2}  # of a config.json without them
_IGNORED = ("rotary_emb.inv_freq",)  # a buffer of older versions


@checked
def theirs(path: tree.Path) -> FileTensor:
    """The Hugging Face file tensor of the leaf at a path.

    >>> theirs(("h", 3, "q", "w"))
    FileTensor(name='model.layers.3.self_attn.q_proj.weight', dims='(g r k) d -> d g r k', at=None)
    """
    return file_tensor(path, _TOP, _BLOCK, "model.layers")


@checked
def config(folder: StrPath) -> Config:
    """Read a `Config` from the `config.json` of a folder. Raises ShardingError for another type of model."""
    return read_config(folder, Config, _FIXED, _ABSENT, rope_parameters=rope.parameters(config_of(folder)))


@checked
def load(path: StrPath) -> tuple[Config, Any]:
    """The config and the described parameters of a folder written by `save_pretrained`; placing them reads them.

    >>> cfg, weights = llama.load("my-llama")
    >>> params = fs.materialize(weights, llama.specs(cfg, model="model"), mesh, key=fs.key(0))

    Raises ShardingError listing every tensor that is missing, of another shape, or not a Llama's.
    """
    cfg = config(path)
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if cfg.tie_word_embeddings else {}
    return cfg, read(path, init(cfg), theirs, prefix="model.", ignored=_IGNORED, copies=tied)


@checked
def save(
    path: StrPath, cfg: Config, params: Any, *, like: StrPath | None = None, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Write a folder that `LlamaForCausalLM.from_pretrained` reads; `params` may be placed on a mesh.

    `like`: see `hf.save`.
    """
    sizes = {**asdict(cfg), "num_key_value_heads": cfg.groups, "head_dim": cfg.width}
    config = {"architectures": ["LlamaForCausalLM"], **_FIXED, **sizes}
    write(path, params, theirs, config=config, like=like, max_shard_bytes=max_shard_bytes, described=init(cfg))


__all__ = ["Cache", "Config", "Layout", "apply", "config", "generate", "init", "load", "loss", "save", "specs",
           "theirs"]  # fmt: skip
