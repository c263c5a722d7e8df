"""Mixtral as pure functions: Llama with experts in each block; a router chooses some of them for each token.

No token is dropped: an expert computes however many tokens choose it. Experts may be split in width over `model`, or by
expert over any axis, with `Layout(experts=)`: every rank computes its own experts for the tokens of all.

Where two experts are about equally likely, rounding decides which a token goes to, which may differ between meshes. A
compiled program, whose shapes may not depend on values, computes every expert for every token.

Legend: B batch, T time, N the tokens of a rank, D width, E experts, F hidden width of an expert, V vocabulary;
[E@model] is a dim split over an axis; {V} varies over it, {I} does not.
Source: Jiang et al., 2024, "Mixtral of experts"; Fedus et al., 2021, "Switch transformers", for the balance loss; Zoph
et al., 2022, "ST-MoE", for the z-loss; weights as in Hugging Face `MixtralForCausalLM`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fshard import init as initial
from fshard import nn
from fshard._core.ops import local_range
from fshard._core.region import has_values
from fshard.collectives import all_gather, psum, psum_scatter, pvary
from fshard.errors import checked, fail, must_be
from fshard.interop.hf import FileTensor, FileTensors
from fshard.nn import rope
from fshard.schedule.unshard import unshard
from fshard.spec import Axis, P, names_of

from . import llama
from .activations import ACTIVATIONS
from .hf_files import file_functions, file_tensor
from .kv_cache import Cache, KeyValues
from .llama import Forward
from .transformer import (
    ONE_DEVICE,
    Layout,
    check_params,
    decoder_of,
    generate_of,
    head_logits,
    linear_params,
    shapes_of,
)

_THETA = 1e6  # of rotary positions


@checked
@dataclass(frozen=True)
class Config(llama.BaseConfig):
    """Sizes, rates and coefficients, named as in Hugging Face's `MixtralConfig`.

    Each token goes to `num_experts_per_tok` of `num_local_experts` experts, the likeliest, the first among equals.
    `loss` adds the load balancing loss of the router times `router_aux_loss_coef` if `output_router_logits`, as
    transformers does, and its z-loss times `router_z_loss_coef`, which transformers does not have.

    >>> mixtral.Config(num_hidden_layers=2).num_local_experts
    8
    """

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: rope.parameters({}, theta=_THETA), hash=False)
    sliding_window: int | None = None
    num_experts_per_tok: int = 2
    num_local_experts: int = 8
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    router_z_loss_coef: float = 0.0

    @property
    def windows(self) -> list[int | None]:
        """The sliding window of each layer, in tokens; None attends to all before."""
        return [self.sliding_window] * self.num_hidden_layers

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts_per_tok > self.num_local_experts:
            raise fail(f"mixtral.Config: {self.num_experts_per_tok} experts per token, of {self.num_local_experts}",
                       fix=f"num_experts_per_tok of 1 to {self.num_local_experts}")  # fmt: skip


@checked
def init(cfg: Config) -> Any:
    """Return the described parameters: matrices are drawn from N(0, initializer_range^2), norms are 1.

    >>> init(Config())["h"][0]["experts"]["down"]
    f32[8, 14336, 4096] = normal(std=0.02)
    """
    e, d, f, std = cfg.num_local_experts, cfg.hidden_size, cfg.intermediate_size, cfg.initializer_range

    def mlp() -> Any:
        shapes = {"gate": (e, d, f), "up": (e, d, f), "down": (e, f, d)}
        return {"router": linear_params((d,), (e,), std, bias=False),
                "experts": {name: initial.normal(shape, std=std) for name, shape in shapes.items()}}  # fmt: skip

    return llama.init_with(cfg, mlp)


@checked
def specs(cfg: Config, *, model: Axis = None, experts: Axis = None) -> Any:
    """Split heads, hidden units and the vocabulary over `model`, and experts over `experts`; replicate the rest.

    With `experts`, pass it to `Layout` too. `fs.fully_shard` adds a data axis.

    >>> specs(Config(), model="model", experts="model")["h"][0]["experts"]["down"]
    P('model')
    """
    width = tuple(name for name in names_of(model) if name not in names_of(experts)) or None
    hidden = P(experts, None, width)
    return llama.specs_with(cfg, model, {
        "router": P(), "experts": {"gate": hidden, "up": hidden, "down": P(experts, width)},
    })  # fmt: skip


@checked
def losses(
    cfg: Config, params: Any, ids: Tensor, targets: Tensor, *, layout: Layout = ONE_DEVICE, specs: Any = None,
    key: Tensor | None = None, remat: bool = False, mask: Tensor | None = None,
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
    x, top, outs = _forward(cfg, params, ids, names, layout=layout, specs=specs, key=key, remat=remat, mask=mask)
    logits = head_logits(cfg, layout, top, x, ids.shape[1])
    ce = nn.cross_entropy(logits, targets, axis=layout.model, size=cfg.vocab_size, over=layout.data, donate=True)
    counted = torch.ones_like(ids) if mask is None else mask != 0
    sums = torch.stack([s for _, s in outs]).sum(0) if outs else x.new_zeros(2 * cfg.num_local_experts + 1)
    rows = counted.sum() * cfg.num_hidden_layers
    sums = psum(sums, layout.model) if layout.sequence else sums  # each rank has its part of time
    sums, rows = psum((sums, rows), layout.data)
    chosen, probability, squares = (sums / rows.clamp(min=1)).split([cfg.num_local_experts, cfg.num_local_experts, 1])
    return {"cross_entropy": ce, "balance": cfg.num_local_experts * (chosen * probability).sum(), "z": squares.sum()}


@checked
def loss(
    cfg: Config, params: Any, ids: Tensor, targets: Tensor, *, layout: Layout = ONE_DEVICE, specs: Any = None,
    key: Tensor | None = None, remat: bool = False, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the mean cross-entropy in nats of all ranks, and the router's losses as `cfg` weighs them: [] {I}.

    Targets of -100 are ignored.

    >>> loss(cfg, params, ids, ids)
    tensor(3.52...)
    """
    parts = losses(cfg, params, ids, targets, layout=layout, specs=specs, key=key, remat=remat, mask=mask)
    out = parts["cross_entropy"] + cfg.router_z_loss_coef * parts["z"]
    return out + cfg.router_aux_loss_coef * parts["balance"] if cfg.output_router_logits else out


# --- the mixture ----------------------------------------------------------------------------------------------


def _forward(
    cfg: Config, params: Any, ids: Tensor, names: Sequence[str], *, layout: Layout, specs: Any, **options: Any
) -> tuple[Tensor, dict[str, Any], list[Any]]:
    """`llama.forward`, whose blocks return (cached keys and values, sums of the router).

    Experts that are split over the data axes are not unsharded: they go to the blocks as separate arguments.
    """
    data, axes = names_of(layout.data), names_of(layout.experts)
    layout.refuse_context("mixtral")
    described, mask = shapes_of(init, cfg), options["mask"]
    counted = (
        None if not isinstance(mask, Tensor) else layout.time_slice(mask[:, -ids.shape[1] :] != 0)
    )  # without cached tokens
    block = functools.partial(_block, counted=counted)
    _check_layout(layout)
    if not set(axes) & set(data):
        return llama.forward(cfg, params, ids, names, described, block, layout=layout, specs=specs, has_aux=True,
                             **options)  # fmt: skip
    if not isinstance(specs, Mapping) or not isinstance(specs.get("h"), Sequence):
        raise must_be("mixtral: specs", "the specs of all leaves", specs,
                      fix="those the parameters were placed with: experts are split over a data axis")  # fmt: skip
    check_params({"h": params.get("h")} if isinstance(params, Mapping) else params, {"h": described["h"]})
    rest = tuple(name for name in data if name not in axes) or None
    own = [(functools.partial(unshard, specs=s["experts"], axis=rest, shapes=d["experts"], dtype=layout.dtype,
                              reduce_dtype=layout.reduce_dtype), p["experts"])
           for p, s, d in zip(params["h"], specs["h"], described["h"], strict=True)]  # fmt: skip
    params, specs, described = (
        {**x, "h": [{**block, "experts": {}} for block in x["h"]]} for x in (params, specs, described)
    )
    return llama.forward(cfg, params, ids, names, described, block, layout=layout, specs=specs, has_aux=True, each=own,
                         **options)  # fmt: skip


def _check_layout(layout: Layout) -> None:
    """Raise ShardingError if experts are split over axes of two kinds."""
    axes = set(names_of(layout.experts))
    for kind in (layout.data, layout.model):
        if axes & set(names_of(kind)) and not axes <= set(names_of(kind)):
            raise fail(f"mixtral: experts={layout.experts!r} has axes of {kind!r} and others", layout=layout,
                       fix="split experts over axes of data, over axes of model, or over other axes")  # fmt: skip


def _block(
    run: Forward, p: Any, x: Tensor, key: Tensor | None, cached: KeyValues | None, window: int | None,
    unshard_experts: Callable[[Any], Any] | None = None, experts: Any = None, *, counted: Tensor | None,
) -> tuple[Tensor, tuple[KeyValues | None, Tensor]]:  # fmt: skip
    """Compute x + attention(norm(x)), then x + mixture(norm(x)); x [B, T, D]{I model}, or [B, T@model, D]."""
    cfg, layout, t = run.cfg, run.layout, run.tokens.t
    assert isinstance(cfg, Config)
    x, cached = run.attention(p, x, key, cached, window)
    h = run.norm(x, p["norm_2"])
    weights, sums = _route(cfg, h, layout.replicated(p["router"]["w"]), counted)
    both: Any = (h, weights)
    h, weights = layout.enter(both, t)  # [B, T, D] and [B, T, E]
    experts = p["experts"] if unshard_experts is None else unshard_experts(experts)
    out = _mixture(cfg, experts, h, weights, layout)
    return x + layout.leave(out), (cached, sums)


def _route(cfg: Config, h: Tensor, w: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose experts for the stream: h [B, T, D], w [D, E] -> their weights [B, T, E], 0 where not chosen, and sums.

    The sums [2E + 1], over the tokens of this rank that are `counted` [B, T]: how many chose each expert, its
    probabilities, and the squares of the log-sum-exp of the logits.
    """
    e, k = cfg.num_local_experts, cfg.num_experts_per_tok
    logits = nn.linear(h, w)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    p = logits.softmax(-1)
    # A stable sort, unlike topk, has one order of equal probabilities whatever the number of rows.
    chosen = F.one_hot(p.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k], e).sum(-2)  # [B, T, E]
    weights = p * chosen
    weights = weights / weights.sum(-1, keepdim=True)
    rows = torch.cat([chosen.to(p.dtype), p, logits.logsumexp(-1, keepdim=True).square()], -1)
    rows = rows if counted is None else rows * counted.unsqueeze(-1)
    return weights, rows.flatten(0, 1).sum(0)


def _mixture(cfg: Config, p: Any, h: Tensor, weights: Tensor, layout: Layout) -> Tensor:
    """Compute this rank's part of the mixture: h [B, T, D]{V model}, weights [B, T, E] -> [B, T, D], to be summed."""
    axis = layout.experts
    axes = set(names_of(axis))
    over_data = bool(axes) and axes <= set(names_of(layout.data))
    over_others = bool(axes) and not axes & {*names_of(layout.data), *names_of(layout.model)}
    n = len(p["gate"])
    if not axis and n != cfg.num_local_experts:
        raise fail(f"mixtral: this rank has {n} of {cfg.num_local_experts} experts", layout=layout,
                   fix="Layout(experts=), the axis that specs(experts=) splits them over")  # fmt: skip
    if over_data:  # the tokens of all ranks
        h, weights = all_gather((h, weights), axis)
    elif over_others:
        h, weights = pvary((h, weights), axis)
    if axis:
        start, _ = local_range("mixtral: experts", n, axis, cfg.num_local_experts)
        weights = weights[..., start : start + n]
    act = ACTIVATIONS[cfg.hidden_act]
    out = _of_experts(cfg, p, h.flatten(0, 1), weights.flatten(0, 1), act).view(h.shape)
    return psum_scatter(out, axis) if over_data else psum(out, axis) if over_others else out


def _of_experts(cfg: Config, p: Any, x: Tensor, weights: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    """Sum the experts' results: x [N, D], weights [N, E] -> [N, D]; gate, up [E, D, F] and down [E, F, D]."""

    def expert(i: int, x: Tensor) -> Tensor:
        return nn.linear(act(nn.linear(x, p["gate"][i])) * nn.linear(x, p["up"][i]), p["down"][i])

    n = len(p["gate"])
    if torch.compiler.is_dynamo_compiling():
        out = torch.zeros_like(x)
        for i in range(n):
            out = out + (expert(i, x) * weights[:, i : i + 1]).to(x.dtype)
        return out
    which, token, counts = _assignments(cfg, weights.detach())
    rows = torch.split(x[token], counts)  # the tokens of each expert; an expert without any computes an empty matrix
    y = torch.cat([x[:0], *(expert(i, row) for i, row in enumerate(rows))]) * weights[token, which].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, token, y.to(x.dtype))


def _assignments(cfg: Config, weights: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Return the pairs of (expert, token) with a weight [N, E], by expert, and their number for each expert.

    On an abstract mesh, without values, experts are assumed to have equally many tokens.
    """
    n, e = weights.shape
    if not has_values():
        each = n * cfg.num_experts_per_tok // cfg.num_local_experts
        pairs = torch.arange(each * e, device=weights.device)
        return pairs // max(1, each), pairs % max(1, n), [each] * e
    which, token = weights.t().nonzero(as_tuple=True)
    return which, token, (weights != 0).sum(0).tolist()


def _with_cache(*args: Any, **options: Any) -> tuple[Tensor, dict[str, Any], list[Any]]:
    x, top, outs = _forward(*args, **options)
    return x, top, [cached for cached, _ in outs]


apply, states = decoder_of(Config, init, _with_cache)
generate = generate_of(apply, Config)


# --- Hugging Face files ---------------------------------------------------------------------------------------

_EXPERTS = "block_sparse_moe.experts.*"  # every matrix of an expert is a tensor of its own
_BLOCK = {
    **llama.ATTENTION,
    "router.w": FileTensor("block_sparse_moe.gate.weight", "e d -> d e"),
    "experts.gate": FileTensors(f"{_EXPERTS}.w1.weight", "f d -> d f"),
    "experts.up": FileTensors(f"{_EXPERTS}.w3.weight", "f d -> d f"),
    "experts.down": FileTensors(f"{_EXPERTS}.w2.weight", "d f -> f d"),
}
FILE = replace(
    llama.FILE, config_class=Config, init=init,
    tensor=functools.partial(file_tensor, top=llama.TOP, block=_BLOCK, blocks=llama.BLOCKS),
    kind="Mixtral", fixed={"model_type": "mixtral", "layer_types": None, "router_jitter_noise": 0.0},
    other_fields=functools.partial(llama.rotary, theta=_THETA),
)  # fmt: skip
theirs, config, load, save = file_functions(FILE)


__all__ = ["Cache", "Config", "Layout", "apply", "config", "generate", "init", "load", "loss", "losses", "save",
           "specs", "states", "theirs"]  # fmt: skip
