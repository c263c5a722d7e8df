"""Mixtral as pure functions: Llama with experts in each block; a router chooses some of them for each token.

No token is dropped: an expert computes however many tokens choose it. Experts may be split in width over `model`, or by
expert over any axis, with `Layout(experts=)`: over a data axis, tokens go to the ranks of their experts and back.

Where two experts are about equally likely, rounding decides which a token goes to, which may differ between meshes. A
compiled program computes every expert for every token, but for bfloat16: see `nn.mixture`.

Legend: B batch, T time, N the tokens of a rank, D width, E experts, F hidden width of an expert, V vocabulary;
[E@model] is a dim split over an axis; {V} varies over it, {I} does not.
Source: Jiang et al., 2024, "Mixtral of experts"; Fedus et al., 2021, "Switch transformers", for the balance loss; Zoph
et al., 2022, "ST-MoE", for the z-loss; weights as in Hugging Face `MixtralForCausalLM`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard import nn, tree
from fshard.collectives import all_gather, axis_size, pslice, psum, pvary
from fshard.errors import checked, fail, must_be
from fshard.interop.hf import FileTensors
from fshard.nn import rope
from fshard.nn.experts import RouterSums, balance_of_sums, router_sums
from fshard.schedule.unshard import unshard
from fshard.spec import Axis, names_of

from . import llama
from .activations import ACTIVATIONS
from .hf_files import file_functions
from .kv_cache import Cache, KeyValues, Tokens
from .leaves import Leaf, Leaves, init_of, layer, leaf
from .transformer import ONE_DEVICE, Layout, Pieces, Run, check_params, decoder_of, functions_of, head_logits, shapes_of

_THETA = 1e6  # of rotary positions


class Experts(NamedTuple):
    """Sizes of the experts of a model."""

    number: int  # E, of a layer
    width: int  # F
    shared: int = 0  # hidden width of the experts that every token goes to, together
    dense_layers: frozenset[int] = frozenset()  # layers that have an MLP in the place of experts
    biased: bool = False  # True if a bias of each expert takes part in the choice


@dataclass(frozen=True)
class BaseConfig(llama.BaseConfig):
    """The options that Mixtral and its relatives share.

    Each token goes to `num_experts_per_tok` experts, the likeliest, the first among equals. `loss` adds the load
    balancing loss of the router times `router_aux_loss_coef` if `output_router_logits`, as transformers does, and its
    z-loss times `router_z_loss_coef`, which transformers does not have.
    """

    num_experts_per_tok: int = 2
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    router_z_loss_coef: float = 0.0

    @property
    def experts(self) -> Experts:
        """Sizes of the experts."""
        raise NotImplementedError

    def route(self, logits: Tensor, bias: Tensor | None) -> nn.Routing:
        """Choose experts by the logits [N, E]."""
        return nn.route(logits, self.num_experts_per_tok, renormalize=getattr(self, "norm_topk_prob", True))

    def weigh(self, balance: Any, z: Any) -> Any:
        """Return what the router's losses add to the loss."""
        out = self.router_z_loss_coef * z
        return out + self.router_aux_loss_coef * balance if self.output_router_logits else out

    def __post_init__(self) -> None:
        super().__post_init__()
        k, e = self.num_experts_per_tok, self.experts.number
        if k > e:
            raise fail(f"{type(self).__module__.rpartition('.')[2]}.Config: {k} experts per token, of {e}",
                       fix=f"num_experts_per_tok of 1 to {e}")  # fmt: skip


@checked
@dataclass(frozen=True)
class Config(BaseConfig):
    """Sizes, rates and coefficients, named as in Hugging Face's `MixtralConfig`; see `BaseConfig` for the router's.

    >>> mixtral.Config(num_hidden_layers=2).num_local_experts
    8
    """

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: rope.parameters({}, theta=_THETA), hash=False)
    sliding_window: int | None = None
    num_local_experts: int = 8

    @property
    def experts(self) -> Experts:
        return Experts(self.num_local_experts, self.intermediate_size)


def leaves(experts: str, router: str, gate: str, up: str, down: str) -> Leaves:
    """Return the leaves of a model whose experts' matrices, each a tensor, and router have these names in files."""

    def matrix(name: str, dims: str) -> Leaf:
        one = leaf(f"{experts}.{name}.weight", dims)
        return Leaf(FileTensors(one.file.name, one.file.dims), ("e", *one.dims))

    return Leaves(llama.decoder_leaves({
        **llama.MLP,  # of layers without experts
        "router.w": leaf(f"{router}.weight", "n d -> d n"),
        "router.b": leaf(f"{router}.e_score_correction_bias", "n"),
        "experts.gate": matrix(gate, "w d -> d w"),
        "experts.up": matrix(up, "w d -> d w"),
        "experts.down": matrix(down, "d w -> w d"),
        **layer("shared.gate", "mlp.shared_experts.gate_proj", "s d -> d s"),
        **layer("shared.up", "mlp.shared_experts.up_proj", "s d -> d s"),
        **layer("shared.down", "mlp.shared_experts.down_proj", "d s -> s d"),
    }), lambda cfg: {"h": cfg.num_hidden_layers}, _sizes, _has)  # fmt: skip


def _has(cfg: BaseConfig, name: str, i: int) -> bool:
    part, dense = name.partition(".")[0], i in cfg.experts.dense_layers
    if part in ("router", "experts", "shared"):
        return not dense and (part != "shared" or cfg.experts.shared > 0) and (name != "router.b" or cfg.experts.biased)
    return llama.has(cfg, name, i) and (dense or f"{part}.w" not in llama.MLP)


def _sizes(cfg: BaseConfig) -> dict[str, int]:
    e = cfg.experts
    return {**llama.sizes(cfg), "e": e.number, "n": e.number, "w": e.width, "s": e.shared}


LEAVES = leaves("block_sparse_moe.experts.*", "block_sparse_moe.gate", "w1", "w3", "w2")


init = init_of(LEAVES, BaseConfig)


@checked
def specs(cfg: BaseConfig, *, model: Axis = None, experts: Axis = None) -> Any:
    """Split heads, hidden units and the vocabulary over `model`, and experts over `experts`; replicate the rest.

    With `experts`, pass it to `Layout` too. `fs.fully_shard` adds a data axis.

    >>> specs(Config(), model="model", experts="model")["h"][0]["experts"]["down"]
    P('model')
    """
    width = tuple(name for name in names_of(model) if name not in names_of(experts)) or None
    return LEAVES.specs(cfg, {**dict.fromkeys("vgfs", model), "e": experts, "w": width})


@checked
def losses(
    cfg: BaseConfig, params: Any, ids: Tensor, targets: Tensor, *, layout: Layout = ONE_DEVICE, specs: Any = None,
    key: Tensor | None = None, remat: bool = False, mask: Tensor | None = None, documents: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the parts of the loss, each [] {I}: "cross_entropy", and of the router "balance" and "z".

    "balance" is E times the sum over experts of the share of tokens that choose it (K in all, for K experts per token)
    times its mean probability: K if balanced. "z" is the mean square of the log of the sum of exponentials of the
    router's logits. Both are over the tokens of all layers and ranks, without those that `mask` leaves out; of none
    they are 0.

    >>> losses(cfg, params, ids, ids)
    {'cross_entropy': tensor(3.5229), 'balance': tensor(2.2363), 'z': tensor(4.3002)}
    """
    names = [name for name in shapes_of(init, cfg) if name != "h"]
    layout, ids, targets, mask, documents = layout.to_zigzag(ids, targets, mask, documents)
    tokens = Tokens.of(ids, mask, None, documents, layout.context)
    x, top, outs = _forward(cfg, params, ids, names, layout=layout, specs=specs, key=key, remat=remat, mask=tokens)
    logits = head_logits(cfg, layout, top, x, ids.shape[1])
    ce = nn.cross_entropy(logits, targets, axis=layout.model, size=cfg.vocab_size, over=layout.examples or None,
                          donate=True)  # fmt: skip
    sums = tree.map(lambda *of_blocks: torch.stack(of_blocks).sum(0), no_sums(cfg, x), *[s for _, s in outs])
    sums = psum(sums, layout.model) if layout.sequence else sums  # each rank has its part of time
    balance = balance_of_sums(psum(sums, layout.examples))
    return {"cross_entropy": ce, "balance": balance.loss, "z": balance.z}


# --- the mixture ----------------------------------------------------------------------------------------------


def _forward(
    cfg: BaseConfig, params: Any, ids: Tensor, names: Sequence[str], *, layout: Layout, specs: Any,
    key: Tensor | None, mask: Tokens, **options: Any,
) -> tuple[Tensor, dict[str, Any], list[Any]]:  # fmt: skip
    """Return the stream after the last block, the unsharded parameters `names`, and what the blocks return.

    Experts that are split over the data axes are not unsharded: they go to the blocks as separate arguments.
    """
    described, each = shapes_of(init, cfg), []
    if splits_by_data(layout):
        if not isinstance(specs, Mapping) or not isinstance(specs.get("h"), Sequence):
            raise must_be("mixtral: specs", "the specs of all leaves", specs,
                          fix="those the parameters were placed with: experts are split over a data axis")  # fmt: skip
        check_params({"h": params.get("h")} if isinstance(params, Mapping) else params, {"h": described["h"]})
        each = [(functools.partial(unshard_experts, specs=s.get("experts", {}), described=d.get("experts", {}),
                                   layout=layout), p.get("experts", {}))
                for p, s, d in zip(params["h"], specs["h"], described["h"], strict=True)]  # fmt: skip
        params, specs, described = (
            {**x, "h": [{**block, "experts": {}} for block in x["h"]]} for x in (params, specs, described)
        )
    parts: Pieces = pieces(cfg, ids, layout=layout, key=key, mask=mask)
    if each:
        parts = parts._replace(each=[(*first, *more) for first, more in zip(parts.each or (), each, strict=True)])
    return parts.run(params, names, described=described, specs=specs, key=key, has_aux=True, **options)


def splits_by_data(layout: Layout) -> bool:
    """Return whether experts are split over axes of the data: then tokens go to them.

    Raises ShardingError if experts are split over some of model's axes and others, or over others and data's.
    """
    axes, data, model = (set(names_of(kind)) for kind in (layout.experts, layout.examples, layout.model))
    if not (axes <= data or axes <= model or model <= axes <= data | model or not axes & (data | model)):
        kind = layout.data if axes & data else layout.model
        raise fail(f"mixtral: experts={layout.experts!r} has axes of {kind!r} and others", layout=layout,
                   fix="split experts over axes of data, with all axes of model or without them; over axes of model; "
                       "or over other axes")  # fmt: skip
    return bool(axes & data)


def unshard_experts(experts: Any, *, specs: Any, described: Any, layout: Layout) -> Any:
    """Unshard experts that are split over axes of the data: over its other axes."""
    rest = tuple(name for name in layout.examples if name not in names_of(layout.experts)) or None
    return unshard(experts, specs, rest, shapes=described, dtype=layout.dtype, reduce_dtype=layout.reduce_dtype)


def _block(
    run: Run, p: Any, x: Tensor, key: Tensor | None, cached: KeyValues | None, window: int | None,
    unshard_experts: Callable[[Any], Any] | None = None, experts: Any = None,
) -> tuple[Tensor, tuple[KeyValues | None, RouterSums]]:  # fmt: skip
    """Compute x + attention(norm(x)), then x + mixture(norm(x)); x [B, T, D]{I model}, or [B, T@model, D]."""
    cfg, layout, t = run.cfg, run.layout, run.tokens.t
    x, cached = llama.attention(run, p, x, key, cached, window)
    h = llama.norm(run, x, p["norm_2"])
    if "router" not in p:
        return x + layout.leave(_mlp(cfg, p, layout.enter(h, t))), (cached, no_sums(cfg, x))
    w, b = p["router"]["w"], p["router"].get("b")
    routing = cfg.route(nn.linear(h, layout.replicated(w)).flatten(0, 1), None if b is None else layout.replicated(b))
    real = run.tokens.real
    sums = router_sums(routing, None if real is None else layout.time_slice(real).flatten())
    experts = p["experts"] if unshard_experts is None else unshard_experts(experts)
    over, model = set(names_of(layout.experts)), set(names_of(layout.model))
    if over & model and over - model:
        out = _mixture_over_all(cfg, experts, h, routing, layout)
        out = out + layout.leave(_mlp(cfg, p["shared"], layout.enter(h, t))) if "shared" in p else out
        return x + out, (cached, sums)
    both: Any = (h, [chosen.view(*h.shape[:2], -1) for chosen in routing[:2]])
    h, chosen = layout.enter(both, t)  # [B, T, D], and [B, T, K] twice
    routing = routing._replace(experts=chosen[0].flatten(0, 1), weights=chosen[1].flatten(0, 1))
    out = _mixture(cfg, experts, h.flatten(0, 1), routing, layout).view(h.shape)
    out = out + _mlp(cfg, p["shared"], h) if "shared" in p else out
    return x + layout.leave(out), (cached, sums)


pieces = llama.pieces_with(_block)


def no_sums(cfg: BaseConfig, x: Tensor) -> RouterSums:
    zeros = x.new_zeros(cfg.experts.number, dtype=torch.promote_types(x.dtype, torch.float32))
    return RouterSums(zeros.long(), zeros.sum().long(), zeros, zeros.sum())


def _mlp(cfg: BaseConfig, p: Any, h: Tensor) -> Tensor:
    """Compute this rank's part of an MLP, to be summed."""
    return nn.linear(llama.hidden_units(cfg, p, h), p["down"]["w"])


def _mixture(cfg: BaseConfig, p: Any, h: Tensor, routing: nn.Routing, layout: Layout) -> Tensor:
    """Compute this rank's part of the mixture: h [N, D]{V model} -> [N, D], to be summed."""
    axis, run = layout.experts, functools.partial(_experts, cfg)
    axes = set(names_of(axis))
    if not axes and len(p["gate"]) != cfg.experts.number:
        raise fail(f"mixtral: this rank has {len(p['gate'])} of {cfg.experts.number} experts", layout=layout,
                   fix="Layout(experts=), the axis that specs(experts=) splits them over")  # fmt: skip
    if not axes or axes <= set(layout.examples):  # ranks have different tokens
        method: Any = "gather" if 1 < axis_size(axis) < cfg.num_experts_per_tok else "rows"
        return nn.mixture(h, routing, p, run, axis=axis, method=method)
    if axes & set(names_of(layout.model)):
        return nn.mixture(h, routing, p, run, axis=axis, method="partial")
    h, routing = pvary((h, routing), axis)
    return psum(nn.mixture(h, routing, p, run, axis=axis, method="partial"), axis)


def _mixture_over_all(cfg: BaseConfig, p: Any, h: Tensor, routing: nn.Routing, layout: Layout) -> Tensor:
    """Compute the mixture of experts over axes of data and model: the stream -> the stream.

    Ranks of `model` take different tokens.
    """
    x, run = h.flatten(0, 1), functools.partial(_experts, cfg)
    if layout.sequence:
        return nn.mixture(x, routing, p, run, axis=layout.experts).view(h.shape)
    part, routing = pslice((x, routing), layout.model)
    out = nn.mixture(part, routing, p, run, axis=layout.experts)
    return all_gather(out, layout.model, size=len(x), to="invariant").view(h.shape)


def _experts(cfg: BaseConfig, p: Any, rows: Tensor, counts: Sequence[int]) -> Tensor:
    gate, up = (nn.grouped_linear(rows, p[name], counts) for name in ("gate", "up"))
    return nn.grouped_linear(ACTIVATIONS[cfg.hidden_act](gate) * up, p["down"], counts)


def _with_cache(*args: Any, **options: Any) -> tuple[Tensor, dict[str, Any], list[Any]]:
    x, top, outs = _forward(*args, **options)
    return x, top, [cached for cached, _ in outs]


apply, states = decoder_of(BaseConfig, init, pieces, forward=_with_cache)
loss, generate = functions_of(apply, Config, losses)


# --- Hugging Face files ---------------------------------------------------------------------------------------


FILE = replace(
    llama.FILE, config_class=Config, init=init, tensor=LEAVES.tensor,
    kind="Mixtral", fixed={"model_type": "mixtral", "layer_types": None, "router_jitter_noise": 0.0},
    other_fields=functools.partial(llama.rotary, theta=_THETA),
)  # fmt: skip
theirs, config, load, save = file_functions(FILE)


__all__ = ["Cache", "Config", "Layout", "apply", "config", "generate", "init", "load", "loss", "losses", "save",
           "specs", "states", "theirs"]  # fmt: skip
