"""T5 as pure functions: an encoder and a decoder, with tensor, sequence and vocabulary parallelism, sharded by specs.

Legend: B batch, S source tokens, T target tokens, D width, H heads, K head width, F hidden width, V vocabulary, N
buckets of distances; [H@model] is a dim split over an axis; {V} varies over it, {I} does not.
Source: Raffel et al., 2019, "Exploring the Limits of Transfer Learning"; Shazeer, 2020, for the gated layers; Xue et
al., 2020, "mT5"; Chung et al., 2023, "UniMax" for umT5; weights as in Hugging Face `T5ForConditionalGeneration`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard import nn
from fshard._core.files.io import StrPath
from fshard._core.ops import global_size, own_range
from fshard.collectives import all_gather, pvary
from fshard.errors import checked, fail, raise_all
from fshard.interop.hf import WeightHeaders, config_of, tensors
from fshard.nn import decoding
from fshard.nn.decoding import Decoder, Options, check_ids
from fshard.nn.decoding.options import with_tokens
from fshard.random import fold_in
from fshard.spec import P

from .activations import ACTIVATIONS, activated, activation_errors
from .hf_files import ModelFile, file_functions
from .kv_cache import Cache, KeyValues, Tokens, append_to_cache
from .leaves import Leaf, Leaves, in_blocks, layer, leaf, specs_of
from .transformer import (
    ONE_DEVICE,
    Layout,
    apply_blocks,
    check_numbers,
    flat_linear,
    fold_name,
    project_heads,
    shapes_of,
    spec_of,
)

_STACKS = ("encoder", "decoder")


@checked
@dataclass(frozen=True)
class Config:
    """Sizes, rates and tokens, named as in Hugging Face's `T5Config`.

    `feed_forward_proj` is the activation of a plain layer, or "gated-" and the activation of a gated one;
    "gated-gelu" is the tanh form. With `tie_word_embeddings` the head is the token embedding. `scale_decoder_outputs`
    divides the states before the head by sqrt(d_model), as the first T5 does. In a umt5 each block has its own relative
    positions.

    >>> Config(feed_forward_proj="gated-gelu").activation, Config(num_layers=3).decoder_layers
    ('gelu_new', 3)
    """

    model_type: str = "t5"  # or "mt5", "umt5"
    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 6
    num_decoder_layers: int | None = None  # None: num_layers
    num_heads: int = 8
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    dropout_rate: float = 0.1
    layer_norm_epsilon: float = 1e-6
    initializer_factor: float = 1.0
    feed_forward_proj: str = "relu"
    tie_word_embeddings: bool = True
    scale_decoder_outputs: bool = True
    decoder_start_token_id: int | None = 0
    pad_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 1  # one or more tokens that end a text

    @property
    def decoder_layers(self) -> int:
        """The number of blocks of the decoder."""
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    @property
    def gated(self) -> bool:
        """True if a second projection gates the hidden units."""
        return self.feed_forward_proj.startswith("gated-")

    @property
    def activation(self) -> str:
        """The name of the activation of the hidden units."""
        return _activation(self.feed_forward_proj)

    @property
    def shares_positions(self) -> bool:
        """True if the blocks of a stack have their relative positions in common."""
        return self.model_type != "umt5"

    def __post_init__(self) -> None:
        check_numbers("t5.Config", self)
        n, longest = self.relative_attention_num_buckets, self.relative_attention_max_distance
        errors = activation_errors("t5.Config", "feed_forward_proj", self.activation)
        if self.model_type not in _CLASSES:
            errors.append(fail(f"t5.Config: model_type={self.model_type!r}", fix=f"one of {', '.join(_CLASSES)}"))
        if n < 4:
            errors.append(fail(f"t5.Config: relative_attention_num_buckets={n}", "half of them are for each direction, "
                               "and half of those for distances of their own", fix="4 or more"))  # fmt: skip
        if longest <= n // 2:
            errors.append(fail(f"t5.Config: relative_attention_max_distance={longest}",
                               f"{n} buckets hold the distances up to {n // 2} exactly",
                               fix=f"{n // 2 + 1} or more, or fewer buckets"))  # fmt: skip
        raise_all(errors)


def _activation(feed_forward_proj: str) -> str:
    name = feed_forward_proj.removeprefix("gated-")
    return "gelu_new" if feed_forward_proj == "gated-gelu" else name


def _leaves() -> dict[str, Leaf]:
    """Return the leaves by name; the matrices in files are [out, in]."""
    bias = "SelfAttention.relative_attention_bias.weight"
    leaves = {"wte": leaf("shared.weight", "v d")}
    for stack, layers in (("encoder", ("attn", "mlp")), ("decoder", ("attn", "cross", "mlp"))):
        leaves[f"{stack}.bias"] = leaf(f"{stack}.block.0.layer.0.{bias}", "n h")
        inner = {"attn.bias": leaf(f"layer.0.{bias}", "n h")}
        for i, name in enumerate(layers):
            inner[f"{name}.norm.w"] = leaf(f"layer.{i}.layer_norm.weight", "d")
            if name == "mlp":
                file = f"layer.{i}.DenseReluDense"
                for ours, stored in (("up", "wi"), ("gate", "wi_0"), ("linear", "wi_1")):
                    inner |= layer(f"mlp.{ours}", f"{file}.{stored}", "f d -> d f")
                inner |= layer("mlp.down", f"{file}.wo", "d f -> f d")
                continue
            file = f"layer.{i}.{'SelfAttention' if name == 'attn' else 'EncDecAttention'}"
            for part in "qkv":
                inner |= layer(f"{name}.{part}", f"{file}.{part}", "(h k) d -> d h k")
            inner |= layer(f"{name}.proj", f"{file}.o", "d (h k) -> h k d")
        leaves |= in_blocks(f"{stack}.h", f"{stack}.block", inner)
        leaves[f"{stack}.norm_f.w"] = leaf(f"{stack}.final_layer_norm.weight", "d")
    return {**leaves, "head.w": leaf("lm_head.weight", "v d -> d v")}


def _has(cfg: Config, name: str, _: int) -> bool:
    if name in ("mlp.up.w", "mlp.gate.w", "mlp.linear.w"):
        return cfg.gated != (name == "mlp.up.w")
    return not name.endswith("bias") or cfg.shares_positions != (name == "attn.bias")


def _std(cfg: Config, name: str) -> float:
    d, k = cfg.d_model, cfg.d_kv
    fans = {"wte": 1, "head": 1, "q": d * k, "proj": cfg.num_heads * k, "down": cfg.d_ff}  # d of the others
    return cfg.initializer_factor * float(fans.get(name.removesuffix(".w").rpartition(".")[2], d) ** -0.5)


LEAVES = Leaves(
    _leaves(), lambda cfg: {"encoder.h": cfg.num_layers, "decoder.h": cfg.decoder_layers}, has=_has, std=_std,
    sizes=lambda cfg: {"v": cfg.vocab_size, "d": cfg.d_model, "h": cfg.num_heads, "k": cfg.d_kv, "f": cfg.d_ff,
                       "n": cfg.relative_attention_num_buckets},
    scale=lambda cfg: cfg.initializer_factor,
)  # fmt: skip


@checked
def init(cfg: Config) -> Any:
    """Return the described parameters: matrices have the std of T5, which its attention without a scale needs.

    >>> init(Config())["encoder"]["bias"], init(Config())["decoder"]["h"][0]["cross"]["q"]
    (f32[32, 8] = normal(std=0.04419), {'w': f32[512, 8, 64] = normal(std=0.005524)})
    """
    return LEAVES.init(cfg)


specs = specs_of(LEAVES, Config)


@checked
def apply(
    cfg: Config, params: Any, ids: Tensor, decoder_ids: Tensor, *, layout: Layout = ONE_DEVICE, specs: Any = None,
    key: Tensor | None = None, remat: bool = False, mask: Tensor | None = None, decoder_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return logits of the next target token: ids [B@data, S], decoder_ids [B@data, T] -> [B@data, T, V@model].

    The first of `decoder_ids` is `cfg.decoder_start_token_id`. `params` are as placed. Pass their `specs` if they vary
    over `layout.data` or are split over it (FSDP): each block is then unsharded just before it runs. `key` turns
    dropout on; `remat` recomputes blocks in backward. `mask` [B@data, S] and `decoder_mask` [B@data, T] are 0 for
    padding, on either side: no token attends to it. With `layout.context` ids and `mask` are [B@data, S@context], for
    the encoder; the decoder runs on each rank, with all of the source.

    >>> apply(cfg, params, ids, ids).shape
    torch.Size([2, 4, 32])
    """
    if layout.context:
        states = encode(cfg, params, ids, layout=layout, specs=specs, key=key, remat=remat, mask=mask)
        size = global_size("t5", ids.shape[1], layout.context)
        states, mask = all_gather((states, mask), layout.context, 1, size=size, to="invariant")
        logits: Tensor = decode(cfg, params, states, decoder_ids, layout=replace(layout, context=None), specs=specs,
                                key=key, remat=remat, mask=mask, decoder_mask=decoder_mask)  # fmt: skip
        return logits
    call = _Call.of(cfg, params, ids, layout, specs, key, remat, tuple(shapes_of(init, cfg)))
    source = layout.enter(_encode(call, ids, mask), ids.shape[1])  # once for all blocks
    return _decode(call, source, decoder_ids, mask, decoder_mask, None)[0]


@checked
def encode(
    cfg: Config, params: Any, ids: Tensor, *, layout: Layout = ONE_DEVICE, specs: Any = None, key: Tensor | None = None,
    remat: bool = False, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the encoder's last hidden states: ids [B@data, S] -> [B@data, S, D]{I model}; arguments as of `apply`.

    With `layout.context` ids, mask and states are [B@data, S@context, ..]. The parameters need neither a decoder nor a
    head.

    >>> encode(cfg, params, ids).shape
    torch.Size([2, 4, 16])
    """
    call = _Call.of(cfg, params, ids, layout, specs, key, remat, ("wte", "encoder"))
    return layout.whole(_encode(call, ids, mask), ids.shape[1])


@checked
def decode(
    cfg: Config, params: Any, states: Tensor, decoder_ids: Tensor, *, layout: Layout = ONE_DEVICE, specs: Any = None,
    key: Tensor | None = None, remat: bool = False, mask: Tensor | None = None, decoder_mask: Tensor | None = None,
    cache: Cache | None = None,
) -> Any:  # fmt: skip
    """Return the second half of `apply`: states [B@data, S, D]{I model} of `encode`, decoder_ids [B@data, T] -> logits.

    `mask` is the source's. With a `cache` the result is (logits, the updated cache): it has the keys and values
    of the tokens before, which `decoder_mask` covers too, and of the source, which is projected by the first call only.

    >>> decode(cfg, params, encode(cfg, params, ids), ids).shape
    torch.Size([2, 4, 32])
    """
    layout.refuse_context("t5.decode")
    names = tuple(name for name in shapes_of(init, cfg) if name != "encoder")
    call = _Call.of(cfg, params, decoder_ids, layout, specs, key, remat, names)
    logits, cache = _decode(call, pvary(states, layout.model), decoder_ids, mask, decoder_mask, cache)
    return logits if cache is None else (logits, cache)


class _Call(NamedTuple):
    """The arguments of a call, and the parameters outside of the blocks, unsharded."""

    cfg: Config
    params: Any
    layout: Layout
    specs: Any
    key: Tensor | None
    remat: bool
    top: dict[str, Any]

    @staticmethod
    def of(
        cfg: Config, params: Any, ids: Tensor, layout: Layout, specs: Any, key: Tensor | None, remat: bool,
        names: tuple[str, ...],
    ) -> _Call:  # fmt: skip
        """Unshard the named parts of the parameters; ids [B, ...] have this rank's batch."""
        check_ids("t5", ids)
        layout = layout.with_batch(ids, key, cfg.dropout_rate)
        trees = (_without_blocks(parts) for parts in (params, specs, shapes_of(init, cfg)))
        return _Call(cfg, params, layout, specs, key, remat, layout.unshard(names, *trees))


def _without_blocks(parts: Any) -> Any:
    """Return the parts of a tree without the blocks of its stacks; one P for all of them is returned unchanged."""
    if not isinstance(parts, Mapping):
        return parts
    return {name: {n: p for n, p in part.items() if n != "h"} if name in _STACKS and isinstance(part, Mapping) else part
            for name, part in parts.items()}  # fmt: skip


def _encode(call: _Call, ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return the normalized stream after the last block, [B, S, D]{I model}, or [B, S@model, D]."""
    axis = call.layout.context
    call.layout.refuse_zigzag("t5")
    size = global_size("t5", ids.shape[1], axis) if axis else ids.shape[1]
    first, n = own_range("t5", size, axis)
    at = torch.arange(size, device=ids.device)
    buckets = _buckets(at - at[first : first + n].unsqueeze(1), call.cfg, bidirectional=True)
    attended = all_gather(_attended(mask, *ids.shape), axis, 3, size=size)
    stack = _Stack(call.cfg, call.layout, Tokens.of(ids)._replace(size=size), buckets, attended, None)
    return _run_stack("encoder", call, stack, ids, (), None)[0]


def _decode(
    call: _Call, source: Tensor, ids: Tensor, mask: Tensor | None, decoder_mask: Tensor | None, cache: Cache | None
) -> tuple[Tensor, Cache | None]:
    """Return the logits [B, T, V@model], and the updated cache; source [B, S, D]{V model}."""
    cfg, tokens = call.cfg, Tokens.of(ids, decoder_mask, cache)
    if len(source) != len(ids) and not (cache and cache.blocks):  # beams have more rows than the source, in a cache
        raise fail("t5: the decoder needs a row for each row of the source", source=len(source), decoder_ids=len(ids))
    at = torch.arange(tokens.start + tokens.t, device=ids.device)
    own = tokens.mask
    if own is None and tokens.t > 1:
        own = nn.causal_mask(tokens.t, len(at), device=ids.device)
    buckets = _buckets(at - at[tokens.start :].unsqueeze(1), cfg, bidirectional=False)
    stack = _Stack(cfg, call.layout, tokens, buckets, own, _attended(mask, len(ids), source.shape[1]))
    x, blocks = _run_stack("decoder", call, stack, ids, (source,), cache)
    if cfg.scale_decoder_outputs:
        x = x * cfg.d_model**-0.5
    head = call.top["wte"].transpose(0, 1) if cfg.tie_word_embeddings else call.top["head"]["w"]
    logits = nn.linear(call.layout.enter(x, tokens.t), head)
    return logits, None if cache is None else cache.updated(blocks, tokens.t)


def _attended(mask: Tensor | None, b: int, s: int) -> Tensor | None:
    """Return the mask [B, 1, 1, S], True where tokens attend to a position of the source, of a mask [B, S]."""
    if mask is None:
        return None
    if tuple(mask.shape) != (b, s):
        raise fail("t5: the mask must have one entry for each token of the source", mask=list(mask.shape),
                   needed=[b, s])  # fmt: skip
    return (mask != 0)[:, None, None, :]


def _buckets(distance: Tensor, cfg: Config, *, bidirectional: bool) -> Tensor:
    """Return the bucket of each distance [T, S] from a token to the position it attends to: [T, S] in 0 .. N - 1.

    Half of the buckets have one distance each, the others logarithmically more, up to the longest distance and beyond.
    In both directions each has half of the buckets; in one, positions ahead are as near as the token itself.
    """
    n, longest = cfg.relative_attention_num_buckets, cfg.relative_attention_max_distance
    ahead: Tensor | int = 0
    if bidirectional:
        n //= 2
        ahead, distance = (distance > 0) * n, distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = n // 2
    # In float32 and in this order, as in transformers: the last bit decides at the border of a bucket.
    scale = torch.log(distance.clamp(min=exact).float() / exact) / math.log(longest / exact) * (n - exact)
    far = (exact + scale.long()).clamp(max=n - 1)
    return ahead + torch.where(distance < exact, distance, far)


class _Stack(NamedTuple):
    """The arguments that all blocks of one stack share; none of them is differentiated."""

    cfg: Config
    layout: Layout
    tokens: Tokens
    buckets: Tensor  # [T, S]
    attended: Tensor | None  # [1 or B, 1, T or 1, S] or [T, S], True where a token attends to a position of its stack
    source_attended: Tensor | None  # [B, 1, 1, S], True for the positions of the source that a token attends to

    def bias(self, table: Tensor) -> Tensor:
        """Return what to add to scores, by a table [N, H@model]: [1 or B, H@model, T, S]; -inf for no attention."""
        out = nn.embedding(self.buckets, table).permute(2, 0, 1).unsqueeze(0)
        return out if self.attended is None else out.masked_fill(~self.attended, -math.inf)

    def norm(self, x: Tensor, p: Any) -> Tensor:
        return nn.rms_norm(x, self.layout.replicated(p["w"]), eps=self.cfg.layer_norm_epsilon)

    def enter(self, x: Tensor, p: Any) -> Tensor:
        """Return the normalized stream as all ranks over `model` use it: [B, T, D]{V model}."""
        return self.layout.enter(self.norm(x, p), self.tokens.t)

    def dropout(self, x: Tensor, key: Tensor | None, name: str) -> Tensor:
        return self.layout.dropout(x, self.cfg.dropout_rate, key, name, self.tokens.total)

    def attention(self, q: Tensor, kv: KeyValues, mask: Tensor | None, p: Any, key: Tensor | None, name: str) -> Tensor:
        """Attend, without a scale: q [B, H@model, T, K], keys and values [B, H@model, S, K] -> the stream."""
        layout = self.layout
        shape = (len(q), self.cfg.num_heads, self.tokens.total, kv.k.shape[2])
        drop = layout.weight_dropout(self.cfg.dropout_rate, key, shape, name, layout.context)
        a = nn.attention(q, kv.k, kv.v, mask=mask, scale=1.0, **drop)
        a = layout.row_linear(a.transpose(1, 2).flatten(2), p["proj"]["w"].flatten(0, 1))
        return self.dropout(a, key, f"{name}.proj")

    def mlp(self, x: Tensor, p: Any, key: Tensor | None) -> Tensor:
        """Run the feed-forward layer, with dropout of its hidden units [B, T, F@model]."""
        cfg, layout = self.cfg, self.layout
        h = self.enter(x, p["norm"])
        if cfg.gated:
            h = ACTIVATIONS[cfg.activation](flat_linear(h, p["gate"])) * flat_linear(h, p["linear"])
        else:
            h = activated(cfg.activation, flat_linear(h, p["up"]), p["down"]["w"])
        if cfg.dropout_rate and key is not None:
            h = nn.dropout(h, cfg.dropout_rate, key=fold_in(key, "hidden"),
                           spec=P(layout.data, layout.context, layout.model),
                           shape=layout.global_shape((len(h), self.tokens.total, cfg.d_ff)))  # fmt: skip
        return self.dropout(layout.row_linear(h, p["down"]["w"]), key, "down")


def _run_stack(
    name: str, call: _Call, stack: _Stack, ids: Tensor, source: tuple[Tensor, ...], cache: Cache | None
) -> tuple[Tensor, list[Any]]:
    """Embed ids and apply the blocks of a stack: the normalized stream, and the keys and values of each block."""
    cfg, layout, own, key = call.cfg, call.layout, call.top[name], fold_name(call.key, name)
    x = stack.dropout(layout.embed(ids, call.top["wte"], cfg.vocab_size), key, "embd")
    # The blocks pass on the bias and the source, which are differentiated, with the stream: scan captures no tensor,
    # and their gradients are summed block by block.
    bias = (stack.bias(own["bias"]),) if cfg.shares_positions else ()
    (x, *_), blocks = apply_blocks(
        functools.partial(_block, stack), call.params[name], (x, *bias, *source), layout=layout,
        described=shapes_of(init, cfg)[name], specs=None if call.specs is None else spec_of(call.specs, name), key=key,
        remat=call.remat, cache=cache, label=f"params[{name!r}]",
    )  # fmt: skip
    return stack.dropout(stack.norm(x, own["norm_f"]), key, "final"), blocks


def _block(
    stack: _Stack, p: Any, carried: tuple[Tensor, ...], key: Tensor | None, cached: tuple[KeyValues, KeyValues] | None
) -> tuple[tuple[Tensor, ...], Any]:
    """Add attention, attention to the source in a decoder, and mlp to x, each of the norm of what is before it.

    `carried` are the stream x [B, T, D]{I model}, or [B, T@model, D], the bias if the blocks share it, and the source.
    """
    (x, *rest), attn = carried, p["attn"]
    bias = rest[0] if stack.cfg.shares_positions else stack.bias(attn["bias"])
    own, cross = cached or (None, None)

    h = stack.enter(x, attn["norm"])
    q, k, v = (project_heads(h, attn[name]) for name in "qkv")  # each [B, H@model, T, K]
    k, v, own = append_to_cache(k, v, stack.tokens, own)
    k, v = all_gather((k, v), stack.layout.context, 2, size=stack.tokens.total)  # of an encoder
    x = _finite(x + stack.attention(q, KeyValues(k, v), bias, attn, key, "attn"))

    if "cross" in p:
        q = project_heads(stack.enter(x, p["cross"]["norm"]), p["cross"]["q"])
        if cross is None:
            cross = KeyValues(*(project_heads(rest[-1], p["cross"][name]) for name in "kv"))
        x = _finite(x + stack.attention(q, cross, stack.source_attended, p["cross"], key, "cross"))

    return (_finite(x + stack.mlp(x, p["mlp"], key)), *rest), (own, cross)


def _finite(x: Tensor) -> Tensor:
    """Replace infinities, which a pretrained T5 reaches in float16, by the largest numbers of this dtype.

    In transformers one infinity lowers this bound by 1000 for all of the batch, here it does not depend on the others.
    """
    largest = torch.finfo(torch.float16).max
    return x.clamp(-largest, largest) if x.dtype == torch.float16 else x


@checked
def loss(
    cfg: Config, params: Any, ids: Tensor, targets: Tensor, *, layout: Layout = ONE_DEVICE, specs: Any = None,
    key: Tensor | None = None, remat: bool = False, mask: Tensor | None = None, decoder_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the mean cross-entropy in nats over the targets [B@data, T] of all ranks: [] {I}. -100 is ignored.

    The decoder is fed the targets one position later (`shifted`); the other arguments are as in `apply`.

    >>> loss(cfg, params, ids, ids)
    tensor(1.23...)
    """
    logits = apply(cfg, params, ids, shifted(cfg, targets), layout=layout, specs=specs, key=key, remat=remat, mask=mask,
                   decoder_mask=decoder_mask)  # fmt: skip
    return nn.cross_entropy(logits, targets, axis=layout.model, size=cfg.vocab_size, over=layout.data,
                            donate=True)  # fmt: skip


@checked
def shifted(cfg: Config, targets: Tensor) -> Tensor:
    """Return a decoder's inputs to predict targets [B, T]: the start, then the targets before; -100 is padding.

    >>> shifted(Config(), torch.tensor([[5, 1, -100]]))
    tensor([[0, 5, 1]])

    Raises ShardingError if the config has no pad_token_id.
    """
    check_ids("shifted", targets, "targets")
    if cfg.pad_token_id is None:
        raise fail("t5: targets need pad_token_id, which replaces -100", fix="Config(pad_token_id=0)")
    before = torch.cat([_start(cfg, targets), targets], 1)[:, :-1]
    return before.masked_fill(before == -100, cfg.pad_token_id)


def _start(cfg: Config, ids: Tensor) -> Tensor:
    """Return the first token of the decoder for each row of ids: [B, 1]; no token if the rows have none."""
    if cfg.decoder_start_token_id is None:
        raise fail("t5: the decoder needs a first token, and decoder_start_token_id is None",
                   fix="Config(decoder_start_token_id=0); for most models it is pad_token_id")  # fmt: skip
    return torch.full_like(ids[:, :1], cfg.decoder_start_token_id)


@checked
def generate(
    cfg: Config, params: Any, ids: Tensor, *, new: int, layout: Layout = ONE_DEVICE, specs: Any = None,
    mask: Tensor | None = None, key: Tensor | None = None, on_token: Callable[..., Any] | None = None,
    decoder_ids: Tensor | None = None, decoder_mask: Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Generate `new` target tokens for each source: ids [B@data, S] -> [B@data, 1 + new]. Inside `shard_map`.

    The first token is `cfg.decoder_start_token_id`; or `decoder_ids` [B@data, T] are continued, to [B@data, T + new],
    padded on the left where `decoder_mask` is 0. The source is encoded once, and each block projects it once. `mask`
    [B@data, S] is 0 for padding of the source. The rest is as for `gpt2.generate`: the likeliest token, draws by `key`,
    beams, the end of a text, and all other `options` of `fs.decoding.Options`.

    >>> generate(cfg, params, ids, new=3).shape
    torch.Size([2, 4])

    Raises ShardingError for sources without tokens.
    """
    layout.refuse_context("generate")
    chosen = Options.of(with_tokens(options, cfg.eos_token_id, cfg.pad_token_id, cfg.vocab_size))
    check_ids("generate", ids)
    if not ids.shape[1]:
        raise fail("generate: the source has no tokens", ids=list(ids.shape))
    first = _start(cfg, ids) if decoder_ids is None else decoder_ids
    check_ids("generate", first, "decoder_ids")
    with torch.no_grad():
        states = encode(cfg, params, ids, layout=layout, specs=specs, mask=mask)
    layout = replace(layout, sequence=False)  # one token has no sequence to split

    def step(
        ids: Tensor, decoder_mask: Tensor | None, state: tuple[Cache, Tensor | None]
    ) -> tuple[Tensor, tuple[Cache, Tensor | None]]:
        logits, cache = decode(cfg, params, states, ids, layout=layout, specs=specs, mask=state[1],
                               decoder_mask=decoder_mask, cache=state[0])  # fmt: skip
        return logits[:, -1], (cache, state[1])

    def reorder(state: tuple[Cache, Tensor | None], rows: Tensor) -> tuple[Cache, Tensor | None]:
        return state[0].reordered(rows), None if state[1] is None else state[1].index_select(0, rows)

    decoder = Decoder(step, reorder, (Cache(first.shape[1] + new), mask))
    return decoding.generate(decoder, first, new=new, size=cfg.vocab_size, options=chosen, data=layout.data,
                             model=layout.model, mask=decoder_mask, key=key, on_token=on_token)  # fmt: skip


# --- Hugging Face files ---------------------------------------------------------------------------------------


_CLASSES = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5"}


class _T5File(ModelFile):
    def read_config(self, folder: StrPath, **others: Any) -> Any:
        """Read a config, whose fixed options depend on the type of model and on the activation."""
        contents = config_of(folder)
        kind = contents.get("model_type")
        feed_forward = contents.get("feed_forward_proj", "gated-gelu" if kind in ("mt5", "umt5") else "relu")
        tied = contents.get("tie_word_embeddings", True) is not False
        scaled = {"t5": tied, "mt5": False}.get(str(kind), True)  # as transformers 5: for umt5 whatever the file says
        fixed = {"model_type": kind if kind in _CLASSES else "t5", **self.fixed, "is_decoder": False}
        if isinstance(feed_forward, str):
            fixed |= {"dense_act_fn": _activation(feed_forward), "is_gated_act": feed_forward.startswith("gated-")}
        others = {"feed_forward_proj": feed_forward, "tie_word_embeddings": tied,
                  "scale_decoder_outputs": contents.get("scale_decoder_outputs", scaled),
                  "decoder_start_token_id": contents.get("decoder_start_token_id"), **others}  # fmt: skip
        return ModelFile.read_config(replace(self, fixed=fixed), folder, **others)


def _with_head_of(cfg: Config, headers: WeightHeaders) -> Config:
    """Return the config with the head that the folder has; transformers 5 does not tell it in config.json."""
    tied = "lm_head.weight" not in headers.tensors or (cfg.tie_word_embeddings and _begin_alike(headers))
    return replace(cfg, tie_word_embeddings=tied)


def _begin_alike(headers: WeightHeaders) -> bool:
    """Return whether head and token embedding begin alike. If later rows differ, placing the leaf raises."""
    embedding, head = (tensors(headers.path).get(name) for name in ("shared.weight", "lm_head.weight"))
    if embedding is None or head is None or (embedding.shape, embedding.dtype) != (head.shape, head.dtype):
        return False
    box = (slice(0, min(64, embedding.shape[0])), *(slice(0, n) for n in embedding.shape[1:]))
    first, second = (leaf.init.fill(torch.zeros(2, dtype=torch.int64), leaf.shape, box, leaf.dtype, torch.device("cpu"))
                     for leaf in (embedding, head))  # fmt: skip
    return torch.equal(first, second)


FILE = _T5File(
    Config, init, LEAVES.tensor, kind="", suffix=lambda cfg: f"{_CLASSES[cfg.model_type]}ForConditionalGeneration",
    fixed={"is_encoder_decoder": True},
    tied=dict.fromkeys([*(f"{stack}.embed_tokens.weight" for stack in _STACKS), "lm_head.weight"], "shared.weight"),
    ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),  # of the first files: not used
    sizes=lambda cfg: {**asdict(cfg), "num_decoder_layers": cfg.decoder_layers}, completed=_with_head_of,
)  # fmt: skip
theirs, config, load, save = file_functions(FILE)


__all__ = ["Cache", "Config", "Layout", "apply", "config", "decode", "encode", "generate", "init", "load", "loss",
           "save", "shifted", "specs", "theirs"]  # fmt: skip
