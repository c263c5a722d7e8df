"""BERT as pure functions: an encoder with heads for pretraining and sentence embeddings, split as its specs say.

Legend: B batch, T time, D width, H heads, K head width, F hidden width, V vocabulary; [H@model] is a dim split over an
axis; {V} varies over it, {I} does not. Source: Devlin et al., 2018; weights as in Hugging Face `BertForPreTraining`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fshard import init as initial
from fshard import nn
from fshard._core.ops import global_size, own_range
from fshard.errors import checked, fail, must_be, raise_all
from fshard.interop.hf import WeightHeaders
from fshard.nn.decoding import check_ids

from .activations import ACTIVATIONS
from .hf_files import ModelFile, file_functions
from .leaves import Leaves, in_blocks, layer, leaf, specs_of
from .transformer import ONE_DEVICE, Layout, apply_blocks, config_errors, flat_linear, project_heads, shapes_of

_EMBEDDINGS = ("word", "position", "type", "ln")
_HEADS = {"mlm": "cls.predictions.", "pooler": "pooler.", "nsp": "cls.seq_relationship."}  # prefixes of their tensors


@checked
@dataclass(frozen=True)
class Config:
    """Sizes and rates, named as in Hugging Face's `BertConfig`, and the heads of the model.

    `mlm` predicts masked words, `pooler` summarizes a sequence at its first token, and `nsp`, on top of it, predicts
    whether a second sentence follows the first. A config.json does not list them: `load` finds them in a folder, and
    `config` takes them as options. The embedding of `pad_token_id` is initialized to zero and not trained.

    >>> bert.Config(num_hidden_layers=2).hidden_size
    768
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    mlm: bool = True
    pooler: bool = False
    nsp: bool = False

    def __post_init__(self) -> None:
        errors, pad = config_errors("bert.Config", self, own=("pad_token_id",)), self.pad_token_id
        if pad is not None and not 0 <= pad < self.vocab_size:
            errors.append(fail(f"bert.Config: pad_token_id={pad} is not in a vocabulary of {self.vocab_size}",
                               fix="one of its words, or None"))  # fmt: skip
        if self.nsp and not self.pooler:
            errors.append(fail("bert.Config: nsp=True without a pooler", fix="pooler=True"))
        raise_all(errors)


LEAVES = Leaves({  # the matrices in the file are [out, in]
    "word": leaf("bert.embeddings.word_embeddings.weight", "v d"),
    "position": leaf("bert.embeddings.position_embeddings.weight", "p d"),
    "type": leaf("bert.embeddings.token_type_embeddings.weight", "t d"),
    **layer("ln", "bert.embeddings.LayerNorm", "d", "d"),
    **in_blocks("h", "bert.encoder.layer", {
        **layer("q", "attention.self.query", "(h k) d -> d h k", "(h k) -> h k"),
        **layer("k", "attention.self.key", "(h k) d -> d h k", "(h k) -> h k"),
        **layer("v", "attention.self.value", "(h k) d -> d h k", "(h k) -> h k"),
        **layer("proj", "attention.output.dense", "d (h k) -> h k d", "d"),
        **layer("ln_1", "attention.output.LayerNorm", "d", "d"),
        **layer("up", "intermediate.dense", "f d -> d f", "f"),
        **layer("down", "output.dense", "d f -> f d", "d"),
        **layer("ln_2", "output.LayerNorm", "d", "d"),
    }),
    **layer("mlm.dense", "cls.predictions.transform.dense", "o d -> d o", "o"),
    **layer("mlm.ln", "cls.predictions.transform.LayerNorm", "d", "d"),
    "mlm.b": leaf("cls.predictions.bias", "v"),
    **layer("pooler", "bert.pooler.dense", "o d -> d o", "o"),
    **layer("nsp", "cls.seq_relationship", "l d -> d l", "l"),
}, blocks=lambda cfg: {"h": cfg.num_hidden_layers},
   has=lambda cfg, name, _: bool(getattr(cfg, name.partition(".")[0], True)),
   sizes=lambda cfg: {"v": cfg.vocab_size, "p": cfg.max_position_embeddings, "t": cfg.type_vocab_size,
                      "d": cfg.hidden_size, "o": cfg.hidden_size, "h": cfg.num_attention_heads,
                      "k": cfg.hidden_size // cfg.num_attention_heads, "f": cfg.intermediate_size,
                      "l": 2})  # fmt: skip


@checked
def init(cfg: Config) -> Any:
    """Return the described parameters: matrices, embeddings N(0, initializer_range^2), norms 1, biases and padding 0.

    >>> list(init(cfg))
    ['word', 'position', 'type', 'ln', 'h', 'mlm']
    """
    params = LEAVES.init(cfg)
    if cfg.pad_token_id is not None:
        params["word"] = initial.zero_row(params["word"], cfg.pad_token_id)
    return params


specs = specs_of(LEAVES, Config)


@checked
def apply(
    cfg: Config, params: Any, ids: Tensor, *, mask: Tensor | None = None, types: Tensor | None = None,
    layout: Layout = ONE_DEVICE, specs: Any = None, key: Tensor | None = None, remat: bool = False,
) -> Tensor:  # fmt: skip
    """Return the last hidden states: ids [B@data, T] -> [B@data, T, D]{I model}; no layout splits them along time.

    `mask` [B@data, T] is 0 for padding, which no token attends to and whose states have no meaning. `types`
    [B@data, T] is 0 for the first sentence (the default) and 1 for the second. `params` are as placed. Pass their
    `specs` if they vary over `layout.data` or are split over it (FSDP): each block is then unsharded just before it
    runs. `key` turns dropout on; `remat` recomputes blocks in backward.

    >>> apply(cfg, params, ids).shape
    torch.Size([2, 4, 16])
    """
    top = _unshard(cfg, params, layout, specs, *_EMBEDDINGS)
    x = _encode(cfg, params, top, ids, layout, specs, mask=mask, types=types, key=key, remat=remat)
    return layout.whole(x, ids.shape[1])


def _unshard(cfg: Config, params: Any, layout: Layout, specs: Any, *names: str) -> Any:
    """Unshard these parts of the parameters. Raises ShardingError for a head that the config does not have."""
    described = shapes_of(init, cfg)
    raise_all([fail(f"bert: the config has no {n}", fix=f"Config({n}=True); a loaded one has the heads of its file")
               for n in names if n not in described])  # fmt: skip
    return layout.unshard(names, params, specs, described)


def _encode(
    cfg: Config, params: Any, top: Any, ids: Tensor, layout: Layout, specs: Any, *, mask: Tensor | None = None,
    types: Tensor | None = None, key: Tensor | None = None, remat: bool = False,
) -> Tensor:  # fmt: skip
    """Return the stream after the last block, [B, T, D]{I model}, or [B, T@model, D] under sequence parallelism."""
    check_ids("bert", ids)
    t = ids.shape[1]
    errors = [must_be(f"bert: {name}", "a Tensor or None", x) if not isinstance(x, Tensor) else
              fail(f"bert: {name} must have one entry for each token", got=list(x.shape), needed=list(ids.shape))
              for name, x in (("mask", mask), ("types", types))
              if x is not None and (not isinstance(x, Tensor) or x.shape != ids.shape)]  # fmt: skip
    size = global_size("bert", t, layout.context) if layout.context else t
    if size > cfg.max_position_embeddings:
        errors.append(fail(f"bert: {size} tokens do not fit {cfg.max_position_embeddings} positions",
                           fix="a larger max_position_embeddings"))  # fmt: skip
    raise_all(errors)
    layout.refuse_zigzag("bert")
    layout = layout.with_batch(ids, key, cfg.hidden_dropout_prob, cfg.attention_probs_dropout_prob)
    x = layout.embed(ids, top["word"], cfg.vocab_size)
    if cfg.pad_token_id is not None:  # the embedding of padding has no gradient
        x = torch.where(layout.time_slice(ids != cfg.pad_token_id).unsqueeze(-1), x, x.detach())
    table = layout.replicated(top["type"])
    x = x + (table[0] if types is None else nn.embedding(layout.time_slice(types), table))
    first, _ = own_range("bert", size, layout.context)
    x = x + layout.time_slice(top["position"][first : first + t], 0)
    x = layout.dropout(layout.layer_norm(x, top["ln"], cfg.layer_norm_eps), cfg.hidden_dropout_prob, key, "embd", size)
    attended = None if mask is None else mask != 0
    out: Tensor
    out, _ = apply_blocks(lambda p, x, key, _: (_block(cfg, p, x, layout, key, t, size, attended), None), params, x,
                          layout=layout, described=shapes_of(init, cfg), specs=specs, key=key, remat=remat)  # fmt: skip
    return out


def _block(
    cfg: Config, p: Any, x: Tensor, layout: Layout, key: Tensor | None, t: int, size: int, attended: Tensor | None
) -> Tensor:
    """Compute norm(x + attention(x)), then norm(x + mlp(x)); x [B, T, D]{I model}, or [B, T@model, D].

    A rank has `t` positions of `size`.
    """
    h = layout.enter(x, t)
    q, k, v = (project_heads(h, p[name]) for name in ("q", "k", "v"))  # each [B, H@model, T, K]
    shape = (len(q), cfg.num_attention_heads, size, size)
    dropout = layout.weight_dropout(cfg.attention_probs_dropout_prob, key, shape)
    if layout.context:
        a = nn.context_attention(q, k, v, layout.context, order="contiguous", causal=False, mask=attended,
                                 size=size, **dropout)  # fmt: skip
    else:
        mask = None if attended is None else attended[:, None, None, :]  # [B, 1, 1, T]
        a = nn.attention(q, k, v, mask=mask, **dropout)
    a = layout.row_linear(a.transpose(1, 2).flatten(2), p["proj"]["w"].flatten(0, 1), p["proj"]["b"])
    a = layout.dropout(a, cfg.hidden_dropout_prob, key, "proj", size)
    x = layout.layer_norm(x + a, p["ln_1"], cfg.layer_norm_eps)

    h = ACTIVATIONS[cfg.hidden_act](nn.linear(layout.enter(x, t), p["up"]["w"], p["up"]["b"]))  # [B, T, F@model]
    h = layout.row_linear(h, p["down"]["w"], p["down"]["b"])
    x = x + layout.dropout(h, cfg.hidden_dropout_prob, key, "down", size)
    return layout.layer_norm(x, p["ln_2"], cfg.layer_norm_eps)


@checked
def logits(
    cfg: Config, params: Any, ids: Tensor, *, layout: Layout = ONE_DEVICE, specs: Any = None, **options: Any
) -> Tensor:
    """Return logits of the word at each position: ids [B@data, T] -> [B@data, T, V@model]; `options` as of `apply`.

    >>> logits(cfg, params, ids).shape
    torch.Size([2, 4, 32])
    """
    top = _unshard(cfg, params, layout, specs, *_EMBEDDINGS, "mlm")
    x = _encode(cfg, params, top, ids, layout, specs, **options)
    head = top["mlm"]
    x = ACTIVATIONS[cfg.hidden_act](flat_linear(x, layout.replicated(head["dense"])))
    x = layout.layer_norm(x, head["ln"], cfg.layer_norm_eps)
    return nn.linear(layout.enter(x, ids.shape[1]), top["word"].transpose(0, 1), head["b"])


@checked
def loss(
    cfg: Config, params: Any, ids: Tensor, targets: Tensor, *, layout: Layout = ONE_DEVICE, **options: Any
) -> Tensor:
    """Return the mean cross-entropy in nats over the targets of all ranks: [] {I}. Targets of -100 are ignored.

    `options` as in `apply`.

    >>> loss(cfg, params, ids, ids)
    tensor(3.47...)
    """
    out = logits(cfg, params, ids, layout=layout, **options)
    return nn.cross_entropy(out, targets, axis=layout.model, size=cfg.vocab_size, over=layout.examples or None,
                            donate=True)  # fmt: skip


@checked
def embed(cfg: Config, params: Any, ids: Tensor, *, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Return sentence embeddings of length 1: ids [B@data, T] -> [B@data, D]{I model}; `options` as in `apply`.

    The dot product of two is the cosine of their angle. Source: Reimers & Gurevych, 2019, "Sentence-BERT".

    >>> embed(cfg, params, ids).shape
    torch.Size([2, 16])
    """
    options.get("layout", ONE_DEVICE).refuse_context("bert.embed")
    return F.normalize(pool(apply(cfg, params, ids, mask=mask, **options), mask), dim=-1)


@checked
def pool(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Average the states over the tokens whose mask is not 0: x [B, T, D], mask [B, T] -> [B, D].

    >>> pool(torch.tensor([[[1.0], [3.0], [8.0]]]), torch.tensor([[1, 1, 0]]))
    tensor([[2.]])
    """
    if mask is None:
        return x.mean(1)
    real = (mask != 0).to(x.dtype).unsqueeze(-1)
    return (x * real).sum(1) / real.sum(1).clamp(min=1e-9)


@checked
def pooled(cfg: Config, params: Any, x: Tensor, *, layout: Layout = ONE_DEVICE, specs: Any = None) -> Tensor:
    """Return the pooler's summary of each sequence: hidden states [B@data, T, D] of `apply` -> [B@data, D]{I model}.

    >>> cfg = bert.Config(32, 16, 1, 2, 32, pooler=True)
    >>> params = fs.device_get(fs.materialize(init(cfg), P(), mesh, key=fs.key(0)))
    >>> pooled(cfg, params, apply(cfg, params, ids)).shape
    torch.Size([2, 16])
    """
    layout.refuse_context("bert.pooled")
    p = _unshard(cfg, params, layout, specs, "pooler")["pooler"]
    return torch.tanh(flat_linear(x[:, 0], p))


@checked
def follows(cfg: Config, params: Any, x: Tensor, *, layout: Layout = ONE_DEVICE, specs: Any = None) -> Tensor:
    """Return logits that the second sentence follows the first (0) or not (1): x of `pooled` -> [B@data, 2]{I model}.

    >>> cfg = bert.Config(32, 16, 1, 2, 32, pooler=True, nsp=True)
    >>> params = fs.device_get(fs.materialize(init(cfg), P(), mesh, key=fs.key(0)))
    >>> follows(cfg, params, pooled(cfg, params, apply(cfg, params, ids))).shape
    torch.Size([2, 2])
    """
    return flat_linear(x, _unshard(cfg, params, layout, specs, "nsp")["nsp"])


# --- Hugging Face files ---------------------------------------------------------------------------------------


def _with_heads_of(cfg: Config, headers: WeightHeaders) -> Config:
    names = [n.removeprefix("bert.") for n in headers.tensors]
    found: dict[str, Any] = {head: any(n.startswith(start) for n in names) for head, start in _HEADS.items()}
    return replace(cfg, **found)


def _name_in(name: str, names: Collection[str]) -> str:
    """Return the name of a tensor: a norm has gamma and beta in files that were converted from TensorFlow's."""
    old = name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
    return old if old in names or old.removeprefix("bert.") in names else name


FILE = ModelFile(
    Config, init, LEAVES.tensor,
    kind="Bert", suffix=lambda cfg: "ForPreTraining" if cfg.nsp else "ForMaskedLM" if cfg.mlm else "Model",
    prefix="bert.", ignored=("embeddings.position_ids",),
    fixed={"model_type": "bert", "is_decoder": False, "add_cross_attention": False, "tie_word_embeddings": True,
           "position_embedding_type": "absolute"},
    tied={"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
          "cls.predictions.decoder.bias": "cls.predictions.bias"},
    sizes=lambda cfg: {name: value for name, value in asdict(cfg).items() if name not in _HEADS},
    name_in=_name_in, completed=_with_heads_of,
)  # fmt: skip
theirs, config, load, save = file_functions(FILE)


__all__ = [
    "Config", "Layout", "apply", "config", "embed", "follows", "init", "load", "logits", "loss", "pool", "pooled",
    "save", "specs", "theirs",
]  # fmt: skip
