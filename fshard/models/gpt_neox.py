"""GPT-NeoX as pure functions, with tensor, sequence and vocabulary parallelism, and fully sharded by its specs.

Legend: B batch, T time, D width, H heads, K head width, F hidden width, V vocabulary; [H@model] is a dim split over
an axis; {V} varies over it, {I} does not.
Source: Black et al., 2022, "GPT-NeoX-20B"; weights as in Hugging Face `GPTNeoXForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fshard import init as initial
from fshard import nn, tree
from fshard._comm import Axis
from fshard.collectives import pvary
from fshard.errors import fail
from fshard.interop.hf import FileTensor, WeightHeaders, config_of, read, write
from fshard.nn import rope
from fshard.spec import P

from .config import read_config, their
from .decoding import Cache, Seen, Tokens
from .stream import ONE_DEVICE, Layout, angles, attend, decode, through

# By their names in Hugging Face; the last two differ in the digits of a constant.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "gelu_new": nn.gelu, "gelu_fast": nn.gelu}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}


@dataclass(frozen=True)
class Config:
    """Sizes and rates, named as in Hugging Face's `GPTNeoXConfig`.

    `rope_parameters` are those of `rope.frequencies`; what they lack of rope_type, rope_theta and
    partial_rotary_factor is "default", 10000 and 0.25.
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

    def __post_init__(self) -> None:
        d, h = self.hidden_size, self.num_attention_heads
        if d % h:
            raise fail("gpt_neox.Config: the heads must divide the width", f"{d} % {h} = {d % h}", hidden_size=d,
                       num_attention_heads=h)  # fmt: skip
        if self.hidden_act not in _ACTIVATIONS:
            raise fail(f"gpt_neox.Config: hidden_act={self.hidden_act!r}", fix=f"one of {list(_ACTIVATIONS)}")
        object.__setattr__(self, "rope_parameters", {**_ROPE, **self.rope_parameters})
        rope.frequencies(self.rope_parameters, d // h, self.max_position_embeddings)  # raises what is wrong with them


def init(cfg: Config) -> Any:
    """The described parameters: matrices are drawn from N(0, initializer_range^2)."""
    d, h, f, v = cfg.hidden_size, cfg.num_attention_heads, cfg.intermediate_size, cfg.vocab_size
    k, std = d // h, cfg.initializer_range

    def norm() -> Any:
        return {"w": initial.ones(d), "b": initial.zeros(d)}

    def linear(shape: tuple[int, ...], bias: tuple[int, ...] | None) -> Any:
        w = {"w": initial.normal(shape, std=std)}
        return w if bias is None else {**w, "b": initial.zeros(bias)}

    def block() -> Any:
        return {
            "ln_1": norm(),
            "qkv": linear((d, 3, h, k), (3, h, k) if cfg.attention_bias else None),
            "proj": linear((h, k, d), (d,) if cfg.attention_bias else None),
            "ln_2": norm(),
            "up": linear((d, f), (f,)),
            "down": linear((f, d), (d,)),
        }

    head = {} if cfg.tie_word_embeddings else {"head": {"w": initial.normal((d, v), std=std)}}
    return {
        "wte": initial.normal((v, d), std=std),
        "h": [block() for _ in range(cfg.num_hidden_layers)],
        "ln_f": norm(),
        **head,
    }


def specs(cfg: Config, *, model: Axis = None) -> Any:
    """Heads, hidden units and the vocabulary over `model`; the rest replicated. `fs.fully_shard` adds a data axis."""
    m, bias = model, cfg.attention_bias
    block = {
        "ln_1": P(),
        "qkv": {"w": P(None, None, m), **({"b": P(None, m)} if bias else {})},
        "proj": {"w": P(m), **({"b": P()} if bias else {})},
        "ln_2": P(),
        "up": {"w": P(None, m), "b": P(m)},
        "down": {"w": P(m), "b": P()},
    }
    head = {} if cfg.tie_word_embeddings else {"head": {"w": P(None, m)}}
    return {"wte": P(m), "h": [block] * cfg.num_hidden_layers, "ln_f": P(), **head}


def apply(
    cfg: Config, params: Any, ids: Tensor, *, layout: Layout = ONE_DEVICE, specs: Any = None, key: Tensor | None = None,
    remat: bool = False, mask: Tensor | None = None, cache: Cache | None = None,
) -> Any:  # fmt: skip
    """Logits of the next token: ids [B@data, T] -> [B@data, T, V@model]; with a `cache`, (logits, the cache after).

    `params` are as placed; give their `specs` where they vary over `layout.data` or are split over it (FSDP): each
    block is then unsharded just before its use. `key` turns dropout on; `remat` recomputes blocks in backward.
    `mask` [B@data, T] is 0 where ids are padding; with a cache it counts the tokens in there too.
    """
    tokens = Tokens.of(ids, mask, cache)
    layout = layout.counted(ids, key, cfg.hidden_dropout, cfg.attention_dropout)
    described = init(cfg)
    top = layout.whole([name for name in described if name != "h"], params, specs, described)

    t = tokens.t
    x = layout.tokens(ids, top["wte"], cfg.vocab_size)  # [B, T, D], or [B, T@model, D] under sequence parallelism
    x = layout.dropout(x, cfg.hidden_dropout, key, "embd", t)
    turn = angles(cfg.rope_parameters, cfg.hidden_size // cfg.num_attention_heads, cfg.max_position_embeddings,
                  tokens=tokens, layout=layout, dtype=x.dtype)  # fmt: skip

    def block(p: Any, x: Tensor, key: Tensor | None, seen: Seen | None) -> tuple[Tensor, Seen | None]:
        return _block(cfg, p, x, layout, key, tokens, turn, seen)

    x, seen = through(block, params["h"], x, layout=layout, shapes=described["h"], key=key, remat=remat, cache=cache,
                      specs=None if specs is None else specs["h"])  # fmt: skip
    x = layout.enter(_norm(cfg, x, top["ln_f"], layout), t)
    w = top["wte"].transpose(0, 1) if cfg.tie_word_embeddings else top["head"]["w"]
    logits = nn.linear(x, w)  # [B, T, V@model]
    return logits if cache is None else (logits, cache.after(seen, t))


Turn = tuple[Tensor, Tensor]  # the cos and sin that queries and keys are turned by


def _block(
    cfg: Config, p: Any, x: Tensor, layout: Layout, key: Tensor | None, tokens: Tokens, turn: Turn, seen: Seen | None
) -> tuple[Tensor, Seen | None]:
    """x + attention(norm(x)), then x + mlp(norm(x)), or both of one x; x [B, T, D]{I model}, or [B, T@model, D]."""
    t, rate = tokens.t, cfg.hidden_dropout
    if not cfg.use_parallel_residual:
        h = layout.enter(_norm(cfg, x, p["ln_1"], layout), t)
        a, seen = _attention(cfg, p, h, layout, key, tokens, turn, seen)
        x = x + layout.dropout(_plus(layout.leave(a), p["proj"], layout), rate, key, "proj", t)
        h = _mlp(cfg, p, layout.enter(_norm(cfg, x, p["ln_2"], layout), t))
        return x + layout.dropout(_plus(layout.leave(h), p["down"], layout), rate, key, "down", t), seen

    # Both norms divide the same x by the same: it enters once, and each norm scales it inside.
    h = layout.enter(nn.layer_norm(x, eps=cfg.layer_norm_eps), t)
    one, two = pvary((p["ln_1"], p["ln_2"]), layout.model)
    a, seen = _attention(cfg, p, h * one["w"] + one["b"], layout, key, tokens, turn, seen)
    h = _mlp(cfg, p, h * two["w"] + two["b"])
    # a and h are parts of sums over model. Their sum is one too, so one transfer does for both; not where a mask of
    # dropout comes between, one for each.
    if not rate or key is None:
        return x + _plus(_plus(layout.leave(a + h), p["proj"], layout), p["down"], layout), seen
    a = layout.dropout(_plus(layout.leave(a), p["proj"], layout), rate, key, "proj", t)
    return x + a + layout.dropout(_plus(layout.leave(h), p["down"], layout), rate, key, "down", t), seen


def _attention(
    cfg: Config, p: Any, h: Tensor, layout: Layout, key: Tensor | None, tokens: Tokens, turn: Turn, seen: Seen | None
) -> tuple[Tensor, Seen | None]:
    """[B, T, D]{V model} -> a part of the sum over model, [B, T, D]{V model}; without the last bias."""
    w, b = p["qkv"]["w"], p["qkv"].get("b")
    flat = nn.linear(h, w.flatten(1), None if b is None else b.flatten())  # [B, T, 3HK]
    qkv: Tensor = flat.unflatten(-1, tuple(w.shape[1:]))  # type: ignore[no-untyped-call]
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, H@model, T, K]
    q, k = (rope.rotate(y, *turn, style="half") for y in (q, k))
    a, seen = attend(q, k, v, tokens, seen, layout=layout, rate=cfg.attention_dropout, key=key,
                     heads=cfg.num_attention_heads)  # fmt: skip
    return nn.linear(a, p["proj"]["w"].flatten(0, 1)), seen


def _mlp(cfg: Config, p: Any, h: Tensor) -> Tensor:
    """[B, T, D]{V model} -> a part of the sum over model, [B, T, D]{V model}; without the last bias."""
    h = _ACTIVATIONS[cfg.hidden_act](nn.linear(h, p["up"]["w"], p["up"]["b"]))  # [B, T, F@model]
    return nn.linear(h, p["down"]["w"])


def _plus(x: Tensor, p: Any, layout: Layout) -> Tensor:
    return x + layout.shared(p["b"]) if "b" in p else x


def _norm(cfg: Config, x: Tensor, p: Any, layout: Layout) -> Tensor:
    p = layout.shared(p)
    return nn.layer_norm(x, p["w"], p["b"], eps=cfg.layer_norm_eps)


def loss(
    cfg: Config, params: Any, ids: Tensor, targets: Tensor, *, layout: Layout = ONE_DEVICE, specs: Any = None,
    key: Tensor | None = None, remat: bool = False, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Mean cross-entropy in nats over all targets of all ranks: [] {I}. Targets of -100 count nothing."""
    logits = apply(cfg, params, ids, layout=layout, specs=specs, key=key, remat=remat, mask=mask)
    return nn.cross_entropy(logits, targets, axis=layout.model, size=cfg.vocab_size, over=layout.data)


def generate(
    cfg: Config, params: Any, ids: Tensor, *, new: int, layout: Layout = ONE_DEVICE, specs: Any = None,
    mask: Tensor | None = None, eos: int | None = None, pad: int | None = None, temperature: float = 0.0,
    key: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`new` more tokens: ids [B@data, T] -> [B@data, T + new]; see `decoding.generate`. Called inside `shard_map`."""
    return decode(apply, cfg, params, ids, layout=layout, specs=specs, new=new, mask=mask, eos=eos, pad=pad,
                  temperature=temperature, key=key)  # fmt: skip


# --- Hugging Face files ---------------------------------------------------------------------------------------

_HEADS = ("lm_head.weight", "embed_out.weight")  # transformers 5 has the first, and writes the second
_TOP = {
    "wte": FileTensor("gpt_neox.embed_in.weight"), "ln_f.w": FileTensor("gpt_neox.final_layer_norm.weight"),
    "ln_f.b": FileTensor("gpt_neox.final_layer_norm.bias"), "head.w": FileTensor("embed_out.weight", "v d -> d v"),
}  # fmt: skip
_BLOCK = {  # their matrices are [out, in]; q, k and v of one head stand together
    "ln_1.w": FileTensor("input_layernorm.weight"), "ln_1.b": FileTensor("input_layernorm.bias"),
    "qkv.w": FileTensor("attention.query_key_value.weight", "(h c k) d -> d c h k"),
    "qkv.b": FileTensor("attention.query_key_value.bias", "(h c k) -> c h k"),
    "proj.w": FileTensor("attention.dense.weight", "d (h k) -> h k d"), "proj.b": FileTensor("attention.dense.bias"),
    "ln_2.w": FileTensor("post_attention_layernorm.weight"), "ln_2.b": FileTensor("post_attention_layernorm.bias"),
    "up.w": FileTensor("mlp.dense_h_to_4h.weight", "f d -> d f"), "up.b": FileTensor("mlp.dense_h_to_4h.bias"),
    "down.w": FileTensor("mlp.dense_4h_to_h.weight", "d f -> f d"), "down.b": FileTensor("mlp.dense_4h_to_h.bias"),
}  # fmt: skip
_FIXED = {"model_type": "gpt_neox"}
_NOT_OURS = (".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq")  # buffers of older versions


def theirs(path: tree.Path) -> FileTensor:
    """The tensor of a Hugging Face file that the leaf at a path is.

    >>> theirs(("h", 3, "qkv", "b"))
    FileTensor(name='gpt_neox.layers.3.attention.query_key_value.bias', dims='(h c k) -> c h k', at=None)
    """
    return their(path, _TOP, _BLOCK, "gpt_neox.layers")


def config(folder: str | Path) -> Config:
    """The `Config` that the `config.json` of a folder sets. Raises ShardingError for another kind of model."""
    given = config_of(folder)
    theta = given.get("rotary_emb_base") or _ROPE["rope_theta"]
    turns = rope.parameters(given, theta=theta, partial=given.get("rotary_pct") or _ROPE["partial_rotary_factor"])
    # A partial_rotary_factor of 1 is left out of them, and a Config's own is another.
    return read_config(folder, Config, _FIXED, rope_parameters={"partial_rotary_factor": 1.0, **turns})


def load(path: str | Path) -> tuple[Config, Any]:
    """The config and the described parameters of a folder that `save_pretrained` wrote; placing them reads them.

    >>> cfg, weights = gpt_neox.load("my-gpt-neox")
    >>> params = fs.materialize(weights, gpt_neox.specs(cfg, model="model"), mesh, key=fs.key(0))

    Raises ShardingError listing every tensor that is missing, of another shape, or not a GPT-NeoX's.
    """
    cfg, scan = config(path), WeightHeaders(Path(path))
    if cfg.tie_word_embeddings:
        tied = dict.fromkeys(_HEADS, _TOP["wte"].name)
        return cfg, read(scan, init(cfg), theirs, prefix="gpt_neox.", ignored=_NOT_OURS, copies=tied)
    head = next((name for name in _HEADS if name in scan.tensors), _HEADS[-1])

    def here(path: tree.Path) -> FileTensor:
        return replace(theirs(path), name=head) if path == ("head", "w") else theirs(path)

    return cfg, read(scan, init(cfg), here, prefix="gpt_neox.", ignored=_NOT_OURS)


def save(path: str | Path, cfg: Config, params: Any, *, max_shard_bytes: int = 5 * 10**9) -> None:
    """Write a folder that `GPTNeoXForCausalLM.from_pretrained` reads; `params` may be placed on a mesh."""
    config = {"architectures": ["GPTNeoXForCausalLM"], **_FIXED, **asdict(cfg)}
    write(path, params, theirs, config=config, max_shard_bytes=max_shard_bytes, described=init(cfg))


__all__ = ["Cache", "Config", "Layout", "apply", "config", "generate", "init", "load", "loss", "save", "specs",
           "theirs"]  # fmt: skip
